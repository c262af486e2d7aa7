"""Pairs of photos that contradict the rest: photos are joined by matches, and a turn along any closed way
through them has to end where it began.

Twin facades, repeated windows and the like give pairs with many matches that agree with two cameras, only not
with those of the other pairs. In a triplet of photos the three relative rotations have to cancel out; a pair
in whose triplets they mostly do not is doubtful, and so is one that nothing else confirms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from prism_match.cameras import Camera
from prism_match.engine import Names
from prism_match.geometry import Estimate, estimate, rotation_angle
from prism_match.maps.shared_keypoints import SharedKeypoints

MAX_ANGLE = 10.0  # degrees by which rotations may differ: what a focal length that is a little wrong makes
MIN_INLIERS = 15  # as many as COLMAP asks for


@dataclass(frozen=True)
class RelativeTurn:
    rotation: np.ndarray  # 3 3: from the camera of the first photo to that of the second
    inliers: int


def relative_turns(
    shared: SharedKeypoints, pairs: Iterable[Names], cameras: Mapping[str, Camera], max_error: float
) -> dict[Names, RelativeTurn]:
    """What the matches of each pair tell of its cameras, by themselves; max_error in pixels. Pairs of which
    hardly a match agrees with any two cameras have 0 inliers."""
    turns = {}
    for names in pairs:
        found = _relative_pose(shared, names, cameras, max_error)
        if found.rotation is None or found.num_inliers < MIN_INLIERS:
            turns[names] = RelativeTurn(np.eye(3), 0)
        else:
            turns[names] = RelativeTurn(found.rotation, found.num_inliers)
    return turns


def _relative_pose(
    shared: SharedKeypoints, names: Names, cameras: Mapping[str, Camera], max_error: float
) -> Estimate:
    index = shared.matches[names].index
    points, intrinsics = [], []
    for side, name in enumerate(names):
        K = np.diag([*np.diag(cameras[name].K)[:2], 1.0])
        ideal = cameras[name].normalise(shared.keypoints[name].xy[index[:, side]])
        points.append(ideal * np.diag(K)[:2])
        intrinsics.append(K)
    known = np.isfinite(np.concatenate(points, axis=1)).all(axis=1)
    return estimate(
        points[0][known], points[1][known], "essential",
        intrinsics0=intrinsics[0], intrinsics1=intrinsics[1], threshold=max_error, max_iterations=2000,
    )  # fmt: skip


def doubtful_pairs(
    turns: Mapping[Names, RelativeTurn], rotations: Mapping[str, np.ndarray], max_angle: float = MAX_ANGLE
) -> dict[Names, str]:
    """The pairs that are not to be used, with the reason of each. rotations: 3 3, world to camera, by photo,
    of a reconstruction of all pairs, which is asked where triplets cannot tell."""
    doubtful = {
        names: f"fewer than {MIN_INLIERS} of its matches agree with any two cameras"
        for names, turn in turns.items()
        if not turn.inliers
    }
    used = {names: turn for names, turn in turns.items() if turn.inliers}
    off = {
        (a, b): rotation_angle(turn.rotation, rotations[b] @ rotations[a].T)
        for (a, b), turn in used.items()
    }  # fmt: skip
    triplets = _triplets(used)
    agreeing = _cycle_errors(used, triplets) <= max_angle
    contradicting, confirmed = _outvoted(used, triplets, agreeing, off, max_angle)
    doubtful |= contradicting
    alone = [names for names in used if names not in contradicting and names not in confirmed]
    for names in alone:
        if off[names] > max_angle:
            doubtful[names] = (
                f"its matches say that the cameras are turned {off[names]:.1f} degrees from where the other "
                "pairs put them, and no third photo speaks for it"
            )
    if confirmed:  # photos in a chain have no triplets at all: then that tells nothing
        for names in _bridges([names for names in used if names not in doubtful]):
            doubtful[names] = "nothing but this pair joins its photos, and no third photo speaks for it"
    return doubtful


def _triplets(used: Mapping[Names, RelativeTurn]) -> np.ndarray:
    """t 3: rows in `used` of the pairs (a, b), (b, c), (a, c) of all photos a < b < c that have all three."""
    row = {frozenset(names): n for n, names in enumerate(used)}
    near: dict[str, set[str]] = {}
    for a, b in used:
        near.setdefault(a, set()).add(b)
        near.setdefault(b, set()).add(a)
    found = [
        [row[frozenset(side)] for side in ((a, b), (b, c), (a, c))]
        for a, b in (sorted(names) for names in used)
        for c in sorted(near[a] & near[b])
        if c > b
    ]
    return np.array(found, np.int64).reshape(-1, 3)


def _cycle_errors(used: Mapping[Names, RelativeTurn], triplets: np.ndarray) -> np.ndarray:
    """t: degrees that are left over after a turn from a to b to c and back to a."""
    if not len(triplets):
        return np.zeros(0)
    upward = np.stack([
        turn.rotation if names[0] < names[1] else turn.rotation.T for names, turn in used.items()
    ])  # fmt: skip
    ab, bc, ac = upward[triplets].transpose(1, 0, 2, 3)
    return np.array([rotation_angle(whole, parts) for whole, parts in zip(ac, bc @ ab, strict=True)])


def _outvoted(
    used: Mapping[Names, RelativeTurn],
    triplets: np.ndarray,
    agreeing: np.ndarray,
    off: Mapping[Names, float],
    max_angle: float,
) -> tuple[dict[Names, str], set[Names]]:
    """The pairs more than half of whose triplets do not agree, the worst one at a time, since it takes its
    triplets along, which speak against good pairs, too; and the pairs that a triplet confirms in the end."""
    names = list(used)
    left = np.ones(len(triplets), bool)
    removed: dict[Names, str] = {}
    while True:
        good, bad = (
            np.bincount(triplets[left & side].ravel(), minlength=len(names)) for side in (agreeing, ~agreeing)
        )
        outvoted = np.flatnonzero(bad > good)
        if not len(outvoted):
            return removed, {names[n] for n in np.flatnonzero(good)}
        share = good / np.maximum(good + bad, 1)
        worst = min(
            outvoted, key=lambda n: (share[n], off[names[n]] <= max_angle, used[names[n]].inliers, names[n])
        )
        removed[names[worst]] = (
            f"of its triplets with other photos {good[worst]} of {bad[worst] + good[worst]} close within "
            f"{max_angle:g} degrees"
        )
        left &= ~(triplets == worst).any(axis=1)


def _bridges(pairs: list[Names]) -> list[Names]:
    """The pairs without which the photos fall apart."""
    near: dict[str, list[str]] = {}
    for a, b in pairs:
        near.setdefault(a, []).append(b)
        near.setdefault(b, []).append(a)
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}  # the first photo that is reached from below without the way down
    bridges = set()
    for root in near:
        if root in order:
            continue
        order[root] = lowest[root] = len(order)
        way = [(root, "", iter(near[root]))]
        while way:  # depth first, without recursion: there may be thousands of photos
            photo, above, rest = way[-1]
            for other in rest:
                if other not in order:
                    order[other] = lowest[other] = len(order)
                    way.append((other, photo, iter(near[other])))
                    break
                if other != above:
                    lowest[photo] = min(lowest[photo], order[other])
            else:
                way.pop()
                if above:
                    lowest[above] = min(lowest[above], lowest[photo])
                    if lowest[photo] > order[above]:
                        bridges.add(frozenset((above, photo)))
    return [names for names in pairs if frozenset(names) in bridges]
