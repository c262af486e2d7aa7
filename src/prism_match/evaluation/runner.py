"""Scores a method on a benchmark's pairs: matches come from the engine, and their scores are worked out by
all cores beside it. What is done is on disk, so that a run can be continued."""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from tqdm import tqdm

from prism_match.config import parse_json
from prism_match.engine import Clock, Engine, Limits, MatchStore, Names, Resize
from prism_match.engine.cluster import Cluster, make_engine
from prism_match.engine.methods import Method
from prism_match.engine.photos import content_of
from prism_match.errors import UserError
from prism_match.evaluation.metrics import auc
from prism_match.evaluation.pairs import Pair, name_apart
from prism_match.files import atomic_path, is_file, lock_folder, short_hash, writable_folder
from prism_match.matches import Matches


@dataclass(frozen=True)
class Score:
    """How one pair went."""

    name: str
    split: str
    scene: str
    error: float  # degrees or pixels; infinite: failed
    matches: int = 0
    inliers: int = 0
    precision: float = 0.0  # percent of the matches
    parts: dict[str, float] = field(default_factory=dict)  # what the error is made of
    problem: str = ""  # why it failed


def check_types(score: Score) -> None:
    """Of one that was read from a file. Raises `ValueError`."""
    texts = (score.name, score.split, score.scene, score.problem)
    numbers = (score.error, score.matches, score.inliers, score.precision, *dict(score.parts).values())
    if not all(isinstance(x, str) for x in texts):
        raise ValueError("a text is none")
    if not all(isinstance(x, (int, float)) for x in numbers):
        raise ValueError("a number is none")


Scorer = Callable[[Any, Matches], Score]


