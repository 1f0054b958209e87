"""What blocks did by themselves, backwards: their own scores and the UT transform.

docs/algorithm.md §4. The last thing a gradient goes through: it has come from the other blocks, to
queries at a block's start and keys at its end, and leaves as that of the public inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from path_attention.ops.triton.local import local_scores
from path_attention.ops.triton.primitives import (
    FLOAT32,
    block_row,
    dot_exact,
    load_tile,
    range_of,
)

_COUNTS = ["count", "levels", "total", "g"]


@triton.jit
def _score_gradients(
    b_q, b_k, b_v, b_qw, b_e, do_ptr, stride_dt, c_ptr, range_ptr, lse2_ptr, delta_ptr,
    rows_ptr, columns_ptr, token, valid,
    DV: tl.constexpr, DVP: tl.constexpr, TRANSPORT: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """A block's shares P, its scores' gradients dS, and dO; dS's sums are added for the gates."""
    o, o_v = tl.arange(0, 64), tl.arange(0, DVP)
    b_s = local_scores(
        b_q, b_k, b_qw, b_e, tl.load(range_ptr + 2), c_ptr, token, valid, TRANSPORT, GATE
    )
    b_p = tl.math.exp2(b_s - tl.load(lse2_ptr + o)[:, None])
    b_do = load_tile(do_ptr, token, stride_dt, o, o_v, valid, DV)
    b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=FLOAT32)
    b_ds = b_p * (b_dp * tl.load(range_ptr + 3) - tl.load(delta_ptr + o)[:, None])
    if GATE:
        tl.store(rows_ptr + o, tl.load(rows_ptr + o) + tl.sum(b_ds, 1))
        tl.store(columns_ptr + o, tl.load(columns_ptr + o) + tl.sum(b_ds, 0))
    return b_p, b_ds.to(b_q.dtype), b_do


@triton.jit(do_not_specialize=_COUNTS)
def local_bwd_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, c_ptr, range_ptr, lse2_ptr, delta_ptr,
    dqt_ptr, dkt_ptr, dvt_ptr, rows_ptr, columns_ptr, dq_ptr, dk_ptr, dv_ptr,
    blocks_ptr, sequences_ptr, count, levels, total,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    stride_dt, stride_dh, stride_dqt, stride_dqh, stride_dkt, stride_dkh, stride_dvt, stride_dvh,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    GATE: tl.constexpr,
):  # fmt: skip
    """Without transport: gradients through a block's own scores, added to what came from the other
    blocks; final dq, dk, dv."""
    i_block, i_h = tl.program_id(0), tl.program_id(1)
    token, valid, _, _, _, _ = block_row(blocks_ptr, sequences_ptr, i_block, levels)
    o, o_d, o_v = tl.arange(0, 64), tl.arange(0, DP), tl.arange(0, DVP)
    here = (i_h.to(tl.int64) * count + i_block) * 64
    m_d = (o[:, None] < valid) & (o_d[None, :] < D)
    m_v = (o[:, None] < valid) & (o_v[None, :] < DV)
    t = token.to(tl.int64)
    b_k = load_tile(k_ptr + i_h * stride_kh, token, stride_kt, o, o_d, valid, D)
    b_v = load_tile(v_ptr + i_h * stride_vh, token, stride_vt, o, o_v, valid, DV)
    b_dk = tl.load(dkt_ptr + here * DP + o[:, None] * DP + o_d[None, :])
    b_dv = tl.load(dvt_ptr + here * DVP + o[:, None] * DVP + o_v[None, :])
    for g in tl.range(0, G, num_stages=1):
        i_hq = i_h * G + g
        row = (i_hq.to(tl.int64) * count + i_block) * 64
        b_q = load_tile(q_ptr + i_hq * stride_qh, token, stride_qt, o, o_d, valid, D)
        b_p, b_ds, b_do = _score_gradients(
            b_q, b_k, b_v, b_q, b_k, do_ptr + i_hq * stride_dh, stride_dt,
            c_ptr + i_hq.to(tl.int64) * total, range_ptr, lse2_ptr + row, delta_ptr + row,
            rows_ptr + row, columns_ptr + row, token, valid, DV, DVP, False, GATE,
        )  # fmt: skip
        b_dv = tl.dot(tl.trans(b_p).to(b_do.dtype), b_do, b_dv, input_precision=FLOAT32)
        b_dk = tl.dot(tl.trans(b_ds), b_q, b_dk, input_precision=FLOAT32)
        b_dq = tl.load(dqt_ptr + row * DP + o[:, None] * DP + o_d[None, :])
        b_dq = tl.dot(b_ds, b_k, b_dq, input_precision=FLOAT32) * tl.load(range_ptr + 4)
        p_dq = dq_ptr + i_hq * stride_dqh + t * stride_dqt
        p_dq += o[:, None] * stride_dqt + o_d[None, :]
        tl.store(p_dq, b_dq.to(dq_ptr.dtype.element_ty), m_d)
    p_dk = dk_ptr + i_h * stride_dkh + t * stride_dkt + o[:, None] * stride_dkt + o_d[None, :]
    tl.store(p_dk, (b_dk * tl.load(range_ptr + 5)).to(dk_ptr.dtype.element_ty), m_d)
    p_dv = dv_ptr + i_h * stride_dvh + t * stride_dvt + o[:, None] * stride_dvt + o_v[None, :]
    tl.store(p_dv, b_dv.to(dv_ptr.dtype.element_ty), m_v)


