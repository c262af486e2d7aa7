"""Images of any size: parts that are read are what is there, tiles meet without seams or doubles, and pairs
of very different scale are matched."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import PIL.Image
import pytest
import torch
from conftest import held_by_another_process
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_match import Matcher, Matches, UserError, places, tiles, windows
from prism_match.certainty import PIXEL, TERMS, Calibration, Regression
from prism_match.config import PRESETS
from prism_match.engine.methods import Prism, TiledPrism
from prism_match.engine.photos import Resize
from prism_match.engine.run import Engine
from prism_match.geometry import resize_matrix, warp_points
from prism_match.matcher import ImageFeatures, Prepared
from prism_match.model.prism import Features
from prism_match.windows import Box, InMemory, OnDisk, open_windows

EVERYTHING = 2**40  # bytes


class SiftMatcher(Matcher):
    """SIFT in the place of the model, as blind as that: it sees neither what is turned by more than an eighth
    nor what is more than 1.6 times as large."""

    def __init__(self, **options: object):
        super().__init__(config=PRESETS["tiny"], device="cpu", **options)  # type: ignore[arg-type]
        self.seen: list[tuple[int, int]] = []  # pixels of each pair that was matched

    def extract_prepared(self, prepared):  # noqa: ANN001, ANN201
        return [ImageFeatures(p, Features(*(torch.zeros(1) for _ in range(3)))) for p in prepared]

    def _match_batch(self, pairs, details):  # noqa: ANN001, ANN201
        return [self.best_of(a.prepared, b.prepared) for a, b in pairs]

    def best_of(self, a: Prepared, b: Prepared) -> Matches:
        best = self.match_two(a, b)
        if self.rotate == "always" or (self.rotate == "auto" and len(best) < 10):
            best = max([best, *(self.match_two(a, b.turned(n)) for n in (1, 2, 3))], key=len)
        return best

    def match_two(self, a: Prepared, b: Prepared) -> Matches:
        self.seen.append((a.gray.size, b.gray.size))
        found = []
        for p in (a, b):
            gray = (p.to(torch.device("cpu")).numpy() * 255).round().astype(np.uint8)
            mask = None if p.mask is None else np.ascontiguousarray((p.mask >= 0.5).astype(np.uint8))
            sift = cv2.SIFT_create(min(gray.size // 50, 800), contrastThreshold=0.02)
            found.append(sift.detectAndCompute(gray, mask))
        (keys0, seen0), (keys1, seen1) = found
        pairs = []
        if len(keys0) and len(keys1):
            for m in cv2.BFMatcher(cv2.NORM_L2, crossCheck=True).match(seen0, seen1):
                k, j = keys0[m.queryIdx], keys1[m.trainIdx]
                turn = abs((k.angle - j.angle + 180) % 360 - 180)
                if m.distance < 120 and abs(math.log(k.size / j.size)) < math.log(1.6) and turn < 45:
                    pairs.append((*k.pt, *j.pt, 1 - m.distance / 240))
        best = {row[:2]: row for row in sorted(pairs, key=lambda row: row[4])}  # SIFT sees some in two ways
        best = {row[2:4]: row for row in best.values()}
        rows = np.array(sorted(best.values(), key=lambda row: -row[4]), np.float32).reshape(-1, 5)
        return Matches(
            a.to_original(rows[:, :2]), b.to_original(rows[:, 2:4]), rows[:, 4],
            a.size, b.size, a.name, b.name, certainty=rows[:, 4], sigma=rows[:, 4],
        )  # fmt: skip


def texture(width: int, height: int, seed: int = 0) -> np.ndarray:
    """h w, uint8: something to see at every scale."""
    g = np.random.default_rng(seed)
    total = np.zeros((height, width), np.float32)
    for step in (4, 12, 36, 108):
        noise = g.standard_normal((height // step + 3, width // step + 3)).astype(np.float32)
        total += cv2.resize(noise, (width, height), interpolation=cv2.INTER_CUBIC)
    return np.uint8((total * 32 + 128).clip(0, 255))


def about_centre(size: tuple[int, int], degrees: float, scale: float, to: tuple[int, int]) -> np.ndarray:
    """3 3: turned and scaled, the centre to the centre of an image of the size `to`."""
    turn = np.vstack(
        [cv2.getRotationMatrix2D(((size[0] - 1) / 2, (size[1] - 1) / 2), degrees, scale), [0, 0, 1]]
    )
    move = np.eye(3)
    move[:2, 2] = (np.array(to) - np.array(size)) / 2
    return move @ turn


def errors(found: Matches, homography: np.ndarray) -> np.ndarray:
    return np.linalg.norm(warp_points(found.keypoints0, homography) - found.keypoints1, axis=1)


def by_pixels() -> Calibration:
    """Twice as many pixels are a quarter of the odds, and twice the error."""
    right, error = np.zeros((2, TERMS))
    right[PIXEL], error[PIXEL] = -2, 1
    regression = Regression(tuple(right), tuple(error))
    return Calibration("", "", regression, regression)


@pytest.fixture(scope="module")
def large() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two images of 640 and 500 pixels, and the homography between them."""
    image0 = texture(640, 560)
    homography = about_centre((640, 560), 8, 0.9, (500, 460))
    homography[2, 0] = 4e-5
    image1 = cv2.warpPerspective(image0, homography, (500, 460), flags=cv2.INTER_AREA)
    return image0, image1, homography


