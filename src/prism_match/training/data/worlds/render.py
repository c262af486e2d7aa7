"""Closed-form ray casting and shading of batched worlds; every shape is static, nothing waits for the host.

Along a ray `eye + t d`, a rectangle with sides U, V at corner C is met where t d = [U V C-eye] (u, v, 1), so
(u, v, 1) / t = [U V C-eye]^-1 d: three numbers linear in the pixel, of which the third is the inverse depth.
Casting is then three fused multiply-adds a number, and the nearest hit is a maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prism_match.training.data.photos import PhotoStore, spread_levels
from prism_match.training.data.worlds.scene import Cameras, Look, Rects, Rounds, Scene, Table, extents, unit
from prism_match.training.pairs import ImageSize, shape_of

NEAREST = 0.15  # metres: nothing nearer than this is seen
FARTHEST = 1e4


@dataclass
class View(Table):
    """b worlds as seen by one camera each: what does not depend on the pixel."""

    camera: Cameras
    rects: Rects
    rounds: Rounds
    look: Look
    plane: Tensor  # b r 3 3: pixel (x, y, 1) -> (u, v, 1) / t of each rectangle
    eye_uvw: Tensor  # b r 3: the eye in u, v and metres in front of each rectangle
    normal: Tensor  # b r 3
    beam: Tensor  # b q 3 3: pixel (x, y, 1) -> direction in the axes of each round body
    eye_round: Tensor  # b q 3: the eye in those axes


@dataclass
class Hits(Table):
    """b n rays."""

    depth: Tensor  # along the camera's axis; FARTHEST where nothing is met
    index: Tensor  # int64 into the looks; any where nothing is met
    met: Tensor  # bool
    front: Tensor  # bool: seen from its front side, or from outside
    u: Tensor
    v: Tensor
    inset: Tensor  # metres behind the front plane, 0 outside recesses
    recessed: Tensor  # bool: on the floor or a side wall of a recess
    normal: Tensor  # b n 3, towards the eye


def dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1)


def per_length(axis: Tensor) -> Tensor:
    """... 3, over its squared length: its product with a vector is how many of it that goes along it."""
    return axis / axis.square().sum(-1, keepdim=True).clamp(min=1e-9)


def pixel_rays(camera: Cameras, size: ImageSize) -> Tensor:
    """b 3 3: columns map the pixel (x, y, 1) to the ray direction in the world, of depth 1."""
    right, down, forward = camera.axes.unbind(-2)
    focal = camera.focal.unsqueeze(-1)
    y, x = ((n - 1) / 2 for n in shape_of(size))
    return torch.stack([right / focal, down / focal, forward - (right * x + down * y) / focal], -1)


def make_view(scene: Scene, camera: Cameras, size: ImageSize) -> View:
    """Cameras: b (one for each world)."""
    rays = pixel_rays(camera, size).unsqueeze(1)  # b 1 3 3
    rects, rounds = scene.rects, scene.rounds
    eye = camera.eye.unsqueeze(1)
    cross = torch.linalg.cross
    to_corner = rects.corner - eye
    area = cross(rects.across, rects.up)
    normal, det = unit(area), dot(area, to_corner)
    # A rectangle seen edge-on, or padding without size, is left out: rows of zero are never hit.
    usable = det.abs() > 1e-6
    rows = [cross(rects.up, to_corner), cross(to_corner, rects.across), area]
    inverse = torch.stack(rows, -2) * torch.where(usable, 1 / det, 0.0)[..., None, None]
    plane = (inverse.unsqueeze(-1) * rays.unsqueeze(-3)).sum(-2)
    eye_uvw = [-dot(to_corner, axis) for axis in (per_length(rects.across), per_length(rects.up), normal)]
    into = per_length(rounds.axes)  # rows of the map into a body's own axes
    beam = (into.unsqueeze(-1) * rays.unsqueeze(-3)).sum(-2)
    eye_round = (into * (eye - rounds.centre).unsqueeze(-2)).sum(-1)
    return View(camera, rects, rounds, scene.look, plane, torch.stack(eye_uvw, -1), normal, beam, eye_round)


def _linear(rows: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
    """rows b m 3 3 at pixels (x, y: b n) -> three tensors b m n."""
    x, y = x.unsqueeze(1), y.unsqueeze(1)
    return [
        rows[:, :, i, 0, None] * x + (rows[:, :, i, 1, None] * y + rows[:, :, i, 2, None]) for i in range(3)
    ]


def _nearest_rect(view: View, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse depth (0: none) and index of the nearest rectangle at each pixel (b n)."""
    u, v, inverse = _linear(view.plane, x, y)
    cut = view.rects.taper.unsqueeze(-1) / 2 * v
    inside = (u >= cut) & (u + cut <= inverse) & (v >= 0) & (v <= inverse) & (inverse < 1 / NEAREST)
    return torch.where(inside, inverse, 0.0).max(1)


