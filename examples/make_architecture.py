"""Draws docs/images/architecture.png: the layers, and the way of a photo through them.

python examples/make_architecture.py
"""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

OUT = Path(__file__).resolve().parents[1] / "docs" / "images" / "architecture.png"
SCALE = 2
WIDTH, HEIGHT = 1010, 668
DARK, SOFT, LINE, RED = "#222222", "#444444", "#8a97a8", "#b03030"
LEFT, FULL, GAP = 30, 560, 12  # of the layers, in pixels
STEPS, STEP_WIDTH = 650, 300  # of the way

picture = Image.new("RGB", (SCALE * WIDTH, SCALE * HEIGHT), "white")
draw = ImageDraw.Draw(picture)


def text(x: float, y: float, words: str, size: float, colour: str = SOFT, bold: bool = False) -> None:
    font = ImageFont.load_default(SCALE * size)
    draw.text((SCALE * x, SCALE * y), words, colour, font, stroke_width=0.6 if bold else 0)


def box(x: float, y: float, w: float, h: float, fill: str, title: str, lines: list[str], edge: str) -> None:
    corners = [SCALE * v for v in (x, y, x + w, y + h)]
    draw.rounded_rectangle(corners, 6 * SCALE, fill, edge, SCALE)
    text(x + 12, y + 7, title, 15, RED if edge == RED else DARK, bold=True)
    for n, line in enumerate(lines):
        text(x + 12, y + 29 + 17 * n, line, 12.5)


def arrow(*points: tuple[float, float]) -> None:
    draw.line([(SCALE * x, SCALE * y) for x, y in points], RED, 2 * SCALE)
    (x0, y0), (x, y) = points[-2:]
    tip = [(x, y), (x - 5, y + 9), (x + 5, y + 9)] if x == x0 else [(x, y), (x + 9, y - 5), (x + 9, y + 5)]
    draw.polygon([(SCALE * a, SCALE * b) for a, b in tip], RED)


def layers() -> dict[str, float]:
    """Their tops, by name."""
    rows = [
        [("cli", ["match, demo, eval, bench, train, data, sfm, localize, export, serve, app, convert, info"],
          "#f2f2f2")],
        [("evaluation", ["benchmarks, scores, reports"], "#e6e0f0"),
         ("export", ["COLMAP, hloc, NeRF"], "#e6e0f0"),
         ("serve", ["the HTTP API, the page"], "#e6e0f0")],
        [("maps", ["retrieval, tracks, reconstruction,", "localization, PnP, the COLMAP worker"], "#d9e6f5"),
         ("training", ["data, supervision, losses,", "trainer, checkpoints"], "#d9e6f5")],
        [("engine", ["Engine, Matcher: pairs in, matches out; decodes ahead, batches, keeps features",
                     "Prism, Sift, Plugin  /  FeatureCache  /  MatchStore"], "#dcebdc")],
        [("one pair of photos", ["images, matches, geometry, cameras, polish, subpixel, matcher, weights,",
                                 "viz, files, frames, colmap_model"], "#fdf0d5")],
        [("model", ["PRISM: backbone, MPMs, pruning, match prediction, refinement; the same arranged for "
                    "speed"], "#f8dcd4")],
        [("config, errors, stages", [], "#f2f2f2")],
    ]  # fmt: skip
    tops, y = {}, 46.0
    for row in rows:
        height = max(36 + (19 * len(lines) if lines else 0) for _, lines, _ in row) + 4
        width = (FULL - GAP * (len(row) - 1)) / len(row)
        for n, (title, lines, fill) in enumerate(row):
            box(LEFT + n * (width + GAP), y, width, height, fill, title, lines, LINE)
            tops[title] = y
        y += height + GAP + 10
    return tops


def way() -> None:
    steps = [
        ("score", ["errors and AUC, with a benchmark's truth"]),
        ("map", ["the matches of many pairs become tracks,", "cameras and points; a new photo is",
                 "localized among them"]),
        ("matches.h5", ["the one store: by name and content,", "checksums, resumable, one writer"]),
        ("match", ["two photos' features; then polished", "at the photos' own size"]),
        ("features", ["the backbone, once a photo; kept in", "memory, then on disk"]),
        ("file", ["known by its content; decoded once,", "ahead of time, gray and resized"]),
    ]  # fmt: skip
    y, spans = 46.0, []
    for title, lines in steps:
        height = 40 + 17 * len(lines)
        box(STEPS, y, STEP_WIDTH, height, "white", title, lines, RED)
        spans.append((y, y + height))
        y += height + 30
    middle, beside = STEPS + STEP_WIDTH / 2, STEPS + STEP_WIDTH + 18
    for (_, above), (below, _) in zip(spans, spans[1:], strict=False):
        arrow((middle, below), (middle, above + 1))
    store, score = sum(spans[2]) / 2, sum(spans[0]) / 2
    arrow((STEPS + STEP_WIDTH, store), (beside, store), (beside, score), (STEPS + STEP_WIDTH + 1, score))


text(LEFT, 14, "Layers: each imports only those below it", 16, DARK, bold=True)
text(STEPS, 14, "The way of a photo", 16, RED, bold=True)
layers()
way()
picture.save(OUT, optimize=True)
print(OUT)
