"""`prism stitch`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from prism_match.cli.options import (
    ConfigOption,
    DeviceOption,
    JsonOption,
    PrecisionOption,
    RescaleOption,
    RotateOption,
    SizeOption,
    ThresholdOption,
    WeightsOption,
    make_matcher,
)
from prism_match.cli.output import print_table
from prism_match.config import Projection
from prism_match.errors import UserError


def stitch_command(
    images: Annotated[Path, typer.Argument(help="Folder of photos.", show_default=False)],
    out: Annotated[Path, typer.Option("-o", "--out", help="The panorama: a .jpg, .png or .tif.")] = Path(
        "panorama.jpg"
    ),
    projection: Annotated[
        Projection, typer.Option(help="auto: plane, cylindrical or spherical by how wide it is.")
    ] = "auto",
    megapixels: Annotated[float, typer.Option(help="Of the panorama, at most.")] = 50.0,
    size: SizeOption = None,
    threshold: ThresholdOption = None,
    rotate: RotateOption = "never",
    rescale: RescaleOption = "never",
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    weights: WeightsOption = None,
    model_config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a panorama of photos that were taken from one place.

    Photos in any order; those that do not belong to the largest group are named and left out.

    \b
    Examples:
      prism stitch photos -o panorama.jpg
      prism stitch photos -o panorama.png --projection plane --megapixels 12
    """
    from prism_match.files import writable_folder
    from prism_match.maps.panorama import StitchOptions, check_suffix, stitch, write_panorama
    from prism_match.maps.reconstruction import find_images

    options = StitchOptions(projection, megapixels)
    check_suffix(out)
    files = find_images(images, out)
    if out.exists() and images.resolve() in out.resolve().parents:
        raise UserError(f"{out}: is there already, among the photos; remove it, or choose another --out")
    writable_folder(out.parent)
    panorama = stitch(
        files, options,
        lambda: make_matcher(
            weights, model_config, device, precision, size, threshold, rotate, rescale=rescale
        ),
        progress=not as_json,
    )  # fmt: skip
    write_panorama(out, panorama.pixels)
    for name, reason in panorama.left_out.items():
        print(f"prism: left out: {name}: {reason}", file=sys.stderr)
    height, width = panorama.pixels.shape[:2]
    across, down = panorama.field_of_view
    result: dict[str, Any] = {
        "photos": sorted(panorama.cameras),
        "left_out": panorama.left_out,
        "projection": panorama.projection,
        "field_of_view": [round(across, 2), round(down, 2)],
        "error_px": round(panorama.error, 4),
        "size": [width, height],
        "file": str(out),
    }
    if as_json:
        print(json.dumps(result, indent=2))
        return
    print_table({
        "photos": f"{len(panorama.cameras)} of {len(files)}",
        "view": f"{across:.0f} x {down:.0f} degrees, {panorama.projection}",
        "error": f"{panorama.error:.2f} px as matched, in the median: where two photos put the same point",
        "written": f"{out} ({width}x{height})",
    })  # fmt: skip
