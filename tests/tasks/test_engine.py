"""Training: exact resumption, replicas that do not feel one another, an end when solved."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from small_tasks import SMALL

from path_attention.models import PathAttentionForCausalLM
from path_attention.results import check_result, write_result
from path_attention.tasks.engine import Engine, start_model
from path_attention.tasks.flip_flop import FlipFlop
from path_attention.tasks.group_words import GroupWords
from path_attention.tasks.measure import losses
from path_attention.tasks.mqrar import Mqrar
from path_attention.tasks.recipe import TaskRecipe
from path_attention.tasks.record import read_run, result_of
from path_attention.tasks.task import IGNORED, train_generator

replace = dataclasses.replace
GROUP = GroupWords(group="S3", letters=4, test_letters=5)


def seeds(recipe: TaskRecipe, *values: int) -> list[TaskRecipe]:
    return [replace(recipe, seed=seed) for seed in values]


def state(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in engine.optimizer.state.items()}


class Killed(Exception):
    pass


@pytest.mark.parametrize("task", [Mqrar(pairs=5, keys=2, values=2), GROUP], ids=lambda t: t.name)
def test_a_run_that_was_killed_ends_bit_for_bit_the_same(task, tmp_path: Path) -> None:
    curriculum = 4 if task.curriculum else 0
    recipe = replace(SMALL, task=task, curriculum_steps=curriculum, precision="bfloat16")
    whole = Engine(seeds(recipe, 0, 5))
    wanted = whole.run()

    def kill(line: str) -> None:
        if "step 4/" in line:
            raise Killed

    checkpoint = tmp_path / "run.pt"
    with pytest.raises(Killed):
        Engine(seeds(recipe, 0, 5)).run(checkpoint, kill)
    again = Engine(seeds(recipe, 0, 5))
    found = again.run(checkpoint)
    assert again.step == 6 and found == wanted
    ours, theirs = state(again), state(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with pytest.raises(ValueError, match="checkpoint: run.pt is of"):
        Engine(seeds(recipe, 0, 6)).run(checkpoint)


def test_it_trains_as_a_plain_loop_does() -> None:
    """One model, torch's own modules and AdamW, the same sequences."""
    recipe = replace(SMALL, weight_decay=0.1, seed=3)
    engine = Engine([recipe])
    engine.train(recipe.steps)
    model, generator = start_model(recipe), train_generator(3, "cpu")
    big = [p for p in model.parameters() if p.dim() > 1]
    small = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": big, "weight_decay": 0.1}, {"params": small, "weight_decay": 0.0}],
        betas=recipe.betas,
    )
    for step in range(recipe.steps):
        batch = recipe.task.sample(generator, recipe.batch)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * recipe.share(step)
        optimizer.zero_grad()
        logits = model(input_ids=batch.tokens, use_cache=False).logits
        losses(logits, batch.labels, 1, IGNORED).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
    # A step divides by the root of v: where a gradient is nearly 0, so is what is compared.
    moved = engine.model(0).state_dict()
    start = start_model(recipe).state_dict()
    for name, value in model.state_dict().items():
        change = (value - start[name]).norm()
        assert (moved[name] - value).norm() <= 0.01 * change, name


def test_replicas_do_not_feel_one_another() -> None:
    """Trained together or alone: the same but for the order of sums in products."""
    recipes = [replace(SMALL, seed=s, learning_rate=r) for s, r in ((0, 1e-3), (1, 1e-2))]
    together = Engine(recipes)
    together.train(4)
    for r, recipe in enumerate(recipes):
        alone = Engine([recipe])
        assert torch.equal(alone.generators[0].get_state(), train_generator(r, "cpu").get_state())
        alone.train(4)
        assert torch.equal(alone.u[0], together.u[r])
        moved = (alone.replicas.flat[0] - Engine([recipe]).replicas.flat[0]).norm()
        assert (alone.replicas.flat[0] - together.replicas.flat[r]).norm() <= 1e-3 * moved


