"""The stages' benchmark: what can be said of it without a GPU."""

from dataclasses import replace

import pytest
import torch

from path_attention.benchmarks import stages
from path_attention.benchmarks.candidates import DEFINITION
from path_attention.benchmarks.stages import BenchmarkStages, _draw, _products

T, HEADS, SIZE = 1024, 2, 64


def test_products_count_every_pair_of_blocks_once():
    blocks = T // 64
    products = _products(T, HEADS, SIZE)
    scores = HEADS * 64 * 64 * sum(range(blocks))
    assert products["queries_bwd"] == 3 * 2 * SIZE * scores
    assert products["keys_bwd"] == 4 * 2 * SIZE * scores
    first_pairs = HEADS * 64 * 64 * (blocks // 2)
    assert products["meet_fwd"] == 2 * 2 * SIZE * (scores - first_pairs)


def test_a_loop_has_its_rate_and_share_of_the_ceiling(monkeypatch):
    monkeypatch.setattr(stages, "candidates", lambda device: [replace(DEFINITION, name="triton")])
    monkeypatch.setattr(stages, "_kernels", lambda run: {"keys_bwd_hopper": 2.0, "x": 1.0})
    benchmark = BenchmarkStages(tokens=T)
    rows = benchmark._measure("nope", HEADS, SIZE, torch.device("cpu"), ceiling=1e12)
    loop, other = rows[-2:]
    rate = _products(T, HEADS, SIZE)["keys_bwd"] / 2e-3
    assert loop["kernel"] == "keys_bwd_hopper" and loop["ms"] == 2.0
    assert loop["tflop_per_s"] == round(rate / 1e12)
    assert loop["of_ceiling"] == pytest.approx(rate / 1e12, abs=1e-3)
    assert other["tflop_per_s"] is None and other["of_ceiling"] is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_refused_without_a_gpu(tmp_path):
    with pytest.raises(ValueError, match="device: expected an NVIDIA GPU"):
        BenchmarkStages(out=tmp_path / "stages").run()


def test_the_figure_has_a_bar_for_each_pass(tmp_path):
    row = {"encoding": "path", "tokens": T, "heads": HEADS, "size": SIZE, "tflop_per_s": None}
    rows = [
        {**row, "pass": "forward", "kernel": "meet_fwd", "ms": 2.0},
        {**row, "pass": "backward", "kernel": "keys_bwd", "ms": 4.0},
    ]
    _draw({"rows": rows, "device": "a GPU"}, tmp_path / "stages.png")
    assert (tmp_path / "stages.png").stat().st_size > 10_000
