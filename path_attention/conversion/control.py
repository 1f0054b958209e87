"""A conversion's control: the RoPE teacher trained on for the same tokens with the same recipe.

What a student gains over its teacher by more training alone, whatever its encoding, it gains too.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

from path_attention.conversion.recipe import ConversionRecipe


def control_of(recipe: ConversionRecipe) -> ConversionRecipe:
    """The control's recipe: next-token training of the teacher, by the rate, context and batch of
    the stage with the most tokens, for the tokens of all stages, on all parameters.

    Raises ValueError if nothing was trained, or that stage on other corpora than `data`, which the
    control is trained and measured on.
    """
    stages = dict(recipe.stages())
    if not stages:
        raise ValueError("conversion: expected one that trained, got stages without tokens")
    tokens = {name: stage.steps * stage.batch_tokens for name, stage in stages.items()}
    name = max(tokens, key=tokens.__getitem__)
    if recipe.corpora(name) != recipe.data:
        raise ValueError(
            f"conversion: expected its stage {name} on data {recipe.data}, got stage_data "
            f"{recipe.corpora(name)}; `convert MODEL --to rope --data …` trains a teacher on those"
        )
    return dataclasses.replace(
        recipe,
        to="rope",
        start="near_zero",
        attention=dataclasses.replace(recipe.attention, tokens=0),
        logits=dataclasses.replace(recipe.logits, tokens=0),
        pretraining=dataclasses.replace(stages[name], tokens=sum(tokens.values()), trainable="all"),
    )


def read_conversion(folder: Path) -> tuple[str, ConversionRecipe]:
    """The teacher and the recipe of a finished conversion.

    Raises ValueError if there is none in `folder`.
    """
    try:
        source = json.loads((folder / "conversion.json").read_text())["model"]
        card = json.loads((folder / "conversion_card.json").read_text())
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"conversion: expected a finished conversion in {folder}, got {error}"
        ) from error
    return source, _made(ConversionRecipe, card["recipe"])


def _made(kind: Any, value: Any) -> Any:
    """A dataclass, path or tuple by its type, from what JSON made of it."""
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = typing.get_type_hints(kind)
        names = {field.name for field in dataclasses.fields(kind)} & value.keys()
        return typing.cast(Any, kind)(**{name: _made(hints[name], value[name]) for name in names})
    options = typing.get_args(kind)
    if Path in (kind, *options) and isinstance(value, str):
        return Path(value)
    return tuple(value) if isinstance(value, list) else value
