"""`analyze MODEL` and `analyze simulate`: rows, figures, pages; an interrupted run goes on."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from path_attention.analysis import analyze, figure
from path_attention.analysis.analyze import AnalyzeModel
from path_attention.analysis.simulate import Simulate
from path_attention.analysis.theory import uniform_angle_gap
from path_attention.models import PathAttentionConfig, PathAttentionForCausalLM
from path_attention.results import read_result

LAYERS, HEADS = 2, 2


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> AnalyzeModel:
    home = tmp_path_factory.mktemp("analyze")
    words = {word: n for n, word in enumerate(["[UNK]", *"abcdefgh"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    for preset in ("path_fox", "rope"):
        torch.manual_seed(0)
        config = PathAttentionConfig.from_preset(
            preset,
            hidden_size=16,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            vocab_size=9,
            max_position_embeddings=32,
            initializer_range=0.3,
        )
        PathAttentionForCausalLM(config).save_pretrained(home / preset)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(home / preset)
    (home / "text.txt").write_text(" ".join("abcdefgh"[n * n % 31 % 8] for n in range(300)))
    return AnalyzeModel(
        models=(home / "path_fox", home / "rope"),
        data=home / "text.txt",
        lengths="32,64,128",
        probes=4,
        windows=2,
        out=home / "out",
        device="cpu",
    )


@pytest.fixture(scope="module")
def done(command: AnalyzeModel) -> AnalyzeModel:
    command.run()
    return command


def test_rows_figures_and_a_page_for_each_head(done: AnalyzeModel) -> None:
    rows = read_result(done.out.with_suffix(".json"))["rows"]
    heads = [row for row in rows if row["kind"] == "head"]
    assert [(r["model"], r["layer"], r["head"]) for r in heads] == [
        (m, n, h) for m in ("path_fox", "rope") for n in range(LAYERS) for h in range(HEADS)
    ]
    assert {row["near"] for row in heads} == {32} and {row["windows"] for row in rows} == {2}
    rope = [row for row in heads if row["model"] == "rope"]
    assert all(row["spectral_norm"] == pytest.approx(1, abs=1e-5) for row in rope)
    contexts = [row for row in rows if row["kind"] == "context"]
    assert all((row["far_mass"] is None) == (row["length"] == 32) for row in contexts)
    assert all(row["bound"] <= row["far_mass"] + 1e-6 for row in contexts if row["length"] > 32)
    assert done.out.with_suffix(".png").is_file()
    for name in ("path_fox", "rope"):
        pages = {path.name for path in (done.out / name).iterdir()}
        named = {f"layer-{n:02}-head-{h:02}.html" for n in range(LAYERS) for h in range(HEADS)}
        assert pages == named | {"index.html", "heads.png"}
        for page in (done.out / name).glob("*.html"):
            for link in re.findall(r'(?:href|src)="([^":]+)"', page.read_text()):
                assert link in pages
    assert not list(done.out.parent.glob(".*partial*"))


def test_an_interrupted_run_goes_on(done: AnalyzeModel, tmp_path: Path, monkeypatch) -> None:
    again = replace(done, out=tmp_path / "out", pages=False)
    anothers = tmp_path / ".out.2.path_fox.partial"
    anothers.touch()
    read, passes = analyze.visit_layers, []

    def visit(*arguments) -> None:
        passes.append(arguments)
        if len(passes) == 2:
            raise KeyboardInterrupt
        read(*arguments)

    monkeypatch.setattr(analyze, "visit_layers", visit)
    monkeypatch.setattr(figure, "draw_models", lambda *_: None)  # drawn in the test above
    with pytest.raises(KeyboardInterrupt):
        again.run()
    again.run()
    assert len(passes) == 2 + 3  # the first model's second window, the second model's two
    rows = [read_result(each.out.with_suffix(".json"))["rows"] for each in (done, again)]
    assert rows[0] == rows[1]
    assert not (tmp_path / "out").exists()
    assert list(tmp_path.glob(".*")) == [anothers]
    replace(again, means=True).run()
    means = read_result(again.out.with_suffix(".json"))["rows"]
    assert [r for r in means if r["kind"] == "head"] == [r for r in rows[0] if r["kind"] == "head"]
    of = [
        [r for r in each if r["kind"] == "context" and r["length"] == 64]
        for each in (rows[0], means)
    ]
    for n, row in enumerate(of[1]):
        each = [r["far_mass"] for r in of[0] if r["model"] == row["model"]]
        assert row["head"] == len(each) == 4 and n < 2
        assert row["far_mass"] == pytest.approx(sum(each) / 4, rel=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": "32,x"}, "lengths: expected whole numbers"),
        ({"lengths": "32,512"}, "lengths: expected at most 300 with this data"),
        ({"windows": 0}, "windows: expected at least 1"),
        ({"labels": ("one",)}, "labels: expected a different one"),
        ({"models": ()}, "models: expected at least one"),
        ({"data": Path("no/such")}, "corpus: expected a folder"),
        ({"level": 2.0}, "level: expected a number between 0 and 1"),
        ({"near": 0}, "near: expected at least 1, got 0"),
        ({"probes": 0}, "probes: expected at least 1, got 0"),
        ({"lengths": "64,32"}, "lengths: expected rising numbers"),
        ({"labels": ("a", "b/c")}, "labels: expected names of files"),
    ],
)
def test_bad_options(
    command: AnalyzeModel, change: dict, message: str, tmp_path: Path, monkeypatch
) -> None:
    def visit(*_) -> None:
        raise AssertionError("a bad option is said before a model reads")

    monkeypatch.setattr(analyze, "visit_layers", visit)
    with pytest.raises(ValueError, match=message):
        replace(command, out=tmp_path / "x", pages=False, **change).run()


def test_simulations_follow_their_laws(tmp_path: Path) -> None:
    simulate = Simulate(
        tokens=512, near=32, heads=2, head_size=8, tail_sizes="4,8", betas="2", angle=0.5,
        probes=8, out=tmp_path / "sim", device="cpu",
    )  # fmt: skip
    simulate.run()
    rows = read_result(tmp_path / "sim.json")["rows"]
    assert (tmp_path / "sim.png").is_file()
    heads = {row["case"]: row for row in rows if row["kind"] == "head"}
    assert heads["none"]["spectral_norm"] == 1 and heads["none"]["mixing_window"] is None
    assert heads["so2"]["spectral_theory"] == pytest.approx(uniform_angle_gap(0.5), rel=1e-4)
    assert heads["householder_2"]["spectral_theory"] == 0.75
    far = {
        row["case"]: row["far_mass"]
        for row in rows
        if row["kind"] == "context" and row["length"] == 512
    }
    assert far["none"] == pytest.approx(1 - 32 / 497, abs=0.02)  # mean over the last eighth
    assert far["so2"] < far["none"] and far["so2_alibi"] < far["so2"]
    tails = [row for row in rows if row["kind"] == "tail" and row["case"] == "orthogonal_tail"]
    assert {row["head_size"] for row in tails} == {4, 8}
    for change, message in (
        ({"betas": "3"}, "betas: expected"),
        ({"head_size": 5}, "head_size: expected"),
        ({"tail_sizes": "8,x"}, "tail_sizes: expected"),
        ({"tail_sizes": "1"}, "tail_sizes: expected"),
        ({"slope": -1.0}, "slope: expected"),
        ({"angle": -1.0}, "angle: expected"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(simulate, **change).run()


def test_a_models_name_is_no_formula(done: AnalyzeModel, tmp_path: Path) -> None:
    rows = read_result(done.out.with_suffix(".json"))["rows"]
    mine = [{**row, "model": "a$b_{$c"} for row in rows if row["model"] == "rope"]
    figure.draw_models(mine, tmp_path / "x.png")
    assert (tmp_path / "x.png").is_file()
