"""The batched ground truth against plain loops."""

import math

import numpy as np
import pytest
import torch
from warps_for_tests import warp_by_field, warp_by_homography

from prism_match.training.pairs import PairBatch, cell_centres, warp_between_cells
from prism_match.training.supervision import (
    CoarseTruth,
    Warp,
    coarse_ground_truth,
    depth_at,
    warp_by_depth,
)

SIZE = 64


# ---- slow references


def slow_neighbours(values, x, y):
    """(value, weight) of the four pixels around (x, y) that exist."""
    h, w = values.shape[:2]
    x0, y0 = math.floor(x), math.floor(y)
    out = []
    for j in (0, 1):
        for i in (0, 1):
            if 0 <= x0 + i < w and 0 <= y0 + j < h:
                weight = (x - x0 if i else 1 - (x - x0)) * (y - y0 if j else 1 - (y - y0))
                out.append((values[y0 + j, x0 + i], weight))
    return out


def slow_depth(depth, x, y):
    found = [(float(d), w + 1e-6) for d, w in slow_neighbours(depth, x, y) if d > 0]
    if not found:
        return 0.0
    nearest = max(found, key=lambda f: f[1])[0]
    found = [(d, w) for d, w in found if abs(d - nearest) <= 0.05 * nearest]
    return sum(d * w for d, w in found) / sum(w for _, w in found)


def slow_warp_by_depth(point, depth0, depth1, K0, K1, T, tolerance):
    x, y = point
    d = slow_depth(depth0, x, y)
    if d == 0:
        return None, False, False
    p = T[:3, :3] @ (np.linalg.inv(K0) @ np.array([x, y, 1.0]) * d) + T[:3, 3]
    if p[2] <= 1e-6:
        return None, False, True
    u, v, _ = K1 @ p / p[2]
    h, w = depth1.shape
    if not (-0.5 <= u < w - 0.5 and -0.5 <= v < h - 0.5):
        return (u, v), False, True
    around = [float(a) for a, _ in slow_neighbours(depth1, u, v) if a > 0]
    seen = any(abs(a - p[2]) <= tolerance * p[2] for a in around)
    return (u, v), seen, bool(around)


