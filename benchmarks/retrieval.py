"""How many of the k images that look most alike do show the same: recall of the global descriptors.

python benchmarks/retrieval.py --strecha DATA/strecha --landmarks DATA/landmarks --rgbd DATA/rgbd_kitchen

Scenes of Strecha, and landmarks (COLMAP models with `images` and `sparse`), are mixed into one set each.

python benchmarks/retrieval.py --made-up 1000000

How many of the 20 nearest the index finds among so many descriptors, how long it takes, and how much memory:
of photos of places, 20 of each on average, and of photos that have no places, of which any is like any other
along 24 dimensions.
"""

from __future__ import annotations

import argparse
import gc
import resource
import time
from pathlib import Path

import cv2
import numpy as np

from prism_match import Matcher
from prism_match.evaluation.posed import camera_matrices
from prism_match.evaluation.report import Table
from prism_match.frames import read_depth
from prism_match.maps.retrieval import exact_search, global_descriptors, index_search, top_pairs, unit
from prism_match.training.data.colmap import read_model

Truth = dict[str, np.ndarray]  # what counts as right: n n, bool


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strecha", type=Path)
    parser.add_argument("--landmarks", type=Path)
    parser.add_argument("--rgbd", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--made-up", type=int, metavar="PHOTOS")
    parser.add_argument(
        "--kinds", nargs="+", default=["places", "none"], help="made up: photos of places, or of none"
    )
    args = parser.parse_args()
    if args.made_up:
        print(index_table(args.made_up, args.kinds))
        return
    matcher = Matcher(device=args.device)
    rows = []
    for name, read in (("strecha", read_strecha), ("landmarks", read_landmarks), ("rgbd", read_rgbd)):
        folder = getattr(args, name)
        if folder is None:
            continue
        images, truths = read(folder)
        descriptors = global_descriptors(matcher, images, progress=True)
        for right, truth in truths.items():
            np.fill_diagonal(truth, False)
            chance = truth.sum() / (len(truth) * (len(truth) - 1))
            values = [chance, *(recall(descriptors, truth, k) for k in (5, 10))]
            rows.append([name, str(len(images)), right, *(f"{100 * v:.1f} %" for v in values)])
    print(Table("retrieval", ["set", "images", "right", "by chance", "k = 5", "k = 10"], rows))


def recall(descriptors: np.ndarray, truth: np.ndarray, k: int) -> float:
    """Of k, or of all that are right where there are fewer; mean over the images that have any."""
    first, second = top_pairs(descriptors, None, k).T
    hits = np.bincount(first, truth[first, second], minlength=len(truth))
    there = truth.sum(axis=1)
    return float((hits / np.clip(there, 1, k))[there > 0].mean())


def index_table(count: int, kinds: list[str], k: int = 20, asked: int = 1000, timed: int = 10_000) -> Table:
    rows = []
    for name in kinds:
        descriptors = made_up(count, count // 20 if name == "places" else 0)
        began = time.perf_counter()
        truth = exact_search(descriptors)(descriptors[:asked], k + 1)
        exact = (time.perf_counter() - began) / asked
        gc.collect()
        began = time.perf_counter()
        search = index_search(descriptors)
        built = time.perf_counter() - began
        began = time.perf_counter()
        found = search(descriptors[:timed], k + 1)
        searched = (time.perf_counter() - began) / min(timed, count)
        both = zip(found[:asked].tolist(), truth.tolist(), strict=True)
        hits = [len({*a} & {*b} - {n}) / k for n, (a, b) in enumerate(both)]
        rows.append([
            name, f"{100 * np.mean(hits):.1f} %", f"{built:.0f} s", f"{1e3 * searched:.2f} ms",
            f"{(built + searched * count) / 60:.0f} min", f"{1e3 * exact:.1f} ms",
            f"{exact * count / 60:.0f} min",
            f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB",
        ])  # fmt: skip
    columns = [
        "",
        f"recall@{k}",
        "index",
        "a query",
        "all",
        "exact, a query",
        "exact, all",
        "most memory so far",
    ]
    return Table(f"{count} made-up descriptors of {WIDTH} numbers", columns, rows)


WIDTH, DIMENSIONS = 512, 24  # of a descriptor; along which photos really differ


def made_up(count: int, places: int) -> np.ndarray:
    """n d, of unit length, none negative, as descriptors are; with noise. places: 0: none."""
    rng = np.random.default_rng(0)
    directions = rng.standard_normal((DIMENSIONS, WIDTH), dtype=np.float32)
    centres = rng.standard_normal((max(places, 1), DIMENSIONS), dtype=np.float32)
    descriptors = np.empty((count, WIDTH), np.float32)
    for start in range(0, count, 2**15):
        part = descriptors[start : start + 2**15]
        at = rng.standard_normal((len(part), DIMENSIONS), dtype=np.float32)
        if places:
            at = centres[rng.integers(places, size=len(part))] + 0.4 * at
        noise = np.abs(rng.standard_normal(part.shape, dtype=np.float32))
        part[:] = unit(np.maximum(at @ directions, 0) + 0.5 * noise)
    return descriptors


def read_strecha(root: Path) -> tuple[list[Path], Truth]:
    images, scenes, axes = [], [], []
    for file in sorted(root.glob("*/cameras.txt")):
        for line in file.read_text(encoding="utf-8").splitlines():
            if not line.startswith("#") and line.strip():
                name, *numbers = line.split()
                images.append(file.parent / "images" / name)
                scenes.append(file.parent.name)
                axes.append(camera_matrices(np.array(numbers, dtype=float))[1][2, :3])
    same = np.equal.outer(np.array(scenes), np.array(scenes))
    angle = np.degrees(np.arccos(np.clip(np.array(axes) @ np.array(axes).T, -1, 1)))
    return images, {"same scene": same, "same scene, within 30 degrees": same & (angle < 30)}


def read_landmarks(root: Path) -> tuple[list[Path], Truth]:
    images: list[Path] = []
    blocks = []
    for folder in sorted(p for p in root.iterdir() if (p / "sparse").is_dir()):
        model = read_model(folder)
        images += [folder / "images" / view.name for view in model.views]
        blocks.append(np.stack([model.shared_counts(n) for n in range(len(model.views))]))
    same, shared = np.zeros((len(images),) * 2, bool), np.zeros((len(images),) * 2, int)
    start = 0
    for block in blocks:
        part = slice(start, start + len(block))
        same[part, part], shared[part, part] = True, block
        start += len(block)
    return images, {"same landmark": same, "at least 30 common points": shared >= 30}


def read_rgbd(root: Path) -> tuple[list[Path], Truth]:
    images = sorted(root.glob("*.color.jpg"))
    stems = [str(p).removesuffix(".color.jpg") for p in images]
    K = np.loadtxt(root / "camera-intrinsics.txt")[:3, :3]
    depths = [read_depth(f"{stem}.depth.png") for stem in stems]
    poses = [np.loadtxt(f"{stem}.pose.txt") for stem in stems]  # camera to world
    overlap = np.array([[seen(a, b, K, depths, poses) for b in range(len(stems))] for a in range(len(stems))])
    return images, {"30 % overlap": np.minimum(overlap, overlap.T) >= 0.3}


def seen(a: int, b: int, K: np.ndarray, depths: list[np.ndarray], poses: list[np.ndarray]) -> float:
    """The share of frame a that frame b sees at the depth where it should be."""
    height, width = depths[a].shape
    y, x = np.mgrid[4:height:16, 4:width:16]
    z = depths[a][y, x]
    rays = np.stack([x, y, np.ones_like(x)], -1)[z > 0] @ np.linalg.inv(K).T * z[z > 0, None]
    T = np.linalg.inv(poses[b]) @ poses[a]
    p = rays @ T[:3, :3].T + T[:3, 3]
    at = (p / np.maximum(p[:, 2:], 1e-6)) @ K.T
    there = cv2.remap(depths[b], *at[:, :2].astype(np.float32).T, cv2.INTER_NEAREST, borderValue=0).ravel()
    return float(((p[:, 2] > 0.1) & (np.abs(there - p[:, 2]) < 0.1 * p[:, 2])).mean()) if len(p) else 0.0


if __name__ == "__main__":
    main()
