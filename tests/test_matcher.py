"""`Matcher` and `Matches`: what goes in, what comes out, and that batches give what singles give."""

from __future__ import annotations

import gc
import inspect
import json
import os
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_match import Matcher, Matches, UserError, geometry, tiles
from prism_match import matcher as matcher_module
from prism_match.config import PRESETS
from prism_match.engine.features import held_bytes
from prism_match.engine.methods import Prism, prism_settings
from prism_match.engine.photos import Resize
from prism_match.images import load_image
from prism_match.weights import load_model, weights_info
from prism_match.weights.store import export_weights

TINY = PRESETS["tiny"].replace(theta_c=0.0)


@pytest.fixture(scope="module")
def matcher() -> Matcher:
    return Matcher(config=TINY, device="cpu", rescale="never", size=160, rotate="never")


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((height, width), dtype=np.float32)


def same(a: Matches, b: Matches, tolerance: float = 1e-2) -> None:
    """The same set of matches; their order may differ where scores are equal but for rounding."""
    assert len(a) == len(b) > 0
    rows = [np.concatenate([m.keypoints0, m.keypoints1, m.scores[:, None]], axis=1) for m in (a, b)]
    rows = [r[np.lexsort(np.round(r[:, :2], 2).T)] for r in rows]
    np.testing.assert_allclose(rows[0], rows[1], atol=tolerance)


def test_result_is_in_pixels_of_the_originals(matcher: Matcher, photo: np.ndarray) -> None:
    result = matcher.match(photo, photo)
    assert len(result) > 20
    for points in (result.keypoints0, result.keypoints1):
        assert points.dtype == np.float32 and points.shape == (len(result), 2)
        assert (points >= -0.5).all() and (points <= 511.5).all()
    assert result.scores.dtype == np.float32
    assert (np.diff(result.scores) <= 0).all(), "best first"
    # A cell of the resized photo is 8 * 512 / 160 pixels wide; centres of pixels and cells map to centres.
    cell = 8 * 512 / 160
    np.testing.assert_allclose((result.keypoints0 + 0.5) / (cell / 8) % 1, 0.5, atol=1e-3)
    middles = matcher.adjusted(polish=False).match(photo, photo).keypoints0
    np.testing.assert_allclose((middles + 0.5) / cell % 1, 0.5, atol=1e-3)
    # An image matched with itself: each match stays within the reach of the refinement.
    close = np.abs(result.keypoints0 - result.keypoints1).max(axis=1) < cell
    assert close.mean() > 0.9


def test_sizes_may_differ_and_small_images_stay_as_they_are(matcher: Matcher) -> None:
    result = matcher.match(noise(33, 150), noise(100, 47), details=True)
    assert result.size0 == (150, 33) and result.size1 == (47, 100)
    assert result.details.keep0.shape == (2, 5, 19)
    assert result.details.nmi1.shape == (2, 13, 6)
    assert result.details.keep0.dtype == bool and result.details.nmi0.dtype == np.float32


@pytest.mark.parametrize("preset", ["cosine", "no-pruning", "linear-attention", "prune-last"])
def test_details_of_ablations_in_half_precision(preset: str) -> None:
    part = PRESETS[preset]
    config = PRESETS["tiny"].replace(estimator=part.estimator, pruning=part.pruning, attention=part.attention)
    matcher = Matcher(device="cpu", rescale="never", precision="bf16", config=config, polish=False)
    details = matcher.match(noise(40, 64), noise(48, 56), details=True).details
    assert details is not None and details.keep0.shape == (2, 5, 8)
    assert details.nmi0 is None or details.nmi0.dtype == np.float32


@settings(max_examples=12, deadline=None)
@given(st.tuples(*[st.integers(32, 170)] * 4), st.integers(0, 99))
def test_any_shape(matcher: Matcher, shape: tuple[int, int, int, int], seed: int) -> None:
    image0, image1 = noise(shape[0], shape[1], seed), noise(shape[2], shape[3], seed + 1)
    result = matcher.match(image0, image1)
    assert result.keypoints0.shape == result.keypoints1.shape == (len(result), 2)
    for points, image in ((result.keypoints0, image0), (result.keypoints1, image1)):
        assert np.isfinite(points).all()
        assert (points >= -0.5).all() and (points <= np.array(image.shape[::-1]) - 0.5).all()


def test_many_give_what_singles_give(matcher: Matcher, tmp_path: Path, photo: np.ndarray) -> None:
    files = []
    for n, shape in enumerate([(96, 128), (96, 128), (128, 96), (70, 90)]):
        files.append(tmp_path / f"{n}.png")
        PIL.Image.fromarray(photo[n * 40 : n * 40 + shape[0], n * 60 : n * 60 + shape[1]]).save(files[-1])
    pairs = [(files[i], files[j]) for i in range(4) for j in range(i + 1, 4)]
    for batch_size in (1, 4, 16):
        results = list(matcher.match_many(iter(pairs), batch_size=batch_size))
        assert [(r.name0, r.name1) for r in results] == [(str(a), str(b)) for a, b in pairs]
        for pair, result in zip(pairs, results, strict=True):
            same(result, matcher.match(*pair))


