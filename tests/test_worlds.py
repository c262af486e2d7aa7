"""Procedural worlds: ray casting against a slow reference, ground truth, families."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from prism_match.training.data.photometric import Draw
from prism_match.training.data.photos import PhotoStore
from prism_match.training.data.worlds import FAMILIES, Worlds
from prism_match.training.data.worlds.families import RECTS, ROUNDS, Rig
from prism_match.training.data.worlds.render import FARTHEST, NEAREST, Light, View, cast, make_view
from prism_match.training.data.worlds.scene import (
    Builder,
    Cameras,
    Scene,
    constant,
    extents,
    look_at,
    paint,
    stack3,
)
from prism_match.training.data.worlds.source import (
    choose_cameras,
    random_light,
    swapped,
    twice,
    warp_cells,
    warp_points,
)
from prism_match.training.data.worlds.variety import Variety
from prism_match.training.pairs import PairBatch, cell_centres
from prism_match.training.supervision import coarse_ground_truth

SIZE = 64
PLAIN_DAYS = Variety(0, 0, 6.0, 0, 0, 0, 0, 0, 0)  # none of the ways that worlds are made hard in
Vector = np.ndarray


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def store() -> PhotoStore:
    coarse = torch.rand(12, 1, 32, 32, generator=generator(1))
    fine = F.interpolate(coarse, size=64, mode="bicubic").clamp(0, 1)
    return PhotoStore((fine[:, 0] * 255).to(torch.uint8))


def finish(builder: Builder) -> Scene:
    """The builder's worlds, painted in any way."""
    rects, rounds, styles = builder.build(RECTS, ROUNDS)
    table = constant(styles, builder.draw.device).expand(builder.b, -1, -1)
    return Scene(rects, rounds, paint(builder.draw, extents(rects, rounds), table, photos=12))


@lru_cache
def two_views(family: str, b: int = 6, seed: int = 3, size: int = SIZE) -> View:
    """2b views of b worlds, made once for all tests."""
    builder = Builder(Draw(generator(seed)), b)
    rig = FAMILIES[family](builder)
    scene = finish(builder)
    return make_view(twice(scene), choose_cameras(builder.draw, scene, rig, size, PLAIN_DAYS), size)


def both(*views: View) -> View:
    return View.cat(views, 0)


def halves(views: View) -> list[View]:
    """2b views -> the first and the second views of b worlds."""
    n = len(views.camera.focal) // 2
    return [views.map(lambda t: t[:n]), views.map(lambda t: t[n:])]


# -- a slow reference: one ray at a time, plain vectors, no projective trick ------------------------------


def reference_rect(
    eye: Vector, ray: Vector, corner: Vector, across: Vector, up: Vector, taper: float = 0.0
) -> tuple[float, float, float] | None:
    """Depth, u, v where the ray meets a rectangle, by its plane's equation."""
    normal = np.cross(across, up)
    slope = normal @ ray
    if np.linalg.norm(normal) < 1e-9 or abs(slope) < 1e-12:
        return None
    t = normal @ (corner - eye) / slope
    offset = eye + t * ray - corner
    u, v = offset @ across / (across @ across), offset @ up / (up @ up)
    inside = t > 0 and taper / 2 * v <= u <= 1 - taper / 2 * v and 0 <= v <= 1
    return (t, u, v) if inside else None


