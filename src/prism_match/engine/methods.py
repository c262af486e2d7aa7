"""What matches: PRISM, OpenCV's SIFT, or any function from two images to matches.

A method of one's own is a Python function, named on the command line as `--method module:function`:

    def match(image0, image1):
        # both: numpy arrays h w 3, uint8, RGB, resized as the benchmark wants it
        return points0, points1, scores  # n 2 and n 2 in pixels, n; without scores, all count the same

The centre of the top-left pixel is (0, 0). The module is looked for on Python's path and in the current
folder. Cached matches are those of the module as it is; what it imports is not looked at."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import cv2
import numpy as np

from prism_match.config import Rescale, Rotate
from prism_match.engine.photos import Resize, scale_points
from prism_match.errors import UserError
from prism_match.images import Image, resize
from prism_match.matcher import ImageFeatures, PairMatcher, Prepared
from prism_match.matches import Matches
from prism_match.weights import SUBPIXEL_SHA256, WeightsInfo

MatchFunction = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, ...]]


class Method(Protocol):
    """Photos are prepared in any thread, in any order; then comes what is worth keeping of each one, and at
    last the pairs."""

    name: str
    settings: dict[str, Any]  # all that its matches depend on but for the resizing and the precision
    precision: str

    def prepare(self, image: Image, resizing: Resize) -> Any: ...

    def extract(self, prepared: Sequence[Any]) -> list[Any]: ...

    def match(self, pairs: Sequence[tuple[Any, Any]]) -> list[Matches]:
        """In pixels of the images as they were before they were resized."""
        ...


def as_method(method: Method | PairMatcher | str) -> Method:
    """A method as it is, a Matcher, "sift", or "module:function"."""
    if isinstance(method, str):
        return Sift() if method == "sift" else Plugin(method, load_function(method))
    return Prism(method) if isinstance(method, PairMatcher) else method


def prism_settings(
    info: WeightsInfo,
    threshold: float | None,
    max_matches: int | None,
    rotate: Rotate,
    rescale: Rescale,
    polish: bool,
) -> dict[str, Any]:
    """All that PRISM's matches depend on, but for the resizing and the precision."""
    settings = {
        "method": "prism",
        "weights": info.sha256,
        "config": info.config.to_dict(),
        "threshold": info.config.theta_c if threshold is None else threshold,
        "max_matches": max_matches,
        "rotate": rotate,
        "polish": SUBPIXEL_SHA256 if polish else None,
        "points": "corners" if polish else "cells",
    }
    if max_matches is not None:
        settings["best"] = "certainty"
    # Matches that were stored before other scales were tried are those of "never", and still good.
    return settings if rescale == "never" else settings | {"rescale": rescale}


class Prism:
    """PRISM, as a `Matcher` has it."""

    def __init__(self, matcher: PairMatcher, details: bool = False):
        if matcher.tiles is not None:
            raise UserError("tiles are for single pairs: use Matcher.match or match_many")
        self.matcher, self.details = matcher, details
        self.name = "PRISM (ours)" if matcher.polish else "PRISM (ours), not polished"
        self.precision = str(matcher.dtype).removeprefix("torch.")
        if matcher.backend != "torch":  # which rounds otherwise
            self.precision += f" by {matcher.backend}"
        self.settings = prism_settings(
            matcher.info,
            matcher.threshold,
            matcher.max_matches,
            matcher.rotate,
            matcher.rescale,
            matcher.polish,
        )

    def prepare(self, image: Image, resizing: Resize) -> Prepared:
        size = resizing(image.size)
        if resizing.own_size and max(size) < max(image.size):
            return self.matcher.prepare(image, max(size))
        resized = Image(resize(image.pixels, *size), image.name)
        prepared = replace(self.matcher.prepare(resized, sys.maxsize), size=image.size)
        return prepared.masked(image.opaque)

    def extract(self, prepared: Sequence[Prepared]) -> list[ImageFeatures]:
        return self.matcher.extract_prepared(prepared)

    def match(self, pairs: Sequence[tuple[ImageFeatures, ImageFeatures]]) -> list[Matches]:
        return self.matcher.match_extracted(pairs, details=self.details)

    def unpack(self, tensors: dict[str, Any], texts: dict[str, str]) -> ImageFeatures:
        return ImageFeatures.unpack(tensors, texts, self.matcher.device, self.matcher.polish)


