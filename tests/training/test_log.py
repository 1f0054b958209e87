"""What a step's line says: speed, utilisation, parts of the time; FLOPs counted by hand."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from path_attention.models import PathAttentionConfig, PathAttentionForCausalLM
from path_attention.training import flops, loop
from path_attention.training.flops import attention_size, peak_flops, training_flops
from path_attention.training.log import RunLog, read_log
from path_attention.training.processes import Processes
from path_attention.training.recipe import LogRecipe

CPU = torch.device("cpu")
QUIET = LogRecipe(every=1, tensorboard=False, progress=False)


def test_flops_are_those_of_the_products(make_recipe) -> None:
    """Forward products counted by PyTorch itself, causal attention's half of the scores."""
    from torch.utils.flop_counter import FlopCounterMode

    config = PathAttentionConfig.from_preset(
        "nope", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=50
    )
    model = PathAttentionForCausalLM(config)
    counted = training_flops(model, attention_size(config))
    ids = torch.arange(40)[None]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    products = counter.get_flop_counts()["Global"]
    linear = sum(n for op, n in products.items() if "attention" not in str(op))
    assert counted.of([40]) == 3 * linear + 3 * 2 * 4 * (8 + 8) * 40**2
    model.model.layers.requires_grad_(False)
    head = 50 * 32
    frozen = training_flops(model, attention_size(config))
    assert counted.token - frozen.token == 2 * (counted.token / 6 - head)
    assert counted.of([40]) - counted.of([20, 20]) == 3 * 2 * 4 * 16 * (40**2 - 2 * 20**2)


def test_peaks_are_known_by_name(monkeypatch) -> None:
    assert peak_flops(CPU, torch.bfloat16) is None
    cuda = torch.device("cuda", 0)
    for name, peak in (("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("Other", None)):
        monkeypatch.setattr(flops.torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_flops(cuda, torch.bfloat16) == peak


def test_utilisation_is_work_over_time_and_peak(tmp_path: Path) -> None:
    log = RunLog(tmp_path, QUIET, steps=2, start=0, processes=Processes(0, 2, CPU), peak=1e6)
    values = {"loss": 1.0, "gradient_norm": 1.0, "learning_rate": 0.1}
    with log:
        with log.pause():
            time.sleep(0.2)
        time.sleep(0.05)
        log.part("data", 0.25)
        log.part("data", 0.5)
        log.step(1, tokens=8, flops=1000.0, **values)
        log.event(2, "skipped: why", documents=[3])
    line, event = read_log(tmp_path / "log.jsonl")
    assert 0.05 <= line["seconds"] < 0.2, "what is paused for counts for nothing"
    assert line["mfu"] == pytest.approx(1000 / (line["seconds"] * 2e6), rel=0.2)
    assert line["seconds_data"] == 0.75
    assert line["tokens_per_second"] == pytest.approx(8 / line["seconds"], rel=0.01)
    assert event == {"step": 2, "event": "skipped: why", "documents": [3]}


def test_a_run_logs_its_parts(make_recipe, tmp_path: Path) -> None:
    loop.train(make_recipe(steps=3, log=LogRecipe(
        every=1, heldout_every=None, tensorboard=False, progress=False, peak_flops=1e12
    )), tmp_path)  # fmt: skip
    lines = [line for line in read_log(tmp_path / "log.jsonl") if "loss" in line]
    assert len(lines) == 3
    for line in lines:
        parts = [line[f"seconds_{name}"] for name in ("data", "compute", "update")]
        assert min(parts) >= 0 and 0.5 * line["seconds"] < sum(parts) <= line["seconds"] + 1e-3
        assert 0 < line["mfu"] < 1 and "peak_memory_gb" not in line
