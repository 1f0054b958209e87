"""A tiny pretrained model with a tokenizer, and corpora made with it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from families import make_teacher

from path_attention.training.corpus import TokenCorpus, build_corpus


def write_texts(folder: Path, count: int, seed: int) -> Path:
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(count):
        lines = [
            f"def f{rng.randrange(9)}(x):\n    return x + {rng.randrange(100)}\n"
            for _ in range(rng.randrange(1, 30))
        ]
        (folder / f"file{n:02}.py").write_text("".join(lines))
    return folder


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[TokenCorpus]:
    """Two corpora of one tokenizer."""
    out = tmp_path_factory.mktemp("corpora")
    first = build_corpus(
        str(write_texts(out / "a", 30, 0)),
        out / "first",
        vocab_size=300,
        heldout_fraction=0.2,
        progress=False,
    )
    second = build_corpus(
        str(write_texts(out / "b", 20, 1)),
        out / "second",
        tokenizer=str(first.path / "tokenizer"),
        heldout_fraction=0.2,
        progress=False,
    )
    return [first, second]


@pytest.fixture(scope="session")
def pretrained(corpora: list[TokenCorpus], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Llama model that fits the corpora."""
    folder = tmp_path_factory.mktemp("pretrained") / "model"
    model = make_teacher("llama", vocab_size=corpora[0].vocab_size)
    model.save_pretrained(folder)
    corpora[0].tokenizer().save_pretrained(folder)
    return folder
