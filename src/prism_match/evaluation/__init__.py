"""The paper's benchmarks. `prism eval` runs them; `evaluate_pose` and `evaluate_homography` are the same
from Python."""

from typing import Literal

# `benchmarks.BENCHMARKS` has a function for each name.
Benchmark = Literal[
    "megadepth1500", "scannet1500", "hpatches", "pairs", "strecha", "rgbd", "megadepth-scale", "masks",
    "resolution", "ablation", "thresholds", "localization", "aachen", "inloc",
]  # fmt: skip
