"""A small world seen by exact cameras, and a matcher that knows it: points of the world as a matcher without
a detector finds them, on a grid in the first image and anywhere in the second, with noise."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import cv2
import numpy as np
import torch
from synthetic_scene import K, Scene, make_scene

from prism_match.config import ModelConfig
from prism_match.errors import UserError
from prism_match.images import ImageLike, load_image
from prism_match.matcher import ImageFeatures, Prepared
from prism_match.matches import Matches
from prism_match.model.prism import Features
from prism_match.weights import WeightsInfo

STEP = 4  # pixels of the grid
NOISE = 0.1  # pixels


@dataclass
class SyntheticMatcher:
    """Stands in for `Matcher`: images are known by their file names."""

    scene: Scene
    size: int = 160
    threshold: float | None = None
    max_matches: int | None = None
    rotate: str = "never"
    rescale: str = "never"
    polish: bool = False
    tiles: str | None = None
    tile_memory: float | None = None
    backend: str = "torch"
    loose: float = 0.0  # share of the matches that are a pixel off
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    info: WeightsInfo = field(default_factory=lambda: WeightsInfo(None, "synthetic", ModelConfig(), {}))
    extracted: list[str] = field(default_factory=list)  # names, in the order they were asked for
    matched: list[tuple[str, str]] = field(default_factory=list)

    dtype: torch.dtype = torch.float32

    def prepare(self, source: ImageLike, size: int | None = None) -> Prepared:
        image = load_image(source)
        return Prepared(image.gray[::8, ::8].copy(), image.size, image.name, None)

    def extract_prepared(self, prepared: list[Prepared]) -> list[ImageFeatures]:
        self.extracted += [Path(p.name).name for p in prepared]
        return [ImageFeatures(p, Features(*(torch.zeros(1) for _ in range(3)))) for p in prepared]

    def match_extracted(
        self, pairs: list[tuple[ImageFeatures, ImageFeatures]], details: bool = False
    ) -> list[Matches]:
        return [self.match(a.prepared, b.prepared) for a, b in pairs]

    def match(self, a: Prepared, b: Prepared) -> Matches:
        names = Path(a.name).name, Path(b.name).name
        self.matched.append(names)
        i, j = (self.scene.names.index(name) for name in names)
        points0, points1 = true_matches(self.scene, i, j)
        g = np.random.default_rng(100 * i + j)
        loose = g.uniform(0, 1, (len(points1), 1)) < self.loose
        points1 = points1 + np.where(loose, 1.0, NOISE) * g.standard_normal(points1.shape)
        scores = g.uniform(0.3, 1, len(points0))
        order = np.argsort(-scores)
        found = (x[order].astype(np.float32) for x in (points0, points1, scores))
        return Matches(*found, a.size, b.size, a.name, b.name)


def true_matches(scene: Scene, i: int, j: int) -> tuple[np.ndarray, np.ndarray]:
    """n 2 each: the grid of view i where view j sees it, too."""
    height, width = scene.depth.shape[1:]
    y, x = np.mgrid[2 : height - 2 : STEP, 2 : width - 2 : STEP].reshape(2, -1)
    rays = np.stack([x, y, np.ones_like(x)], 1) @ np.linalg.inv(K).T * scene.depth[i, y, x, None]
    world = (rays - scene.T[i, :3, 3]) @ scene.T[i, :3, :3]
    p = (world @ scene.T[j, :3, :3].T + scene.T[j, :3, 3]) @ K.T
    seen = p[:, :2] / p[:, 2:]
    at = np.rint(seen).astype(int)
    inside = np.all((at >= 1) & (at < [width - 1, height - 1]), axis=1)
    there = scene.depth[j, at[:, 1].clip(0, height - 1), at[:, 0].clip(0, width - 1)]
    visible = inside & (np.abs(there / p[:, 2] - 1) < 0.01)
    return np.stack([x, y], 1)[visible].astype(float), seen[visible]


def make_photos(root: Path, views: int = 6) -> tuple[Scene, Path, SyntheticMatcher]:
    """The scene, the folder of its photos, and its matcher."""
    scene = make_scene(root, views)
    return scene, root / "images", SyntheticMatcher(scene)


def write_noise(path: Path, seed: int) -> None:
    noise = np.random.default_rng(seed).integers(0, 255, (120, 160, 3), dtype=np.uint8)
    if not cv2.imwrite(str(path), noise):
        raise UserError(f"{path}: cannot be written")
