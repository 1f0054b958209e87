"""PaTH attention on NVIDIA GPUs: the stages in order, as operators that autograd and compile see.

docs/algorithm.md §3, §4. Forward: solve the blocks, build the tree of transitions, carry keys and
queries up it, attend inside blocks, meet. Backward: recompute all but the meeting, then the same
stages from last to first. Nothing is kept between them but inputs, output and log-sum-exp.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from path_attention.ops.packing import Packing
from path_attention.ops.triton.backward import (
    delta_bwd_kernel,
    keys_bwd_kernel,
    queries_bwd_kernel,
)
from path_attention.ops.triton.forward import meet_fwd_kernel
from path_attention.ops.triton.grid import Grid, make_grid
from path_attention.ops.triton.local import (
    local_bwd_kernel,
    local_fwd_kernel,
    queries_fwd_kernel,
)
from path_attention.ops.triton.tiles import Tiles, choose_tiles
from path_attention.ops.triton.transition import (
    block_bwd_kernel,
    block_fwd_kernel,
    inverse_fwd_kernel,
    keys_fwd_kernel,
    tree_bwd_kernel,
    tree_fwd_kernel,
)

_LOWEST_LOG_FORGET = -1e5  # as good as −∞ to a softmax; float64 sums of a million keep 1e-5 of it
_LOG2_E = 1.4426950408889634


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
    float16 operands (moved queries and keys are scaled into range by powers of two) and float32 sums,
    for float32 inputs three TF32 products. `lse` comes in float32.
    """
    lengths = None if packing is None else packing.host_lengths
    return _forward(q, k, v, w, beta, log_forget, scale, lengths)


class _Moved(NamedTuple):
    """What the tree gives both passes; None without transport."""

    inverse: Tensor | None  # [H, blocks, 64, 64]
    coefficients: Tensor | None  # E, [H, blocks, 64, 64]
    g: Tensor | None  # [H, blocks, 64, DP]
    transitions: Tensor | None  # [H, nodes, DP, DP]
    keys: Tensor | None  # [H, keys, 64, DP]
    queries: Tensor | None  # [HQ, queries, 64, DP]


class _Call(NamedTuple):
    """One call's inputs as the kernels take them: rows of B·T tokens, last dimension contiguous."""

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor | None
    beta: Tensor | None
    decay: Tensor | None  # [HQ, B·T] float64, running sums of log2 of the gate
    range: Tensor  # float32 [8], see _ranges
    grid: Grid
    tiles: Tiles
    total: int
    H: int
    G: int
    moved_dtype: torch.dtype

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        return self.grid.blocks, self.grid.sequences

    @property
    def constants(self) -> dict:
        t = self.tiles
        return dict(G=self.G, D=t.D, DP=t.DP, LEVELS=self.grid.levels, PRECISION=t.precision)

    @property
    def attention_constants(self) -> dict:
        t = self.tiles
        return self.constants | dict(DV=t.DV, DVP=t.DVP, TRANSPORT=t.transport, GATE=t.gate)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.q.new_empty(shape, dtype=dtype)


def _rows(x: Tensor) -> Tensor:
    """[B, T, ...] → [B·T, ...] with a contiguous last dimension; a view where there is one."""
    if x.dim() == 4 and x.stride(3) != 1 and x.shape[3] > 1:
        x = x.contiguous()
    return x.flatten(0, 1)


def _make_call(q, k, v, w, beta, log_forget, scale: float, lengths: Tensor | None) -> _Call:
    B, T, HQ, D = q.shape
    H, DV = v.shape[2:]
    grid = make_grid((T,) * B if lengths is None else tuple(lengths.tolist()), q.device)
    transport = w is not None
    moved_dtype = q.dtype
    if transport and q.dtype != torch.float32:
        moved_dtype = torch.float16
    tiles = choose_tiles(
        D, DV, moved_dtype, transport, log_forget is not None, _shared_memory(q.device)
    )
    decay = None
    if log_forget is not None:
        log_forget = log_forget.flatten(0, 1).double().clamp(min=_LOWEST_LOG_FORGET)
        decay = (log_forget * _LOG2_E).cumsum(0).T.contiguous()
    ranges = _ranges(q, k, scale, moved_dtype if transport else torch.float32)
    q, k, v = _rows(q), _rows(k), _rows(v)
    return _Call(
        q, k, v,
        None if w is None else _rows(w),
        None if beta is None else beta.flatten(0, 1),
        decay, ranges, grid, tiles, B * T, H, HQ // H, moved_dtype,
    )  # fmt: skip


