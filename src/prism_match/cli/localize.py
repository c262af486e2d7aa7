"""`prism localize`: where photos were taken, in a map."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from prism_match.cli.options import (
    AddressOption,
    BatchOption,
    ConfigOption,
    DeviceOption,
    EngineOption,
    PolishOption,
    PrecisionOption,
    RescaleOption,
    RotateOption,
    SamePlaceOption,
    WeightsOption,
    make_cluster,
    make_matcher,
)
from prism_match.config import UNLIKELY, PnpBackend, check_seed
from prism_match.errors import UserError


def localize_command(
    world: Annotated[
        Path,
        typer.Option("--map", help="A COLMAP model, an RGB-D sequence, or InLoc's root.", show_default=False),
    ],
    queries: Annotated[
        list[Path], typer.Option(help="A folder of photos, or photos; may be repeated.", show_default=False)
    ],
    images: Annotated[
        Optional[Path],
        typer.Option(help="The photos of a COLMAP model [`images` by it, or told by prism sfm]."),
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for the results; a run goes on there.")] = (
        Path("prism-localize")
    ),
    intrinsics: Annotated[
        Optional[str],
        typer.Option(
            help="fx,fy,cx,cy for all, or a file of `name MODEL width height params` lines "
            "[EXIF, else the map's camera]."
        ),
    ] = None,
    pair_list: Annotated[
        Optional[Path], typer.Option(help="File of `query map_photo` lines [retrieval].")
    ] = None,
    top: Annotated[int, typer.Option(help="Map photos that a query is matched with.")] = 10,
    size: Annotated[int, typer.Option(help="Longer side to resize to, in pixels.")] = 832,
    max_error: Annotated[float, typer.Option(help="Threshold of RANSAC, in pixels.")] = 12.0,
    snap: Annotated[
        Optional[float],
        typer.Option(help="COLMAP: most pixels from a match to a point of the map [1.2 % of the side]."),
    ] = None,
    depth_scale: Annotated[float, typer.Option(help="RGB-D: what depth maps have for a metre.")] = 1000.0,
    min_inliers: Annotated[int, typer.Option(help="A pose that fewer points agree with is none.")] = 12,
    same_place: SamePlaceOption = UNLIKELY,
    fallback: Annotated[
        bool, typer.Option("--fallback", help="Where there is no pose, take that of the most similar photo.")
    ] = False,
    pnp: Annotated[PnpBackend, typer.Option(help="Back end; auto: PoseLib where it is installed.")] = "auto",
    seed: Annotated[int, typer.Option(help="The same seed gives the same poses.")] = 0,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    batch: BatchOption = 1,
    weights: WeightsOption = None,
    rotate: RotateOption = "never",
    rescale: RescaleOption = "never",
    polish: PolishOption = True,
    model_config: ConfigOption = None,
    engine: EngineOption = "local",
    address: AddressOption = None,
    json_file: Annotated[Optional[Path], typer.Option("--json", help="Write the result here too.")] = None,
) -> None:
    """Find the poses of photos in a map.

    OUT gets poses.txt (name qw qx qy qz tx ty tz, world to camera, of each photo that has a pose),
    localization.json (inliers, the map photos used, and why a photo has no pose) and the matches and
    descriptors, so that a run that was stopped goes on where it was, and the next one is faster.

    \b
    Examples:
      prism localize --map out-of-prism-sfm --queries new-photos -o out
      prism localize --map sparse/0 --images photos --queries new-photos -o out
      prism localize --map model --images photos --queries q.jpg --intrinsics cameras.txt --top 5
      prism localize --map model --images photos --queries q.jpg --intrinsics 920,922,506.6,335.4
      prism localize --map rgbd-sequence --queries q.jpg --depth-scale 5000
    """
    from prism_match.files import writable_folder, write_json
    from prism_match.maps.landmarks import open_map
    from prism_match.maps.pnp import choose_backend
    from prism_match.maps.queries import (
        LocalizeOptions,
        find_queries,
        localize_photos,
        read_given,
        read_listed,
    )

    numbers = {"top": (top, 1), "size": (size, 32), "min-inliers": (min_inliers, 4), "batch": (batch, 1)}
    for name, (value, least) in numbers.items():
        if value < least:
            raise UserError(f"--{name} must be at least {least}, not {value}")
    if max_error <= 0:
        raise UserError(f"--max-error must be positive, not {max_error}")
    check_seed(seed)
    backend = choose_backend(pnp)
    cluster = make_cluster(engine, address, device)
    photos = find_queries(queries)
    listed = None if pair_list is None else read_listed(pair_list, photos)
    mapped = open_map(world, images, snap, depth_scale, listed)
    given = None if intrinsics is None else read_given(intrinsics, photos)
    folder = writable_folder(out)
    if json_file is not None:
        writable_folder(json_file.parent)
    matcher = make_matcher(
        weights, model_config, device, precision, size, None, rotate, polish, rescale=rescale
    )
    options = LocalizeOptions(
        top, size, max_error, min_inliers, same_place, fallback, backend, seed, batch, cluster
    )  # fmt: skip
    summary = localize_photos(photos, mapped, matcher, folder, options, given, listed, progress=True)
    summary = {"map": str(world)} | summary
    for path in filter(None, (folder / "localization.json", json_file)):
        write_json(path, summary)
    for result in summary["results"]:
        if result["problem"]:
            print(f"{result['name']}  no pose: {result['problem']}")
        else:
            agree = f"{result['inliers']} of {result['correspondences']} points agree"
            left_out = len(result["elsewhere"])
            other = f"; {left_out} map photos left out, of another place" if left_out else ""
            print(f"{result['name']}  {agree}; camera from {result['camera']['from']}{other}")
    print(f"{summary['localized']} of {len(photos)} localized")
    print(f"written  {folder}: poses.txt, localization.json")
