"""The grid's tables: every pair of blocks meets once, and no two rows are stored in one place."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from path_attention.ops.triton import grid as grid_module
from path_attention.ops.triton.grid import BLOCK, Grid, lasting, make_grid

CPU = torch.device("cpu")
packings = st.lists(
    st.one_of(st.integers(0, 700), st.integers(1, 11).map(lambda n: n * BLOCK)),
    min_size=1,
    max_size=6,
).filter(any)


class Sequence:
    """One sequence's rows of the tables, read as the kernels read them."""

    def __init__(self, grid: Grid, n: int):
        row = grid.sequences[n].tolist()
        self.size, self.first, self.table, self.levels = row[0], row[1], row[2:], grid.levels

    def stored(self, i: int, level: int, kind: int) -> int:
        within = i % (1 << level)
        return self.table[3 * level + kind] + ((i >> (level + 1)) << level) + within

    def node(self, unit: int, level: int) -> int:
        return self.table[3 * level + 2] + unit

    def right(self, i: int, level: int) -> bool:
        """Whether block i's queries meet a left unit at this level."""
        return (i >> level) % 2 == 1

    def left(self, i: int, level: int) -> bool:
        """Whether block i's keys are met from a right unit at this level."""
        return (i >> level) % 2 == 0 and ((i >> level) + 1) << level < self.size

    def blocks(self) -> Iterator[tuple[int, int]]:
        """(block, level) for all blocks and levels."""
        return ((i, level) for level in range(self.levels) for i in range(self.size))


def sequences(grid: Grid) -> list[Sequence]:
    return [Sequence(grid, n) for n in range(len(grid.sequences))]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(lengths=packings)
def test_every_pair_meets_once(lengths):
    for s in sequences(make_grid(tuple(lengths), CPU)):
        met = []
        for i, level in s.blocks():
            if s.right(i, level):
                left = ((i >> level) - 1) << level
                assert all(s.left(j, level) for j in range(left, left + (1 << level)))
                met += [(i, j) for j in range(left, left + (1 << level))]
        assert sorted(met) == [(i, j) for i in range(s.size) for j in range(i)]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(lengths=packings)
def test_what_is_stored_fills_its_tables_without_overlap(lengths):
    grid = make_grid(tuple(lengths), CPU)
    queries, keys, nodes = [], [], []
    for s in sequences(grid):
        queries += [s.stored(i, level, 0) for i, level in s.blocks() if s.right(i, level)]
        keys += [s.stored(i, level, 1) for i, level in s.blocks() if s.left(i, level)]
        nodes += [s.node(u, level) for level in range(1, s.levels) for u in range(s.size >> level)]
    assert sorted(queries) == list(range(grid.queries))
    assert sorted(keys) == list(range(grid.keys))
    assert sorted(nodes) == list(range(grid.nodes))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(lengths=packings)
def test_a_unit_is_stored_in_one_piece(lengths):
    # The loops read a left unit's keys, and a right unit's queries, as consecutive rows.
    for s in sequences(make_grid(tuple(lengths), CPU)):
        for i, level in s.blocks():
            if i % (1 << level) == 0:
                kind = 0 if s.right(i, level) else 1
                unit = range(i, min(i + (1 << level), s.size))
                first = s.stored(i, level, kind)
                rows = [s.stored(j, level, kind) for j in unit]
                assert rows == list(range(first, first + len(unit)))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(lengths=packings)
def test_blocks_cover_every_token_once(lengths):
    grid = make_grid(tuple(lengths), CPU)
    starts = [0, *accumulate(lengths)]
    full = [n for n in range(len(lengths)) if lengths[n]]  # empty documents are left out
    covered = []
    for place, (token, valid, index, n) in enumerate(grid.blocks.tolist()):
        s = Sequence(grid, n)
        assert token == starts[full[n]] + index * BLOCK
        assert valid == min(BLOCK, lengths[full[n]] - index * BLOCK)
        assert place == s.first + index < s.first + s.size
        covered += [(token + row, place * BLOCK + row) for row in range(valid)]
    assert [token for token, _ in covered] == list(range(sum(lengths)))
    assert [position for _, position in covered] == grid.positions.tolist()
    assert grid.count == len(grid.blocks)


@pytest.mark.parametrize(("length", "levels"), [(1, 0), (64, 0), (65, 1), (129, 2), (2**20, 14)])
def test_levels_and_linear_size(length, levels):
    grid = make_grid((length,), CPU)
    assert grid.levels == levels
    blocks = -(-length // BLOCK)
    assert grid.nodes <= blocks
    # A block's queries are stored once for each set bit of its index, its keys for each clear one.
    assert grid.queries + grid.keys <= levels * blocks
    assert grid.queries == sum(i.bit_count() for i in range(blocks))


def test_tables_are_built_once_by_another_thread(monkeypatch):
    built = []

    def build(length, device):
        built.append((length, threading.current_thread() is threading.main_thread()))
        return [length]

    @contextlib.contextmanager
    def stream(of):
        yield

    capturing = [False]
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(synchronize=list))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(grid_module, "_CAPTURED", {})
    table, gpu = lasting(build), torch.device("cuda:0")
    first = table(1, gpu)
    assert table(1, gpu) is first and built == [(1, False)]
    assert table(1, CPU) == [1] and built[1:] == [(1, True)]
    for length in range(2, 100):
        table(length, gpu)
    assert table(1, gpu) is not first  # not all are kept
    capturing[0] = True
    kept = table(50, gpu)
    assert list(grid_module._CAPTURED.values()) == [kept] == [[50]]
