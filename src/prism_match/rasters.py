"""Pictures with what comes along with their pixels: EXIF, a colour profile, bands of any type, a place on the
ground.

Georeferenced TIFFs are read and written by rasterio, which is an extra. There (0, 0) is the corner of the
first pixel, here its centre.
"""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from prism_match.errors import UserError
from prism_match.files import reading
from prism_match.geometry import warp_points
from prism_match.images import (
    BOMB,
    HELD,
    ORIENTATION,
    PACKED,
    Image,
    ImageLike,
    known_formats,
    load_image,
    quiet_pillow,
)

log = logging.getLogger(__name__)

GEO_TAGS = {33550, 33922, 34264, 34735}  # of a GeoTIFF: scale, tie points, matrix, keys
EXIF_IFD, WIDTH, HEIGHT = 0x8769, 0xA002, 0xA003  # EXIF's tags of its second part and of the size in that
TIE_POINTS = 8  # along each side, where a map is no matrix that tells all
WARPED_AS_THEY_ARE = ("uint8", "uint16", "int16", "float32", "float64")  # types that OpenCV interpolates

Points = Callable[[np.ndarray], np.ndarray]  # n 2 -> n 2


@dataclass(frozen=True)
class Raster:
    """A file as rasterio has it."""

    bands: np.ndarray  # c h w, of any type
    nodata: float | None
    valid: np.ndarray  # h w, bool
    place: dict[str, Any]  # crs, and transform or gcps

    def image(self, name: str) -> Image:
        """To match and to show: the first three bands, or the first, brought to 8 bit."""
        chosen = self.bands[: 3 if len(self.bands) >= 3 else 1]
        if chosen.dtype != np.uint8:
            seen = chosen[:, self.valid].astype(np.float64)
            low, high = np.percentile(seen[np.isfinite(seen)], (1, 99)) if np.isfinite(seen).any() else (0, 1)
            stretched = (np.nan_to_num(chosen.astype(np.float64), nan=low) - low) / max(high - low, 1e-12)
            chosen = (stretched.clip(0, 1) * 255).round().astype(np.uint8)
        pixels = chosen[0] if len(chosen) == 1 else np.ascontiguousarray(np.moveaxis(chosen, 0, -1))
        hidden = not self.valid.all() and bool(self.valid.any())
        return Image(pixels, name, self.valid if hidden else None)


@dataclass(frozen=True)
class Picture:
    """An image, and what else its file tells."""

    image: Image
    more: dict[str, Any] = field(default_factory=dict)  # what Pillow saves along: exif, icc_profile
    raster: Raster | None = None


def open_picture(source: ImageLike) -> Picture:
    """Any image; of a georeferenced file its bands and its place, of others EXIF and the colour profile."""
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if is_georeferenced(path):
            if find_spec("rasterio") is not None:
                raster = read_raster(path)
                return Picture(load_image(raster.image(str(path))), raster=raster)
            log.warning('%s: its georeferencing is left out: pip install "prism-match[geo]"', path)
        image = load_image(path)
        # Pixels can be read where what comes along is damaged, in any way there is: then they come alone.
        with suppress(Exception), quiet_pillow(), PIL.Image.open(path, formats=known_formats()) as opened:
            return Picture(image, what_comes_along(opened, image.size))
        return Picture(image)
    image = load_image(source)
    return Picture(image, what_comes_along(source, image.size) if isinstance(source, PIL.Image.Image) else {})


def is_georeferenced(path: Path) -> bool:
    with suppress(Exception), quiet_pillow(), PIL.Image.open(path, formats=known_formats()) as opened:
        return bool(GEO_TAGS & set(getattr(opened, "tag_v2", ())))
    # Bands that Pillow has no name for are no reason not to look.
    if path.suffix.lower() in (".tif", ".tiff") and path.is_file() and find_spec("rasterio") is not None:
        import rasterio

        with suppress(Exception), quiet(), rasterio.open(path, driver="GTiff") as file:
            return bool(file.count)
    return False


def what_comes_along(opened: PIL.Image.Image, size: tuple[int, int]) -> dict[str, Any]:
    """EXIF of a picture that has been turned upright, and its colour profile."""
    exif = opened.getexif()
    exif.pop(ORIENTATION, None)
    more: dict[str, Any] = {"exif": exif} if len(exif) else {}
    if opened.info.get("icc_profile") and opened.mode in ("RGB", "L"):
        more["icc_profile"] = opened.info["icc_profile"]
    return more


