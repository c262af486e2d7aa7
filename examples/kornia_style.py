"""PRISM in a program that was written for kornia's LoFTR: a dictionary of two images in, a dictionary of
matches out. Two lines of such a program change:

    from kornia.feature import LoFTR                ->  from prism_match import PRISM
    matcher = LoFTR(pretrained="outdoor")           ->  matcher = PRISM.from_pretrained()

Run it on any two photos; kornia is not needed:

    python examples/kornia_style.py a.jpg b.jpg
"""

import sys

import cv2
import torch

from prism_match import PRISM

LONGER_SIDE = 640


def load_gray(path: str) -> torch.Tensor:
    """1 1 h w, float in [0, 1]; any size will do, PRISM pads on its own."""
    gray = cv2.imread(path, cv2.IMREAD_GRAYSCALE)
    if gray is None:
        sys.exit(f"{path}: not an image")
    scale = LONGER_SIDE / max(gray.shape)
    gray = cv2.resize(gray, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
    return torch.from_numpy(gray)[None, None].float() / 255


def main(path0: str, path1: str) -> None:
    matcher = PRISM.from_pretrained().eval()
    with torch.inference_mode():
        found = matcher({"image0": load_gray(path0), "image1": load_gray(path1)})
    points0, points1 = found["keypoints0"].numpy(), found["keypoints1"].numpy()
    print(f"{len(points0)} matches, mean confidence {found['confidence'].mean():.2f}")
    if len(points0) < 8:
        return
    _, inliers = cv2.findFundamentalMat(points0, points1, cv2.USAC_MAGSAC, 1.0, 0.9999, 10_000)
    print(f"{0 if inliers is None else int(inliers.sum())} agree with one epipolar geometry")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
