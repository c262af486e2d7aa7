"""One picture brought onto another, where it is known how they differ."""

from __future__ import annotations

import csv
import json
import logging
import sys

import cv2
import numpy as np
import PIL.Image
import pytest
from conftest import ASSETS

from prism_match import Matches, UserError, align, cli, rasters
from prism_match import alignment as module
from prism_match.alignment import Map, Splines, align_matches, apart_from_neighbours, grid_size
from prism_match.geometry import warp_points
from prism_match.images import load_image

WIDTH, HEIGHT = 320, 240
SIMILARITY = np.array([[0.96, -0.2, 40.0], [0.2, 0.96, -20.0], [0, 0, 1]])
HOMOGRAPHY = np.array([[1.05, 0.08, -12.0], [-0.06, 0.97, 15.0], [3e-4, -2e-4, 1]])


def bent(points: np.ndarray) -> np.ndarray:
    """By up to 6 pixels from a homography."""
    x, y = points.T
    wave = 6 * np.stack([np.sin(x / 60) * np.cos(y / 80), np.cos(x / 70)], axis=1)
    return warp_points(points, HOMOGRAPHY) + wave


TRUTHS = {
    "similarity": lambda p: warp_points(p, SIMILARITY),
    "homography": lambda p: warp_points(p, HOMOGRAPHY),
    "warp": bent,
}


def make_matches(truth, count: int = 400, noise: float = 0.3, wrong: float = 0.15, seed: int = 0) -> Matches:
    g = np.random.default_rng(seed)
    points0 = g.uniform(0, [WIDTH - 1, HEIGHT - 1], (count, 2))
    points1 = truth(points0) + noise * g.standard_normal((count, 2))
    astray = g.uniform(0, 1, count) < wrong
    points1[astray] = g.uniform(0, [WIDTH, HEIGHT], (int(astray.sum()), 2))
    return Matches(points0, points1, g.uniform(0.2, 1, count), (WIDTH, HEIGHT), (WIDTH, HEIGHT), "a", "b")


def inner_grid() -> np.ndarray:
    x, y = np.mgrid[20 : WIDTH - 20 : 15, 20 : HEIGHT - 20 : 15].reshape(2, -1)
    return np.stack([x, y], axis=1).astype(float)


@pytest.mark.parametrize("name", TRUTHS)
def test_the_simplest_model_that_explains_the_matches_is_chosen(name):
    alignment = align_matches(make_matches(TRUTHS[name]))
    assert alignment.model == name and alignment.reason.startswith(f"{name}: ")
    assert [t.model for t in alignment.trials] == ["similarity", "homography", "warp"]
    error = np.linalg.norm(alignment.map(inner_grid()) - TRUTHS[name](inner_grid()), axis=1)
    assert np.median(error) < (0.1 if name != "warp" else 0.4)
    assert 0.2 < alignment.noise < 0.6  # there are matches astray among the neighbours
    assert alignment.agree.sum() > 0.8 * len(alignment.matches)


def test_a_model_can_be_asked_for():
    alignment = align_matches(make_matches(TRUTHS["similarity"]), model="homography")
    assert alignment.model == "homography" and alignment.reason == "homography: asked for"
    with pytest.raises(UserError, match="the model is one of similarity, homography, warp, not 'affine'"):
        align_matches(make_matches(TRUTHS["similarity"]), model="affine")


def test_few_matches_are_enough_for_a_simple_model():
    alignment = align_matches(make_matches(TRUTHS["similarity"], 16, wrong=0))
    assert alignment.model == "similarity"
    error = alignment.map(inner_grid()) - TRUTHS["similarity"](inner_grid())
    assert np.abs(error).max() < 1.5


@pytest.mark.parametrize("matches", [
    make_matches(TRUTHS["similarity"], 200, wrong=1),
    make_matches(TRUTHS["similarity"], 8, wrong=0),
    make_matches(TRUTHS["similarity"], 0),
])  # fmt: skip
def test_what_does_not_agree_is_refused_in_one_line(matches):
    with pytest.raises(UserError, match=r"^b: cannot be brought onto a: \d+ of \d+ matches agree; do they"):
        align_matches(matches)


