"""Files, arrays and tensors become one image type."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import cv2
import numpy as np

from prism_match.errors import UserError
from prism_match.files import atomic_path, is_file

if TYPE_CHECKING:
    import PIL.Image
    import torch

ImageLike: TypeAlias = "str | os.PathLike[str] | PIL.Image.Image | np.ndarray | torch.Tensor | Image"

SMALLEST = 32  # pixels a side
ORIENTATION = 0x0112  # the EXIF tag
BOMB = "refused as a possible decompression bomb"
HELD = 2**26  # bytes of pixels that a file may tell of, however small it is
PACKED = 2000  # bytes of pixels beyond that, to a byte of the file: more than compression achieves
STRIP = 2**20  # pixels that are made gray at a time: as numbers of 32 bits, colours take four times the room
# Pillow knows many more, some of which start other programs.
FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "TIFF", "BMP", "PPM", "GIF", "JPEG2000", "AVIF")
_pillow = threading.Lock()


@dataclass(frozen=True)
class Image:
    """Pixels as they are shown: upright, gray or RGB."""

    pixels: np.ndarray  # h w or h w 3, uint8, or float32 in [0, 1]
    name: str  # the path, or what kind of object it came from
    opaque: np.ndarray | None = None  # h w, bool: what an alpha channel leaves to be seen; None: everything

    @property
    def size(self) -> tuple[int, int]:
        """Width, height."""
        return self.pixels.shape[1], self.pixels.shape[0]

    @cached_property
    def gray(self) -> np.ndarray:
        """h w, float32 in [0, 1]."""
        x = self.pixels
        if x.ndim == 2:
            return np.divide(x, 255, dtype=np.float32) if x.dtype == np.uint8 else x
        gray = np.empty(x.shape[:2], np.float32)
        rows = max(1, STRIP // x.shape[1])
        for top in range(0, len(x), rows):
            strip = x[top : top + rows]
            strip = np.divide(strip, 255, dtype=np.float32) if x.dtype == np.uint8 else strip
            gray[top : top + rows] = cv2.cvtColor(strip, cv2.COLOR_RGB2GRAY)
        return gray

    @cached_property
    def rgb(self) -> np.ndarray:
        """h w 3, uint8, for pictures."""
        x = self.pixels
        x = x if x.dtype == np.uint8 else (x * 255).round().astype(np.uint8)
        return np.repeat(x[..., None], 3, axis=2) if x.ndim == 2 else x


def load_image(source: ImageLike) -> Image:
    """Any of: a path, a PIL image, an array (h w or h w 1|3|4; 8 or 16 bit, or float in [0, 1]) or a
    tensor (the same, channels first). Colours are RGB; what an alpha channel hides is not matched."""
    image = to_image(source, "an image")
    # What is an `Image` was looked at when it was read: a long one may have become narrow since.
    if image is not source and min(image.size) < SMALLEST:
        width, height = image.size
        raise UserError(
            f"{image.name}: too small ({width}x{height}); at least {SMALLEST} pixels a side are needed"
        )
    return image


def to_image(source: ImageLike, what: str) -> Image:
    if isinstance(source, Image):
        return source
    if isinstance(source, (str, os.PathLike)):
        return read_image(Path(source))
    if isinstance(source, np.ndarray):
        return Image(to_pixels(source, "array"), "array", opaque_part(source))
    if is_tensor(source):
        array = channels_last(source)
        return Image(to_pixels(array, "tensor"), "tensor", opaque_part(array))
    if hasattr(source, "convert"):
        try:
            return decode(source, "PIL image")  # type: ignore[arg-type]
        except UserError:
            raise
        except (OSError, ValueError) as error:  # one that is read only now, or was closed
            raise UserError(f"PIL image: cannot be decoded ({error})") from error
    raise UserError(f"{what} must be a path, a PIL image, an array or a tensor, not {type(source).__name__}")


def read_image(path: Path) -> Image:
    import PIL.Image

    if not is_file(path):
        raise UserError(f"{path}: {'is a folder, not an image' if os.path.isdir(path) else 'no such file'}")
    if path.stat().st_size == 0:
        raise UserError(f"{path}: the file is empty")
    try:
        # As an open file: where Pillow maps one into memory, a gray TIFF that is shown turned is in disorder.
        with (
            quiet_pillow(),
            path.open("rb") as file,
            PIL.Image.open(file, formats=known_formats()) as opened,
        ):
            if claims_too_much(opened, path.stat().st_size):
                raise UserError(f"{path}: too many pixels for so small a file; {BOMB}")
            return decode(opened, str(path))
    except PIL.Image.DecompressionBombError as error:
        raise UserError(f"{path}: too many pixels; {BOMB}") from error
    except PIL.UnidentifiedImageError as error:
        raise UserError(f"{path}: not an image, or of an unknown format") from error
    except PermissionError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except UserError:
        raise
    except Exception as error:  # Pillow reports broken files in every way there is
        raise UserError(f"{path}: damaged image ({error})") from error


@cache
def known_formats() -> list[str]:
    """Those of FORMATS that this build of Pillow has."""
    import PIL.Image

    with _pillow:  # threads that do it at the same time get in each other's way
        PIL.Image.init()
    return [name for name in FORMATS if name in PIL.Image.OPEN]


@contextmanager
def quiet_pillow() -> Iterator[None]:
    """It warns of images that are large, and refuses those that are too large."""
    import PIL.Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)
        yield


def claims_too_much(opened: PIL.Image.Image, file_bytes: int) -> bool:
    """Whether its header tells of more pixels than a file of that size can hold. Pillow makes room for them
    all, and of some formats decodes what is there and says nothing of what is not."""
    bands = len(opened.getbands())
    values = opened.width * opened.height * bands
    stored = values if bands > 1 else values // 8  # a single band may have one bit for each pixel
    return values > HELD and stored > PACKED * file_bytes


def decode(opened: PIL.Image.Image, name: str) -> Image:
    """A PIL image, turned upright."""
    import PIL.ImageOps

    opened.load()  # EXIF may come behind the pixels
    turned = opened.getexif().get(ORIENTATION, 1) != 1
    image = PIL.ImageOps.exif_transpose(opened) if turned else opened  # which makes a copy in any case
    if image.mode in ("RGBA", "LA", "PA") or (image.mode in ("P", "RGB") and "transparency" in image.info):
        pixels = np.asarray(image.convert("RGBA"))
    elif image.mode in ("1", "L"):
        pixels = np.asarray(image.convert("L"))
    elif image.mode == "I" or image.mode.startswith("I;16"):
        pixels = np.asarray(image).astype(np.int64).clip(0, 65535).astype(np.uint16)
    elif image.mode == "F":
        pixels = np.asarray(image)
    else:
        pixels = np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
    return Image(to_pixels(pixels, name), name, opaque_part(pixels))


def opaque_part(array: np.ndarray) -> np.ndarray | None:
    """h w, bool: where the alpha channel of an image (h w 4) hides less than half. None: there is none, or it
    hides nothing, or everything, which a channel that was never filled does."""
    if array.ndim != 3 or array.shape[2] != 4:
        return None
    alpha = array[..., 3]
    opaque = alpha >= (0.5 if np.issubdtype(alpha.dtype, np.floating) else np.iinfo(alpha.dtype).max / 2)
    return None if opaque.all() or not opaque.any() else opaque


def image_size(path: Path) -> tuple[int, int] | None:
    """Width, height as it is shown, without decoding it; None: cannot be read."""
    size, orientation = read_header(path)
    return size[::-1] if size is not None and orientation >= 5 else size


def exif_orientation(path: Path) -> int:
    """1 to 8, as EXIF numbers them; 1: shown as it is stored. Of what cannot be read, too."""
    return read_header(path)[1]


def read_header(path: Path) -> tuple[tuple[int, int] | None, int]:
    """Width, height as it is stored, and EXIF's orientation; of damaged EXIF, as of none, 1."""
    import PIL.Image

    size, orientation = None, 1
    # Whatever is wrong with a file, of which there is no end, is told by those who need its pixels.
    with suppress(Exception), quiet_pillow(), PIL.Image.open(path, formats=known_formats()) as image:
        # Of a TIFF that is shown turned, Pillow may tell the size as it is shown.
        tags = getattr(image, "tag_v2", {})
        size = (tags[256], tags[257]) if image.format == "TIFF" else image.size
        orientation = image.getexif().get(ORIENTATION, 1)
    return size, orientation if orientation in range(2, 9) else 1


