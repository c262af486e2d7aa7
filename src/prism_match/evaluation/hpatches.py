"""Homographies: HPatches, and any other set of sequences laid out like it.

    ROOT/{v,i}_NAME/{1..6}.*   images of any format
    ROOT/{v,i}_NAME/H_1_k      the homography from image 1 to image k, in pixels

Both images are resized to a shorter side of 480; at most 1000 matches; RANSAC at 3 pixels; the error is the
mean distance of the four corners. All pixels, of the homography too, are those of the resized images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from prism_match.engine.methods import Method, as_method
from prism_match.engine.photos import IMAGE_SUFFIXES, Resize, scale_points, scaling
from prism_match.errors import UserError
from prism_match.evaluation.metrics import CORNER_THRESHOLDS, corner_error, precision
from prism_match.evaluation.pairs import HomographyPair
from prism_match.evaluation.pose import check_ransac, degenerate
from prism_match.evaluation.runner import Result, Run, Score, evaluate, failed
from prism_match.geometry import MINIMUM, Backend, estimate, warp_points
from prism_match.matcher import PairMatcher
from prism_match.matches import Matches

SHORTER_SIDE = 480
MOST_MATCHES = 1000
THRESHOLDS: dict[Backend, float] = {"opencv": 3.0, "usac": 3.0, "poselib": 3.0}  # pixels
PRECISION_AT = 3.0  # pixels
SPLITS = {"v": "viewpoint", "i": "illumination"}


def read_hpatches(root: str | Path) -> list[HomographyPair]:
    """Image 1 of every sequence against each of the others."""
    root = Path(root)
    folders = sorted({file.parent for file in root.glob("*/H_1_*")})
    if not folders:
        raise UserError(f"{root}: no folders with H_1_2, ... here")
    return [pair for folder in folders for pair in read_sequence(folder)]


def read_sequence(folder: Path) -> list[HomographyPair]:
    """Image 1 against every other one, be it that its image or its homography is missing."""
    first = find_image(folder, "1")
    images = {p.stem for p in folder.glob("*.*") if p.suffix.lower() in IMAGE_SUFFIXES and p.stem.isdigit()}
    others = images.union(file.name[4:] for file in folder.glob("H_1_*")) - {"1"}
    return [
        HomographyPair(
            name=f"{folder.name}/1-{other}",
            image0=first,
            image1=find_image(folder, other),
            split=SPLITS.get(folder.name.split("_")[0], ""),
            scene=folder.name,
            H=read_matrix(folder / f"H_1_{other}"),
        )
        for other in sorted(others, key=lambda name: (len(name), name))
    ]


def find_image(folder: Path, stem: str) -> Path:
    """The image of this name, whatever its format; a name that says what was looked for if there is none."""
    found = [p for p in sorted(folder.glob(f"{stem}.*")) if p.suffix.lower() in IMAGE_SUFFIXES]
    return found[0] if found else folder / f"{stem}.*"


def read_matrix(file: Path) -> np.ndarray | None:
    """3 3, with the corner of the image in front: some files have the sign turned round, which is the
    same homography. None where there is none to be read."""
    try:
        H = np.loadtxt(file).reshape(3, 3)
        return -H if H[2, 2] < 0 else H
    except (OSError, ValueError):
        return None


def evaluate_homography(
    pairs: Sequence[HomographyPair],
    method: Method | PairMatcher | str,
    size: int | Resize = SHORTER_SIDE,
    ransac: Backend = "opencv",
    threshold: float | None = None,
    *,
    seed: int = 0,
    benchmark: str = "hpatches",
    run: Run | None = None,
) -> Result:
    """AUC of the corner error at 3, 5 and 10 pixels. size: shorter side in pixels, or a `Resize`; threshold:
    of RANSAC, in pixels of the resized images [3]."""
    resizing = size if isinstance(size, Resize) else Resize(shorter=size)
    scorer = HomographyScorer(resizing, ransac, check_ransac(ransac, threshold, THRESHOLDS), seed)
    settings = {
        "ransac": ransac, "threshold": scorer.threshold, "seed": seed, "most_matches": MOST_MATCHES,
        "precision_at": f"{PRECISION_AT:g}px",
    }  # fmt: skip
    return evaluate(
        benchmark, pairs, as_method(method), scorer, resizing, CORNER_THRESHOLDS, settings, run or Run()
    )


@dataclass(frozen=True)
class HomographyScorer:
    resizing: Resize
    ransac: Backend
    threshold: float  # pixels
    seed: int

    def __call__(self, pair: HomographyPair, matches: Matches) -> Score:
        matches = matches.filter(top=MOST_MATCHES)
        points0, points1, truth, size = in_resized_pixels(pair, matches, self.resizing)
        near = precision(reprojection_errors(points0, points1, truth), PRECISION_AT)
        blank = replace(failed(pair, ""), matches=len(matches), precision=near)
        if problem := degenerate(points0, points1, MINIMUM["homography"]):
            return replace(blank, problem=problem)
        order = np.random.default_rng(self.seed).permutation(len(points0))
        found = estimate(
            points0[order], points1[order], "homography",
            threshold=self.threshold, backend=self.ransac, seed=self.seed,
        )  # fmt: skip
        if found.matrix is None:
            return replace(blank, problem="no homography fits the matches")
        error = corner_error(found.matrix, truth, size)
        problem = "" if np.isfinite(error) else "the homography takes a corner beyond infinity"
        return replace(blank, error=error, inliers=found.num_inliers, problem=problem)


def in_resized_pixels(
    pair: HomographyPair, m: Matches, resizing: Resize
) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, int]]:
    """Points (n 2 each), homography (3 3) and size of image 0 after resizing."""
    assert pair.H is not None
    size0, size1 = resizing(m.size0), resizing(m.size1)
    truth = scaling(m.size1, size1) @ pair.H @ np.linalg.inv(scaling(m.size0, size0))
    points0, points1 = scale_points(m.keypoints0, m.size0, size0), scale_points(m.keypoints1, m.size1, size1)
    return points0, points1, truth, size0


def reprojection_errors(points0: np.ndarray, points1: np.ndarray, H: np.ndarray) -> np.ndarray:
    """n: pixels from where the homography takes each point of image 0 to its match (n 2 each)."""
    return np.linalg.norm(warp_points(points0, H) - points1, axis=1)
