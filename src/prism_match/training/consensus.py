"""Pairs of real photos, which differ as no made-up pair does, to teach the network of `subpixel.py`.

Where exactly a point of a photo lies in another nobody knows. But the matches of a pair agree on an epipolar
geometry, of seven numbers that hundreds of them have a say in, and which is therefore more exact than any of
them: by how much a match misses its epipolar line is known. The poses of a collection alone are good to half
a pixel; they are where this begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from prism_match.colmap_model import PosedView
from prism_match.errors import UserError
from prism_match.geometry import skew, to_homogeneous
from prism_match.matcher import REWEIGHED, PairMatcher
from prism_match.matches import Matches
from prism_match.polish import neighbourhoods
from prism_match.subpixel import Pyramid
from prism_match.training.data.colmap import load_photo, read_model, require_files
from prism_match.training.sources import colmap_folders, require
from prism_match.training.subpixel import Examples, scale_between, within_reach

SHARED = 30  # points of a model that both photos of a pair see, at least
# Of a pair's geometry in a model: the rotation and the direction of the other camera (radians), and the focal
# lengths (shares of them) may be off by about this.
DOUBTS = np.array([0.01] * 3 + [0.05] * 2 + [0.02] * 2)
NOISE = 0.5  # pixels, of a match
CORRECTIONS = 8  # rounds
OFF = 1.5  # pixels of the coarser photo by which a match may miss its line and still be right
AGREEING, SHARE = 150, 0.4  # how many matches of a pair have to be right, and which share of them


@dataclass(frozen=True)
class Consensus:
    """What the matches of a pair agree on, of n of them, as `Examples` have it."""

    first: int  # photos, by their rows in the bank
    second: int
    points0: Tensor
    points1: Tensor
    stretch: Tensor
    pixel: Tensor
    across: Tensor


class ConsensusPairs:
    """Pairs of posed photo collections, without depth."""

    def __init__(self, models: Sequence[Path], matcher: PairMatcher, each: int = 150, seed: int = 0):
        """each: pairs of a collection, at most; matcher: finds the matches, polished."""
        require(models)
        photos: list[np.ndarray] = []
        views: list[PosedView] = []
        pairs: list[list[tuple[int, int]]] = []
        for path in models:
            model, (images, _) = read_model(path), colmap_folders(path)
            require_files(images, [v.name for v in model.views], "images of the model are missing")
            counts = np.stack([model.shared_counts(n) for n in range(len(model.views))])
            some = np.argwhere(np.triu(counts >= SHARED, 1))
            # Each pair one way round only, which of the two is left to chance.
            g = np.random.default_rng(seed)
            some = g.permuted(some[g.permutation(len(some))[:each]], axis=1) + len(photos)
            pairs.append([(int(a), int(b)) for a, b in some])
            photos += [load_photo(view, images) for view in model.views]
            views += model.views
        self.device = matcher.device
        self.scenes = [found for some in pairs if (found := self._match(some, photos, views, matcher))]
        if not self.scenes:
            raise UserError(f"{models[0]}: no two photos match well enough to learn from")
        side = max(max(p.shape) for p in photos)
        bank = np.stack([np.pad(p, [(0, side - n) for n in p.shape], mode="edge") for p in photos])
        self.bank = torch.from_numpy(bank).to(self.device)

    def _match(
        self,
        pairs: list[tuple[int, int]],
        photos: list[np.ndarray],
        views: list[PosedView],
        matcher: PairMatcher,
    ) -> list[Consensus]:
        largest = max([1, *(max(photos[n].shape) for pair in pairs for n in pair)])
        matcher = matcher.adjusted(size=largest, rotate="never", rescale="never", max_matches=None)

        def consensus(pair: tuple[int, int], matches: Matches) -> Consensus | None:
            return agreed(*pair, (views[pair[0]], views[pair[1]]), matches, self.device)

        with ThreadPoolExecutor() as pool:
            found = []
            for pair in tqdm(pairs, unit="pair", mininterval=10):
                matches = matcher.match(photos[pair[0]], photos[pair[1]])
                found.append(pool.submit(consensus, pair, matches))
            return [c for f in found if (c := f.result()) is not None]

    def __len__(self) -> int:
        return sum(map(len, self.scenes))

    @torch.no_grad()
    def sample(self, pairs: int, cells: int, generator: torch.Generator) -> Examples:
        """At most `cells` matches of each of so many pairs, scenes equally often; generator: of the CPU."""

        def choose(count: int) -> int:
            return int(torch.randint(count, (), generator=generator))

        chosen = []
        for _ in range(pairs):
            scene = self.scenes[choose(len(self.scenes))]
            chosen.append(scene[choose(len(scene))])
        rows = [torch.randperm(len(c.points0), generator=generator)[:cells].to(self.device) for c in chosen]
        number = torch.cat([torch.full_like(r, n) for n, r in enumerate(rows)])
        fields = ("points0", "points1", "stretch", "pixel", "across")
        first, second = (Pyramid.of(self.bank[[getattr(c, k) for c in chosen]]) for k in ("first", "second"))
        parts = (torch.cat([getattr(c, f)[r] for c, r in zip(chosen, rows, strict=True)]) for f in fields)
        return Examples(first, second, number, *parts)


def agreed(
    first: int, second: int, views: tuple[PosedView, PosedView], matches: Matches, device: torch.device
) -> Consensus | None:
    """Right matches, each moved onto its epipolar line; None if too few of them agree on one."""
    fundamental = corrected_geometry(views, matches.keypoints0, matches.keypoints1)
    off, across = offsets(fundamental, matches.keypoints0, matches.keypoints1)
    onto = matches.keypoints1 - off[:, None] * across
    points0, points1 = (torch.from_numpy(p).to(device) for p in (matches.keypoints0, matches.keypoints1))
    stretch, misfit, _ = neighbourhoods(points0, points1, rounds=REWEIGHED)
    scale = scale_between(stretch)
    pixel = scale.clamp(min=1.0)
    distance = torch.from_numpy(np.abs(off)).to(device)
    right = (distance < OFF * pixel) & (misfit < torch.inf) & within_reach(scale)
    if right.sum() < max(AGREEING, SHARE * len(matches)):
        return None
    truth, normal = (torch.from_numpy(x.astype(np.float32)).to(device)[right] for x in (onto, across))
    return Consensus(first, second, points0[right], truth, stretch[right], pixel[right], normal)


def corrected_geometry(
    views: tuple[PosedView, PosedView], points0: np.ndarray, points1: np.ndarray
) -> np.ndarray:
    """The fundamental matrix of two views, corrected by their matches. What these cannot tell, as they cannot
    where all of them lie in a plane, stays as it was."""
    relative = views[1].T @ np.linalg.inv(views[0].T)
    rotation, direction = relative[:3, :3], relative[:3, 3] / max(np.linalg.norm(relative[:3, 3]), 1e-12)
    sideways = np.linalg.svd(direction[None])[2][1:]  # 2 3: across the direction

    def fundamental(change: np.ndarray) -> np.ndarray:
        """change: 7, of the rotation, of the direction, and of both focal lengths."""
        turned = cv2.Rodrigues(change[:3])[0] @ rotation
        inverses = []
        for view, factor in zip(views, np.exp(change[5:]), strict=True):
            K = view.K.copy()
            K[[0, 1], [0, 1]] *= factor
            inverses.append(np.linalg.inv(K))
        return inverses[1].T @ skew(direction + change[3:5] @ sideways) @ turned @ inverses[0]

    change = np.zeros(len(DOUBTS))
    for _ in range(CORRECTIONS):
        off = offsets(fundamental(change), points0, points1)[0]
        steps = 1e-4 * DOUBTS
        slopes = [
            (offsets(fundamental(change + step), points0, points1)[0] - off) / step[n]
            for n, step in enumerate(np.diag(steps))
        ]
        jacobian = np.stack(slopes, axis=1)
        weight = NOISE**-2 / (1 + (off / (2 * NOISE)) ** 2) ** 2  # a match that is far off has no say
        normal = (jacobian * weight[:, None]).T @ jacobian + np.diag(DOUBTS**-2)
        change = change - np.linalg.solve(normal, (jacobian * weight[:, None]).T @ off + change / DOUBTS**2)
    return fundamental(change)


def offsets(
    fundamental: np.ndarray, points0: np.ndarray, points1: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """By how many pixels points1 lie beside their epipolar lines (n), and what is across these (n 2)."""
    lines = to_homogeneous(points0) @ fundamental.T
    length = np.linalg.norm(lines[:, :2], axis=1).clip(1e-12)
    return (lines * to_homogeneous(points1)).sum(1) / length, lines[:, :2] / length[:, None]