def reference_recess(
    eye: Vector, ray: Vector, corner: Vector, across: Vector, up: Vector, look: dict[str, Vector]
) -> float | None:
    """Depth inside the recess which the ray enters: the nearest of its floor and four side walls."""
    bays, (left, right, bottom, top), deep = look["bays"], look["recess"], look["depth"]
    normal = np.cross(across, up)
    normal = normal / np.linalg.norm(normal)
    if deep <= 0 or normal @ (eye - corner) <= 0:
        return None
    hit = reference_rect(eye, ray, corner, across, up)
    assert hit is not None
    bay_u, bay_v = np.floor(hit[1] * bays[0]), np.floor(hit[2] * bays[1])
    fu, fv = hit[1] * bays[0] - bay_u, hit[2] * bays[1] - bay_v
    if not (left < fu < right and bottom < fv < top):
        return None
    a, b = across / bays[0], up / bays[1]
    low = corner + (bay_u + left) * a + (bay_v + bottom) * b
    wide, high, inwards = (right - left) * a, (top - bottom) * b, -deep * normal
    walls = [(low + inwards, wide, high), (low, inwards, high), (low + wide, inwards, high),
             (low, wide, inwards), (low + high, wide, inwards)]  # fmt: skip
    hits = [reference_rect(eye, ray, *wall) for wall in walls]
    return min(h[0] for h in hits if h is not None)


def reference_round(
    eye: Vector, ray: Vector, centre: Vector, axes: Vector, bulge: float, low: float, high: float
) -> float | None:
    """Depth of the nearest point of a round body, by the roots of its polynomial."""
    lengths = np.linalg.norm(axes, axis=1)
    if lengths.min() < 1e-9:
        return None
    into = axes / lengths[:, None] ** 2
    p, d = into @ (eye - centre), into @ ray
    weight = np.array([1, 1, bulge])
    roots = np.roots([(weight * d) @ d, 2 * (weight * p) @ d, (weight * p) @ p - 1])
    depths = sorted(r.real for r in roots if abs(r.imag) < 1e-9 and r.real > NEAREST)
    return next((t for t in depths if low <= p[2] + t * d[2] <= high), None)


def reference_depth(view: View, world: int, x: float, y: float, size: int) -> float:
    """Depth along one ray, over all primitives one after the other."""
    camera, rects, rounds, look = view.camera, view.rects, view.rounds, view.look
    n = lambda t: t[world].double().numpy()  # noqa: E731
    right, down, forward = n(camera.axes)
    focal, eye = camera.focal[world].item(), n(camera.eye)
    ray = right * (x - (size - 1) / 2) / focal + down * (y - (size - 1) / 2) / focal + forward
    nearest, entered = FARTHEST, None
    for i, (corner, across, up, taper) in enumerate(
        zip(n(rects.corner), n(rects.across), n(rects.up), n(rects.taper), strict=True)
    ):
        hit = reference_rect(eye, ray, corner, across, up, taper)
        if hit is not None and NEAREST < hit[0] < nearest:
            nearest, entered = hit[0], (i, corner, across, up)
    for body in zip(*(n(t) for t in vars(rounds).values()), strict=True):
        depth = reference_round(eye, ray, *body)
        if depth is not None and depth < nearest:
            nearest, entered = depth, None
    if entered is not None:
        i, corner, across, up = entered
        tables = {k: n(getattr(look, k))[i] for k in ("bays", "recess", "depth")}
        deeper = reference_recess(eye, ray, corner, across, up, tables)
        nearest = nearest if deeper is None else deeper
    return nearest


@pytest.mark.parametrize("family", FAMILIES)
def test_depth_is_that_of_the_slow_reference(family: str) -> None:
    view = two_views(family)
    pixels = torch.rand(12, 5, 2, generator=generator(2)) * (SIZE - 1)
    got = cast(view, *pixels.unbind(-1)).depth
    want = torch.tensor(
        [[reference_depth(view, i, x, y, SIZE) for x, y in pixels[i].double().tolist()] for i in range(12)]
    )
    close = (got - want).abs() < 2e-3 * want
    # A ray may pass an edge on another side in 32 bits than in 64.
    assert close.float().mean() > 0.97, (family, got[~close], want[~close])
    assert (want < FARTHEST).float().mean() > 0.2


