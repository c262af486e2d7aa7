"""hloc's files: key points by image, matches by pair, in HDF5, both ways.

    features.h5   NAME/keypoints (n 2), NAME/scores (n), NAME/image_size (2); a name with folders is nested
    matches.h5    NAME0/NAME1, with each / in a name replaced by -, and in it
                  matches0 (n0: row of the key point of image 1, -1 for none) and matching_scores0 (n0)
                  keypoints0, keypoints1 (m 2) and scores (m), as hloc's dense matchers leave them

Both may be in one file of matches. The centre of the first pixel is (0, 0) in both worlds."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from prism_match.engine.store import MatchStore, Names, is_store
from prism_match.errors import UserError
from prism_match.files import atomic_path, new_h5, read_dataset, reading, writable_folder
from prism_match.maps.shared_keypoints import IndexedMatches
from prism_match.maps.tracks import TrackOptions, share_keypoints
from prism_match.matches import Matches


@dataclass(frozen=True)
class HlocKeypoints:
    """The key points of an image."""

    keypoints: np.ndarray  # n 2, float32
    scores: np.ndarray  # n, float32
    size: tuple[int, int] | None = None  # width, height


@dataclass(frozen=True)
class DenseMatches:
    """Matches of one pair, with points of their own."""

    keypoints0: np.ndarray  # m 2, float32
    keypoints1: np.ndarray  # m 2
    scores: np.ndarray  # m


def pair_key(name0: str, name1: str) -> str:
    return f"{name0.replace('/', '-')}/{name1.replace('/', '-')}"


def write_features(path: Path, features: Mapping[str, HlocKeypoints]) -> None:
    with new_h5(path) as (file, _):
        for name, one in features.items():
            if name in file:
                raise UserError(f"{name}: is listed under two names, which hloc's files cannot tell apart")
            group = file.create_group(name)
            _put(group, keypoints=one.keypoints, scores=one.scores)
            group["keypoints"].attrs["uncertainty"] = 1.0  # pixels; hloc's triangulation asks for it
            if one.size is not None:
                group["image_size"] = np.array(one.size)


def read_features(path: str | Path) -> dict[str, HlocKeypoints]:
    found: dict[str, HlocKeypoints] = {}

    def visit(name: str, group: h5py.Group | h5py.Dataset) -> None:
        if isinstance(group, h5py.Group) and "keypoints" in group:
            points = as_floats(group["keypoints"]).reshape(-1, 2)
            scores = as_floats(group["scores"]) if "scores" in group else np.ones(len(points), np.float32)
            size = tuple(int(x) for x in group["image_size"][()]) if "image_size" in group else None
            found[name] = HlocKeypoints(points, scores, size)  # type: ignore[arg-type]

    with _opened(path) as file, reading(path, "a file of hloc's features"):
        file.visititems(visit)
    if not found:
        raise UserError(f"{path}: not a file of hloc's features (no key points in it)")
    return found


def as_floats(item: h5py.Dataset) -> np.ndarray:
    return read_dataset(item).astype(np.float32)


def write_matches(
    path: Path,
    sparse: Mapping[Names, IndexedMatches],
    counts: Mapping[str, int],
    dense: Iterable[tuple[Names, DenseMatches | Matches]] = (),
) -> None:
    """counts: how many key points each image has. dense: for the same pairs or others."""
    full_names({name for names in sparse for name in names})
    with new_h5(path) as (file, _):
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


def read_sparse_matches(path: str | Path, names: Iterable[str]) -> Iterator[tuple[Names, IndexedMatches]]:
    """names: of the images, since those in the file have lost their folders."""
    for pair, group in _pairs(path, names):
        with reading(path, "a file of hloc's matches"):
            if "matches0" not in group:
                continue
            matches0 = read_dataset(group["matches0"])
            rows = np.flatnonzero(matches0 >= 0)
            scores = as_floats(group["matching_scores0"])
            if matches0.ndim != 1 or scores.shape != matches0.shape:
                raise ValueError("a match and a score for each key point are expected")
            scores = scores[rows]
        yield pair, IndexedMatches(np.stack([rows, matches0[rows]], axis=1).astype(np.int64), scores)


def read_dense_matches(path: str | Path, names: Iterable[str]) -> Iterator[tuple[Names, DenseMatches]]:
    for pair, group in _pairs(path, names):
        with reading(path, "a file of hloc's matches"):
            if "keypoints0" not in group:
                continue
            arrays = [as_floats(group[k]) for k in ("keypoints0", "keypoints1", "scores")]
        yield pair, DenseMatches(*arrays)


def full_names(names: Iterable[str]) -> dict[str, str]:
    """By their names in keys of pairs, which must tell them apart."""
    full: dict[str, str] = {}
    for name in names:
        key = name.replace("/", "-")
        if full.setdefault(key, name) != name:
            raise UserError(f"{name} and {full[key]} have the same name in hloc's files")
    return full


def _pairs(path: str | Path, names: Iterable[str]) -> Iterator[tuple[Names, h5py.Group]]:
    full = full_names(names)
    with _opened(path) as file:
        with reading(path, "a file of hloc's matches"):
            found = []
            for first, group in file.items():
                if not isinstance(
                    group, h5py.Group
                ):  # an array, maybe of more numbers than anyone can wait for
                    raise UserError(f"not a file of hloc's matches ({first} is no image)")
                found += [(first, second) for second in group]
            for first, second in found:
                if not isinstance(file[first][second], h5py.Group):
                    raise UserError(f"not a file of hloc's matches ({first} and {second} have none)")
        for first, second in found:
            unknown = [n for n in (first, second) if n not in full]
            if unknown:
                raise UserError(f"{path}: no image is called {unknown[0]} there")
            yield (full[first], full[second]), file[first][second]


def _opened(path: str | Path) -> h5py.File:
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    with reading(path, "an HDF5 file"):
        return h5py.File(path, "r")


# ---- the command


def export_hloc(
    matches: Sequence[Path], out: Path, images: Path | None = None, options: TrackOptions | None = None
) -> dict[str, int]:
    """features.h5, matches.h5 and pairs.txt of stores of many pairs, or of files of one. images: the folder
    that names are told from; None: the one that all are in. How many images, pairs and matches there are."""
    given = {path.resolve() for path in matches}
    for path in (out / "features.h5", out / "matches.h5"):
        if path.resolve() in given or is_store(path):
            raise UserError(f"{path}: holds matches, and would be replaced; give another folder")
    found, sizes, scales = read_all(matches, images)
    shared = share_keypoints(found.items(), options, scales)
    folder = writable_folder(out)
    # hloc asks for every image and every pair, also for those that have nothing in common.
    blank = np.zeros(0, np.float32)
    features = {name: HlocKeypoints(blank.reshape(0, 2), blank, size) for name, size in sizes.items()}
    features |= {n: HlocKeypoints(k.xy, k.scores, sizes.get(n)) for n, k in shared.keypoints.items()}
    counts = {n: len(f.scores) for n, f in features.items()}
    sparse = {names: IndexedMatches(np.zeros((0, 2), np.int64), blank) for names in found} | shared.matches
    write_features(folder / "features.h5", features)
    write_matches(folder / "matches.h5", sparse, counts, found.items())
    with atomic_path(folder / "pairs.txt") as temporary:
        temporary.write_text("".join(f"{a} {b}\n" for a, b in found), encoding="utf-8")
    total = sum(len(m) for m in sparse.values())
    return {"images": len(features), "pairs": len(found), "matches": total}


def read_all(
    paths: Sequence[Path], images: Path | None
) -> tuple[dict[Names, Matches], dict[str, tuple[int, int]], dict[str, float]]:
    """Matches by the names of the images, from a store of many pairs or files of one; the sizes of the
    images, and how many times larger they are than they were matched, where it is known."""
    found: dict[Names, Matches] = {}
    sizes: dict[str, tuple[int, int]] = {}
    scales: dict[str, float] = {}
    single = []
    for path in paths:
        if is_store(path):
            store = MatchStore(path)
            found |= dict(store.items())
            sizes |= {name: entry.size for name, entry in store.images.items()}
            scales |= store.scales
        else:
            single.append(Matches.load(path))
    folders = {str(Path(name).resolve().parent) for m in single for name in (m.name0, m.name1)}
    root = images.resolve() if images else Path(os.path.commonpath(folders) if folders else "")
    for m in single:
        names = tuple(relative(n, root) for n in (m.name0, m.name1))
        found[names[0], names[1]] = m
        sizes |= dict(zip(names, (m.size0, m.size1), strict=True))
    if not found:
        raise UserError(f"{paths[0]}: no matches in it")
    return found, sizes, scales


def relative(name: str, root: Path) -> str:
    try:
        return Path(name).resolve().relative_to(root).as_posix()
    except ValueError as error:
        raise UserError(f"{name}: not in the folder {root}") from error
