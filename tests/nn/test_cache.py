"""LayerCache against the literal definition over the whole sequence."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from path_attention import path_attention
from path_attention.nn import Attention, AttentionConfig, LayerCache
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
        cls, batch: int, length: int, *, transport: bool, decay: bool, dtype=torch.float64
    ) -> Tokens:
        q = torch.randn(batch, length, 6, 8, dtype=dtype)
        k = torch.randn(batch, length, 2, 8, dtype=dtype)
        v = torch.randn(batch, length, 2, 5, dtype=dtype)
        w = torch.nn.functional.normalize(torch.randn(batch, length, 2, 8, dtype=dtype), dim=-1)
        beta = 2 * torch.rand(batch, length, 2, dtype=dtype)
        gate = torch.nn.functional.logsigmoid(torch.randn(batch, length, 6, dtype=dtype) + 2)
        moved = (w, beta) if transport else (None, None)
        return cls(q, k, v, *moved, gate if decay else None)

    def map(self, function) -> Tokens:
        values = (getattr(self, name) for name in NAMES)
        return Tokens(*(None if x is None else function(x) for x in values))

    def all(self) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self, name) for name in NAMES)

    def exact(self) -> Tensor:
        return path_attention(*self.map(lambda x: x.double()).all(), implementation="definition")


def run(cache: LayerCache, tokens: Tokens, valid: Tensor | None = None) -> Tensor:
    out, lse = path_attention(*tokens.all(), return_lse=True)
    return cache.extend(out, lse, *tokens.all(), scale=8**-0.5, valid=valid)


ROWS = [(False, False), (True, False), (False, True), (True, True)]


@pytest.mark.parametrize(("transport", "decay"), ROWS)
@pytest.mark.parametrize("chunks", [[1] * 12, [7, 1, 1, 3], [1, 11], [70, 1, 80]])
def test_chunks_equal_the_whole(transport: bool, decay: bool, chunks: list[int]) -> None:
    torch.manual_seed(0)
    tokens = Tokens.random(2, sum(chunks), transport=transport, decay=decay)
    cache, start, parts = LayerCache(), 0, []
    for length in chunks:
        parts.append(run(cache, tokens.map(lambda x, a=start, n=length: x[:, a : a + n])))
        start += length
    torch.testing.assert_close(torch.cat(parts, 1), tokens.exact(), rtol=1e-10, atol=1e-10)
    assert cache.seen == sum(chunks)


@pytest.mark.parametrize(("transport", "decay"), ROWS)
def test_rows_of_different_lengths(transport: bool, decay: bool) -> None:
    """Each chunk pads rows on the right with garbage; each row equals itself alone."""
    torch.manual_seed(1)
    lengths = torch.tensor([[4, 0, 1, 2], [1, 3, 0, 2], [0, 1, 1, 5]])  # row, chunk
    widths = [4, 3, 1, 6]
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
        for row in range(3):
            outputs[row].append(out[row, : int(lengths[row, chunk])])
    for row, tokens in enumerate(rows):
        got = torch.cat(outputs[row])[None]
        torch.testing.assert_close(got, tokens.exact(), rtol=1e-10, atol=1e-10)
    assert cache.lengths is not None
    assert cache.lengths.tolist() == lengths.sum(1).tolist()


def test_swaps_are_tracked_in_float32() -> None:
    """512 swaps of two items at β = 2: one product of reflections per step, no drift."""
    torch.manual_seed(2)
    length = 512
    pairs = torch.stack([torch.randperm(8)[:2] for _ in range(length)])
    w = torch.zeros(1, length, 1, 8)
    w[0, torch.arange(length), 0, pairs[:, 0]] = 0.5**0.5
    w[0, torch.arange(length), 0, pairs[:, 1]] = -(0.5**0.5)
    q, k, v = (torch.randn(1, length, 1, 8) for _ in range(3))
    tokens = Tokens(q, k, v, w, torch.full((1, length, 1), 2.0), None)
    cache = LayerCache()
    parts = [run(cache, tokens.map(lambda x, t=t: x[:, t : t + 1])) for t in range(length)]
    torch.testing.assert_close(torch.cat(parts, 1).double(), tokens.exact(), rtol=2e-5, atol=2e-5)


def test_gate_sums_do_not_cancel() -> None:
    """A running sum of −30000 leaves the last tokens' gates exact in float32."""
    torch.manual_seed(3)
    tokens = Tokens.random(1, 1020, transport=False, decay=True, dtype=torch.float32)
    assert tokens.log_forget is not None
    tokens.log_forget[:, :1000] = -30.0
    cache = LayerCache()
    parts = [run(cache, tokens.map(lambda x: x[:, :1000]))]
    parts += [run(cache, tokens.map(lambda x, t=t: x[:, t : t + 1])) for t in range(1000, 1020)]
    last = torch.cat(parts[1:], 1).double()
    torch.testing.assert_close(last, tokens.exact()[:, 1000:], rtol=1e-5, atol=1e-5)


