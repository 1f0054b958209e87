"""A conversion of a few steps on a CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from path_attention.conversion.objectives import Trainable
from path_attention.conversion.recipe import NO_SCORES, ConversionRecipe, StageRecipe
from path_attention.training.recipe import CheckpointRecipe, LogRecipe


def small_conversion(corpora: Sequence[Path], **fields: Any) -> ConversionRecipe:
    """Three stages of 4 steps on a mixture 2:1."""

    def stage(**more: Any) -> StageRecipe:
        sizes = {"tokens": 500, "context_length": 24, "batch_tokens": 128}
        return StageRecipe(**{**sizes, "micro_batch_tokens": 64, "learning_rate": 3e-3, **more})

    recipe: dict[str, Any] = {
        "to": "path_fox",
        "direction_rank": 4,
        "attention": stage(trainable="attention"),
        "logits": stage(),
        "pretraining": stage(),
        "data": tuple(f"{path}={w}" for path, w in zip(corpora, (2, 1), strict=True)),
        "report": dataclasses.replace(NO_SCORES, tokens=300, context=24),
        "precision": "float32",
        "device": "cpu",
        "workers": 0,
        "checkpoint": CheckpointRecipe(every=2, keep=3),
        "log": LogRecipe(
            every=1, heldout_every=None, heldout_tokens=128, tensorboard=False, progress=False
        ),
    }
    return ConversionRecipe(**{**recipe, **fields})


def divergence_alone(
    corpora: Sequence[Path], trainable: Trainable = "all", **fields: Any
) -> ConversionRecipe:
    """The second of the three stages."""
    recipe = small_conversion(corpora, **fields)
    return dataclasses.replace(
        recipe,
        attention=dataclasses.replace(recipe.attention, tokens=0),
        logits=dataclasses.replace(recipe.logits, trainable=trainable),
        pretraining=dataclasses.replace(recipe.pretraining, tokens=0),
    )
