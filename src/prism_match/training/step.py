"""One training step's forward pass as a module: pairs and their truth in, loss and metrics out."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor, nn

from prism_match.model.matching import coarse_matches
from prism_match.model.mpm import LayerState
from prism_match.model.prism import PRISM, Features
from prism_match.model.refinement import FINE_PIXEL, expectation
from prism_match.training.compiling import many_variants
from prism_match.training.losses import (
    FineLoss,
    Sampled,
    coarse_loss,
    found_matches,
    heat_loss,
    own_matches,
    pruning_loss,
    pruning_metrics,
    refinement_error,
    refinement_loss,
    sample_matches,
)
from prism_match.training.pairs import PairBatch
from prism_match.training.supervision import CoarseTruth, coarse_ground_truth

METRICS = ("loss", "coarse", "fine", "pruning", "accuracy", "error_px", "kept", "recall")


@dataclass(frozen=True)
class LossConfig:
    refine: int = 128  # matches of each pair that train the refinement
    fine: FineLoss = "loftr"  # L_f as in LoFTR's code, or as the paper writes it
    deep: float = 0.0  # weight of the matching loss after every MPM but the last (deep supervision)
    heat: float = 0.0  # weight of the cross-entropy of the refinement's heat maps
    rough: float = 1.0  # weight in the refinement's losses of pairs whose truth is not exact
    fewest: int = 1  # a pair with fewer true matches than this weighs less, in proportion

    def __post_init__(self) -> None:
        for name, least in (("refine", 1), ("fewest", 1), ("deep", 0), ("heat", 0), ("rough", 0)):
            if not least <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.fine not in get_args(FineLoss):
            raise ValueError(f"fine must be one of {', '.join(get_args(FineLoss))}, not {self.fine!r}")


@dataclass(frozen=True)
class Work:
    """All that a step needs of one batch, made ahead by the thread that makes the data."""

    batch: PairBatch
    truth: CoarseTruth
    keys: Tensor  # b n0: random numbers that choose the matches to refine

    @staticmethod
    def of(batch: PairBatch, generator: torch.Generator) -> Work:
        truth = coarse_ground_truth(batch)
        keys = torch.rand(truth.match0.shape, generator=generator, device=truth.match0.device)
        return Work(batch, truth, keys)


class TrainingStep(nn.Module):
    """Wraps the model, so that DDP sees one module with one forward."""

    def __init__(self, model: PRISM, config: LossConfig, bf16: bool):
        super().__init__()
        self.model, self.config, self.bf16 = model, config, bf16

    def forward(self, work: Work, prune: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the loss, the METRICS (float32, detached), and how many true matches of each pair were
        found, and of how many (b 2). Without `prune` no cell is taken away from attention, only the
        estimators learn; with it, cells with a true match are still protected."""
        batch, truth = work.batch, work.truth
        with torch.autocast(batch.image0.device.type, torch.bfloat16, enabled=self.bf16):
            a, b = self.extract(batch)
            shape0, shape1 = a.valid.shape, b.valid.shape
            protect = (truth.matchable0.view(shape0), truth.matchable1.view(shape1))
            padded = batch.mask0 is not None or batch.mask1 is not None
            mask0, mask1 = (a.valid, b.valid) if prune or padded else (None, None)
            layers = self.model.transform(a, b, mask0, mask1, protect, prune)
            weight = None if batch.rough is None else torch.where(batch.rough, self.config.rough, 1.0)
            last = layers[-1]
            refined, first = self.own_matches(last, a, b, truth)
            sampled = sample_matches(refined, work.keys, self.config.refine, self.reach, weight, first)
            match = (sampled.batch, sampled.cell0, sampled.cell1)
            log_heat = self.model.refinement(a.fine, b.fine, last.coarse0, last.coarse1, match)
        return self.losses(layers, truth, log_heat, sampled)

    @property
    def reach(self) -> float:
        """How far from a cell's centre the refinement can move a match, in pixels."""
        return float(self.model.config.window // 2 * FINE_PIXEL)

    @torch.no_grad()
    def own_matches(
        self, last: LayerState, a: Features, b: Features, truth: CoarseTruth
    ) -> tuple[CoarseTruth, Tensor | None]:
        """The matches to refine and which of them come first. LoFTR's form takes true ones; the paper's takes
        M_f, the model's own, which waits for the device; true ones only fill up while these are too few."""
        if self.config.fine == "loftr":
            return truth, None
        state = replace(last, keep0=a.valid, keep1=b.valid) if last.keep0 is None else last
        c = self.model.config
        i, j, pair, _ = coarse_matches(state, a.valid, b.valid, c, c.theta_c)
        return own_matches(truth, (i, j, pair), b.valid.shape[2], self.reach)

    def extract(self, batch: PairBatch) -> tuple[Features, Features]:
        """Both images in one pass of the backbone: its batch norms see what they will see when matching."""
        images = torch.cat([batch.image0, batch.image1]).contiguous(memory_format=torch.channels_last)
        mask = None
        if batch.mask0 is not None or batch.mask1 is not None:
            blank = torch.ones_like(batch.image0[:, 0], dtype=torch.bool)
            mask = torch.cat([blank if m is None else m for m in (batch.mask0, batch.mask1)])
        both = self.model.extract(images, mask)
        a, b = ([x[i] for x in (y.chunk(2) for y in (both.coarse, both.fine, both.valid))] for i in (0, 1))
        return Features(*a), Features(*b)

    def losses(
        self, layers: list[LayerState], truth: CoarseTruth, log_heat: Tensor, sampled: Sampled
    ) -> tuple[Tensor, Tensor, Tensor]:
        c, m = self.config, self.model.config
        offset, std = expectation(log_heat)
        matching, order = coarse_loss(layers[-1], truth, m.temperature, m.weighted_softmax, c.fewest)
        fine = refinement_loss(offset, std, sampled, self.reach, c.fewest, c.fine)
        pruning = pruning_loss(layers, truth)
        loss = matching + fine + pruning
        if c.deep > 0 and len(layers) > 1:
            # Plain dual-softmax: the NMI of these layers has its own loss.
            early = [coarse_loss(x, truth, m.temperature, False, c.fewest)[0] for x in layers[:-1]]
            loss = loss + c.deep * torch.stack(early).mean()
        if c.heat > 0:
            loss = loss + c.heat * heat_loss(log_heat, sampled, c.fewest)
        found, error = found_matches(order, truth), refinement_error(offset, sampled)
        accuracy = found[:, 0].sum() / found[:, 1].sum().clamp(min=1)
        metrics = (loss, matching, fine, pruning, accuracy, error, *pruning_metrics(layers, truth, m.theta_p))
        return loss, torch.stack([x.detach().float() for x in metrics]), found

    def compile_parts(self) -> None:
        """Compiles the parts rather than the whole: the MPMs share one graph, so that a new image size
        costs seconds where the whole would cost minutes."""
        # Every size and kind of mask is a variant of its own; what cannot be compiled runs as it is.
        self.forward = many_variants(self.forward, suppress_errors=True)  # type: ignore[method-assign]
        for part in (self.model.backbone, *self.model.mpms, self.model.refinement):
            part.compile(dynamic=False)
        self.losses = torch.compile(self.losses, dynamic=False)  # type: ignore[method-assign]
