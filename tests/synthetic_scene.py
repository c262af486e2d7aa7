"""A small world with exact depth, photographed by a few cameras and written as a COLMAP text model."""

from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from prism_match.frames import write_depth
from prism_match.training.data.colmap import depth_path

WIDTH, HEIGHT = 160, 120
K = np.array([[150.0, 0, 79.5], [0, 150.0, 59.5], [0, 0, 1]])  # centre of the top-left pixel at (0, 0)


@dataclass
class Scene:
    root: Path  # holds sparse/ and images/
    names: list[str]
    T: np.ndarray  # v 4 4, world to camera
    depth: np.ndarray  # v h w, exact


def texture(seed: int, size: int = 512) -> np.ndarray:
    """Noise of several octaves in [0, 1]."""
    g = np.random.default_rng(seed)
    out = np.zeros((size, size))
    for k in range(4, 9):
        out += cv2.resize(g.random((2**k, 2**k)), (size, size), interpolation=cv2.INTER_CUBIC) / (k - 2)
    return (out - out.min()) / (out.max() - out.min())


def cast(T: np.ndarray, walls: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Colour and depth, h w, of a slanted wall with a block in front of it."""
    x, y = np.meshgrid(np.arange(WIDTH), np.arange(HEIGHT))
    rays = np.stack([x, y, np.ones_like(x)], -1) @ np.linalg.inv(K).T @ T[:3, :3]  # camera to world
    eye = -T[:3, :3].T @ T[:3, 3]
    # Wall: z = 4 + 0.2 x; block: z = 3 where |x| < 0.7 and |y| < 0.5. Ray parameters are depths.
    wall = (4 + 0.2 * eye[0] - eye[2]) / (rays[..., 2] - 0.2 * rays[..., 0])
    block = (3 - eye[2]) / rays[..., 2]
    hit = eye + block[..., None] * rays
    on_block = (np.abs(hit[..., 0]) < 0.7) & (np.abs(hit[..., 1]) < 0.5)
    depth = np.where(on_block, block, wall)
    hit = eye + depth[..., None] * rays
    u = ((hit[..., 0] / 8 + 0.5) * 511).astype(np.float32)
    v = ((hit[..., 1] / 8 + 0.5) * 511).astype(np.float32)
    looks = [cv2.remap(w, u, v, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REFLECT) for w in walls]
    return np.where(on_block, looks[1], looks[0]), depth


def camera(x: float, y: float, z: float, turn: float) -> np.ndarray:
    c, s = np.cos(turn), np.sin(turn)
    T = np.eye(4)
    T[:3, :3] = [[c, 0, s], [0, 1, 0], [-s, 0, c]]
    T[:3, 3] = -T[:3, :3] @ [x, y, z]
    return T


def make_scene(root: Path, views: int = 6, points: int = 300) -> Scene:
    """Every view has its own brightness and contrast."""
    g = np.random.default_rng(0)
    walls = np.stack([texture(1), texture(2)]).astype(np.float32)
    places = np.linspace(-0.9, 0.9, views)
    T = np.stack([camera(p, 0.2 * np.sin(7 * p), 0.3 * np.cos(5 * p), -0.2 * p) for p in places])
    names = [f"view{k}.png" for k in range(views)]
    (root / "images").mkdir(parents=True)
    depths = []
    for k, name in enumerate(names):
        colour, depth = cast(T[k], walls)
        light = (0.15 + 0.05 * (k % 3)) + (0.5 + 0.05 * (k % 4)) * colour ** (0.8 + 0.1 * (k % 5))
        cv2.imwrite(str(root / "images" / name), (light.clip(0, 1) * 255).astype(np.uint8))
        depths.append(depth)
    scene = Scene(root, names, T, np.stack(depths))
    xyz = sparse_points(scene, points, g)
    write_model(scene, xyz)
    return scene


def sparse_points(scene: Scene, count: int, g: np.random.Generator) -> np.ndarray:
    per_view = -(-count // len(scene.T))
    out = []
    for T, depth in zip(scene.T, scene.depth, strict=True):
        x, y = g.integers(0, WIDTH, per_view), g.integers(0, HEIGHT, per_view)
        rays = np.stack([x, y, np.ones(per_view)], 1) @ np.linalg.inv(K).T * depth[y, x, None]
        out.append((rays - T[:3, 3]) @ T[:3, :3])
    return np.concatenate(out)


def observations(scene: Scene, xyz: np.ndarray, view: int) -> tuple[np.ndarray, np.ndarray]:
    """Pixels n 2 and point numbers n of the points that a view sees."""
    p = (xyz @ scene.T[view, :3, :3].T + scene.T[view, :3, 3]) @ K.T
    pixel = p[:, :2] / p[:, 2:]
    x, y = np.rint(pixel).astype(int).T
    inside = (p[:, 2] > 0) & (x >= 0) & (y >= 0) & (x < WIDTH) & (y < HEIGHT)
    there = scene.depth[view][y.clip(0, HEIGHT - 1), x.clip(0, WIDTH - 1)]
    seen = inside & (np.abs(there / p[:, 2] - 1) < 0.02)
    return pixel[seen], np.flatnonzero(seen)


def quaternion(R: np.ndarray) -> np.ndarray:
    """w x y z of a rotation by less than 180 degrees."""
    w = np.sqrt(max(1 + np.trace(R), 1e-12)) / 2
    return np.array([w, *(np.array([R[2, 1] - R[1, 2], R[0, 2] - R[2, 0], R[1, 0] - R[0, 1]]) / (4 * w))])


def write_model(scene: Scene, xyz: np.ndarray) -> None:
    """COLMAP's text format, with its pixel convention: half a pixel more than ours."""
    folder = scene.root / "sparse"
    folder.mkdir(parents=True)
    camera_line = f"1 PINHOLE {WIDTH} {HEIGHT} {K[0, 0]} {K[1, 1]} {K[0, 2] + 0.5} {K[1, 2] + 0.5}\n"
    (folder / "cameras.txt").write_text("# cameras\n" + camera_line)
    lines, tracks = ["# images"], [[] for _ in xyz]
    for k, name in enumerate(scene.names):
        numbers = [*quaternion(scene.T[k, :3, :3]), *scene.T[k, :3, 3]]
        lines.append(f"{k + 1} {' '.join(f'{n:.12g}' for n in numbers)} 1 {name}")
        pixels, ids = observations(scene, xyz, k)
        seen = [f"{x + 0.5:.4f} {y + 0.5:.4f} {i + 1}" for (x, y), i in zip(pixels, ids, strict=True)]
        lines.append(" ".join(["5.0 5.0 -1", *seen]))
        for n, i in enumerate(ids):
            tracks[i].append(f"{k + 1} {n + 1}")
    (folder / "images.txt").write_text("\n".join(lines) + "\n")
    rows = [f"{i + 1} {x} {y} {z} 9 9 9 0.5 {' '.join(t)}"
            for i, ((x, y, z), t) in enumerate(zip(xyz, tracks, strict=True))]  # fmt: skip
    (folder / "points3D.txt").write_text("\n".join(rows) + "\n")


def make_scene_with_depth(root: Path) -> Scene:
    """With its depth maps beside the model, as a collection to train on has them."""
    scene = make_scene(root)
    for name, depth in zip(scene.names, scene.depth, strict=True):
        write_depth(depth_path(root / "depth", name), depth)
    return scene
