"""PaTH attention on NVIDIA GPUs: the stages in order, as operators that autograd and compile see.

docs/algorithm.md §3, §4. Forward: solve the blocks, build the tree of transitions, carry keys and
queries up it, attend inside blocks, meet. Backward: recompute all but the meeting, then the same
stages from last to first. Kept between them: inputs, output (and what rounding takes off it, for
δ), log-sum-exp and, of calls that are not too large, the blocks' solution.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from path_attention.ops.gradients import register_gradients, run
from path_attention.ops.packing import Packing
from path_attention.ops.triton.backward import delta_bwd_kernel
from path_attention.ops.triton.blocks import block_bwd_kernel, local_bwd_kernel
from path_attention.ops.triton.call import (
    Call,
    either,
    make_call,
    strides,
    token_rows,
)
from path_attention.ops.triton.gates import decay_bwd_kernel
from path_attention.ops.triton.local import pair_local_bwd_kernel
from path_attention.ops.triton.meet import Partial, Top, meet, meet_backward
from path_attention.ops.triton.move import (
    CHUNK,
    Blocks,
    Moved,
    Softmax,
    move,
    place_blocks,
    room_to_keep,
    solve_blocks,
)
from path_attention.ops.triton.ranges import backward_ranges, forward_ranges
from path_attention.ops.triton.tiles import MOST_REGISTERS
from path_attention.ops.triton.transition import pair_bwd_kernel

# Heads are computed in parts, so that what a part needs stays bounded: of at most so many query
# rows (tokens × heads), and of no more work (rows × length × head size) than keeps a device busy
# while the host launches the next part. Of a call that is one part the blocks' solution is kept for
# the backward pass (some 900 bytes a token and key head of 64, 1,700 of 128); of a longer one the
# peak of memory counts for more than the time.
_ROWS_AT_ONCE = 2**19
_WORK_AT_ONCE = 2**39


def triton_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_forget: Tensor | None,
    scale: float,
    packing: Packing | None,
) -> tuple[Tensor, Tensor]:
    """PaTH attention by Triton kernels (docs/algorithm.md §3).

    Arguments as in `path_attention`, validated there; bfloat16, float16 or float32. Products take
    float16 operands (moved queries and keys are scaled into range by powers of two) and float32
    sums; for float32 inputs each is six bfloat16 products. `lse` comes in float32.

    Results and gradients repeat bit for bit: every sum has a fixed order.
    """
    lengths = None if packing is None else packing.host_lengths
    if scale < 0:  # the kernels take a maximum before they scale
        q, scale = -q, -scale
    keep = _keeps(q, k, v, w, beta, log_forget)
    out, lse, *_ = run(_forward, q, k, v, w, beta, log_forget, scale, lengths, keep)
    return out, lse


def _keeps(q: Tensor, *others: Tensor | None) -> bool:
    tensors = (q, *(x for x in others if x is not None))
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    B, T, HQ, D = q.shape
    return wanted and B * T * HQ <= _ROWS_AT_ONCE and B * T * HQ * T * D <= _WORK_AT_ONCE


@torch.library.custom_op("path_attention::triton", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_forget: Tensor | None,
    scale: float,
    lengths: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    out = q.new_empty(*q.shape[:3], v.shape[3])
    low, kept = _low_part(out), room_to_keep(q, k, w, lengths, keep)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if q.numel() == 0:
        return out, lse, lse.new_empty(4), low, kept
    inputs = (q, k, v, w, beta, log_forget)
    with torch.cuda.device_of(q):
        ranges = forward_ranges(token_rows(q), token_rows(k), scale, w is not None)
        for part in _head_parts(q, k, lengths):
            c = make_call(*part.of(*inputs), lengths)
            outputs = (x if x is None else x[:, :, part.queries] for x in (out, _given(low), lse))
            _attend(c, ranges, *outputs, _given(kept[part.keys]))
    return out, lse, ranges, low, kept


def _low_part(out: Tensor) -> Tensor:
    """Room for what rounding takes off a 16-bit output, which δ = rowsum(dO · O) would feel."""
    return torch.empty_like(out) if out.itemsize == 2 else out.new_empty(0)


def _given(x: Tensor) -> Tensor | None:
    return x if x.numel() > 0 else None


def _attend(
    c: Call, ranges: Tensor, out: Tensor, low: Tensor | None, lse: Tensor, kept: Tensor | None
) -> None:
    blocks, HQ, t = c.grid.count, c.H * c.G, c.tiles
    m, l = c.empty(HQ, blocks, 64), c.empty(HQ, blocks, 64)
    softmax = Softmax(c.empty(HQ, blocks, 64, t.DVP), m, l)
    moved = move(c, ranges, solve_blocks(c, ranges, kept, backward=False), softmax)
    out, lse = out.flatten(0, 1), lse.flatten(0, 1)
    meet(c, moved, ranges, softmax, out, None if low is None else low.flatten(0, 1), lse)


class _Part(NamedTuple):
    """Some key heads and the query heads of their groups."""

    keys: slice
    queries: slice

    def of(self, q, k, v, w, beta, log_forget) -> tuple[Tensor | None, ...]:
        """These heads of the operator's inputs, or of their gradients: views. None, empty stay."""

        def take(x: Tensor | None, heads: slice) -> Tensor | None:
            return x if x is None or x.dim() == 1 else x[:, :, heads]

        of_keys = (take(x, self.keys) for x in (k, v, w, beta))
        return take(q, self.queries), *of_keys, take(log_forget, self.queries)


