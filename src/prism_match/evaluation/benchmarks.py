"""The benchmarks by name. Each takes `Options` and gives a `Report`; a new one is a file of its own and
a name in `evaluation.Benchmark`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from prism_match.engine.methods import Method
from prism_match.engine.photos import Resize
from prism_match.evaluation import Benchmark
from prism_match.evaluation.hpatches import SHORTER_SIDE, evaluate_homography, read_hpatches
from prism_match.evaluation.localization import localization
from prism_match.evaluation.masks import masks
from prism_match.evaluation.megadepth import read_megadepth
from prism_match.evaluation.options import DEFAULT_SIZE, Options
from prism_match.evaluation.pairs import Pair, PosePair
from prism_match.evaluation.pose import evaluate_pose
from prism_match.evaluation.posed import in_resized_frames, read_calibrated, read_pair_list
from prism_match.evaluation.report import Evidence, Report, breakdown, main_table, problems
from prism_match.evaluation.rgbd import PAIRS, read_rgbd
from prism_match.evaluation.runner import Result
from prism_match.evaluation.scale import megadepth_scale
from prism_match.evaluation.scannet import FRAME, read_scannet
from prism_match.evaluation.sweeps import ablation, resolution, thresholds
from prism_match.evaluation.visloc import aachen, inloc

FULL = {"megadepth1500": 1500, "scannet1500": 1500, "hpatches": 540}  # pairs the published numbers are for


def megadepth1500(o: Options) -> Report:
    return pose_report("megadepth1500", read_megadepth(o.data), o.resize(o.size or DEFAULT_SIZE), o)


def scannet1500(o: Options) -> Report:
    resizing = o.resize(o.size) if o.size else Resize(exact=FRAME)
    return pose_report("scannet1500", read_scannet(o.data), resizing, o)


def pairs(o: Options) -> Report:
    resizing = o.resize(o.size or 640)
    return pose_report("pairs", in_resized_frames(read_pair_list(o.data), resizing), resizing, o)


def strecha(o: Options) -> Report:
    return pose_report("strecha", read_calibrated(o.data), o.resize(o.size or DEFAULT_SIZE), o)


def rgbd(o: Options) -> Report:
    listed, overlaps = read_rgbd(o.data, PAIRS if o.pairs is None else o.pairs, o.seed)
    report = pose_report("rgbd", listed, o.resize(o.size or 640), o)
    return replace(report, summary=report.summary | {"overlaps": overlaps})


def hpatches(o: Options) -> Report:
    found, method = o.choose(read_hpatches(o.data)), o.make_method()
    resizing = Resize(shorter=o.size or SHORTER_SIDE, own_size=o.polishes_at_own_size)
    result = evaluate_homography(found, method, resizing, o.ransac, o.threshold, seed=o.seed, run=o.run)
    return make_report(result, found, method, resizing, o)


def pose_report(name: str, listed: list[PosePair], resizing: Resize, o: Options) -> Report:
    found, method = o.choose(listed), o.make_method()
    result = evaluate_pose(
        found, method, resizing, o.ransac, o.threshold, seed=o.seed, benchmark=name, run=o.run
    )
    return make_report(result, found, method, resizing, o)


def make_report(
    result: Result, found: Sequence[Pair], method: Method, resizing: Resize, o: Options
) -> Report:
    tables = [main_table(result), *breakdown(result, "split", "list"), *breakdown(result, "scene", "scene")]
    ours = len(result.scores)
    full = FULL.get(result.benchmark, ours)
    caveat = "" if ours == full else f"the published numbers are for {full} pairs, ours for {ours}"
    evidence = Evidence(result, {p.name: p for p in found}, method, resizing, o.run)
    return Report(result.to_dict(), tables, {result.method: result}, evidence, problems(result), caveat)


BENCHMARKS: dict[Benchmark, Callable[[Options], Report]] = {
    "megadepth1500": megadepth1500,
    "scannet1500": scannet1500,
    "hpatches": hpatches,
    "pairs": pairs,
    "strecha": strecha,
    "rgbd": rgbd,
    "megadepth-scale": megadepth_scale,
    "masks": masks,
    "resolution": resolution,
    "ablation": ablation,
    "thresholds": thresholds,
    "localization": localization,
    "aachen": aachen,
    "inloc": inloc,
}
