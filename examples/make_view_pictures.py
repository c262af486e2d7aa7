"""Makes the pictures of docs/align.md, video.md, certainty.md and tiles.md with the shipped weights, and
prints what was measured on the way.

The motorcycle and the portrait come with the package; the photos that a room is painted with come with
scikit-image (pip install scikit-image): astronaut (NASA) and rocket (SpaceX) are in the public domain,
chelsea and coffee are CC0. Takes a few minutes.

    python examples/make_view_pictures.py
"""

import tempfile
from pathlib import Path

import cv2
import numpy as np
from skimage import data

from prism_match import Matcher, align, viz
from prism_match.evaluation.bundled import BUNDLED
from prism_match.geometry import rotation_angle, warp_points
from prism_match.images import load_image
from prism_match.maps.panorama import StitchOptions, stitch

IMAGES = Path(__file__).parents[1] / "docs" / "images"
WIDTH, HEIGHT, FOCAL = 400, 300, 380.0  # of the photos of the room
TURNS = [(-36, 0), (-18, 3), (0, -3), (18, 2), (36, 0)]  # degrees across and down
FRAMES, FRAME_SIZE = 8, (256, 192)


def main() -> None:
    show_alignments(Matcher(device="cpu", size=480))
    show_panorama(Matcher(device="cpu", size=400, rotate="never"))
    show_tracks(Matcher(device="cpu", size=256))
    show_points(Matcher(device="cpu", size=480))
    show_tiles(Matcher(device="cpu", size=320, tiles="auto", rotate="never"))


def write(name: str, picture: np.ndarray) -> None:
    cv2.imwrite(str(IMAGES / f"{name}.jpg"), picture[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 80])


def show_alignments(matcher: Matcher) -> None:
    """The motorcycle before and after, and what is left."""
    for name, pair in BUNDLED.items():
        found = align(*pair.photos, matcher=matcher)
        told = found.summary()
        print(f"{name}: {told['reason']}")
        print(
            f"  {told['agree']} of {told['matches']} agree, median residual {told['median_residual_px']} px"
        )
        errors = pair.errors(found.matches.keypoints0, found.map(found.matches.keypoints0))
        errors = errors[np.isfinite(errors)]
        within = 100 * np.mean(errors < 3)
        print(f"  against the truth: median {np.median(errors):.2f} px, {within:.0f} % within 3 px")
        if name == "motorcycle":
            first, second = (load_image(p).rgb for p in pair.photos)
            everywhere = np.ones(first.shape[:2], bool)
            warped = found.warp()
            rows = [
                viz.draw_overlay(second, first, everywhere),
                viz.draw_overlay(warped, first, found.covered),
                viz.draw_difference(warped, first, found.covered),
            ]
            write("align", viz.shrink(np.hstack(rows), 1500)[0])


def rotation(pan: float, tilt: float) -> np.ndarray:
    across, down = (cv2.Rodrigues(np.radians(v))[0] for v in ([0, pan, 0.0], [tilt, 0, 0.0]))
    return across @ down


def photograph(turn: tuple[float, float], wall: np.ndarray) -> np.ndarray:
    """What a camera in the middle of a round room sees of its wall, which is 120 degrees wide."""
    x, y = np.meshgrid(np.arange(WIDTH) - (WIDTH - 1) / 2, np.arange(HEIGHT) - (HEIGHT - 1) / 2)
    x, y, z = np.moveaxis(np.stack([x, y, np.full_like(x, FOCAL)], axis=-1) @ rotation(*turn).T, -1, 0)
    u = (np.degrees(np.arctan2(x, z)) / 120 + 0.5) * (wall.shape[1] - 1)
    v = (y / np.hypot(x, z) / (2 * np.tan(np.radians(15))) + 0.5) * (wall.shape[0] - 1)
    maps = u.astype(np.float32), v.astype(np.float32)
    return cv2.remap(wall, *maps, cv2.INTER_AREA, borderMode=cv2.BORDER_REFLECT)


def show_panorama(matcher: Matcher) -> None:
    wall = np.hstack(
        [cv2.resize(getattr(data, n)(), (640, 640)) for n in ("astronaut", "coffee", "rocket", "chelsea")]
    )
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for n, turn in enumerate(TURNS):
            files[f"{n}.png"] = Path(folder) / f"{n}.png"
            light = (photograph(turn, wall) * (0.8 + 0.05 * n)).clip(0, 255).astype(np.uint8)
            cv2.imwrite(str(files[f"{n}.png"]), light[..., ::-1])
        files["motorcycle"] = BUNDLED["motorcycle"].photos[0]
        made = stitch(files, StitchOptions(), lambda: matcher, progress=True)
        thumbs = [viz.shrink(load_image(p).rgb, 220)[0] for p in files.values()]
    found = [made.cameras[f"{n}.png"].rotation for n in range(len(TURNS))]
    angles = [
        rotation_angle(found[n].T @ found[n + 1], rotation(*TURNS[n]).T @ rotation(*TURNS[n + 1]))
        for n in range(len(TURNS) - 1)
    ]
    focals = [c.intrinsics[0, 0] for c in made.cameras.values()]
    print(f"panorama: {made.projection}, {made.field_of_view[0]:.1f} degrees, left out {made.left_out}")
    print(f"  rotations off by {max(angles):.2f} degrees at most")
    print(f"  focal lengths {min(focals):.1f} to {max(focals):.1f} px (the truth: {FOCAL})")
    print(f"  two photos disagree by {made.error:.2f} px in the median")
    height = max(t.shape[0] for t in thumbs)
    row = np.hstack(
        [
            cv2.copyMakeBorder(t, 0, height - t.shape[0] + 8, 0, 8, cv2.BORDER_CONSTANT, value=(255,) * 3)
            for t in thumbs
        ]
    )
    scale = row.shape[1] / made.pixels.shape[1]
    write("panorama", np.vstack([row, cv2.resize(made.pixels, None, fx=scale, fy=scale)[:, : row.shape[1]]]))


