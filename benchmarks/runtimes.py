"""onnxruntime beside PyTorch: whether they find the same matches, and in what time, on this CPU.

python benchmarks/runtimes.py prism.onnx --half prism-fp16.onnx --data DATA      # the same matches?
python benchmarks/runtimes.py prism.onnx --times 640x480,832x624                 # how long
python benchmarks/runtimes.py --times 640x480,832x624                            # how long, of backend="onnx"
python benchmarks/runtimes.py --data DATA                                        # its matches

The files are those of `prism export onnx`. DATA has Oxford's homographies in `oxford`. Times are of the model
alone, one run of each in turn on the bundled pair; on a machine that others use too, the CPU's own seconds
with --threads 1 mean more than those of the clock.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prism_match import Matcher
from prism_match.evaluation.report import Table
from prism_match.evaluation.speed import fit, load_pair
from prism_match.files import read_words
from prism_match.geometry import warp_points
from prism_match.images import load_image
from prism_match.runtime import import_onnxruntime

onnxruntime = import_onnxruntime()
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
from onnx_only import match as match_by_onnx  # noqa: E402

ASSETS = ROOT / "src" / "prism_match" / "assets"
PAIRS = {"graf": "v_graf 2", "boat": "v_boat 3", "bark": "v_bark 2", "leuven": "i_leuven 4"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--half", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--pairs", default="demo," + ",".join(PAIRS))
    parser.add_argument("--size", type=int, default=640)
    parser.add_argument("--times")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    matcher = Matcher(device="cpu", precision="fp32", size=args.size, rotate="never", polish=False)
    if args.times:
        print(times(matcher, other_way(args), args.times.split(","), args.repeats))
        return
    pairs = {
        "demo": (ASSETS / "astronaut0.jpg", ASSETS / "astronaut1.jpg", ASSETS / "astronaut_homography.txt")
    }
    for name, what in PAIRS.items() if args.data else ():
        folder, n = what.split()
        folder = args.data / "oxford" / folder
        pairs[name] = folder / "1.jpg", folder / f"{n}.jpg", folder / f"H_1_{n}"
    pairs = {name: pairs[name] for name in args.pairs.split(",") if name in pairs}
    if args.model is None:
        own = Matcher(
            device="cpu", precision="fp32", backend="onnx", size=args.size, rotate="never", polish=False
        )
        print(same(matcher, {"backend": own}, pairs))
        return
    model = open_session(args.model, args.threads)
    others = {"fp32": model} | ({"fp16": open_session(args.half, args.threads)} if args.half else {})
    polish = open_session(args.model.with_name(f"{args.model.stem}-polish.onnx"), args.threads)
    print(same(matcher, others, pairs))
    print(errors(matcher, model, polish, pairs))


def open_session(path: Path, threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # it would count as work
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def other_way(args: argparse.Namespace) -> Callable[[list[np.ndarray]], Any]:
    """Two images (1 1 h w) by onnxruntime: by the file, or as `Matcher` has it run the model."""
    if args.model is None:
        other = Matcher(device="cpu", precision="fp32", backend="onnx").model
        return lambda images: by_model(other, images)
    session, threshold = open_session(args.model, args.threads), np.array(0.2, np.float32)
    return lambda images: session.run(
        None, {"image0": images[0], "image1": images[1], "threshold": threshold}
    )


@torch.inference_mode()
def by_model(model: Any, images: list[np.ndarray]) -> None:
    model.match(*(model.extract(torch.from_numpy(x)) for x in images))


def same(matcher: Matcher, others: dict, pairs: dict) -> Table:
    """The model's own matches against those of PyTorch in fp32."""
    rows = []
    for name, (path0, path1, _) in pairs.items():
        plain = matcher.match(path0, path1)
        rows0 = zip(keys(plain.keypoints0), plain.keypoints1, plain.scores, strict=True)
        cells = {k: (p, s) for k, p, s in rows0}
        photos = [load_image(p).gray for p in (path0, path1)]
        for precision, model in others.items():
            if isinstance(model, Matcher):
                found = model.match(path0, path1)
                at0, at1, scores = found.keypoints0, found.keypoints1, found.scores
            else:
                at0, at1, scores = match_by_onnx(model, None, photos, matcher.size)
            both = [
                (np.linalg.norm(p - cells[k][0]), abs(s - cells[k][1]))
                for k, p, s in zip(keys(at0), at1, scores, strict=True)
                if k in cells
            ]
            # A cell whose partner is another one moves by pixels.
            moved, changed = np.array(both).T
            near = moved < 4
            rows.append(
                [name, precision, str(len(plain)), str(len(scores)), str(int(near.sum())),
                 f"{np.percentile(moved[near], 95):.5f}",
                 f"{moved[near].max():.5f}", f"{changed[near].max():.5f}"]
            )  # fmt: skip
            print(*rows[-1], flush=True)
    columns = ["pair", "precision", "PyTorch", "ONNX", "same cells", "95 % px", "most px", "score"]
    return Table("the model's matches", columns, rows)


