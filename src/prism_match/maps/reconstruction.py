"""A folder of photos becomes a reconstruction: pairs, matches, tracks, database, verification, mapper.

What a stage has done stays in the output folder with a hash of all that went into it, so that a run that
was killed goes on where it was, and a change of an option repeats only what depends on it.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
from tqdm import tqdm

from prism_match.config import UNLIKELY, Mapper
from prism_match.engine import Limits, MatchStore, Names, Prism, Resize
from prism_match.engine.cluster import Cluster, make_engine
from prism_match.engine.photos import IMAGE_SUFFIXES
from prism_match.errors import UserError
from prism_match.files import atomic_path, file_digest, lock_folder, short_hash, writable_folder
from prism_match.images import exif_orientation, image_size, known_formats, load_image, quiet_pillow
from prism_match.maps import colmap
from prism_match.maps import pairs as pairing
from prism_match.maps.cameras import CameraOptions, choose_cameras
from prism_match.maps.report import PICTURES, write_report
from prism_match.maps.retrieval import describe_files
from prism_match.maps.shared_keypoints import SharedKeypoints, load_tracks, save_tracks
from prism_match.maps.stages import STAGES, Stages
from prism_match.maps.tracks import TrackOptions, polish_tracks, share_keypoints
from prism_match.matcher import PairMatcher, find_device

EXHAUSTIVE_UP_TO = 40  # images; beyond that "auto" retrieves
PAIR_MODES = ("auto", "exhaustive", "sequential", "retrieval")
COPIES = "images"  # folder in that of the results, of photos that have been turned upright
RESULTS = ("sparse", "database.db", "transforms.json", "report.md", *PICTURES)  # that a run replaces
OURS = {"tracks", "database", "model"}  # stages, one of which tells that a run has put them there
EXACT = 0.5  # pixels of the photos: points that are further off count less in the last adjustment


@dataclass(frozen=True)
class PairOptions:
    mode: str = "auto"  # auto, exhaustive, sequential, retrieval, or a file with two names a line
    window: int = 10  # sequential: images that follow
    loop: bool = False  # sequential: the first follows the last
    neighbours: int = 20  # retrieval: images that look most alike

    def __post_init__(self) -> None:
        if self.mode not in PAIR_MODES and not Path(self.mode).is_file():
            raise UserError(f"pairs are {', '.join(PAIR_MODES)} or a file that lists them, not {self.mode}")
        if min(self.window, self.neighbours) < 1:
            raise UserError("the window and the number of neighbours must be at least 1")


@dataclass(frozen=True)
class SfmOptions:
    pairs: PairOptions = field(default_factory=PairOptions)
    tracks: TrackOptions = field(default_factory=TrackOptions)
    cameras: CameraOptions = field(default_factory=CameraOptions)
    mapper: Mapper = "incremental"
    same_place: float = UNLIKELY  # pairs whose photos show the same place with less probability are not used
    matches: Path | None = None  # a store to use as it is, instead of matching
    batch_size: int | None = None  # pairs at a time; None: 8 on a GPU, 1 elsewhere
    features_gib: float = 8.0  # disk for feature maps while matching
    threads: int = -1  # of COLMAP; -1: all cores
    polish: bool = True  # move keypoints to where the photos of their track look most alike
    device: str = "auto"  # to do that on
    cluster: Cluster | None = None  # to match on; None: here
    without: frozenset[Names] = frozenset()  # pairs that are not used, matched or not

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size < 1:
            raise UserError(f"at least 1 pair at a time is matched, not {self.batch_size}")
        if self.features_gib < 0:
            raise UserError(f"the disk for feature maps must be 0 GiB or more, not {self.features_gib}")
        if self.threads != -1 and self.threads < 1:
            raise UserError(f"the number of threads must be at least 1, or -1 for all, not {self.threads}")


def reconstruct(
    images: Path,
    out: Path,
    options: SfmOptions,
    make_matcher: Callable[[], PairMatcher],
    progress: bool = False,
) -> dict[str, Any]:
    """All of `prism sfm` but transforms.json; what --json holds, with the folder of the photos that show the
    pixels of the model. Raises `UserError` where there is nothing to build on, or another run is at work."""
    colmap.require()
    files = find_images(images, out)
    if options.mapper == "global" and len(files) < 3:  # it has no use for points that two images share
        raise UserError(f"{images}: the global mapper needs at least 3 images; try --mapper incremental")
    readable = {name: (path, size) for name, path in files.items() if (size := image_size(path))}
    choose_cameras(readable, options.cameras)  # what is wrong with them is told now, not after hours
    with lock_folder(writable_folder(out)):
        return _reconstruct(images, files, out, options, make_matcher, progress)


def _reconstruct(
    images: Path,
    files: dict[str, Path],
    out: Path,
    options: SfmOptions,
    make_matcher: Callable[[], PairMatcher],
    progress: bool,
) -> dict[str, Any]:
    began = time.perf_counter()
    check_folder(files, out)
    matched = match_images(files, out, options, make_matcher, progress)
    store, usable, broken = matched.store, matched.pairs, matched.broken
    if not usable:
        first = f"; {len(broken)} cannot be read, the first: {next(iter(broken.values()))}" if broken else ""
        raise UserError(f"{images}: no pair of its images was matched{first}")
    stages = Stages(out / STAGES)

    inputs = [store.settings, sorted(usable), options.same_place]
    digests = {name: store.images[name].digest for pair in usable for name in pair}
    elsewhere = stages.run(
        "places", short_hash([*inputs, digests]), store.path,
        lambda: pairs_of_other_places(store, usable, options.same_place, progress),
    )  # fmt: skip
    usable = usable - {(a, b) for a, b, _ in elsewhere}
    if not usable:
        best = max(p for _, _, p in elsewhere)
        raise UserError(
            f"{images}: no two of its photos are likely to show the same place (at most {best:.0%}); "
            "--same-place 0 uses all of them"
        )

    inputs = [[*names, *(store.images[n].digest for n in names)] for names in sorted(usable)]
    key = short_hash([store.settings, inputs, asdict(options.tracks), options.polish])
    tracks = out / "tracks.h5"
    counts = stages.run(
        "tracks", key, tracks, lambda: make_tracks(store, usable, files, tracks, options, progress)
    )
    if not counts["matches"]:
        raise UserError(f"{images}: no two of its {len(files)} images have anything in common that was found")

    sizes = {name: (files[name], store.images[name].size) for name in files if name in store.images}
    cameras = choose_cameras({k: v for k, v in sizes.items() if k not in broken}, options.cameras)
    # By the photos of this run alone: the store may have others, which are no longer there.
    scales, used = store.scales, {name for pair in usable for name in pair}
    max_error = colmap.colmap_error(scales[name] for name in used)
    key = short_hash([key, cameras.cameras, cameras.of_image, max_error])
    database = out / "database.db"

    def fill_database() -> list[Any]:
        database.unlink(missing_ok=True)
        return colmap.write_database(tracks, database, cameras, verify=max_error)[1]

    with working("verifying", progress):
        verified = [tuple(row) for row in stages.run("database", key, database, fill_database)]
    if not verified:
        raise UserError(
            f"{images}: none of the {counts['pairs']} matched pairs agrees with one scene seen by two "
            "cameras; do the photos show the same place?"
        )
    key = short_hash([key, options.mapper, options.cameras.intrinsics is None])

    def map_photos() -> dict[str, Any]:
        stages.forget("photos", "contents")  # which are those of the model that is replaced
        return run_mapper(out, options, len(cameras.of_image), max_error, progress)

    result = stages.run("model", key, out / "sparse" / "0", map_photos)
    where = os.path.relpath(images.resolve(), out.resolve())
    stages.run("photos", where, images, lambda: where)
    digests = {name: store.images[name].digest for name in cameras.of_image}
    stages.run("contents", short_hash(digests), images, lambda: digests)
    if not result["models"]:
        raise UserError(no_model(images, tracks, verified))
    summary = summarise(files, matched, verified, result["models"], counts, options)
    summary["elsewhere"] = elsewhere
    summary["seconds"] = round(time.perf_counter() - began, 1)
    best = result["models"][0]
    seen = {name: files[name] for name in best["images"]}
    # Noted before they are there: they are no photos, should the next run look for some around them.
    copies = sorted({*copies_in(out), *(seen if any_turned(seen) else ())})
    stages.run("copies", short_hash(copies), out, lambda: copies)
    shown = upright_copies(seen, out / COPIES)
    summary["photos"] = str(images if shown.items() <= files.items() else out / COPIES)
    write_report(out, summary, best, verified)
    return summary


def check_folder(files: dict[str, Path], out: Path) -> None:
    """Raises `UserError` where a run would replace what no run has put into its folder: a model or a database
    that somebody else has made, or photos, which may be the very ones that it is given."""
    done = Stages(out / STAGES).done
    ours = done.keys() & OURS or (not done and (out / STAGES).exists())  # damaged: still that of a run
    theirs = [out / name for name in RESULTS if not ours and (out / name).exists()]
    if any_turned(files):
        photos = {path.resolve() for path in files.values()}
        copies = (out / COPIES / name for name in files)
        theirs += [copy for copy in copies if copy.exists() and (not ours or copy.resolve() in photos)]
    if theirs:
        raise UserError(f"{theirs[0]}: is not of this command, and would be replaced; give another folder")


def find_images(folder: Path, out: Path) -> dict[str, Path]:
    """Every image in a folder and the folders in it, by its path from there; none of what this run or an
    earlier one has put there. out: the folder or picture that this run writes; the photos may be in it."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder of images")
    root = folder.resolve()
    outputs = {out.resolve(), *(p.parent for p in root.rglob(STAGES))} - {root, *root.parents}
    pictures = {out.resolve()}
    if (root / STAGES).exists():
        pictures |= {root / name for name in PICTURES}
    pictures |= {root / COPIES / name for name in copies_in(root)}
    photos = [
        p.relative_to(root).as_posix()
        for p in sorted(root.rglob("*"))
        if p.suffix.lower() in IMAGE_SUFFIXES
        and p.is_file()
        and p not in pictures
        and not outputs.intersection(p.parents)
    ]
    for other in sorted(outputs - {out.resolve()}):
        if any(p.suffix.lower() in IMAGE_SUFFIXES and p.name not in PICTURES for p in other.iterdir()):
            print(f"prism: left out, as the results of another run: {other}", file=sys.stderr)
    if len(photos) < 2:
        raise UserError(
            f"{folder}: {len(photos) or 'no'} image{'s' * (not photos)} in it; at least two are needed"
        )
    return {name: folder / name for name in photos}


