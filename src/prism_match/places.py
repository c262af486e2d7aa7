"""Whether two photos show the same place at all.

Photos of different places have matches, too, and some of them agree with one geometry: the more alike the
places, the more. What tells are how many agree, how large a share of all of them that is, how much of the
photos they cover and how densely, and how far each can be believed. A small regression on these, fitted on
photos of landmarks (`benchmarks/places.py`), makes a probability of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cv2
import numpy as np

from prism_match.certainty import shipped
from prism_match.geometry import estimate

if TYPE_CHECKING:
    from prism_match.matches import Matches

SIDE = 832  # pixels that the longer side of a photo counts as, so that its size does not matter
OFF = 1.5  # of these pixels by which a match may miss its epipolar line
ITERATIONS = 2000
GRID = 16  # cells along the longer side, to tell what is covered


def same_place(matches: Matches) -> float:
    """The probability, of matches whose certainty is known."""
    return float(probability(terms(matches)[None])[0])


def probability(rows: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """n, of n rows of terms; weights: of the regression, those that ship if not given."""
    weights = np.array(shipped().places) if weights is None else weights
    return 1 / (1 + np.exp(-np.clip(rows @ weights, -30, 30)))


def terms(matches: Matches) -> np.ndarray:
    """What the regression weighs."""
    certainty = np.zeros(0) if matches.certainty is None else matches.certainty.astype(np.float64)
    points = [
        (keypoints.astype(np.float64) + 0.5) * (SIDE / max(size))
        for keypoints, size in ((matches.keypoints0, matches.size0), (matches.keypoints1, matches.size1))
    ]
    fit = estimate(points[0], points[1], "fundamental", threshold=OFF, max_iterations=ITERATIONS)
    agree = fit.inliers
    agreeing = certainty[agree].sum()
    scores = matches.scores[agree].astype(np.float64)
    sizes = (matches.size0, matches.size1)
    covered, filled = zip(*(coverage(p[agree], s) for p, s in zip(points, sizes, strict=True)), strict=True)
    return np.array([
        1.0,
        np.log1p(agreeing),
        logit((agreeing + 0.5) / (certainty.sum() + 1)),
        logit((agreeing + 0.5) / (agree.sum() + 1)),
        logit((scores.sum() + 0.5) / (len(scores) + 1)),
        np.log1p(min(covered)),
        min(filled),
    ])  # fmt: skip


def logit(share: float) -> float:
    return float(np.log(share / (1 - share)))


def coverage(points: np.ndarray, size: tuple[int, int]) -> tuple[int, float]:
    """Of a photo: in how many cells of a grid there are points (n 2), and which share of the cells within
    their outline that is. Chance leaves holes."""
    columns, rows = (max(1, -(-n * GRID // max(size))) for n in size)
    cells = np.floor(points * (GRID / SIDE)).astype(np.int32).clip(0, [columns - 1, rows - 1])
    taken, within = np.zeros((2, rows, columns), np.uint8)
    if not len(cells):
        return 0, 0.0
    taken[cells[:, 1], cells[:, 0]] = 1
    cv2.fillConvexPoly(within, cv2.convexHull(cells), 1)
    return int(taken.sum()), float(taken.sum() / (within | taken).sum())
