"""Hopper's main loops on the GPU they are for. (test_triton_gpu.py, too, runs with them there, and
with the portable ones where `PATH_ATTENTION_HOPPER=0` is set.)"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_cases import BF16, DEVICE, F16, HARD, call, check, leaves, make, rounded
from kernel_cases import ENCODINGS, encoded, opposed
from operator_cases import correlated_directions, run

pytestmark = pytest.mark.gpu
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these kernels are for compute capability 9.0")
    monkeypatch.setenv("PATH_ATTENTION_HOPPER", "1")


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("size", [(128, 128), (64, 64), (128, 64), (96, 128)], ids=str)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_encodings(encoding, size, dtype):
    check(make(encoding, 500, dtype, size=size))


@pytest.mark.parametrize("T", [64, 65, 128, 191, 192, 1000, 4096])
def test_lengths(T):
    check(make("path_fox", T, size=(128, 128), heads=(2, 1)))


def test_packed():
    borders = torch.tensor([0, 1, 64, 65, 330, 330, 1354, 2000], device=DEVICE)
    check(make("path_fox", 2000, size=(128, 128)), cu_seqlens=borders)


@pytest.mark.parametrize("gate", [False, True])
def test_hard(gate):
    x = encoded("path_fox" if gate else "path", 600, heads=(4, 2), size=(128, 128))
    assert x.w is not None and x.beta is not None
    w = correlated_directions(tuple(x.w.shape), cosine=0.7)
    check(rounded(x._replace(w=w, beta=1.9 + 0.05 * x.beta), BF16), HARD)


@pytest.mark.parametrize("where", ["start", "row", "tile", "unit"])
@pytest.mark.parametrize("reach", [30.0, 33.0, 300.0])
def test_scores_that_pass_the_frozen_maximum(where, reach):
    x = rounded(opposed(reach, where, size=128), BF16)
    exact, got = run(x.to(torch.float64), "definition"), run(x, "triton")
    for value, result in ((exact.out, got.out), (exact.lse, got.lse)):
        rounding = (value.to(BF16).double() - value).norm()
        assert (result.double() - value).norm() <= 2 * rounding


@pytest.mark.parametrize("encoding", ["path", "path_fox", "fox"])
def test_gradients_repeat(encoding):
    inputs = make(encoding, 3000, size=(128, 128))
    x = leaves(inputs)
    given = [None if y is None else x.pop(0) for y in inputs]
    x = [y for y in given if y is not None]
    first = torch.autograd.grad(call(*given).square().sum(), x)
    for _ in range(20):
        again = torch.autograd.grad(call(*given).square().sum(), x)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("asked", ["0", "1"])
@pytest.mark.parametrize("size", [(64, 64), (128, 128)], ids=str)
def test_short_documents(size, asked, monkeypatch):
    """Of two blocks at most: zeros were read, now and then, before other threads had written them.
    Many programs, many times; what was not written is NaN."""
    monkeypatch.setenv("PATH_ATTENTION_HOPPER", asked)
    lengths = [128, 64, 0, 65] * 32
    options = {"cu_seqlens": torch.tensor([0, *lengths], device=DEVICE).cumsum(0)}
    x = make("path_fox", sum(lengths), size=size, heads=(3, 3))
    check(x, **options)
    first = run(x, "triton", **options).named()
    for _ in range(50):
        again = run(x, "triton", **options).named()
        assert all(torch.equal(value, again[name]) for name, value in first.items())


@pytest.mark.slow
def test_a_thousand_shapes():
    """By both kernels, in a process that ends itself where one shape takes a minute."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(HERE / "hopper_shapes.py"), "0", "1000"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-200:] + done.stderr[-4000:]
