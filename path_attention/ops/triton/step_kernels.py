"""A step's moves of queries and its tail; `step.py` says how its kernels work together.

docs/algorithm.md §5. Rows are a chunk's tokens × the query heads of one key head. Products with
float32 rows that are not sealed yet take sums of two bfloat16, which have float32's range and are
right to 2⁻¹⁶, where sealed keys are rounded to 2⁻⁹ or 2⁻¹². EARLY: a kernel is launched while the
one before still runs (programmatic dependent launch).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from path_attention.ops.triton.decode_kernels import LOG2_E, masked_softmax_step, store_part
from path_attention.ops.triton.primitives import (
    FLOAT32,
    dot_exact,
    load_row,
    pass_factors,
    range_of,
)

# --- What the kernels share ----------------------------------------------------------------------


@triton.jit
def _copy_rows(from_ptr, to_ptr, rows, places, inside, o, D: tl.constexpr):
    """Rows of D elements to other places."""
    mask = inside[:, None] & (o[None, :] < D)
    b_x = tl.load(from_ptr + rows[:, None] * D + o[None, :], mask)
    tl.store(to_ptr + places[:, None] * D + o[None, :], b_x, mask)


@triton.jit
def _keep_gates(
    gate_ptr, raw_ptr, token, at, inside, i_bh, ring, G: tl.constexpr, GP: tl.constexpr
):
    """The chunk's gates of one key head, as they came, in the ring's places."""
    o_g = tl.arange(0, GP)
    mask = (o_g < G)[:, None] & inside[None, :]
    b_gate = tl.load(gate_ptr + token[None, :] * G + o_g[:, None], mask)
    heads = (i_bh * G + o_g).to(tl.int64)[:, None]
    tl.store(raw_ptr + heads * ring + (at % ring)[None, :], b_gate, mask)


# --- The chunk ------------------------------------------------------------------------------------


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
            b_s = tl.sum(b_x * load_row(k_ptr + token * D, o_d, D)[None, :], 1) * scale * LOG2_E
            if GATE:
                b_s += b_e * LOG2_E
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
    DP: tl.constexpr, BC: tl.constexpr, MOVE: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Keys `at` these places (−1: none) pass the chunk, up to their own unit's end; new ones come.

    `first`: the tail's first place; `before`: the first place that is new.
    """
    here = at >= first
    o_g = tl.arange(0, GP)
    heads = (i_b * H + i_h) * G + o_g
    p_fade = fade_ptr + heads.to(tl.int64)[:, None] * ring + slot[None, :]
    grouped = (o_g < G)[:, None] & here[None, :]
    b_fade = tl.zeros([GP, BC], tl.float32)
    if GATE:
        b_fade = tl.load(p_fade, grouped & (at < before)[None, :], other=0.0)
    for s in tl.range(0, T, num_stages=1):
        place = before + s
        passes = here & (at < place) & (at // unit == place // unit)
        token = (i_b * T + s) * H + i_h
        if MOVE:
            b_k = pass_factors(b_k, passes, w_ptr, beta_ptr, token, o_d, D, F, BACK=False)
            b_new = load_row(k_ptr + token * D, o_d, D)
            b_k = tl.where((at == place)[:, None], b_new[None, :], b_k)
        if GATE:
            b_gate = tl.load(gate_ptr + token * G + o_g, o_g < G, other=0.0).to(tl.float32)
            b_fade += tl.where(passes[None, :], b_gate[:, None], 0.0)
    if MOVE:
        o_ring = (i_b * H + i_h).to(tl.int64) * ring + slot[:, None]
        tl.store(ring_ptr + o_ring * DP + o_d[None, :], b_k, here[:, None])
    if GATE:
        tl.debug_barrier()  # rows of other threads have read these
        tl.store(p_fade, b_fade, grouped)


@triton.jit
def _append_transition(
    w_ptr, beta_ptr, from_ptr, to_ptr, product_ptr, i_b, i_h, T, unit, kept_units, before, empty,
    o_p, o_d, H: tl.constexpr, F: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Rows o_p of the tail's transition pass the chunk, as keys do; a complete unit's is kept.

    product_ptr: of this row and key head in the first of the places that units take by turns.
    """
    b_eye = tl.where(o_p[:, None] == o_d[None, :], 1.0, 0.0)
    b_p = b_eye
    if not empty:
        b_p = tl.load(from_ptr + o_p[:, None] * DP + o_d[None, :])
    for s in tl.range(0, T, num_stages=1):
        token = (i_b * T + s) * H + i_h
        b_p = pass_factors(b_p, o_p >= 0, w_ptr, beta_ptr, token, o_d, D, F, BACK=False)
        if (before + s + 1) % unit == 0:
            inside = (o_p[:, None] < D) & (o_d[None, :] < D)
            kept: tl.constexpr = product_ptr.dtype.element_ty
            PARTS: tl.constexpr = 1 if kept == tl.float32 else 2
            place = (before + s) // unit % kept_units
            p_product = product_ptr + place.to(tl.int64) * H * PARTS * D * D
            p_product += o_p[:, None] * D + o_d[None, :]
            b_high = b_p.to(kept)
            tl.store(p_product, b_high, inside)
            if PARTS == 2:
                b_low = (b_p - b_high.to(tl.float32)).to(kept)
                tl.store(p_product + D * D, b_low, inside)
            b_p = b_eye
    tl.store(to_ptr + o_p[:, None] * DP + o_d[None, :], b_p)


@triton.jit
def _move_to_units(
    b_x, move_ptr, moved_ptr, range_ptr, begin, units, step, stride_mu, capacity, unit, i_bh,
    rows, o, o_d,
    D: tl.constexpr, DP: tl.constexpr, STAGES: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Rows x at the tail's start, moved to the ends of units begin, begin + step, … < units.

    As sums high + low in the keys' dtype, in units of a power of two that every program finds.
    """
    in_range = range_of(b_x)
    b_x *= in_range
    tl.store(range_ptr + i_bh, in_range, begin == 0)
    b_high = b_x.to(tl.float16)
    b_low = (b_x - b_high.to(tl.float32)).to(tl.float16)
    mask = (o_d[:, None] < D) & (o_d[None, :] < D)
    kept: tl.constexpr = moved_ptr.dtype.element_ty
    for u in tl.range(begin, units, step, num_stages=STAGES):
        p_move = move_ptr + tl.cast(u, tl.int64) * stride_mu + o_d[:, None] * D + o_d[None, :]
        b_move = tl.trans(tl.load(p_move, mask, other=0.0))
        o_y = (i_bh.to(tl.int64) * (capacity // unit) + u) * 2 * rows
        p_y = moved_ptr + (o_y + o[:, None]) * DP + o_d[None, :]
        if tl.float32 == OPERAND:
            b_y = tl.dot(b_x, b_move, input_precision=FLOAT32)
        else:
            b_y = tl.dot(b_high, b_move, tl.dot(b_low, b_move))
        tl.store(p_y, b_y.to(kept), (o < rows)[:, None])
        if tl.float32 != OPERAND:
            b_rest = b_y - b_y.to(kept).to(tl.float32)
            tl.store(p_y + rows * DP, b_rest.to(kept), (o < rows)[:, None])


@triton.jit
def _tail_chunk(
    q_ptr, k_ptr, v_ptr, w_ptr, beta_ptr, gate_ptr, chunk_valid_ptr, keys_ptr, values_ptr,
    valid_ptr, ring_ptr, ring_fade_ptr, out_ptr, lse_ptr, scale, T, unit, ring, capacity, rows,
    part, before, first, slot, i_b, i_h, o, o_d, o_v,
    H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, F: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    MOVE: tl.constexpr, GATE: tl.constexpr, VALID: tl.constexpr, CHUNK_VALID: tl.constexpr,
    OPERAND: tl.constexpr,
):  # fmt: skip
    """Attend BC slots of the tail, whose keys then pass the chunk or make room for new ones."""
    b_m = tl.full([BR], float("-inf"), tl.float32)
    b_l = tl.zeros([BR], tl.float32)
    b_acc = tl.zeros([BR, DVP], tl.float32)
    last, low = before + T - 1, tl.program_id(0) * BC
    now, high = last % ring, tl.minimum(low + BC, ring) - 1
    latest = last - now + tl.where(now >= low, tl.minimum(now, high), high - ring)
    if latest >= first:  # the latest place here is of the tail
        i_bh = i_b * H + i_h
        at = slot + (last - slot) // ring * ring
        at = tl.where((slot <= last) & (at >= first) & (slot < ring), at, -1)
        old = (at >= first) & (at < before)
        o_place = (i_bh.to(tl.int64) * capacity + at)[:, None]
        if MOVE:  # loads first, so that they overlap
            p_k = ring_ptr + (i_bh.to(tl.int64) * ring + slot[:, None]) * DP + o_d[None, :]
            b_k = tl.load(p_k, old[:, None], other=0.0)
        else:
            p_k = keys_ptr + o_place * D + o_d[None, :]
            b_k = tl.load(p_k, old[:, None] & (o_d[None, :] < D), other=0.0).to(tl.float32)
        p_v = values_ptr + o_place * DV + o_v[None, :]
        b_v = tl.load(p_v, old[:, None] & (o_v[None, :] < DV), other=0.0)
        b_x, b_e, _, _, _ = _through_chunk(
            q_ptr, k_ptr, v_ptr, w_ptr, beta_ptr, gate_ptr, chunk_valid_ptr, i_b, i_h, T, scale,
            o, o_d, o_v, H, G, F, D, DV, MOVE, GATE, CHUNK_VALID, False,
        )  # fmt: skip
        b_s = dot_exact(b_x, tl.trans(b_k), OPERAND, tl.bfloat16) * scale * LOG2_E
        seen = old
        if GATE:
            head = (i_bh * G + o % G).to(tl.int64)
            p_fade = ring_fade_ptr + head[:, None] * ring + slot[None, :]
            b_fade = tl.load(p_fade, (o < rows)[:, None] & old[None, :], other=0.0)
            b_s += (b_e[:, None] + b_fade) * LOG2_E
        if VALID:
            seen &= tl.load(valid_ptr + i_b * capacity + at, old, other=0) != 0
        b_s = tl.where(seen[None, :], b_s, float("-inf"))
        b_m, b_l, b_acc = masked_softmax_step(b_s, b_m, b_l, b_acc, b_v)
        _append_keys(
            k_ptr, w_ptr, beta_ptr, gate_ptr, ring_ptr, ring_fade_ptr, b_k, i_b, i_h, T, unit,
            ring, first, before, slot, at, o_d, H, G, GP, F, D, DP, BC, MOVE, GATE,
        )  # fmt: skip
    store_part(out_ptr, lse_ptr, part, rows, o, o_v, b_m, b_l, b_acc, DVP)


@triton.jit
def _append_gates(
    gate_ptr, fade_ptr, turn, forget_ptr, i_b, i_h, T, unit, kept_units, before,
    H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """The tail's sum takes the chunk's gates in, from one place to another."""
    o_g = tl.arange(0, GP)
    o_h = i_h * G + o_g
    kept = (o_g < G) & (before % unit != 0)
    b_fade = tl.load(fade_ptr + turn * H * G + o_h, kept, other=0.0)
    for s in tl.range(0, T, num_stages=1):
        p_gate = gate_ptr + ((i_b * T + s) * H + i_h) * G + o_g
        b_fade += tl.load(p_gate, o_g < G, other=0.0).to(tl.float32)
        if (before + s + 1) % unit == 0:
            place = i_b * kept_units + (before + s) // unit % kept_units
            p_forget = forget_ptr + place * H * G
            tl.store(p_forget + o_h, b_fade, o_g < G)
            b_fade = tl.zeros([GP], tl.float32)
    tl.store(fade_ptr + (1 - turn) * H * G + o_h, b_fade, o_g < G)


@triton.jit(do_not_specialize=["T", "rows", "capacity", "kept_units"])
def move_kernel(
    q_ptr, w_ptr, beta_ptr, tail_ptr, product_ptr, seen_ptr, turn_ptr, move_ptr, x_ptr, moved_ptr,
    range_ptr, T, unit, capacity, rows, kept_units, stride_mb, stride_mu, stride_mh,
    H: tl.constexpr, G: tl.constexpr, F: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, BR: tl.constexpr, STAGES: tl.constexpr,
    OPERAND: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A chunk's queries at the sealed units' ends; the tail's transition after the chunk.

    Each program of one row and key head moves all queries to the tail's start, and on to some
    units; each of the first DP / 64 moves 64 rows of the transition, from one place to another.
    """
    if EARLY:
        gdc_launch_dependents()
    i_c, i_bh, movers = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    i_b, i_h = i_bh // H, i_bh % H
    before, turn = tl.load(seen_ptr + i_b), tl.load(turn_ptr + i_b)
    o, o_d, o_64 = tl.arange(0, BR), tl.arange(0, DP), tl.arange(0, 64)
    empty = before % unit == 0
    p_tail = tail_ptr + ((i_b * 2 + turn) * H + i_h).to(tl.int64) * DP * DP
    if DP <= 128:  # the load first, so that it overlaps
        b_eye = tl.where((o_d[:, None] == o_d[None, :]) & empty, 1.0, 0.0)
        b_p = tl.load(p_tail + o_d[:, None] * DP + o_d[None, :], ~empty, other=0.0)
    b_x, _, _, _, _ = _through_chunk(
        q_ptr, q_ptr, q_ptr, w_ptr, beta_ptr, q_ptr, q_ptr, i_b, i_h, T, 1.0, o, o_d, o_d, H, G, F,
        D, D, True, False, False, False,
    )  # fmt: skip
    if DP <= 128:
        b_x = dot_exact(b_x, tl.trans(b_p + b_eye), OPERAND, tl.bfloat16)
    elif not empty:
        p_x = x_ptr + (i_bh * movers + i_c).to(tl.int64) * rows * DP + o[:, None] * DP
        for c in tl.static_range(DP // 64):
            o_p = c * 64 + o_64
            b_p = tl.load(p_tail + o_p[:, None] * DP + o_d[None, :])
            b_columns = dot_exact(b_x, tl.trans(b_p), OPERAND, tl.bfloat16)
            tl.store(p_x + o_p[None, :], b_columns, (o < rows)[:, None])
        tl.debug_barrier()  # columns of other threads are read next
        b_x = tl.load(p_x + o_d[None, :], (o < rows)[:, None], other=0.0)
    p_move = move_ptr + i_b.to(tl.int64) * stride_mb + i_h.to(tl.int64) * stride_mh
    _move_to_units(
        b_x, p_move, moved_ptr, range_ptr, i_c, before // unit, movers, stride_mu, capacity, unit,
        i_bh, rows, o, o_d, D, DP, STAGES, OPERAND,
    )  # fmt: skip
    if i_c < DP // 64:
        p_to = tail_ptr + ((i_b * 2 + 1 - turn) * H + i_h).to(tl.int64) * DP * DP
        PARTS: tl.constexpr = 1 if product_ptr.dtype.element_ty == tl.float32 else 2
        here = i_b.to(tl.int64) * kept_units * H + i_h
        _append_transition(
            w_ptr, beta_ptr, p_tail, p_to, product_ptr + here * PARTS * D * D, i_b, i_h, T, unit,
            kept_units, before, empty, i_c * 64 + o_64, o_d, H, F, D, DP,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T", "rows", "first_part", "capacity", "kept_units"])
def tail_kernel(
    q_ptr, k_ptr, v_ptr, w_ptr, beta_ptr, gate_ptr, chunk_valid_ptr,
    keys_ptr, values_ptr, valid_ptr, ring_ptr, ring_fade_ptr, tail_fade_ptr, forget_ptr,
    raw_k_ptr, raw_w_ptr, raw_beta_ptr, raw_gate_ptr,
    seen_ptr, next_ptr, turn_ptr, out_ptr, lse_ptr, scale, T, unit, ring, capacity, rows,
    first_part, kept_units,
    H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, F: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, BR: tl.constexpr, TP: tl.constexpr,
    CHUNKS: tl.constexpr, BC: tl.constexpr, MOVE: tl.constexpr, GATE: tl.constexpr,
    VALID: tl.constexpr, CHUNK_VALID: tl.constexpr, KEEP: tl.constexpr, OPERAND: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Append a chunk to the tail, and attend both; KEEP: its tokens as they came too.

    Programs of one row and key head: CHUNKS, each of BC places of the tail; one for the chunk
    itself. Runs beside `attend_kernel`, whose end one program waits for on behalf of what follows.
    """
    if EARLY:
        gdc_launch_dependents()
    i_c, i_bh = tl.program_id(0), tl.program_id(1)
    i_b, i_h = i_bh // H, i_bh % H
    before = tl.load(seen_ptr + i_b)
    o, o_d, o_v = tl.arange(0, BR), tl.arange(0, DP), tl.arange(0, DVP)
    part = (first_part + i_c) * tl.num_programs(1) + i_bh
    if i_c < CHUNKS:
        first = before // unit * unit
        _tail_chunk(
            q_ptr, k_ptr, v_ptr, w_ptr, beta_ptr, gate_ptr, chunk_valid_ptr, keys_ptr, values_ptr,
            valid_ptr, ring_ptr, ring_fade_ptr, out_ptr, lse_ptr, scale, T, unit, ring, capacity,
            rows, part, before, first, i_c * BC + tl.arange(0, BC), i_b, i_h, o, o_d, o_v, H, G, GP,
            F, D, DP, DV, DVP, BR, BC, MOVE, GATE, VALID, CHUNK_VALID, OPERAND,
        )  # fmt: skip
    else:
        _, _, b_m, b_l, b_acc = _through_chunk(
            q_ptr, k_ptr, v_ptr, w_ptr, beta_ptr, gate_ptr, chunk_valid_ptr, i_b, i_h, T, scale,
            o, o_d, o_v, H, G, F, D, DV, MOVE, GATE, CHUNK_VALID, True,
        )  # fmt: skip
        store_part(out_ptr, lse_ptr, part, rows, o, o_v, b_m, b_l, b_acc, DVP)
        if GATE:
            _append_gates(
                gate_ptr, tail_fade_ptr + i_b * 2 * H * G, tl.load(turn_ptr + i_b), forget_ptr, i_b,
                i_h, T, unit, kept_units, before, H, G, GP,
            )  # fmt: skip
        o_t = tl.arange(0, TP)
        token = ((i_b * T + o_t) * H + i_h).to(tl.int64)
        place = i_bh.to(tl.int64) * capacity + before + o_t
        if not MOVE:
            _copy_rows(k_ptr, keys_ptr, token, place, o_t < T, o_d, D)
        _copy_rows(v_ptr, values_ptr, token, place, o_t < T, o_v, DV)
        slot = i_bh.to(tl.int64) * ring + (before + o_t) % ring
        if MOVE and KEEP:
            _copy_rows(k_ptr, raw_k_ptr, token, slot, o_t < T, o_d, D)
            for n in tl.static_range(F):
                _copy_rows(w_ptr, raw_w_ptr, token * F + n, slot * F + n, o_t < T, o_d, D)
                b_beta = tl.load(beta_ptr + token * F + n, o_t < T)
                tl.store(raw_beta_ptr + slot * F + n, b_beta, o_t < T)
        if GATE and KEEP:
            _keep_gates(
                gate_ptr, raw_gate_ptr, token, before + o_t, o_t < T, i_bh, ring, G, GP,
            )  # fmt: skip
        if VALID:
            b_valid = tl.full([TP], 1, tl.int8)
            if CHUNK_VALID:
                b_valid = tl.load(chunk_valid_ptr + i_b * T + o_t, o_t < T, other=0).to(tl.int8)
            o_valid = i_b.to(tl.int64) * capacity + before + o_t
            tl.store(valid_ptr + o_valid, b_valid, (o_t < T) & (i_h == 0))
        tl.store(next_ptr + i_b, before + T, i_h == 0)
        if EARLY and i_bh == 0:
            gdc_wait()


@triton.jit(do_not_specialize=["T", "capacity"])
def record_kernel(
    values_ptr, valid_ptr, before_ptr, history_ptr, borders_ptr, seen_ptr, T, unit, ring, capacity,
    E: tl.constexpr, COUNT: tl.constexpr, CP: tl.constexpr, BE: tl.constexpr, VALID: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """A chunk's records, E elements a token: the last COUNT real ones; KEEP: all, of the ring, and
    those at borders.

    Programs of one row, BE elements each. After a step: `seen` counts the chunk.
    """
    i_b, o = tl.program_id(0).to(tl.int64), tl.program_id(1) * BE + tl.arange(0, BE)
    inside, o_c = o < E, tl.arange(0, CP)
    kept = (o_c < COUNT)[:, None] & inside[None, :]
    o_kept = o_c[:, None] * E + o[None, :]
    p_before = before_ptr + i_b * COUNT * E + o_kept
    b_kept = tl.load(p_before, kept, other=0)
    before = tl.load(seen_ptr + i_b) - T
    moves_up = o_c[None, :] == o_c[:, None] + 1
    for t in tl.range(0, T, num_stages=1):
        b_new = tl.load(values_ptr + (i_b * T + t) * E + o, inside, other=0)
        at = before + t
        if KEEP:
            tl.store(history_ptr + (i_b * ring + at % ring) * E + o, b_new, inside)
        b_next = b_kept
        if COUNT > 1:
            b_next = tl.sum(tl.where(moves_up[:, :, None], b_kept[None, :, :], 0), 1)
        b_next = tl.where((o_c == COUNT - 1)[:, None], b_new[None, :], b_next.to(b_new.dtype))
        if VALID:
            b_kept = tl.where(tl.load(valid_ptr + i_b * T + t) != 0, b_next, b_kept)
        else:
            b_kept = b_next
        if KEEP and (at + 1) % unit == 0:
            p_border = borders_ptr + (i_b * (capacity // unit) + at // unit) * COUNT * E
            tl.store(p_border + o_kept, b_kept, kept)
    tl.debug_barrier()  # what moved up, other threads have read
    tl.store(p_before, b_kept, kept)
