"""A static cache that takes nothing back: the same numbers in fewer bytes, and no crop."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from path_attention.nn import Chunk, StaticLayerCache
from path_attention.nn.cache_units import memory
from path_attention.ops.decode import DecodeState

pytest.importorskip("triton")
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled here"
)
KINDS = [(False, False), (False, True), (True, False), (True, True)]
# A prompt of a unit and a tail; a step over a border; chunks that stay in the tail's unit, end with
# it, go on for units, and end before a border; a step over it, and one more.
CHUNKS = [126, 3, 17, 46, 130, 61, 2, 1]


def inputs(length: int, *, moves: bool, fades: bool, batch: int, factors: int | None) -> list[Any]:
    """q, k, v, w, β, log f of two query heads and one key head; values wider than keys."""
    q, k, v = (torch.randn(batch, length, n, d) for n, d in ((2, 8), (1, 8), (1, 12)))
    each = (batch, length, 1, *([] if factors is None else [factors]))
    moved = [normalize(torch.randn(*each, 8), dim=-1), 2 * torch.rand(each)]
    gate = logsigmoid(torch.randn(batch, length, 2) + 2)
    return [q, k, v, *(moved if moves else [None, None]), gate if fades else None]


def append(
    cache: StaticLayerCache, x: list[Any], start: int, stop: int, valid: Tensor | None = None
) -> Tensor:
    """Attend and append tokens, each of which records its values for the next two."""
    batch, valid = len(x[2]), None if valid is None else valid[:, start:stop]
    positions = torch.zeros(batch, stop - start, dtype=torch.int64)
    chunk = Chunk(positions, valid=valid, before=cache.before)
    chunk.remember("values", x[2][:, start:stop].flatten(2), 2)
    part = [None if y is None else y[:, start:stop] for y in x]
    return cache.attend(*part, scale=0.3, chunk=chunk)


def both(unit: int = 64) -> tuple[StaticLayerCache, StaticLayerCache]:
    room = sum(CHUNKS)
    return StaticLayerCache(room, unit), StaticLayerCache(room, unit, croppable=False)


def check_equal(kept: StaticLayerCache, other: StaticLayerCache) -> None:
    """All that the smaller cache holds beyond its places for one unit is what the other holds."""
    assert kept.state is not None and other.state is not None
    mine, yours = kept.state.tensors(), other.state.tensors()
    for name in yours.keys() - {"products", "forget"}:
        assert torch.equal(mine[name], yours[name]), name
    assert mine.keys() - yours.keys() == {name for name in mine if name.startswith("raw_")}
    assert torch.equal(kept.before["values"], other.before["values"])


@interpreted
@pytest.mark.parametrize(("moves", "fades"), KINDS[1:])
def test_outputs_are_the_same_bit_for_bit(moves, fades):
    torch.manual_seed(0)
    x = inputs(sum(CHUNKS), moves=moves, fades=fades, batch=1, factors=None)
    kept, other = both()
    start = 0
    for length in CHUNKS:
        got = append(other, x, start, start + length)
        assert torch.equal(append(kept, x, start, start + length), got), start
        start += length
    check_equal(kept, other)
    assert not other._history and not other._borders


@interpreted
def test_rows_of_several_lengths_and_16_bits_too(bfloat16_products):
    """Two factors a token; padding in a prompt, a step and a long chunk; a fork of which rows go
    another way."""
    torch.manual_seed(1)
    x = inputs(240, moves=True, fades=True, batch=2, factors=2)
    x[:3] = [y.half() for y in x[:3]]
    valid = torch.rand(2, 240) < 0.8
    kept, other = both()
    for start, stop in ((0, 126), (126, 130), (130, 180), (180, 184)):
        got = append(other, x, start, stop, valid)
        assert torch.equal(append(kept, x, start, stop, valid), got)
    kept, other = kept.fork(), other.fork()
    for cache in (kept, other):
        cache.select(torch.tensor([1, 1]))
    for start, stop in ((184, 194), (194, 240)):
        got = append(other, x, start, stop)
        assert torch.equal(append(kept, x, start, stop), got)
    check_equal(kept, other)


@interpreted
@pytest.mark.parametrize(("moves", "fades"), [(False, False), (True, True)])
def test_nothing_is_taken_back(moves, fades):
    """Neither of a prompt, which could be, nor of what is settled; it goes on as it was."""
    x = inputs(40, moves=moves, fades=fades, batch=1, factors=None)
    kept, other = both()
    for start, stop in ((0, 20), (20, 30)):
        append(kept, x, start, stop)
        append(other, x, start, stop)
        held = memory([other])
        for length in (0, stop - 1, stop):
            with pytest.raises(ValueError, match=r"cache: expected .* croppable=True .* got cropp"):
                other.crop(length)
        assert (other.seen, memory([other])) == (stop, held)
    assert torch.equal(append(kept, x, 30, 40), append(other, x, 30, 40))


def row_bytes(
    D: int, *, moves: bool, fades: bool, room: int, factors: int = 1, croppable: bool
) -> int:
    """Of a row of two key heads and four query heads, in 16 bits."""
    k = torch.empty(1, 1, 2, D, dtype=torch.bfloat16, device="meta")
    kinds = {"moves": moves, "fades": fades, "croppable": croppable}
    state = DecodeState.make(k, k, 4, room, min(1024, 8 * D), factors=factors, **kinds)
    return sum(x.nbytes for x in state.tensors().values())


@pytest.mark.parametrize("croppable", [True, False])
@pytest.mark.parametrize(("moves", "fades"), KINDS)
@pytest.mark.parametrize(("D", "factors"), [(64, 1), (96, 2), (128, 1), (256, 3)])
def test_a_row_takes_what_is_said(moves, fades, croppable, D, factors):
    """The list of `DecodeState`."""
    S = min(1024, 8 * D)
    room, DP = 8 * S, {64: 64, 96: 128, 128: 128, 256: 256}[D]
    head = room * 4 * D
    query = 0.0
    if moves:
        head += room * 4 * D**2 / S + (S + 64) * 4 * DP + 8 * DP**2
        whole = room * 4 * D**2 / S + (S + 64) * (2 * D + 4 * factors * (D + 1))
        head += whole if croppable else 4 * D**2
    if fades:
        query = room * (4 + 4 / S) + (S + 64) * 4 + 8
        query += room * 4 / S + (S + 64) * 4 if croppable else 4
    counts = 12 if moves or fades else 8
    kinds = {"moves": moves, "fades": fades, "room": room, "factors": factors}
    assert row_bytes(D, croppable=croppable, **kinds) == 2 * head + 4 * query + counts


@pytest.mark.parametrize(
    ("D", "moves", "fades", "kept", "less"),
    [
        (64, True, False, 6_050_316, 5_111_820),
        (64, True, True, 6_200_364, 5_252_412),
        (64, False, True, 4_344_364, 4_334_908),
        (128, True, False, 13_541_900, 10_944_524),
        (128, True, True, 13_708_076, 11_093_180),
        (128, False, True, 8_554_796, 8_537_276),
    ],
)
def test_rows_of_8192_tokens_in_numbers(D, moves, fades, kept, less):
    kinds = {"moves": moves, "fades": fades, "room": 8192}
    assert row_bytes(D, croppable=True, **kinds) == kept
    assert row_bytes(D, croppable=False, **kinds) == less
