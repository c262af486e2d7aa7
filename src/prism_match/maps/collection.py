"""A folder of photos becomes a posed collection to train on: reconstruction, removal of what is doubtful,
reconstruction of the rest, photos without lens distortion, depth, and a report.

Wrong cameras teach wrong matches, and nobody looks at every pair: so whatever cannot be believed is left out,
and each photo and pair that is, is named with the reason. Every step keeps what it has done.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import PIL.Image
from tqdm import tqdm

from prism_match.cameras import Camera
from prism_match.colmap_model import Model, PosedView, read_model
from prism_match.engine import MatchStore, Names
from prism_match.errors import UserError
from prism_match.files import lock_folder, short_hash, temporary_beside, writable_folder, write_json
from prism_match.images import load_image
from prism_match.maps import colmap
from prism_match.maps.collection_report import REPORT, reprojection_errors, write_collection_report
from prism_match.maps.reconstruction import SfmOptions, find_images, reconstruct, working
from prism_match.maps.shared_keypoints import load_tracks
from prism_match.maps.stages import STAGES, Stages
from prism_match.maps.view_graph import MAX_ANGLE, doubtful_pairs, relative_turns
from prism_match.matcher import PairMatcher

WRITTEN = ("images", "sparse", "depth")
EXACT = 1.0  # pixels as they were matched: with looser matches a plane gives any rotation
# The model, its photos and the folder of the maps -> how these compare with the points, as a dataclass. From
# outside, since maps and training do not know each other.
MakeDepth = Callable[[Path, Path, Path], Any]


@dataclass(frozen=True)
class CollectOptions:
    sfm: SfmOptions = field(default_factory=lambda: SfmOptions(mapper="global"))
    size: int = 720  # pixels of the longer side of the photos, at most
    min_points: int = 50  # that a photo has to see, each with another photo that is kept
    focal: tuple[float, float] = (0.3, 6.0)  # times the longer side: 11 to 216 mm on 35 mm film
    max_angle: float = MAX_ANGLE  # degrees: see `view_graph`

    def __post_init__(self) -> None:
        if self.size < 32:
            raise UserError(f"the longer side must be at least 32 pixels, not {self.size}")
        if self.min_points < 1:
            raise UserError(f"a photo has to see at least 1 point, not {self.min_points}")
        if not 0 < self.focal[0] < self.focal[1]:
            raise UserError(f"focal lengths go from one above 0 to a larger one, not {self.focal}")
        if not 0 < self.max_angle <= 180:
            raise UserError(f"the angle must be above 0 and at most 180 degrees, not {self.max_angle}")


@dataclass(frozen=True)
class LeftOut:
    """Why, by name."""

    photos: dict[str, str]
    pairs: dict[Names, str]


def collect(
    photos: Path,
    out: Path,
    options: CollectOptions,
    make_matcher: Callable[[], PairMatcher],
    make_depth: MakeDepth,
    progress: bool = False,
) -> dict[str, Any]:
    """All of `prism data collect`; what OUT/collection.json holds. Raises `UserError` where fewer than two
    photos are left, or another run is at work."""
    colmap.require()
    results = {out.resolve(), *(out.resolve() / name for name in (*WRITTEN, "work"))}
    if photos.resolve() in results or results - {out.resolve()} & set(photos.resolve().parents):
        raise UserError(f"{photos}: is where the results would go; give another folder for them")
    files = find_images(photos, out)
    with lock_folder(writable_folder(out)):
        return _collect(photos, files, out, options, make_matcher, make_depth, progress)


def _collect(
    photos: Path,
    files: dict[str, Path],
    out: Path,
    options: CollectOptions,
    make_matcher: Callable[[], PairMatcher],
    make_depth: MakeDepth,
    progress: bool,
) -> dict[str, Any]:
    stages, first = Stages(out / STAGES), out / "work" / "first"
    if "collection" not in stages.done and any((out / name).exists() for name in WRITTEN):
        raise UserError(
            f"{out}: has photos or a model in it that are not of this command; give another folder"
        )
    stages.run("collection", "", out, lambda: True)  # what is written here from now on may be replaced
    summary = reconstruct(photos, first, _few_photos(options.sfm, files), make_matcher, progress)
    found = judge(stages, first, options, progress)
    folder = first
    if without := unused_pairs(first, summary, found):
        folder = out / "work" / "final"
        sfm = replace(options.sfm, matches=store_of(first, options), without=without)
        left = files.keys() - found.photos.keys()
        reconstruct(photos, folder, _few_photos(sfm, left), make_matcher, progress)
    model = read_model(folder / "sparse" / "0")
    reasons = reasons_of_photos(files, model, summary, found, options)
    kept = sorted(files.keys() - reasons.keys())
    if len(kept) < 2:
        name, why = next(iter(sorted(reasons.items())))
        raise UserError(f"{photos}: fewer than two photos can be trained on; of {name}: {why}")

    key = short_hash([_model_key(folder), kept, options.size])
    stages.run(
        "photos", key, out / "sparse", lambda: write_photos(out, files, folder, kept, options.size, progress)
    )
    check = make_depth(out / "sparse", out / "images", out / "depth")
    numbers = {k: v if math.isfinite(v) else None for k, v in asdict(check).items()}
    key = short_hash([key, reasons, sorted([*names, why] for names, why in found.pairs.items()), numbers])

    def report() -> dict[str, Any]:
        result = describe(out, files, LeftOut(reasons, found.pairs), summary, numbers, options)
        write_collection_report(out, files, result)
        write_json(out / "collection.json", result)
        return result

    return stages.run("report", key, out / REPORT, report)


def _few_photos(options: SfmOptions, photos: Collection[str]) -> SfmOptions:
    """The global mapper has no use for two photos."""
    return replace(options, mapper="incremental") if len(photos) < 3 else options


def _model_key(folder: Path) -> str:
    """Of all that went into a reconstruction."""
    return str(Stages(folder / STAGES).done["model"]["key"])


# ---- what is left out


def judge(stages: Stages, folder: Path, options: CollectOptions, progress: bool) -> LeftOut:
    """What is wrong with a reconstruction of all photos: cameras that cannot be, and pairs between the others
    that contradict the rest."""
    model = read_model(folder / "sparse" / "0")
    photos = impossible_cameras(model.views, options.focal)
    cameras = {view.name: view.camera for view in model.views if view.name not in photos}
    verified = {frozenset(row[:2]) for row in Stages(folder / STAGES).done["database"]["result"]}

    def work() -> list[list[str]]:
        with working("doubting", progress):
            shared, _ = load_tracks(folder / "tracks.h5")
            pairs = [p for p in shared.matches if cameras.keys() >= set(p) and frozenset(p) in verified]
            scales = MatchStore(store_of(folder, options)).scales
            max_error = EXACT * max(1.0, float(np.median(list(scales.values()))))
            turns = relative_turns(shared, pairs, cameras, max_error)
            rotations = {view.name: view.T[:3, :3] for view in model.views}
            doubtful = doubtful_pairs(turns, rotations, options.max_angle)
        return [[*names, why] for names, why in sorted(doubtful.items())]

    key = short_hash([_model_key(folder), options.focal, options.max_angle])
    rows = stages.run("pairs", key, folder / "tracks.h5", work)
    return LeftOut(photos, {(a, b): why for a, b, why in rows})


def store_of(folder: Path, options: CollectOptions) -> Path:
    return options.sfm.matches or folder / "matches.h5"


def unused_pairs(folder: Path, summary: dict[str, Any], found: LeftOut) -> frozenset[Names]:
    """The pairs that a second reconstruction goes without; none if the first one can stay. Photos that have
    found no place in the first are not tried again: nothing has been learnt of them."""
    if not found.photos and not found.pairs:
        return frozenset()
    out = found.photos.keys() | set(summary["not_registered"])
    shared, _ = load_tracks(folder / "tracks.h5")
    return frozenset(p for p in shared.matches if p in found.pairs or out & set(p)) | found.pairs.keys()


def impossible_cameras(views: tuple[PosedView, ...], focal: tuple[float, float]) -> dict[str, str]:
    reasons = {}
    for view in views:
        lengths = np.diag(view.K)[:2] / max(view.width, view.height)
        if not focal[0] <= lengths.min() <= lengths.max() <= focal[1]:
            wrong = lengths[np.argmax(np.abs(np.log(lengths)))]
            reasons[view.name] = f"impossible focal length: {wrong:.2f} times the longer side"
        elif not np.isfinite(view.T).all():
            reasons[view.name] = "its pose is not finite"
    return reasons


def reasons_of_photos(
    files: dict[str, Path], model: Model, summary: dict[str, Any], found: LeftOut, options: CollectOptions
) -> dict[str, str]:
    """Why photos are left out, by name; those that are not named stay."""
    reasons = dict(found.photos)
    reasons |= impossible_cameras(model.views, options.focal)
    reasons |= too_few_points(model, set(reasons), options.min_points)
    for name, why in summary["skipped"].items():
        reasons[name] = f"cannot be read: {why.removeprefix(f'{files[name]}: ')}"
    views = {view.name for view in model.views}
    for name in files.keys() - views - reasons.keys():
        doubts = sum(name in names for names in found.pairs)
        after = f", {doubts} doubtful pair{'s' * (doubts > 1)} of it removed" if doubts else ""
        reasons[name] = f"no place in the reconstruction{after}"
    return reasons


def too_few_points(model: Model, out: set[str], least: int) -> dict[str, str]:
    """Photos that see fewer points together with another one that stays; one that goes takes points along."""
    rows = [n for n, view in enumerate(model.views) if view.name not in out]
    reasons: dict[str, str] = {}
    while True:
        seen = np.zeros(len(model.points), np.int64)
        for n in rows:
            seen[model.views[n].points] += 1
        counts = {n: int((seen[model.views[n].points] >= 2).sum()) for n in rows}
        poor = [n for n in rows if counts[n] < least]
        if not poor:
            return reasons
        worst = min(poor, key=lambda n: (counts[n], model.views[n].name))
        reasons[model.views[worst].name] = f"sees {counts[worst]} points, fewer than {least}"
        rows.remove(worst)


# ---- what is written


def write_photos(
    out: Path, files: dict[str, Path], folder: Path, kept: list[str], size: int, progress: bool
) -> int:
    """OUT/images and OUT/sparse, as cameras without distortion see them. Depth maps of others are removed."""
    images, sparse = temporary_beside(out / "images"), temporary_beside(out / "sparse")
    try:
        sparse.mkdir()
        colmap.run("pinhole_model", model=str(folder / "sparse" / "0"), keep=kept, size=size, out=str(sparse))
        lenses = {view.name: view.camera for view in read_model(folder / "sparse" / "0").views}
        views = read_model(sparse).views
        for view in tqdm(views, "undistorting", unit="image", disable=None if progress else True):
            pixels = undistorted(load_image(files[view.name]).rgb, lenses[view.name], view.camera)
            path = images / view.name
            path.parent.mkdir(parents=True, exist_ok=True)
            PIL.Image.fromarray(pixels).save(path, quality=95)
        for name in WRITTEN:
            shutil.rmtree(out / name, ignore_errors=True)
        images.replace(out / "images")
        sparse.replace(out / "sparse")
    except OSError as error:
        raise UserError(f"{out}: the photos cannot be written ({error.strerror or error})") from error
    finally:
        for left in (images, sparse):
            shutil.rmtree(left, ignore_errors=True)
    return len(views)


def undistorted(rgb: np.ndarray, lens: Camera, ideal: Camera) -> np.ndarray:
    """h w 3, uint8: what a camera without distortion sees where another has taken the photo `rgb`."""
    scale = min(1.0, ideal.K[0, 0] / lens.K[0, 0])
    if scale < 1:  # first, so that nothing is aliased
        width, height = (max(1, round(n * scale)) for n in (lens.width, lens.height))
        rgb, lens = (
            cv2.resize(rgb, (width, height), interpolation=cv2.INTER_AREA),
            lens.resized(width, height),
        )
    x, y = np.meshgrid(np.arange(ideal.width), np.arange(ideal.height))
    plane = ideal.normalise(np.stack([x, y], axis=-1).reshape(-1, 2))
    at = lens.project(np.column_stack([plane, np.ones(len(plane))])).astype(np.float32)
    u, v = at.T.reshape(2, ideal.height, ideal.width)
    return np.asarray(cv2.remap(rgb, u, v, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE))


def describe(
    out: Path,
    files: dict[str, Path],
    left_out: LeftOut,
    summary: dict[str, Any],
    depth: dict[str, Any],
    options: CollectOptions,
) -> dict[str, Any]:
    """In plain numbers. Errors are in pixels of the photos as they are in OUT/images."""
    model = read_model(out / "sparse")
    photos: dict[str, Any] = {name: {"kept": False, "reason": why} for name, why in left_out.photos.items()}
    every = [np.zeros(0)]
    for view in model.views:
        errors = reprojection_errors(model, view)
        every.append(errors)
        photos[view.name] = {
            "kept": True,
            "points": len(view.points),
            "focal": round(float(view.K[0, 0]) / max(view.width, view.height), 4),
            "median_reprojection_error": _rounded(np.median(errors) if len(errors) else None),
        }
    errors = np.concatenate(every)
    return {
        "photos": {name: photos[name] for name in files},
        "kept": len(model.views),
        "left_out": len(left_out.photos),
        "pairs": summary["pairs"],
        "verified_pairs": summary["verified_pairs"],
        "pairs_left_out": [{"pair": list(p), "reason": why} for p, why in sorted(left_out.pairs.items())],
        "points": len(model.points),
        "reprojection_error": {
            "median": _rounded(np.median(errors) if len(errors) else None),
            "mean": _rounded(errors.mean() if len(errors) else None),
            "within_1_px": _rounded((errors < 1).mean() if len(errors) else None),
        },
        "depth": depth,  # of all maps; None: not a point is on one
        "size": options.size,
        "mapper": summary["mapper"],
        "matching": summary["matching"],
    }


def _rounded(number: Any) -> float | None:
    return None if number is None else round(float(number), 4)
