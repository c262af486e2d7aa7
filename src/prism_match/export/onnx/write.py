"""From the model to files: traced, named, checked, and only then put in their places."""

from __future__ import annotations

import io
import shutil
import threading
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from prism_match import __version__
from prism_match.config import ModelConfig
from prism_match.errors import UserError
from prism_match.export.onnx.graphs import Backbone, Pair, PairOfFeatures, Polish
from prism_match.files import temporary_beside, writable_folder
from prism_match.images import SMALLEST, load_image, resize
from prism_match.matcher import DTYPES
from prism_match.model.arithmetic import own_arithmetic
from prism_match.model.fast import is_supported
from prism_match.model.prism import CELL, PRISM, STRIDE
from prism_match.runtime import INSTALL
from prism_match.weights import SUBPIXEL_SHA256, WeightsInfo, build_model, load_subpixel, weights_info

OPSET = 17
STATIC_MATCHES = 2048  # rows of a file of fixed size, the surest first
LARGEST_STATIC = 4096  # pixels a side
ASSETS = Path(__file__).parents[2] / "assets"
MATCHES = ("keypoints0", "keypoints1", "scores")
# PyTorch's exporter has one state for all threads: two at a time fail, or give a graph of something else.
EXPORTING = threading.RLock()


@dataclass(frozen=True)
class OnnxOptions:
    precision: Literal["fp32", "fp16"] = "fp32"
    external_weights: bool = False  # beside each file, not in it
    static: tuple[int, int] | None = None  # height, width of both images; None: any sizes
    parts: bool = False  # the backbone and the matcher also as files of their own
    polish: bool = True  # also the network that makes matches exact


@dataclass(frozen=True)
class Graph:
    """What a file is made of."""

    part: str
    module: nn.Module
    inputs: dict[str, Tensor]  # examples
    outputs: tuple[str, ...]
    axes: dict[str, dict[int, str]]  # of inputs and outputs, those of any size
    domains: dict[str, int] = field(default_factory=dict)  # of steps that are not ONNX's own


@own_arithmetic()
def export_onnx(
    out: str | Path,
    weights: str | Path | None = None,
    options: OnnxOptions | None = None,
    config: ModelConfig | None = None,
) -> list[Path]:
    """Writes `out` and what the options ask for beside it; returns all files. Nothing is written, nor is any
    file of these names touched, unless every graph could be made and has passed onnx's checker."""
    options = options or OnnxOptions()
    out = Path(out)
    check(out, options)
    folder = writable_folder(out.parent)
    info = weights_info(weights, config)
    if not is_supported(info.config):
        raise UserError("the model has an ablation (linear attention, cosine, ...) that has no ONNX form")
    model = build_model(info).requires_grad_(False)
    graphs = make_graphs(model, options)
    temporary = temporary_beside(folder / "onnx")
    try:
        temporary.mkdir()
        names = [n for graph in graphs for n in write(graph, out, temporary, options, info)]
        for name in names:  # weights before the graph that points to them
            (temporary / name).replace(folder / name)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return [folder / name for name in reversed(names)]


def check(out: Path, options: OnnxOptions) -> None:
    try:
        import onnx  # noqa: F401
    except ImportError as error:
        raise UserError(f"the export needs the package onnx: {INSTALL}") from error
    if out.suffix != ".onnx":
        raise UserError(f"{out}: the name must end in .onnx")
    if out.is_dir():
        raise UserError(f"{out}: is a folder")
    if options.precision not in ("fp32", "fp16"):
        raise UserError(f"precision must be fp32 or fp16, not {options.precision!r}")
    if options.static is not None:
        for side in options.static:
            if not SMALLEST <= side <= LARGEST_STATIC:
                raise UserError(f"a static side has {SMALLEST} to {LARGEST_STATIC} pixels, not {side}")
        if options.parts:
            raise UserError("a file of fixed size has no parts: leave out one of static and parts")


def file_name(out: Path, part: str) -> str:
    """prism.onnx, prism-backbone.onnx and so on."""
    return out.name if part == "pair" else f"{out.stem}-{part}{out.suffix}"


# ---- what is in the files


