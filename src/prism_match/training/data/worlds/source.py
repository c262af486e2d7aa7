"""`Worlds`: procedural 3-D scenes textured with photos, two views of each, with exact ground truth."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from prism_match.training.compiling import compiled
from prism_match.training.data.photometric import CALM, Draw, augment
from prism_match.training.data.photos import PhotoStore, subpixels
from prism_match.training.data.texture import flat_cells, forget_flat
from prism_match.training.data.worlds.families import FAMILIES, RECTS, ROUNDS, Family, Rig, place
from prism_match.training.data.worlds.render import (
    Crowd,
    Light,
    View,
    cast,
    dot,
    hidden,
    make_view,
    shade,
    world_rays,
)
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
from prism_match.training.data.worlds.variety import Variety
from prism_match.training.pairs import ImageSize, PairBatch, cell_centres, shape_of

CANDIDATES = 4  # camera pairs drawn for each world
OVERLAP = (0.1, 0.95)  # of the pair that is kept: mean over both views of the share of cells with a match
LEAST_SHARE = 0.01  # and each view must have this much
PASSERS_BY = 4  # people-like bodies that may stand in one view only
ROWS = 3  # of a crowd
LAMPS = 3
SAME_DEPTH = 0.002  # relative: nearer than this, two depths are the same surface
ELSEWHERE = 3000.0  # metres to where a twin stands: farther than anything that is seen
STRIP_BYTES = 200e6  # of one temporary when rendering without compilation


class Worlds:
    """A source of pairs of views of random worlds; `families` maps names to functions (see `families.py`)."""

    name = "worlds"

    def __init__(
        self,
        store: PhotoStore,
        device: torch.device | str = "cpu",
        families: dict[str, Family] | None = None,
        photometric: bool = True,
        compile: bool = False,
        calm: float = CALM,
        variety: Variety | None = None,
    ):
        """`compile` fuses the rendering into few kernels: faster on a GPU, after a minute of compiling."""
        self.store, self.device = store.to(device), torch.device(device)
        self.variety = variety or Variety()
        self.families = wanted_families(FAMILIES if families is None else families, self.variety.families)
        self.photometric, self.compiled = photometric, compile
        self.calm = calm  # share of pairs that are changed little
        self._shade = compiled(shade) if compile else shade

    @torch.no_grad()
    def sample(self, batch: int, size: ImageSize, generator: torch.Generator) -> PairBatch:
        return self.photograph(self.views(batch, size, generator), size, generator)

    def views(self, batch: int, size: ImageSize, generator: torch.Generator) -> View:
        """2b views of `batch` new worlds: the first views of all of them, then the second views."""
        draw = Draw(generator)
        scene, rig = self._build(draw, batch)
        cameras = choose_cameras(draw, scene, rig, size, self.variety)
        scene, cameras = move_twins(draw, twice(scene), cameras, self.variety.twins, self.store.count)
        bodies = passers_by(draw, cameras)
        size_of = extents(scene.rects, bodies)[:, RECTS:]
        plain = constant(PLAIN, draw.device).expand(*size_of.shape[:2], -1)
        look = paint(draw, size_of, plain, self.store.count)
        # Half of the time the same people, elsewhere: what moves must not be matched.
        same = draw.chance(0.5, batch)
        look.photo = _shared(look.photo, same)
        rounds = Rounds.cat([scene.rounds, bodies])
        return make_view(Scene(scene.rects, rounds, Look.cat([scene.look, look])), cameras, size)

    def photograph(self, views: View, size: ImageSize, generator: torch.Generator) -> PairBatch:
        """The images of 2b views, each in its own light, and their ground truth."""
        draw = Draw(generator)
        light = random_light(draw, views, size, self.store.count, self.variety)
        images = self._render(views, light, size)
        flat = flat_cells(images).chunk(2)
        calm = draw.chance(self.calm, len(images) // 2).repeat(2)
        images = augment(images, generator, calm) if self.photometric else images.clamp(0, 1)
        warp, visible = warp_cells(views, size, light)
        (image0, image1), (warp0, warp1), (visible0, visible1) = (t.chunk(2) for t in (images, warp, visible))
        pairs = PairBatch(image0, image1, warp0, visible0, warp1, visible1, names=(self.name,) * len(image0))
        return forget_flat(pairs, *flat)

    def _build(self, draw: Draw, batch: int) -> tuple[Scene, Rig]:
        """`batch` worlds with its share of each family, in random order."""
        total = sum(share for _, share in self.families.values())
        rigs, rects, rounds, styles, weights = [], [], [], [], []
        for family, share in self.families.values():
            each = math.ceil(batch * share / total)
            weights += [share / each] * each
            builder = Builder(draw, each)
            rigs.append(family(builder))
            flat, body, style = builder.build(RECTS, ROUNDS)
            rects.append(flat)
            rounds.append(body)
            styles.append(constant(style, draw.device).expand(each, -1, -1))
        geometry = Rects.cat(rects, 0), Rounds.cat(rounds, 0)
        one_make = draw.chance(self.variety.alike, len(weights))
        look = paint(draw, extents(*geometry), torch.cat(styles), self.store.count, one_make)
        # Of those that are too many, families of small shares lose the most (a draw without replacement).
        luck = draw.uniform(0, 1, len(weights)).log() / constant(tuple(weights), draw.device)
        order = luck.argsort(descending=True)[:batch]
        return Scene(*geometry, look).map(lambda t: t[order]), Rig.cat(rigs, 0).map(lambda t: t[order])

    def _render(self, view: View, light: Light, size: ImageSize) -> Tensor:
        """b 1 h w, in strips that bound the memory where nothing is fused."""
        b, m = view.look.mix.shape
        x, y = subpixels(size, self.device)
        strip = x.shape[1] if self.compiled else max(shape_of(size).width, int(STRIP_BYTES / (16 * b * m)))
        parts = [
            self._shade(view, light, self.store, size, sx, sy)
            for sx, sy in zip(x.split(strip, 1), y.split(strip, 1), strict=True)
        ]
        return torch.cat(parts, 1).view(b, 1, *shape_of(size))


def wanted_families(families: dict[str, Family], shares: dict[str, float]) -> dict[str, tuple[Family, float]]:
    """The families whose share is not 0, with it; that of those that are not named is 1."""
    unknown = sorted(shares.keys() - families.keys())
    if unknown:
        raise ValueError(f"no family of worlds is called {', '.join(unknown)}; {', '.join(families)} are")
    wanted = {k: (f, float(shares.get(k, 1.0))) for k, f in families.items() if shares.get(k, 1.0) > 0}
    if not wanted:
        raise ValueError("worlds need at least one family")
    return wanted


def swapped(views: View) -> View:
    """2b views -> the same with the two views of each world exchanged."""
    return views.map(_swapped)


def _swapped(values: Tensor) -> Tensor:
    return torch.cat(values.chunk(2)[::-1])


def twice(scene: Scene) -> Scene:
    """b worlds -> 2b: all of them, then all of them again."""
    return scene.map(lambda t: torch.cat([t, t]))


def warp_points(
    source: View,
    target: View,
    size: ImageSize,
    x: Tensor,
    y: Tensor,
    lights: tuple[Light, Light] | None = None,
) -> tuple[Tensor, Tensor]:
    """Pixels (x, y: b n) of the source view -> b n 2 in the target view, and whether they are seen there.
    With the `lights` of both, what people and snow hide in one of them is not seen."""
    hits, rays = cast(source, x, y), world_rays(source.camera, size, x, y)
    point = source.camera.eye.unsqueeze(1) + hits.depth.unsqueeze(-1) * rays
    offset = point - target.camera.eye.unsqueeze(1)
    right, down, depth = (dot(offset, axis.unsqueeze(1)) for axis in target.camera.axes.unbind(-2))
    scale = target.camera.focal.unsqueeze(1) / depth.clamp(min=1e-3)
    height, width = shape_of(size)
    tx, ty = right * scale + (width - 1) / 2, down * scale + (height - 1) / 2
    inside = (depth > 1e-3) & (tx >= 0) & (tx <= width - 1) & (ty >= 0) & (ty <= height - 1)
    # What lies behind the camera can land anywhere: kept finite and outside.
    tx, ty = tx.clamp(-10 * width, 10 * width), ty.clamp(-10 * height, 10 * height)
    there = cast(target, tx, ty)
    same = (there.depth - depth).abs() < SAME_DEPTH * depth
    # A thin wall seen from its two sides shows two different things.
    visible = inside & hits.met & there.met & same & (hits.front == there.front)
    if lights is not None:
        crowd, snow = hidden(lights[0], hits, rays, point)
        crowd_there, snow_there = hidden(lights[1], there, world_rays(target.camera, size, tx, ty), point)
        visible = visible & ~crowd & ~crowd_there & (snow == snow_there)
    return torch.stack([tx, ty], -1), visible


def warp_cells(views: View, size: ImageSize, light: Light | None = None) -> tuple[Tensor, Tensor]:
    """2b views -> warp 2b h/8 w/8 2 and visibility 2b h/8 w/8 of cell centres in the world's other view."""
    b = len(views.camera.focal)
    centres = cell_centres(*shape_of(size), views.camera.eye.device)
    x, y = centres.reshape(1, -1, 2).expand(b, -1, 2).unbind(-1)
    lights = None if light is None else (light, light.map(_swapped))
    warp, visible = warp_points(views, swapped(views), size, x, y, lights)
    return warp.view(b, *centres.shape), visible.view(b, *centres.shape[:2])


