"""A step's attention to sealed units, and the sealing of one; `step.py` says how they work.

docs/algorithm.md §5. EARLY: launched while the kernel before still runs (programmatic dependent
launch), for which it then waits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from path_attention.ops.triton.decode_kernels import (
    LOG2_E,
    masked_softmax_step,
    merge_row,
    store_part,
)
from path_attention.ops.triton.primitives import FLOAT32, range_of


@triton.jit
def _elapsed(
    gate_ptr, fade_ptr, i_b, T, unit, before, o, head, inside, H: tl.constexpr, G: tl.constexpr
):
    """Σ log_forget of the tail and of the chunk up to each row."""
    b_e = tl.load(fade_ptr + head, inside & (before % unit != 0), other=0.0)
    for s in tl.range(0, T, num_stages=1):
        p_gate = gate_ptr + (i_b * T + s) * H * G + head
        b_e += tl.load(p_gate, inside & (o // G >= s), other=0.0).to(tl.float32)
    return b_e


@triton.jit(do_not_specialize=["T", "capacity", "rows"])
def attend_kernel(
    q_ptr, gate_ptr, moved_ptr, range_ptr, tail_fade_ptr, turn_ptr, keys_ptr, values_ptr, fade_ptr,
    unit_fade_ptr, valid_ptr, seen_ptr, out_ptr, lse_ptr, scale, T, unit, capacity, rows,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr,
    DVP: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    MOVE: tl.constexpr, GATE: tl.constexpr, VALID: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rows against one piece of the sealed units (of all tokens, where nothing moves or fades).

    Moved queries: [B·H, units, 2 (high, low), rows, DP]; without MOVE the chunk's own.
    """
    if EARLY:
        gdc_launch_dependents()
    i_split, i_bh, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_b, i_h = i_bh // H, i_bh % H
    before = tl.load(seen_ptr + i_b)
    length = before
    if MOVE or GATE:
        length = before // unit * unit
    o, o_n = i_r * BR + tl.arange(0, BR), tl.arange(0, BN)
    o_d, o_v = tl.arange(0, DP), tl.arange(0, DVP)
    inside = o < rows
    each = tl.cdiv(tl.cdiv(length, BN), tl.num_programs(0)) * BN
    first = i_split * each
    stop = tl.minimum(first + each, length)
    b_m = tl.full([BR], float("-inf"), tl.float32)
    b_l = tl.zeros([BR], tl.float32)
    b_acc = tl.zeros([BR, DVP], tl.float32)
    operand: tl.constexpr = keys_ptr.dtype.element_ty
    at = i_bh.to(tl.int64) * rows
    head = i_h * G + o % G
    row = inside[:, None] & (o_d[None, :] < D)
    k_ptr = keys_ptr + i_bh.to(tl.int64) * capacity * D
    v_ptr = values_ptr + i_bh.to(tl.int64) * capacity * DV
    if EARLY and MOVE:
        gdc_wait()
    if first < stop:
        if MOVE:
            in_range = tl.load(range_ptr + i_bh)
            p_x = moved_ptr + (at * (capacity // unit) * 2 + o[:, None]) * DP + o_d[None, :]
        else:
            p_q = q_ptr + ((i_b * T + o // G) * H * G + head).to(tl.int64)[:, None] * D
            b_x = tl.load(p_q + o_d[None, :], row, other=0.0).to(tl.float32)
            in_range = range_of(b_x)
            b_x *= in_range
            b_high = b_x.to(operand)
            b_low = (b_x - b_high.to(tl.float32)).to(operand)
        scale2 = scale * LOG2_E / in_range
        if GATE:
            p_tail = tail_fade_ptr + (i_b * 2 + tl.load(turn_ptr + i_b)) * H * G
            b_elapsed = _elapsed(gate_ptr, p_tail, i_b, T, unit, before, o, head, inside, H, G)
        p_units = unit_fade_ptr + i_b * (capacity // unit) * H * G + head
        p_fades = fade_ptr + (i_b * H * G + i_h * G).to(tl.int64) * capacity
        for j in tl.range(first, stop, BN, num_stages=STAGES):
            o_j = j + o_n
            seen = o_j < stop
            if GATE:  # first, so that they overlap
                b_start = tl.load(p_units + j // unit * H * G, inside, other=0.0)
                if G == 1:
                    b_fade = tl.load(p_fades + o_j, seen, other=0.0)[None, :]
                else:
                    p_fade = p_fades + (o % G)[:, None] * capacity + o_j[None, :]
                    b_fade = tl.load(p_fade, inside[:, None] & seen[None, :], other=0.0)
            p_k = k_ptr + o_j.to(tl.int64)[:, None] * D + o_d[None, :]
            b_k = tl.trans(tl.load(p_k, seen[:, None] & (o_d[None, :] < D), other=0.0))
            if MOVE:
                p_high = p_x + tl.cast(j // unit, tl.int64) * 2 * rows * DP
                b_high = tl.load(p_high, row, other=0.0)
                if operand != tl.float32:
                    b_low = tl.load(p_high + rows * DP, row, other=0.0)
            b_s = tl.dot(b_high, b_k, input_precision=FLOAT32)
            if operand != tl.float32:
                b_s = tl.dot(b_low, b_k, b_s)
            b_s *= scale2
            if GATE:
                b_s += ((b_elapsed + b_start)[:, None] + b_fade) * LOG2_E
            shown = seen
            if VALID:
                p_valid = valid_ptr + i_b.to(tl.int64) * capacity + o_j
                shown &= tl.load(p_valid, seen, other=0) != 0
            b_s = tl.where(shown[None, :], b_s, float("-inf"))
            p_v = v_ptr + o_j.to(tl.int64)[:, None] * DV + o_v[None, :]
            b_v = tl.load(p_v, seen[:, None] & (o_v[None, :] < DV), other=0.0)
            b_m, b_l, b_acc = masked_softmax_step(b_s, b_m, b_l, b_acc, b_v)
    part = i_split * tl.num_programs(1) + i_bh
    store_part(out_ptr, lse_ptr, part, rows, o, o_v, b_m, b_l, b_acc, DVP)


@triton.jit
def _load_product(p, o_d, o_n, D: tl.constexpr):
    """Columns o_n of a unit's product, as high + low; in float32 the low is not used."""
    p += o_d[:, None] * D + o_n[None, :]
    inside = (o_d[:, None] < D) & (o_n[None, :] < D)
    b_high = tl.load(p, inside, other=0.0)
    b_low = b_high
    if p.dtype.element_ty != tl.float32:
        b_low = tl.load(p + D * D, inside, other=0.0)
    return b_high, b_low


@triton.jit
def _store_sum(high_ptr, low_ptr, at, b_m, inside, OPERAND: tl.constexpr):
    """Entries as high + low; as they are where OPERAND is float32."""
    kept: tl.constexpr = high_ptr.dtype.element_ty
    b_high = b_m.to(kept)
    tl.store(high_ptr + at, b_high, inside)
    if tl.float32 != OPERAND:
        tl.store(low_ptr + at, (b_m - b_high.to(tl.float32)).to(kept), inside)


@triton.jit
def _carry(
    high_ptr, low_ptr, product_ptr, i_unit, item, step, stride_u,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """M ← M 𝒫 in place for units before i_unit, 64 rows of one at a time; M = I for i_unit."""
    PARTS: tl.constexpr = DP // 64
    o_64, o_d = tl.arange(0, 64), tl.arange(0, DP)
    if BN == DP:
        b_high, b_low = _load_product(product_ptr, o_d, o_d, D)
    for n in tl.range(item, i_unit * PARTS, step, num_stages=1):
        o_p = n % PARTS * 64 + o_64
        at = tl.cast(n // PARTS, tl.int64) * stride_u
        rows, inside = o_p[:, None] * D + o_d[None, :], (o_p[:, None] < D) & (o_d[None, :] < D)
        b_old = tl.load(high_ptr + at + rows, inside, other=0.0)
        if tl.float32 != OPERAND:
            b_rest = tl.load(low_ptr + at + rows, inside, other=0.0)
        tl.debug_barrier()  # other threads write what is read here
        for c in tl.static_range(DP // BN):
            o_n = c * BN + tl.arange(0, BN)
            if BN != DP:
                b_high, b_low = _load_product(product_ptr, o_d, o_n, D)
            if tl.float32 == OPERAND:
                b_m = tl.dot(b_old, b_high, input_precision=FLOAT32)
            else:
                b_m = tl.dot(b_old, b_low, tl.dot(b_rest, b_high))
                b_m = tl.dot(b_old, b_high, b_m)
            out = o_p[:, None] * D + o_n[None, :]
            inside = (o_p[:, None] < D) & (o_n[None, :] < D)
            _store_sum(high_ptr, low_ptr, at + out, b_m, inside, OPERAND)
    for n in tl.range(item, PARTS, step, num_stages=1):
        o_p = n * 64 + o_64
        b_m = tl.where(o_p[:, None] == o_d[None, :], 1.0, 0.0)
        out = i_unit.to(tl.int64) * stride_u + o_p[:, None] * D + o_d[None, :]
        inside = (o_p[:, None] < D) & (o_d[None, :] < D)
        _store_sum(high_ptr, low_ptr, out, b_m, inside, OPERAND)


@triton.jit
def _keep_keys(
    keys_ptr, ring_ptr, fade_ptr, ring_fade_ptr, first, ring, capacity, i_bh,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    MOVE: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """64 keys and gates of the tail become a unit's."""
    o_d, o_g = tl.arange(0, DP), tl.arange(0, GP)
    at = first + tl.arange(0, 64)
    slot = at % ring
    if MOVE:
        p_k = ring_ptr + (i_bh.to(tl.int64) * ring + slot[:, None]) * DP + o_d[None, :]
        b_k = tl.load(p_k).to(keys_ptr.dtype.element_ty)
        p_k = keys_ptr + (i_bh.to(tl.int64) * capacity + at[:, None]) * D + o_d[None, :]
        tl.store(p_k, b_k, o_d[None, :] < D)
    if GATE:
        heads, grouped = (i_bh * G + o_g).to(tl.int64)[:, None], (o_g < G)[:, None]
        b_fade = tl.load(ring_fade_ptr + heads * ring + slot[None, :], grouped)
        tl.store(fade_ptr + heads * capacity + at[None, :], b_fade, grouped)


@triton.jit(do_not_specialize=["T", "capacity", "parts", "rows", "kept_units"])
def finish_kernel(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, seen_ptr, next_ptr, turn_ptr,
    keys_ptr, ring_ptr, fade_ptr, ring_fade_ptr, high_ptr, low_ptr, product_ptr, unit_fade_ptr,
    forget_ptr, parts, rows, T, unit, ring, capacity, copies, kept_units,
    stride_mb, stride_mu, stride_mh,
    H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, MOVE: tl.constexpr,
    GATE: tl.constexpr, OPERAND: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Merge the parts, a row a program; `seen` moves on; seal a unit if the tokens completed one.

    A unit is sealed by further programs: `copies` that keep its keys for ever, and others that
    carry every earlier unit's M over it. Whether there is one they read from `next`.
    """
    if EARLY:
        gdc_wait()
    i_z, i_bh = tl.program_id(0), tl.program_id(1)
    i_b, i_h = i_bh // H, i_bh % H
    seen = tl.load(next_ptr + i_b)
    if i_z < rows:
        o_row = ((i_b.to(tl.int64) * T + i_z // G) * H + i_h) * G + i_z % G
        merge_row(
            part_ptr, part_lse_ptr, out_ptr, lse_ptr, out_ptr, lse_ptr, parts,
            tl.num_programs(1) * rows, i_bh * rows + i_z, o_row, tl.arange(0, DVP), DV, DVP, BP,
            False,
        )  # fmt: skip
        first = (i_h == 0) & (i_z == 0)
        tl.store(seen_ptr + i_b, seen, first)
        if MOVE or GATE:
            tl.store(turn_ptr + i_b, 1 - tl.load(turn_ptr + i_b, first), first)
    elif (seen // unit > (seen - T) // unit) & (seen >= unit):
        i_unit, item = seen // unit - 1, i_z - rows
        place, step = i_unit % kept_units, tl.num_programs(0) - rows
        if GATE:
            o_g = tl.arange(0, GP)
            p_forget = forget_ptr + (i_b * kept_units + place) * H * G + i_h * G
            b_new = tl.load(p_forget + o_g, o_g < G, other=0.0)
            for y in tl.range(item, i_unit + 1, step, num_stages=1):
                p_y = unit_fade_ptr + (i_b * (capacity // unit) + y) * H * G + i_h * G + o_g
                b_y = tl.load(p_y, (o_g < G) & (y < i_unit), other=0.0) + b_new
                tl.store(p_y, tl.where(y < i_unit, b_y, 0.0), o_g < G)
        if item < copies:
            for n in tl.range(item, unit // 64, copies, num_stages=1):
                _keep_keys(
                    keys_ptr, ring_ptr, fade_ptr, ring_fade_ptr, i_unit * unit + n * 64, ring,
                    capacity, i_bh, G, GP, D, DP, MOVE, GATE,
                )  # fmt: skip
        elif MOVE:
            at = i_b.to(tl.int64) * stride_mb + i_h.to(tl.int64) * stride_mh
            PARTS: tl.constexpr = 1 if product_ptr.dtype.element_ty == tl.float32 else 2
            here = (i_b.to(tl.int64) * kept_units + place) * H + i_h
            _carry(
                high_ptr + at, low_ptr + at, product_ptr + here * PARTS * D * D, i_unit,
                item - copies, step - copies, stride_mu, D, DP, BN, OPERAND,
            )  # fmt: skip
