"""From matches to maps: pairs to match, stores of matches, tracks, and reconstruction."""
