"""Pairs from RGB-D sequences with poses, as `frames.read_sequence` reads them."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from prism_match.errors import UserError
from prism_match.frames import Frame, find_sequences, read_depth, read_sequence
from prism_match.images import stored_size
from prism_match.training.data.posed import PosedPairs, resize_depth, scale_intrinsics
from prism_match.training.supervision import warp_by_depth

log = logging.getLogger(__name__)

PROBE = 64  # pixels of the width at which overlap is measured
MOST_FRAMES = 200  # of a sequence, since the number of pairs grows as the square


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
        scenes = []
        for scene in find_sequences(folder):
            frames = spaced(read_sequence(scene), max_frames)
            pairs, share = (x.cpu().numpy() for x in measure_overlap(frames, device))
            chosen = (share >= overlap[0]) & (share <= overlap[1])
            if chosen.any():
                scenes.append((frames, pairs[chosen], share[chosen]))
            else:
                log.warning("%s: no two frames overlap by %s to %s", scene, *overlap)
        if not scenes:
            raise UserError(f"{folder}: no two frames overlap by {overlap[0]} to {overlap[1]}")
        super().__init__(folder.resolve().name, scenes, device, workers)


def spaced(frames: list[Frame], most: int = MOST_FRAMES) -> list[Frame]:
    """At most `most` of them, evenly spaced."""
    return frames[:: -(-len(frames) // most)] if frames else frames


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
        width, height = stored_size(frame.image)
    except UserError as e:
        log.warning("skipped: %s", e)
        return np.zeros((1, PROBE), np.float32), np.eye(3)
    h = max(round(height * PROBE / width), 1)
    return resize_depth(depth, PROBE, h), scale_intrinsics(frame.K, PROBE / width, h / height)
