"""LayerCache against the literal definition over the whole sequence; small units of 64 tokens."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from path_attention import path_attention
from path_attention.nn import Attention, AttentionConfig, Chunk, LayerCache
from path_attention.nn.cache_units import GROUP, KEPT, memory, unit_length
from path_attention.ops.decode import KeyGroup, Past, decode_attention
from path_attention.ops.stick_breaking import stick_breaking_attention

NAMES = ("q", "k", "v", "w", "beta", "log_forget")


@dataclass
class Tokens:
    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor | None
    beta: Tensor | None
    log_forget: Tensor | None

    @classmethod
    def random(
        cls,
        batch: int,
        length: int,
        *,
        transport: bool,
        decay: bool,
        dtype=torch.float64,
        factors: int | None = None,
    ) -> Tokens:
        q = torch.randn(batch, length, 6, 8, dtype=dtype)
        k = torch.randn(batch, length, 2, 8, dtype=dtype)
        v = torch.randn(batch, length, 2, 5, dtype=dtype)
        each = (batch, length, 2) if factors is None else (batch, length, 2, factors)
        w = torch.nn.functional.normalize(torch.randn(*each, 8, dtype=dtype), dim=-1)
        beta = 2 * torch.rand(*each, dtype=dtype)
        gate = torch.nn.functional.logsigmoid(torch.randn(batch, length, 6, dtype=dtype) + 2)
        moved = (w, beta) if transport else (None, None)
        return cls(q, k, v, *moved, gate if decay else None)

    def map(self, function) -> Tokens:
        values = (getattr(self, name) for name in NAMES)
        return Tokens(*(None if x is None else function(x) for x in values))

    def all(self) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self, name) for name in NAMES)

    def columns(self, start: int, stop: int) -> Tokens:
        return self.map(lambda x: x[:, start:stop])

    def exact(self, implementation: str = "definition") -> Tensor:
        return path_attention(*self.map(lambda x: x.double()).all(), implementation=implementation)


def chunk_of(cache: LayerCache, tokens: Tokens, valid: Tensor | None = None) -> Chunk:
    positions = torch.zeros(tokens.q.shape[:2], dtype=torch.int64)
    return Chunk(positions, valid=valid, before=cache.before)


def run(cache: LayerCache, tokens: Tokens, valid: Tensor | None = None) -> Tensor:
    out, lse = path_attention(*tokens.all(), return_lse=True)
    chunk = chunk_of(cache, tokens, valid)
    return cache.extend(out, lse, *tokens.all(), scale=8**-0.5, chunk=chunk)


def run_all(cache: LayerCache, tokens: Tokens, chunks: list[int]) -> Tensor:
    parts, start = [], 0
    for length in chunks:
        parts.append(run(cache, tokens.columns(start, start + length)))
        start += length
    return torch.cat(parts, 1)


ROWS = [(False, True), (True, False), (True, True)]
EXACT = {"rtol": 1e-10, "atol": 1e-10}


@pytest.mark.parametrize(("transport", "decay"), ROWS)
@pytest.mark.parametrize("chunks", [[1] * 12, [7, 1, 1, 3], [1, 11], [70, 1, 80]])
def test_chunks_equal_the_whole(transport: bool, decay: bool, chunks: list[int]) -> None:
    torch.manual_seed(0)
    tokens = Tokens.random(2, sum(chunks), transport=transport, decay=decay)
    cache = LayerCache()
    torch.testing.assert_close(run_all(cache, tokens, chunks), tokens.exact(), **EXACT)
    assert cache.seen == sum(chunks)


@pytest.mark.parametrize(("transport", "decay"), ROWS)
@pytest.mark.parametrize("factors", [None, 2])
@pytest.mark.parametrize("chunks", [[1250, 1, 1, 130, 1, 63, 64, 65], [60] * 24, [1500]])
def test_units_and_groups_equal_the_whole(
    poisoned_memory, transport: bool, decay: bool, factors: int | None, chunks: list[int]
) -> None:
    """More than a group of units, sealed many at once and one at a time."""
    torch.manual_seed(0)
    total = sum(chunks) + 1
    tokens = Tokens.random(2, total, transport=transport, decay=decay, factors=factors)
    cache = LayerCache(unit=64)
    got = run_all(cache, tokens, [*chunks, 1])
    torch.testing.assert_close(got, tokens.exact("blockwise"), rtol=1e-9, atol=1e-9)
    assert cache.sealed == (total - KEPT) // 64 * 64
    assert [group.count for group in cache.groups] == [GROUP * 64, cache.sealed - GROUP * 64]
    assert KEPT <= cache.tail.length < KEPT + 64


def test_the_unit_length_follows_the_head_size() -> None:
    sizes = {4: 64, 8: 64, 9: 128, 64: 512, 80: 1024, 128: 1024, 256: 1024}
    assert {size: unit_length(size) for size in sizes} == sizes
    with pytest.raises(ValueError, match="unit: expected a multiple of 64, got 65"):
        LayerCache(unit=65)


def test_scores_are_never_held_whole(monkeypatch) -> None:
    """Pieces of the past, of units and inside a unit, are merged into the same result."""
    from path_attention.ops import decode

    torch.manual_seed(1)
    tokens = Tokens.random(2, 500, transport=True, decay=True)
    results = []
    for limit in (2**22, 12 * 64 * 90, 12 * 90):
        monkeypatch.setattr(decode, "_SCORES_AT_ONCE", limit)
        results.append(run_all(LayerCache(unit=128), tokens, [410, 90]))
    for result in results:
        torch.testing.assert_close(result, tokens.exact(), **EXACT)


def test_a_long_prefill_holds_a_chunk_of_scores_at_most() -> None:
    """The largest tensor that is made stays below the limit, where all scores would be over it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from path_attention.ops import decode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and not out._is_view():
                self.size = max(self.size, out.numel())
            return out

    torch.manual_seed(2)
    tokens = Tokens.random(1, 4096, transport=True, decay=True, dtype=torch.float32)
    cache, sizes = LayerCache(unit=64), []
    for start in range(0, 4096, 512):
        with Largest() as largest:
            run(cache, tokens.columns(start, start + 512))
        sizes.append(largest.size)
    assert max(sizes) <= decode._SCORES_AT_ONCE < 512 * 3584 * 6


