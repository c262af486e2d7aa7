"""Options that several commands have in common, and the matcher that they ask for."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

if TYPE_CHECKING:
    from prism_match.matcher import Matcher


class Precision(str, Enum):
    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


WEIGHTS_HELP = "A .safetensors file, or hf:OWNER/REPO[@REVISION][:FILE] [the shipped weights]"


class Rotate(str, Enum):
    auto = "auto"
    always = "always"
    never = "never"


DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
PrecisionOption = Annotated[Precision, typer.Option(help="auto: bf16 on a GPU, fp32 elsewhere.")]
RotateOption = Annotated[
    Rotate,
    typer.Option(help="Try the second image turned by 90, 180, 270 degrees; auto: if it hardly matches."),
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
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


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
