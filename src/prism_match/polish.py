"""Points moved by fractions of a pixel to where two images look most alike, without anything learnt.

A small window around the point in image 0, stretched and turned as the neighbouring matches are, is compared
with image 1 by normalised cross-correlation, and a few steps of Gauss and Newton lead to the maximum nearby.
No match is lost; one whose windows never look alike stays. The keypoints of a track are brought together this
way; matches of a pair are left to the network of `subpixel.py`, which needs the same map of a neighbourhood.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from prism_match.model.arithmetic import inference
from prism_match.model.kernels import has_kernels, nearest, triton_kernels

RADIUS = 7  # of the window, in pixels
WINDOW_STD = 4.2  # pixels: of the weights that make the middle of the window count most
BLUR_STD = 0.5  # pixels: of the images, so that their gradients are good for a step of half a pixel
ROUNDS = 4
FARTHEST = 2.0  # pixels that a match may move
ALIKE = 0.7  # least correlation of windows that are taken to show the same
FLAT = 0.01  # least deviation of the brightness (of 1) in a window
DAMPING = 3e-3  # on the normal equations: along an edge nothing is known
LONGEST = 0.7  # pixels, of one step
NEIGHBOURS = 12  # matches that tell how image 1 is stretched and turned against image 0
FEWEST = NEIGHBOURS + 1
# For a pixel along x and along y: matches lie on a grid, and many neighbours of one are equally far. Those on
# the right and below count as so much farther, or the library would choose among them, which goes by how many
# others there are.
HANDICAP = (0.0017, 0.00103)
MISFIT = 2.0  # pixels by which a neighbour that counts half does not fit
# What no photo could have: neighbours that do not fit by this share of their distance, and an area that
# becomes so many times as large or as small.
UNFIT, TURNED = 0.2, 16.0
AT_ONCE = 2048  # matches


@inference()
def polish(gray0: Tensor, gray1: Tensor, points0: Tensor, points1: Tensor, rounds: int = ROUNDS) -> Tensor:
    """gray0: h0 w0 and gray1: h1 w1, in [0, 1]; points0 and points1: n 2, pixels (x, y), the centre of the
    first at (0, 0). Returns points1 (n 2), moved."""
    if not len(points0):
        return points1
    stretch = local_affine(points0, points1)
    first, second = blur(gray0), blur(gray1)
    second = torch.stack([second, *gradient(second)])
    parts = zip(*(t.split(AT_ONCE) for t in (points0, points1, stretch)), strict=True)
    return torch.cat([_climb(first[None], second, a, b, s, rounds) for a, b, s in parts])


def _climb(
    first: Tensor, second: Tensor, points0: Tensor, points1: Tensor, stretch: Tensor, rounds: int
) -> Tensor:
    """first: 1 h0 w0; second: 3 h1 w1, the image and its gradient; points: n 2; stretch: n 2 2."""
    at = torch.arange(-RADIUS, RADIUS + 1, device=points0.device, dtype=points0.dtype)
    window = torch.stack(torch.meshgrid(at, at, indexing="xy"), dim=-1).view(-1, 2)  # k 2
    weight = torch.exp(-window.square().sum(1) / (2 * WINDOW_STD**2))
    weight = weight / weight.sum()
    there = torch.einsum("nij,kj->nki", stretch, window)  # n k 2
    target, deviation = _normalised(sample(first, points0[:, None] + window)[0], weight)

    here, best, likeness = points1, points1, torch.full_like(points1[:, 0], -1.0)
    for n in range(rounds + 1):
        value, dx, dy = sample(second, here[:, None] + there)
        value, scale = _normalised(value, weight)
        correlation = (value * target * weight).sum(1)
        near = (here - points1).norm(dim=1) <= FARTHEST
        better = near & (correlation > likeness)
        best = torch.where(better[:, None], here, best)
        likeness = torch.where(better, correlation, likeness)
        if n < rounds:
            # How the normalised window changes: a change of its mean or its contrast is none.
            dx, dy = (_without(_centred(d, weight) / scale, value, weight) for d in (dx, dy))
            step = _solve(dx, dy, target - value, weight)
            step = step * (LONGEST / step.norm(dim=1, keepdim=True).clamp(min=LONGEST))
            here = torch.where(near[:, None], here + step, best)
    sure = (likeness >= ALIKE) & (deviation[:, 0] >= FLAT)
    return torch.where(sure[:, None], best, points1)


def local_affine(points0: Tensor, points1: Tensor, rounds: int = 0) -> Tensor:
    """n 2 2: how the offsets of each point's neighbours in image 0 become their offsets in image 1, by least
    squares; the identity where there are too few or they do not agree. rounds: of weighing neighbours anew
    by how well they fit, where matches are not all good."""
    return neighbourhoods(points0, points1, rounds)[0]


def neighbourhoods(
    points0: Tensor, points1: Tensor, rounds: int = 0, believed: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """What `local_affine` gives; by how many pixels of image 1 the neighbours do not fit (n); and how far
    they are in image 0 (n). Infinite where there are too few, or no map is near to them.
    believed: n, bool: which matches may be neighbours, at least FEWEST of them; None: all."""
    if len(points0) < FEWEST:
        same = torch.eye(2, device=points0.device, dtype=points0.dtype).expand(len(points0), 2, 2)
        unknown = torch.full_like(points0[:, 0], torch.inf)
        return same, unknown, unknown
    behind = handicap(points0)
    if believed is not None:
        behind = behind.masked_fill(~believed, torch.inf)
    near = nearest(points0, behind, NEIGHBOURS)
    if points0.dtype == torch.float32 and not torch.is_grad_enabled() and has_kernels(points0):
        return triton_kernels.fitted(points0, points1, near, rounds, MISFIT, UNFIT, TURNED)
    d0, d1 = (p[near] - p[:, None] for p in (points0, points1))  # n k 2
    return *fitted_affine(d0, d1, rounds), d0.norm(dim=2).mean(1)


def handicap(points: Tensor) -> Tensor:
    """n: what is added to the distance of each as a neighbour, so that no two on a grid are equally far."""
    x, y = points.unbind(1)
    return HANDICAP[0] * x + HANDICAP[1] * y


def fitted_affine(d0: Tensor, d1: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
    """n 2 2, of the neighbours of each point: d0 and d1 are their offsets (n k 2) in either image; and the
    mean distance (n) by which it misses them. One that misses by too much, or is none that a photo could
    have, is the identity, and its distance is infinite."""
    weight = torch.ones_like(d0[..., 0])
    for n in range(rounds + 1):
        affine = _linear_fit(d0, d1, weight)
        rest = (d1 - d0 @ affine.transpose(1, 2)).norm(dim=2)
        if n < rounds:
            weight = 1 / (1 + (rest / MISFIT).square())
    error = (rest * weight).sum(1) / weight.sum(1)
    turned = affine[:, 0, 0] * affine[:, 1, 1] - affine[:, 0, 1] * affine[:, 1, 0]
    sound = (error < UNFIT * d0.norm(dim=2).mean(1)) & (turned > 1 / TURNED) & (turned < TURNED)
    same = torch.eye(2, device=d0.device, dtype=d0.dtype)
    return torch.where(sound[:, None, None], affine, same), torch.where(sound, error, torch.inf)


def _linear_fit(d0: Tensor, d1: Tensor, weight: Tensor) -> Tensor:
    """m 2 2: what takes d0 to d1 (m k 2) by least squares; weight: m k."""
    weighed = d0 * weight[..., None]
    (a, b), (_, c) = torch.einsum("nki,nkj->ijn", weighed, d0)
    inverse = torch.stack([c, -b, -b, a], 1) / (a * c - b * b).clamp(min=1e-3)[:, None]
    return torch.einsum("nki,nkj->nij", d1, weighed) @ inverse.view(-1, 2, 2)


def sample(maps: Tensor, points: Tensor) -> Tensor:
    """maps: c h w; points: n k 2 in pixels. Bilinear, the border going on outside: c n k."""
    h, w = maps.shape[-2:]
    size = torch.tensor([w, h], device=maps.device, dtype=maps.dtype)
    grid = (2 * points + 1) / size - 1
    return F.grid_sample(maps[None], grid[None], padding_mode="border", align_corners=False)[0]


def blur(gray: Tensor) -> Tensor:
    """h w, by a Gaussian of BLUR_STD."""
    at = torch.arange(-2, 3, device=gray.device, dtype=gray.dtype)
    kernel = torch.exp(-(at**2) / (2 * BLUR_STD**2))
    return _convolved(_convolved(gray, (kernel / kernel.sum())[None]), (kernel / kernel.sum())[:, None])


def gradient(gray: Tensor) -> tuple[Tensor, Tensor]:
    """h w each, along x and y, by central differences."""
    kernel = torch.tensor([[-0.5, 0.0, 0.5]], device=gray.device, dtype=gray.dtype)
    return _convolved(gray, kernel), _convolved(gray, kernel.mT)


def _convolved(gray: Tensor, kernel: Tensor) -> Tensor:
    y, x = (n // 2 for n in kernel.shape)
    padded = F.pad(gray[None, None], (x, x, y, y), mode="replicate")
    return F.conv2d(padded, kernel[None, None])[0, 0]


def _centred(x: Tensor, weight: Tensor) -> Tensor:
    return x - (x * weight).sum(1, keepdim=True)


def _normalised(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """x: n k with mean 0 and deviation 1, and the deviation it had (n 1)."""
    x = _centred(x, weight)
    deviation = (x * x * weight).sum(1, keepdim=True).sqrt().clamp(min=1e-4)
    return x / deviation, deviation


def _without(x: Tensor, direction: Tensor, weight: Tensor) -> Tensor:
    return x - direction * (x * direction * weight).sum(1, keepdim=True)


def _solve(dx: Tensor, dy: Tensor, error: Tensor, weight: Tensor) -> Tensor:
    """n 2: the step that makes `error` (n k) smallest, by the damped normal equations."""
    xx, xy, yy = ((a * b * weight).sum(1) for a, b in ((dx, dx), (dx, dy), (dy, dy)))
    rx, ry = ((a * error * weight).sum(1) for a in (dx, dy))
    xx, yy = xx + DAMPING, yy + DAMPING
    return torch.stack([yy * rx - xy * ry, xx * ry - xy * rx], 1) / (xx * yy - xy * xy)[:, None]
