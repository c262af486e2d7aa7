"""Work that is always the same for tensors of the same shapes, recorded as CUDA graphs.

On a GPU a pair of small photos is a few milliseconds of work in hundreds of kernels, and Python takes longer
to ask for them than the GPU to run them. What was asked for a few times with the same shapes is recorded and
from then on asked for at once."""

from __future__ import annotations

import gc
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

PATIENCE = 2  # calls before something is recorded: what is seen once or twice is not worth it
MOST = 128  # recordings kept, those used last
HELD = 2**29  # bytes of what they read and write; what they need in between, all of them share
# Of a GPU's memory: what they may need in between. Work of many shapes does not fit into what work of others
# has left, so that what is shared grows; then all begin anew, and wait longer before they are recorded again.
SHARE = 1 / 8
# Bytes of what goes into one of them. Larger work keeps a GPU busy for so long that it need not wait for
# Python, and a few of them would push each other out of what is held.
LARGEST = HELD // 4

recording_anywhere = Lock()  # in this process

Work = Callable[..., tuple[Any, ...]]  # tensors in; tensors out, or None where there is nothing


@dataclass
class Recording:
    calls: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    work: Work | None = None  # what it reads besides its input must not be freed
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor | None, ...] = ()


@dataclass
class Recorder:
    """Runs work on a GPU, as it is or as recorded. All recordings share their memory: one runs at a time."""

    enabled: bool = True
    recordings: OrderedDict[Hashable, Recording] = field(default_factory=OrderedDict)
    buffers: dict[tuple, Tensor] = field(default_factory=dict)
    pool: Any = None
    pooled: int = 0  # bytes that it has grown to
    patience: int = PATIENCE
    done: torch.cuda.Event | None = None  # the last one that ran, in whatever stream
    lock: Lock = field(default_factory=Lock)

    def __call__(self, name: Hashable, work: Work, *inputs: Tensor) -> tuple[Any, ...]:
        """What work(*inputs) gives. It must not wait for the GPU, may change its inputs, and has to do the
        same whenever name and shapes are the same."""
        if not (self.enabled and inputs[0].is_cuda) or sum(x.nbytes for x in inputs) > LARGEST:
            return work(*inputs)
        key = (name, tuple((x.shape, x.dtype) for x in inputs), inputs[0].device)
        with self.lock, torch.cuda.device(inputs[0].device):
            recording = self.recordings.pop(key, None) or Recording()
            self.recordings[key] = recording
            recording.calls += 1
            if recording.graph is None:
                if recording.calls > self.patience:
                    self.try_to_record(recording, work, inputs)
                self.trim()
            return work(*inputs) if recording.graph is None else self.replay(recording, inputs)

    def replay(self, recording: Recording, inputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
        assert recording.graph is not None and self.done is not None
        self.done.wait()
        for buffer, given in zip(recording.inputs, inputs, strict=True):
            buffer.copy_(given)
        recording.graph.replay()
        results = tuple(None if x is None else x.clone() for x in recording.outputs)
        self.done.record()
        return results

    def try_to_record(self, recording: Recording, work: Work, inputs: tuple[Tensor, ...]) -> None:
        try:
            with undisturbed():
                self.record(recording, work, inputs)
        except torch.cuda.OutOfMemoryError:  # it may be free again later
            self.forget()
            self.patience *= 2
        except RuntimeError as error:  # whatever the driver cannot record
            log.warning("matching goes on without CUDA graphs: %s", str(error).strip().splitlines()[0])
            self.forget()
            self.enabled = False

    def record(self, recording: Recording, work: Work, inputs: tuple[Tensor, ...]) -> None:
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.synchronize()
        buffers = tuple(self.buffer("in", n, x) for n, x in enumerate(inputs))
        given = [x.clone() for x in inputs]
        outputs = tuple(self.place(n, x, given, buffers) for n, x in enumerate(work(*given)))
        del given
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what the work took until now, it takes from memory of its own
        before = torch.cuda.memory_reserved()
        with torch.cuda.stream(side):
            graph.capture_begin(self.pool, capture_error_mode="thread_local")
            try:
                for to, result in zip(outputs, work(*buffers), strict=True):
                    if to is not None and to is not result:
                        to.copy_(result)
            finally:
                graph.capture_end()
        self.pool = graph.pool()
        self.pooled += torch.cuda.memory_reserved() - before
        self.done = self.done or torch.cuda.Event()
        recording.graph, recording.work = graph, work
        recording.inputs, recording.outputs = buffers, outputs

    def trim(self) -> None:
        """Forgets those used longest ago, until the rest is within limits."""
        if self.pooled and self.pooled > SHARE * torch.cuda.mem_get_info()[1]:
            self.forget()
            self.patience *= 2
        while len(self.recordings) > MOST or (self.held > HELD and len(self.recordings) > 1):
            self.recordings.popitem(last=False)
            needed = {id(x) for r in self.recordings.values() for x in (*r.inputs, *r.outputs)}
            self.buffers = {key: x for key, x in self.buffers.items() if id(x) in needed}
        if self.pooled and all(r.graph is None for r in self.recordings.values()):
            self.pool, self.pooled = None, 0  # its memory has gone with the last of them

    @property
    def held(self) -> int:
        return sum(x.nbytes for x in self.buffers.values())

    def clear(self) -> None:
        """Forgets all of them, and frees their memory."""
        with self.lock:
            self.forget()

    def forget(self) -> None:
        if self.done is not None:
            self.done.synchronize()  # what still runs needs its memory
        self.recordings.clear()
        self.buffers.clear()
        self.pool, self.pooled = None, 0

    def place(
        self, n: int, result: Tensor | None, given: list[Tensor], buffers: tuple[Tensor, ...]
    ) -> Tensor | None:
        """Where a result of the work is left: in the place of what was given, if it is that."""
        for x, buffer in zip(given, buffers, strict=True):
            if result is x:
                return buffer
        return None if result is None else self.buffer("out", n, result)

    def buffer(self, kind: str, n: int, like: Tensor) -> Tensor:
        """One for all recordings that need such a one. In place, inference mode allows only what was made
        outside of it everywhere."""
        key = (kind, n, like.shape, like.stride(), like.dtype, like.device)
        if key not in self.buffers:
            with torch.inference_mode(False):
                self.buffers[key] = torch.empty_like(like)
        return self.buffers[key]


@contextmanager
def undisturbed() -> Iterator[None]:
    """While something is recorded, no other thread may wait for the whole device, as it does to record, and
    no recording may be freed, as it can be by a garbage collection."""
    with recording_anywhere:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


def round_count(count: int, device: torch.device) -> int:
    """At least as many, out of few numbers, so that the same work can be recorded for many pairs; and since a
    library of convolutions keeps a program for every number that it has not seen yet, and what it keeps
    between large tensors holds their memory for good. On a CPU, which records nothing, only a few more."""
    step = 16 if count <= 256 or device.type == "cpu" else 64 if count <= 1024 else 256
    return -(-count // step) * step
