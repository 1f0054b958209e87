"""Solve the blocks, build the tree of transitions, carry keys and queries up it.

docs/algorithm.md §3. Both passes do this. The blocks' own part, which costs the most time for its
bytes, may be kept from the forward pass for the backward pass; the rest is made again.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from path_attention.ops.triton.call import Call, either, operand_of, stored, strides
from path_attention.ops.triton.gates import decay_fwd_kernel, gates_fwd_kernel
from path_attention.ops.triton.grid import BLOCK
from path_attention.ops.triton.local import queries_fwd_kernel
from path_attention.ops.triton.tiles import padded
from path_attention.ops.triton.transition import (
    block_fwd_kernel,
    keys_fwd_kernel,
    pair_fwd_kernel,
    tree_fwd_kernel,
)

CHUNK = 1024  # tokens whose gates are summed at once


class Blocks(NamedTuple):
    """The blocks' own solution: what the forward pass may keep."""

    inverse: Tensor | None  # float32 [H, blocks, 64, 64], for the backward pass alone
    coefficients: Tensor  # E, [H, blocks, 64, 64]
    g: Tensor  # [H, blocks, 64, DP], a block's transition is I − gᵀ w
    w: Tensor  # the same
    keys: Tensor  # the same, at the block's end
    transitions: Tensor  # [H, nodes, DP, DP]


class Moved(NamedTuple):
    """What the tree gives both passes; without transport, q and k as they came."""

    blocks: Blocks | None
    keys: Tensor | None  # [H, keys, 64, DP]
    queries: Tensor | None  # [HQ, queries, 64, DP]
    key_gates: Tensor | None  # [HQ, keys, 64], decay from the key to its level's border
    query_gates: Tensor | None  # [HQ, queries, 64], from the border to the query


class Softmax(NamedTuple):
    """A softmax begun: unnormalised output, maximum (base 2) and sum."""

    acc: Tensor  # [HQ, blocks, 64, DVP]
    m: Tensor  # [HQ, blocks, 64]
    l: Tensor


