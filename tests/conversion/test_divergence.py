"""The divergence and its gradients against the definition, however it is cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from path_attention.conversion.divergence import divergence

N, V, D, E = 13, 29, 6, 5


def literal(x, head, y, teacher_head, temperature: float, top_k: int | None) -> Tensor:
    """Token by token, outcome by outcome."""
    total = x.new_zeros(())
    for n in range(len(x)):
        q = torch.softmax(x[n] @ head.T / temperature, -1)
        p = torch.softmax(y[n] @ teacher_head.T / temperature, -1)
        outcomes = [[v] for v in range(len(p))]
        if top_k is not None:
            order = p.argsort(descending=True).tolist()
            outcomes = [[v] for v in order[:top_k]] + [order[top_k:]]
        for outcome in outcomes:
            mass = p[outcome].sum()
            total = total + mass * (mass.log() - q[outcome].sum().log())
    return temperature**2 * total


def inputs(dtype=torch.float64) -> tuple[Tensor, ...]:
    x, head = torch.randn(N, D, dtype=dtype), torch.randn(V, D, dtype=dtype)
    y, teacher_head = torch.randn(N, E, dtype=dtype), torch.randn(V, E, dtype=dtype)
    return x.requires_grad_(), head.requires_grad_(), y, teacher_head


@pytest.mark.parametrize("chunk", [1, 3 * V, 1 << 20])
@pytest.mark.parametrize("top_k", [None, 1, 7, V - 1])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_divergence_is_its_definition(temperature, top_k, chunk, poisoned_memory) -> None:
    x, head, y, teacher_head = inputs()
    options = {"temperature": temperature, "top_k": top_k}
    got = divergence(x, head, y, teacher_head, **options, chunk=chunk)
    exact = literal(x, head, y, teacher_head, **options)
    assert exact > 1
    # summed in float32
    torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=0)
    for a, b in zip(
        *(torch.autograd.grad(z, (x, head)) for z in (3 * got, 3 * exact)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("top_k", [None, 3])
def test_a_teacher_that_is_certain_gives_no_nan(top_k) -> None:
    x, head, y, teacher_head = inputs(torch.float32)
    loss = divergence(x, head, 1e4 * y, teacher_head, top_k=top_k)
    loss.backward()
    assert loss.isfinite() and x.grad.isfinite().all() and head.grad.isfinite().all()


@pytest.mark.parametrize("top_k", [None, 5])
def test_a_student_that_is_the_teacher_has_none(top_k) -> None:
    x, head, *_ = inputs()
    loss = divergence(x, head, x, head, top_k=top_k)
    assert abs(loss) < 1e-6
    loss.backward()
    assert x.grad.abs().max() < 1e-12


def test_bfloat16_hidden_states_under_autocast() -> None:
    x, head, y, teacher_head = inputs(torch.float32)
    exact = divergence(x, head, y, teacher_head)
    x16 = x.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        got = divergence(x16, head, y.bfloat16(), teacher_head)
    got.backward()
    assert got.dtype == torch.float32 and head.grad.dtype == torch.float32
    assert x16.grad.dtype == torch.bfloat16
    assert abs(got - exact) < 0.05 * exact


def test_only_what_is_trained_has_a_gradient() -> None:
    x, head, y, teacher_head = inputs()
    divergence(x, head.detach(), y, teacher_head).backward()
    assert x.grad is not None and head.grad is None
    with torch.no_grad():
        assert not divergence(x, head, y, teacher_head).requires_grad


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 0.0}, "temperature: expected a number above 0"),
        ({"top_k": 0}, "top_k: expected 1 to 28"),
        ({"top_k": V}, "top_k: expected 1 to 28"),
    ],
)
def test_bad_arguments_are_named(fields, message) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        divergence(*inputs(), **fields)
    x, head, y, teacher_head = inputs()
    with pytest.raises(ValueError, match="^teacher_head: expected 29 tokens, got 20"):
        divergence(x, head, y, teacher_head[:20])
    with pytest.raises(ValueError, match="^teacher: expected 13 tokens, got 4"):
        divergence(x, head, y[:4], teacher_head)
