"""Shared keypoints against a plain, slow version of the same."""

from __future__ import annotations

import math
import weakref

import cv2
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prism_match.errors import UserError
from prism_match.images import write_png
from prism_match.maps import tracks
from prism_match.maps.shared_keypoints import (
    IndexedMatches,
    Keypoints,
    SharedKeypoints,
    load_tracks,
    save_tracks,
)
from prism_match.maps.tracks import (
    TrackOptions,
    merge_points,
    one_to_one,
    polish_tracks,
    share_keypoints,
    strongest_of_track,
)
from prism_match.matches import Matches


def plain_matches(points0: np.ndarray, points1: np.ndarray, scores: np.ndarray) -> Matches:
    return Matches(points0, points1, scores, (160, 120), (160, 120))


def slow_merge(points, scores, cell, max_error, most):
    """Keypoints {cell: (x, y, strength)} and the cell of each point's keypoint, or None."""
    home = [(math.floor(x / cell), math.floor(y / cell)) for x, y in points.tolist()]

    def means(owner):
        result = {}
        for key in sorted(set(owner)):
            mine = [n for n, o in enumerate(owner) if o == key]
            total = sum(max(float(scores[n]), 1e-6) for n in mine)
            mean = [
                sum(max(float(scores[n]), 1e-6) * float(points[n][k]) for n in mine) / total for k in (0, 1)
            ]
            result[key] = (*mean, total)
        return result

    first, owner = means(home), []
    for (x, y), (cx, cy) in zip(points.tolist(), home, strict=True):
        best, most_so_far = (cx, cy), -1.0
        for key in [(cx + dx, cy + dy) for dx in (-1, 0, 1) for dy in (-1, 0, 1)]:
            if (
                key in first
                and math.dist(first[key][:2], (x, y)) <= max_error
                and first[key][2] > most_so_far
            ):
                best, most_so_far = key, first[key][2]
        owner.append(best)
    second = means(owner)
    owner = [
        o if math.dist(second[o][:2], p) <= max_error else None
        for o, p in zip(owner, points.tolist(), strict=True)
    ]
    strength = {}
    for n, o in enumerate(owner):
        if o is not None:
            strength[o] = strength.get(o, 0.0) + max(float(scores[n]), 1e-6)
    kept = sorted(sorted(strength, key=lambda o: (-strength[o], o))[:most])
    points = {o: (*second[o][:2], strength[o]) for o in kept}
    return points, [o if o in points else None for o in owner]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("cell, max_error, most", [(2.0, 1.0, 1000), (4.0, 1.5, 40), (1.0, 3.0, 1000)])
def test_merge_is_the_plain_version(seed, cell, max_error, most):
    g = np.random.default_rng(seed)
    points = (g.uniform(-0.5, 30, (300, 2))).astype(np.float32)
    points[::3] = np.round(points[::3] / 4) * 4  # many at the same place, some on borders
    scores = g.random(300).astype(np.float32)
    found, row = merge_points(points, scores, cell, max_error, most)
    expected, owner = slow_merge(points, scores, cell, max_error, most)
    np.testing.assert_allclose(found.xy, [v[:2] for v in expected.values()], atol=1e-4)
    np.testing.assert_allclose(found.scores, [v[2] for v in expected.values()], rtol=1e-5)
    number = {key: n for n, key in enumerate(expected)}
    assert row.tolist() == [-1 if o is None else number[o] for o in owner]


def test_points_on_two_sides_of_a_border_are_one():
    points = np.array([[1.9, 1], [2.1, 1], [1.95, 1], [9, 9]], np.float32)
    found, row = merge_points(points, np.ones(4, np.float32), 2.0, 1.0, 10)
    assert row.tolist() == [0, 0, 0, 1]
    np.testing.assert_allclose(found.xy[0], [points[:3, 0].mean(), 1], atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 6), st.integers(-1, 6), st.integers(1, 50)), max_size=40))
