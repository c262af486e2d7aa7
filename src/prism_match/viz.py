"""Pictures: matches coloured by a value, pruning masks coloured by the MPM that pruned, overlays."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np

from prism_match.geometry import spread_over

GAP = 8  # pixels of white between two images
# The paper's colours for the first to the last MPM: dark red, red, orange, yellow.
LAYER_COLOURS = np.array([(122, 2, 12), (255, 13, 28), (255, 118, 37), (255, 254, 60)], dtype=np.float32)


def draw_matches(
    image0: np.ndarray,
    image1: np.ndarray,
    points0: np.ndarray,
    points1: np.ndarray,
    values: np.ndarray | None = None,
    *,
    title: str = "",
    most_lines: int = 250,
    longer_side: int = 800,
) -> np.ndarray:
    """Two images (h w 3, uint8) side by side, joined by lines from red (value 0) to green (value 1).

    Every match is a dot; at most `most_lines`, spread evenly over the image, are lines, since a picture
    of thousands of lines shows nothing."""
    (left, scale0), (right, scale1) = (shrink(x, longer_side) for x in (image0, image1))
    canvas = side_by_side(left, right)
    values = np.ones(len(points0)) if values is None else np.asarray(values)
    colours = red_to_green(values)
    at0 = (points0 + 0.5) * scale0 - 0.5
    at1 = (points1 + 0.5) * scale1 - 0.5 + [left.shape[1] + GAP, 0]
    for n in spread_over(at0, values, most_lines):
        cv2.line(canvas, fixed(at0[n]), fixed(at1[n]), colours[n], 1, cv2.LINE_AA, SHIFT)
    for at in (at0, at1):
        for point, colour in zip(at, colours, strict=True):
            cv2.circle(canvas, fixed(point), 2 << SHIFT, colour, -1, cv2.LINE_AA, SHIFT)
    return put_title(canvas, title)


def draw_pruning(
    image0: np.ndarray,
    image1: np.ndarray,
    keep0: np.ndarray,
    keep1: np.ndarray,
    *,
    title: str = "",
    longer_side: int = 800,
) -> np.ndarray:
    """Both images with pruned cells tinted by the MPM that pruned them; keep: L h w, bool."""
    parts = [tint_pruned(shrink(x, longer_side)[0], keep) for x, keep in ((image0, keep0), (image1, keep1))]
    return put_title(add_legend(side_by_side(*parts), len(keep0)), title)


def draw_overlay(warped: np.ndarray, image1: np.ndarray, covered: np.ndarray) -> np.ndarray:
    """Image 0 warped onto image 1 (h w 3 each): image 0 in cyan, image 1 in red, so that what agrees is
    gray; where image 0 does not reach (covered: h w, bool), image 1 alone."""
    first, second = (cv2.cvtColor(x, cv2.COLOR_RGB2GRAY) for x in (warped, image1))
    mixed = np.stack([second, first, first], axis=-1)
    return np.where(covered[..., None], mixed, image1)


def draw_difference(warped: np.ndarray, image1: np.ndarray, covered: np.ndarray) -> np.ndarray:
    """h w 3: how much brighter (red) or darker (blue) the first (h w 3) is than the second where both are
    (covered: h w, bool), once it has the brightness and contrast of that; gray: the same."""
    first, second = (cv2.cvtColor(x, cv2.COLOR_RGB2GRAY).astype(np.float32) for x in (warped, image1))
    if covered.any():
        (low0, low1), (high0, high1) = (
            [float(np.percentile(x[covered], p)) for x in (first, second)] for p in (10, 90)
        )
        first = (first - low0) * ((high1 - low1) / max(high0 - low0, 1.0)) + low1
    more = np.where(covered, first - second, 0).clip(-127, 127)
    colour = np.stack([128 + more, 128 - np.abs(more) / 2, 128 - more], axis=-1)
    return np.where(covered[..., None], colour, 255).round().astype(np.uint8)


def draw_trails(
    image: np.ndarray, trails: Sequence[np.ndarray], values: np.ndarray, *, title: str = ""
) -> np.ndarray:
    """An image (h w 3, uint8) with the way that points came to it: each a row of points (k 2), of which the
    last is where it is now, from red (value 0) to green (value 1)."""
    canvas = image.copy()
    for trail, colour in zip(trails, red_to_green(values), strict=True):
        for a, b in zip(trail[:-1], trail[1:], strict=True):
            cv2.line(canvas, fixed(a), fixed(b), colour, 1, cv2.LINE_AA, SHIFT)
        cv2.circle(canvas, fixed(trail[-1]), 2 << SHIFT, colour, -1, cv2.LINE_AA, SHIFT)
    return put_title(canvas, title)


def tint_pruned(image: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """image: h w 3; keep: L rows columns, each True until the layer that pruned the cell."""
    layers = len(keep)
    pruned_at = keep.sum(axis=0)  # 0 .. L: the number of MPMs it survived
    colours = np.concatenate([layer_colours(layers), np.zeros((1, 3), np.float32)])
    height, width = image.shape[:2]
    tint = cv2.resize(colours[pruned_at], (width, height), interpolation=cv2.INTER_NEAREST)
    gone = cv2.resize((pruned_at < layers).astype(np.uint8), (width, height), interpolation=cv2.INTER_NEAREST)
    mixed = np.where(gone[..., None] > 0, 0.35 * image + 0.65 * tint, image)
    return mixed.round().astype(np.uint8)


def layer_colours(layers: int) -> np.ndarray:
    """layers 3: the paper's four, or as many as there are between its first and its last."""
    at = np.linspace(0, len(LAYER_COLOURS) - 1, layers)
    channels = [np.interp(at, range(len(LAYER_COLOURS)), LAYER_COLOURS[:, c]) for c in range(3)]
    return np.stack(channels, axis=1).astype(np.float32)


