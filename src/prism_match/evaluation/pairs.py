"""What a benchmark consists of: pairs of images with the truth about them, and how to resize the images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from prism_match.errors import UserError
from prism_match.geometry import resize_matrix

AnyPair = TypeVar("AnyPair", bound="Pair")
Item = TypeVar("Item")
IMAGE_SUFFIXES = (".ppm", ".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")


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
        if not all(np.isfinite(x).all() for x in (self.K0, self.K1, self.T_0to1)):
            return "the pose or the intrinsics are not finite"
        if abs(np.linalg.det(self.T_0to1[:3, :3]) - 1) > 0.01:
            return "the pose has no rotation in it"
        if min(k[i, i] for k in (self.K0, self.K1) for i in (0, 1)) <= 0:
            return "the focal lengths are not positive"
        return ""


@dataclass(frozen=True, kw_only=True)
class HomographyPair(Pair):
    H: np.ndarray | None  # 3 3, float64: image 0 to image 1, in pixels of the files

    @property
    def problem(self) -> str:
        return "no homography is given" if self.H is None or not np.isfinite(self.H).all() else ""


@dataclass(frozen=True)
class Resize:
    """How a benchmark resizes its images before they are matched; exactly one of the three is given."""

    longer: int | None = None
    shorter: int | None = None
    exact: tuple[int, int] | None = None  # width, height
    enlarge: bool = True  # small images too, as the published protocols do it

    def __call__(self, size: tuple[int, int]) -> tuple[int, int]:
        """Width, height before -> after."""
        if self.exact is not None:
            return self.exact
        scale = self.longer / max(size) if self.longer else (self.shorter or 0) / min(size)
        scale = scale if self.enlarge else min(scale, 1.0)
        return round(size[0] * scale), round(size[1] * scale)

    @property
    def side(self) -> int:
        """The one number that tells it best."""
        return max(self.exact) if self.exact else self.longer or self.shorter or 0

    def __str__(self) -> str:
        if self.exact is not None:
            return f"{self.exact[0]}x{self.exact[1]} px"
        most = "" if self.enlarge else "at most "
        side = f"longer side {most}{self.longer}" if self.longer else f"shorter side {most}{self.shorter}"
        return f"{side} px"


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


def scale_points(points: np.ndarray, size: tuple[int, int], new_size: tuple[int, int]) -> np.ndarray:
    """n 2: pixels of an image of one size (width, height) to pixels of it resized to another."""
    scale = np.array(new_size, dtype=float) / np.array(size, dtype=float)
    return (points + 0.5) * scale - 0.5


def scaling(size: tuple[int, int], new_size: tuple[int, int]) -> np.ndarray:
    """3 3: what `scale_points` does, as a matrix; it also takes intrinsics along."""
    return resize_matrix(new_size[0] / size[0], new_size[1] / size[1])
