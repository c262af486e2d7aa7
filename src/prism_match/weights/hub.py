"""Weights from the Hugging Face Hub, fetched only when they are asked for by name:

    hf:OWNER/REPO[@REVISION][:FILE]

The files go to the Hub's usual cache (HF_HOME), and are found there again without a network."""

from __future__ import annotations

import re
from pathlib import Path

from prism_match.errors import UserError
from prism_match.weights.store import SHARD, find_files

NAME = re.compile(r"hf:(?P<repo>[^/@:]+/[^/@:]+)(@(?P<revision>[^:]+))?(:(?P<file>.+\.safetensors))?")


def locate(weights: str | Path) -> Path:
    """The path of weights: a local one as it is, or where those of the Hub have been put."""
    path = Path(weights)
    if not str(weights).startswith("hf:") or path.exists() or find_files(path):
        return path
    return fetch(str(weights))


def fetch(name: str) -> Path:
    """Into the Hub's cache. Shards come with each other, and are named like the file they make up."""
    found = NAME.fullmatch(name)
    if not found:
        raise UserError(f"{name}: weights on the Hub are written hf:OWNER/REPO[@REVISION][:FILE.safetensors]")
    file = found["file"]
    stem = "*" if file is None else SHARD.sub("", file.removesuffix(".safetensors"))
    patterns = [f"{stem}.safetensors", f"{stem}-?????-of-?????.safetensors"]
    folder = download(name, found["repo"], found["revision"], patterns)
    if file is not None:
        if not find_files(folder / file):
            raise UserError(f"{name}: the repository has no such file")
        return folder / file
    models = sorted({SHARD.sub("", path.stem) for path in folder.glob("*.safetensors")})
    if len(models) != 1:
        choice = f"say which, as {name}:FILE.safetensors: {', '.join(models)}"
        raise UserError(f"{name}: {choice if models else 'the repository has no .safetensors file'}")
    return folder / f"{models[0]}.safetensors"


def download(name: str, repo: str, revision: str | None, patterns: list[str]) -> Path:
    """The folder of the snapshot, with at least the files that fit a pattern and could be had."""
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise UserError(f'{name}: needs huggingface_hub: pip install "prism-match[hub]"') from error
    try:
        return Path(huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=patterns))
    except errors.RepositoryNotFoundError as error:
        reason = "no such repository on the Hugging Face Hub, or a private one (then log in: hf auth login)"
        raise UserError(f"{name}: {reason}") from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{name}: the repository has no revision {revision!r}") from error
    except errors.LocalEntryNotFoundError as error:
        raise UserError(f"{name}: not in the cache, and the Hugging Face Hub cannot be reached") from error
    except Exception as error:  # what its HTTP client raises differs by version
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"{name}: the Hugging Face Hub refused ({lines[0]})") from error
