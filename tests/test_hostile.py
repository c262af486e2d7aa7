"""Damaged and hostile files: what once went wrong, a few hundred seeded cases of benchmarks/fuzz.py, and some
kills by benchmarks/kills.py."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import struct
import subprocess
import sys
import tarfile
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path
from random import Random

import cv2
import h5py
import numpy as np
import PIL.Image
import PIL.ImageFile
import pytest
import torch
from hostile_files import MUTATORS, mutate, png_claiming
from safetensors.torch import save_file
from synthetic_matcher import write_noise

from prism_match import UserError, cli
from prism_match.colmap_model import read_model
from prism_match.config import PRESETS, ModelConfig, load_model_config
from prism_match.engine import Matcher, MatchStore
from prism_match.evaluation.megadepth import read_megadepth
from prism_match.evaluation.pairs import PosePair
from prism_match.evaluation.pose import evaluate_pose
from prism_match.evaluation.runner import Score, check_types
from prism_match.evaluation.scannet import read_scannet
from prism_match.export.hloc import read_dense_matches, read_sparse_matches
from prism_match.files import load_arrays, load_object_arrays
from prism_match.frames import read_depth, read_gray
from prism_match.images import HELD, claims_too_much, image_size, load_image
from prism_match.maps.cameras import read_exif
from prism_match.maps.retrieval import describe_files
from prism_match.maps.stages import Stages
from prism_match.matches import Matches
from prism_match.serve.photos import read_photo
from prism_match.serve.refusal import Refused
from prism_match.training.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from prism_match.training.config import TrainConfig, merged
from prism_match.training.data.megadepth import read_index
from prism_match.training.data.photos import PhotoStore
from prism_match.weights import weights_info

ROOT = Path(__file__).parents[1]
DEEP = "[" * 100_000


# ---- files that claim more than they hold


def test_arrays_that_are_not_there_are_not_made_room_for(tmp_path: Path) -> None:
    """HDF5 keeps the shape of 160 GiB in a kilobyte."""
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        for key in ("depth", "keypoints0", "keypoints1", "scores", "size0", "size1"):
            file.create_dataset(key, (2**33, 5), "f4", chunks=(1, 1))
        file.attrs["name0"] = file.attrs["name1"] = "x"
    assert path.stat().st_size < 10_000
    for read in (read_depth, Matches.load):
        with pytest.raises(UserError) as told:
            read(path)
        assert str(told.value).startswith(str(path))


def test_parts_of_a_png_that_are_not_there_are_not_made_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenCV would take four gigabytes for this one."""
    path = tmp_path / "x.png"
    cv2.imwrite(str(path), np.full((4, 5), 2000, np.uint16))
    whole = path.read_bytes()
    path.write_bytes(whole + b"what follows is not read")
    np.testing.assert_array_equal(read_depth(path), np.full((4, 5), 2.0))
    assert read_gray(path).shape == (4, 5)
    path.write_bytes(whole[:33] + b"\xf0" + whole[34:])
    monkeypatch.setattr(cv2, "imdecode", lambda *_: pytest.fail("is decoded"))
    for read in (read_depth, read_gray):
        with pytest.raises(UserError) as told:
            read(path)
        assert str(told.value).startswith(str(path))


def test_archives_that_unpack_to_too_much_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prism_match.files.LARGEST_ARRAY", 2**20)
    np.savez_compressed(tmp_path / "bomb.npz", x=np.zeros(2**20))
    assert (tmp_path / "bomb.npz").stat().st_size < 10_000
    with pytest.raises(ValueError, match="unpacks to more"):
        load_arrays(tmp_path / "bomb.npz")
    np.savez(tmp_path / "large.npz", x=np.zeros(2**18))
    assert load_arrays(tmp_path / "large.npz")["x"].shape == (2**18,)


