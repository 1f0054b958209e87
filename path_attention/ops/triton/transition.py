"""Blocks and their transitions: the UT transform, moved keys, and the tree of products.

docs/algorithm.md §2, §3. Keys come scaled into range (`range_ptr`), see operator.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from path_attention.ops.triton.primitives import block_row, load_tile, node, stored_block


@triton.jit
def _inverse_16(g, r, c):
    """X = (I + N)⁻¹ for N[s, c] = g[c, s] where s < c: g is strictly lower. [16, 16]"""
    x = tl.where(r == c, 1.0, 0.0)
    for i in range(1, 16):
        n = tl.sum(tl.where(r == i, g, 0.0), 0)  # N[:, i]
        x = tl.where(c == i, x - tl.sum(x * n[None, :], 1)[:, None], x)
    return x


@triton.jit
def inverse_fwd_kernel(
    w_ptr, beta_ptr, x_ptr, blocks_ptr, sequences_ptr, count,
    stride_wt, stride_wh, stride_bt, stride_bh,
    D: tl.constexpr, DP: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """X = (I + diag(β)·striu(W Wᵀ))⁻¹ of one block, from 16 to 32 to 64 rows by merging."""
    i_block, i_h = tl.program_id(0), tl.program_id(1)
    token, valid, _, _, _, _ = block_row(blocks_ptr, sequences_ptr, i_block, LEVELS)
    o = tl.arange(0, 16)
    o_d = tl.arange(0, DP)
    r, c = o[:, None], o[None, :]
    w_ptr += token * stride_wt + i_h * stride_wh
    beta_ptr += token * stride_bt + i_h * stride_bh
    w0 = load_tile(w_ptr, o, stride_wt, o_d, valid, D).to(tl.float32)
    w1 = load_tile(w_ptr, o + 16, stride_wt, o_d, valid, D).to(tl.float32)
    w2 = load_tile(w_ptr, o + 32, stride_wt, o_d, valid, D).to(tl.float32)
    w3 = load_tile(w_ptr, o + 48, stride_wt, o_d, valid, D).to(tl.float32)
    b0 = tl.load(beta_ptr + o * stride_bt, o < valid, other=0.0).to(tl.float32)
    b1 = tl.load(beta_ptr + (o + 16) * stride_bt, o + 16 < valid, other=0.0).to(tl.float32)
    b2 = tl.load(beta_ptr + (o + 32) * stride_bt, o + 32 < valid, other=0.0).to(tl.float32)
    b3 = tl.load(beta_ptr + (o + 48) * stride_bt, o + 48 < valid, other=0.0).to(tl.float32)
    p: tl.constexpr = PRECISION
    x0 = _inverse_16(
        tl.where(r > c, tl.dot(w0, tl.trans(w0), input_precision=p) * b0[None, :], 0.0), r, c
    )
    x1 = _inverse_16(
        tl.where(r > c, tl.dot(w1, tl.trans(w1), input_precision=p) * b1[None, :], 0.0), r, c
    )
    x2 = _inverse_16(
        tl.where(r > c, tl.dot(w2, tl.trans(w2), input_precision=p) * b2[None, :], 0.0), r, c
    )
    x3 = _inverse_16(
        tl.where(r > c, tl.dot(w3, tl.trans(w3), input_precision=p) * b3[None, :], 0.0), r, c
    )
    # X_ij = −X_i Σ_k N_ik X_kj for i < j, k ≤ j
    n01 = tl.dot(w0, tl.trans(w1), input_precision=p) * b0[:, None]
    n23 = tl.dot(w2, tl.trans(w3), input_precision=p) * b2[:, None]
    x01 = -tl.dot(x0, tl.dot(n01, x1, input_precision=p), input_precision=p)
    x23 = -tl.dot(x2, tl.dot(n23, x3, input_precision=p), input_precision=p)
    n02 = tl.dot(w0, tl.trans(w2), input_precision=p) * b0[:, None]
    n03 = tl.dot(w0, tl.trans(w3), input_precision=p) * b0[:, None]
    n12 = tl.dot(w1, tl.trans(w2), input_precision=p) * b1[:, None]
    n13 = tl.dot(w1, tl.trans(w3), input_precision=p) * b1[:, None]
    m02 = tl.dot(n02, x2, input_precision=p)
    m03 = tl.dot(n02, x23, input_precision=p) + tl.dot(n03, x3, input_precision=p)
    m12 = tl.dot(n12, x2, input_precision=p)
    m13 = tl.dot(n12, x23, input_precision=p) + tl.dot(n13, x3, input_precision=p)
    x12 = -tl.dot(x1, m12, input_precision=p)
    x13 = -tl.dot(x1, m13, input_precision=p)
    x02 = -tl.dot(x0, m02, input_precision=p) - tl.dot(x01, m12, input_precision=p)
    x03 = -tl.dot(x0, m03, input_precision=p) - tl.dot(x01, m13, input_precision=p)
    x_ptr += (i_h.to(tl.int64) * count + i_block) * 64 * 64
    p_x = x_ptr + r * 64 + c
    zero = tl.zeros([16, 16], tl.float32)
    tl.store(p_x, x0)
    tl.store(p_x + 16, x01)
    tl.store(p_x + 32, x02)
    tl.store(p_x + 48, x03)
    p_x += 16 * 64
    tl.store(p_x, zero)
    tl.store(p_x + 16, x1)
    tl.store(p_x + 32, x12)
    tl.store(p_x + 48, x13)
    p_x += 16 * 64
    tl.store(p_x, zero)
    tl.store(p_x + 16, zero)
    tl.store(p_x + 32, x2)
    tl.store(p_x + 48, x23)
    p_x += 16 * 64
    tl.store(p_x, zero)
    tl.store(p_x + 16, zero)
    tl.store(p_x + 32, zero)
    tl.store(p_x + 48, x3)


@triton.jit
def block_fwd_kernel(
    k_ptr, w_ptr, beta_ptr, x_ptr, range_ptr,
    kt_ptr, e_ptr, g_ptr, p_ptr, blocks_ptr, sequences_ptr, count, nodes,
    stride_kt, stride_kh, stride_wt, stride_wh, stride_bt, stride_bh,
    D: tl.constexpr, DP: tl.constexpr, DC: tl.constexpr, LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One block: keys at its end K̃, their coefficients E = striu(K Wᵀ) T, G = Tᵀ W, P = I − Gᵀ W."""
    i_block, i_h = tl.program_id(0), tl.program_id(1)
    token, valid, i, _, _, table = block_row(blocks_ptr, sequences_ptr, i_block, LEVELS)
    o, o_d = tl.arange(0, 64), tl.arange(0, DP)
    dtype: tl.constexpr = kt_ptr.dtype.element_ty
    w_ptr += token * stride_wt + i_h * stride_wh
    b_w = load_tile(w_ptr, o, stride_wt, o_d, valid, D).to(tl.float32)  # [64, DP]
    b_k = load_tile(k_ptr + token * stride_kt + i_h * stride_kh, o, stride_kt, o_d, valid, D)
    b_k = (b_k.to(tl.float32) * tl.load(range_ptr + 1)).to(dtype)
    p_beta = beta_ptr + token * stride_bt + i_h * stride_bh + o * stride_bt
    b_beta = tl.load(p_beta, o < valid, other=0.0).to(tl.float32)
    here = i_h.to(tl.int64) * count + i_block
    b_t = tl.load(x_ptr + here * 4096 + o[:, None] * 64 + o[None, :]) * b_beta[None, :]

    b_kw = tl.dot(b_k, tl.trans(b_w.to(dtype)), input_precision=PRECISION)
    b_kw = tl.where(o[:, None] < o[None, :], b_kw, 0.0).to(dtype)
    b_e = tl.dot(b_kw, b_t.to(dtype), input_precision=PRECISION).to(dtype)
    tl.store(e_ptr + here * 4096 + o[:, None] * 64 + o[None, :], b_e)
    b_kt = b_k.to(tl.float32) - tl.dot(b_e, b_w.to(dtype), input_precision=PRECISION)
    o_tile = here * 64 * DP + o[:, None] * DP + o_d[None, :]
    tl.store(kt_ptr + o_tile, b_kt.to(dtype))
    b_g = tl.dot(tl.trans(b_t), b_w, input_precision=PRECISION)
    tl.store(g_ptr + o_tile, b_g.to(dtype))
    if LEVELS > 0:
        p_ptr += (i_h.to(tl.int64) * nodes + node(table, i, 0)) * DP * DP
        for start in range(0, DP, DC):
            o_c = start + tl.arange(0, DC)
            b_wc = load_tile(w_ptr, o, stride_wt, o_c, valid, D).to(tl.float32)
            b_p = tl.where(o_d[:, None] == o_c[None, :], 1.0, 0.0)
            b_p -= tl.dot(tl.trans(b_g), b_wc, input_precision=PRECISION)
            tl.store(p_ptr + o_d[:, None] * DP + o_c[None, :], b_p)


