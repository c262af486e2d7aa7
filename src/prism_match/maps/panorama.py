"""One wide picture of several photos that were taken from one place: our matches, and OpenCV's pipeline from
there on (cameras, bundle adjustment, wave correction, exposure, seams, blending)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import cv2
import numpy as np
from tqdm import tqdm

from prism_match.config import Projection
from prism_match.engine import Engine, Limits, Names, Prism, Resize
from prism_match.errors import UserError
from prism_match.geometry import estimate, is_evident, resize_matrix, spread_over, warp_points
from prism_match.images import image_size, load_image, resize, write_picture
from prism_match.maps import pairs as pairing
from prism_match.maps.reconstruction import EXHAUSTIVE_UP_TO, retrieve_pairs
from prism_match.maps.tracks import components
from prism_match.matcher import PairMatcher
from prism_match.matches import Matches

detail: Any = cv2.detail  # of which the stubs that come with OpenCV know little
SUFFIXES = (".jpg", ".jpeg", ".png", ".tif", ".tiff")
NEIGHBOURS = 8  # of a photo among more than EXHAUSTIVE_UP_TO: those that look most alike
FARTHEST = 3.0  # pixels as matched: what is further off does not agree with a camera that only turns
SHORTEST = 0.1  # focal length, in longer sides: no lens sees more, and a picture would be of a few pixels
MOST = 300  # matches of a pair, spread over it, that cameras are adjusted to
FLAT_UP_TO, STRAIGHT_UP_TO = (
    70.0,
    60.0,
)  # degrees across and down that a plane, and a cylinder, can still show
SEAM_PIXELS = 1e5  # of a photo, where seams are looked for
MOST_TURN = 179.0  # degrees: a photo that reaches behind the camera has no place on a plane


@dataclass(frozen=True)
class StitchOptions:
    projection: Projection = "auto"  # auto: plane, cylinder or sphere by how wide the panorama is
    megapixels: float = 50.0  # that it has at most

    def __post_init__(self) -> None:
        if self.projection not in get_args(Projection):
            raise UserError(
                f"the projection is one of {', '.join(get_args(Projection))}, not {self.projection!r}"
            )
        if not self.megapixels > 0:
            raise UserError(f"a panorama must have more than 0 megapixels, not {self.megapixels}")


@dataclass(frozen=True)
class Camera:
    """Of one photo; all look from one place."""

    intrinsics: np.ndarray  # 3 3, in pixels of the photo; the centre of the first one is (0, 0)
    rotation: np.ndarray  # 3 3, from the camera to the world


@dataclass(frozen=True)
class Panorama:
    pixels: np.ndarray  # h w 3, uint8
    cameras: dict[str, Camera]  # of the photos in it, by name
    left_out: dict[str, str]  # the others, and why
    projection: str
    error: float  # pixels as matched, in the median: by which two photos disagree about a point
    field_of_view: tuple[float, float]  # degrees across and down


@dataclass(frozen=True)
class Link:
    """What holds two photos together."""

    matches: Matches
    homography: np.ndarray  # 3 3, in pixels as matched
    inliers: np.ndarray  # n, bool


def stitch(
    files: dict[str, Path],
    options: StitchOptions,
    make_matcher: Callable[[], PairMatcher],
    progress: bool = False,
) -> Panorama:
    """A panorama of the largest group of photos that belong together. files: the photos by name."""
    sizes = {name: size for name, path in files.items() if (size := image_size(path)) is not None}
    left_out = dict.fromkeys(sorted(files.keys() - sizes.keys()), "cannot be read")
    files = {name: path for name, path in files.items() if name in sizes}
    if len(files) < 2:
        raise UserError(
            f"{len(files) or 'no'} photo{'s' * (not files)} that can be read; at least two are needed"
        )
    matcher = make_matcher()
    found, broken = match_photos(files, matcher, progress)
    left_out |= broken
    # One scale for all: the cameras are taken to have about the same focal length in pixels.
    sizes = {name: size for name, size in sizes.items() if name not in left_out}
    scale = min([1.0, *(matcher.size / max(size) for size in sizes.values())])
    links = {names: link for names, m in found.items() if (link := connect(m, scale)) is not None}
    names, outside = largest_group(list(sizes), links)
    left_out |= dict.fromkeys(outside, "shares too little with the others")
    if len(names) < 2:
        raise UserError(f"none of the {len(files)} photos belong together: no two share enough that agrees")
    links = {pair: link for pair, link in links.items() if set(pair) <= set(names)}
    cameras = find_cameras(names, links, sizes, scale)
    view = field_of_view(cameras, sizes)
    projection = choose_projection(options.projection, view)
    error = disagreement(links, cameras) * scale
    pixels = compose({n: files[n] for n in names}, cameras, sizes, projection, options.megapixels, progress)
    return Panorama(pixels, cameras, left_out, projection, error, view)


def match_photos(
    files: dict[str, Path], matcher: PairMatcher, progress: bool
) -> tuple[dict[Names, Matches], dict[str, str]]:
    """The matches of all pairs that may have some; and photos that cannot be read."""
    names = list(files)
    found: dict[Names, Matches] = {}
    broken: dict[str, str] = {}
    if len(files) <= EXHAUSTIVE_UP_TO:
        numbers = pairing.exhaustive(len(files))
    else:
        numbers, broken = retrieve_pairs(files, None, NEIGHBOURS, matcher, progress)
    pairs = [(names[a], names[b]) for a, b in numbers]
    limits = Limits(8 if matcher.device.type == "cuda" else 1)
    engine = Engine(Prism(matcher), Resize.largest(matcher.size), limits)
    with tqdm(total=len(pairs), desc="matching", unit="pair", disable=None if progress else True) as bar:
        for outcome in engine.match(files, pairs):
            bar.update()
            broken |= outcome.broken
            if outcome.matches is not None:
                found[outcome.pair] = outcome.matches
    return found, broken


def connect(matches: Matches, scale: float) -> Link | None:
    """None: they do not agree with a camera that has only turned."""
    points0, points1 = (
        warp_points(p, resize_matrix(scale, scale)) for p in (matches.keypoints0, matches.keypoints1)
    )
    fit = estimate(points0, points1, "homography", threshold=FARTHEST)
    if fit.matrix is None or not is_evident(fit.num_inliers, len(matches)):
        return None
    return Link(matches, fit.matrix, fit.inliers)


def largest_group(names: list[str], links: Iterable[Names]) -> tuple[list[str], list[str]]:
    """The photos of the largest group that links join, and the others."""
    number = {name: n for n, name in enumerate(names)}
    edges = np.array([[number[a], number[b]] for a, b in links], np.int64).reshape(-1, 2)
    group = components(len(names), edges)
    largest = np.bincount(group, minlength=1).argmax() if len(names) else 0
    inside = [name for name, g in zip(names, group, strict=True) if g == largest]
    return inside, [name for name in names if name not in set(inside)]


def find_cameras(
    names: list[str], links: dict[Names, Link], sizes: dict[str, tuple[int, int]], scale: float
) -> dict[str, Camera]:
    """By OpenCV's estimator and its bundle adjustment, from our matches."""
    features, infos = to_opencv(names, links, sizes, scale)
    try:
        done, cameras = detail.HomographyBasedEstimator().apply(features, infos, None)
        if done:
            for camera in cameras:
                camera.R = camera.R.astype(np.float32)
            adjuster = detail.BundleAdjusterRay()
            adjuster.setConfThresh(1.0)
            adjuster.setRefinementMask(np.array([[1, 1, 1], [0, 1, 1], [0, 0, 0]], np.uint8))
            done, cameras = adjuster.apply(features, infos, cameras)
    except cv2.error:
        done = False
    shortest = [SHORTEST * scale * max(sizes[name]) for name in names]
    sound = done and all(
        np.isfinite(c.R).all() and np.isfinite(c.K()).all() and c.focal > least
        for c, least in zip(cameras, shortest, strict=True)
    )
    if not sound:
        raise UserError(
            "no cameras that have only turned explain the photos; were they taken from one place?"
        )
    upright = detail.waveCorrect([c.R.astype(np.float32) for c in cameras], detail.WAVE_CORRECT_AUTO)
    back = resize_matrix(1 / scale, 1 / scale)
    return {
        name: Camera(back @ camera.K(), rotation.astype(np.float64))
        for name, camera, rotation in zip(names, cameras, upright, strict=True)
    }


