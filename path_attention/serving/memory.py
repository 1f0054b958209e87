"""The process's heap: what a busy server leaves in it, and how the system gets that back."""

from __future__ import annotations

import ctypes
import sys


def give_back() -> bool:
    """Return pages of the heap that nothing uses any more; whether the C library can.

    Caches come and go in all sizes, and glibc keeps the holes that they leave, for ever if no other
    request fills them. Its `malloc_trim` gives back whole pages of them, in all arenas. Other C
    libraries, which have no such call, do so by themselves.
    """
    if not sys.platform.startswith("linux"):
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    trim(0)
    return True
