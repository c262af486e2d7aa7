"""`prism locate`."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from prism_match.cli.options import (
    DeviceOption,
    PrecisionOption,
    RescaleOption,
    RotateOption,
    SizeOption,
    WeightsOption,
    make_matcher,
)
from prism_match.errors import UserError
from prism_match.files import atomic_path, reading, writable_folder


def locate(
    image0: Annotated[Path, typer.Argument(help="Photo that the points are in.", show_default=False)],
    image1: Annotated[Path, typer.Argument(help="Photo to find them in.", show_default=False)],
    points: Annotated[Path, typer.Option(help="A .csv file with the columns x and y, in pixels of IMAGE0.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The .csv file to write, row by row.")],
    weights: WeightsOption = None,
    size: SizeOption = None,
    rotate: RotateOption = "auto",
    rescale: RescaleOption = "auto",
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
) -> None:
    """Find points of one's own choice in another photo: where they are, how sure that is, and how exact.

    Rows of the result are those of --points: x, y in pixels of IMAGE1, the probability to be within 3 pixels
    (certainty), and the expected error in pixels (sigma). What is not visible has nan, nan, 0, nan.

    Example: prism locate a.jpg b.jpg --points points.csv -o located.csv
    """
    if out.suffix.lower() != ".csv":
        raise UserError(f"{out}: the result is a .csv file")
    given = read_points(points)
    if out.is_dir():
        raise UserError(f"{out}: is a folder; the result is a .csv file")
    writable_folder(out.parent)
    matcher = make_matcher(weights, None, device, precision, size, None, rotate, rescale=rescale)
    found = matcher.locate(image0, image1, given)
    with atomic_path(out) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["x", "y", "certainty", "sigma"])
        table = np.column_stack([found.points1, found.certainty, found.sigma])
        writer.writerows([[f"{value:.6g}" for value in row] for row in table.tolist()])
    there = np.isfinite(found.sigma)
    typical = f", with an expected error of {np.median(found.sigma[there]):.2f} px" if there.any() else ""
    print(f"{int(there.sum())} of {len(found)} points found{typical} -> {out}")


def read_points(path: Path) -> np.ndarray:
    """n 2: columns named x and y, or two columns without names."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    with reading(path, "a .csv file of points"):
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if row and not row[0].startswith("#")]
        names = [name.strip().lower() for name in rows[0]] if rows else []
        if "x" in names and "y" in names:
            columns, rows = (names.index("x"), names.index("y")), rows[1:]
        elif all(len(row) == 2 for row in rows):
            columns = (0, 1)
        else:
            raise UserError("its first line must name the columns, x and y among them")
        try:
            return np.array([[float(row[c]) for c in columns] for row in rows]).reshape(-1, 2)
        except (ValueError, IndexError) as error:
            raise UserError(f"a point is two numbers ({error})") from error
