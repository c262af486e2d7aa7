"""Pairs of frames with depth and pose that lie on disk: what MegaDepth and RGB-D sequences share."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import torch
from torch import Tensor

from prism_match.errors import UserError
from prism_match.frames import Frame, read_depth, read_gray
from prism_match.geometry import resize_matrix
from prism_match.training.pairs import CELL, ImageSize, PairBatch, cell_centres, shape_of
from prism_match.training.supervision import Warp, warp_by_depth

log = logging.getLogger(__name__)

OVERLAP_BINS = (0.05, 0.15, 0.3, 0.5, 0.7)  # share of one image's points that the other sees as well
SCALE_BINS = (1.0, 1.5, 2.2, 3.3)  # how much larger one image shows them than the other


def pair_bins(overlap: Tensor, ratio: Tensor) -> Tensor:
    """n, int64: the bin of overlap and scale ratio of each pair."""
    bins = torch.bucketize(overlap, overlap.new_tensor(OVERLAP_BINS[1:])) * len(SCALE_BINS)
    return bins + torch.bucketize(ratio, ratio.new_tensor(SCALE_BINS[1:]))


def spread_weights(overlap: Tensor, ratio: Tensor) -> Tensor:
    """n: sampling weights that sum to 1; a bin of overlap and scale ratio weighs as the square root of
    the number of its pairs, so that wide baselines and changes of scale are not drowned by easy pairs."""
    bins = pair_bins(overlap, ratio)
    count = torch.bincount(bins, minlength=len(OVERLAP_BINS) * len(SCALE_BINS))
    weight = count[bins].float().rsqrt()
    return weight / weight.sum()


def scale_intrinsics(K: np.ndarray, sx: float, sy: float) -> np.ndarray:
    """3 3: intrinsics after a resize."""
    return resize_matrix(sx, sy) @ K


@dataclass(frozen=True)
class Loaded:
    """A frame that was resized, in the top-left corner of a larger one."""

    image: np.ndarray  # h w, uint8
    depth: np.ndarray  # h w, float32
    K: np.ndarray  # 3 3
    T: np.ndarray  # 4 4
    extent: tuple[int, int]  # width and height of what is not padding


def load_frame(frame: Frame, size: ImageSize, same_size: bool) -> Loaded:
    """Resized so that it just fits into an image of that size. Raises UserError with one line when an image
    or a depth map is missing, broken or does not fit. With `same_size`, depth has to have the size of the
    image; otherwise the same shape will do."""
    image, depth = read_gray(frame.image), read_depth(frame.depth)
    require_fit(frame.depth, depth, image, same_size)
    h, w = image.shape
    height, width = shape_of(size)
    scale = min(height / h, width / w)
    w2, h2 = max(round(w * scale), 1), max(round(h * scale), 1)
    shrink = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    pad = [(0, height - h2), (0, width - w2)]
    return Loaded(
        np.pad(cv2.resize(image, (w2, h2), interpolation=shrink), pad),
        np.pad(resize_depth(depth, w2, h2), pad),
        scale_intrinsics(frame.K, w2 / w, h2 / h),
        frame.T,
        (w2, h2),
    )


def require_fit(path: Path, depth: np.ndarray, image: np.ndarray, same_size: bool = False) -> None:
    """Raises UserError with one line when a depth map has not the shape (or size) of its image."""
    (h, w), (rows, columns) = image.shape, depth.shape
    same_shape = abs(columns / rows * h / w - 1) < 0.02
    if depth.shape != image.shape and (same_size or not same_shape):
        raise UserError(f"{path}: depth map is {columns}x{rows}, its image is {w}x{h}")


def resize_depth(depth: np.ndarray, width: int, height: int) -> np.ndarray:
    """height width: the nearest depth, since a mean of near and far is on no surface."""
    rows = ((np.arange(height) + 0.5) * depth.shape[0] / height).astype(int)
    columns = ((np.arange(width) + 0.5) * depth.shape[1] / width).astype(int)
    return depth[rows[:, None], columns]


class PosedPairs:
    """Draws pairs of frames by weight, decodes them in a thread pool, and computes their warps."""

    def __init__(
        self,
        name: str,
        scenes: Sequence[tuple[list[Frame], np.ndarray, np.ndarray]],
        device: torch.device | str,
        workers: int,
        same_size: bool = False,
    ):
        """`scenes`: the frames of each, pairs n 2 of them and their overlaps n. Every scene has the same
        weight, however many pairs it has."""
        self.name, self.device, self.same_size = name, torch.device(device), same_size
        self.broken: dict[str, str] = {}  # image path -> why it is skipped
        self.frames: list[Frame] = []
        pairs, weights = [], []
        for frames, scene_pairs, overlap in scenes:
            share = torch.from_numpy(overlap)
            pairs.append(scene_pairs + len(self.frames))
            weights.append(spread_weights(share, torch.ones_like(share)))
            self.frames += frames
        self.pairs = np.concatenate(pairs)
        cumulative = torch.cat(weights).double().cumsum(0)
        self._cumulative = (cumulative / cumulative[-1]).float()
        self._pool = ThreadPoolExecutor(workers)

    def __len__(self) -> int:
        return len(self.pairs)

    def sample(self, batch: int, size: ImageSize, generator: torch.Generator) -> PairBatch:
        """`batch` pairs, each photo as large as fits, and padded. Broken ones are replaced."""
        good: list[tuple[Loaded, Loaded]] = []
        names: list[str] = []
        misses = 0
        while len(good) < batch:
            rows = self._draw(batch - len(good), generator)
            loads = self._pool.map(lambda r: self._load_pair(r, size), rows)
            for row, pair in zip(rows, loads, strict=True):
                if pair is None:
                    misses += 1
                    continue
                good.append(pair)
                names.append(" ".join(self.frames[i].image.stem for i in self.pairs[row]))
            if misses > 20 * batch + 200:
                last = next(reversed(self.broken.values()))
                raise UserError(f"{self.name}: hardly any pair can be read; the last one: {last}")
        first, second = (Side.of([pair[k] for pair in good], self.device) for k in (0, 1))
        return pair_batch(first, second, tuple(names))

    def _draw(self, count: int, generator: torch.Generator) -> list[int]:
        random = torch.rand(count, generator=generator, device=generator.device).cpu()
        return torch.searchsorted(self._cumulative, random).clamp(max=len(self.pairs) - 1).tolist()

    def _load_pair(self, row: int, size: ImageSize) -> tuple[Loaded, Loaded] | None:
        loaded = []
        for i in self.pairs[row]:
            frame = self.frames[i]
            if str(frame.image) in self.broken:
                return None
            try:
                loaded.append(load_frame(frame, size, self.same_size))
            except UserError as e:
                self.broken[str(frame.image)] = str(e)
                log.warning("skipped: %s", e)
                return None
        return loaded[0], loaded[1]


@dataclass(frozen=True)
class Side:
    """One image of each of b pairs."""

    image: Tensor  # b 1 h w
    mask: Tensor  # b h w, bool
    extent: Tensor  # b 2: width and height without padding
    depth: Tensor  # b h w
    K: Tensor  # b 3 3, double
    T: Tensor  # b 4 4, double

    @staticmethod
    def of(frames: Sequence[Loaded], device: torch.device) -> Side:
        def tensor(values: list) -> Tensor:
            return torch.from_numpy(np.stack(values)).to(device, non_blocking=True)

        image = tensor([f.image for f in frames])
        extent = tensor([np.array(f.extent, np.float32) for f in frames])
        y, x = (torch.arange(n, device=device) for n in image.shape[1:])
        mask = (y[:, None] < extent[:, 1, None, None]) & (x < extent[:, 0, None, None])
        depth, K, T = (tensor([getattr(f, name) for f in frames]) for name in ("depth", "K", "T"))
        return Side(image[:, None].float() / 255, mask, extent, depth, K, T)

    def warp_cells(self, other: Side) -> Warp:
        """Where the centres of cells, row by row, land in the other images."""
        b, _, h, w = self.image.shape
        centres = cell_centres(h, w, self.image.device).flatten(0, 1).expand(b, -1, -1)
        # In double precision: world coordinates may be large.
        relative = other.T @ torch.linalg.inv_ex(self.T).inverse
        bounds = torch.cat([torch.zeros_like(other.extent), other.extent], 1) - 0.5
        return warp_by_depth(centres, self.depth, other.depth, self.K, other.K, relative, bounds1=bounds)


def pair_batch(first: Side, second: Side, names: tuple[str, ...] = ()) -> PairBatch:
    there, back = first.warp_cells(second), second.warp_cells(first)
    cells0, cells1 = (x.mask[:, ::CELL, ::CELL].shape for x in (first, second))
    return PairBatch(
        first.image, second.image,
        there.points.view(*cells0, 2), there.visible.view(cells0),
        back.points.view(*cells1, 2), back.visible.view(cells1),
        first.mask, second.mask, ~there.known.view(cells0), ~back.known.view(cells1),
        names=names,
    )  # fmt: skip
