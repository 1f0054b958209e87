"""decode_attention's kernels, run as Python, against its plain PyTorch; every part of a past."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from path_attention.ops.decode import KeyGroup, Past, decode_attention

pytestmark = pytest.mark.usefixtures("interpreter", "poisoned_memory")


def make_past(
    *,
    batch: int = 2,
    heads: tuple[int, int] = (4, 2),
    size: tuple[int, int] = (12, 5),
    moves: bool = True,
    fades: bool = True,
    hidden: bool = False,
    rows: bool = False,
    units: tuple[int, ...] = (3, 2),
    unit: int = 64,
    tail: int = 70,
    dtype: torch.dtype = torch.float32,
) -> Past:
    (HQ, H), (D, DV) = heads, size
    stored = batch + 1 if rows else batch

    def matrices(*shape: int) -> Tensor | None:
        return torch.randn(*shape, H, D, D) / D**0.5 if moves else None

    def decays(*shape: int) -> Tensor | None:
        return -torch.rand(*shape, HQ) if fades else None

    def keys(R: int, n: int, width: int) -> Tensor:
        return torch.randn(R, H, n + 3, width)[:, :, 3:].transpose(1, 2).to(dtype)

    groups = tuple(
        KeyGroup(
            keys(stored, n * unit, D),
            keys(stored, n * unit, DV),
            rows=torch.randperm(stored)[:batch] if rows else None,
            suffix=matrices(stored, n),
            after=matrices(batch),
            decay=decays(stored, n * unit),
            unit_decay=decays(stored, n),
            after_decay=decays(batch),
            valid=torch.rand(stored, n * unit) < 0.7 if hidden else None,
        )
        for n in units
    )
    last = None
    if tail:
        last = KeyGroup(
            keys(batch, tail, D).float(), keys(batch, tail, DV), decay=decays(batch, tail)
        )
    return Past(groups, last, matrices(batch), decays(batch))


def check(past: Past, T: int = 3, heads: int = 4, limit: float = 1e-4, **options: Any) -> None:
    source = past.groups[0] if past.groups else past.tail
    assert source is not None
    B = past.transition.shape[0] if past.transition is not None else 2
    q = torch.randn(B, T, heads, source.keys.shape[3])
    elapsed = -torch.rand(B, T, heads) if past.decay is not None else None
    common = {"scale": 0.3, "elapsed": elapsed, **options}
    got = decode_attention(q, past, implementation="triton", **common)
    exact = decode_attention(q, past, implementation="torch", **common)
    for x, y in zip(got, exact, strict=True):
        torch.testing.assert_close(x, y, rtol=limit, atol=limit)


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("fades", [False, True])
def test_groups_and_tail(moves, fades):
    check(make_past(moves=moves, fades=fades))


@pytest.mark.parametrize(("heads", "T"), [((2, 2), 1), ((6, 2), 16), ((3, 1), 40)])
def test_heads_and_tokens(heads, T):
    check(make_past(heads=heads, units=(1,), tail=5), T, heads[0])


@pytest.mark.parametrize("tail", [0, 1, 64, 130])
def test_tails(tail):
    check(make_past(tail=tail, units=(1,)))


def test_groups_of_different_lengths_go_on_with_the_same_parts():
    """Three parts for the longest; the tail and the first group fill but one of them."""
    check(make_past(batch=1, units=(1, 5), unit=128, heads=(2, 2)), 2, 2)


@pytest.mark.parametrize("size", [(64, 64), (17, 80), (1, 3)])
def test_head_sizes(size):
    check(make_past(size=size, units=(1,), tail=3), 2)


def test_rows_by_reference_and_hidden_keys():
    check(make_past(rows=True, hidden=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_chunk_itself_joins_in(dtype):
    """By its output, which may be of no key, and more of a weight than all others."""
    own = torch.randn(2, 3, 4, 5).to(dtype), 20 * torch.randn(2, 3, 4)
    own[1][0, 1] = -torch.inf
    # bfloat16 results differ by a rounding where sums differ by less
    check(make_past(), limit=1e-4 if dtype == torch.float32 else 2**-7, own=own)
    past, q = make_past(units=(1,), tail=0), torch.randn(2, 3, 4, 12)
    hidden = past.groups[0]._replace(valid=torch.zeros(2, 64, dtype=torch.bool))
    for implementation in ("torch", "triton"):
        common = {"scale": 1.0, "own": own, "implementation": implementation}
        out, lse = decode_attention(q, Past((hidden,)), **common)
        seen = own[1].isfinite()
        assert out.dtype == dtype
        torch.testing.assert_close(out[seen], own[0][seen], rtol=0, atol=1e-6)
        torch.testing.assert_close(lse, own[1], rtol=1e-6, atol=0)
        assert (out[~seen] == 0).all()


def test_no_key_at_all_gives_nothing():
    past = make_past(units=(1,), tail=0, fades=False)
    hidden = past.groups[0]._replace(valid=torch.zeros(2, 64, dtype=torch.bool))
    q = torch.randn(2, 1, 4, 12)
    out, lse = decode_attention(q, Past((hidden,)), scale=1.0, implementation="triton")
    assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("magnitude", [1e-6, 1e6])
def test_float16_in_range(magnitude):
    past = make_past(dtype=torch.float16, units=(1,), tail=5)
    q = torch.randn(2, 2, 4, 12) * magnitude
    common: Any = {"scale": 1 / magnitude, "elapsed": -torch.rand(2, 2, 4)}
    out, _ = decode_attention(q, past, implementation="triton", **common)
    exact, _ = decode_attention(q.double(), past, implementation="torch", **common)
    # weights and matrices are rounded to float16, 2⁻¹¹ each
    assert (out - exact).norm() <= 4 * 2**-11 * exact.norm()


def test_unknown_implementations_are_refused():
    past, q = make_past(units=(1,), tail=0), torch.randn(2, 1, 4, 12)
    with pytest.raises(ValueError, match="implementation: expected 'torch', 'triton' or None"):
        decode_attention(q, past, scale=1.0, implementation="cuda")
    with pytest.raises(ValueError, match=r"implementation: .* got torch\.float64 with 'triton'"):
        decode_attention(q.double(), past, scale=1.0, implementation="triton")
