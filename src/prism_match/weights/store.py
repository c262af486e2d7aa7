"""Tensors on disk: one safetensors file, or several of a limited size.

A file of weights carries two JSON strings in its header: `config`, the model's settings, and `training`, a
summary of how the weights came about."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from torch import Tensor

from prism_match.config import ModelConfig, parse_json
from prism_match.errors import UserError
from prism_match.files import atomic_path

MIB = 2**20
PART = "//part"  # separates the name of a tensor from the number of its piece
SHARD = re.compile(r"-\d{5}-of-(\d{5})$")  # the end of a shard's name


def export_weights(
    path: Path,
    weights: dict[str, Tensor],
    config: ModelConfig,
    training: dict[str, Any],
    shard_mib: float | None = None,
    dtype: torch.dtype = torch.float16,
) -> list[Path]:
    """The model to use, as `rounded` has it, with "config" and "training" as JSON in the metadata. With
    `shard_mib`, `path` becomes several files NAME-00001-of-00004.safetensors; whatever reads weights takes
    either."""
    metadata = {"config": json.dumps(config.to_dict()), "training": json.dumps(training)}
    parts = list(shards(rounded(weights, dtype), shard_mib))
    names = [path] if len(parts) == 1 else [
        path.with_name(f"{path.stem}-{i + 1:05d}-of-{len(parts):05d}{path.suffix}") for i in range(len(parts))
    ]  # fmt: skip
    old = find_files(path)
    for name, part in zip(names, parts, strict=True):
        with atomic_path(name) as temporary:
            write_tensors(temporary, part, metadata)
    for file in set(old) - set(names):  # of another number of shards: never to be mixed up with these
        file.unlink()
    return names


def rounded(weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """On the CPU: matrices and kernels in `dtype`, the rest (norms, biases, statistics, frequencies) in 32
    bit, since they are few and matter; counters as they are."""

    def kind(name: str, tensor: Tensor) -> torch.dtype:
        if not tensor.is_floating_point():
            return tensor.dtype
        return dtype if tensor.dim() > 1 and not name.endswith("rotary.b") else torch.float32

    return {k: v.detach().cpu().to(kind(k, v)) for k, v in weights.items()}


def find_files(path: Path) -> list[Path]:
    """The file itself, or the shards that were made under its name, or those that one of them belongs to."""
    stem = SHARD.sub("", path.stem)
    shards_there = sorted(path.parent.glob(f"{stem}-?????-of-?????{path.suffix}"))
    return [path] if path.is_file() and path.stem == stem else shards_there


def read_header(path: Path) -> tuple[list[Path], dict[str, Any]]:
    """The files of weights and their `config` and `training`, each {} where the file has none."""
    files = find_files(path)
    if not files:
        raise UserError(f"{path}: no such weights; give the path of a .safetensors file, or hf:OWNER/REPO")
    expected = SHARD.search(files[0].stem)
    if expected and len(files) != int(expected[1]):
        raise UserError(f"{path}: {len(files)} of {int(expected[1])} parts are there")
    try:
        with safe_open(files[0], "pt") as file:
            metadata = file.metadata() or {}
        return files, {key: parse_json(metadata.get(key, "{}")) for key in ("config", "training")}
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{path}: not a file of PRISM weights ({error})") from error


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors as they are stored, and the header."""
    files, header = read_header(path)
    pieces: dict[str, Tensor] = {}
    kinds = set()
    try:
        for name in files:
            with safe_open(name, "pt") as file:
                kinds.add(json.dumps(file.metadata(), sort_keys=True))
                pieces |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        if len(kinds) > 1:  # whoever wrote them was ended between two, or is at it
            raise ValueError("its parts are of different weights")
        return joined(pieces), header
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{path}: not a file of PRISM weights ({error})") from error


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
    """Undoes the cutting of `shards`. Raises ValueError where pieces are none, or are missing."""
    whole = {k: v for k, v in pieces.items() if PART not in k}
    cut: dict[tuple[str, str], list[Tensor]] = {}
    for key in sorted(k for k in pieces if PART in k):
        name, _, rest = key.partition(PART)
        cut.setdefault((name, rest.partition("//")[2]), []).append(pieces[key])
    for (name, shape), parts in cut.items():
        try:
            whole[name] = torch.cat(parts).view(*map(int, shape.split("x")))
        except RuntimeError as error:
            raise ValueError(f"{name}: its pieces are not {shape}") from error
    return whole


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    write_flushed(path, serialise({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, metadata))


def write_flushed(path: Path, content: bytes) -> None:
    with open(path, "wb") as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())
