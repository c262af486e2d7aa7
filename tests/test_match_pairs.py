"""`prism match-pairs`: many pairs into a store of shards, in this process. On a cluster: test_cluster.py."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import cv2
import numpy as np
import pytest
from pairs_on_disk import CRASHING, contents, make_job, make_list, write_photos

from prism_match.engine import Engine, MatchStore, Resize, folders, match_pairs, shards
from prism_match.engine.folders import open_folder
from prism_match.engine.match_pairs import PairList
from prism_match.engine.methods import Sift
from prism_match.engine.shards import FIRST, Shards, find_killers, walk
from prism_match.errors import UserError


@pytest.fixture
def photos(tmp_path) -> Path:
    return write_photos(tmp_path / "photos", 5)


def run(listed, job, seconds=60.0):
    return match_pairs.match_pairs(listed, job, None, seconds)


def test_the_store_has_what_the_engine_finds(tmp_path, photos, monkeypatch):
    monkeypatch.setattr(folders, "COPIES", tmp_path / "photos" / "0.png")  # of a folder nobody needs any
    listed = make_list(5)
    summary = run(listed, make_job(photos, tmp_path / "store"), seconds=0.01)
    assert (summary.pairs, summary.matched, summary.there) == (10, 10, 0)
    assert not (summary.photos or summary.failed or summary.skipped)
    engine = Engine(Sift(), Resize.largest(160))
    files = {p.name: p for p in photos.iterdir()}
    store = MatchStore(tmp_path / "store")
    expected = {o.pair: o.matches for o in engine.match(files, list(store))}
    assert len(store) == 10 and store.settings["method"] == "sift"
    for pair, m in store.items():
        assert len(m) and np.array_equal(m.keypoints1, expected[pair].keypoints1)
        assert m.size0 == expected[pair].size0
    # Many files, read as one.
    assert len(list((tmp_path / "store" / "shards").iterdir())) > 0
    assert not (tmp_path / "store" / "at-hand.json").exists()


def test_what_is_there_is_not_done_again(tmp_path, photos):
    job = make_job(photos, tmp_path / "store")
    run(make_list(4), job)
    before = contents(tmp_path / "store")
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "store" / "shards").iterdir()}
    summary = run(make_list(5), job)
    assert (summary.there, summary.matched) == (6, 4)
    after = contents(tmp_path / "store")
    assert len(after) == 10 and before.items() <= after.items()
    assert all(p.stat().st_mtime_ns == stamp for p, stamp in stamps.items())
    assert run(make_list(5), job).matched == 0
    # The other way round it is the same pair.
    listed = make_list(5)
    assert run(PairList(listed.names, listed.pairs[:, ::-1]), job).matched == 0


def test_a_changed_photo_is_matched_again_and_a_touched_one_is_not(tmp_path, photos):
    job = make_job(photos, tmp_path / "store")
    run(make_list(5), job)
    before = contents(tmp_path / "store")
    os.utime(photos / "1.png", (1, 1))
    assert run(make_list(5), job).matched == 0
    image = cv2.imread(str(photos / "2.png"))
    cv2.imwrite(str(photos / "2.png"), image[:, ::-1])
    summary = run(make_list(5), job)
    assert (summary.matched, summary.replaced) == (4, 4)
    after = contents(tmp_path / "store")
    assert len(after) == 10
    assert {pair for pair in before if before[pair] != after[pair]} == {p for p in before if "2.png" in p}


def test_shards_that_are_cut_short_are_done_again(tmp_path, photos):
    job = make_job(photos, tmp_path / "store")
    run(make_list(5), job)
    before = contents(tmp_path / "store")
    shards = sorted((tmp_path / "store" / "shards").iterdir())
    shards[0].write_bytes(shards[0].read_bytes()[:-100])
    (tmp_path / "store" / "shards" / "other.h5").write_bytes(b"")
    with pytest.raises(UserError, match="damaged"):
        MatchStore(tmp_path / "store")
    summary = run(make_list(5), job)
    assert summary.matched > 0 and sorted(summary.damaged) == sorted([shards[0].name, "other.h5"])
    assert contents(tmp_path / "store") == before


def test_other_settings_are_refused(tmp_path, photos):
    run(make_list(2), make_job(photos, tmp_path / "store"))
    before = contents(tmp_path / "store")
    with pytest.raises(UserError, match=r"other settings \(resize\)"):
        run(make_list(3), make_job(photos, tmp_path / "store", size=128))
    assert contents(tmp_path / "store") == before


def test_skipped_photos_and_pairs_are_named(tmp_path, photos):
    (photos / "1.png").write_bytes((photos / "1.png").read_bytes()[:300])
    (photos / "3.png").unlink()
    summary = run(make_list(5), make_job(photos, tmp_path / "store"))
    assert sorted(summary.photos) == ["1.png", "3.png"]
    assert "no such file" in summary.photos["3.png"] and "1.png: " in summary.photos["1.png"]
    assert len(summary.skipped) == 7 and all({"1.png", "3.png"} & set(pair) for pair in summary.skipped)
    assert summary.matched == len(MatchStore(tmp_path / "store")) == 3
    told = json.loads((tmp_path / "store" / "summary.json").read_text())
    assert told["skipped_photos"] == summary.photos and len(told["skipped_pairs"]) == 7
    # Mended, they are matched.
    write_photos(photos, 5)
    summary = run(make_list(5), make_job(photos, tmp_path / "store"))
    assert summary.matched == 7 and not summary.photos


def test_photos_and_store_at_any_address(tmp_path, photos, monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    for path in photos.iterdir():
        memory.pipe_file(f"/{tmp_path.name}/in/{path.name}", path.read_bytes())
    where = f"memory://{tmp_path.name}"
    monkeypatch.setattr(folders, "COPIES", tmp_path / "copies")
    job = make_job(f"{where}/in", f"{where}/out")
    assert run(make_list(4), job).matched == 6
    for listed_above in (0, 500):
        monkeypatch.setattr(folders, "LISTED_ABOVE", listed_above)
        assert run(make_list(4), job).matched == 0
    assert not list((tmp_path / "copies").iterdir())
    run(make_list(4), make_job(f"file://{photos}", tmp_path / "here"))
    assert contents(f"{where}/out") == contents(tmp_path / "here")
    memory.pipe_file(f"/{tmp_path.name}/in/0.png", b"no photo")
    memory.rm_file(f"/{tmp_path.name}/in/1.png")
    summary = run(make_list(5), job)
    assert "0.png: not an image" in summary.photos["0.png"] and "no such file" in summary.photos["1.png"]
    # 2 3 is there, 0 2 and 0 3 are gone with the photo, 1 2 and 1 3 were of a photo that is no longer there.
    assert summary.matched == 2 and summary.replaced == 3
    with pytest.raises(UserError, match="no such kind of address"):
        open_folder("nowhere://a/b")


def test_a_store_on_another_machines_disk(tmp_path, photos, monkeypatch):
    """fsspec's name for files on this machine stands for those that have folders, and rename."""
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setattr(folders, "COPIES", tmp_path / "copies")
    job = make_job(f"local://{photos}", f"local://{tmp_path}/deep/store")
    whole = fsspec.implementations.local.LocalFileSystem.pipe_file

    def cut_short(self, path, data, **options):
        dies = path.endswith(".h5")
        whole(self, path, data[: len(data) // 2] if dies else data, **options)
        if dies:
            raise OSError(errno.EIO, "the line is dead")

    monkeypatch.setattr(fsspec.implementations.local.LocalFileSystem, "pipe_file", cut_short)
    with pytest.raises(UserError, match="the line is dead"):
        run(make_list(3), job)
    assert not list((tmp_path / "deep" / "store" / "shards").glob("[!.]*"))
    assert open_folder(f"{job.store}/shards").names(".h5") == []
    monkeypatch.setattr(fsspec.implementations.local.LocalFileSystem, "pipe_file", whole)
    monkeypatch.setattr(match_pairs, "HEARTBEAT", 0.05)
    assert run(make_list(3), job).matched == 3
    run(make_list(3), make_job(photos, tmp_path / "here"))
    assert contents(job.store) == contents(tmp_path / "here")


def test_a_second_run_is_told(tmp_path, photos, monkeypatch):
    pytest.importorskip("fsspec")
    monkeypatch.setattr(match_pairs, "HEARTBEAT", 0.05)
    for place in (tmp_path / "store", f"memory://{tmp_path.name}-lease"):
        store = open_folder(place)
        with match_pairs.claimed(store), pytest.raises(UserError, match="in use by another run"):
            run(make_list(2), make_job(photos, place))
        assert run(make_list(2), make_job(photos, place)).matched == 1
        # That a killed run has left a sign of life does not stop the next one.
        store.write(match_pairs.LEASE, b'{"run": "dead", "beat": 7}')
        assert run(make_list(3), make_job(photos, place)).matched == 2


def test_a_full_disk_ends_the_run_and_loses_nothing(tmp_path, photos, monkeypatch):
    job = make_job(photos, tmp_path / "store")
    run(make_list(3), job)
    before = contents(tmp_path / "store")
    real = Path.write_bytes

    def full(path, data):
        if path.suffix == ".h5":
            real(path, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match="No space left"):
        run(make_list(5), job)
    monkeypatch.setattr(Path, "write_bytes", real)
    assert contents(tmp_path / "store") == before
    assert not [p for p in (tmp_path / "store" / "shards").iterdir() if p.name.startswith(".")]
    assert run(make_list(5), job).matched == 7


@pytest.mark.slow
def test_a_photo_that_kills_the_process_is_named_by_the_next_run(tmp_path, photos):
    """The decoder of this photo dies by SIGSEGV, in whichever process it is."""
    (photos / "2.png").rename(photos / "killer.png")
    (tmp_path / "pairs.txt").write_text("0.png 1.png\n1.png killer.png\nkiller.png 3.png\n0.png 3.png\n")
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(CRASHING)
    path = os.pathsep.join([str(tmp_path / "hook"), *filter(None, sys.path)])
    command = [
        sys.executable, "-m", "prism_match", "match-pairs", str(tmp_path / "pairs.txt"), "--method", "sift",
        "--images", str(photos), "-o", str(tmp_path / "store"), "--size", "160",
    ]  # fmt: skip
    ended = [
        subprocess.run(
            command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120
        )
        for _ in range(2)
    ]
    assert ended[0].returncode == -signal.SIGSEGV
    assert ended[1].returncode == 0, ended[1].stderr
    assert "killer.png: the process that decodes it dies (signal 11)" in ended[1].stderr
    assert set(MatchStore(tmp_path / "store")) == {("0.png", "1.png"), ("0.png", "3.png")}


def test_good_photos_are_not_suspected(photos):
    (photos / "broken.png").write_bytes(b"no photo")
    assert find_killers({p.name: p for p in photos.iterdir()}) == {}


# ---- lists and shards


def test_a_list_of_pairs_is_read(tmp_path):
    file = tmp_path / "pairs.txt"
    file.write_text("# two names\nb a\na b\n\nc c\nwith space\tc\n")
    listed = PairList.read(file)
    assert [(listed.names[i], listed.names[j]) for i, j in listed.pairs] == [("b", "a"), ("with space", "c")]
    file.write_bytes(b"\xef\xbb\xbfa b\r\nb c\r\n")  # as editors of Windows write it
    assert PairList.read(file).names == ["a", "b", "c"]
    file.write_text("a b\na b c\n")
    with pytest.raises(UserError, match="line 2: 3 words"):
        PairList.read(file)
    for text in ("", "a a\n"):
        file.write_text(text)
        with pytest.raises(UserError, match="no pair"):
            PairList.read(file)
    file.write_bytes(b"\xff\xfe\x00a b\n")
    with pytest.raises(UserError, match="cannot be read"):
        PairList.read(file)


def take_all(shards: Shards, seconds_a_pair: float = 0.1, workers: int = 4) -> list[np.ndarray]:
    taken: list[np.ndarray] = []
    while shards.left:
        worker = len(taken) % workers
        taken.append(shards.take(worker, workers))
        shards.measured(len(taken[-1]), seconds_a_pair * len(taken[-1]), worker)
    return taken


def test_shards_have_every_pair_once_and_sizes_by_cost():
    pairs = np.stack(np.triu_indices(100, 1), axis=1)
    sizes = {}
    for cost in (0.1, 0.5):
        taken = take_all(Shards(pairs, seconds=20.0), cost)
        assert sorted(np.concatenate(taken).tolist()) == list(range(len(pairs)))
        sizes[cost] = [len(rows) for rows in taken]
    assert sizes[0.1][0] == FIRST  # nothing is known yet
    assert max(sizes[0.1]) == 200 and max(sizes[0.5]) == 40
    assert sizes[0.1][-1] <= 20  # small towards the end: nobody waits for the last one
    # A pair that takes longer than a shard should is a shard.
    assert {len(rows) for rows in take_all(Shards(pairs[:50], seconds=1.0), 5.0)[4:]} == {1}
    assert take_all(Shards(pairs[:0])) == []


def wall_clock(shards: Shards, speeds: list[float], late: dict[int, float] | None = None) -> float:
    """Seconds until workers of such speeds (pairs a second) are through, of which some join late."""
    ready = {worker: (late or {}).get(worker, 0.0) for worker in range(len(speeds))}
    ends = []
    while shards.left:
        worker = min(ready, key=lambda w: ready[w])
        rows = shards.take(worker, len(speeds))
        took = len(rows) / speeds[worker]
        shards.measured(len(rows), took, worker)
        ready[worker] += took
        ends.append(ready[worker])
    return max(ends)


@pytest.mark.parametrize(
    ("photos", "speeds", "late"),
    [
        (9, [0.7, 0.7], {}),
        (40, [0.7, 0.7], {}),
        (60, [10.0, 10.0, 1.0], {}),
        (60, [20.0] * 7 + [5.0], {}),
        (60, [10.0, 10.0], {1: 60.0}),
    ],
)
def test_nobody_waits_long_for_the_last_shard(photos, speeds, late):
    pairs = np.stack(np.triu_indices(photos, 1), axis=1)
    best = (len(pairs) + sum(speeds[w] * seconds for w, seconds in late.items())) / sum(speeds)
    slowest = 1 / min(speeds)  # of a pair
    assert wall_clock(Shards(pairs), speeds, late) < 1.01 * best + max(2.5, 2 * slowest)


def test_shards_of_a_worker_share_photos_with_the_one_before():
    steps = np.arange(4000)[:, None]
    pairs = np.concatenate([np.concatenate([steps, steps + k], axis=1) for k in (1, 2, 3)])
    shards, at_hand, shared = Shards(pairs, seconds=20.0), {}, []
    while shards.left:
        worker = len(shared) % 4
        expected = shards.upcoming(worker, 4)
        rows = shards.take(worker, 4)
        assert not len(expected) or set(expected) == set(rows)
        photos = set(pairs[rows].ravel())
        shared.append(bool(photos & at_hand.get(worker, set())))
        at_hand[worker] = photos
        shards.measured(len(rows), 0.1 * len(rows), worker)
    assert np.mean(shared) > 0.8


def test_photos_are_seen_once_and_fetched_once_by_a_worker(tmp_path, photos, monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    for path in photos.iterdir():
        memory.pipe_file(f"/{tmp_path.name}/in/{path.name}", path.read_bytes())
    monkeypatch.setattr(folders, "COPIES", tmp_path / "copies")
    fetched, seen = [], []
    read, extract = folders.RemoteFolder.read, Sift.extract
    monkeypatch.setattr(
        folders.RemoteFolder, "read", lambda self, name: fetched.append(name) or read(self, name)
    )
    monkeypatch.setattr(
        Sift, "extract", lambda self, prepared: seen.extend(prepared) or extract(self, prepared)
    )
    # A shard of one pair each, of photos in a row.
    listed = PairList([f"{n}.png" for n in range(5)], np.stack([np.arange(4), np.arange(1, 5)], axis=1))
    monkeypatch.setattr(shards, "FIRST", 1)
    assert run(listed, make_job(f"memory://{tmp_path.name}/in", tmp_path / "store"), 1e-9).matched == 4
    assert len(list((tmp_path / "store" / "shards").iterdir())) == 4
    assert sorted(fetched) == listed.names and len(seen) == 5
    assert not list((tmp_path / "copies").iterdir())


def test_photos_that_are_needed_next_come_meanwhile(tmp_path, photos, monkeypatch):
    pytest.importorskip("fsspec")
    memory = folders.RemoteFolder(f"memory://{tmp_path.name}")
    for path in photos.iterdir():
        memory.write(path.name, path.read_bytes())
    monkeypatch.setattr(folders, "COPIES", tmp_path / "copies")
    with folders.Fetcher(memory) as fetcher:
        files, broken = fetcher.get(["0.png", "1.png", "none.png"])
        assert sorted(files) == ["0.png", "1.png"] and "no such file" in broken["none.png"]
        fetcher.begin(["1.png", "2.png", "other.png"])
        fetcher._begun["2.png"].result()
        memory.remove("2.png")  # it is here already
        kept = files["1.png"]
        memory.write("none.png", b"now it is there")
        files, broken = fetcher.get(["1.png", "2.png", "none.png"])
        assert not broken and files["1.png"] == kept
        assert files["2.png"].read_bytes() == (photos / "2.png").read_bytes()
        assert len(list(kept.parent.iterdir())) == 3  # of 0.png there is no copy any more
        monkeypatch.setattr(tempfile, "mkstemp", no_room)
        with pytest.raises(UserError, match="no room for photos"):
            fetcher.get(["3.png"])
    assert not list((tmp_path / "copies").iterdir())


def no_room(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_pairs_of_a_shard_share_photos():
    """Photos on a grid of streets, each with its neighbours, listed in no order."""
    side, rng = 40, np.random.default_rng(0)
    at = np.arange(side * side).reshape(side, side)
    steps = [(0, 1), (1, 0), (1, 1), (0, 2), (2, 0)]
    pairs = np.concatenate(
        [np.stack([at[: side - y, : side - x], at[y:, x:]], -1).reshape(-1, 2) for y, x in steps]
    )
    pairs = rng.permutation(side * side)[pairs][rng.permutation(len(pairs))]
    assert np.array_equal(np.unique(walk(pairs)), np.arange(side * side))

    def decoded(shards: list[np.ndarray]) -> int:
        return sum(len(np.unique(pairs[rows])) for rows in shards)

    ours = decoded(take_all(Shards(pairs, seconds=20.0), workers=1))
    as_listed = decoded(np.array_split(np.arange(len(pairs)), 40))
    assert ours < 0.25 * as_listed
    assert ours < 2.5 * side * side


def test_copies_of_killed_processes_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "COPIES", tmp_path)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for number in (ended.pid, os.getpid()):
        (tmp_path / f"{number}-abc").mkdir()
    (tmp_path / "notes-of-mine").mkdir()
    folders.remove_left_copies()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([f"{os.getpid()}-abc", "notes-of-mine"])


# ---- from the command line


def test_the_command_and_who_reads_its_store(tmp_path, photos):
    from typer.testing import CliRunner

    from prism_match.cli import app

    (tmp_path / "pairs.txt").write_text("0.png 1.png\n1.png 2.png\n")
    command = ["match-pairs", str(tmp_path / "pairs.txt"), "--images", str(photos), "-o"]
    options = ["--model-config", "tiny", "--size", "64", "--json", str(tmp_path / "out.json")]
    ended = CliRunner().invoke(app, [*command, str(tmp_path / "store"), *options])
    assert ended.exit_code == 0, ended.output
    assert json.loads((tmp_path / "out.json").read_text())["matched"] == 2
    hloc = ["export", "hloc", str(tmp_path / "store"), "-o", str(tmp_path / "hloc")]
    ended = CliRunner().invoke(app, hloc)
    assert ended.exit_code == 0, ended.output
    for wrong, line in (
        (["--engine", "local", "--address", "auto"], "--address"),
        (["--shard", "0"], "--shard"),
        (["--threads", "0"], "--threads"),
        (["--images", str(tmp_path / "none")], "no such folder"),
    ):
        ended = CliRunner().invoke(app, [*command, str(tmp_path / "store"), *options, *wrong])
        assert isinstance(ended.exception, UserError) and line in str(ended.exception)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"settings": [1]}', '{"settings": 3}', "{}", "no JSON"])
def test_damaged_settings_of_a_store_are_told(tmp_path, photos, text):
    job = make_job(photos, tmp_path / "store")
    run(make_list(2), job)
    (tmp_path / "store" / "store.json").write_text(text)
    with pytest.raises(UserError, match="store.json: damaged"):
        run(make_list(3), job)
    with pytest.raises(UserError, match="store.json: damaged"):
        MatchStore(tmp_path / "store")


def test_a_damaged_note_of_what_was_at_hand_is_nothing(tmp_path, photos):
    job = make_job(photos, tmp_path / "store")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "at-hand.json").write_text("[" * 100_000)
    assert run(make_list(2), job).matched == 1


@pytest.mark.slow
def test_kills_at_random_moments(tmp_path):
    """In the end it is as if nothing had happened."""
    photos = write_photos(tmp_path / "photos", 14, side=400)
    listed = make_list(14)
    lines = [f"{listed.names[a]} {listed.names[b]}\n" for a, b in listed.pairs]
    (tmp_path / "pairs.txt").write_text("".join(lines))

    def start(store):
        return subprocess.Popen(
            [sys.executable, "-m", "prism_match", "match-pairs", str(tmp_path / "pairs.txt"), "--method",
             "sift", "--images", str(photos), "-o", str(tmp_path / store), "--shard", "0.3"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip

    assert start("calm").wait(300) == 0
    rng = np.random.default_rng(0)
    for _ in range(24):
        process = start("killed")
        time.sleep(rng.uniform(1.0, 6.0))
        process.kill()
        process.wait()
    assert start("killed").wait(300) == 0
    assert contents(tmp_path / "killed") == contents(tmp_path / "calm")
    assert not [p for p in (tmp_path / "killed").rglob("*.h5") if p.name.startswith(".")]