def show_tracks(matcher: Matcher) -> None:
    """A virtual camera over the portrait, there and back."""
    photo = data.astronaut()
    frames, to_photo = [], []
    for k in range(FRAMES):
        t = np.sin(np.pi * k / (FRAMES - 1))
        c, s = (1 + 0.15 * t) * np.cos(0.25 * t), (1 + 0.15 * t) * np.sin(0.25 * t)
        to_photo.append(np.array([[c, -s, 60 + 120 * t], [s, c, 60 + 40 * t], [0, 0, 1]]))
        flags = cv2.INTER_AREA | cv2.WARP_INVERSE_MAP
        frames.append(cv2.warpPerspective(photo, to_photo[-1], FRAME_SIZE, flags=flags))
    tracks = matcher.track(frames, gap=FRAMES // 2)
    there = np.concatenate(
        [warp_points(tracks.xy[n : n + 1], to_photo[f]) for n, f in enumerate(tracks.frame.tolist())]
    )
    mean = np.stack([np.bincount(tracks.track, there[:, k]) / tracks.lengths for k in (0, 1)], axis=1)
    off = np.linalg.norm(there - mean[tracks.track], axis=1)
    print(f"tracks: {tracks}, {np.mean(tracks.lengths):.1f} frames in the mean; links {tracks.links}")
    within = 100 * np.mean(off < 1)
    print(
        f"  off the mean of their track, in the photo: median {np.median(off):.3f} px, {within:.1f} % < 1 px"
    )
    middle = FRAMES // 2
    write(
        "tracks",
        cv2.resize(
            tracks.plot(frames[middle], middle, most=200), None, fx=2, fy=2, interpolation=cv2.INTER_CUBIC
        ),
    )


def show_points(matcher: Matcher) -> None:
    """Points of the left photo of the motorcycle, where they are in the right one, and how sure that is."""
    pair = BUNDLED["motorcycle"]
    points = np.array([
        [120, 110], [330, 60], [590, 90], [18, 300], [175, 330], [300, 330], [420, 250], [480, 160],
        [560, 330], [660, 250], [360, 440], [700, 450],
    ], float)  # fmt: skip
    found = matcher.locate(*pair.photos, points)
    errors = pair.errors(points, found.points1)
    left, right = (load_image(p).rgb.copy() for p in pair.photos)
    colours = viz.red_to_green(found.certainty)
    for n, (at0, at1, colour) in enumerate(zip(points, found.points1, colours, strict=True)):
        told = f"{n + 1}: not visible"
        if np.isfinite(at1).all():
            told = f"{n + 1}: {found.certainty[n]:.0%}, {found.sigma[n]:.1f} px"
            cv2.circle(right, np.rint(at1).astype(int).tolist(), 5, colour, 2, cv2.LINE_AA)
            label(right, told, at1)
        cv2.circle(left, np.rint(at0).astype(int).tolist(), 5, (255, 255, 255), 2, cv2.LINE_AA)
        label(left, str(n + 1), at0)
        print(f"point {told}; off by {errors[n]:.2f} px")
    write("points", viz.side_by_side(left, right))


def label(picture: np.ndarray, text: str, at: np.ndarray) -> None:
    """To the right of a point, on black; to the left where there is no room."""
    width = 6 * len(text) + 10
    x, y = np.rint(at).astype(int).tolist()
    x = x + 8 if x + 8 + width <= picture.shape[1] else x - 8 - width
    cv2.rectangle(picture, (x, y - 8), (x + width, y + 8), (0, 0, 0), -1)
    viz.put_text(picture, text, (x + 3, y + 5), (255, 255, 255), 0.45)


def show_tiles(matcher: Matcher) -> None:
    """A small piece of a large picture."""
    names = ("astronaut", "coffee", "rocket", "chelsea")
    photos = [cv2.resize(getattr(data, n)(), (640, 640), interpolation=cv2.INTER_AREA) for n in names]
    wall = np.vstack([np.hstack(photos[:2]), np.hstack(photos[2:])])
    to_piece = np.array([[0.96, -0.28, -620], [0.28, 0.96, -560], [0, 0, 1]])
    piece = cv2.warpPerspective(wall, to_piece, (200, 160), flags=cv2.INTER_AREA)
    for name, some in (("tiles", matcher), ("one pass", matcher.adjusted(tiles=None))):
        matches = some.match(wall, piece)
        errors = np.linalg.norm(warp_points(matches.keypoints0, to_piece) - matches.keypoints1, axis=1)
        print(f"{name}: {np.sum(errors < 3)} of {len(matches)} matches within 3 px")
        if name == "tiles":
            write(name, matches.filter(spread=60).plot(image0=wall, image1=piece, longer_side=640))


if __name__ == "__main__":
    main()
