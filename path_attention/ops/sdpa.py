"""Attention without transport or gate: PyTorch's own fused kernels, and their log-sum-exp."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from path_attention.ops.dense import whole_rows
from path_attention.ops.packing import Packing

_HEAD_SIZE = 256  # of the fused kernels on CUDA; beyond it PyTorch stores all T² scores
_SHORT = 16  # tokens of a mean document below which a call each costs more than it gains


def sdpa_lacks(q: Tensor, v: Tensor, return_lse: bool) -> str | None:
    """What PyTorch's fused kernels would need and what came instead; None if they can run."""
    kind, D, DV = q.device.type, q.shape[3], v.shape[3]
    if kind == "cuda" and q.dtype == torch.float64:
        return f"bfloat16, float16 or float32 on cuda, got {q.dtype}"
    if kind == "cuda" and max(D, DV) > _HEAD_SIZE:
        return f"head sizes of at most {_HEAD_SIZE} on cuda, got D = {D} and DV = {DV}"
    if return_lse and kind not in ("cpu", "cuda"):
        return f"cpu or cuda tensors for return_lse, got tensors on {kind}"
    return None


def suits_packing(q: Tensor, k: Tensor, packing: Packing, return_lse: bool) -> bool:
    """Whether packed documents are for PyTorch's kernels: one call on CUDA, elsewhere one each.

    Not while a graph is compiled, which would be made anew for other lengths.
    """
    if torch.compiler.is_compiling():
        return False
    if q.device.type == "cuda":
        return _in_one_call(q, k, return_lse) is not None
    return packing.total >= _SHORT * len(packing.lengths)


def _in_one_call(q: Tensor, k: Tensor, return_lse: bool) -> Callable[..., Tensor] | None:
    """PyTorch's flash attention of packed documents, if it is there and takes these."""
    attend, grouped = _varlen()
    if attend is None or q.device.type != "cuda" or q.itemsize != 2 or return_lse or not q.shape[1]:
        return None
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return None
    return attend if grouped or q.shape[2] == k.shape[2] else None


@lru_cache
def _varlen() -> tuple[Callable[..., Tensor] | None, bool]:
    """The function, None where PyTorch is too old, and whether it takes grouped heads."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return None, False
    attend = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    known = inspect.signature(attend).parameters
    return (attend if {"scale", "window_size"} <= known.keys() else None), "enable_gqa" in known


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, scale: float, packing: Packing | None, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """softmax(scale · q kᵀ) v, causal; arguments as in `path_attention`, validated there.

    Without `return_lse` this is `scaled_dot_product_attention`, whichever kernel it picks. With it,
    the operator below it that returns the log-sum-exp is called: CPU's flash attention; on CUDA
    flash attention for 16 bits and memory-efficient attention for float32. Packed documents are one
    call together where CUDA's flash attention takes them, else one call each.
    """
    if scale <= 0:  # the kernels mask by −∞ before they scale
        q, scale = (q * 0, 1.0) if scale == 0 else (-q, -scale)
    if packing is not None:
        varlen = _in_one_call(q, k, return_lse)
        if varlen is not None:
            return _attend_packed(varlen, q, k, v, scale, packing), None
        lengths = packing.lengths or (0,)
        documents = zip(*(x.split(lengths, 1) for x in (q, k, v)), strict=True)
        parts = [sdpa(q, k, v, scale, None, return_lse) for q, k, v in documents]
        lse = torch.cat([y for _, y in parts if y is not None], 1) if return_lse else None
        return torch.cat([out for out, _ in parts], 1), lse
    if not return_lse:
        return _attend(q, k, v, scale), None
    out, lse = _attend_with_lse(q, k, v, scale)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        lse = _differentiable(lse, q, k, scale)
    return out, lse


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    heads = _heads_first(q, k, v)
    grouped = q.shape[2] != k.shape[2]
    out = F.scaled_dot_product_attention(*heads, is_causal=True, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)[..., : v.shape[3]]


def _attend_packed(
    varlen: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, scale: float, packing: Packing
) -> Tensor:
    borders, longest, DV = packing.cu_seqlens, max(packing.lengths), v.shape[3]
    grouped = {"enable_gqa": True} if q.shape[2] != k.shape[2] else {}
    rows = (x.transpose(1, 2)[0] for x in _heads_first(q, k, v))
    out = varlen(
        *rows, borders, borders, longest, longest, scale=scale, window_size=(-1, 0), **grouped
    )
    return out[None, ..., :DV]


def _attend_with_lse(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    DV, aten = v.shape[3], torch.ops.aten
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    if q.numel() == 0:
        return _attend(q, k, v, scale), q.sum(-1).to(lse_dtype)
    T, heads = q.shape[1], _heads_first(q, k, v)
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, True, scale=scale)
    elif q.dtype == torch.float32:
        group = q.shape[2] // k.shape[2]
        q, k, v = heads[0], *(x.repeat_interleave(group, 1) for x in heads[1:])
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, True, scale=scale
        )
    else:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(*heads, 0.0, True, scale=scale)
    return out.transpose(1, 2)[..., :DV], lse[..., :T].transpose(1, 2).to(lse_dtype)


def _heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, heads, T, E] with whole rows and one head size E for all.

    The kernels that need no T² memory want both, and read wrong numbers where rows aren't whole.
    """
    E = max(q.shape[3], v.shape[3])
    if q.device.type == "cuda":
        E += -E % 8
    q, k, v = (
        F.pad(x, (0, E - x.shape[3])) if x.shape[3] < E else whole_rows(x) for x in (q, k, v)
    )
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _differentiable(lse: Tensor, q: Tensor, k: Tensor, scale: float) -> Tensor:
    """lse with its gradient, which the kernels do not give.

        dlse_i/dq_i = scale · Σ_j P_ij k_j,   dlse_i/dk_j = scale · P_ij q_i

    so both come from one more attention whose values are the keys; it adds nothing to the value.
    """
    dtype = lse.dtype
    q_fixed, mean = q.detach(), _attend(q.detach(), k.detach(), k, scale)
    through = q.to(dtype) * mean.detach().to(dtype) + q_fixed.to(dtype) * mean.to(dtype)
    through = scale * through.sum(-1)
    return lse.detach() + (through - through.detach())
