"""Photos on their way to be matched: known by their content, decoded ahead, resized as a benchmark asks."""

from __future__ import annotations

import hashlib
import os
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from prism_match.errors import UserError
from prism_match.files import file_digest
from prism_match.geometry import resize_matrix
from prism_match.images import Image, ImageLike, load_image

IMAGE_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
THREADS = min(8, os.cpu_count() or 1)  # that decode; Pillow and OpenCV let go of Python's lock

Stamp = tuple[int, int, int, int]
Item = TypeVar("Item")
Done = TypeVar("Done")


@dataclass(frozen=True)
class Photo:
    """A photo as it was when it was asked for. Neither a path nor an object tells what it is: files are
    overwritten, and buffers are used again."""

    digest: str  # of the content
    source: Path | Image
    stamp: Stamp | None = None  # of the file

    @staticmethod
    def of(source: ImageLike) -> Photo:
        if isinstance(source, (str, os.PathLike)):
            path = Path(source)
            stamp = file_stamp(path)
            return Photo(file_digest(path), path, stamp)
        image = load_image(source)
        digest = hashlib.blake2b(f"{image.pixels.shape} {image.pixels.dtype}".encode(), digest_size=16)
        for part in (image.pixels, image.opaque):
            digest.update(b"" if part is None else np.ascontiguousarray(part).data)
        return Photo(digest.hexdigest(), image)

    @property
    def name(self) -> str:
        return self.source.name if isinstance(self.source, Image) else str(self.source)

    def snapshot(self) -> Photo:
        """That stays as it is, whatever happens to the memory it came from."""
        if isinstance(self.source, Path):
            return self
        opaque = None if self.source.opaque is None else self.source.opaque.copy()
        return Photo(self.digest, Image(self.source.pixels.copy(), self.source.name, opaque))

    def load(self) -> Image:
        """Raises UserError where it cannot be read, or is no longer what it was."""
        image = load_image(self.source)
        if isinstance(self.source, Path) and file_stamp(self.source) != self.stamp:
            raise UserError(f"{self.source}: was overwritten before it was read")
        return image


def file_stamp(path: Path) -> Stamp:
    """Another one once the file has been written to."""
    try:
        status = path.stat()
        if stat.S_ISREG(status.st_mode) and status.st_size:
            return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    except OSError:
        pass
    load_image(path)  # knows what is wrong with it
    raise UserError(f"{path}: cannot be read")


@lru_cache(maxsize=2**16)
def known_digest(path: Path, stamp: Stamp) -> str:
    return file_digest(path)


def content_of(path: Path) -> str:
    """The digest of a file, which is read once as long as nobody writes to it."""
    return known_digest(path, file_stamp(path))


def identify(files: Mapping[str, str | Path]) -> tuple[dict[str, Photo], dict[str, str]]:
    """Photos by name, and what is wrong with those that are not there."""
    photos, broken = {}, {}

    def look(name: str) -> Photo:
        path = Path(files[name])
        stamp = file_stamp(path)
        return Photo(known_digest(path, stamp), path, stamp)

    for name, found in in_threads(files, look):
        if isinstance(found, UserError):
            broken[name] = str(found)
        else:
            photos[name] = found
    return photos, broken


def in_threads(
    items: Iterable[Item], work: Callable[[Item], Done], ahead: int = 2 * THREADS
) -> Iterator[tuple[Item, Done | UserError]]:
    """Each item with what becomes of it, in order; at most `ahead` of them are begun before they are asked
    for."""
    stream = iter(items)
    with ThreadPoolExecutor(THREADS) as pool:
        waiting: deque[tuple[Item, Future[Done]]] = deque()

        def begin(count: int) -> None:
            waiting.extend((item, pool.submit(work, item)) for item in islice(stream, count))

        begin(ahead)
        try:
            while waiting:
                item, future = waiting.popleft()
                try:
                    result: Done | UserError = future.result()
                except UserError as error:
                    result = error
                begin(1)
                yield item, result
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True)
class Resize:
    """How images are resized before they are matched; exactly one of the three is given."""

    longer: int | None = None
    shorter: int | None = None
    exact: tuple[int, int] | None = None  # width, height
    enlarge: bool = True  # small images too, as the published protocols do it
    own_size: bool = False  # whether matches may be polished at the size that images have before

    @staticmethod
    def largest(longer: int) -> Resize:
        """As photos are matched where no benchmark has a say."""
        return Resize(longer=longer, enlarge=False, own_size=True)

    def __call__(self, size: tuple[int, int]) -> tuple[int, int]:
        """Width, height before -> after."""
        if self.exact is not None:
            return self.exact
        scale = self.longer / max(size) if self.longer else (self.shorter or 0) / min(size)
        scale = scale if self.enlarge else min(scale, 1.0)
        return round(size[0] * scale), round(size[1] * scale)

    @property
    def side(self) -> int:
        """The one number that tells it best."""
        return max(self.exact) if self.exact else self.longer or self.shorter or 0

    def __str__(self) -> str:
        if self.exact is not None:
            return f"{self.exact[0]}x{self.exact[1]} px"
        most = "" if self.enlarge else "at most "
        side = f"longer side {most}{self.longer}" if self.longer else f"shorter side {most}{self.shorter}"
        return f"{side} px, polished at own size" if self.own_size else f"{side} px"


def scale_points(points: np.ndarray, size: tuple[int, int], new_size: tuple[int, int]) -> np.ndarray:
    """n 2: pixels of an image of one size (width, height) to pixels of it resized to another."""
    scale = np.array(new_size, dtype=float) / np.array(size, dtype=float)
    return (points + 0.5) * scale - 0.5


def scaling(size: tuple[int, int], new_size: tuple[int, int]) -> np.ndarray:
    """3 3: what `scale_points` does, as a matrix; it also takes intrinsics along."""
    return resize_matrix(new_size[0] / size[0], new_size[1] / size[1])
