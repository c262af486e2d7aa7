"""Videos of a scene that is known: their frames, the ones worth keeping, and a map from them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from synthetic_matcher import SyntheticMatcher
from synthetic_scene import HEIGHT, WIDTH, Scene, camera, cast, texture
from typer.testing import CliRunner

from prism_match import Matcher, UserError
from prism_match.cli import app
from prism_match.config import PRESETS
from prism_match.engine import MatchStore
from prism_match.images import load_image
from prism_match.maps import video
from prism_match.maps.video import (
    Frame,
    KeyFrameOptions,
    key_frames,
    parallax_of,
    read_frames,
    write_key_frames,
)

av = pytest.importorskip("av")
FRAMES = 40


def write_video(path: Path, frames: list[np.ndarray]) -> None:
    """frames: h w, uint8."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.width, stream.height, stream.pix_fmt = frames[0].shape[1], frames[0].shape[0], "yuv420p"
        stream.bit_rate = 4_000_000
        for pixels in frames:
            frame = av.VideoFrame.from_ndarray(np.repeat(pixels[..., None], 3, axis=2), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def is_blurred(number: int) -> bool:
    return number % 3 == 1


@pytest.fixture(scope="module")
def filmed(tmp_path_factory) -> tuple[Scene, Path, list[np.ndarray]]:
    """A camera that goes past a wall with a block before it; every third frame is blurred."""
    root = tmp_path_factory.mktemp("video")
    walls = np.stack([texture(1), texture(2)]).astype(np.float32)
    poses, depths, frames = [], [], []
    for n, x in enumerate(np.linspace(-0.9, 0.9, FRAMES)):
        T = camera(x, 0.2 * np.sin(3 * x), 0.3 * np.cos(2 * x), -0.2 * x)
        colour, depth = cast(T, walls)
        pixels = (colour * 255).astype(np.uint8)
        frames.append(cv2.GaussianBlur(pixels, (0, 0), 2) if is_blurred(n) else pixels)
        poses.append(T)
        depths.append(depth)
    write_video(root / "walk.mp4", frames)
    names = [f"frame{n:06d}.jpg" for n in range(FRAMES)]
    return Scene(root, names, np.stack(poses), np.stack(depths)), root / "walk.mp4", frames


def test_frames_come_as_they_were_written(filmed):
    _, path, frames = filmed
    read = list(read_frames(path))
    assert [f.number for f in read] == list(range(FRAMES))
    assert read[25].seconds == pytest.approx(1.0)
    for frame, pixels in zip(read, frames, strict=True):
        assert frame.pixels.shape == (HEIGHT, WIDTH, 3) and frame.pixels.dtype == np.uint8
        assert np.abs(frame.pixels[..., 0].astype(float) - pixels).mean() < 4


def test_key_frames_are_sharp_and_apart(filmed):
    scene, path, _ = filmed
    numbers = [f.number for f in key_frames(read_frames(path))]
    assert numbers[0] == 0 and 4 <= len(numbers) <= 14
    assert not any(is_blurred(n) for n in numbers[1:])
    places = -np.einsum("nji,nj->ni", scene.T[:, :3, :3], scene.T[:, :3, 3])[numbers]
    steps = np.linalg.norm(np.diff(places, axis=0), axis=1)
    assert steps.min() > 0.1 and steps.max() < 0.45  # of a scene 4 deep
    more = [f.number for f in key_frames(read_frames(path), KeyFrameOptions(parallax=0.005))]
    assert len(more) > len(numbers)


def as_frames(pictures) -> list[Frame]:
    return [Frame(n, None, np.repeat(p[..., None], 3, axis=2)) for n, p in enumerate(pictures)]


def test_a_camera_that_stands_still_has_one_key_frame(filmed, tmp_path):
    _, _, frames = filmed
    assert len(list(key_frames(as_frames([frames[0]] * 10)))) == 1
    still = tmp_path / "still.mp4"
    write_video(still, [frames[0]] * 10)
    with pytest.raises(UserError, match=r"still\.mp4: the camera hardly moves in it"):
        write_key_frames(still, tmp_path / "out")


def test_a_cut_and_blank_frames_are_no_obstacle(filmed):
    _, _, frames = filmed
    blank = np.full_like(frames[0], 90)
    other = np.rot90(frames[30], 2)
    shown = [frames[0]] * 4 + [np.ascontiguousarray(other)] * 4 + [blank] * 3 + [frames[20]] * 3
    assert [f.number for f in key_frames(as_frames(shown))] == [0, 4, 11]


def test_turning_is_no_parallax():
    """A camera that only turns moves points as far as one that moves, but what is left of it is little."""
    g = np.random.default_rng(0)
    shape, focal = (270, 480), 1.2 * 480
    points = g.uniform(0, [479, 269], (200, 2))
    rays = np.c_[(points - [239.5, 134.5]) / focal, np.ones(200)]
    turned = rays @ cv2.Rodrigues(np.array([0.02, 0.1, 0.01]))[0].T
    moved = rays * g.uniform(2, 6, (200, 1)) + [0.3, 0, 0]
    pixels = [p[:, :2] / p[:, 2:] * focal + [239.5, 134.5] for p in (turned, moved)]
    motion = [np.median(np.linalg.norm(p - points, axis=1)) for p in pixels]
    assert min(motion) > 30
    assert parallax_of(points, pixels[0], shape) < 0.01 and parallax_of(points, pixels[1], shape) > 5


def make_map(filmed, out: Path, monkeypatch, *options: str) -> dict:
    """What `prism sfm` tells of a map from the video."""
    scene, path, _ = filmed
    command = sys.modules["prism_match.cli.sfm"]  # whose name in the package is that of its function
    monkeypatch.setattr(command, "make_matcher", lambda *_, **__: SyntheticMatcher(scene))
    numbers = out.with_suffix(".json")
    words = ["sfm", str(path), "-o", str(out), "--json", str(numbers), "--no-polish", *options]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    return json.loads(numbers.read_text())


def test_the_key_frames_of_a_video_are_matched_as_photos(filmed, tmp_path, monkeypatch):
    numbers = make_map(filmed, tmp_path / "out", monkeypatch, "--matches-only", "--pairs", "sequential")
    photos = sorted(p.name for p in (tmp_path / "out" / "frames").iterdir())
    assert 4 <= len(photos) <= 11 and numbers["pairs"] == len(photos) * (len(photos) - 1) // 2
    assert set(MatchStore(tmp_path / "out" / "matches.h5").images) == set(photos)
    assert load_image(tmp_path / "out" / "frames" / photos[0]).size == (WIDTH, HEIGHT)


@pytest.mark.slow
def test_a_map_from_a_video(filmed, tmp_path, monkeypatch):
    pytest.importorskip("pycolmap")
    numbers = make_map(filmed, tmp_path / "out", monkeypatch, "--intrinsics", "150,150,79.5,59.5")
    assert numbers["registered"] == numbers["images"] >= 4
    assert (tmp_path / "out" / "sparse" / "0" / "cameras.bin").is_file()


def test_key_frames_are_used_again_as_long_as_they_are_those(filmed, tmp_path, monkeypatch):
    _, path, frames = filmed
    folder = write_key_frames(path, tmp_path)
    first = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    with monkeypatch.context() as patched:
        patched.setattr(video, "read_frames", lambda _: 1 / 0)
        write_key_frames(path, tmp_path)  # nothing is read
    (folder / max(first)).unlink()
    write_key_frames(path, tmp_path)
    assert {p.name for p in folder.iterdir()} == set(first)
    write_video(tmp_path / "other.mp4", frames[:20])
    write_key_frames(tmp_path / "other.mp4", tmp_path)
    assert max(p.name for p in folder.iterdir()) < "frame000020.jpg" < max(first)

    def killed(*_):
        yield next(read_frames(path))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(video, "key_frames", killed)
        with pytest.raises(KeyboardInterrupt):
            write_key_frames(path, tmp_path)
    write_key_frames(path, tmp_path)  # begins anew
    assert {p.name for p in folder.iterdir()} == set(first)


def test_frames_of_others_are_not_replaced(filmed, tmp_path):
    """As FFmpeg names them where the user says so."""
    _, path, _ = filmed
    (tmp_path / "frames").mkdir()
    (tmp_path / "frames" / "frame0001.jpg").write_text("precious")
    with pytest.raises(UserError, match="has files in it that are not of this command"):
        write_key_frames(path, tmp_path)
    assert (tmp_path / "frames" / "frame0001.jpg").read_text() == "precious"


def test_what_is_no_video_is_told_in_one_line(filmed, tmp_path, monkeypatch):
    _, path, _ = filmed
    text, half, sound = tmp_path / "text.mp4", tmp_path / "half.mp4", tmp_path / "sound.wav"
    text.write_text("no video")
    half.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with av.open(str(sound), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    for file, reason in (
        (text, r"text\.mp4: not a video, or of an unknown format"), (half, r"half\.mp4: "),
        (sound, r"sound\.wav: there is no video in it"), (tmp_path / "none.mp4", r"none\.mp4: no such file"),
        (tmp_path, "is a folder"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=reason) as told:
            list(read_frames(file))
        assert "\n" not in str(told.value)
    with pytest.raises(UserError, match="no such folder of images"):
        CliRunner().invoke(
            app, ["sfm", str(tmp_path / "none.mp4"), "-o", str(tmp_path / "out")], catch_exceptions=False
        )
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UserError, match=r'videos need PyAV: pip install "prism-match\[video\]"'):
        list(read_frames(path))


def test_a_matcher_tracks_through_a_video(tmp_path, filmed):
    _, _, frames = filmed
    write_video(tmp_path / "short.mp4", frames[:4])
    matcher = Matcher(config=PRESETS["tiny"], device="cpu", rescale="never", size=96, threshold=0.0)
    tracks = matcher.track(tmp_path / "short.mp4")
    assert tracks.sizes == [(WIDTH, HEIGHT)] * 4
