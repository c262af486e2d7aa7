"""Jobs for pycolmap, done by a process of their own (see `colmap_worker`), and databases of COLMAP's."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import prism_match
from prism_match.errors import UserError
from prism_match.files import atomic_path
from prism_match.maps.cameras import Cameras

WORKER = "prism_match.maps.colmap_worker"
COLMAP_ERROR = 4.0  # pixels of the photos
MATCHED_ERROR = 2.0  # pixels of the images as they were matched


def require() -> None:
    """An error now, rather than after hours of matching."""
    if find_spec("pycolmap") is None:
        raise UserError('pycolmap is not installed: pip install "prism-match[sfm]"')


def run(job: str, on_event: Callable[[str], None] | None = None, **arguments: Any) -> dict[str, Any]:
    """The result of a job of the worker. A job that fails, or a worker that dies, is a `UserError`."""
    require()
    root = str(Path(prism_match.__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", WORKER],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
        )  # fmt: skip
        try:
            message = _talk(process, json.dumps({"job": job, **arguments}), on_event)
        finally:
            process.kill()  # it has ended, or whoever waits for it has been interrupted
            process.communicate()
        log.seek(0)
        if "error" in message:
            raise UserError(message["error"])
        if "result" not in message:
            raise UserError(f"COLMAP ended while it was busy with {job}: {last_words(log.read())}")
    return message["result"]


def _talk(process: subprocess.Popen[str], job: str, on_event: Callable[[str], None] | None) -> dict[str, Any]:
    """Hands over the job; the last message that comes back."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(job + "\n")
        process.stdin.flush()  # and left open: see `end_with_caller`
    except BrokenPipeError:
        return {}
    message: dict[str, Any] = {}
    for line in process.stdout:
        try:
            message = json.loads(line)
        except ValueError:  # something that COLMAP prints
            continue
        if on_event is not None and "event" in message:
            on_event(message["event"])
    process.wait()
    return message


def last_words(log: str) -> str:
    """The last line that says something: what is below it is addresses."""
    lines = [line.strip() for line in log.splitlines()]
    words = [line for line in lines if line and not line.startswith(("@", "***", "PC:"))]
    return words[-1] if words else "it said nothing"


def undistort(model: Path, images: Path, out: Path) -> None:
    """The photos of a model without their lens distortion, and the model that fits them."""
    run("undistort", model=str(model), images=str(images), out=str(out))


def write_database(
    tracks: Path, database: Path, cameras: Cameras, *, verify: float | None, overwrite: bool = False
) -> tuple[dict[str, int], list[tuple[str, str, int]]]:
    """Keypoints and matches that `save_tracks` has written into a database, which changes as a whole or
    not at all. verify: the largest error, in pixels, of a match that fits its pair's geometry; None: leave
    that out. The numbers in the database, and the verified pairs with their inliers."""
    with atomic_path(database) as temporary:
        temporary.unlink()
        if database.is_file():
            copy_database(database, temporary)
        try:
            counts = run(
                "database", tracks=str(tracks), database=str(temporary), cameras=cameras.cameras,
                images=cameras.of_image, overwrite=overwrite,
            )  # fmt: skip
            verified = []
            if verify is not None:
                verified = run("verify", database=str(temporary), max_error=verify)["verified"]
        finally:
            for suffix in ("-wal", "-shm", "-journal"):  # of SQLite, which has closed the file by now
                Path(f"{temporary}{suffix}").unlink(missing_ok=True)
    return counts, [(a, b, n) for a, b, n in verified]


def copy_database(source: Path, target: Path) -> None:
    """By SQLite, since what was written last may be in a file beside it."""
    try:
        with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(target)) as new:
            old.backup(new)
    except sqlite3.Error as error:
        raise UserError(f"{source}: not a COLMAP database ({error})") from error


def colmap_error(scales: Iterable[float]) -> float:
    """Pixels that a match may be off: what COLMAP has for its own features, and more for photos that are
    much larger than they were matched."""
    return max(COLMAP_ERROR, MATCHED_ERROR * float(np.median(list(scales))))
