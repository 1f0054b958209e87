"""Attention over a sequence that lies on several devices: docs/algorithm.md §6.

Each run of tokens is a unit. Inside it, `path_attention` does everything. Between runs X > Y, with
X's queries q̃ at X's start, Y's keys k̃ at Y's end and M the product of the transitions between,

    score_ij = scale · k̃_jᵀ M q̃_i + gates from j to Y's end, between, and from X's start to i

is a plain rectangle of scores. Keys, values and gates travel round the ring of processes; partial
results merge by log-sum-exp. In the backward pass their gradients travel along and arrive at home.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from path_attention.ops.arguments import (
    LOWEST_LOG_FORGET,
    cast_as_autocast_does,
    check_tensors,
    unit_directions,
)
from path_attention.ops.context_ring import Block, Pair, Ring, pairs
from path_attention.ops.context_split import (
    ContextSplit,
    attend_runs,
    gather_runs,
    sum_runs,
    uncompiled,
)
from path_attention.ops.path import path_attention
from path_attention.ops.rectangle import Rectangle
from path_attention.ops.transport import chunk_transport


@uncompiled
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None = None,
    beta: Tensor | None = None,
    log_forget: Tensor | None = None,
    *,
    split: ContextSplit,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`path_attention` over the tokens of all processes of a group; each gives and gets its own.

    Every process must call it, forward and backward, in the same order. Memory a process is
    O(T/R): keys go round a ring. On CUDA the rectangles between runs are flash attention's in 16
    bits; float32 and float64 are computed by plain products there.

    Args:
        q, k, v, w, beta, log_forget, scale, implementation: as in `path_attention`, of this
            process's tokens (`split.take`).
        split: the whole sequence's, with its packed documents (B = 1 then) if it has any.
        return_lse: also return the log-sum-exp.

    Returns:
        `[B, tokens, HQ, DV]` in q's dtype; with `return_lse` also `[B, tokens, HQ]` in float32
        (float64 for float64 inputs). Both are differentiable once.

    Raises:
        ValueError: naming the argument, what came, and what was expected.
    """
    q, k, v = cast_as_autocast_does(q, k, v)
    check_tensors(q, k, v, w, beta, log_forget)
    split.check_tokens("q", q)
    scale = float(q.shape[3] ** -0.5 if scale is None else scale)
    w = unit_directions(w)

    def attend(*x: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
        options |= {"scale": scale, "implementation": implementation}
        return path_attention(*x, return_lse=True, **options)  # type: ignore[arg-type]

    with torch.autocast(q.device.type, enabled=False):
        inputs = (q, k, v, w, beta, log_forget)
        out, lse = attend_runs(attend, inputs, split)
        heads, tails = _borders(inputs, split, scale)
        out, lse = cast(
            tuple[Tensor, Tensor], _Meet.apply(out, lse, split, k.shape[2], *heads, *tails)
        )
    return (out, lse) if return_lse else out


_Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


class _Heads(NamedTuple):
    """What the first pieces of this process's two runs bring to the keys before them."""

    q: Tensor  # [B, heads, HQ, D], both runs', scaled, at their run's start
    decay: Tensor | None  # [B, heads, HQ], gates from their run's start to each


class _Tails(NamedTuple):
    """What the last pieces of this process's two runs are to the queries behind them."""

    k: Tensor  # [B, tails, H, D], both runs', at their run's end
    v: Tensor  # [B, tails, H, DV]
    decay: Tensor | None  # [B, tails, HQ], gates from each to their run's end
    transition: Tensor | None  # [2, B, H, D, D], of runs that a document crosses; else the identity
    total: Tensor | None  # [2, B, HQ], the same of gates


def _borders(inputs: _Inputs, split: ContextSplit, scale: float) -> tuple[_Heads, _Tails]:
    q, k, v, w, beta, log_forget = inputs
    dtype = torch.promote_types(q.dtype, torch.float32)
    if log_forget is not None:
        log_forget = log_forget.to(dtype).clamp(min=LOWEST_LOG_FORGET)
    B, H, D = k.shape[0], k.shape[2], k.shape[3]
    found: dict[str, list[Tensor]] = {
        name: [] for name in ("q", "from", "k", "v", "to", "transition", "total")
    }
    start = 0
    for run in split.runs:
        stop, head, tail = start + split.length(run), split.head(run), split.tail(run)
        first, last = slice(start, start + head), slice(stop - tail, stop)
        moved = _move(q, k, w, beta, first, last)
        found["q"].append(moved[0].to(dtype) * scale)
        found["k"].append(moved[1].to(k.dtype))
        found["v"].append(v[:, last])
        if w is not None:
            eye = torch.eye(D, dtype=dtype, device=q.device).expand(B, H, D, D)
            found["transition"].append(moved[2] if split.whole(run) else eye)
        if log_forget is not None:
            found["from"].append(log_forget[:, first].cumsum(1))
            after = torch.nn.functional.pad(log_forget[:, last][:, 1:], (0, 0, 0, min(tail, 1)))
            found["to"].append(after.flip(1).cumsum(1).flip(1))
            found["total"].append(
                log_forget[:, start:stop].sum(1) if split.whole(run) else log_forget[:, 0] * 0
            )
        start = stop

    def joined(name: str) -> Tensor | None:
        return torch.cat(found[name], 1) if found[name] else None

    def stacked(name: str) -> Tensor | None:
        return torch.stack(found[name]) if found[name] else None

    heads = _Heads(torch.cat(found["q"], 1), joined("from"))
    tails = _Tails(
        torch.cat(found["k"], 1),
        torch.cat(found["v"], 1),
        joined("to"),
        stacked("transition"),
        stacked("total"),
    )
    return heads, tails


def _move(
    q: Tensor, k: Tensor, w: Tensor | None, beta: Tensor | None, head: slice, tail: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of a run's head at its start, keys of its tail at its end, the tail's transition."""
    if w is None or beta is None:
        return q[:, head], k[:, tail], q
    if head == tail and head.stop > head.start:
        return chunk_transport(q[:, head], k[:, tail], w[:, tail], beta[:, tail])
    # Without tokens there is nothing to move, and the empty slice keeps the graph.
    q_start, k_end, transition = q[:, head], k[:, tail], q
    if head.stop > head.start:
        q_start = chunk_transport(q[:, head], k[:, head], w[:, head], beta[:, head])[0]
    if tail.stop > tail.start:
        _, k_end, transition = chunk_transport(
            q[:, tail, :0], k[:, tail], w[:, tail], beta[:, tail]
        )
    return q_start, k_end, transition


# --- Runs meet -----------------------------------------------------------------------------------


class _Meet(torch.autograd.Function):
    """Merge each head's own attention with all the keys before its run.

    One function for all, so that every process takes part in every exchange, whatever of it needs
    a gradient there.
    """

    @staticmethod
    def forward(ctx: Any, out, lse, split: ContextSplit, H: int, *parts: Tensor | None):
        heads, tails = _unpack(parts)
        routes = _Routes.of(split, tails)
        merged, merged_lse = out.clone(), lse.clone()
        own, own_lse = split.take_heads(out), split.take_heads(lse)
        o, l = own.to(lse.dtype, copy=True), own_lse.clone()
        ring = Ring(split, Block(tails.k, tails.v, tails.decay))
        for owner, block in ring.rounds():
            for pair in pairs(split, owner):
                rectangle = routes.rectangle(pair, heads, block, H)
                part, part_lse = rectangle.attend()
                both = torch.logaddexp(l[:, pair.rows], part_lse)
                o[:, pair.rows] = o[:, pair.rows] * (l[:, pair.rows] - both).exp()[..., None]
                o[:, pair.rows] += part.to(o.dtype) * (part_lse - both).exp()[..., None]
                l[:, pair.rows] = both
        o = o.to(out.dtype)
        split.put_heads(merged, o)
        split.put_heads(merged_lse, l)
        ctx.save_for_backward(own, own_lse, o, l, *parts)
        ctx.split, ctx.H, ctx.shape = split, H, out.shape
        ctx.set_materialize_grads(False)
        return merged, merged_lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None):
        own, own_lse, out, lse, *parts = ctx.saved_tensors
        split, (heads, tails) = ctx.split, _unpack(parts)
        whole = out.new_zeros(ctx.shape) if grad_out is None else grad_out.contiguous().clone()
        whole_lse = lse.new_zeros(ctx.shape[:3]) if grad_lse is None else grad_lse.clone()
        top, top_lse = split.take_heads(whole), split.take_heads(whole_lse)
        given_lse = grad_lse is not None
        share = (own_lse - lse).exp()
        apart = ((own.to(lse.dtype) - out.to(lse.dtype)) * top).sum(-1)
        own_grad, own_grad_lse = share[..., None] * top, share * (apart + top_lse)

        grads = _Gradients.of(split, heads, tails)
        if grads.decay is not None:
            grads.decay.copy_(top_lse - own_grad_lse)  # all of a row's scores sum to top_lse
        routes = _Routes.of(split, tails)
        ring = Ring(split, Block(tails.k, tails.v, tails.decay))
        for owner, block in ring.rounds():
            travelling = block.map(lambda x: x.new_zeros(x.shape, dtype=lse.dtype))
            for pair in pairs(split, owner):
                part = routes.rectangle(pair, heads, block, ctx.H).backward(
                    top[:, pair.rows],
                    out[:, pair.rows],
                    lse[:, pair.rows],
                    top_lse[:, pair.rows] if given_lse else None,
                )
                routes.add(grads, pair, heads, part.q, part.decay)
                travelling.k[:, pair.columns] += part.k
                travelling.v[:, pair.columns] += part.v
                if travelling.decay is not None and part.decay is not None:
                    travelling.decay[:, pair.columns] += part.decay
            ring.pass_on(travelling)
        home = ring.home()
        d_transition, d_total = routes.close(grads)
        split.put_heads(whole, own_grad)
        split.put_heads(whole_lse, own_grad_lse)
        d_tails = (home.k.to(tails.k.dtype), home.v.to(tails.v.dtype), home.decay)
        return whole, whole_lse, None, None, grads.q, grads.decay, *d_tails, d_transition, d_total


def _unpack(parts: Sequence[Any]) -> tuple[_Heads, _Tails]:
    return _Heads(*parts[:2]), _Tails(*parts[2:])


class _Gradients(NamedTuple):
    """What a backward pass adds up on this process."""

    q: Tensor
    decay: Tensor | None
    moves: list[list[Tensor]] | None  # [slot][step], of M
    between: list[list[Tensor]] | None  # the same of the gates between

    @classmethod
    def of(cls, split: ContextSplit, heads: _Heads, tails: _Tails) -> _Gradients:
        steps = [len(split.reach(run)) for run in split.runs]

        def zeros(x: Tensor | None) -> list[list[Tensor]] | None:
            if x is None:
                return None
            return [[torch.zeros_like(x[0]) for _ in range(count)] for count in steps]

        decay = None if heads.decay is None else torch.zeros_like(heads.decay)
        return cls(torch.zeros_like(heads.q), decay, zeros(tails.transition), zeros(tails.total))


class _Routes:
    """What lies between this process's runs and each earlier one that they reach.

    moves[slot][step] is the product M of the `step` transitions between, between[slot][step] the
    sum of their gates.
    """

    def __init__(self, split, transitions, totals, moves, between) -> None:
        self.split, self.transitions, self.totals = split, transitions, totals
        self.moves, self.between = moves, between

    @classmethod
    def of(cls, split: ContextSplit, tails: _Tails) -> _Routes:
        transitions = totals = None
        moves: list[list[Tensor]] = [[], []]
        between: list[list[Tensor]] = [[], []]
        if tails.transition is not None:
            transitions = gather_runs(tails.transition, split)
            eye = torch.eye(
                transitions.shape[-1], dtype=transitions.dtype, device=transitions.device
            )
            for slot, run in enumerate(split.runs):
                product = eye.expand_as(transitions[0])
                for other in split.reach(run):
                    moves[slot].append(product)
                    product = transitions[other] @ product
        if tails.total is not None:
            totals = gather_runs(tails.total, split)
            for slot, run in enumerate(split.runs):
                total = torch.zeros_like(totals[0])
                for other in split.reach(run):
                    between[slot].append(total)
                    total = total + totals[other]
        return cls(split, transitions, totals, moves, between)

    def rectangle(self, pair: Pair, heads: _Heads, block: Block, H: int) -> Rectangle:
        """The scores of a pair: queries moved on to the keys' place, in the keys' dtype."""
        q = heads.q[:, pair.rows]
        if pair.step and self.transitions is not None:
            q = torch.einsum(
                "bhde,bthge->bthgd", self.moves[pair.slot][pair.step], q.unflatten(2, (H, -1))
            )
            q = q.flatten(2, 3)
        decay = columns = None
        if heads.decay is not None and block.decay is not None:
            decay = heads.decay[:, pair.rows] + self.between[pair.slot][pair.step][:, None]
            columns = block.decay[:, pair.columns]
        k, v = block.k[:, pair.columns], block.v[:, pair.columns]
        return Rectangle(q.to(k.dtype), k, v, decay, columns)

    def add(
        self, grads: _Gradients, pair: Pair, heads: _Heads, dq: Tensor, ddecay: Tensor | None
    ) -> None:
        """Add what a rectangle's gradients are to this process's queries, moves and gates."""
        if pair.step and grads.moves is not None:
            move = self.moves[pair.slot][pair.step]
            H = move.shape[1]
            above = dq.unflatten(2, (H, -1))
            below = heads.q[:, pair.rows].unflatten(2, (H, -1))
            grads.moves[pair.slot][pair.step] += torch.einsum("bthgd,bthge->bhde", above, below)
            dq = torch.einsum("bhde,bthgd->bthge", move, above).flatten(2, 3)
        grads.q[:, pair.rows] += dq
        if grads.between is not None and ddecay is not None:
            grads.between[pair.slot][pair.step] += ddecay.sum(1)

    def close(self, grads: _Gradients) -> tuple[Tensor | None, Tensor | None]:
        """From M and the gates between to this process's transitions and totals."""
        split, d_transition, d_total = self.split, None, None
        if self.transitions is not None and grads.moves is not None:
            all_transitions = torch.zeros_like(self.transitions)
            for slot, run in enumerate(split.runs):
                reach, above = split.reach(run), None
                for step in range(len(reach) - 1, 0, -1):  # M_step = P_nearer M_nearer
                    own = grads.moves[slot][step]
                    above = own if above is None else above + own
                    nearer = reach[step - 1]
                    all_transitions[nearer] += above @ self.moves[slot][step - 1].mT
                    above = self.transitions[nearer].mT @ above
            d_transition = sum_runs(all_transitions, split)
        if self.totals is not None and grads.between is not None:
            all_totals = torch.zeros_like(self.totals)
            for slot, run in enumerate(split.runs):
                reach = split.reach(run)
                for step in range(1, len(reach)):
                    for nearer in reach[:step]:
                        all_totals[nearer] += grads.between[slot][step]
            d_total = sum_runs(all_totals, split)
        return d_transition, d_total
