"""DDP and FSDP2 over two gloo processes give what one process gives."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_run import checked_recipe, scaled_recipe, small_recipe

from path_attention.training.log import read_log
from path_attention.training.loop import train


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in read_log(out / "log.jsonl") if "loss" in line]


def heldout(out: Path) -> float:
    return [x["heldout_loss"] for x in read_log(out / "log.jsonl") if "heldout_loss" in x][-1]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def singles(corpus, tmp_path_factory) -> Path:
    """The same runs by one process."""
    out = tmp_path_factory.mktemp("singles")
    train(dataclasses.replace(small_recipe(corpus.path), micro_batch_tokens=32), out / "whole")
    train(scaled_recipe(corpus.path), out / "scaled")
    train(dataclasses.replace(scaled_recipe(corpus.path), precision="bfloat16"), out / "half")
    train(checked_recipe(corpus.path), out / "skipped")
    return out


@pytest.fixture(scope="module")
def single(singles: Path) -> Path:
    return singles / "whole"


@pytest.fixture(scope="module")
def runs(corpus, singles: Path, tmp_path_factory) -> tuple[Path, str]:
    """The folder of all runs, and what torchrun said."""
    out = tmp_path_factory.mktemp("runs")
    shutil.copytree(singles / "scaled", out / "from-one")
    shutil.rmtree(out / "from-one" / "checkpoints" / "step-00000006")
    shutil.rmtree(out / "from-one" / "model")
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


@pytest.mark.parametrize("name", ["scaled-ddp", "scaled-fsdp", "from-one"])
def test_meta_starts_checkpointing_and_asynchronous_saving(runs, singles: Path, name: str) -> None:
    """Two processes, or one and then two, with everything switched on."""
    out, alone = runs[0] / name, singles / "scaled"
    assert losses(out) == pytest.approx(losses(alone), abs=1e-5)
    theirs, ours = weights(out), weights(alone)
    for key in ours:
        torch.testing.assert_close(theirs[key], ours[key], atol=1e-4, rtol=1e-3)
    steps = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert steps == ["step-00000003", "step-00000006"]
    resumed = {"step": 3, "event": "resumed"} in read_log(out / "log.jsonl")
    assert resumed == (name == "from-one")


def test_one_process_goes_on_from_an_asynchronous_checkpoint_of_two(
    runs, singles: Path, corpus, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(runs[0] / "scaled-fsdp", out)
    shutil.rmtree(out / "checkpoints" / "step-00000006")
    (out / "card.json").unlink()
    train(scaled_recipe(corpus.path), out, resume="must")
    assert losses(out) == pytest.approx(losses(singles / "scaled"), abs=1e-5)


def test_sixteen_bits_spread_as_alone(runs, singles: Path) -> None:
    """What travels in bfloat16 is what autocast would round: the rest is the order of sums."""
    half, alone = losses(runs[0] / "half-fsdp"), losses(singles / "half")
    assert half == pytest.approx(alone, rel=2e-3) and half != losses(singles / "scaled")


def test_bad_steps_are_skipped_on_all_processes(runs, singles: Path) -> None:
    def events(out: Path) -> list[dict]:
        return [line for line in read_log(out / "log.jsonl") if "event" in line]

    two, one = events(runs[0] / "skipped"), events(singles / "skipped")
    assert one and [line["step"] for line in two] == [line["step"] for line in one]
    assert [line["documents"] for line in two] == [line["documents"] for line in one]
    assert losses(runs[0] / "skipped") == pytest.approx(losses(singles / "skipped"), abs=1e-4)
