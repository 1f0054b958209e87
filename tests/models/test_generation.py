"""The command `generate`."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from dataclasses import replace

import pytest
import torch
import tyro

from path_attention.models import generation
from path_attention.models.generation import Generate, encode_prompt, read_prompts


@pytest.fixture
def run_folder(make_model, tmp_path):
    """A run's folder with an untrained model and a byte-level tokenizer of 258 tokens."""
    pytest.importorskip("tokenizers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: n for n, token in enumerate(["<|end|>", "<|pad|>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|end|>", eos_token="<|end|>", pad_token="<|pad|>"
    )
    make_model("path", vocab_size=258).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path


def test_streams_the_text_that_generate_returns(run_folder, capsys) -> None:
    command = Generate(model=run_folder, prompt="def f(x):", max_new_tokens=9, temperature=0.0)
    command.run()
    first = capsys.readouterr()
    assert first.out.startswith("def f(x):")
    told = (
        r"^10 tokens read in [\d.]+ s, 9 written: [\d.]+ tokens/s; cache of 18 tokens: [\d.]+ MiB$"
    )
    assert re.search(told, first.err.strip().split("\n")[-1])
    command.run()
    assert capsys.readouterr().out == first.out


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="a GPU's kernels on a CPU")
def test_a_cache_of_fixed_size_writes_the_same(run_folder, capsys, monkeypatch) -> None:
    pytest.importorskip("triton")
    command = Generate(
        model=run_folder, prompt="ab", max_new_tokens=5, temperature=0.0, graphs="yes"
    )
    with pytest.raises(ValueError, match="graphs: expected an NVIDIA GPU, got cpu"):
        command.run()
    texts, caches = [], []

    class Noted(generation.StaticPathCache):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            caches.append(self)

    monkeypatch.setattr(generation, "StaticPathCache", Noted)
    for lacks in ("a GPU", None):
        monkeypatch.setattr(generation, "steps_lack", lambda model, lacks=lacks: lacks)
        replace(command, graphs="auto").run()
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    (cache,) = caches
    assert cache.get_seq_length() == 7 and not cache.is_croppable
    for given in ({"draft": run_folder}, {"prefixes": run_folder / "kept"}):
        with pytest.raises(ValueError, match=f"graphs: expected no {next(iter(given))}, got one"):
            replace(command, **given).run()


def test_the_seed_decides(run_folder, capsys) -> None:
    texts = []
    for seed in (0, 0, 1):
        Generate(
            model=run_folder / "model", prompt="a", max_new_tokens=8, temperature=1.5, seed=seed
        ).run()
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_prompt_from_a_file_or_stdin(run_folder, capsys, monkeypatch) -> None:
    file = run_folder / "prompt.txt"
    file.write_text("größe = 1\n", encoding="utf-8")
    Generate(model=run_folder, prompt_file=file, max_new_tokens=1, temperature=0.0).run()
    from_file = capsys.readouterr().out
    assert from_file.startswith("größe = 1\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("größe = 1\n"))
    Generate(model=run_folder, max_new_tokens=1, temperature=0.0).run()
    assert capsys.readouterr().out == from_file


def test_prompts_start_as_training_documents_do(run_folder) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run_folder / "model")
    ids = encode_prompt(tokenizer, "ab")
    assert ids.shape == (1, 3) and ids[0, 0] == tokenizer.bos_token_id
    assert encode_prompt(tokenizer, "").tolist() == [[tokenizer.bos_token_id]]
    assert torch.equal(encode_prompt(tokenizer, "<|end|>ab"), ids)
    tokenizer.bos_token = None
    with pytest.raises(ValueError, match="prompt: expected at least one token"):
        encode_prompt(tokenizer, "")


def test_several_prompts_from_a_file(run_folder, capsys) -> None:
    """Each as if alone, whatever came before."""
    how = {"model": run_folder, "max_new_tokens": 6, "temperature": 1.5}
    alone = []
    for text in ("def f(x):", "größe"):
        Generate(prompt=text, **how).run()
        alone.append(capsys.readouterr().out)
    file = run_folder / "prompts.jsonl"
    file.write_text('"def f(x):"\n\n"größe"\n', encoding="utf-8")
    Generate(prompts=file, **how).run()
    both = capsys.readouterr()
    assert both.out == "".join(alone) and both.err.count("tokens/s") == 2
    for line in ("{}", "[1]", "[]", "oops", '[{"role": "user"}]'):
        file.write_text(f'"a"\n{line}\n')
        with pytest.raises(ValueError, match="prompts: expected a JSON text .* in line 2 of"):
            read_prompts(file)
    odd = ["a\u2028b", "a\u2029b", "a\u0085b"]  # none of them ends a line of JSON
    file.write_text("".join(f'"{text}"\n' for text in odd), encoding="utf-8")
    assert read_prompts(file) == odd
    file.write_text("\n")
    with pytest.raises(ValueError, match="prompts: expected at least one line"):
        read_prompts(file)


