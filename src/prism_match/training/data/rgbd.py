"""Pairs from RGB-D sequences with poses: ScanNet's layout and any folder of colour, depth and pose files.

    SCENE/color/0.jpg  SCENE/depth/0.png  SCENE/pose/0.txt  SCENE/intrinsic/intrinsic_color.txt   (ScanNet)
    SCENE/NAME.color.jpg  SCENE/NAME.depth.png  SCENE/NAME.pose.txt  SCENE/camera-intrinsics.txt

Depth is in millimetres, 16-bit PNG; poses are 4 x 4 matrices from camera to world.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from prism_match.frames import read_depth
from prism_match.training.data.posed import Frame, PosedPairs, resize_depth, scale_intrinsics, spread_weights
from prism_match.training.supervision import warp_by_depth

log = logging.getLogger(__name__)

PROBE = 64  # pixels of the width at which overlap is measured
MOST_FRAMES = 200  # of a sequence, since the number of pairs grows as the square
COLOUR = (".jpg", ".jpeg", ".png")
INTRINSICS = ("camera-intrinsics.txt", "intrinsic/intrinsic_color.txt", "intrinsic_color.txt")


class RGBDPairs(PosedPairs):
    """Pairs of one or more sequences, chosen by how much of each other they see."""

    def __init__(
        self,
        folder: Path | str,
        device: torch.device | str = "cpu",
        overlap: tuple[float, float] = (0.1, 0.9),
        max_frames: int = MOST_FRAMES,
        workers: int = 8,
    ):
        """`folder`: a sequence or a folder of sequences; `max_frames` of each are used, evenly spaced."""
        folder = Path(folder)
        frames: list[Frame] = []
        pairs, weights = [np.empty((0, 2), np.int64)], [np.empty(0)]
        for scene in find_sequences(folder):
            found = spaced(read_sequence(scene), max_frames)
            scene_pairs, share = measure_overlap(found, device)
            chosen = (share >= overlap[0]) & (share <= overlap[1])
            if chosen.any():
                pairs.append(scene_pairs[chosen].cpu().numpy() + len(frames))
                share = share[chosen].cpu()
                weights.append(spread_weights(share, torch.ones_like(share)).numpy())
            else:
                log.warning("%s: no two frames overlap by %s to %s", scene, *overlap)
            frames += found
        if not sum(map(len, pairs)):
            raise ValueError(f"{folder}: no two frames overlap by {overlap[0]} to {overlap[1]}")
        super().__init__(folder.name, frames, np.concatenate(pairs), np.concatenate(weights), device, workers)


def find_sequences(folder: Path) -> list[Path]:
    """`folder` itself or those folders in it that hold a sequence."""
    candidates = [folder, *sorted(p for p in folder.glob("*") if p.is_dir())]
    found = [p for p in candidates if (p / "pose").is_dir() or next(p.glob("*.pose.txt"), None)]
    if not found:
        raise ValueError(f"{folder}: no RGB-D sequence (no NAME.pose.txt and no folder `pose`)")
    return found


def read_sequence(scene: Path) -> list[Frame]:
    """The frames of one sequence; those without a pose, colour or depth are named and left out."""
    K = _read_intrinsics(scene)
    frames = []
    for pose in sorted([*scene.glob("*.pose.txt"), *scene.glob("pose/*.txt")], key=_number):
        image, depth = _files_of(scene, pose)
        try:
            if image is None or not depth.is_file():
                raise ValueError(f"{pose}: its colour or depth image is missing")
            T = _read_matrix(pose, (4, 4))
            if not np.isfinite(T).all():
                raise ValueError(f"{pose}: not finite")
            frame = Frame(image, depth, K, np.linalg.inv(T))
            if problem := frame.problem():
                raise ValueError(problem)
        except (ValueError, np.linalg.LinAlgError) as e:
            log.warning("skipped: %s", e)
            continue
        frames.append(frame)
    return frames


def spaced(frames: list[Frame], most: int = MOST_FRAMES) -> list[Frame]:
    """At most `most` of them, evenly spaced."""
    return frames[:: -(-len(frames) // most)] if frames else frames


def _number(path: Path) -> tuple[int, str]:
    digits = "".join(c for c in path.name if c.isdigit())
    return int(digits or 0), path.name


def _files_of(scene: Path, pose: Path) -> tuple[Path | None, Path]:
    if pose.parent.name == "pose":
        stem = pose.stem
        colours, depth = (scene / "color" / f"{stem}{s}" for s in COLOUR), scene / "depth" / f"{stem}.png"
    else:
        stem = pose.name.removesuffix(".pose.txt")
        colours, depth = (scene / f"{stem}.color{s}" for s in COLOUR), scene / f"{stem}.depth.png"
    return next((c for c in colours if c.is_file()), None), depth


def _read_intrinsics(scene: Path) -> np.ndarray:
    for name in INTRINSICS:
        if (scene / name).is_file():
            return _read_matrix(scene / name, (3, 3))
    raise ValueError(f"{scene}: no intrinsics (looked for {', '.join(INTRINSICS)})")


def _read_matrix(path: Path, shape: tuple[int, int]) -> np.ndarray:
    """The top-left `shape` of a matrix in a text file."""
    try:
        matrix = np.loadtxt(path, ndmin=2)
    except (OSError, ValueError) as e:
        raise ValueError(f"{path}: not a matrix ({e})") from e
    if matrix.shape[0] < shape[0] or matrix.shape[1] < shape[1]:
        raise ValueError(f"{path}: a matrix of {matrix.shape}, expected {shape}")
    return matrix[: shape[0], : shape[1]]


def measure_overlap(frames: list[Frame], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Pairs n 2 of frames and the share of the one's surface that the other sees, the smaller of both ways.

    Depth maps that cannot be read count as empty: their frames overlap with nothing.
    """
    probes = [_probe(f) for f in frames]
    if len(probes) < 2:
        return torch.empty(0, 2, dtype=torch.long), torch.empty(0)
    height = max(d.shape[0] for d, _ in probes)
    padded = np.stack([np.pad(d, [(0, height - d.shape[0]), (0, 0)]) for d, _ in probes])
    depth = torch.from_numpy(padded).to(device)
    K = torch.from_numpy(np.stack([K for _, K in probes]).astype(np.float32)).to(device)
    T = torch.from_numpy(np.stack([f.T for f in frames])).to(device)
    y, x = torch.meshgrid(*(torch.arange(0.0, n, 2, device=device) for n in depth.shape[1:]), indexing="ij")
    points = torch.stack([x, y], dim=-1).flatten(0, 1)

    def share(a: Tensor, b: Tensor) -> Tensor:
        relative = T[b] @ torch.linalg.inv(T[a])
        some = points.expand(len(a), -1, -1)
        warp = warp_by_depth(some, depth[a], depth[b], K[a], K[b], relative, 0.1)
        return warp.visible.sum(1) / warp.known.sum(1).clamp(min=1)

    pairs = torch.combinations(torch.arange(len(frames), device=device))
    both = [torch.minimum(share(a, b), share(b, a)) for a, b in (p.unbind(1) for p in pairs.split(512))]
    return pairs, torch.cat(both)


def _probe(frame: Frame) -> tuple[np.ndarray, np.ndarray]:
    """A small depth map and its intrinsics."""
    try:
        depth = read_depth(frame.depth)
        with Image.open(frame.image) as image:  # reads the header only
            width, height = image.size
    except (ValueError, OSError) as e:
        log.warning("skipped: %s", e)
        return np.zeros((1, PROBE), np.float32), np.eye(3)
    h = max(round(height * PROBE / width), 1)
    return resize_depth(depth, PROBE, h), scale_intrinsics(frame.K, PROBE / width, h / height)
