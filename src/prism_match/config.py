"""The model's settings: the paper's values are the defaults, its ablations are named presets."""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from prism_match.errors import UserError

Settings = TypeVar("Settings")

# Choices that Python and the command line share.
Precision = Literal["auto", "fp32", "bf16", "fp16"]
Runtime = Literal["torch", "onnx", "auto"]  # of the model
Rotate = Literal["auto", "always", "never"]
Rescale = Literal["auto", "never"]
Tiles = Literal["auto"]
Backend = Literal["opencv", "usac", "poselib"]  # of two views' geometry
PnpBackend = Literal["auto", "poselib", "opencv"]  # of a camera's pose
Sharing = Literal["auto", "shared", "per-image"]  # of cameras among photos
Mapper = Literal["incremental", "global"]
Projection = Literal["auto", "plane", "cylindrical", "spherical"]  # of a panorama
AlignModel = Literal["similarity", "homography", "warp"]  # from one picture to another, the simplest first

# Photos that show the same place with less probability are taken to show another one: a pair too many may
# make one map of two places, one of many that is missing is not missed.
UNLIKELY = 0.2
# Of a model; several times what anyone has trained.
WIDEST = 4096  # channels
MOST_LAYERS = 64
WIDEST_WINDOW = 31


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of PRISM and its two thresholds. Frozen: change a copy with `replace`."""

    # Backbone: ResNet-FPN, widths at 1/2, 1/4 and 1/8 of the image.
    stage_dims: tuple[int, int, int] = (128, 196, 256)
    coarse_dim: int = 256
    fine_dim: int = 128

    # Multi-scale Pruning Modules.
    layers: int = 4
    heads: int = 4
    levels: tuple[int, ...] = (4, 2, 1)  # r_i: kernel = stride of Conv_i, from coarse to fine
    attention: Literal["sadpa", "linear"] = "sadpa"  # "linear": LoFTR's, as an ablation
    position: Literal["rotary", "absolute"] = "rotary"
    pruning: Literal["every", "last", "none"] = "every"  # which MPMs prune
    estimator: Literal["nmi", "cosine"] = "nmi"
    theta_p: float = 0.05  # a cell whose estimated NMI is lower is pruned

    # Match prediction.
    weighted_softmax: bool = True
    temperature: float = 0.1
    theta_c: float = 0.2  # matches at or below this confidence are dropped
    border: int = 1  # cells along the image border that give no matches

    # Sub-pixel refinement.
    window: int = 5  # side of the window, in cells of the fine map
    fine_heads: int = 4

    def __post_init__(self) -> None:
        for name in ("stage_dims", "levels"):
            values = getattr(self, name)
            if not values or any(isinstance(n, bool) or not isinstance(n, int) for n in values):
                raise ValueError(f"{name} must be whole numbers, not {values!r}")
        if len(self.stage_dims) != 3:
            raise ValueError(f"stage_dims must be three numbers, not {self.stage_dims!r}")
        # A file of weights brings its settings along: what they ask for is made before its tensors are seen.
        for dim in (*self.stage_dims, self.coarse_dim, self.fine_dim):
            if not 1 <= dim <= WIDEST:
                raise ValueError(f"a layer has 1 to {WIDEST} channels, not {dim}")
        for name, kind in get_type_hints(type(self)).items():
            value, choices = getattr(self, name), get_args(kind)
            if choices and all(isinstance(c, str) for c in choices) and value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
        for dim, heads in ((self.coarse_dim, self.heads), (self.fine_dim, self.fine_heads)):
            # Each head needs pairs of channels for the rotation; 2-D sinusoids come in fours.
            if heads < 1 or dim % (2 * heads) or dim % 4:
                raise ValueError(f"{dim} channels cannot be split into {heads} heads of even width")
        if not 1 <= self.layers <= MOST_LAYERS:
            raise ValueError(f"there must be 1 to {MOST_LAYERS} layers, not {self.layers}")
        if self.levels[-1:] != (1,) or any(r not in (1, 2, 4) for r in self.levels):
            raise ValueError(f"levels must be taken from 4, 2 and 1 and end with 1, not {self.levels}")
        if not 3 <= self.window <= WIDEST_WINDOW or self.window % 2 == 0:
            raise ValueError(f"window must be odd and from 3 to {WIDEST_WINDOW}, not {self.window}")
        if len(self.levels) > 3 or not 0 <= self.border <= WIDEST:
            raise ValueError("there are at most 3 levels, and a border is at least 0")
        for name in ("theta_p", "theta_c"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, not {getattr(self, name)}")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be positive, not {self.temperature}")

    def replace(self, **changes: Any) -> ModelConfig:
        return dataclasses.replace(self, **changes)

    def fits(self, other: ModelConfig) -> bool:
        """Whether both have the same weights: they differ in thresholds and the like at most."""
        free = {"theta_p": 0.0, "theta_c": 0.0, "temperature": 1.0, "border": 0, "weighted_softmax": True}
        return self.replace(**free) == other.replace(**free)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        return cls(**checked({f.name: f.default for f in dataclasses.fields(cls)}, values))


# The full model, then each row of the paper's ablation tables, then a small one for experiments.
PRESETS: dict[str, ModelConfig] = {
    "paper": ModelConfig(),
    "absolute-positions": ModelConfig(position="absolute"),
    "no-pruning": ModelConfig(pruning="none"),
    "linear-attention": ModelConfig(attention="linear"),
    "single-level": ModelConfig(levels=(1,)),
    "unweighted-softmax": ModelConfig(weighted_softmax=False),
    "prune-last": ModelConfig(pruning="last"),
    "cosine": ModelConfig(estimator="cosine"),
    "tiny": ModelConfig(stage_dims=(16, 24, 32), coarse_dim=32, fine_dim=16, layers=2, heads=2, fine_heads=2),
}


def checked(defaults: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """`values` with tuples for lists. ValueError if one has no default, or is not of the default's type."""
    if not isinstance(values, dict):
        raise ValueError("settings must be a table of names and values")
    unknown = sorted(map(str, set(values) - set(defaults)))
    if unknown:
        raise ValueError(f"unknown settings: {', '.join(unknown)}")
    good: dict[str, Any] = {}
    for name, value in values.items():
        value = tuple(value) if isinstance(value, list) else value
        kind = type(defaults[name])
        if isinstance(value, bool) != (kind is bool) or not isinstance(
            value, (int, float) if kind is float else kind
        ):
            raise ValueError(f"{name} must be of type {kind.__name__}, not {value!r}")
        good[name] = value
    return good


