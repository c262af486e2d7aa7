"""What commands print and write."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prism_match.errors import UserError

if TYPE_CHECKING:
    from prism_match.geometry import Estimate
    from prism_match.matcher import PairMatcher
    from prism_match.matches import Matches


def check_outputs(folder: Path, names: Iterable[str], inputs: Iterable[Path]) -> None:
    """Raises `UserError` where a result would be written over what it is made of."""
    given = {path.resolve() for path in inputs}
    for name in names:
        if (folder / name).resolve() in given:
            raise UserError(f"{folder / name}: is given, and would be replaced; choose another --out")


def write_results(
    matches: Matches, estimate: Estimate, folder: Path, shown: Matches | None = None
) -> list[Path]:
    """matches.npz and the pictures; all of them drawn before the first is written.
    shown: the same matches of smaller images, to draw where the images themselves are too large."""
    import cv2
    import numpy as np

    from prism_match import viz
    from prism_match.files import atomic_path
    from prism_match.geometry import resize_matrix
    from prism_match.images import encode_png

    shown = matches if shown is None else shown
    image0, image1 = shown.image(0).rgb, shown.image(1).rgb
    title = f"{len(matches)} matches, {estimate.num_inliers} inliers"
    pictures = {"matches.png": shown.plot(title=title)}
    if matches.details is not None:
        pictures["pruning.png"] = viz.draw_pruning(
            image0, image1, matches.details.keep0, matches.details.keep1
        )
    if estimate.model == "homography" and estimate.matrix is not None:
        matrix = estimate.matrix
        if shown is not matches:
            (w0, h0), (w1, h1) = shown.size0, shown.size1
            larger = resize_matrix(matches.size0[0] / w0, matches.size0[1] / h0)
            matrix = resize_matrix(w1 / matches.size1[0], h1 / matches.size1[1]) @ matrix @ larger
        covered = cv2.warpPerspective(np.ones(image0.shape[:2], np.uint8), matrix, shown.size1) > 0
        pictures["overlay.png"] = viz.draw_overlay(shown.warp(homography=matrix), image1, covered)
    encoded = {folder / name: encode_png(picture) for name, picture in pictures.items()}
    matches.save(folder / "matches.npz")
    for path, png in encoded.items():
        with atomic_path(path) as temporary:
            temporary.write_bytes(png)
    return [folder / "matches.npz", *encoded]


def summary(matches: Matches, estimate: Estimate, matcher: PairMatcher, seconds: float) -> dict[str, Any]:
    result: dict[str, Any] = {
        "matches": len(matches),
        "inliers": estimate.num_inliers,
        "geometry": estimate.model,
        "matrix": None if estimate.matrix is None else estimate.matrix.tolist(),
        "same_place": None if matches.same_place is None else round(matches.same_place, 4),
    }
    if matches.details is not None:
        for key, keep in (("kept_cells0", matches.details.keep0), ("kept_cells1", matches.details.keep1)):
            result[key] = [round(float(layer.mean()), 4) for layer in keep]
    return result | {
        "seconds": round(seconds, 3),
        "size": matcher.size,
        "device": str(matcher.device),
        "precision": str(matcher.dtype).removeprefix("torch."),
        "backend": matcher.backend,
        "trained": matcher.info.trained,
    }


def report(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, indent=2))
        return
    rows = {"matches": result["matches"], "inliers": f"{result['inliers']} ({result['geometry']}, MAGSAC++)"}
    if "median_error_px" in result and result["median_error_px"] is not None:
        rows["median error"] = (
            f"{result['median_error_px']} px, {100 * result['within_3_px']:.1f} % within 3 px, of "
            f"{result['known_truth']} whose truth is known"
        )
    if result.get("same_place") is not None:
        rows["same place"] = f"{100 * result['same_place']:.1f} % likely"
    for n in (0, 1):
        if f"kept_cells{n}" in result:
            kept = " ".join(f"{100 * x:5.1f}" for x in result[f"kept_cells{n}"])
            rows[f"kept cells, image {n}"] = f"{kept}  % after MPM 1 to {len(result[f'kept_cells{n}'])}"
    how = [result["device"], result["precision"], f"{result['size']} px"]
    if result["backend"] != "torch":
        how.insert(2, result["backend"])
    rows["time"] = f"{result['seconds']:.2f} s ({', '.join(how)})"
    rows["written"] = ", ".join(result["files"])
    print_table(rows)


def print_table(rows: dict[str, Any]) -> None:
    width = max(map(len, rows))
    for key, value in rows.items():
        print(f"{key:<{width}}  {value}")


@contextmanager
def busy(what: str) -> Iterator[None]:
    """A spinner while something takes its time; nothing where there is no terminal."""
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield
