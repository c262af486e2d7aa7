"""From photos to a COLMAP model and back, with a matcher that knows the scene."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import zlib
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import PIL.Image
import pytest
from conftest import ASSETS, needs_shared
from synthetic_matcher import SyntheticMatcher, make_photos, true_matches, write_noise
from synthetic_scene import K
from typer.testing import CliRunner

from prism_match import colmap_model
from prism_match.cameras import Camera
from prism_match.cli import app
from prism_match.engine.store import MatchStore
from prism_match.errors import UserError
from prism_match.evaluation.posed import camera_matrices
from prism_match.export.colmap import export_colmap
from prism_match.export.nerf import camera_to_world, intrinsics, write_transforms
from prism_match.files import lock_folder
from prism_match.geometry import align_similarity, rotation_angle
from prism_match.images import ORIENTATION, load_image, write_png
from prism_match.maps import colmap
from prism_match.maps import reconstruction as sfm
from prism_match.maps.cameras import CameraOptions, choose_cameras, read_exif
from prism_match.maps.colmap_worker import with_points
from prism_match.maps.landmarks import open_map
from prism_match.maps.localization import Query, localize
from prism_match.maps.reconstruction import PairOptions, SfmOptions, find_images, reconstruct, upright_copies
from prism_match.maps.report import camera_centres, draw_match_graph, draw_top_view
from prism_match.maps.shared_keypoints import load_tracks
from prism_match.maps.stages import STAGES, Stages
from prism_match.maps.tracks import TrackOptions
from prism_match.matches import Matches
from prism_match.training.data.colmap import read_model

if find_spec("pycolmap") is None:  # not by importing it: see `colmap_worker`
    pytest.skip("pycolmap is not installed", allow_module_level=True)
GIVEN = CameraOptions(intrinsics="150,150,79.5,59.5")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A scene, and its reconstruction with given intrinsics."""
    root = tmp_path_factory.mktemp("sfm")
    scene, folder, matcher = make_photos(root / "scene", 6)
    summary = reconstruct(folder, root / "out", SfmOptions(cameras=GIVEN, threads=1), lambda: matcher)
    write_transforms(root / "out" / "transforms.json", root / "out" / "sparse" / "0", folder)
    return scene, folder, root / "out", summary


def pose_errors(scene, poses: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, float, np.ndarray]:
    """Distances of centres and degrees of rotations after a similarity, which is returned, too."""
    names = sorted(poses)
    found = np.stack([np.asarray(poses[n])[:3] for n in names])
    truth = np.stack([scene.T[scene.names.index(n)][:3] for n in names])
    scale, rotation, translation = align_similarity(camera_centres(found), camera_centres(truth))
    moved = scale * camera_centres(found) @ rotation.T + translation
    angles = [rotation_angle(f[:, :3] @ rotation.T, t[:, :3]) for f, t in zip(found, truth, strict=True)]
    return np.linalg.norm(moved - camera_centres(truth), axis=1), np.array(angles), scale, rotation


def test_poses_are_recovered(built):
    scene, _, out, summary = built
    assert summary["images"] == summary["registered"] == 6 and summary["not_registered"] == []
    assert summary["points"] > 300 and summary["mean_track_length"] > 3
    assert summary["mean_reprojection_error"] < 0.6
    model = read_model(out / "sparse" / "0")
    centres, angles, _, _ = pose_errors(scene, {v.name: v.T for v in model.views})
    assert centres.max() < 0.02  # of a scene 4 deep, with cameras 0.36 apart
    assert angles.max() < 1


def test_points_that_are_off_hardly_count(built, tmp_path, monkeypatch):
    scene, folder, _, _ = built
    matcher = SyntheticMatcher(scene, loose=0.4)
    errors = {}
    for exact in (None, sfm.EXACT):
        monkeypatch.setattr(sfm, "EXACT", exact)
        options = SfmOptions(cameras=GIVEN, threads=1, polish=False)
        reconstruct(folder, tmp_path / str(exact), options, lambda: matcher)
        model = read_model(tmp_path / str(exact) / "sparse" / "0")
        errors[exact] = pose_errors(scene, {v.name: v.T for v in model.views})
    plain, robust = errors.values()
    assert robust[0].mean() < 0.8 * plain[0].mean()


def test_a_folder_has_one_run_at_a_time(built, tmp_path):
    """The second begins while the first is at work, and again when that has ended as it should not."""
    scene, folder, _, _ = built
    second, options = SyntheticMatcher(scene), SfmOptions(cameras=GIVEN, threads=1)

    def first():
        with pytest.raises(UserError, match="is in use by another run"):
            reconstruct(folder, tmp_path, options, lambda: second)
        raise InterruptedError

    for _ in range(2):
        with pytest.raises(InterruptedError):
            reconstruct(folder, tmp_path, options, first)
    assert not second.matched


@pytest.mark.parametrize("options", [[], ["--matches-only"]])
def test_the_command_tells_that_a_folder_is_in_use(built, tmp_path, options):
    with lock_folder(tmp_path):
        done = CliRunner().invoke(app, ["sfm", str(built[1]), "-o", str(tmp_path), *options])
    assert isinstance(done.exception, UserError) and "is in use by another run" in str(done.exception)


