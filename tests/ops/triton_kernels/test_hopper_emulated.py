"""Hopper's kernels, emulated, beside the portable ones: each stage, outputs and gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import encoded, opposed
from operator_cases import Inputs, run

tl = pytest.importorskip("triton.language")
pytestmark = pytest.mark.usefixtures("interpreter")
# Lengths: one block, a pair, a pair and a lone block, a ragged end, levels left out on either side.
CASES = [
    ("path", [64]),
    ("path", [330]),
    ("path_fox", [330]),
    ("path_fox", [128, 192, 64, 250]),
    ("path_fox", [1000]),
]


@pytest.fixture
def hopper(request, monkeypatch):
    from gluon_emulator import Emulator

    from path_attention.ops.triton import call, hopper

    choose = call.choose_tiles
    every = dict(hopper_forward=True, hopper_queries=True, hopper_keys=True)
    monkeypatch.setattr(call, "choose_tiles", lambda *a: replace(choose(*a), **every))
    for name in dir(hopper):
        if name.endswith("_kernel"):
            monkeypatch.setattr(hopper, name, Emulator(getattr(hopper, name), request.param))
    return hopper


def check(inputs: Inputs, lengths: list[int]) -> None:
    """Operands are float16 whatever the inputs: float16 results may err half as much as bfloat16
    ones, which round 8 times coarser and may err twice that (four times for w, β and gates)."""
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
@pytest.mark.parametrize(("encoding", "lengths"), CASES, ids=str)
def test_every_stage_is_the_definition(encoding, lengths, hopper):
    heads = (1, 1) if lengths == [1000] else (2, 1)
    check(encoded(encoding, sum(lengths), heads=heads, size=(64, 64)), lengths)


@pytest.mark.parametrize("hopper", [2], indirect=True)
@pytest.mark.parametrize("lengths", [[64], [330], [128, 192, 64, 65]], ids=str)
@pytest.mark.parametrize("encoding", ["fox", "nope"])
def test_without_transport(encoding, lengths, hopper):
    check(encoded(encoding, sum(lengths), heads=(4, 2), size=(48, 64)), lengths)


@pytest.mark.parametrize("hopper", [3], indirect=True)
@pytest.mark.parametrize("size", [(128, 128), (64, 128), (128, 40)])
def test_other_head_sizes(size, hopper):
    check(encoded("path_fox", 200, heads=(2, 2), size=size), [200])


# --- The frozen maximum --------------------------------------------------------------------------


@pytest.mark.usefixtures("bfloat16_products")
@pytest.mark.parametrize("hopper", [4], indirect=True)
@pytest.mark.parametrize("encoding", ["path", "path_fox"])
def test_a_maximum_that_may_be_frozen(encoding, hopper):
    outputs_are_the_definition(encoded(encoding, 330, heads=(2, 1), size=(64, 64)))


@pytest.mark.usefixtures("bfloat16_products")
@pytest.mark.parametrize("hopper", [5], indirect=True)
@pytest.mark.parametrize(
    ("where", "reach"),  # 64 powers of two are allowed
    [("start", 30.0), ("start", 33.0), ("start", 300.0), ("row", 300.0), ("tile", 33.0),
     ("unit", 300.0)],
)  # fmt: skip
def test_scores_that_pass_the_frozen_maximum(where, reach, hopper):
    outputs_are_the_definition(opposed(reach, where))


@pytest.mark.usefixtures("bfloat16_products")
@pytest.mark.parametrize("hopper", [6], indirect=True)
def test_without_its_guard_it_overflows(hopper, monkeypatch):
    from path_attention.ops.triton import hopper_forward

    monkeypatch.setattr(hopper_forward, "MOST", tl.constexpr(1e9))
    with pytest.raises(AssertionError):
        outputs_are_the_definition(opposed(300.0))


def outputs_are_the_definition(inputs: Inputs) -> None:
    x = Inputs(*inputs.to(torch.bfloat16)[:3], *inputs[3:])
    exact, got = run(x.to(torch.float64), "definition"), run(x, "triton")
    for value, result in ((exact.out, got.out), (exact.lse, got.lse)):
        rounding = (value.to(torch.bfloat16).double() - value).norm()
        assert (result.double() - value).norm() <= 2 * rounding


# --- Descriptors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [0, 1])
def test_rows_that_overlap_are_copied(dims):
    """Such as the output gradient of a sum over tokens, or heads."""
    from path_attention.ops.triton.call import public

    x = torch.randn(70, 2, 64)
    x = x.narrow(dims, 0, 1).expand_as(x)
    tiles = public(x, 64, 64)
    assert tiles.strides[0] >= tiles.shape[1] == 128
    assert torch.equal(tiles.base.as_strided(x.shape, (tiles.strides[0], 64, 1)), x)
