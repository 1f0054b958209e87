"""What `test_spread_conversion.py` runs under torchrun."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path

from small_conversion import small_conversion

from path_attention.conversion.pipeline import convert
from path_attention.training.processes import start_processes


def main(pretrained: Path, out: Path, *corpora: Path) -> None:
    base = small_conversion(corpora)
    with start_processes("cpu") as processes:
        for parallel in ("ddp", "fsdp"):
            convert(pretrained, dataclasses.replace(base, parallel=parallel), out / parallel)
        half = dataclasses.replace(base, parallel="fsdp", precision="bfloat16")
        half = dataclasses.replace(half, activation_checkpointing=True)
        convert(pretrained, half, out / "half")
        if processes.first:
            shutil.copytree(out / "fsdp", out / "resumed")
            shutil.rmtree(out / "resumed" / "pretraining")
            for name in ("model", "checkpoints/step-00000004"):
                shutil.rmtree(out / "resumed" / "logits" / name)
        processes.wait()
        convert(pretrained, dataclasses.replace(base, parallel="fsdp"), out / "resumed")
        lora = dataclasses.replace(base.logits, trainable="lora")
        none = dataclasses.replace(base.pretraining, tokens=0)
        lora = dataclasses.replace(base, logits=lora, pretraining=none)
        for parallel in ("ddp", "fsdp"):
            convert(
                pretrained, dataclasses.replace(lora, parallel=parallel), out / f"lora-{parallel}"
            )


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
