"""prism-match: sub-pixel correspondences between two photos, by PRISM (ACM MM 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prism_match.errors import UserError

if TYPE_CHECKING:
    from prism_match.alignment import align
    from prism_match.config import ModelConfig
    from prism_match.engine import Matcher
    from prism_match.matcher import match
    from prism_match.matches import Matches
    from prism_match.model.prism import PRISM

__version__ = "0.1.0"
__all__ = ["PRISM", "Matcher", "Matches", "ModelConfig", "UserError", "align", "match"]

_HOMES = {
    "align": "prism_match.alignment",
    "PRISM": "prism_match.model.prism",
    "Matcher": "prism_match.engine",
    "match": "prism_match.matcher",
    "Matches": "prism_match.matches",
    "ModelConfig": "prism_match.config",
}


def __getattr__(name: str) -> Any:
    # PyTorch takes a second to import; whoever only asks for help or the version need not wait.
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
