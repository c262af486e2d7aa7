"""The same model as `prism.py`, arranged for matching alone. Tests hold both to the same matches.

- The kept cells of all images of a batch lie one after the other in one table, so that an MPM is a few large
  operations, nothing is padded, and the host waits for the device once in each (`Packed`).
- Batch norms are part of the convolutions, and weights have the precision they are used in; positions, NMI,
  similarity and heat maps stay in float32.
- The backbone sees images without padding: a convolution reads zeros beyond the border, which is what
  `prism.py` takes care that padding looks like.
- Of the windows of a match, only what its heat map needs is computed.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel
from torch.nn.utils.fusion import fuse_conv_bn_eval

from prism_match.config import ModelConfig
from prism_match.model.ablations import absolute_encoding
from prism_match.model.attention import SADPA
from prism_match.model.backbone import ConvNorm, ResidualBlock, ResNetFPN, Smooth
from prism_match.model.kernels import attend_segments, attend_windows, convolve, rotate
from prism_match.model.matching import away_from_border, mutual_matches
from prism_match.model.mpm import MPM, LayerState
from prism_match.model.position import cell_grid, frame_scale
from prism_match.model.prism import (
    ATTENTION_KERNELS,
    CELL,
    PRISM,
    REFINED_AT_ONCE,
    STRIDE,
    Features,
    PairMatches,
    cell_centre,
    to_gray,
)
from prism_match.model.pruning import remaining
from prism_match.model.refinement import FINE_PER_CELL, Refinement, expectation
from prism_match.model.tokens import map_extent
from prism_match.stages import stage

SLOPE = 0.01  # of `F.leaky_relu`
LAYOUT_CELLS = 2**20  # of the maps seen last, whose tables are kept: about 64 MiB


def is_supported(config: ModelConfig) -> bool:
    """Whether there is a fast way: not for ablations that put something else in the place of a part, nor for
    windows that may leave the map."""
    inside = config.window // 2 <= FINE_PER_CELL * config.border + 1
    return config.attention == "sadpa" and config.estimator == "nmi" and inside


def arranged(model: PRISM, dtype: torch.dtype) -> FastPRISM | AutocastPRISM:
    """The model for matching in that precision."""
    return FastPRISM(model, dtype) if is_supported(model.config) else AutocastPRISM(model, dtype)


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

    def __init__(self, model: PRISM, dtype: torch.dtype):
        self.config, self.dtype = model.config, dtype
        self.backbone = fused(model.backbone, dtype)
        self.mpms = [FastMPM(mpm, dtype) for mpm in model.mpms]  # type: ignore[arg-type]
        self.refinement = FastRefinement(model.refinement, dtype)
        self.layouts: OrderedDict[tuple, Layout] = OrderedDict()
        self.lock = Lock()

    def extract(self, image: Tensor) -> Features:
        """image: b 1|3 h w in [0, 1], any size, without padding."""
        gray = to_gray(image).to(self.dtype)
        with stage("backbone"):
            coarse, fine = (x.permute(0, 2, 3, 1) for x in self.backbone(gray))
        rows, columns = (-(-n // STRIDE) * STRIDE // CELL for n in gray.shape[-2:])
        valid = torch.zeros((len(gray), rows, columns), dtype=torch.bool, device=gray.device)
        valid[:, : coarse.shape[1], : coarse.shape[2]] = True
        if self.config.position == "absolute":
            _, height, width, dim = coarse.shape
            coarse = coarse + absolute_encoding(dim, height, width, coarse.device).to(coarse.dtype)
        fine = enlarged(fine, rows * FINE_PER_CELL, columns * FINE_PER_CELL)
        return Features(enlarged(coarse, rows, columns), fine.permute(0, 3, 1, 2), valid)

    def match(
        self,
        a: Features,
        b: Features,
        keep0: Tensor | None = None,
        keep1: Tensor | None = None,
        theta_c: float | None = None,
    ) -> PairMatches:
        """As `PRISM.match`; only the features of the last layer are kept."""
        mask0, mask1 = a.looked_at(keep0), b.looked_at(keep1)
        maps = Maps.of(self.layout(a, b), a, b)
        table = torch.cat([a.coarse.flatten(0, 2), b.coarse.flatten(0, 2)]).to(self.dtype)
        keep, logit = torch.cat([mask0.flatten(), mask1.flatten()]), None
        layers = []
        with sdpa_kernel(ATTENTION_KERNELS):
            with stage("MPMs"):
                for mpm in self.mpms:
                    keep, logit = mpm(table, keep, maps)
                    layers.append(maps.layout.state(table, keep, logit))
            with stage("matching"):
                cells, confidence, pair = self.coarse_matches(table, keep, logit, maps, theta_c)
            with stage("refinement"):
                parts = cells.split(REFINED_AT_ONCE, dim=1)
                heat = [self.refinement(a.fine, b.fine, table, maps.layout, part) for part in parts]
                offset, std = expectation(torch.cat(heat))
        (_, height, width), (_, height1, width1) = maps.layout.shapes
        keypoints0 = cell_centre(cells[0] % (height * width), width)
        in_second = cells[1] - maps.layout.second
        keypoints1 = cell_centre(in_second % (height1 * width1), width1) + offset
        return PairMatches(pair, keypoints0, keypoints1, confidence, std, tuple(layers))

    def coarse_matches(
        self, table: Tensor, keep: Tensor, logit: Tensor | None, maps: Maps, theta_c: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """M_c: the cells of each match, as rows of the table (2 m), its confidence (m) and its pair (m)."""
        c, packed = self.config, Packed.of(keep, maps)
        rows, lengths = packed.cells, packed.lengths[-1]
        log_nmi: Sequence[Tensor | None] = [None] * len(lengths)
        if c.weighted_softmax and logit is not None:
            log_nmi = F.logsigmoid(logit[rows]).split(lengths)
        tokens, each = table[rows].float().split(lengths), rows.split(lengths)
        inner, found, pairs = maps.away_from_border(c.border), [], len(lengths) // 2
        for k in range(pairs):
            i, j, confidence = mutual_matches(
                tokens[k], tokens[pairs + k], log_nmi[k], log_nmi[pairs + k],
                c.temperature, c.theta_c if theta_c is None else theta_c,
            )  # fmt: skip
            cells = torch.stack([each[k][i], each[pairs + k][j]])
            chosen = inner[cells].all(dim=0).nonzero().squeeze(1)
            found.append((cells[:, chosen], confidence[chosen], torch.full_like(chosen, k)))
        cells, confidence, pair = (torch.cat(x, dim=-1) for x in zip(*found, strict=True))
        return cells, confidence, pair

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


Shape = tuple[int, int, int]  # images, rows and columns of their maps


@dataclass(frozen=True)
class Layout:
    """Where the cells of b pairs lie in one table: those of all first images, row by row, then those of all
    second images; and the same for the patches of cells that each level sees."""

    shapes: tuple[Shape, Shape]
    second: int  # the row of the table at which the second images begin
    images: int  # of both sides
    patches: list[Tensor]  # of each level n r*r: the rows of the table that its patches are made of
    centres: list[Tensor]  # of each level n 2: (x, y) of its patches in cells
    image: list[Tensor]  # of each level n: the image of each patch
    number: Tensor  # of all levels one after the other: the number of each patch in its level
    ends: Tensor  # the last patch of each image of each level, in the same order

    @staticmethod
    def of(shape0: Shape, shape1: Shape, levels: tuple[int, ...], device: torch.device) -> Layout:
        columns: tuple[list[Tensor], ...] = ([], [], [])  # patches, centres, images
        ends: list[int] = []
        begun = 0
        for r in levels:
            per_level: list[tuple[Tensor, Tensor, Tensor]] = []
            image, first = 0, 0
            for count, height, width in (shape0, shape1):
                y, x = torch.arange(0, height, r, device=device), torch.arange(0, width, r, device=device)
                y, x = (t.flatten() for t in torch.meshgrid(y, x, indexing="ij"))
                corner = y * width + x
                inside = torch.arange(r, device=device)
                offset = (inside[:, None] * width + inside).flatten()
                of_image = torch.arange(count, device=device)
                rows = first + of_image[:, None, None] * (height * width) + corner[:, None] + offset
                centre = cell_grid(height, width, r, device).repeat(count, 1)
                per_level.append(
                    (rows.flatten(0, 1), centre, (image + of_image).repeat_interleave(len(corner)))
                )
                ends += [begun + (n + 1) * len(corner) - 1 for n in range(count)]
                begun, image, first = begun + count * len(corner), image + count, count * height * width
            for column, parts in zip(columns, zip(*per_level, strict=True), strict=True):
                column.append(torch.cat(parts))
        patches, centres, images = columns
        number = torch.cat([torch.arange(len(p), device=device) for p in patches])
        b, height, width = shape0
        return Layout(
            (shape0, shape1), b * height * width, 2 * b, patches, centres, images, number,
            torch.tensor(ends, device=device),
        )  # fmt: skip

    @property
    def cells(self) -> int:
        return len(self.patches[-1])

    def state(self, table: Tensor, keep: Tensor, logit: Tensor | None) -> LayerState:
        """What lies in the table, as maps."""

        def maps(x: Tensor) -> tuple[Tensor, Tensor]:
            first, second = x[: self.second], x[self.second :]
            return first.unflatten(0, self.shapes[0]), second.unflatten(0, self.shapes[1])

        nmi = (None, None) if logit is None else maps(logit)
        return LayerState(*maps(table), *maps(keep), *nmi)


@dataclass(frozen=True)
class Maps:
    """A layout, and what of it is image and not padding."""

    layout: Layout
    valid: tuple[Tensor, Tensor]  # b h w of either side
    coarsest: Tensor  # n, bool: which patches of the first level are there
    centres: list[Tensor]  # of each level n 2, in the frame of `normalised_centres`

    @staticmethod
    def of(layout: Layout, a: Features, b: Features) -> Maps:
        valid = torch.cat([a.valid.flatten(), b.valid.flatten()])
        scale = torch.cat([frame_scale(map_extent(f.valid)) for f in (a, b)])
        centres = [c * scale[i][:, None] for c, i in zip(layout.centres, layout.image, strict=True)]
        return Maps(layout, (a.valid, b.valid), valid[layout.patches[0][:, 0]], centres)

    def away_from_border(self, border: int) -> Tensor:
        """n, bool, of the table's rows."""
        return torch.cat([away_from_border(v, border).flatten() for v in self.valid])


