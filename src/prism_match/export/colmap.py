"""A store of matches into a COLMAP database."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from prism_match.engine.store import MatchStore
from prism_match.errors import UserError
from prism_match.files import file_digest, is_file
from prism_match.images import exif_orientation, image_size, to_stored
from prism_match.maps.cameras import CameraOptions, choose_cameras
from prism_match.maps.colmap import colmap_error, write_database
from prism_match.maps.shared_keypoints import save_tracks
from prism_match.maps.tracks import TrackOptions, polish_tracks, share_keypoints
from prism_match.matcher import find_device


def export_colmap(
    matches: Path,
    database: Path,
    *,
    images: Path | None = None,
    tracks: TrackOptions | None = None,
    cameras: CameraOptions | None = None,
    polish: bool = True,
    verify: bool = False,
    overwrite: bool = False,
) -> dict[str, int]:
    """Matches of a store into a database, new or existing, with keypoints that all pairs of an image share.

    images: the folder they are in, for what their EXIF tells: focal lengths, and which of them are shown
    turned, since COLMAP has the pixels of the files as they are stored; and to polish the keypoints by.
    verify: also check every pair by its geometry. overwrite: replace keypoints and matches that are there.
    Returns the numbers of images, keypoints and matches in the database."""
    store = MatchStore(matches)
    if not len(store):
        raise UserError(f"{matches}: there are no matches in it")
    gone = {name for name in store.images if images is not None and not is_file(images / name)}
    for name in sorted(gone):
        print(
            f"prism: left out: {images}/{name}: no such image; {matches} has matches of it", file=sys.stderr
        )
    pairs = [pair for pair in store if not gone.intersection(pair)]
    if not pairs:
        raise UserError(f"{images}: no two images that {matches} has matches of")
    files: dict[str, tuple[Path | None, tuple[int, int]]] = {}
    for name in sorted({name for pair in pairs for name in pair}):
        entry, file = store.images[name], None if images is None else images / name
        if file is not None and image_size(file) != entry.size:
            raise UserError(f"{file}: is not of the size of the one that {matches} has matches of")
        if file is not None and file_digest(file) != entry.digest:
            print(f"prism: {file}: is not the file that was matched, though of its size", file=sys.stderr)
        files[name] = file, as_stored(np.empty((0, 2)), entry.size, file)[1]
    chosen = choose_cameras(files, cameras or CameraOptions())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tracks.h5"
        scales = {name: scale for name, scale in store.scales.items() if name in files}
        shared = share_keypoints(((pair, store[pair]) for pair in pairs), tracks, scales)
        if images is not None and polish:
            shared = polish_tracks(shared, {n: images / n for n in shared.keypoints}, find_device("auto"))
        keypoints = {
            name: replace(k, xy=as_stored(k.xy, store.images[name].size, files[name][0])[0])
            for name, k in shared.keypoints.items()
        }
        save_tracks(path, replace(shared, keypoints=keypoints))
        return write_database(
            path,
            database,
            chosen,
            verify=colmap_error(scales.values()) if verify else None,
            overwrite=overwrite,
        )[0]


def as_stored(
    points: np.ndarray, size: tuple[int, int], file: Path | None
) -> tuple[np.ndarray, tuple[int, int]]:
    """n 2 and a size, of an image as it is shown, in its file before EXIF turns it."""
    return to_stored(points, size, 1 if file is None else exif_orientation(file))
