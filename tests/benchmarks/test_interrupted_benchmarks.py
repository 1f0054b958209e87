"""Benchmarks that are interrupted go on from there, and end with the rows of one that was not."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from path_attention import results
from path_attention.benchmarks import (
    accuracy,
    conversion,
    decode,
    generation,
    kept,
    operator,
    packed,
    serving,
    stages,
    stick_breaking,
    training,
)
from path_attention.results import read_result

Patch = pytest.MonkeyPatch


class Case(NamedTuple):
    """A command, and what is called once for each unit of rows."""

    options: Any
    owner: Any
    measures: str
    prepare: Callable[[Patch], None] = lambda patch: None


def with_gpu(patch: Patch) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: True)
    for part in (results, kept):
        patch.setattr(part, "device_name", lambda device="cuda": "a GPU")
    for part in (decode, generation):
        patch.setattr(part, "check", lambda name, device: 1e-3)


def with_step_times(patch: Patch) -> None:
    def rows(self, context, shape, *_) -> list[dict[str, Any]]:
        names = ("batch", "heads", "key_heads", "size")
        row = dict(zip(names, shape, strict=True)) | {"context": context, "candidate": "path"}
        return [{**row, "ms": random.random(), "ratio": 1.5, "worst": 1.1}]

    with_gpu(patch)
    patch.setattr(decode.BenchmarkDecode, "_shape", rows)


def with_model_times(patch: Patch) -> None:
    with_gpu(patch)
    patch.setattr(generation.BenchmarkGeneration, "_model", lambda self, preset, device: preset)
    patch.setattr(generation, "time_steps", lambda *_: [random.random() + 1])
    row = {"preset": "fork", "batch": 1, "context": 9, "ms": 1.0, "memory_share": 0.1}
    row |= {"tokens_per_second": None, "ratio": None}
    patch.setattr(generation, "fork_row", lambda *_: row)


def with_kernel_times(patch: Patch) -> None:
    def rows(self, encoding, heads, size, device, ceiling) -> list[dict[str, Any]]:
        row = {"encoding": encoding, "tokens": 1, "heads": heads, "size": size, "pass": "forward"}
        row |= {"kernel": "meet_fwd", "ms": random.random(), "tflop_per_s": 1}
        return [{**row, "of_ceiling": 1e12 / ceiling}]

    with_gpu(patch)
    rates = iter([1e13, 2e13, 3e13])
    patch.setattr(stages, "matrix_rate", lambda *_: next(rates))
    patch.setattr(stages.BenchmarkStages, "_measure", rows)


def with_bursts(patch: Patch) -> None:
    def bursts(self, model, count, reuse) -> list[serving.Burst]:
        return [serving.Burst(random.random() + 1, 4, [0.5], [])]

    for name in ("make_model", "make_llama"):
        patch.setattr(serving, name, lambda *_: SimpleNamespace(device=torch.device("cpu")))
    patch.setattr(serving, "free_memory", lambda device: None)
    patch.setattr(serving.BenchmarkServing, "_bursts", bursts)
    patch.setattr(serving.BenchmarkServing, "_peer_bursts", bursts)


QUICK: dict[str, Any] = {"heads": 1, "size": 8, "repeats": 1, "device": "cpu"}
CASES = {
    "operator": Case(
        operator.BenchmarkOperator(**QUICK, tokens="40,70", memory_tokens="50", encodings="fox"),
        operator,
        "compare",
    ),
    "packed": Case(
        packed.BenchmarkPacked(
            tokens=50, mean=20, batches=2, shapes="1x8,2x8", encodings="fox", repeats=1,
            device="cpu",
        ),
        packed,
        "compare",
    ),
    "stick_breaking": Case(
        stick_breaking.BenchmarkStickBreaking(**QUICK, tokens="40,64", batch_tokens=64),
        stick_breaking.BenchmarkStickBreaking,
        "_rows",
    ),
    "accuracy": Case(
        accuracy.BenchmarkAccuracy(
            tokens=30, shapes="1x8", cases="random", encodings="fox,path", swap_tokens="40",
            device="cpu",
        ),
        accuracy,
        "_errors",
    ),
    "stages": Case(
        stages.BenchmarkStages(shapes="1x64,2x64", encodings="path"),
        stages.BenchmarkStages,
        "_measure",
        with_kernel_times,
    ),
    "decode": Case(
        decode.BenchmarkDecode(shapes="1x300x2x1x64,1x400x2x1x64,1x300x2x1x64", device="cuda"),
        decode.BenchmarkDecode,
        "_shape",
        with_step_times,
    ),
    "generation": Case(
        generation.BenchmarkGeneration(
            presets="rope,path", batches="1,2", contexts="300", device="cuda"
        ),
        generation,
        "time_steps",
        with_model_times,
    ),
    "training": Case(
        training.BenchmarkTraining(
            encodings="path", lengths="16,32", ways="eager", pass_tokens=32, passes=1, layers=1,
            hidden_size=16, heads=2, intermediate_size=16, vocab_size=50, device="cpu", repeats=1,
        ),
        training.BenchmarkTraining,
        "_rows",
    ),
    "conversion": Case(
        conversion.BenchmarkConversion(
            shapes="tiny", stages="logits,pretraining", pass_tokens=64, context=32, steps=1,
            device="cpu",
        ),
        conversion.BenchmarkConversion,
        "_row",
    ),
    "serving": Case(
        serving.BenchmarkServing(
            shape="small", presets="path,rope", concurrency="1,2", prompt=8, shared=4, output=4,
            device="cpu",
        ),
        serving.BenchmarkServing,
        "_peer_bursts",
        with_bursts,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_goes_on(name: str, tmp_path, monkeypatch, capsys) -> None:
    options, owner, measures, prepare = CASES[name]
    prepare(monkeypatch)
    right, calls = getattr(owner, measures), []

    def measure(*arguments, **others) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return right(*arguments, **others)

    monkeypatch.setattr(owner, measures, measure)
    options = replace(options, out=tmp_path / "x")
    path = tmp_path / "x.partial.json"
    with pytest.raises(KeyboardInterrupt):
        options.run()
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    units = json.loads(path.read_text())["units"]
    before = [row for unit, rows in units.items() if unit != "1: ceiling" for row in rows]
    assert before

    options.run()
    assert not path.exists()
    gone_on, again = read_result(tmp_path / "x.json"), len(calls) - 2
    assert capsys.readouterr().out.count("measured before") == len(units)
    for row, kept_row in zip(gone_on["rows"], before, strict=False):
        # generation's ratios are formed when all is measured
        assert kept_row == {key: x if kept_row[key] is not None else None for key, x in row.items()}

    del calls[:]
    calls += [(), ()]
    replace(options, out=tmp_path / "whole").run()
    whole = read_result(tmp_path / "whole.json")
    assert again == len(calls) - 3
    for one, other in zip(gone_on["rows"], whole["rows"], strict=True):
        assert list(one) == list(other)
        for column in one:
            assert isinstance(one[column], float) or one[column] == other[column]
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "whole.json", "whole.png", "x.json", "x.png"
    ]  # fmt: skip


def test_a_share_of_the_ceiling_is_that_of_the_ceiling_told(tmp_path, monkeypatch) -> None:
    """Which another session would measure otherwise."""
    with_kernel_times(monkeypatch)
    right, calls = stages.BenchmarkStages._measure, []

    def measure(*arguments) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return right(*arguments)

    monkeypatch.setattr(stages.BenchmarkStages, "_measure", measure)
    options = replace(CASES["stages"].options, out=tmp_path / "x")
    with pytest.raises(KeyboardInterrupt):
        options.run()
    options.run()
    result = read_result(tmp_path / "x.json")
    assert "10 TFLOP/s" in result["what"]
    assert [row["of_ceiling"] for row in result["rows"]] == [0.1, 0.1]


def test_no_model_is_made_whose_rows_are_there(tmp_path, monkeypatch) -> None:
    with_bursts(monkeypatch)
    options = replace(CASES["serving"].options, out=tmp_path / "x")
    cpu, made, right = torch.device("cpu"), [], serving.make_model

    def make(shape: str, preset: str, *others: Any) -> Any:
        made.append(preset)
        if preset == "rope":
            raise KeyboardInterrupt
        return right(shape, preset, *others)

    monkeypatch.setattr(serving, "make_model", make)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            options.measure(cpu, print, kept.kept_for(options, cpu, print).rows)
    assert made == ["path", "rope", "rope"]


def test_a_peer_that_fails_is_asked_again(tmp_path, monkeypatch) -> None:
    with_bursts(monkeypatch)
    options = replace(CASES["serving"].options, presets="path", out=tmp_path / "x")
    right = serving.BenchmarkServing._peer_bursts

    def fails(self, model, count, reuse) -> Any:
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(serving.BenchmarkServing, "_peer_bursts", fails)
    cpu, said = torch.device("cpu"), []
    for peers in (0, 4):
        rows = options.measure(cpu, said.append, kept.kept_for(options, cpu, print).rows)
        engines = [row["engine"] for row in rows]
        assert engines == ["path-attention"] * 4 + ["transformers"] * peers
        monkeypatch.setattr(serving.BenchmarkServing, "_peer_bursts", right)
    assert said[4] == "transformers rope, 1 at once: fails here: RuntimeError: no kernel for this"
