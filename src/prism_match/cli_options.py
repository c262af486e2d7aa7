"""Options that several commands have in common."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Optional

import typer


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