@pytest.mark.parametrize("family", ["square", "rotunda", "clutter"])
def test_visibility_is_that_of_the_slow_reference(family: str) -> None:
    views = halves(two_views(family, b=1, seed=5))
    pixels = torch.rand(1, 60, 2, generator=generator(4)) * (SIZE - 1)
    warp, visible = warp_points(views[0], views[1], SIZE, *pixels.unbind(-1))
    cameras = [v.camera for v in views]
    agree = []
    for (x, y), (wx, wy), seen in zip(pixels[0].tolist(), warp[0].tolist(), visible[0].tolist(), strict=True):
        depth = reference_depth(views[0], 0, x, y, SIZE)
        axes, eye = cameras[0].axes[0].double().numpy(), cameras[0].eye[0].double().numpy()
        f = cameras[0].focal.item()
        ray = np.array([(x - (SIZE - 1) / 2) / f, (y - (SIZE - 1) / 2) / f, 1]) @ axes
        local = cameras[1].axes[0].double().numpy() @ (eye + depth * ray - cameras[1].eye[0].double().numpy())
        px, py = local[:2] / local[2] * cameras[1].focal.item() + (SIZE - 1) / 2
        inside = local[2] > 0 and 0 <= px <= SIZE - 1 and 0 <= py <= SIZE - 1
        expected = depth < FARTHEST and inside
        if expected:
            expected = abs(reference_depth(views[1], 0, px, py, SIZE) - local[2]) < 2e-3 * local[2]
        if seen:
            assert abs(px - wx) < 0.05 and abs(py - wy) < 0.05
        agree.append(expected == seen)
    # The reference knows no back sides, so a thin wall seen from both sides may differ.
    assert np.mean(agree) > 0.93


# -- known answers ---------------------------------------------------------------------------------------


def wall_scene(recess: bool = False) -> Scene:
    """One wall of 8 x 8 m in the plane y = 0, in 2 x 2 bays, that faces -y."""
    builder = Builder(Draw(generator()), 1)
    size = torch.full((1, 1), 8.0)
    builder.rects(stack3(-size / 2, 0.0, 0.0), stack3(size, 0.0, 0.0), stack3(0.0, 0.0, size))
    scene = finish(builder)
    scene.look.bays[:, 0] = 2
    if recess:
        scene.look.recess[:, 0], scene.look.depth[:, 0] = torch.tensor([0.25, 0.75, 0.25, 0.75]), 0.5
    return scene


def camera(x: float, y: float, z: float, tx: float, ty: float, tz: float, focal: float = 64.0) -> Cameras:
    eye, target = torch.tensor([[x, y, z]]).float(), torch.tensor([[tx, ty, tz]]).float()
    return look_at(eye, target, torch.zeros(1), torch.tensor([focal]))


def test_a_wall_seen_straight_on() -> None:
    view = make_view(wall_scene(), camera(0, -10, 4, 0, 0, 4), SIZE)
    at = torch.tensor([[31.5, 31.5 + 12.8, 31.5, 31.5 + 32]])
    hits = cast(view, at, torch.full_like(at, 31.5 - 6.4))
    assert hits.met.tolist() == [[True, True, True, False]]
    assert torch.allclose(hits.depth[0, :3], torch.full((3,), 10.0), atol=1e-4)
    assert torch.allclose(hits.u[0, :2], torch.tensor([0.5, 0.75]), atol=1e-4)
    assert torch.allclose(hits.v[0, :1], torch.tensor([0.625]), atol=1e-4)  # a metre above the middle
    assert torch.allclose(hits.normal[0, 0], torch.tensor([0.0, -1.0, 0.0]), atol=1e-5)


def test_a_recess_has_a_floor_and_walls() -> None:
    scene = wall_scene(recess=True)
    straight = make_view(scene, camera(2, -10, 6, 2, 0, 6), SIZE)
    middle = torch.full((1, 1), 31.5)
    assert cast(straight, middle, middle).depth.item() == pytest.approx(10.5, abs=1e-3)
    # The left recess spans x from -3 to -1: at 45 degrees near its right edge a ray meets the side wall.
    oblique = make_view(scene, camera(-11.2, -10, 2, -1.2, 0, 2), SIZE)
    hits = cast(oblique, middle, middle)
    assert hits.recessed.item() and hits.normal[0, 0].tolist() == pytest.approx([-1, 0, 0], abs=1e-4)
    assert hits.inset.item() == pytest.approx(0.2, abs=1e-3)


