"""What a benchmark can be asked for, and the model that is asked of it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from prism_match.config import ModelConfig, Precision, Rescale, Rotate, load_model_config
from prism_match.engine import Matcher
from prism_match.engine.methods import Method, Prism, TiledPrism, as_method
from prism_match.engine.photos import Resize
from prism_match.errors import UserError
from prism_match.evaluation.pairs import AnyPair, choose, name_apart
from prism_match.evaluation.runner import Run
from prism_match.geometry import Backend

DEFAULT_SIZE = 832  # longer side, the paper's for its ablations


@dataclass(frozen=True)
class Options:
    data: Path
    method: str = "prism"  # or "sift", or "module:function"
    size: int | None = None  # None: the benchmark's own
    ransac: Backend = "opencv"
    threshold: float | None = None  # of RANSAC, in pixels; None: the back end's usual one
    pairs: int | None = None  # None: all
    seed: int = 0
    weights: tuple[str | Path, ...] = ()  # none: the shipped ones
    configs: tuple[str, ...] = ()  # presets or files; none: the one in the weights
    device: str = "auto"
    precision: Precision = "auto"
    confidence: float | None = None  # least one of a match; None: the model's theta_c
    rotate: Rotate = "auto"
    rescale: Rescale = "auto"
    polish: bool = True
    tiles: bool = False
    own_size: bool = True  # polish at the size that photos have before they are resized, as `Matcher` does
    # Localization
    top: int | None = None  # map photos that a query is matched with; None: the benchmark's
    within: tuple[tuple[float, float], ...] = ()  # metres and degrees to count poses by; none: the usual ones
    pair_list: Path | None = None  # `query map_photo` a line; None: the benchmark's, or retrieval
    snap: float | None = None  # most pixels from a match to a point of the map; None: the map's
    depth_scale: float = 1000.0  # what depth maps have for a metre
    run: Run = field(default_factory=Run)

    def resize(self, longer: int) -> Resize:
        return Resize(longer=longer, own_size=self.polishes_at_own_size)

    @property
    def polishes_at_own_size(self) -> bool:
        return self.own_size and self.polish and self.method == "prism"

    def choose(self, pairs: list[AnyPair]) -> list[AnyPair]:
        return choose(name_apart(pairs), self.pairs, self.seed)

    def make_method(self) -> Method:
        """The one method that most benchmarks measure."""
        if self.tiles and (self.method != "prism" or self.run.cluster is not None):
            raise UserError("--tiles are for PRISM itself, in this process")
        if self.method != "prism":
            return as_method(self.method)
        matcher = self.make_matcher(*self.single())
        return TiledPrism(matcher.adjusted(tiles="auto")) if self.tiles else Prism(matcher)

    def single(self) -> tuple[str | Path | None, ModelConfig | None]:
        if len(self.weights) > 1 or len(self.configs) > 1:
            raise UserError("several weights or configs are compared by the ablation benchmark only")
        config = load_model_config(self.configs[0]) if self.configs else None
        return (self.weights[0] if self.weights else None), config

    def make_matcher(
        self, weights: str | Path | None, config: ModelConfig | None, confidence: float | None = None
    ) -> Matcher:
        if self.method != "prism":
            raise UserError(f"this benchmark looks into the model: it cannot measure {self.method}")
        least = self.confidence if confidence is None else confidence
        matcher = Matcher(
            weights,
            device=self.device,
            precision=self.precision,
            threshold=least,
            config=config,
            rotate=self.rotate,
            rescale=self.rescale,
            polish=self.polish,
        )
        if not matcher.info.trained:
            warn_once("the weights are untrained (random): the numbers mean nothing yet")
        return matcher


@cache
def warn_once(text: str) -> None:
    print(f"prism: {text}", file=sys.stderr)
