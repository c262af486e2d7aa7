"""Shared keypoints and their matches in a COLMAP database."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np

from prism_match.engine.store import MatchStore
from prism_match.errors import UserError
from prism_match.files import atomic_path
from prism_match.maps import colmap
from prism_match.maps.cameras import Cameras

COLMAP_ERROR = 4.0  # pixels of the photos
MATCHED_ERROR = 2.0  # pixels of the images as they were matched


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
            counts = colmap.run(
                "database", tracks=str(tracks), database=str(temporary), cameras=cameras.cameras,
                images=cameras.of_image, overwrite=overwrite,
            )  # fmt: skip
            verified = []
            if verify is not None:
                verified = colmap.run("verify", database=str(temporary), max_error=verify)["verified"]
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


def colmap_error(store: MatchStore) -> float:
    """Pixels that a match may be off: what COLMAP has for its own features, and more for photos that are
    much larger than they were matched."""
    return max(COLMAP_ERROR, MATCHED_ERROR * float(np.median(list(store.scales.values()))))
