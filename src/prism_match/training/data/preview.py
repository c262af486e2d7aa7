"""Contact sheets: what the pairs of a source look like, with their ground truth drawn."""

from __future__ import annotations

import cv2
import numpy as np
from torch import Tensor

from prism_match.training.pairs import CELL, PairBatch
from prism_match.viz import put_text


def preview(batch: PairBatch, columns: int = 2, matches: int = 24) -> np.ndarray:
    """RGB uint8: each pair side by side, cells without a match dimmed, about `matches` true matches drawn."""
    batch = batch.to("cpu")
    tiles = [_tile(batch, i, matches) for i in range(len(batch))]
    tiles += [np.zeros_like(tiles[0])] * (-len(tiles) % columns)
    rows = [np.hstack(tiles[i : i + columns]) for i in range(0, len(tiles), columns)]
    return np.vstack(rows)


def _tile(batch: PairBatch, i: int, matches: int) -> np.ndarray:
    """One pair with its lines and its name."""
    left = _shown(batch.image0[i, 0], batch.visible0[i])
    right = _shown(batch.image1[i, 0], batch.visible1[i])
    canvas = np.hstack([left, right])
    width = left.shape[1]
    rows, columns = np.nonzero(batch.visible0[i].numpy())
    for k in range(0, len(rows), max(1, len(rows) // matches)):
        start = (columns[k] * CELL + CELL // 2, rows[k] * CELL + CELL // 2)
        x, y = batch.warp0[i, rows[k], columns[k]].tolist()
        value = np.full((1, 1), 255 * k // len(rows), np.uint8)
        colour = cv2.applyColorMap(value, cv2.COLORMAP_HSV)[0, 0, ::-1].tolist()  # OpenCV's is BGR
        end = (round(x) + width, round(y))
        cv2.line(canvas, tuple(map(int, start)), end, colour, 1, cv2.LINE_AA)
        cv2.circle(canvas, end, 2, colour, -1, cv2.LINE_AA)
    name = batch.names[i] if batch.names else str(i)
    overlap = f"{name} {batch.visible0[i].float().mean():.2f}/{batch.visible1[i].float().mean():.2f}"
    put_text(canvas, overlap, (4, 12), (255, 255, 0), scale=0.4)
    return cv2.copyMakeBorder(canvas, 2, 2, 2, 2, cv2.BORDER_CONSTANT)


def _shown(image: Tensor, visible: Tensor) -> np.ndarray:
    """h w image and its h/8 w/8 visibility -> RGB with the invisible cells at half brightness and bluish."""
    gray = (image.float().clamp(0, 1) * 255).byte().numpy()
    seen = np.kron(visible.numpy(), np.ones((CELL, CELL), bool))
    dimmed = np.stack([gray * 0.5, gray * 0.5, np.minimum(gray * 0.5 + 60, 255)], -1).astype(np.uint8)
    return np.where(seen[..., None], gray[..., None], dimmed)
