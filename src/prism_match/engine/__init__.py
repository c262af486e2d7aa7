"""Many pairs: the one way from a list of pairs to stored matches."""
