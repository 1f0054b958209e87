"""Training over 4 gloo processes, 2 or all of which share rows, gives what one process gives."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_run import checked_recipe, scaled_recipe, twenty_recipe

from path_attention.nn.encoding import TRANSPORTS, Transport
from path_attention.training import loop
from path_attention.training.log import read_log
from path_attention.training.loop import train
from path_attention.training.objective import Objective
from path_attention.training.processes import Processes
from path_attention.training.recipe import ModelRecipe


def lines(out: Path, key: str) -> list:
    return [line[key] for line in read_log(out / "log.jsonl") if key in line]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model" / "model.safetensors")


def assert_close_runs(one: Path, other: Path) -> None:
    for key in ("loss", "heldout_loss"):
        assert lines(one, key) == pytest.approx(lines(other, key), abs=1e-5)
    theirs, ours = weights(one), weights(other)
    assert theirs.keys() == ours.keys()
    for name in ours:
        torch.testing.assert_close(theirs[name], ours[name], atol=1e-4, rtol=1e-3)


@pytest.fixture(scope="module")
def singles(corpus, tmp_path_factory) -> Path:
    """The same runs by one process."""
    out = tmp_path_factory.mktemp("singles")
    train(twenty_recipe(corpus.path), out / "twenty")
    train(scaled_recipe(corpus.path), out / "scaled")
    train(checked_recipe(corpus.path), out / "skipped")
    return out


@pytest.fixture(scope="module")
def runs(corpus, singles: Path, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    shutil.copytree(singles / "scaled", out / "from-one")
    shutil.rmtree(out / "from-one" / "checkpoints" / "step-00000006")
    shutil.rmtree(out / "from-one" / "model")
    script = Path(__file__).with_name("context_run.py")
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
         "4", str(script), str(corpus.path), str(out)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=240,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return out


@pytest.mark.parametrize("name", ["twenty", "scaled"])
def test_shared_rows_train_as_whole_ones(runs: Path, singles: Path, name: str) -> None:
    """Losses, held-out loss and weights; alone and with everything that scales switched on."""
    assert_close_runs(runs / name, singles / name)


def test_twenty_steps_are_ten_and_ten(runs: Path) -> None:
    """A resume, with rows made ahead, gives the straight run's numbers bit for bit."""
    straight, resumed = runs / "twenty", runs / "ten-and-ten"
    assert {"step": 10, "event": "resumed"} in read_log(resumed / "log.jsonl")
    assert len(lines(straight, "loss")) == 20
    for key in ("loss", "gradient_norm", "heldout_loss"):
        assert lines(straight, key) == lines(resumed, key)
    first, second = weights(straight), weights(resumed)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_run_of_one_process_goes_on_shared(runs: Path, singles: Path) -> None:
    assert {"step": 3, "event": "resumed"} in read_log(runs / "from-one" / "log.jsonl")
    assert_close_runs(runs / "from-one", singles / "scaled")


def test_one_process_goes_on_from_a_shared_run(runs: Path, singles: Path, corpus, tmp_path) -> None:
    out = tmp_path / "run"
    shutil.copytree(runs / "twenty", out)
    shutil.rmtree(out / "checkpoints" / "step-00000020")
    (out / "card.json").unlink()
    train(twenty_recipe(corpus.path), out, resume="must")
    assert_close_runs(out, singles / "twenty")


def test_bad_steps_name_the_documents_of_shared_rows(runs: Path, singles: Path) -> None:
    assert lines(singles / "skipped", "documents")
    assert lines(runs / "skipped", "documents") == lines(singles / "skipped", "documents")


class _OtherLoss(Objective):
    def loss(self, model, row, divisor, device):
        return super().loss(model, row, divisor, device)


@pytest.mark.parametrize(
    ("model", "objective", "message"),
    [
        ({"options": {"transport": "mine"}}, None, r"transport: expected .*, got 'mine'"),
        ({}, _OtherLoss(), "context_parallel: expected 1 with objective _OtherLoss, whose loss"),
    ],
)
def test_what_can_not_be_shared_is_refused(
    make_recipe, corpus, tmp_path: Path, model, objective, message: str, monkeypatch
) -> None:
    """An encoding that does not say that it can be split, and a loss of whole rows."""
    monkeypatch.setitem(TRANSPORTS, "mine", type("Mine", (Transport,), {}))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    recipe = make_recipe(model=ModelRecipe(**{**sizes, **model}), context_parallel=2)
    recipe = dataclasses.replace(recipe, micro_batch_tokens=64)
    shared = Processes(0, 2, torch.device("cpu"), context=2)
    with pytest.raises(ValueError, match=message):
        loop._Run(recipe, tmp_path, corpus, shared, objective)


def test_held_out_tokens_must_go_round(make_recipe, corpus, tmp_path: Path) -> None:
    held = corpus.info["heldout_tokens"]
    recipe = make_recipe(batch_tokens=2 * held, context_parallel=held)
    shared = Processes(0, held, torch.device("cpu"), context=held)
    with pytest.raises(ValueError, match=f"at most half the {held} held-out tokens, got {held}"):
        loop._Run(recipe, tmp_path, corpus, shared)


def test_the_number_of_processes_must_fit(make_recipe, tmp_path: Path) -> None:
    recipe = make_recipe(micro_batch_tokens=32, context_parallel=2)
    assert [recipe.passes(n) for n in (2, 4, 8)] == [4, 2, 1]
    with pytest.raises(ValueError, match=r"context_parallel: expected a divisor .*, 3, got 2"):
        recipe.passes(3)
    with pytest.raises(ValueError, match=r"micro_batch_tokens · processes = 32 · 6 / 2, got 128"):
        recipe.passes(6)
    with pytest.raises(ValueError, match="context_parallel: expected a divisor .* 1, got 2"):
        train(recipe, tmp_path)
    with pytest.raises(ValueError, match="context_parallel: expected at most half the 32 tokens"):
        make_recipe(micro_batch_tokens=32, context_parallel=17)
    with pytest.raises(ValueError, match="context_parallel: expected at least 1, got 0"):
        make_recipe(context_parallel=0)
    assert make_recipe(context_parallel=2).course() == make_recipe().course()
