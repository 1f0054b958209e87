"""Queries meet the keys of the left units: the main loops, forward and backward.

docs/algorithm.md §3, §4. Inside a level this is plain attention without a mask, given what the tree
has moved (`move.py`). The rows of a level that a transition carried on give its gradient. Each loop
has two launches, which take and give the same: here for any GPU, in `hopper.py` for Hopper.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from path_attention.ops.triton.backward import (
    keys_bwd_kernel,
    queries_bwd_kernel,
    transitions_bwd_kernel,
)
from path_attention.ops.triton.call import Call, either, public, stored, strides, vector
from path_attention.ops.triton.forward import meet_fwd_kernel
from path_attention.ops.triton.move import Moved, Softmax, transition_tiles
from path_attention.ops.triton.transition import tree_bwd_kernel


class Top(NamedTuple):
    """What arrives from above: dO [B·T, HQ, DV]; δ and lse (base 2) [HQ, blocks, 64]."""

    grad_out: Tensor
    delta: Tensor
    lse: Tensor


class Partial(NamedTuple):
    """Gradients at the blocks' borders, before they go back through the blocks; float32, scaled."""

    q: Tensor  # [HQ, blocks, 64, DP]
    k: Tensor  # [H, blocks, 64, DP]
    v: Tensor  # [H, blocks, 64, DVP]
    transitions: Tensor  # [H, nodes, DP, DP]
    rows: Tensor  # [HQ, blocks, 64] of the score gradients, with gates
    columns: Tensor


def meet(
    c: Call, moved: Moved, ranges: Tensor, softmax: Softmax, out: Tensor, low: Tensor | None, lse
) -> None:
    """Take every left unit into the softmax begun; write out, its low part and lse."""
    if c.tiles.hopper_forward:
        _hopper().meet(c, moved, ranges, softmax, out, low, lse)
        return
    t, grid = c.tiles, c.grid
    meet_fwd_kernel[(grid.count, c.H * c.G)](
        stored(moved.queries, c.q, t.DP, 64), stored(moved.keys, c.k, t.DP, t.forward_keys),
        public(c.v, t.DVP, t.forward_keys), either(moved.query_gates, ranges),
        vector(either(moved.key_gates, softmax.m), t.forward_keys), ranges, *softmax, out,
        either(low, out), lse, *c.tables, grid.count, grid.queries, grid.keys, grid.levels,
        *strides(out), lse.stride(0), DP=t.DP, DV=t.DV, DVP=t.DVP, BN=t.forward_keys,
        STAGES=t.forward_stages, num_warps=t.forward_warps, LOW=low is not None, **c.kinds,
    )  # fmt: skip


def meet_backward(c: Call, moved: Moved, ranges: Tensor, top: Top) -> Partial:
    grid, t, H, HQ, solved = c.grid, c.tiles, c.H, c.H * c.G, moved.blocks
    blocks, DP = grid.count, t.DP
    gated = (HQ, blocks, 64) if t.gate else (1,)
    partial = Partial(
        c.empty(HQ, blocks, 64, DP),
        c.empty(H, blocks, 64, DP),
        c.empty(H, blocks, 64, t.DVP),
        ranges if solved is None else torch.empty_like(solved.transitions, dtype=torch.float32),
        c.empty(*gated),
        c.empty(*gated).zero_(),
    )
    queries_stage = _hopper().queries_backward if t.hopper_queries else queries_backward
    keys_stage = _hopper().keys_backward if t.hopper_keys else keys_backward
    if solved is None or moved.queries is None or moved.keys is None:
        nothing = c.empty(64, DP, dtype=c.operand)  # a tile that no level writes
        queries_stage(c, moved, ranges, top, partial, nothing)
        keys_stage(c, moved, ranges, top, partial, nothing, nothing)
        return partial
    # What a level's queries, and then its keys, get from the levels above; scales of the latter.
    arriving = c.empty(max(moved.queries.numel(), moved.keys.numel()), dtype=c.operand)
    undo = c.empty(H, max(1, grid.keys))
    queries_stage(c, moved, ranges, top, partial, arriving)
    _sum_transitions(c, arriving, moved.queries, undo, partial.transitions, right=False)
    keys_stage(c, moved, ranges, top, partial, arriving, undo)
    _sum_transitions(c, moved.keys, arriving, undo, partial.transitions, right=True)
    for level in range(grid.levels - 1, 1, -1):
        tree_bwd_kernel[(blocks, H, (DP // 64) ** 2)](
            solved.transitions, partial.transitions, *c.tables, grid.nodes, grid.levels, level,
            DP=DP, DC=64, OPERAND=c.kernel_operand, num_warps=t.tree_warps,
        )  # fmt: skip
    return partial


def _hopper():
    """Its module, loaded where it is used: Gluon is experimental, and others need none of it."""
    from path_attention.ops.triton import hopper

    return hopper


def _options(c: Call) -> dict:
    t = c.tiles
    return dict(DP=t.DP, DVP=t.DVP, OPERAND=c.kernel_operand, maxnreg=t.registers) | c.kinds


def _counts(c: Call) -> tuple[int, ...]:
    return c.grid.count, c.grid.queries, c.grid.keys, c.grid.nodes, c.grid.levels


def queries_backward(c: Call, moved, ranges, top: Top, partial: Partial, arriving: Tensor) -> None:
    """Gradients of the queries; what arrives at a level from those above it, to be summed."""
    t = c.tiles
    queries_bwd_kernel[(c.grid.count, c.H * c.G)](
        stored(moved.queries, c.q, t.DP, 64), stored(moved.keys, c.k, t.DP, t.backward_keys),
        public(c.v, t.DVP, t.backward_keys), public(top.grad_out, t.DVP, 64),
        transition_tiles(c, moved.blocks), either(moved.query_gates, ranges),
        vector(either(moved.key_gates, top.lse), t.backward_keys), ranges, top.lse, top.delta,
        partial.q, arriving, partial.rows, *c.tables, *_counts(c), BN=t.backward_keys,
        STAGES=t.queries_stages, num_warps=t.queries_warps, **_options(c),
    )  # fmt: skip


def keys_backward(
    c: Call, moved, ranges, top: Top, partial: Partial, arriving: Tensor, undo: Tensor
) -> None:
    """Gradients of keys and values; what arrives at a level, scaled, and what undoes that."""
    t = c.tiles
    rows = t.backward_queries
    keys_bwd_kernel[(c.grid.count, c.H)](
        stored(moved.queries, c.q, t.DP, rows), stored(moved.keys, c.k, t.DP, 64),
        public(c.v, t.DVP, 64), public(top.grad_out, t.DVP, rows),
        transition_tiles(c, moved.blocks), either(moved.key_gates, ranges), ranges,
        vector(either(moved.query_gates, top.lse), rows), vector(top.delta, rows),
        partial.k, partial.v, arriving, undo, partial.columns, *c.tables, *_counts(c), BM=rows,
        STAGES=t.keys_stages, num_warps=t.keys_warps, **_options(c),
    )  # fmt: skip


def _sum_transitions(c: Call, a: Tensor, b: Tensor, undo, transitions, right: bool) -> None:
    """Their gradients from a level's rows that they carried on: right units', or left ones'."""
    grid, t = c.grid, c.tiles
    rows, groups = (grid.keys, 1) if right else (grid.queries, c.G)
    transitions_bwd_kernel[(grid.count, c.H, t.DP // 64)](
        a, b, undo, transitions, *c.tables, rows, grid.nodes, grid.levels, G=groups, DP=t.DP,
        RIGHT=int(right), num_warps=t.tree_warps,
    )  # fmt: skip
