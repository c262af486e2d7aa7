"""What the server says when it does not do what it was asked: a status and one sentence."""

from __future__ import annotations

import logging

log = logging.getLogger("prism_match.serve")


class Refused(Exception):
    def __init__(self, status: int, sentence: str, **headers: str):
        super().__init__(sentence)
        self.status, self.sentence = status, sentence
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class Gone(Exception):
    """The client went away: nobody is there to be answered."""


def complain(what: str, error: BaseException) -> None:
    """To the log: the kind of an error and its place, and not its text, which may hold what a client sent."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = f" in {place.tb_frame.f_code.co_filename}:{place.tb_lineno}" if place else ""
    log.error("%s: %s%s", what, type(error).__name__, where)
