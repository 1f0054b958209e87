"""The public operator: shapes, checks, choice of implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, overload

import torch
from torch import Tensor

from path_attention.ops.arguments import (
    cast_as_autocast_does,
    check_packing,
    check_tensors,
    has_kernels,
    unit_directions,
)
from path_attention.ops.blockwise import blockwise
from path_attention.ops.definition import definition
from path_attention.ops.gradients import refuse_tangents
from path_attention.ops.packing import Packing
from path_attention.ops.sdpa import sdpa, sdpa_lacks, suits_packing

Implementation = Callable[..., tuple[Tensor, Tensor]]


def _triton(*arguments) -> tuple[Tensor, Tensor]:
    from path_attention.ops.triton.operator import triton_attention

    return triton_attention(*arguments)


IMPLEMENTATIONS: dict[str, Implementation] = {
    "definition": definition,
    "blockwise": blockwise,
    "triton": _triton,
}
_UNIT_NORM_TOLERANCE = 1e-3  # of ‖w‖² in float32; a w rounded to 16 bits is renormalised instead


@overload
def path_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None = ...,
    beta: Tensor | None = ...,
    log_forget: Tensor | None = ...,
    *,
    scale: float | None = ...,
    cu_seqlens: Tensor | Packing | None = ...,
    return_lse: Literal[False] = ...,
    implementation: str | None = ...,
    check_contract: bool = ...,
) -> Tensor: ...
@overload
def path_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None = ...,
    beta: Tensor | None = ...,
    log_forget: Tensor | None = ...,
    *,
    scale: float | None = ...,
    cu_seqlens: Tensor | Packing | None = ...,
    return_lse: Literal[True],
    implementation: str | None = ...,
    check_contract: bool = ...,
) -> tuple[Tensor, Tensor]: ...
def path_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None = None,
    beta: Tensor | None = None,
    log_forget: Tensor | None = None,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | Packing | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
    check_contract: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal softmax attention whose queries travel to each key through Householder factors.

        A_ij = scale · k_jᵀ H_{j+1} ⋯ H_i q_i + Σ_{t=j+1..i} log_forget_t,  H_t = I − β_t w_t w_tᵀ
        o_i  = Σ_{j≤i} softmax_j(A_ij) v_j

    With n factors a token, H_t = H_{t,1} ⋯ H_{t,n}: the last of them acts on a query first.

    Source: PaTH attention, arXiv 2505.16381 §3 (the gate: §3.3, after FoX, arXiv 2503.02130);
    docs/algorithm.md §1. Under autocast q, k and v are cast as for `scaled_dot_product_attention`.

    Args:
        q: queries `[B, T, HQ, D]`, bfloat16, float16, float32 or float64.
        k: keys `[B, T, H, D]`, q's dtype; HQ is a multiple of H (grouped heads).
        v: values `[B, T, H, DV]`, q's dtype; DV need not be D.
        w: unit directions `[B, T, H, D]`, or `[B, T, H, n, D]` of n factors a token, float32 or q's
            dtype; None together with `beta` for no transport. A 16-bit w is renormalised in
            float32, since its rounding breaks ‖w‖ = 1.
        beta: strengths `[B, T, H]` or `[B, T, H, n]` in [0, 2], float32 or q's dtype; β‖w‖² ≤ 2
            keeps every factor's norm at most 1.
        log_forget: log of the forget gate, `[B, T, HQ]`, ≤ 0, float32 or q's dtype; not multiplied
            by `scale`. A constant makes it ALiBi.
        scale: of the scores; None is D^-½.
        cu_seqlens: borders of packed documents (B = 1), `[N + 1]` integers or a `Packing`; tokens
            never see another document's.
        return_lse: also return log Σ_j exp A_ij.
        implementation: "definition" (literal; the oracle), "blockwise" (linear memory, any device),
            "triton" (fast; NVIDIA GPUs of compute capability 8.0 or more, not float64, one factor
            a token, head sizes up to 128 or, on data-centre GPUs from Hopper on, 256, half that in
            float32) or "sdpa" (PyTorch's fused kernels, for neither w nor log_forget). None is
            "sdpa" where nothing is moved or gated and no gradient of lse can be asked for (packed
            documents: where CUDA takes them in one call, on a CPU unless they are tiny, and not
            in a compiled graph); else "triton" where it can run; else "blockwise".
        check_contract: check the values of w, β and log_forget too; waits for the device.

    Returns:
        `[B, T, HQ, DV]` in q's dtype; with `return_lse` also `[B, T, HQ]` in float32 (float64 for
        float64 inputs). Both are differentiable once.

    Raises:
        ValueError: naming the argument, what came, and what was expected.
    """
    (q, k, v, w, beta), packing = _checked(q, k, v, w, beta, log_forget, cu_seqlens)
    scale = float(q.shape[3] ** -0.5 if scale is None else scale)
    if check_contract:
        _check_contract(w, beta, log_forget)
    w = unit_directions(w)
    lse_gradient = return_lse and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    name = _choose(implementation, q, k, v, w, log_forget, packing, return_lse, lse_gradient)
    if name in ("blockwise", "triton"):
        refuse_tangents(name, q, k, v, w, beta, log_forget)
    with torch.autocast(q.device.type, enabled=False):
        if name == "sdpa":
            out, lse = sdpa(q, k, v, scale, packing, return_lse)
        else:
            out, lse = IMPLEMENTATIONS[name](q, k, v, w, beta, log_forget, scale, packing)
    return out if not return_lse or lse is None else (out, lse)


