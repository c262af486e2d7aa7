"""The network that makes matches exact: its parts against plain references, its results on known geometry."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from prism_match import UserError
from prism_match import weights as weights_module
from prism_match.cli import app
from prism_match.geometry import warp_points
from prism_match.polish import local_affine
from prism_match.subpixel import (
    FLAT,
    LEVELS,
    SIDE,
    Pyramid,
    Subpixel,
    comparison,
    least_squares,
    normalised,
    settle,
    window_grid,
)
from prism_match.training.data.photos import PhotoPairs, PhotoStore
from prism_match.training.pairs import cell_centres
from prism_match.training.subpixel import (
    SubpixelConfig,
    disturbed,
    examples_of,
    subpixel_loss,
    train_subpixel,
    true_stretch,
)
from prism_match.weights import load_subpixel


@pytest.fixture(scope="module")
def network() -> Subpixel:
    return load_subpixel()


def under_a_map(image: np.ndarray, affine: np.ndarray) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
    """The image (h w in [0, 1]) under an affine map 2 3, points of it, and where they land."""
    height, width = image.shape
    scale = np.sqrt(abs(np.linalg.det(affine[:, :2])))
    smooth = cv2.GaussianBlur(image, (0, 0), 0.5 / scale) if scale < 0.8 else image
    other = cv2.warpAffine(smooth, affine, (width, height), flags=cv2.INTER_CUBIC).clip(0, 1)
    x, y = np.meshgrid(np.arange(28.0, width - 28, 8), np.arange(28.0, height - 28, 8))
    points = np.stack([x.ravel(), y.ravel()], 1)
    truth = points @ affine[:, :2].T + affine[:, 2]
    inside = ((truth > 20) & (truth < [width - 20, height - 20])).all(1)
    # Where there is something to see: the network cannot know where a point of a plain wall is.
    blurred = cv2.GaussianBlur(image, (0, 0), 4)
    texture = np.sqrt(np.maximum(cv2.GaussianBlur(image**2, (0, 0), 4) - blurred**2, 0))
    inside &= texture[points[:, 1].astype(int), points[:, 0].astype(int)] > 0.05
    return other, *(torch.from_numpy(p[inside]).float() for p in (points, truth))


def polished(
    network: Subpixel, image: np.ndarray, other: np.ndarray, points: torch.Tensor, guess: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = (Pyramid.of(torch.from_numpy(x).float()[None]) for x in (image, other))
    return settle(network, first, second, points, guess, local_affine(points, guess, rounds=2))


@pytest.mark.parametrize(
    "angle, scale, shift",
    [(0, 1, (3.3, -2.6)), (25, 1, (0, 0)), (180, 1, (0.4, 0)), (-10, 1.6, (0, 0.7)), (20, 0.45, (0.3, 0))],
)
def test_matches_come_to_lie_where_they_belong(
    network: Subpixel, photo: np.ndarray, angle: float, scale: float, shift: tuple[float, float]
) -> None:
    image = photo.astype(np.float32) / 255
    height, width = image.shape
    affine = cv2.getRotationMatrix2D((width / 2, height / 2), angle, scale)
    affine[:, 2] += shift
    other, points, truth = under_a_map(image, affine)
    other = (0.6 * other + 0.2).astype(np.float32)  # another exposure
    noise = np.random.default_rng(0).normal(0, 0.5, truth.shape)
    guess = truth + torch.from_numpy(noise).float()
    found, stated = polished(network, image, other, points, guess)
    before, after = ((p - truth).norm(dim=1) for p in (guess, found))
    assert len(points) > 60 and before.median() > 0.5
    assert after.median() < 0.2 and after.median() < 0.4 * before.median()
    # What it states is of the size of what it gets wrong, and orders it.
    order = stated.argsort()
    surer, rest = after[order].chunk(2)
    assert surer.mean() < rest.mean()


def test_nothing_breaks_where_there_is_nothing_to_see(network: Subpixel) -> None:
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(100, 2, generator=generator) * 60
    noise = torch.rand(64, 64, generator=generator).numpy()
    flat = np.full((64, 64), 0.5, np.float32)
    for a, b in ((noise, flat), (flat, flat), (noise, noise[:33, :35])):
        found, stated = polished(network, a, b, points, points)
        assert found.isfinite().all() and stated.isfinite().all() and (stated > 0).all()
    sure = polished(network, noise, noise, points, points)[1].median()
    assert polished(network, noise, noise[::-1].copy(), points, points)[1].median() > 3 * sure
    assert polished(network, noise, noise, points[:0], points[:0])[0].shape == (0, 2)


def test_many_at_once_equal_parts(
    network: Subpixel, photo: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = photo.astype(np.float32) / 255
    other, points, truth = under_a_map(image, np.array([[1, 0.1, 2.4], [0, 1, -1.3]]))
    whole = polished(network, image, other, points, truth + 0.4)
    monkeypatch.setattr("prism_match.subpixel.AT_ONCE_ON_CPU", 37)
    parts = polished(network, image, other, points, truth + 0.4)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(whole, parts, strict=True))


def test_few_numbers_of_windows_are_seen(network: Subpixel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of matches: each one costs memory that is never given back."""
    seen: set[int] = set()

    def stay(network, first, second, points0, points1, *_, **__):  # noqa: ANN001, ANN003, ANN202
        seen.add(len(points0))
        yield points1, points1[:, 0]

    monkeypatch.setattr("prism_match.subpixel.approach", stay)
    image = Pyramid.of(torch.zeros(1, 8, 8))
    for count in range(0, 3000, 7):
        points = torch.arange(2.0 * count).view(-1, 2)
        moved, error = settle(network, image, image, points, points, torch.eye(2).expand(count, 2, 2))
        assert torch.equal(moved, points) and torch.equal(error, points[:, 0])
    assert len(seen) < 10


