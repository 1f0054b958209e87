"""PaTH attention in plain PyTorch: linear memory, any device, its own backward.

docs/algorithm.md §2–§4. Blocks of 64 tokens are solved with the UT transform; then units of 64,
128, 256, … tokens meet in pairs. Queries of a pair's right unit, moved to its start, meet keys of
the left unit, moved to its end, which is the same place: the scores between them are a plain
product, and their share of the softmax is any attention kernel's. After each meeting the keys move
on to the pair's end and the queries back to its start. So every score is computed once, by the
library's own attention kernel where it has one, and transport costs O(T·D²·log T) in all.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from path_attention.ops import dense, ut_transform
from path_attention.ops.arguments import LOWEST_LOG_FORGET
from path_attention.ops.gradients import register_gradients
from path_attention.ops.packing import Packing
from path_attention.ops.sequences import Group, Heads, gather, make_groups, scatter, to_heads

BLOCK = 64


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
        log_forget = log_forget.to(dtype).clamp(min=LOWEST_LOG_FORGET)
    if w is not None and beta is not None and w.dim() == 5:
        w, beta = w.flatten(2, 3), beta.flatten(2, 3)
    tensors = (None if x is None else x.to(dtype) for x in (q, k, v, w, beta, log_forget))
    out, lse = _forward(*tensors, scale, None if packing is None else packing.cu_seqlens)
    return out.to(q.dtype), lse


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
        scatter(group, lse[..., None], group_lse)
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
    B, T, H, _ = k.shape
    inputs = (q, k, v, w, beta, log_forget)
    grads = [q.new_empty(0 if x is None else x.shape) for x in inputs]
    # Users call backward inside autocast too, which would round every product in here.
    with torch.autocast(q.device.type, enabled=False):
        for group in make_groups(cu_seqlens, B, T, _unit(w, log_forget)):
            x = gather(group, *inputs)
            top = _Top(
                to_heads(group, grad_out, H),
                None if grad_lse is None else to_heads(group, grad_lse[..., None], H),
                to_heads(group, out, H),
                to_heads(group, lse[..., None], H)[..., 0],
            )
            parts = _attend_group_backward(group, x, top, scale)
            for grad, part in zip(grads, parts, strict=True):
                if part is not None:
                    scatter(group, grad if grad.dim() == 4 else grad[..., None], part)
    return tuple(grads)  # type: ignore[return-value]


@_backward.register_fake
def _(grad_out, grad_lse, q, k, v, w, beta, log_forget, out, lse, scale, cu_seqlens):
    return tuple(q.new_empty(0 if x is None else x.shape) for x in (q, k, v, w, beta, log_forget))


register_gradients(_forward, _backward, "blockwise")


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
    length: int  # L, tokens of the sequence

    def left_of(self, x: Tensor) -> Tensor:
        """[N, L·rows, E] → [N, count, size·rows, E], a view."""
        split, rows = self._split(x)
        return split[..., : self.size * rows, :]

    def right_of(self, x: Tensor) -> Tensor:
        """[N, L·rows, E] → [N, count, right·rows, E], a view."""
        split, rows = self._split(x)
        return split[..., self.size * rows :, :]

    def transitions_of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[N, units, D, D] → the left and the right units', [N, count, D, D] each, views."""
        x = x[:, self.first : self.first + 2 * self.count].unflatten(1, (self.count, 2))
        return x[:, :, 0], x[:, :, 1]

    def _split(self, x: Tensor) -> tuple[Tensor, int]:
        rows = x.shape[1] // self.length
        each = (self.size + self.right) * rows
        x = x[:, self.start * rows : self.start * rows + self.count * each]
        return x.unflatten(1, (self.count, each)), rows


def _levels(group: Group) -> list[list[_Pairs]]:
    """From one block to the whole: the full pairs, then one whose right unit is shorter."""
    size, L, levels = group.block, group.length, []
    while size < L:
        full = L // (2 * size)
        rest = L - full * 2 * size
        pairs = [_Pairs(0, 0, full, size, size, L)] if full else []
        if rest > size:
            pairs.append(_Pairs(full * 2 * size, 2 * full, 1, size, rest - size, L))
        levels.append(pairs)
        size *= 2
    return levels