@pytest.fixture(scope="module")
def tiled(large) -> tuple[SiftMatcher, Matches]:  # noqa: ANN001
    matcher = SiftMatcher(size=160, tiles="auto")
    return matcher, matcher.match(*large[:2])


def test_large_images_are_matched_at_full_detail(large, tiled) -> None:  # noqa: ANN001
    image0, image1, homography = large
    plain = SiftMatcher(size=160).match(image0, image1)
    matcher, found = tiled
    right, before = (int((errors(m, homography) < 1.5).sum()) for m in (found, plain))
    assert right > 4 * before and right > 0.9 * len(found)
    assert np.median(errors(found, homography)) < 0.5 * np.median(errors(plain, homography))
    assert (np.diff(found.scores) <= 0).all() and found.size0 == (640, 560) and found.size1 == (500, 460)
    assert max(max(pair) for pair in matcher.seen) <= 160**2, "no tile is larger than what was allowed"


def test_benchmarks_can_match_in_tiles(large, tiled, tmp_path: Path) -> None:  # noqa: ANN001
    files = {}
    for name, image in zip(("a", "b"), large[:2], strict=True):
        PIL.Image.fromarray(image).save(tmp_path / f"{name}.png")
        files[name] = tmp_path / f"{name}.png"
    method = TiledPrism(SiftMatcher(tiles="auto"))  # of the protocol's size, whatever the matcher's is
    (outcome,) = Engine(method, Resize(longer=160)).match(files, [("a", "b")])
    assert np.array_equal(outcome.matches.keypoints1, tiled[1].keypoints1)
    assert method.settings["tiles"] == "auto", "never to be taken for matches of one pass"


def test_certainty_is_about_pixels_of_the_image(large) -> None:  # noqa: ANN001
    image0, image1, _ = large
    finer = cv2.resize(image1, None, fx=2, fy=2, interpolation=cv2.INTER_CUBIC)
    matcher = SiftMatcher(size=160, tiles="auto")
    matcher.calibration = by_pixels()
    same, twice = matcher.match(image0, image1), matcher.match(image0, finer)
    # SiftMatcher gives the score for both of them, in pixels of what it was given.
    np.testing.assert_allclose(same.certainty, same.scores, atol=0.02)
    grown = twice.sigma / twice.scores  # what was matched had the scale of image 0, which is a little coarser
    assert grown.min() > 1.6 and grown.max() < 2.1
    odds, before = (x / (1 - x) for x in (twice.certainty, twice.scores))
    np.testing.assert_allclose(odds, before / grown**2, rtol=1e-2)
    matcher.calibration = None
    assert matcher.match(image0, image1).certainty is None


def test_no_seams_and_no_doubles(large, tiled) -> None:  # noqa: ANN001
    homography, found = large[2], tiled[1]
    good = found.filter(errors(found, homography) < 1.5)
    inner = good.filter(np.all(np.abs(good.keypoints0 - [320, 280]) < 200, axis=1))
    for axis in (0, 1):  # about as many in each strip of so even a texture, wherever tiles meet
        strips = np.histogram(inner.keypoints0[:, axis], bins=20)[0]
        assert strips.min() > 0.5 * np.median(strips), strips
    for points in (good.keypoints0, good.keypoints1):
        assert len(np.unique(points, axis=0)) == len(points)


