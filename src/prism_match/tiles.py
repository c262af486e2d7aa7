"""Images of any size, and pairs of any scale: matched small and whole first, then tile by tile.

The first pass tells where image 1 shows what, how large and how turned. Then each part of image 0 in which
it found something is matched with the part of image 1 that shows the same, both at the finest scale at which
both have detail, and each tile answers for its own part alone. What costs time is the overlap at that scale,
not the area of the images; what costs memory is one pair of tiles.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, TypeAlias

import cv2
import numpy as np

from prism_match.certainty import Regression
from prism_match.errors import UserError
from prism_match.geometry import resize_matrix, warp_points
from prism_match.images import SMALLEST, Image, ImageLike
from prism_match.matches import Matches
from prism_match.memory import give_back_large_blocks
from prism_match.model.prism import CELL, STRIDE
from prism_match.windows import INSTALL, Box, InMemory, Windows, open_windows, shrunk_mask

if TYPE_CHECKING:
    from prism_match.matcher import FeaturesPair, ImageFeatures, PairMatcher, Prepared

log = logging.getLogger(__name__)

# The longer side of tiles (pixels) and what a pair of square ones takes at most (GiB), measured: on a CPU the
# peak of the whole process, and a quarter of a GiB for what many tiles and large files leave behind; on a GPU
# what is held with caches (there of photos of 4:3, by their area).
CPU_MEMORY = {320: 0.9, 480: 1.05, 640: 1.2, 832: 1.5}
GPU_MEMORY = {277: 0.43, 416: 0.67, 554: 0.96, 720: 1.69, 998: 1.84, 1386: 3.31, 1774: 4.7, 2217: 6.68}
# Of tiles of image 0, as parts of the longest side; the rest is room for what image 1 shows of it, which is
# not quite as large as was thought, turned or stretched.
TILE, MARGIN = 0.84, 0.06
GROWTH = 8  # times as fine as the last pass is the next: a tile then still has a few matches in it
FEWEST = 3  # matches of the last pass in a part of image 0 that is looked at again
NEIGHBOURS = 12  # matches that tell how a part of image 0 lies in image 1
STRETCHED = 6  # times as far one way as the other is no map, but chance
SAME_SCALE = 1.25  # tiles whose scales differ by less from those of the last pass would bring next to nothing
RATIOS = (2, 4, 8)  # by which one image is shrunk where they hardly match
PARTS_RATIO, PARTS_SCALE, LEAST_GAIN = 3, 2.0, 1.5  # the same where the other is seen in parts, finer by this
SMALL = 0.75  # of the longer side of such a part: an image no longer than this is also tried as it is
# So many matches that fit one affine map are no chance; an image of which so few match, or so small a share
# of its cells, may match better at another scale.
CONVINCING, FEW, SHARE = 8, 16, 0.01
LIKELY = 0.5  # to show the same place are photos of which something is found at another scale alone
READ = 2  # times the size that whole images are matched at: as large as they are read, to be polished at
EVIDENT = 0.2  # least score of a match that counts as evidence, as in `matcher.py`
CONSISTENT = 3.0  # pixels, as matched, by which a match may miss the map
WHOLE = 256  # MiB of pixels: larger files are read by windows where no memory is given
AT_EDGE = 2  # cells from the border of a tile: matches there tell that the overlap goes on

Points: TypeAlias = np.ndarray  # n 2


@dataclass(frozen=True)
class Tile:
    """A part of image 0 and what image 1 shows of it."""

    core: Box  # of image 0: what the tile answers for
    box0: Box  # the same with a margin
    box1: Box
    scale0: float  # at which they are matched, at most 1
    scale1: float
    turns: int  # by 90 degrees, as np.rot90 does it: image 1 is then as image 0


@dataclass(frozen=True)
class Pass:
    """What was found, and how finely it was looked at."""

    matches: Matches  # in pixels of the images, whole
    scale0: float  # pixels as matched that one of the image was
    scale1: float

    @property
    def points(self) -> tuple[Points, Points]:
        return self.matches.keypoints0.astype(np.float64), self.matches.keypoints1.astype(np.float64)

    def consistent(self) -> np.ndarray:
        """n, bool: fits one affine map of the images."""
        _, inliers = fit_affine(*self.points, CONSISTENT / self.scale1)
        return inliers

    @property
    def support(self) -> int:
        """How many do."""
        return int(self.consistent().sum())

    def evidence(self) -> float:
        scores = self.matches.scores
        return float(scores[scores >= EVIDENT].sum())

    def is_weak(self) -> bool:
        sizes = (self.matches.size0, self.scale0), (self.matches.size1, self.scale1)
        cells = min(math.prod(size) * (scale / CELL) ** 2 for size, scale in sizes)
        return self.support < max(FEW, SHARE * cells)


def match_in_tiles(
    matcher: PairMatcher,
    image0: ImageLike,
    image1: ImageLike,
    mask0: ImageLike | None,
    mask1: ImageLike | None,
    *,
    details: bool = False,
) -> Matches:
    """What `Matcher(tiles="auto").match` does."""
    limit = WHOLE * 2**20
    if matcher.tile_memory is not None:
        limit = int(matcher.tile_memory * 2**30 / 8)
        if matcher.device.type == "cpu":
            give_back_large_blocks()
    with open_windows(image0, mask0, limit) as first, open_windows(image1, mask1, limit) as second:
        side = tile_side(matcher, (first, second))
        plain = matcher.adjusted(
            tiles=None, tile_memory=None, size=min(matcher.size, side), rescale="never", max_matches=None
        )
        found = coarse_pass(plain, first, second, details)
        found = finer_passes(plain.adjusted(size=side), first, second, found)
        return found.matches.filter(top=matcher.max_matches)


def match_at_other_scales(matcher: PairMatcher, pair: FeaturesPair, matches: Matches) -> Matches:
    """What `Matcher(rescale="auto")` does with two images that have next to no matches (`matches`): each is
    tried smaller, and what then matches is matched again as finely as both have detail."""
    first, second = (in_memory(image.prepared) for image in pair)
    side = max(max(image.prepared.gray.shape) for image in pair)
    plain = matcher.adjusted(size=side, rescale="never", max_matches=None)
    views = [View(image.box, f) for image, f in zip((first, second), pair, strict=True)]
    regression = regression_of(plain)
    before = Pass(resized(matches, first.size, second.size, regression), views[0].scale, views[1].scale)
    wholes = [whole(image, READ * side) for image in (first, second)]
    found = ScaleSearch((first, second), wholes, views, before).best_of(plain, thorough=False)
    if found.support < CONVINCING:
        return matches
    found = finer_passes(plain, first, second, found)
    if found is before:
        return matches
    again = resized(found.matches, matches.size0, matches.size1, regression)
    if again.same_place is not None and again.same_place < LIKELY:
        return matches  # of so many tries one always fits best, also where there is nothing to be found
    return replace(again, details=matches.details, images=matches.images)


def in_memory(image: Prepared) -> InMemory:
    """As large as it was kept."""
    pixels = image.gray if image.sharp is None else image.sharp
    height, width = pixels.shape
    mask = None if image.mask is None else shrunk_mask(image.mask, width, height)
    return InMemory(image.name, (width, height), mask, pixels.nbytes, Image(pixels, image.name))


def finer_passes(matcher: PairMatcher, first: Windows, second: Windows, found: Pass) -> Pass:
    """What was found, again as finely as both images show it, tile by tile; or as it is, where nothing is."""
    tiled = matcher.adjusted(rotate="never", rescale="never")
    for finest in scales_to_come(found) if found.support >= CONVINCING else ():
        tiles = plan_tiles(found, matcher.size, finest)
        if not tiles or is_the_same(tiles, found):
            break
        log.info("%d tiles of at most %d pixels, at %.3g of image 0", len(tiles), matcher.size, finest)
        again = match_overlap(tiled, first, second, tiles, found, finest)
        if again.evidence() < found.evidence():
            break  # finer things do not match: the images show less than they have pixels
        found = again
    return found


def tile_side(matcher: PairMatcher, images: Sequence[Windows]) -> int:
    """The longest side of tiles that fit into the memory; without a limit, that of plain matching."""
    if matcher.tile_memory is None:
        return matcher.size
    on_gpu = matcher.device.type == "cuda"
    table = GPU_MEMORY if on_gpu else CPU_MEMORY
    held = 0.0 if on_gpu else sum(image.held for image in images) / 2**30
    fitting = [side for side, needed in table.items() if needed + held <= matcher.tile_memory]
    if fitting:
        return max(fitting)
    largest = max(images, key=lambda image: image.held)
    needed = min(table.values())
    if needed <= matcher.tile_memory:
        raise UserError(
            f"{largest.name}: takes {largest.held / 2**30:.2g} GiB decoded, which leaves too little of "
            f"{matcher.tile_memory:g} GiB for tiles; large files of common formats are read by windows "
            f"with rasterio: {INSTALL}"
        )
    raise UserError(f"tiles need at least {needed:g} GiB of memory, not {matcher.tile_memory:g}")


def coarse_pass(plain: PairMatcher, first: Windows, second: Windows, details: bool) -> Pass:
    """Both images whole; where they hardly match, one of them smaller than the other."""
    wholes = [whole(image, READ * plain.size) for image in (first, second)]
    features = plain.extract_prepared([plain.prepare(image, keep=True) for image in wholes])
    matches = plain.match_extracted([(features[0], features[1])], details=details)[0]
    views = [View(image.box, f) for image, f in zip((first, second), features, strict=True)]
    resized_matches = resized(matches, first.size, second.size, regression_of(plain))
    found = Pass(resized_matches, views[0].scale, views[1].scale)
    if not found.is_weak():
        return found
    return ScaleSearch((first, second), wholes, views, found).best_of(plain)


@dataclass(frozen=True)
class View:
    """A part of an image as the model sees it."""

    box: Box
    features: ImageFeatures

    @property
    def scale(self) -> float:
        return self.features.prepared.gray.shape[1] / self.box.width


@dataclass(frozen=True)
class ScaleSearch:
    """One image seen whole or in parts, and the other shrunk, until they match."""

    images: tuple[Windows, Windows]
    wholes: Sequence[Image]
    views: Sequence[View]  # of the images, whole
    plain: Pass  # what these have in common

    def best_of(self, matcher: PairMatcher, thorough: bool = True) -> Pass:
        """thorough: all there is to try, whatever it takes; else turned images are tried at half the size."""
        best = self.plain
        upright = matcher.adjusted(rotate="never")
        for tries in (
            self.smaller(upright),
            self.turned(matcher, thorough) if matcher.rotate != "never" else (),
            self.in_parts(upright) if thorough else (),
        ):
            best = max([best, *tries], key=lambda found: found.support)
            if best.support >= CONVINCING:
                break
        log.info("hardly a match: tried at other scales, best %.3g to %.3g", best.scale0, best.scale1)
        return best

    def turned(self, matcher: PairMatcher, thorough: bool) -> Iterator[Pass]:
        """As `smaller`, and turned."""
        search = self if thorough else self.halved(matcher)  # not before it is asked for
        yield from search.smaller(matcher.adjusted(rotate="always"))

    def halved(self, matcher: PairMatcher) -> ScaleSearch:
        """Of views that are half as large."""
        prepared = [matcher.prepare(image, max(SMALLEST, matcher.size // 2)) for image in self.wholes]
        features = matcher.extract_prepared(prepared)
        views = [View(image.box, f) for image, f in zip(self.images, features, strict=True)]
        return replace(self, views=views)

    def smaller(self, matcher: PairMatcher) -> Iterator[Pass]:
        """Each image at a half, a quarter and an eighth of its size, against the other."""
        for ratio, which in product(RATIOS, (0, 1)):
            yield from self.against(self.views[1 - which], which, ratio, matcher)

    def in_parts(self, matcher: PairMatcher) -> Iterator[Pass]:
        """What shows an eighth of the other image is tiny there: each image at a third of its size, against
        nine quarters of the other, which overlap by half, at twice the scale. An image that is small by
        itself, as one that was cut out is, would have nothing left then, and is tried larger first."""
        for which in (0, 1):
            other, view = self.images[1 - which], self.views[1 - which]
            scale = min(1.0, PARTS_SCALE * view.scale)
            if scale < LEAST_GAIN * view.scale:
                continue
            starts = [np.linspace(0, n / 2, 3).astype(int).tolist() for n in other.size]
            half = [-(-n // 2) for n in other.size]
            for left, top in product(*starts):
                box = Box.covering(
                    np.array([left, top]), np.array([left + half[0], top + half[1]]) - 1, other.size
                )
                (features,) = matcher.extract_prepared([matcher.prepare(other.part(box, scale))])
                sides = [max(f.prepared.gray.shape) for f in (self.views[which].features, features)]
                for ratio in range(1 if sides[0] <= SMALL * sides[1] else PARTS_RATIO, PARTS_RATIO + 1):
                    yield from self.against(View(box, features), which, ratio, matcher)

    def against(self, wide: View, which: int, ratio: int, matcher: PairMatcher) -> Iterator[Pass]:
        """The image of that number, shrunk, against a view of the other; nothing if it is too small for that.
        It is given as image 1, which is the one that is turned."""
        size = max(self.views[which].features.prepared.gray.shape) // ratio
        narrow = size * min(self.images[which].size) / max(self.images[which].size)
        if narrow < SMALLEST:
            return
        (small,) = matcher.extract_prepared([matcher.prepare(self.wholes[which], size)])
        found = matcher.match_extracted([(wide.features, small)])[0]
        there = View(self.images[which].box, small)
        points = [
            to_outer(found.keypoints0, wide.box, found.size0),
            to_outer(found.keypoints1, there.box, found.size1),
        ]
        scales = [wide.scale, there.scale]
        pixels = there.box.width / found.size1[0]  # of the image that are one of what was matched
        if which == 0:
            points, scales = points[::-1], scales[::-1]
            pixels *= there.scale / wide.scale  # what is known is known in pixels of image 0
        certainty, sigma = enlarged(found, regression_of(matcher), pixels)
        matches = put_together(self.plain.matches, points[0], points[1], found.scores)
        yield Pass(replace(matches, certainty=certainty, sigma=sigma), scales[0], scales[1])


def whole(image: Windows, longest: float) -> Image:
    """All of it, shrunk to that longer side."""
    return image.part(image.box, min(1.0, longest / max(image.size)))


def resized(
    matches: Matches,
    size0: tuple[int, int],
    size1: tuple[int, int],
    regression: Regression | None = None,
) -> Matches:
    """The same matches of the same images at other sizes (width, height). regression: what their certainties
    come from; None: they have none at another size."""
    points0, points1 = (
        warp_points(points, resize_matrix(new[0] / old[0], new[1] / old[1]))
        for points, old, new in (
            (matches.keypoints0, matches.size0, size0),
            (matches.keypoints1, matches.size1, size1),
        )
    )
    same = matches.size0 == size0, matches.size1 == size1
    images = matches.images[0] if same[0] else None, matches.images[1] if same[1] else None
    if not same[1]:
        certainty, sigma = enlarged(matches, regression, max(size1) / max(matches.size1))
        matches = replace(matches, certainty=certainty, sigma=sigma)
    return replace(matches, keypoints0=points0, keypoints1=points1, size0=size0, size1=size1, images=images)


def regression_of(matcher: PairMatcher) -> Regression | None:
    """What the certainties of its matches come from; None: they have none."""
    return None if matcher.calibration is None else matcher.calibration.matches


def enlarged(
    matches: Matches, regression: Regression | None, ratio: float
) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """Their certainty and sigma in an image 1 that is so many times as large; None if they are not known."""
    if regression is None or matches.certainty is None or matches.sigma is None:
        return None, None
    return regression.enlarged(matches.certainty, matches.sigma, ratio)


def for_pictures(matches: Matches, image0: ImageLike, image1: ImageLike, longest: int = 2048) -> Matches:
    """The same matches of images that are no larger than pictures of them need."""
    wholes = []
    for source in (image0, image1):
        with open_windows(source, None, WHOLE * 2**20) as image:
            wholes.append(whole(image, longest))
    return replace(resized(matches, wholes[0].size, wholes[1].size), images=(wholes[0], wholes[1]))


def to_outer(points: Points, box: Box, size: tuple[int, int]) -> Points:
    """Points of a part that was shrunk to `size` (width, height) -> those of the image it is a part of."""
    scale = np.array([box.width, box.height]) / np.array(size)
    return (points.astype(np.float64) + 0.5) * scale - 0.5 + np.array([box.left, box.top])


def scales_to_come(found: Pass) -> Iterator[float]:
    """Of image 0: at which it is looked at next, and at last as fine as both images are."""
    matrix, _ = fit_affine(*found.points, CONSISTENT / found.scale1)
    last = 1.0 if matrix is None else min(1.0, scale_of(matrix))
    scale = found.scale0
    while True:
        scale = min(1.0, scale * GROWTH)
        if scale >= last:
            yield 1.0  # where image 1 is less fine than that, tiles are, too
            return
        yield scale


def fit_affine(points0: Points, points1: Points, threshold: float) -> tuple[np.ndarray | None, np.ndarray]:
    """2 3, from image 0 to image 1, of the most matches, and which those are; None: no sound one."""
    nothing = np.zeros(len(points0), dtype=bool)
    for fit in (cv2.estimateAffine2D, cv2.estimateAffinePartial2D):  # few matches may tell a similarity only
        if len(points0) < (3 if fit is cv2.estimateAffine2D else 2):
            continue
        cv2.setRNGSeed(0)
        matrix, inliers = fit(
            points0, points1, method=cv2.RANSAC, ransacReprojThreshold=threshold, confidence=0.999
        )
        if matrix is None or not np.isfinite(matrix).all():
            continue
        stretch = np.linalg.svd(matrix[:, :2], compute_uv=False)
        if np.linalg.det(matrix[:, :2]) > 0 and stretch[0] < STRETCHED * stretch[1]:
            return matrix, inliers[:, 0].astype(bool)
    return None, nothing


def scale_of(matrix: np.ndarray) -> float:
    """Pixels of image 1 that are one of image 0."""
    return math.sqrt(abs(np.linalg.det(matrix[:, :2])))


def plan_tiles(found: Pass, side: int, finest: float = 1.0) -> list[Tile]:
    """Parts of image 0 that have matches, and where they lie in image 1; none longer than `side` as it is
    matched. finest: the largest scale of image 0."""
    points0, points1 = reliable(found)
    if len(points0) < FEWEST:
        return []
    reach = 2 * CELL / found.scale0  # beyond the outermost matches the overlap goes on for a while
    everything = Box.covering(points0.min(0) - reach, points0.max(0) + reach, found.matches.size0)
    return _tiles_of([everything], points0, points1, found, side, finest)


def tiles_beyond(found: Pass, tiles: list[Tile], fresh: list[Tile], side: int, finest: float) -> list[Tile]:
    """Where the overlap goes on: what none of the tiles answers for, next to matches of a fresh one."""
    points0, points1 = reliable(found)
    # Half a tile: the map of the matches beside it need not hold much farther.
    step = round((TILE - 2 * MARGIN) * side / found.scale0 / 2)
    edge = AT_EDGE * CELL / found.scale0
    todo: list[Box] = []
    answered = [tile.core for tile in tiles]
    for core in (tile.core for tile in fresh):
        own = points0[np.all((points0 >= core[:2]) & (points0 < core[2:]), axis=1)]
        left, top, right, bottom = core
        for distance, (low, high) in (
            (own[:, 0] - left, ((left - step, top), (left, bottom))),
            (own[:, 1] - top, ((left, top - step), (right, top))),
            (right - own[:, 0], ((right, top), (right + step, bottom))),
            (bottom - own[:, 1], ((left, bottom), (right, bottom + step))),
        ):
            box = Box.covering(np.array(low), np.array(high) - 1, found.matches.size0)
            if (distance < edge).sum() < FEWEST or min(box.width, box.height) < edge:
                continue
            x, y = (box.left + box.right) / 2, (box.top + box.bottom) / 2
            if not any(b.left <= x < b.right and b.top <= y < b.bottom for b in answered):
                todo.append(box)
                answered.append(box)
    return _tiles_of(todo, points0, points1, found, side, finest, around=step)


def _tiles_of(
    todo: list[Box],
    points0: Points,
    points1: Points,
    found: Pass,
    side: int,
    finest: float,
    around: float = 0.0,
) -> list[Tile]:
    """Of these parts of image 0, split until they fit. around: pixels beyond a part whose matches count."""
    tiles = []
    while todo:
        core = todo.pop()
        tile = _tile(core, points0, points1, found, side, finest, around)
        if isinstance(tile, Tile):
            tiles.append(tile)
        else:
            todo += tile
    return sorted(tiles, key=lambda tile: tile.core[1::-1])  # from the top down, as files are stored


def reliable(found: Pass) -> tuple[Points, Points]:
    """Matches that agree with an epipolar geometry, where there is one."""
    points0, points1 = found.points
    fit = found.matches.estimate("fundamental", threshold=CONSISTENT / found.scale1)
    keep = fit.inliers if fit.num_inliers >= FEW else np.ones(len(points0), dtype=bool)
    return points0[keep], points1[keep]


def _tile(
    core: Box,
    points0: Points,
    points1: Points,
    found: Pass,
    side: int,
    finest: float,
    around: float,
) -> Tile | list[Box]:
    """The tile of a part of image 0; or the parts to split it into, none where nothing matches."""
    size0, size1 = found.matches.size0, found.matches.size1
    own, inside = (
        np.all((points0 >= np.array(core[:2]) - n) & (points0 < np.array(core[2:]) + n), axis=1)
        for n in (0.0, around)
    )
    if inside.sum() < FEWEST:
        return []
    near = inside
    if inside.sum() < NEIGHBOURS:
        distance = np.linalg.norm(points0 - np.add(core[:2], core[2:]) / 2, axis=1)
        near = inside | (distance <= np.sort(distance)[min(NEIGHBOURS, len(distance)) - 1])
    # Depth makes matches deviate from the map of their neighbourhood: the larger it is, the more.
    extent = float(np.ptp(points1[near], axis=0).max())
    matrix, fitting = fit_affine(points0[near], points1[near], max(CONSISTENT / found.scale1, 0.05 * extent))
    if matrix is None:  # no one map holds: perhaps one does in parts of it
        return _split(core, 2, 2) if max(core.width, core.height) > side else []
    ratio = scale_of(matrix)
    scale0 = min(1.0, ratio, finest)
    scale1 = scale0 / ratio
    room = (TILE - 2 * MARGIN) * side / scale0  # pixels of image 0 that a tile may answer for
    parts = [max(1, math.ceil(n / room)) for n in (core.width, core.height)]
    if max(parts) > 1:
        return _split(core, *parts)
    margin = MARGIN * side
    box0 = Box.covering(np.array(core[:2]) - margin / scale0, np.array(core[2:]) - 1 + margin / scale0, size0)
    corners = np.array(list(product((box0.left, box0.right - 1), (box0.top, box0.bottom - 1))))
    there = np.concatenate([corners @ matrix[:, :2].T + matrix[:, 2], points1[near][fitting & own[near]]])
    beyond = margin / 2 / scale1
    box1 = Box.covering(there.min(0) - beyond, there.max(0) + beyond, size1)
    if min(box1.width, box1.height) <= 0:  # beyond the border of image 1
        return []
    longest = max(box1.width, box1.height) * scale1
    if longest > side:
        if max(core.width, core.height) * scale0 > side / 4:
            return _split(core, 2, 1) if core.width >= core.height else _split(core, 1, 2)
        scale0, scale1 = scale0 * side / longest, scale1 * side / longest
    box0, box1 = _in_few_sizes(box0, scale0, side, size0), _in_few_sizes(box1, scale1, side, size1)
    if min(min(b.width, b.height) * s for b, s in ((box0, scale0), (box1, scale1))) < SMALLEST:
        return []
    turn = math.atan2(matrix[1, 0] - matrix[0, 1], matrix[0, 0] + matrix[1, 1])
    return Tile(core, box0, box1, scale0, scale1, round(turn / (math.pi / 2)) % 4)


def _in_few_sizes(box: Box, scale: float, side: int, size: tuple[int, int]) -> Box:
    """With some pixels more around it, so that tiles have few sizes once they are shrunk: for each that they
    have not seen, the libraries that convolve keep a MiB or so."""
    grain = STRIDE * max(1, round(side / 256))
    lows, highs = [], []
    for low, high, whole in zip(box[:2], box[2:], size, strict=True):
        wanted = min(math.ceil((high - low) * scale / grain) * grain, side)
        length = min(max(high - low, round(wanted / scale)), whole)
        low = min(max(0, low - (length - (high - low)) // 2), whole - length)
        lows.append(low)
        highs.append(low + length)
    return Box(*lows, *highs)


def _split(box: Box, columns: int, rows: int) -> list[Box]:
    xs, ys = (
        np.linspace(low, high, n + 1).round().astype(int).tolist()
        for low, high, n in ((box.left, box.right, columns), (box.top, box.bottom, rows))
    )
    return [Box(xs[i], ys[j], xs[i + 1], ys[j + 1]) for j in range(rows) for i in range(columns)]


def is_the_same(tiles: list[Tile], found: Pass) -> bool:
    """Whether it would be about the last pass again."""
    changes = [abs(math.log(t.scale0 / found.scale0)) for t in tiles]
    changes += [abs(math.log(t.scale1 / found.scale1)) for t in tiles]
    return max(changes) < math.log(SAME_SCALE)


def match_overlap(
    matcher: PairMatcher, first: Windows, second: Windows, tiles: list[Tile], last: Pass, finest: float
) -> Pass:
    """These tiles, and those beyond them for as long as the overlap goes on, as one result."""
    rows: list[np.ndarray] = []
    done: list[Tile] = []
    while tiles:
        rows += [match_tile(matcher, first, second, t, n) for n, t in enumerate(tiles, len(done))]
        done += tiles
        found = merged(rows, done, last)
        tiles = tiles_beyond(found, done, tiles, matcher.size, finest)
        if tiles:
            log.info("the overlap goes on: %d tiles more", len(tiles))
    return found


def match_tile(matcher: PairMatcher, first: Windows, second: Windows, tile: Tile, number: int) -> np.ndarray:
    """n 8, of its own part: x0, y0, x1, y1 in the images, score, number of the tile, certainty, sigma."""
    parts = [first.part(tile.box0, tile.scale0), second.part(tile.box1, tile.scale1)]
    if any(part.opaque is not None and not part.opaque.any() for part in parts):
        return np.zeros((0, 8))
    a, b = (matcher.prepare(part) for part in parts)
    pair = matcher.extract_prepared([a, b.turned(tile.turns)])
    found = matcher.match_extracted([(pair[0], pair[1])])[0]
    points0 = to_outer(found.keypoints0, tile.box0, found.size0)
    points1 = to_outer(found.keypoints1, tile.box1, found.size1)
    # A point belongs to the pixel that it lies on, and that to one tile.
    low, high = np.array(tile.core[:2]) - 0.5, np.array(tile.core[2:]) - 0.5
    own = np.all((points0 >= low) & (points0 < high), axis=1)
    columns = [points0, points1, found.scores[:, None], np.full((len(found), 1), number)]
    for sign in enlarged(
        found, regression_of(matcher), max(tile.box1.width, tile.box1.height) / max(found.size1)
    ):
        columns.append(np.full((len(found), 1), np.nan) if sign is None else sign[:, None])
    return np.concatenate(columns, axis=1)[own]


def merged(rows: list[np.ndarray], tiles: list[Tile], last: Pass) -> Pass:
    """What `match_tile` found in each tile, without what two of them found."""
    table = np.concatenate(rows)
    scale0, scale1 = (float(np.median([getattr(t, name) for t in tiles])) for name in ("scale0", "scale1"))
    for start, scale in ((0, scale0), (2, scale1)):
        points = table[:, start : start + 2]
        table = table[without_doubles(points, table[:, 4], table[:, 5], CELL / scale)]
    table = table[np.argsort(-table[:, 4], kind="stable")].astype(np.float32)
    matches = put_together(last.matches, table[:, :2], table[:, 2:4], table[:, 4])
    if not np.isnan(table[:, 6:]).any():
        matches = replace(matches, certainty=table[:, 6], sigma=table[:, 7])
    return Pass(matches, scale0, scale1)


def put_together(like: Matches, points0: Points, points1: Points, scores: np.ndarray) -> Matches:
    """Others of the same images, of which it is not known how sure they are."""
    return replace(like, keypoints0=points0, keypoints1=points1, scores=scores, certainty=None, sigma=None)


def without_doubles(points: Points, scores: np.ndarray, tile: np.ndarray, cell: float) -> np.ndarray:
    """n, bool: what remains once each cell belongs to the tile of its best match. Four grids, half a cell
    apart: no two matches of different tiles are left within half a cell of each other."""
    keep = np.ones(len(points), dtype=bool)
    for shift in product((0.0, 0.5), repeat=2):
        index = np.flatnonzero(keep)
        at = np.floor(points[index] / cell + shift).astype(np.int64)
        order = np.lexsort((-scores[index], at[:, 0], at[:, 1]))  # by cell, the best of each first
        at, index = at[order], index[order]
        begins = np.ones(len(index), dtype=bool)
        begins[1:] = np.any(at[1:] != at[:-1], axis=1)
        owner = tile[index[begins]][np.cumsum(begins) - 1]
        keep[index[tile[index] != owner]] = False
    return keep
