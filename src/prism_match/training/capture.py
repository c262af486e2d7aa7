"""Makes a source on a GPU cheap for the CPU: its thousands of small kernels are recorded once for each
shape and then replayed as one. Only for sources that never wait for the device."""

from __future__ import annotations

import threading

import torch

from prism_match.training.pairs import PairBatch, PairSource

# Held by the thread that records, and by the one that trains while it does: compiling in two threads at a
# time fails, and so does what the model does first with a new size, such as cuDNN's trial of its
# algorithms, while another thread records.
recording = threading.Lock()


class Captured:
    """The same pairs as `source` gives for a generator that was just seeded."""

    def __init__(self, source: PairSource):
        self.source, self.name = source, source.name
        self.device: torch.device = source.device  # type: ignore[attr-defined]
        self._recordings: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, torch.Generator, PairBatch]] = {}

    def sample(self, batch: int, size: int, generator: torch.Generator) -> PairBatch:
        key = batch, size
        if key not in self._recordings:
            with recording:
                self._recordings[key] = self._record(batch, size)
        graph, own, recorded = self._recordings[key]
        own.manual_seed(generator.initial_seed())
        graph.replay()
        return recorded.map(torch.clone)  # the next replay writes over the recorded tensors

    def _record(self, batch: int, size: int) -> tuple[torch.cuda.CUDAGraph, torch.Generator, PairBatch]:
        own = torch.Generator(self.device)
        for _ in range(2):  # whatever is compiled or cached on first use must not end up in the recording
            self.source.sample(batch, size, own)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(own)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            recorded = self.source.sample(batch, size, own)
        return graph, own, recorded
