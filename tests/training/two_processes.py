"""What `test_two_processes.py` runs under torchrun: one start of two processes for every case."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path

import torch
from small_run import checked_recipe, scaled_recipe, small_recipe

from path_attention.models import PathAttentionConfig, PathAttentionForCausalLM
from path_attention.training.loop import train
from path_attention.training.processes import Processes, spread, start_processes


def main(corpus: Path, out: Path) -> None:
    base = dataclasses.replace(small_recipe(corpus), micro_batch_tokens=32)
    with start_processes("cpu") as processes:
        assert processes.count == 2
        check_dtypes(processes)
        train(dataclasses.replace(base, parallel="ddp"), out / "ddp")
        train(dataclasses.replace(base, parallel="fsdp"), out / "fsdp")
        scaled = scaled_recipe(corpus)
        for parallel in ("ddp", "fsdp"):
            train(dataclasses.replace(scaled, parallel=parallel), out / f"scaled-{parallel}")
        half = dataclasses.replace(scaled, precision="bfloat16", parallel="fsdp")
        train(half, out / "half-fsdp")
        train(dataclasses.replace(checked_recipe(corpus), parallel="fsdp"), out / "skipped")
        if processes.first:
            shutil.copytree(out / "fsdp", out / "resumed")
            shutil.rmtree(out / "resumed" / "checkpoints" / "step-00000006")
            shutil.rmtree(out / "resumed" / "model")
            shard = out / "fsdp" / "checkpoints" / "step-00000006" / "__1_0.distcp"
            shutil.copytree(out / "resumed", out / "damaged")
            shutil.copytree(shard.parent, out / "damaged" / "checkpoints" / shard.parent.name)
            (out / "damaged" / "checkpoints" / shard.parent.name / shard.name).write_bytes(b"")
        processes.wait()
        train(dataclasses.replace(base, parallel="fsdp"), out / "resumed", resume="must")
        train(dataclasses.replace(base, parallel="fsdp"), out / "damaged", resume="must")
        # a run of one process, interrupted there (by the test) after its third step
        train(dataclasses.replace(scaled, parallel="fsdp"), out / "from-one", resume="must")


def check_dtypes(processes: Processes) -> None:
    """Matrices travel and multiply in 16 bits; norms, gates, taps and the embedding in 32."""
    config = PathAttentionConfig.from_preset(
        "path_fox", hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    model = spread(PathAttentionForCausalLM(config), "fsdp", processes, torch.bfloat16)
    seen = {}

    def note(module: torch.nn.Module, name: str) -> None:
        def hook(*_: object) -> None:
            own = module.named_parameters(recurse=False)
            seen.update({f"{name}.{key}": p.dtype for key, p in own})

        module.register_forward_pre_hook(hook)  # behind the sharding

    for name, module in model.named_modules():
        note(module, name)
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=torch.arange(8)[None] + 8 * processes.rank, use_cache=False)
    block = "model.layers.0"
    halves = {name for name, dtype in seen.items() if dtype == torch.bfloat16}
    names = [f"attention.{n}_proj" for n in "qkvo"] + [
        f"mlp.{n}_proj" for n in ("gate", "up", "down")
    ]
    names += ["attention.transport.w_proj.0", "attention.transport.w_proj.1"]
    assert halves == {f"{block}.{name}.weight" for name in names}, halves
    assert {seen[f"{block}.attention.decay.forget_proj.weight"]} == {torch.float32}
    assert all(p.dtype == torch.float32 for p in model.parameters())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
