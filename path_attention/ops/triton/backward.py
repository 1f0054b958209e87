"""The main loops of the backward pass: gradients of moved queries, of moved keys, and of values.

docs/algorithm.md §4. Both walk the levels from the top down. Between two levels a gradient goes
back through the move that joined them, so one accumulator holds the sum over all levels.

Score gradients are scaled by a power of two (`range_ptr + 3`) that keeps them inside float16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from path_attention.ops.triton.primitives import (
    FLOAT32,
    block_row,
    load_tile,
    node,
    range_of,
    stored_block,
)

_COUNTS = ["count", "queries", "keys", "stored", "nodes", "levels"]


@triton.jit(do_not_specialize=_COUNTS)
def delta_bwd_kernel(
    out_ptr, low_ptr, do_ptr, lse_ptr, dlse_ptr, range_ptr, delta_ptr, lse2_ptr,
    blocks_ptr, sequences_ptr, count, levels,
    stride_ot, stride_oh, stride_dt, stride_dh, stride_lt,
    DV: tl.constexpr, DVP: tl.constexpr, LSE_GRADIENT: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """δ = rowsum(dO · O) − dlse, scaled, and lse in base 2 (∞ on padding), block by block."""
    i_block, i_hq = tl.program_id(0), tl.program_id(1)
    token, valid, _, _, _, _ = block_row(blocks_ptr, sequences_ptr, i_block, levels)
    o, o_v = tl.arange(0, 64), tl.arange(0, DVP)
    b_o = load_tile(out_ptr + i_hq * stride_oh, token, stride_ot, o, o_v, valid, DV).to(tl.float32)
    if LOW:
        b_o += load_tile(low_ptr + i_hq * stride_oh, token, stride_ot, o, o_v, valid, DV)
    b_do = load_tile(do_ptr + i_hq * stride_dh, token, stride_dt, o, o_v, valid, DV)
    b_delta = tl.sum(b_o * b_do.to(tl.float32), 1)
    inside = o < valid
    o_lse = (token.to(tl.int64) + o) * stride_lt + i_hq
    if LSE_GRADIENT:
        b_delta -= tl.load(dlse_ptr + o_lse, inside, other=0.0)
    b_lse = tl.load(lse_ptr + o_lse, inside, other=0.0)
    row = (i_hq.to(tl.int64) * count + i_block) * 64
    tl.store(delta_ptr + row + o, b_delta * tl.load(range_ptr + 3))
    tl.store(lse2_ptr + row + o, tl.where(inside, b_lse * 1.4426950408889634, float("inf")))


@triton.jit(do_not_specialize=_COUNTS)
def queries_bwd_kernel(
    q_desc, k_desc, v_desc, do_desc, p_desc, ql_ptr, kc_desc, range_ptr,
    lse2_ptr, delta_ptr, dqt_ptr, dqh_ptr, rows_ptr, blocks_ptr, sequences_ptr,
    count, queries, keys, nodes, levels,
    G: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr, TRANSPORT: tl.constexpr, GATE: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Gradient of one block's queries at the start of its pair.

    What arrives at a level from those above it is kept in `dqh`, for the transition's gradient.
    Without transport no pair is apart, and it is the gradient at the block.
    """
    i_block = count - 1 - tl.program_id(0)
    i_hq = tl.program_id(1)
    i_h = i_hq // G
    token, _, i, _, _, table = block_row(blocks_ptr, sequences_ptr, i_block, levels)
    o, o_d = tl.arange(0, 64), tl.arange(0, DP)
    row = (i_hq.to(tl.int64) * count + i_block) * 64
    b_do = do_desc.load([token, i_hq * DVP])
    b_lse = tl.load(lse2_ptr + row + o)
    b_delta = tl.load(delta_ptr + row + o)
    scale = tl.load(range_ptr + 2)
    grad_scale = tl.load(range_ptr + 3)
    b_dq = tl.zeros([64, DP], tl.float32)
    b_rows = tl.zeros([64], tl.float32)
    first_level: tl.constexpr = 1 if TRANSPORT else 0
    for down in tl.range(0, levels - first_level, num_stages=1):
        level = levels - 1 - down
        unit = i >> level
        if (unit & 1) == 1:
            left = (unit - 1) << level
            row_v = token - (i - left) * 64
            at_q = i_hq * queries + stored_block(table, i, level, 0)
            at_k = stored_block(table, left, level, 1)
            b_l = b_lse
            if TRANSPORT:
                b_q = q_desc.load([at_q * 64, 0])
                row_k, column_k = (i_h * keys + at_k) * 64, 0
                if unit > 1:  # q' = q P_leftᵀ went on to a higher level
                    here = i_h * nodes + node(table, unit - 1, level)
                    b_dqx = b_dq.to(OPERAND)
                    p_dqh = dqh_ptr + at_q.to(tl.int64) * 64 * DP
                    tl.store(p_dqh + o[:, None] * DP + o_d[None, :], b_dqx)
                    b_p = p_desc.load([here * DP, 0])
                    b_dq = tl.dot(b_dqx, b_p, input_precision=FLOAT32)
            else:
                b_q = q_desc.load([token, i_hq * DP])
                row_k, column_k = row_v, i_h * DP
            if GATE:
                b_l = tl.load(ql_ptr + at_q.to(tl.int64) * 64 + o)
                row_kc = (i_hq * keys + at_k) * 64
            for j in tl.range(0, 64 << level, BN, num_stages=STAGES):
                b_k = k_desc.load([row_k + j, column_k])
                b_v = v_desc.load([row_v + j, i_h * DVP])
                b_s = tl.dot(b_q, tl.trans(b_k), input_precision=FLOAT32) * scale
                if GATE:
                    b_s += kc_desc.load([row_kc + j])[None, :]
                b_prob = tl.math.exp2(b_s - b_l[:, None])
                b_dprob = tl.dot(b_do, tl.trans(b_v), input_precision=FLOAT32)
                b_ds = b_prob * (b_dprob * grad_scale - b_delta[:, None])
                if GATE:
                    b_rows += tl.sum(b_ds, 1)
                b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=FLOAT32)
    tl.store(dqt_ptr + row * DP + o[:, None] * DP + o_d[None, :], b_dq)
    if GATE:
        tl.store(rows_ptr + row + o, b_rows)


