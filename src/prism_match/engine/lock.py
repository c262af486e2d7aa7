"""One writer at a time: of a store of matches, or of a folder of results."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from prism_match.errors import UserError


class Lock:
    """Held until it is closed, or its process ends, however it does. The file stays: to remove it would let
    two processes hold a lock of the same name."""

    def __init__(self, path: Path, what: str):
        self._file: IO[str] | None = None
        try:
            file = path.open("a")
        except OSError as error:
            raise UserError(f"{what}: cannot be written to ({error.strerror})") from error
        if not _take(file):
            file.close()
            raise UserError(f"{what}: is in use by another run; wait for it, or choose another place")
        self._file = file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lock_folder(folder: Path) -> Lock:
    return Lock(folder / ".lock", str(folder))


def _take(file: IO[str]) -> bool:
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except OSError:
            return False
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
