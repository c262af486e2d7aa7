"""`Matcher(backend="onnx")` against the matcher that PyTorch runs, and the graphs that it keeps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ASSETS
from test_onnx import half_of_the_shipped, photos, save

from prism_match import Matcher, Matches, UserError, cli
from prism_match.config import PRESETS
from prism_match.engine import MatcherSettings, Prism
from prism_match.evaluation.speed import SpeedOptions, measure
from prism_match.export.onnx import backend
from prism_match.model.prism import PRISM
from prism_match.runtime import import_onnxruntime, open_session

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
GRAPHS = {part: part.encode() * 999 for part in backend.PARTS}  # stand in for real ones
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "precision": "fp32",
    "size": 128,
    "rotate": "never",
    "rescale": "never",
    "polish": False,
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder / "prism-match" / "onnx"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(half_of_the_shipped(), tmp_path_factory.mktemp("weights") / "half.safetensors")


@pytest.fixture(scope="module")
def by_torch(weights: Path) -> Matcher:
    return Matcher(weights, **OPTIONS)


@pytest.fixture(scope="module")
def by_onnx(weights: Path, cache: Path) -> Matcher:
    return Matcher(weights, backend="onnx", **OPTIONS)


def images(*sizes: tuple[int, int]) -> list[np.ndarray]:
    return [x[0, 0] for x in photos(*sizes)]


def assert_same(found: Matches, expected: Matches, ties: int = 1, pixels: float = 0.02) -> None:
    """The same cells but for ties, at the same places."""
    places = {tuple(k): p for k, p in zip(expected.keypoints0.tolist(), expected.keypoints1, strict=True)}
    close = 0
    for k, p in zip(found.keypoints0.tolist(), found.keypoints1, strict=True):
        close += tuple(k) in places and np.abs(p - places[tuple(k)]).max() <= pixels
    assert close >= max(len(found), len(expected)) - ties, (len(found), len(expected), close)
    assert len(expected) > 10


# ---- the same as PyTorch


@pytest.mark.parametrize("sizes", [((64, 96), (96, 64)), ((65, 100), (100, 131))])
def test_matches_and_details_of_any_sizes(sizes: Any, by_torch: Matcher, by_onnx: Matcher) -> None:
    pair = images(*sizes)
    expected, found = by_torch.match(*pair, details=True), by_onnx.match(*pair, details=True)
    assert_same(found, expected)
    assert found.details is not None and expected.details is not None
    for name in ("keep0", "keep1"):
        x, y = getattr(found.details, name), getattr(expected.details, name)
        assert x.dtype == y.dtype and x.shape == y.shape and (x != y).mean() < 0.01
        assert 0 < y[-1].mean() < 1  # something was pruned
    for name in ("nmi0", "nmi1"):
        x, y = getattr(found.details, name), getattr(expected.details, name)
        assert (np.abs(x - y) > 1e-3).mean() < 0.01


def test_the_backbone_is_run_too_where_pytorchs_is_no_faster(
    weights: Path, cache: Path, by_torch: Matcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "is_worth_it", lambda device: False)
    matcher = Matcher(weights, backend="onnx", **OPTIONS)
    assert isinstance(matcher.model.backbone, backend.SessionBackbone)
    pair = images((65, 100), (100, 131))
    assert_same(matcher.match(*pair), by_torch.match(*pair))


def test_masks_batches_and_features(by_torch: Matcher, by_onnx: Matcher) -> None:
    a, b, c = images((64, 96), (64, 96), (64, 96))
    mask = np.zeros(a.shape, bool)
    mask[:, :56] = True
    pairs = [(a, b, mask, None), (b, c, None, None), (a, c, None, mask)]
    expected = [by_torch.match(*pair, details=True) for pair in pairs]
    singles = [by_onnx.match(*pair, details=True) for pair in pairs]
    together = list(by_onnx.match_many(pairs, batch_size=3, details=True))
    for single, batched, plain in zip(singles, together, expected, strict=True):
        assert_same(single, plain)
        np.testing.assert_array_equal(single.keypoints0, batched.keypoints0)
        np.testing.assert_allclose(single.keypoints1, batched.keypoints1, atol=1e-4)
        assert single.details is not None and batched.details is not None
        np.testing.assert_array_equal(single.details.keep1, batched.details.keep1)
    assert (singles[0].keypoints0[:, 0] < 60).all()
    again = by_onnx.match(*pairs[0])
    np.testing.assert_array_equal(again.keypoints1, singles[0].keypoints1)
    # What one has seen, the other can match.
    seen = by_torch.extract([a, b])
    for x, y in zip(seen, by_onnx.extract([a, b]), strict=True):
        torch.testing.assert_close(x.features.coarse, y.features.coarse, atol=1e-3, rtol=1e-3)
        assert x.features.fine.shape == y.features.fine.shape
    assert_same(by_onnx.match_extracted([(seen[0], seen[1])])[0], by_onnx.match(a, b))


def test_turned_and_polished(by_torch: Matcher, by_onnx: Matcher) -> None:
    a, b = images((64, 96), (96, 64))
    turned, upright = (m.adjusted(rotate="always").match(a, np.rot90(b)) for m in (by_onnx, by_torch))
    assert_same(turned, upright)
    found, expected = (m.adjusted(polish=True).match(a, b) for m in (by_onnx, by_torch))
    assert abs(len(found) - len(expected)) <= 1
    # What is a match of one of them alone tells how the image is stretched around others.
    distance = np.linalg.norm(found.keypoints1[:, None] - expected.keypoints1, axis=-1).min(axis=1)
    assert np.median(distance) < 0.1


@pytest.mark.slow
def test_tiles_and_points(cache: Path) -> None:
    pair = ASSETS / "astronaut0.jpg", ASSETS / "astronaut1.jpg"
    matchers = [Matcher(backend=name, device="cpu", precision="fp32", size=256) for name in ("onnx", "torch")]
    found, expected = (m.adjusted(tiles="auto").match(*pair) for m in matchers)
    assert abs(len(found) - len(expected)) <= 0.02 * len(expected)
    points = np.array([[200.0, 150.0], [260.0, 120.0]])
    located, known = (m.locate(*pair, points) for m in matchers)
    np.testing.assert_allclose(located.points1, known.points1, atol=0.2)


def test_nothing_to_match_is_no_error(by_onnx: Matcher) -> None:
    black = np.zeros((40, 56), np.uint8)
    nowhere = np.zeros((40, 56), bool)
    assert len(by_onnx.adjusted(threshold=0.9).match(black, black)) == 0
    assert len(by_onnx.match(*images((40, 56), (40, 56)), nowhere, nowhere)) == 0


@pytest.mark.parametrize(
    "changes",
    [{"pruning": "last", "position": "absolute"}, pytest.param({"pruning": "none"}, marks=pytest.mark.slow)],
)
def test_ablations_that_have_a_form(changes: dict[str, Any], cache: Path) -> None:
    """Only the last MPM prunes, or none does; positions are in the features."""
    config = PRESETS["tiny"].replace(theta_c=0.0, **changes)
    found, expected = (
        Matcher(config=config, backend=name, **OPTIONS).match(*images((64, 96), (96, 64)), details=True)
        for name in ("onnx", "torch")
    )
    assert found.details is not None and expected.details is not None
    np.testing.assert_array_equal(found.details.keep0, expected.details.keep0)
    assert found.details.nmi0 is None and len(found) > 0


def test_a_lack_of_memory_is_one() -> None:
    class Full:
        def get_inputs(self) -> list[Any]:
            return []

        def run(self, *_: Any) -> None:
            raise Exception("Status Message: std::bad_alloc")

    with pytest.raises(MemoryError, match="not enough memory"):
        backend.run(Full())


# ---- who takes it


def test_what_it_cannot_do_is_told(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    tiny = PRESETS["tiny"]
    for options, word in (
        ({"backend": "tensorrt"}, "one of torch, onnx, auto, not 'tensorrt'"),
        ({"backend": "onnx", "precision": "bf16"}, "computes in fp32, not in bfloat16"),
        ({"backend": "onnx", "config": PRESETS["linear-attention"]}, "no form of this ablation"),
    ):
        with pytest.raises(UserError, match=word):
            Matcher(**({"config": tiny} | OPTIONS | options))  # type: ignore[arg-type]
    reason = backend.why_not(Matcher(config=tiny, **OPTIONS).info, torch.device("cuda"), torch.float32)
    assert reason == "is for CPUs, not for cuda"
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UserError, match="needs onnxruntime: pip install"):
        Matcher(config=tiny, backend="onnx", **OPTIONS)
    with pytest.raises(UserError, match="onnxruntime is missing: pip install"):
        open_session(b"", "a graph")
    for options in ({}, {"precision": "bf16"}, {"config": PRESETS["linear-attention"]}):
        assert Matcher(**({"config": tiny} | OPTIONS | options), backend="auto").backend == "torch"


def test_a_runtime_that_cannot_be_loaded_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    """As one that was built for another system."""
    (tmp_path / "onnxruntime.py").write_text("raise ImportError('libsomething.so: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "onnxruntime")
    options = OPTIONS | {"config": PRESETS["tiny"]}
    with pytest.raises(UserError, match=r"^backend onnx cannot be used: .*cannot be loaded \(libsomething"):
        Matcher(backend="onnx", **options)
    assert Matcher(backend="auto", **options).backend == "torch"


def test_it_is_part_of_what_a_matcher_is(by_onnx: Matcher, by_torch: Matcher) -> None:
    settings = [MatcherSettings.of(m, "cpu") for m in (by_onnx, by_torch)]
    assert [MatcherSettings.from_json(s.to_json()).backend for s in settings] == ["onnx", "torch"]
    # Scores that are kept are of one of them; a store of matches takes either, as it does any precision.
    assert Prism(by_onnx).precision != Prism(by_torch).precision
    assert Prism(by_onnx).settings == Prism(by_torch).settings
    half = by_onnx.in_dtype(torch.bfloat16)
    assert half.backend == "torch" and by_onnx.backend == "onnx"
    assert len(half.match(*images((64, 96), (96, 64)))) > 10


def test_nobody_is_told_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY")
    import_onnxruntime()
    assert os.environ["ORT_DISABLE_TELEMETRY"] == "1"


# ---- the graphs that are kept


def test_they_are_made_once(
    by_onnx: Matcher, weights: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "make_graphs", lambda _: pytest.fail("made again"))
    again = Matcher(weights, backend="auto", **OPTIONS)
    assert again.backend == "onnx"
    pair = images((64, 96), (96, 64))
    np.testing.assert_array_equal(again.match(*pair).keypoints1, by_onnx.match(*pair).keypoints1)


@pytest.fixture
def kept(by_onnx: Matcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> backend.Kept:
    """Where graphs would be kept, in a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(backend, "make_graphs", lambda _: GRAPHS)
    found = backend.kept_file(by_onnx.info)
    assert found is not None and found.path.is_relative_to(tmp_path)
    return found


