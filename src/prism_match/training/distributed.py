"""The processes that train together: one, or those that torchrun started."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Processes:
    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def agree(self, values: list[float]) -> list[float]:
        """The values of the first process, everywhere: clocks differ, decisions must not."""
        if self.size == 1:
            return values
        shared = torch.tensor(values, dtype=torch.float64)  # on the CPU: the device is not waited for
        dist.broadcast(shared, src=0)
        return shared.tolist()

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        if self.size == 1:
            return flag
        shared = torch.tensor([float(flag)])
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return bool(shared.item())

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Over all processes, everywhere."""
        if self.size > 1:
            dist.all_reduce(values)
        return values


def join_processes(device: torch.device) -> tuple[Processes, torch.device]:
    """This process's place among those of torchrun, and the device that is its own."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", device.index or 0)))
        torch.cuda.set_device(device)
    if size == 1:
        return Processes(), device
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return Processes(dist.get_rank(), dist.get_world_size()), device
