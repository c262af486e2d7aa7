"""The matcher that most people use, and the plain description that makes the same one anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prism_match.config import ModelConfig, Precision, Rotate
from prism_match.engine.methods import Prism
from prism_match.engine.photos import Resize
from prism_match.engine.run import Engine, Limits, PairLike
from prism_match.matcher import DEFAULT_SIZE, DTYPES, PairMatcher
from prism_match.matches import Matches
from prism_match.weights import SHIPPED


class Matcher(PairMatcher):
    """Matches photos. Load it once, use it for many pairs.

    matcher = Matcher()
    matches = matcher.match("a.jpg", "b.jpg")
    """

    def match_many(
        self, pairs: Iterable[PairLike], batch_size: int = 8, *, details: bool = False, cache_mib: int = 4096
    ) -> Iterator[Matches]:
        """One result per pair, in order, as they are ready. A pair is (image0, image1), or with masks
        (image0, image1, mask0, mask1), of which either mask may be None.

        Photos are known by their content: the features of one are computed once, however many pairs it is
        in, as long as the photos in use at a time fit into `cache_mib`; beyond that the least recently used
        ones are dropped and computed again if they come back. Pairs of equal padded size are matched
        `batch_size` at a time."""
        limits = Limits(batch_size, cache_mib * 2**20)
        return Engine(Prism(self, details), Resize.largest(self.size), limits).stream(pairs)


@dataclass(frozen=True)
class MatcherSettings:
    """What `Matcher` takes, as plain values: all that a worker needs to match as any other does."""

    weights: str | None = None
    config: dict[str, Any] | None = None  # of the model
    device: str = "auto"
    precision: Precision = "auto"
    size: int = DEFAULT_SIZE
    threshold: float | None = None
    max_matches: int | None = None
    rotate: Rotate = "auto"
    polish: bool = True

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> MatcherSettings:
        return MatcherSettings(**json.loads(text))

    @staticmethod
    def of(matcher: PairMatcher, device: str = "auto") -> MatcherSettings:
        """Of a matcher that is there, for another machine: its precision and, unless they ship with the
        package, the path of its weights."""
        info = matcher.info
        return MatcherSettings(
            weights=None if info.path in (None, SHIPPED) else str(Path(info.path).absolute()),
            config=info.config.to_dict(), device=device,
            precision=next(name for name, dtype in DTYPES.items() if dtype == matcher.dtype),
            size=matcher.size, threshold=matcher.threshold, max_matches=matcher.max_matches,
            rotate=matcher.rotate, polish=matcher.polish,
        )  # fmt: skip

    def open(self) -> Matcher:
        values = asdict(self)
        config = values.pop("config")
        return Matcher(**values, config=None if config is None else ModelConfig.from_dict(config))