@contextmanager
def quiet() -> Iterator[None]:
    """Files without a place are nothing to warn of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def read_raster(path: Path) -> Raster:
    import rasterio

    # Only as what it is: some of GDAL's formats are lists of other files and addresses.
    with reading(path, "a georeferenced picture"), quiet(), rasterio.open(path, driver="GTiff") as file:
        check_size(path, file.width * file.height, [np.dtype(name).itemsize for name in file.dtypes])
        gcps, crs = file.gcps
        place = {"crs": crs, "gcps": gcps} if gcps else {"crs": file.crs, "transform": file.transform}
        return Raster(file.read(), file.nodata, file.dataset_mask() > 0, place)


def check_size(path: Path, pixels: int, bands: list[int]) -> None:
    """Before room is made for them. bands: bytes of a pixel of each."""
    most = 2 * PIL.Image.MAX_IMAGE_PIXELS if PIL.Image.MAX_IMAGE_PIXELS else pixels  # Pillow's own rule
    if pixels > most or pixels * sum(bands) > max(HELD, PACKED * path.stat().st_size):
        raise UserError(f"too many pixels; {BOMB}")


def encode_moved(
    picture: Picture,
    frame: Picture,
    warp: Callable[[np.ndarray], np.ndarray],
    covered: np.ndarray,
    to_picture: Points,
    matrix: np.ndarray | None,
) -> tuple[str, bytes]:
    """A picture in the frame of another one, as a file: its suffix and its bytes. A GeoTIFF where either has
    a place, that of the frame before its own; else a PNG that is transparent where the picture ends.

    warp: brings pixels (h w or h w c) into the frame; covered: h w, where; to_picture: from points of the
    frame to those of the picture; matrix: 3 3, the same where it is affine."""
    if picture.raster is not None or frame.raster is not None:
        if frame.raster is not None:
            place = frame.raster.place
        else:
            assert picture.raster is not None
            place = moved_place(picture.raster.place, frame.image.size, to_picture, matrix)
        return ".tif", encode_raster(picture, warp, covered, place)
    pixels = warp(picture.image.rgb)
    opaque = covered
    if picture.image.opaque is not None:
        opaque = covered & (warp(picture.image.opaque.astype(np.uint8)) > 0)
    more = dict(picture.more)
    if "exif" in more:
        more["exif"] = sized_exif(more["exif"], frame.image.size)
    file = io.BytesIO()
    PIL.Image.fromarray(np.dstack([pixels, opaque.astype(np.uint8) * 255])).save(file, "PNG", **more)
    return ".png", file.getvalue()


def sized_exif(exif: PIL.Image.Exif, size: tuple[int, int]) -> PIL.Image.Exif:
    """With the size that the picture has now, where EXIF tells one."""
    second = exif.get_ifd(EXIF_IFD)
    for tag, value in ((WIDTH, size[0]), (HEIGHT, size[1])):
        if tag in second:
            second[tag] = value
    return exif


def moved_place(
    place: dict[str, Any], size: tuple[int, int], to_picture: Points, matrix: np.ndarray | None
) -> dict[str, Any]:
    """Where the pixels of a frame of `size` are on the ground, by a picture's own georeferencing."""
    from rasterio.control import GroundControlPoint
    from rasterio.transform import Affine, from_gcps

    transform = place["transform"] if "transform" in place else from_gcps(place["gcps"])
    to_ground = np.array(transform).reshape(3, 3)  # from corners of pixels
    half = np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]])
    if matrix is not None:
        whole = to_ground @ half @ (matrix / matrix[2, 2]) @ np.linalg.inv(half)
        return {"crs": place["crs"], "transform": Affine(*whole[:2].ravel())}
    sides = (np.linspace(0, n - 1, TIE_POINTS) for n in size)
    at = np.stack(np.meshgrid(*sides), axis=-1).reshape(-1, 2)
    ground = warp_points(to_picture(at), to_ground @ half)
    points = [
        GroundControlPoint(row=v + 0.5, col=u + 0.5, x=x, y=y)
        for (u, v), (x, y) in zip(at.tolist(), ground.tolist(), strict=True)
        if np.isfinite([x, y]).all()
    ]
    return {"crs": place["crs"], "gcps": points}


def encode_raster(
    picture: Picture, warp: Callable[[np.ndarray], np.ndarray], covered: np.ndarray, place: dict[str, Any]
) -> bytes:
    """The bytes of a GeoTIFF, with all bands in the type they have."""
    import rasterio
    from rasterio.crs import CRS
    from rasterio.io import MemoryFile

    raster = picture.raster
    if raster is None:
        bands, valid, nodata = np.moveaxis(picture.image.rgb, -1, 0), covered, None
    else:
        bands, nodata = raster.bands, raster.nodata
        valid = covered & (
            warp(raster.valid.astype(np.float32)) >= 0.999
        )  # nothing mixed with what is nothing
    warped = np.stack([warp_band(band, warp) for band in bands])
    if nodata is not None:
        warped[:, ~valid] = nodata
    profile = {
        "driver": "GTiff", "count": len(warped), "dtype": warped.dtype.name, "compress": "deflate",
        "height": warped.shape[1], "width": warped.shape[2], "nodata": nodata, **place,
        "crs": place["crs"] or CRS(),  # None is not taken with control points
    }  # fmt: skip
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True), MemoryFile() as memory:
        with quiet(), memory.open(**profile) as file:
            file.write(warped)
            if nodata is None and not valid.all():
                file.write_mask(valid)
        return memory.read()


def warp_band(band: np.ndarray, warp: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    if band.dtype.name in WARPED_AS_THEY_ARE:
        return warp(np.ascontiguousarray(band))
    if band.dtype.kind == "c":
        raise UserError("bands of complex numbers are not warped")
    warped = warp(band.astype(np.float64))
    return (warped if band.dtype.kind == "f" else np.rint(warped)).astype(band.dtype)
