"""Attention inside one block, with what each query needs to leave it: forward and backward.

docs/algorithm.md §2–§4. Queries of a block, moved to its start, also meet the block before it when the
two are a pair, and are carried up the tree and stored wherever their unit is a right one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from path_attention.ops.triton.primitives import block_row, load_tile, node, stored_block


@triton.jit
def softmax_step(b_s, b_m, b_l, b_acc, b_v, PRECISION: tl.constexpr):
    """Take scores [BM, BN] (base 2) and values into the running maximum, sum and output."""
    b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
    b_p = tl.math.exp2(b_s - b_m_new[:, None])
    b_alpha = tl.math.exp2(b_m - b_m_new)
    b_l = b_l * b_alpha + tl.sum(b_p, 1)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_alpha[:, None], input_precision=PRECISION)
    return b_m_new, b_l, b_acc


@triton.jit
def queries_fwd_kernel(
    q_ptr, w_ptr, g_ptr, p_ptr, range_ptr, qh_ptr, blocks_ptr, sequences_ptr, count, nodes, queries,
    stride_qt, stride_qh, stride_wt, stride_wh,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Move one block's queries to its start, carry them up the tree, store them as they meet."""
    i_block, i_hq = tl.program_id(0), tl.program_id(1)
    i_h = i_hq // G
    token, valid, i, _, _, table = block_row(blocks_ptr, sequences_ptr, i_block, LEVELS)
    o, o_d = tl.arange(0, 64), tl.arange(0, DP)
    dtype: tl.constexpr = qh_ptr.dtype.element_ty
    if i > 0:
        b_q = load_tile(q_ptr + token * stride_qt + i_hq * stride_qh, o, stride_qt, o_d, valid, D)
        b_q = (b_q.to(tl.float32) * tl.load(range_ptr)).to(dtype)
        b_w = load_tile(w_ptr + token * stride_wt + i_h * stride_wh, o, stride_wt, o_d, valid, D)
        here = i_h.to(tl.int64) * count + i_block
        b_g = tl.load(g_ptr + here * 64 * DP + o[:, None] * DP + o_d[None, :])
        b_qw = tl.dot(b_q, tl.trans(b_w.to(dtype)), input_precision=PRECISION)
        b_qw = tl.where(o[:, None] >= o[None, :], b_qw, 0.0).to(dtype)
        b_x = b_q.to(tl.float32) - tl.dot(b_qw, b_g, input_precision=PRECISION)
        o_tile = o[:, None] * DP + o_d[None, :]
        o_p = o_d[:, None] + o_d[None, :] * DP  # transposed
        p_ptr += i_h.to(tl.int64) * nodes * DP * DP
        qh_ptr += i_hq.to(tl.int64) * queries * 64 * DP
        for level in range(0, LEVELS):
            unit = i >> level
            if (unit & 1) == 1:
                at = stored_block(table, i, level, 0).to(tl.int64)
                tl.store(qh_ptr + at * 64 * DP + o_tile, b_x.to(dtype))
                if unit > 1:
                    b_p = tl.load(p_ptr + node(table, unit - 1, level).to(tl.int64) * DP * DP + o_p)
                    b_x = tl.dot(b_x, b_p, input_precision=PRECISION)


