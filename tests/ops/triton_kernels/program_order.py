"""What a program reads of what it wrote itself, found by the interpreter.

Which thread holds which element of a tile is the compiler's choice, and may differ between a store
and a load: what one thread wrote another may read, and without a barrier between them too early.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder

INSIDE = ("/triton/runtime/", "/triton/language/", __file__)


@contextlib.contextmanager
def unordered_reads() -> Iterator[set[tuple[str, str]]]:
    """Inside, the lines that read, and that wrote, an address with no `tl.debug_barrier` between
    them in one program."""
    found: set[tuple[str, str]] = set()
    written: list[tuple[np.ndarray, str]] = []
    plain = {
        name: getattr(InterpreterBuilder, name)
        for name in ("create_masked_load", "create_masked_store", "create_barrier", "set_grid_idx")
    }

    def load(self: Any, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        read = _addresses(pointers, mask)
        found.update((_line(), line) for stored, line in written if _meet(read, stored))
        return plain["create_masked_load"](self, pointers, mask, *rest, **options)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        written.append((_addresses(pointers, mask), _line()))
        return plain["create_masked_store"](self, pointers, value, mask, *rest)

    def barrier(self: Any) -> Any:
        written.clear()
        return plain["create_barrier"](self)

    def next_program(self: Any, *place: int) -> Any:
        written.clear()
        return plain["set_grid_idx"](self, *place)

    for name, function in zip(plain, (load, store, barrier, next_program), strict=True):
        setattr(InterpreterBuilder, name, function)
    try:
        yield found
    finally:
        for name, function in plain.items():
            setattr(InterpreterBuilder, name, function)


def _addresses(pointers: Any, mask: Any) -> np.ndarray:
    at, inside = np.broadcast_arrays(pointers.data, mask.data)
    return at[inside.astype(bool)]


def _meet(a: np.ndarray, b: np.ndarray) -> bool:
    if not a.size or not b.size or a.max() < b.min() or b.max() < a.min():
        return False
    return bool(np.isin(a, b).any())


def _line() -> str:
    """The kernel's line that runs: the innermost outside of Triton and of this file."""
    for frame in reversed(traceback.extract_stack()):
        if not any(part in frame.filename for part in INSIDE):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    raise AssertionError("called by no kernel")
