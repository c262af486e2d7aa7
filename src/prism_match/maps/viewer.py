"""A map in the browser: its points and cameras to walk around in, and the photos that see a point.

viser draws it, and brings all of its page along: nothing is loaded from elsewhere."""

from __future__ import annotations

import contextlib
import errno
import io
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from threading import Event, RLock
from typing import Any

import cv2
import numpy as np

from prism_match import viz
from prism_match.cameras import Camera
from prism_match.colmap_model import Model, PosedView, quaternion_of, read_model
from prism_match.config import parse_json
from prism_match.engine.photos import scale_points
from prism_match.errors import UserError
from prism_match.geometry import camera_centres
from prism_match.images import load_image
from prism_match.maps.landmarks import SfmMap, photo_folders
from prism_match.maps.localization import read_poses
from prism_match.maps.outside import BLUE, FIELD, GREEN, RED, extent, finite_points, look_out

DIAMETER = 10.0  # of the map as it is shown: the world may have any unit, and begin anywhere
THUMBNAIL = 200  # pixels of the longer side
PATCH, PATCHES = 72, 12  # pixels of a side; photos of a point that are shown
CLICKED, NEAR = np.deg2rad(0.35), np.deg2rad(1.2)  # from a click to a point


@dataclass(frozen=True)
class Shown:
    """What there is to look at."""

    model: Model
    photos: SfmMap | None  # None: they are nowhere to be found
    queries: dict[str, tuple[np.ndarray, Camera]] = field(default_factory=dict)  # 4 4, world to camera


def open_shown(path: Path, images: Path | None = None, poses: Path | None = None) -> Shown:
    """path: what `prism sfm` has written, or a COLMAP model. images: its photos, if they are elsewhere.
    poses: what `prism localize` has written."""
    if not path.exists():
        raise UserError(f"{path}: no such folder")
    model = read_model(path)
    if not any(np.isfinite(v.T).all() for v in model.views):
        raise UserError(f"{path}: no image of the model has a pose")
    origin, folders = photo_folders(model, path, images)
    folder = next((f for f in folders if f.is_dir()), None)
    if folder is None and images is not None:
        raise UserError(f"{images}: no such folder")
    photos = None if folder is None else SfmMap(model, folder, as_shown=origin.made_here)
    return Shown(model, photos, {} if poses is None else read_queries(poses, model.views[0].camera))