def test_matches_that_leave_their_neighbours_are_found():
    matches = make_matches(bent, 400, noise=0.1, wrong=0)
    moved = matches.keypoints1.astype(float).copy()
    moved[::20] += 9
    apart = apart_from_neighbours(matches.keypoints0.astype(float), moved)
    assert apart[::20].min() > 6 and np.median(np.delete(apart, np.s_[::20])) < 0.4


def test_a_map_of_every_pixel_is_the_map_of_points():
    g = np.random.default_rng(0)
    columns, rows = grid_size((50, 37))
    found = Map("warp", HOMOGRAPHY, (50, 37), g.normal(0, 3, (rows, columns, 2)))
    x, y = np.meshgrid(np.arange(50), np.arange(37))
    points = np.stack([x, y], axis=-1).reshape(-1, 2).astype(float)
    np.testing.assert_allclose(found.everywhere().reshape(-1, 2), found(points), atol=1e-3)
    np.testing.assert_array_equal(found(points[:3].tolist()), found(points[:3]))
    splines = Splines.at(points, (50, 37))
    np.testing.assert_allclose(splines.weight.sum(axis=1), 1)
    weight, wanted = g.uniform(0, 1, len(points)), g.normal(0, 1, (len(points), 2))
    dense = np.zeros((len(points), rows * columns))
    np.put_along_axis(dense, splines.index, splines.weight, axis=1)
    matrix, target = splines.normal_equations(wanted, weight, rows * columns)
    np.testing.assert_allclose(matrix, dense.T @ (weight[:, None] * dense), atol=1e-9)
    np.testing.assert_allclose(target, dense.T @ (weight[:, None] * wanted), atol=1e-9)


def test_what_lies_behind_the_horizon_is_nowhere():
    tilted = np.array([[1, 0, 0], [0, 1, 0], [-0.01, 0, 1.0]])  # x = 100 is infinitely far away
    found = Map("homography", tilted, (160, 20)).everywhere()
    assert (found[:, 101:] < -1000).all() and (found[:, :50] >= 0).all()


@pytest.fixture
def pictures(tmp_path):
    """A photo, and the same seen by SIMILARITY, as files, with exact matches."""
    first = cv2.resize(
        cv2.imread(str(ASSETS / "astronaut0.jpg")), (WIDTH, HEIGHT), interpolation=cv2.INTER_AREA
    )
    second = cv2.warpPerspective(first, SIMILARITY, (WIDTH, HEIGHT), flags=cv2.INTER_CUBIC)
    paths = tmp_path / "a.png", tmp_path / "b.png"
    for path, pixels in zip(paths, (first, second), strict=True):
        cv2.imwrite(str(path), pixels)
    return *paths, matches_of(*paths)


def matches_of(first, second, truth=TRUTHS["similarity"]) -> Matches:
    m = make_matches(truth, noise=0.05, wrong=0)
    return Matches(m.keypoints0, m.keypoints1, m.scores, m.size0, m.size1, str(first), str(second))


def test_the_aligned_picture_is_the_first_one_again(pictures, tmp_path):
    first, _, matches = pictures
    alignment = align_matches(matches)
    files = alignment.save(tmp_path / "new" / "out")
    names = ["aligned.png", "overlay.png", "difference.png", "residuals.csv", "alignment.json"]
    assert [f.name for f in files] == names and {f.name for f in files[0].parent.iterdir()} == set(names)
    aligned = np.asarray(PIL.Image.open(files[0]))
    covered = aligned[..., 3] > 0
    assert 0.5 < covered.mean() < 0.95 and (covered == alignment.covered).all()
    inner = cv2.erode(covered.astype(np.uint8), np.ones((9, 9))) > 0
    off = np.abs(aligned[..., :3].astype(float) - load_image(first).rgb)[inner]
    shifted = np.abs(np.roll(aligned[..., :3], 1, axis=1).astype(float) - load_image(first).rgb)[inner]
    assert off.mean() < 4 < 0.5 * shifted.mean()
    rows = list(csv.DictReader(files[3].open()))
    assert len(rows) == len(matches) and {r["agrees"] for r in rows} == {"1"}
    assert max(float(r["error"]) for r in rows) < 0.5
    told = json.loads(files[4].read_text())
    assert told["model"] == "similarity" and len(told["held_out"]) == 3 and told["agree"] == len(matches)
    np.testing.assert_allclose(told["matrix"], SIMILARITY, atol=0.1)


