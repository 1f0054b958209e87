"""Decoding over a cache that grows, on NVIDIA GPUs: split-KV attention to its groups of keys.

docs/algorithm.md §5. `units_kernel` splits a group's keys over the device; a query is moved to a
unit's end where its keys are read, by one matrix in float16. `merge_kernel` merges the parts by
log-sum-exp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from path_attention.ops.decode import KeyGroup, Past, by_key_head
from path_attention.ops.triton import call
from path_attention.ops.triton.call import either
from path_attention.ops.triton.decode_kernels import merge_kernel, units_kernel
from path_attention.ops.triton.tiles import padded

_CPU_SPLITS = 3  # of the interpreter, where there is nothing to fill
_MERGED = 64  # parts at once, at most
_FILLED = 0.95  # of the best use of places
_MOVED_AT_ONCE = 2**24  # elements of rows at groups' ends
_SCRATCH = 24 * 2**10  # bytes of shared memory besides rows, a unit's matrix and buffers


class Tiles(NamedTuple):
    """What the kernels are compiled for: rows and keys a tile, pipeline depth, warps.

    `programs`: that a multiprocessor holds at once; `least`: keys of a split that are worth one.
    """

    rows: int
    keys: int
    stages: int
    warps: int
    programs: int
    least: int = 256


def choose_tiles(width: int, rows: int, itemsize: int) -> Tiles:
    """For head sizes padded to `width`, rows of a key head, and the keys' bytes an element."""
    rows = min(64, max(16, triton.next_power_of_2(rows)))
    bytes_of_a_token = 2 * width * itemsize
    keys = 128 if bytes_of_a_token <= 256 else 64 if bytes_of_a_token <= 512 else 32
    return Tiles(rows, keys, 3 if bytes_of_a_token <= 1024 else 2, 4, 2)