def test_features_are_computed_once_per_image(matcher: Matcher, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [noise(64, 64, n) for n in range(4)]
    seen: list[int] = []
    extract = matcher.model.extract

    def spy(image: torch.Tensor) -> object:
        seen.append(len(image))
        return extract(image)

    monkeypatch.setattr(matcher.model, "extract", spy)
    pairs = [(images[i], images[j]) for i in range(4) for j in range(4)]
    results = list(matcher.match_many(pairs, batch_size=3))
    assert sum(seen) == 4
    for pair, result in zip(pairs, results, strict=True):
        same(result, matcher.match(*pair))


@pytest.fixture
def only_new_objects() -> Iterator[None]:
    """The garbage collector looks at what the test makes alone: the rest takes it a third of a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def live_tensors() -> int:
    """Bytes of all tensors that are alive and not frozen, whatever holds them."""
    gc.collect()
    storages = {}
    for x in gc.get_objects():
        if type(x) is torch.Tensor:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.usefixtures("only_new_objects")
@pytest.mark.parametrize("batch_size", [1, 4])
def test_features_stay_within_their_limit(matcher: Matcher, batch_size: int) -> None:
    """Of the memory itself: parts of a batch must not hold all of it."""
    images = [noise(256, 256, n) for n in range(12)]
    pairs = [(images[i], images[(i + 1) % 12]) for i in range(12)]
    list(matcher.match_many(pairs[:batch_size], batch_size))  # tables of these sizes are kept
    before = live_tensors()
    one = held_bytes(matcher.extract(images[:1])[0].features)
    for limit in (0, 1):
        held = [live_tensors() - before for _ in matcher.match_many(pairs, batch_size, cache_mib=limit)]
        assert max(held) <= limit * 2**20
        assert limit == 0 or max(held) >= one > 0  # it is made use of
    results = list(matcher.match_many(pairs, batch_size, cache_mib=0))
    same(results[5], matcher.match(*pairs[5]))


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_a_buffer_that_is_used_again(matcher: Matcher, photo: np.ndarray, batch_size: int) -> None:
    a, b = photo[:96, :128].copy(), photo[60:156, 90:218].copy()

    def frames() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        buffer = np.empty_like(a)
        for frame in (a, b, a):
            buffer[:] = frame
            yield buffer, a

    def tensors() -> Iterator[tuple[torch.Tensor, np.ndarray]]:
        buffer = torch.empty(1, *a.shape, dtype=torch.uint8)
        for frame in (a, b, a):
            buffer[0] = torch.from_numpy(frame)
            yield buffer, a

    expected = [matcher.match(frame, a) for frame in (a, b, a)]
    assert len(expected[0]) != len(expected[1])
    for stream in (frames, tensors):
        for result, alone in zip(matcher.match_many(stream(), batch_size), expected, strict=True):
            same(result, alone)


def test_transparency_is_part_of_an_image(matcher: Matcher, photo: np.ndarray) -> None:
    """Also where the colours are the same, and for as many pairs as it is in."""
    plain = np.repeat(photo[:96, :128, None], 4, axis=2)
    plain[..., 3] = 255
    left = plain.copy()
    left[:, 64:, 3] = 0
    results = list(matcher.match_many([(plain, plain), (left, plain), (left, plain)], batch_size=1))
    assert results[0].keypoints0[:, 0].max() > 80
    assert all(m.keypoints0[:, 0].max() < 72 for m in results[1:])


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_mask_that_is_used_again(matcher: Matcher, photo: np.ndarray, batch_size: int) -> None:
    a = photo[:96, :128].copy()

    def masked() -> Iterator[tuple]:
        mask = np.zeros(a.shape, bool)
        for half in (slice(0, 64), slice(64, 128)):
            mask[:] = False
            mask[:, half] = True
            yield a, a, mask, None

    left, right = matcher.match_many(masked(), batch_size)
    assert left.keypoints0[:, 0].max() < 72 and right.keypoints0[:, 0].min() > 56


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_file_that_is_overwritten(
    matcher: Matcher, photo: np.ndarray, tmp_path: Path, batch_size: int
) -> None:
    a, b = photo[:96, :128].copy(), photo[60:156, 90:218].copy()
    file = tmp_path / "frame.bmp"  # all frames have the same length

    def frames() -> Iterator[tuple[Path, np.ndarray]]:
        for frame in (a, b):
            PIL.Image.fromarray(frame).save(file)
            yield file, a

    expected = [matcher.match(frame, a) for frame in (a, b)]
    for result, alone in zip(matcher.match_many(frames(), batch_size), expected, strict=True):
        same(result, alone)


def test_results_do_not_hold_large_images(matcher: Matcher, photo: np.ndarray) -> None:
    small = photo[:96, :128].copy()
    kept = matcher.match(small, small)
    small[:] = 0  # whatever becomes of the memory it came from
    assert kept.plot().max() > 200
    large = np.repeat(np.repeat(photo, 6, axis=0), 6, axis=1)
    watched = weakref.ref(large)
    results = [matcher.match(large, photo), *matcher.match_many([(large, photo)])]
    with pytest.raises(UserError, match="give it again, as image0="):
        results[0].plot()
    assert results[0].plot(image0=large).any()
    del large
    gc.collect()
    assert watched() is None and len(results) == 2


def test_pairs_before_a_bad_one_are_matched(matcher: Matcher, photo: np.ndarray, tmp_path: Path) -> None:
    PIL.Image.fromarray(photo[:96, :128]).save(tmp_path / "a.png")
    (tmp_path / "bad.png").write_bytes(b"no image")
    for bad in ("bad.png", "gone.png"):
        pairs = [(tmp_path / "a.png", tmp_path / "a.png")] * 2 + [(tmp_path / "a.png", tmp_path / bad)]
        stream = matcher.match_many(pairs, batch_size=4)
        assert len(next(stream)) == len(next(stream))
        with pytest.raises(UserError, match=bad):
            next(stream)


@pytest.mark.parametrize("size", ["big", float("nan"), 640.5, None, True, 0])
def test_sizes_that_are_none(size: object) -> None:
    with pytest.raises(UserError, match="size must be a whole number of at least 32 pixels"):
        Matcher(size=size, config=TINY, device="cpu", rescale="never")


def test_region_masks_limit_where_matches_are(matcher: Matcher, photo: np.ndarray) -> None:
    mask = np.zeros(photo.shape, dtype=bool)
    mask[:, :256] = True
    result = matcher.match(photo, photo, mask0=mask)
    assert len(result) > 0
    assert result.keypoints0[:, 0].max() < 256
    assert len(matcher.match(photo, photo, mask0=np.zeros_like(mask))) == 0
    same(matcher.match(photo, photo, mask0=np.ones_like(mask)), matcher.match(photo, photo))


def test_masks_in_batches(matcher: Matcher, photo: np.ndarray) -> None:
    small, mask = photo[:96, :128], np.zeros((96, 128), np.uint8)
    mask[:, 40:] = 1
    pairs = [(small, photo), (small, small, mask, None), (small, small, None, mask), (small, small)]
    masked = [(small, small, mask, mask), (small, photo, mask, None)]
    for pair, result in zip(pairs + masked, matcher.match_many(pairs + masked, batch_size=6), strict=True):
        same(result, matcher.match(*pair))
    with pytest.raises(UserError, match=r"\(image0, image1, mask0, mask1\)"):
        list(matcher.match_many([(small, small, mask)]))
    with pytest.raises(UserError, match="the mask is 128x96 but its image"):
        list(matcher.match_many([(small, photo, None, mask)]))


# --- turned images ----------------------------------------------------------------------------------

# Confident in what is the same, even with random weights.
SURE = TINY.replace(temperature=0.02, weighted_softmax=False)


def turn_back(points: np.ndarray, turns: int, size: tuple[int, int]) -> np.ndarray:
    """Pixels of np.rot90(image, turns) to pixels of the image, of size (width, height)."""
    width, height = size
    x, y = points.T
    return np.stack(
        [(x, y), (width - 1 - y, x), (width - 1 - x, height - 1 - y), (y, height - 1 - x)][turns], 1
    )


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_a_turned_image_matches_as_if_upright(photo: np.ndarray, turns: int) -> None:
    image = photo[:96, :128]
    turned = np.ascontiguousarray(np.rot90(image, turns))
    mask = np.zeros(image.shape, bool)
    mask[:, 24:] = True
    upright = Matcher(config=SURE, device="cpu", rescale="never", rotate="never")
    matcher = Matcher(config=SURE, device="cpu", rescale="never", rotate="always")
    for masks in ((None, None), (mask, np.rot90(mask, turns))):
        expected = upright.match(image, image, masks[0], masks[0], details=True)
        result = matcher.match(image, turned, *masks, details=True)
        assert result.size1 == turned.shape[::-1]
        points = turn_back(result.keypoints1, turns, expected.size1)
        same(replace(result, keypoints1=points), expected)
        for name in ("keep1", "nmi1"):
            back = np.rot90(getattr(result.details, name), -turns, axes=(1, 2))
            np.testing.assert_allclose(back, getattr(expected.details, name), atol=1e-3)


def test_turned_images_of_any_size_come_back_to_their_pixels(photo: np.ndarray) -> None:
    """Sides that are no multiples of anything, and resized: the points still lie where they should."""
    prepare = Matcher(config=SURE, device="cpu", rescale="never", size=100).prepare
    image = photo[:151, :203]
    points = np.array([[0.0, 0], [99, 3], [40, 73]], np.float32)
    expected = prepare(image).to_original(points)
    for turns in (1, 2, 3):
        turned = prepare(image).turned(turns)
        assert turned.gray.shape == np.rot90(prepare(image).gray, turns).shape
        there = turn_back(points, 4 - turns, turned.gray.shape[::-1])
        np.testing.assert_allclose(turned.to_original(there), expected, atol=1e-3)


def test_turned_batches_give_what_singles_give(photo: np.ndarray) -> None:
    matcher = Matcher(config=SURE, device="cpu", rescale="never", rotate="always", max_matches=20)
    image = photo[:64, :96]
    turned = [np.ascontiguousarray(np.rot90(image, k)) for k in range(3)]
    pairs = [(image, t) for t in turned] + [(turned[2], noise(64, 96)), (image, turned[1], None, turned[1])]
    for pair, result in zip(pairs, matcher.match_many(pairs, batch_size=6, details=True), strict=True):
        same(result, matcher.match(*pair))
        assert result.details.keep1.shape[1:] == (pair[1].shape[0] // 8, pair[1].shape[1] // 8)


@pytest.mark.parametrize(("weak", "tries"), [(0.0, 1), (1.0, 4)])
def test_only_weak_pairs_are_turned(
    photo: np.ndarray, monkeypatch: pytest.MonkeyPatch, weak: float, tries: int
) -> None:
    matcher = Matcher(config=SURE, device="cpu", rescale="never", max_matches=3)
    calls = []
    plain = matcher._match_as_they_are
    monkeypatch.setattr(matcher_module, "WEAK", weak)
    monkeypatch.setattr(matcher, "_match_as_they_are", lambda *args: calls.append(1) or plain(*args))
    assert len(matcher.match(photo[:64, :96], photo[:64, :96])) == 3
    assert len(calls) == tries


@pytest.mark.parametrize(("sparse", "tries"), [(0.0, 0), (1.0, 1)])
def test_only_pairs_that_hardly_match_are_tried_at_other_scales(
    photo: np.ndarray, monkeypatch: pytest.MonkeyPatch, sparse: float, tries: int
) -> None:
    calls = []

    def spy(matcher: Matcher, pair: object, matches: Matches) -> Matches:
        calls.append(pair)
        return matches

    monkeypatch.setattr(matcher_module, "SPARSE", sparse)
    monkeypatch.setattr(tiles, "match_at_other_scales", spy)
    image = photo[:64, :96]
    for rescale, expected in (("auto", tries), ("never", 0)):
        calls.clear()
        matcher = Matcher(config=SURE, device="cpu", rotate="never", rescale=rescale, max_matches=3)
        assert len(matcher.match(image, image)) == 3
        list(matcher.match_many([(image, image)]))
        assert len(calls) == 2 * expected


def test_long_images_that_hardly_match_are_no_error(photo: np.ndarray) -> None:
    """Shrunk, to be tried at other scales, they are narrower than any image that may be given."""
    matcher = Matcher(config=TINY, device="cpu", rotate="never", size=160, threshold=0.9)
    long = noise(40, 1200)
    for pair in ((photo, long), (long, photo), (long, long)):
        assert len(matcher.match(*pair)) == 0
    prepared = Prism(matcher).prepare(load_image(long), Resize(longer=160))  # as a benchmark has it
    assert prepared.size == (1200, 40)


def test_matches_at_other_scales_are_not_taken_for_those_of_one_pass() -> None:
    info = weights_info(None, TINY)
    never, auto = (prism_settings(info, None, None, "never", rescale, True) for rescale in ("never", "auto"))
    assert auto == never | {"rescale": "auto"}
    assert "rescale" not in never, "what was stored before there was a choice is still good"


def test_a_precision_that_a_cpu_is_slow_in_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for has, told in ((True, 0), (False, 1)):
        for name in ("avx512_bf16", "amx_tile"):
            monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda has=has: has, raising=False)
        caplog.clear()
        for precision in ("auto", "fp32", "bf16"):
            matcher_module.find_dtype(precision, torch.device("cpu"))
        assert len(caplog.records) == told


@pytest.mark.parametrize(("instructions", "quick"), [(True, "bf16"), (False, "fp32"), (None, "fp32")])
def test_auto_is_the_precision_that_a_cpu_has_instructions_for(
    instructions: bool | None, quick: str, monkeypatch: pytest.MonkeyPatch, photo: np.ndarray
) -> None:
    """But for onnxruntime, which computes in fp32; None: nobody can tell."""
    monkeypatch.setattr(matcher_module, "has_instructions", lambda name: name == "fp32" or instructions)
    matcher = Matcher(config=TINY, device="cpu", rescale="never")
    dtype = matcher_module.DTYPES[quick]
    assert matcher.dtype == dtype and matcher.precisions[0] == quick
    assert matcher.extract([photo[:64, :64]])[0].features.coarse.dtype == dtype
    for backend in ("onnx", "auto"):
        expected = torch.float32 if backend == "onnx" else dtype
        assert matcher_module.find_dtype("auto", torch.device("cpu"), backend) == expected


def test_black_images_and_strangers_are_no_error(matcher: Matcher) -> None:
    strict = Matcher(config=TINY, device="cpu", rescale="never", threshold=0.5)
    black = np.zeros((64, 64), np.uint8)
    for pair in ((black, black), (black, noise(64, 80)), (noise(64, 64, 1), noise(64, 64, 2))):
        assert strict.match(*pair).keypoints0.shape == (0, 2)
        assert np.isfinite(matcher.match(*pair).scores).all()


def test_what_is_transparent_is_not_matched(photo: np.ndarray, tmp_path: Path) -> None:
    """As if it were masked out; a mask that is given as well is one more."""
    matcher = Matcher(config=TINY, device="cpu", rescale="never", size=160, rotate="never")
    image = np.repeat(photo[:160, :160, None], 3, axis=2)
    alpha = np.zeros((160, 160), np.uint8)
    alpha[:, 80:] = 255
    rgba = np.dstack([image, alpha])
    expected = matcher.match(image, image, alpha)
    assert len(expected) > 5 and expected.keypoints0[:, 0].min() > 75
    PIL.Image.fromarray(rgba).save(tmp_path / "a.png")
    floats = torch.from_numpy(rgba).permute(2, 0, 1) / 255
    for source in (rgba, PIL.Image.fromarray(rgba), tmp_path / "a.png", floats):
        found = matcher.match(source, image)
        np.testing.assert_allclose(found.keypoints0, expected.keypoints0, atol=0.1)
    (many,) = matcher.match_many([(rgba, image, np.rot90(alpha, -1).copy(), None)])
    corner = matcher.match(image, image, alpha & np.rot90(alpha, -1))
    np.testing.assert_allclose(many.keypoints0, corner.keypoints0, atol=0.1)
    for blank in (0, 255):  # such a channel tells nothing
        same(
            matcher.match(np.dstack([image, np.full_like(alpha, blank)]), image), matcher.match(image, image)
        )


def test_threshold_and_max_matches(photo: np.ndarray) -> None:
    matcher = Matcher(config=TINY, device="cpu", rescale="never", size=160, threshold=0.001, max_matches=10)
    result = matcher.match(photo, photo)
    assert len(result) == 10 and result.scores.min() > 0.001
    loose = Matcher(config=TINY, device="cpu", rescale="never", size=160, threshold=0.0).match(photo, photo)
    np.testing.assert_allclose(result.scores, loose.scores[:10], atol=1e-6)


def test_pairs_before_a_mask_that_does_not_fit_are_matched(matcher: Matcher, photo: np.ndarray) -> None:
    pairs = [(photo, photo), (photo, photo, np.ones((3, 3)), None), (photo, photo)]
    stream = matcher.match_many(pairs, batch_size=4)
    assert len(next(stream)) > 0
    with pytest.raises(UserError, match="the mask is 3x3"):
        next(stream)


def test_pairs_before_what_a_generator_fails_of_are_matched(matcher: Matcher, photo: np.ndarray) -> None:
    def pairs() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        yield photo, photo
        yield photo, photo[::-1]
        raise KeyError("the camera is gone")

    found = []
    with pytest.raises(KeyError, match="the camera is gone"):
        for matches in matcher.match_many(pairs(), batch_size=8):
            found.append(len(matches))
    assert len(found) == 2


@pytest.fixture
def arithmetic(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a caller may have set for his own."""
    before = torch.get_default_dtype()
    if request.param == "float64":
        torch.set_default_dtype(torch.float64)
        yield
        torch.set_default_dtype(before)
    else:
        with torch.autocast("cpu", dtype=getattr(torch, request.param)):
            yield


@pytest.mark.parametrize("arithmetic", ["float64", "float16", "bfloat16"], indirect=True)
def test_what_a_caller_has_set_for_his_own_arithmetic_changes_nothing(
    photo: np.ndarray, arithmetic: None
) -> None:
    turned = np.rot90(photo)
    options = {"device": "cpu", "precision": "fp32", "size": 160, "rotate": "always"}
    set_by_caller = torch.get_default_dtype()
    inside = Matcher(**options).match(photo, turned)
    assert torch.get_default_dtype() == set_by_caller
    torch.set_default_dtype(torch.float32)
    with torch.autocast("cpu", enabled=False):
        expected = Matcher(**options).match(photo, turned)
    torch.set_default_dtype(set_by_caller)
    assert len(inside) > 20
    for name in ("keypoints0", "keypoints1", "scores", "certainty", "sigma"):
        np.testing.assert_array_equal(getattr(inside, name), getattr(expected, name))


def test_an_open_file_is_no_image_and_stays_open(matcher: Matcher, photo: np.ndarray, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    with (tmp_path / "file").open("rb") as file:
        with pytest.raises(UserError, match="not BufferedReader"):
            matcher.match(photo, file)  # type: ignore[arg-type]
        assert file.read() == b"content"


def test_a_pil_image_that_is_cut_short_gives_one_line(
    matcher: Matcher, photo: np.ndarray, tmp_path: Path
) -> None:
    PIL.Image.fromarray(photo).save(tmp_path / "a.png")
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(whole[: len(whole) // 2])
    with PIL.Image.open(tmp_path / "a.png") as image, pytest.raises(UserError, match="PIL image: cannot be"):
        matcher.match(photo, image)


def test_weights_that_are_no_numbers_are_told(tmp_path: Path) -> None:
    state = load_model(config=TINY).state_dict()
    name = next(k for k, v in state.items() if v.dim() > 1)
    state[name] = state[name] * torch.nan
    export_weights(tmp_path / "w.safetensors", state, TINY, {})
    with pytest.raises(UserError, match=f"1 of the weights are no numbers .{name}"):
        Matcher(tmp_path / "w.safetensors", device="cpu")


def test_same_result_twice(matcher: Matcher, photo: np.ndarray) -> None:
    first, second = (
        matcher.match(photo, photo),
        Matcher(config=TINY, device="cpu", rescale="never", size=160).match(photo, photo),
    )
    assert np.array_equal(first.keypoints1, second.keypoints1)
    assert np.array_equal(first.scores, second.scores)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precisions_agree(matcher: Matcher, photo: np.ndarray, precision: str) -> None:
    half = Matcher(config=TINY, device="cpu", rescale="never", size=160, precision=precision).match(
        photo, photo
    )
    full = matcher.match(photo, photo)
    assert np.isfinite(half.keypoints1).all()
    assert 0.7 * len(full) < len(half) < 1.4 * len(full)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"size": 16}, "size"),
        ({"threshold": 1.5}, "threshold"),
        ({"max_matches": 0}, "max_matches"),
        ({"device": "quantum"}, "quantum"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"precision": "int4"}, "precision"),
        ({"rotate": "left"}, "rotate must be one of auto, always, never"),
        ({"rescale": "always"}, "rescale must be one of auto, never"),
        ({"weights": "nowhere.safetensors"}, "nowhere.safetensors"),
    ],
)
def test_bad_options(options: dict, word: str) -> None:
    with pytest.raises(UserError, match=word):
        Matcher(**{"config": TINY} | options)


