"""The matches of one image with many others, in one table."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prism_match.errors import UserError
from prism_match.files import atomic_path
from prism_match.matches import BELIEF, Matches, belief_of

COLUMNS = ("other", "x0", "y0", "x1", "y1", "score")


@dataclass(frozen=True, repr=False)
class MatchTable:
    """A row for each match, those of the first of the others first and of each one the best first. Pixels are
    those of the original images; the centre of the first one is (0, 0)."""

    other: np.ndarray  # n, int64: the number of the other image
    keypoints0: np.ndarray  # n 2, float32: in the query
    keypoints1: np.ndarray  # n 2, float32: in the other image
    scores: np.ndarray  # n, float32
    name0: str
    names1: list[str]  # m: of the others
    size0: tuple[int, int]  # width, height
    sizes1: list[tuple[int, int]]
    certainty: np.ndarray | None = None  # n, float32, as `Matches` has it
    sigma: np.ndarray | None = None  # n, float32

    @staticmethod
    def of(found: Iterable[Matches]) -> MatchTable:
        """found: one result for each of the others, in order, all of the same query."""
        parts = list(found)
        if not parts:
            raise UserError("there are no images to match the query with")
        keypoints0, keypoints1, scores = (
            np.concatenate([getattr(m, key) for m in parts]) for key in ("keypoints0", "keypoints1", "scores")
        )
        belief = {}
        for key in BELIEF:
            told = [getattr(m, key) for m in parts]
            belief[key] = None if any(x is None for x in told) else np.concatenate(told)
        return MatchTable(
            np.repeat(np.arange(len(parts)), [len(m) for m in parts]), keypoints0, keypoints1, scores,
            parts[0].name0, [m.name1 for m in parts], parts[0].size0, [m.size1 for m in parts], **belief,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<{len(self)} matches of {self.name0 or 'an image'} with {len(self.names1)} others>"

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, other: int) -> Matches:
        """Those with one of the others, by its number."""
        if not -len(self.names1) <= other < len(self.names1):
            raise IndexError(f"there are {len(self.names1)} other images, not {other}")
        other %= len(self.names1)
        rows = self.other == other
        return Matches(
            self.keypoints0[rows], self.keypoints1[rows], self.scores[rows],
            self.size0, self.sizes1[other], self.name0, self.names1[other],
            **{key: column[rows] for key, column in belief_of(self).items()},
        )  # fmt: skip

    def __iter__(self) -> Iterator[Matches]:
        return (self[n] for n in range(len(self.names1)))

    @property
    def counts(self) -> np.ndarray:
        """m, int64: how many matches there are with each of the others."""
        return np.bincount(self.other, minlength=len(self.names1))

    def records(self) -> np.ndarray:
        """n, with named columns: other, x0, y0, x1, y1, score, and certainty and sigma where these are known.
        `pandas.DataFrame` takes it as it is."""
        columns = [self.other, *self.keypoints0.T, *self.keypoints1.T, self.scores]
        named = dict(zip(COLUMNS, columns, strict=True)) | belief_of(self)
        records = np.empty(len(self), [(name, column.dtype) for name, column in named.items()])
        for name, column in named.items():
            records[name] = column
        return records

    def save(self, path: str | Path) -> None:
        """To a .csv with a row for each match, the other image by its name."""
        if Path(path).suffix.lower() != ".csv":
            raise UserError(f"{path}: a table of matches is saved as .csv")
        with atomic_path(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            records = self.records()
            writer.writerow(records.dtype.names or ())
            for other, *numbers in records.tolist():
                writer.writerow([self.names1[other], *numbers])
