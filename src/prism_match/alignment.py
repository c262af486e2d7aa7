"""One picture brought onto another by the simplest map that explains their matches.

Three maps are tried, from simple to free: a similarity (turned, scaled, moved), a homography (a flat thing,
or a camera that has only turned) and a local warp (a homography, and a smooth field of displacements on top).
The matches themselves tell which: each map is fitted to the matches of a part of the picture and tried on the
others, and the simplest one counts whose error there is no larger than the smallest, but for the uncertainty
of that comparison.
"""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from prism_match import viz
from prism_match.config import AlignModel
from prism_match.errors import UserError
from prism_match.files import atomic_path, writable_folder
from prism_match.geometry import estimate, is_evident, spread_over, warp_points
from prism_match.images import ImageLike, encode_png
from prism_match.matcher import PairMatcher
from prism_match.matches import Matches
from prism_match.polish import FEWEST, NEIGHBOURS
from prism_match.rasters import Picture, encode_moved, open_picture

MODELS: tuple[AlignModel, ...] = ("similarity", "homography", "warp")  # the simplest first
FARTHEST = 3.0  # pixels as matched: a match that is further off does not agree with a map
BLOCKS = 12  # along the longer side of what the matches cover; neighbours in one are held out together
FOLDS = 5
# What is no more than that above the smallest error is no reason for a freer map: a share of it, and pixels
# as matched, since neighbouring matches err alike by about as much, which a free map follows.
MORE, MORE_PIXELS = 0.1, 0.1
GRID = 20  # cells of a local warp's grid along the longer side
STIFFNESS = (3.0, 0.1, 0.003)  # of a local warp: the matches choose
REWEIGHED = 4  # times, by how well they fit, the matches that a local warp is fitted to
MOST = 2000  # matches, spread over the picture, that maps are fitted to
AT_ONCE = 2048
LONGEST = 2**15 - 2  # pixels of a side that OpenCV moves


@dataclass(frozen=True)
class Map:
    """Where the pixels of the first picture are in the second."""

    model: AlignModel
    matrix: np.ndarray  # 3 3
    size: tuple[int, int]  # width, height of the first picture
    grid: np.ndarray | None = (
        None  # rows columns 2: a local warp's displacements, control points of B-splines
    )

    def __call__(self, points: np.ndarray) -> np.ndarray:
        """n 2 -> n 2."""
        points = np.asarray(points, dtype=float)
        moved = warp_points(points, self.matrix)
        if self.grid is not None:
            moved += Splines.at(points, self.size)(self.grid.reshape(-1, 2))
        return moved

    def everywhere(self) -> np.ndarray:
        """h w 2, float32: of every pixel."""
        width, height = self.size
        x, y = np.meshgrid(np.arange(width, dtype=np.float32), np.arange(height, dtype=np.float32))
        at = np.stack([x, y], axis=-1)
        moved = cv2.perspectiveTransform(at, self.matrix)
        # What is behind the horizon of a homography is nowhere.
        moved[at @ self.matrix[2, :2] + self.matrix[2, 2] <= 1e-12] = -1e6
        if self.grid is not None:
            lines, columns = self.grid.shape[:2]
            across = spline_matrix(np.arange(width), cell_size(self.size), columns)
            down = spline_matrix(np.arange(height), cell_size(self.size), lines)
            for k in (0, 1):
                moved[..., k] += (down @ self.grid[..., k] @ across.T).astype(np.float32)
        return moved


@dataclass(frozen=True)
class Trial:
    """How well a map that was fitted to other matches meets those that were held out."""

    model: AlignModel
    error: float  # pixels of the second picture: the mean, of matches that are further off than FARTHEST that
    uncertainty: float  # of how much it differs from the smallest error


