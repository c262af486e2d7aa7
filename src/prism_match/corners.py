"""The point of each cell of an image at which a match is most exact.

The model matches cells of 8 x 8 pixels and tells where the middle of one lies in the other image, whether
there is something to be seen just there or not. Any point of the cell is as good for the model, and the
corner of a window is more exact to polish than the plaster beside it. Which point that is depends on one
image alone, so that all pairs of a photo have their matches at the same points of it.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from prism_match.model.prism import CELL

SMOOTH = 5  # pixels: side of two boxes by which, one after the other, changes around a pixel are averaged
NOTHING = 1e-7  # what a corner has to be better than; without one, the middle


def corners(gray: Tensor) -> Tensor:
    """rows columns 2 (x, y): in each cell of an image (h w), the pixel around which brightness changes the
    most in the direction in which it changes the least."""
    rows, columns = ((n + CELL - 1) // CELL for n in gray.shape)
    # No convolutions: GPUs round for them, and which of two pixels is better can be a matter of last bits.
    x, y = _derivatives(gray)
    products = F.pad(torch.stack([x * x, x * y, y * y])[None], (SMOOTH - 1,) * 4, mode="replicate")
    xx, xy, yy = F.avg_pool2d(F.avg_pool2d(products, SMOOTH, 1), SMOOTH, 1)[0]
    least = (xx + yy) / 2 - torch.sqrt(((xx - yy) / 2).square() + xy.square())
    least = F.pad(least, (0, CELL - 1, 0, CELL - 1), value=-1.0)[: rows * CELL, : columns * CELL]
    cells = least.reshape(rows, CELL, columns, CELL).transpose(1, 2).reshape(rows, columns, CELL * CELL)
    best = (cells + NOTHING * _middle(gray.device)).argmax(dim=2)
    down, right = (CELL * torch.arange(n, device=gray.device) for n in (rows, columns))
    x, y = right + best % CELL, down[:, None] + best // CELL
    return torch.stack([x, y], dim=-1).to(gray.dtype)


def _derivatives(gray: Tensor) -> tuple[Tensor, Tensor]:
    """h w each: along x and along y, by Sobel's filters."""
    around = F.pad(gray[None, None], (1, 1, 1, 1), mode="replicate")[0, 0]
    x, y = around[:, 2:] - around[:, :-2], around[2:] - around[:-2]
    return (x[:-2] + 2 * x[1:-1] + x[2:]) / 8, (y[:, :-2] + 2 * y[:, 1:-1] + y[:, 2:]) / 8


def to_corners(
    found: Tensor, at0: Tensor, at1: Tensor, stretch: Tensor, misfit: Tensor
) -> tuple[Tensor, Tensor]:
    """Matches (n 2, n 2) moved within their cells of image 0 to the points that `corners` found there.
    stretch, misfit: n 2 2, n, what `neighbourhoods` tells. Where it tells nothing, they stay."""
    rows, columns, _ = found.shape
    x, y = ((at0 + 0.5) / CELL).floor().long().unbind(1)
    step = found[y.clamp(0, rows - 1), x.clamp(0, columns - 1)] - at0
    step = torch.where((misfit < torch.inf)[:, None], step, 0.0)
    return at0 + step, at1 + (stretch @ step[..., None])[..., 0]


@lru_cache(maxsize=8)
def _middle(device: torch.device) -> Tensor:
    """1 for the pixels in the middle of a cell, and less around them, row by row."""
    away = (torch.arange(CELL) - (CELL - 1) / 2).square()
    return (1 - (away[:, None] + away) / CELL**2).flatten().to(device)
