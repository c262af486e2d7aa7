"""How far a match can be believed: the probability that it is right, and the error to expect.

The score of a match tells how it compares with other matches of the same pair, no more. What tells whether it
is right are the score, the error that the network of `subpixel.py` states, how well the match agrees with
those around it, and how many pixels of the photo are one of the model's. Two small regressions on these,
fitted on pairs with exact truth that no network was trained on (`prism calibrate`), make numbers of them that
mean what they say."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from prism_match.errors import UserError
from prism_match.files import atomic_path, reading

RIGHT = 3.0  # pixels of image 1 within which a match is right
SHIPPED = Path(__file__).parent / "weights" / "calibration.json"
TERMS = 10  # of a regression
PIXEL = 5  # that of `Signs.pixel`
BEYOND = 10.0  # pixels: an error that is larger counts as this in what is to be expected


@dataclass(frozen=True)
class Signs:
    """Of n matches or points: what tells whether they are right."""

    score: np.ndarray  # n, in [0, 1]; of a point, that of the matches around it
    stated: np.ndarray  # n: the error in pixels of image 1 that the network states
    misfit: np.ndarray  # n: pixels of image 1 by which the matches around it do not fit
    away: np.ndarray  # n: how far they are, in pixels of the model's image 0
    pixel: float  # pixels of image 1 that are one of the model's, at least 1

    def terms(self) -> np.ndarray:
        """n TERMS: what the regressions weigh."""
        score = np.clip(self.score.astype(np.float64), 1e-3, 1 - 1e-3)
        a = np.log(score / (1 - score))
        b, c = (
            np.log(np.clip(x.astype(np.float64) / self.pixel, 0.02, 50.0)) for x in (self.stated, self.misfit)
        )
        d = np.log1p(np.clip(self.away.astype(np.float64), 0.0, 200.0) / 8)
        e = np.full_like(a, np.log(self.pixel))
        return np.stack([np.ones_like(a), a, b, c, d, e, a * a, b * b, c * c, b * c], axis=1)


@dataclass(frozen=True)
class Regression:
    """Of one kind of thing: the coefficients of the terms."""

    right: tuple[float, ...]  # of the logit of the probability to be within RIGHT
    error: tuple[float, ...]  # of the logarithm of the expected error in pixels

    def __post_init__(self) -> None:
        for name in ("right", "error"):
            values = tuple(float(x) for x in getattr(self, name))
            if len(values) != TERMS or not np.isfinite(values).all():
                raise ValueError(f"{name} must be {TERMS} numbers")
            object.__setattr__(self, name, values)

    def __call__(self, signs: Signs) -> tuple[np.ndarray, np.ndarray]:
        """The certainty (n, in [0, 1]) and sigma (n, pixels of image 1), float32."""
        return self.of_terms(signs.terms())

    def of_terms(self, terms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        certainty = 1 / (1 + np.exp(-np.clip(terms @ np.array(self.right), -30, 30)))
        sigma = np.exp(np.clip(terms @ np.array(self.error), -5, 5))
        return certainty.astype(np.float32), sigma.astype(np.float32)

    def enlarged(
        self, certainty: np.ndarray, sigma: np.ndarray, ratio: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """What both are in an image 1 of `ratio` times as many pixels a side, in which the same matches are
        off by so many times as many."""
        change = np.log(ratio)
        odds = np.clip(certainty.astype(np.float64), 1e-7, 1 - 1e-7)
        logit = np.log(odds / (1 - odds)) + self.right[PIXEL] * change
        sigma = sigma * np.exp(self.error[PIXEL] * change)
        return (1 / (1 + np.exp(-logit))).astype(np.float32), sigma.astype(np.float32)

    @staticmethod
    def fit(terms: np.ndarray, errors: np.ndarray, rounds: int = 30, ridge: float = 1e-3) -> Regression:
        """By maximum likelihood. errors: n, pixels; infinite where there is no right place."""
        right = logistic(terms, errors < RIGHT, rounds, ridge)
        bounded = np.minimum(errors, BEYOND)
        return Regression(tuple(right), tuple(expected(terms, bounded, rounds, ridge)))


def logistic(terms: np.ndarray, truth: np.ndarray, rounds: int, ridge: float) -> np.ndarray:
    """Coefficients of the logit of P(truth), by Newton's method."""
    weights = np.zeros(terms.shape[1])
    penalty = ridge * len(terms) * np.eye(terms.shape[1])
    penalty[0, 0] = 0.0
    for _ in range(rounds):
        p = 1 / (1 + np.exp(-np.clip(terms @ weights, -30, 30)))
        gradient = terms.T @ (truth - p) - penalty @ weights
        curvature = (terms * (p * (1 - p))[:, None]).T @ terms + penalty + 1e-9 * np.eye(len(weights))
        weights = weights + np.linalg.solve(curvature, gradient)
    return weights


def expected(terms: np.ndarray, errors: np.ndarray, rounds: int, ridge: float) -> np.ndarray:
    """Coefficients of the logarithm of the mean error, as of one that is spread exponentially around it."""
    weights = np.zeros(terms.shape[1])
    weights[0] = np.log(max(float(errors.mean()), 1e-3))
    penalty = ridge * len(terms) * np.eye(terms.shape[1])
    penalty[0, 0] = 0.0
    for _ in range(rounds):
        ratio = errors / np.exp(np.clip(terms @ weights, -5, 5))
        gradient = terms.T @ (ratio - 1) - penalty @ weights
        curvature = (terms * np.clip(ratio, 0.1, 10.0)[:, None]).T @ terms + penalty
        weights = weights + np.linalg.solve(curvature + 1e-9 * np.eye(len(weights)), gradient)
    return weights


@dataclass(frozen=True)
class Calibration:
    """For one set of weights, of the model and of the network that polishes."""

    weights: str  # sha256
    subpixel: str  # sha256
    matches: Regression
    points: Regression  # of `Matcher.locate`
    # Coefficients of the terms of `places.py`, of the calibration that ships alone: they weigh certainties,
    # which mean the same for all weights.
    places: tuple[float, ...] = ()
    fitted: dict[str, Any] = field(default_factory=dict)  # on what, and how well it holds

    def save(self, path: Path) -> None:
        with atomic_path(path) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path) -> Calibration:
        if not path.is_file():
            raise UserError(f"{path}: no such file")
        with reading(path, "a calibration"):
            values = json.loads(path.read_text(encoding="utf-8"))
            for name in ("matches", "points"):
                values[name] = Regression(**values[name])
            values["places"] = tuple(float(x) for x in values.get("places", ()))
            return Calibration(**values)


@cache
def shipped() -> Calibration:
    return Calibration.load(SHIPPED)


def calibration_error(certainty: np.ndarray, right: np.ndarray, bins: int = 10) -> float:
    """The expected calibration error: how far the share of right ones is from the certainty, in bins of equal
    width, as a mean over all of them."""
    place = np.minimum((certainty * bins).astype(int), bins - 1)
    counts = np.bincount(place, minlength=bins)
    stated = np.bincount(place, certainty, bins)
    true = np.bincount(place, right, bins)
    return float(np.abs(stated - true).sum() / max(counts.sum(), 1))
