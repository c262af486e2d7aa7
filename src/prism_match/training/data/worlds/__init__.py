"""Procedural 3-D worlds textured with photos."""

from prism_match.training.data.worlds.families import FAMILIES
from prism_match.training.data.worlds.source import Worlds

__all__ = ["FAMILIES", "Worlds"]
