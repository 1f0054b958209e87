"""Bad steps: the rule, what is said and skipped; a resume judges as the straight run."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from path_attention.training import loop
from path_attention.training.guard import Guard
from path_attention.training.log import read_log
from path_attention.training.processes import Processes
from path_attention.training.recipe import CheckpointRecipe, GuardRecipe, OptimizerRecipe

NAN = float("nan")


def test_what_is_not_finite_is_bad() -> None:
    guard = Guard(GuardRecipe())
    assert guard.fault(2.0, 1.0) is None
    assert guard.fault(NAN, 1.0) == "the loss is nan"
    assert guard.fault(2.0, math.inf) == "the gradient's norm is inf"
    assert guard.stops


def test_a_spike_is_measured_in_deviations_from_the_median() -> None:
    """Losses 1.0 … 1.4: median 1.2, median distance 0.1, deviation 0.14826."""
    guard = Guard(GuardRecipe(action="skip", spike=4.0, window=5))
    for loss in (9.0, 1.0, 1.4, 1.1, 1.3, 1.2):  # 9.0 leaves the window
        assert guard.fault(loss, 1.0) is None, "no rule before the window is full"
    assert guard.fault(1.2 + 4 * 0.14826 - 1e-4, 1.0) is None
    guard.losses = [1.0, 1.4, 1.1, 1.3, 1.2]
    said = guard.fault(1.2 + 5 * 0.14826, 1.0)
    assert said is not None and "5.0 deviations above the median 1.2000 of the 5 steps" in said
    assert guard.losses == [1.0, 1.4, 1.1, 1.3, 1.2], "a step that is skipped is not looked back at"


def test_equal_losses_have_a_smallest_deviation() -> None:
    guard = Guard(GuardRecipe(spike=3.0, window=2))
    guard.losses = [1.0, 1.0]
    assert guard._fault(1.029, 1.0) is None
    assert guard._fault(1.031, 1.0) is not None


def test_bad_steps_in_a_row_stop_after_all() -> None:
    guard = Guard(GuardRecipe(action="skip", most=2))
    guard.fault(NAN, 1.0)
    assert not guard.stops
    guard.fault(1.0, 1.0)
    guard.fault(NAN, 1.0)
    assert not guard.stops
    guard.fault(NAN, 1.0)
    assert guard.stops
    other = Guard(GuardRecipe(action="skip", most=2))
    other.load(json.loads(json.dumps(guard.state())))
    assert (other.losses, other.bad) == (guard.losses, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"spike": 0.0}, "spike: expected more than 0 or None"),
        ({"window": 0}, "window: expected at least 1"),
        ({"most": 0}, "most: expected at least 1"),
    ],
)
def test_bad_rules_are_refused(fields, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GuardRecipe(**fields)


def poison(monkeypatch, document: int) -> None:
    """Rows with this document have a loss of NaN, as a bug in a kernel would make it."""
    own = loop._Run._loss

    def loss(self, row, divisor):
        value = own(self, row, divisor)
        return value * NAN if document in row.documents and torch.is_grad_enabled() else value

    monkeypatch.setattr(loop._Run, "_loss", loss)


def document_of_one_step(recipe, corpus, tmp_path: Path) -> tuple[int, int]:
    """A document in the rows of one step alone, and that step."""
    run = loop._Run(recipe, tmp_path / "unused", corpus, Processes(0, 1, torch.device("cpu")))
    steps = [
        {d for n in run._numbers(step) for d in run.rows.row(n).documents}
        for step in range(recipe.steps)
    ]
    for step in range(1, recipe.steps):
        only = steps[step] - set().union(*(s for n, s in enumerate(steps) if n != step))
        if only:
            return min(only), step
    raise AssertionError("the small corpus has no such document")


@pytest.fixture
def short(make_recipe):
    """A recipe whose steps are small enough to differ in their documents."""

    def make(**fields):
        return make_recipe(batch_tokens=64, micro_batch_tokens=32, **fields)

    return make


def test_a_skipped_step_changes_nothing_and_is_said(
    short, corpus, tmp_path: Path, monkeypatch
) -> None:
    guard = GuardRecipe(action="skip")
    document, step = document_of_one_step(short(), corpus, tmp_path)
    before = {}
    poison(monkeypatch, document)
    own = loop._Run._bad

    def note(self, number, fault, losses, log):
        before.update({n: p.detach().clone() for n, p in self.model.named_parameters()})
        before["moments"] = self.optimizer.state_dict()["state"][0]["step"].clone()
        own(self, number, fault, losses, log)
        after = dict(self.model.named_parameters())
        assert all(torch.equal(before[n], after[n]) for n in after)

    monkeypatch.setattr(loop._Run, "_bad", note)
    loop.train(short(guard=guard), tmp_path / "run")
    lines = read_log(tmp_path / "run" / "log.jsonl")
    (event,) = [line for line in lines if "event" in line]
    assert event["step"] == step + 1 and document in event["documents"]
    assert event["event"].startswith(f"skipped: the loss is nan at step {step + 1}, on ")
    assert len(event["documents"]) < 6, "only the row that holds it is suspected"
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == [n for n in range(1, 7) if n != step + 1]
    assert before["moments"] == step, "the optimizer took the steps before"


def test_saving_before_any_step_was_taken_changes_nothing(
    short, corpus, tmp_path: Path, monkeypatch
) -> None:
    """torch makes the moments of a checkpoint by a step, which it counts."""
    recipe = short(guard=GuardRecipe(action="skip"))
    run = loop._Run(recipe, tmp_path / "unused", corpus, Processes(0, 1, torch.device("cpu")))
    poison(monkeypatch, run.rows.row(0).documents[0])
    found = []
    for every in (1, 6):
        out = tmp_path / str(every)
        loop.train(short(guard=recipe.guard, checkpoint=CheckpointRecipe(every=every)), out)
        lines = read_log(out / "log.jsonl")
        assert next(line["step"] for line in lines if "event" in line) == 1
        found.append([(line["step"], line["loss"]) for line in lines if "loss" in line])
    assert len(found[0]) > 1 and found[0] == found[1]


def test_a_bad_step_stops_and_names_its_documents(
    short, corpus, tmp_path: Path, monkeypatch
) -> None:
    document, step = document_of_one_step(short(), corpus, tmp_path)
    poison(monkeypatch, document)
    message = rf"the loss is nan at step {step + 1}, on \d documents such as"
    with pytest.raises(FloatingPointError, match=message):
        loop.train(short(checkpoint=CheckpointRecipe(every=1, keep=9)), tmp_path / "run")
    saved = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == [f"step-{n:08d}" for n in range(1, step + 1)]


def test_a_resume_judges_as_the_straight_run(make_recipe, tmp_path: Path) -> None:
    """A rule so strict that it skips some steps; the losses it looks back at cross the resume."""
    recipe = make_recipe(
        steps=12,
        optimizer=OptimizerRecipe(learning_rate=0.3),
        guard=GuardRecipe(action="skip", spike=1.0, window=2, most=12),
        checkpoint=CheckpointRecipe(every=6, keep=9),
    )
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    loop.train(recipe, straight)
    shutil.copytree(straight, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-00000012")
    (resumed / "card.json").unlink()
    loop.train(recipe, resumed, resume="must")

    def course(out: Path) -> list:
        lines = [line for line in read_log(out / "log.jsonl") if line.get("event") != "resumed"]
        return [(line["step"], line.get("loss"), line.get("event")) for line in lines]

    assert course(resumed) == course(straight)
    skipped = [step for step, loss, event in course(straight) if event and loss is None]
    assert any(step > 6 for step in skipped), "the resumed half has a step to judge"