@dataclass(frozen=True)
class Alignment:
    """The map from the first picture to the second, why it is that one, and what it makes of the pictures."""

    matches: Matches
    map: Map
    trials: list[Trial]  # of each model that was tried
    reason: str
    noise: float  # pixels of the second picture: what matches differ by from those around them
    farthest: float  # pixels of the second picture: FARTHEST

    @property
    def model(self) -> AlignModel:
        return self.map.model

    @cached_property
    def residuals(self) -> np.ndarray:
        """n 2: where the matches are in the second picture, less where the map leads."""
        return self.matches.keypoints1 - self.map(self.matches.keypoints0)

    @cached_property
    def errors(self) -> np.ndarray:
        """n, pixels of the second picture."""
        return np.nan_to_num(np.linalg.norm(self.residuals, axis=1), nan=np.inf)

    @property
    def agree(self) -> np.ndarray:
        """n, bool: the matches that the map explains."""
        return self.errors <= self.farthest

    @cached_property
    def _everywhere(self) -> np.ndarray:
        return self.map.everywhere()

    @cached_property
    def covered(self) -> np.ndarray:
        """h w, bool: the pixels of the first picture that the second one shows, too."""
        width, height = self.matches.size1
        return np.all((self._everywhere >= -0.5) & (self._everywhere <= [width - 0.5, height - 0.5]), axis=-1)

    def warp(self, image1: ImageLike | None = None) -> np.ndarray:
        """The second picture as seen in the frame of the first (h w 3, uint8), black where it ends."""
        return self.warp_pixels(self._picture(1, image1).image.rgb)

    def warp_pixels(self, pixels: np.ndarray) -> np.ndarray:
        """Pixels of the second picture (h w or h w c, of any type that OpenCV interpolates)."""
        check_sides(self.matches.size0, pixels.shape[1::-1])
        x, y = np.ascontiguousarray(self._everywhere[..., 0]), np.ascontiguousarray(self._everywhere[..., 1])
        warped = cv2.remap(pixels, x, y, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
        warped[~self.covered] = 0
        return warped

    def summary(self) -> dict[str, Any]:
        agree = self.agree
        return {
            "model": self.model,
            "reason": self.reason,
            "matches": len(self.matches),
            "agree": int(agree.sum()),
            "median_residual_px": round(float(np.median(self.errors[agree])), 4),
            "noise_px": round(self.noise, 4),
            "covered": round(float(self.covered.mean()), 4),
            "held_out": [
                {"model": t.model, "error_px": round(t.error, 4), "uncertainty_px": round(t.uncertainty, 4)}
                for t in self.trials
            ],
            "matrix": self.map.matrix.tolist(),
            "grid": None if self.map.grid is None else np.round(self.map.grid, 4).tolist(),
        }

    def save(
        self, folder: str | Path, image0: ImageLike | None = None, image1: ImageLike | None = None
    ) -> list[Path]:
        """The aligned picture, the overlay, the difference and the residuals, in a folder that is made if
        need be; each file whole or not at all. image0, image1: where files have moved."""
        return save_alignment(
            self, writable_folder(folder), self._picture(0, image0), self._picture(1, image1)
        )

    def _picture(self, which: int, given: ImageLike | None) -> Picture:
        """With what its file tells, where there is one."""
        m = self.matches
        name, size = ((m.name0, m.size0), (m.name1, m.size1))[which]
        if given is None:
            given = Path(name) if Path(name).is_file() else m.image(which)
        picture = open_picture(given)
        if picture.image.size != size:
            raise UserError(f"{picture.image.name}: is not of the size that was matched, {size[0]}x{size[1]}")
        return picture


def align(
    image0: ImageLike,
    image1: ImageLike,
    *,
    matcher: PairMatcher | None = None,
    model: AlignModel | None = None,
) -> Alignment:
    """Bring `image1` onto `image0` by the simplest map that explains their matches.

    matcher: with other settings than the default. model: "similarity", "homography" or "warp" instead of the
    one that the matches choose. Raises `UserError` where the matches agree with no map."""
    check_model(model)
    first, second = (open_picture(image).image for image in (image0, image1))
    matcher = matcher or PairMatcher()
    matches = matcher.match(first, second)
    return align_matches(matches, model=model, unit=max(1.0, max(second.size) / matcher.size))


def align_matches(matches: Matches, *, model: AlignModel | None = None, unit: float = 1.0) -> Alignment:
    """The same for matches that are there already. unit: pixels of image 1 that were one when it was
    matched."""
    check_model(model)
    farthest = FARTHEST * unit
    points0, points1 = (p.astype(np.float64) for p in (matches.keypoints0, matches.keypoints1))
    apart = apart_from_neighbours(points0, points1)
    consistent = apart <= farthest
    refuse_unless(int(consistent.sum()), matches)
    noise = float(np.median(apart[consistent])) / 1.18  # of a Gaussian in the plane: sigma along x and y
    chosen = np.flatnonzero(consistent)
    chosen = chosen[spread_over(points0[chosen], matches.scores[chosen], MOST)]
    fitter = Fitter(matches.size0, farthest, max(noise, 0.05 * unit))
    models = MODELS if model is None else (model,)
    trials, stiffness = try_models(fitter, points0[chosen], points1[chosen], models)
    if model is None:
        best, reason = choose(trials, MORE_PIXELS * unit)
    else:
        best, reason = model, f"{model}: asked for"
    found = fitter.fit(best, points0[chosen], points1[chosen], stiffness)
    if found is None:
        raise UserError(f"no {best} fits these {len(matches)} matches")
    alignment = Alignment(matches, found, trials, reason, noise, farthest)
    refuse_unless(int(alignment.agree.sum()), matches)
    return alignment


def check_sides(*sizes: tuple[int, ...]) -> None:
    """Of pictures (width, height) that are to be moved."""
    longest = max(max(size) for size in sizes)
    if longest > LONGEST:
        raise UserError(f"pictures of at most {LONGEST} pixels a side can be aligned, not of {longest}")


def check_model(model: AlignModel | None) -> None:
    if model is not None and model not in MODELS:
        raise UserError(f"the model is one of {', '.join(MODELS)}, not {model!r}")


def refuse_unless(agreeing: int, matches: Matches) -> None:
    if not is_evident(agreeing, len(matches)):
        names = matches.name1 or "the second picture", matches.name0 or "the first"
        raise UserError(
            f"{names[0]}: cannot be brought onto {names[1]}: {agreeing} of {len(matches)} matches agree; "
            "do they show the same thing?"
        )


def apart_from_neighbours(points0: np.ndarray, points1: np.ndarray) -> np.ndarray:
    """n: pixels of image 1 by which each match differs from what those around it say, robustly: by an affine
    map of theirs, for which those that do not agree hardly count. Of too few to have neighbours, 0."""
    if len(points0) < FEWEST:
        return np.zeros(len(points0))
    first, second = torch.from_numpy(points0), torch.from_numpy(points1)
    rest = []
    for part in torch.arange(len(first)).split(AT_ONCE):
        near = torch.cdist(first[part], first).topk(NEIGHBOURS + 1, dim=1, largest=False).indices[:, 1:]
        d0, d1 = first[near] - first[part, None], second[near] - second[part, None]  # m k 2
        rows = torch.cat([d0, torch.ones_like(d0[..., :1])], dim=2)
        ridge = (
            1e-6 * d0.square().mean(dim=(1, 2)).clamp(min=1.0)[:, None, None] * torch.eye(3, dtype=d0.dtype)
        )
        weight = torch.ones_like(d0[..., :1])
        for _ in range(REWEIGHED):
            weighed = rows * weight
            affine = torch.linalg.solve(weighed.mT @ rows + ridge, weighed.mT @ d1)  # m 3 2
            off = (d1 - rows @ affine).norm(dim=2, keepdim=True)
            weight = 1 / (1 + (off / off.median(dim=1, keepdim=True).values.clamp(min=1e-3)).square())
        rest.append(affine[:, 2].norm(dim=1))  # where the neighbours lead, from where the match is
    return torch.cat(rest).numpy()


@dataclass(frozen=True)
class Fitter:
    """Fits maps to matches (n 2 each), robustly; None where there is none to be found."""

    size: tuple[int, int]  # width, height of the first picture
    farthest: float
    noise: float

    def fit(
        self, model: AlignModel, points0: np.ndarray, points1: np.ndarray, stiffness: float = 1.0
    ) -> Map | None:
        if model == "warp":
            base = self.fit("homography", points0, points1)
            return None if base is None else self.bend(base, points0, points1, stiffness)
        if model == "similarity":
            matrix = self._similarity(points0, points1)
        else:
            matrix = estimate(points0, points1, "homography", threshold=self.farthest).matrix
        return None if matrix is None else Map(model, matrix, self.size)

    def _similarity(self, points0: np.ndarray, points1: np.ndarray) -> np.ndarray | None:
        if len(points0) < 2:
            return None
        rows, _ = cv2.estimateAffinePartial2D(
            points0, points1, method=cv2.RANSAC, ransacReprojThreshold=self.farthest,
            maxIters=5000, confidence=0.9999, refineIters=50,
        )  # fmt: skip
        return None if rows is None or not np.isfinite(rows).all() else np.vstack([rows, [0, 0, 1]])

    def bend(self, base: Map, points0: np.ndarray, points1: np.ndarray, stiffness: float) -> Map:
        """A map with displacements, on a grid that is hard to bend: the matches pull, those that do not agree
        with the others less and less."""
        wanted = points1 - base(points0)
        seen = np.isfinite(wanted).all(axis=1)
        wanted, splines = wanted[seen], Splines.at(points0[seen], self.size)
        columns, lines = grid_size(self.size)
        stiff = stiffness * len(wanted) / (lines * columns) * bending(lines, columns)
        weight, field = np.ones(len(wanted)), np.zeros((lines * columns, 2))
        for n in range(REWEIGHED):
            matrix, target = splines.normal_equations(wanted, weight, lines * columns)
            field = np.linalg.solve(matrix + stiff, target)
            off = np.linalg.norm(wanted - splines(field), axis=1)
            # At first whatever is off by no more than half of them, in the end by no more than the noise is.
            scale = max(self.noise, float(np.median(off)) if n < REWEIGHED - 2 else 0.0, 1e-6)
            weight = 1 / (1 + (off / (3 * scale)) ** 2)
        return Map("warp", base.matrix, self.size, field.reshape(lines, columns, 2))


def try_models(
    fitter: Fitter, points0: np.ndarray, points1: np.ndarray, models: tuple[AlignModel, ...]
) -> tuple[list[Trial], float]:
    """What each of the models makes of matches that it was not fitted to; and the best stiffness of a
    warp."""
    block, fold = blocks_of(points0)
    kinds = [(m, k) for m in models for k in (STIFFNESS if m == "warp" else (1.0,))]
    errors = {kind: np.full(len(points0), fitter.farthest) for kind in kinds}
    for held in (fold == n for n in range(FOLDS)):
        if not held.any():
            continue
        rest0, rest1 = points0[~held], points1[~held]
        bases = {m: fitter.fit(m, rest0, rest1) for m in {"homography" if m == "warp" else m for m in models}}
        for model, stiffness in kinds:
            found = bases["homography" if model == "warp" else model]
            if model == "warp" and found is not None:
                found = fitter.bend(found, rest0, rest1, stiffness)
            if found is not None:
                off = np.linalg.norm(points1[held] - found(points0[held]), axis=1)
                errors[model, stiffness][held] = np.nan_to_num(off, nan=np.inf).clip(max=fitter.farthest)
    best = min(errors.values(), key=lambda e: float(e.mean()))
    trials, chosen = [], 1.0
    for model in models:
        key = min((k for k in errors if k[0] == model), key=lambda k: float(errors[k].mean()))
        chosen = key[1]
        # Neighbours err alike: it is the blocks that are independent, and not the matches.
        count = np.bincount(block)
        extra = np.bincount(block, errors[key] - best)
        mean = extra.sum() / count.sum()
        uncertainty = float(np.sqrt(np.square(extra - mean * count).sum()) / count.sum())
        trials.append(Trial(model, float(errors[key].mean()), uncertainty))
    return trials, chosen


def blocks_of(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """n and n: the block of the picture that each point is in, numbered without gaps, and the fold that the
    block is held out with: such that neighbours are in different folds."""
    cell = max(float(np.ptp(points, axis=0).max(initial=0)) / BLOCKS, 1e-6)
    column, row = np.floor((points - points.min(axis=0)) / cell).astype(np.int64).T
    _, block = np.unique(np.stack([column, row], axis=1), axis=0, return_inverse=True)
    return block.ravel(), (column + 2 * row) % FOLDS


def choose(trials: list[Trial], least: float) -> tuple[AlignModel, str]:
    """The simplest model that is as good as the best one, and why. least: pixels that count."""
    best = min(trials, key=lambda t: t.error)
    told = ", ".join(f"{t.model} {t.error:.2f} px" for t in trials)
    for trial in trials:
        if trial.error - best.error <= max(2 * trial.uncertainty, MORE * best.error, least):
            break
    freer = trials[trials.index(trial) + 1 :]
    why = "nothing simpler comes near" if trial is not trials[0] else "the simplest is enough"
    if freer:
        why += f", and {' and '.join(t.model for t in freer)} {'is' if len(freer) == 1 else 'are'} no better"
    return trial.model, f"{trial.model}: {why} (error on held-out matches: {told})"


def cell_size(size: tuple[int, int]) -> float:
    return max(size) / GRID


def grid_size(size: tuple[int, int]) -> tuple[int, int]:
    """Columns and rows of a local warp's control points, which reach beyond the picture."""
    columns, rows = (int(np.floor(max(n - 1, 0) / cell_size(size))) + 4 for n in size)
    return columns, rows


def spline_weights(at: np.ndarray, cell: float, count: int) -> tuple[np.ndarray, np.ndarray]:
    """n 4 and n 4: the control points, of so many, that count at these coordinates, and how much, by uniform
    cubic B-splines."""
    position = np.clip(at / cell, 0, count - 3 - 1e-9)
    first = np.floor(position).astype(np.int64)
    t = position - first
    parts = [(1 - t) ** 3, 3 * t**3 - 6 * t**2 + 4, -3 * t**3 + 3 * t**2 + 3 * t + 1, t**3]
    return first[:, None] + np.arange(4), np.stack(parts, axis=1) / 6


def spline_matrix(at: np.ndarray, cell: float, count: int) -> np.ndarray:
    """n count: the same, for all control points."""
    index, weight = spline_weights(at, cell, count)
    matrix = np.zeros((len(at), count))
    np.put_along_axis(matrix, index, weight, axis=1)
    return matrix


@dataclass(frozen=True)
class Splines:
    """A local warp's grid as points see it."""

    index: np.ndarray  # n 16: the control points around each, row by row
    weight: np.ndarray  # n 16

    @staticmethod
    def at(points: np.ndarray, size: tuple[int, int]) -> Splines:
        columns, lines = grid_size(size)
        (ix, wx), (iy, wy) = (
            spline_weights(points[:, k], cell_size(size), count) for k, count in enumerate((columns, lines))
        )
        index = iy[:, :, None] * columns + ix[:, None]
        return Splines(index.reshape(-1, 16), (wy[:, :, None] * wx[:, None]).reshape(-1, 16))

    def __call__(self, field: np.ndarray) -> np.ndarray:
        """n 2: the displacements (of all control points, k 2) at the points."""
        return np.einsum("nk,nkc->nc", self.weight, field[self.index])

    def normal_equations(
        self, wanted: np.ndarray, weight: np.ndarray, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """count count and count 2: of the weighted (n) least squares that lead to displacements n 2."""
        weighed = self.weight * weight[:, None]
        pairs = self.index[:, :, None] * count + self.index[:, None]
        products = weighed[:, :, None] * self.weight[:, None]
        matrix = np.bincount(pairs.ravel(), products.ravel(), minlength=count**2).reshape(count, count)
        sides = [np.bincount(self.index.ravel(), (weighed * w[:, None]).ravel(), count) for w in wanted.T]
        return matrix, np.stack(sides, axis=1)


def bending(rows: int, columns: int) -> np.ndarray:
    """(rows columns) squared: the quadratic form of how much a grid is bent; where nothing holds it, it goes
    on as it is, and far away goes back to no displacement."""

    def differences(count: int, order: int) -> np.ndarray:
        return np.diff(np.eye(count), order, axis=0)

    def form(down: int, across: int) -> np.ndarray:
        a, b = differences(rows, down), differences(columns, across)
        return np.kron(a.T @ a, b.T @ b)

    bent = form(2, 0) + 2 * form(1, 1) + form(0, 2)
    return bent + 0.01 * (form(1, 0) + form(0, 1)) + 1e-4 * np.eye(rows * columns)


def save_alignment(alignment: Alignment, folder: Path, first: Picture, second: Picture) -> list[Path]:
    """Everything is made before the first file is written."""
    rgb0, covered = first.image.rgb, alignment.covered
    warped = alignment.warp_pixels(second.image.rgb)
    affine = alignment.map.matrix if alignment.model == "similarity" else None
    suffix, aligned = encode_moved(second, first, alignment.warp_pixels, covered, alignment.map, affine)
    files = {
        f"aligned{suffix}": aligned,
        "overlay.png": encode_png(viz.draw_overlay(warped, rgb0, covered)),
        "difference.png": encode_png(viz.draw_difference(warped, rgb0, covered)),
        "residuals.csv": residual_table(alignment).encode(),
        "alignment.json": (json.dumps(alignment.summary(), indent=2) + "\n").encode(),
    }
    for name, data in files.items():
        with atomic_path(folder / name) as temporary:
            temporary.write_bytes(data)
    return [folder / name for name in files]


def residual_table(alignment: Alignment) -> str:
    """A row for each match; dx and dy are what is left, in pixels of the second picture."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["x0", "y0", "x1", "y1", "score", "dx", "dy", "error", "agrees"])
    m = alignment.matches
    numbers = np.concatenate(
        [m.keypoints0, m.keypoints1, m.scores[:, None], alignment.residuals, alignment.errors[:, None]],
        axis=1,
    )
    for row, agrees in zip(numbers, alignment.agree, strict=True):
        writer.writerow([*(f"{x:.4f}" for x in row), int(agrees)])
    return text.getvalue()
