"""Inputs and allowed errors of the tests on a GPU.

The unit of error is ‖round(exact) − exact‖ in the inputs' dtype: what storing the result costs
any implementation. Exact is the definition in float64 on the same rounded inputs; beyond 600 tokens
`blockwise` in float64, which other tests hold to the definition.
"""

from __future__ import annotations

from typing import Any

import torch
from kernel_cases import encoded
from operator_cases import Inputs, Run, run
from torch import Tensor

from path_attention import path_attention

DEVICE = "cuda"
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# Roundings allowed: of out, lse and the gradients of q, k, v; of those of w, β and the gate.
# The kernels' operands are float16 whatever the inputs: float16 results, whose rounding is an
# eighth of bfloat16's, may err half as much as bfloat16 ones.
RANDOM = {BF16: (2, 4), F16: (8, 16), F32: (64, 64)}
HARD = {BF16: (3, 6), F16: (12, 24), F32: (4096, 4096)}
ORACLE_TOKENS = 600


def make(encoding: str, T: int, dtype: torch.dtype = BF16, **options) -> Inputs:
    """q, k, v in dtype; w, β, gate in float32, as the layer makes them."""
    inputs = encoded(encoding, T, **{"heads": (4, 2), "size": (64, 64), **options})
    return rounded(inputs, dtype)


def rounded(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return Inputs(*inputs.to(dtype)[:3], *inputs.to(F32)[3:]).to(DEVICE)


def leaves(inputs: Inputs) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in inputs if x is not None]


def call(*x: Tensor, **options: Any) -> Tensor:
    return path_attention(*x, implementation="triton", **options)


def beyond(actual: Run, exact: Run, dtype: torch.dtype, limits: dict) -> dict[str, str]:
    """What errs by more than its number of roundings, and by how many; a result near zero counts as
    0.01 an element."""
    found = {}
    for name, value in exact.named().items():
        got = actual.named()[name].double()
        rounding = (value.to(dtype).double() - value).norm().item()
        floor = 0.01 * torch.finfo(dtype).eps / 4 * value.numel() ** 0.5
        error = (got - value).norm().item() / max(rounding, floor)
        limit = limits[dtype][name in ("w", "beta", "log_forget")]
        if not error <= limit:  # so NaN is beyond, too
            found[name] = f"{name}: {error:.2f} roundings, allowed {limit}"
    return found


def assert_within(actual: Run, exact: Run, dtype: torch.dtype, limits: dict) -> None:
    """Each error within its number of roundings."""
    found = beyond(actual, exact, dtype, limits)
    assert not found, "; ".join(found.values())


def check(inputs: Inputs, limits: dict = RANDOM, **options: Any) -> None:
    dtype, T = inputs.q.dtype, inputs.q.shape[1]
    oracle = "definition" if T <= ORACLE_TOKENS else "blockwise"
    exact = run(inputs.to(torch.float64), oracle, grad_dtype=dtype, **options)
    assert_within(run(inputs, "triton", grad_dtype=dtype, **options), exact, dtype, limits)
