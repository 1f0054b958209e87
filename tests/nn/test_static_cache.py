"""StaticLayerCache, its kernels run as Python, against the definition over the whole sequence."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from path_attention import path_attention
from path_attention.nn import Chunk, LayerCache, StaticLayerCache
from path_attention.nn.cache_state import rebuild_tables
from path_attention.nn.cache_units import memory
from path_attention.ops.decode import STEP, DecodeState

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled here"
)
Inputs = list[Tensor | None]
KINDS = [(False, False), (False, True), (True, False), (True, True)]
EXACT = {"rtol": 2e-5, "atol": 2e-5}


def make(
    length: int,
    *,
    moves: bool,
    fades: bool,
    batch: int = 1,
    heads: tuple[int, int] = (2, 1),
    size: tuple[int, int] = (8, 5),
    factors: int | None = None,
) -> Inputs:
    q = torch.randn(batch, length, heads[0], size[0])
    k = torch.randn(batch, length, heads[1], size[0])
    v = torch.randn(batch, length, heads[1], size[1])
    each = (batch, length, heads[1], *([] if factors is None else [factors]))
    w = torch.nn.functional.normalize(torch.randn(*each, size[0]), dim=-1)
    gate = torch.nn.functional.logsigmoid(torch.randn(batch, length, heads[0]) + 2)
    moved = [w, 2 * torch.rand(each)] if moves else [None, None]
    return [q, k, v, *moved, gate if fades else None]


def part(x: Inputs, start: int, stop: int) -> Inputs:
    return [None if y is None else y[:, start:stop] for y in x]


def attend(cache: LayerCache, x: Any, valid: Tensor | None = None) -> Tensor:
    positions = torch.zeros(x[0].shape[:2], dtype=torch.int64)
    chunk = Chunk(positions, valid=valid, before=cache.before)
    return cache.attend(*x, scale=x[0].shape[3] ** -0.5, chunk=chunk)


def attend_all(cache: LayerCache, x: Inputs, chunks: list[int], start: int = 0) -> Tensor:
    outs = []
    for length in chunks:
        outs.append(attend(cache, part(x, start, start + length)))
        start += length
    return torch.cat(outs, 1)


def exact(x: Inputs) -> Tensor:
    wide: Any = [None if y is None else y.double() for y in x]
    return path_attention(*wide, implementation="definition").float()


@pytest.mark.parametrize(("moves", "fades"), KINDS)
def test_steps_over_two_borders_equal_the_whole(poisoned_memory, moves, fades):
    chunks = [16, 3, 1, 16, 7, 16, 16, 16, 16, 16, 16, 1]
    x = make(sum(chunks), moves=moves, fades=fades)
    cache = StaticLayerCache(150, unit=64)
    torch.testing.assert_close(attend_all(cache, x, chunks), exact(x), **EXACT)
    assert cache.seen == sum(chunks)


@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (4, 2)])
def test_rows_and_heads(poisoned_memory, heads):
    chunks = [5, 16, 16, 16, 16, 1, 1]
    x = make(sum(chunks), moves=True, fades=True, batch=2, heads=heads)
    cache = StaticLayerCache(128, unit=64)
    torch.testing.assert_close(attend_all(cache, x, chunks), exact(x), **EXACT)


def test_factors(poisoned_memory):
    x = make(200, moves=True, fades=False, factors=2)
    cache = StaticLayerCache(200, unit=64)
    attend_all(cache, x, [180])
    cache.crop(64)  # nothing is left of the tail
    torch.testing.assert_close(attend_all(cache, x, [6], 64), exact(x)[:, 64:70], **EXACT)
    torch.testing.assert_close(attend_all(cache, x, [80, 4], 70), exact(x)[:, 70:154], **EXACT)


@pytest.mark.parametrize(("moves", "fades"), KINDS)
@pytest.mark.parametrize("prompt", [40, 64, 200])
def test_after_a_prompt(poisoned_memory, moves, fades, prompt):
    """Of which the tail may hold a whole unit more."""
    x = make(prompt + 50, moves=moves, fades=fades)
    cache = StaticLayerCache(260, unit=64)
    outs = [attend_all(cache, x, [prompt]), attend_all(cache, x, [1, 16, 16, 16, 1], prompt)]
    torch.testing.assert_close(torch.cat(outs, 1), exact(x), **EXACT)


def test_after_more_than_a_group(poisoned_memory):
    """Of reflections, which forget nothing; then back to fewer units, still more than a group."""
    x = make(19 * 64 + 20, moves=True, fades=True)
    assert x[4] is not None and x[5] is not None
    x[4], x[5] = 2 * (x[4] > 1).float(), x[5] / 64
    wide: Any = [None if y is None else y.double() for y in x]
    whole = path_attention(*wide, implementation="blockwise").float()
    cache = StaticLayerCache(19 * 64 + 80, unit=64)
    attend_all(cache, x, [19 * 64])
    for start in (19 * 64, 18 * 64, 17 * 64):
        cache.crop(start)
        got = attend_all(cache, x, [16, 4], start)
        torch.testing.assert_close(got, whole[:, start : start + 20], **EXACT)


def test_tables_of_three_groups():
    """M_u = P_{u+1} ⋯ P_last and the gates behind u, unit by unit from the last one."""
    k = torch.zeros(2, 1, 1, 4)
    state = DecodeState.make(k, k, 2, 40 * 64, 64, moves=True, fades=True)
    assert state.products is not None and state.forget is not None
    assert state.high is not None and state.unit_fade is not None
    products = torch.linalg.qr(torch.randn(state.products.shape))[0]
    forget = -torch.rand(state.forget.shape)
    state.products.copy_(products)
    state.forget.copy_(forget)
    rebuild_tables(state, 37)
    behind, fade = torch.eye(4).expand(2, 1, 4, 4), torch.zeros(2, 2)
    for u in reversed(range(37)):
        torch.testing.assert_close(state.high[:, u], behind, **EXACT)
        torch.testing.assert_close(state.unit_fade[:, u], fade, **EXACT)
        behind, fade = products[:, u, :, 0] @ behind, fade + forget[:, u]


@pytest.mark.parametrize(("moves", "fades"), KINDS)
def test_long_chunks_onto_a_settled_cache(poisoned_memory, moves, fades):
    """As a prompt's: by the operator, and by what decoding has for the past; no step is taken."""
    chunks = [1, 99, 17, 200, 2]
    x = make(sum(chunks), moves=moves, fades=fades, batch=2, factors=1)
    cache = StaticLayerCache(sum(chunks), unit=64)
    torch.testing.assert_close(attend_all(cache, x, chunks), exact(x), **EXACT)


