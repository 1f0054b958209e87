"""Powers of two that keep float16 operands in range, found on the device without the host.

`range_ptr` in every kernel, float32: 0 of q, 1 of k, 2 of scores (to base 2); in the forward pass
also 3, what no score (base 2) exceeds; in the backward pass 3 of score gradients, and what undoes
them in those of 4 q, 5 k, 6 w and β, 7 the gates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from path_attention.ops.triton.primitives import load_tile


@triton.jit(do_not_specialize=["total"])
def largest_norm_kernel(
    x_ptr, out_ptr, total, stride_t, stride_h, D: tl.constexpr, DP: tl.constexpr
):
    """The largest ‖x‖ of all rows, by an atomic maximum (order does not matter)."""
    token = tl.program_id(0) * 128
    o, o_d = tl.arange(0, 128), tl.arange(0, DP)
    x_ptr += tl.program_id(1) * stride_h
    b_x = load_tile(x_ptr, token, stride_t, o, o_d, total - token, D).to(tl.float32)
    b_scale = tl.max(tl.abs(b_x), 1)  # a square of 10³⁰ would overflow
    b_x /= tl.where(b_scale > 0, b_scale, 1.0)[:, None]
    b_norm = b_scale * tl.sqrt(tl.sum(b_x * b_x, 1))
    tl.atomic_max(out_ptr, tl.max(b_norm, 0), sem="relaxed")


@triton.jit
def power_of_two(norm):
    """The power of two that brings norm into (½, 1]; 1 for a norm of 0. Not beyond 2^±120."""
    exponent = tl.minimum(tl.maximum(-tl.math.ceil(tl.math.log2(norm)), -120.0), 120.0)
    return tl.where(norm > 0, tl.math.exp2(exponent), 1.0)


@triton.jit
def forward_ranges_kernel(norms_ptr, range_ptr, scale, IN_RANGE: tl.constexpr):
    q_range = 1.0
    k_range = 1.0
    most = float("inf")
    if IN_RANGE:  # no move makes a query or key longer, but for its rounding
        most = 1.01 * tl.load(norms_ptr) * tl.load(norms_ptr + 1) * scale * 1.4426950408889634
        q_range = power_of_two(tl.load(norms_ptr))
        k_range = power_of_two(tl.load(norms_ptr + 1))
    tl.store(range_ptr, q_range)
    tl.store(range_ptr + 1, k_range)
    tl.store(range_ptr + 2, scale * 1.4426950408889634 / q_range / k_range)
    tl.store(range_ptr + 3, most)


@triton.jit
def backward_ranges_kernel(norms_ptr, forward_ptr, range_ptr, scale, IN_RANGE: tl.constexpr):
    grad_range = 1.0
    if IN_RANGE:  # |dS| ≤ 2 ‖dO‖ ‖v‖ + |dlse|
        norm = 2 * tl.load(norms_ptr) * tl.load(norms_ptr + 1) + tl.load(norms_ptr + 2)
        grad_range = power_of_two(norm) * 4096.0
    q_range, k_range = tl.load(forward_ptr), tl.load(forward_ptr + 1)
    tl.store(range_ptr, q_range)
    tl.store(range_ptr + 1, k_range)
    tl.store(range_ptr + 2, tl.load(forward_ptr + 2))
    tl.store(range_ptr + 3, grad_range)
    tl.store(range_ptr + 4, scale / k_range / grad_range)
    tl.store(range_ptr + 5, scale / q_range / grad_range)
    tl.store(range_ptr + 6, scale / q_range / k_range / grad_range)
    tl.store(range_ptr + 7, 1 / grad_range)


def _largest_norms(tensors: list[Tensor]) -> Tensor:
    norms = torch.zeros(4, dtype=torch.float32, device=tensors[0].device)
    for n, x in enumerate(tensors):
        total, heads, D = x.shape
        largest_norm_kernel[(triton.cdiv(total, 128), heads)](
            x,
            norms[n:],
            total,
            x.stride(0),
            x.stride(1),
            D=D,
            DP=max(16, triton.next_power_of_2(D)),
        )
    return norms


def forward_ranges(q: Tensor, k: Tensor, scale: float, in_range: bool) -> Tensor:
    """Scalars 0–3 for q and k `[tokens, heads, D]`, scale ≥ 0.

    If not in_range, 0 and 1 are 1 and 3 is infinite.
    """
    norms = _largest_norms([q, k]) if in_range else q.new_empty(4, dtype=torch.float32)
    ranges = torch.empty(4, dtype=torch.float32, device=q.device)
    forward_ranges_kernel[(1,)](norms, ranges, scale, IN_RANGE=in_range)
    return ranges


def backward_ranges(
    forward: Tensor,
    grad_out: Tensor,
    v: Tensor,
    grad_lse: Tensor | None,
    scale: float,
    in_range: bool,
) -> Tensor:
    """All eight, from the forward pass's and what the score gradients can come to."""
    norms = _largest_norms([grad_out, v]) if in_range else forward
    if grad_lse is not None and in_range:
        norms[2] = grad_lse.abs().max()
    ranges = forward.new_empty(8)
    backward_ranges_kernel[(1,)](norms, forward, ranges, scale, IN_RANGE=in_range)
    return ranges
