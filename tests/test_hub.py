"""Weights of the Hugging Face Hub: found in its cache without a network, fetched only when asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from prism_match import Matcher, UserError
from prism_match.config import PRESETS
from prism_match.training.checkpoint import load_weights
from prism_match.weights import load_model, weights_info
from prism_match.weights.store import export_weights

TINY = PRESETS["tiny"].replace(theta_c=0.0)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_weights(
    folder: Path, name: str = "prism.safetensors", shard_mib: float | None = None
) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    state = load_model(config=TINY).state_dict()
    return export_weights(folder / name, state, TINY, {"pairs": 12}, shard_mib)


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of one revision of me/prism in the Hub's cache, as the Hub lays it out; no network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / "models--me--prism"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    return repository / "snapshots" / COMMIT


@pytest.mark.parametrize("shard_mib", [None, 0.4])
def test_the_cache_is_enough(snapshot: Path, photo: np.ndarray, shard_mib: float | None) -> None:
    files = write_weights(snapshot, shard_mib=shard_mib)
    assert len(files) == 1 if shard_mib is None else len(files) > 1
    names = ["hf:me/prism", "hf:me/prism@main", f"hf:me/prism@{COMMIT}", "hf:me/prism:prism.safetensors"]
    expected = load_model(snapshot / "prism.safetensors").state_dict()
    for name in [*names, f"hf:me/prism:{files[0].name}"]:
        info = weights_info(name)
        assert info.config == TINY and info.training == {"pairs": 12}
        assert all(np.array_equal(v, expected[k]) for k, v in load_model(name).state_dict().items())
    assert len(Matcher("hf:me/prism", device="cpu", rescale="never", size=160).match(photo, photo)) > 20
    assert load_weights("hf:me/prism")[0].keys() == expected.keys()  # prism train --init


def test_several_files_are_told_apart(snapshot: Path) -> None:
    write_weights(snapshot, "small.safetensors")
    write_weights(snapshot, "large.safetensors", shard_mib=0.4)
    with pytest.raises(UserError, match=r"say which, as hf:me/prism:FILE.safetensors: large, small$"):
        weights_info("hf:me/prism")
    assert weights_info("hf:me/prism:large.safetensors").path == snapshot / "large.safetensors"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("hf:prism", "written hf:OWNER/REPO"),
        ("hf:me/prism:weights.ckpt", "written hf:OWNER/REPO"),
        ("hf:me/", "written hf:OWNER/REPO"),
        ("hf:me/-prism-", "Repo id must"),
        ("hf:me/other", "not in the cache, and the Hugging Face Hub cannot be reached"),
        ("hf:me/prism@v9", "not in the cache, and the Hugging Face Hub cannot be reached"),
        ("hf:me/prism:other.safetensors", "has no such file"),
        ("me/prism", "or hf:OWNER/REPO"),
    ],
)
def test_mistakes_give_one_line(snapshot: Path, name: str, reason: str) -> None:
    write_weights(snapshot)
    with pytest.raises(UserError, match=reason) as error:
        Matcher(name, device="cpu")
    assert str(error.value).startswith(name) and "\n" not in str(error.value)


def test_an_empty_repository(snapshot: Path) -> None:
    snapshot.mkdir(parents=True)
    with pytest.raises(UserError, match=r"has no .safetensors file"):
        weights_info("hf:me/prism")


@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        ("RepositoryNotFoundError", "no such repository"),
        ("RevisionNotFoundError", "no revision 'v9'"),
        ("LocalEntryNotFoundError", "cannot be reached"),
        ("TimeoutError", r"refused \(first line\)"),
    ],
)
def test_what_the_hub_answers(monkeypatch: pytest.MonkeyPatch, raised: str, reason: str) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise getattr(hub.errors, raised, TimeoutError)("first line\nsecond line")

    hub = fake_hub(monkeypatch, fail)
    with pytest.raises(UserError, match=reason) as error:
        weights_info("hf:me/prism@v9")
    assert "\n" not in str(error.value)


def test_only_what_is_needed_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple] = []

    def answer(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repo, revision, allow_patterns))
        return str(tmp_path)

    fake_hub(monkeypatch, answer)
    write_weights(tmp_path)
    weights_info("hf:me/prism@v2:prism.safetensors")
    patterns = ["prism.safetensors", "prism-?????-of-?????.safetensors"]
    assert asked == [("me/prism", "v2", patterns)]


def test_never_by_default_and_local_files_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    weights_info()
    monkeypatch.chdir(tmp_path)
    local = write_weights(tmp_path / "hf:me", "prism.safetensors")[0]
    assert weights_info("hf:me/prism.safetensors").path == local.relative_to(tmp_path)
    with pytest.raises(UserError, match=r'^hf:me/prism: needs .* pip install "prism-match\[hub\]"$'):
        weights_info("hf:me/prism")


def fake_hub(monkeypatch: pytest.MonkeyPatch, download: Callable) -> ModuleType:
    """A huggingface_hub with the one function that is used, and its errors."""
    hub, errors = ModuleType("huggingface_hub"), ModuleType("huggingface_hub.errors")
    for name in ("RepositoryNotFoundError", "RevisionNotFoundError", "LocalEntryNotFoundError"):
        setattr(errors, name, type(name, (Exception,), {}))
    hub.snapshot_download, hub.errors = download, errors
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)
    return hub
