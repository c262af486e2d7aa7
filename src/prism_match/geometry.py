"""Two-view geometry: warps, epipolar errors, poses, and robust estimation with a choice of back ends."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import cv2
import numpy as np

from prism_match.config import Backend, check_seed
from prism_match.errors import UserError

Model = Literal["homography", "fundamental", "essential"]

MINIMUM = {"homography": 4, "fundamental": 7, "essential": 5}  # points a model needs
THRESHOLD = {"homography": 3.0, "fundamental": 1.5, "essential": 1.5}  # pixels


@dataclass(frozen=True)
class Estimate:
    """A model fitted to matches. `matrix` is None where there was none to be found."""

    model: Model
    matrix: np.ndarray | None  # 3 3, float64; maps or relates points of image 0 to image 1
    inliers: np.ndarray  # n, bool
    rotation: np.ndarray | None = None  # 3 3, essential only: x1 = R x0 + t
    translation: np.ndarray | None = None  # 3, of unit length

    @property
    def num_inliers(self) -> int:
        return int(self.inliers.sum())


def estimate(
    points0: np.ndarray,
    points1: np.ndarray,
    model: Model,
    *,
    intrinsics0: np.ndarray | None = None,
    intrinsics1: np.ndarray | None = None,
    threshold: float | None = None,
    backend: Backend = "usac",
    confidence: float = 0.99999,
    max_iterations: int = 10_000,
    seed: int = 0,
) -> Estimate:
    """Fit a homography, a fundamental or an essential matrix to matches (n 2 each), robustly.

    threshold: in pixels. backend: "usac" is OpenCV's MAGSAC++, "opencv" its classic RANSAC (what the
    published benchmarks use), "poselib" PoseLib's LO-RANSAC. The essential matrix needs the 3x3
    intrinsics of both cameras and gives the relative pose too."""
    points0 = np.ascontiguousarray(points0, dtype=np.float64).reshape(-1, 2)
    points1 = np.ascontiguousarray(points1, dtype=np.float64).reshape(-1, 2)
    if model not in MINIMUM:
        raise UserError(f"model must be one of {', '.join(MINIMUM)}, not {model!r}")
    if backend not in ("opencv", "usac", "poselib"):
        raise UserError(f"backend must be opencv, usac or poselib, not {backend!r}")
    if len(points0) != len(points1):
        raise UserError(f"{len(points0)} points cannot be matched with {len(points1)}")
    if model == "essential" and (intrinsics0 is None or intrinsics1 is None):
        raise UserError("the essential matrix needs the intrinsics of both cameras")
    threshold = THRESHOLD[model] if threshold is None else threshold
    if not _is_number(threshold) or not 0 < threshold < math.inf:
        raise UserError(f"threshold must be a positive number of pixels, not {threshold!r}")
    if not _is_number(confidence) or not 0 < confidence < 1:
        raise UserError(f"confidence must be above 0 and below 1, not {confidence!r}")
    if not isinstance(max_iterations, (int, np.integer)) or max_iterations < 1:
        raise UserError(f"max_iterations must be a whole number of at least 1, not {max_iterations!r}")
    check_seed(seed)
    nothing = Estimate(model, None, np.zeros(len(points0), dtype=bool))
    if len(points0) < MINIMUM[model]:
        return nothing
    options = _Options(threshold, confidence, max_iterations, seed)
    fit = _fit_poselib if backend == "poselib" else _fit_opencv
    if model != "essential":
        matrix, inliers = fit(points0, points1, model, options, usac=backend == "usac")
        if matrix is None:
            return nothing
        if model == "homography":
            # One scale and sign for all back ends: points that are seen have a positive weight, which the
            # corner of a wide view need not have.
            weight = to_homogeneous(points0[inliers]) @ matrix[2]
            matrix = matrix * (-1 if np.sign(weight).sum() < 0 else 1) / np.linalg.norm(matrix[2])
        return Estimate(model, matrix, inliers)
    assert intrinsics0 is not None and intrinsics1 is not None
    k0, k1 = check_intrinsics(intrinsics0), check_intrinsics(intrinsics1)
    return _essential(points0, points1, k0, k1, options, backend) or nothing


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


@dataclass(frozen=True)
class _Options:
    threshold: float
    confidence: float
    max_iterations: int
    seed: int


def _fit_opencv(
    points0: np.ndarray, points1: np.ndarray, model: Model, o: _Options, usac: bool
) -> tuple[np.ndarray | None, np.ndarray]:
    nothing = None, np.zeros(len(points0), dtype=bool)
    try:
        if model == "homography":
            method = cv2.USAC_MAGSAC if usac else cv2.RANSAC
            matrix, inliers = cv2.findHomography(
                points0, points1, method, o.threshold, maxIters=o.max_iterations, confidence=o.confidence
            )
        else:
            method = cv2.USAC_MAGSAC if usac else cv2.FM_RANSAC
            matrix, inliers = cv2.findFundamentalMat(
                points0, points1, method, o.threshold, o.confidence, o.max_iterations
            )
    except cv2.error:  # OpenCV asserts on some degenerate sets
        return nothing
    if matrix is None or matrix.shape[0] < 3 or not np.isfinite(matrix).all():
        return nothing
    return matrix[:3], inliers.ravel().astype(bool)


def _fit_poselib(
    points0: np.ndarray, points1: np.ndarray, model: Model, o: _Options, usac: bool
) -> tuple[np.ndarray | None, np.ndarray]:
    poselib = import_poselib()
    ransac = _poselib_options(o, "max_reproj_error" if model == "homography" else "max_epipolar_error")
    fit = poselib.estimate_homography if model == "homography" else poselib.estimate_fundamental
    matrix, info = fit(points0, points1, ransac, {})
    inliers = np.array(info["inliers"], dtype=bool)
    return (None if inliers.sum() < MINIMUM[model] else np.asarray(matrix)), inliers


def _poselib_options(o: _Options, threshold_name: str) -> dict[str, float]:
    return {
        threshold_name: o.threshold,
        "success_prob": o.confidence,
        "max_iterations": o.max_iterations,
        "seed": o.seed,
    }


def _essential(
    points0: np.ndarray, points1: np.ndarray, k0: np.ndarray, k1: np.ndarray, o: _Options, backend: Backend
) -> Estimate | None:
    if backend == "poselib":
        poselib = import_poselib()
        cameras = [_poselib_camera(k) for k in (k0, k1)]
        pose, info = poselib.estimate_relative_pose(
            points0, points1, *cameras, _poselib_options(o, "max_epipolar_error"), {}
        )
        inliers = np.array(info["inliers"], dtype=bool)
        if inliers.sum() < MINIMUM["essential"]:
            return None
        rotation, translation = np.asarray(pose.R), np.asarray(pose.t)
        translation = translation / max(float(np.linalg.norm(translation)), 1e-12)
        return Estimate("essential", skew(translation) @ rotation, inliers, rotation, translation)
    x0, x1 = normalise(points0, k0), normalise(points1, k1)
    # One threshold in pixels for two cameras: relative to the mean of their focal lengths.
    focal = np.mean([k0[0, 0], k0[1, 1], k1[0, 0], k1[1, 1]])
    method = cv2.USAC_MAGSAC if backend == "usac" else cv2.RANSAC
    try:
        matrices, inliers = cv2.findEssentialMat(
            x0, x1, np.eye(3), method=method, prob=o.confidence, threshold=o.threshold / focal,
            maxIters=o.max_iterations,
        )  # fmt: skip
    except cv2.error:
        return None
    if matrices is None or inliers is None or not np.isfinite(matrices).all():
        return None
    best: Estimate | None = None
    in_front = -1
    # Several solutions may come back, one below the other: the one with most points in front counts.
    for matrix in matrices.reshape(-1, 3, 3):
        mask = inliers.copy()
        count, rotation, translation, _ = cv2.recoverPose(matrix, x0, x1, np.eye(3), 1e9, mask=mask)[:4]
        if count > in_front:
            in_front = count
            found = inliers.ravel().astype(bool)
            best = Estimate("essential", matrix, found, rotation, translation.ravel())
    return best


def import_poselib() -> Any:
    try:
        import poselib
    except ImportError as error:
        raise UserError("the poselib back end is not installed: pip install poselib") from error
    return poselib


def _poselib_camera(k: np.ndarray) -> dict[str, object]:
    # Both conventions agree as long as points and principal point are in the same one.
    return {
        "model": "PINHOLE",
        "width": int(2 * k[0, 2]) + 1,
        "height": int(2 * k[1, 2]) + 1,
        "params": [k[0, 0], k[1, 1], k[0, 2], k[1, 2]],
    }


def check_intrinsics(k: np.ndarray) -> np.ndarray:
    k = np.asarray(k, dtype=np.float64)
    if k.shape != (3, 3) or not np.isfinite(k).all() or k[0, 0] <= 0 or k[1, 1] <= 0:
        raise UserError("intrinsics must be a finite 3x3 matrix with positive focal lengths")
    return k


def normalise(points: np.ndarray, k: np.ndarray) -> np.ndarray:
    """n 2 pixels -> n 2 on the image plane at depth 1."""
    return to_points(to_homogeneous(points) @ np.linalg.inv(k).T)


def to_homogeneous(points: np.ndarray) -> np.ndarray:
    """n 2 -> n 3."""
    return np.concatenate([points, np.ones_like(points[:, :1])], axis=1)


def to_points(x: np.ndarray) -> np.ndarray:
    """n 3 -> n 2; NaN behind or on the plane at infinity."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(x[:, 2:] > 1e-12, x[:, :2] / x[:, 2:], np.nan)


