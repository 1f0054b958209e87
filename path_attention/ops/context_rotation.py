"""Accumulated rotations over a sequence that lies on several processes.

Inside a run sums start at 0. What a document's sum is when it enters a run is what its part of each
run before it adds: one sum a run, exchanged once. Sums are of integers, so the angles are those of
one device bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from path_attention.ops.context_split import ContextSplit, gather_runs, uncompiled
from path_attention.ops.rotation import running_sum, to_angles, to_units, within_a_turn


@uncompiled
def accumulate_over_runs(angles: Tensor, split: ContextSplit) -> Tensor:
    """`accumulate_angles` of this process's tokens, documents going on from process to process.

    Every process must call it, forward and backward, in the same order.

    Args:
        angles: `[B, tokens, H, P]` in radians, float32 or float64, of this process's tokens.
        split: the whole sequence's; B = 1 if it has packed documents.

    Returns:
        Θ `[B, tokens, H, P]` in the angles' dtype. Differentiable once; gradients are summed in
        float64.

    Raises:
        ValueError: naming the argument, what came, and what was expected.
    """
    if angles.dim() != 4 or angles.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            "angles: expected [B, tokens, H, P] in float32 or float64, "
            f"got {list(angles.shape)} in {angles.dtype}"
        )
    split.check_tokens("angles", angles)
    return _Accumulate.apply(angles, split)  # pyright: ignore[reportReturnType]


class _Accumulate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, angles: Tensor, split: ContextSplit) -> Tensor:
        ctx.split = split
        runs = _split(to_units(angles), split)
        sums = [_sum_pieces(x, split, run) for run, x in zip(split.runs, runs, strict=True)]
        ends = gather_runs(torch.stack([x[:, -1] for x in sums]), split)
        for run, x in zip(split.runs, sums, strict=True):
            for other in split.reach(run):
                x[:, : split.head(run)] += ends[other][:, None]
        return to_angles(within_a_turn(torch.cat(sums, 1)), angles.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        split = ctx.split
        runs = _split(grad.double(), split)
        heads = [x[:, : split.head(run)].sum(1) for run, x in zip(split.runs, runs, strict=True)]
        all_heads = gather_runs(torch.stack(heads), split)
        after = []
        for run, x in zip(split.runs, runs, strict=True):
            sums = _sum_pieces(x.flip(1), split, run, reverse=True).flip(1)
            for later in range(run + 1, 2 * split.count):
                if run in split.reach(later):
                    sums[:, x.shape[1] - split.tail(run) :] += all_heads[later][:, None]
            after.append(sums)
        return torch.cat(after, 1).to(grad.dtype), None


def _split(x: Tensor, split: ContextSplit) -> list[Tensor]:
    return list(x.split([split.length(run) for run in split.runs], 1))


def _sum_pieces(x: Tensor, split: ContextSplit, run: int, *, reverse: bool = False) -> Tensor:
    """Running sums of a run `[B, T, H, P]`, each piece of a document (in reverse order) from 0."""
    total = running_sum(x)
    lengths = [piece.tokens for piece in split.pieces[run]]
    if len(lengths) == 1:
        return total
    lengths = lengths[::-1] if reverse else lengths
    counts = torch.tensor(lengths)
    starts = (counts.cumsum(0) - counts).repeat_interleave(counts).to(x.device)
    return total - (total - x).index_select(1, starts)
