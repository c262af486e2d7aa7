"""ScanNet-1500: LoFTR's index of pairs, images at 640x480.

    ROOT/test.npz         name n 4 (scene, sub-scene, frame, frame) and, if there, rel_pose n 12
    ROOT/intrinsics.npz   3 3 or 4 4 for each scene, for images of 640x480
    ROOT/scannet_test_1500/SCENE/{color/N.jpg,depth/N.png,pose/N.txt}

Without rel_pose, the poses (camera to world) of the two frames are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from prism_match.errors import UserError
from prism_match.evaluation.megadepth import relative_pose
from prism_match.evaluation.pairs import PosePair, existing
from prism_match.files import load_arrays

FRAME = (640, 480)


def is_scannet(root: Path) -> bool:
    return (root / "test.npz").is_file()


def read_scannet(root: str | Path) -> list[PosePair]:
    root = Path(root)
    for name in ("test.npz", "intrinsics.npz"):
        if not (root / name).is_file():
            raise UserError(f"{root / name}: no such file; it comes with LoFTR's list of pairs")
    try:
        listed, known = load_arrays(root / "test.npz"), load_arrays(root / "intrinsics.npz")
        rows = [tuple(map(int, row)) for row in listed["name"]]
        poses = listed.get("rel_pose", [None] * len(rows))
        folder = root / "scannet_test_1500"
        return [make_pair(folder, row, known, pose) for row, pose in zip(rows, poses, strict=True)]
    except (OSError, ValueError, KeyError, TypeError, IndexError, ArithmeticError) as error:
        raise UserError(f"{root / 'test.npz'}: not an index of ScanNet pairs ({error})") from error


def make_pair(
    root: Path, row: tuple[int, ...], intrinsics: dict[str, np.ndarray], pose: np.ndarray | None
) -> PosePair:
    number, part, a, b = row
    scene = f"scene{number:04d}_{part:02d}"
    folder = root / scene
    K = np.asarray(intrinsics[scene], dtype=float)[:3, :3]
    return PosePair(
        name=f"{scene}/{a}-{b}",
        image0=folder / "color" / f"{a}.jpg",
        image1=folder / "color" / f"{b}.jpg",
        scene=scene,
        K0=K,
        K1=K,
        T_0to1=pose_from_files(folder, a, b) if pose is None else complete(pose),
        frame0=FRAME,
        frame1=FRAME,
        depth0=existing(folder / "depth" / f"{a}.png"),
        depth1=existing(folder / "depth" / f"{b}.png"),
    )


def complete(pose: np.ndarray) -> np.ndarray:
    """3 4 or 4 4, in any shape -> 4 4."""
    return np.concatenate([np.asarray(pose, dtype=float).ravel()[:12], [0, 0, 0, 1]]).reshape(4, 4)


def pose_from_files(folder: Path, a: int, b: int) -> np.ndarray | None:
    """4 4; None where a pose is missing or, as ScanNet marks lost frames, infinite."""
    try:
        world = [np.loadtxt(folder / "pose" / f"{n}.txt").reshape(4, 4) for n in (a, b)]
        return relative_pose(*map(np.linalg.inv, world))
    except (OSError, ValueError, np.linalg.LinAlgError):
        return None
