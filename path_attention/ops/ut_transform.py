"""One block of tokens: the UT transform, the scores inside the block, and their gradients.

docs/algorithm.md §2 and §4. Everything is batched over blocks; queries have a group dimension that
keys do not have. Shapes: q `[N, G, U, n, D]`, k, w `[N, U, n, D]`, v `[N, U, n, DV]`, beta
`[N, U, n]`, log_forget `[N, G, U, n]`: N sequences × key heads, G query heads a key head, U blocks
of n tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Transform(NamedTuple):
    """What carries a block's queries to its start and its keys to its end."""

    w: Tensor
    beta: Tensor
    inverse: Tensor  # X = (I + diag(β)·striu(W Wᵀ))⁻¹, upper triangular
    t: Tensor  # T = X diag(β)
    qw: Tensor  # tril(Q Wᵀ)
    kw: Tensor  # striu(K Wᵀ)
    q_coefficients: Tensor  # qw Tᵀ: a query moves by subtracting them times W
    k_coefficients: Tensor  # kw T


class Block(NamedTuple):
    """A block's queries and keys and, where there is transport, its solved transform."""

    q: Tensor
    k: Tensor
    transform: Transform | None


def solve(q: Tensor, k: Tensor, w: Tensor | None, beta: Tensor | None) -> Block:
    """The UT transform of each block: H_1 ⋯ H_n = I − Wᵀ T W (docs/algorithm.md §2)."""
    if w is None or beta is None:
        return Block(q, k, None)
    inverse = _invert(beta[..., None] * (w @ w.mT).triu_(1))
    t = inverse * beta[..., None, :]
    qw, kw = (q @ w.mT[:, None]).tril_(), (k @ w.mT).triu_(1)
    return Block(q, k, Transform(w, beta, inverse, t, qw, kw, qw @ t.mT[:, None], kw @ t))


def move(block: Block) -> tuple[Tensor, Tensor, Tensor | None]:
    """Queries at the block's start, keys at its end, and its transition P = I − Wᵀ T W."""
    q, k, u = block
    if u is None:
        return q, k, None
    eye = torch.eye(u.w.shape[-1], dtype=u.w.dtype, device=u.w.device)
    return (
        q - u.q_coefficients @ u.w[:, None],
        k - u.k_coefficients @ u.w,
        eye - u.w.mT @ (u.t @ u.w),
    )


def attend(block: Block, v: Tensor, log_forget: Tensor | None) -> tuple[Tensor, Tensor]:
    """Causal attention inside each block: output `[N, G, U, n, DV]`, log-sum-exp `[N, G, U, n]`."""
    scores = _scores(block, log_forget)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp_() @ v[:, None], lse


def attend_backward(
    block: Block,
    v: Tensor,
    log_forget: Tensor | None,
    grad_out: Tensor,
    delta: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of the scores, of v and of log f through a block's share of the softmax.

    delta `[N, G, U, n]` is rowsum(grad_out · out) over the whole softmax, less lse's gradient.
    """
    p = (_scores(block, log_forget) - lse[..., None]).exp_()
    dv = (p.mT @ grad_out).sum(1)
    dscores = (grad_out @ v.mT[:, None]).sub_(delta[..., None]).mul_(p)
    if log_forget is None:
        return dscores, dv, None
    # log f_t is in A_ij for j < t ≤ i.
    later = dscores.flip(-2).cumsum(-2).flip(-2)
    return dscores, dv, later.tril_(-1).sum(-1)


def backward(
    block: Block, dscores: Tensor, dq_moved: Tensor, dk_moved: Tensor, dtransition: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, w, β from those of the scores and of `move`'s results."""
    q, k, u = block
    dq = dscores @ k[:, None] + dq_moved
    dk = (dscores.mT @ q).sum(1) + dk_moved
    if u is None or dtransition is None:
        return dq, dk, None, None
    w, beta, inverse, t, qw, kw, q_coefficients, k_coefficients = u
    # The scores lose qw k_coefficientsᵀ; the moves lose coefficients times W.
    dq_coefficients = -dq_moved @ w.mT[:, None]
    dk_coefficients = -(dscores.mT @ qw).sum(1) - dk_moved @ w.mT
    dw = -(q_coefficients.mT @ dq_moved).sum(1) - k_coefficients.mT @ dk_moved
    dqw = (dq_coefficients @ t[:, None] - dscores @ k_coefficients[:, None]).tril_()
    dkw = (dk_coefficients @ t.mT).triu_(1)
    dt = (dq_coefficients.mT @ qw).sum(1) + kw.mT @ dk_coefficients
    # P = I − Wᵀ T W
    w_dp = w @ dtransition
    dt -= w_dp @ w.mT
    dw -= t @ (w @ dtransition.mT) + t.mT @ w_dp
    # T = X diag(β), X = (I + diag(β) striu(W Wᵀ))⁻¹:  d(X⁻¹) = −Xᵀ dX Xᵀ
    dbeta = (inverse * dt).sum(-2)
    dsystem = -(inverse.mT @ dt @ t.mT).triu_(1)
    dbeta += (dsystem * (w @ w.mT)).sum(-1)
    dww = beta[..., None] * dsystem
    dw += (dww + dww.mT) @ w
    dw += (dqw.mT @ q).sum(1) + dkw.mT @ k
    return dq + dqw @ w[:, None], dk + dkw @ w, dw, dbeta


def _invert(strict: Tensor) -> Tensor:
    """(I + N)⁻¹ of a strictly upper triangular N `[.., n, n]`, merging diagonal blocks in pairs.

    (I + [[N₁, C], [0, N₂]])⁻¹ = [[X₁, −X₁ C X₂], [0, X₂]]: products of whole batches, where a
    batched triangular solver would solve one small system after the other.
    """
    n, size = strict.shape[-1], 1
    padding = (1 << (n - 1).bit_length()) - n
    strict = F.pad(strict, (0, padding, 0, padding))
    x = strict.new_ones(*strict.shape[:-1], 1, 1)  # [.., blocks, size, size]
    while size < n:
        blocks = strict.unflatten(-2, (-1, 2 * size)).unflatten(-1, (-1, 2 * size))
        corner = blocks.diagonal(0, -4, -2).movedim(-1, -3)[..., :size, size:]
        left, right = x[..., 0::2, :, :], x[..., 1::2, :, :]
        top = torch.cat([left, -(left @ (corner @ right))], -1)
        x = torch.cat([top, F.pad(right, (size, 0))], -2)
        size *= 2
    return x[..., 0, :n, :n]


def _scores(block: Block, log_forget: Tensor | None) -> Tensor:
    scores = block.q @ block.k.mT[:, None]
    if block.transform is not None:
        scores -= block.transform.qw @ block.transform.k_coefficients.mT[:, None]
    if log_forget is not None:
        # Σ_{t=j+1..i} of each pair by itself: a difference of running sums would cancel.
        later = log_forget[..., :, None].expand(scores.shape).tril(-1)
        scores += later.cumsum(-2)
    n = scores.shape[-1]
    future = torch.ones(n, n, dtype=torch.bool, device=scores.device).triu_(1)
    return scores.masked_fill_(future, -torch.inf)
