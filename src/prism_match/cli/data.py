"""`prism data`: what prepares or shows data to train on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from prism_match.cli.options import (
    BackendOption,
    DeviceOption,
    PrecisionOption,
    ThresholdOption,
    WeightsOption,
    make_matcher,
)
from prism_match.cli.output import print_table
from prism_match.cli.sfm import (
    IntrinsicsOption,
    MapperOption,
    ModelOption,
    NeighboursOption,
    PairsAtOnceOption,
    PairsOption,
    SharingOption,
    StoreOption,
    ThreadsOption,
)
from prism_match.errors import UserError

if TYPE_CHECKING:
    from prism_match.training.depth import DepthCheck

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
    preset: Annotated[
        Optional[str], typer.Option(help="A TOML file of `prism train`, for its [worlds].")
    ] = None,
    seed: int = 0,
    device: DeviceOption = "auto",
) -> None:
    """Draw pairs of each source with their true matches, one picture per source."""
    import torch

    from prism_match.config import check_seed
    from prism_match.files import writable_folder
    from prism_match.images import write_png
    from prism_match.matcher import find_device
    from prism_match.training.config import load_train_config
    from prism_match.training.data.preview import preview as draw
    from prism_match.training.sources import SourceOptions, make_sources

    if size < 32 or size % 32:
        raise UserError(f"--size must be a multiple of 32, not {size}")
    if pairs < 1:
        raise UserError(f"--pairs must be at least 1, not {pairs}")
    check_seed(seed)
    logging.basicConfig(format="%(message)s")
    where = find_device(device)
    variety = load_train_config(preset or "quick").worlds
    options = SourceOptions(photos or (), worlds, colmap or (), megadepth, rgbd or (), variety=variety)
    sources = [weighted.source for weighted in make_sources(options, where)]
    folder = writable_folder(out)
    names: list[str] = []  # sequences in different folders may have the same name
    for source in sources:
        generator = torch.Generator(getattr(source, "device", "cpu")).manual_seed(seed)
        names.append(source.name)
        again = names.count(source.name)
        path = folder / (f"{source.name}.png" if again == 1 else f"{source.name}-{again}.png")
        write_png(path, draw(source.sample(pairs, size, generator)))
        print(path)


@data.command()
def depth(
    model: Annotated[Path, typer.Argument(help="COLMAP model, with `images` in it or beside it.")],
    images: Annotated[Optional[Path], typer.Option(help="The photos, if they are elsewhere.")] = None,
    out: Annotated[Optional[Path], typer.Option("-o", "--out", help="Folder of the maps [depth].")] = None,
    device: DeviceOption = "auto",
) -> None:
    """Make depth maps for a posed photo collection, so that it can be trained on.

    Example: prism data depth landmark/sparse
    """
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
def collect(
    photos: Annotated[Path, typer.Argument(help="Folder of photos, with folders in it or not.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The collection; a run goes on where it was.")],
    size: Annotated[int, typer.Option(help="Longer side of its photos, at most, in pixels.")] = 720,
    min_points: Annotated[int, typer.Option(help="Leave out photos that see fewer points.")] = 50,
    max_angle: Annotated[
        float, typer.Option(help="Leave out pairs that contradict the others by more degrees.")
    ] = 10.0,
    mapper: MapperOption = "global",
    pairs: PairsOption = "auto",
    neighbours: NeighboursOption = 20,
    cameras: SharingOption = "auto",
    camera_model: ModelOption = "SIMPLE_RADIAL",
    intrinsics: IntrinsicsOption = None,
    matches: StoreOption = None,
    match_size: Annotated[
        Optional[int], typer.Option(help="Longer side to match at, in pixels [832].")
    ] = None,
    threshold: ThresholdOption = None,
    weights: WeightsOption = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    backend: BackendOption = "torch",
    batch: PairsAtOnceOption = None,
    threads: ThreadsOption = -1,
) -> None:
    """Make a collection to train on of a folder of photos, and nothing else (extra: sfm).

    OUT gets images, sparse and depth, for `prism train --colmap OUT`, report.md with pictures, and
    collection.json, which has the reason for each photo and pair that was left out.

    \b
    Examples:
      prism data collect holiday -o square
      prism data collect frames -o walk --pairs sequential --cameras shared --mapper incremental
      prism data collect holiday -o square --matches out/matches.h5
    """
    from prism_match.maps.cameras import CameraOptions
    from prism_match.maps.collection import CollectOptions
    from prism_match.maps.collection import collect as collect_photos
    from prism_match.maps.reconstruction import PairOptions, SfmOptions
    from prism_match.matcher import find_device
    from prism_match.training.depth import make_depth

    logging.basicConfig(format="%(message)s")
    where = find_device(device)
    sfm = SfmOptions(
        pairs=PairOptions(pairs, neighbours=neighbours),
        cameras=CameraOptions(cameras, camera_model, intrinsics),
        mapper=mapper,
        matches=matches,
        batch_size=batch,
        threads=threads,
        device=device,
    )
    options = CollectOptions(sfm, size, min_points, max_angle=max_angle)

    def load_matcher() -> Any:
        return make_matcher(weights, None, device, precision, match_size, threshold, "never", backend=backend)

    def sweep(model: Path, images: Path, maps: Path) -> DepthCheck:
        return make_depth(model, images, maps, device=where)

    result = collect_photos(photos, out, options, load_matcher, sweep, progress=True)
    print_table(
        {
            "kept": f"{result['kept']} of {len(result['photos'])} photos",
            "doubtful": f"{len(result['pairs_left_out'])} of {result['verified_pairs']} pairs",
            "points": f"{result['points']}",
            "reprojection error": f"median {result['reprojection_error']['median']} px",
            "depth": f"{result['depth']['kept']:.0%} of the pixels",
            "written": f"{out}: images, sparse, depth, report.md, collection.json",
        }
    )


@data.command()
def megadepth(
    root: Annotated[Path, typer.Argument(help="Where MegaDepth v1 and its SfM models are unpacked.")],
    out: Annotated[Optional[Path], typer.Option("-o", "--out", help="The index [ROOT/index].")] = None,
) -> None:
    """Build the index of MegaDepth's pairs from the raw release.

    Example: prism data megadepth MegaDepth_v1 -o index
    """
    from prism_match.maps.colmap import undistort
    from prism_match.training.data.megadepth import build_index

    logging.basicConfig(format="%(message)s")
    written = build_index(root, out or root / "index", undistort=undistort)
    print(f"{len(written)} scenes in {out or root / 'index'}")
