"""Fine-tuning on a suite's samples: teacher and student by one recipe, scored at other lengths."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from families import make_teacher

pytest.importorskip("lm_eval")

from path_attention import cli
from path_attention.conversion.fine_tune import FIRST_SEED, FineTune, preset_of
from path_attention.conversion.teacher import copy_model, load_teacher, student_config
from path_attention.evaluation.generated.assignment import assignment_sample
from path_attention.models import PRESETS, PathAttentionConfig
from path_attention.results import read_result
from path_attention.training.corpus import TokenCorpus
from path_attention.training.log import read_log
from path_attention.training.tokenizer import train_tokenizer

OPTIONS = (
    "--train-lengths 60,80 --lengths 80,160 --samples 6 --training.samples 40 --training.steps 6 "
    "--training.batch-tokens 512 --training.learning-rate 0.01 --training.precision float32 "
    "--training.log.every 1 --training.log.no-progress --training.log.no-tensorboard "
    "--training.log.heldout-tokens 128 --tasks swaps --device cpu"
)
WORDS = OPTIONS.split()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A Llama model of transformers, and what it was converted to."""
    folder = tmp_path_factory.mktemp("models")
    text = "; ".join(assignment_sample("mixed", seed, 400, len).text for seed in range(30))
    tokenizer = train_tokenizer([text], 280)
    make_teacher("llama", vocab_size=len(tokenizer)).save_pretrained(folder / "llama")
    tokenizer.save_pretrained(folder / "llama")
    teacher = load_teacher(folder / "llama").model
    student = copy_model(teacher, student_config(teacher.config, "path_fox", direction_rank=4))
    student.save_pretrained(folder / "student")
    tokenizer.save_pretrained(folder / "student")
    return [str(folder / "llama"), str(folder / "student")]


def test_teacher_and_student_by_one_recipe(models, tmp_path, capsys) -> None:
    words = ["evaluate", "fine_tune", "variable_assignment", *models, *WORDS]
    cli.main([*words, "--out", str(tmp_path), "--prepare"])
    made = capsys.readouterr().out.split()
    assert made[0] == made[1] and not (tmp_path / "trained").exists()
    cli.main([*words, "--out", str(tmp_path)])
    rows = read_result(tmp_path / "variable_assignment.json")["rows"]
    assert {(r["model"], r["column"], r["length"]) for r in rows} == {
        (model, "swaps", length) for model in ("llama", "student") for length in (80, 160)
    }
    assert all(0 <= r["low"] <= r["score"] <= r["high"] <= 1 for r in rows)
    (data,) = (tmp_path / "data").iterdir()  # one tokenizer: one corpus for both
    corpus = TokenCorpus.open(data)
    recipes = []
    for label in ("llama", "student"):
        log = read_log(tmp_path / "trained" / label / "log.jsonl")
        losses = [line["loss"] for line in log if "loss" in line]
        assert len(losses) == 6 and losses[-1] < losses[0]
        recipe = json.loads((tmp_path / "trained" / label / "recipe.json").read_text())
        del recipe["model"], recipe["name"]
        recipes.append(recipe)
    assert recipes[0] == recipes[1]
    texts = [corpus.tokenizer().decode(corpus.document(n)) for n in range(80)]
    tested = (tmp_path / "llama" / "variable_assignment.samples.jsonl").read_text().splitlines()
    assert not [1 for line in tested for text in texts if json.loads(line)["prompt"] in text]
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")}
    capsys.readouterr()
    cli.main([*words, "--out", str(tmp_path)])  # nothing is done twice
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")} == before
    assert read_result(tmp_path / "variable_assignment.json")["rows"] == rows


def test_every_generated_suite_has_samples_to_teach(models, tmp_path) -> None:
    (tmp_path / "text.txt").write_text(
        " ".join(f"The {a}{b}y hill was {b}{a}e and so on." for a in "bcdfgh" for b in "lmnprst")
    )
    start = Path(models[1])
    for suite, length in (("phonebook", 200), ("ruler", 2500), ("babilong", 3000)):
        command = FineTune(
            suite=suite,
            models=(models[1],),
            train_lengths="",
            tasks={"ruler": ("vt", "niah_multivalue"), "babilong": ("qa1",)}.get(suite, ()),
            background=(str(tmp_path / "text.txt"),),
            out=tmp_path,
        )
        small = dataclasses.replace(command.training, samples=32)
        corpus = dataclasses.replace(command, training=small).corpus(start, [length])
        assert len(corpus.names) == 32 * max(len(command.tasks), 1)
        assert corpus.path.parent == tmp_path / "data"
        tokenizer = corpus.tokenizer()
        assert all(len(corpus.document(n)) <= length + 2 for n in range(len(corpus.names)))
        text = tokenizer.decode(corpus.document(0), skip_special_tokens=True)
        if suite == "phonebook":
            book, _, asked = text.split("\n\n")
            assert asked in book.splitlines()


def test_what_does_not_fit_is_refused(models, tmp_path, capsys) -> None:
    for words, line in (
        (("zero_shot", models[0]), "suite: expected one of"),
        (("ruler", models[0]), "background: expected local text for ruler, got none"),
        (("phonebook", models[0], "--seed", str(FIRST_SEED)), "seed: expected 0 to"),
        (("phonebook", models[0], models[0]), "labels: expected a different one"),
    ):
        with pytest.raises(SystemExit):
            cli.main(["evaluate", "fine_tune", *words, *WORDS, "--out", str(tmp_path / "o")])
        assert capsys.readouterr().err.startswith(f"error: {line}")
    assert not (tmp_path / "o").exists()


def test_a_start_of_another_model_is_refused(models, tmp_path, capsys) -> None:
    """A label stands for one model: what another left under it is not taken for it."""
    words = ["evaluate", "fine_tune", "variable_assignment", *WORDS, "--labels", "it", "--prepare"]
    words += ["--out", str(tmp_path)]
    partial = tmp_path / "starts" / ".it.partial"  # of a run that was killed, of more files
    partial.mkdir(parents=True)
    (partial / "model-00002-of-00002.safetensors").touch()
    cli.main([*words, models[0]])
    made = tmp_path / "starts" / "it"
    assert not (made / "model-00002-of-00002.safetensors").exists()
    cli.main([*words, models[0]])
    copied = tmp_path / "llama"
    shutil.copytree(models[0], copied)
    for other in (str(copied), models[1]):
        capsys.readouterr()
        with pytest.raises(SystemExit):
            cli.main([*words, other])
        assert f"error: labels: {made} was made from {models[0]}" in capsys.readouterr().err


def test_one_process_does_it(models, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        cli.main(["evaluate", "fine_tune", "phonebook", models[0], *WORDS, "--out", str(tmp_path)])
    assert capsys.readouterr().err.startswith("error: WORLD_SIZE: expected one process, got 2")


def test_presets_are_found_again() -> None:
    for name in ("path", "rope", "path_fox", "stick_breaking", "alibi", "delta_net"):
        assert preset_of(PathAttentionConfig.from_preset(name)) == name
    for name, fields in PRESETS.items():
        found = PRESETS[preset_of(PathAttentionConfig.from_preset(name))]
        assert found["transport"] == fields["transport"] and found["decay"] == fields["decay"]
    with pytest.raises(ValueError, match="^MODEL: expected the encoding of one of"):
        preset_of(PathAttentionConfig.from_preset("path", transport="rotary_householder"))
