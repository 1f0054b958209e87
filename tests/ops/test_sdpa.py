"""sdpa = definition: PyTorch's own kernels, with their log-sum-exp and its gradient."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from operator_cases import Inputs, assert_same, make_inputs, run

from path_attention import Packing, path_attention
from path_attention.ops import sdpa as module

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def plain(T: int, **options) -> Inputs:
    return make_inputs(T, transport=False, gate=False, **options)


def check(inputs: Inputs, **options) -> None:
    assert_same(run(inputs, "sdpa", **options), run(inputs, "definition", **options))


@pytest.mark.parametrize("T", [1, 2, 31, 64, 65, 200])
def test_lengths(T):
    check(plain(T, B=2))


@pytest.mark.parametrize("size", [(8, 8), (3, 7), (16, 1), (130, 64)])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (3, 1)])
def test_heads_and_sizes(heads, size):
    check(plain(50, heads=heads, size=size))


@pytest.mark.parametrize("scale", [1.0, 0.0, -0.5])
def test_scales(scale):
    check(plain(40), scale=scale)


@pytest.mark.parametrize("lengths", [[7, 0, 1, 92], [100], [0, 0, 100]])
def test_packed(lengths):
    check(plain(100, heads=(4, 2), size=(5, 8)), cu_seqlens=Packing.from_lengths(lengths))


def outputs_and_gradients(inputs: Inputs, implementation: str, packing: Packing):
    """Without the log-sum-exp, which decides how documents are attended."""
    leaves = [x.detach().requires_grad_() for x in inputs if x is not None]
    out = path_attention(*leaves, cu_seqlens=packing, implementation=implementation)
    above = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out, *torch.autograd.grad(out, leaves, above)]


def test_packed_documents_are_one_call_on_cuda(monkeypatch):
    """What CUDA's attention of packed documents is given, and what becomes of its result."""

    def varlen(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
        assert q.shape[2] % 8 == 0 and q.shape[2] == k.shape[2] == v.shape[2]
        assert window_size == (-1, 0) and enable_gqa == (q.shape[1] != k.shape[1])
        assert cu_q.dtype == torch.int32 and torch.equal(cu_q, cu_k) and max_q == max_k == 92
        packing = Packing.from_cu_seqlens(cu_q)
        return path_attention(
            q[None], k[None], v[None], scale=scale, cu_seqlens=packing, implementation="definition"
        )[0]

    monkeypatch.setattr(module, "_in_one_call", lambda q, k, return_lse: varlen)
    for heads in ((2, 2), (4, 2)):
        inputs = plain(100, heads=heads, size=(8, 5))
        got, exact = (
            outputs_and_gradients(inputs, name, Packing.from_lengths([7, 0, 1, 92]))
            for name in ("sdpa", "definition")
        )
        torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)


def test_packed_documents_are_the_choice_unless_tiny_or_compiled():
    q, k, v, *_ = plain(96, dtype=torch.float32)
    for lengths, suits in (([96], True), ([16] * 6, True), ([2] * 48, False)):
        assert module.suits_packing(q, k, Packing.from_lengths(lengths), False) == suits
    packing, chosen = Packing.from_lengths([50, 46]), []
    compiled = torch.compile(
        lambda *x: chosen.append(module.suits_packing(q, k, packing, False)) or path_attention(*x),
        backend="eager",
    )
    compiled(q, k, v)
    assert chosen == [False]


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("size", [(64, 64), (40, 24), (128, 128)])
def test_packed_on_a_gpu(heads, size):
    inputs = plain(300, heads=heads, size=size, dtype=torch.bfloat16)
    packing = Packing.from_lengths([7, 0, 1, 292], "cuda")
    exact = outputs_and_gradients(inputs.to(torch.float64), "definition", packing.to("cpu"))
    got = outputs_and_gradients(inputs.to("cuda"), "sdpa", packing)
    for result, value in zip(got, exact, strict=True):
        assert (result.cpu().double() - value).norm() <= 4 * 2**-8 * value.norm()


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_packed_nothing(lengths):
    check(plain(0), cu_seqlens=Packing.from_lengths(lengths))


@pytest.mark.parametrize(("B", "T"), [(2, 0), (0, 5)])
def test_nothing_gives_nothing(B, T):
    check(plain(T, B=B, heads=(4, 2), size=(8, 3)))


@pytest.mark.parametrize("implementation", ["sdpa", "blockwise"])
@pytest.mark.parametrize("dim", [2, 3])
def test_strides_do_not_matter(dim, implementation):
    """Tokens last in memory but for heads, or for the numbers of a head."""
    inputs = plain(60, heads=(4, 2))
    expected = run(inputs, implementation)
    swapped = Inputs(
        *(None if x is None else x.transpose(1, dim).contiguous().transpose(1, dim) for x in inputs)
    )
    assert_same(run(swapped, implementation), expected, 1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [(8, 8), (8, 5)])
def test_dtypes(dtype, size):
    inputs = plain(70, heads=(4, 2), size=size, dtype=dtype)
    got, exact = run(inputs, "sdpa"), run(inputs.to(torch.float64), "definition")
    limit = 4 * torch.finfo(dtype).eps  # of P, out and the gradients, a rounding each, and δ's
    for name, value in exact.named().items():
        result = got.named()[name]
        assert result.dtype == (torch.float32 if name == "lse" else dtype)
        assert (result.double() - value).norm() <= limit * value.norm(), name


def test_it_is_the_choice_where_nothing_is_moved_or_gated():
    q, k, v, *_ = plain(50, dtype=torch.float32)
    direct = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    assert torch.equal(path_attention(q, k, v), direct.transpose(1, 2))
    assert torch.equal(path_attention(q, k, v, return_lse=True)[0], direct.transpose(1, 2))


def test_a_chosen_lse_is_differentiable():
    x = [y.requires_grad_() for y in plain(50) if y is not None]
    results = []
    for implementation in (None, "definition"):
        _, lse = path_attention(*x, return_lse=True, implementation=implementation)
        results.append(torch.autograd.grad(lse.sum(), x[:2]))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("return_lse", [False, True])
def test_compiled_equals_eager_over_many_lengths(return_lse):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def call(*x):
        result = path_attention(*x, return_lse=return_lse, implementation="sdpa")
        out, lse = result if return_lse else (result, torch.zeros(1))
        return out.square().sum() + lse.sum()

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for T in range(40, 100, 5):
        x = [y.requires_grad_() for y in plain(T, dtype=torch.float32) if y is not None]
        got, eager = compiled(*x), call(*x)
        assert torch.equal(got, eager)
        grads = [torch.autograd.grad(y, x) for y in (got, eager)]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert counter.frame_count <= 2