class _Moved(NamedTuple):
    """Queries at their unit's start, keys at their unit's end, and the units' transitions."""

    q: Tensor  # [N, L·G, D]
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
        q_right.copy_(q_right @ left.mT)
        k_left.copy_(k_left @ right)
        units.append(left @ right)
    if transition.shape[1] % 2:
        units.append(transition[:, -1:])
    return _Moved(q, k, torch.cat(units, 1))


def _move_backward(
    level: list[_Pairs], operands: _Operands, transition: Tensor | None, grad: _Moved
) -> _Moved:
    """Undo a level's move: q' = q P_leftᵀ, k' = k P_right, P' = P_left P_right; in place."""
    if transition is None or grad.transition is None:
        return grad
    units = []
    for pairs, (q_right, k_left) in zip(level, operands, strict=True):
        left, right = pairs.transitions_of(transition)
        above = grad.transition[:, pairs.first // 2 :][:, : pairs.count]
        dq, dk = pairs.right_of(grad.q), pairs.left_of(grad.k)
        dleft = dq.mT @ q_right + above @ right.mT
        dright = k_left.mT @ dk + left.mT @ above
        units.append(torch.stack([dleft, dright], 2).flatten(1, 2))
        dq.copy_(dq @ left)
        dk.copy_(dk @ right.mT)
    if transition.shape[1] % 2:
        units.append(grad.transition[:, -1:])
    return grad._replace(transition=torch.cat(units, 1))


# --- A meeting: right queries and left keys at the border between them ---------------------------


class _Meeting(NamedTuple):
    """What the attention kernel gets, of one head size E; the gates ride in columns of their own.

    q' = [q, decay from border to query, 1 at the query's place in its group],
    k' = [k, 1, decay from key to border for each of the group], so that q'·k' holds the gate.
    """

    q: Tensor  # [N, count, right·G, E]
    k: Tensor  # [N, count, size, E]
    v: Tensor  # [N, count, size, E]


def _meet(pairs: _Pairs, q_right: Tensor, k_left: Tensor, x: Heads) -> _Meeting:
    if x.log_forget is not None:
        # Sums of terms of one sign, kept apart: their rounding is small beside the decay itself.
        from_border = pairs.right_of(x.log_forget).cumsum(-2)  # [N, count, right, G]
        after = F.pad(pairs.left_of(x.log_forget)[..., 1:, :], (0, 0, 0, 1))
        to_border = after.flip(-2).cumsum(-2).flip(-2)  # [N, count, size, G]
        place = torch.eye(from_border.shape[-1], dtype=q_right.dtype, device=q_right.device)
        place = place.repeat(pairs.right, 1).expand(*q_right.shape[:-1], -1)
        q_right = torch.cat([q_right, from_border.flatten(-2)[..., None], place], -1)
        k_left = torch.cat([k_left, torch.ones_like(k_left[..., :1]), to_border], -1)
    v_left = pairs.left_of(x.v)
    E = max(q_right.shape[-1], v_left.shape[-1])
    return _Meeting(_widen(q_right, E), _widen(k_left, E), _widen(v_left, E))


def _widen(x: Tensor, E: int) -> Tensor:
    return F.pad(x, (0, E - x.shape[-1])) if x.shape[-1] < E else x


# --- One group of sequences ----------------------------------------------------------------------


def _blocks(group: Group, x: Tensor) -> Tensor:
    """[N, L·rows, ·] → [N, blocks, n·rows, ·], a view."""
    return x.unflatten(1, (group.length // group.block, -1))


def _solve(group: Group, x: Heads) -> ut_transform.Block:
    w = None if x.w is None else _blocks(group, x.w)
    beta = None if x.beta is None else _blocks(group, x.beta)
    return ut_transform.solve(_blocks(group, x.q), _blocks(group, x.k), w, beta)


def _start(block: ut_transform.Block) -> _Moved:
    q, k, transition = ut_transform.move(block)
    return _Moved(q.flatten(1, 2), k.flatten(1, 2), transition)


def _attend_group(group: Group, x: Heads, scale: float) -> tuple[Tensor, Tensor]:
    """Output [N, L·G, DV] and log-sum-exp [N, L·G, 1] of one group of sequences."""
    x = x._replace(q=x.q * scale)
    DV = x.v.shape[-1]
    if _is_plain(x):
        out, lse = dense.attend(*_plain(x), causal=True)
        return _rows(out[..., :DV]), _rows(lse[..., None])
    block = _solve(group, x)
    log_forget = None if x.log_forget is None else _blocks(group, x.log_forget)
    out, lse = ut_transform.attend(block, _blocks(group, x.v), log_forget)
    out, lse = out.flatten(1, 2), lse.flatten(1, 2)[..., None]
    moved, levels = _start(block), _levels(group)
    del block
    for depth, level in enumerate(levels, 1):
        for pairs in level:
            meeting = _meet(pairs, pairs.right_of(moved.q), pairs.left_of(moved.k), x)
            part, part_lse = dense.attend(*meeting, causal=False)
            part, part_lse = part[..., :DV], part_lse[..., None]
            rows, rows_lse = pairs.right_of(out), pairs.right_of(lse)
            merged = torch.logaddexp(rows_lse, part_lse)
            rows.mul_((rows_lse - merged).exp_()).add_(part * (part_lse - merged).exp_())
            rows_lse.copy_(merged)
        if depth < len(levels):
            moved = _move(moved, level)
    return out, lse


class _Top(NamedTuple):
    """What arrives from above in the backward pass, head-major like `Heads`."""

    grad_out: Tensor  # [N, L·G, DV]
    grad_lse: Tensor | None  # [N, L·G, 1]
    out: Tensor  # [N, L·G, DV]
    lse: Tensor  # [N, L·G]


def _attend_group_backward(
    group: Group, x: Heads, top: _Top, scale: float
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, w, β, log f, as `scatter` takes them; all is recomputed from inputs."""
    x = x._replace(q=x.q * scale)
    DV = x.v.shape[-1]
    if top.grad_lse is not None:
        # δ = rowsum(grad_out · out) − grad_lse: a column in which v is zero brings the second term.
        top = top._replace(
            grad_out=F.pad(top.grad_out, (0, 1), value=1.0),
            out=torch.cat([top.out, -top.grad_lse], -1),
        )
        x = x._replace(v=F.pad(x.v, (0, 1)))
    if _is_plain(x):
        return _plain_backward(x, top, DV, scale)
    block = _solve(group, x)
    levels, kept, moved = _levels(group), [], _start(block)
    for depth, level in enumerate(levels, 1):
        kept.append((_keep(level, moved, depth < len(levels)), moved.transition))
        if depth < len(levels):
            moved = _move(moved, level)
    grad = _Moved(
        torch.zeros_like(x.q),
        torch.zeros_like(x.k),
        None if moved.transition is None else torch.zeros_like(moved.transition),
    )
    del moved
    dv = torch.zeros_like(x.v)
    dlog_forget = None if x.log_forget is None else torch.zeros_like(x.log_forget)
    for depth in range(len(levels), 0, -1):
        level, (operands, transition) = levels[depth - 1], kept.pop()
        if depth < len(levels):
            grad = _move_backward(level, operands, transition, grad)
        for pairs, (q_right, k_left) in zip(level, operands, strict=True):
            _meeting_backward(pairs, q_right, k_left, x, top, grad, dv, dlog_forget)
        del operands, q_right, k_left
    dq, dk, dw, dbeta = _blocks_backward(group, block, x, top, grad, dv, dlog_forget)
    if dlog_forget is not None:
        dlog_forget = dlog_forget.flatten(1, 2)[..., None]
    return dq * scale, dk, dv[..., :DV], dw, dbeta, dlog_forget


_Operands = list[tuple[Tensor, Tensor]]  # of each of a level's pairs: right queries, left keys


def _keep(level: list[_Pairs], moved: _Moved, moves_on: bool) -> _Operands:
    """What a level's backward needs of the moved queries and keys, before the next move."""
    parts = [(pairs.right_of(moved.q), pairs.left_of(moved.k)) for pairs in level]
    if moved.transition is None or not moves_on:
        return parts
    return [(q.clone(), k.clone()) for q, k in parts]


def _meeting_backward(pairs, q_right, k_left, x: Heads, top: _Top, grad, dv, dlog_forget) -> None:
    """Add a meeting's gradients to those of its queries, keys, values and gates, in place."""
    D = x.q.shape[-1]
    meeting = _meet(pairs, q_right, k_left, x)
    E = meeting.q.shape[-1]
    dq, dk, dv_left = dense.attend_backward(
        _widen(pairs.right_of(top.grad_out), E),
        *meeting,
        _widen(pairs.right_of(top.out), E),
        pairs.right_of(top.lse[..., None])[..., 0],
        causal=False,
    )
    pairs.right_of(grad.q).add_(dq[..., :D])
    pairs.left_of(grad.k).add_(dk[..., :D])
    pairs.left_of(dv).add_(dv_left[..., : dv.shape[-1]])
    if dlog_forget is not None:
        # A right gate is in the scores of the queries from it on, a left one in earlier keys'.
        G = dlog_forget.shape[-1]
        rows, columns = dq[..., D].unflatten(-1, (-1, G)), dk[..., D + 1 : D + 1 + G]
        pairs.right_of(dlog_forget).add_(rows.flip(-2).cumsum(-2).flip(-2))
        pairs.left_of(dlog_forget)[..., 1:, :].add_(columns.cumsum(-2)[..., :-1, :])


def _blocks_backward(group: Group, block, x: Heads, top: _Top, grad: _Moved, dv, dlog_forget):
    """Through the blocks: gradients of q, k, w, β; dv and dlog_forget add up in place."""
    grad_out, out = _blocks(group, top.grad_out), _blocks(group, top.out)
    dscores, dv_block, dgates = ut_transform.attend_backward(
        block,
        _blocks(group, x.v),
        None if x.log_forget is None else _blocks(group, x.log_forget),
        grad_out,
        (grad_out * out).sum(-1),
        _blocks(group, top.lse),
    )
    dv.add_(dv_block.flatten(1, 2))
    if dlog_forget is not None and dgates is not None:
        dlog_forget.add_(dgates.flatten(1, 2))
    dq, dk, dw, dbeta = ut_transform.backward(
        block, dscores, _blocks(group, grad.q), _blocks(group, grad.k), grad.transition
    )
    dw = None if dw is None else dw.flatten(1, 2)
    dbeta = None if dbeta is None else dbeta.flatten(1, 2)[..., None]
    return dq.flatten(1, 2), dk.flatten(1, 2), dw, dbeta


# --- No transport and no gates: plain causal attention -------------------------------------------


def _is_plain(x: Heads) -> bool:
    return x.w is None and x.log_forget is None


def _plain(x: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Operands of plain causal attention, [N, G, L, E] with the key head repeated as a view."""
    E, L = max(x.q.shape[-1], x.v.shape[-1]), x.k.shape[1]
    q = _by_head(_widen(x.q, E), L)
    k, v = (_widen(y, E)[:, None].expand(-1, q.shape[1], -1, -1) for y in (x.k, x.v))
    return q, k, v


def _plain_backward(x: Heads, top: _Top, DV: int, scale: float) -> tuple[Tensor | None, ...]:
    q, k, v = _plain(x)
    E, L = q.shape[-1], x.k.shape[1]
    grad_out, out, lse = (
        _by_head(y, L) for y in (_widen(top.grad_out, E), _widen(top.out, E), top.lse[..., None])
    )
    dq, dk, dv = dense.attend_backward(grad_out, q, k, v, out, lse[..., 0], causal=True)
    D = x.q.shape[-1]
    return _rows(dq[..., :D]) * scale, dk.sum(1)[..., :D], dv.sum(1)[..., :DV], None, None, None


def _by_head(x: Tensor, L: int) -> Tensor:
    """[N, L·G, E] → [N, G, L, E]."""
    return x.unflatten(1, (L, -1)).transpose(1, 2)


def _rows(x: Tensor) -> Tensor:
    """[N, G, L, E] → [N, L·G, E]."""
    return x.transpose(1, 2).flatten(1, 2)
