"""A map to look at: the still picture, the page that viser serves, and what a browser makes of it."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
from browser_for_tests import open_browser
from synthetic_scene import Scene, make_scene
from test_colmap_data import to_binary
from typer.testing import CliRunner

from prism_match.cli import app
from prism_match.colmap_model import Model, read_model
from prism_match.errors import UserError
from prism_match.images import ORIENTATION
from prism_match.maps.localization import write_poses
from prism_match.maps.outside import FIELD, GREEN, RED, draw_outside, finite_points, look_out

viewer = pytest.importorskip("prism_match.maps.viewer")
Viewer, open_shown = viewer.Viewer, viewer.open_shown


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """With points in three colours."""
    scene = make_scene(tmp_path_factory.mktemp("scene"), points=600)
    file = scene.root / "sparse" / "points3D.txt"
    rows = [line.split() for line in file.read_text().splitlines()]
    colours = ("250 20 20", "20 250 20", "20 20 250")
    lines = [" ".join([*r[:4], colours[n % 3], *r[7:]]) for n, r in enumerate(rows)]
    file.write_text("\n".join(lines) + "\n")
    return scene


@pytest.fixture(scope="module")
def model(scene: Scene) -> Model:
    return read_model(scene.root)


def test_colours_and_tracks_of_both_formats(scene: Scene, model: Model, tmp_path: Path) -> None:
    to_binary(scene.root / "sparse", tmp_path / "binary")
    for other in (model, read_model(tmp_path / "binary")):
        assert other.colours[:3].tolist() == [[250, 20, 20], [20, 250, 20], [20, 20, 250]]
    for point in (0, 299, len(model.points) - 1):
        seen = [n for n, view in enumerate(model.views) if point in view.points]
        assert model.seen_by(point).tolist() == seen


# ---- the still picture


def test_everything_is_in_the_picture(model: Model) -> None:
    xyz, _ = finite_points(model)
    poses = np.array([v.T for v in model.views])
    lookout = look_out(xyz, poses, 1.5)
    centres = np.array([v.centre for v in model.views])
    q = (np.concatenate([xyz, centres]) - lookout.eye) @ lookout.axes().T
    inside = (q[:, 2] > 0) & np.all(np.abs(q[:, :2] / q[:, 2:]) < np.tan(FIELD / 2) * np.array([1.5, 1]), 1)
    assert inside[len(xyz) :].all() and inside[: len(xyz)].mean() > 0.85
    assert lookout.up @ model.views[0].T[1, :3] < 0, "what is down for the cameras is down"


def counted(picture: np.ndarray, colour: tuple[int, int, int]) -> int:
    return int((np.abs(picture.astype(int) - colour).max(axis=2) < 40).sum())


def test_points_cameras_and_queries_are_drawn(model: Model) -> None:
    picture = draw_outside(model)
    assert picture.shape == (800, 1200, 3)
    for colour in ((212, 17, 17), (17, 212, 17), (17, 17, 212)):
        assert counted(picture, colour) > 300, "a third of the points"
    bare = draw_outside(replace(model, points=model.points[:0], colours=None, views=unseeing(model)))
    assert counted(bare, RED) > 500 and counted(bare, GREEN) == 0
    asked = draw_outside(model, np.array([model.views[0].T]))
    assert counted(asked, GREEN) > 50


def unseeing(model: Model) -> tuple:
    """The views without what they see."""
    return tuple(replace(v, points=v.points[:0], pixels=v.pixels[:0]) for v in model.views)


def test_odd_maps_are_drawn(model: Model) -> None:
    far = np.concatenate([model.points, [[1e7, -1e7, 1e7], [np.nan, 0, 0]]])
    colours = np.concatenate([model.colours, [[0, 0, 0], [0, 0, 0]]]).astype(np.uint8)
    shown = draw_outside(replace(model, points=far, colours=colours))
    assert counted(shown, (17, 212, 17)) > 300, "one point far off does not make the rest a dot"
    one = replace(model, views=unseeing(model)[:1], points=model.points[:0], colours=None)
    assert counted(draw_outside(one), RED) > 50, "a camera alone"
    tumbling = [np.diag([1.0, 1, 1, 1]), np.diag([-1.0, -1, 1, 1])]  # no way is down
    views = tuple(replace(v, T=T) for v, T in zip(unseeing(model), tumbling, strict=False))
    assert np.isfinite(look_out(model.points, np.array(tumbling)).eye).all()
    draw_outside(replace(model, views=views))


# ---- what is shown


def test_what_there_is_to_show(scene: Scene, tmp_path: Path) -> None:
    shown = open_shown(scene.root)
    assert shown.photos.path("view0.png").is_file() and not shown.queries
    shutil.copytree(scene.root / "sparse", tmp_path / "alone")
    assert open_shown(tmp_path / "alone").photos is None, "without photos there still are points"
    assert open_shown(tmp_path / "alone", scene.root / "images").photos is not None
    write_poses(tmp_path / "poses.txt", {"new.png": scene.T[2]})
    T, camera = open_shown(scene.root, poses=tmp_path / "poses.txt").queries["new.png"]
    np.testing.assert_allclose(T, scene.T[2], atol=1e-9)
    assert camera == shown.model.views[0].camera, "nothing better is known"
    own = {"model": "SIMPLE_PINHOLE", "width": 80, "height": 60, "params": [90, 40, 30], "from": "EXIF"}
    told = {"results": [{"name": "new.png", "camera": own}, {"name": "lost.png", "camera": None}]}
    (tmp_path / "localization.json").write_text(json.dumps(told))
    assert open_shown(scene.root, poses=tmp_path / "poses.txt").queries["new.png"][1].width == 80


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_as_they_are_stored(orientation: int) -> None:
    """COLMAP does not turn photos, so neither may the patches of its points."""
    stored = np.random.default_rng(0).integers(0, 255, (4, 6, 3), dtype=np.uint8)
    image = PIL.Image.fromarray(stored)
    image.getexif()[ORIENTATION] = orientation
    turned = np.asarray(PIL.ImageOps.exif_transpose(image))
    np.testing.assert_array_equal(viewer.as_stored(turned, orientation), stored)


def test_a_click_means_the_foremost_point() -> None:
    points = np.array([[0, 0, 9.0], [0.001, 0, 5.0], [0.05, 0, 5.0], [0, 0, -3.0], [4, 0, 5.0]])
    eye, ahead = np.zeros(3), np.array([0, 0, 1.0])
    assert viewer.nearest_to_ray(points, eye, ahead) == 1
    assert viewer.nearest_to_ray(points[2:], eye, ahead) == 0, "beside it, but near"
    assert viewer.nearest_to_ray(points[3:], eye, ahead) is None
    assert viewer.nearest_to_ray(points[:0], eye, ahead) is None


def test_a_point_and_its_photos(scene: Scene) -> None:
    shown = open_shown(scene.root)
    with Viewer(shown) as opened, Viewer(shown) as second:
        assert second.url != opened.url, "the next free port"
        point = int(shown.model.views[3].points[7])
        views = shown.model.seen_by(point)
        opened.select(point)
        assert opened.selected == point
        for n in views:
            assert f"`view{n}.png`" in opened._story.content
        assert f"in {len(views)} photos" in opened._story.content
        sightings = list(opened.sightings(point))
        (view, pixel), *_ = sightings
        picture = opened.patches(sightings)
        photo = cv2.imread(str(scene.root / "images" / view.name))[..., ::-1]
        x, y = np.rint(pixel).astype(int)
        middle = picture[viewer.PATCH, viewer.PATCH].astype(int)
        around = photo[max(y - 1, 0) : y + 2, max(x - 1, 0) : x + 2].astype(int)
        assert around.min() - 12 <= middle.min() and middle.max() <= around.max() + 12
        for nobody in (None, 10**9):
            opened.select(point)
            opened.select(nobody)
            assert opened.selected is None and not opened._patches.visible


def test_nothing_is_shared_with_the_world(scene: Scene) -> None:
    """viser can hand a page on through a server of its own; a visitor may not ask for that."""
    with Viewer(open_shown(scene.root)) as opened:
        assert opened._server.request_share_url() is None
        assert opened._server._share_tunnel is None


# ---- the command


def test_mistakes_are_told_in_a_line(scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "poses.txt").write_text("new.png 1 0 0\n")
    shutil.copytree(scene.root / "sparse", tmp_path / "cut")
    with (tmp_path / "cut" / "points3D.txt").open("a") as file:
        file.write("99999 1 2")
    root, no = scene.root, "--no-browser"
    for words, reason in (
        ([tmp_path / "none", no], "no such folder"),
        ([tmp_path / "empty", no], "no COLMAP model here"),
        ([tmp_path / "cut", no], "points3D.txt: damaged"),
        ([root, no, "--images", tmp_path / "none"], "no such folder"),
        ([root, no, "--poses", tmp_path / "poses.txt"], "line 1: expected name qw qx qy qz tx ty tz"),
        ([root, no, "--poses", tmp_path / "none.txt"], "none.txt"),
        ([root, no, "--port", "0"], "the port must be from 1 to 65535"),
        ([root, no, "--host", "300.1.1.1"], "cannot be listened at"),
    ):
        result = CliRunner().invoke(app, ["view", *map(str, words)])
        assert isinstance(result.exception, UserError) and reason in str(result.exception), words
        assert "\n" not in str(result.exception)
    monkeypatch.setitem(sys.modules, "viser", None)
    result = CliRunner().invoke(app, ["view", str(root), no])
    assert "prism-match[viewer]" in str(result.exception)


def test_the_command_serves_until_it_is_interrupted(scene: Scene) -> None:
    words = [sys.executable, "-m", "prism_match", "view", str(scene.root), "--no-browser"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A shell has those that it runs in the background ignore Ctrl+C, and so their children.
    heeding = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(words, **pipes, preexec_fn=heeding) as process:
        try:
            url = process.stdout.readline().split()[0]
            with urllib.request.urlopen(url, timeout=20) as page:
                assert b"<html" in page.read(2000)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 0 and err == "" and "viser" not in out


# ---- in a browser


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[object]:
    folder = tmp_path / "browser"
    folder.mkdir()
    flags = "--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--window-size=1000,640"
    driver = open_browser(folder, *flags)
    yield driver
    driver.quit()


def until(what: Callable[[], object], seconds: float = 40) -> object:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = what()
        if found:
            return found
        time.sleep(0.3)
    raise AssertionError("it did not happen in time")


def test_a_browser_shows_the_map(scene: Scene, browser, tmp_path: Path) -> None:
    write_poses(tmp_path / "poses.txt", {"new.png": scene.T[2]})
    with Viewer(open_shown(scene.root, poses=tmp_path / "poses.txt")) as opened:
        browser.get(opened.url)

        def text() -> str:
            return browser.execute_script("return document.body.innerText")

        def screen() -> np.ndarray:
            png = np.frombuffer(browser.get_screenshot_as_png(), np.uint8)
            return cv2.imdecode(png, cv2.IMREAD_COLOR)[..., ::-1]

        until(lambda: "6 cameras, 600 points, 1 queries (green)" in text())
        until(lambda: counted(screen()[:, :650], RED) > 200 and counted(screen()[:, :650], GREEN) > 40)
        for colour in ((250, 20, 20), (20, 250, 20), (20, 20, 250)):
            assert counted(screen()[:, :650], colour) > 20, "the points have their colours"

        # A click on a point, wherever it is seen now, selects it.
        client = until(lambda: next(iter(opened._server.get_clients().values()), None))
        camera = client.camera
        point, xy = clear_point(opened, camera, screen().shape)
        from selenium.webdriver.common.actions.action_builder import ActionBuilder

        mouse = ActionBuilder(browser)
        mouse.pointer_action.move_to_location(*xy).click()
        mouse.perform()
        until(lambda: opened.selected == point)
        names = [opened.shown.model.views[n].name for n in opened.shown.model.seen_by(point)]
        until(lambda: f"point {point} at" in text() and all(name in text() for name in names))

        opened.stand(client, "view0.png")
        centre = opened.place(opened.views[0].centre)
        until(lambda: np.linalg.norm(camera.position - centre) < 1e-3)

        sent = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
        urls = [m["params"]["request"]["url"] for m in sent if m["method"] == "Network.requestWillBeSent"]
        mine = ("data:", "blob:", "chrome:", opened.url)
        assert opened.url + "/" in urls
        assert not [url for url in urls if not url.startswith(mine)], "nothing comes from elsewhere"


def clear_point(opened, camera, shape: tuple[int, ...]) -> tuple[int, tuple[int, int]]:
    """A point that nothing else is near to on the screen, in the left part, and its pixel there."""
    forward = camera.look_at - camera.position
    forward = forward / np.linalg.norm(forward)
    right = np.cross(forward, camera.up_direction)
    right /= np.linalg.norm(right)
    axes = np.stack([right, np.cross(forward, right), forward])
    q = (opened._xyz - camera.position) @ axes.T
    height, width = shape[:2]
    xy = q[:, :2] / q[:, 2:] * (height / 2 / np.tan(camera.fov / 2)) + np.array([width, height]) / 2
    inside = np.flatnonzero(np.all((xy > 60) & (xy < [560, height - 60]), axis=1) & (q[:, 2] > 0))
    gaps = np.linalg.norm(xy[inside][:, None] - xy[None], axis=2)
    best = inside[np.sort(gaps, axis=1)[:, 1].argmax()]
    x, y = np.rint(xy[best]).astype(int).tolist()
    return int(opened.points[best]), (x, y)
