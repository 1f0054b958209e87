"""Conversions by DDP and FSDP2 over two gloo processes give what one process gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_conversion import divergence_alone, small_conversion

from path_attention.conversion.pipeline import convert
from path_attention.models import load_model

pytestmark = pytest.mark.slow


def worst(a: Path, b: Path) -> float:
    """The largest difference of two models' weights, in units of their largest step from start."""
    start = load_model(a / "start").state_dict()
    ours, theirs = load_model(a).state_dict(), load_model(b).state_dict()
    assert ours.keys() == theirs.keys()
    step = max(float((ours[n] - start[n]).abs().max()) for n in ours)
    assert step > 1e-3
    return max(float((ours[n] - theirs[n]).abs().max()) for n in ours) / step


@pytest.fixture(scope="module")
def paths(corpora) -> list[Path]:
    return [corpus.path for corpus in corpora]


@pytest.fixture(scope="module")
def runs(pretrained, paths, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    script = Path(__file__).with_name("spread_conversion.py")
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(script), str(pretrained), str(out), *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-6000:]
    return out


@pytest.fixture(scope="module")
def single(pretrained, paths, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("single")
    convert(pretrained, small_conversion(paths), out / "whole")
    convert(pretrained, divergence_alone(paths, precision="bfloat16"), out / "half")
    convert(pretrained, divergence_alone(paths, trainable="lora"), out / "lora")
    return out


@pytest.mark.parametrize("name", ["ddp", "fsdp", "resumed"])
def test_two_processes_give_what_one_gives(runs, single, name) -> None:
    assert worst(single / "whole", runs / name) < 0.02


@pytest.mark.parametrize("name", ["lora-ddp", "lora-fsdp"])
def test_low_rank_updates_too(runs, single, name) -> None:
    assert worst(single / "lora", runs / name) < 0.02


def test_in_16_bits_with_checkpointing(runs, single) -> None:
    """AdamW's first steps are signs of gradients: small ones flip under rounding."""
    start, ours, theirs = (
        load_model(p).state_dict()
        for p in (single / "half" / "start", single / "half", runs / "half")
    )
    name = "model.layers.1.mlp.up_proj.weight"
    a, b = ours[name] - start[name], theirs[name] - start[name]
    assert torch.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.9
