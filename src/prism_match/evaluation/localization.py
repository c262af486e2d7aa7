"""Localization on data with known poses: how far from the truth, in metres and degrees.

ROOT, or each folder in it, is one of

    cameras.txt, images/        calibrated photos, as Strecha's (see `posed.read_calibrated`)
    NAME.color.jpg, ...         an RGB-D sequence (see `training.data.rgbd`)
    sparse/ or a COLMAP model, images/

Each photo in turn is the query and all others are the map. A map of calibrated photos is triangulated from
SIFT without the query; the points of a COLMAP model stay where they are, but the query's key points are gone.
Where a COLMAP model has `queries.txt` (name and intrinsics, as hloc's lists) and `poses.txt` (name qw qx qy
qz tx ty tz) beside it, those photos are the queries and the map stays whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from prism_match.cameras import pinhole, read_camera_list
from prism_match.colmap_model import is_model, read_model
from prism_match.config import PnpBackend
from prism_match.engine import Clock, Limits, Resize
from prism_match.engine.cluster import make_engine
from prism_match.engine.methods import Method, Sift
from prism_match.errors import UserError
from prism_match.evaluation.options import DEFAULT_SIZE, Options
from prism_match.evaluation.pairs import choose
from prism_match.evaluation.posed import read_cameras, read_scene
from prism_match.evaluation.report import Report, Table, told
from prism_match.evaluation.runner import Run, match_all, match_store, progress_bar
from prism_match.evaluation.triangulate import PosedCamera, triangulate_map
from prism_match.files import writable_folder
from prism_match.frames import is_sequence, read_sequence
from prism_match.geometry import camera_centres, rotation_angle
from prism_match.images import image_size
from prism_match.maps.landmarks import DepthMap, Map, SfmMap, without
from prism_match.maps.localization import Localized, Query, localize, read_poses, read_retrieval
from prism_match.maps.pnp import choose_backend
from prism_match.maps.queries import MatchedQuery, match_queries, retrieve
from prism_match.matches import Matches

WITHIN = ((0.25, 2.0), (0.5, 5.0), (1.0, 10.0))  # metres and degrees, as the paper has them
TOP = 5  # map photos that a query is matched with
THRESHOLD = 12.0  # pixels


@dataclass(frozen=True)
class Scene:
    """A map and the photos to localize in it, with the truth."""

    name: str
    photos: dict[str, Path]  # of the map
    queries: dict[str, Query]
    truth: dict[str, np.ndarray]  # 4 4, world to camera
    map_for: Callable[[str], Map]  # by the name of the query


@dataclass(frozen=True)
class Outcome:
    scene: str
    found: Localized
    metres: float  # infinite: no pose
    degrees: float

    def to_dict(self) -> dict[str, Any]:
        errors = {"m": finite(self.metres), "deg": finite(self.degrees)}
        return {"scene": self.scene, **self.found.to_dict(), **errors}


def localization(o: Options) -> Report:
    backend = pnp_backend(o)
    resizing = o.resize(o.size or DEFAULT_SIZE)
    method = o.make_method()
    scenes = read_scenes(o, resizing)
    top, threshold = o.top or TOP, o.threshold or THRESHOLD
    cases: list[tuple[Scene, Query, list[str]]] = []
    for scene in scenes:
        ranked = rank_photos(scene, o, top)
        cases += [(scene, query, ranked[name]) for name, query in scene.queries.items()]
    cases = choose(cases, o.pairs, o.seed)
    jobs = {
        f"{scene.name}/{query.name}": (query.path, {n: scene.photos[n] for n in names})
        for scene, query, names in cases
    }
    by_name = dict(zip(jobs, cases, strict=True))
    pnp: dict[str, Any] = {"threshold": threshold, "backend": backend, "seed": o.seed}
    clock = Clock()
    outcomes = {}
    for matched in match_jobs(jobs, method, resizing, o.run, clock):
        scene, query, _ = by_name[matched.query]
        world = scene.map_for(query.name)
        found = localize(query, matched.found, world, **pnp, problems=matched.problems)
        outcomes[matched.query] = compare(scene.name, found, scene.truth[query.name])
    settings = {
        "size": resizing.side, "resize": str(resizing), "ransac": backend, "threshold": threshold,
        "top": top, "snap": o.snap, "seed": o.seed, "method_settings": method.settings,
    }  # fmt: skip
    ordered = [outcomes[name] for name in jobs]
    return make_report(ordered, method, o.within or WITHIN, settings, clock.milliseconds)


def pnp_backend(o: Options) -> PnpBackend:
    """A pose is estimated by OpenCV or by PoseLib; what cannot be is told before any work."""
    if o.ransac == "usac":
        raise UserError("localization has the back ends opencv and poselib, not usac")
    if o.threshold is not None and not 0 < o.threshold < float("inf"):
        raise UserError(f"the RANSAC threshold must be positive, not {o.threshold}")
    if o.top is not None and o.top < 1:
        raise UserError(f"the number of map photos for a query must be at least 1, not {o.top}")
    return choose_backend(o.ransac)


def match_cache(run: Run) -> Path | None:
    """Where matches are kept, so that a run goes on where it was."""
    return run.cache or (run.out / "matches" if run.out else None)


def match_jobs(
    jobs: dict[str, tuple[Path, dict[str, Path]]], method: Method, resizing: Resize, run: Run, clock: Clock
) -> Iterator[MatchedQuery]:
    engine = make_engine(method, resizing, Limits(run.batch), clock, run.cluster)
    with match_store(engine, match_cache(run)) as store:
        yield from match_queries(jobs, engine, store, by_content=True, progress=run.progress)


def rank_photos(scene: Scene, o: Options, top: int) -> dict[str, list[str]]:
    """The map photos that each query is matched with, the most similar first: from the list if one is
    given, by the global descriptor of PRISM's backbone if not, whatever the method."""
    if o.pair_list is not None:
        listed = read_retrieval(o.pair_list)
        known = {q: [r for r in listed.get(q, []) if r in scene.photos and r != q] for q in scene.queries}
        if not any(known.values()):
            raise UserError(f"{o.pair_list}: no pair of a query and a map photo of {scene.name}")
        return {q: photos[:top] for q, photos in known.items()}
    matcher = replace(o, method="prism").make_matcher(*o.single())
    folder = match_cache(o.run)
    cache = None if folder is None else writable_folder(folder) / "descriptors.npz"
    queries = {n: q.path for n, q in scene.queries.items()}
    return retrieve(queries, scene.photos, matcher, top, cache)[0]


