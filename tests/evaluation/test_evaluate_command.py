"""`path-attention evaluate perplexity` as from a shell: a real corpus, both kinds of model."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from path_attention import cli
from path_attention.models import PathAttentionConfig, PathAttentionForCausalLM
from path_attention.results import read_result
from path_attention.training.corpus import TokenCorpus, build_corpus

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    words = [f"word{n}" for n in range(40)]
    rng = random.Random(0)
    (folder / "texts").mkdir()
    for n in range(24):
        (folder / "texts" / f"{n}.txt").write_text(" ".join(rng.choices(words, k=200)))
    corpus = build_corpus(
        str(folder / "texts"),
        folder / "corpus",
        vocab_size=300,
        heldout_fraction=0.4,
        progress=False,
    )
    torch.manual_seed(0)
    sizes = {"vocab_size": corpus.vocab_size, "intermediate_size": 32, **SIZES}
    for name, model in {
        "path": PathAttentionForCausalLM(
            PathAttentionConfig.from_preset("path", max_position_embeddings=64, **sizes)
        ),
        "llama": LlamaForCausalLM(LlamaConfig(max_position_embeddings=64, **sizes)),
    }.items():
        model.save_pretrained(folder / name)
        corpus.tokenizer().save_pretrained(folder / name)
    return folder


def evaluate(folder: Path, out: Path, *options: str, lengths: str = "32,64,128") -> None:
    words = ["evaluate", "perplexity", str(folder / "path"), str(folder / "llama")]
    words += ["--data", str(folder / "corpus"), "--out", str(out), "--device", "cpu"]
    cli.main([*words, "--lengths", lengths, "--targets", "16", "--windows", "6", *options])


def test_both_kinds_of_model_on_the_same_tokens(folder, tmp_path, capsys):
    evaluate(folder, tmp_path / "x.y")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.y.json", "x.y.png"]
    rows = read_result(tmp_path / "x.y.json")["rows"]
    assert {(row["model"], row["training_length"]) for row in rows} == {("path", 64), ("llama", 64)}
    assert len({row["data"] for row in rows}) == 1
    assert [row["length"] for row in rows if row["by"] == "length"] == [32, 64, 128] * 2
    # Models that learnt nothing are near the uniform distribution, at every length.
    vocabulary = TokenCorpus.open(folder / "corpus").vocab_size
    assert all(0.9 < row["perplexity"] / vocabulary < 1.2 for row in rows)
    shown = capsys.readouterr().out
    assert "llama" in shown and "x.y.json" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--lengths", "64,32"), "error: lengths: expected rising"),
        (("--lengths", "32,100000"), "error: lengths: expected at most"),
        (("--device", "tpu"), "error: device: expected one that is here, got 'tpu'"),
        (("--data", "nowhere"), "error: corpus: expected a folder"),
        (("--labels", "a"), "error: labels: expected one for each of the 2 models"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(folder, tmp_path, capsys, options, message):
    with pytest.raises(SystemExit) as exit_:
        evaluate(folder, tmp_path / "x", *options)
    assert exit_.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith(message)
    assert not list(tmp_path.iterdir())
