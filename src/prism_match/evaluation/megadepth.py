"""MegaDepth-1500, as LoFTR lists it, and any other index of the same make.

    ROOT/scene_info/*.npz   image_paths, depth_paths, intrinsics, poses, pair_infos; paths from ROOT

The principal points there are COLMAP's (the top-left corner is (0, 0)) and are moved by half a pixel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from prism_match.errors import UserError
from prism_match.evaluation.pairs import PosePair
from prism_match.files import load_object_arrays

KEYS = ("image_paths", "depth_paths", "intrinsics", "poses", "pair_infos")


def read_megadepth(root: str | Path) -> list[PosePair]:
    """All pairs of ROOT/scene_info/*.npz (or ROOT/*.npz), each file being a list of its own."""
    root = Path(root)
    files = sorted((root / "scene_info").glob("*.npz")) or sorted(root.glob("*.npz"))
    if not files:
        raise UserError(f"{root}: no scene_info/*.npz here")
    return [pair for file in files for pair in read_scene_info(root, file)]


def read_scene_info(root: Path, file: Path) -> list[PosePair]:
    try:
        index = dict(zip(KEYS, load_object_arrays(file, KEYS), strict=True))
        return [make_pair(root, file.stem, index, *map(int, info[0])) for info in index["pair_infos"]]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(f"{file}: not an index of MegaDepth pairs ({error})") from error


def make_pair(root: Path, split: str, index: dict[str, np.ndarray], a: int, b: int) -> PosePair:
    images, depths, intrinsics, poses = (index[key] for key in KEYS[:4])
    if images[a] is None or images[b] is None:
        raise ValueError(f"pair {a} {b} names an image that is not listed")
    return PosePair(
        name=f"{split}/{Path(images[a]).stem}-{Path(images[b]).stem}",
        image0=root / images[a],
        image1=root / images[b],
        split=split,
        scene=split.split("_")[0],
        K0=pixel_centred(intrinsics[a]),
        K1=pixel_centred(intrinsics[b]),
        T_0to1=relative_pose(poses[a], poses[b]),
        depth0=depth_path(root, depths[a]),
        depth1=depth_path(root, depths[b]),
    )


def pixel_centred(K: Any) -> np.ndarray:
    """3 3: from COLMAP's pixels to those with the centre of the first one at (0, 0)."""
    K = np.array(K, dtype=float).reshape(3, 3)
    K[:2, 2] -= 0.5
    return K


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