# --- Matches ----------------------------------------------------------------------------------------


def some_matches(n: int = 30) -> Matches:
    rng = np.random.default_rng(0)
    points0 = rng.uniform(0, 100, (n, 2)).astype(np.float32)
    scores = np.sort(rng.random(n).astype(np.float32))[::-1]
    return Matches(points0, points0 * 0.5 + 3, scores, (100, 100), (80, 60), "a ü.jpg", "b,c.jpg")


@pytest.mark.parametrize("suffix", [".npz", ".json", ".csv", ".h5"])
@pytest.mark.parametrize("count", [30, 0])
def test_save_and_load(tmp_path: Path, suffix: str, count: int) -> None:
    matches = some_matches(count)
    matches.save(tmp_path / f"m{suffix}")
    loaded = Matches.load(tmp_path / f"m{suffix}")
    for key in ("keypoints0", "keypoints1", "scores"):
        assert np.array_equal(getattr(loaded, key), getattr(matches, key))
        assert getattr(loaded, key).dtype == np.float32
    assert (loaded.size0, loaded.size1, loaded.name0, loaded.name1) == (
        (100, 100),
        (80, 60),
        "a ü.jpg",
        "b,c.jpg",
    )
    assert [p.name for p in tmp_path.iterdir()] == [f"m{suffix}"], "no temporary file is left"


