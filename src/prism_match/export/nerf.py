"""`transforms.json`, which nerfstudio, instant-ngp and most splatting tools read."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from prism_match.cameras import Camera
from prism_match.colmap_model import read_model
from prism_match.errors import UserError
from prism_match.files import write_json

DISTORTION = ("k1", "k2", "p1", "p2")  # of OpenCV's model, in COLMAP's order; one that a camera lacks is 0
# Our cameras, as COLMAP's, look along +z with y down; NeRF's, as OpenGL's, along -z with y up.
FLIP = np.diag([1.0, -1.0, -1.0, 1.0])


def write_transforms(path: Path, model: Path, photos: Path) -> None:
    """model: a folder as `prism sfm` writes it, with points.ply; photos: where its images are. The world is
    COLMAP's, so that the points fit as they are. Principal points stay in COLMAP's pixels, (0.5, 0.5) being
    the centre of the first, as these tools have them."""
    folder = path.parent.resolve()
    views = sorted(read_model(model).views, key=lambda view: view.name)
    shared = intrinsics(views[0].camera) if len({view.camera for view in views}) == 1 else {}
    frames = [
        {
            "file_path": relative(photos / view.name, folder),
            "transform_matrix": camera_to_world(view.T).tolist(),
            **({} if shared else intrinsics(view.camera)),
        }
        for view in views
    ]
    head = {"camera_model": "OPENCV", **shared, "ply_file_path": relative(model / "points.ply", folder)}
    write_json(path, {**head, "frames": frames})


def intrinsics(camera: Camera) -> dict[str, float]:
    distortion = camera.distortion
    if camera.model.endswith("FISHEYE") or camera.model == "FOV" or len(distortion) > len(DISTORTION):
        raise UserError(f"transforms.json cannot hold a camera of the model {camera.model}")
    K = camera.K
    values = {"fl_x": K[0, 0], "fl_y": K[1, 1], "cx": K[0, 2] + 0.5, "cy": K[1, 2] + 0.5}
    values |= dict(zip(DISTORTION, [*distortion, 0.0, 0.0, 0.0, 0.0], strict=False))
    return {
        "w": camera.width,
        "h": camera.height,
        **{k: float(v) for k, v in values.items()},
        "camera_angle_x": 2 * float(np.arctan(camera.width / (2 * K[0, 0]))),
        "camera_angle_y": 2 * float(np.arctan(camera.height / (2 * K[1, 1]))),
    }


def camera_to_world(T: np.ndarray) -> np.ndarray:
    """4 4, with OpenGL's axes, from a pose (world to camera, 4 4) with COLMAP's."""
    return np.linalg.inv(T) @ FLIP


def relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path.resolve(), folder)).as_posix()
