"""PaTH without the softmax: a state recurrence, by its definition, token by token, and by blocks.

docs/algorithm.md §8. The products of factors are `path_attention`'s, so blocks are solved by the
same UT transform; what was a tree of units is a state that goes from block to block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from path_attention.ops import ut_transform
from path_attention.ops.arguments import (
    LOWEST_LOG_FORGET,
    cast_as_autocast_does,
    check_packing,
    check_tensors,
    unit_directions,
)
from path_attention.ops.definition import apply_factors
from path_attention.ops.gradients import refuse_tangents, register_gradients
from path_attention.ops.packing import Packing
from path_attention.ops.sequences import Group, Heads, gather, make_groups, scatter, to_heads

BLOCK = 64


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None = None,
    beta: Tensor | None = None,
    log_forget: Tensor | None = None,
    *,
    scale: float | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | Packing | None = None,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal linear attention whose queries travel to each key through Householder factors.

        S_t = f_t S_{t−1} H_t + v_t k_tᵀ,   o_t = scale · S_t q_t,   f_t = exp(log_forget_t)
            = scale · Σ_{j≤t} (Π_{s=j+1..t} f_s) (k_jᵀ H_{j+1} ⋯ H_t q_t) v_j      (S_0 = 0)

    `path_attention` with its softmax taken away; H_t as there, with n factors a token too. With
    w = k of unit norm and v scaled by β it is DeltaNet (arXiv 2406.06484), with gates Gated
    DeltaNet (arXiv 2412.06464); without w, gated linear attention with a gate a head.
    docs/algorithm.md §8.

    Args:
        q, k, v, w, beta, log_forget, scale: as in `path_attention`.
        state: S before the first token, `[B, HQ, DV, D]`, or `[N, HQ, DV, D]` for N packed
            documents; float32 (float64 for float64 inputs). None for zeros.
        cu_seqlens: borders of packed documents (B = 1), `[N + 1]` integers or a `Packing`; each has
            a state of its own.
        implementation: "definition" (literal, quadratic in T; the oracle), "recurrent" (token by
            token: the least memory and work for a few tokens) or "chunked" (blocks of 64 tokens;
            linear memory, its own backward). None is "recurrent" for a single token, else
            "chunked". All run on any device.

    Returns:
        `[B, T, HQ, DV]` in q's dtype, and the state after the last token, shaped and typed as
        `state` is. Both are differentiable ("chunked": once).

    Raises:
        ValueError: naming the argument, what came, and what was expected.
    """
    q, k, v = cast_as_autocast_does(q, k, v)
    check_tensors(q, k, v, w, beta, log_forget)
    packing = check_packing(q, cu_seqlens)
    scale = float(q.shape[3] ** -0.5 if scale is None else scale)
    if implementation is None:
        implementation = "recurrent" if q.shape[1] == 1 else "chunked"
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"implementation: expected one of {sorted(_IMPLEMENTATIONS)} or None, "
            f"got {implementation!r}"
        )
    dtype = torch.promote_types(q.dtype, torch.float32)
    state = _check_state(state, q, k, v, packing, dtype)
    if q.numel() == 0:
        out = q.sum(-1, keepdim=True).expand(-1, -1, -1, v.shape[3])
        return out, state.flatten(1, 2)
    with torch.autocast(q.device.type, enabled=False):
        w = unit_directions(w)
        if w is not None and beta is not None and w.dim() == 4:
            w, beta = w[:, :, :, None], beta[..., None]
        if log_forget is not None:
            log_forget = log_forget.to(dtype).clamp(min=LOWEST_LOG_FORGET)
        tensors = [None if x is None else x.to(dtype) for x in (q, k, v, w, beta, log_forget)]
        if implementation == "chunked":
            refuse_tangents("linear attention's chunked", *tensors, state)
        out, state = _IMPLEMENTATIONS[implementation](*tensors, scale, state, packing)
    return out.to(q.dtype), state.flatten(1, 2)


