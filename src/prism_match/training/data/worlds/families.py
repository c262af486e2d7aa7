"""The families of worlds. A family fills a `Builder` and says in a `Rig` where cameras may stand.

To add one: write a function `(Builder) -> Rig` and name it in `FAMILIES`. Sizes are in metres; every number
is drawn for each world, so that no two are alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from prism_match.training.data.photometric import Draw
from prism_match.training.data.worlds.scene import (
    Builder,
    Cameras,
    Style,
    Table,
    constant,
    look_at,
    stack3,
    unit,
)
from prism_match.training.data.worlds.variety import Variety
from prism_match.training.pairs import ImageSize, shape_of

RECTS, ROUNDS = 44, 12  # room for primitives in a world


@dataclass
class Rig(Table):
    """b: cameras look at `anchor` from about `distance` metres in direction `heading`, spread by `spread`."""

    anchor: Tensor  # b 3
    heading: Tensor  # b: azimuth from the anchor to the cameras
    spread: Tensor  # b: standard deviation of the azimuth
    distance: Tensor  # b
    elevation: Tensor  # b 2: least and greatest angle of the cameras above the anchor
    bounds: Tensor  # b 2 3: the box that cameras stay in


ZOOM = 3.0  # least ratio of scales of a zoom


def place(draw: Draw, rig: Rig, k: int, size: ImageSize, variety: Variety) -> tuple[Cameras, Tensor]:
    """Cameras b k 2: `k` candidate pairs for each world; and which worlds (b) are seen twice from nearly the
    same place."""
    b = rig.distance.shape[0]
    shape = (b, k, 2)
    kind = draw.uniform(0, 1, b, 1, 1)
    near, zoom = kind < variety.near, kind >= 1 - variety.zoom
    # How much the two differ in where they stand: as they like, or hardly.
    differ = torch.where(near, draw.log_uniform(0.01, 0.15, b, k, 1), 1.0)
    most, spot = variety.max_scale, draw.uniform(0, 1, b, k, 1)
    least = min(ZOOM, most)
    ratio = torch.where(zoom, least * (most / least) ** spot, most ** (spot.pow(2.0) * ~near))
    sign = torch.where(draw.chance(0.5, b, k, 1), 0.5, -0.5)
    sign = torch.cat([sign, -sign], -1)
    # The ratio comes partly from the distance and partly from the focal length.
    share = draw.uniform(0.2, 1.0, b, k, 1)
    distance = rig.distance.view(b, 1, 1) * draw.normal(0.25, b, k, 1).exp() * ratio ** (sign * share)
    view_angle = draw.uniform(0.6, 1.2, b, k, 1) * (draw.normal(0.12, *shape) * differ).exp()
    focal = 0.5 / torch.tan(view_angle / 2)
    around = rig.spread.view(b, 1, 1)
    azimuth = rig.heading.view(b, 1, 1) + around * (
        0.7 * draw.normal(1.0, b, k, 1) + 0.7 * draw.normal(1.0, *shape) * differ
    )
    low, high = (t.view(b, 1, 1) for t in rig.elevation.unbind(1))
    lift = draw.uniform(0, 1, b, k, 1) + draw.normal(0.2, *shape) * differ
    elevation = low + (high - low) * lift.clamp(0, 1)
    flat = distance * elevation.cos()
    offset = stack3(flat * azimuth.cos(), flat * azimuth.sin(), distance * elevation.sin())
    # Both look about the same place, which moves with the nearer one's field of view.
    nearer = distance.amin(-1, keepdim=True).unsqueeze(-1)
    anchor = rig.anchor.view(b, 1, 1, 3) + draw.normal(0.12, b, k, 1, 3) * nearer
    eye = (anchor + offset).clamp(rig.bounds[:, 0].view(b, 1, 1, 3), rig.bounds[:, 1].view(b, 1, 1, 3))
    aim = torch.where(near, draw.uniform(0, 1, b, k, 1), 1.0).unsqueeze(-1)
    target = anchor + draw.normal(0.1, *shape, 3) * nearer * aim
    roll = torch.where(
        draw.chance(0.06, *shape), draw.uniform(-math.pi, math.pi, *shape), draw.normal(0.06, *shape)
    )
    # Where no camera can stand so far away, a zoom is all the lens's.
    real = (eye - anchor).norm(dim=-1).clamp(min=0.1)
    apart = real / real.prod(-1, keepdim=True).sqrt()
    lens = torch.where(zoom, ratio**-sign * apart, ratio ** (-sign * (1 - share)))
    longest = torch.where(zoom, 6.0, 3.0)
    side = math.sqrt(math.prod(shape_of(size)))
    return look_at(eye, target, roll, (focal * lens).clamp(min=0.6).minimum(longest) * side), near.view(b)


def _rig(
    anchor: Tensor,
    heading: float | Tensor,
    spread: float,
    distance: Tensor,
    elevation: tuple[float, float],
    bounds: tuple[tuple[float, float, float], tuple[float, float, float]],
) -> Rig:
    """A rig whose numbers are the same for every world."""
    b, device = distance.shape[0], distance.device
    turned = heading if isinstance(heading, Tensor) else constant(heading, device).expand(b)
    angles, box = constant(elevation, device).expand(b, 2), constant(bounds, device).expand(b, 2, 3)
    return Rig(anchor, turned, constant(spread, device).expand(b), distance, angles, box)


def _scatter(d: Draw, b: int, m: int, spread: float | Tensor) -> Tensor:
    """b m 3: places on the ground, normally distributed."""
    return stack3(d.normal(1.0, b, m) * spread, d.normal(1.0, b, m) * spread, 0.0)


def _posters(
    w: Builder, m: int, along: Tensor, start: Tensor, facing: Tensor, width: Tensor, height: Tensor
) -> None:
    """m small unique things just before a wall (doors, signs, pictures), which break its symmetry.

    `along`, `facing` b 1 3 are unit vectors, `start` b 1 3 the wall's lower corner, its size b 1.
    """
    d, b = w.draw, w.b
    pw, ph = d.log_uniform(0.6, 3.0, b, m), d.log_uniform(0.6, 3.0, b, m)
    x = d.uniform(0, 1, b, m) * (width - pw).clamp(min=0)
    z = d.uniform(0, 1, b, m) * (height - ph).clamp(min=0)
    corner = start + along * x.unsqueeze(-1) + stack3(0.0, 0.0, z) + facing * d.uniform(0.03, 0.12, b, m, 1)
    w.rects(corner, along * pw.unsqueeze(-1), stack3(0.0, 0.0, ph))


def street(w: Builder) -> Rig:
    """Two rows of facades with a relief of windows, cars and lamp posts between them."""
    d, b, m = w.draw, w.b, 5
    half = d.uniform(4, 11, b, 1)
    one = torch.ones_like(half)
    for side in (-1.0, 1.0):
        width, height = d.uniform(5, 14, b, m), d.uniform(6, 22, b, m)
        x = torch.cumsum(width, 1) - width.sum(1, keepdim=True) / 2
        # The front of a rectangle is where across, up and the eye turn right-handed: towards the street.
        start = x - width if side > 0 else x
        corner = stack3(start, side * (half + d.uniform(0, 1.2, b, m)), 0.0)
        style = Style(bay=3.0, relief=0.8)
        w.rects(corner, stack3(side * width, 0.0, 0.0), stack3(0.0, 0.0, height), style)
        # Party walls at both ends and between neighbours, as high as the higher of the two.
        edge = torch.cat([x - width, x[:, -1:]], 1)
        tall = torch.maximum(F.pad(height, (1, 0)), F.pad(height, (0, 1)))
        thick = d.uniform(5, 12, b, 1).expand_as(tall)
        wall = stack3(edge, side * (half + 1.2), 0.0)
        w.rects(wall, stack3(0.0, side * thick, 0.0), stack3(0.0, 0.0, tall))
        along, facing = stack3(one, 0.0, 0.0), stack3(0.0, -side * one, 0.0)
        row = width.sum(1, keepdim=True)
        _posters(w, 4, along, stack3(-row / 2, side * half, 0.0), facing, row, 6 * one)
    cars = stack3(d.uniform(-20, 20, b, 2), d.uniform(-0.8, 0.8, b, 2) * half, 0.0)
    w.boxes(cars, d.uniform(1.2, 3.5, b, 2, 3), d.normal(0.2, b, 2))
    w.ground()
    posts = stack3(d.uniform(-25, 25, b, 5), torch.where(d.chance(0.5, b, 5), 0.8, -0.8) * half, 0.0)
    w.columns(posts, d.uniform(0.08, 0.5, b, 5), d.uniform(2, 7, b, 5), alike=True)
    side_of, aside = torch.where(d.chance(0.5, b), 1.0, -1.0), half[:, 0]
    anchor = stack3(d.uniform(-20, 20, b), side_of * aside * 0.9, d.uniform(1.5, 8, b))
    # Along the street, looking at one of its sides.
    heading = torch.where(d.chance(0.5, b), -side_of * 0.6, math.pi + side_of * 0.6)
    rig = _rig(anchor, heading, 0.35, d.uniform(8, 24, b), (-0.5, 0.25), ((-1, -1, 1.2), (1, 1, 9)))
    rig.bounds = rig.bounds * stack3(45.0, 0.85 * aside, 1.0).unsqueeze(1)
    return rig


def square(w: Builder) -> Rig:
    """A monument's front with relief, gable, ledges and wings, a statue before it."""
    d, b = w.draw, w.b
    width, depth, height = d.uniform(12, 34, b, 1), d.uniform(8, 20, b, 1), d.uniform(7, 20, b, 1)
    zero, one = torch.zeros_like(width), torch.ones_like(width)
    w.boxes(stack3(zero, depth / 2, zero), stack3(width, depth, height), zero, Style(bay=3.5, relief=1.0))
    _gable(w, width, depth, height)
    # Ledges that stand out from the front.
    ledge = stack3(zero, d.uniform(-0.5, -0.1, b, 2), d.uniform(0.2, 1, b, 2) * height)
    w.boxes(ledge, stack3(width, d.uniform(0.6, 1.4, b, 2), d.uniform(0.2, 0.7, b, 2)), zero.expand(b, 2))
    # Wings on both sides, turned a little inwards.
    side = torch.cat([-one, one], 1)
    wing = d.uniform(8, 18, b, 2)
    centre = stack3(side * (width / 2 + wing / 2 + d.uniform(0, 4, b, 2)), d.uniform(-4, 8, b, 2), 0.0)
    size = stack3(wing, d.uniform(6, 12, b, 2), d.uniform(0.5, 1.1, b, 2) * height)
    w.boxes(centre, size, -side * d.uniform(0, 0.9, b, 2), Style(bay=3.0, relief=0.7))
    front = stack3(0.0, -one, 0.0)
    _posters(w, 4, stack3(one, 0.0, 0.0), stack3(-width / 2, 0.0, 0.0), front, width, height)
    w.ground()
    foot = stack3(d.uniform(-0.3, 0.3, b, 1) * width, -d.uniform(4, 10, b, 1), 0.0)
    pedestal = d.uniform(1, 3, b, 1, 3)
    w.boxes(foot, pedestal, d.uniform(0, 3, b, 1))
    body = d.uniform(0.4, 1.4, b, 1)
    stand = foot + stack3(0.0, 0.0, pedestal[..., 2])
    w.columns(stand, body, 3 * body, bulge=1.0)
    w.columns(stand + stack3(0.0, 0.0, 2.9 * body), body * 0.5, body, bulge=1.0)
    anchor = stack3(d.uniform(-0.5, 0.5, b) * width[:, 0], 0.0, d.uniform(0.1, 1, b) * height[:, 0])
    bounds = ((-60.0, -70.0, 1.2), (60.0, -2.5, 14.0))
    return _rig(anchor, -math.pi / 2, 0.55, d.uniform(8, 26, b), (-0.4, 0.3), bounds)


