"""Certainty, sigma, and points of one's own choice."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from prism_match import tiles
from prism_match.certainty import RIGHT, TERMS, Calibration, Regression, Signs, calibration_error
from prism_match.cli import app
from prism_match.config import PRESETS
from prism_match.errors import UserError
from prism_match.evaluation.bundled import BUNDLED, BundledPair
from prism_match.geometry import resize_matrix, warp_points
from prism_match.images import load_image
from prism_match.locating import around
from prism_match.matcher import PairMatcher
from prism_match.matches import Matches
from prism_match.training.calibration import held_out, true_place
from prism_match.training.pairs import PairBatch, cell_centres


def drawn_signs(n: int, seed: int, pixel: float = 1.0) -> Signs:
    random = np.random.default_rng(seed)
    return Signs(
        random.uniform(0.1, 1, n), np.exp(random.normal(-1, 1, n)), np.exp(random.normal(0, 1, n)),
        random.uniform(0, 40, n), pixel,
    )  # fmt: skip


def drawn_errors(signs: Signs, seed: int) -> np.ndarray:
    """As if the stated error was one half of the true one, and matches that do not fit were often wrong."""
    random = np.random.default_rng(seed)
    errors = 2 * signs.stated * random.exponential(1, len(signs.stated))
    return np.where(random.random(len(errors)) < 1 / (1 + signs.misfit), errors, np.inf)


def test_a_fit_means_what_it_says_on_what_it_has_not_seen() -> None:
    seen, other = drawn_signs(20_000, 0), drawn_signs(20_000, 1)
    fit = Regression.fit(seen.terms(), drawn_errors(seen, 2))
    certainty, sigma = fit(other)
    errors = drawn_errors(other, 3)
    assert calibration_error(certainty, errors < RIGHT) < 0.02
    assert calibration_error(certainty**4, errors < RIGHT) > 0.1  # the measure can tell
    bounded = np.minimum(errors, 10.0)
    small, large = sigma < np.quantile(sigma, 0.2), sigma > np.quantile(sigma, 0.8)
    assert bounded[large].mean() > 1.5 * bounded[small].mean()
    assert sigma.mean() == pytest.approx(bounded.mean(), rel=0.1)


def test_matches_of_a_larger_image_are_believed_as_if_they_had_been_found_there() -> None:
    g = np.random.default_rng(3)
    regression = Regression(tuple(g.normal(0, 0.3, TERMS)), tuple(g.normal(0, 0.3, TERMS)))
    small = drawn_signs(50, 4)
    large = replace(small, stated=2.5 * small.stated, misfit=2.5 * small.misfit, pixel=2.5 * small.pixel)
    found = regression.enlarged(*regression(small), 2.5)
    for one, other in zip(found, regression(large), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4)
        assert one.dtype == np.float32


def test_signs_without_neighbours_are_numbers_still() -> None:
    nobody = np.full(3, np.inf)
    signs = Signs(np.array([0.0, 0.5, 1.0]), nobody, nobody, nobody, 4.0)
    assert signs.terms().shape == (3, TERMS) and np.isfinite(signs.terms()).all()


def believed(n: int = 7) -> Matches:
    random = np.random.default_rng(0)
    points = random.uniform(0, 50, (n, 2))
    scores = np.sort(random.random(n))[::-1]
    return Matches(
        points, points + 1, scores, (64, 60), (64, 60), "a", "b", certainty=random.random(n), sigma=scores + 1
    )


@pytest.mark.parametrize("suffix", [".npz", ".json", ".csv", ".h5"])
def test_belief_survives_a_file(suffix: str, tmp_path: Path) -> None:
    matches = believed()
    matches.save(tmp_path / f"m{suffix}")
    back = Matches.load(tmp_path / f"m{suffix}")
    for name in ("keypoints0", "keypoints1", "scores", "certainty", "sigma"):
        assert np.array_equal(getattr(back, name), getattr(matches, name))
    arrays = (matches.keypoints0, matches.keypoints1, matches.scores)
    plain = Matches(*arrays, (64, 60), (64, 60))
    plain.save(tmp_path / f"p{suffix}")
    assert Matches.load(tmp_path / f"p{suffix}").certainty is None


def test_belief_goes_with_its_matches() -> None:
    matches = believed()
    assert np.array_equal(matches.filter([5, 2]).certainty, matches.certainty[[5, 2]])  # type: ignore[index]
    best = np.sort(np.argsort(-matches.certainty)[:3])  # type: ignore[operator]
    assert not np.array_equal(best, [0, 1, 2]), "or certainty and score would tell the same"
    assert np.array_equal(matches.filter(top=3).scores, matches.scores[best])
    assert np.array_equal(matches.filter(top=3).sigma, matches.sigma[best])  # type: ignore[index]
    sure = int(np.argmax(matches.certainty))  # type: ignore[arg-type]
    assert np.array_equal(matches.filter(spread=1).scores, matches.scores[[sure]])
    plain = replace(matches, certainty=None)
    assert np.array_equal(plain.filter(top=3).scores, matches.scores[:3])
    assert matches.swap().sigma is None
    with pytest.raises(UserError, match="one number for each match"):
        Matches(matches.keypoints0, matches.keypoints1, matches.scores, (9, 9), (9, 9), sigma=np.ones(2))


def made_up(weights: str, subpixel: str) -> Calibration:
    """Sure where the score is high; the error is what the network states."""
    right, error = np.zeros(TERMS), np.zeros(TERMS)
    right[:2], error[2] = (2.0, 1.0), 1.0
    regression = Regression(tuple(right), tuple(error))
    return Calibration(weights, subpixel, regression, regression)


def test_a_calibration_is_for_its_weights_alone(tmp_path: Path, tiny_weights: Path) -> None:
    from prism_match.weights import SUBPIXEL_SHA256, weights_info

    digest = weights_info(tiny_weights).sha256
    assert digest is not None
    made_up(digest, SUBPIXEL_SHA256).save(tmp_path / "mine.json")
    assert PairMatcher(tiny_weights, calibration=tmp_path / "mine.json").calibration is not None
    assert PairMatcher(tiny_weights).calibration is None
    made_up("0" * 64, SUBPIXEL_SHA256).save(tmp_path / "other.json")
    with pytest.raises(UserError, match="other weights"):
        PairMatcher(tiny_weights, calibration=tmp_path / "other.json")
    (tmp_path / "cut.json").write_text((tmp_path / "mine.json").read_text()[:100])
    with pytest.raises(UserError, match="not a calibration, or a damaged one"):
        PairMatcher(tiny_weights, calibration=tmp_path / "cut.json")
    with pytest.raises(UserError, match="no such file"):
        PairMatcher(tiny_weights, calibration=tmp_path / "none.json")
    with pytest.raises(UserError, match="calibration"):
        PairMatcher(tiny_weights).locate(np.zeros((64, 64)), np.zeros((64, 64)), np.zeros((1, 2)))


def test_a_calibration_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    command = ["calibrate", "--photos", str(tmp_path), "-o", str(tmp_path / "file" / "mine.json")]
    result = CliRunner().invoke(app, command)  # before any work
    assert isinstance(result.exception, UserError) and "cannot be made a folder" in str(result.exception)
    random = np.random.default_rng(0)
    with pytest.raises(UserError, match="too few pairs have matches"):  # none in the half that is held out
        held_out(random.normal(size=(50, TERMS)), random.exponential(2, 50), np.zeros(50, int))


def test_the_shipped_calibration_is_for_the_shipped_weights() -> None:
    from prism_match.certainty import shipped
    from prism_match.weights import SHIPPED_SHA256, SUBPIXEL_SHA256

    assert (shipped().weights, shipped().subpixel) == (SHIPPED_SHA256, SUBPIXEL_SHA256)


def test_the_map_of_a_neighbourhood_is_found_in_spite_of_wrong_matches() -> None:
    torch.manual_seed(0)
    at0 = 200 * torch.rand(400, 2)
    matrix, shift = torch.tensor([[1.5, -0.2], [0.3, 1.1]]), torch.tensor([10.0, -4.0])
    at1 = at0 @ matrix.T + shift
    at1[::10] += 60 * torch.randn(40, 2)
    points = 20 + 160 * torch.rand(50, 2)
    guess = around(at0, at1, torch.full((400,), 0.8), points)
    wrong = (guess.at1 - (points @ matrix.T + shift)).norm(dim=1)
    assert wrong.median() < 0.05 and wrong.quantile(0.9) < 2
    assert guess.misfit.median() > 0.01  # and it tells that some do not fit
    good = wrong < 0.1
    torch.testing.assert_close(guess.stretch[good].median(0).values, matrix, rtol=0.02, atol=0.02)


def test_true_places_are_those_of_the_map_between_cells() -> None:
    size, shift = 64, torch.tensor([5.25, -3.5])
    centres = cell_centres(size, size)[None]
    warp = 1.25 * centres + shift
    seen = torch.ones(1, 8, 8, dtype=torch.bool)
    seen[:, :, 5:] = False
    image = torch.zeros(1, 1, size, size)
    batch = PairBatch(image, image, warp, seen, warp, seen)
    points = np.array([[10.0, 20.0], [30.0, 30.5], [38.0, 30.0], [60.0, 20.0], [52.0, 20.0]])
    place, known = true_place(batch, points)
    np.testing.assert_allclose(place[:2], 1.25 * points[:2] + shift.numpy())
    assert known.tolist() == [True, True, False, False, True]  # in doubt at the edge; at the border; hidden
    assert np.isnan(place[4]).all()


@pytest.fixture(scope="module")
def tiny_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from prism_match.model.prism import PRISM
    from prism_match.weights.store import export_weights

    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    export_weights(path, PRISM(PRESETS["tiny"]).state_dict(), PRESETS["tiny"], {})
    return path


@pytest.fixture(scope="module")
def matcher() -> PairMatcher:
    return PairMatcher(device="cpu", size=320)


def test_points_are_found_where_the_homography_has_them(matcher: PairMatcher) -> None:
    pair: BundledPair = BUNDLED["astronaut"]
    width, height = load_image(pair.photos[0]).size
    points = np.random.default_rng(0).uniform(0, (width - 1, height - 1), (300, 2))
    points[7] = (-40.0, 5.0)
    points[8] = np.nan
    found = matcher.locate(*pair.photos, points)
    truth = pair.truth(points)
    inside = np.isfinite(truth).all(1) & (truth > 16).all(1)
    visible = inside & (truth < np.array(load_image(pair.photos[1]).size) - 17).all(1)
    there = np.isfinite(found.points1).all(1)
    assert not there[7:9].any() and (found.certainty[7:9] == 0).all() and np.isnan(found.sigma[7:9]).all()
    assert there[visible].mean() > 0.5
    error = np.linalg.norm(found.points1 - truth, axis=1)[there & visible]
    assert np.median(error) < 1.0 and np.quantile(error, 0.8) < 3.0
    order = np.random.default_rng(1).permutation(300)[:20]  # each for itself
    again = matcher.locate(*pair.photos, points[order])
    np.testing.assert_allclose(again.points1, found.points1[order], atol=1e-2)


def test_points_are_found_by_what_matches_at_another_scale(
    matcher: PairMatcher, photo: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A detail, eight times as large: hardly anything of it is found at once."""
    detail = cv2.resize(photo[200:248, 180:228], (384, 384), interpolation=cv2.INTER_CUBIC)
    to_detail = resize_matrix(8, 8) @ np.array([[1, 0, -180], [0, 1, -200], [0, 0, 1.0]])

    def known(_: PairMatcher, pair: object, matches: Matches) -> Matches:
        """In place of a search: every third pixel of what is shown."""
        at0 = np.stack(np.meshgrid(np.arange(182, 227, 3), np.arange(202, 247, 3)), axis=-1).reshape(-1, 2)
        at1 = warp_points(at0, to_detail)
        return replace(
            matches, keypoints0=at0, keypoints1=at1, scores=np.full(len(at0), 0.9), certainty=None, sigma=None
        )

    monkeypatch.setattr(tiles, "match_at_other_scales", known)
    points = np.random.default_rng(0).uniform((185, 205), (223, 243), (60, 2))
    counts = {}
    for rescale in ("never", "auto"):
        found = matcher.adjusted(rescale=rescale, rotate="never").locate(photo, detail, points)
        error = np.linalg.norm(found.points1 - warp_points(points, to_detail), axis=1)
        counts[rescale] = int((error < 4).sum())  # half a pixel of the coarser image
    assert counts["never"] < 20 and counts["auto"] > 50, counts


