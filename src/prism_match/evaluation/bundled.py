"""The pairs of photos in the package, and the truth about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import cv2
import numpy as np

from prism_match.geometry import warp_points

ASSETS = Path(__file__).parents[1] / "assets"
DISPARITY_UNITS = 16  # of motorcycle_disparity.png to a pixel; 0: not known
SAME_SURFACE = 1.0  # pixels: neighbours whose disparities differ by more are on two surfaces


@dataclass(frozen=True)
class BundledPair:
    name: str
    about: str  # what the two photos show
    geometry: Literal["homography", "fundamental"]  # what leads from one to the other
    truth: Callable[[np.ndarray], np.ndarray]  # n 2 in the first photo -> n 2 in the second, NaN: not known

    @property
    def photos(self) -> tuple[Path, Path]:
        return ASSETS / f"{self.name}0.jpg", ASSETS / f"{self.name}1.jpg"

    def errors(self, points0: np.ndarray, points1: np.ndarray) -> np.ndarray:
        """n: pixels of the second photo; NaN where the truth is not known."""
        return np.linalg.norm(points1 - self.truth(points0), axis=1)


def by_homography(points: np.ndarray) -> np.ndarray:
    return warp_points(points, np.loadtxt(ASSETS / "astronaut_homography.txt"))


def by_disparity(points: np.ndarray) -> np.ndarray:
    """The photos are rectified: what is at x in the first is at x minus its disparity in the second."""
    stored = np.asarray(cv2.imread(str(ASSETS / "motorcycle_disparity.png"), cv2.IMREAD_UNCHANGED))
    disparity = np.where(stored > 0, stored / DISPARITY_UNITS, np.nan)
    limit = np.array(disparity.shape[::-1]) - 1
    points = np.asarray(points, float).reshape(-1, 2)
    first = np.clip(np.floor(points), 0, limit - 1).astype(int)
    share = np.clip(points - first, 0, 1)
    corners = np.stack([disparity[first[:, 1] + dy, first[:, 0] + dx] for dy in (0, 1) for dx in (0, 1)], 1)
    x, y = share.T
    weights = np.stack([(1 - x) * (1 - y), x * (1 - y), (1 - x) * y, x * y], 1)
    nearest = corners[np.arange(len(corners)), weights.argmax(axis=1)]
    smooth = np.ptp(corners, axis=1) <= SAME_SURFACE  # and all four are known
    shift = np.where(smooth, (corners * weights).sum(axis=1), nearest)
    return points - np.stack([shift, np.zeros_like(shift)], axis=1)


BUNDLED = {
    pair.name: pair
    for pair in (
        BundledPair(
            "motorcycle",
            "a motorcycle from two places 193 mm apart",
            "fundamental",
            by_disparity,
        ),
        BundledPair(
            "astronaut",
            "a portrait, and a part of it zoomed, turned, tilted and dimmed",
            "homography",
            by_homography,
        ),
    )
}
