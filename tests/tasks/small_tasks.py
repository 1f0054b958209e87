"""Runs small enough to train in a test."""

from __future__ import annotations

from path_attention.tasks.mqrar import Mqrar
from path_attention.tasks.recipe import TaskRecipe

SMALL = TaskRecipe(
    task=Mqrar(pairs=5, keys=2, values=2),
    encoding="path",
    width=16,
    heads=2,
    options={"direction_rank": 4},
    steps=6,
    batch=3,
    warmup_steps=2,
    check_every=2,
    precision="float32",
)
