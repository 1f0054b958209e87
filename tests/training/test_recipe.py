"""Recipes: contradictions and unknown names are refused; the schedule's course."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from path_attention.training.corpus import CorpusRecipe
from path_attention.training.recipe import (
    CheckpointRecipe,
    DataRecipe,
    GuardRecipe,
    LogRecipe,
    ModelRecipe,
    OptimizerRecipe,
    Recipe,
    ScheduleRecipe,
)


def test_cosine_warms_up_and_ends_at_its_floor() -> None:
    schedule = ScheduleRecipe(warmup_steps=4, final=0.1)
    shares = [schedule.share(step, 20) for step in range(20)]
    assert shares[:4] == [0.25, 0.5, 0.75, 1.0]
    assert shares[3:] == sorted(shares[3:], reverse=True)
    assert shares[11] == pytest.approx(0.55) and shares[-1] == pytest.approx(0.1)


def test_warm_up_by_tokens_starts_where_it_is_told_to() -> None:
    schedule = ScheduleRecipe(warmup_tokens=40, start=0.2, final=0.1)
    shares = [schedule.share(step, 20, batch_tokens=10) for step in range(20)]
    assert shares[:5] == pytest.approx([0.4, 0.6, 0.8, 1.0, shares[4]]) and shares[4] < 1
    same = ScheduleRecipe(warmup_steps=4, start=0.2, final=0.1)
    assert shares == [same.share(step, 20) for step in range(20)]
    assert schedule.warmup(16) == 2, "to whole steps: 2.5 is even-rounded"


def test_wsd_is_flat_until_it_decays() -> None:
    schedule = ScheduleRecipe(kind="wsd", warmup_steps=2, decay_steps=4, final=0.2)
    shares = [schedule.share(step, 10) for step in range(10)]
    assert shares == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


def test_no_warm_up_starts_at_the_peak_of_a_flat_course() -> None:
    assert ScheduleRecipe(final=1.0).share(0, 5) == 1.0
    assert ScheduleRecipe(kind="wsd", decay_steps=5, final=0.0).share(4, 5) == 0.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OptimizerRecipe(learning_rate=-1.0), "learning_rate: expected at least 0"),
        (lambda: OptimizerRecipe(learning_rate=float("nan")), "learning_rate: expected at least 0"),
        (lambda: OptimizerRecipe(betas=(0.9, 1.0)), r"betas: expected two values in \[0, 1\)"),
        (lambda: OptimizerRecipe(clip=0.0), "clip: expected more than 0 or None"),
        (lambda: ScheduleRecipe(kind="linear"), r"^kind: expected one of \['cosine', 'wsd'\]"),
        (lambda: GuardRecipe(action="ignore"), r"^action: expected one of \['stop', 'skip'\]"),
        (lambda: ScheduleRecipe(kind="wsd"), "decay_steps: expected a number"),
        (lambda: ScheduleRecipe(decay_steps=5), 'decay_steps: expected None with kind="cosine"'),
        (lambda: ScheduleRecipe(final=2.0), r"final: expected in \[0, 1\]"),
        (lambda: ScheduleRecipe(warmup_steps=-1), "warmup_steps: expected at least 0"),
        (lambda: ScheduleRecipe(start=-0.1), r"start: expected in \[0, 1\]"),
        (
            lambda: ScheduleRecipe(warmup_steps=1, warmup_tokens=1),
            "warmup_tokens: expected None with warmup_steps = 1",
        ),
        (lambda: DataRecipe(context_length=2, workers=-1), "workers: expected at least 0"),
        (lambda: LogRecipe(peak_flops=0.0), "peak_flops: expected at least 1"),
        (lambda: CheckpointRecipe(keep=0), "keep: expected at least 1"),
        (lambda: LogRecipe(every=0), "every: expected at least 1"),
        (lambda: DataRecipe(context_length=1), "context_length: expected at least 2"),
        (
            lambda: ModelRecipe(hidden_size=8, options={"hidden_size": 16}).overrides(),
            "model.options: hidden_size is given as model.hidden_size too",
        ),
    ],
)
def test_bad_parts_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 0}, "steps: expected at least 1"),
        ({"micro_batch_tokens": 48}, "micro_batch_tokens: expected a divisor of batch_tokens"),
        ({"micro_batch_tokens": 16}, "data.context_length: expected at most the 16 tokens"),
        ({"schedule": ScheduleRecipe(warmup_steps=7)}, "schedule: expected warm-up and decay"),
        ({"schedule": ScheduleRecipe(warmup_tokens=900)}, "within steps = 6, got 7"),
        ({"seed": -1}, "seed: expected at least 0"),
        ({"parallel": "fdsp"}, r"^parallel: expected one of \['auto', 'ddp', 'fsdp'\], got 'fdsp'"),
        ({"precision": "float16"}, "^precision: expected one of"),
        ({"initialisation": "mata"}, "^initialisation: expected one of"),
        ({"device": "gpu"}, "^device: expected one of"),
    ],
)
def test_contradictions_are_refused(make_recipe, fields, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_recipe(**fields)


def test_unknown_and_positional_fields_are_refused() -> None:
    with pytest.raises(TypeError, match="learnin_rate"):
        OptimizerRecipe(learnin_rate=1.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        Recipe("name")  # type: ignore[misc]


def test_passes_divide_over_processes(make_recipe) -> None:
    recipe = make_recipe(micro_batch_tokens=32)
    assert [recipe.passes(n) for n in (1, 2, 4)] == [4, 2, 1]
    with pytest.raises(ValueError, match=r"batch_tokens: expected a multiple of .* 32 · 3"):
        recipe.passes(3)
    with pytest.raises(ValueError, match="128 · 2, got 128; give micro_batch_tokens"):
        make_recipe(micro_batch_tokens=None).passes(2)


def test_the_course_leaves_out_what_changes_no_number(make_recipe) -> None:
    one = make_recipe(name="a", log=LogRecipe(every=5), parallel="fsdp")
    data = DataRecipe(context_length=24, corpus=Path("moved"), build=CorpusRecipe())
    assert one.course() == make_recipe(name="b", data=data).course()
    assert one.course() == make_recipe(micro_batch_tokens=128).course()
    assert one.course() == make_recipe(activation_checkpointing=True, compile="inductor").course()
    assert one.course() != make_recipe(initialisation="meta").course()
    for fields in ({"steps": 7}, {"seed": 1}, {"optimizer": OptimizerRecipe(clip=2.0)}):
        assert one.course() != make_recipe(**fields).course()
    assert json.loads(json.dumps(one.to_dict()))["data"]["corpus"] == str(one.data.corpus)