def read_queries(path: Path, otherwise: Camera) -> dict[str, tuple[np.ndarray, Camera]]:
    """Poses by name; with their cameras, where localization.json beside the file tells them."""
    cameras: dict[str, Camera] = {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        for result in parse_json(path.with_name("localization.json").read_text("utf-8"))["results"]:
            c = result["camera"]
            if c is not None:
                cameras[result["name"]] = Camera(c["model"], c["width"], c["height"], tuple(c["params"]))
    found = read_poses(path)
    if not found:
        raise UserError(f"{path}: no poses in it")
    return {name: (T, cameras.get(name, otherwise)) for name, T in found.items()}


def nearest_to_ray(points: np.ndarray, eye: np.ndarray, direction: np.ndarray) -> int | None:
    """Which of the points (n 3) a click means: the foremost of those under it, or one that is near."""
    offset = points - eye
    depth = offset @ direction
    angle = np.arctan2(np.linalg.norm(offset - depth[:, None] * direction, axis=1), depth)
    under = np.flatnonzero(angle < CLICKED)
    if len(under):
        return int(under[depth[under].argmin()])
    return int(angle.argmin()) if len(angle) and angle.min() < NEAR else None


class Viewer:
    """Serves the page until it is closed."""

    def __init__(self, shown: Shown, host: str = "127.0.0.1", port: int = 8080):
        self.shown = shown
        self.selected: int | None = None  # a row of the model's points
        self.points = np.flatnonzero(np.isfinite(shown.model.points).all(axis=1))
        xyz, self._colours = finite_points(shown.model)
        self.views = [v for v in shown.model.views if np.isfinite(v.T).all()]
        poses = np.array([v.T for v in self.views] + [T for T, _ in shown.queries.values()])
        low, high = extent(xyz, camera_centres(poses))
        self._origin = (low + high) / 2
        self._scale = DIAMETER / max(float(np.linalg.norm(high - low)), 1e-12)
        self._xyz = self.place(xyz)
        self._lookout = look_out(xyz, poses)
        self._frustum = 0.6 * self._lookout.frustum * self._scale  # in viser's measure
        self._photo = lru_cache(maxsize=PATCHES + 4)(self._load)
        self._busy = RLock()  # to select a point sets its number, which selects it
        self._closed = Event()
        self._server = start_server(host, port)
        name = f"[{host}]" if ":" in host else "localhost" if host == "0.0.0.0" else host
        self.url = f"http://{name}:{self._server.get_port()}"
        self._frustums: dict[str, Any] = {}
        self._build()
        self._pool = ThreadPoolExecutor(1)
        self._pool.submit(self._hang_photos)

    def __enter__(self) -> Viewer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._closed.set()
        self._pool.shutdown(cancel_futures=True)
        with contextlib.redirect_stdout(io.StringIO()):
            self._server.stop()

    def wait(self) -> None:
        """Until it is closed."""
        self._closed.wait()

    def place(self, xyz: np.ndarray) -> np.ndarray:
        """From the world of the map to that of the page."""
        return (xyz - self._origin) * self._scale

    # ---- what is in the scene

    def _build(self) -> None:
        server, scene, lookout = self._server, self._server.scene, self._lookout
        scene.set_up_direction(lookout.up)
        start = server.initial_camera
        # A step to the right: the panel covers what is there.
        right, reach = lookout.axes()[0], np.linalg.norm(lookout.target - lookout.eye)
        step = 0.25 * np.tan(FIELD / 2) * reach * right
        self._start = self.place(lookout.eye + step), self.place(lookout.target + step)
        start.position, start.look_at = self._start
        start.fov = FIELD
        self._cloud = scene.add_point_cloud(
            "/points", self._xyz.astype(np.float32), self._colours, point_size=0.02, precision="float32",
            point_shape="circle", point_shading="flat",
        )  # fmt: skip
        for n, view in enumerate(self.views):
            self._frustums[view.name] = self._add_camera(f"/cameras/{n}", view.T, view.camera, RED)
        self._asked = [
            self._add_camera(f"/queries/{n}", T, camera, GREEN)
            for n, (T, camera) in enumerate(self.shown.queries.values())
        ]
        for n, name in enumerate(self.shown.queries):
            scene.add_label(f"/queries/{n}/name", name, font_screen_scale=0.8)
        self._build_panel()

        @scene.on_click()
        def _(event: Any) -> None:
            at = nearest_to_ray(self._xyz, np.array(event.ray_origin), np.array(event.ray_direction))
            self.select(None if at is None else int(self.points[at]))

    def _add_camera(self, name: str, T: np.ndarray, camera: Camera, colour: tuple[int, int, int]) -> Any:
        return self._server.scene.add_camera_frustum(
            name,
            fov=float(2 * np.arctan(camera.height / 2 / camera.K[1, 1])),
            aspect=camera.width * camera.K[1, 1] / (camera.height * camera.K[0, 0]),
            scale=self._frustum,
            thickness=1.5,
            thickness_units="screen",
            color=colour,
            wxyz=quaternion_of(T[:3, :3].T),
            position=self.place(camera_centres(T)),
            cast_shadow=False,
            receive_shadow=False,
        )

    def _build_panel(self) -> None:
        gui = self._server.gui
        gui.add_markdown(summary(self.shown, len(self.views)))
        size = gui.add_slider("points", min=0.005, max=0.1, step=0.005, initial_value=0.02)
        cameras = gui.add_slider("cameras", min=0.0, max=3.0, step=0.1, initial_value=1.0)
        names = ["outside", *self._frustums, *self.shown.queries]
        stand = gui.add_dropdown("look from", list(dict.fromkeys(names)))
        with gui.add_folder("Point"):
            most = max(len(self.shown.model.points) - 1, 0)
            self._number = gui.add_number(
                "number", -1, min=-1, max=most, step=1, hint="Click on a point, or write its number; -1: none"
            )
            self._story = gui.add_markdown("Click on a point: who sees it?")
            self._patches = gui.add_image(np.full((1, 1, 3), 255, np.uint8), visible=False)

        @size.on_update
        def _(_: Any) -> None:
            self._cloud.point_size = size.value

        @cameras.on_update
        def _(_: Any) -> None:
            for handle in (*self._frustums.values(), *self._asked):
                handle.scale, handle.visible = max(self._frustum * cameras.value, 1e-6), cameras.value > 0

        @self._number.on_update
        def _(_: Any) -> None:
            self.select(self._number.value if self._number.value >= 0 else None)

        @stand.on_update
        def _(event: Any) -> None:
            self.stand(event.client, stand.value)

    def stand(self, client: Any, name: str) -> None:
        """Moves a visitor to where a photo was taken, or outside again."""
        poses = {v.name: v.T for v in self.views} | {n: T for n, (T, _) in self.shown.queries.items()}
        with client.atomic():
            if name in poses:
                eye, R = self.place(camera_centres(poses[name])), poses[name][:3, :3]
                client.camera.position, client.camera.look_at = eye, eye + R[2]
                client.camera.up_direction = -R[1]
            else:
                client.camera.up_direction = self._lookout.up
                client.camera.position, client.camera.look_at = self._start

    # ---- a point, and the photos that see it

    def select(self, point: int | None) -> None:
        """Draws lines from a point, a row of the model's, to the cameras that see it, and shows their photos
        around it. None, or one that is not there: nothing is selected."""
        with self._busy:
            if point is not None and point not in self.points:
                point = None
            if point == self.selected:
                return
            self.selected = point
            self._number.value = -1 if point is None else point
            for name in ("/track", "/selected"):
                self._server.scene.remove_by_name(name)
            if point is None:
                self._story.content, self._patches.visible = "Click on a point: who sees it?", False
                return
            sightings = list(self.sightings(point))
            at = self.place(self.shown.model.points[point])
            if sightings:
                ends = [[at, self.place(view.centre)] for view, _ in sightings]
                self._server.scene.add_line_segments(
                    "/track", np.array(ends, np.float32), BLUE, thickness=1.5, thickness_units="screen"
                )
            self._server.scene.add_icosphere("/selected", radius=0.03, color=BLUE, position=at)
            self._story.content = story(point, self.shown.model.points[point], sightings)
            picture = self.patches(sightings)
            self._patches.visible = picture is not None
            if picture is not None:
                self._patches.image = picture

    def sightings(self, point: int) -> Iterator[tuple[PosedView, np.ndarray]]:
        """The views that see a point, and the pixel."""
        for n in self.shown.model.seen_by(point):
            view = self.shown.model.views[n]
            if np.isfinite(view.T).all():
                yield view, view.pixels[np.flatnonzero(view.points == point)[0]]

    def patches(self, sightings: list[tuple[PosedView, np.ndarray]]) -> np.ndarray | None:
        """h w 3, uint8: what the photos show around a point, in the order of the list, two in a row; None: no
        photo is there."""
        tiles = []
        for view, pixel in sightings[:PATCHES]:
            photo = self._photo(view.name)
            if photo is None:
                continue
            size = photo.shape[1], photo.shape[0]
            x, y = scale_points(pixel[None].astype(float), (view.width, view.height), size)[0]
            patch = cv2.getRectSubPix(photo, (PATCH, PATCH), (float(x), float(y)))
            patch = cv2.resize(patch, None, fx=2, fy=2, interpolation=cv2.INTER_CUBIC)
            cv2.circle(patch, (PATCH, PATCH), 7, RED, 1, cv2.LINE_AA)
            tiles.append(patch)
        if not tiles:
            return None
        tiles += [np.full_like(tiles[0], 255)] * (-len(tiles) % 2)
        rows = [np.hstack(tiles[n : n + 2]) for n in range(0, len(tiles), 2)]
        return np.vstack(rows)

    # ---- photos

    def _load(self, name: str) -> np.ndarray | None:
        """h w 3, uint8: with the pixels that the model means; None: it cannot be read."""
        if self.shown.photos is None:
            return None
        try:
            rgb = load_image(self.shown.photos.path(name)).rgb
        except UserError:
            return None
        return as_stored(rgb, self.shown.photos.orientation(name))

    def _hang_photos(self) -> None:
        """Into the frustums, while the page is open already."""
        missing = []
        for view in self.views:
            if self._closed.is_set() or self.shown.photos is None:
                return
            photo = self._load(view.name)
            if photo is None:
                missing.append(view.name)
            else:
                self._frustums[view.name].image = viz.shrink(photo, THUMBNAIL)[0]
        if missing:
            print(f"prism: {len(missing)} photos cannot be read, the first: {missing[0]}", file=sys.stderr)


def as_stored(shown: np.ndarray, orientation: int) -> np.ndarray:
    """Pixels h w 3 as EXIF has them shown -> as they are in the file; what `to_stored` is for points."""
    stored = shown.transpose(1, 0, 2) if orientation >= 5 else shown
    stored = stored[:, ::-1] if orientation in (2, 3, 7, 8) else stored
    stored = stored[::-1] if orientation in (3, 4, 6, 7) else stored
    return np.ascontiguousarray(stored)


def quoted(name: str) -> str:
    """A name in Markdown, whatever is in it."""
    return "`" + " ".join(name.replace("`", "'").split()) + "`"


def summary(shown: Shown, cameras: int) -> str:
    parts = [f"{cameras} cameras", f"{len(shown.model.points):,} points"]
    parts += [f"{len(shown.queries)} queries (green)"] if shown.queries else []
    text = f"{quoted(str(shown.model.path))}\n\n**{', '.join(parts)}**"
    return text if shown.photos is not None else text + "\n\nThe photos are not there: see `--images`."


def story(point: int, xyz: np.ndarray, sightings: list[tuple[PosedView, np.ndarray]]) -> str:
    lines = [f"**point {point}** at {', '.join(f'{v:.4g}' for v in xyz)}, in {len(sightings)} photos:", ""]
    for view, pixel in sightings[:50]:
        lines.append(f"- {quoted(view.name)} {pixel[0]:.1f}, {pixel[1]:.1f}")
    lines += [f"- ... and {len(sightings) - 50} more"] if len(sightings) > 50 else []
    return "\n".join(lines)


def start_server(host: str, port: int) -> Any:
    """viser's, which takes the next free port where this one is in use."""
    try:
        import viser
    except ImportError as error:
        raise UserError('the viewer needs viser: pip install "prism-match[viewer]"') from error
    if not 1 <= port <= 65535:
        raise UserError(f"the port must be from 1 to 65535, not {port}")
    port = free_port(host, port)
    with contextlib.redirect_stdout(io.StringIO()):  # its banner; we tell the address ourselves
        server = viser.ViserServer(host, port, verbose=False, label="prism view")
    server.gui.configure_theme(show_logo=False, show_share_button=False)
    server.request_share_url = _refuse  # type: ignore[method-assign]
    return server


def free_port(host: str, port: int) -> int:
    """The first from `port` on that can be listened at. viser looks for one, too, but waits for ever where no
    port will do."""
    for candidate in range(port, min(port + 100, 65536)):
        try:
            with socket.create_server((host, candidate), family=family_of(host)):
                return candidate
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                reason = str(error.strerror or error).split(" (while")[0]
                raise UserError(f"{host}:{candidate}: cannot be listened at ({reason})") from error
    raise UserError(f"{host}:{port}: in use, and so are those that follow")


def family_of(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _refuse(*_: object, **__: object) -> None:
    """A page could ask viser to show the map to the world through somebody's server: not from here."""
