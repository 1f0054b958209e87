"""Context parallelism over 2 and 4 gloo processes gives what one process gives, to 1e-10."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from operator_cases import make_inputs

from path_attention.ops.context_parallel import context_parallel_attention
from path_attention.ops.context_split import ContextSplit
from path_attention.ops.definition import definition
from path_attention.ops.packing import Packing
from path_attention.ops.path import path_attention
from path_attention.ops.transport import chunk_transport


@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes_equal_one(processes: int) -> None:
    script = Path(__file__).with_name("context_processes.py")
    paths = os.pathsep.join([str(script.parent), str(script.parents[2])])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
         str(processes), str(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("complete") == processes


@pytest.mark.parametrize("lengths", [None, [90, 40]])
def test_one_process_is_the_definition(lengths, poisoned_memory) -> None:
    """Outputs and gradients, of inputs and with gradients that lie in memory in another order."""
    inputs = make_inputs(130, heads=(4, 2), size=(8, 6))
    leaves = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs]
    packing = None if lengths is None else Packing.from_lengths(lengths)
    split = ContextSplit.of(130, None, packing)
    found = context_parallel_attention(*leaves, split=split, return_lse=True)
    exact = definition(*leaves, 8**-0.5, packing)
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)
    above = [torch.randn_like(x).mT.contiguous().mT for x in exact]
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, above),
        torch.autograd.grad(exact, leaves, above),
        rtol=1e-10,
        atol=1e-10,
    )


@pytest.mark.parametrize(("T", "factors"), [(1, None), (64, 2), (150, None), (300, None)])
def test_a_run_moves_as_the_definition_says(T: int, factors, poisoned_memory) -> None:
    """Values and gradients against one factor at a time."""
    inputs = make_inputs(T, B=2, heads=(4, 2), gate=False, factors=factors)
    tensors = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.w, inputs.beta)]
    exact, found = literal_moves(*tensors), chunk_transport(*tensors)
    above = [torch.randn_like(x) for x in exact]
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(found, tensors, above),
        torch.autograd.grad(exact, tensors, above),
        rtol=1e-9,
        atol=1e-10,
    )
    no_queries = chunk_transport(tensors[0][:, :, :0], *tensors[1:])
    torch.testing.assert_close(no_queries[1:], exact[1:], rtol=1e-10, atol=1e-12)
    (gradient,) = torch.autograd.grad(no_queries[1:], tensors[2], above[1:])
    (expected,) = torch.autograd.grad(literal_moves(*tensors)[1:], tensors[2], above[1:])
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-10)


def literal_moves(q, k, w, beta):
    """Products of the factors as matrices, one token at a time."""
    B, T, H, D = k.shape
    if w.dim() == 4:
        w, beta = w[:, :, :, None], beta[..., None]
    eye = torch.eye(D, dtype=q.dtype).expand(B, T, H, D, D)
    token = eye
    for n in range(w.shape[3]):
        w_n, strength = w[:, :, :, n], beta[:, :, :, n, None, None]
        token = token @ (eye - strength * w_n[..., :, None] * w_n[..., None, :])
    product, queries = eye[:, 0], []
    for t in range(T):
        product = product @ token[:, t]
        mine = q[:, t].unflatten(1, (H, -1))
        queries.append(torch.einsum("bhde,bhge->bhgd", product, mine).flatten(1, 2))
    behind, keys = eye[:, 0], []
    for t in reversed(range(T)):
        keys.append(torch.einsum("bhd,bhde->bhe", k[:, t], behind))
        behind = token[:, t] @ behind
    return torch.stack(queries, 1), torch.stack(keys[::-1], 1), product


def test_bad_splits_are_refused() -> None:
    inputs = make_inputs(40, B=2)
    with pytest.raises(ValueError, match="total: expected at least 2 tokens for each of 1"):
        ContextSplit.of(1)
    with pytest.raises(ValueError, match="cu_seqlens: expected to end at total = 40, got 30"):
        ContextSplit.of(40, None, Packing.from_lengths([30]))
    with pytest.raises(ValueError, match="q: expected this process's 20 tokens of 20, got 40"):
        context_parallel_attention(*inputs, split=ContextSplit.of(20))
    packed = ContextSplit.of(40, None, Packing.from_lengths([30, 10]))
    with pytest.raises(ValueError, match="split: expected a batch of 1 with packed documents"):
        context_parallel_attention(*inputs, split=packed)
    with pytest.raises(ValueError, match="labels: expected 40 tokens, got 7"):
        packed.targets(torch.zeros(1, 7))
    with pytest.raises(ValueError, match="x: expected 40 tokens, got 7"):
        packed.extend(torch.zeros(1, 7, 2), 2)


def test_autocast_and_a_second_call_change_nothing() -> None:
    """Checkpointing calls it again; autocast casts q, k, v as it does for `path_attention`."""
    inputs = make_inputs(64, dtype=torch.float32)
    split = ContextSplit.of(64)
    with torch.autocast("cpu", torch.bfloat16):
        one = context_parallel_attention(*inputs, split=split)
        two = context_parallel_attention(*inputs, split=split)
    assert isinstance(one, torch.Tensor) and one.dtype == torch.bfloat16
    assert torch.equal(one, two)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("dtype", "rounding"),
    [(torch.bfloat16, 2**-8), (torch.float16, 2**-11), (torch.float32, 2**-24)],
)
@pytest.mark.parametrize(("transport", "gate"), [(True, True), (True, False), (False, True)])
def test_one_process_in_every_dtype(device, dtype, rounding, transport, gate) -> None:
    """Two runs of one process: flash attention between them in 16 bits on CUDA.

    Operands are rounded when moved, scores' shares and outputs once more, so errors are some
    roundings (half a unit in the last place) of the largest element: 4 in 16 bits. float32 adds up
    600 terms: 600 roundings at most.
    """
    inputs = make_inputs(600, heads=(4, 2), size=(64, 64), transport=transport, gate=gate)
    sixteen = {n: getattr(inputs, n).to(dtype) for n in "qkv"}
    others = [n for n in ("w", "beta", "log_forget") if getattr(inputs, n) is not None]
    inputs = inputs._replace(**sixteen, **{n: getattr(inputs, n).float() for n in others})
    packing = Packing.from_lengths([20, 500, 80], device)
    split = ContextSplit.of(600, None, packing)
    results = []
    for exact in (False, True):
        given = inputs.to(torch.float64) if exact else inputs.to(device)
        leaves = [None if x is None else x.detach().requires_grad_() for x in given]
        if exact:
            out = path_attention(*leaves, cu_seqlens=packing.to("cpu"))
        else:
            out = context_parallel_attention(*leaves, split=split)
        above = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
        present = [x for x in leaves if x is not None]
        grads = torch.autograd.grad(out, present, above)
        results.append([x.double().cpu() for x in (out.detach(), *grads)])
    allowed = (600 if dtype == torch.float32 else 4) * rounding
    for name, found, expected in zip(["out", *"qkv", *others], *results, strict=True):
        worst = (found - expected).abs().max() / expected.abs().max()
        assert worst <= allowed, f"{name}: off by {worst / rounding:.1f} roundings"
