"""Feeds the trainer: batches mixed from several sources, made ahead of time beside the model's work.

What a batch holds depends on the seed, the number of the update and the part of the batch alone. So a run
that is resumed sees the pairs it would have seen, two processes see what one would have seen in two parts,
and no state of any random generator has to be kept.
"""

from __future__ import annotations

import hashlib
import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from prism_match.errors import UserError
from prism_match.training.difficulty import Difficulty
from prism_match.training.pairs import CELL, ImageSize, PairBatch, PairSource
from prism_match.training.step import Work

log = logging.getLogger(__name__)

ATTEMPTS = 8  # failures of one source in a row before training gives up
# Held by the thread that records, and by the one that trains while it does: compiling in two threads at a
# time fails, and so does what the model does first with a new size, such as cuDNN's trial of its
# algorithms, while another thread records.
recording = threading.Lock()


def seed_of(*parts: object) -> int:
    """A seed that differs whenever a part does."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def shares(weights: Sequence[float], batch: int, rng: random.Random) -> list[int]:
    """How many of `batch` pairs each source gives: its share rounded down, and the rest where most was
    rounded off, so that shapes stay the same. Where a source's share is less than one pair, by lot."""
    total = sum(weights)
    exact = [batch * w / total for w in weights]
    counts = [int(x) for x in exact]
    left = [x - n for x, n in zip(exact, counts, strict=True)]
    for _ in range(batch - sum(counts)):
        if min(exact) < 1:
            chosen = rng.choices(range(len(counts)), [max(x, 1e-9) for x in left])[0]
        else:
            chosen = max(range(len(counts)), key=left.__getitem__)
            left[chosen] = -1.0
        counts[chosen] += 1
    return counts


def concatenate(batches: Sequence[PairBatch]) -> PairBatch:
    """One batch of several of the same image size. What one of them has and another has not is filled in."""
    if len(batches) == 1:
        return batches[0]
    joined: dict[str, Tensor | None] = {}
    for f in fields(PairBatch):
        if f.name != "names":
            joined[f.name] = _joined(f.name, batches)
    names = tuple(n for b in batches for n in (b.names or ("?",) * len(b)))
    return PairBatch(**joined, names=names)  # type: ignore[arg-type]


def _joined(name: str, batches: Sequence[PairBatch]) -> Tensor | None:
    values = [getattr(b, name) for b in batches]
    if all(v is None for v in values):
        return None
    filled = []
    for value, batch in zip(values, batches, strict=True):
        if value is None and name == "rough":
            value = torch.zeros(len(batch), dtype=torch.bool, device=batch.image0.device)
        elif value is None and name == "bins":
            value = torch.full((len(batch),), -1, device=batch.image0.device)
        elif value is None:
            step = CELL if name.startswith("unknown") else 1
            image = batch.image0[:, 0] if name.endswith("0") else batch.image1[:, 0]
            value = torch.full_like(image[:, ::step, ::step], name.startswith("mask"), dtype=torch.bool)
        filled.append(value)
    return torch.cat(filled)


@dataclass(frozen=True)
class Weighted:
    """A source and its share in every batch, relative to the others."""

    source: PairSource
    weight: float = 1.0


class Captured:
    """Makes a source on a GPU cheap for the CPU: its thousands of small kernels are recorded once for each
    shape and then replayed as one. The same pairs as `source` gives for a generator that was just seeded.
    Only for sources that never wait for the device."""

    def __init__(self, source: PairSource):
        self.source, self.name = source, source.name
        self.device: torch.device = source.device  # type: ignore[attr-defined]
        self.bins: int = getattr(source, "bins", 0)
        self._recordings: dict[
            tuple[int, ImageSize], tuple[torch.cuda.CUDAGraph, torch.Generator, PairBatch]
        ] = {}

    def sample(self, batch: int, size: ImageSize, generator: torch.Generator) -> PairBatch:
        key = batch, size
        if key not in self._recordings:
            with recording:
                self._recordings[key] = self._record(batch, size)
        graph, own, recorded = self._recordings[key]
        own.manual_seed(generator.initial_seed())
        graph.replay()
        return recorded.map(torch.clone)  # the next replay writes over the recorded tensors

    def weigh(self, weights: Tensor) -> None:
        """What is recorded reads the weights where they lie, so that they may change between two replays."""
        self.source.weigh(weights)  # type: ignore[attr-defined]

    def _record(self, batch: int, size: ImageSize) -> tuple[torch.cuda.CUDAGraph, torch.Generator, PairBatch]:
        own = torch.Generator(self.device)
        for _ in range(2):  # whatever is compiled or cached on first use must not end up in the recording
            self.source.sample(batch, size, own)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(own)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            recorded = self.source.sample(batch, size, own)
        return graph, own, recorded