@pytest.mark.parametrize(("moves", "fades"), KINDS)
@pytest.mark.parametrize("prompt", [20, 5])
def test_padding_leaves_no_trace(poisoned_memory, moves, fades, prompt):
    """Rows of 3 and all tokens, in a prompt or in a step, then two steps."""
    x = make(prompt + 2, moves=moves, fades=fades, batch=2)
    valid = torch.arange(prompt) < torch.tensor([[3], [prompt]])
    cache = StaticLayerCache(64, unit=64)
    attend(cache, part(x, 0, prompt), valid)
    got = attend_all(cache, x, [1, 1], prompt)
    keep = [0, 1, 2, prompt, prompt + 1]
    short = [None if y is None else y[:1, keep] for y in x]
    torch.testing.assert_close(got[:1], exact(short)[:, 3:], **EXACT)
    torch.testing.assert_close(got[1:], exact(x)[1:, prompt:], **EXACT)
    assert cache.lengths is not None
    assert cache.lengths.tolist() == [5, prompt + 2]


def test_forks_and_rows():
    x = make(80, moves=True, fades=True, batch=2)
    cache = StaticLayerCache(80, unit=64)
    attend_all(cache, x, [16] * 4)
    other = cache.fork()
    other.select(torch.tensor([1, 0]))
    swapped = [None if y is None else y.flip(0) for y in x]
    got = attend_all(other, swapped, [16], 64)
    torch.testing.assert_close(got, exact(swapped)[:, 64:], **EXACT)
    torch.testing.assert_close(attend_all(cache, x, [16], 64), exact(x)[:, 64:], **EXACT)


def test_settles_from_an_earlier_border(poisoned_memory):
    """Where nothing is left of a tail, not even its buffers."""
    x = make(300, moves=True, fades=True)
    cache = StaticLayerCache(300, unit=64)
    attend_all(cache, x, [300])
    assert cache.sealed == 192
    cache.crop(64)
    torch.testing.assert_close(attend_all(cache, x, [6, 3], 64), exact(x)[:, 64:73], **EXACT)


@pytest.mark.parametrize("seen", [0, 40])
def test_forks_settle_apart(seen):
    x = make(seen + 3, moves=True, fades=False)
    records = torch.randn(1, seen + 3, 4)
    cache = StaticLayerCache(64, unit=64)
    step(cache, x, records, 0, seen)
    other = cache.fork()
    step(cache, x, records, seen, seen + 3)
    step(other, x, -records, seen, seen + 2)
    assert torch.equal(cache.before["record"], records[:, -2:])
    assert torch.equal(other.before["record"], -records[:, -3:-1])
    cache.crop(seen + 2)
    assert torch.equal(cache.before["record"], records[:, -3:-1])


