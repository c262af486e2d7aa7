"""Ground truth: where points of one image land in the other, and which coarse cells match.

Everything is batched, works on any device and never waits for it. Points are pixels (x, y) with the centre
of the top-left pixel at (0, 0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from prism_match.training.pairs import CELL, PairBatch, cell_centres

SMOOTH = 0.05  # neighbouring pixels whose depths differ by more than this share lie on different surfaces


class Warp(NamedTuple):
    """Where `n` points of image 0 land in image 1."""

    points: Tensor  # b n 2, pixels of image 1; the point itself where nothing is known
    visible: Tensor  # b n, bool: inside image 1 and not occluded there
    known: Tensor  # b n, bool: whether `visible` can be relied on; False where depth is missing


@dataclass(frozen=True)
class CoarseTruth:
    """Ground truth at 1/8 resolution; cells in row-major order, n0 and n1 of them.

    As in the paper, a cell is matchable when it takes part in a mutual nearest-neighbour match of projected
    cell centres. Cells that are neither matchable nor unmatchable (no depth, padding) belong in no loss.
    """

    match0: Tensor  # b n0, int64: the cell of image 1 that matches, or -1
    matchable0: Tensor  # b n0, bool
    matchable1: Tensor  # b n1, bool
    unmatchable0: Tensor  # b n0, bool: known to have no match
    unmatchable1: Tensor  # b n1, bool
    offset0: Tensor  # b n0 2: true point in image 1 minus the matching cell's centre, 0 where there is none


def warp_by_depth(
    points: Tensor,
    depth0: Tensor,
    depth1: Tensor,
    K0: Tensor,
    K1: Tensor,
    T_0to1: Tensor,
    tolerance: float = 0.05,
    bounds1: Tensor | None = None,
) -> Warp:
    """Warps points by the depth of image 0 and checks them against the depth of image 1.

    points b n 2, depth0 b h0 w0 and depth1 b h1 w1 (0 = none), K0 and K1 b 3 3 in pixels of these maps,
    T_0to1 b 4 4. A point is occluded where every depth around its landing point differs from its own by more
    than `tolerance` of it. `bounds1` b 4 (x and y of the near edge, then of the far edge) limits image 1 to a
    part of its map; without it the whole map counts. Where depth1 is missing around the landing point, nobody
    can tell: not visible, not known.
    """
    depth = depth_at(depth0, points)
    has_depth = depth > 0
    # In double precision, since the matrix product below is not immune to TF32; inv_ex, unlike inv, does
    # not wait for the device.
    back = torch.linalg.inv_ex(K0.double()).inverse
    turn = (K1.double() @ T_0to1[:, :3, :3].double() @ back).to(points.dtype)
    shift = (K1.double() @ T_0to1[:, :3, 3:].double()).to(points.dtype).mT
    there = apply(turn, points) * depth[..., None] + shift  # b n 3: pixel times depth, and depth
    z = there[..., 2]
    ahead = z > 1e-6
    projected = there[..., :2] / torch.where(ahead, z, torch.ones_like(z))[..., None]
    if bounds1 is None:
        h, w = depth1.shape[-2:]
        bounds1 = points.new_tensor([-0.5, -0.5, w - 0.5, h - 0.5]).expand(len(points), 4)
    near_edge, far_edge = bounds1[:, None, :2], bounds1[:, None, 2:]
    inside = ahead & ((projected >= near_edge) & (projected < far_edge)).all(-1)
    around, _ = neighbours(depth1, projected)
    agrees = ((around > 0) & ((around - z[..., None]).abs() <= tolerance * z[..., None])).any(-1)
    measured = (around > 0).any(-1)
    warped = torch.where((has_depth & ahead)[..., None], projected, points)
    return Warp(warped, has_depth & inside & agrees, has_depth & (~inside | measured))


def depth_at(depth: Tensor, points: Tensor) -> Tensor:
    """b n: depth b h w at points b n 2; 0 where none of the four pixels around a point has one.

    Bilinear among the pixels that lie on the same surface as the nearest pixel with a depth, so that no
    depth is made up between foreground and background.
    """
    around, weight = neighbours(depth, points)
    weight = (weight + 1e-6) * (around > 0)  # a pixel of weight 0 still counts when it is the only one
    nearest = around.gather(-1, weight.argmax(-1, keepdim=True))
    weight = weight * ((around - nearest).abs() <= SMOOTH * nearest)
    value = (around * weight).sum(-1) / weight.sum(-1).clamp(min=1e-12)
    h, w = depth.shape[-2:]
    inside = (points > -0.5).all(-1) & (points[..., 0] < w - 0.5) & (points[..., 1] < h - 0.5)
    return torch.where(inside, value, torch.zeros_like(value))


def coarse_ground_truth(batch: PairBatch) -> CoarseTruth:
    """Mutual nearest neighbours of projected cell centres, in both directions."""
    size0, size1 = _size(batch.image0), _size(batch.image1)
    seen0, seen1 = batch.visible0.flatten(1), batch.visible1.flatten(1)
    nearest0, nearest1 = _nearest_cell(batch.warp0, size1), _nearest_cell(batch.warp1, size0)
    real0, real1 = _real_cells(batch.mask0, seen0), _real_cells(batch.mask1, seen1)
    seen0, seen1 = seen0 & real0 & real1.gather(1, nearest0), seen1 & real1 & real0.gather(1, nearest1)
    unknown0 = torch.zeros_like(seen0) if batch.unknown0 is None else batch.unknown0.flatten(1)
    unknown1 = torch.zeros_like(seen1) if batch.unknown1 is None else batch.unknown1.flatten(1)
    matchable0 = _mutual(nearest0, seen0, nearest1, seen1)
    matchable1 = _mutual(nearest1, seen1, nearest0, seen0)
    # A point that lands in a cell about which nothing is known may well match it.
    open0 = unknown0 | (seen0 & unknown1.gather(1, nearest0))
    open1 = unknown1 | (seen1 & unknown0.gather(1, nearest1))
    centres = cell_centres(*size1, device=batch.warp0.device).flatten(0, 1)
    offset = batch.warp0.flatten(1, 2) - centres[nearest0]
    return CoarseTruth(
        match0=torch.where(matchable0, nearest0, torch.full_like(nearest0, -1)),
        matchable0=matchable0,
        matchable1=matchable1,
        unmatchable0=real0 & ~matchable0 & ~open0,
        unmatchable1=real1 & ~matchable1 & ~open1,
        offset0=torch.where(matchable0[..., None], offset, torch.zeros_like(offset)),
    )


def _size(image: Tensor) -> tuple[int, int]:
    """Height and width."""
    return image.shape[-2], image.shape[-1]


def apply(matrix: Tensor, points: Tensor) -> Tensor:
    """b n 3: matrix b 3 3 times (x, y, 1). No matrix product: TF32 or autocast would cost whole pixels."""
    m = matrix[:, None]
    return m[..., 0] * points[..., :1] + m[..., 1] * points[..., 1:] + m[..., 2]


def _nearest_cell(warp: Tensor, size: tuple[int, int]) -> Tensor:
    """b n: index of the cell whose centre is nearest to each point of b h/8 w/8 2."""
    rows, columns = size[0] // CELL, size[1] // CELL
    cell = ((warp.flatten(1, 2).nan_to_num() - (CELL - 1) / 2) / CELL).round()
    return (cell[..., 1].clamp(0, rows - 1) * columns + cell[..., 0].clamp(0, columns - 1)).long()


def _mutual(nearest: Tensor, seen: Tensor, back: Tensor, seen_back: Tensor) -> Tensor:
    """b n: whether the nearest cell's nearest cell is the cell itself, both being visible."""
    itself = torch.arange(nearest.shape[1], device=nearest.device)
    return seen & seen_back.gather(1, nearest) & (back.gather(1, nearest) == itself)


