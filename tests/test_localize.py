"""Poses of photos in maps: small scenes with exact geometry, and the commands around them."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import cv2
import h5py
import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
import typer
from conftest import needs_shared
from synthetic_scene import HEIGHT, WIDTH, K, Scene, make_scene, quaternion
from typer.testing import CliRunner

from prism_match import Matcher, UserError
from prism_match.cameras import Camera, pinhole
from prism_match.cli.eval import parse_limits
from prism_match.cli.localize import localize_command
from prism_match.colmap_model import Model, PosedView, read_model
from prism_match.config import PRESETS
from prism_match.engine import Engine, MatchStore
from prism_match.engine.methods import Sift
from prism_match.engine.photos import Resize, scale_points
from prism_match.evaluation.benchmarks import BENCHMARKS
from prism_match.evaluation.options import Options
from prism_match.evaluation.runner import Run
from prism_match.evaluation.triangulate import triangulate_map
from prism_match.files import lock_folder
from prism_match.frames import read_sequence
from prism_match.geometry import rotation_angle
from prism_match.images import ORIENTATION
from prism_match.maps.landmarks import (
    DepthMap,
    ScanMap,
    SfmMap,
    read_scan,
    rigid,
    snap,
    stored_orientation,
    without,
)
from prism_match.maps.localization import (
    Correspondences,
    Query,
    localize,
    merge,
    read_poses,
    read_retrieval,
    transport,
    with_fallback,
    write_poses,
)
from prism_match.maps.pnp import estimate_camera_pose
from prism_match.maps.queries import (
    LocalizeOptions,
    MatchedQuery,
    localize_photos,
    match_queries,
    retrieve,
)
from prism_match.matches import Matches

SIZE = (WIDTH, HEIGHT)
CAMERA = pinhole(K, *SIZE)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("scene"), points=1200)


@pytest.fixture(scope="module")
def sequence(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same scene as an RGB-D sequence, with depth in fifths of a millimetre."""
    root = tmp_path_factory.mktemp("sequence")
    np.savetxt(root / "camera-intrinsics.txt", K)
    for n, name in enumerate(scene.names):
        photo = cv2.imread(str(scene.root / "images" / name))
        cv2.imwrite(str(root / f"{n}.color.png"), photo)
        cv2.imwrite(str(root / f"{n}.depth.png"), (scene.depth[n] * 5000).round().astype(np.uint16))
        np.savetxt(root / f"{n}.pose.txt", np.linalg.inv(scene.T[n]))
    return root


def true_matches(scene: Scene, a: int, b: int, step: int = 4) -> Matches:
    """Exact matches of view a, on a grid, with view b, where both see the same surface."""
    x, y = (v.ravel() for v in np.meshgrid(np.arange(2, WIDTH - 2, step), np.arange(2, HEIGHT - 2, step)))
    rays = np.stack([x, y, np.ones_like(x)], 1) @ np.linalg.inv(K).T * scene.depth[a][y, x, None]
    world = (rays - scene.T[a, :3, 3]) @ scene.T[a, :3, :3]
    there = world @ scene.T[b, :3, :3].T + scene.T[b, :3, 3]
    pixel = there @ K.T
    pixel = pixel[:, :2] / pixel[:, 2:]
    u, v = np.rint(pixel).astype(int).T
    inside = (u >= 1) & (v >= 1) & (u < WIDTH - 1) & (v < HEIGHT - 1)
    seen = scene.depth[b][v.clip(0, HEIGHT - 1), u.clip(0, WIDTH - 1)]
    good = inside & (np.abs(seen / there[:, 2] - 1) < 0.01)
    points = np.stack([x, y], 1)[good].astype(np.float32), pixel[good].astype(np.float32)
    return Matches(*points, np.ones(good.sum(), np.float32), SIZE, SIZE, scene.names[a], scene.names[b])


def errors(T: np.ndarray | None, truth: np.ndarray) -> tuple[float, float]:
    """Length units and degrees."""
    assert T is not None
    centres = [-x[:3, :3].T @ x[:3, 3] for x in (T, truth)]
    return float(np.linalg.norm(centres[0] - centres[1])), rotation_angle(T[:3, :3], truth[:3, :3])


# ---- PnP