def _gable(w: Builder, width: Tensor, depth: Tensor, height: Tensor) -> None:
    """A triangle over the front and two slopes of roof behind it."""
    rise = w.draw.uniform(0.1, 0.35, w.b, 1) * width
    left, right = stack3(-width / 2, -0.3, height), stack3(width / 2, depth, height)
    w.rects(left, stack3(width, 0.0, 0.0), stack3(0.0, 0.0, rise), taper=1.0)
    w.rects(left, stack3(0.0, depth, 0.0), stack3(width / 2, 0.0, rise), Style(bay=1.0))
    w.rects(right, stack3(0.0, -depth, 0.0), stack3(-width / 2, 0.0, rise), Style(bay=1.0))


def temple(w: Builder) -> Rig:
    """A row of columns that look alike before a wall: easily matched one bay off."""
    d, b, m = w.draw, w.b, 9
    gap, height = d.uniform(1.8, 4, b, 1), d.uniform(5, 11, b, 1)
    zero, one = torch.zeros_like(gap), torch.ones_like(gap)
    width, porch = gap * (m - 1) + 2, d.uniform(1.5, 6, b, 1)
    base, beam = d.uniform(0.3, 1.6, b, 1), d.uniform(0.8, 2.5, b, 1)
    x = (torch.arange(m, device=d.device) - (m - 1) / 2) * gap
    girth = (gap * d.uniform(0.14, 0.3, b, 1)).expand(b, m)
    w.columns(stack3(x, 0.0, base), girth, height.expand(b, m), alike=True)
    middle = stack3(zero, porch / 2, 0.0)
    w.boxes(middle, stack3(width + 2, porch + 5, base), zero, Style(bay=2.0))
    over = middle + stack3(0.0, 0.0, base + height)
    w.boxes(over, stack3(width, porch + 2.4, beam), zero, Style(bay=2.0, relief=0.5))
    # The wall behind has one door or window between any two columns.
    wall, up = Style(bay=3.0, columns=m - 1, relief=1.0), stack3(0.0, 0.0, height)
    w.rects(stack3(-width / 2, porch, base), stack3(width, 0.0, 0.0), up, wall)
    rise = d.uniform(0.1, 0.25, b, 1) * width
    top = stack3(-width / 2, -1.3, base + height + beam)
    w.rects(top, stack3(width, 0.0, 0.0), stack3(0.0, 0.0, rise), taper=1.0)
    along, front = stack3(one, 0.0, 0.0), stack3(0.0, -one, 0.0)
    _posters(w, 3, along, stack3(-width / 2, porch, base), front, width, height)
    # Walls close the flanks: the row of columns would be seen through otherwise.
    for side in (-1.0, 1.0):
        corner = stack3(side * width / 2, porch if side < 0 else zero, base)
        w.rects(corner, stack3(0.0, side * porch, 0.0), up, Style(bay=2.0, relief=1.0))
    behind = stack3(d.uniform(-25, 25, b, 3), d.uniform(8, 25, b, 3) + porch, 0.0)
    w.boxes(behind, d.uniform(6, 18, b, 3, 3), d.uniform(0, 3, b, 3), Style(bay=3.0))
    w.ground()
    lift = base[:, 0] + d.uniform(0.1, 1.1, b) * height[:, 0]
    anchor = stack3(d.uniform(-0.45, 0.45, b) * width[:, 0], 0.0, lift)
    bounds = ((-50.0, -60.0, 1.2), (50.0, -2.0, 10.0))
    return _rig(anchor, -math.pi / 2, 0.5, d.uniform(7, 20, b), (-0.4, 0.2), bounds)


