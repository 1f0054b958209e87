"""The compiled stick-breaking kernels on an NVIDIA GPU, in the dtypes that models use.

The unit of error is ‖round(exact) − exact‖ in the inputs' dtype: what storing the result costs any
implementation. Exact is the definition in float64 on the same rounded inputs; beyond 600 tokens
`blockwise` in float64, which other tests hold to the definition.
"""

from __future__ import annotations

import pytest
import torch
from stick_cases import Inputs, make_inputs, run

from path_attention import Packing
from path_attention.ops.stick_breaking import stick_breaking_attention

pytestmark = pytest.mark.gpu
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# Roundings allowed: of the shares, the score gradients and the result, one each and one to spare.
LIMIT = {BF16: 4, F16: 4, F32: 64}
ORACLE_TOKENS = 600


def make(T: int, dtype: torch.dtype = BF16, **options) -> Inputs:
    options = {"heads": (4, 2), "size": (64, 64), **options}
    return make_inputs(T, dtype=dtype, **options).to("cuda")


def check(inputs: Inputs, **options) -> None:
    dtype, T = inputs.q.dtype, inputs.q.shape[1]
    oracle = "definition" if T <= ORACLE_TOKENS else "blockwise"
    exact = run(inputs.to(torch.float64), oracle, grad_dtype=dtype, **options).named()
    got = run(inputs, "triton", grad_dtype=dtype, **options).named()
    for name, value in exact.items():
        kept = F32 if name == "rest" else dtype
        rounding = (value.to(kept).double() - value).norm().item()
        floor = 0.01 * torch.finfo(kept).eps / 4 * value.numel() ** 0.5
        error = (got[name].double() - value).norm().item() / max(rounding, floor)
        assert error <= LIMIT[kept], f"{name}: {error:.2f} roundings, allowed {LIMIT[kept]}"


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("shift", [0.0, -6.0])
def test_dtypes(dtype, shift):
    check(make(330, dtype, B=2, shift=shift))


@pytest.mark.parametrize("T", [*range(1, 10), 63, 64, 65, 127, 128, 129, 511, 512, 513])
def test_lengths(T):
    check(make(T))


@pytest.mark.parametrize("shift", [0.0, -8.0])
@pytest.mark.parametrize("T", [4096, pytest.param(16384, marks=pytest.mark.slow)])
def test_long(T, shift):
    check(make(T, heads=(2, 1), shift=shift))


@pytest.mark.parametrize("size", [(128, 128), (16, 16), (96, 80), (64, 128), (1, 3)])
def test_head_sizes(size):
    check(make(200, size=size))


@pytest.mark.parametrize("heads", [(6, 2), (3, 1), (2, 2)])
def test_grouped_heads(heads):
    check(make(200, heads=heads))


@pytest.mark.parametrize("lengths", [[70, 0, 1, 64, 65], [1000, 24], [3] * 50])
def test_packed(lengths):
    packing = Packing.from_lengths(lengths, "cuda")
    check(make(packing.total), cu_seqlens=packing)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("logit", [1e3, -1e3])
def test_huge_logits_are_finite(logit, dtype):
    inputs = make(1000, dtype)
    inputs.q[..., 0], inputs.k[..., 0] = 1, logit
    result = run(inputs, "triton", scale=1.0, rest=dtype != F16)
    assert all(x.isfinite().all() for x in result.named().values())


@pytest.mark.parametrize("grad_scale", [2.0**-20, 2.0**10])
def test_small_and_large_gradients(grad_scale):
    x = [y.requires_grad_() for y in make(300)]
    out, _ = stick_breaking_attention(*x)
    above = torch.randn_like(out)
    once = torch.autograd.grad(out, x, above, retain_graph=True)
    scaled = torch.autograd.grad(out, x, above * grad_scale)
    assert all(torch.equal(a * grad_scale, b) for a, b in zip(once, scaled, strict=True))


def test_memory_is_linear():
    def peak(T: int) -> int:
        x = [y.requires_grad_() for y in make(T, heads=(4, 4))]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        stick_breaking_attention(*x)[0].sum().backward()
        return torch.cuda.max_memory_allocated() - before

    assert peak(65536) <= 2.2 * peak(32768)


def test_gradients_repeat():
    x = [y.requires_grad_() for y in make(3000)]
    out, rest = stick_breaking_attention(*x)
    loss = out.float().square().sum() + rest.sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)
    for _ in range(5):
        again = torch.autograd.grad(loss, x, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_compiled():
    x = [y.requires_grad_() for y in make(500)]
    function = torch.compile(lambda *x: stick_breaking_attention(*x)[0].square(), fullgraph=True)
    got, eager = function(*x), stick_breaking_attention(*x)[0].square()
    torch.testing.assert_close(got, eager)
    grads = [torch.autograd.grad(y.sum(), x) for y in (got, eager)]
    torch.testing.assert_close(*grads)
