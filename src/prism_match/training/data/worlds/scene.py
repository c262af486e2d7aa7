"""What a world is made of: rectangles and round bodies, the way they look, and cameras, all batched.

Two kinds of primitive are enough for streets, temples, towers and rooms, and both are cast in closed form:

- a rectangle, narrowing towards its top by `taper` (1 is a triangle), and divided into bays, each of which
  may hold a recess (a window, the wall between two pilasters) with side walls of its own;
- a round body x^2 + y^2 + bulge z^2 = 1 in its own axes, between two heights: bulge 0 is a cylinder, 1 an
  ellipsoid or, cut in half, a dome.

World axes: x and y on the ground, z up, one unit about a metre.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from prism_match.training.data.photometric import Draw

T = TypeVar("T", bound="Table")


@dataclass
class Table:
    """Base of dataclasses whose every field is a tensor `b m ...`, or again such a table."""

    @classmethod
    def cat(cls: type[T], parts: Sequence[T], dim: int = 1) -> T:
        """The tables of `parts` joined along `dim`."""

        def join(values: list) -> Tensor | Table:
            cat = type(values[0]).cat if isinstance(values[0], Table) else torch.cat
            return cat(values, dim)

        return cls(*(join([getattr(p, f.name) for p in parts]) for f in fields(cls)))

    def map(self: T, f: Callable[[Tensor], Tensor]) -> T:
        """The same table with `f` applied to every tensor."""
        values = (getattr(self, x.name) for x in fields(self))
        return type(self)(*(v.map(f) if isinstance(v, Table) else f(v) for v in values))

    def padded(self: T, m: int) -> T:
        """With zeros up to `m` entries: primitives of no size, which no ray hits."""

        def pad(t: Tensor) -> Tensor:
            if t.shape[1] > m:
                raise ValueError(f"{type(self).__name__}: {t.shape[1]} primitives, at most {m} fit")
            return torch.cat([t, t.new_zeros(t.shape[0], m - t.shape[1], *t.shape[2:])], 1)

        return self.map(pad)


@dataclass
class Rects(Table):
    """b m: corner + u * across + v * up for u, v in [0, 1]; `across` and `up` are at right angles."""

    corner: Tensor  # b m 3
    across: Tensor  # b m 3
    up: Tensor  # b m 3
    taper: Tensor  # b m


@dataclass
class Rounds(Table):
    """b m bodies; the three half-axes are at right angles, the third is the axis of the cylinder."""

    centre: Tensor  # b m 3
    axes: Tensor  # b m 3 3: rows are the half-axes in world units
    bulge: Tensor  # b m
    low: Tensor  # b m: the body lies between these heights, in half-axes
    high: Tensor  # b m


@dataclass
class Look(Table):
    """b m: what is painted on a primitive: a photo once over all of it, mixed with one in each bay."""

    photo: Tensor  # b m 3 int64: over all, in each bay, in each recess
    crop: Tensor  # b m 4: left, top, width, height of the part of the first photo that is used
    bays: Tensor  # b m 2: how many along u and v
    mirror: Tensor  # b m: 1 where neighbouring bays are mirrored (detail without seams), 0 where repeated
    mix: Tensor  # b m: share of the bays' photo
    tone: Tensor  # b m: mean brightness
    contrast: Tensor  # b m
    blur: Tensor  # b m: mip levels added
    recess: Tensor  # b m 4: left, right, bottom, top of the recess within its bay; empty where right = left
    depth: Tensor  # b m: of the recess, in world units
    recess_tone: Tensor  # b m: brightness of the recess

    def follow(self, alike: Tensor) -> Look:
        """Primitives marked in `alike` (b m) look as the last one before them that is not marked."""
        own = torch.arange(alike.shape[1], device=alike.device).expand_as(alike)
        leader = torch.where(alike, 0, own).cummax(1).values
        world = torch.arange(len(alike), device=alike.device).unsqueeze(1)
        return self.map(lambda t: t[world, leader])


@dataclass
class Scene(Table):
    """b worlds of a fixed number of primitives; `look` holds the rectangles first, then the round bodies."""

    rects: Rects
    rounds: Rounds
    look: Look


@dataclass
class Cameras(Table):
    """b ...: pinhole cameras; a pixel is focal * (x, y) / z + (size - 1) / 2, z forward, y down."""

    eye: Tensor  # b ... 3
    axes: Tensor  # b ... 3 3: rows are right, down and forward in the world
    focal: Tensor  # b ...: pixels


@lru_cache(maxsize=1024)
def constant(value: float | tuple, device: torch.device) -> Tensor:
    """A number or a tuple (of tuples) of numbers as a tensor, kept (never write to it): copying it
    to a GPU each time would wait for the GPU."""
    return torch.tensor(value, dtype=torch.float32, device=device)


def stack3(x: float | Tensor, y: float | Tensor, z: float | Tensor) -> Tensor:
    """Broadcast three tensors, or two and a number, and stack them to vectors (... 3)."""
    device = next(t for t in (x, y, z) if isinstance(t, Tensor)).device
    tensors = [t if isinstance(t, Tensor) else constant(float(t), device) for t in (x, y, z)]
    return torch.stack(torch.broadcast_tensors(*tensors), -1)


def unit(v: Tensor) -> Tensor:
    return v / v.norm(dim=-1, keepdim=True).clamp(min=1e-9)


def look_at(eye: Tensor, target: Tensor, roll: Tensor, focal: Tensor) -> Cameras:
    """Cameras at `eye` (... 3) that look at `target` (... 3), upright but for `roll` (...)."""
    forward = unit(target - eye)
    # Tilted a hair, so that a view straight up or down has a right side, too.
    up = stack3(torch.zeros_like(roll), torch.full_like(roll, 1e-3), torch.ones_like(roll))
    right = unit(torch.linalg.cross(forward, up))
    down = torch.linalg.cross(forward, right)
    cos, sin = roll.cos().unsqueeze(-1), roll.sin().unsqueeze(-1)
    axes = torch.stack([cos * right + sin * down, cos * down - sin * right, forward], -2)
    return Cameras(eye, axes, focal)


class Style(NamedTuple):
    """How a primitive is to be painted; numbers only, the same in every world of a family."""

    bay: float = 0.0  # size of a repeated bay in metres; 0: no bays, but detail that is never quite repeated
    columns: float = 0.0  # number of bays along u, where it must fit something else; 0: as many as fit
    relief: float = 0.0  # chance of a recess in the bays
    weak: float = 0.0  # 1: blurred, with little contrast
    paving: float = 0.0  # 1: mostly small detail
    alike: float = 0.0  # 1: looks as the last one before it that is not marked so


PLAIN = Style()


class Builder:
    """Collects the primitives of `b` worlds of one family, every call adding `m` of a kind to each world."""

    def __init__(self, draw: Draw, b: int):
        self.draw, self.b = draw, b
        self._rects: list[Rects] = []
        self._rounds: list[Rounds] = []
        self._rect_styles: list[Style] = []
        self._round_styles: list[Style] = []

    def number(self, value: float | Tensor, m: int) -> Tensor:
        """b m from a number or anything broadcastable."""
        tensor = value if isinstance(value, Tensor) else constant(float(value), self.draw.device)
        return tensor.expand(self.b, m)

    def rects(
        self, corner: Tensor, across: Tensor, up: Tensor, style: Style = PLAIN, taper: float | Tensor = 0.0
    ) -> None:
        """m rectangles (b m 3 each)."""
        m = max(corner.shape[1], across.shape[1], up.shape[1])
        shape = (self.b, m, 3)
        table = Rects(corner.expand(shape), across.expand(shape), up.expand(shape), self.number(taper, m))
        self._rects.append(table)
        self._rect_styles += [style] * m

    def boxes(self, base: Tensor, size: Tensor, yaw: Tensor, style: Style = PLAIN) -> None:
        """m boxes of 5 faces; `base` b m 3 is the middle of the bottom, `size` b m 3, `yaw` b m."""
        b, m = self.b, yaw.shape[1]
        cos, sin = yaw.cos().unsqueeze(1), yaw.sin().unsqueeze(1)
        width, depth, height = (t.unsqueeze(1) for t in size.expand(b, m, 3).unbind(-1))
        # The four sides, outward directions (b 4 m): front, right, back, left.
        turn = torch.cat([sin, cos, -sin, -cos], 1), torch.cat([-cos, sin, cos, -sin], 1)
        out = stack3(*turn, 0.0)
        along = stack3(-turn[1], turn[0], 0.0)
        away, length = torch.cat([depth, width] * 2, 1), torch.cat([width, depth] * 2, 1)
        step = along * length.unsqueeze(-1)
        corner = base.unsqueeze(1) + (out * away.unsqueeze(-1) - step) / 2
        up = stack3(0.0, 0.0, height).expand_as(step)
        self.rects(corner.flatten(1, 2), step.flatten(1, 2), up.flatten(1, 2), style)
        self.rects(corner[:, 0] + up[:, 0], step[:, 0], step[:, 1], Style(weak=style.weak))

    def pyramids(self, base: Tensor, width: Tensor, height: Tensor, yaw: Tensor) -> None:
        """m pyramids of 4 triangles (roofs, spires); `base` (b m 3): middle of the bottom; else b m."""
        quarter = constant((0.0, torch.pi / 2, torch.pi, -torch.pi / 2), self.draw.device).view(1, 4, 1)
        angle = yaw.unsqueeze(1) + quarter
        half = (width / 2).unsqueeze(1)
        out = stack3(half * angle.cos(), half * angle.sin(), 0.0)
        along = stack3(-out[..., 1], out[..., 0], 0.0)
        corner = base.unsqueeze(1) + out - along
        up = stack3(-out[..., 0], -out[..., 1], height.unsqueeze(1))
        self.rects(corner.flatten(1, 2), 2 * along.flatten(1, 2), up.flatten(1, 2), taper=1.0)

    def rounds(
        self,
        centre: Tensor,
        axes: Tensor,
        style: Style = PLAIN,
        bulge: float | Tensor = 0.0,
        low: float = -1.0,
        alike: bool = False,
    ) -> None:
        """m round bodies: `centre` b m 3, `axes` b m 3 3; all painted alike or each in its own way."""
        m = centre.shape[1]
        shape = [self.number(v, m) for v in (bulge, low, 1.0)]
        self._rounds.append(Rounds(centre.expand(self.b, m, 3), axes.expand(self.b, m, 3, 3), *shape))
        self._round_styles += [style] + [style._replace(alike=float(alike))] * (m - 1)

    def columns(
        self,
        foot: Tensor,
        radius: Tensor,
        height: Tensor,
        style: Style = PLAIN,
        bulge: float = 0.0,
        alike: bool = False,
    ) -> None:
        """m upright cylinders or (bulge 1) domes on `foot` (b m 3), of `radius` and `height` (b m)."""
        if bulge:
            centre, half, low = foot, height, 0.0
        else:
            centre, half, low = foot + stack3(0.0, 0.0, height / 2), height / 2, -1.0
        axes = torch.diag_embed(stack3(radius, radius, half))
        self.rounds(centre, axes, style, bulge, low, alike=alike)

    def ground(self, extent: float = 80.0) -> None:
        """One large rectangle under everything."""
        side = self.number(2 * extent, 1)
        corner = stack3(-side / 2, -side / 2, 0.0)
        self.rects(corner, stack3(side, 0.0, 0.0), stack3(0.0, side, 0.0), Style(paving=1.0))

    def build(self, rects: int, rounds: int) -> tuple[Rects, Rounds, tuple[Style, ...]]:
        """Everything so far, padded to fixed numbers so that worlds of all families stack."""
        zero = torch.zeros(self.b, 0, 3, device=self.draw.device)
        none = Rounds(zero, zero.unsqueeze(-1).expand(-1, -1, -1, 3), *([zero[..., 0]] * 3))
        flat, body = Rects.cat(self._rects), Rounds.cat([none, *self._rounds])
        styles = self._rect_styles + [PLAIN] * (rects - len(self._rect_styles))
        styles += self._round_styles + [PLAIN] * (rounds - len(self._round_styles))
        return flat.padded(rects), body.padded(rounds), tuple(styles)


def extents(rects: Rects, rounds: Rounds) -> Tensor:
    """b m 2: width and height of all primitives, in metres, the rectangles first; never 0."""
    lengths = rounds.axes.norm(dim=-1)
    flat = torch.stack([rects.across.norm(dim=-1), rects.up.norm(dim=-1)], -1)
    curved = torch.stack([2 * torch.pi * lengths[..., 0], (rounds.high - rounds.low) * lengths[..., 2]], -1)
    return torch.cat([flat, curved], 1).clamp(min=1e-3)


def paint(draw: Draw, size: Tensor, style: Tensor, photos: int, one_make: Tensor | None = None) -> Look:
    """Looks of surfaces of `size` b m 2 in styles b m 6, with any of `photos` photos. In worlds of `one_make`
    (b, bool) all bays look alike, and only what is over all of them tells one wall from another."""
    b, m, _ = size.shape
    bay, columns, relief, weak, paving, _ = style.unbind(-1)
    # The part of the photo that is used keeps the shape of the surface, so that photos are not stretched.
    used = (draw.uniform(0.45, 1.0, b, m, 1) * size / size.amax(-1, keepdim=True)).clamp(0.12, 1)
    crop = torch.cat([draw.uniform(0, 1, b, m, 2) * (1 - used), used], -1)
    has_bays, is_weak, paved = bay > 0, weak > 0, paving > 0
    same = has_bays & (one_make.unsqueeze(1) if one_make is not None else False)
    first = has_bays.int().argmax(1, keepdim=True)  # of the walls, whose looks the others share

    def shared(values: Tensor) -> Tensor:
        """b m ...: those of the first wall where all are the same."""
        trail = values.shape[2:]
        leader = values.gather(1, first.view(b, 1, *[1] * len(trail)).expand(b, 1, *trail))
        return torch.where(same.view(b, m, *[1] * len(trail)), leader, values)

    period = torch.where(has_bays, bay, torch.where(paved, 3.5, 2.5)) * draw.normal(0.25, b, m).exp()
    stretch = draw.log_uniform(0.8, 1.25, b, m, 2)
    bays = (size / (shared(period).unsqueeze(-1) * shared(stretch))).round().clamp(min=1)
    across = torch.where(columns > 0, columns, bays[..., 0])
    # Some worlds repeat almost perfectly, others have a photo of their own over all bays.
    repeats = draw.uniform(0.25, 1.0, b, 1)
    plain_mix = torch.where(paved, 0.4 + 0.55 * repeats, draw.uniform(0, 0.45, b, m))
    strong, pale = draw.uniform(0.7, 1.3, b, m), draw.uniform(0.2, 0.6, b, m)
    # One recess for all bays of a world, as architecture is: small ones are windows, large leave pilasters.
    edge = draw.uniform(0.06, 0.36, b, 1, 4)
    opening = torch.stack([edge[..., 0], 1 - edge[..., 1], edge[..., 2], 1 - edge[..., 3]], -1)
    carved = shared(draw.uniform(0, 1, b, m)) < relief
    photo = draw.integer(photos, b, m, 3)
    look = Look(
        photo=torch.cat([photo[..., :1], shared(photo[..., 1:])], -1),
        crop=crop,
        bays=torch.stack([across, bays[..., 1]], -1),
        mirror=torch.where(has_bays, 0.0, 1.0),
        mix=torch.where(has_bays, repeats, plain_mix),
        tone=shared(draw.uniform(0.4, 0.62, b, m)),
        contrast=torch.where(is_weak, pale, strong * torch.where(paved, repeats, 1.0)),
        blur=torch.where(is_weak, draw.uniform(0.3, 2.5, b, m), 0.0),
        recess=opening * carved.unsqueeze(-1),
        depth=draw.log_uniform(0.08, 0.7, b, 1) * carved,
        recess_tone=draw.uniform(0.25, 1.05, b, 1).expand(b, m),
    )
    return look.follow(style[..., 5] > 0)
