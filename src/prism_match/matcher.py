"""Image pair in, `Matches` out: resize, pad, match, turn, and back to original pixels."""

from __future__ import annotations

import numbers
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from prism_match.config import ModelConfig, Precision, Rotate
from prism_match.errors import UserError
from prism_match.images import Image, ImageLike, load_image, load_mask, resize
from prism_match.matches import Details, Matches
from prism_match.model.prism import CELL, STRIDE, Features, PairMatches
from prism_match.polish import MOST_ZOOM, local_affine, zooms
from prism_match.subpixel import Pyramid, settle
from prism_match.weights import build_model, load_subpixel, weights_info

MaskLike: TypeAlias = "ImageLike | None"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

DEFAULT_SIZE = 832  # longer side in pixels, the paper's size for its ablations
# Which way up an image is, is told by the sum of the confidences of its matches, but for those that may be
# chance. On real pairs it was at most 0.3 % of the number of cells the wrong way up and seldom below 0.5 %
# the right way up.
EVIDENT, WEAK = 0.2, 0.005
REWEIGHED = 2  # times, by how well they fit, the matches around one that tell how image 1 is stretched there
KEPT = 4 * 2**20  # bytes of an image from memory that a result keeps a copy of, for pictures


class PairMatcher:
    """Matches two photos at a time; `Matcher`, which many pairs can be given to, is built on it."""

    def __init__(
        self,
        weights: str | Path | None = None,
        *,
        device: str | torch.device = "auto",
        precision: Precision = "auto",
        size: int = DEFAULT_SIZE,
        threshold: float | None = None,
        max_matches: int | None = None,
        rotate: Rotate = "auto",
        polish: bool = True,
        config: ModelConfig | None = None,
    ):
        """weights: a .safetensors file, or hf:OWNER/REPO[@REVISION][:FILE] for one on the Hugging Face Hub;
        None: those that ship in the package.
        precision: "auto" is bf16 on a GPU that has it and fp32 elsewhere.
        size: images are shrunk to this longer side before they are matched; never enlarged.
        threshold: the least confidence of a match; None: the model's own theta_c.
        max_matches: only so many of the most confident ones.
        rotate: whether image 1 is also tried turned by 90, 180 and 270 degrees, of which the turn with the
        most confident matches counts; it takes four times as long. "auto": only where image 1 as it is
        has next to no matches. Matches are in pixels of the images as they are given, always.
        polish: whether the model's matches are made exact by a small network that compares both images, as
        large as they are given, around each of them (`subpixel.py`); False: the paper's refinement alone."""
        check_size(size)
        if threshold is not None and not 0 <= threshold < 1:
            raise UserError(f"threshold must be at least 0 and below 1, not {threshold}")
        if max_matches is not None and max_matches < 1:
            raise UserError(f"max_matches must be at least 1, not {max_matches}")
        if rotate not in get_args(Rotate):
            raise UserError(f"rotate must be one of {', '.join(get_args(Rotate))}, not {rotate!r}")
        self.rotate, self.polish = rotate, polish
        self.device = find_device(device)
        self.dtype = find_dtype(precision, self.device)
        self.size, self.threshold, self.max_matches = size, threshold, max_matches
        self.info = weights_info(weights, config)
        self.model = build_model(self.info).to(self.device)
        self.subpixel = load_subpixel().to(self.device)
        if self.device.type == "cuda":
            self.model.backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

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
        to look. With `details` the result tells what was pruned and when."""
        pair = PreparedPair(
            *(self.prepare(x, keep=True).masked(mask) for x, mask in ((image0, mask0), (image1, mask1)))
        )
        return self._match_batch([pair], self._extract([pair.a]), self._extract([pair.b]), details)[0]

    def extract(self, images: Sequence[ImageLike], *, size: int | None = None) -> list[ImageFeatures]:
        """What the backbone sees in each image, to be matched any number of times.
        size: the longer side to shrink to; None: the matcher's."""
        return self.extract_prepared([self.prepare(image, size) for image in images])

    def extract_prepared(self, prepared: Sequence[Prepared]) -> list[ImageFeatures]:
        results: dict[int, ImageFeatures] = {}
        for group in group_by(list(enumerate(prepared)), lambda x: x[1].padded_size):
            for (n, p), features in zip(group, self._extract([p for _, p in group]), strict=True):
                results[n] = ImageFeatures(p, features)
        return [results[n] for n in range(len(prepared))]

    def match_extracted(
        self, pairs: Sequence[tuple[ImageFeatures, ImageFeatures]], *, details: bool = False
    ) -> list[Matches]:
        """The matches of each pair of images that `extract` has seen; pairs of equal padded size at once."""
        results: dict[int, Matches] = {}
        for group in group_by(list(enumerate(pairs)), lambda x: tuple(i.prepared.padded_size for i in x[1])):
            matches = self._match_batch(
                [PreparedPair(a.prepared, b.prepared) for _, (a, b) in group],
                [a.features for _, (a, _) in group],
                [b.features for _, (_, b) in group],
                details,
            )
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
        kept = None
        if keep and not isinstance(source, (str, os.PathLike)) and image.pixels.nbytes <= KEPT:
            kept = Image(image.pixels.copy(), image.name)  # the caller's memory may get another image
        sharp = None
        if self.polish and scale < 1:
            zoom = min(1 / scale, MOST_ZOOM)
            large = resize(image.gray, *(max(1, round(n * scale * zoom)) for n in (width, height)))
            sharp = (large * 255).round().astype(np.uint8)  # a quarter of the memory, and no less exact
        gray = resize(image.gray, w, h)
        gray = gray.copy() if np.may_share_memory(gray, image.pixels) else gray
        return Prepared(gray, image.size, image.name, kept, sharp=sharp).masked(image.opaque)

    @torch.inference_mode()
    def _extract(self, prepared: list[Prepared]) -> list[Features]:
        """Backbone features of images of equal padded size, one `Features` each."""
        columns, rows = prepared[0].padded_size
        images = np.zeros((len(prepared), 1, rows, columns), dtype=np.float32)
        mask = np.zeros_like(images)
        for n, p in enumerate(prepared):
            height, width = p.gray.shape
            images[n, 0, :height, :width] = p.gray
            mask[n, 0, :height, :width] = 1
        with self._autocast():
            features = self.model.extract(
                torch.from_numpy(images).to(self.device),
                None if mask.all() else torch.from_numpy(mask).to(self.device),
            )
        if len(prepared) == 1:
            return [features]
        # Views of one batch would hold all of its memory as long as any of them is needed.
        parts = zip(features.coarse.split(1), features.fine.split(1), features.valid.split(1), strict=True)
        return [Features(*(tensor.clone() for tensor in part)) for part in parts]

    def _match_batch(
        self, pairs: list[PreparedPair], features0: list[Features], features1: list[Features], details: bool
    ) -> list[Matches]:
        """Of pairs of equal padded sizes, turned if need be."""
        best = self._match_as_they_are(pairs, features0, features1, details)
        tried = [n for n, pair in enumerate(pairs) if self._is_doubtful(best[n], pair)]
        for turns in (1, 2, 3) if tried else ():
            turned = [PreparedPair(pairs[n].a, pairs[n].b.turned(turns)) for n in tried]
            features = self._extract([pair.b for pair in turned])
            found = self._match_as_they_are(turned, [features0[n] for n in tried], features, details)
            for n, matches in zip(tried, found, strict=True):
                best[n] = max(best[n], matches, key=evidence)  # the first of equals: turned the least
        return [matches.filter(top=self.max_matches) for matches in best]

    def _is_doubtful(self, matches: Matches, pair: PreparedPair) -> bool:
        """Whether image 1 should be turned."""
        if self.rotate != "auto":
            return self.rotate == "always"
        return evidence(matches) < WEAK * min(pair.a.region.sum(), pair.b.region.sum())

    @torch.inference_mode()
    def _match_as_they_are(
        self, pairs: list[PreparedPair], features0: list[Features], features1: list[Features], details: bool
    ) -> list[Matches]:
        a, b = stack(features0), stack(features1)
        keep0 = self._regions([p.a for p in pairs], a)
        keep1 = self._regions([p.b for p in pairs], b)
        with self._autocast():
            found = self.model.match(a, b, keep0, keep1, self.threshold)
        return [self._to_matches(found, n, pair, details) for n, pair in enumerate(pairs)]

    def _regions(self, prepared: list[Prepared], features: Features) -> Tensor | None:
        if all(p.mask is None for p in prepared):
            return None
        shape = features.valid.shape[1:]
        regions = [np.ones(shape, dtype=bool) if p.mask is None else p.region for p in prepared]
        return torch.from_numpy(np.stack(regions)).to(self.device)

    def _to_matches(self, found: PairMatches, n: int, pair: PreparedPair, details: bool) -> Matches:
        mine = found.batch == n
        at0, at1 = found.keypoints0[mine].float(), found.keypoints1[mine].float()
        if self.polish and len(at0):
            at1 = self._polish(pair, at0, at1)
        points0, points1, scores = (x.cpu().numpy() for x in (at0, at1, found.confidence[mine].float()))
        points0, points1 = pair.a.to_original(points0), pair.b.to_original(points1)
        inside = is_inside(points0, pair.a.size) & is_inside(points1, pair.b.size)
        order = np.argsort(-scores, kind="stable")
        order = order[inside[order]]
        return Matches(
            points0[order], points1[order], scores[order],
            pair.a.size, pair.b.size, pair.a.name, pair.b.name,
            collect_details(found, n, pair) if details else None,
            (pair.a.in_memory, pair.b.in_memory),
        )  # fmt: skip

    def _polish(self, pair: PreparedPair, at0: Tensor, at1: Tensor) -> Tensor:
        for n, zoom in enumerate(zooms(min(pair.a.zoom, pair.b.zoom))):
            gray0, gray1 = (p.zoomed(zoom) for p in (pair.a, pair.b))
            scale0, scale1 = (
                at0.new_tensor([gray.shape[1] / p.gray.shape[1], gray.shape[0] / p.gray.shape[0]])
                for gray, p in ((gray0, pair.a), (gray1, pair.b))
            )
            near0, near1 = (at0 + 0.5) * scale0 - 0.5, (at1 + 0.5) * scale1 - 0.5
            first, second = (Pyramid(torch.from_numpy(gray)[None].to(self.device)) for gray in (gray0, gray1))
            # Twice at first: once they are better, matches tell better how image 1 is stretched.
            for _ in range(1 if n else 2):
                stretch = local_affine(near0, near1, rounds=REWEIGHED)
                near1, _ = settle(self.subpixel, first, second, near0, near1, stretch)
            at1 = (near1 + 0.5) / scale1 - 0.5
        return at1

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)