def choose_cameras(draw: Draw, scene: Scene, rig: Rig, size: ImageSize, variety: Variety) -> Cameras:
    """2b: the first of several pairs of cameras whose overlap is in range, measured on 16x16 rays."""
    b, k = rig.distance.shape[0], CANDIDATES
    drawn, near = place(draw, rig, k, size, variety)
    drawn = drawn.map(lambda t: t.movedim(2, 0))  # 2 b k
    many = twice(scene.map(lambda t: t.unsqueeze(1).expand(b, k, *t.shape[1:]).flatten(0, 1)))
    views = make_view(many, drawn.map(lambda t: t.flatten(0, 2)), size)
    height, width = shape_of(size)
    grid = cell_centres(128, 128, draw.device).reshape(1, -1, 2).expand(2 * b * k, -1, 2)
    x, y = grid.unbind(-1)
    _, visible = warp_points(views, swapped(views), size, x * (width / 128), y * (height / 128))
    share = visible.float().mean(1).view(2, b, k)
    mean, least = share.mean(0), share.amin(0)
    too_much = (mean >= OVERLAP[1]) & ~near.unsqueeze(1)
    good = (mean > OVERLAP[0]) & ~too_much & (least > LEAST_SHARE)
    # First good candidate; where none is good, the one whose overlap comes nearest to a half.
    order = torch.arange(k, 0, -1, device=draw.device)
    best = torch.where(good, order, -(mean - 0.5).abs()).argmax(1)
    world = torch.arange(b, device=draw.device)
    return drawn.map(lambda t: t[:, world, best].flatten(0, 1))