def test_the_model_is_there_in_every_format(built):
    scene, folder, out, summary = built
    binary = read_model(out / "sparse" / "0")
    text_only = out.parent / "text"
    text_only.mkdir()
    for file in (out / "sparse" / "0").glob("*.txt"):
        shutil.copy(file, text_only)
    text = read_model(text_only)
    assert [v.name for v in binary.views] == [v.name for v in text.views]
    np.testing.assert_allclose(binary.points, text.points, atol=1e-6)
    for a, b in zip(binary.views, text.views, strict=True):
        np.testing.assert_allclose(a.T, b.T, atol=1e-6)
        # Half a pixel was added on the way out and taken off on the way in.
        np.testing.assert_allclose(a.K, K, atol=1e-6)
        seen = binary.points[a.points] @ a.T[:3, :3].T + a.T[:3, 3]
        projected = (seen @ a.K.T)[:, :2] / seen[:, 2:]
        assert np.median(np.linalg.norm(projected - a.pixels, axis=1)) < 0.6
    header = (out / "sparse" / "0" / "points.ply").read_bytes()[:400]
    assert b"element vertex %d" % summary["points"] in header
    assert len(binary.points) == summary["points"]
    for name in ("report.md", "match_graph.png", "top_view.png", "map_view.png", "database.db", "matches.h5"):
        assert (out / name).stat().st_size > 0


def test_points_have_the_colour_of_their_pixels(built):
    _, folder, out, _ = built
    rows = [
        line.split() for line in (out / "sparse/0/points3D.txt").read_text().splitlines() if line[0] != "#"
    ]
    model = read_model(out / "sparse" / "0")
    order = np.argsort([int(row[0]) for row in rows])
    colours = np.array([row[4] for row in rows], float)[order]
    for view in model.views:
        gray = load_image(folder / view.name).rgb[..., 0].astype(float)
        x, y = np.rint(view.pixels).astype(int).T
        # Every view has its own brightness, so colours agree in what is dark and what is bright.
        assert np.corrcoef(gray[y.clip(0, 119), x.clip(0, 159)], colours[view.points])[0, 1] > 0.8


def test_transforms_look_where_the_cameras_look(built):
    scene, folder, out, _ = built
    saved = json.loads((out / "transforms.json").read_text())
    assert (saved["w"], saved["h"]) == (160, 120) and saved["cx"] == pytest.approx(80.0)
    assert saved["camera_angle_x"] == pytest.approx(2 * np.arctan(80 / 150))
    assert (out / saved["ply_file_path"]).is_file()
    model = {v.name: v for v in read_model(out / "sparse" / "0").views}
    points = read_model(out / "sparse" / "0").points
    for frame in saved["frames"]:
        file = out / frame["file_path"]
        assert file.resolve() == (folder / file.name).resolve()
        # A point in front of OpenGL's camera has negative z, and what is up in the image has positive y.
        x, y, z, _ = np.linalg.inv(frame["transform_matrix"]) @ np.vstack([points.T, np.ones(len(points))])
        view = model[file.name]
        assert (z[view.points] < 0).all()
        u, v = saved["fl_x"] * x / -z + saved["cx"], saved["cy"] - saved["fl_y"] * y / -z
        errors = np.hypot(u[view.points] - view.pixels[:, 0] - 0.5, v[view.points] - view.pixels[:, 1] - 0.5)
        assert np.median(errors) < 0.6


def test_axes_of_a_camera_at_the_origin():
    np.testing.assert_allclose(camera_to_world(np.eye(4)), np.diag([1, -1, -1, 1]))
    radial = intrinsics(Camera("SIMPLE_RADIAL", 8, 6, (5.0, 4.0, 3.0, 0.1)))
    assert (radial["fl_x"], radial["fl_y"], radial["k1"], radial["k2"]) == (5.0, 5.0, 0.1, 0.0)
    with pytest.raises(UserError, match="FISHEYE"):
        intrinsics(Camera("RADIAL_FISHEYE", 8, 6, (5.0, 4.0, 3.0, 0.1, 0.1)))


def test_a_second_run_only_does_what_changed(built, tmp_path, monkeypatch):
    scene, folder, out, summary = built
    copy = tmp_path / "out"
    shutil.copytree(out, copy)
    jobs: list[str] = []
    run = colmap.run

    def watched(job, *arguments, **options):
        jobs.append(job)
        return run(job, *arguments, **options)

    monkeypatch.setattr(colmap, "run", watched)

    def rerun(**options):
        jobs.clear()
        matcher = SyntheticMatcher(scene)
        options = SfmOptions(cameras=GIVEN, threads=1, **options)
        result = reconstruct(folder, copy, options, lambda: matcher)
        assert not matcher.extracted
        return result

    again = rerun()
    assert jobs == [] and {**again, "seconds": 0} == {**summary, "seconds": 0}
    # As if it had been killed while the mapper was busy: what came before is used as it is.
    shutil.rmtree(copy / "sparse")
    again = rerun()
    assert jobs == ["reconstruct"]
    for key in ("registered", "points", "mean_track_length"):
        assert again[key] == summary[key]
    again = rerun(mapper="global")
    assert jobs == ["reconstruct"] and again["mapper"] == "global" and again["registered"] == 6
    rerun(tracks=TrackOptions(max_error=0.5))
    assert jobs == ["database", "verify", "reconstruct"]


