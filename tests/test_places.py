"""Whether two photos show the same place at all, and who asks."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from synthetic_matcher import SyntheticMatcher, make_photos, true_matches
from synthetic_scene import K, make_scene

from prism_match.cameras import pinhole
from prism_match.colmap_model import read_model
from prism_match.errors import UserError
from prism_match.maps.landmarks import SfmMap
from prism_match.maps.localization import Query, localize
from prism_match.maps.reconstruction import SfmOptions, reconstruct
from prism_match.matches import Matches
from prism_match.places import terms


def of_one_place(n: int = 400, seed: int = 0) -> Matches:
    """A relief seen by two cameras; every twentieth match is wrong."""
    g = np.random.default_rng(seed)
    points0 = g.uniform(0, [640, 480], (n, 2))
    points1 = points0 + [40, 5] + np.outer(g.uniform(-20, 20, n), [1, 0.1])
    points1[::20] = g.uniform(0, [640, 480], (len(points1[::20]), 2))
    scores = np.sort(g.uniform(0.5, 1, n))[::-1]
    return Matches(
        points0, points1, scores, (640, 480), (680, 520), certainty=np.full(n, 0.9), sigma=np.full(n, 0.5)
    )


def of_two_places(n: int = 60, seed: int = 0) -> Matches:
    g = np.random.default_rng(seed)
    points = g.uniform(0, [640, 480], (2, n, 2))
    scores = np.sort(g.uniform(0.2, 0.5, n))[::-1]
    return Matches(*points, scores, (640, 480), (640, 480), certainty=np.full(n, 0.2), sigma=np.full(n, 5.0))


def test_many_matches_of_one_geometry_are_one_place_and_a_few_by_chance_are_not() -> None:
    same, other = of_one_place().same_place, of_two_places().same_place
    assert same is not None and other is not None
    assert same > 0.9 and other < 0.1
    assert of_one_place(30).same_place < same  # type: ignore[operator]


def test_nothing_in_common_is_known_to_be_little() -> None:
    nothing = Matches(np.zeros((0, 2)), np.zeros((0, 2)), np.zeros(0), (640, 480), (640, 480))
    assert nothing.same_place is not None and nothing.same_place < 0.1
    few = of_one_place(5)
    assert few.same_place is not None and np.isfinite(terms(few)).all()
    assert replace(few, certainty=None, sigma=None).same_place is None, "without certainty nobody knows"


def test_the_size_of_photos_does_not_matter() -> None:
    m = of_one_place()
    large = replace(
        m,
        keypoints0=(m.keypoints0 + 0.5) * 3 - 0.5, keypoints1=(m.keypoints1 + 0.5) * 3 - 0.5,
        size0=(1920, 1440), size1=(2040, 1560),
    )  # fmt: skip
    np.testing.assert_allclose(terms(large), terms(m), atol=1e-6)


@pytest.mark.parametrize("suffix", [".npz", ".csv"])
def test_files_know_it_too(suffix: str, tmp_path: Path) -> None:
    m = of_one_place()
    m.save(tmp_path / f"m{suffix}")
    assert Matches.load(tmp_path / f"m{suffix}").same_place == m.same_place
    assert m.filter(top=20).same_place != m.same_place  # of fewer matches it is told anew


def believed(m: Matches, certainty: float) -> Matches:
    return replace(m, certainty=np.full(len(m), certainty), sigma=np.full(len(m), 1.0))


def test_a_query_is_not_localized_by_photos_of_another_place(tmp_path: Path) -> None:
    scene, size = make_scene(tmp_path, points=1200), (160, 120)
    world = SfmMap(read_model(scene.root), scene.root / "images")
    query = Query("q", Path("q"), pinhole(K, *size))
    good = []
    for n in (1, 3):
        points = true_matches(scene, 2, n)
        good.append((scene.names[n], believed(Matches(*points, np.ones(len(points[0])), size, size), 0.95)))
    chance = of_two_places()
    wrong = scene.names[4], replace(
        chance, size0=(160, 120), size1=(160, 120),
        keypoints0=chance.keypoints0 / 4, keypoints1=chance.keypoints1 / 4,
    )  # fmt: skip
    result = localize(query, [*good, wrong], world, threshold=2.0, same_place=0.2)
    assert result.T is not None and list(result.elsewhere) == [scene.names[4]]
    assert result.references[scene.names[4]] == 0 < result.references[scene.names[1]]
    assert result.to_dict()["elsewhere"][scene.names[4]] < 0.1  # type: ignore[index]
    refused = localize(query, [wrong], world, threshold=2.0, same_place=0.2)
    assert refused.T is None and "1 of 1 map photos show another place" in refused.problem
    everything = localize(query, [*good, wrong], world, threshold=2.0)
    assert not everything.elsewhere and everything.references[scene.names[4]] > 0


class Believing(SyntheticMatcher):
    """Pairs of `strangers` have a few matches by chance; the others are believed."""

    strangers: frozenset[str] = frozenset()

    def match(self, a, b):  # noqa: ANN001, ANN201
        if self.strangers & {Path(a.name).name, Path(b.name).name}:
            m = of_two_places(80, len(self.matched))
            self.matched.append((a.name, b.name))
            scale = np.float32(a.size[0] / 640)
            return replace(
                m, keypoints0=m.keypoints0 * scale, keypoints1=m.keypoints1 * scale,
                size0=a.size, size1=b.size, name0=a.name, name1=b.name,
            )  # fmt: skip
        return believed(super().match(a, b), 0.95)


def test_photos_of_other_places_are_left_out_of_a_reconstruction_and_named(tmp_path: Path) -> None:
    if find_spec("pycolmap") is None:  # not by importing it: see `colmap_worker`
        pytest.skip("pycolmap is not installed")
    made, folder, _ = make_photos(tmp_path / "scene", 5)
    matcher = Believing(made)
    matcher.strangers = frozenset({made.names[4]})
    summary = reconstruct(folder, tmp_path / "out", SfmOptions(threads=1), lambda: matcher)
    left_out = {frozenset(pair[:2]) for pair in summary["elsewhere"]}
    assert left_out == {frozenset((made.names[4], other)) for other in made.names[:4]}
    assert summary["not_registered"] == [made.names[4]] and summary["registered"] == 4
    report = (tmp_path / "out" / "report.md").read_text()
    assert "show different places" in report and f"`{made.names[4]}`" in report
    again = reconstruct(folder, tmp_path / "out", SfmOptions(threads=1), lambda: matcher)
    assert again["elsewhere"] == [list(pair) for pair in summary["elsewhere"]] and len(matcher.matched) == 10
    matcher.strangers = frozenset(made.names)
    with pytest.raises(UserError, match="no two of its photos are likely to show the same place"):
        reconstruct(folder, tmp_path / "none", SfmOptions(threads=1), lambda: matcher)