def test_doubles_of_other_tiles_go_and_neighbours_of_the_same_stay() -> None:
    points = np.array([[10.0, 10], [11, 10], [50, 50], [50.5, 50], [90, 90]])
    scores, tile = np.array([0.9, 0.5, 0.4, 0.8, 0.1]), np.array([0, 0, 0, 1, 1])
    assert tiles.without_doubles(points, scores, tile, 8.0).tolist() == [True, True, False, True, True]
    g = np.random.default_rng(0)
    points, tile, scores = g.uniform(0, 60, (300, 2)), g.integers(0, 3, 300), g.uniform(0, 1, 300)
    keep = tiles.without_doubles(points, scores, tile, 8.0)
    near = np.abs(points[keep][:, None] - points[keep]).max(-1) < 4
    assert (tile[keep][:, None] == tile[keep])[near].all() and keep.sum() > 20
    assert not len(tiles.without_doubles(np.zeros((0, 2)), np.zeros(0), np.zeros(0), 8.0))


@pytest.mark.parametrize(
    ("which", "zoom", "degrees"),
    [
        (0, 4.0, 90),
        (1, 6.0, 8),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 3.0, 0), (0, 8.0, 0))),
    ],
)
def test_a_detail_meets_the_whole(which: int, zoom: float, degrees: float) -> None:
    """One image shows 1/zoom of the other, as large, and turned."""
    wide = texture(1200, 1200, 1)
    homography = about_centre((1200, 1200), degrees, 1.0, (round(1200 / zoom),) * 2)
    detail = cv2.warpPerspective(wide, homography, (round(1200 / zoom),) * 2, flags=cv2.INTER_CUBIC)
    images, truth = (wide, detail), homography
    if which:
        images, truth = images[::-1], np.linalg.inv(homography)
    counts = []
    for matcher in (SiftMatcher(size=240), SiftMatcher(size=240, tiles="auto")):
        found = matcher.match(*images)
        counts.append(int((errors(found, truth) < 1.5).sum()))
    assert counts[1] > 40 and counts[1] > 2 * counts[0], counts