@triton.jit
def local_scores(
    b_q, b_k, b_qw, e_ptr, here, logit_scale, c_ptr, token, valid,
    TRANSPORT: tl.constexpr, GATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Causal scores of a block against itself, base 2. [64, 64]"""
    o = tl.arange(0, 64)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    if TRANSPORT:
        b_e = tl.load(e_ptr + here * 4096 + o[:, None] * 64 + o[None, :])
        b_s -= tl.dot(b_qw, tl.trans(b_e), input_precision=PRECISION)
    b_s *= logit_scale
    if GATE:
        b_c = tl.load(c_ptr + token + o, o < valid, other=0.0)
        b_s += (b_c[:, None] - b_c[None, :]).to(tl.float32)
    seen = (o[:, None] >= o[None, :]) & ((o[None, :] < valid) | (o[:, None] >= valid))
    return tl.where(seen, b_s, float("-inf"))


@triton.jit
def local_fwd_kernel(
    q_ptr, k_ptr, v_ptr, w_ptr, c_ptr, e_ptr, range_ptr,
    acc_ptr, m_ptr, l_ptr, blocks_ptr, sequences_ptr, count, total,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_wt, stride_wh,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    LEVELS: tl.constexpr, TRANSPORT: tl.constexpr, GATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block against itself: unnormalised output, maximum and sum of its softmax."""
    i_block, i_hq = tl.program_id(0), tl.program_id(1)
    i_h = i_hq // G
    token, valid, _, _, _, _ = block_row(blocks_ptr, sequences_ptr, i_block, LEVELS)
    o, o_d, o_v = tl.arange(0, 64), tl.arange(0, DP), tl.arange(0, DVP)
    here = i_h.to(tl.int64) * count + i_block
    b_q = load_tile(q_ptr + token * stride_qt + i_hq * stride_qh, o, stride_qt, o_d, valid, D)
    b_k = load_tile(k_ptr + token * stride_kt + i_h * stride_kh, o, stride_kt, o_d, valid, D)
    b_qw = b_q
    if TRANSPORT:
        dtype: tl.constexpr = e_ptr.dtype.element_ty
        b_q = (b_q.to(tl.float32) * tl.load(range_ptr)).to(dtype)
        b_k = (b_k.to(tl.float32) * tl.load(range_ptr + 1)).to(dtype)
        b_w = load_tile(w_ptr + token * stride_wt + i_h * stride_wh, o, stride_wt, o_d, valid, D)
        b_qw = tl.dot(b_q, tl.trans(b_w.to(dtype)), input_precision=PRECISION)
        b_qw = tl.where(o[:, None] >= o[None, :], b_qw, 0.0).to(dtype)
    b_s = local_scores(
        b_q, b_k, b_qw, e_ptr, here, tl.load(range_ptr + 2), c_ptr + i_hq.to(tl.int64) * total, token, valid,
        TRANSPORT, GATE, PRECISION,
    )  # fmt: skip
    b_v = load_tile(v_ptr + token * stride_vt + i_h * stride_vh, o, stride_vt, o_v, valid, DV)
    b_m = tl.max(b_s, 1)
    b_p = tl.math.exp2(b_s - b_m[:, None])
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, input_precision=PRECISION)
    row = (i_hq.to(tl.int64) * count + i_block) * 64
    tl.store(m_ptr + row + o, b_m)
    tl.store(l_ptr + row + o, tl.sum(b_p, 1))
    tl.store(acc_ptr + row * DVP + o[:, None] * DVP + o_v[None, :], b_acc)


