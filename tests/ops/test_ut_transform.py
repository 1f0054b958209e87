"""The UT transform of one block against products of its factors, and in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from operator_cases import correlated_directions, swaps

from path_attention.ops import ut_transform

D = 8
# In float32 a block may cost a quarter of what rounding to float16 does.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2**-13}
DIRECTIONS = {
    "random": lambda n: F.normalize(torch.randn(1, 1, n, D).double(), dim=-1),
    "one": lambda n: F.normalize(torch.randn(D).double(), dim=0).expand(1, 1, n, D),
    "correlated": lambda n: correlated_directions((1, 1, n, D), 0.7),
    "nearly one": lambda n: correlated_directions((1, 1, n, D), 0.999),
    "swaps": lambda n: swaps((1, 1, n, D)),
    "zero": lambda n: torch.zeros(1, 1, n, D).double(),
}


def literal(w: torch.Tensor, beta: torch.Tensor) -> list[torch.Tensor]:
    """H_1, H_1 H_2, …, H_1 ⋯ H_n."""
    products = [torch.eye(D).double()]
    for w_t, beta_t in zip(w, beta, strict=True):
        products.append(products[-1] @ (torch.eye(D) - beta_t * torch.outer(w_t, w_t)))
    return products[1:]


@pytest.mark.parametrize("n", [1, 16, 32, 64])
@pytest.mark.parametrize("lowest", [0.0, 1.9, 2.0])
@pytest.mark.parametrize("name", DIRECTIONS)
def test_moves_are_products_of_factors(name, lowest, n):
    w = DIRECTIONS[name](n)
    beta = lowest + (2 - lowest) * torch.rand(1, 1, n).double()
    q, k = torch.randn(1, 1, n, D).double(), torch.randn(1, 1, n, D).double()
    products = literal(w[0, 0], beta[0, 0])
    for dtype, tolerance in TOLERANCE.items():
        block = ut_transform.solve(*(x.to(dtype) for x in (q, k, w, beta)))
        q_start, k_end, transition = (x.double() for x in ut_transform.move(block))
        moved = torch.stack([p @ x for p, x in zip(products, q[0, 0], strict=True)])
        assert (q_start[0, 0] - moved).norm() <= tolerance * q.norm()
        assert (transition[0, 0] - products[-1]).norm() <= tolerance * D**0.5
        rest = torch.eye(D).double()
        for j in range(n - 1, -1, -1):
            assert (k_end[0, 0, j] - k[0, 0, j] @ rest).norm() <= tolerance * k.norm()
            rest = (torch.eye(D) - beta[0, 0, j] * torch.outer(w[0, 0, j], w[0, 0, j])) @ rest


@pytest.mark.parametrize("lowest", [0.0, 1.9, 2.0])
@pytest.mark.parametrize("name", DIRECTIONS)
def test_the_inverse_in_float32(name, lowest):
    w = DIRECTIONS[name](64)
    beta = lowest + (2 - lowest) * torch.rand(1, 1, 64).double()
    q, k = torch.randn(1, 1, 64, D), torch.randn(1, 1, 64, D)
    exact = ut_transform.solve(q.double(), k.double(), w, beta).transform
    single = ut_transform.solve(q, k, w.float(), beta.float()).transform
    assert exact is not None and single is not None
    assert exact.inverse.abs().max() <= 2 + 1e-9  # no entry exceeds the largest β
    error = (single.inverse.double() - exact.inverse).norm()
    assert error <= TOLERANCE[torch.float32] * exact.inverse.norm()


def test_entries_of_the_inverse_are_scores_of_directions():
    # X_ij = −β_i w_iᵀ H_{i+1} ⋯ H_{j−1} w_j
    n = 9
    w, beta = DIRECTIONS["random"](n), 2 * torch.rand(1, 1, n).double()
    transform = ut_transform.solve(w, w, w, beta).transform
    assert transform is not None
    expected = torch.eye(n).double()
    for i in range(n):
        moved = w[0, 0, i]
        for j in range(i + 1, n):
            expected[i, j] = -beta[0, 0, i] * (moved @ w[0, 0, j])
            moved = moved - beta[0, 0, j] * (moved @ w[0, 0, j]) * w[0, 0, j]
    torch.testing.assert_close(transform.inverse[0, 0], expected, rtol=1e-12, atol=1e-12)


def test_a_range_of_a_block_needs_no_new_inverse():
    w, beta = DIRECTIONS["random"](64), 2 * torch.rand(1, 1, 64).double()
    q, k = torch.randn(1, 1, 64, D).double(), torch.randn(1, 1, 64, D).double()
    whole = ut_transform.solve(q, k, w, beta).transform
    part = slice(10, 31)
    sub = ut_transform.solve(q[..., part, :], k[..., part, :], w[..., part, :], beta[..., part])
    assert whole is not None and sub.transform is not None
    torch.testing.assert_close(whole.t[..., part, part], sub.transform.t, rtol=1e-12, atol=1e-12)


def test_the_opposite_order_is_another_matrix():
    # The trap: a lower triangular T gives H_n ⋯ H_1.
    w, beta = DIRECTIONS["random"](10), 2 * torch.rand(1, 1, 10).double()
    q, k = torch.randn(1, 1, 10, D).double(), torch.randn(1, 1, 10, D).double()
    block = ut_transform.solve(q, k, w, beta)
    transition = ut_transform.move(block)[2]
    assert transition is not None
    backwards = literal(w[0, 0].flip(0), beta[0, 0].flip(0))[-1]
    torch.testing.assert_close(transition[0, 0].T, backwards, rtol=1e-12, atol=1e-12)
    assert (transition[0, 0] - backwards).norm() > 0.1