@pytest.mark.parametrize(("which", "degrees", "size"), [(0, 8, 240), (1, 90, 480)])
def test_a_detail_meets_the_whole_without_tiles(
    which: int, degrees: float, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where two images hardly match, other scales are tried from what was kept of them to polish by; turned
    ones at half the size."""
    wide = texture(900, 900, 1)
    homography = about_centre((900, 900), degrees, 1.0, (225, 225))
    detail = cv2.warpPerspective(wide, homography, (225, 225), flags=cv2.INTER_CUBIC)
    detail = cv2.resize(detail, (900, 900), interpolation=cv2.INTER_CUBIC)
    homography = resize_matrix(4, 4) @ homography
    images, truth = (wide, detail), homography
    if which:
        images, truth = images[::-1], np.linalg.inv(homography)
    matcher = SiftMatcher(size=size)
    matcher.calibration = by_pixels()
    pair = tuple(matcher.extract(images))
    (plain,) = matcher.match_extracted([pair])
    found = tiles.match_at_other_scales(matcher, pair, plain)
    right, before = (int((errors(m, truth) < 4).sum()) for m in (found, plain))
    assert right > 40 and right > 3 * before and right > 0.9 * len(found), (before, right, len(found))
    assert (found.size0, found.size1, found.name0) == (plain.size0, plain.size1, plain.name0)
    assert (np.diff(found.scores) <= 0).all() and found.certainty is not None
    mask = np.zeros((900, 900), bool)
    mask[:, 380:] = True
    half = tiles.match_at_other_scales(matcher, (pair[0].masked(mask), pair[1]), plain.filter(top=0))
    monkeypatch.setattr(places, "same_place", lambda matches: 0.3)
    assert tiles.match_at_other_scales(matcher, pair, plain) is plain, "one of many tries, and not likely"
    assert 0 < len(half) < len(found) and (half.keypoints0[:, 0] > 370).all()


@pytest.mark.parametrize("which", [0, 1])
def test_what_a_smaller_image_tells_is_told_in_pixels_of_image_1(which: int) -> None:
    """One pass against an image that was shrunk to a fourth: an error of a pixel there is four of it."""
    wide = texture(640, 640, 1)
    detail = cv2.resize(wide[240:400, 240:400], (640, 640), interpolation=cv2.INTER_CUBIC)
    images = (wide, detail) if which else (detail, wide)
    matcher = SiftMatcher(size=640, rotate="never")
    matcher.calibration = by_pixels()
    opened = tuple(open_windows(image, None, EVERYTHING) for image in images)
    views = [tiles.View(w.box, f) for w, f in zip(opened, matcher.extract(images), strict=True)]
    empty = Matches(*np.zeros((2, 0, 2)), np.zeros(0), (640, 640), (640, 640))
    search = tiles.ScaleSearch(opened, images, views, tiles.Pass(empty, 1.0, 1.0))
    (found,) = search.against(views[1 - which], which, 4, matcher)
    assert found.support > 20 and (found.scale0, found.scale1) == ((1.0, 0.25) if which else (0.25, 1.0))
    # SiftMatcher gives the score for sigma, in pixels of the image that it was given, shrunk or not.
    told = 1.0 if which else 0.25
    np.testing.assert_allclose(found.matches.sigma, told * found.matches.scores, rtol=0.02)


def test_strangers_stay_what_they_are_at_other_scales() -> None:
    matcher = SiftMatcher(size=160)
    for a, b in (
        (texture(500, 400, 5), texture(400, 500, 6)), (np.zeros((400, 500), np.uint8),) * 2,
        (texture(40, 36, 7), texture(33, 64, 8)),
    ):  # fmt: skip
        pair = tuple(matcher.extract([a, b]))
        (plain,) = matcher.match_extracted([pair])
        assert tiles.match_at_other_scales(matcher, pair, plain) is plain


def test_a_small_piece_is_found_in_a_large_image() -> None:
    """Cut out of it, and so with as many pixels for a thing: shrunk, it would have nothing left."""
    image0 = texture(900, 800, 3)
    homography = about_centre((900, 800), 6, 1.0, (100, 96))
    homography[:2, 2] -= [150, -90]
    piece = cv2.warpPerspective(image0, homography, (100, 96), flags=cv2.INTER_CUBIC)
    plain = SiftMatcher(size=320).match(image0, piece)
    found = SiftMatcher(size=320, tiles="auto", rotate="never").match(image0, piece)
    right, before = (int((errors(m, homography) < 1.5).sum()) for m in (found, plain))
    assert before < 8 and right > 20 and right > 0.8 * len(found), (before, right, len(found))


def test_small_images_are_matched_as_ever(photo: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"config": PRESETS["tiny"].replace(theta_c=0.0), "device": "cpu", "size": 160}
    photo = cv2.resize(photo, (160, 128), interpolation=cv2.INTER_AREA)
    plain, tiled = Matcher(**options), Matcher(**options, tiles="auto")
    # Random weights match nothing: other scales would be tried.
    monkeypatch.setattr(tiles.Pass, "is_weak", lambda self: False)
    a, b = (m.match(photo, photo, details=True) for m in (plain, tiled))
    np.testing.assert_array_equal(a.keypoints0, b.keypoints0)
    np.testing.assert_array_equal(a.keypoints1, b.keypoints1)
    np.testing.assert_array_equal(a.details.keep0, b.details.keep0)
    assert b.images[0] is not None, "kept, so that they can be drawn"


def test_strangers_and_black_images_are_no_error() -> None:
    matcher = SiftMatcher(size=160, tiles="auto")
    black = np.zeros((400, 500), np.uint8)
    assert len(matcher.match(black, black)) == 0
    assert len(matcher.match(texture(500, 400, 5), texture(400, 500, 6))) < 16


def test_only_the_overlap_costs(large) -> None:  # noqa: ANN001
    """What image 1 does not see is looked at once, small."""
    image0, image1, homography = large
    counts = []
    for share in (1.0, 0.4):
        matcher = SiftMatcher(size=240, tiles="auto")
        other = texture(500, 460, 9)
        part = slice(0, round(460 * share)), slice(0, round(500 * share))
        other[part] = image1[part]
        matcher.match(image0, other)
        counts.append(len(matcher.seen))
    assert counts[1] < 0.5 * counts[0], counts


def test_the_overlap_is_followed_beyond_what_the_first_pass_saw(large) -> None:  # noqa: ANN001
    image0, image1, homography = large
    matcher = SiftMatcher(size=160, rotate="never")
    points0 = np.stack(np.meshgrid(np.arange(20.0, 140, 20), np.arange(40.0, 160, 20)), -1).reshape(-1, 2)
    points1 = warp_points(points0, homography)
    last = tiles.Pass(Matches(points0, points1, np.ones(len(points0)), (640, 560), (500, 460)), 0.25, 0.25)
    planned = tiles.plan_tiles(last, 160)
    with open_windows(image0, None, EVERYTHING) as first, open_windows(image1, None, EVERYTHING) as second:
        rows = [tiles.match_tile(matcher, first, second, tile, n) for n, tile in enumerate(planned)]
        seen = tiles.merged(rows, planned, last).matches
        found = tiles.match_overlap(matcher, first, second, planned, last, 1.0).matches
    assert seen.keypoints0[:, 0].max() < 200, "what was planned is a corner of it"
    assert (errors(found, homography) < 1.5).mean() > 0.95
    inside = warp_points(
        np.stack(np.meshgrid(np.arange(8, 632, 48), np.arange(8, 552, 48)), -1).reshape(-1, 2), homography
    )
    shared = np.all((inside > 20) & (inside < [480, 440]), axis=1)
    near = np.abs(found.keypoints1[:, None] - inside[shared]).max(-1).min(0) < 32
    assert near.mean() > 0.95, "matches wherever both images see the same"


def test_masks_hold_in_tiles(large) -> None:  # noqa: ANN001
    image0, image1, _ = large
    mask0, mask1 = np.zeros((560, 640), bool), np.ones((460, 500), np.uint8)
    mask0[:, 280:], mask1[280:] = True, 0
    found = SiftMatcher(size=160, tiles="auto").match(image0, image1, mask0, mask1)
    assert len(found) > 50
    assert (found.keypoints0[:, 0] > 275).all() and (found.keypoints1[:, 1] < 285).all()
    with pytest.raises(UserError, match="the mask is 640x560 but its image"):
        SiftMatcher(size=160, tiles="auto").match(image0, image1, None, mask0)


def test_max_matches_are_of_all_tiles(large, tiled) -> None:  # noqa: ANN001
    found = SiftMatcher(size=160, tiles="auto", max_matches=50).match(*large[:2])
    np.testing.assert_array_equal(found.scores, tiled[1].scores[:50])


@settings(max_examples=15, deadline=None)
@given(
    st.floats(0.2, 5), st.floats(-180, 180), st.integers(200, 1500), st.integers(200, 1500), st.integers(0, 9)
)
def test_tiles_cover_what_matched_and_fit(
    scale: float, degrees: float, width: int, height: int, seed: int
) -> None:
    size0 = (width, height)
    side = math.ceil(math.hypot(width, height) * scale)
    homography = about_centre(size0, degrees, scale, (side, side))
    g = np.random.default_rng(seed)
    points0 = g.uniform(0, 1, (2000, 2)) * (np.array(size0) - 1)
    points1 = warp_points(points0, homography) + g.normal(0, 0.5, (2000, 2))
    coarse = 160 / max(size0), 160 / side
    last = tiles.Pass(Matches(points0, points1, np.ones(2000), size0, (side, side)), *coarse)
    plan = tiles.plan_tiles(last, 256)
    owners = np.zeros(2000, int)
    for tile in plan:
        mine = np.all((points0 >= tile.core[:2]) & (points0 < tile.core[2:]), axis=1)
        owners += mine
        assert tile.scale0 <= 1 and tile.scale1 <= 1 + 1e-9, "never enlarged"
        for box, factor in ((tile.box0, tile.scale0), (tile.box1, tile.scale1)):
            assert max(box.width, box.height) * factor <= 256 + 1
        there = points1[mine]
        assert np.all((there >= np.array(tile.box1[:2]) - 2) & (there <= np.array(tile.box1[2:]) + 1))
        turned = np.deg2rad(-degrees) - tile.turns * math.pi / 2
        assert math.cos(turned) > math.cos(math.pi / 4 + 0.1), "at most an eighth of a turn is left"
    assert owners.max() <= 1, "no point belongs to two tiles"
    assert (owners == 1).mean() > 0.95


def write_tiff(path: Path, pixels: np.ndarray, **options: object) -> None:
    rasterio = pytest.importorskip("rasterio")
    bands = np.moveaxis(np.atleast_3d(pixels), -1, 0)
    with pytest.warns(Warning), rasterio.open(
        path, "w", driver="GTiff", width=pixels.shape[1], height=pixels.shape[0], count=len(bands),
        dtype=pixels.dtype, tiled=True, blockxsize=256, blockysize=256, compress="deflate", **options,
    ) as file:  # fmt: skip
        file.write(bands)


@pytest.mark.parametrize("kind", ["gray", "rgb", "16 bit", "alpha"])
def test_windows_are_what_whole_reads_are(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.tif"
    pixels = texture(700, 500)
    if kind in ("rgb", "alpha"):
        pixels = np.stack([pixels, pixels[::-1], pixels[:, ::-1]], axis=-1)
    if kind == "16 bit":
        pixels = pixels.astype(np.uint16) * 257
    if kind == "alpha":
        alpha = np.full((500, 700, 1), 255, np.uint8)
        alpha[:, 300:450] = 0
        pixels = np.concatenate([pixels, alpha], axis=2)
        write_tiff(path, pixels, photometric="RGB", alpha="unspecified")
    else:
        write_tiff(path, pixels)
    with open_windows(path, None, 0) as parts, open_windows(path, None, EVERYTHING) as whole:
        assert isinstance(parts, OnDisk) and isinstance(whole, InMemory) and parts.size == whole.size
        assert parts.held == 0 and whole.held >= pixels.size * 0.75
        for box, scale in (
            (Box(0, 0, 700, 500), 1),
            (Box(130, 70, 421, 333), 1),
            (Box(5, 90, 333, 480), 0.4),
        ):
            a, b = (w.part(box, scale) for w in (parts, whole))
            np.testing.assert_allclose(a.gray, b.gray, atol=1e-6)
            assert (a.opaque is None) == (b.opaque is None)
            if a.opaque is not None:
                np.testing.assert_array_equal(a.opaque, b.opaque)
        a, b = (w.part(w.box, 0.1) for w in (parts, whole))  # GDAL decimates
        assert a.size == b.size == (70, 50) and np.abs(a.gray - b.gray).mean() < 0.02


def test_what_pillow_refuses_to_decode_is_read_by_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever memory there is."""
    pixels = texture(700, 500)
    write_tiff(tmp_path / "a.tif", pixels)
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 100_000)
    with open_windows(tmp_path / "a.tif", None, EVERYTHING) as parts:
        assert isinstance(parts, OnDisk)
        np.testing.assert_allclose(parts.part(parts.box, 1).gray * 255, pixels, atol=1e-3)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_windows_are_upright(tmp_path: Path, orientation: int) -> None:
    pytest.importorskip("rasterio")
    path = tmp_path / "a.jpg"
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    PIL.Image.fromarray(texture(300, 200)).save(path, quality=95, exif=exif)
    with open_windows(path, None, 0) as parts, open_windows(path, None, EVERYTHING) as whole:
        assert isinstance(parts, OnDisk) and parts.size == whole.size
        box = Box(20, 30, 150, 190)
        np.testing.assert_allclose(parts.part(box, 1).gray, whole.part(box, 1).gray, atol=0.02)


