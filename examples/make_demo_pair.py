"""Makes the pairs of photos that `prism demo` matches, with their geometry.

The motorcycle is a stereo pair of Middlebury's with measured disparities, whose source is told in
src/prism_match/assets/README.md. It comes with scikit-image up to 0.17 and is downloaded by later ones.

The portrait is NASA's of the astronaut Eileen Collins, which is in the public domain, as it comes with
scikit-image (pip install scikit-image). The second view is the first one zoomed, turned and
tilted, under dimmer light and with noise: hard enough to be worth a look, and known to the last digit.

    python examples/make_demo_pair.py
"""

import cv2
import numpy as np
from skimage import data

from prism_match.evaluation.bundled import ASSETS, DISPARITY_UNITS

WIDTH, HEIGHT = 480, 400


def main() -> None:
    astronaut()
    motorcycle(*data.stereo_motorcycle())


def motorcycle(left: np.ndarray, right: np.ndarray, disparity: np.ndarray) -> None:
    for name, image in (("motorcycle0.jpg", left), ("motorcycle1.jpg", right)):
        cv2.imwrite(str(ASSETS / name), image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 92])
    known = np.isfinite(disparity)
    units = np.where(known, (np.where(known, disparity, 0) * DISPARITY_UNITS).round(), 0).astype(np.uint16)
    cv2.imwrite(str(ASSETS / "motorcycle_disparity.png"), units, [cv2.IMWRITE_PNG_COMPRESSION, 9])


def astronaut() -> None:
    photo = data.astronaut()
    # Where the corners of the second view lie in the photo: turned by 17 degrees, closer on the right.
    angle = np.radians(17)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    corners = np.array([[-150, -118], [128, -98], [140, 122], [-158, 124]]) @ turn.T + [262, 196]
    frame = np.array([[0, 0], [WIDTH - 1, 0], [WIDTH - 1, HEIGHT - 1], [0, HEIGHT - 1]])
    homography = cv2.getPerspectiveTransform(corners.astype(np.float32), frame.astype(np.float32))
    view = cv2.warpPerspective(photo, homography, (WIDTH, HEIGHT), flags=cv2.INTER_CUBIC) / 255.0
    x = np.linspace(0, 1, WIDTH)[None, :, None]
    view = view**1.3 * (0.95 - 0.35 * x)  # dimmer, and darker towards the right
    view += np.random.default_rng(0).normal(0, 0.012, view.shape)
    view = (view.clip(0, 1) * 255).round().astype(np.uint8)
    for name, image in (("astronaut0.jpg", photo), ("astronaut1.jpg", view)):
        cv2.imwrite(str(ASSETS / name), image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 92])
    np.savetxt(ASSETS / "astronaut_homography.txt", homography, fmt="%.10g")


if __name__ == "__main__":
    main()
