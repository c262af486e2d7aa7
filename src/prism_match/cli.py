"""The `prism` command: one verb per job."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from prism_match import __version__
from prism_match.cli_options import (
    DeviceOption,
    PolishOption,
    Precision,
    PrecisionOption,
    Rotate,
    RotateOption,
    WeightsOption,
)
from prism_match.errors import UserError
from prism_match.evaluation.commands import evaluate
from prism_match.export.commands import export_app
from prism_match.pipelines.localize_commands import localize_command
from prism_match.pipelines.sfm_commands import sfm
from prism_match.training.commands import data, train

if TYPE_CHECKING:
    from prism_match.geometry import Estimate
    from prism_match.matcher import Matcher
    from prism_match.matches import Matches

app = typer.Typer(
    name="prism",
    help="Find where two photos show the same points. Exit code 0: done, 2: something in the call to mend.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class StoredPrecision(str, Enum):
    fp16 = "fp16"
    bf16 = "bf16"
    fp32 = "fp32"


class Geometry(str, Enum):
    fundamental = "fundamental"
    homography = "homography"


OutOption = Annotated[Path, typer.Option("-o", "--out", help="Folder for the results; made if need be.")]
SizeOption = Annotated[Optional[int], typer.Option(help="Longer side to resize to, in pixels [832].")]
ThresholdOption = Annotated[Optional[float], typer.Option(help="Least confidence of a match [the model's].")]
ConfigOption = Annotated[
    Optional[str], typer.Option(help="A preset (paper, tiny, ...) or a .toml/.json file.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@app.command()
def match(
    image0: Annotated[Path, typer.Argument(help="First photo.", show_default=False)],
    image1: Annotated[Path, typer.Argument(help="Second photo.", show_default=False)],
    out: OutOption = Path("prism-out"),
    size: SizeOption = None,
    threshold: ThresholdOption = None,
    max_matches: Annotated[
        Optional[int],
        typer.Option(help="Keep only so many, spread over the first photo: the surest there."),
    ] = None,
    mask0: Annotated[
        Optional[Path], typer.Option(help="Image of the first one's size; look where not 0.")
    ] = None,
    mask1: Annotated[Optional[Path], typer.Option(help="The same for the second photo.")] = None,
    geometry: Annotated[
        Geometry,
        typer.Option(help="Model that the inliers are counted for; homography also gives an overlay."),
    ] = Geometry.fundamental,
    rotate: RotateOption = Rotate.auto,
    polish: PolishOption = True,
    device: DeviceOption = "auto",
    precision: PrecisionOption = Precision.auto,
    weights: WeightsOption = None,
    model_config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Match two photos; write the matches and pictures of them.

    OUT gets matches.npz, matches.png (lines from red, unsure, to green, sure), pruning.png (cells by the
    MPM that pruned them) and, with --geometry homography, overlay.png.

    \b
    Examples:
      prism match a.jpg b.jpg -o out
      prism match a.jpg b.jpg --size 1152 --threshold 0.4 --json
      prism match wall1.jpg wall2.jpg --geometry homography
    """
    from prism_match.files import writable_folder
    from prism_match.images import load_image, load_mask

    # Before the model is loaded: what is wrong should not take seconds to be told.
    if max_matches is not None and max_matches < 1:
        raise UserError(f"max_matches must be at least 1, not {max_matches}")
    first, second = load_image(image0), load_image(image1)
    region0 = None if mask0 is None else load_mask(mask0, first)
    region1 = None if mask1 is None else load_mask(mask1, second)
    matcher = make_matcher(weights, model_config, device, precision, size, threshold, None, rotate, polish)
    folder = writable_folder(out)
    with busy("matching"):
        start = time.perf_counter()
        matches = matcher.match(first, second, region0, region1, details=True).filter(spread=max_matches)
        seconds = time.perf_counter() - start
    estimate = matches.estimate(geometry.value)
    files = write_results(matches, estimate, folder)
    result = summary(matches, estimate, matcher, seconds) | {"files": [str(f) for f in files]}
    report(result, as_json)


