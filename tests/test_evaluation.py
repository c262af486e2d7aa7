"""Benchmarks on small data that is made here, end to end; and a few real pairs where they are at hand."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import get_args

import cv2
import h5py
import numpy as np
import pytest
import torch
import typer
from conftest import needs_shared
from rgbd_for_tests import write_sequence
from synthetic_scene import HEIGHT, WIDTH, K, Scene, make_scene
from typer.testing import CliRunner

from prism_match import Matcher, UserError
from prism_match.cli.eval import evaluate
from prism_match.config import PRESETS
from prism_match.engine.methods import Plugin, Resized, ResizedImages, Sift, as_method, make_matches
from prism_match.engine.photos import Resize, scale_points, scaling
from prism_match.evaluation import Benchmark, runner
from prism_match.evaluation.benchmarks import BENCHMARKS
from prism_match.evaluation.hpatches import evaluate_homography, read_hpatches, read_sequence
from prism_match.evaluation.masks import mask_quality, summarise
from prism_match.evaluation.megadepth import read_megadepth
from prism_match.evaluation.options import Options, warn_once
from prism_match.evaluation.pairs import Pair, PosePair, choose
from prism_match.evaluation.pose import evaluate_pose
from prism_match.evaluation.posed import in_resized_frames, read_calibrated, read_pair_list
from prism_match.evaluation.report import COLOURS
from prism_match.evaluation.rgbd import bin_name, read_rgbd, spread_choice
from prism_match.evaluation.runner import Result, Run
from prism_match.evaluation.scannet import read_scannet
from prism_match.evaluation.sweeps import THETA_C, THETA_P
from prism_match.files import file_digest, lock_folder
from prism_match.geometry import warp_points
from prism_match.matches import Matches
from prism_match.model.prism import PRISM
from prism_match.weights.store import export_weights

SIZE = 200  # not the size of the images, so that going back and forth counts


# ---- data


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("scene") / "Undistorted_SfM" / "0015", views=4)


@pytest.fixture(scope="module")
def megadepth(scene: Scene) -> Path:
    """The scene in MegaDepth's layout: two lists, five pairs, depth for all."""
    root = scene.root.parents[1]
    count = len(scene.names)
    info = {k: np.full(count, None, object) for k in ("image_paths", "depth_paths", "intrinsics", "poses")}
    colmap_K = K.copy()
    colmap_K[:2, 2] += 0.5
    (root / "depths").mkdir()
    for n, name in enumerate(scene.names):
        info["image_paths"][n] = f"Undistorted_SfM/0015/images/{name}"
        info["depth_paths"][n] = f"depths/{n}.h5"
        info["intrinsics"][n], info["poses"][n] = colmap_K, scene.T[n]
        with h5py.File(root / "depths" / f"{n}.h5", "w") as file:
            file["depth"] = scene.depth[n].astype(np.float32)
    (root / "scene_info").mkdir()
    for split, pairs in (("0015_0.1_0.3", [(0, 2), (1, 3)]), ("0015_0.3_0.5", [(0, 1), (1, 2), (2, 3)])):
        info["pair_infos"] = np.empty(len(pairs), object)
        for n, pair in enumerate(pairs):
            info["pair_infos"][n] = (np.array(pair), 0.4, np.zeros(4))
        np.savez(root / "scene_info" / f"{split}.npz", **info)
    return root


