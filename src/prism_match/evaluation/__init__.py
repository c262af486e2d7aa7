"""The paper's benchmarks. `prism eval` runs them; `evaluate_pose` and `evaluate_homography` are the same
from Python."""
