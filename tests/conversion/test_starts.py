"""Each start rule does what it states."""

from __future__ import annotations

import math

import pytest
import torch
from families import make_teacher

from path_attention.conversion.starts import (
    START_RULES,
    fit_fall,
    fit_strength,
    measure_decay,
    start_encoding,
)
from path_attention.conversion.teacher import as_teacher, copy_model, student_config

CONTEXT = 512


@pytest.fixture(scope="module")
def teacher():
    return as_teacher(make_teacher("llama")).model


def make_student(teacher, to: str = "path_fox", **fields):
    return copy_model(teacher, student_config(teacher.config, to, **fields))


def encodings(model, x):
    """β `[layers, T, H]` and log-gates `[layers, T, HQ]` of inputs x `[1, T, C]`."""
    layers = [layer.attention for layer in model.model.layers]
    return (
        torch.stack([a.transport._strengths(x)[0] for a in layers]),
        torch.stack([a.decay(x, None)[0] for a in layers]),
    )


@pytest.mark.parametrize("rule", START_RULES)
def test_strengths_and_gates_start_where_the_rule_says(teacher, rule) -> None:
    student = make_student(teacher, keep_rope=rule == "exchange")
    tokens = torch.randint(0, 61, (1, 64))
    start_encoding(student, rule, context=CONTEXT, teacher=teacher, tokens=tokens)
    beta, gates = encodings(student, torch.randn(1, 50, 24))
    if rule == "one":
        assert abs(beta.mean() - 1) < 0.1 and beta.std() > 0
        assert (gates.exp().median() - 0.5).abs() < 0.05 and gates.std() > 0
        return
    for x in (beta, gates):  # the same for all tokens; a vector's last few round differently
        torch.testing.assert_close(x, x[:, :1].expand_as(x), rtol=1e-6, atol=0)
    if rule == "rope_decay":
        for layer, decay in enumerate(measure_decay(teacher, tokens)):
            for head in range(2):
                kept = decay.kept[3 * head : 3 * head + 3].mean(0)
                expected = fit_strength(decay.distances, kept, 4)
                torch.testing.assert_close(
                    beta[layer, 0, head].double(), expected, rtol=1e-4, atol=0
                )
            falls = torch.stack([fit_fall(decay.distances, s) for s in decay.scores])
            expected = -falls.clamp(min=1 / (8 * CONTEXT))
            torch.testing.assert_close(gates[layer, 0].double(), expected, rtol=1e-3, atol=0)
        assert beta[:, 0].unique().numel() > 1
    else:
        torch.testing.assert_close(beta, torch.full_like(beta, 4 / (2 * CONTEXT)))
        torch.testing.assert_close(gates.exp(), torch.full_like(gates, 1 - 1 / CONTEXT))


def test_a_query_keeps_what_near_zero_says_over_random_directions() -> None:
    """Its length falls by e^(−1/2) over the context; mean of 64 queries, by simulation."""
    size, context = 16, 256
    beta = size / (2 * context)
    q = torch.randn(64, size, dtype=torch.float64)
    q = q / q.norm(dim=1, keepdim=True)
    for _ in range(context):
        w = torch.nn.functional.normalize(torch.randn(64, size, dtype=torch.float64), dim=1)
        q = q - beta * (q * w).sum(1, keepdim=True) * w
    assert abs(q.norm(dim=1).mean() - math.exp(-0.5)) < 0.03


def test_the_fits_find_what_they_were_made_from() -> None:
    distances = torch.tensor([1, 2, 5, 10, 40, 100])
    for beta in (0.003, 0.1, 0.9):
        found = fit_strength(distances, torch.exp(-beta * distances / 64), 64)
        assert abs(found / beta - 1) < 0.02
    assert fit_fall(distances, 3 - 0.02 * distances) == pytest.approx(0.02, rel=1e-5)


def test_the_measured_decay_is_that_of_each_pair_of_tokens(teacher) -> None:
    """Written out pair by pair for one layer and head, from the layer's input."""
    tokens = torch.randint(0, 61, (1, 24))
    decay = measure_decay(teacher, tokens)[1]
    layer = teacher.model.layers[1].attention
    inputs = []
    hook = layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    teacher(tokens)
    hook.remove()
    x, head, n = inputs[0][0].double(), 4, 3
    distance = int(decay.distances[n])
    q = x @ layer.q_proj.weight[4 * head : 4 * head + 4].T.double()
    k = x @ layer.k_proj.weight[4:8].T.double()  # heads 3, 4, 5 share the second
    above = below = total = 0.0
    q, k = q.detach(), k.detach()
    frequencies = teacher.config.rope_frequencies
    for i in range(distance, 24):
        j = i - distance
        plain, turned = q[i] @ k[j], 0.0
        for pair, f in enumerate(frequencies):
            a, b = complex(q[i, pair], q[i, pair + 2]), complex(k[j, pair], k[j, pair + 2])
            turn = complex(math.cos(f * distance), math.sin(f * distance))
            turned += (a * turn * b.conjugate()).real
        above, below, total = above + plain * turned, below + plain**2, total + turned
    assert decay.kept[head, n] == pytest.approx(float(above / below), rel=1e-4)
    assert decay.scores[head, n] == pytest.approx(total / (24 - distance) / 2, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("rank", [None, 8, 40])
def test_directions_from_keys(teacher, rank) -> None:
    """With full rank w is silu(k) / ‖silu(k)‖; with less, its projection's best approximation."""
    student = make_student(teacher, "path", direction_rank=rank)
    start_encoding(student, "near_zero", context=CONTEXT, directions="keys")
    x = torch.randn(1, 9, 24)
    attention = student.model.layers[0].attention
    got = attention.transport.w_proj(x)
    keys = attention.k_proj.weight.detach().double()
    if rank == 8:
        left, values, right = torch.linalg.svd(keys)
        values[rank:] = 0
        keys = (left * values) @ right[:8]
    torch.testing.assert_close(got, (x.double() @ keys.T).float(), rtol=1e-4, atol=1e-4)
    taps = attention.transport.w_conv
    assert (taps[:, :-1] == 0).all() and (taps[:, -1] == 1).all()


def test_near_zero_is_nearly_the_teacher_without_rope(teacher) -> None:
    tokens = torch.randint(0, 61, (1, 40))
    student, nope = make_student(teacher, "path"), make_student(teacher, "fox")
    start_encoding(student, "near_zero", context=10**5)
    for layer in nope.model.layers:
        torch.nn.init.constant_(layer.attention.decay.forget_proj.bias, 40.0)
        torch.nn.init.zeros_(layer.attention.decay.forget_proj.weight)
    a, b = student(tokens).logits, nope(tokens).logits
    assert (a - b).norm() < 1e-2 * b.norm()


def test_bad_arguments_are_named(teacher) -> None:
    student = make_student(teacher, "path")
    with pytest.raises(ValueError, match="^start: expected one of"):
        start_encoding(student, "zero", context=8)
    with pytest.raises(ValueError, match="^teacher, tokens: expected both"):
        start_encoding(student, "rope_decay", context=8, teacher=teacher)
    with pytest.raises(ValueError, match=r"^tokens: expected \[1, T\]"):
        measure_decay(teacher, torch.zeros(2, 9, dtype=torch.long))
    two = make_student(teacher, "path", householders_per_token=2)
    with pytest.raises(ValueError, match="^directions: expected 'random' with several"):
        start_encoding(two, "near_zero", context=8, directions="keys")
