"""Which images may show the same place: a global descriptor pooled from the matcher's own backbone."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from prism_match.engine.photos import content_of, in_threads
from prism_match.errors import UserError
from prism_match.files import atomic_path, load_arrays
from prism_match.images import ImageLike
from prism_match.matcher import ImageFeatures, PairMatcher, Prepared
from prism_match.model.arithmetic import inference

SIZE = 320  # longer side in pixels
SECONDS_A_SAVE = 30.0  # of describing that a kill can cost
EXACT_UP_TO = 50_000  # images; beyond that an index is asked
SIMILARITIES = 2**25  # that are in memory at a time
BLOCK = 2**15  # descriptors that an index takes at a time
SAMPLES_A_CELL, PROBED = 40, 32  # of the index: descriptors to find a cell by; cells that a query looks into
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
    saving = 0.0  # seconds that it took: all of it is written each time, and a million are two gigabytes

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
        if cache is not None and new and time.monotonic() - saved > max(SECONDS_A_SAVE, 20 * saving):
            began = time.monotonic()
            _write_cache(cache, known)
            new, saved = 0, time.monotonic()
            saving = saved - began
    if cache is not None and new:
        _write_cache(cache, known)
    return described, broken


def _read_cache(path: Path, length: int) -> dict[str, np.ndarray]:
    try:
        stored = load_arrays(path)
        keys, rows = stored["keys"], stored["descriptors"]
        if keys.dtype.kind != "S" or rows.dtype != np.float32 or rows.shape != (*keys.shape, length):
            return {}
        return dict(zip((key.decode("ascii") for key in keys.tolist()), rows, strict=True))
    except (OSError, ValueError, KeyError):  # not there, or as good as not
        return {}


def _write_cache(path: Path, known: dict[str, np.ndarray]) -> None:
    """Two arrays: an entry for each image would make an archive of a million files."""
    keys = sorted(known)
    with atomic_path(path) as temporary:
        np.savez(temporary, keys=np.array(keys, "S"), descriptors=np.stack([known[key] for key in keys]))


@inference()
def pool(image: ImageFeatures) -> np.ndarray:
    """d: the generalised mean over the cells of an image of each channel's positive part, then of each
    channel's negative part."""
    cells = image.features.coarse[image.features.valid].float()  # n c
    signed = torch.cat([cells, -cells], dim=1).clamp(min=1e-6)
    pooled = signed.pow(POWER).mean(dim=0).pow(1 / POWER).cpu().numpy()
    return unit(pooled[None])[0]


def top_pairs(queries: np.ndarray, references: np.ndarray | None, k: int) -> np.ndarray:
    """m 2, int64: for each query (n d) the rows of its k nearest references (r d), nearest first.
    Without references the queries are compared with each other, and never with themselves. Among many
    references an index is asked, which misses a few (docs/scale.md)."""
    if k < 1:
        raise UserError(f"the number of images to retrieve must be at least 1, not {k}")
    among = queries if references is None else references
    if not len(queries) or not len(among):
        return np.zeros((0, 2), np.int64)
    if references is None:
        k = min(k, len(among) - 1)
    search = exact_search(among)
    if len(among) > EXACT_UP_TO:
        try:
            search = index_search(among)
        except ImportError:
            print(
                f"prism: comparing each of {len(queries)} images with {len(among)}; an index is far faster: "
                "pip install 'prism-match[ann]'", file=sys.stderr,
            )  # fmt: skip
    most = k if references is not None else k + 1  # it finds itself
    rows, columns = [], []
    for start in range(0, len(queries), BLOCK):
        found = search(queries[start : start + BLOCK], min(most, len(among)))
        query = np.repeat(np.arange(start, start + len(found)), found.shape[1])
        found = found.ravel()
        # An index can find fewer than it was asked for.
        kept = (found >= 0) if references is not None else (found >= 0) & (found != query)
        rows.append(query[kept])
        columns.append(found[kept])
    pairs = np.stack([np.concatenate(rows), np.concatenate(columns)], axis=1)
    # Of one that does not find itself, k + 1 others are there.
    place = np.arange(len(pairs)) - np.searchsorted(pairs[:, 0], pairs[:, 0])
    return pairs[place < k]


Search = Callable[[np.ndarray, int], np.ndarray]  # queries n d, k -> n k rows of references, -1: none


def exact_search(references: np.ndarray) -> Search:
    mean = references.mean(axis=0)
    ready = np.empty(references.shape, np.float32)
    for start in range(0, len(references), BLOCK):  # all at once would take several times the memory
        ready[start : start + BLOCK] = unit(references[start : start + BLOCK] - mean)

    def search(queries: np.ndarray, k: int) -> np.ndarray:
        found = []
        at_once = max(1, SIMILARITIES // len(ready))
        for start in range(0, len(queries), at_once):
            similarity = unit(queries[start : start + at_once] - mean) @ ready.T
            few = np.argpartition(-similarity, k - 1, axis=1)[:, :k]
            few.sort(axis=1)  # of equals the first
            order = np.argsort(-np.take_along_axis(similarity, few, axis=1), axis=1, kind="stable")
            found.append(np.take_along_axis(few, order, axis=1))
        return np.concatenate(found)

    return search


def index_search(references: np.ndarray) -> Search:
    """By FAISS: references lie in cells around means, and only those in the cells nearest to a query are
    compared with it. Half precision, and never a copy of all references. A graph (HNSW) finds more of those
    that have no place in common, but is another one each time that several threads build it."""
    import faiss

    mean = references.mean(axis=0)
    count, width = references.shape
    cells = int(4 * np.sqrt(count))
    index = faiss.IndexIVFScalarQuantizer(
        faiss.IndexFlatIP(width), width, cells, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT
    )
    index.cp.niter, index.cp.seed = 6, 0
    sample = np.random.default_rng(0).choice(count, min(count, SAMPLES_A_CELL * cells), replace=False)
    index.train(unit(references[np.sort(sample)] - mean))
    for start in range(0, count, BLOCK):
        index.add(unit(references[start : start + BLOCK] - mean))
    index.nprobe = PROBED
    return lambda queries, k: index.search(unit(queries - mean), k)[1]


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)).astype(np.float32)
