"""The model as ONNX files, run by onnxruntime, against the model in PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import ASSETS, needs_shared

from prism_match import Matcher, UserError, __version__, cli
from prism_match.config import PRESETS
from prism_match.corners import corners, to_corners
from prism_match.evaluation.speed import SpeedOptions, measure, open_onnx
from prism_match.export.onnx import OnnxOptions, export_onnx
from prism_match.export.onnx import write as writing
from prism_match.export.onnx.graphs import OnnxRefinement
from prism_match.model import products
from prism_match.model.fast import FastPRISM
from prism_match.model.prism import PRISM, PairMatches
from prism_match.subpixel import Pyramid, settle
from prism_match.weights import SHIPPED_SHA256, load_model, load_subpixel
from prism_match.weights.store import export_weights

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
EXAMPLE = Path(__file__).parents[1] / "examples" / "onnx_only.py"


def save(model: PRISM, path: Path) -> Path:
    export_weights(path, model.state_dict(), model.config, {}, dtype=torch.float32)
    return path


def half_of_the_shipped() -> PRISM:
    """Two of its MPMs, which prune a good part, and every match that is mutual: random weights tell no cell
    from another."""
    whole = load_model()
    model = PRISM(whole.config.replace(layers=2, theta_c=0.0, theta_p=0.3)).eval().requires_grad_(False)
    state = whole.state_dict()
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    return model


@pytest.fixture(scope="module")
def model() -> PRISM:
    return half_of_the_shipped()


@pytest.fixture(scope="module")
def weights(model: PRISM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("weights") / "tiny.safetensors")


@pytest.fixture(scope="module")
def exported(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the polishing network beside it."""
    out = tmp_path_factory.mktemp("onnx") / "prism.onnx"
    export_onnx(out, weights)
    return out