@dataclass(frozen=True)
class MatchedPhotos:
    store: MatchStore
    pairs: set[Names]  # of the store, those that were asked for
    broken: dict[str, str]  # images that cannot be read, with the reason


def match_images(
    files: dict[str, Path],
    out: Path,
    options: SfmOptions,
    make_matcher: Callable[[], PairMatcher],
    progress: bool = False,
) -> MatchedPhotos:
    """The matches of all chosen pairs, or of all pairs in the store that the options name."""
    if options.matches is not None:
        store = MatchStore(options.matches)
        for name in files.keys() & store.images.keys():
            if file_digest(files[name]) != store.images[name].digest:
                raise UserError(f"{options.matches}: its matches are of another {name} than the one here")
        known = {pair for pair in store if files.keys() >= set(pair)}
        return MatchedPhotos(store, known - options.without, {})
    matcher = make_matcher()
    numbers, broken = choose_pairs(files, out, options.pairs, matcher, progress)
    names = list(files)
    pairs = [pair for a, b in numbers if (pair := (names[a], names[b])) not in options.without]
    at_once = options.batch_size or (8 if matcher.device.type == "cuda" else 1)
    limits = Limits(at_once, disk=round(options.features_gib * 2**30), folder=str(out / "features"))
    engine = make_engine(Prism(matcher), Resize.largest(matcher.size), limits, None, options.cluster)
    with MatchStore(out / "matches.h5", engine.settings) as store:
        if store.replaced is not None:
            print(
                f"prism: matches with other settings, or damaged ones, are kept as {store.replaced}",
                file=sys.stderr,
            )
        with tqdm(total=len(pairs), desc="matching", unit="pair", disable=None if progress else True) as bar:
            for outcome in engine.match(files, pairs, store):
                bar.update()
                broken |= outcome.broken
                if outcome.failed:
                    print(f"prism: skipped: {' and '.join(outcome.pair)}: {outcome.failed}", file=sys.stderr)
    for reason in broken.values():
        print(f"prism: skipped: {reason}", file=sys.stderr)
    # What an earlier run has matched may no longer be there to be looked at.
    return MatchedPhotos(store, {p for p in pairs if p in store and not broken.keys() & set(p)}, broken)


