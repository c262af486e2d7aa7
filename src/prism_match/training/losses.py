"""The training loss of the paper, L = L_c + L_f + L_p, and what to watch while it falls.

Every term is averaged over the truth of a pair first and over the pairs of a batch then. Splitting a
batch over processes or accumulated steps therefore leaves the gradient as it is, and a pair seen at very
different scales, which has few matches, counts as much as an easy one. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from prism_match.model.matching import similarity
from prism_match.model.mpm import LayerState
from prism_match.model.prism import cell_centre
from prism_match.model.refinement import FINE_PIXEL
from prism_match.training.supervision import CoarseTruth

FineLoss = Literal["paper", "loftr"]
SHARPEST = 0.1  # pixels: the paper's L_f divides by the variance, and that of a heat map may be 0


def coarse_loss(
    last: LayerState, truth: CoarseTruth, temperature: float, weighted: bool, fewest: int = 1
) -> tuple[Tensor, Tensor]:
    """L_c = -mean log P at the true matches, with

        log P = 2 S - logsumexp_rows S - logsumexp_columns S + log sigma^A + log sigma^B

    and pruned cells left out of both softmaxes. A pair of fewer than `fewest` true matches weighs less, in
    proportion. Also returns what orders the cells of a row by confidence (b n m): 2 S - logsumexp_columns S
    + log sigma^B, without gradient."""
    s = similarity(last.coarse0.flatten(1, 2), last.coarse1.flatten(1, 2), temperature)  # b n m
    match, true = truth.match0.clamp(min=0), truth.match0 >= 0
    rows = logsumexp(_without(s, last.keep1, dim=2), dim=2)  # b n
    columns = logsumexp(_without(s, last.keep0, dim=1), dim=1)  # b m
    log_p = 2 * s.gather(2, match[..., None]).squeeze(2) - rows - columns.gather(1, match)
    nmi1 = torch.zeros_like(columns)
    if weighted and last.logit0 is not None and last.logit1 is not None:
        nmi1 = F.logsigmoid(last.logit1.flatten(1))
        log_p = log_p + F.logsigmoid(last.logit0.flatten(1)) + nmi1.gather(1, match)
    order = 2 * s.detach() + (nmi1 - columns).detach()[:, None]
    return _pair_mean(-log_p, true, fewest), _without(order, last.keep1, dim=2)


def logsumexp(s: Tensor, dim: int) -> Tensor:
    """As torch.logsumexp, but with a zero gradient instead of NaN where everything is -inf."""
    top = s.detach().amax(dim=dim, keepdim=True).clamp(min=-1e30)
    return (s - top).exp().sum(dim=dim).clamp(min=1e-30).log() + top.squeeze(dim)


@torch.no_grad()
def found_matches(order: Tensor, truth: CoarseTruth) -> Tensor:
    """b 2: how many true matches have the maximum of their row (order: b n m) at the true cell, and how many
    there are."""
    true = truth.match0 >= 0
    correct = (order.argmax(dim=2) == truth.match0) & true
    return torch.stack([correct.sum(dim=1), true.sum(dim=1)], dim=1).float()


def _without(s: Tensor, keep: Tensor | None, dim: int) -> Tensor:
    """s: b n m with the pruned cells (keep: b h w, along `dim`) at -inf."""
    return s if keep is None else s.masked_fill(~keep.flatten(1).unsqueeze(3 - dim), -torch.inf)


def _pair_mean(value: Tensor, chosen: Tensor, fewest: int = 1, weight: Tensor | None = None) -> Tensor:
    """Mean of `value` (b n) where `chosen` (b n, bool) is set, 0 where it never is; then the mean over b of
    these times `weight` (b)."""
    total = torch.where(chosen, value, torch.zeros_like(value)).sum(dim=1)
    each = total / chosen.sum(dim=1).clamp(min=fewest)
    return (each if weight is None else each * weight).mean()


def pruning_loss(layers: Sequence[LayerState], truth: CoarseTruth) -> Tensor:
    """L_p: the log-likelihood of the estimated NMI at every MPM that prunes, with matchable and unmatchable
    cells balanced, as the mean over MPMs and over both images. 0 where no MPM prunes."""
    terms = []
    for layer in layers:
        for logit, matchable, unmatchable in (
            (layer.logit0, truth.matchable0, truth.unmatchable0),
            (layer.logit1, truth.matchable1, truth.unmatchable1),
        ):
            if logit is not None:
                x = logit.flatten(1)
                terms.append(_pair_mean(-F.logsigmoid(x), matchable))
                terms.append(_pair_mean(-F.logsigmoid(-x), unmatchable))
    # The two kinds are summed, MPMs and images averaged.
    return 2 * torch.stack(terms).mean() if terms else truth.offset0.new_zeros(())


@dataclass(frozen=True)
class Sampled:
    """k true matches of each of b pairs; fewer where there are fewer, but always k entries."""

    batch: Tensor  # b*k, int64
    cell0: Tensor  # b*k
    cell1: Tensor  # b*k
    target: Tensor  # b k 2: the true offset from the centre of cell 1, pixels
    usable: Tensor  # b k, bool: a true match whose target the window can reach
    weight: Tensor  # b: of the pair


def sample_matches(
    truth: CoarseTruth,
    keys: Tensor,
    count: int,
    reach: float,
    weight: Tensor | None = None,
    first: Tensor | None = None,
) -> Sampled:
    """The matches that refinement trains on: those with the largest random `keys` (b n0, in [0, 1)), but
    those of the cells in `first` (b n0, bool) before any other. `weight` (b): of each pair; None = 1."""
    b, n = truth.match0.shape
    near = truth.offset0.abs().amax(dim=-1) <= reach
    good = (truth.match0 >= 0) & near
    order = keys + good if first is None else keys + good + (good & first)
    top, cell0 = order.topk(min(count, n), dim=1)  # b k
    cell1 = truth.match0.gather(1, cell0).clamp(min=0)
    batch = torch.arange(b, device=keys.device)[:, None].expand_as(cell0)
    target = truth.offset0.gather(1, cell0[..., None].expand(-1, -1, 2))
    weight = torch.ones(b, device=keys.device) if weight is None else weight
    return Sampled(batch.flatten(), cell0.flatten(), cell1.flatten(), target, top >= 1, weight)


def own_matches(
    truth: CoarseTruth, found: tuple[Tensor, Tensor, Tensor], columns: int, reach: float
) -> tuple[CoarseTruth, Tensor]:
    """The matches that the paper refines are the model's own. found: its cells of A, of B (in a map of so
    many columns) and their pairs, each m. Returns the truth with these in the place of the true ones where
    the true point is within `reach` of them, and where that is (b n0, bool)."""
    i, j, pair = found
    own = torch.full_like(truth.match0, -1)
    own[pair, i] = j
    true_at, own_at = (
        cell_centre(x.clamp(min=0).flatten(), columns).view_as(truth.offset0) for x in (truth.match0, own)
    )
    offset = truth.offset0 + true_at - own_at
    near = (own >= 0) & (truth.match0 >= 0) & (offset.abs().amax(dim=-1) <= reach)
    match, offset = torch.where(near, own, truth.match0), torch.where(near[..., None], offset, truth.offset0)
    return replace(truth, match0=match, offset0=offset), near


def refinement_loss(
    offset: Tensor, std: Tensor, sampled: Sampled, reach: float, fewest: int = 1, form: FineLoss = "loftr"
) -> Tensor:
    """L_f: distance to the target in units of the window's `reach`, weighted by the certainty.

    offset: b*k 2 and std: b*k in pixels, from the refinement. The paper's form is the distance over the
    variance; that of LoFTR's code is the squared distance, weighted by the inverse standard deviations over
    their mean. In both no gradient flows into the weights: the network must not lower the loss by being
    unsure."""
    b, k = sampled.usable.shape
    square = ((offset.view(b, k, 2) - sampled.target) / reach).square().sum(dim=-1)
    if form == "paper":
        variance = (std.detach().view(b, k).clamp(min=SHARPEST) / reach).square()
        distance = (square + 1e-12).sqrt()  # which has a gradient at 0, too
        return _pair_mean(distance / variance, sampled.usable, fewest, sampled.weight)
    certainty = torch.where(sampled.usable, 1 / std.detach().view(b, k).clamp(min=1e-3), 0.0)
    count = sampled.usable.sum(dim=1, keepdim=True).clamp(min=1)
    weight = certainty / (certainty.sum(dim=1, keepdim=True) / count).clamp(min=1e-6)
    return _pair_mean(square * weight, sampled.usable, fewest, sampled.weight)


def heat_loss(log_heat: Tensor, sampled: Sampled, fewest: int = 1) -> Tensor:
    """Cross-entropy of the heat maps (b*k w w, in logarithms) against the true point spread over the four
    pixels around it, as in bilinear interpolation, so that its expectation is the true point. L_f alone asks
    little of a flat heat map: its gradient is that of the mean only, this one's is that of every pixel."""
    b, k = sampled.usable.shape
    reach = log_heat.shape[-1] // 2
    steps = torch.arange(-reach, reach + 1, device=log_heat.device)
    x, y = (sampled.target.flatten(0, 1) / FINE_PIXEL).unbind(-1)  # b*k, in pixels of the heat map
    along_x, along_y = ((1 - (steps - t[:, None]).abs()).clamp(min=0) for t in (x, y))  # b*k w
    target = along_y[:, :, None] * along_x[:, None, :]
    entropy = -(target * log_heat).sum(dim=(1, 2)).view(b, k)
    return _pair_mean(entropy, sampled.usable, fewest, sampled.weight)


