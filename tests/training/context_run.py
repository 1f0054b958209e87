"""What `test_context_parallel_training.py` runs under torchrun: rows on several processes."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path

from small_run import checked_recipe, scaled_recipe, twenty_recipe

from path_attention.training.loop import train
from path_attention.training.processes import start_processes
from path_attention.training.recipe import Recipe


def shared(recipe: Recipe, context: int, parallel) -> Recipe:
    return dataclasses.replace(recipe, context_parallel=context, parallel=parallel)


def main(corpus: Path, out: Path) -> None:
    twenty, scaled = twenty_recipe(corpus), scaled_recipe(corpus)
    with start_processes("cpu") as processes:
        train(shared(twenty, 2, "fsdp"), out / "twenty")
        if processes.first:
            shutil.copytree(out / "twenty", out / "ten-and-ten")
            shutil.rmtree(out / "ten-and-ten" / "checkpoints" / "step-00000020")
            shutil.rmtree(out / "ten-and-ten" / "model")
        processes.wait()
        train(shared(twenty, 2, "fsdp"), out / "ten-and-ten", resume="must")
        train(shared(scaled, processes.count, "fsdp"), out / "scaled")
        # a run of one process, interrupted there (by the test) after its third step
        train(shared(scaled, 2, "ddp"), out / "from-one", resume="must")
        train(shared(checked_recipe(corpus), 2, "ddp"), out / "skipped")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
