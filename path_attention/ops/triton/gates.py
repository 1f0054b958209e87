"""Gates: their running sums, what they take off at each level's border, and their gradients.

docs/algorithm.md §3, §4. Sums start anew with every sequence and are float64, so that a difference
is right to float32 whatever came before. A NaN stays where it is: whoever sees that token gets it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from path_attention.ops.triton.primitives import block_row, stored_block

_COUNTS = ["count", "queries", "keys", "levels", "total"]
# log₂ e in two float32 numbers, whatever precision a constant is given.
_LOG2_E_HIGH: tl.constexpr = tl.constexpr(1.4426950216293335)
_LOG2_E_LOW: tl.constexpr = tl.constexpr(1.9259629911266175e-8)
_LOWEST: tl.constexpr = tl.constexpr(-1e5)  # as good as −∞ to a softmax; 10⁶ of them keep digits


@triton.jit
def _sequence(blocks_ptr, sequences_ptr, i_sequence, levels):
    """First token, tokens, first padded row of a sequence."""
    row = sequences_ptr + i_sequence * (2 + 3 * levels)
    size, first = tl.load(row), tl.load(row + 1)
    token = tl.load(blocks_ptr + first * 4)
    length = (size - 1) * 64 + tl.load(blocks_ptr + (first + size - 1) * 4 + 1)
    return token, length, first.to(tl.int64) * 64


@triton.jit(do_not_specialize=_COUNTS)
def decay_fwd_kernel(
    log_forget_ptr, c_ptr, blocks_ptr, sequences_ptr, levels, total, stride_t, stride_h,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Running sum of log2 of one head's gates over one sequence."""
    i_hq = tl.program_id(1).to(tl.int64)
    token, length, _ = _sequence(blocks_ptr, sequences_ptr, tl.program_id(0), levels)
    o = tl.arange(0, CHUNK)
    log_forget_ptr += token.to(tl.int64) * stride_t + i_hq * stride_h
    c_ptr += i_hq * total + token
    before = tl.zeros([1], tl.float64)
    for start in tl.range(0, length, CHUNK, num_stages=1):
        inside = start + o < length
        p_x = log_forget_ptr + (start + o).to(tl.int64) * stride_t
        b_x = tl.load(p_x, inside, other=0.0).to(tl.float64)
        unknown = b_x != b_x
        b_x = tl.where(unknown, 0.0, tl.where(b_x < _LOWEST, _LOWEST, b_x))
        b_x = b_x * _LOG2_E_HIGH + b_x * _LOG2_E_LOW
        b_c = tl.where(unknown, float("nan"), tl.cumsum(b_x, 0) + before)
        tl.store(c_ptr + start + o, b_c, inside)
        before += tl.sum(b_x, 0)


@triton.jit(do_not_specialize=_COUNTS)
def gates_fwd_kernel(
    c_ptr, lse2_ptr, qc_ptr, kc_ptr, blocks_ptr, sequences_ptr, count, queries, keys, levels, total,
    BACKWARD: tl.constexpr,
):  # fmt: skip
    """Decay (base 2) from each level's border to a block's queries, and from its keys to it.

    The backward pass needs the queries' only as lse less decay, and gets that.
    """
    i_block, i_hq = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token, valid, i, size, _, table = block_row(blocks_ptr, sequences_ptr, i_block, levels)
    o = tl.arange(0, 64)
    c_ptr += i_hq * total + token - i * 64  # of the sequence
    b_c = tl.load(c_ptr + i * 64 + o, o < valid, other=0.0)
    for level in tl.range(0, levels, num_stages=1):
        unit = i >> level
        if (unit & 1) == 1:
            b_border = tl.load(c_ptr + (unit << level) * 64 - 1)
            at = i_hq * queries + stored_block(table, i, level, 0)
            b_q = tl.where(o < valid, (b_c - b_border), 0.0).to(tl.float32)
            if BACKWARD:
                b_q = tl.load(lse2_ptr + (i_hq * count + i_block) * 64 + o) - b_q
            tl.store(qc_ptr + at * 64 + o, b_q)
        elif ((unit + 1) << level) < size:
            b_border = tl.load(c_ptr + ((unit + 1) << level) * 64 - 1)
            at = i_hq * keys + stored_block(table, i, level, 1)
            tl.store(kc_ptr + at * 64 + o, (b_border - b_c).to(tl.float32))


@triton.jit(do_not_specialize=_COUNTS)
def decay_bwd_kernel(
    rows_ptr, columns_ptr, range_ptr, dlog_forget_ptr, blocks_ptr, sequences_ptr, count, levels,
    stride_t, stride_h, CHUNK: tl.constexpr,
):  # fmt: skip
    """Gradient of one head's gates over one sequence: log f_t is in A_ij for j < t ≤ i.

    Σ_{j < t ≤ i} dA_ij is the sum from t on of row sums less column sums.
    """
    i_hq = tl.program_id(1).to(tl.int64)
    token, length, first = _sequence(blocks_ptr, sequences_ptr, tl.program_id(0), levels)
    o = tl.arange(0, CHUNK)
    here = i_hq * count * 64 + first
    dlog_forget_ptr += token.to(tl.int64) * stride_t + i_hq * stride_h
    grad = tl.load(range_ptr + 7)
    behind = tl.zeros([1], tl.float64)
    chunks = (length + CHUNK - 1) // CHUNK
    for chunk in tl.range(0, chunks, num_stages=1):
        o_t = (chunks - 1 - chunk) * CHUNK + o
        inside = o_t < length
        b_x = tl.load(rows_ptr + here + o_t, inside, other=0.0)
        b_x = (b_x - tl.load(columns_ptr + here + o_t, inside, other=0.0)).to(tl.float64)
        unknown = b_x != b_x
        b_x = tl.where(unknown, 0.0, b_x)
        total = tl.sum(b_x, 0)
        b_d = tl.where(unknown, float("nan"), behind + (total - tl.cumsum(b_x, 0)) + b_x)
        b_d = (b_d.to(tl.float32) * grad).to(dlog_forget_ptr.dtype.element_ty)
        tl.store(dlog_forget_ptr + o_t.to(tl.int64) * stride_t, b_d, inside)
        behind += total
