"""`prism convert`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import typer

from prism_match.cli.options import JsonOption, parse_config
from prism_match.cli.output import print_table
from prism_match.errors import UserError


def convert(
    checkpoint: Annotated[
        str, typer.Argument(help="A .ckpt, .pt, .pth or .safetensors file, or the folder of a run of ours.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The .safetensors file to write.")],
    config: Annotated[
        Optional[str], typer.Option(help="A preset or a .toml/.json file [the checkpoint's own, or paper].")
    ] = None,
    precision: Annotated[
        Literal["fp16", "bf16", "fp32"],
        typer.Option(help="Of matrices and kernels; the rest is fp32 always."),
    ] = "fp16",
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
    from prism_match.training.convert import fit, load_any, parse_rename
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
    dtype = DTYPES[precision]
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
