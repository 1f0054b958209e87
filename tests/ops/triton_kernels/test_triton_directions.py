"""The fused directions against the PyTorch version in float64, gradients included.

On a GPU, or through Triton's interpreter with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from path_attention.ops.directions import householder_directions
from path_attention.ops.packing import Packing

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="needs an NVIDIA GPU or TRITON_INTERPRET=1",
)
FLOAT32_ROUNDING = {"rtol": 2e-5, "atol": 2e-6}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype).requires_grad_()


def assert_equal_to_float64(
    x: Tensor,
    weight: Tensor | None,
    heads: int,
    state: Tensor | None = None,
    packing: Packing | None = None,
    scale: float = 1.0,
) -> None:
    """Outputs and every gradient, to float32 rounding or, where one is stored in less, to that."""

    def run(implementation: str, wide: bool):
        inputs = [x, weight, state]
        if wide:
            inputs = [None if y is None else y.detach().double().requires_grad_() for y in inputs]
        out = householder_directions(
            inputs[0],
            inputs[1],
            heads,
            state=inputs[2],
            packing=packing,
            implementation=implementation,
        )
        grad_out = torch.linspace(-1, 2, out.numel()).cos().view(out.shape).to(out) * scale
        leaves = [y for y in inputs if y is not None]
        return out, leaves, torch.autograd.grad(out, leaves, grad_out)

    got, leaves, grads = run("triton", wide=False)
    expected, _, expected_grads = run("torch", wide=True)
    assert got.dtype == torch.float32 and got.is_contiguous()
    torch.testing.assert_close(got.double(), expected, **FLOAT32_ROUNDING)
    for leaf, grad, exact in zip(leaves, grads, expected_grads, strict=True):
        assert grad.dtype == leaf.dtype and grad.shape == leaf.shape
        rounding = torch.finfo(leaf.dtype).eps
        size = exact.abs().max().item()
        torch.testing.assert_close(grad.double(), exact, rtol=max(2e-5, rounding), atol=2e-6 * size)


@pytest.mark.parametrize("width", [None, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("T", [1, 2, 8, 19])
def test_every_width(width: int | None, T: int) -> None:
    weight = None if width is None else random(2 * 16, width)
    assert_equal_to_float64(random(2, T, 2 * 16), weight, 2)


@pytest.mark.parametrize(("heads", "D"), [(3, 24), (1, 2), (5, 64), (2, 256), (40, 16), (3, 100)])
def test_every_shape(heads: int, D: int) -> None:
    assert_equal_to_float64(random(1, 11, heads * D), random(heads * D, 3), heads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, None])
def test_16_bit_inputs(dtype: torch.dtype, weight_dtype: torch.dtype | None) -> None:
    x = random(2, 13, 3 * 16, dtype=dtype)
    state = random(2, 2, 3 * 16, dtype=dtype)
    assert_equal_to_float64(x, random(3 * 16, 3, dtype=weight_dtype or dtype), 3, state)


@pytest.mark.parametrize("T", [1, 2, 3, 9, 17])
@pytest.mark.parametrize("width", [2, 3, 7])
def test_state_with_its_gradient(T: int, width: int) -> None:
    x, state = random(2, T, 2 * 8), random(2, width - 1, 2 * 8)
    assert_equal_to_float64(x, random(2 * 8, width), 2, state)


def test_decoding_in_chunks_equals_the_whole() -> None:
    x, weight = random(2, 13, 2 * 8).detach(), random(2 * 8, 3).detach()
    state, parts = None, []
    for part in x.split([5, 1, 1, 6], 1):
        w = householder_directions(part, weight, 2, state=state, implementation="triton")
        parts.append(w)
        past = part if state is None else torch.cat([state, part], 1)
        state = torch.nn.functional.pad(past, (0, 0, 2, 0))[:, -2:]
    whole = householder_directions(x, weight, 2, implementation="triton")
    assert torch.equal(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("width", [None, 1, 3, 4])
@pytest.mark.parametrize("lengths", [[0, 1, 7, 0, 1, 1, 2, 9, 0], [21], [8, 8, 5], [1] * 10])
def test_packed_documents(width: int | None, lengths: list[int]) -> None:
    packing = Packing.from_lengths(lengths, DEVICE)
    weight = None if width is None else random(2 * 8, width)
    assert_equal_to_float64(random(1, sum(lengths), 2 * 8), weight, 2, packing=packing)


def test_nothing_leaks_between_documents() -> None:
    """NaN in one document leaves the others' directions and gradients as they are."""
    x, weight = random(1, 24, 8), random(8, 4)
    clean = x.detach().clone()
    with torch.no_grad():
        x[:, 7:15] = torch.nan
    packing = Packing.from_lengths([7, 8, 9], DEVICE)
    keep = [*range(7), *range(15, 24)]
    out = householder_directions(x, weight, 1, packing=packing, implementation="triton")
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    clean.requires_grad_()
    expected = householder_directions(clean, weight, 1, packing=packing, implementation="triton")
    (expected_grad,) = torch.autograd.grad(expected, clean, torch.ones_like(out))
    assert torch.equal(out[:, keep], expected[:, keep])
    assert torch.equal(grad[:, keep], expected_grad[:, keep])
    assert out[:, 7:15].isnan().all()