@lru_cache
def choose_group_tiles(
    width: int, rows: int, itemsize: int, moves: bool, gates: bool, device: torch.device
) -> Tiles:
    """As `choose_tiles`, of what a device's shared memory has room for.

    moves: a unit's matrix is there too. gates: and a tile of rows and keys, of several heads.
    """
    tiles = choose_tiles(width, rows, itemsize)
    room = call.shared_memory_of(device) - _SCRATCH - moves * width * width * max(2, itemsize)
    while True:
        stage = tiles.keys * (2 * width * itemsize + gates * 4 * tiles.rows)
        if room >= 4 * width * tiles.rows + stage * (tiles.stages - 1):
            return tiles
        if tiles.stages > 2:
            tiles = tiles._replace(stages=tiles.stages - 1)
        elif tiles.keys > 32:
            tiles = tiles._replace(keys=tiles.keys // 2)
        elif tiles.stages > 1:
            tiles = tiles._replace(stages=1)
        elif tiles.rows > 16:
            tiles = tiles._replace(rows=tiles.rows // 2)
        else:
            return tiles


@lru_cache
def multiprocessors(index: int | None) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def choose_splits(programs: int, length: int, tiles: Tiles, device: torch.device) -> int:
    """Splits of `length` keys, each of so many programs: few that leave hardly a place idle.

    Programs run in waves, as many at once as the device holds.
    """
    most = max(1, -(-length // tiles.least))
    if device.type != "cuda":
        return min(most, _CPU_SPLITS)
    places = multiprocessors(device.index) * tiles.programs
    return _few_splits(programs, min(most, places), places)


@lru_cache(maxsize=4096)
def _few_splits(programs: int, most: int, places: int) -> int:
    waves = [programs * n / places for n in range(1, most + 1)]
    filled = [x / math.ceil(x) for x in waves]
    return next(n for n, x in enumerate(filled, 1) if x >= _FILLED * max(filled))


class Rows(NamedTuple):
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


def make_rows(q: Tensor, H: int, DV: int, parts: int) -> Rows:
    B, T, HQ, D = q.shape
    shape = (parts, B * H, T * (HQ // H))
    out = q.new_empty(*shape, padded(DV), dtype=torch.float32)
    return Rows(B, T, H, HQ // H, D, DV, out, out.new_empty(shape))


# --- The past of a cache that grows --------------------------------------------------------------


class _Source(NamedTuple):
    """A group of keys, and the rows that attend it, at its end."""

    group: KeyGroup
    x: Tensor  # float32 [B, H, rows, DP]
    elapsed: Tensor | None  # [B, H, rows]


def triton_decode(
    q: Tensor,
    past: Past,
    scale: float,
    elapsed: Tensor | None,
    own: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Arguments as in `decode_attention`, validated there.

    Group by group on top of one set of parts: what is held does not grow with the past.
    """
    every = [*([] if past.tail is None else [past.tail]), *past.groups]
    (B, T, HQ, D), (H, DV) = q.shape, every[0].values.shape[2:]
    width, count = max(padded(D), padded(DV)), T * (HQ // H)
    tiles = []
    for x in every:
        kinds = x.suffix is not None, x.decay is not None and HQ > H
        tiles.append(choose_group_tiles(width, count, x.keys.itemsize, *kinds, q.device))
    longest, t = max(zip((g.keys.shape[1] for g in every), tiles, strict=True))
    programs = B * H * triton.cdiv(count, t.rows)
    rows = make_rows(q, H, DV, choose_splits(programs, longest, t, q.device))
    with torch.cuda.device_of(q):
        sources = _sources(q, past, elapsed)
        for n, (source, t) in enumerate(zip(sources, tiles, strict=True)):
            exact = past.transition is None and q.dtype == source.group.keys.dtype
            _attend_group(rows, source, scale, t, resume=n > 0, exact=exact)
        return _merge(rows, q.float(), own)


def _sources(q: Tensor, past: Past, elapsed: Tensor | None) -> Iterator[_Source]:
    """The tail, then the groups; one product moves all rows to the ends of as many as have room."""
    groups, (D, T) = past.groups, (q.shape[3], q.shape[1])
    H = (past.tail or groups[0]).keys.shape[2]
    spare = padded(D) - D
    x = by_key_head(q.float(), H)
    late = None if elapsed is None else by_key_head(elapsed[..., None], H)[..., 0]
    if past.tail is not None:
        yield _Source(past.tail, _wide(x, spare), _laid_out(late))
    if past.transition is not None and groups:
        x = x @ past.transition.to(x.dtype).mT
    if past.decay is not None and late is not None:
        late = late + _of_rows(past.decay, H, T)
    still = _wide(x, spare)
    together = max(1, _MOVED_AT_ONCE // max(1, x.numel()))
    for start in range(0, len(groups), together):
        some = groups[start : start + together]
        ahead = [n for n, g in enumerate(some) if g.after is not None]
        moved = dict.fromkeys(range(len(some)), still)
        if ahead:
            after = torch.stack([_known(some[n].after) for n in ahead]).to(x.dtype)
            moved |= zip(ahead, _wide(x @ after.mT, spare), strict=True)
        for n, group in enumerate(some):
            behind = late
            if late is not None and group.after_decay is not None:
                behind = late + _of_rows(group.after_decay, H, T)
            yield _Source(group, moved[n], _laid_out(behind))


def _wide(x: Tensor, spare: int) -> Tensor:
    """Rows as kernels read them: in one piece, each with so many zeros behind it."""
    return F.pad(x, (0, spare)) if spare else x.contiguous()


def _known(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def _laid_out(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _of_rows(decay: Tensor, H: int, T: int) -> Tensor:
    """Decays `[B, HQ]` for the rows of key heads, `[B, H, T·G]`."""
    return decay.unflatten(1, (H, -1)).repeat(1, 1, T)


def _attend_group(
    rows: Rows, source: _Source, scale: float, tiles: Tiles, *, resume: bool, exact: bool
) -> None:
    """exact: a row is no more than the keys' dtype holds, but for a power of two."""
    group, x, late = source
    tables = (group.suffix, group.unit_decay)
    units = next((z.shape[1] for z in tables if z is not None), 1)
    move = None if group.suffix is None else _packed(group.suffix)
    strides = _table_strides(move, 3), _table_strides(group.decay, 3)
    gate = late is not None and group.decay is not None
    fade = None if group.unit_decay is None else group.unit_decay.contiguous()
    k, v = (z if z.stride(3) == 1 else z.contiguous() for z in (group.keys, group.values))
    valid = None if group.valid is None else group.valid.contiguous().view(torch.uint8)
    cb, ct, ch = strides[1]
    low = k.itemsize < 4 and not (exact and move is None)
    splits = rows.parts.shape[0]
    units_kernel[(splits, rows.B * rows.H, triton.cdiv(rows.count, tiles.rows))](
        x, either(late, x), k, v, either(move, x), either(group.decay, x), either(fade, x),
        either(valid, x), either(group.rows, x), rows.parts, rows.lses, scale, k.shape[1],
        max(1, k.shape[1] // units), rows.count,
        k.stride(0), k.stride(2), k.stride(1), v.stride(0), v.stride(2), v.stride(1),
        *strides[0], cb, ch, ct, *_table_strides(fade, 2), 0 if valid is None else valid.stride(0),
        **rows.sizes, BR=tiles.rows, BN=tiles.keys, STAGES=tiles.stages, MOVE=move is not None,
        GATE=gate, FADE=fade is not None, VALID=valid is not None, INDEX=group.rows is not None,
        LOW=low, RESUME=resume, num_warps=tiles.warps,
    )  # fmt: skip


def _packed(x: Tensor) -> Tensor:
    """Matrices `[…, D, D]` each of which lies in one piece."""
    return x if x.stride()[-2:] == (x.shape[-1], 1) else x.contiguous()


def _table_strides(x: Tensor | None, count: int) -> tuple[int, ...]:
    return (0,) * count if x is None else x.stride()[:count]


def make_outputs(rows: Rows, q: Tensor) -> tuple[Tensor, Tensor]:
    """out `[B, T, HQ, DV]` in q's dtype and lse in float32, still empty."""
    HQ = rows.H * rows.G
    lse = rows.lses.new_empty(rows.B, rows.T, HQ)
    return q.new_empty(rows.B, rows.T, HQ, rows.DV), lse


def parts_at_once(rows: Rows) -> int:
    """Of `merge_row`."""
    return min(_MERGED, triton.next_power_of_2(rows.parts.shape[0]))


def _merge(rows: Rows, q: Tensor, own: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    out, lse = make_outputs(rows, q if own is None else own[0])
    more = (out, lse) if own is None else (own[0].contiguous(), own[1].float().contiguous())
    sizes = {n: rows.sizes[n] for n in ("H", "G", "DV", "DVP")}
    merge_kernel[(rows.B * rows.H, rows.count)](
        rows.parts, rows.lses, *more, out, lse, rows.parts.shape[0], rows.count, rows.T, **sizes,
        BP=parts_at_once(rows), OWN=own is not None, num_warps=4,
    )  # fmt: skip
    return out, lse
