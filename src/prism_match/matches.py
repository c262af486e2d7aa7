"""The result of matching one pair: points in both images, and what people do with them next."""

from __future__ import annotations

import csv
import json
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import cv2
import numpy as np

from prism_match.config import parse_json
from prism_match.errors import UserError
from prism_match.files import (
    atomic_path,
    checksum,
    fixed_text,
    into_h5,
    load_arrays,
    read_dataset,
    reading,
    text_of,
)
from prism_match.geometry import Backend, Estimate, Model, estimate, spread_over
from prism_match.images import Image, ImageLike, load_image, write_png

BELIEF = ("certainty", "sigma")
REQUIRED = ("keypoints0", "keypoints1", "scores", "size0", "size1", "name0", "name1")


@dataclass(frozen=True, repr=False)
class Details:
    """What the model thought of each 8x8 cell of its (resized) images, after each of the L MPMs."""

    keep0: np.ndarray  # L h w, bool: the pruning mask M_l
    keep1: np.ndarray
    nmi0: np.ndarray | None  # L h w, float32: estimated NMI, 0 once pruned; None: no estimator
    nmi1: np.ndarray | None


@dataclass(frozen=True, repr=False, eq=False)
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
    images: tuple[Image | None, Image | None] = field(default=(None, None), compare=False)
    # None where nobody knows, as for weights that were never calibrated (see `certainty.py`):
    certainty: np.ndarray | None = None  # n, float32: the probability to be within 3 pixels of image 1
    sigma: np.ndarray | None = None  # n, float32: the expected error in pixels of image 1

    def __post_init__(self) -> None:
        for name in ("name0", "name1"):
            value = getattr(self, name)
            value = os.fspath(value) if isinstance(value, os.PathLike) else value
            if not isinstance(value, str) or "\0" in value:
                raise UserError(f"{name} must be a text without a zero, not {value!r}")
            object.__setattr__(self, name, value)
        for name, shape in (("keypoints0", (-1, 2)), ("keypoints1", (-1, 2)), ("scores", (-1,))):
            array = np.asarray(getattr(self, name), dtype=np.float32)
            if array.ndim != len(shape) or array.shape[1:] != shape[1:]:
                wanted = "(n, 2)" if len(shape) == 2 else "(n,)"
                raise UserError(f"{name} must have the shape {wanted}, not {array.shape}")
            if not np.isfinite(array).all():
                raise UserError(f"{name} must be finite numbers: leave out what is not visible")
            object.__setattr__(self, name, array)
        if len(self.keypoints0) != len(self.keypoints1):
            raise UserError(f"{len(self.keypoints0)} points cannot be matched with {len(self.keypoints1)}")
        if len(self.scores) != len(self.keypoints0):
            raise UserError(f"there are {len(self.scores)} scores for {len(self.keypoints0)} matches")
        for name in BELIEF:
            if getattr(self, name) is not None:
                array = np.asarray(getattr(self, name), dtype=np.float32)
                if array.shape != self.scores.shape:
                    raise UserError(f"{name} must have one number for each match")
                object.__setattr__(self, name, array)

    @cached_property
    def same_place(self) -> float | None:
        """The probability that the two photos show the same place at all (`places.py`), by the geometry of
        these matches and the certainty of each; None where certainty is not known."""
        from prism_match import places

        known = self.certainty is not None or not len(self)
        return places.same_place(self) if known else None

    def __repr__(self) -> str:
        sides = ((self.name0, self.size0), (self.name1, self.size1))
        images = " and ".join(f"{name or 'an image'} ({w}x{h})" for name, (w, h) in sides)
        return f"<{len(self)} matches of {images}>"

    def __len__(self) -> int:
        return len(self.scores)

    def filter(
        self,
        keep: np.ndarray | Sequence[int] | Sequence[bool] | None = None,
        *,
        min_score: float | None = None,
        top: int | None = None,
        spread: int | None = None,
    ) -> Matches:
        """The matches where `keep` is True (or the indices in it), with at least `min_score`, of those the
        `top` best, and of those so many (`spread`) that cover image 0 evenly: the best of each part of it.
        The best have the highest certainty, or score, where certainty is not known."""
        for name, count in (("top", top), ("spread", spread)):
            if count is not None and not isinstance(count, numbers.Integral):
                raise UserError(f"{name} must be a whole number, not {count!r}")
        index = np.arange(len(self))
        if keep is not None:
            index = index[self._chosen(keep)]
        if min_score is not None:
            index = index[self.scores[index] >= min_score]
        if top is not None:
            best = np.argsort(-self._goodness[index], kind="stable")[: max(0, top)]
            index = index[np.sort(best)]
        if spread is not None:
            index = index[spread_over(self.keypoints0[index], self._goodness[index], spread)]
        rows = ("keypoints0", "keypoints1", "scores", *belief_of(self))
        return replace(self, **{name: getattr(self, name)[index] for name in rows})

    @property
    def _goodness(self) -> np.ndarray:
        """What tells the best matches: scores are confidences of the model, before they are made exact."""
        return self.scores if self.certainty is None else self.certainty

    def _chosen(self, keep: np.ndarray | Sequence[int] | Sequence[bool]) -> np.ndarray:
        chosen = np.asarray(keep)
        if chosen.ndim != 1 or (chosen.dtype.kind not in "bui" and len(chosen)):
            raise UserError("keep must be a row of True and False, or of indices")
        if chosen.dtype == bool:
            if len(chosen) != len(self):
                raise UserError(f"keep has {len(chosen)} entries, but there are {len(self)} matches")
        elif np.any((chosen < -len(self)) | (chosen >= len(self))):
            raise UserError(f"keep has indices beyond the {len(self)} matches")
        return chosen if chosen.dtype == bool else chosen.astype(np.int64)

    def swap(self) -> Matches:
        """The same matches with the images exchanged; how exact they are in the other one is not known."""
        d = self.details
        return Matches(
            self.keypoints1, self.keypoints0, self.scores, self.size1, self.size0, self.name1, self.name0,
            None if d is None else Details(d.keep1, d.keep0, d.nmi1, d.nmi0), self.images[::-1],
        )  # fmt: skip

    def estimate(
        self,
        model: Model,
        *,
        intrinsics0: np.ndarray | None = None,
        intrinsics1: np.ndarray | None = None,
        threshold: float | None = None,
        backend: Backend = "usac",
        confidence: float = 0.99999,
        max_iterations: int = 10_000,
        seed: int = 0,
    ) -> Estimate:
        """Fit "homography", "fundamental" or "essential" (which needs the intrinsics), robustly. The options
        are those of `prism_match.geometry.estimate`."""
        return estimate(
            self.keypoints0, self.keypoints1, model,
            intrinsics0=intrinsics0, intrinsics1=intrinsics1, threshold=threshold, backend=backend,
            confidence=confidence, max_iterations=max_iterations, seed=seed,
        )  # fmt: skip

    def warp(self, image0: ImageLike | None = None, homography: np.ndarray | None = None) -> np.ndarray:
        """Image 0 as seen in the frame of image 1 (h w 3, uint8), by a homography, which is
        estimated from the matches if it is not given."""
        if homography is None:
            homography = self.estimate("homography").matrix
            if homography is None:
                raise UserError(f"no homography fits these {len(self)} matches")
        return cv2.warpPerspective(self.image(0, image0).rgb, homography, self.size1)

    def plot(
        self,
        path: str | Path | None = None,
        *,
        title: str = "",
        most_lines: int = 250,
        longer_side: int = 800,
        image0: ImageLike | None = None,
        image1: ImageLike | None = None,
    ) -> np.ndarray:
        """A picture of the matches (h w 3, uint8), written to `path` (a .png) if given. See
        `prism_match.viz.draw_matches` for the options; image0, image1: where files have moved."""
        from prism_match import viz

        first, second = self.image(0, image0), self.image(1, image1)
        picture = viz.draw_matches(
            first.rgb, second.rgb, self.keypoints0, self.keypoints1, self.scores,
            title=title, most_lines=most_lines, longer_side=longer_side,
        )  # fmt: skip
        if path is not None:
            write_png(path, picture)
        return picture

    def image(self, which: int, given: ImageLike | None = None) -> Image:
        """Image 0 or 1 itself, for pictures: as given, from memory, or read from its file again."""
        source = given if given is not None else self.images[which] or (self.name0, self.name1)[which]
        if isinstance(source, str) and source in ("array", "tensor", "PIL image"):
            raise UserError(
                f"an image from memory is not kept if it is large: give it again, as image{which}="
            )
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
        points0 = np.array([keypoints0[m.queryIdx].pt for m in chosen], np.float32).reshape(-1, 2)
        points1 = np.array([keypoints1[m.trainIdx].pt for m in chosen], np.float32).reshape(-1, 2)
        return Matches(points0, points1, scores[order], size0, size1, name0, name1)

    def save(self, path: str | Path) -> None:
        """To .npz, .json, .csv or .h5. The first three hold everything but a csv has no details."""
        suffix = Path(path).suffix.lower()
        if suffix not in FORMATS:
            raise UserError(f"{path}: matches are saved as {', '.join(FORMATS)}")
        with atomic_path(path) as temporary:
            FORMATS[suffix][0](temporary, self)

    @staticmethod
    def load(path: str | Path) -> Matches:
        """Of any version. Those that tell how much they hold, as all do now, are checked."""
        path = Path(path)
        suffix = path.suffix.lower()
        if suffix not in FORMATS:
            raise UserError(f"{path}: matches are loaded from {', '.join(FORMATS)}")
        if not path.is_file():
            raise UserError(f"{path}: no such file")
        with reading(path, "a file of matches"):
            arrays = FORMATS[suffix][1](path)
            missing = [key for key in REQUIRED if key not in arrays]
            if missing:
                raise UserError(f"not a file of matches: it has no {missing[0]}")
            matches = _from_arrays(arrays)
            _check(matches, arrays)
        return matches


