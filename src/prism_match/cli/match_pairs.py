"""`prism match-pairs`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from prism_match.cli.options import (
    AddressOption,
    BackendOption,
    ConfigOption,
    DeviceOption,
    EngineOption,
    JsonFileOption,
    PolishOption,
    PrecisionOption,
    RescaleOption,
    RotateOption,
    SizeOption,
    ThresholdOption,
    WeightsOption,
    make_cluster,
    parse_config,
)
from prism_match.cli.output import print_table
from prism_match.errors import UserError

SHOWN = 20  # lines of what was skipped; the file has all of them


def match_pairs_command(
    pairs: Annotated[Path, typer.Argument(help="Text file, two names of photos a line.", show_default=False)],
    images: Annotated[
        str, typer.Option(help="Folder that the names are told from, or an address (s3://, gs://, ...).")
    ],
    out: Annotated[
        str, typer.Option("-o", "--out", help="Folder for the matches, or an address; a run goes on there.")
    ],
    method: Annotated[str, typer.Option(help="prism, sift, or module:function of your own.")] = "prism",
    engine: EngineOption = "local",
    address: AddressOption = None,
    size: SizeOption = None,
    threshold: ThresholdOption = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    backend: BackendOption = "torch",
    batch: Annotated[Optional[int], typer.Option(help="Pairs matched at a time [GPU 8, CPU 1].")] = None,
    threads: Annotated[
        Optional[int],
        typer.Option(help="Of a worker without GPU; as many give the same bits [local: all cores, ray: 1]."),
    ] = None,
    shard: Annotated[float, typer.Option(help="Seconds of work between two files of the store.")] = 60.0,
    weights: WeightsOption = None,
    rotate: RotateOption = "never",
    rescale: RescaleOption = "never",
    polish: PolishOption = True,
    model_config: ConfigOption = None,
    json_file: JsonFileOption = None,
) -> None:
    """Match a list of pairs, of any length, here or on a Ray cluster.

    OUT gets the matches in files of about a minute's work each, which are there whole or not at all. Start it
    again after a crash, or with a longer list: what is there is not done again. `MatchStore(OUT)` reads it,
    and so do `prism sfm --matches` and `prism export`. OUT/summary.json names every photo and pair that
    was skipped. Exit code 1: some pairs failed though their photos are fine.

    \b
    Examples:
      prism match-pairs pairs.txt --images photos -o matches
      prism match-pairs pairs.txt --images photos -o matches --engine ray
      prism match-pairs pairs.txt --images s3://city/photos -o s3://city/matches --engine ray --address auto
    """
    from prism_match.engine.folders import open_folder
    from prism_match.engine.match_pairs import PairList, match_pairs
    from prism_match.engine.matcher import MatcherSettings
    from prism_match.engine.methods import as_method, prism_settings
    from prism_match.engine.photos import Resize
    from prism_match.engine.shards import Job
    from prism_match.files import writable_folder, write_json
    from prism_match.matcher import DEFAULT_SIZE, check_options
    from prism_match.weights import weights_info

    side = DEFAULT_SIZE if size is None else size
    check_options(side, threshold, None, rotate, rescale)
    for name, number in (("batch", batch), ("threads", threads)):
        if number is not None and number < 1:
            raise UserError(f"--{name} must be at least 1, not {number}")
    if not shard > 0:
        raise UserError(f"--shard must be positive, not {shard:g}")
    cluster = make_cluster(engine, address, device, threads=threads or 1, shard_seconds=shard)
    photos = open_folder(images).address
    if "://" not in photos and not Path(photos).is_dir():
        raise UserError(f"{images}: no such folder of images")
    if json_file is not None:
        writable_folder(json_file.parent)
    listed = PairList.read(pairs)
    resizing = Resize.largest(side)
    matcher = ""
    if method == "prism":
        # The model is loaded by those who match: here it is enough to know which one it is.
        config = parse_config(model_config)
        info = weights_info(weights, config)
        settings = prism_settings(info, threshold, None, rotate, rescale, polish)
        matcher = MatcherSettings(
            weights, None if config is None else config.to_dict(), device, precision, side, threshold,
            rotate=rotate, rescale=rescale, polish=polish, backend=backend,
        ).to_json()  # fmt: skip
        if not info.trained:
            print("prism: the weights are untrained (random): the matches mean nothing yet", file=sys.stderr)
    else:
        settings = as_method(method).settings
    job = Job(
        method, matcher, resizing, json.loads(json.dumps(settings | {"resize": vars(resizing)})),
        images=photos, store=open_folder(out).address, batch=batch,
        threads=threads if cluster is None else cluster.threads, python_path=str(Path.cwd()),
    )  # fmt: skip
    summary = match_pairs(listed, job, cluster, shard, progress=True)
    told = [f"skipped: {reason}" for reason in summary.photos.values()]
    told += [f"failed: {a} {b}: {reason}" for a, b, reason in summary.failed]
    told += [f"damaged, and done again: {name}" for name in summary.damaged]
    for line in told[:SHOWN]:
        print(f"prism: {line}", file=sys.stderr)
    if len(told) > SHOWN:
        print(f"prism: and {len(told) - SHOWN} more: see {out}/summary.json", file=sys.stderr)
    rate = f" ({summary.matched / summary.seconds:.1f} a second)" if summary.matched else ""
    print_table(
        {
            "pairs": summary.pairs,
            "there before": summary.there,
            "matched": f"{summary.matched}{rate}",
            "skipped": f"{len(summary.skipped)}, of {len(summary.photos)} photos",
            "failed": len(summary.failed),
            "written": out,
        }
    )
    if json_file is not None:
        write_json(json_file, summary.to_dict())
    if summary.failed:
        print("prism: start it again to try what failed once more", file=sys.stderr)
        raise typer.Exit(1)
