"""Checkpoints of other makes as weights of ours: PyTorch Lightning's, plain state dictionaries, and those of
our own trainer.

The names of their tensors are matched with ours in three steps, each of which looks at whole words between
dots: those under a dropped prefix go, given prefixes are replaced, and what wrappers put in front (DDP
`module.`, Lightning `model.` or `matcher.`, torch.compile `_orig_mod.`) is taken off."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prism_match.config import ModelConfig
from prism_match.errors import UserError
from prism_match.model.prism import PRISM
from prism_match.weights import misfits, shorten
from prism_match.weights.hub import locate
from prism_match.weights.store import find_files, read_weights, rounded

WRAPPER = r"(?:module|model|matcher|_orig_mod)[.]"
STATES = ("state_dict", "model_state_dict", "model")  # where checkpoints keep their tensors


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint holds, under its own names."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]  # the model's settings; empty: it does not say
    training: dict[str, Any]  # what it says about how it came about


@dataclass(frozen=True)
class Fit:
    """A checkpoint's tensors under our names, and what is wrong with them."""

    state: dict[str, Tensor]
    tensors: int  # that the model has
    dropped: list[str]
    problems: dict[str, list[str]]  # by kind, one line each; empty: complete


def load_any(source: str | Path, ema: bool = True) -> Loaded:
    """A run or checkpoint of our trainer (its averaged weights, or without `ema` the last ones), safetensors,
    or what torch.save wrote; of that only tensors and plain values are read, never objects."""
    path = locate(source)
    if path.is_dir():
        return load_run(path, ema)
    if path.suffix == ".safetensors" and find_files(path):
        tensors, header = read_weights(path)
        return Loaded(tensors, header["config"], header["training"])
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint")
    content = load_plain(path)
    counts = {k: v for k, v in content.items() if k in ("epoch", "global_step") and isinstance(v, int)}
    return Loaded(find_tensors(path, content), {}, {"checkpoint": path.name, **counts})


def load_run(path: Path, ema: bool) -> Loaded:
    from prism_match.training.checkpoint import load_checkpoint

    checkpoint = load_checkpoint(path)
    state = checkpoint.state
    training = {
        "step": state["step"], "pairs": state["pairs"], "minutes": round(state["elapsed"] / 60, 2),
        "settings": state["training"],
    }  # fmt: skip
    return Loaded(checkpoint.group("ema" if ema else "model"), state["model"], training)


def load_plain(path: Path) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken pickle can fail in any way
        if thing := re.search(r"GLOBAL ([\w.]+)", str(error)):
            reason = f"refused: it holds {thing[1]}, which could run code; save its state_dict alone"
        else:
            reason = f"not a checkpoint that PyTorch can read ({type(error).__name__})"
        raise UserError(f"{path}: {reason}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds a {type(content).__name__}, not a dictionary of tensors")
    return content


def find_tensors(path: Path, content: dict[str, Any]) -> dict[str, Tensor]:
    """The state dictionary itself, or the one under a usual key, or the only one under any key."""

    def is_state(value: Any) -> bool:
        return isinstance(value, dict) and bool(value) and all(isinstance(v, Tensor) for v in value.values())

    if is_state(content):
        return content
    states = {str(k): v for k, v in content.items() if is_state(v)}
    usual = [states[k] for k in STATES if k in states] or list(states.values() if len(states) == 1 else ())
    if not usual:
        held = shorten(sorted(map(str, states or content)), 8)
        raise UserError(f"{path}: no state_dict in it; it holds {held or 'nothing'}")
    return usual[0]


def fit(
    tensors: dict[str, Tensor],
    config: ModelConfig,
    renames: Sequence[tuple[str, str]] = (),
    drops: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
) -> Fit:
    """What becomes of the tensors in a model of that config, stored in `dtype`.

    renames: (old, new) beginnings of names, the first that fits counts; a `*` in `old` is any one word, and
    the first `*` in `new` is what the first in `old` was. drops: beginnings of names to leave out."""
    for text in [*(old for old, _ in renames), *drops]:
        if not any(beginning(text).match(name) for name in tensors):
            first = min(tensors, default="none")
            raise UserError(f"{text}: no name of a tensor begins with this; the first is {first}")
    dropped = sorted(name for name in tensors if any(beginning(text).match(name) for text in drops))
    sources: dict[str, list[str]] = {}  # our name -> the checkpoint's
    for name in sorted(tensors.keys() - set(dropped)):
        sources.setdefault(our_name(name, renames), []).append(name)
    state = {ours: tensors[theirs[0]] for ours, theirs in sources.items()}
    with torch.device("meta"):
        expected = PRISM(config).state_dict()
    problems = misfits(state, expected)
    if "unexpected" in problems:
        problems["unexpected"] = [sources[ours][0] for ours in problems["unexpected"]]
    if "of another shape" in problems:
        problems["of another shape"] = [
            f"{k}: {list(state[k].shape)} instead of {list(expected[k].shape)}"
            for k in problems["of another shape"]
        ]
    twice = [f"{ours}: {', '.join(theirs)}" for ours, theirs in sources.items() if len(theirs) > 1]
    broken = [k for k, v in rounded(state, dtype).items() if not v.isfinite().all()]
    found = problems | {"there more than once": twice, "not finite in this precision": broken}
    return Fit(state, len(expected), dropped, {kind: lines for kind, lines in found.items() if lines})


def beginning(words: str) -> re.Pattern[str]:
    """Fits names that begin with these words, be it after those of wrappers."""
    parts = (r"([^.]+)" if word == "*" else re.escape(word) for word in words.strip(".").split("."))
    return re.compile(rf"(?:{WRAPPER})*?{'[.]'.join(parts)}(?:[.]|$)")


def our_name(name: str, renames: Sequence[tuple[str, str]]) -> str:
    for old, new in renames:
        if found := beginning(old).match(name):
            for word in found.groups():
                new = new.replace("*", word, 1)
            name = f"{new.strip('.')}.{name[found.end() :]}".strip(".")
            break
    return re.sub(rf"^(?:{WRAPPER})+", "", name)


def parse_rename(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not equals or not old.strip(".") or new.count("*") > old.count("*"):
        raise UserError(f"--rename {text}: must be OLD=NEW, two beginnings of names; NEW may be empty")
    return old, new
