"""Inputs for tests of stick-breaking attention, and the comparison of two of its runs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from path_attention.ops.stick_breaking import stick_breaking_attention


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor

    def to(self, target: torch.dtype | torch.device | str) -> Inputs:
        return Inputs(*(x.to(target) for x in self))


class Run(NamedTuple):
    """Results of one call, then the gradients of the inputs by their names."""

    out: Tensor
    rest: Tensor
    grads: dict[str, Tensor]

    def named(self) -> dict[str, Tensor]:
        return {"out": self.out, "rest": self.rest, **self.grads}


def make_inputs(
    T: int,
    *,
    B: int = 1,
    heads: tuple[int, int] = (2, 1),
    size: tuple[int, int] = (8, 8),
    shift: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> Inputs:
    """Random inputs; `heads` are the queries' and the keys', `size` is D and DV.

    `shift` is added to every score of the default scale: far below 0, the stick lasts long.
    """
    (HQ, H), (D, DV) = heads, size
    rng = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(B, T, *shape, dtype=torch.float64, generator=rng)
        for shape in ((HQ, D), (H, D), (H, DV))
    )
    if shift:
        q[..., 0], k[..., 0] = 1, shift * D**0.5
    return Inputs(q, k, v).to(dtype)


def run(
    inputs: Inputs,
    implementation: str | None,
    *,
    rest: bool = True,
    grad_dtype: torch.dtype | None = None,
    **options,
) -> Run:
    """Outputs and the gradients of a fixed random functional of both of them (or of `out`)."""
    inputs = Inputs(*(x.detach().requires_grad_() for x in inputs))
    results = stick_breaking_attention(*inputs, implementation=implementation, **options)
    rng = torch.Generator().manual_seed(1)
    above = [torch.randn(x.shape, dtype=torch.float64, generator=rng) for x in results]
    if grad_dtype is not None:
        above = [x.to(grad_dtype) for x in above]
    count = 2 if rest else 1
    grads = torch.autograd.grad(
        results[:count],
        inputs,
        [g.to(x) for g, x in zip(above, results, strict=True)][:count],
        allow_unused=True,
        materialize_grads=True,
    )
    out, left = (x.detach() for x in results)
    return Run(out, left, dict(zip(inputs._fields, grads, strict=True)))


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
