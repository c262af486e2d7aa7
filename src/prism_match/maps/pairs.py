"""Which pairs of a set of images to match. Pairs are rows of image numbers, the smaller first, each once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from prism_match.errors import UserError
from prism_match.files import read_words
from prism_match.maps.retrieval import top_pairs


def exhaustive(count: int) -> np.ndarray:
    """m 2, int64: every image with every other."""
    return np.stack(np.triu_indices(count, 1), axis=1).astype(np.int64)


def sequential(count: int, window: int, loop: bool = False) -> np.ndarray:
    """m 2: every image with the `window` that follow it; with `loop` the first follows the last."""
    if window < 1:
        raise UserError(f"the window must be at least 1 image, not {window}")
    first = np.repeat(np.arange(count), window)
    second = first + np.tile(np.arange(1, window + 1), count)
    if loop:
        second %= max(count, 1)
    return tidy(np.stack([first, second], axis=1)[second < count])


def nearest(descriptors: np.ndarray, k: int) -> np.ndarray:
    """m 2: every image with the k that look most alike; descriptors: n d."""
    return tidy(top_pairs(descriptors, None, k))


def from_file(path: str | Path, names: Sequence[str]) -> np.ndarray:
    """m 2: a text file with the names of two images a line, apart by a space, or, for names with
    spaces, by a tab. Lines that begin with # are comments."""
    number = {name: n for n, name in enumerate(names)}
    rows = []
    for n, words in read_words(Path(path), tabs=True):
        if len(words) != 2:
            raise UserError(f"{path}, line {n}: {len(words)} words instead of the names of two images")
        unknown = [word for word in words if word not in number]
        if unknown:
            raise UserError(f"{path}, line {n}: no image {unknown[0]} among the {len(names)} images")
        rows.append([number[word] for word in words])
    return tidy(np.array(rows, dtype=np.int64).reshape(-1, 2))


def tidy(pairs: np.ndarray) -> np.ndarray:
    """m 2: the smaller number first, sorted, each pair once, no image with itself."""
    pairs = np.sort(np.asarray(pairs, dtype=np.int64).reshape(-1, 2), axis=1)
    return np.unique(pairs[pairs[:, 0] < pairs[:, 1]], axis=0)
