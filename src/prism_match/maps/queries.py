"""Queries and the map photos they are matched with: which ones, their matches, and so their poses."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from prism_match.cameras import Camera, pinhole, read_camera_list
from prism_match.config import UNLIKELY, PnpBackend
from prism_match.engine import Engine, Limits, MatchStore, Names, Prism, Resize
from prism_match.engine.cluster import Cluster, make_engine
from prism_match.engine.photos import IMAGE_SUFFIXES
from prism_match.errors import UserError
from prism_match.files import lock_folder
from prism_match.images import image_size
from prism_match.maps.cameras import UNKNOWN_FOCAL, check_numbers, read_exif
from prism_match.maps.landmarks import Map
from prism_match.maps.localization import (
    Localized,
    Query,
    localize,
    read_retrieval,
    with_fallback,
    write_poses,
)
from prism_match.maps.retrieval import describe_files, top_pairs
from prism_match.maps.stages import STAGES
from prism_match.matcher import PairMatcher
from prism_match.matches import Matches


class MatchedQuery(NamedTuple):
    """All that a query was matched with."""

    query: str
    found: list[tuple[str, Matches]]  # map photos, in the order asked for, without those that failed
    problems: list[str]


def retrieve(
    queries: Mapping[str, Path],
    photos: Mapping[str, Path],
    matcher: PairMatcher,
    top: int,
    cache: Path | None = None,
    progress: bool = False,
) -> tuple[dict[str, list[str]], dict[Path, str]]:
    """For each query the `top` map photos most like it by the global descriptor of the matcher's backbone,
    best first; and what is wrong with files that cannot be read. A query that is a map photo itself is not
    matched with itself. cache: where descriptors stay, an .npz."""
    described, broken = describe_files(matcher, [*photos.values(), *queries.values()], cache, progress)
    asked = [q for q, path in queries.items() if path in described]
    names = [n for n, path in photos.items() if path in described]
    ranked: dict[str, list[str]] = {q: [] for q in queries}
    if asked and names:
        rows = [
            np.stack([described[of[n]] for n in some]) for of, some in ((queries, asked), (photos, names))
        ]
        for q, r in top_pairs(rows[0], rows[1], top + 1).tolist():
            query, photo = asked[q], names[r]
            itself = photos[photo].resolve() == queries[query].resolve()
            if not itself and len(ranked[query]) < top:
                ranked[query].append(photo)
    return ranked, broken


def match_queries(
    queries: Mapping[str, tuple[Path, Mapping[str, Path]]],
    engine: Engine,
    store: MatchStore | None,
    *,
    by_content: bool = False,
    progress: bool = False,
) -> Iterator[MatchedQuery]:
    """queries: by name, their file and the map photos to match with. Each comes as soon as all its pairs are
    matched. What is in the store, as `queries/NAME` and `map/NAME`, or `by_content`, is not matched again."""
    files: dict[str, Path] = {}
    asked: dict[Names, list[tuple[str, str]]] = {}
    for query, (path, photos) in queries.items():
        for photo, photo_path in photos.items():
            ends = ((f"queries/{query}", path), (f"map/{photo}", photo_path))
            names = tuple(str(p) if by_content else name for name, p in ends)
            files |= dict(zip(names, (path, photo_path), strict=True))
            asked.setdefault((names[0], names[1]), []).append((query, photo))
    waiting = {query: len(photos) for query, (_, photos) in queries.items()}
    matches: dict[str, dict[str, Matches]] = {query: {} for query in queries}
    problems: dict[str, list[str]] = {query: [] for query in queries}
    yield from (MatchedQuery(query, [], []) for query, count in waiting.items() if not count)
    total = sum(waiting.values())
    with tqdm(total=total, desc="matching", unit="pair", disable=None if progress else True) as bar:
        for outcome in engine.match(files, list(asked), store, by_content=by_content):
            for query, photo in asked[outcome.pair]:
                if outcome.matches is None:
                    problems[query].append(outcome.problem)
                else:
                    matches[query][photo] = outcome.matches
                waiting[query] -= 1
                bar.update()
                if not waiting[query]:
                    mine = matches.pop(query)
                    ordered = [(photo, mine[photo]) for photo in queries[query][1] if photo in mine]
                    yield MatchedQuery(query, ordered, list(dict.fromkeys(problems[query])))


@dataclass(frozen=True)
class LocalizeOptions:
    top: int = 10  # map photos that a query is matched with
    size: int = 832  # longer side to match at
    max_error: float = 12.0  # of RANSAC, in pixels
    min_inliers: int = 12  # a pose that fewer points agree with is none
    same_place: float = UNLIKELY  # map photos that show the same place with less probability are not used
    fallback: bool = False  # where there is no pose, take that of the most similar map photo
    backend: PnpBackend = "auto"
    seed: int = 0
    batch: int = 1  # pairs at a time
    cluster: Cluster | None = None  # to match on; None: here


def localize_photos(
    photos: Mapping[str, Path],
    mapped: Map,
    matcher: PairMatcher,
    folder: Path,
    options: LocalizeOptions,
    given: dict[str, Query] | None = None,
    listed: dict[str, list[str]] | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """All of `prism localize`: poses.txt in `folder`, and what localization.json holds.
    given: queries whose cameras are known; listed: map photos for each query, best first [retrieval]."""
    if (folder / STAGES).exists():  # the matches of the map have the same name as those with it
        raise UserError(f"{folder}: has a map in it; give another folder for what is found")
    map_photos = {name: mapped.path(name) for name in mapped.names}
    broken: dict[Path, str] = {}
    with lock_folder(folder):
        if listed is None:
            cache = folder / "descriptors.npz"
            ranked, broken = retrieve(photos, map_photos, matcher, options.top, cache, progress)
        else:
            ranked = {q: [r for r in listed[q] if r in map_photos][: options.top] for q in photos}
        for path in map_photos.values():
            if path in broken:
                print(f"prism: left out of the map: {broken[path]}", file=sys.stderr)
        jobs = {q: (path, {r: map_photos[r] for r in ranked[q]}) for q, path in photos.items()}
        results: dict[str, Localized] = {}
        cameras: dict[str, dict[str, Any]] = {}
        limits = Limits(options.batch)
        engine = make_engine(Prism(matcher), Resize.largest(options.size), limits, None, options.cluster)
        with MatchStore(folder / "matches.h5", engine.settings) as store:
            for matched in match_queries(jobs, engine, store, progress=progress):
                name = matched.query
                try:
                    if photos[name] in broken:
                        raise UserError(broken[photos[name]])
                    query, origin = make_query(name, photos[name], given, mapped, ranked[name])
                except UserError as error:
                    results[name] = Localized(name, None, 0, 0, {}, str(error))
                    continue
                result = localize(
                    query, matched.found, mapped, threshold=options.max_error, backend=options.backend,
                    seed=options.seed, min_inliers=options.min_inliers, same_place=options.same_place,
                    problems=matched.problems,
                )  # fmt: skip
                results[name] = with_fallback(result, mapped, ranked[name]) if options.fallback else result
                cameras[name] = {**asdict(query.camera), "from": origin}
        ordered = {q: results[q] for q in photos}
        write_poses(folder / "poses.txt", {q: r.T for q, r in ordered.items() if r.T is not None})
    failed = {q: r.problem for q, r in ordered.items() if r.problem}
    return {
        "queries": len(photos), "localized": len(photos) - len(failed), "failed": failed,
        "pnp": options.backend, "max_error": options.max_error, "top": options.top, "size": options.size,
        "seed": options.seed, "same_place": options.same_place,
        "results": [r.to_dict() | {"camera": cameras.get(q)} for q, r in ordered.items()],
    }  # fmt: skip


# ---- what is asked for


def find_queries(given: list[Path]) -> dict[str, Path]:
    """Photos by name: that within the folder, or of the file itself."""
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
    listed = read_retrieval(pair_list)
    if not any(q in listed for q in photos):
        raise UserError(f"{pair_list}: none of the queries is in it; the first query is {next(iter(photos))}")
    return {q: listed.get(q, []) for q in photos}


def read_given(intrinsics: str, photos: dict[str, Path]) -> dict[str, Query]:
    """Queries with cameras out of a file, which are for the photos as they are stored, or with the same
    fx,fy,cx,cy in our pixels for all, as they are shown."""
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


def make_query(
    name: str, path: Path, given: dict[str, Query] | None, mapped: Map, ranked: list[str]
) -> tuple[Query, str]:
    """A query, and where its camera is from: what was given, EXIF, the most similar map photo of the same
    shape, or a guess."""
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
