"""The order in which pairs are matched, so that few photos are needed at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

Named = TypeVar("Named")


def in_blocks(pairs: np.ndarray, block: int) -> np.ndarray:
    """m: the order of pairs (m 2, numbers of photos) in which those between one block of photos and another
    come after each other, forth and back so that neighbouring blocks share one side."""
    row, column = pairs[:, 0] // block, pairs[:, 1] // block
    snake = np.where(row % 2 == 0, column, -column)
    return np.lexsort((pairs[:, 1], pairs[:, 0], snake, row))


def arrange(pairs: Sequence[tuple[Named, Named]], photos: int) -> list[int]:
    """The order of the pairs in which about so many photos at a time are enough. Photos are numbered as they
    come, so that neighbours in a list are neighbours here."""
    number: dict[Named, int] = {}
    rows = [[number.setdefault(name, len(number)) for name in pair] for pair in pairs]
    return in_blocks(np.array(rows, np.int64).reshape(-1, 2), max(1, photos // 2)).tolist()