def _shared_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 227 * 1024
    properties = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin


def _power_of_two(norm: Tensor) -> Tensor:
    """The power of two that brings norm into (½, 1]; 1 for a norm of 0."""
    return torch.where(norm > 0, torch.exp2(-torch.ceil(torch.log2(norm))), torch.ones_like(norm))


def _largest_norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).max()


def _ranges(q: Tensor, k: Tensor, scale: float, moved_dtype: torch.dtype) -> Tensor:
    """Scalars that kernels read: see the comments; gradients' are filled in by the backward pass."""
    ranges = torch.ones(8, dtype=torch.float32, device=q.device)
    if moved_dtype == torch.float16:
        ranges[0] = _power_of_two(_largest_norm(q))  # of q, so that ‖q‖ ≤ 1
        ranges[1] = _power_of_two(_largest_norm(k))  # of k
    if scale < 0:
        ranges[0] *= -1
    ranges[2] = abs(scale) * _LOG2_E / (ranges[0].abs() * ranges[1])  # of scores, to base 2
    return ranges


def _descriptor(x: Tensor, heads: int, width: int, rows: int) -> TensorDescriptor:
    """Tiles [rows, width] of a table [tokens, heads, ≤ width] or [.., width]."""
    if x.dim() == 3:
        size = x.itemsize
        aligned = (
            x.shape[2] == width
            and x.stride(1) == width
            and x.stride(0) * size % 16 == 0
            and x.data_ptr() % 16 == 0
        )
        if not aligned:
            x = F.pad(x, (0, width - x.shape[2])).contiguous()
        return TensorDescriptor(x, [x.shape[0], heads * width], [x.stride(0), 1], [rows, width])
    return TensorDescriptor(x, list(x.shape), [width, 1], [rows, width])


