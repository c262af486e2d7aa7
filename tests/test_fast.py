"""The model arranged for matching, against the model as the paper has it."""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import partner_distances
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from prism_match.config import PRESETS, ModelConfig
from prism_match.model import kernels, processor, products, winograd
from prism_match.model.attention import attend
from prism_match.model.fast import AutocastPRISM, FastPRISM, arranged, is_supported
from prism_match.model.prism import PRISM, Features
from prism_match.model.recorder import PATIENCE, Recorder, Recording
from prism_match.model.winograd import Winograd

TINY = PRESETS["tiny"].replace(theta_c=0.0)


def random_model(config: ModelConfig) -> PRISM:
    """With statistics that have something to say, and estimators that prune some of the cells."""
    torch.manual_seed(0)
    model = PRISM(config).eval().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    pair = images((40, 56), (56, 40))
    for n, mpm in enumerate(model.mpms):
        if (phi := getattr(mpm.pruning, "phi", None)) is not None:
            with torch.inference_mode():
                logit = model.match(*(model.extract(x) for x in pair)).layers[n].logit0
            middle = logit[logit.isfinite()].quantile(0.3)
            phi[2].bias.add_(math.log(config.theta_p / (1 - config.theta_p)) - middle)
    return model


def images(*sizes: tuple[int, int], count: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(count, 1, *size, generator=generator) for size in sizes]


def assert_close(a: Tensor, b: Tensor, tolerance: float = 2e-4) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


