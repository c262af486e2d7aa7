"""Queries and the map photos they are matched with: which ones, and their matches, kept on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from prism_match.engine.methods import Method
from prism_match.evaluation.pairs import Pair, Resize
from prism_match.evaluation.runner import Clock, match_all, progress_bar
from prism_match.matches import Matches

if TYPE_CHECKING:
    from prism_match.matcher import Matcher


class Matched(NamedTuple):
    """All that a query was matched with."""

    query: str
    found: list[tuple[str, Matches]]  # map photos, in the order asked for, without those that failed
    problems: list[str]


def retrieve(
    queries: Mapping[str, Path],
    photos: Mapping[str, Path],
    matcher: Matcher,
    top: int,
    cache: Path | None = None,
    progress: bool = False,
) -> tuple[dict[str, list[str]], dict[Path, str]]:
    """For each query the `top` map photos most like it by the global descriptor of the matcher's backbone,
    best first; and what is wrong with files that cannot be read. A query that is a map photo itself is not
    matched with itself. cache: where descriptors stay, an .npz."""
    from prism_match.maps.retrieval import describe_files, top_pairs

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
    method: Method,
    resizing: Resize,
    cache: Path | None,
    clock: Clock,
    progress: bool = False,
) -> Iterator[Matched]:
    """queries: by name, their file and the map photos to match with. Each comes as soon as all its pairs are
    matched. What is in the cache is not matched again."""
    pairs = [
        Pair(name=f"{query}\t{photo}", image0=path, image1=photo_path, split=query, scene=photo)
        for query, (path, photos) in queries.items()
        for photo, photo_path in photos.items()
    ]
    waiting = {query: len(photos) for query, (_, photos) in queries.items()}
    matches: dict[str, dict[str, Matches]] = {query: {} for query in queries}
    problems: dict[str, list[str]] = {query: [] for query in queries}
    yield from (Matched(query, [], []) for query, count in waiting.items() if not count)
    with progress_bar(len(pairs), 0, "matching", progress) as tick:
        for pair, found in match_all(pairs, method, resizing, cache, clock):
            query = pair.split
            if isinstance(found, str):
                problems[query].append(found)
            else:
                matches[query][pair.scene] = found
            waiting[query] -= 1
            tick()
            if not waiting[query]:
                mine = matches.pop(query)
                ordered = [(photo, mine[photo]) for photo in queries[query][1] if photo in mine]
                yield Matched(query, ordered, list(dict.fromkeys(problems[query])))