@triton.jit(do_not_specialize=_COUNTS)
def keys_bwd_kernel(
    q_desc, k_desc, v_desc, do_desc, p_desc, kc_ptr, range_ptr, lse_desc, delta_desc,
    dkt_ptr, dv_ptr, dkh_ptr, undo_ptr, columns_ptr, blocks_ptr, sequences_ptr,
    count, queries, keys, nodes, levels,
    G: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr,
    STAGES: tl.constexpr, TRANSPORT: tl.constexpr, GATE: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Gradients of one block's keys at the end of its pair, and of its values.

    What arrives at a level from those above it is kept in `dkh`, scaled into range, with what
    undoes that. Without transport no pair is apart, and it is the gradient at the block.
    `lse_desc` is lse in base 2 or, with gates, what `gates_fwd_kernel` makes of it for each level.
    """
    i_block, i_h = tl.program_id(0), tl.program_id(1)
    token, _, i, size, first, table = block_row(blocks_ptr, sequences_ptr, i_block, levels)
    o, o_d, o_v = tl.arange(0, 64), tl.arange(0, DP), tl.arange(0, DVP)
    b_v = v_desc.load([token, i_h * DVP])
    scale = tl.load(range_ptr + 2)
    grad_scale = tl.load(range_ptr + 3)
    b_dk = tl.zeros([64, DP], tl.float32)
    b_dv = tl.zeros([64, DVP], tl.float32)
    first_level: tl.constexpr = 1 if TRANSPORT else 0
    for down in tl.range(0, levels - first_level, num_stages=1):
        level = levels - 1 - down
        unit = i >> level
        right = (unit + 1) << level
        if ((unit & 1) == 0) & (right < size):
            at_k = stored_block(table, i, level, 1)
            at_right = stored_block(table, right, level, 0)
            if TRANSPORT:
                b_k = k_desc.load([(i_h * keys + at_k) * 64, 0])
                if ((unit + 2) << level) < size:  # k' = k P_right went on to a higher level
                    here = i_h * nodes + node(table, unit + 1, level)
                    tile_scale = range_of(b_dk)
                    undo = 1 / tile_scale
                    b_dkx = (b_dk * tile_scale).to(OPERAND)
                    at = i_h.to(tl.int64) * keys + at_k
                    tl.store(dkh_ptr + at * 64 * DP + o[:, None] * DP + o_d[None, :], b_dkx)
                    tl.store(undo_ptr + at, undo)
                    b_p = p_desc.load([here * DP, 0])
                    b_dk = tl.dot(b_dkx, tl.trans(b_p), input_precision=FLOAT32) * undo
            else:
                b_k = k_desc.load([token, i_h * DP])
            n_rows = tl.minimum(1 << level, size - right) * 64
            row_o = token + (right - i) * 64
            for g in tl.range(0, G, num_stages=1):
                i_hq = i_h * G + g
                row_l = (i_hq * count + first + right) * 64
                if TRANSPORT:
                    row_q, column_q = (i_hq * queries + at_right) * 64, 0
                else:
                    row_q, column_q = row_o, i_hq * DP
                row_s = row_l
                if GATE:
                    row_s = (i_hq * queries + at_right) * 64
                    b_kc = tl.load(kc_ptr + (i_hq.to(tl.int64) * keys + at_k) * 64 + o)
                    b_columns = tl.zeros([64], tl.float32)
                for j in tl.range(0, n_rows, BM, num_stages=STAGES):
                    b_q = q_desc.load([row_q + j, column_q])
                    b_do = do_desc.load([row_o + j, i_hq * DVP])
                    b_l = lse_desc.load([row_s + j])
                    b_s = tl.dot(b_k, tl.trans(b_q), input_precision=FLOAT32) * scale
                    if GATE:
                        b_s += b_kc[:, None]
                    b_prob = tl.math.exp2(b_s - b_l[None, :])
                    b_dv = tl.dot(b_prob.to(b_do.dtype), b_do, b_dv, input_precision=FLOAT32)
                    b_delta = delta_desc.load([row_l + j])
                    b_dprob = tl.dot(b_v, tl.trans(b_do), input_precision=FLOAT32)
                    b_ds = b_prob * (b_dprob * grad_scale - b_delta[None, :])
                    if GATE:
                        b_columns += tl.sum(b_ds, 1)
                    b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=FLOAT32)
                if GATE:
                    p_columns = columns_ptr + (i_hq.to(tl.int64) * count + i_block) * 64 + o
                    tl.debug_barrier()  # other threads wrote these at the level above
                    tl.store(p_columns, tl.load(p_columns) + b_columns)
    row = (i_h.to(tl.int64) * count + i_block) * 64
    tl.store(dkt_ptr + row * DP + o[:, None] * DP + o_d[None, :], b_dk)
    tl.store(dv_ptr + row * DVP + o[:, None] * DVP + o_v[None, :], b_dv)


@triton.jit(do_not_specialize=_COUNTS)
def transitions_bwd_kernel(
    a_ptr, b_ptr, undo_ptr, dp_ptr, blocks_ptr, sequences_ptr, stored, nodes, levels,
    G: tl.constexpr, DP: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Σ Aᵀ B over the rows that a unit's transition moved, for the units that end with one block.

    A left unit's moved the queries of its right neighbour, q' = q Pᵀ: A = dq', B = q. A right
    unit's moved the keys of its left one, k' = k P: A = k, B = dk'. A program is 64 rows of dP.
    """
    i_block, i_h, i_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, _, i, size, _, table = block_row(blocks_ptr, sequences_ptr, i_block, levels)
    o, o_d = tl.arange(0, 64), tl.arange(0, DP)
    o_a = o[:, None] * DP + i_tile * 64 + o[None, :]
    o_b = o[:, None] * DP + o_d[None, :]
    for level in tl.range(1, levels, num_stages=1):
        unit = i >> level
        if (((unit + 1) << level) == i + 1) & ((unit & 1) == RIGHT):
            first = (unit ^ 1) << level
            if RIGHT:
                rows = tl.where(i + 1 < size, 1 << level, 0)
            else:
                rows = tl.where(unit > 0, tl.minimum(1 << level, size - first), 0)
            b_dp = tl.zeros([64, DP], tl.float32)
            for g in tl.range(0, G, num_stages=1):
                at = (i_h * G + g).to(tl.int64) * stored + stored_block(table, first, level, RIGHT)
                for row in tl.range(0, rows, num_stages=3):
                    b_a = tl.load(a_ptr + (at + row) * 64 * DP + o_a)
                    b_b = tl.load(b_ptr + (at + row) * 64 * DP + o_b)
                    b_product = tl.dot(tl.trans(b_a), b_b, input_precision=FLOAT32)
                    b_dp += b_product * tl.load(undo_ptr + at + row) if RIGHT else b_product
            here = (i_h.to(tl.int64) * nodes + node(table, unit, level)) * DP * DP
            tl.store(dp_ptr + here + i_tile * 64 * DP + o_b, b_dp)