@dataclass(frozen=True)
class Result:
    """A method's scores on a benchmark, with all that they depend on."""

    benchmark: str
    method: str
    settings: dict[str, Any]  # resize, ransac, threshold, seed, ...
    thresholds: tuple[float, ...]  # of the AUC
    scores: tuple[Score, ...]
    unusable: dict[str, str]  # pairs without truth: name -> why; in no average
    milliseconds: float | None  # a pair, matching only; None: all came from the cache

    @property
    def auc(self) -> dict[str, float]:
        """Percent, by threshold."""
        return auc((s.error for s in self.scores), self.thresholds)

    @property
    def failures(self) -> dict[str, str]:
        return {s.name: s.problem for s in self.scores if s.problem}

    def mean(self, name: str) -> float:
        return float(np.mean([getattr(s, name) for s in self.scores])) if self.scores else float("nan")

    def subset(self, key: str) -> dict[str, Result]:
        """The same for each "split" or "scene"."""
        groups: dict[str, list[Score]] = {}
        for score in self.scores:
            groups.setdefault(getattr(score, key), []).append(score)
        return {k: replace(self, scores=tuple(v), unusable={}) for k, v in groups.items() if k}

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the numbers, and every pair."""
        return {
            "benchmark": self.benchmark,
            "method": self.method,
            "pairs": len(self.scores),
            **self.settings,
            "auc": self.auc,
            "matches": self.mean("matches"),
            "inliers": self.mean("inliers"),
            "precision": self.mean("precision"),
            "milliseconds": self.milliseconds,
            "splits": {k: {"pairs": len(r.scores), "auc": r.auc} for k, r in self.subset("split").items()},
            "scenes": {k: {"pairs": len(r.scores), "auc": r.auc} for k, r in self.subset("scene").items()},
            "failures": self.failures,
            "unusable": self.unusable,
            "per_pair": [score_to_json(s) for s in self.scores],
        }


@dataclass(frozen=True)
class Run:
    """Where a run keeps what it has done, and how it shows that it is busy."""

    cache: Path | None = None  # matches, for other back ends
    out: Path | None = None  # scores, for going on after an interruption
    workers: int | None = None  # threads that score [all cores]
    progress: bool = False
    batch: int = 1  # pairs matched at a time
    cluster: Cluster | None = None  # to match on; None: here


def evaluate(
    benchmark: str,
    pairs: Sequence[Pair],
    method: Method,
    scorer: Scorer,
    resizing: Resize,
    thresholds: tuple[float, ...],
    settings: dict[str, Any],
    run: Run,
) -> Result:
    """`settings` is what the scorer depends on; it is told with the numbers."""
    pairs = name_apart(pairs)
    unusable = {p.name: p.problem for p in pairs if p.problem}
    usable = [p for p in pairs if not p.problem]
    missing = {p.name: f"{f}: no such file" for p in usable for f in (p.image1, p.image0) if not is_file(f)}
    if not usable or len(missing) == len(usable):
        reason = next(iter((missing or unusable).values()), "the list is empty")
        raise UserError(f"{benchmark}: none of the {len(pairs)} pairs can be used; the first: {reason}")
    size = {"size": resizing.side, "resize": str(resizing)}
    settings = {**size, **settings, "method_settings": method.settings}
    scores = {p.name: failed(p, missing[p.name]) for p in usable if p.name in missing}
    journal = Journal(run.out, {"benchmark": benchmark, **settings, "computed_in": method.precision}, usable)
    scores |= {k: v for k, v in journal.done.items() if k not in scores}
    left = [p for p in usable if p.name not in scores]
    clock = Clock()
    unmatched: set[str] = set()
    with journal, progress_bar(len(usable), len(usable) - len(left), benchmark, run.progress) as bar:
        matched = noting(match_all(left, method, resizing, run, clock), unmatched)
        for score in score_all(matched, scorer, run.workers):
            scores[score.name] = score
            if score.name not in unmatched:  # it may go better next time
                journal.add(score)
            bar.update()
    ordered = tuple(scores[p.name] for p in usable)
    return Result(benchmark, method.name, settings, thresholds, ordered, unusable, clock.milliseconds)


def failed(pair: Pair, problem: str) -> Score:
    return Score(pair.name, pair.split, pair.scene, float("inf"), problem=problem)


def match_all(
    pairs: Sequence[Pair], method: Method, resizing: Resize, run: Run, clock: Clock
) -> Iterator[tuple[Pair, Matches | str]]:
    """Each pair with its matches, in pixels of the files, or with why it could not be matched."""
    engine = make_engine(method, resizing, Limits(run.batch), clock, run.cluster)
    files: dict[str, Path] = {}
    asked: dict[Names, list[Pair]] = {}
    for pair in pairs:
        names = str(pair.image0), str(pair.image1)
        files |= dict(zip(names, (pair.image0, pair.image1), strict=True))
        asked.setdefault(names, []).append(pair)
    with match_store(engine, run.cache) as store:
        for outcome in engine.match(files, list(asked), store, by_content=True):
            for pair in asked[outcome.pair]:
                yield pair, outcome.problem if outcome.matches is None else outcome.matches


def noting(
    matched: Iterator[tuple[Pair, Matches | str]], unmatched: set[str]
) -> Iterator[tuple[Pair, Matches | str]]:
    """The same; the names of those that could not be matched are added to `unmatched`."""
    for pair, found in matched:
        if isinstance(found, str):
            unmatched.add(pair.name)
        yield pair, found


@contextmanager
def match_store(engine: Engine, folder: Path | None) -> Iterator[MatchStore | None]:
    """Matches on disk, in a file of their own for each method, its settings and the size. Photos are known
    there by their content alone, so that it can go to another machine. None: nothing is kept."""
    if folder is None:
        yield None
        return
    settings = engine.settings | {"precision": engine.method.precision}
    name = f"{Path(settings['method']).name}-{short_hash(settings)}.h5"
    with MatchStore(writable_folder(folder) / name, settings) as store:
        yield store


def score_all(
    matched: Iterator[tuple[Pair, Matches | str]], scorer: Scorer, workers: int | None
) -> Iterator[Score]:
    """In order. Threads are enough: OpenCV and PoseLib let go of Python's lock while they work."""
    pool = ThreadPoolExecutor(workers or os.cpu_count() or 1)
    waiting: deque[Future[Score]] = deque()
    try:
        for pair, found in matched:
            work: Callable[[Any, Any], Score] = failed if isinstance(found, str) else scorer
            waiting.append(pool.submit(work, pair, found))
            while waiting and waiting[0].done():
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class Journal:
    """The scores of a run, one JSON line each, so that an interrupted run goes on where it was. A pair whose
    images or truth are no longer the same is not done."""

    def __init__(self, folder: Path | None, settings: dict[str, Any], pairs: Sequence[Pair]):
        self.keys = {pair.name: content_key(pair) for pair in pairs} if folder else {}
        self.done: dict[str, Score] = {}
        self.path = writable_folder(folder) / "pairs.jsonl" if folder else None
        self.lock = lock_folder(folder) if folder else None
        self.head = json.dumps(settings, sort_keys=True)
        self.file: TextIO | None = None
        if self.path is not None and self.path.is_file():
            self._read(self.path)

    def _read(self, path: Path) -> None:
        head, *lines = path.read_bytes().splitlines() or [b""]
        if head != self.head.encode():
            print(f"prism: {path}: of a run with other settings; begun anew", file=sys.stderr)
            return
        for line in lines:
            try:
                values = parse_json(line)
                key, error = values.pop("key"), values.pop("error")
                score = Score(**values, error=float("inf") if error is None else error)
                check_types(score)
            except (ValueError, TypeError, KeyError, AttributeError):  # half-written, or damaged
                continue
            # Pairs that this run leaves out stay as they are.
            if self.keys.setdefault(score.name, key) == key:
                self.done[score.name] = score

    def __enter__(self) -> Journal:
        if self.path is not None:
            lines = [self.head, *map(self._line, self.done.values())]
            with atomic_path(self.path) as temporary:
                temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
            self.file = self.path.open("a", encoding="utf-8")
        return self

    def add(self, score: Score) -> None:
        if self.file is not None:
            self.file.write(self._line(score) + "\n")
            self.file.flush()

    def _line(self, score: Score) -> str:
        return json.dumps(score_to_json(score) | {"key": self.keys[score.name]})

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            self.file.close()
        if self.lock is not None:
            self.lock.close()


def content_key(pair: Pair) -> str:
    """Of all that is known about the pair: the content of its images, wherever they are, and the truth."""
    known: list[Any] = [content_if_readable(p) for p in (pair.image0, pair.image1)]
    for value in vars(pair).values():
        if not isinstance(value, Path):
            known.append(value.tolist() if isinstance(value, np.ndarray) else value)
    return short_hash(known)


def content_if_readable(path: Path) -> str | None:
    try:
        return content_of(path) if is_file(path) else None
    except UserError:  # its pairs fail by name
        return None


def score_to_json(score: Score) -> dict[str, Any]:
    """Infinity, which JSON does not know, becomes null."""
    return asdict(score) | {"error": score.error if np.isfinite(score.error) else None}


def progress_bar(total: int, done: int, what: str, show: bool) -> tqdm:
    return tqdm(total=total, initial=done, desc=what, unit="pair", disable=None if show else True)
