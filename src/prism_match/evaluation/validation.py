"""Scores on real pairs while training runs: the benchmark's own code on the weights as they are now."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from prism_match.engine import Matcher
from prism_match.evaluation.megadepth import read_megadepth
from prism_match.evaluation.pose import evaluate_pose
from prism_match.model.prism import PRISM
from prism_match.weights.store import export_weights


def pose_validation(folder: Path, device: torch.device) -> Callable[[PRISM], dict[str, float]]:
    """AUC of the pose error on a folder of MegaDepth's layout (`scene_info`, images), with OpenCV's RANSAC.

    The folder is read now, so that a wrong one is told before the training and not after its first hour."""
    pairs = read_megadepth(folder)

    def validate(model: PRISM) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as temporary:
            files = export_weights(Path(temporary) / "now.safetensors", model.state_dict(), model.config, {})
            result = evaluate_pose(pairs, Matcher(files[0], device=device, rotate="never"))
        scores = {f"auc@{k}": v for k, v in result.auc.items()}
        return {**scores, "matches": result.mean("matches"), "precision": result.mean("precision")}

    return validate