def to_opencv(
    names: list[str], links: dict[Names, Link], sizes: dict[str, tuple[int, int]], scale: float
) -> tuple[list[Any], list[Any]]:
    """Features of each photo and matches of each pair in both directions, as cv2.detail has them. Each pair
    has points of its own; its homography is about the middles of the photos."""
    size = {name: tuple(round(n * scale) for n in sizes[name]) for name in names}
    points: dict[str, list[cv2.KeyPoint]] = {name: [] for name in names}
    infos = {(a, b): detail.MatchesInfo() for a in names for b in names}
    for (first, second), link in links.items():
        m = link.matches.filter(link.inliers)
        m = m.filter(spread_over(m.keypoints0, m.scores, MOST))
        rows = []
        for name, xy in ((first, m.keypoints0), (second, m.keypoints1)):
            at = warp_points(xy, resize_matrix(scale, scale))
            rows.append(range(len(points[name]), len(points[name]) + len(at)))
            points[name] += [cv2.KeyPoint(x, y, 1.0) for x, y in at.tolist()]
        to_middle = [translation(*(-0.5 * n for n in size[name])) for name in (first, second)]
        H = to_middle[1] @ link.homography @ np.linalg.inv(to_middle[0])
        confidence = link.inliers.sum() / (8 + 0.3 * len(link.inliers))
        for a, b, matrix, swap in ((first, second, H, 1), (second, first, np.linalg.inv(H), -1)):
            info = infos[a, b]
            info.matches = [cv2.DMatch(i, j, 0.0) for i, j in zip(*rows[::swap], strict=True)]
            info.inliers_mask = np.ones(len(m), np.uint8)
            info.num_inliers, info.confidence, info.H = len(m), float(confidence), matrix / matrix[2, 2]
    features = []
    for n, name in enumerate(names):
        one = detail.ImageFeatures()
        one.img_idx, one.img_size, one.keypoints = n, size[name], points[name]
        features.append(one)
    for i, a in enumerate(names):
        for j, b in enumerate(names):
            infos[a, b].src_img_idx, infos[a, b].dst_img_idx = (i, j) if infos[a, b].num_inliers else (-1, -1)
    return features, [infos[a, b] for a in names for b in names]