def test_images_that_claim_too_much_have_no_size(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(png_claiming(300_000, 300_000))
    assert image_size(tmp_path / "x.png") is None
    assert read_exif(tmp_path / "x.png", (10, 10)).focal is None
    with pytest.raises(UserError, match="too many pixels"):
        load_image(tmp_path / "x.png")


@pytest.mark.parametrize("suffix", ["png", "tif", "jpg"])
def test_images_that_claim_more_than_they_can_hold_are_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """Fewer pixels than are too many for a photo, but not in a file of a kilobyte."""
    path = tmp_path / f"x.{suffix}"
    PIL.Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(path)
    whole = path.read_bytes()
    if suffix == "png":
        changed = png_claiming(64, 2_000_000)[:33] + whole[33:]
    elif suffix == "jpg":
        changed = whole.replace(struct.pack(">BHH", 8, 64, 64), struct.pack(">BHH", 8, 2_000, 64_000), 1)
    else:  # the height
        changed = re.sub(rb"\x01\x01[\x03\x04]\x00\x01\x00\x00\x00\x40\x00\x00\x00",
                         struct.pack("<HHII", 257, 4, 1, 2_000_000), whole)  # fmt: skip
    path.write_bytes(changed)
    assert np.prod(image_size(path) or 0) == 128_000_000
    monkeypatch.setattr(PIL.ImageFile.ImageFile, "load", lambda *_: pytest.fail("is decoded"))
    monkeypatch.setattr(cv2, "imdecode", lambda *_: pytest.fail("is decoded"))
    with pytest.raises(UserError, match="too many pixels for so small a file"):
        load_image(path)
    with pytest.raises(UserError, match="not an image that can be decoded"):
        read_gray(path)
    with pytest.raises(Refused, match="too many pixels"):
        read_photo(changed, "image0", 2**30)


def test_images_of_one_colour_are_not_taken_for_more_than_they_hold(tmp_path: Path) -> None:
    """Nothing is packed as closely as a mask of one bit for each pixel."""
    for mode in ("1", "P"):
        blank = PIL.Image.new(mode, (8200, 8200))
        blank.save(tmp_path / "x.png", bits=1, compress_level=9)
        with PIL.Image.open(tmp_path / "x.png") as opened:
            assert opened.width * opened.height > HELD
            assert not claims_too_much(opened, (tmp_path / "x.png").stat().st_size)


def test_no_other_program_is_started_for_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow gives PostScript to Ghostscript."""
    monkeypatch.setattr(subprocess, "check_call", lambda *_, **__: pytest.fail("started"))
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("started"))
    box = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\n"
    (tmp_path / "x.png").write_bytes(box)
    with pytest.raises(UserError, match="not an image, or of an unknown format"):
        load_image(tmp_path / "x.png")


@pytest.mark.parametrize("suffix", ["avif", "webp", "jp2", "tiff", "gif"])
def test_decoders_that_fail_in_their_own_ways_are_told(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x.{suffix}"
    try:
        PIL.Image.fromarray(np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)).save(path)
    except (KeyError, OSError):
        pytest.skip(f"Pillow was built without {suffix}")
    whole = path.read_bytes()
    for seed in range(40):
        path.write_bytes(mutate(whole, "bytes", Random(seed)))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of Pillow, about metadata
                load_image(path)
        except UserError as error:
            assert str(path) in str(error)


# ---- settings


@pytest.mark.parametrize(
    "text",
    [
        DEEP, "null", "[]", '{"stage_dims": [16, 24]}', '{"stage_dims": [[1], 2, 3]}', '{"layers": 1000000}',
        '{"stage_dims": [99999999, 1, 1]}', '{"window": 100001}', '{"levels": [true, 1]}', '{"levels": []}',
        '{"coarse_dim": 1048576}', '{"\\u202e": 1}', '{"levels": [1, 1, 1, 1, 1, 1, 1, 1, 1]}',
    ],
)  # fmt: skip
def test_settings_that_no_model_has_are_told(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError):
        load_model_config(tmp_path / "x.json")
    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors", {"config": text, "training": "{}"})
    with pytest.raises(UserError):
        weights_info(tmp_path / "x.safetensors")


def test_every_preset_is_still_a_model() -> None:
    for preset in PRESETS.values():
        assert ModelConfig.from_dict(preset.to_dict()) == preset


@pytest.mark.parametrize(
    "key, value", [("elapsed", "1.5"), ("step", None), ("model", []), ("elapsed", float("nan"))]
)
def test_checkpoints_with_other_things_in_their_state_are_told(
    key: str, value: object, tmp_path: Path
) -> None:
    state = {"step": 1, "pairs": 1, "elapsed": 1.0, "skipped": 0, "model": {}, "training": {}}
    folder = save_checkpoint(tmp_path, 1, Checkpoint({"x": torch.zeros(1)}, state))
    (folder / "state.json").write_text(json.dumps(state | {key: value}))
    with pytest.raises(UserError, match=key):
        load_checkpoint(tmp_path)


# ---- what a killed run, or someone else, has left


def test_descriptors_of_another_length_are_made_anew(tmp_path: Path) -> None:
    for n in range(2):
        write_noise(tmp_path / f"{n}.png", n)
    matcher = Matcher(config=PRESETS["tiny"], size=64, device="cpu", rescale="never")
    files = sorted(tmp_path.glob("*.png"))
    good, _ = describe_files(matcher, files, tmp_path / "d.npz")
    stored = load_arrays(tmp_path / "d.npz")
    for damage in (
        {"descriptors": np.zeros((3, 3))},
        {"descriptors": stored["descriptors"][:, :-1]},
        {"descriptors": stored["descriptors"].astype(np.float64)},
        {"keys": stored["keys"][:1]},
        {"keys": np.array([b"\xff", b"\xfe"])},
        {"keys": np.arange(2)},
    ):
        np.savez(tmp_path / "d.npz", **stored | damage)
        again, _ = describe_files(matcher, files, tmp_path / "d.npz")
        assert all((again[path] == good[path]).all() for path in files)
    np.savez(tmp_path / "d.npz", a=np.zeros(3))
    assert describe_files(matcher, files, tmp_path / "d.npz")[0].keys() == good.keys()


def test_parts_of_an_archive_that_are_no_arrays_are_told(tmp_path: Path) -> None:
    """NumPy hands them out as bytes."""
    np.savez(tmp_path / "x.npz", a=np.ones(3))
    with zipfile.ZipFile(tmp_path / "x.npz", "a") as archive:
        archive.writestr("b.npy", b"no array")
    with pytest.raises(ValueError, match="b is no array"):
        load_arrays(tmp_path / "x.npz")


@pytest.mark.parametrize("text", [DEEP, "[]", "null", '{"photos": 3}', '{"photos": {"key": "x"}}'])
def test_stages_that_are_damaged_are_done_again(text: str, tmp_path: Path) -> None:
    (tmp_path / "stages.json").write_text(text)
    (tmp_path / "product").touch()
    assert Stages(tmp_path / "stages.json").run("photos", "x", tmp_path / "product", lambda: "done") == "done"


def test_sizes_of_another_shape_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "m.h5"
    points = np.ones((3, 2), np.float32)
    with MatchStore(path, {"method": "x"}) as store:
        store.add(
            {("a", "b"): Matches(points, points, points[:, 0], (9, 9), (9, 9), "a", "b")},
            {"a": "0", "b": "1"},
        )
        store.merge()
    with h5py.File(path, "r+") as file:
        del file["sizes"]
        file["sizes"] = np.zeros((2, 2, 1), np.int64)
    with pytest.raises(UserError, match="damaged"):
        MatchStore(path)


def test_hloc_files_with_arrays_for_groups_are_told(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "m.h5", "w") as file:
        file["a/b"] = 3.0
    with h5py.File(tmp_path / "n.h5", "w") as file:
        file["a/b/matches0"], file["a/b/keypoints0"] = [0, -1], np.zeros((2, 2))
    whole = (tmp_path / "n.h5").read_bytes()
    for at in [n for n in range(len(whole)) if whole.startswith((b"TREE", b"SNOD", b"HEAP"), n)]:
        (tmp_path / "n.h5").write_bytes(whole[:at] + b"XXXX" + whole[at + 4 :])
        for read in (read_sparse_matches, read_dense_matches):
            with pytest.raises(UserError):
                list(read(tmp_path / "n.h5", ["a", "b"]))
    for read in (read_sparse_matches, read_dense_matches):
        with pytest.raises(UserError, match="not a file of hloc's matches"):
            list(read(tmp_path / "m.h5", ["a", "b"]))


def test_hloc_files_with_more_than_a_match_for_a_key_point_are_told(tmp_path: Path) -> None:
    for matches, scores in (([[0, 1], [1, 0]], [0.5, 0.5]), ([0, 1], [0.5])):
        with h5py.File(tmp_path / "m.h5", "w") as file:
            file["a/b/matches0"], file["a/b/matching_scores0"] = matches, scores
        with pytest.raises(UserError, match="not a file of hloc's matches"):
            list(read_sparse_matches(tmp_path / "m.h5", ["a", "b"]))


def test_matches_of_images_that_no_file_can_be_are_told(tmp_path: Path) -> None:
    file = tmp_path / "m.json"
    Matches(np.zeros((1, 2)), np.zeros((1, 2)), np.ones(1), (9, 9), (9, 9), "a b", "c").save(file)
    file.write_text(file.read_text().replace("a b", "a\\u0000b"))
    with pytest.raises(UserError, match="no file has the name"):
        Matches.load(tmp_path / "m.json")


def test_hloc_files_with_arrays_for_images_are_told(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "m.h5", "w") as file:  # of more numbers than anyone can wait for
        file.create_dataset("a", (2**40,), "f8", chunks=(1024,))
    for read in (read_sparse_matches, read_dense_matches):
        with pytest.raises(UserError, match="a is no image"):
            list(read(tmp_path / "m.h5", ["a", "b"]))


def test_texts_that_are_none_are_told(tmp_path: Path) -> None:
    bad = np.array([0x61, 0x7FFFFFFF], np.uint32).view("U2")
    np.savez(tmp_path / "x.npz", name=bad)
    with pytest.raises(ValueError, match="a text in it is none"):
        load_arrays(tmp_path / "x.npz")
    with pytest.raises(ValueError, match="a text in it is none"):
        load_object_arrays(tmp_path / "x.npz", ["name"])


def test_an_index_with_fewer_cameras_than_images_is_told(tmp_path: Path) -> None:
    write_index(tmp_path / "0000.npz", intrinsics=[np.eye(3)])
    with pytest.raises(UserError, match="not as many"):
        read_index(tmp_path / "0000.npz")


def write_index(path: Path, **other: object) -> None:
    """Of MegaDepth, but for what is given."""
    values = {"image_paths": ["a", "b"], "depth_paths": ["a", None], "intrinsics": [np.eye(3)] * 2,
              "poses": [np.eye(4)] * 2, "pair_infos": [((0, 1), 0.5, ())]}  # fmt: skip
    arrays = {}
    for key, some in (values | other).items():
        arrays[key] = np.empty(len(some), object)
        arrays[key][:] = some
    np.savez(path, **arrays)


@pytest.mark.parametrize("key", ["image_paths", "depth_paths"])
def test_paths_in_an_index_that_are_none_are_told(tmp_path: Path, key: str) -> None:
    write_index(tmp_path / "0000.npz")
    assert len(read_megadepth(tmp_path)) == 1
    for bad in (np.eye(3), 3, b"a"):
        write_index(tmp_path / "0000.npz", **{key: ["a", bad]})
        with pytest.raises(UserError, match="a path in it is no text"):
            read_megadepth(tmp_path)


def test_poses_in_an_index_that_are_none_are_named_as_unusable(tmp_path: Path) -> None:
    write_index(tmp_path / "0000.npz", poses=[np.zeros((4, 4)), np.eye(4)])
    (pair,) = read_megadepth(tmp_path)
    assert pair.problem == "no pose is given"


def test_a_phase_without_end_is_told() -> None:
    with pytest.raises(ValueError, match="a phase is"):
        merged(TrainConfig(), {"phases": [[0.0, float("inf"), 4]]})


# ---- benchmarks


@pytest.mark.parametrize("key", ["matches", "precision", "error", "name", "parts"])
def test_scores_that_are_none_are_measured_again(key: str) -> None:
    check_types(Score("a", "", "", 1.0))
    for bad in ([1, 2], {"x": "y"}):
        with pytest.raises((ValueError, TypeError)):
            check_types(replace(Score("a", "", "", 1.0), **{key: bad}))


def test_cameras_that_are_none_are_named_as_unusable() -> None:
    K, T = np.diag([9.0, 9.0, 1.0]), np.eye(4)
    for k in (np.diag([9.0, 9.0, 0.0]), np.zeros((0, 3)), np.eye(2)):
        assert (
            "intrinsics"
            in PosePair(name="x", image0=Path("a"), image1=Path("b"), K0=k, K1=K, T_0to1=T).problem
        )


def test_numbers_that_no_index_has_are_told(tmp_path: Path) -> None:
    np.savez(tmp_path / "test.npz", name=np.full((1, 4), np.inf))
    np.savez(tmp_path / "intrinsics.npz", scene0000_00=np.eye(3))
    with pytest.raises(UserError, match="not an index of ScanNet pairs"):
        read_scannet(tmp_path)


def test_a_packed_tar_that_is_cut_short_is_told(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        info = tarfile.TarInfo("x.jpg")
        info.size = 50_000
        tar.addfile(info, io.BytesIO(os.urandom(50_000)))
    (tmp_path / "x.tar").write_bytes(gzip.compress(packed.getvalue())[:20_000])
    with pytest.raises(UserError, match="not a tar file that can be read"):
        PhotoStore.load(tmp_path / "x.tar")


# ---- what is printed


def test_names_that_no_file_can_have_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Systems refuse even to be asked for names of hundreds of letters."""
    name = 300 * "n"
    for read in (load_image, read_depth):
        with pytest.raises(UserError):
            read(tmp_path / name)
    pair = PosePair(
        name="a", image0=tmp_path / name, image1=tmp_path / name, K0=np.eye(3), K1=np.eye(3), T_0to1=np.eye(4)
    )
    with pytest.raises(UserError, match="no such file"):
        evaluate_pose([pair], "sift", 64)
    for command in (
        ["match", name, name],
        ["sfm", name, "-o", str(tmp_path / "out")],
        ["info", "--weights", name],
    ):
        monkeypatch.setattr(sys, "argv", ["prism", *command])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code in (1, 2)
        told = capsys.readouterr().err
        assert told.startswith("prism: ") and told.count("\n") == 1


def test_points_without_colours_are_told(tmp_path: Path) -> None:
    (tmp_path / "cameras.txt").write_text("1 PINHOLE 64 64 60 60 32 32\n")
    (tmp_path / "images.txt").write_text("1 1 0 0 0 0 0 0 1 a.png\n\n")
    for points in ("7\n", "7 1 2 3\n8 1 2 3\n"):
        (tmp_path / "points3D.txt").write_text(points)
        with pytest.raises(UserError, match="points3D.txt: damaged"):
            read_model(tmp_path)


def test_names_cannot_give_orders_to_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["prism", "info", str(tmp_path / "\x1b[2Ja\nb\u202e")])
    with pytest.raises(SystemExit) as left:
        cli.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert left.value.code == 2 and line.isprintable() and "?[2Ja?b?" in line


