"""How far encodings extrapolate: thirteen of them, trained at 512 tokens, measured up to 65,536.

The experiment of arXiv 2606.24975: 16 layers of width 768, a context of 512, perplexity at each
length over that at 512. It leaves open, and is chosen here: 12 heads of 64, the law of the random
angles (uniform in ± 0.25, `AttentionConfig.rotation_bound`), RoPE's base (10,000), the optimiser
(as `language_models` has it) and the number of tokens. Its author's notes (`LearnedAngles` names
them) have 8 heads of 96, random angles uniform in ± RoPE's angle a step of each pair and drawn anew
in each pass (`…_rope` has that law, drawn once), a peak rate of 5e-4 and 200,000 steps of 16,384
tokens; learned angles are theirs. Its text is OpenWebText, ours is what a corpus holds. A "small"
size fits many runs on one device.

Models of one seed see the same rows in the same order and differ in their encoding alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from path_attention.recipes.compare_command import CompareModels
from path_attention.recipes.language_models import Budget

# model → what tables call it
TITLES = {
    "rope_10000": "RoPE",
    "rotation_random": "random rotation, q/k",
    "rotation_random_qkv": "random rotation, q/k/v",
    "rotation_learned": "learned rotation, q/k",
    "rotation_learned_qkv": "learned rotation, q/k/v",
    "alibi": "ALiBi",
    "path": "PaTH",
    "path_fox": "PaTH-FoX",
    "path_alibi": "PaTH-ALiBi",
    "rotation_learned_forget": "learned rotation + gate",
    "fox": "FoX",
    "rotation_random_rope": "random rotation by RoPE's frequencies, q/k",
    "rotation_random_rope_qkv": "random rotation by RoPE's frequencies, q/k/v",
}
CONTEXT = 512  # tokens that models are trained at
# (model, length) → perplexity over that at the same. Which of the two random rotations has 1.60
# at 8,192 is not said there; by its author's notes the first.
PUBLISHED: dict[tuple[str, int], float] = {
    ("rope_10000", 8192): 16.2,
    ("rotation_random", 8192): 1.60,
    ("rotation_random", 65536): 7.49,
    ("rotation_random_qkv", 65536): 1.59,
    ("rotation_random_rope", 8192): 1.60,
    ("rotation_random_rope", 65536): 7.49,
    ("rotation_random_rope_qkv", 65536): 1.59,
    ("alibi", 65536): 0.96,
}
SIZES = {
    "paper": Budget(
        tokens=200_000_000,
        micro_batch_tokens=32768,
        context_length=CONTEXT,
        layers=16,
        width=768,
        heads=12,
        mlp=2048,
        learning_rate=1e-3,
    ),
    "small": Budget(
        tokens=50_000_000, context_length=CONTEXT, layers=6, width=384, heads=6, mlp=1024
    ),
}


@dataclass(frozen=True, kw_only=True)
class TrainExtrapolation:
    """Train the experiment's models and measure each by length: `compare train` with its sizes.

    What has its results is not done again; an interrupted run goes on from its last checkpoint, and
    SIGTERM saves and stops.
    """

    corpus: Path
    """Of `path-attention corpus build`; held-out documents longer than the longest length are
    measured on."""
    size: Literal["paper", "small"] = "paper"
    """paper: 16 layers of width 768, 200M tokens; small: 6 layers of width 384, 50M tokens."""
    models: tuple[str, ...] = tuple(TITLES)
    """In order of work."""
    seeds: tuple[int, ...] = (0, 1)
    tokens: int | None = None
    """Of each training, in place of the size's."""
    micro_batch_tokens: int | None = None
    """Tokens of one forward pass, in place of the size's."""
    compile: str | None = None
    """A backend of torch.compile for the blocks."""
    fused: bool = False
    """Use kernels of liger-kernel."""
    parts: tuple[str, ...] = CompareModels.parts
    """Parts of the held-out documents to measure on, each NAME=PATTERN,PATTERN of their names."""
    out: Path = Path("runs/extrapolation")
    """A folder for each run."""
    devices: tuple[str, ...] = ("auto",)
    """cpu, cuda:0, cuda:1 …; auto is every GPU, or the CPU if there is none."""
    each: int = 1
    """Runs on each device, side by side."""
    lengths: str = CompareModels.lengths
    """Tokens of context that perplexity is measured at; ratios are over the first."""
    targets: int = 256
    """Target tokens of a window."""
    windows: int = 24
    """The most windows of a part."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of weights and activations in the evaluation."""

    def run(self) -> None:
        self.comparison().run()

    def comparison(self) -> CompareModels:
        """As `compare train` has it. Raises ValueError on a name that the experiment lacks."""
        for name in self.models:
            if name not in TITLES:
                raise ValueError(f"models: expected some of {list(TITLES)}, got {name!r}")
        changes = {
            "tokens": self.tokens,
            "micro_batch_tokens": self.micro_batch_tokens,
            "compile": self.compile,
        }
        given = {name: value for name, value in changes.items() if value is not None}
        return CompareModels(
            corpus=self.corpus,
            parts=self.parts,
            models=self.models,
            seeds=self.seeds,
            budget=replace(SIZES[self.size], fused=self.fused, **given),
            out=self.out,
            devices=self.devices,
            each=self.each,
            lengths=self.lengths,
            targets=self.targets,
            windows=self.windows,
            dtype=self.dtype,
        )
