"""Shards on a Ray cluster, and the engine that has its pairs matched there.

Ray places the workers, one on each GPU or on as many cores as it has threads, starts them again where they
die and finds room for them on nodes that join later. What is left to do here is to hand out shards, and to
hand out again those whose worker died.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from prism_match.engine.folders import CannotWrite
from prism_match.engine.methods import Method
from prism_match.engine.photos import Photo, Resize
from prism_match.engine.run import Broken, Clock, Engine, Limits
from prism_match.engine.shards import SECONDS_A_SHARD, Done, Job, Shard, ShardResult, Shards, Worker
from prism_match.engine.store import Names
from prism_match.errors import UserError
from prism_match.matches import Matches

ATTEMPTS = 3  # of a shard
PATIENCE = 30.0  # seconds without a worker, until that is told
CLOSING = 5.0  # seconds for workers to clean up
MEMORY_SHARE = 0.4  # of a node's memory, for what workers keep of photos


@dataclass(frozen=True)
class Cluster:
    """Where to match, other than in this process."""

    address: str | None = None  # of a running cluster; None: one on this machine, while it is needed
    device: str = "auto"  # of the workers: GPUs if the cluster has any
    threads: int = 1  # cores of a worker without a GPU
    shard_seconds: float = SECONDS_A_SHARD


def make_engine(
    method: Method, resizing: Resize, limits: Limits | None, clock: Clock | None, cluster: Cluster | None
) -> Engine:
    if cluster is None:
        return Engine(method, resizing, limits, clock)
    return RayEngine(method, resizing, limits, clock, cluster)


class RayEngine(Engine):
    """Matches on a cluster, whose nodes all find the photos under the same paths. Matches come back here."""

    def __init__(
        self, method: Method, resizing: Resize, limits: Limits | None, clock: Clock | None, cluster: Cluster
    ):
        super().__init__(method, resizing, limits, clock)
        self.cluster = cluster
        require_ray()

    def match_photos(
        self, pairs: Sequence[Names], photos: Mapping[str, Photo]
    ) -> Iterator[tuple[Names, Matches | Broken | str]]:
        if not pairs:
            return
        names = list(dict.fromkeys(name for pair in pairs for name in pair))
        number = {name: n for n, name in enumerate(names)}
        rows = np.array([[number[name] for name in pair] for pair in pairs], np.int64)
        paths = [os.path.abspath(str(photos[name].source)) for name in names]
        job = Job.of(self, self.cluster.device, self.cluster.threads)
        shards = Shards(rows, self.cluster.shard_seconds)
        for done in run_on_cluster(self.cluster, job, shards, lambda some: make_shard(rows[some], paths)):
            for row in done.rows.tolist():
                a, b = pairs[row]
                yield (a, b), self._outcome(done, (a, b), [paths[n] for n in rows[row]], photos)

    def _outcome(
        self, done: Done, pair: Names, paths: list[str], photos: Mapping[str, Photo]
    ) -> Matches | Broken | str:
        if done.result is None:
            return done.reason
        broken: Broken = {}
        for name, path in zip(pair, paths, strict=True):
            photo = photos[name]
            if path in done.result.broken:
                broken[photo.digest] = UserError(done.result.broken[path])
            elif done.result.digests[path] != photo.digest:
                broken[photo.digest] = UserError(f"{photo.source}: was overwritten before it was read")
        if broken:
            return broken
        assert done.result.matches is not None
        self.clock.pairs += 1
        self.clock.seconds += done.result.matching / max(done.result.done, 1)
        return done.result.matches[paths[0], paths[1]]


def make_shard(pairs: np.ndarray, names: Sequence[str], stamps: Mapping[str, str] | None = None) -> Shard:
    """pairs: n 2, numbers of names, of which the shard gets those it needs."""
    needed, numbers = np.unique(pairs, return_inverse=True)
    some = [names[n] for n in needed.tolist()]
    return Shard(some, numbers.reshape(-1, 2), [stamps.get(n, "") for n in some] if stamps else [])


# ---- Ray


def require_ray() -> Any:
    # Nobody is told that somebody matches photos.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # GPUs stay hidden from workers that were promised none; newer versions do so by themselves.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    try:
        import ray
    except ImportError as error:
        raise UserError("--engine ray needs Ray; pip install 'prism-match[ray]'") from error
    return ray


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Ray, with a cluster; one that is there already stays."""
    ray = require_ray()
    if ray.is_initialized():
        yield ray
        return
    # Where nothing is said, Ray takes what it finds here, which may be the remains of a cluster.
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    require_answer(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{address}: no cluster can be reached ({first})") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def require_answer(address: str) -> None:
    """Ray itself tries for minutes, and tells about it."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.rpartition("/")[2], int(port)), timeout=PATIENCE / 3).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"{address}: no cluster can be reached ({error})") from error


class RayWorker:
    """A `Worker` as Ray starts it."""

    def __init__(self, job: Job):
        cores = max(1, (os.cpu_count() or 1) // (job.threads or 1))
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self.job = replace(job, memory=min(job.memory, int(MEMORY_SHARE * memory / cores)))
        self.worker: Worker | None = None

    def open(self) -> None:
        """Apart from `__init__`: where that fails, Ray tells nobody why."""
        if self.worker is None:
            self.worker = Worker(self.job)

    def run(self, shard: Shard, careful: bool, upcoming: list[str]) -> ShardResult:
        self.open()
        assert self.worker is not None
        return self.worker.run(shard, careful, upcoming)

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()


@dataclass(eq=False)
class Attempt:
    rows: np.ndarray
    failures: list[str] = field(default_factory=list)  # of earlier attempts
    died: bool = False  # a worker, of it
    by: set[Any] = field(default_factory=set)  # workers that it failed with: others go first


def run_on_cluster(
    cluster: Cluster, job: Job, shards: Shards, describe: Callable[[np.ndarray], Shard]
) -> Iterator[Done]:
    """All shards, as they are done. What fails three times is told, with the reason; what cannot be written
    three times ends the run."""
    with connected(cluster.address) as ray, Crew(ray, cluster, job) as crew:
        yield from hand_out(crew, shards, describe)


def hand_out(crew: Crew, shards: Shards, describe: Callable[[np.ndarray], Shard]) -> Iterator[Done]:
    ray = crew.ray
    again: deque[Attempt] = deque()
    at_work: dict[Any, tuple[Any, Attempt]] = {}
    while shards.left or again or at_work:
        for worker in crew.idle():
            attempt = next((a for a in again if worker not in a.by or not crew.present - a.by), None)
            if attempt is not None:
                again.remove(attempt)
            elif shards.left:
                attempt = Attempt(shards.take(worker, crew.size))
            else:
                continue
            crew.hire(worker)
            upcoming = describe(shards.upcoming(worker, crew.size)).names
            task = worker.run.remote(describe(attempt.rows), attempt.died, upcoming)
            at_work[task] = worker, attempt
        for task in crew.wait(at_work):
            if task in crew.opening:
                crew.opened(task)
                continue
            worker, attempt = at_work.pop(task)
            crew.release(worker)
            try:
                result = ray.get(task)
            except ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None)
                died = not isinstance(error, ray.exceptions.RayTaskError)
                if died:
                    crew.restarted(worker)
                attempt.failures.append("its worker died" if died else one_line(cause or error))
                attempt.died |= died
                attempt.by.add(worker)
                if len(attempt.failures) < ATTEMPTS:
                    again.append(attempt)
                elif isinstance(cause, CannotWrite):
                    raise UserError(str(cause)) from error
                else:
                    reasons = "; ".join(dict.fromkeys(attempt.failures))
                    yield Done(attempt.rows, None, f"failed {ATTEMPTS} times: {reasons}")
                continue
            shards.measured(len(attempt.rows), result.seconds, worker)
            yield Done(attempt.rows, result)


def one_line(error: Any) -> str:
    if isinstance(error, UserError):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


class Crew:
    """The workers: as many as the cluster has room for, also when it grows."""

    def __init__(self, ray: Any, cluster: Cluster, job: Job):
        self.ray, self.cluster, self.job, self.began = ray, cluster, job, time.monotonic()
        self.size = 0  # of those that were ever asked for
        self.opening: dict[Any, Any] = {}  # workers whose model is being loaded, by what tells that it is
        self._all: list[Any] = []
        self._idle: list[Any] = []
        self._problems: list[str] = []  # of workers that cannot be opened where they are
        self._deaths, self._begun = 0, False  # while they were opened; whether one ever was
        self._told = False

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        """The cluster may stay when this run is over; copies of photos may not."""
        closing = [worker.close.remote() for worker in self._idle]
        if closing:
            self.ray.wait(closing, num_returns=len(closing), timeout=CLOSING)
        for worker in self._all:
            self.ray.kill(worker)

    def idle(self) -> list[Any]:
        """Those that wait for work, after new ones were asked for where there is room."""
        has = self.ray.cluster_resources()
        gpus = int(has.get("GPU", 0)) if self.cluster.device != "cpu" else 0
        if self.cluster.device.startswith("cuda") and not gpus:
            raise UserError(f"--device {self.cluster.device}: the cluster has no GPU")
        room = gpus or int(has.get("CPU", 0)) // self.cluster.threads
        needs = {"num_gpus": 1, "num_cpus": 1} if gpus else {"num_cpus": self.cluster.threads}
        # Tasks are not tried again by Ray, so that a shard goes to whoever is free, not to who is gone.
        actor = self.ray.remote(RayWorker).options(max_restarts=-1, max_task_retries=0, **needs)
        while self.size < room:
            self.size += 1
            self._all.append(actor.remote(self.job))
            self._open(self._all[-1])
        if not self._told and time.monotonic() - self.began > PATIENCE and not self._idle and self.opening:
            self._told = True
            if len(self.opening) == self.size:
                print(
                    "prism: no worker has begun yet: there is no room in the cluster, or it is slow to start",
                    file=sys.stderr,
                )
        return list(self._idle)

    def wait(self, tasks: Mapping[Any, Any]) -> list[Any]:
        """Those tasks, or workers that are being opened, that have come to an end within a second."""
        waiting = [*tasks, *self.opening]
        if waiting:
            return self.ray.wait(waiting, timeout=1.0)[0]
        time.sleep(1.0)
        return []

    @property
    def present(self) -> set[Any]:
        """Workers that are at work, or wait for some."""
        return set(self._all) - set(self.opening.values())

    def hire(self, worker: Any) -> None:
        self._idle.remove(worker)

    def release(self, worker: Any) -> None:
        self._idle.append(worker)

    def restarted(self, worker: Any) -> None:
        """It has died: Ray starts it again, here or elsewhere; until then it gets nothing."""
        self._idle.remove(worker)
        self._open(worker)

    def opened(self, task: Any) -> None:
        worker = self.opening.pop(task)
        try:
            self.ray.get(task)
        except self.ray.exceptions.RayTaskError as error:
            # It cannot be loaded there, and why is known.
            self._problems.append(one_line(getattr(error, "cause", None) or error))
            if len(self._problems) >= self.size:
                raise UserError(f"no worker can begin: {self._problems[-1]}") from error
        except self.ray.exceptions.RayError as error:
            self._deaths += 1
            if self._deaths >= ATTEMPTS * self.size and not self._begun:
                raise UserError(f"no worker can begin: {one_line(error)}") from error
            self._open(worker)
        else:
            self._begun = True
            self._idle.append(worker)

    def _open(self, worker: Any) -> None:
        self.opening[worker.open.remote()] = worker
