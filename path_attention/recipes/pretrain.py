"""Language models on FineWeb-Edu: the published 760M recipe, and smaller ones, for every preset.

Published (arXiv 2505.16381 §4.2): FineWeb-Edu, 50B tokens, Mistral tokenizer, context 4096, AdamW,
cosine with a warm-up of 1B tokens from 3e-5 to 1e-3 and down to 3e-5, weight decay 0.01, clip 1.0,
2M tokens a batch, weights N(0, 0.02). Open there, and chosen here:

- The shape: FoX's (arXiv 2503.02130), 24 layers of width 1536, 24 heads of 64, SwiGLU of 4096,
  untied embeddings; 777M parameters with RoPE. RoPE's base is 500,000, as there.
- AdamW's betas: (0.9, 0.95).
- 350M (24 layers of 1024, SwiGLU of 2816) and 125M (12 layers of 768, SwiGLU of 2048): 15B and
  2.5B tokens, 20 to 40 a parameter; batches of 0.5M and 0.25M tokens; a warm-up of 2 % of all,
  as there; peaks of 1.5e-3 and 2e-3, with the same share of the peak at both ends.
- A step whose loss or gradient is not finite, or whose loss is 12 deviations above the last 64
  steps', is skipped and said so; 8 in a row end the run.

`steps` does not follow `batch_tokens` when that is overridden: give both, or call `pretrain`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from path_attention.models.presets import PRESETS
from path_attention.training.corpus import CorpusRecipe
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

CONTEXT = 4096
TOKENIZER = "mistralai/Mistral-7B-v0.1"


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model's size and the training that goes with it.

    Attributes:
        layers, width, heads, mlp: of the model; heads of width / heads.
        tokens: of the whole training.
        batch: tokens of a step.
        micro_batch: tokens of one forward pass.
        rate: the peak.
        subset: of FineWeb-Edu, large enough for `tokens`.
    """

    layers: int
    width: int
    heads: int
    mlp: int
    tokens: int
    batch: int
    micro_batch: int
    rate: float
    subset: str


SIZES = {
    "125m": Size(
        layers=12,
        width=768,
        heads=12,
        mlp=2048,
        tokens=2_500_000_000,
        batch=1 << 18,
        micro_batch=1 << 15,
        rate=2e-3,
        subset="sample-10BT",
    ),
    "350m": Size(
        layers=24,
        width=1024,
        heads=16,
        mlp=2816,
        tokens=15_000_000_000,
        batch=1 << 19,
        micro_batch=1 << 15,
        rate=1.5e-3,
        subset="sample-100BT",
    ),
    "760m": Size(
        layers=24,
        width=1536,
        heads=24,
        mlp=4096,
        tokens=50_000_000_000,
        batch=1 << 21,
        micro_batch=1 << 15,
        rate=1e-3,
        subset="sample-100BT",
    ),
}


def pretrain(
    size: str = "760m",
    preset: str = "path_fox",
    *,
    tokens: int | None = None,
    batch_tokens: int | None = None,
    **fields: Any,
) -> Recipe:
    """The recipe of one size and encoding.

    Args:
        size: a name in `SIZES`.
        preset: a name of `PathAttentionConfig.from_preset`.
        tokens: of the whole training; the steps follow.
        batch_tokens: of a step; steps and warm-up follow.
        fields: any other field of `Recipe`.

    Raises:
        ValueError: an unknown size, preset or field; a contradiction.
    """
    for name, value, known in (("size", size, SIZES), ("preset", preset, PRESETS)):
        if value not in known:
            raise ValueError(f"{name}: expected one of {sorted(known)}, got {value!r}")
    unknown = sorted(set(fields) - {field.name for field in dataclasses.fields(Recipe)})
    if unknown:
        raise ValueError(f"fields: expected fields of Recipe, got {unknown}")
    chosen = SIZES[size]
    batch = chosen.batch if batch_tokens is None else batch_tokens
    whole = chosen.tokens if tokens is None else tokens
    ends = 3e-5 / 1e-3
    recipe = Recipe(
        name=f"pretrain_{size}_{preset}",
        model=ModelRecipe(
            preset=preset,
            hidden_size=chosen.width,
            num_hidden_layers=chosen.layers,
            num_attention_heads=chosen.heads,
            intermediate_size=chosen.mlp,
            tie_word_embeddings=False,
            initializer_range=0.02,
            options={"rope_theta": 500_000.0} if preset == "rope" else {},
        ),
        data=DataRecipe(
            context_length=CONTEXT,
            workers=2,
            build=CorpusRecipe(
                sources=("hub:HuggingFaceFW/fineweb-edu",),
                hub_config=chosen.subset,
                tokenizer=TOKENIZER,
                heldout_fraction=0.0005,
                max_tokens=whole + whole // 100,
            ),
        ),
        optimizer=OptimizerRecipe(
            learning_rate=chosen.rate, betas=(0.9, 0.95), weight_decay=0.01, clip=1.0
        ),
        schedule=ScheduleRecipe(warmup_tokens=whole // 50, start=ends, final=ends),
        steps=max(round(whole / batch), 1),
        batch_tokens=batch,
        micro_batch_tokens=min(chosen.micro_batch, batch),
        initialisation="meta",
        guard=GuardRecipe(action="skip", spike=12.0),
        checkpoint=CheckpointRecipe(every=500, keep=2, asynchronous=True),
        log=LogRecipe(every=10, heldout_every=500, heldout_tokens=1 << 21),
    )
    return dataclasses.replace(recipe, **fields)


def _named(size: str, preset: str) -> Callable[[], Recipe]:
    def recipe() -> Recipe:
        return pretrain(size, preset)

    recipe.__name__ = f"pretrain_{size}_{preset}"
    recipe.__doc__ = f"{size.upper()} parameters with preset {preset} on FineWeb-Edu."
    return recipe


PRETRAIN = {
    recipe.__name__: recipe
    for recipe in (_named(size, preset) for size in SIZES for preset in PRESETS)
}