def rotunda(w: Builder) -> Rig:
    """A round building with a dome and a lantern, a ring of columns, houses about it."""
    d, b, m = w.draw, w.b, 6
    radius, height = d.uniform(4, 11, b, 1), d.uniform(5, 14, b, 1)
    zero = torch.zeros_like(radius)
    roof = stack3(zero, zero, height)
    w.columns(stack3(zero, zero, zero), radius, height, Style(bay=3.0))
    dome = radius * d.uniform(0.5, 1.2, b, 1)
    w.columns(roof, radius * d.uniform(0.8, 1.05, b, 1), dome, Style(bay=3.0), bulge=1.0)
    w.columns(roof, radius * 0.2, radius * 1.6)
    w.columns(roof + stack3(0.0, 0.0, 1.6 * radius), radius * 0.22, radius * 0.4, bulge=1.0)
    turn = d.uniform(0, 1, b, 1) + torch.arange(m, device=d.device) * (2 * math.pi / m)
    ring = stack3(radius * turn.cos(), radius * turn.sin(), 0.0)
    w.columns(ring, d.uniform(0.3, 0.9, b, 1).expand(b, m), height.expand(b, m), alike=True)
    steps = stack3(2.6 * radius, 2.6 * radius, d.uniform(0.3, 3, b, 1))
    w.boxes(stack3(zero, zero, zero), steps, d.uniform(0, 3, b, 1), Style(bay=2.0))
    angle = d.uniform(0, 2 * math.pi, b, 5)
    away = 2.2 * radius + d.uniform(4, 14, b, 5)
    houses = stack3(away * angle.cos(), away * angle.sin(), 0.0)
    w.boxes(houses, d.uniform(4, 13, b, 5, 3), angle, Style(bay=3.0, relief=0.6))
    w.ground()
    heading, out = d.uniform(0, 2 * math.pi, b), radius[:, 0]
    anchor = stack3(out * heading.cos(), out * heading.sin(), d.uniform(0.2, 1.5, b) * height[:, 0])
    bounds = ((-60.0, -60.0, 1.2), (60.0, 60.0, 20.0))
    return _rig(anchor, heading, 0.3, d.uniform(8, 26, b), (-0.4, 0.3), bounds)


