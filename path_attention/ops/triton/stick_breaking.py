"""Stick-breaking attention on NVIDIA GPUs, forward and backward.

docs/algorithm.md §9. Queries walk over their keys from the diagonal to the left, 64 by 64. What is
left of the stick goes along in base 2; sums over the keys inside a tile are products with a
triangle of ones, so that the matrix units do them.

The backward pass needs, for a query at a block of keys, what is left there and what is left of δ.
Only a walk from the diagonal knows both. So queries go in panels: one kernel walks a panel's
queries, forms dq and notes both numbers at each block of keys; the next one takes each block of
keys through the panel's queries. The notes of a panel of a fixed number of rows grow with T, not
with T². No atomics: each result is one sum in one order, and repeats bit for bit. The price is
seven products instead of a fused kernel's five (and two triangles each).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from path_attention.ops.gradients import register_gradients
from path_attention.ops.packing import Packing
from path_attention.ops.triton.call import either, public, strides, token_rows, vector
from path_attention.ops.triton.grid import BLOCK, Grid, lasting, make_grid
from path_attention.ops.triton.stick_kernels import (
    stick_fwd_kernel,
    stick_keys_bwd_kernel,
    stick_queries_bwd_kernel,
)

_ROWS_AT_ONCE = 2**16  # query rows (tokens × heads) of a panel: enough programs for a device
_SHORTEST_PANEL = 512  # tokens; below it, launches would outweigh the work


def triton_stick_breaking(
    q: Tensor, k: Tensor, v: Tensor, scale: float, packing: Packing | None
) -> tuple[Tensor, Tensor]:
    """Arguments as in `stick_breaking_attention`, validated there."""
    lengths = None if packing is None else packing.host_lengths
    out, rest, _ = _forward(q, k, v, scale, lengths)
    return out, rest


# --- Tiles and panels ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Warps and pipeline depth of the three kernels.

    Attributes:
        chunk: blocks of keys or queries after which the kernels ask whether anything is left.
        registers: of the backward kernels, at most.
    """

    forward_warps: int
    forward_stages: int
    queries_warps: int
    queries_stages: int
    keys_warps: int
    keys_stages: int
    chunk: int
    registers: int | None


def choose_tiles(width: int, dtype: torch.dtype) -> Tiles:
    """The choice for head sizes padded to `width`."""
    single = dtype == torch.float32
    return Tiles(
        forward_warps=4,
        forward_stages=1 if single else 3 if width <= 64 else 2,
        queries_warps=4,
        queries_stages=1 if single else 2,
        keys_warps=4,
        keys_stages=1 if single else 2,
        chunk=16,
        registers=None,
    )


class Panel(NamedTuple):
    """Some blocks of queries of each sequence, and all blocks of keys that they see.

    Notes are of 64 rows; those of a sequence's query block lie behind one another, one for each
    block of keys up to the panel's end, and the next query block's behind them.
    """

    queries: Tensor  # int32 [·, 2]: block, its first note
    keys: Tensor  # int32 [·, 6]: block; note of its own queries or −1; then of the later ones the
    # first block, its note here, their number, and from one's note to the next one's
    notes: int


class Plan(NamedTuple):
    order: Tensor  # int32 [count]: blocks by falling number of keys
    panels: list[Panel]


