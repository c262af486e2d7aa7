"""Features that clients asked to have kept, by keys that nobody can guess; for a while, within a limit."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from prism_match.engine.features import held_bytes
from prism_match.matcher import ImageFeatures
from prism_match.serve.refusal import Refused


@dataclass(frozen=True)
class Kept:
    features: ImageFeatures
    thumbnail: np.ndarray  # h w 3, for pictures


class KeptFeatures:
    """Of one event loop: no locks. What was used least recently makes room."""

    def __init__(self, limit: int, lifetime: float, clock: Callable[[], float] = time.monotonic):
        self.limit, self.lifetime, self.clock, self.used = limit, lifetime, clock, 0
        self._items: OrderedDict[str, tuple[Kept, int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: Kept) -> tuple[str, int]:
        """The key, and the bytes that are held."""
        size = held_bytes(item)
        if size > self.limit:
            raise Refused(
                413,
                f"the features take {size / 2**20:.0f} MiB; at most {self.limit / 2**20:g} MiB are kept, "
                "so ask for a smaller size",
            )
        self.expire()
        while self.used + size > self.limit:
            self.drop(next(iter(self._items)))
        key = secrets.token_urlsafe(16)
        self._items[key] = item, size, self.clock() + self.lifetime
        self.used += size
        return key, size

    def get(self, key: str, name: str) -> Kept:
        self.expire()
        if key not in self._items:
            raise Refused(404, f"{name}: no features are kept under this key, or no longer")
        self._items.move_to_end(key)
        return self._items[key][0]

    def drop(self, key: str) -> bool:
        """Whether it was there."""
        _, size, _ = self._items.pop(key, (None, 0, 0.0))
        self.used -= size
        return size > 0

    def expire(self) -> None:
        now = self.clock()
        for key in [key for key, (_, _, end) in self._items.items() if end <= now]:
            self.drop(key)
