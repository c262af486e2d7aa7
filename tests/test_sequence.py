"""One image with many, and points followed through frames, with matchers that know the scene."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from conftest import ASSETS
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_matcher import SyntheticMatcher, true_matches
from synthetic_scene import K, make_scene

from prism_match import Matcher, UserError
from prism_match.config import PRESETS
from prism_match.engine import MatchTable
from prism_match.images import load_image
from prism_match.maps.sequence import Past, SequenceOptions, Tracks, follow, without_doubles
from prism_match.maps.tracks import components
from prism_match.matcher import ImageFeatures
from prism_match.matches import Matches
from prism_match.model.prism import Features


@pytest.fixture(scope="module")
def matcher() -> Matcher:
    return Matcher(
        config=PRESETS["tiny"], device="cpu", rescale="never", size=96, threshold=0.0, rotate="auto"
    )


def crops(count: int) -> list[np.ndarray]:
    photo = load_image(ASSETS / "astronaut0.jpg").pixels
    return [photo[k * 8 : k * 8 + 96, 100 : 100 + 128] for k in range(count)]


def count_extractions(matcher: Matcher, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    seen: list[int] = []
    plain = Matcher._extract
    monkeypatch.setattr(
        Matcher, "_extract", lambda self, gray: (seen.append(len(gray)), plain(self, gray))[1]
    )
    return seen


def test_one_image_with_many_is_each_pair_in_one_table(matcher, monkeypatch, tmp_path):
    query, *others = crops(4)
    never = matcher.adjusted(rotate="never")
    seen = count_extractions(matcher, monkeypatch)
    table = never.match_groups(query, others)
    assert sum(seen) == 4  # the query once
    expected = [never.match(query, other) for other in others]
    assert len(table) == sum(map(len, expected)) and table.counts.tolist() == [len(m) for m in expected]
    for found, pair in zip(table, expected, strict=True):
        np.testing.assert_allclose(found.keypoints1, pair.keypoints1, atol=1e-3)
        assert found.size0 == pair.size0 == (128, 96)
    records = table.records()
    assert records.dtype.names == ("other", "x0", "y0", "x1", "y1", "score") and len(records) == len(table)
    table.save(tmp_path / "table.csv")
    rows = list(csv.DictReader((tmp_path / "table.csv").open()))
    assert len(rows) == len(table)
    np.testing.assert_allclose([float(r["x1"]) for r in rows], table.keypoints1[:, 0])
    assert len(never.match_groups(query, iter(others))) == len(table)


def test_bad_groups_are_told(matcher, tmp_path):
    query, matcher = crops(1)[0], matcher.adjusted(rotate="never")
    with pytest.raises(UserError, match="no images to match the query with"):
        matcher.match_groups(query, [])
    with pytest.raises(UserError, match="several images, not one"):
        matcher.match_groups(query, "b.jpg")
    with pytest.raises(UserError, match=r"none\.jpg: no such file"):
        matcher.match_groups(query, [query, tmp_path / "none.jpg"])
    sure = Matches([[1, 2]], [[3, 4]], [0.5], (9, 9), (9, 9), certainty=[0.75], sigma=[1.5])
    table = MatchTable.of([sure, sure])
    assert table.records().dtype.names[-2:] == ("certainty", "sigma") and table[1].sigma.tolist() == [1.5]
    assert MatchTable.of([sure, replace(sure, sigma=None)]).sigma is None
    empty = Matches(np.zeros((0, 2)), np.zeros((0, 2)), np.zeros(0), (9, 9), (9, 9))
    table = MatchTable.of([empty, empty])
    assert len(table) == 0 and table.counts.tolist() == [0, 0] and len(table[-1]) == 0
    with pytest.raises(IndexError):
        table[2]
    with pytest.raises(UserError, match="saved as .csv"):
        table.save(tmp_path / "table.xlsx")


@dataclass
class Seeing(SyntheticMatcher):
    """Whose features tell frames apart as a backbone's would: by a small copy of them."""

    def extract_prepared(self, prepared):
        found = super().extract_prepared(prepared)
        return [ImageFeatures(f.prepared, self.look(f.prepared.gray)) for f in found]

    @staticmethod
    def look(gray: np.ndarray) -> Features:
        cell = torch.from_numpy(gray.reshape(1, 1, 1, -1).copy())
        return Features(cell, cell, torch.ones(1, 1, 1, dtype=torch.bool))


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    """Frames of a camera that goes along a scene and back, and what was followed through them."""
    root = tmp_path_factory.mktemp("walk") / "scene"
    scene = make_scene(root, 6)
    order = [0, 1, 2, 3, 4, 5, 4, 3, 2, 1, 0]
    matcher = Seeing(scene)
    frames = [root / "images" / scene.names[n] for n in order]
    return scene, order, frames, matcher, follow(matcher, frames, SequenceOptions(gap=4))