def room(w: Builder) -> Rig:
    """A closed room with weakly textured walls, furniture, pictures."""
    d, b, m = w.draw, w.b, 3
    x, y, z = d.uniform(2, 5, b, 1), d.uniform(2, 5, b, 1), d.uniform(2.4, 4, b, 1)
    one = torch.ones_like(x)
    corners = (
        (-x, -y, 1.0, 0.0, 2 * x),
        (x, -y, 0.0, 1.0, 2 * y),
        (x, y, -1.0, 0.0, 2 * x),
        (-x, y, 0.0, -1.0, 2 * y),
    )
    for left, near, ax, ay, length in corners:
        along, facing = stack3(ax * one, ay * one, 0.0), stack3(-ay * one, ax * one, 0.0)
        start, step = stack3(left, near, 0.0), along * length.unsqueeze(-1)
        w.rects(start + step, -step, stack3(0.0, 0.0, z), Style(weak=1.0))
        _posters(w, 2, along, start, facing, length, z)
    across, up = stack3(2 * x, 0.0, 0.0), stack3(0.0, 2 * y, 0.0)
    w.rects(stack3(-x, -y, 0.0), across, up, Style(bay=1.0, weak=1.0))
    w.rects(stack3(-x, -y, z), across, up, Style(weak=1.0))
    for weak in (1.0, 0.0):
        spot = stack3(d.uniform(-0.9, 0.9, b, m) * x, d.uniform(-0.9, 0.9, b, m) * y, 0.0)
        w.boxes(spot, d.log_uniform(0.3, 1.7, b, m, 3), d.uniform(0, 3, b, m), Style(weak=weak))
    spot = stack3(d.uniform(-0.9, 0.9, b, 4) * x, d.uniform(-0.9, 0.9, b, 4) * y, d.uniform(0, 1.5, b, 4))
    w.columns(spot, d.uniform(0.08, 0.35, b, 4), d.uniform(0.2, 1.2, b, 4))
    anchor = stack3(
        d.uniform(-0.9, 0.9, b) * x[:, 0], d.uniform(-0.9, 0.9, b) * y[:, 0], d.uniform(0.4, 1.8, b)
    )
    heading = torch.atan2(-anchor[:, 1], -anchor[:, 0])
    rig = _rig(anchor, heading, 0.45, d.uniform(1.5, 4.5, b), (-0.2, 0.6), ((0, 0, 0), (0, 0, 0)))
    wall = torch.cat([0.92 * x, 0.92 * y], 1)
    rig.bounds = torch.stack([torch.cat([-wall, 0.5 * one], 1), torch.cat([wall, z - 0.3], 1)], 1)
    return rig


