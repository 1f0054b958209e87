"""The loop in one process: what it computes, writes, refuses, and how it resumes."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from path_attention.models import PathAttentionForCausalLM
from path_attention.ops.packing import Packing
from path_attention.training import loop
from path_attention.training.export import export_step
from path_attention.training.lock import lock_if_free
from path_attention.training.log import RunLog, read_log
from path_attention.training.processes import Processes, choose_precision, spread
from path_attention.training.recipe import (
    CheckpointRecipe,
    LogRecipe,
    ModelRecipe,
    OptimizerRecipe,
    ScheduleRecipe,
)
from path_attention.training.rows import PackedRows

CPU = torch.device("cpu")


def run_of(recipe, corpus, tmp_path: Path) -> loop._Run:
    return loop._Run(recipe, tmp_path, corpus, Processes(0, 1, CPU))


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in read_log(out / "log.jsonl") if "loss" in line]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model" / "model.safetensors")


def assert_same_run(one: Path, other: Path) -> None:
    assert losses(one) == losses(other)
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def straight(corpus, tmp_path_factory) -> Path:
    """Six straight steps, held-out loss after each third."""
    from small_run import small_recipe

    out = tmp_path_factory.mktemp("straight")
    recipe = small_recipe(corpus.path)
    log = dataclasses.replace(recipe.log, heldout_every=3, tensorboard=True)
    loop.train(dataclasses.replace(recipe, log=log), out)
    return out


def test_a_run_learns_and_leaves_a_model(straight: Path, corpus, make_recipe) -> None:
    lines = read_log(straight / "log.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert losses(straight)[0] == pytest.approx(math.log(300), abs=0.1)
    assert losses(straight)[-1] < losses(straight)[0] - 0.1
    assert lines[-2]["tokens"] == 6 * 128 and lines[-2]["tokens_per_second"] > 0
    heldout = {line["step"]: line["heldout_loss"] for line in lines if "heldout_loss" in line}
    assert list(heldout) == [3, 6]

    model = AutoModelForCausalLM.from_pretrained(straight / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(straight / "model")
    assert tokenizer("def f").input_ids == corpus.tokenizer()("def f").input_ids
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.max_position_embeddings == 24
    rows = PackedRows(corpus, "heldout", context_length=24, row_tokens=128, seed=0)
    total = targets = 0.0
    with torch.no_grad():
        for row in (rows.row(0), rows.row(1)):  # heldout_tokens = 256
            logits = model(input_ids=row.input_ids, packing=row.packing).logits[0, :-1]
            total += nn.functional.cross_entropy(logits, row.labels[0, 1:], reduction="sum").item()
            targets += row.targets
    assert heldout[6] == pytest.approx(total / targets, rel=1e-5)

    assert any((straight / "tensorboard").glob("events*"))
    assert sorted(p.name for p in (straight / "checkpoints").iterdir()) == [
        "step-00000003", "step-00000006",
    ]  # fmt: skip
    card = json.loads((straight / "card.json").read_text())
    assert card["loss"]["heldout"] == heldout[6]
    assert card["data"]["fingerprint"] == corpus.fingerprint
    assert card["recipe"] == json.loads((straight / "recipe.json").read_text())
    assert card["environment"]["torch"] == torch.__version__ and card["command"]
    readme = (straight / "README.md").read_text()
    assert f"{heldout[6]:.4f} nats" in readme and (straight / "model" / "README.md").exists()


def test_accumulation_weighs_by_tokens(make_recipe, corpus, tmp_path: Path) -> None:
    """Four passes with uneven numbers of targets give the gradient of their one joint batch."""
    recipe = make_recipe(micro_batch_tokens=32, optimizer=OptimizerRecipe(learning_rate=1e-2))
    run = run_of(recipe, corpus, tmp_path)
    rows = [run.rows.row(n) for n in range(4)]
    assert len({row.targets for row in rows}) > 1
    whole = run_of(recipe, corpus, tmp_path).model
    lengths = [length for row in rows for length in row.packing.lengths]
    joint = whole(
        input_ids=torch.cat([row.input_ids for row in rows], 1),
        labels=torch.cat([row.labels for row in rows], 1),
        packing=Packing.from_lengths(lengths),
    ).loss
    joint.backward()
    norm = nn.utils.clip_grad_norm_(whole.parameters(), recipe.optimizer.clip)
    lines = []
    log = SimpleNamespace(
        step=lambda step, **line: lines.append(line), part=lambda name, seconds: None
    )
    gradients = {}
    run.optimizer.register_step_pre_hook(
        lambda *_: gradients.update({n: p.grad.clone() for n, p in run.model.named_parameters()})
    )
    assert run._step(0, log, None) is None
    assert lines[0]["loss"] == pytest.approx(joint.item(), rel=1e-6)
    assert lines[0]["gradient_norm"] == pytest.approx(norm.item(), rel=1e-5)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-7)


def test_documents_never_see_each_other(make_recipe, corpus, tmp_path: Path) -> None:
    run = run_of(make_recipe(), corpus, tmp_path)
    row = run.rows.row(0)
    starts = row.packing.cu_seqlens.tolist()
    changed = row.input_ids.clone()
    changed[0, starts[2] : starts[3]] = 7
    with torch.no_grad():
        before = run.model(input_ids=row.input_ids, packing=row.packing).logits[0]
        after = run.model(input_ids=changed, packing=row.packing).logits[0]
    others = [n for n in range(128) if not starts[2] <= n < starts[3]]
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before, after)


def test_a_batch_of_pieces_trains_as_the_packed_row(make_recipe, corpus, tmp_path: Path) -> None:
    run = run_of(make_recipe(), corpus, tmp_path)
    packing = Packing.from_lengths([16] * 4)
    row = dataclasses.replace(run.rows.row(0), packing=packing)
    row = dataclasses.replace(row, input_ids=row.input_ids[:, :64], labels=row.labels[:, :64])

    def gradients(row) -> list[torch.Tensor]:
        run.model.zero_grad()
        run._loss(row, 10.0).backward()
        return [p.grad.clone() for p in run.model.parameters() if p.grad is not None]

    batch = gradients(row)
    packed = SimpleNamespace(batch=lambda: (row.input_ids, row.labels, row.packing), split=None)
    for one, other in zip(batch, gradients(packed), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


def test_weight_decay_leaves_out_norms_and_biases(make_recipe, corpus, tmp_path: Path) -> None:
    run = run_of(make_recipe(), corpus, tmp_path)
    names = {id(p): name for name, p in run.model.named_parameters()}
    decayed, plain = (
        {names[id(p)] for p in group["params"]} for group in run.optimizer.param_groups
    )
    assert [g["weight_decay"] for g in run.optimizer.param_groups] == [0.1, 0.0]
    assert decayed | plain == set(names.values())
    assert all("norm" in name or name.endswith("bias") for name in plain)
    assert not any("norm" in name or name.endswith("bias") for name in decayed)


def test_the_rate_follows_the_schedule(straight: Path) -> None:
    rates = [line["learning_rate"] for line in read_log(straight / "log.jsonl") if "loss" in line]
    schedule = ScheduleRecipe(warmup_steps=2)
    assert rates == [1e-2 * schedule.share(step, 6) for step in range(6)]


def test_resume_equals_the_straight_run(straight: Path, make_recipe, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(straight, out)
    shutil.rmtree(out / "checkpoints" / "step-00000006")
    shutil.rmtree(out / "model")
    (out / "card.json").unlink()
    outcome = loop.train(make_recipe(), out, resume="must")
    assert outcome.step == 6 and outcome.signal is None
    assert_same_run(straight, out)
    assert {"step": 3, "event": "resumed"} in read_log(out / "log.jsonl")
    before = (out / "model" / "model.safetensors").stat().st_mtime_ns
    assert loop.train(make_recipe(), out).step == 6  # finished: nothing is done again
    assert (out / "model" / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("damage", ["truncate", "flip", "missing", "manifest"])
def test_a_damaged_checkpoint_falls_back_and_says_so(
    straight: Path, make_recipe, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    shutil.copytree(straight, out)
    latest = out / "checkpoints" / "step-00000006"
    shard = latest / "__0_0.distcp"
    if damage == "truncate":
        with open(shard, "r+b") as file:
            file.truncate(1000)
    elif damage == "flip":
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    elif damage == "missing":
        (latest / ".metadata").unlink()
    else:
        (latest / "manifest.json").write_text('{"step": 6')
    loop.train(make_recipe(), out)
    said = capsys.readouterr().err
    assert said.count("is damaged (") == 1 and "falling back to the one before" in said
    assert (out / "checkpoints" / "damaged-step-00000006").is_dir()
    assert_same_run(straight, out)


def test_no_undamaged_checkpoint_is_an_error(straight: Path, make_recipe, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(straight, out)
    for shard in (out / "checkpoints").glob("*/__0_0.distcp"):
        shard.write_bytes(b"")
    with pytest.raises(ValueError, match="every checkpoint in .* is damaged"):
        loop.train(make_recipe(), out)


def test_rows_made_ahead_and_saving_meanwhile_change_nothing(
    straight: Path, make_recipe, tmp_path: Path
) -> None:
    """Straight, and resumed from an asynchronous checkpoint: one that aliased the weights would
    hold later ones."""
    recipe = make_recipe(
        data=dataclasses.replace(make_recipe().data, workers=3),
        checkpoint=CheckpointRecipe(every=3, keep=3, asynchronous=True),
    )
    loop.train(recipe, tmp_path / "run")
    assert_same_run(straight, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    (tmp_path / "run" / "card.json").unlink()
    loop.train(recipe, tmp_path / "run", resume="must")
    assert {"step": 3, "event": "resumed"} in read_log(tmp_path / "run" / "log.jsonl")
    assert_same_run(straight, tmp_path / "run")


def test_an_asynchronous_checkpoint_that_fails_keeps_those_before(
    make_recipe, tmp_path: Path, monkeypatch
) -> None:
    from path_attention.training import checkpoint

    own, calls = checkpoint.async_save, []

    def fail_the_second(states, **options):
        calls.append(options)
        if len(calls) < 2:
            return own(states, **options)
        future: Future = Future()
        future.set_exception(OSError(28, "No space left on device"))
        return future

    monkeypatch.setattr(checkpoint, "async_save", fail_the_second)
    recipe = make_recipe(checkpoint=CheckpointRecipe(every=2, keep=3, asynchronous=True))
    with pytest.raises(OSError, match=r"of step 4 can't be written .* No space.*steps \[2\]"):
        loop.train(recipe, tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("place", ["model", "."])
def test_a_kill_between_a_runs_cards_is_made_up_for(
    straight: Path, make_recipe, tmp_path: Path, monkeypatch, place: str
) -> None:
    from path_attention.training import export

    out, own = tmp_path / "run", export._replace
    shutil.copytree(straight, out)
    for name in ("card.json", "README.md", "model/README.md"):
        (out / name).unlink()

    def killed(path: Path, text: str) -> None:
        if path == out / place / "README.md":
            raise KeyboardInterrupt
        own(path, text)

    with monkeypatch.context() as patch:
        patch.setattr(export, "_replace", killed)
        with pytest.raises(KeyboardInterrupt):
            loop.train(make_recipe(), out)
    loop.train(make_recipe(), out)
    for name in ("card.json", "README.md", "model/README.md"):
        assert (out / name).exists()


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_damaged_checkpoint_is_not_exported(straight: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "run"
    shutil.copytree(straight, out)
    damaged = out / "checkpoints" / "step-00000006" / name
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(ValueError, match=r"^step: .*step-00000006 is damaged \("):
        export_step(out, None, tmp_path / "out")
    assert export_step(out, 3, tmp_path / "out") == 3


def test_two_runs_do_not_share_a_folder(make_recipe, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(loop, "lock_if_free", lambda lock, patience: lock_if_free(lock))
    with lock_if_free(tmp_path / "train.lock") as mine:
        assert mine
        with pytest.raises(ValueError, match="out: expected a folder in which no run trains"):
            loop.train(make_recipe(), tmp_path)
    assert loop.train(make_recipe(), tmp_path).step == make_recipe().steps


def test_a_lock_may_be_waited_for(tmp_path: Path) -> None:
    def ask(patience: float) -> bool:
        with lock_if_free(tmp_path / "x", patience) as free:
            return free

    with ThreadPoolExecutor(1) as pool:
        with lock_if_free(tmp_path / "x") as mine:
            assert mine and not pool.submit(ask, 0.2).result()
            later = pool.submit(ask, 60.0)
            time.sleep(0.3)
            assert not later.done()
        assert later.result()


def test_a_changed_recipe_is_refused(straight: Path, make_recipe, tmp_path: Path) -> None:
    changed = make_recipe(seed=1, optimizer=OptimizerRecipe(learning_rate=2e-2))
    message = "optimizer.learning_rate was 0.01, is 0.02; seed was 0, is 1"
    with pytest.raises(ValueError, match=message):
        loop.train(changed, straight)
    with pytest.raises(ValueError, match="^resume: expected one of"):
        loop.train(make_recipe(), straight, resume="sometimes")
    with pytest.raises(ValueError, match='expected a new folder with "never"'):
        loop.train(make_recipe(), straight, resume="never")
    with pytest.raises(ValueError, match='expected a checkpoint with "must"'):
        loop.train(make_recipe(), tmp_path / "new", resume="must")


def test_only_the_latest_checkpoints_are_kept(make_recipe, tmp_path: Path) -> None:
    loop.train(make_recipe(checkpoint=CheckpointRecipe(every=1, keep=2)), tmp_path)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "step-00000005", "step-00000006",
    ]  # fmt: skip


def test_a_loss_that_is_not_finite_stops_the_run(make_recipe, tmp_path: Path) -> None:
    wild = OptimizerRecipe(learning_rate=1e30, clip=None)
    recipe = make_recipe(optimizer=wild, checkpoint=CheckpointRecipe(every=1, keep=3))
    message = r"(loss|norm) is (nan|inf) at step 2, on \d+ documents such as \['texts/file"
    with pytest.raises(FloatingPointError, match=message):
        loop.train(recipe, tmp_path)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert not (tmp_path / "model").exists()


def test_a_model_that_does_not_fit_is_refused(make_recipe, tmp_path: Path) -> None:
    for model, message in (
        (ModelRecipe(options={"vocab_size": 299}), "a vocab_size of at least the tokenizer's 300"),
        (ModelRecipe(preset="nothing"), "expected one of"),
        (ModelRecipe(options={"hiden_size": 8}), "hiden_size"),
    ):
        with pytest.raises(ValueError, match=message):
            loop.train(make_recipe(model=model), tmp_path)


def test_a_wider_vocabulary_than_the_tokenizer_is_allowed(make_recipe, corpus) -> None:
    recipe = make_recipe()
    model = dataclasses.replace(recipe.model, options={"vocab_size": 320})
    config = loop.model_config(dataclasses.replace(recipe, model=model), corpus)
    assert config.vocab_size == 320 and config.eos_token_id == corpus.tokenizer().eos_token_id


def test_a_corpus_without_held_out_documents_trains(texts: Path, make_recipe, tmp_path) -> None:
    from path_attention.training.corpus import CorpusRecipe
    from path_attention.training.recipe import DataRecipe

    build = CorpusRecipe(sources=(str(texts),), vocab_size=300, heldout_fraction=0.0)
    data = DataRecipe(context_length=24, corpus=tmp_path / "corpus", build=build)
    loop.train(make_recipe(data=data, steps=2), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "card.json").read_text())["loss"]["heldout"] is None


def test_randomness_hangs_on_the_step(make_recipe) -> None:
    draws = {}
    for seed, step, rank in [(0, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 0)]:
        loop._reseed(seed, step, rank)
        draws[seed, step, rank] = torch.rand(()).item()
    assert len(set(draws.values())) == 4
    loop._reseed(0, 1, 0)
    assert torch.rand(()).item() == draws[0, 1, 0]


@pytest.mark.parametrize(("flag", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_precision_asks_the_processor(monkeypatch, flag: bool, dtype: torch.dtype) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: flag, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False, raising=False)
    assert choose_precision("auto", CPU) == dtype
    assert choose_precision("float32", CPU) == torch.float32
    assert choose_precision("bfloat16", CPU) == torch.bfloat16


def test_bfloat16_trains_nearly_as_float32(straight: Path, make_recipe, tmp_path: Path) -> None:
    loop.train(make_recipe(precision="bfloat16"), tmp_path)
    assert losses(tmp_path) != losses(straight)
    assert losses(tmp_path) == pytest.approx(losses(straight), rel=2e-3)
    assert all(w.dtype == torch.float32 for w in weights(tmp_path).values())


def test_spreading_needs_processes(make_recipe, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='parallel: expected "auto" in a single process'):
        spread(nn.Linear(2, 2), "fsdp", Processes(0, 1, CPU))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device: .* got 'cuda'"):
            loop.train(make_recipe(device="cuda"), tmp_path)


def test_a_log_drops_the_steps_that_are_taken_again(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n{"step": 3, "lo')
    recipe = LogRecipe(every=2, tensorboard=False, progress=False)
    values = {"gradient_norm": 1.0, "learning_rate": 0.1, "tokens": 8}
    with RunLog(tmp_path, recipe, steps=5, start=1, processes=Processes(0, 1, CPU)) as log:
        for step in range(2, 6):
            log.step(step, loss=float(step), **values)
    lines = read_log(path)
    assert lines[:2] == [{"step": 1, "loss": 2.0}, {"step": 1, "event": "resumed"}]
    assert [(line["step"], line["loss"]) for line in lines[2:]] == [(2, 2.0), (4, 4.0), (5, 5.0)]


def test_the_exported_model_is_a_plain_one(straight: Path) -> None:
    model = PathAttentionForCausalLM.from_pretrained(straight / "model")
    assert json.loads((straight / "model" / "config.json").read_text())["architectures"] == [
        "PathAttentionForCausalLM"
    ]
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert not list(straight.glob(".*")), "nothing half-written is left"
