"""Small language models that differ in their position encoding alone, on the same real tokens.

31M parameters, 100M tokens of code and prose, a context of 2,048: an afternoon's comparison on one
GPU, not the published one (`pretrain.py`), and what it leaves open is chosen as there. Else:

- 6 layers of width 512, 8 heads of 64, SwiGLU of 1792, a vocabulary of 16,384 whose embedding is
  the output projection too.
- Batches of 65,536 tokens, a peak rate of 2e-3 after 5 % of the steps, weight decay 0.1.
- A step whose loss or gradient is not finite is skipped and said so; 8 in a row end the run.
- "path_bounded" is PaTH with β < 2 − 2⁻⁷, the largest number below 2 that bfloat16 has.

Models of one seed see the same rows in the same order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from path_attention.training.recipe import (
    CheckpointRecipe,
    DataRecipe,
    GuardRecipe,
    LogRecipe,
    ModelRecipe,
    OptimizerRecipe,
    Recipe,
    ScheduleRecipe,
)

# name → preset, and fields of the configuration
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "rope": ("rope", {"rope_theta": 500_000.0}),
    "path": ("path", {}),
    "fox": ("fox", {}),
    "path_fox": ("path_fox", {}),
    "path_bounded": ("path", {"beta_max": 2 - 2**-7}),
    "alibi": ("alibi", {}),
    "path_alibi": ("path_alibi", {}),
    "rope_10000": ("rope", {"rope_theta": 10_000.0}),
    "rotation_random": ("rotation_random", {}),
    "rotation_random_qkv": ("rotation_random_qkv", {}),
    "rotation_random_rope": ("rotation_random", {"rotation_bound": None}),
    "rotation_random_rope_qkv": ("rotation_random_qkv", {"rotation_bound": None}),
    "rotation_learned": ("rotation_learned", {}),
    "rotation_learned_qkv": ("rotation_learned_qkv", {}),
    "rotation_learned_forget": ("rotation_learned", {"decay": "forget"}),
}
COMPARED = ("rope", "path", "fox", "path_fox", "path_bounded", "alibi", "path_alibi")
VOCABULARY = 16384
KEPT = "rope_seed0"  # the run whose checkpoints are kept: what a conversion starts from
MILESTONES = (0.1, 0.5, 1.0)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What every model of a comparison gets alike.

    Attributes:
        tokens: of the training, rounded up to ten times whole batches.
        batch_tokens: of a step.
        micro_batch_tokens: of one forward pass.
        context_length: the longest piece of a document.
        layers, width, heads, mlp: of the model.
        learning_rate: the peak.
        compile: a backend of `torch.compile` for the blocks.
        fused: kernels of liger-kernel.
    """

    tokens: int = 100_000_000
    batch_tokens: int = 65536
    micro_batch_tokens: int = 65536
    context_length: int = 2048
    layers: int = 6
    width: int = 512
    heads: int = 8
    mlp: int = 1792
    learning_rate: float = 2e-3
    compile: str | None = None
    fused: bool = False

    @property
    def steps(self) -> int:
        """A multiple of ten, so that a tenth and a half are whole steps."""
        return 10 * math.ceil(self.tokens / (10 * self.batch_tokens))


def compared_model(name: str, seed: int, corpus: Path, budget: Budget) -> Recipe:
    """The recipe of one run.

    Raises ValueError on an unknown name.
    """
    if name not in MODELS:
        raise ValueError(f"models: expected some of {list(MODELS)}, got {name!r}")
    preset, options = MODELS[name]
    steps, run = budget.steps, f"{name}_seed{seed}"
    kept = run == KEPT
    return Recipe(
        name=run,
        model=ModelRecipe(
            preset=preset,
            hidden_size=budget.width,
            num_hidden_layers=budget.layers,
            num_attention_heads=budget.heads,
            intermediate_size=budget.mlp,
            tie_word_embeddings=True,
            initializer_range=0.02,
            options=options,
        ),
        data=DataRecipe(context_length=budget.context_length, corpus=corpus, workers=2),
        optimizer=OptimizerRecipe(
            learning_rate=budget.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, clip=1.0
        ),
        schedule=ScheduleRecipe(warmup_steps=steps // 20, final=0.03),
        steps=steps,
        batch_tokens=budget.batch_tokens,
        micro_batch_tokens=budget.micro_batch_tokens,
        compile=budget.compile,
        fused=budget.fused,
        seed=seed,
        guard=GuardRecipe(action="skip"),
        checkpoint=CheckpointRecipe(
            every=steps // 10 if kept else max(steps // 4, 1), keep=10 if kept else 1
        ),
        log=LogRecipe(
            every=10,
            heldout_every=steps // 10,
            heldout_tokens=4 * budget.batch_tokens,
            tensorboard=False,
            progress=False,
        ),
    )


def milestones(recipe: Recipe) -> dict[str, int]:
    """Steps whose checkpoints a kept run exports, by name."""
    if recipe.name != KEPT:
        return {}
    return {
        f"step-{round(share * recipe.steps)}": round(share * recipe.steps) for share in MILESTONES
    }
