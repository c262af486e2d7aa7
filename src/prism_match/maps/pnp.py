"""The pose of a camera from pixels and the points of the map that they show."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

import cv2
import numpy as np

from prism_match.cameras import Camera
from prism_match.config import PnpBackend
from prism_match.errors import UserError
from prism_match.geometry import import_poselib, pose_matrix

LEAST = 4  # correspondences: three for a pose, one that speaks for it
CONFIDENCE = 0.99999
ITERATIONS = 10_000
LOSS_SCALE = 1.0  # pixels from which on a residual counts less, in the refinement


@dataclass(frozen=True)
class PoseEstimate:
    T: np.ndarray | None  # 4 4, float64: world to camera; None: there was none to be found
    inliers: np.ndarray  # n, bool

    @property
    def num_inliers(self) -> int:
        return int(self.inliers.sum())


def choose_backend(backend: PnpBackend) -> Literal["poselib", "opencv"]:
    """The one to use; "auto" is PoseLib where it is installed. A missing one is told before any work."""
    if backend == "auto":
        return "poselib" if importlib.util.find_spec("poselib") else "opencv"
    if backend not in ("poselib", "opencv"):
        raise UserError(f"the back end of PnP must be auto, poselib or opencv, not {backend!r}")
    if backend == "poselib":
        import_poselib()
    return backend


def estimate_camera_pose(
    pixels: np.ndarray,
    xyz: np.ndarray,
    camera: Camera,
    threshold: float = 12.0,
    backend: PnpBackend = "auto",
    seed: int = 0,
) -> PoseEstimate:
    """PnP with RANSAC, then a robust refinement over the inliers.

    pixels: n 2 in the photo, distorted as its lens does it; xyz: n 3 in the world; threshold: pixels."""
    nothing = PoseEstimate(None, np.zeros(len(pixels), dtype=bool))
    # As a pinhole camera of the same focal length would have seen them: then one solver does for all lenses.
    focal = float((camera.K[0, 0] + camera.K[1, 1]) / 2)
    plane = focal * camera.normalise(pixels)
    usable = np.flatnonzero(np.isfinite(plane).all(axis=1) & np.isfinite(xyz).all(axis=1))
    if len(usable) < LEAST:
        return nothing
    # OpenCV's RANSAC always starts from the same random state: the seed is in the order of the points.
    usable = usable[np.random.default_rng(seed).permutation(len(usable))]
    middle = np.median(xyz[usable], axis=0)  # coordinates of a survey are large and would lose digits
    points, local = plane[usable], xyz[usable] - middle
    solve = _solve_poselib if choose_backend(backend) == "poselib" else _solve_opencv
    T = solve(points, local, focal, threshold, seed)
    if T is None or not np.isfinite(T).all():
        return nothing
    inliers = nothing.inliers.copy()
    inliers[usable] = _residuals(points, local, T, focal) <= threshold
    if inliers.sum() < LEAST:
        return nothing
    T[:3, 3] -= T[:3, :3] @ middle
    return PoseEstimate(T, inliers)


def _solve_poselib(
    points: np.ndarray, xyz: np.ndarray, focal: float, threshold: float, seed: int
) -> np.ndarray | None:
    camera = {"model": "SIMPLE_PINHOLE", "width": 1, "height": 1, "params": [focal, 0.0, 0.0]}
    ransac = {
        "max_reproj_error": threshold, "success_prob": CONFIDENCE, "max_iterations": ITERATIONS, "seed": seed,
    }  # fmt: skip
    loss = {"loss_type": "CAUCHY", "loss_scale": LOSS_SCALE}
    pose, info = import_poselib().estimate_absolute_pose(points, xyz, camera, ransac, loss)
    return pose_matrix(pose.R, pose.t) if info["num_inliers"] >= LEAST else None


def _solve_opencv(
    points: np.ndarray, xyz: np.ndarray, focal: float, threshold: float, seed: int
) -> np.ndarray | None:
    K = np.diag([focal, focal, 1.0])
    try:
        done, turn, shift, rows = cv2.solvePnPRansac(
            xyz, points, K, None, iterationsCount=ITERATIONS, reprojectionError=threshold,
            confidence=CONFIDENCE, flags=cv2.SOLVEPNP_P3P,
        )  # fmt: skip
    except cv2.error:  # OpenCV asserts on some degenerate sets
        return None
    if not done or rows is None or len(rows) < LEAST:
        return None
    for _ in range(3):  # a better pose has other inliers
        T = pose_matrix(cv2.Rodrigues(turn)[0], shift.ravel())
        rows = np.flatnonzero(_residuals(points, xyz, T, focal) <= threshold)
        if len(rows) < LEAST:
            return None
        turn, shift = _refine(points[rows], xyz[rows], K, turn, shift)
    return pose_matrix(cv2.Rodrigues(turn)[0], shift.ravel())


def _refine(
    points: np.ndarray, xyz: np.ndarray, K: np.ndarray, turn: np.ndarray, shift: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Gauss-Newton on the reprojection error (n 2 and n 3) under Cauchy's loss; rvec and tvec in and out."""
    for _ in range(20):
        projected, jacobian = cv2.projectPoints(xyz, turn, shift, K, None)
        rest = points - projected.reshape(-1, 2)
        weight = np.repeat(1 / (1 + (rest**2).sum(axis=1) / LOSS_SCALE**2), 2)
        J = jacobian[:, :6]
        step = np.linalg.lstsq(J.T @ (J * weight[:, None]), J.T @ (weight * rest.ravel()), rcond=None)[0]
        if not np.isfinite(step).all():
            break
        turn, shift = turn + step[:3, None], shift + step[3:, None]
        if np.abs(step).max() < 1e-10:
            break
    return turn, shift


def _residuals(points: np.ndarray, xyz: np.ndarray, T: np.ndarray, focal: float) -> np.ndarray:
    """n: pixels between points n 2 and where xyz n 3 are seen; infinite behind the camera."""
    seen = xyz @ T[:3, :3].T + T[:3, 3]
    front = seen[:, 2] > 1e-9
    projected = focal * seen[:, :2] / np.where(front, seen[:, 2], 1)[:, None]
    return np.where(front, np.linalg.norm(projected - points, axis=1), np.inf)
