"""triton under autograd's, torch.compile's and checkpointing's demands, through the interpreter."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from kernel_cases import FLOAT32, assert_close, encoded
from operator_cases import Inputs, Run, run
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from path_attention import Packing, path_attention

pytestmark = pytest.mark.usefixtures("interpreter", "poisoned_memory")
LENGTHS = [70, 0, 1, 64, 5]
T = sum(LENGTHS)
PACKINGS = [None, Packing.from_lengths(LENGTHS)]


def leaves(inputs: Inputs) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in inputs if x is not None]


def call(*x: Tensor, **options) -> Tensor:
    return path_attention(*x, implementation="triton", **options)


def spaced(x: Tensor) -> Tensor:
    """The same values, tokens and heads swapped in memory, rows further apart than needed."""
    wide = x.new_full((x.shape[0] + 1, x.shape[2], x.shape[1] + 3, *x.shape[3:]), torch.nan)
    view = wide[: x.shape[0], :, 1 : x.shape[1] + 1].transpose(1, 2)
    return view.copy_(x)


def last_strided(x: Tensor) -> Tensor:
    """The same values, the last dimension not the fastest."""
    return x.transpose(1, -1).contiguous().transpose(1, -1)


def unaligned(x: Tensor) -> Tensor:
    """The same values, one element behind an aligned address."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize("layout", [spaced, last_strided, unaligned])
@pytest.mark.parametrize("encoding", ["path_fox", "nope"])
def test_strides_do_not_matter(encoding, layout):
    inputs = encoded(encoding, T, B=2, heads=(4, 2))
    expected = run(inputs, "triton")
    names = [name for name, x in inputs._asdict().items() if x is not None]
    x = [layout(x).requires_grad_() for x in inputs if x is not None]
    assert layout is unaligned or not x[0].is_contiguous()
    strided = Inputs(**{**dict.fromkeys(Inputs._fields), **dict(zip(names, x, strict=True))})
    out, lse = path_attention(*strided, implementation="triton", return_lse=True)
    rng = torch.Generator().manual_seed(1)  # as in `run`
    above = [torch.randn(y.shape, dtype=torch.float64, generator=rng).float() for y in (out, lse)]
    grads = torch.autograd.grad((out, lse), x, [layout(y) for y in above])
    actual = Run(out, lse, dict(zip(names, grads, strict=True)))
    wide = {name: y.double() for name, y in expected.grads.items()}
    assert_close(actual, Run(expected.out.double(), expected.lse.double(), wide), 1e-6)


def test_expanded_inputs_and_output_gradient():
    inputs = encoded("path", T, heads=(2, 2))
    shared = inputs._replace(k=inputs.k[:, :, :1].expand_as(inputs.k))
    x, y = leaves(shared), [x.requires_grad_() for x in shared if x is not None]
    expanded = torch.autograd.grad(call(*y).sum(), y)
    whole = torch.autograd.grad(call(*x), x, torch.ones_like(inputs.v))
    assert all(torch.equal(a, b) for a, b in zip(expanded, whole, strict=True))


@pytest.mark.parametrize("which", [0, 1])
def test_gradient_of_one_result_alone(which):
    results = []
    for implementation, dtype in (("triton", torch.float32), ("definition", torch.float64)):
        x = leaves(encoded("path_fox", 90).to(dtype))
        both = path_attention(*x, implementation=implementation, return_lse=True)
        results.append(
            torch.autograd.grad(both[which].sum(), x, allow_unused=True, materialize_grads=True)
        )
    for got, exact in zip(*results, strict=True):
        assert (got - exact).norm() <= FLOAT32 * max(exact.norm().item(), 1.0)


@pytest.mark.parametrize("wanted", range(6))
def test_gradient_of_one_input_alone(wanted):
    x = leaves(encoded("path_fox", 70))
    expected = torch.autograd.grad(call(*x).sum(), x)[wanted]
    for n, tensor in enumerate(x):
        tensor.requires_grad_(n == wanted)
    (alone,) = torch.autograd.grad(call(*x).sum(), x[wanted])
    assert torch.equal(alone, expected)


def test_inputs_are_left_alone():
    x = leaves(encoded("path_fox", T))
    before = [y.detach().clone() for y in x]
    call(*x).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(x, before, strict=True))


