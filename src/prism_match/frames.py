"""Reading and writing the files that the data sources share: gray images and depth maps."""

from __future__ import annotations

from pathlib import Path

import cv2
import h5py
import numpy as np

from prism_match.files import atomic_path


def read_gray(path: Path | str) -> np.ndarray:
    """h w, uint8. Raises ValueError with one line that names the file when it does not decode."""
    try:
        data = np.fromfile(str(path), np.uint8)
    except OSError as e:
        raise ValueError(f"{path}: cannot be read ({e.strerror})") from e
    # EXIF rotation is ignored on purpose: poses and depth refer to the pixels as stored.
    flags = cv2.IMREAD_GRAYSCALE | cv2.IMREAD_IGNORE_ORIENTATION
    image = cv2.imdecode(data, flags) if data.size else None
    if image is None:
        raise ValueError(f"{path}: not an image that can be decoded")
    return image


def read_depth(path: Path | str, per_metre: float = 1000.0) -> np.ndarray:
    """h w, float32: depth along the optical axis, 0 where there is none.

    Reads `.h5` (data set `depth`, as MegaDepth has it) and 16-bit `.png` in millimetres, or whatever else
    there are `per_metre` of.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: depth map is missing")
    try:
        if path.suffix == ".h5":
            with h5py.File(path, "r") as f:
                depth = np.asarray(f["depth"], dtype=np.float32)
        else:
            raw = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
            if raw is None:
                raise ValueError("not a depth image")
            depth = raw.astype(np.float32) / np.float32(per_metre)
    except (OSError, KeyError, ValueError) as e:
        raise ValueError(f"{path}: no depth map can be read from it ({e})") from e
    if depth.ndim != 2 or depth.size == 0:
        raise ValueError(f"{path}: depth map of shape {depth.shape}, expected height x width")
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
    with atomic_path(path) as temporary, h5py.File(temporary, "w") as f:
        f.create_dataset("depth", data=depth, compression="gzip", shuffle=True)
