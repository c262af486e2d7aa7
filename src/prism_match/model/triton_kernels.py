"""Fused kernels for GPUs; `kernels.py` has the plain form of each."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, TILE = 256, 16  # of a matrix, that one program goes through for its columns, so many at a time


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
        at = row.to(tl.int64)[:, None] * x_stride + head * 2 * HALF + k[None, :]
        first = tl.load(x + at, mask=there[:, None], other=0.0).to(tl.float32)
        second = tl.load(x + at + HALF, mask=there[:, None], other=0.0).to(tl.float32)
        to = row.to(tl.int64)[:, None] * (HEADS * 2 * HALF) + head * 2 * HALF + k[None, :]
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


@triton.jit
def _nearest(points, behind, out, n, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    there = (at < n) & (at != row)
    x = tl.load(points + 2 * at, mask=there, other=0.0) - tl.load(points + 2 * row)
    y = tl.load(points + 2 * at + 1, mask=there, other=0.0) - tl.load(points + 2 * row + 1)
    distance = tl.sqrt(x * x + y * y) + tl.load(behind + at, mask=there, other=float("inf"))
    for found in range(COUNT):
        best = tl.argmin(distance, axis=0)  # of equals the first
        tl.store(out + row.to(tl.int64) * COUNT + found, best)
        distance = tl.where(at == best, float("inf"), distance)


MOST_POINTS = 2**16  # whose distances one program of `nearest` holds


def nearest(points: Tensor, behind: Tensor, count: int) -> Tensor:
    """n count, int32: the other points (n 2, at most MOST_POINTS) that are nearest to each, where `behind`
    (n) is added to the distance of each as a neighbour. Their matrix of distances is held nowhere."""
    n = len(points)
    out = torch.empty((n, count), dtype=torch.int32, device=points.device)
    if n:
        block = max(1024, triton.next_power_of_2(n))
        with torch.cuda.device(points.device):
            _nearest[(n,)](
                points.contiguous(), behind.contiguous(), out, n,
                COUNT=count, BLOCK=block, num_warps=min(max(block // 1024, 4), 32),
            )  # fmt: skip
    return out


@triton.jit
def _fitted(
    points0, points1, near, affine, misfit, away, n, half_weight, most_misfit, most_turned,
    COUNT: tl.constexpr, WIDE: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, WIDE)[None, :]
    inside = row < n
    there = inside[:, None] & (k < COUNT)
    at = tl.load(near + row.to(tl.int64)[:, None] * COUNT + k, mask=there, other=0)
    x0 = tl.load(points0 + 2 * at, mask=there, other=0.0)
    y0 = tl.load(points0 + 2 * at + 1, mask=there, other=0.0)
    x1 = tl.load(points1 + 2 * at, mask=there, other=0.0)
    y1 = tl.load(points1 + 2 * at + 1, mask=there, other=0.0)
    x0 = tl.where(there, x0 - tl.load(points0 + 2 * row, mask=inside, other=0.0)[:, None], 0.0)
    y0 = tl.where(there, y0 - tl.load(points0 + 2 * row + 1, mask=inside, other=0.0)[:, None], 0.0)
    x1 = tl.where(there, x1 - tl.load(points1 + 2 * row, mask=inside, other=0.0)[:, None], 0.0)
    y1 = tl.where(there, y1 - tl.load(points1 + 2 * row + 1, mask=inside, other=0.0)[:, None], 0.0)
    weight = tl.where(there, 1.0, 0.0)
    for n_round in tl.static_range(ROUNDS + 1):
        wx = weight * x0
        wy = weight * y0
        a = tl.sum(wx * x0, axis=1)
        b = tl.sum(wx * y0, axis=1)
        c = tl.sum(wy * y0, axis=1)
        det = tl.maximum(a * c - b * b, 1e-3)
        xx = tl.sum(x1 * wx, axis=1)
        xy = tl.sum(x1 * wy, axis=1)
        yx = tl.sum(y1 * wx, axis=1)
        yy = tl.sum(y1 * wy, axis=1)
        m00 = (xx * c - xy * b) / det
        m01 = (xy * a - xx * b) / det
        m10 = (yx * c - yy * b) / det
        m11 = (yy * a - yx * b) / det
        rest_x = x1 - m00[:, None] * x0 - m01[:, None] * y0
        rest_y = y1 - m10[:, None] * x0 - m11[:, None] * y0
        square = rest_x * rest_x + rest_y * rest_y
        if n_round < ROUNDS:
            weight = tl.where(there, 1 / (1 + square / (half_weight * half_weight)), 0.0)
    error = tl.sum(tl.sqrt_rn(square) * weight, axis=1) / tl.sum(weight, axis=1)
    far = tl.sum(tl.sqrt_rn(x0 * x0 + y0 * y0), axis=1) / COUNT
    turned = m00 * m11 - m01 * m10
    sound = (error < most_misfit * far) & (turned > 1 / most_turned) & (turned < most_turned)
    tl.store(affine + 4 * row, tl.where(sound, m00, 1.0), mask=inside)
    tl.store(affine + 4 * row + 1, tl.where(sound, m01, 0.0), mask=inside)
    tl.store(affine + 4 * row + 2, tl.where(sound, m10, 0.0), mask=inside)
    tl.store(affine + 4 * row + 3, tl.where(sound, m11, 1.0), mask=inside)
    tl.store(misfit + row, tl.where(sound, error, float("inf")), mask=inside)
    tl.store(away + row, far, mask=inside)


def fitted(
    points0: Tensor, points1: Tensor, near: Tensor, rounds: int, half: float, most: float, turned: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What `polish.fitted_affine` gives for the neighbours (n k) of each point, and how far they are (n).
    half, most, turned: `MISFIT`, `UNFIT` and `TURNED` there."""
    n, count = near.shape
    affine, misfit, away = (torch.empty(n, *more, device=points0.device) for more in ((2, 2), (), ()))
    block = 16
    if n:
        with torch.cuda.device(points0.device):
            _fitted[(triton.cdiv(n, block),)](
                points0.contiguous(), points1.contiguous(), near, affine, misfit, away, n, half, most, turned,
                COUNT=count, WIDE=triton.next_power_of_2(count), ROUNDS=rounds, BLOCK=block, num_warps=1,
            )  # fmt: skip
    return affine, misfit, away


