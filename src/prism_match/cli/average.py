"""`prism average`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prism_match.errors import UserError


def average(
    runs: Annotated[list[str], typer.Argument(help="Weights (also hf:OWNER/REPO) or folders of runs.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The .safetensors file to write.")],
) -> None:
    """Take the mean of the weights of several runs that began with the same weights, or with one another.

    Such a mean is often better than each of them. Runs that began at random have nothing in common, and
    neither has their mean.

    Example: prism average first.safetensors run -o mean.safetensors
    """
    from prism_match.config import ModelConfig
    from prism_match.files import writable_folder
    from prism_match.training.checkpoint import check_architecture, load_weights
    from prism_match.weights import misfits
    from prism_match.weights.store import export_weights

    if out.suffix != ".safetensors":
        raise UserError(f"{out}: the name must end in .safetensors")
    if len(runs) < 2:
        raise UserError(f"{runs[0]}: a mean needs at least two")
    loaded = [load_weights(run) for run in runs]
    try:
        config = ModelConfig.from_dict(loaded[0][1])
    except ValueError as error:
        raise UserError(f"{runs[0]}: its settings are not those of a PRISM model ({error})") from error
    first = loaded[0][0]
    for run, (weights, settings) in zip(runs[1:], loaded[1:], strict=True):
        check_architecture(Path(run), settings, config)
        if misfits(weights, first):
            raise UserError(f"{run}: its tensors are not those of {runs[0]}")
    mean = {
        name: sum(weights[name].double() for weights, _ in loaded).div(len(loaded))  # type: ignore[union-attr]
        if tensor.is_floating_point()
        else tensor
        for name, tensor in first.items()
    }
    if not all(tensor.isfinite().all() for tensor in mean.values()):
        raise UserError(f"{out}: not written, since the mean of these weights is not finite")
    path = writable_folder(out.parent) / out.name
    export_weights(path, mean, config, {"mean_of": [Path(run).name for run in runs]})
    print(f"{path}: the mean of {len(runs)}")
