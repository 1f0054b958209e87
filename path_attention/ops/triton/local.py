"""Queries before they meet anyone further: their own block, its pair, and their way up the tree.

docs/algorithm.md §2–§4. A block's queries attend their block and, when they are the right half of
the first level's pair, the block before; moved to the block's start, they are carried up the tree
and stored wherever their unit is a right one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from path_attention.ops.triton.primitives import (
    FLOAT32,
    block_row,
    load_tile,
    node,
    reflect,
    softmax_step,
    stored_block,
)

_COUNTS = ["count", "nodes", "queries", "keys", "levels", "total"]


@triton.jit
def local_scores(
    b_q, b_k, b_qw, b_e, logit_scale, c_ptr, token, valid,
    TRANSPORT: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Causal scores of a block against itself, base 2. [64, 64]"""
    o = tl.arange(0, 64)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=FLOAT32)
    if TRANSPORT:
        b_s -= tl.dot(b_qw, tl.trans(b_e), input_precision=FLOAT32)
    b_s *= logit_scale
    if GATE:
        b_c = tl.load(c_ptr + token + o, o < valid, other=0.0)
        b_s += (b_c[:, None] - b_c[None, :]).to(tl.float32)
    seen = (o[:, None] >= o[None, :]) & ((o[None, :] < valid) | (o[:, None] >= valid))
    return tl.where(seen, b_s, float("-inf"))


@triton.jit(do_not_specialize=_COUNTS)
def queries_fwd_kernel(
    q_ptr, k_ptr, v_ptr, wx_ptr, c_ptr, e_ptr, g_ptr, p_desc, kh_ptr, qc_ptr, kc_ptr, range_ptr,
    qh_ptr, acc_ptr, m_ptr, l_ptr, blocks_ptr, sequences_ptr,
    count, nodes, queries, keys, levels, total,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    TRANSPORT: tl.constexpr, GATE: tl.constexpr, ATTEND: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Begin the softmax with the block and its pair's left one; store the queries per level."""
    i_block, i_hq = tl.program_id(0), tl.program_id(1)
    i_h = i_hq // G
    token, valid, i, _, _, table = block_row(blocks_ptr, sequences_ptr, i_block, levels)
    o, o_d, o_v = tl.arange(0, 64), tl.arange(0, DP), tl.arange(0, DVP)
    o_tile = o[:, None] * DP + o_d[None, :]
    here = i_h.to(tl.int64) * count + i_block
    b_q = load_tile(q_ptr + i_hq * stride_qh, token, stride_qt, o, o_d, valid, D)
    b_qw = b_q
    b_e = b_q
    if TRANSPORT:
        b_q = (b_q.to(tl.float32) * tl.load(range_ptr)).to(OPERAND)
        b_w = tl.load(wx_ptr + here * 64 * DP + o_tile)
        b_qw = tl.dot(b_q, tl.trans(b_w), input_precision=FLOAT32)
        b_qw = tl.where(o[:, None] >= o[None, :], b_qw, 0.0).to(OPERAND)
    if ATTEND:
        b_k = load_tile(k_ptr + i_h * stride_kh, token, stride_kt, o, o_d, valid, D)
        if TRANSPORT:
            b_k = (b_k.to(tl.float32) * tl.load(range_ptr + 1)).to(OPERAND)
            b_e = tl.load(e_ptr + here * 4096 + o[:, None] * 64 + o[None, :])
        b_s = local_scores(
            b_q, b_k, b_qw, b_e, tl.load(range_ptr + 2), c_ptr + i_hq.to(tl.int64) * total, token,
            valid, TRANSPORT, GATE,
        )  # fmt: skip
        v_ptr += i_h * stride_vh
        b_v = load_tile(v_ptr, token, stride_vt, o, o_v, valid, DV)
        b_m = tl.max(b_s, 1)
        b_p = tl.math.exp2(b_s - b_m[:, None])
        b_l = tl.sum(b_p, 1)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, input_precision=FLOAT32)
    if TRANSPORT:
        b_g = tl.load(g_ptr + here * 64 * DP + o_tile)
        b_q = b_q.to(tl.float32) - tl.dot(b_qw, b_g, input_precision=FLOAT32)
        b_q = b_q.to(OPERAND)
    if ATTEND:
        if (i & 1) == 1:
            if TRANSPORT:
                at = i_h.to(tl.int64) * keys + stored_block(table, i - 1, 0, 1)
                b_k = tl.load(kh_ptr + at * 64 * DP + o_tile)
            else:
                b_k = load_tile(k_ptr + i_h * stride_kh, token - 64, stride_kt, o, o_d, 64, D)
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision=FLOAT32) * tl.load(range_ptr + 2)
            if GATE:
                at_q = i_hq.to(tl.int64) * queries + stored_block(table, i, 0, 0)
                at_k = i_hq.to(tl.int64) * keys + stored_block(table, i - 1, 0, 1)
                b_s += tl.load(qc_ptr + at_q * 64 + o)[:, None]
                b_s += tl.load(kc_ptr + at_k * 64 + o)[None, :]
            b_v = load_tile(v_ptr, token - 64, stride_vt, o, o_v, 64, DV)
            b_m, b_l, b_acc = softmax_step(b_s, 1.0, b_m, b_l, b_acc, b_v)
        row = (i_hq.to(tl.int64) * count + i_block) * 64
        tl.store(m_ptr + row + o, b_m)
        tl.store(l_ptr + row + o, b_l)
        tl.store(acc_ptr + row * DVP + o[:, None] * DVP + o_v[None, :], b_acc)
    if TRANSPORT:
        qh_ptr += i_hq.to(tl.int64) * queries * 64 * DP
        if (i & 1) == 1:
            at = stored_block(table, i, 0, 0).to(tl.int64)
            tl.store(qh_ptr + at * 64 * DP + o_tile, b_q)
            o_left = (here - 1) * 64 * DP + o_tile
            b_w, b_g = tl.load(wx_ptr + o_left), tl.load(g_ptr + o_left)
            b_q = reflect(b_q, b_w, b_g, OPERAND).to(OPERAND)
        for level in tl.range(1, levels, num_stages=1):
            unit = i >> level
            if (unit & 1) == 1:
                at = stored_block(table, i, level, 0).to(tl.int64)
                tl.store(qh_ptr + at * 64 * DP + o_tile, b_q)
                if unit > 1:
                    b_move = p_desc.load([(i_h * nodes + node(table, unit - 1, level)) * DP, 0])
                    b_q = tl.dot(b_q, tl.trans(b_move), input_precision=FLOAT32).to(OPERAND)