@pytest.mark.parametrize(("transport", "decay"), ROWS)
def test_rows_of_different_lengths(transport: bool, decay: bool) -> None:
    """Each chunk pads rows on the right with garbage; each row equals itself alone."""
    torch.manual_seed(1)
    lengths = torch.tensor([[4, 0, 90, 1, 2], [1, 3, 150, 0, 2], [0, 1, 70, 1, 5]])  # row, chunk
    widths = [4, 3, 160, 1, 6]
    rows = [Tokens.random(1, int(n), transport=transport, decay=decay) for n in lengths.sum(1)]
    cache, outputs = LayerCache(), [[] for _ in rows]
    for chunk, width in enumerate(widths):
        padded = Tokens.random(3, width, transport=transport, decay=decay)
        valid = torch.arange(width) < lengths[:, chunk, None]
        for row, tokens in enumerate(rows):
            start, n = int(lengths[row, :chunk].sum()), int(lengths[row, chunk])
            for name in NAMES:
                if getattr(padded, name) is not None:
                    getattr(padded, name)[row, :n] = getattr(tokens, name)[0, start : start + n]
        out = run(cache, padded, valid)
        assert out.isfinite().all()
        for row in range(3):
            outputs[row].append(out[row, : int(lengths[row, chunk])])
    for row, tokens in enumerate(rows):
        torch.testing.assert_close(torch.cat(outputs[row])[None], tokens.exact(), **EXACT)
    assert cache.lengths is not None and cache.sealed
    assert cache.lengths.tolist() == lengths.sum(1).tolist()


