"""Where points of one's own choice lie in the other image.

The model matches centres of cells. What lies between them follows from the matches around it: the map of the
neighbourhood tells where to look, the windows of both images tell the rest (`subpixel.py`), and what all of
this agrees on, how sure it is (`certainty.py`). Matches that are too weak to be given out count here as well,
each by its score: they are the peaks of the coarse distribution around a point."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from prism_match.errors import UserError
from prism_match.images import ImageLike
from prism_match.model.arithmetic import inference
from prism_match.model.kernels import squared_distances
from prism_match.polish import FEWEST, MISFIT, NEIGHBOURS
from prism_match.stages import stage
from prism_match.subpixel import halvings, sharpen

if TYPE_CHECKING:
    from prism_match.certainty import Signs
    from prism_match.matcher import FeaturesPair, Found, PairMatcher

WEAKEST = 0.05  # least score of a match that tells about its neighbourhood
REACH = 32.0  # pixels of the model's image 0, about four cells, within which a match has to be
FITS = 3  # times that the neighbours are weighed anew
HARDLY = 0.05  # certainty below which a point is taken not to be visible
AT_ONCE = 4096  # points


@dataclass(frozen=True)
class Located:
    """n points of image 0 and where they are in image 1; the centre of the first pixel is (0, 0)."""

    points0: np.ndarray  # n 2, float32, as they were given
    points1: np.ndarray  # n 2, float32; NaN: not visible there
    certainty: np.ndarray  # n, float32: the probability to be within 3 pixels; 0 where it is not visible
    sigma: np.ndarray  # n, float32: the expected error in pixels of image 1; NaN where it is not visible

    def __len__(self) -> int:
        return len(self.points0)


@inference()
def locate(matcher: PairMatcher, image0: ImageLike, image1: ImageLike, points: np.ndarray) -> Located:
    """points: n 2, pixels (x, y) of image 0."""
    points = checked(points)
    if matcher.calibration is None or not matcher.polish:
        raise UserError(
            "points cannot be located without polish=True and a calibration of the weights: prism calibrate"
        )
    eager = matcher.adjusted(
        threshold=min(WEAKEST, matcher.threshold or 1.0), max_matches=None, tiles=None, tile_memory=None
    )
    found = eager.found(image0, image1)
    a, b = (image.prepared for image in found.pair)
    at, certainty, sigma = nowhere(len(points))
    inside = np.isfinite(points).all(1) & (points >= -0.5).all(1) & (points <= np.array(a.size) - 0.5).all(1)
    if len(found.at0) >= FEWEST and inside.any():
        place, signs, near = estimated(matcher, found, points[inside])
        sure, error = matcher.calibration.points(signs)
        there = near & (sure >= HARDLY) & (place >= -0.5).all(1) & (place <= np.array(b.size) - 0.5).all(1)
        rows = np.flatnonzero(inside)[there]
        at[rows], certainty[rows], sigma[rows] = place[there], sure[there], error[there]
    return Located(points.astype(np.float32), at, certainty, sigma)


@inference()
def estimated(matcher: PairMatcher, found: Found, points: np.ndarray) -> tuple[np.ndarray, Signs, np.ndarray]:
    """Of points (n 2) in image 0 and at least FEWEST matches: where they are in image 1 (n 2), what tells how
    sure that is, and whether a match is near enough to tell anything (n)."""
    a, b = (image.prepared for image in found.pair)
    given = torch.from_numpy(a.from_original(points)).to(matcher.device)
    with stage("polish"):
        guess = moved(matcher, found.pair, around(found.at0, found.at1, found.confidence, given))
    numbers = (x.cpu().numpy() for x in (guess.score, guess.stated, guess.misfit, guess.away))
    near = guess.nearest.cpu().numpy() <= REACH
    return b.to_original(guess.at1.cpu().numpy()), b.signs(*numbers), near


def checked(points: np.ndarray) -> np.ndarray:
    try:
        array = np.asarray(points, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise UserError("points must be numbers, of the shape (n, 2)") from error
    if array.size == 0:
        return array.reshape(0, 2)
    if array.ndim != 2 or array.shape[1] != 2:
        raise UserError(f"points must have the shape (n, 2), not {array.shape}")
    return array


def nowhere(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        np.full((count, 2), np.nan, np.float32),
        np.zeros(count, np.float32),
        np.full(count, np.nan, np.float32),
    )


@dataclass(frozen=True)
class Guess:
    """n points in pixels of the model's images."""

    at0: Tensor  # n 2
    at1: Tensor  # n 2
    stretch: Tensor  # n 2 2: how offsets around at0 become offsets around at1
    score: Tensor  # n: of the matches around it, as a mean
    misfit: Tensor  # n: how far these are from where the map of the neighbourhood has them
    away: Tensor  # n: how far they are in image 0, as a mean
    nearest: Tensor  # n: the nearest of them
    stated: Tensor  # n: the error that the network states