def step(cache: LayerCache, x: Any, records: Tensor, start: int, stop: int) -> None:
    """Append tokens whose records reach two tokens on."""
    if start == stop:
        return
    chunk = Chunk(torch.zeros(1, stop - start, dtype=torch.int64), before=cache.before)
    chunk.remember("record", records[:, start:stop], 2)
    cache.attend(*part(x, start, stop), scale=1.0, chunk=chunk)


def test_taken_back_where_nothing_moves():
    x = make(30, moves=False, fades=False)
    cache = StaticLayerCache(30)
    attend_all(cache, x, [16, 9])
    cache.crop(20)
    torch.testing.assert_close(attend_all(cache, x, [10], 20), exact(x)[:, 20:], **EXACT)


@pytest.mark.parametrize(("moves", "fades"), KINDS[1:])
def test_taken_back_to_the_tail_and_to_borders(poisoned_memory, moves, fades):
    """In place; the steps after it are the whole sequence's, over the next sealing too."""
    x = make(220, moves=moves, fades=fades)
    cache = StaticLayerCache(256, unit=64)
    attend_all(cache, x, [150, 40, 4, 2])  # a step sealed a unit at 192
    assert cache.seen == 196 and cache.sealed == 128
    held = [y.data_ptr() for y in cache.tensors()]
    whole = exact(x)
    for length in (195, 190, 132, 128, 64):
        cache.crop(length)
        assert cache.seen == length
        got = attend_all(cache, x, [3], length)
        torch.testing.assert_close(got, whole[:, length : length + 3], **EXACT)
    got = attend_all(cache, x, [123, 3, 2], 67)
    torch.testing.assert_close(got, whole[:, 67:195], **EXACT)
    cache.crop(0)
    torch.testing.assert_close(attend_all(cache, x, [2]), whole[:, :2], **EXACT)
    assert [y.data_ptr() for y in cache.tensors()] == held


@pytest.mark.usefixtures("bfloat16_products", "poisoned_memory")
@pytest.mark.parametrize(("moves", "fades", "factors"), [(True, True, None), (True, False, 2)])
def test_in_float16(moves, fades, factors):
    """Where tables are sums of two numbers: 3 roundings, of reflections, which forget nothing."""
    q, k, v, w, beta, gate = make(260, moves=moves, fades=fades, factors=factors)
    assert q is not None and k is not None and v is not None and beta is not None
    x = [q.half(), k.half(), v.half(), w, 2 * (beta > 1).float(), gate]
    cache = StaticLayerCache(260, unit=64)
    attend_all(cache, x, [150])
    right = exact(x)
    for start, chunks in ((150, [16, 30]), (190, [3, 16]), (128, [2, 100, 16])):
        cache.crop(min(start, cache.seen))
        got = attend_all(cache, x, chunks, start)
        wanted = right[:, start : cache.seen]
        rounding = (wanted.half().float() - wanted).norm()
        assert (got.float() - wanted).norm() <= 3 * rounding


def test_what_cannot_be_taken_back_names_the_nearest():
    x = make(300, moves=True, fades=False)
    cache = StaticLayerCache(300, unit=64)
    attend_all(cache, x, [200, 1, 99])
    assert cache.sealed == 192 and cache.nearest_crops(100) == (64, 128)
    with pytest.raises(ValueError, match="length: expected 64 or 128, .* or 192 to 300: .* 100"):
        cache.crop(100)
    with pytest.raises(ValueError, match="length: expected 0 to 300"):
        cache.crop(301)
    assert cache.seen == 300


def test_the_last_64_tokens_can_always_be_taken_back():
    x = make(20, moves=True, fades=False)
    cache = StaticLayerCache(1024, unit=64)
    attend(cache, part(x, 0, 1))
    for seen in range(1, 1024):
        cache.seen = seen
        for length in range(max(0, seen - 64), seen + 1):
            assert cache.nearest_crops(length) == (length, length)


def test_its_size_does_not_grow():
    x = make(40, moves=True, fades=True)
    cache = StaticLayerCache(64, unit=64)
    attend_all(cache, x, [STEP])
    before = memory([cache])
    attend_all(cache, x, [STEP, 8], STEP)
    assert memory([cache]) == before


def test_refusals():
    x = make(20, moves=True, fades=False)
    with pytest.raises(ValueError, match="room: expected at least 1 token, got 0"):
        StaticLayerCache(0)
    with pytest.raises(ValueError, match="expected room for 20 tokens, got 10"):
        attend(StaticLayerCache(10), x)
    wide = [None if y is None else y.double() for y in x]
    with pytest.raises(ValueError, match="got torch.float64 with a static cache"):
        attend(StaticLayerCache(20), wide)
    cache = StaticLayerCache(20)
    attend(cache, part(x, 0, 3))
    with pytest.raises(ValueError, match="expected one that has not settled"):
        cache.export()
