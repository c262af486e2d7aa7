"""`prism eval`: the benchmarks from the command line."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from prism_match.cli.options import (
    WEIGHTS_HELP,
    AddressOption,
    BatchOption,
    DeviceOption,
    EngineOption,
    JsonFileOption,
    PolishOption,
    PrecisionOption,
    RescaleOption,
    RotateOption,
    make_cluster,
)
from prism_match.config import Backend, check_seed
from prism_match.errors import UserError
from prism_match.evaluation import Benchmark

LOCALIZATION: tuple[Benchmark, ...] = ("localization", "aachen", "inloc")
LARGEST = 8192  # pixels of a side; images are enlarged to what is asked for, so that more can fill any memory


def evaluate(
    benchmark: Annotated[Benchmark, typer.Argument(help="What to measure.", show_default=False)],
    data: Annotated[Path, typer.Option(help="Root of the benchmark's data; for pairs the text file.")],
    method: Annotated[str, typer.Option(help="prism, sift, or module:function of your own.")] = "prism",
    size: Annotated[
        Optional[int], typer.Option(help="Side to resize to, in pixels [the benchmark's].")
    ] = None,
    ransac: Annotated[Backend, typer.Option(help="Back end of the geometry.")] = "opencv",
    threshold: Annotated[
        Optional[float], typer.Option(help="Of RANSAC, in pixels [opencv 0.5, poselib 1.5; homography 3].")
    ] = None,
    pairs: Annotated[
        Optional[int], typer.Option(help="Only so many, chosen by the seed [all; rgbd 100].")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same numbers.")] = 0,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    rotate: RotateOption = "auto",
    rescale: RescaleOption = "auto",
    polish: PolishOption = True,
    own_size: Annotated[
        bool,
        typer.Option(
            "--own-size/--no-own-size",
            help="Polish at the size that photos have, as `prism match` does, not at the one matched.",
        ),
    ] = True,
    tiles: Annotated[
        bool, typer.Option("--tiles", help="Match large photos, and very different scales, tile by tile.")
    ] = False,
    batch: BatchOption = 1,
    confidence: Annotated[
        Optional[float], typer.Option(help="Least confidence of a match [the model's theta_c].")
    ] = None,
    weights: Annotated[Optional[list[str]], typer.Option(help=f"{WEIGHTS_HELP}; ablation: several.")] = None,
    model_config: Annotated[
        Optional[list[str]], typer.Option(help="A preset or a .toml/.json file; ablation: several.")
    ] = None,
    top: Annotated[Optional[int], typer.Option(help="Localization: map photos for each query [5].")] = None,
    within: Annotated[
        Optional[list[str]],
        typer.Option(help="Localization: METRES,DEGREES to count poses by; several [0.25,2 0.5,5 1,10]."),
    ] = None,
    pair_list: Annotated[
        Optional[Path], typer.Option(help="Localization: file of queries and their map photos [retrieval].")
    ] = None,
    snap: Annotated[
        Optional[float],
        typer.Option(help="Localization: most pixels from match to map point [1.2 % of the side]."),
    ] = None,
    depth_scale: Annotated[
        float, typer.Option(help="Localization: what depth maps have for a metre.")
    ] = 1000.0,
    engine: EngineOption = "local",
    address: AddressOption = None,
    json_file: JsonFileOption = None,
    out: Annotated[
        Optional[Path],
        typer.Option("-o", "--out", help="Folder for the report and pictures; a run goes on where it was."),
    ] = None,
    cache: Annotated[
        Optional[Path], typer.Option(help="Folder that keeps the matches, for scoring them again.")
    ] = None,
) -> None:
    """Measure a matcher by one of the paper's protocols and print it beside the published numbers.

    \b
    Examples:
      prism eval megadepth1500 --data megadepth --size 1152 --out results
      prism eval megadepth1500 --data megadepth --cache matches --ransac poselib
      prism eval hpatches --data hpatches-sequences-release --method sift
      prism eval pairs --data pairs_with_gt.txt --method my_module:match
      prism eval rgbd --data rgbd-sequence --pairs 200
      prism eval localization --data rgbd-sequence --top 3 --within 0.05,5 --within 0.25,2
      prism eval aachen --data aachen_v1.1 --pair-list pairs-query-netvlad50.txt --out results
      prism eval ablation --data megadepth --weights full.safetensors --weights no-pruning.safetensors
    """
    from prism_match.evaluation.benchmarks import BENCHMARKS
    from prism_match.evaluation.options import Options
    from prism_match.evaluation.runner import Run
    from prism_match.files import writable_folder, write_json

    if not data.exists():
        raise UserError(f"{data}: no such file or folder")
    if size is not None and not 32 <= size <= LARGEST:
        raise UserError(f"--size must be from 32 to {LARGEST} pixels, not {size}")
    check_seed(seed)
    of_localization = {"--top": top, "--within": within, "--pair-list": pair_list, "--snap": snap}
    for name, value in of_localization.items():
        if value is not None and benchmark not in LOCALIZATION:
            raise UserError(f"{name} is for {', '.join(LOCALIZATION)} alone")
    if confidence is not None and method != "prism":
        raise UserError("--confidence is for --method prism alone")
    if json_file is not None and json_file.is_dir():
        raise UserError(f"{json_file}: is a folder; --json is a file")
    for folder in (out, cache, json_file.parent if json_file else None):
        if folder is not None:
            writable_folder(folder)
    cluster = make_cluster(engine, address, device)
    options = Options(
        data=data, method=method, size=size, ransac=ransac, threshold=threshold, pairs=pairs,
        seed=seed, weights=tuple(weights or ()), configs=tuple(model_config or ()), device=device,
        precision=precision, confidence=confidence, rotate=rotate, rescale=rescale, polish=polish,
        own_size=own_size, tiles=tiles,
        top=top, within=tuple(map(parse_limits, within or ())), pair_list=pair_list, snap=snap,
        depth_scale=depth_scale,
        run=Run(cache=cache, out=out, progress=True, batch=batch, cluster=cluster),
    )  # fmt: skip
    report = BENCHMARKS[benchmark](options)
    print(report)
    if json_file is not None:
        write_json(json_file, report.summary)
    if out is not None:
        written = report.write(out, shlex.join(["prism", *sys.argv[1:]]))
        print(f"\nwritten  {out}: " + ", ".join(path.name for path in written))


def parse_limits(text: str) -> tuple[float, float]:
    """METRES,DEGREES"""
    try:
        metres, degrees = map(float, text.split(","))
    except ValueError:
        metres = degrees = -1.0
    if not (metres > 0 and degrees > 0):
        raise UserError(f"--within is METRES,DEGREES, such as 0.25,2, not {text!r}")
    return metres, degrees
