"""A map from photos whose cameras are known: key points joined to tracks and triangulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from prism_match.cameras import Camera
from prism_match.colmap_model import Model, PosedView
from prism_match.evaluation.metrics import epipolar_errors
from prism_match.geometry import camera_centres
from prism_match.maps.tracks import components

LEAST_ANGLE = 1.5  # degrees between two of a point's rays
MAX_ERROR = 2.0  # pixels

PosedCamera = tuple[str, Camera, np.ndarray]  # name, camera, pose 4 4 from world to camera


def triangulate_map(
    cameras: Sequence[PosedCamera],
    matches: Mapping[tuple[str, str], tuple[np.ndarray, np.ndarray]],
    path: Path,
) -> Model:
    """matches: of pairs of names, m 2 and m 2 pixels. The same key point must have the same pixels in all
    pairs of a photo, as SIFT's have. Matches that disagree with the cameras by more than MAX_ERROR pixels
    are left out, and so are points whose rays are nearly parallel."""
    index = {name: n for n, (name, _, _) in enumerate(cameras)}
    edges, (view, pixels) = _verified_edges(cameras, index, matches)
    track = components(len(view), edges)
    # A track with two key points in one photo is wrong somewhere: where, nobody knows.
    pair = track.astype(np.int64) * len(cameras) + view
    _, inverse, count = np.unique(pair, return_inverse=True, return_counts=True)
    doubtful = np.zeros(len(view) + 1, bool)
    doubtful[track[count[inverse] > 1]] = True
    kept = ~doubtful[track] & (np.bincount(track, minlength=len(view))[track] >= 2)
    view, pixels, track = view[kept], pixels[kept], track[kept]
    rays = np.zeros((len(view), 2))
    for n, (_, camera, _) in enumerate(cameras):
        rays[view == n] = camera.normalise(pixels[view == n])
    T = np.stack([pose for _, _, pose in cameras])
    focal = np.array([(c.K[0, 0] + c.K[1, 1]) / 2 for _, c, _ in cameras])
    for _ in range(2):  # once more without the key points that did not fit
        names, track = np.unique(track, return_inverse=True)
        xyz = _triangulate(track, len(names), T[view], rays)
        error = _errors(xyz[track], T[view], rays) * focal[view]
        good = (error <= MAX_ERROR) & _wide_enough(track, len(names), xyz, T[view])[track]
        good &= np.bincount(track[good], minlength=len(names))[track] >= 2
        view, pixels, track, rays = view[good], pixels[good], track[good], rays[good]
    names, track = np.unique(track, return_inverse=True)
    points = _triangulate(track, len(names), T[view], rays)
    views = [
        PosedView(name, camera, pose, pixels[view == n].astype(np.float32), track[view == n].astype(np.int64))
        for n, (name, camera, pose) in enumerate(cameras)
    ]
    return Model(path, tuple(views), points)


def _verified_edges(
    cameras: Sequence[PosedCamera],
    index: dict[str, int],
    matches: Mapping[tuple[str, str], tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Edges e 2 between key points, and of each key point its photo (n) and pixels (n 2)."""
    ends: list[tuple[np.ndarray, np.ndarray]] = []  # photo and pixels, of first and second ends in turn
    for (a, b), (pixels_a, pixels_b) in matches.items():
        (_, camera_a, T_a), (_, camera_b, T_b) = cameras[index[a]], cameras[index[b]]
        plane = camera_a.normalise(pixels_a), camera_b.normalise(pixels_b)
        squared = epipolar_errors(*plane, np.eye(3), np.eye(3), T_b @ np.linalg.inv(T_a))
        focal = (camera_a.K[0, 0] + camera_b.K[0, 0]) / 2
        good = focal * np.sqrt(squared / 2) <= MAX_ERROR
        for name, pixels in ((a, pixels_a), (b, pixels_b)):
            ends.append((np.full(good.sum(), index[name]), np.asarray(pixels, np.float64)[good]))
    if not ends:
        return np.empty((0, 2), int), (np.empty(0, int), np.empty((0, 2)))
    photo = np.concatenate([p for p, _ in ends])
    table = np.concatenate([photo[:, None], np.concatenate([x for _, x in ends])], axis=1)
    nodes, inverse = np.unique(table, axis=0, return_inverse=True)
    parts = np.split(inverse.ravel(), np.cumsum([len(p) for p, _ in ends])[:-1])
    edges = np.stack([np.concatenate(parts[0::2]), np.concatenate(parts[1::2])], axis=1)
    return edges, (nodes[:, 0].astype(int), nodes[:, 1:])


def _triangulate(track: np.ndarray, count: int, T: np.ndarray, rays: np.ndarray) -> np.ndarray:
    """count 3: linear, then refined by Gauss-Newton. Of each sighting its track (n), pose (n 4 4) and
    ray on the plane at depth 1 (n 2)."""
    if not count:
        return np.empty((0, 3))
    rows = rays[:, :, None] * T[:, 2:3] - T[:, :2]  # n 2 4
    A = np.zeros((count, 4, 4))
    np.add.at(A, track, np.einsum("nki,nkj->nij", rows, rows))
    X = np.linalg.eigh(A)[1][:, :, 0]
    xyz = X[:, :3] / np.where(np.abs(X[:, 3:]) > 1e-12, X[:, 3:], 1e-12)
    for _ in range(5):
        local = np.einsum("nij,nj->ni", T[:, :3, :3], xyz[track]) + T[:, :3, 3]
        z = np.where(np.abs(local[:, 2]) > 1e-6, local[:, 2], 1e-6)
        plane = local[:, :2] / z[:, None]
        J = (T[:, :2, :3] - plane[:, :, None] * T[:, 2:3, :3]) / z[:, None, None]
        normal, right = np.zeros((count, 3, 3)), np.zeros((count, 3))
        np.add.at(normal, track, np.einsum("nki,nkj->nij", J, J))
        np.add.at(right, track, np.einsum("nki,nk->ni", J, rays - plane))
        normal += 1e-12 * np.trace(normal, axis1=1, axis2=2)[:, None, None] * np.eye(3) + 1e-18 * np.eye(3)
        xyz = xyz + np.linalg.solve(normal, right[..., None])[..., 0]
    return xyz


def _errors(xyz: np.ndarray, T: np.ndarray, rays: np.ndarray) -> np.ndarray:
    """n: on the plane at depth 1; infinite behind the camera."""
    local = np.einsum("nij,nj->ni", T[:, :3, :3], xyz) + T[:, :3, 3]
    front = local[:, 2] > 1e-9
    plane = local[:, :2] / np.where(front, local[:, 2], 1)[:, None]
    return np.where(front, np.linalg.norm(plane - rays, axis=1), np.inf)


def _wide_enough(track: np.ndarray, count: int, xyz: np.ndarray, T: np.ndarray) -> np.ndarray:
    """count, bool: whether the rays to a point spread by LEAST_ANGLE, as their mean direction tells."""
    ray = xyz[track] - camera_centres(T)
    ray /= np.maximum(np.linalg.norm(ray, axis=1, keepdims=True), 1e-12)
    total = np.zeros((count, 3))
    np.add.at(total, track, ray)
    # n unit vectors that spread by an angle a from their middle have a mean of length about cos(a).
    length = np.linalg.norm(total, axis=1) / np.maximum(np.bincount(track, minlength=count), 1)
    return length < np.cos(np.radians(LEAST_ANGLE / 2))
