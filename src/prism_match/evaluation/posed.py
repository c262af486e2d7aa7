"""Posed pairs of one's own: SuperGlue's text format, and folders of calibrated cameras."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np

from prism_match.engine.photos import Resize, scaling
from prism_match.errors import UserError
from prism_match.evaluation.megadepth import relative_pose
from prism_match.evaluation.pairs import PosePair
from prism_match.files import parse_lines
from prism_match.geometry import pose_matrix
from prism_match.images import image_size

WIDEST = 45.0  # degrees between the optical axes of two cameras that are matched with each other


def read_pair_list(path: str | Path) -> list[PosePair]:
    """A text file, one pair a line:

        image0 image1 rotation0 rotation1 K0 (9 numbers) K1 (9) T_0to1 (16)

    all matrices row by row; the images lie beside the file or in `images` beside it. A line that ends before
    the pose is a pair that cannot be used. Rotations, quarter turns, must be 0."""
    path = Path(path)
    if path.is_dir():
        lists = sorted(path.glob("*.txt"))
        if len(lists) != 1:
            raise UserError(f"{path}: {len(lists)} text files here; give the one that lists the pairs")
        path = lists[0]
    folder = path.parent / "images" if (path.parent / "images").is_dir() else path.parent
    return parse_lines(path, lambda words: parse_pair(folder, words))


def parse_pair(folder: Path, words: list[str]) -> PosePair:
    if len(words) not in (2, 4, 22, 38):
        raise ValueError(f"{len(words)} columns instead of 38")
    if any(word != "0" for word in words[2:4]):
        raise ValueError("rotated images are not supported: turn them upright first")
    numbers = np.array(words[4:], dtype=float)
    matrices = np.pad(numbers, (0, 34 - len(numbers)), constant_values=np.nan)
    return PosePair(
        name=f"{words[0]}-{words[1]}",
        image0=folder / words[0],
        image1=folder / words[1],
        K0=matrices[:9].reshape(3, 3),
        K1=matrices[9:18].reshape(3, 3),
        T_0to1=matrices[18:].reshape(4, 4) if len(numbers) == 34 else None,
    )


def in_resized_frames(pairs: list[PosePair], resizing: Resize) -> list[PosePair]:
    """The same pairs with intrinsics, and so the RANSAC threshold, in pixels of the resized images, as
    SuperGlue has them. Pairs whose images cannot be read stay as they are; they will fail by name."""
    resized = []
    for pair in pairs:
        size0, size1 = image_size(pair.image0), image_size(pair.image1)
        if size0 is not None and size1 is not None:
            frame0, frame1 = resizing(size0), resizing(size1)
            K0, K1 = scaling(size0, frame0) @ pair.K0, scaling(size1, frame1) @ pair.K1
            pair = replace(pair, K0=K0, K1=K1, frame0=frame0, frame1=frame1)
        resized.append(pair)
    return resized


def read_calibrated(root: str | Path) -> list[PosePair]:
    """Scenes of calibrated cameras, as Strecha's: ROOT, or each folder in it, has `images` and

        cameras.txt   image fx fy cx cy R (9 numbers, row by row, world to camera) t (3)

    All pairs of a scene whose optical axes are at most 45 degrees apart."""
    root = Path(root)
    files = [root / "cameras.txt"] if (root / "cameras.txt").is_file() else sorted(root.glob("*/cameras.txt"))
    if not files:
        raise UserError(f"{root}: no cameras.txt, neither here nor in the folders here")
    return [pair for file in files for pair in read_scene(file)]


def read_cameras(file: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """3 3 intrinsics and 4 4 pose, world to camera, by the name of the image."""

    def parse(words: list[str]) -> tuple[str, tuple[np.ndarray, np.ndarray]]:
        if len(words) != 17:
            raise ValueError(f"{len(words)} words instead of image fx fy cx cy R (9 numbers) t (3)")
        return words[0], camera_matrices(np.array(words[1:], dtype=float))

    return dict(parse_lines(file, parse))


def read_scene(file: Path) -> list[PosePair]:
    cameras = read_cameras(file)
    folder, scene = file.parent / "images", file.parent.name
    pairs = []
    for a, b in combinations(cameras, 2):
        (K0, T0), (K1, T1) = cameras[a], cameras[b]
        if np.degrees(np.arccos(np.clip(T0[2, :3] @ T1[2, :3], -1, 1))) > WIDEST:
            continue
        pairs.append(
            PosePair(
                name=f"{scene}/{a}-{b}",
                image0=folder / a,
                image1=folder / b,
                scene=scene,
                K0=K0,
                K1=K1,
                T_0to1=relative_pose(T0, T1),
            )
        )
    return pairs


def camera_matrices(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """3 3 and 4 4 (world to camera) of the 16 numbers of a camera."""
    fx, fy, cx, cy = numbers[:4]
    K = np.array([[fx, 0, cx], [0, fy, cy], [0, 0, 1]])
    return K, pose_matrix(numbers[4:13].reshape(3, 3), numbers[13:])