def test_each_frame_is_looked_at_once(walk):
    scene, order, frames, matcher, tracks = walk
    assert matcher.extracted == [scene.names[n] for n in order]
    assert len(tracks.sizes) == len(frames) and set(tracks.frame.tolist()) == set(range(len(frames)))


def test_frames_that_are_seen_again_are_found(walk):
    _, order, _, _, tracks = walk
    again = [(a, b) for a, b in tracks.links if b - a > 1]
    assert {(n, n + 1) for n in range(10)} <= set(tracks.links)
    assert [order[a] == order[b] for a, b in again].count(True) >= 3 and (0, 10) in again


def test_tracks_stay_on_their_points(walk):
    """Where two frames see a track, depth and poses tell where the one is in the other."""
    scene, order, _, _, tracks = walk
    assert tracks.lengths.max() >= 6 and tracks.lengths.min() >= 2 and len(tracks) > 300
    # Frames that were matched, and frames that only others connect: points are shared by rounding there.
    for first, second, most in ((0, 1, 0.3), (0, 10, 0.3), (0, 3, 0.7), (1, 7, 0.7)):
        m = tracks.between(first, second)
        a, b = order[first], order[second]
        x, y = np.rint(m.keypoints0).astype(int).T
        rays = np.c_[m.keypoints0, np.ones(len(m))] @ np.linalg.inv(K).T * scene.depth[a, y, x, None]
        world = (rays - scene.T[a, :3, 3]) @ scene.T[a, :3, :3]
        p = (world @ scene.T[b, :3, :3].T + scene.T[b, :3, 3]) @ K.T
        error = np.linalg.norm(p[:, :2] / p[:, 2:] - m.keypoints1, axis=1)
        assert len(m) > 100 and np.median(error) < most and (error < 2).mean() > 0.9  # but for edges of depth


def test_no_track_has_a_frame_twice(walk):
    tracks = walk[-1]
    rows = np.stack([tracks.track, tracks.frame], axis=1)
    assert len(np.unique(rows, axis=0)) == len(rows)
    assert (np.lexsort((tracks.frame, tracks.track)) == np.arange(len(rows))).all()


def slow_without_doubles(frame, edges, weight):
    """Sets of keypoints: all that matches connect, but where a frame would be doubled, from the best match
    on, without those that would do it."""
    groups = [{n} for n in range(len(frame))]
    for a, b in edges:
        first, second = (next(g for g in groups if n in g) for n in (a, b))
        if first is not second:
            groups.remove(second)
            first |= second
    done = []
    for group in groups:
        if len({frame[n] for n in group}) == len(group):
            done.append(group)
            continue
        parts = [{n} for n in group]
        for row in sorted((r for r in range(len(edges)) if edges[r][0] in group), key=lambda r: -weight[r]):
            first, second = (next(g for g in parts if n in g) for n in edges[row])
            if first is not second and not {frame[n] for n in first} & {frame[n] for n in second}:
                parts.remove(second)
                first |= second
        done += parts
    return sorted(sorted(g) for g in done)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_doubled_frames_are_parted_as_by_the_slow_way(data):
    count = data.draw(st.integers(1, 12))
    frame = np.array(data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)))
    ends = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)).filter(
        lambda e: frame[e[0]] != frame[e[1]]
    )
    edges = data.draw(st.lists(ends, max_size=15)) if len(set(frame.tolist())) > 1 else []
    weight = np.array(data.draw(st.permutations(range(len(edges)))), float)
    array = np.array(edges, np.int64).reshape(-1, 2)
    label = without_doubles(components(count, array), frame, array, weight)
    groups = [sorted(np.flatnonzero(label == g).tolist()) for g in np.unique(label)]
    assert sorted(groups) == slow_without_doubles(frame.tolist(), edges, weight.tolist())