def explain_choice(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None = None,
    beta: Tensor | None = None,
    log_forget: Tensor | None = None,
    *,
    cu_seqlens: Tensor | Packing | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> str:
    """What `path_attention` would run for these arguments, and why it is not "triton", in words.

    Of "triton" also whose main loops: Hopper's (by warp groups and TMA) or the portable ones. As
    outside of a compiled graph. Raises ValueError as `path_attention` does.
    """
    (q, k, v, w, _), packing = _checked(q, k, v, w, beta, log_forget, cu_seqlens)
    lse_gradient = return_lse and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    name = _choose(implementation, q, k, v, w, log_forget, packing, return_lse, lse_gradient)
    if name == "triton":
        from path_attention.ops.triton.call import chosen_tiles

        t = chosen_tiles(q, v, w, log_forget)
        loops = {"forward": t.hopper_forward, "dq": t.hopper_queries, "dk/dv": t.hopper_keys}
        whose = (f"{loop} {'hopper' if its else 'portable'}" for loop, its in loops.items())
        return f"triton: {', '.join(whose)}"
    lacks = _triton_lacks(q, v, w)
    if implementation is not None or name == "sdpa" or lacks is None:
        return name
    return f"{name}: triton wants {lacks}"


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_forget: Tensor | None,
    cu_seqlens: Tensor | Packing | None,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Packing | None]:
    """q, k, v as autocast wants them, one factor a token without a dimension of its own; borders.

    Raises ValueError on shapes, dtypes and devices that do not fit.
    """
    q, k, v = cast_as_autocast_does(q, k, v)
    check_tensors(q, k, v, w, beta, log_forget)
    packing = check_packing(q, cu_seqlens)
    if w is not None and beta is not None and w.dim() == 5 and w.shape[3] == 1:
        w, beta = w[:, :, :, 0], beta[..., 0]
    return (q, k, v, w, beta), packing


def _choose(
    implementation: str | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    log_forget: Tensor | None,
    packing: Packing | None,
    return_lse: bool,
    lse_gradient: bool,
) -> str:
    moved = "w" if w is not None else "log_forget" if log_forget is not None else None
    if implementation is None:
        plain = moved is None and not lse_gradient and sdpa_lacks(q, v, return_lse) is None
        if plain and (packing is None or suits_packing(q, k, packing, return_lse)):
            return "sdpa"
        usable = has_kernels("path_attention", q, lambda: _triton_lacks(q, v, w))
        return "triton" if usable else "blockwise"
    names = sorted([*IMPLEMENTATIONS, "sdpa"])
    if implementation not in names:
        raise ValueError(f"implementation: expected one of {names} or None, got {implementation!r}")
    if implementation == "sdpa" and moved is not None:
        raise ValueError(f"{moved}: expected None with implementation 'sdpa', got a tensor")
    lacks = None
    if implementation == "sdpa":
        lacks = sdpa_lacks(q, v, return_lse)
    elif implementation == "triton":
        lacks = _triton_lacks(q, v, w)
    if lacks is not None:
        raise ValueError(f"implementation: expected {lacks} with {implementation!r}")
    return implementation


def _triton_lacks(q: Tensor, v: Tensor, w: Tensor | None) -> str | None:
    """What the Triton kernels would need and what came instead; None if they can run."""
    if w is not None and w.dim() == 5:
        return f"one Householder factor a token, got {w.shape[3]}"
    if q.dtype == torch.float64:
        return f"bfloat16, float16 or float32, got {q.dtype}"
    from path_attention.ops.triton.device import device_lacks, largest_head_size

    lacks = device_lacks(q.device.type, q.device.index)
    D, DV = q.shape[3], v.shape[3]
    if lacks is None:
        largest = largest_head_size(q.device.type, q.device.index, q.dtype)
        if max(D, DV) > largest:
            return f"head sizes of at most {largest}, got D = {D} and DV = {DV}"
    return lacks


def _check_contract(w: Tensor | None, beta: Tensor | None, log_forget: Tensor | None) -> None:
    if w is not None and beta is not None and w.numel():
        low, high = beta.aminmax()
        if not (low >= 0 and high <= 2):
            raise ValueError(
                f"beta: expected values in [0, 2], got values in [{low:.6g}, {high:.6g}]"
            )
        norms = w.double().square().sum(-1)
        tolerance = 1e-2 if w.dtype in (torch.bfloat16, torch.float16) else _UNIT_NORM_TOLERANCE
        worst = norms.flatten()[(norms - 1).abs().argmax()]
        if not (worst - 1).abs() <= tolerance:
            raise ValueError(f"w: expected unit norm, got a vector with ‖w‖² = {worst:.6g}")
    if log_forget is not None and log_forget.numel():
        highest = log_forget.max()
        if not highest <= 0:
            raise ValueError(f"log_forget: expected values of at most 0, got {highest:.6g}")