def errors(matcher: Matcher, model: object, polish: object, pairs: dict) -> Table:
    """Polished, against the known homographies, in pixels of the second photo."""
    exact, rows = matcher.adjusted(polish=True), []
    for name, (path0, path1, homography) in pairs.items():
        h = np.array([[float(w) for w in words] for _, words in read_words(homography)])
        found = exact.match(path0, path1)
        photos = [load_image(p).gray for p in (path0, path1)]
        at0, at1, _ = match_by_onnx(model, polish, photos, matcher.size)  # type: ignore[arg-type]
        line = [name]
        for p, q in ((found.keypoints0, found.keypoints1), (at0, at1)):
            error = np.linalg.norm(warp_points(p, h) - q, axis=1)
            line += [
                f"{np.median(error):.3f}",
                f"{100 * (error < 1).mean():.1f}",
                f"{100 * (error < 3).mean():.1f}",
            ]
        theirs = dict(zip(keys(found.keypoints0), found.keypoints1, strict=True))
        apart = [np.linalg.norm(q - theirs[k]) for k, q in zip(keys(at0), at1, strict=True)
                 if k in theirs]  # fmt: skip
        rows.append([*line, f"{np.median(apart):.4f}", f"{np.percentile(apart, 95):.4f}"])
        print(*rows[-1], flush=True)
    columns = [
        "pair",
        "PyTorch: median px",
        "% < 1",
        "% < 3",
        "ONNX: median px",
        "% < 1",
        "% < 3",
        "apart: median",
        "95 %",
    ]
    return Table("polished matches", columns, rows)


def keys(points: np.ndarray) -> list[tuple[float, ...]]:
    """Of cells, whatever the last bit of their places."""
    return [tuple(p) for p in np.round(points.astype(np.float64), 1).tolist()]


def times(
    matcher: Matcher, other: Callable[[list[np.ndarray]], Any], sizes: list[str], repeats: int
) -> Table:
    rows = []
    for size in sizes:
        images = [fit(x, int(size.split("x")[0]), True) for x in load_pair(None)]
        arrays = [(x.astype(np.float32) / 255)[None, None] for x in images]
        taken = np.zeros((repeats + 1, 2, 2))  # turns, PyTorch and onnxruntime, seconds and the CPU's seconds
        for turn in taken:
            for n in range(2):
                start = time.perf_counter(), time.process_time()
                by_model(matcher.model, arrays) if n == 0 else other(arrays)
                turn[n] = time.perf_counter() - start[0], time.process_time() - start[1]
        taken = taken[1:]
        ratios = taken[:, 1] / taken[:, 0]
        (torch_s, torch_cpu), (onnx_s, onnx_cpu) = np.median(taken, axis=0)
        rows.append(
            [size, f"{torch_s:.2f}", f"{onnx_s:.2f}", f"{np.median(ratios[:, 0]):.2f}", f"{torch_cpu:.2f}",
             f"{onnx_cpu:.2f}", f"{np.median(ratios[:, 1]):.2f}",
             f"{ratios[:, 1].min():.2f} to {ratios[:, 1].max():.2f}"]
        )  # fmt: skip
        print(*rows[-1], flush=True)
    columns = [
        "pixels",
        "PyTorch",
        "onnxruntime",
        "ratio",
        "PyTorch, CPU",
        "onnxruntime, CPU",
        "ratio",
        "each turn's",
    ]
    return Table("seconds", columns, rows)


if __name__ == "__main__":
    main()
