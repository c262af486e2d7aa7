from __future__ import annotations

import platform
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import held_by_another_process

from prism_match import Matcher, memory
from prism_match.config import PRESETS


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="is about glibc's malloc")
def test_large_blocks_go_back_as_soon_as_they_are_free() -> None:
    before, after = held_by_another_process(
        """
import random
import torch
from prism_match.memory import give_back_large_blocks
give_back_large_blocks()
torch.ones(7 * 2**20)
has()
draw = random.Random(0)
live = []
for _ in range(60):  # of 1 to 28 MiB, in no order, and small ones between them that stay
    live.append([torch.ones(draw.randrange(2**18, 7 * 2**20)), torch.ones(20000)])
    live[draw.randrange(len(live))][0] = None
live = [small for _, small in live]
has()
"""
    )
    assert after < before + 60


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="is about glibc's malloc")
def test_holes_go_back() -> None:
    full, with_holes, after = held_by_another_process(
        """
import numpy as np
from prism_match.memory import give_back_holes
live = [np.ones(8000) for _ in range(3200)]  # 200 MiB, in blocks that are too small for maps of their own
has()
live = live[::10]
has()
give_back_holes()
has()
"""
    )
    assert with_holes > 0.8 * full and after < with_holes - 120


def test_not_all_the_time(monkeypatch: pytest.MonkeyPatch, photo: np.ndarray) -> None:
    """A match on a CPU gives back what others left, unless one has just done so."""
    calls: list[int] = []
    monkeypatch.setattr(memory, "glibc", lambda: SimpleNamespace(malloc_trim=calls.append))
    matcher = Matcher(config=PRESETS["tiny"], device="cpu", rescale="never", rotate="never")
    monkeypatch.setattr(memory, "_last", -np.inf)
    for _ in range(2):
        matcher.match(photo[:64, :64], photo[:64, :64])
    assert calls == [0]
    monkeypatch.setattr(memory, "_last", memory.time.monotonic() - memory.PAUSE)
    list(matcher.match_many([(photo[:64, :64], photo[:64, :64])]))
    assert calls == [0, 0]
    monkeypatch.setattr(memory, "glibc", lambda: None)  # as on macOS
    monkeypatch.setattr(memory, "_last", -np.inf)
    matcher.match(photo[:64, :64], photo[:64, :64])
