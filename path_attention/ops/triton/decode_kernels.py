"""The kernels of decoding; `decode.py` says how they work together.

docs/algorithm.md §5. Rows are a chunk's tokens × the query heads of one key head, so that grouped
heads share what is read of their keys. Partial results carry a log-sum-exp to base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from path_attention.ops.triton.primitives import FLOAT32, dot_exact, range_of

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


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
    """Rows o < rows of a partial result: its output and log-sum-exp (−∞ where it has no key)."""
    inside = o < rows
    empty = b_l == 0.0
    b_acc = b_acc / tl.where(empty, 1.0, b_l)[:, None]
    b_lse = tl.where(empty, float("-inf"), b_m + tl.math.log2(tl.where(empty, 1.0, b_l)))
    at = at.to(tl.int64) * rows
    tl.store(out_ptr + (at + o[:, None]) * DVP + o_v[None, :], b_acc, inside[:, None])
    tl.store(lse_ptr + at + o, b_lse, inside)


@triton.jit
def load_row(p, o, D: tl.constexpr):
    """One row of D elements in float32, zero behind them."""
    return tl.load(p + o, o < D, other=0.0).to(tl.float32)


@triton.jit
def pass_factors(
    b_x, applies, w_ptr, beta_ptr, token, o_d, D: tl.constexpr, F: tl.constexpr, BACK: tl.constexpr
):
    """Rows x of a tile through H of one token where it applies: x H, or H x with BACK."""
    for n in tl.static_range(F):
        at = token * F + (F - 1 - n if BACK else n)
        b_w = load_row(w_ptr + at * D, o_d, D)
        beta = tl.load(beta_ptr + at).to(tl.float32)
        b_xw = tl.where(applies, beta * tl.sum(b_x * b_w[None, :], 1), 0.0)
        b_x -= b_xw[:, None] * b_w[None, :]
    return b_x


# --- Sealed units --------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["length", "rows", "first_part"])
def units_kernel(
    q_ptr, elapsed_ptr, k_ptr, v_ptr, move_ptr, decay_ptr, fade_ptr, valid_ptr, rows_ptr, seen_ptr,
    out_ptr, lse_ptr, scale, length, unit, rows, first_part,
    stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt, stride_mb, stride_mu,
    stride_mh, stride_cb, stride_ch, stride_ct, stride_fb, stride_fu, stride_ab,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr,
    DVP: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    MOVE: tl.constexpr, GATE: tl.constexpr, FADE: tl.constexpr, VALID: tl.constexpr,
    INDEX: tl.constexpr, SEEN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Rows against one piece of a group's keys; at each unit they move to its end first.

    q: float32 [B·H, rows, DP]; elapsed [B·H, rows]. SEEN: the number of tokens is on the device, of
    which WHOLE takes the complete units. INDEX: `rows_ptr` says which stored row a row reads.
    """
    i_split, i_bh, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_b, i_h = i_bh // H, i_bh % H
    stored = i_b.to(tl.int64)
    if INDEX:
        stored = tl.load(rows_ptr + i_b)
    if SEEN:
        length = tl.load(seen_ptr + i_b)
        if WHOLE:
            length = length // unit * unit
    o, o_n = i_r * BR + tl.arange(0, BR), tl.arange(0, BN)
    o_d, o_v = tl.arange(0, DP), tl.arange(0, DVP)
    inside = o < rows
    each = tl.cdiv(tl.cdiv(length, BN), tl.num_programs(0)) * BN
    first = i_split * each
    stop = tl.minimum(first + each, length)
    b_m = tl.full([BR], float("-inf"), tl.float32)
    b_l = tl.zeros([BR], tl.float32)
    b_acc = tl.zeros([BR, DVP], tl.float32)
    if first < stop:
        at = i_bh.to(tl.int64) * rows
        b_q = tl.load(q_ptr + (at + o[:, None]) * DP + o_d[None, :], inside[:, None], other=0.0)
        in_range = range_of(b_q)
        b_q *= in_range
        scale2 = scale * _LOG2_E / in_range
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
                if k_ptr.dtype.element_ty != tl.float32:
                    b_s = tl.dot(b_low, tl.trans(b_k), b_s)
                b_s *= scale2
                if GATE:
                    p_decay = decay_ptr + stored * stride_cb + head[:, None] * stride_ch
                    p_decay += o_j.to(tl.int64)[None, :] * stride_ct
                    b_decay = tl.load(p_decay, inside[:, None] & seen[None, :], other=0.0)
                    b_s += (b_start[:, None] + b_decay) * _LOG2_E
                shown = seen
                if VALID:
                    shown &= tl.load(valid_ptr + stored * stride_ab + o_j, seen, other=0) != 0
                b_s = tl.where(shown[None, :], b_s, float("-inf"))
                p_v = v_ptr + o_j.to(tl.int64)[:, None] * stride_vt + o_v[None, :]
                b_v = tl.load(p_v, seen[:, None] & (o_v[None, :] < DV), other=0.0)
                b_m, b_l, b_acc = masked_softmax_step(b_s, b_m, b_l, b_acc, b_v)
    part = (first_part + i_split) * tl.num_programs(1) + i_bh
    store_part(out_ptr, lse_ptr, part, rows, o, o_v, b_m, b_l, b_acc, DVP)


