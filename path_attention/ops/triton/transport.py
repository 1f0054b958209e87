"""The transport of a short chunk on NVIDIA GPUs, in one launch, token by token in float32.

docs/algorithm.md §3: queries to the chunk's start, keys to its end, and the product of all. Rows
are independent, so that a program has 64 of them and walks over the tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from path_attention.ops.triton.primitives import pass_factors
from path_attention.ops.triton.tiles import padded

LONGEST = 1024  # factors, above which a tree of products takes less time


@triton.jit(do_not_specialize=["T"])
def transport_kernel(
    q_ptr, k_ptr, w_ptr, beta_ptr, q_out_ptr, k_out_ptr, product_ptr, T,
    H: tl.constexpr, G: tl.constexpr, F: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
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
            b_x = pass_factors(b_x, o < s, w_ptr, beta_ptr, first + s * H, o_d, D, F, BACK=False)
        tl.store(k_out_ptr + at, b_x, inside)
    elif i_c < keys + DP // 64:
        o = (i_c - keys) * 64 + tl.arange(0, 64)
        b_x = tl.where(o[:, None] == o_d[None, :], 1.0, 0.0)
        for s in tl.range(0, T, num_stages=STAGES):
            b_x = pass_factors(b_x, o >= 0, w_ptr, beta_ptr, first + s * H, o_d, D, F, BACK=False)
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
            b_x = pass_factors(b_x, t >= s, w_ptr, beta_ptr, first + s * H, o_d, D, F, BACK=True)
        tl.store(q_out_ptr + at, b_x, inside)


def triton_transport(
    q: Tensor, k: Tensor, w: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As `chunk_transport`, for w `[B, T·n, H, D]` and beta `[B, T·n, H]` of n factors a token."""
    (B, T, H, D), HQ = k.shape, q.shape[2]
    F = w.shape[1] // T
    q, k = q.contiguous(), k.contiguous()
    # factors of a token side by side, behind its head
    w = w.unflatten(1, (T, F)).transpose(2, 3).contiguous()
    beta = beta.unflatten(1, (T, F)).transpose(2, 3).contiguous()
    moved = torch.empty_like(q, dtype=torch.float32), torch.empty_like(k, dtype=torch.float32)
    product = moved[1].new_empty(B, H, D, D)
    DP, G = padded(D), HQ // H
    programs = triton.cdiv(T, 64) + DP // 64 + triton.cdiv(T * G, 64)
    with torch.cuda.device_of(q):
        transport_kernel[(programs, B * H)](
            q, k, w, beta, *moved, product, T, H=H, G=max(1, G), F=F, D=D, DP=DP, STAGES=3,
            num_warps=4 if DP == 64 else 8,
        )  # fmt: skip
    return *moved, product
