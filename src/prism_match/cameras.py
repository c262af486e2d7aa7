"""Cameras as COLMAP describes them, with lens distortion: pixels to rays and back.

Parameters are COLMAP's, with the centre of the top-left pixel at (0.5, 0.5). All points that go in or come
out, and `Camera.K`, have it at (0, 0), as everywhere else here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prism_match.errors import UserError
from prism_match.files import parse_lines
from prism_match.geometry import to_points

# name -> number of parameters, number of focal lengths; what follows the principal point is distortion.
# In the order of COLMAP's ids, from 0.
CAMERA_MODELS = {
    "SIMPLE_PINHOLE": (3, 1),
    "PINHOLE": (4, 2),
    "SIMPLE_RADIAL": (4, 1),
    "RADIAL": (5, 1),
    "OPENCV": (8, 2),
    "OPENCV_FISHEYE": (8, 2),
    "FULL_OPENCV": (12, 2),
    "FOV": (5, 2),
    "SIMPLE_RADIAL_FISHEYE": (4, 1),
    "RADIAL_FISHEYE": (5, 1),
    "THIN_PRISM_FISHEYE": (12, 2),
}


@dataclass(frozen=True)
class Camera:
    model: str
    width: int
    height: int
    params: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.model not in CAMERA_MODELS:
            known = ", ".join(CAMERA_MODELS)
            raise UserError(f"camera model {self.model} is not supported (supported: {known})")
        count, focals = CAMERA_MODELS[self.model]
        if len(self.params) != count or not np.isfinite(self.params).all():
            raise UserError(f"a {self.model} camera needs {count} finite parameters")
        if min(self.params[:focals]) <= 0 or min(self.width, self.height) < 1:
            raise UserError(f"a {self.model} camera needs a positive focal length and size")

    @property
    def K(self) -> np.ndarray:
        """3 3, float64."""
        focals = CAMERA_MODELS[self.model][1]
        fx, fy = self.params[0], self.params[focals - 1]
        cx, cy = self.params[focals : focals + 2]
        return np.array([[fx, 0, cx - 0.5], [0, fy, cy - 0.5], [0, 0, 1]])

    @property
    def distortion(self) -> np.ndarray:
        return np.array(self.params[CAMERA_MODELS[self.model][1] + 2 :])

    @property
    def is_distorted(self) -> bool:
        return bool(self.distortion.any()) or self.model.endswith("FISHEYE")

    def project(self, xyz: np.ndarray) -> np.ndarray:
        """n 3 in the camera's frame -> n 2 pixels; NaN behind it."""
        plane = to_points(np.asarray(xyz, float))
        return self._distort(plane) @ self.K[:2, :2].T + self.K[:2, 2]

    def normalise(self, pixels: np.ndarray) -> np.ndarray:
        """n 2 pixels -> n 2 on the image plane at depth 1, free of distortion; NaN where no ray within
        90 degrees of the axis leads there."""
        seen = (np.asarray(pixels, float).reshape(-1, 2) - self.K[:2, 2]) / np.diag(self.K)[:2]
        return self._undistort(seen) if self.is_distorted else seen

    def resized(self, width: int, height: int) -> Camera:
        """The same camera for photos of another size."""
        focals = CAMERA_MODELS[self.model][1]
        sx, sy = width / self.width, height / self.height
        f = self.params[:focals]
        focal = (f[0] * (sx + sy) / 2,) if focals == 1 else (f[0] * sx, f[1] * sy)
        cx, cy = self.params[focals : focals + 2]
        return Camera(self.model, width, height, (*focal, cx * sx, cy * sy, *self.params[focals + 2 :]))

    def _distort(self, plane: np.ndarray) -> np.ndarray:
        """n 2 on the ideal plane at depth 1 -> n 2 where the lens shows them."""
        d = self.distortion
        if not self.is_distorted:
            return plane
        if self.model == "FOV":
            r = np.linalg.norm(plane, axis=1, keepdims=True)
            return plane * _ratio(np.arctan(2 * r * np.tan(d[0] / 2)) / d[0], r, 2 * np.tan(d[0] / 2) / d[0])
        if self.model.endswith("FISHEYE"):
            r = np.linalg.norm(plane, axis=1, keepdims=True)
            plane = plane * _ratio(np.arctan(r), r, 1.0)
        x, y = plane.T
        r2 = x * x + y * y
        if self.model == "THIN_PRISM_FISHEYE":
            k1, k2, p1, p2, k3, k4, s1, s2 = d
            radial = 1 + r2 * (k1 + r2 * (k2 + r2 * (k3 + r2 * k4)))
            extra = s1 * r2, s2 * r2
        elif self.model.endswith("FISHEYE"):
            radial = 1 + sum(k * r2 ** (n + 1) for n, k in enumerate(d))
            p1 = p2 = 0.0
            extra = 0.0, 0.0
        else:  # SIMPLE_RADIAL, RADIAL, OPENCV, FULL_OPENCV: each has what the one before has, and more
            k1, k2, p1, p2, k3, k4, k5, k6 = np.pad(d, (0, 8 - len(d)))
            radial = (1 + r2 * (k1 + r2 * (k2 + r2 * k3))) / (1 + r2 * (k4 + r2 * (k5 + r2 * k6)))
            extra = 0.0, 0.0
        return np.stack([
            x * radial + 2 * p1 * x * y + p2 * (r2 + 2 * x * x) + extra[0],
            y * radial + 2 * p2 * x * y + p1 * (r2 + 2 * y * y) + extra[1],
        ], axis=1)  # fmt: skip

    def _undistort(self, seen: np.ndarray) -> np.ndarray:
        """The inverse of `_distort`, by Newton's method with a Jacobian from differences."""
        step = 1e-6
        plane = seen
        if self.model.endswith("FISHEYE"):  # there the plane's radius is the tangent of what is seen
            r = np.linalg.norm(seen, axis=1, keepdims=True)
            plane = seen * _ratio(np.tan(np.minimum(r, 1.5)), r, 1.0)
        for _ in range(30):
            rest = self._distort(plane) - seen
            columns = [
                (self._distort(plane + step * e) - self._distort(plane - step * e)) / (2 * step)
                for e in np.eye(2)
            ]
            J = np.stack(columns, axis=2)  # n 2 2
            det = J[:, 0, 0] * J[:, 1, 1] - J[:, 0, 1] * J[:, 1, 0]
            det = np.where(np.abs(det) > 1e-12, det, np.nan)
            change = np.stack([
                J[:, 1, 1] * rest[:, 0] - J[:, 0, 1] * rest[:, 1],
                J[:, 0, 0] * rest[:, 1] - J[:, 1, 0] * rest[:, 0],
            ], axis=1) / det[:, None]  # fmt: skip
            plane = plane - change
            if np.nanmax(np.abs(change), initial=0) < 1e-12:
                break
        found = np.abs(self._distort(plane) - seen).max(axis=1, initial=0) < 1e-6
        return np.where(found[:, None], plane, np.nan)


