"""Photos with depth maps and poses on disk: gray images, depth maps, and RGB-D sequences.

A sequence is ScanNet's, or any folder of colour, depth and pose files:

    SCENE/color/0.jpg  SCENE/depth/0.png  SCENE/pose/0.txt  SCENE/intrinsic/intrinsic_color.txt   (ScanNet)
    SCENE/NAME.color.jpg  SCENE/NAME.depth.png  SCENE/NAME.pose.txt  SCENE/camera-intrinsics.txt

Depth is in millimetres, 16-bit PNG; poses are 4 x 4 matrices from camera to world.
"""

from __future__ import annotations

import io
import logging
from dataclasses import dataclass
from pathlib import Path

import cv2
import h5py
import numpy as np

from prism_match.errors import UserError
from prism_match.files import is_file, new_h5, read_dataset
from prism_match.images import claims_too_much, known_formats, quiet_pillow

log = logging.getLogger(__name__)

PNG = b"\x89PNG\r\n\x1a\n"
COLOUR = (".jpg", ".jpeg", ".png")
INTRINSICS = ("camera-intrinsics.txt", "intrinsic/intrinsic_color.txt", "intrinsic_color.txt")


@dataclass(frozen=True)
class Frame:
    image: Path
    depth: Path
    K: np.ndarray  # 3 3, in pixels of the image
    T: np.ndarray  # 4 4: world to camera

    def problem(self) -> str | None:
        """Why this frame cannot be used, as far as its numbers tell."""
        if not (np.isfinite(self.K).all() and np.isfinite(self.T).all()):
            return f"{self.image}: pose or intrinsics are not finite"
        if abs(np.linalg.det(self.T[:3, :3]) - 1) > 0.01 or min(self.K[0, 0], self.K[1, 1]) <= 0:
            return f"{self.image}: not a camera pose or not a focal length"
        return None


def decode_pixels(data: np.ndarray, flags: int) -> np.ndarray | None:
    """data: n, uint8: a file. As OpenCV decodes it; None: it does not."""
    if not data.size or promises_too_much(data):
        return None
    try:
        return cv2.imdecode(data, flags)
    except cv2.error:  # more pixels than it takes
        return None


def promises_too_much(data: np.ndarray) -> bool:
    """Whether the file tells of more pixels than it can hold, or, as a PNG, of a part that is longer than it:
    OpenCV makes room for gigabytes of them."""
    import PIL.Image

    try:
        with quiet_pillow(), PIL.Image.open(io.BytesIO(data.data), formats=known_formats()) as opened:
            if claims_too_much(opened, len(data)):
                return True
    except PIL.Image.DecompressionBombError:
        return True
    except Exception:  # OpenCV reads what Pillow does not
        pass
    at = len(PNG)
    while data[: len(PNG)].tobytes() == PNG and at + 8 <= len(data):
        length, kind = int.from_bytes(data[at : at + 4].tobytes(), "big"), data[at + 4 : at + 8].tobytes()
        at += 12 + length
        if at > len(data):
            return True
        if kind == b"IEND":  # what follows is not read
            break
    return False


def read_gray(path: Path | str) -> np.ndarray:
    """h w, uint8. Raises UserError with one line that names the file when it does not decode."""
    try:
        data = np.fromfile(str(path), np.uint8)
    except OSError as e:
        raise UserError(f"{path}: cannot be read ({e.strerror})") from e
    # EXIF rotation is ignored on purpose: poses and depth refer to the pixels as stored.
    flags = cv2.IMREAD_GRAYSCALE | cv2.IMREAD_IGNORE_ORIENTATION
    image = decode_pixels(data, flags)
    if image is None:
        raise UserError(f"{path}: not an image that can be decoded")
    return image


