"""The main loops' launches on Hopper (compute capability 9.0): `meet.py`'s stages by Gluon kernels.

Chosen by `Tiles`, each by itself. The same inputs and results as the portable kernels; a program is
a pair of neighbouring blocks, which from the second level on meet the same units.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as Tiled
from triton.tools.tensor_descriptor import TensorDescriptor

from path_attention.ops.triton.call import Call, either, public, stored, strides, vector
from path_attention.ops.triton.hopper_backward import (
    keys_bwd_hopper_kernel,
    queries_bwd_hopper_kernel,
)
from path_attention.ops.triton.hopper_forward import meet_fwd_hopper_kernel
from path_attention.ops.triton.move import Moved, Softmax, transition_tiles

if TYPE_CHECKING:
    from path_attention.ops.triton.meet import Partial, Top

_REGISTERS = 240  # of a thread of the two warpgroups: 512 more than a multiprocessor has are left
_ROWS = 64
_KEYS = 128  # a step of the forward loop
_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


def _tiled(x: TensorDescriptor) -> Tiled:
    """A descriptor whose tiles lie in shared memory as matrix units read them."""
    layout = _layout(tuple(x.block_shape), x.base.dtype)
    return Tiled(x.base, x.shape, x.strides, x.block_shape, layout)


@functools.cache
def _layout(shape: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(shape), _DTYPES[dtype])


def _tables(c: Call) -> tuple[Tensor, Tensor, Tensor]:
    return c.grid.pairs, *c.tables


def meet(
    c: Call, moved: Moved, ranges: Tensor, softmax: Softmax, out: Tensor, low: Tensor | None, lse
) -> None:
    """As `meet.meet`."""
    t, grid = c.tiles, c.grid
    pairs = len(grid.pairs)
    meet_fwd_hopper_kernel[(pairs, c.H * c.G)](
        _tiled(stored(moved.queries, c.q, t.DP, _ROWS)),
        _tiled(stored(moved.keys, c.k, t.DP, _KEYS)), _tiled(public(c.v, t.DVP, _KEYS)),
        either(moved.query_gates, ranges),
        _tiled(vector(either(moved.key_gates, softmax.m), _KEYS)), ranges, *softmax, out,
        either(low, out), lse, *_tables(c), pairs, grid.count, grid.queries, grid.keys,
        grid.levels, *strides(out), lse.stride(0), DP=t.DP, DV=t.DV, DVP=t.DVP, BN=_KEYS,
        STAGES=2, LOW=low is not None, REGISTERS=_REGISTERS, num_warps=4, **c.kinds,
    )  # fmt: skip


def _counts(c: Call) -> tuple[int, ...]:
    grid = c.grid
    return len(grid.pairs), grid.count, grid.queries, grid.keys, grid.nodes, grid.levels


def queries_backward(c: Call, moved, ranges, top: Top, partial: Partial, arriving: Tensor) -> None:
    """As `meet.queries_backward`."""
    t = c.tiles
    queries_bwd_hopper_kernel[(len(c.grid.pairs), c.H * c.G)](
        _tiled(stored(moved.queries, c.q, t.DP, _ROWS)),
        _tiled(stored(moved.keys, c.k, t.DP, _ROWS)), _tiled(public(c.v, t.DVP, _ROWS)),
        _tiled(public(top.grad_out, t.DVP, _ROWS)), _tiled(transition_tiles(c, moved.blocks)),
        _tiled(stored(arriving, c.q, t.DP, _ROWS)), either(moved.query_gates, ranges),
        _tiled(vector(either(moved.key_gates, top.lse), _ROWS)), ranges, top.lse, top.delta,
        partial.q, partial.rows, *_tables(c), *_counts(c), DP=t.DP, DVP=t.DVP, BN=_ROWS, STAGES=2,
        REGISTERS=_REGISTERS, num_warps=4, **c.kinds,
    )  # fmt: skip


def keys_backward(
    c: Call, moved, ranges, top: Top, partial: Partial, arriving: Tensor, undo: Tensor
) -> None:
    """As `meet.keys_backward`."""
    t = c.tiles
    held = t.DP == t.DVP == 64
    keys_bwd_hopper_kernel[(len(c.grid.pairs), c.H)](
        _tiled(stored(moved.queries, c.q, t.DP, _ROWS)),
        _tiled(stored(moved.keys, c.k, t.DP, _ROWS)), _tiled(public(c.v, t.DVP, _ROWS)),
        _tiled(public(top.grad_out, t.DVP, _ROWS)), _tiled(transition_tiles(c, moved.blocks)),
        _tiled(vector(either(moved.query_gates, top.lse), _ROWS)), _tiled(vector(top.delta, _ROWS)),
        _tiled(stored(arriving, c.q, t.DP, _ROWS)), undo, either(moved.key_gates, ranges), ranges,
        partial.k, partial.v, partial.columns, *_tables(c), *_counts(c), DP=t.DP, DVP=t.DVP,
        BM=_ROWS, STAGES=3 if held else 2, HELD=held, REGISTERS=_REGISTERS, num_warps=4, **c.kinds,
    )  # fmt: skip
