"""How often worlds are seen in ways that are hard for a matcher; the table [worlds] of a settings file."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


@dataclass(frozen=True)
class Variety:
    """Shares in [0, 1], each drawn by itself for every world (or view) but for `near` and `zoom`, which
    exclude each other. All 0 leaves plain views of plain days."""

    near: float = 0.12  # worlds seen twice from nearly the same place
    zoom: float = 0.12  # worlds seen at 3 to `max_scale` times the scale
    max_scale: float = 8.0  # largest ratio of scales, of all pairs
    night: float = 0.08  # views lit by lamps and windows
    snow: float = 0.06  # worlds with snow in one view or both: it hides what it lies on
    crowds: float = 0.2  # views with rows of people, who hide what is behind them
    alike: float = 0.3  # worlds whose buildings are of one make, so that one side looks like another
    twins: float = 0.04  # pairs of two buildings of one make in different places: nothing of them matches
    still_skies: float = 0.3  # worlds with the same clouds in both views, which do not match either
    families: dict[str, float] = field(default_factory=dict)  # shares; those that are not named have 1

    def __post_init__(self) -> None:
        for f in fields(self):
            if f.type == "float" and f.name != "max_scale" and not 0 <= getattr(self, f.name) <= 1:
                raise ValueError(f"{f.name} must be from 0 to 1, not {getattr(self, f.name)}")
        if self.near + self.zoom > 1:
            raise ValueError(f"near and zoom must not be more than 1 together, not {self.near + self.zoom:g}")
        if not 1 <= self.max_scale <= 20:
            raise ValueError(f"max_scale must be from 1 to 20, not {self.max_scale}")
        for name, share in self.families.items():
            if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < 1e6:
                raise ValueError(f"the share of {name} must be a number of at least 0, not {share!r}")
