"""The weights in the package, on photos whose geometry is known: no change may make them worse unseen."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from prism_match import Matcher, UserError
from prism_match import weights as weights_module
from prism_match.geometry import warp_points

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


def test_a_small_shift(matcher: Matcher, photo: np.ndarray) -> None:
    """Easy, so it must be dense and exact."""
    matches = matcher.match(photo[:400, :400], photo[37:437, 21:421])
    errors = np.linalg.norm(matches.keypoints0 - [21, 37] - matches.keypoints1, axis=1)
    assert len(matches) > 1000
    assert np.median(errors) < 0.15 and (errors < 3).mean() > 0.97


def test_strangers_hardly_match(matcher: Matcher, photo: np.ndarray) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (30, 40), dtype=np.uint8)
    stranger = cv2.resize(noise, (320, 240), interpolation=cv2.INTER_CUBIC)
    assert len(matcher.match(photo, stranger)) < 10


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
