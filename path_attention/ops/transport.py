"""A chunk of tokens as a unit: queries to its start, keys to its end, and its transition.

docs/algorithm.md §3 and §4: the tree of `blockwise`, of which only the moves are wanted here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from path_attention.ops import blockwise as tree
from path_attention.ops import ut_transform
from path_attention.ops.arguments import has_kernels
from path_attention.ops.gradients import is_plain
from path_attention.ops.sequences import Group, Heads, gather, make_groups, scatter, to_heads


def chunk_transport(q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Move a chunk's queries to its start and its keys to its end (docs/algorithm.md §3).

        q_start_i = H_1 ⋯ H_i q_i,   k_end_jᵀ = k_jᵀ H_{j+1} ⋯ H_T,   transition = H_1 ⋯ H_T

    Args:
        q: `[B, T, HQ, D]`, T ≥ 1; HQ may be 0.
        k: `[B, T, H, D]`.
        w: `[B, T, H, D]`, or `[B, T, H, n, D]` of n factors a token, H_t = H_{t,1} ⋯ H_{t,n}.
        beta: `[B, T, H]` or `[B, T, H, n]`.

    Returns:
        q_start `[B, T, HQ, D]`, k_end `[B, T, H, D]`, transition `[B, H, D, D]`, in float32
        (float64 for float64 inputs). Differentiable once.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    if w.dim() == 5:
        w, beta = w.flatten(2, 3), beta.flatten(2, 3)
    with torch.autocast(q.device.type, enabled=False):
        if _has_kernel(k) and is_plain(q, k, w, beta):  # which reads them as they are
            from path_attention.ops.triton.transport import triton_transport

            return triton_transport(q, k, w, beta)
        return _Transport.apply(*(x.to(dtype) for x in (q, k, w, beta)))


def products_behind(transitions: Tensor) -> tuple[Tensor, Tensor]:
    """Products P_{n+1} ⋯ P_last behind each of `[B, units, H, D, D]`, and P_first ⋯ P_last."""
    products, reach = transitions, 1  # of `reach` matrices each, or all that are left
    while reach < transitions.shape[1]:
        further = products[:, :-reach] @ products[:, reach:]
        products, reach = torch.cat([further, products[:, -reach:]], 1), 2 * reach
    return torch.cat([products[:, 1:], identity(products[:, :1])], 1), products[:, 0]


def identity(like: Tensor) -> Tensor:
    """Unit matrices of the shape of `like` `[…, D, D]`."""
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device).expand_as(like)


def _triton_lacks(k: Tensor) -> str | None:
    """What the Triton kernels would need and what came instead; None if they can run."""
    if k.dtype == torch.float64:
        return f"float32, got {k.dtype}"
    from path_attention.ops.triton.device import device_lacks, largest_head_size

    kind, index = k.device.type, k.device.index
    lacks = device_lacks(kind, index)
    if lacks is None and k.shape[3] > (largest := largest_head_size(kind, index, torch.float16)):
        return f"a head size of at most {largest}, got {k.shape[3]}"
    return lacks


def _has_kernel(k: Tensor) -> bool:
    return has_kernels("chunk_transport", k, lambda: _triton_lacks(k))


class _Transport(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        B, _, H, D = k.shape
        if _has_kernel(k):
            from path_attention.ops.triton.transport import triton_transport

            ctx.save_for_backward(q, k, w, beta)
            return triton_transport(q, k, w, beta)
        group, x = _gather(q, k, w, beta)
        moved = tree._start(tree._solve(group, x))
        for level in tree._levels(group):
            moved = tree._move(moved, level)
        ctx.save_for_backward(q, k, w, beta)
        assert moved.transition is not None
        return (
            _scatter(group, moved.q, q),
            _scatter(group, moved.k, k),
            moved.transition.reshape(B, H, D, D),
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dtransition: Tensor) -> tuple[Tensor, ...]:
        q, k, w, beta = ctx.saved_tensors
        B, _, H, D = k.shape
        with torch.autocast(q.device.type, enabled=False):
            group, x = _gather(q, k, w, beta)
            block = tree._solve(group, x)
            moved, kept = tree._start(block), []
            for level in tree._levels(group):
                kept.append((level, tree._keep(level, moved, True), moved.transition))
                moved = tree._move(moved, level)
            grad = tree._Moved(
                to_heads(group, dq, H).clone(),
                to_heads(group, dk, H).clone(),
                dtransition.reshape(B * H, 1, D, D),
            )
            for level, operands, transition in reversed(kept):
                grad = tree._move_backward(level, operands, transition, grad)
            scores = block.q.new_zeros(*block.q.shape[:-1], block.k.shape[-2])
            parts = ut_transform.backward(
                block,
                scores,
                tree._blocks(group, grad.q),
                tree._blocks(group, grad.k),
                grad.transition,
            )
        dq, dk, dw, dbeta = (part.flatten(1, 2) for part in parts if part is not None)
        return (
            _scatter(group, dq, q),
            _scatter(group, dk, k),
            _scatter(group, dw, w),
            _scatter(group, dbeta[..., None], beta[..., None])[..., 0],
        )


def _gather(q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> tuple[Group, Heads]:
    group = make_groups(None, 1, k.shape[1], tree.BLOCK)[0]  # also of no rows at all
    return group, gather(group, q, k, k, w, beta, None)


def _scatter(group: Group, x: Tensor, like: Tensor) -> Tensor:
    whole = torch.empty_like(like, memory_format=torch.contiguous_format)
    if whole.numel():
        scatter(group, whole, x)
    return whole