def test_chats_go_through_the_template(run_folder, capsys) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run_folder / "model")
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer.save_pretrained(run_folder / "model")
    how = {"model": run_folder, "max_new_tokens": 3, "temperature": 0.0}
    Generate(prompt="Hi", chat=True, system="Be brief.", **how).run()
    out = capsys.readouterr().out
    assert out.startswith("<system>Be brief.<user>Hi<assistant>")
    file = run_folder / "chats.jsonl"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    file.write_text(json.dumps(messages))
    Generate(prompts=file, **how).run()
    assert capsys.readouterr().out == out


def test_stops_at_a_text(run_folder, capsys) -> None:
    how = {"model": run_folder, "prompt": "def f(x):", "max_new_tokens": 30, "temperature": 0.0}
    Generate(**how).run()
    whole = capsys.readouterr().out
    stop = whole[len(how["prompt"]) + 8]
    Generate(stop=(stop,), **how).run()
    short = capsys.readouterr().out
    end = whole.index(stop, len(how["prompt"])) + 1
    assert short.rstrip("\n") == whole[:end].rstrip("\n") and len(short) < len(whole)


def test_drafts_and_kept_prefixes_give_the_same_text(run_folder, make_model, capsys) -> None:
    draft, kept = run_folder / "draft", run_folder / "prefixes"
    make_model("path", vocab_size=258, num_hidden_layers=1).save_pretrained(draft)
    how = {"model": run_folder, "max_new_tokens": 40, "temperature": 0.0}
    how["prompt"] = "def f(x):\n    return x\n" * 12
    texts = []
    for more in ({}, {"draft": draft}, {"prefixes": kept}, {"prefixes": kept}):
        Generate(**how, **more).run()
        texts.append(capsys.readouterr().out)
    assert texts == texts[:1] * 4
    (file,) = kept.glob("*.safetensors")
    assert file.stat().st_size > 0
    Generate(**how, prefixes=kept, prefix_bytes=0).run()
    assert not list(kept.glob("*.safetensors"))


def test_words_of_the_command_line(run_folder) -> None:
    words = ["--prompt", "x", "--top-p", "0.5", "--stop", "a", "b", "--chat"]
    command = tyro.cli(Generate, args=[str(run_folder), *words])
    assert command == Generate(model=run_folder, prompt="x", top_p=0.5, stop=("a", "b"), chat=True)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"prompt_file": "x"}, "prompt: expected one of --prompt"),
        ({"prompts": "x"}, "prompt: expected one of --prompt"),
        ({"system": "x"}, "system: expected with --chat only"),
        ({"stop": ("a", "")}, "stop: expected texts"),
        ({"draft": "x", "prefixes": "y"}, "draft: expected none with --prefixes"),
        ({"prefix_bytes": -1}, "prefix_bytes: expected at least 0"),
        ({"chat": True}, "chat: expected a tokenizer with a chat template"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected"),
        ({"temperature": -0.1}, "temperature: expected"),
        ({"temperature": float("nan")}, "temperature: expected"),
        ({"top_p": 0.0}, "top_p: expected"),
        ({"top_p": 1.5}, "top_p: expected"),
        ({"model": "nowhere"}, "model: expected"),
    ],
)
def test_bad_options_are_refused(run_folder, change: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Generate(**{"model": run_folder, "prompt": "x", **change}).run()


def test_a_tokenizer_that_does_not_fit_is_refused(run_folder, make_model) -> None:
    make_model("path", vocab_size=257).save_pretrained(run_folder / "model")
    with pytest.raises(ValueError, match="tokenizer: expected at most the model's 257 tokens, got"):
        Generate(model=run_folder, prompt="x").run()
    (run_folder / "model" / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="expected a tokenizer"):
        Generate(model=run_folder, prompt="x").run()