def belief_of(found: Any) -> dict[str, np.ndarray]:
    """What is known of how far matches, or those of a table, can be believed: arrays by their names."""
    return {name: value for name in BELIEF if (value := getattr(found, name)) is not None}


def _to_arrays(m: Matches) -> dict[str, np.ndarray]:
    """With how many there are, and a checksum of all the rest."""
    arrays = {
        "keypoints0": m.keypoints0, "keypoints1": m.keypoints1, "scores": m.scores,
        "size0": np.array(m.size0, np.int64), "size1": np.array(m.size1, np.int64),
        "name0": np.array(m.name0), "name1": np.array(m.name1),
    }  # fmt: skip
    if m.details is not None:
        kinds = {"keep0": bool, "keep1": bool, "nmi0": np.float32, "nmi1": np.float32}
        arrays |= {k: np.asarray(v, kinds[k]) for k, v in vars(m.details).items() if v is not None}
    arrays |= belief_of(m)
    return arrays | {"count": np.array(len(m)), "checksum": np.array(checksum(arrays))}


def _check(m: Matches, arrays: Mapping[str, Any]) -> None:
    """Against what the file says of itself."""
    if "count" not in arrays and "checksum" not in arrays:
        return  # written by an older version
    count = int(arrays.get("count", -1))
    if 0 <= count != len(m):
        raise UserError(f"damaged: {len(m)} of its {count} matches are left")
    if str(arrays.get("checksum")) != str(_to_arrays(m)["checksum"]):
        raise UserError("damaged: what it holds is not what was written")