def test_a_cut_ends_all_tracks(walk, tmp_path):
    """Matches that agree with nothing join nothing."""
    scene, _, frames, _, _ = walk

    @dataclass
    class Cutting(Seeing):
        def match(self, a, b):
            found = super().match(a, b)
            if {a.name, b.name} != {str(frames[2]), str(frames[3])}:
                return found
            g = np.random.default_rng(0)
            return Matches(
                found.keypoints0, g.uniform(0, 100, found.keypoints1.shape), found.scores, a.size, b.size
            )

    tracks = follow(Cutting(scene), frames[:6], SequenceOptions(again=0))
    assert (2, 3) not in tracks.links and len(tracks.between(2, 3)) == 0 < len(tracks.between(3, 5))


def test_what_is_kept_of_the_past_has_a_limit():
    features = [Seeing.look(np.full((4, 4), float(n), np.float32)) for n in range(20)]
    size = features[0].coarse.nbytes + features[0].valid.nbytes
    past = Past(4 * size)
    looks = np.eye(20, dtype=np.float32)
    for n in range(20):
        past.add(n, features[n], looks[n])
        assert past.used <= 4 * size
    kept = [n for n in range(20) if past.most_alike(looks[n], 20, 1)[0][0] == n]
    assert kept == [0, 8, 16]
    assert past.most_alike(looks[16], 15, 5) and all(n <= 15 for n, _ in past.most_alike(looks[16], 15, 5))
    assert past.most_alike(looks[0], 20, 0) == []


def test_tracks_are_saved_and_bad_input_is_told(walk, matcher, tmp_path):
    tracks = walk[-1]
    tracks.save(tmp_path / "tracks.npz")
    tracks.save(tmp_path / "tracks.csv")
    with np.load(tmp_path / "tracks.npz", allow_pickle=False) as arrays:
        np.testing.assert_array_equal(arrays["xy"], tracks.xy)
    rows = list(csv.DictReader((tmp_path / "tracks.csv").open()))
    assert len(rows) == len(tracks.track) and int(rows[-1]["track"]) == len(tracks) - 1
    picture = tracks.plot(walk[2][5], 5, tmp_path / "tracks.png")
    assert (load_image(tmp_path / "tracks.png").rgb == picture).all()
    assert 0.05 < (picture != load_image(walk[2][5]).rgb).any(axis=2).mean() < 1
    with pytest.raises(UserError, match="frame 11 is 0x0, the image is 160x120"):
        tracks.plot(walk[2][5], 11)
    with pytest.raises(UserError, match=r"saved as \.csv or \.npz"):
        tracks.save(tmp_path / "tracks.txt")
    with pytest.raises(UserError, match="none has the number 11"):
        tracks.between(0, 11)
    with pytest.raises(UserError, match="no frames to track"):
        matcher.track([])
    for options in ({"again": -1}, {"gap": 0}, {"min_length": 1}):
        with pytest.raises(UserError):
            matcher.track(crops(2), **options)


def test_the_backbone_sees_each_frame_of_a_matcher_once(matcher, monkeypatch):
    seen = count_extractions(matcher, monkeypatch)
    tracks = matcher.track(crops(5), gap=1)  # though the matcher would turn frames that hardly match
    assert isinstance(tracks, Tracks) and sum(seen) == 5 and len(tracks.sizes) == 5
    alone = matcher.track(crops(1))
    assert len(alone) == 0 and alone.lengths.tolist() == [] and alone.links == []


@pytest.mark.slow
def test_the_shipped_weights_follow_a_photo_there_and_back():
    """A part of a photo that moves over it and returns: tracks hold to the photo's own pixels."""
    photo, n = load_image(ASSETS / "astronaut0.jpg").pixels, 8
    at = [(round(100 + 90 * np.sin(np.pi * k / (n - 1))), 60) for k in range(n)]
    frames = [photo[y : y + 192, x : x + 256] for x, y in at]
    tracks = Matcher(device="cpu", size=256).track(frames, gap=4)
    there = tracks.xy + np.array(at)[tracks.frame]
    mean = np.stack([np.bincount(tracks.track, there[:, k]) / tracks.lengths for k in (0, 1)], axis=1)
    off = np.linalg.norm(there - mean[tracks.track], axis=1)
    assert np.median(off) < 0.2 and (off < 1).mean() > 0.95 and tracks.lengths.max() == n
    assert any(b - a > 3 for a, b in tracks.links)


def test_true_matches_are_those_of_the_scene(walk):
    """What these tests rest on."""
    scene = walk[0]
    points0, points1 = true_matches(scene, 0, 0)
    np.testing.assert_allclose(points0, points1, atol=1e-6)
