"""Checks that the operators share: shapes, dtypes and devices of their tensors, borders."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from path_attention.ops.packing import Packing

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
LOWEST_LOG_FORGET = -1e30  # as good as −∞ to a softmax, and its sums stay finite
_AUTOCAST = FLOATS[:3]
_SAID: set[str] = set()


def cast_as_autocast_does(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values in autocast's dtype, where it is on and they are not float64."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x.to(dtype) if x.dtype in _AUTOCAST else x for x in tensors)


def check_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None = None,
    beta: Tensor | None = None,
    log_forget: Tensor | None = None,
) -> None:
    """Raise ValueError naming the first tensor that does not fit `path_attention`'s contract."""
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
    factors = (w.shape[3],) if w is not None and w.dim() == 5 else ()
    if factors == (0,):
        raise ValueError("w: expected at least 1 factor a token, got 0")
    expected = {
        "k": (k, (B, T, H, D)),
        "v": (v, (B, T, H, DV)),
        "w": (w, (B, T, H, *factors, D)),
        "beta": (beta, (B, T, H, *factors)),
        "log_forget": (log_forget, (B, T, HQ)),
    }
    if q.dtype not in FLOATS:
        raise ValueError(f"q: expected a dtype of {[str(d) for d in FLOATS]}, got {q.dtype}")
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


def check_packing(q: Tensor, cu_seqlens: Tensor | Packing | None) -> Packing | None:
    """The borders as a `Packing` that covers q's tokens; ValueError naming cu_seqlens if not."""
    if cu_seqlens is None:
        return None
    B, T = q.shape[:2]
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


def unit_directions(w: Tensor | None) -> Tensor | None:
    """A 16-bit w renormalised in float32: its rounding breaks ‖w‖ = 1."""
    if w is None or w.dtype not in (torch.bfloat16, torch.float16):
        return w
    return torch.nn.functional.normalize(w.float(), dim=-1, eps=1e-6)


def has_kernels(function: str, x: Tensor, lacks: Callable[[], str | None]) -> bool:
    """Whether x is on a GPU that runs a function's kernels; where it cannot, that is said once.

    lacks: what the kernels would need and what came instead; None if they can run.
    """
    if x.device.type != "cuda":
        return False
    need = lacks()
    if need is not None and not torch.compiler.is_compiling():
        text = f"{function}: slower on {x.device.type}, without its kernels, which want {need}"
        if text not in _SAID:
            _SAID.add(text)
            warnings.warn(text, stacklevel=4)
    return need is None
