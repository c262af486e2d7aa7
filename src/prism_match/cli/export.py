"""`prism export`: matches in the formats of other tools."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from prism_match.cli.options import PolishOption
from prism_match.cli.output import print_table
from prism_match.cli.sfm import (
    CellOption,
    ErrorOption,
    IntrinsicsOption,
    KeypointsOption,
    ModelOption,
    SharingOption,
)
from prism_match.errors import UserError

if TYPE_CHECKING:
    from prism_match.engine.store import Names
    from prism_match.matches import Matches

export_app = typer.Typer(
    help="Write matches in the formats of other tools.", no_args_is_help=True, rich_markup_mode=None
)


@export_app.callback()
def export() -> None:
    """Write matches in the formats of other tools."""


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
    cell: CellOption = 3.0,
    max_error: ErrorOption = 1.5,
    max_keypoints: KeypointsOption = 8192,
    polish: PolishOption = True,
    verify: Annotated[bool, typer.Option("--verify", help="Also check each pair by its geometry.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace all keypoints and matches in the database.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
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
        json.dump(counts, sys.stdout, indent=2)
        print()
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
    cell: CellOption = 3.0,
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
    from prism_match.export.hloc import (
        DenseMatches,
        Features,
        SparseMatches,
        write_features,
        write_matches,
    )
    from prism_match.files import atomic_path, writable_folder
    from prism_match.maps.tracks import TrackOptions, share_keypoints

    options = TrackOptions(cell, max_error, max_keypoints)
    found, sizes, scales = read_all(matches, images)
    shared = share_keypoints(found.items(), options, scales)
    folder = writable_folder(out)
    features = {n: Features(k.xy, k.scores, sizes.get(n)) for n, k in shared.keypoints.items()}
    write_features(folder / "features.h5", features)
    sparse = {names: SparseMatches(m.index, m.scores) for names, m in shared.matches.items()}
    dense = ((n, DenseMatches(m.keypoints0, m.keypoints1, m.scores)) for n, m in found.items())
    write_matches(folder / "matches.h5", sparse, {n: len(f.scores) for n, f in features.items()}, dense)
    with atomic_path(folder / "pairs.txt") as temporary:
        temporary.write_text("".join(f"{a} {b}\n" for a, b in found), encoding="utf-8")
    print(
        f"{len(features)} images, {len(found)} pairs, {sum(len(m.scores) for m in sparse.values())} matches"
    )
    print(f"written  {folder}: features.h5, matches.h5, pairs.txt")


def read_all(
    paths: list[Path], images: Path | None
) -> tuple[dict[Names, Matches], dict[str, tuple[int, int]], dict[str, float]]:
    """Matches by the names of the images, from a store of many pairs or files of one; the sizes of the
    images, and how many times larger they are than they were matched, where it is known."""
    import h5py

    from prism_match.engine.store import MatchStore
    from prism_match.matches import Matches

    found: dict[Names, Matches] = {}
    sizes: dict[str, tuple[int, int]] = {}
    scales: dict[str, float] = {}
    single = []
    for path in paths:
        is_store = False
        if path.suffix == ".h5" and path.is_file() and h5py.is_hdf5(path):
            with h5py.File(path, "r") as file:
                is_store = "pairs" in file
        if is_store:
            store = MatchStore(path)
            found |= dict(store.items())
            sizes |= {name: entry.size for name, entry in store.images.items()}
            scales |= store.scales
        else:
            single.append(Matches.load(path))
    root = images.resolve() if images else common_folder([n for m in single for n in (m.name0, m.name1)])
    for m in single:
        names = tuple(relative(n, root) for n in (m.name0, m.name1))
        found[names[0], names[1]] = m
        sizes |= dict(zip(names, (m.size0, m.size1), strict=True))
    if not found:
        raise UserError(f"{paths[0]}: no matches in it")
    return found, sizes, scales


def common_folder(names: list[str]) -> Path:
    import os

    folders = {str(Path(n).resolve().parent) for n in names}
    return Path(os.path.commonpath(folders)) if folders else Path()


def relative(name: str, root: Path) -> str:
    try:
        return Path(name).resolve().relative_to(root).as_posix()
    except ValueError as error:
        raise UserError(f"{name}: not in the folder {root}") from error
