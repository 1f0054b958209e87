"""Softmax attention over a rectangle or a triangle of scores, its log-sum-exp and its gradient.

docs/algorithm.md §3, §4. A softmax over several rectangles: each is computed alone and merged by
log-sum-exp; its gradient needs only the whole softmax's output and log-sum-exp.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SCORES_AT_ONCE = 2**24  # elements of the score tile that the plain version holds


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ) v and the log-sum-exp of each row.

    Args:
        q: `[N, M, R, E]`; k, v: `[N, M, C, E]`; float32 or float64, one head size E for all.
        causal: row r sees columns up to r (R = C then).

    Returns:
        `[N, M, R, E]` and `[N, M, R]`.
    """
    if q.device.type == "cpu":
        q, k, v = map(whole_rows, (q, k, v))
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=1.0
        )
    return attend_in_tiles(q, k, v, causal)


def attend_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v through this rectangle of a softmax whose whole result is out, lse.

    With P = exp(q kᵀ − lse) and δ = rowsum(grad_out · out):  dS = P · (grad_out vᵀ − δ), dq = dS k,
    dk = dSᵀ q, dv = Pᵀ grad_out. Shapes as in `attend`.
    """
    if q.device.type == "cpu":
        grad_out, q, k, v, out = map(whole_rows, (grad_out, q, k, v, out))
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, causal, scale=1.0
        )
    return attend_backward_in_tiles(grad_out, q, k, v, out, lse, causal)


def whole_rows(x: Tensor) -> Tensor:
    """x whose rows' numbers lie side by side: PyTorch's CPU kernel takes that for granted."""
    return x if x.stride(-1) == 1 else x.contiguous()


def attend_in_tiles(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """`attend` in plain PyTorch, some rows at a time, for devices without a kernel to call."""
    out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:-1])
    for rows, columns in _tiles(q, k, causal):
        scores = _scores(q, k, rows, columns, causal)
        lse[..., rows] = scores.logsumexp(-1)
        out[..., rows, :] = (scores - lse[..., rows, None]).exp() @ v[..., columns, :]
    return out, lse


def attend_backward_in_tiles(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend_backward` in plain PyTorch, some rows at a time."""
    dq, dk, dv = torch.empty_like(q), k.new_zeros(k.shape), v.new_zeros(v.shape)
    delta = (grad_out * out).sum(-1, keepdim=True)
    for rows, columns in _tiles(q, k, causal):
        p = (_scores(q, k, rows, columns, causal) - lse[..., rows, None]).exp()
        dv[..., columns, :] += p.mT @ grad_out[..., rows, :]
        ds = p * (grad_out[..., rows, :] @ v[..., columns, :].mT - delta[..., rows, :])
        dq[..., rows, :] = ds @ k[..., columns, :]
        dk[..., columns, :] += ds.mT @ q[..., rows, :]
    return dq, dk, dv


def _tiles(q: Tensor, k: Tensor, causal: bool):
    N, M, R, _ = q.shape
    step = max(1, _SCORES_AT_ONCE // max(1, N * M * k.shape[2]))
    for start in range(0, R, step):
        stop = min(R, start + step)
        yield slice(start, stop), slice(0, stop if causal else k.shape[2])


def _scores(q: Tensor, k: Tensor, rows: slice, columns: slice, causal: bool) -> Tensor:
    scores = q[..., rows, :] @ k[..., columns, :].mT
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(future.triu(rows.start + 1), -torch.inf)
    return scores
