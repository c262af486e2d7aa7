"""Shared keypoints moved to where the photos of their track look most alike.

Merging the points of several pairs into one keypoint costs some of the precision that each match has: where
a keypoint is in the other images is then told by the matches around it. The photos tell it better. The
strongest keypoint of a track stays where it is; the others move to where their photos look most like its
own, as matches do when they are polished.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from prism_match.engine.features import FeatureCache
from prism_match.engine.order import arrange
from prism_match.images import image_size, load_image
from prism_match.maps.tracks import SharedKeypoints, components
from prism_match.polish import polish

MEMORY = 2**30  # bytes of photos that are held
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

    names = list(shared.keypoints)
    starts = np.cumsum([0, *map(len, shared.keypoints.values())])
    xy = np.concatenate([k.xy for k in shared.keypoints.values()])
    strength = np.concatenate([k.scores for k in shared.keypoints.values()])
    leader = strongest_of_track(shared, strength)
    image = np.repeat(np.arange(len(names)), np.diff(starts))
    followers = np.flatnonzero((leader != np.arange(len(xy))) & (image[leader] != image))
    pair = image[leader[followers]] * len(names) + image[followers]
    moved = xy.copy()
    sorted_rows = np.argsort(pair, kind="stable")
    groups = np.split(followers[sorted_rows], np.flatnonzero(np.diff(pair[sorted_rows])) + 1)
    groups = [rows for rows in groups if len(rows)]
    pairs = [(names[image[leader[rows[0]]]], names[image[rows[0]]]) for rows in groups]
    photos = FeatureCache(MEMORY)
    largest = max((w * h for w, h in filter(None, map(image_size, files.values()))), default=1)
    order = arrange(pairs, MEMORY // largest)
    photos.expect(pairs[n] for n in order)

    def gray_of(name: str) -> Tensor:
        gray = photos.get(name)
        if gray is None:
            gray = read_gray_bytes(files[name])
            photos.add({name: gray})
        return torch.from_numpy(gray).to(device).float() / 255

    for done, n in enumerate(tqdm(order, "polishing", unit="pair", disable=None if progress else True)):
        rows = groups[n]
        first, second = map(gray_of, pairs[n])
        points0, points1 = (torch.from_numpy(xy[at]).to(device) for at in (leader[rows], rows))
        moved[rows] = polish(first, second, points0, points1, ROUNDS).cpu().numpy()
        photos.release(done, pairs[n])
    parts = np.split(moved, starts[1:-1])
    keypoints = {n: replace(k, xy=p) for (n, k), p in zip(shared.keypoints.items(), parts, strict=True)}
    return SharedKeypoints(keypoints, shared.matches)


def read_gray_bytes(path: Path) -> np.ndarray:
    """h w, uint8: a quarter of the memory, and no less exact."""
    return (load_image(path).gray * 255).round().astype(np.uint8)


def strongest_of_track(shared: SharedKeypoints, strength: np.ndarray) -> np.ndarray:
    """n, int64: for each keypoint of all images, one image behind the other, the strongest that matches
    connect it with, over any number of images; itself where it is that one."""
    start = dict(zip(shared.keypoints, np.cumsum([0, *map(len, shared.keypoints.values())]), strict=False))
    first, second = (
        np.concatenate([start[names[side]] + m.index[:, side] for names, m in shared.matches.items()])
        for side in (0, 1)
    )
    track = components(len(strength), np.stack([first, second], axis=1))
    weakest_first = np.argsort(strength, kind="stable")
    leader = np.empty(len(strength), np.int64)
    leader[track[weakest_first]] = weakest_first  # the last one to be written stays
    return leader[track]
