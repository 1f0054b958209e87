"""One block of tokens: the UT transform, the scores inside the block, and their gradients.

docs/algorithm.md §2 and §4. Everything is batched over blocks. Shapes: k `[N, U, n, D]`, v
`[N, U, n, DV]`, w `[N, U, n·F, D]`, beta `[N, U, n·F]`, q `[N, U, n·G, D]`, log_forget
`[N, U, n, G]`: N sequences × key heads, U blocks of n tokens, F factors a token in their order, G
query heads a key head, whose queries of one token are neighbours.
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
    ww: Tensor  # W Wᵀ
    inverse: Tensor  # X = (I + diag(β)·striu(W Wᵀ))⁻¹, upper triangular
    t: Tensor  # T = X diag(β)
    qw: Tensor  # tril(Q Wᵀ): factors of later tokens hidden
    kw: Tensor  # striu(K Wᵀ): those of later tokens kept
    k_coefficients: Tensor  # kw T
    to_start: Tensor  # Tᵀ W: queries lose qw times it
    to_end: Tensor  # T W: keys lose kw times it


class Block(NamedTuple):
    """A block's queries and keys and, where there is transport, its solved transform."""

    q: Tensor
    k: Tensor
    transform: Transform | None


def solve(q: Tensor, k: Tensor, w: Tensor | None, beta: Tensor | None) -> Block:
    """The UT transform of each block: H_1 ⋯ H_n = I − Wᵀ T W (docs/algorithm.md §2)."""
    if w is None or beta is None:
        return Block(q, k, None)
    ww = w @ w.mT
    inverse = _invert(beta[..., None] * ww.triu(1))
    t = inverse * beta[..., None, :]
    n, qw, kw = k.shape[-2], q @ w.mT, k @ w.mT
    qw.masked_fill_(_future(qw, n), 0)
    kw.masked_fill_(~_future(kw, n), 0)
    return Block(q, k, Transform(w, beta, ww, inverse, t, qw, kw, kw @ t, t.mT @ w, t @ w))


def move(block: Block) -> tuple[Tensor, Tensor, Tensor | None]:
    """Queries at the block's start, keys at its end, and its transition P = I − Wᵀ T W."""
    q, k, u = block
    if u is None:
        return q, k, None
    eye = torch.eye(u.w.shape[-1], dtype=u.w.dtype, device=u.w.device)
    return q - u.qw @ u.to_start, k - u.kw @ u.to_end, eye - u.w.mT @ u.to_end


def attend(block: Block, v: Tensor, log_forget: Tensor | None) -> tuple[Tensor, Tensor]:
    """Causal attention inside each block: output `[N, U, n·G, DV]`, log-sum-exp `[N, U, n·G]`."""
    scores = _scores(block, log_forget)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp_() @ v, lse


