"""Photos, lists of pairs and jobs for the tests of `prism match-pairs`."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
from conftest import ASSETS

from prism_match.engine import MatchStore, Resize
from prism_match.engine.match_pairs import PairList
from prism_match.engine.methods import as_method
from prism_match.engine.shards import Job

# Put first on the path as sitecustomize.py: no decoder that is installed here crashes by itself.
CRASHING = """
import os, signal
import PIL.Image
real = PIL.Image.open
def crash(file, *args, **options):
    if "killer" in str(file):
        os.kill(os.getpid(), signal.SIGSEGV)
    return real(file, *args, **options)
PIL.Image.open = crash
"""


def write_photos(folder: Path, count: int, side: int = 160) -> Path:
    """Views of one photo that overlap."""
    folder.mkdir(exist_ok=True)
    photo = cv2.imread(str(ASSETS / "astronaut0.jpg"))
    largest = min(photo.shape[:2])
    for n in range(count):
        cut = photo[n * 8 : largest - 80 + n * 8, n * 8 : largest - 80 + n * 8][: largest - 150]
        cv2.imwrite(str(folder / f"{n}.png"), cv2.resize(cut, (side, side * 3 // 4)))
    return folder


def make_list(count: int) -> PairList:
    """Every photo with every other."""
    return PairList([f"{n}.png" for n in range(count)], np.stack(np.triu_indices(count, 1), axis=1))


def make_job(images: str | Path, store: str | Path, method: str = "sift", size: int = 160) -> Job:
    resizing = Resize.largest(size)
    settings = json.loads(json.dumps(as_method(method).settings | {"resize": vars(resizing)}))
    return Job(method, "", resizing, settings, images=str(images), store=str(store), python_path=".")


def contents(store: str | Path) -> dict:
    return {
        pair: tuple(x.tobytes() for x in (m.keypoints0, m.keypoints1, m.scores))
        for pair, m in MatchStore(store).items()
    }
