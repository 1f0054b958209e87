"""The laptop demo: two small models that differ in their position encoding alone.

Both learn Python's own standard library for a few minutes on two CPU cores, at a context of 256
tokens; their perplexity is then measured up to 16 times that.
"""

from __future__ import annotations

from path_attention.training.corpus import CorpusRecipe
from path_attention.training.recipe import (
    CheckpointRecipe,
    DataRecipe,
    LogRecipe,
    ModelRecipe,
    OptimizerRecipe,
    Recipe,
    ScheduleRecipe,
)


def demo_path() -> Recipe:
    """A small PaTH model on the standard library's source."""
    return _demo("path")


def demo_rope() -> Recipe:
    """The same with RoPE."""
    return _demo("rope")


def _demo(preset: str) -> Recipe:
    return Recipe(
        name=f"demo_{preset}",
        model=ModelRecipe(
            preset=preset,
            hidden_size=192,
            num_hidden_layers=4,
            num_attention_heads=3,
            tie_word_embeddings=True,
            initializer_range=0.06,
        ),
        data=DataRecipe(context_length=256, build=CorpusRecipe(vocab_size=4096)),
        optimizer=OptimizerRecipe(learning_rate=3e-3),
        schedule=ScheduleRecipe(warmup_steps=40),
        steps=500,
        batch_tokens=2048,
        checkpoint=CheckpointRecipe(every=250),
        log=LogRecipe(every=50, heldout_every=None, heldout_tokens=65536),
    )
