"""A step of decoding over a static cache on NVIDIA GPUs: launches that never wait for the host.

docs/algorithm.md §5, for a chunk of up to 16 tokens:

- `move_kernel` moves its queries to the tail's start and on to the end of each sealed unit, by one
  matrix each in float16, and the tail's transition past the chunk;
- `attend_kernel` splits the sealed units over the device;
- `tail_kernel`, beside it, attends the tail and the chunk itself; keys of the tail pass the chunk
  (float32, in place), whose tokens are also kept as they came where they can be taken back;
- `finish_kernel` merges the parts by log-sum-exp; where a unit became complete, the tail's keys are
  the unit's for ever, and each earlier unit's matrix is carried over it.

Lengths are on the device, so a step can be captured in a CUDA graph and replayed. The matrices M
are kept as a float16 sum high + low, of which queries take the high. From Hopper on each kernel but
the first is launched while the one before still runs, and waits on the device.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from path_attention.ops.decode import DecodeState
from path_attention.ops.triton import call
from path_attention.ops.triton.call import either
from path_attention.ops.triton.decode import (
    Rows,
    Tiles,
    choose_splits,
    choose_tiles,
    make_outputs,
    make_rows,
    multiprocessors,
    parts_at_once,
)
from path_attention.ops.triton.sealed_kernels import attend_kernel, finish_kernel
from path_attention.ops.triton.step_kernels import move_kernel, record_kernel, tail_kernel
from path_attention.ops.triton.tiles import padded

_CPU_MOVERS = 3  # of the interpreter, where there is nothing to fill
_UNITS_EACH = 4  # that are worth a program of their own
_SCRATCH = 2**14  # bytes of shared memory besides buffers


@lru_cache
def _can_start_early(index: int | None) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)


def start_early(device: torch.device) -> dict[str, Any]:
    """Options of a launch that may start before the one before it has ended; none if it can't."""
    able = device.type == "cuda" and _can_start_early(device.index)
    return {"launch_pdl": True} if able else {}


