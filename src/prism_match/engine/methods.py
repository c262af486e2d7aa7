"""What is measured: PRISM, OpenCV's SIFT, or any function from two images to matches.

A method of one's own is a Python function, named on the command line as `--method module:function`:

    def match(image0, image1):
        # both: numpy arrays h w 3, uint8, RGB, already resized as the benchmark wants it
        return points0, points1, scores  # n 2 and n 2 in pixels, n; without scores, all count the same

The centre of the top-left pixel is (0, 0). The module is looked for on Python's path and in the current
folder. Cached matches are those of the module as it is; what it imports is not looked at."""

from __future__ import annotations

import copy
import hashlib
import importlib
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import cv2
import numpy as np

from prism_match.errors import UserError
from prism_match.images import Image
from prism_match.matches import Matches

if TYPE_CHECKING:
    from prism_match.matcher import Matcher

ImagePair = tuple[Image, Image]
MatchFunction = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, ...]]


class Method(Protocol):
    name: str
    settings: dict[str, Any]  # all that its matches depend on; it names the cache

    def match_many(self, pairs: Iterable[ImagePair]) -> Iterator[Matches]:
        """One result per pair, in order, in pixels of the images it was given."""
        ...


def as_method(method: Method | Matcher | str) -> Method:
    """A method as it is, a Matcher, "sift", or "module:function"."""
    if isinstance(method, str):
        return Sift() if method == "sift" else Plugin(method, load_function(method))
    return method if hasattr(method, "settings") else Prism(method)  # type: ignore[arg-type,return-value]


class Prism:
    """PRISM, as a `Matcher` has it; the benchmark's resizing takes the place of the Matcher's own."""

    def __init__(self, matcher: Matcher, batch_size: int = 1):
        self.matcher = copy.copy(matcher)  # shares the model
        self.matcher.size = sys.maxsize
        self.batch_size = batch_size
        self.name = "PRISM (ours)" if matcher.polish else "PRISM (ours), not polished"
        self.settings = {
            "method": "prism",
            "weights": hash_weights(matcher),
            "config": matcher.info.config.to_dict(),
            "threshold": matcher.threshold,
            "max_matches": matcher.max_matches,
            "rotate": matcher.rotate,
            "polish": matcher.polish,
            "precision": str(matcher.dtype).removeprefix("torch."),
        }

    def match_many(self, pairs: Iterable[ImagePair]) -> Iterator[Matches]:
        return self.matcher.match_many(pairs, self.batch_size)


class Sift:
    """OpenCV's SIFT with a ratio test and a mutual check: the baseline that anyone can run."""

    name = "SIFT"

    def __init__(self, features: int = 4096, ratio: float = 0.8, remember: int = 32):
        self.features, self.ratio, self.remember = features, ratio, remember
        self.settings = {"method": "sift", "features": features, "ratio": ratio}

    def match_many(self, pairs: Iterable[ImagePair]) -> Iterator[Matches]:
        sift = cv2.SIFT_create(nfeatures=self.features)  # type: ignore[attr-defined]
        known: OrderedDict[int, tuple[Image, np.ndarray, np.ndarray]] = OrderedDict()
        for pair in pairs:
            for image in pair:
                if id(image) not in known:
                    known[id(image)] = (image, *self._detect(sift, image))
                known.move_to_end(id(image))
            (_, points0, words0), (_, points1, words1) = (known[id(image)] for image in pair)
            index, scores = mutual_ratio_matches(words0, words1, self.ratio)
            yield make_matches(points0[index[:, 0]], points1[index[:, 1]], scores, pair)
            while len(known) > self.remember:
                known.popitem(last=False)

    def _detect(self, sift: Any, image: Image) -> tuple[np.ndarray, np.ndarray]:
        """Points n 2 and descriptors n 128."""
        gray = np.round(image.gray * 255).astype(np.uint8)
        keypoints, words = sift.detectAndCompute(gray, None)
        if words is None:
            return np.empty((0, 2), np.float32), np.empty((0, 128), np.float32)
        # OpenCV may give a few more than asked for when responses are equal.
        points = np.array([k.pt for k in keypoints], np.float32)[: self.features]
        return points, words[: self.features]


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


class Plugin:
    """A function of the user's, see above."""

    def __init__(self, name: str, function: MatchFunction):
        self.name, self.function = name, function
        self.settings = {"method": name, "source": hash_source(function)}

    def match_many(self, pairs: Iterable[ImagePair]) -> Iterator[Matches]:
        for pair in pairs:
            found = self.function(pair[0].rgb, pair[1].rgb)
            points, scores = self._arrays(found)
            finite = np.isfinite(points[0]).all(1) & np.isfinite(points[1]).all(1)
            yield make_matches(points[0][finite], points[1][finite], scores[finite], pair)

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


def hash_source(function: MatchFunction) -> str:
    """Of the file that the function is in, so that a changed one does not get the matches of the old."""
    try:
        source = Path(inspect.getsourcefile(function) or "").read_bytes()
    except (OSError, TypeError):  # built in, or typed in at the prompt
        return ""
    return hashlib.sha256(source).hexdigest()[:16]


def make_matches(points0: np.ndarray, points1: np.ndarray, scores: np.ndarray, pair: ImagePair) -> Matches:
    """Best first, as `Matches` has them."""
    order = np.argsort(-scores, kind="stable")
    a, b = pair
    p0, p1, best = (np.asarray(x[order], np.float32) for x in (points0, points1, scores))
    return Matches(p0, p1, best, a.size, b.size, a.name, b.name)


def hash_weights(matcher: Matcher) -> str:
    """Of the weights themselves rather than of a file: they may be in training."""
    digest = hashlib.sha256()
    for name, tensor in sorted(matcher.model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