def random_view(camera: Camera, seed: int, count: int = 200) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pixels, points of the world far from its origin, and the pose."""
    rng = np.random.default_rng(seed)
    local = rng.uniform([-2, -1.5, 4], [2, 1.5, 9], (count, 3))
    T = np.eye(4)
    T[:3, :3] = cv2.Rodrigues(rng.normal(size=3))[0]
    T[:3, 3] = -T[:3, :3] @ (rng.normal(size=3) + [1e4, -3e5, 100])
    return camera.project(local), (local - T[:3, 3]) @ T[:3, :3], T


@pytest.mark.parametrize("backend", ["opencv", "poselib"])
@pytest.mark.parametrize("camera", [
    Camera("SIMPLE_PINHOLE", 640, 480, (500.0, 320.0, 240.0)),
    Camera("OPENCV", 640, 480, (500.0, 520.0, 310.0, 250.0, -0.2, 0.05, 0.01, -0.01)),
    Camera("RADIAL_FISHEYE", 640, 480, (300.0, 320.0, 240.0, 0.05, -0.01)),
], ids=lambda c: c.model)  # fmt: skip
def test_poses_are_recovered_among_outliers(camera: Camera, backend: str) -> None:
    pixels, xyz, T = random_view(camera, 0)
    wrong = np.arange(0, 200, 2)
    pixels[wrong] += np.random.default_rng(1).uniform(40, 200, (100, 2))
    found = estimate_camera_pose(pixels, xyz, camera, 4.0, backend)
    assert max(errors(found.T, T)) < 1e-4
    np.testing.assert_array_equal(np.flatnonzero(~found.inliers), wrong)


@pytest.mark.parametrize("backend", ["opencv", "poselib"])
def test_distortion_counts(backend: str) -> None:
    camera = Camera("SIMPLE_RADIAL", 640, 480, (500.0, 320.0, 240.0, -0.3))
    pixels, xyz, T = random_view(camera, 3)
    ignored = Camera("SIMPLE_PINHOLE", 640, 480, camera.params[:3])
    assert errors(estimate_camera_pose(pixels, xyz, camera, 12.0, backend).T, T)[0] < 1e-4
    assert errors(estimate_camera_pose(pixels, xyz, ignored, 12.0, backend).T, T)[0] > 1e-2


@pytest.mark.parametrize("backend", ["opencv", "poselib"])
def test_no_pose_without_evidence(backend: str) -> None:
    rng = np.random.default_rng(0)
    for count in (0, 3):
        found = estimate_camera_pose(rng.random((count, 2)), rng.random((count, 3)), CAMERA, 1.0, backend)
        assert found.T is None and found.inliers.shape == (count,)


# ---- snapping and merging


def snap_plainly(pixels: np.ndarray, scores: np.ndarray, targets: np.ndarray, radius: float) -> set:
    every = [
        (float(np.linalg.norm(p - t)), -float(scores[i]), j, i)
        for i, p in enumerate(pixels)
        for j, t in enumerate(targets)
    ]
    pairs: set[tuple[int, int]] = set()
    for distance, _, j, i in sorted(every):
        if distance <= radius and not any(i == a or j == b for a, b in pairs):
            pairs.add((i, j))
    return pairs


@pytest.mark.parametrize("radius", [0.5, 3.0, 40.0])
def test_snapping_agrees_with_a_plain_one(radius: float) -> None:
    rng = np.random.default_rng(0)
    pixels, targets = rng.uniform(-5, 60, (60, 2)), rng.uniform(0, 64, (80, 2))
    pixels[10] = pixels[11] = targets[5]  # equally near: the score decides
    scores = rng.random(60)
    i, j = snap(pixels, scores, targets, radius)
    assert set(zip(i.tolist(), j.tolist(), strict=True)) == snap_plainly(pixels, scores, targets, radius)
    assert len(set(i)) == len(i) and len(set(j)) == len(j)


def test_snapping_of_nothing() -> None:
    for n, p in ((0, 5), (5, 0)):
        i, j = snap(np.zeros((n, 2)), np.zeros(n), np.zeros((p, 2)), 1.0)
        assert len(i) == len(j) == 0


def test_offsets_are_carried_along_by_the_neighbours() -> None:
    rng = np.random.default_rng(0)
    source = rng.uniform(0, 100, (200, 2))
    A = np.array([[1.7, -0.4], [0.6, 0.8]])
    target = source @ A.T + [5, -3]
    wrong = rng.choice(200, 20, replace=False)
    rows = np.setdiff1d(np.arange(0, 200, 3), wrong)
    target[wrong] += rng.uniform(20, 60, (20, 2))
    offset = rng.uniform(-4, 4, (len(rows), 2))
    moved = transport(source, target, rows, offset)
    rest = np.linalg.norm(moved - ((source[rows] + offset) @ A.T + [5, -3]), axis=1)
    assert np.median(rest) < 0.6 and rest.max() < 4  # without: 6 pixels in the median
    np.testing.assert_array_equal(transport(source, target, rows, 0 * offset), target[rows])
    np.testing.assert_array_equal(
        transport(source[:1], target[:1], np.array([0]), np.ones((1, 2))).shape, (1, 2)
    )


def test_sightings_of_a_point_are_merged_over_map_photos() -> None:
    def part(rows: list[tuple[float, float, int, float]]) -> Correspondences:
        x, y, point, score = (np.array(v) for v in zip(*rows, strict=True))
        return Correspondences(
            np.stack([x, y], 1), np.repeat(point[:, None], 3, 1).astype(float), point, score
        )

    merged = merge([
        part([(10, 10, 7, 0.9), (50, 50, 8, 0.5), (1, 1, -1, 0.3)]),
        part([(11, 10, 7, 0.1), (90, 50, 8, 0.4), (1, 1, -1, 0.3)]),
    ])  # fmt: skip
    rows = {(int(p), *np.round(x, 6)) for p, x in zip(merged.points, merged.pixels, strict=True)}
    assert rows == {(7, 10.1, 10.0), (8, 50.0, 50.0), (8, 90.0, 50.0), (-1, 1.0, 1.0)}
    assert len(merged.scores) == 5 and len(merge([]).scores) == 0
    np.testing.assert_array_equal(merged.xyz[:, 0], merged.points)


# ---- maps


@pytest.mark.parametrize("backend", ["opencv", "poselib"])
def test_localized_in_a_colmap_model(scene: Scene, backend: str) -> None:
    """The query is none of the map's photos; its matches are on a grid, the map's points are not."""
    world = SfmMap(without(read_model(scene.root), scene.names[2]), scene.root / "images")
    query = Query("q", Path("q"), CAMERA)
    found = [(scene.names[n], true_matches(scene, 2, n)) for n in (1, 3, 4)]
    result = localize(query, found, world, threshold=2.0, backend=backend)
    shift, turn = errors(result.T, scene.T[2])
    assert shift < 0.01 and turn < 0.1 and result.inliers > 50
    assert list(result.references) == [scene.names[n] for n in (1, 3, 4)] and not result.problem


def test_a_distorted_query_is_localized(scene: Scene) -> None:
    lens = Camera("OPENCV", WIDTH, HEIGHT, (*CAMERA.params, -0.15, 0.02, 0.004, -0.003))
    world = SfmMap(read_model(scene.root), scene.root / "images")
    found = []
    for n in (1, 3):
        m = true_matches(scene, 2, n)
        rays = np.concatenate([CAMERA.normalise(m.keypoints0), np.ones((len(m), 1))], axis=1)
        found.append((scene.names[n], replace(m, keypoints0=lens.project(rays).astype(np.float32))))
    shift, turn = errors(localize(Query("q", Path(), lens), found, world, threshold=2.0).T, scene.T[2])
    assert shift < 0.01 and turn < 0.1
    assert errors(localize(Query("q", Path(), CAMERA), found, world, threshold=2.0).T, scene.T[2])[0] > 0.02


def test_a_smaller_copy_of_the_photos_will_do(scene: Scene) -> None:
    world = SfmMap(read_model(scene.root), scene.root / "images")
    m = true_matches(scene, 2, 3)
    half = replace(
        m, keypoints0=scale_points(m.keypoints0, SIZE, (80, 60)), size0=(80, 60),
        keypoints1=scale_points(m.keypoints1, SIZE, (320, 240)), size1=(320, 240),
    )  # fmt: skip
    result = localize(Query("q", Path(), CAMERA), [(scene.names[3], half)], world, threshold=2.0)
    assert errors(result.T, scene.T[2])[0] < 0.02
    turned = localize(Query("q", Path(), CAMERA), [(scene.names[3], replace(m, size1=(120, 160)))], world)
    assert turned.T is None and "120x160, its camera is for 160x120" in turned.problem


def tag(source: Path, target: Path, orientation: int) -> None:
    """The same pixels, which EXIF tells to turn before they are shown."""
    exif = PIL.Image.Exif()
    exif[ORIENTATION] = orientation
    with PIL.Image.open(source) as image:
        image.save(target, exif=exif)


def as_shown(points: np.ndarray, orientation: int) -> np.ndarray:
    """n 2: where pixels of the stored photo, which are whole numbers, are shown."""
    image = PIL.Image.fromarray(np.arange(WIDTH * HEIGHT, dtype=np.int32).reshape(HEIGHT, WIDTH))
    image.getexif()[ORIENTATION] = orientation
    shown = np.asarray(PIL.ImageOps.exif_transpose(image))
    where = np.argsort(shown.ravel())
    y, x = np.divmod(where, shown.shape[1])
    u, v = points.astype(int).T
    return np.stack([x, y], 1)[v * WIDTH + u].astype(np.float32)


@pytest.mark.parametrize("orientation", [3, 6, 7, 8])
def test_photos_that_exif_turns(scene: Scene, sequence: Path, orientation: int, tmp_path: Path) -> None:
    """Maps have the pixels of the stored file, matches those that are shown."""
    size = SIZE if orientation < 5 else SIZE[::-1]
    frames = {f.image.name: f for f in read_sequence(sequence)}
    found = []
    for n in (1, 3):
        name = f"{n}.color.png"
        tag(frames[name].image, tmp_path / scene.names[n], orientation)
        frames[name] = replace(frames[name], image=tmp_path / scene.names[n])
        m = true_matches(scene, n, 2).swap()
        found.append((n, replace(m, keypoints1=as_shown(m.keypoints1, orientation), size1=size)))
    model = read_model(scene.root)
    for world, names in ((SfmMap(model, tmp_path), scene.names), (DepthMap(frames, 5000), list(frames))):
        matches = [(names[n], m) for n, m in found]
        shift, turn = errors(
            localize(Query("q", Path(), CAMERA), matches, world, threshold=2.0).T, scene.T[2]
        )
        assert shift < 0.01 and turn < 0.1
    # And a query whose camera is that of its file.
    query = Query.stored("q", tmp_path / scene.names[1], CAMERA)
    m = true_matches(scene, 1, 3)
    m = replace(m, keypoints0=as_shown(m.keypoints0, orientation), size0=size)
    result = localize(query, [(scene.names[3], m)], SfmMap(model, scene.root / "images"), threshold=2.0)
    assert errors(result.T, scene.T[1])[0] < 0.02


def test_a_camera_for_the_photo_as_it_is_shown(scene: Scene, tmp_path: Path) -> None:
    tag(scene.root / "images" / scene.names[0], tmp_path / "a.png", 6)
    assert stored_orientation(tmp_path / "a.png", CAMERA) == 6
    assert stored_orientation(tmp_path / "a.png", CAMERA.resized(320, 240)) == 6
    assert stored_orientation(tmp_path / "a.png", pinhole(K, *SIZE[::-1])) == 1


def test_a_photo_leaves_a_model_with_its_points(scene: Scene) -> None:
    model = read_model(scene.root)
    rest = without(model, scene.names[0])
    assert [v.name for v in rest.views] == scene.names[1:]
    counts = np.bincount(np.concatenate([v.points for v in rest.views]), minlength=len(model.points))
    assert set(counts.tolist()) - {0} == set(range(2, 6)) & set(counts.tolist()) and counts.max() >= 2


@pytest.mark.parametrize("shrink", [1, 2])
def test_localized_by_depth(scene: Scene, sequence: Path, shrink: int, tmp_path: Path) -> None:
    frames = {f.image.name: f for f in read_sequence(sequence)}
    if shrink > 1:  # depth maps smaller than the photos, as ScanNet's
        for name, frame in frames.items():
            small = cv2.imread(str(frame.depth), cv2.IMREAD_UNCHANGED)[::shrink, ::shrink]
            cv2.imwrite(str(tmp_path / f"{name}.png"), small)
            frames[name] = replace(frame, depth=tmp_path / f"{name}.png")
    world = DepthMap(frames, per_metre=5000)
    found = [(f"{n}.color.png", true_matches(scene, 2, n)) for n in (1, 3)]
    result = localize(Query("q", Path(), world.camera("2.color.png")), found, world, threshold=2.0)
    shift, turn = errors(result.T, scene.T[2])
    assert shift < 0.003 * shrink**4 and turn < 0.05 * shrink**2


def test_poses_that_have_shrunk_are_made_rigid(scene: Scene) -> None:
    shrunk = scene.T[1].copy()
    shrunk[:3] *= 0.999  # the camera stays where it is
    np.testing.assert_allclose(rigid(shrunk), scene.T[1], atol=1e-9)


def test_pixels_without_depth_are_left_out(sequence: Path, tmp_path: Path) -> None:
    frames = {f.image.name: f for f in read_sequence(sequence)}
    depth = cv2.imread(str(frames["1.color.png"].depth), cv2.IMREAD_UNCHANGED)
    depth[:, :80] = 0
    depth[0, 100] = 65535
    cv2.imwrite(str(tmp_path / "d.png"), depth)
    world = DepthMap({"1.color.png": replace(frames["1.color.png"], depth=tmp_path / "d.png")}, 5000)
    pixels = np.array([[20.0, 50], [79.2, 50], [80.2, 50], [100, 0], [130.5, 70.5]])
    lifted = world.lift("1.color.png", pixels, np.ones(5))
    assert lifted.rows.tolist() == [2, 4]
    local = lifted.xyz @ frames["1.color.png"].T[:3, :3].T + frames["1.color.png"].T[:3, 3]
    np.testing.assert_allclose(local[1, :2] / local[1, 2], CAMERA.normalise(pixels[4:])[0], atol=1e-4)
    assert abs(local[1, 2] * 5000 - depth[70:72, 130:132].mean()) < 2


def test_between_two_surfaces_the_nearer_pixel_counts(sequence: Path, tmp_path: Path) -> None:
    frame = next(iter(read_sequence(sequence)))
    depth = np.full((HEIGHT, WIDTH), 10000, np.uint16)
    depth[:, 80:] = 20000
    cv2.imwrite(str(tmp_path / "d.png"), depth)
    world = DepthMap({"a": replace(frame, depth=tmp_path / "d.png", T=np.eye(4))}, 5000)
    xyz = world.lift("a", np.array([[79.4, 50.0], [79.6, 50]]), np.ones(2)).xyz
    np.testing.assert_allclose(xyz[:, 2], [2, 4])


# ---- InLoc and Aachen


def write_inloc(root: Path, scene: Scene) -> list[str]:
    """Cutouts with scans in a frame of their own, as MATLAB 7.3 files; the query is view 2."""
    turn = np.eye(4)
    turn[:3, :3], turn[:3, 3] = cv2.Rodrigues(np.array([0.1, -0.2, 0.5]))[0], [3, -1, 2]
    transformations = root / "database" / "alignments" / "DUC1" / "transformations"
    cutouts = root / "database" / "cutouts" / "DUC1" / "007"
    for folder in (transformations, cutouts, root / "query" / "iphone7"):
        folder.mkdir(parents=True)
    rows = [" ".join(map(repr, row)) for row in turn.tolist()]
    text = ["head", "first", *["1 0 0 0"] * 4, "after", *rows]
    (transformations / "DUC_trans_007.txt").write_text("\n".join(text))
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    rays = np.stack([x, y, np.ones_like(x)], -1) @ np.linalg.inv(K).T
    names = []
    for n in (1, 3):
        names.append(f"database/cutouts/DUC1/007/DUC_cutout_007_{n}_0.png")
        cv2.imwrite(str(root / names[-1]), cv2.imread(str(scene.root / "images" / scene.names[n])))
        world = (rays * scene.depth[n][..., None] - scene.T[n, :3, 3]) @ scene.T[n, :3, :3]
        scan = (world - turn[:3, 3]) @ turn[:3, :3]
        scan[:5] = np.nan
        with h5py.File(root / f"{names[-1]}.mat", "w") as file:
            file["XYZcut"] = scan.T
    cv2.imwrite(
        str(root / "query/iphone7/IMG_1.png"), cv2.imread(str(scene.root / "images" / scene.names[2]))
    )
    lines = [f"query/iphone7/IMG_1.png {name}\n" for name in names]
    (root / "pairs-query-netvlad40.txt").write_text("".join(lines))
    return names


def matlab(name: str, array: np.ndarray, compress: bool) -> bytes:
    """A MATLAB 5 file, after the published description of the format."""

    def element(kind: int, data: bytes) -> bytes:
        return struct.pack("<II", kind, len(data)) + data + bytes(-len(data) % 8)

    flags = element(6, struct.pack("<II", 6, 0))
    shape = element(5, struct.pack(f"<{array.ndim}i", *array.shape))
    label = struct.pack("<HH", 1, len(name)) + name.encode().ljust(4, b"\0")  # small: data in the tag
    if len(name) > 4:
        label = element(1, name.encode())
    matrix = element(14, flags + shape + label + element(9, array.astype("<f8").tobytes("F")))
    if compress:
        packed = zlib.compress(matrix)
        matrix = struct.pack("<II", 15, len(packed)) + packed
    return b"MATLAB 5.0 MAT-file".ljust(124) + struct.pack("<H", 0x0100) + b"IM" + matrix


@pytest.mark.parametrize("compress", [False, True])
def test_scans_of_older_matlab_files(tmp_path: Path, compress: bool) -> None:
    scan = np.random.default_rng(0).random((4, 5, 3))
    scan[1, 2] = np.nan
    other = matlab("RGB", np.ones((2, 2)), compress)
    (tmp_path / "a.mat").write_bytes(other + matlab("XYZcut", scan, compress)[128:])
    np.testing.assert_array_equal(read_scan(tmp_path / "a.mat"), scan)
    (tmp_path / "b.mat").write_bytes(other)
    with pytest.raises(UserError, match="no array XYZcut"):
        read_scan(tmp_path / "b.mat")
    for damage in (b"", b"x" * 300, matlab("XYZcut", scan, compress)[:200]):
        (tmp_path / "c.mat").write_bytes(damage)
        with pytest.raises(UserError, match="c.mat: no scan can be read from it"):
            read_scan(tmp_path / "c.mat")


def test_scans_lift_pixels(scene: Scene, tmp_path: Path) -> None:
    names = write_inloc(tmp_path, scene)
    world = ScanMap(tmp_path, names)
    found = [(name, true_matches(scene, 2, n)) for name, n in zip(names, (1, 3), strict=True)]
    result = localize(Query("q", Path(), CAMERA), found, world, threshold=2.0)
    assert errors(result.T, scene.T[2])[0] < 0.003
    assert 2 not in world.lift(names[0], np.array([[50.0, 60], [50, 20], [50, 2]]), np.ones(3)).rows


def test_inloc_writes_poses_to_hand_in(scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_inloc(tmp_path / "data", scene)
    # The benchmark's focal length is that of its phone; the scene's camera has another.
    monkeypatch.setattr("prism_match.evaluation.visloc.INLOC_FOCAL", K[0, 0] / WIDTH)
    o = Options(data=tmp_path / "data", method="sift", threshold=2.0, size=320, run=Run(out=tmp_path / "out"))
    report = BENCHMARKS["inloc"](o)
    poses = read_poses(tmp_path / "out" / "inloc_poses.txt")
    assert list(poses) == ["IMG_1.png"] and errors(poses["IMG_1.png"], scene.T[2])[0] < 0.1
    assert report.summary["queries"] == 1 and "53.0/77.8/87.9" in str(report)


def write_aachen(root: Path, scene: Scene) -> None:
    images = root / "images" / "images_upright"
    (images / "query" / "day").mkdir(parents=True)
    (images / "db").mkdir()
    (root / "queries").mkdir()
    model = root / "3D-models" / "aachen_v_1_1"
    model.mkdir(parents=True)
    for name in scene.names:
        folder = "query/day" if name == scene.names[2] else "db"
        cv2.imwrite(str(images / folder / name), cv2.imread(str(scene.root / "images" / name)))
    for file in (scene.root / "sparse").iterdir():
        text = file.read_text()
        lines = text.splitlines()
        if file.name == "images.txt":
            drop = next(n for n, line in enumerate(lines) if line.endswith(scene.names[2]))
            del lines[drop : drop + 2]
            text = "\n".join(lines).replace(" view", " db/view") + "\n"
        (model / file.name).write_text(text)
    camera = "PINHOLE " + " ".join(map(str, [WIDTH, HEIGHT, *CAMERA.params]))
    (root / "queries" / "day_time_queries_with_intrinsics.txt").write_text(
        f"query/day/{scene.names[2]} {camera}\nquery/day/nothing.png {camera}\n"
    )
    lines = [
        f"query/day/{q} db/{scene.names[n]}\n" for q in (scene.names[2], "nothing.png") for n in (3, 1, 4)
    ]
    (root / "pairs-query-netvlad50.txt").write_text("".join(lines))


def test_aachen_writes_poses_to_hand_in(scene: Scene, tmp_path: Path) -> None:
    write_aachen(tmp_path / "data", scene)
    o = Options(data=tmp_path / "data", method="sift", threshold=2.0, size=320, run=Run(out=tmp_path / "out"))
    report = BENCHMARKS["aachen"](o)
    poses = read_poses(tmp_path / "out" / "aachen_poses.txt")
    assert errors(poses[scene.names[2]], scene.T[2])[0] < 0.1
    assert "nothing.png: no such file" in report.summary["failed"]["query/day/nothing.png"]
    np.testing.assert_allclose(poses["nothing.png"], scene.T[3], atol=1e-6)  # the first of its list


@pytest.mark.parametrize("name", ["aachen", "inloc"])
def test_benchmarks_without_their_data_say_so(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no \*_with_intrinsics|0 lists pairs-query"):
        BENCHMARKS[name](Options(data=tmp_path, run=Run(out=tmp_path / "out")))


# ---- evaluation


def known_pairs(scene: Scene, path: Path, rename: str = "{}") -> Path:
    """Each view with its two neighbours, so that no retrieval is needed."""
    names = [rename.format(n) for n in scene.names]
    lines = [f"{names[a]} {names[b]}\n" for a in range(6) for b in (a - 1, a + 1) if 0 <= b < 6]
    path.write_text("".join(lines))
    return path


def test_the_three_layouts_are_scored(scene: Scene, sequence: Path, tmp_path: Path) -> None:
    calibrated = tmp_path / "calibrated"
    calibrated.mkdir()
    (calibrated / "images").symlink_to(scene.root / "images")
    lens = [K[0, 0], K[1, 1], K[0, 2], K[1, 2]]
    rows = [[*lens, *T[:3, :3].ravel(), *T[:3, 3]] for T in scene.T]
    lines = [f"{n} {' '.join(f'{x:.12g}' for x in row)}\n" for n, row in zip(scene.names, rows, strict=True)]
    (calibrated / "cameras.txt").write_text("".join(lines))
    pairs = known_pairs(scene, tmp_path / "pairs.txt")
    for data in (calibrated, scene.root):
        o = Options(data=data, method="sift", size=320, pair_list=pairs, top=2, within=((0.1, 2.0),))
        summary = BENCHMARKS["localization"](o).summary
        assert summary["queries"] == 6 and summary["median_m"] < 0.05, (data, summary)
        assert summary["within"]["0.1 m, 2 deg"] >= 60
    lines = pairs.read_text().replace("view", "").replace(".png", ".color.png")
    (tmp_path / "rgbd.txt").write_text(lines)
    o = Options(
        data=sequence, method="sift", size=320, pair_list=tmp_path / "rgbd.txt", depth_scale=5000.0, pairs=4
    )
    report = BENCHMARKS["localization"](o)
    assert report.summary["queries"] == 4 and report.summary["median_m"] < 0.05
    assert "median deg" in str(report)


@pytest.mark.parametrize("change, reason", [
    ({"ransac": "usac"}, "back ends opencv and poselib"),
    ({"threshold": -1.0}, "threshold must be positive"),
    ({"top": 0}, "at least 1"),
    ({"data": Path("/nowhere")}, "no cameras.txt, RGB-D sequence or COLMAP model"),
    ({"depth_scale": 0.0}, "scale of depth must be positive"),
    ({"threshold": float("nan")}, "threshold must be positive"),
    ({"depth_scale": float("nan")}, "scale of depth must be positive"),
    ({"pair_list": Path("/nowhere")}, "/nowhere: cannot be read"),
])  # fmt: skip
def test_what_cannot_be_measured_is_told(sequence: Path, change: dict, reason: str) -> None:
    o = replace(Options(data=sequence, method="sift", size=320), **change)
    with pytest.raises(UserError, match=reason):
        BENCHMARKS["localization"](o)


def test_limits_are_parsed() -> None:
    assert parse_limits("0.25,2") == (0.25, 2.0)
    for text in ("0.25", "a,b", "1,2,3", "nan,2", "0.25,-2"):
        with pytest.raises(UserError, match="--within is METRES,DEGREES"):
            parse_limits(text)


def test_queries_beside_a_map_are_scored(scene: Scene, tmp_path: Path) -> None:
    for name in ("sparse", "images"):
        (tmp_path / name).symlink_to(scene.root / name)
    camera = "PINHOLE " + " ".join(map(str, [WIDTH, HEIGHT, *CAMERA.params]))
    (tmp_path / "queries.txt").write_text(f"{scene.names[2]} {camera}\n")
    write_poses(tmp_path / "poses.txt", {scene.names[2]: scene.T[2]})
    o = Options(data=tmp_path, method="sift", size=320, pair_list=known_pairs(scene, tmp_path / "pairs"))
    summary = BENCHMARKS["localization"](o).summary
    assert summary["queries"] == 1 and summary["median_m"] < 0.05


def test_a_triangulated_map_is_where_the_scene_is(scene: Scene) -> None:
    cameras = [(name, CAMERA, T) for name, T in zip(scene.names, scene.T, strict=True)]
    matches = {}
    rng = np.random.default_rng(0)
    for b in (1, 2, 3):
        m = true_matches(scene, 0, b)
        wrong = rng.random(len(m)) < 0.1
        points1 = m.keypoints1 + wrong[:, None] * rng.uniform(10, 30, (len(m), 2))
        matches[scene.names[0], scene.names[b]] = m.keypoints0, points1
    model = triangulate_map(cameras, matches, Path())
    assert len(model.points) > 200
    first = model.views[0]
    x, y = np.rint(first.pixels).astype(int).T
    depth = first.depth_of(model.points[first.points])
    assert np.quantile(np.abs(depth / scene.depth[0][y, x] - 1), 0.95) < 0.01
    assert [len(v.points) for v in model.views[4:]] == [0, 0]
    empty = triangulate_map(cameras, {}, Path())
    assert empty.points.shape == (0, 3)


class Interrupted(Sift):
    """Stops after some pairs, as a killed run does."""

    def __init__(self, after: int | None):
        super().__init__()
        self.after, self.matched = after, 0

    def match(self, pairs: list) -> list[Matches]:
        if self.matched == self.after:
            raise KeyboardInterrupt
        self.matched += len(pairs)
        return super().match(pairs)


def matched_queries(jobs: dict, method: Sift, longer: int, store: Path) -> list[MatchedQuery]:
    engine = Engine(method, Resize(longer=longer))
    with MatchStore(store, engine.settings) as opened:
        return list(match_queries(jobs, engine, opened))


def test_a_run_that_was_killed_goes_on(scene: Scene, tmp_path: Path) -> None:
    images = {name: scene.root / "images" / name for name in scene.names}
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    jobs = {q: (images[q], {r: images[r] for r in scene.names if r != q}) for q in scene.names[:2]}
    jobs["broken"] = broken, {scene.names[0]: images[scene.names[0]]}
    jobs["alone"] = images[scene.names[0]], {}

    def run(method: Sift, cache: Path) -> dict[str, object]:
        return {m.query: (m.found, m.problems) for m in matched_queries(jobs, method, 320, cache)}

    whole = run(Interrupted(None), tmp_path / "one.h5")
    with pytest.raises(KeyboardInterrupt):
        run(Interrupted(7), tmp_path / "two.h5")
    again = Interrupted(None)
    resumed = run(again, tmp_path / "two.h5")
    assert again.matched == 3
    assert set(whole) == set(resumed) == {*scene.names[:2], "broken", "alone"}
    assert "broken.png" in resumed["broken"][1][0] and resumed["alone"] == ([], [])
    for query in scene.names[:2]:
        for (name, a), (other, b) in zip(whole[query][0], resumed[query][0], strict=True):
            assert name == other
            np.testing.assert_array_equal(a.keypoints1, b.keypoints1)


def test_a_photo_is_not_retrieved_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever way leads to it."""
    monkeypatch.chdir(tmp_path)
    rows = np.eye(4, dtype=np.float32)[:3] + 0.1
    by_name = dict(zip("abc", rows, strict=True))
    monkeypatch.setattr(
        "prism_match.maps.queries.describe_files",
        lambda matcher, files, *_: ({path: by_name[path.name] for path in files}, {}),
    )
    photos = {name: tmp_path / name for name in "abc"}
    ranked, _ = retrieve({"q": Path("a")}, photos, None, 2)
    assert sorted(ranked["q"]) == ["b", "c"]


