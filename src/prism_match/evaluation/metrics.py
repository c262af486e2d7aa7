"""The numbers in the tables: pose and corner errors, their AUC, and the precision of matches."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from prism_match.geometry import (
    direction_angle,
    normalise,
    rotation_angle,
    skew,
    symmetric_epipolar_error,
    warp_points,
)

POSE_THRESHOLDS = (5, 10, 20)  # degrees
CORNER_THRESHOLDS = (3, 5, 10)  # pixels
# Squared symmetric epipolar distance on the image plane at depth 1; the paper draws matches beyond in red.
EPIPOLAR_THRESHOLD = 5e-4


def pose_errors(rotation: np.ndarray, translation: np.ndarray, T_0to1: np.ndarray) -> tuple[float, float]:
    """Degrees of rotation and of translation between an estimate (3 3 and 3) and the truth (4 4).

    The length and the sign of a translation cannot be told from two views, so neither counts. Where
    the true cameras are in one place there is no direction to be wrong about: 0."""
    turn = rotation_angle(rotation, T_0to1[:3, :3])
    true = T_0to1[:3, 3]
    return turn, direction_angle(translation, true) if np.linalg.norm(true) > 1e-9 else 0.0


def auc(errors: Iterable[float], thresholds: Iterable[float]) -> dict[str, float]:
    """Percent of the area under the curve of recall over error, up to each threshold.

    As SuperGlue introduced it: the curve goes from (0, 0) through (error, share of pairs with at most
    this error) by straight lines, and flat from the last error below the threshold to the threshold.
    A failed pair has an infinite error (NaN counts the same) and is in the share's denominator."""
    found = np.array([e if np.isfinite(e) else np.inf for e in errors], dtype=float)
    if not len(found):
        return {f"{t:g}": float("nan") for t in thresholds}
    x = np.concatenate([[0.0], np.sort(found)])
    recall = np.arange(len(x)) / len(found)
    areas = {}
    for threshold in thresholds:
        below = int(np.searchsorted(x, threshold))
        xs = np.append(x[:below], threshold)
        ys = np.append(recall[:below], recall[below - 1])
        areas[f"{threshold:g}"] = float(100 * ((ys[1:] + ys[:-1]) / 2 * np.diff(xs)).sum() / threshold)
    return areas


def epipolar_errors(
    points0: np.ndarray, points1: np.ndarray, K0: np.ndarray, K1: np.ndarray, T_0to1: np.ndarray
) -> np.ndarray:
    """n: squared symmetric epipolar distance of matches (n 2 each, pixels) under the true pose (4 4),
    on the image plane at depth 1."""
    t = T_0to1[:3, 3]
    essential = skew(t / max(float(np.linalg.norm(t)), 1e-12)) @ T_0to1[:3, :3]
    return symmetric_epipolar_error(normalise(points0, K0), normalise(points1, K1), essential)


def corner_error(estimate: np.ndarray, truth: np.ndarray, size: tuple[int, int]) -> float:
    """Pixels: mean distance of where two homographies (3 3) take the corners of an image (width, height).
    Infinite where one of them takes a corner beyond infinity."""
    width, height = size
    corners = np.array([[0, 0], [width - 1, 0], [width - 1, height - 1], [0, height - 1]], dtype=float)
    distance = np.linalg.norm(warp_points(corners, estimate) - warp_points(corners, truth), axis=1).mean()
    return float(distance) if np.isfinite(distance) else float("inf")


def precision(errors: np.ndarray, threshold: float) -> float:
    """Percent of the matches whose error (n) is below the threshold; 0 where there are none."""
    return float(100 * (errors < threshold).mean()) if len(errors) else 0.0


def on_a_line(points: np.ndarray) -> bool:
    """Whether all points (n 2) lie on one line, to a hundredth of a pixel: no geometry follows from them."""
    spread = np.linalg.svd(points - points.mean(axis=0), compute_uv=False)
    return bool(spread[-1] <= 0.01 * np.sqrt(len(points)))
