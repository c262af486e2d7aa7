"""Videos: their frames, and the few of them that are worth a place in a map.

Key frames are chosen by how far things have moved since the last one: enough parallax to tell their depth, or
so much motion that the next frames would no longer share enough with it. Of the frames that are about there,
the sharpest one is taken. Points are followed from frame to frame by Lucas and Kanade's method on small
images, which takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
from tqdm import tqdm

from prism_match.errors import UserError
from prism_match.files import file_digest, short_hash, writable_folder
from prism_match.images import read_image, write_picture
from prism_match.maps.stages import STAGES, Stages
from prism_match.viz import shrink

FOLDER = "frames"  # of the output folder, for the key frames
SMALL = 480  # longer side of the images that motion and sharpness are measured on
POINTS = 400  # that are followed
FEWEST = 20  # points: fewer tell nothing
FOCAL = 1.2  # times the longer side: about right for most cameras, to tell turning from moving
BACK = 1.0  # pixels by which a point may miss its start when it is followed back
WINDOW = (21, 21)
QUALITY = 95  # of the JPEGs


class Frame(NamedTuple):
    number: int
    seconds: float | None
    pixels: np.ndarray  # h w 3, uint8, RGB, upright


@dataclass(frozen=True)
class KeyFrameOptions:
    """Shares of the longer side of a frame, in the median of the points that are followed."""

    parallax: float = 0.01  # what is left of their motion when the camera's turning is taken away
    motion: float = 0.12
    lost: float = 0.5  # share of the points that are no longer seen
    near: float = 0.6  # of these: from there on a frame may be taken

    def __post_init__(self) -> None:
        if not min(self.parallax, self.motion, self.lost) > 0:
            raise UserError("parallax, motion and lost points between key frames must be more than 0")
        if not 0 < self.near <= 1:
            raise UserError(f"`near` must be above 0 and at most 1, not {self.near}")


def import_av() -> Any:
    try:
        import av
    except ImportError as error:
        raise UserError('videos need PyAV: pip install "prism-match[video]"') from error
    return av


def read_frames(path: Path) -> Iterator[Frame]:
    """The frames of a video, in the order they are shown, turned upright."""
    if not path.is_file():
        read_image(path)  # knows what is wrong with it
    av = import_av()
    number = 0
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise UserError(f"{path}: there is no video in it")
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            for number, frame in enumerate(container.decode(stream)):
                pixels = frame.to_ndarray(format="rgb24")
                turns = round((getattr(frame, "rotation", 0) or 0) / 90) % 4
                yield Frame(number, frame.time, np.ascontiguousarray(np.rot90(pixels, turns)))
    except av.FFmpegError as error:
        where = f"damaged after frame {number}" if number else "not a video, or of an unknown format"
        raise UserError(f"{path}: {where} ({error.strerror or error})") from error
    except (ValueError, MemoryError) as error:
        raise UserError(f"{path}: cannot be decoded ({error})") from error


@dataclass
class Candidate:
    frame: Frame
    gray: np.ndarray
    sharpness: float


def key_frames(frames: Iterable[Frame], options: KeyFrameOptions | None = None) -> Iterator[Frame]:
    """Those that are worth matching: the first, and then each time the camera has moved enough."""
    options = options or KeyFrameOptions()
    flow: Flow | None = None
    best: Candidate | None = None
    for frame in frames:
        gray = cv2.cvtColor(shrink(frame.pixels, SMALL)[0], cv2.COLOR_RGB2GRAY)
        now = Candidate(frame, gray, sharpness(gray))
        if flow is None or gray.shape != flow.gray.shape:
            if flow is not None and best is not None:
                yield best.frame
            flow, best = Flow(gray), None
            yield frame
            continue
        if not flow.follow(gray):  # a cut, or nothing to hold on to
            if best is not None:
                yield best.frame
            flow, best = Flow(gray), None
            if flow.sound:
                yield frame
            continue
        progress = flow.progress(options)
        if progress >= options.near and (best is None or now.sharpness > best.sharpness):
            best = now
        if progress >= 1 and best is not None:
            yield best.frame
            flow = Flow(best.gray)
            if best is not now and not flow.follow(gray):
                flow = Flow(gray)
            best = None
    if best is not None:
        yield best.frame


def sharpness(gray: np.ndarray) -> float:
    """The more, the less a frame is blurred: how much neighbouring pixels differ, against all of them."""
    return float(cv2.Laplacian(gray, cv2.CV_32F).var() / max(float(gray.var()), 1.0))


class Flow:
    """Points of a key frame, followed through the frames after it."""

    def __init__(self, gray: np.ndarray):
        self.gray = gray
        found = cv2.goodFeaturesToTrack(gray, POINTS, 0.01, max(gray.shape) / 60)
        self.start = np.zeros((0, 2), np.float32) if found is None else found.reshape(-1, 2)
        self.now, self.count = self.start, len(self.start)

    @property
    def sound(self) -> bool:
        return len(self.now) >= FEWEST

    def follow(self, gray: np.ndarray) -> bool:
        """Into the next frame. False: most points are lost at once, or too few are left to tell anything."""
        if not self.sound:
            return False
        there, seen, _ = cv2.calcOpticalFlowPyrLK(
            self.gray, gray, self.now, self.now.copy(), winSize=WINDOW, maxLevel=4
        )
        back, again, _ = cv2.calcOpticalFlowPyrLK(
            gray, self.gray, there, there.copy(), winSize=WINDOW, maxLevel=4
        )
        good = (seen.ravel() > 0) & (again.ravel() > 0)
        good &= np.linalg.norm(back - self.now, axis=1) < BACK
        good &= np.all((there >= 0) & (there < gray.shape[::-1]), axis=1)
        at_once = good.mean() >= 0.3
        self.start, self.now, self.gray = self.start[good], there[good], gray
        return bool(at_once) and self.sound

    def progress(self, options: KeyFrameOptions) -> float:
        """1: time for a key frame."""
        longer = max(self.gray.shape)
        motion = float(np.median(np.linalg.norm(self.now - self.start, axis=1))) / longer
        lost = 1 - len(self.now) / self.count
        parallax = parallax_of(self.start, self.now, self.gray.shape) / longer
        return max(parallax / options.parallax, motion / options.motion, lost / options.lost)


def parallax_of(points0: np.ndarray, points1: np.ndarray, shape: tuple[int, ...]) -> float:
    """Pixels, in the median, that are left of the motion of points (n 2 each) when a turning camera, the one
    that explains most of it, is taken away."""
    middle, focal = np.array([shape[1] - 1, shape[0] - 1]) / 2, FOCAL * max(shape)
    rays0, rays1 = (
        np.concatenate([(p - middle) / focal, np.ones((len(p), 1))], axis=1) for p in (points0, points1)
    )
    rays0, rays1 = (r / np.linalg.norm(r, axis=1, keepdims=True) for r in (rays0, rays1))
    weight, rest = np.ones(len(rays0)), np.zeros(len(rays0))
    for _ in range(3):
        u, _, vt = np.linalg.svd((rays1 * weight[:, None]).T @ rays0)
        rotation = u @ np.diag([1, 1, np.linalg.det(u @ vt)]) @ vt
        turned = rays0 @ rotation.T
        rest = np.linalg.norm(turned[:, :2] / turned[:, 2:] * focal + middle - points1, axis=1)
        weight = 1 / (1 + (rest / max(float(np.median(rest)), 1e-3)) ** 2)
    return float(np.median(rest))


def write_key_frames(
    video: Path, out: Path, options: KeyFrameOptions | None = None, progress: bool = False
) -> Path:
    """The folder in `out` with the key frames of a video as photos; those of an earlier run are used
    again."""
    options = options or KeyFrameOptions()
    folder = writable_folder(out / FOLDER)
    import_av()

    def work() -> list[str]:
        for old in folder.glob("frame*.jpg"):
            old.unlink()
        bar = tqdm(read_frames(video), "key frames", unit="frame", disable=None if progress else True)
        names = []
        for frame in key_frames(bar, options):
            names.append(f"frame{frame.number:06d}.jpg")
            write_picture(folder / names[-1], frame.pixels, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])
        if len(names) < 2:
            raise UserError(f"{video}: the camera hardly moves in it; at least two key frames are needed")
        return names

    key = short_hash([file_digest(video), asdict(options), QUALITY])
    stages = Stages(out / STAGES)
    if not stages.done.keys() & {"video", "frames"} and any(folder.iterdir()):
        raise UserError(f"{folder}: has files in it that are not of this command; give another folder")
    stages.run("video", "", out, lambda: True)  # what is there from now on may be replaced
    if not all((folder / name).is_file() for name in stages.done.get("frames", {}).get("result", [])):
        del stages.done["frames"]
    stages.run("frames", key, folder, work)
    return folder
