"""Commands killed at random moments, and started again: each must end with the files of an undisturbed run.

python benchmarks/kills.py                       24 kills of each command
python benchmarks/kills.py --kills 3 sfm train   some of them
python benchmarks/kills.py --seed 7

A round begins with an empty folder: the command is started, killed with SIGKILL at a random moment, started
again, killed again, --in-a-row times, and then runs to its end. What it leaves is compared with what a run
leaves that nobody disturbed: arrays, tensors, tables and texts, not the times in them; no file may be there
that is not there otherwise. Data and models are tiny. Commands run in forked processes that have everything
imported, so that the kills hit the work and not Python's start; what they write, they write as often as they
can. Exit code 1: something was lost.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import cv2
import h5py
import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from synthetic_matcher import SyntheticMatcher, make_photos  # noqa: E402

from prism_match import cli  # noqa: E402
from prism_match.engine import MatchStore  # noqa: E402
from prism_match.matches import Matches  # noqa: E402

MOST_SECONDS = 900.0  # of a run that nobody kills
TINY = ["--model-config", "tiny", "--size", "64", "--device", "cpu"]


@dataclass(frozen=True)
class Job:
    """A command. prepare: makes FOLDER/in; words: what comes after `prism` when it starts in FOLDER, where
    `out` may hold what a killed run has left; patch: is called in the new process before the command."""

    prepare: Callable[[Path], None]
    words: Callable[[Path], list[str]]
    patch: Callable[[Path], None] = lambda _: None
    use: Callable[[Path], None] | None = None  # what a server is asked while it runs; it is ended afterwards


# ---- the commands


def prepare_sfm(folder: Path) -> None:
    make_photos(folder / "in", views=4)


def patch_sfm(folder: Path) -> None:
    """The matcher knows the scene, and takes a moment for each pair; each is written at once."""
    from synthetic_scene import WIDTH, Scene, cast, texture

    import prism_match.cli.sfm as command
    import prism_match.engine.run as run
    from prism_match.colmap_model import read_model

    model = read_model(folder / "in" / "sparse")
    T = np.stack([view.T for view in model.views])
    walls = np.stack([texture(1), texture(2)]).astype(np.float32)
    depth = np.stack([cast(t, walls)[1] for t in T])
    known = Scene(folder / "in", [v.name for v in model.views], T, depth)
    assert depth.shape[2] == WIDTH

    class Slow(SyntheticMatcher):
        def match(self, a: Any, b: Any) -> Matches:
            time.sleep(0.1)
            return super().match(a, b)

    command.make_matcher = lambda *_, **__: Slow(known)
    run.SECONDS_A_PART = 0.0


def sfm(folder: Path) -> list[str]:
    return ["sfm", "in/images", "-o", "out", "--no-polish", "--cameras", "shared", "--threads", "1"]


def prepare_train(folder: Path) -> None:
    (folder / "in").mkdir()
    for n in range(4):
        coarse = np.random.default_rng(n).integers(0, 255, (24, 24, 3), dtype=np.uint8)
        cv2.imwrite(str(folder / "in" / f"{n}.png"), cv2.resize(coarse, (128, 128)))


def train(folder: Path) -> list[str]:
    words = ["train", "-o", "out", "--photos", "in", "--device", "cpu"]
    if any((folder / "out").glob("step-*")):
        return [*words, "--resume"]
    return [*words, "--preset", "tiny", "--steps", "12", "--save-minutes", "0.0001"]


def prepare_eval(folder: Path) -> None:
    make_photos(folder / "in", views=5)
    K, T = "150 0 80 0 150 60 0 0 1", "1 0 0 0.1 0 1 0 0 0 0 1 0 0 0 0 1"
    pairs = [(a, b) for a in range(5) for b in range(5) if a != b]
    lines = [f"view{a}.png view{b}.png 0 0 {K} {K} {T}\n" for a, b in pairs]
    (folder / "in" / "pairs.txt").write_text("".join(lines))


def evaluate(folder: Path) -> list[str]:
    words = [
        "eval",
        "pairs",
        "--data",
        "in/pairs.txt",
        "--size",
        "64",
        "--out",
        "out",
        "--cache",
        "out/cache",
    ]
    return [
        *words,
        "--model-config",
        "tiny",
        "--device",
        "cpu",
        "--confidence",
        "0",
        "--json",
        "out/scores.json",
    ]


def write_at_once(_: Path) -> None:
    import prism_match.engine.run as run

    run.SECONDS_A_PART = 0.0


def prepare_depth(folder: Path) -> None:
    make_photos(folder / "in", views=5)


def make_depth(folder: Path) -> list[str]:
    return ["data", "depth", "in/sparse", "--images", "in/images", "-o", "out", "--device", "cpu"]


def prepare_pairs(folder: Path) -> None:
    scene, _, _ = make_photos(folder / "in", views=8)
    lines = [f"{a} {b}\n" for a in scene.names for b in scene.names if a < b]
    (folder / "in" / "pairs.txt").write_text("".join(lines))


def match_pairs(_: Path) -> list[str]:
    words = ["match-pairs", "in/pairs.txt", "--images", "in/images", "-o", "out", "--shard", "0.001"]
    return [*words, "--model-config", "tiny", "--size", "160", "--device", "cpu", "--threads", "1"]


def pair_by_pair(_: Path) -> None:
    import prism_match.engine.shards as shards

    shards.FIRST = 1


def prepare_export(folder: Path) -> None:
    scene, images, matcher = make_photos(folder / "in", views=4)
    with MatchStore(folder / "in" / "matches.h5", {"method": "known"}) as store:
        digests = {name: hashlib.blake2b(name.encode(), digest_size=16).hexdigest() for name in scene.names}
        prepared = {name: matcher.prepare(images / name) for name in scene.names}
        pairs = [(a, b) for a in scene.names for b in scene.names if a < b]
        store.add({(a, b): matcher.match(prepared[a], prepared[b]) for a, b in pairs}, digests)
        store.merge()


def export_colmap(folder: Path) -> list[str]:
    words = ["--images", "in/images", "--no-polish", "--verify", "--overwrite"]
    (folder / "out").mkdir(exist_ok=True)
    return ["export", "colmap", "in/matches.h5", "-o", "out/database.db", *words]


def export_hloc(_: Path) -> list[str]:
    return ["export", "hloc", "in/matches.h5", "-o", "out"]


def export_onnx(_: Path) -> list[str]:
    return ["export", "onnx", "-o", "out/prism.onnx", "--model-config", "tiny", "--external-weights"]


def prepare_serve(folder: Path) -> None:
    make_photos(folder / "in", views=2)
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        (folder / "in" / "port").write_text(str(free.getsockname()[1]))


def serve(folder: Path) -> list[str]:
    port = (folder / "in" / "port").read_text()
    return ["serve", "--port", port, *TINY, "--threshold", "0"]


def ask(folder: Path) -> None:
    """The answers to some requests; they are this command's files."""
    (folder / "out").mkdir(exist_ok=True)
    port = int((folder / "in" / "port").read_text())
    photos = [(folder / "in" / "images" / f"view{n}.png").read_bytes() for n in (0, 1)]
    body = b"".join(
        f'--edge\r\nContent-Disposition: form-data; name="image{n}"; filename="x"\r\n\r\n'.encode()
        + photo
        + b"\r\n"
        for n, photo in enumerate(photos)
    )
    headers = {"Content-Type": "multipart/form-data; boundary=edge", "Accept": "application/x-npz"}
    for n in range(6):
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            connection.request("POST", "/v1/match", body + b"--edge--\r\n", headers)
            answer = connection.getresponse()
            data = answer.read()
        if answer.status != 200:
            raise ConnectionError(f"{answer.status}: {data[:200]!r}")
        (folder / "out" / f"{n}.npz").write_bytes(data)


