"""Many pairs: the one way from a list of pairs to stored matches."""

from prism_match.engine.matcher import Matcher, MatcherSettings
from prism_match.engine.methods import Prism
from prism_match.engine.photos import Resize
from prism_match.engine.run import Clock, Engine, Limits, Outcome
from prism_match.engine.store import MatchStore, Names
from prism_match.engine.table import MatchTable

__all__ = [
    "Clock", "Engine", "Limits", "MatchStore", "MatchTable", "Matcher", "MatcherSettings", "Names", "Outcome",
    "Prism", "Resize",
]  # fmt: skip
