"""Images of which only parts are read, at the scale that is asked for: files that are too large to be decoded
whole through rasterio, where it is installed, all others from memory."""

from __future__ import annotations

import math
import os
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from prism_match.errors import UserError
from prism_match.images import (
    SMALLEST,
    Image,
    ImageLike,
    load_image,
    load_mask,
    read_header,
    resize,
    to_pixels,
    to_stored,
)

OVERSAMPLED = 2  # a decimated read has so many pixels, each way, for one that is wanted
GDAL_CACHE = 64  # MiB of decoded blocks that GDAL may keep
INSTALL = "pip install 'prism-match[geo]'"
# By how files begin. Some of GDAL's others are lists of files and addresses.
DRIVERS = {
    b"II": "GTiff", b"MM": "GTiff", b"\xff\xd8": "JPEG", b"\x89P": "PNG", b"RI": "WEBP",
    b"\x00\x00": "JP2OpenJPEG", b"BM": "BMP", b"P5": "PNM", b"P6": "PNM", b"GI": "GIF",
}  # fmt: skip
WINDOWED_TYPES = ("uint8", "uint16", "float32")


class Box(NamedTuple):
    """Whole pixels of an image; right and bottom are the first that do not belong to it."""

    left: int
    top: int
    right: int
    bottom: int

    @staticmethod
    def covering(low: np.ndarray, high: np.ndarray, size: tuple[int, int]) -> Box:
        """From low to high (x, y), both included, as far as the image goes."""
        low, high = np.floor(low).astype(int), np.ceil(high).astype(int) + 1
        return Box(*np.maximum(low, 0).tolist(), *np.minimum(high, size).tolist())

    @property
    def width(self) -> int:
        return self.right - self.left

    @property
    def height(self) -> int:
        return self.bottom - self.top

    @property
    def slices(self) -> tuple[slice, slice]:
        return slice(self.top, self.bottom), slice(self.left, self.right)


@dataclass(frozen=True)
class Windows:
    """An image whose parts can be had one by one."""

    name: str
    size: tuple[int, int]  # width, height, as it is shown
    mask: np.ndarray | None  # h w, bool: where to look
    held: int  # bytes of it that are in memory all the time

    @property
    def box(self) -> Box:
        return Box(0, 0, *self.size)

    def part(self, box: Box, scale: float) -> Image:
        """What is in the box, shrunk: its width and height become `scale` times what they are, rounded."""
        width, height = (max(1, round(n * scale)) for n in (box.width, box.height))
        image = self._read(box, width, height)
        opaque = None if image.opaque is None else shrunk_mask(image.opaque, width, height)
        if self.mask is not None:
            looked_at = shrunk_mask(self.mask[box.slices], width, height)
            opaque = looked_at if opaque is None else opaque & looked_at
        return Image(resize(image.pixels, width, height), self.name, opaque)

    def _read(self, box: Box, width: int, height: int) -> Image:
        """What is in the box, at least width x height pixels of it."""
        raise NotImplementedError

    def __enter__(self) -> Windows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


@dataclass(frozen=True)
class InMemory(Windows):
    image: Image

    def _read(self, box: Box, width: int, height: int) -> Image:
        opaque = self.image.opaque
        return Image(self.image.pixels[box.slices], self.name, None if opaque is None else opaque[box.slices])


@dataclass(frozen=True)
class OnDisk(Windows):
    """A file that is never decoded whole."""

    dataset: Any  # rasterio's, open
    orientation: int  # as EXIF numbers it
    has_mask: bool  # whether it tells where it has no pixels, and has some elsewhere

    def __exit__(self, *_: Any) -> None:
        self.dataset.close()

    def _read(self, box: Box, width: int, height: int) -> Image:
        import rasterio
        from rasterio.enums import Resampling
        from rasterio.windows import Window

        corners = np.array([[box.left, box.top], [box.right - 1, box.bottom - 1]], dtype=np.float64)
        stored, _ = to_stored(corners, self.size, self.orientation)
        (left, top), (right, bottom) = stored.min(0).astype(int), stored.max(0).astype(int) + 1
        if self.orientation >= 5:
            width, height = height, width
        shape = (
            min(bottom - top, OVERSAMPLED * height) if bottom - top > 4 * height else bottom - top,
            min(right - left, OVERSAMPLED * width) if right - left > 4 * width else right - left,
        )
        window = Window(left, top, right - left, bottom - top)  # type: ignore[call-arg]
        bands = 3 if self.dataset.count >= 3 else 1
        options = {"window": window, "resampling": Resampling.average}
        try:
            with small_cache():
                pixels = self.dataset.read(list(range(1, bands + 1)), out_shape=(bands, *shape), **options)
                seen = self.dataset.dataset_mask(window=window, out_shape=shape) if self.has_mask else None
        except rasterio.errors.RasterioError as error:
            raise UserError(f"{self.name}: damaged image ({error})") from error
        upright = _upright(np.moveaxis(pixels, 0, -1), self.orientation)
        opaque = None if seen is None else _upright(seen, self.orientation) >= 128
        return Image(to_pixels(upright, self.name), self.name, opaque)


