"""Cameras with lens distortion, against OpenCV, and COLMAP's way to write rotations."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from prism_match import UserError
from prism_match.cameras import CAMERA_MODELS, Camera, parse_camera, pinhole, read_camera_list
from prism_match.colmap_model import quaternion_of, rotation_of

LENS = {
    "SIMPLE_PINHOLE": (),
    "PINHOLE": (),
    "SIMPLE_RADIAL": (-0.1,),
    "RADIAL": (-0.1, 0.03),
    "OPENCV": (-0.1, 0.03, 0.01, -0.005),
    "OPENCV_FISHEYE": (0.02, -0.01, 0.003, 0.001),
    "FULL_OPENCV": (-0.1, 0.03, 0.01, -0.005, 0.02, 0.05, 0.01, 0.02),
    "FOV": (0.8,),
    "SIMPLE_RADIAL_FISHEYE": (0.05,),
    "RADIAL_FISHEYE": (0.05, -0.01),
    "THIN_PRISM_FISHEYE": (0.02, -0.01, 0.004, 0.002, 0.003, 0.001, 0.01, -0.006),
}


def make(model: str) -> Camera:
    focal = (500.0,) if CAMERA_MODELS[model][1] == 1 else (500.0, 510.0)
    return Camera(model, 640, 480, (*focal, 330.0, 250.0, *LENS[model]))


def pixels(count: int = 300) -> np.ndarray:
    return np.random.default_rng(0).uniform([0, 0], [639, 479], (count, 2))


@pytest.mark.parametrize("model", CAMERA_MODELS)
def test_pixels_come_back_through_any_lens(model: str) -> None:
    camera = make(model)
    rays = np.concatenate([camera.normalise(pixels()), np.ones((300, 1))], axis=1)
    np.testing.assert_allclose(camera.project(7 * rays), pixels(), atol=1e-6)


@pytest.mark.parametrize("model", ["PINHOLE", "OPENCV", "FULL_OPENCV", "OPENCV_FISHEYE"])
def test_lenses_are_those_of_opencv(model: str) -> None:
    camera = make(model)
    xyz = np.random.default_rng(1).uniform([-2, -1.5, 3], [2, 1.5, 6], (100, 3))
    if model == "OPENCV_FISHEYE":
        expected, _ = cv2.fisheye.projectPoints(
            xyz[:, None], np.zeros(3), np.zeros(3), camera.K, camera.distortion
        )
    else:
        expected, _ = cv2.projectPoints(xyz, np.zeros(3), np.zeros(3), camera.K, camera.distortion)
    np.testing.assert_allclose(camera.project(xyz), expected.reshape(-1, 2), atol=1e-6)


def test_the_first_pixel_is_half_a_pixel_off_in_colmap() -> None:
    camera = Camera("SIMPLE_PINHOLE", 640, 480, (500.0, 320.0, 240.0))
    np.testing.assert_allclose(camera.project(np.array([[0.0, 0, 1]])), [[319.5, 239.5]])
    assert np.isnan(camera.project(np.array([[0.0, 0, -1]]))).all()
    K = np.array([[500.0, 0, 319.5], [0, 510, 239.5], [0, 0, 1]])
    np.testing.assert_allclose(pinhole(K, 640, 480).K, K)


@pytest.mark.parametrize("model", ["PINHOLE", "OPENCV", "FOV"])
def test_a_smaller_copy_of_a_photo_shows_the_same(model: str) -> None:
    camera = make(model)
    small = camera.resized(320, 240)
    xyz = np.random.default_rng(2).uniform([-2, -1.5, 3], [2, 1.5, 6], (50, 3))
    np.testing.assert_allclose(small.project(xyz), (camera.project(xyz) + 0.5) / 2 - 0.5, atol=1e-9)


def test_lists_of_queries(tmp_path: Path) -> None:
    path = tmp_path / "queries.txt"
    path.write_text("# hloc\nday/a.jpg SIMPLE_RADIAL 1600 1200 1470.01 800 600 -0.0163\n\n")
    camera = read_camera_list(path)["day/a.jpg"]
    assert camera == Camera("SIMPLE_RADIAL", 1600, 1200, (1470.01, 800, 600, -0.0163))


@pytest.mark.parametrize("text, reason", [
    ("a.jpg PINHOLE 640 480 500 500 320", "line 1: a PINHOLE camera needs 4 finite parameters"),
    ("a.jpg PINHOLE 640 480 500 500 320 nan", "needs 4 finite parameters"),
    ("a.jpg PINHOLE 640 480 -500 500 320 240", "positive focal length"),
    ("a.jpg EUCM 640 480 500 500 320 240 1 1", "camera model EUCM is not supported"),
    ("a.jpg PINHOLE x 480 500 500 320 240", "not a camera"),
    ("a.jpg", "a camera is MODEL WIDTH HEIGHT PARAMS"),
    ("", "no cameras in it"),
])  # fmt: skip
def test_bad_lists_give_one_line(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "queries.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=reason) as error:
        read_camera_list(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_camera_is_parsed_as_colmap_writes_it() -> None:
    assert parse_camera(["FOV", "8", "6", "5", "5", "4", "3", "0.9"]).distortion.tolist() == [0.9]


def test_quaternions_of_all_rotations() -> None:
    rng = np.random.default_rng(0)
    for q in [*rng.normal(size=(100, 4)), [0, 1, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0], [1e-9, 0.6, 0.8, 0]]:
        R = rotation_of(np.array(q, float))
        np.testing.assert_allclose(rotation_of(quaternion_of(R)), R, atol=1e-9)
        assert quaternion_of(R)[0] >= 0