# ---- the harnesses


@pytest.mark.parametrize("kind", MUTATORS)
def test_a_seed_is_a_case(kind: str) -> None:
    data = bytes(range(256)) * 4
    assert mutate(data, kind, Random(3)) == mutate(data, kind, Random(3)) != mutate(data, kind, Random(4))


def run_benchmark(name: str, *words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks" / name), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def test_a_few_hundred_damaged_files() -> None:
    """Of the targets that take milliseconds a case."""
    fast = (
        "photo",
        "matches",
        "store",
        "weights",
        "training settings",
        "poses",
        "depth map",
        "hloc",
        "HTTP body",
    )
    words = [word for target in fast for word in ("--target", target)]
    said = run_benchmark("fuzz.py", "--cases", "200", "--first", "100000", *words)
    assert "200 cases, 0 failed" in said


def test_a_few_kills() -> None:
    table = run_benchmark("kills.py", "--kills", "3", "export hloc")
    assert table.splitlines()[2].split()[-3:] == ["3", "1", "0"]


@pytest.mark.slow
def test_thousands_of_damaged_files() -> None:
    run_benchmark("fuzz.py", "--cases", "1500", "--first", "200000")


@pytest.mark.slow
def test_kills_of_every_command() -> None:
    run_benchmark("kills.py", "--kills", "3")
