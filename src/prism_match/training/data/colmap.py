"""Pairs of posed photos with depth, drawn from COLMAP models."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from prism_match import colmap_model
from prism_match.colmap_model import Model, PosedView
from prism_match.errors import UserError
from prism_match.files import is_file
from prism_match.frames import read_depth, read_gray
from prism_match.training.data.photometric import CALM, augment
from prism_match.training.data.photos import mip_maps
from prism_match.training.data.posed import (
    OVERLAP_BINS,
    SCALE_BINS,
    pair_bins,
    require_fit,
    scale_intrinsics,
    spread_weights,
)
from prism_match.training.pairs import CELL, ImageSize, PairBatch, Shape, cell_centres, shape_of
from prism_match.training.supervision import Warp, depth_at, warp_by_depth

log = logging.getLogger(__name__)


def read_model(path: Path | str) -> Model:
    """As `colmap_model.read_model`, for cameras without lens distortion only: depth maps have none."""
    model = colmap_model.read_model(path)
    for view in model.views:
        if view.camera.is_distorted:
            file = next(model.path.glob("cameras.*"))
            raise UserError(
                f"{file}: {view.camera.model} camera with lens distortion; undistort the images first"
            )
    return model


def load_photo(view: PosedView, image_dir: Path) -> np.ndarray:
    """h w, uint8. Raises UserError with one line when the photo is not of its camera's size."""
    gray = read_gray(image_dir / view.name)
    if gray.shape != (view.height, view.width):
        size = f"{gray.shape[1]}x{gray.shape[0]}"
        raise UserError(f"{image_dir / view.name}: {size}, its camera says {view.width}x{view.height}")
    return gray


def require_files(folder: Path, names: list[str], what: str) -> None:
    """Raises UserError with one line that names the files missing from `folder`."""
    missing = [n for n in names if not is_file(folder / n)]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise UserError(f"{folder}: {what}: {', '.join(missing[:5])}{more}")


def depth_path(depth_dir: Path | str, name: str) -> Path:
    """Where the depth map of the image `name` lies."""
    return Path(depth_dir) / f"{name}.h5"


# ---- pairs


ANCHORS = 32  # co-visible points kept for each pair, around which crops are taken
MIP_LEVELS = 4
TOLERANCE = 0.03  # relative depth difference up to which a point counts as seen by both images
SMALLEST_CROP = 0.35  # its side, as a share of the image's shorter side
TURN_BINS = (0.0, 12.0, 30.0)  # degrees between the axes of the two cameras
# Pairs of which less is confirmed are left out: a camera may be right for one part of a scene and wrong for
# another (a wrong focal length, a clock's dial that has turned).
CONFIRMED = 0.3


@dataclass(frozen=True)
class Collection:
    """Where a posed photo collection lies."""

    model: Path
    images: Path
    depth: Path

    @property
    def name(self) -> str:
        folder = self.model.resolve()
        return next(p.name for p in (folder, *folder.parents) if p.name not in ("sparse", "0"))


