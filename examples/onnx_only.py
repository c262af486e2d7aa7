"""Two photos to a picture of their matches with numpy, OpenCV and onnxruntime alone: neither PyTorch nor
prism_match is imported. The files come from a machine that has both:

    prism export onnx -o prism.onnx             # writes prism.onnx and prism-polish.onnx

    python examples/onnx_only.py a.jpg b.jpg --model prism.onnx -o matches.png

Without prism-polish.onnx beside it the matches are the model's own, as exact as the paper's refinement.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

import cv2
import numpy as np

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # or it tells Microsoft of each session
import onnxruntime  # noqa: E402

MOST_ZOOM = 4.0  # times the size that is matched: larger photos are polished at no more
CLOSE = 1.5  # times the size that is matched: what polishing may begin at


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("image0", type=Path)
    parser.add_argument("image1", type=Path)
    parser.add_argument("--model", type=Path, default=Path("prism.onnx"))
    parser.add_argument("-o", "--out", type=Path, default=Path("matches.png"))
    parser.add_argument("--size", type=int, default=832, help="longer side that is matched at, in pixels")
    parser.add_argument("--threshold", type=float, help="least score of a match [the model's own]")
    parser.add_argument("--npz", type=Path, help="also write keypoints0, keypoints1 and scores here")
    options = parser.parse_args()

    photos = [load_gray(path) for path in (options.image0, options.image1)]
    model = open_model(options.model)
    beside = options.model.with_name(f"{options.model.stem}-polish{options.model.suffix}")
    polish = open_model(beside) if beside.is_file() else None
    points0, points1, scores = match(model, polish, photos, options.size, options.threshold)
    how = "polished" if polish is not None else f"not polished: no {beside.name}"
    print(f"{len(scores)} matches, mean score {scores.mean() if len(scores) else 0:.2f}, {how}")
    if options.npz is not None:
        np.savez(options.npz, keypoints0=points0, keypoints1=points1, scores=scores)
    if not cv2.imwrite(str(options.out), draw(photos, points0, points1, scores)):
        sys.exit(f"{options.out}: cannot be written")


def load_gray(path: Path) -> np.ndarray:
    """h w, float32 in [0, 1]."""
    bgr = cv2.imread(str(path), cv2.IMREAD_COLOR) if path.is_file() else None
    if bgr is None:
        sys.exit(f"{path}: not an image")
    if min(bgr.shape[:2]) < 32:
        sys.exit(f"{path}: too small; at least 32 pixels a side are needed")
    return cv2.cvtColor(bgr.astype(np.float32) / 255, cv2.COLOR_BGR2GRAY)


def open_model(path: Path) -> onnxruntime.InferenceSession:
    if not path.is_file():
        sys.exit(f"{path}: no such file; prism export onnx -o {path} makes it")
    try:
        return onnxruntime.InferenceSession(str(path), providers=onnxruntime.get_available_providers())
    except Exception as error:  # of a damaged file, whatever a parser may say
        sys.exit(f"{path}: cannot be opened ({str(error).splitlines()[0]})")


def match(
    model: onnxruntime.InferenceSession,
    polish: onnxruntime.InferenceSession | None,
    photos: list[np.ndarray],
    size: int,
    threshold: float | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Points of both photos (n 2, the centre of the first pixel is 0, 0) and scores (n), best first."""
    fixed = model.get_inputs()[0].shape[2:]  # of a file of fixed size: numbers, else names
    grays = []
    for photo in photos:
        height, width = photo.shape
        scale = min(1.0, size / max(height, width))
        w, h = max(8, round(width * scale)), max(8, round(height * scale))
        if all(isinstance(n, int) for n in fixed):
            h, w = fixed
        grays.append(resized(photo, w, h))
    given = {f"image{n}": gray[None, None] for n, gray in enumerate(grays)}
    if threshold is None:
        threshold = float(model.get_modelmeta().custom_metadata_map["theta_c"])
    given["threshold"] = np.array(threshold, np.float32)
    at0, at1, scores = model.run(None, given)
    there = scores > 0  # files of fixed size fill up with zeros
    at0, at1, scores = at0[there], at1[there], scores[there]
    if polish is not None and len(scores):
        at0, at1 = polished(polish, photos, grays, at0, at1)
    points = []
    for photo, gray, at in zip(photos, grays, (at0, at1), strict=True):
        points.append((at + 0.5) * (np.array(photo.shape[::-1]) / gray.shape[::-1]) - 0.5)
    inside = [is_inside(p, photo) for p, photo in zip(points, photos, strict=True)]
    order = np.argsort(-scores, kind="stable")
    order = order[(inside[0] & inside[1])[order]]
    return points[0][order], points[1][order], scores[order]


