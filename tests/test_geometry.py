"""Models are recovered from exact and from contaminated matches, with every back end."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from prism_match import geometry
from prism_match.errors import UserError

BACKENDS = ["opencv", "usac", pytest.param("poselib", marks=[])]
K0 = np.array([[600.0, 0, 320], [0, 610, 240], [0, 0, 1]])
K1 = np.array([[500.0, 0, 300], [0, 505, 260], [0, 0, 1]])


def scene(n: int = 400, outliers: float = 0.3) -> dict[str, np.ndarray]:
    """Points in space seen by two cameras, a share of them matched wrongly."""
    rng = np.random.default_rng(0)
    points = rng.uniform([-2, -2, 4], [2, 2, 9], (n, 3))
    rotation, _ = cv2.Rodrigues(np.array([0.1, -0.25, 0.05]))
    translation = np.array([1.0, 0.1, 0.2])
    x0 = geometry.to_points(points @ K0.T)
    x1 = geometry.to_points((points @ rotation.T + translation) @ K1.T)
    wrong = rng.random(n) < outliers
    x1[wrong] = rng.uniform(0, 600, (wrong.sum(), 2))
    return {"x0": x0, "x1": x1, "R": rotation, "t": translation, "right": ~wrong}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", ["homography", "fundamental", "essential"])
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"threshold": -1}, "threshold must be a positive number of pixels, not -1"),
        ({"threshold": 0}, "threshold must be a positive number of pixels, not 0"),
        ({"threshold": float("nan")}, "threshold .* not nan"),
        ({"threshold": float("inf")}, "threshold .* not inf"),
        ({"threshold": "a"}, "threshold .* not 'a'"),
        ({"confidence": 2}, "confidence must be above 0 and below 1, not 2"),
        ({"confidence": float("nan")}, "confidence .* not nan"),
        ({"max_iterations": 0}, "max_iterations must be a whole number of at least 1, not 0"),
        ({"max_iterations": 1.5}, "max_iterations .* not 1.5"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_options_that_make_no_sense(model: str, backend: str, options: dict, reason: str) -> None:
    s = scene(20)
    with pytest.raises(UserError, match=rf"^{reason}[^\n]*$"):
        geometry.estimate(s["x0"], s["x1"], model, intrinsics0=K0, intrinsics1=K1, backend=backend, **options)
    with pytest.raises(UserError, match=reason):  # whether there are enough points or not
        geometry.estimate(
            s["x0"][:2], s["x1"][:2], model, intrinsics0=K0, intrinsics1=K1, backend=backend, **options
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_essential_recovers_the_pose(backend: str) -> None:
    s = scene()
    found = geometry.estimate(s["x0"], s["x1"], "essential", intrinsics0=K0, intrinsics1=K1, backend=backend)
    assert found.rotation is not None and found.translation is not None
    assert geometry.rotation_angle(found.rotation, s["R"]) < 0.1
    assert geometry.direction_angle(found.translation, s["t"]) < 0.2
    assert found.translation @ s["t"] > 0, "the points must lie in front of the cameras"
    assert (found.inliers & s["right"]).sum() > 0.98 * s["right"].sum()


@pytest.mark.parametrize("backend", BACKENDS)
def test_fundamental(backend: str) -> None:
    s = scene()
    found = geometry.estimate(s["x0"], s["x1"], "fundamental", backend=backend)
    errors = geometry.symmetric_epipolar_error(s["x0"][s["right"]], s["x1"][s["right"]], found.matrix)
    assert np.sqrt(np.median(errors)) < 0.1


@pytest.mark.parametrize("backend", BACKENDS)
def test_homography(backend: str) -> None:
    rng = np.random.default_rng(1)
    truth = np.array([[0.9, -0.2, 30], [0.15, 1.1, -20], [2e-4, -1e-4, 1]])
    x0 = rng.uniform(0, 500, (300, 2))
    x1 = geometry.warp_points(x0, truth)
    x1[:90] = rng.uniform(0, 500, (90, 2))
    found = geometry.estimate(x0, x1, "homography", backend=backend)
    np.testing.assert_allclose(geometry.warp_points(x0[90:], found.matrix), x1[90:], atol=0.05)
    assert found.matrix[2, 2] > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_turned_wide_camera_sees_is_in_front_of_it(backend: str) -> None:
    """To one side as to the other, whatever becomes of the corner that is the origin."""
    K = np.array([[268.5, 0, 319.5], [0, 268.5, 239.5], [0, 0, 1]])  # 100 degrees wide
    for angle in np.radians([-50, 50]):
        c, s = np.cos(angle), np.sin(angle)
        truth = K @ np.array([[c, 0, s], [0, 1, 0], [-s, 0, c]]) @ np.linalg.inv(K)
        x0 = np.stack(np.meshgrid(np.arange(0, 640, 16.0), np.arange(0, 480, 16.0)), axis=-1).reshape(-1, 2)
        x1 = geometry.warp_points(x0, truth)
        seen = np.all((x1 >= 0) & (x1 <= [639, 479]), axis=1)
        found = geometry.estimate(x0[seen], x1[seen], "homography", backend=backend)
        np.testing.assert_allclose(geometry.warp_points(x0[seen], found.matrix), x1[seen], atol=0.05)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", ["homography", "fundamental", "essential"])
@pytest.mark.parametrize("case", ["none", "three", "same point", "line"])
def test_degenerate_matches_never_crash(model: str, backend: str, case: str) -> None:
    line = np.stack([np.arange(50.0), 2 * np.arange(50.0)], axis=1)
    points = {"none": line[:0], "three": line[:3], "same point": np.full((30, 2), 7.0), "line": line}[case]
    found = geometry.estimate(points, points, model, intrinsics0=K0, intrinsics1=K1, backend=backend)
    assert found.inliers.shape == (len(points),)
    if len(points) < 4:
        assert found.matrix is None and found.num_inliers == 0


def test_estimation_is_repeatable() -> None:
    s = scene()
    for backend in ("opencv", "usac", "poselib"):
        first, second = (
            geometry.estimate(s["x0"], s["x1"], "essential", intrinsics0=K0, intrinsics1=K1, backend=backend)
            for _ in range(2)
        )
        assert np.array_equal(first.matrix, second.matrix)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"model": "affine"}, "model"),
        ({"model": "homography", "backend": "magic"}, "backend"),
        ({"model": "essential"}, "intrinsics"),
        ({"model": "essential", "intrinsics0": np.eye(2), "intrinsics1": np.eye(3)}, "3x3"),
    ],
)
def test_bad_calls(options: dict, word: str) -> None:
    with pytest.raises(UserError, match=word):
        geometry.estimate(np.zeros((9, 2)), np.zeros((9, 2)), **options)


def test_epipolar_error_by_hand() -> None:
    """Cameras side by side: the error is the difference of rows, counted in both images."""
    e = geometry.skew(np.array([1.0, 0, 0]))
    error = geometry.symmetric_epipolar_error(np.array([[0.1, 0.2]]), np.array([[0.3, 0.25]]), e)
    np.testing.assert_allclose(error, 2 * 0.05**2)


def test_angles() -> None:
    turn, _ = cv2.Rodrigues(np.array([0, 0, np.radians(30)]))
    assert geometry.rotation_angle(np.eye(3), turn) == pytest.approx(30)
    assert geometry.rotation_angle(turn, np.eye(3)) == pytest.approx(30)
    # Poses in files are rounded: an arc cosine of the trace makes a turn of half a degree 0 or 1.1 of it.
    small, _ = cv2.Rodrigues(np.radians([0.3, 0.4, 0.0]))
    for rounding in (1 - 1e-4, 1 + 1e-4):
        assert geometry.rotation_angle(np.eye(3), rounding * small) == pytest.approx(0.5, rel=1e-3)
    assert geometry.rotation_angle(np.diag([-1.0, -1, 1]), np.eye(3)) == pytest.approx(180)
    assert geometry.direction_angle(np.array([1.0, 0, 0]), np.array([-5.0, 0, 0])) == pytest.approx(0)
    assert geometry.direction_angle(np.array([1.0, 0, 0]), np.array([0, 2.0, 0])) == pytest.approx(90)