JOBS: dict[str, Job] = {
    "sfm": Job(prepare_sfm, sfm, patch_sfm),
    "train": Job(prepare_train, train),
    "eval": Job(prepare_eval, evaluate, write_at_once),
    "data depth": Job(prepare_depth, make_depth),
    "match-pairs": Job(prepare_pairs, match_pairs, pair_by_pair),
    "export colmap": Job(prepare_export, export_colmap),
    "export hloc": Job(prepare_export, export_hloc),
    "export onnx": Job(prepare_export, export_onnx),
    "serve": Job(prepare_serve, serve, use=ask),
}


# ---- processes


def start(job: Job, folder: Path) -> int:
    """The command in a process of its own; its number."""
    words = job.words(folder)
    process = os.fork()
    if process:
        return process
    try:
        os.chdir(folder)
        log = os.open(folder / "log.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        torch.set_num_threads(1)
        job.patch(folder)
        sys.argv = ["prism", *words]
        cli.main()
    except SystemExit as left:
        sys.stdout.flush()
        os._exit(left.code if isinstance(left.code, int) else 0)
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


def finish(job: Job, folder: Path) -> float:
    """Runs to the end; its seconds."""
    began = time.monotonic()
    process = start(job, folder)
    if job.use is not None:
        use(job.use, folder)
        os.kill(process, signal.SIGTERM)
    code = wait(process, MOST_SECONDS)
    if code != 0:
        raise Lost(f"ended with {code}:\n{(folder / 'log.txt').read_text()[-3000:]}")
    return time.monotonic() - began


def use(work: Callable[[Path], None], folder: Path) -> None:
    """Once the server answers."""
    began = time.monotonic()
    while True:
        try:
            return work(folder)
        except (ConnectionError, OSError, http.client.HTTPException) as error:
            if time.monotonic() - began > MOST_SECONDS:
                raise Lost(f"the server does not answer: {error}") from error
            time.sleep(0.05)


def wait(process: int, seconds: float) -> int:
    """Its exit code; killed if it takes longer."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    raise Lost(f"did not end within {seconds:g} s")


def kill_at(job: Job, folder: Path, seconds: float) -> bool:
    """Whether it was still running when it was killed."""
    process = start(job, folder)
    if job.use is None:
        time.sleep(seconds)
    else:  # in the middle of a request, as likely as not
        helper = os.fork()
        if helper == 0:
            try:
                use(job.use, folder)
            finally:
                os._exit(0)
        time.sleep(seconds)
        os.kill(helper, signal.SIGKILL)
        os.waitpid(helper, 0)
    ended, _ = os.waitpid(process, os.WNOHANG)
    if ended:
        return False
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return True


# ---- what is left


class Lost(Exception):
    pass


def contents(folder: Path) -> dict[str, str]:
    """The digest of what each file says, by its path."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in (".lock",) and path.suffix != ".lock":
            digest = hashlib.sha256(repr(content(path)).encode()).hexdigest()
            found[str(path.relative_to(folder))] = digest[:12]
    if (folder / "store.json").is_file():  # of `match-pairs`: which pairs share a file depends on their times
        shards = [name for name in found if name.startswith("shards/") and name.endswith(".h5")]
        found = {name: digest for name, digest in found.items() if name not in shards}
        with MatchStore(folder) as store:
            for (a, b), m in store.items():
                arrays = repr([digest_of(x) for x in (m.keypoints0, m.keypoints1, m.scores)])
                found[f"{a} {b}"] = hashlib.sha256(arrays.encode()).hexdigest()[:12]
    return found


def content(path: Path) -> Any:
    """Without times, and what is merely another way to keep the same."""
    if path.suffix == ".h5":
        with h5py.File(path, "r") as file:
            items: dict[str, Any] = {f"@{k}": str(v) for k, v in file.attrs.items()}
            names: list[str] = []
            file.visit(names.append)
            for name in sorted(n for n in names if isinstance(file[n], h5py.Dataset)):
                items[name] = digest_of(file[name][()])
        if "images" in items:  # of a store of matches, whose photos have no order
            with MatchStore(path) as store:
                items |= {"images": sorted(map(str, store.images.items())), "sizes": "", "digests": ""}
        return items
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            return {k: digest_of(arrays[k]) for k in sorted(arrays) if not k.startswith("seconds")}
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, "np") as file:
            return {k: digest_of(file.get_tensor(k)) for k in sorted(file.keys())}
    if path.suffix == ".db":
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            return [line for line in database.iterdump() if not line.startswith("PRAGMA")]
    if path.suffix == ".jsonl":
        rows = [without_times(json.loads(line)) for line in path.read_text().splitlines()]
        return (
            sorted(json.dumps(row, sort_keys=True) for row in rows) if path.name == "pairs.jsonl" else "a log"
        )
    if path.suffix == ".json":
        return without_times(json.loads(path.read_text()))
    if path.suffix in (".md", ".txt", ".html"):
        text = re.sub(r"[\d.]+ (s|ms|seconds|minutes)\b", "", path.read_text())
        timed = re.compile(r"\| ms[^|]*\|$", re.M).search(text)  # the last column of a table of scores
        return re.sub(r"\|[^|\n]*\|$", "|", text, flags=re.M) if timed else text
    return path.read_bytes()