@triton.jit
def _normaliser(window, there, FLAT: tl.constexpr, COUNT: tl.constexpr):
    """What a window's pixels have to be moved and multiplied by."""
    mean = tl.sum(tl.where(there, window, 0.0), axis=0) / COUNT
    centred = tl.where(there, window - mean, 0.0)
    return mean, 1 / tl.sqrt(tl.sum(centred * centred, axis=0) / COUNT + FLAT * FLAT)


@triton.jit
def _compared(first, second, there, k, FLAT: tl.constexpr, SIDE: tl.constexpr):
    """Both windows, and the gradient of their mean; first, second: where they begin."""
    a = tl.load(first + k, mask=there, other=0.0)
    b = tl.load(second + k, mask=there, other=0.0)
    mean0, scale0 = _normaliser(a, there, FLAT, SIDE * SIDE)
    mean1, scale1 = _normaliser(b, there, FLAT, SIDE * SIDE)
    x = k % SIDE
    y = k // SIDE
    left = y * SIDE + tl.maximum(x - 1, 0)
    right = y * SIDE + tl.minimum(x + 1, SIDE - 1)
    above = tl.maximum(y - 1, 0) * SIDE + x
    below = tl.minimum(y + 1, SIDE - 1) * SIDE + x
    # The means go out of a difference.
    gx = scale0 * (tl.load(first + right, mask=there) - tl.load(first + left, mask=there))
    gx += scale1 * (tl.load(second + right, mask=there) - tl.load(second + left, mask=there))
    gy = scale0 * (tl.load(first + below, mask=there) - tl.load(first + above, mask=there))
    gy += scale1 * (tl.load(second + below, mask=there) - tl.load(second + above, mask=there))
    return (a - mean0) * scale0, (b - mean1) * scale1, gx / 4, gy / 4