def test_gradients_repeat():
    x = leaves(encoded("path_fox", 150, heads=(4, 2)))
    first = torch.autograd.grad(call(*x).square().sum(), x)
    for _ in range(3):
        again = torch.autograd.grad(call(*x).square().sum(), x)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_second_derivatives_are_refused():
    x = leaves(encoded("path", 20))
    (grad,) = torch.autograd.grad(call(*x).sum(), x[0], create_graph=True)
    with pytest.raises(RuntimeError, match="triton is differentiable once"):
        grad.sum().backward()


@pytest.mark.parametrize("encoding", ["path_fox", "nope"])
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("keep", [False, True])
def test_registered_as_torch_asks(keep, packing, encoding):
    from path_attention.ops.triton import operator  # noqa: F401, registers

    inputs = encoded(encoding, T)
    x = [None if y is None else y.requires_grad_() for y in inputs]
    lengths = None if packing is None else packing.host_lengths
    torch.library.opcheck(torch.ops.path_attention.triton.default, (*x, 0.5, lengths, keep))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_q_k_v_alone(dtype):
    x = [y for y in encoded("path_fox", 70) if y is not None]
    with torch.autocast("cpu", dtype=dtype):
        out = call(*x)
    assert out.dtype == dtype
    assert torch.equal(out, call(*(y.to(dtype) for y in x[:3]), *x[3:]))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("packing", PACKINGS)
def test_checkpointing_changes_nothing(packing, use_reentrant):
    x = leaves(encoded("path_fox", T))

    def layer(*tensors: Tensor) -> Tensor:
        return call(*tensors, cu_seqlens=packing).square()

    plain = torch.autograd.grad(layer(*x).sum(), x)
    out = checkpoint(layer, *x, use_reentrant=use_reentrant)
    assert isinstance(out, Tensor)
    out.sum().backward()
    assert all(torch.equal(a, y.grad) for a, y in zip(plain, x, strict=True))


def compiled(function) -> tuple:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter), counter


def test_compiled_equals_eager_over_many_lengths():
    function, counter = compiled(lambda *x: call(*x).square())
    for n in (1, 2, 40, 63, 64, 65, 66, 70, 100, 129):
        x = leaves(encoded("path_fox", n, heads=(1, 1)))
        got, eager = function(*x), call(*x).square()
        assert torch.equal(got, eager)
        grads = [torch.autograd.grad(y.sum(), x) for y in (got, eager)]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert counter.frame_count <= 3


def test_compiled_equals_eager_over_many_packings():
    function, counter = compiled(lambda p, *x: call(*x, cu_seqlens=p))
    for n in range(10):
        packing = Packing.from_lengths([3 + n, *range(n % 3), 70])
        x = leaves(encoded("path", packing.total, heads=(1, 1)))
        assert torch.equal(function(packing, *x), call(*x, cu_seqlens=packing))
    assert counter.frame_count <= 3


def test_compiled_for_each_scale():
    function, _ = compiled(lambda scale, *x: call(*x, scale=scale))
    x = leaves(encoded("nope", 30))
    for scale in (1.0, 1.0001, 1.0, 0.5):
        assert torch.equal(function(scale, *x), call(*x, scale=scale))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("encoding", ["path", "path_fox"])
def test_kept_blocks_are_the_ones_made_again(packing, encoding, monkeypatch):
    from path_attention.ops.triton import operator

    x = leaves(encoded(encoding, T, heads=(4, 2)))
    made, solve = [], operator.solve_blocks
    monkeypatch.setattr(
        operator, "solve_blocks", lambda *a, **k: made.append(k["backward"]) or solve(*a, **k)
    )
    grads = []
    for rows in (4 * T, 4 * T - 1):
        monkeypatch.setattr(operator, "_ROWS_AT_ONCE", rows)
        grads.append(torch.autograd.grad(call(*x, cu_seqlens=packing).sum(), x))
    assert made == [False, False, False, True, True]  # two parts
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_nothing_is_kept_without_gradients():
    from path_attention.ops.triton import operator

    x = leaves(encoded("path", T))
    assert operator._keeps(*x)
    with torch.no_grad():
        assert not operator._keeps(*x)
    assert not operator._keeps(*(y.detach() for y in x))