def read_depth(path: Path | str, per_metre: float = 1000.0) -> np.ndarray:
    """h w, float32: depth along the optical axis, 0 where there is none.

    Reads `.h5` (data set `depth`, as MegaDepth has it) and 16-bit `.png` in millimetres, or whatever else
    there are `per_metre` of.
    """
    path = Path(path)
    if not is_file(path):
        raise UserError(f"{path}: depth map is missing")
    try:
        if path.suffix == ".h5":
            with h5py.File(path, "r") as f:
                depth = read_dataset(f["depth"]).astype(np.float32)
        else:
            raw = decode_pixels(np.fromfile(path, np.uint8), cv2.IMREAD_UNCHANGED)
            if raw is None:
                raise ValueError("not a depth image")
            depth = raw.astype(np.float32) / np.float32(per_metre)
    except (OSError, KeyError, ValueError, RuntimeError, MemoryError) as e:
        raise UserError(f"{path}: no depth map can be read from it ({e})") from e
    if depth.ndim != 2 or depth.size == 0:
        raise UserError(f"{path}: depth map of shape {depth.shape}, expected height x width")
    # Negative values are MegaDepth's ordinal labels, 65535 is "no reading": neither is a depth.
    known = np.isfinite(depth) & (depth > 0)
    if path.suffix != ".h5":
        known &= depth * per_metre < 65500
    return np.where(known, depth, np.float32(0))


def write_depth(path: Path | str, depth: np.ndarray) -> None:
    """Writes an `.h5` depth map under a temporary name, then renames: a reader never sees half of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # 11 bits of mantissa are a step of 0.05 %, finer than any depth here; the zeros after them compress.
    bits = np.ascontiguousarray(depth, np.float32).view(np.uint32)
    depth = ((bits + 0x800) & np.uint32(0xFFFFF000)).view(np.float32)
    with new_h5(path) as (f, _):
        f.create_dataset("depth", data=depth, compression="gzip", shuffle=True)


# ---- RGB-D sequences


def is_sequence(folder: Path) -> bool:
    return (folder / "pose").is_dir() or next(folder.glob("*.pose.txt"), None) is not None


def find_sequences(folder: Path) -> list[Path]:
    """`folder` itself or those folders in it that hold a sequence."""
    candidates = [folder, *sorted(p for p in folder.glob("*") if p.is_dir())]
    found = [p for p in candidates if is_sequence(p)]
    if not found:
        raise UserError(f"{folder}: no RGB-D sequence (no NAME.pose.txt and no folder `pose`)")
    return found


def read_sequence(scene: Path) -> list[Frame]:
    """The frames of one sequence; those without a pose, colour or depth are named and left out."""
    K = _read_intrinsics(scene)
    frames = []
    for pose in sorted([*scene.glob("*.pose.txt"), *scene.glob("pose/*.txt")], key=_number):
        image, depth = _files_of(scene, pose)
        try:
            if image is None or not is_file(depth):
                raise UserError(f"{pose}: its colour or depth image is missing")
            T = _read_matrix(pose, (4, 4))
            if not np.isfinite(T).all():
                raise UserError(f"{pose}: not finite")
            frame = Frame(image, depth, K, np.linalg.inv(T))
            if problem := frame.problem():
                raise UserError(problem)
        except (UserError, np.linalg.LinAlgError) as e:
            log.warning("skipped: %s", e)
            continue
        frames.append(frame)
    return frames


def _number(path: Path) -> tuple[int, str]:
    digits = "".join(c for c in path.name if c.isdigit())
    return int(digits or 0), path.name


def _files_of(scene: Path, pose: Path) -> tuple[Path | None, Path]:
    if pose.parent.name == "pose":
        stem = pose.stem
        colours, depth = (scene / "color" / f"{stem}{s}" for s in COLOUR), scene / "depth" / f"{stem}.png"
    else:
        stem = pose.name.removesuffix(".pose.txt")
        colours, depth = (scene / f"{stem}.color{s}" for s in COLOUR), scene / f"{stem}.depth.png"
    return next((c for c in colours if is_file(c)), None), depth


def _read_intrinsics(scene: Path) -> np.ndarray:
    for name in INTRINSICS:
        if (scene / name).is_file():
            return _read_matrix(scene / name, (3, 3))
    raise UserError(f"{scene}: no intrinsics (looked for {', '.join(INTRINSICS)})")


def _read_matrix(path: Path, shape: tuple[int, int]) -> np.ndarray:
    """The top-left `shape` of a matrix in a text file."""
    try:
        matrix = np.loadtxt(path, ndmin=2)
    except (OSError, ValueError) as e:
        raise UserError(f"{path}: not a matrix ({e})") from e
    if matrix.shape[0] < shape[0] or matrix.shape[1] < shape[1]:
        raise UserError(f"{path}: a matrix of {matrix.shape}, expected {shape}")
    return matrix[: shape[0], : shape[1]]
