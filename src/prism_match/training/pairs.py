"""What every source of training data gives: a batch of image pairs with exact correspondences.

The supervision of PRISM needs only one thing of a pair: where the centre of each 8x8 cell of one
image lands in the other, and whether it is visible there. Each source works that out in its own way
(a homography, depth and poses, ray casting) and hands over the result, so that the losses and the
trainer know nothing of where a pair came from.

Pixel convention: the centre of the top-left pixel is (0, 0); the centre of cell (row, column) is
(8 * column + 3.5, 8 * row + 3.5).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from prism_match.model.prism import CELL

__all__ = ["CELL", "ImageSize", "PairBatch", "PairSource", "Shape", "cell_centres", "shape_of"]

ImageSize = int | tuple[int, int]  # the side of a square, or height and width


class Shape(NamedTuple):
    """Of images, in pixels."""

    height: int
    width: int


def shape_of(size: ImageSize) -> Shape:
    return Shape(size, size) if isinstance(size, int) else Shape(*size)


@dataclass(frozen=True)
class PairBatch:
    """`b` image pairs; both images of all pairs have the same padded size `h w`, divisible by 32."""

    image0: Tensor  # b 1 h w, float in [0, 1]
    image1: Tensor  # b 1 h w
    warp0: Tensor  # b h/8 w/8 2, float32: each cell centre of image 0 in pixels (x, y) of image 1
    visible0: Tensor  # b h/8 w/8, bool: that point is inside image 1 and not occluded there
    warp1: Tensor  # b h/8 w/8 2: the same from image 1 to image 0
    visible1: Tensor  # b h/8 w/8, bool
    mask0: Tensor | None = None  # b h w, bool: False where image 0 is padding; None = no padding
    mask1: Tensor | None = None  # b h w, bool
    # Cells about which nothing is known (no depth there): neither matchable nor unmatchable.
    unknown0: Tensor | None = None  # b h/8 w/8, bool
    unknown1: Tensor | None = None  # b h/8 w/8, bool
    # Pairs whose truth is good for cells but not for fractions of a pixel (depth out of photos).
    rough: Tensor | None = None  # b, bool; None = all exact
    bins: Tensor | None = None  # b, int64: the bin of difficulty that a pair is of; -1, None: of none
    names: tuple[str, ...] = ()  # one per pair, for error messages and pictures

    def __len__(self) -> int:
        return self.image0.shape[0]

    def map(self, f: Callable[[Tensor], Tensor]) -> PairBatch:
        """The same batch with `f` applied to every tensor."""
        values = {x.name: getattr(self, x.name) for x in fields(self)}
        changed: dict[str, Any] = {k: f(v) for k, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **changed)

    def to(self, device: torch.device | str) -> PairBatch:
        return self.map(lambda t: t.to(device, non_blocking=True))


class PairSource(Protocol):
    """Anything that gives pairs: photos, worlds, MegaDepth, RGB-D sequences, COLMAP models."""

    name: str

    def sample(self, batch: int, size: ImageSize, generator: torch.Generator) -> PairBatch:
        """`batch` pairs of images of that size, on the device of the source."""
        ...


def cell_centres(height: int, width: int, device: torch.device | str = "cpu") -> Tensor:
    """h/8 w/8 2: the pixel (x, y) of each cell's centre, for an image of `height` x `width`."""
    y, x = (torch.arange(n // CELL, device=device) * CELL + (CELL - 1) / 2 for n in (height, width))
    return torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1)


def between_cells(maps: Tensor, pair: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """Of maps with a value for each cell (b h w ...), those of the four cells around points (n 2) of pairs
    (n): 4 n ..., left to right and then down; and how far a point is between them (n 2: x, y, in [0, 1], or
    beyond where it is at the border of the image)."""
    rows, columns = maps.shape[1:3]
    at = (points - (CELL - 1) / 2) / CELL
    last = torch.tensor([columns - 2, rows - 2], device=points.device)
    corner = torch.minimum(at.floor().long().clamp(min=0), last)
    x, y = corner.unbind(1)
    around = [maps[pair, y + down, x + right] for down in (0, 1) for right in (0, 1)]
    return torch.stack(around), at - corner


def warp_between_cells(warp: Tensor, pair: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """Where points (n 2) of image 0 of pairs (n) are in image 1 (n 2), by the four cells around them, and by
    how many pixels these, and those beside them, do not fit a plane (n; infinite: it is between none).
    warp: b h w 2."""
    (a, b, c, d), share = between_cells(warp, pair, points)
    x, y = share.split(1, dim=1)
    inside = ((share >= 0) & (share <= 1)).all(1)
    # A step or a crease between two columns (or rows) of cells bends none of the four against the others.
    bends = (_bend_along(warp, dim) for dim in (2, 1))
    (a_x, _, c_x, _), (a_y, b_y, _, _) = (between_cells(bend, pair, points)[0] for bend in bends)
    bend = torch.stack([(a - b - c + d).norm(dim=1), a_x, c_x, a_y, b_y]).amax(0)
    place = (a * (1 - x) + b * x) * (1 - y) + (c * (1 - x) + d * x) * y
    return place, torch.where(inside, bend, torch.inf)


def _bend_along(warp: Tensor, dim: int) -> Tensor:
    """b h w: by how much what is half way from each cell to the next one along `dim` (1 or 2) may be off
    the line between them, as the cells before and after them tell: a step or crease is seen from both."""
    steps = warp.diff(dim=dim)
    n = steps.shape[dim]
    change = steps.diff(dim=dim).norm(dim=-1)
    if n < 2:
        return torch.zeros_like(warp[..., 0])
    before, after = (torch.arange(n, device=warp.device) - k for k in (1, 0))
    both = [change.index_select(dim, i.clamp(0, n - 2)) for i in (before, after)]
    least = torch.minimum(*both) / 2
    # Nothing is behind the last cell, so what is asked of it does not count.
    return torch.cat([least, least.narrow(dim, n - 1, 1)], dim)
