"""householder_directions against a loop over tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from path_attention.ops.directions import householder_directions
from path_attention.ops.packing import Packing


def literal(x: Tensor, weight: Tensor | None, heads: int, borders: list[int], eps: float) -> Tensor:
    """One token, one tap and one head at a time."""
    rows = []
    for b in range(x.shape[0]):
        tokens = []
        for t in range(x.shape[1]):
            start = max(border for border in borders if border <= t)
            y = x[b, t] if weight is None else torch.zeros_like(x[b, t])
            for back in range(0 if weight is None else weight.shape[1]):
                if weight is not None and t - back >= start:
                    y = y + weight[:, weight.shape[1] - 1 - back] * x[b, t - back]
            y = y * torch.sigmoid(y)
            per_head = []
            for part in y.chunk(heads):
                norm = (part * part).sum().sqrt()
                per_head.append(part / torch.clamp(norm, min=eps))
            tokens.append(torch.stack(per_head))
        rows.append(torch.stack(tokens))
    return torch.stack(rows)


@pytest.mark.parametrize("width", [None, 1, 2, 3, 5])
@pytest.mark.parametrize("packed", [False, True])
def test_equals_the_loop_with_gradients(width: int | None, packed: bool) -> None:
    torch.manual_seed(0)
    batch, heads = (1, 2) if packed else (2, 3)
    lengths = [4, 0, 1, 2, 5]
    packing = Packing.from_lengths(lengths) if packed else None
    borders = [0, 4, 4, 5, 7] if packed else [0]
    x = torch.randn(batch, 12, heads * 4, dtype=torch.float64, requires_grad=True)
    weight = None
    if width is not None:
        weight = torch.randn(heads * 4, width, dtype=torch.float64, requires_grad=True)
    inputs = [x] if weight is None else [x, weight]
    expected = literal(x, weight, heads, borders, 1e-6)
    got = householder_directions(x, weight, heads, packing=packing)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(got)
    for a, b in zip(
        torch.autograd.grad(got, inputs, grad),
        torch.autograd.grad(expected, inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("chunks", [[1] * 9, [2, 1, 6], [5, 4], [9]])
def test_chunks_equal_the_whole(chunks: list[int]) -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    weight = torch.randn(8, 3, dtype=torch.float64)
    state, parts = None, []
    for part in x.split(chunks, 1):
        parts.append(householder_directions(part, weight, 2, state=state))
        seen = x[:, : sum(y.shape[1] for y in parts)]
        state = torch.cat([torch.zeros(2, 2, 8, dtype=x.dtype), seen], 1)[:, -2:]
    torch.testing.assert_close(torch.cat(parts, 1), householder_directions(x, weight, 2))


def test_norm_is_one_and_eps_stays_outside() -> None:
    x = torch.randn(1, 50, 8, dtype=torch.bfloat16) * 1e-3
    w = householder_directions(x, None, 1)
    assert w.dtype == torch.float32
    assert (w.double().norm(dim=-1) - 1).abs().max() < 1e-6
    below = householder_directions(torch.full((1, 1, 4), 1e-8), None, 1)
    torch.testing.assert_close(below, torch.full((1, 1, 1, 4), 0.5e-8 / 1e-6))
    zero = torch.zeros(1, 1, 4, requires_grad=True)
    householder_directions(zero, None, 1).sum().backward()
    assert zero.grad is not None and zero.grad.isfinite().all()


def test_autocast_changes_nothing() -> None:
    x, weight = torch.randn(1, 7, 8), torch.randn(8, 3)
    with torch.autocast("cpu", torch.bfloat16):
        inside = householder_directions(x, weight, 2)
    assert torch.equal(inside, householder_directions(x, weight, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "cuda"}, "expected 'torch', 'triton' or None, got 'cuda'"),
        ({"x": torch.zeros(1, 5, 8, dtype=torch.float64)}, "float32, got torch.float64 with"),
        ({"x": torch.zeros(1, 1, 514), "weight": None}, "head size of at most 256, got 257 with"),
        ({"weight": torch.zeros(8, 9)}, "width at most 8, got 9 with 'triton'"),
        ({"x": torch.zeros(1, 5, 8, device="meta"), "weight": None}, "got tensors on meta with"),
    ],
)
def test_an_implementation_that_cannot_run_is_refused(change: dict, message: str) -> None:
    pytest.importorskip("triton")
    arguments = {"x": torch.zeros(1, 5, 8), "weight": torch.zeros(8, 3), "heads": 2, **change}
    with pytest.raises(ValueError, match=f"implementation: .*{message}"):
        householder_directions(**{"implementation": "triton", **arguments})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"x": torch.zeros(2, 4)}, "x: expected"),
        ({"x": torch.zeros(1, 5, 8, dtype=torch.int64)}, "x: expected"),
        ({"heads": 3}, "heads: expected"),
        ({"heads": 0}, "heads: expected"),
        ({"weight": torch.zeros(7, 3)}, "weight: expected"),
        ({"weight": torch.zeros(8, 0)}, "weight: expected"),
        ({"weight": torch.zeros(8, 3, device="meta")}, "weight: expected on x's device cpu"),
        ({"state": torch.zeros(1, 3, 8)}, "state: expected"),
        ({"weight": None, "state": torch.zeros(1, 2, 8)}, "state: expected None"),
        ({"packing": Packing.from_lengths([4])}, "packing: expected"),
        ({"x": torch.zeros(2, 5, 8), "packing": Packing.from_lengths([5])}, "packing: expected"),
        (
            {"state": torch.zeros(1, 2, 8), "packing": Packing.from_lengths([5])},
            "state: expected None with packed",
        ),
    ],
)
def test_bad_input_is_refused(change: dict, named: str) -> None:
    arguments = {"x": torch.zeros(1, 5, 8), "weight": torch.zeros(8, 3), "heads": 2, **change}
    with pytest.raises(ValueError, match=named):
        householder_directions(**arguments)
