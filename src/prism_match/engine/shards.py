"""Pairs in shards: what one worker does at a time, on this machine or another.

A shard's pairs share photos, so that each photo is read, and seen by the backbone, about once in it. How many
pairs it has follows from what pairs have cost so far. Its matches become one file, which is in the store
whole or not at all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch

from prism_match.config import parse_json
from prism_match.engine.features import block_order
from prism_match.engine.folders import Fetcher, open_folder
from prism_match.engine.matcher import MatcherSettings
from prism_match.engine.methods import Method, Prism, as_method
from prism_match.engine.photos import Resize, identify
from prism_match.engine.run import Engine, Limits
from prism_match.engine.store import SHARDS, ImageEntry, Names, file_image, read_settings
from prism_match.errors import UserError
from prism_match.files import short_hash
from prism_match.matches import Matches

SECONDS_A_SHARD = 60.0  # of work that a kill can cost, of each worker
SECONDS_AT_LEAST = 2.0  # of a shard towards the end
FIRST = 4  # pairs of a shard while nothing is known of their cost
MOST = 4096  # pairs of a shard, whose matches are in memory until they are written
BLOCK = 32  # photos: pairs between one block and another come after each other
AT_HAND = "at-hand.json"  # photos of the shard that is being done
REMEMBERED = 8  # shards that tell what a pair costs


@dataclass(frozen=True)
class Job:
    """What all shards have in common, as plain values: all that a worker needs beside its shards."""

    method: str  # "prism", "sift" or "module:function"
    matcher: str  # of "prism": MatcherSettings as JSON
    resizing: Resize
    settings: dict[str, Any]  # that its matches are to have
    images: str | None = None  # folder or address that names of photos are told from; None: they are paths
    store: str | None = None  # folder or address; None: matches are handed back
    batch: int | None = None  # pairs at a time; None: 8 on a GPU, 1 elsewhere
    memory: int = Limits.memory
    threads: int | None = None  # of PyTorch on a CPU; None: as it is
    python_path: str = ""  # where a module of the user's is looked for, too

    @staticmethod
    def of(engine: Engine, device: str, threads: int | None) -> Job:
        """To do elsewhere what an engine does."""
        method, matcher = engine.method, ""
        if isinstance(method, Prism):
            name, matcher = "prism", MatcherSettings.of(method.matcher, device).to_json()
        else:
            name = str(method.settings.get("method", method.name))
        return Job(
            name, matcher, engine.resizing, engine.settings, batch=engine.limits.batch_size,
            memory=engine.limits.memory, threads=threads, python_path=str(Path.cwd()),
        )  # fmt: skip

    def open_method(self) -> Method:
        if self.method == "prism":
            return Prism(MatcherSettings.from_json(self.matcher).open())
        if self.python_path not in sys.path:
            sys.path.append(self.python_path)
        return as_method(self.method)


@dataclass(frozen=True)
class Shard:
    names: list[str]  # of photos
    pairs: np.ndarray  # n 2, numbers of names
    stamps: list[str] = field(default_factory=list)  # of photos, to be kept with their matches

    def named(self) -> list[Names]:
        return [(self.names[a], self.names[b]) for a, b in self.pairs.tolist()]


@dataclass(frozen=True)
class ShardResult:
    done: int  # pairs
    broken: dict[str, str]  # photos that cannot be read, and why
    seconds: float
    matching: float = 0.0  # of them, on features and matches alone
    digests: dict[str, str] = field(default_factory=dict)  # of photos
    matches: dict[Names, Matches] | None = None  # where there is no store


class Done(NamedTuple):
    """A shard that is behind us, with its rows of the list of pairs."""

    rows: np.ndarray  # n
    result: ShardResult | None
    reason: str = ""  # why there is no result


class Worker:
    """Does shards, one after the other. The model is loaded once; features of photos stay as long as there is
    room for them, and the next shard's photos come while one is matched."""

    def __init__(self, job: Job):
        if job.threads is not None:
            torch.set_num_threads(job.threads)
            cv2.setNumThreads(job.threads)
        method = job.open_method()
        on_gpu = isinstance(method, Prism) and method.matcher.device.type == "cuda"
        limits = Limits(job.batch or (8 if on_gpu else 1), job.memory)
        self.job, self.engine = job, Engine(method, job.resizing, limits, keep=True)
        if short_hash(self.engine.settings) != short_hash(job.settings):
            raise UserError("the weights, or this package, are not the same here as where the run was begun")
        if job.store is not None:
            read_settings(job.store)  # or it is not the same folder here
        self.photos = Fetcher(open_folder(job.images or "/"))

    def run(self, shard: Shard, careful: bool = False, upcoming: Sequence[str] = ()) -> ShardResult:
        """careful: a worker has died of this shard: photos are decoded by another process first. upcoming:
        photos that are needed next; they are fetched meanwhile."""
        began, clock = time.perf_counter(), self.engine.clock.seconds
        files, broken = self.photos.get(shard.names)
        if files and not any(path.exists() for path in files.values()):
            raise UserError(f"{next(iter(files.values()))}: neither it nor any other photo is here")
        self.photos.begin(upcoming)
        if careful:
            broken |= find_killers(files)
        readable = {name: path for name, path in files.items() if name not in broken}
        photos, unreadable = identify(readable)
        broken |= unreadable
        todo = [pair for pair in shard.named() if not broken.keys() & set(pair)]
        found: dict[Names, Matches] = {}
        for pair, outcome in self.engine.match_photos(todo, photos):
            if isinstance(outcome, Matches):
                found[pair] = outcome
            elif isinstance(outcome, dict):
                broken |= {n: str(outcome[d]) for n in pair if (d := photos[n].digest) in outcome}
        digests = {name: photo.digest for name, photo in photos.items()}
        if self.job.images is not None:  # where a copy was is of no interest
            broken = {name: reason.replace(str(files.get(name)), name) for name, reason in broken.items()}
        if self.job.store is not None:
            write_shard(self.job.store, self.job.settings, shard, found, digests)
        seconds = time.perf_counter() - began
        matching = self.engine.clock.seconds - clock
        return ShardResult(
            len(found), broken, seconds, matching, digests, found if self.job.store is None else None
        )

    def close(self) -> None:
        self.photos.close()