@triton.jit
def _settle(p_x, b_x, came, LAST: tl.constexpr):
    """A sum over launches: unless this is the last one, with what came before, back to memory."""
    if not LAST:
        if came:
            b_x += tl.load(p_x)
        tl.store(p_x, b_x)
    return b_x


@triton.jit
def _head_bwd(
    b_k, b_v, b_e, q_ptr, do_ptr, c_ptr, p_w, p_g, range_ptr, lse2_ptr, delta_ptr, dqt_ptr,
    rows_ptr, columns_ptr, dq_ptr, p_dv, p_dk, p_de, p_dg, p_dw, i_hq, i_block, token, valid,
    count, levels, total, g, stride_qt, stride_qh, stride_dt, stride_dh, stride_dqt, stride_dqh,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    GATE: tl.constexpr, OPERAND: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """One query head of a block: its dq, and its shares of dv, dk, dE, dG and dW.

    With Q̃ = Q − tril(Q Wᵀ) G and A = Q Kᵀ − tril(Q Wᵀ) Eᵀ.
    """
    o, o_d = tl.arange(0, 64), tl.arange(0, DP)
    row = (i_hq.to(tl.int64) * count + i_block) * 64
    lower = o[:, None] >= o[None, :]
    b_q = load_tile(q_ptr + i_hq * stride_qh, token, stride_qt, o, o_d, valid, D)
    b_q = (b_q.to(tl.float32) * tl.load(range_ptr)).to(OPERAND)
    b_qw = tl.dot(b_q, tl.trans(tl.load(p_w)), input_precision=FLOAT32)
    b_qw = tl.where(lower, b_qw, 0.0).to(OPERAND)
    b_p, b_ds, b_do = _score_gradients(
        b_q, b_k, b_v, b_qw, b_e, do_ptr + i_hq * stride_dh, stride_dt,
        c_ptr + i_hq.to(tl.int64) * total, range_ptr, lse2_ptr + row, delta_ptr + row,
        rows_ptr + row, columns_ptr + row, token, valid, DV, DVP, True, GATE,
    )  # fmt: skip
    b_dv = tl.load(p_dv)
    b_dv = tl.dot(tl.trans(b_p).to(b_do.dtype), b_do, b_dv, input_precision=FLOAT32)
    if not LAST:
        tl.store(p_dv, b_dv)
    b_de = _settle(p_de, -tl.dot(tl.trans(b_ds), b_qw, input_precision=FLOAT32), g > 0, LAST)
    b_dq = tl.load(dqt_ptr + row * DP + o[:, None] * DP + o_d[None, :])
    b_dqx = b_dq.to(OPERAND)
    came = (levels > 0) | (g > 0)  # what crossed the block, or a head before
    b_dg = _settle(p_dg, -tl.dot(tl.trans(b_qw), b_dqx, input_precision=FLOAT32), came, LAST)
    b_dqw = tl.dot(b_dqx, tl.trans(tl.load(p_g)), input_precision=FLOAT32)
    b_dqw = tl.dot(b_ds, b_e, b_dqw, input_precision=FLOAT32)
    b_dqw = tl.where(lower, -b_dqw, 0.0).to(OPERAND)
    b_dw = _settle(p_dw, tl.dot(tl.trans(b_dqw), b_q, input_precision=FLOAT32), came, LAST)
    # (w is read again: held through, it would fill shared memory.)
    b_dq = tl.dot(b_dqw, tl.load(p_w), b_dq, input_precision=FLOAT32)
    b_dq = tl.dot(b_ds, b_k, b_dq, input_precision=FLOAT32) * tl.load(range_ptr + 4)
    p_dq = dq_ptr + i_hq * stride_dqh + token.to(tl.int64) * stride_dqt
    p_dq += o[:, None] * stride_dqt + o_d[None, :]
    inside = (o[:, None] < valid) & (o_d[None, :] < D)
    tl.store(p_dq, b_dq.to(dq_ptr.dtype.element_ty), inside)
    if not LAST:
        tl.debug_barrier()  # p_dk may be this head's dQ̃: other threads may not have read it yet
    b_dk = _settle(p_dk, tl.dot(tl.trans(b_ds), b_q, input_precision=FLOAT32), g > 0, LAST)
    return b_dv, b_dk, b_de, b_dg, b_dw


@triton.jit
def _transform_bwd(
    b_k, b_w, b_e, b_dk, b_de, b_dg, b_dw, b_beta, p_x, p_dkt, OPERAND: tl.constexpr
):  # fmt: skip
    """Through K̃ = K − E W, E = striu(K Wᵀ) T and G = Tᵀ W: gradients of K, of W as yet, and of T.

    Gradients grow with the number of queries. Each is brought into range and back by a power of two
    of its own: what came across the block can be far smaller than what came inside it.
    """
    o = tl.arange(0, 64)
    upper = o[:, None] < o[None, :]
    scale = range_of(b_dg)
    b_dx = (b_dg * scale).to(OPERAND)
    b_t = (tl.load(p_x) * b_beta[None, :]).to(OPERAND)
    b_dt = tl.dot(b_w, tl.trans(b_dx), input_precision=FLOAT32) / scale
    b_dw += tl.dot(b_t, b_dx, input_precision=FLOAT32) / scale

    b_dkt = tl.load(p_dkt)
    b_dk += b_dkt
    scale = range_of(b_dkt)
    b_dx = (b_dkt * scale).to(OPERAND)
    b_de -= tl.dot(b_dx, tl.trans(b_w), input_precision=FLOAT32) / scale
    b_dw -= tl.dot(tl.trans(b_e), b_dx, input_precision=FLOAT32) / scale

    scale = range_of(b_de)
    b_dex = (b_de * scale).to(OPERAND)
    b_kw = tl.where(upper, tl.dot(b_k, tl.trans(b_w), input_precision=FLOAT32), 0.0).to(OPERAND)
    b_dt += tl.dot(tl.trans(b_kw), b_dex, input_precision=FLOAT32) / scale
    b_dkw = tl.where(upper, tl.dot(b_dex, tl.trans(b_t), input_precision=FLOAT32), 0.0)
    b_dkw = b_dkw.to(OPERAND)
    b_dk += tl.dot(b_dkw, b_w, input_precision=FLOAT32) / scale
    b_dw += tl.dot(tl.trans(b_dkw), b_k, input_precision=FLOAT32) / scale
    return b_dk, b_dw, b_dt


@triton.jit
def _inverse_bwd(b_w, b_beta, b_dt, p_x, OPERAND: tl.constexpr):
    """Through T = X diag(β), X = (I + diag(β) striu(W Wᵀ))⁻¹, d(X⁻¹) = −Xᵀ dX Xᵀ: shares of dW, dβ.

    d(X⁻¹) sums terms of both signs that all but cancel where directions repeat: exact products.
    """
    o = tl.arange(0, 64)
    b_x = tl.load(p_x)
    b_dbeta = tl.sum(b_x * b_dt, 0)
    scale_t = range_of(b_dt)
    b_dx = dot_exact(tl.trans(b_x), b_dt * scale_t, OPERAND)
    scale_x = range_of(b_dx)
    b_da = dot_exact(b_dx * scale_x, tl.trans(b_x * b_beta[None, :]), OPERAND)
    b_da = tl.where(o[:, None] < o[None, :], b_da * (-1 / (scale_t * scale_x)), 0.0)
    b_dbeta += tl.sum(b_da * tl.dot(b_w, tl.trans(b_w), input_precision=FLOAT32), 1)
    b_dww = b_da * b_beta[:, None]
    b_dww += tl.trans(b_dww)
    scale = range_of(b_dww)
    b_dww_w = tl.dot((b_dww * scale).to(OPERAND), b_w, input_precision=FLOAT32)
    return b_dww_w / scale, b_dbeta


@triton.jit(do_not_specialize=_COUNTS)
def block_bwd_kernel(
    q_ptr, k_ptr, v_ptr, wx_ptr, do_ptr, c_ptr, e_ptr, g_ptr, x_ptr, beta_ptr, range_ptr,
    lse2_ptr, delta_ptr, dqt_ptr, dkt_ptr, dvt_ptr, rows_ptr, columns_ptr, dg_ptr, dwl_ptr,
    dkl_ptr, de_ptr, dq_ptr, dk_ptr, dv_ptr, dw_ptr, dbeta_ptr,
    blocks_ptr, sequences_ptr, count, levels, total, g,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_dt, stride_dh,
    stride_bt, stride_bh, stride_dqt, stride_dqh, stride_dkt, stride_dkh, stride_dvt, stride_dvh,
    stride_dwt, stride_dwh, stride_dbt, stride_dbh,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    GATE: tl.constexpr, OPERAND: tl.constexpr, HEAD: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """With transport: HEAD, through a block's own scores for the g-th head of a group, final dq;
    LAST, through its UT transform, final dk, dv, dw, dβ.

    `dqt`, `dkt` are the gradients of Q̃ and K̃, `dg` and `dwl` what G and W get from what crossed the
    block. The heads of a group come one launch after another and add up in `dvt`, `dkl`, `de`, `dg`
    and `dwl`; g is how many came before. With one head `dkl` may be `dqt`, which is done with.
    """
    i_block, i_h = tl.program_id(0), tl.program_id(1)
    token, valid, _, _, _, _ = block_row(blocks_ptr, sequences_ptr, i_block, levels)
    o, o_d, o_v = tl.arange(0, 64), tl.arange(0, DP), tl.arange(0, DVP)
    here = i_h.to(tl.int64) * count + i_block
    o_tile = here * 64 * DP + o[:, None] * DP + o_d[None, :]
    o_value = here * 64 * DVP + o[:, None] * DVP + o_v[None, :]
    o_square = here * 4096 + o[:, None] * 64 + o[None, :]
    b_k = load_tile(k_ptr + i_h * stride_kh, token, stride_kt, o, o_d, valid, D)
    b_k = (b_k.to(tl.float32) * tl.load(range_ptr + 1)).to(OPERAND)
    b_e = tl.load(e_ptr + o_square)
    if HEAD:
        b_v = load_tile(v_ptr + i_h * stride_vh, token, stride_vt, o, o_v, valid, DV)
        b_dv, b_dk, b_de, b_dg, b_dw = _head_bwd(
            b_k, b_v, b_e, q_ptr, do_ptr, c_ptr, wx_ptr + o_tile, g_ptr + o_tile, range_ptr,
            lse2_ptr, delta_ptr, dqt_ptr, rows_ptr, columns_ptr, dq_ptr, dvt_ptr + o_value,
            dkl_ptr + o_tile, de_ptr + o_square, dg_ptr + o_tile, dwl_ptr + o_tile, i_h * G + g,
            i_block, token, valid, count, levels, total, g,
            stride_qt, stride_qh, stride_dt, stride_dh, stride_dqt, stride_dqh,
            D, DP, DV, DVP, GATE, OPERAND, LAST,
        )  # fmt: skip
    else:
        b_dk = tl.zeros([64, DP], tl.float32)
        b_dg, b_dw = b_dk, b_dk
        b_de = tl.zeros([64, 64], tl.float32)
        b_dv = tl.load(dvt_ptr + o_value)
    if LAST:
        t = token.to(tl.int64)
        if (levels > 0) | (g > 0):
            b_dg += tl.load(dg_ptr + o_tile)
            b_dw += tl.load(dwl_ptr + o_tile)
        if G > 1 or not HEAD:
            b_dk += tl.load(dkl_ptr + o_tile)
            b_de += tl.load(de_ptr + o_square)
        p_dv = dv_ptr + i_h * stride_dvh + t * stride_dvt + o[:, None] * stride_dvt + o_v[None, :]
        m_v = (o[:, None] < valid) & (o_v[None, :] < DV)
        tl.store(p_dv, b_dv.to(dv_ptr.dtype.element_ty), m_v)
        p_beta = beta_ptr + i_h * stride_bh + (t + o) * stride_bt
        b_beta = tl.load(p_beta, o < valid, other=0.0).to(tl.float32)
        b_w = tl.load(wx_ptr + o_tile)
        b_dk, b_dw, b_dt = _transform_bwd(
            b_k, b_w, b_e, b_dk, b_de, b_dg, b_dw, b_beta, x_ptr + o_square, dkt_ptr + o_tile,
            OPERAND,
        )  # fmt: skip
        inside = (o[:, None] < valid) & (o_d[None, :] < D)
        p_dk = dk_ptr + i_h * stride_dkh + t * stride_dkt + o[:, None] * stride_dkt + o_d[None, :]
        tl.store(p_dk, (b_dk * tl.load(range_ptr + 5)).to(dk_ptr.dtype.element_ty), inside)
        tl.store(dwl_ptr + o_tile, b_dw)  # out of the way
        tl.debug_barrier()
        b_dw, b_dbeta = _inverse_bwd(b_w, b_beta, b_dt, x_ptr + o_square, OPERAND)
        grad = tl.load(range_ptr + 6)
        b_dw = ((tl.load(dwl_ptr + o_tile) + b_dw) * grad).to(dw_ptr.dtype.element_ty)
        p_dw = dw_ptr + i_h * stride_dwh + t * stride_dwt + o[:, None] * stride_dwt + o_d[None, :]
        tl.store(p_dw, b_dw, inside)
        p_dbeta = dbeta_ptr + i_h * stride_dbh + (t + o) * stride_dbt
        tl.store(p_dbeta, (b_dbeta * grad).to(dbeta_ptr.dtype.element_ty), o < valid)
