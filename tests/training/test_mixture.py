"""Several corpora in shares, models to go on from, and objectives of one's own."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file
from small_run import small_recipe, write_texts

from path_attention.models import PathAttentionForCausalLM, load_model
from path_attention.training.corpus import TokenCorpus, build_corpus
from path_attention.training.loop import train
from path_attention.training.mixture import CorpusMixture, MixedRows, parse_part, whole_weights
from path_attention.training.objective import Objective
from path_attention.training.recipe import DataRecipe, ModelRecipe
from path_attention.training.rows import PackedRows

OPTIONS = {"context_length": 24, "row_tokens": 32, "seed": 3}


@pytest.fixture(scope="module")
def corpora(corpus: TokenCorpus, tmp_path_factory) -> list[TokenCorpus]:
    """Three of one tokenizer, the last without documents held out."""
    out, made = tmp_path_factory.mktemp("parts"), [corpus]
    for n, fraction in ((1, 0.3), (2, 0.0)):
        texts = write_texts(out / f"texts{n}", count=12, seed=n)
        options = {"tokenizer": str(corpus.path / "tokenizer"), "heldout_fraction": fraction}
        made.append(build_corpus(str(texts), out / f"corpus{n}", progress=False, **options))
    return made


def test_weights_are_ratios_or_shares() -> None:
    assert whole_weights([1, 1, 1]) == [1, 1, 1]
    assert whole_weights([2.0, 4.0]) == [1, 2]
    assert whole_weights([0.5, 0.25, 0.25]) == [2, 1, 1]
    assert whole_weights([1 / 3, 2 / 3]) == [1, 2]
    assert parse_part("a=b=0.5")[1] == 0.5 and parse_part("a")[1] == 1.0
    for weights in ([0.5, 0.4], [1.5, 1], [0.5, 0.5, 0.5]):
        with pytest.raises(ValueError, match="mixture: .*shares that sum to 1.*sum to"):
            whole_weights(weights)
    for weights in ([0, 1], [-1, 2], [float("nan"), 1]):
        with pytest.raises(ValueError, match="mixture: expected weights above 0"):
            whole_weights(weights)
    with pytest.raises(ValueError, match="at least 1/1000"):
        whole_weights([1e-5, 1 - 1e-5])
    with pytest.raises(ValueError, match="FOLDER=WEIGHT"):
        parse_part("a=much")


@pytest.mark.parametrize(
    "weights", [[0.1234, 0.4567, 0.4199], [123456789, 98765432], [0.0013, 0.3217, 0.3333, 0.3437]]
)
def test_rounds_stay_short(weights: list[float]) -> None:
    """The least common multiples of the denominators here are some 10⁸ to 10⁹."""
    whole = whole_weights(weights)
    assert sum(whole) <= 10_000
    for part, weight in zip(whole, weights, strict=True):
        assert abs(part / sum(whole) - weight / sum(weights)) < 1e-4
    with pytest.raises(ValueError, match="at least 1/1000"):
        whole_weights([1, 20_000])


def test_every_round_has_its_shares_and_each_parts_rows_in_order(corpora) -> None:
    mixture = CorpusMixture(corpora, [2, 1, 3])
    mixed = MixedRows(mixture, "train", **OPTIONS)
    parts = [PackedRows(part, "train", **OPTIONS) for part in corpora]
    starts = [0, len(corpora[0].names), len(corpora[0].names) + len(corpora[1].names)]
    orders, counts = set(), Counter()
    for turn in range(4):
        rows = [mixed.row(turn * 6 + n) for n in range(6)]
        found = []
        for row in rows:
            part = sum(row.documents[0] >= start for start in starts) - 1
            found.append(part)
            wanted = sorted(parts[part].row(n).input_ids.tolist() for n in range(40))
            assert row.input_ids.tolist() in wanted
            counts[(part, *row.input_ids.flatten().tolist())] += 1
            names = {mixture.names[document] for document in row.documents}
            assert names <= set(corpora[part].names)
        assert Counter(found) == {0: 2, 1: 1, 2: 3}
        orders.add(tuple(found))
    assert len(orders) > 1
    used = {part: sum(n for key, n in counts.items() if key[0] == part) for part in range(3)}
    assert used == {0: 8, 1: 4, 2: 12}
    for part, count in used.items():
        rows = {(part, *parts[part].row(n).input_ids.flatten().tolist()) for n in range(count)}
        assert rows == {key for key in counts if key[0] == part}
    again = MixedRows(mixture, "train", **OPTIONS)
    assert torch.equal(again.row(17).input_ids, mixed.row(17).input_ids)


def test_held_out_rows_leave_out_parts_without(corpora) -> None:
    mixture = CorpusMixture(corpora, [1, 1, 1])
    heldout = MixedRows(mixture, "heldout", **OPTIONS)
    assert len(heldout.rows) == 2
    smaller = min(rows.epoch_tokens for rows in heldout.rows)
    assert heldout.epoch_tokens == 2 * smaller
    assert mixture.info["heldout_tokens"] == sum(c.info["heldout_tokens"] for c in corpora)


def test_corpora_of_two_tokenizers_are_refused(corpora, tmp_path) -> None:
    texts = write_texts(tmp_path / "texts", count=6, seed=5)
    other = build_corpus(
        str(texts), tmp_path / "other", vocab_size=280, heldout_fraction=0.0, progress=False
    )
    with pytest.raises(ValueError, match="mixture: expected corpora of one tokenizer"):
        CorpusMixture([corpora[0], other], [1, 1])
    with pytest.raises(ValueError, match="mixture: expected a weight for each corpus"):
        CorpusMixture(corpora, [1, 1])
    with pytest.raises(ValueError, match="mixture: expected none beside a corpus"):
        DataRecipe(context_length=24, corpus=other.path, mixture=("a=1",))


def mixed_recipe(corpora, **fields):
    recipe = small_recipe(corpora[0].path)
    mixture = tuple(f"{c.path}={w}" for c, w in zip(corpora, (2, 1, 1), strict=True))
    data = dataclasses.replace(recipe.data, corpus=None, mixture=mixture)
    return dataclasses.replace(recipe, data=data, **fields)


def test_a_run_on_a_mixture_goes_on_as_if_never_stopped(corpora, tmp_path) -> None:
    recipe = mixed_recipe(corpora, micro_batch_tokens=32)
    train(recipe, tmp_path / "whole")
    train(recipe, tmp_path / "parts")
    (tmp_path / "parts" / "card.json").unlink()
    for name in ("model", "checkpoints/step-00000006"):
        (tmp_path / "parts" / name).rename(tmp_path / name.replace("/", "-"))
    train(recipe, tmp_path / "parts", resume="must")
    a, b = (load_file(tmp_path / run / "model" / "model.safetensors") for run in ("whole", "parts"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    card = json.loads((tmp_path / "whole" / "card.json").read_text())
    assert [part["weight"] for part in card["data"]["parts"]] == [2, 1, 1]
    other = dataclasses.replace(recipe.data, mixture=recipe.data.mixture[:2])
    with pytest.raises(ValueError, match="resume: .*another recipe: corpus was"):
        train(dataclasses.replace(recipe, data=other), tmp_path / "parts")


def test_going_on_from_a_model(make_recipe, tmp_path) -> None:
    recipe = make_recipe()
    train(recipe, tmp_path / "first")
    model = ModelRecipe(preset="path", start=tmp_path / "first")
    later = dataclasses.replace(
        recipe, model=model, optimizer=dataclasses.replace(recipe.optimizer, learning_rate=0.0)
    )
    train(later, tmp_path / "second")
    a, b = (load_model(tmp_path / run).state_dict() for run in ("first", "second"))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    train(dataclasses.replace(later, model=dataclasses.replace(model)), tmp_path / "second")
    moved = tmp_path / "moved"
    (tmp_path / "first").rename(moved)
    again = dataclasses.replace(later, model=dataclasses.replace(model, start=moved))
    train(again, tmp_path / "second")  # the same model, wherever it is
    config = json.loads((moved / "model" / "config.json").read_text())
    config["max_position_embeddings"] = 1
    (moved / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="another recipe: model.start was"):
        train(again, tmp_path / "second")
    for fields, message in (
        ({"preset": "fox"}, "expected the encoding of preset 'fox'"),
        ({"start": tmp_path}, "config.json"),
    ):
        bad = dataclasses.replace(again, model=dataclasses.replace(again.model, **fields))
        with pytest.raises(ValueError, match=message):
            train(bad, tmp_path / "third")
    with pytest.raises(ValueError, match='initialisation: expected "whole"'):
        train(dataclasses.replace(again, initialisation="meta"), tmp_path / "third")
    with pytest.raises(ValueError, match="model.start: expected no other field"):
        dataclasses.replace(again, model=dataclasses.replace(again.model, hidden_size=16))


class _Halved(Objective):
    """Half the loss, on the embedding alone; notes when it is called."""

    def __init__(self) -> None:
        self.steps = []

    def course(self):
        return {"objective": "halved"}

    def prepare(self, model, recipe, processes, dtype) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("embed_tokens" in name)

    def begin_step(self, step: int, steps: int) -> None:
        self.steps.append((step, steps))

    def loss(self, model, row, divisor, device):
        return super().loss(model, row, divisor, device) / 2

    def exported(self, config, state):
        return config, {name: value + 1 for name, value in state.items()}


def test_another_objective_trains_and_is_part_of_the_course(make_recipe, tmp_path) -> None:
    recipe, objective = make_recipe(), _Halved()
    train(recipe, tmp_path / "plain")
    train(recipe, tmp_path / "halved", objective=objective)
    assert objective.steps == [(step, 6) for step in range(6)]
    plain, halved = (
        json.loads((tmp_path / run / "log.jsonl").read_text().splitlines()[0])["loss"]
        for run in ("plain", "halved")
    )
    assert halved == pytest.approx(plain / 2)
    kept = load_model(tmp_path / "halved").state_dict()
    torch.manual_seed(recipe.seed)
    start = PathAttentionForCausalLM(load_model(tmp_path / "plain").config).state_dict()
    for name, value in start.items():
        trained = name in ("model.embed_tokens.weight", "lm_head.weight")  # they are tied
        assert torch.equal(kept[name], value + 1) != trained, name
    with pytest.raises(ValueError, match="another recipe: objective was 'halved', is None"):
        train(recipe, tmp_path / "halved")
