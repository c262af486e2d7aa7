"""Pictures of what the model finds in training pairs, coloured by the truth."""

from __future__ import annotations

import cv2
import numpy as np
import torch

from prism_match.model.prism import CELL, PRISM
from prism_match.training.pairs import PairBatch
from prism_match.viz import put_text

GOOD = 3.0  # pixels: a match no farther from the truth is drawn in green
GREEN, RED, YELLOW = (80, 220, 80), (240, 60, 60), (255, 255, 0)


@torch.no_grad()
def draw_predictions(model: PRISM, batch: PairBatch, lines: int = 80) -> np.ndarray:
    """RGB, uint8: the pairs below each other, at most `lines` matches each, and how many are right."""
    mode = model.training
    model.eval()
    a, b = model.extract(batch.image0, batch.mask0), model.extract(batch.image1, batch.mask1)
    found = model.match(a, b)
    model.train(mode)
    x, y = (found.keypoints0 / CELL).long().unbind(1)
    truth = batch.warp0[found.batch, y, x]
    seen = batch.visible0[found.batch, y, x]
    good = seen & ((found.keypoints1 - truth).norm(dim=1) <= GOOD)
    images = [(i[:, 0].clamp(0, 1) * 255).byte().cpu().numpy() for i in (batch.image0, batch.image1)]
    rows = []
    for k in range(len(batch)):
        mine = found.batch == k
        p0, p1, right = (x[mine].cpu().numpy() for x in (found.keypoints0, found.keypoints1, good))
        rows.append(_draw(images[0][k], images[1][k], p0, p1, right, lines))
    return np.concatenate(rows)


def _draw(
    left: np.ndarray, right: np.ndarray, p0: np.ndarray, p1: np.ndarray, good: np.ndarray, lines: int
) -> np.ndarray:
    canvas = cv2.cvtColor(np.hstack([left, right]), cv2.COLOR_GRAY2RGB)
    chosen = np.linspace(0, len(p0) - 1, min(lines, len(p0))).astype(int)
    for i in chosen[np.argsort(good[chosen])[::-1]]:  # the wrong ones last, on top
        start = tuple(int(round(float(v))) for v in p0[i])
        end = (int(round(float(p1[i, 0]))) + left.shape[1], int(round(float(p1[i, 1]))))
        cv2.line(canvas, start, end, GREEN if good[i] else RED, 1, cv2.LINE_AA)
    share = good.mean() if len(good) else 0.0
    label = f"{len(p0)} matches, {share:.0%} right"
    put_text(canvas, label, (4, 14), YELLOW, scale=0.4)
    return canvas
