"""Relative pose in rooms: pairs of RGB-D sequences, chosen by how much of each other the frames see.

ROOT is a sequence or a folder of sequences, as `frames` reads them. Overlap is the share of the
surface in one depth map that the other sees as well, the smaller of both ways. All bins of overlap get the
same number of pairs, as far as they have them, whatever the sequences are full of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from prism_match.errors import UserError
from prism_match.evaluation.megadepth import relative_pose
from prism_match.evaluation.pairs import PosePair
from prism_match.frames import find_sequences, read_sequence

PAIRS = 100
BINS = (0.1, 0.2, 0.4, 0.6, 0.8)  # edges of the overlap; the first and the last bound what is used


def read_rgbd(root: str | Path, count: int = PAIRS, seed: int = 0) -> tuple[list[PosePair], dict[str, float]]:
    """`count` pairs, from little to much overlap, and the overlap of each by its name."""
    if count < 1:
        raise UserError(f"the number of pairs must be at least 1, not {count}")
    found = [pair for folder in find_sequences(Path(root)) for pair in overlapping_pairs(folder)]
    if not found:
        raise UserError(f"{root}: no two frames overlap by {BINS[0]} to {BINS[-1]}")
    overlaps = np.array([overlap for _, overlap in found])
    chosen = [found[n] for n in spread_choice(overlaps, count, seed)]
    pairs = [replace(pair, split=bin_name(overlap)) for pair, overlap in chosen]
    return pairs, {pair.name: overlap for pair, overlap in chosen}


def overlapping_pairs(folder: Path) -> list[tuple[PosePair, float]]:
    """Those of one sequence whose overlap is within the bins, with their overlap."""
    from prism_match.training.data.rgbd import measure_overlap, spaced

    frames = spaced(read_sequence(folder))
    pairs, shares = measure_overlap(frames)
    found = []
    for (a, b), share in zip(pairs.tolist(), shares.tolist(), strict=True):
        if BINS[0] <= share < BINS[-1]:
            one, other = frames[a], frames[b]
            pair = PosePair(
                name=f"{folder.name}/{one.image.stem}-{other.image.stem}",
                image0=one.image,
                image1=other.image,
                scene=folder.name,
                K0=one.K,
                K1=other.K,
                T_0to1=relative_pose(one.T, other.T),
                depth0=one.depth,
                depth1=other.depth,
            )
            found.append((pair, share))
    return found


def spread_choice(overlaps: np.ndarray, count: int, seed: int) -> list[int]:
    """Indices of `count` of n overlaps, the same ones for the same seed, in the order of the bins. The bins
    take turns until there are enough."""
    bins = np.digitize(overlaps, BINS)
    turn = np.empty(len(bins), int)
    shuffled = np.random.default_rng(seed).permutation(len(bins))
    for number in np.unique(bins):
        members = shuffled[bins[shuffled] == number]
        turn[members] = np.arange(len(members))
    kept = np.lexsort((bins, turn))[:count]
    return sorted(kept.tolist(), key=lambda n: (bins[n], n))


def bin_name(overlap: float) -> str:
    n = int(np.digitize(overlap, BINS))
    return f"overlap {BINS[n - 1]:g} to {BINS[n]:g}"
