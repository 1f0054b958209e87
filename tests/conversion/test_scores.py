"""What a conversion's report says of whole models, and its control."""

from __future__ import annotations

import dataclasses
import doctest
import json

import pytest
import torch
from small_conversion import small_conversion
from tokenizers import decoders

from path_attention import cli
from path_attention.conversion import compare, scores
from path_attention.conversion.control import control_of, read_conversion
from path_attention.conversion.pipeline import convert
from path_attention.conversion.recipe import ConversionRecipe, ReportRecipe
from path_attention.conversion.scores import Scorer, read_completions
from path_attention.conversion.teacher import load_teacher
from path_attention.models import load_model
from path_attention.models.loading import load_tokenizer
from path_attention.results import read_result

pytest.importorskip("lm_eval")

REPORT = ReportRecipe(
    tokens=300, context=24, lengths=(16, 64, 4096), targets=8, windows=4, prompts=("def f", "x ="),
    suites=("variable_assignment",), suite_lengths=(100,), samples=4, new_tokens=5,
)  # fmt: skip


@pytest.fixture(scope="module")
def recipe(corpora) -> ConversionRecipe:
    made = small_conversion([corpus.path for corpus in corpora], report=REPORT)
    return dataclasses.replace(
        made,
        attention=dataclasses.replace(made.attention, tokens=0),
        pretraining=dataclasses.replace(made.pretraining, tokens=0),
    )


@pytest.fixture(scope="module")
def converted(pretrained, recipe, tmp_path_factory):
    out = tmp_path_factory.mktemp("scored") / "run"
    convert(pretrained, recipe, out)
    return out


def test_suites_are_those_of_evaluate(converted, pretrained, tmp_path) -> None:
    rows = read_result(converted / "report.json")["rows"]
    words = ["evaluate", "variable_assignment", str(pretrained), str(converted), "--labels"]
    words += ["teacher", "student", "--lengths", "100", "--samples", "4", "--device", "cpu"]
    cli.main([*words, "--out", str(tmp_path)])
    theirs = read_result(tmp_path / "variable_assignment.json")["rows"]
    names = ("model", "column", "length", "metric", "score", "low", "high")
    found = [[row[name] for name in names] for row in rows if row["by"] == "suite"]
    assert found == [[row[name] for name in names] for row in theirs] and len(found) == 8
    page = (converted / "report" / "report.html").read_text()
    for name in ("variable_assignment", "lengths_0", "lengths_1"):
        assert f">{name}</h2>" in page
    card = (converted / "model" / "README.md").read_text()
    assert "## variable_assignment" in card and "| mean of 3 | 100 | mean |" in card


def test_perplexity_by_length_as_far_as_documents_go(converted, corpora, pretrained) -> None:
    rows = [r for r in read_result(converted / "report.json")["rows"] if r["by"] == "context"]
    parts = [corpus.path.name for corpus in corpora]
    assert [(r["corpus"], r["model"], r["length"]) for r in rows] == [
        (part, model, length)
        for part in parts
        for model in ("teacher", "student")
        for length in (16, 64)
    ]
    assert (converted / "report" / "lengths_1.png").stat().st_size > 1000
    from path_attention.evaluation.perplexity_by_length import perplexity_by_length

    again = perplexity_by_length(
        {"teacher": pretrained, "student": converted}, corpora[1], lengths=(16, 64), targets=8,
        windows=4,
    )  # fmt: skip
    expected = [row["perplexity"] for row in again if row["by"] == "length"]
    # the teacher is read as a model of this library here, as transformers' there
    found = [row["perplexity"] for row in rows if row["corpus"] == parts[1]]
    assert found == pytest.approx(expected, rel=1e-4)
    card = (converted / "README.md").read_text()
    assert f"## Perplexity by tokens of context, {parts[0]}" in card
    assert f"| {found[0]:.2f} (" in card


def test_completions_before_and_after(converted, pretrained) -> None:
    lines = read_completions(converted / "report")
    assert [(line["model"], line["prompt"]) for line in lines] == [
        (model, prompt) for model in ("teacher", "student") for prompt in REPORT.prompts
    ]
    tokenizer = load_tokenizer(converted)
    models = {"teacher": load_teacher(pretrained).model, "student": load_model(converted)}
    for line in lines:
        ids = torch.tensor([tokenizer(line["prompt"]).input_ids])
        start = ids.shape[1]
        for _ in range(REPORT.new_tokens):
            after = models[line["model"]](ids).logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, after], 1)
            if int(after) == tokenizer.eos_token_id:
                break
        assert line["answer"] == tokenizer.decode(ids[0, start:], skip_special_tokens=True)
        assert line["answer"].strip().split("\n")[0] in (converted / "README.md").read_text()


def test_completions_keep_their_first_blank(converted, tmp_path, monkeypatch) -> None:
    """Of a tokenizer that drops the one that a text starts with, as SentencePiece's do."""
    tokenizer = load_tokenizer(converted)
    backend = tokenizer.backend_tokenizer
    backend.decoder = decoders.Sequence([backend.decoder, decoders.Strip(" ", 1, 0)])
    written = torch.tensor([tokenizer("  return", add_special_tokens=False).input_ids])
    model = load_model(converted)
    monkeypatch.setattr(model, "generate", lambda ids, **_: torch.cat([ids, written], 1))
    monkeypatch.setattr(scores, "load_model", lambda *_, **__: model)
    monkeypatch.setattr(scores, "load_tokenizer", lambda *_: tokenizer)
    report = dataclasses.replace(REPORT, suites=(), prompts=("def f:",))
    Scorer(report=report, models={"student": converted}, out=tmp_path).measure([])
    assert [line["answer"] for line in read_completions(tmp_path)] == ["  return"]


