"""Writing files so that none is ever half-written, by one process at a time, and reading them so that none
can do harm."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import re
import secrets
import shutil
import socket
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, TypeVar

import h5py
import numpy as np

from prism_match.errors import UserError

Parsed = TypeVar("Parsed")
# The names of files and folders that are being written; SQLite adds to them.
TEMPORARY = re.compile(r"\..*\.(?P<machine>[0-9a-f]{8})-(?P<process>\d{1,9})-[0-9a-f]{8}.*")
_swept: set[Path] = set()  # folders that hold nothing of killed processes


def is_file(path: Path) -> bool:
    """Whether it is one. Names come from users and from files: one that no file can have is none, either."""
    try:
        return path.is_file()
    except OSError:
        return False


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """A temporary name beside `path`; renamed to `path` if the block succeeds, removed if not."""
    path = Path(path)
    temporary = temporary_beside(path)
    try:
        # Readable by whom the umask allows, unlike what the module tempfile makes: to ask for the umask is
        # to set it, for all threads.
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        temporary.unlink(missing_ok=True)


class _Sink(io.RawIOBase):
    """A file for HDF5, which can crash where it cannot write when it is closed. So it is never told that the
    disk is full, and whoever has opened it asks for that instead."""

    def __init__(self, path: Path):
        self.file = path.open("r+b", buffering=0)
        self.error: OSError | None = None

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        return self.file.tell()

    def readinto(self, buffer: Any) -> int:
        count = self.file.readinto(buffer) or 0
        if self.error is not None:  # what could not be written is not there to be read
            buffer[count:] = bytes(len(buffer) - count)
            return len(buffer)
        return count

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        with self._noting():
            while len(rest):
                rest = rest[self.file.write(rest) :]
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        with self._noting():
            self.file.truncate(size)
        return size or 0

    @contextmanager
    def _noting(self) -> Iterator[None]:
        if self.error is None:
            try:
                yield
            except OSError as error:
                self.error = error
        else:
            with suppress(OSError):
                yield


@contextmanager
def new_h5(path: Path, **options: Any) -> Iterator[tuple[h5py.File, Callable[[], None]]]:
    """An HDF5 file that will be at `path` whole or not at all, and a function that raises an error if the
    disk is full, for those who write so much that they would rather know before the end."""
    with atomic_path(path) as temporary, into_h5(temporary, **options) as opened:
        yield opened


@contextmanager
def into_h5(path: Path, **options: Any) -> Iterator[tuple[h5py.File, Callable[[], None]]]:
    """The same for a file that is there, such as one of `atomic_path`. OSError if it cannot be written."""
    sink = _Sink(path)
    with sink.file:
        with h5py.File(sink, "w", **options) as file:
            yield file, sink.check
        sink.check()


@cache
def _machine() -> str:
    """Where the numbers of processes mean the same: this machine, and this container on it."""
    space = ""
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(f"{socket.gethostname()} {space}".encode()).hexdigest()[:8]


def temporary_beside(path: Path) -> Path:
    """A name that nobody else uses, which tells the process that does. What killed ones have left in the
    folder is removed, once in the life of this one."""
    folder = path.parent
    if folder not in _swept:
        _swept.add(folder)
        remove_left_behind(folder)
    mark = f"{_machine()}-{os.getpid()}-{secrets.token_hex(4)}"
    # The suffix stays, since some writers choose the format by it.
    return path.with_name(f".{path.stem}.{mark}{path.suffix}")


def remove_left_behind(folder: Path) -> None:
    """Temporary files and folders of processes of this machine that are no more."""
    with suppress(OSError):  # a folder that cannot be read is told by whoever needs it
        for entry in list(os.scandir(folder)):
            found = TEMPORARY.fullmatch(entry.name)
            if found is None or found["machine"] != _machine() or _is_running(int(found["process"])):
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                Path(entry.path).unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it is someone else's
        return True
    return True


@contextmanager
def reading(path: str | Path, kind: str) -> Iterator[None]:
    """Whatever goes wrong in the block, which reads the file and does nothing else, becomes one line that
    begins with the file's name. kind: what it should be, as in "a file of matches"."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except PermissionError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except Exception as error:  # damaged bytes lead readers astray in every way there is
        raise UserError(f"{path}: not {kind}, or a damaged one") from error


def checksum(arrays: Mapping[str, np.ndarray]) -> str:
    """Of names, types, shapes and values: the same in whatever format they are kept."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def writable_folder(path: str | Path) -> Path:
    """The folder, made if need be; an error now rather than after minutes of work."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be made a folder ({error.strerror})") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserError(f"{path}: the folder cannot be written to")
    return path


