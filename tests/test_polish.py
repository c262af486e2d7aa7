"""Polishing: exact on images whose geometry is known, and harmless where there is nothing to go by."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
import torch

from prism_match import Matcher
from prism_match.config import PRESETS
from prism_match.matcher import Found
from prism_match.polish import FARTHEST, FEWEST, local_affine, neighbourhoods, polish
from prism_match.subpixel import CLOSE, halvings


def gray(photo: np.ndarray) -> np.ndarray:
    return photo.astype(np.float32) / 255


def moved_and_disturbed(
    image: np.ndarray, affine: np.ndarray, noise: float, step: float = 8.0
) -> tuple[np.ndarray, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The image under an affine map (2 3), points of it, where they land, and that with noise."""
    height, width = image.shape
    other = cv2.warpAffine(image, affine, (width, height), flags=cv2.INTER_CUBIC)
    x, y = np.meshgrid(np.arange(20.0, width - 20, step), np.arange(20.0, height - 20, step))
    points = np.stack([x.ravel(), y.ravel()], 1)
    truth = points @ affine[:, :2].T + affine[:, 2]
    inside = ((truth > 15) & (truth < [width - 15, height - 15])).all(1)
    points, truth = points[inside], truth[inside]
    guess = truth + np.random.default_rng(0).uniform(-noise, noise, truth.shape)
    return other, *(torch.from_numpy(a).float() for a in (points, truth, guess))


def about_the_middle(image: np.ndarray, angle: float, scale: float) -> np.ndarray:
    height, width = image.shape
    return cv2.getRotationMatrix2D((width / 2, height / 2), angle, scale)


@pytest.mark.parametrize(
    "angle, scale, shift", [(0, 1, (3.3, -2.6)), (25, 1, (0, 0)), (180, 1, (0.4, 0)), (-10, 1.4, (0, 0.7))]
)
def test_points_come_to_lie_where_they_belong(
    photo: np.ndarray, angle: float, scale: float, shift: tuple[float, float]
) -> None:
    image = gray(photo)
    affine = about_the_middle(image, angle, scale)
    affine[:, 2] += shift
    other, points, truth, guess = moved_and_disturbed(image, affine, noise=0.8)
    other = (0.6 * other + 0.2).clip(0, 1)  # another exposure
    found = polish(torch.from_numpy(image), torch.from_numpy(other), points, guess)
    before, after = ((p - truth).norm(dim=1) for p in (guess, found))
    assert before.median() > 0.5
    assert after.median() < 0.15
    assert (after <= before).float().mean() > 0.8, "all but those in the plain background"
    assert after.mean() < 0.5 * before.mean()


def test_nothing_moves_far_or_without_a_reason(photo: np.ndarray) -> None:
    image = torch.from_numpy(gray(photo))
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(200, 2, generator=generator) * torch.tensor([image.shape[1], image.shape[0]])
    noise = torch.rand(image.shape, generator=generator)
    for other in (noise, torch.zeros_like(image), image.flip(1), image[:40, :50]):
        found = polish(image, other, points, points)
        assert found.isfinite().all()
        assert (found - points).norm(dim=1).max() <= FARTHEST + 1e-3
    flat = torch.full_like(image, 0.5)
    assert torch.equal(polish(flat, image, points, points), points)


def test_few_matches_are_polished_as_if_nothing_was_turned(photo: np.ndarray) -> None:
    image = gray(photo)
    affine = np.array([[1, 0, 2.4], [0, 1, -1.3]])
    other, points, truth, guess = moved_and_disturbed(image, affine, noise=0.6)
    middle = (points - torch.tensor([220.0, 150.0])).norm(dim=1).argsort()  # a face
    for n in (0, 1, FEWEST - 1):
        chosen = middle[:n]
        found = polish(torch.from_numpy(image), torch.from_numpy(other), points[chosen], guess[chosen])
        assert found.shape == (n, 2)
        assert n == 0 or (found - truth[chosen]).norm(dim=1).median() < 0.15


