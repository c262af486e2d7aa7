"""Real pairs whose epipolar lines are known: what their matches agree on, and what is learnt from it."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from prism_match.colmap_model import PosedView, read_model
from prism_match.config import PRESETS
from prism_match.engine import Matcher
from prism_match.errors import UserError
from prism_match.matches import Matches
from prism_match.subpixel import Subpixel
from prism_match.training.consensus import ConsensusPairs, agreed, corrected_geometry, offsets
from prism_match.training.data.photos import PhotoPairs, PhotoStore
from prism_match.training.subpixel import SubpixelConfig, subpixel_loss, train_subpixel

NEAR, FAR = 9.0, 4.0  # pixels by which the lower and the upper half of a photo move to the right
SIDE = 256


@pytest.fixture
def two_photos(photo: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The second as a camera further to the left sees it: the lower half is nearer."""
    first = cv2.resize(photo, (SIDE, SIDE), interpolation=cv2.INTER_AREA)
    second = first.copy()
    for rows, shift in ((slice(0, SIDE // 2), FAR), (slice(SIDE // 2, SIDE), NEAR)):
        moved = np.float32([[1, 0, shift], [0, 1, 0]])
        second[rows] = cv2.warpAffine(first[rows], moved, (SIDE, SIDE // 2), borderMode=cv2.BORDER_REPLICATE)
    return first, second


def views_of(model: Path) -> tuple[PosedView, PosedView]:
    first, second = read_model(model).views
    return first, second


def nothing() -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((0, 2)), np.zeros((0, 2))


def true_matches(noise: float, wrong: int = 0) -> Matches:
    g = np.random.default_rng(0)
    x, y = np.meshgrid(np.arange(20, SIDE - 20, 8), np.arange(12, SIDE - 12, 8))
    points0 = np.stack([x.ravel(), y.ravel()], 1).astype(np.float32)
    shift = np.where(points0[:, 1] < SIDE / 2, FAR, NEAR)
    points1 = points0 + np.stack([shift, np.zeros(len(shift))], 1) + noise * g.standard_normal(points0.shape)
    points1[:wrong, 1] += 20 + 30 * g.random(wrong)
    scores = np.ones(len(points0), np.float32)
    return Matches(points0, points1.astype(np.float32), scores, (SIDE, SIDE), (SIDE, SIDE), "a", "b")


class Known(Matcher):
    """Finds what is there, give or take."""

    def match(self, *_: object, **__: object) -> Matches:  # type: ignore[override]
        return true_matches(0.3)

    def adjusted(self, **_: object) -> Known:  # type: ignore[override]
        return self


@pytest.fixture
def known() -> Known:
    return Known(device="cpu", config=PRESETS["tiny"])


@pytest.fixture
def model(two_photos: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> Path:
    """A COLMAP model whose second camera is turned by half a degree and should be further to the left."""
    (tmp_path / "images").mkdir()
    (tmp_path / "sparse").mkdir()
    for name, gray in zip("ab", two_photos, strict=True):
        cv2.imwrite(str(tmp_path / "images" / f"{name}.png"), gray)
    count = 40
    seen = " ".join(f"{10 + n}.5 {20 + n}.5 {n + 1}" for n in range(count))
    texts = {
        "cameras": f"1 PINHOLE {SIDE} {SIDE} 200 200 128 128\n",
        "images": f"1 1 0 0 0 0 0 0 1 a.png\n{seen}\n2 0.99999 0.003 0.002 0.003 1 0.03 0 1 b.png\n{seen}\n",
        "points3D": "".join(f"{n + 1} 0 {n} 5 0 0 0 1 1 {n} 2 {n}\n" for n in range(count)),
    }
    for name, text in texts.items():
        (tmp_path / "sparse" / f"{name}.txt").write_text(text)
    return tmp_path / "sparse"


def test_the_line_that_matches_agree_on_is_more_exact_than_they_are(model: Path) -> None:
    matches = true_matches(noise=0.3, wrong=60)
    views = views_of(model)
    before = offsets(corrected_geometry(views, *nothing()), matches.keypoints0, matches.keypoints1)[0]
    assert np.median(np.abs(before)) > 0.7
    found = agreed(3, 7, views, matches, torch.device("cpu"))
    assert found is not None and (found.first, found.second) == (3, 7)
    # Wrong ones are gone, and all that are left lie on rows of the photo, which are the epipolar lines.
    assert len(matches) - 60 - 40 < len(found.points0) <= len(matches) - 60
    assert (found.across.norm(dim=1) - 1).abs().max() < 1e-5
    assert found.across[:, 1].abs().min() > 0.99
    off = (found.points1 - found.points0)[:, 1].abs()
    assert off.median() < 0.05 and off.max() < 0.2
    assert (found.stretch - torch.eye(2)).abs().median() < 0.05 and (found.pixel < 1.1).all()


def test_matches_that_agree_on_nothing_teach_nothing(model: Path) -> None:
    matches, views = true_matches(noise=40.0), views_of(model)
    assert agreed(0, 1, views, matches, torch.device("cpu")) is None
    assert agreed(0, 1, views, matches.filter(top=5), torch.device("cpu")) is None
    assert agreed(0, 1, views, matches.filter(top=0), torch.device("cpu")) is None


def test_what_a_plane_cannot_tell_stays(model: Path) -> None:
    """Of points of one plane any direction of the other camera is right."""
    matches, views = true_matches(noise=0.0), views_of(model)
    plane = matches.keypoints0[:, 1] < SIDE / 2
    points = matches.keypoints0[plane], matches.keypoints1[plane]
    fundamental = corrected_geometry(views, *points)
    assert np.abs(offsets(fundamental, *points)[0]).max() < 0.05
    epipole = np.linalg.svd(fundamental.T)[2][-1]
    towards = np.linalg.inv(views[1].K) @ epipole
    assert abs(towards[0]) / np.linalg.norm(towards) > np.cos(0.1)


def test_errors_along_the_line_do_not_count(model: Path, known: Known) -> None:
    pairs = ConsensusPairs([model], known)
    assert len(pairs) == 1
    examples = pairs.sample(2, 100, torch.Generator().manual_seed(0))
    assert len(examples.image) == 200 and set(examples.image.tolist()) == {0, 1}
    assert examples.across is not None
    along = examples.across.flip(1) * torch.tensor([1.0, -1.0])
    assert examples.errors(examples.points1 + 5 * along).max() < 0.01
    assert (examples.errors(examples.points1 + 5 * examples.across) * examples.pixel - 5).abs().max() < 0.01
    # The windows are those of the photos: with the network as it begins, least squares, matches get better.
    torch.manual_seed(0)
    with torch.no_grad():
        _, found = subpixel_loss(Subpixel(), examples)
    assert found["after"] < 0.5 * found["before"]


def test_training_on_real_pairs_too(model: Path, known: Known, photo: np.ndarray, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    cv2.imwrite(str(photos / "p.png"), photo)
    source = PhotoPairs(PhotoStore.load([photos], 128), torch.device("cpu"))
    config = SubpixelConfig(minutes=1e-4, size=64, pairs=1, cells=20, parts=1, real_pairs=1)
    out = tmp_path / "subpixel.safetensors"
    real = ConsensusPairs([model], known)
    metrics = train_subpixel([source], out, config, torch.device("cpu"), real=real)
    assert out.is_file() and {"before", "after", "real_before", "real_after"} <= set(metrics)


def test_bad_collections_are_told_in_one_line(model: Path, known: Known, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file or folder"):
        ConsensusPairs([tmp_path / "nowhere"], known)
    known.match = lambda *_: true_matches(40.0)  # type: ignore[method-assign]
    with pytest.raises(UserError, match="no two photos match well enough"):
        ConsensusPairs([model], known)
    (model.parent / "images" / "b.png").unlink()
    with pytest.raises(UserError, match="images of the model are missing: b.png"):
        ConsensusPairs([model], known)
