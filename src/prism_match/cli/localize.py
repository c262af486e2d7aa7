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
    from prism_match.maps.landmarks import Map
    from prism_match.maps.localization import Query


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
    from prism_match.evaluation.pairs import Resize
    from prism_match.evaluation.runner import Clock
    from prism_match.files import writable_folder, write_json
    from prism_match.maps.localization import Localized, localize, with_fallback, write_poses
    from prism_match.maps.pnp import choose_backend
    from prism_match.maps.queries import match_queries, retrieve

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


def find_queries(given: list[Path]) -> dict[str, Path]:
    """Photos by name: that within the folder, or of the file itself."""
    from prism_match.evaluation.pairs import IMAGE_SUFFIXES

    found: dict[str, Path] = {}
    for path in given:
        if path.is_dir():
            files = [p for p in sorted(path.rglob("*")) if p.suffix.lower() in IMAGE_SUFFIXES]
            if not files:
                raise UserError(f"{path}: no photos in this folder")
            named = {p.relative_to(path).as_posix(): p for p in files}
        elif path.is_file():
            named = {path.name: path}
        else:
            raise UserError(f"{path}: no such file or folder")
        twice = [n for n, p in named.items() if found.get(n, p) != p]
        if twice:
            raise UserError(f"{named[twice[0]]} and {found[twice[0]]}: two queries of the same name")
        found |= named
    return found


def read_listed(pair_list: Path, photos: dict[str, Path]) -> dict[str, list[str]]:
    from prism_match.maps.localization import read_retrieval

    listed = read_retrieval(pair_list)
    if not any(q in listed for q in photos):
        raise UserError(f"{pair_list}: none of the queries is in it; the first query is {next(iter(photos))}")
    return {q: listed.get(q, []) for q in photos}


def read_given(intrinsics: str, photos: dict[str, Path]) -> dict[str, Query]:
    """Queries with cameras out of a file, which are for the photos as they are stored, or with the same
    fx,fy,cx,cy in our pixels for all, as they are shown."""
    import numpy as np

    from prism_match.cameras import pinhole, read_camera_list
    from prism_match.images import image_size
    from prism_match.maps.cameras import check_numbers
    from prism_match.maps.localization import Query

    if Path(intrinsics).is_file():
        given = read_camera_list(Path(intrinsics))
        missing = [q for q in photos if q not in given]
        if missing:
            raise UserError(f"{intrinsics}: {len(missing)} queries are not in it; the first: {missing[0]}")
        return {q: Query.stored(q, path, given[q]) for q, path in photos.items()}
    try:
        fx, fy, cx, cy = check_numbers(intrinsics.split(","))
    except ValueError as error:
        raise UserError(f"{intrinsics}: neither a file of cameras nor fx,fy,cx,cy ({error})") from error
    K = np.array([[fx, 0, cx], [0, fy, cy], [0, 0, 1]])
    sizes = {q: image_size(path) for q, path in photos.items()}  # one that cannot be read will fail by name
    return {q: Query(q, photos[q], pinhole(K, *size)) for q, size in sizes.items() if size is not None}


def open_map(
    path: Path,
    images: Path | None,
    snap: float | None,
    depth_scale: float,
    listed: dict[str, list[str]] | None,
) -> Map:
    """Which kind of map it is, its files tell."""
    from prism_match.colmap_model import is_model, read_model
    from prism_match.evaluation.localization import is_sequence
    from prism_match.maps.landmarks import DepthMap, ScanMap, SfmMap
    from prism_match.maps.reconstruction import origin_of
    from prism_match.training.data.rgbd import read_sequence

    if not path.exists():
        raise UserError(f"{path}: no such folder")
    if is_model(path):
        model, around = read_model(path), path.resolve()
        origin = origin_of(model.path)
        candidates = [images] if images else [f / "images" for f in (around, *list(around.parents)[:2])]
        folder = next((f for f in candidates if f.is_dir()), None)
        if images is None and origin.photos is not None:
            folder = origin.photos
        if folder is None:
            raise UserError(f"{candidates[0]}: no such folder; tell with --images where the map's photos are")
        return SfmMap(model, folder, snap, as_shown=origin.made_here)
    if is_sequence(path):
        try:
            frames = {frame.image.name: frame for frame in read_sequence(path)}
        except ValueError as error:
            raise UserError(str(error)) from error
        if not frames:
            raise UserError(f"{path}: no frame of the sequence can be used")
        return DepthMap(frames, depth_scale)
    if (path / "database" / "cutouts").is_dir():
        scans = sorted((path / "database" / "cutouts").rglob("*.mat"))
        names = [p.with_suffix("").relative_to(path).as_posix() for p in scans]
        if listed is not None:
            wanted = {r for photos in listed.values() for r in photos}
            names = [n for n in names if n in wanted]
        return ScanMap(path, names)
    raise UserError(f"{path}: neither a COLMAP model, an RGB-D sequence nor InLoc's data")


def make_query(
    name: str, path: Path, given: dict[str, Query] | None, mapped: Map, ranked: list[str]
) -> tuple[Query, str]:
    """A query, and where its camera is from: what was given, EXIF, the most similar map photo of the same
    shape, or a guess."""
    from prism_match.cameras import Camera
    from prism_match.images import image_size
    from prism_match.maps.cameras import UNKNOWN_FOCAL, read_exif
    from prism_match.maps.localization import Query

    if given is not None and name in given:
        return given[name], "the intrinsics given"
    size = image_size(path)
    if size is None:
        raise UserError(f"{path}: cannot be read")
    focal = read_exif(path, size).focal
    if focal is None:
        for photo in ranked:
            other = mapped.camera(photo)
            if other is not None and abs(other.width / other.height * size[1] / size[0] - 1) < 0.01:
                return Query(name, path, other.resized(*size)), "the map"
    length = UNKNOWN_FOCAL * max(size) if focal is None else focal
    camera = Camera("SIMPLE_PINHOLE", *size, (length, size[0] / 2, size[1] / 2))
    return Query(name, path, camera), "a guess" if focal is None else "EXIF"
