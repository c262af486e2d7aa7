"""How well `matches.same_place` tells photos of one place from those of others, beside counting inliers; and
the fit of its regression.

    python benchmarks/places.py DATA/landmarks --cache FOLDER --size 384
    python benchmarks/places.py DATA/landmarks --cache FOLDER --size 384 --write calibration.json

DATA/landmarks has folders of posed photos, each of another place (images, and a COLMAP model in sparse). Of
each, photos that share points are of the same place. Not of the same are: photos of two collections that
look alike (by retrieval); photos of one building from different sides, which share no point; a photo and the
mirror image of another; the two halves of one photo, whose windows are alike. Every collection is judged by a
fit to the others. Matches stay in the cache."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from prism_match import Matcher, Matches
from prism_match.certainty import Calibration, calibration_error, logistic
from prism_match.colmap_model import read_model
from prism_match.config import UNLIKELY
from prism_match.files import short_hash
from prism_match.images import load_image
from prism_match.maps.retrieval import describe_files
from prism_match.places import probability, terms, that_agree
from prism_match.training.calibration import reliability

KINDS = ("same", "elsewhere", "other side", "mirrored", "halves")
SHARED, MIRRORED = 15, 60  # points that photos of the same place share, and those of which one is mirrored
OTHER_SIDE = 75.0  # degrees between the directions of cameras
OF_EACH = {"same": 20, "other side": 8, "mirrored": 7, "halves": 6}  # pairs of a collection, at most
LOOK_ALIKE = 6  # photos of other collections, of which one is taken
RIDGE = 1e-3


@dataclass(frozen=True)
class Pair:
    kind: str
    place: str
    first: Path
    second: Path

    @property
    def key(self) -> str:
        return short_hash([self.kind, *(f"{p.parts[-3]}/{p.name}" for p in (self.first, self.second))])


def listed(root: Path, photos: int, cache: Path) -> list[Pair]:
    """The same ones each time, photo by photo."""
    random = np.random.default_rng(7)
    pairs, chosen = [], {}
    for folder in sorted(p for p in root.iterdir() if p.is_dir()):
        model = read_model(folder)
        count = len(model.views)
        numbers = sorted(random.choice(count, min(photos, count), replace=False).tolist())
        files = {n: folder / "images" / model.views[n].name for n in numbers}
        chosen[folder.name] = list(files.values())
        found: dict[str, list[tuple[int, int, int]]] = {kind: [] for kind in OF_EACH}
        for a, i in enumerate(numbers):
            shared = model.shared_counts(i)
            for j in numbers[a + 1 :]:
                ahead = model.views[i].T[2, :3] @ model.views[j].T[2, :3]
                entry = (int(shared[j]), i, j)
                if shared[j] >= SHARED:
                    found["same"].append(entry)
                if shared[j] >= MIRRORED:
                    found["mirrored"].append(entry)
                if not shared[j] and np.degrees(np.arccos(np.clip(ahead, -1, 1))) > OTHER_SIDE:
                    found["other side"].append(entry)
        found["halves"] = [(0, n, n) for n in numbers]
        for kind, entries in found.items():
            entries.sort()
            quarters = np.array_split(np.arange(len(entries)), 4 if kind == "same" else 1)  # few points, many
            most = OF_EACH[kind] // len(quarters)
            for n in np.concatenate([random.permutation(q)[:most] for q in quarters]).astype(int):
                pairs.append(Pair(kind, folder.name, *(files[k] for k in entries[n][1:])))
    pairs += look_alike(chosen, cache)
    return sorted(pairs, key=lambda p: (p.place, p.first, p.second, p.kind))


def look_alike(chosen: dict[str, list[Path]], cache: Path) -> list[Pair]:
    random = np.random.default_rng(3)
    files = [path for some in chosen.values() for path in some]
    place = np.array([name for name, some in chosen.items() for _ in some])
    rows, _ = describe_files(Matcher(backend="auto"), files, cache / "descriptors.npz", progress=True)
    described = np.stack([rows[path] for path in files])
    similar = described @ described.T
    similar[place[:, None] == place] = -1
    pairs = {}
    for i in range(len(files)):
        j = int(random.choice(np.argsort(-similar[i])[:LOOK_ALIKE]))
        pairs.setdefault(frozenset((i, j)), Pair("elsewhere", str(place[i]), files[i], files[j]))
    return list(pairs.values())


def matched(pairs: list[Pair], cache: Path, size: int) -> Iterator[Matches]:
    matcher, features = None, {}
    cache.mkdir(exist_ok=True)
    for pair in pairs:
        file = cache / f"{pair.key}.npz"
        if not file.is_file():
            if matcher is None:
                matcher = Matcher(backend="auto", size=size, rotate="never")
            ways = ("left", "right") if pair.kind == "halves" else ("", pair.kind)
            for path, way in zip((pair.first, pair.second), ways, strict=True):
                if (path, way) not in features:
                    if len(features) > 60:
                        features.pop(next(iter(features)))
                    features[path, way] = matcher.extract([seen(path, way)])[0]
            found = [features[path, way] for path, way in zip((pair.first, pair.second), ways, strict=True)]
            (matches,) = matcher.match_extracted([(found[0], found[1])])
            replace(matches, name0=pair.first.name, name1=pair.second.name).save(file)
        yield Matches.load(file)


def seen(path: Path, way: str) -> np.ndarray:
    gray = load_image(path).gray
    if way == "mirrored":
        gray = gray[:, ::-1]
    if way in ("left", "right"):  # of a photo that stands upright, above and below
        turned = gray if gray.shape[1] >= gray.shape[0] else gray.T
        width = turned.shape[1]
        turned = turned[:, : int(0.46 * width)] if way == "left" else turned[:, int(0.54 * width) :]
        gray = turned if gray.shape[1] >= gray.shape[0] else turned.T
    return np.ascontiguousarray(gray)


def roc(values: np.ndarray, same: np.ndarray) -> float:
    """The probability that a pair of one place has more than one of two; half of it where they are equal."""
    more = values[same][:, None] - values[~same]
    return float((more > 0).mean() + (more == 0).mean() / 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--size", type=int, default=384)
    parser.add_argument("--photos", type=int, default=14, help="of each collection")
    parser.add_argument("--write", type=Path, help="a calibration that gets the coefficients of a fit to all")
    args = parser.parse_args()
    args.cache.mkdir(parents=True, exist_ok=True)
    pairs = listed(args.data, args.photos, args.cache)
    found = list(matched(pairs, args.cache / str(args.size), args.size))
    rows, counts = np.stack([terms(m) for m in found]), np.array([that_agree(m).sum() for m in found])
    kinds, places = np.array([p.kind for p in pairs]), np.array([p.place for p in pairs])
    same = kinds == "same"
    held_out = np.zeros(len(pairs))
    for place in np.unique(places):
        rest = logistic(rows[places != place], same[places != place], 30, RIDGE)
        held_out[places == place] = probability(rows[places == place], rest)
    print(f"{same.sum()} pairs of one place, {(~same).sum()} of different ones; area below the ROC curve")
    for kind in ("all", *KINDS[1:]):
        some = same | (np.ones_like(same) if kind == "all" else kinds == kind)
        few = int((some & ~same).sum())
        ours, theirs = (roc(x[some], same[some]) for x in (held_out, counts))
        print(f"{kind:12} {few:4} pairs  same_place {ours:.3f}  inliers {theirs:.3f}")
    print(f"expected calibration error {calibration_error(held_out, same):.3f}")
    for low in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9):
        high = {0.0: 0.1, 0.9: 1.01}.get(low, low + 0.2)
        some = (held_out >= low) & (held_out < high)
        if some.any():
            print(
                f"  {low:.1f} to {min(high, 1):.1f}: {some.sum():4} pairs, {same[some].mean():6.1%} the same"
            )
    below = {
        kind: float((held_out[kinds == kind] < UNLIKELY).mean()) for kind in KINDS if (kinds == kind).any()
    }
    print(f"below {UNLIKELY}: " + ", ".join(f"{kind} {share:.1%}" for kind, share in below.items()))
    ships = probability(rows)
    print(f"what ships, here: ROC {roc(ships, same):.3f}, error {calibration_error(ships, same):.3f}")
    fitted = logistic(rows, same, 30, RIDGE)
    print("coefficients", " ".join(f"{x:.3f}" for x in fitted))
    if args.write is not None:
        calibration = Calibration.load(args.write)
        told = {
            "pairs": len(pairs), "size": args.size, "roc": round(roc(held_out, same), 4),
            "expected_calibration_error": round(calibration_error(held_out, same), 4),
            "reliability": reliability(held_out, same),
        }  # fmt: skip
        fitted_on = calibration.fitted | {"places": told}
        replace(calibration, places=tuple(fitted.tolist()), fitted=fitted_on).save(args.write)


if __name__ == "__main__":
    main()