def translation(x: float, y: float) -> np.ndarray:
    return np.array([[1, 0, x], [0, 1, y], [0, 0, 1.0]])


def disagreement(links: dict[Names, Link], cameras: dict[str, Camera]) -> float:
    """Pixels of the second photo, in the median, from where a match is to where the cameras put it."""
    errors = []
    for (first, second), link in links.items():
        a, b = cameras[first], cameras[second]
        H = b.intrinsics @ b.rotation.T @ a.rotation @ np.linalg.inv(a.intrinsics)
        m = link.matches.filter(link.inliers)
        errors.append(np.linalg.norm(warp_points(m.keypoints0, H) - m.keypoints1, axis=1))
    return float(np.nanmedian(np.concatenate(errors)))


def field_of_view(cameras: dict[str, Camera], sizes: dict[str, tuple[int, int]]) -> tuple[float, float]:
    """Degrees across and down, of the borders of all photos; across, what lies behind is counted, too."""
    across, down = [], []
    for name, camera in cameras.items():
        width, height = sizes[name]
        t = np.linspace(0, 1, 9)[:, None]
        corners = np.array([[0, 0], [width, 0], [width, height], [0, height], [0, 0]], float)
        border = np.concatenate([a + t * (b - a) for a, b in zip(corners[:-1], corners[1:], strict=True)])
        rays = (
            np.concatenate([border, np.ones((len(border), 1))], axis=1) @ np.linalg.inv(camera.intrinsics).T
        )
        x, y, z = (rays @ camera.rotation.T).T
        across.append(np.degrees(np.arctan2(x, z)))
        down.append(np.degrees(np.arctan2(y, np.hypot(x, z))))
    # The widest gap between directions is what nobody has photographed.
    angles = np.sort(np.concatenate(across))
    gap = np.diff(np.append(angles, angles[0] + 360)).max()
    return float(360 - gap), float(np.ptp(np.concatenate(down)))


def choose_projection(wanted: Projection, view: tuple[float, float]) -> str:
    if wanted == "plane" and max(view) >= MOST_TURN:
        raise UserError(
            f"{view[0]:.0f} x {view[1]:.0f} degrees are too wide for a plane; try --projection auto"
        )
    if wanted != "auto":
        return wanted
    if max(view) <= FLAT_UP_TO:
        return "plane"
    return "cylindrical" if view[1] <= STRAIGHT_UP_TO else "spherical"


@dataclass
class Part:
    """A photo on its way into the panorama."""

    corner: tuple[int, int]
    pixels: np.ndarray  # h w 3, uint8
    mask: np.ndarray  # h w, uint8
    size: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.size = self.mask.shape[1], self.mask.shape[0]


