"""A second look at two photos: only at what both show, and with both at one scale.

The first look shrinks both photos to the same longer side. Where one was taken from nearer, or with a longer
lens, or where they share a small part only, what they share is larger in one than in the other, and small.
Its matches tell where that is and how large, and that is what the second look takes of the photos' own
pixels. It costs a pass more, so it is taken only where it sees something else than the first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prism_match.geometry import estimate
from prism_match.images import SMALLEST
from prism_match.model.prism import CELL
from prism_match.windows import Box

FEWEST = 8  # matches that tell enough of how the photos overlap
FEW = 500  # so few are asked first which of them agree with one geometry: most of the others do
OFF = 3.0  # pixels as matched by which one that agrees may miss its epipolar line
TRIMMED, ROOM = 5, 0.15  # percent of the matches at each end, and what is added there, as a part of the rest
DRAWN = 4000  # pairs of matches whose distances are compared
# What is worth another look: a change of scale, or one photo of which so many more pixels can be had.
OTHER_SCALE, FINER = 1.35, 1.6


@dataclass(frozen=True)
class Frame:
    """A photo as the first look saw it."""

    size: tuple[int, int]  # width, height in pixels of its own
    scale: float  # pixels as matched that one of its own was
    finest: float  # the same of the largest image that there is of it


@dataclass(frozen=True)
class Look:
    """The parts of both photos, in pixels of their own, and the scales that they are matched at."""

    box0: Box
    box1: Box
    scale0: float
    scale1: float


def plan_look(
    points0: np.ndarray, points1: np.ndarray, frame0: Frame, frame1: Frame, side: int
) -> Look | None:
    """points0, points1: n 2, the matches of the first look in pixels of the photos. side: the longest that
    parts may be once they are shrunk. None: it would see what the first one saw, or that has told nothing."""
    if FEWEST <= len(points0) < FEW:
        agree = estimate(points0, points1, "fundamental", threshold=OFF / frame1.scale).inliers
        if agree.sum() >= 2 * FEWEST:
            points0, points1 = points0[agree], points1[agree]
    if len(points0) < FEWEST:
        return None
    ratio = change_of_scale(points0, points1)
    if ratio is None:
        return None
    boxes = [overlap(points, frame) for points, frame in ((points0, frame0), (points1, frame1))]
    longest0, longest1 = (max(box.width, box.height) for box in boxes)
    # What is one pixel in photo 0 is `ratio` pixels in photo 1, and as large as that once both are shrunk.
    scale0 = min(frame0.finest, ratio * frame1.finest, side / longest0, ratio * side / longest1)
    scale1 = scale0 / ratio
    if min(min(b.width, b.height) * s for b, s in zip(boxes, (scale0, scale1), strict=True)) < SMALLEST:
        return None
    seen = ratio * frame1.scale / frame0.scale
    finer = max(scale0 / frame0.scale, scale1 / frame1.scale)
    if max(seen, 1 / seen) < OTHER_SCALE and finer < FINER:
        return None
    return Look(boxes[0], boxes[1], scale0, scale1)


def change_of_scale(points0: np.ndarray, points1: np.ndarray) -> float | None:
    """How many pixels of photo 1 are one of photo 0: the median over pairs of matches of how far apart they
    are in one and in the other, which wrong matches and depth leave about as it is."""
    draw = np.random.default_rng(0)
    i, j = draw.integers(0, len(points0), (2, DRAWN))
    apart0, apart1 = (
        np.linalg.norm(p[i].astype(np.float64) - p[j].astype(np.float64), axis=1) for p in (points0, points1)
    )
    far = (apart0 > 0.05 * apart0.max()) & (apart1 > 0)
    return float(np.median(apart1[far] / apart0[far])) if far.sum() >= FEWEST else None


def overlap(points: np.ndarray, frame: Frame) -> Box:
    """The part of a photo that has matches, with some room: they thin out before the overlap ends."""
    low, high = np.percentile(points.astype(np.float64), (TRIMMED, 100 - TRIMMED), axis=0)
    room = ROOM * (high - low) + 2 * CELL / frame.scale
    return Box.covering(low - room, high + room, frame.size)
