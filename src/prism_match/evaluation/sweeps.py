"""MegaDepth-1500 again and again: over image sizes, over models, over the model's two thresholds."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from prism_match.engine.methods import Method, Prism
from prism_match.engine.photos import Resize
from prism_match.errors import UserError
from prism_match.evaluation.megadepth import read_megadepth
from prism_match.evaluation.options import DEFAULT_SIZE, Options
from prism_match.evaluation.pairs import Pair
from prism_match.evaluation.pose import evaluate_pose
from prism_match.evaluation.published import ABLATION, RESOLUTION
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
from prism_match.evaluation.runner import Result
from prism_match.images import load_image

SIZES = (640, 832, 960, 1152)
THETA_C = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
THETA_P = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3)
TIMED = 10  # pairs that the clean timing takes


def resolution(o: Options) -> Report:
    """AUC, milliseconds and GPU memory at each size (or only at the one that is asked for)."""
    method, listed = o.make_method(), o.choose(read_megadepth(o.data))
    results: dict[str, Result] = {}
    rows, facts = [], {}
    for size in (o.size,) if o.size else SIZES:
        result = pose(o, listed, method, size, f"{size} px", results)
        milliseconds, gib = time_method(method, listed, o.resize(size))
        facts[str(size)] = {"auc": result.auc, "milliseconds": milliseconds, "gib": gib}
        rows.append([f"{result.method}, {size} px", *auc_cells(result), f"{milliseconds:.0f}",
                     "" if gib is None else f"{gib:.1f}"])  # fmt: skip
        if size in RESOLUTION and o.ransac == "opencv":
            auc, ms, memory = RESOLUTION[size]
            rows.append([f"PRISM (paper, A100), {size} px", *cells(auc), f"{ms:.0f}", f"{memory:.1f}"])
    columns = ["", *auc_columns(result), "ms/pair", "GPU GiB"]
    return sweep_report("resolution", results, columns, rows, {"sizes": facts})


def ablation(o: Options) -> Report:
    """A row for each of several weights, or configs, or all combinations of both."""
    from prism_match.config import load_model_config

    weights: Sequence[str | Path | None] = o.weights or (None,)
    configs: Sequence[str | None] = o.configs or (None,)
    if len(weights) * len(configs) < 2:
        raise UserError("ablation: give at least two --weights or --model-config")
    listed, size = o.choose(read_megadepth(o.data)), o.size or DEFAULT_SIZE
    results: dict[str, Result] = {}
    rows = []
    for path, config in ((w, c) for w in weights for c in configs):
        matcher = o.make_matcher(path, load_model_config(config) if config else None)
        name = " ".join(str(x) for x in (path, config) if x)
        result = pose(o, listed, Prism(matcher), size, name, results)
        rows.append([name, *auc_cells(result), *fact_cells(result)])
        if config in ABLATION and ABLATION[config][0] == size and o.ransac == "opencv":
            rows.append([f"{config} (paper)", *cells(ABLATION[config][1]), "", "", "", ""])
    columns = ["model", *auc_columns(result), *fact_columns(result)]
    return sweep_report("ablation", results, columns, rows, {})


def thresholds(o: Options) -> Report:
    """theta_c, the least confidence of a match, and theta_p, below which a cell is pruned; each is varied
    while the other stays at the model's own."""
    listed, size = o.choose(read_megadepth(o.data)), o.size or DEFAULT_SIZE
    results: dict[str, Result] = {}
    rows = []
    for name, method in threshold_methods(o):
        result = pose(o, listed, method, size, name, results)
        rows.append([name, *auc_cells(result), *fact_cells(result)])
    columns = ["threshold", *auc_columns(result), *fact_columns(result)]
    return sweep_report("thresholds", results, columns, rows, {})


def threshold_methods(o: Options) -> Iterator[tuple[str, Method]]:
    weights, config = o.single()
    matcher = o.make_matcher(weights, config)
    own = matcher.info.config
    for theta in THETA_C:
        yield f"theta_c {theta:g}", Prism(o.make_matcher(weights, own, theta))
    for theta in THETA_P:
        yield f"theta_p {theta:g}", Prism(o.make_matcher(weights, own.replace(theta_p=theta)))


def pose(
    o: Options, pairs: Sequence[Any], method: Method, size: int, name: str, results: dict[str, Result]
) -> Result:
    """One run of a sweep, in a folder of its own, kept in `results` under its name."""
    folder = re.sub(r"[^\w.-]+", "_", name).strip("_")
    run = replace(o.run, out=o.run.out / folder if o.run.out else None)
    result = evaluate_pose(
        pairs, method, o.resize(size), o.ransac, o.threshold,
        seed=o.seed, benchmark="megadepth1500", run=run,
    )  # fmt: skip
    results[name] = result
    return result


def sweep_report(
    name: str, results: dict[str, Result], columns: list[str], rows: list[list[str]], facts: dict[str, Any]
) -> Report:
    first = next(iter(results.values()))
    sizes = [r.settings["size"] for r in results.values()]
    resize = None if len(set(sizes)) == 1 else "longer side as given"
    summary = {
        "benchmark": name, "pairs": len(first.scores), **first.settings,
        "size": sizes if resize else sizes[0],
        "auc": {k: r.auc for k, r in results.items()},
        **facts, "runs": {k: r.to_dict() for k, r in results.items()},
    }  # fmt: skip
    return Report(summary, [Table(f"{name} on {describe(first, resize)}", columns, rows)], results,
                  notes=sweep_problems(results))  # fmt: skip


def sweep_problems(results: dict[str, Result]) -> list[str]:
    """What failed in each run; what could not be scored is the same in all."""
    *_, last = results.values()
    failed = [f"{name}: {note}" for name, r in results.items() for note in problems(replace(r, unusable={}))]
    return [*failed, *problems(replace(last, scores=()))]


def time_method(method: Method, pairs: Sequence[Pair], resizing: Resize) -> tuple[float, float | None]:
    """Median milliseconds of a pair matched alone, images being in memory; and the peak of GPU memory in
    GiB, None where none is used."""
    import torch

    prepared = []
    for pair in pairs:
        with suppress(UserError):  # counted and named where it is scored
            prepared.append([method.prepare(load_image(p), resizing) for p in (pair.image0, pair.image1)])
        if len(prepared) == TIMED:
            break
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for images in [prepared[0], *prepared]:  # the first one warms up
        start = time.perf_counter()
        a, b = method.extract(images)
        method.match([(a, b)])
        if gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if gpu else 0.0
    return 1000 * float(np.median(seconds[1:])), peak or None
