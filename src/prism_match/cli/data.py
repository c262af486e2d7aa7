"""`prism data`: what prepares or shows data to train on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Optional

import typer

from prism_match.cli.options import DeviceOption
from prism_match.errors import UserError

data = typer.Typer(help="Prepare training data and look at it.", no_args_is_help=True)

PhotosOption = Annotated[
    Optional[list[Path]], typer.Option(help="Folder, tar or file of photos; may be given several times.")
]
WorldsOption = Annotated[bool, typer.Option("--worlds", help="Procedural worlds textured with the photos.")]
ColmapOption = Annotated[
    Optional[list[Path]], typer.Option(help="COLMAP model with images and depth (see `prism data depth`).")
]
MegaDepthOption = Annotated[Optional[Path], typer.Option(help="MegaDepth (see `prism data megadepth`).")]
RgbdOption = Annotated[Optional[list[Path]], typer.Option(help="RGB-D sequence with poses, or ScanNet.")]


@data.command()
def preview(
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for the pictures.")] = Path("preview"),
    photos: PhotosOption = None,
    worlds: WorldsOption = False,
    colmap: ColmapOption = None,
    megadepth: MegaDepthOption = None,
    rgbd: RgbdOption = None,
    pairs: Annotated[int, typer.Option(help="Pairs of each source.")] = 16,
    size: Annotated[int, typer.Option(help="Side of the images, a multiple of 32.")] = 320,
    seed: int = 0,
    device: DeviceOption = "auto",
) -> None:
    """Draw pairs of each source with their true matches, one picture per source."""
    import torch

    from prism_match.files import writable_folder
    from prism_match.images import write_png
    from prism_match.matcher import find_device
    from prism_match.training.data.preview import preview as draw
    from prism_match.training.sources import SourceOptions, make_sources

    if size < 32 or size % 32:
        raise UserError(f"--size must be a multiple of 32, not {size}")
    if pairs < 1:
        raise UserError(f"--pairs must be at least 1, not {pairs}")
    logging.basicConfig(format="%(message)s")
    where = find_device(device)
    options = SourceOptions(photos or (), worlds, colmap or (), megadepth, rgbd or ())
    sources = [weighted.source for weighted in make_sources(options, where)]
    folder = writable_folder(out)
    for source in sources:
        generator = torch.Generator(getattr(source, "device", "cpu")).manual_seed(seed)
        path = folder / f"{source.name}.png"
        write_png(path, draw(source.sample(pairs, size, generator)))
        print(path)


@data.command()
def depth(
    model: Annotated[Path, typer.Argument(help="COLMAP model, with `images` in it or beside it.")],
    images: Annotated[Optional[Path], typer.Option(help="The photos, if they are elsewhere.")] = None,
    out: Annotated[Optional[Path], typer.Option("-o", "--out", help="Folder of the maps [depth].")] = None,
    device: DeviceOption = "auto",
) -> None:
    """Make depth maps for a posed photo collection, so that it can be trained on."""
    from prism_match.matcher import find_device
    from prism_match.training.depth import make_depth
    from prism_match.training.sources import colmap_folders

    logging.basicConfig(format="%(message)s")
    if images is None or out is None:
        found = colmap_folders(model)
        images, out = images or found[0], out or found[1]
    check = make_depth(model, images, out, device=find_device(device))
    print(
        f"{check.maps} maps in {out}: {check.kept:.0%} of the pixels kept, median error"
        f" {check.median_error:.2%}, {check.within_2_percent:.0%} of the points within 2 %"
    )


@data.command()
def megadepth(
    root: Annotated[Path, typer.Argument(help="Where MegaDepth v1 and its SfM models are unpacked.")],
    out: Annotated[Optional[Path], typer.Option("-o", "--out", help="The index [ROOT/index].")] = None,
) -> None:
    """Build the index of MegaDepth's pairs from the raw release."""
    from prism_match.maps.colmap import undistort
    from prism_match.training.data.megadepth import build_index

    logging.basicConfig(format="%(message)s")
    written = build_index(root, out or root / "index", undistort=undistort)
    print(f"{len(written)} scenes in {out or root / 'index'}")