def test_points_are_found_whatever_tiles_there_are(photo: np.ndarray, matcher: PairMatcher) -> None:
    tiled = matcher.adjusted(size=192, tiles="auto", tile_memory=2.0, rotate="never", rescale="never")
    points = np.array([[150.0, 160.0], [200.5, 210.25]])
    np.testing.assert_allclose(tiled.locate(photo, photo, points).points1, points, atol=0.1)


@pytest.mark.parametrize("points", [np.zeros(3), np.zeros((2, 3)), "text", [[1, 2], [3]]])
def test_points_of_another_shape_are_told(points: object, matcher: PairMatcher) -> None:
    with pytest.raises(UserError, match="points must"):
        matcher.locate(*BUNDLED["astronaut"].photos, points)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "told"),
    [("a,b,c\n1,2,3\n", "name the columns"), ("x,y\n1,zwei\n", "two numbers"), ("x,y\n1\n", "two numbers")],
)
def test_bad_files_of_points_are_told_in_one_line(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text(text)
    result = CliRunner().invoke(
        app, ["locate", "a.png", "b.png", "--points", str(tmp_path / "p.csv"), "-o", str(tmp_path / "o.csv")]
    )
    assert told in str(result.exception) and not (tmp_path / "o.csv").exists()


def test_where_points_go_is_looked_at_before_they_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("it takes a while to match")

    monkeypatch.setattr(sys.modules["prism_match.cli.locate"], "make_matcher", never)
    (tmp_path / "p.csv").write_text("x,y\n1,2\n")
    (tmp_path / "folder.csv").mkdir()
    for out, told in (("p.csv/o.csv", "cannot be made a folder"), ("folder.csv", "is a folder")):
        call = ["locate", "a.png", "b.png", "--points", str(tmp_path / "p.csv"), "-o", str(tmp_path / out)]
        assert told in str(CliRunner().invoke(app, call).exception)
