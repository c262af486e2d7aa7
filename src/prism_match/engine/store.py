"""`matches.h5`: the matches of many pairs in one file, and never those of other photos or settings.

    /                     attributes: format, settings (JSON), pairs (how many there are)
    /images               names; data sets beside it: sizes (n 2), digests (of the files), stamps (of what
                          changes with a file, where it is not read to be known)
    /pairs/NAME0/NAME1    m 5: x and y in both photos, score; or m 7, with certainty and sigma, where these
                          are known; names are percent-encoded
    /index                p 2: the pairs again, as numbers of images, to be read at once

A file that is written to while a process is killed can be lost as a whole. So new matches go into parts
beside it, each of which is there whole or not at all, and the parts are put together at the end. All data is
written with checksums, so that damage is found rather than read. One process writes at a time.

What many processes have written is a folder: `store.json` with the settings, and such files in `shards`
(`engine/shards.py`). It is read as one file is.
"""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

import h5py
import numpy as np

from prism_match.config import parse_json
from prism_match.engine.folders import open_folder
from prism_match.engine.photos import Resize
from prism_match.errors import UserError
from prism_match.files import Lock, fixed_text, new_h5, read_dataset, short_hash, text_of, writable_folder
from prism_match.matches import BELIEF, Matches

FORMAT = 3
LAYOUT = ("v110", "v110")  # of HDF5: has checksums of its own structures, and sees that a file is cut short
Names = tuple[str, str]
SETTINGS, SHARDS = "store.json", "shards"  # of a folder
MOST_OPEN = 64  # files: a folder can have more of them than a process may open


@dataclass(frozen=True)
class ImageEntry:
    """What the store knows of a photo."""

    size: tuple[int, int]  # width, height
    digest: str  # of the file
    stamp: str = ""  # of the file, where that was asked for


