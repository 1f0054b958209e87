"""The commands `path-attention train` and `path-attention corpus build`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from path_attention.training.corpus import CorpusRecipe, build
from path_attention.training.export import export_step
from path_attention.training.loop import Resume, train
from path_attention.training.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a language model by a recipe, any part of which may be overridden.

    Ends with 128 + the signal's number when SIGINT or SIGTERM stopped it (after saving); the same
    command then goes on. With several processes:
    `torchrun --nproc-per-node N -m path_attention.cli train RECIPE …`.
    """

    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
    out: Path
    """The run's folder."""
    resume: Resume = "auto"
    """From the latest checkpoint in `out`: "auto" if there is one, "must", or "never"."""

    @classmethod
    def of(cls, recipe: Recipe) -> Train:
        """The command with this recipe's values as defaults."""
        return cls(recipe=recipe, out=Path("runs") / recipe.name)

    def run(self) -> None:
        outcome = train(self.recipe, self.out, resume=self.resume)
        if outcome.signal is not None:
            raise SystemExit(128 + outcome.signal)


@dataclass(frozen=True, kw_only=True)
class BuildCorpus:
    """Turn text or code into memory-mapped token files with document borders."""

    corpus: Annotated[CorpusRecipe, tyro.conf.arg(name="")]
    out: Path
    """The corpus's folder. If it holds the same corpus already, nothing is done."""
    overwrite: bool = False
    """Replace a corpus made from other sources or options."""
    processes: int = 1
    """So many make tokens; the corpus is the same."""

    def run(self) -> None:
        build(self.corpus, self.out, self.overwrite, processes=self.processes)
        print(self.out)


@dataclass(frozen=True, kw_only=True)
class ExportCheckpoint:
    """Write a checkpoint of a run as a model's folder, for `from_pretrained` and `convert`."""

    run_folder: Annotated[Path, tyro.conf.Positional]
    """The run's folder."""
    out: Path
    """A new folder."""
    step: int | None = None
    """Of the checkpoint; default: the latest. `--checkpoint.keep` of a run says how many stay."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights written."""

    def run(self) -> None:
        from path_attention.models.loading import hide_loading_bars

        hide_loading_bars()
        step = export_step(self.run_folder, self.step, self.out, self.dtype)
        print(f"{self.out}: step {step}")
