"""Relative pose by how much the scale changes between the images of a pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from prism_match.config import parse_json
from prism_match.engine.photos import Resize, content_of
from prism_match.errors import UserError
from prism_match.evaluation.megadepth import read_megadepth
from prism_match.evaluation.options import DEFAULT_SIZE, Options
from prism_match.evaluation.pairs import PosePair
from prism_match.evaluation.pose import evaluate_pose
from prism_match.evaluation.published import SCALE
from prism_match.evaluation.report import (
    Report,
    Table,
    auc_cells,
    auc_columns,
    cells,
    describe,
    fact_cells,
    fact_columns,
    problems,
)
from prism_match.evaluation.runner import Run, progress_bar
from prism_match.files import is_file, short_hash, write_json

BINS = {f"[{low}, {low + 1})" if low < 4 else "[4, inf)": low for low in SCALE}


def megadepth_scale(o: Options) -> Report:
    """The AUC in each bin of scale ratios, of all pairs that have depth maps."""
    resizing, method = o.resize(o.size or DEFAULT_SIZE), o.make_method()
    chosen = o.choose(read_megadepth(o.data))
    listed = [p for p in chosen if not p.problem]
    ratios, unknown = scale_ratios(listed, resizing, o.run)
    unknown |= {p.name: p.problem for p in chosen if p.problem}
    binned = [replace(p, split=bin_of(ratios[p.name])) for p in listed if p.name in ratios]
    if not binned:
        raise UserError(f"{o.data}: no pair has depth maps of both images")
    result = evaluate_pose(
        binned, method, resizing, o.ransac, o.threshold, seed=o.seed, benchmark="megadepth-scale", run=o.run
    )
    result = replace(result, unusable=result.unusable | unknown)
    columns = ["scale ratio", "pairs", *auc_columns(result), *fact_columns(result)[:3]]
    groups = result.subset("split")
    rows = []
    for name, low in BINS.items():
        if name in groups:
            part = groups[name]
            rows.append([name, str(len(part.scores)), *auc_cells(part), *fact_cells(part)[:3]])
        if o.ransac == "opencv":
            rows.append([f"{name} PRISM (paper), 832 px", "", *cells(SCALE[low]), "", "", ""])
    summary = result.to_dict() | {"ratios": ratios}
    curves = {name: groups[name] for name in BINS if name in groups}
    return Report(summary, [Table(describe(result), columns, rows)], curves, notes=problems(result))


def bin_of(ratio: float) -> str:
    return next(name for name, low in reversed(BINS.items()) if ratio >= low)


def scale_ratios(
    pairs: Sequence[PosePair], resizing: Resize, run: Run
) -> tuple[dict[str, float], dict[str, str]]:
    """By the name of the pair: its scale ratio, or why it has none. What is known is kept in the folder of
    the cache or of the results."""
    from prism_match.evaluation.covisible import scale_ratio

    folder = run.cache or run.out
    file = folder / f"scale_ratios_{resizing.side}.json" if folder else None
    known = read_ratios(file)
    ratios: dict[str, float] = {}
    unknown: dict[str, str] = {}
    with progress_bar(len(pairs), 0, "scale ratios", run.progress) as bar:
        for pair in pairs:
            try:
                key = geometry_key(pair)
                if key not in known:
                    known[key] = scale_ratio(pair, resizing)
                if np.isfinite(known[key]):
                    ratios[pair.name] = known[key]
                else:
                    unknown[pair.name] = "too little is seen by both images"
            except UserError as error:
                unknown[pair.name] = str(error)
            bar.update()
    if file is not None and file.parent.is_dir():
        write_json(file, {k: v if np.isfinite(v) else None for k, v in known.items()})
    return ratios, unknown


def geometry_key(pair: PosePair) -> str:
    """All that a scale ratio depends on but for the resizing."""
    files = (pair.image0, pair.image1, pair.depth0, pair.depth1)
    contents = [content_of(path) for path in files if path is not None and is_file(path)]
    cameras = [None if x is None else x.tolist() for x in (pair.K0, pair.K1, pair.T_0to1)]
    return short_hash([contents, cameras, pair.frame0, pair.frame1])


def read_ratios(file: Path | None) -> dict[str, float]:
    if file is None or not file.is_file():
        return {}
    try:
        stored = parse_json(file.read_text(encoding="utf-8"))
        return {k: float("nan") if v is None else float(v) for k, v in stored.items()}
    except (ValueError, AttributeError):  # damaged: worked out again
        return {}
