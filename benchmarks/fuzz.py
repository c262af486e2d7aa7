"""Damaged and hostile files through everything that reads one: 10,000 of them by one command.

python benchmarks/fuzz.py                                  all targets, seeds 0 to 9,999
python benchmarks/fuzz.py --cases 2000 --first 50000       other seeds
python benchmarks/fuzz.py --case "weights:4711" --keep DIR one case again, its files kept

A case is a seed: it chooses a target, a real file of it, and what is changed about it. The command of the
target, or the function that it calls, must then end in a result or in one clear line, within --seconds and
--mib; without a traceback, without the end of the process, without a file outside its output folder, and
without a file that is half-written. Cases run in a forked process that has everything imported; one that
crashes it or hangs has failed, and the next one goes on in another. Exit code 1: some failed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import resource
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import cv2
import h5py
import numpy as np
import PIL.Image
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from hostile_files import Intruder, mutate, png_claiming  # noqa: E402
from rgbd_for_tests import write_sequence  # noqa: E402
from synthetic_matcher import true_matches  # noqa: E402
from synthetic_scene import Scene, make_scene  # noqa: E402

from prism_match import Matcher, UserError, cli  # noqa: E402
from prism_match.config import PRESETS  # noqa: E402
from prism_match.engine import MatchStore  # noqa: E402
from prism_match.matches import Matches  # noqa: E402

# How files are changed, by their suffixes; the others as mere bytes.
KINDS = {
    ".png": "png", ".npz": "zip", ".pt": "zip", ".ckpt": "zip", ".h5": "h5", ".json": "json",
    ".jsonl": "text", ".safetensors": "safetensors", ".txt": "text", ".toml": "text", ".csv": "text",
}  # fmt: skip
TINY = ["--model-config", "tiny", "--size", "64", "--device", "cpu"]
CASES_A_PROCESS = 250
WAITING = 10  # times as long as computing may take
HARD_MIB = 4096  # of address space more than the process has at first: beyond it, allocations fail


@dataclass(frozen=True)
class Target:
    """What reads files. make: puts real ones into FOLDER/in (and FOLDER/out, where a run goes on); run: gets
    that folder and the file that was changed. A command leaves by SystemExit, a function by UserError."""

    share: float  # of the cases, in relation to the others'
    make: Callable[[Path], None]
    run: Callable[[Path, Path], Any]
    victims: tuple[str, ...] = ("in/**/*",)  # the files that may be changed


def prism(*words: str | Path) -> None:
    """The command line, in this process."""
    sys.argv = ["prism", *map(str, words)]
    cli.main()


# ---- real files


def texture(seed: int, width: int = 64, height: int = 48) -> np.ndarray:
    """h w 3, uint8."""
    coarse = np.random.default_rng(seed).integers(0, 255, (12, 16, 3), dtype=np.uint8)
    return cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)


def two_photos(folder: Path) -> None:
    for n, name in enumerate("ab"):
        PIL.Image.fromarray(texture(n)).save(folder / f"{name}.png")


def photos(folder: Path) -> None:
    """One in each format that is read, and some of each format's dialects."""
    inputs = folder / "in"
    inputs.mkdir()
    image = PIL.Image.fromarray(texture(0))
    exif = PIL.Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "maker"
    image.save(inputs / "exif.jpg", exif=exif)
    image.save(inputs / "progressive.jpeg", progressive=True, quality=60)
    image.convert("CMYK").save(inputs / "cmyk.jpg")
    image.save(inputs / "rgb.png")
    image.convert("RGBA").save(inputs / "alpha.png")
    image.quantize(16).save(inputs / "palette.png", transparency=3)
    PIL.Image.fromarray(texture(0)[..., 0].astype(np.uint16) * 257).save(inputs / "deep.png")
    image.save(inputs / "lossy.webp")
    image.save(inputs / "lossless.webp", lossless=True)
    for compression in ("raw", "tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits"):
        image.save(inputs / f"{compression}.tiff", compression=compression)
    PIL.Image.fromarray(texture(0)[..., 0].astype(np.float32) / 255).save(inputs / "float.tif")
    for name in ("x.bmp", "x.ppm", "x.gif"):
        image.save(inputs / name)
    image.convert("L").save(inputs / "x.pgm")
    image.convert("1").save(inputs / "x.pbm")
    for name in ("x.jp2", "x.avif"):
        with contextlib.suppress(KeyError, OSError, ValueError):  # Pillow may be built without them
            image.save(inputs / name)
    (inputs / "claims.png").write_bytes(png_claiming(30_000, 30_000))
    (folder / "other").mkdir()
    two_photos(folder / "other")


def some_matches(name0: str = "a.png", name1: str = "b.png") -> Matches:
    g = np.random.default_rng(0)
    points = [g.uniform(0, [63, 47], (40, 2)).astype(np.float32) for _ in range(2)]
    return Matches(
        points[0], points[1], np.sort(g.random(40).astype(np.float32))[::-1], (64, 48), (64, 48), name0, name1
    )


def matches(folder: Path) -> None:
    (folder / "in").mkdir()
    for suffix in ("npz", "json", "csv", "h5"):
        some_matches().save(folder / "in" / f"matches.{suffix}")


def store(folder: Path) -> None:
    (folder / "in").mkdir()
    write_store(folder / "in" / "matches.h5", {"method": "made up"})


def write_store(path: Path, settings: dict[str, Any]) -> None:
    digests = {"a.png": "0" * 32, "b.png": "1" * 32, "c.png": "2" * 32}
    with MatchStore(path, settings) as store:
        store.add(
            {("a.png", "b.png"): some_matches(), ("b.png", "c.png"): some_matches("b.png", "c.png")}, digests
        )
        store.merge()
    path.with_suffix(".lock").unlink()


