"""The model in the form that ONNX can hold: one pair, tensors alone, no step that depends on what is in them
but by `nonzero` and gathering. The modules and weights are those of `model/`.

Two things differ from `model/fast.py`, and neither changes a match. No axis is ever empty, since few runtimes
take that: a map without a cell left keeps its first one, whose matches are dropped, and the refinement gets
one match more than there are. And with `gather=False`, for runtimes that need every size to be known, pruned
cells stay where they are under a mask, and there is a fixed number of matches.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism_match.corners import corners, to_corners
from prism_match.matcher import MOST_ZOOM, REWEIGHED
from prism_match.model.ablations import absolute_encoding
from prism_match.model.attention import SADPA
from prism_match.model.fast import FastRefinement, fused
from prism_match.model.matching import away_from_border
from prism_match.model.mpm import MPM
from prism_match.model.position import cell_grid, frame_scale, turn
from prism_match.model.prism import CELL, PRISM, STRIDE
from prism_match.model.pruning import remaining
from prism_match.model.refinement import FINE_PER_CELL, expectation
from prism_match.model.tokens import map_extent
from prism_match.polish import FEWEST, fitted_affine, handicap
from prism_match.subpixel import (
    FIRST_ROUNDS,
    LEVELS,
    MORE_ROUNDS,
    Pyramid,
    Subpixel,
    approach,
    halvings,
)

MASKED = -1e4  # added to what a softmax must not see; fp16 holds it
PADDED = STRIDE // CELL  # sides of maps are multiples of this


class Backbone(nn.Module):
    """image: 1 1 h w, float32 in [0, 1], any size -> coarse: h/8 w/8 c; fine: c h/2 w/2, both rounded up."""

    def __init__(self, model: PRISM, dtype: torch.dtype):
        super().__init__()
        self.backbone, self.dtype = fused(model.backbone, dtype), dtype
        self.backbone._state_dict_hooks.clear()  # of batch norms, which are no longer there
        self.absolute = model.config.position == "absolute"

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        coarse, fine = (x[0] for x in self.backbone(image))  # the first convolution is in float32
        coarse = coarse.permute(1, 2, 0)
        if self.absolute:
            height, width, dim = coarse.shape
            coarse = coarse + absolute_encoding(dim, height, width, coarse.device).to(self.dtype)
        return coarse, fine


class PairOfFeatures(nn.Module):
    """What `Backbone` gives for two images -> matches: keypoints0 and keypoints1 (m 2), in pixels of the
    images, and scores (m). threshold: a scalar, theta_c."""

    def __init__(self, model: PRISM, dtype: torch.dtype, gather: bool = True, matches: int = 0):
        """matches: without `gather`, how many there are always; rows without a match have the score 0."""
        super().__init__()
        self.config, self.gather, self.matches = model.config, gather, matches
        self.mpms = nn.ModuleList([OnnxMPM(mpm, dtype) for mpm in model.mpms])  # type: ignore[arg-type]
        self.refinement = OnnxRefinement(model, dtype)

    def forward(
        self, coarse0: Tensor, fine0: Tensor, coarse1: Tensor, fine1: Tensor, threshold: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        levels, border = self.config.levels, self.config.border
        (table0, map0), (table1, map1) = (
            Map.of(c, levels, border, fixed=not self.gather) for c in (coarse0, coarse1)
        )
        keep0, keep1 = map0.valid, map1.valid
        nmi0 = nmi1 = None
        for mpm in self.mpms:
            table0, table1, keep0, keep1, nmi0, nmi1 = mpm(
                table0, table1, map0.kept(keep0, self.gather), map1.kept(keep1, self.gather), keep0, keep1
            )
        cell0, cell1, scores = self.coarse_matches(
            table0, table1, keep0, keep1, nmi0, nmi1, map0, map1, threshold
        )
        offset = self.refinement(fine0, fine1, table0, table1, cell0, cell1, map0, map1)
        keypoints0, keypoints1 = map0.centres_of(cell0), map1.centres_of(cell1) + offset
        if self.gather:  # without the one at the end that is none
            return keypoints0[:-1], keypoints1[:-1], scores
        return keypoints0, keypoints1, scores

    def coarse_matches(
        self,
        table0: Tensor,
        table1: Tensor,
        keep0: Tensor,
        keep1: Tensor,
        nmi0: Tensor | None,
        nmi1: Tensor | None,
        map0: Map,
        map1: Map,
        threshold: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """M_c, as `matching.mutual_matches`: cells of A and B, and scores."""
        rows, columns = (Selection.of(keep, self.gather) for keep in (keep0, keep1))
        scale = 1 / math.sqrt(table0.shape[-1] * self.config.temperature)
        s = (rows.take(table0).float() * scale) @ (columns.take(table1).float() * scale).transpose(-1, -2)
        if rows.mask is not None and columns.mask is not None:
            s = s + rows.mask[:, None] + columns.mask
        row_term, column_term = -s.logsumexp(dim=1), -s.logsumexp(dim=0)
        if self.config.weighted_softmax and nmi0 is not None and nmi1 is not None:
            row_term = row_term + F.logsigmoid(rows.take(nmi0))
            column_term = column_term + F.logsigmoid(columns.take(nmi1))
        total = 2 * s + column_term
        best, partner = total.max(dim=1)
        scores = (best + row_term).exp()
        mutual = (total + row_term[:, None]).argmax(dim=0)[partner] == torch.arange(
            scores.shape[0], device=scores.device
        )
        # Neither at the border nor the cell that stands for none.
        good0, good1 = rows.take(keep0 & map0.inner), columns.take(keep1 & map1.inner)
        found = mutual & (scores > threshold) & good0 & good1[partner]
        if self.gather:
            i = found.nonzero().squeeze(1)
            cell0, cell1 = rows.rows[i], columns.rows[partner[i]]  # type: ignore[index]
            return (
                torch.cat([cell0, map0.spare]),
                torch.cat([cell1, map1.spare]),
                scores[i],
            )
        scores, i = (scores * found).topk(min(self.matches, scores.shape[0]))
        there = scores > 0
        return torch.where(there, i, map0.spare), torch.where(there, partner[i], map1.spare), scores


class MPMs(nn.Module):
    """The L MPMs alone, for `Matcher`, which does the rest itself; `attention` is onnxruntime's own."""

    def __init__(self, model: PRISM):
        super().__init__()
        self.config = model.config
        self.mpms = nn.ModuleList([OnnxMPM(mpm, torch.float32, fused=True) for mpm in model.mpms])  # type: ignore[arg-type]

    def forward(
        self, coarse0: Tensor, coarse1: Tensor, valid0: Tensor, valid1: Tensor, keep0: Tensor, keep1: Tensor
    ) -> tuple[Tensor, ...]:
        """coarse: h w c, padded to multiples of 32 pixels; valid: h w, bool, False where that is padding;
        keep: h w, M_0. Of either image F_L (n c), M_1 to M_L (l n), and of the MPMs that prune, if any does,
        the NMI before the sigmoid (k n)."""
        levels, border = self.config.levels, self.config.border
        table0, map0 = Map.of(coarse0, levels, border, valid=valid0)
        table1, map1 = Map.of(coarse1, levels, border, valid=valid1)
        keep0, keep1 = keep0.flatten(), keep1.flatten()
        masks, estimates = [], []
        for mpm in self.mpms:
            table0, table1, keep0, keep1, nmi0, nmi1 = mpm(
                table0, table1, map0.kept(keep0, True), map1.kept(keep1, True), keep0, keep1
            )
            masks.append((keep0, keep1))
            if nmi0 is not None:
                estimates.append((nmi0, nmi1))
        told = [torch.stack(x) for some in (masks, estimates) for x in zip(*some, strict=True)]
        return table0, table1, *told