def towers(w: Builder) -> Rig:
    """Tall buildings, a spire and a round tower from near their feet."""
    d, b, m = w.draw, w.b, 3
    width, height = d.uniform(6, 16, b, m), d.uniform(22, 75, b, m)
    row = (torch.arange(m, device=d.device) - 1) * d.uniform(14, 24, b, 1)
    foot, yaw = stack3(row, d.uniform(0, 14, b, m), 0.0), d.normal(0.3, b, m)
    roof = foot + stack3(0.0, 0.0, height)
    w.boxes(foot, stack3(width, d.uniform(6, 14, b, m), height), yaw, Style(bay=3.2, relief=0.8))
    w.boxes(roof[:, :1], d.uniform(3, 8, b, 1, 3), yaw[:, :1], Style(bay=2.0))
    w.pyramids(roof[:, 1:2], width[:, 1:2], d.uniform(5, 25, b, 1), yaw[:, 1:2])
    low = stack3(d.uniform(-30, 30, b, 3), d.uniform(-8, 12, b, 3), 0.0)
    w.boxes(low, d.uniform(3, 9, b, 3, 3), d.uniform(0, 3, b, 3), Style(bay=2.5))
    w.ground()
    radius, tall = d.uniform(2, 5, b, 1), d.uniform(12, 40, b, 1)
    side = stack3(d.uniform(-9, 9, b, 1), d.uniform(-4, 2, b, 1), 0.0)
    w.columns(side, radius, tall, Style(bay=2.5))
    cap = side + stack3(0.0, 0.0, tall)
    w.columns(cap, radius * 1.05, radius * d.uniform(0.6, 2.5, b, 1), bulge=1.0)
    which = d.integer(m, b, 1)
    chosen = foot.gather(1, which.unsqueeze(-1).expand(b, 1, 3))[:, 0]
    lift = height.gather(1, which)[:, 0] * d.uniform(0.2, 1.0, b)
    anchor = stack3(chosen[:, 0] + d.normal(3, b), chosen[:, 1] - 4, lift)
    bounds = ((-60.0, -60.0, 1.2), (60.0, -5.0, 4.0))
    return _rig(anchor, -math.pi / 2, 0.45, d.uniform(18, 50, b), (-1.1, -0.1), bounds)


