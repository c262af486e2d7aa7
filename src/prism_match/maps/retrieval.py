"""Which images may show the same place: a global descriptor pooled from the matcher's own backbone."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from prism_match.engine.photos import content_of, in_threads
from prism_match.errors import UserError
from prism_match.files import atomic_path, load_arrays
from prism_match.images import ImageLike
from prism_match.matcher import ImageFeatures, PairMatcher, Prepared

SIZE = 320  # longer side in pixels
SECONDS_A_SAVE = 30.0  # of describing that a kill can cost
POWER = 3.0  # of the generalised mean: 1 is the mean, infinity the maximum


def global_descriptors(
    matcher: PairMatcher, images: Sequence[ImageLike], progress: bool = False
) -> np.ndarray:
    """n d, float32, of unit length: one descriptor per image, independent of the other images.
    `top_pairs` compares them."""
    rows = [
        _describe(matcher, matcher.prepare(image, SIZE))
        for image in tqdm(images, "describing", unit="image", disable=None if progress else True)
    ]
    return np.stack(rows) if rows else np.zeros((0, 2 * matcher.model.config.coarse_dim), np.float32)


def _describe(matcher: PairMatcher, prepared: Prepared) -> np.ndarray:
    return pool(matcher.extract_prepared([prepared])[0])


def describe_files(
    matcher: PairMatcher, files: Iterable[Path], cache: Path | None = None, progress: bool = False
) -> tuple[dict[Path, np.ndarray], dict[Path, str]]:
    """The descriptor of each file, d, and what is wrong with those that cannot be read. Descriptors stay in
    `cache`, an .npz, by the digest of their image and of the weights."""
    length = 2 * matcher.info.config.coarse_dim
    known = {} if cache is None else _read_cache(cache, length)
    described: dict[Path, np.ndarray] = {}
    broken: dict[Path, str] = {}
    new, saved = 0, time.monotonic()

    def look(path: Path) -> tuple[str, Prepared | None]:
        key = f"{content_of(path)}-{matcher.info.sha256}"
        return key, None if key in known else matcher.prepare(path, SIZE)

    bar = tqdm(dict.fromkeys(files), "describing", unit="image", disable=None if progress else True)
    for path, found in in_threads(bar, look):
        if isinstance(found, UserError):
            broken[path] = str(found)
        else:
            key, prepared = found
            if prepared is not None:
                known[key] = _describe(matcher, prepared)
                new += 1
            described[path] = known[key]
        if cache is not None and new and time.monotonic() - saved > SECONDS_A_SAVE:
            _write_cache(cache, known)
            new, saved = 0, time.monotonic()
    if cache is not None and new:
        _write_cache(cache, known)
    return described, broken


def _read_cache(path: Path, length: int) -> dict[str, np.ndarray]:
    try:
        stored = load_arrays(path)
    except (OSError, ValueError):  # not there, or as good as not
        return {}
    return {k: v for k, v in stored.items() if v.shape == (length,) and v.dtype == np.float32}


def _write_cache(path: Path, known: dict[str, np.ndarray]) -> None:
    arrays: dict[str, Any] = known
    with atomic_path(path) as temporary:
        np.savez(temporary, **arrays)


@torch.inference_mode()
def pool(image: ImageFeatures) -> np.ndarray:
    """d: the generalised mean over the cells of an image of each channel's positive part, then of each
    channel's negative part."""
    cells = image.features.coarse[image.features.valid].float()  # n c
    signed = torch.cat([cells, -cells], dim=1).clamp(min=1e-6)
    pooled = signed.pow(POWER).mean(dim=0).pow(1 / POWER).cpu().numpy()
    return unit(pooled[None])[0]


def top_pairs(queries: np.ndarray, references: np.ndarray | None, k: int) -> np.ndarray:
    """m 2, int64: for each query (n d) the rows of its k nearest references (r d), nearest first.
    Without references the queries are compared with each other, and never with themselves."""
    if k < 1:
        raise UserError(f"the number of images to retrieve must be at least 1, not {k}")
    among = queries if references is None else references
    if not len(queries) or not len(among):
        return np.zeros((0, 2), np.int64)
    similarity = similarities(queries, among)
    if references is None:
        np.fill_diagonal(similarity, -np.inf)
        k = min(k, len(among) - 1)
    nearest = np.argsort(-similarity, axis=1, kind="stable")[:, :k]
    rows = np.repeat(np.arange(len(queries)), nearest.shape[1])
    return np.stack([rows, nearest.ravel()], axis=1)


def similarities(queries: np.ndarray, references: np.ndarray) -> np.ndarray:
    """n r, in [-1, 1]. What all images have in common says nothing about any of them: the mean of the
    references is taken away before the angles are measured."""
    mean = references.mean(axis=0)
    return unit(queries - mean) @ unit(references - mean).T


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)).astype(np.float32)