def add_legend(canvas: np.ndarray, layers: int) -> np.ndarray:
    strip = np.full((26, canvas.shape[1], 3), 255, dtype=np.uint8)
    put_text(strip, "pruned by MPM", (8, 18), (0, 0, 0))
    for n, colour in enumerate(layer_colours(layers).tolist()):
        x = 130 + 48 * n
        cv2.rectangle(strip, (x, 6), (x + 14, 20), colour, -1)
        put_text(strip, str(n + 1), (x + 18, 18), (0, 0, 0))
    return np.concatenate([canvas, strip])


SHIFT = 4  # fractional bits of the coordinates that OpenCV draws at


def fixed(point: np.ndarray) -> tuple[int, int]:
    x, y = np.round(point * (1 << SHIFT)).astype(int).tolist()
    return x, y


def shrink(image: np.ndarray, longer_side: int) -> tuple[np.ndarray, float]:
    """Down to a longer side, never up; and the scale."""
    scale = min(1.0, longer_side / max(image.shape[:2]))
    size = (round(image.shape[1] * scale), round(image.shape[0] * scale))
    return (image if scale == 1 else cv2.resize(image, size, interpolation=cv2.INTER_AREA)), scale


def side_by_side(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    height = max(left.shape[0], right.shape[0])
    canvas = np.full((height, left.shape[1] + GAP + right.shape[1], 3), 255, dtype=np.uint8)
    canvas[: left.shape[0], : left.shape[1]] = left
    canvas[: right.shape[0], left.shape[1] + GAP :] = right
    return canvas


def red_to_green(values: np.ndarray) -> list[tuple[int, int, int]]:
    v = np.clip(values, 0, 1)
    rgb = np.stack([np.minimum(1, 2 * (1 - v)), np.minimum(1, 2 * v), np.zeros_like(v)], axis=1)
    return [(int(r), int(g), int(b)) for r, g, b in (rgb * 255).round()]


def put_title(canvas: np.ndarray, title: str) -> np.ndarray:
    """White letters with a dark rim in the upper left corner: readable on any photo."""
    rim = [(dx, dy) for dx in (-1, 0, 1) for dy in (-1, 0, 1)]
    for n, line in enumerate(title.splitlines()):
        # Thicker letters are wider in OpenCV 5, so the rim is drawn with the same letters, moved.
        for dx, dy in rim:
            put_text(canvas, line, (10 + dx, 24 + 22 * n + dy), (0, 0, 0), scale=0.6)
        put_text(canvas, line, (10, 24 + 22 * n), (255, 255, 255), scale=0.6)
    return canvas


def put_text(
    canvas: np.ndarray, text: str, at: tuple[int, int], colour: tuple[int, int, int], scale: float = 0.45
) -> None:
    cv2.putText(canvas, text, at, cv2.FONT_HERSHEY_SIMPLEX, scale, colour, 1, cv2.LINE_AA)
