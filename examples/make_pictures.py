"""Makes the pictures at the top of the README with the shipped weights, and prints how exact the matches are.

The motorcycle is the pair of real photos in the package. The photos of the other two pairs come with
scikit-image (pip install scikit-image), and its documentation names their licences:
astronaut and hubble_deep_field (NASA), rocket (SpaceX) and clock are in the public domain, the others CC0.
The ground truth is exact, since these pairs are made: a rendered house that is painted with the photos, and
a wall of the photos. Takes a few minutes.

    python examples/make_pictures.py
"""

from pathlib import Path

import cv2
import numpy as np
import torch
from skimage import data

from prism_match import Matcher, Matches, viz
from prism_match.evaluation.bundled import BUNDLED
from prism_match.geometry import resize_matrix, warp_points
from prism_match.training.data.photos import PhotoStore
from prism_match.training.data.worlds import source
from prism_match.training.data.worlds.families import square
from prism_match.training.data.worlds.variety import Variety

IMAGES = Path(__file__).parents[1] / "docs" / "images"
PHOTOS = (
    "astronaut", "brick", "camera", "chelsea", "clock", "coffee", "grass", "gravel", "hubble_deep_field",
    "rocket",
)  # fmt: skip
SEED = 2  # of the house: a very wide baseline, other light, and walls that only one view shows
WIDTH, HEIGHT = 640, 480
PLAIN = Variety(
    near=0, zoom=0, max_scale=1.6, night=0, snow=0, crowds=0, alike=0, twins=0, still_skies=0
)  # by day, and of like size


def main() -> None:
    matcher = Matcher(device="cpu")
    motorcycle, errors = match_motorcycle(matcher)
    report("motorcycle", motorcycle, errors[np.isfinite(errors)])
    baseline, errors = match_house(matcher)
    report("baseline", baseline, errors)
    scale, errors = match_wall(matcher)
    report("scale", scale, errors)
    pruning = viz.draw_pruning(*photos(scale), scale.details.keep0, scale.details.keep1)
    pictures = {
        "motorcycle": draw_motorcycle(motorcycle), "baseline": plot(baseline), "scale": plot(scale),
        "pruning": pruning,
    }  # fmt: skip
    for name, picture in pictures.items():
        write(name, picture)


def write(name: str, picture: np.ndarray) -> None:
    cv2.imwrite(str(IMAGES / f"{name}.jpg"), picture[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 80])


def photos(matches: Matches) -> tuple[np.ndarray, np.ndarray]:
    return matches.image(0).rgb, matches.image(1).rgb


def plot(matches: Matches) -> np.ndarray:
    """At most 200 matches, the surest of each region: dots of all of them would hide the images."""
    return matches.filter(spread=200).plot()


def report(name: str, matches: Matches, errors: np.ndarray) -> None:
    median, within = np.median(errors), 100 * np.mean(errors < 3)
    print(f"{name}: {len(matches)} matches, median error {median:.2f} px, {within:.0f} % within 3 px")


def match_motorcycle(matcher: Matcher) -> tuple[Matches, np.ndarray]:
    """Their matches, and the errors in pixels of the second (NaN where the truth is not known)."""
    pair = BUNDLED["motorcycle"]
    matches = matcher.match(*pair.photos)
    return matches, pair.errors(matches.keypoints0, matches.keypoints1)


