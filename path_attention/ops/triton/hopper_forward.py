"""The forward pass's main loop for Hopper, in Gluon: `meet_fwd_kernel` by specialised warps.

docs/algorithm.md §3. Two neighbouring blocks of queries meet the same left units from the second
level on, so a program is a pair of blocks: a warpgroup for each, and one warp that fetches for
both. The warpgroups take turns at the matrix units: while one waits for its scores or exponentiates
them, the other's products run.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Of a share over what the maximum is frozen at, in powers of two: sums of 2²⁰ shares times values
# of 2³⁰ stay inside float32.
MOST: gl.constexpr = gl.constexpr(64)
COUNTS = ["pairs", "count", "queries", "keys", "nodes", "levels"]


@gluon.jit
def pair_row(pairs_ptr, blocks_ptr, sequences_ptr, i_pair, levels):
    """A pair's first block, its first token and index; its sequence's blocks, first block, level
    table."""
    i_block = gl.load(pairs_ptr + i_pair)
    row = blocks_ptr + i_block * 4
    table = sequences_ptr + gl.load(row + 3) * (2 + 3 * levels)
    return i_block, gl.load(row), gl.load(row + 2), gl.load(table), gl.load(table + 1), table + 2


@gluon.jit
def stored_at(table, i, level, KIND: gl.constexpr):
    """Where block i of a sequence is stored at a level: KIND 0 queries, 1 keys."""
    within = i & ((1 << level) - 1)
    return gl.load(table + 3 * level + KIND) + ((i >> (level + 1)) << level) + within


@gluon.jit
def tiles_of(
    table, i, left, level, token, i_hq, i_h, queries, keys,
    DP: gl.constexpr, TRANSPORT: gl.constexpr,
):  # fmt: skip
    """Row and column of a block's queries at a level, and of a left unit's first keys."""
    if TRANSPORT:
        row_q = (i_hq * queries + stored_at(table, i, level, 0)) * 64
        column_q = 0
        row_k = (i_h * keys + stored_at(table, left, level, 1)) * 64
        column_k = 0
    else:
        row_q = token
        column_q = i_hq * DP
        row_k = token - (i - left) * 64
        column_k = i_h * DP
    return row_q, column_q, row_k, column_k


@gluon.jit
def barriers(N: gl.constexpr, COUNT: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(N):
        mbarrier.init(made.index(n), count=COUNT)
    return made


@gluon.jit
def _fetch(
    q_desc, k_desc, v_desc, kc_desc, q0_s, q1_s, k_s, v_s, kc_s, q_ready, q_empty, k_ready, k_empty,
    v_ready, v_empty, token, i, size, table, i_hq, queries, keys, levels,
    G: gl.constexpr, DP: gl.constexpr, DVP: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    TRANSPORT: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Queries of both blocks at each level, keys and values of its left unit, tile by tile."""
    kc_bytes: gl.constexpr = kc_desc.block_type.nbytes if GATE else 0
    i_h = i_hq // G
    second = gl.where(i + 1 < size, 1, 0)
    tile = 0
    n = 0
    for level in range(1, levels):
        unit = i >> level
        if (unit & 1) == 1:
            left = (unit - 1) << level
            row_v = token - (i - left) * 64
            slot = n & 1
            mbarrier.wait(q_empty.index(slot), ((n >> 1) & 1) ^ 1)
            mbarrier.expect(q_ready.index(slot), 2 * q_desc.block_type.nbytes)
            row_q, column_q, row_k, column_k = tiles_of(
                table, i, left, level, token, i_hq, i_h, queries, keys, DP, TRANSPORT
            )
            tma.async_copy_global_to_shared(
                q_desc, [row_q, column_q], q_ready.index(slot), q0_s.index(slot)
            )
            tma.async_copy_global_to_shared(
                q_desc, [row_q + second * 64, column_q], q_ready.index(slot), q1_s.index(slot)
            )
            row_kc = (i_hq * keys + stored_at(table, left, level, 1)) * 64
            for j in range(0, 64 << level, BN):
                stage = tile % STAGES
                empty = ((tile // STAGES) & 1) ^ 1
                mbarrier.wait(k_empty.index(stage), empty)
                mbarrier.expect(k_ready.index(stage), k_desc.block_type.nbytes + kc_bytes)
                if GATE:
                    tma.async_copy_global_to_shared(
                        kc_desc, [row_kc + j], k_ready.index(stage), kc_s.index(stage)
                    )
                tma.async_copy_global_to_shared(
                    k_desc, [row_k + j, column_k], k_ready.index(stage), k_s.index(stage)
                )
                mbarrier.wait(v_empty.index(stage), empty)
                mbarrier.expect(v_ready.index(stage), v_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    v_desc, [row_v + j, i_h * DVP], v_ready.index(stage), v_s.index(stage)
                )
                tile += 1
            n += 1


@gluon.jit
def _shares(s, kc, scale, m, l, GATE: gl.constexpr, FROZEN: gl.constexpr):
    """One tile of raw scores: shares, the new maximum (base 2) and sum, what is left of the old."""
    if GATE:
        s = s * scale + kc[None, :]
    if FROZEN:
        m_new = m
        alpha = l  # unused
        p = gl.exp2(s - m[:, None]) if GATE else gl.exp2(s * scale - m[:, None])
        l = l + gl.sum(p, 1)
    else:
        m_new = gl.maximum(m, gl.max(s, 1)) if GATE else gl.maximum(m, gl.max(s, 1) * scale)
        p = gl.exp2(s - m_new[:, None]) if GATE else gl.exp2(s * scale - m_new[:, None])
        alpha = gl.exp2(m - m_new)
        l = l * alpha + gl.sum(p, 1)
    return p, m_new, l, alpha


@gluon.jit
def _level(
    q_s, k_s, v_s, kc_s, k_ready, k_empty, v_ready, v_empty, turns, scale, tiles, tile, m, l, acc,
    DVP: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, GATE: gl.constexpr,
    SECOND: gl.constexpr, FROZEN: gl.constexpr,
):  # fmt: skip
    """Take a unit's tiles into the softmax, each one's values while the next one's scores run."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DVP, 16])
    shares: gl.constexpr = gl.DotOperandLayout(0, output, 2)
    output_rows: gl.constexpr = gl.SliceLayout(1, output)
    columns: gl.constexpr = gl.SliceLayout(0, scores)
    zero = gl.zeros([64, BN], gl.float32, scores)
    stage = tile % STAGES
    mbarrier.wait(k_ready.index(stage), (tile // STAGES) & 1)
    mbarrier.wait(turns.index(SECOND), (tile & 1) ^ (1 - SECOND))
    s = warpgroup_mma(q_s, k_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.arrive(turns.index(1 - SECOND), count=1)
    kc = kc_s.index(stage).load(columns) if GATE else scale
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    p, m, l, alpha = _shares(s, kc, scale, m, l, GATE, FROZEN)
    mbarrier.wait(v_ready.index(stage), (tile // STAGES) & 1)
    if not FROZEN:
        acc = acc * gl.convert_layout(alpha, output_rows)[:, None]
    p = gl.convert_layout(p.to(v_s.dtype), shares)
    for _ in range(1, tiles):
        before = tile % STAGES
        tile += 1
        stage = tile % STAGES
        mbarrier.wait(k_ready.index(stage), (tile // STAGES) & 1)
        mbarrier.wait(turns.index(SECOND), (tile & 1) ^ (1 - SECOND))
        s = warpgroup_mma(q_s, k_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        acc = warpgroup_mma(p, v_s.index(before), acc, is_async=True)
        mbarrier.arrive(turns.index(1 - SECOND), count=1)
        kc = kc_s.index(stage).load(columns) if GATE else scale
        s = warpgroup_mma_wait(1, deps=(s,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        p_next, m, l, alpha = _shares(s, kc, scale, m, l, GATE, FROZEN)
        # (Here this wait keeps the exponentials before the next one: beside the values' product.)
        mbarrier.wait(v_ready.index(stage), (tile // STAGES) & 1)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(before), count=1)
        if not FROZEN:
            acc = acc * gl.convert_layout(alpha, output_rows)[:, None]
        p = gl.convert_layout(p_next.to(v_s.dtype), shares)
    stage = tile % STAGES
    acc = warpgroup_mma(p, v_s.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_empty.index(stage), count=1)
    return tile + 1, m, l, acc


@gluon.jit
def _attend(
    q_s, k_s, v_s, kc_s, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, turns,
    qc_ptr, range_ptr, acc_ptr, m_ptr, l_ptr, out_ptr, low_ptr, lse_ptr, blocks_ptr,
    i_block, token, i, size, table, i_hq, count, queries, keys, levels,
    stride_ot, stride_oh, stride_lt,
    DV: gl.constexpr, DVP: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    GATE: gl.constexpr, LOW: gl.constexpr, SECOND: gl.constexpr,
):  # fmt: skip
    """One block's queries. A second block that is not there repeats the first, unwritten.

    Where no score can exceed a row's maximum so far by a factor that overflows, that maximum is
    frozen: shares stay relative to it, and nothing is compared or rescaled any more.
    """
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DVP, 16])
    rows: gl.constexpr = gl.SliceLayout(1, scores)
    output_rows: gl.constexpr = gl.SliceLayout(1, output)
    there = gl.where(i + SECOND < size, 1, 0)
    mine = SECOND * there
    valid = gl.load(blocks_ptr + (i_block + mine) * 4 + 1)
    valid = gl.where(there == 1, valid, 0)
    o = gl.arange(0, 64, rows)
    o_r = gl.arange(0, 64, output_rows)
    o_v = gl.arange(0, DVP, gl.SliceLayout(0, output))
    row = (i_hq.to(gl.int64) * count + i_block + mine) * 64
    m = gl.load(m_ptr + row + o)
    l = gl.load(l_ptr + row + o)
    acc = gl.load(acc_ptr + row * DVP + o_r[:, None] * DVP + o_v[None, :])
    scale = gl.load(range_ptr + 2)
    frozen = gl.load(range_ptr + 3) - gl.min(m, 0) < MOST
    tile = 0
    n = 0
    for level in range(1, levels):
        unit = i >> level
        if (unit & 1) == 1:
            slot = n & 1
            m_level = m
            if GATE:
                at_q = i_hq.to(gl.int64) * queries + stored_at(table, i + mine, level, 0)
                qc = gl.load(qc_ptr + at_q * 64 + o)
                m_level = m - qc
            m_start = m_level
            mbarrier.wait(q_ready.index(slot), (n >> 1) & 1)
            tiles = (64 << level) // BN
            # (P in float16 holds no such factors.)
            if frozen and v_s.dtype == gl.bfloat16:
                tile, m_level, l, acc = _level(
                    q_s.index(slot), k_s, v_s, kc_s, k_ready, k_empty, v_ready, v_empty, turns,
                    scale, tiles, tile, m_level, l, acc, DVP, BN, STAGES, GATE, SECOND, True,
                )  # fmt: skip
            else:
                tile, m_level, l, acc = _level(
                    q_s.index(slot), k_s, v_s, kc_s, k_ready, k_empty, v_ready, v_empty, turns,
                    scale, tiles, tile, m_level, l, acc, DVP, BN, STAGES, GATE, SECOND, False,
                )  # fmt: skip
            mbarrier.arrive(q_empty.index(slot), count=1)
            n += 1
            # without the rounding of m − qc + qc where no score of this level is larger
            m = gl.where(m_level == m_start, m, m_level + qc) if GATE else m_level
    acc = acc / gl.convert_layout(l, output_rows)[:, None]
    first = token.to(gl.int64) + mine * 64
    o_out = i_hq * stride_oh + (first + o_r[:, None]) * stride_ot + o_v[None, :]
    inside = (o_r[:, None] < valid) & (o_v[None, :] < DV)
    rounded = acc.to(out_ptr.dtype.element_ty)
    gl.store(out_ptr + o_out, rounded, inside)
    if LOW:
        low = (acc - rounded.to(gl.float32)).to(out_ptr.dtype.element_ty)
        gl.store(low_ptr + o_out, low, inside)
    lse = (m + gl.log2(l)) * 0.6931471805599453
    gl.store(lse_ptr + (first + o) * stride_lt + i_hq, lse, o < valid)


@gluon.jit(do_not_specialize=COUNTS)
def meet_fwd_hopper_kernel(
    q_desc, k_desc, v_desc, qc_ptr, kc_desc, range_ptr, acc_ptr, m_ptr, l_ptr, out_ptr, low_ptr,
    lse_ptr, pairs_ptr, blocks_ptr, sequences_ptr, pairs, count, queries, keys, levels,
    stride_ot, stride_oh, stride_lt,
    G: gl.constexpr, DP: gl.constexpr, DV: gl.constexpr, DVP: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, TRANSPORT: gl.constexpr, GATE: gl.constexpr, LOW: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Two blocks of queries against every left unit from the second level on; write out and lse."""
    i_pair = pairs - 1 - gl.program_id(0)  # long rows first
    i_hq = gl.program_id(1)
    i_block, token, i, size, _, table = pair_row(
        pairs_ptr, blocks_ptr, sequences_ptr, i_pair, levels
    )
    q0_s = gl.allocate_shared_memory(q_desc.dtype, [2, 64, DP], q_desc.layout)
    q1_s = gl.allocate_shared_memory(q_desc.dtype, [2, 64, DP], q_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BN, DP], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [STAGES, BN, DVP], v_desc.layout)
    kc_s = gl.allocate_shared_memory(kc_desc.dtype, [STAGES, BN], kc_desc.layout)
    q_ready = barriers(2, 1)
    q_empty = barriers(2, 2)
    k_ready = barriers(STAGES, 1)
    k_empty = barriers(STAGES, 2)
    v_ready = barriers(STAGES, 1)
    v_empty = barriers(STAGES, 2)
    turns = barriers(2, 1)
    fence_async_shared()
    gl.warp_specialize([
        (_attend, (q0_s, k_s, v_s, kc_s, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
                   turns, qc_ptr, range_ptr, acc_ptr, m_ptr, l_ptr, out_ptr, low_ptr, lse_ptr,
                   blocks_ptr, i_block, token, i, size, table, i_hq, count, queries, keys, levels,
                   stride_ot, stride_oh, stride_lt, DV, DVP, BN, STAGES, GATE, LOW, 0)),
        (_attend, (q1_s, k_s, v_s, kc_s, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
                   turns, qc_ptr, range_ptr, acc_ptr, m_ptr, l_ptr, out_ptr, low_ptr, lse_ptr,
                   blocks_ptr, i_block, token, i, size, table, i_hq, count, queries, keys, levels,
                   stride_ot, stride_oh, stride_lt, DV, DVP, BN, STAGES, GATE, LOW, 1)),
        (_fetch, (q_desc, k_desc, v_desc, kc_desc, q0_s, q1_s, k_s, v_s, kc_s, q_ready, q_empty,
                  k_ready, k_empty, v_ready, v_empty, token, i, size, table, i_hq, queries, keys,
                  levels, G, DP, DVP, BN, STAGES, TRANSPORT, GATE)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip
