"""Memory that a server takes ahead, and what it leaves in its heap and gives back."""

from __future__ import annotations

import ctypes
import sys

import torch

_SMALL = 2**20  # bytes: PyTorch takes memory for up to so many in other pieces than for more
_OF_SMALL = 32  # one in so many bytes


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


def reserve(size: int, device: torch.device) -> None:
    """Let PyTorch take so many bytes of a GPU's memory from its driver, and keep them free.

    Else caches take them piece by piece, while all answers wait: milliseconds each. Raises
    ValueError where there are not as many.
    """
    small = size // _OF_SMALL // _SMALL
    try:
        held = [torch.empty(_SMALL, dtype=torch.uint8, device=device) for _ in range(small)]
        held.append(torch.empty(size - small * _SMALL, dtype=torch.uint8, device=device))
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"cache_bytes, prefix_bytes: expected less than what the GPU has, but there are no "
            f"{size} bytes for prefixes and a prompt that is read, beside the model and its rows"
        ) from error
