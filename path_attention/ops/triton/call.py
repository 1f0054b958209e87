"""One call's inputs as the kernels take them, and the descriptors of their tiles."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from path_attention.ops.triton.device import has_warpgroups, shared_memory
from path_attention.ops.triton.grid import Grid, make_grid
from path_attention.ops.triton.tiles import Tiles, choose_tiles


class Call(NamedTuple):
    """One call's inputs as the kernels take them: rows of B·T tokens, last dimension contiguous."""

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor | None
    beta: Tensor | None
    log_forget: Tensor | None
    decay: Tensor | None  # [HQ, B·T] float64, for running sums of log2 of the gate
    grid: Grid
    tiles: Tiles
    H: int
    G: int
    operand: torch.dtype  # of moved queries and keys

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        return self.grid.blocks, self.grid.sequences

    @property
    def decay_row(self) -> int:
        return 0 if self.decay is None else self.decay.stride(0)

    @property
    def kinds(self) -> dict:
        return dict(G=self.G, TRANSPORT=self.tiles.transport, GATE=self.tiles.gate)

    @property
    def sizes(self) -> dict:
        t = self.tiles
        return dict(D=t.D, DP=t.DP, DV=t.DV, DVP=t.DVP)

    @property
    def kernel_operand(self):
        return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}.get(
            self.operand, tl.float32
        )

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.q.new_empty(shape, dtype=dtype)


def token_rows(x: Tensor) -> Tensor:
    """[B, T, ...] → [B·T, ...] with a contiguous last dimension; a view where there is one."""
    return (within_reach(x) if x.dim() == 4 else x).flatten(0, 1)


def within_reach(x: Tensor) -> Tensor:
    """x `[B, T, heads, D]` with a contiguous last dimension, and heads that kernels reach.

    They do by 32 bits: too few for many heads that lie one behind the other, each with all of its
    many tokens. A copy then; x itself where it can be.
    """
    strided = x.stride(3) != 1 and x.shape[3] > 1
    far = (x.shape[2] - 1) * x.stride(2) >= 2**31
    return x.contiguous() if strided or far else x


def operand_of(q: Tensor, w: Tensor | None) -> torch.dtype:
    """The dtype of moved queries and keys in products: float16, with more digits than bfloat16."""
    return torch.float16 if w is not None and q.dtype != torch.float32 else q.dtype


def chosen_tiles(q: Tensor, v: Tensor, w: Tensor | None, log_forget: Tensor | None) -> Tiles:
    """The choice for a call with these inputs, on their device."""
    memory, warpgroups = shared_memory_of(q.device), warpgroups_of(q.device)
    kinds = w is not None, log_forget is not None
    return choose_tiles(q.shape[3], v.shape[3], operand_of(q, w), *kinds, memory, warpgroups)


def make_call(q, k, v, w, beta, log_forget, lengths: Tensor | None) -> Call:
    (B, T, HQ), H = q.shape[:3], v.shape[2]
    grid = make_grid((T,) * B if lengths is None else tuple(lengths.tolist()), q.device)
    return Call(
        token_rows(q),
        token_rows(k),
        token_rows(v),
        None if w is None else token_rows(w),
        None if beta is None else beta.flatten(0, 1),
        None if log_forget is None else log_forget.flatten(0, 1),
        None if log_forget is None else q.new_empty(HQ, B * T, dtype=torch.float64),
        grid,
        chosen_tiles(q, v, w, log_forget),
        H,
        HQ // H,
        operand_of(q, w),
    )


def shared_memory_of(device: torch.device) -> int:
    """Bytes of it that one program may have; where there is no GPU, a data-centre one's."""
    if device.type != "cuda":
        return 227 * 1024
    return shared_memory(device.index)


def warpgroups_of(device: torch.device) -> bool:
    """Whether the main loops run by `hopper.py` there."""
    return device.type == "cuda" and has_warpgroups(device.index)


def either(x: Tensor | None, default: Tensor) -> Tensor:
    return default if x is None else x


def strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:2]]


def public(x: Tensor, width: int, rows: int) -> TensorDescriptor:
    """Tiles of so many rows of [tokens, heads, D], each head padded to its width if need be."""
    tokens, heads, D = x.shape
    aligned = x.stride(0) * x.itemsize % 16 == 0 and x.data_ptr() % 16 == 0
    apart = x.stride(0) >= heads * width  # CUDA promises nothing for rows that overlap
    if width != D or x.stride(1) != width or not (aligned and apart):
        x = F.pad(x, (0, width - D)).contiguous()
    return TensorDescriptor(x, [tokens, heads * width], [x.stride(0), 1], [rows, width])


def vector(x: Tensor, rows: int) -> TensorDescriptor:
    """Pieces of a contiguous tensor taken as one row: loops prefetch these, but no plain loads."""
    return TensorDescriptor(x.view(-1), [x.numel()], [1], [rows])


def stored(x: Tensor | None, unmoved: Tensor, width: int, rows: int) -> TensorDescriptor:
    """Tiles of what a level stores, or of the public tensor where nothing is moved."""
    if x is None:
        return public(unmoved, width, rows)
    return TensorDescriptor(x, [x.numel() // width, width], [width, 1], [rows, width])
