"""Image pair in, `Matches` out: resize, pad, match, turn, and back to original pixels."""

from __future__ import annotations

import copy
import logging
import numbers
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from prism_match import locating
from prism_match.certainty import Calibration, Signs, shipped
from prism_match.config import ModelConfig, Precision, Rescale, Rotate, Runtime, Tiles
from prism_match.corners import corners, to_corners
from prism_match.errors import UserError
from prism_match.images import Image, ImageLike, load_image, load_mask, resize
from prism_match.locating import Located
from prism_match.matches import Details, Matches
from prism_match.memory import give_back_holes
from prism_match.model.arithmetic import inference, own_arithmetic
from prism_match.model.fast import AutocastPRISM, FastPRISM, arranged
from prism_match.model.prism import CELL, STRIDE, Features, PairMatches
from prism_match.model.processor import cpu_has_bf16
from prism_match.model.recorder import Recorder, round_count
from prism_match.polish import FEWEST, neighbourhoods
from prism_match.stages import stage
from prism_match.subpixel import LEVELS, Pyramid, Subpixel, halvings, sharpen
from prism_match.weights import SUBPIXEL_SHA256, WeightsInfo, build_model, load_subpixel, weights_info

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger(__name__)

MaskLike: TypeAlias = "ImageLike | None"
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

DEFAULT_SIZE = 832  # longer side in pixels, the paper's size for its ablations
# Which way up an image is, is told by the sum of the confidences of its matches, but for those that may be
# chance. On real pairs it was at most 0.3 % of the number of cells the wrong way up and seldom below 0.5 %
# the right way up.
EVIDENT, WEAK = 0.2, 0.005
SPARSE = 0.01  # the same where other scales are tried: photos of one scale that share a tenth have more
REWEIGHED = 2  # times, by how well they fit, the matches around one that tell how image 1 is stretched there
MOST_ZOOM = 4.0  # times the size that is matched: larger photos are polished at no more
EXTRACTED_AT_ONCE = 2**20  # pixels: larger images fill a GPU one at a time, as all images fill a CPU
KEPT = 4 * 2**20  # bytes of an image from memory that a result keeps a copy of, for pictures


