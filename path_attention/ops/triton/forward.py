"""Queries meet the keys of the left units, level by level: the main loop of the forward pass.

docs/algorithm.md §3. Inside a level this is plain attention without a mask: the left unit is
complete and lies before every query of the right one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from path_attention.ops.triton.primitives import FLOAT32, block_row, softmax_step, stored_block

_COUNTS = ["count", "queries", "keys", "levels"]


@triton.jit(do_not_specialize=_COUNTS)
def meet_fwd_kernel(
    q_desc, k_desc, v_desc, qc_ptr, kc_desc, range_ptr, acc_ptr, m_ptr, l_ptr, out_ptr, low_ptr,
    lse_ptr,
    blocks_ptr, sequences_ptr, count, queries, keys, levels, stride_ot, stride_oh, stride_lt,
    G: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr, TRANSPORT: tl.constexpr, GATE: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """One block of queries against every left unit from the second level on; write out and lse.

    LOW: what rounding takes off `out` is written too, for a δ that does not feel it.
    """
    i_block = count - 1 - tl.program_id(0)  # long rows first
    i_hq = tl.program_id(1)
    i_h = i_hq // G
    token, valid, i, _, _, table = block_row(blocks_ptr, sequences_ptr, i_block, levels)
    o, o_v = tl.arange(0, 64), tl.arange(0, DVP)
    row = (i_hq.to(tl.int64) * count + i_block) * 64
    b_m = tl.load(m_ptr + row + o)
    b_l = tl.load(l_ptr + row + o)
    b_acc = tl.load(acc_ptr + row * DVP + o[:, None] * DVP + o_v[None, :])
    scale = tl.load(range_ptr + 2)
    for level in tl.range(1, levels, num_stages=1):
        unit = i >> level
        if (unit & 1) == 1:
            left = (unit - 1) << level
            row_v = token - (i - left) * 64
            at_q = i_hq * queries + stored_block(table, i, level, 0)
            at_k = stored_block(table, left, level, 1)
            if TRANSPORT:
                b_q = q_desc.load([at_q * 64, 0])
                row_k, column_k = (i_h * keys + at_k) * 64, 0
            else:
                b_q = q_desc.load([token, i_hq * DP])
                row_k, column_k = row_v, i_h * DP
            if GATE:
                b_qc = tl.load(qc_ptr + at_q.to(tl.int64) * 64 + o)
                row_kc = (i_hq * keys + at_k) * 64
                b_m_below = b_m
                b_m -= b_qc
                b_m_start = b_m
            for j in tl.range(0, 64 << level, BN, num_stages=STAGES):
                b_k = k_desc.load([row_k + j, column_k])
                b_s = tl.dot(b_q, tl.trans(b_k), input_precision=FLOAT32)
                b_v = v_desc.load([row_v + j, i_h * DVP])
                if GATE:
                    b_s = b_s * scale + kc_desc.load([row_kc + j])[None, :]
                    b_m, b_l, b_acc = softmax_step(b_s, 1.0, b_m, b_l, b_acc, b_v)
                else:
                    b_m, b_l, b_acc = softmax_step(b_s, scale, b_m, b_l, b_acc, b_v)
            if GATE:  # without the rounding of m − qc + qc where no score of this level is larger
                b_m = tl.where(b_m == b_m_start, b_m_below, b_m + b_qc)
    b_acc = b_acc / b_l[:, None]
    inside = o < valid
    at = i_hq * stride_oh + token.to(tl.int64) * stride_ot
    o_out = at + o[:, None] * stride_ot + o_v[None, :]
    m_out = inside[:, None] & (o_v[None, :] < DV)
    b_out = b_acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + o_out, b_out, m_out)
    if LOW:
        b_low = (b_acc - b_out.to(tl.float32)).to(out_ptr.dtype.element_ty)
        tl.store(low_ptr + o_out, b_low, m_out)
    b_lse = (b_m + tl.math.log2(b_l)) * 0.6931471805599453
    tl.store(lse_ptr + (token.to(tl.int64) + o) * stride_lt + i_hq, b_lse, mask=inside)
