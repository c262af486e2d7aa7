"""COLMAP models, text or binary: posed photos and the sparse points they share.

Pixel convention: everything handed out has the centre of the top-left pixel at (0, 0); COLMAP has it at
(0.5, 0.5), so key points and principal points lose half a pixel on the way in.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PureWindowsPath
from typing import TypeVar

import numpy as np

from prism_match.cameras import CAMERA_MODELS, Camera, parse_camera
from prism_match.errors import UserError
from prism_match.geometry import camera_centres, pose_matrix

Parsed = TypeVar("Parsed")
BINARY_MODELS = tuple(CAMERA_MODELS)  # COLMAP's ids from 0


@dataclass(frozen=True)
class PosedView:
    """One posed photo of a model."""

    name: str
    camera: Camera
    T: np.ndarray  # 4 4, float64: world to camera
    pixels: np.ndarray  # n 2, float32: where the points were seen
    points: np.ndarray  # n, int64: rows of Model.points, each once

    @property
    def width(self) -> int:
        return self.camera.width

    @property
    def height(self) -> int:
        return self.camera.height

    @property
    def K(self) -> np.ndarray:
        """3 3, float64; of a distorted camera, what is left without the distortion."""
        return self.camera.K

    @property
    def centre(self) -> np.ndarray:
        return camera_centres(self.T)

    def depth_of(self, xyz: np.ndarray) -> np.ndarray:
        """n: depth along the optical axis of world points n 3."""
        return xyz @ self.T[2, :3] + self.T[2, 3]


@dataclass(frozen=True)
class Model:
    """Posed views and the sparse points they share."""

    path: Path
    views: tuple[PosedView, ...]
    points: np.ndarray  # p 3, float64
    colours: np.ndarray | None = None  # p 3, uint8; None: not known

    @cached_property
    def _tracks(self) -> tuple[np.ndarray, np.ndarray]:
        """Views of each point, one after the other, and where each point's begin (p + 1)."""
        ids = np.concatenate([v.points for v in self.views])
        views = np.repeat(np.arange(len(self.views)), [len(v.points) for v in self.views])
        order = np.argsort(ids, kind="stable")
        return views[order], np.searchsorted(ids[order], np.arange(len(self.points) + 1))

    def seen_by(self, point: int) -> np.ndarray:
        """The views that see a point, given by its row."""
        seen_by, start = self._tracks
        return seen_by[start[point] : start[point + 1]]

    def shared_counts(self, view: int) -> np.ndarray:
        """One number per view: how many points it shares with `view` (0 with itself)."""
        seen_by, start = self._tracks
        ids = self.views[view].points
        spans = [seen_by[start[i] : start[i + 1]] for i in ids]
        counts = np.bincount(np.concatenate(spans) if spans else [], minlength=len(self.views))
        counts[view] = 0
        return counts

    def shared(self, a: int, b: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Points seen by views `a` and `b`: their ids, and their rows in each view's lists."""
        return np.intersect1d(self.views[a].points, self.views[b].points, True, return_indices=True)


def read_model(path: Path | str) -> Model:
    """Reads `cameras`, `images` and `points3D` (`.bin` or `.txt`) from `path` or `path[/sparse][/0]`.

    Raises UserError with one line naming the file that is missing or damaged.
    """
    found = _find(Path(path))
    if found is None:
        raise UserError(f"{path}: no COLMAP model here (no images.bin or images.txt)")
    folder, suffix = found
    read_cameras, read_images, read_points = _READERS[suffix]
    cameras = _guarded(read_cameras, folder / f"cameras{suffix}")
    ids, xyz, rgb = _guarded(read_points, folder / f"points3D{suffix}")
    order = np.argsort(ids)
    ids, xyz, rgb = ids[order], xyz[order], rgb[order]
    file = folder / f"images{suffix}"
    views = tuple(_view(file, image, cameras, ids) for image in _guarded(read_images, file))
    if not views:
        raise UserError(f"{file}: no images in it")
    return Model(folder, views, xyz, rgb)


# ---- file formats


def is_model(path: Path) -> bool:
    """Whether `read_model` finds a model there."""
    return _find(path) is not None


def _find(path: Path) -> tuple[Path, str] | None:
    for folder in (path, path / "0", path / "sparse", path / "sparse" / "0"):
        for suffix in (".bin", ".txt"):
            if (folder / f"images{suffix}").is_file():
                return folder, suffix
    return None


def _guarded(read: Callable[[Path], Parsed], file: Path) -> Parsed:
    """`read(file)`, with whatever a damaged file makes it raise turned into one line."""
    try:
        return read(file)
    except FileNotFoundError:
        raise UserError(f"{file}: missing") from None
    except (ValueError, ArithmeticError, LookupError, struct.error, MemoryError, OSError) as e:
        reason = str(e) if str(e).startswith(str(file)) else f"{file}: damaged ({e})"
        raise UserError(reason) from e


def _view(file: Path, image: tuple, cameras: dict[int, Camera], point_ids: np.ndarray) -> PosedView:
    name, quaternion, translation, camera, xys, ids = image
    if ".." in PureWindowsPath(name).parts or PureWindowsPath(name).anchor or "\0" in name:
        # Photos are read, and depth maps written, under this name.
        raise UserError(f"{file}: the name of image {name!r} leads outside the folder of the images")
    if camera not in cameras:
        raise UserError(f"{file}: image {name} has camera {camera}, which is not in the model")
    ids, first = np.unique(ids, return_index=True)  # a point seen twice in one image counts once
    rows = np.searchsorted(point_ids, ids)
    rows = np.minimum(rows, max(len(point_ids) - 1, 0))
    known = point_ids[rows] == ids if len(point_ids) else np.zeros(len(ids), bool)
    T = pose_matrix(rotation_of(np.asarray(quaternion, float)), translation)
    pixels = (xys[first[known]] - 0.5).astype(np.float32)
    return PosedView(name, cameras[camera], T, pixels, rows[known])


def rotation_of(q: np.ndarray) -> np.ndarray:
    """3 3 from a quaternion w x y z; NaN where the quaternion is NaN or zero."""
    with np.errstate(invalid="ignore", divide="ignore"):
        w, x, y, z = q / np.linalg.norm(q)
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )


