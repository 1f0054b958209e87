"""A small corpus of made-up code, and a recipe that trains on it in a second."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

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


def write_texts(folder: Path, count: int = 40, seed: int = 0) -> Path:
    """Write `count` files of 1 to 30 functions of made-up code."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(count):
        lines = [
            f"def f{rng.randrange(9)}(x):\n    return x + {rng.randrange(100)}\n"
            for _ in range(rng.randrange(1, 30))
        ]
        (folder / f"file{n:02}.py").write_text("".join(lines))
    return folder


def small_recipe(corpus: Path) -> Recipe:
    """Six steps of a model of two layers on a corpus that is there."""
    return Recipe(
        name="small",
        model=ModelRecipe(
            preset="path",
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            tie_word_embeddings=True,
            options={"direction_rank": 4},
        ),
        data=DataRecipe(context_length=24, corpus=corpus, build=CorpusRecipe(sources=("nowhere",))),
        optimizer=OptimizerRecipe(learning_rate=1e-2),
        schedule=ScheduleRecipe(warmup_steps=2),
        steps=6,
        batch_tokens=128,
        precision="float32",
        device="cpu",
        checkpoint=CheckpointRecipe(every=3, keep=3),
        log=LogRecipe(
            every=1, heldout_every=None, heldout_tokens=256, tensorboard=False, progress=False
        ),
    )


def scaled_recipe(corpus: Path) -> Recipe:
    """The same with everything that scales a run switched on."""
    return dataclasses.replace(
        small_recipe(corpus),
        model=dataclasses.replace(small_recipe(corpus).model, preset="path_fox"),
        data=dataclasses.replace(small_recipe(corpus).data, workers=2),
        micro_batch_tokens=32,
        initialisation="meta",
        activation_checkpointing=True,
        checkpoint=CheckpointRecipe(every=3, keep=3, asynchronous=True),
    )


def twenty_recipe(corpus: Path) -> Recipe:
    """Twenty steps with rows made ahead and a checkpoint in the middle; rows of few pieces."""
    recipe = small_recipe(corpus)
    return dataclasses.replace(
        recipe,
        data=dataclasses.replace(recipe.data, context_length=64, workers=3),
        steps=20,
        micro_batch_tokens=64,
        checkpoint=CheckpointRecipe(every=10, keep=3),
    )


def checked_recipe(corpus: Path) -> Recipe:
    """Every step from the third on is a spike: any rise at all is one, and losses swing.

    A rate so high that the loss does not fall makes sure of it.
    """
    return dataclasses.replace(
        small_recipe(corpus),
        micro_batch_tokens=32,
        optimizer=OptimizerRecipe(learning_rate=1.0),
        guard=GuardRecipe(action="skip", spike=1e-6, window=1, most=6),
        steps=5,
    )