def check_seed(seed: Any) -> None:
    """One that every library takes."""
    if not isinstance(seed, numbers.Integral) or not 0 <= int(seed) < 2**31:
        raise UserError(f"seed must be a whole number of at least 0 and below 2^31, not {seed!r}")


def load_model_config(name_or_file: str | Path) -> ModelConfig:
    """A preset by its name, or the settings in a .json or .toml file (unset ones: the paper's)."""
    path = preset_or_file(name_or_file, PRESETS)
    if isinstance(path, ModelConfig):
        return path
    try:
        text = path.read_text(encoding="utf-8")
        values = parse_toml(text) if path.suffix == ".toml" else parse_json(text)
        return ModelConfig.from_dict(values)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: {error}") from error


def preset_or_file(name_or_file: str | Path, presets: dict[str, Settings]) -> Settings | Path:
    """The preset of that name, or the path of a file that is there."""
    if str(name_or_file) in presets:
        return presets[str(name_or_file)]
    path = Path(name_or_file)
    if not path.is_file():
        raise UserError(f"{name_or_file}: neither a file nor one of {', '.join(presets)}")
    return path


def parse_json(text: str | bytes) -> Any:
    """ValueError for whatever is no JSON, or is nested so deeply that it is a trap."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def parse_toml(text: str) -> dict[str, Any]:
    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib  # type: ignore[import-not-found,no-redef]
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
