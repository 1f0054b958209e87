"""Stick-breaking over keys that all lie before the queries, by the kernels of `stick_breaking.py`.

A walk begins behind the last key, not at a diagonal, and with a whole stick, forward and backward,
so that both round the same shares; the gradients then know what nearer keys left of it. Keys are
padded in front to whole blocks: there a walk arrives last, and the padding takes from nobody.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from path_attention.ops.triton.call import token_rows
from path_attention.ops.triton.grid import BLOCK, lasting, make_grid
from path_attention.ops.triton.stick_breaking import (
    Panel,
    Plan,
    StickCall,
    Top,
    attend_backward,
    choose_tiles,
    constants_of,
    pad_rows,
    scales_of,
)


def triton_stick_rectangle(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`StickRectangle.attend`."""
    c = _make_call(q, k, v)
    out = q.new_empty(*q.shape[:3], v.shape[3], dtype=torch.float32)
    rest = q.new_empty(q.shape[:3], dtype=torch.float32)
    with torch.cuda.device_of(q):
        c.attend(out, rest, None, _plan(c).order, scale)
    return out, rest


def triton_stick_rectangle_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    grad_out: Tensor,
    taken: Tensor,
    through: Tensor,
    grad_rest: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`StickRectangle.backward`."""
    c = _make_call(q, k, v)
    padded = c.pad(grad_out.to(q.dtype))
    scales = scales_of(padded, v, through, grad_rest)
    drest = None if grad_rest is None else c.pad_numbers(grad_rest * scales[0])
    unread = padded[:1]
    top = Top(
        padded,
        drest,
        scales,
        *(unread, unread, unread),
        has_low=False,
        taken=c.pad_numbers(taken * 1.4426950408889634, torch.inf),  # padding looks at no key
        through=c.pad_numbers(through * scales[0]),
    )
    dq, dk, dv = (
        x.new_empty(tokens, *x.shape[2:], dtype=torch.float32)
        for x, tokens in ((q, q.shape[0] * q.shape[1]), (k, len(c.k)), (v, len(c.k)))
    )
    with torch.cuda.device_of(q):
        attend_backward(c, _plan(c).panels, top, scale, dq, dk, dv)
    dk, dv = (x.unflatten(0, (len(q), -1))[:, c.padding :] for x in (dk, dv))
    return dq.unflatten(0, q.shape[:2]), dk, dv


def _make_call(q: Tensor, k: Tensor, v: Tensor) -> StickCall:
    (B, R), C = q.shape[:2], k.shape[1]
    blocks = -(-C // BLOCK)
    padding = blocks * BLOCK - C
    lengths = (R,) * B
    grid = make_grid(lengths, q.device)
    keys = make_grid((blocks * BLOCK,) * B, q.device)
    constants = constants_of(q, v, rectangle=True)
    tiles = choose_tiles(max(constants["DP"], constants["DVP"]), q.dtype)
    k, v = (token_rows(F.pad(x, (0, 0, 0, 0, padding, 0)).contiguous()) for x in (k, v))
    return StickCall(
        pad_rows(q, grid), k, v, grid, lengths, tiles, constants, keys, blocks, padding
    )


def _plan(c: StickCall) -> Plan:
    return make_rectangle_plan(
        len(c.lengths), -(-c.lengths[0] // BLOCK), c.key_blocks, c.panel, c.q.device
    )


@lasting
def make_rectangle_plan(
    sequences: int, queries: int, keys: int, size: int, device: torch.device
) -> Plan:
    """As `make_plan`, of sequences of so many blocks of queries and of keys; all of them meet.

    A query block's notes are one for each block of keys, and the next query block's behind them.
    """
    panels = []
    for start in range(0, queries, size):
        count = min(size, queries - start)
        n, i, j = torch.arange(sequences)[:, None], torch.arange(count), torch.arange(keys)
        first = n * queries + start
        base = n * count * keys
        note = base + j
        query_rows = torch.stack([first + i, base + i * keys], -1)
        parts = [n * keys + j, note * 0 - 1, first, note, note * 0 + count, note * 0 + keys]
        key_rows = torch.stack(torch.broadcast_tensors(*parts), -1)
        tables = (x.flatten(0, 1).to(device, torch.int32) for x in (query_rows, key_rows))
        panels.append(Panel(*tables, sequences * count * keys))
    order = torch.arange(sequences * queries, dtype=torch.int32)
    return Plan(order.to(device), panels)
