"""A small corpus of made-up code, and a recipe that trains on it in a second."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_run import small_recipe, write_texts

from path_attention.training.corpus import TokenCorpus, build_corpus
from path_attention.training.recipe import Recipe


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("source") / "texts")


@pytest.fixture(scope="session")
def corpus(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenCorpus:
    out = tmp_path_factory.mktemp("corpora") / "corpus"
    return build_corpus(str(texts), out, vocab_size=300, heldout_fraction=0.2, progress=False)


@pytest.fixture
def make_recipe(corpus: TokenCorpus) -> Callable[..., Recipe]:
    """The small recipe; keywords replace its fields."""

    def make(**fields: Any) -> Recipe:
        return dataclasses.replace(small_recipe(corpus.path), **fields)

    return make