def test_what_is_solved_ends_and_keeps_its_parameters(monkeypatch) -> None:
    """Solved twice in a row ends a replica; the others go on until none is left."""
    answers = iter([True, False, True, True, False, True, True])  # two replicas, then one
    monkeypatch.setattr("path_attention.tasks.engine.is_solved", lambda *_: next(answers))
    recipe = replace(SMALL, steps=20, stop_after=2, check_every=1)
    engine = Engine(seeds(recipe, 0, 1))
    kept: list[torch.Tensor] = []
    outcomes = engine.run(None, lambda line: kept.append(engine.replicas.flat.clone()))
    assert [o.step for o in outcomes] == [2, 5]
    assert [o.first_solved for o in outcomes] == [1, 2]
    assert torch.equal(kept[1][0], engine.replicas.flat[0])
    assert not torch.equal(kept[2][1], engine.replicas.flat[1])
    assert [row["running"] for row in outcomes[0].curve] == [True, *[False] * 4]


def test_a_loss_that_is_not_finite_ends_its_run_and_says_so(tmp_path: Path) -> None:
    engine = Engine(seeds(SMALL, 0, 1))
    with torch.no_grad():
        engine.replicas.parameters[0][1] = float("nan")
    outcomes = engine.run()
    assert [o.finite for o in outcomes] == [True, False]
    assert outcomes[1].step == 2 and outcomes[0].step == 6
    assert outcomes[1].curve[0]["loss"] is None
    write_result(tmp_path / "x.json", result_of(engine, outcomes[1], "x"))  # no NaN in it


def test_a_result_says_everything(tmp_path: Path) -> None:
    recipe = replace(SMALL, options={"direction_rank": 4, "beta_max": 1.5})
    engine = Engine(seeds(recipe, 2))
    (outcome,) = engine.run()
    result = result_of(engine, outcome, "path-attention task sweep")
    check_result(result)
    write_result(tmp_path / "x.json", result)
    run = read_run(tmp_path / "x.json")
    assert run.recipe["options.beta_max"] == 1.5 and run.recipe["seed"] == 2
    assert run.recipe["run"] == outcome.recipe.run and run.recipe["beta2"] == 0.999
    assert [row["step"] for row in run.curve] == [2, 4, 6]
    assert run.tests == outcome.tests[0].rows()
    assert sum(row["counted"] for row in run.tests) > 1000
    assert run.outcome["seconds"] > 0 and run.outcome["replicas"] == 1
    assert TaskRecipe.from_dict(outcome.recipe.to_dict()) == outcome.recipe
    assert isinstance(engine.model(0), PathAttentionForCausalLM)


def test_one_shape_is_what_replicas_share() -> None:
    same = [
        replace(SMALL, seed=4),
        replace(SMALL, learning_rate=1.0),
        replace(SMALL, weight_decay=0.3),
        replace(SMALL, options={**SMALL.options, "beta_bias_init": 2.0}),
    ]
    assert {recipe.shape for recipe in same} == {SMALL.shape}
    others = [
        replace(SMALL, layers=2),
        replace(SMALL, steps=7),
        replace(SMALL, options={**SMALL.options, "beta_max": 1.0}),
        replace(SMALL, task=Mqrar(pairs=5, keys=2, values=3)),
    ]
    assert SMALL.shape not in {recipe.shape for recipe in others}
    names = [recipe.run for recipe in (SMALL, *same, *others)]
    assert len(set(names)) == len(names)
    assert replace(SMALL, seed=4).setting == SMALL.setting
    with pytest.raises(ValueError, match="recipes: expected recipes of one shape"):
        Engine([SMALL, others[0]])


def test_replicas_of_different_starts_differ_where_they_should() -> None:
    lifted = replace(SMALL, options={**SMALL.options, "beta_bias_init": 2.0})
    engine = Engine([SMALL, lifted])
    plain, other = engine.model(0).state_dict(), engine.model(1).state_dict()
    differ = {name for name in plain if not torch.equal(plain[name], other[name])}
    assert differ == {"model.layers.0.attention.transport.beta_proj.bias"}


def test_the_rate_rises_and_falls_and_the_curriculum_grows() -> None:
    recipe = replace(SMALL, task=GROUP, steps=10, warmup_steps=4, curriculum_steps=6)
    shares = [recipe.share(step) for step in range(10)]
    assert shares[:4] == [0.25, 0.5, 0.75, 1.0] and shares[9] == pytest.approx(0.1)
    assert shares[3:] == sorted(shares[3:], reverse=True)
    straight = replace(recipe, schedule="linear")
    assert straight.share(6) == pytest.approx(1 - 0.9 * 3 / 6)
    engine, longest = Engine([recipe]), []
    for _ in range(10):
        longest.append(int(engine._longest()))
        engine.train(1)
    assert longest == [2, 2, 3, 3, 4, 4, 4, 4, 4, 4]


