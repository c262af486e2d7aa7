"""How good the pruning is: the last MPM's mask against the cells that have a match.

The truth is that of training: a cell is matchable when it takes part in a mutual nearest-neighbour match of
projected cell centres. Cells without depth, about which nothing is known, are left out. mIoU is the mean
over images of the intersection over union of kept and matchable cells, recall that of the share of
matchable cells that are kept. The mIoU of a mask that keeps every cell stands beside it, since pruning is
worth something only beyond that. The share of cells that are pruned, known or not, is also told of the pairs
that overlap by less than half: less than half of their known cells are matchable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from prism_match.engine import Clock, Prism, Resize
from prism_match.errors import UserError
from prism_match.evaluation.megadepth import read_megadepth
from prism_match.evaluation.options import DEFAULT_SIZE, Options
from prism_match.evaluation.pairs import PosePair
from prism_match.evaluation.published import MASKS
from prism_match.evaluation.report import Report, Table, told
from prism_match.evaluation.runner import Run, match_all, progress_bar
from prism_match.evaluation.scannet import FRAME, is_scannet, read_scannet
from prism_match.matcher import PairMatcher
from prism_match.matches import Matches


class Quality(NamedTuple):
    """Of one image's mask; 0 to 1."""

    iou: float
    recall: float
    iou_of_all: float  # if every cell had been kept: the share of the known cells that are matchable
    pruned: float  # share of all cells


def masks(o: Options) -> Report:
    """For pairs with depth maps, in MegaDepth's layout or ScanNet's."""
    indoor = is_scannet(o.data)
    listed = o.choose(read_scannet(o.data) if indoor else read_megadepth(o.data))
    resizing = Resize(exact=FRAME) if indoor and not o.size else Resize(longer=o.size or DEFAULT_SIZE)
    found, unusable = measure_masks(listed, o.make_matcher(*o.single()), resizing, o.run.progress)
    if not found:
        raise UserError(f"{o.data}: no pair can be used; the first: {next(iter(unusable.values()), 'none')}")
    scores = summarise(found)
    used = len(listed) - len(unusable)
    summary = {
        "benchmark": "masks", "pairs": used, "size": resizing.side, "resize": str(resizing), "ransac": None,
        **scores, "images": sum(map(len, found)), "unusable": unusable,
    }  # fmt: skip
    below = "pruned, overlap < 1/2"
    columns = {"miou": "mIoU", "recall": "recall", "pruned": "pruned", "pruned_below_half": below}
    miou, recall = MASKS["scannet" if indoor else "megadepth"]
    measured: dict[str, dict[str, float | None]] = {
        "PRISM (ours)": scores,
        "every cell kept": {"miou": scores["miou_keeping_all"], "recall": 100.0, "pruned": 0.0},
        "PRISM (paper)": {"miou": miou, "recall": recall},
    }
    rows = [
        [name, *("" if (x := values.get(key)) is None else f"{x:.2f}" for key in columns)]
        for name, values in measured.items()
    ]
    title = f"masks of the last MPM: {used} pairs, {resizing}"
    notes = told(unusable, "pairs cannot be measured and are in no average")
    return Report(summary, [Table(title, ["", *columns.values()], rows)], notes=notes)


def measure_masks(
    pairs: Sequence[PosePair], matcher: PairMatcher, resizing: Resize, progress: bool = False
) -> tuple[list[list[Quality]], dict[str, str]]:
    """For each pair with matchable cells, the masks of its images that have them; and by name why others
    cannot be measured."""
    # The truth is for the images and their cells as they are.
    matcher = matcher.adjusted(rotate="never", rescale="never", polish=False)
    found: list[list[Quality]] = []
    unusable: dict[str, str] = {p.name: p.problem for p in pairs if p.problem}
    usable = [p for p in pairs if not p.problem]
    method = Prism(matcher, details=True)
    with progress_bar(len(usable), 0, "masks", progress) as bar:
        for pair, matches in match_all(usable, method, resizing, Run(), Clock()):
            try:
                if isinstance(matches, str):
                    raise UserError(matches)
                qualities = pair_quality(pair, matches, resizing)  # type: ignore[arg-type]
                if not qualities:
                    raise UserError("no cell of one image has a match in the other")
                found.append(qualities)
            except UserError as error:
                unusable[pair.name] = str(error)
            bar.update()
    return found, unusable


def summarise(found: Sequence[Sequence[Quality]]) -> dict[str, float | None]:
    """Percent, means over images; `pruned_below_half` None where no pair overlaps by less than half."""

    def mean(values: list[float]) -> float | None:
        return 100 * float(np.mean(values)) if values else None

    images = [quality for pair in found for quality in pair]
    apart = [q for pair in found if np.mean([q.iou_of_all for q in pair]) < 0.5 for q in pair]
    return {
        "miou": mean([q.iou for q in images]),
        "recall": mean([q.recall for q in images]),
        "miou_keeping_all": mean([q.iou_of_all for q in images]),
        "pruned": mean([q.pruned for q in images]),
        "pruned_below_half": mean([q.pruned for q in apart]),
    }


def pair_quality(pair: PosePair, matches: Matches, resizing: Resize) -> list[Quality]:
    """Of each image of the pair that has matchable cells."""
    from prism_match.evaluation.covisible import matchable_cells

    truth, cells0, cells1 = matchable_cells(pair, resizing)
    details = matches.details
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
    recall, overlap = hit / matchable.sum(), matchable.sum() / known.sum()
    return Quality(float(iou), float(recall), float(overlap), float((~keep).mean()))
