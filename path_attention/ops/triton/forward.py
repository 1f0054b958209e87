"""Queries meet the keys of the left units, level by level: the main loop of the forward pass.

docs/algorithm.md §3. Inside a level this is plain attention without a mask: the left unit is complete
and lies before every query of the right one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from path_attention.ops.triton.local import softmax_step
from path_attention.ops.triton.primitives import block_row, load_tile, stored_block


@triton.jit
def meet_fwd_kernel(
    q_ptr, qh_ptr, kh_desc, v_desc, c_ptr, range_ptr, acc_ptr, m_ptr, l_ptr, out_ptr, lse_ptr,
    blocks_ptr, sequences_ptr, count, queries, keys, total,
    stride_qt, stride_qh, stride_ot, stride_oh, stride_lt,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr, LEVELS: tl.constexpr, TRANSPORT: tl.constexpr,
    GATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of queries against every left unit; normalise and write the output and lse."""
    i_block = count - 1 - tl.program_id(0)  # long rows first
    i_hq = tl.program_id(1)
    i_h = i_hq // G
    token, valid, i, _, _, table = block_row(blocks_ptr, sequences_ptr, i_block, LEVELS)
    first_token = token - i * 64
    o, o_d, o_v = tl.arange(0, 64), tl.arange(0, DP), tl.arange(0, DVP)
    row = (i_hq.to(tl.int64) * count + i_block) * 64
    b_m = tl.load(m_ptr + row + o)
    b_l = tl.load(l_ptr + row + o)
    b_acc = tl.load(acc_ptr + row * DVP + o[:, None] * DVP + o_v[None, :])
    logit_scale = tl.load(range_ptr + 2)
    c_ptr += i_hq.to(tl.int64) * total
    if not TRANSPORT:
        b_q = load_tile(q_ptr + token * stride_qt + i_hq * stride_qh, o, stride_qt, o_d, valid, D)
    for level in range(0, LEVELS):
        unit = i >> level
        if (unit & 1) == 1:
            left = (unit - 1) << level
            row_v = first_token + left * 64
            row_k = row_v
            if TRANSPORT:
                at = i_hq.to(tl.int64) * queries + stored_block(table, i, level, 0)
                b_q = tl.load(qh_ptr + at * 64 * DP + o[:, None] * DP + o_d[None, :])
                row_k = (i_h.to(tl.int64) * keys + stored_block(table, left, level, 1)) * 64
            if GATE:
                b_border = tl.load(c_ptr + row_v + (64 << level) - 1)
                b_c = tl.load(c_ptr + token + o, o < valid, other=0.0)
                b_row = tl.where(o < valid, (b_c - b_border).to(tl.float32), 0.0)
            for j in tl.range(0, 64 << level, BN, num_stages=STAGES):
                b_k = kh_desc.load([(row_k + j).to(tl.int32), 0 if TRANSPORT else i_h * DP])
                b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * logit_scale
                if GATE:
                    o_n = j + tl.arange(0, BN)
                    b_s += (b_border - tl.load(c_ptr + row_v + o_n)).to(tl.float32)[None, :]
                    b_s += b_row[:, None]
                if BN > 64:
                    if level == 0:
                        b_s = tl.where(tl.arange(0, BN)[None, :] < 64, b_s, float("-inf"))
                b_v = v_desc.load([(row_v + j).to(tl.int32), i_h * DVP])
                b_m, b_l, b_acc = softmax_step(b_s, b_m, b_l, b_acc, b_v, PRECISION)
    b_acc = b_acc / b_l[:, None]
    out_ptr += token * stride_ot + i_hq * stride_oh
    inside = o < valid
    tl.store(
        out_ptr + o[:, None] * stride_ot + o_v[None, :],
        b_acc.to(out_ptr.dtype.element_ty),
        mask=inside[:, None] & (o_v[None, :] < DV),
    )
    b_lse = (b_m + tl.math.log2(b_l)) * 0.6931471805599453
    tl.store(lse_ptr + (token + o) * stride_lt + i_hq, b_lse, mask=inside)