def _round_depths(
    eye: Sequence[Tensor], ray: Sequence[Tensor], bulge: Tensor, low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor]:
    """Depth of the hit (FARTHEST: none) and whether it is from outside; arguments broadcast."""
    dx, dy, dz = ray
    ex, ey, ez = eye
    a = (dx * dx + dy * dy + bulge * dz * dz).clamp(min=1e-12)
    half_b = ex * dx + ey * dy + bulge * ez * dz
    c = ex * ex + ey * ey + bulge * ez * ez - 1
    disc = half_b * half_b - a * c
    root = disc.clamp(min=0).sqrt()
    near, far = (-half_b - root) / a, (-half_b + root) / a
    z_near, z_far = ez + near * dz, ez + far * dz
    real = disc > 0
    outside = real & (near > NEAREST) & (z_near >= low) & (z_near <= high)
    inside = real & (far > NEAREST) & (z_far >= low) & (z_far <= high)
    return torch.where(outside, near, torch.where(inside, far, FARTHEST)), outside


def _nearest_round(view: View, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse depth (0: none) and index of the nearest round body at each pixel (b n)."""
    r = view.rounds
    ray = _linear(view.beam, x, y)
    shape = (t.unsqueeze(-1) for t in (r.bulge, r.low, r.high))
    depth, _ = _round_depths(view.eye_round.unsqueeze(2).unbind(-1), ray, *shape)
    return torch.where(depth < FARTHEST, 1 / depth, 0.0).max(1)


def pick(table: Tensor, index: Tensor) -> Tensor:
    """table b m ..., index b n -> b n ...: the entry of each ray's primitive."""
    world = torch.arange(table.shape[0], device=table.device).unsqueeze(1)
    return table[world, index]


def cast(view: View, x: Tensor, y: Tensor) -> Hits:
    """The first surface met by the ray through each pixel (x, y: b n)."""
    inverse_rect, rect = _nearest_rect(view, x, y)
    inverse_round, body = _nearest_round(view, x, y)
    is_round = inverse_round > inverse_rect
    flat, curved = _hit_rect(view, rect, x, y), _hit_round(view, body, x, y)
    both = zip(vars(curved).values(), vars(flat).values(), strict=True)
    hits = Hits(*(torch.where(is_round.unsqueeze(-1) if a.dim() == 3 else is_round, a, b) for a, b in both))
    hits.met = torch.maximum(inverse_rect, inverse_round) > 0
    hits.depth = torch.where(hits.met, hits.depth, FARTHEST)
    return hits


def _hit_rect(view: View, rect: Tensor, x: Tensor, y: Tensor) -> Hits:
    """Where each ray meets its rectangle, with the recess of the bay it enters, if any."""
    rows = pick(view.plane, rect)
    qu, qv, inverse = (rows[..., i, 0] * x + (rows[..., i, 1] * y + rows[..., i, 2]) for i in range(3))
    depth = 1 / inverse.clamp(min=1 / FARTHEST)
    u, v = qu * depth, qv * depth
    eye_u, eye_v, eye_w = pick(view.eye_uvw, rect).unbind(-1)
    front = eye_w > 0
    # The walls of the bay's recess, in u and v.
    bays_u, bays_v = pick(view.look.bays, rect).unbind(-1)
    left, right, bottom, top = pick(view.look.recess, rect).unbind(-1)
    bay_u, bay_v = torch.floor(u * bays_u), torch.floor(v * bays_v)
    u0, u1 = (bay_u + left) / bays_u.clamp(min=1), (bay_u + right) / bays_u.clamp(min=1)
    v0, v1 = (bay_v + bottom) / bays_v.clamp(min=1), (bay_v + top) / bays_v.clamp(min=1)
    deep = pick(view.look.depth, rect)
    enters = front & (deep > 0) & (u > u0) & (u < u1) & (v > v0) & (v < v1)
    # Along the ray, s = t / depth: u(s) = eye_u + s (u - eye_u), and s - 1 times eye_w is the way in.
    go_u, go_v = u - eye_u, v - eye_v
    tiny = 1e-7
    s_u = torch.where(go_u > 0, u1 - eye_u, u0 - eye_u) / torch.where(go_u.abs() < tiny, tiny, go_u)
    s_v = torch.where(go_v > 0, v1 - eye_v, v0 - eye_v) / torch.where(go_v.abs() < tiny, tiny, go_v)
    s_u = torch.where(go_u.abs() < tiny, FARTHEST, s_u)
    s_v = torch.where(go_v.abs() < tiny, FARTHEST, s_v)
    s_floor = 1 + deep / eye_w.clamp(min=1e-3)
    s = torch.where(enters, torch.minimum(s_floor, torch.minimum(s_u, s_v)).clamp(min=1), 1.0)
    on_u = enters & (s_u < s_floor) & (s_u <= s_v)
    on_v = enters & (s_v < s_floor) & (s_v < s_u)
    across, up = unit(pick(view.rects.across, rect)), unit(pick(view.rects.up, rect))
    normal = pick(view.normal, rect) * torch.where(front, 1.0, -1.0).unsqueeze(-1)
    normal = torch.where(on_u.unsqueeze(-1), -across * torch.sign(go_u).unsqueeze(-1), normal)
    normal = torch.where(on_v.unsqueeze(-1), -up * torch.sign(go_v).unsqueeze(-1), normal)
    u, v = eye_u + s * go_u, eye_v + s * go_v
    return Hits(depth * s, rect, inverse > 0, front, u, v, (s - 1) * eye_w, enters, normal)


def _hit_round(view: View, body: Tensor, x: Tensor, y: Tensor) -> Hits:
    """Where each ray meets its round body; u runs around it, v from its foot to its top."""
    r = view.rounds
    rows = pick(view.beam, body)
    ray = [rows[..., i, 0] * x + (rows[..., i, 1] * y + rows[..., i, 2]) for i in range(3)]
    eye = pick(view.eye_round, body).unbind(-1)
    bulge, low, high = pick(r.bulge, body), pick(r.low, body), pick(r.high, body)
    depth, outside = _round_depths(eye, ray, bulge, low, high)
    px, py, pz = (e + depth * d for e, d in zip(eye, ray, strict=True))
    axes = pick(r.axes, body)
    into = per_length(axes)
    gradient = torch.stack([px, py, bulge * pz], -1)
    normal = unit((into * gradient.unsqueeze(-1)).sum(-2)) * torch.where(outside, 1.0, -1.0).unsqueeze(-1)
    u = torch.atan2(py, px) / (2 * torch.pi) + 0.5
    v = (pz - low) / (high - low).clamp(min=1e-6)
    zero, index = torch.zeros_like(depth), body + view.rects.taper.shape[1]
    return Hits(depth, index, depth < FARTHEST, outside, u, v, zero, zero > 1, normal)


# -- light and paint ----------------------------------------------------------------------------


@dataclass
class Crowd(Table):
    """b r: rows of people, each on a circle about the photographer."""

    radius: Tensor  # b r: metres to the row; 0: nobody
    room: Tensor  # b r: metres of the circle for each of them
    full: Tensor  # b r: share of the places that is taken
    seed: Tensor  # b r int64: who they are
    foot: Tensor  # b: height of the ground below the eye, in metres


@dataclass
class Light(Table):
    """b: what differs between the two views of a world."""

    sun: Tensor  # b 4 3: direction towards the sun, spread over the sub-pixels for soft shadows
    strength: Tensor  # b: of the sun; 0 by night
    ambient: Tensor  # b: share of light that comes from everywhere
    fill: Tensor  # b 3: where most of that comes from
    lamps: Tensor  # b k 3: where they stand
    power: Tensor  # b k: of the lamps; 0 by day
    reach: Tensor  # b: metres at which half of a lamp's light is left
    fog: Tensor  # b: metres in which fog takes over, large for none
    air: Tensor  # b: brightness of the fog
    lit: Tensor  # b: share of recesses lit from inside
    gain: Tensor  # b m: brightness of each primitive in this view
    sky_photo: Tensor  # b int64
    sky: Tensor  # b 4: brightness, gradient, contrast of clouds, blur of clouds
    sky_turn: Tensor  # b
    snow: Tensor  # b: how much there is of it: from -1, none, over 0, patches, to 1
    drifts: Tensor  # b 2 3: how snow lies: waves along x and y, and where they begin
    crowd: Crowd


def world_rays(camera: Cameras, size: ImageSize, x: Tensor, y: Tensor) -> Tensor:
    """b n 3: directions of depth 1 through pixels (x, y: b n)."""
    rays = pixel_rays(camera, size).unsqueeze(1)
    return rays[..., 0] * x.unsqueeze(-1) + rays[..., 1] * y.unsqueeze(-1) + rays[..., 2]


def shade(view: View, light: Light, store: PhotoStore, size: ImageSize, x: Tensor, y: Tensor) -> Tensor:
    """b: sub-pixels (x, y: 4 n) -> b n brightness, the mean of the four."""
    b = view.camera.focal.shape[0]
    sub, n = x.shape
    x, y = (t.reshape(1, -1).expand(b, -1) for t in (x, y))
    hits = cast(view, x, y)
    rays = world_rays(view.camera, size, x, y)
    point = view.camera.eye.unsqueeze(1) + hits.depth.unsqueeze(-1) * rays
    colour = _paint(view, light, store, hits, rays, sub)
    colour = torch.where(snowed_in(light, hits, point), 0.85 + 0.08 * _drift(light, 3 * point), colour)
    sun = light.sun.unsqueeze(2).expand(b, sub, n, 3).reshape(b, -1, 3)
    lit = dot(hits.normal, sun).clamp(min=0) * (1 - _in_shadow(view, light, hits, point, sun, sub))
    ambient = light.ambient.unsqueeze(1)
    fill = 0.75 + 0.25 * dot(hits.normal, light.fill.unsqueeze(1))
    sunlight = light.strength.unsqueeze(1) * (1 - ambient) * 1.5 * lit
    colour = colour * (ambient * fill + sunlight + _lamp_light(light, hits, point)) * 1.3
    colour = _windows(view, light, hits, colour)
    people = meet_crowd(light.crowd, rays, hits.depth)
    other = _sky_and_people(view, light, store, people, rays, sub)
    depth = torch.where(people.met, people.depth, hits.depth)
    colour = torch.where(
        people.met, other * (ambient + 0.5 * (1 - ambient) * light.strength.unsqueeze(1)), colour
    )
    clear = torch.exp(-depth / light.fog.unsqueeze(1))
    colour = clear * colour + (1 - clear) * light.air.unsqueeze(1)
    colour = torch.where(hits.met | people.met, colour, other)
    return colour.view(b, sub, n).mean(1)


# -- what hides the scene in one view ------------------------------------------------------------


@dataclass
class People(Table):
    """b n rays."""

    met: Tensor  # bool: a person stands in the way
    depth: Tensor
    u: Tensor  # across the person and up, in [0, 1]
    v: Tensor
    who: Tensor  # in [0, 1)


def meet_crowd(crowd: Crowd, rays: Tensor, depth: Tensor) -> People:
    """The people before what is at `depth` (b n) along rays b n 3 of depth 1. Each has a place on a circle
    about the eye, and is a flat figure of a body and a head: what a person hides is all that counts."""
    level = rays[..., :2].norm(dim=-1).clamp(min=1e-3)
    around = torch.atan2(rays[..., 1], rays[..., 0])
    zero = torch.zeros_like(depth)
    found = People(zero > 1, depth, zero, zero, zero)
    rows = [t.unsqueeze(-1).unbind(1) for t in (crowd.radius, crowd.room, crowd.full, crowd.seed)]
    for radius, room, full, seed in zip(*rows, strict=True):
        way = radius / level
        along = around * radius / room
        place = torch.floor(along)
        number = place.long() + seed
        who, height = noise(number), 1.45 + 0.5 * noise(number + 1000)
        # Elbow room for each, so that nobody is cut off by a neighbour's place.
        half = torch.minimum(0.22 + 0.1 * who, 0.48 * room)
        x = ((along - place - 0.5) * room - (noise(number + 2000) - 0.5) * (room - 2 * half)) / half
        z = (crowd.foot.unsqueeze(1) + way * rays[..., 2]) / height
        body = x.abs() ** 3 + ((z - 0.41) / 0.42).abs() ** 5 < 1
        head = (2.2 * x).square() + ((z - 0.91) / 0.09).square() < 1
        met = (
            (body | head)
            & (noise(number + 3000) < full)
            & (radius > 0)
            & (way > NEAREST)
            & (way < found.depth)
        )
        new = People(met, way, (x + 1) / 2, z, who)
        both = zip(vars(new).values(), vars(found).values(), strict=True)
        found = People(*(torch.where(met, a, b) for a, b in both))
    return found


def noise(seed: Tensor) -> Tensor:
    """In [0, 1), the same for the same int64 seed on any device: pictures and truth must agree about it."""
    value = (seed * 2654435761) & 0xFFFFFFFF
    value = ((value ^ (value >> 15)) * 2246822519) & 0xFFFFFFFF
    return ((value ^ (value >> 13)) & 0xFFFFFF).float() / 2**24


def _drift(light: Light, point: Tensor) -> Tensor:
    """b n in [-1, 1]: how the wind has left the snow at points b n 3."""
    x, y = (dot(point[..., :2], wave[:, None, :2]) + wave[:, None, 2] for wave in light.drifts.unbind(1))
    return torch.sin(x + torch.sin(0.7 * y)) * torch.cos(y)


def snowed_in(light: Light, hits: Hits, point: Tensor) -> Tensor:
    """b n: snow lies on what looks up, at points b n 3 that rays met."""
    return hits.met & (hits.normal[..., 2] > 0.5) & (_drift(light, point) < light.snow.unsqueeze(1))


def hidden(light: Light, hits: Hits, rays: Tensor, point: Tensor) -> tuple[Tensor, Tensor]:
    """b n each: someone stands before it; snow lies on it."""
    return meet_crowd(light.crowd, rays, hits.depth).met, snowed_in(light, hits, point)


def _lamp_light(light: Light, hits: Hits, point: Tensor) -> Tensor:
    """b n: what lamps throw on points b n 3. They cast no shadows."""
    total = torch.zeros_like(hits.depth)
    for place, power in zip(light.lamps.unbind(1), light.power.unbind(1), strict=True):
        way = place.unsqueeze(1) - point
        far = way.norm(dim=-1).clamp(min=1e-3)
        facing = (dot(hits.normal, way) / far).clamp(min=0)
        total = total + power.unsqueeze(1) * facing / (1 + (far / light.reach.unsqueeze(1)).square())
    return total


def _fold(t: Tensor, mirror: Tensor) -> Tensor:
    """Coordinates beyond [0, 1] mirrored or repeated."""
    return torch.where(mirror > 0.5, (t - 2 * torch.round(t / 2)).abs(), t - torch.floor(t))


def _paint(view: View, light: Light, store: PhotoStore, hits: Hits, rays: Tensor, sub: int) -> Tensor:
    """b n: colour of the surface itself."""
    look, index = view.look, hits.index
    width, height = pick(extents(view.rects, view.rounds), index).unbind(-1)
    # The way into a recess moves the texture along, so that side walls are painted and not smeared.
    u, v = hits.u + hits.inset / width, hits.v + hits.inset / height
    crop = pick(look.crop, index)
    bays = pick(look.bays, index)
    recess = pick(look.recess, index)
    photo = pick(look.photo, index)
    bay_u, bay_v = u * bays[..., 0], v * bays[..., 1]
    # Footprint of a sub-pixel on the surface, in metres: oblique views lengthen it in one direction only.
    slant = dot(unit(rays), hits.normal).abs().clamp(min=0.05)
    footprint = 0.5 * hits.depth / view.camera.focal.unsqueeze(1) / slant.sqrt()
    blur = pick(look.blur, index)

    def level(density: Tensor) -> Tensor:  # photos per metre
        texels = footprint * density * store.size
        return spread_levels((torch.log2(texels.clamp(min=1e-3)) + blur).view(len(u), sub, -1)).view_as(u)

    in_recess = hits.recessed
    left, right, bottom, top = recess.unbind(-1)
    inner_u = (bay_u - torch.floor(bay_u) - left) / (right - left).clamp(min=0.05)
    inner_v = (bay_v - torch.floor(bay_v) - bottom) / (top - bottom).clamp(min=0.05)
    whole_u = crop[..., 0] + crop[..., 2] * u.clamp(0, 1)
    whole_v = crop[..., 1] + crop[..., 3] * (1 - v.clamp(0, 1))
    density = torch.maximum(crop[..., 2] / width, crop[..., 3] / height)
    bay_density = torch.maximum(bays[..., 0] / width, bays[..., 1] / height)
    base_photo = torch.where(in_recess, photo[..., 2], photo[..., 0])
    base = store.sample(
        base_photo,
        torch.where(in_recess, inner_u.clamp(0, 1), whole_u),
        torch.where(in_recess, 1 - inner_v.clamp(0, 1), whole_v),
        level(torch.where(in_recess, bay_density * 1.5, density)),
    )
    mirror = pick(look.mirror, index)
    detail = store.sample(photo[..., 1], _fold(bay_u, mirror), 1 - _fold(bay_v, mirror), level(bay_density))
    base, detail = _even(store, base_photo, base), _even(store, photo[..., 1], detail)
    colour = torch.lerp(base, detail, pick(look.mix, index))
    colour = pick(look.tone, index) + pick(look.contrast, index) * colour
    colour = colour.clamp(0.03, 1.1) * pick(light.gain, index)
    return torch.where(in_recess, colour * pick(look.recess_tone, index), colour)


def _even(store: PhotoStore, photo: Tensor, value: Tensor) -> Tensor:
    """Values with the photo's own brightness and contrast taken out, of a deviation of about 0.2."""
    mean, deviation = store.tone[photo].unbind(-1)
    return (value - mean) * (0.2 / deviation).clamp(0.5, 2.5)


def _in_shadow(view: View, light: Light, hits: Hits, point: Tensor, sun: Tensor, sub: int) -> Tensor:
    """b n: 1 where something stands between `point` (b n 3) and the sun."""
    b, n = hits.depth.shape
    # One sun for each of the sub-pixels: its penumbra comes out of their mean.
    start = (point + hits.normal * (0.002 * hits.depth + 0.01).unsqueeze(-1)).view(b, 1, sub, n // sub, 3)
    toward = light.sun.view(b, 1, sub, 1, 3)
    shadow = _rect_shadow(view, start, toward) | _round_shadow(view, start, toward)
    # In a recess: does the way to the sun leave through the opening?
    index = hits.index.clamp(max=view.normal.shape[1] - 1)
    rise = dot(pick(view.normal, index), sun).clamp(min=1e-3)
    across, up = pick(view.rects.across, index), pick(view.rects.up, index)
    way = hits.inset / rise
    u, v = hits.u + way * dot(per_length(across), sun), hits.v + way * dot(per_length(up), sun)
    bays, recess = pick(view.look.bays, index), pick(view.look.recess, index)
    u, v = u * bays[..., 0], v * bays[..., 1]
    u, v = u - torch.floor(hits.u * bays[..., 0]), v - torch.floor(hits.v * bays[..., 1])
    leaves = (u > recess[..., 0]) & (u < recess[..., 1]) & (v > recess[..., 2]) & (v < recess[..., 3])
    return (shadow.view(b, n) | (hits.recessed & ~leaves)).float()


def _rect_shadow(view: View, start: Tensor, toward: Tensor) -> Tensor:
    """start b 1 s n 3, toward b 1 s 1 3 -> b s n bool."""
    rects, normal = view.rects, view.normal[:, :, None, None]
    parts = (per_length(rects.across), per_length(rects.up), rects.corner)
    across, up, corner = (t[:, :, None, None] for t in parts)
    speed = dot(normal, toward)
    # Written as constant part plus linear part, so that nothing of b m s n 3 is ever stored.
    height = _dot_point(normal, start) - dot(normal, corner)
    way = -height / torch.where(speed.abs() < 1e-4, 1e-4, speed)
    u = _dot_point(across, start) - dot(across, corner) + way * dot(across, toward)
    v = _dot_point(up, start) - dot(up, corner) + way * dot(up, toward)
    cut = rects.taper[:, :, None, None] / 2 * v
    return ((way > 0) & (u >= cut) & (u + cut <= 1) & (v >= 0) & (v <= 1)).any(1)


def _dot_point(vector: Tensor, point: Tensor) -> Tensor:
    """b m 1 1 3, b 1 s n 3 -> b m s n."""
    return vector[..., 0] * point[..., 0] + vector[..., 1] * point[..., 1] + vector[..., 2] * point[..., 2]


def _round_shadow(view: View, start: Tensor, toward: Tensor) -> Tensor:
    """start b 1 s n 3, toward b 1 s 1 3 -> b s n bool."""
    r = view.rounds
    into = per_length(r.axes)[:, :, None, None]  # b m 1 1 3 3
    eye = [
        _dot_point(into[..., i, :], start) - dot(into[..., i, :], r.centre[:, :, None, None])
        for i in range(3)
    ]
    ray = [dot(into[..., i, :], toward) for i in range(3)]
    depth, _ = _round_depths(eye, ray, *(t[:, :, None, None] for t in (r.bulge, r.low, r.high)))
    return (depth < FARTHEST).any(1)


def _windows(view: View, light: Light, hits: Hits, colour: Tensor) -> Tensor:
    """Some recesses of this view glow: lit rooms behind windows."""
    bays = pick(view.look.bays, hits.index)
    column, row = torch.floor(hits.u * bays[..., 0]), torch.floor(hits.v * bays[..., 1])
    seed = column * 12.9898 + row * 78.233 + hits.index
    chance = torch.frac(torch.sin(seed) * 43758.5453).abs()
    return torch.where(hits.recessed & (chance < light.lit.unsqueeze(1)), 0.35 + 1.2 * colour, colour)


def _sky_and_people(
    view: View, light: Light, store: PhotoStore, people: People, rays: Tensor, sub: int
) -> Tensor:
    """b n: what people wear where there are any, else the sky: a gradient with clouds (a photo, mostly
    blurred), which belong to no world. One look into the photos for both."""
    b, n, _ = rays.shape
    ray = unit(rays)
    turn = (torch.atan2(ray[..., 1], ray[..., 0]) / torch.pi + light.sky_turn.unsqueeze(1)) * 1.5
    height = ray[..., 2].clamp(-1, 1)
    one = torch.ones_like(turn)
    brightness, gradient, clouds, blur = (t.unsqueeze(1) for t in light.sky.unbind(-1))
    # A photo is about two metres high on a person.
    texels = 0.25 * people.depth / view.camera.focal.unsqueeze(1) * store.size
    level = torch.where(people.met, torch.log2(texels.clamp(min=1e-3)), blur * one)
    level = spread_levels(level.view(b, sub, -1)).view(b, n)
    clothes = (people.who * store.count).long().clamp(max=store.count - 1)
    value = store.sample(
        torch.where(people.met, clothes, light.sky_photo.unsqueeze(1)),
        torch.where(people.met, 0.25 + 0.25 * people.u, _fold(turn, one)),
        torch.where(people.met, 1 - people.v.clamp(0, 1), _fold(height * 1.5, one)),
        level,
    )
    sky = (brightness + gradient * height + clouds * (value - 0.5)).clamp(0, 1.2)
    return torch.where(people.met, 0.15 + 0.6 * people.who * value + 0.3 * value, sky)
