"""Everything people call an image becomes the same pixels; everything else becomes one clear line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from hostile_files import png_claiming

from prism_match.errors import UserError
from prism_match.images import (
    ORIENTATION,
    Image,
    exif_orientation,
    image_size,
    load_image,
    load_mask,
    resize,
    stored_size,
    to_stored,
)

RNG = np.random.default_rng(0)
RGB = RNG.integers(0, 256, (40, 50, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    "source",
    [
        RGB,
        RGB / 255.0,
        (RGB / 255.0).astype(np.float16),
        RGB.astype(np.uint16) * 257,
        (RGB.astype(np.uint16) * 257).astype(">u2"),
        np.dstack([RGB, np.zeros((40, 50), np.uint8)]),
        PIL.Image.fromarray(RGB),
        PIL.Image.fromarray(RGB).convert("RGBA"),
        torch.from_numpy(RGB).permute(2, 0, 1),
        torch.from_numpy(RGB).permute(2, 0, 1)[None] / 255,
    ],
    ids=[
        "uint8",
        "float64",
        "float16",
        "uint16",
        "uint16-big-endian",
        "rgba",
        "pil",
        "pil-rgba",
        "tensor-uint8",
        "tensor-batch-float",
    ],
)
def test_all_kinds_of_one_image_are_equal(source: object) -> None:
    image = load_image(source)
    assert image.size == (50, 40)
    assert image.gray.dtype == np.float32
    np.testing.assert_allclose(image.gray, RGB @ [0.299, 0.587, 0.114] / 255, atol=1e-3)
    np.testing.assert_allclose(image.rgb.astype(int), RGB, atol=1)


@pytest.mark.parametrize("pixels", [RGB, (RGB / 255).astype(np.float32)], ids=["uint8", "float32"])
def test_strips_of_an_image_are_as_gray_as_all_of_it(
    pixels: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load_image(pixels).gray
    monkeypatch.setattr("prism_match.images.STRIP", 3 * RGB.shape[1])
    np.testing.assert_array_equal(load_image(pixels).gray, whole)


@pytest.mark.parametrize("mode", ["L", "1", "P", "LA", "CMYK", "I;16", "I", "F", "RGB"])
def test_every_mode_of_file(tmp_path: Path, mode: str) -> None:
    gray = PIL.Image.fromarray(RGB).convert("L")
    if mode == "I;16":
        image = PIL.Image.fromarray(np.asarray(gray).astype(np.uint16) * 257)
    elif mode == "I":
        image = PIL.Image.fromarray(np.asarray(gray).astype(np.int32) * 257)
    elif mode == "F":
        image = PIL.Image.fromarray(np.asarray(gray).astype(np.float32) / 255)
    else:
        image = gray.convert(mode) if mode != "CMYK" else gray.convert("RGB").convert("CMYK")
    path = tmp_path / "image.tif"
    image.save(path)
    loaded = load_image(path)
    if mode != "1":  # two levels are not the same picture
        np.testing.assert_allclose(loaded.gray, np.asarray(gray) / 255, atol=0.02)
    assert loaded.name == str(path)


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    path = tmp_path / "turned.jpg"
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # stored lying on its side
    PIL.Image.fromarray(RGB).save(path, exif=exif)
    assert load_image(path).size == (40, 50)


def test_an_image_is_loaded_once() -> None:
    image = load_image(RGB)
    assert load_image(image) is image


def broken_files(folder: Path) -> dict[str, tuple[Path, str]]:
    """A path and a word of its error line, for each way a file can be wrong."""

    def write(name: str, data: bytes) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    good = folder / "good.jpg"
    PIL.Image.fromarray(RNG.integers(0, 256, (200, 200, 3), dtype=np.uint8)).save(good)

    small = folder / "small.png"
    PIL.Image.fromarray(RGB[:1, :1]).save(small)
    nan = folder / "nan.tif"
    PIL.Image.fromarray(np.full((40, 40), np.nan, np.float32)).save(nan)
    return {
        "missing": (folder / "missing.jpg", "no such file"),
        "folder": (folder, "is a folder"),
        "text": (write("text.jpg", b"this is no picture"), "not an image"),
        "truncated": (write("cut.jpg", good.read_bytes()[:3000]), "damaged"),
        "empty": (write("empty.jpg", b""), "empty"),
        "bomb": (write("bomb.png", png_claiming(60_000, 60_000)), "too many pixels"),
        "1x1": (small, "too small (1x1)"),
        "nan": (nan, "NaN"),
    }


@pytest.mark.parametrize("case", ["missing", "folder", "text", "truncated", "empty", "bomb", "1x1", "nan"])
def test_broken_files(tmp_path: Path, case: str) -> None:
    path, word = broken_files(tmp_path)[case]
    with pytest.raises(UserError) as error:
        load_image(path)
    line = str(error.value)
    assert str(path) in line and word in line and "\n" not in line


@pytest.mark.parametrize(
    ("source", "word"),
    [
        (np.full((40, 40), np.nan), "NaN"),
        (np.full((40, 40), 100.0), "[0, 1]"),
        (np.zeros((40, 40), np.int32), "int32"),
        (np.zeros((40, 40, 2), np.uint8), "channels"),
        (np.zeros((40,), np.uint8), "channels"),
        (np.zeros((0, 40), np.uint8), "no pixels"),
        (torch.zeros(2, 3, 40, 40), "shape"),
        (np.zeros((31, 40), np.uint8), "too small"),
        (42, "not int"),
    ],
)
def test_broken_objects(source: object, word: str) -> None:
    with pytest.raises(UserError, match=r"^[^\n]+$") as error:
        load_image(source)
    assert word in str(error.value)


@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m,
        lambda m: m.astype(np.uint8),
        lambda m: m.astype(np.uint8) * 255,
        lambda m: m.astype(np.float32),
        torch.from_numpy,
        lambda m: torch.from_numpy(m)[None].float(),
        lambda m: PIL.Image.fromarray(m.astype(np.uint8) * 255),
    ],
)
def test_masks_of_every_type(convert: object) -> None:
    mask = RNG.random((40, 50)) < 0.5
    assert np.array_equal(load_mask(convert(mask), Image(RGB, "rgb")), mask)


def test_what_is_wrong_with_a_mask_is_told_of_the_mask(tmp_path: Path) -> None:
    image = Image(RGB, "rgb")
    PIL.Image.fromarray(RGB[:20, :20]).save(tmp_path / "m.png")
    for source, reason in (
        (tmp_path / "m.png", "m.png: the mask is 20x20 but its image rgb is 50x40"),
        (np.ones((31, 40)), "the mask is 40x31 but its image rgb is 50x40"),
        (np.ones((40, 50, 2)), "a mask has the height and width of its image"),
        (np.full((40, 50), np.nan), "the mask has NaN"),
        (np.full((40, 50, 3), np.nan), "the mask has NaN"),
        (7, "a mask must be a path, .* not int"),
    ):
        with pytest.raises(UserError, match=reason):
            load_mask(source, image)


def test_mask_of_another_size() -> None:
    with pytest.raises(UserError, match="the mask is 40x40 but its image rgb is 50x40"):
        load_mask(np.ones((40, 40), bool), Image(RGB, "rgb"))


def test_resize_keeps_pixel_centres() -> None:
    """A linear ramp stays one, at (x + 0.5) * s - 0.5."""
    ramp = np.tile(np.arange(64, dtype=np.float32), (64, 1))
    small = resize(ramp, 32, 32)
    np.testing.assert_allclose(small[0], (np.arange(32) + 0.5) * 2 - 0.5, atol=1e-4)


@pytest.mark.parametrize("suffix", ["png", "tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_pixels_as_shown_and_as_stored(orientation: int, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{suffix}"
    stored = RGB[:, :, 0]
    exif = PIL.Image.Exif()
    exif[ORIENTATION] = orientation
    PIL.Image.fromarray(stored).save(path, exif=exif)
    assert exif_orientation(path) == orientation and stored_size(path) == (50, 40)
    shown = load_image(path)
    assert image_size(path) == shown.size
    y, x = np.mgrid[: shown.size[1], : shown.size[0]].reshape(2, -1)
    points, size = to_stored(np.stack([x, y], 1), shown.size, orientation)
    assert size == (50, 40)
    np.testing.assert_array_equal(stored[points[:, 1], points[:, 0]], shown.pixels[y, x])


def test_what_has_no_size() -> None:
    assert image_size(Path("nowhere.png")) is None and exif_orientation(Path("nowhere.png")) == 1