@pytest.mark.parametrize("suffix", [".npz", ".json", ".csv", ".h5"])
def test_a_name_may_be_a_path(tmp_path: Path, suffix: str) -> None:
    matches = replace(some_matches(), name0=Path("a") / "b.jpg")  # type: ignore[arg-type]
    assert matches.name0 == "a/b.jpg"
    matches.save(tmp_path / f"m{suffix}")
    assert Matches.load(tmp_path / f"m{suffix}").name0 == "a/b.jpg"


def test_what_matches_cannot_be_made_of() -> None:
    matches = some_matches(2)
    for change, reason in (
        ({"name0": "a\0b"}, "name0 must be a text without a zero"),
        ({"name1": None}, "name1 must be a text"),
        ({"certainty": np.array([0.5])}, "certainty must have one number for each match"),
    ):
        with pytest.raises(UserError, match=reason):
            replace(matches, **change)
    for options in ({"top": 1.5}, {"spread": np.nan}):
        with pytest.raises(UserError, match="must be a whole number"):
            matches.filter(**options)
    assert matches == matches and matches != some_matches(2) and matches in [matches]


@pytest.mark.parametrize("suffix", [".npz", ".json", ".h5"])
def test_details_are_saved(tmp_path: Path, matcher: Matcher, suffix: str) -> None:
    matches = matcher.match(noise(64, 64), noise(64, 96), details=True)
    matches.save(tmp_path / f"m{suffix}")
    loaded = Matches.load(tmp_path / f"m{suffix}").details
    for key, value in vars(matches.details).items():
        np.testing.assert_allclose(getattr(loaded, key), value, atol=1e-6)


