"""`prism match`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Optional

import typer

from prism_match.cli.options import (
    BackendOption,
    ConfigOption,
    DeviceOption,
    JsonOption,
    OutOption,
    PolishOption,
    PrecisionOption,
    RescaleOption,
    RotateOption,
    SizeOption,
    ThresholdOption,
    WeightsOption,
    make_matcher,
)
from prism_match.cli.output import busy, check_outputs, report, summary, write_results
from prism_match.errors import UserError

if TYPE_CHECKING:
    from prism_match.images import ImageLike
    from prism_match.matcher import MaskLike


def match(
    image0: Annotated[Path, typer.Argument(help="First photo.", show_default=False)],
    image1: Annotated[Path, typer.Argument(help="Second photo.", show_default=False)],
    out: OutOption = Path("prism-out"),
    size: SizeOption = None,
    threshold: ThresholdOption = None,
    max_matches: Annotated[
        Optional[int],
        typer.Option(help="Keep only so many, spread over the first photo: the surest there."),
    ] = None,
    mask0: Annotated[
        Optional[Path], typer.Option(help="Image of the first one's size; look where not 0.")
    ] = None,
    mask1: Annotated[Optional[Path], typer.Option(help="The same for the second photo.")] = None,
    geometry: Annotated[
        Literal["fundamental", "homography"],
        typer.Option(help="Model that the inliers are counted for; homography also gives an overlay."),
    ] = "fundamental",
    rotate: RotateOption = "auto",
    rescale: RescaleOption = "auto",
    polish: PolishOption = True,
    tiles: Annotated[
        bool,
        typer.Option(
            "--tiles", help="Large photos at full detail, tile by tile; very different scales, too."
        ),
    ] = False,
    memory: Annotated[
        Optional[float],
        typer.Option(help="GiB that tiles may take [as --size].", metavar="GIB", show_default=False),
    ] = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    backend: BackendOption = "torch",
    weights: WeightsOption = None,
    model_config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Match two photos; write the matches and pictures of them.

    OUT gets matches.npz, matches.png (lines from red, unsure, to green, sure), pruning.png (cells by the
    MPM that pruned them) and, with --geometry homography, overlay.png.

    \b
    Examples:
      prism match a.jpg b.jpg -o out
      prism match a.jpg b.jpg --size 1152 --threshold 0.4 --json
      prism match wall1.jpg wall2.jpg --geometry homography
      prism match aerial1.tif aerial2.tif --tiles --memory 4
    """
    from prism_match.files import writable_folder
    from prism_match.images import load_image, load_mask
    from prism_match.tiles import for_pictures

    # Before the model is loaded: what is wrong should not take seconds to be told.
    if max_matches is not None and max_matches < 1:
        raise UserError(f"max_matches must be at least 1, not {max_matches}")
    given = [path for path in (image0, image1, mask0, mask1) if path is not None]
    check_outputs(out, ("matches.png", "pruning.png", "overlay.png"), given)
    if memory is not None and not tiles:
        raise UserError("--memory is for --tiles alone")
    first: ImageLike = image0
    second: ImageLike = image1
    region0: MaskLike = mask0
    region1: MaskLike = mask1
    if not tiles:  # which may be too large to be read whole
        photo0, photo1 = load_image(image0), load_image(image1)
        first, second = photo0, photo1
        region0 = None if mask0 is None else load_mask(mask0, photo0)
        region1 = None if mask1 is None else load_mask(mask1, photo1)
    matcher = make_matcher(
        weights, model_config, device, precision, size, threshold, rotate, polish, backend,
        "auto" if tiles else None, memory, rescale,
    )  # fmt: skip
    folder = writable_folder(out)
    with busy("matching"):
        start = time.perf_counter()
        matches = matcher.match(first, second, region0, region1, details=True).filter(spread=max_matches)
        seconds = time.perf_counter() - start
    estimate = matches.estimate(geometry)
    files = write_results(matches, estimate, folder, for_pictures(matches, image0, image1) if tiles else None)
    result = summary(matches, estimate, matcher, seconds) | {"files": [str(f) for f in files]}
    report(result, as_json)