def _real_cells(mask: Tensor | None, like: Tensor) -> Tensor:
    """b n: cells whose centre, between pixels 3 and 4, is not padding."""
    if mask is None:
        return torch.ones_like(like)
    low, high = CELL // 2 - 1, CELL // 2
    return (mask[:, low::CELL, low::CELL] & mask[:, high::CELL, high::CELL]).flatten(1)


def neighbours(values: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """b n 4: the four pixels of b h w around each point, 0 outside, and their bilinear weights."""
    h, w = values.shape[-2:]
    points = points.nan_to_num(-2.0).clamp(-2.0, float(max(h, w) + 1))  # so that they fit an integer
    corner = points.floor()
    fx, fy = (points - corner).unbind(-1)
    x, y = corner.long().unbind(-1)
    flat = values.flatten(1)
    found, weights = [], []
    for row, wy in ((y, 1 - fy), (y + 1, fy)):
        for column, wx in ((x, 1 - fx), (x + 1, fx)):
            inside = (row >= 0) & (row < h) & (column >= 0) & (column < w)
            value = flat.gather(1, row.clamp(0, h - 1) * w + column.clamp(0, w - 1))
            found.append(torch.where(inside, value, torch.zeros_like(value)))
            weights.append(wx * wy)
    return torch.stack(found, dim=-1), torch.stack(weights, dim=-1)