def choose_movers(programs: int, units: int, width: int, device: torch.device) -> int:
    """Programs that share the moves to so many units, with `programs` side by side."""
    least = width // 64  # which move the tail's transition too
    if device.type != "cuda":
        return max(least, min(units, _CPU_MOVERS))
    fill = (4 if width == 64 else 2) * multiprocessors(device.index) // programs
    return max(least, min(-(-units // _UNITS_EACH), fill))


def choose_step_tiles(width: int, rows: int, itemsize: int, device: torch.device) -> Tiles:
    """As `choose_tiles`, where queries as high + low are buffered beside each tile of keys."""
    tiles = choose_tiles(width, rows, itemsize)
    tiles = tiles._replace(rows=min(tiles.rows, 4096 // width))
    buffer = 2 * width * itemsize * (tiles.keys + tiles.rows)
    room = call.shared_memory_of(device) - _SCRATCH
    return tiles._replace(stages=max(1, min(tiles.stages, 1 + room // buffer)))


def most_rows(width: int) -> int:
    """Rows of a key head that a step can take at once: 128, or 64 of heads wider than 128."""
    return 128 if width <= 128 else 64


def triton_decode_step(
    state: DecodeState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_forget: Tensor | None,
    valid: Tensor | None,
    scale: float,
) -> Tensor:
    """Arguments as in `decode_step`, validated there. ValueError for too many heads a key head."""
    T, G = q.shape[1], q.shape[2] // k.shape[2]
    most = most_rows(max(padded(q.shape[3]), padded(v.shape[3])))
    if most < G:
        raise ValueError(f"q: expected at most {most} query heads a key head, got {G}")
    chunk = (q, k, v, w, beta, log_forget, valid)
    outs = []
    with torch.cuda.device_of(q):
        for at in range(0, T, most // G):
            part = (None if x is None else x[:, at : at + most // G].contiguous() for x in chunk)
            outs.append(_step(state, *part, scale))  # pyright: ignore[reportArgumentType]
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


def _step(
    s: DecodeState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    gate: Tensor | None,
    valid: Tensor | None,
    scale: float,
) -> Tensor:
    (T, HQ), H = q.shape[1:3], k.shape[2]
    B, _, capacity, D = s.keys.shape
    G = HQ // H
    width = max(padded(D), padded(v.shape[3]))
    tiles = choose_step_tiles(width, T * G, s.keys.itemsize, q.device)
    blocks = triton.cdiv(T * G, tiles.rows)
    splits = choose_splits(B * H * blocks, capacity, tiles, q.device)
    BC = 64 if width == 64 else 32
    chunks = triton.cdiv(s.ring_size, BC) if s.has_tail else 0
    rows = make_rows(q, H, v.shape[3], splits + chunks + 1)
    early = start_early(q.device)
    exact = s.keys.dtype == torch.float32
    kinds: dict[str, Any] = {"MOVE": w is not None, "GATE": gate is not None, "EARLY": bool(early)}
    moved = in_range = rows.lses
    if w is not None:
        moved, in_range = _move(s, rows, q, w, beta, bool(early))
    attend_kernel[(splits, B * H, blocks)](
        q, either(gate, q), moved, in_range, either(s.tail_fade, q), either(s.turn, q), s.keys,
        s.values, either(s.fade, q), either(s.unit_fade, q), either(s.valid, q), s.seen, rows.parts,
        rows.lses, scale, T, s.unit, capacity, rows.count, **rows.sizes, BR=tiles.rows,
        BN=min(tiles.keys, s.unit), STAGES=tiles.stages, num_warps=tiles.warps,
        VALID=s.valid is not None, **kinds, **(early if w is not None else {}),
    )  # fmt: skip
    asked = None if valid is None else valid.view(torch.uint8)
    operand: Any = tl.float32 if exact else tl.bfloat16
    tail_kernel[(chunks + 1, B * H)](
        q, k, v, either(w, q), either(beta, q), either(gate, q), either(asked, q), s.keys, s.values,
        *(either(z, q) for z in (s.valid, s.ring, s.ring_fade, s.tail_fade, s.forget)),
        *(either(z, q) for z in (s.raw_k, s.raw_w, s.raw_beta, s.raw_gate)), s.seen,
        s.next, either(s.turn, q), rows.parts, rows.lses, scale, T, s.unit, s.ring_size, capacity,
        rows.count, splits, s.units_kept, **rows.sizes, GP=triton.next_power_of_2(G), F=_factors(w),
        BR=_row_tile(rows), TP=16, CHUNKS=chunks, BC=BC, VALID=s.valid is not None,
        CHUNK_VALID=asked is not None, KEEP=s.croppable, OPERAND=operand,
        num_warps=4 if width <= 128 else 8, **_registers(width, q.device), **kinds, **early,
    )  # fmt: skip
    return _finish(s, rows, q, kinds, early)


def _factors(w: Tensor | None) -> int:
    return 1 if w is None or w.dim() == 4 else w.shape[3]


def _row_tile(rows: Rows) -> int:
    return max(16, triton.next_power_of_2(rows.count))


def _registers(width: int, device: torch.device) -> dict[str, int]:
    """At most, of a thread, so that latency is hidden by other programs."""
    return {"maxnreg": 128 if width <= 128 else 255} if device.type == "cuda" else {}


def _move(
    s: DecodeState,
    rows: Rows,
    q: Tensor,
    w: Tensor,
    beta: Tensor | None,
    early: bool,
) -> tuple[Tensor, Tensor]:
    """Queries at the ends of units, `[B·H, units, 2, rows, DP]`, and their ranges `[B·H]`."""
    B, H, capacity, D = s.keys.shape
    DP, units = padded(D), capacity // s.unit
    movers = choose_movers(B * H, units, DP, q.device)
    x = rows.parts  # scratch of heads that are too wide for one tile
    if DP > 128:
        x = x.new_empty(B * H, movers, rows.count, DP)
    moved = s.keys.new_empty(B * H, units, 2, rows.count, DP)
    in_range = x.new_empty(B * H)
    exact = s.keys.dtype == torch.float32
    operand: Any = tl.float32 if exact else tl.bfloat16
    assert s.high is not None
    move_kernel[(movers, B * H)](
        q, w, beta, s.tail, s.products, s.seen, s.turn, s.high, x, moved, in_range, rows.T, s.unit,
        capacity, rows.count, s.units_kept, *s.high.stride()[:3], **rows.sizes, F=_factors(w),
        BR=_row_tile(rows), STAGES=1 if DP == 256 or exact else 3, OPERAND=operand, EARLY=early,
        num_warps=4 if DP == 64 else 8, **_registers(DP, q.device),
    )  # fmt: skip
    return moved, in_range


def _finish(
    s: DecodeState, rows: Rows, q: Tensor, kinds: dict[str, Any], early: dict[str, Any]
) -> Tensor:
    """Launch the last kernel; its programs of each row and key head merge, copy keys, carry M."""
    B, H, capacity, D = s.keys.shape
    exact, DP = s.keys.dtype == torch.float32, padded(D)
    hoisted = DP <= 128 and not exact  # a unit's product, kept in shared memory
    places = 2 * multiprocessors(q.device.index) if q.device.type == "cuda" else B * H * _CPU_MOVERS
    copies = max(1, min(s.unit // 64, places // (B * H))) if s.has_tail else 0
    carriers = 0
    if s.high is not None:
        carriers = max(1, min(capacity // s.unit * (DP // 64), places // (B * H)))
    out, lse = make_outputs(rows, q)
    operand: Any = tl.float32 if exact else tl.float16
    tables = (s.keys, s.ring, s.fade, s.ring_fade, s.high, s.low, s.products, s.unit_fade, s.forget)
    strides = (0, 0, 0) if s.high is None else s.high.stride()[:3]
    finish_kernel[(rows.count + copies + carriers, B * H)](
        rows.parts, rows.lses, out, lse, s.seen, s.next, either(s.turn, q),
        *(either(z, q) for z in tables), rows.parts.shape[0], rows.count, rows.T, s.unit,
        s.ring_size, capacity, copies, s.units_kept, *strides, **rows.sizes,
        GP=triton.next_power_of_2(rows.G), BP=parts_at_once(rows), BN=DP if hoisted else 64,
        OPERAND=operand, num_warps=4 if DP <= 128 else 8, **kinds, **early,
    )  # fmt: skip
    return out


def triton_record_step(
    state: DecodeState,
    values: Tensor,
    before: Tensor,
    history: Tensor | None,
    borders: Tensor | None,
    valid: Tensor | None,
) -> None:
    """Arguments as in `record_step`."""
    B, T, count = *values.shape[:2], before.shape[1]
    values = values.to(before.dtype).contiguous()
    E = values[0, 0].numel()
    BE = min(256, max(16, triton.next_power_of_2(E)))
    asked = before if valid is None else valid.contiguous().view(torch.uint8)
    with torch.cuda.device_of(values):
        record_kernel[(B, triton.cdiv(E, BE))](
            values, asked, before, either(history, before), either(borders, before), state.seen, T,
            state.unit, state.ring_size, state.keys.shape[2], E=E, COUNT=count,
            CP=triton.next_power_of_2(count), BE=BE, VALID=valid is not None,
            KEEP=history is not None, num_warps=1 if BE < 128 else 4,
        )  # fmt: skip
