"""PaTH attention in plain PyTorch: linear memory, any device, its own backward.

docs/algorithm.md §2–§4. Blocks of 64 tokens are solved with the UT transform; then units of 64,
128, 256, … tokens meet in pairs. Queries of a pair's right unit, moved to its start, meet keys of
the left unit, moved to its end, which is the same place: the scores between them are a plain
product, and their share of the softmax is any attention kernel's. After each meeting the keys move
on to the pair's end and the queries back to its start. So every score is computed once, by the
library's own attention kernel where it has one, and transport costs O(T·D²·log T) in all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from path_attention.ops import dense, ut_transform
from path_attention.ops.packing import Packing
from path_attention.ops.sequences import Group, Heads, gather, make_groups, scatter, to_heads

BLOCK = 64
_LOWEST_LOG_FORGET = -1e30  # as good as −∞ to a softmax, and its sums stay finite


def blockwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_forget: Tensor | None,
    scale: float,
    packing: Packing | None,
) -> tuple[Tensor, Tensor]:
    """PaTH attention by blocks and pairs of units (docs/algorithm.md §3).

    Arguments as in `path_attention`, validated there. Computes in float32, or float64 for float64
    inputs; `out` comes in q's dtype, `lse` in the computing dtype.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if log_forget is not None:
        log_forget = log_forget.to(dtype).clamp(min=_LOWEST_LOG_FORGET)
    tensors = (None if x is None else x.to(dtype) for x in (q, k, v, w, beta, log_forget))
    out, lse = _forward(*tensors, scale, None if packing is None else packing.cu_seqlens)
    return out.to(q.dtype), lse


def chunk_transport(q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Move a chunk's queries to its start and its keys to its end (docs/algorithm.md §3).

        q_start_i = H_1 ⋯ H_i q_i,   k_end_jᵀ = k_jᵀ H_{j+1} ⋯ H_T,   transition = H_1 ⋯ H_T

    Args:
        q: `[B, T, HQ, D]`; k, w: `[B, T, H, D]`; beta: `[B, T, H]`; any T ≥ 1. No gradients.

    Returns:
        q_start `[B, T, HQ, D]`, k_end `[B, T, H, D]`, transition `[B, H, D, D]`, in float32
        (float64 for float64 inputs).
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    B, T, HQ, D = q.shape
    H = k.shape[2]
    group = make_groups(None, B, T, BLOCK)[0]
    with torch.no_grad():
        q, k, w, beta = (x.to(dtype) for x in (q, k, w, beta))
        moved = _start(_solve(gather(group, q, k, k, w, beta, None), group.block))
        for level in _levels(group):
            moved = _move(moved, level)
    transition = moved.transition
    if transition is None:
        raise ValueError("w, beta: expected tensors, got None")
    return (
        moved.q[..., :T, :].reshape(B, HQ, T, D).transpose(1, 2),
        moved.k[..., :T, :].reshape(B, H, T, D).transpose(1, 2),
        transition.reshape(B, H, D, D),
    )


# --- The two operators that autograd and torch.compile see ---------------------------------------


@torch.library.custom_op("path_attention::blockwise", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_forget: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    B, T, HQ, _ = q.shape
    out, lse = q.new_empty(B, T, HQ, v.shape[3]), q.new_empty(B, T, HQ)
    for group in make_groups(cu_seqlens, B, T, _unit(w, log_forget)):
        group_out, group_lse = _attend_group(
            group, gather(group, q, k, v, w, beta, log_forget), scale
        )
        scatter(group, out, group_out)
        scatter(group, lse[..., None], group_lse[..., None])
    return out, lse


@_forward.register_fake
def _(q, k, v, w, beta, log_forget, scale, cu_seqlens):
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3])


