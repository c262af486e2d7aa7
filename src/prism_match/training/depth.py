"""Depth maps for posed photos by a multi-view plane sweep, in plain PyTorch on a CPU or a GPU.

For each view: planes of equal inverse-depth spacing sweep the range of its sparse points; source views
are warped onto each plane and compared by zero-normalised cross-correlation, which survives changes of
light; the best few sources count, so that one that is occluded or full of people does no harm; semi-global
aggregation makes the choice of planes smooth; a parabola gives the depth between planes. A depth is kept
only where the depth maps of at least two other views agree with it.

A second sweep, over a few inverse depths about the first and in larger images, makes it more exact: its
windows follow the surface instead of planes that face the camera. Where neighbours agree with what it found,
that is the depth; elsewhere it is that of the first.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from prism_match.files import is_file, lock_folder, writable_folder
from prism_match.frames import read_depth, write_depth
from prism_match.training.data.colmap import (
    Model,
    PosedView,
    depth_path,
    load_photo,
    read_model,
    require_files,
)
from prism_match.training.data.posed import scale_intrinsics


@dataclass(frozen=True)
class SweepConfig:
    long_side: int = 384  # pixels of the depth map's longer side
    planes: int = 112
    sources: int = 8  # views compared with each view
    checks: int = 16  # views whose depth maps may agree with it
    best: int = 3  # of them, how many of the best count at each pixel and plane
    window: int = 7  # pixels along the side of the correlation window
    step_penalty: float = 0.06  # P1 of semi-global matching: neighbours one plane apart
    jump_penalty: float = 0.4  # P2: neighbours further apart
    min_score: float = 0.3  # mean correlation below which a depth is not believed
    tolerance: float = 0.01  # relative depth difference between views that agree
    reach: float = 1.0  # pixels that a point may be off after the way to another view and back
    agreeing: int = 2  # other views that have to agree; one is enough next to pixels where so many do
    growth: int = 3  # pixels by which a surface may grow that way
    island: float = 0.003  # smallest connected patch that is kept, as a share of the image
    fine_side: int = 768  # pixels of the longer side of the second sweep, and of the map; 0: no second sweep
    fine_planes: int = 9
    fine_reach: float = 1.0  # planes of the first sweep to each side that the second one looks at


@dataclass(frozen=True)
class DepthCheck:
    """How depth maps compare with the sparse points of their model."""

    median_error: float  # relative, over all points that fall on a kept pixel
    within_2_percent: float  # share of those points
    kept: float  # share of all pixels with a depth
    maps: int


def make_depth(
    model_dir: Path | str,
    image_dir: Path | str,
    depth_dir: Path | str,
    config: SweepConfig | None = None,
    device: torch.device | str = "cpu",
) -> DepthCheck:
    """Writes `depth_dir/NAME.h5` for every image NAME of the model; finished maps are not made again."""
    model, depth_dir = read_model(model_dir), Path(depth_dir)
    with lock_folder(writable_folder(depth_dir)):
        return _make_depth(model, Path(image_dir), depth_dir, config or SweepConfig(), device)


def _make_depth(
    model: Model, image_dir: Path, depth_dir: Path, config: SweepConfig, device: torch.device | str
) -> DepthCheck:
    neighbours = [choose_sources(model, i, config.checks) for i in range(len(model.views))]
    missing = [i for i, v in enumerate(model.views) if not is_file(depth_path(depth_dir, v.name))]
    # A map is checked against its neighbours' raw maps, so those are needed as well.
    wanted = sorted({j for i in missing for j in (i, *neighbours[i])})
    if missing:
        compared = sorted({j for i in wanted for j in (i, *neighbours[i][: config.sources])})
        photos = load_photos(model, image_dir, compared, device)
        raw = _raw_maps(model, photos, neighbours, wanted, depth_dir / ".raw", config)
        fine = {}
        if config.fine_side:
            fine = _fine_maps(model, photos, neighbours, raw, depth_dir / ".raw" / "fine", config)
        for i in tqdm(missing, desc="agreement", disable=len(missing) < 2):
            depth = agreeing_depth(model, raw, i, neighbours[i], config)
            if config.fine_side:
                depth = finer_depth(model, fine, i, neighbours[i], depth, config)
            write_depth(depth_path(depth_dir, model.views[i].name), depth)
    shutil.rmtree(depth_dir / ".raw", ignore_errors=True)
    return check_depth(model, depth_dir)


def check_depth(model: Model, depth_dir: Path | str) -> DepthCheck:
    """Compares finished depth maps with the sparse points seen in their images."""
    errors, kept, maps = [np.empty(0)], [], 0
    for view in model.views:
        if not is_file(depth_path(depth_dir, view.name)):
            continue
        depth = read_depth(depth_path(depth_dir, view.name))
        errors.append(_errors_at_points(model, view, depth))
        kept.append((depth > 0).mean())
        maps += 1
    error = np.concatenate(errors)
    if not maps or not len(error):
        return DepthCheck(float("nan"), float("nan"), float(np.mean(kept)) if kept else 0.0, maps)
    return DepthCheck(float(np.median(error)), float((error < 0.02).mean()), float(np.mean(kept)), maps)


def _errors_at_points(model: Model, view: PosedView, depth: np.ndarray) -> np.ndarray:
    h, w = depth.shape
    scale = np.array([w / view.width, h / view.height])
    x, y = np.clip(np.rint((view.pixels + 0.5) * scale - 0.5).astype(int), 0, [w - 1, h - 1]).T
    there, z = depth[y, x], view.depth_of(model.points[view.points])
    good = (there > 0) & (z > 0)
    return np.abs(there[good] / z[good] - 1)


# ---- choosing what to compare


def choose_sources(model: Model, view: int, count: int) -> list[int]:
    """The views to compare with `view`: many shared points, seen at about 10 degrees and at like scale."""
    counts = model.shared_counts(view)
    candidates = [int(j) for j in np.argsort(-counts)[: 6 * count] if counts[j] >= 8]
    scored = sorted(((source_score(model, view, j), j) for j in candidates), reverse=True)
    return [j for score, j in scored[:count] if score > 0]


def source_score(model: Model, a: int, b: int) -> float:
    """Sum over shared points of how well the two views triangulate and resemble each other there."""
    ids, _, _ = model.shared(a, b)
    xyz, va, vb = model.points[ids], model.views[a], model.views[b]
    ray_a, ray_b = xyz - va.centre, xyz - vb.centre
    cosine = (ray_a * ray_b).sum(1) / np.linalg.norm(ray_a, axis=1) / np.linalg.norm(ray_b, axis=1)
    angle = np.degrees(np.arccos(np.clip(cosine, -1, 1)))
    # Small angles give no depth; large ones change what the window shows.
    spread = np.where(angle < 10, 5.0, 12.0)
    ratio = np.log2(np.maximum(relative_scale(model, a, b, ids), 1e-6))
    score = float(np.sum(np.exp(-0.5 * ((angle - 10) / spread) ** 2 - 0.5 * ratio**2)))
    return score if np.isfinite(score) else 0.0  # a pose may be NaN


def relative_scale(model: Model, a: int, b: int, ids: np.ndarray) -> np.ndarray:
    """n: how much larger each point's neighbourhood appears in view `b` than in view `a`, in pixels."""
    va, vb, xyz = model.views[a], model.views[b], model.points[ids]
    return (vb.K[0, 0] / vb.depth_of(xyz)) / (va.K[0, 0] / va.depth_of(xyz))


