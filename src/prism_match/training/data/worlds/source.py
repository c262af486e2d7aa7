"""`Worlds`: procedural 3-D scenes textured with photos, two views of each, with exact ground truth."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from prism_match.training.data.photometric import CALM, Draw, augment
from prism_match.training.data.photos import PhotoStore, subpixels
from prism_match.training.data.texture import flat_cells, forget_flat
from prism_match.training.data.worlds.families import FAMILIES, RECTS, ROUNDS, Family, Rig, place
from prism_match.training.data.worlds.render import Light, View, cast, dot, make_view, shade, world_rays
from prism_match.training.data.worlds.scene import (
    PLAIN,
    Builder,
    Cameras,
    Look,
    Rects,
    Rounds,
    Scene,
    constant,
    extents,
    paint,
    stack3,
    unit,
)
from prism_match.training.pairs import PairBatch, cell_centres

CANDIDATES = 4  # camera pairs drawn for each world
OVERLAP = (0.1, 0.95)  # of the pair that is kept: mean over both views of the share of cells with a match
LEAST_SHARE = 0.015  # and each view must have this much
PASSERS_BY = 4  # people-like bodies that may stand in one view only
SAME_DEPTH = 0.002  # relative: nearer than this, two depths are the same surface
STILL_SKIES = 0.3  # share of worlds whose two views have the same sky
STRIP_BYTES = 200e6  # of one temporary when rendering without compilation


class Worlds:
    """A source of pairs of views of random worlds; `families` maps names to functions (see `families.py`)."""

    name = "worlds"

    def __init__(
        self,
        store: PhotoStore,
        device: torch.device | str = "cpu",
        families: dict[str, Family] | None = None,
        max_scale: float = 8.0,
        photometric: bool = True,
        compile: bool = False,
        calm: float = CALM,
    ):
        """`compile` fuses the rendering into few kernels: faster on a GPU, after a minute of compiling."""
        self.store, self.device = store.to(device), torch.device(device)
        self.families = dict(FAMILIES if families is None else families)
        if not self.families:
            raise ValueError("worlds need at least one family")
        self.max_scale, self.photometric, self.compiled = max_scale, photometric, compile
        self.calm = calm  # share of pairs that are changed little
        self._shade = torch.compile(shade, dynamic=False) if compile else shade

    @torch.no_grad()
    def sample(self, batch: int, size: int, generator: torch.Generator) -> PairBatch:
        return self.photograph(self.views(batch, size, generator), size, generator)

    def views(self, batch: int, size: int, generator: torch.Generator) -> View:
        """2b views of `batch` new worlds: the first views of all of them, then the second views."""
        draw = Draw(generator)
        scene, rig = self._build(draw, batch)
        cameras = choose_cameras(draw, scene, rig, size, self.max_scale)
        bodies = passers_by(draw, cameras)
        size_of = extents(twice(scene).rects, bodies)[:, RECTS:]
        plain = constant(PLAIN, draw.device).expand(*size_of.shape[:2], -1)
        look = paint(draw, size_of, plain, self.store.count)
        # Half of the time the same people, elsewhere: what moves must not be matched.
        same = draw.chance(0.5, batch)
        look.photo = _shared(look.photo, same)
        scene = twice(scene)
        rounds = Rounds.cat([scene.rounds, bodies])
        return make_view(Scene(scene.rects, rounds, Look.cat([scene.look, look])), cameras, size)

    def photograph(self, views: View, size: int, generator: torch.Generator) -> PairBatch:
        """The images of 2b views, each in its own light, and their ground truth."""
        draw = Draw(generator)
        light = random_light(draw, views, self.store.count)
        images = self._render(views, light, size)
        flat = flat_cells(images).chunk(2)
        calm = draw.chance(self.calm, len(images) // 2).repeat(2)
        images = augment(images, generator, calm) if self.photometric else images.clamp(0, 1)
        warp, visible = warp_cells(views, size)
        (image0, image1), (warp0, warp1), (visible0, visible1) = (t.chunk(2) for t in (images, warp, visible))
        pairs = PairBatch(image0, image1, warp0, visible0, warp1, visible1, names=(self.name,) * len(image0))
        return forget_flat(pairs, *flat)

    def _build(self, draw: Draw, batch: int) -> tuple[Scene, Rig]:
        """`batch` worlds with an equal share of each family, in random order."""
        each = -(-batch // len(self.families))
        rigs, rects, rounds, styles = [], [], [], []
        for family in self.families.values():
            builder = Builder(draw, each)
            rigs.append(family(builder))
            flat, body, style = builder.build(RECTS, ROUNDS)
            rects.append(flat)
            rounds.append(body)
            styles.append(constant(style, draw.device).expand(each, -1, -1))
        geometry = Rects.cat(rects, 0), Rounds.cat(rounds, 0)
        scene = Scene(*geometry, paint(draw, extents(*geometry), torch.cat(styles), self.store.count))
        order = draw.uniform(0, 1, each * len(rigs)).argsort()[:batch]
        return scene.map(lambda t: t[order]), Rig.cat(rigs, 0).map(lambda t: t[order])

    def _render(self, view: View, light: Light, size: int) -> Tensor:
        """b 1 size size, in strips that bound the memory where nothing is fused."""
        b, m = view.look.mix.shape
        x, y = subpixels(size, self.device)
        strip = size * size if self.compiled else max(size, int(STRIP_BYTES / (16 * b * m)))
        parts = [
            self._shade(view, light, self.store, size, sx, sy)
            for sx, sy in zip(x.split(strip, 1), y.split(strip, 1), strict=True)
        ]
        return torch.cat(parts, 1).view(b, 1, size, size)


def swapped(views: View) -> View:
    """2b views -> the same with the two views of each world exchanged."""
    return views.map(lambda t: torch.cat(t.chunk(2)[::-1]))


def twice(scene: Scene) -> Scene:
    """b worlds -> 2b: all of them, then all of them again."""
    return scene.map(lambda t: torch.cat([t, t]))


def warp_points(source: View, target: View, size: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Pixels (x, y: b n) of the source view -> b n 2 in the target view, and whether they are seen there."""
    hits = cast(source, x, y)
    point = source.camera.eye.unsqueeze(1) + hits.depth.unsqueeze(-1) * world_rays(source.camera, size, x, y)
    offset = point - target.camera.eye.unsqueeze(1)
    right, down, depth = (dot(offset, axis.unsqueeze(1)) for axis in target.camera.axes.unbind(-2))
    scale = target.camera.focal.unsqueeze(1) / depth.clamp(min=1e-3)
    tx, ty = right * scale + (size - 1) / 2, down * scale + (size - 1) / 2
    inside = (depth > 1e-3) & (tx >= 0) & (tx <= size - 1) & (ty >= 0) & (ty <= size - 1)
    # What lies behind the camera can land anywhere: kept finite and outside.
    tx, ty = tx.clamp(-10 * size, 10 * size), ty.clamp(-10 * size, 10 * size)
    there = cast(target, tx, ty)
    same = (there.depth - depth).abs() < SAME_DEPTH * depth
    # A thin wall seen from its two sides shows two different things.
    visible = inside & hits.met & there.met & same & (hits.front == there.front)
    return torch.stack([tx, ty], -1), visible