@pytest.fixture
def traced_before(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs that are there already take the place of tracing them again."""

    def load(graph: writing.Graph) -> Any:
        proto = onnx.load(exported.with_name(writing.file_name(exported, graph.part)))
        del proto.metadata_props[:]
        return proto

    monkeypatch.setattr(writing, "traced", load)


@lru_cache
def opened(path: Path | bytes) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    source = path if isinstance(path, bytes) else str(path)
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run(path: Path | Any, images: list[np.ndarray], threshold: float = 0.0) -> list[np.ndarray]:
    session = opened(path) if isinstance(path, Path) else path
    given = {f"image{n}": x for n, x in enumerate(images)} | {"threshold": np.array(threshold, np.float32)}
    return session.run(None, given)


@lru_cache
def arranged(model: PRISM) -> FastPRISM:
    return FastPRISM(model, torch.float32)


def by_torch(model: PRISM, images: list[np.ndarray], threshold: float = 0.0) -> PairMatches:
    fast = arranged(model)
    with torch.inference_mode():
        a, b = (fast.extract(torch.from_numpy(x)) for x in images)
        return fast.match(a, b, None, None, threshold)


def photos(*sizes: tuple[int, int]) -> list[np.ndarray]:
    """1 1 h w, float32: parts of one photo, a cell or two apart."""
    gray = cv2.imread(str(ASSETS / "astronaut0.jpg"), cv2.IMREAD_GRAYSCALE)
    gray = cv2.resize(gray, (256, 256), interpolation=cv2.INTER_AREA).astype(np.float32) / 255
    return [gray[8 * n : 8 * n + h, 16 * n : 16 * n + w][None, None] for n, (h, w) in enumerate(sizes)]


def assert_same(
    found: list[np.ndarray], expected: PairMatches, pixels: float = 0.02, apart: float = 0
) -> None:
    """The same cells but for ties: of a share `apart` at most; and the same places."""
    assert [x.dtype for x in found] == [np.float32] * 3
    pairs = {
        tuple(k): p
        for k, p in zip(expected.keypoints0.tolist(), expected.keypoints1.numpy(), strict=True)
    }  # fmt: skip
    moved = [np.abs(p - pairs[tuple(k)]).max() for k, p in zip(found[0].tolist(), found[1], strict=True)
             if tuple(k) in pairs]  # fmt: skip
    close = sum(m <= pixels for m in moved)
    assert close >= (1 - apart) * max(len(pairs), len(found[0])), (len(pairs), len(found[0]), close)


# ---- the same as PyTorch


@pytest.mark.parametrize(
    "sizes", [((64, 96), (96, 64)), ((33, 50), (47, 41)), ((100, 131), (65, 72)), ((40, 64), (40, 160))]
)
def test_one_file_for_any_two_sizes(sizes: Any, exported: Path, model: PRISM) -> None:
    images = photos(*sizes)
    expected = by_torch(model, images)
    assert len(expected.confidence) > 0
    found = run(exported, images)
    assert_same(found, expected)
    if len(found[2]) == len(expected.confidence):
        np.testing.assert_allclose(found[2], expected.confidence, atol=1e-4)


def test_threshold_is_an_input(exported: Path, model: PRISM) -> None:
    images = photos((64, 96), (96, 64))
    scores = np.sort(run(exported, images)[2])
    assert len(run(exported, images, float(scores[-3]) - 1e-6)[2]) == 3


def test_pruned_cells_are_left_out(exported: Path, model: PRISM) -> None:
    images = photos((96, 128), (100, 72))
    layers = by_torch(model, images).layers
    kept = [int(layers[0].keep0.sum()), int(layers[0].keep1.sum())]
    assert 0 < kept[0] < 12 * 16 and 0 < kept[1] < 13 * 9
    proto = onnx.load(exported)
    weights = [n.output[0] for n in proto.graph.node if n.op_type == "Softmax"]
    proto.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in weights)
    shapes = [x.shape[1:] for x in run(opened(proto.SerializeToString()), images)[3:]]
    levels = len(model.config.levels)
    # Self attention of either image, then cross attention both ways, at each level; of the second MPM.
    second = shapes[4 * levels : 8 * levels]
    assert [s[0] for s in second[::levels]] == [kept[0], kept[1], kept[0], kept[1]]
    assert [s[1] for s in second[levels - 1 :: levels]] == [kept[0], kept[1], kept[1], kept[0]]
    assert second[0][1] == 3 * 4  # the coarsest level sees everything


def test_no_matches_is_an_empty_result(exported: Path, model: PRISM, tmp_path: Path) -> None:
    blank = [np.zeros((1, 1, 40, 56), np.float32)] * 2
    for images, threshold in ((photos((64, 96), (96, 64)), 0.9999), (blank, 0.5)):
        found = run(exported, images, threshold)
        assert [x.shape for x in found] == [(0, 2), (0, 2), (0,)]
    strict = PRISM(PRESETS["tiny"]).eval().requires_grad_(False)
    for mpm in strict.mpms:
        mpm.pruning.phi[2].bias.sub_(100)  # nothing is left after the first
    out = tmp_path / "strict.onnx"
    export_onnx(out, save(strict, tmp_path / "strict.safetensors"), OnnxOptions(polish=False))
    assert run(out, photos((64, 96), (96, 64)))[0].shape == (0, 2)


@pytest.mark.slow
def test_parts_make_the_whole(weights: Path, tmp_path: Path) -> None:
    exported = tmp_path / "prism.onnx"
    export_onnx(exported, weights, OnnxOptions(parts=True, polish=False))
    images = photos((64, 97), (90, 64))
    backbone = opened(exported.with_name("prism-backbone.onnx"))
    matcher = opened(exported.with_name("prism-matcher.onnx"))
    maps = [x for image in images for x in backbone.run(None, {"image": image})]
    assert maps[0].shape[:2] == (8, 13) and maps[1].shape[1:] == (32, 49)
    names = [i.name for i in matcher.get_inputs()]
    assert names == ["coarse0", "fine0", "coarse1", "fine1", "threshold"]
    found = matcher.run(None, dict(zip(names, [*maps, np.array(0.0, np.float32)], strict=True)))
    for x, y in zip(found, run(exported, images), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-3)


@pytest.mark.slow
def test_fixed_size(weights: Path, model: PRISM, tmp_path: Path) -> None:
    out = tmp_path / "fixed.onnx"
    export_onnx(out, weights, OnnxOptions(static=(65, 100), polish=False))
    proto = onnx.shape_inference.infer_shapes(onnx.load(out))
    assert not {"NonZero", "Loop", "If"} & {n.op_type for n in proto.graph.node}
    for value in [*proto.graph.input, *proto.graph.output]:
        assert all(d.HasField("dim_value") for d in value.type.tensor_type.shape.dim), value.name
    images = photos((65, 100), (65, 100))
    keypoints0, keypoints1, scores = run(out, images)
    there = scores > 0
    assert len(scores) == 12 * 16 and 0 < there.sum() < len(scores)  # as many as cells, padded
    assert (np.diff(scores) <= 0).all()
    assert_same([x[there] for x in (keypoints0, keypoints1, scores)], by_torch(model, images))
    with pytest.raises(Exception, match="Got invalid dimensions"):
        run(out, photos((65, 100), (65, 101)))


def test_half_precision(weights: Path, model: PRISM, tmp_path: Path) -> None:
    out = tmp_path / "half.onnx"
    export_onnx(out, weights, OnnxOptions(precision="fp16", polish=False))
    proto = onnx.load(out)
    kinds = [t.data_type for t in proto.graph.initializer if len(t.dims) == 4]
    assert kinds.count(onnx.TensorProto.FLOAT) == 1, "the first convolution, which sees the image"
    assert set(kinds) == {onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT}
    images = photos((64, 96), (96, 64))
    assert_same(run(out, images), by_torch(model, images), pixels=0.2, apart=0.3)


# ---- polishing


def test_polishing_is_pytorchs(exported: Path) -> None:
    gray = cv2.imread(str(ASSETS / "astronaut0.jpg"), cv2.IMREAD_GRAYSCALE).astype(np.float32) / 255
    shift = np.array([0.3, -0.4], np.float32)
    move = np.array([[1, 0, shift[0]], [0, 1, shift[1]]], np.float32)
    moved = cv2.warpAffine(
        gray, move, gray.shape[::-1], flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REPLICATE
    )
    rng = np.random.default_rng(0)
    at0 = rng.uniform(60, 440, (60, 2)).astype(np.float32)
    at1 = at0.copy()
    polish = opened(exported.with_name("prism-polish.onnx"))

    def given(count: int, rounds: int) -> dict[str, np.ndarray]:
        ones = np.ones(2, np.float32)
        return {
            "image0": gray[None, None, :-3], "image1": moved[None, None], "matched0": gray[None, None, :-3],
            "keypoints0": at0[:count], "keypoints1": at1[:count], "scale0": ones, "scale1": ones,
            "pixel": np.array(1.0, np.float32), "rounds": np.array(rounds),
        }  # fmt: skip

    found0, found1 = polish.run(None, given(60, 3))
    assert np.median(np.linalg.norm(found1 - found0 - shift, axis=1)) < 0.15  # it was 0.5
    from prism_match.matcher import REWEIGHED
    from prism_match.polish import neighbourhoods

    points = [torch.from_numpy(x) for x in (at0, at1)]
    pyramids = [Pyramid.of(torch.from_numpy(x)[None]) for x in (gray[:-3], moved)]
    stretch, misfit, _ = neighbourhoods(*points, rounds=REWEIGHED)
    cornered = to_corners(corners(torch.from_numpy(gray[:-3])), *points, stretch, misfit)
    for rounds, (before0, before1) in ((2, points), (3, cornered)):
        expected, _ = settle(load_subpixel(), *pyramids, before0, before1, stretch, rounds)
        found0, found1 = polish.run(None, given(60, rounds))
        np.testing.assert_allclose(found0, before0.numpy(), atol=1e-4)
        np.testing.assert_allclose(found1, expected.numpy(), atol=0.02)
    few, _ = settle(load_subpixel(), *pyramids, *(p[:7] for p in points), torch.eye(2).expand(7, 2, 2), 3)
    np.testing.assert_allclose(polish.run(None, given(7, 3))[1], few.numpy(), atol=0.02)
    assert all(x.shape == (0, 2) for x in polish.run(None, given(0, 3)))


# ---- the files


def test_what_a_file_tells(exported: Path, weights: Path) -> None:
    told = opened(exported).get_modelmeta().custom_metadata_map
    assert told["name"] == "prism-match" and told["version"] == __version__ and told["part"] == "pair"
    assert told["theta_c"] == "0.0" and told["stride"] == "32" and told["size"] == "any"
    assert len(told["weights_sha256"]) == 64 and told["precision"] == "fp32"
    polish = opened(exported.with_name("prism-polish.onnx")).get_modelmeta().custom_metadata_map
    assert polish["part"] == "polish" and polish["weights_sha256"] != told["weights_sha256"]
    axes = [[str(d) for d in i.shape] for i in opened(exported).get_inputs()]
    assert axes == [["1", "1", "H0", "W0"], ["1", "1", "H1", "W1"], []]


@pytest.mark.usefixtures("traced_before")
def test_weights_beside_the_file(weights: Path, exported: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "prism.onnx"
    files = export_onnx(out, weights, OnnxOptions(external_weights=True, polish=False))
    assert sorted(f.name for f in out.parent.iterdir()) == ["prism.onnx", "prism.onnx.data"]
    assert sorted(files) == sorted(out.parent.iterdir())
    beside = (out.parent / "prism.onnx.data").stat()
    assert beside.st_size > 2**17
    assert beside.st_mode == out.stat().st_mode  # onnx would let nobody but its user read it
    images = photos((64, 96), (96, 64))
    for x, y in zip(run(out, images), run(exported, images), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.usefixtures("traced_before")
def test_nothing_is_written_unless_all_is_well(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "prism.onnx"
    out.write_text("mine")
    real = writing.traced

    def failing(graph: writing.Graph) -> Any:
        if graph.part == "polish":
            raise RuntimeError("no")
        return real(graph)

    monkeypatch.setattr(writing, "traced", failing)
    with pytest.raises(RuntimeError, match="no"):
        export_onnx(out, weights)
    assert [p.name for p in tmp_path.iterdir()] == ["prism.onnx"] and out.read_text() == "mine"


def test_ablations_without_a_form(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no ONNX form"):
        export_onnx(tmp_path / "x.onnx", config=PRESETS["linear-attention"])


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UserError, match="pip install"):
        export_onnx(tmp_path / "x.onnx")


# ---- the command


def prism(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["prism", "export", "onnx", *map(str, words)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
        raise SystemExit(0)
    return int(stop.value.code or 0)


@pytest.mark.usefixtures("traced_before")
def test_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], weights: Path, tmp_path: Path
) -> None:
    out = tmp_path / "prism.onnx"
    assert prism(monkeypatch, "-o", out, "--weights", weights, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["files"] == {str(p): p.stat().st_size for p in tmp_path.iterdir()}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["prism-polish.onnx", "prism.onnx"]


@pytest.mark.parametrize(
    "words, said",
    [
        (["-o", "prism.pt"], "must end in .onnx"),
        (["-o", "."], "must end in .onnx"),
        (["--static", "16", "640"], "32 to 4096 pixels, not 16"),
        (["--static", "480", "640", "--parts"], "has no parts"),
        (["--weights", "nowhere.safetensors"], "nowhere.safetensors"),
        (["--model-config", "linear-attention"], "no ONNX form"),
    ],
)
def test_mistakes_get_one_line(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert prism(monkeypatch, *words) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("prism: ") and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


# ---- the example


def example(*words: object) -> subprocess.CompletedProcess[str]:
    """In a process where neither PyTorch nor this package can be imported."""
    code = (
        "import runpy, sys; sys.modules['torch'] = sys.modules['prism_match'] = None; "
        "path = sys.argv.pop(1); sys.argv[0] = path; runpy.run_path(path, run_name='__main__')"
    )
    command = [sys.executable, "-c", code, str(EXAMPLE), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_example_needs_nothing_of_pytorch(exported: Path, tmp_path: Path) -> None:
    pair = ASSETS / "astronaut0.jpg", ASSETS / "astronaut1.jpg"
    picture, arrays = tmp_path / "matches.png", tmp_path / "matches.npz"
    done = example(*pair, "--model", exported, "-o", picture, "--npz", arrays, "--size", 128)
    assert done.returncode == 0, done.stderr
    assert "polished" in done.stdout and "not polished" not in done.stdout
    assert cv2.imread(str(picture)).shape == (512, 992, 3)
    found = np.load(arrays)
    assert len(found["scores"]) > 0 and (np.diff(found["scores"]) <= 0).all()


def test_mistakes_with_the_example(exported: Path, tmp_path: Path) -> None:
    photo = ASSETS / "astronaut0.jpg"
    cut = tmp_path / "cut.onnx"
    cut.write_bytes(exported.read_bytes()[:20000])
    for words in (
        (photo, tmp_path / "none.jpg", "--model", exported),
        (photo, photo, "--model", tmp_path / "none.onnx"),
        (photo, photo, "--model", cut),
    ):
        done = example(*words, "-o", tmp_path / "matches.png")
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "matches.png").exists()


# ---- the shipped weights


@pytest.mark.slow
def test_real_pairs(tmp_path: Path) -> None:
    out = tmp_path / "prism.onnx"
    export_onnx(out)
    assert opened(out).get_modelmeta().custom_metadata_map["weights_sha256"] == SHIPPED_SHA256
    folder = needs_shared("eval/oxford")
    pairs = [(ASSETS / "astronaut0.jpg", ASSETS / "astronaut1.jpg")]
    pairs += [(folder / name / "1.jpg", folder / name / "2.jpg") for name in ("v_graf", "i_leuven")]
    matcher = Matcher(device="cpu", precision="fp32", size=400, rotate="never", polish=False)
    session = opened(out)
    for pair in pairs:
        prepared = [matcher.prepare(p) for p in pair]
        images = [p.to(torch.device("cpu")).numpy()[None, None] for p in prepared]
        found = matcher.extract_prepared(prepared)
        with torch.inference_mode():
            expected = matcher.model.match(found[0].features, found[1].features)
        assert_same(run(session, images, 0.2), expected, apart=0.01)


# ---- timed


def test_prism_bench_times_the_file(exported: Path, weights: Path, tmp_path: Path) -> None:
    options = SpeedOptions(
        sizes=(96,), precisions=("fp32",), device="cpu", peers=False, repeats=1, batch=1, onnx=exported,
        weights=str(weights),
    )  # fmt: skip
    rows = {row["what"]: row for row in measure(options).summary["rows"]}
    assert rows["onnx"]["milliseconds"] > 0 and rows["onnx"]["note"].startswith("onnxruntime")
    assert rows["onnx"]["matches"] == rows["model"]["matches"]
    (tmp_path / "cut.onnx").write_bytes(exported.read_bytes()[:5000])
    polish = exported.with_name("prism-polish.onnx")
    for path, words in ((tmp_path / "cut.onnx", "cannot be opened"), (polish, "that takes two images")):
        with pytest.raises(UserError, match=words):
            open_onnx(path)


def test_a_file_has_nothing_of_what_this_machine_is_quick_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "mkl_is_slow", lambda: True)
    model = PRISM(PRESETS["tiny"]).eval()
    assert any(
        isinstance(x, products.Pointwise) for x in FastPRISM(model, torch.float32).mpms[0].self_attention.ffn
    )
    layers = list(OnnxRefinement(model, torch.float32).modules())
    assert any(isinstance(x, torch.nn.Linear) for x in layers)
    assert not any(isinstance(x, products.Pointwise) for x in layers)
