"""The same model as `prism.py`, arranged for matching alone. Tests hold both to the same matches.

- The kept cells of all images of a batch lie one after the other in one table, so that an MPM is a few large
  operations, nothing is padded, and the host waits for the device once in each (`packing.py`); on a GPU what
  lies between two waits is recorded (`recorder.py`).
- Batch norms are part of the convolutions, and weights have the precision they are used in; the first
  convolution, positions, NMI, similarity and heat maps stay in float32.
- The backbone sees images without padding: a convolution reads zeros beyond the border, which is what
  `prism.py` takes care that padding looks like.
- Of the windows of a match, only what its heat map needs is computed.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel
from torch.nn.utils.fusion import fuse_conv_bn_eval

from prism_match.config import ModelConfig
from prism_match.model import products
from prism_match.model.ablations import absolute_encoding
from prism_match.model.attention import SADPA
from prism_match.model.backbone import ConvNorm, ResidualBlock, ResNetFPN, Smooth
from prism_match.model.kernels import (
    attend_segments,
    attend_windows,
    attends_segments,
    best_partners,
    convolve,
    convolve_to,
    feed_forward,
    finds_partners,
    in_pieces,
    rotate,
)
from prism_match.model.matching import away_from_border, mutual_partners, similarity_scale
from prism_match.model.mpm import MPM, LayerState
from prism_match.model.packing import Kept, Layout, Room, Shape, numbers_of, spared
from prism_match.model.position import frame_scale
from prism_match.model.prism import (
    ATTENTION_KERNELS,
    CELL,
    PRISM,
    STRIDE,
    Features,
    PairMatches,
    cell_centre,
    to_gray,
)
from prism_match.model.processor import cpu_has_bf16
from prism_match.model.pruning import remaining
from prism_match.model.recorder import Recorder, round_count
from prism_match.model.refinement import FINE_PER_CELL, Refinement, expectation
from prism_match.model.tokens import map_extent
from prism_match.model.winograd import use_winograd
from prism_match.stages import stage

SLOPE = 0.01  # of `F.leaky_relu`
RECORDED = 2**20  # pixels of images that the backbone sees together: more keep a GPU busy as they are
# Matches whose windows are cut and refined together; on a CPU so few that its caches hold what they need.
CUT_AT_ONCE, REFINED_AT_ONCE, REFINED_ON_CPU = 8192, 2048, 128
LAYOUT_CELLS = 2**20  # of the maps seen last, whose tables are kept: about 64 MiB


def is_supported(config: ModelConfig) -> bool:
    """Whether there is a fast way: not for ablations that put something else in the place of a part, nor for
    windows that may leave the map."""
    inside = config.window // 2 <= FINE_PER_CELL * config.border + 1
    return config.attention == "sadpa" and config.estimator == "nmi" and inside


def arranged(model: PRISM, dtype: torch.dtype, recorder: Recorder) -> FastPRISM | AutocastPRISM:
    """The model for matching in that precision."""
    return FastPRISM(model, dtype, recorder) if is_supported(model.config) else AutocastPRISM(model, dtype)


class AutocastPRISM:
    """The model as it is, for settings that have no fast way."""

    def __init__(self, model: PRISM, dtype: torch.dtype):
        self.model, self.config, self.dtype = model, model.config, dtype

    def extract(self, image: Tensor) -> Features:
        with torch.autocast(image.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self.model.extract(image)

    def match(self, a: Features, b: Features, *options: Any) -> PairMatches:
        with torch.autocast(a.coarse.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self.model.match(a, b, *options)


class FastPRISM:
    """Takes and gives what `PRISM.extract` and `PRISM.match` do, but for masks of padding."""

    def __init__(self, model: PRISM, dtype: torch.dtype, recorder: Recorder | None = None):
        self.config, self.dtype = model.config, dtype
        self.recorder = recorder or Recorder()
        seen_in = backbone_dtype(next(model.parameters()).device, dtype)
        self.backbone = fused(model.backbone, seen_in)
        if seen_in == torch.float32:
            use_winograd(self.backbone)
        self.mpms = [FastMPM(mpm, dtype) for mpm in model.mpms]  # type: ignore[arg-type]
        self.refinement = FastRefinement(model.refinement, dtype)
        self.layouts: OrderedDict[tuple, Layout] = OrderedDict()
        self.lock = Lock()

    def extract(self, image: Tensor) -> Features:
        """image: b 1|3 h w in [0, 1], any size, without padding."""
        with stage("backbone"):
            small = image.numel() <= RECORDED * image.shape[1]
            return Features(*(self.recorder("backbone", self.seen, image) if small else self.seen(image)))

    def seen(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What `Features` holds."""
        gray = to_gray(image)
        coarse, fine = (x.permute(0, 2, 3, 1) for x in self.backbone(gray))
        if coarse.dtype != self.dtype:
            coarse, fine = coarse.to(self.dtype), fine.to(self.dtype)
        rows, columns = (-(-n // STRIDE) * STRIDE // CELL for n in gray.shape[-2:])
        valid = torch.zeros((len(gray), rows, columns), dtype=torch.bool, device=gray.device)
        valid[:, : coarse.shape[1], : coarse.shape[2]] = True
        if self.config.position == "absolute":
            _, height, width, dim = coarse.shape
            coarse = coarse + absolute_encoding(dim, height, width, coarse.device).to(coarse.dtype)
        fine = enlarged(fine, rows * FINE_PER_CELL, columns * FINE_PER_CELL)
        return enlarged(coarse, rows, columns), fine.permute(0, 3, 1, 2), valid

    def match(
        self,
        a: Features,
        b: Features,
        keep0: Tensor | None = None,
        keep1: Tensor | None = None,
        theta_c: float | None = None,
    ) -> PairMatches:
        """As `PRISM.match`; only the features of the last layer are kept."""
        layout = self.layout(a, b)
        with sdpa_kernel(ATTENTION_KERNELS):
            with stage("MPMs"):
                masks = (a.looked_at(keep0), b.looked_at(keep1))
                table, keep, logit, inner, ends, layers = self.transform(layout, a, b, masks)
            with stage("matching"):
                cells, confidence, pair = self.coarse_matches(
                    layout, table, keep, logit, inner, ends, theta_c
                )
            with stage("refinement"):
                at_once = REFINED_ON_CPU if cells.device.type == "cpu" else CUT_AT_ONCE
                parts = [self.refined(a, b, table, layout, x) for x in cells.split(at_once, dim=1)]
                keypoints0, keypoints1, std = (torch.cat(x) for x in zip(*parts, strict=True))
        return PairMatches(pair, keypoints0, keypoints1, confidence, std, tuple(layers))

    def transform(
        self, layout: Layout, a: Features, b: Features, masks: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, list[LayerState]]:
        """The L MPMs. masks: M_0, b h w each. The table; M_L, the NMI before the sigmoid and which cells are
        away from the border, each n; how many patches are kept up to the end of each image; all states."""
        begin = partial(self.begin, layout)
        table, keep, inner, coarsest, ends, *centres = self.recorder(
            ("begin", layout.shapes), begin, a.coarse, b.coarse, a.valid, b.valid, *masks
        )
        layers, logit = [], None
        for n, mpm in enumerate(self.mpms):
            room = self.room(layout, ends, untouched=n == 0)
            table, keep, logit, ends = self.recorder(
                (n, layout.shapes, room), partial(mpm, layout, room), table, keep, coarsest, *centres
            )
            layers.append(layout.state(table, keep, logit))
        return table, keep, logit, inner, ends, layers

    def refined(
        self, a: Features, b: Features, table: Tensor, layout: Layout, cells: Tensor
    ) -> tuple[Tensor, ...]:
        """M_f of M_c (2 m, rows of the table): keypoints0 and keypoints1, m 2 each, and deviations, m."""
        count = cells.shape[1]
        if count == 0:
            return tuple(torch.zeros(shape, device=cells.device) for shape in ((0, 2), (0, 2), 0))
        # A number that is seen often, so that it can be recorded.
        some = torch.arange(round_count(count, cells.device), device=cells.device)
        cells = cells[:, some.clamp(max=count - 1)]
        places = [cells[0], cells[1] - layout.second]
        windows = [
            self.refinement.cut(fine, place, shape)
            for fine, place, shape in zip((a.fine, b.fine), places, layout.shapes, strict=True)
        ]
        pieces = zip(*(x.split(REFINED_AT_ONCE) for x in (cells.mT, *windows, *places)), strict=True)
        name, located = ("refinement", layout.shapes), partial(self.located, layout)
        parts = [
            self.recorder(name, located, window0, window1, table[piece.mT.flatten()], *of_piece)
            for piece, window0, window1, *of_piece in pieces
        ]
        return tuple(torch.cat(x)[:count] for x in zip(*parts, strict=True))

    def located(
        self, layout: Layout, window0: Tensor, window1: Tensor, coarse: Tensor, *places: Tensor
    ) -> tuple[Tensor, ...]:
        offset, std = expectation(self.refinement(window0, window1, coarse))
        centres = [
            cell_centre(place % (height * width), width)
            for place, (_, height, width) in zip(places, layout.shapes, strict=True)
        ]
        return centres[0], centres[1] + offset, std

    def begin(
        self, layout: Layout, coarse0: Tensor, coarse1: Tensor, valid0: Tensor, valid1: Tensor, *masks: Tensor
    ) -> tuple[Tensor, ...]:
        """The table and M_0, each n; which cells are away from the border (n) and which patches of the first
        level image; how many patches there are; and the centres of those of each level."""
        table = spared(torch.cat([coarse0.flatten(0, 2), coarse1.flatten(0, 2)]).to(self.dtype))
        keep = torch.cat([mask.flatten() for mask in masks])
        valid = valid0, valid1
        inner = torch.cat([away_from_border(v, self.config.border).flatten() for v in valid])
        coarsest = torch.cat([v.flatten() for v in valid])[layout.patches[0][:-1, 0]]
        scale = torch.cat([frame_scale(map_extent(v)) for v in valid])
        centres = [c * scale[i][:, None] for c, i in zip(layout.centres, layout.image, strict=True)]
        ends = torch.cat(Kept.of(layout, keep, coarsest).ends)
        return table, keep, inner, coarsest, ends, *centres

    def room(self, layout: Layout, ends: Tensor, untouched: bool) -> Room:
        """For the next MPM. The host waits here, unless nothing has been pruned and it need not know."""
        dim = self.config.coarse_dim // self.config.heads
        if not (self.recorder.enabled and attends_segments(ends.device, self.dtype, dim)):
            return Room.exact(layout.lengths(ends.tolist()))
        return Room.full(layout) if untouched else Room.ample(layout, layout.lengths(ends.tolist()))

    def coarse_matches(
        self,
        layout: Layout,
        table: Tensor,
        keep: Tensor,
        logit: Tensor | None,
        inner: Tensor,
        ends: Tensor,
        theta_c: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """M_c: the cells of each match, as rows of the table (2 m), its confidence (m) and its pair (m)."""
        theta_c = self.config.theta_c if theta_c is None else theta_c
        weights = [logit] if self.config.weighted_softmax and logit is not None else []
        if finds_partners(table.device, table.dtype, table.shape[1]):
            matched = partial(self.matched, layout, theta_c)
            name = ("matching", layout.shapes, theta_c)
            cells, confidence, pair, counted = self.recorder(
                name, matched, table, keep, inner, ends, *weights
            )
            count = int(counted)  # the host waits here
            return cells[:, :count], confidence[:count], pair[:count]
        lengths = layout.lengths(ends.tolist())[-1]
        rows = numbers_of(keep, keep.cumsum(0), sum(lengths))
        log_nmi: Sequence[Tensor | None] = [None] * len(lengths)
        if weights:
            log_nmi = F.logsigmoid(weights[0][rows]).split(lengths)
        tokens, each = table[rows].split(lengths), rows.split(lengths)
        parts, pairs = [], len(lengths) // 2
        for k in range(pairs):
            partner, confidence = mutual_partners(
                tokens[k], tokens[pairs + k], log_nmi[k], log_nmi[pairs + k], self.config.temperature
            )
            cells = torch.stack([each[k], each[pairs + k][partner]]) if len(partner) else rows.new_empty(2, 0)
            good = (confidence > theta_c) & inner[cells].all(dim=0)
            chosen = good.nonzero().squeeze(1)
            parts.append((cells[:, chosen], confidence[chosen], torch.full_like(chosen, k)))
        cells, confidence, pair = (torch.cat(x, dim=-1) for x in zip(*parts, strict=True))
        return cells, confidence, pair

    def matched(
        self,
        layout: Layout,
        theta_c: float,
        table: Tensor,
        keep: Tensor,
        inner: Tensor,
        ends: Tensor,
        *logit: Tensor,
    ) -> tuple[Tensor, ...]:
        """What `coarse_matches` gives, with room for as many matches as there are cells, and how many there
        are: nothing of it has to be known by the host."""
        rows = numbers_of(keep, keep.cumsum(0), len(keep))
        there = rows.clamp(max=len(keep) - 1)  # those that are spare are read, and not used
        bonus = F.logsigmoid(logit[0][there]) if logit else torch.zeros(len(rows), device=rows.device)
        ends = ends[-len(layout.ends[-1]) :]  # those of the cells
        most = max(height * width for _, height, width in layout.shapes)
        scale = similarity_scale(table, self.config.temperature) ** 2
        best, partner = best_partners(table[rows], bonus, ends, most, scale)
        position = torch.arange(len(rows), device=rows.device)
        confidence = best.exp()
        good = (position < ends[len(ends) // 2 - 1]) & (partner[partner] == position) & (confidence > theta_c)
        cells = torch.stack([there, there[partner]])
        good = good & inner[cells].all(dim=0)
        counted = good.cumsum(0)
        chosen = numbers_of(good, counted, len(good)).clamp(max=len(good) - 1)
        cells = cells[:, chosen]
        return cells, confidence[chosen], layout.image[-1][cells[0]], counted[-1:]

    def layout(self, a: Features, b: Features) -> Layout:
        """From those seen before where possible."""
        shapes = (tuple(a.valid.shape), tuple(b.valid.shape))
        key = (*shapes, a.valid.device)
        with self.lock:  # several threads may match at once
            layout = self.layouts.pop(key, None)
            if layout is None:
                layout = Layout.of(*shapes, self.config.levels, a.valid.device)  # type: ignore[arg-type]
            self.layouts[key] = layout
            while len(self.layouts) > 1 and sum(x.cells for x in self.layouts.values()) > LAYOUT_CELLS:
                self.layouts.popitem(last=False)
        return layout


class FastMPM:
    def __init__(self, mpm: MPM, dtype: torch.dtype):
        self.theta_p = mpm.theta_p
        self.self_attention = FastSADPA(mpm.self_attention, dtype)  # type: ignore[arg-type]
        self.cross_attention = FastSADPA(mpm.cross_attention, dtype)  # type: ignore[arg-type]
        self.pruning = None if mpm.pruning is None else quick(copy.deepcopy(mpm.pruning), dtype)

    def __call__(
        self, layout: Layout, room: Room, table: Tensor, keep: Tensor, coarsest: Tensor, *centres: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """table: n + 1, c, changed in place; keep: n. Returns both after this MPM, the NMI before the sigmoid
        (n) and how many patches are kept then."""
        kept = Kept.of(layout, keep, coarsest)
        rows = [kept.rows(level, count) for level, count in enumerate(room.rows)]
        taken = Taken(layout, room, rows, kept.ends, centres)
        self.self_attention(table, taken, cross=False)
        tokens = self.cross_attention(table, taken, cross=True)
        pruning = self.pruning
        if pruning is None:
            return table, keep, None, torch.cat(kept.ends)
        nmi = in_pieces(lambda x: pruning(x, x, None), tokens)
        nowhere = torch.full((len(table),), -torch.inf, device=table.device)
        logit = nowhere.index_copy_(0, rows[-1], nmi)[:-1]
        keep = remaining(keep, logit, self.theta_p, None)
        return table, keep, logit, torch.cat(Kept.of(layout, keep, coarsest).ends)


@dataclass(frozen=True)
class Taken:
    """The patches that take part in an MPM."""

    layout: Layout
    room: Room
    rows: list[Tensor]  # of each level: their numbers; of the last one, rows of the table
    ends: list[Tensor]  # of each level: where each image ends in them
    centres: Sequence[Tensor]  # of each level n 2, in the frame of `normalised_centres`


class FastSADPA:
    def __init__(self, layer: SADPA, dtype: torch.dtype):
        self.heads = layer.heads
        self.convs = [quick(copy.deepcopy(conv), dtype) for conv in list(layer.convs)[:-1]]
        # The last level has patches of one cell: keys and queries of the same tokens, in one product.
        self.query_and_value = quick(joined(layer.query, layer.convs[-1]), dtype)  # type: ignore[arg-type]
        self.b = None if layer.rotary is None else layer.rotary.b.detach().float()
        self.ffn = quick(copy.deepcopy(layer.ffn), dtype)

    def __call__(self, table: Tensor, taken: Taken, cross: bool) -> Tensor:
        """Updates the rows of the table that take part, which are returned too."""
        tokens = table[taken.rows[-1]]
        query, value = (
            x.unflatten(-1, (self.heads, -1))
            for x in in_pieces(self.query_and_value, tokens).chunk(2, dim=-1)
        )
        query = self.turn(query, taken, -1)
        messages = []
        for level, patches in enumerate(taken.layout.patches):
            if level < len(self.convs):
                seen = table[patches[taken.rows[level]]].flatten(1)
                value_of_level = in_pieces(self.convs[level], seen).unflatten(-1, (self.heads, -1))
            else:
                value_of_level = value
            key = self.turn(value_of_level, taken, level)
            lengths = taken.room.lengths
            message = attend_segments(
                query, key, value_of_level, taken.ends[-1], taken.ends[level], cross, taken.room.most,
                None if lengths is None else (lengths[-1], lengths[level]),
            )  # fmt: skip
            messages.append(message.flatten(1))
        seen = torch.cat([tokens, *messages], dim=-1)
        updated = tokens + in_pieces(partial(feed_forward, self.ffn), seen)
        table.index_copy_(0, taken.rows[-1], updated)
        return updated

    def turn(self, x: Tensor, taken: Taken, level: int) -> Tensor:
        return x if self.b is None else rotate(x, taken.centres[level], taken.rows[level], self.b)


class FastRefinement:
    def __init__(
        self,
        layer: Refinement,
        dtype: torch.dtype,
        ready: Callable[[nn.Module, torch.dtype], Any] | None = None,
    ):
        """ready: how layers are brought into that precision; None: as this machine is quick in."""
        ready = ready or quick
        self.window, self.heads, self.heat = layer.window, layer.self_attention.heads, layer.heat
        dim = layer.merge.out_features
        # merge([window, to_fine(coarse)]) is a product with the window and one with the cell.
        of_window, of_cell = layer.merge.weight.split(dim, dim=1)
        self.of_window = ready(linear(of_window, None), dtype)
        bias = of_cell @ layer.coarse_to_fine.bias + layer.merge.bias
        self.of_cell = ready(linear(of_cell @ layer.coarse_to_fine.weight, bias), dtype)
        self.layers = [
            (ready(joined(x.query, x.convs[0]), dtype), ready(copy.deepcopy(x.ffn), dtype))  # type: ignore[arg-type]
            for x in (layer.self_attention, layer.cross_attention)
        ]

    def __call__(self, window0: Tensor, window1: Tensor, coarse: Tensor) -> Tensor:
        """windows: m w*w c of either image, from `cut`; coarse: 2m c, of their cells. The logarithms of the
        heat maps: m w w."""
        middle = self.window**2 // 2
        both = self.of_window(torch.cat([window0, window1])) + self.of_cell(coarse)[:, None]  # 2m w*w c
        (to_heads, ffn), (to_heads1, ffn1) = self.layers
        query, value = self.split(to_heads(both))
        both = both + feed_forward(ffn, torch.cat([both, attend_windows(query, value).flatten(2)], dim=-1))
        query, value = self.split(to_heads1(both))
        (first, second), (query0, query1), (value0, value1) = (
            x.tensor_split(2) for x in (both, query, value)
        )
        message = attend_windows(query1, value0).flatten(2)
        second = second + feed_forward(ffn1, torch.cat([second, message], dim=-1))
        # The heat map asks for nothing of the first window but its middle.
        first, query0 = first[:, middle : middle + 1], query0[:, middle : middle + 1]
        message = attend_windows(query0, value1).flatten(2)
        first = first + feed_forward(ffn1, torch.cat([first, message], dim=-1))
        return self.heat(first[:, 0], second.unflatten(1, (self.window, self.window)))

    def cut(self, fine: Tensor, place: Tensor, shape: Shape) -> Tensor:
        """m w*w c: the fine features around the centres of cells. fine: b c h w; place: m, of the cells of
        all images, none of them at the border."""
        _, height, width = shape
        image, cell = place // (height * width), place % (height * width)
        reach = torch.arange(self.window, device=fine.device) + FINE_PER_CELL // 2 - self.window // 2
        columns = width * FINE_PER_CELL
        corner = (image * height + cell // width) * (FINE_PER_CELL * columns) + cell % width * FINE_PER_CELL
        rows = corner[:, None] + (reach[:, None] * columns + reach).flatten()
        return fine.permute(0, 2, 3, 1).reshape(-1, fine.shape[1])[rows]

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        query, value = (t.unflatten(-1, (self.heads, -1)) for t in x.chunk(2, dim=-1))
        return query, value


class ExactStem(nn.Module):
    """The first convolution, which sees the image itself, in float32. bf16 has fewer digits than a photo has
    shades of gray, and where these change slowly a match would move by a tenth of a pixel; maps of many
    channels bear it."""

    def __init__(self, conv: nn.Conv2d, dtype: torch.dtype):
        super().__init__()
        self.conv, self.dtype = conv, dtype

    def forward(self, image: Tensor) -> Tensor:
        return convolve_to(self.dtype, image, self.conv)


class FusedBlock(nn.Module):
    """A `ResidualBlock` of an image without padding: what is added to a map and its ReLU are one pass."""

    def __init__(self, block: ResidualBlock):
        super().__init__()
        self.conv1, self.conv2, self.shortcut = block.conv1, block.conv2, block.shortcut
        if isinstance(self.shortcut, nn.Conv2d):  # both biases are added to the same map
            self.conv2.bias.data += self.shortcut.bias.data  # type: ignore[union-attr,operator]
            self.shortcut.bias = None

    def forward(self, x: Tensor, _valid: None) -> Tensor:
        return convolve(convolve(x, self.conv1), self.conv2, self.shortcut(x))  # type: ignore[arg-type]


class FusedSmooth(nn.Module):
    """A `Smooth` of an image without padding."""

    def __init__(self, layer: Smooth):
        super().__init__()
        self.conv1, self.conv2 = layer.conv1, layer.conv2

    def forward(self, x: Tensor, _valid: None) -> Tensor:
        return self.conv2(convolve(x, self.conv1, slope=SLOPE))  # type: ignore[arg-type]


def fused(backbone: ResNetFPN, dtype: torch.dtype) -> ResNetFPN:
    """A copy for images without padding, whose batch norms are part of the convolutions before them."""
    backbone = copy.deepcopy(backbone).eval()
    makers: dict[type, Callable[..., nn.Module]] = {
        ConvNorm: one_convolution,  # first, so that the others find convolutions
        ResidualBlock: FusedBlock,
        Smooth: FusedSmooth,
    }
    for kind, make in makers.items():
        for parent in list(backbone.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, kind):
                    setattr(parent, name, make(child))
    backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    stem = copy.deepcopy(backbone.stem)
    backbone.to(dtype)
    if dtype != torch.float32:
        backbone.stem = ExactStem(stem, dtype)  # type: ignore[arg-type,assignment]
    return backbone


def backbone_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """What the backbone of a model of that precision computes in: its own, but for a CPU that has no
    instructions for bf16, whose convolutions would take several times as long."""
    slow = device.type == "cpu" and dtype == torch.bfloat16 and cpu_has_bf16() is False
    return torch.float32 if slow else dtype


def one_convolution(layer: ConvNorm) -> nn.Module:
    return fuse_conv_bn_eval(layer[0], layer[1])  # type: ignore[arg-type,type-var]


def quick(module: nn.Module, dtype: torch.dtype) -> Any:
    """In that precision, with linear layers as the machine is quick in."""
    module = module.to(dtype)
    device = next(module.parameters()).device
    return products.with_pointwise(module) if products.is_worth_it(device, dtype) else module


def joined(first: nn.Linear, second: nn.Linear) -> nn.Linear:
    """Both of the same input, in one product."""
    return linear(torch.cat([first.weight, second.weight]), torch.cat([first.bias, second.bias]))


@torch.no_grad()
def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device=weight.device)
    layer.weight.copy_(weight)
    if bias is not None:
        layer.bias.copy_(bias)
    return layer.requires_grad_(False)


def enlarged(x: Tensor, height: int, width: int) -> Tensor:
    """b h w c with zeros added on the right and at the bottom."""
    if x.shape[1:3] == (height, width):
        return x
    larger = x.new_zeros(x.shape[0], height, width, x.shape[3])
    larger[:, : x.shape[1], : x.shape[2]] = x
    return larger
