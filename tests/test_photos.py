"""Homography pairs from photos, and the store that holds them."""

from __future__ import annotations

import io
import logging
import tarfile
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from prism_match.training.data.photometric import Draw, augment
from prism_match.training.data.photos import (
    Patches,
    PhotoPairs,
    PhotoStore,
    draw_mosaic,
    inverse,
    mip_maps,
    product,
    random_views,
    render,
    warp_cells,
)
from prism_match.training.data.preview import preview
from prism_match.training.pairs import cell_centres


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def smooth_photos(n: int = 6, size: int = 128) -> torch.Tensor:
    coarse = torch.rand(n, 1, 24, 24, generator=generator(1))
    fine = F.interpolate(coarse, size=size, mode="bicubic").clamp(0, 1)
    return (fine[:, 0] * 255).to(torch.uint8)


@pytest.fixture(scope="module")
def store() -> PhotoStore:
    return PhotoStore(smooth_photos())


def encode(image: np.ndarray) -> bytes:
    return cv2.imencode(".png", image)[1].tobytes()


# -- the store --------------------------------------------------------------------------------------


def test_load_folders_tars_and_bad_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    images = smooth_photos(4, 96).numpy()
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "a.png").write_bytes(encode(images[0]))
    colour = np.repeat(images[1][..., None], 3, -1)
    (tmp_path / "b.PNG").write_bytes(encode(np.hstack([colour, colour])))  # twice as wide as high
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    (tmp_path / "empty.jpg").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("not looked at")
    with tarfile.open(tmp_path / "more.tar", "w") as tar:
        for i in (2, 3):
            data = encode(images[i])
            info = tarfile.TarInfo(f"{i}.png")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    with caplog.at_level(logging.WARNING):
        loaded = PhotoStore.load(tmp_path, size=96)
    assert len(loaded) == 4 and loaded.size == 96
    warned = [r.getMessage() for r in caplog.records]
    assert len(warned) == 2 and "broken.jpg" in warned[0] and "empty.jpg" in warned[1]
    assert len(PhotoStore.load([tmp_path / "more.tar", tmp_path / "b.PNG"], size=32, limit=3)) == 3
    level0 = PhotoStore.load(tmp_path / "more.tar", size=96).flat[:, : 96 * 96].view(-1, 96, 96)
    assert np.array_equal(level0.numpy(), images[2:])


def test_nothing_to_load(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=str(tmp_path)):
        PhotoStore.load(tmp_path)
    (tmp_path / "bad.tar").write_bytes(b"not a tar")
    with pytest.raises(ValueError, match="bad.tar"):
        PhotoStore.load(tmp_path)
    with pytest.raises(FileNotFoundError):
        PhotoStore.load(tmp_path / "missing.png")


@pytest.mark.parametrize("shape", [(0, 64, 64), (2, 64, 32), (2, 50, 50)])
def test_store_refuses_odd_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        PhotoStore(torch.zeros(shape, dtype=torch.uint8))


@pytest.mark.parametrize("level", [0, 1, 3])
def test_store_samples_as_grid_sample_does(store: PhotoStore, level: int) -> None:
    u, v = torch.rand(2, 200, generator=generator()).unbind(0)
    index = torch.full((200,), 2)
    got = store.sample(index, u, v, torch.full((200,), level + 0.4))
    side, start = store.sizes[level], sum(s * s for s in store.sizes[:level])
    photo = store.flat[2, start : start + side * side].view(1, 1, side, side).float() / 255
    grid = torch.stack([u, v], -1).view(1, 1, -1, 2) * 2 - 1
    want = F.grid_sample(photo, grid, align_corners=False, padding_mode="border").flatten()
    assert torch.allclose(got, want, atol=1e-4)


def test_mip_maps_keep_the_mean() -> None:
    flat = torch.cat([x.flatten(1) for x in mip_maps(smooth_photos(2, 64), 3)], 1)
    assert flat.shape == (2, 64 * 64 + 32 * 32 + 16 * 16)
    assert torch.allclose(flat[:, :4096].float().mean(1), flat[:, -256:].float().mean(1), atol=1.0)


# -- geometry ---------------------------------------------------------------------------------------


def no_patches(b: int, size: int) -> Patches:
    patches = Patches(Draw(generator()), b, size)
    patches.rx = patches.rx * 0
    return patches