def test_matches_from_elsewhere_and_unknown_focal_lengths(built, tmp_path):
    scene, folder, out, _ = built
    options = SfmOptions(
        cameras=CameraOptions("shared", "SIMPLE_PINHOLE"), matches=out / "matches.h5", threads=1
    )
    summary = reconstruct(folder, tmp_path / "out", options, lambda: pytest.fail("nothing is to be matched"))
    assert summary["registered"] == 6
    model = read_model(tmp_path / "out/sparse/0")
    assert len({tuple(v.K.ravel()) for v in model.views}) == 1
    assert 110 < model.views[0].K[0, 0] < 200
    changed = tmp_path / "changed"
    shutil.copytree(folder, changed)
    write_noise(changed / "view0.png", 0)
    with pytest.raises(UserError, match="another view0.png"):
        reconstruct(changed, tmp_path / "out2", options, lambda: None)


@pytest.mark.slow
def test_real_photos(tmp_path):
    """Five photos of a fountain, with the shipped weights at a small size."""
    scene = needs_shared("eval/strecha/fountain-P11")
    photos = tmp_path / "photos"
    photos.mkdir()
    for n in range(3, 8):
        shutil.copy(scene / "images" / f"{n:04d}.jpg", photos)
    command = ["sfm", str(photos), "-o", str(tmp_path / "out"), "--size", "320", "--pairs", "sequential",
               "--window", "2", "--intrinsics", str(scene / "cameras.txt"), "--device", "cpu",
               "--json", str(tmp_path / "sfm.json")]  # fmt: skip
    assert CliRunner().invoke(app, command).exit_code == 0
    summary = json.loads((tmp_path / "sfm.json").read_text())
    assert summary["registered"] == 5 and summary["points"] > 500 and summary["mean_reprojection_error"] < 1.5
    rows = [line.split() for line in (scene / "cameras.txt").read_text().splitlines() if line[0] != "#"]
    truth = {row[0]: camera_matrices(np.array(row[1:], float))[1] for row in rows}
    views = read_model(tmp_path / "out/sparse/0").views
    ends = [camera_centres(np.stack([t[:3] for t in poses])) for poses in
            ([v.T for v in views], [truth[v.name] for v in views])]  # fmt: skip
    scale, rotation, translation = align_similarity(*ends)
    errors = np.linalg.norm(scale * ends[0] @ rotation.T + translation - ends[1], axis=1)
    assert np.median(errors) < 0.05  # metres, at a distance of 10


# ---- the process of its own


def test_a_png_can_be_written_after_a_reconstruction(built, tmp_path):
    """pycolmap in this process would abort here: see `colmap_worker`."""
    assert "pycolmap" not in sys.modules
    write_png(tmp_path / "a.png", np.zeros((64, 64, 3), np.uint8))
    PIL.Image.new("RGB", (64, 64)).save(tmp_path / "b.png")
    assert cv2.imread(str(tmp_path / "b.png")) is not None


