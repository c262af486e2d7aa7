"""What depth maps tell about a pair: its change of scale, and which cells have a match at all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prism_match.engine.photos import Resize, scaling
from prism_match.errors import UserError
from prism_match.evaluation.pairs import PosePair
from prism_match.frames import read_depth
from prism_match.images import image_size
from prism_match.training.data.posed import resize_depth
from prism_match.training.pairs import CELL, PairBatch, cell_centres
from prism_match.training.supervision import CoarseTruth, Warp, coarse_ground_truth, depth_at, warp_by_depth

FEWEST = 10  # co-visible cells that a ratio is taken from


@dataclass(frozen=True)
class DepthView:
    """One image of a pair after resizing, padded to whole cells."""

    size: tuple[int, int]  # width, height without padding
    depth: Tensor  # 1 h w, 0: none
    K: Tensor  # 1 3 3, float64

    @property
    def mask(self) -> Tensor:
        """1 h w, bool: False where it is padding."""
        mask = torch.zeros(self.depth.shape, dtype=torch.bool)
        mask[:, : self.size[1], : self.size[0]] = True
        return mask


def load_views(pair: PosePair, resizing: Resize) -> tuple[DepthView, DepthView]:
    sides = (
        (pair.image0, pair.depth0, pair.K0, pair.frame0),
        (pair.image1, pair.depth1, pair.K1, pair.frame1),
    )
    views = []
    for image, depth_file, K, frame in sides:
        size = image_size(image)
        if depth_file is None or size is None:
            raise UserError(f"{image}: {'no such image' if size is None else 'has no depth map'}")
        width, height = resizing(size)
        depth = resize_depth(read_depth(depth_file), width, height)
        depth = np.pad(depth, ((0, -height % CELL), (0, -width % CELL)))
        K = scaling(frame or size, (width, height)) @ K
        views.append(DepthView((width, height), torch.from_numpy(depth)[None], torch.from_numpy(K)[None]))
    return views[0], views[1]


def warp_cells(a: DepthView, b: DepthView, T: np.ndarray) -> Warp:
    """Where the centres of a's cells, row by row, land in b; T (4 4) leads from a to b."""
    centres = cell_centres(*a.depth.shape[-2:]).flatten(0, 1)[None]
    width, height = b.size
    bounds = torch.tensor([[-0.5, -0.5, width - 0.5, height - 0.5]])
    return warp_by_depth(centres, a.depth, b.depth, a.K, b.K, torch.from_numpy(T)[None], bounds1=bounds)


def scale_ratio(pair: PosePair, resizing: Resize) -> float:
    """How much larger one resized image shows what both see than the other, at least 1: the median over
    co-visible cells of (focal length / depth) in one over that in the other. NaN where too few are."""
    assert pair.T_0to1 is not None
    a, b = load_views(pair, resizing)
    visible = warp_cells(a, b, pair.T_0to1).visible[0]
    if visible.sum() < FEWEST:
        return float("nan")
    centres = cell_centres(*a.depth.shape[-2:]).flatten(0, 1)
    depth0 = depth_at(a.depth, centres[None])[0].double().numpy()
    K0, K1 = a.K[0].numpy(), b.K[0].numpy()
    rays = np.concatenate([centres.numpy(), np.ones((len(centres), 1))], axis=1) @ np.linalg.inv(K0).T
    depth1 = (rays * depth0[:, None]) @ pair.T_0to1[2, :3] + pair.T_0to1[2, 3]
    seen = visible.numpy()
    zoom = float(np.sqrt((K1[0, 0] * K1[1, 1]) / (K0[0, 0] * K0[1, 1])))
    ratio = float(np.median(zoom * depth0[seen] / depth1[seen]))
    return max(ratio, 1 / ratio)


def matchable_cells(pair: PosePair, resizing: Resize) -> tuple[CoarseTruth, tuple[int, int], tuple[int, int]]:
    """The ground truth of a pair's cells, and rows and columns of cells of both images."""
    assert pair.T_0to1 is not None
    a, b = load_views(pair, resizing)
    there, back = warp_cells(a, b, pair.T_0to1), warp_cells(b, a, np.linalg.inv(pair.T_0to1))
    cells = [(x.depth.shape[1] // CELL, x.depth.shape[2] // CELL) for x in (a, b)]
    batch = PairBatch(
        a.depth[:, None], b.depth[:, None],  # only their shape is asked for
        there.points.view(1, *cells[0], 2), there.visible.view(1, *cells[0]),
        back.points.view(1, *cells[1], 2), back.visible.view(1, *cells[1]),
        a.mask, b.mask, ~there.known.view(1, *cells[0]), ~back.known.view(1, *cells[1]),
    )  # fmt: skip
    return coarse_ground_truth(batch), cells[0], cells[1]
