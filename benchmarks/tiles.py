"""What tiles bring: right matches and their error, with tiles and in one pass.

    python benchmarks/tiles.py generated --side 6000 --seen 0.5 --size 832 --single 1152
    python benchmarks/tiles.py generated --side 16000 --seen 0.2 --keep FOLDER
    python benchmarks/tiles.py files FOLDER --size 832 --memory 2
    python benchmarks/tiles.py zoom PHOTO... --zooms 3,4,6,8 --turn 90 --size 832
    python benchmarks/tiles.py posed DATA/strecha --pairs 8 --size 480 --single 480,1024
    python benchmarks/tiles.py scales DATA/megadepth --least 2 --only 0.1_0.3 --keep FOLDER

generated: two parts (--side pixels) of a mosaic of scikit-image's pictures and noise, which overlap by about
the share --seen of the width and height; the second is turned, tilted, darker and noisy. Errors are against
the homography. files: such a pair from TIFFs, which are read by windows.
zoom: PHOTO against 1/zoom of itself, of as many pixels each detail, warped by a homography, darker and
with noise, turned by --turn degrees. posed: pairs of calibrated photos; distances to the true epipolar lines.
scales: pairs of MegaDepth whose scale changes by --least or more, told by the true cameras and the matches
that agree with them, since few pairs have depth; the AUC of their poses. What is done is kept
in FOLDER.
"""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Annotated, Any, Optional

import cv2
import numpy as np
import torch
import typer

from prism_match import Matcher, Matches
from prism_match.certainty import calibration_error
from prism_match.geometry import skew, warp_points
from prism_match.images import load_image

RIGHT = 3.0  # pixels of the images themselves
app = typer.Typer(add_completion=False, help=__doc__)
Size = Annotated[int, typer.Option(help="Of the first pass, and of tiles.")]
Out = Annotated[Optional[Path], typer.Option("--json", help="Rows go here, too.")]
Threads = Annotated[int, typer.Option(help="Of the CPU.")]