class PairMatcher:
    """Matches two photos at a time; `Matcher`, which many pairs can be given to, is built on it."""

    def __init__(
        self,
        weights: str | Path | None = None,
        *,
        device: str | torch.device = "auto",
        precision: Precision = "auto",
        backend: Runtime = "torch",
        size: int = DEFAULT_SIZE,
        threshold: float | None = None,
        max_matches: int | None = None,
        rotate: Rotate = "auto",
        rescale: Rescale = "auto",
        polish: bool = True,
        tiles: Tiles | None = None,
        tile_memory: float | None = None,
        config: ModelConfig | None = None,
        calibration: str | Path | None = None,
    ):
        """weights: a .safetensors file, or `hf:OWNER/REPO[@REVISION][:FILE]` for one on the Hugging Face Hub;
        None: those that ship in the package.
        precision: "auto" is bf16 on a GPU, or a CPU of the x86 kind, that has instructions for it, and fp32
        elsewhere and with onnxruntime.
        backend: what runs the model; "onnx": on a CPU in fp32 onnxruntime, which is faster there, of graphs
        that are made once and kept (docs/onnx.md); "auto": that wherever it can, and PyTorch elsewhere. Its
        matches are PyTorch's but for ties and rounding.
        size: images are shrunk to this longer side before they are matched; never enlarged.
        threshold: the least confidence of a match; None: the model's own theta_c.
        max_matches: only so many: those that are right most likely, by `certainty` where there is one.
        rotate: whether image 1 is also tried turned by 90, 180 and 270 degrees, of which the turn with the
        most confident matches counts; it takes four times as long. "auto": only where image 1 as it is
        has next to no matches. Matches are in pixels of the images as they are given, always.
        rescale: "auto": where two images hardly match, they are also tried at other scales, each smaller than
        the other, and what matches then is matched again as finely as both show it (`tiles.py`). "never":
        only as they are.
        polish: whether the model's matches are made exact by a small network that compares both images, as
        large as they are given, around each of them (`subpixel.py`); False: the paper's refinement alone.
        tiles: "auto" matches images larger than `size` whole first and then, where that found something, tile
        by tile at full detail, and tries other scales where they hardly match (`tiles.py`); large files are
        read by windows where rasterio is installed. None: all of an image at once, at `size`.
        tile_memory: GiB that matching a pair of tiles may take, from which their size follows; None: tiles
        of `size`.
        calibration: a file of `prism calibrate`, by which matches have a certainty and a sigma; None: the one
        that ships, for the weights that ship. Without one, or without `polish`, they have neither."""
        check_options(size, threshold, max_matches, rotate, rescale)
        check_tiles(tiles, tile_memory)
        self.rotate, self.rescale, self.polish = rotate, rescale, polish
        self.tiles, self.tile_memory = tiles, tile_memory
        self.device = find_device(device)
        self.dtype = find_dtype(precision, self.device, backend)
        self.size, self.threshold, self.max_matches = size, threshold, max_matches
        self.info = weights_info(weights, config)
        self.calibration = find_calibration(calibration, self.info)
        self.recorder = Recorder()
        self.backend = find_backend(backend, self.info, self.device, self.dtype)
        self.model = self._arranged()
        self.subpixel = load_subpixel().to(self.device)
        if self.device.type == "cuda":
            self.subpixel.on_gpu()
        elif self.device.type == "cpu":
            self.subpixel.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @own_arithmetic()
    def _arranged(self) -> FastPRISM | AutocastPRISM:
        """The model as it is run."""
        model = build_model(self.info)
        if self.backend == "onnx":
            from prism_match.export.onnx.backend import OnnxPRISM

            return OnnxPRISM(model, self.info)
        return arranged(model.to(self.device), self.dtype, self.recorder)

    def match(
        self,
        image0: ImageLike,
        image1: ImageLike,
        mask0: MaskLike = None,
        mask1: MaskLike = None,
        *,
        details: bool = False,
    ) -> Matches:
        """The correspondences of two images. Masks, of the size of their images, are non-zero where
        to look. With `details` the result tells what was pruned and when; with tiles, of the whole images."""
        if self.tiles is not None:
            from prism_match.tiles import match_in_tiles

            return match_in_tiles(self, image0, image1, mask0, mask1, details=details)
        with stage("prepare", host=True):
            images = [
                self.prepare(x, keep=True).masked(mask) for x, mask in ((image0, mask0), (image1, mask1))
            ]
        return self._match_batch([tuple(self.extract_prepared(images))], details)[0]  # type: ignore[list-item]

    def locate(self, image0: ImageLike, image1: ImageLike, points: np.ndarray) -> Located:
        """Where points (n 2: x, y in pixels) of image 0 lie in image 1, how sure that is, and how exact."""
        return locating.locate(self, image0, image1, points)

    def found(self, image0: ImageLike, image1: ImageLike) -> Found:
        """The polished matches of two images, before they become `Matches`. Of those that were found at other
        scales only the place and the confidence is known."""
        first, second = self.extract([image0, image1])
        found = self._best([(first, second)])[0]
        if not self._is_sparse(found):
            return found
        matches = self._finish(found, details=False)
        again = self._at_other_scales((first, second), matches)
        if again is matches:
            return found
        points = (
            image.prepared.from_original(at)
            for image, at in ((first, again.keypoints0), (second, again.keypoints1))
        )
        at0, at1, scores = (torch.from_numpy(x).to(self.device) for x in (*points, again.scores))
        return Found((first, second), at0, at1, scores, found.batch, found.number, exact=True)

    def adjusted(self, **options: Any) -> Self:
        """Another one of the same model, of which nothing is loaded or copied. options: those of `size`,
        `threshold`, `max_matches`, `rotate`, `rescale`, `polish`, `tiles` and `tile_memory` that differ."""
        other = copy.copy(self)
        known = ("size", "threshold", "max_matches", "rotate", "rescale", "polish", "tiles", "tile_memory")
        for name, value in options.items():
            if name not in known:
                raise TypeError(f"{name} cannot be adjusted")
            setattr(other, name, value)
        check_options(other.size, other.threshold, other.max_matches, other.rotate, other.rescale)
        check_tiles(other.tiles, other.tile_memory)
        return other

    def in_dtype(self, dtype: torch.dtype) -> Self:
        """Another one that computes in this precision; its weights are read again."""
        info = self.info
        if info.path is not None and weights_info(info.path, info.config).sha256 != info.sha256:
            raise UserError("the weights have changed since they were loaded")
        other = copy.copy(self)
        other.dtype, other.recorder = dtype, Recorder()  # what is recorded has a precision
        if dtype != torch.float32:
            other.backend = "torch"
        other.model = other._arranged()
        return other

    @property
    def precisions(self) -> list[Precision]:
        """Those that the device is quick in, and its own, which comes first."""
        quick: list[Precision]
        if self.device.type == "cuda":
            quick = ["bf16", "fp16", "fp32"] if gpu_has_bf16(self.device) else ["fp16", "fp32"]
        else:
            quick = ["fp32"] if has_instructions("bf16") is False else ["fp32", "bf16"]
        own = next(name for name, dtype in DTYPES.items() if dtype == self.dtype)
        return [own, *(name for name in quick if name != own)]

    def extract(self, images: Sequence[ImageLike], *, size: int | None = None) -> list[ImageFeatures]:
        """What the backbone sees in each image, to be matched any number of times.
        size: the longer side to shrink to; None: the matcher's."""
        if self.tiles is not None:
            raise UserError(
                "extract: which tiles an image has depends on its partner; use match, or tiles=None"
            )
        return self.extract_prepared([self.prepare(image, size) for image in images])

    @inference()
    def extract_prepared(self, prepared: Sequence[Prepared]) -> list[ImageFeatures]:
        results: dict[int, ImageFeatures] = {}
        # The first thing that a GPU gets: what comes after other work is waited for.
        images = [p.to(self.device) for p in prepared]
        for group in group_by(list(enumerate(prepared)), lambda x: x[1].gray.shape):
            at_once = self.images_at_once(group[0][1].gray.size)
            for start in range(0, len(group), at_once):
                some = group[start : start + at_once]
                each = [images[n] for n, _ in some]
                gray = each[0][None] if len(each) == 1 else torch.stack(each)
                for (n, p), f, image in zip(some, self._extract(gray), gray, strict=True):
                    results[n] = ImageFeatures(p, f)
                    if self.polish:
                        results[n] = results[n].to_polish(image, self.recorder)
        return [results[n] for n in range(len(prepared))]

    def images_at_once(self, pixels: int) -> int:
        """How many images of so many pixels the backbone sees together."""
        return max(1, EXTRACTED_AT_ONCE // pixels) if self.device.type == "cuda" else 1

    def match_extracted(
        self, pairs: Sequence[tuple[ImageFeatures, ImageFeatures]], *, details: bool = False
    ) -> list[Matches]:
        """The matches of each pair of images that `extract` has seen; pairs of equal padded size at once."""
        results: dict[int, Matches] = {}
        for group in group_by(list(enumerate(pairs)), lambda x: tuple(i.prepared.padded_size for i in x[1])):
            matches = self._match_batch([pair for _, pair in group], details)
            results |= {n: m for (n, _), m in zip(group, matches, strict=True)}
        return [results[n] for n in range(len(pairs))]

    def prepare(self, source: ImageLike, size: int | None = None, *, keep: bool = False) -> Prepared:
        """An image turned gray and resized; its features can be computed any time later.
        size: the longer side to shrink to; None: the matcher's. keep: a copy of an image from memory, where
        it is small, so that matches can be drawn; larger ones have to be given to `Matches.plot` again."""
        if size is not None:
            check_size(size)
        image = load_image(source)
        width, height = image.size
        scale = min((size or self.size) / max(width, height), 1.0)
        w, h = max(CELL, round(width * scale)), max(CELL, round(height * scale))
        sharp = None
        if self.polish and scale < 1:
            zoom = min(1 / scale, MOST_ZOOM)
            large = resized(image, *(max(1, round(n * scale * zoom)) for n in (width, height)))
            # A quarter of the memory, and no less exact.
            sharp = large if large.dtype == np.uint8 else (large * 255).round().astype(np.uint8)
        gray = resized(image, w, h)
        kept = None
        if keep and not isinstance(source, (str, os.PathLike)) and image.pixels.nbytes <= KEPT:
            # The caller's memory may get another image; where the model takes a copy as it is, it is that.
            same = (gray.shape, gray.dtype) == (image.pixels.shape, image.pixels.dtype)
            kept = Image(gray if same else image.pixels.copy(), image.name)
        return Prepared(gray, image.size, image.name, kept, sharp=sharp).masked(image.opaque)

    def _extract(self, gray: Tensor) -> list[Features]:
        """Backbone features of images of equal size (b h w), one `Features` each."""
        features = self.model.extract(gray[:, None])
        if len(gray) == 1:
            return [features]
        # Views of one batch would hold all of its memory as long as any of them is needed.
        parts = zip(features.coarse.split(1), features.fine.split(1), features.valid.split(1), strict=True)
        return [Features(*(tensor.clone() for tensor in part)) for part in parts]

    def _match_batch(self, pairs: list[FeaturesPair], details: bool) -> list[Matches]:
        """Of pairs of equal padded sizes."""
        results = []
        for pair, found in zip(pairs, self._best(pairs), strict=True):
            matches = self._finish(found, details)
            if self._is_sparse(found):
                matches = self._at_other_scales(pair, matches)
            results.append(matches if self.max_matches is None else matches.filter(top=self.max_matches))
        if self.device.type == "cpu":
            give_back_holes()
        return results

    def _is_sparse(self, found: Found) -> bool:
        """Whether other scales should be tried."""
        return self.rescale == "auto" and found.is_below(SPARSE)

    def _at_other_scales(self, pair: FeaturesPair, matches: Matches) -> Matches:
        from prism_match.tiles import match_at_other_scales

        return match_at_other_scales(self, pair, matches)

    @inference()
    def _best(self, pairs: list[FeaturesPair]) -> list[Found]:
        """Of pairs of equal padded sizes, turned if need be, and polished."""
        best = self._match_as_they_are(pairs)
        if self.rotate != "always":  # most stay as they are: what is not waited for can be done meanwhile
            best = [self._exact(found) for found in best]
        tried = [n for n, found in enumerate(best) if self._is_doubtful(found)]
        for turns in (1, 2, 3) if tried else ():
            turned = self.extract_prepared([pairs[n][1].prepared.turned(turns) for n in tried])
            again = [(pairs[n][0], image) for n, image in zip(tried, turned, strict=True)]
            for n, found in zip(tried, self._match_as_they_are(again), strict=True):
                best[n] = max(best[n], found, key=Found.evidence)  # the first of equals: turned the least
        return [self._exact(found) for found in best]

    def _is_doubtful(self, found: Found) -> bool:
        """Whether image 1 should be turned."""
        if self.rotate != "auto":
            return self.rotate == "always"
        return found.is_below(WEAK)

    def _match_as_they_are(self, pairs: list[FeaturesPair]) -> list[Found]:
        a, b = (stack([pair[i].features for pair in pairs]) for i in range(2))
        keep0, keep1 = (self._regions([pair[i].prepared for pair in pairs]) for i in range(2))
        found = self.model.match(a, b, keep0, keep1, self.threshold)
        counts = [len(found.batch)]
        if len(pairs) > 1:
            counts = torch.bincount(found.batch, minlength=len(pairs)).tolist()
        at0, at1, scores = (x.split(counts) for x in (found.keypoints0, found.keypoints1, found.confidence))
        return [Found(pair, at0[n], at1[n], scores[n], found, n) for n, pair in enumerate(pairs)]

    def _regions(self, prepared: list[Prepared]) -> Tensor | None:
        if all(p.mask is None for p in prepared):
            return None
        return torch.from_numpy(np.stack([p.region for p in prepared])).to(self.device)

    def _exact(self, found: Found) -> Found:
        """Polished, once."""
        if found.exact or not self.polish or not len(found.at1):
            return found
        with stage("polish"):
            at0, at1, *signs = self._polish(found)
            return replace(found, at0=at0, at1=at1, signs=tuple(signs), exact=True)

    def _finish(self, found: Found, details: bool) -> Matches:
        a, b = (image.prepared for image in found.pair)
        # In one piece: each way from a device to the host is waited for.
        columns = (found.at0, found.at1, found.confidence, *(found.signs or ()))
        order = found.confidence.argsort(descending=True, stable=True)
        table = torch.column_stack(columns)[order].cpu().numpy()
        points0, points1 = a.to_original(table[:, :2]), b.to_original(table[:, 2:4])
        inside = is_inside(points0, a.size) & is_inside(points1, b.size)
        scores, *told = (column[inside] for column in table.T[4:])
        certainty = sigma = None
        if self.calibration is not None and found.signs is not None:
            certainty, sigma = self.calibration.matches(b.signs(scores, *told))
        return Matches(
            points0[inside], points1[inside], scores,
            a.size, b.size, a.name, b.name,
            found.details() if details else None,
            (a.in_memory, b.in_memory), certainty, sigma,
        )  # fmt: skip

    @inference()
    def _polish(self, found: Found) -> tuple[Tensor, ...]:
        """What `polished` gives."""
        (a, b), at0, at1 = found.pair, found.at0, found.at1
        assert a.pyramid is not None and b.pyramid is not None and a.corners is not None
        scales = (a.prepared.sharp_scale, b.prepared.sharp_scale)
        largest = halvings(min(a.prepared.zoom, b.prepared.zoom))
        units, few = (a.pyramid.unit, b.pyramid.unit), len(at0) < FEWEST
        # Those that are added, for a number that is seen often, lie too far away to be neighbours.
        more = (0, 0, 0, round_count(len(at0), at0.device) - len(at0))
        results = self.recorder(
            ("polish", scales, largest, units, few),
            partial(polished, self.subpixel, scales, largest, units, few),
            F.pad(at0, more, value=-1e6), F.pad(at1, more), F.pad(found.confidence, more[2:]), a.corners,
            a.pyramid.flat, a.pyramid.table, b.pyramid.flat, b.pyramid.table,
        )  # fmt: skip
        return tuple(x[: len(at0)] for x in results)


def polished(
    network: Subpixel,
    scales: tuple[tuple[float, float], tuple[float, float]],
    largest: int,
    units: tuple[float, float],
    few: bool,
    at0: Tensor,
    at1: Tensor,
    scores: Tensor,
    found: Tensor,
    *tables: Tensor,
) -> tuple[Tensor, ...]:
    """at0, moved to what `corners` found in the cells of image 0 (rows columns 2); what `sharpen` gives; by
    how much the matches around each did not fit (n), and how far they are in image 0 (n), in pixels of the
    model's images.
    scores: n; units: of the pyramids, `tables` the rest of them; few: too few matches to tell how the images
    are stretched."""
    first, second = Pyramid(units[0], tables[1], tables[0]), Pyramid(units[1], tables[3], tables[2])
    if few:
        same = torch.eye(2, device=at0.device).expand(len(at0), 2, 2)
        unknown = torch.full_like(at0[:, 0], torch.inf)
        return at0, *sharpen(network, first, second, scales, largest, at0, at1, same), unknown, unknown
    # Unsure matches get the map of sure ones around them, and tell nothing about each other.
    sure = scores >= EVIDENT
    sure = sure | (sure.sum() < FEWEST)
    told = neighbourhoods(at0, at1, REWEIGHED, sure)
    at0, at1 = to_corners(found, at0, at1, *told[:2])

    def anew(at1: Tensor) -> Tensor:
        nonlocal told
        told = neighbourhoods(at0, at1, REWEIGHED, sure)
        return told[0]

    at1, error = sharpen(network, first, second, scales, largest, at0, at1, told[0], anew)
    return at0, at1, error, *told[1:]


@dataclass(frozen=True)
class Prepared:
    """An image as the model takes it, and the way back to its original pixels."""

    gray: np.ndarray  # h w, float32 in [0, 1] or uint8, resized and turned
    size: tuple[int, int]  # original width, height
    name: str
    in_memory: Image | None  # the image itself where it came from no file and is small
    mask: np.ndarray | None = None  # h w, float32, resized and turned: where to look
    turns: int = 0  # by 90 degrees, as np.rot90 does it
    # H W, uint8, turned: as large as it is worth polishing at; None: no larger than `gray`
    sharp: np.ndarray | None = None

    def to(self, device: torch.device) -> Tensor:
        """h w, float32 in [0, 1]. Bytes go there as they are: they are a quarter of it."""
        gray = torch.from_numpy(np.ascontiguousarray(self.gray)).to(device)
        return gray if gray.dtype == torch.float32 else gray.float() / torch.full((), 255.0, device=device)

    def masked(self, source: MaskLike) -> Prepared:
        """With a mask, beside the one it may have; the image is not turned yet."""
        if source is None:
            return self
        height, width = self.gray.shape
        mask = resize(load_mask(source, self).astype(np.float32), width, height)
        return replace(self, mask=mask if self.mask is None else np.minimum(mask, self.mask))

    def turned(self, turns: int) -> Prepared:
        mask = None if self.mask is None else np.rot90(self.mask, turns)
        sharp = None if self.sharp is None else np.rot90(self.sharp, turns)
        return replace(
            self, gray=np.rot90(self.gray, turns), mask=mask, turns=self.turns + turns, sharp=sharp
        )

    @property
    def zoom(self) -> float:
        """How much larger than `gray` there is an image to polish at."""
        return 1.0 if self.sharp is None else max(self.sharp.shape) / max(self.gray.shape)

    @property
    def sharp_scale(self) -> tuple[float, float]:
        """Pixels of `sharp` that are one of `gray`, along x and y."""
        if self.sharp is None:
            return 1.0, 1.0
        (height, width), (h, w) = self.sharp.shape, self.gray.shape
        return width / w, height / h

    def pyramid(self, gray: Tensor, recorder: Recorder) -> Pyramid:
        """To polish by. gray: h w, the image where the model is."""
        if self.sharp is not None:
            # A turned image is a view with negative strides, which tensors cannot have.
            gray = torch.from_numpy(np.ascontiguousarray(self.sharp)).to(gray.device)
        return Pyramid.of(gray[None], LEVELS + halvings(self.zoom), recorder)

    def signs(self, score: np.ndarray, stated: np.ndarray, misfit: np.ndarray, away: np.ndarray) -> Signs:
        """Of matches with this as image 1: stated, misfit: n, in pixels of `gray`; away: n, of image 0's."""
        pixel = max(self.size) / max(self.gray.shape)
        return Signs(score, stated * pixel, misfit * pixel, away, pixel)

    @property
    def cell_count(self) -> int:
        """Cells to look at."""
        if self.mask is not None:
            return int(self.region.sum())
        rows, columns = ((n + CELL // 2) // CELL for n in self.gray.shape)  # at least half of a cell
        return rows * columns

    @property
    def region(self) -> np.ndarray:
        """Cells to look at, of the padded size: those of which at least half of the pixels are."""
        height, width = self.gray.shape
        mask = np.ones_like(self.gray) if self.mask is None else self.mask
        padded = np.pad(mask, ((0, -height % STRIDE), (0, -width % STRIDE)))
        return padded.reshape(padded.shape[0] // CELL, CELL, -1, CELL).mean(axis=(1, 3)) >= 0.5

    @property
    def padded_size(self) -> tuple[int, int]:
        """Width, height once the model has padded it."""
        height, width = self.gray.shape
        return width + -width % STRIDE, height + -height % STRIDE

    @property
    def cells(self) -> tuple[int, int]:
        """Rows and columns of cells that hold at least one pixel of the image."""
        height, width = self.gray.shape
        return -(-height // CELL), -(-width // CELL)

    def from_original(self, points: np.ndarray) -> np.ndarray:
        """n 2, float32: what `to_original` undoes, of an image that is not turned."""
        scale = np.array(self.gray.shape[::-1]) / np.array(self.size)
        return ((points + 0.5) * scale - 0.5).astype(np.float32)

    def to_original(self, points: np.ndarray) -> np.ndarray:
        """n 2, float32: turned back, then the inverse of x -> (x + 0.5) * s - 0.5."""
        size = np.array(self.gray.shape[::-1], dtype=np.float32)
        for _ in range(self.turns):
            points = np.stack([size[1] - 1 - points[:, 1], points[:, 0]], axis=1)
            size = size[::-1]
        scale = np.array(self.size, dtype=np.float32) / size
        return ((points + 0.5) * scale - 0.5).astype(np.float32).reshape(-1, 2)


@dataclass(frozen=True)
class ImageFeatures:
    """An image as the model takes it, with what the backbone sees in it."""

    prepared: Prepared
    features: Features
    pyramid: Pyramid | None = None  # to polish by
    corners: Tensor | None = None  # rows columns 2: the points of the cells that are polished

    def to_polish(self, gray: Tensor, recorder: Recorder | None = None) -> ImageFeatures:
        """With what that needs. gray: h w, the image where the model is."""
        recorder = recorder or Recorder(enabled=False)
        with stage("polish"):
            (found,) = recorder(("corners",), lambda x: (corners(x),), gray)
            return replace(self, pyramid=self.prepared.pyramid(gray, recorder), corners=found)

    def masked(self, mask: MaskLike) -> ImageFeatures:
        return self if mask is None else replace(self, prepared=self.prepared.masked(mask))

    def pack(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """As tensors and texts, for a file."""
        f, p = self.features, self.prepared
        tensors = {"coarse": f.coarse, "fine": f.fine, "valid": f.valid, "gray": torch.from_numpy(p.gray)}
        for key, image in (("sharp", p.sharp), ("mask", p.mask)):
            if image is not None:
                tensors[key] = torch.from_numpy(image)
        plain = {k: v.cpu().contiguous() for k, v in tensors.items()}
        return plain, {"name": p.name, "width": str(p.size[0]), "height": str(p.size[1])}

    @staticmethod
    def unpack(
        tensors: dict[str, Tensor], texts: dict[str, str], device: torch.device, polish: bool
    ) -> ImageFeatures:
        """What `pack` gave."""
        size = int(texts["width"]), int(texts["height"])
        sharp, mask = (tensors[k].numpy() if k in tensors else None for k in ("sharp", "mask"))
        prepared = Prepared(tensors["gray"].numpy(), size, texts["name"], None, mask, sharp=sharp)
        features = Features(*(tensors[k].to(device) for k in ("coarse", "fine", "valid")))
        image = ImageFeatures(prepared, features)
        return image.to_polish(prepared.to(device)) if polish else image


FeaturesPair: TypeAlias = tuple[ImageFeatures, ImageFeatures]


@dataclass(frozen=True)
class Found:
    """The matches of one pair of a batch, in pixels of its images as the model takes them."""

    pair: FeaturesPair
    at0: Tensor  # m 2
    at1: Tensor  # m 2
    confidence: Tensor  # m
    batch: PairMatches
    number: int  # of the pair in the batch
    exact: bool = False  # polished
    signs: tuple[Tensor, ...] | None = None  # what `polished` tells beside the place

    @cached_property
    def scores(self) -> np.ndarray:
        return self.confidence.cpu().numpy()

    def evidence(self) -> float:
        """How much speaks for it: the sum of the confidences, but for those that may be chance."""
        return float(self.scores[self.scores >= EVIDENT].sum())

    def is_below(self, share: float) -> bool:
        """Whether less speaks for it than this share of the cells there are."""
        return self.evidence() < share * min(image.prepared.cell_count for image in self.pair)

    def details(self) -> Details:
        """The masks and NMI, cut to the cells that hold pixels. Those of a turned image are turned back;
        they then begin at another corner of it, which shifts them by less than a cell."""

        def cut(name: str, image: ImageFeatures) -> np.ndarray:
            rows, columns = image.prepared.cells
            maps = [getattr(layer, name)[self.number, :rows, :columns] for layer in self.batch.layers]
            return np.rot90(torch.stack(maps).cpu().numpy(), -image.prepared.turns, axes=(1, 2))

        def nmi(name: str, image: ImageFeatures) -> np.ndarray:
            return 1 / (1 + np.exp(-cut(name, image)))  # 0 where it was not estimated any more

        a, b = self.pair
        masks = cut("keep0", a), cut("keep1", b)
        if any(layer.logit0 is None for layer in self.batch.layers):  # not every MPM has an estimator
            return Details(*masks, None, None)
        return Details(*masks, nmi("logit0", a), nmi("logit1", b))


def group_by(items: list[Any], key: Any) -> list[list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def stack(features: list[Features]) -> Features:
    if len(features) == 1:
        return features[0]
    parts = zip(*((f.coarse, f.fine, f.valid) for f in features), strict=True)
    return Features(*(torch.cat(part) for part in parts))


def resized(image: Image, width: int, height: int) -> np.ndarray:
    """h w, float32 in [0, 1], or uint8 where nothing is resized; in memory of its own."""
    pixels = image.pixels
    if (width, height) == image.size and pixels.ndim == 2 and pixels.dtype == np.uint8:
        return pixels.copy()
    gray = resize(image.gray, width, height)
    return gray.copy() if np.may_share_memory(gray, pixels) else gray


def is_inside(points: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """n, bool: on the area of a pixel of the image."""
    x, y = points.T
    return (x >= -0.5) & (x <= size[0] - 0.5) & (y >= -0.5) & (y <= size[1] - 0.5)


def check_options(
    size: int, threshold: float | None, max_matches: int | None, rotate: str, rescale: str = "never"
) -> None:
    check_size(size)
    if threshold is not None and not 0 <= threshold < 1:
        raise UserError(f"threshold must be at least 0 and below 1, not {threshold}")
    if max_matches is not None and (not isinstance(max_matches, numbers.Integral) or max_matches < 1):
        raise UserError(f"max_matches must be a whole number of at least 1, not {max_matches!r}")
    if rotate not in get_args(Rotate):
        raise UserError(f"rotate must be one of {', '.join(get_args(Rotate))}, not {rotate!r}")
    if rescale not in get_args(Rescale):
        raise UserError(f"rescale must be one of {', '.join(get_args(Rescale))}, not {rescale!r}")


def check_tiles(tiles: Any, memory: Any) -> None:
    if tiles not in (None, *get_args(Tiles)):
        raise UserError(f"tiles must be None or {', '.join(get_args(Tiles))}, not {tiles!r}")
    if memory is None:
        return
    if tiles is None:
        raise UserError("tile_memory is for tiles alone")
    if isinstance(memory, bool) or not isinstance(memory, (int, float)) or not 0 < memory < float("inf"):
        raise UserError(f"tile_memory must be a positive number of GiB, not {memory!r}")


def check_size(size: Any) -> None:
    if not isinstance(size, numbers.Integral) or isinstance(size, bool) or size < STRIDE:
        raise UserError(f"size must be a whole number of at least {STRIDE} pixels, not {size!r}")


def find_calibration(path: str | Path | None, info: WeightsInfo) -> Calibration | None:
    """None: there is none for these weights."""
    calibration = shipped() if path is None else Calibration.load(Path(path))
    if (calibration.weights, calibration.subpixel) == (info.sha256, SUBPIXEL_SHA256):
        return calibration
    if path is not None:
        raise UserError(f"{path}: made for other weights (sha256 {calibration.weights[:12]}...)")
    return None


def find_device(name: str | torch.device) -> torch.device:
    """ "auto": the GPU if there is one."""
    if str(name) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"{name}: no such device; use auto, cpu, cuda, cuda:N or mps") from error
    if device.type not in ("cpu", "cuda", "mps"):
        raise UserError(f"{name}: only cpu, cuda and mps are supported")
    if device.type == "mps":
        if not torch.backends.mps.is_available():
            raise UserError(f"{name}: this machine, or its PyTorch, has no Metal")
        warn_of_metal()
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"{name}: there are {torch.cuda.device_count()} CUDA devices on this machine")
    return device


@cache
def warn_of_metal() -> None:
    """Once."""
    log.warning('mps: untested; compare the matches with those of device="cpu" before you rely on them')


def find_dtype(precision: Precision, device: torch.device, backend: Runtime = "torch") -> torch.dtype:
    if precision == "auto":
        if device.type == "cuda":
            quick = gpu_has_bf16(device)
        else:
            quick = device.type == "cpu" and backend != "onnx" and has_instructions("bf16") is True
        return torch.bfloat16 if quick else torch.float32
    if precision not in DTYPES:
        raise UserError(f"precision must be auto, fp32, bf16 or fp16, not {precision!r}")
    if device.type == "cpu" and has_instructions(precision) is False:
        log.warning("this CPU has no instructions for %s: fp32 is several times as fast here", precision)
    return DTYPES[precision]


def gpu_has_bf16(device: torch.device) -> bool:
    """Whether this one has instructions for it, not whether it can do without."""
    with torch.cuda.device(device):
        return torch.cuda.is_bf16_supported(including_emulation=False)


def find_backend(
    name: Runtime, info: WeightsInfo, device: torch.device, dtype: torch.dtype
) -> Literal["torch", "onnx"]:
    """ "auto": onnxruntime wherever it can run the model, whether its graphs are there already or not, so
    that a machine always takes the same."""
    if name not in get_args(Runtime):
        raise UserError(f"backend must be one of {', '.join(get_args(Runtime))}, not {name!r}")
    if name == "torch":
        return name
    from prism_match.export.onnx.backend import why_not

    reason = why_not(info, device, dtype)
    if reason is not None and name == "onnx":
        raise UserError(f"backend onnx {reason}")
    return "torch" if reason is not None else "onnx"


def has_instructions(precision: Precision) -> bool | None:
    """Whether a CPU computes in this precision itself; None where that cannot be told."""
    if precision == "fp32":
        return True
    return cpu_has_bf16() if precision == "bf16" else None


def match(image0: ImageLike, image1: ImageLike, **options: Any) -> Matches:
    """Match two images with the default settings. For more than one pair, keep a `Matcher`."""
    return PairMatcher(**options).match(image0, image1)
