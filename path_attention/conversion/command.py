"""The commands `path-attention convert` and `path-attention convert fla`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from path_attention.conversion.recipe import BUDGETS, ConversionRecipe, budget
from path_attention.training.loop import Resume


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Turn a pretrained RoPE model into a PaTH model, by distillation and further pretraining.

    Llama, Mistral, Qwen2, Qwen3, SmolLM and SmolLM3 models, and this library's RoPE runs. The same
    command goes on where it stopped. With several processes:
    `torchrun --nproc-per-node N -m path_attention.cli convert MODEL …`.
    """

    model: Annotated[str, tyro.conf.Positional]
    """A name of the hub, a folder, a .gguf file, or a run's folder."""
    recipe: Annotated[ConversionRecipe, tyro.conf.arg(name="")]
    budget: str = "published"
    """Defaults of the stages: published, small, lora, or none (weights and start alone)."""
    out: Path = Path("runs/converted")
    """The conversion's folder."""
    resume: Resume = "auto"
    """From the latest checkpoint of each stage: "auto" if there is one, "must", or "never"."""

    @classmethod
    def defaults(cls, words: Sequence[str]) -> Convert:
        """The command with the budget's values as defaults, by the words of a command line."""
        chosen = "published"
        for n, word in enumerate(words):
            if word == "--budget" and n + 1 < len(words):
                chosen = words[n + 1]
            elif word.startswith("--budget="):
                chosen = word.partition("=")[2]
        if chosen not in BUDGETS:
            raise ValueError(f"budget: expected one of {list(BUDGETS)}, got {chosen!r}")
        return cls(model=tyro.MISSING, recipe=budget(chosen), budget=chosen)

    def run(self) -> None:
        from path_attention.conversion.pipeline import convert
        from path_attention.models.loading import hide_loading_bars

        hide_loading_bars()
        outcome = convert(self.model, self.recipe, self.out, resume=self.resume)
        if outcome is not None and outcome.signal is not None:
            raise SystemExit(128 + outcome.signal)
        print(self.out / "model")


@dataclass(frozen=True, kw_only=True)
class ConvertFla:
    """Turn a `path_attn` model of flash-linear-attention into this library's, or the other way.

    Which way is read from the model's config.json. Weights are copied bit for bit; nothing of
    flash-linear-attention has to be installed.
    """

    model: Annotated[Path, tyro.conf.Positional]
    """Folder of the model, or of a run of this library."""
    out: Path
    """The folder to write."""

    def run(self) -> None:
        from path_attention.conversion.fla import convert_folder
        from path_attention.models.loading import hide_loading_bars

        hide_loading_bars()
        print(convert_folder(self.model, self.out))


@dataclass(frozen=True, kw_only=True)
class ConvertControl:
    """Train a conversion's RoPE teacher on: for the same tokens, on the same data, by the recipe of
    its longest stage. What more training alone gives, the control has too.

    `path-attention convert compare CONVERSION CONTROL` sets them side by side.
    """

    conversion: Annotated[Path, tyro.conf.Positional]
    """Folder of a finished conversion."""
    out: Path | None = None
    """The control's folder; default: CONVERSION-control."""
    resume: Resume = "auto"
    """As in `convert`."""

    def run(self) -> None:
        from path_attention.conversion.control import control_of, read_conversion
        from path_attention.conversion.pipeline import convert
        from path_attention.models.loading import hide_loading_bars

        hide_loading_bars()
        source, recipe = read_conversion(self.conversion)
        out = self.out or self.conversion.with_name(f"{self.conversion.name}-control")
        outcome = convert(source, control_of(recipe), out, resume=self.resume)
        if outcome is not None and outcome.signal is not None:
            raise SystemExit(128 + outcome.signal)
        print(out / "model")
