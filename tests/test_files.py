"""Files are written whole or not at all, and reading one never runs what is in it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from conftest import needs_shared

from prism_match.errors import UserError
from prism_match.files import atomic_path, load_object_arrays, writable_folder


def test_a_failure_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError), atomic_path(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file.txt"]
    with atomic_path(path) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["file.txt"]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_may_be_read_by_whom_the_umask_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    """And nobody sets it on the way: another thread's file would have the rights of that moment."""
    before = os.umask(umask)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "umask", lambda _: pytest.fail("the umask belongs to the whole process"))
            with atomic_path(tmp_path / "file.txt") as temporary:
                temporary.write_text("x")
    finally:
        os.umask(before)
    assert (tmp_path / "file.txt").stat().st_mode & 0o777 == 0o666 & ~umask


def test_folders_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="file"):
            writable_folder(path)
    with pytest.raises(UserError, match="cannot be written"), atomic_path(tmp_path / "nowhere" / "x"):
        pass


def test_object_arrays_round_trip(tmp_path: Path) -> None:
    objects = np.empty(3, dtype=object)
    objects[:] = [np.eye(3), None, (np.array([1, 2]), 0.5, "name")]
    np.savez(tmp_path / "a.npz", objects=objects, plain=np.arange(4))
    loaded, plain = load_object_arrays(tmp_path / "a.npz", ["objects", "plain"])
    assert np.array_equal(loaded[0], np.eye(3)) and loaded[1] is None and loaded[2][2] == "name"
    assert np.array_equal(plain, np.arange(4))
    with pytest.raises(KeyError):
        load_object_arrays(tmp_path / "a.npz", ["other"])


class Harmful:
    def __reduce__(self) -> tuple:
        return os.mkdir, ("harm-was-done",)


def test_a_file_that_would_run_something_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    objects = np.empty(1, dtype=object)
    objects[0] = Harmful()
    np.savez("bad.npz", objects=objects)
    with pytest.raises(ValueError, match="which is no array"):
        load_object_arrays(Path("bad.npz"), ["objects"])
    assert os.listdir(".") == ["bad.npz"]


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04nonsense"])
def test_damaged_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"\w"):
        load_object_arrays(tmp_path / "a.npz", ["a"])


def test_a_real_index_is_read_as_numpy_reads_it() -> None:
    keys = ["image_paths", "depth_paths", "intrinsics", "poses", "pair_infos"]
    for path in sorted(needs_shared("eval/megadepth_dev/scene_info").glob("*.npz")):
        ours = load_object_arrays(path, keys)
        with np.load(path, allow_pickle=True) as theirs:
            for key, array in zip(keys, ours, strict=True):
                for mine, other in zip(array, theirs[key], strict=True):
                    np.testing.assert_equal(mine, other)