def choose_pairs(
    files: dict[str, Path], out: Path, options: PairOptions, matcher: PairMatcher, progress: bool
) -> tuple[np.ndarray, dict[str, str]]:
    """m 2, numbers of the files; and files that could not be read on the way."""
    mode = options.mode
    if mode == "auto":
        mode = "exhaustive" if len(files) <= EXHAUSTIVE_UP_TO else "retrieval"
    if mode == "exhaustive":
        return pairing.exhaustive(len(files)), {}
    if mode == "sequential":
        return pairing.sequential(len(files), options.window, options.loop), {}
    if mode == "retrieval":
        return retrieve_pairs(files, out / "descriptors.npz", options.neighbours, matcher, progress)
    return pairing.from_file(mode, list(files)), {}


def retrieve_pairs(
    files: dict[str, Path], cache: Path | None, neighbours: int, matcher: PairMatcher, progress: bool
) -> tuple[np.ndarray, dict[str, str]]:
    described, broken = describe_files(matcher, files.values(), cache, progress)
    told = {name: broken[path] for name, path in files.items() if path in broken}
    if len(described) < 2:
        return np.zeros((0, 2), np.int64), told
    numbers = [n for n, path in enumerate(files.values()) if path in described]
    rows = np.stack([described[path] for path in files.values() if path in described])
    return np.array(numbers)[pairing.nearest(rows, neighbours)], told


