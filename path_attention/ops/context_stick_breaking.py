"""Stick-breaking attention over a sequence that lies on several processes: docs/algorithm.md §6.

Each run of tokens attends itself. What it leaves of its sticks, the runs before it break, nearest
first: runs of keys Y (near) and Z (far) of a walk combine as

    o = o_Y + R_Y o_Z,   R = R_Y R_Z

which is associative: the ring brings keys in an order of its own, neighbours are joined as they
come, and at most two stretches of keys wait for what lies between them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from path_attention.ops.arguments import cast_as_autocast_does, check_tensors
from path_attention.ops.context_ring import Block, Pair, Ring, pairs
from path_attention.ops.context_split import ContextSplit, attend_runs, uncompiled
from path_attention.ops.stick_breaking import choose, stick_breaking_attention
from path_attention.ops.stick_rectangle import StickRectangle


@uncompiled
def context_parallel_stick_breaking(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    split: ContextSplit,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`stick_breaking_attention` over the tokens of all processes of a group.

    Each process gives and gets its own tokens; every one must call it, forward and backward, in
    the same order. Keys go round a ring, once forward and twice backward. What is kept for the
    backward pass is O(T/R) a process; during it, two numbers a query row and run of keys are, O(T).

    Args:
        q, k, v, scale, implementation: as in `stick_breaking_attention`, of this process's tokens
            (`split.take`). Triton's kernels do runs by themselves and what is between them;
            "definition" is for the former alone, the latter is blockwise then.
        split: the whole sequence's, with its packed documents (B = 1 then) if it has any.

    Returns:
        `[B, tokens, HQ, DV]` in q's dtype, and log_remaining `[B, tokens, HQ]` in float32 (float64
        for float64 inputs). Both are differentiable once.

    Raises:
        ValueError: naming the argument, what came, and what was expected.
    """
    q, k, v = cast_as_autocast_does(q, k, v)
    check_tensors(q, k, v)
    split.check_tokens("q", q)
    scale = float(q.shape[3] ** -0.5 if scale is None else scale)

    def attend(*x: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        options |= {"scale": scale, "implementation": implementation}
        return stick_breaking_attention(*x, **options)

    with torch.autocast(q.device.type, enabled=False):
        out, rest = attend_runs(attend, (q, k, v), split)
        parts = (split.take_heads(q), split.take_tails(k), split.take_tails(v))
        how = _How(split, scale, choose(implementation, q, v) == "triton" and q.numel() > 0)
        return cast(tuple[Tensor, Tensor], _Break.apply(out, rest, how, *parts))


class _How(NamedTuple):
    split: ContextSplit
    scale: float
    triton: bool

    def rectangle(self, pair: Pair, q: Tensor, block: Block) -> StickRectangle:
        k, v = block.k[:, pair.columns], block.v[:, pair.columns]
        return StickRectangle(q[:, pair.rows], k, v, self.scale, self.triton)


class _Stretch(NamedTuple):
    """Runs of keys in a row, and what they do to whole sticks."""

    near: int  # how many runs lie between the queries' and the nearest
    far: int  # and the farthest
    out: Tensor  # [B, rows, HQ, DV]
    rest: Tensor  # [B, rows, HQ], log of what they leave


def _join(stretches: list[_Stretch], new: _Stretch) -> list[_Stretch]:
    """Those that come next to each other become one."""
    for old in stretches:
        if old.far + 1 == new.near or new.far + 1 == old.near:
            near, far = sorted((old, new), key=lambda x: x.near)
            out = near.out + near.rest.exp()[..., None] * far.out
            both = _Stretch(near.near, far.far, out, near.rest + far.rest)
            return _join([x for x in stretches if x is not old], both)
    return [*stretches, new]


class _Break(torch.autograd.Function):
    """Let all the keys before its run take their share of what a head's own run left.

    One function for all, so that every process takes part in every exchange, whatever of it needs
    a gradient there.
    """

    @staticmethod
    def forward(ctx: Any, out, rest, how: _How, q, k, v):
        split = how.split
        own, own_rest = split.take_heads(out), split.take_heads(rest)
        stretches: list[list[_Stretch]] = [[], []]
        rows = {}
        ring = Ring(split, Block(k, v, None))
        for owner, block in ring.rounds():
            for pair in pairs(split, owner):
                part = how.rectangle(pair, q, block).attend()
                new = _Stretch(pair.step, pair.step, *part)
                stretches[pair.slot] = _join(stretches[pair.slot], new)
                rows[pair.slot] = pair.rows
        o, r = own.to(rest.dtype, copy=True), own_rest.clone()
        for slot, one in rows.items():
            (whole,) = stretches[slot]
            o[:, one] += own_rest[:, one].exp()[..., None] * whole.out
            r[:, one] += whole.rest
        merged, merged_rest = out.clone(), rest.clone()
        split.put_heads(merged, o.to(out.dtype))
        split.put_heads(merged_rest, r)
        ctx.save_for_backward(own_rest, q, k, v)
        ctx.how, ctx.shape = how, out.shape
        ctx.set_materialize_grads(False)
        return merged, merged_rest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_rest: Tensor | None):
        own_rest, q, k, v = ctx.saved_tensors
        how, split, dtype = ctx.how, ctx.how.split, own_rest.dtype
        whole = q.new_zeros(ctx.shape) if grad_out is None else grad_out
        whole_rest = own_rest.new_zeros(ctx.shape[:3]) if grad_rest is None else grad_rest.clone()
        top, top_rest = split.take_heads(whole), split.take_heads(whole_rest)
        borders = _Borders.of(how, own_rest, q, k, v, top)

        dq = torch.zeros_like(q, dtype=dtype)
        ring = Ring(split, Block(k, v, None))
        for owner, block in ring.rounds():
            travelling = block.map(lambda x: x.new_zeros(x.shape, dtype=dtype))
            for pair in pairs(split, owner):
                rows, columns = pair.rows, pair.columns
                part = how.rectangle(pair, q, block).backward(
                    top[:, rows],
                    *borders.at(pair),
                    None if grad_rest is None else top_rest[:, rows],
                )
                dq[:, rows] += part[0]
                travelling.k[:, columns] += part[1]
                travelling.v[:, columns] += part[2]
            ring.pass_on(travelling)
        home = ring.home()
        split.put_heads(whole_rest, top_rest + borders.beyond)
        grads = (x.to(y.dtype) for x, y in zip((dq, home.k, home.v), (q, k, v), strict=True))
        return whole, whole_rest, None, *grads