@example([(0, 0, 1), (0, 1, 1), (1, 0, 2), (2, 2, 1)])
def test_one_to_one_is_greedy(rows):
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    found = table[one_to_one(table[:, 0], table[:, 1], table[:, 2] / 50)]
    expected = []
    for a, b, score in sorted(rows, key=lambda r: -r[2]):  # stable, as the order of equals is
        if a >= 0 and b >= 0 and all(a != x and b != y for x, y, _ in expected):
            expected.append((a, b, score))
    assert found.tolist() == [list(row) for row in expected]


def three_views(noise: float, count: int = 200) -> dict:
    """Pairs of three images that all see the same points, moved by 10 pixels from one to the next."""
    g = np.random.default_rng(0)
    x, y = np.mgrid[0:20, 0:10].reshape(2, -1) * 8.0 + 3.5
    base = np.stack([x, y], 1)[:count]
    pairs = {}
    for a, b in ((0, 1), (0, 2), (1, 2)):
        ends = [(base + 10 * k + noise * g.uniform(-1, 1, base.shape)).astype(np.float32) for k in (a, b)]
        pairs[f"{a}", f"{b}"] = plain_matches(*ends, g.uniform(0.3, 1, len(base)).astype(np.float32))
    return pairs


def test_tracks_are_consistent():
    shared = share_keypoints(three_views(0.3).items())
    assert [len(k) for k in shared.keypoints.values()] == [200] * 3
    # From image 0 to 2 directly is the same as by way of 1.
    to = {names: dict(m.index.tolist()) for names, m in shared.matches.items()}
    assert all(len(t) == 200 for t in to.values())
    assert all(to["1", "2"][to["0", "1"][k]] == v for k, v in to["0", "2"].items())


def test_wrong_matches_are_dropped():
    """Between points that other pairs know: one that ends elsewhere agrees with no keypoint there."""
    pairs = three_views(0.1)
    moved = pairs["0", "2"].keypoints1.copy()
    moved[::10] -= 1.8  # still in the cell of the keypoint it should be
    scores = pairs["0", "2"].scores.copy()
    scores[::10] = 0.05
    pairs["0", "2"] = plain_matches(pairs["0", "2"].keypoints0, moved, scores)
    shared = share_keypoints(pairs.items(), TrackOptions(cell=8.0, max_error=1.0))
    to = {names: dict(m.index.tolist()) for names, m in shared.matches.items()}
    assert len(to["0", "1"]) == len(to["1", "2"]) == 200
    assert 170 <= len(to["0", "2"]) <= 180
    assert all(to["1", "2"][to["0", "1"][k]] == v for k, v in to["0", "2"].items())


def turned_views(seed: int, count: int = 400) -> tuple[dict, dict]:
    """Three images of a plane, each turned and stretched, and exact matches that are other points of it in
    each pair, as a matcher without a detector finds them."""
    g = np.random.default_rng(seed)
    maps = {}
    for name, angle, scale in (("0", 0.0, 1.0), ("1", 0.3, 1.2), ("2", -0.4, 0.9)):
        c, s = np.cos(angle) * scale, np.sin(angle) * scale
        maps[name] = np.array([[c, -s, 50], [s, c, 50]])
    pairs = {}
    for a, b in (("0", "1"), ("0", "2"), ("1", "2")):
        points = np.stack(np.mgrid[0:20, 0:20].reshape(2, -1), 1)[:count] * 8.0 + g.uniform(-1, 1, (count, 2))
        ends = [(points @ maps[k][:, :2].T + maps[k][:, 2]).astype(np.float32) for k in (a, b)]
        pairs[a, b] = plain_matches(*ends, g.uniform(0.3, 1, count).astype(np.float32))
    return pairs, maps


