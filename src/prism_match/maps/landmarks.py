"""Maps to localize in: what lies behind the pixels of their photos.

SfmMap    a COLMAP model: pixels are snapped to the points that the photo is known to show (Aachen)
DepthMap  photos with depth maps and poses: pixels are lifted by their depth
ScanMap   photos with the position of each pixel in a laser scan (InLoc)
"""

from __future__ import annotations

import struct
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from prism_match.cameras import Camera, pinhole
from prism_match.colmap_model import Model, PosedView, is_model, read_model
from prism_match.engine.photos import content_of
from prism_match.errors import UserError
from prism_match.files import is_file
from prism_match.frames import Frame, is_sequence, read_depth, read_sequence
from prism_match.geometry import pose_matrix
from prism_match.images import exif_orientation, image_size, stored_size
from prism_match.maps.stages import Origin, origin_of
from prism_match.maps.tracks import one_to_one

# How far from a point of the map a match may be, as a share of the photo's longer side. A cell of 8 pixels
# at 832 is 1 % of it: less, and most points of the map lie between the matches.
SNAP_SHARE = 0.012
# Corners of a pixel whose positions differ by more than this share of their distance are on two surfaces.
SAME_SURFACE = 0.02


class Lifted(NamedTuple):
    """m of n pixels of a map photo, with their place in the world."""

    rows: np.ndarray  # m: which of the n
    xyz: np.ndarray  # m 3, float64
    points: np.ndarray  # m: the number of the map's point; -1 where points have none
    pixels: np.ndarray  # m 2: where in the photo that place is seen exactly


class Map(ABC):
    """Photos, and what lies behind their pixels."""

    names: Sequence[str]  # of the photos

    @abstractmethod
    def path(self, name: str) -> Path: ...

    @abstractmethod
    def lift(self, name: str, pixels: np.ndarray, scores: np.ndarray) -> Lifted:
        """pixels: n 2, scores: n."""

    def camera(self, name: str) -> Camera | None:
        """None: not known."""
        return None

    def pose(self, name: str) -> np.ndarray | None:
        """4 4, world to camera; None: not known."""
        return None

    def orientation(self, name: str) -> int:
        """EXIF's, where the map has the pixels of the photo as it is stored, as depth maps and scans do,
        which know nothing of EXIF; 1: as it is shown."""
        return exif_orientation(self.path(name))


class SfmMap(Map):
    def __init__(self, model: Model, image_dir: Path, radius: float | None = None, *, as_shown: bool = False):
        """radius: in pixels of the photos, how far from a point of the map a match may be; None: 1.2 % of
        the longer side. as_shown: the model has the pixels of the photos as EXIF turns them, as those of
        `prism sfm`; COLMAP leaves them as they are stored."""
        if radius is not None and not radius > 0:
            raise UserError(f"the radius for snapping must be positive, not {radius}")
        self.model, self.image_dir, self.radius, self.as_shown = model, image_dir, radius, as_shown
        self.views: dict[str, PosedView] = {v.name: v for v in model.views if np.isfinite(v.T).all()}
        self.names = sorted(self.views)

    def leave_out(self, changed: set[str]) -> None:
        for name in sorted(changed):
            print(
                f"prism: left out of the map: {self.path(name)}: has changed since it was made",
                file=sys.stderr,
            )
        self.names = [name for name in self.names if name not in changed]
        if not self.names:
            raise UserError(f"{self.image_dir}: all photos have changed since the map was made of them")

    def path(self, name: str) -> Path:
        return self.image_dir / name

    def camera(self, name: str) -> Camera:
        return self.views[name].camera

    def orientation(self, name: str) -> int:
        return 1 if self.as_shown else stored_orientation(self.path(name), self.camera(name))

    def pose(self, name: str) -> np.ndarray:
        return self.views[name].T

    def lift(self, name: str, pixels: np.ndarray, scores: np.ndarray) -> Lifted:
        view = self.views[name]
        radius = SNAP_SHARE * max(view.width, view.height) if self.radius is None else self.radius
        rows, seen = snap(pixels, scores, view.pixels, radius)
        points = view.points[seen]
        return Lifted(rows, self.model.points[points], points, view.pixels[seen].astype(float))


