"""Other matchers, to be timed beside PRISM where they happen to be installed. None is a dependency, and
nothing is ever downloaded: a peer has the weights that its library finds on this machine, or random ones."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

UNTRAINED = "random weights"
KEYPOINTS = 2048  # of an image, for those that have a detector


@dataclass(frozen=True)
class Peer:
    name: str
    package: str  # with its version
    run: Callable[[Tensor, Tensor], Tensor]  # 1 1 h w each, gray in [0, 1] -> what has a row for each match
    note: str = ""  # what is not as its authors have it
    dense: bool = False  # scores every cell of 8x8 pixels with every other, in matrices that it holds


def open_peers(device: torch.device, dtype: torch.dtype) -> tuple[list[Peer], dict[str, str]]:
    """Those that are here, and why the others are not."""
    peers, skipped = [], {}
    for name, (package, build) in PEERS.items():
        try:
            module = importlib.import_module(package)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                run, note = build(device, dtype)
        except (
            Exception
        ) as error:  # libraries fail in all sorts of ways, and none of them is our user's mistake
            missing = isinstance(error, ModuleNotFoundError) and error.name == package
            skipped[name] = (
                f"{package} is not installed" if missing else f"cannot be opened ({first_line(error)})"
            )
            continue
        version = f"{package} {getattr(module, '__version__', '')}".strip()
        peers.append(Peer(name, version, run, note, dense=name.endswith("LoFTR")))
    return peers, skipped


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


Opened = tuple[Callable[[Tensor, Tensor], Tensor], str]


def open_loftr(device: torch.device, dtype: torch.dtype) -> Opened:
    from kornia.feature import LoFTR

    trained = is_cached("loftr_outdoor.ckpt")
    model = LoFTR(pretrained="outdoor" if trained else None).eval().to(device)

    def run(image0: Tensor, image1: Tensor) -> Tensor:
        return model({"image0": image0, "image1": image1})["confidence"]

    return run, "" if trained else UNTRAINED


def open_efficient_loftr(device: torch.device, dtype: torch.dtype) -> Opened:
    from transformers import EfficientLoFTRConfig, EfficientLoFTRForKeypointMatching

    model, note = from_cache(
        EfficientLoFTRForKeypointMatching, "zju-community/efficientloftr", EfficientLoFTRConfig
    )
    model.to(device)

    def run(image0: Tensor, image1: Tensor) -> Tensor:
        return matched(model(on_one_canvas(image0, image1)))

    return run, note


def open_lightglue(device: torch.device, dtype: torch.dtype) -> Opened:
    from lightglue import LightGlue, SuperPoint

    # It turns autocast off inside itself, unless it is told otherwise.
    mixed = dtype != torch.float32
    if is_cached("superpoint_v1.pth") and is_cached("superpoint_lightglue_v0-1_arxiv.pth"):
        detector = SuperPoint(max_num_keypoints=KEYPOINTS).eval().to(device)
        model = LightGlue("superpoint", mp=mixed).eval().to(device)

        def run(image0: Tensor, image1: Tensor) -> Tensor:
            seen = [detector({"image": x}) | {"image_size": size_of(x)} for x in (image0, image1)]
            return model({"image0": seen[0], "image1": seen[1]})["matches"][0]

        return run, f"SuperPoint, at most {KEYPOINTS} keypoints"
    full = {"depth_confidence": -1, "width_confidence": -1}
    model = LightGlue(None, mp=mixed, **full).eval().to(device)
    points = [torch.rand(1, KEYPOINTS, 2, device=device) for _ in range(2)]
    words = [F.normalize(torch.randn(1, KEYPOINTS, 256, device=device), dim=-1) for _ in range(2)]

    def run_alone(image0: Tensor, image1: Tensor) -> Tensor:
        sizes = size_of(image0), size_of(image1)
        seen = [
            {"keypoints": p * size, "descriptors": d, "image_size": size}
            for p, d, size in zip(points, words, sizes, strict=True)
        ]
        return model({"image0": seen[0], "image1": seen[1]})["matches"][0]

    return run_alone, f"{UNTRAINED}, all layers, {KEYPOINTS} random points: no detector"


def open_lightglue_of_transformers(device: torch.device, dtype: torch.dtype) -> Opened:
    from transformers import LightGlueConfig, LightGlueForKeypointMatching

    # Random weights would stop early, or prune, by chance.
    model, note = from_cache(
        LightGlueForKeypointMatching,
        "ETH-CVG/lightglue_superpoint",
        lambda: LightGlueConfig(depth_confidence=-1.0, width_confidence=-1.0),
    )
    model.keypoint_detector.keypoint_decoder.max_keypoints = KEYPOINTS
    model.to(device)

    def run(image0: Tensor, image1: Tensor) -> Tensor:
        return matched(model(on_one_canvas(image0, image1)))

    return run, (f"{note}, all layers, " if note else "") + f"at most {KEYPOINTS} keypoints"


# By their names: the package that has to be there, and what opens it.
PEERS: dict[str, tuple[str, Callable[[torch.device, torch.dtype], Opened]]] = {
    "LoFTR": ("kornia", open_loftr),
    "EfficientLoFTR": ("transformers", open_efficient_loftr),
    "LightGlue": ("lightglue", open_lightglue),
    "SuperPoint+LightGlue": ("transformers", open_lightglue_of_transformers),
}


def is_cached(name: str) -> bool:
    """Whether torch.hub has the file already."""
    return (Path(torch.hub.get_dir()) / "checkpoints" / name).is_file()


def from_cache(kind: Any, name: str, config: Callable[[], Any]) -> tuple[Any, str]:
    """A model of transformers, and what is to be said of its weights."""
    try:
        return kind.from_pretrained(name, local_files_only=True).eval(), ""
    except (OSError, ValueError):
        return kind(config()).eval(), UNTRAINED


def matched(found: Any) -> Tensor:
    """One row for each match, of what transformers' matchers give."""
    return found.matches[0, 0].gt(-1).nonzero()


def on_one_canvas(image0: Tensor, image1: Tensor) -> Tensor:
    """1 1 h w each -> 1 2 3 H W: padded to one size of multiples of 32."""
    height, width = (max(a, b) for a, b in zip(image0.shape[-2:], image1.shape[-2:], strict=True))
    padded = [
        F.pad(x, (0, width + -width % 32 - x.shape[-1], 0, height + -height % 32 - x.shape[-2]))
        for x in (image0, image1)
    ]
    return torch.stack(padded, dim=1).expand(-1, -1, 3, -1, -1)


def size_of(image: Tensor) -> Tensor:
    """1 2: width, height."""
    return image.new_tensor([image.shape[-1], image.shape[-2]])[None]