def _from_arrays(arrays: Mapping[str, Any]) -> Matches:
    points = [np.asarray(arrays[k], dtype=np.float32).reshape(-1, 2) for k in ("keypoints0", "keypoints1")]
    scores = np.asarray(arrays["scores"], dtype=np.float32).reshape(-1)
    sizes = [(int(arrays[k][0]), int(arrays[k][1])) for k in ("size0", "size1")]
    names = [str(arrays[k]) for k in ("name0", "name1")]
    if any("\0" in name for name in names):
        raise UserError("damaged: no file has the name of its image")
    details = None
    if "keep0" in arrays:
        keep = [np.asarray(arrays[k], dtype=bool) for k in ("keep0", "keep1")]
        nmi = [np.asarray(arrays[k], dtype=np.float32) if k in arrays else None for k in ("nmi0", "nmi1")]
        details = Details(keep[0], keep[1], nmi[0], nmi[1])
    belief = {k: np.asarray(arrays[k], dtype=np.float32).reshape(-1) for k in BELIEF if k in arrays}
    return Matches(
        points[0], points[1], scores, sizes[0], sizes[1], names[0], names[1], details,
        **belief,  # type: ignore[arg-type]
    )  # fmt: skip


def _save_npz(path: Path, m: Matches) -> None:
    with path.open("wb") as file:  # NumPy would add to a name that ends in .NPZ
        write_npz(file, m)


