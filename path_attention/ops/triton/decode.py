"""Decoding on NVIDIA GPUs: split-KV attention to sealed units, and a whole step in four launches.

docs/algorithm.md §5. `append_kernel` takes a chunk of up to 16 tokens in: keys of the tail pass it
(float32, in place), the tail's transition passes it as if its rows were keys, the chunk attends
itself and the tail. `units_kernel` splits the sealed units over the device; a query is moved to a
unit's end where its keys are read, by one matrix in float16. `merge_kernel` merges the parts by
log-sum-exp. `seal_kernel` does nothing but where a unit became complete: then the tail's keys are
the unit's for ever, and each earlier unit's matrix is carried over it.

Lengths are on the device and nothing waits for the host, so a step can be captured in a CUDA graph
and replayed. The matrices M are kept as a float16 sum high + low, of which queries take the high.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from path_attention.ops.decode import DecodeState, KeyGroup, Past, by_key_head, move_back
from path_attention.ops.triton.call import either
from path_attention.ops.triton.decode_kernels import (
    append_kernel,
    merge_kernel,
    seal_kernel,
    units_kernel,
)
from path_attention.ops.triton.tiles import padded

_CPU_SPLITS = 3  # of the interpreter, where there is nothing to fill
_MERGED = 16  # parts at once


class Tiles(NamedTuple):
    """What the kernels are compiled for: rows and keys a tile, pipeline depth, warps.

    `programs`: of `units_kernel` that a multiprocessor holds at once; `least`: keys of a split that
    are worth one.
    """

    rows: int
    keys: int
    stages: int
    warps: int
    programs: int
    least: int = 256
    append_warps: int = 4
    seal_warps: int = 4


def choose_tiles(width: int, rows: int, itemsize: int) -> Tiles:
    """For head sizes padded to `width`, rows of a key head, and the keys' bytes an element."""
    rows = min(64, max(16, triton.next_power_of_2(rows)))
    bytes_of_a_token = 2 * width * itemsize
    keys = 64 if bytes_of_a_token <= 512 else 32
    stages = 3 if bytes_of_a_token <= 1024 else 2
    programs = 4 if bytes_of_a_token <= 256 else 2
    return Tiles(rows, keys, stages, 4, programs, append_warps=4 if width <= 64 else 8)