def write_shard(
    store: str, settings: dict[str, Any], shard: Shard, found: dict[Names, Matches], digests: dict[str, str]
) -> None:
    if not found:
        return
    stamps = dict(zip(shard.names, shard.stamps, strict=False))
    images = {
        name: ImageEntry((int(size[0]), int(size[1])), digests[name], stamps.get(name, ""))
        for names, m in found.items()
        for name, size in zip(names, (m.size0, m.size1), strict=True)
    }
    # Whoever does the same shard again writes the same file.
    name = short_hash([sorted(found), sorted((k, v.digest) for k, v in images.items())])
    open_folder(store).inside(SHARDS).write(f"{name}.h5", file_image(settings, images, found))


class Shards:
    """Pairs (n 2, numbers of photos) that are cut into shards as they are asked for. Each worker has a
    stretch of them to itself, so that its next shard shares photos with the one before; who is through takes
    over half of the longest stretch that is left."""

    def __init__(self, pairs: np.ndarray, seconds: float = SECONDS_A_SHARD):
        self.pairs, self.seconds = pairs, seconds
        self.order = block_order(walk(pairs), 2 * BLOCK)
        self.left = len(self.order)
        self._free: deque[range] | None = None  # stretches that are nobody's yet
        self._own: dict[Any, range] = {}  # of the order, by worker
        self._costs: dict[Any, deque[tuple[int, float]]] = {}  # pairs and seconds, by worker
        self._rates: dict[Any, float] = {}  # pairs a second

    def take(self, worker: Any = None, workers: int = 1) -> np.ndarray:
        """Rows of the worker's next shard. Towards the end shards are smaller, so that nobody is left waiting
        for another."""
        own = self._own.get(worker) or self._take_over(workers)
        size = self._size(worker, own, workers)
        self._own[worker] = own[size:]
        self.left -= size
        return self.order[own.start : own.start + size]

    def upcoming(self, worker: Any = None, workers: int = 1) -> np.ndarray:
        """Rows that are the worker's next, as far as one can tell."""
        own = self._own.get(worker, range(0))
        return self.order[own.start : own.start + self._size(worker, own, workers)]

    def _take_over(self, workers: int) -> range:
        if self._free is None:
            ends = [len(self.order) * n // workers for n in range(workers + 1)]
            self._free = deque(range(a, b) for a, b in pairwise(ends) if a < b)
        if self._free:
            return self._free.popleft()
        other, longest = max(self._own.items(), key=lambda item: len(item[1]))
        half = len(longest) // 2
        self._own[other] = longest[:half]
        return longest[half:]

    def _size(self, worker: Any, own: range, workers: int) -> int:
        """By what pairs cost this worker: machines differ."""
        rate = self._rates.get(worker)
        if rate is None:
            size = float(FIRST) if workers == 1 else min(FIRST, self.left / (2 * workers))
        else:
            seconds = self.seconds
            if workers > 1:  # half of what is left for all of them to do
                together = sum(self._rates.values()) / len(self._rates) * workers
                seconds = min(seconds, max(SECONDS_AT_LEAST, self.left / together / 2))
            size = seconds * rate
        return min(max(1, int(min(size, MOST))), len(own))

    def measured(self, pairs: int, seconds: float, worker: Any = None) -> None:
        if pairs:
            costs = self._costs.setdefault(worker, deque(maxlen=REMEMBERED))
            costs.append((pairs, max(seconds, 1e-6)))
            self._rates[worker] = sum(c[0] for c in costs) / sum(c[1] for c in costs)


def walk(pairs: np.ndarray) -> np.ndarray:
    """n 2: the same pairs with photos numbered so that those of near numbers are paired with each other,
    whatever the order of the list: as one meets them around a photo, a block of them at a time, and then
    around one at the border of that block."""
    ends = np.concatenate([pairs, pairs[:, ::-1]])
    ends = ends[np.argsort(ends[:, 0], kind="stable")]
    count = int(ends.max(initial=-1)) + 1
    start = np.searchsorted(ends[:, 0], np.arange(count + 1))
    number = np.full(count, -1, np.int64)
    met = 0
    border: deque[int] = deque()
    for first in range(count):
        if start[first] == start[first + 1]:  # in no pair
            continue
        border.append(first)
        while border:
            ahead, end = deque([border.popleft()]), met + BLOCK
            while ahead and met < end:
                photo = ahead.popleft()
                if number[photo] < 0:
                    number[photo] = met
                    met += 1
                    others = ends[start[photo] : start[photo + 1], 1]
                    ahead.extend(others[number[others] < 0].tolist())
            border = ahead or border
    return np.sort(number[pairs], axis=1)


def run_here(job: Job, shards: Shards, describe: Callable[[np.ndarray], Shard]) -> Iterator[Done]:
    """All shards, in this process. If that dies of a photo, the next run finds out which it was: the photos
    at hand are noted in the store."""
    assert job.store is not None
    store = open_folder(job.store)
    suspects: set[str] = set()
    with suppress(UserError, ValueError, TypeError):
        suspects.update(parse_json(store.read(AT_HAND)))
    with closing(Worker(job)) as worker:
        while shards.left:
            rows = shards.take()
            shard = describe(rows)
            store.write(AT_HAND, json.dumps(shard.names).encode())
            careful = not suspects.isdisjoint(shard.names)
            result = worker.run(shard, careful, describe(shards.upcoming()).names)
            shards.measured(len(rows), result.seconds)
            yield Done(rows, result)
    store.remove(AT_HAND)


# ---- photos that kill whoever decodes them

DECODE = """
import sys
from prism_match.errors import UserError
from prism_match.images import load_image
for line in sys.stdin.buffer:
    print("begun", flush=True)
    try:
        load_image(line.decode("utf-8", "surrogateescape").rstrip("\\n"))
    except UserError:  # will be told by whoever needs it
        pass
"""


def find_killers(files: dict[str, Path]) -> dict[str, str]:
    """Photos that a process which decodes them does not survive, and how it ended."""
    left = [name for name, path in files.items() if "\n" not in str(path)]
    killers: dict[str, str] = {}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    while left:
        paths = "".join(f"{files[name]}\n" for name in left).encode("utf-8", "surrogateescape")
        ended = subprocess.run(
            [sys.executable, "-c", DECODE], input=paths, capture_output=True, env=environment, check=False
        )
        begun = ended.stdout.count(b"begun")
        if ended.returncode == 0 or not begun:
            break
        how = f"signal {-ended.returncode}" if ended.returncode < 0 else f"exit code {ended.returncode}"
        name = left[begun - 1]
        killers[name] = f"{files[name]}: the process that decodes it dies ({how})"
        left = left[begun:]
    return killers
