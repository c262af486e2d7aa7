"""Where a cell is: rotary encoding with learned frequencies."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def normalised_centres(extent: Tensor, height: int, width: int, level: int) -> Tensor:
    """Centres of a map's cells at 1/`level` of its resolution, in a frame where the longer side of
    the image spans two units, so that positions mean the same at every image size.

    extent: b 2, rows and columns of the map that are not padding. Returns b (h/level * w/level) 2,
    as (x, y). Only differences of positions matter to the rotary encoding, so 0 is at a corner."""
    return cell_grid(height, width, level, extent.device) * frame_scale(extent)[:, None, None]


def cell_grid(height: int, width: int, level: int, device: torch.device) -> Tensor:
    """(h/level * w/level) 2: the same centres, as (x, y) in cells of the map itself."""
    y = torch.arange(height // level, device=device) * level + level / 2
    x = torch.arange(width // level, device=device) * level + level / 2
    return torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1).reshape(-1, 2)


def frame_scale(extent: Tensor) -> Tensor:
    """b: what makes the longer side of an extent (b 2) two units long."""
    return 2 / extent.amax(dim=1).clamp(min=1).float()


def turn(x: Tensor, b: Tensor, at: Tensor) -> Tensor:
    """x (... d) turned by theta = b . at (... d/2 2 and ... 1 2, broadcast), in its own dtype."""
    # Angles reach 80 radians: a product of matrices in bf16 or TF32 would be off by up to half a one.
    theta = b[..., 0] * at[..., 0] + b[..., 1] * at[..., 1]
    cos, sin = theta.cos().to(x.dtype), theta.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    # R(-theta) on both sides leaves R(theta_i - theta_j) in the product, as the paper has it.
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)


class RotaryEncoding(nn.Module):
    """Turns each pair of channels k by theta = b_k . (x, y); the product of a turned query and a
    turned key then depends on their relative position alone: Q_i^T R(x_i - x_j, y_i - y_j) K_j."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        # Directions spread by the golden angle, wavelengths from the whole image to a few cells.
        k = torch.arange(dim // 2)
        angle = k * math.pi * (3 - math.sqrt(5))
        magnitude = torch.logspace(0, math.log10(40), dim // 2 // heads).repeat(heads)
        b = torch.stack([angle.cos(), angle.sin()], dim=-1) * magnitude[:, None]
        self.b = nn.Parameter(b.reshape(heads, dim // 2 // heads, 2))

    def forward(self, x: Tensor, centres: Tensor) -> Tensor:
        """x: b heads n d; centres: b n 2. Returns x turned, in its own dtype."""
        return turn(x, self.b.float()[:, None], centres[:, None, :, None])