def move_twins(
    draw: Draw, scene: Scene, cameras: Cameras, twins: float, photos: int
) -> tuple[Scene, Cameras]:
    """2b: in some pairs the second world is a twin of the first: of the same make, with other pictures over
    its walls and other ground and things about it, far away from the first. So nothing of it matches, by
    geometry alone."""
    b = len(cameras.focal) // 2
    twin = draw.chance(twins, b)
    chosen = torch.cat([torch.zeros_like(twin), twin])
    away = stack3(ELSEWHERE * chosen, 0.0, 0.0)
    look = scene.look
    # Other photos, but the same for what looks alike; in the bays and recesses of walls the photos stay.
    walls = (look.mirror < 0.5).unsqueeze(-1) & constant((0.0, 1.0, 1.0), draw.device).bool()
    step = draw.integer(photos, 2 * b, 1, 3) * chosen.view(-1, 1, 1) * ~walls
    photo = (look.photo + step) % photos
    # What tells them apart has to be seen: neither wall is all bays.
    mix = torch.where(twin.repeat(2).unsqueeze(1), look.mix.clamp(max=0.6), look.mix)
    rects = replace(scene.rects, corner=scene.rects.corner + away.unsqueeze(1))
    rounds = replace(scene.rounds, centre=scene.rounds.centre + away.unsqueeze(1))
    return Scene(rects, rounds, replace(look, photo=photo, mix=mix)), replace(cameras, eye=cameras.eye + away)


def passers_by(draw: Draw, camera: Cameras) -> Rounds:
    """b 2m: bodies and heads of m people near the camera, each there or not; b cameras."""
    b, m = camera.focal.shape[0], PASSERS_BY
    distance, aside = draw.log_uniform(2.5, 14, b, m, 1), draw.uniform(-0.6, 0.6, b, m, 1)
    level, right = _level(camera)
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


