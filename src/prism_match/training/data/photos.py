"""Homography pairs from any folder or tar of photos: strong geometry, independent light, nothing labelled.

Both views are warped from the photo, so that both carry the blur of resampling. What lies outside the photo
is filled with another photo, and patches of another photo are pasted into one view only: content with no
match, marked as such, which is what teaches pruning. In larger views several photos side by side stand for
one: a photo of 448 pixels alone would be magnified to a blur, and sub-pixel refinement needs sharp images to
learn from.
"""

from __future__ import annotations

import logging
import math
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from prism_match.engine.photos import IMAGE_SUFFIXES, in_threads
from prism_match.errors import UserError
from prism_match.frames import decode_pixels
from prism_match.training.compiling import compiled
from prism_match.training.data.photometric import CALM, Draw, augment
from prism_match.training.data.texture import flat_cells, forget_flat
from prism_match.training.pairs import ImageSize, PairBatch, cell_centres, shape_of

log = logging.getLogger(__name__)

LARGEST_FILE = 2**28  # bytes of a photo in a tar
MAX_SCALE = 6.0  # between two views
CANDIDATES = 4  # homography pairs drawn for each photo, of which the first with enough overlap is kept


class PhotoStore:
    """Square gray photos with their mip-maps in one flat uint8 tensor, sampled at any point and level."""

    def __init__(self, photos: Tensor):
        """`photos`: n s s uint8, s divisible by 32."""
        if photos.dim() != 3 or photos.shape[1] != photos.shape[2] or photos.dtype != torch.uint8:
            raise UserError(f"photos must be uint8 n s s, not {photos.dtype} {tuple(photos.shape)}")
        self.size = photos.shape[1]
        if len(photos) == 0 or self.size % 32:
            raise UserError(f"need at least one photo of a size divisible by 32, not {tuple(photos.shape)}")
        self.count = len(photos)
        self.sizes = [self.size]
        while self.sizes[-1] % 2 == 0 and self.sizes[-1] > 4:
            self.sizes.append(self.sizes[-1] // 2)
        chunks = (mip_maps(chunk, len(self.sizes)) for chunk in photos.split(256))
        self.flat = torch.cat([torch.cat([level.flatten(1) for level in levels], 1) for levels in chunks])
        small = self.flat[:, -sum(s * s for s in self.sizes[2:]) :][:, : self.sizes[2] ** 2] / 255.0
        self.tone = torch.stack([small.mean(1), small.std(1).clamp(min=0.02)], 1)  # n 2: mean and deviation

    @classmethod
    def load(
        cls, paths: str | Path | Iterable[str | Path], size: int = 448, limit: int | None = None
    ) -> PhotoStore:
        """Photos of folders (recursively, tars inside them too), tars and files; `limit` keeps the first."""
        roots = [Path(paths)] if isinstance(paths, (str, Path)) else [Path(p) for p in paths]
        photos: list[np.ndarray] = []
        for _, photo in in_threads(_encoded(roots), lambda encoded: _decode(*encoded, size)):
            if isinstance(photo, UserError):
                log.warning("skipped %s", photo)
                continue
            photos.append(photo)
            if limit is not None and len(photos) >= limit:
                break
        if not photos:
            where = ", ".join(map(str, roots)) or "an empty list"
            raise UserError(f"no photos that can be decoded in {where}")
        return cls(torch.from_numpy(np.stack(photos)))

    @property
    def device(self) -> torch.device:
        return self.flat.device

    def __len__(self) -> int:
        return self.count

    def to(self, device: torch.device | str) -> PhotoStore:
        """The same store on `device`; shared, not copied, where it is there already."""
        moved = object.__new__(PhotoStore)
        moved.size, moved.count, moved.sizes = self.size, self.count, self.sizes
        moved.flat, moved.tone = self.flat.to(device), self.tone.to(device)
        return moved

    def sample(self, photo: Tensor, u: Tensor, v: Tensor, level: Tensor) -> Tensor:
        """Bilinear samples in [0, 1]; all arguments of one shape: photo (int64), u and v in [0, 1], level.

        Levels are taken whole: callers that supersample spread theirs (`spread_levels`), which blends levels.
        """
        k = level.clamp(0, len(self.sizes) - 1).long()
        # All levels are half the one before, and lie one behind the other: size and start in closed form.
        side = torch.bitwise_right_shift(torch.full_like(k, self.size), k)
        start = (4 * (self.size * self.size - side * side)) // 3
        x = (u * side - 0.5).clamp(min=0).minimum(side - 1.0)
        y = (v * side - 0.5).clamp(min=0).minimum(side - 1.0)
        x0, y0 = x.long(), y.long()
        fx, fy = x - x0, y - y0
        right = (x0 + 1).minimum(side - 1) - x0
        down = ((y0 + 1).minimum(side - 1) - y0) * side
        at = photo * self.flat.shape[1] + start + y0 * side + x0
        flat = self.flat.view(-1)
        top = torch.lerp(flat[at].float(), flat[at + right].float(), fx)
        bottom = torch.lerp(flat[at + down].float(), flat[at + down + right].float(), fx)
        return torch.lerp(top, bottom, fy) / 255.0


def mip_maps(photos: Tensor, count: int) -> list[Tensor]:
    """n s s uint8 -> `count` levels, each the mean of 2x2 of the one before."""
    level, levels = photos.float().unsqueeze(1), [photos]
    for _ in range(count - 1):
        level = F.avg_pool2d(level, 2)
        levels.append(level[:, 0].round().to(torch.uint8))
    return levels


def _encoded(paths: list[Path]) -> Iterator[tuple[str, bytes]]:
    """Name and encoded bytes of each image under `paths`, in a stable order."""
    for path in paths:
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in (*IMAGE_SUFFIXES, ".tar"))
            yield from _encoded([p for p in inside if p.is_file()])
        elif path.suffix.lower() == ".tar":
            yield from _encoded_in_tar(path)
        else:
            yield str(path), path.read_bytes()


