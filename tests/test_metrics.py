"""The numbers of the tables against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from prism_match.evaluation.metrics import (
    auc,
    corner_error,
    epipolar_errors,
    on_a_line,
    pose_errors,
    precision,
)


def pose_error(R: np.ndarray, t: np.ndarray, truth: np.ndarray) -> float:
    """The larger of the two errors, the one that the benchmarks count."""
    return max(pose_errors(R, t, truth))


def turn(degrees: float, axis: int = 1) -> np.ndarray:
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    a, b = [i for i in range(3) if i != axis]
    R = np.eye(3)
    R[a, a], R[a, b], R[b, a], R[b, b] = c, -s, s, c
    return R


def pose(R: np.ndarray, t: object) -> np.ndarray:
    T = np.eye(4)
    T[:3, :3], T[:3, 3] = R, t
    return T


def test_auc_by_hand() -> None:
    # (0, 0) to (2, 1/2) is a triangle, (2, 1/2) to (4, 1) a trapezoid, the rest is full.
    assert auc([2, 4], [10])["10"] == pytest.approx(100 * (0.5 + 1.5 + 6) / 10)
    # Up to 3, the curve stays at 1/2 after its last point.
    assert auc([2, 4], [3])["3"] == pytest.approx(100 * (0.5 + 0.5) / 3)
    # A failure is one of the pairs.
    assert auc([2, math.inf], [10])["10"] == pytest.approx(100 * (0.5 + 4) / 10)
    assert auc([2, math.nan], [10]) == auc([2, math.inf], [10])


def test_auc_at_its_ends() -> None:
    assert auc([0.0] * 7, [5, 10, 20]) == pytest.approx({"5": 100, "10": 100, "20": 100})
    assert auc([math.inf] * 3, [5])["5"] == 0
    assert auc([20.0], [20])["20"] == 0  # an error at the threshold is not below it
    assert math.isnan(auc([], [5])["5"])


def test_auc_in_any_order() -> None:
    errors = np.random.default_rng(0).exponential(5, 50)
    assert auc(errors, [5, 10]) == auc(sorted(errors), [5, 10])


def test_auc_of_many_is_the_integral() -> None:
    # Errors spread evenly over [0, 10]: recall is e / 10, its area up to 5 is 1.25 of 5.
    assert auc(np.linspace(0, 10, 100_001), [5])["5"] == pytest.approx(25, abs=0.01)


def test_pose_errors_are_angles() -> None:
    truth = pose(turn(30), [1, 0, 0])
    R, t = turn(37), np.array([np.cos(np.radians(4)), np.sin(np.radians(4)), 0])
    assert pose_errors(R, t, truth) == pytest.approx((7, 4))
    assert pose_error(R, t, truth) == pytest.approx(7)


def test_pose_error_has_no_scale_and_no_sign() -> None:
    truth = pose(turn(30), [1.0, 2.0, 3.0])
    for t in ([1, 2, 3], [10, 20, 30], [-1, -2, -3]):
        assert pose_error(turn(30), np.array(t, float), truth) == pytest.approx(0, abs=1e-5)


def test_pose_error_is_symmetric() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        a, b = (pose(turn(rng.uniform(-90, 90), rng.integers(3)), rng.normal(size=3)) for _ in range(2))
        there = pose_error(a[:3, :3], a[:3, 3], b)
        assert there == pytest.approx(pose_error(b[:3, :3], b[:3, 3], a))
        assert 0 <= pose_errors(a[:3, :3], a[:3, 3], b)[1] <= 90


def test_pure_rotation_has_no_direction_to_miss() -> None:
    assert pose_error(turn(31), np.array([0, 0, 1.0]), pose(turn(30), [0, 0, 0])) == pytest.approx(1)


def test_epipolar_errors() -> None:
    rng = np.random.default_rng(2)
    X = rng.uniform([-1, -1, 3], [1, 1, 6], (50, 3))
    K, T = np.array([[500.0, 0, 320], [0, 500, 240], [0, 0, 1]]), pose(turn(10), [1, 0.2, 0])
    project = [x @ K.T / x[:, 2:] for x in (X, X @ T[:3, :3].T + T[:3, 3])]
    points = [p[:, :2] for p in project]
    assert epipolar_errors(*points, K, K, T).max() < 1e-20
    far = T.copy()
    far[:3, 3] *= 7
    moved = points[1] + [0, 30]
    errors = epipolar_errors(points[0], moved, K, K, T)
    np.testing.assert_allclose(errors, epipolar_errors(points[0], moved, K, K, far))
    back = epipolar_errors(moved, points[0], K, K, np.linalg.inv(T))
    np.testing.assert_allclose(errors, back)
    assert precision(errors, 5e-4) == 0 and precision(np.array([1e-4, 1.0]), 5e-4) == 50
    assert precision(np.empty(0), 5e-4) == 0


def test_corner_error_directly() -> None:
    shift = np.array([[1.0, 0, 3], [0, 1, 4], [0, 0, 1]])
    assert corner_error(shift, np.eye(3), (100, 50)) == pytest.approx(5)
    assert corner_error(7 * shift, np.eye(3), (100, 50)) == pytest.approx(5), "no scale"
    zoom = np.diag([2.0, 2, 1])
    distances = [0, 99, math.hypot(99, 49), 49]
    assert corner_error(zoom, np.eye(3), (100, 50)) == pytest.approx(sum(distances) / 4)
    assert corner_error(np.diag([1.0, 1, -1]), np.eye(3), (100, 50)) == math.inf


def test_on_a_line() -> None:
    x = np.linspace(0, 500, 30)
    line = np.stack([x, 0.3 * x + 7], axis=1)
    assert on_a_line(line) and on_a_line(line[:1]) and on_a_line(np.zeros((6, 2)))
    line[4, 1] += 3
    assert not on_a_line(line)
