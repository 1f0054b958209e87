"""Accumulated rotations: exact sums of angles, draws that depend on their key alone."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from path_attention import Packing
from path_attention.ops.rotation import Rotation, accumulate_angles, random_angles, running_sum


def wrapped_error(got: Tensor, exact: Tensor) -> float:
    """The largest angle between two, whatever their multiples of 2π."""
    difference = got.double() - exact.double()
    return torch.remainder(difference + math.pi, 2 * math.pi).sub(math.pi).abs().max().item()


def test_a_million_tokens_are_as_exact_as_one() -> None:
    """float32 angles up to two turns: Θ errs by one rounding of π, whatever the length."""
    angles = (torch.rand(1, 2**20, 1, 1) - 0.5) * 8 * math.pi
    total, _ = accumulate_angles(angles)
    assert total.dtype == torch.float32 and total.abs().max() <= math.pi
    # The literal sum in whole units of 2^-80 turns, by Python's integers.
    literal, exact = 0, torch.empty(2**20, dtype=torch.float64)
    for t, angle in enumerate(angles.double().flatten().tolist()):
        literal = (literal + round(angle / (2 * math.pi) * 2**80)) % 2**80
        exact[t] = literal / 2**80 * 2 * math.pi
    # A rounding of π is 2^-23; a token's turn is rounded to 2^-53 turns twice.
    bound = 2.0**-23 + 2**20 * 2 * math.pi * 2**-51
    assert wrapped_error(total.flatten(), exact) <= bound


def test_chunks_and_documents_give_the_same_bits() -> None:
    angles = torch.randn(2, 500, 3, 4)
    whole, after = accumulate_angles(angles)
    parts, state = [], None
    for part in angles.split([1, 70, 0, 128, 301], 1):
        total, units = accumulate_angles(part, state=state)
        parts.append(total)
        state = units[:, -1] if part.shape[1] else state
    assert torch.equal(torch.cat(parts, 1), whole)
    assert state is not None and torch.equal(state, after[:, -1])
    lengths = [3, 0, 200, 1, 296, 0]
    packed, _ = accumulate_angles(angles[:1], packing=Packing.from_lengths(lengths))
    apart = [accumulate_angles(part)[0] for part in angles[:1].split(lengths, 1)]
    assert torch.equal(packed, torch.cat(apart, 1))


def test_padding_turns_nothing() -> None:
    angles = torch.randn(2, 6, 1, 2)
    valid = torch.arange(6) < torch.tensor([[4], [0]])
    total, state = accumulate_angles(angles, valid=valid, state=torch.full((2, 1, 2), 2**50))
    alone, after = accumulate_angles(angles[:1, :4], state=torch.full((1, 1, 2), 2**50))
    assert torch.equal(total[:1, :4], alone) and torch.equal(state[:1, -1], after[:, -1])
    assert (state[1] == 2**50).all()


@pytest.mark.parametrize("lengths", [None, [0, 5, 66, 9]])
def test_gradients_are_those_of_sums(lengths: list[int] | None) -> None:
    angles = torch.randn(1, 80, 2, 3, dtype=torch.float64, requires_grad=True)
    packing = None if lengths is None else Packing.from_lengths(lengths)
    total, _ = accumulate_angles(angles, packing=packing)
    sums = [part.cumsum(1) for part in angles.split(lengths or [80], 1)]
    assert wrapped_error(total.detach(), torch.cat(sums, 1).detach()) < 1e-12
    grad = torch.randn_like(total)
    got, exact = (torch.autograd.grad(y, angles, grad)[0] for y in (total, torch.cat(sums, 1)))
    torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)
    small = angles.detach()[:, :5, :1].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: accumulate_angles(x)[0].sin(), small)


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 4097])
def test_running_sums(length: int) -> None:
    integers = torch.randint(-9, 9, (2, length, 3))
    assert torch.equal(running_sum(integers), integers.cumsum(1))
    floats = torch.randn(2, length, 3, dtype=torch.float64)
    torch.testing.assert_close(running_sum(floats), floats.cumsum(1), rtol=1e-11, atol=1e-11)


def test_rotation_turns_pairs_and_groups_of_heads_back_and_forth() -> None:
    x = torch.randn(2, 3, 6, 8, dtype=torch.float64)
    angles = torch.randn(2, 3, 2, 4, dtype=torch.float64)
    rotation = Rotation.by(angles)
    turned = torch.complex(x[..., :4], x[..., 4:])
    turned = turned * torch.polar(torch.ones(()).double(), angles.repeat_interleave(3, 2))
    expected = torch.cat([turned.real, turned.imag], -1)
    torch.testing.assert_close(rotation.turn(x), expected)
    torch.testing.assert_close(rotation.turn_back(expected), x)
    assert rotation.turn(x.bfloat16()).dtype == torch.bfloat16


def mixed(x: int) -> int:
    x ^= x >> 16
    x = x * 0x21F0AAAD % 2**32
    x ^= x >> 15
    x = x * 0x735A2D97 % 2**32
    return x ^ (x >> 15)


def test_draws_are_a_hash_of_their_key() -> None:
    """Against Python's integers, and at keys beyond 32 bits without overflow."""
    keys = torch.tensor([[0, 5, 2**31, 2**40 + 7]])
    got = random_angles(keys, 2, 3, seed=11, bound=0.5, dtype=torch.float64)
    for n, key in enumerate(keys[0].tolist()):
        row = mixed(mixed(key % 2**32) ^ mixed(11 + 0x51))
        for column in range(6):
            drawn = mixed(mixed((row + (column + 1) * 0x9E3779B1) % 2**32) ^ mixed(column + 1))
            angle = 0.5 * ((drawn + 0.5) / 2**31 - 1)
            assert got[0, n, column // 3, column % 3].item() == pytest.approx(angle, abs=1e-15)
    part = random_angles(keys[:, 1:3], 2, 3, seed=11, bound=0.5, dtype=torch.float64)
    assert torch.equal(part, got[:, 1:3])


def test_draws_are_uniform_and_apart() -> None:
    """Moments to 5 standard errors, for each pair, between neighbours, pairs and seeds."""
    n, bound = 20000, 0.8
    keys = torch.arange(n)[None]
    draws = [random_angles(keys, 2, 4, seed=s, bound=bound, dtype=torch.float64) for s in (0, 1)]
    x = draws[0][0].flatten(1)  # [n, 8]
    assert x.abs().max() < bound
    error = 5 * bound / (3 * n) ** 0.5
    assert x.mean(0).abs().max() < error
    assert abs(x.cos().mean().item() - math.sin(bound) / bound) < error
    unit = x / (bound / 3**0.5)
    for other in (unit.roll(1, 0), unit.roll(1, 1), draws[1][0].flatten(1) / (bound / 3**0.5)):
        assert (unit * other).mean(0).abs().max() < 5 / n**0.5
    assert unit.square().mean(0).sub(1).abs().max() < 5 / n**0.5
    counts = torch.histc(x.flatten(), 64, -bound, bound)
    expected = x.numel() / 64
    assert (counts - expected).abs().max() < 5 * expected**0.5


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"angles": torch.zeros(1, 2, 3)}, "angles"),
        ({"angles": torch.zeros(1, 4, 1, 2, dtype=torch.bfloat16)}, "angles"),
        ({"state": torch.zeros(1, 1, 2)}, "state"),
        ({"state": torch.zeros(2, 1, 2, dtype=torch.int64)}, "state"),
        ({"packing": Packing.from_lengths([3])}, "packing"),
        ({"packing": Packing.from_lengths([4]), "state": torch.zeros(1, 1, 2).long()}, "state"),
        ({"valid": torch.ones(1, 3)}, "valid"),
    ],
)
def test_bad_input_is_refused(change: dict, named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}: expected"):
        accumulate_angles(**{"angles": torch.zeros(1, 4, 1, 2), **change})


def test_rows_of_draws_differ() -> None:
    """No two of many keys share their angles."""
    rows = random_angles(torch.arange(1000)[None], 1, 4, seed=3, bound=1.0, dtype=torch.float64)
    assert all(a != b for a, b in pairwise(sorted(rows[0, :, 0].tolist())))