def clutter(w: Builder) -> Rig:
    """Slabs, boxes, a pyramid, balls and cylinders, strewn: no architecture to rely on."""
    d, b, m = w.draw, w.b, 10
    width, height = d.uniform(2, 9, b, m), d.uniform(2, 9, b, m)
    first = unit(d.normal(1, b, m, 3))
    second = unit(torch.linalg.cross(first, unit(d.normal(1, b, m, 3)))) * height.unsqueeze(-1)
    first = first * width.unsqueeze(-1)
    middle = d.normal(4.5, b, m, 3) + stack3(0.0, 0.0, d.uniform(1, 7, b, m))
    taper = d.uniform(-1, 1, b, m).clamp(min=0)
    w.rects(middle - (first + second) / 2, first, second, Style(bay=2.0, relief=0.5), taper)
    size = d.log_uniform(1, 7, b, 4, 3)
    w.boxes(_scatter(d, b, 4, 6.0), size, d.uniform(0, 3, b, 4), Style(bay=2.0, relief=0.5))
    w.pyramids(_scatter(d, b, 1, 6.0), d.uniform(3, 9, b, 1), d.uniform(2, 9, b, 1), d.uniform(0, 3, b, 1))
    w.ground(50.0)
    girth = d.log_uniform(0.4, 2.5, b, 4, 1) * d.uniform(0.6, 1.4, b, 4, 3)
    centre = _scatter(d, b, 4, 6.0) + stack3(0.0, 0.0, d.uniform(0, 5, b, 4))
    w.rounds(centre, torch.diag_embed(girth), bulge=1.0)
    w.columns(_scatter(d, b, 4, 6.0), d.uniform(0.3, 2.2, b, 4), d.uniform(1.5, 9, b, 4), Style(bay=2.0))
    anchor = stack3(d.normal(2, b), d.normal(2, b), d.uniform(0.5, 5, b))
    bounds = ((-45.0, -45.0, 0.8), (45.0, 45.0, 30.0))
    return _rig(anchor, d.uniform(0, 2 * math.pi, b), 0.45, d.uniform(7, 18, b), (-0.2, 0.7), bounds)


def facade(w: Builder) -> Rig:
    """One large wall that fills the view, hardly any relief: nearly a homography, so that only exactness
    tells where the cameras stood."""
    d, b = w.draw, w.b
    width, height = d.uniform(25, 60, b, 1), d.uniform(12, 30, b, 1)
    zero, one = torch.zeros_like(width), torch.ones_like(width)
    across, up = stack3(width, 0.0, 0.0), stack3(0.0, 0.0, height)
    w.rects(stack3(-width / 2, 0.0, 0.0), across, up, Style(bay=3.5, relief=0.6))
    ledge = stack3(zero, d.uniform(-0.3, -0.05, b, 2), d.uniform(0.1, 1, b, 2) * height)
    w.boxes(ledge, stack3(width, d.uniform(0.3, 0.8, b, 2), d.uniform(0.15, 0.6, b, 2)), zero.expand(b, 2))
    _posters(w, 8, stack3(one, 0.0, 0.0), stack3(-width / 2, 0.0, 0.0), stack3(0.0, -one, 0.0), width, height)
    # Now and then something before it: a little parallax.
    there = d.chance(0.5, b, 1, 1).float()
    spots = stack3(d.uniform(-0.4, 0.4, b, 3) * width, -d.uniform(1, 6, b, 3), 0.0)
    w.boxes(spots, d.uniform(0.5, 2.5, b, 3, 3) * there, d.uniform(0, 3, b, 3))
    w.ground()
    anchor = stack3(d.uniform(-0.35, 0.35, b) * width[:, 0], 0.0, d.uniform(0.3, 0.7, b) * height[:, 0])
    bounds = ((-60.0, -60.0, 1.2), (60.0, -3.0, 14.0))
    return _rig(anchor, -math.pi / 2, 0.45, d.uniform(8, 20, b), (-0.4, 0.2), bounds)