def digest_of(value: Any) -> str:
    if isinstance(value, np.ndarray) and value.dtype != object:
        return (
            f"{value.dtype} {value.shape} {hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()}"
        )
    return repr(value)


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        timed = ("seconds", "elapsed", "minutes", "milliseconds", "ms", "pairs_per_s", "ms_per_pair")
        timed += ("there_before", "matched")  # of `match-pairs`: by which of its runs
        return {k: without_times(v) for k, v in value.items() if k not in timed}
    return [without_times(v) for v in value] if isinstance(value, list) else value


def compare(expected: dict[str, str], found: dict[str, str]) -> None:
    missing, new = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    other = sorted(k for k in expected.keys() & found.keys() if expected[k] != found[k])
    problems = {"missing": missing, "not there otherwise": new, "of other content": other}
    if any(problems.values()):
        raise Lost("; ".join(f"{k}: {', '.join(v)}" for k, v in problems.items() if v))


# ---- rounds


@dataclass
class Tally:
    kills: int = 0
    rounds: int = 0
    late: int = 0  # attempts that found the command done
    lost: int = 0
    seconds: float = 0.0  # of an undisturbed run


def torment(name: str, kills: int, in_a_row: int, seed: int, root: Path, minutes: float = np.inf) -> Tally:
    """minutes: after which no further round is begun."""
    began = time.monotonic()
    job, rng, tally = JOBS[name], Random(f"{name} {seed}"), Tally()
    folder = root / name.replace(" ", "-")
    folder.mkdir()
    job.prepare(folder)
    tally.seconds = finish(job, folder)
    expected = contents(folder / "out")
    clear(folder)
    tally.seconds = min(tally.seconds, finish(job, folder))
    compare(expected, contents(folder / "out"))  # or there would be nothing to compare with
    while tally.kills < kills and time.monotonic() - began < 60 * minutes:
        clear(folder)
        moments = []
        for _ in range(min(in_a_row, kills - tally.kills)):
            moments.append(rng.uniform(0, tally.seconds))
            if kill_at(job, folder, moments[-1]):
                tally.kills += 1
            else:
                tally.late += 1
                clear(folder)
        try:
            finish(job, folder)
            compare(expected, contents(folder / "out"))
        except Lost as lost:
            tally.lost += 1
            print(f"LOST {name}, killed after {', '.join(f'{m:.2f}' for m in moments)} s: {lost}", flush=True)
        tally.rounds += 1
    return tally