def random_light(draw: Draw, view: View, size: ImageSize, photos: int, variety: Variety) -> Light:
    """Sun or lamps, fog, lit windows, sky, snow and crowds of both views of each world."""
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
    still = draw.chance(variety.still_skies, b // 2)
    sky, photo, turn = (_shared(t, still) for t in (sky, photo, turn))
    night = draw.chance(variety.night, b)
    dark = stack3(0.08, 0.1, 0.1 * torch.ones_like(brightness))
    sky = torch.where(night.unsqueeze(1), sky * F.pad(dark, (0, 1), value=1.0), sky)
    lamps, far = place_lamps(draw, view, size)
    by_day = draw.uniform(0.1, 0.7, b) * draw.chance(0.2, b)
    by_night = draw.uniform(0.1, 0.7, b) * draw.chance(0.7, b)
    snow, drifts = draw_snow(draw, b, variety.snow)
    return Light(
        sun=sun,
        strength=(~night).float(),
        ambient=torch.where(night, draw.uniform(0.02, 0.15, b), draw.uniform(0.35, 0.9, b)),
        fill=unit(draw.normal(1.0, b, 3)),
        lamps=lamps,
        power=draw.uniform(0.3, 1.6, b, LAMPS) * night.unsqueeze(1),
        reach=far * draw.uniform(0.3, 0.9, b),
        fog=fog,
        air=draw.uniform(0.4, 0.95, b) * torch.where(night, 0.15, 1.0),
        lit=torch.where(night, by_night, by_day),
        gain=draw.normal(0.12, b, m).exp(),
        sky_photo=photo,
        sky=sky,
        sky_turn=turn,
        snow=snow,
        drifts=drifts,
        crowd=draw_crowd(draw, view.camera, variety.crowds),
    )


def place_lamps(draw: Draw, view: View, size: ImageSize) -> tuple[Tensor, Tensor]:
    """b k 3: lamps on and above the ground before what a camera looks at; and how far away that is (b)."""
    b = len(view.camera.focal)
    height, width = shape_of(size)
    middle = view.camera.focal.new_zeros(b, 1)
    far = cast(view, middle + (width - 1) / 2, middle + (height - 1) / 2).depth[:, 0].clamp(0.5, 30)
    level, right = _level(view.camera)
    ahead, aside = draw.uniform(0.3, 0.95, b, LAMPS, 1), draw.uniform(-0.6, 0.6, b, LAMPS, 1)
    spot = view.camera.eye.unsqueeze(1) + (level * ahead + right * aside) * far.view(b, 1, 1)
    lift = draw.uniform(-0.25, 0.4, b, LAMPS) * far.unsqueeze(1)
    return stack3(spot[..., 0], spot[..., 1], (spot[..., 2] + lift).clamp(min=0.2)), far


def _level(camera: Cameras) -> tuple[Tensor, Tensor]:
    """b 1 3 each: where cameras look and what is right of it, on the level."""
    forward = camera.axes[..., 2, :]
    level = unit(stack3(forward[..., 0], forward[..., 1], 0.0)).unsqueeze(1)
    return level, stack3(level[..., 1], -level[..., 0], 0.0)


def draw_snow(draw: Draw, b: int, share: float) -> tuple[Tensor, Tensor]:
    """How much lies in each of b views, -1 for none, and how the wind has left it (b 2 3), which is the same
    in both views of a world. More or less of it may have melted in one of them, or all."""
    snowy = draw.chance(share, b // 2)
    amount = torch.where(draw.chance(0.3, b), -1.01, draw.uniform(-0.5, 1.2, b))
    angle, wave = draw.uniform(0, 2 * math.pi, b // 2, 2), draw.log_uniform(0.5, 4.0, b // 2, 2)
    drifts = stack3(angle.cos() * wave, angle.sin() * wave, draw.uniform(0, 2 * math.pi, b // 2, 2))
    return torch.where(snowy.repeat(2), amount, -1.01), drifts.repeat(2, 1, 1)


def draw_crowd(draw: Draw, camera: Cameras, share: float) -> Crowd:
    """Rows of people in some of b views; half of the time those of the other view, elsewhere."""
    b, r = len(camera.focal), ROWS
    there = draw.chance(share, b, 1) & draw.chance(0.8, b, r)
    eye = camera.eye[:, 2]
    return Crowd(
        radius=draw.log_uniform(2.0, 16.0, b, r) * there,
        room=draw.log_uniform(0.5, 2.5, b, r),
        full=draw.uniform(0.4, 1.0, b, r),
        seed=_shared(draw.integer(2**20, b, r), draw.chance(0.5, b // 2)),
        # On the ground, or on what a photographer high up stands on.
        foot=torch.where(eye < 5, eye, draw.uniform(1.5, 1.8, b)),
    )


def _shared(values: Tensor, same: Tensor) -> Tensor:
    """values: 2b ...; the second half like the first where `same` (b) says so."""
    first, second = values.chunk(2)
    chosen = same.view(-1, *[1] * (values.dim() - 1))
    return torch.cat([first, torch.where(chosen, first, second)])