def around(matched0: Tensor, matched1: Tensor, scores: Tensor, points: Tensor) -> Guess:
    """By the matches (m 2, m 2, m) around each point (n 2)."""
    parts = [_around(matched0, matched1, scores, some) for some in points.split(AT_ONCE)]
    return Guess(*(torch.cat(x) for x in zip(*parts, strict=True)))


def _around(matched0: Tensor, matched1: Tensor, scores: Tensor, points: Tensor) -> tuple[Tensor, ...]:
    squared, near = squared_distances(points, matched0).topk(NEIGHBOURS, dim=1, largest=False)
    distance = squared.sqrt()
    d0, target = matched0[near] - points[:, None], matched1[near]  # n k 2
    spread = distance[:, NEIGHBOURS // 2 : NEIGHBOURS // 2 + 1].clamp(min=4.0)
    prior = scores[near] * torch.exp(-0.5 * (distance / spread).square())
    ones = torch.cat([d0, torch.ones_like(d0[..., :1])], dim=-1)  # n k 3
    damping = 1e-3 * torch.diag(torch.tensor([1.0, 1.0, 0.0], device=points.device))
    weight = prior
    for n in range(FITS):
        weighed = ones * weight[..., None]
        normal = torch.einsum("nki,nkj->nij", weighed, ones) + damping
        normal = normal + 1e-6 * torch.eye(3, device=points.device)
        fit = torch.linalg.solve(normal, torch.einsum("nki,nkj->nij", weighed, target))  # n 3 2
        rest = (target - torch.einsum("nki,nij->nkj", ones, fit)).norm(dim=2)
        if n < FITS - 1:
            weight = prior / (1 + (rest / MISFIT).square())
    total = prior.sum(1).clamp(min=1e-9)
    mean = [(x * prior).sum(1) / total for x in (scores[near], rest, distance)]
    stretch = fit[:, :2].transpose(1, 2)
    turned = stretch[:, 0, 0] * stretch[:, 1, 1] - stretch[:, 0, 1] * stretch[:, 1, 0]
    sound = (turned > 1 / 64) & (turned < 64)
    same = torch.eye(2, device=points.device)
    stretch = torch.where(sound[:, None, None], stretch, same)
    return points, fit[:, 2], stretch, *mean, distance[:, 0], torch.full_like(distance[:, 0], torch.inf)


def moved(matcher: PairMatcher, pair: FeaturesPair, guess: Guess) -> Guess:
    """at1 made exact by the windows of both images."""
    first, second = (image.pyramid for image in pair)
    assert first is not None and second is not None
    scales = pair[0].prepared.sharp_scale, pair[1].prepared.sharp_scale
    largest = halvings(min(image.prepared.zoom for image in pair))
    at1, error = sharpen(
        matcher.subpixel, first, second, scales, largest, guess.at0, guess.at1, guess.stretch
    )
    return replace(guess, at1=at1, stated=error)
