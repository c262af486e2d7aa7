"""Matches made exact: a small network sees each as two aligned windows, and tells how far off it is, and how
sure that is.

The refinement of the paper tells where a point is to about half a pixel. The images themselves tell it
better: the windows around both ends of a match, brought to one frame, show by how much one has to be moved.
Least squares alone is drawn aside by whatever differs for another reason: relief, shadows, the edge of
something nearer, blur in one photo only. The network weighs the pixels of the windows before the least
squares, corrects what they give, and states the error that is left. It has learnt all of this from pairs with
exact truth.

Windows are sampled at the scale of the coarser photo and along the local affine map between the two, so that
zoom and turn are gone before the network looks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism_match.model.arithmetic import inference
from prism_match.model.kernels import convolve, has_kernels, triton_kernels
from prism_match.model.recorder import Recorder, round_count

RADIUS = 8  # of the window, in its own pixels
SIDE = 2 * RADIUS + 1
WINDOW_STD = 4.2  # window pixels: of the weights of its pixels before anything is learnt
DAMPING = 3e-2  # on the normal equations: along an edge nothing is known
LONGEST = 3.0  # window pixels, of one step
FLAT = 0.008  # deviation of the brightness (of 1) below which a window is taken to be noise
LEVELS = 4  # of an image's pyramid: changes of scale up to eight are sampled without aliasing
CLOSE = 1.5  # times the size that was matched: what polishing may begin at
ROUNDS = 2
# Rounds of polishing: the first time matches may be off by pixels, at each larger size by less than one.
FIRST_ROUNDS, MORE_ROUNDS = 3, 2
CHANNELS = 10  # that `comparison` makes of two windows
AT_ONCE = 8192  # matches
AT_ONCE_ON_CPU = 128  # so that what lies between two layers stays in its caches


class Subpixel(nn.Module):
    """Two windows -> the step that brings the second onto the first, and the error expected after it."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.channels = CHANNELS  # of what the first convolution takes; those after these are 0
        self.whole = nn.Sequential(ConvGELU(CHANNELS, width), ConvGELU(width, width))
        self.halved = nn.Sequential(ConvGELU(width, 2 * width, stride=2), ConvGELU(2 * width, 2 * width))
        self.quartered = ConvGELU(2 * width, 2 * width, stride=2)
        self.weight = nn.ModuleList([nn.Conv2d(dim, 1, 1) for dim in (width, 2 * width, 2 * width)])
        last = nn.Linear(4 * width, 3)
        seen = 2 * width * (-(-SIDE // 4)) ** 2
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(seen, 4 * width), nn.GELU(), last)
        self.register_buffer("enlarge1", enlarging(-(-SIDE // 2)), persistent=False)
        self.register_buffer("enlarge2", enlarging(-(-SIDE // 4)), persistent=False)
        for layer in (*self.weight, last):  # it begins as plain least squares
            nn.init.zeros_(layer.weight)  # type: ignore[arg-type]
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """n w w each. The step n 2 (x, y) and the expected error n after it, both in window pixels."""
        # The convolutions have the precision of their weights; what is solved stays in 32 bit.
        kind = next(self.parameters()).dtype
        fused = not torch.is_grad_enabled() and has_kernels(first)
        if fused:
            compared = triton_kernels.compare(first, second, FLAT, self.channels, kind)
        else:
            compared = F.pad(comparison(first, second), (0, 0, 0, 0, 0, self.channels - CHANNELS))
        maps = [self.whole(compared.to(kind, memory_format=torch.channels_last))]
        maps += [self.halved(maps[0])]
        maps += [self.quartered(maps[1])]
        whole, half, quarter = (layer(x).flatten(1) for layer, x in zip(self.weight, maps, strict=True))
        logit = (whole + half @ self.enlarge1 + quarter @ self.enlarge2).float()
        correction, log_error = self.head(maps[2]).float().split([2, 1], dim=1)
        if fused:
            solved = triton_kernels.solve(first, second, logit, FLAT, WINDOW_STD, DAMPING)
        else:
            solved = least_squares(compared, logit)
        step = solved + correction
        return LONGEST * torch.tanh(step / LONGEST), log_error[:, 0].clamp(-5.0, 4.0).exp()

    def on_gpu(self) -> Subpixel:
        """In half precision, and with as many channels as make the first convolution a fast one there."""
        more = -self.channels % 16
        first: nn.Conv2d = self.whole[0][0]  # type: ignore[index,assignment]
        first.weight = nn.Parameter(F.pad(first.weight, (0, 0, 0, 0, 0, more)), requires_grad=False)
        self.channels += more
        return self.to(torch.float16, memory_format=torch.channels_last)  # type: ignore[call-overload]


def enlarging(side: int) -> Tensor:
    """side*side SIDE*SIDE: maps of `side` pixels times this are maps of a window's size, bilinear. A product,
    since on GPUs `F.interpolate` takes longer for thousands of small maps than all convolutions together."""
    each = torch.eye(side * side).view(-1, 1, side, side)
    return F.interpolate(each, (SIDE, SIDE), mode="bilinear", align_corners=False).flatten(1)


class ConvGELU(nn.Sequential):
    def __init__(self, dim_in: int, dim_out: int, stride: int = 1):
        super().__init__(nn.Conv2d(dim_in, dim_out, 3, stride, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return convolve(x, self[0], gelu=True)  # type: ignore[arg-type]


def comparison(first: Tensor, second: Tensor) -> Tensor:
    """n 10 w w: both windows, their difference, their mean gradient, and the products that the normal
    equations of a shift are sums of, so that the network has to add and not to multiply."""
    a, b = normalised(first), normalised(second)
    mean = F.pad(((a + b) / 2)[:, None], (1, 1, 1, 1), mode="replicate")[:, 0]
    gx = (mean[:, 1:-1, 2:] - mean[:, 1:-1, :-2]) / 2
    gy = (mean[:, 2:, 1:-1] - mean[:, :-2, 1:-1]) / 2
    d = b - a
    return torch.stack([a, b, d, gx, gy, gx * d, gy * d, gx * gx, gy * gy, gx * gy], dim=1)


def normalised(window: Tensor) -> Tensor:
    """n w w with mean 0 and deviation 1, but for windows that show nothing but noise: that stays small."""
    centred = window - window.mean(dim=(1, 2), keepdim=True)
    return centred / (centred.square().mean(dim=(1, 2), keepdim=True) + FLAT**2).sqrt()


def least_squares(compared: Tensor, logit: Tensor) -> Tensor:
    """n 2: the shift that the pixels of `comparison` (n 10 w w) ask for, weighed by exp(logit) (n w*w)."""
    distance = window_grid(compared.device).square().sum(1)
    weight = (logit.clamp(-8, 8) - distance / (2 * WINDOW_STD**2)).exp()
    weight = weight / weight.sum(dim=1, keepdim=True)
    xd, yd, xx, yy, xy = (compared.flatten(2)[:, 5:CHANNELS] * weight[:, None]).sum(dim=2).unbind(1)
    xx, yy = xx + DAMPING, yy + DAMPING
    return torch.stack([xy * yd - yy * xd, xy * xd - xx * yd], dim=1) / (xx * yy - xy * xy)[:, None]


def window_grid(device: torch.device) -> Tensor:
    """k 2: the pixels of a window around its middle, row by row."""
    at = torch.arange(-RADIUS, RADIUS + 1, device=device, dtype=torch.float32)
    return torch.stack(torch.meshgrid(at, at, indexing="xy"), dim=-1).view(-1, 2)


def halvings(zoom: float) -> int:
    """How often to halve an image `zoom` times as large as what was matched, to be of about its size."""
    return max(0, math.ceil(math.log2(zoom / CLOSE)))


@dataclass(frozen=True)
class Pyramid:
    """Images of one size and their halves in one table, so that each window has a level of its own."""

    unit: float  # of brightness, of which the whole range is 1
    table: Tensor  # levels 3, int32: where each begins, its width and height
    flat: Tensor  # images n

    @staticmethod
    def of(gray: Tensor, levels: int = LEVELS, recorder: Recorder | None = None) -> Pyramid:
        """gray: b h w, in [0, 1] or uint8, which takes a quarter of the memory."""
        unit, work = 1.0 if gray.is_floating_point() else 1 / 255, partial(halved, levels)
        (flat,) = work(gray) if recorder is None else recorder(("halved", levels), work, gray)
        return Pyramid(unit, pyramid_table(*gray.shape[1:], levels, gray.device), flat)

    @property
    def levels(self) -> int:
        return len(self.table)

    def windows(self, points: Tensor, to_image: Tensor, level: Tensor, image: Tensor | int = 0) -> Tensor:
        """n w w: around each point (n 2), its pixels laid out by `to_image` (n 2 2); level, image: n."""
        if has_kernels(self.flat) and not isinstance(image, Tensor):
            return triton_kernels.windows(
                self.flat[image], self.table, self.unit, points, to_image, level, RADIUS
            )
        around = torch.einsum("nij,kj->nki", to_image, window_grid(points.device))
        return self.sample(points[:, None] + around, level, image).view(-1, SIDE, SIDE)

    def sample(self, points: Tensor, level: Tensor, image: Tensor | int = 0) -> Tensor:
        """points: n k 2, pixels of the whole image; level and image: n. Bilinear, and the border goes on
        outside: n k."""
        scale = (2.0 ** -level.to(points.dtype))[:, None, None]
        start, size = self.table[level].long().split([1, 2], dim=1)  # n 1, n 2
        at = torch.minimum(((points + 0.5) * scale - 0.5).clamp(min=0), size[:, None] - 1.0)
        x, y = at.unbind(-1)
        wide, high = size[:, None].unbind(-1)  # n 1 each
        x0, y0 = x.long(), y.long()
        right, down = (x0 + 1 < wide).long(), (y0 + 1 < high).long() * wide
        offset = (image[:, None] if isinstance(image, Tensor) else image) * self.flat.shape[1]
        corner = offset + start + y0 * wide + x0
        flat = self.flat.view(-1)
        a, b, c, d = (flat[corner + k].to(x.dtype) for k in (0, right, down, down + right))
        return self.unit * torch.lerp(torch.lerp(a, b, x - x0), torch.lerp(c, d, x - x0), y - y0)


def halved(levels: int, gray: Tensor) -> tuple[Tensor]:
    """b n: images (b h w) and their halves, one after the other."""
    maps = [gray]
    for _ in range(levels - 1):
        high, wide = maps[-1].shape[1:]
        even = F.pad(maps[-1][:, None].float(), (0, wide % 2, 0, high % 2), mode="replicate")
        # The same as `F.avg_pool2d`, and on a CPU in less than half of the time.
        a, b, c, d = (even[:, 0, y::2, x::2] for y in (0, 1) for x in (0, 1))
        half = (a + b + c + d) / 4
        maps.append(half if gray.is_floating_point() else half.round().to(gray.dtype))
    return (torch.cat([m.flatten(1) for m in maps], dim=1),)


@lru_cache(256)
def pyramid_table(height: int, width: int, levels: int, device: torch.device) -> Tensor:
    sizes = [(width, height)]
    for _ in range(levels - 1):
        sizes.append((-(-sizes[-1][0] // 2), -(-sizes[-1][1] // 2)))
    starts = accumulate((w * h for w, h in sizes), initial=0)
    with torch.inference_mode(False):  # it may serve training, too
        rows = [[start, w, h] for start, (w, h) in zip(starts, sizes, strict=False)]
        return torch.tensor(rows, dtype=torch.int32).to(device)


def approach(
    network: Subpixel,
    first: Pyramid,
    second: Pyramid,
    points0: Tensor,
    points1: Tensor,
    stretch: Tensor,
    rounds: int,
    image: Tensor | int = 0,
    pixel: float = 1.0,
) -> Iterator[tuple[Tensor, Tensor]]:
    """After each round: points1 (n 2), moved, and the expected error of each (n) in pixels of image 1.
    stretch: n 2 2, how offsets around points0 become offsets around points1; image: n, which of the
    pyramids' images a match belongs to; pixel: how many pixels of the coarser image are one of a window."""
    (a, b), (c, d) = stretch.permute(1, 2, 0)
    scale = (a * d - b * c).abs().clamp(1e-3, 1e3).sqrt()
    spacing = pixel * (1 / scale).clamp(min=1.0)
    level0, level1 = (
        x.log2().round().clamp(0, pyramid.levels - 1).int()
        for x, pyramid in ((spacing, first), (spacing * scale, second))
    )
    to_image0 = spacing[:, None, None] * torch.eye(2, device=stretch.device)
    to_image1 = spacing[:, None, None] * stretch
    window0 = first.windows(points0, to_image0, level0, image)
    for _ in range(rounds):
        window1 = second.windows(points1, to_image1, level1, image)
        step, error = network(window0, window1)
        points1 = points1 + torch.einsum("nij,nj->ni", to_image1, step)
        yield points1, error * spacing * scale
        points1 = points1.detach()


def sharpen(
    network: Subpixel,
    first: Pyramid,
    second: Pyramid,
    scales: tuple[tuple[float, float], tuple[float, float]],
    largest: int,
    at0: Tensor,
    at1: Tensor,
    stretch: Tensor,
    anew: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """at1 (n 2), first moved by windows of about the size of the model's pixels, then by smaller and smaller
    ones, as far as the images go; and the error that is left, as the network states it (n). Both in pixels of
    the model's images.
    scales: pixels of the photos that are one of the model's, along x and y; largest: how often the photos are
    halved first; stretch: n 2 2, how image 1 is stretched around each; anew: that of a better at1 (n 2)."""
    scale0, scale1 = (torch.cat([at0.new_full((1,), x), at0.new_full((1,), y)]) for x, y in scales)
    error = torch.full_like(at0[:, 0], torch.inf)
    for halving in range(largest, -1, -1):
        if anew is not None and halving < largest:
            stretch = anew(at1)
        near0, near1 = (at0 + 0.5) * scale0 - 0.5, (at1 + 0.5) * scale1 - 0.5
        rounds = FIRST_ROUNDS if halving == largest else MORE_ROUNDS
        to_larger = stretch * (scale1[:, None] / scale0)
        near1, error = settle(network, first, second, near0, near1, to_larger, rounds, pixel=2.0**halving)
        at1 = (near1 + 0.5) / scale1 - 0.5
    return at1, error / scale1.mean()


@inference()
def settle(
    network: Subpixel,
    first: Pyramid,
    second: Pyramid,
    points0: Tensor,
    points1: Tensor,
    stretch: Tensor,
    rounds: int = ROUNDS,
    pixel: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """What the last round of `approach` gives, for any number of matches."""
    count = len(points0)
    device = points0.device
    at_once = AT_ONCE_ON_CPU if device.type == "cpu" else AT_ONCE
    rows = torch.arange(round_count(count, device), device=device).clamp(max=count - 1)
    found = [(points1[:0], points1[:0, 0])]
    for at0, at1, s in zip(*(t[rows].split(at_once) for t in (points0, points1, stretch)), strict=True):
        *_, last = approach(network, first, second, at0, at1, s, rounds, pixel=pixel)
        found.append(last)
    moved, error = (torch.cat(x)[:count] for x in zip(*found, strict=True))
    return moved, error
