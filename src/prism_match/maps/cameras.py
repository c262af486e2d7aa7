"""Cameras for a reconstruction: from EXIF, shared or not, or with given intrinsics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prism_match.cameras import CAMERA_MODELS
from prism_match.config import Sharing
from prism_match.errors import UserError
from prism_match.files import read_words

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

    cameras: list[dict[str, Any]]  # model, width, height, params, prior (whether the focal length is known)
    of_image: dict[str, int]  # row in `cameras`


@dataclass(frozen=True)
class Exif:
    camera: tuple[str, ...]  # make, model, lens, focal length: the same for images that can share a camera
    focal: float | None  # pixels of the longer side, where it can be told


def choose_cameras(images: Mapping[str, tuple[Path | None, Size]], options: CameraOptions) -> Cameras:
    """images: file (None where it is not at hand) and size by name."""
    if options.intrinsics is not None:
        return given_cameras(images, options.intrinsics)
    cameras: list[dict[str, Any]] = []
    of_image: dict[str, int] = {}
    rows: dict[Any, int] = {}
    for name, (path, size) in images.items():
        exif = read_exif(path, size) if path is not None else Exif((), None)
        key = camera_key(name, size, exif, options.sharing)
        if key not in rows:
            rows[key] = len(cameras)
            cameras.append(make_camera(options.model, size, exif.focal))
        of_image[name] = rows[key]
    return Cameras(cameras, of_image)


def camera_key(name: str, size: Size, exif: Exif, sharing: Sharing) -> Any:
    if sharing == "per-image":
        return name
    if sharing == "shared":
        return size
    # Photos without EXIF may come from anywhere.
    return (size, exif.camera) if exif.camera else name


def make_camera(model: str, size: Size, focal: float | None) -> dict[str, Any]:
    width, height = size
    count, focals = CAMERA_MODELS[model]
    length = UNKNOWN_FOCAL * max(size) if focal is None else focal
    params = [length] * focals + [width / 2, height / 2] + [0.0] * (count - focals - 2)
    return {"model": model, "width": width, "height": height, "params": params, "prior": focal is not None}


def given_cameras(images: Mapping[str, tuple[Path | None, Size]], intrinsics: str) -> Cameras:
    by_name = read_intrinsics(Path(intrinsics)) if Path(intrinsics).is_file() else None
    for_all = None if by_name is not None else parse_numbers(intrinsics)
    cameras: list[dict[str, Any]] = []
    of_image: dict[str, int] = {}
    rows: dict[Any, int] = {}
    for name, (_, size) in images.items():
        k = for_all if by_name is None else by_name.get(name)
        if k is None:
            raise UserError(f"{intrinsics}: no line for {name}")
        if (k, size) not in rows:
            rows[k, size] = len(cameras)
            params = [*k[:2], k[2] + 0.5, k[3] + 0.5]
            cameras.append(
                {"model": "PINHOLE", "width": size[0], "height": size[1], "params": params, "prior": True}
            )
        of_image[name] = rows[k, size]
    return Cameras(cameras, of_image)


def parse_numbers(text: str) -> tuple[float, ...]:
    try:
        return check_numbers(text.replace(",", " ").split())
    except ValueError as error:
        raise UserError(
            f"intrinsics are fx,fy,cx,cy or a file with lines of image fx fy cx cy, not {text!r} ({error})"
        ) from error


def read_intrinsics(path: Path) -> dict[str, tuple[float, ...]]:
    """`image fx fy cx cy` a line; whatever follows on the line is left alone."""
    result = {}
    for n, words in read_words(path):
        try:
            result[words[0]] = check_numbers(words[1:5])
        except ValueError as error:
            raise UserError(f"{path}, line {n}: not image fx fy cx cy ({error})") from error
    return result


def check_numbers(words: list[str]) -> tuple[float, ...]:
    numbers = tuple(float(word) for word in words)
    if len(numbers) != 4:
        raise ValueError(f"{len(numbers)} numbers instead of 4")
    if not np.isfinite(numbers).all() or min(numbers[:2]) <= 0:
        raise ValueError("focal lengths must be positive")
    return numbers


def read_exif(path: Path, size: Size) -> Exif:
    """What the file says about its camera; nothing where it says nothing."""
    import PIL.Image

    try:
        with PIL.Image.open(path) as image:
            exif = image.getexif()
            details = exif.get_ifd(0x8769)
    except (OSError, ValueError, SyntaxError):
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