def test_an_untrained_network_is_weighted_least_squares() -> None:
    """Against numpy's solution of the same normal equations, for windows that are shifted by a little."""
    x, y = window_grid(torch.device("cpu")).view(SIDE, SIDE, 2).unbind(-1)
    first = (0.5 + 0.2 * torch.sin(x / 2.0) * torch.cos(y / 3.0))[None]
    second = (0.5 + 0.2 * torch.sin((x - 0.2) / 2.0) * torch.cos((y + 0.1) / 3.0))[None]
    compared = comparison(first, second)
    found = least_squares(compared, torch.zeros(1, SIDE * SIDE))[0]
    assert torch.allclose(found, torch.tensor([0.2, -0.1]), atol=0.03)
    step, _ = Subpixel().eval()(first, second)
    assert torch.allclose(step[0], found, atol=0.01)


def test_windows_are_normalised_but_noise_stays_small() -> None:
    texture = torch.rand(1, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    assert normalised(texture).std().item() == pytest.approx(1, abs=0.02)
    assert torch.allclose(normalised(0.3 * texture + 0.5), normalised(texture), atol=0.02)
    assert normalised(FLAT / 10 * texture).std() < 0.1


def test_pyramids_sample_as_resizing_does() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(2, 37, 54, generator=generator)
    pyramid = Pyramid.of(images)
    points = torch.rand(6, 5, 2, generator=generator) * torch.tensor([53.0, 36.0])
    which = torch.tensor([0, 1, 0, 1, 0, 1])
    whole = pyramid.sample(points, torch.zeros(6, dtype=torch.long), which)
    for n in range(6):
        expected = cv2.remap(
            images[which[n]].numpy(), points[n, :, 0].numpy(), points[n, :, 1].numpy(), cv2.INTER_LINEAR,
            borderMode=cv2.BORDER_REPLICATE,
        )  # fmt: skip
        np.testing.assert_allclose(whole[n].numpy(), expected.ravel(), atol=0.02)  # remap rounds to 1/32
    ramp = Pyramid.of(torch.arange(64.0).expand(1, 64, 64) / 64)
    middle = torch.full((LEVELS, 1, 2), 31.5)
    # The middle of a ramp is the same at every level.
    assert torch.allclose(ramp.sample(middle, torch.arange(LEVELS)), torch.tensor(31.5 / 64))
    outside = torch.tensor([[[-9.0, 5.0]]])
    assert ramp.sample(outside, torch.zeros(1, dtype=torch.long)).item() == 0


def test_damaged_weights_are_told(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(weights_module.SUBPIXEL.read_bytes())
    data[-5] ^= 1
    copy = tmp_path / "subpixel.safetensors"
    copy.write_bytes(data)
    monkeypatch.setattr(weights_module, "SUBPIXEL", copy)
    with pytest.raises(UserError, match="damaged"):
        load_subpixel()


# ---- training


def photos(count: int = 6) -> PhotoStore:
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, 1, 24, 24, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=(128, 128), mode="bicubic").clamp(0, 1)[:, 0]
    return PhotoStore((smooth * 255).byte())


def test_the_stretch_is_the_derivative_of_the_warp() -> None:
    y, x = torch.meshgrid(torch.arange(6.0), torch.arange(8.0), indexing="ij")
    centres = torch.stack([x, y], -1) * 8 + 3.5
    affine = torch.tensor([[1.2, 0.3], [-0.2, 0.9]])
    seen = torch.ones(1, 6, 8, dtype=torch.bool)
    seen[0, 2, 3] = False
    stretch, known = true_stretch((centres @ affine.mT + 5)[None], seen)
    assert known.all() and torch.allclose(stretch, affine.expand(1, 6, 8, 2, 2), atol=1e-5)
    alone = torch.zeros_like(seen)
    alone[0, 0, 0] = True
    assert not true_stretch(centres[None], alone)[1][0, 0, 0]


def test_examples_are_true_and_the_loss_falls() -> None:
    source = PhotoPairs(photos(), photometric=False)
    batch = source.sample(3, 192, torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    examples = examples_of([batch], 40)
    cell = (examples.points0 / 8).long()
    assert batch.visible0[examples.image, cell[:, 1], cell[:, 0]].all()
    at_corners = (examples.points0 % 1 == 0).all(1)
    assert at_corners.float().mean() > 0.5
    assert torch.equal(
        examples.points1[~at_corners], batch.warp0[examples.image, cell[:, 1], cell[:, 0]][~at_corners]
    )
    for n in range(3):  # a homography takes the centres of cells there, and the corners
        centres, place = cell_centres(192, 192).view(-1, 2), batch.warp0[n].view(-1, 2)
        homography, _ = cv2.findHomography(centres.numpy(), place.numpy())
        mine = at_corners & (examples.image == n)
        truth = warp_points(examples.points0[mine].numpy(), homography)
        assert np.linalg.norm(truth - examples.points1[mine].numpy(), axis=1).max(initial=0) < 0.06
    torch.manual_seed(0)
    start, _ = disturbed(examples)
    assert 0.1 < ((start - examples.points1).norm(dim=1) / examples.pixel).median() < 1.5
    network = Subpixel(8)
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    losses = []
    for _ in range(25):
        torch.manual_seed(0)
        loss, _ = subpixel_loss(network, examples)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3


def test_training_writes_weights_that_load(tmp_path) -> None:
    out = tmp_path / "subpixel.safetensors"
    config = SubpixelConfig(minutes=1e-4, size=64, pairs=1, cells=20)
    source = PhotoPairs(photos())
    metrics = train_subpixel([source], out, config, torch.device("cpu"))
    assert metrics["before"] > 0
    again = train_subpixel([source], tmp_path / "b.safetensors", config, torch.device("cpu"), init=out)
    assert again["before"] > 0
    for damaged in (out.read_bytes()[:1000], b"no"):
        bad = tmp_path / "bad.safetensors"
        bad.write_bytes(damaged)
        with pytest.raises(UserError, match="bad.safetensors"):
            train_subpixel([source], out, config, torch.device("cpu"), init=bad)
    state, header = weights_module.read_weights(out)
    Subpixel().load_state_dict(state)
    assert header["training"]["steps"] == 3


def test_the_command_tells_mistakes_in_one_line(tmp_path) -> None:
    runner = CliRunner()
    for options, word in (
        (["--minutes", "0"], "minutes"),
        (["--minutes", "1", "--init", str(tmp_path / "none")], "no such file"),
    ):
        result = runner.invoke(
            app,
            ["train-subpixel", "--photos", str(tmp_path), "-o", str(tmp_path / "a.safetensors"), *options],
        )
        assert isinstance(result.exception, UserError) and word in str(result.exception)