def test_bad_files_of_matches(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="saved as"):
        some_matches().save(tmp_path / "m.txt")
    with pytest.raises(UserError, match="cannot be written"):
        some_matches().save(tmp_path / "nowhere" / "m.npz")
    with pytest.raises(UserError, match="no such file"):
        Matches.load(tmp_path / "m.npz")
    for suffix in (".npz", ".json", ".csv", ".h5"):
        (tmp_path / f"bad{suffix}").write_text("{}")
        with pytest.raises(UserError, match="not a file of matches"):
            Matches.load(tmp_path / f"bad{suffix}")


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.npz"
    some_matches(5).save(path)

    def full_disk(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full_disk)
    with pytest.raises(UserError, match="No space left"):
        some_matches(7).save(path)
    monkeypatch.undo()
    assert np.array_equal(Matches.load(path).keypoints0, some_matches(5).keypoints0)
    assert len(list(tmp_path.iterdir())) == 1


OLD = {
    "old.json": '{"keypoints0": [[1, 2]], "keypoints1": [[3, 4]], "scores": [0.5], "size0": [100, 90], '
    '"size1": [80, 60], "name0": "a", "name1": "b"}',
    "old.csv": "#,100,90,80,60,a,b\r\nx0,y0,x1,y1,score\r\n1,2,3,4,0.5\r\n",
}