def test_another_photo_under_an_old_name_is_matched_again(scene: Scene, tmp_path: Path) -> None:
    query, photo = tmp_path / "query.png", scene.root / "images" / scene.names[0]
    counts = []
    for n in (1, 1, 3):
        query.write_bytes((scene.root / "images" / scene.names[n]).read_bytes())
        method = Interrupted(None)
        matched_queries({"q": (query, {"r": photo})}, method, 160, tmp_path / "c.h5")
        counts.append(method.matched)
    assert counts == [1, 0, 1]


# ---- files


def test_poses_there_and_back(scene: Scene, tmp_path: Path) -> None:
    poses = dict(zip(scene.names, scene.T, strict=True))
    write_poses(tmp_path / "poses.txt", poses)
    for name, T in read_poses(tmp_path / "poses.txt").items():
        np.testing.assert_allclose(T, poses[name], atol=1e-9)
    name, *numbers = (tmp_path / "poses.txt").read_text().splitlines()[0].split()
    assert name == scene.names[0]
    np.testing.assert_allclose([float(x) for x in numbers[:4]], quaternion(scene.T[0, :3, :3]), atol=1e-9)


def test_poses_of_photos_whose_names_have_spaces(tmp_path: Path) -> None:
    write_poses(tmp_path / "poses.txt", {"IMG 2024 1.jpg": np.eye(4)})
    assert list(read_poses(tmp_path / "poses.txt")) == ["IMG 2024 1.jpg"]


