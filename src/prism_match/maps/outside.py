"""A map from outside: where to stand to see all of it, and a picture of what is seen from there."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

from prism_match import viz
from prism_match.colmap_model import Model
from prism_match.geometry import camera_centres

BLACK, RED, GREEN, BLUE = (0, 0, 0), (200, 30, 30), (20, 140, 60), (30, 60, 200)
FIELD = np.deg2rad(45)  # of the view from outside, up and down
ASIDE, ABOVE = np.deg2rad(30), np.deg2rad(28)  # from behind the cameras
NEARLY_ALL = 2, 98  # percent: a few points are far off
SMOOTH = 2  # drawn so much larger first


@dataclass(frozen=True)
class Lookout:
    """A place to stand, and what to look at."""

    eye: np.ndarray  # 3
    target: np.ndarray  # 3
    up: np.ndarray  # 3, of length 1
    frustum: float  # how long to draw the cameras that are seen

    def axes(self) -> np.ndarray:
        """3 3: right, down and forward of who stands there."""
        forward = unit(self.target - self.eye)
        right = unit(np.cross(forward, self.up))
        return np.stack([right, np.cross(forward, right), forward])


def unit(v: np.ndarray) -> np.ndarray:
    return v / max(float(np.linalg.norm(v)), 1e-12)


def down_and_forward(rotations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What is down for most cameras (c 3 3, world to camera), and where most look, at a right angle to it."""
    down = rotations[:, 1].mean(axis=0)  # image y in the world
    down = unit(down) if np.linalg.norm(down) > 1e-6 else np.array([0.0, 1.0, 0.0])
    forward = rotations[:, 2].mean(axis=0)
    forward = forward - down * (forward @ down)
    if np.linalg.norm(forward) < 1e-3:  # cameras look in all directions: any will do
        forward = np.cross(down, [1.0, 0.3, 0.2])
    return down, unit(forward)


def extent(points: np.ndarray, cameras: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Corners of a box with all cameras and nearly all points."""
    boxes = [cameras.min(axis=0), cameras.max(axis=0)]
    if len(points):
        boxes += list(np.percentile(points, NEARLY_ALL, axis=0))
    return np.min(boxes, axis=0), np.max(boxes, axis=0)


def look_out(xyz: np.ndarray, poses: np.ndarray, shape: float = 1.5) -> Lookout:
    """Behind the cameras (poses: c 3 4 or c 4 4, world to camera), to one side of them and above, as near as
    all of them and nearly all points (n 3) are seen. shape: width by height of the picture."""
    centres = camera_centres(poses)
    down, forward = down_and_forward(poses[:, :3, :3])
    low, high = extent(xyz, centres)
    size = max(float(np.linalg.norm(high - low)), 1e-9)
    inside = xyz[np.all((xyz >= low) & (xyz <= high), axis=1)]
    seen = np.concatenate([inside, centres])
    target = (low + high) / 2
    level = np.cos(ASIDE) * forward + np.sin(ASIDE) * np.cross(down, forward)
    towards = np.cos(ABOVE) * level + np.sin(ABOVE) * down
    axes = Lookout(target - towards, target, -down, 0.0).axes()
    q = (seen - target) @ axes.T
    half = np.tan(FIELD / 2) * np.array([shape, 1]) * 0.92  # a margin
    distance = float(np.max(np.abs(q[:, :2]) / half - q[:, 2:], initial=0))
    gaps = nearest_gaps(centres)
    frustum = float(np.clip(0.5 * np.median(gaps) if len(gaps) else 0.0, 0.02 * size, 0.06 * size))
    return Lookout(target - max(distance, 0.05 * size) * towards, target, -down, frustum)


def nearest_gaps(centres: np.ndarray, most: int = 500) -> np.ndarray:
    """From each camera, of many only some, to the next one."""
    some = centres[:: -(-len(centres) // most)]
    if len(some) < 2:
        return np.zeros(0)
    distances = np.linalg.norm(some[:, None] - some[None], axis=2)
    np.fill_diagonal(distances, np.inf)
    return distances.min(axis=1)


def draw_outside(
    model: Model, queries: np.ndarray | None = None, width: int = 1200, height: int = 800
) -> np.ndarray:
    """h w 3, uint8: the points in their colours, the cameras in red and queries (q 4 4, world to camera) in
    green, as `look_out` sees them."""
    xyz, rgb = finite_points(model)
    views = [v for v in model.views if np.isfinite(v.T).all()]
    poses = np.array([v.T for v in views])
    asked = np.zeros((0, 4, 4)) if queries is None else queries
    lookout = look_out(xyz, np.concatenate([poses, asked]), width / height)
    w, h = width * SMOOTH, height * SMOOTH
    picture = np.full((h, w, 3), 255, np.uint8)
    focal = h / 2 / np.tan(FIELD / 2)
    axes, nearest = lookout.axes(), lookout.frustum / 10

    def to_picture(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        q = (points - lookout.eye) @ axes.T
        return q[:, :2] / np.maximum(q[:, 2:], nearest) * focal + np.array([w, h]) / 2, q[:, 2]

    at, depth = to_picture(xyz)
    shown = np.flatnonzero((depth > nearest) & np.all((at >= 2) & (at < [w - 4, h - 4]), axis=1))
    shown = shown[np.argsort(-depth[shown])]  # near ones cover far ones
    x, y = np.rint(at[shown]).astype(int).T
    dot = 3 if len(shown) > 20_000 else 5 if len(shown) > 2_000 else 9
    for dy in range(dot):
        for dx in range(dot):
            # Pale points would be lost on white.
            picture[y + dy - dot // 2, x + dx - dot // 2] = (rgb[shown] * 0.85).astype(np.uint8)
    shapes = [(T, corners_of(v.K, v.width, v.height), RED) for T, v in zip(poses, views, strict=True)]
    shapes += [(T, shapes[0][1], GREEN) for T in asked]
    for T, rays, colour in shapes:
        corners = (np.vstack([np.zeros(3), rays * lookout.frustum]) - T[:3, 3]) @ T[:3, :3]
        at, depth = to_picture(corners)
        if (depth > nearest).all():
            lines = [at[[0, k]] for k in range(1, 5)] + [at[[1, 2, 3, 4, 1]]]
            for line in lines:
                fixed = np.rint(line * (1 << viz.SHIFT)).astype(np.int32)
                cv2.polylines(picture, [fixed], False, colour, 2, cv2.LINE_AA, viz.SHIFT)
    small = np.asarray(cv2.resize(picture, (width, height), interpolation=cv2.INTER_AREA), np.uint8)
    text = f"{len(model.points)} points, {len(views)} cameras (red)"
    text += f", {len(asked)} queries (green)" if len(asked) else ""
    viz.put_text(small, text, (14, height - 14), BLACK)
    return small


def corners_of(K: np.ndarray, width: int, height: int) -> np.ndarray:
    """4 3: where the corners of a photo are seen at depth 1, going around."""
    corners = np.array([[0, 0], [width, 0], [width, height], [0, height]]) - 0.5
    return np.column_stack([(corners - K[:2, 2]) / np.diag(K)[:2], np.ones(4)])


def finite_points(model: Model) -> tuple[np.ndarray, np.ndarray]:
    """Points n 3 and their colours n 3, uint8, gray where they have none; but for those that are nowhere."""
    rgb = np.full(model.points.shape, 110, np.uint8) if model.colours is None else model.colours
    finite = np.isfinite(model.points).all(axis=1)
    return model.points[finite], rgb[finite]
