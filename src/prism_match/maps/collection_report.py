"""What `prism data collect` tells in the end: which photos it kept, and why not the others, in pictures."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from prism_match import viz
from prism_match.colmap_model import Model, PosedView, read_model
from prism_match.errors import UserError
from prism_match.files import atomic_path
from prism_match.frames import read_depth
from prism_match.images import load_image, write_png
from prism_match.maps.outside import BLACK, RED, draw_outside

REPORT = "report.md"
KEPT, LEFT_OUT, DEPTH, ERRORS, VIEW = (
    "kept.png", "left_out.png", "depth_maps.png", "reprojection.png", "map_view.png",
)  # fmt: skip
GREEN = (0, 140, 60)
BLUE = (40, 90, 170)
THUMB = 176  # pixels of a photo's longer side on a sheet
COLUMNS, MOST_ON_SHEET, MOST_DEPTH_MAPS = 6, 240, 12
MOST_ROWS = 1000  # of a table
LARGEST_ERROR, BARS = 4.0, 40  # pixels on the axis


def write_collection_report(out: Path, files: dict[str, Path], result: dict[str, Any]) -> None:
    photos = result["photos"]
    kept = [name for name, about in photos.items() if about["kept"]]
    left = [name for name, about in photos.items() if not about["kept"]]
    captions = {n: [n, f"{photos[n]['points']} points"] for n in kept} | {
        n: [n, *textwrap.wrap(photos[n]["reason"], 27)[:4]] for n in left
    }
    sheets = {KEPT: (kept, out / "images", GREEN), LEFT_OUT: (left, None, RED)}
    for sheet, (names, folder, colour) in sheets.items():
        (out / sheet).unlink(missing_ok=True)
        if names:
            paths = {n: folder / n if folder else files[n] for n in names[:MOST_ON_SHEET]}
            write_png(out / sheet, contact_sheet(paths, captions, colour))
    model = read_model(out / "sparse")
    write_png(out / VIEW, draw_outside(model))
    write_png(out / DEPTH, draw_depth_maps(out, kept))
    errors = np.concatenate([reprojection_errors(model, view) for view in model.views])
    write_png(out / ERRORS, draw_errors(errors))
    with atomic_path(out / REPORT) as temporary:
        temporary.write_text(markdown(result, kept, left), encoding="utf-8")


def markdown(s: dict[str, Any], kept: list[str], left: list[str]) -> str:
    errors, depth = s["reprojection_error"], s["depth"]
    rows = {
        "photos kept": f"{s['kept']} of {len(s['photos'])}",
        "points": f"{s['points']:,}",
        "pairs verified, doubtful": f"{s['verified_pairs']}, {len(s['pairs_left_out'])}",
        "reprojection error": f"median {errors['median']} px, mean {errors['mean']} px, "
        f"{_share(errors['within_1_px'])} below 1 px, at a longer side of at most {s['size']} px",
        "depth": f"{_share(depth['kept'])} of the pixels, median error {_share(depth['median_error'], 2)}, "
        f"{_share(depth['within_2_percent'])} of the points within 2 %",
        "mapper": s["mapper"],
    }
    lines = ["# Collection", "", "| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows.items()), ""]
    lines += ["## Photos left out", ""]
    if left:
        more = f" The first {MOST_ON_SHEET} of {len(left)}." if len(left) > MOST_ON_SHEET else ""
        lines += [f"![photos left out, with reasons]({LEFT_OUT}){more}", "", "| photo | why |", "|---|---|"]
        lines += [f"| `{n}` | {_cell(s['photos'][n]['reason'])} |" for n in left[:MOST_ROWS]]
    else:
        lines += ["None."]
    lines += ["", "## Pairs left out", ""]
    if s["pairs_left_out"]:
        lines += ["| pair | | why |", "|---|---|---|"]
        for row in s["pairs_left_out"][:MOST_ROWS]:
            lines += [f"| `{row['pair'][0]}` | `{row['pair'][1]}` | {_cell(row['reason'])} |"]
    else:
        lines += ["None."]
    lines += [
        "", "## Photos kept", "", f"![photos kept]({KEPT})", "",
        "| photo | points | focal length (longer sides) | median reprojection error (px) |",
        "|---|---:|---:|---:|",
    ]  # fmt: skip
    for n in kept[:MOST_ROWS]:
        about = s["photos"][n]
        lines += [f"| `{n}` | {about['points']} | {about['focal']} | {about['median_reprojection_error']} |"]
    lines += [
        "", "## Reprojection errors", "", f"![how many there are of each size]({ERRORS})", "",
        "## Depth", "",
        f"Near is red, far is blue, black is not known; {MOST_DEPTH_MAPS} photos at most.", "",
        f"![photos and their depth]({DEPTH})", "",
        "## Cameras and points", "", f"![the map from outside]({VIEW})", "",
        "All of it, and every reason, is in `collection.json`.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _share(number: float | None, digits: int = 0) -> str:
    return "unknown" if number is None else f"{number:.{digits}%}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def contact_sheet(
    paths: dict[str, Path], captions: dict[str, list[str]], colour: tuple[int, int, int]
) -> np.ndarray:
    """h w 3, uint8: small photos in frames of a colour, with lines of text below."""
    lines = max(len(captions[name]) for name in paths)
    high, wide = THUMB + 16 * lines + 20, THUMB + 20
    columns = min(COLUMNS, len(paths))
    sheet = np.full((high * -(-len(paths) // columns), wide * columns, 3), 255, np.uint8)
    for n, (name, path) in enumerate(paths.items()):
        top, left = n // columns * high + 8, n % columns * wide + 10
        try:
            small = viz.shrink(load_image(path).rgb, THUMB)[0]
        except UserError:  # a photo that cannot be read is left out for that
            small = np.full((THUMB // 2, THUMB, 3), 225, np.uint8)
        h, w = small.shape[:2]
        sheet[top : top + h, left : left + w] = small
        cv2.rectangle(sheet, (left - 2, top - 2), (left + w + 1, top + h + 1), colour, 2)
        for k, line in enumerate(captions[name]):
            text = line if len(line) <= 28 else "..." + line[-25:]
            viz.put_text(sheet, text, (left, top + h + 16 + 16 * k), colour if k else BLACK, 0.36)
    return sheet


def draw_depth_maps(out: Path, names: list[str]) -> np.ndarray:
    """h w 3, uint8: some photos, each beside its depth."""
    chosen = [
        names[n] for n in np.unique(np.linspace(0, len(names) - 1, MOST_DEPTH_MAPS).round().astype(int))
    ]
    cell = 2 * THUMB + viz.GAP
    columns = min(3, len(chosen))
    high, wide = THUMB + viz.GAP, cell + 2 * viz.GAP
    sheet = np.full((high * -(-len(chosen) // columns), wide * columns, 3), 255, np.uint8)
    for n, name in enumerate(chosen):
        photo = viz.shrink(load_image(out / "images" / name).rgb, THUMB)[0]
        depth = coloured_depth(read_depth(out / "depth" / f"{name}.h5"))
        depth = cv2.resize(depth, photo.shape[1::-1], interpolation=cv2.INTER_NEAREST)
        pair = viz.side_by_side(photo, depth)
        top, left = n // columns * high, n % columns * wide
        sheet[top : top + pair.shape[0], left : left + pair.shape[1]] = pair
    return sheet


def coloured_depth(depth: np.ndarray) -> np.ndarray:
    """h w 3, uint8, of depth h w: from red, near, to blue, far; black where it is 0, not known."""
    known = depth > 0
    picture = np.zeros((*depth.shape, 3), np.uint8)
    if known.any():
        inverse = np.zeros_like(depth)
        inverse[known] = 1 / depth[known]
        low, high = np.percentile(inverse[known], [2, 98])
        near = ((inverse - low) / max(float(high - low), 1e-12)).clip(0, 1)
        colours = cv2.applyColorMap((255 * near).astype(np.uint8), cv2.COLORMAP_TURBO)[..., ::-1]
        picture[known] = colours[known]
    return picture


def reprojection_errors(model: Model, view: PosedView) -> np.ndarray:
    """n: pixels from where the points of a view were seen to where they are, without those behind it."""
    xyz = model.points[view.points] @ view.T[:3, :3].T + view.T[:3, 3]
    errors = np.linalg.norm(view.camera.project(xyz) - view.pixels, axis=1)
    return errors[np.isfinite(errors)]


def draw_errors(errors: np.ndarray) -> np.ndarray:
    """h w 3, uint8: how many points are seen how far from where they are, in pixels."""
    picture = np.full((260, 560, 3), 255, np.uint8)
    counts, _ = np.histogram(errors.clip(0, LARGEST_ERROR - 1e-6), bins=BARS, range=(0, LARGEST_ERROR))
    left, bottom, step = 40, 210, 480 // BARS
    for n, count in enumerate(counts):
        top = bottom - round(170 * count / max(int(counts.max()), 1))
        if count:
            cv2.rectangle(picture, (left + n * step, top), (left + (n + 1) * step - 2, bottom), BLUE, -1)
    cv2.line(picture, (left, bottom), (left + BARS * step, bottom), BLACK, 1)
    for k in range(int(LARGEST_ERROR) + 1):
        label = f"{k}+" if k == LARGEST_ERROR else f"{k}"
        viz.put_text(picture, label, (left + round(k / LARGEST_ERROR * BARS * step) - 4, bottom + 16), BLACK)
    text = f"reprojection errors of {len(errors)} observations, px; at most {counts.max()} in a bar"
    viz.put_text(picture, text, (10, 250), BLACK, 0.4)
    return picture
