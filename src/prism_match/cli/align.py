"""`prism align`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from prism_match.cli.options import (
    ConfigOption,
    DeviceOption,
    JsonOption,
    OutOption,
    PrecisionOption,
    RescaleOption,
    RotateOption,
    SizeOption,
    ThresholdOption,
    WeightsOption,
    make_matcher,
)
from prism_match.cli.output import busy, check_outputs, print_table
from prism_match.config import AlignModel


def align_command(
    image0: Annotated[Path, typer.Argument(help="The picture that stays.", show_default=False)],
    image1: Annotated[Path, typer.Argument(help="The picture that is brought onto it.", show_default=False)],
    out: OutOption = Path("aligned"),
    model: Annotated[
        Optional[AlignModel], typer.Option(help="Instead of the simplest one that explains the matches.")
    ] = None,
    size: SizeOption = None,
    threshold: ThresholdOption = None,
    rotate: RotateOption = "auto",
    rescale: RescaleOption = "auto",
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    weights: WeightsOption = None,
    model_config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring the second picture onto the first.

    By a similarity, a homography or a local warp: the simplest that explains the matches. OUT gets
    aligned.png (aligned.tif where either is georeferenced), overlay.png (cyan and red where the two differ),
    difference.png (red: brighter, blue: darker), residuals.csv and alignment.json.

    \b
    Examples:
      prism align before.jpg after.jpg -o out
      prism align map.tif drone.jpg -o out            the place on the ground is kept (extra: geo)
      prism align page.png photo.jpg --model homography --json
    """
    from prism_match.alignment import align, check_sides
    from prism_match.files import writable_folder
    from prism_match.rasters import open_picture

    # Before the model is loaded: what is wrong should not take seconds to be told.
    first, second = open_picture(image0).image, open_picture(image1).image
    check_sides(first.size, second.size)
    check_outputs(out, ("aligned.png", "aligned.tif", "overlay.png", "difference.png"), (image0, image1))
    folder = writable_folder(out)
    matcher = make_matcher(weights, model_config, device, precision, size, threshold, rotate, rescale=rescale)
    with busy("aligning"):
        start = time.perf_counter()
        alignment = align(first, second, matcher=matcher, model=model)
        seconds = time.perf_counter() - start
        files = alignment.save(folder)
    result: dict[str, Any] = alignment.summary() | {
        "seconds": round(seconds, 3),
        "files": [str(file) for file in files],
    }
    if as_json:
        print(json.dumps(result, indent=2))
        return
    print_table({
        "model": result["reason"],
        "matches": f"{result['agree']} of {result['matches']} agree",
        "residual": f"{result['median_residual_px']:.2f} px in the median",
        "noise": f"{result['noise_px']:.2f} px: what matches differ by from their neighbours",
        "covered": f"{100 * result['covered']:.0f} % of the first picture",
        "time": f"{seconds:.2f} s",
        "written": ", ".join(result["files"]),
    })  # fmt: skip
