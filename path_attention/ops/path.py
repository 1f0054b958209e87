"""The public operator: shapes, checks, choice of implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, overload

import torch
from torch import Tensor

from path_attention.ops.blockwise import blockwise
from path_attention.ops.definition import definition
from path_attention.ops.packing import Packing

Implementation = Callable[..., tuple[Tensor, Tensor]]


def _triton(*arguments) -> tuple[Tensor, Tensor]:
    from path_attention.ops.triton.operator import triton_attention

    return triton_attention(*arguments)


IMPLEMENTATIONS: dict[str, Implementation] = {
    "definition": definition,
    "blockwise": blockwise,
    "triton": _triton,
}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_AUTOCAST = _FLOATS[:3]
_TRITON_HEAD_SIZE = 128  # more does not fit a device's shared memory
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

    Source: PaTH attention, arXiv 2505.16381 §3 (the gate: §3.3, after FoX, arXiv 2503.02130);
    docs/algorithm.md §1. Under autocast q, k and v are cast as for `scaled_dot_product_attention`.

    Args:
        q: queries `[B, T, HQ, D]`, bfloat16, float16, float32 or float64.
        k: keys `[B, T, H, D]`, q's dtype; HQ is a multiple of H (grouped heads).
        v: values `[B, T, H, DV]`, q's dtype; DV need not be D.
        w: unit directions `[B, T, H, D]`, float32 or q's dtype; None together with `beta` for no
            transport. A 16-bit w is renormalised in float32, since its rounding breaks ‖w‖ = 1.
        beta: strengths `[B, T, H]` in [0, 2], float32 or q's dtype; β‖w‖² ≤ 2 keeps every factor's
            norm at most 1.
        log_forget: log of the forget gate, `[B, T, HQ]`, ≤ 0, float32 or q's dtype; not multiplied
            by `scale`. A constant makes it ALiBi.
        scale: of the scores; None is D^-½.
        cu_seqlens: borders of packed documents (B = 1), `[N + 1]` integers or a `Packing`; tokens
            never see another document's.
        return_lse: also return log Σ_j exp A_ij.
        implementation: "definition" (literal; the oracle), "blockwise" (linear memory, any device)
            or "triton" (fast; NVIDIA GPUs of compute capability 8.0 or more, head sizes up to 128,
            not float64). None is "triton" where it can run, else "blockwise".
        check_contract: check the values of w, β and log_forget too; waits for the device.

    Returns:
        `[B, T, HQ, DV]` in q's dtype; with `return_lse` also `[B, T, HQ]` in float32 (float64 for
        float64 inputs). Both are differentiable once.

    Raises:
        ValueError: naming the argument, what came, and what was expected.
    """
    device_type = q.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        q, k, v = (x.to(dtype) if x.dtype in _AUTOCAST else x for x in (q, k, v))
    packing = _check_shapes(q, k, v, w, beta, log_forget, cu_seqlens)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    if check_contract:
        _check_contract(w, beta, log_forget)
    if w is not None and w.dtype in (torch.bfloat16, torch.float16):
        w = torch.nn.functional.normalize(w.float(), dim=-1, eps=1e-6)
    run = _choose(implementation, q, v)
    with torch.autocast(device_type, enabled=False):
        out, lse = run(q, k, v, w, beta, log_forget, scale, packing)
    return (out, lse) if return_lse else out


def _choose(implementation: str | None, q: Tensor, v: Tensor) -> Implementation:
    if implementation is None:
        usable = q.device.type == "cuda" and _triton_lacks(q, v) is None
        implementation = "triton" if usable else "blockwise"
    elif implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation: expected one of {sorted(IMPLEMENTATIONS)} or None, "
            f"got {implementation!r}"
        )
    elif implementation == "triton":
        lacks = _triton_lacks(q, v)
        if lacks is not None:
            raise ValueError(f"implementation: expected {lacks} with 'triton'")
    return IMPLEMENTATIONS[implementation]


def _triton_lacks(q: Tensor, v: Tensor) -> str | None:
    """What the Triton kernels would need and what came instead; None if they can run."""
    if q.dtype == torch.float64:
        return f"bfloat16, float16 or float32, got {q.dtype}"
    D, DV = q.shape[3], v.shape[3]
    if max(D, DV) > _TRITON_HEAD_SIZE:
        return f"head sizes of at most {_TRITON_HEAD_SIZE}, got D = {D} and DV = {DV}"
    from path_attention.ops.triton.device import device_lacks

    return device_lacks(q.device.type, q.device.index)


def _check_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_forget: Tensor | None,
    cu_seqlens: Tensor | Packing | None,
) -> Packing | None:
    if (w is None) != (beta is None):
        given, missing = ("beta", "w") if w is None else ("w", "beta")
        raise ValueError(f"{missing}: expected together with {given}, got None")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name}: expected [B, T, heads, head size], got {list(x.shape)}")
    B, T, HQ, D = q.shape
    H, DV = k.shape[2], v.shape[3]
    if H == 0 or HQ % H or HQ == 0:
        raise ValueError(f"q: expected a multiple of k's {H} heads, got {HQ} heads")
    if D == 0 or DV == 0:
        raise ValueError(f"{'v' if D else 'q'}: expected a head size of at least 1, got 0")
    expected = {
        "k": (k, (B, T, H, D)),
        "v": (v, (B, T, H, DV)),
        "w": (w, (B, T, H, D)),
        "beta": (beta, (B, T, H)),
        "log_forget": (log_forget, (B, T, HQ)),
    }
    if q.dtype not in _FLOATS:
        raise ValueError(f"q: expected a dtype of {[str(d) for d in _FLOATS]}, got {q.dtype}")
    for name, (x, shape) in expected.items():
        if x is None:
            continue
        if tuple(x.shape) != shape:
            raise ValueError(f"{name}: expected shape {list(shape)}, got {list(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"{name}: expected on q's device {q.device}, got {x.device}")
        allowed = (q.dtype,) if name in "kv" else (q.dtype, torch.float32)
        if x.dtype not in allowed:
            raise ValueError(
                f"{name}: expected dtype {' or '.join(map(str, dict.fromkeys(allowed)))}, "
                f"got {x.dtype}"
            )
    if cu_seqlens is None:
        return None
    if B != 1:
        raise ValueError(f"cu_seqlens: expected a batch of 1 with packed sequences, got B = {B}")
    packing = cu_seqlens
    if not isinstance(packing, Packing):
        packing = Packing.from_cu_seqlens(packing, T)
    if packing.total != T:
        raise ValueError(
            f"cu_seqlens: expected to end at T = {T}, the number of tokens, got {packing.total}"
        )
    if packing.cu_seqlens.device != q.device:
        raise ValueError(
            f"cu_seqlens: expected on q's device {q.device}, got {packing.cu_seqlens.device}"
        )
    return packing


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