def desk(w: Builder) -> Rig:
    """A table with small things on it from arm's length, blank walls behind: what an indoor sequence sees."""
    d, b = w.draw, w.b
    length, depth, top = d.uniform(0.9, 2.2, b, 1), d.uniform(0.5, 1.0, b, 1), d.uniform(0.4, 1.0, b, 1)
    zero, blank = torch.zeros_like(length), Style(weak=1.0)
    thick = d.uniform(0.02, 0.1, b, 1)
    w.boxes(stack3(zero, -depth / 2, top - thick), stack3(length, depth, thick), zero, blank)
    sides = stack3(torch.cat([-length, length], 1) * 0.45, -0.05, 0.0)
    w.rects(sides, stack3(0.0, -0.9 * depth, 0.0), stack3(0.0, 0.0, top - thick), blank)
    # Books, cartons, and a screen that stands at the back.
    spot = stack3(d.uniform(-0.45, 0.45, b, 4) * length, -d.uniform(0.1, 0.9, b, 4) * depth, top)
    w.boxes(spot, d.log_uniform(0.04, 0.35, b, 4, 3), d.uniform(0, 3, b, 4))
    wide, high = d.uniform(0.3, 0.8, b, 1), d.uniform(0.2, 0.5, b, 1)
    screen = stack3(d.uniform(-0.3, 0.3, b, 1) * length, -0.15 * depth, top + 0.05)
    w.boxes(screen, stack3(wide, zero + 0.04, high), d.normal(0.2, b, 1))
    # A corner of the room: two walls, the floor, and what hangs on the wall.
    x = length / 2 + d.uniform(0.1, 2.0, b, 1)
    wall = stack3(0.0, 0.0, zero + 2.6)
    w.rects(stack3(-3 * length, 0.05, 0.0), stack3(x + 3 * length, 0.0, 0.0), wall, blank)
    w.rects(stack3(x, 0.05, 0.0), stack3(0.0, zero - 5, 0.0), wall, blank)
    w.rects(
        stack3(-3 * length, -5.0, 0.0), stack3(x + 3 * length, 0.0, 0.0), stack3(0.0, zero + 5.05, 0.0), blank
    )
    _posters(
        w,
        2,
        stack3(zero + 1, 0.0, 0.0),
        stack3(-length, 0.05, 0.9),
        stack3(0.0, zero - 1, 0.0),
        2 * length,
        zero + 1.5,
    )
    mugs = stack3(d.uniform(-0.45, 0.45, b, 5) * length, -d.uniform(0.1, 0.9, b, 5) * depth, top)
    w.columns(mugs, d.uniform(0.02, 0.09, b, 5), d.uniform(0.05, 0.3, b, 5))
    anchor = stack3(
        d.uniform(-0.4, 0.4, b) * length[:, 0], -0.5 * depth[:, 0], top[:, 0] + d.uniform(0, 0.3, b)
    )
    rig = _rig(
        anchor, -math.pi / 2, 0.5, d.log_uniform(0.5, 2.0, b), (0.05, 0.8), ((0, -4, 0.5), (0, -0.1, 2.3))
    )
    reach = torch.cat([-2.5 * length, x - 0.1], 1)
    rig.bounds = torch.cat([reach.unsqueeze(-1), rig.bounds[..., 1:]], -1)
    return rig


Family = Callable[[Builder], Rig]
FAMILIES: dict[str, Family] = {
    "street": street,
    "square": square,
    "temple": temple,
    "rotunda": rotunda,
    "room": room,
    "towers": towers,
    "clutter": clutter,
    "facade": facade,
    "desk": desk,
}
