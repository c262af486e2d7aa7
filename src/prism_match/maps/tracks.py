"""Shared keypoints out of the matches of many pairs.

A matcher without a detector finds other points in each pair, so that no point is seen in more than two
images. Here the points of all pairs of an image that lie in the same small cell become one keypoint, at
their mean weighted by score; points near the border of a cell go to the strongest keypoint around; and
every match is re-assigned to the keypoints of its two ends. Then all keypoints move a little, so that the
matches between them hold as well as they can. A match that does not is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from prism_match.engine.features import FeatureCache, arrange
from prism_match.engine.store import Names
from prism_match.errors import UserError
from prism_match.images import image_size, load_image
from prism_match.maps.shared_keypoints import IndexedMatches, Keypoints, SharedKeypoints
from prism_match.matches import Matches
from prism_match.polish import local_affine, polish

ANCHOR = 0.05  # weight, in scores, of where a keypoint was at first: a track as a whole must not wander
ROUNDS = 30
POLISH_MEMORY = 2**30  # bytes of photos that are held
POLISH_ROUNDS = 3  # keypoints are off by less than new matches


@dataclass(frozen=True)
class TrackOptions:
    """Lengths are in pixels of the images as they were matched: what a matcher tells apart is the same
    there, however large the photos are."""

    cell: float = 1.5  # points this close can become one keypoint
    max_error: float = 1.5  # a match that is further from its keypoints is dropped
    max_keypoints: int = 8192  # of an image, those with the highest sum of scores

    def __post_init__(self) -> None:
        if not self.cell > 0:
            raise UserError(f"the cell must be larger than 0 pixels, not {self.cell}")
        if not self.max_error > 0:
            raise UserError(f"the largest error must be more than 0 pixels, not {self.max_error}")
        if self.max_keypoints < 1:
            raise UserError(f"at least 1 keypoint an image is needed, not {self.max_keypoints}")


def share_keypoints(
    pairs: Iterable[tuple[Names, Matches]],
    options: TrackOptions | None = None,
    scales: Mapping[str, float] | None = None,
) -> SharedKeypoints:
    """The matches of all pairs, with keypoints that are the same in every pair of an image.
    scales: how many times larger each image is than it was matched; 1 where it is not told."""
    options, scales = options or TrackOptions(), scales or {}
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
        scale = scales.get(name, 1.0)
        keypoints[name], index = merge_points(
            np.concatenate(points),
            np.concatenate(scores),
            options.cell * scale,
            options.max_error * scale,
            options.max_keypoints,
        )
        parts = np.split(index, np.cumsum([len(s) for s in scores])[:-1])
        assigned |= dict(zip(of_image, parts, strict=True))
    matches, raw = {}, {}
    for names in found:
        index = np.stack([assigned[names, 0], assigned[names, 1]], axis=1)
        rows = one_to_one(index[:, 0], index[:, 1], found[names].scores)
        if len(rows):
            matches[names] = IndexedMatches(index[rows], found[names].scores[rows])
            raw[names] = LocalMatches.of(found[names], rows)
    refined = refine_positions(keypoints, matches, raw)
    kept = {}
    for names, m in matches.items():
        xy0, xy1 = (refined[name].xy[m.index[:, side]] for side, name in enumerate(names))
        near = raw[names].errors(xy0, xy1) <= options.max_error * scales.get(names[1], 1.0)
        if near.any():
            kept[names] = IndexedMatches(m.index[near], m.scores[near])
    return SharedKeypoints(refined, kept)


def merge_points(
    points: np.ndarray, scores: np.ndarray, cell: float, max_error: float, max_keypoints: int
) -> tuple[Keypoints, np.ndarray]:
    """Points n 2 with scores n -> keypoints, and for each point the row of its keypoint (n, int64; -1:
    none, since it moved too far or its keypoint is not among the best)."""
    weight = np.maximum(scores.astype(np.float64), 1e-6)  # a score of 0 still says where it is
    cells = np.floor(points.astype(np.float64) / cell).astype(np.int64)
    cells, label = np.unique(cells, axis=0, return_inverse=True)
    label = label.reshape(-1)
    xy, strength = weighted_means(points, weight, label, len(cells))
    # Neighbours on two sides of a border between cells: both go to the stronger one.
    label = strongest_near(points, label, cells, xy, strength, max_error)
    xy, _ = weighted_means(points, weight, label, len(cells))
    near = np.linalg.norm(xy[label] - points, axis=1) <= max_error
    strength = np.bincount(label, weight * near, minlength=len(xy))
    order = np.argsort(-strength, kind="stable")[:max_keypoints]
    order = np.sort(order[strength[order] > 0])
    row = np.full(len(xy), -1, np.int64)
    row[order] = np.arange(len(order))
    kept = Keypoints(xy[order].astype(np.float32), strength[order].astype(np.float32))
    return kept, np.where(near, row[label], -1)


def weighted_means(
    points: np.ndarray, weight: np.ndarray, label: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """count 2: means of the points of each label; count: their weights. Far away where there are none."""
    total = np.bincount(label, weight, minlength=count)
    sums = [np.bincount(label, weight * points[:, k], minlength=count) for k in (0, 1)]
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(np.stack(sums, axis=1) / total[:, None], nan=np.inf), total


def strongest_near(
    points: np.ndarray,
    label: np.ndarray,
    cells: np.ndarray,
    xy: np.ndarray,
    strength: np.ndarray,
    max_error: float,
) -> np.ndarray:
    """n, int64: of the keypoints (xy: k 2, one for each of `cells`, which are sorted) in the cell of a point
    and the eight around it, the strongest that is within `max_error`; where there is none, its own."""
    low = cells.min(axis=0) - 1
    span = int(cells[:, 1].max() - low[1]) + 2
    keys = (cells[:, 0] - low[0]) * span + cells[:, 1] - low[1]
    mine = keys[label]
    best, most = label.copy(), np.full(len(points), -1.0)
    for dx in (-1, 0, 1):
        for dy in (-1, 0, 1):
            at = np.searchsorted(keys, mine + dx * span + dy).clip(max=len(keys) - 1)
            there = keys[at] == mine + dx * span + dy
            there &= np.linalg.norm(xy[at] - points, axis=1) <= max_error
            there &= strength[at] > most
            best[there], most[there] = at[there], strength[at[there]]
    return best


def one_to_one(index0: np.ndarray, index1: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """m, int64: rows of matches taken from the best on, each whose two keypoints are still free; best first.
    index: n, the keypoints of each match, -1 where there is none."""
    order = np.argsort(-scores, kind="stable")
    left = order[(index0[order] >= 0) & (index1[order] >= 0)]
    taken = []
    # All at once: whoever is the best at both of its ends is taken whatever the others do.
    while len(left):
        ends = [index[left] for index in (index0, index1)]
        best = np.ones(len(left), bool)
        for end in ends:
            best &= np.isin(np.arange(len(left)), np.unique(end, return_index=True)[1])
        taken.append(left[best])
        free = ~(np.isin(ends[0], ends[0][best]) | np.isin(ends[1], ends[1][best]))
        left = left[free]
    chosen = np.sort(np.concatenate(taken)) if taken else left  # equals in the order they came in
    return chosen[np.argsort(-scores[chosen], kind="stable")]


@dataclass(frozen=True)
class LocalMatches:
    """Matches as they were found, with what they say about the points around them: x + d in the first image
    is y + J d in the second, J being how that is stretched and turned against the first."""

    x: np.ndarray  # m 2
    y: np.ndarray  # m 2
    jacobian: np.ndarray  # m 2 2

    @staticmethod
    def of(matches: Matches, rows: np.ndarray) -> LocalMatches:
        points0, points1 = (torch.from_numpy(p).double() for p in (matches.keypoints0, matches.keypoints1))
        jacobian = local_affine(points0, points1).numpy()[rows]
        return LocalMatches(matches.keypoints0[rows], matches.keypoints1[rows], jacobian)

    def errors(self, xy0: np.ndarray, xy1: np.ndarray) -> np.ndarray:
        """m: pixels of the second image by which points (m 2 each) are not what the matches say."""
        expected = self.y + np.einsum("nij,nj->ni", self.jacobian, xy0 - self.x)
        return np.linalg.norm(xy1 - expected, axis=1)


def refine_positions(
    keypoints: dict[str, Keypoints], matches: dict[Names, IndexedMatches], raw: dict[Names, LocalMatches]
) -> dict[str, Keypoints]:
    """Keypoints moved so that all of their matches hold as well as they can: k1 - y = J (k0 - x) for each
    of them, by least squares over all pairs, solved by relaxation."""
    if not matches:
        return keypoints
    starts = np.cumsum([0, *map(len, keypoints.values())]).tolist()
    start = dict(zip(keypoints, starts, strict=False))
    origin = np.concatenate([k.xy for k in keypoints.values()]).astype(np.float64)
    first, second = (
        np.concatenate([start[names[side]] + m.index[:, side] for names, m in matches.items()])
        for side in (0, 1)
    )
    x, y, forward = (
        np.concatenate([getattr(raw[n], key) for n in matches]) for key in ("x", "y", "jacobian")
    )
    backward = np.linalg.inv(forward)
    weight = np.concatenate([m.scores for m in matches.values()]).astype(np.float64)
    total = ANCHOR + np.bincount(np.concatenate([first, second]), np.tile(weight, 2), minlength=len(origin))
    xy = origin
    for _ in range(ROUNDS):
        pull = ANCHOR * origin
        for ends, target in (
            (second, y + np.einsum("nij,nj->ni", forward, xy[first] - x)),
            (first, x + np.einsum("nij,nj->ni", backward, xy[second] - y)),
        ):
            for k in (0, 1):
                pull[:, k] += np.bincount(ends, weight * target[:, k], minlength=len(origin))
        xy = 0.5 * xy + 0.5 * pull / total[:, None]  # half of the way: all at once would swing
    moved = np.split(xy.astype(np.float32), starts[1:-1])
    return {name: Keypoints(m, k.scores) for (name, k), m in zip(keypoints.items(), moved, strict=True)}


def components(count: int, edges: np.ndarray) -> np.ndarray:
    """count, int64: for each of so many nodes the smallest number that edges (e 2) join it with."""
    label = np.arange(count)
    while True:
        low = np.minimum(label[edges[:, 0]], label[edges[:, 1]])
        new = label.copy()
        np.minimum.at(new, edges[:, 0], low)
        np.minimum.at(new, edges[:, 1], low)
        new = new[new]  # labels point to nodes: jumping along them halves the way
        if (new == label).all():
            return label
        label = new


def polish_tracks(
    shared: SharedKeypoints,
    files: Mapping[str, Path],
    device: torch.device | str = "cpu",
    progress: bool = False,
) -> SharedKeypoints:
    """Keypoints moved to where the photos of their track look most alike. files: the photos by name.

    Merging the points of several pairs into one keypoint costs some of the precision that each match has:
    where a keypoint is in the other images is then told by the matches around it. The photos tell it better.
    The strongest keypoint of a track stays where it is; the others move to where their photos look most like
    its own, as matches do when they are polished."""
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
    photos = FeatureCache(POLISH_MEMORY)
    largest = max((w * h for w, h in filter(None, map(image_size, files.values()))), default=1)
    order = arrange(pairs, POLISH_MEMORY // largest)
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
        moved[rows] = polish(first, second, points0, points1, POLISH_ROUNDS).cpu().numpy()
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