def _encoded_in_tar(path: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with tarfile.open(path) as tar:
            for member in tar:
                if not member.isfile() or Path(member.name).suffix.lower() not in IMAGE_SUFFIXES:
                    continue
                if member.size > LARGEST_FILE:
                    log.warning("skipped %s:%s: too large for a photo", path, member.name)
                    continue
                file = tar.extractfile(member)
                if file is not None:
                    yield f"{path}:{member.name}", file.read()
    except Exception as e:  # damaged archives, packed ones above all, fail in every way there is
        raise UserError(f"{path}: not a tar file that can be read ({e})") from e


def _decode(name: str, data: bytes, size: int) -> np.ndarray:
    """Gray, centre square, `size` x `size` uint8."""
    image = decode_pixels(np.frombuffer(data, np.uint8), cv2.IMREAD_GRAYSCALE)
    if image is None:
        raise UserError(f"{name}: not an image that can be decoded")
    side = min(image.shape)
    top, left = (image.shape[0] - side) // 2, (image.shape[1] - side) // 2
    image = image[top : top + side, left : left + side]
    if side == size:
        return np.ascontiguousarray(image)
    smooth = cv2.INTER_AREA if side > size else cv2.INTER_CUBIC
    return cv2.resize(image, (size, size), interpolation=smooth)


def subpixels(size: ImageSize, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """4 h*w each: x and y of 2x2 points inside each pixel, for anti-aliasing by their mean."""
    height, width = shape_of(size)
    down, across = (torch.arange(n, device=device, dtype=torch.float32) for n in (height, width))
    sub = torch.arange(4, device=device).view(4, 1, 1)
    x = (across.view(1, 1, -1) + (sub % 2) * 0.5 - 0.25).expand(4, height, width)
    y = (down.view(1, -1, 1) + (sub // 2) * 0.5 - 0.25).expand(4, height, width)
    return x.reshape(4, -1), y.reshape(4, -1)


def spread_levels(level: Tensor) -> Tensor:
    """b 4 n -> the same, offset so that the whole parts over the 4 sub-pixels average to the level."""
    sub = torch.arange(4, device=level.device)
    return level + ((sub + 0.5) / 4).view(1, 4, 1)


def product(a: Tensor, b: Tensor) -> Tensor:
    """... 3 3 @ ... 3 3 without matmul, whose TF32 mode would move pixels by tenths."""
    return (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)


def inverse(m: Tensor) -> Tensor:
    """... 3 3: the inverse by the adjugate, free of synchronisation. Over the determinant, small as it is
    where pixels become shares of a photo: so the product of two views has a homogeneous w of about 1."""
    r0, r1, r2 = m.unbind(-2)
    cross = torch.linalg.cross
    adjugate = torch.stack([cross(r1, r2), cross(r2, r0), cross(r0, r1)], -1)
    return adjugate / (r0 * adjugate[..., 0]).sum(-1)[..., None, None]


def transform(h: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Homographies (b 3 3) of points (x, y: broadcastable to b n): x, y, and the homogeneous w."""
    rows = [h[:, i, 0, None] * x + h[:, i, 1, None] * y + h[:, i, 2, None] for i in range(3)]
    w = rows[2]
    safe = torch.where(w.abs() < 1e-6, torch.full_like(w, 1e-6), w)
    return rows[0] / safe, rows[1] / safe, w


class PhotoPairs:
    """Pairs of views of one photo related by a homography, with scale ratios of up to MAX_SCALE."""

    name = "photos"

    def __init__(
        self,
        store: PhotoStore,
        device: torch.device | str = "cpu",
        photometric: bool = True,
        strangers: float = 0.06,
        compile: bool = False,
        calm: float = CALM,
    ):
        """`strangers`: share of pairs whose views are of different photos, so that pruning learns that two
        images may have nothing in common. `compile` fuses the rendering into one kernel."""
        self.store, self.device = store.to(device), torch.device(device)
        self._render = compiled(render) if compile else render
        self.photometric, self.strangers = photometric, strangers
        self.calm = calm  # share of pairs that are changed little

    @torch.no_grad()
    def sample(self, batch: int, size: ImageSize, generator: torch.Generator) -> PairBatch:
        draw = Draw(generator)
        to_photo = self._choose_views(draw, batch, size)  # b 2 3 3: pixels of each view -> photo in [0, 1]
        photo = draw.integer(self.store.count, batch, 1)
        # A distractor for each view and a stranger: never the photo itself, unless it is the only one.
        step = 1 + draw.integer(max(self.store.count - 1, 1), batch, 3)
        photo = torch.cat([photo, (photo + step) % self.store.count], 1)
        mosaic = draw_mosaic(draw, batch, size, self.store)
        stranger = draw.chance(self.strangers if self.store.count > 1 else 0.0, batch)
        shown = photo[:, 0], torch.where(stranger, photo[:, 3], photo[:, 0])
        patches = [Patches(draw, batch, size) for _ in range(2)]
        calm = draw.chance(self.calm, batch)
        images, truth, flat = [], [], []
        for i, j in ((0, 1), (1, 0)):
            # Of one kind of strides, or what is compiled for the first view would not do for the second.
            which = shown[i].contiguous(), photo[:, 1 + i].contiguous()
            image = self._render(self.store, to_photo[:, i], *which, mosaic, patches[i], size)
            flat.append(flat_cells(image))
            images.append(augment(image, generator, calm) if self.photometric else image)
            warp, visible = warp_cells(to_photo[:, i], to_photo[:, j], patches[i], patches[j], size)
            truth.append((warp, visible & ~stranger.view(-1, 1, 1)))
        pairs = PairBatch(images[0], images[1], *truth[0], *truth[1], names=(self.name,) * batch)
        return forget_flat(pairs, *flat)

    def _choose_views(self, draw: Draw, b: int, size: ImageSize) -> Tensor:
        """b 2 3 3: the first of several random view pairs whose overlap is between 0.1 and 1."""
        drawn = random_views(draw, b * CANDIDATES, size)
        x, y = cell_centres(128, 128, self.device).view(1, -1, 2).unbind(-1)
        height, width = shape_of(size)
        x, y = x * (width / 128), y * (height / 128)
        seen = [_warp(drawn[:, i], drawn[:, 1 - i], x, y, size)[1] for i in range(2)]
        overlap = torch.maximum(*(x.float().mean(1) for x in seen)).view(b, CANDIDATES)
        # First good candidate; where none is good, the one that overlaps most.
        order = torch.arange(CANDIDATES, 0, -1, device=self.device)
        best = torch.where(overlap > 0.12, order, overlap).argmax(1)
        return drawn.view(b, CANDIDATES, 2, 3, 3)[torch.arange(b, device=self.device), best]


def draw_mosaic(draw: Draw, b: int, size: ImageSize, store: PhotoStore) -> Tensor:
    """b 3, int64: how many photos along each side stand for one, and how far apart in the store neighbours
    along x and along y are."""
    most = 0.5 + max(shape_of(size)) / (
        store.size / 2
    )  # texels for twice the pixels, since near views show only a part
    side = 1 + draw.uniform(0, most, b, 1).long()
    return torch.cat([side, draw.integer(store.count, b, 2)], 1)


def render(
    store: PhotoStore,
    to_photo: Tensor,
    photo: Tensor,
    other: Tensor,
    mosaic: Tensor,
    patches: Patches,
    size: ImageSize,
) -> Tensor:
    """b 1 h w: the view of `photo` (b) and those beside it in the mosaic (b 3) by `to_photo` (b 3 3);
    `other` (b) where it leaves the photo and in the patches."""
    b = len(photo)
    x, y = (t.reshape(1, -1) for t in subpixels(size, to_photo.device))
    u, v, w = transform(to_photo, x, y)
    inside = (u > 0) & (u < 1) & (v > 0) & (v < 1) & ~patches.covers(x, y)
    side, right, down = mosaic.unsqueeze(-1).unbind(1)  # b 1 each
    # Photo pixels under a sub-pixel, from the homography's Jacobian: |det H| / w^3 is the change of area.
    det = (to_photo[:, 0] * torch.linalg.cross(to_photo[:, 1], to_photo[:, 2])).sum(-1)
    area = det.abs().view(b, 1) / w.abs().clamp(min=1e-6) ** 3 * (side * (store.size / 2)) ** 2
    level = spread_levels(0.5 * torch.log2(area.clamp(min=1e-6)).view(b, 4, -1)).view(b, -1)
    # Distractors keep the scale of the view: the same coordinates, mirrored into the other photo.
    u, v = ((t - 2 * torch.round(t / 2)).abs() * side for t in (u, v))
    column, row = (t.long().minimum(side - 1) for t in (u, v))
    index = torch.where(inside, photo.view(b, 1), other.view(b, 1)) + column * right + row * down
    value = store.sample(index % store.count, u - column, v - row, level)
    return value.view(b, 4, *shape_of(size)).mean(1, keepdim=True)


class Patches:
    """Random ellipses in one view which show something else."""

    def __init__(self, draw: Draw, b: int, size: ImageSize):
        count = 4
        height, width = shape_of(size)
        self.x, self.y = draw.uniform(0, width, b, count, 1), draw.uniform(0, height, b, count, 1)
        present = draw.chance(0.4, b, 1, 1) & draw.chance(0.6, b, count, 1)
        self.rx = draw.log_uniform(0.03, 0.22, b, count, 1) * min(height, width) * present
        self.ry = self.rx * draw.log_uniform(0.6, 2.5, b, count, 1)
        self.power = 2.0 * draw.log_uniform(0.6, 3.0, b, count, 1)  # from a star over an ellipse to a box

    def covers(self, x: Tensor, y: Tensor) -> Tensor:
        """Points (x, y: broadcastable to b n) -> b n bool."""
        dx = ((x.unsqueeze(1) - self.x) / self.rx.clamp(min=1e-3)).abs().clamp(max=10)
        dy = ((y.unsqueeze(1) - self.y) / self.ry.clamp(min=1e-3)).abs().clamp(max=10)
        return ((dx**self.power + dy**self.power < 1) & (self.rx > 0)).any(1)


def random_views(draw: Draw, n: int, size: ImageSize, max_scale: float = MAX_SCALE) -> Tensor:
    """n 2 3 3: two views of one photo each, pixels -> photo in [0, 1]. The wide view covers much of the
    photo, the near one up to `max_scale` times less of it."""
    ratio = max_scale ** draw.uniform(0, 1, n).pow(1.3)
    wide = draw.uniform(0.35, 0.52, n) * draw.uniform(0.6, 1, n).where(ratio < 2, torch.ones_like(ratio))
    extent = torch.stack([wide, wide / ratio], 1)  # half a view's side, in photo sides
    extent = torch.where(draw.chance(0.5, n, 1), extent, extent.flip(1))
    # Mostly upright and a little rolled; now and then any rotation at all.
    angle = torch.where(
        draw.chance(0.15, n, 2), draw.uniform(-math.pi, math.pi, n, 2), draw.normal(0.25, n, 2)
    )
    # Centres stay where the view is mostly inside the photo.
    room = (0.55 - extent).clamp(min=0.03).unsqueeze(-1)
    centre = 0.5 + draw.uniform(-1, 1, n, 2, 2) * room
    # The wide view's centre pulls the near one towards it, else strong ratios would seldom overlap.
    middle = centre.mean(1, keepdim=True)
    centre = middle + (centre - middle) * draw.uniform(0.2, 1, n, 1, 1)
    tilt = draw.normal(0.22, n, 2, 2).clamp(-0.5, 0.5)
    stretch = draw.normal(0.12, n, 2).exp()
    cos, sin, zero, one = angle.cos(), angle.sin(), torch.zeros_like(angle), torch.ones_like(angle)
    ex, ey = extent * stretch, extent / stretch
    similarity = torch.stack(
        [ex * cos, -ey * sin, centre[..., 0], ex * sin, ey * cos, centre[..., 1], zero, zero, one], -1
    ).view(n, 2, 3, 3)
    perspective = torch.stack([one, zero, zero, zero, one, zero, tilt[..., 0], tilt[..., 1], one], -1)
    # Of pixels: the longer side goes from -1 to 1.
    height, width = shape_of(size)
    step = one * 2 / max(height, width)
    x, y = (step * (0.5 - n / 2) for n in (width, height))
    normalise = torch.stack([step, zero, x, zero, step, y, zero, zero, one], -1)
    return product(product(similarity, perspective.view(n, 2, 3, 3)), normalise.view(n, 2, 3, 3))


def _warp(source: Tensor, target: Tensor, x: Tensor, y: Tensor, size: ImageSize) -> tuple[Tensor, Tensor]:
    """Points (x, y: 1 n) of the source view -> b n 2 in the target view, and whether both show the photo."""
    u, v, w0 = transform(source, x, y)
    wx, wy, w1 = transform(product(inverse(target), source), x, y)
    height, width = shape_of(size)
    inside = (wx >= 0) & (wx <= width - 1) & (wy >= 0) & (wy <= height - 1) & (w0 > 0) & (w1 > 0)
    return torch.stack([wx, wy], -1), inside & (u > 0) & (u < 1) & (v > 0) & (v < 1)


def warp_cells(
    source: Tensor, target: Tensor, own: Patches, theirs: Patches, size: ImageSize
) -> tuple[Tensor, Tensor]:
    """Views (b 3 3) -> warp b h/8 w/8 2 and visibility b h/8 w/8 of the source's cell centres."""
    centres = cell_centres(*shape_of(size), source.device)
    x, y = centres.reshape(1, -1, 2).unbind(-1)
    warp, seen = _warp(source, target, x, y, size)
    seen = seen & ~own.covers(x, y) & ~theirs.covers(*warp.unbind(-1))
    return warp.view(-1, *centres.shape), seen.view(-1, *centres.shape[:2])
