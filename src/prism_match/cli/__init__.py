"""The `prism` command: one verb per job, a file each."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from prism_match import __version__
from prism_match.cli.align import align_command
from prism_match.cli.average import average
from prism_match.cli.bench import bench
from prism_match.cli.calibrate import calibrate
from prism_match.cli.convert import convert
from prism_match.cli.data import data
from prism_match.cli.demo import demo
from prism_match.cli.eval import evaluate
from prism_match.cli.export import export_app
from prism_match.cli.info import info
from prism_match.cli.localize import localize_command
from prism_match.cli.locate import locate
from prism_match.cli.match import match
from prism_match.cli.match_pairs import match_pairs_command
from prism_match.cli.serve import page, serve
from prism_match.cli.sfm import sfm
from prism_match.cli.stitch import stitch_command
from prism_match.cli.train import train
from prism_match.cli.train_subpixel import train_subpixel
from prism_match.cli.view import view
from prism_match.errors import UserError

app = typer.Typer(
    name="prism",
    help="Find where two photos show the same points. Exit code 0: done, 2: something in the call to mend.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (match, locate, demo, convert, info):
    app.command()(command)
app.command("align")(align_command)
app.command("stitch")(stitch_command)
app.command("match-pairs")(match_pairs_command)
app.command("eval")(evaluate)
app.command()(bench)
app.command()(train)
app.command()(train_subpixel)
app.command()(average)
app.command()(calibrate)
app.command()(sfm)
app.command("localize")(localize_command)
app.command()(view)
app.command()(serve)
app.command("app")(page)
app.add_typer(export_app, name="export")
app.add_typer(data, name="data")


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"prism-match {__version__}")
        raise typer.Exit


def one_line(error: Exception | str) -> str:
    """What an error says, without what names in files may hold: line breaks, and orders to a terminal."""
    return "".join(c if c.isprintable() else "?" for c in str(error))


def let_others_work() -> None:
    """Threads of OpenMP that wait for each other keep their cores busy for milliseconds, so that two programs
    at once take many times as long as one after the other. With so few turns as this (what GNU's OpenMP takes
    where it has more threads than cores) they give their cores away; a program that is alone hardly notices.
    PyTorch reads it when it is loaded."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def main() -> None:
    let_others_work()
    try:
        app(prog_name="prism")  # also as `python -m prism_match`, so that its completion is that of `prism`
    except UserError as error:
        print(f"prism: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:  # a full disk, a name too long, a folder that nobody may read
        named = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        print(f"prism: {one_line(named)}", file=sys.stderr)
        sys.exit(1)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":
            raise
        print("prism: the GPU is out of memory: try a smaller --size, or --device cpu", file=sys.stderr)
        sys.exit(1)
