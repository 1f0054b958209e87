"""A rectangle of scores, gates included, as plain attention: its log-sum-exp and its gradient.

    score_ij = k_jᵀ q_i + rows_i + columns_j

A row's gates change its log-sum-exp alone. A column's ride in spare places of the head: [q, 1]·[k,
columns]; in 16 bits as a sum of three parts, so that they keep float32's digits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from path_attention.ops import dense

_HEAD_SIZE = 256  # of flash attention
_LOWEST = -3e4  # in 16 bits; no score of that range is large enough to bring it back


class RectangleGradients(NamedTuple):
    """Gradients in the computing dtype; `decay` is the columns'."""

    q: Tensor  # [B, R, HQ, D]
    k: Tensor  # [B, C, H, D]
    v: Tensor  # [B, C, H, DV]
    decay: Tensor | None  # [B, C, HQ]


@dataclass(frozen=True, eq=False)
class Rectangle:
    """Scaled queries and keys of one place, in one dtype.

    Attributes:
        q: `[B, R, HQ, D]`; HQ is a multiple of H.
        k: `[B, C, H, D]`.
        v: `[B, C, H, DV]`.
        rows: `[B, R, HQ]`, added to all scores of a row; None for 0.
        columns: `[B, C, HQ]` ≤ 0, added to all scores of a column; None together with `rows`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    rows: Tensor | None
    columns: Tensor | None

    def attend(self) -> tuple[Tensor, Tensor]:
        """Output `[B, R, HQ, DV]` in q's dtype and log-sum-exp `[B, R, HQ]`."""
        q, k, v = self._operands(0)
        out, lse = _attend(q, k, v)
        out, lse = (
            self._by_token(out)[..., : self.v.shape[3]],
            self._by_token(lse[..., None])[..., 0],
        )
        return out, lse if self.rows is None else lse + self.rows

    def backward(
        self, grad_out: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None
    ) -> RectangleGradients:
        """Gradients through this part of a softmax whose whole result is `out`, `lse`.

            dS = exp(score − lse) ∘ (grad_out vᵀ − δ),   δ = rowsum(grad_out ∘ out) − grad_lse

        Shapes as in `attend`. grad_lse rides in places of its own: 0 in v, 1 in grad_out.
        """
        parts = [] if grad_lse is None else _parts(-grad_lse, self.q.dtype)
        extra = len(parts)
        q, k, v = self._operands(extra)
        D, DV, E = self.q.shape[3], self.v.shape[3], q.shape[3]
        if parts:
            out = torch.cat([out, torch.stack(parts, -1)], -1)
            grad_out = F.pad(grad_out, (0, extra), value=1.0)
        if self.rows is not None:
            lse = lse - self.rows
        grad_out, out = (_widen(self._by_head(x.to(self.q.dtype)), E) for x in (grad_out, out))
        lse = self._by_head(lse[..., None])[..., 0].contiguous()
        dq, dk, dv = (x.to(lse.dtype) for x in _attend_backward(grad_out, q, k, v, out, lse))
        dk, dv = dk.transpose(1, 2), dv.transpose(1, 2)
        decay = None
        if self.columns is not None:
            groups = self.q.shape[2] // self.k.shape[2]
            decay = dk[..., D : D + groups].flatten(2)  # the high parts' places
        return RectangleGradients(self._by_token(dq)[..., :D], dk[..., :D], dv[..., :DV], decay)

    def _operands(self, extra: int) -> tuple[Tensor, Tensor, Tensor]:
        """[B, H, R·G, E], [B, H, C, E], [B, H, C, E]: one head size for all, gates within."""
        H = self.k.shape[2]
        q, k, v = self._by_head(self.q), self.k.transpose(1, 2), self.v.transpose(1, 2)
        if self.columns is not None:
            G = self.q.shape[2] // H
            gates = self.columns.unflatten(2, (H, G)).transpose(1, 2)  # [B, H, C, G]
            parts = _parts(gates, k.dtype)
            place = torch.eye(G, dtype=q.dtype, device=q.device).repeat(self.q.shape[1], len(parts))
            q = torch.cat([q, place.expand(*q.shape[:-1], -1)], -1)
            k = torch.cat([k, *parts], -1)
        E = max(q.shape[3], v.shape[3] + extra)
        if q.device.type == "cuda":
            E += -E % 8
        return _widen(q, E), _widen(k, E), _widen(v, E)

    def _by_head(self, x: Tensor) -> Tensor:
        """[B, R, HQ, E] → [B, H, R·G, E], a token's queries of one key head behind one another."""
        return x.unflatten(2, (self.k.shape[2], -1)).transpose(1, 2).flatten(2, 3)

    def _by_token(self, x: Tensor) -> Tensor:
        """[B, H, R·G, E] → [B, R, HQ, E]."""
        return x.unflatten(2, (self.q.shape[1], -1)).transpose(1, 2).flatten(2, 3)


def _parts(x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """x as a sum: itself, or in 16 bits what rounding leaves of it, three times."""
    if dtype not in (torch.bfloat16, torch.float16):
        return [x.to(dtype)]
    parts, rest = [], x.clamp(min=_LOWEST)
    for _ in range(3):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].to(rest.dtype)
    return parts


def _widen(x: Tensor, E: int) -> Tensor:
    return F.pad(x, (0, E - x.shape[-1])) if x.shape[-1] < E else x


def _flash(q: Tensor) -> bool:
    """Whether flash attention takes it; else `dense`, in float32 on CUDA."""
    sixteen = q.dtype in (torch.bfloat16, torch.float16)
    return q.device.type == "cuda" and sixteen and q.shape[-1] <= _HEAD_SIZE


def _attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if _flash(q):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, False, scale=1.0
        )
        return out, lse[..., : q.shape[2]]
    dtype = q.dtype if q.device.type == "cpu" else torch.promote_types(q.dtype, torch.float32)
    out, lse = dense.attend(*(x.to(dtype) for x in (q, k, v)), causal=False)
    return out.to(q.dtype), lse


def _attend_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if _flash(q):
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout's random state
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad_out, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, False,
            unused, unused, scale=1.0,
        )  # fmt: skip
    dtype = q.dtype if q.device.type == "cpu" else torch.promote_types(q.dtype, torch.float32)
    grad_out, q, k, v, out = (x.to(dtype) for x in (grad_out, q, k, v, out))
    return dense.attend_backward(grad_out, q, k, v, out, lse, causal=False)
