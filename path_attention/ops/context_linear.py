"""Linear attention over a sequence that lies on several processes: docs/algorithm.md §6 and §8.

The state before a run is what the parts of its document in earlier runs add, moved on by the runs
between. Each run's own sum, its transition and its gate's total are exchanged once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from path_attention.ops.arguments import (
    LOWEST_LOG_FORGET,
    cast_as_autocast_does,
    check_tensors,
    unit_directions,
)
from path_attention.ops.context_split import (
    ContextSplit,
    gather_runs_with_gradients,
    uncompiled,
)
from path_attention.ops.linear import linear_attention
from path_attention.ops.transport import chunk_transport

_Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


@uncompiled
def context_parallel_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None = None,
    beta: Tensor | None = None,
    log_forget: Tensor | None = None,
    *,
    split: ContextSplit,
    scale: float | None = None,
) -> Tensor:
    """`linear_attention` over the tokens of all processes of a group; each gives and gets its own.

    Every process must call it, forward and backward, in the same order.

    Args:
        q, k, v, w, beta, log_forget, scale: as in `linear_attention`, of this process's tokens.
        split: the whole sequence's, with its packed documents (B = 1 then) if it has any.

    Returns:
        `[B, tokens, HQ, DV]` in q's dtype. Differentiable once.

    Raises:
        ValueError: naming the argument, what came, and what was expected.
    """
    q, k, v = cast_as_autocast_does(q, k, v)
    check_tensors(q, k, v, w, beta, log_forget)
    split.check_tokens("q", q)
    with torch.autocast(q.device.type, enabled=False):
        w = unit_directions(w)
        sizes = [split.length(run) for run in split.runs]
        tensors = (q, k, v, w, beta, log_forget)
        runs = zip(
            *((None, None) if x is None else x.split(sizes, 1) for x in tensors), strict=True
        )
        inputs: list[_Inputs] = list(runs)
        states = _states(inputs, split)
        outs = []
        for run, tensors, state in zip(split.runs, inputs, states, strict=True):
            packing = split.run_packing(run, q.device)
            if packing is not None:  # the first document's; the others begin in this run
                state = torch.nn.functional.pad(
                    state, (0, 0, 0, 0, 0, 0, 0, len(packing.lengths) - 1)
                )
            out, _ = linear_attention(*tensors, scale=scale, state=state, cu_seqlens=packing)
            outs.append(out)
    return torch.cat(outs, 1)


def _states(inputs: list[_Inputs], split: ContextSplit) -> list[Tensor]:
    """The state before each of this process's runs, `[B, HQ, DV, D]`."""
    ends = [_end(split, run, x) for run, x in zip(split.runs, inputs, strict=True)]
    shapes = [x.shape for x in ends[0]]
    # in one exchange, that every process takes part in, whatever of it its own runs need
    gathered = gather_runs_with_gradients(
        torch.stack([torch.cat([x.flatten(1) for x in end], 1) for end in ends]), split
    )
    sizes = [shape[1:].numel() for shape in shapes]
    parts = [
        x.unflatten(2, shape[1:]) for x, shape in zip(gathered.split(sizes, 2), shapes, strict=True)
    ]
    added, transition, total = parts
    H = transition.shape[2]
    states = []
    for run in split.runs:
        state = added[:0].sum(0)
        for other in reversed(split.reach(run)):
            if split.whole(other):
                moved = state.unflatten(1, (H, -1)) @ transition[other][:, :, None]
                state = moved.flatten(1, 2) * total[other].exp()[..., None, None]
                state = state + added[other]
            else:
                state = state + added[other]
        states.append(state)
    return states


def _end(split: ContextSplit, run: int, x: _Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """What a run's last piece of a document adds to the state at its end; if the document crosses
    the whole run, also its transition and the sum of its gates (else those of no tokens)."""
    q, k, v, w, beta, log_forget = x
    (B, T, HQ, D), H, tail = q.shape, k.shape[2], split.tail(run)
    dtype = torch.promote_types(q.dtype, torch.float32)
    added = v[:, :0].to(dtype).sum() + v.new_zeros(B, HQ, v.shape[3], D, dtype=dtype)
    transition = torch.eye(D, dtype=dtype, device=q.device).expand(B, H, D, D)
    total = q.new_zeros(B, HQ, dtype=dtype)
    if tail:
        last = (None if y is None else y[:, T - tail :] for y in x)
        added = linear_attention(*last)[1]  # type: ignore[arg-type]
    if split.whole(run):
        if w is not None and beta is not None:
            transition = chunk_transport(q[:, :, :0], k, w, beta)[2]
        if log_forget is not None:
            total = log_forget.to(dtype).clamp(min=LOWEST_LOG_FORGET).sum(1)
    return added, transition, total