def load_photos(
    model: Model, image_dir: Path, wanted: Iterable[int], device: torch.device | str
) -> dict[int, Tensor]:
    """Gray photos 1 1 h w in [0, 1] by view. Raises ValueError naming the images that are missing."""
    require_files(image_dir, [model.views[i].name for i in wanted], "images of the model are missing")
    photos = {i: torch.from_numpy(load_photo(model.views[i], image_dir)) for i in wanted}
    return {i: p.to(device)[None, None].float() / 255 for i, p in photos.items()}


def _resized(photo: Tensor, K: np.ndarray, scale: float) -> tuple[Tensor, np.ndarray]:
    """The photo 1 1 h w and its intrinsics, `scale` times as large."""
    h, w = photo.shape[-2:]
    h2, w2 = max(round(h * scale), 8), max(round(w * scale), 8)
    small = F.interpolate(photo, (h2, w2), mode="bilinear", antialias=True, align_corners=False)
    return small, scale_intrinsics(K, w2 / w, h2 / h)


# ---- the sweep


@torch.no_grad()
def sweep(
    model: Model, photos: dict[int, Tensor], view: int, sources: Sequence[int], config: SweepConfig
) -> tuple[Tensor, Tensor]:
    """Depth h w of one view, not yet checked against others, 0 where it is not believed, and its score."""
    reference = model.views[view]
    scale = min(config.long_side / max(reference.width, reference.height), 1.0)
    image, _ = _resized(photos[view], reference.K, scale)
    h, w = image.shape[-2:]
    span = inverse_range(model, view)
    if not sources or span is None:
        return image.new_zeros(h, w), image.new_zeros(h, w)
    inverse = torch.linspace(*span, config.planes, device=image.device)
    score = compare(model, photos, view, sources, scale, inverse[:, None, None], config)
    return _pick(score, image, inverse, config)