def test_a_thin_wall_is_not_matched_through() -> None:
    scene = wall_scene()
    front = make_view(scene, camera(0, -10, 4, 0, 0, 4), SIZE)
    behind = make_view(scene, camera(0, 10, 4, 0, 0, 4), SIZE)
    beside = make_view(scene, camera(3, -9, 4, 0, 0, 4), SIZE)
    assert not warp_cells(both(front, behind), SIZE)[1].any()
    assert warp_cells(both(front, beside), SIZE)[1].float().mean() > 0.3


def test_one_plane_gives_a_homography() -> None:
    scene = wall_scene()
    views = [make_view(scene, c, SIZE) for c in (camera(0, -8, 4, 0, 0, 4), camera(4, -9, 2, 1, 0, 5))]
    warp, visible = warp_cells(both(*views), SIZE)
    centres = cell_centres(SIZE, SIZE)[visible[0]].double()
    # From pixels to the wall with one view, from the wall to pixels with the other.
    wall = [v.plane[0, 0].double() for v in views]
    h = torch.linalg.inv(wall[1]) @ wall[0]
    want = torch.cat([centres, torch.ones(len(centres), 1)], 1) @ h.T
    assert len(centres) > 20
    assert torch.allclose(warp[0][visible[0]].double(), want[:, :2] / want[:, 2:], atol=0.01)


# -- ground truth ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_returns(family: str) -> None:
    views = halves(two_views(family))
    x, y = cell_centres(SIZE, SIZE).reshape(1, -1, 2).expand(6, -1, 2).unbind(-1)
    there, seen = warp_points(views[0], views[1], SIZE, x, y)
    back, seen_back = warp_points(views[1], views[0], SIZE, *there.unbind(-1))
    error = (back - torch.stack([x, y], -1)).norm(dim=-1)[seen]
    assert seen.any()
    # Where a surface is nearly edge-on, rounding moves the point of return: not more than a few of them.
    assert error.median() < 0.01 and (error < 0.25).float().mean() > 0.97
    assert seen_back[seen].float().mean() > 0.97


@pytest.mark.parametrize("family", FAMILIES)
def test_families_give_overlap_in_range(family: str) -> None:
    _, visible = warp_cells(two_views(family), SIZE)
    mean = visible.float().mean((1, 2)).view(2, 6).mean(0)
    assert ((mean > 0.08) & (mean < 0.97)).float().mean() > 0.8, mean
    assert mean.std() > 0.02