@pytest.mark.parametrize(("height", "width", "scale"), [(96, 96, 4.0), (480, 480, 6.0), (832, 640, 6.0)])
def test_warp_is_the_homography(height: int, width: int, scale: float) -> None:
    b, size = 5, (height, width)
    views = random_views(Draw(generator(3)), b, size, scale)
    empty = no_patches(b, size)
    warp, visible = warp_cells(views[:, 0], views[:, 1], empty, empty, size)
    centres = cell_centres(height, width)
    middle = np.array([width - 1, height - 1]) / 2
    for i in range(b):
        h = np.linalg.inv(views[i, 1].double().numpy()) @ views[i, 0].double().numpy()
        want = cv2.perspectiveTransform(centres.view(1, -1, 2).double().numpy(), h)[0]
        photo = cv2.perspectiveTransform(
            centres.view(1, -1, 2).double().numpy(), views[i, 0].double().numpy()
        )[0]
        seen = visible[i].flatten().numpy()
        assert seen.any()
        assert np.abs(warp[i].view(-1, 2).numpy() - want)[seen].max() < 0.01
        # Well inside or well outside both frames there is no doubt about what is visible.
        clear = (np.abs(want - middle) < middle - 0.1).all(1) & (np.abs(photo - 0.5) < 0.499).all(1)
        assert seen[clear].all()
        outside = (np.abs(want - middle) > middle + 0.1).any(1)
        assert not seen[outside].any()


def test_warps_are_mutual_inverses() -> None:
    views = random_views(Draw(generator(4)), 8, 128, 4.0)
    there, back = product(inverse(views[:, 1]), views[:, 0]), product(inverse(views[:, 0]), views[:, 1])
    both = product(back, there)
    both = both / both[:, 2:, 2:]
    assert torch.allclose(both, torch.eye(3).expand_as(both), atol=1e-2)


def test_images_agree_where_visible(store: PhotoStore) -> None:
    batch = PhotoPairs(store, photometric=False, strangers=0.0).sample(8, 128, generator(5))
    centres = cell_centres(128, 128).expand(8, -1, -1, -1)
    at0 = F.grid_sample(batch.image0, centres * 2 / 127 - 1, align_corners=True)[:, 0]
    at1 = F.grid_sample(batch.image1, batch.warp0 * 2 / 127 - 1, align_corners=True)[:, 0]
    difference = (at0 - at1)[batch.visible0].abs()
    assert difference.median() < 0.02 and difference.quantile(0.95) < 0.12
    assert (at0 - at1.roll(1, 0))[batch.visible0].abs().median() > 3 * difference.median()


def test_a_mosaic_shows_its_photos_side_by_side(store: PhotoStore) -> None:
    size, side = 128, 2
    whole = torch.tensor([[1 / size, 0, 0.5 / size], [0, 1 / size, 0.5 / size], [0, 0, 1]]).view(1, 3, 3)
    mosaic = torch.tensor([[side, 1, 3]])
    image = render(store, whole, torch.tensor([4]), torch.tensor([0]), mosaic, no_patches(1, size), size)
    small = F.avg_pool2d(smooth_photos()[:, None] / 255.0, 2)[:, 0]
    want = torch.cat([torch.cat([small[4], small[5]], 1), torch.cat([small[1], small[2]], 1)])
    assert (image[0, 0] - want).abs().max() < 0.02


def test_large_views_show_more_photos() -> None:
    store = PhotoStore(smooth_photos())
    sides = [draw_mosaic(Draw(generator()), 500, size, store)[:, 0].float() for size in (32, 128, 256)]
    assert sides[0].max() == 1 and sides[1].max() == 3 and sides[2].max() == 5
    assert all(s.min() == 1 for s in sides)


def test_patches_hide_cells_of_both_views() -> None:
    b, size = 2, 96
    identity = torch.eye(3).expand(b, 3, 3) / torch.tensor([size, size, 1.0]).view(1, 3, 1)
    patches = Patches(Draw(generator()), b, size)
    patches.x, patches.y = torch.full_like(patches.x, 48.0), torch.full_like(patches.y, 48.0)
    patches.rx = patches.ry = torch.full_like(patches.rx, 20.0)
    _, own = warp_cells(identity, identity, patches, no_patches(b, size), size)
    _, theirs = warp_cells(identity, identity, no_patches(b, size), patches, size)
    assert not own[:, 6, 6].any() and own[:, 1, 1].all()
    assert torch.equal(own, theirs)