def inverse_range(model: Model, view: int) -> tuple[float, float] | None:
    """Least and greatest inverse depth that a view may have; None: it sees no points."""
    reference = model.views[view]
    depths = reference.depth_of(model.points[reference.points])
    depths = depths[depths > 0]
    if not len(depths):
        return None
    near, far = np.percentile(depths, [1, 99])
    return float(0.8 / far), float(1.25 / near)


def compare(
    model: Model,
    photos: dict[int, Tensor],
    view: int,
    sources: Sequence[int],
    scale: float,
    inverse: Tensor,
    config: SweepConfig,
) -> Tensor:
    """d h w: how well the best few sources fit a view, at `scale`, at inverse depths d h w (or d 1 1)."""
    reference, planes = model.views[view], len(inverse)
    image, K = _resized(photos[view], reference.K, scale)
    best = image.new_full((config.best, planes, *image.shape[-2:]), -1.0)
    chunk = 6 if image.device.type == "cpu" else planes  # what fits into a CPU's cache
    for j in sources:
        ids, _, _ = model.shared(view, j)
        ratio = max(float(np.median(relative_scale(model, view, j, ids))), 0.05)
        # Both at the same scale: otherwise a closer photo is aliased and the windows differ.
        other, K_other = _resized(photos[j], model.views[j].K, min(scale / ratio, 1.0))
        relative = model.views[j].T @ np.linalg.inv(reference.T)
        for k in range(0, planes, chunk):
            part = slice(k, k + chunk)
            scores = correlate(image, other, K, K_other, relative, inverse[part], config.window)
            _insert(best[:, part], scores)
    return best.clamp(min=0).mean(0)