def make_graphs(model: PRISM, options: OnnxOptions) -> list[Graph]:
    """The one that `out` is named after comes first."""
    dtype, threshold = DTYPES[options.precision], torch.tensor(model.config.theta_c)
    # Photos, since a trace of noise would go through steps that are given nothing.
    image0, image1 = (example(name, options.static) for name in ("astronaut0.jpg", "astronaut1.jpg"))
    sizes = {"image0": {2: "H0", 3: "W0"}, "image1": {2: "H1", 3: "W1"}}
    found = {name: {0: "matches"} for name in MATCHES}
    images = {"image0": image0, "image1": image1, "threshold": threshold}
    if options.static is not None:
        pair = Pair(model, dtype, gather=False, matches=STATIC_MATCHES)
        graphs = [Graph("pair", pair, images, MATCHES, {})]
    else:
        graphs = [Graph("pair", Pair(model, dtype), images, MATCHES, sizes | found)]
    if options.parts:
        backbone = Backbone(model, dtype)
        maps = {"coarse": {0: "H/8", 1: "W/8"}, "fine": {1: "H/2", 2: "W/2"}}
        graphs.append(
            Graph(
                "backbone",
                backbone,
                {"image": image0},
                ("coarse", "fine"),
                {"image": {2: "H", 3: "W"}} | maps,
            )
        )
        seen = [backbone(x) for x in (image0, image1)]
        features = {
            f"{name}{n}": x for n in (0, 1) for name, x in zip(("coarse", "fine"), seen[n], strict=True)
        }
        axes = {
            f"{name}{n}": {axis: f"{of[0]}{n}{of[1:]}" for axis, of in maps[name].items()}
            for n in (0, 1) for name in maps
        }  # fmt: skip
        matcher = PairOfFeatures(model, dtype)
        graphs.append(Graph("matcher", matcher, features | {"threshold": threshold}, MATCHES, axes | found))
    if options.polish:
        points = torch.rand(40, 2, generator=torch.Generator().manual_seed(0)) * 100
        inputs = {
            "image0": image0, "image1": image1, "matched0": image0, "keypoints0": points,
            "keypoints1": points + 1, "scale0": torch.ones(2), "scale1": torch.ones(2),
            "pixel": torch.tensor(1.0), "rounds": torch.tensor(3),
        }  # fmt: skip
        results = ("polished0", "polished1")
        matches = {name: {0: "matches"} for name in ("keypoints0", "keypoints1", *results)}
        matched = {"matched0": {2: "H0m", 3: "W0m"}}
        network = load_subpixel().requires_grad_(False)
        graphs.append(Graph("polish", Polish(network), inputs, results, sizes | matched | matches))
    return graphs


def example(name: str, size: tuple[int, int] | None) -> Tensor:
    height, width = size or ((150, 196) if name.endswith("0.jpg") else (164, 148))
    return torch.from_numpy(resize(load_image(ASSETS / name).gray, width, height))[None, None].contiguous()


def metadata(graph: Graph, options: OnnxOptions, info: WeightsInfo) -> dict[str, str]:
    c, height_width = info.config, options.static
    polish = graph.part == "polish"
    return {
        "name": "prism-match",
        "version": __version__,
        "part": graph.part,
        "weights_sha256": SUBPIXEL_SHA256 if polish else info.sha256 or "none: random weights",
        "precision": "fp32" if polish else options.precision,
        "stride": str(STRIDE),  # sides are padded to multiples of it, by the model itself
        "cell": str(CELL),
        "theta_c": str(c.theta_c),
        "theta_p": str(c.theta_p),
        "pruning": c.pruning if height_width is None or polish else f"{c.pruning}, by masks",
        "size": "any" if height_width is None or polish else "x".join(map(str, height_width)),
    }


# ---- the files


def write(graph: Graph, out: Path, folder: Path, options: OnnxOptions, info: WeightsInfo) -> list[str]:
    """Into a folder; the names of its files, that of the weights first."""
    import onnx
    from onnx.external_data_helper import convert_model_to_external_data

    name = file_name(out, graph.part)
    proto = traced(graph)
    proto.producer_name, proto.producer_version = "prism-match", __version__
    for key, value in metadata(graph, options, info).items():
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, value
    names = [name]
    if options.external_weights:
        convert_model_to_external_data(proto, location=f"{name}.data", size_threshold=1024)
        names = [f"{name}.data", name]
    onnx.save(proto, folder / name)
    if options.external_weights:  # which onnx makes for its user alone to read
        shutil.copymode(folder / name, folder / names[0])
    try:
        onnx.checker.check_model(folder / name, full_check=True)
    except onnx.checker.ValidationError as error:  # never a user's mistake
        raise RuntimeError(f"{name}: onnx's checker refuses it: {error}") from error
    return names


def traced(graph: Graph) -> Any:
    """An onnx.ModelProto. By the exporter that traces: the newer one gives the same matches, but takes twenty
    times as long, another package and a newer runtime."""
    import onnx

    graph.module.eval()
    file = io.BytesIO()
    # Warnings tell that numbers such as channels become constants, which they are.
    with EXPORTING, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            graph.module, tuple(graph.inputs.values()), file, dynamo=False,  # type: ignore[arg-type]
            opset_version=OPSET, custom_opsets=graph.domains,
            input_names=list(graph.inputs), output_names=list(graph.outputs), dynamic_axes=graph.axes,
        )  # fmt: skip
    return onnx.load_from_string(file.getvalue())