def load(matcher: Matcher) -> dict[str, bytes]:
    return backend.load_graphs(None, matcher.info)  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign", "empty", "text"])
def test_a_file_that_is_not_what_it_says_is_made_again(
    damage: str, kept: backend.Kept, by_onnx: Matcher, caplog: pytest.LogCaptureFixture
) -> None:
    kept.write(GRAPHS)
    assert load(by_onnx) == GRAPHS and not caplog.records
    whole = kept.path.read_bytes()
    if damage == "foreign":
        replace(kept, key="another").write(GRAPHS)  # whole, of another model
    else:
        flipped = whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:]
        contents = {"cut": whole[:-100], "flipped": flipped, "empty": b"", "text": b"none" * 99}
        kept.path.write_bytes(contents[damage])
    assert load(by_onnx) == GRAPHS and "damaged" in caplog.text
    assert kept.read() == GRAPHS
    assert [p.name for p in kept.path.parent.iterdir()] == [kept.path.name]


def test_other_weights_or_settings_have_other_graphs(kept: backend.Kept, by_onnx: Matcher) -> None:
    info = by_onnx.info
    for other in (replace(info, sha256="other"), replace(info, config=info.config.replace(theta_p=0.2))):
        found = backend.kept_file(other)
        assert found is not None and found.path != kept.path


