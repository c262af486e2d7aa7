"""Shared keypoints moved to where the photos of their track look most alike.

Merging the points of several pairs into one keypoint costs some of the precision that each match has: where
a keypoint is in the other images is then told by the matches around it. The photos tell it better. The
strongest keypoint of a track stays where it is; the others move to where their photos look most like its
own, as matches do when they are polished.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from prism_match.images import load_image
from prism_match.maps.tracks import SharedKeypoints
from prism_match.polish import polish

PHOTOS_IN_MEMORY = 64
ROUNDS = 3  # of polishing: keypoints are off by less than new matches


def polish_tracks(
    shared: SharedKeypoints,
    files: Mapping[str, Path],
    device: torch.device | str = "cpu",
    progress: bool = False,
) -> SharedKeypoints:
    """files: the photos by the names of the keypoints."""
    if not shared.matches:
        return shared

    @lru_cache(PHOTOS_IN_MEMORY)
    def gray_of(name: str) -> Tensor:
        return torch.from_numpy(load_image(files[name]).gray)

    names = list(shared.keypoints)
    starts = np.cumsum([0, *map(len, shared.keypoints.values())])
    xy = np.concatenate([k.xy for k in shared.keypoints.values()])
    strength = np.concatenate([k.scores for k in shared.keypoints.values()])
    leader = strongest_of_track(shared, strength)
    image = np.repeat(np.arange(len(names)), np.diff(starts))
    followers = np.flatnonzero((leader != np.arange(len(xy))) & (image[leader] != image))
    pair = image[leader[followers]] * len(names) + image[followers]
    moved = xy.copy()
    order = np.argsort(pair, kind="stable")
    groups = np.split(followers[order], np.flatnonzero(np.diff(pair[order])) + 1)
    for rows in tqdm(groups, "polishing", unit="pair", disable=None if progress else True):
        if not len(rows):
            continue
        first, second = (gray_of(names[image[n]]).to(device) for n in (leader[rows[0]], rows[0]))
        points0, points1 = (torch.from_numpy(xy[n]).to(device) for n in (leader[rows], rows))
        moved[rows] = polish(first, second, points0, points1, ROUNDS).cpu().numpy()
    parts = np.split(moved, starts[1:-1])
    keypoints = {n: replace(k, xy=p) for (n, k), p in zip(shared.keypoints.items(), parts, strict=True)}
    return SharedKeypoints(keypoints, shared.matches)


def strongest_of_track(shared: SharedKeypoints, strength: np.ndarray) -> np.ndarray:
    """n, int64: for each keypoint of all images, one image behind the other, the strongest that matches
    connect it with, over any number of images; itself where it is that one."""
    start = dict(zip(shared.keypoints, np.cumsum([0, *map(len, shared.keypoints.values())]), strict=False))
    first, second = (
        np.concatenate([start[names[side]] + m.index[:, side] for names, m in shared.matches.items()])
        for side in (0, 1)
    )
    # Ranks instead of strengths: no two are equal, so that a track has one leader.
    rank = np.empty(len(strength), np.int64)
    rank[np.argsort(strength, kind="stable")] = np.arange(len(strength))
    best = rank.copy()
    while True:
        before = best.copy()
        np.maximum.at(best, first, best[second])
        np.maximum.at(best, second, best[first])
        if np.array_equal(best, before):
            break
    return np.argsort(rank)[best]
