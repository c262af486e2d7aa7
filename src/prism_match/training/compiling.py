"""Functions that PyTorch compiles, anew for each size of their tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Of a function. PyTorch stops at eight, after which it runs as it is: several times as slow, and with memory
# for all that lies between its operations.
VARIANTS = 64


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return many_variants(torch.compile(function, dynamic=False))


def many_variants(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """With these settings of the compiler while it runs; the rest of the process has its own."""
    # As PyTorch 2.6 calls it; later ones know it under another name, too.
    return torch._dynamo.config.patch(cache_size_limit=VARIANTS, **settings)(function)
