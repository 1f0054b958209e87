"""The kernels of stick-breaking attention; `stick_breaking.py` says how they work together.

Rows of q, k, v and dO are blocks of 64, padded with zeros, so every tile is whole; only the
diagonal one has a mask. Queries walk from there to the left, some blocks of keys (CHUNK) at a time:
where nothing is left of all 64 sticks, so that shares and gradients are zero in float32, the rest
of the way is skipped but for the sum that log_remaining is.

RECTANGLE: keys are of other tokens, all of them before all queries (`stick_rectangle.py`). There is
no diagonal tile; each sequence's keys are padded in front, where a walk arrives last.
"""

from __future__ import annotations

import triton
import triton.language as tl

from path_attention.ops.triton.primitives import FLOAT32, load_tile

_HIGHEST = tl.constexpr(6e4)  # of a softplus in float16; beyond it nothing is left anyway
_SHIFT = tl.constexpr(14.0)  # float16 shares are multiplied by 2¹⁴, away from its smallest numbers
_GONE = tl.constexpr(-150.0)  # log₂ of what is left: shares of it are zero in float32
_USED_UP = tl.constexpr(2.0**-26)  # of the stick: what is left of δ there is its rounding


# --- What the kernels share ----------------------------------------------------------------------


@triton.jit
def softplus(b_s, EXACT: tl.constexpr):
    """log₂(1 + 2ˢ) = max(s, 0) + log₂(1 + x), x = 2^−|s|.

    log₂(1 + x) / x is a polynomial, right to 2⁻¹⁹ or (EXACT) 2⁻²²: small x keep all their digits,
    and the units that do exponentials have enough of those to do.
    """
    b_x = tl.math.exp2(-tl.abs(b_s))
    if EXACT:
        b_p = 0.00757913763 * b_x - 0.0426871934
        b_p = b_p * b_x + 0.113051991
        b_p = b_p * b_x - 0.197285225
        b_p = b_p * b_x + 0.275719669
        b_p = b_p * b_x - 0.358428493
        b_p = b_p * b_x + 0.480695475
        b_p = b_p * b_x - 0.721340329
        b_p = b_p * b_x + 1.442695
    else:
        b_p = 0.0204903461 * b_x - 0.0960662494
        b_p = b_p * b_x + 0.215588533
        b_p = b_p * b_x - 0.339247773
        b_p = b_p * b_x + 0.477705931
        b_p = b_p * b_x - 0.721162734
        b_p = b_p * b_x + 1.44269326
    return b_p * b_x + tl.maximum(b_s, 0.0)


@triton.jit
def triangle(DTYPE: tl.constexpr):
    """[64, 64]: 1 where the row is behind the column."""
    o = tl.arange(0, 64)
    return tl.where(o[:, None] > o[None, :], 1.0, 0.0).to(DTYPE)