def begun_sfm(folder: Path) -> None:
    """What a run of `sfm --matches-only` leaves behind."""
    inputs = folder / "in"
    inputs.mkdir()
    for n, name in enumerate("abc"):
        PIL.Image.fromarray(texture(n)).save(inputs / f"{name}.png")
    words = ["--pairs", "retrieval", "--neighbours", "2", "--matches-only", "-o", folder / "out", *TINY]
    quietly(prism, "sfm", inputs, *words)
    with MatchStore(folder / "out" / "matches.h5") as store:
        settings = store.settings
    parts = MatchStore(folder / "out" / "matches.h5", settings)
    pair = ("a.png", "b.png")
    parts.add({pair: parts[pair]}, {n: parts.images[n].digest for n in pair})
    parts.close()


def weights(folder: Path) -> None:
    from prism_match.weights import load_model
    from prism_match.weights.store import export_weights

    (folder / "in").mkdir()
    model = load_model(config=PRESETS["tiny"])
    path = folder / "in" / "w.safetensors"
    export_weights(path, model.state_dict(), PRESETS["tiny"], {"step": 3, "pairs": 12})
    export_weights(folder / "in" / "s.safetensors", model.state_dict(), PRESETS["tiny"], {}, shard_mib=0.5)


def checkpoints(folder: Path) -> None:
    from prism_match.training.checkpoint import Checkpoint, save_checkpoint
    from prism_match.training.config import PRESETS as TRAINING
    from prism_match.weights import load_model

    (folder / "in").mkdir()
    state = load_model(config=PRESETS["tiny"]).state_dict()
    torch.save({"state_dict": state, "epoch": 3}, folder / "in" / "zip.pt")
    torch.save(state, folder / "in" / "old.ckpt", _use_new_zipfile_serialization=False)
    torch.save({"state_dict": state, "intruder": Intruder()}, folder / "in" / "intruder.pt")
    values = {"step": 3, "pairs": 12, "elapsed": 1.5, "skipped": 0, "model": PRESETS["tiny"].to_dict(),
              "training": TRAINING["tiny"].to_dict()}  # fmt: skip
    tensors = {f"{group}.{k}": v.clone() for group in ("model", "ema") for k, v in state.items()}
    save_checkpoint(folder / "in" / "run", 3, Checkpoint(tensors, values))


def runs(folder: Path) -> None:
    """What can be averaged: weights in one file and in several, and a run of training."""
    checkpoints(folder)
    shutil.move(folder / "in" / "run", folder / "run")
    shutil.rmtree(folder / "in")
    weights(folder)
    shutil.move(folder / "run", folder / "in" / "run")


def graphs(folder: Path) -> None:
    """The cache of `Matcher(backend="onnx")`. What is in the graphs does not matter."""
    kept_graphs(folder).write(SOME_GRAPHS)


SOME_GRAPHS = {part: part.encode() * 100 for part in ("backbone", "mpms")}


def kept_graphs(folder: Path) -> Any:
    from prism_match.export.onnx.backend import kept_file

    os.environ["XDG_CACHE_HOME"] = str(folder / "out")
    return kept_file(tiny_matcher().info)


def settings(folder: Path) -> None:
    (folder / "in").mkdir()
    values = json.loads(json.dumps(PRESETS["tiny"].to_dict()))
    (folder / "in" / "model.json").write_text(json.dumps(values))
    (folder / "in" / "model.toml").write_text("\n".join(f"{k} = {json.dumps(v)}" for k, v in values.items()))


def training_settings(folder: Path) -> None:
    (folder / "in").mkdir()
    text = (
        'preset = "quick"\nminutes = 30.0\nlr = 4e-4\nphases = [[0.0, 256, 64], [0.5, 320, 32]]\nseed = 3\n'
    )
    (folder / "in" / "train.toml").write_text(
        f"{text}compile = false\n[model]\nlayers = 3\n[loss]\nrefine = 64\n"
    )


@cache
def scene() -> Scene:
    return make_scene(Path(tempfile.mkdtemp(prefix="prism-fuzz-scene-")) / "scene", views=3, points=60)


def colmap_model(folder: Path) -> None:
    """As text and as binary, with the photos, as `prism sfm` leaves it."""
    inputs = folder / "in"
    shutil.copytree(scene().root / "images", inputs / "images")
    shutil.copytree(scene().root / "sparse", inputs / "text")
    to_binary(inputs / "text", inputs / "sparse" / "0")
    stages = {
        "photos": {"key": "images", "result": "images"},
        "model": {"key": "0", "result": {"models": []}},
    }
    (inputs / "stages.json").write_text(json.dumps(stages))
    lines = [
        line for line in (inputs / "text" / "images.txt").read_text().splitlines() if line.endswith(".png")
    ]
    poses = [" ".join([line.split()[9], *line.split()[1:8]]) for line in lines]
    (inputs / "poses.txt").write_text("\n".join(poses) + "\n")
    results = [{"name": line.split()[9], "camera": {"model": "PINHOLE", "width": 160, "height": 120,
                "params": [150.0, 150.0, 80.0, 60.0]}} for line in lines]  # fmt: skip
    (inputs / "localization.json").write_text(json.dumps({"results": results}))


