"""Pictures of what the model finds in training pairs, coloured by the truth."""

from __future__ import annotations

import cv2
import numpy as np
import torch

from prism_match.model.prism import CELL, PRISM
from prism_match.training.pairs import PairBatch
from prism_match.viz import put_text

GOOD = 3.0  # pixels: a match no farther from the truth is drawn in green
SHOWN = 256  # pixels: smaller images are shown larger, so that lines and words can be read
GREEN, RED, GRAY, YELLOW = (80, 220, 80), (240, 60, 60), (150, 150, 150), (255, 255, 0)


@torch.no_grad()
def draw_predictions(model: PRISM, batch: PairBatch, lines: int = 80) -> np.ndarray:
    """RGB, uint8: the pairs below each other, at most `lines` matches each, and how many are right. Gray and
    not counted where the truth is not known."""
    mode = model.training
    model.eval()
    a, b = model.extract(batch.image0, batch.mask0), model.extract(batch.image1, batch.mask1)
    found = model.match(a, b)
    model.train(mode)
    x, y = (found.keypoints0 / CELL).long().unbind(1)
    truth = batch.warp0[found.batch, y, x]
    seen = batch.visible0[found.batch, y, x]
    good = seen & ((found.keypoints1 - truth).norm(dim=1) <= GOOD)
    unknown = torch.zeros_like(good) if batch.unknown0 is None else batch.unknown0[found.batch, y, x] & ~seen
    images = [(i[:, 0].clamp(0, 1) * 255).byte().cpu().numpy() for i in (batch.image0, batch.image1)]
    rows = []
    for k in range(len(batch)):
        mine = found.batch == k
        p0, p1, right, open_ = (
            x[mine].cpu().numpy() for x in (found.keypoints0, found.keypoints1, good, unknown)
        )
        rows.append(_draw(images[0][k], images[1][k], p0, p1, right, open_, lines))
    return np.concatenate(rows)


def _draw(
    left: np.ndarray,
    right: np.ndarray,
    p0: np.ndarray,
    p1: np.ndarray,
    good: np.ndarray,
    unknown: np.ndarray,
    lines: int,
) -> np.ndarray:
    grow = max(round(SHOWN / left.shape[1]), 1)
    canvas = cv2.cvtColor(np.hstack([left, right]), cv2.COLOR_GRAY2RGB)
    canvas = cv2.resize(canvas, None, fx=grow, fy=grow, interpolation=cv2.INTER_CUBIC)
    chosen = np.linspace(0, len(p0) - 1, min(lines, len(p0))).astype(int)
    kind = np.where(unknown, 0, np.where(good, 1, 2))
    for i in chosen[np.argsort(kind[chosen], kind="stable")]:  # the wrong ones last, on top
        ends = np.array([p0[i], p1[i] + (left.shape[1], 0)])
        start, end = ((ends + 0.5) * grow - 0.5).round().astype(int).tolist()
        cv2.line(canvas, start, end, (GRAY, GREEN, RED)[kind[i]], 1, cv2.LINE_AA)
    known = good[~unknown]
    text = f"{len(p0)} matches"
    if len(p0):
        text += f", {known.mean():.0%} of {len(known)} right" if len(known) else ", none of known truth"
    put_text(canvas, text, (4, 14), YELLOW, scale=0.4)
    return canvas
