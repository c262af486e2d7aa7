"""What depth maps tell about a pair: its change of scale, and which cells have a match at all."""

from __future__ import annotations

import numpy as np
import torch

from prism_match.engine.photos import Resize, scaling
from prism_match.errors import UserError
from prism_match.evaluation.pairs import PosePair
from prism_match.frames import read_depth
from prism_match.images import image_size
from prism_match.training.data.posed import Loaded, Side, pair_batch, resize_depth
from prism_match.training.pairs import CELL, cell_centres
from prism_match.training.supervision import CoarseTruth, coarse_ground_truth, depth_at

FEWEST = 10  # co-visible cells that a ratio is taken from


def load_sides(pair: PosePair, resizing: Resize) -> tuple[Side, Side]:
    """Both images after resizing, padded to whole cells; of their pixels only the shape is asked for."""
    assert pair.T_0to1 is not None
    given = (
        (pair.image0, pair.depth0, pair.K0, pair.frame0, np.eye(4)),
        (pair.image1, pair.depth1, pair.K1, pair.frame1, pair.T_0to1),
    )
    sides = []
    for image, depth_file, K, frame, T in given:
        size = image_size(image)
        if depth_file is None or size is None:
            raise UserError(f"{image}: {'no such image' if size is None else 'has no depth map'}")
        width, height = resizing(size)
        depth = resize_depth(read_depth(depth_file), width, height)
        depth = np.pad(depth, ((0, -height % CELL), (0, -width % CELL)))
        K = scaling(frame or size, (width, height)) @ K
        loaded = Loaded(np.zeros(depth.shape, np.uint8), depth, K, T, (width, height))
        sides.append(Side.of([loaded], torch.device("cpu")))
    return sides[0], sides[1]


def scale_ratio(pair: PosePair, resizing: Resize) -> float:
    """How much larger one resized image shows what both see than the other, at least 1: the median over
    co-visible cells of (focal length / depth) in one over that in the other. NaN where too few are."""
    a, b = load_sides(pair, resizing)
    visible = a.warp_cells(b).visible[0]
    if visible.sum() < FEWEST:
        return float("nan")
    centres = cell_centres(*a.depth.shape[-2:]).flatten(0, 1)
    depth0 = depth_at(a.depth, centres[None])[0].double().numpy()
    K0, K1, T = a.K[0].numpy(), b.K[0].numpy(), b.T[0].numpy()
    rays = np.concatenate([centres.numpy(), np.ones((len(centres), 1))], axis=1) @ np.linalg.inv(K0).T
    depth1 = (rays * depth0[:, None]) @ T[2, :3] + T[2, 3]
    seen = visible.numpy()
    zoom = float(np.sqrt((K1[0, 0] * K1[1, 1]) / (K0[0, 0] * K0[1, 1])))
    ratio = float(np.median(zoom * depth0[seen] / depth1[seen]))
    return max(ratio, 1 / ratio)


def matchable_cells(pair: PosePair, resizing: Resize) -> tuple[CoarseTruth, torch.Size, torch.Size]:
    """The ground truth of a pair's cells, and rows and columns of cells of both images."""
    batch = pair_batch(*load_sides(pair, resizing))
    return coarse_ground_truth(batch), batch.visible0.shape[1:], batch.visible1.shape[1:]
