"""`prism bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional, get_args

import typer

from prism_match.cli.options import ConfigOption, DeviceOption, WeightsOption, parse_config
from prism_match.config import Precision
from prism_match.errors import UserError

SMALLEST, LARGEST = 64, 8192  # pixels of the longer side


def bench(
    image0: Annotated[
        Optional[Path], typer.Argument(help="First photo [the bundled pair].", show_default=False)
    ] = None,
    image1: Annotated[Optional[Path], typer.Argument(help="Second photo.", show_default=False)] = None,
    sizes: Annotated[
        Optional[str], typer.Option(help="Longer sides in pixels [640,832,1152,1600; --range 320 to 4096].")
    ] = None,
    precisions: Annotated[
        Optional[str],
        typer.Option(help="Of auto, fp32, bf16, fp16; several by commas [auto; with onnxruntime fp32]."),
    ] = None,
    device: DeviceOption = "auto",
    peers: Annotated[
        bool,
        typer.Option("--peers/--no-peers", help="Also time LoFTR, EfficientLoFTR, LightGlue if installed."),
    ] = True,
    repeats: Annotated[Optional[int], typer.Option(help="Runs of each [20 on a GPU, 3 on a CPU].")] = None,
    batch: Annotated[
        Optional[int], typer.Option(help="Pairs from files matched at a time [8 on a GPU, 2 on a CPU].")
    ] = None,
    whole_range: Annotated[
        bool, typer.Option("--range", help="The models alone, time and memory from small to large images.")
    ] = False,
    onnx: Annotated[
        Optional[Path], typer.Option(help="Also time this file of `prism export onnx`, beside fp32 on a CPU.")
    ] = None,
    onnx_backend: Annotated[
        bool,
        typer.Option(
            "--onnx-backend", help="Also time the matcher with --backend onnx, beside fp32 on a CPU."
        ),
    ] = False,
    weights: WeightsOption = None,
    model_config: ConfigOption = None,
    json_file: Annotated[Optional[Path], typer.Option("--json", help="Write all numbers here.")] = None,
    plot: Annotated[
        Optional[Path], typer.Option(help="Draw time over pixels: .png, .svg or .pdf (needs matplotlib).")
    ] = None,
) -> None:
    """Measure how long matching takes on this machine, stage by stage, and with how much memory.

    \b
    Examples:
      prism bench
      prism bench a.jpg b.jpg --sizes 832,1152 --precisions fp32,bf16 --json speed.json
      prism bench --onnx prism.onnx --sizes 640 --no-peers
      prism bench --onnx-backend --sizes 640 --no-peers
      prism bench --range --no-peers --plot speed.png
    """
    from prism_match.evaluation.report import Report
    from prism_match.evaluation.speed import RANGE, SIZES, SpeedOptions, check_plot, draw, measure
    from prism_match.files import writable_folder, write_json

    if image0 is not None and image1 is None:
        raise UserError(f"{image0}: a second photo is needed, or none at all")
    for name, value in (("--repeats", repeats), ("--batch", batch)):
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, not {value}")
    for option, file in (("--json", json_file), ("--plot", plot)):
        if file is not None:
            if file.is_dir():
                raise UserError(f"{file}: is a folder; {option} is a file")
            writable_folder(file.parent)
    if plot is not None:
        check_plot(plot)
    usual = "fp32" if onnx or onnx_backend else "auto"
    options = SpeedOptions(
        photos=(image0, image1) if image0 is not None and image1 is not None else None,
        sizes=parse_sizes(sizes) if sizes is not None else RANGE if whole_range else SIZES,
        precisions=parse_precisions(usual if precisions is None else precisions),
        device=device, peers=peers, repeats=repeats or 0, batch=batch or 0, whole_range=whole_range,
        onnx=onnx, onnx_backend=onnx_backend, weights=weights, config=parse_config(model_config),
    )  # fmt: skip

    def keep(so_far: Report) -> None:
        if json_file is not None:
            write_json(json_file, so_far.summary)

    report = measure(options, keep)
    print(report)
    if plot is not None:
        draw(report.summary, plot)


def parse_sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise UserError(f"--sizes is a list of pixels, such as 640,832, not {text!r}") from error
    for size in sizes:
        if not SMALLEST <= size <= LARGEST:
            raise UserError(f"--sizes must be from {SMALLEST} to {LARGEST} pixels, not {size}")
    return tuple(dict.fromkeys(sizes))


def parse_precisions(text: str) -> tuple[Precision, ...]:
    words = tuple(dict.fromkeys(text.split(",")))
    for word in words:
        if word not in get_args(Precision):
            raise UserError(f"--precisions must be of {', '.join(get_args(Precision))}, not {word!r}")
    return words  # type: ignore[return-value]