def test_many_at_once_equal_parts(photo: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    image = gray(photo)
    other, points, _, guess = moved_and_disturbed(image, about_the_middle(image, 5, 1.1), noise=0.5)
    images = torch.from_numpy(image), torch.from_numpy(other)
    whole = polish(*images, points, guess)
    monkeypatch.setattr("prism_match.polish.AT_ONCE", 37)
    assert torch.allclose(polish(*images, points, guess), whole, atol=1e-4)


def test_local_affine_equals_least_squares() -> None:
    random = np.random.default_rng(0)
    points = random.uniform(0, 200, (60, 2))
    target = points @ random.uniform(-1, 1, (2, 2)).T * 1.5 + random.normal(0, 0.2, (60, 2))
    target[:30] = points[:30] @ np.array([[1.2, 0.3], [-0.2, 0.9]]).T
    found = local_affine(torch.from_numpy(points), torch.from_numpy(target)).numpy()
    compared = 0
    for n in range(60):
        near = np.argsort(np.linalg.norm(points - points[n], axis=1))[1:13]
        d0, d1 = points[near] - points[n], target[near] - target[n]
        expected = np.linalg.lstsq(d0, d1, rcond=None)[0].T
        if not np.allclose(found[n], np.eye(2)):
            assert np.allclose(found[n], expected, atol=1e-6)
            compared += 1
    assert compared < 60, "where two motions meet, neighbours do not agree"


def test_neighbours_that_agree_tell_the_affine_map() -> None:
    points = torch.rand(50, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 100
    affine = torch.tensor([[1.2, 0.3], [-0.2, 0.9]], dtype=torch.float64)
    assert torch.allclose(local_affine(points, points @ affine.mT + 3), affine.expand(50, 2, 2))
    few = points[: FEWEST - 1]
    assert torch.equal(local_affine(few, few * 2), torch.eye(2, dtype=torch.float64).expand(len(few), 2, 2))
    noise = torch.rand(2, 300, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 100
    assert (local_affine(*noise) == torch.eye(2)).all(2).all(1).float().mean() > 0.9


def test_neighbours_are_as_near_in_a_large_image() -> None:
    points = (300 * torch.rand(800, 2, generator=torch.Generator().manual_seed(4))).round()
    here, there = (neighbourhoods(x, x)[2] for x in (points, points + 30000))
    assert torch.equal(here, there)


def test_only_believed_matches_tell_about_others() -> None:
    g = torch.Generator().manual_seed(3)
    points = torch.rand(200, 2, generator=g, dtype=torch.float64) * 100
    affine = torch.tensor([[0.9, 0.3], [-0.2, 1.1]], dtype=torch.float64)
    there = points @ affine.mT
    believed = torch.arange(200) < 120
    there[~believed] += 30 * torch.rand(80, 2, generator=g, dtype=torch.float64)
    stretch, misfit, _ = neighbourhoods(points, there, 0, believed)
    assert torch.allclose(stretch[believed], affine.expand(120, 2, 2)) and misfit[believed].max() < 1e-6
    alone = neighbourhoods(points[believed], there[believed])
    for with_others, without in zip(neighbourhoods(points, there, 0, believed), alone, strict=True):
        assert torch.allclose(with_others[believed], without), "as if the others were not there"
    assert not torch.allclose(neighbourhoods(points, there)[0][believed], alone[0])


def test_of_neighbours_that_are_equally_far_the_same_count_whatever_else_was_matched() -> None:
    g = torch.Generator().manual_seed(5)
    cells = torch.randperm(40 * 40, generator=g)[:900]
    points = 8.0 * torch.stack([cells % 40, cells // 40], dim=1) + 3.5
    there = points + 4 * torch.rand(900, 2, generator=g)
    believed = torch.rand(900, generator=g) < 0.9
    alone = neighbourhoods(points[believed], there[believed], 2)
    for with_others, without in zip(neighbourhoods(points, there, 2, believed), alone, strict=True):
        torch.testing.assert_close(with_others[believed], without)


def test_polishing_begins_at_about_the_size_that_was_matched() -> None:
    assert halvings(1.0) == halvings(CLOSE) == 0
    for zoom in (1.6, 2.0, 3.0, 4.0):
        assert CLOSE / 2 < zoom / 2 ** halvings(zoom) <= CLOSE


@pytest.mark.parametrize("size, turns", [(160, 0), (160, 1), (400, 0)])
def test_large_photos_are_polished_at_their_own_size(photo: np.ndarray, size: int, turns: int) -> None:
    image = gray(photo)
    affine = about_the_middle(image, 8, 1.1)
    step = 8 * max(image.shape) / size  # a match in each cell
    other, points, truth, _ = moved_and_disturbed(image, affine, 0.0, step)
    matcher = Matcher(config=PRESETS["tiny"], device="cpu", rescale="never", size=size)
    first, second = matcher.prepare(image), matcher.prepare(other.clip(0, 1)).turned(turns)
    scale = first.gray.shape[1] / image.shape[1]
    near0, near1 = ((p + 0.5) * scale - 0.5 for p in (points, truth))
    for _ in range(turns):
        near1 = torch.stack([near1[:, 1], second.gray.shape[0] - 1 - near1[:, 0]], 1)
    guess = near1 + (torch.rand(near1.shape, generator=torch.Generator().manual_seed(0)) - 0.5)
    a, b = matcher.extract_prepared([first, second])
    found = Found((a, b), near0, guess, torch.ones(len(near0)), None, 0)  # type: ignore[arg-type]
    corner, polished = matcher._polish(found)[:2]
    small = (p.to(torch.device("cpu")) for p in (first, second))
    at_matched_size = polish(*small, near0, guess)
    before, after = (
        np.linalg.norm(
            second.to_original(q.numpy()) - first.to_original(p.numpy()) @ affine[:, :2].T - affine[:, 2],
            axis=1,
        )
        for p, q in ((near0, at_matched_size), (corner, polished))
    )
    assert np.median(after) < 0.12
    assert np.median(after) < 0.8 * np.median(before)


def test_the_matcher_polishes_unless_told_not_to(photo: np.ndarray) -> None:
    config = PRESETS["tiny"].replace(theta_c=0.0)
    plain, polished = (
        Matcher(
            config=config, device="cpu", precision="fp32", rescale="never", size=512, rotate="never", polish=p
        ).match(photo, photo)
        for p in (False, True)
    )
    cells, others = ({tuple(p) for p in np.floor((m.keypoints0 + 0.5) / 8)} for m in (plain, polished))
    assert len(cells & others) > 0.9 * len(plain)
    assert np.all((plain.keypoints0 - 3.5) % 8 == 0)  # the middles of cells
    off, off_after = (np.linalg.norm(m.keypoints1 - m.keypoints0, axis=1) for m in (plain, polished))
    near = off < 3  # of the same cell: the weights are random
    assert near.sum() > 20
    assert np.median(np.sort(off_after)[: near.sum()]) < 0.3 * np.median(off[near])
