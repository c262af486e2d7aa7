"""From photos alone to a collection that is trained on, with a matcher that knows the scene."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import combinations

import numpy as np
import pytest
import torch
from conftest import needs_shared
from synthetic_matcher import SyntheticMatcher, make_photos, true_matches, write_noise
from synthetic_scene import K, camera
from typer.testing import CliRunner

from prism_match.cameras import Camera, pinhole
from prism_match.cli import app
from prism_match.colmap_model import read_model
from prism_match.errors import UserError
from prism_match.files import lock_folder
from prism_match.geometry import rotation_angle
from prism_match.images import load_image
from prism_match.maps import colmap
from prism_match.maps.cameras import CameraOptions
from prism_match.maps.collection import CollectOptions, collect, too_few_points, undistorted
from prism_match.maps.reconstruction import SfmOptions, reconstruct
from prism_match.maps.view_graph import RelativeTurn, doubtful_pairs
from prism_match.matches import Matches
from prism_match.training.depth import SweepConfig, make_depth
from prism_match.training.sources import SourceOptions, make_sources

needs_pycolmap = pytest.mark.skipif(find_spec("pycolmap") is None, reason="pycolmap is not installed")
SMALL = SweepConfig(long_side=96, planes=24, sources=3, checks=4, window=5)
SHRUNK = 0.15  # the camera that cannot be: all that others see is in the middle of its photo
TWINS = "view0.png", "view6.png"  # matched as if the second were another view


@dataclass
class UntrustworthyMatcher(SyntheticMatcher):
    """view3 is shrunk to its middle, stranger.png is of something else, and two views look like twins."""

    def match(self, a, b):
        names = [p.name.rsplit("/", 1)[-1] for p in (a, b)]
        self.matched.append(tuple(names))
        if "stranger.png" in names:
            none = np.zeros((0, 2), np.float32)
            return Matches(none, none, none[:, 0], a.size, b.size, a.name, b.name)
        i, j = (self.scene.names.index(name) for name in names)
        points = list(true_matches(self.scene, i, 1 if tuple(names) == TWINS else j))
        g = np.random.default_rng(100 * i + j)
        for side, view in enumerate((i, j)):
            if view == 3:
                points[side] = K[:2, 2] + SHRUNK * (points[side] - K[:2, 2])
            points[side] = points[side] + (0.02 if view == 3 else 0.1) * g.standard_normal(points[side].shape)
        found = [p.astype(np.float32) for p in points]
        return Matches(*found, np.ones(len(found[0]), np.float32), a.size, b.size, a.name, b.name)


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    """A collection of seven photos that fit and one that does not, and all that was made of it."""
    root = tmp_path_factory.mktemp("collect")
    scene, folder, _ = make_photos(root / "scene", 7)
    write_noise(folder / "stranger.png", 5)
    (folder / "broken.png").write_bytes(b"broken")
    lines = [f"{n} 150 150 79.5 59.5" for n in (*scene.names, "stranger.png", "broken.png")]
    lines[3] = f"view3.png {150 * SHRUNK} {150 * SHRUNK} 79.5 59.5"
    (root / "cameras.txt").write_text("\n".join(lines) + "\n")
    cameras = CameraOptions(intrinsics=str(root / "cameras.txt"))
    sfm = SfmOptions(cameras=cameras, threads=1, polish=False, mapper="incremental")
    options = CollectOptions(sfm, size=120)
    matcher = UntrustworthyMatcher(scene)
    arguments = folder, root / "out", options
    result = collect(*arguments, lambda: matcher, sweep)
    return scene, arguments, matcher, result


def sweep(model, images, depth):
    return make_depth(model, images, depth, SMALL)


@needs_pycolmap
def test_what_cannot_be_believed_is_left_out_and_named(collected):
    scene, (_, out, _), _, result = collected
    reasons = {name: about.get("reason") for name, about in result["photos"].items() if not about["kept"]}
    assert set(reasons) == {"view3.png", "stranger.png", "broken.png"}
    assert "impossible focal length: 0.14" in reasons["view3.png"]
    assert "no place" in reasons["stranger.png"] and "cannot be read" in reasons["broken.png"]
    assert [row["pair"] for row in result["pairs_left_out"]] == [list(TWINS)]
    assert "triplets" in result["pairs_left_out"][0]["reason"]
    report = (out / "report.md").read_text()
    for words in (*reasons.values(), result["pairs_left_out"][0]["reason"]):
        assert words in report
    assert json.loads((out / "collection.json").read_text()) == result
    for name in ("kept.png", "left_out.png", "depth_maps.png", "reprojection.png", "map_view.png"):
        assert name in report and load_image(out / name).rgb.std() > 5
    assert {v.name for v in read_model(out / "sparse").views} == set(scene.names) - {"view3.png"}


@needs_pycolmap
def test_a_camera_that_twins_had_misplaced_is_where_it_belongs(collected):
    """The wrong pair has more matches than the right ones, so the first reconstruction has followed it."""
    scene, (_, out, _), _, _ = collected
    truth = scene.T[6][:3, :3] @ scene.T[4][:3, :3].T
    errors = []
    for model in (out / "work" / "first", out):
        T = {view.name: view.T[:3, :3] for view in read_model(model / "sparse").views}
        errors.append(rotation_angle(T["view6.png"] @ T["view4.png"].T, truth))
    assert errors[0] > 10 and errors[1] < 1


@needs_pycolmap
@pytest.mark.parametrize("where", ["", "sparse"])
def test_the_collection_is_trained_on(collected, where):
    scene, (_, out, _), _, result = collected
    (source,) = make_sources(SourceOptions(colmap=[out / where]), torch.device("cpu"))
    batch = source.source.sample(2, 64, torch.Generator().manual_seed(0))
    assert batch.image0.shape == (2, 1, 64, 64) and batch.visible0.any()
    assert result["depth"]["maps"] == 6 and result["depth"]["median_error"] < 0.02
    for view in read_model(out / "sparse").views:
        assert (view.width, view.height) == (120, 90) == load_image(out / "images" / view.name).size
        np.testing.assert_allclose(view.K, [[112.5, 0, 59.5], [0, 112.5, 44.5], [0, 0, 1]], atol=0.01)
    assert result["reprojection_error"]["median"] < 0.3


@needs_pycolmap
def test_a_second_run_does_nothing_again(collected, monkeypatch):
    _, arguments, matcher, result = collected
    out = arguments[1]
    written = [p for p in out.rglob("*") if p.is_file() and "work" not in p.relative_to(out).parts]
    times = {p: p.stat().st_mtime_ns for p in written if p.name != ".lock"}
    matcher.matched.clear()
    monkeypatch.setattr(colmap, "run", lambda *a, **k: pytest.fail("COLMAP was run again"))
    monkeypatch.setattr("prism_match.training.depth.sweep", lambda *a: pytest.fail("swept again"))
    assert collect(*arguments, lambda: matcher, sweep) == result
    assert not matcher.matched
    assert {p: p.stat().st_mtime_ns for p in times} == times


@needs_pycolmap
def test_bad_input_is_told_in_a_line(collected, tmp_path):
    _, (folder, out, _), _, _ = collected
    with lock_folder(tmp_path):
        done = CliRunner().invoke(app, ["data", "collect", str(folder), "-o", str(tmp_path)])
    assert "is in use by another run" in str(done.exception or done.output)
    for photos, options, reason in (
        (tmp_path / "none", [], "no such folder"),
        (out / "images", [], "is where the results would go"),
        (out, [], "is where the results would go"),
        (folder, ["--size", "8"], "at least 32 pixels"),
        (folder, ["--min-points", "0"], "at least 1 point"),
        (folder, ["--max-angle", "0"], "above 0"),
    ):
        done = CliRunner().invoke(app, ["data", "collect", str(photos), "-o", str(out), *options])
        assert done.exit_code and isinstance(done.exception, (UserError, SystemExit))
        assert reason in f"{done.exception} {done.output}"


@needs_pycolmap
def test_photos_and_models_of_others_are_not_replaced(collected, tmp_path):
    _, (folder, _, options), matcher, _ = collected
    (tmp_path / "images").mkdir()
    with pytest.raises(UserError, match="not of this command"):
        collect(folder, tmp_path, options, lambda: matcher, sweep)
    assert (tmp_path / "images").is_dir() and not (tmp_path / "work").exists()


@needs_pycolmap
def test_a_collection_is_not_replaced_by_a_reconstruction(collected):
    _, (folder, out, _), _, _ = collected
    before = (out / "sparse" / "images.bin").read_bytes()
    with pytest.raises(UserError, match="would be replaced; give another folder"):
        reconstruct(folder, out, SfmOptions(), lambda: pytest.fail("nothing is to be matched"))
    assert (out / "sparse" / "images.bin").read_bytes() == before


@needs_pycolmap
def test_a_full_disk_leaves_the_collection_as_it_was(collected, tmp_path, monkeypatch):
    _, (folder, out, options), matcher, _ = collected
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("prism_match.maps.collection.undistorted", full)
    with pytest.raises(UserError, match="cannot be written .No space left"):
        collect(folder, copy, replace(options, size=100), lambda: matcher, sweep)
    for name in ("images", "sparse", "depth"):
        files = [p for p in (out / name).iterdir() if p.name != ".lock"]
        assert files and all(p.read_bytes() == (copy / name / p.name).read_bytes() for p in files)
    assert not [p for p in copy.iterdir() if p.name.startswith(".") and p.name != ".lock"]


@needs_pycolmap
@pytest.mark.slow
def test_real_photos(tmp_path):
    """Five photos of a fountain by the command, with the shipped weights at a small size."""
    scene = needs_shared("eval/strecha/fountain-P11")
    photos, out = tmp_path / "photos", tmp_path / "out"
    photos.mkdir()
    for n in range(3, 8):
        shutil.copy(scene / "images" / f"{n:04d}.jpg", photos)
    command = ["data", "collect", str(photos), "-o", str(out), "--size", "320", "--match-size", "320",
               "--intrinsics", str(scene / "cameras.txt"), "--device", "cpu"]  # fmt: skip
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and "5 of 5 photos" in done.output
    result = json.loads((out / "collection.json").read_text())
    assert result["kept"] == 5 and result["pairs_left_out"] == []
    assert result["depth"]["maps"] == 5 and result["depth"]["median_error"] < 0.02
    (source,) = make_sources(SourceOptions(colmap=[out / "sparse"]), torch.device("cpu"))
    assert len(source.source) > 0


# ---- parts


def turns_of(rotations: dict[str, np.ndarray], pairs) -> dict:
    return {(a, b): RelativeTurn(rotations[b] @ rotations[a].T, 100) for a, b in pairs}


ROTATIONS = {name: camera(0, 0, 0, 0.2 * n)[:3, :3] for n, name in enumerate("abcdefg")}
WRONG = RelativeTurn(camera(0, 0, 0, -1.0)[:3, :3], 500)  # with more matches than any


def test_pairs_that_agree_are_not_doubted():
    for pairs in (combinations("abcdef", 2), ["ab", "bc", "cd"], ["ab"], ["ba", "cb", "ac"]):
        assert doubtful_pairs(turns_of(ROTATIONS, map(tuple, pairs)), ROTATIONS) == {}


def test_a_pair_that_contradicts_its_triplets_is_doubted_and_no_other():
    turns = turns_of(ROTATIONS, combinations("abcdef", 2))
    for wrong in (("a", "f"), ("b", "e"), ("c", "d")):
        found = doubtful_pairs(turns | {wrong: WRONG}, ROTATIONS)
        assert list(found) == [wrong] and "0 of 4 close" in found[wrong]
    both = {("a", "f"): WRONG, ("a", "e"): WRONG}
    assert set(doubtful_pairs(turns | both, ROTATIONS)) == set(both)


def test_in_a_lone_triplet_the_reconstruction_tells_who_is_wrong():
    turns = turns_of(ROTATIONS, combinations("abcd", 2)) | {("d", "e"): WRONG}
    turns |= turns_of(ROTATIONS, [("c", "e"), ("e", "f"), ("c", "f")])
    assert set(doubtful_pairs(turns, ROTATIONS)) == {("d", "e")}


def test_a_pair_that_nothing_confirms_is_doubted():
    groups = [*combinations("abc", 2), *combinations("efg", 2)]
    turns = turns_of(ROTATIONS, [*groups, ("c", "e")])
    assert list(doubtful_pairs(turns, ROTATIONS)) == [("c", "e")]
    assert doubtful_pairs(turns_of(ROTATIONS, [*groups, ("c", "e"), ("a", "g")]), ROTATIONS) == {}
    found = doubtful_pairs(turns_of(ROTATIONS, groups) | {("c", "e"): WRONG, ("a", "g"): WRONG}, ROTATIONS)
    assert set(found) == {("c", "e"), ("a", "g")} and all("turned" in why for why in found.values())
    nothing = {("a", "b"): RelativeTurn(np.eye(3), 0)}
    assert "fewer than 15" in doubtful_pairs(nothing, ROTATIONS)["a", "b"]


def test_photos_with_few_points_take_points_along(tmp_path):
    scene, _, _ = make_photos(tmp_path, 4)
    model = read_model(scene.root)
    assert too_few_points(model, set(), 1) == {}
    counts = {v.name: len(v.points) for v in model.views}
    assert len(too_few_points(model, set(), max(counts.values()) + 1)) == 4
    assert set(too_few_points(model, {"view1.png", "view2.png", "view3.png"}, 1)) == {"view0.png"}


def test_photos_are_seen_without_distortion():
    """A picture drawn through a lens comes back as it is seen without, smaller."""
    lens = Camera("SIMPLE_RADIAL", 200, 150, (180.0, 100.0, 75.0, 0.3))
    ideal = pinhole(np.array([[90.0, 0, 47.5], [0, 90.0, 35.5], [0, 0, 1]]), 96, 72)
    y, x = np.mgrid[:150, :200]
    plane = lens.normalise(np.stack([x, y], -1).reshape(-1, 2)).reshape(150, 200, 2)
    pattern = 127 + 60 * np.sin(9 * plane[..., 0]) + 60 * np.cos(11 * plane[..., 1])
    seen = undistorted(np.repeat(pattern[..., None], 3, 2).astype(np.uint8), lens, ideal)
    y, x = np.mgrid[:72, :96]
    u, v = (x - 47.5) / 90, (y - 35.5) / 90
    expected = 127 + 60 * np.sin(9 * u) + 60 * np.cos(11 * v)
    assert seen.shape == (72, 96, 3)
    assert np.abs(seen[4:-4, 4:-4, 0] - expected[4:-4, 4:-4]).max() < 4
