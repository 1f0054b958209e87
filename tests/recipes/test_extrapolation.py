"""The extrapolation experiment: its models, a tiny run, its report beside the published ratios."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from path_attention.analysis.analyze import AnalyzeModel
from path_attention.recipes import extrapolation, extrapolation_report
from path_attention.recipes.extrapolation import PUBLISHED, SIZES, TITLES, TrainExtrapolation
from path_attention.recipes.extrapolation_report import ReportExtrapolation, ratio_rows, verdicts
from path_attention.recipes.language_models import Budget
from path_attention.results import read_result, write_result
from path_attention.training.corpus import build_corpus

MODELS = ("rope_10000", "rotation_learned_forget")
BUDGET = Budget(
    batch_tokens=64, micro_batch_tokens=64, context_length=32, layers=1, width=16, heads=2, mlp=16
)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> TrainExtrapolation:
    home = tmp_path_factory.mktemp("extrapolation")
    (home / "text").mkdir()
    rng = random.Random(0)
    for n in range(12):
        words = (
            rng.choice(["the", "king", "said", "went", "to", "castle", "."]) for _ in range(200)
        )
        (home / "text" / f"{n:02}.text").write_text(" ".join(words))
    corpus = build_corpus(
        (str(home / "text"),),
        home / "corpus",
        vocab_size=280,
        heldout_fraction=0.0,
        heldout=("*/00.text", "*/01.text"),
        progress=False,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(extrapolation.SIZES, "small", BUDGET)
        train = TrainExtrapolation(
            corpus=corpus.path,
            size="small",
            models=MODELS,
            seeds=(0,),
            tokens=600,
            parts=("prose=text/*",),
            out=home / "runs",
            devices=("cpu",),
            lengths="32,64,128",
            targets=16,
            windows=4,
            dtype="float32",
        )
        train.run()
    return train


def test_models_of_the_experiment_differ_in_the_encoding_alone(tmp_path: Path) -> None:
    for size, budget in SIZES.items():
        comparison = TrainExtrapolation(corpus=tmp_path, size=size, seeds=(3,)).comparison()  # pyright: ignore
        assert comparison.budget == budget and budget.context_length == 512
        first, *others = (recipe.course() for recipe in comparison.recipes())
        changes = ("preset", "options.decay", "options.rope_theta", "options.rotation_bound")
        allowed = {f"model.{name}" for name in changes}
        for other in others:
            assert {k for k in {*first, *other} if first.get(k) != other.get(k)} <= allowed
        assert len(others) == 12
    paper = SIZES["paper"]
    assert (paper.layers, paper.width, paper.context_length) == (16, 768, 512)
    assert {model for model, _ in PUBLISHED} <= set(TITLES)
    changed = TrainExtrapolation(corpus=tmp_path, tokens=1000, compile="inductor").comparison()
    assert (changed.budget.tokens, changed.budget.compile) == (1000, "inductor")
    with pytest.raises(ValueError, match="models: expected some of"):
        TrainExtrapolation(corpus=tmp_path, models=("path_bounded",)).comparison()


def test_the_report_stands_beside_the_published_ratios(
    done: TrainExtrapolation, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setitem(PUBLISHED, ("rope_10000", 128), 16.2)
    monkeypatch.setattr(extrapolation_report, "CONTEXT", 32)
    report = ReportExtrapolation(out=done.out, to=tmp_path / "x", command="path-attention x")
    report.run()
    rows = read_result(tmp_path / "x.json")["rows"]
    ratios = [row for row in rows if row["kind"] == "ratio"]
    assert [(r["model"], r["length"]) for r in ratios] == [
        (model, length) for model in MODELS for length in (32, 64, 128)
    ]
    assert all(row["ratio"] == 1 for row in ratios if row["length"] == 32)
    assert {row["published"] for row in ratios} == {None, 16.2}
    assert (tmp_path / "x.png").is_file()
    shown = capsys.readouterr().out
    assert "(16.2)" in shown and "learned rotation + gate" in shown
    assert all(row["half_by_bound"] is None for row in rows if row["kind"] == "verdict")
    analyze = AnalyzeModel(
        models=tuple(done.out / f"{name}_seed0" for name in MODELS),
        data=done.corpus,
        lengths="64,128",
        windows=1,
        probes=2,
        out=done.out / "routes",
        pages=False,
        device="cpu",
    )
    analyze.run()
    report.run()
    whole = read_result(tmp_path / "x.json")["rows"]
    found = [row for row in whole if row["kind"] == "verdict"]
    assert all(0 < row["bound"] <= row["far_mass"] < 1 for row in found)
    for name in MODELS:  # the same from one file a model, each after its own training
        out = done.out / "routes" / name
        replace(analyze, models=(done.out / f"{name}_seed0",), out=out).run()
    (done.out / "routes.json").unlink()
    report.run()
    assert read_result(tmp_path / "x.json")["rows"] == whole
    twice = tuple(done.out / "routes" / f"{name}.json" for name in (*MODELS, *MODELS))
    with pytest.raises(ValueError, match="routes: expected each model once, got .*rope_10000"):
        replace(report, routes=twice).run()
    with pytest.raises(ValueError, match="expected finished runs"):
        replace(report, out=tmp_path).run()


def test_runs_of_two_commits_are_merged_without_one(
    done: TrainExtrapolation, tmp_path: Path
) -> None:
    commits = ("a" * 40, "b" * 40)
    for seed, commit in enumerate(commits):
        folder = tmp_path / "runs" / f"rope_10000_seed{seed}"
        shutil.copytree(done.out / "rope_10000_seed0", folder)
        result = read_result(folder / "prose.json")
        write_result(folder / "prose.json", {**result, "commit": commit})
    ReportExtrapolation(out=tmp_path / "runs", to=tmp_path / "x", command="x").run()
    merged = read_result(tmp_path / "x.json")
    assert merged["commit"] is None and merged["rows"][0]["seeds"] == 2


def test_a_model_that_lacks_a_part_is_left_out_of_it(tmp_path: Path) -> None:
    """As while runs are under way: parts are measured one after the other."""
    row = {"kind": "ratio", "low": None, "high": None, "published": None, "seeds": 1}
    rows: list[dict] = []
    for part, models in (("code", "a"), ("prose", "ab")):
        mine = [
            {
                **row,
                "part": part,
                "model": m,
                "title": f"_$\\{m}$",  # matplotlib would look for a formula
                "length": n,
                "perplexity": 9.0,
                "ratio": 1.0,
            }
            for m in models
            for n in (32, 64)
        ]
        rows += mine + verdicts(part, mine, [])
    extrapolation_report.draw(rows, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000
    assert extrapolation_report.table(rows).count(r"| _$\b$ | 9.00 | 1.00 |") == 1


def test_verdicts() -> None:
    def row(model: str, length: int, perplexity: float, ratio: float) -> dict:
        return {
            "kind": "ratio", "part": "p", "model": model, "title": model, "length": length,
            "perplexity": perplexity, "ratio": ratio,
        }  # fmt: skip

    rows = [row("a", 1, 20, 1), row("a", 2, 20, 1.0), row("a", 4, 21, 1.05)]
    rows += [row("b", 1, 10, 1), row("b", 2, 11, 1.05), row("b", 4, 30, 3.0)]
    rows += [row("c", 1, 19, 1), row("c", 2, 18, 0.9), row("c", 4, 18, 0.9)]
    found = {r["model"]: r for r in verdicts("p", rows, [])}
    assert [(r["holds_to"], r["rises_at"], r["best"]) for r in found.values()] == [
        (4, None, False), (2, 4, False), (4, None, True),
    ]  # fmt: skip


def test_published_ratios_stand_beside_ratios_over_the_same_length() -> None:
    row = {"model": "rope_10000", "by": "length", "perplexity": 2.0, "growth": 1.0}
    row |= {"growth_low": None, "growth_high": None}
    for shortest, published in ((512, 16.2), (1024, None)):
        rows = [row | {"length": shortest}, row | {"length": 8192}]
        assert [r["published"] for r in ratio_rows("p", rows)] == [None, published]


def test_heads_that_never_mix_count_in_medians() -> None:
    """A head without a window, or whose far keys never get half, is beyond every length."""
    ratio = {"kind": "ratio", "part": "p", "model": "path", "title": "PaTH", "length": 512}
    ratio |= {"perplexity": 9.0, "ratio": 1.0}
    for windows, middle in (((8, 16, None), 16), ((8, None, None), None), ((None,), None)):
        heads = [
            {"kind": "head", "model": "path_seed0", "half_by_bound": n, "half_by_gap": n,
             "mixing_window": n}
            for n in windows
        ]  # fmt: skip
        (found,) = verdicts("p", [ratio], heads)
        assert found["mixing_window"] == found["half_by_gap"] == middle


def test_finished_runs_of_other_options_are_refused(done: TrainExtrapolation, monkeypatch) -> None:
    monkeypatch.setitem(extrapolation.SIZES, "small", BUDGET)
    for change, message in (
        ({"tokens": 1300}, "other options: steps was 10, is 30"),
        ({"lengths": "32,64"}, r"other options: lengths was \[32, 64, 128\], is \[32, 64\]"),
        ({"dtype": "bfloat16"}, "other options: dtype was 'float32', is 'bfloat16'"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(done, **change).run()
    done.run()


@pytest.mark.parametrize("published", [None, 1.6])
def test_the_title_of_one_panel_is_inside_the_figure(
    tmp_path: Path, monkeypatch, published: float | None
) -> None:
    drawn = []
    monkeypatch.setattr(
        extrapolation_report, "write_figure", lambda figure, _: drawn.append(figure)
    )
    rows = [
        {"kind": "ratio", "part": "code", "model": "path", "title": "PaTH", "length": length,
         "perplexity": 2.0, "ratio": 1.0, "low": 1.0, "high": 1.0, "published": published,
         "seeds": 2}
        for length in (256, 512)
    ]  # fmt: skip
    extrapolation_report.draw(rows, tmp_path / "x.png")
    (figure,) = drawn
    figure.draw_without_rendering()
    box, title = figure.bbox, figure._suptitle.get_window_extent()
    assert box.x0 <= title.x0 and title.x1 <= box.x1
    assert ("published" in figure._suptitle.get_text()) == (published is not None)
