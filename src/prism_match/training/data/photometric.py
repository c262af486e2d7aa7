"""Strong random photometric changes, batched on the device: what light, weather and cameras do to a view.

Every image of a batch draws its own strength, then its own changes, so that the two views of a pair are
changed independently. The order is that of the world: light falls on the scene, air scatters it, the lens
blurs it, the sensor develops and disturbs it, and JPEG stores it.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

BLUR_RADIUS = 5
CALM = 0.5  # share of pairs whose two views were taken by good cameras in ordinary light

# Luminance quantisation table of the JPEG standard (Annex K), for quality 50.
JPEG_TABLE = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)


class Draw:
    """Random tensors on one device from one generator; `shape` is given as plain integers."""

    def __init__(self, generator: torch.Generator):
        self.generator, self.device = generator, generator.device

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return torch.empty(shape, device=self.device).uniform_(low, high, generator=self.generator)

    def normal(self, std: float, *shape: int) -> Tensor:
        return torch.empty(shape, device=self.device).normal_(0.0, std, generator=self.generator)

    def log_uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return self.uniform(math.log(low), math.log(high), *shape).exp_()

    def chance(self, p: float, *shape: int) -> Tensor:
        """Bool, True with probability `p`."""
        return self.uniform(0, 1, *shape) < p

    def integer(self, n: int, *shape: int) -> Tensor:
        """int64 in [0, n)."""
        return torch.randint(n, shape, generator=self.generator, device=self.device)


def augment(images: Tensor, generator: torch.Generator, calm: Tensor | None = None) -> Tensor:
    """b 1 h w in [0, 1] -> the same, each image with its own random changes; h and w divisible by 8.
    calm: b, bool: images that are changed little. Night and fog teach what to look at, but not to be exact:
    that is learnt where both views of a pair are good."""
    draw = Draw(generator)
    b = images.shape[0]
    calm = torch.zeros(b, dtype=torch.bool, device=images.device) if calm is None else calm
    calm = calm.view(b, 1, 1, 1)
    # Most views are changed strongly, some hardly at all: real pairs have both.
    strength = draw.uniform(0.15, 1.0, b, 1, 1, 1) * torch.where(calm, 0.4, 1.0)
    # Light differs in most pairs, but most photos are sharp and clean: where all are blurred and grainy,
    # refinement does not learn to be exact.
    wear = draw.uniform(0, 1, b, 1, 1, 1).pow(2.5) * torch.where(calm, 0.2, 1.0)
    x = _light(images, strength, draw)
    x = torch.where(calm, x, _night(x, draw))
    x = _fog(x, strength, draw)
    x = _blur(x, wear, draw)
    x = _develop(x, strength, draw)
    x = _noise(x, wear, draw)
    x = _jpeg(x.clamp(0, 1), torch.where(calm, 0.3, 1.0), draw)
    return x.clamp(0, 1)


def _field(draw: Draw, b: int, cells: int, h: int, w: int) -> Tensor:
    """b 1 h w: smooth random field of unit variance with about `cells` bumps along a side."""
    coarse = draw.normal(1.0, b, 1, cells + 3, cells + 3)
    return F.interpolate(coarse, size=(h, w), mode="bicubic", align_corners=True)


def _grid(h: int, w: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """x (1 1 1 w) and y (1 1 h 1) in [-1, 1]."""
    x = torch.linspace(-1, 1, w, device=device).view(1, 1, 1, w)
    return x, torch.linspace(-1, 1, h, device=device).view(1, 1, h, 1)


def _light(image: Tensor, strength: Tensor, draw: Draw) -> Tensor:
    """Low-frequency shading, a soft shadow edge, blotches of shadow, and a vignette."""
    b, _, h, w = image.shape
    x, y = _grid(h, w, image.device)
    shading = torch.exp(0.35 * strength * _field(draw, b, 2, h, w))

    angle = draw.uniform(0, 2 * math.pi, b, 1, 1, 1)
    distance = x * angle.cos() + y * angle.sin() - draw.uniform(-0.8, 0.8, b, 1, 1, 1)
    edge = torch.sigmoid(distance / draw.log_uniform(0.01, 0.3, b, 1, 1, 1))
    edge_depth = draw.uniform(0, 0.7, b, 1, 1, 1) * draw.chance(0.35, b, 1, 1, 1)

    blotch = torch.sigmoid(draw.log_uniform(2, 20, b, 1, 1, 1) * (_field(draw, b, 5, h, w) - 0.6))
    blotch_depth = draw.uniform(0, 0.6, b, 1, 1, 1) * draw.chance(0.3, b, 1, 1, 1)

    vignette = 1 - draw.uniform(0, 0.4, b, 1, 1, 1) * strength * (x * x + y * y) / 2
    return image * shading * (1 - edge_depth * edge) * (1 - blotch_depth * blotch) * vignette


def _night(image: Tensor, draw: Draw) -> Tensor:
    """In some views: dark surroundings lit by pools of lamp light, with glaring lamps."""
    b, _, h, w = image.shape
    x, y = _grid(h, w, image.device)
    lamps = 4
    cx, cy = draw.uniform(-1, 1, b, lamps, 1, 1), draw.uniform(-1, 1, b, lamps, 1, 1)
    squared = (x - cx).square() + (y - cy).square()
    reach = draw.log_uniform(0.2, 1.2, b, lamps, 1, 1)
    power = draw.uniform(0.2, 1.2, b, lamps, 1, 1)
    pools = (power * torch.exp(-squared / reach.square())).sum(1, keepdim=True)
    glare_size = draw.log_uniform(0.008, 0.05, b, lamps, 1, 1)
    glare = (power * torch.exp(-squared / glare_size.square())).sum(1, keepdim=True)
    ambient = draw.uniform(0.05, 0.35, b, 1, 1, 1)
    dark = image.clamp(min=1e-4) ** 1.4 * (ambient + pools) + glare
    return torch.where(draw.chance(0.12, b, 1, 1, 1), dark, image)


def _fog(image: Tensor, strength: Tensor, draw: Draw) -> Tensor:
    """Haze that may thicken in one direction or in patches."""
    b, _, h, w = image.shape
    haze = draw.uniform(0, 0.7, b, 1, 1, 1) * strength * draw.chance(0.25, b, 1, 1, 1)
    amount = (haze * torch.sigmoid(_field(draw, b, 1, h, w) + 0.5)).clamp(0, 0.75)
    return image + amount * (draw.uniform(0.5, 1.0, b, 1, 1, 1) - image)


def _blur(image: Tensor, wear: Tensor, draw: Draw) -> Tensor:
    """Gaussian and motion blur as one oriented Gaussian kernel for each image."""
    b, _, h, w = image.shape
    r = torch.arange(-BLUR_RADIUS, BLUR_RADIUS + 1, device=image.device, dtype=torch.float32)
    dx, dy = r.view(1, 1, -1), r.view(1, -1, 1)
    strong = wear.view(b, 1, 1)
    minor = 0.2 + 1.25 * strong * draw.uniform(0, 1, b, 1, 1).square()
    motion = 2.5 * strong * draw.uniform(0, 1, b, 1, 1) * draw.chance(0.15, b, 1, 1)
    major = minor + motion
    angle = draw.uniform(0, math.pi, b, 1, 1)
    along = dx * angle.cos() + dy * angle.sin()
    across = dy * angle.cos() - dx * angle.sin()
    kernel = torch.exp(-0.5 * ((along / major).square() + (across / minor).square()))
    kernel = kernel / kernel.sum((1, 2), keepdim=True)
    padded = F.pad(image.view(1, b, h, w), (BLUR_RADIUS,) * 4, mode="replicate")
    return F.conv2d(padded, kernel.unsqueeze(1), groups=b).view(b, 1, h, w)


def _develop(image: Tensor, strength: Tensor, draw: Draw) -> Tensor:
    """Exposure, gamma, contrast curve, gain and bias."""
    b = image.shape[0]
    # A camera brings any scene near to a middle gray, but never quite.
    target = 0.45 * torch.exp(0.45 * strength * draw.normal(1.0, b, 1, 1, 1))
    mean = image.mean((2, 3), keepdim=True).clamp(min=1e-3)
    x = image * (target / mean) ** draw.uniform(0.3, 1.0, b, 1, 1, 1)
    x = x.clamp(min=1e-4) ** torch.exp(0.4 * strength * draw.normal(1.0, b, 1, 1, 1)).clamp(0.45, 2.2)
    # Highlights roll off towards white as on film instead of clipping, in half of the views.
    x = torch.where(draw.chance(0.5, b, 1, 1, 1), 1 - torch.exp(-1.6 * x), x)
    curve = 2.5 * strength * draw.uniform(0, 1, b, 1, 1, 1).square()
    s_shaped = torch.sigmoid((4 + curve) * (x - 0.5))
    x = x + (s_shaped - x) * draw.uniform(0, 1, b, 1, 1, 1) * draw.chance(0.4, b, 1, 1, 1)
    gain = 1 + 0.35 * strength * draw.uniform(-1, 0.6, b, 1, 1, 1)
    x = gain * x + 0.12 * strength * draw.uniform(-1, 1, b, 1, 1, 1)
    # All of it together may leave nothing but white or black: no camera would.
    mean = x.clamp(0, 1).mean((2, 3), keepdim=True).clamp(min=1e-3)
    return x * mean.clamp(0.1, 0.72) / mean


def _noise(image: Tensor, wear: Tensor, draw: Draw) -> Tensor:
    """Shot and read noise, fine-grained or (as after denoising and resizing) coarse."""
    b, _, h, w = image.shape
    sigma = 0.05 * wear * draw.uniform(0, 1, b, 1, 1, 1).square() + 0.002
    fine = draw.normal(1.0, b, 1, h, w)
    coarse = F.interpolate(draw.normal(1.1, b, 1, h // 2, w // 2), scale_factor=2, mode="bilinear")
    grain = torch.where(draw.chance(0.3, b, 1, 1, 1), coarse, fine)
    shot = 0.4 + image.clamp(0, 1).sqrt()
    return image + sigma * shot * grain


@lru_cache
def _dct(device: torch.device) -> tuple[Tensor, Tensor]:
    """8 8 each: the orthonormal cosine transform of JPEG and its steps; kept, as copying them would wait."""
    n = torch.arange(8, device=device, dtype=torch.float32)
    basis = torch.cos(math.pi / 8 * (n + 0.5) * n.view(8, 1)) / 2
    basis = torch.where(n.view(8, 1) == 0, basis / math.sqrt(2), basis)
    return basis, torch.tensor(JPEG_TABLE, device=device) / 255.0


def _jpeg(image: Tensor, coarse: Tensor, draw: Draw) -> Tensor:
    """Quantise the cosine transform of 8x8 blocks, with a quality for each image; coarse: b 1 1 1."""
    b, _, h, w = image.shape
    # Moved by (3, 5): block edges that coincide with the matcher's cells would be a giveaway.
    moved = torch.roll(image, (3, 5), (2, 3)).view(b, h // 8, 8, w // 8, 8)
    basis, table = _dct(image.device)
    step = draw.log_uniform(0.08, 2.0, b, 1, 1, 1, 1) * coarse[..., None] * table.view(1, 1, 8, 1, 8)
    spectrum = torch.einsum("ij,bhjwk,lk->bhiwl", basis, moved, basis)
    stored = torch.round(spectrum / step) * step
    decoded = torch.einsum("ij,bhiwl,lk->bhjwk", basis, stored, basis)
    decoded = torch.roll(decoded.reshape(b, 1, h, w), (-3, -5), (2, 3))
    return torch.where(draw.chance(0.4, b, 1, 1, 1), decoded, image)
