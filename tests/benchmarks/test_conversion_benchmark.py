"""The benchmark of conversions: a row a stage, the trainer's steps, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from path_attention.benchmarks.conversion import SHAPES, BenchmarkConversion, random_model
from path_attention.conversion.memory import estimate_memory
from path_attention.conversion.teacher import student_config
from path_attention.models import PathAttentionConfig, PathAttentionForCausalLM
from path_attention.results import read_result
from path_attention.training.processes import Processes

CPU = torch.device("cpu")
SMALL = BenchmarkConversion(
    shapes="tiny", trainable="all,encoding", pass_tokens=64, context=32, steps=1, device="cpu"
)


def test_a_row_for_each_stage_and_what_it_trains(tmp_path: Path) -> None:
    replace(SMALL, out=tmp_path / "c").run()
    result = read_result(tmp_path / "c.json")
    rows = result["rows"]
    assert [(row["stage"], row["trainable"]) for row in rows] == [
        ("attention", "attention"),
        ("logits", "all"),
        ("logits", "encoding"),
        ("pretraining", "all"),
        ("pretraining", "encoding"),
    ]
    for row in rows:
        assert row["fits"] and row["peak_gib"] is None
        assert row["tokens_per_second"] == pytest.approx(128 / row["step_ms"] * 1e3, rel=1e-3)
        recipe = SMALL.recipe(row["stage"], row["trainable"], row["way"], torch.float32)
        config = student_config(
            PathAttentionConfig.from_preset("rope", **SHAPES["tiny"]), "path", direction_rank=32
        )
        told = estimate_memory(config, recipe, row["stage"], Processes(0, 1, CPU))
        assert row["estimate_gib"] == pytest.approx(told.total / 2**30, rel=5e-3)
    assert (tmp_path / "c.png").stat().st_size > 1000
    assert result["command"].startswith("path-attention benchmark conversion --shapes tiny")


def test_what_does_not_fit_has_a_row_without_times(monkeypatch) -> None:
    def full(*arguments) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr("path_attention.benchmarks.conversion.build_model", full)
    lines: list[str] = []
    rows = replace(SMALL, stages="logits", trainable="all").measure(CPU, lines.append)
    (row,) = rows
    assert not row["fits"] and row["tokens_per_second"] is None and row["estimate_gib"] > 0
    assert "does not fit" in lines[0]


@pytest.mark.parametrize(("name", "millions"), [("135m", 135), ("1.7b", 1711), ("7b", 7616)])
def test_shapes_are_the_published_models(name: str, millions: int) -> None:
    with torch.device("meta"):
        model = PathAttentionForCausalLM(PathAttentionConfig.from_preset("rope", **SHAPES[name]))
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions


def test_random_weights_are_drawn() -> None:
    config = PathAttentionConfig.from_preset("path", **SHAPES["tiny"])
    model = random_model(config, CPU)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert 0.01 < model.get_parameter("model.embed_tokens.weight").std().item() < 1
    assert torch.isfinite(model(torch.arange(8)[None]).logits).all()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("shapes", "13b", "shapes: expected some of"),
        ("stages", "fourth", "stages: expected some of"),
        ("trainable", "none", "trainable: expected some of"),
        ("ways", "fast", "ways: expected some of"),
        ("pass_tokens", 48, "pass_tokens: expected a multiple of the context 32, got 48"),
        ("steps", 0, "steps: expected at least 1"),
    ],
)
def test_bad_options_are_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        replace(SMALL, **{field: value}).measure(CPU, print)