class Pair(nn.Module):
    """Two images -> matches: both halves in one."""

    def __init__(self, model: PRISM, dtype: torch.dtype, gather: bool = True, matches: int = 0):
        super().__init__()
        self.backbone, self.matcher = (
            Backbone(model, dtype),
            PairOfFeatures(model, dtype, gather, matches),
        )

    def forward(self, image0: Tensor, image1: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.matcher(*self.backbone(image0), *self.backbone(image1), threshold)


@dataclass(frozen=True)
class Selection:
    """The rows of a table that take part: gathered, or all of them under a mask."""

    rows: Tensor | None  # k, int64
    mask: Tensor | None  # n, float32: 0, or `MASKED`
    some: Tensor  # (), bool: whether there is any; if not, `rows` is the first alone

    @staticmethod
    def of(keep: Tensor, gather: bool) -> Selection:
        some = keep.any()
        if not gather:
            return Selection(None, (~keep).float() * MASKED, some)
        first = torch.arange(keep.shape[0], device=keep.device) == 0
        return Selection((keep | (first & ~some)).nonzero().squeeze(1), None, some)

    def take(self, x: Tensor) -> Tensor:
        return x if self.rows is None else x.index_select(0, self.rows)

    def put(self, x: Tensor, updated: Tensor) -> Tensor:
        if self.rows is None:
            assert self.mask is not None
            return torch.where(self.mask[:, None] == 0, updated, x)
        return x.index_put((self.rows,), updated)


@dataclass(frozen=True)
class Kept:
    """The cells of one image that take part in an MPM."""

    queries: Selection
    keys: list[Selection]  # of each level
    patches: list[Tensor]  # of each level n r*r: the rows of the table that its patches are made of
    centres: list[Tensor]  # of each level k 2, of those that take part


@dataclass(frozen=True)
class Map:
    """Where the cells of an image are in its table, row by row, padded on the right and at the bottom."""

    places: Tensor  # n 2, int64: the column and the row of each
    valid: Tensor  # n, bool: no padding
    inner: Tensor  # n, bool: away from the border
    spare: Tensor  # 1: a cell whose window is inside the fine map
    levels: tuple[int, ...]
    patches: list[Tensor]
    centres: list[Tensor]

    @staticmethod
    def of(
        coarse: Tensor,
        levels: tuple[int, ...],
        border: int,
        fixed: bool = False,
        valid: Tensor | None = None,
    ) -> tuple[Tensor, Map]:
        """coarse: h w c. Its table, n c, and the map. fixed: its size is numbers, not steps of the graph;
        valid: h w, bool, what is no padding, where it is padded already."""
        rows, columns = (int(n) if fixed else n for n in coarse.shape[:2])
        # Rounded up without negative numbers, of which ONNX has another idea of division.
        height, width = ((n + PADDED - 1) // PADDED * PADDED for n in (rows, columns))
        if fixed:  # joined, since the sizes of what `F.pad` gives are not told
            coarse = torch.cat([coarse, coarse.new_zeros(rows, width - columns, coarse.shape[2])], dim=1)
            coarse = torch.cat([coarse, coarse.new_zeros(height - rows, width, coarse.shape[2])], dim=0)
        else:
            coarse = F.pad(coarse, (0, 0, 0, width - columns, 0, height - rows))
        table = coarse.flatten(0, 1)
        device = coarse.device
        y, x = torch.arange(height, device=device)[:, None], torch.arange(width, device=device)
        if valid is None:
            valid = (y < rows) & (x < columns)
        scale = frame_scale(map_extent(valid[None]))
        patches, centres = [], []
        for r in levels:
            corner = (y[::r] * width + x[::r]).flatten()
            inside = torch.arange(r, device=device)
            patches.append(corner[:, None] + (inside[:, None] * width + inside).flatten())
            centres.append(cell_grid(height, width, r, device) * scale)
        inner = away_from_border(valid[None], border)[0]
        spare = torch.full((1,), border, dtype=torch.int64, device=device) * (width + 1)
        places = torch.stack([x.expand(height, -1), y.expand(-1, width)], dim=-1).flatten(0, 1)
        return table, Map(places, valid.flatten(), inner.flatten(), spare, levels, patches, centres)

    def centres_of(self, cells: Tensor) -> Tensor:
        """m 2: in pixels of the image."""
        return self.places[cells].float() * CELL + (CELL - 1) / 2

    def kept(self, keep: Tensor, gather: bool) -> Kept:
        queries, keys = Selection.of(keep, gather), []
        for n, patches in enumerate(self.patches):
            if n == 0 and len(self.levels) > 1:  # never pruned, so that the whole scene stays in sight
                keys.append(Selection.of(self.valid[patches[:, 0]], gather))
            else:
                keys.append(queries if self.levels[n] == 1 else Selection.of(keep[patches[:, 0]], gather))
        centres = [some.take(c) for some, c in zip(keys, self.centres, strict=True)]
        return Kept(queries, keys, self.patches, centres)


class OnnxMPM(nn.Module):
    def __init__(self, mpm: MPM, dtype: torch.dtype, fused: bool = False):
        super().__init__()
        self.theta_p = mpm.theta_p
        self.self_attention = OnnxSADPA(mpm.self_attention, dtype, fused)  # type: ignore[arg-type]
        self.cross_attention = OnnxSADPA(mpm.cross_attention, dtype, fused)  # type: ignore[arg-type]
        self.pruning = None if mpm.pruning is None else copied(mpm.pruning, dtype)

    def forward(
        self, table0: Tensor, table1: Tensor, kept0: Kept, kept1: Kept, keep0: Tensor, keep1: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """The tables, M_l and the NMI before the sigmoid (n), of either image."""
        table0 = self.self_attention(table0, table0, kept0, kept0)
        table1 = self.self_attention(table1, table1, kept1, kept1)
        table0, table1 = (
            self.cross_attention(table0, table1, kept0, kept1),
            self.cross_attention(table1, table0, kept1, kept0),
        )
        if self.pruning is None:
            return table0, table1, keep0, keep1, None, None
        (keep0, nmi0), (keep1, nmi1) = (
            self.prune(table0, kept0, keep0),
            self.prune(table1, kept1, keep1),
        )
        return table0, table1, keep0, keep1, nmi0, nmi1

    def prune(self, table: Tensor, kept: Kept, keep: Tensor) -> tuple[Tensor, Tensor]:
        tokens = kept.queries.take(table)
        nmi = self.pruning(tokens, tokens, None)  # type: ignore[misc]
        if kept.queries.rows is not None:
            nmi = torch.full_like(keep, MASKED, dtype=torch.float32).index_put((kept.queries.rows,), nmi)
        return remaining(keep, nmi, self.theta_p, None), nmi


class OnnxSADPA(nn.Module):
    def __init__(self, layer: SADPA, dtype: torch.dtype, fused: bool = False):
        """fused: attention is one step, which onnxruntime alone knows, and which holds no matrix whole."""
        super().__init__()
        self.heads, self.dtype, self.fused = layer.heads, dtype, fused
        self.query, self.ffn = copied(layer.query, dtype), copied(layer.ffn, dtype)
        self.convs = nn.ModuleList([copied(conv, dtype) for conv in layer.convs])
        self.b = None if layer.rotary is None else nn.Parameter(layer.rotary.b.detach().float())

    def forward(self, table: Tensor, other: Tensor, source: Kept, target: Kept) -> Tensor:
        """The table with the rows that take part updated."""
        tokens = source.queries.take(table)
        query = self.turn(self.split(self.query(tokens)), source.centres[-1])
        messages = []
        for conv, keys, patches, centres in zip(
            self.convs, target.keys, target.patches, target.centres, strict=True
        ):
            seen = other[keys.take(patches)].flatten(1)
            value = self.split(conv(seen)) * keys.some.to(self.dtype)  # no key at all gives zeros
            key = self.turn(value, centres)
            if self.fused:
                flat = (x.flatten(1)[None] for x in (query, key, value))
                message = FusedAttention.apply(*flat, self.heads)[0]
            else:
                q, k, v = (x.transpose(0, 1) for x in (query, key, value))
                message = attention(q, k, v, keys.mask).transpose(0, 1).flatten(1)
            messages.append(message)
        updated = tokens + self.ffn(torch.cat([tokens, *messages], dim=-1))
        return source.queries.put(table, updated)

    def split(self, x: Tensor) -> Tensor:
        """k (h d) -> k h d."""
        return x.unflatten(-1, (self.heads, -1))

    def turn(self, x: Tensor, centres: Tensor) -> Tensor:
        return x if self.b is None else turn(x, self.b, centres[:, None, None])


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """... n d, ... m d, ... m d -> ... n d; mask: m, added."""
    score = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
    if mask is not None:
        score = score + mask.to(score.dtype)
    return score.softmax(dim=-1) @ value


class FusedAttention(torch.autograd.Function):
    """The same of 1 n (h d), 1 m (h d) and 1 m (h d), in one step."""

    @staticmethod
    def forward(_: Any, query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key, value))
        return attention(q, k, v).transpose(1, 2).flatten(2)

    @staticmethod
    def symbolic(graph: Any, query: Any, key: Any, value: Any, heads: int) -> Any:
        made = graph.op("com.microsoft::MultiHeadAttention", query, key, value, num_heads_i=heads)
        return made.setType(query.type())


class OnnxRefinement(nn.Module):
    """`FastRefinement` of one pair."""

    def __init__(self, model: PRISM, dtype: torch.dtype):
        super().__init__()
        fast = FastRefinement(model.refinement, dtype, nn.Module.to)
        self.window, self.heads = fast.window, fast.heads
        self.of_window, self.of_cell = fast.of_window, fast.of_cell
        self.to_heads, self.ffns = (nn.ModuleList(x) for x in zip(*fast.layers, strict=True))
        # Zeros beyond the fine map, for windows that may leave it where an image ends within a cell.
        self.beyond = max(0, self.window // 2 - FINE_PER_CELL * model.config.border + FINE_PER_CELL // 2)

    def forward(
        self,
        fine0: Tensor,
        fine1: Tensor,
        table0: Tensor,
        table1: Tensor,
        cell0: Tensor,
        cell1: Tensor,
        map0: Map,
        map1: Map,
    ) -> Tensor:
        """m 2: the offset in image B."""
        middle = self.window**2 // 2
        first = self.windows(fine0, table0, cell0, map0)
        second = self.windows(fine1, table1, cell1, map1)
        first, second = self.attend(0, first, first), self.attend(0, second, second)
        # The heat map asks for nothing of the first window but its middle.
        point = self.attend(1, first[:, middle : middle + 1], second).float()
        second = self.attend(1, second, first).float()
        score = (point * second).sum(dim=-1) * point.shape[-1] ** -0.5
        return expectation(score.log_softmax(dim=1).unflatten(1, (self.window, self.window)))[0]

    def windows(self, fine: Tensor, table: Tensor, cell: Tensor, where: Map) -> Tensor:
        """m w*w c: the fine features around the centres of cells, told what the cells know."""
        fine = F.pad(fine, (0, self.beyond, 0, self.beyond)) if self.beyond else fine
        wide = fine.shape[2]
        reach = torch.arange(self.window, device=fine.device) + FINE_PER_CELL // 2 - self.window // 2
        column, row = (where.places[cell] * FINE_PER_CELL).unbind(1)
        corner = row * wide + column
        at = corner[:, None] + (reach[:, None] * wide + reach).flatten()
        seen = fine.flatten(1)[:, at].permute(1, 2, 0)
        return self.of_window(seen) + self.of_cell(table[cell])[:, None]

    def attend(self, layer: int, x: Tensor, other: Tensor) -> Tensor:
        query, value = self.to_heads[layer](x), self.to_heads[layer](other)
        query, value = self.split(query.chunk(2, dim=-1)[0]), self.split(value.chunk(2, dim=-1)[1])
        message = attention(query, value, value).transpose(1, 2).flatten(2)
        return x + self.ffns[layer](torch.cat([x, message], dim=-1))

    def split(self, x: Tensor) -> Tensor:
        """m k (h d) -> m h k d."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Polish(nn.Module):
    """Matches in pixels of the size that was matched -> both keypoints, exact: one pass of
    `PairMatcher._polish`.

    image0, image1: 1 1 h w, float32 in [0, 1], as large as there are; matched0: 1 1 h w, image 0 as it was
    matched; scale0, scale1: 2, how many pixels of the large ones are one of the size that was matched, along
    x and y; pixel: (), how many pixels of the images are one of a window; rounds: (), int64: 3 the first
    time, when keypoints0 are moved to the corners of their cells, then 2."""

    def __init__(self, network: Subpixel):
        super().__init__()
        self.network = network

    def forward(
        self,
        image0: Tensor,
        image1: Tensor,
        matched0: Tensor,
        keypoints0: Tensor,
        keypoints1: Tensor,
        scale0: Tensor,
        scale1: Tensor,
        pixel: Tensor,
        rounds: Tensor,
    ) -> tuple[Tensor, Tensor]:
        # Points far away, so that each has neighbours enough to ask for.
        far = -1e6 - 1e3 * torch.arange(FEWEST, device=keypoints0.device)[:, None].expand(-1, 2)
        at0, at1 = (torch.cat([x, far]) for x in (keypoints0, keypoints1))
        distance = (at0[:, None] - at0).square().sum(dim=2).sqrt() + handicap(at0)
        near = distance.topk(FEWEST, dim=1, largest=False).indices[:, 1:]
        stretch, misfit = fitted_affine(at0[near] - at0[:, None], at1[near] - at1[:, None], REWEIGHED)
        few = torch._shape_as_tensor(at0)[0] < 2 * FEWEST
        stretch = torch.where(few, torch.eye(2, device=at0.device), stretch)
        misfit = torch.where(few, torch.inf, misfit)
        corner0, corner1 = to_corners(corners(matched0[0, 0]), at0, at1, stretch, misfit)
        first = rounds == FIRST_ROUNDS
        moved0, moved1 = torch.where(first, corner0, at0), torch.where(first, corner1, at1)
        at0, at1 = (moved0 + 0.5) * scale0 - 0.5, (moved1 + 0.5) * scale1 - 0.5
        stretch = stretch * (scale1[:, None] / scale0)
        pyramids = pyramid(image0[0]), pyramid(image1[0])
        found = [p for p, _ in approach(self.network, *pyramids, at0, at1, stretch, FIRST_ROUNDS, 0, pixel)]  # type: ignore[arg-type]
        at1 = torch.where(first, found[-1], found[MORE_ROUNDS - 1])
        return moved0[:-FEWEST], ((at1 + 0.5) / scale1 - 0.5)[:-FEWEST]


def pyramid(gray: Tensor) -> Pyramid:
    """gray: 1 h w, of any size, which a graph tells at run time."""
    maps = [gray[0]]
    for _ in range(LEVELS + halvings(MOST_ZOOM) - 1):
        x = maps[-1]
        for dim in (0, 1):  # the border once more, and of these as many as are even
            x = torch.cat([x, x.narrow(dim, -1, 1)], dim)
            x = x.narrow(dim, 0, x.shape[dim] // 2 * 2)
        maps.append(F.avg_pool2d(x[None, None], 2)[0, 0])
    sizes = torch.stack([torch._shape_as_tensor(m) for m in maps])  # levels 2: height, width
    area = sizes[:, 0] * sizes[:, 1]
    table = torch.cat([(area.cumsum(0) - area)[:, None], sizes.flip(1)], dim=1)
    return Pyramid(1.0, table, torch.cat([m.flatten() for m in maps])[None])


def copied(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    return copy.deepcopy(layer).to(dtype).requires_grad_(False)
