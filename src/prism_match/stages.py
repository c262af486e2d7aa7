"""What each stage of matching takes: code names its stages, and whoever wants to know starts a `Stopwatch`.

    with stage("backbone"):
        ...

    with Stopwatch(device) as watch:
        matcher.match(a, b)
    watch.milliseconds()  # {"prepare": 12.1, "backbone": 80.3, ...}

Nobody waits for anything: on a GPU a stage is two events in its queue, which are read in the end. Without a
stopwatch a stage is a look at two variables."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

# Of one pair of photos, in their order. The first is work of the CPU.
STAGES = ("prepare", "backbone", "MPMs", "matching", "refinement", "polish")
NOTHING = nullcontext()
running: Stopwatch | None = None
alone = threading.local()  # alone.watch: the one that a thread has for itself


def stage(name: str, *, host: bool = False) -> AbstractContextManager[None]:
    """Times what is done inside it under this name, if anyone wants to know. Stages with one name add up; one
    inside another counts for both. host: work of the CPU alone, such as decoding, also where the device is
    a GPU."""
    watch = getattr(alone, "watch", None) or running
    return NOTHING if watch is None else watch.stage(name, host)


class Stopwatch:
    """Adds up the stages that run, in any thread, while it is entered: one at a time in a process. With
    `this_thread`, those of the thread that enters it alone: one at a time in a thread."""

    def __init__(self, device: str | torch.device = "cpu", *, this_thread: bool = False):
        self.device, self.this_thread = torch.device(device), this_thread
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Stopwatch:
        global running
        if (getattr(alone, "watch", None) if self.this_thread else running) is not None:
            raise RuntimeError("another Stopwatch is running")
        if self.this_thread:
            alone.watch = self
        else:
            running = self
        return self

    def __exit__(self, *_: object) -> None:
        global running
        if self.this_thread:
            alone.watch = None
        else:
            running = None

    @contextmanager
    def stage(self, name: str, host: bool = False) -> Iterator[None]:
        if self.device.type == "cuda" and not host:
            self._add(name)  # for the order of the names
            first = self._event()
            yield
            self._events.append((name, first, self._event()))
        else:
            start = time.perf_counter()
            yield
            self._add(name, time.perf_counter() - start)

    def milliseconds(self) -> dict[str, float]:
        """What each stage has taken so far, in the order in which they came. Waits for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            while self._events:
                name, first, last = self._events.pop()
                self._add(name, first.elapsed_time(last) / 1000)
        return {name: 1000 * seconds for name, seconds in self._seconds.items()}

    def _add(self, name: str, seconds: float = 0.0) -> None:
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event
