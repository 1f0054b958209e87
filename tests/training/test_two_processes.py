"""DDP and FSDP2 over two gloo processes give what one process gives."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from path_attention.training.log import read_log
from path_attention.training.loop import train


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in read_log(out / "log.jsonl") if "loss" in line]


def heldout(out: Path) -> float:
    return [x["heldout_loss"] for x in read_log(out / "log.jsonl") if "heldout_loss" in x][-1]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory) -> tuple[Path, str]:
    """The folder of all runs, and what torchrun said."""
    out = tmp_path_factory.mktemp("runs")
    script = Path(__file__).with_name("two_processes.py")
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(script), str(corpus.path), str(out)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=240,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return out, result.stderr


@pytest.fixture(scope="module")
def single(corpus, tmp_path_factory) -> Path:
    import dataclasses

    from small_run import small_recipe

    out = tmp_path_factory.mktemp("single")
    train(dataclasses.replace(small_recipe(corpus.path), micro_batch_tokens=32), out)
    return out


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_equal_one(runs, single: Path, parallel: str) -> None:
    out = runs[0] / parallel
    assert losses(out) == pytest.approx(losses(single), abs=1e-5)
    assert heldout(out) == pytest.approx(heldout(single), abs=1e-5)
    theirs, ours = weights(out), weights(single)
    assert theirs.keys() == ours.keys()
    for name in ours:
        torch.testing.assert_close(theirs[name], ours[name], atol=1e-4, rtol=1e-3)


def test_fsdp_spreads_the_model(runs) -> None:
    shards = sorted((runs[0] / "fsdp" / "checkpoints" / "step-00000006").glob("*.distcp"))
    assert [shard.name[:4] for shard in shards] == ["__0_", "__1_"]
    sizes = [shard.stat().st_size for shard in shards]
    assert min(sizes) > 0.7 * max(sizes)


@pytest.mark.parametrize("name", ["resumed", "damaged"])
def test_fsdp_resumes(runs, name: str) -> None:
    straight, resumed = runs[0] / "fsdp", runs[0] / name
    assert losses(resumed) == losses(straight)
    first, second = weights(straight), weights(resumed)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert {"step": 3, "event": "resumed"} in read_log(resumed / "log.jsonl")


def test_one_damaged_shard_is_said_once(runs) -> None:
    assert runs[1].count("is damaged (__1_0.distcp") == 1


def test_one_process_goes_on_from_two(runs, single: Path, make_recipe, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(runs[0] / "fsdp", out)
    shutil.rmtree(out / "checkpoints" / "step-00000006")
    (out / "card.json").unlink()
    train(make_recipe(micro_batch_tokens=32), out, resume="must")
    assert losses(out) == pytest.approx(losses(single), abs=1e-5)
