"""Whether the model arranged for matching finds on this machine what the plain one finds, in each precision.

python benchmarks/precisions.py --data DATA                  # DATA has Oxford's homographies in `oxford`
python benchmarks/precisions.py --data DATA --precisions bf16 --pairs "v_graf 2,i_leuven 4"

The plain one is `PRISM` of prism.py in fp32. Cells are the same where both have a match that begins in the
same cell and ends less than 4 px apart; errors are those of polished matches against the known homography, in
pixels of the second photo.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import numpy as np
import torch

from prism_match import Matcher
from prism_match.evaluation.report import Table
from prism_match.files import read_words
from prism_match.geometry import warp_points
from prism_match.matches import Matches
from prism_match.model.fast import AutocastPRISM
from prism_match.weights import build_model

PAIRS = "v_graf 2,v_boat 3,v_bark 2,v_wall 3,i_leuven 4,i_bikes 3"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--pairs", default=PAIRS)
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--size", type=int, default=640)
    args = parser.parse_args()
    ways = {
        name: Matcher(device=args.device, precision=name, size=args.size, rotate="never", polish=False)
        for name in args.precisions.split(",")
    }
    plain = copy.copy(next(iter(ways.values())))
    plain.model = AutocastPRISM(build_model(plain.info).to(plain.device), torch.float32)
    plain.dtype = torch.float32
    rows = []
    for pair in args.pairs.split(","):
        folder, n = pair.split()
        paths = [args.data / "oxford" / folder / name for name in ("1.jpg", f"{n}.jpg")]
        h = np.array([[float(w) for w in words] for _, words in read_words(paths[0].with_name(f"H_1_{n}"))])
        expected = plain.match(*paths)
        for name, way in {"plain": plain, **ways}.items():
            found = expected if name == "plain" else way.match(*paths)
            same = apart(expected, found)
            error = errors(way.adjusted(polish=True).match(*paths), h)
            rows.append(
                [pair, name, str(len(found)), str(len(same)),
                 *(f"{np.percentile(same, q):.5f}" for q in (50, 95, 99)),
                 f"{np.median(error):.3f}", *(f"{100 * (error < px).mean():.1f}" for px in (1, 3))]
            )  # fmt: skip
            print(*rows[-1], flush=True)
    columns = ["pair", "", "matches", "same cells", "50 % px", "95 %", "99 %", "error px", "% < 1", "% < 3"]
    print(Table("against the plain model, and against the truth", columns, rows))


def apart(expected: Matches, found: Matches) -> np.ndarray:
    """How far matches of the same cells are from one another."""
    where = dict(zip(cells(expected), expected.keypoints1, strict=True))
    both = [
        np.linalg.norm(where[k] - p)
        for k, p in zip(cells(found), found.keypoints1, strict=True)
        if k in where
    ]
    return np.array([d for d in both if d < 4])


def cells(matches: Matches) -> list[tuple[float, ...]]:
    """Whatever the last bit of their places."""
    return [tuple(p) for p in np.round(matches.keypoints0.astype(np.float64), 1).tolist()]


def errors(matches: Matches, homography: np.ndarray) -> np.ndarray:
    return np.linalg.norm(warp_points(matches.keypoints0, homography) - matches.keypoints1, axis=1)


if __name__ == "__main__":
    main()