def room_to_keep(
    q: Tensor, k: Tensor, w: Tensor | None, lengths: Tensor | None, keep: bool
) -> Tensor:
    """Room for `Blocks` of every head, uint8 [H, bytes]; of no bytes unless `keep`.

    Its size hangs on the shapes alone, so that a compiler can tell it: of packed sequences it is
    what as many of the least handy lengths would need.
    """
    if w is None or not keep:
        return q.new_empty(k.shape[2], 0, dtype=torch.uint8)
    B, T, D = q.shape[0], q.shape[1], q.shape[3]
    blocks = B * ((T + BLOCK - 1) // BLOCK) if lengths is None else T // BLOCK + lengths.shape[0]
    layout = _layout(1, 1, 1, padded(D), operand_of(q, w))
    each = sum(prod(shape) * dtype.itemsize for shape, dtype in layout)
    return q.new_empty(k.shape[2], blocks * each, dtype=torch.uint8)


def _layout(
    H: int, blocks: int, nodes: int, DP: int, operand: torch.dtype
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each of `Blocks`, in their order."""
    square, tile = (H, blocks, BLOCK, BLOCK), (H, blocks, BLOCK, DP)
    rest = (square, tile, tile, tile, (H, nodes, DP, DP))
    return [(square, torch.float32), *((shape, operand) for shape in rest)]


def place_blocks(c: Call, kept: Tensor | None, backward: bool) -> Blocks:
    """Blocks to be written, or read: fresh tensors, or views of these heads' part of the room."""
    layout = _layout(c.H, c.grid.count, max(1, c.grid.nodes), c.tiles.DP, c.operand)
    if kept is None:
        first = c.empty(*layout[0][0]) if backward else None
        return Blocks(first, *(c.empty(*shape, dtype=dtype) for shape, dtype in layout[1:]))
    room, at, found = kept.view(-1), 0, []
    for shape, dtype in layout:
        size = prod(shape) * dtype.itemsize
        found.append(room[at : at + size].view(dtype).view(shape))
        at += size
    return Blocks(*found)


def solve_blocks(c: Call, ranges: Tensor, kept: Tensor | None, backward: bool) -> Blocks | None:
    """Solve the blocks and build the tree of their transitions; None without transport."""
    w, beta = c.w, c.beta
    if w is None or beta is None:
        return None
    grid, t, H = c.grid, c.tiles, c.H
    count, DP = grid.count, t.DP
    backward |= kept is not None
    b = place_blocks(c, kept, backward)
    # A product of transitions takes both parts of each, a move the high part alone.
    parts = c.operand != torch.float32
    g_low, low = (torch.empty_like(x) if parts else x for x in (b.g, b.transitions))
    common = dict(D=t.D, DP=DP, OPERAND=c.kernel_operand, maxnreg=t.registers)
    block_fwd_kernel[(count, H)](
        c.k, w, beta, ranges, either(b.inverse, ranges), b.keys, b.coefficients, b.g, g_low, b.w,
        *c.tables, count, grid.levels, *strides(c.k, w, beta), BACKWARD=backward,
        num_warps=t.block_warps, **common,
    )  # fmt: skip
    if grid.levels > 1:
        pair_fwd_kernel[(count, H)](
            w, b.g, g_low, b.transitions, low, *c.tables, count, grid.nodes, grid.levels,
            *strides(w), num_warps=t.pair_warps, **common,
        )  # fmt: skip
    for level in range(2, grid.levels):
        tree_fwd_kernel[(count, H, (DP // 64) ** 2)](
            b.transitions, low, *c.tables, grid.nodes, grid.levels, level, DP=DP, DC=64,
            num_warps=t.tree_warps,
        )  # fmt: skip
    return b


def transition_tiles(c: Call, blocks: Blocks | None) -> TensorDescriptor:
    """Whole transitions; where there is none, a stand-in that no kernel reads, not a padded k."""
    DP = c.tiles.DP
    transitions = c.empty(DP, DP, dtype=c.operand) if blocks is None else blocks.transitions
    return stored(transitions, c.k, DP, DP)


def _gates(c: Call, ranges: Tensor, lse: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Decays between each level's border and its queries (given lse: lse less them), its keys."""
    if c.decay is None or c.log_forget is None:
        return None, None
    grid, HQ = c.grid, c.H * c.G
    decay_fwd_kernel[(len(grid.sequences), HQ)](
        c.log_forget, c.decay, *c.tables, grid.levels, c.decay_row, *c.log_forget.stride(),
        CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip
    query_gates = c.empty(HQ, max(1, grid.queries), 64)
    key_gates = c.empty(HQ, max(1, grid.keys), 64)
    gates_fwd_kernel[(grid.count, HQ)](
        c.decay, either(lse, ranges), query_gates, key_gates, *c.tables, grid.count, grid.queries,
        grid.keys, grid.levels, c.decay_row, BACKWARD=lse is not None, num_warps=1,
    )  # fmt: skip
    return query_gates, key_gates


def move(
    c: Call,
    ranges: Tensor,
    blocks: Blocks | None,
    softmax: Softmax | None = None,
    lse: Tensor | None = None,
) -> Moved:
    """Carry keys and queries up the tree.

    The forward pass begins its softmax on the way; the backward pass brings lse (base 2).
    """
    grid, t, H, HQ = c.grid, c.tiles, c.H, c.H * c.G
    count, DP = grid.count, t.DP
    keys = queries = coefficients = g = w = None
    query_gates, key_gates = _gates(c, ranges, lse)
    transitions = transition_tiles(c, blocks)
    if blocks is not None:
        coefficients, g, w = blocks.coefficients, blocks.g, blocks.w
        keys = c.empty(H, max(1, grid.keys), 64, DP, dtype=c.operand)
        keys_fwd_kernel[(count, H)](
            blocks.keys, g, w, transitions, keys, *c.tables, count, grid.nodes, grid.keys,
            grid.levels, num_warps=t.walk_warps, DP=DP, OPERAND=c.kernel_operand,
        )  # fmt: skip
        queries = c.empty(HQ, max(1, grid.queries), 64, DP, dtype=c.operand)
    moved = Moved(blocks, keys, queries, key_gates, query_gates)
    if softmax is not None or queries is not None:
        acc, m, l = softmax or (ranges,) * 3
        queries_fwd_kernel[(count, HQ)](
            c.q, c.k, c.v, either(w, c.q), either(c.decay, ranges), either(coefficients, c.q),
            either(g, c.q), transitions, either(keys, c.q),
            either(query_gates, ranges), either(key_gates, ranges), ranges, either(queries, c.q),
            acc, m, l, *c.tables, count,
            grid.nodes, grid.queries, grid.keys, grid.levels, c.decay_row,
            *strides(c.q, c.k, c.v), ATTEND=softmax is not None, OPERAND=c.kernel_operand,
            num_warps=t.walk_warps, maxnreg=t.registers, **c.sizes, **c.kinds,
        )  # fmt: skip
    return moved