def write_npz(file: IO[bytes], m: Matches, **more: np.ndarray) -> None:
    """As `Matches.load` reads it once it is a file. more: arrays beside them, which that leaves alone."""
    arrays: dict[str, Any] = _to_arrays(m) | more
    np.savez_compressed(file, **arrays)


def _load_npz(path: Path) -> dict[str, Any]:
    return load_arrays(path)


def _save_json(path: Path, m: Matches) -> None:
    path.write_text(json.dumps({k: v.tolist() for k, v in _to_arrays(m).items()}), encoding="utf-8")


def _load_json(path: Path) -> dict[str, Any]:
    return parse_json(path.read_text(encoding="utf-8"))


def _save_csv(path: Path, m: Matches) -> None:
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file)
        # The first line tells of the images, as a comment that csv readers can skip.
        seal = _to_arrays(replace(m, details=None))
        writer.writerow(["#", *m.size0, *m.size1, m.name0, m.name1, seal["count"], seal["checksum"]])
        belief = belief_of(m)
        writer.writerow(["x0", "y0", "x1", "y1", "score", *belief])
        columns = [m.scores, *belief.values()]
        table = np.concatenate([m.keypoints0, m.keypoints1, np.stack(columns, axis=1)], axis=1)
        writer.writerows([[repr(float(x)) for x in row] for row in table])


def _load_csv(path: Path) -> dict[str, Any]:
    with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        head, names, *rows = csv.reader(file)
    table = np.array(rows, dtype=np.float32).reshape(-1, len(names))
    arrays = {"keypoints0": table[:, :2], "keypoints1": table[:, 2:4], "scores": table[:, 4]}
    arrays |= {name: column for name, column in zip(names[5:], table.T[5:], strict=True) if name in BELIEF}
    _, width0, height0, width1, height1, name0, name1, *seal = head
    images = {"size0": (width0, height0), "size1": (width1, height1), "name0": name0, "name1": name1}
    return arrays | images | dict(zip(("count", "checksum"), seal, strict=len(seal) > 0))


def _save_h5(path: Path, m: Matches) -> None:
    with into_h5(path) as (file, _):
        for key, value in _to_arrays(m).items():
            if value.dtype.kind == "U":
                file.attrs[key] = fixed_text([str(value)]).reshape(())
            else:
                file[key] = value


def _load_h5(path: Path) -> dict[str, Any]:
    import h5py

    with h5py.File(path, "r") as file:
        arrays = {k: read_dataset(v) for k, v in file.items() if isinstance(v, h5py.Dataset)}
        return arrays | {k: text_of(v) for k, v in file.attrs.items()}


FORMATS: dict[str, tuple[Callable[[Path, Matches], None], Callable[[Path], dict[str, Any]]]] = {
    ".npz": (_save_npz, _load_npz),
    ".json": (_save_json, _load_json),
    ".csv": (_save_csv, _load_csv),
    ".h5": (_save_h5, _load_h5),
}
