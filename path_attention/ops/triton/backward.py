"""The main loops of the backward pass: gradients of moved queries, of moved keys, and of values.

docs/algorithm.md §4. Both walk the levels from the top down. Between two levels a gradient goes back
through the move that joined them, so one accumulator holds the sum over all levels.

Score gradients are scaled by a power of two (`range_ptr + 3`) that keeps them inside float16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from path_attention.ops.triton.primitives import block_row, load_tile, node, stored_block


@triton.jit
def delta_bwd_kernel(
    out_ptr, do_ptr, lse_ptr, dlse_ptr, range_ptr, delta_ptr, lse2_ptr,
    blocks_ptr, sequences_ptr, count,
    stride_ot, stride_oh, stride_dt, stride_dh, stride_lt,
    DV: tl.constexpr, DVP: tl.constexpr, LEVELS: tl.constexpr, LSE_GRADIENT: tl.constexpr,
):  # fmt: skip
    """δ = rowsum(dO · O) − dlse, scaled, and lse in base 2 (∞ on padding), block by block."""
    i_block, i_hq = tl.program_id(0), tl.program_id(1)
    token, valid, _, _, _, _ = block_row(blocks_ptr, sequences_ptr, i_block, LEVELS)
    o, o_v = tl.arange(0, 64), tl.arange(0, DVP)
    b_o = load_tile(out_ptr + token * stride_ot + i_hq * stride_oh, o, stride_ot, o_v, valid, DV)
    b_do = load_tile(do_ptr + token * stride_dt + i_hq * stride_dh, o, stride_dt, o_v, valid, DV)
    b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
    inside = o < valid
    if LSE_GRADIENT:
        b_delta -= tl.load(dlse_ptr + (token + o) * stride_lt + i_hq, inside, other=0.0)
    b_lse = tl.load(lse_ptr + (token + o) * stride_lt + i_hq, inside, other=0.0)
    row = (i_hq.to(tl.int64) * count + i_block) * 64
    tl.store(delta_ptr + row + o, b_delta * tl.load(range_ptr + 3))
    tl.store(lse2_ptr + row + o, tl.where(inside, b_lse * 1.4426950408889634, float("inf")))


@triton.jit
def queries_bwd_kernel(
    q_ptr, qh_ptr, kh_desc, v_desc, do_ptr, p_ptr, c_ptr, range_ptr, lse2_ptr, delta_ptr,
    dqt_ptr, dp_ptr, rows_ptr, blocks_ptr, sequences_ptr, count, queries, keys, nodes, total,
    stride_qt, stride_qh, stride_dt, stride_dh,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr, LEVELS: tl.constexpr, TRANSPORT: tl.constexpr,
    GATE: tl.constexpr, PRECISION: tl.constexpr, MOVE_PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of one block's queries at the block's start; of the left units' transitions."""
    i_block = count - 1 - tl.program_id(0)
    i_hq = tl.program_id(1)
    i_h = i_hq // G
    token, valid, i, _, _, table = block_row(blocks_ptr, sequences_ptr, i_block, LEVELS)
    first_token = token - i * 64
    o, o_d, o_v = tl.arange(0, 64), tl.arange(0, DP), tl.arange(0, DVP)
    row = (i_hq.to(tl.int64) * count + i_block) * 64
    b_do = load_tile(do_ptr + token * stride_dt + i_hq * stride_dh, o, stride_dt, o_v, valid, DV)
    b_lse = tl.load(lse2_ptr + row + o)
    b_delta = tl.load(delta_ptr + row + o)
    logit_scale = tl.load(range_ptr + 2)
    grad_scale = tl.load(range_ptr + 3)
    b_dq = tl.zeros([64, DP], tl.float32)
    b_rows = tl.zeros([64], tl.float32)
    c_ptr += i_hq.to(tl.int64) * total
    p_ptr += i_h.to(tl.int64) * nodes * DP * DP
    dp_ptr += i_h.to(tl.int64) * nodes * DP * DP
    o_p = o_d[:, None] * DP + o_d[None, :]
    if not TRANSPORT:
        b_q = load_tile(q_ptr + token * stride_qt + i_hq * stride_qh, o, stride_qt, o_d, valid, D)
    for down in range(0, LEVELS):
        level = LEVELS - 1 - down
        unit = i >> level
        if (unit & 1) == 1:
            left = (unit - 1) << level
            row_v = first_token + left * 64
            row_k = row_v
            if TRANSPORT:
                at = i_hq.to(tl.int64) * queries + stored_block(table, i, level, 0)
                b_q = tl.load(qh_ptr + at * 64 * DP + o[:, None] * DP + o_d[None, :])
                row_k = (i_h.to(tl.int64) * keys + stored_block(table, left, level, 1)) * 64
                if unit > 1:  # q' = q P_leftᵀ went on to a higher level
                    here = node(table, unit - 1, level).to(tl.int64) * DP * DP + o_p
                    b_dp = tl.dot(
                        tl.trans(b_dq), b_q.to(tl.float32), input_precision=MOVE_PRECISION
                    )
                    tl.atomic_add(dp_ptr + here, b_dp, sem="relaxed")
                    b_p = tl.load(p_ptr + here)
                    b_dq = tl.dot(b_dq, b_p, input_precision=MOVE_PRECISION)
            if GATE:
                b_border = tl.load(c_ptr + row_v + (64 << level) - 1)
                b_c = tl.load(c_ptr + token + o, o < valid, other=0.0)
                b_row = tl.where(o < valid, (b_c - b_border).to(tl.float32), 0.0)
            for j in tl.range(0, 64 << level, BN, num_stages=STAGES):
                b_k = kh_desc.load([(row_k + j).to(tl.int32), 0 if TRANSPORT else i_h * DP])
                b_v = v_desc.load([(row_v + j).to(tl.int32), i_h * DVP])
                b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * logit_scale
                if GATE:
                    o_n = j + tl.arange(0, BN)
                    b_s += (b_border - tl.load(c_ptr + row_v + o_n)).to(tl.float32)[None, :]
                    b_s += b_row[:, None]
                b_p_ = tl.math.exp2(b_s - b_lse[:, None])
                b_dp_ = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
                b_ds = b_p_ * (b_dp_ * grad_scale - b_delta[:, None])
                if GATE:
                    b_rows += tl.sum(b_ds, 1)
                b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
    tl.store(dqt_ptr + row * DP + o[:, None] * DP + o_d[None, :], b_dq)
    if GATE:
        tl.store(rows_ptr + row + o, b_rows)


