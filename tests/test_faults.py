"""What goes wrong around a run: a full disk, folders that cannot be written to, short memory, files that
change or vanish, a second run in the same folder, clocks that jump, and processes that were killed."""

from __future__ import annotations

import logging
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from synthetic_matcher import write_noise
from synthetic_scene import make_scene

from prism_match import Matcher, UserError, cli
from prism_match.config import PRESETS
from prism_match.engine import Engine, Limits, MatchStore, Prism, Resize
from prism_match.files import TEMPORARY, atomic_path, lock_folder, remove_left_behind, temporary_beside
from prism_match.frames import write_depth
from prism_match.images import write_png
from prism_match.maps.shared_keypoints import Keypoints, SharedKeypoints, save_tracks
from prism_match.matches import Matches
from prism_match.serve.batches import Manner, ModelThread
from prism_match.training.checkpoint import Checkpoint, checkpoints, save_checkpoint
from prism_match.weights.store import export_weights


def some_matches(count: int = 4000) -> Matches:
    g = np.random.default_rng(0)
    points = [g.uniform(0, 60, (count, 2)).astype(np.float32) for _ in range(2)]
    return Matches(*points, np.ones(count, np.float32), (64, 64), (64, 64), "a.png", "b.png")


# ---- full disks, and folders that cannot be written to