def is_inside(points: np.ndarray, photo: np.ndarray) -> np.ndarray:
    return np.all((points >= -0.5) & (points <= np.array(photo.shape[::-1]) - 0.5), axis=1)


def polished(
    network: onnxruntime.InferenceSession,
    photos: list[np.ndarray],
    grays: list[np.ndarray],
    at0: np.ndarray,
    at1: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Both, made exact: at0 at the corners of their cells, at1 first in windows of about the size of the
    matched pixels, then in finer ones."""
    sharp = []
    for photo, gray in zip(photos, grays, strict=True):
        zoom = min(MOST_ZOOM, max(photo.shape) / max(gray.shape))
        h, w = (max(1, round(n * zoom)) for n in gray.shape)
        sharp.append(photo if zoom < MOST_ZOOM else resized(photo, w, h))
    scales = [
        np.array([s / g for s, g in zip(x.shape[::-1], gray.shape[::-1], strict=True)], np.float32)
        for x, gray in zip(sharp, grays, strict=True)
    ]
    zoom = min(max(x.shape) / max(gray.shape) for x, gray in zip(sharp, grays, strict=True))
    halvings = max(0, math.ceil(math.log2(zoom / CLOSE)))
    for halving in range(halvings, -1, -1):
        given = {
            "image0": sharp[0][None, None], "image1": sharp[1][None, None],
            "matched0": grays[0][None, None], "keypoints0": at0, "keypoints1": at1, "scale0": scales[0],
            "scale1": scales[1], "pixel": np.array(2.0**halving, np.float32),
            "rounds": np.array(3 if halving == halvings else 2),
        }  # fmt: skip
        at0, at1 = network.run(None, given)
    return at0, at1


def resized(gray: np.ndarray, width: int, height: int) -> np.ndarray:
    if gray.shape == (height, width):
        return gray
    shrinks = width * height < gray.size
    return cv2.resize(gray, (width, height), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)


def draw(
    photos: list[np.ndarray], points0: np.ndarray, points1: np.ndarray, scores: np.ndarray, most: int = 200
) -> np.ndarray:
    """Both photos beside each other and lines between points, from red (unsure) to green (sure)."""
    height = max(photo.shape[0] for photo in photos)
    padded = [cv2.copyMakeBorder(p, 0, height - p.shape[0], 0, 0, cv2.BORDER_CONSTANT) for p in photos]
    canvas = cv2.cvtColor((np.hstack(padded) * 255).round().astype(np.uint8), cv2.COLOR_GRAY2BGR)
    every = max(1, -(-len(scores) // most))
    for a, b, score in zip(points0[::every], points1[::every], scores[::every], strict=True):
        start = tuple(int(v) for v in np.round(a))
        end = tuple(int(v) for v in np.round(b + [photos[0].shape[1], 0]))
        colour = (0, int(255 * score), int(255 * (1 - score)))
        cv2.line(canvas, start, end, colour, 1, cv2.LINE_AA)
        for point in (start, end):
            cv2.circle(canvas, point, 2, colour, -1, cv2.LINE_AA)
    return canvas


if __name__ == "__main__":
    main()
