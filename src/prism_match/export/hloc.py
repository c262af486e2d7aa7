"""hloc's files: key points by image, matches by pair, in HDF5, both ways.

    features.h5   NAME/keypoints (n 2), NAME/scores (n), NAME/image_size (2); a name with folders is nested
    matches.h5    NAME0/NAME1, with each / in a name replaced by -, and in it
                  matches0 (n0: row of the key point of image 1, -1 for none) and matching_scores0 (n0)
                  keypoints0, keypoints1 (m 2) and scores (m), as hloc's dense matchers leave them

Both may be in one file of matches. The centre of the first pixel is (0, 0) in both worlds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from prism_match.errors import UserError
from prism_match.files import atomic_path, reading

Names = tuple[str, str]


@dataclass(frozen=True)
class Features:
    """The key points of an image."""

    keypoints: np.ndarray  # n 2, float32
    scores: np.ndarray  # n, float32
    size: tuple[int, int] | None = None  # width, height


@dataclass(frozen=True)
class SparseMatches:
    """Matches between key points of two images."""

    index: np.ndarray  # m 2, int64
    scores: np.ndarray  # m, float32


@dataclass(frozen=True)
class DenseMatches:
    """Matches of one pair, with points of their own."""

    keypoints0: np.ndarray  # m 2, float32
    keypoints1: np.ndarray  # m 2
    scores: np.ndarray  # m


def pair_key(name0: str, name1: str) -> str:
    return f"{name0.replace('/', '-')}/{name1.replace('/', '-')}"


def write_features(path: Path, features: Mapping[str, Features]) -> None:
    with atomic_path(path) as temporary, h5py.File(temporary, "w") as file:
        for name, one in features.items():
            group = file.create_group(name)
            _put(group, keypoints=one.keypoints, scores=one.scores)
            group["keypoints"].attrs["uncertainty"] = 1.0  # pixels; hloc's triangulation asks for it
            if one.size is not None:
                group["image_size"] = np.array(one.size)


def read_features(path: Path) -> dict[str, Features]:
    found: dict[str, Features] = {}

    def visit(name: str, group: h5py.Group | h5py.Dataset) -> None:
        if isinstance(group, h5py.Group) and "keypoints" in group:
            points = np.asarray(group["keypoints"], np.float32).reshape(-1, 2)
            scores = np.asarray(group.get("scores", np.ones(len(points))), np.float32)
            size = tuple(int(x) for x in group["image_size"][()]) if "image_size" in group else None
            found[name] = Features(points, scores, size)  # type: ignore[arg-type]

    with _opened(path) as file, reading(path, "a file of hloc's features"):
        file.visititems(visit)
    if not found:
        raise UserError(f"{path}: not a file of hloc's features (no key points in it)")
    return found


def write_matches(
    path: Path,
    sparse: Mapping[Names, SparseMatches],
    counts: Mapping[str, int],
    dense: Iterable[tuple[Names, DenseMatches]] = (),
) -> None:
    """counts: how many key points each image has. dense: for the same pairs or others."""
    full_names({name for names in sparse for name in names})
    with atomic_path(path) as temporary, h5py.File(temporary, "w") as file:
        for names, matches in sparse.items():
            group = file.require_group(pair_key(*names))
            matches0 = np.full(counts[names[0]], -1, np.int32)
            scores0 = np.zeros(counts[names[0]], np.float16)
            matches0[matches.index[:, 0]] = matches.index[:, 1]
            scores0[matches.index[:, 0]] = matches.scores
            _put(group, matches0=matches0, matching_scores0=scores0)
        for names, points in dense:
            group = file.require_group(pair_key(*names))
            _put(group, keypoints0=points.keypoints0, keypoints1=points.keypoints1, scores=points.scores)


def _put(group: h5py.Group, **arrays: np.ndarray) -> None:
    """With checksums, which HDF5 looks at by itself whenever they are read."""
    for name, array in arrays.items():
        group.create_dataset(name, data=array, fletcher32=array.size > 0)


def read_sparse_matches(path: Path, names: Iterable[str]) -> Iterator[tuple[Names, SparseMatches]]:
    """names: of the images, since those in the file have lost their folders."""
    for pair, group in _pairs(path, names):
        if "matches0" not in group:
            continue
        with reading(path, "a file of hloc's matches"):
            matches0 = group["matches0"][()]
            rows = np.flatnonzero(matches0 >= 0)
            scores = np.asarray(group["matching_scores0"], np.float32)[rows]
        yield pair, SparseMatches(np.stack([rows, matches0[rows]], axis=1).astype(np.int64), scores)


def read_dense_matches(path: Path, names: Iterable[str]) -> Iterator[tuple[Names, DenseMatches]]:
    for pair, group in _pairs(path, names):
        if "keypoints0" in group:
            with reading(path, "a file of hloc's matches"):
                arrays = [np.asarray(group[k], np.float32) for k in ("keypoints0", "keypoints1", "scores")]
            yield pair, DenseMatches(*arrays)


def full_names(names: Iterable[str]) -> dict[str, str]:
    """By their names in keys of pairs, which must tell them apart."""
    full: dict[str, str] = {}
    for name in names:
        key = name.replace("/", "-")
        if full.setdefault(key, name) != name:
            raise UserError(f"{name} and {full[key]} have the same name in hloc's files")
    return full


def _pairs(path: Path, names: Iterable[str]) -> Iterator[tuple[Names, h5py.Group]]:
    full = full_names(names)
    with _opened(path) as file:
        for first, seconds in file.items():
            if not isinstance(seconds, h5py.Group):
                raise UserError(f"{path}: not a file of hloc's matches (no pairs of images in it)")
            for second, group in seconds.items():
                unknown = [n for n in (first, second) if n not in full]
                if unknown:
                    raise UserError(f"{path}: no image is called {unknown[0]} there")
                yield (full[first], full[second]), group


def _opened(path: Path) -> h5py.File:
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    with reading(path, "an HDF5 file"):
        return h5py.File(path, "r")
