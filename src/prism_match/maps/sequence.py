"""Points followed through the frames of a video: matches of frames that come after each other, and of frames
that show again what earlier ones showed, joined into tracks. The backbone sees each frame once."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from prism_match.engine.features import held_bytes
from prism_match.engine.store import Names
from prism_match.errors import UserError
from prism_match.files import atomic_path
from prism_match.geometry import is_evident, spread_over
from prism_match.images import ImageLike, load_image, write_png
from prism_match.maps.retrieval import exact_search, pool
from prism_match.maps.shared_keypoints import SharedKeypoints
from prism_match.maps.tracks import TrackOptions, components, share_keypoints
from prism_match.matcher import ImageFeatures, PairMatcher
from prism_match.matches import Matches
from prism_match.viz import draw_trails

FEWEST_KNOWN = 3  # frames that the mean of all descriptors is worth something of


@dataclass(frozen=True)
class SequenceOptions:
    again: int = 1  # earlier frames that look most alike, with which each frame is matched, too
    gap: int = 15  # frames that have to lie between
    min_length: int = 2  # frames that a track is seen in
    memory: int = 2 * 2**30  # bytes of features of earlier frames; beyond it, every second one is forgotten

    def __post_init__(self) -> None:
        if self.again < 0 or self.memory < 0:
            raise UserError("the number of frames to find again, and the memory for them, must be 0 or more")
        if self.gap < 1:
            raise UserError(f"at least 1 frame has to lie between a frame and an earlier one, not {self.gap}")
        if self.min_length < 2:
            raise UserError(f"a track is seen in at least 2 frames, not {self.min_length}")


@dataclass(frozen=True, repr=False)
class Tracks:
    """Points that were followed, a row for each frame that sees one, by track and then by frame."""

    track: np.ndarray  # n, int64: from 0, without gaps
    frame: np.ndarray  # n, int64: no frame twice in a track
    xy: np.ndarray  # n 2, float32: pixels of the frame; the centre of the first one is (0, 0)
    scores: np.ndarray  # n, float32: sum of the scores of the matches it was found by
    sizes: list[tuple[int, int]]  # width, height of each frame
    links: list[tuple[int, int]]  # frames that were matched and have enough in common

    def __repr__(self) -> str:
        return f"<{len(self)} tracks of {len(self.track)} points in {len(self.sizes)} frames>"

    def __len__(self) -> int:
        return int(self.track[-1]) + 1 if len(self.track) else 0

    @property
    def lengths(self) -> np.ndarray:
        """For each track the number of frames that see it."""
        return np.bincount(self.track, minlength=len(self))

    def between(self, first: int, second: int) -> Matches:
        """The tracks that two frames both see, as matches; whether or not they were matched."""
        for n in (first, second):
            if not 0 <= n < len(self.sizes):
                raise UserError(f"there are {len(self.sizes)} frames, and none has the number {n}")
        a, b = (np.flatnonzero(self.frame == n) for n in (first, second))
        _, i, j = np.intersect1d(self.track[a], self.track[b], return_indices=True)
        strength = np.minimum(self.scores[a[i]], self.scores[b[j]])
        order = np.argsort(-strength, kind="stable")
        i, j = a[i][order], b[j][order]
        scores = strength[order].clip(max=1)
        return Matches(self.xy[i], self.xy[j], scores, self.sizes[first], self.sizes[second])

    def plot(
        self, image: ImageLike, frame: int, path: str | Path | None = None, *, past: int = 10, most: int = 300
    ) -> np.ndarray:
        """A frame (its image, and its number) with the trails of `most` tracks through the `past` frames
        before it, from red (just found) to green (seen in all of them): h w 3, uint8; written to a .png if
        `path` is given."""
        width, height = self.sizes[frame] if 0 <= frame < len(self.sizes) else (0, 0)
        rgb = load_image(image).rgb
        if rgb.shape[:2] != (height, width):
            raise UserError(f"frame {frame} is {width}x{height}, the image is {rgb.shape[1]}x{rgb.shape[0]}")
        here = np.flatnonzero(self.frame == frame)
        here = here[spread_over(self.xy[here], self.lengths[self.track[here]], most)]
        start = np.searchsorted(self.track, self.track[here])  # rows of a track are sorted by frame
        trails = []
        for first, last in zip(start.tolist(), here.tolist(), strict=True):
            rows = np.arange(first, last + 1)
            trails.append(self.xy[rows[self.frame[rows] >= frame - past]])
        values = np.array([len(trail) - 1 for trail in trails]) / max(1, min(past, frame))
        picture = draw_trails(rgb, trails, values)
        if path is not None:
            write_png(path, picture)
        return picture

    def save(self, path: str | Path) -> None:
        """To a .csv with the columns track, frame, x, y, score, or an .npz with the arrays."""
        path = Path(path)
        if path.suffix.lower() not in (".csv", ".npz"):
            raise UserError(f"{path}: tracks are saved as .csv or .npz")
        with atomic_path(path) as temporary:
            if path.suffix.lower() == ".npz":
                with temporary.open("wb") as binary:  # NumPy would add to a name that ends in .NPZ
                    np.savez_compressed(
                        binary, track=self.track, frame=self.frame, xy=self.xy, scores=self.scores,
                        sizes=np.array(self.sizes).reshape(-1, 2), links=np.array(self.links).reshape(-1, 2),
                    )  # fmt: skip
                return
            with temporary.open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                writer.writerow(["track", "frame", "x", "y", "score"])
                columns = (self.track, self.frame, *self.xy.T, self.scores)
                writer.writerows(zip(*(c.tolist() for c in columns), strict=True))


def follow(
    matcher: PairMatcher,
    frames: Iterable[ImageLike],
    options: SequenceOptions | None = None,
    joining: TrackOptions | None = None,
    progress: bool = False,
) -> Tracks:
    """All of `Matcher.track`."""
    options = options or SequenceOptions()
    found: dict[Names, Matches] = {}
    sizes: list[tuple[int, int]] = []
    past, last = Past(options.memory), None
    for n, frame in enumerate(tqdm(frames, "tracking", unit="frame", disable=None if progress else True)):
        now = matcher.extract_prepared([matcher.prepare(frame)])[0]
        sizes.append(now.prepared.size)
        look = pool(now) if options.again else np.zeros(0)
        partners = [] if last is None else [(n - 1, last)]
        partners += past.most_alike(look, min(n - options.gap, n - 2), options.again)
        for m, then in partners:
            matches = matcher.match_extracted([(then, now)])[0]
            agreeing = agreement(matches)
            if is_evident(int(agreeing.sum()), len(matches)):
                # What moves by itself is followed from frame to frame, but is no place that was seen before.
                found[name(m), name(n)] = matches if m == n - 1 else matches.filter(agreeing)
        if options.again:
            past.add(n, now, look)
        last = now
    if not sizes:
        raise UserError("there are no frames to track points through")
    scales = {name(n): max(1.0, max(size) / matcher.size) for n, size in enumerate(sizes)}
    shared = share_keypoints(found.items(), joining, scales)
    return join(shared, sizes, options.min_length)


def name(frame: int) -> str:
    return f"{frame:08d}"  # sorted as the frames are


def agreement(matches: Matches) -> np.ndarray:
    """n, bool: the matches that agree with one rigid scene; with a flat one where nothing else is to be
    found, as when the camera stands still."""
    rigid, flat = matches.estimate("fundamental").inliers, matches.estimate("homography").inliers
    return rigid if rigid.sum() >= flat.sum() else flat


class Past:
    """What is known of earlier frames: the features of some, as many as there is room for, evenly spread."""

    def __init__(self, limit: int):
        self.limit, self.used, self.stride = limit, 0, 1
        self._frames: dict[int, tuple[ImageFeatures, np.ndarray]] = {}

    def add(self, number: int, features: ImageFeatures, look: np.ndarray) -> None:
        if number % self.stride:
            return
        self._frames[number] = features, look
        self.used += held_bytes(features)
        while self.used > self.limit and self._frames:
            self.stride *= 2
            self._frames = {n: item for n, item in self._frames.items() if n % self.stride == 0}
            self.used = sum(held_bytes(item[0]) for item in self._frames.values())
            if len(self._frames) == 1:  # not even one has room
                break

    def most_alike(self, look: np.ndarray, before: int, count: int) -> list[tuple[int, ImageFeatures]]:
        """Of the frames up to a number, the most similar ones."""
        known = [n for n in self._frames if n <= before]
        if not count or len(self._frames) < FEWEST_KNOWN or not known:
            return []
        # All frames tell what they have in common, those that come into question or not.
        every = list(self._frames)
        looks = np.stack([self._frames[n][1] for n in every])
        order = [every[k] for k in exact_search(looks)(look[None], len(every))[0]]
        return [(n, self._frames[n][0]) for n in order if n <= before][:count]


def join(shared: SharedKeypoints, sizes: list[tuple[int, int]], min_length: int) -> Tracks:
    """Keypoints that matches connect become one track, which has no frame twice."""
    names = list(shared.keypoints)
    starts = np.cumsum([0, *map(len, shared.keypoints.values())])
    start = dict(zip(names, starts.tolist(), strict=False))
    frame = np.repeat(np.array([int(n) for n in names], np.int64), np.diff(starts))
    parts = [
        [start[n] + m.index[:, side] for side, n in enumerate(pair)] for pair, m in shared.matches.items()
    ]
    edges = np.concatenate([np.stack(p, axis=1) for p in parts]) if parts else np.zeros((0, 2), np.int64)
    weight = np.concatenate([m.scores for m in shared.matches.values()]) if parts else np.zeros(0)
    label = without_doubles(components(len(frame), edges), frame, edges, weight)
    long = (
        np.flatnonzero(np.bincount(label, minlength=len(frame))[label] >= min_length) if len(label) else label
    )
    _, track = np.unique(label[long], return_inverse=True)
    order = np.lexsort((frame[long], track))
    rows, links = long[order], sorted((int(a), int(b)) for a, b in shared.matches)
    both = [
        np.concatenate([getattr(k, key) for k in shared.keypoints.values()])
        if names
        else np.zeros(shape, np.float32)
        for key, shape in (("xy", (0, 2)), ("scores", 0))
    ]
    return Tracks(track[order], frame[rows], both[0][rows], both[1][rows], sizes, links)


def without_doubles(
    label: np.ndarray, frame: np.ndarray, edges: np.ndarray, weight: np.ndarray
) -> np.ndarray:
    """n: the label of each keypoint's track. One that would have two keypoints of a frame is put together
    anew, from its best match on, without those that would make it so."""
    pairs, count = np.unique(np.stack([label, frame], axis=1), axis=0, return_counts=True)
    doubtful = np.isin(label, pairs[count > 1, 0]) if len(label) else np.zeros(0, bool)
    label = np.where(doubtful, np.arange(len(label)), label)
    members = {n: [n] for n in np.flatnonzero(doubtful).tolist()}
    chosen = np.flatnonzero(doubtful[edges[:, 0]])
    for row in chosen[np.argsort(-weight[chosen], kind="stable")].tolist():
        a, b = (int(label[n]) for n in edges[row])
        if a == b or {int(frame[n]) for n in members[a]} & {int(frame[n]) for n in members[b]}:
            continue
        members[a] += members.pop(b)
        label[members[a]] = a
    return label
