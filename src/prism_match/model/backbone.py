"""The ResNet-FPN of LoFTR: a coarse map at 1/8 of the image and a fine map at 1/2.

Images of unequal size are padded to be batched, and padding must not change what is found. Two
things take care of that: wherever a 3x3 convolution would read the padding, it reads zeros, exactly
as it does beyond the border of an image that was not padded; and up-sampling averages over pixels
that exist. Both cost nothing when there is no padding (`valid` is None).

GPUs want the channels of a map in multiples of `LANES`, and the paper's 196 are not. So maps have as many as
the next multiple, and those beyond the paper's are zero. They stay zero in training, since neither they nor
their weights ever get a gradient, and `state_dict` leaves them out.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism_match.model.kernels import add_upsampled

LANES = 16


class ResNetFPN(nn.Module):
    def __init__(self, stage_dims: tuple[int, int, int], coarse_dim: int, fine_dim: int):
        super().__init__()
        self._add_layers(*stage_dims, coarse_dim, fine_dim)
        initial = self.state_dict()
        self.paper_shapes = {name: tensor.shape for name, tensor in initial.items()}
        with torch.device("meta"):  # neither memory nor random numbers: the initial weights come back below
            d2, d4, d8 = (-(-dim // LANES) * LANES for dim in stage_dims)
            self._add_layers(d2, d4, d8, coarse_dim, fine_dim)
        self.to_empty(device=initial["coarse.weight"].device)
        self.register_state_dict_post_hook(_trim)
        self.register_load_state_dict_pre_hook(_pad)
        self.load_state_dict(initial)

    def _add_layers(self, d2: int, d4: int, d8: int, coarse_dim: int, fine_dim: int) -> None:
        self.stem = ConvNorm(1, d2, kernel=7, stride=2)
        self.stage2 = nn.ModuleList([ResidualBlock(d2, d2), ResidualBlock(d2, d2)])
        self.stage4 = nn.ModuleList([ResidualBlock(d2, d4, stride=2), ResidualBlock(d4, d4)])
        self.stage8 = nn.ModuleList([ResidualBlock(d4, d8, stride=2), ResidualBlock(d8, d8)])
        self.coarse = nn.Conv2d(d8, coarse_dim, 1, bias=False)
        self.lateral4 = nn.Conv2d(d4, coarse_dim, 1, bias=False)
        self.smooth4 = Smooth(coarse_dim, d4)
        self.lateral2 = nn.Conv2d(d2, d4, 1, bias=False)
        self.smooth2 = Smooth(d4, fine_dim)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, image: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """image: b 1 h w; valid: b 1 h w in {0, 1}, 0 = padding. With it, h and w are divisible by 8.
        Returns coarse (b c h/8 w/8) and fine (b c h/2 w/2), rounded up."""
        # A pixel of a coarser map exists if the pixel at its top-left corner does.
        v1, v2, v4, v8 = (None if valid is None else valid[..., ::s, ::s] for s in (1, 2, 4, 8))
        x2 = masked(F.relu(in_float32(self.stem, masked(image, v1))), v2)
        for block in self.stage2:
            x2 = block(x2, v2)
        x4 = x2
        for block in self.stage4:
            x4 = block(x4, v4)
        x8 = x4
        for block in self.stage8:
            x8 = block(x8, v8)
        coarse = masked(self.coarse(x8), v8)
        y4 = self.smooth4(masked(with_upsampled(self.lateral4(x4), coarse, v8), v4), v4)
        y2 = self.smooth2(masked(with_upsampled(self.lateral2(x2), y4, v4), v2), v2)
        return coarse, y2


def _trim(module: ResNetFPN, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Leaves the channels that are always zero out of the state."""
    for name, shape in module.paper_shapes.items():
        state[prefix + name] = state[prefix + name][tuple(slice(n) for n in shape)]