def pairs_of_other_places(
    store: MatchStore, usable: set[Names], least: float, progress: bool
) -> list[tuple[str, str, float]]:
    """Pairs whose photos show the same place with less probability than `least`, and that probability. Those
    of which it is not known are none, and neither are those that have nothing in common to join them by."""
    found = []
    for pair in tqdm(
        sorted(usable) if least > 0 else [], "same place?", unit="pair", disable=None if progress else True
    ):
        matches = store[pair]
        likely = matches.same_place if len(matches) else None
        if likely is not None and likely < least:
            found.append((*pair, round(likely, 4)))
    return found


def make_tracks(
    store: MatchStore,
    usable: set[Names],
    files: dict[str, Path],
    path: Path,
    options: SfmOptions,
    progress: bool,
) -> dict[str, int]:
    with working("merging", progress):
        shared = share_keypoints(
            ((n, m) for n, m in store.items() if n in usable), options.tracks, store.scales
        )
    if options.polish:
        shared = polish_tracks(shared, files, find_device(options.device), progress)
    colours = keypoint_colours(shared, files, progress)
    save_tracks(path, shared, colours)
    return {
        "pairs": len(shared.matches),
        "matches": sum(map(len, shared.matches.values())),
        "keypoints": sum(map(len, shared.keypoints.values())),
    }


