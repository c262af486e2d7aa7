"""Weights: the ones that ship in this folder, and files of the user's. Always safetensors.

A file carries two JSON strings in its header: `config`, the model's settings, and `training`, a
summary of how the weights came about."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from prism_match.config import ModelConfig
from prism_match.errors import UserError
from prism_match.files import atomic_path
from prism_match.model.prism import PRISM

SHIPPED = Path(__file__).parent / "prism.safetensors"


@dataclass(frozen=True)
class WeightsInfo:
    """What is known about a file of weights, without loading it."""

    path: Path | None  # None: random weights
    sha256: str | None
    config: ModelConfig
    training: dict[str, Any]

    @property
    def trained(self) -> bool:
        return self.path is not None


def weights_info(weights: str | Path | None = None, config: ModelConfig | None = None) -> WeightsInfo:
    """None: the shipped weights, or random ones while none ship. A given `config` wins over the one in
    the file, and is needed for files that carry none of another shape than the paper's."""
    if weights is None and not SHIPPED.is_file():
        return WeightsInfo(None, None, config or ModelConfig(), {})
    path = SHIPPED if weights is None else Path(weights)
    if not path.is_file():
        raise UserError(f"{path}: no such weights; give the path of a .safetensors file")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
        stored = ModelConfig.from_dict(json.loads(header.get("config", "{}")))
        training = json.loads(header.get("training", "{}"))
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path}: not a file of PRISM weights ({error})") from error
    return WeightsInfo(path, sha256(path), config or stored, training)


def load_model(weights: str | Path | None = None, config: ModelConfig | None = None) -> PRISM:
    """The model in evaluation mode, on the CPU, in float32."""
    return build_model(weights_info(weights, config))


def build_model(info: WeightsInfo) -> PRISM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # random weights, where no others are there, are at least always the same
        model = PRISM(info.config)
    if info.path is not None:
        load_state(model, safetensors.torch.load_file(info.path), str(info.path))
    return model.eval()


def load_state(model: PRISM, state: dict[str, torch.Tensor], name: str) -> None:
    """Into the model, or a line that says which keys do not fit."""
    expected = model.state_dict()
    problems = {
        "missing": sorted(set(expected) - set(state)),
        "unexpected": sorted(set(state) - set(expected)),
        "of another shape": sorted(
            k for k in set(state) & set(expected) if state[k].shape != expected[k].shape
        ),
    }
    if any(problems.values()):
        report = "; ".join(f"{len(keys)} {kind} ({shorten(keys)})" for kind, keys in problems.items() if keys)
        raise UserError(f"{name}: the weights do not fit the model: {report}")
    model.load_state_dict(state)


def save_weights(path: str | Path, model: PRISM, training: dict[str, Any], dtype: torch.dtype) -> None:
    """The model's weights with its config and a summary of its training in the header."""
    state = {
        k: (v.to(dtype) if v.is_floating_point() else v).contiguous().cpu()
        for k, v in model.state_dict().items()
    }
    header = {"config": json.dumps(model.config.to_dict()), "training": json.dumps(training)}
    with atomic_path(path) as temporary:
        safetensors.torch.save_file(state, temporary, metadata=header)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def shorten(keys: list[str], most: int = 3) -> str:
    return ", ".join(keys[:most]) + (", ..." if len(keys) > most else "")
