"""MegaDepth-1500, as LoFTR lists it, and any other index of the same make.

    ROOT/scene_info/*.npz   image_paths, depth_paths, intrinsics, poses, pair_infos; paths from ROOT

As `training.data.megadepth` reads it; a pair whose pose or depth is not known is one all the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from prism_match.errors import UserError
from prism_match.evaluation.pairs import PosePair, existing
from prism_match.training.data.megadepth import SceneIndex, read_index


def read_megadepth(root: str | Path) -> list[PosePair]:
    """All pairs of ROOT/scene_info/*.npz (or ROOT/*.npz), each file being a list of its own."""
    root = Path(root)
    files = sorted((root / "scene_info").glob("*.npz")) or sorted(root.glob("*.npz"))
    if not files:
        raise UserError(f"{root}: no scene_info/*.npz here")
    indices = {file.stem: read_index(file) for file in files}
    return [make_pair(root, name, x, a, b) for name, x in indices.items() for a, b in x.pairs.tolist()]


def make_pair(root: Path, split: str, index: SceneIndex, a: int, b: int) -> PosePair:
    image0, image1, K0, K1 = index.images[a], index.images[b], index.K[a], index.K[b]
    if image0 is None or image1 is None or K0 is None or K1 is None:
        raise UserError(f"{split}: not an index of MegaDepth pairs: {a} {b} names one that is not listed")
    return PosePair(
        name=f"{split}/{Path(image0).stem}-{Path(image1).stem}",
        image0=root / image0,
        image1=root / image1,
        split=split,
        scene=split.split("_")[0],
        K0=K0,
        K1=K1,
        T_0to1=relative_pose(index.T[a], index.T[b]),
        depth0=existing(root / (index.depths[a] or "")),
        depth1=existing(root / (index.depths[b] or "")),
    )


def relative_pose(T0: np.ndarray | None, T1: np.ndarray | None) -> np.ndarray | None:
    """4 4 from two world-to-camera poses; None where one is not known, or is none."""
    if T0 is None or T1 is None or not np.isfinite([T0, T1]).all():
        return None
    try:
        return T1 @ np.linalg.inv(T0)
    except np.linalg.LinAlgError:
        return None
