"""`prism train-subpixel`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Optional

import typer

from prism_match.cli.options import DeviceOption
from prism_match.errors import UserError


def train_subpixel(
    out: Annotated[Path, typer.Option("-o", "--out", help="The .safetensors file to write.")],
    photos: Annotated[list[Path], typer.Option(help="Folder or tar of photos; may be given several times.")],
    minutes: Annotated[float, typer.Option(help="Budget.")] = 8.0,
    colmap: Annotated[
        Optional[list[Path]],
        typer.Option(help="COLMAP model with its images: real pairs, too; may be given several times."),
    ] = None,
    init: Annotated[Optional[Path], typer.Option(help="Weights to begin with.")] = None,
    seed: int = 0,
    device: DeviceOption = "auto",
) -> None:
    """Train the network that makes matches exact (`polish`), on photos and worlds textured with them.

    \b
    Examples:
      prism train-subpixel --photos my-photos --minutes 8 -o subpixel.safetensors
      prism train-subpixel --photos my-photos --colmap landmark/sparse -o subpixel.safetensors
    """
    from prism_match.engine import Matcher
    from prism_match.files import writable_folder
    from prism_match.matcher import find_device
    from prism_match.training.consensus import ConsensusPairs
    from prism_match.training.sources import SourceOptions, make_sources
    from prism_match.training.subpixel import CALM, SubpixelConfig
    from prism_match.training.subpixel import train_subpixel as train

    if not 0 < minutes < float("inf"):
        raise UserError(f"--minutes must be positive, not {minutes}")
    if init is not None and not init.is_file():
        raise UserError(f"{init}: no such file")
    if out.suffix != ".safetensors":
        raise UserError(f"{out}: the weights are a .safetensors file")
    config = SubpixelConfig(minutes=minutes, seed=seed)
    writable_folder(out.parent)
    logging.basicConfig(format="%(message)s")
    where = find_device(device)
    options = SourceOptions(photos=photos, worlds=True, compile=where.type == "cuda", calm=CALM)
    sources = [weighted.source for weighted in make_sources(options, where)]
    real = None
    if colmap:
        real = ConsensusPairs(colmap, Matcher(device=where), seed=seed)
        print(f"{len(real)} pairs of real photos")
    found = train(sources, out, config, where, init, real)
    print(f"{out}: median error {found['before']:.2f} px before and {found['after']:.2f} px after")
