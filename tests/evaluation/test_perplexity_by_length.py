"""Perplexity by length against its definition, on a tiny transformers model and corpus."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as FastTokenizer

from path_attention.evaluation import perplexity_by_length as module
from path_attention.evaluation.perplexity_by_length import (
    Partial,
    bootstrap,
    name_models,
    parse_lengths,
    perplexity_by_length,
)
from path_attention.evaluation.windows import choose_windows
from path_attention.models import PathAttentionConfig, PathAttentionForCausalLM

VOCABULARY = 31
LENGTHS = (8, 16, 32)


def tokenizer(shift: int = 0) -> FastTokenizer:
    words = {f"w{(n + shift) % VOCABULARY}": n for n in range(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return FastTokenizer(tokenizer_object=backend)


class Corpus:
    def __init__(self, sizes: list[int]) -> None:
        rng = np.random.default_rng(0)
        self.texts = [rng.integers(0, VOCABULARY, n).astype(np.uint16) for n in sizes]

    def documents(self, split: str) -> list[int]:
        assert split == "heldout"
        return list(range(len(self.texts)))

    def document(self, n: int) -> np.ndarray:
        return self.texts[n]

    def tokenizer(self) -> FastTokenizer:
        return tokenizer()


def save_model(folder: Path, seed: int, shift: int = 0) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        initializer_range=0.5,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer(shift).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {"one": save_model(root / "one", 1), "two": save_model(root / "two" / "model", 2).parent}


@pytest.fixture
def corpus() -> Corpus:
    return Corpus([40, 33, 70, 32, 5, 120])


def test_length_rows_are_the_definition(folders, corpus):
    rows = perplexity_by_length(folders, corpus, lengths=LENGTHS, targets=4)
    windows = choose_windows(corpus, length=32, targets=4, limit=64)
    model = AutoModelForCausalLM.from_pretrained(folders["one"]).eval()
    for length in LENGTHS:
        losses = []
        for window in torch.from_numpy(windows.tokens):
            seen = window[-length - 1 : -1]
            assert len(seen) == length
            with torch.no_grad():
                logp = model(input_ids=seen[None]).logits[0].log_softmax(-1)
            losses += [
                -logp[i - 1, window[i - 1 - length]].item() for i in range(length - 3, length + 1)
            ]
        (row,) = [r for r in rows if r["model"] == "one" and r.get("length") == length]
        assert row["tokens"] == len(losses)
        assert row["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]), rel=1e-5)
        assert row["low"] < row["perplexity"] < row["high"]
        assert row["training_length"] == 16


def test_growth_is_paired(folders, corpus):
    rows = perplexity_by_length(folders, corpus, lengths=LENGTHS, targets=4)
    rows = {r["length"]: r for r in rows if r["model"] == "one" and r["by"] == "length"}
    first, last = rows[8], rows[32]
    assert (first["growth"], first["growth_low"], first["growth_high"]) == (1.0, 1.0, 1.0)
    assert last["growth"] == pytest.approx(last["perplexity"] / first["perplexity"], rel=1e-5)
    assert last["growth_low"] < last["growth"] < last["growth_high"]


def test_position_rows_are_the_definition(folders, corpus):
    rows = perplexity_by_length(folders, corpus, lengths=LENGTHS, targets=8)
    windows = choose_windows(corpus, length=32, targets=8, limit=64)
    model = AutoModelForCausalLM.from_pretrained(folders["two"] / "model").eval()
    tokens = torch.from_numpy(windows.tokens)
    with torch.no_grad():
        logp = model(input_ids=tokens[:, :-1]).logits.log_softmax(-1)
    losses = -logp.gather(2, tokens[:, 1:, None]).squeeze(2).double()
    rows = [r for r in rows if r["model"] == "two" and r["by"] == "position"]
    assert [(r["from_position"], r["to_position"]) for r in rows] == [(1, 8), (9, 16), (17, 32)]
    assert rows[0]["loss"] == pytest.approx(losses[:, :8].mean().item(), rel=1e-5)
    assert rows[1]["loss"] == pytest.approx(losses[:, 8:16].mean().item(), rel=1e-5)
    spread = losses[:, [16, 18, 20, 22, 25, 27, 29, 31]]
    assert rows[2]["loss"] == pytest.approx(spread.mean().item(), rel=1e-5)


def test_batches_do_not_change_the_numbers(folders, corpus):
    one = perplexity_by_length(folders, corpus, lengths=LENGTHS, targets=4, batch_tokens=32)
    all_ = perplexity_by_length(folders, corpus, lengths=LENGTHS, targets=4, batch_tokens=10**6)
    for a, b in zip(one, all_, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


@pytest.mark.parametrize("preset", ["llama", "path_fox"])
def test_no_more_tokens_are_read_at_once_than_said(preset, folders, corpus, tmp_path, monkeypatch):
    """Longer windows go through the cache, in pieces, with the same numbers."""
    if preset == "llama":
        folder = folders["one"]
    else:
        torch.manual_seed(3)
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = PathAttentionConfig.from_preset(
            preset, vocab_size=VOCABULARY, initializer_range=0.5, **sizes
        )
        folder = tmp_path / "model"
        PathAttentionForCausalLM(config).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    whole = perplexity_by_length({"m": folder}, corpus, lengths=LENGTHS, targets=4)
    read, load = [], module.load_model

    def watched(*args, **kwargs):
        model = load(*args, **kwargs)
        model.get_input_embeddings().register_forward_pre_hook(
            lambda _, inputs: read.append(inputs[0].numel())
        )
        return model

    monkeypatch.setattr(module, "load_model", watched)
    rows = perplexity_by_length({"m": folder}, corpus, lengths=LENGTHS, targets=4, batch_tokens=12)
    assert max(read) <= 12
    for a, b in zip(rows, whole, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


def test_bfloat16_is_close_and_said(folders, corpus):
    exact = perplexity_by_length(folders, corpus, lengths=LENGTHS, targets=4)
    rows = perplexity_by_length(folders, corpus, lengths=LENGTHS, targets=4, dtype="bfloat16")
    assert {row["dtype"] for row in rows} == {"bfloat16"}
    assert [r["loss"] for r in rows] == pytest.approx([r["loss"] for r in exact], rel=0.05)
    assert [r["loss"] for r in rows] != [r["loss"] for r in exact]


def test_interruption_changes_nothing(folders, corpus, tmp_path, monkeypatch):
    straight = perplexity_by_length(folders, corpus, lengths=LENGTHS, targets=4)
    score, calls = module.score, []

    def dying(*arguments):
        calls.append(arguments[2])
        if len(calls) == 5:
            raise KeyboardInterrupt
        return score(*arguments)

    kept = tmp_path / "x.partial.json"
    monkeypatch.setattr(module, "score", dying)
    with pytest.raises(KeyboardInterrupt):
        perplexity_by_length(folders, corpus, lengths=LENGTHS, targets=4, partial=Partial(kept))
    resumed = perplexity_by_length(
        folders, corpus, lengths=LENGTHS, targets=4, partial=Partial(kept)
    )
    assert resumed == straight
    assert calls == [8, 16, 32, 8, 16, 16, 32]


def test_a_changed_model_or_other_tokens_are_measured_again(corpus, tmp_path):
    folder = save_model(tmp_path / "m", 1)
    kept = tmp_path / "x.partial.json"

    def losses(seed: int = 0) -> list[float]:
        rows = perplexity_by_length(
            {"m": folder},
            corpus,
            lengths=(8,),
            targets=4,
            windows=3,
            seed=seed,
            partial=Partial(kept),
        )
        return [row["loss"] for row in rows]

    before = losses()
    assert losses(seed=1) != before
    assert losses() == before
    save_model(folder, 2)
    assert losses() != before


def test_progress_ends_at_the_total(folders, corpus):
    seen: dict[str, list[tuple[int, int]]] = {}
    perplexity_by_length(
        folders,
        corpus,
        lengths=LENGTHS,
        targets=4,
        progress=lambda label, done, total: seen.setdefault(label, []).append((done, total)),
    )
    for steps in seen.values():
        done = [d for d, _ in steps]
        assert done == sorted(done) and done[0] == 0
        assert done[-1] == steps[-1][1] == 7 * sum(LENGTHS)


def test_one_document_has_no_interval(folders):
    rows = perplexity_by_length(folders, Corpus([400]), lengths=LENGTHS, targets=4)
    assert {(row["low"], row["high"]) for row in rows} == {(None, None)}
    assert rows[0]["documents"] == 1 and rows[0]["windows"] == 12


def test_bootstrap_covers_the_mean_of_documents():
    rng = np.random.default_rng(1)
    inside = 0
    for seed in range(200):
        sums = rng.normal(2.0, 1.0, 40) * 10
        low, high = bootstrap(sums, np.full(40, 10), seed=seed, resamples=400)
        assert low is not None and high is not None
        inside += low <= 2.0 <= high
    assert 0.88 <= inside / 200 <= 0.99


def test_bootstrap_weighs_tokens():
    low, high = bootstrap(np.array([1.0, 300.0]), np.array([1, 100]))
    assert (low, high) == (1.0, 3.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": (16, 8)}, "lengths: expected rising"),
        ({"lengths": (8, 8)}, "lengths: expected rising"),
        ({"lengths": ()}, "lengths: expected rising"),
        ({"targets": 9}, "targets: expected between 1 and the shortest length 8, got 9"),
        ({"targets": 0}, "targets: expected"),
        ({"windows": 0}, "windows: expected at least 1"),
        ({"lengths": (8, 500)}, "lengths: expected at most 119 .* longest has 120 tokens"),
    ],
)
def test_bad_input(folders, corpus, options, message):
    with pytest.raises(ValueError, match=message):
        perplexity_by_length(folders, corpus, **({"lengths": (8,), "targets": 4} | options))


def test_other_tokenizer_is_refused(corpus, tmp_path):
    folder = save_model(tmp_path / "m", 1, shift=1)
    with pytest.raises(ValueError, match="models: expected m to have the corpus's tokenizer"):
        perplexity_by_length({"m": folder}, corpus, lengths=(8,), targets=4)
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="expected a tokenizer in"):
        perplexity_by_length({"m": folder}, corpus, lengths=(8,), targets=4)


def test_folders_and_labels(tmp_path, monkeypatch):
    a, b = Path("runs/a/model"), Path("runs/b")
    assert name_models([a, b]) == {"a": a, "b": b}
    assert name_models([a, b], ["x", "y"]) == {"x": a, "y": b}
    for here, folder in (
        (b, Path(".")),
        (a, Path(".")),
        (a, Path("..")),
        (a.parent, Path("model")),
    ):
        (tmp_path / here).mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(tmp_path / here)
        assert name_models([folder]) == {here.parts[1]: folder}
    for bad in ("", "..", "../a", "/a"):
        with pytest.raises(ValueError, match="labels: expected names of files, got"):
            name_models([a], [bad])
    with pytest.raises(ValueError, match="labels: expected a different one"):
        name_models([Path("s0/path"), Path("s1/path")])
    with pytest.raises(ValueError, match="labels: expected one for each of the 2"):
        name_models([a, b], ["x"])
    with pytest.raises(ValueError, match="models: expected at least one"):
        name_models([])
    with pytest.raises(ValueError, match=r"model: expected a run's or a model's folder"):
        perplexity_by_length({"m": tmp_path}, Corpus([40]), lengths=(8,), targets=4)


def test_words_to_lengths():
    assert parse_lengths("256,512, 1024") == (256, 512, 1024)
    with pytest.raises(ValueError, match="lengths: expected whole numbers"):
        parse_lengths("256;512")


def test_damaged_partial_file_is_named(tmp_path):
    kept = tmp_path / "x.partial.json"
    kept.write_text(json.dumps({"a": []})[:-2])
    with pytest.raises(ValueError, match=r"x\.partial\.json is damaged"):
        Partial(kept)
