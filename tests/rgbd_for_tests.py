"""RGB-D sequences on disk, made of a scene that is known exactly."""

from pathlib import Path

import cv2
import numpy as np
from synthetic_scene import K, Scene


def write_sequence(scene: Scene, out: Path, scannet: bool) -> Path:
    """In ScanNet's folders or all in one. Poses are camera to world, depth is half as large as colour, as
    sensors have it."""
    for folder in ("color", "depth", "pose", "intrinsic") if scannet else ("",):
        (out / folder).mkdir(parents=True, exist_ok=True)
    for k, name in enumerate(scene.names):
        flat = [f"frame-{k:06}.{e}" for e in ("color.png", "depth.png", "pose.txt")]
        files = [f"color/{k}.png", f"depth/{k}.png", f"pose/{k}.txt"] if scannet else flat
        files = [out / f for f in files]
        files[0].write_bytes((scene.root / "images" / name).read_bytes())
        half = cv2.resize(scene.depth[k], None, fx=0.5, fy=0.5, interpolation=cv2.INTER_AREA)
        cv2.imwrite(str(files[1]), (half * 1000).astype(np.uint16))
        np.savetxt(files[2], np.linalg.inv(scene.T[k]))
    matrix = np.eye(4)
    matrix[:3, :3] = K
    if scannet:
        np.savetxt(out / "intrinsic" / "intrinsic_color.txt", matrix)
    else:
        np.savetxt(out / "camera-intrinsics.txt", K)
    return out
