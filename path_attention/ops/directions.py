"""Householder directions from their projection: short convolution, SiLU, L2 norm per head."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from path_attention.ops.arguments import has_kernels
from path_attention.ops.gradients import refuse_tangents
from path_attention.ops.packing import Packing

_TRITON_HEAD_SIZE = 256
_TRITON_WIDTH = 8


def householder_directions(
    x: Tensor,
    weight: Tensor | None,
    heads: int,
    *,
    state: Tensor | None = None,
    packing: Packing | None = None,
    eps: float = 1e-6,
    implementation: str | None = None,
) -> Tensor:
    """Unit directions w of the Householder factors, from their projection.

        y_t = silu(Σ_s weight[:, K−1−s] ⊙ x_{t−s}),  s = 0 … K−1
        w_t = y_t / max(‖y_t‖, eps), per head

    The eps bounds the norm from outside: inside a square root it would shrink w, and a shrunk w
    loses a tracked state over long routes. Source: arXiv 2505.16381 §3; docs/algorithm.md §1.
    Everything is computed in float32 (float64 for a float64 x), autocast or not; differentiable.

    Args:
        x: projected inputs `[B, T, C]`, any floating dtype; C = heads · D.
        weight: depthwise taps `[C, K]`, the last one for the current token; None for no
            convolution.
        heads: the number of key/value heads H.
        state: the K−1 inputs before `x`, `[B, K−1, C]`, oldest first; None for zeros.
        packing: borders of packed documents (B = 1); the convolution never reaches over one.
        eps: the smallest norm divided by.
        implementation: "torch" (any device) or "triton" (one pass over memory, forward and
            backward; NVIDIA GPUs of compute capability 8.0 or more, D ≤ 256, K ≤ 8, not float64).
            None is "triton" where it can run, else "torch".

    Returns:
        w `[B, T, H, D]`, float32 (float64 for a float64 x).

    Raises:
        ValueError: naming the argument, what came, and what was expected.
    """
    _check(x, weight, heads, state, packing)
    chosen = _choose(implementation, x, weight, heads)
    with torch.autocast(x.device.type, enabled=False):
        if chosen == "triton":
            refuse_tangents("directions' triton", x, weight, state, instead="torch")
            from path_attention.ops.triton.directions import triton_directions

            return triton_directions(x, weight, heads, state, packing, eps)
        dtype = torch.promote_types(x.dtype, torch.float32)
        y = x.to(dtype)
        if weight is not None:
            y = _convolve(y, weight.to(dtype), state, packing)
        return F.normalize(F.silu(y).unflatten(2, (heads, -1)), dim=-1, eps=eps)


def _choose(implementation: str | None, x: Tensor, weight: Tensor | None, heads: int) -> str:
    if implementation is None:
        usable = has_kernels("householder_directions", x, lambda: _triton_lacks(x, weight, heads))
        return "triton" if usable else "torch"
    if implementation not in ("torch", "triton"):
        raise ValueError(
            f"implementation: expected 'torch', 'triton' or None, got {implementation!r}"
        )
    lacks = _triton_lacks(x, weight, heads) if implementation == "triton" else None
    if lacks is not None:
        raise ValueError(f"implementation: expected {lacks} with 'triton'")
    return implementation


def _triton_lacks(x: Tensor, weight: Tensor | None, heads: int) -> str | None:
    """What the Triton kernels would need and what came instead; None if they can run."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"bfloat16, float16 or float32, got {x.dtype}"
    D = x.shape[2] // heads
    if D > _TRITON_HEAD_SIZE:
        return f"a head size of at most {_TRITON_HEAD_SIZE}, got {D}"
    if weight is not None and weight.shape[1] > _TRITON_WIDTH:
        return f"a convolution of width at most {_TRITON_WIDTH}, got {weight.shape[1]}"
    from path_attention.ops.triton.device import device_lacks

    return device_lacks(x.device.type, x.device.index)


def _convolve(x: Tensor, weight: Tensor, state: Tensor | None, packing: Packing | None) -> Tensor:
    T, width = x.shape[1], weight.shape[1]
    if state is None:
        inputs = F.pad(x, (0, 0, width - 1, 0))
    else:
        inputs = torch.cat([state.to(x.dtype), x], 1)
    y = x * weight[:, -1]
    positions = None if packing is None else packing.position_ids().to(x.device)[:, None]
    for back in range(1, width):
        shifted = inputs[:, width - 1 - back : width - 1 - back + T]
        if positions is not None:
            shifted = shifted.where(positions >= back, 0)
        y = y + shifted * weight[:, width - 1 - back]
    return y


def _check(
    x: Tensor, weight: Tensor | None, heads: int, state: Tensor | None, packing: Packing | None
) -> None:
    if x.dim() != 3 or not x.is_floating_point():
        raise ValueError(f"x: expected floating [B, T, C], got {x.dtype} of shape {list(x.shape)}")
    B, T, C = x.shape
    if heads < 1 or C % heads:
        raise ValueError(f"heads: expected a divisor of x's {C} channels, got {heads}")
    if weight is None:
        if state is not None:
            raise ValueError("state: expected None without a convolution weight, got a tensor")
        return
    if weight.dim() != 2 or weight.shape[0] != C or weight.shape[1] < 1:
        raise ValueError(f"weight: expected [{C}, K] with K ≥ 1, got {list(weight.shape)}")
    for name, y in (("weight", weight), ("state", state)):
        if y is not None and y.device != x.device:
            raise ValueError(f"{name}: expected on x's device {x.device}, got {y.device}")
    if state is not None and state.shape != (B, weight.shape[1] - 1, C):
        raise ValueError(f"state: expected {[B, weight.shape[1] - 1, C]}, got {list(state.shape)}")
    if packing is not None:
        if state is not None:
            raise ValueError("state: expected None with packed documents, got a tensor")
        if B != 1 or packing.total != T:
            raise ValueError(
                f"packing: expected x of shape [1, {packing.total}, C], got {list(x.shape)}"
            )