@pytest.fixture(scope="module")
def sequences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sequences like HPatches, of different image formats and sizes."""
    root = tmp_path_factory.mktemp("sequences")
    rng = np.random.default_rng(0)
    for name, suffix, size in (("v_a", "ppm", (90, 60)), ("i_b", "png", (64, 80)), ("i_c", "jpg", (120, 80))):
        (root / name).mkdir()
        for k in range(1, 4):
            image = cv2.resize(rng.integers(0, 255, (12, 12, 3), np.uint8), size)
            cv2.imwrite(str(root / name / f"{k}.{suffix}"), image)
            H = np.array([[1, 0.02 * k, k], [0.01, 1.1, 2], [1e-4, 0, 1]])
            if k > 1:
                np.savetxt(root / name / f"H_1_{k}", H)
    return root


class Oracle(ResizedImages):
    """Knows the truth: exact matches of random points, or what a test wants instead."""

    name = "oracle"

    def __init__(self, pairs: Iterable[Pair], noise: float = 0.0, interrupt_after: int | None = None):
        pairs = list(pairs)
        there = [p for p in pairs if p.image0.is_file() and p.image1.is_file()]
        self.seed = len(pairs)
        self.pairs = {(file_digest(p.image0), file_digest(p.image1)): p for p in there}
        self.settings = {"method": "oracle", "noise": noise}
        self.noise, self.interrupt_after, self.matched = noise, interrupt_after, 0

    def extract(self, prepared: list[Resized]) -> list[Resized]:
        return list(prepared)

    def match(self, pairs: list[tuple[Resized, Resized]]) -> list[Matches]:
        return [self.match_one(*images) for images in pairs]

    def match_one(self, a: Resized, b: Resized) -> Matches:
        if self.matched == self.interrupt_after:
            raise KeyboardInterrupt
        self.matched += 1
        pair = self.pairs[file_digest(Path(a.name)), file_digest(Path(b.name))]
        rng = np.random.default_rng(self.seed)
        points = self.points(pair, a.image, b.image, rng)
        points[1] += rng.normal(0, self.noise, points[1].shape) if self.noise else 0
        points = a.to_original(points[0]), b.to_original(points[1])
        return make_matches(*points, np.linspace(1, 0.5, len(points[0])), a, b)

    def points(self, pair: Pair, image0, image1, rng: np.random.Generator) -> list[np.ndarray]:  # noqa: ANN001
        file_sizes = [cv2.imread(str(p)).shape[1::-1] for p in (pair.image0, pair.image1)]
        if isinstance(pair, PosePair):
            X = rng.uniform([-1, -0.7, 3], [1, 0.7, 5], (60, 3))
            there = X @ pair.T_0to1[:3, :3].T + pair.T_0to1[:3, 3]
            pixels = [x @ k.T / x[:, 2:] for x, k in ((X, pair.K0), (there, pair.K1))]
            frames = [pair.frame0 or file_sizes[0], pair.frame1 or file_sizes[1]]
            pixels = [p[:, :2] for p in pixels]
        else:
            pixels = [rng.uniform([0, 0], file_sizes[0], (60, 2))]
            pixels, frames = [*pixels, warp_points(pixels[0], pair.H)], file_sizes
        sizes = (image0.size, image1.size)
        return [scale_points(p, f, s) for p, f, s in zip(pixels, frames, sizes, strict=True)]


def function_method(function) -> Plugin:  # noqa: ANN001
    return Plugin("here:function", function)


def numbers(result: Result) -> object:
    return result.scores, result.auc, result.unusable


# ---- relative pose


@pytest.mark.parametrize("ransac", ["opencv", "usac", "poselib"])
def test_exact_matches_give_100(megadepth: Path, ransac: str) -> None:
    if ransac == "poselib":
        pytest.importorskip("poselib")
    pairs = read_megadepth(megadepth)
    result = evaluate_pose(pairs, Oracle(pairs), SIZE, ransac)
    assert all(v > 99 for v in result.auc.values()), result.scores
    assert result.mean("precision") == 100 and result.mean("matches") == 60
    assert not result.failures and result.settings["ransac"] == ransac


def test_errors_are_those_of_the_pose(megadepth: Path) -> None:
    pairs = read_megadepth(megadepth)[:1]
    noisy = evaluate_pose(pairs, Oracle(pairs, noise=2.0), SIZE).scores[0]
    assert noisy.error == max(noisy.parts["rotation"], noisy.parts["translation"]) > 0.05


def test_reading_megadepth(megadepth: Path, scene: Scene) -> None:
    pairs = read_megadepth(megadepth)
    assert [p.split for p in pairs] == ["0015_0.1_0.3"] * 2 + ["0015_0.3_0.5"] * 3
    assert {p.scene for p in pairs} == {"0015"}
    np.testing.assert_allclose(pairs[0].K0, K)
    np.testing.assert_allclose(pairs[0].T_0to1, scene.T[2] @ np.linalg.inv(scene.T[0]))
    assert pairs[0].depth0.is_file() and len({p.name for p in pairs}) == 5


def test_breakdown_by_list(megadepth: Path) -> None:
    pairs = read_megadepth(megadepth)
    result = evaluate_pose(pairs, Oracle(pairs), SIZE)
    parts = result.subset("split")
    assert {k: len(r.scores) for k, r in parts.items()} == {"0015_0.1_0.3": 2, "0015_0.3_0.5": 3}
    assert json.loads(json.dumps(result.to_dict()))["splits"]["0015_0.1_0.3"]["pairs"] == 2


@pytest.mark.parametrize(
    ("points", "word"),
    [
        (np.zeros((0, 2)), "0 matches"),
        (np.random.default_rng(0).random((4, 2)) * 100, "4 matches"),
        (np.stack([np.arange(40), 2 * np.arange(40)], axis=1), "on a line"),
        (np.full((30, 2), 7.0), "on a line"),
    ],
)
def test_degenerate_matches_fail(megadepth: Path, sequences: Path, points: np.ndarray, word: str) -> None:
    method = function_method(lambda a, b: (points, points))
    result = evaluate_pose(read_megadepth(megadepth), method, SIZE)
    assert result.auc == {"5": 0, "10": 0, "20": 0}
    assert len(result.scores) == len(result.failures) == 5
    assert all(word in reason for reason in result.failures.values())
    if "4" not in word:
        assert evaluate_homography(read_hpatches(sequences), method).auc == {"3": 0, "5": 0, "10": 0}


def test_random_matches_never_crash(megadepth: Path) -> None:
    rng = np.random.default_rng(0)

    def nonsense(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        n = rng.integers(5, 12)
        return rng.random((n, 2)) * a.shape[1::-1], rng.random((n, 2)) * b.shape[1::-1]

    result = evaluate_pose(read_megadepth(megadepth), function_method(nonsense), SIZE)
    assert len(result.scores) == 5 and all(0 <= v <= 100 for v in result.auc.values())


def test_missing_and_broken_images_count_as_failures(megadepth: Path, tmp_path: Path) -> None:
    pairs = read_megadepth(megadepth)
    broken = tmp_path / "broken.jpg"
    broken.write_text("not an image")
    pairs[1] = replace(pairs[1], image1=tmp_path / "gone.jpg")
    pairs[3] = replace(pairs[3], image0=broken)
    result = evaluate_pose(pairs, Oracle(pairs), SIZE)
    assert [s.name for s in result.scores] == [p.name for p in pairs]
    assert set(result.failures) == {pairs[1].name, pairs[3].name}
    assert "gone.jpg" in result.failures[pairs[1].name] and "broken.jpg" in result.failures[pairs[3].name]
    assert result.auc["20"] == pytest.approx(60, abs=1)


def test_pairs_without_pose_are_told_and_in_no_average(megadepth: Path) -> None:
    pairs = read_megadepth(megadepth)
    pairs[0] = replace(pairs[0], T_0to1=None)
    pairs[1] = replace(pairs[1], T_0to1=np.full((4, 4), np.inf))
    pairs[2] = replace(pairs[2], K0=np.zeros((3, 3)))
    result = evaluate_pose(pairs, Oracle(pairs), SIZE)
    assert set(result.unusable) == {p.name for p in pairs[:3]}
    assert len(result.scores) == 2 and result.auc["20"] > 99


def test_a_pair_that_is_listed_twice_counts_twice(megadepth: Path) -> None:
    pairs = read_megadepth(megadepth)[:1] * 3
    result = evaluate_pose(pairs, Oracle(pairs), SIZE)
    assert [s.name[-2:] for s in result.scores][1:] == ["#2", "#3"] and len(result.scores) == 3


def test_nothing_to_measure_is_the_users_mistake(megadepth: Path, tmp_path: Path) -> None:
    pairs = [replace(p, image0=tmp_path / "gone.jpg") for p in read_megadepth(megadepth)]
    with pytest.raises(UserError, match=r"none of the 5 pairs.*gone\.jpg"):
        evaluate_pose(pairs, "sift")
    for bad in ({"ransac": "magic"}, {"threshold": 0.0}):
        with pytest.raises(UserError):
            evaluate_pose(pairs, "sift", **bad)


def test_seed(megadepth: Path) -> None:
    pairs = read_megadepth(megadepth)
    results = [evaluate_pose(pairs, Oracle(pairs, 1.0), SIZE, seed=s, run=Run(workers=w))
               for s, w in ((0, 1), (0, 4), (1, 1))]  # fmt: skip
    assert numbers(results[0]) == numbers(results[1])
    assert numbers(results[0]) != numbers(results[2])
    chosen = choose(pairs, 3, seed=5)
    assert chosen == choose(pairs, 3, seed=5) and len(chosen) == 3 and chosen != choose(pairs, 3, seed=6)
    assert [p for p in pairs if p in chosen] == chosen, "in their order"
    assert choose(pairs, 99, 0) == pairs
    with pytest.raises(UserError):
        choose(pairs, 0, 0)


# ---- cache and resumption


def test_scoring_from_the_cache_equals_a_direct_run(megadepth: Path, tmp_path: Path) -> None:
    pairs, run = read_megadepth(megadepth), Run(cache=tmp_path)
    first = Oracle(pairs, 1.0)
    evaluate_pose(pairs, first, SIZE, "opencv", run=run)
    again = Oracle(pairs, 1.0)
    cached = evaluate_pose(pairs, again, SIZE, "usac", run=run)
    assert (first.matched, again.matched) == (5, 0) and cached.milliseconds is None
    assert numbers(cached) == numbers(evaluate_pose(pairs, Oracle(pairs, 1.0), SIZE, "usac"))


def test_the_cache_knows_what_matches_depend_on(megadepth: Path, tmp_path: Path) -> None:
    pairs, run = read_megadepth(megadepth), Run(cache=tmp_path)
    evaluate_pose(pairs, Oracle(pairs), SIZE, run=run)
    for method, size in ((Oracle(pairs, 0.5), SIZE), (Oracle(pairs), SIZE + 8)):
        evaluate_pose(pairs, method, size, run=run)
        assert method.matched == 5
    stores = list(tmp_path.glob("*.h5"))
    assert len(stores) == 3
    for file in stores:
        file.write_bytes(file.read_bytes()[:-100])
    method = Oracle(pairs)
    evaluate_pose(pairs, method, SIZE, run=run)
    assert method.matched == 5


def test_no_damage_to_the_cache_changes_a_number(megadepth: Path, tmp_path: Path) -> None:
    """Wherever it is: in matches, in names, or in what the file format keeps between them."""
    pairs, run = read_megadepth(megadepth), Run(cache=tmp_path)
    whole = numbers(evaluate_pose(pairs, Oracle(pairs), SIZE, run=run))
    [store] = tmp_path.glob("*.h5")
    data = store.read_bytes()
    for at in range(0, len(data), 211):
        for file in tmp_path.glob("*.h5"):
            file.unlink()
        store.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        assert numbers(evaluate_pose(pairs, Oracle(pairs), SIZE, run=run)) == whole, at


def test_a_damaged_journal_costs_its_lines_alone(megadepth: Path, tmp_path: Path) -> None:
    pairs, run = read_megadepth(megadepth), Run(out=tmp_path)
    whole = numbers(evaluate_pose(pairs, Oracle(pairs), SIZE, run=run))
    journal = tmp_path / "pairs.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:2], lines[2][:20] + b"\xff" + lines[2][21:], *lines[3:]]))
    method = Oracle(pairs)
    assert numbers(evaluate_pose(pairs, method, SIZE, run=run)) == whole and method.matched == 1


def test_an_interrupted_run_goes_on(megadepth: Path, tmp_path: Path) -> None:
    pairs = read_megadepth(megadepth)
    whole = evaluate_pose(pairs, Oracle(pairs, 1.0), SIZE)
    run = Run(out=tmp_path / "out", workers=1)
    with pytest.raises(KeyboardInterrupt):
        evaluate_pose(pairs, Oracle(pairs, 1.0, interrupt_after=3), SIZE, run=run)
    journal = tmp_path / "out" / "pairs.jsonl"
    done = len(journal.read_text().splitlines()) - 1
    with journal.open("a") as file:
        file.write('{"name": "half a li')
    rest = Oracle(pairs, 1.0)
    assert numbers(evaluate_pose(pairs, rest, SIZE, run=run)) == numbers(whole)
    assert rest.matched == 5 - done
    third = Oracle(pairs, 1.0)
    assert numbers(evaluate_pose(pairs, third, SIZE, run=run)) == numbers(whole) and third.matched == 0


def test_other_settings_begin_anew(megadepth: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pairs, run = read_megadepth(megadepth), Run(out=tmp_path)
    evaluate_pose(pairs, Oracle(pairs), SIZE, run=run)
    method = Oracle(pairs)
    evaluate_pose(pairs, method, SIZE, threshold=0.7, run=run)
    assert method.matched == 5 and "begun anew" in capsys.readouterr().err

    other = Oracle(pairs)
    other.precision = "bfloat16"
    evaluate_pose(pairs, other, SIZE, threshold=0.7, run=run)
    assert other.matched == 5 and "begun anew" in capsys.readouterr().err


def test_a_pair_that_could_not_be_matched_is_tried_again(
    megadepth: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs, run = read_megadepth(megadepth), Run(out=tmp_path)
    with monkeypatch.context() as patched:
        real = runner.match_all
        patched.setattr(
            runner,
            "match_all",
            lambda *given: ((p, "its worker died" if p is pairs[1] else m) for p, m in real(*given)),
        )
        assert list(evaluate_pose(pairs, Oracle(pairs), SIZE, run=run).failures) == [pairs[1].name]
    method = Oracle(pairs)
    assert not evaluate_pose(pairs, method, SIZE, run=run).failures and method.matched == 1


def test_an_empty_photo_costs_its_pairs_alone(sequences: Path, tmp_path: Path) -> None:
    shutil.copytree(sequences, tmp_path / "data")
    (tmp_path / "data" / "i_b" / "3.png").write_bytes(b"")
    pairs = read_hpatches(tmp_path / "data")
    result = evaluate_homography(pairs, "sift", 60, run=Run(out=tmp_path / "out"))
    assert "the file is empty" in result.failures["i_b/1-3"] and len(result.scores) == 6


def test_what_has_changed_is_measured_again(megadepth: Path, tmp_path: Path) -> None:
    pairs, run = read_megadepth(megadepth), Run(out=tmp_path)
    images = [tmp_path / "a.png", tmp_path / "b.png"]
    images[0].write_bytes(pairs[0].image0.read_bytes())
    images[1].write_text("damaged")
    pairs[0] = replace(pairs[0], image0=images[0], image1=images[1])
    assert list(evaluate_pose(pairs, Oracle(pairs), SIZE, run=run).failures) == [pairs[0].name]
    evaluate_pose(pairs[:2], Oracle(pairs), SIZE, run=run)  # fewer pairs: the others stay done
    images[1].write_bytes(pairs[1].image1.read_bytes())
    other = pairs[2].T_0to1.copy()
    other[0, 3] += 0.5
    pairs[2] = replace(pairs[2], T_0to1=other)
    method = Oracle(pairs)
    assert not evaluate_pose(pairs, method, SIZE, run=run).failures
    assert method.matched == 2


def test_failures_survive_resumption(megadepth: Path, tmp_path: Path) -> None:
    nothing = function_method(lambda a, b: (np.zeros((0, 2)), np.zeros((0, 2))))
    results = [evaluate_pose(read_megadepth(megadepth), nothing, SIZE, run=Run(out=tmp_path)) for _ in "ab"]
    assert numbers(results[0]) == numbers(results[1]) and math.isinf(results[1].scores[0].error)


# ---- other readers


def test_homographies(sequences: Path) -> None:
    pairs = read_hpatches(sequences)
    assert [p.name for p in pairs] == [f"{s}/1-{k}" for s in ("i_b", "i_c", "v_a") for k in (2, 3)]
    result = evaluate_homography(pairs, Oracle(pairs))
    assert all(v > 99 for v in result.auc.values()) and result.mean("precision") == 100
    assert set(result.subset("split")) == {"illumination", "viewpoint"}
    assert evaluate_homography(pairs, Oracle(pairs), ransac="usac").auc["3"] > 99


def test_corner_errors_are_in_resized_pixels(sequences: Path) -> None:
    pairs = [p for p in read_hpatches(sequences) if p.scene == "v_a"][:1]
    shift = scaling((90, 60), (90, 60))
    shift[0, 2] = 1.0  # the estimate will be off by one pixel of the file
    moved = [replace(pairs[0], H=shift @ pairs[0].H)]
    found = evaluate_homography(pairs, Oracle(moved), size=120).scores[0]
    assert found.error == pytest.approx(2.0, abs=0.05)


def test_at_most_1000_matches_count(sequences: Path) -> None:
    pairs = read_hpatches(sequences)[:1]

    def many(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, ...]:
        points = np.random.default_rng(0).random((1500, 2)) * 400
        return points, points, np.linspace(0, 1, 1500)

    assert evaluate_homography(pairs, function_method(many)).scores[0].matches == 1000


def test_a_sequence_that_lacks_a_file(sequences: Path, tmp_path: Path) -> None:
    shutil.copytree(sequences, tmp_path / "s")
    (tmp_path / "s" / "v_a" / "3.ppm").unlink()
    (tmp_path / "s" / "i_b" / "H_1_2").write_text("nonsense")
    pairs = read_hpatches(tmp_path / "s")
    result = evaluate_homography(pairs, Oracle(pairs))
    assert set(result.failures) == {"v_a/1-3"} and set(result.unusable) == {"i_b/1-2"}
    with pytest.raises(UserError, match="H_1_2"):
        read_hpatches(tmp_path)


def test_an_image_without_homography_is_told(sequences: Path, tmp_path: Path) -> None:
    shutil.copytree(sequences, tmp_path / "s")
    (tmp_path / "s" / "v_a" / "H_1_3").unlink()
    pairs = read_hpatches(tmp_path / "s")
    assert list(evaluate_homography(pairs, Oracle(pairs)).unusable) == ["v_a/1-3"] and len(pairs) == 6


def write_scannet(root: Path, scene: Scene, with_poses: bool) -> Path:
    folder = root / "scannet_test_1500" / "scene0007_01"
    for name in ("color", "pose"):
        (folder / name).mkdir(parents=True)
    for n in range(3):
        image = cv2.imread(str(scene.root / "images" / scene.names[n]))
        cv2.imwrite(str(folder / "color" / f"{n}.jpg"), image)
        world = np.linalg.inv(scene.T[n])
        np.savetxt(folder / "pose" / f"{n}.txt", world if n < 2 else np.full((4, 4), -np.inf))
    rows = {"name": np.array([[7, 1, 0, 1], [7, 1, 1, 2]], np.uint16)}
    if with_poses:
        relative = [scene.T[b] @ np.linalg.inv(scene.T[a]) for a, b in ((0, 1), (1, 2))]
        rows["rel_pose"] = np.stack([T[:3].ravel() for T in relative])
    np.savez(root / "test.npz", **rows)
    np.savez(root / "intrinsics.npz", scene0007_01=scaling((WIDTH, HEIGHT), (640, 480)) @ K)
    return root


@pytest.mark.parametrize("with_poses", [True, False])
def test_scannet(scene: Scene, tmp_path: Path, with_poses: bool) -> None:
    pairs = read_scannet(write_scannet(tmp_path, scene, with_poses))
    result = evaluate_pose(pairs, Oracle(pairs), Resize(exact=(640, 480)))
    assert len(result.scores) == (2 if with_poses else 1)
    assert len(result.unusable) == (0 if with_poses else 1), "a lost frame has an infinite pose"
    assert all(v > 99 for v in result.auc.values())


def test_pair_list(scene: Scene, tmp_path: Path) -> None:
    T = scene.T[1] @ np.linalg.inv(scene.T[0])
    row = " ".join(f"{x:.10g}" for x in np.concatenate([K.ravel(), K.ravel(), T.ravel()]))
    a, b = (scene.root / "images" / n for n in scene.names[:2])
    intrinsics = " ".join(row.split()[:18])
    text = f"# comment\n{a} {b} 0 0 {row}\n\n{b} {a} 0 0\n{b} {b}\n{a} {a} 0 0 {intrinsics}\n"
    (tmp_path / "pairs.txt").write_text(text)
    for path in (tmp_path / "pairs.txt", tmp_path):
        resizing = Resize(longer=SIZE)
        pairs = in_resized_frames(read_pair_list(path), resizing)
        assert pairs[0].frame0 == (200, 150)
        np.testing.assert_allclose(pairs[0].K0[0, 0], K[0, 0] * 1.25)
        result = evaluate_pose(pairs, Oracle(pairs), resizing)
        assert result.auc["5"] > 99 and list(result.unusable) == [f"{b}-{a}", f"{b}-{b}", f"{a}-{a}"]
    for bad, word in (
        (f"{a} {b} 1 0 {row}", "rotated"),
        (f"{a} {b} 0 0 1 2", "columns"),
        ("a b 0 0 x", "5 c"),
    ):
        (tmp_path / "pairs.txt").write_text(bad)
        with pytest.raises(UserError, match=rf"line 1: .*{word}"):
            read_pair_list(tmp_path / "pairs.txt")


def test_calibrated_folder(scene: Scene, tmp_path: Path) -> None:
    folder = tmp_path / "castle"
    folder.mkdir()
    (folder / "images").symlink_to(scene.root / "images")
    rows = ["# image fx fy cx cy R t"]
    for name, T in zip(scene.names, scene.T, strict=True):
        values = [K[0, 0], K[1, 1], K[0, 2], K[1, 2], *T[:3, :3].ravel(), *T[:3, 3]]
        rows.append(f"{name} " + " ".join(f"{v:.10g}" for v in values))
    (folder / "cameras.txt").write_text("\n".join(rows))
    for root in (tmp_path, folder):
        pairs = read_calibrated(root)
        assert len(pairs) == 6 and {p.scene for p in pairs} == {"castle"}
        assert evaluate_pose(pairs, Oracle(pairs), SIZE).auc["5"] > 99
    behind = np.diag([-1.0, 1, -1])
    turned = [K[0, 0], K[1, 1], K[0, 2], K[1, 2], *behind.ravel(), 0, 0, 0]
    (folder / "cameras.txt").write_text("\n".join([*rows, "x.png " + " ".join(map(str, turned))]))
    assert len(read_calibrated(folder)) == 6, "cameras that look the other way are not matched"
    (folder / "cameras.txt").write_text("a.jpg 1 2 3")
    with pytest.raises(UserError, match="cameras"):
        read_calibrated(folder)


def test_bad_indices(tmp_path: Path) -> None:
    (tmp_path / "scene_info").mkdir()
    (tmp_path / "scene_info" / "x.npz").write_bytes(b"nonsense")
    for read in (read_megadepth, read_scannet, read_hpatches, read_calibrated, read_pair_list):
        with pytest.raises(UserError):
            read(tmp_path)


# ---- RGB-D sequences


@pytest.fixture(scope="module")
def sequence(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scene = make_scene(tmp_path_factory.mktemp("room"), views=8)
    return write_sequence(scene, tmp_path_factory.mktemp("sequences") / "room", scannet=False)


def test_rgbd(sequence: Path) -> None:
    pairs, overlaps = read_rgbd(sequence)
    assert len(pairs) == len(overlaps) > 5 and all(0.1 <= x < 0.8 for x in overlaps.values())
    assert all(p.split == bin_name(overlaps[p.name]) for p in pairs)
    result = evaluate_pose(pairs, Oracle(pairs), SIZE)
    assert result.auc["5"] > 98 and list(result.subset("split")) == sorted({p.split for p in pairs})
    chosen = [[p.name for p in read_rgbd(sequence.parent, 4, seed)[0]] for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2] and len(chosen[0]) == 4


def test_bins_of_overlap_take_turns() -> None:
    overlaps = np.array([0.7] * 50 + [0.15] * 2 + [0.5] * 10 + [0.3] * 9)
    names = [bin_name(overlaps[n]) for n in spread_choice(overlaps, 20, seed=0)]
    assert {name: names.count(name) for name in dict.fromkeys(names)} == {
        "overlap 0.1 to 0.2": 2, "overlap 0.2 to 0.4": 6, "overlap 0.4 to 0.6": 6, "overlap 0.6 to 0.8": 6,
    }  # fmt: skip
    assert len(spread_choice(overlaps, 1000, seed=0)) == len(overlaps)


def test_bad_sequences(sequence: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no RGB-D sequence"):
        read_rgbd(tmp_path)
    with pytest.raises(UserError, match="at least 1"):
        read_rgbd(sequence, 0)
    shutil.copytree(sequence, tmp_path / "room")
    for pose in sorted((tmp_path / "room").glob("*.pose.txt"))[1:]:
        pose.write_text("nonsense")
    with pytest.raises(UserError, match=r"no two frames overlap by 0\.1 to 0\.8"):
        read_rgbd(tmp_path)
    (tmp_path / "room" / "camera-intrinsics.txt").unlink()
    with pytest.raises(UserError, match="intrinsics"):
        read_rgbd(tmp_path)


# ---- methods


def test_sift_finds_a_known_shift(photo: np.ndarray, tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "1.png"), photo[:400, :400])
    cv2.imwrite(str(tmp_path / "2.png"), photo[12:412, 20:420])
    (tmp_path / "H_1_2").write_text("-1 0 20\n0 -1 12\n0 0 -1\n")
    score = evaluate_homography(read_sequence(tmp_path), Sift(500), size=400).scores[0]
    assert score.error < 0.5 and score.matches > 100 and score.precision > 95


def test_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, megadepth: Path) -> None:
    (tmp_path / "mine_for_test.py").write_text(
        "import numpy as np\n"
        "def match(a, b):\n"
        "    assert a.dtype == np.uint8 and a.shape[2] == 3\n"
        "    return [[1, 2], [3, float('nan')]], [[5, 6], [7, 8]]\n"
        "def bad(a, b):\n"
        "    return [[1, 2]], [[5, 6], [7, 8]]\n"
        "def nothing(a, b): pass\n"
        "def three(a, b): return np.zeros((4, 3)), np.zeros((4, 3))\n"
        "number = 7\n"
        "import torch\n"
        "wrapped = torch.inference_mode()(bad)\n"
        "class Called:\n"
        "    def __call__(self, a, b): pass\n"
        "called = Called()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    result = evaluate_pose(read_megadepth(megadepth), "mine_for_test:match", SIZE)
    assert result.mean("matches") == 1 and len(result.failures) == 5
    names = [f"mine_for_test:{name}" for name in ("match", "wrapped", "called")]
    before = [as_method(name).settings for name in names]
    with (tmp_path / "mine_for_test.py").open("a") as file:
        file.write("# changed\n")
    for name, old in zip(names, before, strict=True):
        assert as_method(name).settings != old, "a changed function has no cache yet"
    with pytest.raises(UserError, match="2 points"):
        evaluate_pose(read_megadepth(megadepth), "mine_for_test:bad", SIZE)
    for name, word in (("nothing", "points0"), ("three", "shape")):
        with pytest.raises(UserError, match=word):
            evaluate_pose(read_megadepth(megadepth), f"mine_for_test:{name}", SIZE)
    for name in ("surf", "mine_for_test:none", "mine_for_test:number", "no_such_module:match"):
        with pytest.raises(UserError, match=name.partition(":")[0]):
            as_method(name)


@pytest.fixture(scope="module")
def tiny_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    export_weights(path, PRISM(PRESETS["tiny"]).state_dict(), PRESETS["tiny"], {})
    return path


@pytest.fixture(scope="module")
def tiny_matcher(tiny_weights: Path) -> Matcher:
    return Matcher(tiny_weights, device="cpu", rescale="never", threshold=0, rotate="never")


@pytest.fixture
def tiny(tiny_weights: Path, megadepth: Path) -> Options:
    """A small model on the scene; a test changes what it likes."""
    return Options(
        data=megadepth, size=160, confidence=0.0, weights=(tiny_weights,), device="cpu", rotate="never"
    )


def test_a_matcher_is_a_method(megadepth: Path, tiny_matcher: Matcher, tmp_path: Path) -> None:
    pairs = read_megadepth(megadepth)
    result = evaluate_pose(pairs, tiny_matcher, 160, run=Run(cache=tmp_path))
    direct = tiny_matcher.match(pairs[0].image0, pairs[0].image1)
    assert result.scores[0].matches == len(direct) > 0
    batched = evaluate_pose(pairs, tiny_matcher, 160, run=Run(batch=3))
    assert [s.name for s in batched.scores] == [p.name for p in pairs]
    assert tiny_matcher.size == 832, "the caller's matcher stays as it is"


def test_scores_know_images_by_their_content(megadepth: Path, tmp_path: Path) -> None:
    """Neither by their size and path, nor by where they are."""
    shutil.copytree(megadepth, tmp_path / "here")
    run = Run(out=tmp_path / "out")
    pairs = read_megadepth(tmp_path / "here")
    evaluate_pose(pairs, Oracle(pairs), SIZE, run=run)
    shutil.move(tmp_path / "here", tmp_path / "there")
    moved = read_megadepth(tmp_path / "there")
    method = Oracle(moved)
    evaluate_pose(moved, method, SIZE, run=run)
    assert method.matched == 0
    image = cv2.imread(str(moved[0].image0), cv2.IMREAD_GRAYSCALE)
    before = moved[0].image0.read_bytes()
    other = cv2.imencode(".png", image[::-1])[1].tobytes()
    # Another image of the same length: what follows the end of a PNG is not looked at.
    length = max(len(before), len(other))
    moved[0].image0.write_bytes(before.ljust(length, b"\0"))
    method = Oracle(moved)
    evaluate_pose(moved, method, SIZE, run=run)
    first = method.matched
    moved[0].image0.write_bytes(other.ljust(length, b"\0"))
    method = Oracle(moved)
    evaluate_pose(moved, method, SIZE, run=run)
    assert first == method.matched == sum(moved[0].image0 in (p.image0, p.image1) for p in moved) > 0


@pytest.mark.parametrize("kept", [{"out"}, {"cache"}])
def test_a_folder_of_results_has_one_run_at_a_time(megadepth: Path, tmp_path: Path, kept: set[str]) -> None:
    """The second begins while the first is at work."""
    pairs, run, told = read_megadepth(megadepth), Run(**dict.fromkeys(kept, tmp_path)), []

    class First(Oracle):
        def match(self, images: list[tuple[Resized, Resized]]) -> list[Matches]:
            second = Oracle(pairs)
            with pytest.raises(UserError, match="is in use by another run"):
                evaluate_pose(pairs, second, SIZE, run=run)
            told.append(second.matched)
            return super().match(images)

    evaluate_pose(pairs, First(pairs), SIZE, run=run)
    assert told == [0] * 5
    evaluate_pose(pairs, Oracle(pairs), SIZE, run=run)


def test_the_command_tells_that_a_folder_is_in_use(run_eval, megadepth: Path, tmp_path: Path) -> None:  # noqa: ANN001
    with lock_folder(tmp_path):
        done = run_eval("megadepth1500", "--data", megadepth, "--method", "sift", "--out", tmp_path)
    assert isinstance(done.exception, UserError) and "is in use by another run" in str(done.exception)


# ---- whole benchmarks


def test_masks(tiny: Options) -> None:
    report = BENCHMARKS["masks"](tiny)
    assert report.summary["pairs"] == 5 and report.summary["images"] == 10
    assert 0 < report.summary["miou"] <= 100 and 0 < report.summary["recall"] <= 100
    assert 0 <= report.summary["pruned"] < 100
    keep = np.array([[True, True, False, True]])
    yes, no = np.array([[True, False, True, False]]), np.array([[False, True, False, False]])
    quality = mask_quality(keep, yes, no)
    assert quality == (1 / 3, 1 / 2, 2 / 3, 1 / 4), "the last cell is not known: it counts as kept only"
    wide = [quality._replace(iou_of_all=x, pruned=y) for x, y in ((0.5, 0.1), (0.7, 0.2))]
    narrow = [quality._replace(iou_of_all=x, pruned=y) for x, y in ((0.6, 0.3), (0.1, 0.5))]
    assert summarise([wide, narrow])["pruned_below_half"] == pytest.approx(40)
    assert summarise([wide])["pruned_below_half"] is None
    with pytest.raises(UserError, match="looks into the model"):
        BENCHMARKS["masks"](replace(tiny, method="sift"))


def test_the_true_mask_is_perfect(megadepth: Path) -> None:
    from prism_match.evaluation.covisible import matchable_cells

    pair = read_megadepth(megadepth)[2]
    truth, cells0, _ = matchable_cells(pair, Resize(longer=SIZE))
    yes, no = (x.view(cells0).numpy() for x in (truth.matchable0, truth.unmatchable0))
    assert cells0 == (19, 25) and yes.mean() > 0.3
    assert mask_quality(yes, yes, no)[:2] == (1, 1)


def zoomed(pair: PosePair, folder: Path) -> PosePair:
    """Image 0 and the 64x48 pixels in its middle, two and a half times as large."""
    with h5py.File(pair.depth0) as file, h5py.File(folder / "zoomed.h5", "w") as new:
        new["depth"] = np.repeat(np.repeat(file["depth"][36:84, 48:112], 5, 0), 5, 1)[::2, ::2]
    crop = np.array([[1, 0, -48], [0, 1, -36], [0, 0, 1.0]])
    K1 = scaling((64, 48), (WIDTH, HEIGHT)) @ crop @ pair.K0
    return replace(
        pair, image1=pair.image0, depth1=folder / "zoomed.h5", K1=K1, T_0to1=np.eye(4), name="zoomed"
    )


def test_scale_ratios(tiny: Options, megadepth: Path, tmp_path: Path) -> None:
    from prism_match.evaluation.covisible import scale_ratio

    pair = read_megadepth(megadepth)[2]
    ratio = scale_ratio(pair, Resize(longer=SIZE))
    assert 1 <= ratio < 1.3
    assert scale_ratio(zoomed(pair, tmp_path), Resize(longer=SIZE)) == pytest.approx(2.5, rel=0.01)
    options = replace(tiny, method="sift", run=Run(cache=tmp_path))
    report = BENCHMARKS["megadepth-scale"](options)
    assert report.summary["ratios"].keys() == {p.name for p in read_megadepth(megadepth)}
    assert report.summary["splits"]["[1, 2)"]["pairs"] == 5
    stored = tmp_path / "scale_ratios_160.json"
    stored.write_text(json.dumps(dict.fromkeys(json.loads(stored.read_text()), 3.5)))
    again = BENCHMARKS["megadepth-scale"](options)
    assert list(again.summary["splits"]) == ["[3, 4)"], "ratios come from the cache"
    shutil.copytree(megadepth, tmp_path / "md")
    with h5py.File(tmp_path / "md" / "depths" / "0.h5", "r+") as file:
        file["depth"][...] = file["depth"][...] * 1.001
    changed = BENCHMARKS["megadepth-scale"](replace(options, data=tmp_path / "md"))
    worked_out = [name for name, ratio in changed.summary["ratios"].items() if ratio != 3.5]
    assert 0 < len(worked_out) < 5, "but not for depth that has changed"


def test_pairs_without_depth_are_told(tiny: Options, megadepth: Path, tmp_path: Path) -> None:
    shutil.copytree(megadepth, tmp_path / "md")
    (tmp_path / "md" / "depths" / "0.h5").unlink()
    report = BENCHMARKS["megadepth-scale"](replace(tiny, data=tmp_path / "md", method="sift"))
    assert report.summary["pairs"] == 3 and len(report.summary["unusable"]) == 2
    assert "no depth map" in str(report)


def test_pairs_without_truth_are_told(
    tiny: Options, megadepth: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = read_megadepth(megadepth)
    far = np.eye(4)
    far[0, 3] = 1000.0
    pairs[0], pairs[1] = replace(pairs[0], T_0to1=None), replace(pairs[1], T_0to1=far)
    for name, module in (("megadepth-scale", "scale"), ("masks", "masks")):
        monkeypatch.setattr(f"prism_match.evaluation.{module}.read_megadepth", lambda _: pairs)
        summary = BENCHMARKS[name](tiny).summary
        assert set(summary["unusable"]) == {pairs[0].name, pairs[1].name} and summary["pairs"] == 3


def test_sweeps_tell_what_fails(tiny: Options, megadepth: Path, tmp_path: Path) -> None:
    shutil.copytree(megadepth, tmp_path / "md")
    names = sorted((tmp_path / "md" / "Undistorted_SfM" / "0015" / "images").iterdir())
    names[0].write_text("damaged")
    report = BENCHMARKS["resolution"](replace(tiny, data=tmp_path / "md", method="sift"))
    assert report.summary["pairs"] == 5 and "160 px: 2 pairs failed" in str(report)


def test_resolution(tiny: Options) -> None:
    report = BENCHMARKS["resolution"](replace(tiny, pairs=2))
    assert report.summary["sizes"]["160"]["milliseconds"] > 0 and "160 px" in str(report)


def test_ablation(tiny: Options, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps(PRESETS["tiny"].replace(theta_p=0.5).to_dict()))
    options = replace(tiny, pairs=2, configs=("tiny", str(other)), run=Run(out=tmp_path / "out"))
    report = BENCHMARKS["ablation"](options)
    assert list(report.summary["runs"]) == [f"{tiny.weights[0]} tiny", f"{tiny.weights[0]} {other}"]
    with pytest.raises(UserError, match="at least two"):
        BENCHMARKS["ablation"](tiny)
    with pytest.raises(UserError, match="ablation"):
        BENCHMARKS["megadepth1500"](options)


def test_every_curve_of_a_sweep_has_its_colour() -> None:
    assert len(set(COLOURS)) >= len(THETA_C) + len(THETA_P)


def test_thresholds(tiny: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prism_match.evaluation.sweeps.THETA_C", (0.0, 0.9))
    monkeypatch.setattr("prism_match.evaluation.sweeps.THETA_P", (0.0,))
    runs = BENCHMARKS["thresholds"](replace(tiny, pairs=2)).summary["runs"]
    assert list(runs) == ["theta_c 0", "theta_c 0.9", "theta_p 0"]
    assert runs["theta_c 0"]["matches"] > runs["theta_c 0.9"]["matches"] == 0


# ---- the command


@pytest.fixture
def run_eval():  # noqa: ANN201
    app = typer.Typer()
    app.command()(evaluate)

    def run(*words: object):  # noqa: ANN202
        return CliRunner().invoke(app, [str(w) for w in words])

    return run


def test_command_writes_everything(run_eval, megadepth: Path, tmp_path: Path) -> None:
    out, file = tmp_path / "out", tmp_path / "new" / "numbers.json"
    done = run_eval(
        "megadepth1500", "--data", megadepth, "--method", "sift", "--size", 160, "--out", out, "--json", file
    )
    assert done.exit_code == 0, done.output
    published = ("60.0", "PRISM (paper)", "LoFTR", "EfficientLoFTR", "SP+LightGlue")
    for word in (*published, "160 px", "opencv", "0.5 px", "5 pairs", "by list", "0015_0.1_0.3"):
        assert word in done.output, word
    result = json.loads(file.read_text())
    assert result == json.loads((out / "results.json").read_text())
    assert (result["benchmark"], result["pairs"], result["size"]) == ("megadepth1500", 5, 160)
    assert result["method_settings"] == {"method": "sift", "features": 4096, "ratio": 0.8}
    assert result["ransac"] == "opencv" and set(result["auc"]) == {"5", "10", "20"}
    assert "| SIFT |" in (out / "report.md").read_text()
    for name in ("auc.png", "best_1.png", "best_5.png"):
        assert cv2.imread(str(out / name)).std() > 5


def test_pictures_are_those_of_the_last_run(run_eval, megadepth: Path, tmp_path: Path) -> None:
    words = ("megadepth1500", "--data", megadepth, "--method", "sift", "--size", 160, "--out", tmp_path)
    for more in ((), ("--pairs", 2)):
        assert run_eval(*words, *more).exit_code == 0
    assert sorted(p.name for p in tmp_path.glob("*_*.png")) == ["best_1.png", "best_2.png"]


def test_command_for_homographies(run_eval, sequences: Path, tmp_path: Path) -> None:
    done = run_eval("hpatches", "--data", sequences, "--method", "sift", "--size", 64, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert set(json.loads((tmp_path / "results.json").read_text())["auc"]) == {"3", "5", "10"}
    assert "71.9" in done.output and "shorter side 64 px" in done.output


def test_command_with_a_model(run_eval, megadepth: Path, tiny_weights: Path) -> None:
    words = ("--data", megadepth, "--size", 96, "--pairs", 2, "--confidence", 0, "--device", "cpu")
    done = run_eval("megadepth1500", *words, "--weights", tiny_weights)
    assert done.exit_code == 0 and "PRISM (ours)" in done.output and "2 pairs" in done.output


def test_untrained_weights_are_called_so(
    tiny: Options, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("prism_match.weights.SHIPPED", tmp_path / "none")
    warn_once.cache_clear()
    replace(tiny, weights=(), configs=("tiny",)).make_method()
    assert "untrained" in capsys.readouterr().err


def test_mistakes(run_eval, megadepth: Path, tmp_path: Path) -> None:
    for words, word in (
        (["--data", tmp_path / "nowhere"], "nowhere"),
        (["--data", tmp_path], "scene_info"),
        (["--data", megadepth, "--size", 8], "size"),
        (["--data", megadepth, "--size", 100000], "size"),
        (["--data", megadepth, "--seed", -1], "seed"),
        (["--data", megadepth, "--json", megadepth], "folder"),
        (["--data", megadepth, "--method", "sift", "--threshold", "nan"], "threshold"),
        (["--data", megadepth, "--method", "surf"], "surf"),
        (["--data", megadepth, "--top", 3], "--top is for localization, aachen, inloc alone"),
        (["--data", megadepth, "--method", "sift", "--confidence", 0.5], "for --method prism alone"),
        (["--data", megadepth, "--method", "sift", "--pairs", 0], "pairs"),
        (["--data", megadepth, "--method", "sift", "--threshold", -1], "threshold"),
    ):
        done = run_eval("megadepth1500", *words)
        assert isinstance(done.exception, UserError) and word in str(done.exception), words
    assert run_eval("chess", "--data", tmp_path).exit_code == 2


def test_what_numbers_are_for_stands_above_them(tiny: Options) -> None:
    report = BENCHMARKS["megadepth1500"](replace(tiny, method="sift", pairs=2))
    caveat = "the published numbers are for 1500 pairs, ours for 2"
    assert str(report).startswith(f"note: {caveat}")
    markdown = report.markdown("prism eval")
    assert markdown.index(caveat) < markdown.index("AUC@5")


def test_every_benchmark_has_a_name() -> None:
    assert list(get_args(Benchmark)) == list(BENCHMARKS)


def test_runs_without_optional_libraries() -> None:
    code = (
        "import sys\n"
        "for name in ('poselib', 'matplotlib', 'rich', 'pydantic', 'pycolmap'): sys.modules[name] = None\n"
        "import prism_match.evaluation.benchmarks, prism_match.evaluation.covisible\n"
        "import prism_match.evaluation.speed, prism_match.cli.bench, prism_match.cli.eval\n"
        "from prism_match.evaluation.pose import evaluate_pose\n"
        "try: evaluate_pose([], 'sift', ransac='poselib')\n"
        "except ValueError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install poselib" in done.stdout


# ---- real data


def test_sift_on_real_megadepth() -> None:
    pairs = choose(read_megadepth(needs_shared("eval/megadepth_dev")), 4, seed=1)
    result = evaluate_pose(pairs, Sift(1024), 512)
    assert not result.failures and not result.unusable and result.mean("precision") > 30


def test_sift_on_real_homographies() -> None:
    pairs = [p for p in read_hpatches(needs_shared("eval/oxford")) if p.name.endswith("1-2")]
    assert len(pairs) == 8
    assert evaluate_homography(pairs[:4], Sift(1000)).auc["10"] > 60


def test_sift_on_real_cameras() -> None:
    pairs = read_calibrated(needs_shared("eval/strecha"))
    assert {p.scene for p in pairs} == {"Herz-Jesus-P25", "castle-P30", "entry-P10", "fountain-P11"}
    near = [p for p in pairs if p.scene == "fountain-P11"][:2]
    assert evaluate_pose(near, Sift(1500), 640).auc["20"] > 50


def test_sift_on_real_rooms() -> None:
    listed = read_pair_list(needs_shared("eval/scannet_sample"))
    assert len(listed) == 15
    pairs = in_resized_frames(listed[:2], Resize(longer=640))
    assert len(evaluate_pose(pairs, Sift(1000), 640).scores) == 2


def test_sift_on_a_real_kitchen() -> None:
    pairs = read_rgbd(needs_shared("eval/rgbd_kitchen"))[0]
    assert [len(list(group)) for _, group in groupby(pairs, lambda p: p.split)] == [25] * 4
    assert evaluate_pose(pairs[-4:], Sift(1000), 640).mean("precision") > 40


def test_real_depth_gives_scale_and_cells() -> None:
    from prism_match.evaluation.covisible import matchable_cells, scale_ratio

    pairs = [p for p in read_megadepth(needs_shared("eval/megadepth_dev")) if p.depth0 and p.depth1]
    if not pairs:
        pytest.skip("no pair with two depth maps")
    assert 1 <= scale_ratio(pairs[0], Resize(longer=320)) < 6
    assert matchable_cells(pairs[0], Resize(longer=320))[0].matchable0.any()
