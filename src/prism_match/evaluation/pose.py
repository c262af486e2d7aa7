"""Relative pose from matches: what MegaDepth-1500, ScanNet-1500 and all other posed pairs share.

Points and intrinsics are in pixels of the image files, as in LoFTR's evaluation (it takes points back to
the original images), unless a benchmark says otherwise (`PosePair.frame0`). The threshold is in the same
pixels, over the mean focal length; confidence 0.99999."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from prism_match.engine import Matcher
from prism_match.engine.methods import Method, as_method
from prism_match.engine.photos import Resize, scale_points
from prism_match.errors import UserError
from prism_match.evaluation.megadepth import read_megadepth
from prism_match.evaluation.metrics import (
    EPIPOLAR_THRESHOLD,
    POSE_THRESHOLDS,
    epipolar_errors,
    on_a_line,
    pose_errors,
    precision,
)
from prism_match.evaluation.pairs import PosePair
from prism_match.evaluation.runner import Result, Run, Score, evaluate, failed
from prism_match.geometry import MINIMUM, Backend, estimate, import_poselib
from prism_match.matcher import PairMatcher
from prism_match.matches import Matches
from prism_match.model.prism import PRISM
from prism_match.weights.store import export_weights

THRESHOLDS: dict[Backend, float] = {"opencv": 0.5, "usac": 0.5, "poselib": 1.5}  # pixels
# OpenCV's own default for the essential matrix, which the published numbers were made with; for the others
# that of `geometry.estimate`.
ITERATIONS: dict[Backend, int] = {"opencv": 1000, "usac": 10_000, "poselib": 10_000}


def evaluate_pose(
    pairs: Sequence[PosePair],
    method: Method | PairMatcher | str,
    size: int | Resize = 832,
    ransac: Backend = "opencv",
    threshold: float | None = None,
    *,
    seed: int = 0,
    benchmark: str = "pose",
    run: Run | None = None,
) -> Result:
    """AUC of the pose error at 5, 10 and 20 degrees.

    method: a PairMatcher, "sift", "module:function" or a `Method`. size: longer side in pixels, or a
    `Resize`. threshold: of RANSAC, in pixels; None: 0.5 for OpenCV, 1.5 for PoseLib."""
    scorer = PoseScorer(ransac, check_ransac(ransac, threshold, THRESHOLDS), seed)
    resizing = size if isinstance(size, Resize) else Resize(longer=size)
    settings = {
        "ransac": ransac, "threshold": scorer.threshold, "seed": seed,
        "precision_at": f"{EPIPOLAR_THRESHOLD:.0e}".replace("e-0", "e-"),
    }  # fmt: skip
    return evaluate(
        benchmark, pairs, as_method(method), scorer, resizing, POSE_THRESHOLDS, settings, run or Run()
    )


def pose_validation(folder: Path, device: torch.device) -> Callable[[PRISM], dict[str, float]]:
    """Scores weights while training runs: AUC of the pose error on a folder of MegaDepth's layout
    (`scene_info`, images), with OpenCV's RANSAC.

    The folder is read now, so that a wrong one is told before the training and not after its first hour."""
    pairs = read_megadepth(folder)

    def validate(model: PRISM) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as temporary:
            files = export_weights(Path(temporary) / "now.safetensors", model.state_dict(), model.config, {})
            result = evaluate_pose(pairs, Matcher(files[0], device=device, rotate="never", rescale="never"))
        scores = {f"auc@{k}": v for k, v in result.auc.items()}
        return {**scores, "matches": result.mean("matches"), "precision": result.mean("precision")}

    return validate


def check_ransac(ransac: Backend, threshold: float | None, usual: dict[Backend, float]) -> float:
    """The threshold to use; a back end that is unknown or missing is told before any work."""
    if ransac not in usual:
        raise UserError(f"the back end must be one of {', '.join(usual)}, not {ransac!r}")
    if ransac == "poselib":
        import_poselib()
    if threshold is not None and not 0 < threshold < float("inf"):
        raise UserError(f"the RANSAC threshold must be positive, not {threshold}")
    return usual[ransac] if threshold is None else threshold


@dataclass(frozen=True)
class PoseScorer:
    ransac: Backend
    threshold: float  # pixels
    seed: int

    def __call__(self, pair: PosePair, matches: Matches) -> Score:
        assert pair.T_0to1 is not None
        points0, points1 = points_in_frames(pair, matches)
        errors = epipolar_errors(points0, points1, pair.K0, pair.K1, pair.T_0to1)
        blank = replace(
            failed(pair, ""), matches=len(matches), precision=precision(errors, EPIPOLAR_THRESHOLD)
        )
        if problem := degenerate(points0, points1, MINIMUM["essential"]):
            return replace(blank, problem=problem)
        # OpenCV's RANSAC always starts from the same random state: the seed is in the order of the points.
        order = np.random.default_rng(self.seed).permutation(len(points0))
        found = estimate(
            points0[order], points1[order], "essential",
            intrinsics0=pair.K0, intrinsics1=pair.K1, threshold=self.threshold,
            backend=self.ransac, max_iterations=ITERATIONS[self.ransac], seed=self.seed,
        )  # fmt: skip
        if found.rotation is None or found.translation is None:
            return replace(blank, problem="no pose fits the matches")
        turn, shift = pose_errors(found.rotation, found.translation, pair.T_0to1)
        parts = {"rotation": turn, "translation": shift}
        return replace(blank, error=max(turn, shift), inliers=found.num_inliers, parts=parts)


def points_in_frames(pair: PosePair, m: Matches) -> tuple[np.ndarray, np.ndarray]:
    """n 2 each: the matches in the pixels that the pair's intrinsics are in."""
    return (
        scale_points(m.keypoints0, m.size0, pair.frame0 or m.size0),
        scale_points(m.keypoints1, m.size1, pair.frame1 or m.size1),
    )


def degenerate(points0: np.ndarray, points1: np.ndarray, least: int) -> str:
    """Why no geometry follows from matches (n 2 each); empty if some may."""
    if len(points0) < least:
        return f"{len(points0)} matches, at least {least} are needed"
    return "all matches lie on a line" if on_a_line(points0) or on_a_line(points1) else ""
