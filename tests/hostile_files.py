"""Files that are not what they claim to be, and real files with something wrong in them.

`mutate(data, kind, rng)` changes the bytes of a file, in ways that its kind understands: an archive is packed
again with whole checksums, so that what is inside is read, and what is wrong with it found there."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import h5py
import numpy as np

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
NUMBERS = (
    0, 1, 2, 3, 7, 8, 16, 31, 32, 64, 127, 128, 255, 256, 1000, 32767, 32768, 65535, 65536, 2**24, 2**31 - 1,
    2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**64 - 1, -1, -2, -128, -32768, -(2**31), -(2**63),
)  # fmt: skip
WORDS = (
    "nan", "inf", "-inf", "-1", "0", "1e309", "1e-320", "1.5", "99999999999999999999", "1" * 400, "0x10",
    "1_0", "", "#", "..", "../../../escaped", "/escaped", "~", "C:\\x", "con", "a" * 300, "é" * 80, "\u202e",
    "\x1b[2J", "\x00", "\n", "\t", "\ufeff", "%s", "{0}", "true", "null", "[]", "{}", "'", '"', "=", "-",
    "--help",
)  # fmt: skip


def png_claiming(width: int, height: int) -> bytes:
    """A PNG that says it is so large, and is not there."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (_chunk(b"IHDR", header), _chunk(b"IDAT", zlib.compress(b"0")), _chunk(b"IEND", b""))
    return b"".join((PNG_MAGIC, *parts))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


class Intruder:
    """Unpickled by a reader that trusts its files, it makes a folder."""

    def __init__(self, path: str = "intruder"):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def mutate(data: bytes, kind: str, rng: Random) -> bytes:
    """kind: bytes, text, json, png, zip, h5 or safetensors."""
    if rng.random() < 0.02:
        return rng.choice((b"", b"\0" * len(data), rng.randbytes(len(data)), data * 2))
    how = MUTATORS[kind]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = how(data, rng)
    return data


def mutate_bytes(data: bytes, rng: Random) -> bytes:
    """What any file may suffer: cut, stretched, swapped, flipped, or with other numbers in it."""
    if not data:
        return rng.randbytes(rng.randrange(1, 64))
    size = len(data)
    # Headers are where the harm is.
    at = rng.randrange(min(size, 64) if rng.random() < 0.4 else size)
    span = rng.choice((1, 2, 4, 8, rng.randrange(1, 1 + min(size, 4096))))
    way = rng.randrange(8)
    if way == 0:
        return data[:at]
    if way == 1:
        return data[:at] + data[at + span :]
    if way == 2:
        return data[:at] + rng.randbytes(span) + data[at:]
    if way == 3:
        other = rng.randrange(size)
        return data[:at] + data[other : other + span] + data[at + span :]
    if way == 4:
        return (
            data[:at] + bytes([rng.choice((0, 1, 0x7F, 0x80, 0xFF)) for _ in range(span)]) + data[at + span :]
        )
    if way == 5:
        layout, bits = rng.choice((("H", 16), ("I", 32), ("Q", 64)))
        value = struct.pack(rng.choice("<>") + layout, rng.choice(NUMBERS) % 2**bits)
        return data[:at] + value + data[at + len(value) :]
    if way == 6:
        value = struct.pack("<d", rng.choice((float("nan"), float("inf"), -1.0, 0.0, 1e300, -1e300, 1e-300)))
        return data[:at] + value + data[at + 8 :]
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def mutate_text(data: bytes, rng: Random) -> bytes:
    """One word or line becomes another, is lost or comes twice."""
    if rng.random() < 0.25:
        return mutate_bytes(data, rng)
    text = data.decode("utf-8", "replace")
    way = rng.randrange(4)
    if way == 0:
        lines = text.splitlines(keepends=True) or [""]
        at = rng.randrange(len(lines))
        lines[at : at + 1] = rng.choice(([], [lines[at]] * 2, [lines[at].rstrip("\n") + " x\n"], ["\n"]))
        return "".join(lines).encode("utf-8", "replace")
    words = list(re.finditer(r"[^\s,=\[\]{}:\"]+", text))
    if not words:
        return rng.choice(WORDS).encode("utf-8")
    chosen = rng.choice(words)
    new = str(rng.choice(NUMBERS)) if way == 1 else rng.choice(WORDS)
    return (text[: chosen.start()] + new + text[chosen.end() :]).encode("utf-8", "replace")


def mutate_json(data: bytes, rng: Random) -> bytes:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return mutate_text(data, rng)
    if rng.random() < 0.3:
        return mutate_text(data, rng)
    if rng.random() < 0.03:
        return b"[" * 100_000
    return json.dumps(_other(value, rng)).encode()