def test_a_graph_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="graph: expected False on cpu"):
        Engine([SMALL], graph=True)


def test_the_callers_randomness_is_left_alone() -> None:
    before = torch.get_rng_state()
    Engine([SMALL]).train(2)
    assert torch.equal(torch.get_rng_state(), before)


def test_path_learns_a_small_flip_flop_and_rope_does_not() -> None:
    recipe = TaskRecipe(
        task=FlipFlop(pairs=8, sparse_sequences=1000),
        options={"beta_bias_init": 2.0},
        width=32,
        steps=120,
        check_every=120,
        learning_rate=5e-3,
        warmup_steps=10,
        precision="float32",
    )
    share = {}
    for encoding in ("path", "rope"):
        engine = Engine([replace(recipe, encoding=encoding)])
        engine.train(120)
        engine.check()
        row = engine.outcomes[0].curve[-1]
        share[encoding] = row["in_distribution.errors"] / row["in_distribution.counted"]
    assert share["path"] < 0.01 and share["rope"] > 0.05


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"steps": 0}, "steps: expected at least 1, got 0"),
        ({"warmup_steps": 7}, "warmup_steps: expected 0 to 6, got 7"),
        ({"betas": (0.9, 1.0)}, "betas: expected two values in"),
        ({"clip": 0.0}, "clip: expected more than 0 or None, got 0.0"),
        ({"schedule": "flat"}, "schedule: expected 'cosine' or 'linear'"),
        ({"precision": "half"}, "precision: expected 'float32' or 'bfloat16'"),
        ({"encoding": "none"}, "encoding: expected one of"),
        ({"options": {"vocab_size": 3}}, "options: expected fields that the recipe does not set"),
        ({"options": {"colour": 3}}, "overrides: expected fields of"),
        ({"seed": -1}, "seed: expected 0 to"),
    ],
)
def test_bad_recipes_are_named(change: dict, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        replace(SMALL, **change)


ON_GPU = [
    ("path", FlipFlop(pairs=64)),
    ("path_fox", GroupWords()),
    ("rope", GroupWords(group="A5", generators="three_cycles", form="identity")),
    ("stick_breaking", Mqrar(pairs=40)),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("encoding", "task"), ON_GPU)
def test_a_graph_takes_the_steps_that_eager_takes(encoding: str, task, tmp_path: Path) -> None:
    """Sequences are the same bit for bit; parameters but for sums by atomics."""
    recipe = TaskRecipe(
        task=task,
        encoding=encoding,
        width=128,
        steps=30,
        precision="float32",
        warmup_steps=5,
        curriculum_steps=20 if task.curriculum else 0,
    )
    recipes = seeds(recipe, 0, 1)
    graphed, eager = (Engine(recipes, device="cuda", graph=graph) for graph in (True, False))
    start = eager.replicas.flat.clone()
    graphed.train(10)
    graphed.save(tmp_path / "x.pt")
    resumed = Engine(recipes, device="cuda")
    resumed.load(tmp_path / "x.pt")
    eager.train(10)
    for engine in (graphed, eager, resumed):
        engine.train(5)
        assert torch.equal(engine.u, graphed.u) and int(engine.optimizer.step_count) == 15
        states = zip(engine.generators, graphed.generators, strict=True)
        assert all(a.get_state().equal(b.get_state()) for a, b in states)
    moved = (eager.replicas.flat - start).norm()
    for engine in (graphed, resumed):
        assert (engine.replicas.flat - eager.replicas.flat).norm() < 0.02 * moved


@pytest.mark.gpu
@pytest.mark.parametrize(("encoding", "task"), ON_GPU)
def test_no_step_waits_for_the_host(encoding: str, task) -> None:
    engine = Engine(
        [replace(SMALL, encoding=encoding, task=task, options={}, width=64, steps=9)],
        device="cuda",
        graph=False,
    )
    engine.train(2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine._take_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