def test_nothing_is_written_when_something_goes_wrong(pictures, tmp_path, monkeypatch):
    alignment = align_matches(pictures[2], model="similarity")
    monkeypatch.setattr(module, "residual_table", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        alignment.save(tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_exif_is_kept_but_for_what_is_no_longer_true(pictures, tmp_path):
    first, second, _ = pictures
    turned = tmp_path / "turned.jpg"
    exif = PIL.Image.Exif()
    exif[0x0110], exif[0x0112], exif[0x0132] = "Camera", 3, "2024:05:06 07:08:09"  # model, upside down, date
    exif.get_ifd(0x8769).update({0x920A: 35.0, 0xA002: 999, 0xA003: 999})  # focal length, size
    exif.get_ifd(0x8825).update({1: "N", 2: (48.0, 8.0, 0.0)})  # latitude
    PIL.Image.open(second).rotate(180).save(turned, exif=exif, quality=95)
    files = align_matches(matches_of(first, turned), model="similarity").save(tmp_path / "out")
    kept = PIL.Image.open(files[0]).getexif()
    assert kept[0x0110] == "Camera" and kept[0x0132] == "2024:05:06 07:08:09" and 0x0112 not in kept
    detail = kept.get_ifd(0x8769)
    assert (detail[0xA002], detail[0xA003]) == (WIDTH, HEIGHT) and detail[0x920A] == 35
    assert kept.get_ifd(0x8825)[1] == "N"


def write_raster(path, bands: np.ndarray, **profile) -> None:
    rasterio = pytest.importorskip("rasterio")
    size = {"count": len(bands), "height": bands.shape[1], "width": bands.shape[2], "dtype": bands.dtype.name}
    with rasterio.open(path, "w", driver="GTiff", **{"crs": "EPSG:32632", **size, **profile}) as file:
        file.write(bands)


def test_the_frame_says_where_the_aligned_picture_lies(pictures, tmp_path):
    """The bands of the second picture, in their own type, in the place of the first."""
    rasterio = pytest.importorskip("rasterio")
    gray0, gray1 = (cv2.imread(str(p), cv2.IMREAD_GRAYSCALE) for p in pictures[:2])
    place = rasterio.transform.from_origin(500_000, 5_000_000, 0.5, 0.5)
    first, second = tmp_path / "a.tif", tmp_path / "b.tif"
    write_raster(first, gray0[None], transform=place)
    bands = np.stack([gray1.astype(np.uint16) * k + 1 for k in (1, 2, 3, 4, 5)])
    write_raster(second, bands, transform=rasterio.transform.from_origin(0, 0, 9, 9), nodata=0)
    files = align_matches(matches_of(first, second), model="similarity").save(tmp_path / "out")
    assert files[0].name == "aligned.tif"
    with rasterio.open(files[0]) as file:
        assert file.crs.to_epsg() == 32632 and file.transform == place
        aligned, nodata = file.read(), file.nodata
    assert aligned.dtype == np.uint16 and aligned.shape == (5, HEIGHT, WIDTH) and nodata == 0
    inner = cv2.erode((aligned[4] > 0).astype(np.uint8), np.ones((9, 9))) > 0
    assert inner.mean() > 0.5
    assert np.abs(aligned[4][inner] / 5 - gray0[inner]).mean() < 5
    assert np.abs(aligned[4][inner].astype(float) - 5.0 * (aligned[0][inner] - 1.0)).max() < 6


@pytest.mark.parametrize("name", ["similarity", "homography"])
def test_the_place_of_the_second_picture_comes_along(pictures, tmp_path, name):
    """To a frame that has none: as a matrix where it is one, as tie points where it is not."""
    rasterio = pytest.importorskip("rasterio")
    place = rasterio.transform.from_origin(500_000, 5_000_000, 0.5, 0.5)
    second = tmp_path / "b.tif"
    write_raster(second, np.moveaxis(load_image(pictures[1]).rgb, -1, 0), transform=place)
    files = align_matches(matches_of(pictures[0], second, TRUTHS[name]), model=name).save(tmp_path / "out")
    with rasterio.open(files[0]) as file:
        gcps, _ = file.gcps
        assert bool(gcps) == (name == "homography")
        pairs = [((g.col, g.row), (g.x, g.y)) for g in gcps]
        pairs = pairs or [((c, r), file.transform * (c, r)) for c, r in ((0, 0), (100, 40), (319, 239))]
        assert file.count == 3 and (file.dataset_mask() == 0).any()
    for (column, row), ground in pairs:
        there = TRUTHS[name](np.array([[column - 0.5, row - 0.5]]))[0] + 0.5
        np.testing.assert_allclose(ground, place * tuple(there), atol=0.3)


@pytest.mark.parametrize("first", [True, False])
def test_control_points_without_a_coordinate_system_are_kept(pictures, tmp_path, first):
    """The frame's as they are, the other picture's as new ones."""
    rasterio = pytest.importorskip("rasterio")
    placed = tmp_path / "placed.tif"
    corners = [(0, 0), (0, WIDTH), (HEIGHT, 0), (HEIGHT, WIDTH)]
    points = [rasterio.control.GroundControlPoint(row=y, col=x, x=7 + x, y=9 - y) for y, x in corners]
    bands = np.moveaxis(load_image(pictures[1 - first]).rgb, -1, 0)
    write_raster(placed, bands, gcps=points, crs=rasterio.crs.CRS())
    two = (placed, pictures[1]) if first else (pictures[0], placed)
    files = align_matches(matches_of(*two, TRUTHS["homography"]), model="homography").save(tmp_path / "out")
    with rasterio.open(files[0]) as file:
        gcps, crs = file.gcps
    assert crs is None and len(gcps) == (4 if first else rasters.TIE_POINTS**2)


def test_without_rasterio_the_place_is_lost_with_a_word(pictures, tmp_path, monkeypatch, caplog):
    second = tmp_path / "b.tif"
    write_raster(second, np.moveaxis(load_image(pictures[1]).rgb, -1, 0), transform=(2, 0, 0, 0, -2, 0))
    monkeypatch.setattr(rasters, "find_spec", lambda _: None)
    with caplog.at_level(logging.WARNING):
        picture = rasters.open_picture(second)
    assert picture.raster is None and "prism-match[geo]" in caplog.text
    np.testing.assert_array_equal(picture.image.rgb, load_image(pictures[1]).rgb)


def test_a_damaged_raster_is_refused_by_one_line(tmp_path):
    rasterio = pytest.importorskip("rasterio")
    place = rasterio.transform.from_origin(500_000, 5_000_000, 0.5, 0.5)
    whole = tmp_path / "whole.tif"
    bands = np.random.default_rng(0).integers(0, 255, (2, 48, 64), np.uint8)
    write_raster(whole, bands, transform=place, compress="deflate")
    (tmp_path / "cut.tif").write_bytes(whole.read_bytes()[:-3000])
    with pytest.raises(UserError, match="cut.tif: not a georeferenced picture, or a damaged one"):
        rasters.open_picture(tmp_path / "cut.tif")
    # What tells of gigabytes, and has none of them.
    vast = {"count": 1, "height": 30_000, "width": 4_000, "dtype": "float64", "sparse_ok": True}
    with rasterio.open(tmp_path / "vast.tif", "w", driver="GTiff", transform=place, **vast):
        pass
    with pytest.raises(UserError, match="vast.tif: too many pixels"):
        rasters.open_picture(tmp_path / "vast.tif")
    # A list of other files under a name that is none.
    (tmp_path / "list.tif").write_text(
        f"""<VRTDataset rasterXSize="64" rasterYSize="48"><VRTRasterBand dataType="Byte" band="1">
        <SimpleSource><SourceFilename>{whole}</SourceFilename></SimpleSource>
        </VRTRasterBand></VRTDataset>"""
    )
    with pytest.raises(UserError, match="list.tif: not an image"):
        rasters.open_picture(tmp_path / "list.tif")


def test_damaged_exif_leaves_the_pixels(tmp_path, monkeypatch):
    """Pillow raises whatever comes to it."""
    path = tmp_path / "a.jpg"
    PIL.Image.fromarray(np.zeros((48, 64, 3), np.uint8)).save(path)

    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(rasters, "what_comes_along", fail)
    picture = rasters.open_picture(path)
    assert picture.image.size == (64, 48) and not picture.more


@pytest.fixture
def prism(monkeypatch, capsys):
    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["prism", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
            raise SystemExit(0)
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return run


def test_the_command_aligns_the_bundled_portrait(prism, tmp_path):
    """With the shipped weights, at a size that takes seconds."""
    pair = ASSETS / "astronaut0.jpg", tmp_path / "part.jpg"
    exif = PIL.Image.Exif()
    exif[0x0110] = "Camera"
    PIL.Image.open(ASSETS / "astronaut1.jpg").save(pair[1], quality=95, exif=exif)
    out = tmp_path / "out"
    options = ["--size", 256, "--device", "cpu", "--rotate", "never", "--model", "homography"]
    code, text, _ = prism("align", *pair, "-o", out, *options)
    assert code == 0 and "homography: asked for" in text and str(out / "aligned.png") in text
    assert PIL.Image.open(out / "aligned.png").getexif()[0x0110] == "Camera"
    found = np.array(json.loads((out / "alignment.json").read_text())["matrix"])
    truth = np.loadtxt(ASSETS / "astronaut_homography.txt")
    inner = warp_points(np.array([[60.0, 60], [400, 60], [400, 300], [60, 300]]), np.linalg.inv(truth))
    assert np.linalg.norm(warp_points(inner, found) - warp_points(inner, truth), axis=1).max() < 3


def test_the_command_tells_what_is_wrong_in_one_line(prism, tmp_path):
    good, text = ASSETS / "astronaut0.jpg", tmp_path / "text.tif"
    text.write_text("no picture")
    flat = tmp_path / "flat.png"
    cv2.imwrite(str(flat), np.full((160, 160), 128, np.uint8))
    long = tmp_path / "long.png"
    cv2.imwrite(str(long), np.zeros((32, 32767), np.uint8))
    for words, reason in (
        ((tmp_path / "none.jpg", good), "none.jpg: no such file"),
        ((good, text), "text.tif: not an image"),
        ((good, tmp_path), "is a folder, not an image"),
        ((good, long), "at most 32766 pixels a side can be aligned, not of 32767"),
        ((good, flat, "--size", 96, "--rotate", "never"), "flat.png: cannot be brought onto"),
    ):
        code, out, err = prism("align", *words, "-o", tmp_path / "out")
        assert code == 2 and out == "" and reason in err and len(err.splitlines()) == 1
    assert not list((tmp_path / "out").iterdir())


def test_as_many_pixels_as_can_be_moved():
    at = np.random.default_rng(0).uniform(0, (32000, 30), (200, 2))
    for side, fits in ((2**15 - 2, True), (2**15 - 1, False)):
        size = (side, 32)
        found = align_matches(Matches(at, at, np.ones(200), size, size), model="similarity")
        pixels = np.zeros((32, side), np.uint8)
        if fits:
            assert found.warp_pixels(pixels).shape == pixels.shape
            continue
        with pytest.raises(UserError, match="at most 32766 pixels a side"):
            found.warp_pixels(pixels)


def test_the_function_takes_arrays(pictures):
    """And a matcher of one's own."""
    first, second, matches = pictures

    class Known:
        size = 832

        def match(self, a, b):
            assert a.size == b.size == (WIDTH, HEIGHT)
            return matches

    found = align(load_image(first).rgb, load_image(second).rgb, matcher=Known(), model="similarity")
    assert found.model == "similarity"
    assert found.warp(load_image(second)).shape == (HEIGHT, WIDTH, 3)