def draw_motorcycle(matches: Matches) -> np.ndarray:
    """Some of the matches above, and below, of all of them, by how much they have moved: red is near."""
    above = matches.filter(spread=120).plot()
    left, right = photos(matches)
    moved = matches.keypoints0[:, 0] - matches.keypoints1[:, 0]
    low, high = np.percentile(moved, [2, 98])
    shade = (255 * ((moved - low) / (high - low)).clip(0, 1)).round().astype(np.uint8)
    colours = cv2.applyColorMap(shade[:, None], cv2.COLORMAP_TURBO)[:, 0, ::-1].tolist()
    dim = [cv2.cvtColor(cv2.cvtColor(x, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB) // 2 for x in (left, right)]
    for image, points in zip(dim, (matches.keypoints0, matches.keypoints1), strict=True):
        for point, colour in zip(points, colours, strict=True):
            cv2.circle(image, viz.fixed(point), 3 << viz.SHIFT, colour, -1, cv2.LINE_AA, viz.SHIFT)
    below = viz.side_by_side(*dim)
    picture = np.vstack([above, np.full((viz.GAP, above.shape[1], 3), 255, np.uint8), below])
    return viz.shrink(picture, 1000)[0]


def match_house(matcher: Matcher) -> tuple[Matches, np.ndarray]:
    """Two rendered views: their matches, and the errors in pixels of the second (inf where it does not
    show the point at all)."""
    paint = torch.from_numpy(np.stack([middle(name) for name in PHOTOS]))
    worlds = [
        source.Worlds(PhotoStore(channel), families={"square": square}, photometric=False, variety=PLAIN)
        for channel in paint.unbind(-1)
    ]
    generator = torch.Generator().manual_seed(SEED)
    views = worlds[0].views(1, WIDTH, generator)
    light = generator.get_state()
    # Red, green and blue, in the same light.
    renders = [world.photograph(views, WIDTH, generator.set_state(light)) for world in worlds]
    cut = (WIDTH - HEIGHT) // 2  # of the square that is rendered, above and below
    colours = torch.stack([torch.cat([r.image0, r.image1])[:, 0, cut : cut + HEIGHT] for r in renders], -1)
    matches = matcher.match(*(255 * colours).round().to(torch.uint8).numpy())
    forward = views.camera.axes[:, 2]
    print(f"baseline: turned by {torch.rad2deg(torch.acos(forward[0] @ forward[1])):.0f} degrees")
    x, y = torch.from_numpy(matches.keypoints0 + [0, cut]).float().T.unsqueeze(1)
    first, second = views.map(lambda t: t[:1]), views.map(lambda t: t[1:])
    truth, visible = source.warp_points(first, second, WIDTH, x, y)
    errors = np.linalg.norm(matches.keypoints1 + [0, cut] - truth[0].numpy(), axis=1)
    return matches, np.where(visible[0], errors, np.inf)


def match_wall(matcher: Matcher) -> tuple[Matches, np.ndarray]:
    """A part of a wall of photos, and all of it 2.5 times smaller: their matches, and the errors in pixels of
    the second."""
    rows = ("camera rocket coffee grass", "brick coffee coffee astronaut", "gravel coffee coffee chelsea")
    wall = np.vstack([np.hstack([middle(name) for name in row.split()]) for row in rows])
    wall[512:, 512:1536] = middle("hubble_deep_field", 1024)
    view = cv2.resize(wall, (WIDTH, HEIGHT), interpolation=cv2.INTER_AREA)
    shrink = WIDTH / wall.shape[1]
    to_view = resize_matrix(shrink, shrink)
    centre = 190, 110
    to_part = np.vstack([cv2.getRotationMatrix2D(centre, 12, 2.5), [0, 0, 1]])  # pixels of the view -> part
    to_part[:2, 2] += np.array([WIDTH, HEIGHT]) / 2 - centre
    part = cv2.warpPerspective(wall, to_part @ to_view, (WIDTH, HEIGHT), flags=cv2.INTER_CUBIC) / 255.0
    x = np.linspace(0, 1, WIDTH)[None, :, None]
    part = part**1.2 * (0.7 + 0.35 * x)  # dimmer, and darker towards the left
    part += np.random.default_rng(0).normal(0, 0.012, part.shape)
    part = (part.clip(0, 1) * 255).round().astype(np.uint8)
    matches = matcher.match(part, view, details=True)
    truth = warp_points(matches.keypoints0, np.linalg.inv(to_part))
    return matches, np.linalg.norm(matches.keypoints1 - truth, axis=1)


def middle(name: str, size: int = 512) -> np.ndarray:
    """The middle of a photo, size size 3."""
    photo = getattr(data, name)()
    if photo.ndim == 2:
        photo = cv2.cvtColor(photo, cv2.COLOR_GRAY2RGB)
    side = min(photo.shape[:2])
    top, left = ((n - side) // 2 for n in photo.shape[:2])
    smooth = cv2.INTER_AREA if side > size else cv2.INTER_CUBIC
    return cv2.resize(photo[top : top + side, left : left + side], (size, size), interpolation=smooth)


if __name__ == "__main__":
    main()