def open_windows(source: ImageLike, mask: ImageLike | None, most_bytes: int) -> Windows:
    """mask: of the size of the image, non-zero where to look. most_bytes: what is larger once it is decoded
    is read by windows where that can be done."""
    windows = _open_large(source, most_bytes) or _in_memory(source)
    if min(windows.size) < SMALLEST:
        width, height = windows.size
        raise UserError(f"{windows.name}: too small ({width}x{height}); at least {SMALLEST} pixels a side")
    if mask is None:
        return windows
    region = load_mask(mask, windows)
    return replace(windows, mask=region, held=windows.held + region.nbytes)


def _in_memory(source: ImageLike) -> InMemory:
    try:
        image = load_image(source)
    except UserError as error:
        if "decompression bomb" in str(error) and find_spec("rasterio") is None:
            raise UserError(
                f"{source}: too many pixels to be decoded whole; by windows it can be read: {INSTALL}"
            ) from error
        raise
    held = image.pixels.nbytes + (0 if image.opaque is None else image.opaque.nbytes)
    return InMemory(image.name, image.size, None, held, image)


def _open_large(source: ImageLike, most_bytes: int) -> OnDisk | None:
    """None: small enough, for Pillow too, or not a file that GDAL reads as Pillow does."""
    if not isinstance(source, (str, os.PathLike)) or find_spec("rasterio") is None:
        return None
    path = Path(source)
    if not path.is_file() or path.stat().st_size == 0:
        return None  # it will be told
    import PIL.Image
    import rasterio

    orientation = 1
    with warnings.catch_warnings(), suppress(PIL.Image.DecompressionBombError):
        warnings.simplefilter("ignore")  # of its size, and that it has no place on the earth
        size, orientation = read_header(path)
        if size is not None and math.prod(size) * 4 <= most_bytes:
            return None
    with path.open("rb") as file:
        driver = DRIVERS.get(file.read(2))
    if driver is None:
        return None
    with warnings.catch_warnings(), small_cache():
        warnings.simplefilter("ignore")
        try:
            dataset = rasterio.open(path, driver=driver)
        except rasterio.errors.RasterioError:
            return None
    pixels = dataset.width * dataset.height
    bytes_each = np.dtype(dataset.dtypes[0]).itemsize * min(dataset.count, 3)
    is_small = pixels * bytes_each <= most_bytes and pixels <= 2 * (PIL.Image.MAX_IMAGE_PIXELS or pixels)
    palette = rasterio.enums.ColorInterp.palette in dataset.colorinterp
    if is_small or palette or dataset.dtypes[0] not in WINDOWED_TYPES:
        dataset.close()
        return None
    shown = (dataset.width, dataset.height)
    shown = shown[::-1] if orientation >= 5 else shown
    # A look at all of it: a mask that hides everything was never filled.
    look = tuple(min(n, 256) for n in (dataset.height, dataset.width))
    try:
        with small_cache():
            seen = dataset.dataset_mask(out_shape=look)
    except rasterio.errors.RasterioError as error:
        raise UserError(f"{path}: damaged image ({error})") from error
    return OnDisk(str(path), shown, None, 0, dataset, orientation, bool(seen.any() and not seen.all()))


def small_cache() -> Any:
    """For whatever opens or reads a file: GDAL decides how many blocks it may keep when it keeps the first
    one, and decides on a twentieth of the memory unless it is told otherwise at that moment."""
    import rasterio

    return rasterio.Env(GDAL_CACHEMAX=GDAL_CACHE)


def shrunk_mask(mask: np.ndarray, width: int, height: int) -> np.ndarray:
    """height width, bool."""
    return resize(mask.astype(np.float32), width, height) >= 0.5


def _upright(stored: np.ndarray, orientation: int) -> np.ndarray:
    """h w or h w c: as it is shown."""
    x = stored
    if orientation in (2, 3, 7, 8):
        x = x[:, ::-1]
    if orientation in (3, 4, 6, 7):
        x = x[::-1]
    return np.ascontiguousarray(np.swapaxes(x, 0, 1) if orientation >= 5 else x)