@triton.jit
def tree_fwd_kernel(
    p_ptr, blocks_ptr, sequences_ptr, nodes, level,
    DP: tl.constexpr, DC: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """P' = P_left P_right for the complete units of one level; a program a tile of P'."""
    i_block, i_h, i_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, _, i, size, _, table = block_row(blocks_ptr, sequences_ptr, i_block, LEVELS)
    unit = i >> level
    if ((unit << level) == i) & (((unit + 1) << level) <= size):
        p_ptr += i_h.to(tl.int64) * nodes * DP * DP
        o_r = (i_tile // (DP // DC)) * DC + tl.arange(0, DC)
        o_c = (i_tile % (DP // DC)) * DC + tl.arange(0, DC)
        p_left = p_ptr + node(table, 2 * unit, level - 1).to(tl.int64) * DP * DP
        b_p = tl.zeros([DC, DC], tl.float32)
        for start in range(0, DP, DC):
            o_k = start + tl.arange(0, DC)
            b_left = tl.load(p_left + o_r[:, None] * DP + o_k[None, :])
            b_right = tl.load(p_left + (DP + o_k[:, None]) * DP + o_c[None, :])
            b_p = tl.dot(b_left, b_right, b_p, input_precision=PRECISION)
        p_ptr += node(table, unit, level).to(tl.int64) * DP * DP
        tl.store(p_ptr + o_r[:, None] * DP + o_c[None, :], b_p)


@triton.jit
def keys_fwd_kernel(
    kt_ptr, p_ptr, kh_ptr, blocks_ptr, sequences_ptr, count, nodes, keys,
    DP: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Carry one block's keys up the tree; store them at the end of each left unit they meet from."""
    i_block, i_h = tl.program_id(0), tl.program_id(1)
    _, _, i, size, _, table = block_row(blocks_ptr, sequences_ptr, i_block, LEVELS)
    o, o_d = tl.arange(0, 64), tl.arange(0, DP)
    o_tile = o[:, None] * DP + o_d[None, :]
    o_p = o_d[:, None] * DP + o_d[None, :]
    b_k = tl.load(kt_ptr + (i_h.to(tl.int64) * count + i_block) * 64 * DP + o_tile).to(tl.float32)
    p_ptr += i_h.to(tl.int64) * nodes * DP * DP
    kh_ptr += i_h.to(tl.int64) * keys * 64 * DP
    for level in range(0, LEVELS):
        unit = i >> level
        if ((unit & 1) == 0) & (((unit + 1) << level) < size):
            at = stored_block(table, i, level, 1).to(tl.int64)
            tl.store(kh_ptr + at * 64 * DP + o_tile, b_k.to(kh_ptr.dtype.element_ty))
            if ((unit + 2) << level) < size:  # else no unit of the next level meets from here
                b_p = tl.load(p_ptr + node(table, unit + 1, level).to(tl.int64) * DP * DP + o_p)
                b_k = tl.dot(b_k, b_p, input_precision=PRECISION)


@triton.jit
def tree_bwd_kernel(
    p_ptr, dp_ptr, blocks_ptr, sequences_ptr, nodes, level,
    DP: tl.constexpr, DC: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Hand a unit's dP' down to its halves: dP_left += dP' P_rightᵀ, dP_right += P_leftᵀ dP'."""
    i_block, i_h, i_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, _, i, size, _, table = block_row(blocks_ptr, sequences_ptr, i_block, LEVELS)
    unit = i >> level
    if ((unit << level) == i) & (((unit + 1) << level) <= size):
        p_ptr += i_h.to(tl.int64) * nodes * DP * DP
        dp_ptr += i_h.to(tl.int64) * nodes * DP * DP
        o_r = (i_tile // (DP // DC)) * DC + tl.arange(0, DC)
        o_c = (i_tile % (DP // DC)) * DC + tl.arange(0, DC)
        left = node(table, 2 * unit, level - 1).to(tl.int64) * DP * DP
        p_above = dp_ptr + node(table, unit, level).to(tl.int64) * DP * DP
        o_tile = o_r[:, None] * DP + o_c[None, :]
        b_dleft = tl.load(dp_ptr + left + o_tile)
        b_dright = tl.load(dp_ptr + left + DP * DP + o_tile)
        for start in range(0, DP, DC):
            o_k = start + tl.arange(0, DC)
            b_above = tl.load(p_above + o_r[:, None] * DP + o_k[None, :])
            b_right = tl.load(p_ptr + left + DP * DP + o_c[None, :] * DP + o_k[:, None])
            b_dleft = tl.dot(b_above, b_right, b_dleft, input_precision=PRECISION)
            b_left = tl.load(p_ptr + left + o_k[None, :] * DP + o_r[:, None])
            b_above = tl.load(p_above + o_k[:, None] * DP + o_c[None, :])
            b_dright = tl.dot(b_left, b_above, b_dright, input_precision=PRECISION)
        tl.store(dp_ptr + left + o_tile, b_dleft)
        tl.store(dp_ptr + left + DP * DP + o_tile, b_dright)


@triton.jit
def block_bwd_kernel(
    k_ptr, w_ptr, beta_ptr, x_ptr, e_ptr, g_ptr, range_ptr,
    dkt_ptr, dkl_ptr, de_ptr, dg_ptr, dwl_ptr, dp_ptr, dk_ptr, dw_ptr, dbeta_ptr,
    blocks_ptr, sequences_ptr, count, nodes,
    stride_kt, stride_kh, stride_wt, stride_wh, stride_bt, stride_bh, stride_dkt, stride_dkh,
    stride_dwt, stride_dwh, stride_dbt, stride_dbh,
    D: tl.constexpr, DP: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
    MOVE_PRECISION: tl.constexpr,
):  # fmt: skip
    """Through one block's UT transform: final dk, dw, dβ (docs/algorithm.md §4).

    With K̃ = K − E W, E = striu(K Wᵀ) T, G = Tᵀ W, P = I − Gᵀ W, T = X diag(β) and
    X = (I + diag(β) striu(W Wᵀ))⁻¹, for which d(X⁻¹) = −Xᵀ dX Xᵀ. `dkt` is K̃'s gradient, `dkl` and
    `dwl` what K and W get through the block's own scores and its queries' move.
    """
    i_block, i_h = tl.program_id(0), tl.program_id(1)
    token, valid, i, size, _, table = block_row(blocks_ptr, sequences_ptr, i_block, LEVELS)
    o, o_d = tl.arange(0, 64), tl.arange(0, DP)
    here = i_h.to(tl.int64) * count + i_block
    o_tile = here * 64 * DP + o[:, None] * DP + o_d[None, :]
    o_square = here * 4096 + o[:, None] * 64 + o[None, :]
    p: tl.constexpr = MOVE_PRECISION
    b_w = load_tile(w_ptr + token * stride_wt + i_h * stride_wh, o, stride_wt, o_d, valid, D)
    b_w = b_w.to(tl.float32)
    b_k = load_tile(k_ptr + token * stride_kt + i_h * stride_kh, o, stride_kt, o_d, valid, D)
    b_k = b_k.to(tl.float32) * tl.load(range_ptr + 1)
    p_beta = beta_ptr + token * stride_bt + i_h * stride_bh + o * stride_bt
    b_beta = tl.load(p_beta, o < valid, other=0.0).to(tl.float32)
    b_x = tl.load(x_ptr + o_square)
    b_t = b_x * b_beta[None, :]
    upper = o[:, None] < o[None, :]

    b_dkt = tl.load(dkt_ptr + o_tile)
    b_de = tl.load(de_ptr + o_square) - tl.dot(b_dkt, tl.trans(b_w), input_precision=p)
    b_dw = tl.load(dwl_ptr + o_tile)
    b_dw -= tl.dot(tl.trans(tl.load(e_ptr + o_square)).to(tl.float32), b_dkt, input_precision=p)
    b_kw = tl.where(upper, tl.dot(b_k, tl.trans(b_w), input_precision=p), 0.0)
    b_dt = tl.dot(tl.trans(b_kw), b_de, input_precision=p)
    b_dkw = tl.where(upper, tl.dot(b_de, tl.trans(b_t), input_precision=p), 0.0)
    b_dw = tl.dot(tl.trans(b_dkw), b_k, b_dw, input_precision=p)
    b_dk = tl.load(dkl_ptr + o_tile) + b_dkt
    b_dk = tl.dot(b_dkw, b_w, b_dk, input_precision=p) * tl.load(range_ptr + 5)
    p_dk = dk_ptr + token * stride_dkt + i_h * stride_dkh
    inside = (o[:, None] < valid) & (o_d[None, :] < D)
    tl.store(
        p_dk + o[:, None] * stride_dkt + o_d[None, :], b_dk.to(dk_ptr.dtype.element_ty), inside
    )

    b_dg = tl.load(dg_ptr + o_tile)
    if LEVELS > 0:
        if i < size:
            o_p = (i_h.to(tl.int64) * nodes + node(table, i, 0)) * DP * DP
            b_dp = tl.load(dp_ptr + o_p + o_d[:, None] * DP + o_d[None, :])
            b_dg -= tl.dot(b_w, tl.trans(b_dp), input_precision=p)
            b_dw -= tl.dot(tl.load(g_ptr + o_tile).to(tl.float32), b_dp, input_precision=p)
    b_dt = tl.dot(b_w, tl.trans(b_dg), b_dt, input_precision=p)
    b_dw = tl.dot(b_t, b_dg, b_dw, input_precision=p)
    b_dbeta = tl.sum(b_x * b_dt, 0)
    b_da = tl.dot(tl.trans(b_x), b_dt, input_precision=p)
    b_da = tl.where(upper, -tl.dot(b_da, tl.trans(b_t), input_precision=p), 0.0)
    b_dbeta += tl.sum(b_da * tl.dot(b_w, tl.trans(b_w), input_precision=p), 1)
    b_dww = b_da * b_beta[:, None]
    b_dw = tl.dot(b_dww + tl.trans(b_dww), b_w, b_dw, input_precision=p)
    grad = tl.load(range_ptr + 6)
    p_dw = dw_ptr + token * stride_dwt + i_h * stride_dwh
    b_dw = (b_dw * grad).to(dw_ptr.dtype.element_ty)
    tl.store(p_dw + o[:, None] * stride_dwt + o_d[None, :], b_dw, inside)
    p_dbeta = dbeta_ptr + token * stride_dbt + i_h * stride_dbh + o * stride_dbt
    tl.store(p_dbeta, (b_dbeta * grad).to(dbeta_ptr.dtype.element_ty), o < valid)
