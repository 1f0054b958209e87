"""Recipes: functions without arguments that return a complete `Recipe`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

from path_attention.recipes.demo import demo_path, demo_rope
from path_attention.recipes.pretrain import PRETRAIN, pretrain
from path_attention.training.recipe import Recipe

RECIPES: dict[str, Callable[[], Recipe]] = {
    **{recipe.__name__: recipe for recipe in (demo_path, demo_rope)},
    **PRETRAIN,
}

__all__ = ["RECIPES", "demo_path", "demo_rope", "find_recipe", "pretrain", "recipe_usage"]


def find_recipe(name: str) -> Callable[[], Recipe]:
    """The recipe function of this name ("-" may stand for "_"), or "FILE.py:FUNCTION".

    The file may import its neighbours, as a script may. Raises ValueError if there is none.
    """
    file, separator, function = name.rpartition(":")
    if separator:
        return _from_file(Path(file), function)
    if name.replace("-", "_") not in RECIPES:
        raise ValueError(
            f"RECIPE: expected one of {sorted(RECIPES)} or FILE.py:FUNCTION, got {name!r}"
        )
    return RECIPES[name.replace("-", "_")]


def recipe_usage(prog: str) -> str:
    """Help on the recipes."""
    lines = [f"usage: {prog} RECIPE [overrides]   ({prog} RECIPE --help shows them)", ""]
    width = max(map(len, RECIPES))
    for name, recipe in RECIPES.items():
        lines.append(f"  {name:{width}}  {(recipe.__doc__ or '').splitlines()[0]}")
    return "\n".join([*lines, "", "  FILE.py:FUNCTION  your own function that returns a Recipe"])


def _from_file(file: Path, function: str) -> Callable[[], Recipe]:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise ValueError(f"RECIPE: expected a Python file before the colon, got {str(file)!r}")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent.resolve()))
    spec.loader.exec_module(module)
    if not callable(getattr(module, function, None)):
        raise ValueError(f"RECIPE: {file} has no function {function!r}")
    return getattr(module, function)