def warp_points(points: np.ndarray, homography: np.ndarray) -> np.ndarray:
    """n 2 -> n 2, NaN where a point goes beyond infinity."""
    return to_points(to_homogeneous(np.asarray(points, dtype=np.float64)) @ homography.T)


def is_evident(agreeing: int, matches: int) -> bool:
    """Whether more matches agree with one geometry than chance would have: the rule by which Brown and Lowe
    tell the photos of a panorama from others (IJCV 2007)."""
    return agreeing > 8 + 0.3 * matches


def resize_matrix(sx: float, sy: float) -> np.ndarray:
    """3 3: a resize, which maps x to (x + 0.5) * s - 0.5; for points and, from the left, for intrinsics."""
    return np.array([[sx, 0, (sx - 1) / 2], [0, sy, (sy - 1) / 2], [0, 0, 1]])


def spread_over(points: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    """Indices, ascending, of `count` points (n 2) that cover their image evenly: from each cell of a grid
    first the one of the largest value (n), then the second, and so on."""
    if len(points) <= count or count < 1:
        return np.arange(min(len(points), max(0, count)))
    cell = float(np.ptp(points, axis=0).max()) / (2 * count**0.5) + 1e-6
    while True:
        _, where = np.unique(np.floor(points / cell), axis=0, return_inverse=True)
        if where.max() < count:  # no more cells than points to choose
            break
        cell *= 1.15
    where = where.ravel()
    by_cell = np.lexsort((-values, where))
    rank = np.empty(len(points), dtype=np.int64)
    rank[by_cell] = np.arange(len(points)) - np.searchsorted(where[by_cell], where[by_cell])
    return np.sort(np.lexsort((-values, rank))[:count])


def skew(v: np.ndarray) -> np.ndarray:
    """The matrix [v]x, so that [v]x u is the cross product."""
    return np.array([[0, -v[2], v[1]], [v[2], 0, -v[0]], [-v[1], v[0], 0]])


def symmetric_epipolar_error(x0: np.ndarray, x1: np.ndarray, e: np.ndarray) -> np.ndarray:
    """n: squared symmetric epipolar distance of matches (n 2 each), in the squared unit of the points.
    `e` is an essential matrix for normalised points or a fundamental matrix for pixels."""
    h0, h1 = to_homogeneous(x0), to_homogeneous(x1)
    line1, line0 = h0 @ e.T, h1 @ e
    product = (h1 * line1).sum(axis=1) ** 2
    norm0, norm1 = (np.maximum((line[:, :2] ** 2).sum(axis=1), 1e-12) for line in (line0, line1))
    return product * (1 / norm0 + 1 / norm1)


def pose_matrix(rotation: np.ndarray, translation: np.ndarray) -> np.ndarray:
    """4 4 of 3 3 and 3."""
    T = np.eye(4)
    T[:3, :3], T[:3, 3] = rotation, translation
    return T


def camera_centres(poses: np.ndarray) -> np.ndarray:
    """... 3 4 or ... 4 4, world to camera -> ... 3, where the cameras are in the world."""
    return -np.einsum("...ji,...j->...i", poses[..., :3, :3], poses[..., :3, 3])


def rotation_angle(a: np.ndarray, b: np.ndarray) -> float:
    """Degrees between two rotations. From sine and cosine: poses in files are rounded, and the arc cosine
    alone makes degrees of that."""
    turn = a.T @ b
    axis = turn[[2, 0, 1], [1, 2, 0]] - turn[[1, 2, 0], [2, 0, 1]]
    return float(np.degrees(np.arctan2(np.linalg.norm(axis) / 2, (np.trace(turn) - 1) / 2)))


def direction_angle(a: np.ndarray, b: np.ndarray) -> float:
    """Degrees between two translations whose sign and length are unknown: 0 to 90."""
    cosine = abs(a @ b) / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-12)
    return float(np.degrees(np.arccos(np.clip(cosine, -1, 1))))


def align_similarity(source: np.ndarray, target: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """Scale, rotation (3 3) and translation (3) that bring points n 3 closest to others, by least squares:
    target = scale * rotation @ source + translation. Three points that are not on a line are needed."""
    mean0, mean1 = source.mean(axis=0), target.mean(axis=0)
    x, y = source - mean0, target - mean1
    u, d, vt = np.linalg.svd(y.T @ x)
    sign = np.array([1.0, 1.0, np.sign(np.linalg.det(u) * np.linalg.det(vt))])
    rotation = u * sign @ vt
    scale = float((d * sign).sum() / max((x**2).sum(), 1e-12))
    return scale, rotation, mean1 - scale * rotation @ mean0
