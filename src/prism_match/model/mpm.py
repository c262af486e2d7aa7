"""The Multi-scale Pruning Module, of which PRISM has L."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from prism_match.config import ModelConfig
from prism_match.model.ablations import CosinePruning, LinearAttention
from prism_match.model.attention import SADPA
from prism_match.model.pruning import PatchPruning, remaining
from prism_match.model.tokens import Cells


@dataclass(frozen=True)
class LayerState:
    """The pair after one MPM: features F_l, NMI (before the sigmoid) and pruning masks M_l."""

    coarse0: Tensor  # b h w c
    coarse1: Tensor
    keep0: Tensor | None  # b h w, bool; None while training without masks
    keep1: Tensor | None
    logit0: Tensor | None = None  # b h w, float32, -inf where it was not estimated
    logit1: Tensor | None = None  # None where the MPM does not prune


class MPM(nn.Module):
    """Multi-scale Pruning Module: self SADPA, cross SADPA, Patch Pruning; the same for both images."""

    def __init__(self, config: ModelConfig, last: bool):
        super().__init__()
        c = config
        self.levels, self.theta_p = c.levels, c.theta_p
        attention = SADPA if c.attention == "sadpa" else LinearAttention
        rotary = c.position == "rotary"
        self.self_attention = attention(c.coarse_dim, c.heads, c.levels, rotary=rotary)
        self.cross_attention = attention(c.coarse_dim, c.heads, c.levels, rotary=False)
        prunes = c.pruning == "every" or (c.pruning == "last" and last)
        estimator = PatchPruning(c.coarse_dim) if c.estimator == "nmi" else CosinePruning()
        self.pruning = estimator if prunes else None

    def forward(
        self,
        state: LayerState,
        valid0: Tensor,
        valid1: Tensor,
        protect: tuple[Tensor, Tensor] | None,
        prune: bool = True,
    ) -> LayerState:
        gather = not self.training
        cells0 = Cells.of(state.keep0, valid0, self.levels, gather)
        cells1 = Cells.of(state.keep1, valid1, self.levels, gather)
        f0 = self.self_attention(state.coarse0, state.coarse0, cells0, cells0)
        f1 = self.self_attention(state.coarse1, state.coarse1, cells1, cells1)
        f0, f1 = (
            self.cross_attention(f0, f1, cells0, cells1),
            self.cross_attention(f1, f0, cells1, cells0),
        )
        if self.pruning is None:
            return LayerState(f0, f1, state.keep0, state.keep1)
        logit0, logit1 = self.estimate(f0, f1, cells0, cells1), self.estimate(f1, f0, cells1, cells0)
        if not prune:
            return LayerState(f0, f1, state.keep0, state.keep1, logit0, logit1)
        assert state.keep0 is not None and state.keep1 is not None
        protect0, protect1 = (None, None) if protect is None else protect
        keep0 = remaining(state.keep0, logit0, self.theta_p, protect0)
        keep1 = remaining(state.keep1, logit1, self.theta_p, protect1)
        return LayerState(f0, f1, keep0, keep1, logit0, logit1)

    def estimate(self, features: Tensor, other: Tensor, cells: Cells, other_cells: Cells) -> Tensor:
        """b h w: the NMI of each cell that is still kept, before the sigmoid."""
        assert self.pruning is not None
        tokens = cells.queries.gather(features.flatten(1, 2))
        others = other_cells.queries.gather(other.flatten(1, 2))
        logit = self.pruning(tokens, others, other_cells.queries.mask)
        if cells.queries.index is not None:
            nowhere = torch.full(features.shape[:3], -torch.inf, device=features.device)
            logit = cells.queries.scatter(nowhere.flatten(1)[..., None], logit[..., None])
        return logit.view(features.shape[:3])
