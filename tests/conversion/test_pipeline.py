"""Whole conversions: what they leave, going on, refusing."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path

import pytest
import torch
from small_conversion import small_conversion

from path_attention import cli
from path_attention.conversion import memory, pipeline
from path_attention.conversion.control import control_of
from path_attention.conversion.memory import estimate_memory, refuse_too_much
from path_attention.conversion.pipeline import convert
from path_attention.conversion.recipe import BUDGETS, ConversionRecipe, budget
from path_attention.conversion.teacher import load_teacher, student_config
from path_attention.models import PathAttentionConfig, PathAttentionForCausalLM, load_model
from path_attention.models.loading import load_tokenizer
from path_attention.results import read_result
from path_attention.training.corpus import TokenCorpus, build_corpus
from path_attention.training.log import read_log
from path_attention.training.processes import Processes

ALONE = Processes(0, 1, torch.device("cpu"))


def replace(recipe: ConversionRecipe, stage: str, **fields) -> ConversionRecipe:
    return dataclasses.replace(
        recipe, **{stage: dataclasses.replace(getattr(recipe, stage), **fields)}
    )


def same(a, b) -> bool:
    a, b = (load_model(folder).state_dict() for folder in (a, b))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def paths(corpora):
    return [corpus.path for corpus in corpora]


@pytest.fixture(scope="module")
def converted(pretrained, paths, tmp_path_factory):
    out = tmp_path_factory.mktemp("converted")
    assert convert(pretrained, small_conversion(paths), out) is None
    return out


def test_it_leaves_a_model_a_report_and_a_card(converted, pretrained) -> None:
    model = load_model(converted)
    assert isinstance(model.config, PathAttentionConfig)
    assert (model.config.transport, model.config.decay) == ("householder", "forget")
    assert same(converted, converted / "pretraining")
    assert load_tokenizer(converted, model)("x = 1").input_ids
    rows = read_result(converted / "report.json")["rows"]
    models = [row for row in rows if row["by"] == "model"]
    assert [row["stage"] for row in models] == ["start", "attention", "logits", "pretraining"]
    assert [row["tokens"] for row in models] == [0, 512, 1024, 1536]
    layers = [(row["stage"], row["layer"]) for row in rows if row["by"] == "layer"]
    assert layers == [(stage, n) for stage in ("start", "attention") for n in range(2)]
    errors = {(row["stage"], row["layer"]): row["error"] for row in rows if row["by"] == "layer"}
    assert all(errors["attention", n] < errors["start", n] for n in range(2))
    assert models[2]["kl"] < models[0]["kl"]
    assert (converted / "report.png").stat().st_size > 1000
    card = (converted / "model" / "README.md").read_text()
    assert str(pretrained) not in card
    for words in (f"| {pretrained.name} |", "path_fox", "near_zero", "logits 512", "the teacher |"):
        assert words in card
    assert f"{models[-1]['perplexity']:.3f}" in card


def test_the_card_names_what_each_stage_was_trained_on(paths, tmp_path) -> None:
    from path_attention.conversion.card import write_card

    recipe = small_conversion(paths)
    alone = replace(recipe, "pretraining", tokens=0)
    first, second = ((f"{path}=1",) for path in paths)
    (tmp_path / "model").mkdir()
    config = PathAttentionConfig.from_preset("rope")
    for given, line in (
        (dataclasses.replace(alone, data=(), stage_data=second), "attention, logits: {b}"),
        (
            dataclasses.replace(recipe, data=first, stage_data=second),
            "attention, logits: {b}. pretraining: {a}",
        ),
        (dataclasses.replace(recipe, data=first), "{a}"),
    ):
        write_card(tmp_path, "teacher", given, config, [])
        names = [TokenCorpus.open(path).info["recipe"]["sources"][0] for path in paths]
        a, b = (f"{name} (weight 1)" for name in names)
        card = (tmp_path / "model" / "README.md").read_text()
        assert f"| data | {line.format(a=a, b=b)} |" in card


def test_a_controls_card_says_that_nothing_was_exchanged(paths, tmp_path) -> None:
    from path_attention.conversion.card import write_card

    (tmp_path / "model").mkdir()
    control = control_of(small_conversion(paths))
    write_card(tmp_path, "teacher", control, PathAttentionConfig.from_preset("rope"), [])
    card = (tmp_path / "README.md").read_text()
    assert "# teacher, trained on\n" in card and "| pretraining 1,536 |" in card
    assert "exchanged" not in card and "near_zero" not in card


def test_the_reports_numbers_are_those_of_whole_models(converted, pretrained, paths) -> None:
    from path_attention.conversion.report import Measurer

    teacher = load_teacher(pretrained)
    measurer = Measurer(teacher, small_conversion(paths), torch.device("cpu"))
    student = load_model(converted / "logits")
    kl, losses, count = 0.0, [0.0, 0.0], 0
    for row in measurer.rows:
        logits = [m(row.input_ids, packing=row.packing).logits[0] for m in (student, teacher.model)]
        logs = [torch.log_softmax(z, -1).detach() for z in logits]
        for t in range(row.input_ids.shape[1] - 1):
            if row.labels[0, t + 1] != -100:
                count += 1
                q, p = logs[0][t], logs[1][t]
                kl += float((p.exp() * (p - q)).sum())
                for n in range(2):
                    losses[n] -= float(logs[n][t, row.labels[0, t + 1]])
    found = read_result(converted / "report.json")["rows"]
    (mine,) = (r for r in found if r["by"] == "model" and r["stage"] == "logits")
    assert mine["targets"] == count
    assert mine["kl"] == pytest.approx(kl / count, rel=1e-4)
    got = torch.tensor([mine["perplexity"], mine["teacher_perplexity"]]).log()
    torch.testing.assert_close(got, torch.tensor(losses) / count, rtol=1e-4, atol=0)


def test_only_what_a_stage_trains_changes(converted) -> None:
    start, after = (load_model(converted / n).state_dict() for n in ("start", "attention"))
    changed = {name for name in start if not torch.equal(start[name], after[name])}
    assert changed == {name for name in start if ".attention." in name}


def test_a_kill_leaves_no_half_of_the_settings(pretrained, paths, tmp_path, monkeypatch) -> None:
    whole = Path.write_text

    def killed(path: Path, text: str, *args, **kwargs) -> int:
        if "near_zero" not in text:
            return whole(path, text, *args, **kwargs)
        whole(path, text[: len(text) // 2], *args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", killed)
        with pytest.raises(KeyboardInterrupt):
            convert(pretrained, small_conversion(paths), tmp_path)
    assert not list(tmp_path.iterdir())


def test_it_goes_on_as_if_never_stopped(converted, pretrained, paths, tmp_path) -> None:
    out = tmp_path / "again"
    shutil.copytree(converted, out)
    shutil.rmtree(out / "pretraining")
    shutil.rmtree(out / "model")
    for name in ("model", "checkpoints/step-00000004"):
        shutil.rmtree(out / "logits" / name)
    (out / "logits" / "card.json").unlink()
    convert(pretrained, small_conversion(paths), out)
    assert same(out, converted)
    with pytest.raises(ValueError, match="^out: .*another conversion: start was 'near_zero', is"):
        convert(pretrained, small_conversion(paths, start="one"), out)
    other = replace(small_conversion(paths), "logits", temperature=2.0)
    with pytest.raises(ValueError, match="another recipe: temperature was 1.0, is 2.0"):
        convert(pretrained, other, out)


@pytest.mark.parametrize(
    "fields",
    [
        {"start": "exchange", "to": "path"},
        {"start": "rope_decay", "directions": "keys", "direction_rank": None},
        {"start": "one", "to": "fox"},
    ],
    ids=lambda fields: fields["start"],
)
def test_other_starts_run_through(fields, pretrained, paths, tmp_path) -> None:
    recipe = replace(small_conversion(paths, **fields), "pretraining", tokens=0)
    convert(pretrained, recipe, tmp_path / "out")
    config = load_model(tmp_path / "out").config
    assert (
        config.transport == ("none" if fields["to"] == "fox" else "householder")
        if ("to" in fields)
        else config.decay == "forget"
    )
    rows = read_result(tmp_path / "out" / "report.json")["rows"]
    models = [row for row in rows if row["by"] == "model"]
    if fields["start"] == "exchange":  # with all of RoPE it is the teacher but for a small β
        assert models[0]["kl"] < models[1]["kl"]
        assert abs(models[0]["perplexity"] / models[0]["teacher_perplexity"] - 1) < 0.2


def test_low_rank_updates_are_merged_on_the_way(pretrained, paths, tmp_path) -> None:
    recipe = replace(small_conversion(paths), "pretraining", tokens=0)
    recipe = replace(recipe, "logits", trainable="lora")
    convert(pretrained, recipe, tmp_path)
    before, after = (load_model(tmp_path / n).state_dict() for n in ("attention", "logits"))
    change = (
        after["model.layers.0.mlp.up_proj.weight"] - before["model.layers.0.mlp.up_proj.weight"]
    )
    assert 0 < torch.linalg.matrix_rank(change, rtol=1e-3) <= 16
    assert torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    assert torch.equal(before["model.norm.weight"], after["model.norm.weight"])


def test_the_control_is_the_teacher_trained_on(pretrained, paths, tmp_path) -> None:
    recipe = replace(replace(small_conversion(paths), "attention", tokens=0), "logits", tokens=0)
    convert(pretrained, dataclasses.replace(recipe, to="rope"), tmp_path)
    rows = read_result(tmp_path / "report.json")["rows"]
    first, last = (row for row in rows if row["by"] == "model")
    assert first["kl"] < 1e-6
    assert first["perplexity"] == pytest.approx(first["teacher_perplexity"], rel=1e-5)
    assert last["perplexity"] < first["perplexity"]


def test_weights_alone_need_no_data(pretrained, tmp_path, capsys) -> None:
    command = ["convert", str(pretrained), "--to", "path", "--budget", "none"]
    cli.main([*command, "--out", str(tmp_path / "out"), "--device", "cpu"])
    assert capsys.readouterr().out.strip() == str(tmp_path / "out" / "model")
    ours, theirs = load_model(tmp_path / "out"), load_teacher(pretrained).model
    rope = student_config(theirs.config, "rope")
    back = PathAttentionForCausalLM(rope)
    back.load_state_dict({n: v for n, v in ours.state_dict().items() if ".transport." not in n})
    ids = torch.arange(3, 40)[None]
    torch.testing.assert_close(back(ids).logits, theirs(ids).logits, rtol=0, atol=1e-4)
    assert not (tmp_path / "out" / "report.json").exists()


def test_what_does_not_fit_is_refused(pretrained, paths, tmp_path, corpora) -> None:
    out = tmp_path / "out"
    other = build_corpus(
        str(corpora[0].info["recipe"]["sources"][0]),
        tmp_path / "other",
        vocab_size=280,
        heldout_fraction=0.0,
        progress=False,
    )
    for fields, message in (
        ({"data": (str(other.path),)}, "^data: expected corpora made with the tokenizer of"),
        ({"data": ()}, "^data: expected corpora for stage 'attention', got none"),
        ({"data": (str(tmp_path / "nowhere"),)}, "^corpus: expected a folder"),
    ):
        with pytest.raises(ValueError, match=message):
            convert(pretrained, small_conversion(paths, **fields), out)
    for fields, message in (
        ({"data": ("a=0.5", "b=0.4")}, "mixture: .*shares that sum to 1"),
        ({"to": "rope"}, "^to: expected another encoding to distil into, got 'rope'"),
        ({"to": "alibi"}, "^to: expected one of"),
        ({"directions": "values"}, r"^directions: expected one of \['random', 'keys'\]"),
        ({"to": "fox", "start": "exchange"}, "^start: expected 'exchange' with one of"),
    ):
        with pytest.raises(ValueError, match=message):
            small_conversion(paths, **fields)
    assert not (out / "start").exists()


def test_what_would_end_a_later_stage_is_told_before_the_first(
    pretrained, paths, tmp_path, monkeypatch
) -> None:
    recipe, out = small_conversion(paths), tmp_path / "out"
    for fields, message in (
        ({"micro_batch_tokens": 48}, "^micro_batch_tokens: expected a divisor of batch_tokens"),
        ({"context_length": 65}, "^data.context_length: expected at most the 64 tokens"),
        ({"learning_rate": -1.0}, "^learning_rate: expected at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            convert(pretrained, replace(recipe, "pretraining", **fields), out)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match="^trainable: expected peft to be installed"):
        convert(pretrained, replace(recipe, "logits", trainable="lora"), out)
    for stage, fields, message in (
        ("logits", {"temperature": 0.0}, "^temperature: expected a number above 0"),
        ("logits", {"top_k": 0}, "^top_k: expected at least 1 or None"),
        ("attention", {"trainable": "all"}, "^attention.trainable: expected 'attention' or"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(recipe, stage, **fields)
    assert not out.exists()


def test_too_little_memory_is_told_before_anything_is_written(
    pretrained, paths, tmp_path, monkeypatch
) -> None:
    def too_little(config, recipe, processes):
        estimate = estimate_memory(config, recipe, "logits", processes)
        refuse_too_much("logits", estimate, estimate.total - 1)
        raise AssertionError

    monkeypatch.setattr(pipeline, "check_memory", too_little)
    with pytest.raises(ValueError, match="^logits: expected a device of at least .* GiB"):
        convert(pretrained, small_conversion(paths), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_estimate_counts_states_to_the_byte(pretrained, paths) -> None:
    theirs = load_teacher(pretrained).model
    config = student_config(theirs.config, "path", direction_rank=4)
    student = PathAttentionForCausalLM(config)
    whole = sum(p.numel() for p in student.parameters())
    old = sum(p.numel() for p in theirs.parameters())
    attention = sum(p.numel() for n, p in student.named_parameters() if ".attention." in n)
    recipe = small_conversion(paths)
    found = {n: estimate_memory(config, recipe, n, ALONE).states for n, _ in recipe.stages()}
    assert found["logits"] == 16 * whole + 4 * old
    assert found["attention"] == 4 * whole + 12 * attention + 4 * (attention - (whole - old))
    assert found["pretraining"] == 16 * whole
    spread = dataclasses.replace(recipe, parallel="fsdp")
    two = Processes(0, 2, torch.device("cpu"))
    assert estimate_memory(config, spread, "logits", two).states == found["logits"] // 2
    # both come whole before they are spread, and the teacher's attention layers stay so
    eight = Processes(0, 8, torch.device("cpu"))
    assert estimate_memory(config, spread, "logits", eight).states == 4 * whole + 4 * old
    kept = 4 * (attention - (whole - old))
    for processes in (two, eight):
        shared = (found["attention"] - kept) // processes.count
        states = estimate_memory(config, spread, "attention", processes).states
        assert states == kept + max(shared, 4 * whole)
    lora = replace(recipe, "logits", trainable="lora")
    assert estimate_memory(config, lora, "logits", ALONE).states < found["logits"]
    more = dataclasses.replace(recipe, activation_checkpointing=True)
    assert (
        estimate_memory(config, more, "logits", ALONE).activations
        < estimate_memory(config, recipe, "logits", ALONE).activations
    )
    assert memory.check_memory(config, recipe, ALONE).keys() == found.keys()


@pytest.mark.parametrize("name", BUDGETS)
def test_every_budget_is_a_recipe(name: str) -> None:
    recipe = dataclasses.replace(budget(name), data=("corpus",))
    stages = dict(recipe.stages())
    published = {"attention": 10**8, "logits": 3 * 10**9, "pretraining": 21 * 10**9}
    if name == "published":
        assert {n: stage.tokens for n, stage in stages.items()} == published
    for n, stage in stages.items():
        made = pipeline.stage_recipe(recipe, n, stage, pipeline.Path("x"))
        assert 0 <= made.steps * made.batch_tokens - stage.tokens < made.batch_tokens
        assert made.rate(made.steps - 1) == pytest.approx(stage.final * stage.learning_rate)
    with pytest.raises(ValueError, match="^budget: expected one of"):
        budget("huge")


def test_conversions_are_compared(converted, pretrained, paths, tmp_path, capsys) -> None:
    recipe = replace(small_conversion(paths, start="one"), "pretraining", tokens=0)
    convert(pretrained, recipe, tmp_path / "one")
    command = ["convert", "compare", str(converted), str(tmp_path / "one")]
    cli.main([*command, "--labels", "near", "one", "--points", "2", "--out", str(tmp_path / "c")])
    rows = read_result(tmp_path / "c.json")["rows"]
    assert (tmp_path / "c.png").stat().st_size > 1000
    mine = [row for row in rows if row["conversion"] == "near" and row["stage"] == "logits"]
    curve = [row for row in mine if row["by"] == "curve"]
    losses = [
        line["loss"] for line in read_log(converted / "logits" / "log.jsonl") if "loss" in line
    ]
    assert [row["tokens"] for row in curve] == [256, 512]
    assert curve[0]["loss"] == pytest.approx(sum(losses[:2]) / 2)
    (after,) = (row for row in mine if row["by"] == "model")
    found = read_result(converted / "report.json")["rows"]
    assert after["kl"] in [row["kl"] for row in found if row["stage"] == "logits"]
    (tmp_path / "none").mkdir()
    with pytest.raises(SystemExit):
        cli.main(["convert", "compare", str(tmp_path / "none")])
    assert "expected a finished one with a report" in capsys.readouterr().err


def test_a_runs_checkpoints_are_exported_and_converted(corpora, tmp_path, capsys) -> None:
    from path_attention.training.loop import train
    from path_attention.training.recipe import DataRecipe, ModelRecipe, Recipe

    small = small_conversion([corpus.path for corpus in corpora])
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    recipe = Recipe(
        name="rope",
        model=ModelRecipe(preset="rope", intermediate_size=32, tie_word_embeddings=True, **sizes),
        data=DataRecipe(context_length=24, corpus=corpora[0].path),
        steps=4,
        batch_tokens=64,
        precision="float32",
        device="cpu",
        checkpoint=small.checkpoint,
        log=small.log,
    )
    train(recipe, tmp_path / "run")
    for step in ("2", "4"):
        cli.main(["export", str(tmp_path / "run"), "--step", step, "--out", str(tmp_path / step)])
    assert same(tmp_path / "4", tmp_path / "run") and not same(tmp_path / "2", tmp_path / "4")
    assert (tmp_path / "2" / "tokenizer.json").exists()
    none = replace(replace(small, "attention", tokens=0), "logits", tokens=0)
    none = dataclasses.replace(none, pretraining=dataclasses.replace(none.pretraining, tokens=0))
    convert(tmp_path / "2", dataclasses.replace(none, to="path"), tmp_path / "path")
    ours, theirs = (
        load_model(tmp_path / "path").state_dict(),
        load_model(tmp_path / "2").state_dict(),
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for words, message in (
        (["--step", "3", "--out", str(tmp_path / "x")], "step: expected one of [2, 4]"),
        (["--out", str(tmp_path / "2")], "out: expected a new folder"),
    ):
        with pytest.raises(SystemExit):
            cli.main(["export", str(tmp_path / "run"), *words])
        assert message in capsys.readouterr().err