def keypoint_colours(
    shared: SharedKeypoints, files: dict[str, Path], progress: bool
) -> dict[str, np.ndarray]:
    """k 3, uint8, by image: the pixel that a keypoint is on."""
    colours = {}
    for name, points in tqdm(
        shared.keypoints.items(), "colouring", unit="image", disable=None if progress else True
    ):
        rgb = load_image(files[name]).rgb
        x, y = np.rint(points.xy).astype(int).T
        colours[name] = rgb[y.clip(0, rgb.shape[0] - 1), x.clip(0, rgb.shape[1] - 1)]
    return colours


def run_mapper(
    out: Path, options: SfmOptions, images: int, max_error: float, progress: bool
) -> dict[str, Any]:
    with tqdm(total=images, desc="mapping", unit="image", disable=None if progress else True) as bar:
        return colmap.run(
            "reconstruct", lambda _: bar.update(),
            database=str(out / "database.db"), tracks=str(out / "tracks.h5"), out=str(out / "sparse"),
            mapper=options.mapper, refine_intrinsics=options.cameras.intrinsics is None,
            threads=options.threads, max_error=max_error, robust=EXACT,
        )  # fmt: skip


def no_model(images: Path, tracks: Path, verified: list[tuple[str, str, int]]) -> str:
    """Why the mapper has found no pair of images to begin with."""
    shared, _ = load_tracks(tracks)
    motions = []
    for names, matches in shared.matches.items():
        first, second = (shared.keypoints[name].xy[matches.index[:, n]] for n, name in enumerate(names))
        motions.append(float(np.median(np.linalg.norm(first - second, axis=1))))
    if max(motions) < 1:
        reason = "nothing moves between them, so there is no depth to find"
        return f"{images}: the images are all the same: {reason}"
    most = max(n for _, _, n in verified)
    return (
        f"{images}: {len(verified)} pairs of images share up to {most} points, but none of them gives a "
        "first pair of cameras: the photos show different things, or were all taken from one place"
    )


def summarise(
    files: dict[str, Path],
    matched: MatchedPhotos,
    verified: list[tuple[str, str, int]],
    models: list[dict[str, Any]],
    counts: dict[str, int],
    options: SfmOptions,
) -> dict[str, Any]:
    best = models[0]
    numbers = ("registered", "points", "observations", "mean_track_length", "mean_reprojection_error")
    return {
        "images": len(files),
        **{key: best[key] for key in numbers},
        "not_registered": sorted(files.keys() - best["images"].keys() - matched.broken.keys()),
        "skipped": matched.broken,
        "other_models": [model["registered"] for model in models[1:]],
        "pairs": len(matched.pairs),
        "verified_pairs": len(verified),
        "keypoints": counts["keypoints"],
        "mapper": options.mapper,
        "matching": matched.store.settings,
        "tracks": asdict(options.tracks),
    }


def copies_in(folder: Path) -> list[str]:
    """The names of all upright copies that runs have put into a folder of results."""
    return Stages(folder / STAGES).done.get("copies", {"result": []})["result"]


def any_turned(files: dict[str, Path]) -> bool:
    return any(exif_orientation(path) != 1 for path in files.values())


def upright_copies(files: dict[str, Path], folder: Path) -> dict[str, Path]:
    """Tools that read the model look at pixels as they are stored, we at those that are shown. So where EXIF
    turns a photo, there are copies of all of them in `folder`, with nothing left to be turned."""
    if not any_turned(files):
        return files
    copies = {name: folder / name for name in files}
    for name, path in files.items():
        copies[name].parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(copies[name]) as temporary:
            if exif_orientation(path) != 1:
                with (
                    quiet_pillow(),
                    path.open("rb") as file,  # see `read_image`
                    PIL.Image.open(file, formats=known_formats()) as image,
                ):
                    PIL.ImageOps.exif_transpose(image).save(temporary, quality=95)
            else:
                shutil.copyfile(path, temporary)
    return copies


def working(what: str, progress: bool) -> Any:
    """A bar without a length: it tells what is going on, and how long it took."""
    return tqdm(desc=what, bar_format="{desc}: {elapsed}", disable=None if progress else True)
