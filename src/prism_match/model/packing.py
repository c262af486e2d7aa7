"""Where the cells of a batch lie while it is matched: in one table, of which each MPM takes what is kept."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from prism_match.model.mpm import LayerState
from prism_match.model.position import cell_grid

SHARES = 8  # parts of a level: where room is not exact, it is for so many of them

Shape = tuple[int, int, int]  # images, rows and columns of their maps
Lengths = tuple[tuple[int, ...], ...]  # of each level: how many patches of each image


@dataclass(frozen=True)
class Layout:
    """Of b pairs: the cells of all first images, row by row, then those of all second images, then one that
    is spare; and the same for the patches of cells that each level sees."""

    shapes: tuple[Shape, Shape]
    second: int  # the row of the table at which the second images begin
    patches: list[Tensor]  # of each level n + 1, r*r: the rows of the table that its patches are made of
    centres: list[Tensor]  # of each level n + 1, 2: (x, y) of its patches in cells
    image: list[Tensor]  # of each level n + 1: the image of each patch
    ends: list[Tensor]  # of each level: the last patch of each image

    @staticmethod
    def of(shape0: Shape, shape1: Shape, levels: tuple[int, ...], device: torch.device) -> Layout:
        rows: list[list[Tensor]] = []
        centres, images, ends = [], [], []
        spare = sum(count * height * width for count, height, width in (shape0, shape1))
        for r in levels:
            parts: list[tuple[Tensor, Tensor, Tensor]] = []
            image = first = 0
            last: list[int] = []
            for count, height, width in (shape0, shape1):
                y, x = torch.arange(0, height, r, device=device), torch.arange(0, width, r, device=device)
                y, x = (t.flatten() for t in torch.meshgrid(y, x, indexing="ij"))
                corner = y * width + x
                inside = torch.arange(r, device=device)
                offset = (inside[:, None] * width + inside).flatten()
                of_image = torch.arange(count, device=device)
                cells = first + of_image[:, None, None] * (height * width) + corner[:, None] + offset
                centre = cell_grid(height, width, r, device).repeat(count, 1)
                parts.append((cells.flatten(0, 1), centre, (image + of_image).repeat_interleave(len(corner))))
                last += [len(corner)] * count
                image, first = image + count, count * height * width
            nobody = torch.full((1, r * r), spare, device=device)
            of_level = list(zip(*parts, strict=True))
            rows.append([*of_level[0], nobody])
            centres.append(torch.cat([*of_level[1], torch.zeros((1, 2), device=device)]))
            images.append(torch.cat([*of_level[2], torch.zeros(1, dtype=torch.int64, device=device)]))
            ends.append(torch.tensor([n - 1 for n in accumulate(last)], device=device))
        b, height, width = shape0
        return Layout(
            (shape0, shape1), b * height * width, [torch.cat(x) for x in rows], centres, images, ends
        )

    @property
    def cells(self) -> int:
        return len(self.patches[-1]) - 1

    def state(self, table: Tensor, keep: Tensor, logit: Tensor | None) -> LayerState:
        """What lies in the table, as maps."""

        def maps(x: Tensor) -> tuple[Tensor, Tensor]:
            first, second = x[: self.second], x[self.second : self.cells]
            return first.unflatten(0, self.shapes[0]), second.unflatten(0, self.shapes[1])

        nmi = (None, None) if logit is None else maps(logit)
        return LayerState(*maps(table), *maps(keep), *nmi)

    def lengths(self, ends: list[int]) -> Lengths:
        """Of each level: how many patches of each image are kept, as `Kept.ends` tells."""
        images = len(self.ends[0])
        levels = [ends[n : n + images] for n in range(0, len(ends), images)]
        return tuple(tuple(end - start for end, start in zip(x, [0, *x], strict=False)) for x in levels)


@dataclass(frozen=True)
class Room:
    """How many rows the patches of each level get in an MPM."""

    rows: tuple[int, ...]
    most: int  # cells of one image
    lengths: Lengths | None  # of each level: how many of each image, where the host may know it

    @staticmethod
    def exact(lengths: Lengths) -> Room:
        return Room(tuple(sum(x) for x in lengths), max(lengths[-1]), lengths)

    @staticmethod
    def full(layout: Layout) -> Room:
        rows = tuple(len(p) - 1 for p in layout.patches)
        return Room(rows, max(height * width for _, height, width in layout.shapes), None)

    @staticmethod
    def ample(layout: Layout, lengths: Lengths) -> Room:
        """Out of few sizes, so that the same work can be recorded for many pairs."""
        full = Room.full(layout)
        pruned = range(len(full.rows) > 1, len(full.rows))  # the coarsest of several levels never is
        share = max(-(-SHARES * sum(lengths[n]) // full.rows[n]) for n in pruned)
        rows = [-(-count * share // SHARES) if n in pruned else count for n, count in enumerate(full.rows)]
        return Room(tuple(rows), min(full.most, rows[-1]), None)


@dataclass(frozen=True)
class Kept:
    """The patches of each level that are there, image by image."""

    flags: list[Tensor]  # of each level n, bool
    counted: list[Tensor]  # of each level n: how many are there up to each
    ends: list[Tensor]  # of each level: how many are there up to the end of each image

    @staticmethod
    def of(layout: Layout, keep: Tensor, coarsest: Tensor) -> Kept:
        """keep: n, bool, of the table's rows: the pruning mask M; coarsest: which patches of the first level
        are image: none of them is ever pruned, so that the whole scene stays in sight."""
        flags = [keep if p.shape[1] == 1 else keep[p[:-1, 0]] for p in layout.patches]
        if len(flags) > 1:
            flags[0] = coarsest
        counted = [x.cumsum(0) for x in flags]
        return Kept(flags, counted, [c[e] for c, e in zip(counted, layout.ends, strict=True)])

    def rows(self, level: int, room: int) -> Tensor:
        """Their numbers in a level."""
        return numbers_of(self.flags[level], self.counted[level], room)


def numbers_of(flags: Tensor, counted: Tensor, room: int) -> Tensor:
    """room: where the flags (n) are set, `counted` of them up to each; after these n, the spare one's."""
    numbers = torch.arange(len(flags), device=flags.device)
    rows = torch.full((room + 1,), len(flags), device=flags.device)
    return rows.scatter_(0, torch.where(flags, counted - 1, room), numbers)[:-1]


def spared(table: Tensor) -> Tensor:
    """With one more row."""
    return F.pad(table, (0, 0, 0, 1))
