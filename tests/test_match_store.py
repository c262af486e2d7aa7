"""Pairs to match, the store of matches, and how many feature maps are held on the way."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import cv2
import h5py
import numpy as np
import pytest
import torch
from conftest import ASSETS
from synthetic_matcher import SyntheticMatcher, make_photos, write_noise

from prism_match import Matcher
from prism_match.config import PRESETS
from prism_match.engine import Engine, Limits, MatcherSettings, MatchStore, Prism, Resize, run
from prism_match.engine.features import Shelf, arrange
from prism_match.engine.store import ImageEntry, unused
from prism_match.errors import UserError
from prism_match.images import load_image, write_png
from prism_match.maps import pairs, retrieval
from prism_match.maps.retrieval import global_descriptors, top_pairs
from prism_match.matcher import ImageFeatures, Prepared
from prism_match.matches import Matches
from prism_match.model.prism import Features

# ---- pairs


def test_exhaustive_pairs():
    assert pairs.exhaustive(3).tolist() == [[0, 1], [0, 2], [1, 2]]
    assert len(pairs.exhaustive(0)) == len(pairs.exhaustive(1)) == 0


def test_sequential_pairs():
    assert pairs.sequential(4, 1).tolist() == [[0, 1], [1, 2], [2, 3]]
    assert pairs.sequential(4, 1, loop=True).tolist() == [[0, 1], [0, 3], [1, 2], [2, 3]]
    assert len(pairs.sequential(100, 7)) == sum(min(7, 99 - n) for n in range(100))
    assert len(pairs.sequential(100, 7, loop=True)) == 700
    # A window that is larger than the set: every pair, each once.
    assert pairs.sequential(4, 9, loop=True).tolist() == pairs.exhaustive(4).tolist()
    with pytest.raises(UserError, match="window"):
        pairs.sequential(4, 0)


def test_pairs_from_a_file(tmp_path):
    file = tmp_path / "pairs.txt"
    file.write_text("# two names\nb a\na b\n\nwith space\tc\n")
    assert pairs.from_file(file, ["a", "b", "c", "with space"]).tolist() == [[0, 1], [2, 3]]
    file.write_text("a b\na x\n")
    with pytest.raises(UserError, match="line 2: no image x"):
        pairs.from_file(file, ["a", "b"])
    file.write_text("a b c\n")
    with pytest.raises(UserError, match="line 1"):
        pairs.from_file(file, ["a", "b", "c"])
    with pytest.raises(UserError, match="cannot be read"):
        pairs.from_file(tmp_path / "none.txt", [])


def test_the_order_keeps_the_pairs():
    every = [tuple(pair) for pair in pairs.exhaustive(37).tolist()]
    order = arrange(every, 16)
    assert sorted(order) == list(range(len(every)))
    assert arrange([], 8) == []
    # A row of blocks at a time: few photos are new from one stretch of pairs to the next.
    seen = [set(np.ravel([every[n] for n in order[k : k + 64]])) for k in range(0, len(order), 64)]
    assert np.mean([len(s) for s in seen]) < 20


def test_top_pairs_against_a_plain_reference():
    g = np.random.default_rng(0)
    queries, references = g.standard_normal((5, 16)) + 3, g.standard_normal((9, 16)) + 3

    def cosine(a, b):
        a, b = a - references.mean(0), b - references.mean(0)
        return a @ b / np.linalg.norm(a) / np.linalg.norm(b)

    expected = []
    for n, q in enumerate(queries):
        ranked = sorted(range(9), key=lambda m: -cosine(q, references[m]))
        expected += [[n, m] for m in ranked[:4]]
    assert top_pairs(queries, references, 4).tolist() == expected
    among = top_pairs(references, None, 100)
    assert len(among) == 9 * 8 and (among[:, 0] != among[:, 1]).all()
    assert top_pairs(queries[:0], references, 4).shape == (0, 2)
    with pytest.raises(UserError):
        top_pairs(queries, references, 0)


def test_an_index_finds_what_comparing_all_finds(monkeypatch, capsys):
    pytest.importorskip("faiss")
    rng = np.random.default_rng(0)
    places = np.repeat(rng.random((150, 32), dtype=np.float32), 10, axis=0)
    rows = places + 0.1 * rng.random(places.shape, dtype=np.float32)
    exact = [top_pairs(rows, None, 9), top_pairs(rows[:40] + 0.01, rows, 9)]
    monkeypatch.setattr(retrieval, "EXACT_UP_TO", 1000)
    found = [top_pairs(rows, None, 9), top_pairs(rows[:40] + 0.01, rows, 9)]
    for few, every in zip(found, exact, strict=True):
        same = len({*map(tuple, few.tolist())} & {*map(tuple, every.tolist())})
        assert same > 0.98 * len(every) and len(few) <= len(every)
        assert (np.diff(few[:, 0]) >= 0).all() and np.bincount(few[:, 0]).max() == 9
    assert (found[0][:, 0] != found[0][:, 1]).all()
    assert np.array_equal(found[0], top_pairs(rows, None, 9))  # again the same
    # Without the library it is the slow way, and that is told.
    monkeypatch.setitem(sys.modules, "faiss", None)
    assert np.array_equal(top_pairs(rows, None, 9), exact[0])
    assert "prism-match[ann]" in capsys.readouterr().err


def test_descriptors_find_the_same_photo(photo):
    matcher = Matcher(device="cpu")
    g = np.random.default_rng(0)
    other = g.integers(0, 255, (120, 160), dtype=np.uint8)
    # Crops of the same photo belong together, and so does noise.
    images = [photo[:160, :160], photo[20:180, 30:190], photo[-160:, -160:], other, other.T.copy()]
    descriptors = global_descriptors(matcher, images)
    assert descriptors.dtype == np.float32 and descriptors.shape == (5, 512)
    np.testing.assert_allclose(np.linalg.norm(descriptors, axis=1), 1, atol=1e-5)
    nearest = dict(top_pairs(descriptors, None, 1).tolist())
    assert nearest[0] == 1 and nearest[3] == 4 and nearest[4] == 3
    assert global_descriptors(matcher, []).shape == (0, 512)


# ---- the store


def some_matches(seed: int, count: int = 5, names: tuple[str, str] = ("a.jpg", "b.jpg")) -> Matches:
    g = np.random.default_rng(seed)
    points = (g.uniform(0, 100, (count, 2)).astype(np.float32) for _ in range(2))
    return Matches(*points, g.random(count).astype(np.float32), (64, 48), (48, 64), *names)


def same(a: Matches, b: Matches) -> bool:
    arrays = ("keypoints0", "keypoints1", "scores", "size0", "size1")
    return all(np.array_equal(getattr(a, k), getattr(b, k)) for k in arrays)


NAMES = ("a.jpg", "sub dir/b%.jpg", "ü.png")
DIGESTS = {name: name * 3 for name in (*NAMES, "b.jpg", "c.jpg")}


def test_store_round_trip(tmp_path):
    path = tmp_path / "matches.h5"
    first, second = (NAMES[0], NAMES[1]), (NAMES[0], NAMES[2])
    with MatchStore(path, {"size": 832, "levels": (4, 2)}) as store:
        store.add({first: some_matches(0)}, DIGESTS)
        store.add({second: some_matches(1, 0)}, DIGESTS)
        assert list(store) == [first, second]
    with MatchStore(path, {"size": 832, "levels": (4, 2)}) as again:  # after a kill: there are only parts
        assert list(again) == [first, second] and same(again[first], some_matches(0))
        again.merge()
        assert not again.parts.exists() and same(again[first], some_matches(0))
    again = MatchStore(path)
    assert again.settings == {"size": 832, "levels": [4, 2]}
    assert again.images == {n: ImageEntry((48, 64) if n != NAMES[0] else (64, 48), n * 3) for n in NAMES}
    assert same(again[first], some_matches(0))
    assert (again[first].name0, again[first].name1) == first
    swapped = again[first[::-1]]
    assert np.array_equal(swapped.keypoints0, some_matches(0).keypoints1) and swapped.name0 == first[1]
    assert len(again[second]) == 0
    assert [pair for pair, _ in again.items()] == list(again) and len(again) == 2
    assert again[first].certainty is None
    with pytest.raises(KeyError, match="no matches of"):
        again["a.jpg", "x.jpg"]
    with pytest.raises(UserError, match="to be read only"):
        again.add({first: some_matches(0)}, DIGESTS)


def test_what_is_known_of_matches_is_stored(tmp_path):
    known = some_matches(0)
    known = replace(known, certainty=known.scores / 2, sigma=known.scores + 1)
    with MatchStore(tmp_path / "matches.h5", {}) as store:
        store.add({(NAMES[0], NAMES[1]): known, (NAMES[0], NAMES[2]): some_matches(1)}, DIGESTS)
        store.merge()
    again = MatchStore(tmp_path / "matches.h5")
    found = again[NAMES[0], NAMES[1]]
    assert np.array_equal(found.certainty, known.certainty) and np.array_equal(found.sigma, known.sigma)
    assert again[NAMES[0], NAMES[2]].certainty is None


def test_other_settings_never_mix(tmp_path):
    path = tmp_path / "matches.h5"
    with MatchStore(path, {"size": 832}) as store:
        store.add({("a.jpg", "b.jpg"): some_matches(0)}, DIGESTS)
        store.merge()
        store.add({("a.jpg", "c.jpg"): some_matches(0)}, DIGESTS)  # a part that a killed run has left
    other = MatchStore(path, {"size": 640})
    assert list(other) == [] and not list(other.parts.glob("*.h5"))
    assert other.replaced is not None and list(MatchStore(other.replaced)) == [("a.jpg", "b.jpg")]


def test_what_was_put_aside_is_neither_lost_nor_matched_again(tmp_path):
    path = tmp_path / "matches.h5"

    def run(size: int, *others: str) -> list[str]:
        """The pairs that were there already."""
        with MatchStore(path, {"size": size}) as store:
            there = [b for _, b in store]
            store.add({("a.jpg", b): some_matches(size) for b in others}, DIGESTS)
            store.merge()
        return there

    assert run(832, "b.jpg", "c.jpg") == run(640, "b.jpg") == []
    assert run(832) == ["b.jpg", "c.jpg"] and run(640) == ["b.jpg"]
    path.write_bytes(path.read_bytes()[:100])  # what is damaged goes by one name
    assert run(832) == ["b.jpg", "c.jpg"]
    assert same(MatchStore(path)["a.jpg", "b.jpg"], some_matches(832))
    first, second = (path.with_name(f"x{n}.h5") for n in ("", "-2"))
    assert unused(first) == first
    first.write_bytes(b"")
    assert unused(first) == second


def test_files_that_are_no_store(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        MatchStore(tmp_path / "none.h5")
    path = tmp_path / "matches.h5"
    path.write_bytes(b"not HDF5")
    with pytest.raises(UserError, match="not a file of matches"):
        MatchStore(path)
    with h5py.File(path, "w") as file:
        file["x"] = 1
    with pytest.raises(UserError, match="not a file of matches"):
        MatchStore(path)


def test_a_second_writer_is_told(tmp_path):
    path = tmp_path / "matches.h5"
    code = (
        "import sys\nfrom prism_match.engine import MatchStore\n"
        f"try: MatchStore({str(path)!r}, {{}})\n"
        "except ValueError as error: print(error)\nelse: print('opened')"
    )

    def other_process() -> str:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return done.stdout

    store = MatchStore(path, {})
    store.add({("a.jpg", "b.jpg"): some_matches(0)}, DIGESTS)
    assert "matches.h5: is in use by another run" in other_process()
    store.merge()
    assert len(MatchStore(path)) == 1  # whoever only reads may
    store.close()
    assert other_process() == "opened\n"


def test_damage_is_found(tmp_path):
    path = tmp_path / "matches.h5"
    with MatchStore(path, {}) as store:
        found = {("a.jpg", f"{n}.jpg"): some_matches(n, 50) for n in range(8)}
        store.add(found, DIGESTS | {f"{n}.jpg": "" for n in range(8)})
        store.merge()
    whole = path.read_bytes()
    values = some_matches(3, 50)
    table = np.concatenate([values.keypoints0, values.keypoints1, values.scores[:, None]], axis=1)
    at = whole.index(table.tobytes())
    path.write_bytes(whole[: at + 40] + b"\xff\xff" + whole[at + 42 :])
    damaged = MatchStore(path)
    assert same(damaged["a.jpg", "2.jpg"], some_matches(2, 50))
    with pytest.raises(UserError, match=r"damaged: the matches of a.jpg and 3.jpg"):
        damaged["a.jpg", "3.jpg"]
    damaged.close()
    for length in (len(whole) - 1, len(whole) // 2, 100):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match="damaged"):
            MatchStore(path)
        with MatchStore(path, {}) as anew:  # to write: what is damaged is put aside
            assert len(anew) == 0 and anew.replaced is not None and anew.replaced.is_file()
            anew.replaced.unlink()


def test_a_damaged_part_is_as_good_as_none(tmp_path):
    path = tmp_path / "matches.h5"
    with MatchStore(path, {}) as store:
        for n in range(2):
            store.add({("a.jpg", f"{n}.jpg"): some_matches(n, 50)}, DIGESTS | {f"{n}.jpg": ""})
    part = store.parts / "000000.h5"
    part.write_bytes(part.read_bytes()[:-1])
    with MatchStore(path, {}) as store:
        assert list(store) == [("a.jpg", "1.jpg")]


# ---- matching into it


def match_all(matcher, folder: Path, path: Path, limits: Limits | None = None):
    files = {p.name: p for p in sorted(folder.iterdir())}
    names = list(files)
    engine = Engine(Prism(matcher), Resize.largest(matcher.size), limits)
    with MatchStore(path, engine.settings) as store:
        every = [(names[a], names[b]) for a, b in pairs.exhaustive(len(names))]
        broken = {}
        for outcome in engine.match(files, every, store):
            broken |= outcome.broken
    return store, broken


def contents(store: MatchStore) -> dict:
    return {pair: (m.keypoints0.tobytes(), m.keypoints1.tobytes()) for pair, m in store.items()}


class Killed(BaseException):
    pass


def test_a_killed_run_goes_on(tmp_path, monkeypatch):
    scene, folder, matcher = make_photos(tmp_path / "scene", 5)
    whole, broken = match_all(matcher, folder, tmp_path / "whole.h5")
    assert len(whole) == 10 and not broken
    assert len(matcher.extracted) == 5  # each photo once

    monkeypatch.setattr(run, "SECONDS_A_PART", 0.0)
    limits = Limits(memory=5000, disk=2**20, folder=str(tmp_path / "features"))
    killed = SyntheticMatcher(scene)
    real = killed.match_extracted

    def match_and_die(chunk, details=False):
        if len(killed.matched) == 6:
            raise Killed
        return real(chunk)

    killed.match_extracted = match_and_die
    with pytest.raises(Killed):
        match_all(killed, folder, tmp_path / "two.h5", limits)
    assert not (tmp_path / "two.h5").exists()
    rest = SyntheticMatcher(scene)
    two, _ = match_all(rest, folder, tmp_path / "two.h5", limits)
    assert len(rest.matched) == 4
    assert contents(two) == contents(whole)
    assert not (tmp_path / "features").exists()
    # Nothing is left to do.
    idle = SyntheticMatcher(scene)
    assert contents(match_all(idle, folder, tmp_path / "two.h5")[0]) == contents(whole)
    assert not idle.extracted


def test_a_damaged_pair_is_matched_again(tmp_path):
    scene, folder, matcher = make_photos(tmp_path / "scene", 4)
    whole, _ = match_all(matcher, folder, tmp_path / "m.h5")
    expected = contents(whole)
    whole.close()
    data = (tmp_path / "m.h5").read_bytes()
    at = data.index(whole["view1.png", "view2.png"].keypoints1[5].tobytes())
    (tmp_path / "m.h5").write_bytes(data[:at] + b"\xff\xff\xff" + data[at + 3 :])
    again = SyntheticMatcher(scene)
    store, _ = match_all(again, folder, tmp_path / "m.h5")
    assert again.matched == [("view1.png", "view2.png")] and contents(store) == expected


def test_a_changed_photo_is_matched_again(tmp_path):
    scene, folder, matcher = make_photos(tmp_path / "scene", 4)
    match_all(matcher, folder, tmp_path / "m.h5")
    write_noise(folder / "view1.png", 0)
    again = SyntheticMatcher(scene)
    store, _ = match_all(again, folder, tmp_path / "m.h5")
    assert len(store) == 6 and len(again.matched) == 3
    assert all("view1.png" in pair for pair in again.matched)


def test_a_photo_that_changed_before_a_kill_is_matched_again(tmp_path, monkeypatch):
    """The run that found it changed got no further than its first part."""
    scene, folder, matcher = make_photos(tmp_path / "scene", 3)
    match_all(matcher, folder, tmp_path / "m.h5")
    write_noise(folder / "view1.png", 0)
    files = {p.name: p for p in sorted(folder.iterdir())}
    engine = Engine(Prism(SyntheticMatcher(scene)), Resize.largest(matcher.size))
    with MatchStore(tmp_path / "m.h5", engine.settings) as store:
        for outcome in engine.match(files, [("view0.png", "view1.png")], store):
            monkeypatch.setattr(store, "merge", lambda: None)
            assert outcome.matches is not None
    assert list((tmp_path / "m.parts").glob("*.h5"))
    assert ("view1.png", "view2.png") not in MatchStore(tmp_path / "m.h5")
    again = SyntheticMatcher(scene)
    store, _ = match_all(again, folder, tmp_path / "m.h5")
    assert again.matched == [("view1.png", "view2.png")] and len(store) == 3


def test_a_broken_photo_is_named_and_skipped(tmp_path):
    scene, folder, matcher = make_photos(tmp_path / "scene", 4)
    (folder / "view2.png").write_bytes((folder / "view2.png").read_bytes()[:200])
    store, broken = match_all(matcher, folder, tmp_path / "m.h5", Limits(batch_size=2))
    assert list(broken) == ["view2.png"] and "view2.png" in broken["view2.png"]
    assert list(store) == [(f"view{a}.png", f"view{b}.png") for a, b in ((0, 1), (0, 3), (1, 3))]


SIDE = 64  # pixels of the feature maps below


class CountingMatcher(SyntheticMatcher):
    """Knows which feature maps are alive, and so how much memory they take."""

    def __init__(self):
        super().__init__(None)
        self.alive, self.most, self.extractions = weakref.WeakSet(), 0, 0

    def prepare(self, source, size=None):
        return Prepared(np.zeros((8, 8), np.float32), (8, 8), load_image(source).name, None)

    def extract_prepared(self, prepared):
        fine = torch.zeros(max(len(prepared), 1), 4, SIDE, SIDE)
        self.extractions += len(prepared)
        items = []
        for n, p in enumerate(prepared):
            own = fine[n : n + 1].clone()
            self.alive.add(own)
            items.append(ImageFeatures(p, Features(torch.zeros(1), own, torch.ones(1) > 0)))
        self.most = max(self.most, len(self.alive))
        return items

    def match_extracted(self, chunk, details=False):
        nothing = np.zeros((0, 2), np.float32)
        return [Matches(nothing, nothing, nothing[:, 0], (8, 8), (8, 8)) for _ in chunk]


def many_files(folder: Path, count: int) -> dict[str, Path]:
    folder.mkdir()
    files = {f"{n:04d}.png": folder / f"{n:04d}.png" for n in range(count)}
    for n, path in enumerate(files.values()):
        cv2.imwrite(str(path), np.full((32, 32), n % 256, np.uint8) + np.eye(32, dtype=np.uint8) * (n // 256))
    return files


MAP = 4 * SIDE * SIDE * 4 + 8 * 8 * 4 + 5  # bytes of an item of the matcher above


@pytest.mark.parametrize(
    "count, chosen, extractions",
    [
        (1000, lambda n: pairs.sequential(n, 3), 1000),
        (100, lambda n: pairs.sequential(n, 10, loop=True), 110),
        (60, pairs.exhaustive, None),
    ],
)
def test_memory_is_bounded(tmp_path, count, chosen, extractions):
    files, matcher = many_files(tmp_path / "images", count), CountingMatcher()
    names = list(files)
    every = [(names[a], names[b]) for a, b in chosen(count)]
    engine = Engine(Prism(matcher), Resize.largest(8), Limits(batch_size=4, memory=24 * MAP))
    gc.collect()
    with MatchStore(tmp_path / "m.h5", engine.settings) as store:
        assert sum(not outcome.broken for outcome in engine.match(files, every, store)) == len(every)
    assert len(store) == len(every)
    assert matcher.most <= 24
    if extractions is not None:
        assert matcher.extractions <= extractions


def test_disk_is_bounded_and_spares_the_backbone(tmp_path, monkeypatch):
    files = many_files(tmp_path / "images", 30)
    names = list(files)
    every = [(names[a], names[b]) for a, b in pairs.exhaustive(30)]
    sizes: list[int] = []
    save = Shelf.save

    def watch(self, digest, item):
        save(self, digest, item)
        if self.folder.is_dir():
            sizes.append(sum(p.stat().st_size for p in self.folder.iterdir()))
            assert sizes[-1] == self.used

    monkeypatch.setattr(Shelf, "save", watch)
    counts = []
    for limit in (100 * MAP, 6 * MAP, 0):
        matcher = CountingMatcher()
        sizes.clear()
        limits = Limits(memory=6 * MAP, disk=limit, folder=str(tmp_path / "features"))
        for _ in Engine(Prism(matcher), Resize.largest(8), limits).match(files, every):
            pass
        counts.append(matcher.extractions)
        assert max(sizes, default=0) <= limit + 1000  # a header more than what was asked for
    assert counts[0] == 30 < counts[1] < counts[2]


def test_features_on_disk_change_nothing(tmp_path, photo):
    matcher = Matcher(device="cpu", rescale="never", size=96, config=PRESETS["tiny"].replace(theta_c=0.0))
    files = {f"{n}.png": tmp_path / f"{n}.png" for n in range(4)}
    for n, path in enumerate(files.values()):
        write_png(path, photo[20 * n : 20 * n + 90, 30 * n : 30 * n + 120])
    names = list(files)
    every = [(names[a], names[b]) for a, b in pairs.exhaustive(4)]
    results = []
    for memory in (2**30, 2**18):
        limits = Limits(memory=memory, disk=2**30, folder=str(tmp_path / "features"))
        engine = Engine(Prism(matcher), Resize.largest(96), limits)
        results.append({outcome.pair: outcome.matches for outcome in engine.match(files, every)})
    alone = matcher.match(files["0.png"], files["3.png"])
    for pair, m in results[0].items():
        np.testing.assert_allclose(m.keypoints1, results[1][pair].keypoints1, atol=1e-4)
    np.testing.assert_allclose(results[1]["0.png", "3.png"].keypoints0, alone.keypoints0)


def test_features_of_a_killed_run_in_another_precision_are_not_used(tmp_path, photo):
    files = {f"{n}.png": tmp_path / f"{n}.png" for n in range(4)}
    for n, path in enumerate(files.values()):
        write_png(path, photo[20 * n : 20 * n + 90, 30 * n : 30 * n + 120])
    names = list(files)
    every = [(names[a], names[b]) for a, b in pairs.exhaustive(4)]
    config = PRESETS["tiny"].replace(theta_c=0.0)
    limits = Limits(memory=2**18, disk=2**30, folder=str(tmp_path / "features"))
    matchers = [
        Matcher(device="cpu", rescale="never", size=96, config=config, precision=precision)
        for precision in ("bf16", "fp32")
    ]
    killed = Engine(Prism(matchers[0]), Resize.largest(96), limits).match(files, every)
    for _ in range(3):
        next(killed)
    assert list((tmp_path / "features").iterdir())
    engine = Engine(Prism(matchers[1]), Resize.largest(96), limits)
    for outcome in engine.match(files, every):
        alone = matchers[1].match(*(files[name] for name in outcome.pair))
        np.testing.assert_array_equal(outcome.matches.keypoints1, alone.keypoints1)
    killed.close()


def test_bundled_photos_go_through_the_real_matcher(tmp_path):
    """The names of the store are the given ones, the pixels those of the files."""
    matcher = Matcher(device="cpu", rescale="never", size=64, config=PRESETS["tiny"].replace(theta_c=0.0))
    files = {"one": ASSETS / "astronaut0.jpg", "two": ASSETS / "astronaut1.jpg"}
    engine = Engine(Prism(matcher), Resize.largest(64))
    with MatchStore(tmp_path / "m.h5", engine.settings) as store:
        [outcome] = engine.match(files, [("one", "two")], store)
    expected = matcher.match(*files.values())
    assert store.images["one"].size == expected.size0
    np.testing.assert_array_equal(store["one", "two"].keypoints1, expected.keypoints1)
    np.testing.assert_array_equal(outcome.matches.keypoints1, expected.keypoints1)
    assert outcome.matches.name0 == str(files["one"])


def test_a_worker_elsewhere_matches_the_same(photo):
    settings = MatcherSettings(size=96, config=PRESETS["tiny"].replace(theta_c=0.0).to_dict(), device="cpu")
    here, there = settings.open(), MatcherSettings.from_json(settings.to_json()).open()
    a, b = photo[:120, :160], photo[10:130, 20:180]
    np.testing.assert_array_equal(here.match(a, b).keypoints1, there.match(a, b).keypoints1)