@triton.jit
def local_bwd_kernel(
    q_ptr, k_ptr, v_ptr, w_ptr, do_ptr, c_ptr, e_ptr, g_ptr, range_ptr, lse2_ptr, delta_ptr,
    dqt_ptr, dkt_ptr, dvt_ptr, rows_ptr, columns_ptr,
    dq_ptr, dk_ptr, dv_ptr, dkl_ptr, de_ptr, dg_ptr, dw_ptr, blocks_ptr, sequences_ptr, count, total,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_wt, stride_wh,
    stride_dt, stride_dh, stride_dqt, stride_dqh, stride_dkt, stride_dkh, stride_dvt, stride_dvh,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    LEVELS: tl.constexpr, TRANSPORT: tl.constexpr, GATE: tl.constexpr, PRECISION: tl.constexpr,
    MOVE_PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients through a block's own scores and its queries' move: final dq, dv.

    With Q̃ = Q − tril(Q Wᵀ) G and A = Q Kᵀ − tril(Q Wᵀ) Eᵀ. Without transport dk is
    final too; with it, dE, dG and a share of dK and dW go to `block_bwd_kernel`.
    """
    i_block, i_h = tl.program_id(0), tl.program_id(1)
    token, valid, _, _, _, _ = block_row(blocks_ptr, sequences_ptr, i_block, LEVELS)
    o, o_d, o_v = tl.arange(0, 64), tl.arange(0, DP), tl.arange(0, DVP)
    here = i_h.to(tl.int64) * count + i_block
    o_tile = here * 64 * DP + o[:, None] * DP + o_d[None, :]
    inside = o < valid
    m_d = inside[:, None] & (o_d[None, :] < D)
    logit_scale = tl.load(range_ptr + 2)
    grad_scale = tl.load(range_ptr + 3)
    b_k = load_tile(k_ptr + token * stride_kt + i_h * stride_kh, o, stride_kt, o_d, valid, D)
    b_v = load_tile(v_ptr + token * stride_vt + i_h * stride_vh, o, stride_vt, o_v, valid, DV)
    o_value = here * 64 * DVP + o[:, None] * DVP + o_v[None, :]
    b_dv = tl.load(dvt_ptr + o_value)
    b_w = b_k
    if TRANSPORT:
        b_dk = tl.zeros([64, DP], tl.float32)
        dtype: tl.constexpr = e_ptr.dtype.element_ty
        b_k = (b_k.to(tl.float32) * tl.load(range_ptr + 1)).to(dtype)
        b_w = load_tile(w_ptr + token * stride_wt + i_h * stride_wh, o, stride_wt, o_d, valid, D)
        b_w = b_w.to(dtype)
        b_e = tl.load(e_ptr + here * 4096 + o[:, None] * 64 + o[None, :])
        b_g = tl.load(g_ptr + o_tile).to(tl.float32)
        b_de = tl.zeros([64, 64], tl.float32)
        b_dg = tl.zeros([64, DP], tl.float32)
        b_dw = tl.zeros([64, DP], tl.float32)
    else:
        b_dk = tl.load(dkt_ptr + o_tile)
    for g in range(0, G):
        i_hq = i_h * G + g
        row = (i_hq.to(tl.int64) * count + i_block) * 64
        b_q = load_tile(q_ptr + token * stride_qt + i_hq * stride_qh, o, stride_qt, o_d, valid, D)
        b_do = load_tile(do_ptr + token * stride_dt + i_hq * stride_dh, o, stride_dt, o_v, valid, DV)
        b_dq = tl.load(dqt_ptr + row * DP + o[:, None] * DP + o_d[None, :])
        b_qw = b_q
        if TRANSPORT:
            b_q = (b_q.to(tl.float32) * tl.load(range_ptr)).to(dtype)
            b_qw = tl.dot(b_q, tl.trans(b_w), input_precision=PRECISION)
            b_qw = tl.where(o[:, None] >= o[None, :], b_qw, 0.0).to(dtype)
        b_s = local_scores(
            b_q, b_k, b_qw, e_ptr, here, logit_scale, c_ptr + i_hq.to(tl.int64) * total, token,
            valid, TRANSPORT, GATE, PRECISION,
        )  # fmt: skip
        b_p = tl.math.exp2(b_s - tl.load(lse2_ptr + row + o)[:, None])
        b_dv = tl.dot(tl.trans(b_p).to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
        b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        b_ds = b_p * (b_dp * grad_scale - tl.load(delta_ptr + row + o)[:, None])
        if GATE:
            p_rows, p_columns = rows_ptr + row + o, columns_ptr + row + o
            tl.store(p_rows, tl.load(p_rows) + tl.sum(b_ds, 1))
            tl.store(p_columns, tl.load(p_columns) + tl.sum(b_ds, 0))
        b_ds = b_ds.to(b_q.dtype)
        b_dk = tl.dot(tl.trans(b_ds), b_q, b_dk, input_precision=PRECISION)
        if TRANSPORT:
            b_de -= tl.dot(tl.trans(b_ds), b_qw, input_precision=PRECISION)
            b_dqw = -tl.dot(b_dq, tl.trans(b_g), input_precision=MOVE_PRECISION)
            b_dqw -= tl.dot(b_ds, b_e, input_precision=PRECISION)
            b_dqw = tl.where(o[:, None] >= o[None, :], b_dqw, 0.0)
            b_dg -= tl.dot(tl.trans(b_qw).to(tl.float32), b_dq, input_precision=MOVE_PRECISION)
            b_dw += tl.dot(tl.trans(b_dqw), b_q.to(tl.float32), input_precision=MOVE_PRECISION)
            b_dq = tl.dot(b_dqw, b_w.to(tl.float32), b_dq, input_precision=MOVE_PRECISION)
        b_dq = tl.dot(b_ds, b_k, b_dq, input_precision=PRECISION) * tl.load(range_ptr + 4)
        p_dq = dq_ptr + token * stride_dqt + i_hq * stride_dqh
        tl.store(
            p_dq + o[:, None] * stride_dqt + o_d[None, :], b_dq.to(dq_ptr.dtype.element_ty), m_d
        )
    p_dv = dv_ptr + token * stride_dvt + i_h * stride_dvh
    m_v = inside[:, None] & (o_v[None, :] < DV)
    tl.store(p_dv + o[:, None] * stride_dvt + o_v[None, :], b_dv.to(dv_ptr.dtype.element_ty), m_v)
    if TRANSPORT:
        tl.store(dkl_ptr + o_tile, b_dk)
        tl.store(de_ptr + here * 4096 + o[:, None] * 64 + o[None, :], b_de)
        tl.store(dg_ptr + o_tile, b_dg)
        tl.store(dw_ptr + o_tile, b_dw)
    else:
        p_dk = dk_ptr + token * stride_dkt + i_h * stride_dkh
        b_dk *= tl.load(range_ptr + 5)
        tl.store(
            p_dk + o[:, None] * stride_dkt + o_d[None, :], b_dk.to(dk_ptr.dtype.element_ty), m_d
        )