@torch.no_grad()
def refine(
    model: Model,
    photos: dict[int, Tensor],
    view: int,
    sources: Sequence[int],
    depth: Tensor,
    config: SweepConfig,
) -> Tensor:
    """h w, larger: a depth map (0: none) made exact by a sweep about it, 0 where that finds no best depth."""
    reference = model.views[view]
    scale = min(config.fine_side / max(reference.width, reference.height), 1.0)
    image, _ = _resized(photos[view], reference.K, scale)
    span = inverse_range(model, view)
    if not sources or span is None or not (depth > 0).any():
        return torch.zeros_like(image[0, 0])
    start, known = _smooth_inverse(depth, image.shape[-2:], config.window)
    step = config.fine_reach * (span[1] - span[0]) / (config.planes - 1)
    offsets = torch.linspace(-step, step, config.fine_planes, device=image.device)
    inverse = (start + offsets[:, None, None]).clamp(min=1e-9)
    score = compare(model, photos, view, sources, scale, inverse, config)
    # Windows of neighbours see nearly the same: their mean costs little sharpness and much noise.
    index = _box(score, 3).argmax(0)
    last = len(offsets) - 1
    middle = index.clamp(1, last - 1)
    low, mid, high = (score.gather(0, (middle + i)[None])[0] for i in (-1, 0, 1))
    bend = (2 * mid - low - high).clamp(min=1e-6)
    part = (0.5 * (high - low) / bend).clamp(-1, 1)
    found = start + offsets[0] + (middle + part) * (offsets[1] - offsets[0])
    believed = known & (found > 0) & (mid > config.min_score) & (index > 0) & (index < last)
    return torch.where(believed, 1 / found.clamp(min=1e-9), torch.zeros_like(found))


