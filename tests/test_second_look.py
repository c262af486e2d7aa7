"""The second look: planned by the matches of the first, taken of the photos' own pixels, told in theirs."""

from __future__ import annotations

from dataclasses import replace

import cv2
import numpy as np
import pytest

from prism_match import Matcher, UserError
from prism_match.config import PRESETS
from prism_match.engine.methods import Prism
from prism_match.geometry import warp_points
from prism_match.images import load_image, resize
from prism_match.matcher import cut
from prism_match.second_look import FEWEST, Frame, plan_look
from prism_match.windows import Box

WHOLE = Frame((1600, 1200), 0.5, 1.0)


def zoomed(ratio: float, wrong: float = 0.0, count: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """Matches of photo 0 and of a part of it, of which photo 1 (1600 x 1200) shows nothing else."""
    g = np.random.default_rng(0)
    points1 = g.uniform(0, 1, (count, 2)) * [1599, 1199]
    points0 = points1 / ratio + [300, 200] + g.normal(0, 0.5, (count, 2))
    points1[: round(wrong * count)] = g.uniform(0, 1, (round(wrong * count), 2)) * [1599, 1199]
    return points0.astype(np.float32), points1.astype(np.float32)


@pytest.mark.parametrize("wrong", [0.0, 0.2])
@pytest.mark.parametrize("count", [60, 400, 4000])
def test_what_both_show_is_brought_to_one_scale(wrong: float, count: int) -> None:
    points0, points1 = zoomed(2.5, wrong, count)
    look = plan_look(points0, points1, WHOLE, WHOLE, 800)
    assert look is not None
    # 2.5 pixels of photo 1 are one of photo 0, of which there are no more: so these are what it is seen at.
    assert look.scale0 == pytest.approx(1.0, abs=0.02) and look.scale1 == pytest.approx(0.4, rel=0.06)
    right = slice(round(wrong * count), None)
    for box, points in ((look.box0, points0[right]), (look.box1, points1[right])):
        inside = np.all((points >= box[:2]) & (points <= np.array(box[2:]) - 1), axis=1)
        assert inside.mean() > 0.95
    assert max(look.box0.width, look.box0.height) < 0.6 * 1600
    back = plan_look(points1, points0, WHOLE, WHOLE, 800)
    assert back is not None and back.scale0 == pytest.approx(look.scale1, rel=0.1)


def test_a_small_part_is_looked_at_more_finely() -> None:
    g = np.random.default_rng(1)
    points0 = g.uniform(0, 400, (300, 2)) + [900, 300]
    points1 = points0 - [850, 250]
    look = plan_look(points0, points1, WHOLE, WHOLE, 800)
    assert look is not None and look.scale0 == pytest.approx(look.scale1, rel=0.02) == 1.0
    assert max(look.box0.width * look.scale0, look.box1.height * look.scale1) <= 801


def test_nothing_new_to_see_is_not_looked_at() -> None:
    g = np.random.default_rng(2)
    points = g.uniform(0, 1, (500, 2)) * [1599, 1199]
    assert plan_look(points, points + 1, WHOLE, WHOLE, 800) is None
    points0, points1 = zoomed(2.5)
    assert plan_look(points0[: FEWEST - 1], points1[: FEWEST - 1], WHOLE, WHOLE, 800) is None
    same = np.tile(points0[:1], (50, 1))
    assert plan_look(same, points1[:50], WHOLE, WHOLE, 800) is None
    assert plan_look(points0[:0], points1[:0], WHOLE, WHOLE, 800) is None
    # As large as it is: the far one has no more pixels, and the near one would have too few.
    tiny = Frame((1600, 1200), 0.5, 0.5)
    assert plan_look(points0 * 0.02, points1, tiny, tiny, 800) is None


@pytest.fixture(scope="module")
def tiny() -> Matcher:
    return Matcher(config=PRESETS["tiny"], device="cpu", size=160, threshold=0.0, rotate="never")


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_a_part_is_what_the_photo_shows_there(tiny: Matcher, photo: np.ndarray, turns: int) -> None:
    mask = np.zeros(photo.shape, np.uint8)
    mask[:, photo.shape[1] // 2 :] = 1
    whole = tiny.prepare(photo).masked(mask)
    assert whole.sharp is not None, "the photo is larger than it is matched at"
    box = Box(100, 60, 300, 220)
    part = whole.turned(turns).part(box, 0.5)
    assert part.sharp is not None and max(part.sharp.shape) == pytest.approx(200, abs=2), "polished as it is"
    small = replace(whole, gray=load_image(photo).gray, sharp=None).part(box, 0.5)
    assert max(small.gray.shape) == 100 and max(small.sharp.shape) == 200, (
        "also where there was no larger one"
    )
    crop, shown = cut(load_image(photo).gray, box, whole.size)
    assert part.area == pytest.approx(shown) and shown == pytest.approx((100, 60, 200, 160), abs=2)
    expected = np.rot90(resize(np.ascontiguousarray(crop), *(round(n * 0.5) for n in shown[2:])), turns)
    np.testing.assert_allclose(part.gray, expected, atol=2 / 255)
    # Its corners, and the middle, lie where the box does.
    h, w = part.gray.shape
    points = np.array([[-0.5, -0.5], [w - 0.5, h - 0.5], [w / 2 - 0.5, h / 2 - 0.5]], np.float32)
    there = part.to_original(points)
    left, top, width, height = shown
    assert there.min(0) == pytest.approx([left - 0.5, top - 0.5], abs=0.01)
    assert there.max(0) == pytest.approx([left + width - 0.5, top + height - 0.5], abs=0.01)
    assert there[2] == pytest.approx([left + width / 2 - 0.5, top + height / 2 - 0.5], abs=0.01)
    if turns == 0:
        np.testing.assert_allclose(part.from_original(there), points, atol=1e-3)
    seen = np.rot90(part.mask, -turns).mean(0) > 0.5
    middle = (photo.shape[1] / 2 - left) * 0.5
    assert seen[: max(0, int(middle) - 2)].sum() == 0 and seen[int(middle) + 3 :].all()


@pytest.fixture(scope="module")
def shipped() -> Matcher:
    return Matcher(device="cpu", precision="fp32", size=320, rotate="never")


@pytest.fixture
def detail(photo: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A part of the photo, as seen through a lens of 2.2 times the length, and the homography to it."""
    height, width = photo.shape
    homography = np.diag([2.2, 2.2, 1.0])
    homography[:2, 2] = [-1.0 * width / 2, -0.25 * height]
    return cv2.warpPerspective(photo, homography, (width, height), flags=cv2.INTER_CUBIC), homography


def test_it_finds_more_of_what_is_right(shipped: Matcher, photo: np.ndarray, detail) -> None:  # noqa: ANN001
    near, homography = detail
    never, auto = (
        shipped.adjusted(second_look=x).match(photo, near, details=True) for x in ("never", "auto")
    )
    right = [
        int((np.linalg.norm(warp_points(m.keypoints0, homography) - m.keypoints1, axis=1) < 3).sum())
        for m in (never, auto)
    ]
    assert right[1] > 1.5 * right[0] and right[1] > 0.9 * len(auto), right
    assert auto.certainty is not None and len(auto.certainty) == len(auto)
    assert (np.diff(auto.scores) <= 0).all() and auto.size0 == never.size0
    np.testing.assert_array_equal(auto.details.keep0, never.details.keep0)  # of all of the photo


def test_batches_and_single_pairs_look_alike(shipped: Matcher, photo: np.ndarray, detail) -> None:  # noqa: ANN001
    near, _ = detail
    auto = shipped.adjusted(second_look="auto", size=192)
    pairs = [(photo, near), (photo, photo)]
    many = list(auto.match_many(pairs, batch_size=2))
    for pair, found in zip(pairs, many, strict=True):
        np.testing.assert_allclose(auto.match(*pair).keypoints1, found.keypoints1, atol=1e-3)
    same = auto.adjusted(second_look="never").match(photo, photo)
    np.testing.assert_allclose(many[1].keypoints1, same.keypoints1, atol=1e-3)  # nothing new to see


def test_stores_tell_whether_there_was_one(tiny: Matcher) -> None:
    never, auto = (Prism(tiny.adjusted(second_look=x)).settings for x in ("never", "auto"))
    assert auto == never | {"second_look": "auto"}, "what is stored without one stays good"
    with pytest.raises(UserError, match="second_look must be one of auto, never, not 'twice'"):
        tiny.adjusted(second_look="twice")
