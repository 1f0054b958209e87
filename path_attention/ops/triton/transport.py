"""The transport of a chunk on NVIDIA GPUs: queries to its start, keys to its end, its transition.

docs/algorithm.md §2, §3. Rows are independent, so that a program has 64 of them. A short chunk is
one launch whose programs walk over its factors, in float32. In a longer one, blocks of 64 factors
are solved first, and programs walk over blocks,

    keys: x ← x − (x Wᵀ ∘ [behind the key]) T W,   queries: x ← x − (x Wᵀ ∘ [up to the query]) Tᵀ W

by products of two float16 each, right to 2⁻²². Chunks that are longer still are split into units,
whose transitions carry the rest.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from path_attention.ops.transport import products_behind
from path_attention.ops.triton import call
from path_attention.ops.triton.device import LARGE_SHARED_MEMORY
from path_attention.ops.triton.primitives import dot_exact, pass_factors, power_for
from path_attention.ops.triton.tiles import MOST_REGISTERS, padded
from path_attention.ops.triton.transition import block_inverse

WALKED = 64  # factors of a short chunk
LONGEST = 1024  # factors of a unit: programs walk over 16 blocks at most


@triton.jit(do_not_specialize=["T"])
def transport_kernel(
    q_ptr, k_ptr, w_ptr, beta_ptr, q_out_ptr, k_out_ptr, product_ptr, T,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Programs of one row and key head: 64 keys, 64 rows of the product, or 64 queries each."""
    i_c, i_bh = tl.program_id(0), tl.program_id(1)
    i_b, i_h = i_bh // H, i_bh % H
    keys, o_d = tl.cdiv(T, 64), tl.arange(0, DP)
    first = i_b * T * H + i_h
    columns = o_d[None, :] < D
    if i_c < keys:
        o = i_c * 64 + tl.arange(0, 64)
        at = (first + o * H).to(tl.int64)[:, None] * D + o_d[None, :]
        inside = (o < T)[:, None] & columns
        b_x = tl.load(k_ptr + at, inside, other=0.0).to(tl.float32)
        for s in tl.range(i_c * 64 + 1, T, num_stages=STAGES):
            b_x = pass_factors(b_x, o < s, w_ptr, beta_ptr, first + s * H, o_d, D, N, BACK=False)
        tl.store(k_out_ptr + at, b_x, inside)
    elif i_c < keys + DP // 64:
        o = (i_c - keys) * 64 + tl.arange(0, 64)
        b_x = tl.where(o[:, None] == o_d[None, :], 1.0, 0.0)
        for s in tl.range(0, T, num_stages=STAGES):
            b_x = pass_factors(b_x, o >= 0, w_ptr, beta_ptr, first + s * H, o_d, D, N, BACK=False)
        at = (i_bh.to(tl.int64) * D + o[:, None]) * D + o_d[None, :]
        tl.store(product_ptr + at, b_x, (o < D)[:, None] & columns)
    else:
        o = (i_c - keys - DP // 64) * 64 + tl.arange(0, 64)
        t = o // G
        at = (((i_b * T + t) * H + i_h).to(tl.int64) * G + o % G)[:, None] * D + o_d[None, :]
        inside = (t < T)[:, None] & columns
        b_x = tl.load(q_ptr + at, inside, other=0.0).to(tl.float32)
        last = tl.minimum(tl.max(t, 0), T - 1)
        for n in tl.range(0, last + 1, num_stages=STAGES):
            s = last - n
            b_x = pass_factors(b_x, t >= s, w_ptr, beta_ptr, first + s * H, o_d, D, N, BACK=True)
        tl.store(q_out_ptr + at, b_x, inside)


# --- Block by block ------------------------------------------------------------------------------


@triton.jit
def _factor_rows(i_b, i_h, start, i, T, H: tl.constexpr, N: tl.constexpr):
    """Where factors i of a unit that starts at a token are: rows of w and β."""
    return ((i_b * T + start + i // N).to(tl.int64) * H + i_h) * N + i % N


@triton.jit
def _directions(w_ptr, rows, inside, o_d, D: tl.constexpr):
    p_w = w_ptr + rows[:, None] * D + o_d[None, :]
    return tl.load(p_w, inside[:, None] & (o_d[None, :] < D), other=0.0).to(tl.float32)


@triton.jit
def _solved(t_ptr, i_bh, i_u, i_block, blocks):
    o = tl.arange(0, 64)
    at = ((i_bh * tl.num_programs(1) + i_u).to(tl.int64) * blocks + i_block) * 4096
    return t_ptr + at + o[:, None] * 64 + o[None, :]


@triton.jit(do_not_specialize=["T", "unit"])
def solve_kernel(
    w_ptr, beta_ptr, t_ptr, T, unit,
    H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """T of one block of 64 factors of a unit: (I + diag(β)·striu(W Wᵀ))⁻¹ diag(β)."""
    i_block, i_u, i_bh = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_b, i_h, start = i_bh // H, i_bh % H, i_u * unit
    i = i_block * 64 + tl.arange(0, 64)
    inside = i < tl.minimum(unit, T - start) * N
    rows = _factor_rows(i_b, i_h, start, i, T, H, N)
    b_w = _directions(w_ptr, rows, inside, tl.arange(0, DP), D)
    b_beta = tl.load(beta_ptr + rows, inside, other=0.0).to(tl.float32)
    b_t = block_inverse(b_w, b_beta, tl.float16) * b_beta[None, :]
    tl.store(_solved(t_ptr, i_bh, i_u, i_block, tl.num_programs(0)), b_t)


@triton.jit
def _pass_block(
    b_x, crossed, w_ptr, t_ptr, i_b, i_h, i_bh, i_u, i_block, start, blocks, factors, T, o_d,
    H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Rows x through one block: keys past factors from `crossed` on; with BACK queries below it."""
    i = i_block * 64 + tl.arange(0, 64)
    b_w = _directions(w_ptr, _factor_rows(i_b, i_h, start, i, T, H, N), i < factors, o_d, D)
    b_t = tl.load(_solved(t_ptr, i_bh, i_u, i_block, blocks))
    if BACK:
        b_t = tl.trans(b_t)
        passes = i[None, :] < crossed[:, None]
    else:
        passes = i[None, :] >= crossed[:, None]
    b_y = tl.where(passes, dot_exact(b_x, tl.trans(b_w), tl.float16), 0.0)
    return b_x - dot_exact(dot_exact(b_y, b_t, tl.float16), b_w, tl.float16)


@triton.jit(do_not_specialize=["T", "unit", "blocks"])
def walk_kernel(
    q_ptr, k_ptr, w_ptr, t_ptr, q_out_ptr, k_out_ptr, product_ptr, T, unit, blocks,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """As `transport_kernel`, for the units of a chunk: each to its own start or end."""
    i_c, i_u, i_bh = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_b, i_h, start = i_bh // H, i_bh % H, i_u * unit
    tokens = tl.minimum(unit, T - start)
    factors, keys = tokens * N, tl.cdiv(unit, 64)
    o_d = tl.arange(0, DP)
    columns = o_d[None, :] < D
    if i_c < keys + DP // 64:
        is_key = i_c < keys
        o = tl.where(is_key, i_c, i_c - keys) * 64 + tl.arange(0, 64)
        at = (((i_b * T + start + o) * H + i_h).to(tl.int64) * D)[:, None] + o_d[None, :]
        inside = (o < tokens)[:, None] & columns & is_key
        b_x = tl.load(k_ptr + at, inside, other=0.0).to(tl.float32)
        b_x = tl.where(is_key, b_x, tl.where(o[:, None] == o_d[None, :], 1.0, 0.0))
        in_range = power_for(tl.max(tl.abs(b_x), 1))
        b_x *= in_range[:, None]
        crossed = tl.where(is_key, (o + 1) * N, 0)
        first = tl.where(is_key, (i_c * 64 + 1) * N // 64, 0)
        for n in tl.range(first, tl.cdiv(factors, 64), num_stages=1):
            b_x = _pass_block(
                b_x, crossed, w_ptr, t_ptr, i_b, i_h, i_bh, i_u, n, start, blocks, factors, T, o_d,
                H, N, D, False,
            )  # fmt: skip
        b_x /= in_range[:, None]
        tl.store(k_out_ptr + at, b_x, inside)
        at = (((i_b * tl.num_programs(1) + i_u) * H + i_h).to(tl.int64) * D + o[:, None]) * D
        at += o_d[None, :]
        tl.store(product_ptr + at, b_x, (o < D)[:, None] & columns & (i_c >= keys))
    else:
        o = (i_c - keys - DP // 64) * 64 + tl.arange(0, 64)
        t = o // G
        at = (((i_b * T + start + t) * H + i_h).to(tl.int64) * G + o % G)[:, None] * D
        at += o_d[None, :]
        inside = (t < tokens)[:, None] & columns
        b_x = tl.load(q_ptr + at, inside, other=0.0).to(tl.float32)
        in_range = power_for(tl.max(tl.abs(b_x), 1))
        b_x *= in_range[:, None]
        last = (tl.minimum(tl.max(t, 0) + 1, tokens) * N - 1) // 64
        for n in tl.range(0, last + 1, num_stages=1):
            b_x = _pass_block(
                b_x, (t + 1) * N, w_ptr, t_ptr, i_b, i_h, i_bh, i_u, last - n, start, blocks,
                factors, T, o_d, H, N, D, True,
            )  # fmt: skip
        tl.store(q_out_ptr + at, b_x / in_range[:, None], inside)


# --- Launches ------------------------------------------------------------------------------------


def triton_transport(
    q: Tensor, k: Tensor, w: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As `chunk_transport`, for w `[B, T, H·n, D]` and beta `[B, T, H·n]` of n factors a token."""
    (B, T, H, D), HQ = k.shape, q.shape[2]
    n = w.shape[2] // H
    q, k, w, beta = (x.contiguous() for x in (q, k, w, beta))
    with torch.cuda.device_of(q):
        if T * n > WALKED:
            return _by_units(q, k, w, beta, n)
        moved = torch.empty_like(q, dtype=torch.float32), torch.empty_like(k, dtype=torch.float32)
        product = moved[1].new_empty(B, H, D, D)
        DP, G = padded(D), HQ // H
        programs = triton.cdiv(T, 64) + DP // 64 + triton.cdiv(T * G, 64)
        transport_kernel[(programs, B * H)](
            q, k, w, beta, *moved, product, T, H=H, G=max(1, G), N=n, D=D, DP=DP, STAGES=3,
            num_warps=4 if DP == 64 else 8,
        )  # fmt: skip
        return *moved, product


def _by_units(
    q: Tensor, k: Tensor, w: Tensor, beta: Tensor, n: int
) -> tuple[Tensor, Tensor, Tensor]:
    B, T, H, D = k.shape
    unit = T
    if T * n > LONGEST:
        unit = max(1, LONGEST // (2 * n))  # work that grows by its square, against launches
    U, DP, G = triton.cdiv(T, unit), padded(D), q.shape[2] // H
    blocks = triton.cdiv(unit * n, 64)
    wide = k.new_empty(0, dtype=torch.float32)
    solved = wide.new_empty(B * H, U, blocks, 64, 64)
    starts, ends = wide.new_empty(q.shape), wide.new_empty(k.shape)
    products = wide.new_empty(B, U, H, D, D)
    # Matrix units that read shared memory need fewer registers, and come with more of it.
    hopper = call.shared_memory_of(k.device) > LARGE_SHARED_MEMORY
    options = {"num_warps": 4 if DP == 64 and hopper else 8}
    if k.device.type == "cuda":
        options["maxnreg"] = MOST_REGISTERS
    solve_kernel[(blocks, U, B * H)](w, beta, solved, T, unit, H=H, N=n, D=D, DP=DP, **options)
    programs = triton.cdiv(unit, 64) + DP // 64 + triton.cdiv(unit * G, 64)
    walk_kernel[(programs, U, B * H)](
        q, k, w, solved, starts, ends, products, T, unit, blocks, H=H, G=max(1, G), N=n, D=D,
        DP=DP, **options,
    )  # fmt: skip
    if U == 1:
        return starts, ends, products[:, 0]
    behind, total = products_behind(products)
    before = products_behind(products.flip(1).mT)[0].flip(1).mT
    return _across(starts, before.mT, unit), _across(ends, behind, unit), total


def _across(x: Tensor, matrices: Tensor, unit: int) -> Tensor:
    """Rows `[B, T, HQ, D]` of units through matrices `[B, U, H, D, D]`, x M."""
    B, T, HQ, D = x.shape
    U, H = matrices.shape[1:3]
    x = F.pad(x, (0, 0, 0, 0, 0, U * unit - T)).view(B, U, unit, H, -1, D)
    x = x.permute(0, 1, 3, 2, 4, 5).flatten(3, 4) @ matrices
    x = x.unflatten(3, (unit, -1)).permute(0, 1, 3, 2, 4, 5)
    return x.reshape(B, U * unit, HQ, D)[:, :T]
