"""Races of kernels, found by the interpreter: between threads of a program, and between programs.

Which thread holds which element of a tile is the compiler's choice and may differ from one access
to the next, even by the same pointers: a load may be made wider, or repeated in another layout. So
two accesses of an address of which one writes need a `tl.debug_barrier` between them, unless the
first is a read and the second writes what the very element that was read became: that waits for it
wherever it is. Bulk copies (descriptors) do not see earlier stores of their program even behind a
barrier. Between two programs of a launch nothing but atomics brings order.

Not looked at: an atomic of one program that another one reads; and what else is made of a read that
a store of its elements waits for, where the tile has fewer elements than the program has threads
(then several threads read one, and the store waits for one of them).
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

INSIDE = ("/triton/runtime/", "/triton/language/", __file__)
ELEMENTWISE = ("unary_op", "binary_op", "ternary_op", "create_fma", "cast_impl", "create_fp_to_fp")
PATCHED = (*ELEMENTWISE, "create_dot", "create_masked_load", "create_masked_store")
PATCHED += ("create_atomic_rmw", "create_descriptor_load", "create_barrier", "set_grid_idx")
MOST_SHOWN = 100  # of a launch's races between programs


class Race(NamedTuple):
    """What happens to an address in no certain order: the kernels' lines."""

    kind: str
    first: str
    second: str


class Spans(NamedTuple):
    """Bytes from starts to ends, sorted and apart."""

    starts: np.ndarray
    ends: np.ndarray

    def meet(self, other: Spans) -> bool:
        if not self.starts.size or not other.starts.size:
            return False
        if self.ends[-1] <= other.starts[0] or other.ends[-1] <= self.starts[0]:
            return False
        at = np.searchsorted(self.ends, other.starts, "right")
        inside = at < len(self.ends)
        return bool((self.starts[at[inside]] < other.ends[inside]).any())


class Access(NamedTuple):
    number: int
    kind: str  # "read", "write" or "atomic"
    spans: Spans
    pointers: np.ndarray
    line: str


class _Launch:
    """The accesses of a launch's programs; those of the running one since its last barrier."""

    def __init__(self, found: set[Race]) -> None:
        self.found = found
        self.programs: list[list[Access]] = []
        self.recent: list[Access] = []
        self.bulk = False
        self.numbers = itertools.count()

    def next_program(self) -> None:
        self.programs.append([])
        self.recent = []

    def add(self, kind: str, pointers: Any, mask: Any, became: frozenset[int]) -> int:
        """Note an access; `became`: reads of whose elements a write's are functions."""
        at, inside = np.broadcast_arrays(pointers.data, mask.data)
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        spans = _spans(at[inside.astype(bool)], size)
        new = Access(next(self.numbers), kind, spans, at, _line())
        for old in self.programs[-1] if self.bulk else self.recent:
            if {old.kind, kind} in ({"read"}, {"atomic"}) or not old.spans.meet(spans):
                continue
            if not (kind == "write" and old.number in became and _same_tile(old.pointers, at)):
                self.found.add(Race(f"{kind} after {old.kind}", old.line, new.line))
        self.recent.append(new)
        self.programs[-1].append(new)
        return new.number

    def finish(self) -> None:
        """Compare the programs."""
        writes, reads = self._table("write"), self._table("read", "atomic")
        starts, ends, owners = writes
        reach = np.maximum.accumulate(ends)
        clash = np.flatnonzero(starts[1:] < reach[:-1]) + 1
        for n in clash[:MOST_SHOWN]:
            other = int(np.argmax(ends[:n]))
            self._show("two programs write", owners[[other, n]], int(starts[n]), "write")
        if clash.size:
            return
        low = np.searchsorted(ends, reads[0], "right")
        high = np.searchsorted(starts, reads[1], "left")
        owners = np.append(owners, -1)
        turns = np.append(0, np.cumsum(owners[1:] != owners[:-1]))
        foreign = (owners[low] != reads[2]) | (turns[low] != turns[np.maximum(high, 1) - 1])
        for n in np.flatnonzero((low < high) & foreign)[:MOST_SHOWN]:
            one = next(k for k in range(low[n], high[n]) if owners[k] != reads[2][n])
            at = int(max(starts[one], reads[0][n]))
            both = np.array([owners[one], reads[2][n]])
            self._show("a program writes, another reads", both, at, "read", "atomic")

    def _table(self, *kinds: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All programs' spans, each one's apart, sorted by their start; whose they are."""
        rows = []
        for owner, program in enumerate(self.programs):
            spans = [x.spans for x in program if x.kind in kinds]
            if spans:
                one = _union(*(np.concatenate(x) for x in zip(*spans, strict=True)))
                rows.append((*one, np.full(len(one.starts), owner)))
        if not rows:
            return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
        table = [np.concatenate(x) for x in zip(*rows, strict=True)]
        order = np.argsort(table[0], kind="stable")
        return table[0][order], table[1][order], table[2][order]

    def _show(self, kind: str, owners: np.ndarray, address: int, *kinds: str) -> None:
        byte = Spans(np.array([address]), np.array([address + 1]))
        lines = []
        for owner, wanted in zip(owners, (("write",), kinds), strict=True):
            accesses = self.programs[owner]
            lines.append(next(x.line for x in accesses if x.kind in wanted and x.spans.meet(byte)))
        self.found.add(Race(kind, *lines))


@contextlib.contextmanager
def races(barriers: bool = True) -> Iterator[set[Race]]:
    """Inside, the races of what is launched; without barriers, as if kernels had none."""
    found: set[Race] = set()
    launch = _Launch(found)
    plain = {name: getattr(InterpreterBuilder, name) for name in PATCHED}
    plain_call = GridExecutor.__call__

    def load(self: Any, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        number = launch.add("read", pointers, mask, frozenset())
        result = plain["create_masked_load"](self, pointers, mask, *rest, **options)
        result.attr["became"] = frozenset([number])
        return result

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        launch.add("write", pointers, mask, _became(value))
        return plain["create_masked_store"](self, pointers, value, mask, *rest)

    def atomic(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        launch.add("atomic", pointers, mask, frozenset())
        return plain["create_atomic_rmw"](self, operation, pointers, value, mask, *rest)

    def bulk_load(self: Any, *operands: Any) -> Any:
        launch.bulk = True
        result = plain["create_descriptor_load"](self, *operands)
        launch.bulk = False
        return result

    def barrier(self: Any) -> Any:
        if barriers:
            launch.recent = []
        return plain["create_barrier"](self)

    def next_program(self: Any, *place: int) -> Any:
        launch.next_program()
        return plain["set_grid_idx"](self, *place)

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        launch.__init__(found)
        result = plain_call(self, *arguments, **options)
        launch.finish()
        return result

    new = [_elementwise(plain[name], slice(None)) for name in ELEMENTWISE]
    new += [_elementwise(plain["create_dot"], slice(2, 3)), load, store, atomic, bulk_load, barrier]
    for name, function in zip(PATCHED, (*new, next_program), strict=True):
        setattr(InterpreterBuilder, name, function)
    GridExecutor.__call__ = call
    try:
        yield found
    finally:
        GridExecutor.__call__ = plain_call
        for name, function in plain.items():
            setattr(InterpreterBuilder, name, function)


def _elementwise(plain: Any, of: slice) -> Any:
    """An operation whose result's elements are functions of the same ones of some operands."""

    def made(self: Any, *operands: Any, **options: Any) -> Any:
        result = plain(self, *operands, **options)
        same = (x for x in operands[of] if np.shape(_data(x)) == result.data.shape)
        result.attr["became"] = frozenset().union(*map(_became, same))
        return result

    return made


def _data(x: Any) -> Any:
    return x.data if isinstance(x, TensorHandle) else None


def _became(x: Any) -> frozenset[int]:
    return x.attr.get("became", frozenset()) if isinstance(x, TensorHandle) else frozenset()


def _same_tile(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether both are by the same pointers, each of an address of its own."""
    return np.array_equal(a, b) and np.unique(a).size == a.size


def _spans(addresses: np.ndarray, size: int) -> Spans:
    starts = addresses.astype(np.int64)
    if (starts[1:] <= starts[:-1]).any():
        starts = np.unique(starts)
    apart = starts[1:] > starts[:-1] + size
    return _ranges(starts, starts + size, apart)


def _union(starts: np.ndarray, ends: np.ndarray) -> Spans:
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    return _ranges(starts, reach, starts[1:] > reach[:-1])


def _ranges(starts: np.ndarray, reach: np.ndarray, apart: np.ndarray) -> Spans:
    """Sorted starts, how far each and those before it reach, and which gaps lie between them."""
    known = starts.size > 0
    first, last = np.append(known, apart), np.append(apart, known)
    return Spans(starts[first[: starts.size]], reach[last[: starts.size]])


def _line() -> str:
    """The kernel's line that runs: the innermost outside of Triton and of this file."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in INSIDE):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    raise AssertionError("called by no kernel")
