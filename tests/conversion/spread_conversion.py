"""What `test_spread_conversion.py` runs under torchrun."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path

from small_conversion import divergence_alone, small_conversion

from path_attention.conversion.pipeline import convert
from path_attention.training.processes import start_processes


def main(pretrained: Path, out: Path, *corpora: Path) -> None:
    base = small_conversion(corpora)
    with start_processes("cpu") as processes:
        for parallel in ("ddp", "fsdp"):
            convert(pretrained, dataclasses.replace(base, parallel=parallel), out / parallel)
        half = divergence_alone(corpora, precision="bfloat16", parallel="fsdp")
        half = dataclasses.replace(half, activation_checkpointing=True)
        convert(pretrained, half, out / "half")
        if processes.first:
            shutil.copytree(out / "fsdp", out / "resumed")
            shutil.rmtree(out / "resumed" / "pretraining")
            for name in ("model", "checkpoints/step-00000004"):
                shutil.rmtree(out / "resumed" / "logits" / name)
        processes.wait()
        convert(pretrained, dataclasses.replace(base, parallel="fsdp"), out / "resumed")
        for parallel in ("ddp", "fsdp"):
            lora = divergence_alone(corpora, trainable="lora", parallel=parallel)
            convert(pretrained, lora, out / f"lora-{parallel}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
