"""`prism info`."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, Optional

import typer

from prism_match import __version__
from prism_match.cli.options import ConfigOption, JsonOption, WeightsOption, parse_config
from prism_match.cli.output import print_table
from prism_match.errors import UserError


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

    from prism_match.matcher import find_device, find_dtype
    from prism_match.weights import MODEL_CARD, SHIPPED, build_model, weights_info

    if file is not None and weights is not None:
        raise UserError(f"{file}: weights are given with --weights, too: only one of them")
    known = weights_info(file or weights, parse_config(model_config))
    model = build_model(known)
    stored = model.state_dict()  # without the channels that are there for speed alone
    device = find_device("auto")
    result: dict[str, Any] = {
        "version": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "precision": str(find_dtype("auto", device)).removeprefix("torch."),
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
