"""Panoramas of a camera that turns in a painted room, with a matcher that knows how it turned."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import cv2
import numpy as np
import pytest
from synthetic_matcher import SyntheticMatcher, write_noise
from synthetic_scene import texture
from typer.testing import CliRunner

from prism_match.cli import app
from prism_match.cli import stitch as command
from prism_match.errors import UserError
from prism_match.geometry import rotation_angle, warp_points
from prism_match.images import load_image
from prism_match.maps.panorama import (
    StitchOptions,
    choose_projection,
    field_of_view,
    stitch,
    write_panorama,
)
from prism_match.matcher import Prepared
from prism_match.matches import Matches

WIDTH, HEIGHT, FOCAL = 160, 120, 150.0
K = np.array([[FOCAL, 0, (WIDTH - 1) / 2], [0, FOCAL, (HEIGHT - 1) / 2], [0, 0, 1]])
TURNS = {"p0.png": (-30, 0), "p1.png": (-10, 3), "p2.png": (10, -3), "p3.png": (30, 1)}  # degrees


def rotation(pan: float, tilt: float) -> np.ndarray:
    """From the camera to the world."""
    across, down = (cv2.Rodrigues(np.radians(v))[0] for v in ([0, pan, 0.0], [tilt, 0, 0.0]))
    return across @ down


def paint(rays: np.ndarray) -> np.ndarray:
    """What is seen in directions (... 3): uint8."""
    x, y, z = np.moveaxis(rays, -1, 0)
    u = (np.arctan2(x, z) / np.pi + 0.5) * 511
    v = (np.arctan2(y, np.hypot(x, z)) / np.pi + 0.5) * 511
    walls = texture(3).astype(np.float32)
    return (cv2.remap(walls, u.astype(np.float32), v.astype(np.float32), cv2.INTER_LINEAR) * 255).astype(
        np.uint8
    )


def pixels() -> np.ndarray:
    x, y = np.meshgrid(np.arange(WIDTH), np.arange(HEIGHT))
    return np.stack([x, y], axis=-1).astype(float)


@dataclass
class Turning(SyntheticMatcher):
    """Photos that are not in TURNS have matches that mean nothing."""

    scene: None = None
    rotations: dict[str, np.ndarray] = field(
        default_factory=lambda: {name: rotation(*turn) for name, turn in TURNS.items()}
    )

    def match(self, a: Prepared, b: Prepared) -> Matches:
        first, second = Path(a.name).name, Path(b.name).name
        g = np.random.default_rng(len(self.matched))
        self.matched.append((first, second))
        points0 = pixels()[4:-4:5, 4:-4:5].reshape(-1, 2)
        if first in self.rotations and second in self.rotations:
            turn = K @ self.rotations[second].T @ self.rotations[first] @ np.linalg.inv(K)
            points1 = warp_points(points0, turn) + 0.1 * g.standard_normal(points0.shape)
        else:
            points1 = g.uniform(0, [WIDTH - 1, HEIGHT - 1], points0.shape)
        inside = np.all((points1 >= 0) & (points1 <= [WIDTH - 1, HEIGHT - 1]), axis=1)
        scores = g.uniform(0.3, 1, int(inside.sum()))
        return Matches(points0[inside], points1[inside], scores, a.size, b.size, a.name, b.name)


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    rays = np.concatenate([pixels(), np.ones((HEIGHT, WIDTH, 1))], axis=-1) @ np.linalg.inv(K).T
    for n, (name, turn) in enumerate(TURNS.items()):
        seen = paint(rays @ rotation(*turn).T)
        cv2.imwrite(str(folder / name), (seen * (0.8 + 0.06 * n)).astype(np.uint8))  # in other light each
    write_noise(folder / "other.png", 0)
    (folder / "broken.jpg").write_bytes(b"no photo")
    return folder


def files_of(folder: Path) -> dict[str, Path]:
    return {p.name: p for p in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def panorama(photos):
    return stitch(files_of(photos), StitchOptions(), Turning)


def test_cameras_are_found_and_strangers_are_left_out(panorama):
    assert set(panorama.cameras) == set(TURNS)
    assert panorama.left_out == {
        "broken.jpg": "cannot be read",
        "other.png": "shares too little with the others",
    }
    truth = {name: rotation(*turn) for name, turn in TURNS.items()}
    for first, second in zip(TURNS, list(TURNS)[1:], strict=False):
        found = panorama.cameras[first].rotation.T @ panorama.cameras[second].rotation
        assert rotation_angle(found, truth[first].T @ truth[second]) < 0.5
    focals = [c.intrinsics[0, 0] for c in panorama.cameras.values()]
    np.testing.assert_allclose(focals, FOCAL, rtol=0.03)
    assert panorama.error < 0.5
    across = 60 + 2 * np.degrees(np.arctan(WIDTH / 2 / FOCAL))
    assert abs(panorama.field_of_view[0] - across) < 4 and panorama.projection == "cylindrical"


def test_the_panorama_shows_what_the_photos_show(panorama, photos):
    """The middle of each photo is where its camera puts it, and the rest is filled."""
    height, width = panorama.pixels.shape[:2]
    assert abs(width - np.radians(panorama.field_of_view[0]) * FOCAL) < 25
    gray = panorama.pixels[..., 0].astype(np.float32)
    assert (gray > 0).mean() > 0.8
    for name in TURNS:
        patch = load_image(photos / name).gray[40:80, 55:105] * 255
        found = cv2.matchTemplate(gray, patch.astype(np.float32), cv2.TM_CCOEFF_NORMED)
        assert found.max() > 0.9
    # They come in the order in which the camera turned.
    at = [
        cv2.minMaxLoc(
            cv2.matchTemplate(gray, load_image(photos / n).gray[40:80, 55:105] * 255, cv2.TM_CCOEFF_NORMED)
        )[3][0]
        for n in TURNS
    ]
    steps = np.diff(at) / FOCAL
    np.testing.assert_allclose(steps, np.radians(20), atol=0.05)


def test_a_panorama_is_no_larger_than_asked_for(panorama, photos):
    small = stitch(files_of(photos), StitchOptions("spherical", 0.02), Turning)
    assert (
        small.projection == "spherical"
        and 0.015 < small.pixels.shape[0] * small.pixels.shape[1] / 1e6 <= 0.02
    )


def test_the_width_tells_the_projection(panorama):
    assert choose_projection("auto", (60, 40)) == "plane"
    assert choose_projection("auto", (120, 40)) == "cylindrical"
    assert choose_projection("auto", (300, 100)) == choose_projection("spherical", (30, 30)) == "spherical"
    with pytest.raises(UserError, match="200 x 40 degrees are too wide for a plane"):
        choose_projection("plane", (200, 40))
    sizes = dict.fromkeys(panorama.cameras, (WIDTH, HEIGHT))
    one = {"p0.png": panorama.cameras["p0.png"]}
    assert abs(field_of_view(one, sizes)[0] - 2 * np.degrees(np.arctan(WIDTH / 2 / FOCAL))) < 3


def test_photos_that_share_nothing_are_told(photos, tmp_path):
    for n in range(3):
        write_noise(tmp_path / f"{n}.png", n)
    with pytest.raises(UserError, match="none of the 3 photos belong together"):
        stitch(files_of(tmp_path), StitchOptions(), Turning)
    with pytest.raises(UserError, match="1 photo that can be read; at least two are needed"):
        stitch({"a": photos / "p0.png", "b": photos / "broken.jpg"}, StitchOptions(), Turning)


def test_photos_that_no_turning_explains_make_no_panorama(photos):
    """They had a picture of five pixels a side: cameras of nearly no focal length."""

    class Moving(Turning):
        def match(self, a: Prepared, b: Prepared) -> Matches:
            first, second = (int(Path(image.name).stem[1]) for image in (a, b))
            step = np.array([[0, 0, 5.0], [0, 0, 0], [0.0008, 0, 0]])
            there = (np.eye(3) + second * step) @ np.linalg.inv(np.eye(3) + first * step)
            points0 = pixels()[4:-4:5, 4:-4:5].reshape(-1, 2)
            points1 = warp_points(points0, there)
            inside = np.all((points1 >= 0) & (points1 <= [WIDTH - 1, HEIGHT - 1]), axis=1)
            scores = np.linspace(1, 0.3, int(inside.sum()))
            return Matches(points0[inside], points1[inside], scores, a.size, b.size, a.name, b.name)

    files = {name: photos / name for name in list(TURNS)[:3]}
    with pytest.raises(UserError, match="no cameras that have only turned explain the photos"):
        stitch(files, StitchOptions(), Moving)


def test_the_command_names_what_it_leaves_out(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "make_matcher", lambda *_, **__: Turning())
    out = tmp_path / "new" / "wide.jpg"
    done = CliRunner().invoke(app, ["stitch", str(photos), "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert "left out: other.png: shares too little" in done.output
    assert "left out: broken.jpg: cannot be read" in done.output and "4 of 6" in done.output
    assert load_image(out).size[0] > 200 and [p.name for p in out.parent.iterdir()] == ["wide.jpg"]


@pytest.mark.parametrize(("words", "reason"), [
    (["none"], "no such folder of images"),
    ([".", "-o", "wide.gif"], "a panorama is written as .jpg"),
    ([".", "--megapixels", "0"], "more than 0 megapixels"),
    ([".", "-o", "p0.png/wide.jpg"], "cannot be made a folder"),
])  # fmt: skip
def test_bad_input_is_told_in_one_line(photos, words, reason, monkeypatch):
    monkeypatch.chdir(photos)
    done = CliRunner().invoke(app, ["stitch", *words])
    assert isinstance(done.exception, UserError) and reason in str(done.exception)
    assert "\n" not in str(done.exception)


def test_a_panorama_is_written_whole_or_not_at_all(tmp_path, panorama, monkeypatch):
    path = tmp_path / "wide.png"
    write_panorama(path, panorama.pixels)
    np.testing.assert_array_equal(load_image(path).rgb, panorama.pixels)
    monkeypatch.setattr(Path, "write_bytes", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_panorama(path, panorama.pixels[:50])
    assert load_image(path).rgb.shape == panorama.pixels.shape and len(list(tmp_path.iterdir())) == 1