def test_nothing_but_the_worker_imports_pycolmap():
    modules = "prism_match.cli, prism_match.maps.reconstruction, prism_match.export.colmap"
    code = f"import sys; import {modules}; assert not any('pycolmap' in m for m in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(Path(colmap.__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_a_camera_that_cannot_be_is_taken_out(tmp_path):
    """A mapper left a negative focal length, and the model could not be read."""
    code = """
import sys
import pycolmap
from prism_match.maps.colmap_worker import drop_impossible
options = pycolmap.SyntheticDatasetOptions()
options.num_rigs, options.num_cameras_per_rig, options.num_frames_per_rig, options.num_points3D = 3, 1, 1, 50
model = pycolmap.synthesize_dataset(options)
assert drop_impossible(model) == 0 and model.num_reg_images() == 3
model.cameras[2].params = [-100.0, *model.cameras[2].params[1:]]
assert drop_impossible(model) == 1
model.write_binary(sys.argv[1])
"""
    environment = os.environ | {"PYTHONPATH": str(Path(colmap.__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=environment)
    assert len(colmap_model.read_model(tmp_path).views) == 2


def test_a_worker_that_dies_is_told_in_a_line(monkeypatch, tmp_path):
    words = r"E1 solver.cc: out of luck\n    @ 0x1 main"
    (tmp_path / "dying.py").write_text(f"import sys, os\nos.write(2, b'{words}')\nos.abort()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(colmap, "WORKER", "dying")
    with pytest.raises(UserError, match="busy with verify: E1 solver.cc: out of luck$"):
        colmap.run("verify", database="x")


def test_a_worker_ends_with_its_caller(built, tmp_path):
    """As when the caller is killed: its end of the pipe is closed."""
    job = {"job": "reconstruct", "database": str(built[2] / "database.db"), "tracks": None, "threads": 1,
           "out": str(tmp_path / "sparse"), "mapper": "global", "refine_intrinsics": False}  # fmt: skip
    process = subprocess.run(
        [sys.executable, "-m", colmap.WORKER], input=json.dumps(job) + "\n", capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert process.returncode == 1 and not process.stdout and not (tmp_path / "sparse" / "0").exists()


def test_an_error_of_colmap_is_told_in_a_line(tmp_path):
    with pytest.raises(UserError) as error:
        colmap.run("verify", database=str(tmp_path / "none" / "x.db"), max_error=4.0)
    assert "\n" not in str(error.value)


# ---- databases


def tables(database: Path) -> dict[str, list]:
    """Read by SQLite itself, not by what has written it."""
    with closing(sqlite3.connect(database)) as db:
        names = dict(db.execute("SELECT image_id, name FROM images"))
        keypoints = {
            names[i]: np.frombuffer(data, np.float32).reshape(rows, columns)
            for i, rows, columns, data in db.execute("SELECT image_id, rows, cols, data FROM keypoints")
        }
        matches = {}
        for pair, rows, data in db.execute("SELECT pair_id, rows, data FROM matches"):
            second = pair % 2147483647
            ends = names[(pair - second) // 2147483647], names[second]
            matches[ends] = np.frombuffer(data, np.uint32).reshape(rows, 2)
        cameras = list(db.execute("SELECT camera_id, model, width, height, prior_focal_length FROM cameras"))
    return {"keypoints": keypoints, "matches": matches, "cameras": cameras}


def test_export_into_a_new_database_and_back(built, tmp_path):
    _, folder, out, _ = built
    database = tmp_path / "new.db"
    counts = export_colmap(
        out / "matches.h5", database, images=folder, cameras=CameraOptions(sharing="shared")
    )
    found = tables(database)
    shared, _ = load_tracks(out / "tracks.h5")
    assert counts["images"] == 6 and len(found["cameras"]) == 1
    for name, points in shared.keypoints.items():
        np.testing.assert_allclose(found["keypoints"][name][:, :2], points.xy + 0.5, atol=1e-4)
    for (a, b), matches in shared.matches.items():
        rows = found["matches"].get((a, b))
        rows = found["matches"][b, a][:, ::-1] if rows is None else rows
        assert sorted(rows.tolist()) == sorted(matches.index.tolist())
    assert counts["matches"] == sum(map(len, shared.matches.values()))


def test_export_into_an_existing_database(built, tmp_path):
    _, folder, out, _ = built
    database = tmp_path / "old.db"
    export_colmap(out / "matches.h5", database, cameras=GIVEN)
    before = tables(database)
    content = database.read_bytes()
    with pytest.raises(UserError, match="--overwrite"):
        export_colmap(out / "matches.h5", database)
    assert database.read_bytes() == content  # as it was
    assert [p.name for p in tmp_path.iterdir()] == ["old.db"]  # and nothing beside it
    export_colmap(out / "matches.h5", database, overwrite=True)
    after = tables(database)
    assert after["cameras"] == before["cameras"]  # they stay those of the database
    assert all(np.array_equal(after["keypoints"][k], v) for k, v in before["keypoints"].items())
    with closing(sqlite3.connect(database)) as opened, opened:  # entries without points, matches without any
        opened.execute("DELETE FROM keypoints WHERE image_id = 1")
        opened.execute("UPDATE keypoints SET rows = 0, data = NULL")
    export_colmap(out / "matches.h5", database, overwrite=True)
    again = tables(database)
    for what in ("keypoints", "matches"):
        assert again[what].keys() == after[what].keys()
        assert all(np.array_equal(again[what][k], v) for k, v in after[what].items())


def test_export_of_photos_that_exif_turns(built, tmp_path, capsys):
    """COLMAP has the pixels as they are stored."""
    _, folder, out, _ = built
    photos = tmp_path / "photos"
    photos.mkdir()
    exif = PIL.Image.Exif()
    for n, path in enumerate(sorted(folder.iterdir())):
        exif[ORIENTATION] = (6, 3)[n] if n < 2 else 1
        with PIL.Image.open(path) as image:
            stored = np.rot90(np.asarray(image), (1, 2)[n] if n < 2 else 0)
            PIL.Image.fromarray(stored).save(photos / path.name, exif=exif)
    export_colmap(out / "matches.h5", tmp_path / "shown.db")
    export_colmap(out / "matches.h5", tmp_path / "stored.db", images=photos, polish=False)
    shown, stored = (tables(tmp_path / f"{n}.db") for n in ("shown", "stored"))
    x, y = shown["keypoints"]["view0.png"][:, 0], shown["keypoints"]["view0.png"][:, 1]
    np.testing.assert_allclose(stored["keypoints"]["view0.png"], np.stack([y, 160 - x], 1), atol=1e-4)
    np.testing.assert_allclose(
        stored["keypoints"]["view1.png"], [160, 120] - shown["keypoints"]["view1.png"], atol=1e-4
    )
    np.testing.assert_array_equal(stored["keypoints"]["view2.png"], shown["keypoints"]["view2.png"])
    with pytest.raises(UserError, match="view0.png is 120x160 in this database, .* tell with --images"):
        export_colmap(out / "matches.h5", tmp_path / "stored.db", overwrite=True)
    assert "view0.png: is not the file that was matched" in capsys.readouterr().err
    (photos / "view4.png").unlink()
    assert export_colmap(out / "matches.h5", tmp_path / "five.db", images=photos)["images"] == 5
    assert "left out: " in capsys.readouterr().err
    write_png(photos / "view4.png", np.zeros((60, 80), np.uint8))
    with pytest.raises(UserError, match="view4.png: is not of the size of the one that"):
        export_colmap(out / "matches.h5", tmp_path / "new.db", images=photos)
    assert not (tmp_path / "new.db").exists()


def test_export_from_the_command_line(built, tmp_path):
    _, folder, out, _ = built
    run = ["export", "colmap", str(out / "matches.h5"), "-o", str(tmp_path / "x.db"), "--json"]
    result = CliRunner().invoke(app, run)
    assert result.exit_code == 0 and json.loads(result.stdout)["images"] == 6
    (tmp_path / "no.db").write_bytes(b"this is no database at all" * 10)
    with pytest.raises(UserError) as error:
        export_colmap(out / "matches.h5", tmp_path / "no.db")
    assert "\n" not in str(error.value)


# ---- cameras


def with_exif(path: Path, tags: dict[int, object], make: str = "Maker") -> None:
    image, exif = PIL.Image.new("RGB", (400, 300)), PIL.Image.Exif()
    exif[0x010F], exif[0x0110] = make, "Model"
    exif.get_ifd(0x8769).update(tags)
    image.save(path, exif=exif)


def test_focal_lengths_from_exif(tmp_path):
    with_exif(tmp_path / "film.jpg", {0xA405: 36})
    assert read_exif(tmp_path / "film.jpg", (400, 300)).focal == pytest.approx(400)
    # 10 mm on a sensor with 1000 pixels a centimetre; the file is half as large as the sensor's image.
    with_exif(tmp_path / "sensor.jpg", {0x920A: 10.0, 0xA20E: 1000.0, 0xA210: 3, 0xA002: 800, 0xA003: 600})
    assert read_exif(tmp_path / "sensor.jpg", (400, 300)).focal == pytest.approx(500)
    with_exif(tmp_path / "nonsense.jpg", {0xA405: 60000})
    assert read_exif(tmp_path / "nonsense.jpg", (400, 300)).focal is None
    assert read_exif(ASSETS / "astronaut0.jpg", (512, 512)).focal is None


def test_who_shares_a_camera(tmp_path):
    for name, film, make in (("a", 36, "X"), ("b", 36, "X"), ("c", 50, "X"), ("d", 36, "Y")):
        with_exif(tmp_path / f"{name}.jpg", {0xA405: film}, make)
    images = {n: (tmp_path / f"{n}.jpg", (400, 300)) for n in "abcd"}
    images |= dict.fromkeys("ef", (tmp_path / "none.jpg", (400, 300)))  # without EXIF: from anywhere
    assert list(choose_cameras(images, CameraOptions()).of_image.values()) == [0, 0, 1, 2, 3, 4]
    assert len(choose_cameras(images, CameraOptions(sharing="per-image")).cameras) == 6
    shared = choose_cameras(images | {"g": (None, (300, 400))}, CameraOptions(sharing="shared"))
    assert list(shared.of_image.values()) == [0] * 6 + [1]
    assert (
        shared.cameras[1]["params"] == [480.0, 150.0, 200.0, 0.0]
        and not shared.cameras[1]["has_prior_focal_length"]
    )


def test_given_intrinsics(tmp_path):
    images = dict.fromkeys("ab", (None, (400, 300)))
    [camera] = choose_cameras(images, CameraOptions(intrinsics="500,501,199.5,149.5")).cameras
    assert camera["params"] == [500, 501, 200, 150] and camera["model"] == "PINHOLE"
    file = tmp_path / "cameras.txt"
    file.write_text("# image fx fy cx cy\na 1 2 3 4 and more\nb 5 6 7 8\n")
    chosen = choose_cameras(images, CameraOptions(intrinsics=str(file)))
    assert [c["params"] for c in chosen.cameras] == [[1, 2, 3.5, 4.5], [5, 6, 7.5, 8.5]]
    for bad, word in (("1,2,3", "4"), ("-1,2,3,4", "positive"), ("x", "float")):
        with pytest.raises(UserError, match=word):
            choose_cameras(images, CameraOptions(intrinsics=bad))
    file.write_text("a 1 2 3 4\n")
    with pytest.raises(UserError, match="no line for b"):
        choose_cameras(images, CameraOptions(intrinsics=str(file)))
    with pytest.raises(UserError, match="camera model"):
        CameraOptions(model="FISHEYE")


# ---- sets of images that are none


class Unrelated(SyntheticMatcher):
    def match(self, a, b):
        g = np.random.default_rng(zlib.crc32(f"{Path(a.name).name}{Path(b.name).name}".encode()))
        points = (g.uniform(0, 100, (20, 2)).astype(np.float32) for _ in range(2))
        return Matches(*points, np.ones(20, np.float32), a.size, b.size, a.name, b.name)


class Identical(SyntheticMatcher):
    def match(self, a, b):
        points = np.stack(np.meshgrid(np.arange(5, 155, 5), np.arange(5, 115, 5)), -1).reshape(-1, 2)
        points = points.astype(np.float32)
        return Matches(points, points, np.ones(len(points), np.float32), a.size, b.size, a.name, b.name)


class Turning(SyntheticMatcher):
    """Photos from one place: what they show moves by a homography."""

    def match(self, a, b):
        points = np.stack(np.meshgrid(np.arange(5, 155, 5), np.arange(5, 115, 5)), -1).reshape(-1, 2)
        turn = 0.1 * (int(Path(b.name).stem) - int(Path(a.name).stem))
        H = K @ cv2.Rodrigues(np.array([0, turn, 0]))[0] @ np.linalg.inv(K)
        moved = cv2.perspectiveTransform(points[None].astype(float), H)[0]
        inside = np.all((moved > 0) & (moved < [159, 119]), axis=1)
        found = (x[inside].astype(np.float32) for x in (points, moved, np.ones(len(points))))
        return Matches(*found, a.size, b.size, a.name, b.name)


class Nothing(SyntheticMatcher):
    def match(self, a, b):
        none = np.zeros((0, 2), np.float32)
        return Matches(none, none, none[:, 0], a.size, b.size, a.name, b.name)


@pytest.mark.parametrize(
    "kind, word",
    [
        (Unrelated, "none of the 3 matched pairs"),
        (Identical, "all the same"),
        (Nothing, "anything in common"),
    ],
)
def test_images_that_make_no_scene_end_with_a_word(tmp_path, kind, word):
    for n in range(3):
        write_noise(tmp_path / f"{n}.png", n)
    with pytest.raises(UserError, match=word) as error:
        reconstruct(tmp_path, tmp_path / "out", SfmOptions(threads=1), lambda: kind(None))
    assert "\n" not in str(error.value)


def test_photos_from_one_place_make_no_scene(tmp_path):
    for n in range(3):
        write_noise(tmp_path / f"{n}.png", n)
    options = SfmOptions(cameras=GIVEN, threads=1)
    with pytest.raises(UserError, match="taken from one place"):
        reconstruct(tmp_path, tmp_path / "out", options, lambda: Turning(None))
    # With real photos the mapper may find poses, but no point.
    empty, full = (SimpleNamespace(num_points3D=lambda n=n: n) for n in (0, 5))
    assert with_points({0: empty, 1: full}) == [full]


def test_too_few_images(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        find_images(tmp_path / "none", tmp_path / "out")
    with pytest.raises(UserError, match="no images in it"):
        find_images(tmp_path, tmp_path / "out")
    write_noise(tmp_path / "a.png", 0)
    with pytest.raises(UserError, match="1 image in it"):
        find_images(tmp_path, tmp_path / "out")
    (tmp_path / "out").mkdir()
    write_noise(tmp_path / "out" / "top_view.png", 0)
    (tmp_path / "sub").mkdir()
    write_noise(tmp_path / "sub" / "b.PNG", 0)
    assert list(find_images(tmp_path, tmp_path / "out")) == ["a.png", "sub/b.PNG"]


def test_results_of_earlier_runs_are_no_photos(tmp_path, capsys):
    names = ("a.png", "b/c.png", "b/top_view.png", "old/stages.json", "old/images/a.png", "old/top_view.png")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        write_noise(tmp_path / name, 0) if name.endswith("png") else (tmp_path / name).write_text("{}")
    photos = ["a.png", "b/c.png", "b/top_view.png"]
    assert list(find_images(tmp_path, tmp_path / "new")) == photos
    write_noise(tmp_path / "top_view.png", 0)  # a photo, by its name alone
    assert list(find_images(tmp_path, tmp_path / "new")) == [*photos, "top_view.png"]
    (tmp_path / "stages.json").write_text("{}")  # the results go where the photos are
    assert list(find_images(tmp_path, tmp_path)) == photos
    assert not capsys.readouterr().err
    write_noise(tmp_path / "old" / "photo.png", 0)
    assert list(find_images(tmp_path, tmp_path)) == photos
    assert f"left out, as the results of another run: {tmp_path / 'old'}" in capsys.readouterr().err


def test_two_images_are_enough(built, tmp_path):
    scene, folder, _, _ = built
    for n in (1, 4):
        shutil.copy(folder / f"view{n}.png", tmp_path)
    options = SfmOptions(cameras=GIVEN, threads=1)
    summary = reconstruct(tmp_path, tmp_path / "out", options, lambda: SyntheticMatcher(scene))
    assert summary["registered"] == 2 and summary["points"] > 100
    with pytest.raises(UserError, match="the global mapper needs at least 3 images"):
        reconstruct(tmp_path, tmp_path / "out", replace(options, mapper="global"), lambda: None)


def test_a_broken_image_is_left_out(built, tmp_path):
    scene, folder, _, _ = built
    photos = tmp_path / "photos"
    shutil.copytree(folder, photos)
    (photos / "view5.png").write_bytes(b"broken")
    out = tmp_path / "out"
    options = SfmOptions(cameras=GIVEN, threads=1, pairs=PairOptions("sequential", window=3))
    summary = reconstruct(photos, out, options, lambda: SyntheticMatcher(scene))
    assert list(summary["skipped"]) == ["view5.png"] and summary["registered"] == 5
    assert "view5.png" in (out / "report.md").read_text()
    assert len(MatchStore(out / "matches.h5")) == summary["pairs"] == 9
    # Other pairs that were matched before are left out if they are not asked for.
    options = SfmOptions(cameras=GIVEN, threads=1, pairs=PairOptions("sequential", window=2))
    summary = reconstruct(photos, out, options, lambda: SyntheticMatcher(scene))
    assert summary["pairs"] == 7 and summary["verified_pairs"] <= 7


def test_a_photo_that_has_gone_bad_since_it_was_matched_is_left_out(built, tmp_path):
    scene, folder, out, _ = built
    photos = tmp_path / "photos"
    shutil.copytree(folder, photos)
    shutil.copytree(out, tmp_path / "out")
    options = SfmOptions(cameras=GIVEN, threads=1)
    (photos / "view5.png").write_bytes(b"")
    summary = reconstruct(photos, tmp_path / "out", options, lambda: SyntheticMatcher(scene))
    assert list(summary["skipped"]) == ["view5.png"] and summary["registered"] == 5 and summary["pairs"] == 10


def test_retrieved_pairs_and_their_cache(tmp_path, monkeypatch):
    from prism_match.maps import retrieval
    from prism_match.maps.reconstruction import retrieve_pairs

    files, asked = {}, []
    for n in range(5):
        files[f"{n}.png"] = tmp_path / f"{n}.png"
        write_noise(files[f"{n}.png"], n)
    files["3.png"].write_bytes(b"broken")

    def describe(image):
        path = Path(image.prepared.name)
        asked.append(path.name)
        angle = {"0": 0.0, "1": 3.0, "2": 0.1, "4": 3.1}[path.stem]
        plane = np.array([np.cos(angle), np.sin(angle)], np.float32)
        return np.pad(plane, (0, 2 * matcher.info.config.coarse_dim - 2))

    monkeypatch.setattr(retrieval, "pool", describe)
    cache, matcher = tmp_path / "descriptors.npz", SyntheticMatcher(None)
    for _ in range(2):
        pairs, broken = retrieve_pairs(files, cache, 1, matcher, False)
        assert pairs.tolist() == [[0, 2], [1, 4]] and list(broken) == ["3.png"]
    assert asked == ["0.png", "1.png", "2.png", "4.png"]
    cache.write_bytes(cache.read_bytes()[:50])
    assert retrieve_pairs(files, cache, 1, matcher, False)[0].tolist() == [[0, 2], [1, 4]]


def test_all_images_broken(tmp_path):
    for n in range(3):
        (tmp_path / f"{n}.jpg").write_bytes(b"broken")
    with pytest.raises(UserError, match="3 cannot be read"):
        reconstruct(tmp_path, tmp_path / "out", SfmOptions(), lambda: SyntheticMatcher(None))


def test_turned_photos_get_upright_copies(tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    pixels = np.zeros((60, 80, 3), np.uint8)
    pixels[:, 40:] = 255
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # shown turned by a quarter
    PIL.Image.fromarray(pixels).save(photos / "turned.jpg", exif=exif)
    PIL.Image.fromarray(pixels).save(photos / "straight.jpg")
    files = {p.name: p for p in sorted(photos.iterdir())}
    copies = upright_copies(files, tmp_path / "images")
    with PIL.Image.open(copies["turned.jpg"]) as copy:
        assert copy.size == (60, 80) and copy.getexif().get(0x0112, 1) == 1
        shown = load_image(files["turned.jpg"]).rgb.astype(int)
        assert np.abs(np.asarray(copy).astype(int) - shown).mean() < 3
    assert copies["straight.jpg"].read_bytes() == files["straight.jpg"].read_bytes()
    exif[ORIENTATION] = 8
    PIL.Image.fromarray(pixels[..., 0]).save(photos / "gray.tif", exif=exif)
    copy = upright_copies({"gray.tif": photos / "gray.tif"}, tmp_path / "images")["gray.tif"]
    np.testing.assert_array_equal(cv2.imread(str(copy), cv2.IMREAD_UNCHANGED), np.rot90(pixels[..., 0]))
    straight = {"straight.jpg": files["straight.jpg"]}
    assert upright_copies(straight, tmp_path / "none") == straight and not (tmp_path / "none").exists()


def turn(photo: Path) -> None:
    """As a phone that was held upright stores it."""
    with PIL.Image.open(photo) as opened:
        pixels = np.asarray(opened)
    exif = PIL.Image.Exif()
    exif[ORIENTATION] = 6
    PIL.Image.fromarray(np.rot90(pixels)).save(photo, exif=exif)


@pytest.mark.parametrize(
    "name", ["sparse/0/cameras.txt", "database.db", "transforms.json", "images/view1.png", "map_view.png"]
)
def test_what_others_have_made_is_not_replaced(built, tmp_path, name):
    scene, folder, _, _ = built
    photos, out = tmp_path / "photos", tmp_path / "out"
    shutil.copytree(folder, photos)
    turn(photos / "view0.png")
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("precious")
    matcher = SyntheticMatcher(scene)
    with pytest.raises(UserError, match="would be replaced; give another folder"):
        reconstruct(photos, out, SfmOptions(cameras=GIVEN, threads=1), lambda: matcher)
    assert (out / name).read_text() == "precious" and not matcher.matched


def test_a_model_stays_with_its_photos_where_the_next_run_fails(built, tmp_path, monkeypatch):
    scene, folder, out, _ = built
    shutil.copytree(out, tmp_path / "out")
    shutil.copytree(folder, tmp_path / "photos")
    turn(tmp_path / "photos" / "view0.png")  # other photos
    options = SfmOptions(cameras=GIVEN, threads=1)
    monkeypatch.setattr(sfm, "make_tracks", lambda *_: {"pairs": 0, "matches": 0, "keypoints": 0})
    with pytest.raises(UserError, match="anything in common"):
        reconstruct(tmp_path / "photos", tmp_path / "out", options, lambda: SyntheticMatcher(scene))
    done, before = (Stages(folder / STAGES).done for folder in (tmp_path / "out", out))
    assert (done["model"], done["photos"]) == (before["model"], before["photos"])


def test_photos_that_have_changed_since_are_not_looked_up_in_the_map(built, tmp_path, capsys):
    scene, folder, _, _ = built
    photos, out = tmp_path / "photos", tmp_path / "out"
    shutil.copytree(folder, photos)
    reconstruct(photos, out, SfmOptions(cameras=GIVEN, threads=1), lambda: SyntheticMatcher(scene))
    assert len(open_map(out, None, None, 1000.0, None).names) == 6 and not capsys.readouterr().err
    (photos / "view1.png").rename(tmp_path / "aside")
    (photos / "view2.png").rename(photos / "view1.png")
    (tmp_path / "aside").rename(photos / "view2.png")
    left = open_map(out, None, None, 1000.0, None).names
    assert left == ["view0.png", "view3.png", "view4.png", "view5.png"]
    assert "view1.png: has changed since it was made" in capsys.readouterr().err
    assert len(open_map(out, photos, None, 1000.0, None).names) == 6  # as told
    for path in photos.iterdir():
        write_noise(path, 0)
    with pytest.raises(UserError, match="all photos have changed"):
        open_map(out, None, None, 1000.0, None)


def test_results_whose_list_of_stages_is_damaged_may_be_replaced(built, tmp_path):
    (tmp_path / "stages.json").write_text("{")
    (tmp_path / "database.db").write_text("of the run before")

    def begun():
        raise InterruptedError

    with pytest.raises(InterruptedError):
        reconstruct(built[1], tmp_path, SfmOptions(cameras=GIVEN), begun)


def test_photos_in_a_folder_of_results_stay_as_they_are(built, tmp_path):
    """Upright copies would go over the photos themselves."""
    scene, folder, out, _ = built
    shutil.copytree(out, tmp_path, dirs_exist_ok=True)
    shutil.copytree(folder, tmp_path / "images")
    options = SfmOptions(cameras=GIVEN, threads=1)
    turn(tmp_path / "images" / "view0.png")
    before = {p.name: p.read_bytes() for p in (tmp_path / "images").iterdir()}
    with pytest.raises(UserError, match=r"images/view0\.png: .* would be replaced"):
        reconstruct(tmp_path / "images", tmp_path, options, lambda: SyntheticMatcher(scene))
    assert {p.name: p.read_bytes() for p in (tmp_path / "images").iterdir()} == before


def test_upright_copies_are_no_photos_of_the_next_run(built, tmp_path):
    scene, folder, _, _ = built
    for n in range(3):
        shutil.copy(folder / f"view{n}.png", tmp_path)
    turn(tmp_path / "view0.png")
    options = SfmOptions(cameras=GIVEN, threads=1)
    for _ in range(2):
        assert reconstruct(tmp_path, tmp_path, options, lambda: SyntheticMatcher(scene))["images"] == 3
        assert len(list((tmp_path / "images").iterdir())) == 3
    (tmp_path / "view2.png").unlink()
    assert list(find_images(tmp_path, tmp_path)) == ["view0.png", "view1.png"]


def test_a_map_of_ours_is_localized_in(tmp_path):
    """Turned by EXIF, too: the model has the pixels that are shown, and knows where its photos are."""
    scene, folder, matcher = make_photos(tmp_path / "scene", 6)
    photos, out = tmp_path / "photos", tmp_path / "map"
    photos.mkdir()
    exif = PIL.Image.Exif()
    exif[ORIENTATION] = 3  # half a turn, which no size tells
    for name in scene.names:
        with PIL.Image.open(folder / name) as image:
            image.save(photos / name, exif=exif)
    query = photos / "view2.png"
    query.rename(tmp_path / "query.png")
    reconstruct(photos, out, SfmOptions(cameras=GIVEN, threads=1), lambda: matcher)
    world = open_map(out, None, None, 1000.0, None)
    assert world.image_dir.resolve() == photos.resolve() and len(world.names) == 5
    found = []
    for name in ("view1.png", "view3.png"):
        points = true_matches(scene, 2, scene.names.index(name))
        size = load_image(world.path(name)).size
        scores = np.ones(len(points[0]), np.float32)
        found.append((name, Matches(*(p.astype(np.float32) for p in points), scores, size, size)))
    for model, images in ((out, None), (out / "sparse", None), (out / "sparse" / "0", photos)):
        world = open_map(model, images, None, 1000.0, None)
        poses = {name: world.pose(name) for name in world.names}
        poses["view2.png"] = localize(Query("q", Path(), world.camera("view1.png")), found, world).T
        centres, angles, _, _ = pose_errors(scene, poses)
        assert centres.max() < 0.02 and angles.max() < 1
    shutil.rmtree(photos)  # but for the upright copies
    assert open_map(out / "sparse" / "0", None, None, 1000.0, None).image_dir == out / "images"
    shutil.rmtree(out / "images")
    with pytest.raises(UserError, match="tell with --images where"):
        open_map(out, None, None, 1000.0, None)


def test_bad_intrinsics_are_told_before_anything_is_matched(built, tmp_path):
    folder = built[1]
    lines = tmp_path / "cameras.txt"
    lines.write_text("view0.png 150 150 79.5 59.5\n")
    for given, reason in (("150,150", "2 numbers instead of 4"), (str(lines), "no line for view1.png")):
        options = SfmOptions(cameras=CameraOptions(intrinsics=given))
        with pytest.raises(UserError, match=reason):
            reconstruct(folder, tmp_path / "out", options, lambda: pytest.fail("a matcher was made"))
    assert not (tmp_path / "out").exists()


def test_options_that_make_no_sense():
    for bad in ({"batch_size": 0}, {"features_gib": -1.0}, {"threads": 0}):
        with pytest.raises(UserError):
            SfmOptions(**bad)
    for bad in ({"mode": "some"}, {"window": 0}, {"neighbours": 0}):
        with pytest.raises(UserError):
            PairOptions(**bad)


# ---- pictures


def test_pictures_of_many_images_and_few_points():
    names = [f"{n}.jpg" for n in range(500)]
    graph = draw_match_graph(names, [(names[0], names[499], 80)], set(names))
    assert graph.dtype == np.uint8 and max(graph.shape) < 900
    poses = np.stack([np.eye(4)[:3]] * 2)
    view = draw_top_view(np.zeros((0, 3)), np.zeros((0, 3), np.uint8), poses)
    assert view.shape == (900, 900, 3) and (view != 255).any()
