"""Checkpoints that survive a full disk and a killed process, and the weights that a run hands over.

A checkpoint is a folder `step-00001200` with `state.json` and safetensors files. It is written under
another name, flushed to the disk and renamed, and only then are older ones removed; so the newest folder of
that name is always whole. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as serialise
from torch import Tensor

from prism_match.config import ModelConfig
from prism_match.errors import UserError
from prism_match.files import atomic_path

MIB = 2**20
STATE = ("step", "pairs", "elapsed", "skipped", "model", "training")  # what state.json holds
PART = "//part"  # separates the name of a tensor from the number of its piece


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name ("model.", "ema.", "optimizer." and the parameter's name) and plain values."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]

    def group(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix` and a dot, without it."""
        return {k[len(prefix) + 1 :]: v for k, v in self.tensors.items() if k.startswith(f"{prefix}.")}


def save_checkpoint(run: Path, step: int, checkpoint: Checkpoint, shard_mib: float | None = None) -> Path:
    """Writes `run/step-...` and removes the ones before it. A UserError leaves those as they were."""
    folder = run / f"step-{step:08d}"
    temporary = run / f".step-{step:08d}.{os.getpid()}.tmp"
    try:
        temporary.mkdir(parents=True)
        for i, shard in enumerate(shards(checkpoint.tensors, shard_mib)):
            write_tensors(temporary / f"tensors-{i:05d}.safetensors", shard)
        write_flushed(temporary / "state.json", json.dumps(checkpoint.state, indent=1).encode())
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
    if not (path / "state.json").is_file():
        found = checkpoints(path)
        if not found:
            raise UserError(f"{path}: no checkpoint here to resume from")
        path = found[-1]
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if not isinstance(state, dict) or not state.keys() >= set(STATE):
            raise ValueError("state.json lacks what a checkpoint has")
        pieces: dict[str, Tensor] = {}
        for file in sorted(path.glob("*.safetensors")):
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


def export_weights(
    path: Path,
    weights: dict[str, Tensor],
    config: ModelConfig,
    training: dict[str, Any],
    shard_mib: float | None = None,
) -> list[Path]:
    """The model to use: matrices and kernels in 16 bit, the rest (norms, biases, statistics, frequencies)
    in 32, with "config" and "training" as JSON in the metadata. With `shard_mib`, `path` becomes several
    files NAME-00001-of-00004.safetensors; `load_weights` takes either."""
    half = {
        k: v.detach().cpu().to(torch.float16 if v.dim() > 1 and not k.endswith("rotary.b") else v.dtype)
        for k, v in weights.items()
    }
    metadata = {"config": json.dumps(config.to_dict()), "training": json.dumps(training)}
    parts = list(shards(half, shard_mib))
    names = [path] if len(parts) == 1 else [
        path.with_name(f"{path.stem}-{i + 1:05d}-of-{len(parts):05d}{path.suffix}") for i in range(len(parts))
    ]  # fmt: skip
    for name, part in zip(names, parts, strict=True):
        with atomic_path(name) as temporary:
            write_tensors(temporary, part, metadata)
    return names


def load_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights as float32 and the model's settings, from a file of `export_weights`, the name its shards were
    made from, any one of them, or the folder of a run (its averaged weights)."""
    if path.is_dir():
        checkpoint = load_checkpoint(path)
        return checkpoint.group("ema"), checkpoint.state["model"]
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)
    files = sorted(path.parent.glob(f"{stem}-?????-of-?????{path.suffix}"))
    if path.is_file() and path.stem == stem:
        files = [path]
    if not files:
        raise UserError(f"{path}: no such weights")
    pieces: dict[str, Tensor] = {}
    try:
        for file in files:
            pieces.update(load_file(file))
        with safe_open(files[0], "pt") as f:
            config = json.loads((f.metadata() or {})["config"])
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(f"{path}: not weights of this model ({error})") from error
    expected = re.search(r"-of-(\d{5})$", files[0].stem)
    if expected and len(files) != int(expected[1]):
        raise UserError(f"{path}: {len(files)} of {int(expected[1])} parts are there")
    return {k: v.float() if v.is_floating_point() else v for k, v in joined(pieces).items()}, config


def shards(tensors: dict[str, Tensor], mib: float | None) -> Iterable[dict[str, Tensor]]:
    """The tensors in groups of at most `mib` MiB as stored; larger ones are cut into pieces first."""
    if not mib:
        yield tensors
        return
    limit = int(mib * MIB) - MIB // 4  # room for the header
    shard: dict[str, Tensor] = {}
    used = 0
    for name, piece in _pieces(tensors, max(limit, 1)):
        size = piece.numel() * piece.element_size()
        if shard and used + size > limit:
            yield shard
            shard, used = {}, 0
        shard[name] = piece
        used += size
    yield shard


def _pieces(tensors: dict[str, Tensor], limit: int) -> Iterable[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        if tensor.numel() * tensor.element_size() <= limit:
            yield name, tensor
            continue
        shape = "x".join(map(str, tensor.shape))
        for i, piece in enumerate(tensor.reshape(-1).split(limit // tensor.element_size())):
            yield f"{name}{PART}{i:05d}//{shape}", piece


def joined(pieces: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undoes the cutting of `shards`."""
    whole = {k: v for k, v in pieces.items() if PART not in k}
    cut: dict[tuple[str, str], list[Tensor]] = {}
    for key in sorted(k for k in pieces if PART in k):
        name, rest = key.split(PART)
        cut.setdefault((name, rest.split("//")[1]), []).append(pieces[key])
    for (name, shape), parts in cut.items():
        whole[name] = torch.cat(parts).view(*map(int, shape.split("x")))
    return whole


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    write_flushed(path, serialise({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, metadata))


def write_flushed(path: Path, content: bytes) -> None:
    with open(path, "wb") as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())


def flush_folder(folder: Path) -> None:
    """Makes a rename in `folder` last through a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
