"""Measurements against literal loops, and exact intervals against sums of binomials."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tasks import SMALL

from path_attention.tasks import measure as measure_module
from path_attention.tasks.engine import start_model
from path_attention.tasks.flip_flop import READ, WRITE, FlipFlop
from path_attention.tasks.group_words import GroupWords
from path_attention.tasks.intervals import at_most, error_interval
from path_attention.tasks.measure import Counts, is_solved, losses, measure
from path_attention.tasks.recipe import TaskRecipe
from path_attention.tasks.replicas import Replicas
from path_attention.tasks.task import IGNORED, TestSet, held_out_generator


def drawn(test: TestSet) -> list[tuple]:
    """All sequences of a test, drawn as `measure` draws them."""
    generator, rows = held_out_generator(test.seed, "cpu"), []
    while len(rows) < test.sequences:
        batch = test.task.sample(generator, 256)
        rows += list(zip(*batch, strict=True))
    return rows[: test.sequences]


def two_models(task) -> list:
    recipe = dataclasses.replace(SMALL, task=task)
    models = [start_model(dataclasses.replace(recipe, seed=seed)) for seed in (0, 1)]
    for model in models:
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.5)
    return models


@pytest.mark.parametrize("at_once", [50, 2**16])
def test_reads_are_counted_by_distance(at_once: int, monkeypatch) -> None:
    monkeypatch.setitem(measure_module._TOKENS_AT_ONCE, "cpu", at_once)
    task = FlipFlop(pairs=6, p_ignore=0.5)
    test = TestSet("some", task, 270, 5)
    models = two_models(task)
    wanted = []
    for model in models:
        errors, counted = [0] * len(task.levels), [0] * len(task.levels)
        for tokens, _, _ in drawn(test):
            named = model(input_ids=tokens[None], use_cache=False).logits[0].argmax(-1).tolist()
            tokens, write = tokens.tolist(), 0
            for n in range(6):
                write = n if tokens[2 * n] == WRITE else write
                if tokens[2 * n] == READ:
                    level = (n - write).bit_length() - 1
                    counted[level] += 1
                    errors[level] += named[2 * n] != tokens[2 * n + 1]
        wanted.append((errors, counted))
    found = measure(Replicas(models, "cpu"), (test,), None)
    assert [(c.errors, c.counted) for (c,) in found] == wanted
    assert sum(wanted[0][0]) != sum(wanted[1][0])
    rows = found[0][0].rows()
    assert [row["level"] for row in rows] == list(task.levels[: len(rows)])
    assert len(rows) < len(task.levels)


def test_a_word_is_right_up_to_its_first_wrong_prefix() -> None:
    task = GroupWords(group="S3", letters=4, test_letters=4)
    labels = torch.tensor([[IGNORED, 1, 2, 3, 4]] * 3)
    named = torch.tensor([[5, 1, 2, 3, 4], [5, 1, 0, 3, 4], [5, 1, 2, 3, 0]])
    batch = task.sample(torch.Generator().manual_seed(0), 3)._replace(labels=labels)
    scores = task.score(named, batch)
    assert scores.errors.long().tolist() == [[0, 0, 0, 0, 0], [0, 0, 1, 1, 1], [0, 0, 0, 0, 1]]
    assert scores.counted.tolist() == [[False] + [True] * 4] * 3
    assert scores.level[0].tolist() == [0, 0, 1, 2, 3]


def test_solved_looks_at_the_hardest_level_or_at_all() -> None:
    words = GroupWords()
    good = Counts("x", words.levels, [0] * 19 + [10], [100] * 20)
    assert is_solved(words, [good]) and good.share == 10 / 2000
    assert not is_solved(words, [good, good._replace(errors=[0] * 19 + [11])])
    flips = FlipFlop()
    none = Counts("x", flips.levels, [0] * 9, [10, 0, 5] + [0] * 6)
    assert is_solved(flips, [none]) and none.hardest_share == 0
    assert not is_solved(flips, [none._replace(errors=[1] + [0] * 8)])


def test_each_replica_has_the_mean_loss_of_its_own_targets() -> None:
    logits, labels = torch.randn(4, 5, 3), torch.randint(3, (4, 5))
    labels[0, 1:] = IGNORED
    labels[2:] = IGNORED
    log_p = logits.double().log_softmax(-1)
    own = [-log_p[n, t, labels[n, t]] for n in range(2) for t in range(5) if labels[n, t] >= 0]
    found = losses(logits, labels, 2, IGNORED)
    torch.testing.assert_close(found[0].double(), torch.stack(own).mean(), rtol=1e-6, atol=1e-6)
    assert found[1] == 0


def test_every_recipe_measures_the_same_sequences() -> None:
    """Whatever the number of replicas: comparisons are on the same words."""
    task = FlipFlop(pairs=6, p_ignore=0.5)
    test = TestSet("some", task, 300, 5)
    models = two_models(task)
    (one,) = measure(Replicas(models[:1], "cpu"), (test,), None)
    both = measure(Replicas(models, "cpu"), (test,), None)
    assert both[0] == one and both[1] != one


@given(n=st.integers(1, 60), data=st.data())
@settings(deadline=None, max_examples=60)
def test_the_binomial_tail_is_its_sum(n: int, data) -> None:
    k = data.draw(st.integers(0, n - 1))
    p = data.draw(st.floats(1e-6, 1 - 1e-6))
    wanted = math.fsum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))
    assert abs(at_most(k, n, p) - wanted) < 1e-11


@given(n=st.integers(2, 3000), data=st.data())
@settings(deadline=None, max_examples=40)
def test_the_interval_is_where_the_tails_are(n: int, data) -> None:
    k = data.draw(st.integers(1, n - 1))
    low, high = error_interval(k, n)
    assert low < k / n < high
    assert abs(1 - at_most(k - 1, n, low) - 0.025) < 1e-9
    assert abs(at_most(k, n, high) - 0.025) < 1e-9


def test_no_error_leaves_the_rule_of_three() -> None:
    for n in (1, 100, 3_000_000, 10**10):
        low, high = error_interval(0, n)
        assert low == 0 and (1 - high) ** n == pytest.approx(0.05, rel=1e-4)
        assert high <= 3 / n
    assert error_interval(7, 7) == (pytest.approx(0.05 ** (1 / 7)), 1.0)
    with pytest.raises(ValueError, match="errors: expected 0 to counted = 3"):
        error_interval(4, 3)
    with pytest.raises(ValueError, match="counted = 0 ≥ 1"):
        error_interval(0, 0)


def test_a_recipe_without_its_task_is_none() -> None:
    with pytest.raises(ValueError, match="curriculum_steps: expected 0 with flip_flop"):
        TaskRecipe(task=FlipFlop(), curriculum_steps=10)