def test_a_cache_that_cannot_be_written(
    kept: backend.Kept, by_onnx: Matcher, caplog: pytest.LogCaptureFixture
) -> None:
    kept.path.parent.parent.write_text("a file in its place")
    assert load(by_onnx) == GRAPHS and "are not kept" in caplog.text


def test_a_cache_that_cannot_be_looked_into(
    by_onnx: Matcher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As the folder of another user; root may look into any, but nobody into one with such a name."""
    monkeypatch.setattr(backend, "make_graphs", lambda _: GRAPHS)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("x" * 300)))
    assert load(by_onnx) == GRAPHS and "are not kept" in caplog.text
    caplog.clear()
    monkeypatch.delenv("XDG_CACHE_HOME")

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert load(by_onnx) == GRAPHS and "are not kept" in caplog.text


def test_few_are_kept(tmp_path: Path) -> None:
    for n in range(backend.KEPT + 2):
        path = tmp_path / f"{n}.safetensors"
        backend.Kept(path, str(n)).write(GRAPHS)
        os.utime(path, (n, n))
    assert sorted(p.stem for p in tmp_path.iterdir()) == ["2", "3", "4", "5"]


def test_several_write_and_read_at_once(kept: backend.Kept, by_onnx: Matcher) -> None:
    def again(n: int) -> bool:
        if n % 2:
            kept.write(GRAPHS)
        return load(by_onnx) == GRAPHS

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(again, range(40)))
    assert [p.name for p in kept.path.parent.iterdir()] == [kept.path.name]


def test_threads_that_need_the_same_graphs_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter of PyTorch knows only one at a time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = PRESETS["tiny"].replace(theta_c=0.0)
    weights = save(PRISM(config), tmp_path / "tiny.safetensors")
    making = []
    monkeypatch.setattr(
        backend, "make_graphs", lambda model, f=backend.make_graphs: making.append(1) or f(model)
    )
    pair = images((64, 96), (96, 64))

    def matched(_: int) -> np.ndarray:
        return Matcher(weights, backend="onnx", **OPTIONS).match(*pair).keypoints1

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(matched, range(3)))
    assert len(making) == 1 and len(found[0]) > 0
    for points in found:
        np.testing.assert_allclose(points, Matcher(weights, **OPTIONS).match(*pair).keypoints1, atol=1e-3)


@pytest.mark.slow
def test_two_processes_at_once(tmp_path: Path) -> None:
    code = (
        "from prism_match import Matcher; from prism_match.config import PRESETS; import numpy as np; "
        "m = Matcher(config=PRESETS['tiny'].replace(theta_c=0.0), backend='onnx', device='cpu'); "
        "x = np.random.default_rng(0).random((64, 64)); print(len(m.match(x, x)))"
    )
    own = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    started = [
        subprocess.Popen([sys.executable, "-c", code], env=own, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    told = [process.communicate(timeout=120)[0] for process in started]
    assert all(process.returncode == 0 for process in started) and told[0] == told[1] and int(told[0]) > 0
    (path,) = (tmp_path / "prism-match" / "onnx").iterdir()
    assert backend.Kept(path, path.stem).read() is not None
    assert [p.name for p in tmp_path.iterdir()] == ["prism-match"]  # nothing of onnxruntime's own


# ---- commands


def test_the_command_and_its_time(
    weights: Path, by_onnx: Matcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    pair = [str(ASSETS / f"astronaut{n}.jpg") for n in (0, 1)]
    words = ["match", *pair, "-o", str(tmp_path), "--weights", str(weights), "--size", "96", "--json"]
    monkeypatch.setattr(sys, "argv", ["prism", *words, "--backend", "onnx", "--no-polish"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
        raise SystemExit(0)
    assert not stop.value.code
    told = json.loads(capsys.readouterr().out)
    assert told["backend"] == "onnx" and told["matches"] > 0 and len(told["kept_cells0"]) == 2
    options = SpeedOptions(
        sizes=(96,), precisions=("fp32",), device="cpu", peers=False, repeats=1, batch=1, onnx_backend=True,
        weights=str(weights), whole_range=True,
    )  # fmt: skip
    rows = {row["what"]: row for row in measure(options).summary["rows"]}
    assert rows["model by onnx"]["milliseconds"] > 0
    assert abs(rows["model by onnx"]["matches"] - rows["model"]["matches"]) <= 1
