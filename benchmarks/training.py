"""How fast training runs: making the pairs, the model's step, and both overlapped as the trainer has them.

python benchmarks/training.py --photos shared/train/photos --worlds --seconds 20
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from prism_match.matcher import find_device
from prism_match.training.config import Phase, TrainConfig, load_train_config
from prism_match.training.feed import Feed, Weighted
from prism_match.training.sources import SourceOptions, make_sources
from prism_match.training.trainer import Trainer, fast_arithmetic


def main() -> None:
    args = arguments()
    device = find_device(args.device)
    options = SourceOptions(args.photos, args.worlds, args.colmap, mix=args.mix, compile=args.compile_data)
    began = time.perf_counter()
    sources = make_sources(options, device)
    seconds, names = time.perf_counter() - began, ", ".join(s.source.name for s in sources)
    print(f"{torch.__version__}, {torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'}")
    print(f"sources {names} opened in {seconds:.1f} s")
    header = f"{'size':>5} {'batch':>5} {'compiled':>8} {'pruning':>7} | {'data':>8} {'model':>8} {'step':>8}"
    print(f"{header} | {'pairs/s':>7} | {'memory':>8} | first step")
    for size, batch in zip(args.size, args.batch, strict=True):
        for compiled in [False, True] if args.compile == "both" else [args.compile == "on"]:
            for prune in [False, True] if args.pruning else [False]:
                measure(args, sources, device, size, batch, compiled, prune)
        if args.each:
            each_source(args, sources, device, size, batch)


def arguments() -> argparse.Namespace:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--photos", type=Path, nargs="+", default=[])
    parser.add_argument("--worlds", action="store_true")
    parser.add_argument("--colmap", type=Path, nargs="+", default=[])
    parser.add_argument("--mix", default="")
    parser.add_argument("--preset", default="quick")
    parser.add_argument("--size", type=int, nargs="+", default=[256, 320])
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 48])
    parser.add_argument("--stage-dims", type=int, nargs=3, help="other widths of the backbone")
    parser.add_argument("--compile", choices=["on", "off", "both"], default="both")
    parser.add_argument("--compile-data", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--pruning", action="store_true", help="also with cells taken out of attention")
    parser.add_argument("--each", action="store_true", help="also the data time of each source alone")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measured loop")
    parser.add_argument("--device", default="auto")
    return parser.parse_args()


def measure(
    args: argparse.Namespace,
    sources: list[Weighted],
    device: torch.device,
    size: int,
    batch: int,
    compiled: bool,
    prune: bool,
) -> None:
    """One line: the seconds of making a batch, of the model on a ready batch, and of both overlapped."""
    config: TrainConfig = load_train_config(args.preset)
    config = config.replace(
        phases=(Phase(0.0, size, batch),), compile=compiled, prune_from=0.0 if prune else 1.0, minutes=1e6
    )
    if args.stage_dims:
        config = config.replace(model=config.model.replace(stage_dims=tuple(args.stage_dims)))
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    with tempfile.TemporaryDirectory() as run, fast_arithmetic(device):
        trainer = Trainer(config, sources, run, device)
        numbers = iter(range(10**9))

        def make() -> list:
            return [trainer.mixer.make(next(numbers), 0, batch, size)]

        work = make()
        began = time.perf_counter()
        for _ in range(3):
            trainer.update(work)
        wait(device)
        first = time.perf_counter() - began
        data = timed(make, args.seconds / 4, device)
        model = timed(lambda: trainer.update(work), args.seconds / 2, device)
        feed = Feed(trainer.mixer)

        def step() -> None:
            while feed.wanting:
                feed.order(next(numbers), [0], batch, size)
            trainer.update(feed.next())

        overlapped = timed(step, args.seconds, device)
        feed.close()
        memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else float("nan")
        skipped = int(trainer.skipped)
    line = f"{size:5d} {batch:5d} {'yes' if compiled else 'no':>8} {'yes' if prune else 'no':>7}"
    times = " ".join(f"{1000 * t:5.0f} ms" for t in (data, model, overlapped))
    note = f", {skipped} steps without a finite gradient" if skipped else ""
    speed = f"{batch / overlapped:7.1f} | {memory:4.1f} GiB"
    print(f"{line} | {times} | {speed} | {first:.1f} s{note}", flush=True)


def each_source(
    args: argparse.Namespace, sources: list[Weighted], device: torch.device, size: int, batch: int
) -> None:
    """The time that each source alone takes for half a batch."""
    count = max(1, batch // 2)
    for weighted in sources:
        source = weighted.source
        generator = torch.Generator(getattr(source, "device", "cpu")).manual_seed(0)
        t = timed(lambda s=source, g=generator: s.sample(count, size, g), args.seconds / 8, device)
        print(f"{size:5d} {count:5d} {source.name}: {1000 * t:.0f} ms, {count / t:.0f} pairs/s", flush=True)


def timed(call: Callable[[], object], seconds: float, device: torch.device) -> float:
    """Mean seconds of a call, after warming up."""
    for _ in range(2):
        call()
    wait(device)
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in range(4):
            call()
        calls += 4
        wait(device)
    return (time.perf_counter() - began) / calls


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
