"""`prism sfm`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from prism_match.cli.options import (
    AddressOption,
    BackendOption,
    ConfigOption,
    DeviceOption,
    EngineOption,
    JsonFileOption,
    PolishOption,
    PrecisionOption,
    RescaleOption,
    RotateOption,
    SamePlaceOption,
    SizeOption,
    ThresholdOption,
    WeightsOption,
    make_cluster,
    make_matcher,
)
from prism_match.cli.output import print_table
from prism_match.config import UNLIKELY, Mapper, Sharing
from prism_match.errors import UserError

CellOption = Annotated[
    float, typer.Option(help="Points this close can become one keypoint, in pixels as matched.")
]
ErrorOption = Annotated[
    float, typer.Option(help="Drop matches further from their keypoints, in pixels as matched.")
]
KeypointsOption = Annotated[int, typer.Option(help="Most keypoints of an image, the strongest ones.")]
SharingOption = Annotated[
    Sharing,
    typer.Option(help="Who has the same camera; auto: same size and same EXIF camera and focal length."),
]
ModelOption = Annotated[str, typer.Option(help="SIMPLE_PINHOLE, PINHOLE, SIMPLE_RADIAL, RADIAL or OPENCV.")]
IntrinsicsOption = Annotated[
    Optional[str],
    typer.Option(help="fx,fy,cx,cy for all, or a file of lines: image fx fy cx cy. They stay as given."),
]
PairsOption = Annotated[
    str,
    typer.Option(help="auto, exhaustive, sequential, retrieval, or a text file with two names a line."),
]
NeighboursOption = Annotated[
    int, typer.Option(help="Retrieval: match each photo with so many that look alike.")
]
MapperOption = Annotated[Mapper, typer.Option(help="COLMAP's; global is far faster for hundreds of photos.")]
StoreOption = Annotated[
    Optional[Path], typer.Option(help="A matches.h5, or what match-pairs wrote, to use as it is.")
]
PairsAtOnceOption = Annotated[Optional[int], typer.Option(help="Pairs matched at a time [GPU 8, CPU 1].")]
ThreadsOption = Annotated[int, typer.Option(help="Of COLMAP [all cores].")]


def sfm(
    images: Annotated[Path, typer.Argument(help="Folder of photos, or a video.", show_default=False)],
    out: Annotated[
        Path, typer.Option("-o", "--out", help="Folder for the results; a run goes on where it was.")
    ],
    pairs: PairsOption = "auto",
    window: Annotated[int, typer.Option(help="Sequential: match each photo with so many that follow.")] = 10,
    loop: Annotated[
        bool, typer.Option("--loop", help="Sequential: the first photo follows the last.")
    ] = False,
    neighbours: NeighboursOption = 20,
    mapper: MapperOption = "incremental",
    cameras: SharingOption = "auto",
    camera_model: ModelOption = "SIMPLE_RADIAL",
    intrinsics: IntrinsicsOption = None,
    cell: CellOption = 1.5,
    max_error: ErrorOption = 1.5,
    max_keypoints: KeypointsOption = 8192,
    same_place: SamePlaceOption = UNLIKELY,
    size: SizeOption = None,
    threshold: ThresholdOption = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    backend: BackendOption = "torch",
    batch: PairsAtOnceOption = None,
    weights: WeightsOption = None,
    rotate: RotateOption = "never",
    rescale: RescaleOption = "never",
    polish: PolishOption = True,
    model_config: ConfigOption = None,
    matches: StoreOption = None,
    matches_only: Annotated[
        bool, typer.Option("--matches-only", help="Stop after OUT/matches.h5: needs no COLMAP.")
    ] = False,
    feature_cache: Annotated[float, typer.Option(help="Disk for feature maps while matching, in GiB.")] = 8.0,
    threads: ThreadsOption = -1,
    engine: EngineOption = "local",
    address: AddressOption = None,
    json_file: JsonFileOption = None,
) -> None:
    """Reconstruct cameras and points from a folder of photos, or from a video (extra: video), whose key
    frames are written to OUT/frames.

    OUT gets the COLMAP model in sparse/0 (bin, text and points.ply), transforms.json for NeRF and splatting
    tools, report.md with pictures, matches.h5 and database.db.

    \b
    Examples:
      prism sfm photos -o out
      prism sfm frames -o out --pairs sequential --window 8 --loop --cameras shared
      prism sfm video.mp4 -o out
      prism sfm holiday -o out --pairs retrieval --neighbours 15 --mapper global
      prism sfm photos -o out --matches-only                on a machine with a GPU, then elsewhere
      prism sfm photos -o out2 --matches out/matches.h5
      prism sfm photos -o out --engine ray --address auto   matches on a Ray cluster
    """
    from prism_match.export.nerf import write_transforms
    from prism_match.files import lock_folder, writable_folder, write_json
    from prism_match.maps import colmap
    from prism_match.maps.cameras import CameraOptions
    from prism_match.maps.reconstruction import (
        PairOptions,
        SfmOptions,
        find_images,
        match_images,
        reconstruct,
    )
    from prism_match.maps.tracks import TrackOptions
    from prism_match.maps.video import write_key_frames

    if loop and pairs not in ("auto", "sequential"):
        raise UserError("--loop is for --pairs sequential alone")
    if matches_only and matches is not None:
        raise UserError("--matches-only makes a file of matches; --matches gives one: only one of them")
    options = SfmOptions(
        pairs=PairOptions(pairs, window, loop, neighbours),
        tracks=TrackOptions(cell, max_error, max_keypoints),
        cameras=CameraOptions(cameras, camera_model, intrinsics),
        mapper=mapper,
        same_place=same_place,
        matches=matches,
        batch_size=batch,
        features_gib=feature_cache,
        threads=threads,
        polish=polish,
        device=device,
        cluster=make_cluster(engine, address, device),
    )
    if json_file is not None:
        writable_folder(json_file.parent)

    def load_matcher() -> Any:
        return make_matcher(
            weights,
            model_config,
            device,
            precision,
            size,
            threshold,
            rotate,
            polish,
            backend,
            rescale=rescale,
        )

    if images.is_file():
        if not matches_only:
            colmap.require()
        with lock_folder(writable_folder(out)):
            images = write_key_frames(images, out, progress=True)
    if matches_only:
        files = find_images(images, out)
        with lock_folder(writable_folder(out)):
            found = match_images(files, out, options, load_matcher, True)
        rows = {"pairs": len(found.pairs), "written": str(found.store.path)}
        summary: dict[str, Any] = {**rows, "skipped": found.broken}
    else:
        summary = reconstruct(images, out, options, load_matcher, progress=True)
        write_transforms(out / "transforms.json", out / "sparse" / "0", Path(summary["photos"]))
        rows = {
            "registered": f"{summary['registered']} of {summary['images']} images",
            "points": f"{summary['points']}",
            "track length": f"{summary['mean_track_length']:.2f} images",
            "reprojection error": f"{summary['mean_reprojection_error']:.3f} px",
            "left out": f"{len(summary['elsewhere'])} pairs of different places",
            "written": f"{out}: sparse/0, transforms.json, report.md",
        }
    print_table(rows)
    if json_file is not None:
        write_json(json_file, summary)