@pytest.mark.parametrize("name", ["old.json", "old.csv", "old.npz", "old.h5"])
def test_files_of_older_versions_are_read(tmp_path: Path, name: str) -> None:
    """Those that do not tell how much they hold."""
    path = tmp_path / name
    arrays = {k: np.array(v) for k, v in json.loads(OLD["old.json"]).items()}
    if name in OLD:
        path.write_text(OLD[name])
    elif name == "old.npz":
        np.savez_compressed(path, **arrays)
    else:
        with h5py.File(path, "w") as file:
            for key, value in arrays.items():
                (file.attrs if key.startswith("name") else file)[key] = value if value.ndim else str(value)
    m = Matches.load(path)
    assert m.keypoints0.tolist() == [[1, 2]] and m.keypoints1.tolist() == [[3, 4]] and m.scores[0] == 0.5
    assert (m.size0, m.size1, m.name0, m.name1) == ((100, 90), (80, 60), "a", "b")


@pytest.mark.parametrize("suffix", [".npz", ".json", ".csv", ".h5"])
def test_damage_is_found(tmp_path: Path, suffix: str) -> None:
    """Cut anywhere or with any byte changed, a file holds what it did, or is told to be damaged."""
    matches, path = some_matches(1000), tmp_path / f"m{suffix}"
    matches.save(path)
    good = path.read_bytes()
    g = np.random.default_rng(0)
    damaged = [good[:n] for n in g.integers(0, len(good) - 2, 60)]
    for n in g.integers(0, len(good), 150):
        damaged.append(good[:n] + bytes([good[n] ^ (1 << g.integers(8))]) + good[n + 1 :])
    found_out = 0
    for data in damaged:
        path.write_bytes(data)
        try:
            loaded = Matches.load(path)
        except UserError as error:
            found_out += 1
            assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
        else:
            for key in ("keypoints0", "keypoints1", "scores"):
                assert np.array_equal(getattr(loaded, key), getattr(matches, key))
            assert (loaded.size0, loaded.name0, loaded.name1) == ((100, 100), "a ü.jpg", "b,c.jpg")
    assert found_out > 100, "most damage hits something that counts"


