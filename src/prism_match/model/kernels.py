"""What PyTorch has no single operation for, each in its plain form; on a GPU the one of `triton_kernels`."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    from prism_match.model import triton_kernels
except ImportError:  # no Triton here, which is so on every machine without a GPU
    triton_kernels = None  # type: ignore[assignment]


def is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def has_kernels(x: Tensor) -> bool:
    return x.is_cuda and triton_kernels is not None


@lru_cache
def has_flash(device: torch.device) -> bool:
    """Whether FlashAttention runs there: NVIDIA's GPUs since Ampere."""
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 0)


def rotate(x: Tensor, centres: Tensor, rows: Tensor, b: Tensor) -> Tensor:
    """`RotaryEncoding` of x (k heads d) at centres[rows] (n 2 and k), of frequencies b (heads d/2 2)."""
    if has_kernels(x) and is_power_of_two(x.shape[-1]):
        return triton_kernels.rotate(x, centres, rows, b)
    at = centres[rows]
    theta = b[..., 0] * at[:, None, None, 0] + b[..., 1] * at[:, None, None, 1]
    cos, sin = theta.cos().to(x.dtype), theta.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)


def add_upsampled(x: Tensor, low: Tensor) -> Tensor:
    """x (b c h w) + low (b c h/2 w/2, rounded up), bilinear, as `F.interpolate` has it."""
    if has_kernels(x):
        return triton_kernels.add_upsampled(x, low)
    up = F.interpolate(low, scale_factor=2.0, mode="bilinear", align_corners=False)
    return x + up[..., : x.shape[2], : x.shape[3]]


def attend_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    lengths: list[int],
    key_lengths: list[int],
) -> Tensor:
    """Attention within segments that lie one after the other: query: n h d; key, value: m h d; starts: where
    the segments begin, and the end, int32; lengths: theirs. No key at all gives zeros."""
    if query.shape[0] == 0 or key.shape[0] == 0:
        return torch.zeros_like(query)
    if (
        query.is_cuda
        and query.dtype != torch.float32
        and query.shape[-1] in range(8, 257, 8)
        and has_flash(query.device)
    ):
        return torch.ops.aten._flash_attention_forward(
            query, key, value, starts, key_starts, max(lengths), max(key_lengths), 0.0, False, False
        )[0]
    parts = zip(query.split(lengths), key.split(key_lengths), value.split(key_lengths), strict=True)
    return torch.cat([_attend(*part) for part in parts])


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """n h d, m h d, m h d."""
    if query.shape[0] == 0 or key.shape[0] == 0:
        return torch.zeros_like(query)
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1)
