"""Where a photo was taken: matched to photos of a map, whose pixels are known in space, its pose follows.

Matches are pairs (query, map photo). What they say about points of the map is put together over all map
photos of a query before its pose is estimated once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from prism_match.cameras import Camera
from prism_match.colmap_model import quaternion_of, rotation_of
from prism_match.engine.photos import scale_points
from prism_match.errors import UserError
from prism_match.files import atomic_path, parse_lines, read_words
from prism_match.geometry import pose_matrix
from prism_match.images import to_stored
from prism_match.maps.landmarks import Map, stored_orientation
from prism_match.maps.pnp import LEAST, PnpBackend, estimate_camera_pose
from prism_match.maps.tracks import weighted_means
from prism_match.matches import Matches
from prism_match.polish import local_affine

MERGE_RADIUS = 4.0  # pixels of the query within which two sightings of a point are one


@dataclass(frozen=True)
class Query:
    name: str
    path: Path
    camera: Camera
    orientation: int = 1  # EXIF's, where the camera, and so the pose, is of the photo as it is stored

    @staticmethod
    def stored(name: str, path: Path, camera: Camera) -> Query:
        """Whose camera is given for its file, whatever EXIF says, as COLMAP and hloc have it."""
        return Query(name, path, camera, stored_orientation(path, camera))


@dataclass(frozen=True)
class Localized:
    """How it went for one query."""

    name: str
    T: np.ndarray | None  # 4 4, float64: world to camera; None: no pose
    inliers: int
    correspondences: int
    references: dict[str, int]  # map photos, in the order of their rank: correspondences from each
    problem: str = ""  # why there is no pose of its own
    # Map photos that were not used, since they show another place: the probability that it is the same.
    elsewhere: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        pose = None if self.T is None else pose_numbers(self.T).tolist()
        return {"pose": pose, **{k: v for k, v in vars(self).items() if k != "T"}}


@dataclass(frozen=True)
class Correspondences:
    """m sightings of places in the world by a query."""

    pixels: np.ndarray  # m 2, float64
    xyz: np.ndarray  # m 3, float64
    points: np.ndarray  # m: the map's number of the place, or -1
    scores: np.ndarray  # m


def localize(
    query: Query,
    found: Sequence[tuple[str, Matches]],
    world: Map,
    *,
    threshold: float = 12.0,
    backend: PnpBackend = "auto",
    seed: int = 0,
    min_inliers: int = LEAST,
    same_place: float = 0.0,
    problems: Sequence[str] = (),
) -> Localized:
    """found: names of map photos with the matches of (query, photo), in pixels of the files.
    threshold: of RANSAC, in pixels of the query's camera. same_place: photos of the map that show the query's
    place with less probability are not used. problems: why it was not matched with others."""
    parts: list[Correspondences] = []
    references, elsewhere, problems = {}, {}, list(problems)
    for name, matches in found:
        references[name] = 0
        likely = matches.same_place if same_place > 0 else None
        if likely is not None and likely < same_place:
            elsewhere[name] = likely
            continue
        try:
            parts.append(lift_matches(query, name, matches, world))
            references[name] = len(parts[-1].scores)
        except UserError as error:
            problems.append(str(error))
    if elsewhere:
        best = max(elsewhere.values())
        which = f"{len(elsewhere)} of {len(found)} map photos"
        problems.append(f"{which} show another place (at most {best:.0%} likely the same)")
    merged = merge(parts)
    count = len(merged.scores)
    pose = estimate_camera_pose(merged.pixels, merged.xyz, query.camera, threshold, backend, seed)
    if pose.T is None or pose.num_inliers < min_inliers:
        inliers = pose.num_inliers
        reason = f"{count} points of the map found" + (f", {inliers} agree" if count >= LEAST else "")
        problem = "; ".join([reason, *problems])
        return Localized(query.name, None, inliers, count, references, problem, elsewhere)
    return Localized(query.name, pose.T, pose.num_inliers, count, references, elsewhere=elsewhere)


def lift_matches(query: Query, name: str, matches: Matches, world: Map) -> Correspondences:
    """The matches of a query and a map photo whose pixel in the latter is known in space. A match that was
    snapped by some pixels in the map photo is moved in the query by as much as its neighbours say."""
    here, size = to_stored(matches.keypoints0.astype(float), matches.size0, query.orientation)
    here = to_camera_pixels(here, size, query.camera, query.name)
    there, size = to_stored(matches.keypoints1.astype(float), matches.size1, world.orientation(name))
    camera = world.camera(name)
    if camera is not None:
        there = to_camera_pixels(there, size, camera, name)
    lifted = world.lift(name, there, matches.scores)
    moved = transport(there, here, lifted.rows, lifted.pixels - there[lifted.rows])
    return Correspondences(moved, lifted.xyz, lifted.points, matches.scores[lifted.rows].astype(float))


def to_camera_pixels(points: np.ndarray, size: tuple[int, int], camera: Camera, name: str) -> np.ndarray:
    """n 2 in pixels of a file of `size` -> those of its camera: the same photo may be kept smaller."""
    if size == (camera.width, camera.height):
        return points
    if abs(camera.width / size[0] / (camera.height / size[1]) - 1) > 0.02:
        wanted = f"{camera.width}x{camera.height}"
        raise UserError(f"{name}: the photo is {size[0]}x{size[1]}, its camera is for {wanted}")
    return scale_points(points, size, (camera.width, camera.height))


def transport(source: np.ndarray, target: np.ndarray, rows: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """m 2: target[rows], moved by what `offset` (m 2) in the source image is in the target image.

    Matches are source n 2 -> target n 2. Around each, the map from one image to the other is nearly
    affine, and its neighbours tell which."""
    if not len(rows) or not np.abs(offset).max(initial=0) > 0:
        return target[rows]
    stretch = local_affine(torch.from_numpy(source), torch.from_numpy(target), rounds=4).numpy()
    return target[rows] + np.einsum("mij,mj->mi", stretch[rows], offset)


def merge(parts: Iterable[Correspondences]) -> Correspondences:
    """What several map photos say of one query. A point that several of them show comes once, in the mean
    of its sightings that are near to the best one, weighed by score; what is elsewhere stays on its own.
    Sightings of places without number all stay."""
    parts = list(parts)
    pixels = np.concatenate([np.empty((0, 2)), *(p.pixels for p in parts)])
    xyz = np.concatenate([np.empty((0, 3)), *(p.xyz for p in parts)])
    points = np.concatenate([np.empty(0, np.int64), *(p.points for p in parts)]).astype(np.int64)
    scores = np.concatenate([np.empty(0), *(p.scores for p in parts)])
    order = np.lexsort((-scores, points))
    pixels, xyz, points, scores = (x[order] for x in (pixels, xyz, points, scores))
    first = np.searchsorted(points, points, "left")  # the best sighting of the same point
    first = np.where(points < 0, np.arange(len(points)), first)
    near = np.linalg.norm(pixels - pixels[first], axis=1) <= MERGE_RADIUS
    group = np.where(near, first, np.arange(len(points)))
    mean, total = weighted_means(pixels, np.maximum(scores, 1e-6), group, len(group))
    kept = np.flatnonzero(total > 0)
    return Correspondences(mean[kept], xyz[kept], points[kept], scores[kept])


def with_fallback(result: Localized, world: Map, ranked: Sequence[str]) -> Localized:
    """Where there is no pose, that of the map photo most like the query, the first of those ranked;
    `problem` stays."""
    if result.T is not None:
        return result
    poses = (world.pose(name) for name in ranked)
    return replace(result, T=next((T for T in poses if T is not None), None))


# ---- files


def pose_numbers(T: np.ndarray) -> np.ndarray:
    """qw qx qy qz tx ty tz of a pose 4 4, world to camera, as COLMAP and the benchmarks write it."""
    return np.concatenate([quaternion_of(T[:3, :3]), T[:3, 3]])


def write_poses(path: Path, poses: Mapping[str, np.ndarray]) -> None:
    """`name qw qx qy qz tx ty tz` a line."""
    lines = [f"{name} {' '.join(f'{x:.12g}' for x in pose_numbers(T))}\n" for name, T in poses.items()]
    with atomic_path(path) as temporary:
        temporary.write_text("".join(lines), encoding="utf-8")


def read_poses(path: Path) -> dict[str, np.ndarray]:
    """What `write_poses` wrote: 4 4, world to camera, by name."""

    def parse(words: list[str]) -> tuple[str, np.ndarray]:
        name = " ".join(words[:-7])  # phones name photos with spaces
        numbers = np.array(words[-7:] if name else [], float)
        if not name or not np.isfinite(numbers).all() or not numbers[:4].any():
            raise ValueError("expected name qw qx qy qz tx ty tz")
        return name, pose_matrix(rotation_of(numbers[:4]), numbers[4:])

    return dict(parse_lines(path, parse))


def read_retrieval(path: Path) -> dict[str, list[str]]:
    """`query map_photo` a line, best first, as hloc's lists of pairs; map photos by query."""
    pairs: dict[str, list[str]] = {}
    for number, words in read_words(path):
        if len(words) != 2:
            raise UserError(f"{path}, line {number}: {len(words)} words, expected a query and a map photo")
        pairs.setdefault(words[0], []).append(words[1])
    if not pairs:
        raise UserError(f"{path}: no pairs in it")
    return pairs