# -- the source -------------------------------------------------------------------------------------


def test_batches_are_well_formed_and_repeatable(store: PhotoStore) -> None:
    source = PhotoPairs(store, strangers=0.0)
    batch, again = (source.sample(24, 32, generator(7)) for _ in range(2))
    assert batch.image0.shape == batch.image1.shape == (24, 1, 32, 32)
    assert batch.warp0.shape == (24, 4, 4, 2) and batch.visible1.shape == (24, 4, 4)
    for name in ("image0", "image1", "warp0", "warp1"):
        value = getattr(batch, name)
        assert value.isfinite().all() and torch.equal(value, getattr(again, name))
    assert batch.image0.min() >= 0 and batch.image0.max() <= 1
    share = torch.maximum(batch.visible0.float().mean((1, 2)), batch.visible1.float().mean((1, 2)))
    assert (share > 0.05).float().mean() > 0.9 and share.min() < 0.9
    other = source.sample(24, 32, generator(8))
    assert not torch.equal(batch.image0, other.image0)


def test_scale_ratios_are_spread() -> None:
    views = random_views(Draw(generator(1)), 2000, 64, 4.0)
    area = torch.linalg.det(views.double()).abs() / views.double()[..., 2, 2] ** 3
    ratio = (area[:, 0] / area[:, 1]).sqrt().log().abs().exp()
    assert ratio.median() > 1.3 and ratio.quantile(0.9) > 2.5


# -- photometric changes ----------------------------------------------------------------------------


def test_augment_changes_light_not_structure() -> None:
    images = smooth_photos(16, 64).float().unsqueeze(1) / 255
    out = augment(images, generator(2))
    assert out.shape == images.shape and out.isfinite().all() and out.min() >= 0 and out.max() <= 1
    assert torch.equal(out, augment(images, generator(2)))
    a, b = ((t - t.mean((2, 3), keepdim=True)).flatten(1) for t in (images, out))
    correlation = F.cosine_similarity(a, b)
    assert correlation.median() > 0.5 and correlation.min() > -0.3  # never inverted
    assert (out.mean((2, 3)) - images.mean((2, 3))).abs().max() > 0.1


def test_calm_views_are_changed_little() -> None:
    images = smooth_photos(32, 64).float().unsqueeze(1) / 255
    calm = torch.arange(32) < 16
    out = augment(images, generator(2), calm)
    a, b = ((t - t.mean((2, 3), keepdim=True)).flatten(1) for t in (images, out))
    correlation = F.cosine_similarity(a, b)
    assert correlation[calm].quantile(0.2) > correlation[~calm].quantile(0.2) + 0.05


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_augment_survives_flat_images(value: float) -> None:
    out = augment(torch.full((8, 1, 32, 32), value), generator(3))
    assert out.isfinite().all()


def test_preview_draws_every_pair(store: PhotoStore) -> None:
    sheet = preview(PhotoPairs(store).sample(3, 64, generator(1)), columns=2)
    assert sheet.dtype == np.uint8 and sheet.shape == (2 * 68, 2 * 132, 3)
    assert sheet.std() > 5


def test_views_of_different_photos_share_nothing(store):
    batch = PhotoPairs(store, strangers=1.0).sample(6, 64, generator(2))
    assert not batch.visible0.any() and not batch.visible1.any()
    some = PhotoPairs(store, strangers=0.5).sample(64, 64, generator(2))
    assert 16 < some.visible0.flatten(1).any(1).sum() < 48


@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_has_no_match_is_never_the_photo_itself(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = PhotoPairs(PhotoStore(smooth_photos(count)), photometric=False, strangers=1.0)
    shown = []

    def spy(*arguments):  # noqa: ANN002, ANN202
        shown.append(arguments[2:4])
        return render(*arguments)

    monkeypatch.setattr(source, "_render", spy)
    batch = source.sample(8, 32, generator())
    (photo, other), (stranger, other_there) = shown
    if count > 1:
        assert not any((photo == x).any() for x in (other, stranger, other_there))
    else:  # nobody else is there
        assert torch.equal(photo, stranger) and batch.visible0.any()