def quaternion_of(rotation: np.ndarray) -> np.ndarray:
    """w x y z, with w at least 0, of a rotation 3 3."""
    m = np.asarray(rotation, float)
    # The eigenvector of the largest eigenvalue: as exact for turns by 180 degrees as for any.
    K = np.array([
        [m[0, 0] - m[1, 1] - m[2, 2], 0, 0, 0],
        [m[0, 1] + m[1, 0], m[1, 1] - m[0, 0] - m[2, 2], 0, 0],
        [m[0, 2] + m[2, 0], m[1, 2] + m[2, 1], m[2, 2] - m[0, 0] - m[1, 1], 0],
        [m[2, 1] - m[1, 2], m[0, 2] - m[2, 0], m[1, 0] - m[0, 1], m[0, 0] + m[1, 1] + m[2, 2]],
    ])  # fmt: skip
    x, y, z, w = np.linalg.eigh(K)[1][:, -1]
    return np.array([w, x, y, z]) * (-1 if w < 0 else 1)


def _lines(file: Path) -> Iterator[str]:
    with open(file, encoding="utf-8") as f:
        for line in f:
            if not line.startswith("#"):
                yield line.rstrip("\n")


def _cameras_text(file: Path) -> dict[int, Camera]:
    rows = [line.split() for line in _lines(file) if line.strip()]
    return {int(number): parse_camera(words) for number, *words in rows}


def _images_text(file: Path) -> list:
    images = []
    lines = _lines(file)
    for line in lines:
        if not line.strip():
            continue
        words = line.split(maxsplit=9)
        if len(words) != 10:
            raise UserError(f"expected 10 words in an image's line, found {len(words)}")
        pose = np.array(words[1:8], float)
        seen = np.array(next(lines, "").split(), float).reshape(-1, 3)
        seen = seen[seen[:, 2] >= 0]
        images.append((words[9], pose[:4], pose[4:], int(words[8]), seen[:, :2], seen[:, 2].astype(np.int64)))
    return images


def _points_text(file: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows = [line.split(maxsplit=7)[:7] for line in _lines(file) if line.strip()]
    ids = np.array([int(r[0]) for r in rows], np.int64)
    numbers = np.array([r[1:] for r in rows], float).reshape(len(rows), 6)
    return ids, numbers[:, :3], numbers[:, 3:].astype(np.uint8)


class _Bytes:
    """A cursor over a little-endian file."""

    def __init__(self, file: Path):
        self.data, self.at = file.read_bytes(), 0

    def take(self, layout: str) -> tuple:
        values = struct.unpack_from("<" + layout, self.data, self.at)
        self.at += struct.calcsize("<" + layout)
        return values

    def array(self, dtype: np.dtype, count: int) -> np.ndarray:
        values = np.frombuffer(self.data, dtype, count, self.at)
        self.at += values.nbytes
        return values

    def string(self) -> str:
        end = self.data.index(b"\0", self.at)
        text = self.data[self.at : end].decode()
        self.at = end + 1
        return text


def _cameras_binary(file: Path) -> dict[int, Camera]:
    data, cameras = _Bytes(file), {}
    for _ in range(data.take("Q")[0]):
        number, code, width, height = data.take("iiQQ")
        model = BINARY_MODELS[code] if 0 <= code < len(BINARY_MODELS) else f"number {code}"
        params = data.array(np.dtype("<f8"), CAMERA_MODELS.get(model, (0, 0))[0])
        cameras[number] = Camera(model, width, height, tuple(params.tolist()))
    return cameras


def _images_binary(file: Path) -> list:
    data, images = _Bytes(file), []
    observation = np.dtype([("xy", "<f8", 2), ("id", "<i8")])
    for _ in range(data.take("Q")[0]):
        _, *pose, camera = data.take("i7di")
        name = data.string()
        seen = data.array(observation, data.take("Q")[0])
        seen = seen[seen["id"] >= 0]
        images.append((name, pose[:4], pose[4:], camera, seen["xy"], seen["id"]))
    return images


def _points_binary(file: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    data, ids, xyz, rgb = _Bytes(file), [], [], []
    for _ in range(data.take("Q")[0]):
        number, *point = data.take("Q3d3Bd")
        ids.append(number)
        xyz.append(point[:3])
        rgb.append(point[3:6])
        (track,) = data.take("Q")
        data.at += 8 * track
    colours = np.array(rgb, np.uint8).reshape(-1, 3)
    return np.array(ids, np.int64), np.array(xyz, float).reshape(-1, 3), colours


_READERS = {
    ".txt": (_cameras_text, _images_text, _points_text),
    ".bin": (_cameras_binary, _images_binary, _points_binary),
}
