"""Measures the weights on everything that they are judged by, SIFT in the same run, and compares with the
scores that were recorded in accuracy.json. Exit code 1: something got worse by more than luck.

python benchmarks/accuracy.py --data DATA                     # DATA/megadepth_dev, oxford, scannet_sample
python benchmarks/accuracy.py --data DATA --only oxford --only demo
python benchmarks/accuracy.py --data DATA --weights run/weights.safetensors --record
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import prism_match
from prism_match import Matcher, UserError
from prism_match.engine.methods import Method, Prism, Sift
from prism_match.engine.photos import Resize
from prism_match.evaluation.hpatches import (
    SHORTER_SIDE,
    evaluate_homography,
    read_hpatches,
    reprojection_errors,
)
from prism_match.evaluation.masks import measure_masks, summarise
from prism_match.evaluation.megadepth import read_megadepth
from prism_match.evaluation.pairs import choose
from prism_match.evaluation.pose import evaluate_pose
from prism_match.evaluation.posed import in_resized_frames, read_pair_list
from prism_match.evaluation.report import Table
from prism_match.evaluation.runner import Result, Run
from prism_match.files import write_json

RECORD = Path(__file__).with_name("accuracy.json")
ASSETS = Path(prism_match.__file__).parent / "assets"

# What the weights are to reach, from modest to bold: AUC@5/10/20 on MegaDepth.
GOALS = {
    "SuperPoint + SuperGlue (published)": (42.2, 61.2, 76.0),
    "SuperPoint + LightGlue (these pairs)": (49.0, 66.0, 80.4),
    "LoFTR (published)": (52.8, 69.2, 81.2),
    "PRISM (published)": (56.4, 71.6, 82.7),
}


@dataclass(frozen=True)
class Score:
    """One number. A later one is worse if it is behind by more than the tolerance."""

    ours: float
    tolerance: float
    sift: float | None = None
    goal: float | None = None  # to be reached; SIFT, where it is measured, is to be beaten
    smaller_is_better: bool = False

    def worse_than(self, recorded: float, tolerance: float) -> bool:
        behind = self.ours - recorded if self.smaller_is_better else recorded - self.ours
        return behind > tolerance

    @property
    def reached(self) -> bool | None:
        if self.goal is None and self.sift is None:
            return None
        above = self.sift is None or self.ours > self.sift
        if self.goal is not None:
            above &= self.ours <= self.goal if self.smaller_is_better else self.ours >= self.goal
        return above


Scores = dict[str, Score]


@dataclass(frozen=True)
class Bench:
    """What every measurement needs."""

    matcher: Matcher
    data: Path | None
    pairs: int | None
    seeds: int
    own_size: bool  # polish at it
    run: Run

    def folder(self, name: str) -> Path:
        if self.data is None or not (self.data / name).is_dir():
            raise UserError(f"{self.data / name if self.data else '--data'}: no such folder; see --help")
        return self.data / name

    def methods(self) -> tuple[Method, Method]:
        return Prism(self.matcher), Sift()

    def over_seeds(self, evaluate: Callable[[Method, int], Result]) -> tuple[list[Result], list[Result]]:
        """Of ours and of SIFT, one result for each seed of RANSAC; matched once, then from the cache."""
        ours, sift = ([evaluate(method, seed) for seed in range(self.seeds)] for method in self.methods())
        return ours, sift


def megadepth(bench: Bench) -> tuple[int, Scores]:
    pairs = choose(read_megadepth(bench.folder("megadepth_dev")), bench.pairs, 0)
    resizing = Resize(longer=832, own_size=bench.own_size)
    ours, sift = bench.over_seeds(
        lambda method, seed: evaluate_pose(
            pairs, method, resizing, seed=seed, benchmark="megadepth", run=bench.run
        )
    )
    return len(pairs), auc_scores(ours, sift, GOALS["SuperPoint + SuperGlue (published)"])


def oxford(bench: Bench) -> tuple[int, Scores]:
    pairs = choose(read_hpatches(bench.folder("oxford")), bench.pairs, 0)
    resizing = Resize(shorter=SHORTER_SIDE, own_size=bench.own_size)
    ours, sift = bench.over_seeds(
        lambda method, seed: evaluate_homography(
            pairs, method, resizing, seed=seed, benchmark="oxford", run=bench.run
        )
    )
    lost = [name for name in working(sift) - working(ours) if name.startswith("v_")]
    if lost:
        print(f"note: SIFT solves {', '.join(sorted(lost))} and we do not", file=sys.stderr)
    scores = auc_scores(ours, sift)
    scores["viewpoint sequences lost to SIFT"] = Score(len(lost), 0, goal=0, smaller_is_better=True)
    return len(pairs), scores


def scannet(bench: Bench) -> tuple[int, Scores]:
    resizing = Resize(longer=640)
    listed = choose(read_pair_list(bench.folder("scannet_sample")), bench.pairs, 0)
    pairs = in_resized_frames(listed, resizing)
    ours, sift = bench.over_seeds(
        lambda method, seed: evaluate_pose(
            pairs, method, resizing, seed=seed, benchmark="scannet", run=bench.run
        )
    )
    return len(pairs), auc_scores(ours, sift)


def masks(bench: Bench) -> tuple[int, Scores]:
    listed = [p for p in read_megadepth(bench.folder("megadepth_dev")) if p.depth0 and p.depth1]
    pairs = choose(listed, bench.pairs, 0)
    found, _ = measure_masks(pairs, bench.matcher, Resize(longer=832), bench.run.progress)
    measured = summarise(found)
    scores = {"recall of matchable cells, %": Score(measured["recall"] or 0.0, 0.3, goal=99.0)}
    if measured["pruned_below_half"] is not None:
        scores["pruned below half overlap, %"] = Score(measured["pruned_below_half"], 2.0, goal=100 / 3)
    return len(found), scores


def demo(bench: Bench) -> tuple[int, Scores]:
    matches = bench.matcher.match(ASSETS / "astronaut0.jpg", ASSETS / "astronaut1.jpg")
    truth = np.loadtxt(ASSETS / "astronaut_homography.txt")
    errors = reprojection_errors(matches.keypoints0, matches.keypoints1, truth)
    median = float(np.median(errors)) if len(errors) else float("inf")
    return 1, {
        "median error, px": Score(median, 0.1, goal=1.0, smaller_is_better=True),
        "matches": Score(len(matches), 0.05 * len(matches)),
    }


MEASUREMENTS: dict[str, Callable[[Bench], tuple[int, Scores]]] = {
    "megadepth": megadepth, "oxford": oxford, "scannet": scannet, "masks": masks, "demo": demo
}  # fmt: skip


def auc_scores(ours: list[Result], sift: list[Result], goals: tuple[float, ...] | None = None) -> Scores:
    """Means over the seeds. The tolerance is three standard deviations of the difference of two such means,
    and half a point at least."""
    scores = {}
    for n, threshold in enumerate(ours[0].auc):
        values = [r.auc[threshold] for r in ours]
        spread = float(np.std(values, ddof=1)) if len(values) > 1 else 4.0  # about that of 60 pairs
        tolerance = max(0.5, 3 * spread * (2 / len(values)) ** 0.5)
        theirs = float(np.mean([r.auc[threshold] for r in sift]))
        goal = goals[n] if goals else None
        scores[f"AUC@{threshold}"] = Score(float(np.mean(values)), tolerance, theirs, goal)
    return scores


def working(results: list[Result]) -> set[str]:
    """Sequences of which at least half of the pairs are within 10 px, over all seeds."""
    errors: dict[str, list[float]] = {}
    for score in (s for r in results for s in r.scores):
        errors.setdefault(score.scene, []).append(score.error)
    return {name for name, values in errors.items() if np.median(values) < 10}


def main() -> int:
    args = arguments()
    record = read_record()
    matcher = Matcher(
        args.weights,
        device=args.device,
        precision=args.precision,
        rotate=args.rotate,
        polish=args.polish,
    )
    name = torch.cuda.get_device_name(matcher.device) if matcher.device.type == "cuda" else "CPU"
    about = {
        "weights": str(matcher.info.sha256)[:16], "seeds": args.seeds,
        "device": f"{name}, {str(matcher.dtype).removeprefix('torch.')}",
    }  # fmt: skip
    print(f"weights {about['weights']}, {about['device']}, mean of {args.seeds} seeds of OpenCV's RANSAC")
    if not record:
        print(f"no scores are recorded in {RECORD.name}: nothing to compare with (--record writes them)")
    worse = False
    with tempfile.TemporaryDirectory() as temporary:
        run = Run(cache=args.cache or Path(temporary), progress=True, batch=args.batch)
        bench = Bench(matcher, args.data, args.pairs, args.seeds, args.own_size, run)
        for key in args.only or MEASUREMENTS:
            pairs, scores = MEASUREMENTS[key](bench)
            before = record.get(key, {})
            comparable = before.get("pairs") == pairs
            worse |= show(key, pairs, scores, before["scores"] if comparable else {})
            if before and not comparable:
                print(f"not compared: {before['pairs']} pairs were recorded")
            if args.record:  # at once: a later one may fail, or take too long
                record[key] = about | {"pairs": pairs, "scores": {k: to_json(s) for k, s in scores.items()}}
                write_json(RECORD, record)
    if worse:
        print("\nworse than recorded", file=sys.stderr)
    return int(worse and not args.record)


def show(name: str, pairs: int, scores: Scores, recorded: dict[str, Any]) -> bool:
    """Prints a table; True if something is worse than recorded."""
    rows, worse = [], False
    for key, score in scores.items():
        old = recorded.get(key)
        verdict = ""
        if old is not None:
            behind = score.worse_than(old["ours"], old["tolerance"])
            verdict, worse = ("WORSE" if behind else "ok"), worse or behind
        rows.append([
            key, f"{score.ours:.2f}", number(score.sift), number(score.goal),
            {True: "yes", False: "no", None: ""}[score.reached],
            *((f"{old['ours']:.2f}", f"{old['tolerance']:.2f}") if old else ("", "")), verdict,
        ])  # fmt: skip
    columns = ["", "ours", "SIFT", "goal", "reached", "recorded", "tolerance", ""]
    print(f"\n{Table(f'{name}: {pairs} pairs', columns, rows)}")
    if name == "megadepth":
        ours = [s.ours for s in scores.values()]
        for goal, values in GOALS.items():
            above = all(a >= b for a, b in zip(ours, values, strict=True))
            print(f"{'reached' if above else 'not yet'}  {' / '.join(f'{v:.1f}' for v in values)}  {goal}")
    return worse


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def to_json(score: Score) -> dict[str, float]:
    values = {"ours": score.ours, "tolerance": score.tolerance, "sift": score.sift}
    return {k: round(v, 3) for k, v in values.items() if v is not None}


def read_record() -> dict[str, Any]:
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}


def arguments() -> argparse.Namespace:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--data", type=Path, help="folder of megadepth_dev, oxford and scannet_sample")
    parser.add_argument(
        "--only", action="append", choices=list(MEASUREMENTS), help="may be given several times"
    )
    parser.add_argument("--pairs", type=int, help="so many of each [all]; compared only with as many")
    parser.add_argument("--seeds", type=int, default=5, help="of RANSAC, over which scores are averaged")
    parser.add_argument("--record", action="store_true", help=f"write what is measured to {RECORD.name}")
    parser.add_argument("--weights", help="a .safetensors file or hf:OWNER/REPO [the shipped]")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto", choices=["auto", "fp32", "bf16", "fp16"])
    parser.add_argument("--polish", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--own-size",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="polish at the photos' own size",
    )
    parser.add_argument("--rotate", default="auto", choices=["auto", "always", "never"])
    parser.add_argument("--batch", type=int, default=1, help="pairs of equal size matched at a time")
    parser.add_argument("--cache", type=Path, help="folder that keeps the matches [none is kept]")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"accuracy: {error}", file=sys.stderr)
        sys.exit(2)
