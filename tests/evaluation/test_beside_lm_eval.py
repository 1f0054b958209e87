"""RULER's tasks by lm-eval alone and by us: the same answers to the same samples."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

pytest.importorskip("lm_eval")
pytest.importorskip("wonderwords")

from path_attention import cli
from path_attention.evaluation.generated.ruler import ruler_sample
from path_attention.evaluation.harness import beside_lm_eval
from path_attention.evaluation.harness.beside_lm_eval import lm_eval_task, lm_eval_words
from path_attention.evaluation.harness.language_model import CausalLM
from path_attention.models import PathAttentionConfig, PathAttentionForCausalLM
from path_attention.results import read_result
from path_attention.training.corpus import build_corpus

LENGTH = 1200
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("beside")
    task = "Memorize and track the chain(s) of variable assignment hidden in the following text. "
    words = " ".join(lm_eval_words().words[::20])
    (folder / "text.txt").write_text(50 * (NOISE + task + "VAR QXZ = VAR ABC ") + words)
    corpus = build_corpus(
        str(folder / "text.txt"), folder / "corpus", vocab_size=600, heldout_fraction=0.0,
        progress=False,
    )  # fmt: skip
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"vocab_size": corpus.vocab_size, "intermediate_size": 32}
    shared = {"max_position_embeddings": LENGTH, "initializer_range": 0.3, **sizes}
    for name, model in {
        "path": PathAttentionForCausalLM(PathAttentionConfig.from_preset("path", **shared)),
        "llama": LlamaForCausalLM(LlamaConfig(**shared)),
    }.items():
        model.save_pretrained(folder / name)
        corpus.tokenizer().save_pretrained(folder / name)
    return folder


def beside(out: Path, *words: str) -> list[dict]:
    cli.main(["evaluate", "beside_lm_eval", *words, "--out", str(out), "--device", "cpu"])
    return read_result(out.with_name("beside.json"))["rows"]


def test_the_same_answers_by_both_readers_at_any_batch(folder, tmp_path):
    words = [str(folder / "path"), str(folder / "llama"), "--lengths", str(LENGTH)]
    words += ["--samples", "2", "--batch-sizes", "1", "2", "--tasks", "vt"]
    rows = beside(tmp_path / "beside", *words)
    ways = [("lm-eval", "lm-eval", 2), ("lm-eval", "ours", 1), ("lm-eval", "ours", 2)]
    ways.append(("ours", "ours", 2))
    assert [(r["samples"], r["reader"], r["batch"]) for r in rows] == ways * 2
    assert [row["same"] for row in rows] == [1.0, 1.0, 1.0, None] * 2
    assert {row["model"] for row in rows} == {"path", "llama"}
    assert all(row["documents"] == 2 and 0 <= row["score"] <= 1 for row in rows)
    assert (tmp_path / "beside.png").is_file()
    assert not list(tmp_path.glob("*.partial.json"))


def test_a_reader_that_errs_is_seen_and_a_kill_loses_little(folder, tmp_path, monkeypatch):
    words = [str(folder / "llama"), "--lengths", str(LENGTH), "--samples", "2"]
    words += ["--batch-sizes", "2", "--tasks", "vt", "fwe"]
    encode = CausalLM.tok_encode
    with monkeypatch.context() as patch:
        patch.setattr(CausalLM, "tok_encode", lambda *words: encode(*words)[:-1])
        rows = beside(tmp_path / "errs" / "beside", *words)
    assert [row["column"] for row in rows] == ["vt"] * 3 + ["fwe"] * 3
    assert all(row["same"] == 1 for row in rows if row["reader"] == "lm-eval")
    assert all(row["same"] < 1 for row in rows if row["reader"] == "ours" != row["samples"])
    whole, calls = beside_lm_eval.lm_eval_task, []

    def dies(*arguments):
        calls.append(arguments[0])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(*arguments)

    monkeypatch.setattr(beside_lm_eval, "lm_eval_task", dies)
    with pytest.raises(SystemExit):
        beside(tmp_path / "beside", *words)
    rows = beside(tmp_path / "beside", *words)
    assert [row["same"] for row in rows] == [1.0, 1.0, None] * 2
    assert calls == ["vt", "fwe", "fwe"]  # what is done is not asked for again


def test_blanks_before_an_answer_are_no_difference():
    """lm-eval loses one of them where SentencePiece's tokenizers do, and we do not."""

    def scored(*answers: str) -> list[Any]:
        return [SimpleNamespace(answer=answer) for answer in answers]

    assert beside_lm_eval._share_of_same(scored(" a", "b "), scored("a", "b")) == 0.5


def test_variable_tracking_has_rulers_form_to_the_blank(folder):
    """Both without what is drawn: names, values, and where the noise is."""
    theirs = lm_eval_task("vt", 2 * LENGTH, folder / "llama").task.dataset["test"][0]
    ours = ruler_sample("vt", 0, 2 * LENGTH, lambda text: len(text) // 3, lm_eval_words())

    def form(text: str) -> str:
        text = re.sub(r"The grass .*? back again\.\n ?", "", text)
        return re.sub(r"\d{5}", "N", re.sub(r"\b([A-Z]{3}|[A-Z]{5})\b", "V", text))

    assert ours.delimiter == " "
    assert form(ours.prompt) == form(theirs["input"])
    assert form(ours.prefix) == form(theirs["gen_prefix"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tasks", "qa_1"), "tasks: expected of"),
        (("--samples", "501"), "samples: expected 2 to lm-eval's 500, got 501"),
        (("--batch-sizes", "0"), "batch_sizes: expected numbers above 0"),
    ],
)
def test_bad_options(folder, tmp_path, capsys, words, message):
    with pytest.raises(SystemExit):
        beside(tmp_path / "beside", str(folder / "llama"), *words)
    assert f"error: {message}" in capsys.readouterr().err
