"""`Matcher(backend="onnx")`: the MPMs, and the backbone where `FastPRISM` has no faster one, are run by
onnxruntime on a CPU; everything else is `FastPRISM`'s. Their graphs are traced once and kept in the user's
cache."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from prism_match import __version__
from prism_match.errors import UserError
from prism_match.export.onnx.graphs import MPMs
from prism_match.export.onnx.write import EXPORTING, Graph, example, traced
from prism_match.files import atomic_path, is_file, short_hash
from prism_match.model.fast import FastPRISM, fused, is_supported
from prism_match.model.matching import away_from_border
from prism_match.model.mpm import LayerState
from prism_match.model.packing import Layout, spared
from prism_match.model.prism import PRISM, Features
from prism_match.model.winograd import is_worth_it
from prism_match.runtime import INSTALL, import_onnxruntime, open_session
from prism_match.weights import WeightsInfo
from prism_match.weights.store import write_tensors

log = logging.getLogger(__name__)

PACKAGES = ("onnx", "onnxruntime")
PARTS = ("backbone", "mpms")
KEPT = 4  # files in the cache, those used last; each holds a copy of the weights
SOURCES = Path(__file__).parents[2]


def why_not(info: WeightsInfo, device: torch.device, dtype: torch.dtype) -> str | None:
    """What keeps the model from being run by onnxruntime; None: nothing."""
    if device.type != "cpu":
        return f"is for CPUs, not for {device}"
    if dtype != torch.float32:
        return f"computes in fp32, not in {str(dtype).removeprefix('torch.')}"
    if not is_supported(info.config):
        return "has no form of this ablation (linear attention, cosine, ...)"
    if missing := [name for name in PACKAGES if not is_installed(name)]:
        return f"needs {' and '.join(missing)}: {INSTALL}"
    try:
        import_onnxruntime()
    except UserError as error:  # it is there, and of no use: built for another system, or for another numpy
        return f"cannot be used: {error}"
    return None


def is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ValueError:  # something that is no module stands in its place
        return False


class OnnxPRISM(FastPRISM):
    """Takes and gives what `FastPRISM` does, on the CPU and in fp32."""

    def __init__(self, model: PRISM, info: WeightsInfo):
        super().__init__(model, torch.float32)
        self.mpms, self.prunes = [], [mpm.pruning is not None for mpm in model.mpms]
        graphs = load_graphs(model, info)
        self.transforming = open_session(graphs["mpms"], "the model's mpms")
        if not is_worth_it(torch.device("cpu")):
            self.backbone = SessionBackbone(open_session(graphs["backbone"], "the model's backbone"))  # type: ignore[assignment]

    def transform(
        self, layout: Layout, a: Features, b: Features, masks: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, list[LayerState]]:
        given = (a.coarse, b.coarse, a.valid, b.valid, *masks)
        pairs = [run(self.transforming, *(x[k] for x in given)) for k in range(len(a.coarse))]

        def joined(output: int, dim: int = 0) -> Tensor:
            """Of both images, those of all first ones before those of all second ones."""
            return torch.cat([pair[output + second] for second in (0, 1) for pair in pairs], dim)

        table, keeps = spared(joined(0)), joined(2, 1)
        estimates = iter(joined(4, 1) if any(self.prunes) else ())
        before = torch.cat([mask.flatten() for mask in masks])
        layers = []
        for keep, prunes in zip(keeps, self.prunes, strict=True):
            # Where it was not estimated any more there is a number that only means that.
            logit = next(estimates).masked_fill(~before, -torch.inf) if prunes else None
            layers.append(layout.state(table, keep, logit))
            before = keep
        inner = torch.cat([away_from_border(v, self.config.border).flatten() for v in (a.valid, b.valid)])
        return table, keep, logit, inner, keep.cumsum(0)[layout.ends[-1]], layers


class SessionBackbone:
    """What `fused` gives, by onnxruntime."""

    def __init__(self, session: Any):
        self.session = session

    def __call__(self, gray: Tensor) -> list[Tensor]:
        return [x.permute(0, 3, 1, 2) for x in run(self.session, gray)]


def run(session: Any, *inputs: Tensor) -> list[Tensor]:
    names = [x.name for x in session.get_inputs()]
    arrays = {name: x.contiguous().numpy() for name, x in zip(names, inputs, strict=True)}
    try:
        return [torch.from_numpy(x) for x in session.run(None, arrays)]
    except Exception as error:  # it has no type of its own for this
        if "alloc" in str(error):
            raise MemoryError("onnxruntime: not enough memory for images of this size") from error
        raise


# ---- the graphs


class ChannelsLast(nn.Module):
    """The backbone: b 1 h w -> coarse and fine, b h w c."""

    def __init__(self, model: PRISM):
        super().__init__()
        self.backbone = fused(model.backbone, torch.float32)
        self.backbone._state_dict_hooks.clear()  # of batch norms, which are no longer there

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.permute(0, 2, 3, 1) for x in self.backbone(image))


def make_graphs(model: PRISM) -> dict[str, bytes]:
    """By part, as onnxruntime takes them."""
    model = model.requires_grad_(False)
    images = [example(name, None) for name in ("astronaut0.jpg", "astronaut1.jpg")]
    a, b = (FastPRISM(model, torch.float32).extract(image) for image in images)
    graphs = {}
    for graph in each_graph(model, images[0], a, b):
        proto = traced(graph)
        # Of steps that are not ONNX's own, the exporter takes the numbers of the trace for the only ones.
        del proto.graph.value_info[:]
        graphs[graph.part] = proto.SerializeToString()
    return graphs


def each_graph(model: PRISM, image: Tensor, a: Features, b: Features) -> Iterator[Graph]:
    sides = {name: {0: "b", 1: f"h{n}", 2: f"w{n}"} for n, name in ((8, "coarse"), (2, "fine"))}
    yield Graph(
        "backbone", ChannelsLast(model), {"image": image}, ("coarse", "fine"),
        {"image": {0: "b", 2: "h", 3: "w"}} | sides,
    )  # fmt: skip
    inputs = {
        f"{name}{n}": x[0]
        for name, both in (
            ("coarse", (a.coarse, b.coarse)), ("valid", (a.valid, b.valid)), ("keep", (a.valid, b.valid)),
        )
        for n, x in enumerate(both)
    }  # fmt: skip
    names = [f"{name}{n}" for name in ("table", "kept", "nmi") for n in (0, 1)]
    if all(mpm.pruning is None for mpm in model.mpms):
        names = names[:4]
    axes = {name: {0: f"h{name[-1]}", 1: f"w{name[-1]}"} for name in inputs}
    axes |= {name: {int(not name.startswith("table")): f"n{name[-1]}"} for name in names}
    yield Graph("mpms", MPMs(model), inputs, tuple(names), axes, {"com.microsoft": 1})


# ---- the cache


@dataclass(frozen=True)
class Kept:
    """A file of the cache. It is never believed to be what its name says."""

    path: Path
    key: str

    def read(self) -> dict[str, bytes] | None:
        """None: it is not there, or damaged, or another's."""
        if not is_file(self.path):
            return None
        try:
            with safe_open(self.path, "pt") as file:
                told = file.metadata() or {}
                graphs = {part: file.get_tensor(part).numpy().tobytes() for part in PARTS}
        except (OSError, ValueError, TypeError, RuntimeError, SafetensorError):
            told, graphs = {}, {}
        if told.get("key") != self.key or told.get("sha256") != digest(graphs):
            log.warning("%s: damaged; it is made again", self.path)
            return None
        with suppress(OSError):
            os.utime(self.path)
        return graphs

    def write(self, graphs: dict[str, bytes]) -> None:
        """If it can be: without, the graphs are made anew the next time."""
        tensors = {
            part: torch.frombuffer(bytearray(graph), dtype=torch.uint8) for part, graph in graphs.items()
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(self.path) as temporary:
                write_tensors(temporary, tensors, {"key": self.key, "sha256": digest(graphs)})
        except (OSError, UserError) as error:
            log.warning("the graphs for onnxruntime are not kept: %s", error)
        with suppress(OSError):  # others may do the same at the same time
            there = self.path.parent.glob("[!.]*.safetensors")  # not what others are writing
            for old in sorted(there, key=lambda p: p.stat().st_mtime)[:-KEPT]:
                old.unlink(missing_ok=True)


def load_graphs(model: PRISM, info: WeightsInfo) -> dict[str, bytes]:
    kept = kept_file(info)
    with EXPORTING:  # whoever waits for another finds what that one has kept
        graphs = None if kept is None else kept.read()
        if graphs is None:
            log.warning("the model is traced for onnxruntime; this takes seconds, and is done once")
            graphs = make_graphs(model)
            if kept is not None:
                kept.write(graphs)
            else:
                log.warning("the graphs for onnxruntime are not kept: there is no home folder")
    return graphs


def kept_file(info: WeightsInfo) -> Kept | None:
    """Of this model, as this code makes it. None: the user has no home."""
    key = short_hash([info.sha256, info.config.to_dict(), __version__, torch.__version__, source_digest()])
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return Kept(cache / "prism-match" / "onnx" / f"{key}.safetensors", key)


def source_digest() -> str:
    """Of the code that graphs come from, so that a changed one does not get those of the old."""
    files = sorted([*(SOURCES / "model").glob("*.py"), *Path(__file__).parent.glob("*.py")])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def digest(graphs: dict[str, bytes]) -> str:
    return hashlib.sha256(b"".join(graphs[part] for part in sorted(graphs))).hexdigest()
