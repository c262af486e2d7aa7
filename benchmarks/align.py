"""Which map `prism align` chooses, and how far it is from the truth.

python benchmarks/align.py --size 480 --seeds 4 --homographies DATA/oxford

Of the bundled portrait, parts that are moved by a random similarity, a homography or a smooth bend; and of
sequences laid out as HPatches, all pairs. Errors are in pixels of the second picture, over the pixels of the
first that both show.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np

from prism_match import Matcher, UserError
from prism_match.alignment import align_matches
from prism_match.evaluation.bundled import BUNDLED
from prism_match.evaluation.hpatches import read_hpatches
from prism_match.geometry import warp_points
from prism_match.images import load_image

WIDTH, HEIGHT = 400, 300
Points = Callable[[np.ndarray], np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--homographies", type=Path)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=832)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    matcher = Matcher(device=args.device, size=args.size)
    photo = load_image(BUNDLED["astronaut"].photos[0]).rgb
    print("| pairs | number | chosen | median error, px | worst pair, px |\n|---|---|---|---|---|")
    for kind, make in (("similarity", similarity), ("homography", homography), ("bend", bend)):
        outcomes = []
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            truth = make(np.random.default_rng(seed))
            at = truth(grid(WIDTH, HEIGHT, 1)).reshape(HEIGHT, WIDTH, 2).astype(np.float32)
            first = cv2.remap(photo, at[..., 0], at[..., 1], cv2.INTER_LINEAR)
            outcomes.append(try_pair(matcher, first, photo, truth))
        report(kind, outcomes)
    if args.homographies is not None:
        for name in ("v", "i"):
            pairs = [
                p for p in read_hpatches(args.homographies) if p.scene.startswith(name) and p.H is not None
            ]
            report(
                f"{args.homographies.name}, {'viewpoint' if name == 'v' else 'light, blur, JPEG'}",
                [try_pair(matcher, p.image0, p.image1, lambda x, H=p.H: warp_points(x, H)) for p in pairs],
            )


def grid(width: int, height: int, step: int) -> np.ndarray:
    x, y = np.meshgrid(np.arange(0, width, step), np.arange(0, height, step))
    return np.stack([x, y], axis=-1).reshape(-1, 2).astype(float)


def similarity(g: np.random.Generator) -> Points:
    turn, scale = g.uniform(-0.4, 0.4), g.uniform(0.8, 1.2)
    c, s = scale * np.cos(turn), scale * np.sin(turn)
    about = np.array([[c, -s, 0], [s, c, 0], [0, 0, 1.0]])
    about[:2, 2] = np.array([256, 256]) - about[:2, :2] @ [WIDTH / 2, HEIGHT / 2] + g.uniform(-20, 20, 2)
    return lambda points: warp_points(points, about)


def homography(g: np.random.Generator) -> Points:
    tilted = np.eye(3)
    tilted[2, :2] = g.choice([-1, 1], 2) * g.uniform(3e-4, 8e-4, 2)
    middle = np.array([[1, 0, -WIDTH / 2], [0, 1, -HEIGHT / 2], [0, 0, 1.0]])
    base = similarity(g)
    return lambda points: base(warp_points(points, np.linalg.inv(middle) @ tilted @ middle))


def bend(g: np.random.Generator) -> Points:
    """By up to 8 pixels, over about a third of the picture."""
    base, phase, length = homography(g), g.uniform(0, 6, 2), g.uniform(50, 90, 2)
    return lambda points: base(points) + 8 * np.sin(points[:, ::-1] / length + phase)


def try_pair(matcher: Matcher, first: object, second: object, truth: Points) -> tuple[str, float]:
    matches = matcher.match(first, second)  # type: ignore[arg-type]
    try:
        found = align_matches(matches, unit=max(1.0, max(matches.size1) / matcher.size))
    except UserError:
        return "refused", np.inf
    points = grid(*matches.size0, 8)
    there = truth(points)
    seen = np.all((there >= 0) & (there <= np.array(matches.size1) - 1), axis=1)
    return found.model, float(np.median(np.linalg.norm(found.map(points[seen]) - there[seen], axis=1)))


def report(name: str, outcomes: list[tuple[str, float]]) -> None:
    chosen = ", ".join(f"{model} {count}" for model, count in Counter(m for m, _ in outcomes).most_common())
    errors = [e for _, e in outcomes if np.isfinite(e)]
    worst = f"{np.max(errors):.2f}" if errors else "-"
    print(f"| {name} | {len(outcomes)} | {chosen} | {np.median(errors):.2f} | {worst} |", flush=True)


if __name__ == "__main__":
    main()
