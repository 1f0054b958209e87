"""Recipes are complete, found by name, and the demo's two differ in their encoding alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from path_attention.models import PathAttentionConfig
from path_attention.recipes import RECIPES, demo_path, demo_rope, find_recipe, recipe_usage
from path_attention.training.recipe import Recipe


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_complete(name: str) -> None:
    recipe = RECIPES[name]()
    assert isinstance(recipe, Recipe) and recipe.name == name
    PathAttentionConfig.from_preset(recipe.model.preset, **recipe.model.overrides())
    assert (RECIPES[name].__doc__ or "").strip() and name in recipe_usage("x")
    assert find_recipe(name) is find_recipe(name.replace("_", "-")) is RECIPES[name]


def test_the_demo_differs_in_the_encoding_alone() -> None:
    path, rope = demo_path().course(), demo_rope().course()
    assert {key for key in path if path[key] != rope[key]} == {"model.preset"}
    assert (path["model.preset"], rope["model.preset"]) == ("path", "rope")


def test_a_recipe_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "mine.py"
    (tmp_path / "a_neighbour_of_mine.py").write_text("other = 3\n")
    file.write_text(
        "from a_neighbour_of_mine import other\nfrom path_attention.recipes import demo_path\n"
        "def mine():\n    return demo_path()\n"
    )
    assert find_recipe(f"{file}:mine")().name == "demo_path"
    with pytest.raises(ValueError, match="has no function 'other'"):
        find_recipe(f"{file}:other")
    with pytest.raises(ValueError, match="expected a Python file before the colon"):
        find_recipe(f"{tmp_path}/none.py:mine")
    with pytest.raises(ValueError, match="RECIPE: expected one of"):
        find_recipe("demo")
