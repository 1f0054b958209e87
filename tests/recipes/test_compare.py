"""Comparing language models: the same rows for all, kill and go on, checkpoints kept, a report."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from path_attention.models.loading import load_model
from path_attention.recipes import compare_command
from path_attention.recipes.compare_command import CompareModels
from path_attention.recipes.compare_report import ReportModels, find_runs, merge_part
from path_attention.recipes.language_models import COMPARED, Budget, compared_model, milestones
from path_attention.results import make_result, read_result, write_result, write_whole
from path_attention.training import loop
from path_attention.training.corpus import build_corpus
from path_attention.training.log import RunLog, read_log

BUDGET = Budget(
    tokens=2500,
    batch_tokens=128,
    micro_batch_tokens=64,
    context_length=32,
    layers=2,
    width=32,
    heads=2,
    mlp=64,
)


def write(folder: Path, words: str, count: int, seed: int) -> None:
    folder.mkdir(parents=True)
    rng = random.Random(seed)
    for n in range(count):
        text = " ".join(rng.choice(words.split()) for _ in range(200))
        (folder / f"{n:02}.text").write_text(text)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> CompareModels:
    home = tmp_path_factory.mktemp("compare")
    write(home / "code", "def return if x y z ( ) + - : import", 12, 0)
    write(home / "prose", "the a king queen said went to and of castle .", 12, 1)
    corpus = build_corpus(
        (str(home / "code"), str(home / "prose")),
        home / "corpus",
        vocab_size=300,
        heldout_fraction=0.0,
        heldout=("*/00.text", "*/01.text"),
        progress=False,
    )
    return CompareModels(
        corpus=corpus.path,
        parts=("code=code/*", "prose=prose/*"),
        models=("rope", "path"),
        seeds=(0, 1),
        budget=BUDGET,
        out=home / "runs",
        devices=("cpu",),
        lengths="32,64,128",
        targets=16,
        windows=4,
        dtype="float32",
    )


@pytest.fixture(scope="module")
def done(comparison: CompareModels) -> CompareModels:
    comparison.run()
    return comparison


def test_models_differ_in_the_encoding_alone(tmp_path: Path) -> None:
    rope, *others = (compared_model(name, 3, tmp_path, Budget()).course() for name in COMPARED)
    for other in others:
        changed = {key for key in {*rope, *other} if rope.get(key) != other.get(key)}
        assert changed <= {"model.preset", "model.options.rope_theta", "model.options.beta_max"}
    assert rope["steps"] % 10 == 0 and rope["steps"] * rope["batch_tokens"] >= 100_000_000
    with pytest.raises(ValueError, match="models: expected some of"):
        compared_model("pith", 0, tmp_path, Budget())


def test_every_run_has_its_results(done: CompareModels) -> None:
    assert [r.name for r in done.recipes()] == [
        "rope_seed0", "path_seed0", "rope_seed1", "path_seed1",
    ]  # fmt: skip
    rows = read_result(done.out / "path_seed1" / "prose.json")["rows"]
    assert {row["model"] for row in rows} == {"path"}
    assert [row["length"] for row in rows if row["by"] == "length"] == [32, 64, 128]
    code = read_result(done.out / "path_seed1" / "code.json")["rows"]
    assert code[0]["data"] != rows[0]["data"]
    before = (done.out / "rope_seed0" / "card.json").stat().st_mtime_ns
    done.run()
    assert (done.out / "rope_seed0" / "card.json").stat().st_mtime_ns == before


def test_checkpoints_of_one_run_are_kept(done: CompareModels) -> None:
    kept = {p.name for p in done.out.glob("*/models/*")}
    assert kept == {"step-2", "step-10", "step-20"}
    assert set(milestones(done.recipes()[0]).values()) == {2, 10, 20}
    folder = done.out / "rope_seed0"
    last = load_file(folder / "models" / "step-20" / "model.safetensors")
    whole = load_file(folder / "model" / "model.safetensors")
    for name, weight in last.items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, whole[name].to(torch.bfloat16))
    early = load_model(folder / "models" / "step-2")
    assert (folder / "models" / "step-2" / "tokenizer.json").exists()
    assert not torch.equal(early.state_dict()["lm_head.weight"], last["model.embed_tokens.weight"])


def test_the_report_is_over_seeds(done: CompareModels, tmp_path: Path, capsys) -> None:
    ReportModels(out=done.out, to=tmp_path / "lm", command="path-attention compare report").run()
    result = read_result(tmp_path / "lm.json")
    runs = [row for row in result["rows"] if row["kind"] == "run"]
    assert [(row["model"], row["seed"]) for row in runs] == [
        ("rope", 0), ("rope", 1), ("path", 0), ("path", 1),
    ]  # fmt: skip
    assert all(row["tokens"] == 2560 and row["skipped"] == 0 for row in runs)
    log = read_log(done.out / "path_seed0" / "log.jsonl")
    last = [line["heldout_loss"] for line in log if "heldout_loss" in line][-1]
    assert runs[2]["heldout_loss"] == last
    for part in ("code", "prose"):
        rows = read_result(tmp_path / f"lm_{part}.json")["rows"]
        assert {row["seeds"] for row in rows} == {2}
        assert (tmp_path / f"lm_{part}.png").is_file()
    assert (tmp_path / "lm.png").is_file()
    assert "| path | 1 |" in capsys.readouterr().out
    with pytest.raises(ValueError, match="expected finished runs"):
        ReportModels(out=tmp_path, to=tmp_path / "x").run()


def test_each_model_is_merged_over_the_seeds_that_it_has(tmp_path: Path) -> None:
    """None is left out where another has more; a folder that is no run is told."""
    shared = dict.fromkeys(("training_length", "dtype", "data", "tokens", "windows", "documents"))
    row = {"by": "length", "length": 32, "growth": 1.0, **shared}
    for run, perplexity in (("path_seed0", 2.0), ("path_seed1", 4.0), ("rope_seed1", 5.0)):
        write_whole(tmp_path / run / "card.json", "{}")
        rows = [{**row, "model": run[:4], "perplexity": perplexity}]
        result = make_result(what="perplexity", rows=rows, command="compare")
        write_result(tmp_path / run / "code.json", result)
    merged = merge_part(find_runs(tmp_path), "code", "report")
    assert merged["command"] == "report"
    found = {row["model"]: (row["seeds"], row["perplexity"]) for row in merged["rows"]}
    assert found == {"rope": (1, 5.0), "path": (2, 3.0)}
    other = {**read_result(tmp_path / "rope_seed1" / "code.json"), "device": "another"}
    write_result(tmp_path / "rope_seed1" / "code.json", other)
    with pytest.raises(ValueError, match=r"out: expected the same device in all code\.json, got"):
        merge_part(find_runs(tmp_path), "code", "report")
    write_whole(tmp_path / "path_seed0.bak" / "card.json", "{}")
    with pytest.raises(ValueError, match="out: expected folders named MODEL_seedN, got .*bak$"):
        find_runs(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_comparison_ends_with_the_same_losses(
    done: CompareModels, tmp_path: Path, number: signal.Signals
) -> None:
    words = ["path_attention.cli", "compare", "train", "--corpus", str(done.corpus)]
    words += ["--parts", *done.parts, "--models", "path", "--seeds", "0", "--out", str(tmp_path)]
    # of several devices: a worker dies with the process that started it, or it would hold its run
    words += [
        "--devices",
        *["cpu"] * (2 if number == signal.SIGKILL else 1),
        "--lengths",
        done.lengths,
        "--targets",
        "16",
        "--windows",
        "4",
    ]
    words += ["--dtype", "float32"]
    for name, value in vars(BUDGET).items():
        if name not in ("compile", "fused"):
            words += [f"--budget.{name.replace('_', '-')}", str(value)]
    process = subprocess.Popen([sys.executable, "-m", *words], stderr=subprocess.PIPE)
    log = tmp_path / "path_seed0" / "log.jsonl"
    while process.poll() is None and len(read_log(log)) < 4:
        time.sleep(0.02)
    os.kill(process.pid, number)
    process.communicate()
    assert process.returncode != 0 and not (tmp_path / "path_seed0" / "card.json").exists()
    again = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    here, there = (
        [line["loss"] for line in read_log(p) if "loss" in line]
        for p in (log, done.out / "path_seed0" / "log.jsonl")
    )
    assert here == there and len(here) == 2


def test_a_failure_costs_its_run_alone(
    comparison: CompareModels, tmp_path: Path, monkeypatch
) -> None:
    train = compare_command.train

    def failing(recipe, folder):
        if recipe.model.preset == "rope":
            raise FloatingPointError("the loss is nan")
        return train(recipe, folder)

    monkeypatch.setattr(compare_command, "train", failing)
    broken = replace(comparison, seeds=(1,), out=tmp_path)
    with pytest.raises(ValueError, match=r"no result of \['rope_seed1'\].*the loss is nan"):
        broken.run()
    assert broken.done(broken.recipes()[1])
    with pytest.raises(ValueError, match="parts: expected NAME=PATTERN"):
        replace(comparison, parts=("prose",)).run()
    with pytest.raises(ValueError, match="documents: expected patterns of names"):
        replace(comparison, parts=("prose=verse/*",)).run()


def test_a_stop_in_a_runs_last_step_stops_the_comparison(
    comparison: CompareModels, tmp_path: Path, monkeypatch
) -> None:
    """The run ends, having nothing left to stop; no other begins, and its results come later."""
    finish = loop._Run._after_step

    def told_in_the_last(run: loop._Run, done: int, log: RunLog, *, stopping: bool) -> None:
        finish(run, done, log, stopping=stopping)
        if done == run.recipe.steps:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(loop._Run, "_after_step", told_in_the_last)
    stopped = replace(comparison, seeds=(0,), out=tmp_path)
    with pytest.raises(ValueError, match=r"no result of \['rope_seed0', 'path_seed0'\]"):
        stopped.run()
    assert (tmp_path / "rope_seed0" / "card.json").exists()
    assert not (tmp_path / "path_seed0" / "log.jsonl").exists()
    monkeypatch.undo()
    stopped.run()
    assert all(map(stopped.done, stopped.recipes()))
