"""MegaDepth's layout: the index built from models, and pairs read through it."""

import logging
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from hostile_files import png_claiming
from synthetic_scene import HEIGHT, WIDTH, K, make_scene

from prism_match.cli.data import preview
from prism_match.errors import UserError
from prism_match.frames import write_depth
from prism_match.maps.colmap import undistort
from prism_match.training.data.megadepth import DEPTHS, MegaDepthPairs, build_index, read_scene_info
from prism_match.training.pairs import cell_centres
from prism_match.training.supervision import coarse_ground_truth

DEV = Path(__file__).resolve().parents[2] / "shared" / "eval" / "megadepth_dev"


def make_root(root: Path) -> Path:
    """Two scenes in the layout of the release."""
    for name in ("0001", "0002"):
        scene = make_scene(root / "Undistorted_SfM" / name)
        for image, depth in zip(scene.names, scene.depth, strict=True):
            write_depth(root / DEPTHS / name / "dense0" / "depths" / Path(image).with_suffix(".h5"), depth)
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return make_root(tmp_path_factory.mktemp("megadepth"))


@pytest.fixture(scope="module")
def index(root) -> list[Path]:
    return build_index(root, root / "index", (0.1, 1.0))


def test_index_has_the_published_layout(root, index):
    assert [p.name for p in index] == ["0001_0.1_1.0.npz", "0002_0.1_1.0.npz"]
    info = np.load(index[0], allow_pickle=True)
    assert set(info.files) == {"image_paths", "depth_paths", "intrinsics", "poses", "pair_infos"}
    (a, b), overlap, central = info["pair_infos"][0]
    assert a != b and 0.1 <= overlap <= 1 and central.shape == (4,)
    assert (root / info["image_paths"][a]).is_file() and (root / info["depth_paths"][b]).is_file()
    np.testing.assert_allclose(info["intrinsics"][a][:2, 2], K[:2, 2] + 0.5)


def test_pairs_are_padded_squares_with_true_warps(root, index):
    source = MegaDepthPairs(root, index, workers=2)
    batch = source.sample(6, 96, torch.Generator().manual_seed(0))
    assert batch.image0.shape == (6, 1, 96, 96) and len(batch.names) == 6
    assert batch.mask0[:, :72].all() and not batch.mask0[:, 72:].any()  # 160 x 120 becomes 96 x 72
    assert batch.unknown0[:, 9:].all() and not batch.unknown0[:, :9].all()
    truth = coarse_ground_truth(batch)
    assert (truth.matchable0.float().mean(1) > 0.05).all()
    assert not (truth.matchable0 | truth.unmatchable0).view(6, 12, 12)[:, 9:].any()
    there = batch.warp0 - cell_centres(96, 96)
    assert there[batch.visible0].abs().max() < 96


def test_the_same_seed_gives_the_same_pairs(root, index):
    a, b = (MegaDepthPairs(root, index).sample(3, 64, torch.Generator().manual_seed(5)) for _ in "ab")
    assert a.names == b.names and torch.equal(a.warp0, b.warp0)


