"""One process of the test of distributed training: two updates, then its gradients and weights in a file."""

from __future__ import annotations

import sys

from pairs_for_tests import ShiftedTextures
from safetensors.torch import save_file

from prism_match.training.config import PRESETS, Phase
from prism_match.training.feed import Feed, Weighted
from prism_match.training.trainer import Trainer


def main(out: str, accumulate: str) -> None:
    config = PRESETS["tiny"].replace(accumulate=int(accumulate), phases=(Phase(0.0, 64, 4),), steps=10)
    trainer = Trainer(config, [Weighted(ShiftedTextures())], f"{out}-run")
    feed = Feed(trainer.mixer)
    tensors = {}
    for step in range(2):
        trainer._order(feed, step)
        trainer.update(feed.next())
        tensors |= {f"{step}.grad.{k}": p.grad.contiguous() for k, p in trainer.model.named_parameters()}
    tensors |= {f"weight.{k}": p.detach().contiguous() for k, p in trainer.model.named_parameters()}
    feed.close()
    if trainer.world.first:
        save_file(tensors, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