def stored_size(path: Path) -> tuple[int, int]:
    """Width, height as it is stored."""
    size = read_header(path)[0]
    if size is None:
        raise UserError(f"{path}: cannot be read as an image")
    return size


def to_stored(
    points: np.ndarray, size: tuple[int, int], orientation: int
) -> tuple[np.ndarray, tuple[int, int]]:
    """points: n 2, pixels of a photo of `size` (width, height) as it is shown -> those of the photo as it is
    stored, before EXIF turns it, and its size there."""
    if orientation >= 5:
        points, size = points[:, ::-1], size[::-1]
    # What is mirrored, along x and y of the stored photo.
    flips = np.array([orientation in (2, 3, 7, 8), orientation in (3, 4, 6, 7)])
    return np.where(flips, np.array(size) - 1 - points, points).astype(points.dtype), size


def is_tensor(source: Any) -> bool:
    """Without loading PyTorch. (Open files can be detached, too.)"""
    return hasattr(source, "detach") and hasattr(source, "cpu")


def channels_last(tensor: Any) -> np.ndarray:
    """h w, or h w c."""
    x = tensor.detach().cpu()
    x = x.squeeze(0) if x.ndim == 4 and x.shape[0] == 1 else x
    if x.ndim not in (2, 3):
        raise UserError(f"tensor: an image has the shape (h, w) or (1|3|4, h, w), not {tuple(tensor.shape)}")
    x = x.movedim(0, -1) if x.ndim == 3 else x
    return (x.float() if x.dtype.is_floating_point else x).numpy()