def test_files_by_windows_give_the_same_matches(tmp_path: Path, large, tiled, monkeypatch) -> None:  # noqa: ANN001
    paths = [tmp_path / f"{n}.tif" for n in (0, 1)]
    for path, image in zip(paths, large, strict=False):
        write_tiff(path, image)
    matcher = SiftMatcher(size=160, tiles="auto")
    whole = tiled[1]
    monkeypatch.setattr(tiles, "WHOLE", 0)
    parts = matcher.match(*paths)
    assert len(parts) == len(whole) > 100
    np.testing.assert_allclose(parts.keypoints1, whole.keypoints1, atol=1e-3)
    assert parts.name0 == str(paths[0])


def test_a_file_of_windows_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image that Pillow would refuse, 600 MB once it is decoded, almost all of it empty."""
    rasterio = pytest.importorskip("rasterio")
    path = tmp_path / "huge.tif"
    part = texture(600, 500)
    with pytest.warns(Warning), rasterio.open(
        path, "w", driver="GTiff", width=25_000, height=24_000, count=1, dtype="uint8", tiled=True,
        sparse_ok=True, compress="deflate",
    ) as file:  # fmt: skip
        file.write(part[None], window=rasterio.windows.Window(20_000, 18_000, 600, 500))
    tracemalloc.start()
    with open_windows(path, None, 2**28) as image:
        assert image.size == (25_000, 24_000)
        found = image.part(Box(20_000, 18_000, 20_600, 18_500), 1.0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(found.pixels, part)
    assert peak < 20 * 2**20
    monkeypatch.setattr(windows, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"by windows it can be read: pip install 'prism-match\[geo\]'"):
        open_windows(path, None, 2**28)


def test_reading_by_windows_keeps_little(tmp_path: Path) -> None:
    """GDAL would keep a twentieth of the machine's memory of what it has decoded."""
    rasterio = pytest.importorskip("rasterio")
    path = tmp_path / "huge.tif"
    with pytest.warns(Warning), rasterio.open(
        path, "w", driver="GTiff", width=25_000, height=24_000, count=1, dtype="uint8", tiled=True,
        sparse_ok=True,
    ):  # fmt: skip
        pass
    before, most = held_by_another_process(f"""
from prism_match.windows import open_windows
has()
with open_windows({str(path)!r}, None, 2**28) as image:
    image.part(image.box, 0.02)
had()
""")
    assert most < before + 250