@contextmanager
def small_disk(most: int) -> Iterator[None]:
    """No file can have more bytes: what is written fails as on a full disk, in the system itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write_store(path: Path) -> None:
    with MatchStore(path, {"method": "made up"}) as store:
        store.add({("a.png", "b.png"): some_matches()}, {"a.png": "0", "b.png": "1"})
        store.merge()


def write_weights(path: Path) -> None:
    export_weights(path, {"x": torch.zeros(200, 200)}, PRESETS["tiny"], {})


def write_tracks(path: Path) -> None:
    save_tracks(path, SharedKeypoints({"a": Keypoints(np.random.rand(4000, 2), np.random.rand(4000))}, {}))


WRITERS: dict[str, Callable[[Path], object]] = {
    "m.npz": lambda p: some_matches().save(p),
    "m.json": lambda p: some_matches().save(p),
    "m.csv": lambda p: some_matches().save(p),
    "m.h5": lambda p: some_matches().save(p),
    "store.h5": write_store,
    "tracks.h5": write_tracks,
    "depth.h5": lambda p: write_depth(p, np.random.default_rng(0).random((200, 200))),
    "picture.png": lambda p: write_png(p, np.random.default_rng(0).integers(0, 255, (99, 99), np.uint8)),
    "w.safetensors": write_weights,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_told_and_keeps_what_is_there(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"before")
    with small_disk(8192), pytest.raises(UserError) as told:
        WRITERS[name](path)
    assert "\n" not in str(told.value) and str(tmp_path) in str(told.value)
    kept = path if path.exists() else next(tmp_path.glob("store-*.h5"))  # of other settings: put aside
    assert kept.read_bytes() == b"before"
    assert not [p for p in tmp_path.rglob("*") if TEMPORARY.fullmatch(p.name)]
    path.unlink(missing_ok=True)
    WRITERS[name](path)  # there is room again
    assert path.stat().st_size > 100


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    state = {"step": 1, "pairs": 1, "elapsed": 1.0, "skipped": 0, "model": {}, "training": {}}
    save_checkpoint(tmp_path, 1, Checkpoint({"model.x": torch.zeros(4)}, state))
    with small_disk(8192), pytest.raises(UserError, match="the one before is kept"):
        save_checkpoint(tmp_path, 2, Checkpoint({"model.x": torch.zeros(9999)}, state))
    assert [p.name for p in checkpoints(tmp_path)] == ["step-00000001"]
    assert not [p for p in tmp_path.iterdir() if TEMPORARY.fullmatch(p.name)]


@pytest.mark.parametrize(
    "words",
    [
        ["match", "0.png", "1.png", "--model-config", "tiny", "-o"],
        ["sfm", ".", "--matches-only", "--model-config", "tiny", "-o"],
        ["train", "--photos", ".", "--preset", "tiny", "-o"],
        ["export", "onnx", "--model-config", "tiny", "-o"],
    ],
)
def test_a_folder_that_cannot_be_written_to_is_told(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for n in range(2):
        write_noise(tmp_path / f"{n}.png", n)
    monkeypatch.chdir(tmp_path)
    target = "/proc/nowhere/prism.onnx" if "onnx" in words else "/proc/nowhere"  # closed to root, too
    monkeypatch.setattr(sys, "argv", ["prism", *words, target])
    with pytest.raises(SystemExit) as left:
        cli.main()
    last = capsys.readouterr().err.splitlines()[-1]
    assert left.value.code == 2 and last.startswith("prism: /proc/nowhere") and "cannot" in last


# ---- what killed processes leave, and other runs


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from prism_match.files import atomic_path, temporary_beside\n"
        "folder = Path(sys.argv[1]); temporary_beside(folder / 'step-1').mkdir()\n"
        "with atomic_path(folder / 'x.db') as t:\n"
        "    Path(f'{t}-wal').write_bytes(b'x'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    source = str(Path(cli.__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": source}
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environment, timeout=60)
    assert done.returncode < 0 and len(list(tmp_path.iterdir())) == 3
    stranger = tmp_path / ".x.00000000-1-00000000.db"  # of another machine, which may be at it
    stranger.touch()
    mine = temporary_beside(tmp_path / "y.db")
    mine.touch()
    (tmp_path / ".hidden.db").touch()
    remove_left_behind(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {stranger.name, mine.name, ".hidden.db"}
    with atomic_path(tmp_path / "x.db") as temporary:
        temporary.write_bytes(b"whole")
    assert (tmp_path / "x.db").read_bytes() == b"whole"


def run_prism(monkeypatch: pytest.MonkeyPatch, *words: object) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["prism", *map(str, words)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return left.value.code


def test_a_second_run_in_a_folder_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_scene(tmp_path / "scene", views=2)
    images, out = tmp_path / "scene" / "images", tmp_path / "out"
    pair = tmp_path / "pairs.txt"
    pair.write_text(
        f"{images}/view0.png {images}/view1.png 0 0 1 0 0 0 1 0 0 0 1 1 0 0 0 1 0 0 0 1 "
        + "1 0 0 0 0 1 0 0 0 0 1 0 0 0 0 1"
    )
    commands = {
        "sfm": ["sfm", images, "--matches-only", "--model-config", "tiny", "-o", out],
        "train": [
            "train",
            "--photos",
            images,
            "--preset",
            "tiny",
            "--steps",
            1,
            "--device",
            "cpu",
            "-o",
            out,
        ],
        "depth": ["data", "depth", tmp_path / "scene" / "sparse", "--images", images, "-o", out],
        "eval": ["eval", "pairs", "--data", pair, "--method", "sift", "--out", out],
    }
    out.mkdir()
    with lock_folder(out):
        before = sorted(out.rglob("*"))
        for name, words in commands.items():
            assert run_prism(monkeypatch, *words) == 2, name
            assert f"{out}: is in use by another run" in capsys.readouterr().err.splitlines()[-1], name
        assert sorted(out.rglob("*")) == before


# ---- short memory


class ShortOfMemory(Prism):
    """A GPU with room for so many pairs, or photos, at a time."""

    def __init__(self, matcher: Matcher, room: int):
        super().__init__(matcher)
        self.room, self.tried = room, []

    def extract(self, prepared):
        self.check(prepared)
        return super().extract(prepared)

    def match(self, pairs):
        self.check(pairs)
        return super().match(pairs)

    def check(self, items) -> None:
        self.tried.append(len(items))
        if len(items) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


@pytest.fixture(scope="module")
def matcher() -> Matcher:
    options = {
        "size": 64,
        "device": "cpu",
        "rotate": "never",
        "rescale": "never",
        "threshold": 0.0,
        "polish": False,
    }
    return Matcher(config=PRESETS["tiny"], **options)


@pytest.fixture
def photos(tmp_path: Path) -> dict[str, Path]:
    for n in range(5):
        write_noise(tmp_path / f"{n}.png", n)
    return {f"{n}.png": tmp_path / f"{n}.png" for n in range(5)}


def test_a_gpu_that_is_short_of_memory_gets_fewer_pairs(
    matcher: Matcher, photos: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    pairs = [(a, b) for a in photos for b in photos if a < b][:8]
    plenty = Engine(Prism(matcher), Resize.largest(64), Limits(8))
    expected = {o.pair: o.matches for o in plenty.match(photos, pairs)}
    method = ShortOfMemory(matcher, 3)
    with caplog.at_level(logging.WARNING):
        found = {
            o.pair: o.matches for o in Engine(method, Resize.largest(64), Limits(8)).match(photos, pairs)
        }
    assert len(found) == len(pairs)
    for pair, matches in found.items():
        np.testing.assert_array_equal(matches.keypoints1, expected[pair].keypoints1)
    assert [r.getMessage() for r in caplog.records if "out of memory" in r.getMessage()] == [
        "prism: the GPU is out of memory: from here on fewer pairs are matched at a time"
    ]
    tried = method.tried[method.tried.index(3) if 3 in method.tried else method.tried.index(2) :]
    assert max(tried) <= 3  # what did not fit is not tried again


def test_no_memory_for_one_pair_is_told(
    matcher: Matcher,
    photos: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = Engine(ShortOfMemory(matcher, 0), Resize.largest(64), Limits(2))
    with pytest.raises(torch.OutOfMemoryError):
        list(engine.match(photos, [("0.png", "1.png")]))

    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Matcher, "match", fail)
    out = next(iter(photos.values())).parent / "out"
    words = ["match", photos["0.png"], photos["1.png"], "--model-config", "tiny", "-o", out]
    assert run_prism(monkeypatch, *words) == 1
    assert "the GPU is out of memory: try a smaller --size" in capsys.readouterr().err.splitlines()[-1]


def test_the_server_goes_on_with_smaller_batches(
    matcher: Matcher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = ModelThread(matcher, 8)
    work, sizes = model._work, []

    def short(jobs):
        sizes.append(len(jobs))
        if len(jobs) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return work(jobs)

    monkeypatch.setattr(model, "_work", short)
    noise = np.random.default_rng(0).random((16, 48, 64), dtype=np.float32)
    manner = Manner(0.0, "never", "never", polish=False)
    with caplog.at_level(logging.WARNING):
        prepared = [matcher.prepare(x) for x in noise]
        waiting = [model.submit((prepared[2 * n], prepared[2 * n + 1]), manner) for n in range(8)]
        model.start()
        results = [future.result(timeout=60).result for future in waiting]
        model.stop()
    assert sizes[0] == 8 and model.batch == 2 and all(len(r) for r in results)
    assert sum("out of memory" in r.getMessage() for r in caplog.records) == 1


# ---- files that change, and clocks that jump


def test_photos_that_vanish_or_change_cost_their_pairs_alone(
    matcher: Matcher, photos: dict[str, Path], tmp_path: Path
) -> None:
    pairs = [("0.png", "1.png"), ("1.png", "2.png"), ("2.png", "3.png"), ("3.png", "4.png")]
    engine = Engine(Prism(matcher), Resize.largest(64), Limits(1, ahead=1))
    outcomes = {}
    with MatchStore(tmp_path / "out" / "matches.h5", engine.settings) as store:
        for outcome in engine.match(photos, pairs, store):
            outcomes[outcome.pair] = outcome
            if outcome.pair == pairs[0]:  # behind the back of the run, which knows them already
                photos["3.png"].unlink()
                write_noise(photos["4.png"], 99)
        kept = set(store)
    assert outcomes[pairs[0]].matches is not None and outcomes[pairs[1]].matches is not None
    assert "no such file" in outcomes[pairs[2]].problem
    assert outcomes[pairs[3]].matches is None
    assert kept == set(pairs[:2])


def test_a_store_that_vanishes_while_it_is_read_is_told(tmp_path: Path) -> None:
    write_store(tmp_path / "store.h5")
    store = MatchStore(tmp_path / "store.h5")
    (tmp_path / "store.h5").unlink()
    with pytest.raises(UserError, match="damaged"):
        store["a.png", "b.png"]


def test_a_clock_that_jumps_changes_nothing(
    matcher: Matcher, photos: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jumps = iter(range(10**9, 0, -(10**5)))
    monkeypatch.setattr(time, "time", lambda: float(next(jumps)))  # backwards, a day each time
    for n, path in enumerate(photos.values()):
        os.utime(path, (2**31 - n, 0) if n % 2 else (0, 2**31 + n))
    engine = Engine(Prism(matcher), Resize.largest(64), Limits(2))
    pairs = [("0.png", "1.png"), ("1.png", "2.png")]
    for _ in range(2):
        with MatchStore(tmp_path / "out" / "matches.h5", engine.settings) as store:
            assert [o.problem for o in engine.match(photos, pairs, store)] == ["", ""]
    with h5py.File(tmp_path / "out" / "matches.h5") as file:
        assert file.attrs["pairs"] == 2
