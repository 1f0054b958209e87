"""Inputs for tests of the operator, and the comparison of two of its runs."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from path_attention import path_attention


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor | None
    beta: Tensor | None
    log_forget: Tensor | None

    def to(self, target: torch.dtype | torch.device | str) -> Inputs:
        return Inputs(*(None if x is None else x.to(target) for x in self))


class Run(NamedTuple):
    """Results of one call: `out` and `lse`, then the gradients of the inputs by their names."""

    out: Tensor
    lse: Tensor
    grads: dict[str, Tensor]

    def named(self) -> dict[str, Tensor]:
        return {"out": self.out, "lse": self.lse, **self.grads}


def make_inputs(
    T: int,
    *,
    B: int = 1,
    heads: tuple[int, int] = (2, 1),
    size: tuple[int, int] = (8, 8),
    transport: bool = True,
    gate: bool = True,
    factors: int | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Inputs:
    """Random inputs; `heads` are the queries' and the keys', `size` is D and DV.

    `factors` a token, in a dimension of their own; None for one without it.
    """
    (HQ, H), (D, DV) = heads, size
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=rng)

    q, k, v = normal(B, T, HQ, D), normal(B, T, H, D), normal(B, T, H, DV)
    of_token = (B, T, H) if factors is None else (B, T, H, factors)
    w = F.normalize(normal(*of_token, D), dim=-1) if transport else None
    beta = 2 * torch.rand(of_token, dtype=torch.float64, generator=rng) if transport else None
    log_forget = F.logsigmoid(normal(B, T, HQ) + 2) if gate else None
    return Inputs(q, k, v, w, beta, log_forget).to(dtype)


def correlated_directions(shape: tuple[int, ...], cosine: float, seed: int = 0) -> Tensor:
    """Unit vectors, float64, whose mean cosine with one another is about `cosine`."""
    rng = torch.Generator().manual_seed(seed)
    common = F.normalize(torch.randn(shape[-1], dtype=torch.float64, generator=rng), dim=0)
    other = torch.randn(shape, dtype=torch.float64, generator=rng)
    other = F.normalize(other - (other @ common)[..., None] * common, dim=-1)
    return math.sqrt(cosine) * common + math.sqrt(1 - cosine) * other


def swaps(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Directions (e_a − e_b)/√2, float64: with β = 2 each factor swaps coordinates a and b."""
    rng = torch.Generator().manual_seed(seed)
    D = shape[-1]
    a = torch.randint(D, shape[:-1], generator=rng)
    b = (a + torch.randint(1, D, shape[:-1], generator=rng)) % D
    return (F.one_hot(a, D) - F.one_hot(b, D)).to(torch.float64) / math.sqrt(2)


def run(
    inputs: Inputs, implementation: str, *, grad_dtype: torch.dtype | None = None, **options
) -> Run:
    """Outputs and the gradients of a fixed random functional of both `out` and `lse`."""
    inputs = Inputs(*(None if x is None else x.detach().requires_grad_() for x in inputs))
    out, lse = path_attention(*inputs, implementation=implementation, return_lse=True, **options)
    rng = torch.Generator().manual_seed(1)
    above = [torch.randn(x.shape, dtype=torch.float64, generator=rng) for x in (out, lse)]
    if grad_dtype is not None:
        above = [x.to(grad_dtype) for x in above]
    leaves = {name: x for name, x in inputs._asdict().items() if x is not None}
    grads = torch.autograd.grad(
        (out, lse),
        list(leaves.values()),
        [above[0].to(out), above[1].to(lse)],
        allow_unused=True,
        materialize_grads=True,
    )
    return Run(out.detach(), lse.detach(), dict(zip(leaves, grads, strict=True)))


def assert_same(actual: Run, expected: Run, tolerance: float = 1e-10) -> None:
    """Every element within `tolerance` of the largest of its tensor, or of 1."""
    for name, exact in expected.named().items():
        got = actual.named()[name]
        assert got.shape == exact.shape and got.dtype == exact.dtype, name
        if exact.numel():
            worst = (got - exact).abs().max().item()
            allowed = tolerance * max(1.0, exact.abs().max().item())
            assert worst <= allowed, f"{name}: off by {worst:.2e}, allowed {allowed:.2e}"


def assert_blockwise_is_the_definition(inputs: Inputs, **options) -> None:
    assert_same(run(inputs, "blockwise", **options), run(inputs, "definition", **options))