@pytest.mark.parametrize("part", ["every other token", "columns", "tokens first", "last strided"])
def test_strides(part: str) -> None:
    x = {
        "every other token": random(2, 22, 32)[:, ::2],
        "columns": random(2, 11, 80)[:, :, 3:35],
        "tokens first": random(11, 2, 32).transpose(0, 1),
        "last strided": random(2, 32, 11).transpose(1, 2),
    }[part]
    assert not x.is_contiguous()
    weight, state = random(3, 32).T, random(2, 2, 64)[:, :, ::2]
    assert_equal_to_float64(x, weight, 2, state)


def test_gradient_with_strides() -> None:
    x, weight = random(1, 9, 2 * 8), random(2 * 8, 3)
    grad_out = torch.randn(1, 2, 8, 9).to(DEVICE).permute(0, 3, 1, 2)
    out = householder_directions(x, weight, 2, implementation="triton")
    got = torch.autograd.grad(out, (x, weight), grad_out, retain_graph=True)
    expected = torch.autograd.grad(out, (x, weight), grad_out.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_norms_of_zero_and_below_eps() -> None:
    x = random(1, 9, 2 * 8)
    with torch.no_grad():
        x[:, 2:6] = 0
        x[:, 6:] *= 1e-9
    # Below eps gradients reach 1/eps, where nothing that happens above it may hide.
    assert_equal_to_float64(x, random(2 * 8, 2), 2, scale=1e-6)
    assert_equal_to_float64(x, None, 2, scale=1e-6)
    w = householder_directions(x, None, 2, implementation="triton")
    assert (w[:, 2:6] == 0).all()


def test_unit_norm() -> None:
    x = random(1, 50, 3 * 24, dtype=torch.bfloat16)
    w = householder_directions(x, random(3 * 24, 3), 3, implementation="triton")
    assert (w.double().norm(dim=-1) - 1).abs().max() < 3e-7


def test_nan_shows() -> None:
    x = random(1, 4, 2 * 8).detach()
    x[0, 1, 3] = torch.nan
    w = householder_directions(x, None, 2, implementation="triton")
    assert w[0, 1, 0].isnan().all()
    assert w.isnan().sum() == 8


def test_many_walks_and_memory_that_was_not_written(poisoned_memory) -> None:
    assert_equal_to_float64(random(3, 37, 2 * 8), random(2 * 8, 3), 2)


@pytest.mark.parametrize("shape", [(0, 3, 16), (2, 0, 16)])
def test_no_tokens(shape: tuple[int, ...]) -> None:
    x, weight = random(*shape), random(16, 3)
    state = random(shape[0], 2, 16)
    out = householder_directions(x, weight, 2, state=state, implementation="triton")
    assert out.shape == (*shape[:2], 2, 8)
    grads = torch.autograd.grad(out.sum(), (x, weight, state))
    assert all((g == 0).all() for g in grads) and grads[1].shape == (16, 3)


def test_gradients_are_bitwise_the_same() -> None:
    x, weight = random(2, 40, 2 * 8), random(2 * 8, 3)
    runs = []
    for _ in range(2):
        out = householder_directions(x, weight, 2, implementation="triton")
        runs.append(torch.autograd.grad(out, (x, weight), torch.ones_like(out)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("with_state", [False, True])
def test_operator_check(with_state: bool) -> None:
    """Schema, fake and autograd as torch.library wants them."""
    from path_attention.ops.triton.directions import _forward

    x, weight = random(1, 5, 2 * 8), random(2 * 8, 3)
    state = random(1, 2, 2 * 8) if with_state else None
    positions = None if with_state else torch.tensor([0, 1, 0, 1, 2], device=DEVICE)
    torch.library.opcheck(_forward, (x, weight, state, positions, 2, 1e-6))


def test_compiles_without_a_break() -> None:
    x, weight = random(1, 9, 2 * 8), random(2 * 8, 3)
    packing = Packing.from_lengths([4, 5], DEVICE)

    def step(x: Tensor, weight: Tensor) -> Tensor:
        return householder_directions(x, weight, 2, packing=packing, implementation="triton").cos()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(x, weight).sum(), (x, weight))
    expected = torch.autograd.grad(step(x, weight).sum(), (x, weight))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