def _move(c: _Call) -> _Moved:
    """Solve the blocks, build the tree, carry keys and queries up it."""
    if not c.tiles.transport or c.w is None or c.beta is None:
        return _Moved(*[None] * 6)
    grid, t, H = c.grid, c.tiles, c.H
    blocks, DP = grid.count, t.DP
    w, beta = c.w, c.beta
    inverse = c.empty(H, blocks, 64, 64)
    common = dict(LEVELS=grid.levels, PRECISION="tf32x3")
    inverse_fwd_kernel[(blocks, H)](
        w, beta, inverse, *c.tables, blocks, w.stride(0), w.stride(1), beta.stride(0),
        beta.stride(1), D=t.D, DP=DP, num_warps=1, **common,
    )  # fmt: skip
    kt = c.empty(H, blocks, 64, DP, dtype=c.moved_dtype)
    coefficients = c.empty(H, blocks, 64, 64, dtype=c.moved_dtype)
    g = c.empty(H, blocks, 64, DP, dtype=c.moved_dtype)
    transitions = c.empty(H, max(1, grid.nodes), DP, DP)
    tile = min(64, DP)
    block_fwd_kernel[(blocks, H)](
        c.k, w, beta, inverse, c.range, kt, coefficients, g, transitions, *c.tables, blocks,
        grid.nodes, c.k.stride(0), c.k.stride(1), w.stride(0), w.stride(1), beta.stride(0),
        beta.stride(1), D=t.D, DP=DP, DC=tile, num_warps=t.block_warps, **common,
    )  # fmt: skip
    for level in range(1, grid.levels):
        tree_fwd_kernel[(blocks, H, (DP // tile) ** 2)](
            transitions, *c.tables, grid.nodes, level, DP=DP, DC=tile, num_warps=4, **common
        )
    keys = c.empty(H, max(1, grid.keys), 64, DP, dtype=c.moved_dtype)
    queries = c.empty(H * c.G, max(1, grid.queries), 64, DP, dtype=c.moved_dtype)
    keys_fwd_kernel[(blocks, H)](
        kt, transitions, keys, *c.tables, blocks, grid.nodes, grid.keys, DP=DP,
        num_warps=t.walk_warps, **common,
    )  # fmt: skip
    queries_fwd_kernel[(blocks, H * c.G)](
        c.q, w, g, transitions, c.range, queries, *c.tables, blocks, grid.nodes, grid.queries,
        c.q.stride(0), c.q.stride(1), w.stride(0), w.stride(1), G=c.G, D=t.D, DP=DP,
        num_warps=t.walk_warps, **common,
    )  # fmt: skip
    return _Moved(inverse, coefficients, g, transitions, keys, queries)


def _or(x: Tensor | None, default: Tensor) -> Tensor:
    return default if x is None else x


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
) -> tuple[Tensor, Tensor]:
    B, T, HQ, _ = q.shape
    out = q.new_empty(B, T, HQ, v.shape[3])
    lse = q.new_empty(B, T, HQ, dtype=torch.float32)
    if q.numel() == 0:
        return out, lse
    with torch.cuda.device_of(q):
        c = _make_call(q, k, v, w, beta, log_forget, scale, lengths)
        _attend(c, _move(c), out.flatten(0, 1), lse.flatten(0, 1))
    return out, lse


def _attend(c: _Call, moved: _Moved, out: Tensor, lse: Tensor) -> None:
    grid, t, HQ = c.grid, c.tiles, c.H * c.G
    blocks = grid.count
    acc = c.empty(HQ, blocks, 64, t.DVP)
    m, l = c.empty(HQ, blocks, 64), c.empty(HQ, blocks, 64)
    w = _or(c.w, c.k)
    decay = _or(c.decay, c.range)
    local_fwd_kernel[(blocks, HQ)](
        c.q, c.k, c.v, w, decay, _or(moved.coefficients, c.q), c.range, acc, m, l, *c.tables,
        blocks, c.total, c.q.stride(0), c.q.stride(1), c.k.stride(0), c.k.stride(1), c.v.stride(0),
        c.v.stride(1), w.stride(0), w.stride(1), num_warps=4, **c.attention_constants,
    )  # fmt: skip
    meet_fwd_kernel[(blocks, HQ)](
        c.q, _or(moved.queries, c.q), _keys_descriptor(c, moved, t.forward_keys),
        _descriptor(c.v, c.H, t.DVP, t.forward_keys), decay, c.range, acc, m, l, out, lse,
        *c.tables, blocks, grid.queries, grid.keys, c.total, c.q.stride(0), c.q.stride(1),
        out.stride(0), out.stride(1), lse.stride(0), BN=t.forward_keys, STAGES=t.forward_stages,
        num_warps=t.forward_warps, **c.attention_constants,
    )  # fmt: skip


def _keys_descriptor(c: _Call, moved: _Moved, rows: int) -> TensorDescriptor:
    if moved.keys is None:
        return _descriptor(c.k, c.H, c.tiles.DP, rows)
    return _descriptor(moved.keys.view(-1, c.tiles.DP), 1, c.tiles.DP, rows)


@_forward.register_fake
def _(q, k, v, w, beta, log_forget, scale, lengths):
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


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
    scale: float,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    dw, dbeta, dlog_forget = (
        q.new_empty(0) if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for x in (w, beta, log_forget)
    )
    if q.numel():
        with torch.cuda.device_of(q):
            c = _make_call(q, k, v, w, beta, log_forget, scale, lengths)
            rows, columns = _attend_backward(
                c, _move(c), _rows(grad_out), grad_lse, _rows(out), lse.flatten(0, 1), scale,
                dq.flatten(0, 1), dk.flatten(0, 1), dv.flatten(0, 1), dw, dbeta,
            )  # fmt: skip
            if log_forget is not None:
                # log f_t is in A_ij for j < t ≤ i.
                crossing = (rows - columns).double().flip(0).cumsum(0).flip(0)
                dlog_forget = (crossing * c.range[7]).to(log_forget.dtype).view_as(log_forget)
    return dq, dk, dv, dw, dbeta, dlog_forget


def _gradient_ranges(c: _Call, grad_out: Tensor, grad_lse: Tensor | None, scale: float) -> None:
    """Fill in the scalars of the backward pass: what to multiply score gradients by, and undo it."""
    r = c.range
    if c.moved_dtype == torch.float16:
        bound = 2 * _largest_norm(grad_out) * _largest_norm(c.v)
        if grad_lse is not None:
            bound = bound + grad_lse.abs().max()
        r[3] = _power_of_two(bound) * 2.0**14
    r[4] = abs(scale) / (r[1] * r[3]) * r[0].sign()  # of dq
    r[5] = abs(scale) / (r[0].abs() * r[3])  # of dk
    r[6] = abs(scale) / (r[0].abs() * r[1] * r[3])  # of dw and dβ
    r[7] = 1 / r[3]  # of the gates


def _attend_backward(
    c: _Call, moved: _Moved, grad_out, grad_lse, out, lse, scale, dq, dk, dv, dw, dbeta
):
    grid, t, H, HQ = c.grid, c.tiles, c.H, c.H * c.G
    blocks, DP, DVP = grid.count, t.DP, t.DVP
    _gradient_ranges(c, grad_out, grad_lse, scale)
    delta, lse2 = c.empty(HQ, blocks, 64), c.empty(HQ, blocks, 64)
    delta_bwd_kernel[(blocks, HQ)](
        out, grad_out, lse, lse if grad_lse is None else grad_lse.flatten(0, 1).contiguous(),
        c.range, delta, lse2, *c.tables, blocks, out.stride(0), out.stride(1), grad_out.stride(0),
        grad_out.stride(1), lse.stride(0), DV=t.DV, DVP=DVP, LEVELS=grid.levels,
        LSE_GRADIENT=grad_lse is not None, num_warps=4,
    )  # fmt: skip
    dqt, dkt, dvt = c.empty(HQ, blocks, 64, DP), c.empty(H, blocks, 64, DP), c.empty(H, blocks, 64, DVP)
    p = _or(moved.transitions, c.range)
    dp = torch.zeros_like(p) if t.transport else p
    gated = (HQ, blocks, 64) if t.gate else (1,)
    rows, columns = c.empty(*gated), torch.zeros(gated, dtype=torch.float32, device=c.q.device)
    decay = _or(c.decay, c.range)
    moving = dict(MOVE_PRECISION=t.move_precision)
    queries_bwd_kernel[(blocks, HQ)](
        c.q, _or(moved.queries, c.q), _keys_descriptor(c, moved, t.backward_keys),
        _descriptor(c.v, H, DVP, t.backward_keys), grad_out, p, decay, c.range, lse2, delta,
        dqt, dp, rows, *c.tables, blocks, grid.queries, grid.keys, grid.nodes, c.total,
        c.q.stride(0), c.q.stride(1), grad_out.stride(0), grad_out.stride(1), BN=t.backward_keys,
        STAGES=t.queries_stages, num_warps=t.queries_warps, **c.attention_constants, **moving,
    )  # fmt: skip
    if moved.queries is None:
        q_descriptor = _descriptor(c.q, HQ, DP, t.backward_queries)
    else:
        q_descriptor = _descriptor(moved.queries.view(-1, DP), 1, DP, t.backward_queries)
    keys_bwd_kernel[(blocks, H)](
        q_descriptor, _or(moved.keys, c.k), c.k, c.v,
        _descriptor(grad_out, HQ, DVP, t.backward_queries), p, decay, c.range, lse2, delta,
        dkt, dvt, dp, columns, *c.tables, blocks, grid.queries, grid.keys, grid.nodes, c.total,
        c.k.stride(0), c.k.stride(1), c.v.stride(0), c.v.stride(1), BM=t.backward_queries,
        STAGES=t.keys_stages, num_warps=t.keys_warps, **c.attention_constants, **moving,
    )  # fmt: skip
    tile = min(64, DP)
    for level in range(grid.levels - 1, 0, -1) if t.transport else ():
        tree_bwd_kernel[(blocks, H, (DP // tile) ** 2)](
            p, dp, *c.tables, grid.nodes, level, DP=DP, DC=tile, LEVELS=grid.levels,
            PRECISION=t.move_precision, num_warps=4,
        )  # fmt: skip
    _local_backward(c, moved, grad_out, lse2, delta, dqt, dkt, dvt, dp, rows, columns, dq, dk, dv, dw, dbeta)
    return _token_order(c, rows), _token_order(c, columns)


def _local_backward(
    c: _Call, moved: _Moved, grad_out, lse2, delta, dqt, dkt, dvt, dp, rows, columns, dq, dk, dv, dw, dbeta
) -> None:
    grid, t, H = c.grid, c.tiles, c.H
    blocks, DP = grid.count, t.DP
    moving = dict(MOVE_PRECISION=t.move_precision)
    dkl = dwl = dg = de = c.range
    if t.transport:
        dkl, dwl, dg = (c.empty(H, blocks, 64, DP) for _ in range(3))
        de = c.empty(H, blocks, 64, 64)
    w = _or(c.w, c.k)
    local_bwd_kernel[(blocks, H)](
        c.q, c.k, c.v, w, grad_out, _or(c.decay, c.range), _or(moved.coefficients, c.range),
        _or(moved.g, c.range), c.range, lse2, delta, dqt, dkt, dvt, rows, columns,
        dq, dk, dv, dkl, de, dg, dwl, *c.tables, blocks, c.total,
        c.q.stride(0), c.q.stride(1), c.k.stride(0), c.k.stride(1), c.v.stride(0), c.v.stride(1),
        w.stride(0), w.stride(1), grad_out.stride(0), grad_out.stride(1), dq.stride(0),
        dq.stride(1), dk.stride(0), dk.stride(1), dv.stride(0), dv.stride(1),
        num_warps=8, **c.attention_constants, **moving,
    )  # fmt: skip
    if not t.transport or c.w is None or c.beta is None:
        return
    dw, dbeta = dw.flatten(0, 1), dbeta.flatten(0, 1)
    block_bwd_kernel[(blocks, H)](
        c.k, c.w, c.beta, moved.inverse, moved.coefficients, moved.g, c.range, dkt, dkl, de, dg,
        dwl, dp, dk, dw, dbeta, *c.tables, blocks, grid.nodes,
        c.k.stride(0), c.k.stride(1), c.w.stride(0), c.w.stride(1), c.beta.stride(0),
        c.beta.stride(1), dk.stride(0), dk.stride(1), dw.stride(0), dw.stride(1), dbeta.stride(0),
        dbeta.stride(1), D=t.D, DP=DP, LEVELS=grid.levels, PRECISION=t.precision,
        num_warps=8, **moving,
    )  # fmt: skip


def _token_order(c: _Call, x: Tensor) -> Tensor:
    """[HQ, blocks, 64] → [B·T, HQ]."""
    if not c.tiles.gate:
        return x
    blocks = c.grid.blocks
    o = torch.arange(64, device=x.device)
    valid = o < blocks[:, 1:2]
    tokens = (blocks[:, :1] + o)[valid]
    out = x.new_empty(c.total, x.shape[0])
    out[tokens.long()] = x[:, valid].T
    return out


@_backward.register_fake
def _(grad_out, grad_lse, q, k, v, w, beta, log_forget, out, lse, scale, lengths):
    return tuple(
        q.new_empty(0) if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for x in (q, k, v, w, beta, log_forget)
    )


def _setup_context(ctx, inputs, output):
    *tensors, scale, lengths = inputs
    ctx.save_for_backward(*tensors, *output, lengths)
    ctx.scale = scale
    ctx.set_materialize_grads(False)


def _autograd(ctx, grad_out, grad_lse):
    *inputs, out, lse, lengths = ctx.saved_tensors
    if grad_out is None:
        if grad_lse is None:
            return (None,) * 8
        grad_out = torch.zeros_like(out)
    grads = _backward(grad_out, grad_lse, *inputs, out, lse, ctx.scale, lengths)
    return (*(None if x is None else g for x, g in zip(inputs, grads, strict=True)), None, None)


_forward.register_autograd(_autograd, setup_context=_setup_context)