@pytest.mark.parametrize("text, reason", [
    ("a.jpg 1 0 0 0 1 2", "line 1: expected name"), ("a.jpg 1 0 0 0 1 2 x", "line 1"),
    ("a.jpg 0 0 0 0 1 2 3", "line 1"),
])  # fmt: skip
def test_bad_poses_give_one_line(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "poses.txt").write_text(text)
    with pytest.raises(UserError, match=reason):
        read_poses(tmp_path / "poses.txt")


def test_lists_of_pairs(tmp_path: Path) -> None:
    path = tmp_path / "pairs.txt"
    path.write_text("q/1.jpg db/2.jpg\nq/2.jpg db/1.jpg\nq/1.jpg db/1.jpg\n")
    assert read_retrieval(path) == {"q/1.jpg": ["db/2.jpg", "db/1.jpg"], "q/2.jpg": ["db/1.jpg"]}
    path.write_text("q/1.jpg db/2.jpg 0.5\n")
    with pytest.raises(UserError, match="line 1: 3 words"):
        read_retrieval(path)


# ---- the command


def invoke(*arguments: object):  # noqa: ANN201
    app = typer.Typer()
    app.command()(localize_command)
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_the_command_from_photos_to_poses(scene: Scene, sequence: Path, tmp_path: Path) -> None:
    """With the shipped weights and retrieval; one query cannot be read, one shows something else."""
    queries = tmp_path / "queries"
    queries.mkdir()
    photo = cv2.imread(str(scene.root / "images" / scene.names[2]))
    cv2.imwrite(str(queries / "good.png"), photo)
    cv2.imwrite(str(queries / "noise.png"), np.random.default_rng(0).integers(0, 255, photo.shape, np.uint8))
    (queries / "broken.jpg").write_bytes(b"nothing")
    for n, arguments in enumerate((
        ["--map", scene.root, "--images", scene.root / "images"],
        ["--map", sequence, "--depth-scale", 5000],
    )):  # fmt: skip
        out = tmp_path / str(n)
        call = [*arguments, "--queries", queries, "-o", out, "--top", 2, "--max-error", 4]
        result = invoke(*call, "--json", tmp_path / "r.json")
        assert result.exit_code == 0, result.output
        poses = read_poses(out / "poses.txt")
        assert list(poses) == ["good.png"]
        shift, turn = errors(poses["good.png"], scene.T[2])
        assert shift < 0.1 and turn < 2
        report = json.loads((tmp_path / "r.json").read_text())
        assert report["localized"] == 1 and set(report["failed"]) == {"broken.jpg", "noise.png"}
        assert "broken.jpg" in report["failed"]["broken.jpg"]
        good = next(r for r in report["results"] if r["name"] == "good.png")
        assert good["inliers"] >= 12 and good["camera"]["from"] == "the map"
    before = (out / "poses.txt").read_text()
    assert invoke(*call, "--fallback").exit_code == 0  # goes on with the matches that are there
    lines = (out / "poses.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["good.png", "noise.png"]
    assert lines[0] + "\n" == before


def test_photos_are_polished_at_their_own_size(photo: np.ndarray, tmp_path: Path) -> None:
    """What is localized with is what the matcher finds in the photos, not in smaller copies of them."""
    sure = PRESETS["tiny"].replace(theta_c=0.0, temperature=0.02, weighted_softmax=False)
    matcher = Matcher(device="cpu", rescale="never", size=160, config=sure, rotate="never")
    images = {name: tmp_path / f"{name}.png" for name in ("query", "photo")}
    cv2.imwrite(str(images["query"]), photo[:400, :480])
    cv2.imwrite(str(images["photo"]), photo[:400, 24:504])
    view = PosedView("photo", pinhole(np.diag([400.0, 400, 1]), 480, 400), np.eye(4), np.zeros((0, 2)),
                     np.zeros(0, np.int64))  # fmt: skip
    images["photo"].rename(tmp_path / "photo")
    world = SfmMap(Model(tmp_path, (view,), np.zeros((0, 3))), tmp_path)
    options = LocalizeOptions(size=160)
    localize_photos(
        {"query": images["query"]}, world, matcher, tmp_path, options, listed={"query": ["photo"]}
    )
    found = MatchStore(tmp_path / "matches.h5")["queries/query", "map/photo"]
    expected = matcher.match(images["query"], tmp_path / "photo")
    assert len(expected) > 5
    np.testing.assert_array_equal(found.keypoints1, expected.keypoints1)
    small = [cv2.resize(cv2.imread(str(p), 0), (160, 133), interpolation=cv2.INTER_AREA)
             for p in (images["query"], tmp_path / "photo")]  # fmt: skip
    assert not np.array_equal(found.keypoints1, 3 * matcher.match(*small).keypoints1)


def test_what_is_found_does_not_go_into_the_folder_of_a_map(scene: Scene, tmp_path: Path) -> None:
    """It would get in the way of the matches that the map was made of."""
    (tmp_path / "stages.json").write_text("{}")
    call = ("--map", scene.root, "--queries", scene.root / "images" / scene.names[2], "-o", tmp_path)
    result = invoke(*call, "--size", 64, "--device", "cpu")
    assert "has a map in it; give another folder" in str(result.exception)


def test_two_runs_do_not_share_a_folder(scene: Scene, tmp_path: Path) -> None:
    with lock_folder(tmp_path):
        call = ("--map", scene.root, "--queries", scene.root / "images" / scene.names[2], "-o", tmp_path)
        result = invoke(*call, "--size", 64, "--device", "cpu")
    assert isinstance(result.exception, UserError) and "is in use by another run" in str(result.exception)


def test_intrinsics_that_are_given_are_used(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = tmp_path / "q"
    queries.mkdir()
    cv2.imwrite(str(queries / "a.png"), cv2.imread(str(scene.root / "images" / scene.names[2])))
    (tmp_path / "cameras.txt").write_text("a.png SIMPLE_RADIAL 160 120 149 80 60 0.01\n")
    (tmp_path / "pairs.txt").write_text(f"a.png {scene.names[1]}\na.png {scene.names[3]}\n")
    monkeypatch.setattr("prism_match.cli.localize.make_matcher", lambda *_, **__: None)
    monkeypatch.setattr("prism_match.maps.queries.Prism", lambda *_: Sift())
    result = invoke(
        "--map", scene.root, "--queries", queries, "--intrinsics", tmp_path / "cameras.txt",
        "--pair-list", tmp_path / "pairs.txt", "-o", tmp_path / "out", "--min-inliers", 4,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out" / "localization.json").read_text())["results"][0]
    assert found["camera"]["model"] == "SIMPLE_RADIAL" and found["camera"]["from"] == "the intrinsics given"
    assert list(found["references"]) == [scene.names[1], scene.names[3]]
    result = invoke(
        "--map", scene.root, "--queries", queries, "--intrinsics", "149,151,79.5,59.5",
        "--pair-list", tmp_path / "pairs.txt", "-o", tmp_path / "out", "--min-inliers", 4,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out" / "localization.json").read_text())["results"][0]
    assert found["camera"]["params"] == [149, 151, 80, 60]  # COLMAP's pixels


@pytest.mark.parametrize("change, reason", [
    ({"--map": "nowhere"}, "nowhere: no such folder"),
    ({"--map": "."}, "neither a COLMAP model"),
    ({"--queries": "nowhere.jpg"}, "nowhere.jpg: no such file or folder"),
    ({"--queries": "empty"}, "no photos in this folder"),
    ({"--images": "nowhere"}, "nowhere: no such folder"),
    ({"--top": "0"}, "--top must be at least 1"),
    ({"--batch": "0"}, "--batch must be at least 1"),
    ({"--max-error": "-1"}, "--max-error must be positive"),
    ({"--seed": "-1"}, "seed must be a whole number of at least 0"),
    ({"--snap": "0"}, "snapping must be positive"),
    ({"--intrinsics": "bad.txt"}, "bad.txt, line 1"),
    ({"--intrinsics": "1,2,3"}, "neither a file of cameras nor fx,fy,cx,cy (3 numbers instead of 4)"),
    ({"--intrinsics": "others.txt"}, "1 queries are not in it"),
    ({"--pair-list": "others.txt"}, "words, expected a query and a map photo"),
    ({"--pair-list": "pairs.txt"}, "none of the queries is in it"),
])  # fmt: skip
def test_bad_calls_give_one_line(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.txt").write_text("a.png NOTHING 1 2 3\n")
    (tmp_path / "others.txt").write_text("b.png SIMPLE_PINHOLE 160 120 150 80 60\n")
    (tmp_path / "pairs.txt").write_text("b.png view1.png\n")
    call = {"--map": scene.root, "--queries": scene.root / "images" / scene.names[2], "-o": "out"} | change
    result = invoke(*(x for pair in call.items() for x in pair))
    assert isinstance(result.exception, UserError), result.output
    assert reason in str(result.exception) and "\n" not in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_the_pose_of_the_most_similar_photo_stands_in(scene: Scene) -> None:
    world = SfmMap(read_model(scene.root), scene.root / "images")
    empty = true_matches(scene, 2, 3).filter(top=0)
    failed = localize(Query("q", Path(), CAMERA), [(scene.names[3], empty)], world)
    assert failed.T is None and failed.problem == "0 points of the map found"
    stand_in = with_fallback(failed, world, [scene.names[3], scene.names[1]])
    np.testing.assert_array_equal(stand_in.T, world.pose(scene.names[3]))
    assert stand_in.problem == failed.problem


# ---- real data


def test_sift_in_a_real_kitchen(tmp_path: Path) -> None:
    frames = [f"frame-{n:06d}.color.jpg" for n in (0, 20, 40)]
    (tmp_path / "pairs.txt").write_text("".join(f"{a} {b}\n" for a in frames for b in frames if a != b))
    o = Options(
        data=needs_shared("eval/rgbd_kitchen"), method="sift", size=480, pair_list=tmp_path / "pairs.txt"
    )
    queries = {x["name"]: x for x in BENCHMARKS["localization"](o).summary["per_query"]}
    for name in frames:
        assert queries[name]["m"] < 0.1 and queries[name]["deg"] < 3
    assert queries["frame-000060.color.jpg"]["problem"] == "0 points of the map found"
