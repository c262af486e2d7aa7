from pathlib import Path

import numpy as np
import torch

import prism_match
from prism_match import Matcher
from prism_match.corners import corners, to_corners

ASSETS = Path(prism_match.__file__).parent / "assets"


def test_the_corner_of_a_square_is_found_and_nothing_leaves_the_middle() -> None:
    gray = torch.zeros(64, 80)
    gray[21:, 37:] = 1.0  # its corner is between pixels 20 and 21, 36 and 37
    found = corners(gray)
    assert found.shape == (8, 10, 2)
    x, y = found[2, 4].tolist()
    assert abs(x - 36.5) <= 2 and abs(y - 20.5) <= 2  # a little inside, as structure tensors see them
    for row, column in ((0, 0), (6, 8), (0, 9)):  # flat, on either side of the edges
        x, y = (found[row, column] - torch.tensor([8.0 * column + 3.5, 8.0 * row + 3.5])).abs().tolist()
        assert x == y == 0.5  # one of the four pixels in the middle


def test_each_point_lies_in_its_cell_and_in_the_image() -> None:
    gray = torch.rand(61, 83, generator=torch.Generator().manual_seed(0))
    found = corners(gray)
    assert found.shape == (8, 11, 2)
    rows, columns = torch.meshgrid(torch.arange(8), torch.arange(11), indexing="ij")
    assert torch.equal((found // 8).long(), torch.stack([columns, rows], dim=-1))
    assert found[..., 0].max() <= 82 and found[..., 1].max() <= 60


def test_it_is_where_the_structure_tensor_says() -> None:
    """Against a plain loop over the pixels of one cell."""
    gray = torch.rand(48, 48, generator=torch.Generator().manual_seed(1))
    image, best = gray.double().numpy(), {}
    gy, gx = np.zeros_like(image), np.zeros_like(image)
    for y in range(1, 47):
        for x in range(1, 47):
            near = image[y - 1 : y + 2, x - 1 : x + 2]
            gx[y, x] = (near[:, 2] - near[:, 0]) @ [1, 2, 1] / 8
            gy[y, x] = (near[2] - near[0]) @ [1, 2, 1] / 8
    for y in range(16, 24):
        for x in range(16, 24):
            tensor = np.zeros((2, 2))
            for dy in range(-4, 5):
                for dx in range(-4, 5):
                    g = np.array([gx[y + dy, x + dx], gy[y + dy, x + dx]])
                    tensor += (5 - abs(dx)) * (5 - abs(dy)) * np.outer(g, g)  # a box twice is a tent
            best[x, y] = np.linalg.eigvalsh(tensor)[0]
    assert tuple(corners(gray)[2, 2].tolist()) == max(best, key=lambda p: best[p])


def test_matches_move_as_the_images_are_stretched() -> None:
    found = torch.zeros(4, 4, 2)
    found[1, 2] = torch.tensor([22.0, 9.0])  # of the cell in the middle of which is 19.5, 11.5
    at0 = torch.tensor([[19.5, 11.5], [19.5, 11.5], [-1e6, -1e6]])
    at1 = torch.tensor([[5.0, 6.0], [5.0, 6.0], [0.0, 0.0]])
    stretch = torch.stack([torch.tensor([[0.0, -2.0], [2.0, 0.0]]), torch.eye(2), torch.eye(2)])
    misfit = torch.tensor([0.3, torch.inf, torch.inf])
    moved0, moved1 = to_corners(found, at0, at1, stretch, misfit)
    assert moved0.tolist() == [[22.0, 9.0], [19.5, 11.5], [-1e6, -1e6]]
    assert moved1.tolist() == [[10.0, 11.0], [5.0, 6.0], [0.0, 0.0]]


def test_all_pairs_of_a_photo_have_their_matches_at_the_same_points_of_it() -> None:
    matcher = Matcher(device="cpu", precision="fp32", size=256, rotate="never")
    first = matcher.extract([ASSETS / "astronaut0.jpg"])[0]
    gray = first.prepared.to(torch.device("cpu")).numpy()
    partners = [gray, np.ascontiguousarray(gray[5:, 7:]), np.clip(gray * 0.8 + 0.1, 0, 1)]
    found = [matcher.match_extracted([(first, x)])[0] for x in matcher.extract(partners)]
    cells = []
    for m in found:
        at = first.prepared.from_original(m.keypoints0)
        cells.append({tuple(np.floor((p + 0.5) / 8)): tuple(np.round(p, 3)) for p in at})
        assert len(cells[-1]) == len(m) > 200
    for other in cells[1:]:
        common = set(cells[0]) & set(other)
        assert len(common) > 100
        assert np.mean([cells[0][c] == other[c] for c in common]) > 0.98  # but where a stretch is unknown
