"""Weights: the ones that ship in this folder, files of the user's, and the Hugging Face Hub's. Always
safetensors."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prism_match.config import ModelConfig
from prism_match.errors import UserError
from prism_match.model.arithmetic import own_arithmetic
from prism_match.model.prism import PRISM
from prism_match.subpixel import Subpixel
from prism_match.weights.hub import locate
from prism_match.weights.store import read_header, read_weights

SHIPPED = Path(__file__).parent / "prism.safetensors"
SUBPIXEL = Path(__file__).parent / "subpixel.safetensors"  # of the network that polishes
MODEL_CARD = Path(__file__).parent / "README.md"  # of the shipped weights
SUBPIXEL_SHA256 = "1b19448bddb9369a26e22764dc6b84db4c3656d0735b2ec88376228fc788a3cb"
SHIPPED_SHA256 = "3a821549bb055db7c801e1fddde01c393677b436d45e9aebdeea16aa1522f026"


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
    """weights: a .safetensors file, or hf:OWNER/REPO[@REVISION][:FILE]; None: the shipped ones, or random
    ones for a `config` that they do not fit. A given `config` wins over the one in the file, and is needed
    for files that carry none of another shape than the paper's."""
    if weights is None and config is not None and not config.fits(ModelConfig()):
        return WeightsInfo(None, None, config, {})
    path = SHIPPED if weights is None else locate(weights)
    files, header = read_header(path)
    try:
        stored = ModelConfig.from_dict(header["config"])
    except ValueError as error:
        raise UserError(f"{path}: not a file of PRISM weights ({error})") from error
    digest = sha256(files)
    if path == SHIPPED and digest != SHIPPED_SHA256:
        raise UserError(f"{path}: the shipped weights are damaged (sha256 {digest[:12]}...); install again")
    return WeightsInfo(path, digest, config or stored, header["training"])


def load_model(weights: str | Path | None = None, config: ModelConfig | None = None) -> PRISM:
    """The model in evaluation mode, on the CPU, in float32."""
    return build_model(weights_info(weights, config))


def build_model(info: WeightsInfo) -> PRISM:
    with torch.random.fork_rng(devices=[]), own_arithmetic():
        torch.manual_seed(0)  # random weights, where no others are there, are at least always the same
        model = PRISM(info.config)
    if info.path is not None:
        load_state(model, read_weights(info.path)[0], str(info.path))
    return model.eval()


def load_subpixel() -> Subpixel:
    """The shipped network that makes matches exact, on the CPU."""
    if (digest := sha256([SUBPIXEL])) != SUBPIXEL_SHA256:
        raise UserError(
            f"{SUBPIXEL}: the shipped weights are damaged (sha256 {digest[:12]}...); install again"
        )
    with own_arithmetic():
        network = Subpixel()
    load_state(network, read_weights(SUBPIXEL)[0], str(SUBPIXEL))
    return network.eval()


def load_state(model: nn.Module, state: dict[str, torch.Tensor], name: str) -> None:
    """Into the model, or a line that says which keys do not fit."""
    if problems := misfits(state, model.state_dict()):
        report = "; ".join(f"{len(keys)} {kind} ({shorten(keys)})" for kind, keys in problems.items())
        raise UserError(f"{name}: the weights do not fit the model: {report}")
    if broken := sorted(k for k, v in state.items() if not v.isfinite().all()):
        raise UserError(f"{name}: {len(broken)} of the weights are no numbers ({shorten(broken)})")
    model.load_state_dict(state)


def misfits(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, list[str]]:
    """The keys that are wrong, by what is wrong with them; empty if the weights fit."""
    problems = {
        "missing": sorted(set(expected) - set(state)),
        "unexpected": sorted(set(state) - set(expected)),
        "of another shape": sorted(
            k for k in set(state) & set(expected) if state[k].shape != expected[k].shape
        ),
    }
    return {kind: keys for kind, keys in problems.items() if keys}


def sha256(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def shorten(keys: list[str], most: int = 3) -> str:
    return ", ".join(keys[:most]) + (", ..." if len(keys) > most else "")
