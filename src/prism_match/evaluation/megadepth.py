"""MegaDepth-1500, as LoFTR lists it, and any other index of the same make.

    ROOT/scene_info/*.npz   image_paths, depth_paths, intrinsics, poses, pair_infos; paths from ROOT

As `training.data.megadepth` reads it; a pair whose pose or depth is not known is one all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from prism_match.errors import UserError
from prism_match.evaluation.pairs import PosePair
from prism_match.training.data.megadepth import SceneIndex, read_index


def read_megadepth(root: str | Path) -> list[PosePair]:
    """All pairs of ROOT/scene_info/*.npz (or ROOT/*.npz), each file being a list of its own."""
    root = Path(root)
    files = sorted((root / "scene_info").glob("*.npz")) or sorted(root.glob("*.npz"))
    if not files:
        raise UserError(f"{root}: no scene_info/*.npz here")
    return [pair for file in files for pair in read_scene_info(root, file)]


def read_scene_info(root: Path, file: Path) -> list[PosePair]:
    try:
        index = read_index(file)
        return [make_pair(root, file.stem, index, a, b) for a, b in index.pairs.tolist()]
    except ValueError as error:
        raise UserError(str(error)) from error


def make_pair(root: Path, split: str, index: SceneIndex, a: int, b: int) -> PosePair:
    image0, image1, K0, K1 = index.images[a], index.images[b], index.K[a], index.K[b]
    if image0 is None or image1 is None or K0 is None or K1 is None:
        raise ValueError(f"{split}: not an index of MegaDepth pairs: {a} {b} names one that is not listed")
    return PosePair(
        name=f"{split}/{Path(image0).stem}-{Path(image1).stem}",
        image0=root / image0,
        image1=root / image1,
        split=split,
        scene=split.split("_")[0],
        K0=K0,
        K1=K1,
        T_0to1=relative_pose(index.T[a], index.T[b]),
        depth0=depth_path(root, index.depths[a]),
        depth1=depth_path(root, index.depths[b]),
    )


def relative_pose(T0: Any, T1: Any) -> np.ndarray | None:
    """4 4 from two world-to-camera poses; None where one is not known."""
    if T0 is None or T1 is None:
        return None
    T0, T1 = np.array(T0, dtype=float), np.array(T1, dtype=float)
    if not (np.isfinite(T0).all() and np.isfinite(T1).all()):
        return None
    return T1 @ np.linalg.inv(T0)


def depth_path(root: Path, path: str | None) -> Path | None:
    return root / path if path is not None and (root / path).is_file() else None
