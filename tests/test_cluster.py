"""Matching on real Ray clusters of several nodes, all on this machine, and what is done to them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import ASSETS
from pairs_on_disk import CRASHING, contents, make_job, make_list, write_photos

from prism_match import Matcher
from prism_match.config import PRESETS
from prism_match.engine import Engine, Limits, MatcherSettings, MatchStore, Prism, Resize
from prism_match.engine.cluster import Cluster as Where
from prism_match.engine.cluster import RayEngine
from prism_match.engine.match_pairs import match_pairs
from prism_match.engine.methods import Sift
from prism_match.engine.shards import Job
from prism_match.errors import UserError
from prism_match.files import lock_folder

ray = pytest.importorskip("ray")
SMALL = {"num_cpus": 1, "object_store_memory": 100 * 2**20}

# A method that takes its time, tells which processes it runs in, and depends on both images.
SLOW = """
import os, pathlib, time
import numpy as np
here = pathlib.Path(__file__).parent
def match(image0, image1):
    (here / "pids").mkdir(exist_ok=True)
    (here / "pids" / str(os.getpid())).touch()
    time.sleep(0.05)
    while (here / "hold").exists():
        time.sleep(0.05)
    if (here / "fail").exists() and image0.shape[1] == 100:
        raise RuntimeError("no luck with this one")
    points = np.argwhere(image0[..., 0] > 128)[:50, ::-1].astype(np.float32)
    return points, points + image1[0, 0, 0] / 100, np.linspace(1, 0, len(points))
