"""What a run in a folder has done, kept beside its results."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from prism_match.config import parse_json
from prism_match.files import write_json

STAGES = "stages.json"  # its presence tells a folder of results


class Stages:
    """Which stages are done, with the key of what went in and what came out, in a file."""

    def __init__(self, path: Path):
        self.path = path
        self.done: dict[str, Any] = {}
        with suppress(OSError, ValueError, TypeError):  # none yet, or damaged: begin anew
            stored = parse_json(path.read_text(encoding="utf-8"))
            if isinstance(stored, dict) and all({"key", "result"} == set(v) for v in stored.values()):
                self.done = stored

    def run(self, name: str, key: str, product: Path, work: Callable[[], Any]) -> Any:
        """The result of a stage: of this run, or of an earlier one with the same key."""
        known = self.done.get(name)
        if known is not None and known["key"] == key and product.exists():
            return known["result"]
        if self.done.pop(name, None) is not None:  # its product is about to change
            write_json(self.path, self.done)
        result = work()
        self.done[name] = {"key": key, "result": result}
        write_json(self.path, self.done)
        return result

    def forget(self, name: str) -> None:
        if self.done.pop(name, None) is not None:
            write_json(self.path, self.done)


def origin_of(model: Path) -> tuple[bool, Path | None]:
    """Of a model in OUT/sparse/N: whether it was made by `prism sfm`, which sees photos as EXIF turns them,
    and the folder of its photos, where that is still there."""
    out = (model / ".." / "..").resolve()
    done = Stages(out / STAGES).done
    photos = out / str(done["photos"]["result"]) if "photos" in done else None
    return "model" in done, photos if photos is not None and photos.is_dir() else None


def contents_of(model: Path) -> dict[str, str]:
    """The digests of the photos that a model in OUT/sparse/N was made of, by name, where they are known."""
    done = Stages((model / ".." / "..").resolve() / STAGES).done
    digests = done.get("contents", {}).get("result")
    return digests if isinstance(digests, dict) else {}
