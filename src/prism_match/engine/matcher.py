"""The matcher that most people use, and the plain description that makes the same one anywhere."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prism_match.config import ModelConfig, Precision, Rescale, Rotate, Runtime, Tiles
from prism_match.engine.methods import Prism
from prism_match.engine.photos import Resize
from prism_match.engine.run import Engine, Limits, PairLike
from prism_match.engine.table import MatchTable
from prism_match.errors import UserError
from prism_match.images import ImageLike
from prism_match.matcher import DEFAULT_SIZE, DTYPES, PairMatcher
from prism_match.matches import Matches
from prism_match.weights import SHIPPED

if TYPE_CHECKING:
    from prism_match.maps.sequence import Tracks


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
        `batch_size` at a time. With tiles, pairs are matched one by one, and nothing is kept between them."""
        if self.tiles is not None:
            return (self.match(*pair, details=details) for pair in pairs)
        limits = Limits(batch_size, cache_mib * 2**20)
        return Engine(Prism(self, details), Resize.largest(self.size), limits).stream(pairs)

    def match_groups(
        self, query: ImageLike, others: Iterable[ImageLike], batch_size: int = 8, *, cache_mib: int = 4096
    ) -> MatchTable:
        """The matches of one image with each of the others, in one table. The features of the query are
        computed once; the others are taken as `match_many` takes them."""
        if isinstance(others, (str, os.PathLike)):
            raise UserError("the others must be several images, not one")
        pairs: Iterable[PairLike] = ((query, other) for other in others)
        if isinstance(others, Sequence):
            pairs = list(pairs)  # which is read ahead
        return MatchTable.of(self.match_many(pairs, batch_size, cache_mib=cache_mib))

    def track(
        self,
        frames: str | os.PathLike[str] | Iterable[ImageLike],
        *,
        again: int = 1,
        gap: int = 15,
        min_length: int = 2,
        cache_mib: int = 2048,
        progress: bool = False,
    ) -> Tracks:
        """Points followed through the frames of a video: a file of one (extra: video), or images in order.

        Each frame is matched with the one before it and, where it shows again what an earlier one showed,
        with that: of the frames at least `gap` before it with the `again` that look most alike. The backbone
        sees each frame once. The matches are joined into tracks; those that are seen in at least `min_length`
        frames are returned.

        cache_mib: for features of earlier frames; beyond it every second one is forgotten, and so on."""
        from prism_match.maps.sequence import SequenceOptions, follow
        from prism_match.maps.video import read_frames

        if self.tiles is not None:
            raise UserError("track: frames are matched whole, which needs tiles=None")
        options = SequenceOptions(again, gap, min_length, cache_mib * 2**20)
        if isinstance(frames, (str, os.PathLike)):
            frames = (frame.pixels for frame in read_frames(Path(frames)))
        # Frames are neither turned nor shrunk: that would be another pass of the backbone.
        return follow(self.adjusted(rotate="never", rescale="never"), frames, options, progress=progress)


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
    rescale: Rescale = "auto"
    polish: bool = True
    tiles: Tiles | None = None
    tile_memory: float | None = None
    backend: Runtime = "torch"

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
            rotate=matcher.rotate, rescale=matcher.rescale, polish=matcher.polish,
            tiles=matcher.tiles, tile_memory=matcher.tile_memory, backend=matcher.backend,
        )  # fmt: skip

    def open(self) -> Matcher:
        values = asdict(self)
        config = values.pop("config")
        return Matcher(**values, config=None if config is None else ModelConfig.from_dict(config))
