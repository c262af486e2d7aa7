"""RGB-D sequences in both layouts, and pairs chosen by measured overlap."""

from pathlib import Path

import numpy as np
import pytest
import torch
from rgbd_for_tests import write_sequence
from synthetic_scene import Scene, make_scene
from typer.testing import CliRunner

from prism_match.cli import app
from prism_match.training.data.rgbd import RGBDPairs, find_sequences, measure_overlap, read_sequence
from prism_match.training.supervision import coarse_ground_truth

KITCHEN = Path(__file__).resolve().parents[2] / "shared" / "eval" / "rgbd_kitchen"


@pytest.fixture(scope="module")
def scene(tmp_path_factory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("scene"))


@pytest.mark.parametrize("scannet", [False, True])
def test_both_layouts_give_pairs(scene, tmp_path, scannet):
    folder = write_sequence(scene, tmp_path / "a", scannet)
    source = RGBDPairs(folder, overlap=(0.1, 1.0), workers=2)
    assert len(source) > 5
    batch = source.sample(4, 96, torch.Generator().manual_seed(0))
    assert batch.image0.shape == (4, 1, 96, 96)
    truth = coarse_ground_truth(batch)
    assert (truth.matchable0.float().mean(1) > 0.05).all()
    # The wall is smooth: what is visible there and back lands where it came from.
    assert truth.offset0.abs().max() <= 4.001


def test_a_folder_of_sequences(scene, tmp_path):
    write_sequence(scene, tmp_path / "a", True)
    write_sequence(scene, tmp_path / "b", False)
    assert [p.name for p in find_sequences(tmp_path)] == ["a", "b"]
    one = len(RGBDPairs(tmp_path / "a", overlap=(0.1, 1.0)))
    assert len(RGBDPairs(tmp_path, overlap=(0.1, 1.0))) == 2 * one


def test_overlap_falls_with_distance(scene, tmp_path):
    frames = read_sequence(write_sequence(scene, tmp_path / "a", False))
    pairs, share = measure_overlap(frames)
    by_pair = {tuple(p): s for p, s in zip(pairs.tolist(), share.tolist(), strict=True)}
    assert 1 >= by_pair[0, 1] > by_pair[0, 3] > by_pair[0, 5] > 0.05


def test_bad_frames_are_named_and_skipped(scene, tmp_path, caplog):
    folder = write_sequence(scene, tmp_path / "a", True)
    np.savetxt(folder / "pose" / "0.txt", np.full((4, 4), -np.inf))
    (folder / "pose" / "1.txt").write_text("no matrix")
    (folder / "depth" / "2.png").unlink()
    (folder / "depth" / "3.png").write_bytes(b"broken")
    assert len(read_sequence(folder)) == 3
    source = RGBDPairs(folder, overlap=(0.1, 1.0))
    assert len(source) == 1  # frames 4 and 5 are left
    for text in ("0.txt: not finite", "1.txt: not a matrix", "2.txt: its colour", "3.png: no depth map"):
        assert text in caplog.text
    assert len(source.sample(2, 64, torch.Generator())) == 2


def test_bad_folders_give_one_line(scene, tmp_path):
    with pytest.raises(ValueError, match="no RGB-D sequence"):
        RGBDPairs(tmp_path)
    folder = write_sequence(scene, tmp_path / "a", False)
    with pytest.raises(ValueError, match="no two frames overlap"):
        RGBDPairs(folder, overlap=(0.999, 1.0))
    (folder / "camera-intrinsics.txt").unlink()
    with pytest.raises(ValueError, match="no intrinsics"):
        RGBDPairs(folder)


def test_a_scene_without_overlap_gives_one_line(scene, tmp_path):
    folder = write_sequence(scene, tmp_path / "a", False)
    for k in range(len(scene.names)):
        pose = np.eye(4)
        pose[0, 3] = 100.0 * k
        np.savetxt(folder / f"frame-{k:06}.pose.txt", pose)
    with pytest.raises(ValueError, match="no two frames overlap by 0.1 to 0.9"):
        RGBDPairs(folder)


def test_kitchen():
    if not KITCHEN.is_dir():
        pytest.skip(f"{KITCHEN} is not here")
    source = RGBDPairs(KITCHEN, max_frames=12, workers=2)
    batch = source.sample(3, 192, torch.Generator().manual_seed(0))
    assert (coarse_ground_truth(batch).matchable0.sum(1) > 10).all()


def test_sequences_of_one_name_are_previewed_each(scene, tmp_path, monkeypatch):
    for room in ("kitchen", "hall"):
        write_sequence(scene, tmp_path / room / "seq-01", scannet=False)
    monkeypatch.chdir(tmp_path / "hall" / "seq-01")
    arguments = ["data", "preview", "--rgbd", str(tmp_path / "kitchen" / "seq-01"), "--rgbd", "."]
    arguments += ["--pairs", "1", "--size", "64", "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["seq-01-2.png", "seq-01.png"]