def _check_state(
    state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, dtype
) -> Tensor:
    """The state before the first token, [N, H, G, DV, D]."""
    H, HQ, N = k.shape[2], q.shape[2], q.shape[0] if packing is None else len(packing.lengths)
    shape = (N, HQ, v.shape[3], q.shape[3])
    if state is None:
        state = q.new_zeros(shape, dtype=dtype)
    if state.shape != shape:
        raise ValueError(f"state: expected shape {list(shape)}, got {list(state.shape)}")
    if state.dtype != dtype:
        raise ValueError(f"state: expected dtype {dtype}, got {state.dtype}")
    if state.device != q.device:
        raise ValueError(f"state: expected on q's device {q.device}, got {state.device}")
    return state.unflatten(1, (H, HQ // H))


# --- One document after the other ----------------------------------------------------------------

_Sequence = Callable[..., tuple[Tensor, Tensor]]


def _each_document(run: _Sequence) -> _Sequence:
    """An implementation for a batch of sequences as one for packed documents too."""

    def call(q, k, v, w, beta, log_forget, scale, state, packing):
        if packing is None:
            return run(q, k, v, w, beta, log_forget, scale, state)
        lengths = packing.lengths
        split = [
            [None] * len(lengths) if x is None else x.split(lengths, 1)
            for x in (q, k, v, w, beta, log_forget)
        ]
        documents = zip(*split, state.split(1), strict=True)
        parts = [run(*x, scale, before) for *x, before in documents]
        return torch.cat([out for out, _ in parts], 1), torch.cat([after for _, after in parts])

    return call


@_each_document
def _definition(q, k, v, w, beta, log_forget, scale, state) -> tuple[Tensor, Tensor]:
    """Every pair of tokens by itself, O(T²·D); w `[B, T, H, n, D]`, state `[B, H, G, DV, D]`."""
    (B, T, HQ, D), (H, G) = q.shape, state.shape[1:3]
    if T == 0:
        return q.new_zeros(B, 0, HQ, v.shape[3]), state
    q = q.unflatten(2, (H, G))  # [B, T, H, G, D]
    moved = q[:, T:]  # queries i > j, moved by H_{j+1} ⋯ H_i
    decay = q.new_zeros(B, 0, H, G)  # and their Σ log f
    rest = torch.eye(D, dtype=q.dtype, device=q.device)  # H_{j+1} ⋯ H_T, a column like a query
    rest = rest[:, None, None].expand(B, D, H, 1, D)
    out, after = torch.zeros((), dtype=q.dtype, device=q.device), torch.zeros_like(state)
    for j in range(T - 1, -1, -1):
        moved = torch.cat([q[:, j : j + 1], moved], 1)
        decay = torch.cat([q.new_zeros(B, 1, H, G), decay], 1)
        score = decay.exp() * (moved * k[:, j, None, :, None]).sum(-1)
        part = score[..., None] * v[:, j, None, :, None]
        out = out + F.pad(part, (0, 0, 0, 0, 0, 0, j, 0))
        key = (k[:, j, None, :, None] * rest).sum(-1)  # k_jᵀ H_{j+1} ⋯ H_T, [B, D, H, 1]
        kept = decay[:, -1, :, :, None, None].exp()
        after = after + kept * v[:, j, :, None, :, None] * key.permute(0, 2, 3, 1)[:, :, :, None]
        if w is not None and beta is not None:
            moved = apply_factors(moved, w[:, j], beta[:, j])
            rest = apply_factors(rest, w[:, j], beta[:, j])
        if log_forget is not None:
            decay = decay + log_forget[:, j, None].unflatten(2, (H, G))
    out = out + decay.exp()[..., None] * torch.einsum("bhged,bihgd->bihge", state, moved)
    kept = decay[:, -1, :, :, None, None].exp()
    after = after + kept * torch.einsum("bhged,bchxd->bhgec", state, rest)
    return scale * out.flatten(2, 3), after


@_each_document
def _recurrent(q, k, v, w, beta, log_forget, scale, state) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token; w `[B, T, H, n, D]`, state `[B, H, G, DV, D]`."""
    HQ, (H, G) = q.shape[2], state.shape[1:3]
    q = q.unflatten(2, (H, G))
    out = []
    for t in range(q.shape[1]):
        if log_forget is not None:
            state = state * log_forget[:, t].exp().unflatten(1, (H, G))[..., None, None]
        if w is not None and beta is not None:
            for n in range(w.shape[3]):  # S H_{t,1} ⋯ H_{t,n}
                w_n = w[:, t, :, None, n, :, None]  # [B, H, 1, D, 1]
                along = beta[:, t, :, None, n, None, None] * (state @ w_n)
                state = state - along * w_n.mT
        state = state + v[:, t, :, None, :, None] * k[:, t, :, None, None, :]
        out.append(scale * (state @ q[:, t, ..., None])[..., 0])
    return _stack(out, q, v, HQ), state


def _stack(out: list[Tensor], q: Tensor, v: Tensor, HQ: int) -> Tensor:
    """[B, H, G, DV] of each token → [B, T, HQ, DV]."""
    if out:
        return torch.stack(out, 1).flatten(2, 3)
    return q.new_zeros(q.shape[0], 0, HQ, v.shape[3])


# --- Blocks --------------------------------------------------------------------------------------


def _chunked(q, k, v, w, beta, log_forget, scale, state, packing) -> tuple[Tensor, Tensor]:
    """Blocks of 64 tokens; w `[B, T, H, n, D]`, state `[N, H, G, DV, D]`."""
    if w is not None and beta is not None:
        w, beta = w.flatten(2, 3), beta.flatten(2, 3)
    borders = None if packing is None else packing.cu_seqlens
    return _forward(q, k, v, w, beta, log_forget, state, scale, borders)


@torch.library.custom_op("path_attention::linear", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_forget: Tensor | None,
    state: Tensor,
    scale: float,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    B, T, HQ, _ = q.shape
    out, last = q.new_empty(B, T, HQ, v.shape[3]), state.clone()
    for group in make_groups(cu_seqlens, B, T, BLOCK):
        documents = slice(None) if group.documents is None else group.documents
        x = gather(group, q, k, v, w, beta, log_forget)
        blocks = _solve(group, x, state[documents].flatten(0, 1))
        scatter(group, out, scale * _outputs(blocks))
        last[documents] = blocks.last.view_as(last[documents])
    return out, last


@_forward.register_fake
def _(q, k, v, w, beta, log_forget, state, scale, cu_seqlens):
    return q.new_empty(*q.shape[:3], v.shape[3]), torch.empty_like(state)


@torch.library.custom_op("path_attention::linear_backward", mutates_args=())
def _backward(
    grad_out: Tensor,
    grad_last: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_forget: Tensor | None,
    state: Tensor,
    out: Tensor,
    last: Tensor,
    scale: float,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    B, T, H, _ = k.shape
    inputs = (q, k, v, w, beta, log_forget)
    grads = [q.new_empty(0 if x is None else x.shape) for x in inputs]
    grad_state = torch.zeros_like(state) if grad_last is None else grad_last.clone()
    with torch.autocast(q.device.type, enabled=False):
        for group in make_groups(cu_seqlens, B, T, BLOCK):
            documents = slice(None) if group.documents is None else group.documents
            x = gather(group, *inputs)
            blocks = _solve(group, x, state[documents].flatten(0, 1))
            dout = scale * to_heads(group, grad_out, H)
            parts, dstate = _blocks_backward(blocks, dout, grad_state[documents].flatten(0, 1))
            grad_state[documents] = dstate.view_as(grad_state[documents])
            for grad, part in zip(grads, parts, strict=True):
                if part is not None:
                    scatter(group, grad if grad.dim() == 4 else grad[..., None], part)
    return (*grads, grad_state)  # type: ignore[return-value]


@_backward.register_fake
def _(
    grad_out, grad_last, q, k, v, w, beta, log_forget, state, out, last, scale, cu_seqlens
):  # fmt: skip
    inputs = (q, k, v, w, beta, log_forget)
    grads = (q.new_empty(0 if x is None else x.shape) for x in inputs)
    return (*grads, torch.empty_like(state))


register_gradients(_forward, _backward, "linear attention's chunked")


class _Blocks(NamedTuple):
    """A group, solved: N sequences × key heads, U blocks of n tokens, G query heads each."""

    block: ut_transform.Block
    v: Tensor  # [N, U, n, DV]
    log_forget: Tensor | None  # [N, U, n, G]
    weights: Tensor  # [N, U, n·G, n]
    q: Tensor  # [N, U, G, n, D] at the block's start, times the gates since
    k: Tensor  # [N, U, 1, n, D] at its end
    values: Tensor  # [N, U, 1 or G, DV, n], times the gates to the block's end
    transition: Tensor | None  # [N, U, 1, D, D]
    from_start: Tensor | None  # [N, U, G, n] products of gates
    to_end: Tensor | None
    before: Tensor  # [N, U, G, DV, D] states
    last: Tensor  # [N, G, DV, D]


def _solve(group: Group, x: Heads, state: Tensor) -> _Blocks:
    n, G, count = group.block, state.shape[1], group.length // group.block
    q, k, v = (y.unflatten(1, (count, -1)) for y in (x.q, x.k, x.v))
    w, beta, log_forget = (
        None if y is None else y.unflatten(1, (count, -1)) for y in (x.w, x.beta, x.log_forget)
    )
    block = ut_transform.solve(q, k, w, beta)
    weights = ut_transform.weigh(block, log_forget)
    q, k, transition = ut_transform.move(block)
    q, k = q.unflatten(2, (n, G)).transpose(2, 3), k[:, :, None]
    transition = None if transition is None else transition[:, :, None]
    values, from_start, to_end = v[:, :, None].mT, None, None
    if log_forget is not None:
        gates = log_forget.mT  # [N, U, G, n]
        from_start = gates.cumsum(-1).exp_()
        to_end = F.pad(gates[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1).exp_()
        q, values = q * from_start[..., None], values * to_end[..., None, :]
    added, before = values @ k, []
    for u in range(count):
        before.append(state)
        if transition is not None:
            state = state @ transition[:, u]
        if from_start is not None:
            state = state * from_start[:, u, :, -1, None, None]
        state = state + added[:, u]
    return _Blocks(
        block,
        v,
        log_forget,
        weights,
        q,
        k,
        values,
        transition,
        from_start,
        to_end,
        torch.stack(before, 1),
        state,
    )


def _outputs(x: _Blocks) -> Tensor:
    """[N, L·G, DV]: from the keys of the block, and from the state before it."""
    across = x.q @ x.before.mT  # [N, U, G, n, DV]
    return (x.weights @ x.v + across.transpose(2, 3).flatten(2, 3)).flatten(1, 2)


def _blocks_backward(x: _Blocks, dout: Tensor, dstate: Tensor):
    """Gradients of q, k, v, w, β, log f, as `scatter` takes them, and of the first states."""
    count, G, n = x.q.shape[1:4]
    dout = dout.unflatten(1, (count, -1))  # [N, U, n·G, DV]
    dacross = dout.unflatten(2, (n, G)).transpose(2, 3)
    dbefore, dafter = dacross.mT @ x.q, []
    for u in range(count - 1, -1, -1):
        dafter.append(dstate)
        if x.from_start is not None:
            dstate = dstate * x.from_start[:, u, :, -1, None, None]
        if x.transition is not None:
            dstate = dstate @ x.transition[:, u].mT
        dstate = dstate + dbefore[:, u]
    dafter = torch.stack(dafter[::-1], 1)
    dq, dk = dacross @ x.before, (x.values.mT @ dafter).sum(2)
    dvalues = dafter @ x.k.mT  # [N, U, G, DV, n]
    dscores, dgates = ut_transform.weigh_backward(x.log_forget, x.weights, dout @ x.v.mT)
    dv = x.weights.mT @ dout
    kept = dafter
    if x.from_start is not None and x.to_end is not None and dgates is not None:
        kept = dafter * x.from_start[..., -1, None, None]
        carried = x.before if x.transition is None else x.before @ x.transition
        whole = (kept * carried).sum((-1, -2))  # [N, U, G]
        starts = (dq * x.q).sum(-1).flip(-1).cumsum(-1).flip(-1)  # of queries from t on
        ends = (dvalues * x.values).sum(-2).cumsum(-1)  # of keys before t
        dgates = dgates + (whole[..., None] + starts + F.pad(ends[..., :-1], (1, 0))).mT
        dq = dq * x.from_start[..., None]
        dvalues = dvalues * x.to_end[..., None, :]
    dv = dv + dvalues.sum(2).mT
    dtransition = None if x.transition is None else (x.before.mT @ kept).sum(2)
    dq = dq.transpose(2, 3).flatten(2, 3)
    dq, dk, dw, dbeta = ut_transform.backward(x.block, dscores, dq, dk, dtransition)
    dw = None if dw is None else dw.flatten(1, 2)
    dbeta = None if dbeta is None else dbeta.flatten(1, 2)[..., None]
    dgates = None if dgates is None else dgates.flatten(1, 3)[..., None]
    return (dq.flatten(1, 2), dk.flatten(1, 2), dv.flatten(1, 2), dw, dbeta, dgates), dstate


_IMPLEMENTATIONS: dict[str, _Sequence] = {
    "definition": _definition,
    "recurrent": _recurrent,
    "chunked": _chunked,
}