@triton.jit(do_not_specialize=["parts", "rows", "T"])
def merge_kernel(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, seen_ptr, parts, rows, T,
    H: tl.constexpr, G: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, BP: tl.constexpr,
    ADVANCE: tl.constexpr,
):  # fmt: skip
    """One row of all parts; `ADVANCE`: T more tokens were seen, which nobody reads here."""
    i_bh, i_r = tl.program_id(0), tl.program_id(1)
    i_b, i_h = i_bh // H, i_bh % H
    o, o_v = tl.arange(0, BP), tl.arange(0, DVP)
    step = tl.num_programs(0) * rows
    at = i_bh * rows + i_r
    b_top = tl.full([BP], float("-inf"), tl.float32)
    for part in tl.range(0, parts, BP, num_stages=1):
        p_lse = part_lse_ptr + (part + o) * step + at
        b_top = tl.maximum(b_top, tl.load(p_lse, part + o < parts, other=float("-inf")))
    top = tl.max(b_top, 0)
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
    divisor = tl.where(total == 0, 1.0, total)
    b_out = b_out / divisor
    o_row = ((i_b.to(tl.int64) * T + i_r // G) * H + i_h) * G + i_r % G
    tl.store(out_ptr + o_row * DV + o_v, b_out.to(out_ptr.dtype.element_ty), o_v < DV)
    lse = (finite + tl.math.log2(divisor)) * 0.6931471805599453
    tl.store(lse_ptr + o_row, tl.where(total == 0, float("-inf"), lse))
    if ADVANCE:
        tl.store(seen_ptr + i_b, tl.load(seen_ptr + i_b) + T, (i_h == 0) & (i_r == 0))


# --- The tail ------------------------------------------------------------------------------------


@triton.jit
def _through_chunk(
    q_ptr, k_ptr, v_ptr, w_ptr, beta_ptr, gate_ptr, valid_ptr, i_b, i_h, T, scale, o, o_d, o_v,
    H: tl.constexpr, G: tl.constexpr, F: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    MOVE: tl.constexpr, GATE: tl.constexpr, VALID: tl.constexpr, ATTEND: tl.constexpr,
):  # fmt: skip
    """Rows at the chunk's start, their gates from there; with ATTEND their softmax on the way.

    From the last token to the first: a row meets a token's key, then moves before that token.
    """
    t, head = o // G, i_h * G + o % G
    inside = t < T
    p_q = q_ptr + ((i_b * T + t) * H * G + head).to(tl.int64)[:, None] * D + o_d[None, :]
    b_x = tl.load(p_q, inside[:, None] & (o_d[None, :] < D), other=0.0).to(tl.float32)
    b_e = tl.zeros_like(tl.sum(b_x, 1))
    b_m = b_e + float("-inf")
    b_l = b_e
    b_acc = b_e[:, None] + tl.zeros_like(o_v).to(tl.float32)[None, :]
    for n in tl.range(0, T, num_stages=1):
        s = T - 1 - n
        token = (i_b * T + s) * H + i_h
        meets = inside & (t >= s)
        if ATTEND:
            seen = meets
            if VALID:
                seen &= tl.load(valid_ptr + i_b * T + s) != 0
            b_s = tl.sum(b_x * load_row(k_ptr + token * D, o_d, D)[None, :], 1) * scale * _LOG2_E
            if GATE:
                b_s += b_e * _LOG2_E
            b_s = tl.where(seen, b_s, float("-inf"))
            b_new = tl.maximum(b_m, b_s)
            b_top = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_p, b_alpha = tl.math.exp2(b_s - b_top), tl.math.exp2(b_m - b_top)
            b_m, b_l = b_new, b_l * b_alpha + b_p
            b_v = load_row(v_ptr + token * DV, o_v, DV)
            b_acc = b_acc * b_alpha[:, None] + b_p[:, None] * b_v[None, :]
        if MOVE:
            b_x = pass_factors(b_x, meets, w_ptr, beta_ptr, token, o_d, D, F, BACK=True)
        if GATE:
            p_gate = gate_ptr + (i_b * T + s) * H * G + head
            b_e += tl.load(p_gate, meets, other=0.0).to(tl.float32)
    return b_x, b_e, b_m, b_l, b_acc


@triton.jit
def _append_keys(
    k_ptr, w_ptr, beta_ptr, gate_ptr, ring_ptr, fade_ptr, b_k, i_b, i_h, T, unit, ring, first,
    before, slot, at, o_d,
    H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, F: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, MOVE: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Keys `at` these places (−1: none) pass the chunk, up to their own unit's end; new ones come.

    `first`: the tail's first place; `before`: the first place that is new.
    """
    here = at >= first
    o_g = tl.arange(0, GP)
    heads = (i_b * H + i_h) * G + o_g
    p_fade = fade_ptr + heads.to(tl.int64)[:, None] * ring + slot[None, :]
    grouped = (o_g < G)[:, None] & here[None, :]
    b_fade = tl.zeros([GP, 64], tl.float32)
    if GATE:
        b_fade = tl.load(p_fade, grouped & (at < before)[None, :], other=0.0)
    for s in tl.range(0, T, num_stages=1):
        place = before + s
        passes = here & (at < place) & (at // unit == place // unit)
        token = (i_b * T + s) * H + i_h
        if MOVE:
            b_k = pass_factors(b_k, passes, w_ptr, beta_ptr, token, o_d, D, F, BACK=False)
            b_k = tl.where(
                (at == place)[:, None], load_row(k_ptr + token * D, o_d, D)[None, :], b_k
            )
        if GATE:
            b_gate = tl.load(gate_ptr + token * G + o_g, o_g < G, other=0.0).to(tl.float32)
            b_fade += tl.where(passes[None, :], b_gate[:, None], 0.0)
    if MOVE:
        o_ring = (i_b * H + i_h).to(tl.int64) * ring + slot[:, None]
        tl.store(ring_ptr + o_ring * DP + o_d[None, :], b_k, here[:, None])
    if GATE:
        tl.store(p_fade, b_fade, grouped)


@triton.jit
def _copy_rows(from_ptr, to_ptr, rows, places, inside, o, D: tl.constexpr):
    """Rows of D elements to other places."""
    mask = inside[:, None] & (o[None, :] < D)
    b_x = tl.load(from_ptr + rows[:, None] * D + o[None, :], mask)
    tl.store(to_ptr + places[:, None] * D + o[None, :], b_x, mask)


@triton.jit(do_not_specialize=["T", "rows", "first_part", "capacity"])
def append_kernel(
    q_ptr, k_ptr, v_ptr, w_ptr, beta_ptr, gate_ptr, chunk_valid_ptr,
    keys_ptr, values_ptr, valid_ptr, ring_ptr, ring_fade_ptr, tail_ptr, tail_fade_ptr,
    product_ptr, forget_ptr, seen_ptr, x_ptr, elapsed_ptr, out_ptr, lse_ptr,
    scale, T, unit, ring, capacity, rows, first_part,
    H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, F: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, BR: tl.constexpr, TP: tl.constexpr,
    CHUNKS: tl.constexpr, MOVE: tl.constexpr, GATE: tl.constexpr, VALID: tl.constexpr,
    CHUNK_VALID: tl.constexpr,
):  # fmt: skip
    """Append a chunk, attend it and the tail, and move its queries to the tail's start.

    Programs of one row and key head: CHUNKS, each of 64 places of the tail; with MOVE DP / 64 of 64
    rows of its transition, which pass the chunk as keys do, and whose scores are the moved queries;
    one for the chunk itself.
    """
    i_c, i_bh = tl.program_id(0), tl.program_id(1)
    i_b, i_h = i_bh // H, i_bh % H
    MATRIX: tl.constexpr = DP // 64 if MOVE else 0
    before = tl.load(seen_ptr + i_b)
    o, o_d, o_v, o_64 = tl.arange(0, BR), tl.arange(0, DP), tl.arange(0, DVP), tl.arange(0, 64)
    row = i_bh.to(tl.int64) * rows + o
    first = before
    if MOVE or GATE:
        first = before // unit * unit
    if i_c < CHUNKS:
        slot = i_c * 64 + o_64
        last = before + T - 1
        at = tl.where(slot <= last, slot + (last - slot) // ring * ring, -1)
        at = tl.where((at >= first) & (slot < ring), at, -1)
        old = (at >= first) & (at < before)
        b_m = tl.full([BR], float("-inf"), tl.float32)
        b_l = tl.zeros([BR], tl.float32)
        b_acc = tl.zeros([BR, DVP], tl.float32)
        if tl.max(at, 0) >= 0:
            b_x, b_e, _, _, _ = _through_chunk(
                q_ptr, k_ptr, v_ptr, w_ptr, beta_ptr, gate_ptr, chunk_valid_ptr, i_b, i_h, T, scale,
                o, o_d, o_v, H, G, F, D, DV, MOVE, GATE, CHUNK_VALID, False,
            )  # fmt: skip
            o_place = (i_bh.to(tl.int64) * capacity + at)[:, None]
            if MOVE:
                p_k = ring_ptr + (i_bh.to(tl.int64) * ring + slot[:, None]) * DP + o_d[None, :]
                b_k = tl.load(p_k, old[:, None], other=0.0)
            else:
                p_k = keys_ptr + o_place * D + o_d[None, :]
                b_k = tl.load(p_k, old[:, None] & (o_d[None, :] < D), other=0.0).to(tl.float32)
            b_s = tl.dot(b_x, tl.trans(b_k), input_precision=FLOAT32) * scale * _LOG2_E
            seen = old
            if GATE:
                head = ((i_b * H + i_h) * G + o % G).to(tl.int64)
                p_fade = ring_fade_ptr + head[:, None] * ring + slot[None, :]
                b_fade = tl.load(p_fade, (o < rows)[:, None] & old[None, :], other=0.0)
                b_s += (b_e[:, None] + b_fade) * _LOG2_E
            if VALID:
                seen &= tl.load(valid_ptr + i_b * capacity + at, old, other=0) != 0
            b_s = tl.where(seen[None, :], b_s, float("-inf"))
            p_v = values_ptr + o_place * DV + o_v[None, :]
            b_v = tl.load(p_v, old[:, None] & (o_v[None, :] < DV), other=0.0)
            b_m, b_l, b_acc = masked_softmax_step(b_s, b_m, b_l, b_acc, b_v)
            _append_keys(
                k_ptr, w_ptr, beta_ptr, gate_ptr, ring_ptr, ring_fade_ptr, b_k, i_b, i_h, T, unit,
                ring, first, before, slot, at, o_d, H, G, GP, F, D, DP, MOVE, GATE,
            )  # fmt: skip
        part = (first_part + i_c) * tl.num_programs(1) + i_bh
        store_part(out_ptr, lse_ptr, part, rows, o, o_v, b_m, b_l, b_acc, DVP)
    elif i_c < CHUNKS + MATRIX:
        b_x, b_e, _, _, _ = _through_chunk(
            q_ptr, k_ptr, v_ptr, w_ptr, beta_ptr, gate_ptr, chunk_valid_ptr, i_b, i_h, T, scale,
            o, o_d, o_v, H, G, F, D, DV, MOVE, GATE, CHUNK_VALID, False,
        )  # fmt: skip
        o_p = (i_c - CHUNKS) * 64 + o_64
        p_tail = tail_ptr + (i_bh.to(tl.int64) * DP + o_p[:, None]) * DP + o_d[None, :]
        b_eye = tl.where(o_p[:, None] == o_d[None, :], 1.0, 0.0)
        b_p = tl.where(before > first, tl.load(p_tail), b_eye)
        b_moved = tl.dot(b_x, tl.trans(b_p), input_precision=FLOAT32)
        tl.store(x_ptr + row[:, None] * DP + o_p[None, :], b_moved, (o < rows)[:, None])
        every = o_64 >= 0
        for s in tl.range(0, T, num_stages=1):
            token = (i_b * T + s) * H + i_h
            b_p = pass_factors(b_p, every, w_ptr, beta_ptr, token, o_d, D, F, BACK=False)
            if (before + s + 1) % unit == 0:
                i_unit = (i_b * (capacity // unit) + (before + s) // unit) * H + i_h
                o_product = (i_unit.to(tl.int64) * D + o_p[:, None]) * D + o_d[None, :]
                inside = (o_p[:, None] < D) & (o_d[None, :] < D)
                tl.store(product_ptr + o_product, b_p, inside)
                b_p = b_eye
        tl.store(p_tail, b_p)
    else:
        b_x, b_e, b_m, b_l, b_acc = _through_chunk(
            q_ptr, k_ptr, v_ptr, w_ptr, beta_ptr, gate_ptr, chunk_valid_ptr, i_b, i_h, T, scale,
            o, o_d, o_v, H, G, F, D, DV, MOVE, GATE, CHUNK_VALID, True,
        )  # fmt: skip
        part = (first_part + CHUNKS) * tl.num_programs(1) + i_bh
        store_part(out_ptr, lse_ptr, part, rows, o, o_v, b_m, b_l, b_acc, DVP)
        if not MOVE:
            tl.store(x_ptr + row[:, None] * DP + o_d[None, :], b_x, (o < rows)[:, None])
        if GATE:
            o_g = tl.arange(0, GP)
            p_fade = tail_fade_ptr + i_bh * G + o_g
            tail = before > first
            p_old = tail_fade_ptr + i_bh * G + o % G
            b_e += tl.load(p_old, (o < rows) & tail, other=0.0)
            tl.store(elapsed_ptr + row, b_e, o < rows)
            tl.debug_barrier()  # rows of other threads read what is written next
            b_fade = tl.load(p_fade, (o_g < G) & tail, other=0.0)
            for s in tl.range(0, T, num_stages=1):
                p_gate = gate_ptr + ((i_b * T + s) * H + i_h) * G + o_g
                b_fade += tl.load(p_gate, o_g < G, other=0.0).to(tl.float32)
                if (before + s + 1) % unit == 0:
                    i_unit = i_b * (capacity // unit) + (before + s) // unit
                    tl.store(forget_ptr + (i_unit * H + i_h) * G + o_g, b_fade, o_g < G)
                    b_fade = tl.zeros([GP], tl.float32)
            tl.store(p_fade, b_fade, o_g < G)
        o_t = tl.arange(0, TP)
        token = ((i_b * T + o_t) * H + i_h).to(tl.int64)
        place = i_bh.to(tl.int64) * capacity + before + o_t
        if not MOVE:
            _copy_rows(k_ptr, keys_ptr, token, place, o_t < T, o_d, D)
        _copy_rows(v_ptr, values_ptr, token, place, o_t < T, o_v, DV)
        if VALID:
            b_valid = tl.full([TP], 1, tl.int8)
            if CHUNK_VALID:
                b_valid = tl.load(chunk_valid_ptr + i_b * T + o_t, o_t < T, other=0).to(tl.int8)
            o_valid = i_b.to(tl.int64) * capacity + before + o_t
            tl.store(valid_ptr + o_valid, b_valid, (o_t < T) & (i_h == 0))


@triton.jit(do_not_specialize=["T", "capacity"])
def seal_kernel(
    keys_ptr, ring_ptr, fade_ptr, ring_fade_ptr, high_ptr, low_ptr, product_ptr, unit_fade_ptr,
    forget_ptr, seen_ptr, T, unit, ring, capacity,
    H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    MOVE: tl.constexpr, GATE: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """If the last T tokens completed a unit: its keys for ever, and every earlier unit over it.

    M_y ← M_y 𝒫 in place, as high + low parts, 64 rows of one matrix at a time.
    """
    i_z, i_bh = tl.program_id(0), tl.program_id(1)
    i_b, i_h = i_bh // H, i_bh % H
    seen = tl.load(seen_ptr + i_b)
    units = capacity // unit
    if (seen // unit > (seen - T) // unit) & (seen >= unit):
        i_unit = seen // unit - 1
        o_64, o_d, o_g = tl.arange(0, 64), tl.arange(0, DP), tl.arange(0, GP)
        heads = ((i_b * H + i_h) * G + o_g).to(tl.int64)[:, None]
        copies = unit // 64
        PARTS: tl.constexpr = DP // 64
        items = copies
        if MOVE:
            items += (i_unit + 1) * PARTS
        for item in tl.range(i_z, items, tl.num_programs(0), num_stages=1):
            if item < copies:
                at = i_unit * unit + item * 64 + o_64
                slot = at % ring
                if MOVE:
                    p_k = ring_ptr + (i_bh.to(tl.int64) * ring + slot[:, None]) * DP + o_d[None, :]
                    b_k = tl.load(p_k).to(keys_ptr.dtype.element_ty)
                    p_k = keys_ptr + (i_bh.to(tl.int64) * capacity + at[:, None]) * D
                    tl.store(p_k + o_d[None, :], b_k, o_d[None, :] < D)
                if GATE:
                    grouped = (o_g < G)[:, None]
                    b_fade = tl.load(ring_fade_ptr + heads * ring + slot[None, :], grouped)
                    tl.store(fade_ptr + heads * capacity + at[None, :], b_fade, grouped)
            else:
                y = (item - copies) // PARTS
                o_p = (item - copies) % PARTS * 64 + o_64
                o_y = ((i_b * units + y) * H + i_h).to(tl.int64) * D * D
                o_new = ((i_b * units + i_unit) * H + i_h).to(tl.int64) * D * D
                b_m = tl.where(o_p[:, None] == o_d[None, :], 1.0, 0.0)
                if y < i_unit:
                    b_m = tl.zeros([64, DP], tl.float32)
                    for c in tl.range(0, DP, 32, num_stages=1):
                        o_c = c + tl.arange(0, 32)
                        o_left = o_y + o_p[:, None] * D + o_c[None, :]
                        m_left = (o_p[:, None] < D) & (o_c[None, :] < D)
                        b_left = tl.load(high_ptr + o_left, m_left, other=0.0).to(tl.float32)
                        if tl.float32 != OPERAND:
                            b_left += tl.load(low_ptr + o_left, m_left, other=0.0).to(tl.float32)
                        o_right = o_new + o_c[:, None] * D + o_d[None, :]
                        m_right = (o_c[:, None] < D) & (o_d[None, :] < D)
                        b_right = tl.load(product_ptr + o_right, m_right, other=0.0)
                        b_m += dot_exact(b_left, b_right, OPERAND)
                    tl.debug_barrier()  # all of the old rows are read
                o_out = o_y + o_p[:, None] * D + o_d[None, :]
                m_out = (o_p[:, None] < D) & (o_d[None, :] < D)
                b_high = b_m.to(high_ptr.dtype.element_ty)
                tl.store(high_ptr + o_out, b_high, m_out)
                if tl.float32 != OPERAND:
                    b_low = (b_m - b_high.to(tl.float32)).to(low_ptr.dtype.element_ty)
                    tl.store(low_ptr + o_out, b_low, m_out)
        if GATE:
            at_new = (i_b * units + i_unit) * H * G + i_h * G + o_g
            b_new = tl.load(forget_ptr + at_new, o_g < G, other=0.0)
            for y in tl.range(i_z, i_unit + 1, tl.num_programs(0), num_stages=1):
                p_y = unit_fade_ptr + (i_b * units + y) * H * G + i_h * G + o_g
                b_y = tl.load(p_y, (o_g < G) & (y < i_unit), other=0.0) + b_new
                tl.store(p_y, tl.where(y < i_unit, b_y, 0.0), o_g < G)