def compare(scene: str, found: Localized, truth: np.ndarray) -> Outcome:
    if found.T is None:
        return Outcome(scene, found, float("inf"), float("inf"))
    distance = float(np.linalg.norm(camera_centres(found.T) - camera_centres(truth)))
    return Outcome(scene, found, distance, rotation_angle(found.T[:3, :3], truth[:3, :3]))


# ---- the numbers


def make_report(
    outcomes: Sequence[Outcome],
    method: Method,
    within: tuple[tuple[float, float], ...],
    settings: dict[str, Any],
    milliseconds: float | None,
) -> Report:
    groups = {
        name: [x for x in outcomes if x.scene == name] for name in dict.fromkeys(x.scene for x in outcomes)
    }
    per_scene = {name: summarise(group, within) for name, group in groups.items()}
    total = summarise(outcomes, within)
    failures = {f"{x.scene}/{x.found.name}": x.found.problem for x in outcomes if x.found.T is None}
    columns = ["", "queries", "failed", "median m", "median deg"]
    columns += [f"{m:g} m, {d:g} deg" for m, d in within] + ["inliers"]
    rows = [row(name, numbers) for name, numbers in per_scene.items()] if len(per_scene) > 1 else []
    title = (
        f"localization, {method.name}: {settings['resize']}, {settings['top']} map photos a query, "
        f"{settings['ransac']} PnP at {settings['threshold']:g} px, seed {settings['seed']}"
    )
    summary = {
        "benchmark": "localization", "method": method.name, **settings, **total, "scenes": per_scene,
        "milliseconds": milliseconds, "failures": failures, "per_query": [x.to_dict() for x in outcomes],
    }  # fmt: skip
    notes = told(failures, "queries have no pose and count as such")
    return Report(summary, [Table(title, columns, [*rows, row("all", total)])], notes=notes)


def summarise(outcomes: Sequence[Outcome], within: tuple[tuple[float, float], ...]) -> dict[str, Any]:
    """Medians over all queries, where one without pose is infinitely far off (null in JSON)."""
    metres, degrees = np.array([x.metres for x in outcomes]), np.array([x.degrees for x in outcomes])
    medians = [finite(float(np.median(x))) for x in (metres, degrees)]
    shares = [float(100 * np.mean((metres <= m) & (degrees <= d))) for m, d in within]
    return {
        "queries": len(outcomes),
        "failed": sum(x.found.T is None for x in outcomes),
        "median_m": medians[0],
        "median_deg": medians[1],
        "within": {f"{m:g} m, {d:g} deg": share for (m, d), share in zip(within, shares, strict=True)},
        "inliers": float(np.mean([x.found.inliers for x in outcomes])),
    }