def _ratio(numerator: np.ndarray, denominator: np.ndarray, at_zero: float) -> np.ndarray:
    small = denominator < 1e-9
    return np.where(small, at_zero, numerator / np.where(small, 1, denominator))


def pinhole(K: np.ndarray, width: int, height: int) -> Camera:
    """Of intrinsics 3 3 in our convention."""
    return Camera(
        "PINHOLE", width, height, (float(K[0, 0]), float(K[1, 1]), float(K[0, 2]) + 0.5, float(K[1, 2]) + 0.5)
    )


def parse_camera(words: Sequence[str]) -> Camera:
    """MODEL WIDTH HEIGHT PARAMS..., as COLMAP's cameras.txt and hloc's lists of queries have it."""
    if len(words) < 4:
        raise UserError(f"a camera is MODEL WIDTH HEIGHT PARAMS, not {' '.join(words)!r}")
    model, width, height, *params = words
    try:
        size, numbers = (int(width), int(height)), tuple(map(float, params))
    except ValueError as error:
        raise UserError(f"{' '.join(words)!r}: not a camera ({error})") from error
    return Camera(model, *size, numbers)


def read_camera_list(path: Path) -> dict[str, Camera]:
    """`NAME MODEL WIDTH HEIGHT PARAMS` a line, as hloc's lists of queries; by name, in their order."""
    cameras = dict(parse_lines(path, lambda words: (words[0], parse_camera(words[1:]))))
    if not cameras:
        raise UserError(f"{path}: no cameras in it")
    return cameras