class TiledPrism:
    """PRISM with tiles (`tiles.py`), which sees each pair whole and anew: nothing of an image is kept."""

    def __init__(self, matcher: PairMatcher):
        self.matcher, plain = matcher, Prism(matcher.adjusted(tiles=None, tile_memory=None))
        self.name, self.precision = f"{plain.name}, in tiles", plain.precision
        self.settings = plain.settings | {"tiles": matcher.tiles, "tile_memory": matcher.tile_memory}

    def prepare(self, image: Image, resizing: Resize) -> WholeImage:
        return WholeImage(image, max(resizing(image.size)))

    def extract(self, prepared: Sequence[WholeImage]) -> list[WholeImage]:
        return list(prepared)

    def match(self, pairs: Sequence[tuple[WholeImage, WholeImage]]) -> list[Matches]:
        return [self.matcher.adjusted(size=max(a.side, b.side)).match(a.image, b.image) for a, b in pairs]


@dataclass(frozen=True)
class WholeImage:
    image: Image
    side: int  # the longer one that the protocol has it resized to


@dataclass(frozen=True)
class Resized:
    image: Image
    size: tuple[int, int]  # width, height before

    @property
    def name(self) -> str:
        return self.image.name

    def to_original(self, points: np.ndarray) -> np.ndarray:
        """n 2, float32."""
        return scale_points(points, self.image.size, self.size).astype(np.float32)


class ResizedImages:
    """What methods share that want nothing but resized images."""

    precision = "float32"

    def prepare(self, image: Image, resizing: Resize) -> Resized:
        return Resized(Image(resize(image.pixels, *resizing(image.size)), image.name), image.size)


@dataclass(frozen=True)
class SiftFeatures:
    points: np.ndarray  # n 2, float32, in pixels of the image before it was resized
    words: np.ndarray  # n 128
    size: tuple[int, int]
    name: str


class Sift(ResizedImages):
    """OpenCV's SIFT with a ratio test and a mutual check: the baseline that anyone can run."""

    name = "SIFT"

    def __init__(self, features: int = 4096, ratio: float = 0.8):
        self.features, self.ratio = features, ratio
        self.settings = {"method": "sift", "features": features, "ratio": ratio}

    def extract(self, prepared: Sequence[Resized]) -> list[SiftFeatures]:
        sift = cv2.SIFT_create(nfeatures=self.features)  # type: ignore[attr-defined]
        return [self._detect(sift, p) for p in prepared]

    def match(self, pairs: Sequence[tuple[SiftFeatures, SiftFeatures]]) -> list[Matches]:
        found = []
        for a, b in pairs:
            index, scores = mutual_ratio_matches(a.words, b.words, self.ratio)
            found.append(make_matches(a.points[index[:, 0]], b.points[index[:, 1]], scores, a, b))
        return found

    def _detect(self, sift: Any, prepared: Resized) -> SiftFeatures:
        image = prepared.image
        gray = np.round(image.gray * 255).astype(np.uint8)
        keypoints, words = sift.detectAndCompute(gray, None)
        if words is None:
            points, words = np.empty((0, 2), np.float32), np.empty((0, 128), np.float32)
            return SiftFeatures(points, words, prepared.size, image.name)
        # OpenCV may give a few more than asked for when responses are equal.
        points = np.array([k.pt for k in keypoints], np.float32)[: self.features]
        return SiftFeatures(prepared.to_original(points), words[: self.features], prepared.size, image.name)


