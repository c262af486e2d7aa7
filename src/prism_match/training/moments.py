"""The moments of Adam in eight bits: both together are as large as the weights are in sixteen.

Adam divides one moment by the root of the other, so that what counts is how exact each is in proportion. A
byte on a logarithmic scale is right to 6 % over twenty octaves, where bytes of equal steps would
make most values of a tensor 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

MEAN, SQUARE = "exp_avg", "exp_avg_sq"
OCTAVES = 20.0  # from the largest of a tensor down to what is told from 0
SIGN = 128  # the bit of a mean that is below 0
LEVELS = {MEAN: 127, SQUARE: 255}
PARTS = (MEAN, SQUARE, f"{MEAN}.largest", f"{SQUARE}.largest")


def packed(name: str, moment: Tensor) -> dict[str, Tensor]:
    """The moment as bytes, and what they are shares of."""
    size = moment.float().abs() if name == MEAN else moment.float().sqrt()
    largest = size.max().clamp(min=torch.finfo(torch.float32).tiny)
    levels = LEVELS[name]
    code = (levels + (size / largest).log2() * ((levels - 1) / OCTAVES)).round().clamp(min=0)
    if name == MEAN:
        code += SIGN * (moment < 0)
    return {name: code.to(torch.uint8), f"{name}.largest": largest[None]}


def unpacked(name: str, tensors: dict[str, Tensor]) -> Tensor:
    """What `packed` was given, or the moment as it is where it was not."""
    code = tensors[name]
    if code.dtype != torch.uint8:
        return code
    levels = LEVELS[name]
    level = (code % SIGN if name == MEAN else code).float()
    size = torch.exp2((level - levels) * (OCTAVES / (levels - 1))) * tensors[f"{name}.largest"]
    if name == SQUARE:  # the least of them is not 0, which nothing could be divided by
        return size.square()
    return torch.where(level > 0, torch.where(code >= SIGN, -size, size), 0.0)