def _other(value: Any, rng: Random) -> Any:
    """The same but for something in it."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        way = rng.random()
        if way < 0.15:
            return {k: v for k, v in value.items() if k != key}
        if way < 0.25:
            return value | {rng.choice(WORDS): value[key]}
        return value | {key: _other(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        new = rng.choice(([], [value[at]] * 2, [_other(value[at], rng)], [_other(value[at], rng)]))
        return [*value[:at], *new, *value[at + 1 :]]
    choices = (None, True, [], {}, [[]], "", rng.choice(WORDS), rng.choice(NUMBERS), 0.5, -1.0, float("nan"))
    return rng.choice(choices)


def mutate_png(data: bytes, rng: Random) -> bytes:
    """Half of the time with checksums that are right again."""
    data = mutate_bytes(data, rng)
    if rng.random() < 0.5 or not data.startswith(PNG_MAGIC):
        return data
    parts, at = [PNG_MAGIC], 8
    while at + 12 <= len(data):
        length = struct.unpack_from(">I", data, at)[0]
        if at + 12 + length > len(data):
            break
        parts.append(_chunk(data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
        at += 12 + length
    return b"".join((*parts, data[at:]))


def mutate_zip(data: bytes, rng: Random) -> bytes:
    """.npz, and PyTorch's checkpoints."""
    if rng.random() < 0.25:
        return mutate_bytes(data, rng)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
    except Exception:
        return mutate_bytes(data, rng)
    if entries:
        name = rng.choice(sorted(entries))
        way = rng.random()
        if way < 0.1:
            del entries[name]
        elif way < 0.2:
            entries[name] = entries[rng.choice(sorted(entries))]
        elif way < 0.3:
            entries[name] = pickle.dumps(Intruder()) if name.endswith(".pkl") else _npy_of(_pickled())
        elif way < 0.65 and name.endswith(".npy"):
            entries[name] = _other_npy(entries[name], rng)
        else:
            entries[name] = mutate_bytes(entries[name], rng)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return packed.getvalue()


def _pickled() -> np.ndarray:
    array = np.empty((), object)
    array[()] = Intruder()
    return array


def _npy_of(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def _other_npy(data: bytes, rng: Random) -> bytes:
    """Another type or shape, or one that only its header has."""
    if rng.random() < 0.3:
        shape = rng.choice(((2**40,), (-1,), (2**31, 2**31), (0, 2), (1,) * 40, (2**27, 2)))
        header = str(
            {"descr": rng.choice(("<f4", "|O", "<U9", "<i8")), "fortran_order": False, "shape": shape}
        )
        padded = header.encode() + b" " * (-(len(header) + 11) % 64) + b"\n"
        return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(padded)) + padded + data[-64:]
    try:
        array = np.load(io.BytesIO(data), allow_pickle=False)
    except Exception:
        return mutate_bytes(data, rng)
    return _npy_of(_other_array(array, rng))


def _other_array(array: np.ndarray, rng: Random) -> np.ndarray:
    way = rng.randrange(6)
    if way == 0:
        return array.reshape(-1)
    if way == 1:
        return array[:0] if array.ndim else np.zeros((0, 3))
    if way == 2:
        return array[..., None]
    if way == 3:
        return np.array(rng.choice(WORDS).replace("\0", ""))
    if way == 4:
        return np.full(array.shape, rng.choice((np.nan, np.inf, -1e30, 1e300, 0.0, -5.0)))
    return np.full(array.shape, rng.choice(NUMBERS) % 2**31).astype(rng.choice(("i8", "u1", "?", "c8", "S3")))


def mutate_h5(data: bytes, rng: Random) -> bytes:
    if rng.random() < 0.35:
        return mutate_bytes(data, rng)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.h5"
        path.write_bytes(data)
        try:
            with h5py.File(path, "r+") as file:
                _other_h5(file, rng)
        except Exception:  # damaged before
            return mutate_bytes(data, rng)
        return path.read_bytes()


def _other_h5(file: h5py.File, rng: Random) -> None:
    names: list[str] = []
    file.visit(names.append)
    way = rng.randrange(8)
    if way == 0 and file.attrs:
        key = rng.choice(sorted(file.attrs))
        file.attrs[key] = rng.choice((b"\xff", "", "{}", "[]", "nan", -1, 2**40, 0.5, [1, 2], "../x"))
        return
    if way == 1 and file.attrs:
        del file.attrs[rng.choice(sorted(file.attrs))]
        return
    if not names:
        return
    name = rng.choice(sorted(names))
    old = file[name]
    array = old[()] if isinstance(old, h5py.Dataset) else np.zeros((2, 5), np.float32)
    del file[name]
    if way == 2:
        file[rng.choice(("escaped", "../../escaped", "%2e%2e/%2e%2e", "é", " "))] = array
    elif way == 3:
        shape = rng.choice(((2**40,), (2**33, 5), (2**20, 2**10, 1)))
        file.create_dataset(name, shape, "f4", chunks=(1,) * len(shape))
    elif way == 4:
        file[name] = rng.choice(
            (h5py.SoftLink("/nowhere"), h5py.SoftLink("/"), h5py.ExternalLink("/etc/passwd", "/x"))
        )
    elif way == 5:
        file.create_group(name)
    else:
        kept = array if isinstance(array, np.ndarray) and array.dtype.kind in "fiub" else np.zeros((2, 5))
        file[name] = _other_array(kept, rng).astype("f4") if way == 6 else np.bytes_(b"\xff\xfe")


def mutate_safetensors(data: bytes, rng: Random) -> bytes:
    """The header tells where every tensor is, and carries our settings as JSON in JSON."""
    if rng.random() < 0.3 or len(data) < 8:
        return mutate_bytes(data, rng)
    size = struct.unpack_from("<Q", data)[0]
    if not 0 < size < len(data):
        return mutate_bytes(data, rng)
    try:
        header = json.loads(data[8 : 8 + size])
        if rng.random() < 0.5 and "__metadata__" in header:
            key = rng.choice(sorted(header["__metadata__"]))
            inner = mutate_json(header["__metadata__"][key].encode(), rng)
            header["__metadata__"][key] = inner.decode("utf-8", "replace")
        else:
            header = _other(header, rng)
    except (ValueError, AttributeError, TypeError, KeyError, IndexError, RecursionError):
        return mutate_bytes(data, rng)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data[8 + size :]


MUTATORS: dict[str, Callable[[bytes, Random], bytes]] = {
    "bytes": mutate_bytes,
    "text": mutate_text,
    "json": mutate_json,
    "png": mutate_png,
    "zip": mutate_zip,
    "h5": mutate_h5,
    "safetensors": mutate_safetensors,
}