def test_keypoints_move_to_where_their_matches_hold():
    pairs, maps = turned_views(0)
    shared = share_keypoints(pairs.items(), TrackOptions(cell=6.0, max_error=3.0))
    errors = []
    for (a, b), m in shared.matches.items():
        plane = (shared.keypoints[a].xy[m.index[:, 0]] - maps[a][:, 2]) @ np.linalg.inv(maps[a][:, :2]).T
        expected = plane @ maps[b][:, :2].T + maps[b][:, 2]
        errors.append(np.linalg.norm(shared.keypoints[b].xy[m.index[:, 1]] - expected, axis=1))
    errors = np.concatenate(errors)
    # Without moving them the median is 0.49 pixels.
    assert len(errors) > 800 and np.median(errors) < 0.05


def slow_leaders(shared, strength):
    """By walking from keypoint to keypoint."""
    names = list(shared.keypoints)
    start = dict(zip(names, np.cumsum([0, *(len(shared.keypoints[n]) for n in names)]), strict=False))
    near: dict[int, set[int]] = {n: set() for n in range(len(strength))}
    for (a, b), m in shared.matches.items():
        for i, j in m.index:
            near[start[a] + i].add(int(start[b] + j))
            near[start[b] + j].add(int(start[a] + i))
    leaders = []
    for n in near:
        seen, todo = {n}, [n]
        while todo:
            todo += [x for x in near[todo.pop()] if x not in seen and not seen.add(x)]
        leaders.append(max(seen, key=lambda x: strength[x]))
    return np.array(leaders)


@pytest.mark.parametrize("links", [1, 8, 20])
def test_the_strongest_of_a_track_leads_it(links):
    g = np.random.default_rng(links)
    keypoints = {n: Keypoints(np.zeros((20, 2), np.float32), g.uniform(0, 1, 20)) for n in "abcd"}
    matches = {}
    for pair in (("a", "b"), ("b", "c"), ("a", "d")):
        index = np.stack([g.permutation(20)[:links] for _ in pair], 1)
        matches[pair] = IndexedMatches(index, np.ones(links))
    shared = SharedKeypoints(keypoints, matches)
    strength = np.concatenate([k.scores for k in keypoints.values()])
    assert np.array_equal(strongest_of_track(shared, strength), slow_leaders(shared, strength))


def test_keypoints_move_to_where_their_photos_look_alike(photo, tmp_path):
    """Three views of a photo; the keypoints of each are off by half a pixel and more."""
    g = np.random.default_rng(0)
    height, width = photo.shape
    maps = {
        name: cv2.getRotationMatrix2D((width / 2, height / 2), angle, scale)
        for name, angle, scale in (("0", 0, 1.0), ("1", 7, 1.1), ("2", -5, 0.95))
    }
    for name, m in maps.items():
        view = cv2.warpAffine(photo, m, (width, height), flags=cv2.INTER_CUBIC)
        cv2.imwrite(str(tmp_path / f"{name}.png"), view)
    x, y = np.meshgrid(np.arange(60.0, width - 60, 9), np.arange(60.0, height - 60, 9))
    points = np.stack([x.ravel(), y.ravel()], 1)
    xy = {n: points @ m[:, :2].T + m[:, 2] + g.uniform(-0.7, 0.7, points.shape) for n, m in maps.items()}
    strength = {"0": 1.0, "1": 3.0, "2": 2.0}
    rows = np.arange(len(points))
    index = IndexedMatches(np.stack([rows, rows], 1), np.ones(len(rows), np.float32))
    shared = SharedKeypoints(
        {n: Keypoints(p.astype(np.float32), np.full(len(p), strength[n], np.float32)) for n, p in xy.items()},
        {("0", "1"): index, ("0", "2"): index},
    )
    polished = polish_tracks(shared, {n: tmp_path / f"{n}.png" for n in maps})
    assert np.array_equal(polished.keypoints["1"].xy, shared.keypoints["1"].xy), "the strongest stays"
    for name in ("0", "2"):
        plane = (xy["1"] - maps["1"][:, 2]) @ np.linalg.inv(maps["1"][:, :2]).T
        truth = plane @ maps[name][:, :2].T + maps[name][:, 2]
        before, after = (np.linalg.norm(s.keypoints[name].xy - truth, axis=1) for s in (shared, polished))
        assert np.median(before) > 0.5 and np.median(after) < 0.2
    assert polish_tracks(SharedKeypoints({}, {}), {}).keypoints == {}


