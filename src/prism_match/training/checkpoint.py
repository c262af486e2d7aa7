"""Checkpoints that survive a full disk and a killed process.

A checkpoint is a folder `step-00001200` with `state.json` and safetensors files. It is written under
another name, flushed to the disk and renamed, and only then are older ones removed; so the newest folder of
that name is always whole. Nothing is pickled.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from prism_match.config import ModelConfig, parse_json
from prism_match.errors import UserError
from prism_match.files import temporary_beside
from prism_match.weights.hub import locate
from prism_match.weights.store import joined, read_weights, shards, write_flushed, write_tensors

# What state.json holds.
STATE: dict[str, Any] = {
    "step": int,
    "pairs": int,
    "elapsed": (int, float),
    "skipped": int,
    "model": dict,
    "training": dict,
}


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name ("model.", "ema.", "optimizer." and the parameter's name; "difficulty.") and plain
    values."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]

    def group(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix` and a dot, without it."""
        return {k[len(prefix) + 1 :]: v for k, v in self.tensors.items() if k.startswith(f"{prefix}.")}

    def weights(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The averaged weights and the model's settings."""
        return self.group("ema"), self.state["model"]


def save_checkpoint(run: Path, step: int, checkpoint: Checkpoint, shard_mib: float | None = None) -> Path:
    """Writes `run/step-...` and removes the ones before it. A UserError leaves those as they were."""
    folder = run / f"step-{step:08d}"
    temporary = temporary_beside(folder)
    try:
        temporary.mkdir(parents=True)
        files = 0
        for files, shard in enumerate(shards(checkpoint.tensors, shard_mib), 1):
            write_tensors(temporary / f"tensors-{files - 1:05d}.safetensors", shard)
        state = {**checkpoint.state, "files": files}
        write_flushed(temporary / "state.json", json.dumps(state, indent=1).encode())
        if folder.exists():  # the same step saved twice: there is nothing new in it
            shutil.rmtree(temporary)
        else:
            temporary.rename(folder)
            flush_folder(run)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error}); the one before is kept") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for old in checkpoints(run):
        if old != folder:
            shutil.rmtree(old, ignore_errors=True)
    return folder


def checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = run.iterdir() if run.is_dir() else ()
    return sorted(p for p in found if re.fullmatch(r"step-\d{8,}", p.name) and p.is_dir())


def load_checkpoint(path: Path) -> Checkpoint:
    """From a checkpoint's folder, or the newest one of a run's folder."""
    if (path / "state.json").is_file():
        return _read(path)
    while True:
        found = checkpoints(path)
        if not found:
            raise UserError(f"{path}: no checkpoint here")
        try:
            return _read(found[-1])
        except UserError:
            if found[-1].exists():
                raise  # else the run, which goes on, has a newer one


def _read(path: Path) -> Checkpoint:
    try:
        state = parse_json((path / "state.json").read_text(encoding="utf-8"))
        if not isinstance(state, dict) or not state.keys() >= STATE.keys():
            raise ValueError("state.json lacks what a checkpoint has")
        for key, kind in STATE.items():
            if (
                not isinstance(state[key], kind)
                or state[key] in (math.inf, -math.inf)
                or state[key] != state[key]
            ):
                raise ValueError(f"{key} in state.json is {state[key]!r:.40}")
        files = sorted(path.glob("*.safetensors"))
        count = state.pop("files", len(files))  # older ones do not tell
        if len(files) != count:
            raise ValueError(f"{len(files)} of {count} files are there")
        pieces: dict[str, Tensor] = {}
        for file in files:
            pieces.update(load_file(file))
        return Checkpoint(joined(pieces), state)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{path}: damaged checkpoint ({error})") from error


def check_architecture(path: Path, theirs: dict[str, Any], ours: ModelConfig) -> None:
    """One line that names every setting in which a checkpoint's model differs from ours."""
    mine = json.loads(json.dumps(ours.to_dict()))
    differing = [
        f"{k} is {theirs.get(k)!r} there and {mine.get(k)!r} here"
        for k in sorted(theirs.keys() | mine.keys())
        if theirs.get(k) != mine.get(k)
    ]
    if differing:
        raise UserError(f"{path}: checkpoint of another architecture: {', '.join(differing)}")


def load_weights(source: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights as float32 and the model's settings: from a file or shards of `export_weights`, of the Hub, or
    the folder of a run (its averaged weights)."""
    path = locate(source)
    if path.is_dir():
        return load_checkpoint(path).weights()
    weights, header = read_weights(path)
    if not isinstance(header["config"], dict):
        raise UserError(f"{path}: its settings are not those of a PRISM model")
    return {k: v.float() if v.is_floating_point() else v for k, v in weights.items()}, header["config"]


def flush_folder(folder: Path) -> None:
    """Makes a rename in `folder` last through a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