def test_memory_sets_the_size_of_tiles(large) -> None:  # noqa: ANN001
    image0, image1, _ = large
    sides = []
    for memory in (1.2, 1.5, 8.0):
        matcher = SiftMatcher(size=832, tiles="auto", tile_memory=memory)
        with open_windows(image0, None, EVERYTHING) as a, open_windows(image1, None, EVERYTHING) as b:
            side = tiles.tile_side(matcher, (a, b))
            assert tiles.CPU_MEMORY[side] + (a.held + b.held) / 2**30 <= memory
        sides.append(side)
    assert sides == sorted(sides) and sides[0] < sides[-1]
    matcher = SiftMatcher(size=832, tiles="auto", tile_memory=1.2)
    matcher.match(image0, image1)
    assert max(max(pair) for pair in matcher.seen) <= sides[0] ** 2
    with pytest.raises(UserError, match="tiles need at least"):
        matcher.adjusted(tile_memory=0.2).match(image0, image1)
    with pytest.raises(UserError, match="GiB decoded, which leaves too little"):
        held = replace(open_windows(image0, None, EVERYTHING), held=2**31)
        tiles.tile_side(matcher, (held, held))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"tiles": "many"}, "tiles must be None or auto"),
        ({"tile_memory": 2.0}, "tile_memory is for tiles alone"),
        ({"tiles": "auto", "tile_memory": 0}, "positive number of GiB"),
        ({"tiles": "auto", "tile_memory": math.nan}, "positive number of GiB"),
        ({"tiles": "auto", "tile_memory": True}, "positive number of GiB"),
    ],
)
def test_bad_options(options: dict, word: str) -> None:
    with pytest.raises(UserError, match=word):
        Matcher(config=PRESETS["tiny"], device="cpu", **options)


