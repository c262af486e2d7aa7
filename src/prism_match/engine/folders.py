"""A folder of photos or of matches: on this machine, or anywhere that fsspec reaches (s3://, gs://, ...) with
credentials from the environment."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

from prism_match.engine.photos import content_of, in_threads
from prism_match.errors import UserError
from prism_match.files import atomic_path, file_digest, writable_folder

REQUESTS = 8  # at a time, for photos: a network answers late rather than slowly
LISTED_ABOVE = 500  # photos of a remote folder: fewer are asked for one by one
# What changes with a remote file, by the names that file systems have for it; the first that there is.
VERSIONS = ("ETag", "etag", "md5Hash", "generation", "mtime", "LastModified", "last_modified", "created")
# Where a file is there once all of it is, and folders are nothing but names. Elsewhere files are renamed.
OBJECTS = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "memory")
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

    def fetch(self, name: str, copies: Path | None) -> Path:
        """The file as one on this machine: a new one in `copies`, if it is elsewhere."""
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

    def fetch(self, name: str, copies: Path | None) -> Path:
        """Where it is. It has been read once then, which may be what takes long, as on a network's disk."""
        with suppress(UserError):  # will be told by whoever needs it
            content_of(self.path / name)
        return self.path / name


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
        protocol = self.files.protocol
        self.whole = not set(OBJECTS).isdisjoint([protocol] if isinstance(protocol, str) else protocol)

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
        found = (path.rsplit("/", 1)[-1] for path in listed)
        return sorted(name for name in found if name.endswith(suffix) and not name.startswith("."))

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
        path = self._path(name)
        parent, _, last = path.rpartition("/")
        try:
            if self.whole:
                self.files.pipe_file(path, data)
            else:
                self.files.makedirs(parent, exist_ok=True)
                temporary = f"{parent}/.{secrets.token_hex(4)}-{last}"
                self.files.pipe_file(temporary, data)
                self.files.mv(temporary, path)
        except ANY_REASON as error:
            raise CannotWrite(f"{self.address}/{name}: cannot be written ({error})") from error

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self.files.rm_file(self._path(name))

    def open(self, name: str) -> IO[bytes]:
        return self.files.open(self._path(name), "rb")

    def fetch(self, name: str, copies: Path | None) -> Path:
        data = self.read(name)
        number, path = tempfile.mkstemp(Path(name).suffix, dir=copies)
        try:
            with open(number, "wb") as file:
                file.write(data)
        except OSError:  # half of it would be in the way of others
            os.unlink(path)
            raise
        return Path(path)


class Fetcher:
    """Files of a folder on this machine; copies, where they are elsewhere, as long as they are needed. What
    is needed next can be asked for before it is."""

    def __init__(self, folder: Folder):
        self.folder = folder
        self._copies: Path | None = None
        if not isinstance(folder, LocalFolder):
            remove_left_copies()
            self._copies = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=writable_folder(COPIES)))
        self._pool = ThreadPoolExecutor(REQUESTS)
        self._begun: dict[str, Future[Path]] = {}

    def get(self, names: Iterable[str]) -> tuple[dict[str, Path], dict[str, str]]:
        """By name, and why others cannot be read. Copies of files that are not asked for are removed."""
        wanted = list(dict.fromkeys(names))
        for name in self._begun.keys() - set(wanted):
            self._drop(name)
        self.begin(wanted)
        files, broken = {}, {}
        for name in wanted:
            try:
                files[name] = self._begun[name].result()
            except UserError as error:
                broken[name] = str(error)
                self._drop(name)
            except OSError as error:
                self._drop(name)
                raise UserError(f"{self._copies}: no room for photos ({error.strerror})") from error
        return files, broken

    def begin(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._begun:
                self._begun[name] = self._pool.submit(self.folder.fetch, name, self._copies)

    def _drop(self, name: str) -> None:
        def remove(future: Future[Path]) -> None:
            if not future.cancelled() and future.exception() is None:
                path = future.result()
                if path.parent == self._copies:
                    path.unlink(missing_ok=True)

        future = self._begun.pop(name)
        future.cancel()
        future.add_done_callback(remove)  # at once, unless it is just being fetched

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._copies is not None:
            shutil.rmtree(self._copies, ignore_errors=True)

    def __enter__(self) -> Fetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Of this user; folders in it have the number of their process.
COPIES = Path(tempfile.gettempdir()) / f"prism-photos-{os.getuid()}"


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
    with Fetcher(folder) as fetcher:
        try:
            return file_digest(fetcher.get([name])[0][name])
        except (UserError, KeyError):
            return ""