def test_completions_may_hold_any_character(tmp_path) -> None:
    assert read_completions(tmp_path) == []
    lines = [{"prompt": "a\u2028b", "answer": "\u2029"}, {"prompt": "\u0085", "answer": "\n"}]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (tmp_path / "completions.jsonl").write_text(text, encoding="utf-8")
    assert read_completions(tmp_path) == lines


def test_default_suites_need_no_data(converted, tmp_path) -> None:
    models = {"student": converted / "start"}
    scorer = Scorer(report=ReportRecipe(), models=models, out=tmp_path)
    assert scorer.suites() == ["phonebook", "variable_assignment"]
    with_data = ReportRecipe(data_dir=tmp_path)
    assert "zero_shot" in dataclasses.replace(scorer, report=with_data).suites()
    with pytest.raises(ValueError, match="^report.suites: expected of"):
        dataclasses.replace(scorer, report=ReportRecipe(suites=("chess",))).check()
    with pytest.raises(ValueError, match=r"^report\.samples: expected at least 1"):
        ReportRecipe(samples=0)
    with pytest.raises(ValueError, match=r"^report\.lengths: expected rising"):
        ReportRecipe(lengths=(8, 4))


def test_missing_data_is_told_before_anything_is_trained(pretrained, recipe, tmp_path) -> None:
    report = dataclasses.replace(REPORT, suites=("zero_shot",), data_dir=tmp_path)
    with pytest.raises(ValueError, match="^data_dir: expected EleutherAI/wikitext"):
        convert(pretrained, dataclasses.replace(recipe, report=report), tmp_path / "out")
    assert not (tmp_path / "out" / "logits").exists()


def test_the_control_has_the_same_tokens_data_and_recipe(converted, recipe, capsys) -> None:
    source, read = read_conversion(converted)
    assert read == recipe
    control = control_of(read)
    stages = dict(control.stages())
    assert list(stages) == ["pretraining"] and control.to == "rope"
    assert stages["pretraining"] == dataclasses.replace(recipe.logits, tokens=512)
    assert (control.data, control.seed) == (recipe.data, recipe.seed)
    cli.main(["convert", "control", str(converted)])
    out = converted.with_name("run-control")
    assert capsys.readouterr().out.splitlines()[-1] == str(out / "model")
    rows = [r for r in read_result(out / "report.json")["rows"] if r["by"] == "model"]
    assert [r["tokens"] for r in rows] == [0, 512] and rows[0]["kl"] < 1e-6
    assert json.loads((out / "conversion.json").read_text())["model"] == source
    assert load_model(out).config.transport == "rotary"
    assert (out / "report" / "variable_assignment.json").exists()
    mixed = small_conversion(["a", "b"])
    tokens = control_of(mixed).pretraining.tokens
    assert tokens == sum(s.steps * s.batch_tokens for _, s in mixed.stages()) == 3 * 512
    distilled = dataclasses.replace(recipe, stage_data=tuple(reversed(recipe.data)))
    with pytest.raises(ValueError, match=r"^conversion: expected its stage logits on data \("):
        control_of(distilled)  # whose longest stage saw what a control would not
    last = dataclasses.replace(mixed.pretraining, tokens=5000)
    longest = dataclasses.replace(mixed, pretraining=last, stage_data=("c",))
    assert control_of(longest).pretraining.steps == 48
    with pytest.raises(ValueError, match="^conversion: expected a finished conversion in"):
        read_conversion(converted / "logits")


def test_slopes_and_contexts_are_compared(converted, tmp_path) -> None:
    assert doctest.testmod(compare).failed == 0
    rows = compare.contexts(converted, "x")
    mine = [r for r in read_result(converted / "report.json")["rows"] if r["by"] == "context"]
    expected = {(r["corpus"], r["length"], r["model"]): r["perplexity"] for r in mine}
    assert len(rows) == len(expected) / 2
    for row in rows:
        student, teacher = (
            expected[row["corpus"], row["length"], m] for m in ("student", "teacher")
        )
        assert row["ratio"] == pytest.approx(student / teacher, rel=1e-4)
    named = {"rows": compare.reports(converted, "$\\x$")}  # matplotlib would look for a formula
    compare.draw(named, tmp_path / "x.png")
    stage = tmp_path / "logits"
    stage.mkdir()
    (stage / "recipe.json").write_text(json.dumps({"steps": 64, "batch_tokens": 10}))
    lines = [{"step": n, "heldout_loss": 3 * n**-0.5} for n in (8, 16, 32, 45, 64)]
    (stage / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = compare.slopes(tmp_path, "y")
    assert (row["stage"], row["tokens"]) == ("logits", 640)
    assert row["per_doubling"] == pytest.approx(2**-0.5, abs=1e-4)
    assert compare.slopes(converted, "x") == []  # too few held-out losses
