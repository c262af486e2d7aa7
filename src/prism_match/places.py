"""Whether two photos show the same place at all.

Photos of different places have matches, too, and some of them agree with one geometry: the more alike the
places, the more. What tells are how many agree, how large a share of all of them that is, and how far each
can be believed. A small regression on these, fitted on photos of landmarks (`benchmarks/places.py`), makes a
probability of it. How much of the photos they cover, and how densely, tells nothing beyond that, and neither
does how much of them was pruned."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from prism_match.certainty import shipped
from prism_match.geometry import estimate

if TYPE_CHECKING:
    from prism_match.matches import Matches

SIDE = 832  # pixels that the longer side of a photo counts as, so that its size does not matter
OFF = 1.5  # of these pixels by which a match may miss its epipolar line
ITERATIONS = 2000


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
    agree = that_agree(matches)
    agreeing = certainty[agree].sum()
    scores = matches.scores[agree].astype(np.float64)
    return np.array([
        1.0,
        np.log1p(agreeing),
        logit((agreeing + 0.5) / (certainty.sum() + 1)),
        logit((agreeing + 0.5) / (agree.sum() + 1)),
        logit((scores.sum() + 0.5) / (len(scores) + 1)),
    ])  # fmt: skip


def that_agree(matches: Matches) -> np.ndarray:
    """n, bool: with one fundamental matrix, whatever the sizes of the photos are."""
    points = [
        (keypoints.astype(np.float64) + 0.5) * (SIDE / max(size))
        for keypoints, size in ((matches.keypoints0, matches.size0), (matches.keypoints1, matches.size1))
    ]
    return estimate(points[0], points[1], "fundamental", threshold=OFF, max_iterations=ITERATIONS).inliers


def logit(share: float) -> float:
    return float(np.log(share / (1 - share)))
