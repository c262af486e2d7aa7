"""Draws the scores over pairs seen: every table of a training log that has these two columns.

python benchmarks/curves.py docs/training-log.md -o docs/images/training.png
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from prism_match.errors import UserError

PAIRS, SCORES = "pairs seen in all", ("AUC@5", "AUC@10", "AUC@20")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("log", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    rows = [r for r in read_tables(args.log.read_text(encoding="utf-8")) if PAIRS in r]
    if not rows:
        raise UserError(f"{args.log}: no table with a column {PAIRS!r}")
    draw(rows, args.out)


def read_tables(text: str) -> list[dict[str, str]]:
    """The rows of all Markdown tables, by the names of their columns."""
    rows: list[dict[str, str]] = []
    head: list[str] = []
    for line in text.splitlines():
        cells = [c.strip() for c in line.strip("| ").split("|")] if line.startswith("|") else []
        if not cells or not head:
            head = cells
        elif not set(line) <= set("|-: "):
            rows.append(dict(zip(head, cells, strict=True)))
    return rows


def draw(rows: list[dict[str, str]], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), dpi=110)
    pairs = [float(r[PAIRS].replace(",", "")) / 1000 for r in rows]
    settled = [i for i, r in enumerate(rows) if int(r["seeds"]) > 1]
    for name in SCORES:
        values = [float(r[name]) for r in rows]
        (line,) = axes.plot([pairs[i] for i in settled], [values[i] for i in settled], "o-", label=name)
        axes.plot(pairs, values, ".", color=line.get_color(), alpha=0.5)
    for i in settled:
        axes.annotate(
            rows[i]["run"], (pairs[i], float(rows[i][SCORES[-1]])), (-4, 7), textcoords="offset points"
        )
    axes.set(xlabel="pairs seen, thousands", ylabel="AUC, percent", ylim=(0, 100), xlim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(out)


if __name__ == "__main__":
    try:
        main()
    except (UserError, OSError) as error:
        sys.exit(f"curves: {error}")