VARIANTS = {
    "the paper's": {},
    "one level": {"levels": (1,)},
    "two levels": {"levels": (2, 1)},
    "no pruning": {"pruning": "none"},
    "pruning at the end": {"pruning": "last"},
    "absolute positions": {"position": "absolute"},
    "plain softmax": {"weighted_softmax": False},
    "larger windows": {"window": 7},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_gives_what_the_plain_model_gives(variant: str) -> None:
    config = TINY.replace(**VARIANTS[variant])
    plain = random_model(config)
    fast = FastPRISM(plain, torch.float32)
    pruned, matches = 0.0, 0
    for sizes, count in (((64, 96), (96, 64)), 1), (((33, 50), (47, 41)), 2):
        pair = images(*sizes, count=count)
        with torch.inference_mode():
            a, b = (plain.extract(x) for x in pair)
            x, y = (fast.extract(i) for i in pair)
            for one, other in ((a, x), (b, y)):
                assert torch.equal(one.valid, other.valid)
                assert_close(one.coarse, other.coarse)
                assert_close(one.fine, other.fine)
            region = torch.rand(a.valid.shape, generator=torch.Generator().manual_seed(2)) < 0.8
            for regions in ((None, None), (region, None)):
                expected, found = plain.match(a, b, *regions), fast.match(x, y, *regions)
                assert torch.equal(expected.batch, found.batch)
                assert torch.equal(expected.keypoints0, found.keypoints0)
                for name in ("keypoints1", "confidence", "std"):
                    assert_close(getattr(expected, name), getattr(found, name), 2e-3)
                for one, other in zip(expected.layers, found.layers, strict=True):
                    assert torch.equal(one.keep0, other.keep0) and torch.equal(one.keep1, other.keep1)
                    assert (one.logit0 is None) == (other.logit0 is None)
                    if one.logit1 is not None:
                        assert_close(one.logit1, other.logit1, 2e-3)
                assert_close(expected.layers[-1].coarse0, found.layers[-1].coarse0, 2e-3)
                pruned += (~found.layers[-1].keep0 & a.valid).float().mean().item()
                matches += len(found.batch)
    assert pruned > 0.1 and matches > 5


@pytest.mark.parametrize("levels", [(4, 2, 1), (1,)])
def test_room_to_spare_changes_nothing(levels: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the kernel of attention leaves anything in the rows that are too many."""
    fast = FastPRISM(random_model(TINY.replace(levels=levels)), torch.float32)
    spare = 0

    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        nonlocal spare
        ends, key_ends, crossed, most, lengths = rest
        assert lengths is None
        lengths = tuple(e.diff(prepend=e.new_zeros(1)).tolist() for e in (ends, key_ends))
        n, m = (sum(x) for x in lengths)
        spare += len(q) - n
        assert max(lengths[0]) <= most
        found = kernels.attend_segments(q[:n], k[:m], v[:m], ends, key_ends, crossed, most, lengths)
        return torch.cat([found, torch.full_like(q[n:], torch.nan)])

    with torch.inference_mode():
        a, b = (fast.extract(x) for x in images((64, 96), (96, 64), count=2))
        expected = fast.match(a, b)
        monkeypatch.setattr("prism_match.model.fast.attend_segments", attend)
        monkeypatch.setattr("prism_match.model.fast.attends_segments", lambda *_: True)
        found = fast.match(a, b)
    assert spare > 0 and len(expected.batch) > 5
    for name in ("batch", "keypoints0", "keypoints1", "confidence", "std"):
        assert_close(getattr(expected, name), getattr(found, name))
    for one, other in zip(expected.layers, found.layers, strict=True):
        assert torch.equal(one.keep0, other.keep0) and torch.equal(one.keep1, other.keep1)


@pytest.mark.parametrize("variant", ["the paper's", "plain softmax", "no pruning"])
def test_matches_are_the_same_where_the_host_does_not_know_how_many_cells_are_kept(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, by the plain form of its kernel."""
    fast = FastPRISM(random_model(TINY.replace(**VARIANTS[variant])), torch.float32)
    matches = 0
    for sizes, count in (((128, 160), (160, 128)), 1), (((65, 90), (97, 81)), 3):
        with torch.inference_mode():
            a, b = (fast.extract(x) for x in images(*sizes, count=count))
            region = torch.rand(a.valid.shape, generator=torch.Generator().manual_seed(2)) < 0.8
            region[-1] = count == 1  # nothing to look at in the last one of three
            for regions in ((None, None), (region, None), (None, torch.zeros_like(b.valid))):
                for theta_c in (None, 1e-4):
                    expected = fast.match(a, b, *regions, theta_c)
                    with monkeypatch.context() as patch:
                        patch.setattr("prism_match.model.fast.finds_partners", lambda *_: True)
                        found = fast.match(a, b, *regions, theta_c)
                    for name in ("batch", "keypoints0"):
                        assert torch.equal(getattr(expected, name), getattr(found, name))
                    for name in ("keypoints1", "confidence", "std"):
                        assert_close(getattr(expected, name), getattr(found, name))
                    matches += len(found.batch)
    assert matches > 20


class Replaying(Recorder):
    """As on a GPU: what was asked for first under a name and with these shapes is done from then on."""

    def __call__(self, name: Any, work: Any, *inputs: Tensor) -> tuple[Any, ...]:
        key = name, tuple(x.shape for x in inputs)
        return self.recordings.setdefault(key, Recording(work=work)).work(*inputs)


def test_what_is_recorded_serves_no_other_pair() -> None:
    """Of two pairs of equal sizes and with as many cells in all, but not in each image."""
    model = random_model(TINY)
    fast, plain = FastPRISM(model, torch.float32, Replaying()), FastPRISM(model, torch.float32)
    with torch.inference_mode():
        a, b = (fast.extract(x) for x in images((64, 64), (64, 64)))
        part = torch.ones_like(a.valid)
        part[:, :4] = False
        for regions in ((part, None), (None, part)):
            expected, found = plain.match(a, b, *regions), fast.match(a, b, *regions)
            for name in ("batch", "keypoints0", "keypoints1", "confidence"):
                assert torch.equal(getattr(expected, name), getattr(found, name))
            assert torch.equal(expected.layers[0].logit0, found.layers[0].logit0)


def test_features_are_not_changed_by_matching() -> None:
    fast = FastPRISM(random_model(TINY), torch.float32)
    with torch.inference_mode():
        a, b = (fast.extract(x) for x in images((64, 64), (64, 96)))
        before = [t.clone() for f in (a, b) for t in (f.coarse, f.fine)]
        first, again = fast.match(a, b), fast.match(a, b)
        after = [t for f in (a, b) for t in (f.coarse, f.fine)]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert torch.equal(first.keypoints1, again.keypoints1)


def test_nothing_left_to_match_is_no_error() -> None:
    fast = FastPRISM(random_model(TINY), torch.float32)
    with torch.inference_mode():
        a, b = (fast.extract(x) for x in images((64, 64), (64, 96), count=2))
        nothing = torch.zeros_like(a.valid)
        for region in (nothing, torch.stack([~nothing[0], nothing[1]])):
            found = fast.match(a, b, region, None)
            assert not (found.batch == 1).any() and found.keypoints1.shape == (len(found.batch), 2)
            assert found.keypoints1.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close(dtype: torch.dtype) -> None:
    plain = random_model(TINY.replace(pruning="none"))
    pair = images((64, 96), (64, 96))
    with torch.inference_mode():
        expected, found = (
            model.match(*(model.extract(x) for x in pair)) for model in (plain, FastPRISM(plain, dtype))
        )
    assert found.keypoints1.dtype == torch.float32 and found.keypoints1.isfinite().all()
    distances = partner_distances(expected, found)
    assert len(distances) > 0.6 * len(expected.batch)
    assert distances.median() < 0.5


# --- what a CPU does in its own way


@pytest.mark.parametrize("at_once", [1, winograd.AT_ONCE])
@pytest.mark.parametrize("slope", [0.0, 0.01, 1.0])
def test_winograds_way_is_a_convolution(at_once: int, slope: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winograd, "AT_ONCE", at_once)  # 1: a row of tiles at a time
    torch.manual_seed(0)
    with torch.inference_mode():
        for (height, width), bias in (((16, 24), True), ((13, 18), False), ((1, 5), True), ((9, 3), True)):
            conv = torch.nn.Conv2d(20, 12, 3, padding=1, bias=bias)
            x, residual = torch.randn(2, 20, height, width), torch.randn(2, 12, height, width)
            for more in (None, residual):
                expected = F.leaky_relu(conv(x) + (0 if more is None else more), slope)
                assert_close(Winograd(conv)(x, more, slope), expected, 2e-5)
                last = x.contiguous(memory_format=torch.channels_last)
                assert_close(Winograd(conv)(last, more, slope), expected, 2e-5)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> PRISM:
    """A model that is wide enough for it, on whatever machine."""
    monkeypatch.setattr(winograd, "is_worth_it", lambda device: True)
    monkeypatch.setattr("prism_match.model.fast.cpu_has_bf16", lambda: False)
    monkeypatch.setattr("prism_match.model.kernels.has_amx", lambda: False)
    monkeypatch.setattr(products, "mkl_is_slow", lambda: False)
    return random_model(TINY.replace(stage_dims=(64, 80, 64), coarse_dim=64, fine_dim=64))


def test_a_wide_model_takes_winograds_way_and_gives_what_the_plain_one_gives(wide: PRISM) -> None:
    fast = FastPRISM(wide, torch.float32)
    assert sum(isinstance(x, Winograd) for x in fast.backbone.modules()) == 14  # all but those of a stride
    with torch.inference_mode():
        for size, count in ((64, 96), 1), ((33, 50), 2):
            (image,) = images(size, count=count)
            a, b = wide.extract(image), fast.extract(image)
            assert_close(a.coarse, b.coarse)
            assert_close(a.fine, b.fine)
            expected, found = wide.match(a, a), fast.match(b, b)
            assert len(found.batch) > 5 and torch.equal(expected.keypoints0, found.keypoints0)
            assert_close(expected.keypoints1, found.keypoints1, 1e-3)


def test_without_instructions_for_bf16_the_backbone_loses_nothing_but_the_last_rounding(wide: PRISM) -> None:
    (image,) = images((64, 96))
    with torch.inference_mode():
        expected, found = wide.extract(image), FastPRISM(wide, torch.bfloat16).extract(image)
    for name in ("coarse", "fine"):
        exact, rounded = getattr(expected, name), getattr(found, name)
        assert rounded.dtype == torch.bfloat16
        torch.testing.assert_close(rounded.float(), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sees_the_shades_of_an_image(dtype: torch.dtype) -> None:
    """An image in faint contrast, of which bf16 itself could tell but one or two shades."""
    model = random_model(TINY)
    conv, norm = model.backbone.stem
    conv.weight -= conv.weight.mean(dim=(2, 3), keepdim=True)  # as of edges, whatever the brightness
    norm.running_mean.zero_()
    image = 0.75 + 2e-3 * images((64, 96))[0]
    exact, half = (FastPRISM(model, x).backbone.stem for x in (torch.float32, dtype))
    with torch.inference_mode():
        expected, found, rounded = exact(image), half(image), exact(image.bfloat16().float())
    inside = (..., slice(4, -4), slice(4, -4))  # where no filter reaches over the border

    def off(x: Tensor) -> float:
        """By how much of what there is to see."""
        change = expected - expected[inside].mean(dim=(2, 3), keepdim=True)
        return float((x - expected)[inside].norm() / change[inside].norm())

    assert found.dtype == dtype
    assert found.is_contiguous(memory_format=torch.channels_last), "as the convolutions after it want it"
    assert off(found.float()) < 0.1 < 0.5 < off(rounded)


@pytest.mark.parametrize("by_convolving", [False, True])
def test_attention_by_rows_is_attention(by_convolving: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "mkl_is_slow", lambda: by_convolving)
    generator = torch.Generator().manual_seed(0)
    for n, m, scores in ((300, 200, 1), (300, 600, 2**20), (70, 16, 2**20), (5, 1, 1), (0, 4, 1), (3, 0, 1)):
        monkeypatch.setattr(kernels, "SCORES", scores)
        q, k, v = (torch.randn(2, 3, length, 16, generator=generator) for length in (n, m, m))
        with torch.inference_mode():
            assert_close(kernels.attend_by_rows(q, k, v), attend(q, k, v, None), 1e-5)
            half = kernels.attend_by_rows(*(x.bfloat16() for x in (q, k, v)))
            assert half.dtype == torch.bfloat16
            assert_close(half.float(), attend(q, k, v, None), 0.03)


def test_a_product_is_a_convolution_of_one_pixel() -> None:
    torch.manual_seed(0)
    with torch.inference_mode():
        for rows, k, n in ((5, 16, 7), (1, 3, 1), (64, 1, 2), (48, 16, 7), (0, 16, 7)):
            a, b, bias = torch.randn(rows, k), torch.randn(n, k), torch.randn(n)
            assert_close(products.multiply(a, b, bias), a @ b.mT + bias, 1e-5)
            assert_close(products.multiply(a.mT.contiguous().mT, b.mT.contiguous().mT), a @ b.mT, 1e-5)
        layers = torch.nn.Sequential(
            torch.nn.Linear(6, 8, bias=False), torch.nn.GELU(), torch.nn.Linear(8, 3)
        )
        x = torch.randn(2, 5, 6)
        expected = layers(x)
        found = products.with_pointwise(layers)
        assert sum(isinstance(y, products.Pointwise) for y in found) == 2
        assert_close(found(x), expected, 1e-5)


def test_with_such_products_it_gives_what_the_plain_model_gives(
    wide: PRISM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "mkl_is_slow", lambda: True)
    fast, pair = FastPRISM(wide, torch.float32), 2 * images((64, 96))
    assert isinstance(fast.mpms[0].self_attention.query_and_value, products.Pointwise)
    assert isinstance(FastPRISM(wide, torch.bfloat16).mpms[0].self_attention.ffn[0], torch.nn.Linear)
    with torch.inference_mode():
        expected = wide.match(*(wide.extract(x) for x in pair))
        found = fast.match(*(fast.extract(x) for x in pair))
    assert len(found.batch) > 5 and torch.equal(expected.keypoints0, found.keypoints0)
    assert_close(expected.keypoints1, found.keypoints1, 1e-3)


def test_without_cells_to_look_at_no_product_fails(wide: PRISM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "mkl_is_slow", lambda: True)
    fast, pair = FastPRISM(wide, torch.float32), 2 * images((64, 96))
    a, b = (fast.extract(x) for x in pair)
    nowhere = torch.zeros_like(a.valid)
    with torch.inference_mode():
        for masks in ((nowhere, None), (None, nowhere), (nowhere, nowhere)):
            assert len(fast.match(a, b, *masks).batch) == 0


@pytest.mark.parametrize(
    ("told", "capability", "family", "wide_cpu", "slow_mkl"),
    [
        ("vendor_id : AuthenticAMD\ncpu family\t: 26\nmodel name : AMD EPYC", "AVX512", 26, True, True),
        ("vendor_id : AuthenticAMD\ncpu family\t: 25\n", "AVX512", 25, False, False),
        ("AMD64 Family 26 Model 68 Stepping 0, AuthenticAMD", "AVX2", 26, False, False),
        ("vendor_id : GenuineIntel\ncpu family\t: 6\n", "AVX512", None, True, False),
        ("Intel64 Family 6 Model 140 Stepping 1, GenuineIntel", "AVX2", None, False, False),
        ("", "DEFAULT", None, False, False),
    ],
)
def test_what_a_cpu_is_quick_in_follows_from_what_it_is(
    told: str,
    capability: str,
    family: int | None,
    wide_cpu: bool,
    slow_mkl: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_file(path: Path, **_: object) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(processor.platform, "processor", lambda: told)
    monkeypatch.setattr(processor, "amd_family", processor.amd_family.__wrapped__)  # looks each time
    for read in (lambda path, **_: told, no_file):  # Linux, and elsewhere
        monkeypatch.setattr(Path, "read_text", read)
        found = processor.amd_family(), processor.computes_512_bits(), processor.mkl_is_slow()
        assert found == (family, wide_cpu, slow_mkl)


def test_attention_in_bf16_goes_by_rows_where_there_is_no_amx(
    wide: PRISM, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(kernels, "attend_by_rows", lambda *x: calls.append(1) or attend(*x, None))
    pair = images((64, 64), (64, 64))
    for dtype, amx, by_rows in (
        (torch.float32, False, False), (torch.bfloat16, True, False), (torch.bfloat16, False, True),
    ):  # fmt: skip
        monkeypatch.setattr(kernels, "has_amx", lambda amx=amx: amx)
        calls.clear()
        with torch.inference_mode():
            model = FastPRISM(wide, dtype)
            model.match(*(model.extract(x) for x in pair))
        assert bool(calls) == by_rows


def test_in_bf16_a_cpu_sees_few_numbers_of_rows() -> None:
    """Whatever the number of cells: each one costs memory that is never given back."""
    seen: set[int] = set()

    def work(x: Tensor) -> Tensor:
        seen.add(len(x))
        return 2 * x

    for count in range(0, 2000, 7):
        x = torch.arange(2 * count).view(-1, 2).bfloat16()
        assert torch.equal(kernels.in_pieces(work, x), 2 * x)
    assert len(seen) < 10


def test_ablations_with_another_part_take_the_plain_way() -> None:
    assert is_supported(ModelConfig())
    assert not is_supported(ModelConfig(border=0))  # windows could leave the map
    for name in ("linear-attention", "cosine"):
        config = PRESETS[name].replace(
            **{k: getattr(TINY, k) for k in ("stage_dims", "coarse_dim", "fine_dim", "heads", "fine_heads")}
        )
        model = random_model(config)
        other = arranged(model, torch.float32, Recorder())
        assert isinstance(other, AutocastPRISM)
        pair = images((64, 64), (64, 64))
        with torch.inference_mode():
            found = other.match(*(other.extract(x) for x in pair))
            expected = model.match(*(model.extract(x) for x in pair))
        assert torch.equal(found.keypoints1, expected.keypoints1)


def test_tables_of_sizes_are_kept_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prism_match.model.fast.LAYOUT_CELLS", 400)
    fast = FastPRISM(random_model(TINY), torch.float32)
    for n in (1, 2, 3, 4, 5, 100):
        features = [
            Features(torch.zeros(1), torch.zeros(1), torch.ones(1, 4, 4 * k, dtype=torch.bool))
            for k in (n, 1)
        ]
        assert fast.layout(*features) is fast.layout(*features)
        assert sum(x.cells for x in fast.layouts.values()) <= 400 or len(fast.layouts) == 1
        assert n != 4 or len(fast.layouts) == 4


def test_what_is_recorded_is_forgotten_beyond_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU nothing is recorded; the tensors that a recording would read and write stand for it."""
    monkeypatch.setattr("prism_match.model.recorder.MOST", 4)
    monkeypatch.setattr("prism_match.model.recorder.HELD", 4000)
    recorder = Recorder()

    def remember(name: str, *sizes: int) -> None:
        inputs = tuple(recorder.buffer("in", n, torch.zeros(size)) for n, size in enumerate(sizes))
        recorder.recordings[name] = Recording(inputs=inputs, outputs=(None,))
        recorder.trim()

    for name in "abcdef":
        remember(name, 100)  # all of them need the same
    assert list(recorder.recordings) == ["c", "d", "e", "f"] and recorder.held == 400
    remember("g", 100, 800)
    assert list(recorder.recordings) == ["d", "e", "f", "g"] and recorder.held == 3600
    remember("h", 200)  # what "g" needs beside it is too much for the rest
    assert list(recorder.recordings) == ["h"] and recorder.held == 800
    remember("i", 5000)  # as large as it is, it is the one in use
    assert list(recorder.recordings) == ["i"]
    recorder.clear()
    assert recorder.held == 0 and not recorder.recordings


class Failing(Recorder):
    """As on a GPU that cannot record."""

    error: Exception

    def record(self, recording: Recording, work: Any, inputs: tuple[Tensor, ...]) -> None:
        self.buffer("in", 0, inputs[0])
        raise self.error


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError("no room"), RuntimeError("not supported")])
def test_what_cannot_be_recorded_leaves_nothing_behind(error: Exception) -> None:
    recorder = Failing(pool="shared", pooled=100)
    recorder.error = error
    recorder.recordings["other"] = Recording(graph=object())  # type: ignore[arg-type]
    recorder.try_to_record(Recording(), lambda x: (x,), (torch.zeros(3),))
    assert not recorder.recordings and not recorder.buffers and recorder.pool is None
    # A lack of memory may pass; what the driver cannot do it never can.
    transient = isinstance(error, torch.cuda.OutOfMemoryError)
    assert recorder.enabled == transient and recorder.patience == (2 * PATIENCE if transient else PATIENCE)


def test_what_recordings_share_is_bounded_and_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 8000))
    recorder = Recorder(pool="shared")

    def add(name: str, grown: int) -> None:
        recorder.recordings[name] = Recording(graph=object())  # type: ignore[arg-type]
        recorder.pooled += grown
        recorder.trim()

    add("a", 600)
    add("b", 300)
    assert list(recorder.recordings) == ["a", "b"] and recorder.pool == "shared"
    add("c", 200)  # more than an eighth of the memory
    assert not recorder.recordings and recorder.pool is None and recorder.pooled == 0
    assert recorder.patience == 2 * PATIENCE
    # With the last recording goes what it used: nobody may ask for it again.
    monkeypatch.setattr("prism_match.model.recorder.MOST", 1)
    recorder.pool = "another"
    add("d", 100)
    recorder.recordings["e"] = Recording()  # seen once
    recorder.trim()
    assert list(recorder.recordings) == ["e"] and recorder.pool is None and recorder.pooled == 0


def test_threads_may_share_a_model() -> None:
    fast = FastPRISM(random_model(TINY), torch.float32)
    pairs = [images((40, 32 + 8 * n), (40, 56)) for n in range(6)]

    @torch.inference_mode()
    def match(pair: list[Tensor]) -> Tensor:
        return fast.match(*(fast.extract(x) for x in pair)).keypoints1

    alone = [match(pair) for pair in pairs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(match, pairs * 4))
    assert all(torch.equal(x, alone[n % len(pairs)]) for n, x in enumerate(together))


# ---- what it costs: counted, so that nobody brings it back


class Waits(TorchFunctionMode):
    """Counts what makes the host wait for a GPU."""

    KINDS = ("tolist", "item", "nonzero", "cpu", "numpy", "__bool__", "__int__", "__float__", "bincount")

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.KINDS:
            self.count[name] += 1
        if name == "__getitem__" and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            self.count["a mask as an index"] += 1
        return func(*args, **(kwargs or {}))


class Kernels(TorchDispatchMode):
    """Counts operations that are work for a device."""

    FREE = {
        "view", "_unsafe_view", "expand", "permute", "transpose", "t", "slice", "select", "split", "unbind",
        "split_with_sizes", "unsqueeze", "squeeze", "as_strided", "detach", "detach_", "alias", "chunk",
        "unflatten", "flatten", "lift_fresh", "empty", "new_empty", "empty_like", "resolve_conj",
        "resolve_neg",
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in self.FREE:
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


class Watched(Recorder):
    """Tells what is recorded on a GPU, and then asked for at once, from what is not."""

    def __init__(self) -> None:
        super().__init__()
        self.waits, self.kernels, self.inside = Waits(), Kernels(), Counter[str]()

    def __call__(self, name: Any, work: Any, *inputs: Tensor) -> tuple[Any, ...]:
        waits, kernels = self.waits.count.copy(), self.kernels.count.copy()
        results = work(*inputs)
        assert self.waits.count == waits, f"{name} waits"
        self.inside += self.kernels.count - kernels
        self.kernels.count = kernels
        return results


def test_the_host_waits_once_in_each_mpm_and_launches_few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "mkl_is_slow", lambda: False)  # the ways of a GPU are counted
    # The plain form of attention has to know the lengths, which are on the host already.
    config = ModelConfig().replace(
        **{k: getattr(TINY, k) for k in ("stage_dims", "coarse_dim", "fine_dim", "heads", "fine_heads")}
    )
    monkeypatch.setattr("prism_match.model.fast.finds_partners", lambda *_: True)
    fast = FastPRISM(random_model(config), torch.float32)
    pair = images((64, 96), (96, 64))
    with torch.inference_mode():
        a, b = (fast.extract(x) for x in pair)
        fast.match(a, b)  # the tables of these sizes are made
        fast.recorder = matching = Watched()
        with matching.waits, matching.kernels:
            fast.match(a, b)
        fast.recorder = backbone = Watched()
        with backbone.waits, backbone.kernels:
            fast.extract(pair[0])
    # One in each MPM, then for the matches.
    assert matching.waits.count.total() <= config.layers + 1, matching.waits.count
    # As counted on a CPU, where some that are one kernel on a GPU are several.
    assert matching.kernels.count.total() < 10, matching.kernels.count
    assert matching.inside.total() < 760, matching.inside
    assert backbone.waits.count.total() == 0 and backbone.kernels.count.total() == 0
    assert backbone.inside.total() <= 50, backbone.inside


class Fused:
    """Stands in for the kernels of a GPU: they give what the plain ones give."""

    def __getattr__(self, name: str) -> Any:
        if name == "activate":
            return lambda x, bias, more: torch.relu(x + bias.view(-1, 1, 1) + more)
        if name == "attend_segments":
            return kernels.attended_in_fp32
        if name == "norm_gelu":
            return lambda x, weight, bias, eps: F.gelu(F.layer_norm(x, x.shape[1:], weight, bias, eps))
        return getattr(kernels, name)


def test_kernels_that_do_not_work_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without_a_compiler(*_: Any) -> None:
        raise RuntimeError("Failed to find C compiler.")

    device, good = torch.device("cpu"), Fused()
    monkeypatch.setattr(kernels, "triton_kernels", good)
    for rotate, said in (
        (kernels.rotate, ""),
        (lambda x, *_: x, "rotate"),
        (without_a_compiler, "C compiler"),
    ):
        good.rotate = rotate
        kernels.kernels_work.cache_clear()
        caplog.clear()
        assert kernels.kernels_work(device) == (not said)
        assert kernels.kernels_work(device) == (not said)
        assert len(caplog.records) == (1 if said else 0) and said in caplog.text  # once
    kernels.kernels_work.cache_clear()
