"""How exact the depth of a posed collection is, after the first sweep and after the second.

The sparse points that two photos share are moved from one into the other by the depth of the map, and by that
of the point itself, which is as good as the collection's own cameras and corners are.

python benchmarks/depth.py DATA/landmarks/gateway_of_india --view 3 --device cpu
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from prism_match.training.data.colmap import Model, read_model
from prism_match.training.depth import (
    SweepConfig,
    agreeing_depth,
    choose_sources,
    finer_depth,
    load_photos,
    refine,
    sweep,
)
from prism_match.training.supervision import depth_at

MEASURED = 2  # maps, of the view and of its best neighbour


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("collection", type=Path, help="a COLMAP model with `images` in it")
    parser.add_argument("--view", type=int, default=0, help="number of the photo")
    parser.add_argument(
        "--views", type=int, default=5, help="maps that are made: of the photo and of neighbours"
    )
    parser.add_argument("--sources", type=int, default=4, help="photos that each is compared with")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    model, config = read_model(args.collection), replace(SweepConfig(), sources=args.sources, checks=6)
    around = {args.view: choose_sources(model, args.view, config.checks)}
    views = [args.view, *around[args.view]][: args.views]
    around |= {i: choose_sources(model, i, config.checks) for i in views}
    needed = sorted({j for i in views for j in (i, *around[i][: config.sources])})
    photos = load_photos(model, args.collection / "images", needed, args.device)
    raw = {i: sweep(model, photos, i, around[i][: config.sources], config)[0] for i in views}
    fine = {i: refine(model, photos, i, around[i][: config.sources], raw[i], config) for i in views}
    first, second = {}, {}
    for i in views[:MEASURED]:
        others = [j for j in around[i] if j in raw]
        first[i] = agreeing_depth(model, raw, i, others, config)
        second[i] = finer_depth(model, fine, i, others, first[i], config)
    print("| | relative error, median | distance, median | within 0.5 px | within 1 px | kept |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, maps in (("first sweep", first), ("second", second)):
        error, distance, best = measure(model, maps, around)
        kept = np.mean([(depth > 0).mean() for depth in maps.values()])
        print(f"| {name} | {np.median(error):.2%} | {shares(distance)} | {kept:.0%} |")
    print(f"| the point itself | | {shares(best)} | |")


def shares(distance: np.ndarray) -> str:
    return f"{np.median(distance):.2f} px | {(distance < 0.5).mean():.1%} | {(distance < 1).mean():.1%}"


def measure(
    model: Model, maps: dict[int, np.ndarray], around: dict[int, list[int]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Over all points that two photos share: relative error of the depth, and how far from where the second
    has it a point of the first lands, by the map and by the point's own depth."""
    errors, distances, best = [], [], []
    for i, depth in maps.items():
        view = model.views[i]
        scale = np.array(depth.shape[::-1]) / (view.width, view.height)
        for j in around[i]:
            ids, here, there = model.shared(i, j)
            pixels, true = view.pixels[here], view.depth_of(model.points[ids])
            at = torch.from_numpy((pixels + 0.5) * scale - 0.5).float()
            found = depth_at(torch.from_numpy(depth)[None], at[None])[0].numpy()
            known = (found > 0) & (true > 0)
            errors.append(np.abs(found / true - 1)[known])
            rays = np.column_stack([pixels, np.ones(len(pixels))]) @ np.linalg.inv(view.K).T
            T = model.views[j].T @ np.linalg.inv(view.T)
            for z, out in ((found, distances), (true, best)):
                moved = (rays * z[:, None]) @ T[:3, :3].T + T[:3, 3]
                landed = moved @ model.views[j].K.T
                off = landed[:, :2] / landed[:, 2:] - model.views[j].pixels[there]
                out.append(np.linalg.norm(off, axis=1)[known])
    return np.concatenate(errors), np.concatenate(distances), np.concatenate(best)


if __name__ == "__main__":
    main()