@torch.library.custom_op("path_attention::blockwise_backward", mutates_args=())
def _backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_forget: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    B, T, _, _ = q.shape
    inputs = (q, k, v, w, beta, log_forget)
    grads = [q.new_empty(0 if x is None else x.shape) for x in inputs]
    # Users call backward inside autocast too, which would round every product in here.
    with torch.autocast(q.device.type, enabled=False):
        for group in make_groups(cu_seqlens, B, T, _unit(w, log_forget)):
            x = gather(group, *inputs)
            G = x.q.shape[1]
            top = _Top(
                to_heads(group, grad_out, G),
                None if grad_lse is None else to_heads(group, grad_lse[..., None], G)[..., 0],
                to_heads(group, out, G),
                to_heads(group, lse[..., None], G)[..., 0],
            )
            parts = _attend_group_backward(group, x, top, scale)
            for grad, part in zip(grads, parts, strict=True):
                if part is not None:
                    scatter(group, grad if grad.dim() == 4 else grad[..., None], part)
    return tuple(grads)  # type: ignore[return-value]


@_backward.register_fake
def _(grad_out, grad_lse, q, k, v, w, beta, log_forget, out, lse, scale, cu_seqlens):
    return tuple(q.new_empty(0 if x is None else x.shape) for x in (q, k, v, w, beta, log_forget))


def _refuse(ctx, *grads):
    raise RuntimeError(
        "path_attention: blockwise is differentiable once, its gradients are not (create_graph); "
        'implementation="definition" has derivatives of every order'
    )


_backward.register_autograd(_refuse)


def _setup_context(ctx, inputs, output):
    *tensors, scale, cu_seqlens = inputs
    ctx.save_for_backward(*tensors, *output, cu_seqlens)
    ctx.scale = scale
    ctx.set_materialize_grads(False)


def _autograd(ctx, grad_out, grad_lse):
    *inputs, out, lse, cu_seqlens = ctx.saved_tensors
    if grad_out is None:
        if grad_lse is None:
            return (None,) * 8
        grad_out = torch.zeros_like(out)
    grads = _backward(grad_out, grad_lse, *inputs, out, lse, ctx.scale, cu_seqlens)
    return (*(None if x is None else g for x, g in zip(inputs, grads, strict=True)), None, None)


_forward.register_autograd(_autograd, setup_context=_setup_context)


def _unit(w: Tensor | None, log_forget: Tensor | None) -> int | None:
    return None if w is None and log_forget is None else BLOCK


# --- Units that meet in pairs ------------------------------------------------------------------


class _Pairs(NamedTuple):
    """`count` neighbouring pairs of units: `size` tokens on the left, `right` on the right."""

    start: int  # first token
    first: int  # first unit
    count: int
    size: int
    right: int

    def left_of(self, x: Tensor) -> Tensor:
        """[.., L, E] → [.., count, size, E], a view."""
        return self._split(x)[..., : self.size, :]

    def right_of(self, x: Tensor) -> Tensor:
        """[.., L, E] → [.., count, right, E], a view."""
        return self._split(x)[..., self.size :, :]

    def transitions_of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[.., units, D, D] → the left and the right units', [.., count, D, D] each, views."""
        x = x[..., self.first : self.first + 2 * self.count, :, :].unflatten(-3, (self.count, 2))
        return x[..., 0, :, :], x[..., 1, :, :]

    def _split(self, x: Tensor) -> Tensor:
        each = self.size + self.right
        x = x[..., self.start : self.start + self.count * each, :]
        return x.unflatten(-2, (self.count, each))


def _levels(group: Group) -> Iterator[list[_Pairs]]:
    """From one block to the whole: the full pairs, then one whose right unit is shorter."""
    size, L = group.block, group.length
    while size < L:
        full = L // (2 * size)
        rest = L - full * 2 * size
        pairs = [_Pairs(0, 0, full, size, size)] if full else []
        if rest > size:
            pairs.append(_Pairs(full * 2 * size, 2 * full, 1, size, rest - size))
        yield pairs
        size *= 2


class _Moved(NamedTuple):
    """Queries at their unit's start, keys at their unit's end, and the units' transitions."""

    q: Tensor  # [N, G, L, D]
    k: Tensor  # [N, L, D]
    transition: Tensor | None  # [N, units, D, D]; None without transport


