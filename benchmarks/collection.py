"""How far the cameras of `prism data collect` are from those of a model that is given.

prism data collect DATA/landmarks/toulon_fountain/images -o out ...
python benchmarks/collection.py out DATA/landmarks/toulon_fountain
"""

from __future__ import annotations

import argparse
from itertools import combinations
from pathlib import Path

import numpy as np

from prism_match.colmap_model import PosedView, is_model, read_model
from prism_match.geometry import align_similarity, rotation_angle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path, help="what `prism data collect` wrote")
    parser.add_argument("given", type=Path, help="a COLMAP model of the same photos")
    arguments = parser.parse_args()
    given = {view.name: view for view in read_model(arguments.given).views}
    models = {
        "all photos": arguments.out / "work" / "first",
        "without doubtful pairs": arguments.out / "work" / "final",
        "kept": arguments.out,
    }
    print("| | cameras | relative rotation: median, worst (deg) | centre: median, worst (% of the extent) |")
    print("|---|---:|---:|---:|")
    for what, folder in models.items():
        if is_model(folder):
            found = {view.name: view for view in read_model(folder).views if view.name in given}
            print(f"| {what} | {len(found)} of {len(given)} | {compare(found, given)} |")


def compare(found: dict[str, PosedView], given: dict[str, PosedView]) -> str:
    angles = []
    for a, b in combinations(sorted(found), 2):
        turns = [views[b].T[:3, :3] @ views[a].T[:3, :3].T for views in (found, given)]
        angles.append(rotation_angle(*turns))
    here, there = (np.stack([views[name].centre for name in sorted(found)]) for views in (found, given))
    scale, rotation, translation = align_similarity(here, there)
    extent = np.linalg.norm(np.ptp([view.centre for view in given.values()], axis=0))
    off = 100 * np.linalg.norm(scale * here @ rotation.T + translation - there, axis=1) / extent
    return f"{np.median(angles):.1f}, {max(angles):.1f} | {np.median(off):.1f}, {off.max():.1f}"


if __name__ == "__main__":
    main()
