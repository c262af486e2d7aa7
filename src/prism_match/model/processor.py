"""The CPU: what it is quick in.

Which of several ways a computation goes follows from this, and not from a trial of them: while other programs
use the machine a trial tells now this and now that, and with it both times and last digits would change.
"""

from __future__ import annotations

import platform
import re
from functools import lru_cache
from pathlib import Path

import torch

ZEN_5 = 26  # the family of AMD's first CPUs that compute 512 bits at once
MOST_THREADS = 16  # more wait for memory, and for one another: they are better served by PyTorch's own ways


def is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


@lru_cache
def amd_family() -> int | None:
    """None: another maker's, or not known."""
    try:
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not on Linux
        told = platform.processor()
    family = re.search(r"\bfamily\s*:?\s*(\d+)", told, re.IGNORECASE)
    return int(family[1]) if family and "AuthenticAMD" in told else None


def computes_512_bits() -> bool:
    """At once: Zen 4 knows the instructions, but takes two steps for each."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and (amd_family() or ZEN_5) >= ZEN_5


def mkl_is_slow() -> bool:
    """Whether MKL, which multiplies for PyTorch, uses half of the CPU's width: so it does with others than
    Intel's."""
    return computes_512_bits() and amd_family() is not None


def few_threads() -> bool:
    return torch.get_num_threads() <= MOST_THREADS


@lru_cache
def has_amx() -> bool:
    """Whether the CPU multiplies tiles of bf16, many times as fast as anything else that it does."""
    ask = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return ask is not None and ask()


def cpu_has_bf16() -> bool | None:
    """Whether the CPU has instructions for bf16; None where that cannot be told."""
    if not is_x86():
        return None
    known = [getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile")]
    return None if None in known else any(ask() for ask in known if ask is not None)
