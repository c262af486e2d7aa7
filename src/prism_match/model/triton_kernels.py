"""Fused kernels for GPUs; `kernels.py` has the plain form of each."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate(
    x, centres, rows, b, out, x_stride, n,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < n
    place = tl.load(rows + row, mask=there, other=0)
    cx = tl.load(centres + 2 * place, mask=there, other=0.0)
    cy = tl.load(centres + 2 * place + 1, mask=there, other=0.0)
    k = tl.arange(0, HALF)
    for head in tl.static_range(HEADS):
        bx = tl.load(b + 2 * (head * HALF + k))
        by = tl.load(b + 2 * (head * HALF + k) + 1)
        theta = bx[None, :] * cx[:, None] + by[None, :] * cy[:, None]
        cos, sin = tl.cos(theta), tl.sin(theta)
        at = row[:, None] * x_stride + head * 2 * HALF + k[None, :]
        first = tl.load(x + at, mask=there[:, None], other=0.0).to(tl.float32)
        second = tl.load(x + at + HALF, mask=there[:, None], other=0.0).to(tl.float32)
        to = row[:, None] * (HEADS * 2 * HALF) + head * 2 * HALF + k[None, :]
        kind = out.dtype.element_ty
        tl.store(out + to, (first * cos + second * sin).to(kind), mask=there[:, None])
        tl.store(out + to + HALF, (second * cos - first * sin).to(kind), mask=there[:, None])


def rotate(x: Tensor, centres: Tensor, rows: Tensor, b: Tensor) -> Tensor:
    n, heads, dim = x.shape
    out = torch.empty((n, heads, dim), dtype=x.dtype, device=x.device)
    if n == 0:
        return out
    block = 16
    with torch.cuda.device(x.device):  # a kernel runs on the current one, wherever its tensors are
        _rotate[(triton.cdiv(n, block),)](
            x, centres, rows, b, out, x.stride(0), n, HEADS=heads, HALF=dim // 2, BLOCK=block
        )
    return out


@triton.jit
def _add_upsampled(x, low, out, height, width, low_height, low_width, C: tl.constexpr, BLOCK: tl.constexpr):
    pixel = tl.program_id(0)
    image = tl.program_id(1)
    y = pixel // width
    at_x = pixel % width
    # The centre of an output pixel lies at (y + 0.5) / 2 - 0.5 of the smaller map.
    y0 = (y + 1) // 2 - 1
    x0 = (at_x + 1) // 2 - 1
    wy = tl.where(y % 2 == 0, 0.75, 0.25)
    wx = tl.where(at_x % 2 == 0, 0.75, 0.25)
    top = tl.maximum(y0, 0)
    bottom = tl.minimum(y0 + 1, low_height - 1)
    left = tl.maximum(x0, 0)
    right = tl.minimum(x0 + 1, low_width - 1)
    c = tl.arange(0, BLOCK)
    there = c < C
    base = low + image.to(tl.int64) * low_height * low_width * C
    a = tl.load(base + (top * low_width + left) * C + c, mask=there, other=0.0).to(tl.float32)
    b = tl.load(base + (top * low_width + right) * C + c, mask=there, other=0.0).to(tl.float32)
    d = tl.load(base + (bottom * low_width + left) * C + c, mask=there, other=0.0).to(tl.float32)
    e = tl.load(base + (bottom * low_width + right) * C + c, mask=there, other=0.0).to(tl.float32)
    upper = a * (1 - wx) + b * wx
    lower = d * (1 - wx) + e * wx
    at = (image.to(tl.int64) * height * width + pixel) * C + c
    own = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out + at, (own + upper * (1 - wy) + lower * wy).to(out.dtype.element_ty), mask=there)


def add_upsampled(x: Tensor, low: Tensor) -> Tensor:
    x, low = (t.contiguous(memory_format=torch.channels_last) for t in (x, low))
    count, channels, height, width = x.shape
    out = torch.empty_like(x)
    with torch.cuda.device(x.device):
        _add_upsampled[(height * width, count)](
            x, low, out, height, width, *low.shape[2:],
            C=channels, BLOCK=triton.next_power_of_2(channels), num_warps=1,
        )  # fmt: skip
    return out


@triton.jit
def _windows(
    flat, table, points, to_image, level, out, unit,
    RADIUS: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    there = k < SIDE * SIDE
    gx = (k % SIDE - RADIUS).to(tl.float32)
    gy = (k // SIDE - RADIUS).to(tl.float32)
    xx = tl.load(to_image + 4 * row)
    xy = tl.load(to_image + 4 * row + 1)
    yx = tl.load(to_image + 4 * row + 2)
    yy = tl.load(to_image + 4 * row + 3)
    place = tl.load(level + row)
    start = tl.load(table + 3 * place)
    wide = tl.load(table + 3 * place + 1)
    high = tl.load(table + 3 * place + 2)
    scale = tl.exp2(-place.to(tl.float32))
    x = (tl.load(points + 2 * row) + xx * gx + xy * gy + 0.5) * scale - 0.5
    y = (tl.load(points + 2 * row + 1) + yx * gx + yy * gy + 0.5) * scale - 0.5
    x = tl.minimum(tl.maximum(x, 0.0), wide.to(tl.float32) - 1.0)
    y = tl.minimum(tl.maximum(y, 0.0), high.to(tl.float32) - 1.0)
    x0 = x.to(tl.int32)
    y0 = y.to(tl.int32)
    right = tl.where(x0 + 1 < wide, 1, 0)
    down = tl.where(y0 + 1 < high, wide, 0)
    corner = flat + start + y0 * wide + x0
    a = tl.load(corner, mask=there, other=0).to(tl.float32)
    b = tl.load(corner + right, mask=there, other=0).to(tl.float32)
    c = tl.load(corner + down, mask=there, other=0).to(tl.float32)
    d = tl.load(corner + down + right, mask=there, other=0).to(tl.float32)
    wx = x - x0.to(tl.float32)
    wy = y - y0.to(tl.float32)
    top = a + (b - a) * wx
    bottom = c + (d - c) * wx
    tl.store(out + row.to(tl.int64) * SIDE * SIDE + k, unit * (top + (bottom - top) * wy), mask=there)


def windows(
    flat: Tensor, table: Tensor, unit: float, points: Tensor, to_image: Tensor, level: Tensor, radius: int
) -> Tensor:
    n, side = len(points), 2 * radius + 1
    out = torch.empty((n, side, side), device=points.device)
    if n == 0:
        return out
    with torch.cuda.device(points.device):
        _windows[(n,)](
            flat, table, points.contiguous(), to_image.contiguous(), level, out, unit,
            RADIUS=radius, SIDE=side, BLOCK=triton.next_power_of_2(side * side),
        )  # fmt: skip
    return out