@lasting
def make_plan(lengths: tuple[int, ...], size: int, device: torch.device) -> Plan:
    """Panels of `size` blocks for sequences of these lengths in tokens, as `make_grid` has them."""
    sizes = [-(-n // BLOCK) for n in lengths if n > 0]
    index = torch.cat([torch.arange(n) for n in sizes])
    order = index.argsort(descending=True, stable=True)
    panels = []
    for start in range(0, max(sizes), size):
        queries, keys, notes, base = [], [], 0, 0
        for blocks in sizes:
            stop = min(start + size, blocks)
            for i in range(start, stop):
                queries.append((i, base + i, notes + (i - start) * stop))
            for j in range(stop if start < blocks else 0):
                first = max(start, j + 1)
                own = notes + (j - start) * stop + j if j >= start else -1
                at = notes + (first - start) * stop + j
                keys.append((stop - first, base + j, own, base + first, at, stop - first, stop))
            notes += max(0, stop - start) * stop
            base += blocks
        tables = (
            torch.tensor([row[1:] for row in sorted(rows, reverse=True)], dtype=torch.int32)
            for rows in (queries, keys)
        )
        panels.append(Panel(*(x.to(device) for x in tables), notes))
    return Plan(order.to(device=device, dtype=torch.int32), panels)


# --- Operators -----------------------------------------------------------------------------------


class StickCall(NamedTuple):
    """Inputs as rows of padded blocks [blocks·64, heads, D]; the grid says where they are from."""

    q: Tensor
    k: Tensor
    v: Tensor
    grid: Grid
    lengths: tuple[int, ...]
    tiles: Tiles
    constants: dict
    keys: Grid  # of k and v: the same, but of a rectangle
    key_blocks: int = 0  # of each sequence of a rectangle
    padding: int = 0  # its keys in front that are none

    def pad(self, x: Tensor) -> Tensor:
        return pad_rows(x, self.grid)

    def pad_numbers(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """A number of each query, [B, T, HQ] → contiguous [HQ, blocks·64]."""
        return pad_rows(x[..., None], self.grid, fill)[..., 0].T.contiguous()

    @property
    def heads(self) -> tuple[int, int]:
        return self.q.shape[1], self.k.shape[1]

    @property
    def panel(self) -> int:
        """Blocks of queries of a panel."""
        rows = _ROWS_AT_ONCE // (self.heads[0] * len(self.lengths))
        return max(_SHORTEST_PANEL, rows) // BLOCK

    def attend(
        self, out: Tensor, rest: Tensor, low: Tensor | None, order: Tensor, scale: float
    ) -> None:
        """Write `[B, T, HQ, ·]` of the queries' tokens, blocks in this order."""
        DP, DVP = self.constants["DP"], self.constants["DVP"]
        rows, kept = out.flatten(0, 1), either(low, out).flatten(0, 1)
        stick_fwd_kernel[(self.grid.count, self.heads[0])](
            public(self.q, DP, 64), public(self.k, DP, 64), public(self.v, DVP, 64), rows, kept,
            rest, self.grid.blocks, order, scale * 1.4426950408889634, *strides(rows),
            self.heads[0], self.key_blocks, self.padding,
            STAGES=self.tiles.forward_stages, CHUNK=self.tiles.chunk, LOW=low is not None,
            num_warps=self.tiles.forward_warps, **self.constants,
        )  # fmt: skip


def constants_of(q: Tensor, v: Tensor, *, rectangle: bool) -> dict:
    """What kernels for these queries and values are compiled for."""
    (HQ, D), (H, DV) = q.shape[2:], v.shape[2:]
    DP, DVP = (max(64, triton.next_power_of_2(n)) for n in (D, DV))
    operand = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(q.dtype, tl.float32)
    return dict(G=HQ // H, DP=DP, DV=DV, DVP=DVP, OPERAND=operand, RECTANGLE=rectangle)


def _make_call(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> StickCall:
    B, T = q.shape[:2]
    of_sequences = (T,) * B if lengths is None else tuple(lengths.tolist())
    grid = make_grid(of_sequences, q.device)
    constants = constants_of(q, v, rectangle=False)
    tiles = choose_tiles(max(constants["DP"], constants["DVP"]), q.dtype)
    rows = (pad_rows(x, grid) for x in (q, k, v))
    return StickCall(*rows, grid, of_sequences, tiles, constants, grid)


def pad_rows(x: Tensor, grid: Grid, fill: float = 0.0) -> Tensor:
    """[B, T, heads, D] → [blocks·64, heads, D]; zero (`fill`) behind a sequence's last token."""
    x = token_rows(x)
    if grid.count * BLOCK == x.shape[0]:
        return x.contiguous() if 0 in x.stride() else x
    padded = x.new_full((grid.count * BLOCK, *x.shape[1:]), fill)
    return padded.index_copy_(0, grid.positions, x)


@torch.library.custom_op("path_attention::triton_stick_breaking", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, lengths: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    out, rest, low = _empty_results(q, v)
    if q.numel() == 0:
        return out, rest, low
    with torch.cuda.device_of(q):
        c = _make_call(q, k, v, lengths)
        order = make_plan(c.lengths, c.panel, q.device).order
        c.attend(out, rest, low if low.dim() == 4 else None, order, scale)
    return out, rest, low


@_forward.register_fake
def _(q, k, v, scale, lengths):
    return _empty_results(q, v)


def _empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log of what remains, and what rounding takes off a 16-bit output (δ feels it)."""
    out = q.new_empty(*q.shape[:3], v.shape[3])
    rest = q.new_empty(q.shape[:3], dtype=torch.float32)
    return out, rest, torch.empty_like(out) if out.itemsize == 2 else out.new_empty(0)


@torch.library.custom_op("path_attention::triton_stick_breaking_backward", mutates_args=())
def _backward(
    grad_out: Tensor,
    grad_rest: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    rest: Tensor,
    low: Tensor,
    scale: float,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = [x.new_empty(x.shape) for x in (q, k, v)]
    if q.numel() == 0:
        return tuple(x.zero_() for x in grads)  # type: ignore[return-value]
    with torch.cuda.device_of(q):
        c = _make_call(q, k, v, lengths)
        scales = scales_of(grad_out, v, grad_rest)
        drest = None if grad_rest is None else c.pad_numbers(grad_rest.float() * scales[0])
        kept = low if low.dim() == 4 else None
        results = (token_rows(x) for x in (grad_out, out, either(kept, out)))
        top = Top(c.pad(grad_out), drest, scales, *results, has_low=kept is not None)
        panels = make_plan(c.lengths, c.panel, q.device).panels
        attend_backward(c, panels, top, scale, *(x.flatten(0, 1) for x in grads))
    return grads[0], grads[1], grads[2]


@_backward.register_fake
def _(grad_out, grad_rest, q, k, v, out, rest, low, scale, lengths):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


class Top(NamedTuple):
    """What arrives from above, and what the forward pass left, or of a rectangle: what nearer and
    farther keys did."""

    padded: Tensor  # dO, [blocks·64, HQ, DV]
    grad_rest: Tensor | None  # [HQ, blocks·64] float32, scaled
    scales: Tensor  # [3]
    grad_out: Tensor  # [B·T, HQ, DV], as are the next two; a rectangle needs none of them
    out: Tensor
    low: Tensor
    has_low: bool
    taken: Tensor | None = None  # of a rectangle: −log₂ of what nearer keys left, [HQ, blocks·64]
    through: Tensor | None = None  # Σ A dA of its keys and the farther ones, the same, scaled


def scales_of(grad_out: Tensor, v: Tensor, *parts: Tensor | None) -> Tensor:
    """Powers of two that keep float16 parts of the backward pass in range, float32 [3].

    What gains A dA and score gradients are multiplied by, so that none exceeds 2¹⁵; of that, the
    factor of dA; and log₂ of the shares' own (together they make the first). `parts` are of score
    gradients too: their largest elements may add up.
    """
    one = grad_out.new_ones(1, dtype=torch.float32)
    if grad_out.dtype != torch.float16:
        return torch.cat([one, one, 0 * one])
    most = 2 * v.shape[3] * grad_out.abs().amax().float() * v.abs().amax().float()
    for part in parts:
        if part is not None:
            most = most + part.abs().amax()
    gains = torch.where(most > 0, (2**15 / most).log2().floor(), 0 * one)
    return torch.cat([gains.exp2(), (gains - 14).exp2(), 14 * one])


def attend_backward(
    c: StickCall,
    panels: list[Panel],
    top: Top,
    scale: float,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Write the gradients `[tokens, heads, ·]` of what the grids' tokens are."""
    (HQ, H), t, grid = c.heads, c.tiles, c.grid
    DP, DVP = c.constants["DP"], c.constants["DVP"]
    descriptors = (public(c.q, DP, 64), public(c.k, DP, 64), public(c.v, DVP, 64))
    descriptors += (public(top.padded, DVP, 64),)
    notes = c.q.new_empty(2, HQ * max(p.notes for p in panels) * BLOCK, dtype=torch.float32)
    parts = (top.scales, top.scales)
    if len(panels) > 1:  # zero where no diagonal tile begins the sum
        make = torch.zeros if c.key_blocks else torch.empty
        parts = tuple(
            make(H, c.keys.count * BLOCK, width, dtype=torch.float32, device=dq.device)
            for width in (DP, DVP)
        )
    drest, taken, whole = (either(x, notes) for x in (top.grad_rest, top.taken, top.through))
    reach = grid.blocks.new_empty(HQ, grid.count)  # from which block of keys on anything is left
    kinds = dict(DREST=top.grad_rest is not None, D=dq.shape[2], CHUNK=t.chunk)
    kinds |= dict(maxnreg=t.registers, **c.constants)
    scales = (scale * 1.4426950408889634, scale)
    for panel in panels:
        stick_queries_bwd_kernel[(len(panel.queries), HQ)](
            *descriptors, top.grad_out, top.out, top.low, drest, taken, whole, top.scales, *notes,
            reach, dq, grid.blocks, panel.queries, grid.count, panel.notes, c.key_blocks, *scales,
            *strides(top.grad_out, top.out, dq),
            STAGES=t.queries_stages, LOW=top.has_low, num_warps=t.queries_warps, **kinds,
        )  # fmt: skip
        vectors = (vector(x.reshape(-1), BLOCK) for x in (drest, taken, *notes))
        stick_keys_bwd_kernel[(len(panel.keys), H)](
            *descriptors, *vectors, reach, top.scales, dk, dv, *parts, c.keys.blocks, panel.keys,
            grid.count, c.keys.count, panel.notes, *scales, *strides(dk, dv),
            STAGES=t.keys_stages, PARTS=len(panels) > 1, num_warps=t.keys_warps, **kinds,
        )  # fmt: skip


register_gradients(_forward, _backward, "stick-breaking's triton")
