"""A folder of photos or of matches: on this machine, or anywhere that fsspec reaches (s3://, gs://, ...) with
credentials from the environment."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol

from prism_match.engine.photos import in_threads
from prism_match.errors import UserError
from prism_match.files import atomic_path, file_digest, writable_folder

LISTED_ABOVE = 500  # photos of a remote folder: fewer are asked for one by one
# What changes with a remote file, by the names that file systems have for it; the first that there is.
VERSIONS = ("ETag", "etag", "md5Hash", "generation", "mtime", "LastModified", "last_modified", "created")
# What the libraries behind fsspec raise is as varied as they are.
ANY_REASON = Exception


class CannotWrite(UserError):
    """A store that takes nothing: no other shard would fare better."""


class Folder(Protocol):
    address: str  # to be opened by another process with `open_folder`

    def stamps(self, names: Iterable[str]) -> dict[str, str]:
        """Of those files that are there, what changes when they are written to."""
        ...

    def names(self, suffix: str) -> list[str]:
        """Files right in it, sorted."""
        ...

    def inside(self, name: str) -> Folder:
        """A folder in this one."""
        ...

    def read(self, name: str) -> bytes: ...

    def write(self, name: str, data: bytes) -> None:
        """The whole file or none of it."""
        ...

    def remove(self, name: str) -> None: ...

    def open(self, name: str) -> Any:
        """To be read, as h5py takes it."""
        ...

    def fetched(self, names: Iterable[str]) -> Any:
        """A context: files on this machine by name, and why others cannot be read."""
        ...


def open_folder(address: str | Path) -> Folder:
    text = str(address)
    if "://" in text and not text.startswith("file://"):
        return RemoteFolder(text)
    return LocalFolder(Path(text.removeprefix("file://")).absolute())


class LocalFolder:
    def __init__(self, path: Path):
        self.path, self.address = path, str(path)

    def stamps(self, names: Iterable[str]) -> dict[str, str]:
        def look(name: str) -> str:
            try:
                status = os.stat(self.path / name)
            except (OSError, ValueError):
                return ""
            return f"{status.st_size}-{status.st_mtime_ns}"

        return {name: found for name, found in in_threads(names, look) if isinstance(found, str) and found}

    def names(self, suffix: str) -> list[str]:
        if not self.path.is_dir():
            return []
        with os.scandir(self.path) as entries:
            return sorted(e.name for e in entries if e.name.endswith(suffix) and not e.name.startswith("."))

    def inside(self, name: str) -> LocalFolder:
        return LocalFolder(self.path / name)

    def read(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            raise UserError(f"{self.path / name}: cannot be read ({error.strerror})") from error

    def write(self, name: str, data: bytes) -> None:
        try:
            writable_folder((self.path / name).parent)
            with atomic_path(self.path / name) as temporary:
                temporary.write_bytes(data)
        except UserError as error:
            raise CannotWrite(str(error)) from error

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def open(self, name: str) -> Path:
        return self.path / name

    @contextmanager
    def fetched(self, names: Iterable[str]) -> Iterator[tuple[dict[str, Path], dict[str, str]]]:
        yield {name: self.path / name for name in names}, {}


class RemoteFolder:
    def __init__(self, address: str):
        try:
            import fsspec
        except ImportError as error:
            raise UserError(f"{address}: needs fsspec; pip install 'prism-match[remote]'") from error
        self.address = address.rstrip("/")
        try:
            self.files, self.root = fsspec.core.url_to_fs(self.address)
        except ImportError as error:  # fsspec says which library has the protocol
            raise UserError(f"{address}: {error}") from error
        except ValueError as error:
            raise UserError(f"{address}: no such kind of address ({error})") from error

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def stamps(self, names: Iterable[str]) -> dict[str, str]:
        wanted = list(names)
        if len(wanted) > LISTED_ABOVE:
            try:
                found = self.files.find(self.root, detail=True)
            except ANY_REASON as error:
                raise UserError(f"{self.address}: cannot be listed ({error})") from error
            listed = {path[len(self.root) + 1 :]: version(info) for path, info in found.items()}
            return {name: listed[name] for name in wanted if name in listed}

        def look(name: str) -> str:
            try:
                return version(self.files.info(self._path(name)))
            except FileNotFoundError:
                return ""
            except ANY_REASON as error:
                raise UserError(f"{self.address}/{name}: cannot be looked at ({error})") from error

        stamps = {}
        for name, stamp in in_threads(wanted, look):
            if isinstance(stamp, UserError):
                raise stamp
            if stamp:
                stamps[name] = stamp
        return stamps

    def names(self, suffix: str) -> list[str]:
        try:
            self.files.invalidate_cache(self.root)
            listed = self.files.ls(self.root, detail=False)
        except FileNotFoundError:
            return []
        except ANY_REASON as error:
            raise UserError(f"{self.address}: cannot be listed ({error})") from error
        return sorted(name for path in listed if (name := path.rsplit("/", 1)[-1]).endswith(suffix))

    def inside(self, name: str) -> RemoteFolder:
        return RemoteFolder(f"{self.address}/{name}")

    def read(self, name: str) -> bytes:
        try:
            return self.files.cat_file(self._path(name))
        except FileNotFoundError as error:
            raise UserError(f"{self.address}/{name}: no such file") from error
        except ANY_REASON as error:
            raise UserError(f"{self.address}/{name}: cannot be read ({error})") from error

    def write(self, name: str, data: bytes) -> None:
        """An object is there once all of it is."""
        try:
            self.files.pipe_file(self._path(name), data)
        except ANY_REASON as error:
            raise CannotWrite(f"{self.address}/{name}: cannot be written ({error})") from error

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self.files.rm_file(self._path(name))

    def open(self, name: str) -> IO[bytes]:
        return self.files.open(self._path(name), "rb")

    @contextmanager
    def fetched(self, names: Iterable[str]) -> Iterator[tuple[dict[str, Path], dict[str, str]]]:
        """Copies that are gone when the block ends."""
        remove_left_copies()
        folder = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=writable_folder(COPIES)))
        files, broken = {}, {}

        def fetch(item: tuple[int, str]) -> Path:
            number, name = item
            path = folder / f"{number}{Path(name).suffix}"
            path.write_bytes(self.read(name))
            return path

        try:
            for (_, name), found in in_threads(enumerate(names), fetch):
                if isinstance(found, UserError):
                    broken[name] = str(found)
                else:
                    files[name] = found
            yield files, broken
        except OSError as error:
            raise UserError(f"{folder}: no room for photos ({error.strerror})") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)


COPIES = Path(tempfile.gettempdir()) / "prism-photos"  # folders in it have the number of their process


def remove_left_copies() -> None:
    """Those of processes that were killed."""
    for folder in COPIES.glob("*-*"):
        number = folder.name.split("-")[0]
        try:
            os.kill(int(number), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except (ValueError, OSError):  # not ours
            continue


def version(info: dict[str, Any]) -> str:
    known = next((info[key] for key in VERSIONS if info.get(key)), "")
    return f"{info.get('size')}-{known}"


def digest_of(folder: Folder, name: str) -> str:
    """As the store keeps it; "" where the file cannot be read."""
    with folder.fetched([name]) as (files, _):
        try:
            return file_digest(files[name])
        except (UserError, KeyError):
            return ""
