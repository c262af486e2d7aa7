"""Keypoints that the pairs of an image share, and the file that they are kept in.

This module does without PyTorch: every job of `colmap_worker` is a process of its own, and would wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

import h5py
import numpy as np

from prism_match.errors import UserError
from prism_match.files import new_h5, read_dataset

if TYPE_CHECKING:
    from prism_match.engine.store import Names


@dataclass(frozen=True)
class Keypoints:
    xy: np.ndarray  # k 2, float32; the centre of the first pixel is (0, 0)
    scores: np.ndarray  # k, float32: sum of the scores of its matches

    def __len__(self) -> int:
        return len(self.scores)


@dataclass(frozen=True)
class IndexedMatches:
    """Matches between shared keypoints; no keypoint is in two matches of a pair."""

    index: np.ndarray  # m 2, int64: rows of the keypoints of the two images
    scores: np.ndarray  # m, float32; best first

    def __len__(self) -> int:
        return len(self.scores)


@dataclass(frozen=True)
class SharedKeypoints:
    """What COLMAP and others work with: keypoints by image, matches by pair."""

    keypoints: dict[str, Keypoints]
    matches: dict[Names, IndexedMatches]


def save_tracks(path: Path, shared: SharedKeypoints, colours: dict[str, np.ndarray] | None = None) -> None:
    """To an .h5 file; colours: k 3, uint8, of the keypoints of each image, where they are known."""
    from prism_match.engine.store import group_name

    with new_h5(path) as (file, _):
        for name, points in shared.keypoints.items():
            group = file.create_group(f"keypoints/{quote(name, safe=' ')}")
            group["xy"], group["scores"] = points.xy, points.scores
            if colours is not None and name in colours:
                group["rgb"] = colours[name]
        for names, matches in shared.matches.items():
            group = file.create_group(group_name("matches", names))
            group["index"], group["scores"] = matches.index, matches.scores


def load_tracks(path: Path) -> tuple[SharedKeypoints, dict[str, np.ndarray]]:
    """What `save_tracks` has written: shared keypoints, and colours."""
    keypoints, colours, matches = {}, {}, {}
    try:
        with h5py.File(path, "r") as file:
            for key, group in file.get("keypoints", {}).items():
                name = unquote(key)
                keypoints[name] = Keypoints(read_dataset(group["xy"]), read_dataset(group["scores"]))
                if "rgb" in group:
                    colours[name] = read_dataset(group["rgb"])
            for first, groups in file.get("matches", {}).items():
                for second, group in groups.items():
                    names = unquote(first), unquote(second)
                    index, scores = read_dataset(group["index"]), read_dataset(group["scores"])
                    matches[names] = IndexedMatches(index, scores)
    except (OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise UserError(f"{path}: not a file of tracks ({error})") from error
    return SharedKeypoints(keypoints, matches), colours
