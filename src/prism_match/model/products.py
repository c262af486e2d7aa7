"""Products of matrices in float32 on a CPU, by the library that convolves.

PyTorch leaves them to MKL, which uses but half the width of some CPUs that are not Intel's; oneDNN, which it
convolves with, uses all of it. To convolve with kernels of one pixel is to multiply. Which of both is
faster on this machine is tried once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TURNS = 5
FASTER = 0.85  # of the other's time: what is hardly faster is not worth another way


def multiply(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a b^T (r k and n k -> r n), and a bias (n)."""
    pixels = a.contiguous()[None, :, None].permute(0, 3, 1, 2)  # 1 k r 1, channels last
    return F.conv2d(pixels, b[:, :, None, None], bias)[0, :, :, 0].mT


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
    return device.type == "cpu" and dtype == torch.float32 and wins(torch.get_num_threads())


@lru_cache
def wins(_threads: int) -> bool:
    with torch.inference_mode():
        a, b = torch.ones(1024, 256), torch.ones(512, 256)
        return is_faster(lambda: multiply(a, b), lambda: a @ b.mT)


def is_faster(this: Callable[[], object], other: Callable[[], object]) -> bool:
    """Tried in turns, of which the quickest count: what else runs on the machine is then nobody's fault."""
    seconds: list[list[float]] = [[], []]
    for _ in range(1 + TURNS):  # the first of each is slower
        for work, taken in zip((this, other), seconds, strict=True):
            start = time.perf_counter()
            work()
            taken.append(time.perf_counter() - start)
    return min(seconds[0]) < FASTER * min(seconds[1])