def test_select_moves_all_state_and_reset_forgets() -> None:
    torch.manual_seed(4)
    tokens = Tokens.random(3, 6, transport=True, decay=True)
    cache, order = LayerCache(), torch.tensor([2, 0, 0, 1])
    run(cache, tokens.map(lambda x: x[:, :4]))
    cache.state["mine"] = torch.arange(3)
    cache.select(order)
    assert cache.state["mine"].tolist() == order.tolist()
    out = run(cache, tokens.map(lambda x: x[order, 4:]))
    torch.testing.assert_close(out, tokens.exact()[order, 4:], rtol=1e-10, atol=1e-10)
    cache.reset()
    assert cache.seen == 0 and cache.lengths is None and not cache.state
    out = run(cache, tokens)
    torch.testing.assert_close(out, tokens.exact(), rtol=1e-10, atol=1e-10)


def test_plain_keys_are_read_by_one_call_of_sdpa() -> None:
    """Padded or not, one token or more, one call; the keys stay as they came."""
    for padded in (False, True):
        tokens, cache = Tokens.random(2, 10, transport=False, decay=False), LayerCache()
        exact = tokens.exact()
        valid = torch.ones(2, 10, dtype=torch.bool) if padded else None
        cache.append(tokens.k[:, :3], tokens.v[:, :3], None if valid is None else valid[:, :3])
        for start, stop in ((3, 4), (4, 9), (9, 10)):
            q, k, v = (x[:, start:stop] for x in (tokens.q, tokens.k, tokens.v))
            now = None if valid is None else valid[:, start:stop]
            with torch.profiler.profile() as profiler:
                out = cache.extend_plain(q, k, v, scale=8**-0.5, valid=now)
            called = [event.name for event in profiler.events()]
            assert called.count("aten::scaled_dot_product_attention") == 1
            torch.testing.assert_close(out, exact[:, start:stop], rtol=1e-10, atol=1e-10)
        assert torch.equal(cache.keys, tokens.k) and torch.equal(cache.values, tokens.v)
        assert (cache.valid is None) == (not padded) and cache.lengths.tolist() == [10, 10]


def test_a_plain_cache_takes_padding_after_chunks_without() -> None:
    tokens, cache = Tokens.random(2, 7, transport=False, decay=False), LayerCache()
    q, k, v = tokens.q, tokens.k, tokens.v
    cache.append(k[:, :3], v[:, :3], None)
    valid = torch.tensor([[True, True], [True, False]])
    cache.extend_plain(q[:, 3:5], k[:, 3:5], v[:, 3:5], scale=8**-0.5, valid=valid)
    out = cache.extend_plain(q[:, 5:], k[:, 5:], v[:, 5:], scale=8**-0.5, valid=None)
    torch.testing.assert_close(out[0], tokens.exact()[0, 5:], rtol=1e-10, atol=1e-10)
    alone = tokens.map(lambda x: x[1:, [0, 1, 2, 3, 5, 6]]).exact()
    torch.testing.assert_close(out[1], alone[0, 4:], rtol=1e-10, atol=1e-10)
    assert cache.lengths.tolist() == [7, 6]


@pytest.mark.parametrize("size", [1.0, 1e3])
def test_stick_breaking_over_chunks_is_literal_and_stable(size: float) -> None:
    """Logits of ±1e3 too: nothing overflows, and weights are parts of one stick."""
    tokens = Tokens.random(1, 14, transport=False, decay=False)
    q, k, v = size * tokens.q, tokens.k, tokens.v
    cache, parts = LayerCache(), []
    for start, stop in ((0, 6), (6, 7), (7, 14)):
        one = [x[:, start:stop] for x in (q, k, v)]
        out, rest = stick_breaking_attention(*one)
        extended = cache.extend_stick_breaking(out, rest, *one, scale=8**-0.5, valid=None)
        parts.append(extended)
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
    kept = [cache.keys, cache.values, *cache.state.values()]
    assert not any(y.requires_grad for y in kept if y is not None)
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
        for length in (1, 30, 1, 1):
            layer(torch.randn(2, length, 8), cache=cache)
            sizes.append({name: y.shape for name, y in cache.state.items()})
    assert cache.keys is None and cache.values is None and cache.valid is None
    assert all(shapes == sizes[0] for shapes in sizes)
    assert cache.seen == 33 and cache.lengths.tolist() == [33, 33]