class MatchStore(Mapping[Names, Matches]):
    """Matches by the names of two photos.

    store = MatchStore("matches.h5")
    for pair in store:
        print(pair, len(store[pair]))
    """

    def __init__(self, path: str | Path, settings: dict[str, Any] | None = None):
        """settings: what the matches depend on (weights, size, threshold), to write some; a file of other
        settings, or a damaged one, is kept under another name and a new one begun. None: to read what is
        there, which may also be the folder, or its address, that `prism match-pairs` wrote."""
        self.path = Path(path)
        self.parts = self.path.with_suffix(".parts")
        self.images: dict[str, ImageEntry] = {}
        self.replaced: Path | None = None  # where a file of other settings went
        self._where: dict[Names, Any] = {}  # what `_open` takes
        self._files: OrderedDict[Any, h5py.File] = OrderedDict()
        self._lock: Lock | None = None
        if settings is None and ("://" in str(path) or self.path.is_dir()):
            shards = open_folder(path).inside(SHARDS)
            self.settings = read_settings(path)
            for name in shards.names(".h5"):
                self._read(shards.open(name))
            return
        if settings is None:
            if not self.path.is_file():
                raise UserError(f"{path}: no such file of matches")
            self.settings = self._read(self.path)
        else:
            self.settings = json.loads(json.dumps(settings))  # as they are read: no tuples
            writable_folder(self.path.parent)
            self._lock = Lock(self.path.with_suffix(".lock"), str(path))
            self._begin()
        for part in sorted(self.parts.glob("*.h5")):
            self._read_part(part)

    def __iter__(self) -> Iterator[Names]:
        return iter(sorted(self._where))

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, pair: object) -> bool:
        return pair in self._where

    def __getitem__(self, pair: Names) -> Matches:
        """Also of a pair that is stored the other way round."""
        if pair not in self._where and pair[::-1] in self._where:
            return self[pair[1], pair[0]].swap()
        if pair not in self._where:
            raise KeyError(f"{self.path}: no matches of {pair[0]} and {pair[1]} in it")
        path = self._where[pair]
        try:
            return _load(self._open(path), self.images, pair)
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            raise UserError(f"{path}: damaged: the matches of {pair[0]} and {pair[1]} ({error})") from error

    def _open(self, path: Any) -> h5py.File:
        if path not in self._files:
            if len(self._files) >= MOST_OPEN:
                self._files.popitem(last=False)[1].close()
            self._files[path] = h5py.File(path, "r")
        self._files.move_to_end(path)
        return self._files[path]

    @property
    def scales(self) -> dict[str, float]:
        """How many times larger each photo is than it was matched."""
        if "resize" not in self.settings:
            return dict.fromkeys(self.images, 1.0)
        resizing = Resize(**self.settings["resize"])
        return {k: max(1.0, max(v.size) / max(resizing(v.size))) for k, v in self.images.items()}

    def forget(self, names: set[str]) -> None:
        """Drop photos that have changed, and their matches."""
        self.images = {k: v for k, v in self.images.items() if k not in names}
        self._where = {k: v for k, v in self._where.items() if not names.intersection(k)}

    def add(self, found: Mapping[Names, Matches], digests: Mapping[str, str]) -> None:
        """As a new part; on disk when this returns. digests: of the photos in it."""
        if self._lock is None:
            raise UserError(f"{self.path}: is open to be read only")
        if not found:
            return
        images = {
            name: ImageEntry((int(size[0]), int(size[1])), digests[name])
            for names, m in found.items()
            for name, size in zip(names, (m.size0, m.size1), strict=True)
        }
        taken = [int(p.stem) for p in writable_folder(self.parts).glob("*.h5") if p.stem.isdigit()]
        part = self.parts / f"{max(taken, default=-1) + 1:06d}.h5"
        _write(part, self.settings, images, found.items())
        self.images |= images
        self._where |= dict.fromkeys(found, part)

    def merge(self) -> None:
        """All parts into the one file."""
        if self.path.is_file() and not any(self.parts.glob("*.h5")):
            return
        _write(self.path, self.settings, self.images, self._readable())
        self._close_files()
        self._where = dict.fromkeys(self._where, self.path)
        shutil.rmtree(self.parts, ignore_errors=True)

    def _readable(self) -> Iterator[tuple[Names, Matches]]:
        """Every pair but those that turn out to be damaged, which are dropped."""
        for pair in self:
            try:
                yield pair, self[pair]
            except UserError:
                self.discard(pair)

    def discard(self, pair: Names) -> None:
        self._where.pop(pair, None)

    def close(self) -> None:
        """Lets another process write. What is in it can still be read."""
        self._close_files()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> MatchStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _begin(self) -> None:
        """Takes what is there, unless it is of other settings: that is put aside."""
        if not self.path.is_file():
            return
        try:
            found = self._read(self.path, self.settings)
        except UserError as error:
            found = {"damaged": str(error)}
        if found == self.settings:
            return
        self.replaced = unused(self.kept(found))
        self.path.replace(self.replaced)
        earlier = self.kept(self.settings | {"format": FORMAT})
        with suppress(UserError):  # which is damaged, and stays where it is
            if earlier.is_file() and self._read(earlier, self.settings) == self.settings:
                earlier.replace(self.path)
                self._where = dict.fromkeys(self._where, self.path)

    def kept(self, settings: dict[str, Any]) -> Path:
        """The name under which a file of these settings is put aside."""
        return self.path.with_stem(f"{self.path.stem}-{short_hash(settings)}")

    def _read_part(self, part: Path) -> None:
        """Or, to write, removes one that is of other settings or damaged: its pairs are matched again."""
        try:
            fits = self._read(part, self.settings) == self.settings
        except UserError:
            if self._lock is None:
                raise
            fits = False
        if not fits and self._lock is not None:
            part.unlink()

    def _read(self, path: Any, wanted: dict[str, Any] | None = None) -> dict[str, Any]:
        """Takes note of what is in a file, unless its settings are not the wanted ones; its settings."""
        settings, images, pairs = read_contents(path, wanted)
        # Of a photo that has changed since, what an earlier file has is of no use: parts come in their order.
        known = self.images.keys() & images.keys()
        self.forget({name for name in known if self.images[name].digest != images[name].digest})
        self.images |= images
        self._where |= dict.fromkeys(pairs, path)
        return settings


def unused(path: Path) -> Path:
    """The path, or one with a number, where there is no file yet."""
    names = (path if n == 1 else path.with_stem(f"{path.stem}-{n}") for n in count(1))
    return next(name for name in names if not name.exists())