def _smooth_inverse(depth: Tensor, shape: Sequence[int], window: int) -> tuple[Tensor, Tensor]:
    """Inverse depth h w in the size `shape`, and where it is known: the mean of what is near in depth, so
    that neither noise nor the step of an edge is in it. Beside a surface, where windows reach, as the
    surface."""
    nearest = F.interpolate(depth[None, None], tuple(shape), mode="nearest-exact")[0, 0]
    known = nearest > 0
    inverse = torch.where(known, 1 / nearest.clamp(min=1e-9), torch.zeros_like(nearest))
    total, weight = torch.zeros_like(inverse), torch.zeros_like(inverse)
    r, (h, w) = 3, inverse.shape
    padded = F.pad(inverse, (r, r, r, r))
    for dy in range(2 * r + 1):
        for dx in range(2 * r + 1):
            other = padded[dy : dy + h, dx : dx + w]
            near = (other > 0) & ((other - inverse).abs() < 0.01 * inverse)
            total += torch.where(near, other, torch.zeros_like(other))
            weight += near
    smooth = total / weight.clamp(min=1)
    around, share = _box(torch.stack([smooth, known.float()]), 2 * (window // 2) + 1)
    return torch.where(known, smooth, around / share.clamp(min=1e-6)), known


def _fine_maps(
    model: Model,
    photos: dict[int, Tensor],
    neighbours: Sequence[Sequence[int]],
    raw: dict[int, Tensor],
    folder: Path,
    config: SweepConfig,
) -> dict[int, Tensor]:
    """Of all raw maps; on disk, too."""
    fine: dict[int, Tensor] = {}
    for i in tqdm(raw, desc="second sweep", disable=len(raw) < 2):
        path = depth_path(folder, model.views[i].name)
        if not is_file(path):
            swept = refine(model, photos, i, neighbours[i][: config.sources], raw[i], config)
            write_depth(path, swept.cpu().numpy())
        fine[i] = torch.from_numpy(read_depth(path)).to(raw[i].device)
    return fine


def correlate(
    image: Tensor,
    other: Tensor,
    K: np.ndarray,
    K_other: np.ndarray,
    T: np.ndarray,
    inverse: Tensor,
    window: int,
) -> Tensor:
    """d h w: correlation of `image` with `other` warped by each of d inverse depths (d h w, or d 1 1 for
    planes); -1 outside of it."""
    h, w = image.shape[-2:]
    hs, ws = other.shape[-2:]
    y, x = _pixels(h, w, image.device)
    # At depth 1/q a pixel p lands at K' (R K^-1 p + q t), up to scale: linear in q.
    rows = (K_other @ T[:3, :3] @ np.linalg.inv(K)).tolist()
    start = [a * x + b * y + c for a, b, c in rows]
    shift = (K_other @ T[:3, 3]).tolist()
    u, v, z = (a + inverse * b for a, b in zip(start, shift, strict=True))
    u, v = u / z, v / z
    inside = (z > 1e-6) & (u >= 0) & (v >= 0) & (u <= ws - 1) & (v <= hs - 1)
    grid = torch.stack([(u + 0.5) * (2 / ws) - 1, (v + 0.5) * (2 / hs) - 1], dim=-1).clamp_(-2, 2)
    planes = len(inverse)
    warped = F.grid_sample(
        other.expand(1, 1, hs, ws), grid.view(1, planes * h, w, 2), padding_mode="border", align_corners=False
    ).view(planes, h, w)
    score = zncc(image[0], warped, window)
    return torch.where(inside, score, score.new_tensor(-1.0))


def _pixels(h: int, w: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """y and x of every pixel, h w each."""
    rows, columns = (torch.arange(float(n), device=device) for n in (h, w))
    y, x = torch.meshgrid(rows, columns, indexing="ij")
    return y, x


def zncc(a: Tensor, b: Tensor, window: int) -> Tensor:
    """d h w: zero-normalised cross-correlation of a (1 h w) and b (d h w) in square windows."""
    noise = (1.5 / 255) ** 2  # so that windows without texture correlate with nothing
    mean_a, mean_b = _box(a, window), _box(b, window)
    var_a = (_box(a * a, window) - mean_a**2).clamp(min=0) + noise
    var_b = (_box(b * b, window) - mean_b**2).clamp(min=0) + noise
    return (_box(a * b, window) - mean_a * mean_b) * torch.rsqrt(var_a) * torch.rsqrt(var_b)


def _box(x: Tensor, window: int) -> Tensor:
    """Mean over square windows of d h w; at the border over what is there."""
    r = window // 2
    h, w = x.shape[-2:]
    padded = F.pad(x, (r, r, r, r))
    # Sums of shifted views are several times as fast as avg_pool2d on a CPU.
    rows = padded[..., :w].clone()
    for k in range(1, window):
        rows += padded[..., k : k + w]
    total = rows[..., :h, :].clone()
    for k in range(1, window):
        total += rows[..., k : k + h, :]
    at = [torch.arange(n, device=x.device) for n in (h, w)]
    high, wide = (i.clamp(max=r) + i.flip(0).clamp(max=r) + 1 for i in at)
    return total / (high[:, None] * wide)


def _insert(best: Tensor, score: Tensor) -> None:
    """Keeps the largest scores seen so far, k d h w in falling order, without storing all of them."""
    for k in range(len(best)):
        higher = torch.maximum(best[k], score)
        score = torch.minimum(best[k], score)
        best[k] = higher


def _pick(score: Tensor, image: Tensor, inverse: Tensor, config: SweepConfig) -> tuple[Tensor, Tensor]:
    """From scores d h w to depth and its score, h w."""
    cost = 1 - score
    total = semi_global(cost, image[0, 0], config.step_penalty, config.jump_penalty)
    index = total.argmin(0)
    last = len(inverse) - 1
    middle = index.clamp(1, last - 1)
    low, mid, high = (total.gather(0, (middle + i)[None])[0] for i in (-1, 0, 1))
    bend = (low - 2 * mid + high).clamp(min=1e-6)
    offset = (0.5 * (low - high) / bend).clamp(-0.5, 0.5)
    step = inverse[1] - inverse[0]
    depth = 1 / (inverse[0] + (middle + offset) * step)
    found = score.gather(0, index[None])[0]
    # The first and last planes collect whatever has its true depth outside the range.
    believed = (found > config.min_score) & (index > 0) & (index < last)
    return torch.where(believed, depth, torch.zeros_like(depth)), found


def semi_global(cost: Tensor, image: Tensor, step: float, jump: float) -> Tensor:
    """Semi-global matching: cost d h w summed over paths from four sides; jumps are cheap at image edges."""
    cost = cost.permute(1, 2, 0)  # h w d: one path step works on contiguous planes
    dy = 1 / (1 + 20 * (image[1:] - image[:-1]).abs())
    dx = 1 / (1 + 20 * (image[:, 1:] - image[:, :-1]).abs())
    down = _paths(cost, jump * dy, step)
    right = _paths(cost.transpose(0, 1), jump * dx.T, step).transpose(0, 1)
    return (down + right).permute(2, 0, 1)


def _paths(cost: Tensor, jump: Tensor, step: float) -> Tensor:
    """Path costs along the first axis, both ways: cost n m d, jump penalties n-1 m."""
    n = len(cost)
    # Both ways at once: one loop on the device instead of two.
    c = torch.stack([cost, cost.flip(0)], dim=1)  # n 2 m d
    jump = torch.stack([jump, jump.flip(0)], dim=1)[..., None].clamp(min=step)
    out = torch.empty_like(c)
    last = out[0] = c[0]
    for i in range(1, n):
        floor = last.amin(-1, keepdim=True)
        near = torch.minimum(last, floor + jump[i - 1])
        near[..., 1:] = torch.minimum(near[..., 1:], last[..., :-1] + step)
        near[..., :-1] = torch.minimum(near[..., :-1], last[..., 1:] + step)
        last = c[i] + near - floor
        out[i] = last
    return out[:, 0] + out[:, 1].flip(0)


# ---- agreement between views


@torch.no_grad()
def agreeing_depth(
    model: Model, raw: dict[int, Tensor], view: int, neighbours: Sequence[int], config: SweepConfig
) -> np.ndarray:
    """h w float32: the depth of a view where enough neighbours agree (their average), else 0."""
    depth = raw[view]
    if not len(neighbours):
        return np.zeros(depth.shape, np.float32)
    total, votes = depth.clone(), torch.ones_like(depth)
    for j in neighbours:
        seen, agrees = _seen_from(model, raw, view, j, config)
        total += torch.where(agrees, seen, torch.zeros_like(seen))
        votes += agrees
    fused = total / votes
    kept = _grow(fused, votes > config.agreeing, votes > 1, config)
    fused = torch.where(kept, fused, torch.zeros_like(fused))
    return _without_islands(fused.cpu().numpy(), config)


def finer_depth(
    model: Model,
    fine: dict[int, Tensor],
    view: int,
    neighbours: Sequence[int],
    depth: np.ndarray,
    config: SweepConfig,
) -> np.ndarray:
    """h w float32, in the size of the second sweep: what it found where neighbours agree, else `depth`."""
    # As far as before, in smaller pixels.
    finer = replace(config, reach=config.reach * config.fine_side / config.long_side)
    agreed = agreeing_depth(model, fine, view, neighbours, finer)
    start, known = _smooth_inverse(torch.from_numpy(depth), agreed.shape, config.window)
    first = torch.where(known, 1 / start.clamp(min=1e-9), torch.zeros_like(start)).numpy()
    return np.where(agreed > 0, agreed, first)


def _grow(depth: Tensor, sure: Tensor, likely: Tensor, config: SweepConfig) -> Tensor:
    """h w, bool: sure pixels, and likely ones that continue the surface of those next to them."""
    kept = sure & (depth > 0)
    for _ in range(config.growth):
        known = kept.float()[None]
        mean = _box(depth[None] * known, 3) / _box(known, 3).clamp(min=1e-6)
        kept = kept | (likely & (depth > 0) & ((mean[0] - depth).abs() < config.tolerance * depth))
    return kept


def _scaled_intrinsics(model: Model, view: int, depth: Tensor) -> np.ndarray:
    h, w = depth.shape
    v = model.views[view]
    return scale_intrinsics(v.K, w / v.width, h / v.height)


def _seen_from(
    model: Model, raw: dict[int, Tensor], a: int, b: int, config: SweepConfig
) -> tuple[Tensor, Tensor]:
    """The depth in `a`, h w, of what `b` sees where `a`'s points land in `b`, and whether both agree."""
    depth, other = raw[a], raw[b]
    relative = model.views[b].T @ np.linalg.inv(model.views[a].T)
    Ka, Kb = _scaled_intrinsics(model, a, depth), _scaled_intrinsics(model, b, other)
    h, w = depth.shape
    y, x = _pixels(h, w, depth.device)
    u, v, z = _project(x, y, depth, Ka, Kb, relative)
    hb, wb = other.shape
    inside = (depth > 0) & (z > 0) & (u > -0.5) & (v > -0.5) & (u < wb - 0.5) & (v < hb - 0.5)
    column = u.nan_to_num(0, 0, 0).round().clamp(0, wb - 1)
    row = v.nan_to_num(0, 0, 0).round().clamp(0, hb - 1)
    there = other[row.long(), column.long()]
    x2, y2, z2 = _project(column, row, there, Kb, Ka, np.linalg.inv(relative))
    # Half a pixel is lost by rounding in `b`, which may be the coarser of the two.
    reach = config.reach + 0.5 * (Ka[0, 0] / depth.clamp(min=1e-6)) / (Kb[0, 0] / z.clamp(min=1e-6))
    near = (x2 - x).square() + (y2 - y).square() < reach.clamp(max=4).square()
    agrees = inside & (there > 0) & near & ((z2 - depth).abs() < config.tolerance * depth)
    return z2, agrees


def _project(
    x: Tensor, y: Tensor, depth: Tensor, K: np.ndarray, K_other: np.ndarray, T: np.ndarray
) -> tuple[Tensor, Tensor, Tensor]:
    """Pixels with depth of one camera as pixels with depth of another."""
    rows, shift = (K_other @ T[:3, :3] @ np.linalg.inv(K)).tolist(), (K_other @ T[:3, 3]).tolist()
    p = [depth * (a * x + b * y + c) + s for (a, b, c), s in zip(rows, shift, strict=True)]
    return p[0] / p[2], p[1] / p[2], p[2]


def _without_islands(depth: np.ndarray, config: SweepConfig) -> np.ndarray:
    """Without connected patches too small to be trusted; a step of 2 % in depth parts two patches."""
    known = depth > 0
    smooth = known.copy()
    smooth[:, :-1] &= np.abs(depth[:, 1:] - depth[:, :-1]) < 0.02 * depth[:, :-1]
    smooth[:-1] &= np.abs(depth[1:] - depth[:-1]) < 0.02 * depth[:-1]
    _, label, stats, _ = cv2.connectedComponentsWithStats(smooth.astype(np.uint8), connectivity=4)
    large = stats[:, cv2.CC_STAT_AREA] >= config.island * depth.size
    large[0] = False  # everything that is not smooth
    trusted = large[label].astype(np.uint8)
    # The rim of a patch is not smooth itself; it belongs to the patch that it touches.
    trusted = cv2.dilate(trusted, np.ones((3, 3), np.uint8)) > 0
    return np.where(known & trusted, depth, np.float32(0))


def _raw_maps(
    model: Model,
    photos: dict[int, Tensor],
    neighbours: Sequence[Sequence[int]],
    wanted: Sequence[int],
    raw_dir: Path,
    config: SweepConfig,
) -> dict[int, Tensor]:
    """On disk too, so that an interrupted run goes on where it stopped."""
    raw: dict[int, Tensor] = {}
    for i in tqdm(wanted, desc="plane sweep", disable=len(wanted) < 2):
        path, device = depth_path(raw_dir, model.views[i].name), photos[i].device
        if not is_file(path):
            swept, _ = sweep(model, photos, i, neighbours[i][: config.sources], config)
            write_depth(path, swept.cpu().numpy())
        # As the file has it, which is rounded: so that a run that goes on ends as one that never stopped.
        raw[i] = torch.from_numpy(read_depth(path)).to(device)
    return raw
