"""The model has a thread of its own. What waits while it is busy is matched together when it is free."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch

from prism_match.config import Precision, Rescale, Rotate
from prism_match.errors import UserError
from prism_match.matcher import DTYPES, ImageFeatures, PairMatcher, Prepared, group_by
from prism_match.matches import Matches
from prism_match.serve.refusal import Refused, complain, log
from prism_match.stages import STAGES, Stopwatch

WARM_UP = 128  # pixels a side
Images: TypeAlias = "tuple[Prepared | ImageFeatures, ...]"


@dataclass(frozen=True)
class Manner:
    """How a pair is matched; those that are matched at once have it in common."""

    threshold: float | None
    rotate: Rotate
    rescale: Rescale
    polish: bool
    details: bool = False
    precision: Precision | None = None  # None: the server's own


@dataclass(frozen=True)
class Done:
    result: Any  # the Matches of two images, the ImageFeatures of one
    waited: float  # seconds
    took: float
    stages: dict[str, float]  # seconds of `took`, by name
    together: int  # with how many it shared the model, itself included


@dataclass(frozen=True)
class Job:
    images: Images
    manner: Manner
    future: Future[Done] = field(default_factory=Future)
    arrived: float = field(default_factory=time.perf_counter)


class ModelThread:
    """One model on one device. `submit` gives a future; cancelled before its turn, it costs nothing."""

    def __init__(self, matcher: PairMatcher, batch: int, observe: Callable[[int, float], None] | None = None):
        """observe: is told of each batch how many jobs it had and how many seconds it took."""
        self.matcher, self.batch, self.observe = matcher, batch, observe
        self._asked = batch  # before memory was short
        self.ready = False
        self.arranged = {matcher.dtype: matcher}  # by the precision to compute in, as they are asked for
        self.pace = 0.0  # seconds a job, lately
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="prism-model", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Once all that was submitted is done."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def submit(self, images: Images, manner: Manner) -> Future[Done]:
        job = Job(images, manner)
        with self._changed:
            if self._stopping:
                raise Refused(503, "the server is shutting down", Retry_After="5")
            self._jobs.append(job)
            self._changed.notify()
        job.future.add_done_callback(self._forget)
        return job.future

    def _forget(self, future: Future[Done]) -> None:
        """Photos that nobody waits for any more go at once: those who come and go while the model is busy
        could fill the memory with them."""
        if future.cancelled():
            with self._changed:
                self._jobs = deque(job for job in self._jobs if job.future is not future)

    def waiting(self) -> int:
        return len(self._jobs)

    def _run(self) -> None:
        try:
            self._warm_up()
            self._loop()
        finally:
            self.ready = False

    def _loop(self) -> None:
        while jobs := self._next():
            start = time.perf_counter()
            for group in group_by(jobs, lambda job: job.manner):
                self._answer(group, start)
            seconds = time.perf_counter() - start
            self.pace = 0.8 * self.pace + 0.2 * seconds / len(jobs) if self.pace else seconds / len(jobs)
            if self.observe is not None:
                self.observe(len(jobs), seconds)
            del jobs, group  # photos and features, while nobody needs them

    def _warm_up(self) -> None:
        """The first match of a process takes longer."""
        try:
            noise = np.random.default_rng(0).random((2, WARM_UP, WARM_UP), dtype=np.float32)
            self.matcher.match(noise[0], noise[1])
        except Exception as error:
            complain("the model failed to warm up", error)
        self.ready = True

    def _next(self) -> list[Job]:
        """At least one, that somebody still waits for; none: it is time to stop."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._stopping)
                if not self._jobs:
                    return []
                jobs: list[Job] = []
                while self._jobs and len(jobs) < self.batch:
                    job = self._jobs.popleft()
                    if job.future.set_running_or_notify_cancel():
                        jobs.append(job)
            if jobs:
                return jobs

    def _answer(self, jobs: Sequence[Job], start: float) -> None:
        """Every future gets its result or its error."""
        try:
            with Stopwatch(self.matcher.device, this_thread=True) as watch:
                results = self._work(jobs)
        except Exception as error:
            if len(jobs) == 1:
                jobs[0].future.set_exception(refusal(error))
                return
            short = isinstance(error, torch.OutOfMemoryError)
        else:
            self._hand_out(jobs, results, start, watch)
            return
        # Out of the handler, which would keep alive all that was in use.
        if not short:  # one of them is to blame
            parts = [[job] for job in jobs]
        else:  # half as many from here on
            half = len(jobs) // 2
            parts = [list(jobs[:half]), list(jobs[half:])]
            if self.batch == self._asked:
                log.warning("the GPU is out of memory: from here on fewer pairs are matched at a time")
            self.batch = min(self.batch, half)
        free_memory()
        for part in parts:
            self._answer(part, start)

    def _hand_out(self, jobs: Sequence[Job], results: list[Any], start: float, watch: Stopwatch) -> None:
        took, parts = time.perf_counter() - start, watch.milliseconds()
        stages = {name: parts[name] / 1000 for name in STAGES if name in parts}
        for job, result in zip(jobs, results, strict=True):
            job.future.set_result(Done(result, start - job.arrived, took, stages, len(jobs)))

    def _work(self, jobs: Sequence[Job]) -> list[Matches | ImageFeatures]:
        options = asdict(jobs[0].manner)
        details, precision = options.pop("details"), options.pop("precision")
        matcher = self._in_precision(precision).adjusted(**options)
        fresh = [image for job in jobs for image in job.images if isinstance(image, Prepared)]
        seen = iter(matcher.extract_prepared(fresh))
        known = [
            tuple(
                next(seen) if isinstance(image, Prepared) else in_dtype(image, matcher.dtype)
                for image in job.images
            )
            for job in jobs
        ]
        pairs = [(images[0], images[1]) for images in known if len(images) == 2]
        found = iter(matcher.match_extracted(pairs, details=details))
        return [next(found) if len(images) == 2 else images[0] for images in known]

    def _in_precision(self, precision: Precision | None) -> PairMatcher:
        dtype = self.matcher.dtype if precision is None else DTYPES[precision]
        if dtype not in self.arranged:
            self.arranged[dtype] = self.matcher.in_dtype(dtype)
        return self.arranged[dtype]


def in_dtype(image: ImageFeatures, dtype: torch.dtype) -> ImageFeatures:
    """Kept features, for a model of another precision than the one that saw them."""
    f = image.features
    if f.fine.dtype == dtype:
        return image
    return replace(image, features=replace(f, coarse=f.coarse.to(dtype), fine=f.fine.to(dtype)))


def refusal(error: Exception) -> Exception:
    """What the client is told of an error of the model."""
    if isinstance(error, UserError):
        return Refused(422, str(error))
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        free_memory()
        return Refused(503, "not enough memory for this pair: ask for a smaller size", Retry_After="10")
    complain("matching failed", error)
    return Refused(500, "the matcher failed on this pair")


def free_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