def read_contents(
    path: Any, wanted: dict[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, ImageEntry], list[Names]]:
    """The settings, photos and pairs of a file, without its matches; of one whose settings are not the wanted
    ones, no photos and pairs. path: or an open file."""
    try:
        with h5py.File(path, "r") as file:
            settings = parse_json(file.attrs["settings"])
            if wanted is not None and (settings != wanted or file.attrs["format"] != FORMAT):
                return settings | {"format": int(file.attrs["format"])}, {}, []
            if file.attrs["format"] != FORMAT:
                raise ValueError(f"of format {file.attrs['format']}; match again")
            names = [text_of(x) for x in read_dataset(file["images"])]
            sizes, digests = (read_dataset(file[key]) for key in ("sizes", "digests"))
            if sizes.shape != (len(names), 2) or not np.issubdtype(sizes.dtype, np.integer):
                raise ValueError("the sizes of its images are none")
            stamps = read_dataset(file["stamps"]) if "stamps" in file else [""] * len(names)
            images = {
                name: ImageEntry((size[0], size[1]), text_of(digest), text_of(stamp))
                for name, size, digest, stamp in zip(names, sizes.tolist(), digests, stamps, strict=True)
            }
            pairs = [(names[a], names[b]) for a, b in read_dataset(file["index"]).reshape(-1, 2).tolist()]
            if len(pairs) != file.attrs["pairs"]:
                raise ValueError(f"{len(pairs)} pairs instead of {file.attrs['pairs']}")
            return settings, images, pairs
    except (OSError, KeyError, ValueError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        raise UserError(f"{path}: not a file of matches, or a damaged one ({error})") from error


def read_pairs(path: Any, images: Mapping[str, ImageEntry], pairs: Iterable[Names]) -> dict[Names, Matches]:
    """The matches of some pairs of a file, but for those that are damaged."""
    found = {}
    with h5py.File(path, "r") as file:
        for pair in pairs:
            with suppress(OSError, KeyError, ValueError, RuntimeError):
                found[pair] = _load(file, images, pair)
    return found


def _load(file: h5py.File, images: Mapping[str, ImageEntry], pair: Names) -> Matches:
    table = read_dataset(file[group_name("pairs", pair)])
    if table.ndim != 2 or table.shape[1] not in (5, 5 + len(BELIEF)):
        raise ValueError("the matches of a pair are none")
    belief = dict(zip(BELIEF, table[:, 5:].T, strict=False))
    size0, size1 = (images[name].size for name in pair)
    return Matches(table[:, :2], table[:, 2:4], table[:, 4], size0, size1, *pair, **belief)


def read_settings(address: str | Path) -> dict[str, Any]:
    """Of a folder of matches."""
    try:
        settings = parse_json(open_folder(address).read(SETTINGS))["settings"]
        if not isinstance(settings, dict):
            raise TypeError("no settings in it")
    except UserError as error:
        raise UserError(f"{address}: no folder of matches ({error})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{address}/{SETTINGS}: damaged ({error})") from error
    return settings


def is_store(path: Path) -> bool:
    """Rather than a file of the matches of one pair; also where it is damaged."""
    if (path / SETTINGS).is_file():
        return True
    if path.suffix != ".h5" or not path.is_file() or not h5py.is_hdf5(path):
        return False
    try:
        with h5py.File(path, "r") as file:
            return "pairs" in file
    except (OSError, RuntimeError, ValueError):
        return True


def _write(
    path: Path,
    settings: dict[str, Any],
    images: dict[str, ImageEntry],
    found: Iterable[tuple[Names, Matches]],
) -> None:
    with new_h5(path, libver=LAYOUT) as (file, check):
        _fill(file, settings, images, found, check)


def file_image(
    settings: dict[str, Any], images: dict[str, ImageEntry], found: Mapping[Names, Matches]
) -> bytes:
    """The bytes of a file of matches, for wherever it is to be kept."""
    with h5py.File("shard.h5", "w", libver=LAYOUT, driver="core", backing_store=False) as file:
        _fill(file, settings, images, found.items())
        file.flush()
        return file.id.get_file_image()


def _fill(
    file: h5py.File,
    settings: dict[str, Any],
    images: dict[str, ImageEntry],
    found: Iterable[tuple[Names, Matches]],
    check: Callable[[], None] = lambda: None,
) -> None:
    file.attrs["format"] = FORMAT
    file.attrs["settings"] = fixed_text([json.dumps(settings, sort_keys=True)]).reshape(())
    _save(file, "sizes", np.array([i.size for i in images.values()], np.int64).reshape(-1, 2))
    _save(file, "images", fixed_text(list(images)))
    _save(file, "digests", fixed_text([i.digest for i in images.values()]))
    if any(i.stamp for i in images.values()):
        _save(file, "stamps", fixed_text([i.stamp for i in images.values()]))
    file.create_group("pairs")
    number = {name: n for n, name in enumerate(images)}
    index = []
    for names, m in found:
        belief = [getattr(m, name) for name in BELIEF]
        told = [m.scores, *belief] if all(x is not None for x in belief) else [m.scores]
        table = np.concatenate([m.keypoints0, m.keypoints1, np.stack(told, axis=1)], axis=1)
        _save(file, group_name("pairs", names), table.astype(np.float32))
        check()
        index.append([number[name] for name in names])
    _save(file, "index", np.array(index, np.int64).reshape(-1, 2))
    file.attrs["pairs"] = len(index)


def _save(file: h5py.File, key: str, array: np.ndarray) -> None:
    # A chunk for all of it: what is empty has none, and no checksum.
    options = {"chunks": array.shape, "fletcher32": True} if array.size else {}
    file.create_dataset(key, data=array, **options)


def group_name(group: str, names: Names) -> str:
    """Names may have slashes in them, which mean something else in the file."""
    return "/".join([group, *(quote(name, safe=" ") for name in names)])
