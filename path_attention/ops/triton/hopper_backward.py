"""The backward pass's main loops for Hopper, in Gluon, by specialised warps.

docs/algorithm.md §4. As in `hopper_forward.py` a program is a pair of neighbouring blocks, with a
warpgroup for each, and one warp that fetches for both. They walk the levels from the top down; what
a level gets from those above it goes back through the transition that joined them.
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

from path_attention.ops.triton.hopper_forward import (
    COUNTS,
    barriers,
    pair_row,
    stored_at,
    tiles_of,
)


@gluon.jit
def node_at(table, unit, level):
    """Where the transition of a complete unit is stored."""
    return gl.load(table + 3 * level + 2) + unit


@gluon.jit
def left_of(i, level, size):
    """Whether a pair's queries meet a left unit at a level, and its first block. At the first one
    (left out with transport) the second block's meet the first one's keys."""
    unit = i >> level
    meets = gl.where(level > 0, unit & 1, gl.where(i + 1 < size, 1, 0))
    return meets == 1, gl.where(level > 0, (unit - 1) << level, i)


@gluon.jit
def _fetch_keys(
    q_desc, k_desc, v_desc, do_desc, p_desc, kc_desc, q0_s, q1_s, do0_s, do1_s, k_s, v_s, p_s, kc_s,
    do_ready, q_ready, q_empty, p_ready, p_empty, x_ready, x_empty,
    token, i, size, table, i_hq, queries, keys, nodes, levels,
    G: gl.constexpr, DP: gl.constexpr, DVP: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    TRANSPORT: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """For queries: their tiles, the left units' keys and values, transitions between levels."""
    kc_bytes: gl.constexpr = kc_desc.block_type.nbytes if GATE else 0
    nbytes: gl.constexpr = k_desc.block_type.nbytes + v_desc.block_type.nbytes + kc_bytes
    i_h = i_hq // G
    second = gl.where(i + 1 < size, 64, 0)
    mbarrier.expect(do_ready.index(0), 2 * do_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(do_desc, [token, i_hq * DVP], do_ready.index(0), do0_s)
    tma.async_copy_global_to_shared(do_desc, [token + second, i_hq * DVP], do_ready.index(0), do1_s)
    tile = 0
    n = 0
    moves = 0
    first_level: gl.constexpr = 1 if TRANSPORT else 0
    for down in range(0, levels - first_level):
        level = levels - 1 - down
        unit = i >> level
        meets, left = left_of(i, level, size)
        if meets:
            row_v = token - (i - left) * 64
            row_q, column_q, row_k, column_k = tiles_of(
                table, i, left, level, token, i_hq, i_h, queries, keys, DP, TRANSPORT
            )
            if TRANSPORT and unit > 1:
                row_p = (i_h * nodes + node_at(table, unit - 1, level)) * DP
                mbarrier.wait(p_empty.index(0), (moves & 1) ^ 1)
                mbarrier.expect(p_ready.index(0), p_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(p_desc, [row_p, 0], p_ready.index(0), p_s)
                moves += 1
            mbarrier.wait(q_empty.index(0), (n & 1) ^ 1)
            mbarrier.expect(q_ready.index(0), 2 * q_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(q_desc, [row_q, column_q], q_ready.index(0), q0_s)
            tma.async_copy_global_to_shared(
                q_desc, [row_q + second, column_q], q_ready.index(0), q1_s
            )
            n += 1
            row_kc = (i_hq * keys + stored_at(table, left, level, 1)) * 64
            for j in range(0, 64 << level, BN):
                stage = tile % STAGES
                mbarrier.wait(x_empty.index(stage), ((tile // STAGES) & 1) ^ 1)
                mbarrier.expect(x_ready.index(stage), nbytes)
                if GATE:
                    tma.async_copy_global_to_shared(
                        kc_desc, [row_kc + j], x_ready.index(stage), kc_s.index(stage)
                    )
                tma.async_copy_global_to_shared(
                    k_desc, [row_k + j, column_k], x_ready.index(stage), k_s.index(stage)
                )
                tma.async_copy_global_to_shared(
                    v_desc, [row_v + j, i_h * DVP], x_ready.index(stage), v_s.index(stage)
                )
                tile += 1


@gluon.jit
def _queries_of(
    q_s, do_s, d_s, k_s, v_s, p_s, kc_s, do_ready, q_ready, q_empty, p_ready, p_empty, x_ready,
    x_empty, dqh_desc, ql_ptr, range_ptr, lse_ptr, delta_ptr, dqt_ptr, rows_ptr,
    i_block, i, size, table, i_hq, count, queries, keys, levels,
    DP: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, TRANSPORT: gl.constexpr,
    GATE: gl.constexpr, SECOND: gl.constexpr,
):  # fmt: skip
    """Gradient of one block's queries. A second block that is not there repeats the first."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DP, 16])
    shares: gl.constexpr = gl.DotOperandLayout(0, output, 2)
    rows: gl.constexpr = gl.SliceLayout(1, scores)
    there = gl.where(i + SECOND < size, 1, 0)
    mine = SECOND * there
    o = gl.arange(0, 64, rows)
    columns: gl.constexpr = gl.SliceLayout(0, scores)
    row = (i_hq.to(gl.int64) * count + i_block + mine) * 64
    lse = gl.load(lse_ptr + row + o)
    delta = gl.load(delta_ptr + row + o)
    scale = gl.load(range_ptr + 2)
    grad_scale = gl.load(range_ptr + 3)
    zero = gl.zeros([64, BN], gl.float32, scores)
    none = gl.zeros([64, DP], gl.float32, output)
    sums = gl.zeros([64], gl.float32, rows)
    dq = none
    tile = 0
    n = 0
    moves = 0
    mbarrier.wait(do_ready.index(0), 0)
    first_level: gl.constexpr = 1 if TRANSPORT else 0
    for down in range(0, levels - first_level):
        level = levels - 1 - down
        unit = i >> level
        meets, _ = left_of(i, level, size)
        if meets:
            at_q = i_hq * queries + stored_at(table, i + mine, level, 0)
            if TRANSPORT and unit > 1:  # q' = q P_leftᵀ went on to a higher level
                tma.store_wait(0)
                d_s.store(dq.to(d_s.dtype))
                fence_async_shared()
                if there == 1:
                    tma.async_copy_shared_to_global(dqh_desc, [at_q * 64, 0], d_s)
                mbarrier.wait(p_ready.index(0), moves & 1)
                dq = warpgroup_mma(d_s, p_s, none, use_acc=False, is_async=True)
                dq = warpgroup_mma_wait(0, deps=(dq,))
                mbarrier.arrive(p_empty.index(0), count=1)
                moves += 1
            b_l = lse
            if GATE:
                b_l = gl.load(ql_ptr + at_q.to(gl.int64) * 64 + o)
            if SECOND == 0 and not TRANSPORT:  # the first block's queries meet none of its own
                b_l = gl.where(level > 0, b_l, float("inf"))
            mbarrier.wait(q_ready.index(0), n & 1)
            for _ in range(0, 64 << level, BN):
                stage = tile % STAGES
                mbarrier.wait(x_ready.index(stage), (tile // STAGES) & 1)
                s = warpgroup_mma(
                    q_s, k_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
                )
                d = warpgroup_mma(
                    do_s, v_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
                )
                kc = kc_s.index(stage).load(columns) if GATE else scale
                s = warpgroup_mma_wait(1, deps=(s,))
                if GATE:
                    p = gl.exp2(s * scale + kc[None, :] - b_l[:, None])
                else:
                    p = gl.exp2(s * scale - b_l[:, None])
                d = warpgroup_mma_wait(0, deps=(d,))
                ds = p * (d * grad_scale - delta[:, None])
                if GATE:
                    sums += gl.sum(ds, 1)
                ds = gl.convert_layout(ds.to(k_s.dtype), shares)
                dq = warpgroup_mma(ds, k_s.index(stage), dq, is_async=True)
                dq = warpgroup_mma_wait(0, deps=(dq,))
                mbarrier.arrive(x_empty.index(stage), count=1)
                tile += 1
            mbarrier.arrive(q_empty.index(0), count=1)
            n += 1
    tma.store_wait(0)
    o_r = gl.arange(0, 64, gl.SliceLayout(1, output))
    o_d = gl.arange(0, DP, gl.SliceLayout(0, output))
    written = (o_r[:, None] < there * 64) & (o_d[None, :] < DP)
    gl.store(dqt_ptr + row * DP + o_r[:, None] * DP + o_d[None, :], dq, written)
    if GATE:
        gl.store(rows_ptr + row + o, sums, o < there * 64)


@gluon.jit(do_not_specialize=COUNTS)
def queries_bwd_hopper_kernel(
    q_desc, k_desc, v_desc, do_desc, p_desc, dqh_desc, ql_ptr, kc_desc, range_ptr, lse_ptr,
    delta_ptr, dqt_ptr, rows_ptr, pairs_ptr, blocks_ptr, sequences_ptr,
    pairs, count, queries, keys, nodes, levels,
    G: gl.constexpr, DP: gl.constexpr, DVP: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    TRANSPORT: gl.constexpr, GATE: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Gradients of two blocks' queries at the start of their pair: as `queries_bwd_kernel`."""
    i_pair = pairs - 1 - gl.program_id(0)
    i_hq = gl.program_id(1)
    i_block, token, i, size, _, table = pair_row(
        pairs_ptr, blocks_ptr, sequences_ptr, i_pair, levels
    )
    q0_s = gl.allocate_shared_memory(q_desc.dtype, [64, DP], q_desc.layout)
    q1_s = gl.allocate_shared_memory(q_desc.dtype, [64, DP], q_desc.layout)
    d0_s = gl.allocate_shared_memory(q_desc.dtype, [64, DP], q_desc.layout)
    d1_s = gl.allocate_shared_memory(q_desc.dtype, [64, DP], q_desc.layout)
    do0_s = gl.allocate_shared_memory(do_desc.dtype, [64, DVP], do_desc.layout)
    do1_s = gl.allocate_shared_memory(do_desc.dtype, [64, DVP], do_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BN, DP], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [STAGES, BN, DVP], v_desc.layout)
    p_s = gl.allocate_shared_memory(p_desc.dtype, [DP, DP], p_desc.layout)
    kc_s = gl.allocate_shared_memory(kc_desc.dtype, [STAGES, BN], kc_desc.layout)
    do_ready = barriers(1, 1)
    q_ready = barriers(1, 1)
    q_empty = barriers(1, 2)
    p_ready = barriers(1, 1)
    p_empty = barriers(1, 2)
    x_ready = barriers(STAGES, 1)
    x_empty = barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize([
        (_queries_of, (q0_s, do0_s, d0_s, k_s, v_s, p_s, kc_s, do_ready, q_ready, q_empty, p_ready,
                       p_empty, x_ready, x_empty, dqh_desc, ql_ptr, range_ptr, lse_ptr,
                       delta_ptr, dqt_ptr, rows_ptr, i_block, i, size, table, i_hq, count, queries,
                       keys, levels, DP, BN, STAGES, TRANSPORT, GATE, 0)),
        (_queries_of, (q1_s, do1_s, d1_s, k_s, v_s, p_s, kc_s, do_ready, q_ready, q_empty, p_ready,
                       p_empty, x_ready, x_empty, dqh_desc, ql_ptr, range_ptr, lse_ptr,
                       delta_ptr, dqt_ptr, rows_ptr, i_block, i, size, table, i_hq, count, queries,
                       keys, levels, DP, BN, STAGES, TRANSPORT, GATE, 1)),
        (_fetch_keys, (q_desc, k_desc, v_desc, do_desc, p_desc, kc_desc, q0_s, q1_s, do0_s, do1_s,
                       k_s, v_s, p_s, kc_s, do_ready, q_ready, q_empty, p_ready, p_empty, x_ready,
                       x_empty, token, i, size, table, i_hq, queries, keys, nodes, levels,
                       G, DP, DVP, BN, STAGES, TRANSPORT, GATE)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip


@gluon.jit
def _fetch_queries(
    q_desc, k_desc, v_desc, do_desc, p_desc, lse_desc, delta_desc, q_s, do_s, lse_s, delta_s,
    k0_s, k1_s, v0_s, v1_s, p_s, v_ready, k_ready, k_empty, p_ready, p_empty, x_ready, x_empty,
    token, i, size, first, table, i_h, count, queries, keys, nodes, levels,
    G: gl.constexpr, DP: gl.constexpr, DVP: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
    TRANSPORT: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """For keys: their tiles, all of the right units' queries, transitions between levels."""
    nbytes: gl.constexpr = (
        q_desc.block_type.nbytes + do_desc.block_type.nbytes + 2 * lse_desc.block_type.nbytes
    )
    second = gl.where(i + 1 < size, 64, 0)
    mbarrier.expect(v_ready.index(0), 2 * v_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(v_desc, [token, i_h * DVP], v_ready.index(0), v0_s)
    tma.async_copy_global_to_shared(v_desc, [token + second, i_h * DVP], v_ready.index(0), v1_s)
    tile = 0
    n = 0
    moves = 0
    first_level: gl.constexpr = 1 if TRANSPORT else 0
    for down in range(0, levels - first_level):
        level = levels - 1 - down
        unit = i >> level
        right = (unit + 1) << level
        if ((unit & 1) == 0) & (right < size):
            if TRANSPORT:
                row_k = (i_h * keys + stored_at(table, i, level, 1)) * 64
                column_k = 0
            else:
                row_k = token
                column_k = i_h * DP
            if TRANSPORT and ((unit + 2) << level) < size:
                row_p = (i_h * nodes + node_at(table, unit + 1, level)) * DP
                mbarrier.wait(p_empty.index(0), (moves & 1) ^ 1)
                mbarrier.expect(p_ready.index(0), p_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(p_desc, [row_p, 0], p_ready.index(0), p_s)
                moves += 1
            mbarrier.wait(k_empty.index(0), (n & 1) ^ 1)
            mbarrier.expect(k_ready.index(0), 2 * k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(k_desc, [row_k, column_k], k_ready.index(0), k0_s)
            tma.async_copy_global_to_shared(
                k_desc, [row_k + second, column_k], k_ready.index(0), k1_s
            )
            n += 1
            rows = gl.minimum(1 << level, size - right) * 64
            row_o = token + (right - i) * 64
            at_right = stored_at(table, right, level, 0)
            for g in range(0, G):
                i_hq = i_h * G + g
                row_l = (i_hq * count + first + right) * 64
                row_s = (i_hq * queries + at_right) * 64 if GATE else row_l
                if TRANSPORT:
                    row_q = (i_hq * queries + at_right) * 64
                    column_q = 0
                else:
                    row_q = row_o
                    column_q = i_hq * DP
                for j in range(0, rows, BM):
                    stage = tile % STAGES
                    mbarrier.wait(x_empty.index(stage), ((tile // STAGES) & 1) ^ 1)
                    mbarrier.expect(x_ready.index(stage), nbytes)
                    tma.async_copy_global_to_shared(
                        q_desc, [row_q + j, column_q], x_ready.index(stage), q_s.index(stage)
                    )
                    tma.async_copy_global_to_shared(
                        do_desc, [row_o + j, i_hq * DVP], x_ready.index(stage), do_s.index(stage)
                    )
                    tma.async_copy_global_to_shared(
                        lse_desc, [row_s + j], x_ready.index(stage), lse_s.index(stage)
                    )
                    tma.async_copy_global_to_shared(
                        delta_desc, [row_l + j], x_ready.index(stage), delta_s.index(stage)
                    )
                    tile += 1


@gluon.jit
def _keys_of(
    k_s, v_s, d_s, q_s, do_s, lse_s, delta_s, p_s, v_ready, k_ready, k_empty, p_ready, p_empty,
    x_ready, x_empty, dkh_desc, undo_ptr, kc_ptr, range_ptr, dkt_ptr, dv_ptr, columns_ptr,
    i_block, i, size, table, i_h, count, keys, levels,
    G: gl.constexpr, DP: gl.constexpr, DVP: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
    HELD: gl.constexpr, TRANSPORT: gl.constexpr, GATE: gl.constexpr, SECOND: gl.constexpr,
):  # fmt: skip
    """Gradients of one block's keys and values. A second block that is not there has none.

    HELD: keys and values stay in registers, which leaves shared memory to the queries. (At size 128
    there is no room.)
    """
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DP, 16])
    values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DVP, 16])
    shares: gl.constexpr = gl.DotOperandLayout(0, values, 2)
    score_grads: gl.constexpr = gl.DotOperandLayout(0, output, 2)
    there = gl.where(i + SECOND < size, 1, 0)
    mine = SECOND * there
    o = gl.arange(0, 64, gl.SliceLayout(1, scores))
    columns_of: gl.constexpr = gl.SliceLayout(0, scores)
    scale = gl.load(range_ptr + 2)
    grad_scale = gl.load(range_ptr + 3)
    zero = gl.zeros([64, BM], gl.float32, scores)
    none = gl.zeros([64, DP], gl.float32, output)
    dk = none
    dv = gl.zeros([64, DVP], gl.float32, values)
    tile = 0
    n = 0
    moves = 0
    mbarrier.wait(v_ready.index(0), 0)
    left: gl.constexpr = gl.DotOperandLayout(0, scores, 2)
    v_a = v_s.load(left) if HELD else v_s
    first_level: gl.constexpr = 1 if TRANSPORT else 0
    for down in range(0, levels - first_level):
        level = levels - 1 - down
        unit = i >> level
        right = (unit + 1) << level
        if ((unit & 1) == 0) & (right < size):  # then the second block is there
            at_k = i_h * keys + stored_at(table, i + SECOND, level, 1)
            if TRANSPORT and ((unit + 2) << level) < size:  # k' = k P_right went on
                largest = gl.max(gl.max(gl.abs(dk), 1), 0)
                exponent = gl.minimum(gl.maximum(-gl.ceil(gl.log2(largest)), -100.0), 100.0)
                undo = gl.exp2(-exponent)
                gl.store(undo_ptr + at_k, undo)
                tma.store_wait(0)
                d_s.store((dk * gl.exp2(exponent)).to(d_s.dtype))
                fence_async_shared()
                tma.async_copy_shared_to_global(dkh_desc, [at_k * 64, 0], d_s)
                mbarrier.wait(p_ready.index(0), moves & 1)
                dk = warpgroup_mma(d_s, p_s.permute((1, 0)), none, use_acc=False, is_async=True)
                dk = warpgroup_mma_wait(0, deps=(dk,))
                mbarrier.arrive(p_empty.index(0), count=1)
                dk = dk * undo
                moves += 1
            mbarrier.wait(k_ready.index(0), n & 1)
            k_a = k_s.load(left) if HELD else k_s
            rows = gl.minimum(1 << level, size - right) * 64
            for g in range(0, G):
                i_hq = (i_h * G + g).to(gl.int64)
                kc = scale  # unused without gates
                columns = gl.zeros([64], gl.float32, gl.SliceLayout(1, scores))
                if GATE:
                    at_kc = i_hq * keys + stored_at(table, i + SECOND, level, 1)
                    kc = gl.load(kc_ptr + at_kc * 64 + o)
                for _ in range(0, rows, BM):
                    stage = tile % STAGES
                    mbarrier.wait(x_ready.index(stage), (tile // STAGES) & 1)
                    s = warpgroup_mma(
                        k_a, q_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
                    )
                    d = warpgroup_mma(
                        v_a, do_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
                    )
                    lse = lse_s.index(stage).load(columns_of)
                    if SECOND == 1 and not TRANSPORT:  # the first level's queries are its own
                        lse = gl.where(level > 0, lse, float("inf"))
                    s = warpgroup_mma_wait(1, deps=(s,))
                    if GATE:
                        p = gl.exp2(s * scale + kc[:, None] - lse[None, :])
                    else:
                        p = gl.exp2(s * scale - lse[None, :])
                    share = gl.convert_layout(p.to(do_s.dtype), shares)
                    dv = warpgroup_mma(share, do_s.index(stage), dv, is_async=True)
                    delta = delta_s.index(stage).load(columns_of)
                    d = warpgroup_mma_wait(1, deps=(d,))
                    ds = p * (d * grad_scale - delta[None, :])
                    if GATE:
                        columns += gl.sum(ds, 1)
                    ds = gl.convert_layout(ds.to(q_s.dtype), score_grads)
                    dk = warpgroup_mma(ds, q_s.index(stage), dk, is_async=True)
                    dv, dk = warpgroup_mma_wait(0, deps=(dv, dk))
                    mbarrier.arrive(x_empty.index(stage), count=1)
                    tile += 1
                if GATE:
                    p_columns = columns_ptr + (i_hq * count + i_block + SECOND) * 64 + o
                    gl.store(p_columns, gl.load(p_columns) + columns)
            mbarrier.arrive(k_empty.index(0), count=1)
            n += 1
    tma.store_wait(0)
    row = (i_h.to(gl.int64) * count + i_block + mine) * 64
    o_r = gl.arange(0, 64, gl.SliceLayout(1, output))
    o_d = gl.arange(0, DP, gl.SliceLayout(0, output))
    written = (o_r[:, None] < there * 64) & (o_d[None, :] < DP)
    gl.store(dkt_ptr + row * DP + o_r[:, None] * DP + o_d[None, :], dk, written)
    o_r = gl.arange(0, 64, gl.SliceLayout(1, values))
    o_v = gl.arange(0, DVP, gl.SliceLayout(0, values))
    written = (o_r[:, None] < there * 64) & (o_v[None, :] < DVP)
    gl.store(dv_ptr + row * DVP + o_r[:, None] * DVP + o_v[None, :], dv, written)


@gluon.jit(do_not_specialize=COUNTS)
def keys_bwd_hopper_kernel(
    q_desc, k_desc, v_desc, do_desc, p_desc, lse_desc, delta_desc, dkh_desc, undo_ptr, kc_ptr,
    range_ptr, dkt_ptr, dv_ptr, columns_ptr, pairs_ptr, blocks_ptr, sequences_ptr,
    pairs, count, queries, keys, nodes, levels,
    G: gl.constexpr, DP: gl.constexpr, DVP: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
    HELD: gl.constexpr, TRANSPORT: gl.constexpr, GATE: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Gradients of two blocks' keys at the end of their pair and values: as `keys_bwd_kernel`."""
    i_pair = gl.program_id(0)
    i_h = gl.program_id(1)
    i_block, token, i, size, first, table = pair_row(
        pairs_ptr, blocks_ptr, sequences_ptr, i_pair, levels
    )
    k0_s = gl.allocate_shared_memory(k_desc.dtype, [64, DP], k_desc.layout)
    k1_s = gl.allocate_shared_memory(k_desc.dtype, [64, DP], k_desc.layout)
    d0_s = gl.allocate_shared_memory(k_desc.dtype, [64, DP], k_desc.layout)
    d1_s = gl.allocate_shared_memory(k_desc.dtype, [64, DP], k_desc.layout)
    v0_s = gl.allocate_shared_memory(v_desc.dtype, [64, DVP], v_desc.layout)
    v1_s = gl.allocate_shared_memory(v_desc.dtype, [64, DVP], v_desc.layout)
    q_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BM, DP], q_desc.layout)
    do_s = gl.allocate_shared_memory(do_desc.dtype, [STAGES, BM, DVP], do_desc.layout)
    lse_s = gl.allocate_shared_memory(lse_desc.dtype, [STAGES, BM], lse_desc.layout)
    delta_s = gl.allocate_shared_memory(delta_desc.dtype, [STAGES, BM], delta_desc.layout)
    p_s = gl.allocate_shared_memory(p_desc.dtype, [DP, DP], p_desc.layout)
    v_ready = barriers(1, 1)
    k_ready = barriers(1, 1)
    k_empty = barriers(1, 2)
    p_ready = barriers(1, 1)
    p_empty = barriers(1, 2)
    x_ready = barriers(STAGES, 1)
    x_empty = barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize([
        (_keys_of, (k0_s, v0_s, d0_s, q_s, do_s, lse_s, delta_s, p_s, v_ready, k_ready, k_empty,
                    p_ready, p_empty, x_ready, x_empty, dkh_desc, undo_ptr, kc_ptr, range_ptr,
                    dkt_ptr, dv_ptr, columns_ptr, i_block, i, size, table, i_h, count, keys,
                    levels, G, DP, DVP, BM, STAGES, HELD, TRANSPORT, GATE, 0)),
        (_keys_of, (k1_s, v1_s, d1_s, q_s, do_s, lse_s, delta_s, p_s, v_ready, k_ready, k_empty,
                    p_ready, p_empty, x_ready, x_empty, dkh_desc, undo_ptr, kc_ptr, range_ptr,
                    dkt_ptr, dv_ptr, columns_ptr, i_block, i, size, table, i_h, count, keys,
                    levels, G, DP, DVP, BM, STAGES, HELD, TRANSPORT, GATE, 1)),
        (_fetch_queries, (q_desc, k_desc, v_desc, do_desc, p_desc, lse_desc, delta_desc, q_s, do_s,
                          lse_s, delta_s, k0_s, k1_s, v0_s, v1_s, p_s, v_ready, k_ready, k_empty,
                          p_ready, p_empty, x_ready, x_empty, token, i, size, first, table, i_h,
                          count, queries, keys, nodes, levels, G, DP, DVP, BM, STAGES, TRANSPORT,
                          GATE)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip
