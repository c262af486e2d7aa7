"""What a benchmark leaves behind: tables for the terminal, Markdown, JSON, curves, and pictures of pairs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from prism_match import viz
from prism_match.engine import Clock, Resize
from prism_match.engine.methods import Method
from prism_match.evaluation.hpatches import PRECISION_AT, in_resized_pixels, reprojection_errors
from prism_match.evaluation.metrics import EPIPOLAR_THRESHOLD, epipolar_errors
from prism_match.evaluation.pairs import HomographyPair, Pair, PosePair
from prism_match.evaluation.pose import points_in_frames
from prism_match.evaluation.published import PUBLISHED
from prism_match.evaluation.runner import Result, Run, Score, match_all
from prism_match.files import atomic_path, writable_folder, write_json
from prism_match.images import load_image, write_png
from prism_match.matches import Matches

SHOWN = 5  # worst and best pairs that are drawn
NAMED = 5  # of those that something is wrong with


@dataclass(frozen=True)
class Table:
    title: str
    columns: list[str]
    rows: list[list[str]]

    def __str__(self) -> str:
        """For the terminal: the first column to the left, the numbers to the right."""
        lines = [self.columns, *self.rows]
        widths = [max(len(line[n]) for line in lines) for n in range(len(self.columns))]
        text = ["  ".join([x[0].ljust(widths[0]), *map(str.rjust, x[1:], widths[1:])]) for x in lines]
        return "\n".join([self.title, text[0], "-" * len(text[0]), *text[1:]])

    def markdown(self) -> str:
        rule = ["---", *["---:"] * (len(self.columns) - 1)]
        lines = [f"| {' | '.join(line)} |" for line in (self.columns, rule, *self.rows)]
        return "\n".join([f"**{self.title}**", "", *lines])


@dataclass(frozen=True)
class Evidence:
    """What is needed to draw the pairs of a result."""

    result: Result
    pairs: dict[str, Pair]
    method: Method
    resizing: Resize
    run: Run


@dataclass(frozen=True)
class Report:
    summary: dict[str, Any]  # the JSON
    tables: list[Table]
    curves: dict[str, Result] = field(default_factory=dict)  # by the name in the legend
    evidence: Evidence | None = None
    notes: list[str] = field(default_factory=list)
    caveat: str = ""  # without which the numbers would be misread: it stands above them

    def __str__(self) -> str:
        above = [f"note: {self.caveat}"] if self.caveat else []
        return "\n\n".join([*above, *map(str, self.tables), *(f"note: {n}" for n in self.notes)])

    def markdown(self, command: str) -> str:
        parts = [f"# {self.summary['benchmark']}", f"    {command}", *filter(None, [self.caveat])]
        return "\n\n".join([*parts, *(t.markdown() for t in self.tables), *self.notes]) + "\n"

    def write(self, out: Path, command: str) -> list[Path]:
        """results.json, report.md, auc.png and, where there are pairs to show, pictures of them."""
        folder = writable_folder(out)
        write_json(folder / "results.json", self.summary)
        with atomic_path(folder / "report.md") as temporary:
            temporary.write_text(self.markdown(command), encoding="utf-8")
        written = [folder / "results.json", folder / "report.md"]
        pictures = {"auc.png": draw_curves(self.curves, self.tables[0].title)} if self.curves else {}
        if self.evidence is not None:
            pictures |= draw_extremes(self.evidence)
            for old in (*folder.glob("best_*.png"), *folder.glob("worst_*.png")):
                old.unlink()  # of a run over more pairs
        for name, picture in pictures.items():
            write_png(folder / name, picture)
            written.append(folder / name)
        return written


def describe(result: Result, resize: str | None = None) -> str:
    """Everything a number means nothing without. `resize`: where not all of a table is of one size."""
    s = result.settings
    return (
        f"{result.benchmark}: {len(result.scores)} pairs, {resize or s['resize']}, "
        f"{s['ransac']} RANSAC {s['threshold']:g} px, seed {s['seed']}"
    )


def main_table(result: Result) -> Table:
    """Ours beside the published numbers."""
    columns = ["method", *auc_columns(result), *fact_columns(result)]
    rows = [[f"{result.method}", *auc_cells(result), *fact_cells(result)]]
    for row in PUBLISHED.get(result.benchmark, {}).get(str(result.settings["ransac"]), []):
        name = row.method if row.size is None else f"{row.method}, {row.size} px"
        rows.append([name, *cells(row.auc), "", "", "", ""])
    return Table(describe(result), columns, rows)


def breakdown(result: Result, key: str, title: str) -> list[Table]:
    """A table by "split" or "scene", where there are at least two."""
    groups = result.subset(key)
    if len(groups) < 2:
        return []
    columns = [title, "pairs", *auc_columns(result), *fact_columns(result)[:3], "failed"]
    rows = [
        [name, str(len(r.scores)), *auc_cells(r), *fact_cells(r)[:3], str(len(r.failures))]
        for name, r in groups.items()
    ]
    return [Table(f"by {title}", columns, rows)]


def problems(result: Result) -> list[str]:
    """A line about what failed and what could not be measured, by name."""
    unusable = told(result.unusable, "pairs cannot be scored and are in no average")
    return told(result.failures, "pairs failed and count as such") + unusable


def told(reasons: dict[str, str], what: str) -> list[str]:
    """A line about what went wrong with some, by name, if anything did."""
    listed = "; ".join([f"{k} ({v})" for k, v in reasons.items()][:NAMED])
    more = f"; and {len(reasons) - NAMED} more" if len(reasons) > NAMED else ""
    return [f"{len(reasons)} {what}: {listed}{more}"] if reasons else []


def auc_columns(result: Result) -> list[str]:
    return [f"AUC@{t:g}" for t in result.thresholds]


def auc_cells(result: Result) -> list[str]:
    return cells(result.auc.values())


def cells(values: Iterable[float]) -> list[str]:
    return [f"{v:.1f}" for v in values]


def fact_columns(result: Result) -> list[str]:
    return ["matches", "inliers", f"precision@{result.settings['precision_at']}", "ms/pair"]


def fact_cells(result: Result) -> list[str]:
    time = "cached" if result.milliseconds is None else f"{result.milliseconds:.0f}"
    return [f"{result.mean('matches'):.0f}", f"{result.mean('inliers'):.0f}",
            f"{result.mean('precision'):.1f} %", time]  # fmt: skip


# ---- pictures

COLOURS = [
    (214, 39, 40), (31, 119, 180), (44, 160, 44), (255, 127, 14), (148, 103, 189), (140, 86, 75),
    (227, 119, 194), (127, 127, 127), (188, 189, 34), (23, 190, 207), (0, 0, 0), (0, 0, 130),
]  # fmt: skip
GRAY = (60, 60, 60)
SMALL = 0.4  # size of letters


def draw_curves(results: dict[str, Result], caption: str) -> np.ndarray:
    """h w 3, uint8: the share of pairs over their error, up to the last threshold of the AUC."""
    first = next(iter(results.values()))
    limit, (left, top, width, height) = max(first.thresholds), (60, 20, 560, 360)
    picture = np.full((456, 640, 3), 255, np.uint8)

    def at(error: float, share: float) -> tuple[int, int]:
        return left + round(width * error / limit), top + height - round(height * share)

    for n in range(6):
        cv2.line(picture, at(0, n / 5), at(limit, n / 5), (225, 225, 225), 1)
        viz.put_text(picture, f"{20 * n} %", (14, at(0, n / 5)[1] + 4), GRAY, SMALL)
    for threshold in first.thresholds:
        cv2.line(picture, at(threshold, 0), at(threshold, 1), (225, 225, 225), 1)
        viz.put_text(picture, f"{threshold:g}", (at(threshold, 0)[0] - 6, top + height + 18), GRAY, SMALL)
    for n, text in enumerate(("share of pairs over their error", caption)):
        viz.put_text(picture, text, (left, top + height + 40 + 18 * n), GRAY, SMALL)
    for n, (name, result) in enumerate(results.items()):
        colour = COLOURS[n % len(COLOURS)]
        line = [at(*point) for point in recall_curve(result, limit)]
        cv2.polylines(picture, [np.array(line, np.int32)], False, colour, 2, cv2.LINE_AA)
        text = f"{name}: {' / '.join(auc_cells(result))}"
        line_at = (left + 200, top + height - 12 - 18 * (len(results) - 1 - n))
        viz.put_text(picture, text, line_at, colour, SMALL)
    return picture


def recall_curve(result: Result, limit: float) -> list[tuple[float, float]]:
    errors = sorted(s.error for s in result.scores if s.error <= limit)
    points = [(0.0, 0.0), *((e, (n + 1) / len(result.scores)) for n, e in enumerate(errors))]
    return [*points, (limit, points[-1][1])]


def draw_extremes(evidence: Evidence) -> dict[str, np.ndarray]:
    """The worst and the best pairs that could be matched, by the name of their file. They are matched
    once more, which gives the same, or come from the cache."""
    ranked = sorted((s for s in evidence.result.scores if s.matches), key=lambda s: s.error)
    best = ranked[:SHOWN]
    worst = [s for s in reversed(ranked) if s not in best][:SHOWN]
    chosen = {s.name: (f"best_{n}.png", s) for n, s in enumerate(best, 1)}
    chosen |= {s.name: (f"worst_{n}.png", s) for n, s in enumerate(worst, 1)}
    pairs = [evidence.pairs[name] for name in chosen]
    found = match_all(pairs, evidence.method, evidence.resizing, evidence.run, Clock())
    pictures = {}
    for pair, matches in found:
        if isinstance(matches, Matches):
            name, score = chosen[pair.name]
            pictures[name] = draw_pair(pair, matches, score, evidence.resizing)
    return dict(sorted(pictures.items()))


def draw_pair(pair: Pair, matches: Matches, score: Score, resizing: Resize) -> np.ndarray:
    """Matches from green, exact, to red, as wrong as the threshold of the precision or worse."""
    if isinstance(pair, PosePair):
        assert pair.T_0to1 is not None
        points = points_in_frames(pair, matches)
        share = epipolar_errors(*points, pair.K0, pair.K1, pair.T_0to1) / EPIPOLAR_THRESHOLD
        title = f"pose error {amount(score.error)} deg" + "".join(
            f", {k} {v:.2f}" for k, v in score.parts.items()
        )
    else:
        assert isinstance(pair, HomographyPair)
        points0, points1, truth, _ = in_resized_pixels(pair, matches, resizing)
        share = reprojection_errors(points0, points1, truth) / PRECISION_AT
        title = f"corner error {amount(score.error)} px"
    title = f"{pair.name}\n{title}"
    title += f"\n{score.matches} matches, {score.inliers} inliers, precision {score.precision:.0f} %"
    images = load_image(pair.image0).rgb, load_image(pair.image1).rgb
    # Wrong ones last, so that they are not hidden.
    order = np.argsort(np.nan_to_num(share, nan=np.inf), kind="stable")
    values = 1 - np.nan_to_num(share, nan=1.0).clip(0, 1)
    return viz.draw_matches(
        *images, matches.keypoints0[order], matches.keypoints1[order], values[order], title=title
    )


def amount(error: float) -> str:
    return f"{error:.2f}" if np.isfinite(error) else "infinite"
