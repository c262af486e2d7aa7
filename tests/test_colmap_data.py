"""COLMAP models in both formats, and pairs drawn from them."""

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from synthetic_scene import HEIGHT, WIDTH, K, Scene, make_scene_with_depth

from prism_match.errors import UserError
from prism_match.frames import read_depth, write_depth
from prism_match.training.data.colmap import Collection, ColmapPairs, depth_path, read_model
from prism_match.training.data.posed import scale_intrinsics, spread_weights
from prism_match.training.pairs import PairBatch, cell_centres
from prism_match.training.supervision import coarse_ground_truth

LANDMARKS = Path(__file__).resolve().parents[2] / "shared" / "train" / "landmarks"


@pytest.fixture(scope="module")
def scene(tmp_path_factory) -> Scene:
    return make_scene_with_depth(tmp_path_factory.mktemp("scene"))


def collection(scene: Scene) -> Collection:
    return Collection(scene.root, scene.root / "images", scene.root / "depth")


@pytest.fixture(scope="module")
def pairs(scene) -> ColmapPairs:
    return ColmapPairs([collection(scene)], photometric=False)


def to_binary(text: Path, out: Path) -> None:
    """Rewrites the synthetic text model in COLMAP's binary format."""
    out.mkdir()
    words = [line.split() for line in (text / "cameras.txt").read_text().splitlines() if line[0] != "#"]
    data = struct.pack("<Q", len(words))
    for number, _, w, h, *params in words:
        data += struct.pack("<iiQQ4d", int(number), 1, int(w), int(h), *map(float, params))
    (out / "cameras.bin").write_bytes(data)
    lines = [line.split() for line in (text / "images.txt").read_text().splitlines() if line[0] != "#"]
    data = struct.pack("<Q", len(lines) // 2)
    for head, seen in zip(lines[::2], lines[1::2], strict=True):
        data += struct.pack("<i7di", int(head[0]), *map(float, head[1:8]), int(head[8]))
        data += head[9].encode() + b"\0" + struct.pack("<Q", len(seen) // 3)
        for x, y, i in zip(seen[::3], seen[1::3], seen[2::3], strict=True):
            data += struct.pack("<ddq", float(x), float(y), int(i))
    (out / "images.bin").write_bytes(data)
    lines = [line.split() for line in (text / "points3D.txt").read_text().splitlines()]
    data = struct.pack("<Q", len(lines))
    for number, x, y, z, r, g, b, error, *track in lines:
        data += struct.pack("<Q3d3BdQ", int(number), float(x), float(y), float(z),
                            int(r), int(g), int(b), float(error), len(track) // 2)  # fmt: skip
        data += struct.pack(f"<{len(track)}i", *map(int, track))
    (out / "points3D.bin").write_bytes(data)


# ---- the reader


def test_text_model_has_our_pixel_convention(scene):
    model = read_model(scene.root)
    assert [v.name for v in model.views] == scene.names
    for view, T in zip(model.views, scene.T, strict=True):
        np.testing.assert_allclose(view.K, K)
        np.testing.assert_allclose(view.T, T, atol=1e-9)
        xyz = model.points[view.points]
        p = (xyz @ T[:3, :3].T + T[:3, 3]) @ K.T
        np.testing.assert_allclose(p[:, :2] / p[:, 2:], view.pixels, atol=1e-3)
        np.testing.assert_allclose(view.depth_of(xyz), p[:, 2])


def test_binary_model_equals_text_model(scene, tmp_path):
    to_binary(scene.root / "sparse", tmp_path / "sparse")
    text, binary = read_model(scene.root), read_model(tmp_path)
    np.testing.assert_allclose(text.points, binary.points)
    for a, b in zip(text.views, binary.views, strict=True):
        assert (a.name, a.width, a.height) == (b.name, b.width, b.height)
        for field in ("K", "T", "pixels", "points"):
            np.testing.assert_allclose(getattr(a, field), getattr(b, field))


def test_shared_points_agree_with_sets(scene):
    model = read_model(scene.root)
    sets = [set(v.points.tolist()) for v in model.views]
    for i in range(len(sets)):
        expected = [len(sets[i] & s) if i != j else 0 for j, s in enumerate(sets)]
        assert model.shared_counts(i).tolist() == expected
    ids, a, b = model.shared(0, 1)
    assert set(ids.tolist()) == sets[0] & sets[1]
    assert (model.views[0].points[a] == ids).all() and (model.views[1].points[b] == ids).all()


def rewritten(scene, tmp_path, file, change) -> Path:
    folder = tmp_path / "sparse"
    folder.mkdir()
    for path in (scene.root / "sparse").iterdir():
        text = path.read_text()
        (folder / path.name).write_text(change(text) if path.name == file else text)
    return tmp_path


@pytest.mark.parametrize("file, change, reason", [
    ("cameras.txt", lambda t: t.replace("150.0", "abc"), "cameras.txt: damaged"),
    ("cameras.txt", lambda t: t.replace("PINHOLE", "FISHEYE"), "camera model FISHEYE is not supported"),
    ("cameras.txt", lambda t: t.replace("PINHOLE", "RADIAL"), "needs 5 finite parameters"),
    ("cameras.txt", lambda t: t.replace("1 PINHOLE", "7 PINHOLE"), "image view0.png has camera 1"),
    ("images.txt", lambda t: t.replace(" 1 view1.png", ""), "images.txt: damaged"),
    ("images.txt", lambda t: "# nothing\n", "images.txt: no images"),
    ("points3D.txt", lambda t: "1 2\n", "points3D.txt: damaged"),
])  # fmt: skip
def test_damaged_text_gives_one_line_naming_the_file(scene, tmp_path, file, change, reason):
    with pytest.raises(ValueError, match=reason) as e:
        read_model(rewritten(scene, tmp_path, file, change))
    assert str(tmp_path) in str(e.value) and "\n" not in str(e.value)


def test_truncated_binary_and_missing_files(scene, tmp_path):
    to_binary(scene.root / "sparse", tmp_path / "sparse")
    images = tmp_path / "sparse" / "images.bin"
    images.write_bytes(images.read_bytes()[:-100])
    with pytest.raises(ValueError, match="images.bin: damaged"):
        read_model(tmp_path)
    (tmp_path / "sparse" / "points3D.bin").unlink()
    with pytest.raises(ValueError, match="points3D.bin: missing"):
        read_model(tmp_path)
    with pytest.raises(ValueError, match="no COLMAP model"):
        read_model(tmp_path / "nowhere")


@pytest.mark.parametrize("model, params", [
    ("SIMPLE_PINHOLE", "150 80 60"),
    ("SIMPLE_RADIAL", "150 80 60 0"),
    ("RADIAL", "150 80 60 0 0"),
    ("OPENCV", "150 150 80 60 0 0 0 0"),
])  # fmt: skip
def test_cameras_without_distortion_are_pinholes(scene, tmp_path, model, params):
    line = f"1 {model} {WIDTH} {HEIGHT} {params}\n"
    root = rewritten(scene, tmp_path, "cameras.txt", lambda t: line)
    np.testing.assert_allclose(read_model(root).views[0].K, K)
    if model.endswith("RADIAL"):
        (tmp_path / "sparse" / "cameras.txt").write_text(line.replace(" 0", " 0.1", 1))
        with pytest.raises(ValueError, match="undistort"):
            read_model(root)


def test_resizing_intrinsics_keeps_rays():
    small = scale_intrinsics(K, 0.5, 0.25)
    pixel = np.array([10.0, 20.0])
    resized = (pixel + 0.5) * [0.5, 0.25] - 0.5
    a, b = (np.linalg.inv(k) @ [*p, 1] for k, p in ((K, pixel), (small, resized)))
    np.testing.assert_allclose(a, b)


# ---- pairs


def sampled_at(image: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """b n: image b 1 s s at points b n 2."""
    grid = (points + 0.5) * 2 / image.shape[-1] - 1
    return F.grid_sample(image, grid[:, None], align_corners=False)[:, 0, 0]


def check_batch(batch: PairBatch, size: int) -> None:
    b, c = len(batch), size // 8
    assert batch.image0.shape == batch.image1.shape == (b, 1, size, size)
    assert batch.warp0.shape == batch.warp1.shape == (b, c, c, 2)
    assert batch.warp0.dtype == torch.float32 and batch.warp0.isfinite().all()
    for t in (batch.visible0, batch.visible1, batch.unknown0, batch.unknown1):
        assert t.shape == (b, c, c) and t.dtype == torch.bool
    assert batch.mask0 is None and batch.mask1 is None
    assert not (batch.visible0 & batch.unknown0).any() and not (batch.visible1 & batch.unknown1).any()
    assert batch.image0.min() >= 0 and batch.image0.max() <= 1
    assert len(batch.names) == b and batch.rough.tolist() == [True] * b


def test_warps_are_consistent_there_and_back(pairs):
    size = 96
    batch = pairs.sample(16, size, torch.Generator().manual_seed(0))
    check_batch(batch, size)
    centres = cell_centres(size, size).flatten(0, 1).expand(16, -1, -1)
    visible = batch.visible0.flatten(1)
    landed = batch.warp0.flatten(1, 2)
    # Interpolate the warp back at where a point landed, where all of its neighbours are visible.
    back = (batch.warp1 - cell_centres(size, size)).permute(0, 3, 1, 2)
    grid = ((landed - 3.5) / 8 + 0.5) * 2 / (size // 8) - 1
    shift = F.grid_sample(back, grid[:, None], align_corners=False)[:, :, 0].transpose(1, 2)
    sure = F.grid_sample(batch.visible1[:, None].float(), grid[:, None], align_corners=False)[:, 0, 0] > 0.999
    error = (landed + shift - centres).norm(dim=-1)[visible & sure]
    assert len(error) > 200 and error.median() < 0.1 and error.quantile(0.9) < 1.0


def test_images_agree_with_the_warp(pairs):
    size = 96
    batch = pairs.sample(16, size, torch.Generator().manual_seed(1))
    centres = cell_centres(size, size).flatten(0, 1).expand(16, -1, -1)
    a, b = sampled_at(batch.image0, centres), sampled_at(batch.image1, batch.warp0.flatten(1, 2))
    visible = batch.visible0.flatten(1)
    rich = [k for k in range(16) if visible[k].sum() > 20]
    scores = [np.corrcoef(a[k, visible[k]].numpy(), b[k, visible[k]].numpy())[0, 1] for k in rich]
    assert len(scores) > 8 and np.median(scores) > 0.95
    assert coarse_ground_truth(batch).matchable0.any(1).float().mean() > 0.9


def test_outside_is_known_to_be_outside(pairs):
    batch = pairs.sample(32, 64, torch.Generator().manual_seed(2))
    x = batch.warp0[batch.visible0]
    assert (x >= -0.5).all() and (x <= 63.5).all()
    outside = ~batch.unknown0 & ~batch.visible0
    assert outside.any()


def test_the_same_seed_gives_the_same_pairs(scene, pairs):
    again = ColmapPairs([collection(scene)], photometric=False)
    a, b = (s.sample(4, 64, torch.Generator().manual_seed(3)) for s in (pairs, again))
    assert torch.equal(a.image0, b.image0) and torch.equal(a.warp1, b.warp1)


def test_many_collections_are_one_source_and_never_mixed(scene, pairs, tmp_path):
    shutil.copytree(scene.root, tmp_path / "twin")
    twin = tmp_path / "twin"
    both = ColmapPairs(
        [collection(scene), Collection(twin, twin / "images", twin / "depth")], photometric=False
    )
    first, second = both._pairs.unbind(1)
    assert ((first < len(scene.names)) == (second < len(scene.names))).all()
    # Each scene has its own share: equal ones here, whatever the number of pairs.
    assert both._cumulative[len(pairs) - 1].item() == pytest.approx(0.5, abs=1e-5)
    assert len(both) == 2 * len(pairs) and both.name == "collections"
    # The pairs of the second scene are those of the first, with the numbers of its own photos.
    assert torch.equal(both._pairs[len(pairs) :] - len(scene.names), pairs._pairs)
    assert torch.equal(both._mips[0][len(scene.names) :], pairs._mips[0])
    check_batch(both.sample(8, 64, torch.Generator().manual_seed(0)), 64)


def test_bad_collections_give_one_line(scene, tmp_path):
    images = scene.root / "images"
    with pytest.raises(ValueError, match="prism data depth"):
        ColmapPairs([Collection(scene.root, images, tmp_path)])
    with pytest.raises(ValueError, match="images of the model are missing: view0.png"):
        ColmapPairs([Collection(scene.root, tmp_path, tmp_path)])
    for name in scene.names:
        write_depth(depth_path(tmp_path / "empty", name), np.zeros((HEIGHT, WIDTH), np.float32))
    with pytest.raises(ValueError, match="no two images overlap"):
        ColmapPairs([Collection(scene.root, images, tmp_path / "empty")])


def test_depth_of_another_shape_than_its_photo_is_named_and_left_out(scene, tmp_path, caplog):
    depth = tmp_path / "depth"
    shutil.copytree(scene.root / "depth", depth)
    write_depth(depth_path(depth, scene.names[0]), np.ones((40, 40), np.float32))
    half = read_depth(depth_path(depth, scene.names[1]))[::2, ::2]
    write_depth(depth_path(depth, scene.names[1]), half)  # smaller, but of the same shape: good
    source = ColmapPairs([Collection(scene.root, scene.root / "images", depth)])
    assert len(source._size) == len(scene.names) - 1
    assert f"{scene.names[0]}.h5: depth map is 40x40, its image is {WIDTH}x{HEIGHT}" in caplog.text


def test_rare_kinds_of_pairs_weigh_more():
    overlap = torch.tensor([0.8] * 90 + [0.1] * 10)
    weight = spread_weights(overlap, torch.ones(100))
    assert weight.sum().item() == pytest.approx(1)
    assert weight[90:].sum().item() == pytest.approx(1 / 4, abs=0.01)


def test_depth_files_round_trip(tmp_path):
    depth = np.random.default_rng(0).uniform(0.01, 1e5, (30, 40)).astype(np.float32)
    depth[:5] = 0
    write_depth(tmp_path / "sub" / "a.h5", depth)
    np.testing.assert_allclose(read_depth(tmp_path / "sub" / "a.h5"), depth, rtol=3e-4)
    assert [p.name for p in (tmp_path / "sub").iterdir()] == ["a.h5"]
    (tmp_path / "bad.h5").write_bytes(b"no")
    with pytest.raises(ValueError, match="bad.h5"):
        read_depth(tmp_path / "bad.h5")


def test_landmark_models_reproject_well():
    if not LANDMARKS.is_dir():
        pytest.skip(f"{LANDMARKS} is not here")
    for folder in sorted(LANDMARKS.iterdir()):
        model = read_model(folder)
        errors = []
        for view in model.views:
            p = (model.points[view.points] @ view.T[:3, :3].T + view.T[:3, 3]) @ view.K.T
            errors.append(np.linalg.norm(p[:, :2] / p[:, 2:] - view.pixels, axis=1))
        assert np.concatenate(errors).mean() < 1.5


@pytest.mark.parametrize("name", ["../outside.png", "a/../../outside.png", "/etc/outside.png", "C:\\x.png"])
def test_names_stay_in_their_folder(scene, tmp_path, name):
    shutil.copytree(scene.root / "sparse", tmp_path / "sparse")
    images = tmp_path / "sparse" / "images.txt"
    images.write_text(images.read_text().replace("view1.png", name))
    with pytest.raises(UserError, match="leads outside the folder of the images") as error:
        read_model(tmp_path)
    assert "\n" not in str(error.value)


def test_bins_that_weigh_more_are_drawn_more_often(scene):
    source = ColmapPairs([collection(scene)], photometric=False)
    drawn = source.sample(300, 32, torch.Generator().manual_seed(0)).bins
    assert len(source._bin.unique()) > 1 and set(drawn.tolist()) <= set(source._bin.tolist())
    rare = source._bin.unique()[torch.stack([(drawn == k).sum() for k in source._bin.unique()]).argmin()]
    weights = torch.ones(source.bins)
    weights[rare] = 20.0
    place = source._cumulative.data_ptr()  # what is recorded on a GPU reads it there
    source.weigh(weights)
    again = source.sample(300, 32, torch.Generator().manual_seed(0)).bins
    assert (again == rare).sum() > 2 * (drawn == rare).sum() and source._cumulative.data_ptr() == place
