"""Warps that no source of pairs needs, but tests of those that some do."""

from __future__ import annotations

import torch
from torch import Tensor

from prism_match.training.supervision import Warp, apply, neighbours


def warp_by_homography(points: Tensor, H: Tensor, size: tuple[int, int]) -> Warp:
    """Warps points b n 2 by H b 3 3 into an image of `size` (height, width)."""
    p = apply(H, points)
    ahead = p[..., 2] > 1e-6
    warped = torch.where(ahead[..., None], p[..., :2] / p[..., 2:].clamp(min=1e-6), points)
    return Warp(warped, ahead & _inside(warped, size), torch.ones_like(ahead))


def warp_by_field(points: Tensor, field: Tensor, valid: Tensor, size: tuple[int, int]) -> Warp:
    """Warps points b n 2 by a dense field b h w 2 of pixels in an image of `size` (height, width).

    Bilinear; nothing is known at a point unless all pixels it is interpolated from are `valid` (b h w).
    """
    x, _ = neighbours(field[..., 0], points)
    y, weight = neighbours(field[..., 1], points)
    good, _ = neighbours(valid.to(field.dtype), points)
    known = ((good > 0) | (weight == 0)).all(-1) & _inside(points, (field.shape[1], field.shape[2]))
    weight = weight / weight.sum(-1, keepdim=True).clamp(min=1e-12)
    # Fields are often NaN where they are not valid, and 0 * NaN is NaN.
    warped = torch.stack([(v.nan_to_num() * weight).sum(-1) for v in (x, y)], dim=-1)
    warped = torch.where(known[..., None], warped, points)
    return Warp(warped, known & _inside(warped, size), known)


def _inside(points: Tensor, size: tuple[int, int]) -> Tensor:
    h, w = size
    x, y = points[..., 0], points[..., 1]
    return (x >= -0.5) & (y >= -0.5) & (x < w - 0.5) & (y < h - 0.5)
