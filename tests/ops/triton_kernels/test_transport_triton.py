"""The transport of a short chunk in one launch, against products of matrices in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from path_attention.ops.transport import chunk_transport
from path_attention.ops.triton import transport
from path_attention.ops.triton.transport import triton_transport

ROUNDING = 2**-24


def make(
    T: int, heads: tuple[int, int], D: int, n: int = 1, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    HQ, H = heads
    q, k = (torch.randn(2, T, h, D, device=device) for h in (HQ, H))
    w = F.normalize(torch.randn(2, T, H * n, D, device=device), dim=-1)
    beta = 2 * torch.rand(2, T, H * n, device=device)
    return q, k, w, beta


def exact(q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Token by token, in float64."""
    q, k, w, beta = (x.double() for x in (q, k, w, beta))
    (B, T, H, D), G = k.shape, q.shape[2] // k.shape[2]
    n = w.shape[2] // H
    w, beta = w.unflatten(2, (H, n)), beta.unflatten(2, (H, n))
    eye = torch.eye(D, dtype=k.dtype, device=k.device)
    each = eye - beta[..., None, None] * w[..., :, None] * w[..., None, :]  # [B, T, H, n, D, D]
    product = eye.expand(B, H, D, D)
    q_start, k_end = [], k.clone()
    for t in range(T):
        for m in range(n):
            k_end[:, :t] = torch.einsum("bshd,bhde->bshe", k_end[:, :t], each[:, t, :, m])
            product = product @ each[:, t, :, m]
        wide = product.repeat_interleave(G, 1) if G else product[:, :0]
        q_start.append(torch.einsum("bhde,bhe->bhd", wide, q[:, t]))
    return torch.stack(q_start, 1), k_end, product


def check(x: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    q, k, w, _ = x
    (B, _, H, D), factors = k.shape, w.shape[1] * w.shape[2] // k.shape[2]
    # A walk over N factors rounds each of them: √N errors of a few units of float32. One over
    # blocks takes three products of 2⁻²² each, of rows that are no longer than they came.
    limit = 8 * ROUNDING * factors**0.5
    sizes = None
    if factors > transport.WALKED:
        limit = 3 * 2**-22 * (factors / 64) ** 0.5
        sizes = q.norm(), k.norm(), (B * H * D) ** 0.5
    right = exact(*x)
    for n, (got, wanted) in enumerate(zip(triton_transport(*x), right, strict=True)):
        assert got.shape == wanted.shape and got.dtype == torch.float32
        size = wanted.norm() if sizes is None else sizes[n]
        assert (got.double() - wanted).norm() <= limit * size


@pytest.mark.usefixtures("interpreter", "poisoned_memory")
@pytest.mark.parametrize(
    ("T", "heads", "D", "n"),
    [(1, (2, 2), 64, 1), (5, (6, 2), 12, 1), (20, (0, 1), 17, 3), (64, (3, 1), 8, 1)],
)
def test_short_chunks(T, heads, D, n):
    check(make(T, heads, D, n))


@pytest.mark.usefixtures("interpreter", "poisoned_memory")
@pytest.mark.parametrize(
    ("T", "heads", "D", "n"),
    [(130, (4, 2), 64, 1), (70, (0, 1), 17, 1), (66, (3, 1), 8, 2), (90, (2, 1), 70, 3)],
)
def test_chunks_by_blocks(T, heads, D, n):
    check(make(T, heads, D, n))


@pytest.mark.usefixtures("interpreter", "poisoned_memory")
@pytest.mark.parametrize(("T", "n"), [(300, 1), (170, 2)])
def test_chunks_by_units(monkeypatch, T, n):
    """Of 128 factors here; the last one is not whole."""
    monkeypatch.setattr(transport, "LONGEST", 256)
    check(make(T, (2, 1), 8, n))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("T", [20, 70])
def test_factors_of_a_token_as_the_cache_gives_them(monkeypatch, T):
    q, k, w, beta = make(T, (4, 2), 12, 2)
    chunk = q, k, w.unflatten(2, (2, 2)), beta.unflatten(2, (2, 2))
    wanted = chunk_transport(*chunk)
    monkeypatch.setattr("path_attention.ops.transport._has_kernel", lambda k: True)
    for got, right in zip(chunk_transport(*chunk), wanted, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("T", [20, 70])
def test_inputs_of_16_bits_are_read_as_they_are(monkeypatch, T):
    q, k, w, beta = make(T, (4, 2), 12)
    rounded = [x.bfloat16() for x in (q, k)] + [w.half(), beta.bfloat16()]
    monkeypatch.setattr("path_attention.ops.transport._has_kernel", lambda k: True)
    with torch.no_grad():
        got = chunk_transport(*rounded)
    for x, same in zip(got, triton_transport(*(x.float() for x in rounded)), strict=True):
        assert x.dtype == torch.float32 and torch.equal(x, same)


@pytest.mark.usefixtures("interpreter")
def test_rows_of_any_size():
    """Each keeps its own digits: rows of 1e-12 and 1e12 beside each other, and of zeros."""
    q, k, w, beta = make(80, (2, 1), 8)
    sizes = 10.0 ** torch.randint(-12, 13, (2, 80, 1, 1))
    sizes[:, 3] = 0.0
    x = (q * sizes, k * sizes, w, beta)
    # 64 directions of 8 dimensions make a product of a row √8 times as long.
    limit = 3 * 2**-22 * 2**0.5 * 8**0.5
    for got, right, rows in zip(triton_transport(*x)[:2], exact(*x)[:2], x[:2], strict=True):
        error = (got.double() - right).norm(dim=-1)
        assert (error <= limit * rows.norm(dim=-1)).all()


@pytest.mark.usefixtures("interpreter")
def test_what_is_not_contiguous():
    q, k, w, beta = make(9, (4, 2), 12)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, w, beta)]
    for got, same in zip(triton_transport(*turned), triton_transport(q, k, w, beta), strict=True):
        assert torch.equal(got, same)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("T", "heads", "D", "n"),
    [
        (1, (8, 2), 64, 1),
        (575, (4, 4), 64, 1),
        (transport.LONGEST, (0, 2), 128, 1),
        (100, (2, 1), 256, 2),
        (3000, (4, 2), 64, 1),
    ],
)
def test_compiled(T, heads, D, n):
    check(make(T, heads, D, n, "cuda"))


@pytest.mark.gpu
def test_short_chunks_take_one_launch():
    q, k, w, beta = make(30, (4, 2), 64, 2, "cuda")
    chunk = q.bfloat16(), k.bfloat16(), w.unflatten(2, (2, 2)), beta.unflatten(2, (2, 2))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        got = chunk_transport(*chunk)
    assert sum(e.count for e in seen.key_averages() if e.key == "transport_kernel") == 1
    for x, right in zip(got, exact(q.bfloat16(), k.bfloat16(), w, beta), strict=True):
        assert (x.double() - right).norm() <= 64 * ROUNDING * right.norm()