def warp_cells(views: View, size: int) -> tuple[Tensor, Tensor]:
    """2b views -> warp 2b h/8 w/8 2 and visibility 2b h/8 w/8 of cell centres in the world's other view."""
    b = len(views.camera.focal)
    centres = cell_centres(size, size, views.camera.eye.device)
    n = centres.shape[0]
    x, y = centres.reshape(1, -1, 2).expand(b, -1, 2).unbind(-1)
    warp, visible = warp_points(views, swapped(views), size, x, y)
    return warp.view(b, n, n, 2), visible.view(b, n, n)


def choose_cameras(draw: Draw, scene: Scene, rig: Rig, size: int, max_scale: float) -> Cameras:
    """2b: the first of several pairs of cameras whose overlap is in range, measured on 16x16 rays."""
    b, k = rig.distance.shape[0], CANDIDATES
    drawn = place(draw, rig, k, size, max_scale).map(lambda t: t.movedim(2, 0))  # 2 b k
    many = twice(scene.map(lambda t: t.unsqueeze(1).expand(b, k, *t.shape[1:]).flatten(0, 1)))
    views = make_view(many, drawn.map(lambda t: t.flatten(0, 2)), size)
    grid = cell_centres(128, 128, draw.device).reshape(1, -1, 2).expand(2 * b * k, -1, 2) * (size / 128)
    _, visible = warp_points(views, swapped(views), size, *grid.unbind(-1))
    share = visible.float().mean(1).view(2, b, k)
    mean, least = share.mean(0), share.amin(0)
    good = (mean > OVERLAP[0]) & (mean < OVERLAP[1]) & (least > LEAST_SHARE)
    # First good candidate; where none is good, the one whose overlap comes nearest to a half.
    order = torch.arange(k, 0, -1, device=draw.device)
    best = torch.where(good, order, -(mean - 0.5).abs()).argmax(1)
    world = torch.arange(b, device=draw.device)
    return drawn.map(lambda t: t[:, world, best].flatten(0, 1))