def stored_orientation(path: Path, camera: Camera) -> int:
    """EXIF's orientation of a photo, whose camera is for the photo as it is stored; 1 where the camera's
    shape says that it is for the photo as it is shown."""
    orientation = exif_orientation(path)
    shown = image_size(path)
    if orientation >= 5 and shown is not None:
        upright = abs(np.log(camera.width / camera.height * shown[1] / shown[0]))
        stored = abs(np.log(camera.width / camera.height * shown[0] / shown[1]))
        return 1 if upright < stored else orientation
    return orientation


def snap(
    pixels: np.ndarray, scores: np.ndarray, targets: np.ndarray, radius: float
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (i, j), m each, of pixels n 2 and targets p 2 at most `radius` apart. No pixel and no target is
    in two of them: the nearest go together first, of equally near ones the pixel with the higher score."""
    i, j, distance = _within(pixels, targets, radius)
    order = np.lexsort((j, -scores[i], distance))
    i, j = i[order], j[order]
    kept = one_to_one(i, j, -distance[order])
    return i[kept], j[kept]


def _within(
    pixels: np.ndarray, targets: np.ndarray, radius: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All pairs at most `radius` apart, and their distance. Targets are sorted into cells of that size,
    so that only nine of them have to be looked at for a pixel."""
    if not len(pixels) or not len(targets):
        return np.empty(0, int), np.empty(0, int), np.empty(0)
    pixels, targets = np.asarray(pixels, float), np.asarray(targets, float)
    low = np.minimum(pixels.min(0), targets.min(0)) - radius
    cell_p, cell_t = (np.floor((x - low) / radius).astype(np.int64) for x in (pixels, targets))
    columns = int(max(cell_p[:, 0].max(), cell_t[:, 0].max())) + 2
    key_t = cell_t[:, 1] * columns + cell_t[:, 0]
    order = np.argsort(key_t, kind="stable")
    sorted_keys = key_t[order]
    found = []
    for dy in (-1, 0, 1):
        keys = (cell_p[:, 1] + dy) * columns + cell_p[:, 0]
        # Three neighbouring cells of a row are one span of sorted keys.
        start = np.searchsorted(sorted_keys, keys - 1, "left")
        count = np.searchsorted(sorted_keys, keys + 1, "right") - start
        i = np.repeat(np.arange(len(pixels)), count)
        offset = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        found.append((i, order[np.repeat(start, count) + offset]))
    i, j = (np.concatenate(x) for x in zip(*found, strict=True))
    distance = np.linalg.norm(pixels[i] - targets[j], axis=1)
    near = distance <= radius
    return i[near], j[near], distance[near]


class DepthMap(Map):
    """Frames with depth maps, whose size may differ from that of the photos."""

    def __init__(self, frames: dict[str, Frame], per_metre: float = 1000.0):
        """per_metre: what a depth map's PNG has for a metre."""
        if not 0 < per_metre < float("inf"):
            raise UserError(f"the scale of depth must be positive, not {per_metre}")
        self.frames, self.names = frames, list(frames)
        self.poses = {name: rigid(frame.T) for name, frame in frames.items()}
        self._depth = lru_cache(maxsize=16)(lambda name: read_depth(frames[name].depth, per_metre))

    def path(self, name: str) -> Path:
        return self.frames[name].image

    def camera(self, name: str) -> Camera:
        frame = self.frames[name]
        return pinhole(frame.K, *stored_size(frame.image))

    def pose(self, name: str) -> np.ndarray:
        return self.poses[name]

    def lift(self, name: str, pixels: np.ndarray, scores: np.ndarray) -> Lifted:
        depth, camera, T = self._depth(name), self.camera(name), self.poses[name]
        scale = np.array(depth.shape[::-1]) / [camera.width, camera.height]
        corners, weights = _corners((pixels + 0.5) * scale - 0.5, depth.shape)
        z = depth[corners[..., 1], corners[..., 0]]  # n 4
        where = ((corners + 0.5) / scale - 0.5).reshape(-1, 2)
        rays = np.concatenate([camera.normalise(where), np.ones((len(where), 1))], axis=1).reshape(-1, 4, 3)
        rows, local = _on_surface(np.where(z > 0, z, np.nan)[..., None] * rays, weights)
        xyz = (local - T[:3, 3]) @ T[:3, :3]
        return Lifted(rows, xyz, np.full(len(rows), -1), np.asarray(pixels, float)[rows])


def rigid(T: np.ndarray) -> np.ndarray:
    """4 4: the nearest pose with a true rotation, from the same place. Those of RGB-D sequences come from
    long chains of products and have shrunk a little."""
    U, _, Vt = np.linalg.svd(T[:3, :3])
    R = U @ np.diag([1, 1, np.sign(np.linalg.det(U @ Vt))]) @ Vt
    centre = -np.linalg.solve(T[:3, :3], T[:3, 3])
    return pose_matrix(R, -R @ centre)


class ScanMap(Map):
    """InLoc's cutouts: beside each photo NAME lies NAME.mat with the position of each pixel in its scan,
    and under database/alignments the transformation of the scan into the building."""

    def __init__(self, root: Path, names: Sequence[str]):
        self.root, self.names = root, list(names)
        self._scan = lru_cache(maxsize=8)(read_scan)

    def path(self, name: str) -> Path:
        return self.root / name

    def lift(self, name: str, pixels: np.ndarray, scores: np.ndarray) -> Lifted:
        scan, T = self._scan(self.root / f"{name}.mat"), read_scan_pose(self.root, name)
        corners, weights = _corners(pixels, scan.shape[:2])
        rows, local = _on_surface(scan[corners[..., 1], corners[..., 0]], weights)
        xyz = local @ T[:3, :3].T + T[:3, 3]
        return Lifted(rows, xyz, np.full(len(rows), -1), np.asarray(pixels, float)[rows])


def read_scan(path: Path) -> np.ndarray:
    """h w 3, float64: `XYZcut` of a .mat file, of MATLAB 5 or 7.3 (which is HDF5); NaN where nothing is."""
    import h5py

    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        if h5py.is_hdf5(path):
            with h5py.File(path, "r") as file:
                scan = np.asarray(file["XYZcut"], float).T  # MATLAB's order of axes is the reverse
        else:
            scan = read_matlab(path.read_bytes(), "XYZcut").astype(float)
    except (OSError, KeyError, ValueError, TypeError, struct.error, zlib.error) as error:
        raise UserError(f"{path}: no scan can be read from it ({error})") from error
    if scan.ndim != 3 or scan.shape[2] != 3:
        raise UserError(f"{path}: a scan of shape {scan.shape}, expected height x width x 3")
    return scan


# Types of data in a MATLAB 5 file, by their number.
MATLAB_TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
MATLAB_MATRIX, MATLAB_COMPRESSED = 14, 15


def read_matlab(data: bytes, name: str) -> np.ndarray:
    """A real, full array of a MATLAB 5 file. Raises ValueError where there is none of that name."""
    if len(data) < 128 or data[126:128] != b"IM":
        raise ValueError("not a MATLAB file")
    for kind, element in _elements(data[128:]):
        if kind == MATLAB_COMPRESSED:
            kind, element = next(_elements(zlib.decompress(element)), (0, b""))
        if kind != MATLAB_MATRIX:
            continue
        (_, _), (_, dimensions), (_, label), *values = _elements(element)
        if label.decode("latin1") == name and values and values[0][0] in MATLAB_TYPES:
            shape = np.frombuffer(dimensions, "<i4")
            array = np.frombuffer(values[0][1], "<" + MATLAB_TYPES[values[0][0]])
            return array.reshape(shape, order="F")
    raise ValueError(f"no array {name} in it")


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The parts that a stretch of a MATLAB 5 file consists of: type and bytes."""
    at = 0
    while at + 8 <= len(data):
        kind, size = struct.unpack_from("<II", data, at)
        if kind >> 16:  # up to four bytes are in the tag itself
            yield kind & 0xFFFF, data[at + 4 : at + 4 + (kind >> 16)]
            at += 8
        else:
            yield kind, data[at + 8 : at + 8 + size]
            at += 8 + size
            if kind != MATLAB_COMPRESSED:
                at += -size % 8


def read_scan_pose(root: Path, name: str) -> np.ndarray:
    """4 4, scan to building: of the two in the file the second, after its fine alignment."""
    parts = Path(name).parts
    if len(parts) < 3:
        raise UserError(f"{name}: not a cutout's name (.../FLOOR/SCAN/BUILDING_cutout_...)")
    floor, scan, building = parts[-3], parts[-2], parts[-1].split("_")[0]
    path = root / "database" / "alignments" / floor / "transformations" / f"{building}_trans_{scan}.txt"
    try:
        rows = [np.array(line.split(), float) for line in path.read_text().splitlines()[7:11]]
        T = np.array(rows, float)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not the alignment of a scan ({error})") from error
    if T.shape != (4, 4) or not np.isfinite(T).all():
        raise UserError(f"{path}: not the alignment of a scan")
    return T


def _corners(points: np.ndarray, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The four pixels (x, y) around each of n points, n 4 2, and their bilinear weights, n 4."""
    height, width = shape[:2]
    points = np.clip(np.asarray(points, float), 0, [width - 1, height - 1])
    first = np.minimum(np.floor(points).astype(int), np.maximum([width - 2, height - 2], 0))
    x, y = (points - first).T
    corners = first[:, None] + np.array([[0, 0], [1, 0], [0, 1], [1, 1]])
    corners = np.minimum(corners, [width - 1, height - 1])
    return corners, np.stack([(1 - x) * (1 - y), x * (1 - y), (1 - x) * y, x * y], axis=1)


def _on_surface(xyz: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows m of n points whose nearest corner is known, and their positions m 3: interpolated where all
    corners (n 4 3) are on one surface, that of the nearest corner elsewhere."""
    nearest = xyz[np.arange(len(xyz)), weights.argmax(axis=1)]  # n 3
    reach = np.linalg.norm(xyz - nearest[:, None], axis=2).max(axis=1, initial=0)  # NaN where one is unknown
    smooth = reach <= SAME_SURFACE * np.linalg.norm(nearest, axis=1)
    mean = (xyz * weights[..., None]).sum(axis=1)
    rows = np.flatnonzero(np.isfinite(nearest).all(axis=1))
    return rows, np.where(smooth[:, None], mean, nearest)[rows]


def without(model: Model, name: str) -> Model:
    """A model without one of its photos: its key points, and the points that fewer than two other photos
    show, are gone. The rest stays where it is, though that photo had its say in it."""
    views = [v for v in model.views if v.name != name]
    counts = np.bincount(np.concatenate([v.points for v in views]), minlength=len(model.points))
    shown = [(v, counts[v.points] >= 2) for v in views]
    kept = [replace(v, pixels=v.pixels[twice], points=v.points[twice]) for v, twice in shown]
    return replace(model, views=tuple(kept))


def photo_folders(model: Model, path: Path, images: Path | None) -> tuple[Origin, list[Path]]:
    """Of a COLMAP model that was read from `path`: where it comes from, and where its photos may be, the
    likeliest folder first. images: the folder that was told, which is the only one then."""
    origin, around = origin_of(model.path), path.resolve()
    beside = [f / "images" for f in (around, *list(around.parents)[:2])]
    return origin, [images] if images else [origin.photos, *beside] if origin.photos else beside


def changed_photos(world: SfmMap, digests: Mapping[str, str]) -> set[str]:
    """Those that are no longer what the map was made of."""
    there = [name for name in world.names if name in digests and is_file(world.path(name))]
    return {name for name in there if content_of(world.path(name)) != digests[name]}


def open_map(
    path: Path,
    images: Path | None,
    snap: float | None,
    depth_scale: float,
    listed: dict[str, list[str]] | None,
) -> Map:
    """Which kind of map it is, its files tell."""
    if not path.exists():
        raise UserError(f"{path}: no such folder")
    if is_model(path):
        model = read_model(path)
        origin, candidates = photo_folders(model, path, images)
        folder = next((f for f in candidates if f.is_dir()), None)
        if folder is None:
            raise UserError(f"{candidates[0]}: no such folder; tell with --images where the map's photos are")
        world = SfmMap(model, folder, snap, as_shown=origin.made_here)
        if images is None and folder == origin.photos:  # not upright copies, or those of others
            world.leave_out(changed_photos(world, origin.contents))
        return world
    if is_sequence(path):
        frames = {frame.image.name: frame for frame in read_sequence(path)}
        if not frames:
            raise UserError(f"{path}: no frame of the sequence can be used")
        return DepthMap(frames, depth_scale)
    if (path / "database" / "cutouts").is_dir():
        scans = sorted((path / "database" / "cutouts").rglob("*.mat"))
        names = [p.with_suffix("").relative_to(path).as_posix() for p in scans]
        if listed is not None:
            wanted = {r for photos in listed.values() for r in photos}
            names = [n for n in names if n in wanted]
        return ScanMap(path, names)
    raise UserError(f"{path}: neither a COLMAP model, an RGB-D sequence nor InLoc's data")