@triton.jit
def rounded(b_x, DTYPE: tl.constexpr):
    """b_x to a 16-bit dtype's nearest number and back (bfloat16: in two integer operations, where a
    conversion of single numbers would take as long as an exponential)."""
    if tl.bfloat16 == DTYPE:
        b_bits = (b_x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000
        b_x = b_bits.to(tl.float32, bitcast=True)
    else:
        b_x = b_x.to(DTYPE).to(tl.float32)
    return b_x


@triton.jit
def behind(b_x, b_triangle, TERMS: tl.constexpr):
    """For each column the sum of those behind it; b_x as a sum of TERMS 16-bit numbers."""
    b_high = b_x
    if TERMS == 2:
        b_high = rounded(b_x, b_triangle.dtype)
    b_sum = tl.dot(b_high.to(b_triangle.dtype), b_triangle, input_precision=FLOAT32)
    if TERMS == 2:
        b_sum = tl.dot((b_x - b_high).to(b_triangle.dtype), b_triangle, b_sum)
    return b_sum


@triton.jit
def break_off(b_q, b_k, scale, b_ones, DIAGONAL: tl.constexpr, OPERAND: tl.constexpr):
    """Scores in base 2, −log₂(1 − σ), and its sums over the keys of the tile behind each."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=FLOAT32) * scale
    b_taking = softplus(b_s, tl.float32 == OPERAND)
    if DIAGONAL:
        o = tl.arange(0, 64)
        b_taking = tl.where(o[:, None] > o[None, :], b_taking, 0.0)
    b_capped = b_taking
    if tl.float32 != OPERAND:
        b_capped = tl.minimum(b_taking, _HIGHEST)
    return b_s, b_taking, behind(b_capped, b_ones, 2 if tl.float16 == OPERAND else 1)


@triton.jit
def shares_of(
    b_q, b_k, b_left, used_up, scale, b_ones, DIAGONAL: tl.constexpr, OPERAND: tl.constexpr
):
    """A tile's shares A, σ, σ where the stick is not used up, and row sums of −log₂(1 − σ).

    b_left: log₂ of what the keys behind the tile left, times what `_scales` chose.
    """
    b_s, b_taking, b_behind = break_off(b_q, b_k, scale, b_ones, DIAGONAL, OPERAND)
    b_taken = tl.sum(b_taking, 1)
    b_beta = tl.math.exp2(b_s - b_taking)
    if DIAGONAL:
        o = tl.arange(0, 64)
        b_beta = tl.where(o[:, None] > o[None, :], b_beta, 0.0)
    b_stick = tl.math.exp2(b_left[:, None] - b_behind)
    b_used = tl.where(b_stick <= used_up, 0.0, b_beta)  # NaN stays
    return b_beta * b_stick, b_beta, b_used, b_taken


@triton.jit
def taken_of(b_taking, hidden, RECTANGLE: tl.constexpr):
    """Row sums of −log₂(1 − σ), the first `hidden` keys left out: they are padding."""
    if RECTANGLE:
        b_taking = tl.where(tl.arange(0, 64)[None, :] >= hidden, b_taking, 0.0)
    return tl.sum(b_taking, 1)


@triton.jit
def score_gradients(
    b_a, b_beta, b_used, b_v, b_do, b_through, b_drest, b_factor, unit, b_ones,
    DREST: tl.constexpr, RECTANGLE: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """dS of a tile, and row sums of the gains A dA; b_through: what the keys behind left of δ.

    b_factor: what is left of the sticks at the rectangle's end, which b_a takes for whole ones.
    """
    b_gain = tl.dot(b_do, tl.trans(b_v), input_precision=FLOAT32)
    if tl.float16 == OPERAND:
        b_gain *= unit
    b_gain *= rounded(b_a, OPERAND)
    if RECTANGLE:
        b_gain *= b_factor[:, None]
    b_gained = tl.sum(b_gain, 1)
    b_through = b_through[:, None] - behind(b_gain, b_ones, 1 if tl.float32 == OPERAND else 2)
    b_ds = b_gain - b_used * b_through
    if DREST:
        b_ds -= b_beta * b_drest[:, None]
    return b_ds, b_gained


# --- Kernels -------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["key_blocks", "padding"])
def stick_fwd_kernel(
    q_desc, k_desc, v_desc, out_ptr, low_ptr, rest_ptr, blocks_ptr, order_ptr, scale,
    stride_ot, stride_oh, stride_rt, key_blocks, padding,
    G: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    STAGES: tl.constexpr, CHUNK: tl.constexpr, LOW: tl.constexpr, RECTANGLE: tl.constexpr,
    OPERAND: tl.constexpr,
):  # fmt: skip
    """One block of queries: output, what rounding takes off it (LOW), log of what remains.

    key_blocks, padding: of each sequence of a RECTANGLE, with so many keys of padding.
    """
    i_block, i_hq = tl.load(order_ptr + tl.program_id(0)), tl.program_id(1)
    i_h = i_hq // G
    token = tl.load(blocks_ptr + i_block * 4)
    valid = tl.load(blocks_ptr + i_block * 4 + 1)
    index = tl.load(blocks_ptr + i_block * 4 + 2)
    o, o_v = tl.arange(0, 64), tl.arange(0, DVP)
    shift = _SHIFT if tl.float16 == OPERAND else 0.0
    b_ones = triangle(tl.float32 if tl.float32 == OPERAND else tl.float16)
    row = i_block * 64
    b_q = q_desc.load([row, i_hq * DP])
    if RECTANGLE:
        index = key_blocks
        row = (tl.load(blocks_ptr + i_block * 4 + 3) + 1) * key_blocks * 64
        b_acc = tl.zeros([64, DVP], tl.float32)
        b_left = tl.zeros([64], tl.float32)
    else:
        b_v = v_desc.load([row, i_h * DVP])
        b_k = k_desc.load([row, i_h * DP])
        b_s, b_taking, b_behind = break_off(b_q, b_k, scale, b_ones, True, OPERAND)
        b_a = tl.math.exp2(b_s - b_taking - b_behind + shift)
        b_a = tl.where(o[:, None] > o[None, :], b_a, 0.0)
        b_acc = tl.dot(b_a.to(OPERAND), b_v, input_precision=FLOAT32)
        b_left = -tl.sum(b_taking, 1)
    for start in tl.range(0, index, CHUNK, num_stages=1):
        steps = tl.minimum(CHUNK, index - start)
        if tl.max(b_left) > _GONE:
            for step in tl.range(0, steps, num_stages=STAGES):
                row -= 64
                b_k = k_desc.load([row, i_h * DP])
                b_s, b_taking, b_behind = break_off(b_q, b_k, scale, b_ones, False, OPERAND)
                b_a = tl.math.exp2(b_s - b_taking - b_behind + (b_left + shift)[:, None])
                b_v = v_desc.load([row, i_h * DVP])
                b_acc = tl.dot(b_a.to(OPERAND), b_v, b_acc, input_precision=FLOAT32)
                hidden = tl.where(start + step == index - 1, padding, 0)
                b_left -= taken_of(b_taking, hidden, RECTANGLE)
        else:
            for step in tl.range(0, steps, num_stages=STAGES):
                row -= 64
                b_k = k_desc.load([row, i_h * DP])
                b_s = tl.dot(b_q, tl.trans(b_k), input_precision=FLOAT32) * scale
                hidden = tl.where(start + step == index - 1, padding, 0)
                b_left -= taken_of(softplus(b_s, tl.float32 == OPERAND), hidden, RECTANGLE)
    if tl.float16 == OPERAND:
        b_acc *= 1.0 / 16384.0
    inside = o < valid
    o_out = i_hq * stride_oh + (token.to(tl.int64) + o)[:, None] * stride_ot + o_v[None, :]
    m_out = inside[:, None] & (o_v[None, :] < DV)
    b_out = b_acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + o_out, b_out, m_out)
    if LOW:
        b_low = (b_acc - b_out.to(tl.float32)).to(out_ptr.dtype.element_ty)
        tl.store(low_ptr + o_out, b_low, m_out)
    p_rest = rest_ptr + (token.to(tl.int64) + o) * stride_rt + i_hq
    tl.store(p_rest, b_left * 0.6931471805599453, inside)


@triton.jit(do_not_specialize=["count", "notes", "key_blocks"])
def stick_queries_bwd_kernel(
    q_desc, k_desc, v_desc, do_desc, do_ptr, out_ptr, low_ptr, drest_ptr, taken_ptr, whole_ptr,
    scales_ptr, left_ptr, through_ptr, reach_ptr, dq_ptr, blocks_ptr, queries_ptr, count, notes,
    key_blocks, scale, score_scale,
    stride_dt, stride_dh, stride_ot, stride_oh, stride_qt, stride_qh,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    STAGES: tl.constexpr, CHUNK: tl.constexpr, LOW: tl.constexpr, DREST: tl.constexpr,
    RECTANGLE: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Gradient of one block of a panel's queries; notes at each block of keys.

    Of a RECTANGLE: −log₂ of what is left where the walk begins, and what it finds of δ there.
    """
    i_block, i_hq = tl.load(queries_ptr + tl.program_id(0) * 2), tl.program_id(1)
    note = (i_hq.to(tl.int64) * notes + tl.load(queries_ptr + tl.program_id(0) * 2 + 1)) * 64
    i_h = i_hq // G
    token = tl.load(blocks_ptr + i_block * 4)
    valid = tl.load(blocks_ptr + i_block * 4 + 1)
    index = tl.load(blocks_ptr + i_block * 4 + 2)
    o, o_d, o_v = tl.arange(0, 64), tl.arange(0, DP), tl.arange(0, DVP)
    grad_scale, unit = tl.load(scales_ptr), tl.load(scales_ptr + 1)
    share_scale = tl.math.exp2(tl.load(scales_ptr + 2))
    used_up = _USED_UP * share_scale
    b_ones = triangle(tl.float32 if tl.float32 == OPERAND else tl.float16)
    b_gain_ones = triangle(OPERAND)
    row = i_block * 64
    b_q = q_desc.load([row, i_hq * DP])
    b_do = do_desc.load([row, i_hq * DVP])
    b_left = tl.zeros([64], tl.float32) + tl.load(scales_ptr + 2)
    b_gone = b_left
    b_drest = b_left
    at_rows = (i_hq * count + i_block).to(tl.int64) * 64 + o
    if DREST:
        b_drest = tl.load(drest_ptr + at_rows)
    if RECTANGLE:
        index = key_blocks
        row = (tl.load(blocks_ptr + i_block * 4 + 3) + 1) * key_blocks * 64
        b_gone = tl.load(taken_ptr + at_rows)
        b_through = tl.load(whole_ptr + at_rows)
        b_dq = tl.zeros([64, DP], tl.float32)
    else:
        b_out = load_tile(out_ptr + i_hq * stride_oh, token, stride_ot, o, o_v, valid, DV)
        b_out = b_out.to(tl.float32)
        if LOW:
            b_out += load_tile(low_ptr + i_hq * stride_oh, token, stride_ot, o, o_v, valid, DV)
        b_out *= load_tile(do_ptr + i_hq * stride_dh, token, stride_dt, o, o_v, valid, DV)
        b_through = tl.sum(b_out, 1) * grad_scale
        b_k = k_desc.load([row, i_h * DP])
        b_v = v_desc.load([row, i_h * DVP])
        tl.store(left_ptr + note + index * 64 + o, b_left)
        tl.store(through_ptr + note + index * 64 + o, b_through)
        b_a, b_beta, b_used, b_taken = shares_of(
            b_q, b_k, b_left, used_up, scale, b_ones, True, OPERAND
        )
        b_ds, b_gained = score_gradients(
            b_a,
            b_beta,
            b_used,
            b_v,
            b_do,
            b_through,
            b_drest,
            b_left,
            unit,
            b_gain_ones,
            DREST,
            False,
            OPERAND,
        )
        # (Loaded again: the compiler of Triton 3.6 trips over one load that two products outside of
        # a loop read, one of them transposed.)
        b_k = k_desc.load([row, i_h * DP])
        b_dq = tl.dot(b_ds.to(OPERAND), b_k, input_precision=FLOAT32)
        b_left -= b_taken
        b_through -= b_gained
    b_factor = tl.math.exp2(-b_gone)  # of a RECTANGLE
    asked = False  # whether log_remaining has a gradient here
    if DREST:
        asked = tl.max(tl.where(b_drest == 0.0, 0, 1)) > 0
    reach = index
    for start in tl.range(0, index, CHUNK, num_stages=1):
        stop = tl.minimum(start + CHUNK, index)
        b_stick = b_left
        if RECTANGLE:
            b_stick -= b_gone
        if asked or tl.max(b_stick) > _GONE:
            reach = index - stop
            for back in tl.range(start, stop, num_stages=STAGES):
                b_k = k_desc.load([row - 64 - back * 64, i_h * DP])
                b_v = v_desc.load([row - 64 - back * 64, i_h * DVP])
                at = note + (index - 1 - back) * 64 + o
                tl.store(left_ptr + at, b_left)
                tl.store(through_ptr + at, b_through)
                b_a, b_beta, b_used, b_taken = shares_of(
                    b_q, b_k, b_left, used_up, scale, b_ones, False, OPERAND
                )
                b_ds, b_gained = score_gradients(
                    b_a,
                    b_beta,
                    b_used,
                    b_v,
                    b_do,
                    b_through,
                    b_drest,
                    b_factor,
                    unit,
                    b_gain_ones,
                    DREST,
                    RECTANGLE,
                    OPERAND,
                )
                b_dq = tl.dot(b_ds.to(OPERAND), b_k, b_dq, input_precision=FLOAT32)
                b_left -= b_taken
                b_through -= b_gained
        else:
            for back in tl.range(start, stop, num_stages=1):
                at = note + (index - 1 - back) * 64 + o
                tl.store(left_ptr + at, b_left)
                tl.store(through_ptr + at, b_through)
    tl.store(reach_ptr + i_hq * count + i_block, reach)
    b_dq *= score_scale / grad_scale
    o_dq = i_hq * stride_qh + (token.to(tl.int64) + o)[:, None] * stride_qt + o_d[None, :]
    m_dq = (o < valid)[:, None] & (o_d[None, :] < D)
    tl.store(dq_ptr + o_dq, b_dq.to(dq_ptr.dtype.element_ty), m_dq)


@triton.jit(do_not_specialize=["count", "key_count", "notes"])
def stick_keys_bwd_kernel(
    q_desc, k_desc, v_desc, do_desc, drest_desc, taken_desc, left_desc, through_desc, reach_ptr,
    scales_ptr, dk_ptr, dv_ptr, dk_part_ptr, dv_part_ptr, blocks_ptr, keys_ptr, count, key_count,
    notes, scale, score_scale, stride_kt, stride_kh, stride_vt, stride_vh,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    STAGES: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, DREST: tl.constexpr,
    RECTANGLE: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of keys and values, of a panel's queries; added up over panels."""
    table = keys_ptr + tl.program_id(0) * 6
    i_block, i_h = tl.load(table), tl.program_id(1)
    diagonal, first, at_first = tl.load(table + 1), tl.load(table + 2), tl.load(table + 3)
    rows, stride = tl.load(table + 4), tl.load(table + 5)
    token = tl.load(blocks_ptr + i_block * 4)
    valid = tl.load(blocks_ptr + i_block * 4 + 1)
    index = tl.load(blocks_ptr + i_block * 4 + 2)
    o, o_d, o_v = tl.arange(0, 64), tl.arange(0, DP), tl.arange(0, DVP)
    o_c = tl.arange(0, CHUNK)
    grad_scale, unit = tl.load(scales_ptr), tl.load(scales_ptr + 1)
    share_scale = tl.math.exp2(tl.load(scales_ptr + 2))
    used_up = _USED_UP * share_scale
    b_ones = triangle(tl.float32 if tl.float32 == OPERAND else tl.float16)
    b_gain_ones = triangle(OPERAND)
    b_k = k_desc.load([i_block * 64, i_h * DP])
    b_v = v_desc.load([i_block * 64, i_h * DVP])
    b_dk = tl.zeros([64, DP], tl.float32)
    b_dv = tl.zeros([64, DVP], tl.float32)
    part = (i_h.to(tl.int64) * key_count + i_block) * 64
    o_dk = o[:, None] * DP + o_d[None, :]
    o_dv = o[:, None] * DVP + o_v[None, :]
    if PARTS and diagonal < 0:  # an earlier panel was there
        b_dk = tl.load(dk_part_ptr + part * DP + o_dk)
        b_dv = tl.load(dv_part_ptr + part * DVP + o_dv)
    for g in tl.range(0, G, num_stages=1):
        i_hq = i_h * G + g
        if not RECTANGLE and diagonal >= 0:
            b_q = q_desc.load([i_block * 64, i_hq * DP])
            b_do = do_desc.load([i_block * 64, i_hq * DVP])
            at = (i_hq * notes + diagonal) * 64
            b_left, b_through = left_desc.load([at]), through_desc.load([at])
            b_drest = b_left
            if DREST:
                b_drest = drest_desc.load([(i_hq * count + i_block) * 64])
            b_a, b_beta, b_used, _ = shares_of(
                b_q, b_k, b_left, used_up, scale, b_ones, True, OPERAND
            )
            b_dv = tl.dot(tl.trans(b_a.to(OPERAND)), b_do, b_dv, input_precision=FLOAT32)
            b_ds, _ = score_gradients(
                b_a,
                b_beta,
                b_used,
                b_v,
                b_do,
                b_through,
                b_drest,
                b_left,
                unit,
                b_gain_ones,
                DREST,
                False,
                OPERAND,
            )
            b_dk = tl.dot(tl.trans(b_ds.to(OPERAND)), b_q, b_dk, input_precision=FLOAT32)
        for start in tl.range(0, rows, CHUNK, num_stages=1):
            steps = tl.minimum(CHUNK, rows - start)
            p_reach = reach_ptr + i_hq * count + first + start + o_c
            reach = tl.min(tl.load(p_reach, o_c < steps, other=index + 1))
            if reach <= index:
                for r in tl.range(start, start + steps, num_stages=STAGES):
                    b_q = q_desc.load([(first + r) * 64, i_hq * DP])
                    b_do = do_desc.load([(first + r) * 64, i_hq * DVP])
                    at = (i_hq * notes + at_first + r * stride) * 64
                    b_left, b_through = left_desc.load([at]), through_desc.load([at])
                    b_drest = b_left
                    if DREST:
                        b_drest = drest_desc.load([(i_hq * count + first + r) * 64])
                    b_a, b_beta, b_used, _ = shares_of(
                        b_q, b_k, b_left, used_up, scale, b_ones, False, OPERAND
                    )
                    b_whole = b_a
                    b_factor = b_left
                    if RECTANGLE:
                        b_gone = taken_desc.load([(i_hq * count + first + r) * 64])
                        b_factor = tl.math.exp2(-b_gone)
                        b_whole = b_a * b_factor[:, None]
                    b_dv = tl.dot(
                        tl.trans(b_whole.to(OPERAND)), b_do, b_dv, input_precision=FLOAT32
                    )
                    b_ds, _ = score_gradients(
                        b_a,
                        b_beta,
                        b_used,
                        b_v,
                        b_do,
                        b_through,
                        b_drest,
                        b_factor,
                        unit,
                        b_gain_ones,
                        DREST,
                        RECTANGLE,
                        OPERAND,
                    )
                    b_dk = tl.dot(tl.trans(b_ds.to(OPERAND)), b_q, b_dk, input_precision=FLOAT32)
    if PARTS:
        tl.store(dk_part_ptr + part * DP + o_dk, b_dk)
        tl.store(dv_part_ptr + part * DVP + o_dv, b_dv)
    # Every panel writes its sum so far: the last one's stays.
    b_dk *= score_scale / grad_scale
    b_dv *= 1 / share_scale
    inside = (o < valid)[:, None]
    o_dk = i_h * stride_kh + (token.to(tl.int64) + o)[:, None] * stride_kt + o_d[None, :]
    o_dv = i_h * stride_vh + (token.to(tl.int64) + o)[:, None] * stride_vt + o_v[None, :]
    tl.store(dk_ptr + o_dk, b_dk.to(dk_ptr.dtype.element_ty), inside & (o_d[None, :] < D))
    tl.store(dv_ptr + o_dv, b_dv.to(dv_ptr.dtype.element_ty), inside & (o_v[None, :] < DV))
