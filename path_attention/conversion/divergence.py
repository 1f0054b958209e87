"""KL divergence from a teacher's next-token distributions to a student's, in chunks.

    KL_t = τ² Σ_v p_t(v) (log p_t(v) − log q_t(v)),   p, q = softmax of logits / τ

The factor τ² keeps gradients as large as at τ = 1 (arXiv 1503.02531). With top-k, all tokens beyond
the teacher's k likeliest are one outcome: k + 1 outcomes, whose divergence is a lower bound.

Logits of vocabulary × length are never whole: the gradient of a chunk is made with its loss, so
backward has nothing to compute again and nothing to keep but gradients of the inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 1 << 26  # logits at a time; a float32 copy of them takes 256 MiB


def divergence(
    student: Tensor,
    student_head: Tensor,
    teacher: Tensor,
    teacher_head: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """Σ_t KL_t in nats, float32; differentiable in the student's hidden states and head.

    Args:
        student, teacher: last hidden states `[N, …]` of the same N tokens.
        student_head, teacher_head: output projections `[V, …]`, of one vocabulary. Products are in
            the hidden states' dtype, all that follows in float32.
        temperature: τ.
        top_k: outcomes told apart; None for all.
        chunk: logits at a time.

    Raises:
        ValueError: naming the argument, what came, and what was expected.
    """
    V = len(student_head)
    if len(teacher_head) != V:
        raise ValueError(f"teacher_head: expected {V} tokens, got {len(teacher_head)}")
    if len(student) != len(teacher):
        raise ValueError(f"teacher: expected {len(student)} tokens, got {len(teacher)}")
    if not temperature > 0:
        raise ValueError(f"temperature: expected a number above 0, got {temperature}")
    if top_k is not None and not 1 <= top_k < V:
        raise ValueError(f"top_k: expected 1 to {V - 1} or None, got {top_k}")
    rows = max(1, chunk // V)
    dtype = teacher.dtype
    return _Divergence.apply(  # pyright: ignore[reportReturnType]
        student,
        student_head,
        teacher.detach(),
        teacher_head.detach().to(dtype),
        temperature,
        top_k,
        rows,
    )


class _Divergence(torch.autograd.Function):
    """(student, its head, teacher, its head, τ, k, rows at a time) → Σ KL."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        head: Tensor,
        teacher: Tensor,
        teacher_head: Tensor,
        temperature: float,
        top_k: int | None,
        rows: int,
    ) -> Tensor:
        need_x, need_head = ctx.needs_input_grad[:2]
        cast = head.to(student.dtype)
        total = torch.zeros((), dtype=torch.float32, device=student.device)
        dx = torch.empty_like(student) if need_x else None
        dhead = torch.zeros_like(head) if need_head else None
        with torch.autocast(student.device.type, enabled=False):
            for x, t, place in zip(
                student.split(rows), teacher.split(rows), _places(len(student), rows), strict=True
            ):
                found, dlogits = _chunk(x @ cast.T, t @ teacher_head.T, temperature, top_k)
                total += found
                dlogits = dlogits.to(x.dtype)
                if dx is not None:
                    dx[place] = dlogits @ cast
                if dhead is not None:
                    dhead += (dlogits.T @ x).to(dhead.dtype)
        ctx.save_for_backward(dx, dhead)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dx, dhead = ctx.saved_tensors
        scaled = [None if d is None else d * grads[0].to(d.dtype) for d in (dx, dhead)]
        return *scaled, None, None, None, None, None


def _places(count: int, rows: int) -> list[slice]:
    return [slice(n, n + rows) for n in range(0, count, rows)]


def _chunk(s: Tensor, t: Tensor, temperature: float, top_k: int | None) -> tuple[Tensor, Tensor]:
    """Σ KL of logits `[R, V]`, and its gradient with respect to the student's."""
    dtype = torch.promote_types(s.dtype, torch.float32)
    log_q = F.log_softmax(s.to(dtype) / temperature, -1)
    log_p = F.log_softmax(t.to(dtype) / temperature, -1)
    if top_k is None:
        p = log_p.exp()
        # a token that the teacher rules out counts 0, not 0 · ∞
        total = torch.where(p > 0, p * (log_p - log_q), 0).sum()
        return temperature**2 * total, temperature * (log_q.exp() - p)
    log_p, indices = log_p.topk(top_k, -1)
    p, q, log_kept = log_p.exp(), log_q.exp(), log_q.gather(-1, indices)
    rest_p = (1 - p.sum(-1, keepdim=True)).clamp(min=0)
    log_rest = log_q.scatter(-1, indices, -torch.inf).logsumexp(-1, keepdim=True)
    total = (p * (log_p - log_kept)).sum()
    total = total + torch.where(rest_p > 0, rest_p * (rest_p.log() - log_rest), 0).sum()
    # d/dz of −Σ p log q − P log Q: each outcome's share of its own mass, less q
    shares = rest_p * (log_q - log_rest).exp()
    gradient = q - shares.scatter(-1, indices, p)
    return temperature**2 * total, temperature * gradient
