"""The transport of a short chunk in one launch, against products of matrices in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from path_attention.ops.transport import chunk_transport
from path_attention.ops.triton.transport import LONGEST, triton_transport

ROUNDING = 2**-24


def make(
    T: int, heads: tuple[int, int], D: int, n: int = 1, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    HQ, H = heads
    q, k = (torch.randn(2, T, h, D, device=device) for h in (HQ, H))
    w = F.normalize(torch.randn(2, T * n, H, D, device=device), dim=-1)
    beta = 2 * torch.rand(2, T * n, H, device=device)
    return q, k, w, beta


def exact(q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Token by token, in float64."""
    q, k, w, beta = (x.double() for x in (q, k, w, beta))
    (B, T, H, D), G = k.shape, q.shape[2] // k.shape[2]
    n = w.shape[1] // T
    eye = torch.eye(D, dtype=k.dtype, device=k.device)
    each = eye - beta[..., None, None] * w[..., :, None] * w[..., None, :]
    product = eye.expand(B, H, D, D)
    q_start, k_end = [], k.clone()
    for t in range(T):
        for m in range(n):
            k_end[:, :t] = torch.einsum("bshd,bhde->bshe", k_end[:, :t], each[:, t * n + m])
            product = product @ each[:, t * n + m]
        wide = product.repeat_interleave(G, 1) if G else product[:, :0]
        q_start.append(torch.einsum("bhde,bhe->bhd", wide, q[:, t]))
    return torch.stack(q_start, 1), k_end, product


def check(x: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    # a walk over N factors rounds each of them: √N errors of a few units of float32
    limit = 8 * ROUNDING * max(1, x[2].shape[1]) ** 0.5
    for got, right in zip(triton_transport(*x), exact(*x), strict=True):
        assert got.shape == right.shape and got.dtype == torch.float32
        assert (got.double() - right).norm() <= limit * right.norm()


@pytest.mark.usefixtures("interpreter", "poisoned_memory")
@pytest.mark.parametrize(
    ("T", "heads", "D", "n"),
    [(1, (2, 2), 64, 1), (5, (6, 2), 12, 1), (70, (0, 1), 17, 1), (66, (3, 1), 8, 2)],
)
def test_chunks(T, heads, D, n):
    check(make(T, heads, D, n))


@pytest.mark.usefixtures("interpreter")
def test_what_is_not_contiguous():
    q, k, w, beta = make(9, (4, 2), 12)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, w, beta)]
    for got, same in zip(triton_transport(*turned), triton_transport(q, k, w, beta), strict=True):
        assert torch.equal(got, same)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("T", "heads", "D", "n"),
    [(1, (8, 2), 64, 1), (575, (4, 4), 64, 1), (LONGEST, (0, 2), 128, 1), (100, (2, 1), 256, 2)],
)
def test_compiled(T, heads, D, n):
    check(make(T, heads, D, n, "cuda"))


@pytest.mark.gpu
def test_short_chunks_take_one_launch():
    q, k, w, beta = make(40, (4, 2), 64, 2, "cuda")
    chunk = q.bfloat16(), k.bfloat16(), w.unflatten(1, (40, 2)).transpose(2, 3), beta
    chunk = (*chunk[:3], beta.unflatten(1, (40, 2)).transpose(2, 3))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        chunk_transport(*chunk)
    assert sum(e.count for e in seen.key_averages() if e.key == "transport_kernel") == 1