def _head_parts(q: Tensor, k: Tensor, lengths: Tensor | None) -> Iterator[_Part]:
    """Key heads to compute together, with their groups."""
    H, G = k.shape[2], q.shape[2] // k.shape[2]
    longest = q.shape[1] if lengths is None else int(lengths.max())
    most = min(_ROWS_AT_ONCE, _WORK_AT_ONCE // (longest * q.shape[3]))
    step = max(1, most // (q.shape[0] * q.shape[1] * G))
    for start in range(0, H, step):
        stop = min(H, start + step)
        yield _Part(slice(start, stop), slice(start * G, stop * G))


@_forward.register_fake
def _(q, k, v, w, beta, log_forget, scale, lengths, keep):
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    out = q.new_empty(*q.shape[:3], v.shape[3])
    kept = room_to_keep(q, k, w, lengths, keep)
    return out, lse, lse.new_empty(4), _low_part(out), kept


@torch.library.custom_op("path_attention::triton_backward", mutates_args=())
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
    ranges: Tensor,
    low: Tensor,
    kept: Tensor,
    scale: float,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = (q, k, v, w, beta, log_forget)
    grads = _Gradients(
        *(
            q.new_empty(0 if x is None else x.shape, dtype=None if x is None else x.dtype)
            for x in inputs
        )
    )
    if q.numel() == 0:
        return tuple(torch.zeros_like(x) for x in grads)  # type: ignore[return-value]
    with torch.cuda.device_of(q):
        in_range = w is not None or q.dtype == torch.float16
        rows = token_rows(grad_out)
        ranges = backward_ranges(ranges, rows, token_rows(v), grad_lse, scale, in_range)
        grad_lse = None if grad_lse is None else grad_lse.contiguous()
        for part in _head_parts(q, k, lengths):
            c, heads = make_call(*part.of(*inputs), lengths), part.queries
            results = (
                x if x is None else x[:, :, heads] for x in (out, _given(low), lse, grad_lse)
            )
            top = _prepare_top(c, ranges, *results, rows[:, heads])
            room = _given(kept[part.keys])
            _attend_backward(c, ranges, top, _Gradients(*part.of(*grads)), room)
    return tuple(grads)  # type: ignore[return-value]


def _attend_backward(
    c: Call, ranges: Tensor, top: Top, grads: _Gradients, kept: Tensor | None
) -> None:
    if kept is None:
        blocks = solve_blocks(c, ranges, None, backward=True)
    else:
        blocks = place_blocks(c, kept, backward=True)
    moved = move(c, ranges, blocks, lse=top.lse)
    partial = meet_backward(c, moved, ranges, top)
    _blocks_backward(c, moved, ranges, top, partial, grads)
    if c.decay is not None:
        dlog_forget, grid = grads.log_forget.flatten(0, 1), c.grid
        decay_bwd_kernel[(len(grid.sequences), c.H * c.G)](
            partial.rows, partial.columns, ranges, dlog_forget, *c.tables, grid.count,
            grid.levels, *dlog_forget.stride(), CHUNK=CHUNK, num_warps=4,
        )  # fmt: skip


@_backward.register_fake
def _(
    grad_out, grad_lse, q, k, v, w, beta, log_forget, out, lse, ranges, low, kept, scale, lengths
):
    return tuple(
        q.new_empty(0 if x is None else x.shape, dtype=None if x is None else x.dtype)
        for x in (q, k, v, w, beta, log_forget)
    )


class _Gradients(NamedTuple):
    """Of the public inputs; empty where an input is None."""

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    beta: Tensor
    log_forget: Tensor


def _prepare_top(c: Call, ranges, out, low, lse, grad_lse, grad_out) -> Top:
    HQ, blocks, t = c.H * c.G, c.grid.count, c.tiles
    delta, lse2 = c.empty(HQ, blocks, 64), c.empty(HQ, blocks, 64)
    out = token_rows(out)
    delta_bwd_kernel[(blocks, HQ)](
        out, out if low is None else token_rows(low), grad_out, lse, either(grad_lse, lse),
        ranges, delta, lse2, *c.tables, blocks,
        c.grid.levels, *strides(out, grad_out), lse.stride(1), DV=t.DV, DVP=t.DVP,
        LSE_GRADIENT=grad_lse is not None, LOW=low is not None, num_warps=4,
    )  # fmt: skip
    return Top(grad_out, delta, lse2)


def _blocks_backward(
    c: Call, moved: Moved, ranges: Tensor, top: Top, partial: Partial, grads: _Gradients
) -> None:
    """Through what the blocks did by themselves: the first pair's meeting, then each block."""
    grid, t, solved = c.grid, c.tiles, moved.blocks
    launch, place = (grid.count, c.H), (*c.tables, grid.count, grid.levels, c.decay_row)
    decay = either(c.decay, ranges)
    arrived = (top.lse, top.delta, *partial[:3], partial.rows, partial.columns)
    dq, dk, dv = (x.flatten(0, 1) for x in (grads.q, grads.k, grads.v))
    options = dict(G=c.G, GATE=t.gate, maxnreg=MOST_REGISTERS) | c.sizes
    if solved is None or c.beta is None:
        local_bwd_kernel[launch](
            c.q, c.k, c.v, top.grad_out, decay, ranges, *arrived, dq, dk, dv, *place,
            *strides(c.q, c.k, c.v, top.grad_out, dq, dk, dv), num_warps=t.local_warps, **options,
        )  # fmt: skip
        return
    dg, dwl = (c.empty(c.H, grid.count, 64, t.DP) for _ in range(2))
    dkl = de = ranges
    launches = c.G if t.block_at_once else c.G + 1
    if launches > 1:
        dkl = partial.q if c.G == 1 else c.empty(c.H, grid.count, 64, t.DP)
        de = c.empty(c.H, grid.count, 64, 64)
    if grid.levels > 0:
        _pairs_backward(c, moved, solved, ranges, top, partial, dg, dwl)
    dw, dbeta = grads.w.flatten(0, 1), grads.beta.flatten(0, 1)
    for g in range(launches):
        last = g == launches - 1
        block_bwd_kernel[launch](
            c.q, c.k, c.v, solved.w, top.grad_out, decay, solved.coefficients, solved.g,
            solved.inverse, c.beta, ranges, *arrived, dg, dwl, dkl, de, dq, dk, dv, dw, dbeta,
            *place, g, *strides(c.q, c.k, c.v, top.grad_out, c.beta, dq, dk, dv, dw, dbeta),
            num_warps=t.block_bwd_warps if last else t.local_warps, OPERAND=c.kernel_operand,
            HEAD=g < c.G, LAST=last, **options,
        )  # fmt: skip


def _pairs_backward(
    c: Call, moved: Moved, solved: Blocks, ranges: Tensor, top: Top, partial: Partial, dg, dwl
) -> None:
    """What crossed a block within its pair, and the pair's own scores."""
    grid, t, launch = c.grid, c.tiles, (c.grid.count, c.H)
    places = grid.queries, grid.keys, grid.levels
    pair_bwd_kernel[launch](
        solved.g, solved.w, partial.transitions, moved.keys, moved.queries, partial.k, partial.q,
        dg, dwl, *c.tables, grid.count, grid.nodes, *places, G=c.G, DP=t.DP, PART=t.pair_part,
        OPERAND=c.kernel_operand, num_warps=t.pair_warps, maxnreg=t.registers,
    )  # fmt: skip
    pair_local_bwd_kernel[launch](
        moved.queries, moved.keys, c.v, top.grad_out, either(moved.query_gates, ranges),
        either(moved.key_gates, ranges), ranges, top.lse, top.delta, *partial[:3], partial.rows,
        partial.columns, *c.tables, grid.count, *places, *strides(c.v, top.grad_out), G=c.G,
        DP=t.DP, DV=t.DV, DVP=t.DVP, GATE=t.gate, num_warps=t.local_warps, maxnreg=MOST_REGISTERS,
    )  # fmt: skip


register_gradients(_forward, _backward, "triton", options=1)
