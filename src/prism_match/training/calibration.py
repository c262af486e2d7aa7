"""Fits `certainty.py`: pairs with exact truth are matched, and what tells about a match is set against what
became of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm

from prism_match.certainty import BEYOND, RIGHT, Calibration, Regression, Signs, calibration_error
from prism_match.errors import UserError
from prism_match.locating import WEAKEST, estimated
from prism_match.matcher import PairMatcher
from prism_match.polish import FEWEST
from prism_match.training.feed import seed_of
from prism_match.training.pairs import PairBatch, PairSource, between_cells, warp_between_cells
from prism_match.weights import SUBPIXEL_SHA256

POINTS = 500  # of each pair that are located
BENT = 2.0  # pixels by which four cells may not fit a plane, for a point between them to be known


@dataclass(frozen=True)
class CalibrationConfig:
    pairs: int = 200
    size: int = 640  # pixels of the pairs
    matched: tuple[int, ...] = (640, 480, 320)  # longer sides they are matched at, in turn
    seed: int = 1_000_003  # far from those that anything was trained on


@dataclass
class Observed:
    """Of n matches or points."""

    terms: list[np.ndarray]
    errors: list[np.ndarray]  # pixels; infinite where there is no right place
    pairs: list[np.ndarray]  # the number of the pair

    def add(self, signs: Signs, errors: np.ndarray, known: np.ndarray, pair: int) -> None:
        self.terms.append(signs.terms()[known])
        self.errors.append(errors[known])
        self.pairs.append(np.full(int(known.sum()), pair))

    def joined(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return np.concatenate(self.terms), np.concatenate(self.errors), np.concatenate(self.pairs)


def calibrate(matcher: PairMatcher, sources: Sequence[PairSource], config: CalibrationConfig) -> Calibration:
    """Half of the pairs tell how well a fit to the other half holds; the result is fitted to all of them."""
    matches, points = Observed([], [], []), Observed([], [], [])
    for n, batch in enumerate(tqdm(drawn(sources, config), total=config.pairs, unit="pair", mininterval=10)):
        some = matcher.adjusted(
            size=config.matched[n % len(config.matched)], threshold=WEAKEST, max_matches=None, rotate="never"
        )
        observe(some, batch, n, matches, points)
    report: dict[str, object] = {"pairs": config.pairs, "size": config.size, "matched": list(config.matched)}
    fits = {}
    for name, seen in (("matches", matches), ("points", points)):
        if not seen.errors:
            raise UserError("nothing was matched: these weights cannot be calibrated")
        terms, errors, pair = seen.joined()
        fits[name] = Regression.fit(terms, errors)
        report[name] = held_out(terms, errors, pair)
    assert matcher.info.sha256 is not None
    return Calibration(matcher.info.sha256, SUBPIXEL_SHA256, fits["matches"], fits["points"], fitted=report)


def drawn(sources: Sequence[PairSource], config: CalibrationConfig) -> Iterator[PairBatch]:
    """One pair at a time."""
    for n in range(config.pairs):
        source = sources[n % len(sources)]
        device = getattr(source, "device", "cpu")
        generator = torch.Generator(device).manual_seed(seed_of(config.seed, n, 0))
        yield source.sample(1, config.size, generator).to("cpu")


def observe(matcher: PairMatcher, batch: PairBatch, n: int, matches: Observed, points: Observed) -> None:
    images = [x[0, 0].numpy() for x in (batch.image0, batch.image1)]
    found = matcher.found(*images)
    if len(found.at0) < FEWEST or found.signs is None:
        return
    a, b = (image.prepared for image in found.pair)
    at0, at1 = a.to_original(found.at0.cpu().numpy()), b.to_original(found.at1.cpu().numpy())
    place, known = true_place(batch, at0)
    signs = b.signs(found.scores, *(x.cpu().numpy() for x in found.signs))
    matches.add(signs, errors_of(at1, place), known, n)
    height, width = images[0].shape
    chosen = np.random.default_rng(n).uniform(0, (width - 1, height - 1), (POINTS, 2))
    at1, signs, near = estimated(matcher, found, chosen)
    place, known = true_place(batch, chosen)
    points.add(signs, errors_of(at1, place), known & near, n)


def errors_of(at: np.ndarray, truth: np.ndarray) -> np.ndarray:
    distance = np.linalg.norm(at - truth, axis=1)
    return np.where(np.isfinite(distance), distance, np.inf)


def true_place(batch: PairBatch, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the only pair: where points (n 2) of image 0 are in image 1 (n 2; NaN: not visible), and whether
    that is known (n): all four cells around a point agree, or none of them is visible."""
    at, pair = torch.from_numpy(points), torch.zeros(len(points), dtype=torch.long)
    place, bend = warp_between_cells(batch.warp0.double(), pair, at)
    seen = between_cells(batch.visible0, pair, at)[0]
    visible, hidden = seen.all(0), ~seen.any(0)
    known = (visible & (bend < BENT)) | (hidden & (bend < torch.inf))
    if batch.unknown0 is not None:
        known &= ~between_cells(batch.unknown0, pair, at)[0].any(0)
    return torch.where(visible[:, None], place, torch.nan).numpy(), known.numpy()


def held_out(terms: np.ndarray, errors: np.ndarray, pair: np.ndarray) -> dict[str, object]:
    """How well a fit to one half of the pairs holds on the other."""
    test = pair // 4 % 2 == 1  # pairs of several sources take turns
    if test.all() or not test.any():
        raise UserError("too few pairs have matches: give more pairs, or other weights")
    fit = Regression.fit(terms[~test], errors[~test])
    certainty, sigma = fit.of_terms(terms[test])
    right = errors[test] < RIGHT
    edges = np.quantile(sigma, np.linspace(0, 1, 6))
    fifths = [(sigma >= low) & (sigma <= high) for low, high in zip(edges, edges[1:], strict=False)]
    bounded = np.minimum(errors[test], BEYOND)
    return {
        "count": int(len(errors)),
        "right": round(float(right.mean()), 4),
        "expected_calibration_error": round(calibration_error(certainty, right), 4),
        "reliability": reliability(certainty, right),
        "sigma_and_error": [[round(float(x[rows].mean()), 3) for x in (sigma, bounded)] for rows in fifths],
    }


def reliability(certainty: np.ndarray, right: np.ndarray, bins: int = 10) -> list[list[float]]:
    """Of each bin: mean certainty, share that is right, share of all."""
    place = np.minimum((certainty * bins).astype(int), bins - 1)
    rows = [place == n for n in range(bins)]
    return [
        [round(float(x), 4) for x in (certainty[r].mean(), right[r].mean(), r.mean())]
        for r in rows
        if r.any()
    ]
