"""What the server says when it does not do what it was asked: a status and one sentence."""

from __future__ import annotations


class Refused(Exception):
    def __init__(self, status: int, sentence: str, **headers: str):
        super().__init__(sentence)
        self.status, self.sentence = status, sentence
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class Gone(Exception):
    """The client went away: nobody is there to be answered."""