def file_digest(path: Path) -> str:
    """Of the contents, so that a copy elsewhere is known as the same image."""
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def short_hash(value: Any) -> str:
    """Of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def write_json(path: Path, value: Any) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def read_words(path: Path, tabs: bool = False) -> list[tuple[int, list[str]]]:
    """The words of each line of a text file with its number, but for empty lines and comments (#). tabs: a
    line that has some is parted there and nowhere else, so that words can have spaces."""
    return list(each_line(path, tabs))


def each_line(path: Path, tabs: bool = False) -> Iterator[tuple[int, list[str]]]:
    """What `read_words` gives, of a file that may be larger than the memory."""
    try:
        with path.open(encoding="utf-8-sig") as lines:  # editors of Windows begin files with a mark
            for number, line in enumerate(lines, 1):
                words = [w.strip() for w in line.split("\t")] if tabs and "\t" in line else line.split()
                if words and not words[0].startswith("#"):
                    yield number, words
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error


def parse_lines(path: Path, parse: Callable[[list[str]], Parsed], tabs: bool = False) -> list[Parsed]:
    """What `parse` makes of the words of each line; what it finds wrong with one is told with its number."""
    parsed = []
    for number, words in read_words(path, tabs):
        try:
            parsed.append(parse(words))
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}") from error
    return parsed


class Lock:
    """One writer at a time, of a store of matches or of a folder of results. Held until it is closed, or its
    process ends, however it does. The file stays: to remove it would let two processes hold a lock of the
    same name."""

    def __init__(self, path: Path, what: str):
        try:
            self._file = path.open("a")
        except OSError as error:
            raise UserError(f"{what}: cannot be written to ({error.strerror})") from error
        if not _take(self._file):
            self.close()
            raise UserError(f"{what}: is in use by another run; wait for it, or choose another place")

    def close(self) -> None:
        self._file.close()

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


LARGEST_ARRAY = 2**31  # bytes; what claims more, be it in a file of a kilobyte, is not ours


def read_dataset(item: Any) -> np.ndarray:
    """All of a data set of HDF5. ValueError for a group, and for what has more bytes than any of ours: a file
    need not hold what it claims to."""
    if not isinstance(item, h5py.Dataset):
        raise ValueError("it holds something else where an array should be")
    if item.nbytes > LARGEST_ARRAY:
        raise ValueError(f"it claims an array of {item.nbytes / 2**30:.0f} GiB")
    return np.asarray(item[()])


def fixed_text(values: Sequence[str]) -> np.ndarray:
    """n texts of one length, as HDF5 is to keep them: others it keeps in a heap without checksums, and of a
    damaged one it may read for ever. Names of files need not be UTF-8: Python has then marked what is not."""
    encoded = [value.encode(errors="surrogateescape") for value in values]
    return np.array(encoded, h5py.string_dtype("utf-8", max(map(len, encoded), default=0) or 1))


def text_of(value: Any) -> str:
    """What HDF5 gives for a text, of fixed length or not."""
    return value.decode(errors="surrogateescape") if isinstance(value, bytes) else str(value)


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """Of an .npz file. ValueError or OSError if it is none, or unpacks to more than any of ours."""
    try:
        _check_unpacked(path)
        with np.load(path, allow_pickle=False) as opened:
            arrays = dict(opened)
        for name, array in arrays.items():  # what does not begin as an array is handed out as its bytes
            if not isinstance(array, np.ndarray):
                raise ValueError(f"{name} is no array")
            _check_text(array)
        return arrays
    except OSError:
        raise
    except Exception as error:  # damaged archives fail in every way there is
        raise ValueError(f"not an archive of arrays ({error})") from error


def _check_text(array: np.ndarray) -> None:
    """Characters that there are none of bring Python down later, wherever somebody looks at them."""
    if array.dtype.kind == "U" and array.nbytes:
        numbers = np.frombuffer(
            np.ascontiguousarray(array).tobytes(), array.dtype.byteorder.replace("|", "=") + "u4"
        )
        if numbers.max() > sys.maxunicode:
            raise ValueError("a text in it is none")


def _check_unpacked(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        most = max(LARGEST_ARRAY, path.stat().st_size)  # of a large file: what it really holds
        if sum(entry.file_size for entry in archive.infolist()) > most:
            raise ValueError("it unpacks to more than it can be meant to")


class _ArraysOnly(pickle.Unpickler):
    """Unpickles arrays, numbers, strings and containers of them; whatever else a file asks for, it refuses.
    A pickle can otherwise run any program when it is read."""

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy.core.", "numpy._core.")  # the name changed with NumPy 2
        if (module, name) not in {
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "scalar"),
            ("_codecs", "encode"),  # how bytes are kept by old protocols
        }:
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which is no array")
        if module == "numpy._core.multiarray" and np.__version__ < "2":
            module = "numpy.core.multiarray"
        return super().find_class(module, name)


def load_object_arrays(path: Path, keys: Sequence[str]) -> list[np.ndarray]:
    """Arrays of an .npz file whose entries are Python objects, as MegaDepth's and ScanNet's indices are.
    Raises ValueError, OSError or KeyError for anything else."""
    arrays = []
    try:
        _check_unpacked(path)
        with zipfile.ZipFile(path) as archive:
            for key in keys:
                with archive.open(f"{key}.npy") as entry:
                    arrays.append(_read_array(io.BytesIO(entry.read())))
    except (OSError, KeyError):
        raise
    except Exception as error:  # damaged archives and pickles fail in every way there is
        raise ValueError(str(error)) from error
    return arrays


def _read_array(file: io.BytesIO) -> np.ndarray:
    version = np.lib.format.read_magic(file)
    read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in read_header:
        raise ValueError(f"version {version} of the array format is not known")
    shape, _, dtype = read_header[version](file)
    if not dtype.hasobject:
        file.seek(0)
        array = np.lib.format.read_array(file, allow_pickle=False)
        _check_text(array)
        return array
    array = _ArraysOnly(file, encoding="latin1").load()
    if not isinstance(array, np.ndarray):
        raise ValueError(f"an entry is a {type(array).__name__}, not an array")
    return array.reshape(shape)
