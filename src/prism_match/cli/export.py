"""`prism export`: matches and models in the formats of other tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal, Optional

import typer

from prism_match.cli.options import ConfigOption, JsonOption, PolishOption, WeightsOption, parse_config
from prism_match.cli.output import busy, print_table
from prism_match.cli.sfm import (
    CellOption,
    ErrorOption,
    IntrinsicsOption,
    KeypointsOption,
    ModelOption,
    SharingOption,
)

export_app = typer.Typer(
    help="Write matches, and the model itself, in the formats of other tools.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@export_app.command("colmap")
def colmap(
    matches: Annotated[Path, typer.Argument(help="A matches.h5.", show_default=False)],
    out: Annotated[Path, typer.Option("-o", "--out", help="The database, new or existing.")],
    images: Annotated[
        Optional[Path],
        typer.Option(
            help="Folder of the photos, for focal lengths and turns in their EXIF, and to polish by."
        ),
    ] = None,
    cameras: SharingOption = "auto",
    camera_model: ModelOption = "SIMPLE_RADIAL",
    intrinsics: IntrinsicsOption = None,
    cell: CellOption = 1.5,
    max_error: ErrorOption = 1.5,
    max_keypoints: KeypointsOption = 8192,
    polish: PolishOption = True,
    verify: Annotated[bool, typer.Option("--verify", help="Also check each pair by its geometry.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace all keypoints and matches in the database.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write matches into a COLMAP database, with keypoints shared by all pairs of an image.

    Images that the database knows by name keep their cameras; the others are added.

    \b
    Examples:
      prism export colmap out/matches.h5 -o database.db --images photos
      prism export colmap out/matches.h5 -o project/database.db --verify
    """
    from prism_match.export.colmap import export_colmap
    from prism_match.maps.cameras import CameraOptions
    from prism_match.maps.tracks import TrackOptions

    counts = export_colmap(
        matches,
        out,
        images=images,
        tracks=TrackOptions(cell, max_error, max_keypoints),
        cameras=CameraOptions(cameras, camera_model, intrinsics),
        polish=polish,
        verify=verify,
        overwrite=overwrite,
    )
    if as_json:
        print(json.dumps(counts, indent=2))
    else:
        print_table({**counts, "written": out})


@export_app.command("hloc")
def hloc(
    matches: Annotated[
        list[Path],
        typer.Argument(help="matches.h5 of prism sfm, or files of prism match.", show_default=False),
    ],
    out: Annotated[
        Path, typer.Option("-o", "--out", help="Folder for features.h5, matches.h5, pairs.txt.")
    ] = Path("prism-hloc"),
    images: Annotated[
        Optional[Path], typer.Option(help="Folder that names are told from [the one all images are in].")
    ] = None,
    cell: CellOption = 1.5,
    max_error: ErrorOption = 1.5,
    max_keypoints: KeypointsOption = 8192,
) -> None:
    """Write matches in hloc's layout.

    features.h5 holds key points that the pairs of an image share, matches.h5 the matches between them and
    beside them those of each pair as they were found (hloc's layout for dense matchers), pairs.txt the
    pairs.

    \b
    Examples:
      prism export hloc reconstruction/matches.h5 -o outputs
      prism export hloc ab/matches.npz bc/matches.npz --images photos -o outputs
    """
    from prism_match.export.hloc import export_hloc
    from prism_match.maps.tracks import TrackOptions

    counts = export_hloc(matches, out, images, TrackOptions(cell, max_error, max_keypoints))
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    print(f"written  {out}: features.h5, matches.h5, pairs.txt")


@export_app.command("onnx")
def onnx(
    out: Annotated[Path, typer.Option("-o", "--out", help="The file to write.")] = Path("prism.onnx"),
    precision: Annotated[
        Literal["fp32", "fp16"], typer.Option(help="Of weights and maps; images and matches are fp32 always.")
    ] = "fp32",
    external_weights: Annotated[
        bool, typer.Option("--external-weights", help="Weights beside each file, in FILE.data.")
    ] = False,
    static: Annotated[
        Optional[tuple[int, int]],
        typer.Option(metavar="H W", help="Both images of this size, for runtimes that need to know it."),
    ] = None,
    parts: Annotated[
        bool,
        typer.Option("--parts", help="Backbone and matcher also as files of their own, for one-to-many."),
    ] = False,
    polish: Annotated[
        bool, typer.Option("--polish/--no-polish", help="Also the network that makes matches exact.")
    ] = True,
    weights: WeightsOption = None,
    model_config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the model as ONNX, for runtimes without PyTorch.

    One file takes two gray images of any sizes and gives their matches. Cells that are pruned are really
    left out; with --static they are masked instead. NAME-polish.onnx makes the matches exact.
    examples/onnx_only.py runs them with numpy, OpenCV and onnxruntime alone.

    \b
    Examples:
      prism export onnx -o prism.onnx
      prism export onnx -o prism.onnx --precision fp16 --external-weights
      prism export onnx -o prism.onnx --parts
      prism export onnx -o prism-480x640.onnx --static 480 640
    """
    from prism_match.export.onnx import OnnxOptions, export_onnx

    options = OnnxOptions(precision, external_weights, static, parts, polish)
    with busy("tracing the model"):
        files = export_onnx(out, weights, options, parse_config(model_config))
    sizes = {str(file): file.stat().st_size for file in files}
    if as_json:
        print(json.dumps({"files": sizes, "precision": precision}, indent=2))
    else:
        print_table({name: f"{size / 2**20:.1f} MiB" for name, size in sizes.items()})
