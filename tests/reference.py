"""Slow, plain versions of the model's parts, written from the paper's equations: loops and masks, no
gathering, no chunks. The fast code must agree with them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from prism_match.model.prism import PairMatches


def rotation(theta: Tensor) -> Tensor:
    """The block-diagonal matrix R of the appendix, for d/2 angles; channel k is paired with k + d/2."""
    half = len(theta)
    matrix = torch.zeros(2 * half, 2 * half, dtype=theta.dtype)
    for k in range(half):
        cos, sin = theta[k].cos(), theta[k].sin()
        matrix[k, k], matrix[k, half + k] = cos, -sin
        matrix[half + k, k], matrix[half + k, half + k] = sin, cos
    return matrix


def centres(rows: int, columns: int, level: int, longer: int) -> Tensor:
    """n 2: (x, y) of the cells at 1/level of a map, in units of half its longer side."""
    points = [
        ((x + 0.5) * level * 2 / longer, (y + 0.5) * level * 2 / longer)
        for y in range(rows // level)
        for x in range(columns // level)
    ]
    return torch.tensor(points)


def sadpa(
    layer: torch.nn.Module, source: Tensor, target: Tensor, keep_s: Tensor, keep_t: Tensor, valid_t: Tensor
) -> Tensor:
    """source: h w c; target: h' w' c; masks h w. Every query, key and head by itself."""
    rows, columns, dim = source.shape
    heads, width = layer.heads, dim // layer.heads
    q_at = centres(rows, columns, 1, max(rows, columns))
    out = source.clone()
    keys = []
    for n, (level, conv) in enumerate(zip(layer.levels, layer.convs, strict=True)):
        kernel = conv.weight.view(dim, level, level, dim).permute(0, 3, 1, 2)
        k = F.conv2d(target.permute(2, 0, 1)[None], kernel, conv.bias, stride=level)[0]
        mask = valid_t if n == 0 and len(layer.levels) > 1 else keep_t
        mask = F.interpolate(mask[None, None].float(), scale_factor=1 / level, mode="nearest")[0, 0] > 0
        at = centres(*target.shape[:2], level, max(target.shape[:2]))
        keys.append((k.flatten(1).T, mask.flatten(), at))
    for y in range(rows):
        for x in range(columns):
            if not keep_s[y, x]:
                continue
            q = F.linear(source[y, x], layer.query.weight, layer.query.bias)
            messages = []
            for k, mask, at in keys:
                message = torch.zeros(dim)
                for h in range(heads):
                    part = slice(h * width, (h + 1) * width)
                    scores, values = [], []
                    for j in mask.nonzero().flatten().tolist():
                        turned = k[j, part]
                        if layer.rotary is not None:
                            delta = q_at[y * columns + x] - at[j]
                            turned = rotation(layer.rotary.b[h] @ delta) @ turned
                        scores.append(q[part] @ turned / math.sqrt(width))
                        values.append(k[j, part])
                    if scores:
                        message[part] = torch.stack(scores).softmax(0) @ torch.stack(values)
                messages.append(message)
            out[y, x] = source[y, x] + layer.ffn(torch.cat([source[y, x], *messages]))
    return out


def masked_attention(
    layer: torch.nn.Module, source: Tensor, target: Tensor, keep_s: Tensor, keep_t: Tensor, valid_t: Tensor
) -> Tensor:
    """The same for whole maps at once (h w c), with masks over the full work: no cell is taken out."""
    rows, columns, dim = source.shape
    heads = layer.heads
    q = F.linear(source.flatten(0, 1), layer.query.weight, layer.query.bias)
    q = q.view(-1, heads, dim // heads)
    q_at = centres(rows, columns, 1, max(rows, columns))
    messages = []
    for n, (level, conv) in enumerate(zip(layer.levels, layer.convs, strict=True)):
        kernel = conv.weight.view(dim, level, level, dim).permute(0, 3, 1, 2)
        v = F.conv2d(target.permute(2, 0, 1)[None], kernel, conv.bias, stride=level)[0]
        v = v.flatten(1).T.view(-1, heads, dim // heads)
        mask = (valid_t if n == 0 and len(layer.levels) > 1 else keep_t)[::level, ::level].flatten()
        if layer.rotary is None:
            score = torch.einsum("nhd,mhd->hnm", q, v)
        else:
            at = centres(*target.shape[:2], level, max(target.shape[:2]))
            theta = torch.einsum("hkc,nmc->hnmk", layer.rotary.b, q_at[:, None] - at[None])
            q1, q2 = q.chunk(2, dim=-1)
            v1, v2 = v.chunk(2, dim=-1)
            dot = torch.einsum("nhk,mhk->hnmk", q1, v1) + torch.einsum("nhk,mhk->hnmk", q2, v2)
            cross = torch.einsum("nhk,mhk->hnmk", q2, v1) - torch.einsum("nhk,mhk->hnmk", q1, v2)
            score = (dot * theta.cos() + cross * theta.sin()).sum(-1)
        score = (score / math.sqrt(dim // heads)).masked_fill(~mask, -torch.inf)
        weight = score.softmax(-1).nan_to_num(0.0)
        messages.append(torch.einsum("hnm,mhd->nhd", weight, v).flatten(1))
    tokens = source.flatten(0, 1)
    updated = (tokens + layer.ffn(torch.cat([tokens, *messages], dim=-1))).view_as(source)
    return torch.where(keep_s[..., None], updated, source)


def masked_mpms(model: torch.nn.Module, f0: Tensor, f1: Tensor, keep0: Tensor, keep1: Tensor) -> list[dict]:
    """All MPMs for one pair without padding: features (h w c) and masks (h w) after each."""
    valid0, valid1 = torch.ones_like(keep0), torch.ones_like(keep1)
    states = []
    for mpm in model.mpms:
        a, b = mpm.self_attention, mpm.cross_attention
        f0, f1 = (
            masked_attention(a, f0, f0, keep0, keep0, valid0),
            masked_attention(a, f1, f1, keep1, keep1, valid1),
        )
        f0, f1 = (
            masked_attention(b, f0, f1, keep0, keep1, valid1),
            masked_attention(b, f1, f0, keep1, keep0, valid0),
        )
        nmi0, nmi1 = (mpm.pruning.phi(f).squeeze(-1).sigmoid() for f in (f0, f1))
        keep0, keep1 = keep0 & (nmi0 >= mpm.theta_p), keep1 & (nmi1 >= mpm.theta_p)
        states.append({"f0": f0, "f1": f1, "keep0": keep0, "keep1": keep1, "nmi0": nmi0, "nmi1": nmi1})
    return states


def confidence(f0: Tensor, f1: Tensor, nmi0: Tensor, nmi1: Tensor, temperature: float) -> Tensor:
    """P (n m) of the weighted dual-softmax, term by term."""
    n, m, dim = len(f0), len(f1), f0.shape[1]
    s = torch.tensor([[float(f0[i] @ f1[j]) / (dim * temperature) for j in range(m)] for i in range(n)])
    p = torch.zeros(n, m)
    for i in range(n):
        for j in range(m):
            row = math.exp(s[i, j]) / sum(math.exp(x) for x in s[i].tolist())
            column = math.exp(s[i, j]) / sum(math.exp(x) for x in s[:, j].tolist())
            p[i, j] = nmi0[i] * nmi1[j] * row * column
    return p


def mutual(p: Tensor, theta_c: float) -> list[tuple[int, int]]:
    return [
        (i, j)
        for i in range(p.shape[0])
        for j in range(p.shape[1])
        if p[i, j] > theta_c and p[i, j] == p[i].max() and p[i, j] == p[:, j].max()
    ]


def partner_distances(expected: PairMatches, found: PairMatches) -> Tensor:
    """How far apart the partners of the cells are that both have matched."""
    first, second = (
        {tuple(p): q for p, q in zip(m.keypoints0.tolist(), m.keypoints1, strict=True)}
        for m in (expected, found)
    )
    return torch.stack([(first[p] - second[p]).norm() for p in first.keys() & second.keys()])
