"""Matches in the formats of other tools."""
