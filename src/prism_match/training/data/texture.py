"""Cells without texture: plain sky, a white wall. Geometry says where they land, but no image does, so they
are made unknown: they are neither to be matched nor to be pruned."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from prism_match.training.pairs import CELL, PairBatch

FLAT = 0.02  # deviation of brightness, of 1, below which a neighbourhood shows nothing
NEIGHBOURHOOD = 3  # cells a side


def flat_cells(image: Tensor) -> Tensor:
    """image: b 1 h w in [0, 1], before noise is added. Returns b h/8 w/8, bool."""
    cells = F.avg_pool2d(torch.cat([image, image.square()], 1), CELL)
    around = F.avg_pool2d(cells, NEIGHBOURHOOD, 1, NEIGHBOURHOOD // 2, count_include_pad=False)
    mean, square = around.unbind(1)
    return square - mean.square() < FLAT**2


def forget_flat(batch: PairBatch, flat0: Tensor, flat1: Tensor) -> PairBatch:
    """The batch with cells unknown that are flat (b h/8 w/8) themselves or land on a flat cell."""
    visible0, unknown0 = _forget(batch.warp0, batch.visible0, flat0, flat1)
    visible1, unknown1 = _forget(batch.warp1, batch.visible1, flat1, flat0)
    return replace(batch, visible0=visible0, visible1=visible1, unknown0=unknown0, unknown1=unknown1)


def _forget(warp: Tensor, visible: Tensor, flat: Tensor, flat_there: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = flat_there.shape[1:]
    cell = torch.floor((warp + 0.5) / CELL).long()  # b h w 2
    x, y = cell[..., 0].clamp(0, columns - 1), cell[..., 1].clamp(0, rows - 1)
    landed = flat_there.flatten(1).gather(1, (y * columns + x).flatten(1)).view_as(flat)
    unknown = visible & (flat | landed)
    return visible & ~unknown, unknown
