"""How often PyTorch's threads fall asleep while a pair is matched on a CPU, and by which thread of a program.

python benchmarks/sleeps.py --model-config tiny
python benchmarks/sleeps.py --size 320 --last

GNU's OpenMP lets threads wait awake as long as there are no more of them than cores; each thread that has
computed has helpers of its own. Sleeps are voluntary context switches, which Linux counts.
"""

from __future__ import annotations

import argparse
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import prism_match
from prism_match import Matcher
from prism_match.config import load_model_config

ASSETS = Path(prism_match.__file__).parent / "assets"
PAIR = [ASSETS / "astronaut0.jpg", ASSETS / "astronaut1.jpg"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=160)
    parser.add_argument("--model-config")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument(
        "--last", action="store_true", help="only the last row, which is how a server does it"
    )
    args = parser.parse_args()
    config = None if args.model_config is None else load_model_config(args.model_config)
    # By a thread that ends, so that the main one has computed nothing yet.
    matcher = apart(lambda: Matcher(device="cpu", size=args.size, config=config))
    print(f"{torch.get_num_threads()} threads, {args.size} px")
    if not args.last:
        print("another thread, the main one has not computed:", apart(lambda: sleeps(matcher, args.pairs)))
        print("the main thread:", sleeps(matcher, args.pairs))
    matcher.match(*PAIR)
    print("another thread, the main one has computed:", apart(lambda: sleeps(matcher, args.pairs)))


def apart(work: Callable[[], Any]) -> Any:
    """In a thread of its own."""
    results = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def sleeps(matcher: Matcher, pairs: int) -> str:
    matcher.match(*PAIR)
    before, cpu = switches(), time.process_time()
    for _ in range(pairs):
        matcher.match(*PAIR)
    after, cpu = switches(), time.process_time() - cpu
    return f"{(after - before) / pairs:.0f} sleeps a pair, {cpu / pairs:.3f} s of the CPU"


def switches() -> int:
    """Voluntary ones, of all threads that there are."""
    told = [(task / "status").read_text() for task in Path("/proc/self/task").iterdir()]
    return sum(int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", text, re.MULTILINE)[1]) for text in told)


if __name__ == "__main__":
    main()
