"""A list of pairs, of any length, becomes a folder of matches: `prism match-pairs`.

    STORE/store.json     the settings that all matches in it were made with
    STORE/shards/*.h5    files of matches (`engine/store.py`), each there whole or not at all
    STORE/summary.json   what was skipped, of the last run that ended

What is in the store is not done again, as long as its photos are the same. `MatchStore(STORE)` reads it."""

from __future__ import annotations

import json
import secrets
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from prism_match.engine.cluster import Cluster, make_shard, run_on_cluster
from prism_match.engine.folders import CannotWrite, Folder, LocalFolder, digest_of, open_folder
from prism_match.engine.shards import Done, Job, Shard, Shards, run_here
from prism_match.engine.store import (
    SETTINGS,
    SHARDS,
    ImageEntry,
    Names,
    file_image,
    read_contents,
    read_pairs,
    read_settings,
)
from prism_match.errors import UserError
from prism_match.files import each_line, lock_folder, writable_folder

FORMAT = 1
SUMMARY, LEASE = "summary.json", "in-use.json"
HEARTBEAT = 5.0  # seconds between two signs of life of a run whose store is not on this machine


@dataclass(frozen=True)
class PairList:
    """Pairs of photos, each once, as numbers: a hundred million of them have to fit."""

    names: list[str]
    pairs: np.ndarray  # n 2, int64

    @staticmethod
    def read(path: Path) -> PairList:
        """Two names a line, apart by a space or, for names with spaces, by a tab."""
        number: dict[str, int] = {}
        flat = array("q")
        for line, words in each_line(path, tabs=True):
            if len(words) != 2:
                raise UserError(f"{path}, line {line}: {len(words)} words instead of the names of two photos")
            for word in words:
                flat.append(number.setdefault(word, len(number)))
        pairs = np.array(flat, np.int64).reshape(-1, 2)
        pairs = pairs[pairs[:, 0] != pairs[:, 1]]
        low, high = pairs.min(axis=1, initial=2**62), pairs.max(axis=1, initial=-1)
        _, first = np.unique(low * len(number) + high, return_index=True)
        if not len(first):
            raise UserError(f"{path}: no pair of photos in it")
        return PairList(list(number), pairs[np.sort(first)])


@dataclass(frozen=True)
class Summary:
    pairs: int  # that were asked for
    there: int  # that the store had before
    matched: int
    photos: dict[str, str]  # skipped, and why
    failed: list[tuple[str, str, str]]  # pairs that were not matched though their photos are fine, and why
    skipped: list[Names]  # pairs of skipped photos
    seconds: float
    replaced: int  # pairs of photos that have changed since they were matched
    damaged: list[str]  # shards that were done again

    def to_dict(self) -> dict[str, Any]:
        return {
            "pairs": self.pairs, "there_before": self.there, "matched": self.matched,
            "skipped_photos": self.photos, "skipped_pairs": [list(pair) for pair in self.skipped],
            "failed_pairs": [list(pair) for pair in self.failed],
            "changed_pairs": self.replaced, "damaged_shards": self.damaged,
            "seconds": round(self.seconds, 3),
        }  # fmt: skip


def match_pairs(
    listed: PairList, job: Job, cluster: Cluster | None, shard_seconds: float, progress: bool = False
) -> Summary:
    """job: has its images and its store, and settings as JSON has them."""
    assert job.images is not None and job.store is not None
    began = time.monotonic()
    images, store = open_folder(job.images), open_folder(job.store)
    with claimed(store):
        claim_settings(store, job.settings)
        stamps = images.stamps(listed.names)
        missing = {n: f"{n}: no such file in {images.address}" for n in listed.names if n not in stamps}
        if len(missing) == len(listed.names):
            raise UserError(f"{images.address}: none of the {len(missing)} photos of the list is there")
        known = look_through(store, job.settings, listed, images, stamps)
        there = np.array([name in stamps for name in listed.names])
        usable = there[listed.pairs].all(axis=1)
        todo = np.flatnonzero(usable & ~known.done)
        rows = listed.pairs[todo]

        def describe(some: np.ndarray) -> Shard:
            return make_shard(rows[some], listed.names, stamps)

        shards = Shards(rows, shard_seconds)
        runner: Iterator[Done] = iter(())
        if len(todo):
            runner = (
                run_here(job, shards, describe)
                if cluster is None
                else run_on_cluster(cluster, job, shards, describe)
            )
        broken, matched = dict(missing), 0
        failed: list[tuple[str, str, str]] = []
        with tqdm(
            total=int(usable.sum()), initial=int((usable & known.done).sum()), desc="matching", unit="pair",
            smoothing=0.1, disable=None if progress else True,
        ) as bar:  # fmt: skip
            for done in runner:
                bar.update(len(done.rows))
                if done.result is not None:
                    matched += done.result.done
                    broken |= done.result.broken
                    continue
                for a, b in rows[done.rows].tolist():
                    failed.append((listed.names[a], listed.names[b], done.reason))
        bad = np.array([name in broken for name in listed.names])
        skipped = listed.pairs[bad[listed.pairs].any(axis=1) & ~known.done]
        summary = Summary(
            len(listed.pairs), int((usable & known.done).sum()), matched, broken, failed,
            [(listed.names[a], listed.names[b]) for a, b in skipped.tolist()],
            time.monotonic() - began, known.changed, known.damaged,
        )  # fmt: skip
        store.write(SUMMARY, (json.dumps(summary.to_dict(), indent=2) + "\n").encode())
    return summary


