"""`prism calibrate`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Optional

import typer

from prism_match.cli.options import DeviceOption
from prism_match.errors import UserError


def calibrate(
    out: Annotated[Path, typer.Option("-o", "--out", help="The .json file to write.")],
    photos: Annotated[list[Path], typer.Option(help="Folder or tar of photos; may be given several times.")],
    weights: Annotated[Optional[str], typer.Option(help="Weights to calibrate. [the shipped ones]")] = None,
    pairs: Annotated[int, typer.Option(min=8, help="Pairs to draw.")] = 200,
    device: DeviceOption = "auto",
) -> None:
    """Find out how sure and how exact matches of given weights are, on photos and worlds textured with them.

    Example: prism calibrate --weights mine.safetensors --photos my-photos -o mine.json
    """
    from prism_match.files import writable_folder
    from prism_match.matcher import PairMatcher
    from prism_match.training.calibration import CalibrationConfig
    from prism_match.training.calibration import calibrate as fit
    from prism_match.training.sources import SourceOptions, make_sources

    if out.suffix != ".json":
        raise UserError(f"{out}: a calibration is a .json file")
    writable_folder(out.parent)
    logging.basicConfig(format="%(message)s")
    matcher = PairMatcher(weights, device=device, rescale="never")
    options = SourceOptions(photos=photos, worlds=True, compile=False)
    sources = [weighted.source for weighted in make_sources(options, matcher.device)]
    found = fit(matcher, sources, CalibrationConfig(pairs=pairs))
    found.save(out)
    for name in ("matches", "points"):
        told = found.fitted[name]
        print(
            f"{name}: {told['count']}, {100 * told['right']:.1f} % of them right; "
            f"expected calibration error {told['expected_calibration_error']:.3f} on pairs held out"
        )
