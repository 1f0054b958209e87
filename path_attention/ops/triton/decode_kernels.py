"""Split-KV attention to sealed units, and what merges its parts.

docs/algorithm.md §5. Rows are a chunk's tokens × the query heads of one key head, so that grouped
heads share what is read of their keys. Partial results carry a log-sum-exp to base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from path_attention.ops.triton.primitives import FLOAT32, range_of

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


# --- What the kernels share ----------------------------------------------------------------------


@triton.jit
def masked_softmax_step(b_s, b_m, b_l, b_acc, b_v):
    """As `softmax_step` for scores to base 2 of which any may be −∞, all of a row too."""
    b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
    b_top = tl.where(b_m_new == float("-inf"), 0.0, b_m_new)
    b_p = tl.math.exp2(b_s - b_top[:, None])
    b_alpha = tl.math.exp2(b_m - b_top)
    b_l = b_l * b_alpha + tl.sum(b_p, 1)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_alpha[:, None], input_precision=FLOAT32)
    return b_m_new, b_l, b_acc


@triton.jit
def store_part(out_ptr, lse_ptr, at, rows, o, o_v, b_m, b_l, b_acc, DVP: tl.constexpr):
    """Rows o < rows of a part: log-sum-exp, and output unless that is −∞, for want of keys."""
    inside = o < rows
    empty = b_l == 0.0
    b_acc = b_acc / tl.where(empty, 1.0, b_l)[:, None]
    b_lse = tl.where(empty, float("-inf"), b_m + tl.math.log2(tl.where(empty, 1.0, b_l)))
    at = at.to(tl.int64) * rows
    tl.store(out_ptr + (at + o[:, None]) * DVP + o_v[None, :], b_acc, (inside & ~empty)[:, None])
    tl.store(lse_ptr + at + o, b_lse, inside)


@triton.jit
def _load_part(out_ptr, lse_ptr, at, rows, o, o_v, DVP: tl.constexpr):
    """What `store_part` left, as a softmax to go on with."""
    inside, at = o < rows, at.to(tl.int64) * rows
    b_m = tl.load(lse_ptr + at + o, inside, other=float("-inf"))
    known = b_m > float("-inf")
    p_out = out_ptr + (at + o[:, None]) * DVP + o_v[None, :]
    return b_m, tl.where(known, 1.0, 0.0), tl.load(p_out, known[:, None], other=0.0)


# --- Sealed units --------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["length", "rows"])
def units_kernel(
    q_ptr, elapsed_ptr, k_ptr, v_ptr, move_ptr, decay_ptr, fade_ptr, valid_ptr, rows_ptr,
    out_ptr, lse_ptr, scale, length, unit, rows,
    stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt, stride_mb, stride_mu,
    stride_mh, stride_cb, stride_ch, stride_ct, stride_fb, stride_fu, stride_ab,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr,
    DVP: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    MOVE: tl.constexpr, GATE: tl.constexpr, FADE: tl.constexpr, VALID: tl.constexpr,
    INDEX: tl.constexpr, LOW: tl.constexpr, RESUME: tl.constexpr,
):  # fmt: skip
    """Rows against one piece of a group's keys; at each unit they move to its end first.

    q: float32 [B·H, rows, DP]; elapsed [B·H, rows]. INDEX: `rows_ptr` says which stored row a row
    reads. LOW: rows are more than the keys' dtype holds, and go in as a sum high + low. RESUME: on
    top of the part that is there, of another group.
    """
    i_split, i_bh, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_b, i_h = i_bh // H, i_bh % H
    stored = i_b.to(tl.int64)
    if INDEX:
        stored = tl.load(rows_ptr + i_b)
    o, o_n = i_r * BR + tl.arange(0, BR), tl.arange(0, BN)
    o_d, o_v = tl.arange(0, DP), tl.arange(0, DVP)
    inside = o < rows
    each = tl.cdiv(tl.cdiv(length, BN), tl.num_programs(0)) * BN
    first = i_split * each
    stop = tl.minimum(first + each, length)
    part = i_split * tl.num_programs(1) + i_bh
    b_m = tl.full([BR], float("-inf"), tl.float32)
    b_l = tl.zeros([BR], tl.float32)
    b_acc = tl.zeros([BR, DVP], tl.float32)
    if first < stop:
        if RESUME:
            b_m, b_l, b_acc = _load_part(out_ptr, lse_ptr, part, rows, o, o_v, DVP)
        at = i_bh.to(tl.int64) * rows
        b_q = tl.load(q_ptr + (at + o[:, None]) * DP + o_d[None, :], inside[:, None], other=0.0)
        in_range = range_of(b_q)
        b_q *= in_range
        scale2 = scale * LOG2_E / in_range
        head = i_h * G + o % G
        if GATE:
            b_elapsed = tl.load(elapsed_ptr + at + o, inside, other=0.0)
        k_ptr += stored * stride_kb + i_h.to(tl.int64) * stride_kh
        v_ptr += stored * stride_vb + i_h.to(tl.int64) * stride_vh
        for i_unit in tl.range(first // unit, tl.cdiv(stop, unit), num_stages=1):
            b_x = b_q
            if MOVE:
                p_move = move_ptr + stored * stride_mb + i_unit * stride_mu
                p_move += i_h.to(tl.int64) * stride_mh
                mask = (o_d[:, None] < D) & (o_d[None, :] < D)
                b_move = tl.load(p_move + o_d[:, None] * D + o_d[None, :], mask, other=0.0)
                if k_ptr.dtype.element_ty == tl.float32:
                    b_x = tl.dot(b_q, tl.trans(b_move), input_precision=FLOAT32)
                else:
                    b_move = tl.trans(b_move.to(tl.float16))
                    b_high = b_q.to(tl.float16)
                    b_low = (b_q - b_high.to(tl.float32)).to(tl.float16)
                    b_x = tl.dot(b_high, b_move, tl.dot(b_low, b_move))
            b_high = b_x.to(k_ptr.dtype.element_ty)
            if LOW:
                b_low = (b_x - b_high.to(tl.float32)).to(k_ptr.dtype.element_ty)
            if GATE:
                b_start = b_elapsed
                if FADE:
                    p_fade = fade_ptr + stored * stride_fb + i_unit * stride_fu
                    b_start += tl.load(p_fade + head, inside, other=0.0)
            lo = tl.maximum(first, i_unit * unit)
            hi = tl.minimum(stop, (i_unit + 1) * unit)
            for j in tl.range(lo, hi, BN, num_stages=STAGES):
                o_j = j + o_n
                seen = o_j < hi
                p_k = k_ptr + o_j.to(tl.int64)[:, None] * stride_kt + o_d[None, :]
                b_k = tl.load(p_k, seen[:, None] & (o_d[None, :] < D), other=0.0)
                b_s = tl.dot(b_high, tl.trans(b_k), input_precision=FLOAT32)
                if LOW:
                    b_s = tl.dot(b_low, tl.trans(b_k), b_s)
                b_s *= scale2
                if GATE:
                    p_decay = decay_ptr + stored * stride_cb + o_j.to(tl.int64) * stride_ct
                    if G == 1:
                        b_decay = tl.load(p_decay + i_h * stride_ch, seen, other=0.0)[None, :]
                    else:
                        p_heads = p_decay[None, :] + head[:, None] * stride_ch
                        b_decay = tl.load(p_heads, inside[:, None] & seen[None, :], other=0.0)
                    b_s += (b_start[:, None] + b_decay) * LOG2_E
                shown = seen
                if VALID:
                    shown &= tl.load(valid_ptr + stored * stride_ab + o_j, seen, other=0) != 0
                b_s = tl.where(shown[None, :], b_s, float("-inf"))
                p_v = v_ptr + o_j.to(tl.int64)[:, None] * stride_vt + o_v[None, :]
                b_v = tl.load(p_v, seen[:, None] & (o_v[None, :] < DV), other=0.0)
                b_m, b_l, b_acc = masked_softmax_step(b_s, b_m, b_l, b_acc, b_v)
    if (first < stop) | (not RESUME):
        store_part(out_ptr, lse_ptr, part, rows, o, o_v, b_m, b_l, b_acc, DVP)


@triton.jit
def merge_row(
    part_ptr, part_lse_ptr, own_ptr, own_lse_ptr, out_ptr, lse_ptr, parts, step, at, o_row, o_v,
    DV: tl.constexpr, DVP: tl.constexpr, BP: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Merge the parts of row `at` of `step` into row o_row; with OWN also what lies there of it."""
    o = tl.arange(0, BP)
    b_top = tl.full([BP], float("-inf"), tl.float32)
    for part in tl.range(0, parts, BP, num_stages=1):
        p_lse = part_lse_ptr + (part + o) * step + at
        b_top = tl.maximum(b_top, tl.load(p_lse, part + o < parts, other=float("-inf")))
    top = tl.max(b_top, 0)
    own = float("-inf")
    if OWN:
        own = tl.load(own_lse_ptr + o_row) * LOG2_E
        top = tl.maximum(top, own)
    finite = tl.where(top == float("-inf"), 0.0, top)
    b_sum = tl.zeros([BP], tl.float32)
    b_out = tl.zeros([DVP], tl.float32)
    for part in tl.range(0, parts, BP, num_stages=1):
        o_part = (part + o) * step + at
        b_lse = tl.load(part_lse_ptr + o_part, part + o < parts, other=float("-inf"))
        b_weight = tl.math.exp2(b_lse - finite)
        p_part = part_ptr + o_part.to(tl.int64)[:, None] * DVP + o_v[None, :]
        b_part = tl.load(p_part, (b_weight > 0)[:, None], other=0.0)
        b_sum += b_weight
        b_out += tl.sum(b_part * b_weight[:, None], 0)
    total = tl.sum(b_sum, 0)
    if OWN:
        weight = tl.math.exp2(own - finite)
        total += weight
        b_own = tl.load(own_ptr + o_row * DV + o_v, o_v < DV, other=0.0)
        b_out += weight * b_own.to(tl.float32)
    divisor = tl.where(total == 0, 1.0, total)
    b_out = b_out / divisor
    tl.store(out_ptr + o_row * DV + o_v, b_out.to(out_ptr.dtype.element_ty), o_v < DV)
    lse = (finite + tl.math.log2(divisor)) * 0.6931471805599453
    tl.store(lse_ptr + o_row, tl.where(total == 0, float("-inf"), lse))


@triton.jit(do_not_specialize=["parts", "rows", "T"])
def merge_kernel(
    part_ptr, part_lse_ptr, own_ptr, own_lse_ptr, out_ptr, lse_ptr, parts, rows, T,
    H: tl.constexpr, G: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, BP: tl.constexpr,
    OWN: tl.constexpr,
):  # fmt: skip
    """One row of all parts, of one row and key head of the batch; with OWN, one more of outputs."""
    i_bh, i_r = tl.program_id(0), tl.program_id(1)
    o_row = (((i_bh // H).to(tl.int64) * T + i_r // G) * H + i_bh % H) * G + i_r % G
    merge_row(
        part_ptr, part_lse_ptr, own_ptr, own_lse_ptr, out_ptr, lse_ptr, parts,
        tl.num_programs(0) * rows, i_bh * rows + i_r, o_row, tl.arange(0, DVP), DV, DVP, BP, OWN,
    )  # fmt: skip
