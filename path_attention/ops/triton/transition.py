"""Blocks and their transitions: the UT transform, moved keys, and the tree of products.

docs/algorithm.md §2–§4. A block's transition P = I − Gᵀ W is never formed: what goes through it
does so by its factors, and the tree begins with pairs of blocks. Queries and keys are scaled into
range, directions are unit vectors: every operand of a product is at most a few units, so float16
operands keep their full precision.
"""

from __future__ import annotations

import triton
import triton.language as tl

from path_attention.ops.triton.primitives import (
    FLOAT32,
    block_row,
    dot_exact,
    load_tile,
    node,
    range_of,
    reflect,
    stored_block,
)

_COUNTS = ["count", "nodes", "queries", "keys", "levels", "level"]


@triton.jit
def _merge(b_x, b_n, HALF: tl.constexpr, OPERAND: tl.constexpr):
    """From inverses of HALF rows each to twice as many: X − X N' X, N' being N between the two."""
    o = tl.arange(0, 64)
    r, c = o[:, None], o[None, :]
    between = (r // (2 * HALF) == c // (2 * HALF)) & (r // HALF != c // HALF)
    b_nx = dot_exact(tl.where(between, b_n, 0.0), b_x, OPERAND)
    return b_x - dot_exact(b_x, b_nx, OPERAND)


@triton.jit
def block_inverse(b_w, b_beta, OPERAND: tl.constexpr):
    """X = (I + N)⁻¹, N = diag(β)·striu(W Wᵀ): 8 rows by substitution, then merged. [64, 64]"""
    o = tl.arange(0, 64)
    r, c = o[:, None], o[None, :]
    b_ww = dot_exact(b_w, tl.trans(b_w), OPERAND)
    b_n = tl.where(r < c, b_ww * b_beta[:, None], 0.0)

    # The eight diagonal squares of 8, [8, 8, 8]; the transpose of N, so that a column is a row.
    b_nt = tl.reshape(tl.where(r > c, b_ww * b_beta[None, :], 0.0), [8, 8, 8, 8])
    o_8 = tl.arange(0, 8)
    same = o_8[:, None, None, None] == o_8[None, None, :, None]
    b_nt = tl.sum(tl.where(same, b_nt, 0.0), 2)
    row, column = o_8[None, :, None], o_8[None, None, :]
    b_d = tl.where(row == column, 1.0, 0.0) + tl.zeros([8, 8, 8], tl.float32)
    for i in tl.static_range(1, 8):
        b_column = tl.sum(tl.where(row == i, b_nt, 0.0), 1)  # N[:, i], [8, 8]
        b_sum = tl.sum(b_d * b_column[:, None, :], 2)
        b_d = tl.where(column == i, b_d - b_sum[:, :, None], b_d)
    b_x = tl.where(same, b_d[:, :, None, :], 0.0) + tl.zeros([8, 8, 8, 8], tl.float32)
    b_x = tl.reshape(b_x, [64, 64])

    b_x = _merge(b_x, b_n, 8, OPERAND)
    b_x = _merge(b_x, b_n, 16, OPERAND)
    return _merge(b_x, b_n, 32, OPERAND)


@triton.jit
def _store_parts(high_ptr, low_ptr, offset, b_x):
    """A float32 tile as 16-bit operands, high + low; as it is where operands are float32."""
    b_high = b_x.to(high_ptr.dtype.element_ty)
    tl.store(high_ptr + offset, b_high)
    if high_ptr.dtype.element_ty != tl.float32:
        tl.store(low_ptr + offset, (b_x - b_high.to(tl.float32)).to(high_ptr.dtype.element_ty))


@triton.jit
def _load_parts(high_ptr, low_ptr, offset):
    b_x = tl.load(high_ptr + offset).to(tl.float32)
    if high_ptr.dtype.element_ty != tl.float32:
        b_x += tl.load(low_ptr + offset).to(tl.float32)
    return b_x


@triton.jit(do_not_specialize=_COUNTS)
def block_fwd_kernel(
    k_ptr, w_ptr, beta_ptr, range_ptr,
    x_ptr, kt_ptr, e_ptr, g_ptr, low_ptr, wx_ptr, blocks_ptr, sequences_ptr, count, levels,
    stride_kt, stride_kh, stride_wt, stride_wh, stride_bt, stride_bh,
    D: tl.constexpr, DP: tl.constexpr, OPERAND: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Solve one block: K̃ = K − E W at its end, E = striu(K Wᵀ) T, G = Tᵀ W."""
    i_block, i_h = tl.program_id(0), tl.program_id(1)
    token, valid, _, _, _, _ = block_row(blocks_ptr, sequences_ptr, i_block, levels)
    o, o_d = tl.arange(0, 64), tl.arange(0, DP)
    here = i_h.to(tl.int64) * count + i_block
    o_square = here * 4096 + o[:, None] * 64 + o[None, :]
    o_tile = here * 64 * DP + o[:, None] * DP + o_d[None, :]
    b_w = load_tile(w_ptr + i_h * stride_wh, token, stride_wt, o, o_d, valid, D).to(tl.float32)
    p_beta = beta_ptr + i_h * stride_bh + (token.to(tl.int64) + o) * stride_bt
    b_beta = tl.load(p_beta, o < valid, other=0.0).to(tl.float32)
    b_t = block_inverse(b_w, b_beta, OPERAND)
    if BACKWARD:
        tl.store(x_ptr + o_square, b_t)
    b_t *= b_beta[None, :]
    _store_parts(g_ptr, low_ptr, o_tile, dot_exact(tl.trans(b_t), b_w, OPERAND))

    b_wx = b_w.to(OPERAND)
    tl.store(wx_ptr + o_tile, b_wx)
    b_k = load_tile(k_ptr + i_h * stride_kh, token, stride_kt, o, o_d, valid, D)
    b_k = (b_k.to(tl.float32) * tl.load(range_ptr + 1)).to(OPERAND)
    b_kw = tl.dot(b_k, tl.trans(b_wx), input_precision=FLOAT32)
    b_kw = tl.where(o[:, None] < o[None, :], b_kw, 0.0).to(OPERAND)
    b_e = tl.dot(b_kw, b_t.to(OPERAND), input_precision=FLOAT32).to(OPERAND)
    tl.store(e_ptr + o_square, b_e)
    b_kt = b_k.to(tl.float32) - tl.dot(b_e, b_wx, input_precision=FLOAT32)
    tl.store(kt_ptr + o_tile, b_kt.to(OPERAND))


@triton.jit(do_not_specialize=_COUNTS)
def pair_fwd_kernel(
    w_ptr, g_ptr, g_low_ptr, p_ptr, low_ptr, blocks_ptr, sequences_ptr, count, nodes, levels,
    stride_wt, stride_wh, D: tl.constexpr, DP: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """The tree's first transitions, P = (I − G₀ᵀ W₀)(I − G₁ᵀ W₁) of two blocks.

    = I − G₀ᵀ W₀ − (G₁ − G₁ W₀ᵀ G₀)ᵀ W₁.
    """
    i_block, i_h = tl.program_id(0), tl.program_id(1)
    token, _, i, size, _, table = block_row(blocks_ptr, sequences_ptr, i_block, levels)
    if ((i & 1) == 0) & (i + 2 <= size):
        valid = tl.load(blocks_ptr + i_block * 4 + 5)  # of the second block
        o, o_d = tl.arange(0, 64), tl.arange(0, DP)
        o_tile = (i_h.to(tl.int64) * count + i_block) * 64 * DP + o[:, None] * DP + o_d[None, :]
        w_ptr += i_h * stride_wh
        b_w0 = load_tile(w_ptr, token, stride_wt, o, o_d, 64, D).to(tl.float32)
        b_g0 = _load_parts(g_ptr, g_low_ptr, o_tile)
        b_g1 = _load_parts(g_ptr, g_low_ptr, o_tile + 64 * DP)
        b_g1 -= dot_exact(dot_exact(b_g1, tl.trans(b_w0), OPERAND), b_g0, OPERAND)
        o_p = (i_h.to(tl.int64) * nodes + node(table, i >> 1, 1)) * DP * DP
        for start in tl.range(0, DP, 64, num_stages=1):
            o_c = start + o
            b_w0c = load_tile(w_ptr, token, stride_wt, o, o_c, 64, D).to(tl.float32)
            b_w1c = load_tile(w_ptr, token + 64, stride_wt, o, o_c, valid, D).to(tl.float32)
            b_p = tl.where(o_d[:, None] == o_c[None, :], 1.0, 0.0)
            b_p -= dot_exact(tl.trans(b_g0), b_w0c, OPERAND)
            b_p -= dot_exact(tl.trans(b_g1), b_w1c, OPERAND)
            _store_parts(p_ptr, low_ptr, o_p + o_d[:, None] * DP + o_c[None, :], b_p)


@triton.jit(do_not_specialize=_COUNTS)
def tree_fwd_kernel(
    p_ptr, low_ptr, blocks_ptr, sequences_ptr, nodes, levels, level,
    DP: tl.constexpr, DC: tl.constexpr,
):  # fmt: skip
    """P' = P_left P_right for the complete units of one level; a program a tile of P'."""
    i_block, i_h, i_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, _, i, size, _, table = block_row(blocks_ptr, sequences_ptr, i_block, levels)
    unit = i >> level
    if ((unit << level) == i) & (((unit + 1) << level) <= size):
        head = i_h.to(tl.int64) * nodes * DP * DP
        o_r = (i_tile // (DP // DC)) * DC + tl.arange(0, DC)
        o_c = (i_tile % (DP // DC)) * DC + tl.arange(0, DC)
        left = head + node(table, 2 * unit, level - 1).to(tl.int64) * DP * DP
        b_p = tl.zeros([DC, DC], tl.float32)
        for start in tl.range(0, DP, DC, num_stages=1):
            o_k = start + tl.arange(0, DC)
            o_left = left + o_r[:, None] * DP + o_k[None, :]
            o_right = left + (DP + o_k[:, None]) * DP + o_c[None, :]
            b_left = tl.load(p_ptr + o_left)
            b_right = tl.load(p_ptr + o_right)
            if p_ptr.dtype.element_ty != tl.float32:
                b_p = tl.dot(b_left, tl.load(low_ptr + o_right), b_p)
                b_p = tl.dot(tl.load(low_ptr + o_left), b_right, b_p)
            b_p = tl.dot(b_left, b_right, b_p, input_precision=FLOAT32)
        o_p = head + node(table, unit, level).to(tl.int64) * DP * DP
        _store_parts(p_ptr, low_ptr, o_p + o_r[:, None] * DP + o_c[None, :], b_p)


@triton.jit(do_not_specialize=_COUNTS)
def keys_fwd_kernel(
    kt_ptr, g_ptr, wx_ptr, p_desc, kh_ptr, blocks_ptr, sequences_ptr,
    count, nodes, keys, levels, DP: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Carry one block's keys up the tree; store them at the end of each left unit they are in."""
    i_block, i_h = tl.program_id(0), tl.program_id(1)
    _, _, i, size, _, table = block_row(blocks_ptr, sequences_ptr, i_block, levels)
    o, o_d = tl.arange(0, 64), tl.arange(0, DP)
    o_tile = o[:, None] * DP + o_d[None, :]
    o_here = (i_h.to(tl.int64) * count + i_block) * 64 * DP + o_tile
    b_k = tl.load(kt_ptr + o_here)
    kh_ptr += i_h.to(tl.int64) * keys * 64 * DP
    if ((i & 1) == 0) & (i + 1 < size):
        tl.store(kh_ptr + stored_block(table, i, 0, 1).to(tl.int64) * 64 * DP + o_tile, b_k)
        b_g, b_w = tl.load(g_ptr + o_here + 64 * DP), tl.load(wx_ptr + o_here + 64 * DP)
        b_k = reflect(b_k, b_g, b_w, OPERAND).to(OPERAND)
    for level in tl.range(1, levels, num_stages=1):
        unit = i >> level
        if ((unit & 1) == 0) & (((unit + 1) << level) < size):
            at = stored_block(table, i, level, 1).to(tl.int64)
            tl.store(kh_ptr + at * 64 * DP + o_tile, b_k)
            if ((unit + 2) << level) < size:  # else no unit of the next level meets from here
                b_p = p_desc.load([(i_h * nodes + node(table, unit + 1, level)) * DP, 0])
                b_k = tl.dot(b_k, b_p, input_precision=FLOAT32).to(OPERAND)


@triton.jit(do_not_specialize=_COUNTS)
def tree_bwd_kernel(
    p_ptr, dp_ptr, blocks_ptr, sequences_ptr, nodes, levels, level,
    DP: tl.constexpr, DC: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Hand a unit's dP' down to its halves: dP_left += dP' P_rightᵀ, dP_right += P_leftᵀ dP'."""
    i_block, i_h, i_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, _, i, size, _, table = block_row(blocks_ptr, sequences_ptr, i_block, levels)
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
        for start in tl.range(0, DP, DC, num_stages=1):
            o_k = start + tl.arange(0, DC)
            b_above = tl.load(p_above + o_r[:, None] * DP + o_k[None, :])
            b_right = tl.load(p_ptr + left + DP * DP + o_c[None, :] * DP + o_k[:, None])
            scale = range_of(b_above)
            product = tl.dot((b_above * scale).to(OPERAND), b_right, input_precision=FLOAT32)
            b_dleft += product / scale
            b_left = tl.load(p_ptr + left + o_k[None, :] * DP + o_r[:, None])
            b_above = tl.load(p_above + o_k[:, None] * DP + o_c[None, :])
            scale = range_of(b_above)
            product = tl.dot(b_left, (b_above * scale).to(OPERAND), input_precision=FLOAT32)
            b_dright += product / scale
        tl.store(dp_ptr + left + o_tile, b_dleft)
        tl.store(dp_ptr + left + DP * DP + o_tile, b_dright)


@triton.jit(do_not_specialize=_COUNTS)
def pair_bwd_kernel(
    g_ptr, wx_ptr, dp_ptr, kh_ptr, qh_ptr, dkt_ptr, dqt_ptr, dg_ptr, dwl_ptr,
    blocks_ptr, sequences_ptr, count, nodes, queries, keys, levels,
    G: tl.constexpr, DP: tl.constexpr, PART: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Gradients of one block's factors from its pair's transition and from what crossed the block;
    of what crossed, carried back through it.

    The left block's transition in P' = P₀ P₁ and in q' = q P₀ᵀ, the right one's in P' and in
    k' = k P₁. Both are one computation: X, Y are W, G on the left and G, W on the right; A, B the
    other block's G, W on the left and W, G on the right; D is dP' on the left, its transpose on
    the right. With X' = X − (X Aᵀ) B and Y' = Y D:

        dY = −X' Dᵀ,  dX = (Y' Bᵀ) A − Y';  and rows u that became u' = u − (u Xᵀ) Y:
        dY −= (u Xᵀ)ᵀ du',  dX −= (du' Yᵀ)ᵀ u,  du = du' − (du' Yᵀ) X.
    """
    i_block, i_h = tl.program_id(0), tl.program_id(1)
    _, _, i, size, _, table = block_row(blocks_ptr, sequences_ptr, i_block, levels)
    right = i & 1
    o, o_d, o_r = tl.arange(0, 64), tl.arange(0, DP), tl.arange(0, PART)
    o_tile = o[:, None] * DP + o_d[None, :]
    head, head_q = i_h.to(tl.int64), i_h.to(tl.int64) * G
    b_dx = tl.zeros([64, DP], tl.float32)
    o_here = (head * count + i_block) * 64 * DP
    if (right == 0) & (i + 1 >= size):
        tl.store(dg_ptr + o_here + o_tile, b_dx)
        tl.store(dwl_ptr + o_here + o_tile, b_dx)
    else:
        other = i_block + 1 - 2 * right
        o_other = (head * count + other) * 64 * DP
        stride_r, stride_c = tl.where(right == 1, 1, DP), tl.where(right == 1, DP, 1)
        if right == 1:
            p_x, p_y, p_dx, p_dy = g_ptr, wx_ptr, dg_ptr + o_here, dwl_ptr + o_here
            p_u = kh_ptr + (head * keys + stored_block(table, i - 1, 0, 1)) * 64 * DP
            p_du = dkt_ptr + o_other
            crossings = tl.where(i + 1 < size, 1, 0)
        else:
            p_x, p_y, p_dx, p_dy = wx_ptr, g_ptr, dwl_ptr + o_here, dg_ptr + o_here
            p_u = qh_ptr + (head_q * queries + stored_block(table, i + 1, 0, 0)) * 64 * DP
            p_du = dqt_ptr + (head_q * count + other) * 64 * DP
            crossings = tl.where(i > 0, G, 0)
        # Tiles are read anew for each use: held through, they would fill shared memory.
        if levels > 1:
            b_x = tl.load(p_x + o_here + o_tile)
            b_a, b_b = tl.load(p_y + o_other + o_tile), tl.load(p_x + o_other + o_tile)
            b_xm = reflect(b_x, b_a, b_b, OPERAND).to(OPERAND)
            p_dp = dp_ptr + (head * nodes + node(table, i >> 1, 1)) * DP * DP
            for start in tl.range(0, DP, PART, num_stages=1):
                b_d = tl.load(p_dp + (start + o_r[:, None]) * stride_r + o_d[None, :] * stride_c)
                scale = range_of(b_d)
                b_d = (b_d * scale).to(OPERAND)
                b_yr = tl.load(p_y + o_here + o[:, None] * DP + start + o_r[None, :])
                b_dx += tl.dot(b_yr, b_d, input_precision=FLOAT32) / scale
                b_dyr = tl.dot(b_xm, tl.trans(b_d), input_precision=FLOAT32)
                tl.store(p_dy + o[:, None] * DP + start + o_r[None, :], b_dyr / -scale)
            scale = range_of(b_dx)
            b_a, b_b = tl.load(p_y + o_other + o_tile), tl.load(p_x + o_other + o_tile)
            b_dx = reflect(b_dx * scale, b_b, b_a, OPERAND) / -scale
        else:
            tl.store(p_dy + o_tile, b_dx)
        tl.debug_barrier()  # rows of other threads are read next
        b_dy = tl.load(p_dy + o_tile)
        for _ in tl.range(0, crossings, num_stages=1):
            b_u, b_du = tl.load(p_u + o_tile), tl.load(p_du + o_tile)
            scale = range_of(b_du)
            b_dux = (b_du * scale).to(OPERAND)
            b_xc = tl.load(p_x + o_here + o_tile)
            b_ux = tl.dot(b_u, tl.trans(b_xc), input_precision=FLOAT32).to(OPERAND)
            b_dy -= tl.dot(tl.trans(b_ux), b_dux, input_precision=FLOAT32) / scale
            b_yc = tl.load(p_y + o_here + o_tile)
            b_uy = tl.dot(b_dux, tl.trans(b_yc), input_precision=FLOAT32).to(OPERAND)
            b_dx -= tl.dot(tl.trans(b_uy), b_u, input_precision=FLOAT32) / scale
            b_xc = tl.load(p_x + o_here + o_tile)
            b_du -= tl.dot(b_uy, b_xc, input_precision=FLOAT32) / scale
            tl.store(p_du + o_tile, b_du)
            p_u += queries.to(tl.int64) * 64 * DP
            p_du += count.to(tl.int64) * 64 * DP
        tl.store(p_dx + o_tile, b_dx)
        tl.store(p_dy + o_tile, b_dy)
