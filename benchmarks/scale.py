"""What matching on a Ray cluster costs beside matching in one process, and what a long list of pairs costs
whoever hands it out.

python benchmarks/scale.py throughput            two workers on two cores, against one process
python benchmarks/scale.py driver --pairs 1000000
python benchmarks/scale.py store

Other work on the machine disturbs the first: runs alternate, and medians are compared. The time of the CPU
that Ray, its workers and this process take together is told, too, which others disturb less; compare it with
that of one thread (--threads 1), since threads that wait for each other take it as well.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import torch

from prism_match.config import load_model_config
from prism_match.engine import Engine, Limits, MatcherSettings, MatchStore, Prism, Resize
from prism_match.engine.cluster import Cluster, Crew, connected, hand_out, make_shard
from prism_match.engine.folders import open_folder
from prism_match.engine.match_pairs import PairList, claim_settings, look_through
from prism_match.engine.shards import Job, Shard, Shards, write_shard
from prism_match.evaluation.report import Table
from prism_match.matches import Matches

WORKERS = 64  # that a long list is handed to
ASSETS = Path(__file__).parents[1] / "src" / "prism_match" / "assets"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["throughput", "driver", "store"])
    parser.add_argument("--photos", type=int, default=24, help="throughput: each is matched with each")
    parser.add_argument("--size", type=int, default=160, help="throughput: longer side in pixels")
    parser.add_argument("--model-config", help="throughput: a smaller model [the shipped one]")
    parser.add_argument("--repeat", type=int, default=5, help="throughput")
    parser.add_argument("--shard", type=float, default=10.0, help="throughput: seconds of a shard")
    parser.add_argument("--workers", type=int, default=2, help="throughput: of one core each")
    parser.add_argument("--threads", type=int, help="throughput: of the one process [as many as workers]")
    parser.add_argument("--pairs", type=int, default=1_000_000, help="driver")
    parser.add_argument("--matches", type=int, default=1000, help="store: of a pair")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        {"throughput": throughput, "driver": driver, "store": store}[args.what](args, Path(folder))


# ---- the same pairs, in one process and by workers


def throughput(args: argparse.Namespace, folder: Path) -> None:
    # Other photos each time: workers keep what they know of them.
    sets = [write_photos(folder / "photos", n, args.photos, 2 * args.size) for n in range(args.repeat + 1)]
    lists = [PairList(list(x), np.stack(np.triu_indices(args.photos, 1), axis=1)) for x in sets]
    config = None if args.model_config is None else load_model_config(args.model_config).to_dict()
    settings = MatcherSettings(config=config, size=args.size, rotate="never")
    resizing = Resize.largest(args.size)
    torch.set_num_threads(args.threads or args.workers)
    method = Prism(settings.open())
    engine_settings = json.loads(json.dumps(Engine(method, resizing).settings))
    job = Job("prism", settings.to_json(), resizing, engine_settings, str(folder / "photos"), threads=1)
    pairs = len(lists[0].pairs)

    def here(n: int) -> Cost:
        engine = Engine(method, resizing, Limits())
        names = [(lists[n].names[a], lists[n].names[b]) for a, b in lists[n].pairs]
        began = Cost.now()
        with MatchStore(folder / f"local{n}.h5", engine.settings) as matches:
            for _ in engine.match(sets[n], names, matches):
                pass
        return began.since(pairs)

    def there(n: int, crew: Crew) -> Cost:
        listed = lists[n]
        shards = Shards(listed.pairs, args.shard)
        began = Cost.now()
        done = hand_out(crew, shards, lambda rows: make_shard(listed.pairs[rows], listed.names))
        assert sum(x.result.done for x in done if x.result) == pairs
        return began.since(pairs)

    claim_settings(open_folder(folder / "ray"), job.settings)
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # Ray's 15 would let other programs go first
    began = time.perf_counter()
    with (
        connected(None) as ray,
        Crew(ray, Cluster(device="cpu"), replace(job, store=str(folder / "ray"))) as crew,
    ):
        while len(crew.idle()) < args.workers:
            for task in crew.wait({}):
                crew.opened(task)
        print(f"Ray started, models loaded: {time.perf_counter() - began:.1f} s")
        here(0), there(0, crew)  # to warm up
        costs: dict[str, list[Cost]] = {"one process": [], "Ray": []}
        for n in range(1, args.repeat + 1):
            costs["one process"].append(here(n))
            costs["Ray"].append(there(n, crew))
            print({k: [round(1000 * x, 1) for x in v[-1]] for k, v in costs.items()}, flush=True)
    rows = []
    for name, measured in costs.items():
        seconds, cpu = ([getattr(cost, kind) for cost in measured] for kind in ("seconds", "cpu"))
        rows.append([
            name,
            f"{1 / statistics.median(seconds):.2f}", f"{1 / max(seconds):.2f} to {1 / min(seconds):.2f}",
            f"{1000 * statistics.median(cpu):.0f} ms", f"{1000 * min(cpu):.0f} to {1000 * max(cpu):.0f} ms",
        ])  # fmt: skip
    title = f"{pairs} pairs of {args.photos} photos at {args.size} px, {args.repeat} times"
    print(Table(title, ["", "pairs/s, median", "range", "CPU a pair, median", "range"], rows))
    for kind in ("seconds", "cpu"):
        local, far = (statistics.median(getattr(c, kind) for c in v) for v in costs.values())
        print(f"Ray with {args.workers} workers, by {kind}: {local / far:.2f} of one process")


class Cost(NamedTuple):
    """Of a pair, or since some moment: on the clock, and of the CPU by this process and those it started."""

    seconds: float
    cpu: float

    @staticmethod
    def now() -> Cost:
        return Cost(time.perf_counter(), sum(cpu_seconds().values()))

    def since(self, pairs: int) -> Cost:
        return Cost(*((now - then) / pairs for now, then in zip(Cost.now(), self, strict=True)))


def cpu_seconds() -> dict[int, float]:
    """Of this process and all below it, by their numbers."""
    parents, taken = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        number = int(path.parent.name)
        parents[number] = int(words[1])
        taken[number] = (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    mine = {os.getpid()}
    while more := {n for n, parent in parents.items() if parent in mine} - mine:
        mine |= more
    return {n: taken[n] for n in mine}


def write_photos(folder: Path, seed: int, count: int, side: int) -> dict[str, Path]:
    """Views of the bundled photo that overlap, in a folder below."""
    (folder / str(seed)).mkdir(parents=True)
    photo = cv2.imread(str(ASSETS / "astronaut0.jpg"))
    cut = int(0.7 * min(photo.shape[:2]))
    rng = np.random.default_rng(seed)
    files = {}
    for n in range(count):
        x, y = (int(rng.integers(length - cut)) for length in (photo.shape[1], photo.shape[0]))
        view = cv2.resize(photo[y : y + cut * 3 // 4, x : x + cut], (side, side * 3 // 4))
        files[f"{seed}/{n}.jpg"] = folder / str(seed) / f"{n}.jpg"
        cv2.imwrite(str(files[f"{seed}/{n}.jpg"]), view)
    return files


# ---- a list of many pairs


def driver(args: argparse.Namespace, folder: Path) -> None:
    path = folder / "pairs.txt"
    writer = multiprocessing.Process(target=write_list, args=(path, args.pairs))  # its memory does not count
    writer.start()
    writer.join()
    before = memory()
    times = {}
    began = time.process_time()
    listed = PairList.read(path)
    times["read the list"] = time.process_time() - began
    told = []
    for size in (1000, 4000):
        began = time.process_time()
        shards = Shards(listed.pairs)
        times["find their order"] = time.process_time() - began
        began = time.process_time()
        count, seen, fetched = 0, 0, 0
        at_hand: dict[int, set[str]] = {}  # photos of the shard before, by worker
        while shards.left:
            worker = count % WORKERS
            rows = shards.take(worker, WORKERS)
            shard = make_shard(listed.pairs[rows], listed.names)
            shards.measured(len(rows), shards.seconds / size * len(rows), worker)
            photos = set(shard.names)
            count, seen = count + 1, seen + len(photos)
            fetched += len(photos - at_hand.get(worker, set()))
            at_hand[worker] = photos
        times[f"cut them into shards of up to {size}"] = time.process_time() - began
        told.append(
            f"{count} shards of up to {size}; a photo is in {seen / len(listed.names):.2f} of them, and "
            f"fetched {fetched / len(listed.names):.2f} times"
        )
    rows = [[what, f"{seconds:.1f} s", f"{1e6 * seconds / len(listed.pairs):.1f} us"]
            for what, seconds in times.items()]  # fmt: skip
    title = f"{len(listed.pairs)} pairs of {len(listed.names)} photos, {path.stat().st_size / 2**20:.0f} MiB"
    print(Table(title, ["CPU", "all", "a pair"], rows))
    print(*told, sep="\n")
    print(f"memory: {(memory() - before) / len(listed.pairs) * 2**30:.0f} bytes a pair")


def write_list(path: Path, pairs: int) -> None:
    """Photos of a town on a square, each with its 20 neighbours or so, listed by photo in no order."""
    side = int(np.sqrt(pairs / 10))
    at = np.random.default_rng(0).permutation(side * side).reshape(side, side)
    steps = [(0, 1), (1, 0), (1, 1), (1, -1), (0, 2), (2, 0), (2, 1), (1, 2), (2, -1), (1, -2)]
    near = np.concatenate(
        [np.stack([at, np.roll(at, step, axis=(0, 1))], axis=-1).reshape(-1, 2) for step in steps]
    )
    with path.open("w", encoding="utf-8") as file:
        for a, b in near[np.argsort(near[:, 0], kind="stable")].tolist():
            file.write(f"camera/{a:08d}.jpg camera/{b:08d}.jpg\n")


def memory() -> float:
    """The most that there was, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


