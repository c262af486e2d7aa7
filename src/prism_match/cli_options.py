"""Options that several commands have in common."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer


class Precision(str, Enum):
    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
PrecisionOption = Annotated[Precision, typer.Option(help="auto: bf16 on a GPU, fp32 elsewhere.")]
