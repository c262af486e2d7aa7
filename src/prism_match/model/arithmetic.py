"""Arithmetic as it is meant here, whatever the caller has set for his own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


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


def inference(function: Callable[P, R]) -> Callable[P, R]:
    """Without gradients, too."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with own_arithmetic(), torch.inference_mode():
            return function(*args, **kwargs)

    return wrapped