def mosaic(side: int, seed: int) -> np.ndarray:
    """side side, uint8."""
    from skimage import data

    g = np.random.default_rng(seed)
    pictures = [data.astronaut(), data.coffee(), data.chelsea(), data.rocket(), data.brick(), data.grass(),
                data.gravel(), data.camera(), data.moon()]  # fmt: skip
    gray = [p if p.ndim == 2 else cv2.cvtColor(p, cv2.COLOR_RGB2GRAY) for p in pictures]
    canvas = np.zeros((side, side), np.float32)
    for step in (4, 16, 64, 256):
        noise = g.standard_normal((side // step + 2,) * 2).astype(np.float32)
        canvas += cv2.resize(noise, (side, side), interpolation=cv2.INTER_CUBIC)
    canvas = (canvas * 25 + 128).clip(0, 255)
    for _ in range(round((side / 260) ** 2)):
        picture = gray[g.integers(len(gray))]
        scale = g.uniform(0.3, 1.2) * 512 / max(picture.shape)
        matrix = cv2.getRotationMatrix2D((0, 0), g.uniform(0, 360), scale)
        corners = np.array([[0, 0], [1, 0], [0, 1], [1, 1]]) * picture.shape[::-1] @ matrix[:, :2].T
        width, height = (int(n) for n in np.ceil(np.ptp(corners, axis=0)) + 1)
        if max(width, height) >= side:
            continue
        matrix[:, 2] = -corners.min(0)
        there = cv2.warpAffine(picture, matrix, (width, height), flags=cv2.INTER_AREA)
        alpha = cv2.warpAffine(np.ones_like(picture), matrix, (width, height), flags=cv2.INTER_NEAREST)
        x, y = g.integers(0, side - width), g.integers(0, side - height)
        part = canvas[y : y + height, x : x + width]
        part[alpha > 0] = there[alpha > 0]
    return canvas.astype(np.uint8)


def seen_again(
    image: np.ndarray,
    size: tuple[int, int],
    centre: tuple[float, float],
    turn: float,
    scale: float,
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:
    """What another camera sees around `centre`, darker and with noise, and the homography to it."""
    g = np.random.default_rng(seed)
    homography = np.eye(3)
    homography[:2] = cv2.getRotationMatrix2D(centre, turn, scale)
    homography[:2, 2] += np.array(size) / 2 - 0.5 - np.array(centre)
    tilt = np.eye(3)
    tilt[2, :2] = g.uniform(-0.15, 0.15, 2) / np.array(size)
    shift = np.eye(3)
    shift[:2, 2] = np.array(size) / 2
    homography = shift @ tilt @ np.linalg.inv(shift) @ homography
    flags = cv2.INTER_CUBIC if scale > 0.7 else cv2.INTER_AREA
    there = cv2.warpPerspective(image, homography, size, flags=flags).astype(np.float32)
    there = 255 * (there.clip(0, 255) / 255) ** 1.2 + g.normal(0, 3, there.shape)
    return there.clip(0, 255).astype(np.uint8), homography


def compare(
    image0: Any, image1: Any, matchers: dict[str, Matcher], errors: Any, facts: dict[str, Any]
) -> list[dict[str, Any]]:
    rows = []
    for name, matcher in matchers.items():
        start = time.perf_counter()
        found = matcher.match(image0, image1)
        seconds = time.perf_counter() - start
        error = errors(found)
        right = error < RIGHT
        rows.append(
            facts
            | {
                "how": name,
                "matches": len(found),
                "right": int(right.sum()),
                "precision": round(float(right.mean()), 3) if len(found) else None,
                "median error of right ones": round(float(np.median(error[right])), 3)
                if right.any()
                else None,
                "within 1 px": int((error < 1).sum()),
                "mean certainty": None
                if found.certainty is None
                else round(float(found.certainty.mean()), 3),
                "calibration error": None
                if found.certainty is None
                else round(calibration_error(found.certainty, right), 3),
                "seconds": round(seconds, 1),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def ways(size: int, single: list[int], threads: int, device: str = "auto") -> dict[str, Matcher]:
    torch.set_num_threads(threads)
    matcher = Matcher(size=size, device=device)
    plain = {f"one pass, {n} px": matcher.adjusted(size=n) for n in single}
    return plain | {f"tiles, {size} px": matcher.adjusted(tiles="auto")}


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def write(rows: list[dict[str, Any]], out: Path | None) -> None:
    if out is not None:
        out.write_text(json.dumps(rows, indent=1) + "\n")


@app.command()
def generated(
    side: int = 6000,
    seen: float = 0.5,
    size: Size = 832,
    single: str = "1152",
    seeds: int = 1,
    threads: Threads = 2,
    out: Out = None,
    keep: Annotated[Optional[Path], typer.Option(help="Folder for the first pair, for `files`.")] = None,
) -> None:
    rows = []
    for seed in range(seeds):
        larger = mosaic(round(side * (2 - seen)), seed)
        image0 = np.ascontiguousarray(larger[:side, :side])
        centre = (side * (1.5 - seen), side * (1.5 - seen))
        image1, truth = seen_again(larger, (side, side), centre, 12, 0.95, seed)
        if keep is not None:
            keep_pair(keep, image0, image1, truth)
            return
        facts = {"side": side, "seen": seen, "seed": seed}
        rows += compare(image0, image1, ways(size, numbers(single), threads), against(truth), facts)
    write(rows, out)


def keep_pair(folder: Path, image0: np.ndarray, image1: np.ndarray, truth: np.ndarray) -> None:
    import rasterio

    folder.mkdir(parents=True, exist_ok=True)
    for name, image in (("0.tif", image0), ("1.tif", image1)):
        shape = {"height": image.shape[0], "width": image.shape[1], "count": 1, "dtype": "uint8"}
        with rasterio.open(folder / name, "w", driver="GTiff", tiled=True, **shape) as file:
            file.write(image, 1)
    np.savetxt(folder / "truth.txt", truth)


@app.command()
def files(folder: Path, size: Size = 832, memory: float = 2.0, threads: Threads = 2, out: Out = None) -> None:
    """A pair that `generated --keep` has written, read by windows, and what the process took of memory."""
    torch.set_num_threads(threads)
    matcher = Matcher(size=size, tiles="auto", tile_memory=memory)
    errors = against(np.loadtxt(folder / "truth.txt"))
    rows = compare(
        folder / "0.tif", folder / "1.tif", {"tiles": matcher}, errors, {"memory": memory, "size": size}
    )
    rows[0]["GiB at most"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
    print(f"at most {rows[0]['GiB at most']} GiB")
    write(rows, out)


@app.command()
def zoom(
    photos: list[Path],
    zooms: str = "3,4,6,8",
    turn: float = 0,
    size: Size = 832,
    threads: Threads = 2,
    out: Out = None,
) -> None:
    rows = []
    for photo in photos:
        wide = np.uint8(load_image(photo).gray * 255)
        height, width = wide.shape
        for n, ratio in enumerate(numbers(zooms)):
            detail = (round(width / ratio), round(height / ratio))
            centre = (width * 0.5, height * 0.55)
            image1, truth = seen_again(wide, detail, centre, 7 + turn, 1.0, n)
            facts = {"photo": photo.name, "zoom": ratio, "turn": turn}
            rows += compare(wide, image1, ways(size, [size], threads), against(truth), facts)
    write(rows, out)


@app.command()
def posed(
    data: Path,
    pairs: int = 8,
    size: Size = 480,
    single: str = "480,1024",
    threads: Threads = 2,
    out: Out = None,
) -> None:
    from prism_match.evaluation.posed import read_calibrated

    listed = [p for p in read_calibrated(data) if not p.problem]
    rows = []
    for pair in listed[:: max(1, len(listed) // pairs)][:pairs]:
        assert pair.T_0to1 is not None
        essential = skew(pair.T_0to1[:3, 3]) @ pair.T_0to1[:3, :3]
        truth = np.linalg.inv(pair.K1).T @ essential @ np.linalg.inv(pair.K0)
        facts = {"pair": pair.name}
        matchers = ways(size, numbers(single), threads)
        rows += compare(pair.image0, pair.image1, matchers, to_lines(truth), facts)
    write(rows, out)


@app.command()
def scales(
    data: Path,
    keep: Annotated[Path, typer.Option(help="Folder; a run goes on where it was.")],
    least: float = 2.0,
    size: Size = 832,
    first: Annotated[int, typer.Option(help="Size that pairs are chosen at.")] = 480,
    only: Annotated[str, typer.Option(help="Of lists with this in their name.")] = "",
    threads: Threads = 2,
) -> None:
    from prism_match.evaluation.megadepth import read_megadepth

    torch.set_num_threads(threads)
    keep.mkdir(parents=True, exist_ok=True)
    matcher = Matcher(size=size)
    manners = {"one pass": matcher, "tiles": matcher.adjusted(tiles="auto")}
    found: list[tuple[Any, float, dict[str, Matches]]] = []
    for n, pair in enumerate(p for p in read_megadepth(data) if not p.problem):
        if only not in pair.split:
            continue
        small = kept(keep / f"{n}-first.npz", matcher.adjusted(size=first, polish=False), pair)
        ratio = change_of_scale(pair, small)
        if not ratio >= least:
            continue
        each = {name: kept(keep / f"{n}-{name}.npz", way, pair) for name, way in manners.items()}
        found.append((pair, ratio, each))
        counts = {name: len(m) for name, m in each.items()}
        print(json.dumps({"pair": pair.name, "ratio": round(ratio, 2), **counts}), flush=True)
    for low, high in ((least, 3.0), (3.0, np.inf)):
        some = [(pair, each) for pair, ratio, each in found if low <= ratio < high]
        for name in manners if some else ():
            print(
                f"[{low:g}, {high:g}), {len(some)} pairs, {name}: {scored([(p, m[name]) for p, m in some])}"
            )


def scored(pairs: list[tuple[Any, Matches]]) -> str:
    """Of pairs and their matches: how many of these there are, the share of right ones, and the AUC of the
    poses, as means of five seeds, with the standard deviation of a seed."""
    from prism_match.evaluation.metrics import POSE_THRESHOLDS, auc
    from prism_match.evaluation.pose import THRESHOLDS, PoseScorer

    words = [f"{np.mean([len(m) for _, m in pairs]):.0f} matches"]
    words.append(f"{sum(len(m) < 50 for _, m in pairs)} pairs below 50")
    for backend in ("opencv", "poselib"):
        rows = []
        for seed in range(5):
            scorer = PoseScorer(backend, THRESHOLDS[backend], seed)  # type: ignore[arg-type, index]
            scores = [scorer(pair, m) for pair, m in pairs]
            rows.append(list(auc([s.error for s in scores], POSE_THRESHOLDS).values()))
        means, deviations = (" / ".join(f"{x:.1f}" for x in f(rows, axis=0)) for f in (np.mean, np.std))
        words.append(f"{backend} {means} ({deviations})")
    words.insert(1, f"{np.mean([s.precision for s in scores]):.1f} % right")
    return ", ".join(words)


def kept(file: Path, matcher: Matcher, pair: Any) -> Matches:
    if not file.exists():
        matcher.match(pair.image0, pair.image1).save(file)
    return Matches.load(file)


def change_of_scale(pair: Any, found: Matches) -> float:
    """As of depth maps (`evaluation/covisible.py`): the median of (focal length / depth) in one photo over
    that in the other, as they are, of triangulated matches; NaN where fewer than 10 are right."""
    from prism_match.evaluation.metrics import EPIPOLAR_THRESHOLD, epipolar_errors
    from prism_match.geometry import normalise

    errors = epipolar_errors(found.keypoints0, found.keypoints1, pair.K0, pair.K1, pair.T_0to1)
    right = errors < EPIPOLAR_THRESHOLD
    x0, x1 = normalise(found.keypoints0[right], pair.K0), normalise(found.keypoints1[right], pair.K1)
    points = cv2.triangulatePoints(np.eye(4)[:3], pair.T_0to1[:3], x0.T.astype(float), x1.T.astype(float))
    points = points[:3] / points[3]
    depth0, depth1 = points[2], (pair.T_0to1[:3, :3] @ points + pair.T_0to1[:3, 3:])[2]
    front = (depth0 > 0) & (depth1 > 0)
    if front.sum() < 10:
        return float("nan")
    ratio = float(np.median(depth0[front] / depth1[front])) * pair.K1[0, 0] / pair.K0[0, 0]
    return max(ratio, 1 / ratio)


def against(homography: np.ndarray) -> Any:
    def errors(found: Matches) -> np.ndarray:
        return np.linalg.norm(warp_points(found.keypoints0, homography) - found.keypoints1, axis=1)

    return errors


def to_lines(fundamental: np.ndarray) -> Any:
    def errors(found: Matches) -> np.ndarray:
        """Pixels of image 1 to the epipolar line."""
        lines = np.c_[found.keypoints0, np.ones(len(found))] @ fundamental.T
        distance = np.abs(np.sum(np.c_[found.keypoints1, np.ones(len(found))] * lines, axis=1))
        return distance / np.linalg.norm(lines[:, :2], axis=1)

    return errors


if __name__ == "__main__":
    app()