@dataclass(frozen=True)
class Prepared:
    """An image as the model takes it, and the way back to its original pixels."""

    gray: np.ndarray  # h w, float32, resized and turned
    size: tuple[int, int]  # original width, height
    name: str
    in_memory: Image | None  # the image itself where it came from no file and is small
    mask: np.ndarray | None = None  # h w, float32, resized and turned: where to look
    turns: int = 0  # by 90 degrees, as np.rot90 does it
    # H W, uint8, turned: as large as it is worth polishing at; None: no larger than `gray`
    sharp: np.ndarray | None = None

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

    def zoomed(self, zoom: float) -> np.ndarray:
        """h w, float32: the image at that many times the size of `gray`."""
        # A turned image is a view with negative strides, which tensors cannot have.
        if zoom == 1 or self.sharp is None:
            return np.ascontiguousarray(self.gray)
        height, width = (round(n * zoom / self.zoom) for n in self.sharp.shape)
        return resize(np.ascontiguousarray(self.sharp), width, height).astype(np.float32) / 255

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

    def to_original(self, points: np.ndarray) -> np.ndarray:
        """n 2, float32: turned back, then the inverse of x -> (x + 0.5) * s - 0.5."""
        size = np.array(self.gray.shape[::-1], dtype=np.float32)
        for _ in range(self.turns):
            points = np.stack([size[1] - 1 - points[:, 1], points[:, 0]], axis=1)
            size = size[::-1]
        scale = np.array(self.size, dtype=np.float32) / size
        return ((points + 0.5) * scale - 0.5).astype(np.float32).reshape(-1, 2)