def test_bad_files_are_told_in_one_line(tmp_path: Path) -> None:
    matcher = SiftMatcher(size=160, tiles="auto")
    good = texture(300, 200)
    for name, data, word in (
        ("none.tif", None, "no such file"),
        ("empty.tif", b"", "is empty"),
        ("text.tif", b"hello", "not an image"),
    ):
        if data is not None:
            (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match=word):
            matcher.match(tmp_path / name, good)
    write_tiff(tmp_path / "cut.tif", texture(900, 700))
    whole = (tmp_path / "cut.tif").read_bytes()
    (tmp_path / "cut.tif").write_bytes(whole[: len(whole) // 2])
    for limit in (0, EVERYTHING):
        with (
            pytest.raises(UserError, match="cut.tif"),
            open_windows(tmp_path / "cut.tif", None, limit) as image,
        ):
            image.part(image.box, 1.0)
    with pytest.raises(UserError, match="too small"):
        matcher.match(good, good[:20])


def test_many_pairs_and_extraction_with_tiles(large, tiled) -> None:  # noqa: ANN001
    image0, image1, _ = large
    matcher, expected = tiled
    (found,) = matcher.match_many([(image0, image1, None, None)])
    np.testing.assert_array_equal(found.keypoints1, expected.keypoints1)
    with pytest.raises(UserError, match="single pairs"):
        Prism(matcher)
    with pytest.raises(UserError, match="frames are matched whole"):
        matcher.track([image0, image1])
    with pytest.raises(UserError, match="depends on its partner"):
        matcher.extract([image0])
