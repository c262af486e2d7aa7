"""Shared keypoints out of the matches of many pairs.

A matcher without a detector finds other points in each pair, so that no point is seen in more than two
images. Here the points of all pairs of an image that lie in the same small cell become one keypoint, at
their mean by score, and every match is re-assigned to the keypoints of its two ends. What moved too far
on the way is no longer the same point, and is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from prism_match.errors import UserError
from prism_match.pipelines.store import Names, PairMatches


@dataclass(frozen=True)
class TrackOptions:
    cell: float = 4.0  # pixels: points this close can become one keypoint
    max_error: float = 2.0  # pixels: a match whose end moved further is dropped
    max_keypoints: int = 8192  # of an image, those with the highest sum of scores

    def __post_init__(self) -> None:
        if not self.cell > 0:
            raise UserError(f"the cell must be larger than 0 pixels, not {self.cell}")
        if not self.max_error > 0:
            raise UserError(f"the largest error must be more than 0 pixels, not {self.max_error}")
        if self.max_keypoints < 1:
            raise UserError(f"at least 1 keypoint an image is needed, not {self.max_keypoints}")


@dataclass(frozen=True)
class Keypoints:
    xy: np.ndarray  # k 2, float32; the centre of the first pixel is (0, 0)
    scores: np.ndarray  # k, float32: sum of the scores of its matches

    def __len__(self) -> int:
        return len(self.scores)


@dataclass(frozen=True)
class IndexedMatches:
    """Matches between shared keypoints; no keypoint is in two matches of a pair."""

    index: np.ndarray  # m 2, int64: rows of the keypoints of the two images
    scores: np.ndarray  # m, float32; best first

    def __len__(self) -> int:
        return len(self.scores)


@dataclass(frozen=True)
class SharedKeypoints:
    """What COLMAP and others work with: keypoints by image, matches by pair."""

    keypoints: dict[str, Keypoints]
    matches: dict[Names, IndexedMatches]


def share_keypoints(
    pairs: Iterable[tuple[Names, PairMatches]], options: TrackOptions | None = None
) -> SharedKeypoints:
    """The matches of all pairs, with keypoints that are the same in every pair of an image."""
    options = options or TrackOptions()
    found = {names: matches for names, matches in pairs if len(matches)}
    ends: dict[str, list[tuple[Names, int]]] = {}
    for names in found:
        for side in (0, 1):
            ends.setdefault(names[side], []).append((names, side))
    keypoints: dict[str, Keypoints] = {}
    assigned: dict[tuple[Names, int], np.ndarray] = {}
    for name, of_image in sorted(ends.items()):
        points = [(found[n].keypoints0, found[n].keypoints1)[side] for n, side in of_image]
        scores = [found[n].scores for n, _ in of_image]
        keypoints[name], index = merge_points(np.concatenate(points), np.concatenate(scores), options)
        parts = np.split(index, np.cumsum([len(s) for s in scores])[:-1])
        assigned |= dict(zip(of_image, parts, strict=True))
    matches = {
        names: one_to_one(assigned[names, 0], assigned[names, 1], found[names].scores) for names in found
    }
    return SharedKeypoints(keypoints, {names: m for names, m in matches.items() if len(m)})


def merge_points(
    points: np.ndarray, scores: np.ndarray, options: TrackOptions
) -> tuple[Keypoints, np.ndarray]:
    """Points n 2 with scores n -> keypoints, and for each point the row of its keypoint (n, int64; -1:
    none, since it moved too far or its keypoint is not among the best)."""
    cells = np.floor(points.astype(np.float64) / options.cell).astype(np.int64)
    _, label = np.unique(cells, axis=0, return_inverse=True)
    label = label.reshape(-1)
    weight = np.maximum(scores.astype(np.float64), 1e-6)  # a score of 0 still says where it is
    total = np.bincount(label, weight)
    sums = [np.bincount(label, weight * points[:, k]) for k in (0, 1)]
    xy = np.stack(sums, axis=1) / total[:, None]
    # Keypoints that nothing is left of are not worth a place.
    near = np.linalg.norm(xy[label] - points, axis=1) <= options.max_error
    strength = np.bincount(label, scores * near, minlength=len(xy))
    strength[np.bincount(label, near, minlength=len(xy)) == 0] = -1
    order = np.argsort(-strength, kind="stable")[: options.max_keypoints]
    order = np.sort(order[strength[order] >= 0])
    row = np.full(len(xy), -1, np.int64)
    row[order] = np.arange(len(order))
    kept = Keypoints(xy[order].astype(np.float32), strength[order].astype(np.float32))
    return kept, np.where(near, row[label], -1)


def one_to_one(index0: np.ndarray, index1: np.ndarray, scores: np.ndarray) -> IndexedMatches:
    """Of matches that share a keypoint the best stays; index: n, -1 where there is no keypoint."""
    order = np.argsort(-scores, kind="stable")
    order = order[(index0[order] >= 0) & (index1[order] >= 0)]
    # Taken from the best on: a match stays if it is the first at both of its ends. One that lost to a
    # match which lost itself stays out, too: it is the weaker one of three at least.
    for index in (index0, index1):
        _, first = np.unique(index[order], return_index=True)
        order = order[np.sort(first)]
    return IndexedMatches(np.stack([index0[order], index1[order]], axis=1), scores[order])
