"""`transforms.json`, which nerfstudio, instant-ngp and most splatting tools read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from prism_match.errors import UserError
from prism_match.files import write_json

# Where the parameters of COLMAP's models go; a name that a model lacks is 0.
PARAMETERS = {
    "SIMPLE_PINHOLE": ("f", "cx", "cy"),
    "PINHOLE": ("fl_x", "fl_y", "cx", "cy"),
    "SIMPLE_RADIAL": ("f", "cx", "cy", "k1"),
    "RADIAL": ("f", "cx", "cy", "k1", "k2"),
    "OPENCV": ("fl_x", "fl_y", "cx", "cy", "k1", "k2", "p1", "p2"),
}
# Our cameras, as COLMAP's, look along +z with y down; NeRF's, as OpenGL's, along -z with y up.
FLIP = np.diag([1.0, -1.0, -1.0, 1.0])


def write_transforms(path: Path, model: dict[str, Any], files: Mapping[str, Path], ply: Path) -> None:
    """model: as the COLMAP worker describes it. The world is COLMAP's, so that the points fit as they are.
    Principal points stay in COLMAP's pixels, (0.5, 0.5) being the centre of the first, as these tools have
    them."""
    folder = path.parent.resolve()
    cameras = {n: intrinsics(camera) for n, camera in model["cameras"].items()}
    used = {image["camera"] for image in model["images"].values()}
    shared = cameras[next(iter(used))] if len(used) == 1 else {}
    frames = [
        {
            "file_path": relative(files[name], folder),
            "transform_matrix": camera_to_world(image["pose"]).tolist(),
            **({} if shared else cameras[image["camera"]]),
        }
        for name, image in model["images"].items()
    ]
    head = {"camera_model": "OPENCV", **shared, "ply_file_path": relative(ply, folder)}
    write_json(path, {**head, "frames": frames})


def intrinsics(camera: dict[str, Any]) -> dict[str, float]:
    if camera["model"] not in PARAMETERS:
        raise UserError(f"transforms.json cannot hold a camera of the model {camera['model']}")
    values = dict(zip(PARAMETERS[camera["model"]], camera["params"], strict=True))
    focal = values.pop("f", None)
    if focal is not None:
        values |= {"fl_x": focal, "fl_y": focal}
    width, height = camera["width"], camera["height"]
    return {
        "w": width,
        "h": height,
        **{k: values.get(k, 0.0) for k in ("fl_x", "fl_y", "cx", "cy", "k1", "k2", "p1", "p2")},
        "camera_angle_x": 2 * float(np.arctan(width / (2 * values["fl_x"]))),
        "camera_angle_y": 2 * float(np.arctan(height / (2 * values["fl_y"]))),
    }


def camera_to_world(pose: list[list[float]]) -> np.ndarray:
    """4 4, with OpenGL's axes, from a pose (world to camera, 3 4) with COLMAP's."""
    return np.linalg.inv(np.vstack([pose, [0, 0, 0, 1]])) @ FLIP


def relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path.resolve(), folder)).as_posix()
