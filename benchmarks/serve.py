"""How `prism serve` bears up: throughput beside direct calls, times over load, memory, and overload.

python benchmarks/serve.py --size 832 --device cuda
python benchmarks/serve.py --size 160 --model-config tiny --requests 40 --memory-requests 200 --places 4

Clients are threads with a connection each, in a process of their own beside the server's. Each part ends
after so many requests or --seconds, whichever comes first.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import PIL.Image

import prism_match
from prism_match import Matcher
from prism_match.config import load_model_config
from prism_match.evaluation.report import Table

ASSETS = Path(prism_match.__file__).parent / "assets"
BOUNDARY = "prism-benchmark"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--photos", type=Path, nargs=2, help="a pair [the bundled one]")
    parser.add_argument("--size", type=int, default=832)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--model-config")
    parser.add_argument("--requests", type=int, default=200, help="of each row")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each row, at most")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--batch", type=int, help="of the server")
    parser.add_argument(
        "--places", type=int, default=32, help="of the server; overload is four times as many"
    )
    parser.add_argument("--memory-requests", type=int, default=5000)
    parser.add_argument("--memory-seconds", type=float, default=600.0)
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    args = parser.parse_args()
    photos = args.photos or [ASSETS / "astronaut0.jpg", ASSETS / "astronaut1.jpg"]
    images = [path.read_bytes() for path in photos]
    body = form(images)

    direct = direct_calls(args, images)
    rows = [["direct calls", "", f"{direct:.2f}", "1.00", "", "", ""]]
    numbers: dict = {"settings": {k: str(v) for k, v in vars(args).items()}, "direct_per_second": direct}
    with server(args) as running:
        running.drive(body, 1, 3, args.seconds)  # warm
        numbers["load"] = []
        for clients in args.clients:
            before = running.batches()
            load = running.drive(body, clients, args.requests, args.seconds)
            count, total = (b - a for a, b in zip(before, running.batches(), strict=True))
            good = load.times[200]
            share = load.rate / direct
            row = ["served", str(clients), f"{load.rate:.2f}", f"{share:.2f}", *load.percentiles()]
            rows.append([*row, f"{total / count:.1f}"])
            numbers["load"].append(
                {"clients": clients, "per_second": load.rate, "of_direct": share, "batch": total / count,
                 "statuses": load.statuses, "p50": quantile(good, 50), "p95": quantile(good, 95)}
            )  # fmt: skip
        print(Table("load", ["", "clients", "pairs/s", "of direct", "p50 ms", "p95 ms", "batch"], rows), "\n")

        numbers["memory"] = []
        done, end = 0, time.perf_counter() + args.memory_seconds
        while done < args.memory_requests and time.perf_counter() < end:
            some = max(1, min(args.memory_requests // 10, args.memory_requests - done))
            load = running.drive(body, min(4, args.places), some, end - time.perf_counter())
            done += sum(load.statuses.values())
            numbers["memory"].append({"requests": done, "mib": running.memory()})
        rows = [[str(x["requests"]), f"{x['mib']:.0f}"] for x in numbers["memory"]]
        print(Table("memory of the server", ["requests", "MiB"], rows), "\n")

        clients = 4 * args.places
        with running.asked_after() as health:
            load = running.drive(body, clients, max(args.requests, 2 * clients), args.seconds, patient=True)
        rest = running.drive(body, 1, 3, args.seconds)
        statuses = ", ".join(f"{count} x {status}" for status, count in sorted(load.statuses.items()))
        rows = [
            ["clients, places", f"{clients}, {args.places}"],
            ["answers", statuses],
            ["pairs/s", f"{load.rate:.2f}"],
            ["p50, p95 ms of 200", ", ".join(load.percentiles())],
            ["p95 ms of 503", f"{1000 * quantile(load.times[503], 95):.0f}" if load.times[503] else ""],
            ["p95 ms of /healthz meanwhile", f"{1000 * quantile(health, 95):.0f}" if health else ""],
            ["memory afterwards, MiB", f"{running.memory():.0f}"],
            ["p50 ms of one client afterwards", rest.percentiles()[0]],
        ]
        numbers["overload"] = dict(rows)
        print(Table("four times the capacity", ["", ""], rows), "\n")
    print(f"exit code after SIGTERM: {running.process.returncode}")
    numbers["exit_code"] = running.process.returncode
    if args.json:
        args.json.write_text(json.dumps(numbers, indent=2), encoding="utf-8")


def direct_calls(args: argparse.Namespace, images: list[bytes]) -> float:
    """Pairs a second of `Matcher.match`, from the bytes of the files, as the server gets them."""
    config = None if args.model_config is None else load_model_config(args.model_config)
    matcher = Matcher(device=args.device, precision=args.precision, size=args.size, config=config)

    def match() -> None:
        matcher.match(*(PIL.Image.open(io.BytesIO(image)) for image in images))

    match()
    start, done = time.perf_counter(), 0
    while done < args.requests and time.perf_counter() < start + args.seconds:
        match()
        done += 1
    seconds = time.perf_counter() - start
    return done / seconds


def form(images: list[bytes]) -> bytes:
    head = '--{}\r\nContent-Disposition: form-data; name="image{}"; filename="a"\r\n\r\n'
    parts = [head.format(BOUNDARY, n).encode() + image + b"\r\n" for n, image in enumerate(images)]
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


def quantile(seconds: list[float], percent: float) -> float:
    return float(np.percentile(seconds, percent)) if seconds else float("nan")


@dataclass
class Load:
    times: dict[int, list[float]] = field(default_factory=lambda: {200: [], 503: []})
    statuses: Counter = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return len(self.times[200]) / self.seconds

    def percentiles(self) -> list[str]:
        return [f"{1000 * quantile(self.times[200], p):.0f}" for p in (50, 95)]


class Running:
    def __init__(self, process: subprocess.Popen[str], address: str):
        self.process, self.address = process, address

    def get(self, path: str) -> str:
        connection = http.client.HTTPConnection(self.address, timeout=60)
        connection.request("GET", path)
        text = connection.getresponse().read().decode()
        connection.close()
        return text

    def metric(self, name: str) -> float:
        return float(re.search(rf"^{name} (\S+)$", self.get("/metrics"), re.MULTILINE)[1])

    def memory(self) -> float:
        return self.metric("process_resident_memory_bytes") / 2**20

    def batches(self) -> tuple[float, float]:
        return self.metric("prism_batch_requests_count"), self.metric("prism_batch_requests_sum")

    def drive(
        self, body: bytes, clients: int, requests: int, seconds: float, *, patient: bool = False
    ) -> Load:
        """patient: who is told to come back later tries again, until it is answered."""
        load, lock = Load(), threading.Lock()
        start = time.perf_counter()
        left = iter(range(requests))

        def client() -> None:
            connection = http.client.HTTPConnection(self.address, timeout=600)
            headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
            again = False
            while True:
                with lock:
                    if not again and next(left, None) is None or time.perf_counter() > start + seconds:
                        break
                begin = time.perf_counter()
                try:
                    connection.request("POST", "/v1/match", body, headers)
                    answer = connection.getresponse()
                    answer.read()
                    status = answer.status
                except (OSError, http.client.HTTPException):
                    connection.close()
                    status = 0  # cut off
                with lock:
                    load.statuses[status] += 1
                    load.times.setdefault(status, []).append(time.perf_counter() - begin)
                again = patient and status != 200
                if again:
                    time.sleep(0.2)
            connection.close()

        threads = [threading.Thread(target=client) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        load.seconds = time.perf_counter() - start
        return load

    @contextmanager
    def asked_after(self) -> Iterator[list[float]]:
        """Seconds that /healthz took, asked now and then."""
        times: list[float] = []
        over = threading.Event()

        def ask() -> None:
            while not over.wait(0.2):
                begin = time.perf_counter()
                self.get("/healthz")
                times.append(time.perf_counter() - begin)

        thread = threading.Thread(target=ask)
        thread.start()
        yield times
        over.set()
        thread.join()


@contextmanager
def server(args: argparse.Namespace) -> Iterator[Running]:
    options = {"size": args.size, "device": args.device, "precision": args.precision, "places": args.places}
    options |= {"model-config": args.model_config, "batch": args.batch, "timeout": 600}
    given = [x for name, value in options.items() if value is not None for x in (f"--{name}", str(value))]
    process = subprocess.Popen(
        [sys.executable, "-m", "prism_match", "serve", "--port", "0", *given],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        running = Running(process, re.search(r"http://(\S+)", process.stdout.readline())[1])
        while "ready" not in running.get("/readyz") or "not ready" in running.get("/readyz"):
            time.sleep(0.1)
        yield running
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


if __name__ == "__main__":
    main()
