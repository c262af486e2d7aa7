"""What a run in a folder has done, kept beside its results."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

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
        self.forget(name)  # its product is about to change
        result = work()
        self.done[name] = {"key": key, "result": result}
        write_json(self.path, self.done)
        return result

    def forget(self, *names: str) -> None:
        if known := self.done.keys() & set(names):
            self.done = {k: v for k, v in self.done.items() if k not in known}
            write_json(self.path, self.done)


class Origin(NamedTuple):
    """Of a model in OUT/sparse/N."""

    made_here: bool  # by `prism sfm`, which sees photos as EXIF turns them
    photos: Path | None  # the folder of its photos, where that is still there
    contents: dict[str, str]  # the digests of those photos by name, as far as they are known


def origin_of(model: Path) -> Origin:
    out = (model / ".." / "..").resolve()
    done = Stages(out / STAGES).done
    photos = out / str(done["photos"]["result"]) if "photos" in done else None
    contents = done["contents"]["result"] if "contents" in done else None
    return Origin(
        "model" in done,
        photos if photos is not None and photos.is_dir() else None,
        contents if isinstance(contents, dict) else {},
    )