def test_what_is_missing_is_told(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    some_matches(40).save(path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-5]))
    with pytest.raises(UserError, match=r"m.csv: damaged: 35 of its 40 matches are left$"):
        Matches.load(path)
    whole = tmp_path / "m.json"
    some_matches(40).save(whole)
    values = json.loads(whole.read_text())
    values["scores"][3] += 0.25
    whole.write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"m.json: damaged: what it holds is not what was written$"):
        Matches.load(whole)
    del values["size0"]
    whole.write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"m.json: not a file of matches: it has no size0$"):
        Matches.load(whole)


@pytest.mark.parametrize("suffix", [".npz", ".json", ".csv", ".h5"])
def test_names_that_are_not_utf8(tmp_path: Path, suffix: str) -> None:
    """As files from old archives have; Python then has lone surrogates for their bytes."""
    name = os.fsdecode(b"caf\xe9 1.jpg")
    replace(some_matches(), name0=name).save(tmp_path / f"m{suffix}")
    loaded = Matches.load(tmp_path / f"m{suffix}")
    assert (loaded.name0, loaded.name1) == (name, some_matches().name1)


@pytest.mark.parametrize("suffix", [".NPZ", ".Json", ".CSV", ".H5"])
def test_names_in_capitals(tmp_path: Path, suffix: str) -> None:
    some_matches().save(tmp_path / f"m{suffix}")
    assert [p.name for p in tmp_path.iterdir()] == [f"m{suffix}"]
    assert np.array_equal(Matches.load(tmp_path / f"m{suffix}").keypoints1, some_matches().keypoints1)


def test_matches_that_do_not_fit_together() -> None:
    points, scores = np.zeros((4, 2)), np.ones(4)
    for bad, reason in (
        ((points[:3], points, scores), "3 points cannot be matched with 4"),
        ((points, points, scores[:3]), "there are 3 scores for 4 matches"),
        ((np.zeros((4, 3)), points, scores), r"keypoints0 must have the shape \(n, 2\), not \(4, 3\)"),
        ((points, points * np.nan, scores), "keypoints1 must be finite numbers"),
        ((points, points, points), r"scores must have the shape \(n,\), not \(4, 2\)"),
    ):
        with pytest.raises(UserError, match=reason):
            Matches(*bad, (8, 8), (8, 8))
    assert Matches(points.tolist(), points, scores, (8, 8), (8, 8)).keypoints0.dtype == np.float32