def to_binary(text: Path, binary: Path) -> None:
    """COLMAP's other format, of the cameras that the synthetic scene has."""
    binary.mkdir(parents=True)

    def rows(name: str) -> list[list[str]]:
        return [x.split() for x in (text / name).read_text().splitlines() if not x.startswith("#")]

    cameras = rows("cameras.txt")
    data = struct.pack("<Q", len(cameras))
    for number, _, width, height, *numbers in cameras:
        data += struct.pack("<iiQQ4d", int(number), 1, int(width), int(height), *map(float, numbers))
    (binary / "cameras.bin").write_bytes(data)
    lines = rows("images.txt")
    data = struct.pack("<Q", len(lines) // 2)
    for head, seen in zip(lines[::2], lines[1::2], strict=True):
        data += (
            struct.pack("<i7di", int(head[0]), *map(float, head[1:8]), int(head[8]))
            + head[9].encode()
            + b"\0"
        )
        data += struct.pack("<Q", len(seen) // 3)
        for n in range(0, len(seen), 3):
            data += struct.pack("<2dq", float(seen[n]), float(seen[n + 1]), int(seen[n + 2]))
    (binary / "images.bin").write_bytes(data)
    points = rows("points3D.txt")
    data = struct.pack("<Q", len(points))
    for number, x, y, z, r, g, b, error, *track in points:
        data += struct.pack(
            "<Q3d3Bd", int(number), float(x), float(y), float(z), int(r), int(g), int(b), float(error)
        )
        data += struct.pack(f"<Q{len(track)}i", len(track) // 2, *map(int, track))
    (binary / "points3D.bin").write_bytes(data)


def database(folder: Path) -> None:
    store(folder)
    (folder / "other").mkdir()
    shutil.move(folder / "in" / "matches.h5", folder / "other" / "matches.h5")
    quietly(prism, "export", "colmap", folder / "other" / "matches.h5", "-o", folder / "in" / "database.db")


def depth_maps(folder: Path) -> None:
    from prism_match.frames import write_depth

    (folder / "in").mkdir()
    depth = np.random.default_rng(0).uniform(1, 5, (24, 32)).astype(np.float32)
    write_depth(folder / "in" / "depth.h5", depth)
    cv2.imwrite(str(folder / "in" / "depth.png"), (depth * 1000).astype(np.uint16))


def pair_list(folder: Path) -> None:
    """SuperGlue's, with poses, and the scores of a run that was stopped."""
    inputs = folder / "in"
    shutil.copytree(scene().root / "images", inputs / "images")
    K, T = "150 0 80 0 150 60 0 0 1", "1 0 0 0.1 0 1 0 0 0 0 1 0 0 0 0 1"
    pairs = (("view0.png", "view1.png"), ("view1.png", "view2.png"))
    (inputs / "pairs.txt").write_text("".join(f"{a} {b} 0 0 {K} {K} {T}\n" for a, b in pairs))
    (folder / "out").mkdir()
    quietly(
        prism, "eval", "pairs", "--data", inputs / "pairs.txt", "--method", "sift", "--out", folder / "out"
    )


def names_list(folder: Path) -> None:
    (folder / "in" / "images").mkdir(parents=True)
    two_photos(folder / "in" / "images")
    (folder / "in" / "pairs.txt").write_text("a.png b.png\n# b.png\n")
    (folder / "in" / "tabs.txt").write_text("a.png\tb.png\n")
    (folder / "in" / "cameras.txt").write_text("a.png 60 60 31.5 23.5\nb.png 60 60 31.5 23.5\n")


def begun_pairs(folder: Path) -> None:
    """A list, its photos, and what a run of `match-pairs` with a shorter list has left."""
    (folder / "in" / "images").mkdir(parents=True)
    for n, name in enumerate("abc"):
        PIL.Image.fromarray(texture(n)).save(folder / "in" / "images" / f"{name}.png")
    (folder / "in" / "pairs.txt").write_text("a.png b.png\n")
    quietly(match_all, folder, folder)
    (folder / "in" / "pairs.txt").write_text("a.png b.png\n# then\nb.png\tc.png\n")
    (folder / "out" / "at-hand.json").write_text('["z.png"]')  # as of a run that was killed


def two_to_align(folder: Path) -> None:
    """Photos with what comes along with them, and such that have a place on the ground."""
    (folder / "in").mkdir()
    (folder / "other").mkdir()
    two_photos(folder / "other")
    image = PIL.Image.fromarray(texture(0))
    exif = PIL.Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "maker"
    exif.get_ifd(0x8769).update({0xA002: 64, 0xA003: 48})
    image.save(folder / "in" / "exif.jpg", exif=exif, icc_profile=bytes(range(200)))
    image.convert("RGBA").save(folder / "in" / "alpha.png")
    image.save(folder / "in" / "plain.tif", compression="tiff_lzw")
    with contextlib.suppress(ImportError):
        import rasterio
        from rasterio.control import GroundControlPoint
        from rasterio.transform import Affine

        place = {"crs": "EPSG:32632", "transform": Affine(0.5, 0, 500_000, 0, -0.5, 5_000_000)}
        corners = [(0, 0), (0, 64), (48, 0), (48, 64)]
        points = [GroundControlPoint(row=y, col=x, x=500_000 + x, y=5_000_000 - y) for y, x in corners]
        bands = np.moveaxis(texture(0), -1, 0)
        kinds: dict[str, tuple[np.ndarray, dict[str, Any]]] = {
            "place.tif": (bands, {**place, "compress": "deflate"}),
            "deep.tif": (bands[:1].astype(np.uint16) * 200, {**place, "nodata": 0, "tiled": True}),
            "floats.tif": (bands[:2].astype(np.float32), {**place, "nodata": -1.0, "compress": "lzw"}),
            "points.tif": (bands, {"crs": "EPSG:32632", "gcps": points}),
        }
        for name, (pixels, profile) in kinds.items():
            size = {"count": len(pixels), "height": 48, "width": 64, "dtype": pixels.dtype.name}
            blocks = {"blockxsize": 16, "blockysize": 16} if "tiled" in profile else {}
            with rasterio.open(
                folder / "in" / name, "w", driver="GTiff", **size, **profile, **blocks
            ) as file:
                file.write(pixels)


def sequence(folder: Path) -> None:
    write_sequence(scene(), folder / "in" / "flat", False)
    write_sequence(scene(), folder / "in" / "scannet", True)


def localized(folder: Path) -> None:
    colmap_model(folder)
    inputs = folder / "in"
    for name in ("text", "poses.txt", "localization.json", "stages.json"):
        target = inputs / name
        shutil.rmtree(target) if target.is_dir() else target.unlink()
    (inputs / "cameras.txt").write_text("q.png PINHOLE 160 120 150 150 80 60\n")
    (inputs / "list.txt").write_text("q.png view1.png\nq.png view2.png\n")
    shutil.copy(inputs / "images" / "view0.png", folder / "in" / "q.png")


def homographies(folder: Path) -> None:
    inputs = folder / "in" / "v_made"
    inputs.mkdir(parents=True)
    for n in (1, 2, 3):
        cv2.imwrite(str(inputs / f"{n}.ppm"), cv2.resize(texture(n), (160, 120)))
        np.savetxt(inputs / f"H_1_{n}", [[1, 0.01, 2], [0, 1, 3], [1e-5, 0, 1]])


def indices(folder: Path) -> None:
    """LoFTR's lists of MegaDepth's and ScanNet's pairs."""
    images = folder / "in" / "megadepth" / "images"
    shutil.copytree(scene().root / "images", images)
    paths = np.array([f"images/view{n}.png" for n in range(3)] + [None], object)
    K = np.array([[150.0, 0, 80], [0, 150, 60], [0, 0, 1]])
    poses = [np.eye(4) + np.pad([[0.1 * n]], ((0, 3), (3, 0))) for n in range(3)]
    info = np.empty(2, object)
    info[0], info[1] = (np.array([0, 1]), 0.4, None), (np.array([1, 2]), 0.3, None)

    def objects(values: list) -> np.ndarray:
        array = np.empty(len(values), object)
        array[:] = values
        return array

    (folder / "in" / "megadepth" / "scene_info").mkdir()
    np.savez(
        folder / "in" / "megadepth" / "scene_info" / "0015_0.1_0.3.npz",
        image_paths=paths, depth_paths=paths, intrinsics=objects([K, K, K, None]),
        poses=objects([*poses, None]), pair_infos=info,
    )  # fmt: skip
    scan = folder / "in" / "scannet"
    for part in ("color", "pose"):
        (scan / "scannet_test_1500" / "scene0707_00" / part).mkdir(parents=True)
    for n in (0, 15):
        where = scan / "scannet_test_1500" / "scene0707_00"
        cv2.imwrite(str(where / "color" / f"{n}.jpg"), texture(n, 160, 120))
        np.savetxt(where / "pose" / f"{n}.txt", poses[n // 15])
    np.savez(scan / "test.npz", name=np.array([[707, 0, 15, 0]], np.uint16))
    np.savez(scan / "intrinsics.npz", scene0707_00=K)


def hloc_files(folder: Path) -> None:
    matches(folder)
    quietly(prism, "export", "hloc", folder / "in" / "matches.npz", "-o", folder / "made")
    shutil.rmtree(folder / "in")
    (folder / "made").rename(folder / "in")


def training_photos(folder: Path) -> None:
    import tarfile

    inputs = folder / "in"
    (inputs / "photos").mkdir(parents=True)
    for n in range(3):
        PIL.Image.fromarray(texture(n, 96, 96)).save(inputs / "photos" / f"{n}.jpg")
    with tarfile.open(inputs / "photos.tar", "w") as tar:
        tar.add(inputs / "photos", "photos")
    with tarfile.open(inputs / "packed.tar", "w:gz") as tar:
        tar.add(inputs / "photos", "photos")


def bodies(folder: Path) -> None:
    """Requests as clients send them; of a form, the first line is the Content-Type."""
    import base64

    (folder / "in").mkdir()
    two_photos(folder)
    images = [(folder / f"{name}.png").read_bytes() for name in "ab"]
    for name in "ab":
        (folder / f"{name}.png").unlink()
    encoded = {f"image{n}": base64.b64encode(images[n]).decode() for n in (0, 1)}
    options = {"threshold": 0.1, "max_matches": 100, "rotate": "never", "geometry": "both", "details": True}
    (folder / "in" / "all.json").write_text(json.dumps({**encoded, **options}))
    (folder / "in" / "short.json").write_text(json.dumps(encoded))
    form = b""
    for n, image in enumerate(images):
        form += f'--edge\r\nContent-Disposition: form-data; name="image{n}"; filename="{n}.png"\r\n'.encode()
        form += b"Content-Type: image/png\r\n\r\n" + image + b"\r\n"
    for key, value in options.items():
        form += f'--edge\r\nContent-Disposition: form-data; name="{key}"\r\n\r\n{value}\r\n'.encode()
    (folder / "in" / "form.data").write_bytes(
        b"multipart/form-data; boundary=edge\n" + form + b"--edge--\r\n"
    )


# ---- what reads them


@cache
def tiny_matcher() -> Matcher:
    return Matcher(config=PRESETS["tiny"], size=64, device="cpu", rotate="never", threshold=0.0)


def read_photo(_: Path, victim: Path) -> None:
    from prism_match.engine.photos import content_of
    from prism_match.images import exif_orientation, image_size

    image_size(victim)
    exif_orientation(victim)
    content_of(victim)
    tiny_matcher().prepare(victim)


def match_photo(folder: Path, victim: Path) -> None:
    prism("match", victim, folder / "other" / "b.png", "-o", folder / "out", *TINY)


def use_mask(folder: Path, victim: Path) -> None:
    other = folder / "other"
    prism("match", other / "a.png", other / "b.png", "--mask0", victim, "-o", folder / "out", *TINY)


def export_matches(folder: Path, victim: Path) -> None:
    prism("export", "hloc", victim, "-o", folder / "out")


def go_on_with_sfm(folder: Path, _: Path) -> None:
    words = ["--pairs", "retrieval", "--neighbours", "2", "--matches-only", "-o", folder / "out", *TINY]
    prism("sfm", folder / "in", *words)


def show_weights(folder: Path, victim: Path) -> None:
    name = "w.safetensors" if victim.name.startswith("w") else "s.safetensors"
    prism("info", folder / "in" / name, "--json")


def average(folder: Path, _: Path) -> None:
    inputs = folder / "in"
    found = [inputs / "w.safetensors", inputs / "s.safetensors", inputs / "run"]
    prism("average", *found, "-o", folder / "out" / "mean.safetensors")


def read_graphs(folder: Path, _: Path) -> None:
    """They are read as they were written, or written anew."""
    kept = kept_graphs(folder)
    if kept.read() is None:
        kept.write(SOME_GRAPHS)
    if kept.read() != SOME_GRAPHS:
        raise ValueError("graphs that nobody wrote")


class Knowing:
    """In place of a matcher: knows the photos of the scene, and what is where in them."""

    device = torch.device("cpu")

    def adjusted(self, **_: Any) -> Knowing:
        return self

    def match(self, *photos: np.ndarray) -> Matches:
        known = [cv2.imread(str(scene().root / "images" / name), 0) for name in scene().names]
        first, second = (
            min(range(len(known)), key=lambda n: cv2.norm(cv2.resize(photo, known[n].shape[::-1]), known[n]))
            for photo in photos
        )
        points = [x.astype(np.float32) for x in true_matches(scene(), first, second)]
        sizes = [photo.shape[1::-1] for photo in photos]
        return Matches(*points, np.ones(len(points[0]), np.float32), *sizes)


def learn_from_model(folder: Path, victim: Path) -> None:
    """What `train-subpixel --colmap` reads, and a step's examples of it."""
    import prism_match.training.consensus as consensus

    consensus.SHARED = 15  # of the scene's 60 points
    kind = "text" if victim.parent.name == "text" else "sparse/0"
    pairs = consensus.ConsensusPairs([folder / "in" / kind], Knowing())  # type: ignore[arg-type]
    pairs.sample(2, 16, torch.Generator().manual_seed(0))


def convert(folder: Path, victim: Path) -> None:
    source = folder / "in" / "run" if "run" in victim.parts else victim
    words = [] if "run" in victim.parts else ["--config", "tiny"]
    (folder / "out").mkdir()
    prism("convert", source, "-o", folder / "out" / "w.safetensors", *words)


def show_settings(_: Path, victim: Path) -> None:
    prism("info", "--model-config", victim)


def read_training_settings(_: Path, victim: Path) -> None:
    from prism_match.training.config import load_train_config

    load_train_config(victim)


def open_model(folder: Path, victim: Path) -> None:
    """All that is done with a model but depth maps: who sees what, a map to localize in, a page to see it."""
    from prism_match.export.nerf import write_transforms
    from prism_match.maps.landmarks import open_map
    from prism_match.maps.viewer import open_shown
    from prism_match.training.depth import choose_sources

    inputs = folder / "in"
    model_folder = inputs / ("text" if victim.parent.name == "text" else "sparse/0")
    shown = open_shown(model_folder, None, inputs / "poses.txt")
    for n, view in enumerate(shown.model.views):
        choose_sources(shown.model, n, 4)
        view.camera.normalise(view.pixels)
    world = open_map(model_folder, None, None, 1000.0, None)
    for name in [v.name for v in shown.model.views][:2]:
        world.lift(name, np.full((4, 2), 20.0), np.ones(4))
        world.pose(name)
    (folder / "out").mkdir()
    write_transforms(folder / "out" / "transforms.json", model_folder, inputs / "images")


def make_depth(folder: Path, victim: Path) -> None:
    kind = "text" if victim.parent.name == "text" else "sparse/0"
    inputs = folder / "in"
    prism(
        "data", "depth", inputs / kind, "--images", inputs / "images", "-o", folder / "out", "--device", "cpu"
    )


def add_to_database(folder: Path, victim: Path) -> None:
    """A copy, since the database is the output."""
    (folder / "out").mkdir()
    shutil.copy(victim, folder / "out" / "database.db")
    prism(
        "export",
        "colmap",
        folder / "other" / "matches.h5",
        "-o",
        folder / "out" / "database.db",
        "--overwrite",
    )


def read_depth(_: Path, victim: Path) -> None:
    from prism_match.frames import read_depth

    read_depth(victim)


def score_pairs(folder: Path, _: Path) -> None:
    words = ["--data", folder / "in" / "pairs.txt", "--method", "sift", "--out", folder / "out"]
    prism("eval", "pairs", *words)


def match_listed(folder: Path, victim: Path) -> None:
    inputs = folder / "in"
    pairs = inputs / "pairs.txt" if victim.name == "cameras.txt" else victim
    words = [
        "--pairs",
        pairs,
        "--intrinsics",
        inputs / "cameras.txt",
        "--matches-only",
        "-o",
        folder / "out",
        *TINY,
    ]
    prism("sfm", inputs / "images", *words)


def match_all(folder: Path, _: Path) -> None:
    inputs = folder / "in"
    words = ["--images", inputs / "images", "-o", folder / "out", "--threads", "1", *TINY]
    prism("match-pairs", inputs / "pairs.txt", *words)


class Shifted:
    """In place of a model, which would find no matches in such photos: the second is the first, moved."""

    size = 64

    def match(self, first: Any, second: Any) -> Matches:
        y, x = np.mgrid[2:44:3, 2:60:3].reshape(2, -1)
        points = np.stack([x, y], axis=1).astype(np.float32)
        noise = np.random.default_rng(0).normal(0, 0.2, points.shape)
        moved = (points + noise + [1.5, 0.5]).astype(np.float32)
        scores = np.ones(len(points), np.float32)
        return Matches(points, moved, scores, first.size, second.size, first.name, second.name)


def align_photos(folder: Path, victim: Path) -> None:
    """The damaged one stays, or is brought onto the other, by every model."""
    import prism_match.cli.align as command

    command.make_matcher = lambda *_, **__: Shifted()  # type: ignore[assignment, return-value]
    rng = Random(victim.stat().st_size)
    pair = [victim, folder / "other" / "b.png"]
    rng.shuffle(pair)
    model = rng.choice(["similarity", "homography", "warp"])
    prism("align", *pair, "-o", folder / "out", "--model", model)


def map_photos(folder: Path, _: Path) -> None:
    from prism_match.images import image_size
    from prism_match.maps.cameras import CameraOptions, choose_cameras

    photos = sorted((folder / "in").iterdir())
    choose_cameras({p.name: (p, size) for p in photos if (size := image_size(p))}, CameraOptions())
    prism(
        "sfm",
        folder / "in",
        "--pairs",
        "sequential",
        "--window",
        "1",
        "--matches-only",
        "-o",
        folder / "out",
        *TINY,
    )


def album(folder: Path) -> None:
    """Photos that tell of their cameras."""
    (folder / "in").mkdir()
    exif = PIL.Image.Exif()
    exif[0x0112], exif[0x010F], exif[0x0110] = 8, "maker", "model"
    exif.get_ifd(0x8769).update({0xA405: 35, 0x920A: 4.2, 0xA20E: 2000.0, 0xA210: 3, 0xA002: 64, 0xA003: 48})
    for n in range(3):
        PIL.Image.fromarray(texture(n)).save(folder / "in" / f"{n}.jpg", exif=exif)


def score_sequence(folder: Path, victim: Path) -> None:
    kind = "flat" if "flat" in victim.parts else "scannet"
    prism("eval", "rgbd", "--data", folder / "in" / kind, "--method", "sift", "--pairs", "2", "--size", "64")


def localize(folder: Path, _: Path) -> None:
    inputs = folder / "in"
    words = [
        "--images",
        inputs / "images",
        "--queries",
        inputs / "q.png",
        "--intrinsics",
        inputs / "cameras.txt",
    ]
    words += ["--pair-list", inputs / "list.txt", "-o", folder / "out"]
    prism("localize", "--map", inputs / "sparse" / "0", *words, *TINY)


def score_homographies(folder: Path, _: Path) -> None:
    prism("eval", "hpatches", "--data", folder / "in", "--method", "sift", "--size", "64")


def score_indexed(folder: Path, victim: Path) -> None:
    if "megadepth" in victim.parts:
        prism(
            "eval", "megadepth1500", "--data", folder / "in" / "megadepth", "--method", "sift", "--size", "64"
        )
    else:
        prism("eval", "scannet1500", "--data", folder / "in" / "scannet", "--method", "sift")


def read_hloc(folder: Path, _: Path) -> None:
    from prism_match.export.hloc import read_dense_matches, read_features, read_sparse_matches

    inputs = folder / "in"
    names = list(read_features(inputs / "features.h5"))
    for _ in read_sparse_matches(inputs / "matches.h5", names):
        pass
    for _ in read_dense_matches(inputs / "matches.h5", names):
        pass


def preview(folder: Path, victim: Path) -> None:
    source = victim.parent if victim.parent.name == "photos" else victim
    words = ["--pairs", "1", "--size", "32", "--device", "cpu", "-o", folder / "out"]
    prism("data", "preview", "--photos", source, *words)


@cache
def client() -> Any:
    from fastapi.testclient import TestClient

    from prism_match.serve.app import create_app
    from prism_match.serve.settings import ServeSettings

    app = create_app(tiny_matcher(), ServeSettings(max_mib=1, max_megapixels=1, timeout=20))
    opened = TestClient(app, base_url="http://localhost", raise_server_exceptions=False)
    opened.__enter__()
    return opened


def ask(_: Path, victim: Path) -> None:
    """Whatever comes, the server has an answer: a result or a sentence, and never that it failed."""
    kind, body = b"application/json", victim.read_bytes()
    if victim.suffix != ".json":
        kind, _, body = body.partition(b"\n")
    refused = ""
    for address in ("/v1/features", "/v1/match"):
        headers = {"content-type": "".join(map(chr, (c for c in kind[:200] if 32 <= c < 127)))}
        answer = client().post(address, content=body, headers=headers)
        if answer.status_code >= 500:
            raise AssertionError(f"{address} answers {answer.status_code}: {answer.text[:200]}")
        if answer.status_code >= 400:
            sentence = answer.json()["error"]
            if not isinstance(sentence, str) or not sentence.isprintable():
                raise AssertionError(f"{address} answers {sentence!r}")
            refused = sentence if address == "/v1/match" else ""
    if refused:
        raise UserError(refused)


TARGETS: dict[str, Target] = {
    "photo": Target(18, photos, read_photo),
    "match": Target(6, photos, match_photo),
    "mask": Target(3, photos, use_mask),
    "matches": Target(12, matches, export_matches),
    "store": Target(8, store, export_matches),
    "sfm that goes on": Target(4, begun_sfm, go_on_with_sfm, ("out/**/*",)),
    "weights": Target(7, weights, show_weights),
    "checkpoint": Target(5, checkpoints, convert),
    "average": Target(3, runs, average),
    "graphs": Target(2, graphs, read_graphs, ("out/**/*",)),
    "model settings": Target(5, settings, show_settings),
    "training settings": Target(3, training_settings, read_training_settings),
    "COLMAP model": Target(10, colmap_model, open_model, ("in/text/*", "in/sparse/0/*")),
    "poses": Target(2, colmap_model, open_model, ("in/*.*",)),
    "depth of a model": Target(1, colmap_model, make_depth, ("in/text/*", "in/sparse/0/*")),
    "real pairs": Target(3, colmap_model, learn_from_model, ("in/text/*", "in/sparse/0/*", "in/images/*")),
    "database": Target(0.3, database, add_to_database),
    "depth map": Target(5, depth_maps, read_depth),
    "pairs with poses": Target(4, pair_list, score_pairs, ("in/pairs.txt",)),
    "eval that goes on": Target(2, pair_list, score_pairs, ("out/pairs.jsonl",)),
    "pairs to match": Target(3, names_list, match_listed, ("in/*.txt",)),
    "match-pairs": Target(
        3, begun_pairs, match_all, ("in/**/*", "out/at-hand.json", "out/store.json", "out/shards/*")
    ),
    "align": Target(4, two_to_align, align_photos),
    "photos to map": Target(4, album, map_photos),
    "RGB-D sequence": Target(4, sequence, score_sequence),
    "localization": Target(3, localized, localize),
    "homographies": Target(3, homographies, score_homographies),
    "index": Target(5, indices, score_indexed),
    "hloc": Target(3, hloc_files, read_hloc),
    "photos to train on": Target(2, training_photos, preview),
    "HTTP body": Target(10, bodies, ask),
}


# ---- one case


@dataclass(frozen=True)
class Case:
    target: str
    seed: int

    def __str__(self) -> str:
        return f"{self.target}:{self.seed}"


def case_of(seed: int, targets: dict[str, Target]) -> Case:
    return Case(Random(seed).choices(list(targets), [t.share for t in targets.values()])[0], seed)


class Corpus:
    """The real files of each target, made once."""

    def __init__(self, root: Path):
        self.root = root

    def of(self, target: str) -> Path:
        folder = self.root / target
        if not folder.is_dir():
            folder.mkdir(parents=True)
            TARGETS[target].make(folder)
            for lock in folder.rglob("*.lock"):
                lock.unlink()
        return folder


@dataclass(frozen=True)
class Outcome:
    refused: bool = False  # by one line, rather than done
    failure: str = ""


def run_case(case: Case, corpus: Corpus, root: Path, most_mib: float, unharmed: bool = False) -> Outcome:
    """In this process. root: a folder for this case alone. unharmed: nothing is changed about the files."""
    target, rng = TARGETS[case.target], Random(str(case))
    folder = root / "around" / "case"
    shutil.copytree(corpus.of(case.target), folder)
    chosen = sorted(p for g in target.victims for p in folder.glob(g) if p.is_file())
    victim = rng.choice(chosen)
    if not unharmed:
        victim.write_bytes(mutate(victim.read_bytes(), KINDS.get(victim.suffix, "bytes"), rng))
    before = snapshot(root)
    forget_peak()
    held = memory_mib("VmRSS")
    said = io.StringIO()
    os.chdir(folder)
    refused, failure = False, ""
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(said),
            native_output() as native,
        ):
            logging.getLogger().handlers.clear()  # they hold the standard error of the case before
            try:
                target.run(folder, victim)
            except SystemExit as left:
                refused = left.code == 2
                if left.code not in (0, 2, None):
                    failure = f"exit code {left.code}"
            except UserError as error:
                refused = True
                said.write(f"prism: {cli.one_line(error)}\n")
    except BaseException as error:
        failure = "".join(traceback.format_exception(error)[-4:])
    finally:
        os.chdir(root.parent)
    lines = said.getvalue().splitlines()
    if "Traceback" in said.getvalue() or "Traceback" in native():
        failure = failure or f"a traceback: {said.getvalue()[-1500:]}{native()[-1500:]}"
    elif refused and not (lines and lines[-1].startswith(("prism: ", "Error: ")) and lines[-1].isprintable()):
        failure = failure or f"refused without one clear line: {said.getvalue()[-500:]!r}"
    elif not failure:
        failure = wrong_files(root, folder / "out", before)
    grown = memory_mib("VmHWM") - held
    if not failure and grown > most_mib:
        failure = f"took {grown:.0f} MiB"
    return Outcome(refused, failure)


@contextlib.contextmanager
def native_output() -> Iterator[Callable[[], str]]:
    """What libraries print by themselves, past Python."""
    sys.__stdout__.flush()
    sys.__stderr__.flush()
    kept = [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile() as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        text: list[bytes] = []
        try:
            yield lambda: b"".join(text).decode("utf-8", "replace")
        finally:
            for number, old in zip((1, 2), kept, strict=True):
                os.dup2(old, number)
                os.close(old)
            file.seek(0)
            text.append(file.read(2**16))


def snapshot(folder: Path) -> dict[Path, tuple[int, int] | None]:
    found: dict[Path, tuple[int, int] | None] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        found[path] = None if path.is_dir() else (status.st_size, status.st_mtime_ns)
    return found


def wrong_files(root: Path, out: Path, before: dict[Path, tuple[int, int] | None]) -> str:
    """A sentence about what should not be there, or be otherwise."""
    after = snapshot(root)
    kept = {state for state in before.values() if state is not None}
    for path, state in after.items():
        if before.get(path, "none") == state:
            continue
        if state in kept and out in path.parents:  # put aside under another name
            continue
        if path != out and out not in path.parents:
            return f"{path.relative_to(root)}: written outside the output folder"
        if state is not None and (problem := half_written(path)):
            return f"{path.relative_to(root)}: {problem}"
    gone = [p for p in before if p not in after and out not in p.parents]
    return f"{gone[0].relative_to(root)}: was removed" if gone else ""


def half_written(path: Path) -> str:
    """What is wrong with a file that a command has left; nothing, if it can be read."""
    if path.name.startswith(".") and path.name != ".lock":
        return "a temporary file is left"
    try:
        if path.suffix == ".png":
            PIL.Image.open(path).load()
        elif path.suffix == ".npz":
            np.load(path, allow_pickle=False)
        elif path.suffix == ".h5":
            with h5py.File(path, "r") as file:
                file.visititems(lambda _, item: item[()] if isinstance(item, h5py.Dataset) else None)
        elif path.suffix == ".json":
            json.loads(path.read_text("utf-8"))
        elif path.suffix == ".safetensors":
            from safetensors.torch import load_file

            load_file(path)
    except Exception as error:
        return f"cannot be read ({type(error).__name__}: {error})"
    return ""


def forget_peak() -> None:
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def memory_mib(what: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) / 1024
    return 0.0


# ---- many cases


def quietly(work: Callable[..., None], *words: Any) -> None:
    """A command that is known to work."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            work(*words)
        except SystemExit as left:
            if left.code:
                raise RuntimeError(f"{words}: {said.getvalue()}") from left


def settle_down() -> None:
    """One thread for everything: a forked process has no other."""
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    warnings.simplefilter("ignore")
    PIL.Image.init()


def worker(cases: list[Case], corpus: Corpus, root: Path, most_mib: float, pipe: int) -> None:
    """Tells of each case that it begins and how it ended."""
    limit = int((memory_mib("VmSize") + HARD_MIB) * 2**20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for case in cases:
        os.write(pipe, b"b\n")
        folder = root / f"seed-{case.seed}"
        outcome = run_case(case, corpus, folder, most_mib)
        shutil.rmtree(folder, ignore_errors=True)
        os.write(pipe, json.dumps([outcome.refused, outcome.failure]).encode() + b"\n")


def run_forked(
    cases: list[Case], corpus: Corpus, root: Path, seconds: float, most_mib: float
) -> Generator[tuple[Case, Outcome], None, None]:
    """Each case with its outcome, in order, whatever becomes of the process it runs in."""
    for case in cases:
        corpus.of(case.target)  # before the fork, so that all have the same
    left = list(cases)
    while left:
        reader, writer = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(reader)
            try:
                worker(left[:CASES_A_PROCESS], corpus, root, most_mib, writer)
            except BaseException:  # the fault of this file
                traceback.print_exc()
            finally:
                os._exit(0)
        os.close(writer)
        with contextlib.closing(listen(process, reader, seconds)) as outcomes:
            for outcome in outcomes:
                yield left.pop(0), outcome


def listen(process: int, reader: int, seconds: float) -> Generator[Outcome, None, None]:
    """seconds: of computing, so that it does not matter what else the machine does; of waiting, far more.
    The process ends with whoever listens."""
    try:
        yield from hear(process, reader, seconds)
    except (GeneratorExit, KeyboardInterrupt):
        with contextlib.suppress(ChildProcessError):  # it has ended before
            if os.waitpid(process, os.WNOHANG) == (0, 0):
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
        raise


def hear(process: int, reader: int, seconds: float) -> Iterator[Outcome]:
    buffer, busy, began, spent = b"", False, time.monotonic(), 0.0
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while True:
            if not select.select([pipe], [], [], 1.0)[0]:
                if cpu_seconds(process) - spent > seconds or time.monotonic() - began > WAITING * seconds:
                    os.kill(process, signal.SIGKILL)
                    os.waitpid(process, 0)
                    yield Outcome(failure=f"took longer than {seconds:g} s")
                    return
                continue
            data = pipe.read(2**16)
            if not data:
                break
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                busy = line == b"b"
                if not busy:
                    yield Outcome(*json.loads(line))
            began, spent = time.monotonic(), cpu_seconds(process)
    _, status = os.waitpid(process, 0)
    if busy:
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        yield Outcome(failure=f"the process ended ({signal.Signals(number).name if number else status})")


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="seed")
    parser.add_argument("--target", action="append", help="only cases of this one; several [all]")
    parser.add_argument("--case", help="TARGET:SEED, as a failure is printed")
    parser.add_argument("--keep", type=Path, help="with --case: a new folder for its files")
    parser.add_argument("--seconds", type=float, default=30.0, help="of computing, for a case")
    parser.add_argument("--minutes", type=float, default=np.inf, help="no further case is begun after these")
    parser.add_argument("--mib", type=float, default=1024.0, help="of a case, at most")
    args = parser.parse_args()
    settle_down()
    if args.case:
        target, _, seed = args.case.rpartition(":")
        cases = [Case(target, int(seed))]
    else:
        targets = {name: t for name, t in TARGETS.items() if not args.target or name in args.target}
        cases = [case_of(seed, targets) for seed in range(args.first, args.first + args.cases)]
    print(f"seeds {cases[0].seed} to {cases[-1].seed}", flush=True)
    start = time.monotonic()
    done, refused, failures = Counter[str](), Counter[str](), []
    with tempfile.TemporaryDirectory(prefix="prism-fuzz-") as name:
        corpus = Corpus(Path(name) / "corpus")
        if args.keep:
            outcome = run_case(cases[0], corpus, args.keep.resolve(), args.mib)
            print(f"{cases[0]}: {outcome}")
            sys.exit(1 if outcome.failure else 0)
        with contextlib.suppress(KeyboardInterrupt):  # then what was done is told
            told = run_forked(cases, corpus, Path(name) / "cases", args.seconds, args.mib)
            for case, outcome in told:
                done[case.target] += 1
                refused[case.target] += outcome.refused
                if outcome.failure:
                    failures.append(case)
                    print(f"FAILED {case}: {outcome.failure}", flush=True)
                if sum(done.values()) % 1000 == 0:
                    print(f"{sum(done.values())} cases, {time.monotonic() - start:.0f} s", flush=True)
                if time.monotonic() - start > 60 * args.minutes:
                    break
            told.close()
    if scene.cache_info().currsize:
        shutil.rmtree(scene().root.parent)
    print(f"\n{'target':<22}{'cases':>8}{'result':>8}{'one line':>10}{'failed':>8}")
    bad = Counter(case.target for case in failures)
    for target in [t for t in TARGETS if done[t]]:
        results = done[target] - refused[target] - bad[target]
        print(f"{target:<22}{done[target]:>8}{results:>8}{refused[target]:>10}{bad[target]:>8}")
    seconds = time.monotonic() - start
    limits = f"limits {args.seconds:g} s, {args.mib:g} MiB"
    print(f"{sum(done.values())} cases, {len(failures)} failed, {seconds:.0f} s; {limits}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
