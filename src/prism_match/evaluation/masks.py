"""How good the pruning is: the last MPM's mask against the cells that have a match.

The truth is that of training: a cell is matchable when it takes part in a mutual nearest-neighbour match of
projected cell centres. Cells without depth, about which nothing is known, are left out. mIoU is the mean
over images of the intersection over union of kept and matchable cells, recall that of the share of
matchable cells that are kept. The mIoU of a mask that keeps every cell stands beside it, since pruning is
worth something only beyond that."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from prism_match.errors import UserError
from prism_match.evaluation.megadepth import read_megadepth
from prism_match.evaluation.options import DEFAULT_SIZE, Options
from prism_match.evaluation.pairs import PosePair, Resize
from prism_match.evaluation.published import MASKS
from prism_match.evaluation.report import Report, Table, shorten
from prism_match.evaluation.runner import load_resized, progress_bar
from prism_match.evaluation.scannet import FRAME, is_scannet, read_scannet

if TYPE_CHECKING:
    from prism_match.matcher import Matcher


class Quality(NamedTuple):
    """Of one image's mask; 0 to 1."""

    iou: float
    recall: float
    iou_of_all: float  # if every cell had been kept


def masks(o: Options) -> Report:
    """For pairs with depth maps, in MegaDepth's layout or ScanNet's."""
    indoor = is_scannet(o.data)
    listed = o.choose(read_scannet(o.data) if indoor else read_megadepth(o.data))
    resizing = Resize(exact=FRAME) if indoor and not o.size else Resize(longer=o.size or DEFAULT_SIZE)
    matcher = o.make_matcher(*o.single())
    matcher.size = sys.maxsize  # the benchmark resizes
    qualities: list[Quality] = []  # of each image with at least one matchable cell
    unusable: dict[str, str] = {p.name: p.problem for p in listed if p.problem}
    with progress_bar(len(listed), 0, "masks", o.run.progress) as tick:
        for pair in listed:
            try:
                if not pair.problem:
                    qualities += pair_quality(pair, matcher, resizing)
            except UserError as error:
                unusable[pair.name] = str(error)
            tick()
    if not qualities:
        raise UserError(f"{o.data}: no pair can be used; the first: {next(iter(unusable.values()), 'none')}")
    iou, recall, iou_of_all = (100 * float(np.mean(x)) for x in zip(*qualities, strict=True))
    used = len(listed) - len(unusable)
    summary = {
        "benchmark": "masks", "pairs": used, "size": resizing.side, "resize": str(resizing), "ransac": None,
        "miou": iou, "recall": recall, "miou_keeping_all": iou_of_all,
        "images": len(qualities), "unusable": unusable,
    }  # fmt: skip
    published = MASKS["scannet" if indoor else "megadepth"]
    rows = [[name, *(f"{x:.2f}" for x in values)] for name, values in (
        ("PRISM (ours)", (iou, recall)), ("every cell kept", (iou_of_all, 100.0)),
        ("PRISM (paper)", published))]  # fmt: skip
    title = f"masks of the last MPM: {used} pairs, {resizing}"
    notes = []
    if unusable:
        listed_problems = shorten([f"{k} ({v})" for k, v in unusable.items()])
        notes.append(f"{len(unusable)} pairs cannot be measured and are in no average: {listed_problems}")
    return Report(summary, [Table(title, ["", "mIoU", "recall"], rows)], notes=notes)


def pair_quality(pair: PosePair, matcher: Matcher, resizing: Resize) -> list[Quality]:
    """Of each image of the pair that has matchable cells."""
    from prism_match.evaluation.covisible import matchable_cells

    truth, cells0, cells1 = matchable_cells(pair, resizing)
    images = (load_resized(path, resizing)[0] for path in (pair.image0, pair.image1))
    details = matcher.match(*images, details=True).details
    assert details is not None
    sides = (
        (details.keep0, truth.matchable0, truth.unmatchable0, cells0),
        (details.keep1, truth.matchable1, truth.unmatchable1, cells1),
    )
    found = []
    for keep, matchable, unmatchable, shape in sides:
        yes, no = (x.view(shape).numpy() for x in (matchable, unmatchable))
        if yes.any():
            found.append(mask_quality(keep[-1], yes, no))
    return found


def mask_quality(keep: np.ndarray, matchable: np.ndarray, unmatchable: np.ndarray) -> Quality:
    """All h w, bool; at least one cell is matchable."""
    known = matchable | unmatchable
    hit = (keep & matchable).sum()
    iou = hit / ((keep & known) | matchable).sum()
    return Quality(float(iou), float(hit / matchable.sum()), float(matchable.sum() / known.sum()))