@app.command()
def demo(
    out: OutOption = Path("demo"),
    size: SizeOption = None,
    device: DeviceOption = "auto",
    weights: WeightsOption = None,
    model_config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Match the photos that come with the package, whose geometry is known, and measure the error.

    \b
    Example:
      prism demo -o demo
    """
    import numpy as np

    from prism_match.files import writable_folder
    from prism_match.geometry import warp_points
    from prism_match.images import load_image

    assets = Path(__file__).parent / "assets"
    matcher = make_matcher(weights, model_config, device, Precision.auto, size, None, None)
    folder = writable_folder(out)
    with busy("matching"):
        start = time.perf_counter()
        photos = (load_image(assets / f"astronaut{n}.jpg") for n in (0, 1))
        matches = matcher.match(*photos, details=True)
        seconds = time.perf_counter() - start
    truth = warp_points(matches.keypoints0, np.loadtxt(assets / "astronaut_homography.txt"))
    errors = np.linalg.norm(matches.keypoints1 - truth, axis=1)
    estimate = matches.estimate("homography")
    files = write_results(matches, estimate, folder)
    result = summary(matches, estimate, matcher, seconds)
    result["median_error_px"] = round(float(np.median(errors)), 3) if len(errors) else None
    result["within_3_px"] = round(float((errors < 3).mean()), 4) if len(errors) else None
    report(result | {"files": [str(f) for f in files]}, as_json)


@app.command()
def convert(
    checkpoint: Annotated[
        str, typer.Argument(help="A .ckpt, .pt, .pth or .safetensors file, or the folder of a run of ours.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The .safetensors file to write.")],
    config: Annotated[
        Optional[str], typer.Option(help="A preset or a .toml/.json file [the checkpoint's own, or paper].")
    ] = None,
    precision: Annotated[
        StoredPrecision, typer.Option(help="Of matrices and kernels; the rest is fp32 always.")
    ] = StoredPrecision.fp16,
    rename: Annotated[
        Optional[list[str]], typer.Option(help="OLD=NEW: names that begin with OLD; * is any one word.")
    ] = None,
    drop: Annotated[Optional[list[str]], typer.Option(help="Leave out what begins with this.")] = None,
    ema: Annotated[bool, typer.Option(help="Of a run of ours: the averaged weights, or the last.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Turn a checkpoint of PyTorch or Lightning into weights for --weights.

    Names lose what wrappers put in front (module. model. matcher. _orig_mod.). The file is written only if
    every tensor of the model is there, in its shape, and no other; else all that is wrong is listed and
    the exit code is 2. Objects in a checkpoint are refused: they could run code.

    \b
    Examples:
      prism convert last.ckpt -o mine.safetensors
      prism convert run -o mine.safetensors --precision fp32
      prism convert theirs.ckpt -o theirs.safetensors --rename fpn=backbone --drop loss
      prism convert theirs.ckpt -o theirs.safetensors --rename 'blocks.*.own=mpms.*.self_attention'
    """
    from prism_match.config import ModelConfig
    from prism_match.files import writable_folder
    from prism_match.matcher import DTYPES
    from prism_match.weights.convert import fit, load_any, parse_rename
    from prism_match.weights.store import export_weights

    if out.suffix != ".safetensors":
        raise UserError(f"{out}: the name must end in .safetensors")
    renames = [parse_rename(text) for text in rename or ()]
    model = parse_config(config)
    loaded = load_any(checkpoint, ema)
    try:
        model = model or ModelConfig.from_dict(loaded.config)
    except ValueError as error:
        raise UserError(f"{checkpoint}: its settings are not those of a PRISM model ({error})") from error
    dtype = DTYPES[precision.value]
    found = fit(loaded.tensors, model, renames, drop or (), dtype)
    files = []
    if not found.problems:
        files = export_weights(
            writable_folder(out.parent) / out.name, found.state, model, loaded.training, dtype=dtype
        )
    result = {
        "checkpoint": checkpoint,
        "tensors": len(found.state),
        "model_tensors": found.tensors,
        "settings": "--config" if config else "the checkpoint's" if loaded.config else "the paper's",
        "dropped": found.dropped,
        "problems": found.problems,
        "files": [str(f) for f in files],
    }
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print_conversion(result)
    if found.problems:
        counts = ", ".join(f"{len(lines)} {kind}" for kind, lines in found.problems.items())
        raise UserError(f"{checkpoint}: does not fit the model ({counts}); nothing is written")


@app.command()
def info(
    file: Annotated[Optional[str], typer.Argument(help="The same as --weights.", show_default=False)] = None,
    weights: WeightsOption = None,
    model_config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell the version, the device and the weights: their hash, size and how they were trained; of those that
    ship also what they reach and where they fail.

    \b
    Examples:
      prism info
      prism info mine.safetensors --json
    """
    import torch

    from prism_match.matcher import find_device
    from prism_match.weights import MODEL_CARD, SHIPPED, build_model, weights_info

    known = weights_info(file or weights, parse_config(model_config))
    model = build_model(known)
    stored = model.state_dict()  # without the channels that are there for speed alone
    device = find_device("auto")
    result: dict[str, Any] = {
        "version": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "weights": str(known.path) if known.path else "none (random, untrained)",
        "sha256": known.sha256,
        "parameters": sum(stored[name].numel() for name, _ in model.named_parameters()),
        "training": known.training or None,
        "config": known.config.to_dict(),
    }
    if as_json:
        print(json.dumps(result, indent=2))
        return
    result["parameters"] = f"{result['parameters']:,} ({result['parameters'] / 1e6:.1f} M)"
    if known.path == SHIPPED:
        del result["training"]  # of the last run alone; the card tells of all of them
    for group in [g for g in ("training", "config") if g in result]:
        rows = result.pop(group) or {"": "unknown" if known.trained else "never"}
        rows.pop("settings", None)  # a page of numbers; --json has them
        result |= {f"{group}.{k}".rstrip("."): v for k, v in rows.items()}
    print_table({k: v for k, v in result.items() if v is not None})
    if known.path == SHIPPED:
        print("\n" + MODEL_CARD.read_text(encoding="utf-8"), end="")


app.command("eval")(evaluate)
app.command()(train)
app.command()(sfm)
app.command("localize")(localize_command)
app.add_typer(export_app, name="export")
app.add_typer(data, name="data")


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"prism-match {__version__}")
        raise typer.Exit


def make_matcher(
    weights: str | None,
    model_config: str | None,
    device: str,
    precision: Precision,
    size: int | None,
    threshold: float | None,
    max_matches: int | None,
    rotate: Rotate = Rotate.auto,
    polish: bool = True,
) -> Matcher:
    from prism_match.matcher import DEFAULT_SIZE, Matcher

    matcher = Matcher(
        weights,
        device=device,
        precision=precision.value,
        size=DEFAULT_SIZE if size is None else size,
        threshold=threshold,
        max_matches=max_matches,
        rotate=rotate.value,
        polish=polish,
        config=parse_config(model_config),
    )
    if not matcher.info.trained:
        print("prism: the weights are untrained (random): the matches mean nothing yet", file=sys.stderr)
    return matcher


def parse_config(name: str | None) -> Any:
    from prism_match.config import load_model_config

    return None if name is None else load_model_config(name)


def write_results(matches: Matches, estimate: Estimate, folder: Path) -> list[Path]:
    """matches.npz and the pictures; all of them drawn before the first is written."""
    import cv2
    import numpy as np

    from prism_match import viz
    from prism_match.files import atomic_path
    from prism_match.images import encode_png

    image0, image1 = matches.image(0).rgb, matches.image(1).rgb
    title = f"{len(matches)} matches, {estimate.num_inliers} inliers"
    pictures = {"matches.png": matches.plot(title=title)}
    if matches.details is not None:
        pictures["pruning.png"] = viz.draw_pruning(
            image0, image1, matches.details.keep0, matches.details.keep1
        )
    if estimate.model == "homography" and estimate.matrix is not None:
        covered = cv2.warpPerspective(np.ones(image0.shape[:2], np.uint8), estimate.matrix, matches.size1) > 0
        pictures["overlay.png"] = viz.draw_overlay(matches.warp(homography=estimate.matrix), image1, covered)
    encoded = {folder / name: encode_png(picture) for name, picture in pictures.items()}
    matches.save(folder / "matches.npz")
    for path, png in encoded.items():
        with atomic_path(path) as temporary:
            temporary.write_bytes(png)
    return [folder / "matches.npz", *encoded]


def summary(matches: Matches, estimate: Estimate, matcher: Matcher, seconds: float) -> dict[str, Any]:
    result: dict[str, Any] = {
        "matches": len(matches),
        "inliers": estimate.num_inliers,
        "geometry": estimate.model,
        "matrix": None if estimate.matrix is None else estimate.matrix.tolist(),
    }
    if matches.details is not None:
        for key, keep in (("kept_cells0", matches.details.keep0), ("kept_cells1", matches.details.keep1)):
            result[key] = [round(float(layer.mean()), 4) for layer in keep]
    return result | {
        "seconds": round(seconds, 3),
        "size": matcher.size,
        "device": str(matcher.device),
        "precision": str(matcher.dtype).removeprefix("torch."),
        "trained": matcher.info.trained,
    }


def report(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, indent=2))
        return
    rows = {
        "matches": result["matches"],
        "inliers": f"{result['inliers']} ({result['geometry']}, MAGSAC++)",
    }
    if "median_error_px" in result and result["median_error_px"] is not None:
        rows["median error"] = (
            f"{result['median_error_px']} px, {100 * result['within_3_px']:.1f} % within 3 px"
        )
    for n in (0, 1):
        if f"kept_cells{n}" in result:
            kept = " ".join(f"{100 * x:5.1f}" for x in result[f"kept_cells{n}"])
            rows[f"kept cells, image {n}"] = f"{kept}  % after MPM 1 to {len(result[f'kept_cells{n}'])}"
    rows["time"] = (
        f"{result['seconds']:.2f} s ({result['device']}, {result['precision']}, {result['size']} px)"
    )
    rows["written"] = ", ".join(result["files"])
    print_table(rows)


def print_conversion(result: dict[str, Any], most: int = 20) -> None:
    rows = {
        "checkpoint": result["checkpoint"],
        "tensors": f"{result['tensors']}, the model has {result['model_tensors']}",
        "settings": result["settings"],
        "dropped": f"{len(result['dropped'])} tensors" if result["dropped"] else None,
        "written": ", ".join(result["files"]) or "nothing",
    }
    print_table({k: v for k, v in rows.items() if v is not None})
    for kind, lines in result["problems"].items():
        more = [f"... and {len(lines) - most} more; --json lists them all"] if len(lines) > most else []
        print("\n".join([f"\n{len(lines)} {kind}", *(f"  {line}" for line in lines[:most] + more)]))


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


def main() -> None:
    try:
        app()
    except UserError as error:
        print(f"prism: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":
            raise
        print("prism: the GPU is out of memory: try a smaller --size, or --device cpu", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
