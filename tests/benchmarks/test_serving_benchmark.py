"""The server's benchmarks: their rows, and a load in which every answer must be right."""

from __future__ import annotations

import dataclasses
import json
import re
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from path_attention.benchmarks import figure, serving, serving_load
from path_attention.benchmarks.serving import BenchmarkServing
from path_attention.benchmarks.serving_load import (
    BenchmarkServingLoad,
    Case,
    Tally,
    _ask_well,
    _largest_gap,
)
from path_attention.results import read_result

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def tiny(monkeypatch) -> None:
    monkeypatch.setitem(serving.SHAPES, "small", (32, 1, 2, 60))


def test_bursts_with_and_without_reuse() -> None:
    options = BenchmarkServing(
        shape="small", presets="path", concurrency="1,3", prompt=300, shared=270, output=4,
        rounds=1, prefill=64, peer=False,
    )  # fmt: skip
    said: list[str] = []
    rows = options.measure(CPU, said.append)
    assert [(row["concurrency"], row["reuse"]) for row in rows] == [
        (1, True), (1, False), (3, True), (3, False)
    ]  # fmt: skip
    assert len(said) == 4
    for reused, whole in (rows[:2], rows[2:]):
        assert 0 < reused["first_token_ms"] <= reused["first_token_p95_ms"]
        assert whole["tokens_per_second"] > 0
    prompts = options._prompts(2, 0, 60) + options._prompts(2, 1, 60)
    assert len({tuple(p[:270]) for p in prompts}) == 1
    assert len({tuple(p[270:]) for p in prompts}) == 4
    with pytest.raises(ValueError, match="shared: expected less than 300, got 300"):
        dataclasses.replace(options, shared=300).measure(CPU, said.append)


def test_a_short_load(tmp_path, capsys) -> None:
    options = BenchmarkServingLoad(
        shape="small", clients=6, seconds=1.0, cases=4, prompt=200, output=12, rows=4,
        device="cpu", out=tmp_path / "load",
    )  # fmt: skip
    options.run()
    (row,) = read_result(tmp_path / "load.json")["rows"]
    assert row["equal"] > 0 and row["lost"] == row["different"] == 0 and row["largest_gap"] is None
    assert row["cache_bytes_after"] == row["running_answers_after"] == 0
    assert (tmp_path / "load.png").stat().st_size > 0


def test_memory_is_counted_in_pages_of_this_machine(monkeypatch) -> None:
    """They are 16 or 64 KiB on some."""
    before = serving_load._memory(CPU)
    monkeypatch.setattr(resource, "getpagesize", lambda: 2**16)
    assert serving_load._memory(CPU) > 8 * before
    monkeypatch.undo()
    told = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert told and abs(before / 1024 / int(told[1]) - 1) < 0.5


@pytest.mark.parametrize("ids", [[5], [5, 6, 7, 8]])
def test_an_answer_that_is_cut_off_is_lost(ids) -> None:
    told = {"path_attention": {"token_ids": ids, "prompt_token_ids": [1]}}
    answer = SimpleNamespace(status=200, read=lambda: json.dumps(told).encode())
    asked: Any = SimpleNamespace(request=lambda *_: None, getresponse=lambda: answer)
    tally = Tally()
    with pytest.raises(RuntimeError, match="where alone there are 3"):
        _ask_well(asked, Case([1], 3, [5, 6, 7]), tally, stream=False)
    assert not tally.counts and not tally.different


def test_a_gap_is_that_of_the_first_other_token() -> None:
    model = serving.make_model("small", "path", CPU, torch.float32)
    case = Case([3, 4], 3, [5, 6, 7])
    with torch.no_grad():
        logprobs = model(torch.tensor([[3, 4, 5]])).logits[0, -1].log_softmax(0)
    gap = float((logprobs[6] - logprobs[8]).abs())
    assert _largest_gap(model, [(case, [5, 8, 9])]) == pytest.approx(gap, rel=1e-2)
    assert _largest_gap(model, Tally().different) is None


def test_the_legend_is_inside_the_figure(tmp_path, monkeypatch) -> None:
    """However long the names; a line at 1 would say nothing of tokens a second."""
    drawn = []
    monkeypatch.setattr(figure, "write_figure", lambda made, _: drawn.append(made))
    for shown in (40.0, 1.2):
        bars = {(f"{n}, a name of {'many ' * n}words", "8"): shown for n in range(2, 8)}
        figure.draw_bars([figure.Panel("output", "tokens a second", bars)], "title", tmp_path / "x")
    for made, lines in zip(drawn, (0, 1), strict=True):
        made.draw_without_rendering()
        (legend,), box = made.legends, made.bbox
        shape = legend.get_window_extent()
        assert box.x0 <= shape.x0 and shape.x1 <= box.x1 and shape.y0 >= box.y0
        assert len(made.axes[0].lines) == lines