@triton.jit(do_not_specialize=_COUNTS)
def pair_local_bwd_kernel(
    qh_ptr, kh_ptr, v_ptr, do_ptr, ql_ptr, kc_ptr, range_ptr, lse2_ptr, delta_ptr,
    dqt_ptr, dkt_ptr, dvt_ptr, rows_ptr, columns_ptr, blocks_ptr, sequences_ptr,
    count, queries, keys, levels, stride_vt, stride_vh, stride_dt, stride_dh,
    G: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Gradients through the scores of a pair: its right block's queries at its left one's keys."""
    i_block, i_h = tl.program_id(0), tl.program_id(1)
    token, _, i, size, _, table = block_row(blocks_ptr, sequences_ptr, i_block, levels)
    if ((i & 1) == 0) & (i + 1 < size):
        valid = tl.load(blocks_ptr + i_block * 4 + 5)  # of the right block
        o, o_d, o_v = tl.arange(0, 64), tl.arange(0, DP), tl.arange(0, DVP)
        o_tile, o_value = o[:, None] * DP + o_d[None, :], o[:, None] * DVP + o_v[None, :]
        here = (i_h.to(tl.int64) * count + i_block) * 64
        at_k = i_h.to(tl.int64) * keys + stored_block(table, i, 0, 1)
        at_right = stored_block(table, i + 1, 0, 0)
        b_k = tl.load(kh_ptr + at_k * 64 * DP + o_tile)
        b_v = load_tile(v_ptr + i_h * stride_vh, token, stride_vt, o, o_v, 64, DV)
        b_dk = tl.load(dkt_ptr + here * DP + o_tile)
        b_dv = tl.load(dvt_ptr + here * DVP + o_value)
        for g in tl.range(0, G, num_stages=1):
            i_hq = i_h * G + g
            at_q = i_hq.to(tl.int64) * queries + at_right
            row = (i_hq.to(tl.int64) * count + i_block + 1) * 64
            b_q = tl.load(qh_ptr + at_q * 64 * DP + o_tile)
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision=FLOAT32) * tl.load(range_ptr + 2)
            if GATE:
                at_kc = i_hq.to(tl.int64) * keys + stored_block(table, i, 0, 1)
                b_s += tl.load(kc_ptr + at_kc * 64 + o)[None, :]
                b_l = tl.load(ql_ptr + at_q * 64 + o)
            else:
                b_l = tl.load(lse2_ptr + row + o)
            b_p = tl.math.exp2(b_s - b_l[:, None])
            b_do = load_tile(do_ptr + i_hq * stride_dh, token + 64, stride_dt, o, o_v, valid, DV)
            b_dv = tl.dot(tl.trans(b_p).to(b_do.dtype), b_do, b_dv, input_precision=FLOAT32)
            b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=FLOAT32)
            b_ds = b_dp * tl.load(range_ptr + 3) - tl.load(delta_ptr + row + o)[:, None]
            b_ds *= b_p
            if GATE:
                p_rows, p_columns = rows_ptr + row + o, columns_ptr + row - 64 + o
                tl.store(p_rows, tl.load(p_rows) + tl.sum(b_ds, 1))
                tl.store(p_columns, tl.load(p_columns) + tl.sum(b_ds, 0))
            b_ds = b_ds.to(b_q.dtype)
            b_dk = tl.dot(tl.trans(b_ds), b_q, b_dk, input_precision=FLOAT32)
            p_dq = dqt_ptr + row * DP + o_tile
            tl.store(p_dq, tl.dot(b_ds, b_k, tl.load(p_dq), input_precision=FLOAT32))
        tl.store(dkt_ptr + here * DP + o_tile, b_dk)
        tl.store(dvt_ptr + here * DVP + o_value, b_dv)