def compose(
    files: dict[str, Path],
    cameras: dict[str, Camera],
    sizes: dict[str, tuple[int, int]],
    projection: str,
    megapixels: float,
    progress: bool,
) -> np.ndarray:
    """h w 3, uint8: warped, made equally bright, cut along seams and blended."""
    focal = float(np.median([c.intrinsics[0, 0] for c in cameras.values()]))
    scale = 1.0
    for _ in range(8):  # a panorama's size is not quite the square of its scale
        area = panorama_area(cameras, sizes, projection, focal, scale) / 1e6
        if area <= megapixels:
            break
        scale *= 0.98 * (megapixels / area) ** 0.5
    seam_scale = min(1.0, scale, *((SEAM_PIXELS / (w * h)) ** 0.5 for w, h in (sizes[n] for n in files)))
    small = [warp_photo(files[n], cameras[n], projection, focal, seam_scale) for n in files]
    corners = [p.corner for p in small]
    exposure = detail.ExposureCompensator_createDefault(detail.EXPOSURE_COMPENSATOR_GAIN_BLOCKS)
    exposure.feed(corners, [p.pixels for p in small], [p.mask for p in small])
    seams = detail.GraphCutSeamFinder("COST_COLOR").find(
        [p.pixels.astype(np.float32) for p in small], corners, [p.mask for p in small]
    )
    seams = [s.get() if isinstance(s, cv2.UMat) else s for s in seams]
    rois = [warp_roi(cameras[n], sizes[n], projection, focal, scale) for n in files]
    whole = detail.resultRoi([r[:2] for r in rois], [r[2:] for r in rois])
    blender = detail.MultiBandBlender()
    # Bands as wide as a twentieth of the picture, as OpenCV's own pipeline has them.
    blender.setNumBands(int(np.clip(np.log2((whole[2] * whole[3]) ** 0.5 / 20), 1, 6)))
    blender.prepare(whole)
    bar = tqdm(files, "composing", unit="photo", disable=None if progress else True)
    for n, name in enumerate(bar):
        part = warp_photo(files[name], cameras[name], projection, focal, scale)
        pixels = exposure.apply(n, part.corner, part.pixels, part.mask)
        seam = resize(cv2.dilate(seams[n], np.ones((3, 3), np.uint8)), *part.size)
        blender.feed(pixels.astype(np.int16), cv2.bitwise_and(seam, part.mask), part.corner)
    blended, _ = blender.blend(None, None)
    return blended.clip(0, 255).astype(np.uint8)


def warper(projection: str, focal: float, scale: float) -> cv2.PyRotationWarper:
    return cv2.PyRotationWarper(projection, focal * scale)


def scaled(camera: Camera, scale: float) -> tuple[np.ndarray, np.ndarray]:
    return (resize_matrix(scale, scale) @ camera.intrinsics).astype(np.float32), camera.rotation.astype(
        np.float32
    )


def scaled_size(size: tuple[int, int], scale: float) -> tuple[int, int]:
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def warp_roi(
    camera: Camera, size: tuple[int, int], projection: str, focal: float, scale: float
) -> tuple[int, int, int, int]:
    """x, y, width, height of a photo in the panorama."""
    x, y, w, h = warper(projection, focal, scale).warpRoi(scaled_size(size, scale), *scaled(camera, scale))
    return x, y, w, h


def panorama_area(
    cameras: dict[str, Camera], sizes: dict[str, tuple[int, int]], projection: str, focal: float, scale: float
) -> float:
    rois = [warp_roi(camera, sizes[n], projection, focal, scale) for n, camera in cameras.items()]
    _, _, width, height = detail.resultRoi([r[:2] for r in rois], [r[2:] for r in rois])
    return float(width) * float(height)


def warp_photo(path: Path, camera: Camera, projection: str, focal: float, scale: float) -> Part:
    image = load_image(path)
    size = scaled_size(image.size, scale)
    pixels = resize(image.rgb, *size)
    seen = np.full(size[::-1], 255, np.uint8)
    if image.opaque is not None:
        seen = resize(image.opaque.astype(np.uint8) * 255, *size)
    warp, (K, R) = warper(projection, focal, scale), scaled(camera, scale)
    corner, warped = warp.warp(pixels, K, R, cv2.INTER_LINEAR, cv2.BORDER_REFLECT)
    _, mask = warp.warp(seen, K, R, cv2.INTER_NEAREST, cv2.BORDER_CONSTANT)
    return Part((int(corner[0]), int(corner[1])), warped, mask)


def write_panorama(path: Path, pixels: np.ndarray) -> None:
    """h w 3, uint8; whole or not at all."""
    check_suffix(path)
    write_picture(path, pixels)


def check_suffix(path: Path) -> None:
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"{path}: a panorama is written as {', '.join(SUFFIXES)}")