def clear(folder: Path) -> None:
    shutil.rmtree(folder / "out", ignore_errors=True)
    (folder / "log.txt").unlink(missing_ok=True)


def import_all() -> None:
    """Before the first fork: what takes seconds is not what is to be killed."""
    import prism_match.evaluation.benchmarks
    import prism_match.export.onnx
    import prism_match.maps.reconstruction
    import prism_match.serve.app
    import prism_match.training.trainer  # noqa: F401

    cv2.setNumThreads(0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commands", nargs="*", help=f"of {', '.join(JOBS)} [all]")
    parser.add_argument("--kills", type=int, default=24, help="of each command")
    parser.add_argument("--in-a-row", type=int, default=3, help="kills before a run may end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=np.inf, help="of a command, then no further round")
    args = parser.parse_args()
    import_all()
    print(f"seed {args.seed}\n{'command':<16}{'run, s':>8}{'kills':>7}{'rounds':>8}{'lost':>6}", flush=True)
    lost = 0
    with tempfile.TemporaryDirectory(prefix="prism-kills-") as name:
        for command in args.commands or JOBS:
            tally = torment(command, args.kills, args.in_a_row, args.seed, Path(name), args.minutes)
            lost += tally.lost
            row = f"{tally.seconds:>8.1f}{tally.kills:>7}{tally.rounds:>8}{tally.lost:>6}"
            print(f"{command:<16}{row}", flush=True)
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    main()
