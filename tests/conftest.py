from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from prism_match.config import PRESETS
from prism_match.model.prism import PRISM

# So small a model is fastest on one thread: two wait for each other longer than they work, and on a busy
# machine many times as long.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # for tests that import onnxruntime themselves

SHARED = Path(__file__).parents[2] / "shared"
ASSETS = Path(__file__).parents[1] / "src" / "prism_match" / "assets"


@pytest.fixture
def tiny() -> PRISM:
    """A small model with random weights whose estimator prunes a good part of the cells at each MPM."""
    torch.manual_seed(0)
    model = PRISM(PRESETS["tiny"].replace(theta_p=0.5, theta_c=0.0)).eval()
    with torch.no_grad():
        features = model.extract(torch.rand(2, 1, 96, 96))
        a, b = (type(features)(*(x[n : n + 1] for x in vars(features).values())) for n in (0, 1))
        for layer, mpm in enumerate(model.mpms):
            mpm.pruning.phi[-1].weight *= 20
            logit = model.transform(a, b, a.valid, b.valid)[layer].logit0
            mpm.pruning.phi[-1].bias -= logit[logit.isfinite()].quantile(0.3)
    return model


@pytest.fixture
def photo() -> np.ndarray:
    """h w, uint8: the bundled photo, gray."""
    return cv2.imread(str(ASSETS / "astronaut0.jpg"), cv2.IMREAD_GRAYSCALE)


def needs_shared(path: str) -> Path:
    """A folder of real data beside the repository, or a skip that says so."""
    if not (SHARED / path).exists():
        pytest.skip(f"real data is not here: {path}")
    return SHARED / path


def held_by_another_process(code: str) -> list[int]:
    """MiB that a new process says it has, once or several times: `has()` is what it has, `had()` the most."""
    helper = """
def _of(name):
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines[name].split()[0]) // 1024
has, had = lambda: print(_of("VmRSS")), lambda: print(_of("VmHWM"))
"""
    done = subprocess.run([sys.executable, "-c", helper + code], capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.split()]
