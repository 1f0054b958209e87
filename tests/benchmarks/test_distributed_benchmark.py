"""The benchmark over several processes: two of gloo's beside one, what is left out, refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from path_attention.benchmarks.distributed import BenchmarkDistributed
from path_attention.results import read_result
from path_attention.training.processes import Processes

ALONE = Processes(0, 1, torch.device("cpu"))
SIZES = {
    "presets": "rope",
    "equality-presets": "rope,path_fox",
    "equality-tokens": 64,
    "context-tokens": 64,
    "length": 16,
    "pass-tokens": 32,
    "passes": 2,
    "layers": 2,
    "hidden-size": 32,
    "heads": 2,
    "intermediate-size": 64,
    "vocab-size": 50,
    "repeats": 2,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where two processes wrote, and what they printed."""
    folder = tmp_path_factory.mktemp("distributed")
    options = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "path_attention.cli", "benchmark", "distributed", *options,
         "--out", str(folder / "found")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "found", done.stdout


def test_two_processes_find_what_one_finds(ran: tuple[Path, str]) -> None:
    result = read_result(ran[0].with_suffix(".json"))
    equal, rows = result["rows"][:2], result["rows"][2:]
    assert [(r["part"], r["preset"]) for r in equal] == [
        ("equality", "rope"),
        ("equality", "path_fox"),
    ]
    for row in equal:
        assert row["loss_difference"] <= 1e-5 and 0 < row["gradient_error"] <= 1e-4
        assert (row["processes"], row["documents"]) == (2, 5)
    assert [(r["part"], r["processes"]) for r in rows] == [
        (part, count) for part in ("context_parallel", "fsdp2") for count in (1, 2)
    ]
    one, two = rows[:2]
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
    for one, two in (rows[:2], rows[2:]):
        rates = [row["tokens_per_second"] for row in (one, two)]
        assert one["speed"] == 1 and two["speed"] == pytest.approx(rates[1] / rates[0], rel=1e-3)
    for row, tokens in zip(rows, (64, 64, 64, 128), strict=True):  # of a step
        assert row["tokens_per_second"] == pytest.approx(tokens / row["step_ms"] * 1e3, rel=1e-3)
    start = "torchrun --standalone --nproc-per-node 2 -m path_attention.cli benchmark distributed"
    assert result["command"].startswith(f"{start} --presets rope")
    assert ran[0].with_suffix(".png").is_file()


def test_the_first_process_alone_prints(ran: tuple[Path, str]) -> None:
    assert ran[1].count("fsdp2, rope, 1 process: loss ") == 1
    assert ran[1].count("loss_difference ┃") == 1


def test_what_is_left_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(BenchmarkDistributed, "_speed", full)
    options, said = BenchmarkDistributed(seconds=2), []
    assert options._row("fsdp2", "rope", ALONE, ALONE, True, said.append) is None
    assert options._row("fsdp2", "rope", ALONE, ALONE, False, said.append) is None
    assert said == [
        "fsdp2, rope, 1 process: left out, 2 seconds are over",
        "fsdp2, rope, 1 process: does not fit in memory",
    ]
    with pytest.raises(ValueError, match="2 processes: expected to fit in memory: CUDA out of"):
        options._row("fsdp2", "rope", replace(ALONE, count=2), ALONE, False, said.append)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "processes: expected at least 2, got 1; start with `torchrun --standalone"),
        ({"parts": "fsdp"}, "parts: expected some of equality, context_parallel, fsdp2"),
        ({"presets": "pith"}, "presets: expected some of"),
        ({"equality_presets": "pith"}, "equality_presets: expected some of"),
        ({"length": 24}, "length: expected a divisor of pass_tokens = 16384, got 24"),
        ({"equality_tokens": 4}, "equality_tokens: expected at least 16, got 4"),
        ({"repeats": 0}, "repeats: expected at least 1, got 0"),
    ],
)
def test_bad_options_are_refused(change, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BenchmarkDistributed(device="cpu", **change).run()
