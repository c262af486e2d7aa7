"""Cameras for a reconstruction: from EXIF, shared or not, or with given intrinsics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prism_match.cameras import CAMERA_MODELS
from prism_match.config import Sharing
from prism_match.errors import UserError
from prism_match.files import read_words
from prism_match.images import known_formats, quiet_pillow

Size = tuple[int, int]  # width, height

UNKNOWN_FOCAL = 1.2  # times the longer side, where nothing is known: what COLMAP begins with
FILM_WIDTH = 36.0  # millimetres of the 35 mm film that EXIF compares with
MILLIMETRES = {2: 25.4, 3: 10.0}  # EXIF's units of resolution: inch, centimetre
MODELS = ("SIMPLE_PINHOLE", "PINHOLE", "SIMPLE_RADIAL", "RADIAL", "OPENCV")  # that are estimated


@dataclass(frozen=True)
class CameraOptions:
    sharing: Sharing = "auto"  # auto: images of one size from the same EXIF camera and lens setting
    model: str = "SIMPLE_RADIAL"
    intrinsics: str | None = None  # "fx,fy,cx,cy" in our pixels, or a file with a line for each image

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise UserError(f"the camera model must be one of {', '.join(MODELS)}, not {self.model}")


@dataclass(frozen=True)
class Cameras:
    """As COLMAP has them: its pixels begin with the centre of the first one at (0.5, 0.5)."""

    cameras: list[dict[str, Any]]  # what pycolmap.Camera takes
    of_image: dict[str, int]  # row in `cameras`


@dataclass(frozen=True)
class Exif:
    camera: tuple[str, ...]  # make, model, lens, focal length: the same for images that can share a camera
    focal: float | None  # pixels of the longer side, where it can be told


def choose_cameras(images: Mapping[str, tuple[Path | None, Size]], options: CameraOptions) -> Cameras:
    """images: file (None where it is not at hand) and size by name."""
    given = None if options.intrinsics is None else read_intrinsics(options.intrinsics, images)
    cameras: dict[Any, dict[str, Any]] = {}  # by what tells them apart
    keys: dict[str, Any] = {}
    for name, (path, size) in images.items():
        width, height = size
        if given is not None:
            keys[name] = given[name], size
            fx, fy, cx, cy = given[name]
            model, params, known = "PINHOLE", [fx, fy, cx + 0.5, cy + 0.5], True
        else:
            exif = read_exif(path, size)
            keys[name] = camera_key(name, size, exif, options.sharing)
            model, known = options.model, exif.focal is not None
            count, focals = CAMERA_MODELS[model]
            focal = [exif.focal or UNKNOWN_FOCAL * max(size)] * focals
            params = [*focal, width / 2, height / 2] + [0.0] * (count - focals - 2)
        camera = {"model": model, "width": width, "height": height, "params": params}
        cameras.setdefault(keys[name], camera | {"has_prior_focal_length": known})
    rows = {key: n for n, key in enumerate(cameras)}
    return Cameras(list(cameras.values()), {name: rows[key] for name, key in keys.items()})


def camera_key(name: str, size: Size, exif: Exif, sharing: Sharing) -> Any:
    if sharing == "per-image":
        return name
    if sharing == "shared":
        return size
    # Photos without EXIF may come from anywhere.
    return (size, exif.camera) if exif.camera else name


def read_intrinsics(text: str, names: Iterable[str]) -> dict[str, tuple[float, ...]]:
    """fx fy cx cy of each image: those four for all, or a file of `image fx fy cx cy` lines, where whatever
    follows on a line is left alone."""
    wanted = "image fx fy cx cy"
    if Path(text).is_file():
        known = {}
        for n, words in read_words(Path(text)):
            try:
                known[words[0]] = check_numbers(words[1:5])
            except ValueError as error:
                raise UserError(f"{text}, line {n}: not {wanted} ({error})") from error
        missing = [name for name in names if name not in known]
        if missing:
            raise UserError(f"{text}: no line for {missing[0]}")
        return known
    try:
        return dict.fromkeys(names, check_numbers(text.replace(",", " ").split()))
    except ValueError as error:
        reason = f"fx,fy,cx,cy or a file with lines of {wanted}, not {text!r} ({error})"
        raise UserError(f"intrinsics are {reason}") from error


def check_numbers(words: list[str]) -> tuple[float, ...]:
    numbers = tuple(float(word) for word in words)
    if len(numbers) != 4:
        raise ValueError(f"{len(numbers)} numbers instead of 4")
    if not np.isfinite(numbers).all() or min(numbers[:2]) <= 0:
        raise ValueError("focal lengths must be positive")
    return numbers


def read_exif(path: Path | None, size: Size) -> Exif:
    """What the file says about its camera; nothing where it says nothing, or there is none."""
    import PIL.Image

    if path is None:
        return Exif((), None)
    try:
        with quiet_pillow(), PIL.Image.open(path, formats=known_formats()) as image:
            exif = image.getexif()
            details = exif.get_ifd(0x8769)
    except Exception:  # damaged metadata fails in every way there is, and is as good as none
        return Exif((), None)
    film, focal = number(details.get(0xA405)), number(details.get(0x920A))
    resolution, unit = number(details.get(0xA20E)), MILLIMETRES.get(details.get(0xA210, 2))
    pixels = None
    if film:
        pixels = film / FILM_WIDTH * max(size)
    elif focal and resolution and unit:
        # The resolution is that of the sensor's full image; a smaller copy has fewer pixels.
        full = number(details.get(0xA002)), number(details.get(0xA003))
        scale = max(size) / max(full) if all(full) else 1.0
        pixels = focal * resolution / unit * scale
    if pixels is not None and not 0.1 < pixels / max(size) < 20:  # nonsense, as it happens in old files
        pixels = None
    camera = (exif.get(0x010F), exif.get(0x0110), details.get(0xA434), film or focal)
    return Exif(tuple(map(str, camera)) if pixels is not None else (), pixels)


def number(value: Any) -> float:
    """0 where it is none."""
    try:
        result = float(value)
    except (TypeError, ValueError, ZeroDivisionError):
        return 0.0
    return result if np.isfinite(result) and result > 0 else 0.0
