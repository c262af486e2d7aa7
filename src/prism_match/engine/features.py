"""Matches many pairs of a set of images into one store. The backbone sees each image once; how many of its
maps are held at a time is fixed, however many images there are."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from tqdm import tqdm

from prism_match.engine.store import ImageEntry, MatchStore, Names, PairMatches
from prism_match.errors import UserError
from prism_match.files import atomic_path, file_digest, short_hash, writable_folder
from prism_match.images import load_image
from prism_match.maps.pairs import in_blocks
from prism_match.matcher import ImageFeatures, Matcher, Prepared
from prism_match.matches import Matches
from prism_match.model.prism import Features

MAPS_IN_MEMORY = 32  # 70 MB each at 832 pixels and in full precision
MAPS_ON_DISK = 8 * 2**30  # bytes
SECONDS_A_PART = 30.0  # of work that a kill can cost
NEVER = float("inf")


class Extractor(Protocol):
    """What is needed of a `Matcher`."""

    def extract(self, images: list[Path]) -> list[ImageFeatures]: ...

    def match_extracted(self, pairs: list[tuple[ImageFeatures, ImageFeatures]]) -> list[Matches]: ...


def match_settings(matcher: Matcher) -> dict[str, Any]:
    """What matches depend on. Not the device and its precision: a run may go on elsewhere."""
    config = matcher.info.config
    return {
        "weights": matcher.info.sha256,
        "config": {k: list(v) if isinstance(v, tuple) else v for k, v in config.to_dict().items()},
        "size": matcher.size,
        "threshold": config.theta_c if matcher.threshold is None else matcher.threshold,
        "max_matches": matcher.max_matches,
        "rotate": matcher.rotate,
        "polish": matcher.polish,
    }


def match_pairs(
    matcher: Extractor,
    images: Mapping[str, Path],
    pairs: np.ndarray,
    store: MatchStore,
    *,
    batch_size: int = 1,
    maps_in_memory: int = MAPS_IN_MEMORY,
    features: Path | None = None,
    maps_on_disk: int = MAPS_ON_DISK,
    device: torch.device | str = "cpu",
    progress: bool = False,
) -> dict[str, str]:
    """Adds to the store what it does not have yet of `pairs` (m 2, numbers of `images`, by their order).

    images: files by the names they have in the store. features: a folder for maps that are needed again
    but have no place in memory, up to `maps_on_disk` bytes; it is removed at the end. Returns the images
    that cannot be read, with the reason; pairs of them are left out."""
    if maps_in_memory < 2 * batch_size:
        raise UserError(f"{batch_size} pairs at a time need {2 * batch_size} feature maps in memory")
    names = list(images)
    involved = sorted({names[n] for n in np.unique(pairs)})
    digests, broken = try_each(involved, lambda name: file_digest(images[name]))
    store.forget({k for k, v in store.images.items() if k in digests and v.digest != digests[k]})
    todo = [(names[a], names[b]) for a, b in in_blocks(pairs, max(1, maps_in_memory // 2))]
    done = len(todo)
    todo = [p for p in todo if p not in store.where and p[::-1] not in store.where]
    done -= len(todo)
    keys = {name: f"{digest}-{short_hash(store.settings)}" for name, digest in digests.items()}
    shelf = Shelf(features, keys, maps_on_disk, torch.device(device))
    maps = Maps(matcher, images, todo, maps_in_memory, shelf)
    new: dict[Names, PairMatches] = {}
    entries: dict[str, ImageEntry] = {}
    flushed = time.monotonic()

    def flush() -> None:
        store.add(new, entries)
        new.clear()
        entries.clear()

    with tqdm(
        total=done + len(todo), initial=done, desc="matching", unit="pair", disable=None if progress else True
    ) as bar:
        for start in range(0, len(todo), batch_size):
            taken: list[Names] = []
            chunk: list[tuple[ImageFeatures, ImageFeatures]] = []
            for pair in todo[start : start + batch_size]:
                try:
                    if not broken.keys() & pair:
                        chunk.append((maps.get(pair[0], start), maps.get(pair[1], start)))
                        taken.append(pair)
                except BrokenImage as error:
                    broken[error.name] = str(error)
            found = matcher.match_extracted(chunk) if chunk else []
            chunk.clear()  # or its maps would outlive their place in memory
            for pair, m in zip(taken, found, strict=True):
                new[pair] = PairMatches(m.keypoints0, m.keypoints1, m.scores)
                for name, size in zip(pair, (m.size0, m.size1), strict=True):
                    entries[name] = ImageEntry(size, digests[name])
            maps.release(start + batch_size)
            bar.update(len(todo[start : start + batch_size]))
            if time.monotonic() - flushed > SECONDS_A_PART:
                flush()
                flushed = time.monotonic()
    flush()
    store.merge()
    shelf.clear()
    # Those whose partners were all broken were never looked at.
    unseen = [name for name in involved if name not in store.images and name not in broken]
    return broken | try_each(unseen, lambda name: load_image(images[name]).name)[1]


def try_each(names: list[str], work: Callable[[str], str]) -> tuple[dict[str, str], dict[str, str]]:
    """What comes out for each name, and the reason for each that fails."""
    results, problems = {}, {}
    for name in names:
        try:
            results[name] = work(name)
        except UserError as error:
            problems[name] = str(error)
    return results, problems


class BrokenImage(UserError):
    def __init__(self, name: str, reason: str):
        super().__init__(reason)
        self.name = name


class Maps:
    """The features of the images in use. What is needed last, or never again, makes room for others:
    the pairs to come are known."""

    def __init__(
        self, matcher: Extractor, images: Mapping[str, Path], todo: list[Names], most: int, shelf: Shelf
    ):
        self.matcher, self.images, self.most, self.shelf = matcher, images, most, shelf
        self.held: dict[str, ImageFeatures] = {}
        self.uses: dict[str, deque[int]] = {}
        for n, pair in enumerate(todo):
            for name in pair:
                self.uses.setdefault(name, deque()).append(n)

    def get(self, name: str, now: int) -> ImageFeatures:
        """The features of an image for the pairs from number `now` on."""
        if name not in self.held:
            self._make_room(now)
            found = self.shelf.load(name)
            if found is None:
                try:
                    [found] = self.matcher.extract([self.images[name]])
                except UserError as error:
                    raise BrokenImage(name, str(error)) from error
            self.held[name] = found
        return self.held[name]

    def release(self, now: int) -> None:
        """Let go of what no pair from number `now` on needs."""
        for name in [name for name in self.held if self._next_use(name, now) == NEVER]:
            del self.held[name]
            self.shelf.drop(name)

    def _make_room(self, now: int) -> None:
        while len(self.held) >= self.most:
            last = max(self.held, key=lambda name: self._next_use(name, now))
            if self._next_use(last, now) != NEVER:
                self.shelf.save(last, self.held[last])
            del self.held[last]

    def _next_use(self, name: str, now: int) -> float:
        uses = self.uses[name]
        while uses and uses[0] < now:
            uses.popleft()
        return uses[0] if uses else NEVER


class Shelf:
    """Features on disk within a number of bytes. Files have the digest of their image and of the settings
    in their names, so that those a killed run has left are used again and never for another image."""

    def __init__(self, folder: Path | None, keys: dict[str, str], limit: int, device: torch.device):
        self.folder, self.keys, self.limit, self.device = folder, keys, limit, device
        self.used = 0
        if folder is not None and folder.is_dir():
            wanted = {self._path(name) for name in keys}
            for path in folder.glob("*.safetensors"):
                if path in wanted:
                    self.used += path.stat().st_size
                else:
                    path.unlink()

    def _path(self, name: str) -> Path | None:
        return self.folder / f"{self.keys[name]}.safetensors" if self.folder else None

    def save(self, name: str, image: ImageFeatures) -> None:
        """Unless it is there, or there is no room for it: then it will be computed again."""
        from safetensors.torch import save_file

        path = self._path(name)
        if path is None or path.is_file() or self.used + image.nbytes > self.limit:
            return
        f, p = image.features, image.prepared
        tensors = {"coarse": f.coarse, "fine": f.fine, "valid": f.valid, "gray": torch.from_numpy(p.gray)}
        if p.sharp is not None:
            tensors["sharp"] = torch.from_numpy(p.sharp)
        writable_folder(path.parent)
        with atomic_path(path) as temporary:
            save_file(
                {k: v.cpu().contiguous() for k, v in tensors.items()},
                temporary,
                {"name": p.name, "width": str(p.size[0]), "height": str(p.size[1])},
            )
            self.used += temporary.stat().st_size

    def load(self, name: str) -> ImageFeatures | None:
        from safetensors import SafetensorError, safe_open

        path = self._path(name)
        if path is None or not path.is_file():
            return None
        try:
            with safe_open(path, "pt") as file:
                meta = file.metadata()
                t = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118 - no dictionary
        except (SafetensorError, OSError):  # damaged: as good as not there
            return None
        size = int(meta["width"]), int(meta["height"])
        sharp = t["sharp"].numpy() if "sharp" in t else None
        prepared = Prepared(t["gray"].numpy(), size, meta["name"], None, sharp=sharp)
        return ImageFeatures(prepared, Features(*(t[k].to(self.device) for k in ("coarse", "fine", "valid"))))

    def drop(self, name: str) -> None:
        path = self._path(name)
        if path is not None and path.is_file():
            self.used -= path.stat().st_size
            path.unlink()

    def clear(self) -> None:
        if self.folder is not None and self.folder.is_dir():
            for path in self.folder.glob("*.safetensors"):
                path.unlink()
            if not any(self.folder.iterdir()):
                self.folder.rmdir()