@dataclass(frozen=True)
class PreparedPair:
    a: Prepared
    b: Prepared


@dataclass(frozen=True)
class ImageFeatures:
    """An image as the model takes it, with what the backbone sees in it."""

    prepared: Prepared
    features: Features

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
    def unpack(tensors: dict[str, Tensor], texts: dict[str, str], device: torch.device) -> ImageFeatures:
        """What `pack` gave."""
        size = int(texts["width"]), int(texts["height"])
        sharp, mask = (tensors[k].numpy() if k in tensors else None for k in ("sharp", "mask"))
        prepared = Prepared(tensors["gray"].numpy(), size, texts["name"], None, mask, sharp=sharp)
        return ImageFeatures(
            prepared, Features(*(tensors[k].to(device) for k in ("coarse", "fine", "valid")))
        )


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


def collect_details(found: PairMatches, n: int, pair: PreparedPair) -> Details:
    """The masks and NMI of one pair, cut to the cells that hold pixels. Those of a turned image are turned
    back; they then begin at another corner of it, which shifts them by less than a cell."""

    def cut(name: str, prepared: Prepared) -> np.ndarray:
        rows, columns = prepared.cells
        maps = [getattr(layer, name) for layer in found.layers]
        cells = torch.stack([m[n, :rows, :columns] for m in maps]).cpu().numpy()
        return np.rot90(cells, -prepared.turns, axes=(1, 2))

    def nmi(name: str, prepared: Prepared) -> np.ndarray:
        return 1 / (1 + np.exp(-cut(name, prepared)))  # 0 where it was not estimated any more

    keep0, keep1 = cut("keep0", pair.a), cut("keep1", pair.b)
    if any(layer.logit0 is None for layer in found.layers):  # not every MPM has an estimator
        return Details(keep0, keep1, None, None)
    return Details(keep0, keep1, nmi("logit0", pair.a), nmi("logit1", pair.b))


def evidence(matches: Matches) -> float:
    """How much speaks for these matches: the sum of their confidences, but for those that may be chance."""
    return float(matches.scores[matches.scores >= EVIDENT].sum())


def is_inside(points: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """n, bool: on the area of a pixel of the image."""
    return np.all((points >= -0.5) & (points <= np.array(size) - 0.5), axis=1)


def check_size(size: Any) -> None:
    if not isinstance(size, numbers.Integral) or isinstance(size, bool) or size < STRIDE:
        raise UserError(f"size must be a whole number of at least {STRIDE} pixels, not {size!r}")


def find_device(name: str | torch.device) -> torch.device:
    """ "auto": the GPU if there is one."""
    if str(name) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"{name}: no such device; use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"{name}: only cpu and cuda are supported")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"{name}: there are {torch.cuda.device_count()} CUDA devices on this machine")
    return device


def find_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    if precision not in DTYPES:
        raise UserError(f"precision must be auto, fp32, bf16 or fp16, not {precision!r}")
    return DTYPES[precision]


def match(image0: ImageLike, image1: ImageLike, **options: Any) -> Matches:
    """Match two images with the default settings. For more than one pair, keep a `Matcher`."""
    return PairMatcher(**options).match(image0, image1)
