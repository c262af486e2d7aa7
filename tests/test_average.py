"""`prism average`."""

from __future__ import annotations

from pathlib import Path

import torch
from typer.testing import CliRunner

from prism_match.cli import app
from prism_match.config import PRESETS
from prism_match.model.prism import PRISM
from prism_match.weights import load_model, weights_info
from prism_match.weights.store import export_weights, write_tensors


def weights(path: Path, seed: int, preset: str = "tiny") -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    state = PRISM(PRESETS[preset]).state_dict()
    export_weights(path, state, PRESETS[preset], {}, dtype=torch.float32)
    return state


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["average", *map(str, words)])
    return result.exit_code, f"{result.output}{result.exception or ''}"


def test_the_mean_of_weights_is_weights(tmp_path: Path) -> None:
    files = [tmp_path / f"{n}.safetensors" for n in range(3)]
    states = [weights(file, n) for n, file in enumerate(files)]
    out = tmp_path / "new" / "mean.safetensors"
    assert run(*files, "-o", out)[0] == 0
    found = load_model(out).state_dict()
    for name, tensor in found.items():
        mean = torch.stack([state[name].double() for state in states]).mean(0)
        torch.testing.assert_close(tensor.double(), mean, rtol=1e-3, atol=1e-4)
    assert weights_info(out).training == {"mean_of": [file.name for file in files]}


def test_what_has_no_mean_is_told_and_nothing_written(tmp_path: Path) -> None:
    one, other, out = (tmp_path / f"{name}.safetensors" for name in ("one", "other", "out"))
    weights(one, 0)
    torch.manual_seed(0)
    wider = PRESETS["tiny"].replace(fine_dim=32)
    export_weights(other, PRISM(wider).state_dict(), wider, {})
    broken = tmp_path / "broken.safetensors"
    state = PRISM(PRESETS["tiny"]).state_dict()
    export_weights(
        broken, {k: v * torch.nan if v.dim() > 1 else v for k, v in state.items()}, PRESETS["tiny"], {}
    )
    for words, told in (
        ((one, other, "-o", out), "fine_dim is 32 there and 16 here"),
        ((one, "-o", out), "at least two"),
        ((one, tmp_path / "nothing.safetensors", "-o", out), "no such weights"),
        ((one, one, "-o", tmp_path / "out.pt"), "must end in .safetensors"),
        ((one, broken, "-o", out), "not finite"),
    ):
        code, text = run(*words)
        assert code != 0 and told in text
    assert not out.exists()


def test_settings_that_are_none_are_told(tmp_path: Path) -> None:
    one, other, out = (tmp_path / f"{name}.safetensors" for name in ("one", "other", "out"))
    state = weights(one, 0)
    write_tensors(other, state, {"config": "true"})
    for files in ((one, other), (other, one)):
        code, text = run(*files, "-o", out)
        assert code != 0 and "other.safetensors: its settings are not those of a PRISM model" in text


def test_pieces_that_do_not_make_a_tensor_are_told(tmp_path: Path) -> None:
    one, other, out = (tmp_path / f"{name}.safetensors" for name in ("one", "other", "out"))
    weights(one, 0)
    for piece in ("a//part", "a//part00000//", "a//part00000//2x3", "a//part00000//many", "a//part//part"):
        write_tensors(other, {piece: torch.zeros(5)}, {"config": "{}"})
        code, text = run(one, other, "-o", out)
        assert code != 0 and "other.safetensors: not a file of PRISM weights" in text