# ---- what is there


@dataclass(frozen=True)
class Known:
    done: np.ndarray  # n, bool: pairs of the list whose matches are in the store
    changed: int  # pairs whose photos are no longer those that were matched
    damaged: list[str]  # shards, which were removed


def look_through(
    store: Folder, settings: dict[str, Any], listed: PairList, images: Folder, stamps: dict[str, str]
) -> Known:
    """Shards that are damaged, and matches of photos that have changed, are dropped from the store."""
    number = {name: n for n, name in enumerate(listed.names)}
    shards = store.inside(SHARDS)
    found, damaged, changed = [np.zeros((0, 2), np.int64)], [], 0
    digests: dict[str, str] = {}

    def is_same(name: str, entry: ImageEntry) -> bool:
        """A photo that is no longer there, or not in the list, is nobody's business."""
        if name not in stamps or stamps[name] == entry.stamp:
            return True
        if name not in digests:  # copied, or touched: look closer
            digests[name] = digest_of(images, name)
        return digests[name] == entry.digest

    for name in shards.names(".h5"):
        try:
            _, entries, pairs = read_contents(shards.open(name), settings)
        except UserError:
            damaged.append(name)
            shards.remove(name)
            continue
        other = {photo for photo, entry in entries.items() if not is_same(photo, entry)}
        if other:
            kept = [pair for pair in pairs if not other.intersection(pair)]
            changed += len(pairs) - len(kept)
            rewrite(shards, name, settings, entries, kept)
            pairs = kept
        rows = np.array([[number.get(a, -1), number.get(b, -1)] for a, b in pairs], np.int64).reshape(-1, 2)
        found.append(rows[(rows >= 0).all(axis=1)])
    keys = np.sort(np.concatenate(found), axis=1) @ np.array([len(number), 1])
    done = np.isin(np.sort(listed.pairs, axis=1) @ np.array([len(number), 1]), keys)
    return Known(done, changed, damaged)


def rewrite(
    shards: Folder, name: str, settings: dict[str, Any], entries: dict[str, ImageEntry], kept: list[Names]
) -> None:
    """A shard without some of its pairs."""
    found = read_pairs(shards.open(name), entries, kept)
    if found:
        needed = {photo for pair in found for photo in pair}
        images = {photo: entry for photo, entry in entries.items() if photo in needed}
        shards.write(name, file_image(settings, images, found))
    else:
        shards.remove(name)


def claim_settings(store: Folder, settings: dict[str, Any]) -> None:
    """A new store gets the settings; one that has matches of others is left alone."""
    if SETTINGS in store.names(".json") and store.inside(SHARDS).names(".h5"):
        found = read_settings(store.address)
        other = sorted(k for k in {*found, *settings} if found.get(k) != settings.get(k))
        if other:
            raise UserError(
                f"{store.address}: its matches were made with other settings ({', '.join(other)}); "
                "choose another store"
            )
    else:
        store.write(SETTINGS, json.dumps({"format": FORMAT, "settings": settings}, indent=2).encode())


# ---- one run at a time


def claimed(store: Folder) -> AbstractContextManager[Any]:
    if isinstance(store, LocalFolder):
        return lock_folder(writable_folder(store.path))
    return leased(store)


@contextmanager
def leased(store: Folder) -> Iterator[None]:
    """Far away there are no locks. So a run leaves a sign of life every few seconds, and one that finds a
    sign waits whether another follows. Clocks of machines are not compared."""
    before = sign_of_life(store)
    if before is not None:
        for _ in range(3):
            time.sleep(HEARTBEAT)
            if sign_of_life(store) not in (before, None):
                raise UserError(
                    f"{store.address}: is in use by another run; wait for it, or choose another place"
                )
    over = threading.Event()
    mine = secrets.token_hex(8)

    def beat(count: int) -> None:
        store.write(LEASE, json.dumps({"run": mine, "beat": count}).encode())

    def live() -> None:
        count = 1
        while not over.wait(HEARTBEAT):
            try:
                beat(count)
            except CannotWrite:  # shards will not get through either, and say so
                continue
            count += 1

    beat(0)
    thread = threading.Thread(target=live, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        store.remove(LEASE)


def sign_of_life(store: Folder) -> bytes | None:
    try:
        return store.read(LEASE)
    except UserError:
        return None
