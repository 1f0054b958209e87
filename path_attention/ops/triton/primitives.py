"""What the kernels share: the tables' rows, moved tiles, one step of the softmax."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_row(blocks_ptr, sequences_ptr, i_block, LEVELS: tl.constexpr):
    """A block's first token, valid rows, index; its sequence's blocks, first block, level table."""
    row = blocks_ptr + i_block * 4
    table = sequences_ptr + tl.load(row + 3) * (2 + 3 * LEVELS)
    return (
        tl.load(row).to(tl.int64),
        tl.load(row + 1),
        tl.load(row + 2),
        tl.load(table),
        tl.load(table + 1),
        table + 2,
    )


@triton.jit
def stored_block(table, i, level, KIND: tl.constexpr):
    """Where block i of a sequence is stored at a level: KIND 0 queries, 1 keys."""
    within = i & ((1 << level) - 1)
    return tl.load(table + 3 * level + KIND) + ((i >> (level + 1)) << level) + within


@triton.jit
def node(table, unit, level):
    """Where the transition of a complete unit is stored."""
    return tl.load(table + 3 * level + 2) + unit


@triton.jit
def load_tile(p, rows, stride_row, columns, valid, D: tl.constexpr):
    """Rows below `valid` and columns below D of a tile at p, zero elsewhere. [BT, DP]"""
    mask = (rows[:, None] < valid) & (columns[None, :] < D)
    return tl.load(p + rows[:, None].to(tl.int64) * stride_row + columns[None, :], mask, other=0.0)


@triton.jit
def decay(c_ptr, at, b_border, sign):
    """Decay between a border and the tokens `at`, from float64 running sums: no cancellation left."""
    return (sign * (tl.load(c_ptr + at) - b_border)).to(tl.float32)
