"""Householder directions over a sequence that lies on several processes."""

from __future__ import annotations

from torch import Tensor

from path_attention.ops.context_split import ContextSplit, uncompiled
from path_attention.ops.directions import householder_directions


@uncompiled
def directions_over_runs(
    x: Tensor, weight: Tensor | None, heads: int, *, split: ContextSplit
) -> Tensor:
    """`householder_directions` of this process's tokens; the convolution reaches over the cuts.

    Every process must call it, forward and backward, in the same order.

    Args:
        x, weight, heads: as there, x of this process's tokens `[B, tokens, C]`.
        split: the whole sequence's; B = 1 if it has packed documents.

    Returns:
        w `[B, tokens, H, D]`, float32 (float64 for a float64 x).

    Raises:
        ValueError: naming the argument, what came, and what was expected.
    """
    split.check_tokens("x", x)
    reach = 0 if weight is None else weight.shape[1] - 1
    if not reach:
        return householder_directions(x, weight, heads)
    packing = split.extended_packing(reach, x.device)
    w = householder_directions(split.extend(x, reach), weight, heads, packing=packing)
    return split.drop(w, reach)
