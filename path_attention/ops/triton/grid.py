"""Where every block of every sequence lies, and where each level of the tree keeps its units.

docs/algorithm.md §3. Sequence by sequence, blocks of 64 tokens are the leaves. At level ℓ, units of
2^ℓ blocks meet in pairs. Block X's queries take part where bit ℓ of X is set (its unit is a right
one), its keys where it is clear and a right unit follows. So only these rows of a level are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

BLOCK = 64
_Table = TypeVar("_Table")
_BUILDER = ThreadPoolExecutor(1, thread_name_prefix="path_attention")
_CAPTURED: dict[tuple, Any] = {}


def lasting(build: Callable[..., _Table]) -> Callable[..., _Table]:
    """Decorator of a function (*key, device) → tables: build once, keep for later calls.

    Another thread builds, on a stream of its own: while a thread warms a CUDA graph up, what it
    allocates belongs to the graph, and so would a table. A table that a graph was captured with is
    never dropped, since nobody tells when the graph is. (A capture itself cannot build: run once
    with the same lengths before.)
    """

    @lru_cache(maxsize=64)
    def built(*key: Any) -> _Table:
        if key[-1].type != "cuda":
            return build(*key)
        return _BUILDER.submit(_on_own_stream, build, key).result()

    def table(*key: Any) -> _Table:
        found = built(*key)
        if key[-1].type == "cuda" and torch.cuda.is_current_stream_capturing():
            _CAPTURED[(build.__name__, *key)] = found
        return found

    return table


def _on_own_stream(build: Callable[..., _Table], key: tuple) -> _Table:
    stream = torch.cuda.Stream(key[-1])
    with torch.cuda.stream(stream):
        found = build(*key)
    stream.synchronize()
    return found


@dataclass(frozen=True, eq=False)
class Grid:
    """The tables that kernels read, on the device; counts are of blocks unless said otherwise.

    Attributes:
        blocks: int32 `[count, 4]`: first token's row, valid rows, index in its sequence, sequence.
        sequences: int32 `[n, 2 + 3·levels]`: blocks, first block, then for each level where its
            queries, its keys and its transitions start.
        pairs: int32 `[n]`, the first block of each pair of neighbours; the last may stand alone.
        positions: int64 `[tokens]`, each token's place among the padded rows of all blocks.
        levels: at which some pair of units meets.
        queries, keys: blocks that all levels store.
        nodes: transitions of complete units, over all levels but the first, whose are never formed.
    """

    blocks: Tensor
    sequences: Tensor
    pairs: Tensor
    positions: Tensor
    count: int
    levels: int
    queries: int
    keys: int
    nodes: int


@lasting
def make_grid(lengths: tuple[int, ...], device: torch.device) -> Grid:
    """The grid of sequences of these lengths, in tokens, that lie one behind the other."""
    lengths = tuple(n for n in lengths if n > 0)
    sizes = [-(-n // BLOCK) for n in lengths]
    levels = max((n - 1).bit_length() for n in sizes)
    rows, queries, keys, nodes, first = [], 0, 0, 0, 0
    for size in sizes:
        row = [size, first]
        for level in range(levels):
            unit = 1 << level
            row += [queries, keys, nodes]
            queries += (size >> (level + 1) << level) + max(0, size % (2 * unit) - unit)
            keys += (size + unit - 1) >> (level + 1) << level
            nodes += size >> level if level else 0
        rows.append(row)
        first += size
    counts = torch.tensor(sizes)
    ends = torch.tensor(lengths).cumsum(0)
    sequence = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    index = torch.arange(first) - (counts.cumsum(0) - counts)[sequence]
    token = (ends - torch.tensor(lengths))[sequence] + index * BLOCK
    valid = (ends[sequence] - token).clamp(max=BLOCK)
    blocks = torch.stack([token, valid, index, sequence], 1).to(torch.int32)
    table = torch.tensor(rows, dtype=torch.int32)
    offset = torch.arange(BLOCK)
    positions = (torch.arange(first)[:, None] * BLOCK + offset)[offset < valid[:, None]]
    pairs = (index % 2 == 0).nonzero().flatten().to(torch.int32)
    tables = (x.to(device) for x in (blocks, table, pairs, positions))
    return Grid(*tables, first, levels, queries, keys, nodes)
