"""`prism localize`: where photos were taken, in a map."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from prism_match.cli.options import (
    DeviceOption,
    PolishOption,
    Precision,
    PrecisionOption,
    Rotate,
    RotateOption,
    WeightsOption,
    make_matcher,
)
from prism_match.errors import UserError

if TYPE_CHECKING:
    pass


class Pnp(str, Enum):
    auto = "auto"
    poselib = "poselib"
    opencv = "opencv"


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
    fallback: Annotated[
        bool, typer.Option("--fallback", help="Where there is no pose, take that of the most similar photo.")
    ] = False,
    pnp: Annotated[Pnp, typer.Option(help="Back end; auto: PoseLib where it is installed.")] = Pnp.auto,
    seed: Annotated[int, typer.Option(help="The same seed gives the same poses.")] = 0,
    device: DeviceOption = "auto",
    precision: PrecisionOption = Precision.auto,
    batch: Annotated[int, typer.Option(help="Pairs of equal size matched at a time.")] = 1,
    weights: WeightsOption = None,
    rotate: RotateOption = Rotate.never,
    polish: PolishOption = True,
    model_config: Annotated[Optional[str], typer.Option(help="A preset or a .toml/.json file.")] = None,
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
    from prism_match.engine.methods import Prism
    from prism_match.engine.photos import Resize
    from prism_match.evaluation.runner import Clock
    from prism_match.files import writable_folder, write_json
    from prism_match.maps.landmarks import open_map
    from prism_match.maps.localization import Localized, localize, with_fallback, write_poses
    from prism_match.maps.pnp import choose_backend
    from prism_match.maps.queries import (
        find_queries,
        make_query,
        match_queries,
        read_given,
        read_listed,
        retrieve,
    )

    for name, value, least in (
        ("top", top, 1),
        ("size", size, 32),
        ("min-inliers", min_inliers, 4),
        ("batch", batch, 1),
    ):
        if value < least:
            raise UserError(f"--{name} must be at least {least}, not {value}")
    if max_error <= 0:
        raise UserError(f"--max-error must be positive, not {max_error}")
    backend = choose_backend(pnp.value)
    photos = find_queries(queries)
    listed = None if pair_list is None else read_listed(pair_list, photos)
    mapped = open_map(world, images, snap, depth_scale, listed)
    given = None if intrinsics is None else read_given(intrinsics, photos)
    folder = writable_folder(out)
    if json_file is not None:
        writable_folder(json_file.parent)
    matcher = make_matcher(weights, model_config, device, precision, size, None, None, rotate, polish)
    map_photos = {name: mapped.path(name) for name in mapped.names}
    broken: dict[Path, str] = {}
    if listed is None:
        ranked, broken = retrieve(photos, map_photos, matcher, top, folder / "descriptors.npz", True)
    else:
        ranked = {q: [r for r in listed[q] if r in map_photos][:top] for q in photos}
    for path in map_photos.values():
        if path in broken:
            print(f"prism: left out of the map: {broken[path]}", file=sys.stderr)
    jobs = {q: (path, {r: map_photos[r] for r in ranked[q]}) for q, path in photos.items()}
    results: dict[str, Localized] = {}
    cameras: dict[str, dict[str, Any]] = {}
    resizing = Resize(longer=size, enlarge=False)
    for matched in match_queries(jobs, Prism(matcher, batch), resizing, folder / "matches", Clock(), True):
        name = matched.query
        try:
            if photos[name] in broken:
                raise UserError(broken[photos[name]])
            query, origin = make_query(name, photos[name], given, mapped, ranked[name])
        except UserError as error:
            results[name] = Localized(name, None, 0, 0, {}, str(error))
            continue
        result = localize(
            query, matched.found, mapped,
            threshold=max_error, backend=backend, seed=seed, min_inliers=min_inliers,
        )  # fmt: skip
        if result.T is None:
            result = replace(result, problem="; ".join([result.problem, *matched.problems]))
        results[name] = with_fallback(result, mapped, ranked[name]) if fallback else result
        cameras[name] = {**asdict(query.camera), "from": origin}
    ordered = {q: results[q] for q in photos}
    failed = {q: r.problem for q, r in ordered.items() if r.problem}
    summary = {
        "map": str(world), "queries": len(photos), "localized": len(photos) - len(failed), "failed": failed,
        "pnp": backend, "max_error": max_error, "top": top, "size": size, "seed": seed,
        "results": [r.to_dict() | {"camera": cameras.get(q)} for q, r in ordered.items()],
    }  # fmt: skip
    write_poses(folder / "poses.txt", {q: r.T for q, r in ordered.items() if r.T is not None})
    for path in filter(None, (folder / "localization.json", json_file)):
        write_json(path, summary)
    for q, r in ordered.items():
        if r.problem:
            print(f"{q}  no pose: {r.problem}")
        else:
            origin = cameras[q]["from"]
            print(f"{q}  {r.inliers} of {r.correspondences} points agree; camera from {origin}")
    print(f"{summary['localized']} of {len(photos)} localized")
    print(f"written  {folder}: poses.txt, localization.json")