def test_photos_to_polish_by_stay_within_their_limit(tmp_path, monkeypatch):
    """By the memory of those that are alive, over more photos than have room."""
    names = [f"{n}.png" for n in range(12)]
    g = np.random.default_rng(0)
    for name in names:
        write_png(tmp_path / name, g.integers(0, 255, (80, 100), dtype=np.uint8))
    keypoints = {n: Keypoints(np.float32([[40, 40], [50, 60]]), g.uniform(0, 1, 2)) for n in names}
    every = {(a, b): IndexedMatches(np.array([[0, 0]]), np.ones(1)) for a in names for b in names if a < b}
    alive, most = weakref.WeakSet(), []

    class Watched(np.ndarray):
        __hash__ = object.__hash__

    def watch(path):
        gray = read(path).view(Watched)
        alive.add(gray)
        most.append(len(alive))
        return gray

    read = tracks.read_gray_bytes
    monkeypatch.setattr(tracks, "read_gray_bytes", watch)
    monkeypatch.setattr(tracks, "POLISH_MEMORY", 4 * 80 * 100)
    files = {n: tmp_path / n for n in names}
    few = polish_tracks(SharedKeypoints(keypoints, every), files)
    assert len(most) >= 12 and max(most) <= 4 + 2  # and the two that are compared
    monkeypatch.setattr(tracks, "POLISH_MEMORY", 2**30)
    plenty = polish_tracks(SharedKeypoints(keypoints, every), files)
    for name in names:
        np.testing.assert_array_equal(few.keypoints[name].xy, plenty.keypoints[name].xy)


def test_scales_and_limits():
    pairs = three_views(0.3)
    large = {k: plain_matches(4 * m.keypoints0, 4 * m.keypoints1, m.scores) for k, m in pairs.items()}
    small, scaled = (
        share_keypoints(pairs.items()),
        share_keypoints(large.items(), None, dict.fromkeys("012", 4.0)),
    )
    for name in "012":
        np.testing.assert_allclose(scaled.keypoints[name].xy, 4 * small.keypoints[name].xy, rtol=1e-5)
    few = share_keypoints(pairs.items(), TrackOptions(max_keypoints=50))
    for name, points in few.keypoints.items():
        assert len(points) == 50
        assert points.scores.min() >= np.sort(small.keypoints[name].scores)[-50] - 1e-6
    nothing = plain_matches(
        np.zeros((0, 2), np.float32), np.zeros((0, 2), np.float32), np.zeros(0, np.float32)
    )
    assert share_keypoints([(("a", "b"), nothing)]).matches == {}
    for bad in ({"cell": 0}, {"max_error": -1}, {"max_keypoints": 0}, {"cell": float("nan")}):
        with pytest.raises(UserError):
            TrackOptions(**bad)


def test_tracks_round_trip(tmp_path):
    pairs = {("a/b.jpg", "c d.jpg"): three_views(0.3)["0", "1"]}
    shared = share_keypoints(pairs.items())
    colours = {"a/b.jpg": np.arange(600, dtype=np.uint8).reshape(200, 3)}
    save_tracks(tmp_path / "tracks.h5", shared, colours)
    again, coloured = load_tracks(tmp_path / "tracks.h5")
    assert again.keypoints.keys() == shared.keypoints.keys() and again.matches.keys() == shared.matches.keys()
    for name, points in shared.keypoints.items():
        np.testing.assert_array_equal(again.keypoints[name].xy, points.xy)
    np.testing.assert_array_equal(
        again.matches["a/b.jpg", "c d.jpg"].index, shared.matches["a/b.jpg", "c d.jpg"].index
    )
    assert coloured.keys() == colours.keys()
    (tmp_path / "tracks.h5").write_bytes(b"no")
    with pytest.raises(UserError, match="not a file of tracks"):
        load_tracks(tmp_path / "tracks.h5")