def to_pixels(array: np.ndarray, name: str) -> np.ndarray:
    """Checked, and brought to uint8 or float32 in [0, 1]."""
    if array.ndim == 3 and array.shape[2] in (1, 3, 4):
        array = array[..., 0] if array.shape[2] == 1 else array[..., :3]
    elif array.ndim != 2:
        raise UserError(f"{name}: an image has 1, 3 or 4 channels, not the shape {array.shape}")
    if 0 in array.shape:
        raise UserError(f"{name}: the image has no pixels")
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if array.dtype == bool:
        return array.astype(np.uint8) * 255
    if np.issubdtype(array.dtype, np.uint16):  # of either byte order
        return array.astype(np.float32) / 65535
    if not np.issubdtype(array.dtype, np.floating):
        raise UserError(f"{name}: pixels must be 8 or 16 bit or float, not {array.dtype}")
    array = np.ascontiguousarray(array, dtype=np.float32)
    if not np.isfinite(array).all():
        raise UserError(f"{name}: the image has NaN or infinite pixels")
    if array.min() < -1e-3 or array.max() > 1 + 1e-3:
        raise UserError(
            f"{name}: float pixels must lie in [0, 1], not [{array.min():.3g}, {array.max():.3g}]"
        )
    return array.clip(0, 1)


class Named(Protocol):
    """What has a name and a size (width, height), as images have."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> tuple[int, int]: ...


def load_mask(source: ImageLike, image: Named) -> np.ndarray:
    """A region mask of an image, h w bool: non-zero pixels are looked at."""
    width, height = image.size
    name = f"{source}: the mask" if isinstance(source, (str, os.PathLike)) else "the mask"
    if isinstance(source, np.ndarray) or is_tensor(source):
        mask = nonzero(source if isinstance(source, np.ndarray) else channels_last(source))
    else:
        mask = to_image(source, "a mask").gray > 0
    if mask.shape != (height, width):
        raise UserError(
            f"{name} is {mask.shape[1]}x{mask.shape[0]} but its image {image.name} is {width}x{height}"
        )
    return mask


def nonzero(mask: np.ndarray) -> np.ndarray:
    """h w, bool, of a mask (h w or h w 1|3|4) of any type: 0/1, 0/255, bool, float."""
    if mask.ndim != 2 and (mask.ndim != 3 or mask.shape[2] not in (1, 3, 4)):
        raise UserError(f"a mask has the height and width of its image, not the shape {mask.shape}")
    if np.issubdtype(mask.dtype, np.floating) and not np.isfinite(mask).all():
        raise UserError("the mask has NaN or infinite values")
    return mask != 0 if mask.ndim == 2 else np.any(mask[..., :3] != 0, axis=2)


def resize(array: np.ndarray, width: int, height: int) -> np.ndarray:
    """Area averaging when it shrinks, bilinear when it grows; x goes to (x + 0.5) * s - 0.5."""
    if (width, height) == (array.shape[1], array.shape[0]):
        return array
    shrinks = width * height < array.shape[1] * array.shape[0]
    return cv2.resize(array, (width, height), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)


def write_png(path: str | os.PathLike[str], pixels: np.ndarray) -> None:
    """h w or h w 3 (RGB), uint8; whole or not at all."""
    if Path(path).suffix.lower() != ".png":
        raise UserError(f"{path}: pictures are written as .png")
    write_picture(Path(path), pixels)


def write_picture(path: Path, pixels: np.ndarray, options: Sequence[int] = ()) -> None:
    """The same in the format of the suffix. options: of OpenCV's encoder."""
    data = encode_picture(pixels, path.suffix.lower(), options)
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def encode_png(pixels: np.ndarray) -> bytes:
    """h w or h w 3 (RGB), uint8."""
    return encode_picture(pixels, ".png")


def encode_picture(pixels: np.ndarray, suffix: str, options: Sequence[int] = ()) -> bytes:
    bgr = pixels if pixels.ndim == 2 else pixels[..., ::-1]
    done, data = cv2.imencode(suffix, np.ascontiguousarray(bgr), options)
    if not done:
        raise RuntimeError("the picture could not be encoded")
    return data.tobytes()
