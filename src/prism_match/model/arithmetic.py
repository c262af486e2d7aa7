"""Arithmetic as it is meant here, whatever the caller has set for his own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def own_arithmetic() -> Iterator[None]:
    """Without autocast, and in 32 bit where nothing else is said."""
    given = torch.get_default_dtype()
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if given == torch.float32:
            yield
            return
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(given)


@contextmanager
def inference() -> Iterator[None]:
    """Without gradients, too."""
    with own_arithmetic(), torch.inference_mode():
        yield