def swaps(length: int) -> Tokens:
    """Queries and keys along a route of swaps of two of 8 items at β = 2, in float32."""
    pairs = torch.stack([torch.randperm(8)[:2] for _ in range(length)])
    w = torch.zeros(1, length, 1, 8)
    w[0, torch.arange(length), 0, pairs[:, 0]] = 0.5**0.5
    w[0, torch.arange(length), 0, pairs[:, 1]] = -(0.5**0.5)
    q, k, v = (torch.randn(1, length, 1, 8) for _ in range(3))
    return Tokens(q, k, v, w, torch.full((1, length, 1), 2.0), None)


def test_swaps_are_tracked_over_thousands_of_tokens() -> None:
    """Token by token through a prompt of 1500 and 900 steps: permutations stay permutations."""
    torch.manual_seed(2)
    tokens = swaps(2400)
    got = run_all(LayerCache(unit=64), tokens, [1500] + [1] * 900).double()
    exact = tokens.exact("blockwise")
    # 0.5^½ in float32 leaves 1 − β‖w‖² within 2⁻²³ of −1: at most 2400 · 2⁻²³ = 3e-4 of a product.
    torch.testing.assert_close(got, exact, rtol=1e-3, atol=1e-3)
    early, late = (
        (got - exact)[:, part].abs().mean() for part in (slice(0, 400), slice(-400, None))
    )
    assert late < 10 * early + 1e-6


def test_a_bfloat16_cache_does_not_drift() -> None:
    """Keys are rounded once: the error at the end is that of the start, a rounding or so."""
    torch.manual_seed(3)
    exact = Tokens.random(1, 1400, transport=True, decay=False, dtype=torch.float32)
    tokens = exact.map(lambda x: x)
    for name in ("q", "k", "v"):
        setattr(tokens, name, getattr(exact, name).bfloat16())
    wanted = tokens.exact("blockwise")
    got = run_all(LayerCache(unit=64), tokens, [300] + [1] * 1100).double()
    errors = (got - wanted).norm(dim=-1)[0].mean(-1) / wanted.norm(dim=-1)[0].mean(-1)
    rounding = (wanted.bfloat16() - wanted).norm() / wanted.norm()
    windows = [errors[start : start + 200].mean() for start in range(400, 1400, 200)]
    assert all(window < 3 * rounding for window in windows)
    assert windows[-1] < 1.5 * windows[0]