def test_images_agree_where_visible(store: PhotoStore) -> None:
    """In even light, patches correlate at the true place, and much less when moved by one pixel."""
    b, size = 4, 64
    source, rng = Worlds(store, variety=PLAIN_DAYS), generator(23)
    views = source.views(b, size, rng)
    light = random_light(Draw(rng), views, size, 12, PLAIN_DAYS)
    light.ambient, light.fog = torch.ones_like(light.ambient), torch.full_like(light.fog, 1e9)
    light.gain, light.fill, light.lit = torch.ones_like(light.gain), light.fill * 0, light.lit * 0
    image0, image1 = source._render(views, light, size).chunk(2)
    visible = warp_cells(views, size)[1][:b]
    offsets = torch.stack(torch.meshgrid(torch.arange(-4, 5.0), torch.arange(-4, 5.0), indexing="xy"), -1)
    points = (cell_centres(size, size).view(1, -1, 1, 2) + offsets.view(1, 1, -1, 2)).expand(b, -1, -1, -1)
    flat = points.reshape(b, -1, 2)
    first, second = halves(views)
    warp, _ = warp_points(first, second, size, *flat.unbind(-1))

    def patches(image: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        values = F.grid_sample(image, (at * 2 / (size - 1) - 1).unsqueeze(1), align_corners=True)
        values = values.view(b, -1, 81)
        return values - values.mean(-1, keepdim=True)

    def correlation(shift: float) -> float:
        p, q = patches(image0, flat), patches(image1, warp + shift)
        textured = visible.reshape(b, -1) & (p.std(-1) > 0.02) & (q.std(-1) > 0.02)
        return F.cosine_similarity(p, q, dim=-1)[textured].median().item()

    true, moved = correlation(0.0), max(correlation(1.0), correlation(-1.0))
    assert true > 0.5 and true > moved + 0.2, (true, moved)


# -- the source ------------------------------------------------------------------------------------------


def test_batches_are_well_formed_and_repeatable(store: PhotoStore) -> None:
    source = Worlds(store)
    batch, again = (source.sample(5, 32, generator(7)) for _ in range(2))
    assert batch.image0.shape == batch.image1.shape == (5, 1, 32, 32)
    assert batch.warp0.shape == (5, 4, 4, 2) and batch.visible1.dtype == torch.bool
    for name in ("image0", "image1", "warp0", "warp1"):
        value = getattr(batch, name)
        assert value.isfinite().all() and torch.equal(value, getattr(again, name))
    assert batch.image0.min() >= 0 and batch.image0.max() <= 1
    assert not torch.equal(batch.image0, batch.image1)


def test_a_family_of_ones_own(store: PhotoStore) -> None:
    def one_wall(w: Builder) -> Rig:
        side = w.number(20.0, 1)
        w.rects(stack3(-side / 2, 0.0, 0.0), stack3(side, 0.0, 0.0), stack3(0.0, 0.0, side))
        rig = FAMILIES["square"](Builder(w.draw, w.b))
        rig.anchor = stack3(0.0, 0.0, side[:, 0] / 2)
        return rig

    batch = Worlds(store, families={"wall": one_wall}, photometric=False).sample(2, SIZE, generator(1))
    assert batch.visible0.any()
    with pytest.raises(ValueError, match="family"):
        Worlds(store, families={})


def test_too_many_primitives_are_refused() -> None:
    builder = Builder(Draw(generator()), 1)
    side = torch.ones(1, RECTS + 1)
    builder.rects(stack3(side, side, side), stack3(side, 0.0, 0.0), stack3(0.0, 0.0, side))
    with pytest.raises(ValueError, match="at most"):
        builder.build(RECTS, ROUNDS)


# -- what is hard about them -----------------------------------------------------------------------------


def hard(
    store: PhotoStore, b: int = 6, seed: int = 3, only: str = "", **changes: float
) -> tuple[Worlds, View, Light]:
    """Both views of worlds that are hard in the given way only, and their light."""
    families = {only: FAMILIES[only]} if only else None
    source = Worlds(store, families=families, photometric=False, variety=replace(PLAIN_DAYS, **changes))
    views = source.views(b, SIZE, generator(seed))
    return source, views, random_light(Draw(generator(seed)), views, SIZE, store.count, source.variety)


def photographed(source: Worlds, views: View, seed: int = 3) -> PairBatch:
    """In the light that `hard` gives."""
    return source.photograph(views, SIZE, generator(seed))


@pytest.mark.parametrize("kind", ["near", "zoom", "night", "snow", "crowds", "alike", "still_skies"])
def test_what_is_seen_twice_is_where_depth_says(store: PhotoStore, kind: str) -> None:
    _, views, light = hard(store, **{kind: 1.0})
    warp, visible = warp_cells(views, SIZE, light)
    first, second = halves(views)
    x, y = cell_centres(SIZE, SIZE).reshape(1, -1, 2).expand(6, -1, 2).unbind(-1)
    depth, middle = cast(first, x, y).depth.double(), (SIZE - 1) / 2
    eye, axes, focal = (t.double() for t in vars(first.camera).values())
    local = torch.stack(
        [(x - middle) / focal[:, None], (y - middle) / focal[:, None], torch.ones_like(x)], -1
    )
    point = eye[:, None] + depth[..., None] * (local @ axes)
    eye, axes, focal = (t.double() for t in vars(second.camera).values())
    there = (point - eye[:, None]) @ axes.mT
    want = there[..., :2] / there[..., 2:] * focal[:, None, None] + middle
    seen, got = visible[:6].flatten(1), warp[:6].flatten(1, 2).double()
    assert seen.sum() > 50
    assert (got - want)[seen].norm(dim=-1).max() < 0.05
    # The other view's depth at that place is the point's, so nothing stands before it.
    other = cast(second, *want.float().unbind(-1)).depth
    assert ((other - there[..., 2]).abs() / there[..., 2])[seen].max() < 0.005


def test_near_views_hardly_differ_and_zooms_do(store: PhotoStore) -> None:
    def apart(**changes: float) -> torch.Tensor:
        first, second = halves(
            Worlds(store, variety=replace(PLAIN_DAYS, **changes)).views(27, SIZE, generator(1))
        )
        far = (first.camera.eye - second.camera.eye).norm(dim=-1)
        middle = torch.full((27, 1), (SIZE - 1) / 2)
        return far / cast(first, middle, middle).depth[:, 0]

    assert apart(near=1.0).median() < 0.1 < 0.3 < apart().median()

    views = Worlds(store, variety=replace(PLAIN_DAYS, zoom=1.0, max_scale=8.0)).views(27, SIZE, generator(1))
    x, y = cell_centres(SIZE, SIZE).reshape(1, -1, 2).expand(54, -1, 2).unbind(-1)
    ends = [warp_points(views, swapped(views), SIZE, x + dx, y) for dx in (-0.5, 0.5)]
    growth = (ends[1][0] - ends[0][0]).norm(dim=-1)
    growth[~(ends[0][1] & ends[1][1])] = torch.nan
    ratio = growth.nanmedian(1).values
    ratio = torch.maximum(ratio, 1 / ratio)
    assert ratio.nanmedian() > 3 and (ratio > 5).float().mean() > 0.1


def hidden_pixels(source: Worlds, views: View, light: Light, without: Light) -> torch.Tensor:
    """2b h w: pixels that change, with all within two of them, when a thing is taken away."""
    images = [source._render(views, x, SIZE) for x in (light, without)]
    same = ((images[0] - images[1]).abs() < 1e-4).float()
    return F.max_pool2d(same, 5, 1, 2)[:, 0] == 0


def test_crowds_hide_and_are_never_matched(store: PhotoStore) -> None:
    source, views, light = hard(store, b=4, only="square", crowds=1.0)
    batch = photographed(source, views)
    nobody = replace(light, crowd=replace(light.crowd, radius=light.crowd.radius * 0))
    pixels = hidden_pixels(source, views, light, nobody)
    cells = pixels[:, 4::8, 4::8]
    assert (cells & warp_cells(views, SIZE, nobody)[1]).sum() >= 5  # where there are matches without them
    truth = coarse_ground_truth(batch)
    assert not (cells & torch.cat([batch.visible0, batch.visible1])).any()
    assert torch.cat([truth.unmatchable0, truth.unmatchable1])[cells.flatten(1)].all()
    # Nor does anything of the other view land on them.
    x, y = batch.warp0.round().long().clamp(0, SIZE - 1).unbind(-1)
    world = torch.arange(len(batch)).view(-1, 1, 1) + len(batch)
    assert not (batch.visible0 & pixels[world, y, x]).any()


def test_snow_hides_what_it_lies_on(store: PhotoStore) -> None:
    source, views, light = hard(store, b=4, only="clutter", snow=1.0)
    everywhere, nowhere = torch.full((4,), 2.0), torch.full((4,), -2.0)
    bare, one_only, both_views = (
        replace(light, snow=torch.cat(x))
        for x in ((nowhere, nowhere), (everywhere, nowhere), (everywhere, everywhere))
    )
    covered = hidden_pixels(source, views, one_only, bare)[:4, 4::8, 4::8]
    before, after, snowed_in = (warp_cells(views, SIZE, x)[1][:4] for x in (bare, one_only, both_views))
    assert (covered & before).sum() > 10 and not (covered & after).any()
    assert after.sum() > 10 and not (after & ~before).any()
    # Where both have it, it is a surface as any other.
    assert torch.equal(snowed_in, before)


def test_clouds_that_stand_still_are_never_matched(store: PhotoStore) -> None:
    source, views, light = hard(store, b=4, only="towers", still_skies=1.0)
    batch = photographed(source, views)
    for value in (light.sky, light.sky_photo, light.sky_turn):
        assert torch.equal(*value.chunk(2))
    x, y = cell_centres(SIZE, SIZE).reshape(1, -1, 2).expand(8, -1, 2).unbind(-1)
    sky0, sky1 = (~cast(views, x, y).met).chunk(2)
    truth = coarse_ground_truth(batch)
    assert (sky0.any(1) & sky1.any(1)).sum() >= 2
    assert truth.unmatchable0[sky0].all() and truth.unmatchable1[sky1].all()


def test_twins_share_their_bays_and_nothing_else(store: PhotoStore) -> None:
    source, views, _ = hard(store, b=3, only="temple", twins=1.0)
    batch = photographed(source, views)
    truth = coarse_ground_truth(batch)
    assert not batch.visible0.any() and not batch.visible1.any()
    assert truth.unmatchable0.all() and truth.unmatchable1.all()
    first, second = (v.look for v in halves(views))
    walls = first.mirror[:, : RECTS + ROUNDS] < 0.5
    photo0, photo1 = (v.photo[:, : RECTS + ROUNDS] for v in (first, second))
    assert torch.equal(photo0[walls][:, 1:], photo1[walls][:, 1:])
    assert (photo0[..., 0] != photo1[..., 0]).float().mean() > 0.5
    assert first.mix[:, : RECTS + ROUNDS][walls].max() <= 0.6


def test_walls_of_one_make(store: PhotoStore) -> None:
    only = {"towers": FAMILIES["towers"]}
    looks = [
        Worlds(store, families=only, variety=replace(PLAIN_DAYS, alike=share))
        .views(4, SIZE, generator(2))
        .look
        for share in (1.0, 0.0)
    ]
    kinds = [len(torch.unique(look.photo[0, :12, 1])) for look in looks]  # the sides of three towers
    assert kinds[0] == 1 and kinds[1] > 4


def test_shares_of_families(store: PhotoStore) -> None:
    def one(height: float):  # noqa: ANN202
        def family(w: Builder) -> Rig:
            side = w.number(height, 1)
            w.rects(stack3(-side / 2, 0.0, 0.0), stack3(side, 0.0, 0.0), stack3(0.0, 0.0, side))
            return FAMILIES["square"](Builder(w.draw, w.b))

        return family

    families = {"low": one(3.0), "high": one(9.0), "none": one(5.0)}
    shares = replace(PLAIN_DAYS, families={"low": 3.0, "none": 0})
    source = Worlds(store, families=families, variety=shares)
    heights = torch.cat([source._build(Draw(generator(k)), 3)[0].rects.up[:, 0, 2] for k in range(60)])
    assert set(heights.tolist()) == {3.0, 9.0}
    assert 0.65 < (heights == 3).float().mean() < 0.85
    with pytest.raises(ValueError, match="no family of worlds is called castle"):
        Worlds(store, variety=Variety(families={"castle": 1.0}))
    with pytest.raises(ValueError, match="crowds must be from 0 to 1"):
        Variety(crowds=1.5)
