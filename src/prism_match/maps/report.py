"""What `prism sfm` tells in the end: a page with numbers, the map from outside and from above, and the match
graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np

from prism_match import viz
from prism_match.colmap_model import read_model
from prism_match.files import atomic_path
from prism_match.geometry import camera_centres
from prism_match.images import write_png
from prism_match.maps.outside import BLACK, RED, down_and_forward, draw_outside, extent, finite_points

GRAY = (120, 120, 120)
PICTURES = GRAPH, TOP_VIEW, VIEW = "match_graph.png", "top_view.png", "map_view.png"
MOST_NAMES = 40  # images whose names are written beside the graph, and pairs that are listed


def write_report(
    out: Path, summary: dict[str, Any], model: dict[str, Any], verified: list[tuple[str, str, int]]
) -> None:
    """report.md with its pictures, from what the COLMAP worker tells and has written."""
    names = sorted({n for a, b, _ in verified for n in (a, b)} | set(summary["not_registered"]))
    write_png(out / GRAPH, draw_match_graph(names, verified, set(model["images"])))
    written = read_model(out / "sparse" / "0")
    poses = np.array([image["pose"] for image in model["images"].values()])
    write_png(out / TOP_VIEW, draw_top_view(*finite_points(written), poses))
    write_png(out / VIEW, draw_outside(written))
    with atomic_path(out / "report.md") as temporary:
        temporary.write_text(markdown(summary), encoding="utf-8")


def markdown(s: dict[str, Any]) -> str:
    rows = {
        "images registered": f"{s['registered']} of {s['images']}",
        "points": f"{s['points']:,}",
        "mean track length": f"{s['mean_track_length']:.2f} images",
        "mean reprojection error": f"{s['mean_reprojection_error']:.3f} px",
        "pairs matched, verified": f"{s['pairs']}, {s['verified_pairs']}",
        "mapper": s["mapper"],
        "time": f"{s['seconds']:.0f} s",
    }
    lines = ["# Reconstruction", "", "| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows.items()), ""]
    if s["other_models"]:
        sizes = ", ".join(map(str, s["other_models"]))
        lines += [f"The images fell apart: other models, in `sparse/1` and on, have {sizes} images.", ""]
    if s["not_registered"]:
        lines += ["Not registered: " + ", ".join(f"`{n}`" for n in s["not_registered"]), ""]
    if s["elsewhere"]:
        listed = [f"- `{a}` and `{b}`: {p:.1%} likely the same" for a, b, p in s["elsewhere"][:MOST_NAMES]]
        more = len(s["elsewhere"]) - len(listed)
        lines += ["Pairs left out, since their photos show different places:", "", *listed]
        lines += [*([f"- and {more} more"] if more else []), ""]
    if s["skipped"]:
        lines += ["Skipped:", "", *(f"- {reason}" for reason in s["skipped"].values()), ""]
    lines += [
        "## Cameras and points", "", f"![the map from outside]({VIEW})", "",
        "`prism view` shows the same in a browser, to turn it and to look at the photos of a point.", "",
        "## From above", "", f"![top view]({TOP_VIEW})", "",
        "## Match graph", "",
        "Verified matches of each pair, from none (white) to most (dark). Images in red are not registered.",
        "", f"![match graph]({GRAPH})", "",
    ]  # fmt: skip
    return "\n".join(lines)


def draw_match_graph(
    names: list[str], verified: list[tuple[str, str, int]], registered: set[str]
) -> np.ndarray:
    """h w 3, uint8: a row and a column for each image, the darker the more verified matches a pair has."""
    row = {name: n for n, name in enumerate(names)}
    counts = np.zeros((len(names), len(names)))
    for a, b, n in verified:
        counts[row[a], row[b]] = counts[row[b], row[a]] = n
    shade = 1 - np.sqrt(counts / max(counts.max(), 1))
    cell = max(1, min(24, 720 // len(names)))
    side = cell * len(names)
    named = len(names) <= MOST_NAMES
    left = 20 + (8 * max(map(len, names)) if named else 0)
    picture = np.full((side + 60, max(left + side + 20, 360), 3), 255, np.uint8)
    blues = np.stack([255 * shade, 255 * (0.25 + 0.75 * shade), 255 * (0.45 + 0.55 * shade)], axis=-1)
    grown = cv2.resize(blues.round().astype(np.uint8), (side, side), interpolation=cv2.INTER_NEAREST)
    picture[20 : 20 + side, left : left + side] = grown
    cv2.rectangle(picture, (left - 1, 19), (left + side, 20 + side), GRAY, 1)
    if named:
        for n, name in enumerate(names):
            colour = BLACK if name in registered else RED
            viz.put_text(picture, name, (10, 20 + cell * n + (cell + 8) // 2), colour, 0.4)
    text = f"{len(verified)} verified pairs, at most {int(counts.max())} matches"
    viz.put_text(picture, text, (10, side + 45), BLACK)
    return picture


def draw_top_view(xyz: np.ndarray, rgb: np.ndarray, poses: np.ndarray, side: int = 900) -> np.ndarray:
    """h w 3, uint8: points (n 3) in their colours, cameras (poses: c 3 4, world to camera) in red, seen along
    what is down for most cameras."""
    rotations, centres = poses[:, :, :3], camera_centres(poses)
    down, forward = down_and_forward(rotations)
    plane = np.stack([np.cross(down, forward), -forward])  # right, and up in the picture
    flat, eyes = xyz @ plane.T, centres @ plane.T
    ahead = rotations[:, 2] @ plane.T
    low, high = extent(flat, eyes)
    scale = (side - 80) / max(float((high - low).max()), 1e-9)
    offset = (side - scale * (high - low)) / 2 - scale * low

    picture = np.full((side, side, 3), 255, np.uint8)
    at = np.rint(flat * scale + offset).astype(int)
    inside = np.all((at >= 0) & (at < side - 1), axis=1)
    for dx, dy in ((0, 0), (0, 1), (1, 0), (1, 1)):
        # Pale points would be lost on white.
        picture[at[inside, 1] + dy, at[inside, 0] + dx] = (rgb[inside] * 0.85).astype(np.uint8)
    size = side / 60
    for eye, direction in zip(eyes * scale + offset, ahead, strict=True):
        direction = direction / max(float(np.linalg.norm(direction)), 1e-9)
        across = np.array([-direction[1], direction[0]])
        corners = [eye, eye + size * (direction + 0.5 * across), eye + size * (direction - 0.5 * across)]
        cv2.polylines(picture, [np.rint(corners).astype(np.int32)], True, RED, 1, cv2.LINE_AA)
    viz.put_text(
        picture, f"{len(xyz)} points, {len(poses)} cameras (red), from above", (14, side - 14), BLACK
    )
    return picture
