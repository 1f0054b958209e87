"""The benchmark of training steps: the trainer's own step, rows beside RoPE's, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from path_attention.benchmarks.training import BenchmarkTraining, NextTokenSteps
from path_attention.results import read_result
from path_attention.training.processes import Processes

SMALL = BenchmarkTraining(
    encodings="path",
    lengths="16,32",
    ways="eager,checkpointed",
    pass_tokens=64,
    passes=2,
    layers=2,
    hidden_size=32,
    heads=2,
    intermediate_size=64,
    vocab_size=50,
    device="cpu",
    repeats=2,
)


def test_rows_are_written_beside_ropes(tmp_path: Path) -> None:
    replace(SMALL, out=tmp_path / "training").run()
    result = read_result(tmp_path / "training.json")
    rows = result["rows"]
    assert [(r["way"], r["length"], r["encoding"]) for r in rows] == [
        (way, length, encoding)
        for way in ("eager", "checkpointed")
        for length in (16, 32)
        for encoding in ("rope", "path")
    ]
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(128 / row["step_ms"] * 1e3, rel=1e-3)
        assert row["encoding"] != "rope" or row["speed"] == 1
    assert (tmp_path / "training.png").is_file()
    assert result["command"].startswith("path-attention benchmark training --encodings path")


def test_a_step_is_the_trainers() -> None:
    """Losses fall on rows that stay the same, and the work is that of the model's FLOPs."""
    device = torch.device("cpu")
    recipe = SMALL._recipe("path", "eager", 16, torch.float32, device)
    trained = NextTokenSteps(recipe, 50, Processes(0, 1, device))
    linear = sum(
        m.weight.numel() for m in trained.model.modules() if isinstance(m, torch.nn.Linear)
    )
    assert trained.flops == 6 * linear * 128 + 3 * (2 * 2 * 32) * 8 * 16**2
    rows = trained.rows

    def loss() -> float:
        with torch.no_grad():
            parts = [trained.objective.loss(trained.model, r, 60, trained.device) for r in rows]
        return float(sum(parts))

    before = loss()
    for _ in range(10):
        trained.step()
    assert loss() < before - 0.1
    assert all(p.grad is None for p in trained.model.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encodings": "pith"}, "encodings: expected some of"),
        ({"lengths": "24"}, "lengths: expected divisors of pass_tokens = 64 from 2 on, got 24"),
        ({"ways": "eager+quick"}, "ways: expected some of eager, compiled"),
        ({"passes": 0}, "passes: expected at least 1, got 0"),
        ({"ways": "fused"}, "fused: expected False on cpu"),
    ],
)
def test_bad_options_are_refused(change, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change).measure(torch.device("cpu"), lambda line: None)