def finite(value: float) -> float | None:
    """For JSON, which does not know infinity."""
    return value if np.isfinite(value) else None


def row(name: str, numbers: dict[str, Any]) -> list[str]:
    medians = [numbers["median_m"], numbers["median_deg"]]
    return [
        name, str(numbers["queries"]), str(numbers["failed"]),
        *("none" if x is None else f"{x:.3f}" for x in medians),
        *(f"{x:.1f} %" for x in numbers["within"].values()), f"{numbers['inliers']:.0f}",
    ]  # fmt: skip


# ---- the data


def read_scenes(o: Options, resizing: Resize) -> list[Scene]:
    root = o.data
    folders = [root, *sorted(p for p in root.glob("*") if p.is_dir())] if root.is_dir() else []
    readers = (
        (lambda f: (f / "cameras.txt").is_file() and not is_model(f), read_calibrated_scene),
        (is_sequence, read_sequence_scene),
        (is_model, read_model_scene),
    )
    for is_one, read in readers:
        found = [f for f in folders if is_one(f)]
        if found and found[0] == root:
            found = [root]
        if found:
            return [read(folder, o, resizing) for folder in found]
    raise UserError(
        f"{root}: no cameras.txt, RGB-D sequence or COLMAP model, neither here nor in the folders here"
    )


def read_calibrated_scene(folder: Path, o: Options, resizing: Resize) -> Scene:
    """The map is made of SIFT at the same size, whatever is measured in it: maps mostly are."""
    cameras: dict[str, PosedCamera] = {}
    for name, (K, T) in read_cameras(folder / "cameras.txt").items():
        size = image_size(folder / "images" / name)
        if size is None:
            raise UserError(f"{folder / 'images' / name}: cannot be read")
        cameras[name] = name, pinhole(K, *size), T
    pairs = read_scene(folder / "cameras.txt")
    matches = {}
    run = replace(o.run, cache=match_cache(o.run))
    with progress_bar(len(pairs), 0, f"map of {folder.name}", o.run.progress) as bar:
        for pair, found in match_all(pairs, Sift(), resizing, run, Clock()):
            if isinstance(found, Matches):
                key = pair.image0.name, pair.image1.name
                matches[key] = found.keypoints0, found.keypoints1
            bar.update()

    @lru_cache(maxsize=2)
    def map_without(query: str) -> Map:
        others = [c for name, c in cameras.items() if name != query]
        model = triangulate_map(others, {k: v for k, v in matches.items() if query not in k}, folder)
        return SfmMap(model, folder / "images", o.snap, as_shown=True)

    photos = {name: folder / "images" / name for name in cameras}
    queries = {name: Query(name, photos[name], camera) for name, camera, _ in cameras.values()}
    return Scene(folder.name, photos, queries, {n: T for n, _, T in cameras.values()}, map_without)


def read_sequence_scene(folder: Path, o: Options, resizing: Resize) -> Scene:
    frames = {frame.image.name: frame for frame in read_sequence(folder)}
    if len(frames) < 2:
        raise UserError(f"{folder}: {len(frames)} frames that can be used, at least 2 are needed")
    world = DepthMap(frames, o.depth_scale)
    queries = {name: Query.stored(name, world.path(name), world.camera(name)) for name in frames}
    photos = {name: world.path(name) for name in frames}
    return Scene(folder.name, photos, queries, world.poses, lambda _: world)


def read_model_scene(folder: Path, o: Options, resizing: Resize) -> Scene:
    model = read_model(folder)
    images = folder / "images"
    whole = SfmMap(model, images, o.snap)
    photos = {name: whole.path(name) for name in whole.names}
    if (folder / "queries.txt").is_file() and (folder / "poses.txt").is_file():
        truth = read_poses(folder / "poses.txt")
        cameras = {n: c for n, c in read_camera_list(folder / "queries.txt").items() if n in truth}
        if not cameras:
            raise UserError(f"{folder / 'poses.txt'}: none of the queries of queries.txt is in it")
        queries = {name: Query.stored(name, images / name, camera) for name, camera in cameras.items()}
        return Scene(folder.name, photos, queries, truth, lambda _: whole)

    @lru_cache(maxsize=2)
    def map_without(query: str) -> Map:
        return SfmMap(without(model, query), images, whole.radius)

    truth = {name: whole.pose(name) for name in whole.names}
    queries = {name: Query.stored(name, photos[name], whole.camera(name)) for name in whole.names}
    return Scene(folder.name, photos, queries, truth, map_without)
