"""LayerCache against the literal definition over the whole sequence."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from path_attention import path_attention
from path_attention.nn import LayerCache

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


def test_backward_through_the_past_raises() -> None:
    tokens = Tokens.random(1, 4, transport=True, decay=False)
    tokens.q.requires_grad_()
    cache = LayerCache()
    run(cache, tokens.map(lambda x: x[:, :2])).sum().backward()  # no past yet: exact
    out = run(cache, tokens.map(lambda x: x[:, 2:]))
    with pytest.raises(RuntimeError, match="gradients don't flow through a cache"):
        out.sum().backward()
