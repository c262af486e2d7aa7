"""What a benchmark consists of: pairs of images with the truth about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from prism_match.errors import UserError
from prism_match.files import is_file

AnyPair = TypeVar("AnyPair", bound="Pair")
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Pair:
    name: str  # unique within its benchmark
    image0: Path
    image1: Path
    split: str = ""  # a list of the benchmark that is reported on its own
    scene: str = ""

    @property
    def problem(self) -> str:
        """Why the truth about this pair is of no use; empty if it is."""
        return ""


@dataclass(frozen=True, kw_only=True)
class PosePair(Pair):
    K0: np.ndarray  # 3 3, float64; the centre of the top-left pixel is (0, 0)
    K1: np.ndarray
    T_0to1: np.ndarray | None  # 4 4, float64: x1 = R x0 + t
    # Sizes (width, height) of the images whose pixels the intrinsics, and so the RANSAC threshold, are
    # in; None: those of the files.
    frame0: tuple[int, int] | None = None
    frame1: tuple[int, int] | None = None
    depth0: Path | None = None
    depth1: Path | None = None

    @property
    def problem(self) -> str:
        if self.T_0to1 is None:
            return "no pose is given"
        if not self.K0.shape == self.K1.shape == (3, 3) or self.T_0to1.shape != (4, 4):
            return "the pose or the intrinsics are no matrices"
        if not all(np.isfinite(x).all() for x in (self.K0, self.K1, self.T_0to1)):
            return "the pose or the intrinsics are not finite"
        if abs(np.linalg.det(self.T_0to1[:3, :3]) - 1) > 0.01:
            return "the pose has no rotation in it"
        if min(k[i, i] for k in (self.K0, self.K1) for i in (0, 1)) <= 0:
            return "the focal lengths are not positive"
        if not all(np.linalg.det(k) for k in (self.K0, self.K1)):
            return "the intrinsics are those of no camera"
        return ""


@dataclass(frozen=True, kw_only=True)
class HomographyPair(Pair):
    H: np.ndarray | None  # 3 3, float64: image 0 to image 1, in pixels of the files

    @property
    def problem(self) -> str:
        return "no homography is given" if self.H is None or not np.isfinite(self.H).all() else ""


def existing(path: Path) -> Path | None:
    return path if is_file(path) else None


def name_apart(pairs: Iterable[AnyPair]) -> list[AnyPair]:
    """A pair that is listed twice counts twice: the second one is called "NAME #2"."""
    seen: Counter[str] = Counter()
    apart = []
    for pair in pairs:
        seen[pair.name] += 1
        again = seen[pair.name]
        apart.append(pair if again == 1 else replace(pair, name=f"{pair.name} #{again}"))
    return apart


def choose(pairs: list[Item], count: int | None, seed: int) -> list[Item]:
    """All, or `count` of them at random but in their order; the same ones for the same seed."""
    if count is None or count >= len(pairs):
        return pairs
    if count < 1:
        raise UserError(f"the number of pairs must be at least 1, not {count}")
    kept = np.random.default_rng(seed).choice(len(pairs), count, replace=False)
    return [pairs[n] for n in np.sort(kept)]
