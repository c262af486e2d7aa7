"""Photos on their way to be matched: which files are some, and how they are resized."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prism_match.geometry import resize_matrix

IMAGE_SUFFIXES = (".ppm", ".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")


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


def scale_points(points: np.ndarray, size: tuple[int, int], new_size: tuple[int, int]) -> np.ndarray:
    """n 2: pixels of an image of one size (width, height) to pixels of it resized to another."""
    scale = np.array(new_size, dtype=float) / np.array(size, dtype=float)
    return (points + 0.5) * scale - 0.5


def scaling(size: tuple[int, int], new_size: tuple[int, int]) -> np.ndarray:
    """3 3: what `scale_points` does, as a matrix; it also takes intrinsics along."""
    return resize_matrix(new_size[0] / size[0], new_size[1] / size[1])
