"""The result of matching one pair: points in both images, and what people do with them next."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from prism_match.errors import UserError
from prism_match.files import atomic_path
from prism_match.geometry import Estimate, Model, estimate
from prism_match.images import Image, ImageLike, load_image, write_png

FORMATS = (".npz", ".json", ".csv", ".h5")


@dataclass(frozen=True)
class Details:
    """What the model thought of each 8x8 cell of its (resized) images, after each of the L MPMs."""

    keep0: np.ndarray  # L h w, bool: the pruning mask M_l
    keep1: np.ndarray
    nmi0: np.ndarray | None  # L h w, float32: estimated NMI, 0 once pruned; None: no estimator
    nmi1: np.ndarray | None


@dataclass(frozen=True)
class Matches:
    """n correspondences, in pixels of the original images; the centre of the first pixel is (0, 0)."""

    keypoints0: np.ndarray  # n 2, float32
    keypoints1: np.ndarray  # n 2, float32
    scores: np.ndarray  # n, float32, in [0, 1]; best first
    size0: tuple[int, int]  # width, height of image 0
    size1: tuple[int, int]
    name0: str = ""
    name1: str = ""
    details: Details | None = None
    # Kept for pictures when the images came from memory and cannot be read again.
    images: tuple[Image | None, Image | None] = field(default=(None, None), repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.scores)

    def filter(
        self, keep: np.ndarray | None = None, *, min_score: float | None = None, top: int | None = None
    ) -> Matches:
        """The matches where `keep` is True (or the indices in it), with at least `min_score`, and of
        those the `top` best."""
        index = np.arange(len(self))
        if keep is not None:
            index = index[np.asarray(keep)]
        if min_score is not None:
            index = index[self.scores[index] >= min_score]
        if top is not None:
            best = np.argsort(-self.scores[index], kind="stable")[: max(0, top)]
            index = index[np.sort(best)]
        return replace(
            self,
            keypoints0=self.keypoints0[index],
            keypoints1=self.keypoints1[index],
            scores=self.scores[index],
        )

    def swap(self) -> Matches:
        """The same matches with the images exchanged."""
        d = self.details
        return Matches(
            self.keypoints1, self.keypoints0, self.scores, self.size1, self.size0, self.name1, self.name0,
            None if d is None else Details(d.keep1, d.keep0, d.nmi1, d.nmi0), self.images[::-1],
        )  # fmt: skip

    def estimate(self, model: Model, **options: Any) -> Estimate:
        """Fit "homography", "fundamental" or "essential" (with intrinsics0=, intrinsics1=). See
        `prism_match.geometry.estimate` for the options: threshold, backend, seed, ..."""
        return estimate(self.keypoints0, self.keypoints1, model, **options)

    def warp(self, image0: ImageLike | None = None, homography: np.ndarray | None = None) -> np.ndarray:
        """Image 0 as seen in the frame of image 1 (h w 3, uint8), by a homography, which is
        estimated from the matches if it is not given."""
        if homography is None:
            homography = self.estimate("homography").matrix
            if homography is None:
                raise UserError(f"no homography fits these {len(self)} matches")
        return cv2.warpPerspective(self.image(0, image0).rgb, homography, self.size1)

    def plot(self, path: str | Path | None = None, **options: Any) -> np.ndarray:
        """A picture of the matches (h w 3, uint8), written to `path` if given. The options are those
        of `prism_match.viz.draw_matches`; images from files that have moved: image0=, image1=."""
        from prism_match import viz

        image0, image1 = (
            self.image(0, options.pop("image0", None)),
            self.image(1, options.pop("image1", None)),
        )
        picture = viz.draw_matches(
            image0.rgb, image1.rgb, self.keypoints0, self.keypoints1, self.scores, **options
        )
        if path is not None:
            write_png(path, picture)
        return picture

    def image(self, which: int, given: ImageLike | None = None) -> Image:
        """Image 0 or 1 itself, for pictures: as given, from memory, or read from its file again."""
        source = given if given is not None else self.images[which] or (self.name0, self.name1)[which]
        image, size = load_image(source), (self.size0, self.size1)[which]
        if image.size != size:
            raise UserError(
                f"{image.name}: is {image.size[0]}x{image.size[1]}, the matches are for {size[0]}x{size[1]}"
            )
        return image

    def to_opencv(self) -> tuple[list[cv2.KeyPoint], list[cv2.KeyPoint], list[cv2.DMatch]]:
        """Key points of both images and their matches, for OpenCV's functions. The score is the response
        of a key point, and 1 less the distance of a match."""
        scores = self.scores.tolist()
        sides = [
            [cv2.KeyPoint(x, y, 1.0, -1.0, s) for (x, y), s in zip(points.tolist(), scores, strict=True)]
            for points in (self.keypoints0, self.keypoints1)
        ]
        return sides[0], sides[1], [cv2.DMatch(n, n, 1.0 - s) for n, s in enumerate(scores)]

    @staticmethod
    def from_opencv(
        keypoints0: Sequence[cv2.KeyPoint],
        keypoints1: Sequence[cv2.KeyPoint],
        matches: Sequence[cv2.DMatch],
        size0: tuple[int, int],
        size1: tuple[int, int],
        name0: str = "",
        name1: str = "",
    ) -> Matches:
        """The inverse of `to_opencv`, and for matches of any other origin: the score is 1 less the
        distance, which is divided by the largest where that is above 1. Sizes are (width, height)."""
        distance = np.array([m.distance for m in matches], dtype=np.float64)
        scores = 1 - distance / max(1.0, float(distance.max(initial=0)))
        order = np.argsort(-scores, kind="stable")
        chosen = [matches[n] for n in order]
        points = [
            np.array([k.pt for k in side], dtype=np.float32).reshape(-1, 2)
            for side in (
                [keypoints0[m.queryIdx] for m in chosen],
                [keypoints1[m.trainIdx] for m in chosen],
            )
        ]
        return Matches(points[0], points[1], scores[order].astype(np.float32), size0, size1, name0, name1)

    def save(self, path: str | Path) -> None:
        """To .npz, .json, .csv or .h5. The first three hold everything but a csv has no details."""
        path = Path(path)
        if path.suffix not in FORMATS:
            raise UserError(f"{path}: matches are saved as {', '.join(FORMATS)}")
        with atomic_path(path) as temporary:
            {".npz": _save_npz, ".json": _save_json, ".csv": _save_csv, ".h5": _save_h5}[path.suffix](
                temporary, self
            )

    @staticmethod
    def load(path: str | Path) -> Matches:
        path = Path(path)
        if path.suffix not in FORMATS:
            raise UserError(f"{path}: matches are loaded from {', '.join(FORMATS)}")
        if not path.is_file():
            raise UserError(f"{path}: no such file")
        readers = {".npz": _load_npz, ".json": _load_json, ".csv": _load_csv, ".h5": _load_h5}
        try:
            return readers[path.suffix](path)
        except (OSError, ValueError, KeyError, TypeError, IndexError, EOFError) as error:
            raise UserError(f"{path}: not a file of matches ({error})") from error


def _to_arrays(m: Matches) -> dict[str, np.ndarray]:
    arrays = {
        "keypoints0": m.keypoints0, "keypoints1": m.keypoints1, "scores": m.scores,
        "size0": np.array(m.size0), "size1": np.array(m.size1),
        "name0": np.array(m.name0), "name1": np.array(m.name1),
    }  # fmt: skip
    if m.details is not None:
        arrays |= {k: v for k, v in vars(m.details).items() if v is not None}
    return arrays


def _from_arrays(arrays: dict[str, Any]) -> Matches:
    points = [np.asarray(arrays[k], dtype=np.float32).reshape(-1, 2) for k in ("keypoints0", "keypoints1")]
    scores = np.asarray(arrays["scores"], dtype=np.float32).reshape(-1)
    if not len(points[0]) == len(points[1]) == len(scores):
        raise ValueError("the lengths differ")
    sizes = [(int(arrays[k][0]), int(arrays[k][1])) for k in ("size0", "size1")]
    details = None
    if "keep0" in arrays:
        keep = [np.asarray(arrays[k], dtype=bool) for k in ("keep0", "keep1")]
        nmi = [np.asarray(arrays[k], dtype=np.float32) if k in arrays else None for k in ("nmi0", "nmi1")]
        details = Details(keep[0], keep[1], nmi[0], nmi[1])
    return Matches(
        points[0], points[1], scores, sizes[0], sizes[1], str(arrays["name0"]), str(arrays["name1"]), details
    )


def _save_npz(path: Path, m: Matches) -> None:
    arrays: dict[str, Any] = _to_arrays(m)
    np.savez_compressed(path, **arrays)


def _load_npz(path: Path) -> Matches:
    with np.load(path, allow_pickle=False) as arrays:
        return _from_arrays(dict(arrays))


def _save_json(path: Path, m: Matches) -> None:
    path.write_text(json.dumps({k: v.tolist() for k, v in _to_arrays(m).items()}), encoding="utf-8")


def _load_json(path: Path) -> Matches:
    return _from_arrays(json.loads(path.read_text(encoding="utf-8")))


def _save_csv(path: Path, m: Matches) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        # The first line tells of the images, as a comment that csv readers can skip.
        writer.writerow(["#", *m.size0, *m.size1, m.name0, m.name1])
        writer.writerow(["x0", "y0", "x1", "y1", "score"])
        table = np.concatenate([m.keypoints0, m.keypoints1, m.scores[:, None]], axis=1)
        writer.writerows([[repr(float(x)) for x in row] for row in table])


def _load_csv(path: Path) -> Matches:
    with path.open(newline="", encoding="utf-8") as file:
        head, _, *rows = csv.reader(file)
    table = np.array(rows, dtype=np.float32).reshape(-1, 5)
    width0, height0, width1, height1 = map(int, head[1:5])
    return Matches(
        table[:, :2], table[:, 2:4], table[:, 4], (width0, height0), (width1, height1), head[5], head[6]
    )


def _save_h5(path: Path, m: Matches) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        for key, value in _to_arrays(m).items():
            if value.dtype.kind == "U":
                file.attrs[key] = str(value)
            else:
                file[key] = value


def _load_h5(path: Path) -> Matches:
    import h5py

    with h5py.File(path, "r") as file:
        arrays = {k: v[()] for k, v in file.items() if isinstance(v, h5py.Dataset)}
        return _from_arrays(arrays | dict(file.attrs))