def test_broken_samples_are_named_and_skipped(tmp_path, caplog):
    root = make_root(tmp_path)
    index = build_index(root, root / "index", (0.1, 1.0))
    images, depths = root / "Undistorted_SfM/0001/images", root / DEPTHS / "0001/dense0/depths"
    (images / "view0.png").unlink()
    (images / "view1.png").write_bytes(b"not an image")
    write_depth(depths / "view2.h5", np.ones((HEIGHT // 2, WIDTH), np.float32))
    (depths / "view3.h5").write_bytes(b"no depth")
    source = MegaDepthPairs(root, index, workers=2)
    with caplog.at_level(logging.WARNING):
        batch = source.sample(40, 64, torch.Generator().manual_seed(0))
    assert len(batch) == 40
    assert {Path(p).name for p in source.broken} == {f"view{k}.png" for k in range(4)}
    for text in ("view0.png: cannot be read", "view1.png: not an image", "view2.h5: depth map is 160x60"):
        assert text in caplog.text
    assert "view3.h5: no depth map" in caplog.text


def test_nan_poses_are_named_and_left_out(root, index, tmp_path, caplog):
    info = dict(np.load(index[0], allow_pickle=True))
    info["poses"][2] = np.full((4, 4), np.nan)
    np.savez(tmp_path / "scene.npz", **info)
    frames, pairs, overlap = read_scene_info(root, tmp_path / "scene.npz")
    assert "view2.png: pose or intrinsics are not finite" in caplog.text
    assert len(frames) == 5 and len(pairs) == len(overlap) > 0


def test_bad_index_files_give_one_line(root, tmp_path):
    (tmp_path / "a.npz").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="a.npz: not an index of MegaDepth pairs"):
        MegaDepthPairs(root, [tmp_path / "a.npz"])
    with pytest.raises(ValueError, match="no usable pairs"):
        MegaDepthPairs(root, [])
    with pytest.raises(ValueError, match="unpack MegaDepth"):
        build_index(tmp_path, tmp_path)


def test_when_nothing_can_be_read_it_says_so(root, index, tmp_path):
    source = MegaDepthPairs(tmp_path, index)
    with pytest.raises(ValueError, match="hardly any pair can be read"):
        source.sample(2, 64, torch.Generator())


def test_a_preview_of_what_cannot_be_read_gives_one_line(index, tmp_path):
    (tmp_path / "index").mkdir()
    for file in index:
        shutil.copy(file, tmp_path / "index")
    with pytest.raises(UserError, match="hardly any pair can be read") as error:
        preview(out=tmp_path / "out", megadepth=tmp_path, pairs=2, size=64, device="cpu")
    assert "\n" not in str(error.value)


def test_the_scenes_of_the_benchmark_alone_give_no_index(tmp_path):
    (tmp_path / DEPTHS / "0015").mkdir(parents=True)
    with pytest.raises(ValueError, match="no scenes but those of the benchmark"):
        build_index(tmp_path, tmp_path / "index")


def test_a_raw_model_is_undistorted_first(root, tmp_path, caplog):
    scene = tmp_path / "MegaDepth_v1_SfM" / "0001"
    shutil.copytree(root / "Undistorted_SfM/0001/sparse", scene / "sparse/manhattan/0")
    shutil.copytree(root / "Undistorted_SfM/0001/images", scene / "images")
    shutil.copytree(root / DEPTHS / "0001", tmp_path / DEPTHS / "0001")
    with pytest.raises(ValueError, match="no scene has both"):
        build_index(tmp_path, tmp_path / "index")

    def blind(model, images, out):
        """As COLMAP is to images that it cannot read: it says so and goes on."""
        shutil.copytree(model, out / "sparse")
        (out / "images").mkdir()

    with pytest.raises(ValueError, match="no scene has both"):
        build_index(tmp_path, tmp_path / "index", undistort=blind)
    assert "no image could be undistorted" in caplog.text
    assert not list((tmp_path / "Undistorted_SfM").glob("*"))
    if find_spec("pycolmap") is None:
        pytest.skip("pycolmap is not installed")
    assert len(build_index(tmp_path, tmp_path / "index", (0.1, 1.0), undistort=undistort)) == 1
    assert len(list((tmp_path / "Undistorted_SfM/0001/images").iterdir())) == 6
    assert not list((tmp_path / "Undistorted_SfM").glob(".*"))
    assert "pycolmap" not in sys.modules, "it has a process of its own"


def test_published_pairs_can_be_read():
    if not DEV.is_dir():
        pytest.skip(f"{DEV} is not here")
    logging.disable(logging.WARNING)  # most of these images come without depth
    source = MegaDepthPairs(DEV, sorted((DEV / "scene_info").glob("*.npz")), workers=2)
    batch = source.sample(2, 320, torch.Generator().manual_seed(0))
    logging.disable(logging.NOTSET)
    truth = coarse_ground_truth(batch)
    assert (truth.matchable0.sum(1) > 30).all()
    # Where the ground truth says the images show the same, they should look alike.
    patches = [_patches(batch.image0, cell_centres(320, 320).expand_as(batch.warp0)),
               _patches(batch.image1, batch.warp0)]  # fmt: skip
    good = truth.matchable0.view(batch.visible0.shape)
    right = _likeness(patches[0], patches[1])[good].median()
    wrong = _likeness(patches[0], patches[1].roll(7, 2))[good].median()
    assert right > wrong + 0.2


def _patches(image: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """b h w 81: windows of 9 x 9 pixels around points b h w 2."""
    step = torch.arange(-4.0, 5.0)
    window = torch.stack(torch.meshgrid(step, step, indexing="xy"), -1).view(81, 2)
    grid = (points[..., None, :] + window + 0.5) * 2 / image.shape[-1] - 1
    out = torch.nn.functional.grid_sample(image, grid.flatten(2, 3).flatten(1, 1), align_corners=False)
    return out[:, 0].view(*points.shape[:3], 81)


def _likeness(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = a - a.mean(-1, True), b - b.mean(-1, True)
    return (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1)).clamp(min=1e-6)


def test_images_as_stored_are_used_whatever_exif_says(root):
    # A photo's orientation tag must not turn it away from its depth map.
    from PIL import Image

    from prism_match.frames import read_gray

    gray = cv2.imread(str(root / "Undistorted_SfM/0001/images/view0.png"), 0)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(gray).save(root / "turned.jpg", exif=exif)
    assert read_gray(root / "turned.jpg").shape == (HEIGHT, WIDTH)


def test_an_image_that_claims_too_many_pixels_is_told(tmp_path: Path) -> None:
    from prism_match.frames import read_gray

    bomb = png_claiming(60_000, 60_000)
    with pytest.raises(cv2.error):
        cv2.imdecode(np.frombuffer(bomb, np.uint8), cv2.IMREAD_GRAYSCALE)
    (tmp_path / "bomb.png").write_bytes(bomb)
    with pytest.raises(UserError, match="bomb.png"):
        read_gray(tmp_path / "bomb.png")
