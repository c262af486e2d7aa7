"""Match prediction: weighted dual-softmax in log space, then mutual nearest neighbours.

P(i, j) = sigma^A(i) sigma^B(j) softmax(S(i, .))_j softmax(S(., j))_i,   S = tau <F^A, F^B>

log P = 2 S - logsumexp_rows S - logsumexp_columns S + log sigma^A + log sigma^B
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from prism_match.config import ModelConfig
from prism_match.model.kernels import best_of, log_sum_exp, product
from prism_match.model.mpm import LayerState
from prism_match.model.tokens import map_extent

# Entries of the similarity matrix held at a time when matches are extracted: 64 MiB of float32. On a CPU 16,
# which stay in its caches.
CHUNK, CHUNK_ON_CPU = 2**24, 2**22


def similarity(tokens0: Tensor, tokens1: Tensor, temperature: float) -> Tensor:
    """S: ... n c, ... m c -> ... n m, float32. tau = 1 / (c * temperature), as in LoFTR."""
    with torch.autocast(tokens0.device.type, enabled=False):
        scale = similarity_scale(tokens0, temperature)
        return (tokens0.float() * scale) @ (tokens1.float() * scale).mT


def similarity_scale(tokens: Tensor, temperature: float) -> float:
    """The square root of tau."""
    return 1 / math.sqrt(tokens.shape[-1] * temperature)


def coarse_matches(
    last: LayerState, valid0: Tensor, valid1: Tensor, config: ModelConfig, theta_c: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """M_c: cells i of A, cells j of B, the pair k they belong to, confidence; each m."""
    inner0, inner1 = (away_from_border(v, config.border).flatten(1) for v in (valid0, valid1))
    assert last.keep0 is not None and last.keep1 is not None  # they are None only while training
    found = []
    for k in range(last.keep0.shape[0]):
        kept0, kept1 = (keep[k].flatten().nonzero().squeeze(1) for keep in (last.keep0, last.keep1))
        log_nmi0 = log_nmi1 = None
        if config.weighted_softmax and last.logit0 is not None and last.logit1 is not None:
            log_nmi0 = F.logsigmoid(last.logit0[k].flatten()[kept0])
            log_nmi1 = F.logsigmoid(last.logit1[k].flatten()[kept1])
        i, j, confidence = mutual_matches(
            last.coarse0[k].flatten(0, 1)[kept0].float(),
            last.coarse1[k].flatten(0, 1)[kept1].float(),
            log_nmi0, log_nmi1, config.temperature, theta_c,
        )  # fmt: skip
        i, j = kept0[i], kept1[j]
        inner = inner0[k, i] & inner1[k, j]
        i, j, confidence = i[inner], j[inner], confidence[inner]
        found.append((i, j, torch.full_like(i, k), confidence))
    i, j, batch, confidence = (torch.cat(column) for column in zip(*found, strict=True))
    return i, j, batch, confidence


def mutual_matches(
    tokens0: Tensor,
    tokens1: Tensor,
    log_nmi0: Tensor | None,
    log_nmi1: Tensor | None,
    temperature: float,
    theta_c: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs (i, j) of tokens (n c and m c) whose confidence is the highest of row i and of
    column j, and above theta_c. Returns i, j (int64) and P (float32), ordered by i."""
    partner, confidence = mutual_partners(tokens0, tokens1, log_nmi0, log_nmi1, temperature)
    found = (confidence > theta_c).nonzero().squeeze(1)
    return found, partner[found], confidence[found]


def mutual_partners(
    tokens0: Tensor,
    tokens1: Tensor,
    log_nmi0: Tensor | None,
    log_nmi1: Tensor | None,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """For each of tokens0 (n c) the one of tokens1 (m c) of the highest confidence (int64), and P (float32),
    0 where another has a higher one there. Where one of both images has no tokens, both are empty.

    The matrix is worked through in chunks of rows, twice: once for the two normalisers and once for
    the maxima, so that memory stays bounded at any image size."""
    n, m = tokens0.shape[0], tokens1.shape[0]
    if n == 0 or m == 0:
        return tokens0.new_zeros(0, dtype=torch.int64), tokens0.new_zeros(0, dtype=torch.float32)
    on_cpu = tokens0.device.type == "cpu"
    if on_cpu:  # `product` would do it in every chunk
        tokens0, tokens1 = tokens0.float(), tokens1.float()
    rows = max(1, (CHUNK_ON_CPU if on_cpu else CHUNK) // m)
    starts = range(0, n, rows)
    stop = [min(n, a + rows) for a in starts]
    scale = 1.0
    if tokens0.dtype == torch.float32:  # a factor of the tokens is cheaper than one of the matrix
        tokens0, tokens1 = (x * similarity_scale(x, temperature) for x in (tokens0, tokens1))
    else:  # but not exact in half precision
        scale = similarity_scale(tokens0, temperature) ** 2

    single = product(tokens0, tokens1) if len(starts) == 1 else None
    row_norms, column_norm = [], None
    for a, b in zip(starts, stop, strict=True):
        s = product(tokens0[a:b], tokens1) if single is None else single
        row_norm, part = log_sum_exp(s, scale)
        row_norms.append(row_norm)
        column_norm = part if column_norm is None else torch.logaddexp(column_norm, part)
    assert column_norm is not None

    # log P = 2 S + a term of the row + a term of the column
    row_term, column_term = -torch.cat(row_norms), -column_norm
    if log_nmi0 is not None and log_nmi1 is not None:
        row_term, column_term = row_term + log_nmi0, column_term + log_nmi1
    row_best, row_arg = [], []
    column_best = torch.full((m,), -torch.inf, device=tokens0.device)
    column_arg = torch.zeros(m, dtype=torch.int64, device=tokens0.device)
    for a, b in zip(starts, stop, strict=True):
        s = product(tokens0[a:b], tokens1) if single is None else single
        best, arg, best_in_column, arg_in_column = best_of(s, row_term[a:b], column_term, scale)
        row_best.append(best)
        row_arg.append(arg)
        better = best_in_column > column_best
        column_best = torch.where(better, best_in_column, column_best)
        column_arg = torch.where(better, arg_in_column + a, column_arg)

    confidence, partner = torch.cat(row_best).exp(), torch.cat(row_arg)
    mutual = column_arg[partner] == torch.arange(n, device=tokens0.device)
    return partner, confidence * mutual


def away_from_border(valid: Tensor, border: int) -> Tensor:
    """valid: b h w. Returns b h w: cells at least `border` cells away from the image's edges."""
    height, width = valid.shape[1:]
    y = torch.arange(height, device=valid.device)[:, None]
    x = torch.arange(width, device=valid.device)
    rows, columns = map_extent(valid)[:, :, None, None].unbind(dim=1)
    return valid & (y >= border) & (x >= border) & (y < rows - border) & (x < columns - border)
