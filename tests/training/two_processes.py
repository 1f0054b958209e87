"""What `test_two_processes.py` runs under torchrun: one start of two processes for every case."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path

from small_run import small_recipe

from path_attention.training.loop import train
from path_attention.training.processes import start_processes


def main(corpus: Path, out: Path) -> None:
    base = dataclasses.replace(small_recipe(corpus), micro_batch_tokens=32)
    with start_processes("cpu") as processes:
        assert processes.count == 2
        train(dataclasses.replace(base, parallel="ddp"), out / "ddp")
        train(dataclasses.replace(base, parallel="fsdp"), out / "fsdp")
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
