"""Checkpoints of a RoPE run, converted early and late: every branch sees the same tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from path_attention import cli
from path_attention.conversion.hardening import ConvertCheckpoints
from path_attention.models import load_model
from path_attention.results import read_result
from path_attention.training import export
from path_attention.training.loop import train
from path_attention.training.recipe import (
    CheckpointRecipe,
    DataRecipe,
    LogRecipe,
    ModelRecipe,
    Recipe,
)

STEPS, BATCH = 10, 64


@pytest.fixture(scope="module")
def runs(corpora, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for preset in ("rope", "path_fox"):
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        recipe = Recipe(
            name=preset,
            model=ModelRecipe(preset=preset, intermediate_size=32, **sizes),
            data=DataRecipe(context_length=24, corpus=corpora[0].path),
            steps=STEPS,
            batch_tokens=BATCH,
            precision="float32",
            device="cpu",
            checkpoint=CheckpointRecipe(every=1, keep=STEPS),
            log=LogRecipe(every=1, heldout_every=5, tensorboard=False, progress=False),
        )
        train(recipe, folder / preset)
    return folder


def words(runs: Path, out: Path, *more: str) -> list[str]:
    said = ["convert", "checkpoints", str(runs / "rope"), "--scratch", str(runs / "path_fox")]
    said += ["--attention-tokens", "128", "--more", "0.5", "--direction-rank", "4"]
    said += ["--lengths", "16", "64", "5000", "--targets", "8", "--windows", "2"]
    return [*said, "--device", "cpu", "--out", str(out), *more]


def test_every_branch_ends_at_the_same_tokens(runs, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    cli.main(words(runs, out, "--only", "from-5", "scratch"))
    assert "['from-1', 'from-10', 'rope'] are to be done" in capsys.readouterr().out
    before = (out / "from-5" / "pretraining" / "model" / "model.safetensors").stat().st_mtime_ns
    cli.main(words(runs, out))
    again = (out / "from-5" / "pretraining" / "model" / "model.safetensors").stat().st_mtime_ns
    assert again == before  # what was done stays
    rows = read_result(out / "report.json")["rows"]
    branches = {row["branch"]: row for row in rows if row["by"] == "branch"}
    total = round(1.5 * STEPS * BATCH)
    assert {name: row["step"] for name, row in branches.items()} == {
        "from-1": 1, "from-5": 5, "from-10": 10, "rope": 10, "scratch": 10,
    }  # fmt: skip
    for name, row in branches.items():
        trained = 0
        for stage in ("attention", "pretraining"):
            path = out / name / stage / "recipe.json"
            if path.exists():
                recipe = json.loads(path.read_text())
                trained += recipe["steps"] * recipe["batch_tokens"]
        assert row["step"] * BATCH + trained == row["tokens"]
        assert 0 <= row["tokens"] - total < BATCH
        assert (row["attention_tokens"] > 0) == name.startswith("from-")
        model = load_model(out / name / "pretraining")
        assert model.config.transport == ("rotary" if name == "rope" else "householder")
        curve = [r for r in rows if r["by"] == "curve" and r["branch"] == name]
        assert curve[-1]["tokens"] == row["tokens"] and curve[-1]["loss"] == row["heldout_loss"]
    runs_own = [r for r in rows if r["by"] == "curve" and r["branch"] == "rope, its run"]
    assert [r["tokens"] for r in runs_own] == [5 * BATCH, 10 * BATCH]
    lengths = [(r["branch"], r["length"]) for r in rows if r["by"] == "length"]
    assert lengths == [(name, length) for name in branches for length in (16, 64)]
    assert (out / "report.png").stat().st_size > 1000
    # a late checkpoint's start is the RoPE run's own weights
    start, rope = load_model(out / "from-10" / "start"), load_model(runs / "rope")
    ours = start.get_parameter("model.layers.0.mlp.up_proj.weight")
    assert (ours == rope.get_parameter("model.layers.0.mlp.up_proj.weight")).all()


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (("--more", "0.1"), "more: expected a share that leaves more than the 128 tokens"),
        (("--steps", "77"), "more: expected a share that leaves more"),
        (("--only", "from-3"), "only: expected of"),
        (("--parts", "code"), "parts: expected NAME=PATTERN,PATTERN, got 'code'"),
        (("--parts", "code=nothing/*"), "documents: "),
        (("--data", "no/such"), "corpus: expected a folder"),
        (("--to", "path"), "scratch: expected a run of 'path' on 640 tokens, got 'path_fox'"),
    ],
)
def test_what_does_not_fit_is_refused(runs, tmp_path, capsys, more, line) -> None:
    with pytest.raises(SystemExit):
        cli.main(words(runs, tmp_path / "o", *more))
    assert f"error: {line}" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_a_checkpoint_is_exported_whole_or_not_at_all(runs, tmp_path, monkeypatch) -> None:
    command = ConvertCheckpoints(run_folder=runs / "rope", out=tmp_path, device="cpu")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(export.shutil, "copy2", killed)
        with pytest.raises(KeyboardInterrupt):
            command.checkpoint(runs / "rope", 5)
    assert load_model(command.checkpoint(runs / "rope", 5)).config.transport == "rotary"


def test_a_run_must_be_ropes_and_finished(runs, tmp_path, capsys) -> None:
    for folder, line in (
        (runs / "path_fox", "expected a run of 'rope'"),
        (tmp_path, "a finished run"),
    ):
        with pytest.raises(SystemExit):
            cli.main(["convert", "checkpoints", str(folder), "--out", str(tmp_path / "o")])
        assert line in capsys.readouterr().err
