"""The settings of a training run: the paper's, the fast recipe's, or those of a TOML file."""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prism_match.config import PRESETS as MODEL_PRESETS
from prism_match.config import ModelConfig, check_seed, checked, parse_toml, preset_or_file
from prism_match.errors import UserError
from prism_match.training.data.worlds.variety import Variety
from prism_match.training.pairs import ImageSize, shape_of
from prism_match.training.step import LossConfig


@dataclass(frozen=True)
class Phase:
    """From this share of the budget on: pairs of images of `size` (a side, or height and width), `batch` of
    them per update. Phases of one start take turns at random, so that sizes and shapes are mixed within a
    run."""

    start: float
    size: ImageSize
    batch: int


@dataclass(frozen=True)
class TrainConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    worlds: Variety = field(default_factory=Variety)

    # The budget: updates, or minutes of wall clock over all resumptions. The schedule follows it.
    steps: int | None = None
    minutes: float | None = None
    phases: tuple[Phase, ...] = (Phase(0.0, 832, 24),)
    prune_from: float = 0.0  # share of the budget after which attention leaves pruned cells out

    difficulty: float = 0.0  # how much more often hard pairs of collections are drawn: see `difficulty.py`

    # AdamW, linear warm-up, a constant rate, and over the last `decay` of the budget a cosine down to
    # `final_lr` times the rate.
    lr: float = 8e-4
    final_lr: float = 0.01
    decay: float = 1.0
    warmup: int = 1000  # updates
    weight_decay: float = 0.1
    clip: float = 1.0  # norm of the gradient
    accumulate: int = 1  # parts that a batch is worked through in
    ema: float = 0.999

    bf16: bool = True
    compile: bool = False
    seed: int = 0

    log_every: int = 20  # updates between readings of the metrics, each of which waits for the device
    save_minutes: float = 5.0
    samples_minutes: float = 5.0
    validate_minutes: float = 10.0
    shard_mib: float | None = None
    save_optimizer: bool = True
    moment_bits: int = 32  # of the optimizer's moments in checkpoints, or 8, which is a quarter of that

    def __post_init__(self) -> None:
        starts = [p.start for p in self.phases]
        in_time = all(0 <= start < 1 for start in starts)  # which nan is not
        if not in_time or not starts or starts[0] != 0 or starts != sorted(starts):
            raise UserError("phases must begin at 0 of the budget, in order, each before 1")
        for phase in self.phases:
            for side in shape_of(phase.size):
                if side < 32 or side % 32:
                    raise UserError(f"size must be a multiple of 32, not {side}")
            if phase.batch < 1:
                raise UserError(f"batch must be at least 1, not {phase.batch}")
        check_seed(self.seed)
        for name in ("save_minutes", "samples_minutes", "validate_minutes"):
            if not getattr(self, name) >= 0:
                raise UserError(f"{name} must be at least 0, not {getattr(self, name)}")
        if self.moment_bits not in (8, 32):
            raise UserError(f"moment_bits must be 8 or 32, not {self.moment_bits}")
        for name in ("lr", "clip", "accumulate", "log_every", "steps", "minutes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"{name} must be positive, not {value}")
        for name in ("final_lr", "warmup", "weight_decay", "prune_from", "difficulty"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} must be at least 0, not {getattr(self, name)}")
        if self.shard_mib is not None and not 0.5 <= self.shard_mib < math.inf:
            raise UserError(f"shard_mib must be at least 0.5, not {self.shard_mib}")
        if not 0 < self.decay <= 1:
            raise UserError(f"decay must be above 0 and at most 1, not {self.decay}")
        if not 0 <= self.ema < 1:
            raise UserError(f"ema must be at least 0 and below 1, not {self.ema}")

    def replace(self, **changes: Any) -> TrainConfig:
        return dataclasses.replace(self, **changes)

    def phase(self, progress: float, step: int) -> Phase:
        """That of an update, which is the same however often it is asked for."""
        begun = [p for p in self.phases if p.start <= progress]
        return random.Random(step).choice([p for p in begun if p.start == begun[-1].start])

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        """Undoes `to_dict`, also after a trip through JSON."""
        phases = [list(p.values()) for p in values["phases"]]
        return merged(cls(), {**values, "phases": phases})


# "paper": what PRISM and, where it is silent, LoFTR used. "quick": 20 to 30 minutes on one GPU from nothing.
PRESETS: dict[str, TrainConfig] = {
    "paper": TrainConfig(loss=LossConfig(fine="paper")),
    "quick": TrainConfig(
        loss=LossConfig(refine=128, deep=0.5, heat=1.0, rough=0.1, fewest=16),
        minutes=24.0,
        phases=(Phase(0.0, 256, 64), Phase(0.35, 320, 48), Phase(0.8, 480, 24)),
        prune_from=1.0,
        lr=8e-4,
        warmup=200,
        weight_decay=0.05,
        compile=True,
    ),
    "tiny": TrainConfig(
        model=MODEL_PRESETS["tiny"],
        loss=LossConfig(refine=32, deep=0.5),
        steps=100,
        phases=(Phase(0.0, 64, 4),),
        lr=2e-3,
        warmup=10,
        bf16=False,
    ),
}


def load_train_config(name_or_file: str | Path) -> TrainConfig:
    """A preset by its name, or a TOML file: keys of TrainConfig, `preset` (what it starts from), `phases` as
    [[start, size, batch], ...] (size: a side, or [height, width]), and the tables [model], [loss] and
    [worlds]."""
    path = preset_or_file(name_or_file, PRESETS)
    if isinstance(path, TrainConfig):
        return path
    try:
        values = parse_toml(path.read_text(encoding="utf-8"))
        preset = values.pop("preset", "paper")
        if preset not in PRESETS:
            raise ValueError(f"preset is one of {', '.join(PRESETS)}, not {preset!r}")
        return merged(PRESETS[preset], values)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from error


def merged(base: TrainConfig, values: dict[str, Any]) -> TrainConfig:
    """`base` with the values of a TOML file or of `to_dict`. ValueError, in one line, if one is wrong."""
    # Settings that need not be there, and those that are tables in a file, by values of their types.
    defaults = {**vars(base), "steps": 1, "minutes": 1.0, "shard_mib": 1.0}
    defaults |= {"model": {}, "loss": {}, "worlds": {}}
    given = checked(defaults, {k: v for k, v in values.items() if v is not None})
    changes = {**values, **given}
    if "model" in changes:
        changes["model"] = ModelConfig.from_dict({**base.model.to_dict(), **changes["model"]})
    if "loss" in changes:
        changes["loss"] = dataclasses.replace(base.loss, **checked(vars(base.loss), changes["loss"]))
    if "worlds" in changes:
        changes["worlds"] = dataclasses.replace(base.worlds, **checked(vars(base.worlds), changes["worlds"]))
    if "phases" in changes:
        changes["phases"] = tuple(_phase(p) for p in changes["phases"])
    return dataclasses.replace(base, **changes)


def whole(value: Any) -> int:
    """Raises ValueError for a fraction."""
    if int(value) != value:
        raise ValueError(f"{value} is not whole")
    return int(value)


def _phase(values: Any) -> Phase:
    try:
        start, size, batch = values
        if isinstance(size, (list, tuple)):
            height, width = size
            return Phase(float(start), (whole(height), whole(width)), whole(batch))
        return Phase(float(start), whole(size), whole(batch))
    except (ValueError, TypeError, OverflowError):
        reason = "a phase is [start, size, batch], its size a whole number or [height, width]"
        raise ValueError(f"{reason}, not {values!r}") from None
