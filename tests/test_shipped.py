"""The weights in the package, on photos whose geometry is known: no change may make them worse unseen."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from prism_match import Matcher, UserError
from prism_match import weights as weights_module
from prism_match.evaluation.bundled import BUNDLED
from prism_match.geometry import resize_matrix, warp_points
from prism_match.images import load_image

ASSETS = Path(__file__).parents[1] / "src" / "prism_match" / "assets"


@pytest.fixture(scope="module")
def matcher() -> Matcher:
    return Matcher(device="cpu")


@pytest.mark.parametrize("polish, median", [(True, 0.5), (False, 1.2)])
def test_the_demo_pair(
    polish: bool, median: float, matcher: Matcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A zoom of 1.8 with a turn, a tilt and other light."""
    assert matcher.info.trained
    monkeypatch.setattr(matcher, "polish", polish)
    matches = matcher.match(ASSETS / "astronaut0.jpg", ASSETS / "astronaut1.jpg", details=True)
    truth = warp_points(matches.keypoints0, np.loadtxt(ASSETS / "astronaut_homography.txt"))
    errors = np.linalg.norm(matches.keypoints1 - truth, axis=1)
    assert len(matches) > 700
    assert np.median(errors) < median
    assert (errors < 3).mean() > 0.85
    assert matches.details is not None
    assert matches.details.keep0[-1].mean() < 0.5, "the second view shows less than half of the first"
    assert matches.details.keep1[-1].mean() > 0.9


def test_the_motorcycle(matcher: Matcher) -> None:
    """Real photos from two places, with measured depth."""
    pair = BUNDLED["motorcycle"]
    matches = matcher.adjusted(size=384).match(*pair.photos)
    errors = pair.errors(matches.keypoints0, matches.keypoints1)
    known = errors[np.isfinite(errors)]
    assert len(matches) > 700 and len(known) > 0.85 * len(matches)
    assert np.median(known) < 0.5 and (known < 3).mean() > 0.8
    assert matches.same_place is not None and matches.same_place > 0.95


def test_the_truth_about_the_motorcycle() -> None:
    """The second photo, looked up where the truth says, is the first one."""
    pair = BUNDLED["motorcycle"]
    first, second = (load_image(path).gray for path in pair.photos)
    y, x = np.mgrid[0:500:4, 0:741:4].reshape(2, -1)
    truth = pair.truth(np.stack([x, y], axis=1))
    known = np.isfinite(truth).all(axis=1) & (truth[:, 0] >= 0)
    assert 0.8 < known.mean() < 1

    def difference(points: np.ndarray) -> float:
        there = cv2.remap(second, *points[known].astype(np.float32).T[..., None], cv2.INTER_LINEAR)[:, 0]
        return float(np.median(np.abs(first[y, x][known] - there)))

    right = difference(truth)
    assert right < 0.015
    for wrong in (np.stack([2 * x - truth[:, 0], y], 1), truth + [4, 0], truth + [0, 4]):
        assert difference(wrong) > 2 * right
    between = pair.truth(np.array([[300.25, 310.5], [-1.0, -1.0], [740.4, 499.4]]))
    assert np.isfinite(between[0]).all() and 10 < 300.25 - between[0, 0] < 60
    assert pair.truth(np.zeros((0, 2))).shape == (0, 2)


def test_a_small_shift(matcher: Matcher, photo: np.ndarray) -> None:
    """Easy, so it must be dense and exact."""
    matches = matcher.match(photo[:400, :400], photo[37:437, 21:421])
    errors = np.linalg.norm(matches.keypoints0 - [21, 37] - matches.keypoints1, axis=1)
    assert len(matches) > 1000
    assert np.median(errors) < 0.15 and (errors < 3).mean() > 0.97


def test_a_detail_is_found_at_another_scale(matcher: Matcher) -> None:
    """A fifth of the width of a photo, as large as all of it, in other light, and turned by a few degrees."""
    wide = load_image(BUNDLED["motorcycle"].photos[0]).rgb
    height, width = wide.shape[:2]
    to_detail = np.vstack([cv2.getRotationMatrix2D((0.45 * width, 0.55 * height), 7, 5.0), [0, 0, 1]])
    to_detail[:2, 2] += (0.05 * width, -0.05 * height)
    detail = cv2.warpPerspective(wide, to_detail, (width, height), flags=cv2.INTER_CUBIC)
    detail = (255 * (detail / 255.0) ** 1.3).astype(np.uint8)
    small = matcher.adjusted(size=320)
    right = []
    for rescale in ("never", "auto"):
        matches = small.adjusted(rescale=rescale).match(wide, detail)
        errors = np.linalg.norm(warp_points(matches.keypoints0, to_detail) - matches.keypoints1, axis=1)
        right.append(int((errors < 10).sum()))  # two pixels of the photo itself
    assert right[1] > 100 and right[1] > 3 * right[0] and right[1] > 0.9 * len(matches), right
    assert matches.certainty is not None and matches.certainty.mean() > 0.3


def test_a_detail_is_found_in_one_pass(matcher: Matcher, photo: np.ndarray) -> None:
    """Four times as large: weights that were taught such views as strangers find nothing of it."""
    detail = cv2.resize(photo[200:296, 180:276], (384, 384), interpolation=cv2.INTER_CUBIC)
    to_detail = resize_matrix(4, 4) @ np.array([[1, 0, -180], [0, 1, -200], [0, 0, 1.0]])
    matches = matcher.adjusted(rescale="never", rotate="never").match(photo, detail)
    errors = np.linalg.norm(warp_points(matches.keypoints0, to_detail) - matches.keypoints1, axis=1)
    right = int((errors < 4).sum())  # a pixel of the photo
    assert right > 40 and right > 0.6 * len(matches), (right, len(matches))


def test_strangers_hardly_match(matcher: Matcher, photo: np.ndarray) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (30, 40), dtype=np.uint8)
    stranger = cv2.resize(noise, (320, 240), interpolation=cv2.INTER_CUBIC)
    matches = matcher.match(photo, stranger)
    assert len(matches) < 10 and matches.same_place is not None and matches.same_place < 0.05


def test_damaged_weights_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(weights_module.SHIPPED.read_bytes())
    data[-1] ^= 1
    copy = tmp_path / "prism.safetensors"
    copy.write_bytes(data)
    monkeypatch.setattr(weights_module, "SHIPPED", copy)
    with pytest.raises(UserError, match="damaged"):
        Matcher(device="cpu")


def test_shipped_weights_are_half_precision_on_disk() -> None:
    assert weights_module.SHIPPED.stat().st_size < 50e6
    model = weights_module.load_model()
    assert all(p.dtype == torch.float32 for p in model.parameters())
