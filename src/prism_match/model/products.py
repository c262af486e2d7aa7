"""Products of matrices in float32 on a CPU, by the library that convolves.

PyTorch leaves them to MKL, which uses but half the width of some CPUs that are not Intel's; oneDNN, which it
convolves with, uses all of it. To convolve with kernels of one pixel is to multiply.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism_match.model.processor import few_threads, mkl_is_slow

IMAGES = 16  # of fewer a single thread multiplies pixels by MKL again


def multiply(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a b^T (r k and n k -> r n), and a bias (n)."""
    rows, k = a.shape
    if rows == 0:  # nothing can be multiplied, but not convolved
        return F.linear(a, b, bias)
    images = IMAGES if rows % IMAGES == 0 else 1
    pixels = a.contiguous().view(images, -1, 1, k).permute(0, 3, 1, 2)  # channels last
    return F.conv2d(pixels, b[:, :, None, None], bias).permute(0, 2, 3, 1).reshape(rows, -1)


class Pointwise(nn.Module):
    """A linear layer."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x.flatten(0, -2), self.weight, self.bias).unflatten(0, x.shape[:-1])


def with_pointwise(module: nn.Module) -> nn.Module:
    """The module with another one in the place of each of its linear layers."""
    if isinstance(module, nn.Linear):
        return Pointwise(module)
    for name, child in module.named_children():
        setattr(module, name, with_pointwise(child))
    return module


def is_worth_it(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `multiply` is faster than PyTorch's own."""
    return device.type == "cpu" and dtype == torch.float32 and few_threads() and mkl_is_slow()