class ColmapPairs:
    """Pairs from posed photo collections with depth maps, all of it in the memory of one device.

    A pair is two crops of one shape, each around the same point of the scene, of different size and position.
    Sampling is a handful of batched operations on the device: no file is read, nothing is waited for, and
    twenty collections cost no more than one. A collection's share grows with the root of its photos: a
    small one is seen less often than a large one, but not so much less that it teaches nothing.
    """

    def __init__(
        self,
        collections: Sequence[Collection],
        device: torch.device | str = "cpu",
        photometric: bool = True,
    ):
        """`photometric`: photos of different days, but few of them, so each is changed as the others are."""
        self.name = collections[0].name if len(collections) == 1 else "collections"
        self.device, self.photometric = torch.device(device), photometric
        models = [read_model(c.model) for c in collections]
        loaded = [self._load(c, m) for c, m in zip(collections, models, strict=True)]
        self._fill_bank([photo for scene in loaded for photo in scene])
        self._choose_pairs(models, [[photo.view for photo in scene] for scene in loaded])

    def _load(self, collection: Collection, model: Model) -> list[_Photo]:
        """The photos of a collection with their depth maps, without those that are broken, which it names."""
        images, names = collection.images, [v.name for v in model.views]
        require_files(images, names, "images of the model are missing")
        hint = f"no depth maps (run `prism data depth {collection.model}`)"
        require_files(collection.depth, [f"{n}.h5" for n in names], hint)
        photos = []
        for view in model.views:
            try:
                if not np.isfinite(view.T).all():
                    raise UserError(f"{images / view.name}: its pose is not finite")
                path = depth_path(collection.depth, view.name)
                photo, depth = load_photo(view, images), read_depth(path)
                require_fit(path, depth, photo)
            except UserError as e:
                log.warning("skipped: %s", e)
                continue
            photos.append(_Photo(view, photo, depth))
        if len(photos) < 2:
            raise UserError(f"{images}: fewer than two photos of the model can be used")
        return photos

    def _fill_bank(self, photos: list[_Photo]) -> None:
        side = max(max(p.gray.shape) for p in photos)
        side += -side % 2 ** (MIP_LEVELS - 1)
        # Edges are repeated into the padding so that no dark seam bleeds into the smaller levels.
        bank = np.stack([np.pad(p.gray, [(0, side - n) for n in p.gray.shape], mode="edge") for p in photos])
        self._mips = mip_maps(torch.from_numpy(bank).to(self.device), MIP_LEVELS)
        side = max(max(p.depth.shape) for p in photos)
        bank = np.stack([np.pad(p.depth, [(0, side - n) for n in p.depth.shape]) for p in photos])
        self._depth = torch.from_numpy(bank).to(self.device)
        views = [p.view for p in photos]
        sizes = np.array([(v.width, v.height) for v in views], float)
        scale = np.array([p.depth.shape[::-1] for p in photos]) / sizes
        K = [scale_intrinsics(v.K, *s) for v, s in zip(views, scale, strict=True)]
        self._size = self._tensor(sizes)  # v 2: width and height in pixels of the photo
        self._depth_scale = self._tensor(scale)  # v 2: pixels of the depth map per pixel of the photo
        self._K = self._tensor(np.stack(K))  # v 3 3, in pixels of the depth map
        # v 4 4, double: a product of poses must not lose digits to TF32
        self._T = torch.from_numpy(np.stack([v.T for v in views])).to(self.device)
        self._T_inverse = torch.from_numpy(np.stack([np.linalg.inv(v.T) for v in views])).to(self.device)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.asarray(array, np.float32)).to(self.device)

    def _choose_pairs(self, models: list[Model], scenes: list[list[PosedView]]) -> None:
        """Pairs that share points, with weights that spread them over scenes, overlap and scale ratio."""
        found, weights, start = [], [], 0
        for model, views in zip(models, scenes, strict=True):
            measured = self._pairs_of(model, views, start)
            found.append(measured)
            weights.append(spread_weights(measured[1], measured[2]) * len(views) ** 0.5)
            start += len(views)
        # n each: numbers of the two views, overlap and scale ratio (for reports), anchors, extent
        self._pairs, self.overlap, self.ratio, self._anchors, self._extent = (
            torch.cat(x) for x in zip(*found, strict=True)
        )
        self._weight = torch.cat(weights)
        self._bin = pair_bins(self.overlap, self.ratio) * len(TURN_BINS) + self._turn_bins()
        self._cumulative = torch.zeros_like(self._weight)
        self.weigh(torch.ones(self.bins, device=self.device))

    bins = len(OVERLAP_BINS) * len(SCALE_BINS) * len(TURN_BINS)  # of difficulty

    def _turn_bins(self) -> Tensor:
        """n: by how much one camera of a pair is turned against the other."""
        axis = self._T[:, 2, :3]
        cos = (axis[self._pairs[:, 0]] * axis[self._pairs[:, 1]]).sum(1).clamp(-1, 1)
        return torch.bucketize(cos.arccos().rad2deg(), cos.new_tensor(TURN_BINS[1:]))

    def weigh(self, weights: Tensor) -> None:
        """Pairs are drawn by their own weight times that of their bin (weights: of all bins)."""
        weight = self._weight * weights[self._bin]
        self._cumulative.copy_((weight / weight.sum()).cumsum(0))

    def _pairs_of(self, model: Model, views: list[PosedView], start: int) -> tuple[Tensor, ...]:
        """Of one scene, whose views are numbered from `start`."""
        rows = {id(v): i for i, v in enumerate(model.views)}
        counts = np.stack([model.shared_counts(rows[id(v)]) for v in views])
        counts = counts[:, [rows[id(v)] for v in views]]
        pairs = np.stack(np.nonzero(np.triu(counts >= 8, 1)), axis=1) + start
        numbers = torch.from_numpy(pairs).to(self.device)
        measured = [self._measure(*some.unbind(1)) for some in numbers.split(64)] if len(numbers) else []
        if not any((m[0] >= OVERLAP_BINS[0]).any() for m in measured):
            raise UserError(f"{model.path}: no two images overlap, so no pairs can be made of it")
        overlap, *others = (torch.cat(x) for x in zip(*measured, strict=True))
        keep = overlap >= OVERLAP_BINS[0]
        return tuple(x[keep] for x in (numbers, overlap, *others))

    def _measure(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of b pairs of views, by their depth maps; lengths in pixels of the photos.

        Returns overlap b, scale ratio b (1 or more), anchors b ANCHORS 2 2 (points of the scene in both
        photos) and extent b 2 (of the co-visible part in each photo).
        """
        grid = torch.linspace(0, 1, 24, device=self.device) * (self._depth.shape[-1] - 1)
        points = torch.cartesian_prod(grid, grid).expand(len(a), -1, -1)
        there, back = self._warp(points, a, b), self._warp(points, b, a)
        overlap = torch.minimum(*(w.visible.sum(1) / w.known.sum(1).clamp(min=1) for w in (there, back)))
        enough = (there.visible.sum(1) >= 6) & (back.visible.sum(1) >= 6)
        sure = torch.minimum(self._confirmed(points, there, a, b), self._confirmed(points, back, b, a))
        ends = torch.stack([
            (points + 0.5) / self._depth_scale[a][:, None] - 0.5,
            (there.points + 0.5) / self._depth_scale[b][:, None] - 0.5,
        ], dim=2)  # b n 2 2  # fmt: skip
        seen = there.visible[..., None, None]
        middle = (ends * seen).sum(1, True) / seen.sum(1, True).clamp(min=1)
        spread = ((ends - middle).square() * seen).sum(1) / seen.sum(1).clamp(min=1)  # b 2 2
        # The side of a square whose points spread as widely.
        extent = (12 * spread.amax(-1)).sqrt()
        # How far a step of one pixel goes.
        stepped = self._warp(points + points.new_tensor([1.0, 0.0]), a, b)
        growth = (stepped.points - there.points).norm(dim=-1)
        growth = torch.where(there.visible & stepped.visible & (growth > 0), growth, torch.nan)
        growth = growth.nanmedian(1).values * self._depth_scale[a, 0] / self._depth_scale[b, 0]
        ratio = torch.maximum(growth, 1 / growth).nan_to_num(1.0)
        overlap = overlap * (enough & (sure >= CONFIRMED))
        return overlap, ratio, self._pick_anchors(ends, there.visible), extent

    def _confirmed(self, points: Tensor, warp: Warp, a: Tensor, b: Tensor) -> Tensor:
        """b: of the surface of `a` that lands inside `b`, the share that the depth of `b` confirms."""
        far = (self._size[b] * self._depth_scale[b] - 0.5)[:, None]
        inside = (warp.points >= -0.5).all(-1) & (warp.points < far).all(-1)
        inside = inside & (depth_at(self._depth[a], points) > 0)
        return warp.visible.sum(1) / inside.sum(1).clamp(min=1)

    def _pick_anchors(self, ends: Tensor, visible: Tensor) -> Tensor:
        """b ANCHORS 2 2: some of ends b n 2 2 that are visible (b n), repeated where there are too few."""
        generator = torch.Generator().manual_seed(0)  # a source is the same every time
        order = torch.rand(visible.shape[1], generator=generator).to(self.device)
        pick = (visible + order).topk(ANCHORS, dim=1).indices  # visible ones first
        turn = torch.arange(ANCHORS, device=self.device) % visible.sum(1, True).clamp(min=1)
        pick = pick.gather(1, turn)
        return ends.gather(1, pick[..., None, None].expand(-1, -1, 2, 2))

    def _warp(self, points: Tensor, a: Tensor, b: Tensor, bounds: Tensor | None = None) -> Warp:
        """Warps points b n 2 from views `a` to views `b`, all in pixels of their depth maps."""
        if bounds is None:
            far = self._size[b] * self._depth_scale[b]
            bounds = torch.cat([torch.zeros_like(far), far], 1) - 0.5
        relative = self._T[b] @ self._T_inverse[a]
        maps = self._depth[a], self._depth[b], self._K[a], self._K[b]
        return warp_by_depth(points, *maps, relative, TOLERANCE, bounds)

    def __len__(self) -> int:
        """Number of pairs of photos; crops make many more of them."""
        return len(self._pairs)

    @torch.no_grad()
    def sample(self, batch: int, size: ImageSize, generator: torch.Generator) -> PairBatch:
        """`batch` pairs of images of that size; `generator` is on the device of the source."""
        shape = shape_of(size)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(batch, *shape, generator=generator, device=self.device)

        row = torch.searchsorted(self._cumulative, uniform()).clamp(max=len(self._pairs) - 1)
        flip = uniform() < 0.5
        views = torch.where(flip[:, None], self._pairs[row].flip(1), self._pairs[row])
        which = (uniform() * ANCHORS).long().clamp(max=ANCHORS - 1)
        anchor = self._anchors[row, which]
        anchor = torch.where(flip[:, None, None], anchor.flip(1), anchor)
        extent = torch.where(flip[:, None], self._extent[row].flip(1), self._extent[row])
        crops = [self._crop(views[:, k], anchor[:, k], extent[:, k], uniform(3), shape) for k in (0, 1)]
        image0, image1 = (self._cut(views[:, k], *crops[k], shape) for k in (0, 1))
        if self.photometric:
            calm = (uniform() < CALM).repeat(2)
            image0, image1 = augment(torch.cat([image0, image1]), generator, calm).chunk(2)
        there = self._warp_cells(views[:, 0], views[:, 1], crops[0], crops[1], shape)
        back = self._warp_cells(views[:, 1], views[:, 0], crops[1], crops[0], shape)
        cells = (batch, shape.height // CELL, shape.width // CELL)
        return PairBatch(
            image0, image1,
            there.points.view(*cells, 2), there.visible.view(cells),
            back.points.view(*cells, 2), back.visible.view(cells),
            unknown0=~there.known.view(cells), unknown1=~back.known.view(cells),
            rough=torch.ones(batch, dtype=torch.bool, device=self.device),
            bins=self._bin[row],
            names=(self.name,) * batch,
        )  # fmt: skip

    def _crop(
        self, view: Tensor, anchor: Tensor, extent: Tensor, random: Tensor, shape: Shape
    ) -> tuple[Tensor, Tensor]:
        """Top-left edge b 2 and pixels of the photo for one of the image, b, of a rectangle around `anchor`,
        inside the photo: without padding, attention needs no masks.

        Sides spread around the `extent` of the co-visible part: a landmark is often small in its photo.
        """
        size, side = self._size[view], min(shape)
        # The largest rectangle of that shape.
        whole = torch.minimum(size[:, 0] / shape.width, size[:, 1] / shape.height)
        high = torch.minimum(torch.maximum(2.5 * extent / side, 0.6 * whole), whole)
        low = torch.minimum(torch.maximum(0.7 * extent / side, SMALLEST_CROP * whole), high)
        zoom = low * (high / low) ** random[:, 0]
        taken = torch.stack([zoom * shape.width, zoom * shape.height], 1)
        corner = anchor + 0.5 - (0.15 + 0.7 * random[:, 1:]) * taken
        return torch.minimum(corner.clamp(min=0), size - taken), zoom

    def _cut(self, view: Tensor, corner: Tensor, zoom: Tensor, shape: Shape) -> Tensor:
        """Image b 1 h w, from the levels of the bank that the shrinking asks for."""
        x, y = (
            corner[:, k, None] + (torch.arange(n, device=self.device) + 0.5) * zoom[:, None]
            for k, n in enumerate(shape[::-1])
        )
        grid = torch.stack(torch.broadcast_tensors(x[:, None, :], y[:, :, None]), dim=-1)
        grid = grid * 2 / self._mips[0].shape[-1] - 1
        level = zoom.log2().clamp(0, len(self._mips) - 1)
        image = torch.zeros(len(view), 1, *shape, device=self.device)
        for k, bank in enumerate(self._mips):
            share = (1 - (level - k).abs()).clamp(min=0).view(-1, 1, 1, 1)
            photo = bank[view][:, None].float() / 255
            image = image + share * F.grid_sample(photo, grid, padding_mode="border", align_corners=False)
        return image

    def _warp_cells(self, a: Tensor, b: Tensor, crop_a: tuple, crop_b: tuple, shape: Shape) -> Warp:
        """Warps the cell centres of crops of views `a` into crops of views `b`."""
        (corner_a, zoom_a), (corner_b, zoom_b) = crop_a, crop_b
        zoom_a, zoom_b = zoom_a[:, None, None], zoom_b[:, None, None]
        scale_a, scale_b = self._depth_scale[a][:, None], self._depth_scale[b][:, None]
        centres = cell_centres(*shape, self.device).flatten(0, 1)
        edge = corner_a[:, None] + (centres + 0.5) * zoom_a
        taken = torch.cat([zoom_b[:, 0] * shape.width, zoom_b[:, 0] * shape.height], 1)
        far = torch.minimum(corner_b + taken, self._size[b])
        bounds = torch.cat([corner_b, far], 1) * self._depth_scale[b].repeat(1, 2) - 0.5
        warp = self._warp(edge * scale_a - 0.5, a, b, bounds)
        points = ((warp.points + 0.5) / scale_b - corner_b[:, None]) / zoom_b - 0.5
        return warp._replace(points=points)


@dataclass(frozen=True)
class _Photo:
    view: PosedView
    gray: np.ndarray  # h w, uint8
    depth: np.ndarray  # h w of the map, float32
