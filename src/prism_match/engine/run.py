"""From pairs of photos to matches, many of them, on one machine.

Photos are decoded ahead by threads, each one once, as long as what is known of it has room: features and
images stay in memory up to a limit, then on disk.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from prism_match.engine.features import FeatureCache, Shelf, arrange
from prism_match.engine.methods import Method
from prism_match.engine.photos import THREADS, Photo, Resize, identify
from prism_match.engine.store import MatchStore, Names
from prism_match.errors import UserError
from prism_match.files import short_hash
from prism_match.images import Image, ImageLike, is_tensor, load_image
from prism_match.matcher import MaskLike
from prism_match.matches import Matches

log = logging.getLogger(__name__)

SECONDS_A_PART = 30.0  # of work that a kill can cost
Broken = dict[str, UserError]  # by the digests of photos
PairLike: TypeAlias = "tuple[ImageLike, ImageLike] | tuple[ImageLike, ImageLike, MaskLike, MaskLike]"


@dataclass(frozen=True)
class Limits:
    """How much is done and held at a time. No match depends on it."""

    batch_size: int = 1  # pairs of equal padded size that are matched at once
    memory: int = 2 * 2**30  # bytes of features and images that are kept for pairs to come
    disk: int = 0  # bytes of them in `folder` that have no room in memory
    folder: str | None = None  # is removed at the end
    ahead: int = 2 * THREADS  # photos that are decoded before they are asked for

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"batch_size must be at least 1, not {self.batch_size}")
        if self.memory < 0 or self.disk < 0:
            raise UserError("the room for features must be 0 bytes or more")


class Clock:
    """Time spent on features and matches alone, not on reading photos."""

    def __init__(self) -> None:
        self.seconds, self.pairs = 0.0, 0

    @contextmanager
    def running(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start

    @property
    def milliseconds(self) -> float | None:
        return 1000 * self.seconds / self.pairs if self.pairs else None


class Outcome(NamedTuple):
    """How it went for one pair."""

    pair: Names
    matches: Matches | None
    broken: dict[str, str] = {}  # photos that cannot be read, and why: then there are no matches
    failed: str = ""  # why there are none though the photos can be read

    @property
    def problem(self) -> str:
        return next(iter(self.broken.values()), self.failed)


class Task(NamedTuple):
    """A pair that is due. Masks: see `PairMatcher.match`."""

    key: Names
    photos: tuple[Photo, Photo]
    masks: tuple[MaskLike, MaskLike] = (None, None)


class Portions:
    """How many pairs, or photos, are given to the model at a time: what was asked for, until the GPU has not
    enough memory for it; then half as many, and so on."""

    def __init__(self) -> None:
        self.most = sys.maxsize
        self._told = False

    def run(self, work: Callable[[list[Any]], list[Any]], items: list[Any], cache: FeatureCache) -> list[Any]:
        """work(items), in as many portions as need be. With one item at a time, what is kept of other photos
        has to go; if that does not help either, nothing does."""
        results: list[Any] = []
        spared = False
        while len(results) < len(items):
            portion = items[len(results) : len(results) + self.most]
            try:
                results += work(portion)
                continue
            except torch.OutOfMemoryError:
                if len(portion) == 1 and (spared or not cache.used):
                    raise
            # Out of the handler, which would keep alive all that was in use.
            if len(portion) == 1:
                cache.clear()
                spared = True
            else:
                self.most = len(portion) // 2
                self._tell()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return results

    def _tell(self) -> None:
        if not self._told:
            log.warning("prism: the GPU is out of memory: from here on fewer pairs are matched at a time")
            self._told = True


class Engine:
    def __init__(
        self,
        method: Method,
        resizing: Resize,
        limits: Limits | None = None,
        clock: Clock | None = None,
        keep: bool = False,
    ):
        """keep: from one call of `match_photos` to the next, what is known of photos, within the limits."""
        self.method, self.resizing, self.limits = method, resizing, limits or Limits()
        self.clock = clock or Clock()
        self.kept = FeatureCache(self.limits.memory, keep=True) if keep else None
        self.portions = Portions()
        # All that matches depend on, but for the precision: a run may go on on another machine.
        self.settings = method.settings | {"resize": vars(resizing)}

    def match(
        self,
        files: Mapping[str, str | Path],
        pairs: Sequence[Names],
        store: MatchStore | None = None,
        *,
        by_content: bool = False,
    ) -> Iterator[Outcome]:
        """All pairs of names of files: first those that the store has, then the others in an order that
        needs few photos at a time, which are added to the store. A photo that has changed is matched anew.
        by_content: the store knows photos by their digests, whatever they are called here."""
        photos, broken = identify({name: files[name] for pair in pairs for name in pair})
        keys = {name: photo.digest if by_content else name for name, photo in photos.items()}
        digests = {keys[name]: photo.digest for name, photo in photos.items()}
        if store is not None:
            store.forget({k for k, v in store.images.items() if k in digests and v.digest != digests[k]})

        def named(m: Matches, pair: Names) -> Outcome:
            return Outcome(pair, replace(m, name0=str(files[pair[0]]), name1=str(files[pair[1]])))

        todo: list[Names] = []
        for pair in pairs:
            if bad := {name: broken[name] for name in pair if name in broken}:
                yield Outcome(pair, None, bad)
            elif (m := stored(store, (keys[pair[0]], keys[pair[1]]))) is not None:
                yield named(m, pair)
            else:
                todo.append(pair)
        new: dict[Names, Matches] = {}
        flushed = time.monotonic()
        try:
            for pair, found in self.match_photos(todo, photos):
                if isinstance(found, dict):
                    bad = {n: str(found[d]) for n in pair if (d := photos[n].digest) in found}
                    yield Outcome(pair, None, bad)
                    continue
                if isinstance(found, str):
                    yield Outcome(pair, None, failed=found)
                    continue
                if store is not None:
                    new[keys[pair[0]], keys[pair[1]]] = found
                    if time.monotonic() - flushed > SECONDS_A_PART:
                        store.add(new, digests)
                        new, flushed = {}, time.monotonic()
                yield named(found, pair)
        finally:  # also of one who has seen enough
            if store is not None:
                store.add(new, digests)
        if store is not None:
            store.merge()

    def stream(self, pairs: Iterable[PairLike]) -> Iterator[Matches]:
        """One result per pair, in order. A list of files is read ahead; what comes from a generator is taken
        a batch at a time, and as it is at that moment."""
        source, taken = iter(pairs), 0
        failed: Exception | None = None
        cache = FeatureCache(self.limits.memory)
        with Decoder(self, cache) as decoder:
            window: deque[Task] = deque()
            for number in count():
                while failed is None and self._wants_more(window, pairs, taken):
                    try:
                        window.append(decoder.take_in(next(source)))
                        taken += 1
                        if not isinstance(pairs, Sequence):
                            decoder.settle()  # before the generator goes on, and overwrites a file
                    except StopIteration:
                        break
                    except Exception as error:  # of the caller's generator, too
                        failed = error  # to be told when it is due: there are good pairs before it
                batch = [window.popleft() for _ in range(min(self.limits.batch_size, len(window)))]
                for task, found in self._match_batch(batch, number, decoder, cache):
                    if isinstance(found, dict):
                        raise next(iter(found.values()))
                    yield replace(found, name0=task.photos[0].name, name1=task.photos[1].name)
                if not window and failed is not None:
                    raise failed
                if not batch:
                    return

    def _wants_more(self, window: deque[Task], pairs: Iterable[PairLike], taken: int) -> bool:
        if len(window) < self.limits.batch_size or not isinstance(pairs, Sequence) or taken >= len(pairs):
            return len(window) < self.limits.batch_size
        # Of images in memory there is nothing to decode, only copies to hold.
        files = all(isinstance(image, (str, os.PathLike)) for image in pairs[taken][:2])
        return files and 2 * len(window) < 2 * self.limits.batch_size + self.limits.ahead

    def match_photos(
        self, pairs: Sequence[Names], photos: Mapping[str, Photo]
    ) -> Iterator[tuple[Names, Matches | Broken | str]]:
        """Each pair, in an order of its own, with its matches, or with what is wrong with its photos, or with
        why it could not be matched though nothing is wrong with them."""
        if not pairs:
            return
        shelf = None
        if self.limits.folder is not None and hasattr(self.method, "unpack"):
            wanted = {photos[name].digest for pair in pairs for name in pair}
            # A run that goes on in another precision cannot use what the killed one saw.
            settings = short_hash([self.settings, self.method.precision])
            shelf = Shelf(Path(self.limits.folder), self.limits.disk, settings, wanted, self.method.unpack)
        cache = FeatureCache(self.limits.memory, shelf) if self.kept is None else self.kept
        with Decoder(self, cache) as decoder:
            order = arrange(pairs, self._room(photos[pairs[0][0]], decoder, cache))
            tasks = [Task(pairs[n], (photos[pairs[n][0]], photos[pairs[n][1]])) for n in order]
            size = self.limits.batch_size
            batches = [tasks[n : n + size] for n in range(0, len(tasks), size)]
            cache.expect([photo.digest for task in batch for photo in task.photos] for batch in batches)
            upcoming = deque(photo for task in tasks for photo in task.photos)
            for number, batch in enumerate(batches):
                decoder.look_ahead(upcoming, 2 * len(batch))
                for task, found in self._match_batch(batch, number, decoder, cache):
                    yield task.key, found
        if shelf is not None:
            shelf.clear()

    def _room(self, first: Photo, decoder: Decoder, cache: FeatureCache) -> int:
        """How many photos have room in memory, as the first one tells, or those that were there before it."""
        if not cache.largest:
            with suppress(UserError):  # it will be told when its pairs are due
                prepared = decoder.get(first)
                with self.clock.running():
                    cache.add({first.digest: self.method.extract([prepared])[0]})
        return max(2 * self.limits.batch_size, self.limits.memory // max(cache.largest, 1))

    def _match_batch(
        self, batch: list[Task], number: int, decoder: Decoder, cache: FeatureCache
    ) -> Iterator[tuple[Task, Matches | Broken]]:
        held: dict[str, Any] = {}  # what this batch needs, whether the cache has room for it or not
        prepared: dict[str, Any] = {}
        broken: Broken = {}
        needed = {photo.digest: photo for task in batch for photo in task.photos}
        for digest, photo in needed.items():
            item = cache.get(digest)
            if item is not None:
                held[digest] = item
                decoder.forget(digest)
                continue
            try:
                prepared[digest] = decoder.get(photo)
            except UserError as error:
                broken[digest] = error
        item = None  # or it would outlive its place in the cache
        cache.make_room(len(prepared) * cache.largest)
        with self.clock.running():
            seen = self.portions.run(self.method.extract, list(prepared.values()), cache)
            made = dict(zip(prepared, seen, strict=True))
            del seen
            prepared.clear()
            held |= made
            cache.add(made)
            pairs: list[tuple[Any, ...]] = []
            wrong: list[Broken] = []  # with each task
            for task in batch:
                wrong.append({p.digest: broken[p.digest] for p in task.photos if p.digest in broken})
                try:
                    if not wrong[-1]:
                        pairs.append(tuple(masked(held, task)))
                except UserError as error:
                    wrong[-1][task.photos[0].digest] = error
            found = iter(self.portions.run(self.method.match, pairs, cache))
        self.clock.pairs += len(pairs)
        cache.release(number, needed)
        held.clear()
        made.clear()
        pairs.clear()
        for task, problems in zip(batch, wrong, strict=True):
            yield task, problems or next(found)


def masked(held: Mapping[str, Any], task: Task) -> Iterator[Any]:
    """Both photos as the method has seen them, with their masks."""
    for photo, mask in zip(task.photos, task.masks, strict=True):
        yield held[photo.digest] if mask is None else held[photo.digest].masked(mask)


def stored(store: MatchStore | None, pair: Names) -> Matches | None:
    try:
        return store[pair] if store is not None and pair in store else None
    except UserError:  # damaged: as good as not there
        assert store is not None
        store.discard(pair)
        return None


class Decoder:
    """Prepares photos in threads before they are asked for."""

    def __init__(self, engine: Engine, cache: FeatureCache):
        self.engine, self.cache = engine, cache
        self._pool = ThreadPoolExecutor(THREADS)
        self._pending: dict[str, Future[Any]] = {}
        self._broken: Broken = {}  # and stay so, however many pairs they are in

    def get(self, photo: Photo) -> Any:
        if photo.digest in self._broken:
            raise self._broken[photo.digest]
        self._begin(photo)
        try:
            return self._pending.pop(photo.digest).result()
        except UserError as error:
            self._broken[photo.digest] = error
            raise

    def settle(self) -> None:
        wait(self._pending.values())

    def forget(self, digest: str) -> None:
        self._pending.pop(digest, None)

    def look_ahead(self, upcoming: deque[Photo], due: int) -> None:
        """upcoming: the photos of the pairs to come, of which so many are due now and are taken from it."""
        for photo in islice(upcoming, due + self.engine.limits.ahead):
            if len(self._pending) >= self.engine.limits.ahead:
                break
            if photo.digest not in self.cache and photo.digest not in self._broken:
                self._begin(photo)
        for _ in range(min(due, len(upcoming))):
            upcoming.popleft()

    def take_in(self, pair: PairLike) -> Task:
        """As it is now: what happens to files and memory later does not matter."""
        if len(pair) not in (2, 4):
            raise UserError("a pair must be (image0, image1) or (image0, image1, mask0, mask1)")
        photos = []
        for source in pair[:2]:
            photo = Photo.of(source)
            if photo.digest not in self.cache and photo.digest not in self._pending:
                photo = photo.snapshot()
                self._begin(photo)
            photos.append(photo)
        masks = [still(mask) for mask in pair[2:]] or [None, None]
        return Task(("", ""), (photos[0], photos[1]), (masks[0], masks[1]))

    def _begin(self, photo: Photo) -> None:
        if photo.digest not in self._pending:
            self._pending[photo.digest] = self._pool.submit(self._prepare, photo)

    def _prepare(self, photo: Photo) -> Any:
        return self.engine.method.prepare(photo.load(), self.engine.resizing)

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def still(mask: MaskLike) -> MaskLike:
    """A mask that stays as it is, whatever happens to the memory it came from."""
    if mask is None or isinstance(mask, Image):
        return mask
    if isinstance(mask, np.ndarray):
        return mask.copy()
    return mask.clone() if is_tensor(mask) else load_image(mask)  # type: ignore[union-attr]
