"""Long runs, and the memory that they hold: it must not grow.

python benchmarks/endurance.py              5,000 pairs, 2,000 photos, 160 pairs of many sizes
python benchmarks/endurance.py --pairs 500 --photos 200

Through one `Matcher`: pairs of photos of many sizes, from files and from memory, some of them damaged, each
photo in a few pairs. Through `prism sfm --matches-only`: a folder of photos, each matched with the next. Both
by a tiny untrained model at a small size, so that it takes minutes on a core: what is kept and forgotten, by
the engine, the cache, the decoders and the store, does not depend on the model. What the libraries below keep
does, and on how many sizes of photos they see: pairs of the bundled photos, cut to a size of their own each,
by the shipped model on a CPU. Memory is looked at twenty times; the first two tenths are for warming up. Exit
code 1: it grew by more than --mib afterwards; with many sizes, for which those libraries fill their caches,
by more than twice as much.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import torch

from prism_match import Matcher, UserError, cli, memory
from prism_match.config import PRESETS
from prism_match.evaluation.bundled import BUNDLED
from prism_match.images import load_image

SIZES = ((64, 48), (48, 64), (80, 64), (64, 64), (96, 64))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5000)
    parser.add_argument("--photos", type=int, default=2000)
    parser.add_argument("--varied", type=int, default=160, help="pairs of many sizes")
    parser.add_argument("--mib", type=float, default=32.0, help="growth that is too much")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    matcher = Matcher(config=PRESETS["tiny"], size=64, device="cpu", rotate="never", threshold=0.0)
    grown = []
    with tempfile.TemporaryDirectory(prefix="prism-endurance-") as name:
        folder = Path(name)
        watch = Watch(f"{args.pairs} pairs through one Matcher", args.pairs)
        for n in many_pairs(matcher, folder / "a", args.pairs):
            watch.look(n)
        grown.append(watch.tell())
        write_photos(folder / "b", args.photos)
        watch = Watch(f"{args.photos} photos through sfm --matches-only", args.photos - 1)
        folder_of_photos(folder / "b", folder / "out", watch)
        grown.append(watch.tell())
    watch = Watch(f"{args.varied} pairs of many sizes", args.varied)
    for n in many_sizes(args.varied):
        watch.look(n)
    grown.append(watch.tell() / 2)  # see above
    sys.exit(1 if max(grown) > args.mib else 0)


class Watch:
    def __init__(self, what: str, total: int):
        self.what, self.total, self.began = what, total, time.monotonic()
        self.held: list[float] = []

    def look(self, done: int) -> None:
        if done % max(1, self.total // 20) == 0:
            gc.collect()
            time.sleep(memory.PAUSE)
            memory.give_back_holes()  # as the next match would
            self.held.append(memory_mib())

    def tell(self) -> float:
        """MiB by which memory grew after the first fifth, by the medians of what was seen early and late."""
        seconds = time.monotonic() - self.began
        settled = self.held[len(self.held) // 5 :]
        third = max(1, len(settled) // 3)
        grown = float(np.median(settled[-third:]) - np.median(settled[:third]))
        print(f"{self.what}: {seconds:.0f} s, {self.total / seconds:.1f} pairs/s", flush=True)
        some = self.held[:: max(1, len(self.held) // 20)]
        print("  MiB held: " + " ".join(f"{m:.0f}" for m in some))
        print(f"  grown after warming up: {grown:+.1f} MiB", flush=True)
        return grown


def memory_mib() -> float:
    """Of this process, that is in RAM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("only where there is a /proc")


def write_photos(folder: Path, count: int) -> list[Path]:
    folder.mkdir()
    paths = []
    for n in range(count):
        coarse = np.random.default_rng(n).integers(0, 255, (12, 16, 3), dtype=np.uint8)
        paths.append(folder / f"{n:05d}.png")
        cv2.imwrite(str(paths[-1]), cv2.resize(coarse, SIZES[n % len(SIZES)], interpolation=cv2.INTER_CUBIC))
    return paths


def many_pairs(matcher: Matcher, folder: Path, count: int) -> Iterator[int]:
    """In turn: lists of files by `match_many`, arrays by `match`, and a file that cannot be read."""
    photos = write_photos(folder, 400)
    broken = folder / "broken.png"
    broken.write_bytes(photos[0].read_bytes()[:200])
    rng, done = np.random.default_rng(0), 0
    while done < count:
        chosen = rng.integers(0, len(photos), (min(50, count - done), 2))
        if (done // 50) % 2 == 0:
            for _ in matcher.match_many([(photos[a], photos[b]) for a, b in chosen], batch_size=4):
                done += 1
                yield done
        else:
            for a, b in chosen:
                arrays = [cv2.imread(str(photos[n])) for n in (a, b)]
                matches = matcher.match(*arrays, details=True)
                if done % 25 == 0:  # of chance matches it takes long
                    matches.estimate("fundamental")
                done += 1
                yield done
        try:
            matcher.match(broken, photos[0])
        except UserError:
            continue
        raise RuntimeError("a damaged photo was matched")


def many_sizes(count: int) -> Iterator[int]:
    matcher = Matcher(size=320, device="cpu", rotate="never", rescale="never")
    photos = [load_image(path).gray for path in BUNDLED["astronaut"].photos]
    rng = np.random.default_rng(0)
    for n in range(count):
        matcher.match(*(photo[: rng.integers(256, 513), : rng.integers(256, 513)] for photo in photos))
        yield n + 1


def folder_of_photos(folder: Path, out: Path, watch: Watch) -> None:
    """The command, looked at from a thread beside it."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(1.0):
            watch.held.append(memory_mib())

    beside = threading.Thread(target=look)
    beside.start()
    try:
        words = ["--pairs", "sequential", "--window", "1", "--matches-only", "-o", str(out)]
        sys.argv = [
            "prism",
            "sfm",
            str(folder),
            *words,
            "--model-config",
            "tiny",
            "--size",
            "64",
            "--device",
            "cpu",
        ]
        cli.main()
    except SystemExit as left:
        if left.code:
            raise
    finally:
        ended.set()
        beside.join()


if __name__ == "__main__":
    main()