def passers_by(draw: Draw, camera: Cameras) -> Rounds:
    """b 2m: bodies and heads of m people near the camera, each there or not; b cameras."""
    b, m = camera.focal.shape[0], PASSERS_BY
    distance, aside = draw.log_uniform(2.5, 14, b, m, 1), draw.uniform(-0.6, 0.6, b, m, 1)
    forward = camera.axes[..., 2, :]
    level = unit(stack3(forward[..., 0], forward[..., 1], 0.0)).unsqueeze(1)
    right = stack3(level[..., 1], -level[..., 0], 0.0)
    spot = camera.eye.unsqueeze(1) + (level + right * aside) * distance
    present = (draw.chance(0.45, b, 1) & draw.chance(0.7, b, m)).float()
    height, radius = draw.uniform(1.5, 1.95, b, m) * present, draw.uniform(0.16, 0.32, b, m) * present
    # They stand on what the photographer stands on.
    foot = spot[..., 2] - draw.uniform(1.5, 1.8, b, 1)
    one = torch.ones_like(height)

    def ellipsoid(middle: float, girth: float, half_height: float) -> Rounds:
        axes = torch.diag_embed(stack3(girth * radius, girth * radius, half_height * height))
        centre = stack3(spot[..., 0], spot[..., 1], foot + middle * height)
        return Rounds(centre, axes, one, -one, one)

    return Rounds.cat([ellipsoid(0.42, 1.0, 0.45), ellipsoid(0.92, 0.45, 0.09)])


def random_light(draw: Draw, view: View, photos: int) -> Light:
    """Sun, fog, lit windows and sky of one view of each world."""
    b, m = view.look.mix.shape
    azimuth, height = draw.uniform(0, 2 * math.pi, b, 1), draw.uniform(0.15, 1.4, b, 1)
    sun = stack3(azimuth.cos() * height.cos(), azimuth.sin() * height.cos(), height.sin())
    # Clear skies have sharp shadows, thin clouds soft ones.
    sun = unit(sun + draw.normal(1.0, b, 4, 3) * draw.log_uniform(0.003, 0.15, b, 1, 1))
    fog = torch.where(draw.chance(0.2, b), draw.log_uniform(15, 150, b), 3000.0)
    brightness = torch.where(draw.chance(0.15, b), draw.uniform(0.0, 0.3, b), draw.uniform(0.5, 1.05, b))
    clouds = draw.uniform(0, 0.7, b) * draw.chance(0.6, b)
    sky = torch.stack([brightness, draw.uniform(-0.5, 0.1, b), clouds, draw.uniform(0, 5, b)], -1)
    photo, turn = draw.integer(photos, b), draw.uniform(0, 2, b)
    # Clouds that hardly moved between two photos are still no part of the scene.
    still = draw.chance(STILL_SKIES, b // 2)
    sky, photo, turn = (_shared(t, still) for t in (sky, photo, turn))
    return Light(
        sun=sun,
        ambient=draw.uniform(0.35, 0.9, b),
        fill=unit(draw.normal(1.0, b, 3)),
        fog=fog,
        air=draw.uniform(0.4, 0.95, b),
        lit=draw.uniform(0.1, 0.7, b) * draw.chance(0.2, b),
        gain=draw.normal(0.12, b, m).exp(),
        sky_photo=photo,
        sky=sky,
        sky_turn=turn,
    )


def _shared(values: Tensor, same: Tensor) -> Tensor:
    """values: 2b ...; the second half like the first where `same` (b) says so."""
    first, second = values.chunk(2)
    chosen = same.view(-1, *[1] * (values.dim() - 1))
    return torch.cat([first, torch.where(chosen, first, second)])
