"""InLoc and Aachen Day-Night, whose poses are scored by the benchmark's own server: what comes out is the
file to hand in, `name qw qx qy qz tx ty tz` a line, world to camera, the name without its folder.

As in hloc: pairs from its published lists (NetVLAD's nearest 40 and 50), Aachen's intrinsics from its lists
of queries, InLoc's from the 28 mm lens of the phone, PnP at 12 and 48 px, and for a query without a pose that
of the most similar map photo, where it is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prism_match.cameras import Camera, read_camera_list
from prism_match.colmap_model import is_model, read_model
from prism_match.engine import Clock
from prism_match.errors import UserError
from prism_match.evaluation.localization import match_jobs, pnp_backend
from prism_match.evaluation.options import Options
from prism_match.evaluation.pairs import choose
from prism_match.evaluation.published import LOCALIZATION
from prism_match.evaluation.report import Report, Table, told
from prism_match.files import writable_folder
from prism_match.images import image_size
from prism_match.maps.landmarks import Map, ScanMap, SfmMap
from prism_match.maps.localization import Query, localize, read_retrieval, with_fallback, write_poses

SIZE = 1024  # longer side, as hloc has it for LoFTR
INLOC_FOCAL = 28 / 36  # of the longer side


def aachen(o: Options) -> Report:
    """ROOT has images/images_upright (or images), queries/*_with_intrinsics.txt and a COLMAP model of the
    database photos in 3D-models/* (or elsewhere in ROOT)."""
    root = o.data
    lists = sorted(root.glob("queries/*_with_intrinsics.txt"))
    if not lists:
        raise UserError(f"{root / 'queries'}: no *_with_intrinsics.txt here")
    upright = root / "images" / "images_upright"
    images = upright if upright.is_dir() else root / "images"
    folders = [*sorted((root / "3D-models").glob("*")), root / "3D-models", root]
    model = next((f for f in folders if f.is_dir() and is_model(f)), None)
    if model is None:
        raise UserError(f"{root / '3D-models'}: no COLMAP model here")
    ranked = read_retrieval(pair_list(o))
    cameras = {n: c for path in lists for n, c in read_camera_list(path).items()}
    queries = {n: Query.stored(n, images / n, c) for n, c in cameras.items() if n in ranked}
    world = SfmMap(read_model(model), images, o.snap)
    return submission(o, "aachen", queries, ranked, world, threshold=12.0)


def inloc(o: Options) -> Report:
    """ROOT has query/, database/cutouts with a scan (.mat) beside each photo, and database/alignments."""
    ranked = read_retrieval(pair_list(o))
    queries = {}
    for name in ranked:
        size = image_size(o.data / name) or (4032, 3024)  # one that cannot be read will fail by name
        params = (INLOC_FOCAL * max(size), size[0] / 2, size[1] / 2)
        queries[name] = Query(name, o.data / name, Camera("SIMPLE_PINHOLE", *size, params))
    photos = dict.fromkeys(photo for listed in ranked.values() for photo in listed)
    return submission(o, "inloc", queries, ranked, ScanMap(o.data, list(photos)), threshold=48.0)


def pair_list(o: Options) -> Path:
    if o.pair_list is not None:
        return o.pair_list
    found = sorted([*o.data.glob("pairs-query-*.txt"), *o.data.glob("pairs/**/pairs-query-*.txt")])
    if len(found) != 1:
        raise UserError(f"{o.data}: {len(found)} lists pairs-query-*.txt; tell with --pair-list which to use")
    return found[0]


def submission(
    o: Options,
    name: str,
    queries: dict[str, Query],
    ranked: dict[str, list[str]],
    world: Map,
    threshold: float,
) -> Report:
    """Localizes all queries and writes OUT/NAME_poses.txt."""
    if o.run.out is None:
        raise UserError(f"{name} writes the poses to hand in: tell with --out where to")
    if not queries:
        raise UserError(f"{o.data}: no query is in the list of pairs")
    known = set(world.names)
    unknown = [r for q in queries for r in ranked[q] if r not in known]
    if unknown:
        raise UserError(f"{unknown[0]}: in the list of pairs, but not in the map")
    backend, method = pnp_backend(o), o.make_method()
    threshold = o.threshold or threshold
    resizing = o.resize(o.size or SIZE)
    chosen = choose(list(queries), o.pairs, o.seed)
    jobs = {q: (queries[q].path, {r: world.path(r) for r in ranked[q][: o.top]}) for q in chosen}
    pnp: dict[str, Any] = {"threshold": threshold, "backend": backend, "seed": o.seed}
    clock = Clock()
    found = {}
    for matched in match_jobs(jobs, method, resizing, o.run, clock):
        query = queries[matched.query]
        result = localize(query, matched.found, world, **pnp, problems=matched.problems)
        found[matched.query] = with_fallback(result, world, ranked[matched.query])
    results = [found[q] for q in chosen]
    path = writable_folder(o.run.out) / f"{name}_poses.txt"
    write_poses(path, {Path(r.name).name: r.T for r in results if r.T is not None})
    failed = {r.name: r.problem for r in results if r.problem}
    inliers = sum(r.inliers for r in results) / len(results)
    summary = {
        "benchmark": name, "method": method.name, "queries": len(results), "failed": failed,
        "size": resizing.side, "resize": str(resizing), "ransac": backend, "threshold": threshold,
        "top": o.top, "seed": o.seed, "inliers": inliers, "milliseconds": clock.milliseconds,
        "poses": str(path), "published": LOCALIZATION[name], "per_query": [r.to_dict() for r in results],
    }  # fmt: skip
    title = f"{name}, {method.name}: {resizing}, {backend} PnP at {threshold:g} px, seed {o.seed}"
    table = Table(
        title,
        ["", "queries", "without a pose of their own", "inliers"],
        [[method.name, str(len(results)), str(len(failed)), f"{inliers:.0f}"]],
    )
    published = Table(
        "published, percent within the thresholds",
        ["", *LOCALIZATION[name]["PRISM (paper)"]],
        [[who, *values.values()] for who, values in LOCALIZATION[name].items()],
    )
    notes = [f"{path}: hand it in at visuallocalization.net to have it scored"]
    notes += told(failed, "queries without a pose of their own")
    return Report(summary, [table, published], notes=notes)
