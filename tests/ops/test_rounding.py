"""blockwise in bfloat16 and float16: its error beside that of rounding the exact result once.

The exact result is the definition's, in float64, on the same 16-bit inputs. The unit of error is
‖round(exact) − exact‖: what storing the result costs any implementation.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from operator_cases import Inputs, Run, correlated_directions, make_inputs, swaps
from torch import Tensor

from path_attention import path_attention

HALVES = [torch.bfloat16, torch.float16]
# Errors allowed, in roundings: of out and the gradients of q, k, v; of those of w, β, gate.
RANDOM, HARD = (2, 4), (3, 6)


def random_inputs(T: int) -> Inputs:
    return make_inputs(T, B=2, heads=(4, 2), size=(32, 32))


def correlated_inputs(T: int) -> Inputs:
    inputs = make_inputs(T, size=(16, 16))
    assert inputs.w is not None and inputs.beta is not None
    w = correlated_directions(tuple(inputs.w.shape), cosine=0.7)
    return inputs._replace(w=w, beta=1.9 + 0.05 * inputs.beta)


def swapping_inputs(T: int) -> Inputs:
    inputs = make_inputs(T, heads=(1, 1), gate=False)
    assert inputs.w is not None and inputs.beta is not None
    return inputs._replace(w=swaps(tuple(inputs.w.shape)), beta=torch.full_like(inputs.beta, 2))


def call(inputs: Inputs, implementation: str, grad_out: Tensor, renormalise: bool) -> Run:
    inputs = Inputs(*(None if x is None else x.detach().requires_grad_() for x in inputs))
    w = inputs.w
    if renormalise and w is not None:
        w = F.normalize(w, dim=-1)
    out, lse = path_attention(*inputs._replace(w=w), implementation=implementation, return_lse=True)
    leaves = {name: x for name, x in inputs._asdict().items() if x is not None}
    grads = torch.autograd.grad(out, list(leaves.values()), grad_out.to(out.dtype))
    return Run(out.detach(), lse.detach(), dict(zip(leaves, grads, strict=True)))


def check(inputs: Inputs, dtype: torch.dtype, all_rounded: bool, limits: tuple[int, int]) -> None:
    """w, β and gates come in float32, as the layer makes them, or rounded like the rest."""
    other = dtype if all_rounded else torch.float32
    given = Inputs(*inputs.to(dtype)[:3], *inputs.to(other)[3:])
    grad_out = torch.randn(*given.q.shape[:3], given.v.shape[3]).to(dtype)
    got = call(given, "blockwise", grad_out, False)
    exact = call(given.to(torch.float64), "definition", grad_out, all_rounded)
    for name, value in exact.named().items():
        limit = limits[1] if name in ("w", "beta", "log_forget") else limits[0]
        rounding = (value.to(dtype).double() - value).norm()
        error = (got.named()[name].double() - value).norm()
        assert error <= limit * rounding, f"{name}: {(error / rounding).item():.2f} roundings"


@pytest.mark.parametrize("all_rounded", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("T", [62, 400])
def test_random(T, dtype, all_rounded):
    check(random_inputs(T), dtype, all_rounded, RANDOM)


@pytest.mark.parametrize("all_rounded", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("make", [correlated_inputs, swapping_inputs])
def test_hard(make, dtype, all_rounded):
    check(make(500), dtype, all_rounded, HARD)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("make", [correlated_inputs, swapping_inputs])
def test_hard_at_4096(make, dtype):
    inputs = make(4096)
    inputs = Inputs(*(None if x is None else x[:, :, :1] for x in inputs))
    check(inputs, dtype, False, HARD)


@pytest.mark.parametrize("make", [random_inputs, correlated_inputs, swapping_inputs])
def test_float32_is_far_below_16_bits(make):
    inputs = make(500).to(torch.float32)
    grad_out = torch.randn(*inputs.q.shape[:3], inputs.v.shape[3])
    got = call(inputs, "blockwise", grad_out, False)
    exact = call(inputs.to(torch.float64), "definition", grad_out, False)
    for name, value in exact.named().items():
        error = (got.named()[name].double() - value).norm() / value.norm()
        assert error <= 2**-14, f"{name}: {error:.1e}"
