"""Errors of the kernels beside the definition's results, in units of the dtype's rounding."""

from __future__ import annotations

import torch
from operator_cases import Inputs, Run, make_inputs, run
from torch import Tensor

ENCODINGS = {
    "path": (True, False),
    "path_fox": (True, True),
    "fox": (False, True),
    "nope": (False, False),
}
# ‖error‖ / ‖exact‖ of float32 results. A running sum or a product of 64 rounds a few times.
FLOAT32 = 64 * 2**-24


def encoded(encoding: str, T: int, **options) -> Inputs:
    """Random float32 inputs for one of `ENCODINGS`."""
    transport, gate = ENCODINGS[encoding]
    options = {"size": (16, 16), "dtype": torch.float32, **options}
    return make_inputs(T, transport=transport, gate=gate, **options)


def opposed(reach: float, where: str = "start", T: int = 330, size: int = 64) -> Inputs:
    """Scores of `reach` (base 2) at some keys, −reach at the others: what a maximum frozen at a
    query's own block is exceeded by, twice reach.

    where: the "start", three keys; a "row", one key and every second query; a "tile", the 64 keys
    of a block; a "unit", the keys of the first three blocks.
    """
    x = encoded("path", T, heads=(1, 1), size=(size, size))
    assert x.w is not None
    token, along = torch.arange(T)[:, None, None], torch.zeros(size)
    along[0] = (reach / (size**-0.5 * 1.4426950408889634)) ** 0.5
    first, last = {"start": (0, 3), "row": (70, 71), "tile": (64, 128), "unit": (0, 192)}[where]
    k = along * torch.where((token >= first) & (token < last), 1, -1) + 0 * x.k
    turned = (token % 2 == 0) & (where == "row")
    q = along * torch.where(turned, -1, 1) + 0 * x.q
    w = torch.nn.functional.normalize(x.w * (torch.arange(size) > 0), dim=-1)
    return x._replace(q=q, k=k, w=w)


def relative_error(actual: Tensor, exact: Tensor, floor: float) -> float:
    """‖actual − exact‖ / ‖exact‖, where each element of exact counts for `floor` at least."""
    assert actual.shape == exact.shape
    if not exact.numel():
        return 0.0
    norm = max(exact.norm().item(), floor * exact.numel() ** 0.5)
    error = (actual.double().to(exact.device) - exact).norm().item()
    return error / norm if error else 0.0


def assert_close(actual: Run, exact: Run, limit: float = FLOAT32, floor: float = 0.1) -> None:
    """Every result within `limit`, and finite."""
    for name, value in exact.named().items():
        error = relative_error(actual.named()[name], value, floor)
        assert error <= limit, f"{name}: error of {error:.2e}, allowed {limit:.2e}"  # not for NaN


def assert_triton_is_the_definition(
    inputs: Inputs, *, limit: float = FLOAT32, floor: float = 0.1, **options
) -> None:
    """Float32 inputs: outputs and all gradients against the definition in float64."""
    exact = run(inputs.to(torch.float64), "definition", **options)
    assert_close(run(inputs, "triton", **options), exact, limit, floor)
