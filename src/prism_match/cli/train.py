"""`prism train`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from prism_match.cli.data import ColmapOption, MegaDepthOption, PhotosOption, RgbdOption, WorldsOption
from prism_match.cli.options import DeviceOption
from prism_match.config import load_model_config
from prism_match.errors import UserError

if TYPE_CHECKING:
    from prism_match.training.config import TrainConfig


def train(
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder of the run; made if need be.")],
    preset: Annotated[
        Optional[str], typer.Option(help="paper, quick, tiny or a TOML file [quick; those of a resumed run].")
    ] = None,
    photos: PhotosOption = None,
    worlds: WorldsOption = False,
    colmap: ColmapOption = None,
    megadepth: MegaDepthOption = None,
    rgbd: RgbdOption = None,
    mix: Annotated[str, typer.Option(help="Shares of the sources, as photos=1,worlds=2 [equal].")] = "",
    minutes: Annotated[Optional[float], typer.Option(help="Budget in minutes, over all resumptions.")] = None,
    steps: Annotated[Optional[int], typer.Option(help="Budget in updates.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the run in --out ended.")] = False,
    init: Annotated[
        Optional[str], typer.Option(help="A run to begin with, or weights (also hf:OWNER/REPO).")
    ] = None,
    model: Annotated[Optional[str], typer.Option(help="Preset of the model or a file [the paper's].")] = None,
    batch: Annotated[Optional[int], typer.Option(help="Pairs per update, in all processes together.")] = None,
    size: Annotated[Optional[int], typer.Option(help="Side of the images; replaces the curriculum.")] = None,
    lr: Annotated[Optional[float], typer.Option(help="Learning rate at its highest.")] = None,
    accumulate: Annotated[Optional[int], typer.Option(help="Parts a batch is worked through in.")] = None,
    seed: Annotated[Optional[int], typer.Option(help="Two runs of one seed see the same pairs.")] = None,
    device: DeviceOption = "auto",
    compile: Annotated[Optional[bool], typer.Option(help="Compile the model [as the preset says].")] = None,
    shard_mib: Annotated[Optional[float], typer.Option(help="Largest file of a checkpoint, in MiB.")] = None,
    save_optimizer: Annotated[
        Optional[bool], typer.Option(help="Keep the optimizer's state in checkpoints [yes].")
    ] = None,
    save_minutes: Annotated[Optional[float], typer.Option(help="Minutes between checkpoints.")] = None,
    validate: Annotated[
        Optional[Path], typer.Option(help="Real pairs to score, in MegaDepth's layout.")
    ] = None,
    validate_minutes: Annotated[Optional[float], typer.Option(help="Minutes between validations.")] = None,
) -> None:
    """Train PRISM on photos, procedural worlds, posed photo collections, MegaDepth or RGB-D.

    Example: prism train --photos my-photos --worlds --minutes 24 --out run
    """
    from prism_match.evaluation.pose import pose_validation
    from prism_match.matcher import find_device
    from prism_match.training.config import load_train_config
    from prism_match.training.distributed import join_processes
    from prism_match.training.sources import SourceOptions, make_sources
    from prism_match.training.trainer import Trainer

    logging.basicConfig(format="%(message)s")
    if resume and preset is None:
        config = _settings_of(out)
    else:
        config = load_train_config(preset or "quick")
    if minutes is not None or steps is not None:
        config = config.replace(minutes=minutes, steps=steps)
    given = {
        "lr": lr, "accumulate": accumulate, "seed": seed, "shard_mib": shard_mib, "compile": compile,
        "save_optimizer": save_optimizer, "save_minutes": save_minutes, "validate_minutes": validate_minutes,
        "model": None if model is None else load_model_config(model),
    }  # fmt: skip
    config = config.replace(**{k: v for k, v in given.items() if v is not None})
    if batch is not None or size is not None:
        config = config.replace(phases=_phases(config.phases, size, batch))
    _, where = join_processes(find_device(device))  # each process of torchrun has a device of its own
    if where.type == "cpu" and compile is None:
        config = config.replace(compile=False)
    options = SourceOptions(
        photos or (), worlds, colmap or (), megadepth, rgbd or (), mix, config.compile, variety=config.worlds
    )
    if resume and init is not None:
        raise UserError("--resume and --init exclude each other")
    if not resume:
        _check_new(out)
    hook = None if validate is None else pose_validation(validate, where)
    trainer = Trainer(config, make_sources(options, where), out, where, hook)
    if resume:
        trainer.resume()
    else:
        _check_new(out)  # again: while the data was read, another run may have begun and ended
        if init is not None:
            trainer.start_from(init)
    trainer.fit()


def _check_new(out: Path) -> None:
    from prism_match.training.checkpoint import checkpoints

    if checkpoints(out):
        raise UserError(f"{out}: holds a run already; go on with --resume, or choose another --out")


def _settings_of(run: Path) -> TrainConfig:
    from prism_match.training.checkpoint import load_checkpoint
    from prism_match.training.config import TrainConfig

    settings = load_checkpoint(run).state["training"]
    try:
        return TrainConfig.from_dict(settings)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{run}: its settings cannot be read ({error}); give --preset") from error


def _phases(phases: tuple, size: int | None, batch: int | None) -> tuple:
    from dataclasses import replace

    if size is None:
        return tuple(replace(p, batch=batch) for p in phases)
    return (replace(phases[0], size=size, batch=phases[0].batch if batch is None else batch),)
