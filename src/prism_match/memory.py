"""What a CPU's allocator keeps of what was freed, given back to the system.

On a CPU tensors are blocks of `malloc`. glibc keeps free ones, and images of many sizes leave holes that the
next ones do not fit into: a process that goes on for long takes more and more."""

from __future__ import annotations

import ctypes
import platform
import time
from functools import cache

PAUSE = 1.0  # seconds: what goes back too often has to be asked for again
# Bytes of a block that goes back as soon as it is free, and the parameter of glibc's `mallopt`.
LARGE, MMAP_THRESHOLD = 2**20, -3

_last = -PAUSE


@cache
def glibc() -> ctypes.CDLL | None:
    """None: the system has another C library."""
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None


def give_back_holes() -> None:
    """At most once in a while."""
    global _last
    library, now = glibc(), time.monotonic()
    if library is not None and now - _last >= PAUSE:
        _last = now
        library.malloc_trim(0)


@cache
def give_back_large_blocks() -> None:
    """As soon as they are free, from now on, in all of this process: no holes add up while a pair is matched,
    either. It takes a seventh more time, so only where someone has set a limit."""
    if (library := glibc()) is not None:
        library.mallopt(MMAP_THRESHOLD, LARGE)
