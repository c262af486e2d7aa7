"""Matches in the formats of other tools, there and back."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import cv2
import h5py
import numpy as np
import pytest
import torch
from conftest import ASSETS
from typer.testing import CliRunner

from prism_match import PRISM, Matches, UserError
from prism_match.cli.export import export_app
from prism_match.engine import MatchStore
from prism_match.export.hloc import (
    DenseMatches,
    HlocKeypoints,
    export_hloc,
    read_dense_matches,
    read_features,
    read_sparse_matches,
    write_features,
    write_matches,
)
from prism_match.maps.shared_keypoints import IndexedMatches

NAMES = ["db/1.jpg", "db/deep/2.jpg", "query/night/q.jpg"]


def random_matches(seed: int, count: int = 40, names: tuple[str, str] = ("a.jpg", "b.jpg")) -> Matches:
    rng = np.random.default_rng(seed)
    points = rng.uniform(0, 200, (2, count, 2)).astype(np.float32)
    scores = np.sort(rng.random(count).astype(np.float32))[::-1].copy()
    return Matches(points[0], points[1], scores, (320, 240), (300, 200), *names)


# ---- OpenCV


def test_opencv_there_and_back() -> None:
    m = random_matches(0)
    back = Matches.from_opencv(*m.to_opencv(), m.size0, m.size1, m.name0, m.name1)
    np.testing.assert_array_equal(back.keypoints0, m.keypoints0)
    np.testing.assert_array_equal(back.keypoints1, m.keypoints1)
    np.testing.assert_allclose(back.scores, m.scores, atol=1e-6)
    assert (back.size0, back.size1, back.name0, back.name1) == (m.size0, m.size1, m.name0, m.name1)


def test_opencv_takes_and_gives_nothing() -> None:
    empty = random_matches(0, 0)
    assert empty.to_opencv() == ([], [], [])
    back = Matches.from_opencv([], [], [], (1, 2), (3, 4))
    assert back.keypoints0.shape == (0, 2) and len(back) == 0


def test_matches_of_opencv_come_best_first(photo: np.ndarray) -> None:
    sift = cv2.SIFT_create(100)
    k0, d0 = sift.detectAndCompute(photo, None)
    k1, d1 = sift.detectAndCompute(cv2.GaussianBlur(photo, (0, 0), 1), None)
    links = cv2.BFMatcher(crossCheck=True).match(d0, d1)
    size = photo.shape[1], photo.shape[0]
    m = Matches.from_opencv(k0, k1, links, size, size)
    best = min(links, key=lambda x: x.distance)
    np.testing.assert_allclose(m.keypoints0[0], k0[best.queryIdx].pt, rtol=1e-6)
    assert (np.diff(m.scores) <= 0).all() and m.scores.min() >= 0 and len(m) == len(links)


def test_opencv_draws_them(photo: np.ndarray) -> None:
    m = random_matches(1, 5)
    k0, k1, links = m.to_opencv()
    picture = cv2.drawMatches(photo[:240, :320], k0, photo[:200, :300], k1, links, None)
    assert picture.shape == (240, 620, 3)


# ---- hloc


def test_hloc_features_there_and_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    features = {
        name: HlocKeypoints(rng.random((n, 2), np.float32), rng.random(n, np.float32), (640, 480))
        for n, name in enumerate(NAMES)
    }
    write_features(tmp_path / "features.h5", features)
    back = read_features(tmp_path / "features.h5")
    assert sorted(back) == sorted(NAMES)
    for name in NAMES:
        np.testing.assert_array_equal(back[name].keypoints, features[name].keypoints)
        np.testing.assert_array_equal(back[name].scores, features[name].scores)
        assert back[name].size == (640, 480)
    with h5py.File(tmp_path / "features.h5") as file:  # as hloc looks for them
        assert file["db/deep/2.jpg"]["keypoints"].shape == (1, 2)
        assert file["db"]["deep"]["2.jpg"]["keypoints"].attrs["uncertainty"] == 1.0


def test_hloc_matches_there_and_back(tmp_path: Path) -> None:
    path = tmp_path / "matches.h5"
    sparse = {
        (NAMES[0], NAMES[1]): IndexedMatches(np.array([[3, 1], [0, 2]]), np.array([0.5, 0.25], np.float32)),
        (NAMES[2], NAMES[0]): IndexedMatches(np.empty((0, 2), np.int64), np.empty(0, np.float32)),
    }
    m = random_matches(2)
    dense = {(NAMES[0], NAMES[1]): DenseMatches(m.keypoints0, m.keypoints1, m.scores)}
    write_matches(path, sparse, dict.fromkeys(NAMES, 5), dense.items())
    with h5py.File(path) as file:  # as hloc looks for them
        group = file["db-1.jpg"]["db-deep-2.jpg"]
        assert group["matches0"][()].tolist() == [2, -1, -1, 1, -1]
        assert group["matching_scores0"][()].tolist() == [0.25, 0, 0, 0.5, 0]
        assert group["keypoints0"].shape == group["keypoints1"].shape == (40, 2)
        assert file["query-night-q.jpg"]["db-1.jpg"]["matches0"].shape == (5,)
    back = dict(read_sparse_matches(path, NAMES))
    assert set(back) == set(sparse)
    for names, matches in sparse.items():
        order = np.argsort(matches.index[:, 0])
        np.testing.assert_array_equal(back[names].index, matches.index[order])
        np.testing.assert_array_equal(back[names].scores, matches.scores[order])
    again = dict(read_dense_matches(path, NAMES))
    assert list(again) == list(dense)
    np.testing.assert_array_equal(again[NAMES[0], NAMES[1]].keypoints1, m.keypoints1)


def test_names_that_hloc_cannot_tell_apart_are_refused(tmp_path: Path) -> None:
    same = IndexedMatches(np.array([[0, 0]]), np.ones(1, np.float32))
    with pytest.raises(UserError, match="the same name in hloc's files"):
        write_matches(tmp_path / "m.h5", {("a/b.jpg", "a-b.jpg"): same}, {"a/b.jpg": 1, "a-b.jpg": 1})
    assert not list(tmp_path.iterdir())


def test_files_that_are_none_of_hlocs(tmp_path: Path) -> None:
    path = tmp_path / "matches.h5"
    with h5py.File(path, "w") as file:  # as our own store has them
        file["images"] = ["a.jpg"]
        file.create_group("pairs/a.jpg/b.jpg")
    with pytest.raises(UserError, match="not a file of hloc's features"):
        read_features(path)
    for read in (read_sparse_matches, read_dense_matches):
        with pytest.raises(UserError, match="not a file of hloc's matches"):
            list(read(path, ["a.jpg", "b.jpg"]))


def test_export_of_single_pairs(tmp_path: Path) -> None:
    files = []
    for n, pair in enumerate([("x/a.jpg", "x/b.jpg"), ("x/b.jpg", "c.jpg")]):
        m = random_matches(n, names=(str(tmp_path / pair[0]), str(tmp_path / pair[1])))
        files.append(tmp_path / f"{n}.npz")
        m.save(files[-1])
    out = tmp_path / "out"
    result = CliRunner().invoke(export_app, ["hloc", *map(str, files), "-o", str(out)])
    assert result.exit_code == 0, result.output
    features = read_features(out / "features.h5")
    assert sorted(features) == ["c.jpg", "x/a.jpg", "x/b.jpg"]
    assert features["c.jpg"].size == (300, 200)
    assert (out / "pairs.txt").read_text() == "x/a.jpg x/b.jpg\nx/b.jpg c.jpg\n"
    dense = dict(read_dense_matches(out / "matches.h5", features))
    np.testing.assert_array_equal(dense["x/b.jpg", "c.jpg"].keypoints0, random_matches(1).keypoints0)
    for names, sparse in read_sparse_matches(out / "matches.h5", features):
        points = dense[names]
        for side, name in enumerate(names):
            there = features[name].keypoints[sparse.index[:, side]]
            mine = (points.keypoints0, points.keypoints1)[side]
            nearest = np.linalg.norm(there[:, None] - mine[None], axis=2).min(axis=1)
            assert len(nearest) > 20 and nearest.max() <= 1.0


@pytest.mark.parametrize("count", [0, 40])
def test_images_and_pairs_without_matches_are_exported_too(tmp_path: Path, count: int) -> None:
    """hloc asks for each pair of pairs.txt, and for the key points of each image."""
    pairs = {("a.jpg", "b.jpg"): random_matches(0, count), ("a.jpg", "c.jpg"): random_matches(1, 0)}
    with MatchStore(tmp_path / "store.h5", {}) as store:
        store.add(pairs, dict.fromkeys(("a.jpg", "b.jpg", "c.jpg"), ""))
        store.merge()
    counts = export_hloc([tmp_path / "store.h5"], tmp_path)
    assert (counts["images"], counts["pairs"]) == (3, 2) and (counts["matches"] > 0) == (count > 0)
    with h5py.File(tmp_path / "features.h5") as features, h5py.File(tmp_path / "matches.h5") as matches:
        for line in (tmp_path / "pairs.txt").read_text().splitlines():
            first, second = line.split()
            group = matches[f"{first}/{second}"]
            assert len(group["matches0"]) == len(group["matching_scores0"]) == len(features[first]["scores"])
        assert features["c.jpg"]["keypoints"].shape == (0, 2)


def test_one_image_under_two_names_is_refused(tmp_path: Path) -> None:
    one = HlocKeypoints(np.zeros((0, 2), np.float32), np.zeros(0, np.float32))
    with pytest.raises(UserError, match="under two names"):
        write_features(tmp_path / "features.h5", {"a.jpg": one, "./a.jpg": one})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("source", ["store", "file"])
def test_matches_are_not_replaced_by_what_they_are_exported_to(tmp_path: Path, source: str) -> None:
    path, m = tmp_path / "matches.h5", random_matches(0, names=("a.jpg", "b.jpg"))
    if source == "file":
        m.save(path)
    else:
        with MatchStore(path, {"size": 480}) as store:
            store.add({("a.jpg", "b.jpg"): m}, {"a.jpg": "0", "b.jpg": "1"})
            store.merge()
    before = path.read_bytes()
    with pytest.raises(UserError, match="would be replaced; give another folder"):
        export_hloc([path], tmp_path)
    assert path.read_bytes() == before


def test_the_way_back_is_as_the_page_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = HlocKeypoints(np.ones((5, 2), np.float32), np.ones(5, np.float32))
    write_features(tmp_path / "features.h5", dict.fromkeys(NAMES[:2], points))
    sparse = {(NAMES[0], NAMES[1]): IndexedMatches(np.array([[3, 1], [0, 2]]), np.ones(2, np.float32))}
    write_matches(tmp_path / "matches.h5", sparse, dict.fromkeys(NAMES[:2], 5))
    page = (Path(__file__).parents[1] / "docs" / "hloc.md").read_text(encoding="utf-8")
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "read_features(" in b)
    monkeypatch.chdir(tmp_path)
    done: dict[str, np.ndarray] = {}
    exec(block, done)
    assert done["points0"].shape == done["points1"].shape == (2, 2)


@pytest.mark.parametrize("name, reason", [("no.npz", "no such file"), ("bad.h5", "not a file of matches")])
def test_bad_matches_give_one_line(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "bad.h5").write_bytes(b"nonsense")
    result = CliRunner().invoke(export_app, ["hloc", str(tmp_path / name), "-o", str(tmp_path / "out")])
    assert isinstance(result.exception, UserError) and reason in str(result.exception)
    assert not (tmp_path / "out").exists()


def damaged_copies(path: Path, count: int) -> Iterator[None]:
    """The file cut at `count` places, then with a byte changed at as many."""
    good, g = path.read_bytes(), np.random.default_rng(0)
    for n in g.integers(1, len(good), count):
        path.write_bytes(good[:n])
        yield
    for n in g.integers(0, len(good), count):
        path.write_bytes(good[:n] + bytes([good[n] ^ 0x55]) + good[n + 1 :])
        yield
    path.write_bytes(good)


def test_a_damaged_file_is_not_exported(tmp_path: Path) -> None:
    """Not in part, and not with other numbers."""
    path, out = tmp_path / "ab.h5", tmp_path / "out"
    names = (str(tmp_path / "a.jpg"), str(tmp_path / "b.jpg"))
    expected = random_matches(3, count=1000, names=names)
    expected.save(path)
    refused = 0
    for _ in damaged_copies(path, 40):
        result = CliRunner().invoke(export_app, ["hloc", str(path), "-o", str(out)])
        if result.exit_code:
            refused += 1
            assert isinstance(result.exception, UserError), result.exception
            assert str(result.exception).startswith(f"{path}: ") and not out.exists()
        else:
            (dense,) = (m for _, m in read_dense_matches(out / "matches.h5", ["a.jpg", "b.jpg"]))
            np.testing.assert_array_equal(dense.keypoints0, expected.keypoints0)
            shutil.rmtree(out)
    assert refused > 50


def test_damaged_files_of_hlocs_are_told(tmp_path: Path) -> None:
    features, path = tmp_path / "features.h5", tmp_path / "matches.h5"
    write_features(features, {"a": HlocKeypoints(np.ones((500, 2), np.float32), np.ones(500, np.float32))})
    m = random_matches(2)
    dense = DenseMatches(m.keypoints0, m.keypoints1, m.scores)
    sparse = IndexedMatches(np.array([[3, 1], [0, 2]]), np.ones(2, np.float32))
    write_matches(path, {("a", "b"): sparse}, {"a": 5, "b": 5}, [(("a", "b"), dense)])
    data = features.read_bytes()
    at = data.index(np.float32(1).tobytes() * 8)  # among the key points themselves
    features.write_bytes(data[:at] + b"\1" + data[at + 1 :])
    with pytest.raises(UserError, match="features.h5: not a file of hloc's features, or a damaged one"):
        read_features(features)
    for _ in damaged_copies(path, 40):
        for read, before in ((read_sparse_matches, sparse), (read_dense_matches, dense)):
            try:
                found = [m for _, m in read(path, ["a", "b"])]
            except UserError as error:
                assert str(error).startswith(f"{path}: ")
            else:
                assert not found or np.array_equal(np.sort(found[0].scores), np.sort(before.scores))


# ---- kornia


def test_the_kornia_example_runs_without_kornia(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "kornia", None)
    example = runpy.run_path(str(ASSETS.parents[2] / "examples" / "kornia_style.py"))
    example["main"].__globals__["LONGER_SIDE"] = 320
    example["main"](str(ASSETS / "astronaut0.jpg"), str(ASSETS / "astronaut1.jpg"))
    matches, agree = (int(line.split()[0]) for line in capsys.readouterr().out.splitlines())
    assert matches > 20 and agree > matches / 2


def test_a_program_written_for_kornia_needs_no_thought_of_gradients(tiny: PRISM) -> None:
    """It calls the model and nothing else. With gradients that would take several times the memory."""
    image = torch.rand(1, 1, 64, 64)
    found = tiny({"image0": image, "image1": image})
    assert not any(value.requires_grad for value in found.values())