class Mixer:
    """Makes the batch that belongs to a step. `skipped` counts the samples that failed."""

    def __init__(self, sources: Sequence[Weighted], seed: int, device: torch.device):
        self.sources = [s for s in sources if s.weight > 0]
        if not self.sources:
            raise UserError("nothing to train on: give photos, worlds or a data set")
        self.seed, self.device = seed, device
        self.skipped = 0
        # The source whose pairs are of bins that can be weighed: collections are one source.
        self.binned: Any = next((s.source for s in self.sources if getattr(s.source, "bins", 0)), None)
        self._weights: Tensor | None = None

    @torch.no_grad()
    def make(self, step: int, part: int, batch: int, size: ImageSize, weights: Tensor | None = None) -> Work:
        """`weights`: of the bins of difficulty."""
        if weights is not None and weights is not self._weights:
            self.binned.weigh(weights)
            self._weights = weights
        rng = random.Random(seed_of(self.seed, step, part))
        counts = shares([s.weight for s in self.sources], batch, rng)
        pairs = [
            self._sample(s.source, n, size, (self.seed, step, part, i)).to(self.device)
            for i, (s, n) in enumerate(zip(self.sources, counts, strict=True))
            if n > 0
        ]
        generator = torch.Generator(self.device).manual_seed(seed_of(self.seed, step, part, "keys"))
        return Work.of(concatenate(pairs), generator)

    def _sample(self, source: PairSource, count: int, size: ImageSize, key: tuple[int, ...]) -> PairBatch:
        device = getattr(source, "device", torch.device("cpu"))
        for attempt in range(ATTEMPTS):
            generator = torch.Generator(device).manual_seed(seed_of(*key, attempt))
            try:
                return source.sample(count, size, generator)
            except Exception as error:  # noqa: BLE001 - one broken sample must not end a run of days
                self.skipped += 1
                reason = " ".join(str(error).split()) or type(error).__name__
                log.warning("skipped a sample of %s: %s", source.name, reason)
        raise UserError(f"{source.name}: {ATTEMPTS} samples in a row failed, the last one with: {reason}")


class Feed:
    """Keeps batches ready: a thread makes them, on a GPU in a stream of its own."""

    def __init__(self, mixer: Mixer, ahead: int = 2):
        self.mixer, self.ahead = mixer, ahead
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="pairs")
        self.waiting: deque[Future] = deque()
        cuda = mixer.device.type == "cuda"
        self.stream = torch.cuda.Stream(mixer.device) if cuda else None
        if self.stream is not None:  # what the sources hold was put on the device by the current stream
            self.stream.wait_stream(torch.cuda.current_stream(mixer.device))

    def order(
        self,
        step: int,
        parts: Sequence[int],
        batch: int,
        size: ImageSize,
        difficulty: Difficulty | None = None,
    ) -> None:
        """Asks for the batch of a step: one piece of `batch` pairs for each of `parts`."""
        weights = None if difficulty is None else difficulty.of(step)
        ready = None if difficulty is None else difficulty.ready
        self.waiting.append(self.pool.submit(self._make, step, parts, batch, size, weights, ready))

    @property
    def wanting(self) -> bool:
        return len(self.waiting) <= self.ahead

    def _make(
        self,
        step: int,
        parts: Sequence[int],
        batch: int,
        size: ImageSize,
        weights: Tensor | None,
        weighed: torch.cuda.Event | None,
    ) -> tuple[list[Work], object]:
        if self.stream is None:
            return [self.mixer.make(step, p, batch, size, weights) for p in parts], None
        with torch.cuda.device(self.mixer.device), torch.cuda.stream(self.stream):
            if weighed is not None:
                self.stream.wait_event(weighed)
            work = [self.mixer.make(step, p, batch, size, weights) for p in parts]
            ready = torch.cuda.Event()
            ready.record(self.stream)
        # Without this wait the thread would run far ahead of the device and fill its memory.
        ready.synchronize()
        return work, ready

    def next(self) -> list[Work]:
        """The pieces that were ordered first, safe to use in the current stream."""
        work, ready = self.waiting.popleft().result()
        if ready is not None:
            current = torch.cuda.current_stream(self.mixer.device)
            current.wait_event(ready)
            for piece in work:
                each_tensor(piece, lambda t: t.record_stream(current))
        return work

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)


def each_tensor(item: Any, f: Callable[[Tensor], Any]) -> None:
    """Calls `f` with every tensor of nested dataclasses."""
    for x in fields(item):
        value = getattr(item, x.name)
        if isinstance(value, Tensor):
            f(value)
        elif is_dataclass(value):
            each_tensor(value, f)