@torch.no_grad()
def refinement_error(offset: Tensor, sampled: Sampled) -> Tensor:
    """Median distance to the target in pixels, of the usable matches of the batch (0 if there are none)."""
    error = (offset.view_as(sampled.target) - sampled.target).norm(dim=-1)
    ordered = error.masked_fill(~sampled.usable, torch.inf).flatten().sort().values
    middle = (sampled.usable.sum() - 1).clamp(min=0) // 2
    median = ordered.gather(0, middle[None])[0]
    return torch.where(sampled.usable.any(), median, torch.zeros_like(median))


@torch.no_grad()
def pruning_metrics(
    layers: Sequence[LayerState], truth: CoarseTruth, theta_p: float
) -> tuple[Tensor, Tensor]:
    """Share of all known cells that the estimators alone would keep to the end, and of the matchable ones
    (the recall); 1 where nothing is there to prune or no MPM prunes."""
    kept = known = found = matchable = torch.zeros((), device=truth.offset0.device)
    for logits, yes, no in (
        ([x.logit0 for x in layers], truth.matchable0, truth.unmatchable0),
        ([x.logit1 for x in layers], truth.matchable1, truth.unmatchable1),
    ):
        keep = torch.ones_like(yes)
        for logit in logits:
            if logit is not None:
                keep = keep & (logit.flatten(1).sigmoid() >= theta_p)
        kept, known = kept + (keep & (yes | no)).sum(), known + (yes | no).sum()
        found, matchable = found + (keep & yes).sum(), matchable + yes.sum()
    one = torch.ones_like(kept)
    return torch.where(known > 0, kept / known, one), torch.where(matchable > 0, found / matchable, one)