def _move(moved: _Moved, level: list[_Pairs]) -> _Moved:
    """Move on to units of twice the size; q and k are written in place."""
    q, k, transition = moved
    if transition is None:
        return moved
    units = []
    for pairs in level:
        left, right = pairs.transitions_of(transition)
        q_right, k_left = pairs.right_of(q), pairs.left_of(k)
        q_right.copy_(q_right @ left.mT[:, None])
        k_left.copy_(k_left @ right)
        units.append(left @ right)
    if transition.shape[1] % 2:
        units.append(transition[:, -1:])
    return _Moved(q, k, torch.cat(units, 1))


def _move_backward(
    pairs: _Pairs, q_right: Tensor, k_left: Tensor, transition: Tensor, grad: _Moved, above: Tensor
) -> tuple[Tensor, Tensor]:
    """Undo one pair's move in `grad`, in place; returns the gradients of its transitions.

    With q' = q P_leftᵀ, k' = k P_right, P' = P_left P_right and `above` the gradient of P'.
    """
    left, right = pairs.transitions_of(transition)
    dq, dk = pairs.right_of(grad.q), pairs.left_of(grad.k)
    dleft = (dq.mT @ q_right).sum(1) + above @ right.mT
    dright = k_left.mT @ dk + left.mT @ above
    dq.copy_(dq @ left[:, None])
    dk.copy_(dk @ right.mT)
    return dleft, dright


# --- A meeting: right queries and left keys at the border between them ---------------------------


class _Meeting(NamedTuple):
    """What the attention kernel gets, of one head size E; the gates ride in columns of their own.

    q' = [q, decay from border to query, 1 at the query's place in its group],
    k' = [k, 1, decay from key to border for each of the group], so that q'·k' holds the gate.
    """

    q: Tensor  # [N, count, G·right, E]
    k: Tensor  # [N, count, size, E]
    v: Tensor  # [N, count, size, E]


def _meet(q_right: Tensor, k_left: Tensor, v_left: Tensor, gates) -> _Meeting:
    if gates is not None:
        from_border, to_border = gates
        G = q_right.shape[1]
        place = torch.eye(G, dtype=q_right.dtype, device=q_right.device)[:, None, None]
        place = place.expand(*q_right.shape[:-1], G)
        q_right = torch.cat([q_right, from_border[..., None], place], -1)
        to_border = to_border.movedim(1, -1)
        k_left = torch.cat([k_left, torch.ones_like(k_left[..., :1]), to_border], -1)
    E = max(q_right.shape[-1], v_left.shape[-1])
    return _Meeting(_fold(q_right, E), _widen(k_left, E), _widen(v_left, E))


