"""MegaDepth in the layout that LoFTR made common, and the index of it built from the raw release.

ROOT/Undistorted_SfM/SCENE/{images,sparse}
ROOT/phoenix/S6/zl548/MegaDepth_v1/SCENE/dense0/depths/*.h5
INDEX/SCENE_0.1_0.7.npz   image_paths, depth_paths, intrinsics, poses, pair_infos; paths from ROOT
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from prism_match.errors import UserError
from prism_match.files import atomic_path, is_file, load_object_arrays, writable_folder
from prism_match.training.data.colmap import Model, read_model
from prism_match.training.data.posed import Frame, PosedPairs

log = logging.getLogger(__name__)

DEPTHS = "phoenix/S6/zl548/MegaDepth_v1"
TEST_SCENES = ("0015", "0022")  # MegaDepth-1500 is made of these: never to be trained on
Undistort = Callable[[Path, Path, Path], None]  # of a model, its images, and where the new ones go
KEYS = ("image_paths", "depth_paths", "intrinsics", "poses", "pair_infos")


class MegaDepthPairs(PosedPairs):
    """Pairs from `scene_info` files."""

    def __init__(
        self,
        root: Path | str,
        scene_infos: Iterable[Path | str],
        device: torch.device | str = "cpu",
        workers: int = 8,
    ):
        files = [Path(f) for f in scene_infos]
        scenes = [read_scene_info(Path(root), file) for file in files]
        if not any(len(pairs) for _, pairs, _ in scenes):
            named = ", ".join(map(str, files[:3])) or "no scene_info files"
            raise UserError(f"MegaDepth: no usable pairs in {named}")
        super().__init__("megadepth", scenes, device, workers, same_size=True)


@dataclass(frozen=True)
class SceneIndex:
    """What a `scene_info` file lists; None where an image has no file, depth map or pose."""

    images: list[str | None]  # paths from the root
    depths: list[str | None]
    K: list[np.ndarray | None]  # 3 3, the centre of the first pixel at (0, 0)
    T: list[np.ndarray | None]  # 4 4, world to camera
    pairs: np.ndarray  # n 2
    overlap: np.ndarray  # n


def read_index(file: Path) -> SceneIndex:
    """Raises UserError with one line when the file is not what it should be."""
    try:
        images, depths, intrinsics, poses, infos = load_object_arrays(file, KEYS)
        pairs = np.array([info[0] for info in infos], np.int64).reshape(-1, 2)
        overlap = np.array([info[1] for info in infos], float)
        if len(pairs) and not 0 <= pairs.min() <= pairs.max() < len(images):
            raise ValueError("a pair names an image that is not listed")
        if not all(path is None or isinstance(path, str) for path in (*images, *depths)):
            raise ValueError("a path in it is no text")
        # The index has COLMAP's principal points.
        half = np.array([[0, 0, 0.5], [0, 0, 0.5], [0, 0, 0]])
        K = [None if k is None else np.array(k, float).reshape(3, 3) - half for k in intrinsics]
        T = [None if t is None else np.array(t, float).reshape(4, 4) for t in poses]
        if not len(images) == len(depths) == len(K) == len(T):
            raise ValueError("not as many depth maps, cameras and poses as images")
    except (OSError, ValueError, KeyError, TypeError, IndexError, ArithmeticError) as e:
        raise UserError(f"{file}: not an index of MegaDepth pairs ({e})") from e
    return SceneIndex(list(images), list(depths), K, T, pairs, overlap)


def read_scene_info(root: Path, file: Path) -> tuple[list[Frame], np.ndarray, np.ndarray]:
    """Frames, pairs n 2 and overlaps n of one `scene_info` file; frames with a bad pose are named, left out.
    Raises UserError with one line when the file is not what it should be."""
    index = read_index(file)
    frames: list[Frame] = []
    rows = np.full(len(index.images), -1)
    for i in np.unique(index.pairs):
        image, depth, K, T = index.images[i], index.depths[i], index.K[i], index.T[i]
        if image is None or depth is None or K is None or T is None:
            continue
        frame = Frame(root / image, root / depth, K, T)
        if problem := frame.problem():
            log.warning("skipped: %s", problem)
            continue
        rows[i] = len(frames)
        frames.append(frame)
    good = (rows[index.pairs] >= 0).all(1)
    return frames, rows[index.pairs][good], index.overlap[good]


# ---- building the index


def build_index(
    root: Path | str,
    out: Path | str,
    overlap: tuple[float, float] = (0.1, 0.7),
    pairs_per_scene: int = 100_000,
    undistort: Undistort | None = None,
) -> list[Path]:
    """Writes one `scene_info` file for each scene that has a model and depth maps; returns their paths.

    Uses `Undistorted_SfM/SCENE` where it exists and makes it from the raw SfM model, by `undistort` (COLMAP's
    is `maps.colmap.undistort`), where it does not. A scene that cannot be used is named and left out, and so
    are the scenes of the benchmark.
    """
    root, out = Path(root), Path(out)
    folders = sorted(p.name for p in (root / DEPTHS).glob("*") if p.is_dir())
    scenes = [name for name in folders if name not in TEST_SCENES]
    if folders and not scenes:
        raise UserError(f"{root / DEPTHS}: no scenes but those of the benchmark, which are not trained on")
    if not scenes:
        raise UserError(f"{root / DEPTHS}: no scenes here; unpack MegaDepth v1 into {root}")
    written: list[Path] = []
    writable_folder(out)
    for scene in tqdm(scenes, desc="scenes", disable=len(scenes) < 2):
        try:
            model = read_model(_undistorted(root, scene, undistort))
            info = scene_info(root, scene, model, overlap, pairs_per_scene)
        except UserError as e:
            log.warning("scene %s left out: %s", scene, e)
            continue
        written.append(out / f"{scene}_{overlap[0]}_{overlap[1]}.npz")
        with atomic_path(written[-1]) as temporary:
            np.savez_compressed(temporary, **info)
    if not written:
        raise UserError(f"{root}: no scene has both an SfM model and depth maps")
    return written


def scene_info(root: Path, scene: str, model: Model, overlap: tuple[float, float], limit: int) -> dict:
    """What a `scene_info` file holds: every view of the model, None for those without image or depth."""
    n = len(model.views)
    info = {key: np.full(n, None, object) for key in KEYS[:4]}
    for i, view in enumerate(model.views):
        image = f"Undistorted_SfM/{scene}/images/{view.name}"
        depth = _depth_of(root, scene, view.name)
        if depth is None or not is_file(root / image) or not np.isfinite(view.T).all():
            continue
        K = view.K.copy()
        K[:2, 2] += 0.5  # COLMAP's convention, as in the published index
        info["image_paths"][i], info["depth_paths"][i] = image, depth
        info["intrinsics"][i], info["poses"][i] = K, view.T
    usable = np.array([p is not None for p in info["image_paths"]])
    if not usable.any():
        raise UserError(f"no image of {model.path} has a depth map")
    pairs = _overlapping(model, usable, overlap)
    if not pairs:
        raise UserError(f"no two images of {model.path} overlap by {overlap[0]} to {overlap[1]}")
    if len(pairs) > limit:
        chosen = np.random.default_rng(0).choice(len(pairs), limit, replace=False)
        pairs = [pairs[k] for k in sorted(chosen)]
    info["pair_infos"] = np.empty(len(pairs), object)
    for k, (a, b, share) in enumerate(pairs):
        info["pair_infos"][k] = np.array([a, b]), share, _central_match(model, a, b)
    return info


def _depth_of(root: Path, scene: str, name: str) -> str | None:
    for folder in sorted((root / DEPTHS / scene).glob("dense*")):
        path = folder / "depths" / Path(name).with_suffix(".h5").name
        if path.is_file():
            return path.relative_to(root).as_posix()
    return None


def _overlapping(model: Model, usable: np.ndarray, overlap: tuple[float, float]) -> list[tuple]:
    """Pairs of views and the share of points they have in common, of the one that sees more."""
    seen = np.array([len(v.points) for v in model.views])
    pairs = []
    for a in np.flatnonzero(usable).tolist():
        share = model.shared_counts(a) / np.maximum(np.maximum(seen, seen[a]), 1)
        good = usable & (share >= overlap[0]) & (share <= overlap[1])
        pairs += [(a, int(b), float(share[b])) for b in np.flatnonzero(good) if b > a]
    return pairs


def _central_match(model: Model, a: int, b: int) -> np.ndarray:
    """4: row and column, in both images, of the shared point nearest to the middle of them."""
    _, in_a, in_b = model.shared(a, b)
    pixels = np.concatenate([model.views[a].pixels[in_a], model.views[b].pixels[in_b]], 1)
    nearest = np.abs(pixels - np.median(pixels, 0)).sum(1).argmin()
    return pixels[nearest][[1, 0, 3, 2]].astype(float)


def _undistorted(root: Path, scene: str, undistort: Undistort | None) -> Path:
    """The folder of the scene's undistorted model, made where only the raw one exists."""
    folder = root / "Undistorted_SfM" / scene
    if folder.is_dir():
        return folder
    for parent in ("SfM", "MegaDepth_v1_SfM", "phoenix/S6/zl548/MegaDepth_v1_SfM"):
        raw = root / parent / scene
        if (raw / "sparse" / "manhattan" / "0").is_dir():
            _undistort(raw / "sparse" / "manhattan" / "0", raw / "images", folder, undistort)
            return folder
    raise UserError(f"no SfM model (looked for {folder} and {root}/MegaDepth_v1_SfM/{scene})")


def _undistort(model: Path, images: Path, out: Path, undistort: Undistort | None) -> None:
    if undistort is None:
        raise UserError(f"{model} has lens distortion, and nothing was given to undistort it")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was interrupted
    try:
        partial.mkdir(parents=True)
        undistort(model, images, partial)
        # Images that COLMAP cannot read are no error to it.
        if not any(p.is_file() for p in (partial / "images").rglob("*")):
            raise UserError(f"no image could be undistorted; are they in {images}?")
        os.replace(partial, out)
    except (RuntimeError, ValueError, OSError) as e:
        raise UserError(f"{model}: undistortion failed ({e})") from e
    finally:
        shutil.rmtree(partial, ignore_errors=True)