@dataclass(frozen=True)
class Packed:
    """The patches of each level that take part in an MPM, image by image."""

    rows: list[Tensor]  # of each level k: their numbers; of the last one, rows of the table
    lengths: list[list[int]]  # of each level: how many of each image
    starts: Tensor  # levels 2 images + 1, int32: where each image begins; and if the sides are exchanged

    @staticmethod
    def of(keep: Tensor, maps: Maps) -> Packed:
        """keep: n, bool, of the table's rows: the pruning mask M."""
        patches = maps.layout.patches
        there = [keep if p.shape[1] == 1 else keep[p[:, 0]] for p in patches]
        if len(patches) > 1:
            there[0] = maps.coarsest  # never pruned, so that the whole scene stays in sight
        flags = torch.cat(there)
        counted = flags.cumsum(0)
        ends = counted[maps.layout.ends].tolist()  # the host waits here, and nowhere else in an MPM
        rows = keep.new_empty(ends[-1] + 1, dtype=torch.int64)
        rows.scatter_(0, torch.where(flags, counted - 1, ends[-1]), maps.layout.number)
        images = maps.layout.images
        counts = [end - before for end, before in zip(ends, [0, *ends], strict=False)]
        lengths = [counts[n : n + images] for n in range(0, len(counts), images)]
        starts = [[running(some), running(exchanged(some))] for some in lengths]
        return Packed(
            list(rows[:-1].split([sum(some) for some in lengths])),
            lengths,
            torch.tensor(starts, dtype=torch.int32).to(keep.device, non_blocking=True),
        )

    @property
    def cells(self) -> Tensor:
        return self.rows[-1]

    def exchanged(self, x: Tensor, level: int = -1) -> Tensor:
        """x: k ..., of the patches of a level: those of the second images first."""
        first = sum(self.lengths[level][: len(self.lengths[level]) // 2])
        return torch.cat([x[first:], x[:first]])


def running(lengths: list[int]) -> list[int]:
    sums = [0]
    for length in lengths:
        sums.append(sums[-1] + length)
    return sums


def exchanged(lengths: list[int]) -> list[int]:
    half = len(lengths) // 2
    return lengths[half:] + lengths[:half]


class FastMPM:
    def __init__(self, mpm: MPM, dtype: torch.dtype):
        self.theta_p = mpm.theta_p
        self.self_attention = FastSADPA(mpm.self_attention, dtype)  # type: ignore[arg-type]
        self.cross_attention = FastSADPA(mpm.cross_attention, dtype)  # type: ignore[arg-type]
        self.pruning = copy.deepcopy(mpm.pruning).to(dtype) if mpm.pruning is not None else None

    def __call__(self, table: Tensor, keep: Tensor, maps: Maps) -> tuple[Tensor, Tensor | None]:
        """table: n c, changed in place; keep: n. Returns M_l and the NMI before the sigmoid."""
        packed = Packed.of(keep, maps)
        self.self_attention(table, packed, maps, cross=False)
        tokens = self.cross_attention(table, packed, maps, cross=True)
        if self.pruning is None:
            return keep, None
        nmi = self.pruning(tokens, tokens, None)
        logit = torch.full_like(keep, -torch.inf, dtype=torch.float32).index_copy_(0, packed.cells, nmi)
        return remaining(keep, logit, self.theta_p, None), logit


class FastSADPA:
    def __init__(self, layer: SADPA, dtype: torch.dtype):
        self.heads = layer.heads
        self.convs = [copy.deepcopy(conv).to(dtype) for conv in list(layer.convs)[:-1]]
        # The last level has patches of one cell: keys and queries of the same tokens, in one product.
        self.query_and_value = joined(layer.query, layer.convs[-1]).to(dtype)  # type: ignore[arg-type]
        self.b = None if layer.rotary is None else layer.rotary.b.detach().float()
        self.ffn = copy.deepcopy(layer.ffn).to(dtype)

    def __call__(self, table: Tensor, packed: Packed, maps: Maps, cross: bool) -> Tensor:
        """Updates the rows of the table that take part, which are returned too."""
        tokens = table[packed.cells]
        query, value = (
            x.unflatten(-1, (self.heads, -1)) for x in self.query_and_value(tokens).chunk(2, dim=-1)
        )
        query = self.turn(query, maps, packed, -1)
        messages = []
        for level, patches in enumerate(maps.layout.patches):
            if level < len(self.convs):
                rows = packed.exchanged(packed.rows[level], level) if cross else packed.rows[level]
                seen = table[patches[rows]].flatten(1)
                values = self.convs[level](seen).unflatten(-1, (self.heads, -1))
            else:
                values = packed.exchanged(value) if cross else value
            keys = self.turn(values, maps, packed, level)
            lengths = packed.lengths[level]
            messages.append(
                attend_segments(
                    query, keys, values, packed.starts[-1, 0], packed.starts[level, int(cross)],
                    packed.lengths[-1], exchanged(lengths) if cross else lengths,
                ).flatten(1)
            )  # fmt: skip
        updated = tokens + self.ffn(torch.cat([tokens, *messages], dim=-1))
        table.index_copy_(0, packed.cells, updated)
        return updated

    def turn(self, x: Tensor, maps: Maps, packed: Packed, level: int) -> Tensor:
        return x if self.b is None else rotate(x, maps.centres[level], packed.rows[level], self.b)


class FastRefinement:
    def __init__(self, layer: Refinement, dtype: torch.dtype):
        self.window, self.heads, self.heat = layer.window, layer.self_attention.heads, layer.heat
        dim = layer.merge.out_features
        # merge([window, to_fine(coarse)]) is a product with the window and one with the cell.
        of_window, of_cell = layer.merge.weight.split(dim, dim=1)
        self.of_window = linear(of_window, None).to(dtype)
        bias = of_cell @ layer.coarse_to_fine.bias + layer.merge.bias
        self.of_cell = linear(of_cell @ layer.coarse_to_fine.weight, bias).to(dtype)
        self.layers = [
            (joined(x.query, x.convs[0]).to(dtype), copy.deepcopy(x.ffn).to(dtype))  # type: ignore[arg-type]
            for x in (layer.self_attention, layer.cross_attention)
        ]

    def __call__(self, fine0: Tensor, fine1: Tensor, table: Tensor, layout: Layout, cells: Tensor) -> Tensor:
        """cells: 2 m, rows of the table. The logarithms of the heat maps: m window window."""
        middle = self.window**2 // 2
        places = [cells[0], cells[1] - layout.second]
        both = torch.cat([self.cut(*x) for x in zip((fine0, fine1), places, layout.shapes, strict=True)])
        both = self.of_window(both) + self.of_cell(table[cells.flatten()])[:, None]  # 2m w*w c
        (to_heads, ffn), (to_heads1, ffn1) = self.layers
        query, value = self.split(to_heads(both))
        both = both + ffn(torch.cat([both, attend_windows(query, value).flatten(2)], dim=-1))
        query, value = self.split(to_heads1(both))
        (first, second), (query0, query1), (value0, value1) = (
            x.tensor_split(2) for x in (both, query, value)
        )
        second = second + ffn1(torch.cat([second, attend_windows(query1, value0).flatten(2)], dim=-1))
        # The heat map asks for nothing of the first window but its middle.
        first, query0 = first[:, middle : middle + 1], query0[:, middle : middle + 1]
        first = first + ffn1(torch.cat([first, attend_windows(query0, value1).flatten(2)], dim=-1))
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
    return backbone.to(dtype=dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]


def one_convolution(layer: ConvNorm) -> nn.Module:
    return fuse_conv_bn_eval(layer[0], layer[1])  # type: ignore[arg-type,type-var]


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