@pytest.mark.parametrize(
    ("keep", "reason"),
    [
        (np.ones(29, bool), "keep has 29 entries, but there are 30 matches"),
        (np.zeros(0, bool), "keep has 0 entries, but there are 30 matches"),
        (np.ones((30, 1), bool), "keep must be a row"),
        ([0, 30], "beyond the 30 matches"),
        ([-31], "beyond the 30 matches"),
        ([0.5], "keep must be a row"),
    ],
)
def test_filters_that_do_not_fit(keep: object, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        some_matches().filter(keep)


def test_matches_are_printed_in_one_short_line() -> None:
    assert repr(some_matches(1000)) == "<1000 matches of a ü.jpg (100x100) and b,c.jpg (80x60)>"
    empty = np.zeros((0, 2))
    assert repr(Matches(empty, empty, empty[:, 0], (8, 9), (7, 6))) == (
        "<0 matches of an image (8x9) and an image (7x6)>"
    )


def test_the_options_of_a_fit_are_in_its_signature() -> None:
    """So that an editor can show them, and a wrong one is told."""
    ours, theirs = (inspect.signature(f).parameters for f in (Matches.estimate, geometry.estimate))
    assert {k: p.default for k, p in ours.items() if k not in ("self", "model")} == {
        k: p.default for k, p in theirs.items() if k not in ("points0", "points1", "model")
    }
    with pytest.raises(TypeError, match="treshold"):
        some_matches().estimate("homography", treshold=1)


def test_spread_matches_cover_the_image_and_are_the_best_there() -> None:
    """Half of the matches, and the surest, sit in one corner."""
    g = np.random.default_rng(1)
    points = np.concatenate([g.uniform(0, 50, (500, 2)), g.uniform(0, 800, (500, 2))])
    scores = np.concatenate([g.uniform(0.9, 1, 500), g.uniform(0.2, 0.9, 500)])
    order = np.argsort(-scores)
    matches = Matches(points[order], points[order], scores[order], (800, 800), (800, 800))
    for count in (1, 7, 64, 100, 700):
        chosen = matches.filter(spread=count)
        assert len(chosen) == count and (np.diff(chosen.scores) <= 0).all()
    tiles = {tuple(t) for t in (matches.filter(spread=64).keypoints0 // 200).astype(int).tolist()}
    assert len(tiles) == 16, "every part of the image has some"
    corner = matches.filter(spread=64).keypoints0.max(axis=1) < 50
    assert 1 <= corner.sum() <= 6
    assert matches.filter(spread=1).scores[0] == matches.scores[0]
    assert len(matches.filter(spread=5000)) == 1000 and len(matches.filter(spread=0)) == 0


def test_filter_and_swap() -> None:
    matches = some_matches()
    sure = matches.scores >= 0.5
    assert np.array_equal(matches.filter(min_score=0.5).keypoints1, matches.keypoints1[sure])
    assert np.array_equal(matches.filter(top=4).keypoints0, matches.keypoints0[:4])
    assert np.array_equal(
        matches.filter(matches.scores > 0.9).keypoints0, matches.keypoints0[matches.scores > 0.9]
    )
    assert np.array_equal(matches.filter([3, 1]).scores, matches.scores[[3, 1]])
    assert len(matches.filter([])) == 0
    swapped = matches.swap()
    assert np.array_equal(swapped.keypoints0, matches.keypoints1) and swapped.size0 == (80, 60)


def test_estimate_and_warp(photo: np.ndarray) -> None:
    matches = some_matches()
    found = matches.estimate("homography")
    assert found.num_inliers == 30
    image = np.zeros((100, 100), np.uint8)
    image[40:61, 20:41] = 255
    warped = matches.warp(image)
    assert warped.shape == (60, 80, 3)
    ys, xs = np.nonzero(warped[..., 0] > 127)
    assert xs.mean() == pytest.approx(30 * 0.5 + 3, abs=0.6) and ys.mean() == pytest.approx(
        50 * 0.5 + 3, abs=0.6
    )
    with pytest.raises(UserError, match="no homography"):
        some_matches(2).warp(image)


def test_plot(tmp_path: Path, matcher: Matcher, photo: np.ndarray) -> None:
    matches = matcher.match(photo, photo)
    picture = matches.plot(tmp_path / "m.png", title="a title")
    assert np.array_equal(np.asarray(PIL.Image.open(tmp_path / "m.png")), picture)
    assert picture.shape == (512, 1032, 3)
    assert matches.filter(top=0).plot().shape == picture.shape
    with pytest.raises(UserError, match="matches are for 512x512"):
        matches.plot(image0=photo[:100, :100])
    with pytest.raises(UserError, match=r"m.xyz: pictures are written as .png"):
        matches.plot(tmp_path / "m.xyz")
    matches.plot(tmp_path / "m.PNG")
    assert {p.name for p in tmp_path.iterdir()} == {"m.png", "m.PNG"}


# --- weights ----------------------------------------------------------------------------------------


def test_weights_round_trip(tmp_path: Path, photo: np.ndarray) -> None:
    path = tmp_path / "w.safetensors"
    model = load_model(config=TINY)
    export_weights(path, model.state_dict(), TINY, {"pairs": 12})
    info = weights_info(path)
    assert info.config == TINY and info.training == {"pairs": 12} and len(info.sha256) == 64
    assert len(Matcher(path, device="cpu", size=160).match(photo, photo)) > 20
    for ours, theirs in zip(load_model(path).state_dict().values(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)  # 16 bit on disk
    assert all(p.dtype == torch.float32 for p in load_model(path).parameters())


def test_weights_in_shards(tmp_path: Path, photo: np.ndarray) -> None:
    path, state = tmp_path / "w.safetensors", load_model(config=TINY).state_dict()
    export_weights(path, state, TINY, {})
    whole = Matcher(path, device="cpu", size=160).match(photo, photo)
    files = export_weights(path, state, TINY, {}, shard_mib=0.4)
    assert len(files) > 1 and not path.exists(), "the old file must not be taken for the new ones"
    for name in (path, files[1]):
        same(Matcher(name, device="cpu", size=160).match(photo, photo), whole)


def test_wrong_weights(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = tmp_path / "w.safetensors"
    export_weights(path, load_model(config=TINY).state_dict(), TINY, {})
    state = load_file(path)
    moved = state.pop("backbone.coarse.weight")
    save_file(state | {"extra": moved}, path)
    with pytest.raises(UserError, match=r"1 missing \(backbone.coarse.weight\); 1 unexpected \(extra\)"):
        load_model(path, TINY)
    with pytest.raises(UserError, match="of another shape"):
        load_model(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(UserError, match="not a file of PRISM weights"):
        load_model(path)


def test_metal_is_allowed_and_called_untested(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UserError, match="mps: this machine, or its PyTorch, has no Metal"):
        Matcher(config=TINY, device="mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    matcher_module.warn_of_metal.cache_clear()
    for _ in range(3):
        device = matcher_module.find_device("mps")
        assert device.type == "mps"
        assert matcher_module.find_dtype("auto", device) == torch.float32
    assert [record.getMessage().split(";")[0] for record in caplog.records] == ["mps: untested"]
