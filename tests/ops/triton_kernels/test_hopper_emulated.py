"""Hopper's kernels, emulated, beside the portable ones: each stage, outputs and gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import encoded
from operator_cases import Inputs, run

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("interpreter")
# Lengths: one block, a pair, a pair and a lone block, a ragged end, levels left out on either side.
PACKINGS = [[64], [330], [128, 192, 64, 250], [1000]]


@pytest.fixture
def hopper(request, monkeypatch):
    from gluon_emulator import Emulator

    from path_attention.ops.triton import call, hopper

    choose = call.choose_tiles
    monkeypatch.setattr(
        call, "choose_tiles", lambda *a: replace(choose(*a), hopper=True, hopper_backward=a[3])
    )
    for name in dir(hopper):
        if name.endswith("_kernel"):
            monkeypatch.setattr(hopper, name, Emulator(getattr(hopper, name), request.param))
    return hopper


def check(inputs: Inputs, lengths: list[int]) -> None:
    """Operands are float16: results may err half as much as bfloat16 ones, which round 8 times
    coarser; gates come in float32."""
    x = Inputs(*inputs.to(torch.float16)[:3], *inputs[3:])
    options = {
        "grad_dtype": torch.float16,
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
    }
    exact = run(x.to(torch.float64), "definition", **options).named()
    for name, got in run(x, "triton", **options).named().items():
        value = exact[name]
        rounding = (value.to(torch.bfloat16).double() - value).norm()
        limit = 2 if name in ("w", "beta", "log_forget") else 1
        error = (got.double() - value).norm()
        assert error <= limit * rounding, f"{name}: {(error / rounding).item():.2f} roundings"


@pytest.mark.parametrize("hopper", [0], indirect=True)
@pytest.mark.parametrize("lengths", PACKINGS, ids=str)
@pytest.mark.parametrize("encoding", ["path", "path_fox"])
def test_every_stage_is_the_definition(encoding, lengths, hopper):
    heads = (1, 1) if lengths == [1000] else (2, 1)
    check(encoded(encoding, sum(lengths), heads=heads, size=(64, 64)), lengths)


@pytest.mark.parametrize("hopper", [2], indirect=True)
@pytest.mark.parametrize("encoding", ["fox", "nope"])
def test_without_transport(encoding, hopper):
    check(encoded(encoding, 330, heads=(4, 2), size=(48, 64)), [330])


@pytest.mark.parametrize("hopper", [3], indirect=True)
@pytest.mark.parametrize("size", [(128, 128), (64, 128), (128, 40)])
def test_other_head_sizes(size, hopper):
    check(encoded("path_fox", 200, heads=(2, 2), size=size), [200])