def attend_backward(
    block: Block,
    v: Tensor,
    log_forget: Tensor | None,
    grad_out: Tensor,
    delta: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of the scores, of v and of log f through a block's share of the softmax.

    delta `[N, U, n·G]` is rowsum(grad_out · out) over the whole softmax, less lse's gradient.
    """
    p = (_scores(block, log_forget) - lse[..., None]).exp_()
    dscores = (grad_out @ v.mT).sub_(delta[..., None]).mul_(p)
    dv = p.mT @ grad_out
    if log_forget is None:
        return dscores, dv, None
    return dscores, dv, _gates_between(dscores, log_forget)


def backward(
    block: Block, dscores: Tensor, dq_moved: Tensor, dk_moved: Tensor, dtransition: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, w, β from those of the scores and of `move`'s results."""
    q, k, u = block
    dq, dk = dscores @ k, dscores.mT @ q
    dq += dq_moved
    dk += dk_moved
    if u is None or dtransition is None:
        return dq, dk, None, None
    w, beta, ww, inverse, t, qw, kw, k_coefficients, to_start, to_end = u
    # Scores lose qw (kw T)ᵀ, queries qw Tᵀ W, keys kw T W, the transition Wᵀ T W. All signs are
    # the same, so what follows is the gradients of what is lost; they are subtracted at the end.
    dk_coefficients = dscores.mT @ qw
    dto_start = qw.mT @ dq_moved
    dto_end = kw.mT @ dk_moved
    dto_end += w @ dtransition
    dqw = dscores @ k_coefficients
    dqw += dq_moved @ to_start.mT
    dqw.masked_fill_(_future(dqw, k.shape[-2]), 0)
    dkw = dk_coefficients @ t.mT
    dkw += dk_moved @ to_end.mT
    dkw.masked_fill_(~_future(dkw, k.shape[-2]), 0)
    dt = kw.mT @ dk_coefficients
    dt += w @ dto_start.mT
    dt += dto_end @ w.mT
    # T = X diag(β), X = (I + diag(β) striu(W Wᵀ))⁻¹:  d(X⁻¹) = −Xᵀ dX Xᵀ
    dsystem = (inverse.mT @ dt @ t.mT).triu_(1)
    dbeta = (inverse * dt).sum(-2) - (dsystem * ww).sum(-1)
    dww = beta[..., None] * dsystem
    dw = t @ dto_start
    dw += t.mT @ dto_end
    dw += to_end @ dtransition.mT
    dw += dqw.mT @ q
    dw += dkw.mT @ k
    dw -= (dww + dww.mT) @ w
    dq -= dqw @ w
    dk -= dkw @ w
    return dq, dk, dw.neg_(), dbeta.neg_()


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


def weigh(block: Block, log_forget: Tensor | None) -> Tensor:
    """Scores without a softmax: products times the gates between, 0 for later tokens."""
    weights = _products(block)
    if log_forget is not None:
        weights *= _decays(log_forget).exp_()
    return weights.masked_fill_(_future(weights, block.k.shape[-2]), 0)


def weigh_backward(
    log_forget: Tensor | None, weights: Tensor, dweights: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the products and of log f from those of `weigh`'s result."""
    n = weights.shape[-1]
    dweights = dweights.masked_fill(_future(dweights, n), 0)
    if log_forget is None:
        return dweights, None
    return dweights * _decays(log_forget).exp_(), _gates_between(dweights * weights, log_forget)


def _scores(block: Block, log_forget: Tensor | None) -> Tensor:
    scores = _products(block)
    if log_forget is not None:
        scores += _decays(log_forget)
    return scores.masked_fill_(_future(scores, block.k.shape[-2]), -torch.inf)


def _products(block: Block) -> Tensor:
    """k_jᵀ H_{j+1} ⋯ H_i q_i where j ≤ i, `[N, U, n·G, n]`."""
    products = block.q @ block.k.mT
    if block.transform is not None:
        products -= block.transform.qw @ block.transform.k_coefficients.mT
    return products


def _decays(log_forget: Tensor) -> Tensor:
    """Σ_{t=j+1..i} of each pair by itself: a difference of running sums would cancel."""
    later = log_forget[..., None].expand(*log_forget.shape, log_forget.shape[-2])
    return later.where(_past(later), 0).cumsum(-3).flatten(-3, -2)


def _gates_between(dscores: Tensor, log_forget: Tensor) -> Tensor:
    """Gradient of log f_t, which is in A_ij for j < t ≤ i."""
    later = dscores.unflatten(-2, log_forget.shape[-2:]).flip(-3).cumsum(-3).flip(-3)
    return later.where(_past(later), 0).sum(-1)


def _future(x: Tensor, n: int) -> Tensor:
    """Where the column's token is later than the row's; x has so many of each a token, of n."""
    token = torch.arange(n, device=x.device)
    row, column = (token.repeat_interleave(size // n) for size in x.shape[-2:])
    return column > row[:, None]


def _past(x: Tensor) -> Tensor:
    """Where the column's token is earlier than the row's; x is [.., n, G, n]."""
    token = torch.arange(x.shape[-1], device=x.device)
    return token < token[:, None, None]
