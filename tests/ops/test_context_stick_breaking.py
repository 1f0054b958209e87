"""Stick-breaking over two runs of one process; `test_context_parallel.py` has several processes."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from stick_cases import Inputs, make_inputs
from torch.utils.checkpoint import checkpoint

from path_attention.ops.context_split import ContextSplit
from path_attention.ops.context_stick_breaking import (
    _join,
    _Stretch,
    context_parallel_stick_breaking,
)
from path_attention.ops.packing import Packing
from path_attention.ops.stick_breaking import stick_breaking_attention
from path_attention.ops.stick_rectangle import StickRectangle


@pytest.mark.parametrize("lengths", [None, [90, 40], [65, 65], [0, 1, 129]])
@pytest.mark.parametrize("shift", [-6.0, 0.0])
def test_one_process_is_the_definition(lengths, shift, poisoned_memory) -> None:
    """Outputs and gradients, of inputs and with gradients that lie in memory in another order."""
    inputs = make_inputs(130, heads=(4, 2), size=(8, 6), shift=shift)
    leaves = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs]
    packing = None if lengths is None else Packing.from_lengths(lengths)
    split = ContextSplit.of(130, None, packing)
    found = context_parallel_stick_breaking(*leaves, split=split, scale=0.4)
    exact = stick_breaking_attention(
        *leaves, scale=0.4, cu_seqlens=packing, implementation="definition"
    )
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)
    above = [torch.randn_like(x).mT.contiguous().mT for x in exact]
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, above),
        torch.autograd.grad(exact, leaves, above),
        rtol=1e-11,
        atol=1e-12,
    )


def test_runs_of_keys_may_come_in_any_order() -> None:
    """In each order of five, out and rest are those of one walk; never do more than three wait."""
    q, k, v = make_inputs(50, heads=(4, 2), size=(8, 6), shift=-2.0)
    cuts = [0, 9, 10, 23, 40, 50]
    exact = StickRectangle(q[:, :7], k, v, 0.3).attend()
    parts = []
    for n in range(5):  # the farthest keys come first in memory
        keys = slice(cuts[n], cuts[n + 1])
        part = StickRectangle(q[:, :7], k[:, keys], v[:, keys], 0.3).attend()
        parts.append(_Stretch(4 - n, 4 - n, *part))
    for order in permutations(range(5)):
        stretches: list[_Stretch] = []
        for n in order:
            stretches = _join(stretches, parts[n])
            assert len(stretches) <= 3
        (whole,) = stretches
        assert (whole.near, whole.far) == (0, 4)
        torch.testing.assert_close((whole.out, whole.rest), exact, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("dtype", "rounding"),
    [(torch.bfloat16, 2**-8), (torch.float16, 2**-11), (torch.float32, 2**-24)],
)
@pytest.mark.parametrize("shift", [-8.0, 0.0, 3.0])
def test_every_dtype(device, dtype, rounding, shift) -> None:
    """On CUDA by the kernels, between runs too.

    Shares, score gradients and results are rounded, results of the two runs twice: 4 roundings of
    the largest element in 16 bits. float32 adds up 600 terms: 600 roundings at most. So does the
    log of what remains in every dtype, from products that kernels with 16-bit operands form in
    float32.
    """
    inputs = make_inputs(600, heads=(4, 2), size=(64, 64), shift=shift, dtype=dtype)
    packing = Packing.from_lengths([20, 500, 80], device)
    split = ContextSplit.of(600, None, packing)
    results = []
    for exact in (False, True):
        given = inputs.to(torch.float64) if exact else inputs.to(device)
        leaves = [x.detach().requires_grad_() for x in given]
        if exact:
            named = stick_breaking_attention(*leaves, cu_seqlens=packing.to("cpu"))
        else:
            named = context_parallel_stick_breaking(*leaves, split=split)
        rng = torch.Generator().manual_seed(1)
        above = [torch.randn(x.shape, generator=rng).bfloat16().to(x) for x in named]
        grads = torch.autograd.grad(named, leaves, above)
        results.append([x.detach().double().cpu() for x in (*named, *grads)])
    for name, found, expected in zip(["out", "rest", *Inputs._fields], *results, strict=True):
        allowed = 4 * rounding if dtype != torch.float32 and name != "rest" else 600 * 2**-24
        worst = (found - expected).abs().max() / expected.abs().max()
        assert worst <= allowed, f"{name}: off by {worst:.2e}, allowed {allowed:.2e}"


def test_a_used_up_stick_leaves_no_noise_in_gradients() -> None:
    """What is left of δ in the far run is a sum of terms of its own, not what rounding left."""
    inputs = make_inputs(1000, heads=(1, 1), dtype=torch.float32)
    inputs.q[:], inputs.k[:] = 1, 0.5
    grads = []
    for dtype in (torch.float32, torch.float64):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out, _ = context_parallel_stick_breaking(*leaves, split=ContextSplit.of(1000), scale=1.0)
        grads.append(torch.autograd.grad(out, leaves[:2], torch.ones_like(out)))
    exact = stick_breaking_attention(*leaves, scale=1.0, implementation="definition")[0]
    expected = torch.autograd.grad(exact, leaves[:2], torch.ones_like(exact))
    torch.testing.assert_close(grads[1], expected, rtol=1e-11, atol=1e-12)
    for got, x in zip(grads[0], expected, strict=True):
        assert (got - x).abs().max() <= 64 * 2**-24 * x.abs().max().clamp(min=1)


@pytest.mark.parametrize("which", [0, 1])
def test_gradient_of_one_result_alone(which) -> None:
    x = [y.requires_grad_() for y in make_inputs(150)]
    calls = context_parallel_stick_breaking(*x, split=ContextSplit.of(150))
    expected = stick_breaking_attention(*x)
    grads = [
        torch.autograd.grad(y[which].sum(), x, allow_unused=True, materialize_grads=True)
        for y in (calls, expected)
    ]
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-12)


def test_autocast_checkpointing_and_no_sequences() -> None:
    split = ContextSplit.of(64)
    x = [y.requires_grad_() for y in make_inputs(64, dtype=torch.float32)]
    with torch.autocast("cpu", torch.bfloat16):
        out, rest = context_parallel_stick_breaking(*x, split=split)
    assert out.dtype == torch.bfloat16 and rest.dtype == torch.float32

    def call(*tensors):
        return context_parallel_stick_breaking(*tensors, split=split)[0].square()

    plain = torch.autograd.grad(call(*x).sum(), x)
    again = torch.autograd.grad(checkpoint(call, *x, use_reentrant=False).sum(), x)
    assert all(map(torch.equal, plain, again))
    none = [y[:0].detach().requires_grad_() for y in x]
    out, rest = context_parallel_stick_breaking(*none, split=split)
    assert out.shape == (0, 64, 2, 8) and rest.shape == (0, 64, 2)
    assert torch.autograd.grad(out.sum(), none)[1].shape == none[1].shape
