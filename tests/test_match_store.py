"""Pairs to match, the store of matches, and how many feature maps are held on the way."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from conftest import ASSETS
from synthetic_matcher import SyntheticMatcher, make_photos, write_noise

from prism_match.config import PRESETS
from prism_match.engine import features as batch
from prism_match.engine.features import match_pairs, match_settings
from prism_match.engine.store import ImageEntry, MatchStore, PairMatches
from prism_match.errors import UserError
from prism_match.maps import pairs
from prism_match.maps.retrieval import global_descriptors, top_pairs
from prism_match.matcher import ImageFeatures, Matcher, Prepared
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


def test_blocks_keep_the_pairs():
    all_pairs = pairs.exhaustive(37)
    ordered = pairs.in_blocks(all_pairs, 8)
    assert sorted(ordered.tolist()) == all_pairs.tolist()
    assert pairs.in_blocks(all_pairs[:0], 8).shape == (0, 2)


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


def test_descriptors_find_the_same_photo(photo, one_thread):
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


def some_matches(seed: int, count: int = 5) -> PairMatches:
    g = np.random.default_rng(seed)
    points = (g.uniform(0, 100, (count, 2)).astype(np.float32) for _ in range(2))
    return PairMatches(*points, g.random(count).astype(np.float32))


def same(a: PairMatches, b: PairMatches) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


ENTRIES = {name: ImageEntry((64, 48), name * 3) for name in ("a.jpg", "sub dir/b%.jpg", "ü.png")}


def test_store_round_trip(tmp_path):
    path, names = tmp_path / "matches.h5", list(ENTRIES)
    store = MatchStore(path, {"size": 832})
    store.add({(names[0], names[1]): some_matches(0)}, ENTRIES)
    store.add({(names[0], names[2]): some_matches(1, 0)}, ENTRIES)
    for reader in (store, MatchStore(path, {"size": 832})):  # as parts, by the writer and after a kill
        assert reader.pairs == [(names[0], names[1]), (names[0], names[2])]
    store.merge()
    assert not store.parts.exists()
    again = MatchStore(path)
    assert again.settings == {"size": 832} and again.images == ENTRIES
    assert same(again.load(names[0], names[1]), some_matches(0))
    swapped = again.load(names[1], names[0])
    assert np.array_equal(swapped.keypoints0, some_matches(0).keypoints1)
    assert len(again.load(names[0], names[2])) == 0
    assert [n for n, _ in again.load_all()] == sorted(again.pairs)
    with pytest.raises(UserError, match="no matches of"):
        again.load("a.jpg", "x.jpg")


def test_other_settings_never_mix(tmp_path):
    path = tmp_path / "matches.h5"
    store = MatchStore(path, {"size": 832})
    store.add({("a.jpg", "b.jpg"): some_matches(0)}, {})
    store.merge()
    store.add({("a.jpg", "c.jpg"): some_matches(0)}, {})  # a part that a killed run has left
    other = MatchStore(path, {"size": 640})
    assert other.pairs == [] and not list(other.parts.glob("*.h5"))
    assert other.replaced is not None and MatchStore(other.replaced).pairs == [("a.jpg", "b.jpg")]


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


# ---- matching into it


def match_all(matcher, folder: Path, store: Path, **options) -> tuple[MatchStore, dict[str, str]]:
    images = {p.name: p for p in sorted(folder.iterdir())}
    opened = MatchStore(store, match_settings(matcher))
    return opened, match_pairs(matcher, images, pairs.exhaustive(len(images)), opened, **options)


def contents(store: MatchStore) -> dict:
    return {names: tuple(x.tobytes() for x in vars(m).values()) for names, m in store.load_all()}


class Killed(BaseException):
    pass


def test_a_killed_run_goes_on(tmp_path, monkeypatch):
    scene, folder, matcher = make_photos(tmp_path / "scene", 5)
    whole, broken = match_all(matcher, folder, tmp_path / "whole.h5")
    assert len(whole.pairs) == 10 and not broken
    assert len(matcher.extracted) == 5  # each image once

    monkeypatch.setattr(batch, "SECONDS_A_PART", 0.0)
    killed = SyntheticMatcher(scene)
    real = killed.match_extracted

    def match_and_die(chunk):
        if len(killed.matched) == 6:
            raise Killed
        return real(chunk)

    killed.match_extracted = match_and_die
    with pytest.raises(Killed):
        match_all(killed, folder, tmp_path / "two.h5", features=tmp_path / "features", maps_in_memory=2)
    assert not (tmp_path / "two.h5").exists()
    rest = SyntheticMatcher(scene)
    two, _ = match_all(rest, folder, tmp_path / "two.h5", features=tmp_path / "features", maps_in_memory=2)
    assert len(rest.matched) == 4
    assert contents(two) == contents(whole)
    assert not (tmp_path / "features").exists()
    # Nothing is left to do.
    idle = SyntheticMatcher(scene)
    assert contents(match_all(idle, folder, tmp_path / "two.h5")[0]) == contents(whole)
    assert not idle.extracted


def test_a_changed_image_is_matched_again(tmp_path):
    scene, folder, matcher = make_photos(tmp_path / "scene", 4)
    match_all(matcher, folder, tmp_path / "m.h5")
    write_noise(folder / "view1.png", 0)
    again = SyntheticMatcher(scene)
    store, _ = match_all(again, folder, tmp_path / "m.h5")
    assert len(store.pairs) == 6 and len(again.matched) == 3
    assert all("view1.png" in pair for pair in again.matched)


def test_a_broken_image_is_named_and_skipped(tmp_path):
    scene, folder, matcher = make_photos(tmp_path / "scene", 4)
    (folder / "view2.png").write_bytes((folder / "view2.png").read_bytes()[:200])
    store, broken = match_all(matcher, folder, tmp_path / "m.h5", batch_size=2)
    assert list(broken) == ["view2.png"] and "view2.png" in broken["view2.png"]
    assert sorted(store.pairs) == [(f"view{a}.png", f"view{b}.png") for a, b in ((0, 1), (0, 3), (1, 3))]


@dataclass
class CountingMatcher:
    """Counts the feature maps that are alive."""

    alive: weakref.WeakSet = field(default_factory=weakref.WeakSet)
    most: int = 0
    extractions: int = 0

    def extract(self, images):
        self.extractions += 1
        fine = torch.zeros(1, 4, 8, 8)
        self.alive.add(fine)
        self.most = max(self.most, len(self.alive))
        prepared = Prepared(np.zeros((8, 8), np.float32), (8, 8), str(images[0]), None, None)
        return [ImageFeatures(prepared, Features(torch.zeros(1, 1, 1, 4), fine, torch.ones(1, 1, 1) > 0))]

    def match_extracted(self, chunk):
        nothing = np.zeros((0, 2), np.float32)
        return [Matches(nothing, nothing, nothing[:, 0], (8, 8), (8, 8)) for _ in chunk]


@pytest.mark.parametrize(
    "count, chosen, extractions",
    [
        (1000, lambda n: pairs.sequential(n, 3), 1000),
        (100, lambda n: pairs.sequential(n, 10, loop=True), 110),
        (60, pairs.exhaustive, None),
    ],
)
def test_memory_is_bounded(tmp_path, count, chosen, extractions):
    images = {}
    for n in range(count):
        images[f"{n:04d}.jpg"] = tmp_path / f"{n:04d}.jpg"
        images[f"{n:04d}.jpg"].write_bytes(b"%d" % n)
    matcher, store = CountingMatcher(), MatchStore(tmp_path / "m.h5", {})
    gc.collect()
    match_pairs(matcher, images, chosen(count), store, batch_size=4, maps_in_memory=24)
    assert len(store.pairs) == len(chosen(count))
    assert matcher.most <= 24
    if extractions is not None:
        assert matcher.extractions <= extractions


def test_disk_is_bounded_and_spares_the_backbone(tmp_path, monkeypatch):
    images = {f"{n:02d}": tmp_path / f"{n:02d}" for n in range(30)}
    for n, path in enumerate(images.values()):
        path.write_bytes(b"%d" % n)
    sizes: list[int] = []
    save = batch.Shelf.save

    def watch(self, name, image):
        save(self, name, image)
        if self.folder.is_dir():
            sizes.append(sum(p.stat().st_size for p in self.folder.iterdir()))
            assert sizes[-1] == self.used

    monkeypatch.setattr(batch.Shelf, "save", watch)
    counts = []
    for limit in (10**6, 6000, 0):
        matcher, store = CountingMatcher(), MatchStore(tmp_path / f"{limit}.h5", {})
        sizes.clear()
        options = {"maps_in_memory": 6, "features": tmp_path / "features", "maps_on_disk": limit}
        match_pairs(matcher, images, pairs.exhaustive(30), store, **options)
        counts.append(matcher.extractions)
        assert max(sizes, default=0) <= limit + 1000  # a header more than what was asked for
    assert counts[0] == 30 < counts[1] < counts[2]


def test_features_on_disk_change_nothing(tmp_path, photo, one_thread):
    matcher = Matcher(device="cpu", size=96, config=PRESETS["tiny"].replace(theta_c=0.0))
    files = {f"{n}.png": tmp_path / f"{n}.png" for n in range(4)}
    from prism_match.images import write_png

    for n, path in enumerate(files.values()):
        write_png(path, photo[20 * n : 20 * n + 90, 30 * n : 30 * n + 120])
    results = []
    for most in (8, 2):
        store = MatchStore(tmp_path / f"{most}.h5", match_settings(matcher))
        options = {"maps_in_memory": most, "features": tmp_path / "features"}
        match_pairs(matcher, files, pairs.exhaustive(4), store, **options)
        results.append(dict(store.load_all()))
    alone = matcher.match(files["0.png"], files["3.png"])
    for pair, m in results[0].items():
        np.testing.assert_allclose(m.keypoints1, results[1][pair].keypoints1, atol=1e-4)
    np.testing.assert_allclose(results[1]["0.png", "3.png"].keypoints0, alone.keypoints0)


def test_bundled_photos_go_through_the_real_matcher(tmp_path):
    """The names of the store are the given ones, the pixels those of the files."""
    matcher = Matcher(device="cpu", size=64, config=PRESETS["tiny"].replace(theta_c=0.0))
    files = {"one": ASSETS / "astronaut0.jpg", "two": ASSETS / "astronaut1.jpg"}
    store = MatchStore(tmp_path / "m.h5", match_settings(matcher))
    match_pairs(matcher, files, pairs.exhaustive(2), store)
    expected = matcher.match(*files.values())
    assert store.images["one"].size == expected.size0
    np.testing.assert_array_equal(store.load("one", "two").keypoints1, expected.keypoints1)
