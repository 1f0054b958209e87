"""Attention over a rectangle of scores: the library's kernel, plain PyTorch, and autograd agree."""

from __future__ import annotations

import pytest
import torch

from path_attention.ops import dense

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SHAPES = [(2, 3, 10, 10, 4, True), (1, 2, 70, 33, 8, False), (3, 1, 1, 129, 5, False)]


def make(N, M, R, C, E):
    q, grad_out = torch.randn(2, N, M, R, E, dtype=torch.float64)
    k, v = torch.randn(2, N, M, C, E, dtype=torch.float64)
    return q, k, v, grad_out


def literal(q, k, v, causal):
    scores = q @ k.mT
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("at_once", [1, 100, 2**24])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_and_tiles_are_the_formula(shape, at_once, monkeypatch):
    monkeypatch.setattr(dense, "_SCORES_AT_ONCE", at_once)
    *sizes, causal = shape
    q, k, v, grad_out = make(*sizes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = literal(*leaves, causal)
    grads = torch.autograd.grad(out, leaves, grad_out)
    for attend, backward in (
        (dense.attend, dense.attend_backward),
        (dense.attend_in_tiles, dense.attend_backward_in_tiles),
    ):
        with torch.no_grad():
            got = attend(q, k, v, causal)
            got_grads = backward(grad_out, q, k, v, out, lse, causal)
        torch.testing.assert_close(got, (out, lse), rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(got_grads, grads, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("tiles", [False, True])
def test_rectangles_of_one_softmax(tiles):
    # Each part's gradients need only the whole softmax's output and log-sum-exp.
    q, k, v, grad_out = make(1, 2, 20, 50, 6)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = literal(*leaves, False)
    whole = torch.autograd.grad(out, leaves, grad_out)
    backward = dense.attend_backward_in_tiles if tiles else dense.attend_backward
    with torch.no_grad():
        parts = [
            backward(grad_out, q, k[..., a:b, :], v[..., a:b, :], out, lse, False)
            for a, b in ((0, 13), (13, 50))
        ]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0], rtol=1e-11, atol=1e-12)
    for n in (1, 2):
        joined = torch.cat([parts[0][n], parts[1][n]], -2)
        torch.testing.assert_close(joined, whole[n], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_need_not_be_whole(shape):
    *sizes, causal = shape
    inputs = make(*sizes)
    apart = []
    for x in inputs:
        wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan)
        apart.append(wide[..., ::2].copy_(x))
    results = []
    for q, k, v, grad_out in (inputs, apart):
        out, lse = dense.attend(q, k, v, causal)
        results.append([out, lse, *dense.attend_backward(grad_out, q, k, v, out, lse, causal)])
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-12)