@triton.jit
def keys_bwd_kernel(
    q_desc, kh_ptr, k_ptr, v_ptr, do_desc, p_ptr, c_ptr, range_ptr, lse2_ptr, delta_ptr,
    dkt_ptr, dv_ptr, dp_ptr, columns_ptr, blocks_ptr, sequences_ptr,
    count, queries, keys, nodes, total, stride_kt, stride_kh, stride_vt, stride_vh,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    BM: tl.constexpr, STAGES: tl.constexpr, LEVELS: tl.constexpr, TRANSPORT: tl.constexpr,
    GATE: tl.constexpr, PRECISION: tl.constexpr, MOVE_PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of one block's keys at the block's end, of its values; of the right transitions."""
    i_block, i_h = tl.program_id(0), tl.program_id(1)
    token, valid, i, size, first, table = block_row(blocks_ptr, sequences_ptr, i_block, LEVELS)
    first_token = token - i * 64
    o, o_d, o_v = tl.arange(0, 64), tl.arange(0, DP), tl.arange(0, DVP)
    b_v = load_tile(v_ptr + token * stride_vt + i_h * stride_vh, o, stride_vt, o_v, valid, DV)
    logit_scale = tl.load(range_ptr + 2)
    grad_scale = tl.load(range_ptr + 3)
    b_dk = tl.zeros([64, DP], tl.float32)
    b_dv = tl.zeros([64, DVP], tl.float32)
    p_ptr += i_h.to(tl.int64) * nodes * DP * DP
    dp_ptr += i_h.to(tl.int64) * nodes * DP * DP
    kh_ptr += i_h.to(tl.int64) * keys * 64 * DP
    o_p = o_d[:, None] * DP + o_d[None, :]
    if not TRANSPORT:
        b_k = load_tile(k_ptr + token * stride_kt + i_h * stride_kh, o, stride_kt, o_d, valid, D)
    for down in range(0, LEVELS):
        level = LEVELS - 1 - down
        unit = i >> level
        right = (unit + 1) << level
        if ((unit & 1) == 0) & (right < size):
            if TRANSPORT:
                at = stored_block(table, i, level, 1).to(tl.int64)
                b_k = tl.load(kh_ptr + at * 64 * DP + o[:, None] * DP + o_d[None, :])
                if ((unit + 2) << level) < size:  # k' = k P_right went on to a higher level
                    here = node(table, unit + 1, level).to(tl.int64) * DP * DP
                    b_dp = tl.dot(
                        tl.trans(b_k).to(tl.float32), b_dk, input_precision=MOVE_PRECISION
                    )
                    tl.atomic_add(dp_ptr + here + o_p, b_dp, sem="relaxed")
                    b_p = tl.load(p_ptr + here + o_d[:, None] + o_d[None, :] * DP)
                    b_dk = tl.dot(b_dk, b_p, input_precision=MOVE_PRECISION)
            n_rows = tl.minimum(1 << level, size - right) * 64
            row_o = first_token + right * 64
            for g in range(0, G):
                i_hq = i_h * G + g
                row_l = (i_hq.to(tl.int64) * count + first + right) * 64
                row_q = row_o
                if TRANSPORT:
                    at = i_hq.to(tl.int64) * queries + stored_block(table, right, level, 0)
                    row_q = at * 64
                if GATE:
                    p_c = c_ptr + i_hq.to(tl.int64) * total
                    b_border = tl.load(p_c + row_o - 1)
                    b_c = tl.load(p_c + token + o)
                    b_column = (b_border - b_c).to(tl.float32)
                    b_columns = tl.zeros([64], tl.float32)
                for j in tl.range(0, n_rows, BM, num_stages=STAGES):
                    o_m = j + tl.arange(0, BM)
                    b_q = q_desc.load([(row_q + j).to(tl.int32), 0 if TRANSPORT else i_hq * DP])
                    b_do = do_desc.load([(row_o + j).to(tl.int32), i_hq * DVP])
                    b_lse = tl.load(lse2_ptr + row_l + o_m)
                    b_delta = tl.load(delta_ptr + row_l + o_m)
                    b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION) * logit_scale
                    if GATE:
                        b_cm = tl.load(p_c + row_o + o_m, row_o + o_m < total, other=0.0)
                        b_s += (b_cm - b_border).to(tl.float32)[None, :]
                        b_s += b_column[:, None]
                    b_prob = tl.math.exp2(b_s - b_lse[None, :])
                    b_dv = tl.dot(b_prob.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
                    b_dprob = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
                    b_ds = b_prob * (b_dprob * grad_scale - b_delta[None, :])
                    if GATE:
                        b_columns += tl.sum(b_ds, 1)
                    b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)
                if GATE:
                    p_columns = columns_ptr + (i_hq.to(tl.int64) * count + i_block) * 64 + o
                    tl.store(p_columns, tl.load(p_columns) + b_columns)
    row = (i_h.to(tl.int64) * count + i_block) * 64
    tl.store(dkt_ptr + row * DP + o[:, None] * DP + o_d[None, :], b_dk)
    tl.store(dv_ptr + row * DVP + o[:, None] * DVP + o_v[None, :], b_dv)
