"""docs/how-to-train.md: its code runs, and its commands name options that there are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from path_attention.cli import main
from path_attention.models import PathAttentionConfig, PathAttentionForCausalLM
from path_attention.ops.packing import Packing
from path_attention.recipes import RECIPES, find_recipe

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "how-to-train.md").read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", TEXT, flags=re.S)


def test_the_recipe_of_ones_own_is_one(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(CODE[0])
    recipe = find_recipe(f"{file}:small")()
    assert recipe.steps * recipe.batch_tokens == pytest.approx(500_000_000, rel=1e-3)


# a thread of gloo's that lets a tensor go while Python ends takes the process with it (SIGABRT)
NO_THREAD_IS_LEFT = """
import pathlib
threads = [task.read_text() for task in pathlib.Path("/proc/self/task").glob("*/comm")]
assert not any("gloo" in name for name in threads), threads
"""


def test_the_long_sequence_runs_on_two_processes(tmp_path: Path) -> None:
    file = tmp_path / "long.py"
    file.write_text(CODE[1] + NO_THREAD_IS_LEFT)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "--redirects", "1", "--log-dir", str(tmp_path / "said"), str(file)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    # a file for each process: through one pipe their lines may run into each other
    said = "".join(path.read_text() for path in (tmp_path / "said").rglob("stdout.log"))
    found = re.findall(r"process (\d): 2048 tokens, loss (\S+)", said)
    assert sorted(rank for rank, _ in found) == ["0", "1"]
    torch.manual_seed(0)
    config = PathAttentionConfig.from_preset(
        "path_fox", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=256
    )
    model = PathAttentionForCausalLM(config)
    ids, packing = torch.randint(256, (1, 4096)), Packing.from_lengths([3000, 1096])
    with torch.no_grad():
        whole = model(ids, labels=ids, packing=packing).loss.item()
    assert [float(loss) for _, loss in found] == pytest.approx([whole] * 2, abs=2e-5)


def test_the_loop_of_ones_own_packs_and_checkpoints() -> None:
    torch.manual_seed(0)
    names: dict = {}
    exec(CODE[2].replace("optimizer.step()", ""), names)
    model, ids = names["model"], names["ids"]
    checkpointed = [p.grad.clone() for p in model.parameters()]
    model.gradient_checkpointing_disable()
    model.zero_grad()
    apart = [
        model(part, labels=part, num_items_in_batch=998).loss for part in ids.split([700, 300], 1)
    ]
    sum(apart).backward()
    torch.testing.assert_close(sum(apart), names["loss"])
    for parameter, grad in zip(model.parameters(), checkpointed, strict=True):
        allowed = 64 * torch.finfo(torch.float32).eps * grad.abs().max().item()
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=allowed)
    with pytest.raises(ValueError, match="cache: expected none with gradient checkpointing"):
        model.gradient_checkpointing_enable()
        model(ids, use_cache=True)


def options_of(words: list[str], capsys) -> str:
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    return re.sub(r"[│\s]+", " ", capsys.readouterr().out)


def test_commands_name_options_that_there_are(capsys) -> None:
    known = options_of(["train", "pretrain_125m_path"], capsys)
    for words in ("corpus build", "corpus texts", "compare train", "benchmark training"):
        known += options_of(words.split(), capsys)
    launcher = {"--standalone", "--nproc-per-node", "--nnodes", "--rdzv-backend", "--rdzv-endpoint"}
    slurm = {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--cpus-per-task", "--time"}
    slurm |= {"--signal", "--requeue", "--open-mode", "--rdzv-id"}
    others = launcher | slurm | {"--help", "--no-deps"}
    named = set(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", TEXT)) - others
    assert named and {name for name in named if name not in known} == set()
    recipes = set(re.findall(r"pretrain_\d+m_\w+|demo_\w+", TEXT))
    assert recipes and recipes <= set(RECIPES)