@triton.jit
def _compare(
    first, second, out, FLAT: tl.constexpr, SIDE: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    there = k < SIDE * SIDE
    at = row * SIDE * SIDE
    a, b, gx, gy = _compared(first + at, second + at, there, k, FLAT, SIDE)
    d = (b - a)[:, None]
    gx = gx[:, None]
    gy = gy[:, None]
    c = tl.arange(0, CHANNELS)[None, :]
    value = tl.where(c == 0, a[:, None], tl.where(c == 1, b[:, None], tl.where(c == 2, d, 0.0)))
    value = tl.where(c == 3, gx, tl.where(c == 4, gy, value))
    value = tl.where(c == 5, gx * d, tl.where(c == 6, gy * d, value))
    value = tl.where(c == 7, gx * gx, tl.where(c == 8, gy * gy, tl.where(c == 9, gx * gy, value)))
    to = out + (at + k[:, None]) * CHANNELS + c
    tl.store(to, value.to(out.dtype.element_ty), mask=there[:, None])


def compare(first: Tensor, second: Tensor, flat: float, channels: int, dtype: torch.dtype) -> Tensor:
    """n channels w w, channels last; those after the tenth are 0."""
    n, side, _ = first.shape
    out = torch.empty((n, side, side, channels), dtype=dtype, device=first.device)
    if n:
        with torch.cuda.device(first.device):
            _compare[(n,)](
                first, second, out,
                FLAT=flat, SIDE=side, CHANNELS=channels, BLOCK=triton.next_power_of_2(side * side),
            )  # fmt: skip
    return out.permute(0, 3, 1, 2)


@triton.jit
def _solve(
    first, second, logit, out, FLAT: tl.constexpr, STD: tl.constexpr, DAMPING: tl.constexpr,
    SIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    there = k < SIDE * SIDE
    at = row * SIDE * SIDE
    a, b, gx, gy = _compared(first + at, second + at, there, k, FLAT, SIDE)
    x = (k % SIDE - SIDE // 2).to(tl.float32)
    y = (k // SIDE - SIDE // 2).to(tl.float32)
    told = tl.load(logit + at + k, mask=there, other=0.0).to(tl.float32)
    weight = tl.exp(tl.minimum(tl.maximum(told, -8.0), 8.0) - (x * x + y * y) / (2 * STD * STD))
    weight = tl.where(there, weight, 0.0)
    weight = weight / tl.sum(weight, axis=0)
    d = b - a
    gx = tl.where(there, gx, 0.0)
    gy = tl.where(there, gy, 0.0)
    xd = tl.sum(weight * gx * d, axis=0)
    yd = tl.sum(weight * gy * d, axis=0)
    xx = tl.sum(weight * gx * gx, axis=0) + DAMPING
    yy = tl.sum(weight * gy * gy, axis=0) + DAMPING
    xy = tl.sum(weight * gx * gy, axis=0)
    det = xx * yy - xy * xy
    tl.store(out + 2 * row, (xy * yd - yy * xd) / det)
    tl.store(out + 2 * row + 1, (xy * xd - xx * yd) / det)


def solve(first: Tensor, second: Tensor, logit: Tensor, flat: float, std: float, damping: float) -> Tensor:
    """logit: n w*w. n 2."""
    n, side, _ = first.shape
    out = torch.empty((n, 2), device=first.device)
    if n:
        with torch.cuda.device(first.device):
            _solve[(n,)](
                first, second, logit.contiguous(), out, FLAT=flat, STD=std, DAMPING=damping, SIDE=side,
                BLOCK=triton.next_power_of_2(side * side),
            )  # fmt: skip
    return out


@triton.jit
def _gelu(x):
    """With the error function as a quotient of polynomials, off by 4e-7 at most: CUDA's own takes longer than
    memory does."""
    z = tl.minimum(tl.maximum(x * 0.7071067811865476, -4.0), 4.0)
    s = z * z
    above = -2.72614225801306e-10 * s + 2.77068142495902e-08
    above = above * s - 2.10102402082508e-06
    above = above * s - 5.69250639462346e-05
    above = above * s - 7.34990630326855e-04
    above = above * s - 2.95459980854025e-03
    above = above * s - 1.60960333262415e-02
    below = -1.45660718464996e-05 * s - 2.13374055278905e-04
    below = below * s - 1.68282697438203e-03
    below = below * s - 7.37332916720468e-03
    below = below * s - 1.42647390514189e-02
    return 0.5 * x * (1 + z * above / below)


@triton.jit
def _activate(
    x, bias, residual, out, slope, n,
    C: tl.constexpr, RESIDUAL: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < n
    value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    value += tl.load(bias + at % C, mask=there, other=0.0).to(tl.float32)
    if RESIDUAL:
        value += tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
    value = _gelu(value) if GELU else tl.where(value > 0, value, slope * value)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=there)


def activate(
    x: Tensor,
    bias: Tensor,
    residual: Tensor | None = None,
    slope: float = 0.0,
    gelu: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """In the place of x, unless it is to be of another type."""
    x = x.contiguous(memory_format=torch.channels_last)
    out = x if dtype in (None, x.dtype) else torch.empty_like(x, dtype=dtype)
    if residual is not None:
        residual = residual.contiguous(memory_format=torch.channels_last)
    block = 1024
    with torch.cuda.device(x.device):
        _activate[(triton.cdiv(x.numel(), block),)](
            x, bias, x if residual is None else residual, out, slope, x.numel(),
            C=x.shape[1], RESIDUAL=residual is not None, GELU=gelu, BLOCK=block,
        )  # fmt: skip
    return out


@triton.jit
def _attend_windows(
    query, value, out, scale, q_window, q_token, q_head, v_window, v_token, v_head,
    K: tl.constexpr, M: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    window = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    k = tl.arange(0, BK)
    m = tl.arange(0, BM)
    d = tl.arange(0, D)
    at_q = query + window * q_window + head * q_head + k[:, None] * q_token + d[None, :]
    q = tl.load(at_q, mask=k[:, None] < K, other=0.0)
    at_v = value + window * v_window + head * v_head + m[:, None] * v_token + d[None, :]
    v = tl.load(at_v, mask=m[:, None] < M, other=0.0)
    s = tl.dot(q, tl.trans(v)).to(tl.float32) * scale
    s = tl.where(m[None, :] < M, s, float("-inf"))
    p = tl.exp(s - tl.max(s, axis=1)[:, None])
    p = p / tl.sum(p, axis=1)[:, None]
    message = tl.dot(p.to(v.dtype), v)
    to = out + ((window * K + k[:, None]) * H + head) * D + d[None, :]
    tl.store(to, message.to(out.dtype.element_ty), mask=k[:, None] < K)


def attend_windows(query: Tensor, value: Tensor) -> Tensor:
    n, k, heads, dim = query.shape
    out = torch.empty((n, k, heads, dim), dtype=query.dtype, device=query.device)
    if n == 0:
        return out
    with torch.cuda.device(query.device):
        _attend_windows[(n, heads)](
            query, value, out, dim**-0.5, *query.stride()[:3], *value.stride()[:3],
            K=k, M=value.shape[1], H=heads, D=dim,
            BK=max(16, triton.next_power_of_2(k)), BM=max(16, triton.next_power_of_2(value.shape[1])),
            num_warps=1,
        )  # fmt: skip
    return out


@triton.jit
def _row_sums(s, out, scale, m, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, m, BLOCK):
        value = scale * tl.load(s + row * stride + start + k, mask=start + k < m, other=float("-inf"))
        higher = tl.maximum(highest, value)
        # A lane that has seen nothing yet must not take -inf from -inf.
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(highest - safe) + tl.exp(value - safe)
        highest = higher
    top = tl.max(highest, axis=0)
    tl.store(out + row, top + tl.log(tl.sum(total * tl.exp(highest - top), axis=0)))


@triton.jit
def _column_sums(
    s, highest_out, total_out, scale, n, m, stride,
    ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = column < m
    first = tl.program_id(1) * ROWS
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, ROWS, TILE):
        row = (first + start + tl.arange(0, TILE)).to(tl.int64)
        inside = there[None, :] & (row < n)[:, None]
        at = s + row[:, None] * stride + column[None, :]
        value = scale * tl.load(at, mask=inside, other=float("-inf"))
        higher = tl.maximum(highest, tl.max(value, axis=0))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(highest - safe) + tl.sum(tl.exp(value - safe[None, :]), axis=0)
        highest = higher
    to = tl.program_id(1) * m + column
    tl.store(highest_out + to, highest, mask=there)
    tl.store(total_out + to, total, mask=there)


def log_sum_exp(s: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    n, m = s.shape
    rows, parts = torch.empty(n, device=s.device), triton.cdiv(n, ROWS)
    highest, total = torch.empty((2, parts, m), device=s.device)
    with torch.cuda.device(s.device):
        _row_sums[(n,)](s, rows, scale, m, s.stride(0), BLOCK=1024)
        _column_sums[(triton.cdiv(m, 128), parts)](
            s, highest, total, scale, n, m, s.stride(0), ROWS=ROWS, TILE=TILE, BLOCK=128
        )
    return rows, (highest + total.log()).logsumexp(dim=0)


@triton.jit
def _row_best(s, rows, columns, best_out, arg_out, scale, m, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    where = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, m, BLOCK):
        there = start + k < m
        value = 2 * scale * tl.load(s + row * stride + start + k, mask=there, other=float("-inf"))
        value += tl.load(columns + start + k, mask=there, other=0.0)
        better = value > best
        best = tl.where(better, value, best)
        where = tl.where(better, start + k, where)
    top = tl.max(best, axis=0)
    # The first of equals.
    place = tl.min(tl.where(best == top, where, m), axis=0)
    tl.store(best_out + row, top + tl.load(rows + row))
    tl.store(arg_out + row, place.to(tl.int64))


@triton.jit
def _column_best(
    s, rows, columns, best_out, arg_out, scale, n, m, stride,
    ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = column < m
    first = tl.program_id(1) * ROWS
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    where = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, ROWS, TILE):
        row = first + start + tl.arange(0, TILE)
        inside = there[None, :] & (row < n)[:, None]
        at = s + row.to(tl.int64)[:, None] * stride + column[None, :]
        value = 2 * scale * tl.load(at, mask=inside, other=float("-inf"))
        value += tl.load(rows + row, mask=row < n, other=0.0)[:, None]
        top = tl.max(value, axis=0)
        place = tl.min(tl.where(value == top[None, :], row[:, None], n), axis=0)  # the first of equals
        where = tl.where(top > best, place, where)
        best = tl.maximum(best, top)
    own = tl.load(columns + column, mask=there, other=0.0)
    to = tl.program_id(1) * m + column
    tl.store(best_out + to, best + own, mask=there)
    tl.store(arg_out + to, where.to(tl.int64), mask=there)


def best_of(s: Tensor, rows: Tensor, columns: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, m = s.shape
    parts = triton.cdiv(n, ROWS)
    row_best, row_arg = torch.empty(n, device=s.device), torch.empty(n, dtype=torch.int64, device=s.device)
    best = torch.empty((parts, m), device=s.device)
    arg = torch.empty((parts, m), dtype=torch.int64, device=s.device)
    with torch.cuda.device(s.device):
        _row_best[(n,)](s, rows, columns, row_best, row_arg, scale, m, s.stride(0), BLOCK=1024)
        _column_best[(triton.cdiv(m, 128), parts)](
            s, rows, columns, best, arg, scale, n, m, s.stride(0), ROWS=ROWS, TILE=TILE, BLOCK=128
        )
    column_best, part = best.max(dim=0)
    return row_best, row_arg, column_best, arg.gather(0, part[None])[0]


@triton.jit
def _sums_of_others(
    tokens, out, ends, scale, half, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    segment = tl.program_id(1)
    start = tl.load(ends + segment - 1, mask=segment > 0, other=0)
    end = tl.load(ends + segment)
    row = start + tl.program_id(0) * BM + tl.arange(0, BM)
    if start + tl.program_id(0) * BM >= end:
        return
    seen = tl.where(segment < half, segment + half, segment - half)
    first = tl.load(ends + seen - 1, mask=seen > 0, other=0)
    count = (tl.load(ends + seen) - first).to(tl.int32)
    c = tl.arange(0, C)
    n = tl.arange(0, BN)
    q = tl.load(tokens + row[:, None] * C + c[None, :], mask=row[:, None] < end, other=0.0)
    at = tokens + (first + n)[None, :] * C + c[:, None]
    highest = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    for begin in range(0, count, BN):
        there = begin + n < count
        s = tl.dot(q, tl.load(at, mask=there[None, :], other=0.0)) * (scale * 1.4426950408889634)
        s = tl.where(there[None, :], s, float("-inf"))
        higher = tl.maximum(highest, tl.max(s, 1))
        total = total * tl.exp2(highest - higher) + tl.sum(tl.exp2(s - higher[:, None]), 1)
        highest = higher
        at += BN * C
    tl.store(out + row, (highest + tl.log2(total)) * 0.6931471805599453, mask=row < end)


@triton.jit
def _best_of_others(
    tokens, term, best_out, arg_out, ends, scale, half, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    segment = tl.program_id(1)
    start = tl.load(ends + segment - 1, mask=segment > 0, other=0)
    end = tl.load(ends + segment)
    row = start + tl.program_id(0) * BM + tl.arange(0, BM)
    if start + tl.program_id(0) * BM >= end:
        return
    seen = tl.where(segment < half, segment + half, segment - half)
    first = tl.load(ends + seen - 1, mask=seen > 0, other=0)
    count = (tl.load(ends + seen) - first).to(tl.int32)
    c = tl.arange(0, C)
    n = tl.arange(0, BN)
    q = tl.load(tokens + row[:, None] * C + c[None, :], mask=row[:, None] < end, other=0.0)
    at = tokens + (first + n)[None, :] * C + c[:, None]
    best = tl.full((BM, BN), float("-inf"), tl.float32)
    where = tl.zeros((BM, BN), tl.int32)
    for begin in range(0, count, BN):
        there = begin + n < count
        own = tl.load(term + first + begin + n, mask=there, other=float("-inf"))
        s = tl.dot(q, tl.load(at, mask=there[None, :], other=0.0))
        value = 2 * scale * s + own[None, :]
        better = value > best
        best = tl.where(better, value, best)
        where = tl.where(better, begin + n[None, :], where)
        at += BN * C
    top = tl.max(best, 1)
    place = tl.min(tl.where(best == top[:, None], where, count), 1)  # the first of equals
    there = (row < end) & (count > 0)
    tl.store(best_out + row, top + tl.load(term + row, mask=there, other=0.0), mask=there)
    tl.store(arg_out + row, first + place, mask=there)


def best_partners(
    tokens: Tensor, bonus: Tensor, ends: Tensor, most: int, scale: float
) -> tuple[Tensor, Tensor]:
    n, channels = tokens.shape
    sums, best = torch.zeros(n, device=tokens.device), torch.full((n,), -torch.inf, device=tokens.device)
    arg = torch.zeros(n, dtype=torch.int64, device=tokens.device)
    # GPUs before Ampere have no room for more in their shared memory.
    recent = torch.cuda.get_device_capability(tokens.device) >= (8, 0)
    block, others = (64, 64) if recent else (16, 32)
    segments = len(ends)
    grid = (triton.cdiv(most, block), segments)
    sizes = {"C": channels, "BM": block, "BN": others, "num_warps": 4, "num_stages": 2}
    with torch.cuda.device(tokens.device):
        _sums_of_others[grid](tokens, sums, ends, scale, segments // 2, **sizes)
        _best_of_others[grid](tokens, bonus - sums, best, arg, ends, scale, segments // 2, **sizes)
    return best, arg


@triton.jit
def _largest_squares(key, key_ends, out, k_row, segments, D: tl.constexpr, BLOCK: tl.constexpr):
    """The largest squared length of the keys of each head, where zeros were."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    there = row < tl.load(key_ends + segments - 1)
    at = key + row.to(tl.int64)[:, None] * k_row + head * D + tl.arange(0, D)[None, :]
    k = tl.load(at, mask=there[:, None], other=0.0).to(tl.float32)
    tl.atomic_max(out + head, tl.max(tl.sum(k * k, 1), 0))


@triton.jit
def _attend_keys(
    q, at_k, at_v, count, scale, k_row, v_row, highest,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, RISES: tl.constexpr,
):  # fmt: skip
    """The sum of all weights, and that of the values times them. RISES: the highest score of each query is
    sought as it goes; else no score is far above the given one."""
    total = tl.zeros((BM,), tl.float32)
    message = tl.zeros((BM, D), tl.float32)
    whole = count // BN * BN
    for _ in range(0, whole, BN):
        s = tl.dot(q, tl.load(at_k))
        v = tl.load(at_v)
        at_k += BN * k_row
        at_v += BN * v_row
        if RISES:
            higher = tl.maximum(highest, tl.max(s, 1) * scale)
            fading = tl.exp2(highest - higher)
            total = total * fading
            message = message * fading[:, None]
            highest = higher
        p = tl.exp2(s * scale - highest[:, None])
        total += tl.sum(p, 1)
        message = tl.dot(p.to(q.dtype), v, message)
    if whole < count:
        there = whole + tl.arange(0, BN) < count
        s = tl.dot(q, tl.load(at_k, mask=there[None, :], other=0.0)) * scale
        s = tl.where(there[None, :], s, -1e30)
        v = tl.load(at_v, mask=there[:, None], other=0.0)
        if RISES:
            higher = tl.maximum(highest, tl.max(s, 1))
            fading = tl.exp2(highest - higher)
            total = total * fading
            message = message * fading[:, None]
            highest = higher
        p = tl.where(there[None, :], tl.exp2(s - highest[:, None]), 0.0)
        total += tl.sum(p, 1)
        message = tl.dot(p.to(q.dtype), v, message)
    return total, message


@triton.jit
def _attend_segments(
    query, key, value, out, ends, key_ends, squares, scale, q_row, k_row, v_row, half,
    H: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BOUNDED: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(2)
    head = tl.program_id(1)
    q0 = tl.load(ends + segment - 1, mask=segment > 0, other=0)
    q_end = tl.load(ends + segment)
    row = q0 + tl.program_id(0) * BM + tl.arange(0, BM)
    if q0 + tl.program_id(0) * BM >= q_end:
        return
    seen = tl.where(segment < half, segment + half, segment - half)
    if half == 0:
        seen = segment
    k0 = tl.load(key_ends + seen - 1, mask=seen > 0, other=0)
    count = (tl.load(key_ends + seen) - k0).to(tl.int32)
    d = tl.arange(0, D)
    n = tl.arange(0, BN)
    q = tl.load(query + row[:, None] * q_row + head * D + d[None, :], mask=row[:, None] < q_end, other=0.0)
    at_k = key + (k0 + n)[None, :] * k_row + head * D + d[:, None]
    at_v = value + (k0 + n)[:, None] * v_row + head * D + d[None, :]
    highest = tl.full((BM,), -1e30, tl.float32)
    if BOUNDED:
        # No score is above |q| |k|. Where that is not far above the highest of the first keys, powers of two
        # of what is above them can be held as they are, and nothing has to be sought or scaled any more.
        s = tl.dot(q, tl.load(at_k, mask=n[None, :] < count, other=0.0)) * scale
        first = tl.max(tl.where(n[None, :] < count, s, -1e30), 1)
        wide = q.to(tl.float32)
        bound = tl.sqrt(tl.sum(wide * wide, 1) * tl.load(squares + head)) * scale
        if tl.max(bound - first, 0) < MOST:
            total, message = _attend_keys(
                q, at_k, at_v, count, scale, k_row, v_row, first, D, BM, BN, RISES=False
            )
        else:
            total, message = _attend_keys(
                q, at_k, at_v, count, scale, k_row, v_row, highest, D, BM, BN, RISES=True
            )
    else:
        total, message = _attend_keys(
            q, at_k, at_v, count, scale, k_row, v_row, highest, D, BM, BN, RISES=True
        )
    message = message / tl.maximum(total, 1e-30)[:, None]
    to = out + (row[:, None] * H + head) * D + d[None, :]
    tl.store(to, message.to(out.dtype.element_ty), mask=row[:, None] < q_end)


# So many keys make it worth while to look for the longest of them first; and two to that power is the largest
# weight of which float32 and bfloat16 hold the sum over as many keys as there can be.
MANY_KEYS, HIGHEST_POWER = 1024, 100


def attend_segments(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, key_ends: Tensor, crossed: bool, most: int
) -> Tensor:
    n, heads, dim = query.shape
    out = torch.empty((n, heads, dim), dtype=query.dtype, device=query.device)
    if n == 0:
        return out
    segments, block = len(ends), 64  # none of 45 settings was faster on an H200
    bounded = query.dtype == torch.bfloat16 and len(key) >= MANY_KEYS
    squares = torch.zeros(heads, device=query.device) if bounded else query  # which is not read then
    with torch.cuda.device(query.device):
        if bounded:
            _largest_squares[(triton.cdiv(len(key), 128), heads)](
                key, key_ends, squares, key.stride(0), segments, D=dim, BLOCK=128
            )
        _attend_segments[(triton.cdiv(most, block), heads, segments)](
            query, key, value, out, ends, key_ends, squares, dim**-0.5 / math.log(2),
            query.stride(0), key.stride(0), value.stride(0), segments // 2 if crossed else 0,
            H=heads, D=dim, BM=block, BN=64, BOUNDED=bounded, MOST=HIGHEST_POWER,
            num_warps=4, num_stages=3,
        )  # fmt: skip
    return out


@triton.jit
def _norm_gelu(x, weight, bias, eps, n, C: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, C)
    at = x + row.to(tl.int64)[:, None] * C + c[None, :]
    there = (row < n)[:, None]
    value = tl.load(at, mask=there, other=0.0).to(tl.float32)
    value = value - tl.sum(value, axis=1)[:, None] / C
    deviation = tl.sqrt(tl.sum(value * value, axis=1) / C + eps)
    w = tl.load(weight + c).to(tl.float32)
    b = tl.load(bias + c).to(tl.float32)
    value = value / deviation[:, None] * w[None, :] + b[None, :]
    tl.store(at, _gelu(value).to(x.dtype.element_ty), mask=there)


def norm_gelu(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """In the place of x (n c), c a power of two."""
    n, channels = x.shape
    block = 4
    if n:
        with torch.cuda.device(x.device):
            _norm_gelu[(triton.cdiv(n, block),)](x, weight, bias, eps, n, C=channels, BLOCK=block)
    return x