def test_gate_sums_do_not_cancel() -> None:
    """A running sum of −30000 leaves the last tokens' gates exact in float32."""
    torch.manual_seed(3)
    tokens = Tokens.random(1, 1020, transport=False, decay=True, dtype=torch.float32)
    assert tokens.log_forget is not None
    tokens.log_forget[:, :1000] = -30.0
    last = run_all(LayerCache(), tokens, [1000] + [1] * 20)[:, 1000:].double()
    torch.testing.assert_close(last, tokens.exact()[:, 1000:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gate", [-torch.inf, -1e30])
def test_a_gate_that_forgets_everything(gate: float) -> None:
    tokens = Tokens.random(1, 300, transport=True, decay=True)
    assert tokens.log_forget is not None
    tokens.log_forget[:, [5, 100, 250, 299]] = gate
    got = run_all(LayerCache(), tokens, [200, 60, 39, 1])
    torch.testing.assert_close(got, tokens.exact(), **EXACT)


def test_select_moves_all_state_and_reset_forgets() -> None:
    torch.manual_seed(4)
    tokens = Tokens.random(3, 400, transport=True, decay=True)
    cache, order = LayerCache(), torch.tensor([2, 0, 0, 1])
    run(cache, tokens.columns(0, 200))
    cache.select(order)
    held = [group.storage for group in cache.groups]
    got = run_all(cache, tokens.map(lambda x: x[order, 200:]), [1, 150, 49])
    torch.testing.assert_close(got, tokens.exact()[order, 200:], **EXACT)
    assert [group.storage for group in cache.groups][: len(held)] == held  # sealed: by reference
    assert held[0].tokens["keys"].shape[0] == 3
    cache.reset()
    assert cache.seen == 0 and cache.lengths is None and not cache.before
    torch.testing.assert_close(run(cache, tokens), tokens.exact(), **EXACT)


# --- Crop and fork -------------------------------------------------------------------------------


@pytest.mark.parametrize(("transport", "decay"), ROWS)
@pytest.mark.parametrize("length", [0, 64, 128, 960, 1024, 1088, 1152, 1153, 1200, 1239])
def test_crop_is_exact(transport: bool, decay: bool, length: int) -> None:
    """In the tail, at borders, in the last group and in the one before."""
    torch.manual_seed(5)
    tokens = Tokens.random(2, 1300, transport=transport, decay=decay)
    cache = LayerCache(unit=64)
    run_all(cache, tokens, [1200, 1, 39])
    assert cache.sealed == 1152
    cache.crop(length)
    assert cache.seen == length
    rest = Tokens.random(2, 150, transport=transport, decay=decay)
    whole = Tokens(*(
        None if a is None else torch.cat([a[:, :length], b], 1)
        for a, b in zip(tokens.all(), rest.all(), strict=True)
    ))  # fmt: skip
    got = run_all(cache, rest, [1, 1, 120, 28])
    torch.testing.assert_close(got, whole.exact("blockwise")[:, length:], rtol=1e-9, atol=1e-9)
    assert cache.lengths is not None and cache.lengths.tolist() == [length + 150] * 2


def test_a_crop_that_cannot_be_exact_names_the_nearest() -> None:
    cache = LayerCache(unit=64)
    run(cache, Tokens.random(1, 300, transport=True, decay=False))
    assert cache.sealed == 192 and cache.nearest_crops(100) == (64, 128)
    with pytest.raises(ValueError, match="length: expected 64 or 128, .* or 192 to 300: .* 100"):
        cache.crop(100)
    for length in (-1, 301):
        with pytest.raises(ValueError, match="length: expected 0 to 300"):
            cache.crop(length)
    assert cache.seen == 300


def values_of(cache: LayerCache) -> list[Tensor]:
    past = cache._past()
    parts = [*past.groups, *([] if past.tail is None else [past.tail])]
    return [x.clone() for part in parts for x in part if x is not None]


@pytest.mark.parametrize("kind", ["moved", "plain"])
def test_neither_side_of_a_fork_sees_the_other(kind: str) -> None:
    torch.manual_seed(6)
    moved = kind == "moved"
    start, a, b = (Tokens.random(1, n, transport=moved, decay=moved) for n in (700, 200, 200))

    def go(cache: LayerCache, tokens: Tokens) -> Tensor:
        if moved:
            return run_all(cache, tokens, [1, 9, tokens.q.shape[1] - 10])
        chunk = chunk_of(cache, tokens)
        return cache.extend_plain(tokens.q, tokens.k, tokens.v, scale=8**-0.5, chunk=chunk)

    def exact(tokens: Tokens) -> Tensor:
        both = [
            None if x is None else torch.cat([x, y], 1)
            for x, y in zip(start.all(), tokens.all(), strict=True)
        ]
        return Tokens(*both).exact()[:, 700:]

    one = LayerCache(unit=64)
    go(one, start)
    other, third = one.fork(), one.fork()
    before = values_of(third)
    torch.testing.assert_close(go(one, a), exact(a), **EXACT)
    torch.testing.assert_close(go(other, b), exact(b), **EXACT)
    one.crop(704)
    again = go(one, b)
    whole = Tokens(*(
        None if x is None else torch.cat([x, y[:, :4], z], 1)
        for x, y, z in zip(start.all(), a.all(), b.all(), strict=True)
    )).exact()  # fmt: skip
    torch.testing.assert_close(again, whole[:, 704:], **EXACT)
    one.crop(512)  # behind what the forks read, which is not written over
    go(one, b)
    for x, y in zip(values_of(third), before, strict=True):
        assert torch.equal(x, y)
    assert third.seen == 700
    torch.testing.assert_close(go(third, a), exact(a), **EXACT)


def test_a_fork_costs_its_tail_once_it_goes_on() -> None:
    """And both sides' next unit no more than that unit."""
    tokens = Tokens.random(1, 64 * 200, transport=True, decay=False, dtype=torch.float32)
    one = LayerCache(unit=64)
    run(one, tokens)
    alone, other = memory([one]), one.fork()
    assert all(a.storage is b.storage for a, b in zip(one.groups, other.groups, strict=True))
    assert memory([one, other]) == alone
    run(other, tokens.columns(0, 1))
    of_tail = sum(x.nbytes for x in (*other.tail.buffers.values(), other._transition))
    assert memory([one, other]) - alone <= 1.01 * of_tail
    for cache in (one, other):
        run(cache, tokens.columns(0, 130))
    assert memory([one, other]) < 1.1 * alone


def test_a_plain_fork_copies_nothing() -> None:
    tokens, one = Tokens.random(1, 4000, transport=False, decay=False), LayerCache()
    chunk = chunk_of(one, tokens)
    one.extend_plain(tokens.q, tokens.k, tokens.v, scale=1.0, chunk=chunk)
    other = one.fork()
    assert memory([one, other]) == memory([one])
    for cache in (one, other):
        cache.select(torch.zeros(8, dtype=torch.int64))
        assert len(cache.lengths) == 8
    assert memory([one, other]) < 1.01 * memory([one])
    part = tokens.columns(0, 3).map(lambda x: x.expand(8, -1, -1, -1))
    out = one.extend_plain(part.q, part.k, part.v, scale=8**-0.5, chunk=chunk_of(one, part))
    whole = [torch.cat([x, x[:, :3]], 1) for x in (tokens.q, tokens.k, tokens.v)]
    exact = path_attention(*whole, scale=8**-0.5)[:, -3:]
    torch.testing.assert_close(out, exact.expand(8, -1, -1, -1), **EXACT)


# --- Nothing to move -----------------------------------------------------------------------------


def test_plain_keys_are_read_by_one_call_of_sdpa() -> None:
    """Padded or not, one token or more, one call; the keys stay as they came."""
    for padded in (False, True):
        tokens, cache = Tokens.random(2, 10, transport=False, decay=False), LayerCache()
        exact = tokens.exact()
        valid = torch.ones(2, 10, dtype=torch.bool) if padded else None
        for start, stop in ((0, 3), (3, 4), (4, 9), (9, 10)):
            part = tokens.columns(start, stop)
            now = None if valid is None else valid[:, start:stop]
            chunk = chunk_of(cache, part, now)
            with torch.profiler.profile() as profiler:
                out = cache.extend_plain(part.q, part.k, part.v, scale=8**-0.5, chunk=chunk)
            called = [event.name for event in profiler.events()]
            assert called.count("aten::scaled_dot_product_attention") == 1
            torch.testing.assert_close(out, exact[:, start:stop], **EXACT)
        (group,) = cache.groups
        assert torch.equal(group.read("keys"), tokens.k)
        assert torch.equal(group.read("values"), tokens.v)
        assert (group.read("valid") is None) == (not padded) and cache.lengths.tolist() == [10, 10]


def test_a_plain_cache_takes_padding_after_chunks_without() -> None:
    tokens, cache = Tokens.random(2, 7, transport=False, decay=False), LayerCache()
    outs = []
    valid = torch.tensor([[True, True], [True, False]])
    for start, stop, now in ((0, 3, None), (3, 5, valid), (5, 7, None)):
        part = tokens.columns(start, stop)
        chunk = chunk_of(cache, part, now)
        outs.append(cache.extend_plain(part.q, part.k, part.v, scale=8**-0.5, chunk=chunk))
    torch.testing.assert_close(outs[2][0], tokens.exact()[0, 5:], **EXACT)
    alone = tokens.map(lambda x: x[1:, [0, 1, 2, 3, 5, 6]]).exact()
    torch.testing.assert_close(outs[2][1], alone[0, 4:], **EXACT)
    assert cache.lengths.tolist() == [7, 6]
    cache.crop(5)
    assert cache.lengths.tolist() == [5, 4]


def test_no_key_attends_to_nothing() -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="past: expected keys to attend, got none"):
        decode_attention(q, Past(()), scale=1.0)
    k = torch.randn(1, 5, 2, 8)
    hidden = KeyGroup(k, k, valid=torch.zeros(1, 5, dtype=torch.bool))
    out, lse = decode_attention(q, Past((hidden, hidden)), scale=1.0)
    assert (out == 0).all() and (lse == -torch.inf).all()
    shown = KeyGroup(k, k)
    both = decode_attention(q, Past((hidden, shown, hidden)), scale=1.0)
    for a, b in zip(both, decode_attention(q, Past((shown,)), scale=1.0), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("size", [1.0, 1e3])
@pytest.mark.parametrize("forked", [False, True])
def test_stick_breaking_over_chunks_is_literal_and_stable(size: float, forked: bool) -> None:
    """Logits of ±1e3 too: nothing overflows, and weights are parts of one stick."""
    tokens = Tokens.random(1, 14, transport=False, decay=False)
    q, k, v = size * tokens.q, tokens.k, tokens.v
    cache, parts = LayerCache(), []
    for start, stop in ((0, 6), (6, 7), (7, 14)):
        one = [x[:, start:stop] for x in (q, k, v)]
        out, rest = stick_breaking_attention(*one)
        chunk = chunk_of(cache, tokens.columns(start, stop))
        extended = cache.extend_stick_breaking(out, rest, *one, scale=8**-0.5, chunk=chunk)
        parts.append(extended)
        cache = cache.fork() if forked else cache
    assert len(cache.groups) == (3 if forked else 1)
    got = torch.cat(parts, 1)
    z = torch.einsum("bihgd,bjhd->bhgij", q.unflatten(2, (2, 3)), k) * 8**-0.5
    expected = torch.zeros_like(got)
    for i in range(14):
        for head in range(6):
            left = 1.0
            for j in range(i - 1, -1, -1):
                part = z[0, head // 3, head % 3, i, j].sigmoid()
                expected[0, i, head] += left * part * v[0, j, head // 3]
                left = left * (1 - part)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_backward_through_the_past_raises() -> None:
    tokens = Tokens.random(1, 4, transport=True, decay=False)
    tokens.q.requires_grad_()
    cache = LayerCache()
    run(cache, tokens.map(lambda x: x[:, :2])).sum().backward()  # no past yet: exact
    out = run(cache, tokens.map(lambda x: x[:, 2:]))
    with pytest.raises(RuntimeError, match="gradients don't flow through a cache"):
        out.sum().backward()


@pytest.mark.parametrize("normalizer", ["softmax", "stick_breaking", "linear"])
def test_every_normalizer_keeps_no_gradients(normalizer: str) -> None:
    config = AttentionConfig(
        hidden_size=8, num_attention_heads=2, transport="rotary", normalizer=normalizer
    )
    layer, cache = Attention(config), LayerCache()
    x = torch.randn(2, 6, 8)
    exact = torch.autograd.grad(layer(x[:, :3]).sum(), layer.q_proj.weight)[0]
    first = layer(x[:, :3], cache=cache)
    assert torch.equal(torch.autograd.grad(first.sum(), layer.q_proj.weight)[0], exact)
    assert not any(y.requires_grad for y in cache.tensors())
    with pytest.raises(RuntimeError, match="gradients don't flow through a cache"):
        layer(x[:, 3:], cache=cache).sum().backward()


@pytest.mark.parametrize("decay", ["none", "forget"])
def test_linear_layers_decode_in_constant_memory(decay: str) -> None:
    config = AttentionConfig(
        hidden_size=8, num_attention_heads=2, decay=decay, normalizer="linear", direction_rank=2
    )
    layer, cache = Attention(config), LayerCache()
    sizes = []
    with torch.no_grad():
        for _ in range(20):
            layer(torch.randn(2, 50, 8), cache=cache)
            layer(torch.randn(2, 1, 8), cache=cache)
            sizes.append(memory([cache]))
    assert not cache.groups and cache.tail.length < 2 * KEPT
    assert max(sizes) <= 1.6 * sizes[2]  # the tail's buffers grow by half at a time
    assert cache.seen == 1020 and cache.lengths.tolist() == [1020, 1020]