@lru_cache
def _multiprocessors(index: int | None) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def choose_splits(programs: int, length: int, tiles: Tiles, device: torch.device) -> int:
    """Splits of `length` keys: with so many programs each, all at once on the device."""
    most = max(1, -(-length // tiles.least))
    if device.type != "cuda":
        return min(most, _CPU_SPLITS)
    return max(1, min(most, _multiprocessors(device.index) * tiles.programs // programs))


class _Rows(NamedTuple):
    """Sizes of the rows of a call, and where its partial results go."""

    B: int
    T: int
    H: int
    G: int
    D: int
    DV: int
    parts: Tensor  # float32 [parts, B·H, T·G, DVP]
    lses: Tensor  # float32 [parts, B·H, T·G], to base 2

    @property
    def count(self) -> int:
        return self.T * self.G

    @property
    def sizes(self) -> dict[str, int]:
        common = {"H": self.H, "G": self.G, "D": self.D, "DV": self.DV}
        return common | {"DP": padded(self.D), "DVP": padded(self.DV)}


def _rows(q: Tensor, H: int, DV: int, parts: int) -> _Rows:
    B, T, HQ, D = q.shape
    shape = (parts, B * H, T * (HQ // H))
    out = q.new_empty(*shape, padded(DV), dtype=torch.float32)
    return _Rows(B, T, H, HQ // H, D, DV, out, out.new_empty(shape))


# --- The past of a cache that grows --------------------------------------------------------------


def triton_decode(
    q: Tensor, past: Past, scale: float, elapsed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Arguments as in `decode_attention`, validated there; q in float32."""
    todo: list[tuple[KeyGroup, Tensor, Tensor | None]] = []
    if past.tail is not None:
        todo.append((past.tail, q, elapsed))
    if past.transition is not None and past.groups:
        q = move_back(q, past.transition)
    if past.decay is not None and elapsed is not None:
        elapsed = elapsed + past.decay[:, None]
    for group in past.groups:
        moved = q if group.after is None else move_back(q, group.after)
        late = elapsed
        if late is not None and group.after_decay is not None:
            late = late + group.after_decay[:, None]
        todo.append((group, moved, late))
    H, DV = todo[0][0].keys.shape[2], todo[0][0].values.shape[3]
    width = max(padded(q.shape[3]), padded(DV))
    count = q.shape[1] * q.shape[2] // H
    tiles = [choose_tiles(width, count, group.keys.itemsize) for group, _, _ in todo]
    splits = [
        choose_splits(
            q.shape[0] * H * triton.cdiv(count, t.rows) * len(todo), g.keys.shape[1], t, q.device
        )
        for (g, _, _), t in zip(todo, tiles, strict=True)
    ]
    rows, first = _rows(q, H, DV, sum(splits)), 0
    with torch.cuda.device_of(q):
        for (group, moved, late), t, n in zip(todo, tiles, splits, strict=True):
            _attend_group(rows, group, moved, late, scale, t, first, n)
            first += n
        return _merge(rows, q.new_empty(0), None)


def _attend_group(
    rows: _Rows,
    group: KeyGroup,
    q: Tensor,
    elapsed: Tensor | None,
    scale: float,
    tiles: Tiles,
    first: int,
    splits: int,
) -> None:
    D, DP, H = rows.D, padded(rows.D), rows.H
    x = by_key_head(q, H)
    x = torch.nn.functional.pad(x, (0, DP - D)).contiguous()
    late = None if elapsed is None else by_key_head(elapsed[..., None], H).contiguous()
    tables = (group.suffix, group.unit_decay)
    units = next((z.shape[1] for z in tables if z is not None), 1)
    move = None if group.suffix is None else _packed(group.suffix)
    strides = _table_strides(move, 3), _table_strides(group.decay, 3)
    gate = late is not None and group.decay is not None
    fade = None if group.unit_decay is None else group.unit_decay.contiguous()
    k, v = (z if z.stride(3) == 1 else z.contiguous() for z in (group.keys, group.values))
    valid = None if group.valid is None else group.valid.contiguous().view(torch.uint8)
    cb, ct, ch = strides[1]
    units_kernel[(splits, rows.B * H, triton.cdiv(rows.count, tiles.rows))](
        x, either(late, x), k, v, either(move, x), either(group.decay, x), either(fade, x),
        either(valid, x), either(group.rows, x), x, rows.parts, rows.lses, scale, k.shape[1],
        max(1, k.shape[1] // units), rows.count, first,
        k.stride(0), k.stride(2), k.stride(1), v.stride(0), v.stride(2), v.stride(1),
        *strides[0], cb, ch, ct, *_table_strides(fade, 2), 0 if valid is None else valid.stride(0),
        **rows.sizes, BR=tiles.rows, BN=tiles.keys, STAGES=tiles.stages, MOVE=move is not None,
        GATE=gate, FADE=fade is not None, VALID=valid is not None, INDEX=group.rows is not None,
        SEEN=False, WHOLE=False, num_warps=tiles.warps,
    )  # fmt: skip


def _packed(x: Tensor) -> Tensor:
    """Matrices `[…, D, D]` each of which lies in one piece."""
    return x if x.stride()[-2:] == (x.shape[-1], 1) else x.contiguous()


def _table_strides(x: Tensor | None, count: int) -> tuple[int, ...]:
    return (0,) * count if x is None else x.stride()[:count]


def _merge(rows: _Rows, out: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    """out `[B, T, HQ, DV]` in out's dtype, lse in float32; `seen` moves on by T."""
    HQ = rows.H * rows.G
    out = out.new_empty(rows.B, rows.T, HQ, rows.DV)
    lse = rows.lses.new_empty(rows.B, rows.T, HQ)
    sizes = {n: rows.sizes[n] for n in ("H", "G", "DV", "DVP")}
    merge_kernel[(rows.B * rows.H, rows.count)](
        rows.parts, rows.lses, out, lse, either(seen, out), rows.parts.shape[0], rows.count, rows.T,
        **sizes, BP=_MERGED, ADVANCE=seen is not None, num_warps=2,
    )  # fmt: skip
    return out, lse


# --- A step of a static cache --------------------------------------------------------------------


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
    """Arguments as in `decode_step`, validated there."""
    s, (T, HQ), H = state, q.shape[1:3], k.shape[2]
    B, _, capacity, D = s.keys.shape
    G, DV, F = HQ // H, v.shape[3], 1 if w is None or w.dim() == 4 else w.shape[3]
    width = max(padded(D), padded(DV))
    tiles = choose_tiles(width, T * G, s.keys.itemsize)
    blocks = triton.cdiv(T * G, tiles.rows)
    splits = choose_splits(B * H * blocks, capacity, tiles, q.device)
    chunks = triton.cdiv(s.ring_size, 64) if s.has_tail else 0
    rows = _rows(q, H, DV, splits + chunks + 1)
    x = rows.parts.new_empty(B * H, rows.count, padded(D))
    elapsed = x.new_empty(B * H, rows.count)
    q, k, v = (z.contiguous() for z in (q, k, v))
    w, beta, gate = (None if z is None else z.contiguous() for z in (w, beta, log_forget))
    asked = None if valid is None else valid.contiguous().view(torch.uint8)
    kinds = {"MOVE": w is not None, "GATE": gate is not None, "VALID": s.valid is not None}
    GP = triton.next_power_of_2(G)
    with torch.cuda.device_of(q):
        roles = chunks + (padded(D) // 64 if w is not None else 0) + 1
        append_kernel[(roles, B * H)](
            q, k, v, either(w, x), either(beta, x), either(gate, x), either(asked, x),
            s.keys, s.values, *(either(z, x) for z in s.of_chunks), s.seen, x, elapsed,
            rows.parts, rows.lses, scale, T, s.unit, s.ring_size, capacity, rows.count, splits,
            GP=GP, F=F, BR=max(16, triton.next_power_of_2(rows.count)), TP=16, CHUNKS=chunks,
            CHUNK_VALID=asked is not None, num_warps=tiles.append_warps, **rows.sizes, **kinds,
        )  # fmt: skip
        units_kernel[(splits, B * H, blocks)](
            x, elapsed, s.keys, s.values, either(s.high, x), either(s.fade, x),
            either(s.unit_fade, x), either(s.valid, x), x, s.seen, rows.parts, rows.lses, scale,
            0, s.unit if s.has_tail else capacity, rows.count, 0,
            *s.keys.stride()[:3], *s.values.stride()[:3], *_table_strides(s.high, 3),
            *(_table_strides(s.fade, 1) + _table_strides(s.fade, 3)[1:]),
            *_table_strides(s.unit_fade, 2), capacity,
            **rows.sizes, BR=tiles.rows, BN=tiles.keys, STAGES=tiles.stages,
            FADE=gate is not None, INDEX=False, SEEN=True, WHOLE=s.has_tail,
            num_warps=tiles.warps, **kinds,
        )  # fmt: skip
        out, _ = _merge(rows, q, s.seen)
        if s.has_tail:
            _seal(s, x, T, G, GP, tiles)
    return out


def _seal(s: DecodeState, x: Tensor, T: int, G: int, GP: int, tiles: Tiles) -> None:
    B, H, capacity, D = s.keys.shape
    move, single = s.high is not None, s.high is None or s.high.dtype == torch.float32
    items = s.unit // 64 + (capacity // s.unit * (padded(D) // 64) if move else 0)
    programs = items
    if x.device.type == "cuda":
        programs = max(1, min(items, 8 * _multiprocessors(x.device.index) // (B * H)))
    operand: Any = tl.float32 if single else tl.float16
    tables = (s.keys, s.ring, s.fade, s.ring_fade, s.high, s.low, s.product, s.unit_fade, s.forget)
    seal_kernel[(programs, B * H)](
        *(either(z, x) for z in tables), s.seen, T, s.unit, s.ring_size, capacity,
        H=H, G=G, GP=GP, D=D, DP=padded(D), MOVE=move, GATE=s.fade is not None, OPERAND=operand,
        num_warps=tiles.seal_warps,
    )  # fmt: skip
