"""The plane sweep recovers the exact depth of a rendered world."""

from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch
from synthetic_scene import make_scene

from prism_match.frames import read_depth
from prism_match.training import depth as depth_module
from prism_match.training.data.colmap import depth_path, read_model
from prism_match.training.depth import (
    SweepConfig,
    check_depth,
    choose_sources,
    make_depth,
    semi_global,
    zncc,
)

CONFIG = SweepConfig(long_side=160, planes=64, sources=4, window=5)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    scene = make_scene(tmp_path_factory.mktemp("scene"))
    report = make_depth(scene.root, scene.root / "images", scene.root / "depth", CONFIG)
    return scene, report


def test_depth_is_recovered(made):
    scene, report = made
    for k, name in enumerate(scene.names):
        depth = read_depth(depth_path(scene.root / "depth", name))
        assert depth.shape == scene.depth[k].shape
        known = depth > 0
        assert known.mean() > 0.5
        error = np.abs(depth[known] / scene.depth[k][known] - 1)
        assert np.median(error) < 0.004
        assert (error < 0.02).mean() > 0.95
    assert report.maps == len(scene.names)
    assert report.median_error < 0.01 and report.within_2_percent > 0.9 and report.kept > 0.5


def test_nothing_is_left_behind(made):
    scene, _ = made
    left = {p.name for p in (scene.root / "depth").iterdir()}
    assert left == {".lock", *(f"{n}.h5" for n in scene.names)}


def test_finished_maps_are_not_made_again(made, monkeypatch):
    scene, report = made
    monkeypatch.setattr(depth_module, "sweep", lambda *a: pytest.fail("swept again"))
    assert make_depth(scene.root, scene.root / "images", scene.root / "depth", CONFIG) == report


def test_an_interrupted_run_goes_on(tmp_path, monkeypatch):
    scene = make_scene(tmp_path, views=4)
    config = SweepConfig(long_side=64, planes=16, sources=2, checks=2)
    arguments = scene.root, scene.root / "images", scene.root / "depth", config
    real, done = depth_module.sweep, []

    def stops_after_two(*a):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(a[2])
        return real(*a)

    monkeypatch.setattr(depth_module, "sweep", stops_after_two)
    with pytest.raises(KeyboardInterrupt):
        make_depth(*arguments)
    again = []
    monkeypatch.setattr(depth_module, "sweep", lambda *a: (again.append(a[2]), real(*a))[1])
    assert make_depth(*arguments).maps == 4
    assert not set(again) & set(done)


def test_missing_images_are_named(tmp_path):
    scene = make_scene(tmp_path, views=3)
    (scene.root / "images" / "view1.png").unlink()
    with pytest.raises(ValueError, match="missing: view1.png"):
        make_depth(scene.root, scene.root / "images", scene.root / "depth", CONFIG)


def test_a_view_without_neighbours_gets_an_empty_map(tmp_path):
    scene = make_scene(tmp_path, views=1)
    assert make_depth(scene.root, scene.root / "images", scene.root / "depth", CONFIG).kept == 0


def test_sources_share_points_and_never_include_the_view(made):
    model = read_model(made[0].root)
    for i in range(len(model.views)):
        sources = choose_sources(model, i, 4)
        assert len(sources) == 4 and i not in sources


def test_check_without_maps(tmp_path):
    scene = make_scene(tmp_path, views=2)
    assert check_depth(read_model(scene.root), tmp_path / "nothing").maps == 0


def test_correlation_survives_light_and_ignores_flat_windows():
    a = torch.rand(1, 20, 20, generator=torch.Generator().manual_seed(0))
    assert (zncc(a, 0.3 * a + 0.4, 5) > 0.99).all()
    assert (zncc(a, 1 - a, 5) < -0.99).all()
    assert zncc(a, torch.full_like(a, 0.5), 5).abs().max() < 1e-2


def test_semi_global_fills_what_has_no_evidence():
    cost = torch.full((8, 9, 9), 0.5)
    cost[3, :, :3] = cost[3, :, 6:] = 0.0
    total = semi_global(cost, torch.zeros(9, 9), 0.05, 0.3)
    assert (total.argmin(0) == 3).all()


def test_a_view_without_a_pose_spoils_nothing(tmp_path):
    scene = make_scene(tmp_path, views=4)
    images = scene.root / "sparse" / "images.txt"
    lines = images.read_text().splitlines()
    lines[1] = "1 nan nan nan nan nan nan nan 1 view0.png"
    images.write_text("\n".join(lines) + "\n")
    config = SweepConfig(long_side=80, planes=24, sources=2)
    make_depth(scene.root, scene.root / "images", scene.root / "depth", config)
    kept = [(read_depth(depth_path(scene.root / "depth", n)) > 0).mean() for n in scene.names]
    assert kept[0] == 0 and min(kept[1:]) > 0.2


def test_the_second_sweep_is_more_exact(tmp_path):
    scene = make_scene(tmp_path)
    config = SweepConfig(long_side=96, planes=48, sources=4, window=5)
    errors = {}
    for side in (0, 160):
        folder = tmp_path / f"depth{side}"
        make_depth(scene.root, scene.root / "images", folder, replace(config, fine_side=side))
        found = []
        for name, true in zip(scene.names, scene.depth, strict=True):
            depth = read_depth(depth_path(folder, name))
            assert max(depth.shape) == (side or 96)
            true = cv2.resize(true.astype(np.float32), depth.shape[::-1], interpolation=cv2.INTER_AREA)
            found.append(np.abs(depth / true - 1)[depth > 0])
        errors[side] = np.concatenate(found)
    # More exact, and no less of it: what the second sweep does not find is the first one's.
    assert np.median(errors[160]) < 0.75 * np.median(errors[0])
    assert np.quantile(errors[160], 0.9) < 0.85 * np.quantile(errors[0], 0.9)
    assert len(errors[160]) / 160**2 > len(errors[0]) / 96**2