# ---- shards on disk


def store(args: argparse.Namespace, folder: Path) -> None:
    rng = np.random.default_rng(0)
    count, each, photos = 20, 1000, 200
    settings = {"method": "made up"}
    place = open_folder(folder / "store")
    claim_settings(place, settings)
    names, rows = [], []
    writing = 0.0
    for n in range(count):
        mine = [f"camera/{n:04d}-{k:04d}.jpg" for k in range(photos)]
        pairs = np.stack(np.triu_indices(photos, 1), axis=1)
        pairs = pairs[rng.choice(len(pairs), each, replace=False)]
        shard = Shard(mine, pairs, ["123456-1700000000000000000"] * photos)
        found = {}
        for pair in shard.named():
            points = rng.random((2, args.matches, 2), dtype=np.float32) * 800
            scores = np.sort(rng.random(args.matches, dtype=np.float32))[::-1]
            found[pair] = Matches(*points, scores, (800, 600), (800, 600))
        began = time.process_time()
        write_shard(place.address, settings, shard, found, dict.fromkeys(mine, "0" * 32))
        writing += time.process_time() - began
        rows.append(pairs + len(names))
        names += mine
    total = count * each
    listed = PairList(names, np.concatenate(rows))
    size = sum(path.stat().st_size for path in (folder / "store" / "shards").iterdir())
    stamps = dict.fromkeys(names, "123456-1700000000000000000")
    began = time.process_time()
    assert look_through(place, settings, listed, open_folder(folder), stamps).done.all()
    looking = time.process_time() - began
    began = time.process_time()
    read = MatchStore(folder / "store")
    opening = time.process_time() - began
    began = time.process_time()
    assert sum(1 for _ in read.values()) == total
    reading = time.process_time() - began
    rows_ = [
        [what, f"{1e3 * seconds / total:.3f} ms"]
        for what, seconds in (
            ("write it", writing), ("see that it is there", looking),
            ("open the store to read it", opening), ("read it", reading),
        )
    ]  # fmt: skip
    print(Table(f"{count} shards of {each} pairs, {args.matches} matches each", ["CPU", "a pair"], rows_))
    print(f"{size / total:.0f} bytes a pair, {size / total / args.matches:.1f} a match")


if __name__ == "__main__":
    main()