def _gates(pairs: _Pairs, log_forget: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Decay from the border to each right query, and from each left key to the border.

    `[N, G, count, right]` and `[N, G, count, size]`. Sums of terms of one sign, kept apart: their
    rounding is small beside the decay itself.
    """
    if log_forget is None:
        return None
    from_border = pairs.right_of(log_forget[..., None])[..., 0].cumsum(-1)
    after = F.pad(pairs.left_of(log_forget[..., None])[..., 1:, 0], (0, 1))
    return from_border, after.flip(-1).cumsum(-1).flip(-1)


def _fold(x: Tensor, E: int) -> Tensor:
    """[N, G, count, right, ·] → [N, count, G·right, E]: a group's queries share one key head."""
    return _widen(x, E).transpose(1, 2).flatten(2, 3)


def _unfold(x: Tensor, G: int) -> Tensor:
    """[N, count, G·right, ·] → [N, G, count, right, ·]."""
    return x.unflatten(2, (G, -1)).transpose(1, 2)


def _widen(x: Tensor, E: int) -> Tensor:
    return F.pad(x, (0, E - x.shape[-1])) if x.shape[-1] < E else x


# --- One group of sequences ----------------------------------------------------------------------


def _blocks(x: Tensor, n: int) -> Tensor:
    return x.unflatten(-2, (-1, n))


def _solve(x: Heads, n: int) -> ut_transform.Block:
    beta = None if x.beta is None else x.beta.unflatten(-1, (-1, n))
    w = None if x.w is None else _blocks(x.w, n)
    return ut_transform.solve(_blocks(x.q, n), _blocks(x.k, n), w, beta)


def _start(block: ut_transform.Block) -> _Moved:
    q, k, transition = ut_transform.move(block)
    return _Moved(q.flatten(2, 3), k.flatten(1, 2), transition)


def _attend_group(group: Group, x: Heads, scale: float) -> tuple[Tensor, Tensor]:
    """Output [N, G, L, DV] and log-sum-exp [N, G, L] of one group of sequences."""
    x = x._replace(q=x.q * scale)
    G, DV = x.q.shape[1], x.v.shape[-1]
    if _is_plain(x):
        out, lse = dense.attend(*_plain(x), causal=True)
        return out[..., :DV], lse
    n = group.block
    block = _solve(x, n)
    log_forget = None if x.log_forget is None else x.log_forget.unflatten(-1, (-1, n))
    out, lse = ut_transform.attend(block, _blocks(x.v, n), log_forget)
    out, lse = out.flatten(2, 3), lse.flatten(2, 3)[..., None]
    moved = _start(block)
    del block
    for level in _levels(group):
        for pairs in level:
            meeting = _meet(
                pairs.right_of(moved.q),
                pairs.left_of(moved.k),
                pairs.left_of(x.v),
                _gates(pairs, x.log_forget),
            )
            part, part_lse = dense.attend(*meeting, causal=False)
            part, part_lse = _unfold(part[..., :DV], G), _unfold(part_lse[..., None], G)
            rows, rows_lse = pairs.right_of(out), pairs.right_of(lse)
            merged = torch.logaddexp(rows_lse, part_lse)
            rows.mul_((rows_lse - merged).exp_()).add_(part * (part_lse - merged).exp_())
            rows_lse.copy_(merged)
        moved = _move(moved, level)
    return out, lse[..., 0]


class _Top(NamedTuple):
    """What arrives from above in the backward pass, head-major like `Heads`."""

    grad_out: Tensor  # [N, G, L, DV]
    grad_lse: Tensor | None  # [N, G, L]
    out: Tensor  # [N, G, L, DV]
    lse: Tensor  # [N, G, L]


def _attend_group_backward(
    group: Group, x: Heads, top: _Top, scale: float
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, w, β, log f, head-major; everything is recomputed from the inputs."""
    x = x._replace(q=x.q * scale)
    DV = x.v.shape[-1]
    if top.grad_lse is not None:
        # δ = rowsum(grad_out · out) − grad_lse: a column in which v is zero brings the second term.
        top = top._replace(
            grad_out=F.pad(top.grad_out, (0, 1), value=1.0),
            out=torch.cat([top.out, -top.grad_lse[..., None]], -1),
        )
        x = x._replace(v=F.pad(x.v, (0, 1)))
    if _is_plain(x):
        q, k, v = _plain(x)
        grad_out, out = (_widen(t, q.shape[-1]) for t in (top.grad_out, top.out))
        dq, dk, dv = dense.attend_backward(grad_out, q, k, v, out, top.lse, causal=True)
        dq, dk, dv = dq[..., : x.q.shape[-1]], dk.sum(1)[..., : x.k.shape[-1]], dv.sum(1)
        return dq * scale, dk, dv[..., :DV], None, None, None

    block = _solve(x, group.block)
    kept, moved = [], _start(block)
    for level in _levels(group):
        kept.append((level, _keep(level, moved), moved.transition))
        moved = _move(moved, level)
    transition = moved.transition
    grad = _Moved(
        torch.zeros_like(x.q),
        torch.zeros_like(x.k),
        None if transition is None else torch.zeros_like(transition),
    )
    dv = torch.zeros_like(x.v)
    dlog_forget = None if x.log_forget is None else torch.zeros_like(x.log_forget)
    while kept:
        level, operands, transition = kept.pop()
        dtransitions = []
        for n, (pairs, (q_right, k_left)) in enumerate(zip(level, operands, strict=True)):
            if transition is not None and grad.transition is not None:
                first = pairs.first // 2
                above = grad.transition[:, first : first + pairs.count]
                pair = _move_backward(pairs, q_right, k_left, transition, grad, above)
                dtransitions.append(torch.stack(pair, 2).flatten(1, 2))
            _meeting_backward(pairs, q_right, k_left, x, top, grad, dv, dlog_forget)
            operands[n] = None
        if transition is not None and grad.transition is not None:
            if transition.shape[1] % 2:
                dtransitions.append(grad.transition[:, -1:])
            grad = grad._replace(transition=torch.cat(dtransitions, 1))
    dq, dk, dw, dbeta = _blocks_backward(group.block, block, x, top, grad, dv, dlog_forget)
    return dq * scale, dk, dv[..., :DV], dw, dbeta, dlog_forget


def _keep(level: list[_Pairs], moved: _Moved) -> list:
    """What a level's backward needs of the moved queries and keys, before the next move."""
    parts = [(pairs.right_of(moved.q), pairs.left_of(moved.k)) for pairs in level]
    return parts if moved.transition is None else [(q.clone(), k.clone()) for q, k in parts]


def _meeting_backward(pairs, q_right, k_left, x: Heads, top: _Top, grad, dv, dlog_forget) -> None:
    """Add a meeting's gradients to those of its queries, keys, values and gates, in place."""
    G, D = x.q.shape[1], x.q.shape[-1]
    meeting = _meet(q_right, k_left, pairs.left_of(x.v), _gates(pairs, x.log_forget))
    E = meeting.q.shape[-1]
    dq, dk, dv_left = dense.attend_backward(
        _fold(pairs.right_of(top.grad_out), E),
        *meeting,
        _fold(pairs.right_of(top.out), E),
        _fold(pairs.right_of(top.lse[..., None]), 1)[..., 0],
        causal=False,
    )
    dq = _unfold(dq, G)
    pairs.right_of(grad.q).add_(dq[..., :D])
    pairs.left_of(grad.k).add_(dk[..., :D])
    pairs.left_of(dv).add_(dv_left[..., : dv.shape[-1]])
    if dlog_forget is not None:
        # A right gate is in the scores of the queries from it on, a left one in earlier keys'.
        rows, columns = dq[..., D : D + 1], dk[..., D + 1 : D + 1 + G].movedim(-1, 1)[..., None]
        gates = dlog_forget[..., None]
        pairs.right_of(gates).add_(rows.flip(-2).cumsum(-2).flip(-2))
        pairs.left_of(gates)[..., 1:, :].add_(columns.cumsum(-2)[..., :-1, :])


def _blocks_backward(n: int, block, x: Heads, top: _Top, grad: _Moved, dv, dlog_forget):
    """Through the blocks: gradients of q, k, w, β; dv and dlog_forget add up in place."""
    grad_out, out = _blocks(top.grad_out, n), _blocks(top.out, n)
    log_forget = None if x.log_forget is None else x.log_forget.unflatten(-1, (-1, n))
    dscores, dv_block, dgates = ut_transform.attend_backward(
        block,
        _blocks(x.v, n),
        log_forget,
        grad_out,
        (grad_out * out).sum(-1),
        top.lse.unflatten(-1, (-1, n)),
    )
    dv.add_(dv_block.flatten(1, 2))
    if dlog_forget is not None and dgates is not None:
        dlog_forget.add_(dgates.flatten(2, 3))
    dq, dk, dw, dbeta = ut_transform.backward(
        block, dscores, _blocks(grad.q, n), _blocks(grad.k, n), grad.transition
    )
    dw = None if dw is None else dw.flatten(1, 2)
    dbeta = None if dbeta is None else dbeta.flatten(1, 2)
    return dq.flatten(2, 3), dk.flatten(1, 2), dw, dbeta


def _is_plain(x: Heads) -> bool:
    return x.w is None and x.log_forget is None


def _plain(x: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Operands of plain causal attention, [N, G, L, E] with the key head repeated as a view."""
    E = max(x.q.shape[-1], x.v.shape[-1])
    q, k, v = _widen(x.q, E), _widen(x.k, E)[:, None], _widen(x.v, E)[:, None]
    shape = q.shape[:3]
    return q, k.expand(*shape[:2], -1, -1), v.expand(*shape[:2], -1, -1)