class _Borders(NamedTuple):
    """What a walk over all keys knows where it enters each run of them, nearest first.

    Both are sums of terms that each belong to one run: no difference of large sums anywhere.
    """

    taken: list[list[Tensor]]  # [slot][step] −log of what nearer keys left, [B, rows, HQ]
    through: list[list[Tensor]]  # the same: Σ_j A_ij do_i · v_j of that run and all farther ones
    beyond: Tensor  # [B, heads, HQ] that sum of all runs but the queries' own

    @classmethod
    def of(cls, how: _How, own_rest: Tensor, q, k, v, top: Tensor) -> _Borders:
        """From each run's part of the walk, computed again."""
        split = how.split
        count = [len(split.reach(run)) for run in split.runs]
        taken: list[list[Any]] = [[None] * n for n in count]
        through: list[list[Any]] = [[None] * n for n in count]
        rows: dict[int, slice] = {}
        ring = Ring(split, Block(k, v, None))
        for owner, block in ring.rounds():
            for pair in pairs(split, owner):
                out, rest = how.rectangle(pair, q, block).attend()
                taken[pair.slot][pair.step] = -rest
                through[pair.slot][pair.step] = (top[:, pair.rows] * out).sum(-1)
                rows[pair.slot] = pair.rows
        beyond = torch.zeros_like(own_rest)
        for slot, one in rows.items():
            gone = -own_rest[:, one]
            for step in range(count[slot]):  # from the diagonal to the left
                taken[slot][step], gone = gone, gone + taken[slot][step]
                through[slot][step] *= (-taken[slot][step]).exp()
            for step in reversed(range(count[slot] - 1)):
                through[slot][step] += through[slot][step + 1]
            used_up = own_rest[:, one] < math.log(torch.finfo(own_rest.dtype).tiny)
            beyond[:, one] = through[slot][0].masked_fill(used_up, 0)  # kernels skip what asks 0
        return cls(taken, through, beyond)

    def at(self, pair: Pair) -> tuple[Tensor, Tensor]:
        return self.taken[pair.slot][pair.step], self.through[pair.slot][pair.step]