def mutual_ratio_matches(
    words0: np.ndarray, words1: np.ndarray, ratio: float
) -> tuple[np.ndarray, np.ndarray]:
    """m 2 indices and m scores: nearest neighbours of each other (n0 d and n1 d) whose distance is less
    than `ratio` of that to the second nearest in image 1. The score is how much less."""
    if len(words0) < 2 or len(words1) < 2:
        return np.empty((0, 2), int), np.empty(0, np.float32)
    squared = (words0**2).sum(1)[:, None] + (words1**2).sum(1)[None] - 2 * words0 @ words1.T
    rows = np.arange(len(words0))
    two = np.argpartition(squared, 1, axis=1)[:, :2]
    near = np.sqrt(np.maximum(np.take_along_axis(squared, two, axis=1), 0))
    first, share = two[:, 0], near[:, 0] / np.maximum(near[:, 1], 1e-12)
    mutual = squared.argmin(axis=0)[first] == rows
    kept = np.flatnonzero(mutual & (share < ratio))
    return np.stack([kept, first[kept]], axis=1), (1 - share[kept]).astype(np.float32)


class Plugin(ResizedImages):
    """A function of the user's, see above."""

    def __init__(self, name: str, function: MatchFunction):
        self.name, self.function = name, function
        self.settings = {"method": name, "source": hash_source(name, function)}

    def extract(self, prepared: Sequence[Resized]) -> list[Resized]:
        return list(prepared)

    def match(self, pairs: Sequence[tuple[Resized, Resized]]) -> list[Matches]:
        return [self._match(a, b) for a, b in pairs]

    def _match(self, a: Resized, b: Resized) -> Matches:
        points, scores = self._arrays(self.function(a.image.rgb, b.image.rgb))
        finite = np.isfinite(points[0]).all(1) & np.isfinite(points[1]).all(1)
        points0, points1 = a.to_original(points[0][finite]), b.to_original(points[1][finite])
        return make_matches(points0, points1, scores[finite], a, b)

    def _arrays(self, found: Any) -> tuple[list[np.ndarray], np.ndarray]:
        """What the function gave, as points n 2 of both images and scores n."""
        try:
            points = [np.asarray(x, np.float32) for x in found[:2]]
            points = [x if x.size else x.reshape(0, 2) for x in points]
            scores = np.asarray(found[2], np.float32).ravel() if len(found) > 2 else np.ones(len(points[0]))
        except (TypeError, ValueError, KeyError) as error:
            raise UserError(f"{self.name}: gave no (points0, points1, scores) ({error})") from error
        if len(points) < 2 or any(x.ndim != 2 or x.shape[1] != 2 for x in points):
            shapes = ", ".join(str(x.shape) for x in points)
            raise UserError(f"{self.name}: points must be two arrays of shape (n, 2), not {shapes}")
        if not len(points[0]) == len(points[1]) == len(scores):
            raise UserError(
                f"{self.name}: gave {len(points[0])} and {len(points[1])} points, {len(scores)} scores"
            )
        return points, scores


def load_function(name: str) -> MatchFunction:
    module, _, function = name.partition(":")
    if not function:
        raise UserError(f"--method is prism, sift or module:function, not {name!r}")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise UserError(f"--method {name}: cannot be imported ({error})") from error
    if not callable(found):
        raise UserError(f"--method {name}: is no function")
    return found


def hash_source(name: str, function: MatchFunction) -> str:
    """Of the module that it is named by and the file that it is in, so that a changed one does not get the
    matches of the old. It may be wrapped, as by `torch.no_grad()`, or an object that is called like one."""
    files = []
    for item in (inspect.unwrap(function), sys.modules.get(name.partition(":")[0])):
        with suppress(OSError, TypeError):  # built in, or typed in at the prompt
            files.append(Path(inspect.getsourcefile(item) or "").read_bytes())  # type: ignore[arg-type]
    return hashlib.sha256(b"".join(dict.fromkeys(files))).hexdigest()[:16] if files else ""


def make_matches(points0: np.ndarray, points1: np.ndarray, scores: np.ndarray, a: Any, b: Any) -> Matches:
    """Best first, as `Matches` has them. a, b: the images, or what knows their size and name."""
    order = np.argsort(-scores, kind="stable")
    p0, p1, best = (np.asarray(x[order], np.float32) for x in (points0, points1, scores))
    return Matches(p0, p1, best, a.size, b.size, a.name, b.name)
