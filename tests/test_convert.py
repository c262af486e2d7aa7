"""`prism convert`: checkpoints of others give the same matches, or a list of what is wrong and no file."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from prism_match import Matcher, UserError, cli
from prism_match.config import PRESETS
from prism_match.training.checkpoint import Checkpoint, save_checkpoint
from prism_match.training.convert import fit, load_any, parse_rename
from prism_match.weights import build_model, load_model, weights_info
from prism_match.weights.store import export_weights

TINY = PRESETS["tiny"].replace(theta_c=0.0)


@pytest.fixture
def state() -> dict[str, Tensor]:
    return load_model(config=TINY).state_dict()


@pytest.fixture
def convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # noqa: ANN201
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps(TINY.to_dict()))

    def run(checkpoint: Path, *words: str, tiny: bool = True) -> tuple[int, dict, str]:
        extra = ["--config", str(config)] if tiny else []
        out = ["-o", str(tmp_path / "out.safetensors"), "--json"]
        monkeypatch.setattr(sys, "argv", ["prism", "convert", str(checkpoint), *out, *extra, *words])
        with pytest.raises(SystemExit) as stop:
            cli.main()
            raise SystemExit(0)
        captured = capsys.readouterr()
        return int(stop.value.code or 0), json.loads(captured.out or "{}"), captured.err

    return run


def saved(path: Path, content: object) -> Path:
    torch.save(content, path)
    return path


def wrapped(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("key", "prefix"),
    [
        (None, ""),
        (None, "module."),
        ("state_dict", "model."),
        ("state_dict", "matcher."),
        ("model", "model.module._orig_mod."),
        ("weights_of_mine", ""),
    ],
)
def test_any_wrapping_gives_the_same_weights(
    convert, tmp_path: Path, state: dict[str, Tensor], key: str | None, prefix: str
) -> None:
    content = wrapped(state, prefix)
    if key is not None:
        extra = {"epoch": 3, "optimizer_states": [{"state": {}, "lr": 0.1}], "hyper_parameters": {"a": 1}}
        content = {key: content, **extra}
    code, result, _ = convert(saved(tmp_path / "a.ckpt", content), "--precision", "fp32")
    assert code == 0 and result["problems"] == {} and result["tensors"] == len(state)
    model = load_model(tmp_path / "out.safetensors")
    assert model.config == TINY
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert weights_info(tmp_path / "out.safetensors").training.get("epoch") == (3 if key else None)


def test_matches_are_the_same_after_a_round_trip(convert, tmp_path: Path, photo: np.ndarray) -> None:
    first = Matcher(config=TINY, device="cpu", rescale="never", size=160)
    convert(saved(tmp_path / "a.pt", build_model(first.info).state_dict()), "--precision", "fp32")
    second = Matcher(tmp_path / "out.safetensors", device="cpu", rescale="never", size=160)
    a, b = first.match(photo, photo), second.match(photo, photo)
    assert len(a) > 20
    for name in ("keypoints0", "keypoints1", "scores"):
        assert np.array_equal(getattr(a, name), getattr(b, name))


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_precision_on_disk(convert, tmp_path: Path, state: dict[str, Tensor], precision: str) -> None:
    from safetensors.torch import load_file

    assert convert(saved(tmp_path / "a.pt", state), "--precision", precision)[0] == 0
    stored = load_file(tmp_path / "out.safetensors")
    kind = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    assert stored["backbone.coarse.weight"].dtype == kind
    assert {v.dtype for v in stored.values() if v.dim() == 1} == {torch.float32}
    for name, tensor in load_model(tmp_path / "out.safetensors").state_dict().items():
        torch.testing.assert_close(tensor, state[name], rtol=1e-2, atol=1e-4)


def test_safetensors_keep_what_is_known_about_them(convert, tmp_path: Path, state: dict[str, Tensor]) -> None:
    files = export_weights(tmp_path / "a.safetensors", state, TINY, {"pairs": 12}, shard_mib=0.4)
    code, result, _ = convert(files[1], tiny=False)
    assert code == 0 and len(result["files"]) == 1 and result["settings"] == "the checkpoint's"
    info = weights_info(tmp_path / "out.safetensors")
    assert info.config == TINY and info.training == {"pairs": 12}


@pytest.mark.parametrize("ema", [True, False])
def test_our_own_checkpoints(convert, tmp_path: Path, state: dict[str, Tensor], ema: bool) -> None:
    """The averaged weights unless others are asked for."""
    average = {k: v + 1 if v.is_floating_point() else v for k, v in state.items()}
    plain = {"step": 7, "pairs": 56, "elapsed": 120, "skipped": 0, "model": TINY.to_dict(), "training": {}}
    tensors = wrapped(state, "model.") | wrapped(average, "ema.") | {"optimizer.x.step": torch.ones(1)}
    save_checkpoint(tmp_path / "run", 7, Checkpoint(tensors, plain), shard_mib=0.4)
    words = ["--precision", "fp32"] if ema else ["--precision", "fp32", "--no-ema"]
    assert convert(tmp_path / "run", *words, tiny=False)[0] == 0
    expected = average if ema else state
    model = load_model(tmp_path / "out.safetensors")
    assert all(torch.equal(v, expected[k]) for k, v in model.state_dict().items())
    assert weights_info(tmp_path / "out.safetensors").training["minutes"] == 2


def test_renames_and_drops(convert, tmp_path: Path, state: dict[str, Tensor]) -> None:
    theirs = {
        k.replace("backbone.", "net.fpn.").replace("mpms.0.self_attention", "blocks.0.own")
        .replace("mpms.1.self_attention", "blocks.1.own"): v
        for k, v in state.items()
    }  # fmt: skip
    content = {"state_dict": wrapped(theirs, "matcher.") | {"loss.weight": torch.ones(1)}}
    path = saved(tmp_path / "a.ckpt", content)
    renames = ["--rename", "net.fpn=backbone", "--rename", "blocks.*.own=mpms.*.self_attention"]
    assert convert(path, *renames)[1]["problems"] == {"unexpected": ["loss.weight"]}
    code, result, _ = convert(path, *renames, "--drop", "loss", "--precision", "fp32")
    assert code == 0 and result["dropped"] == ["loss.weight"]
    model = load_model(tmp_path / "out.safetensors")
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_renames_look_at_whole_words(state: dict[str, Tensor]) -> None:
    tensors = {"net.a": torch.ones(1), "net2.a": torch.ones(1), "a.net.b": torch.ones(1)}
    found = fit(tensors, TINY, [("net", "backbone")])
    assert set(found.state) == {"backbone.a", "net2.a", "a.net.b"}
    assert set(fit(tensors, TINY, [("net.", "")]).state) == {"a", "net2.a", "a.net.b"}


def test_every_misfit_is_listed_and_nothing_written(
    convert, tmp_path: Path, state: dict[str, Tensor]
) -> None:
    good = saved(tmp_path / "good.pt", state)
    assert convert(good)[0] == 0
    before = (tmp_path / "out.safetensors").read_bytes()
    broken = dict(state)
    broken["model.extra"] = broken.pop("backbone.coarse.weight")
    broken["backbone.lateral2.weight"] = torch.zeros(3, 4)
    broken["module.backbone.lateral4.weight"] = state["backbone.lateral4.weight"]
    bias = next(k for k in state if k.endswith(".bias"))
    broken[bias] = torch.full_like(state[bias], float("nan"))
    code, result, err = convert(saved(tmp_path / "bad.pt", broken))
    shape = list(state["backbone.lateral2.weight"].shape)
    assert code == 2 and result["files"] == []
    assert result["problems"] == {
        "missing": ["backbone.coarse.weight"],
        "unexpected": ["model.extra"],
        "of another shape": [f"backbone.lateral2.weight: [3, 4] instead of {shape}"],
        "there more than once": [
            "backbone.lateral4.weight: backbone.lateral4.weight, module.backbone.lateral4.weight"
        ],
        "not finite in this precision": [bias],
    }
    assert err.count("\n") == 1 and "1 missing, 1 unexpected, 1 of another shape" in err
    assert (tmp_path / "out.safetensors").read_bytes() == before


def test_numbers_too_large_for_16_bit(convert, tmp_path: Path, state: dict[str, Tensor]) -> None:
    state["backbone.coarse.weight"][0, 0] = 1e5
    path = saved(tmp_path / "a.pt", state)
    assert convert(path)[1]["problems"] == {"not finite in this precision": ["backbone.coarse.weight"]}
    assert convert(path, "--precision", "bf16")[0] == 0


class Malicious:
    """Makes a folder when it is unpickled."""

    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.trace),)


def test_a_pickle_with_code_is_refused(convert, tmp_path: Path, state: dict[str, Tensor]) -> None:
    trace = tmp_path / "trace"
    (tmp_path / "raw.pt").write_bytes(pickle.dumps({"state_dict": Malicious(trace)}))
    zipped = saved(tmp_path / "a.ckpt", {"state_dict": state, "x": Malicious(trace)})
    for path, words in ((zipped, ["refused", "mkdir"]), (tmp_path / "raw.pt", ["not a checkpoint"])):
        code, _, err = convert(path)
        assert code == 2 and err.count("\n") == 1 and all(word in err for word in words)
    assert not trace.exists() and not (tmp_path / "out.safetensors").exists()


def test_mistakes_give_one_line(convert, tmp_path: Path, state: dict[str, Tensor]) -> None:
    good = saved(tmp_path / "good.pt", state)
    junk, empty = tmp_path / "junk.pt", tmp_path / "empty.pt"
    junk.write_bytes(b"nonsense")
    empty.touch()
    (tmp_path / "junk.safetensors").write_bytes(b"nonsense")
    (tmp_path / "folder").mkdir()
    cases: list[tuple[Path, list[str], str]] = [
        (tmp_path / "none.ckpt", [], "no such checkpoint"),
        (tmp_path / "none.safetensors", [], "no such checkpoint"),
        (tmp_path / "folder", [], "no checkpoint here"),
        (junk, [], "not a checkpoint that PyTorch can read"),
        (empty, [], "not a checkpoint that PyTorch can read"),
        (tmp_path / "junk.safetensors", [], "not a file of PRISM weights"),
        (saved(tmp_path / "list.pt", [1]), [], "holds a list"),
        (saved(tmp_path / "numbers.pt", {"epoch": 3}), [], "no state_dict in it; it holds epoch"),
        (saved(tmp_path / "two.pt", {"a": state, "b": state}), [], "it holds a, b"),
        (good, ["--rename", "backbone"], "OLD=NEW"),
        (good, ["--rename", "=backbone"], "OLD=NEW"),
        (good, ["--rename", "fpn=backbone"], "no name of a tensor begins with this"),
        (good, ["--drop", "loss"], "no name of a tensor begins with this"),
        (good, ["-o", str(tmp_path / "out.pt")], "must end in .safetensors"),
    ]
    for path, words, reason in cases:
        code, _, err = convert(path, *words)
        assert code == 2 and err.count("\n") == 1 and reason in err, (path, words, err)
    assert not (tmp_path / "out.safetensors").exists()
    with pytest.raises(UserError, match="OLD=NEW"):
        parse_rename("a=b.*")
    assert load_any(good).config == {}


def test_the_report_for_people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, state) -> None:
    path = saved(tmp_path / "a.pt", state | {f"extra.{n:02d}": torch.ones(1) for n in range(30)})
    out = tmp_path / "out.safetensors"
    monkeypatch.setattr(sys, "argv", ["prism", "convert", str(path), "-o", str(out), "--config", "tiny"])
    with pytest.raises(SystemExit):
        cli.main()
    text = capsys.readouterr().out
    assert "30 unexpected\n  extra.00\n" in text and "... and 10 more; --json" in text
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--drop", "extra"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code and "dropped     30 tensors" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["prism", "info", str(out), "--json"])
    with pytest.raises(SystemExit):
        cli.main()
    assert json.loads(capsys.readouterr().out)["training"] == {"checkpoint": "a.pt"}
