"""How `prism serve` bears up: throughput beside direct calls, times over load, memory, and overload.

python benchmarks/serve.py --size 832 --device cuda
python benchmarks/serve.py --size 160 --model-config tiny --requests 40 --memory-requests 200 --places 4
python benchmarks/serve.py --size 96 --requests 20 --memory-requests 1 --mixed-requests 3000 --places 8

Clients are threads with a connection each, in a process of their own beside the server's. Each part ends
after so many requests or --seconds, whichever comes first.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
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
    parser.add_argument(
        "--mixed-requests",
        type=int,
        default=0,
        help="and so many of all kinds: other sizes and answers, keys, broken ones, clients that go away",
    )
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    args = parser.parse_args()
    photos = args.photos or [ASSETS / "astronaut0.jpg", ASSETS / "astronaut1.jpg"]
    images = [path.read_bytes() for path in photos]
    body = form(images)

    direct, cpu = direct_calls(args, images)
    rows = [["direct calls", "", f"{direct:.2f}", "1.00", "", "", "", f"{cpu:.3f}"]]
    numbers: dict = {"settings": {k: str(v) for k, v in vars(args).items()}}
    numbers |= {"direct_per_second": direct, "direct_cpu": cpu}
    with server(args) as running:
        running.drive(body, 1, 3, args.seconds)  # warm
        numbers["load"] = []
        for clients in args.clients:
            before = running.work()
            load = running.drive(body, clients, args.requests, args.seconds)
            count, total, cpu = (b - a for a, b in zip(before, running.work(), strict=True))
            good = load.times[200]
            share = load.rate / direct
            row = ["served", str(clients), f"{load.rate:.2f}", f"{share:.2f}", *load.percentiles()]
            rows.append([*row, f"{total / count:.1f}", f"{cpu / total:.3f}"])
            numbers["load"].append(
                {"clients": clients, "per_second": load.rate, "of_direct": share, "batch": total / count,
                 "cpu": cpu / total, "statuses": load.statuses, "p50": quantile(good, 50),
                 "p95": quantile(good, 95)}
            )  # fmt: skip
        columns = ["", "clients", "pairs/s", "of direct", "p50 ms", "p95 ms", "batch", "CPU s/pair"]
        print(Table("load", columns, rows), "\n")

        numbers["memory"] = []
        done, end = 0, time.perf_counter() + args.memory_seconds
        while done < args.memory_requests and time.perf_counter() < end:
            some = max(1, min(args.memory_requests // 10, args.memory_requests - done))
            load = running.drive(body, min(4, args.places), some, end - time.perf_counter())
            done += sum(load.statuses.values())
            numbers["memory"].append({"requests": done, "mib": running.memory()})
        rows = [[str(x["requests"]), f"{x['mib']:.0f}"] for x in numbers["memory"]]
        print(Table("memory of the server", ["requests", "MiB"], rows), "\n")

        if args.mixed_requests:
            numbers["mixed"] = running.mixed(Mixture(images, args.size), min(4, args.places), args)
            rows = [[str(x["requests"]), f"{x['mib']:.0f}", x["statuses"]] for x in numbers["mixed"]]
            print(Table("mixed requests", ["requests", "MiB", "answers so far"], rows), "\n")

        clients = 4 * args.places
        with running.asked_after() as health:
            load = running.drive(body, clients, max(args.requests, 2 * clients), args.seconds, patient=True)
        rest = running.drive(body, 1, 3, args.seconds)
        rows = [
            ["clients, places", f"{clients}, {args.places}"],
            ["answers", told(load.statuses)],
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


def direct_calls(args: argparse.Namespace, images: list[bytes]) -> tuple[float, float]:
    """Of `Matcher.match`, from the bytes of the files, as the server gets them: pairs a second, and seconds
    of the CPU for a pair, which mean more where others use the machine, too."""
    config = None if args.model_config is None else load_model_config(args.model_config)
    matcher = Matcher(device=args.device, precision=args.precision, size=args.size, config=config)

    def match() -> None:
        matcher.match(*(PIL.Image.open(io.BytesIO(image)) for image in images))

    match()
    start, cpu, done = time.perf_counter(), time.process_time(), 0
    while done < args.requests and time.perf_counter() < start + args.seconds:
        match()
        done += 1
    return done / (time.perf_counter() - start), (time.process_time() - cpu) / done


def form(images: list[bytes], **options: str) -> bytes:
    return fields({f"image{n}": image for n, image in enumerate(images)} | options)


def fields(values: dict[str, bytes | str]) -> bytes:
    """Bytes are files, texts are options."""
    parts = []
    for name, value in values.items():
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"'
        head += '; filename="a"\r\n\r\n' if isinstance(value, bytes) else "\r\n\r\n"
        parts.append(head.encode() + (value if isinstance(value, bytes) else value.encode()) + b"\r\n")
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


def told(statuses: Counter) -> str:
    return ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))


class Mixture:
    """Requests of all kinds, the same ones in each run: half of them pairs of many sizes and shapes that
    want any kind of answer, the rest features to be kept, broken ones, and clients that do not wait."""

    def __init__(self, images: list[bytes], size: int):
        self.random, self.keys = random.Random(0), [""]
        photos = [PIL.Image.open(io.BytesIO(image)).convert("RGB") for image in images]
        side = partial(self.random.randint, 32, size)
        kinds = ["JPEG", "PNG", "WEBP", "TIFF"] * 8
        self.photos = [[encoded(photo, side(), side(), kind) for kind in kinds] for photo in photos]

    def next(self) -> tuple[str, bytes, str, bool]:
        """The address, the body, what is accepted, and whether the answer is waited for."""
        draw = self.random
        pair = [draw.choice(some) for some in self.photos]
        accept = draw.choice(["application/json", "application/x-npz", "image/png"])
        options = {"geometry": draw.choice(["homography", "both"]), "details": "true"}
        options = options if draw.random() < 0.3 else {}
        what = draw.random()
        if what < 0.5:
            return "/v1/match", form(pair, **options), accept, True
        if what < 0.6:
            return "/v1/features", fields({"image": pair[0]}), "*/*", True
        if what < 0.65:
            return "/v1/match", fields({"key0": draw.choice(self.keys), "image1": pair[1]}), accept, True
        if what < 0.85:
            broken = draw.choice([b"", b"no image" * 99, pair[0][: len(pair[0]) // 2], bytes(2**20)])
            wrong = draw.choice([{}, {"threshold": "7"}, {"size": "none"}, {"colour": "red"}])
            return "/v1/match", form([broken, pair[1]], **wrong), accept, True
        return "/v1/match", form(pair), accept, False


def encoded(photo: PIL.Image.Image, width: int, height: int, kind: str) -> bytes:
    file = io.BytesIO()
    photo.resize((width, height)).save(file, kind)
    return file.getvalue()


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

    def work(self) -> list[float]:
        """So far: batches, requests in them, and the CPU's seconds."""
        names = ("prism_batch_requests_count", "prism_batch_requests_sum", "process_cpu_seconds_total")
        return [self.metric(name) for name in names]

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

        together(client, clients)
        load.seconds = time.perf_counter() - start
        return load

    def mixed(self, mixture: Mixture, clients: int, args: argparse.Namespace) -> list[dict]:
        """The memory, and the answers up to then, ten times on the way."""
        statuses: Counter = Counter()
        lock, steps, end = threading.Lock(), [], time.perf_counter() + args.memory_seconds
        left = iter(range(args.mixed_requests))

        def client() -> None:
            connection = http.client.HTTPConnection(self.address, timeout=600)
            while True:
                with lock:
                    if (number := next(left, None)) is None or time.perf_counter() > end:
                        break
                    address, body, accept, waits = mixture.next()
                headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}", "Accept": accept}
                status, text = "gone", b""
                connection.request("POST", address, body, headers)
                if waits:
                    answer = connection.getresponse()
                    status, text = str(answer.status), answer.read()
                else:
                    time.sleep(0.05)
                    connection.sock.shutdown(socket.SHUT_RDWR)
                    connection.close()
                with lock:
                    statuses[status] += 1
                    if status == "201":
                        mixture.keys = [*mixture.keys[-20:], json.loads(text)["key"]]
                    if (number + 1) % max(1, args.mixed_requests // 10) == 0:
                        steps.append(
                            {"requests": number + 1, "mib": self.memory(), "statuses": told(statuses)}
                        )
            connection.close()

        together(client, clients)
        return steps

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


def together(client: Callable[[], None], clients: int) -> None:
    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
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
