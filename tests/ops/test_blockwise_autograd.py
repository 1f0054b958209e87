"""blockwise under autograd's, autocast's, torch.compile's and checkpointing's demands."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from operator_cases import Inputs, Run, assert_same, make_inputs, run
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from path_attention import Packing, path_attention

pytestmark = pytest.mark.usefixtures("poisoned_memory")
LENGTHS = [100, 0, 1, 64, 35]
T = sum(LENGTHS)


def leaves(inputs: Inputs) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in inputs if x is not None]


def spaced(x: Tensor) -> Tensor:
    """The same values, tokens and heads swapped in memory, rows further apart than needed."""
    wide = x.new_full((x.shape[0] + 1, x.shape[2], x.shape[1] + 3, *x.shape[3:]), torch.nan)
    view = wide[: x.shape[0], :, 1 : x.shape[1] + 1].transpose(1, 2)
    view.copy_(x)
    assert not view.is_contiguous()
    return view


@pytest.mark.parametrize("packing", [None, Packing.from_lengths(LENGTHS)])
def test_strides_do_not_matter(packing):
    inputs = make_inputs(T, B=1 if packing else 2, heads=(4, 2))
    expected = run(inputs, "blockwise", cu_seqlens=packing)
    x = [spaced(x).requires_grad_() for x in inputs]
    out, lse = path_attention(*x, cu_seqlens=packing, return_lse=True)
    rng = torch.Generator().manual_seed(1)  # as in `run`
    above = [torch.randn(y.shape, dtype=torch.float64, generator=rng) for y in (out, lse)]
    grads = torch.autograd.grad((out, lse), x, [spaced(y) for y in above])
    assert_same(Run(out, lse, dict(zip(inputs._fields, grads, strict=True))), expected, 1e-13)


def test_an_expanded_output_gradient():
    x = leaves(make_inputs(T))
    out = path_attention(*x)
    summed = torch.autograd.grad(out.sum(), x, retain_graph=True)
    given = torch.autograd.grad(out, x, torch.ones_like(out))
    assert all(torch.equal(a, b) for a, b in zip(summed, given, strict=True))


@pytest.mark.parametrize("implementation", ["definition", "blockwise"])
def test_gradient_of_lse_alone(implementation):
    x = leaves(make_inputs(90))
    _, lse = path_attention(*x, return_lse=True, implementation=implementation)
    grads = torch.autograd.grad(lse.sum(), x, allow_unused=True, materialize_grads=True)
    y = leaves(make_inputs(90))
    _, lse = path_attention(*y, return_lse=True, implementation="definition")
    expected = torch.autograd.grad(lse.sum(), y, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(grads, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("wanted", range(6))
def test_gradient_of_one_input_alone(wanted):
    x = leaves(make_inputs(90))
    expected = torch.autograd.grad(path_attention(*x).sum(), x)[wanted]
    for n, tensor in enumerate(x):
        tensor.requires_grad_(n == wanted)
    (alone,) = torch.autograd.grad(path_attention(*x).sum(), x[wanted])
    assert torch.equal(alone, expected)


def test_inputs_are_left_alone():
    x = leaves(make_inputs(T))
    before = [y.detach().clone() for y in x]
    path_attention(*x).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(x, before, strict=True))


def test_a_hundred_gradients_are_one():
    x = leaves(make_inputs(200, B=2, heads=(4, 2), dtype=torch.float32))
    first = torch.autograd.grad(path_attention(*x).square().sum(), x)
    for _ in range(99):
        again = torch.autograd.grad(path_attention(*x).square().sum(), x)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_second_derivatives_are_refused():
    x = leaves(make_inputs(20))
    (grad,) = torch.autograd.grad(path_attention(*x).sum(), x[0], create_graph=True)
    with pytest.raises(RuntimeError, match="blockwise is differentiable once"):
        grad.sum().backward()


def test_forward_mode_is_refused():
    x = make_inputs(20)

    def tangent(name):
        return torch.func.jvp(
            lambda q: path_attention(q, *x[1:], implementation=name),
            x[:1],
            (torch.ones_like(x[0]),),
        )[1]

    assert tangent("definition").any()
    with pytest.raises(RuntimeError, match="blockwise has no derivatives of forward mode"):
        tangent("blockwise")


@pytest.mark.parametrize("packing", [None, Packing.from_lengths(LENGTHS)])
def test_registered_as_torch_asks(packing):
    x = [*leaves(make_inputs(T)), 0.5, None if packing is None else packing.cu_seqlens]
    torch.library.opcheck(torch.ops.path_attention.blockwise.default, x)
    x[3] = x[4] = None
    torch.library.opcheck(torch.ops.path_attention.blockwise.default, x)


# --- autocast ------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["definition", "blockwise"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_q_k_v_alone(dtype, implementation):
    x = make_inputs(80, dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        out = path_attention(*x, implementation=implementation)
    cast = [y.to(dtype) for y in x[:3]]
    assert out.dtype == dtype
    assert torch.equal(out, path_attention(*cast, *x[3:], implementation=implementation))


def test_autocast_leaves_float64_alone():
    x = make_inputs(80)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(path_attention(*x), path_attention(*x))
        assert path_attention(*x).dtype == torch.float64


def test_backward_inside_autocast_is_as_exact_as_outside():
    x = leaves(make_inputs(200, size=(16, 16), dtype=torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = path_attention(*x)
        inside = torch.autograd.grad(out, x, torch.ones_like(out), retain_graph=True)
    outside = torch.autograd.grad(out, x, torch.ones_like(out))
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


def test_one_direction_near_two_under_autocast():
    # bf16 autocast, β in [1.5, 2), the same w for more than 64 tokens
    x = make_inputs(200, heads=(2, 2), size=(16, 16), dtype=torch.float32)
    assert x.w is not None and x.beta is not None
    w = x.w[:, :1].expand_as(x.w).contiguous()
    x = x._replace(w=w, beta=1.5 + 0.499 * torch.rand_like(x.beta))
    cast = Inputs(*(y.bfloat16() for y in x[:3]), *x[3:])
    exact = path_attention(*cast.to(torch.float64), implementation="definition")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = path_attention(*x)
    rounding = (exact.bfloat16() - exact).norm()
    assert (out - exact).norm() <= 2 * rounding


# --- Activation checkpointing --------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("packing", [None, Packing.from_lengths(LENGTHS)])
def test_checkpointing_changes_nothing(packing, use_reentrant):
    x = leaves(make_inputs(T))

    def call(*tensors: Tensor) -> Tensor:
        return path_attention(*tensors, cu_seqlens=packing).square()

    plain = torch.autograd.grad(call(*x).sum(), x)
    out = checkpoint(call, *x, use_reentrant=use_reentrant)
    assert isinstance(out, Tensor)
    out.sum().backward()
    assert all(torch.equal(a, y.grad) for a, y in zip(plain, x, strict=True))


# --- torch.compile -------------------------------------------------------------------------------


def compiled(call) -> tuple:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    return torch.compile(call, fullgraph=True, backend=counter), counter


def test_compiled_equals_eager_over_fifty_lengths():
    call, counter = compiled(lambda *x: path_attention(*x).square())
    for T in range(40, 190, 3):
        x = leaves(make_inputs(T, size=(4, 4), dtype=torch.float32))
        got, eager = call(*x), path_attention(*x).square()
        assert torch.equal(got, eager)
        grads = [torch.autograd.grad(y.sum(), x) for y in (got, eager)]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert counter.frame_count <= 2


def test_compiled_equals_eager_over_fifty_packings():
    call, counter = compiled(
        lambda p, *x: path_attention(*x, cu_seqlens=p) + p.position_ids().sum()
    )
    for n in range(50):
        packing = Packing.from_lengths([3 + n, *range(n % 7), 70])
        x = leaves(make_inputs(packing.total, size=(4, 4), dtype=torch.float32))
        eager = path_attention(*x, cu_seqlens=packing) + packing.position_ids().sum()
        assert torch.equal(call(packing, *x), eager)
    assert counter.frame_count <= 3


@pytest.mark.parametrize("gate", [True, False])
def test_compiled_under_autocast(gate):
    def call(*x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return path_attention(*x, scale=1.0001)

    x = leaves(make_inputs(100, gate=gate, dtype=torch.float32))
    function, _ = compiled(call)
    assert torch.equal(function(*x), call(*x))


def test_compiled_for_each_scale():
    call, _ = compiled(lambda scale, *x: path_attention(*x, scale=scale))
    x = make_inputs(50)
    for scale in (1.0, 1.0001, 1.0, 0.5):
        assert torch.equal(call(scale, *x), path_attention(*x, scale=scale))


@pytest.mark.slow
def test_compiled_by_the_default_backend():
    torch._dynamo.reset()
    x = leaves(make_inputs(100, dtype=torch.float32))
    call = torch.compile(lambda *x: path_attention(*x).square(), fullgraph=True)
    got, eager = call(*x), path_attention(*x).square()
    grads = [torch.autograd.grad(y.sum(), x) for y in (got, eager)]
    torch.testing.assert_close(got, eager, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)