def _pad(module: ResNetFPN, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Undoes `_trim`. Tensors of any other shape are left for `load_state_dict` to complain about."""
    wide = dict([*module.named_parameters(), *module.named_buffers()])
    for name, shape in module.paper_shapes.items():
        tensor = state.get(prefix + name)
        if tensor is not None and tensor.shape == shape != wide[name].shape:
            state[prefix + name] = torch.zeros_like(wide[name], dtype=tensor.dtype, device=tensor.device)
            state[prefix + name][tuple(slice(n) for n in shape)] = tensor


def in_float32(layer: nn.Module, image: Tensor) -> Tensor:
    """What autocast makes of the layer, computed in float32: bf16 has fewer digits than a photo has shades of
    gray."""
    device = image.device.type
    if not torch.is_autocast_enabled(device):
        return layer(image)
    with torch.autocast(device, enabled=False):
        x = layer(image.float())
    return x.to(torch.get_autocast_dtype(device))


def masked(x: Tensor, valid: Tensor | None) -> Tensor:
    return x if valid is None else x * valid.to(x.dtype)


def with_upsampled(x: Tensor, low: Tensor, valid: Tensor | None) -> Tensor:
    """x (b c h w) and a map of half its size, which `valid` belongs to."""
    if valid is None and not low.requires_grad:
        return add_upsampled(x, low)
    return x + upsample(low, valid)


def upsample(x: Tensor, valid: Tensor | None) -> Tensor:
    """Twice the size, bilinear. Next to padding, the weights of the pixels that exist are
    rescaled to sum to one, which is what interpolation does at the border of an image."""
    up = double(x) if x.requires_grad else F.interpolate(x, scale_factor=2.0, mode="bilinear")
    if valid is None:
        return up
    weight = F.interpolate(valid.to(x.dtype), scale_factor=2.0, mode="bilinear", align_corners=False)
    return up / weight.clamp(min=1 / 16)  # 1/16: the least weight of a pixel that exists


def double(x: Tensor) -> Tensor:
    """b c h w -> b c 2h 2w, bilinear, as `F.interpolate` has it, but made of shifts: the gradient of
    that one adds up atomically, pixel by pixel, and takes longer than the convolutions around it."""
    x = x.permute(0, 2, 3, 1)  # channels stay innermost, as the convolutions want them
    for dim in (1, 2):
        n = x.shape[dim]
        before = torch.cat([x.narrow(dim, 0, 1), x.narrow(dim, 0, n - 1)], dim)
        after = torch.cat([x.narrow(dim, 1, n - 1), x.narrow(dim, n - 1, 1)], dim)
        x = torch.stack([torch.lerp(x, before, 0.25), torch.lerp(x, after, 0.25)], dim + 1).flatten(
            dim, dim + 1
        )
    return x.permute(0, 3, 1, 2)


class ConvNorm(nn.Sequential):
    def __init__(self, dim_in: int, dim_out: int, kernel: int, stride: int = 1):
        super().__init__(
            nn.Conv2d(dim_in, dim_out, kernel, stride, padding=kernel // 2, bias=False),
            nn.BatchNorm2d(dim_out),
        )


class ResidualBlock(nn.Module):
    def __init__(self, dim_in: int, dim_out: int, stride: int = 1):
        super().__init__()
        self.conv1 = ConvNorm(dim_in, dim_out, kernel=3, stride=stride)
        self.conv2 = ConvNorm(dim_out, dim_out, kernel=3)
        self.shortcut = nn.Identity() if stride == 1 else ConvNorm(dim_in, dim_out, 1, stride)

    def forward(self, x: Tensor, valid: Tensor | None) -> Tensor:
        y = masked(F.relu(self.conv1(x)), valid)
        return masked(F.relu(self.shortcut(x) + self.conv2(y)), valid)


class Smooth(nn.Module):
    """The two 3x3 convolutions after each top-down addition."""

    def __init__(self, dim_in: int, dim_out: int):
        super().__init__()
        self.conv1 = ConvNorm(dim_in, dim_in, kernel=3)
        self.conv2 = nn.Conv2d(dim_in, dim_out, 3, padding=1, bias=False)

    def forward(self, x: Tensor, valid: Tensor | None) -> Tensor:
        return masked(self.conv2(masked(F.leaky_relu(self.conv1(x)), valid)), valid)