def slow_truth(warp0, visible0, warp1, visible1, unknown0, unknown1, real0, real1, columns):
    """All arguments flat over cells, of square images with `columns` cells a side."""

    def nearest(point):
        return min(range(columns**2), key=lambda c: math.dist(point, centre(c)))

    def centre(c):
        return (8 * (c % columns) + 3.5, 8 * (c // columns) + 3.5)

    n = columns**2
    target0 = [nearest(warp0[i]) if visible0[i] and real0[i] else None for i in range(n)]
    target1 = [nearest(warp1[j]) if visible1[j] and real1[j] else None for j in range(n)]
    target0 = [j if j is not None and real1[j] else None for j in target0]
    target1 = [i if i is not None and real0[i] else None for i in target1]
    match = [j if j is not None and target1[j] == i else -1 for i, j in enumerate(target0)]
    matched1 = {j for j in match if j >= 0}
    no0 = [real0[i] and match[i] < 0 and not unknown0[i]
           and not (target0[i] is not None and unknown1[target0[i]]) for i in range(n)]  # fmt: skip
    no1 = [real1[j] and j not in matched1 and not unknown1[j]
           and not (target1[j] is not None and unknown0[target1[j]]) for j in range(n)]  # fmt: skip
    offset = [np.subtract(warp0[i], centre(match[i])) if match[i] >= 0 else np.zeros(2) for i in range(n)]
    return match, [j in matched1 for j in range(n)], no0, no1, np.array(offset)


# ---- random inputs


def rotation(generator, angle):
    axis = generator.normal(size=3)
    x, y, z = axis / np.linalg.norm(axis) * angle
    skew = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return torch.matrix_exp(torch.from_numpy(skew)).numpy()


def random_scene(seed, batch=3):
    """Rough surfaces with steps and holes, seen by two cameras."""
    g = np.random.default_rng(seed)
    depth = np.kron(g.uniform(2, 4, (2, batch, 4, 4)), np.ones((SIZE // 4, SIZE // 4)))
    depth = depth + g.normal(0, 0.02, depth.shape)
    depth[g.random(depth.shape) < 0.35] = 0
    K = np.array([[60, 0, 31.5], [0, 62, 30.0], [0, 0, 1]])
    T = np.stack([np.eye(4)] * batch)
    for k in range(batch):
        T[k, :3, :3], T[k, :3, 3] = rotation(g, 0.2), g.normal(0, 0.3, 3)
    T[0] = np.eye(4)  # one pair whose views coincide
    return tuple(torch.from_numpy(a).float() for a in (depth[0], depth[1], np.stack([K] * batch), T))


def as_batch(there: Warp, back: Warp, mask=None) -> PairBatch:
    b, c = len(there.points), SIZE // 8
    image = torch.zeros(b, 1, SIZE, SIZE)
    return PairBatch(
        image, image, there.points.view(b, c, c, 2), there.visible.view(b, c, c),
        back.points.view(b, c, c, 2), back.visible.view(b, c, c), mask, mask,
        ~there.known.view(b, c, c), ~back.known.view(b, c, c),
    )  # fmt: skip


def assert_truth_is_slow_truth(batch: PairBatch, truth: CoarseTruth):
    c = SIZE // 8
    for k in range(len(batch)):
        mask = torch.ones(SIZE, SIZE, dtype=torch.bool) if batch.mask0 is None else batch.mask0[k]
        real = [bool(mask[8 * (i // c) + 3, 8 * (i % c) + 3] and mask[8 * (i // c) + 4, 8 * (i % c) + 4])
                for i in range(c * c)]  # fmt: skip
        arguments = [getattr(batch, f"{f}{s}")[k].reshape(c * c, -1).squeeze(-1).tolist()
                     for s in "01" for f in ("warp", "visible")]  # fmt: skip
        unknown = [getattr(batch, f"unknown{s}")[k].flatten().tolist() for s in "01"]
        match, matched1, no0, no1, offset = slow_truth(*arguments, *unknown, real, real, c)
        assert truth.match0[k].tolist() == match
        assert truth.matchable0[k].tolist() == [j >= 0 for j in match]
        assert truth.matchable1[k].tolist() == matched1
        assert truth.unmatchable0[k].tolist() == no0
        assert truth.unmatchable1[k].tolist() == no1
        np.testing.assert_allclose(truth.offset0[k].numpy(), offset, atol=1e-4)


def centres(batch):
    return cell_centres(SIZE, SIZE).flatten(0, 1).expand(batch, -1, -1)


# ---- tests


@pytest.mark.parametrize("seed", range(4))
def test_depth_agrees_with_the_slow_reference(seed):
    depth0, depth1, K, T = random_scene(seed)
    points = centres(3) + torch.rand(3, 64, 2, generator=torch.Generator().manual_seed(seed))
    warp = warp_by_depth(points, depth0, depth1, K, K, T, 0.05)
    for k in range(3):
        arrays = [t[k].double().numpy() for t in (depth0, depth1, K, K, T)]
        for i, point in enumerate(points[k].double().numpy()):
            landed, visible, known = slow_warp_by_depth(point, *arrays, 0.05)
            assert (warp.visible[k, i].item(), warp.known[k, i].item()) == (visible, known)
            expected = point if landed is None else landed
            np.testing.assert_allclose(warp.points[k, i].numpy(), expected, atol=2e-3)
    assert warp.visible.any() and (~warp.known).any() and (warp.known & ~warp.visible).any()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("padded", [False, True])
def test_coarse_truth_from_depth(seed, padded):
    depth0, depth1, K, T = random_scene(seed)
    there = warp_by_depth(centres(3), depth0, depth1, K, K, T, 0.2)
    back = warp_by_depth(centres(3), depth1, depth0, K, K, torch.linalg.inv(T), 0.2)
    mask = None
    if padded:
        mask = torch.ones(3, SIZE, SIZE, dtype=torch.bool)
        mask[:, 44:], mask[1, :, 30:] = False, False
    batch = as_batch(there, back, mask)
    truth = coarse_ground_truth(batch)
    assert_truth_is_slow_truth(batch, truth)
    assert truth.matchable0.any()
    for match0, matchable0, matchable1 in zip(truth.match0, truth.matchable0, truth.matchable1, strict=True):
        assert sorted(match0[matchable0].tolist()) == matchable1.nonzero().flatten().tolist()


@pytest.mark.parametrize("scale", [0.4, 1.0, 3.0])
def test_coarse_truth_from_homography(scale):
    g = torch.Generator().manual_seed(0)
    strength = torch.tensor([[0.1, 0.1, 9], [0.1, 0.1, 9], [2e-3, 2e-3, 0]])
    H = torch.eye(3) + torch.randn(3, 3, 3, generator=g) * strength
    H[:, :2] *= scale
    there = warp_by_homography(centres(3), H, (SIZE, SIZE))
    for k in range(3):
        p = np.concatenate([centres(3)[k].numpy(), np.ones((64, 1))], 1) @ H[k].double().numpy().T
        ahead = p[:, 2] > 1e-6
        q = p[:, :2] / p[:, 2:]
        inside = ahead & (q >= -0.5).all(1) & (q < SIZE - 0.5).all(1)
        assert there.visible[k].tolist() == inside.tolist()
        np.testing.assert_allclose(there.points[k, ahead].numpy(), q[ahead], rtol=1e-3, atol=1e-2)
    back = warp_by_homography(centres(3), torch.linalg.inv(H), (SIZE, SIZE))
    batch = as_batch(there, back)
    assert_truth_is_slow_truth(batch, coarse_ground_truth(batch))


def test_coarse_truth_from_field():
    g = torch.Generator().manual_seed(0)
    steps = torch.arange(SIZE).float()
    grid = torch.stack(torch.meshgrid(steps, steps, indexing="xy"), -1)
    # Smooth and invertible enough: a shift that varies slowly.
    wave = 4 * torch.stack([torch.sin(grid[..., 1] / 9), torch.cos(grid[..., 0] / 11)], -1)
    fields = torch.stack([grid + wave, grid - wave])
    valid = torch.rand(2, SIZE, SIZE, generator=g) > 0.1
    fields[~valid] = float("nan")
    there, back = (warp_by_field(centres(1), f[None], v[None], (SIZE, SIZE))
                   for f, v in zip(fields, valid, strict=True))  # fmt: skip
    for i, (x, y) in enumerate(centres(1)[0].tolist()):
        good = all(bool(v) for v, w in slow_neighbours(valid[0], x, y) if w > 0)
        assert there.known[0, i].item() == good
        if good:
            landed = sum(f * w for f, w in slow_neighbours(fields[0], x, y))
            np.testing.assert_allclose(there.points[0, i].numpy(), landed.numpy(), atol=1e-4)
    assert there.points.isfinite().all()
    batch = as_batch(there, back)
    truth = coarse_ground_truth(batch)
    assert_truth_is_slow_truth(batch, truth)
    assert truth.matchable0.sum() > 10


def test_identity_matches_every_cell_to_itself():
    warp = warp_by_homography(centres(2), torch.eye(3).expand(2, 3, 3), (SIZE, SIZE))
    truth = coarse_ground_truth(as_batch(warp, warp))
    assert (truth.match0 == torch.arange(64)).all()
    assert truth.offset0.abs().max() == 0
    assert not truth.unmatchable0.any() and not truth.unmatchable1.any()


def test_occlusion_missing_depth_and_leaving_the_image_are_told_apart():
    K = torch.tensor([[50.0, 0, 31.5], [0, 50, 31.5], [0, 0, 1]])[None]
    T = torch.eye(4)[None].clone()
    T[0, 0, 3] = 1.0  # 25 pixels to the right at depth 2
    near, far = torch.full((1, SIZE, SIZE), 2.0), torch.full((1, SIZE, SIZE), 2.0)
    near[0, :, :8] = 0
    far[0, 20:40], far[0, 40:] = 1.0, 0.0
    points = torch.tensor([[[4.0, 10.0], [20, 10], [20, 30], [20, 50], [60, 10], [60, 50]]])
    warp = warp_by_depth(points, near, far, K, K, T, 0.05)
    #            no depth, visible, occluded, no depth there, outside, outside
    assert warp.known[0].tolist() == [False, True, True, False, True, True]
    assert warp.visible[0].tolist() == [False, True, False, False, False, False]
    bounds = torch.tensor([[-0.5, -0.5, 40.0, 64.0]])
    assert not warp_by_depth(points, near, far, K, K, T, 0.05, bounds).visible.any()


def test_depth_is_not_mixed_across_an_edge():
    depth = torch.full((1, 8, 8), 1.0)
    depth[0, :, 4:] = 9.0
    at = depth_at(depth, torch.tensor([[[3.4, 3.0], [3.6, 3.0], [-0.4, 0.0], [-3.0, 0.0], [8.0, 8.0]]]))
    torch.testing.assert_close(at, torch.tensor([[1.0, 9.0, 1.0, 0.0, 0.0]]))


def test_garbage_in_the_warp_of_invisible_cells_does_no_harm():
    warp = warp_by_homography(centres(1), torch.eye(3)[None], (SIZE, SIZE))
    points = warp.points.clone()
    points[0, :10] = float("nan")
    points[0, 10:20] = 1e12
    visible = warp.visible.clone()
    visible[0, :20] = False
    truth = coarse_ground_truth(as_batch(Warp(points, visible, warp.known), warp))
    assert (truth.match0[0, :20] == -1).all() and truth.offset0.isfinite().all()
    assert (truth.match0[0, 20:] == torch.arange(20, 64)).all()


def test_autocast_costs_no_precision():
    depth0, depth1, K, T = random_scene(0)
    H = torch.eye(3).expand(3, 3, 3) + 1e-3

    def both():
        return warp_by_depth(centres(3), depth0, depth1, K, K, T), warp_by_homography(centres(3), H, (64, 64))

    expected = both()
    with torch.autocast("cpu", torch.bfloat16):
        found = both()
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a.points, b.points) and torch.equal(a.visible, b.visible)


@pytest.mark.parametrize("turned", [False, True])
def test_steps_and_creases_between_cells_are_told(turned):
    """Surfaces that meet between two columns of cells: no map of the four cells around tells the place."""
    centres = cell_centres(SIZE, SIZE)[None]
    x = centres[..., 0]
    points = torch.tensor([[28.0, 30.0], [44.5, 30.0], [59.0, 59.0]])  # the columns are at 27.5, 35.5, 43.5

    def bend_of(shift):
        moved = torch.stack([shift, torch.zeros_like(shift)], -1)
        warp, at = 1.5 * centres + moved, points
        if turned:
            warp, at = warp.transpose(1, 2).flip(-1), points.flip(1)
        place, bend = warp_between_cells(warp, torch.zeros(3, dtype=torch.long), at)
        return place.flip(1) if turned else place, bend

    place, bend = bend_of(torch.zeros_like(x))
    torch.testing.assert_close(place, 1.5 * points)
    assert bend.max() < 1e-4
    step, crease = 3.0 * (x > 30), 0.25 * (x - 30).clamp(min=0)
    for shift, least in ((step, 1.5), (crease, 0.3)):
        place, bend = bend_of(shift)
        # And what is beside them is none the less known.
        assert bend[0] >= least - 1e-4 and bend[1:].max() < 1e-4
        true = 1.5 * points[1:]
        true[:, 0] += 3.0 if shift is step else 0.25 * (points[1:, 0] - 30)
        torch.testing.assert_close(place[1:], true)
