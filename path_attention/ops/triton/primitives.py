"""What the kernels share: the tables' rows, tiles, products kept exact, one step of the softmax."""

from __future__ import annotations

import os

import triton
import triton.language as tl

# Float32 operands as three bfloat16 each, six products: right to float32. The interpreter takes
# them plain.
FLOAT32: tl.constexpr = tl.constexpr(
    "ieee" if os.environ.get("TRITON_INTERPRET") == "1" else "bf16x6"
)


@triton.jit
def block_row(blocks_ptr, sequences_ptr, i_block, levels):
    """A block's first token, valid rows, index; its sequence's blocks, first block, level table."""
    row = blocks_ptr + i_block * 4
    table = sequences_ptr + tl.load(row + 3) * (2 + 3 * levels)
    return (
        tl.load(row),
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
def load_tile(p, token, stride_row, rows, columns, valid, D: tl.constexpr):
    """Rows below `valid` and columns below D of the tile that starts at a token, else zero."""
    p += token.to(tl.int64) * stride_row
    mask = (rows[:, None] < valid) & (columns[None, :] < D)
    return tl.load(p + rows[:, None] * stride_row + columns[None, :], mask, other=0.0)


@triton.jit
def load_row(p, o, D: tl.constexpr):
    """One row of D elements in float32, zero behind them."""
    return tl.load(p + o, o < D, other=0.0).to(tl.float32)


@triton.jit
def pass_factors(
    b_x, applies, w_ptr, beta_ptr, token, o_d, D: tl.constexpr, F: tl.constexpr, BACK: tl.constexpr
):
    """Rows x of a tile through H of one token where it applies: x H, or H x with BACK."""
    for n in tl.static_range(F):
        at = token * F + (F - 1 - n if BACK else n)
        b_w = load_row(w_ptr + at * D, o_d, D)
        beta = tl.load(beta_ptr + at).to(tl.float32)
        b_xw = tl.where(applies, beta * tl.sum(b_x * b_w[None, :], 1), 0.0)
        b_x -= b_xw[:, None] * b_w[None, :]
    return b_x


@triton.jit
def dot_exact(a, b, OPERAND: tl.constexpr, PIECE: tl.constexpr = tl.float16):
    """Product of float32 tiles of entries up to about 2¹⁵, right to about 2⁻²².

    16-bit OPERAND: each tile as a sum high + low of two PIECEs, three products of the four. With
    bfloat16 entries of any size, right to about 2⁻¹⁶.
    """
    if tl.float32 == OPERAND:
        c = tl.dot(a, b, input_precision=FLOAT32)
    else:
        a_high, b_high = a.to(PIECE), b.to(PIECE)
        a_low = (a - a_high.to(tl.float32)).to(PIECE)
        b_low = (b - b_high.to(tl.float32)).to(PIECE)
        c = tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high)))
    return c


@triton.jit
def reflect(b_x, b_a, b_b, OPERAND: tl.constexpr):
    """x (I − Aᵀ B) for rows x, in float32: the move through one block, by its 64 factors."""
    b_xa = tl.dot(b_x.to(OPERAND), tl.trans(b_a), input_precision=FLOAT32).to(OPERAND)
    return b_x.to(tl.float32) - tl.dot(b_xa, b_b, input_precision=FLOAT32)


@triton.jit
def range_of(x):
    """A power of two that brings a tile's largest entry to about 1, if 2^±100 can: 2^100 for 0.

    (Of several tiles that one power scales, the least of theirs fits all.)
    """
    return power_for(tl.max(tl.abs(x)))


@triton.jit
def power_for(largest):
    """As `range_of`, of tiles or rows whose largest entries these are."""
    exponent = -tl.math.ceil(tl.math.log2(largest))
    return tl.math.exp2(tl.minimum(tl.maximum(exponent, -100.0), 100.0))


@triton.jit
def softmax_step(b_s, scale, b_m, b_l, b_acc, b_v):
    """Take raw scores [BM, BN] and values into the running maximum (base 2), sum and output."""
    b_m_new = tl.maximum(b_m, tl.max(b_s, 1) * scale)
    b_p = tl.math.exp2(b_s * scale - b_m_new[:, None])
    b_alpha = tl.math.exp2(b_m - b_m_new)
    b_l = b_l * b_alpha + tl.sum(b_p, 1)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_alpha[:, None], input_precision=FLOAT32)
    return b_m_new, b_l, b_acc
