"""Hard pairs are drawn more often: those of bins (overlap, change of scale, angle) in which the model misses.

What a batch holds must depend on the number of its update alone, though batches are made ahead, and a run may
be resumed anywhere. So the weights change only every `BLOCK` updates, are made `AHEAD` updates before they
are used, and are part of a checkpoint.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prism_match.training.distributed import Processes

BLOCK = 100  # updates
AHEAD = 8  # more than batches are made ahead
KEEP = 0.8  # of what was counted before counts on in the next block
PRIOR = 20.0  # pairs of the mean that a bin begins with, so that few pairs do not say much
RANGE = (1 / 3, 3.0)  # of the weights


class Difficulty:
    """Counts how many true matches of the pairs of each bin are found, and weighs the bins by it."""

    def __init__(self, bins: int, power: float, device: torch.device, world: Processes):
        self.power, self.world = power, world
        self.found = torch.zeros(2, bins, device=device)  # of earlier blocks: sum of shares found, and pairs
        self.block = torch.zeros_like(self.found)  # of this one, in this process
        self.equal = torch.ones(bins, device=device)  # of blocks before which nothing was counted
        self.weights = {0: self.equal}  # of blocks, by their number
        self.ready: torch.cuda.Event | None = None  # when the newest weights are there

    def add(self, bins: Tensor, found: Tensor) -> None:
        """bins: b, -1 for pairs of none. found: b 2, how many true matches were found, and of how many."""
        counts = (bins >= 0) & (found[:, 1] > 0)
        share = found[:, 0] / found[:, 1].clamp(min=1)
        rows = torch.stack([share * counts, counts.float()])
        self.block.index_add_(1, bins.clamp(min=0), rows)

    def step_done(self, step: int) -> None:
        """After update number `step`, counted from 1."""
        if (step + AHEAD) % BLOCK:
            return
        self.found = KEEP * self.found + self.world.sum(self.block)
        self.block = torch.zeros_like(self.block)
        number = (step + AHEAD) // BLOCK
        self.weights = {number - 1: self._of_block(number - 1), number: self._weigh()}
        if self.found.is_cuda:
            self.ready = torch.cuda.Event()
            self.ready.record()

    def _weigh(self) -> Tensor:
        share, pairs = self.found
        mean = share.sum() / pairs.sum().clamp(min=1)
        missed = 1 - (share + PRIOR * mean) / (pairs + PRIOR)
        return (missed / (1 - mean).clamp(min=1e-3)).clamp(*RANGE) ** self.power

    def of(self, step: int) -> Tensor:
        """The weights of the bins for update number `step`, counted from 0."""
        return self._of_block(step // BLOCK)

    def _of_block(self, number: int) -> Tensor:
        """A run may have begun without counting."""
        return self.weights.get(number, self.equal)

    def state(self) -> dict[str, Tensor]:
        """Of several processes the first one saves, so that what the others have counted since the weights
        last changed is lost."""
        weights = {f"weights.{k}": v for k, v in self.weights.items()}
        return {"found": self.found, "block": self.block, **weights}

    def load(self, state: dict[str, Tensor]) -> None:
        """What `state` gave; nothing, or that of other bins, begins anew."""
        if "found" not in state or state["found"].shape != self.found.shape:
            return
        device = self.found.device
        self.found = state["found"].to(device)
        self.block = state["block"].to(device) * self.world.first
        self.weights = {
            int(k.removeprefix("weights.")): v.to(device)
            for k, v in state.items()
            if k.startswith("weights.")
        }
