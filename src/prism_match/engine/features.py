"""What is known of photos that are needed again: in memory up to a limit, then on disk up to another; and the
order of pairs in which few photos are needed at a time."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from prism_match.files import atomic_path, writable_folder

NEVER = float("inf")
Named = TypeVar("Named")


def held_bytes(item: Any) -> int:
    """The memory that an item keeps alive: of each tensor and array all of what it is a part of, once."""
    found: dict[int, int] = {}

    def visit(x: Any) -> None:
        if isinstance(x, torch.Tensor):
            storage = x.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(x, np.ndarray):
            while isinstance(x.base, np.ndarray):
                x = x.base
            found[id(x)] = x.nbytes
        elif is_dataclass(x):
            for field in fields(x):
                visit(getattr(x, field.name))
        elif isinstance(x, (tuple, list)):
            for part in x:
                visit(part)

    visit(item)
    return sum(found.values())


def arrange(pairs: Sequence[tuple[Named, Named]], photos: int) -> list[int]:
    """The order of the pairs in which about so many photos at a time are enough: those between one block of
    photos and another come after each other, forth and back so that neighbouring blocks share one side.
    Photos are numbered as they come, so that neighbours in a list are neighbours here."""
    number: dict[Named, int] = {}
    rows = [[number.setdefault(name, len(number)) for name in pair] for pair in pairs]
    return block_order(np.array(rows, np.int64).reshape(-1, 2), photos).tolist()


def block_order(pairs: np.ndarray, photos: int) -> np.ndarray:
    """n: the same for pairs (n 2) of photos that have numbers."""
    first, second = pairs.T
    block = max(1, photos // 2)
    row, column = first // block, second // block
    snake = np.where(row % 2 == 0, column, -column)
    return np.lexsort((second, first, snake, row))


class FeatureCache:
    """Items by the digest of their photo, within a number of bytes. What is needed last makes room; where the
    pairs to come are not known, what was used least recently."""

    def __init__(self, limit: int, shelf: Shelf | None = None, keep: bool = False):
        """keep: also what no batch needs any more, as long as there is room; others may be expected later."""
        self.limit, self.shelf, self.keep, self.used = limit, shelf, keep, 0
        self.largest = 0  # bytes of an item
        self._items: OrderedDict[str, Any] = OrderedDict()
        self._bytes: dict[str, int] = {}
        self._uses: dict[str, deque[int]] = {}

    def expect(self, batches: Iterable[Iterable[str]]) -> None:
        """The photos that each batch needs, all of them in advance."""
        self._uses.clear()
        for n, batch in enumerate(batches):
            for digest in set(batch):
                self._uses.setdefault(digest, deque()).append(n)

    def __contains__(self, digest: str) -> bool:
        return digest in self._items or (self.shelf is not None and self.shelf.has(digest))

    def get(self, digest: str) -> Any | None:
        """None: to be made anew."""
        if digest in self._items:
            self._items.move_to_end(digest)
            return self._items[digest]
        item = self.shelf.load(digest) if self.shelf else None
        if item is not None:
            self.add({digest: item})
        return item

    def add(self, items: dict[str, Any]) -> None:
        for digest, item in items.items():
            self._items[digest], self._bytes[digest] = item, held_bytes(item)
            self.used += self._bytes[digest]
            self.largest = max(self.largest, self._bytes[digest])
        self.make_room(0)

    def make_room(self, new: int) -> None:
        """For so many bytes more."""
        while self._items and self.used + new > self.limit:
            # The first of equals: that which was used least recently.
            last = max(self._items, key=self._next_use)
            if self._next_use(last) != NEVER and self.shelf is not None:
                self.shelf.save(last, self._items[last])
            self._drop(last)

    def clear(self) -> None:
        """Of memory; what is on disk stays."""
        for digest in list(self._items):
            self._drop(digest)

    def release(self, batch: int, digests: Iterable[str]) -> None:
        """Batch number `batch`, of these photos, is done. Of those that no other batch needs, as far as that
        is known, nothing is kept."""
        for digest in digests:
            uses = self._uses.get(digest)
            while uses and uses[0] <= batch:
                uses.popleft()
            if uses is not None and not uses and not self.keep:
                if digest in self._items:
                    self._drop(digest)
                if self.shelf is not None:
                    self.shelf.drop(digest)

    def _next_use(self, digest: str) -> float:
        uses = self._uses.get(digest)
        return uses[0] if uses else NEVER

    def _drop(self, digest: str) -> None:
        del self._items[digest]
        self.used -= self._bytes.pop(digest)


class Shelf:
    """Items on disk within a number of bytes. Files have the digest of their photo and of the settings in
    their names, so that those a killed run has left are used again and never for another photo."""

    def __init__(
        self, folder: Path, limit: int, settings: str, wanted: Iterable[str], unpack: Callable[..., Any]
    ):
        self.folder, self.limit, self.settings, self.unpack = folder, limit, settings, unpack
        self.used = 0
        keep = {self._path(digest) for digest in wanted}
        for path in folder.glob("*.safetensors"):
            if path in keep:
                self.used += path.stat().st_size
            else:
                path.unlink()

    def _path(self, digest: str) -> Path:
        return self.folder / f"{digest}-{self.settings}.safetensors"

    def save(self, digest: str, item: Any) -> None:
        """Unless it is there, or there is no room for it, or it is no kind to be kept: then it will be made
        anew."""
        path = self._path(digest)
        if path.is_file() or not hasattr(item, "pack") or self.used + held_bytes(item) > self.limit:
            return
        writable_folder(path.parent)
        tensors, texts = item.pack()
        with atomic_path(path) as temporary:
            save_file(tensors, temporary, texts)
            self.used += temporary.stat().st_size

    def has(self, digest: str) -> bool:
        return self._path(digest).is_file()

    def load(self, digest: str) -> Any | None:
        path = self._path(digest)
        if not path.is_file():
            return None
        try:
            with safe_open(path, "pt") as file:
                names = list(file.keys())
                return self.unpack({k: file.get_tensor(k) for k in names}, file.metadata())
        except (SafetensorError, OSError, KeyError):  # damaged: as good as not there
            return None

    def drop(self, digest: str) -> None:
        path = self._path(digest)
        if path.is_file():
            self.used -= path.stat().st_size
            path.unlink()

    def clear(self) -> None:
        if self.folder.is_dir():
            for path in self.folder.glob("*.safetensors"):
                path.unlink()
            if not any(self.folder.iterdir()):
                self.folder.rmdir()