"""


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """A cluster without nodes that can match yet: tests add them."""
    from ray.cluster_utils import Cluster

    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(CRASHING)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "hook"), *filter(None, sys.path)]))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # or whatever else runs here goes first
    cluster = Cluster(
        initialize_head=True, head_node_args={**SMALL, "num_cpus": 0, "include_dashboard": False}
    )
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def slow_job(tmp_path, monkeypatch) -> Job:
    (tmp_path / "slow_method.py").write_text(SLOW)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_photos(tmp_path / "photos", 14)
    job = make_job(tmp_path / "photos", tmp_path / "store", "slow_method:match")
    return replace(job, python_path=str(tmp_path))


def where(cluster, seconds: float = 0.5) -> Where:
    return Where(cluster.address, shard_seconds=seconds)


def expected(job: Job, store: Path) -> dict:
    """What an undisturbed run in this process gives."""
    match_pairs(make_list(14), replace(job, store=str(store)), None, 60.0)
    return contents(store)


def pids(folder: Path) -> list[int]:
    return [int(p.name) for p in folder.glob("pids/*")]


def wait_for(what, seconds: float = 60.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if what():
            return
        time.sleep(0.1)
    raise AssertionError("it never happened")


def in_thread(work) -> tuple[threading.Thread, list]:
    results: list = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    return thread, results


def test_workers_give_the_bits_of_one_process(tmp_path, nodes):
    photos = write_photos(tmp_path / "photos", 4)
    config = PRESETS["tiny"].replace(theta_c=0.0).to_dict()
    settings = MatcherSettings(config=config, size=96, rotate="never", precision="fp32")
    engine = Engine(Prism(settings.open()), Resize.largest(96))
    job = Job("prism", settings.to_json(), engine.resizing, engine.settings, str(photos), threads=1)
    nodes.add_node(**SMALL | {"num_cpus": 2})
    stores = [tmp_path / "local", tmp_path / "ray"]
    for store, cluster in zip(stores, (None, where(nodes)), strict=True):
        summary = match_pairs(make_list(4), replace(job, store=str(store)), cluster, 60.0)
        assert (summary.matched, summary.photos, summary.failed) == (6, {}, [])
    first, second = map(contents, stores)
    assert first == second and sum(len(x) for m in first.values() for x in m) > 0


@pytest.mark.slow
def test_matches_come_back_to_one_file(tmp_path, nodes):
    """The way of sfm, localize and eval."""
    photos = write_photos(tmp_path / "photos", 4)
    (photos / "3.png").write_bytes(b"no photo")
    files = {p.name: p for p in photos.iterdir()}
    pairs = [(f"{a}.png", f"{b}.png") for a, b in make_list(4).pairs]
    near = Engine(Sift(), Resize.largest(96))
    with MatchStore(tmp_path / "near.h5", near.settings) as store:
        assert len(list(near.match(files, pairs, store))) == 6
    nodes.add_node(**SMALL)
    far = RayEngine(Sift(), Resize.largest(96), Limits(), None, where(nodes))
    with MatchStore(tmp_path / "far.h5", far.settings) as store:
        outcomes = {o.pair: o for o in far.match(files, pairs, store)}
    assert contents(tmp_path / "far.h5") == contents(tmp_path / "near.h5")
    assert {p for p, o in outcomes.items() if o.broken} == {p for p in pairs if "3.png" in p}
    assert far.clock.pairs == 3 and far.clock.seconds > 0


@pytest.mark.slow
def test_workers_killed_at_random_moments(tmp_path, nodes, slow_job):
    for _ in range(2):
        nodes.add_node(**SMALL)
    thread, results = in_thread(lambda: match_pairs(make_list(14), slow_job, where(nodes), 0.5))
    rng = np.random.default_rng(0)
    seen: set[int] = set()
    killed = 0
    while thread.is_alive() and killed < 6:
        fresh = sorted(set(pids(tmp_path)) - seen)
        if fresh:
            time.sleep(rng.uniform(0.0, 1.5))
            victim = fresh[rng.integers(len(fresh))]
            seen.add(victim)
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself meanwhile
                os.kill(victim, signal.SIGKILL)
                killed += 1
        time.sleep(0.1)
    thread.join(180)
    assert results and killed >= 2
    summary = results[0]
    assert not summary.photos
    # That one shard meets three kills is bad luck, and told; the next run mends it.
    if summary.failed:
        assert "its worker died" in summary.failed[0][2]
        match_pairs(make_list(14), slow_job, where(nodes), 0.5)
    assert contents(slow_job.store) == expected(slow_job, tmp_path / "calm")


@pytest.mark.slow
def test_photos_and_store_at_an_address(tmp_path, nodes, monkeypatch):
    """fsspec's name for files on this machine stands for any: photos are copied, nothing is locked."""
    pytest.importorskip("fsspec")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    for _ in range(2):
        nodes.add_node(**SMALL)
    photos = write_photos(tmp_path / "photos", 8)
    job = make_job(f"local://{photos}", f"local://{tmp_path}/far")
    summary = match_pairs(make_list(8), job, where(nodes, 0.2), 0.2)
    assert (summary.matched, summary.photos, summary.failed) == (28, {}, [])
    match_pairs(make_list(8), replace(job, images=str(photos), store=str(tmp_path / "near")), None, 60.0)
    assert contents(f"local://{tmp_path}/far") == contents(tmp_path / "near")
    copies = [p for p in (tmp_path / "temporary").iterdir() if p.name.startswith("prism-photos")]
    assert len(copies) == 1 and not list(copies[0].iterdir())


@pytest.mark.slow
def test_a_node_goes_and_another_comes(tmp_path, nodes, slow_job):
    first = nodes.add_node(**SMALL)
    (tmp_path / "hold").touch()  # or all might be done before the second one is there
    thread, results = in_thread(lambda: match_pairs(make_list(14), slow_job, where(nodes), 0.5))
    wait_for(lambda: len(pids(tmp_path)) == 1)
    second = nodes.add_node(**SMALL)
    wait_for(lambda: len(pids(tmp_path)) == 2)  # one that joins late has work
    (tmp_path / "hold").unlink()
    nodes.remove_node(first, allow_graceful=False)
    thread.join(180)
    assert results and not results[0].failed and results[0].matched == 91
    assert contents(slow_job.store) == expected(slow_job, tmp_path / "calm")
    assert second in nodes.list_all_nodes()


