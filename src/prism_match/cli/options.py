"""Options that several commands have in common, and the matcher that they ask for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

import typer

from prism_match.config import ModelConfig, Precision, Rescale, Rotate, Runtime, Tiles, load_model_config
from prism_match.errors import UserError

if TYPE_CHECKING:
    from prism_match.engine import Matcher
    from prism_match.engine.cluster import Cluster

WEIGHTS_HELP = "A .safetensors file, or hf:OWNER/REPO[@REVISION][:FILE] [the shipped weights]"

DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N, or mps (untested).")]
PrecisionOption = Annotated[Precision, typer.Option(help="auto: bf16 where the device has it, else fp32.")]
BackendOption = Annotated[
    Runtime,
    typer.Option(help="PyTorch, or on a CPU onnxruntime (extra: onnx); auto: that, where it can."),
]
RotateOption = Annotated[
    Rotate,
    typer.Option(help="Try the second image turned by 90, 180, 270 degrees; auto: if it hardly matches."),
]
RescaleOption = Annotated[
    Rescale, typer.Option(help="Try photos that hardly match at other scales, each smaller than the other.")
]
PolishOption = Annotated[
    bool,
    typer.Option(
        "--polish/--no-polish",
        help="Move matches by fractions of a pixel to where the images look most alike.",
    ),
]
WeightsOption = Annotated[Optional[str], typer.Option(help=f"{WEIGHTS_HELP}.")]
OutOption = Annotated[Path, typer.Option("-o", "--out", help="Folder for the results; made if need be.")]
SizeOption = Annotated[Optional[int], typer.Option(help="Longer side to resize to, in pixels [832].")]
ThresholdOption = Annotated[Optional[float], typer.Option(help="Least confidence of a match [the model's].")]
ConfigOption = Annotated[
    Optional[str], typer.Option(help="A preset (paper, tiny, ...) or a .toml/.json file.")
]
BatchOption = Annotated[int, typer.Option(help="Pairs of equal size matched at a time.")]
EngineOption = Annotated[
    Literal["local", "ray"], typer.Option(help="Match in this process, or on a Ray cluster.")
]
AddressOption = Annotated[
    Optional[str],
    typer.Option(help="Of a running Ray cluster, HOST:PORT or auto [one on this machine, for this run]."),
]
SamePlaceOption = Annotated[
    float,
    typer.Option(min=0, max=1, help="Photos that less probably show the same place are not joined; 0: all."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
JsonFileOption = Annotated[Optional[Path], typer.Option("--json", help="Write the numbers here.")]


def make_matcher(
    weights: str | None,
    model_config: str | None,
    device: str,
    precision: Precision,
    size: int | None,
    threshold: float | None = None,
    rotate: Rotate = "auto",
    polish: bool = True,
    backend: Runtime = "torch",
    tiles: Tiles | None = None,
    tile_memory: float | None = None,
    rescale: Rescale = "never",
) -> Matcher:
    from prism_match.engine import Matcher
    from prism_match.matcher import DEFAULT_SIZE

    matcher = Matcher(
        weights,
        device=device,
        precision=precision,
        backend=backend,
        size=DEFAULT_SIZE if size is None else size,
        threshold=threshold,
        rotate=rotate,
        rescale=rescale,
        polish=polish,
        tiles=tiles,
        tile_memory=tile_memory,
        config=parse_config(model_config),
    )
    if not matcher.info.trained:
        print("prism: the weights are untrained (random): the matches mean nothing yet", file=sys.stderr)
    return matcher


def parse_config(name: str | None) -> ModelConfig | None:
    return None if name is None else load_model_config(name)


def make_cluster(engine: str, address: str | None, device: str, **options: Any) -> Cluster | None:
    """None: this process matches."""
    from prism_match.engine.cluster import Cluster, require_ray

    if engine == "local":
        if address is not None:
            raise UserError("--address is that of a Ray cluster: it goes with --engine ray")
        return None
    require_ray()
    return Cluster(address, device, **options)
