"""What only a CUDA device can show. Skipped, saying so, where there is none."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference import partner_distances

from prism_match import Matcher, polish, subpixel
from prism_match.config import PRESETS
from prism_match.maps.shared_keypoints import IndexedMatches, Keypoints, SharedKeypoints
from prism_match.maps.tracks import polish_tracks
from prism_match.matcher import Found
from prism_match.model import kernels
from prism_match.model.fast import FastPRISM
from prism_match.serve.batches import Manner, ModelThread
from prism_match.subpixel import Pyramid
from prism_match.training.config import PRESETS as TRAINING
from prism_match.training.config import Phase
from prism_match.training.data.photos import PhotoPairs, PhotoStore
from prism_match.training.data.worlds.source import Worlds
from prism_match.training.feed import Captured, Weighted
from prism_match.training.trainer import Trainer
from prism_match.weights import load_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]

TINY = PRESETS["tiny"].replace(theta_c=0.0)


def test_gpu_gives_what_the_cpu_gives(photo: np.ndarray) -> None:
    here, there = (
        Matcher(config=TINY, rescale="never", device=device, precision="fp32", size=256).match(photo, photo)
        for device in ("cpu", "cuda")
    )
    assert abs(len(here) - len(there)) <= 0.02 * len(here)
    partners = [
        {tuple(p.round(2)): q for p, q in zip(m.keypoints0, m.keypoints1, strict=True)} for m in (here, there)
    ]
    shared = partners[0].keys() & partners[1].keys()
    assert len(shared) > 0.95 * len(here)
    assert np.median([np.abs(partners[0][p] - partners[1][p]).max() for p in shared]) < 0.05


def test_fused_kernels_equal_their_plain_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator).cuda()

    x, centres, b = random(37, 2, 4, 16)[:, 0], 2 * random(50, 2), 20 * random(4, 8, 2)
    rows = torch.arange(37).cuda() + 5
    gray, points, stretch = random(1, 40, 53), 60 * random(9, 2) - 5, random(9, 2, 2)
    level = torch.arange(9).cuda().int() % 4

    def all_of_them() -> list[torch.Tensor]:
        return [
            kernels.rotate(x, centres, rows, b),
            *(kernels.add_upsampled(random_map, low) for random_map, low in maps),
            *(Pyramid.of(g).windows(points, stretch, level) for g in (gray, (255 * gray).byte())),
        ]

    maps = [(random(2, 20, h, w), random(2, 20, (h + 1) // 2, (w + 1) // 2)) for h, w in ((6, 8), (5, 7))]
    assert kernels.has_kernels(x)
    fused = all_of_them()
    assert kernels.failed_trials(torch.device("cuda")) == []
    monkeypatch.setattr(kernels, "has_kernels", lambda x: False)
    monkeypatch.setattr(subpixel, "has_kernels", lambda x: False)
    for one, other in zip(fused, all_of_them(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [13, 1100, 5000])
def test_neighbours_and_their_maps_are_those_of_the_plain_form(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of matches on a grid, as they are, some of which are wrong, and some not believed."""
    generator = torch.Generator().manual_seed(count)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator).cuda()

    grid = torch.cartesian_prod(torch.arange(80.0), torch.arange(70.0))[
        torch.randperm(5600, generator=generator)[:count]
    ]
    points0 = 8 * grid.cuda() + 3.5
    wrong, believed = random(count, 1) < 0.1, random(count) < 0.8
    believed = believed | (believed.sum() < polish.FEWEST)
    map_there = torch.tensor([[1.2, 0.3], [-0.2, 0.9]], device="cuda")
    points1 = points0 @ map_there.mT + random(count, 2) + 50 * wrong * random(count, 2)
    # What is added for a number that is seen often: far away, and not believed.
    points0, points1 = (F.pad(x, (0, 0, 0, 40), value=v) for x, v in ((points0, -1e6), (points1, 0.0)))
    believed = F.pad(believed, (0, 40))

    def all_of_them() -> list[torch.Tensor]:
        with torch.inference_mode():
            rounds = [polish.neighbourhoods(points0, points1, n, believed) for n in (0, 2)]
        return [x[:count] for told in rounds for x in told]

    assert kernels.has_kernels(points0)
    fused = all_of_them()
    for module in (kernels, polish):
        monkeypatch.setattr(module, "has_kernels", lambda x: False)
    for one, other in zip(fused, all_of_them(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_fast_model_gives_what_the_plain_one_gives(dtype: torch.dtype, photo: np.ndarray) -> None:
    """Both in pixels of the model: the same cells but for ties, and nearly the same places."""
    plain = load_model().cuda()
    image = torch.from_numpy(photo).cuda().float()[None, None] / 255
    pair = image[..., :450, :470], image[..., 40:, 30:]
    with torch.inference_mode():
        expected, found = (
            model.match(*(model.extract(x) for x in pair)) for model in (plain, FastPRISM(plain, dtype))
        )
    distances = partner_distances(expected, found)
    assert len(distances) > 0.98 * max(len(expected.batch), len(found.batch)) > 500
    assert distances.quantile(0.95) < (0.005 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_no_matches_is_no_error(precision: str, photo: np.ndarray) -> None:
    matcher = Matcher(
        config=TINY, threshold=0.99, rescale="never", device="cuda", precision=precision, size=256
    )
    assert matcher.match(photo, np.zeros_like(photo)).keypoints0.shape == (0, 2)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_same_result_twice_and_finite(precision: str, photo: np.ndarray) -> None:
    matcher = Matcher(device="cuda", precision=precision, threshold=0.0)
    first, second = (matcher.match(photo, photo[::-1].copy()) for _ in range(2))
    assert np.isfinite(first.keypoints1).all() and len(first) > 0
    assert np.array_equal(first.keypoints1, second.keypoints1)


def test_what_is_recorded_gives_the_same(photo: np.ndarray) -> None:
    matcher = Matcher(device="cuda", precision="bf16", size=320)
    pairs = [(photo, np.roll(photo, 20, axis=1)), (photo[:300], np.roll(photo, 9, axis=0)[:300])]
    features = matcher.extract([photo])[0]
    before = features.features.coarse.clone(), features.features.fine.clone()
    first = [matcher.match(*pair) for pair in pairs]
    recorded = {name[0] for (name, *_), r in matcher.recorder.recordings.items() if r.graph is not None}
    assert recorded <= {"halved", "corners"}  # of three images of one size by now; the rest was as it is
    for _ in range(4):  # in turns, so that one could disturb the other
        for pair, expected in zip(pairs, first, strict=True):
            found = matcher.match(*pair)
            assert np.array_equal(expected.keypoints0, found.keypoints0)
            assert np.array_equal(expected.keypoints1, found.keypoints1)
            assert np.array_equal(expected.scores, found.scores)
    assert matcher.recorder.enabled
    assert sum(r.graph is not None for r in matcher.recorder.recordings.values()) > 10
    assert torch.equal(before[0], features.features.coarse) and torch.equal(before[1], features.features.fine)
    matcher.recorder.clear()
    assert np.array_equal(first[0].keypoints1, matcher.match(*pairs[0]).keypoints1)


def test_threads_and_streams_share_what_is_recorded(photo: np.ndarray) -> None:
    matcher = Matcher(device="cuda", precision="bf16", size=320)
    pairs = [(photo, np.roll(photo, 5 * n, axis=1)) for n in range(1, 5)]
    alone = [matcher.match(*pair).keypoints1 for pair in pairs for _ in range(4)][::4]

    def match(n: int) -> np.ndarray:
        with torch.cuda.stream(torch.cuda.Stream()):
            return matcher.match(*pairs[n % 4]).keypoints1

    with ThreadPoolExecutor(4) as pool:
        for n, found in enumerate(pool.map(match, range(32))):
            assert np.array_equal(found, alone[n % 4])


def test_batches_give_what_singles_give(photo: np.ndarray) -> None:
    matcher = Matcher(device="cuda", precision="fp32", size=320)
    pairs = [(photo, photo[:, ::-1].copy()), (photo, photo), (photo[:300], photo[100:])]
    for pair, result in zip(pairs, matcher.match_many(pairs, batch_size=3), strict=True):
        single = matcher.match(*pair)
        assert abs(len(single) - len(result)) <= max(2, 0.02 * len(single))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_first_convolution_sees_the_shades_of_an_image(dtype: torch.dtype) -> None:
    """A hundredth of what a photo may be bright, which bf16 rounds away."""
    fused = FastPRISM(load_model().cuda(), dtype).backbone.stem
    ramp = 0.9 + 0.01 * torch.linspace(0, 1, 128, device="cuda").expand(1, 1, 128, -1)
    with torch.inference_mode():
        found, rounded = fused(ramp), fused(ramp.bfloat16().float())
        expected = fused.conv.double()(ramp.double())
    assert found.dtype == dtype and found.is_contiguous(memory_format=torch.channels_last)
    off, off_if_rounded = ((x - expected)[..., 4:-4, 4:-4].norm() for x in (found, rounded))
    assert off < off_if_rounded / 2


def test_polishing_is_that_of_the_cpu(photo: np.ndarray) -> None:
    """Unsure matches, too, whose neighbours are the sure ones; in a program that lets its GPU round."""
    moved = np.roll(photo, (3, 5), axis=(0, 1))
    matchers = [Matcher(device=d, precision="fp32", size=320, threshold=0.05) for d in ("cpu", "cuda")]
    pairs = [m.extract([photo, moved]) for m in matchers]
    found = matchers[0]._match_as_they_are([tuple(pairs[0])])[0]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        polished = []
        for m, pair in zip(matchers, pairs, strict=True):
            there = (x.to(m.device) for x in (found.at0, found.at1, found.confidence))
            polished.append(m._polish(Found(tuple(pair), *there, found.batch, 0)))
    finally:
        torch.set_float32_matmul_precision(before)
    assert (found.confidence < 0.2).any() and len(found.at0) > 300
    for here, there in list(zip(*polished, strict=True))[:2]:  # the network is in fp16 on a GPU
        assert (here - there.cpu()).abs().amax(1).quantile(0.9) < 0.05
    here, there = (results[4].cpu() for results in polished)  # how far the neighbours are
    assert ((here - there).abs() < 0.01).float().mean() > 0.95


def test_other_scales_are_tried_as_on_the_cpu(photo: np.ndarray) -> None:
    small = cv2.resize(photo, None, fx=0.2, fy=0.2, interpolation=cv2.INTER_AREA)
    wall = np.full_like(photo, 128)
    wall[100 : 100 + small.shape[0], 60 : 60 + small.shape[1]] = small
    here, there = (
        Matcher(device=device, precision="fp32", size=320).match(photo, wall) for device in ("cpu", "cuda")
    )
    assert len(here) and abs(len(here) - len(there)) < 0.2 * len(here)
    for matches in (here, there):
        errors = matches.keypoints1 - 0.2 * (matches.keypoints0 + 0.5) - [59.5, 99.5]
        assert np.median(np.abs(errors)) < 0.5


def shifted(photo: np.ndarray, shift: np.ndarray) -> np.ndarray:
    return cv2.warpAffine(photo, np.c_[np.eye(2), shift], photo.shape[::-1], flags=cv2.INTER_CUBIC)


def test_matches_are_polished_at_the_photos_own_size(photo: np.ndarray) -> None:
    """The photo moved by (5.4, -3.3) pixels, matched at half its size, in batches too."""
    shift = np.array([5.4, -3.3], np.float32)
    moved = shifted(photo, shift)
    matcher = Matcher(device="cuda", precision="fp32", size=max(photo.shape) // 2)
    for matches in (matcher.match(photo, moved), *matcher.match_many([(photo, moved)] * 2)):
        errors = np.linalg.norm(matches.keypoints1 - matches.keypoints0 - shift, axis=1)
        assert len(matches) > 300 and np.median(errors) < 0.1


def test_tracks_are_polished_as_on_the_cpu(photo: np.ndarray, tmp_path: Path) -> None:
    shift = np.array([2.4, -1.3], np.float32)
    moved = shifted(photo, shift)
    files = {"a": tmp_path / "a.png", "b": tmp_path / "b.png"}
    for file, image in zip(files.values(), (photo, moved), strict=True):
        cv2.imwrite(str(file), image)
    g = np.random.default_rng(0)
    xy = g.uniform(60, min(photo.shape) - 60, (200, 2)).astype(np.float32)
    scores = np.ones(200, np.float32)
    near = xy + shift + g.normal(0, 0.4, xy.shape).astype(np.float32)
    index = np.repeat(np.arange(200)[:, None], 2, axis=1)
    keypoints = {"a": Keypoints(xy, 2 * scores), "b": Keypoints(near, scores)}
    shared = SharedKeypoints(keypoints, {("a", "b"): IndexedMatches(index, scores)})
    here, there = (polish_tracks(shared, files, device).keypoints["b"].xy for device in ("cpu", "cuda"))
    assert np.median(np.linalg.norm(here - there, axis=1)) < 0.02
    assert np.median(np.linalg.norm(there - xy - shift, axis=1)) < 0.15


def some_photos() -> PhotoStore:
    low = torch.rand(20, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    photos = torch.nn.functional.interpolate(low, size=448, mode="bicubic").clamp(0, 1)[:, 0] * 255
    return PhotoStore(photos.to(torch.uint8))


@pytest.mark.parametrize("kind", [PhotoPairs, Worlds])
def test_a_recorded_source_gives_the_same_pairs(kind: type) -> None:
    source = kind(some_photos(), "cuda")
    recorded = Captured(source)
    for seed in (1, 2, 1):
        plain, again = (
            s.sample(3, 64, torch.Generator("cuda").manual_seed(seed)) for s in (source, recorded)
        )
        assert torch.equal(plain.image0, again.image0) and torch.equal(plain.warp1, again.warp1)


def test_sizes_change_while_the_model_and_the_sources_are_compiled(tmp_path: Path) -> None:
    kinds = (PhotoPairs, Worlds)
    sources = [Weighted(Captured(kind(some_photos(), "cuda", compile=True))) for kind in kinds]
    phases = (Phase(0.0, 64, 4), Phase(0.34, 96, 6), Phase(0.67, 128, 2))
    config = TRAINING["tiny"].replace(phases=phases, steps=18, compile=True, log_every=2)
    last = Trainer(config, sources, tmp_path, "cuda").fit()
    assert last["step"] == 18 and last["size"] == 128 and last["skipped_samples"] == 0


def test_the_servers_model_tells_its_stages_in_every_precision(photo: np.ndarray) -> None:
    matcher = Matcher(config=TINY, device="cuda", size=256)
    thread = ModelThread(matcher, 8)
    thread.start()
    try:
        for precision in matcher.precisions:
            pair = (matcher.prepare(photo), matcher.prepare(photo))
            done = thread.submit(pair, Manner(None, "never", "never", True, precision=precision)).result(60)
            assert len(done.result) > 0
            assert list(done.stages) == ["backbone", "MPMs", "matching", "refinement", "polish"]
            assert 0 < sum(done.stages.values()) <= done.took
    finally:
        thread.stop()