def start_driver(tmp_path: Path, cluster, store: Path) -> subprocess.Popen:
    listed = make_list(14)
    lines = [f"{listed.names[a]} {listed.names[b]}\n" for a, b in listed.pairs]
    (tmp_path / "pairs.txt").write_text("".join(lines))
    return subprocess.Popen(
        [sys.executable, "-m", "prism_match", "match-pairs", "pairs.txt", "--images", "photos", "-o",
         str(store), "--engine", "ray", "--address", cluster.address, "--shard", "0.3", "--method",
         "slow_method:match", "--size", "160"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_the_driver_is_killed_and_started_again(tmp_path, nodes, slow_job):
    for _ in range(2):
        nodes.add_node(**SMALL)
    store = tmp_path / "store"
    for more in (1, 4):
        driver = start_driver(tmp_path, nodes, store)
        there = len(list(store.glob("shards/*.h5")))
        wait_for(lambda: len(list(store.glob("shards/*.h5"))) >= there + more)  # noqa: B023
        driver.kill()
        driver.communicate()
    stamps = {p: p.stat().st_mtime_ns for p in store.glob("shards/*.h5")}
    with lock_folder(store):  # as a run has it
        second = start_driver(tmp_path, nodes, store)
        told = second.communicate(timeout=120)[1]
    assert second.returncode == 2 and "in use by another run" in told and "Traceback" not in told
    driver = start_driver(tmp_path, nodes, store)
    out, err = driver.communicate(timeout=180)
    assert driver.returncode == 0, err
    assert "there before  0" not in out
    assert all(p.stat().st_mtime_ns == stamp for p, stamp in stamps.items())
    assert contents(store) == expected(slow_job, tmp_path / "calm")


@pytest.mark.slow
def test_a_shard_that_fails_three_times_is_named(tmp_path, nodes, slow_job):
    nodes.add_node(**SMALL)
    write_photos(tmp_path / "small", 1, side=100)
    (tmp_path / "small" / "0.png").replace(tmp_path / "photos" / "0.png")
    (tmp_path / "fail").touch()
    summary = match_pairs(make_list(14), slow_job, where(nodes), 0.2)
    failed = {(a, b) for a, b, _ in summary.failed}
    assert {(f"{a}.png", f"{b}.png") for a in (0,) for b in range(1, 14)} <= failed
    assert all("failed 3 times: RuntimeError: no luck" in reason for _, _, reason in summary.failed)
    assert summary.matched == 91 - len(failed) > 0 and not summary.photos
    (tmp_path / "fail").unlink()
    assert match_pairs(make_list(14), slow_job, where(nodes), 0.2).matched == len(failed)


@pytest.mark.slow
def test_a_photo_that_kills_workers_is_named(tmp_path, nodes):
    photos = write_photos(tmp_path / "photos", 5)
    (photos / "2.png").rename(photos / "killer.png")
    listed = make_list(5)
    listed.names[2] = "killer.png"
    for _ in range(2):
        nodes.add_node(**SMALL)
    summary = match_pairs(listed, make_job(photos, tmp_path / "store"), where(nodes), 60.0)
    assert summary.photos == {"killer.png": "killer.png: the process that decodes it dies (signal 11)"}
    assert summary.matched == len(MatchStore(tmp_path / "store")) == 6 and not summary.failed


@pytest.mark.slow
def test_a_full_disk(tmp_path, nodes):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small disk")
    try:
        nodes.add_node(**SMALL)
        photos = write_photos(tmp_path / "photos", 8, side=400)
        job = make_job(photos, disk / "store", size=400)
        with pytest.raises(UserError, match="No space left on device"):
            match_pairs(make_list(8), job, where(nodes, 0.3), 0.3)
        kept = contents(disk / "store")
        assert 0 < len(kept) < 28
        subprocess.run([*mount[:4], "remount,size=20m", *mount[5:]], check=True)
        summary = match_pairs(make_list(8), job, where(nodes), 0.3)
        assert summary.there == len(kept) and summary.there + summary.matched == 28
        everything = contents(disk / "store")
        match_pairs(make_list(8), replace(job, store=str(tmp_path / "calm")), None, 60.0)
        assert everything == contents(tmp_path / "calm")
    finally:
        subprocess.run(["umount", str(disk)], check=False)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:99999", "ray://127.0.0.1:1"])
def test_a_cluster_that_is_not_there(tmp_path, address):
    photos = write_photos(tmp_path / "photos", 2)
    with pytest.raises(UserError, match=f"{address}: no cluster can be reached"):
        match_pairs(make_list(2), make_job(photos, tmp_path / "store"), Where(address), 60.0)


@pytest.mark.slow
def test_workers_that_cannot_begin(tmp_path, nodes):
    nodes.add_node(**SMALL)
    photos = write_photos(tmp_path / "photos", 3)
    job = make_job(photos, tmp_path / "store")
    other = replace(job, settings=job.settings | {"features": 7})
    with pytest.raises(UserError, match="no worker can begin: the weights, or this package"):
        match_pairs(make_list(3), other, where(nodes), 60.0)
    with pytest.raises(UserError, match="no GPU"):
        match_pairs(make_list(3), job, replace(where(nodes), device="cuda"), 60.0)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["sfm", "eval", "localize"])
def test_the_commands_on_a_cluster(tmp_path, nodes, verb):
    """They write what they write without one. (With one thread: more give other bits; see conftest.)"""
    nodes.add_node(**SMALL)
    photos = write_photos(tmp_path / "photos", 3)
    tiny = ["--model-config", "tiny", "--size", "96"]
    commands = {
        "sfm": ["sfm", "photos", "--matches-only", *tiny],
        "eval": ["eval", "strecha", "--data", "strecha", "--method", "sift", "--size", "96"],
        "localize": ["localize", "--map", "rgbd", "--queries", "photos", *tiny],
    }
    scenes = {"eval": make_strecha, "localize": make_rgbd}
    if verb in scenes:
        scenes[verb](tmp_path, photos)
    for out, more in (("one", []), ("two", ["--engine", "ray", "--address", nodes.address])):
        cache = ["--cache", out] if verb == "eval" else []
        ended = subprocess.run(
            [sys.executable, "-m", "prism_match", *commands[verb], "-o", out, *cache, *more], cwd=tmp_path,
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
    stores = [next((tmp_path / out).glob("*.h5")) for out in ("one", "two")]
    assert contents(stores[0]) == contents(stores[1]) and len(contents(stores[0])) > 1


def make_strecha(root: Path, photos: Path) -> None:
    folder = root / "strecha" / "wall"
    (folder / "images").mkdir(parents=True)
    lines = []
    for n, path in enumerate(sorted(photos.iterdir())):
        (folder / "images" / path.name).write_bytes(path.read_bytes())
        lines.append(f"{path.name} 150 150 80 60 1 0 0 0 1 0 0 0 1 {0.1 * n} 0 0\n")
    (folder / "cameras.txt").write_text("".join(lines))


def make_rgbd(root: Path, photos: Path) -> None:
    import cv2

    folder = root / "rgbd"
    folder.mkdir()
    np.savetxt(folder / "camera-intrinsics.txt", [[150, 0, 80], [0, 150, 60], [0, 0, 1]])
    for n, path in enumerate(sorted(photos.iterdir())):
        image = cv2.imread(str(path))
        cv2.imwrite(str(folder / f"frame-{n:06d}.color.jpg"), image)
        cv2.imwrite(str(folder / f"frame-{n:06d}.depth.png"), np.full(image.shape[:2], 2000, np.uint16))
        np.savetxt(folder / f"frame-{n:06d}.pose.txt", np.eye(4))


@pytest.mark.slow
def test_the_shipped_model_gives_the_same_bits(tmp_path, nodes):
    nodes.add_node(**SMALL)
    files = {p.name: p for p in sorted(ASSETS.glob("*.jpg"))}
    pairs = [("astronaut0.jpg", "astronaut1.jpg"), ("motorcycle0.jpg", "motorcycle1.jpg")]
    matcher = Matcher(size=256)
    found = []
    for engine in (
        Engine(Prism(matcher), Resize.largest(256)),
        RayEngine(Prism(matcher), Resize.largest(256), None, None, where(nodes)),
        RayEngine(Sift(), Resize.largest(256), None, None, where(nodes)),
    ):
        outcomes = {o.pair: o.matches for o in engine.match(files, pairs)}
        found.append({p: (m.keypoints1.tobytes(), m.scores.tobytes()) for p, m in outcomes.items()})
    assert found[0] == found[1] and found[2].keys() == found[0].keys()
