"""Builds the wheel and, with each Python from 3.10 to 3.13 that is found, installs it in an empty environment
and runs `prism demo` there, far from the source.

make test-wheel
python benchmarks/wheel.py --python 3.10 --python /opt/python/bin/python3.13

Pythons are looked for on the PATH, in pyenv's folder and in uv's. Those that are not there are named: `uv
python install 3.12`, or your system's packages, have them. What is installed is what a user gets: the newest
versions that the wheel allows. `pip` takes its settings from the environment; on a machine without a GPU,
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu spares gigabytes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
MOST_MINUTES = 40.0  # of one command: gigabytes may have to be fetched
ACCURATE = 1.0  # pixels: the median error of the shipped weights on the demo's pairs is a fraction of it


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", action="append", help="a version or a path; several [all that are there]")
    args = parser.parse_args()
    failed = []
    with tempfile.TemporaryDirectory(prefix="prism-wheel-") as folder:
        wheel = build(Path(folder))
        print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB", flush=True)
        for version in args.python or VERSIONS:
            python = find_python(version)
            if python is None:
                print(f"Python {version}: not on this machine; NOT TESTED", flush=True)
                if args.python:
                    failed.append(version)
                continue
            try:
                print(f"Python {version}: {demo(python, wheel, Path(folder))}", flush=True)
            except Failure as failure:
                print(f"Python {version}: FAILED\n{failure}", flush=True)
                failed.append(version)
    sys.exit(1 if failed else 0)


class Failure(Exception):
    pass


def build(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder), str(ROOT)]
    run(command, folder)
    return next(folder.glob("*.whl"))


def find_python(version: str) -> Path | None:
    if os.sep in version:
        return Path(version)
    places = [Path(p) / f"python{version}" for p in os.environ.get("PATH", "").split(os.pathsep)]
    home = Path.home()
    for root in (home / ".pyenv" / "versions", home / ".local" / "share" / "uv" / "python"):
        places += [p / "bin" / f"python{version}" for p in sorted(root.glob(f"*{version}.*"))]
    for python in places:
        # A name alone is not enough: pyenv has one for each version that it could have.
        if python.is_file() and answers(python, version):
            return python
    return None


def answers(python: Path, version: str) -> bool:
    code = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
    asked = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    return asked.returncode == 0 and asked.stdout.strip() == version


def demo(python: Path, wheel: Path, folder: Path) -> str:
    """One line on how it went."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="empty-", dir=folder) as name:
        empty = Path(name)
        run([str(python), "-m", "venv", str(empty / "venv")], empty)
        binaries = empty / "venv" / "bin"
        run([str(binaries / "python"), "-m", "pip", "install", "--quiet", str(wheel)], empty)
        installed = time.monotonic() - start
        said = run([str(binaries / "prism"), "demo", "--json", "-o", "demo", "--device", "cpu"], empty)
        results = json.loads(said)
        for pair, result in results.items():
            if not result["trained"] or result["median_error_px"] is None:
                raise Failure(f"{pair}: nothing was matched by the shipped weights")
            if result["median_error_px"] > ACCURATE:
                raise Failure(f"{pair}: a median error of {result['median_error_px']} px")
            for file in result["files"]:
                if not (empty / file).stat().st_size:
                    raise Failure(f"{file} is empty")
        torch = run([str(binaries / "python"), "-c", "import torch; print(torch.__version__)"], empty).strip()
    errors = ", ".join(f"{k} {v['median_error_px']} px" for k, v in results.items())
    return f"demo ran ({errors}; torch {torch}; installed in {installed:.0f} s)"


def run(command: list[str], folder: Path) -> str:
    """What it printed. Nothing of this repository is on its path."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60 * MOST_MINUTES
    )
    if done.returncode:
        raise Failure(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
