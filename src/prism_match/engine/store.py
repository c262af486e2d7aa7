"""`matches.h5`: the matches of many pairs in one file, and never those of other images or settings.

    /                     attributes: format, settings (JSON)
    /images               names; data sets beside it: sizes (n 2), digests (of the files)
    /pairs/NAME0/NAME1    keypoints0 (m 2), keypoints1 (m 2), scores (m); names are percent-encoded

A file that is written to while a process is killed can be lost as a whole. So new matches go into parts
beside it, each of which is there whole or not at all, and the parts are put together at the end.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import h5py
import numpy as np

from prism_match.errors import UserError
from prism_match.files import atomic_path, short_hash, writable_folder

FORMAT = 1
Names = tuple[str, str]


@dataclass(frozen=True)
class PairMatches:
    """The matches of two images, in their original pixels; the centre of the first pixel is (0, 0)."""

    keypoints0: np.ndarray  # m 2, float32
    keypoints1: np.ndarray  # m 2, float32
    scores: np.ndarray  # m, float32

    def __len__(self) -> int:
        return len(self.scores)


@dataclass(frozen=True)
class ImageEntry:
    """What the store knows of an image."""

    size: tuple[int, int]  # width, height
    digest: str  # of the file


class MatchStore:
    """Read and extend a `matches.h5`.

    store = MatchStore("matches.h5")
    for name0, name1 in store.pairs:
        m = store.load(name0, name1)
    """

    def __init__(self, path: str | Path, settings: dict[str, Any] | None = None):
        """settings: what the matches depend on (weights, size, threshold); None: those of the file.
        A file of other settings is kept under another name and a new one begun."""
        self.path = Path(path)
        self.parts = self.path.with_suffix(".parts")
        self.settings = settings or {}
        self.images: dict[str, ImageEntry] = {}
        self.where: dict[Names, Path] = {}
        self.replaced: Path | None = None  # where a file of other settings went
        if settings is None and not self.path.is_file():
            raise UserError(f"{path}: no such file of matches")
        if self.path.is_file():
            found = self._read(self.path)
            if settings is None:
                self.settings = found
            elif found != settings:
                self._begin_anew(found)
        for part in sorted(self.parts.glob("*.h5")):
            if self._read(part, self.settings) != self.settings:
                part.unlink()

    @property
    def pairs(self) -> list[Names]:
        return list(self.where)

    @property
    def scales(self) -> dict[str, float]:
        """How many times larger each image is than it was matched."""
        size = self.settings.get("size")
        return {k: max(1.0, max(v.size) / size) if size else 1.0 for k, v in self.images.items()}

    def load(self, name0: str, name1: str) -> PairMatches:
        """Also of a pair that is stored the other way round."""
        if (name0, name1) not in self.where and (name1, name0) in self.where:
            m = self.load(name1, name0)
            return PairMatches(m.keypoints1, m.keypoints0, m.scores)
        if (name0, name1) not in self.where:
            raise UserError(f"{self.path}: no matches of {name0} and {name1} in it")
        with h5py.File(self.where[name0, name1], "r") as file:
            return _load_pair(file[pair_key("pairs", (name0, name1))])

    def load_all(self) -> Iterator[tuple[Names, PairMatches]]:
        """Every pair, in the order of its names."""
        files: dict[Path, h5py.File] = {}
        try:
            for names in sorted(self.where):
                path = self.where[names]
                if path not in files:
                    files[path] = h5py.File(path, "r")
                yield names, _load_pair(files[path][pair_key("pairs", names)])
        finally:
            for file in files.values():
                file.close()

    def forget(self, names: set[str]) -> None:
        """Drop images that have changed, and their matches."""
        self.images = {k: v for k, v in self.images.items() if k not in names}
        self.where = {k: v for k, v in self.where.items() if not names.intersection(k)}

    def add(self, found: dict[Names, PairMatches], images: dict[str, ImageEntry]) -> None:
        """As a new part; on disk when this returns. `images`: of these pairs at least."""
        if not found:
            return
        taken = [int(p.stem) for p in writable_folder(self.parts).glob("*.h5") if p.stem.isdigit()]
        part = self.parts / f"{max(taken, default=-1) + 1:06d}.h5"
        with atomic_path(part) as temporary, h5py.File(temporary, "w") as file:
            _write_head(file, self.settings, images)
            for names, matches in found.items():
                _save_pair(file.create_group(pair_key("pairs", names)), matches)
        self.images |= images
        self.where |= dict.fromkeys(found, part)

    def merge(self) -> None:
        """All parts into the one file."""
        if self.path.is_file() and not any(self.parts.glob("*.h5")):
            return
        with atomic_path(self.path) as temporary, h5py.File(temporary, "w") as file:
            _write_head(file, self.settings, self.images)
            for names, matches in self.load_all():
                _save_pair(file.create_group(pair_key("pairs", names)), matches)
        self.where = dict.fromkeys(self.where, self.path)
        shutil.rmtree(self.parts, ignore_errors=True)

    def _read(self, path: Path, wanted: dict[str, Any] | None = None) -> dict[str, Any]:
        """Takes note of what is in a file, unless its settings are not the wanted ones; its settings."""
        try:
            with h5py.File(path, "r") as file:
                if file.attrs.get("format") != FORMAT:
                    raise ValueError("of another format")
                settings = json.loads(file.attrs["settings"])
                if wanted is not None and settings != wanted:
                    return settings
                names = [_text(x) for x in file["images"][()]]
                sizes, digests = file["sizes"][()], file["digests"][()]
                for name, size, digest in zip(names, sizes.tolist(), digests, strict=True):
                    self.images[name] = ImageEntry((size[0], size[1]), _text(digest))
                for first, group in file.get("pairs", {}).items():
                    for second in group:
                        self.where[unquote(first), unquote(second)] = path
                return settings
        except (OSError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: not a file of matches ({error})") from error

    def _begin_anew(self, found: dict[str, Any]) -> None:
        self.images, self.where = {}, {}
        self.replaced = self.path.with_stem(f"{self.path.stem}-{short_hash(found)}")
        self.path.replace(self.replaced)


def _write_head(file: h5py.File, settings: dict[str, Any], images: dict[str, ImageEntry]) -> None:
    file.attrs["format"], file.attrs["settings"] = FORMAT, json.dumps(settings, sort_keys=True)
    text = h5py.string_dtype()
    file.create_dataset("images", data=list(images), dtype=text, shape=(len(images),))
    file["sizes"] = np.array([i.size for i in images.values()], np.int64).reshape(-1, 2)
    digests = [i.digest for i in images.values()]
    file.create_dataset("digests", data=digests, dtype=text, shape=(len(images),))
    file.create_group("pairs")


def _save_pair(group: h5py.Group, matches: PairMatches) -> None:
    group["keypoints0"], group["keypoints1"] = matches.keypoints0, matches.keypoints1
    group["scores"] = matches.scores


def _load_pair(group: h5py.Group) -> PairMatches:
    return PairMatches(*(group[k][()] for k in ("keypoints0", "keypoints1", "scores")))


def pair_key(group: str, names: Names) -> str:
    """Names may have slashes in them, which mean something else in the file."""
    return "/".join([group, *(quote(name, safe=" ") for name in names)])


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
