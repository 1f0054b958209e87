"""Token corpora: documents come back as they were, the split hangs on names, nothing is lost."""

from __future__ import annotations

import dataclasses
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small_run import write_texts

from path_attention.training import corpus as corpus_module
from path_attention.training.corpus import CorpusRecipe, TokenCorpus, build, build_corpus
from path_attention.training.sources import Documents
from path_attention.training.tokenizer import END
from path_attention.training.tokens import Encoder


def make(sources, out, **options) -> TokenCorpus:
    options = {"vocab_size": 300, "heldout_fraction": 0.2, "progress": False, **options}
    return build_corpus(sources, out, **options)


def test_documents_come_back_as_they_were(texts: Path, corpus: TokenCorpus) -> None:
    tokenizer = corpus.tokenizer()
    assert corpus.names == [f"texts/file{n:02}.py" for n in range(40)]
    for n, name in enumerate(corpus.names):
        ids = corpus.document(n)
        assert ids[0] == ids[-1] == tokenizer.eos_token_id
        text = (texts.parent / name).read_text()
        assert tokenizer.decode(ids[1:-1]) == text
        assert corpus.bytes[n] == len(text)
    assert corpus.tokens.dtype == np.uint16
    assert len(corpus.tokens) == corpus.borders[-1] == corpus.info["tokens"]
    assert corpus.vocab_size == len(tokenizer) == 300
    split = np.concatenate([corpus.documents("train"), corpus.documents("heldout")])
    assert sorted(split) == list(range(40)) and 0 < len(corpus.documents("heldout")) < 20


def test_a_prompt_starts_as_a_document_does(corpus: TokenCorpus) -> None:
    tokenizer = corpus.tokenizer()
    ids = tokenizer("def f(x):").input_ids
    assert ids[0] == tokenizer.bos_token_id == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == "def f(x):"


def test_bytes_of_any_kind_survive(tmp_path: Path) -> None:
    text = f"\ttab\r\nCRLF  spaces   {END} ünïcødé 漢字 🙂\x7f"
    write_texts(tmp_path / "a", 10)
    (tmp_path / "a" / "odd.txt").write_bytes(text.encode())
    corpus = make(str(tmp_path / "a"), tmp_path / "c", heldout_fraction=0.0)
    ids = corpus.document(corpus.names.index("a/odd.txt"))
    tokenizer = corpus.tokenizer()
    assert tokenizer.decode(ids[1:-1], clean_up_tokenization_spaces=False) == text
    # a special token spelled out in a text is not the special token
    assert (ids == tokenizer.eos_token_id).sum() == 2


def test_the_split_hangs_on_names_alone(tmp_path: Path, corpus: TokenCorpus, texts: Path) -> None:
    more = tmp_path / "texts"
    shutil.copytree(texts, more)
    for n in range(20):
        (more / f"another{n}.py").write_text("pass\n")
    grown = make(str(more), tmp_path / "c")
    before = {corpus.names[n] for n in corpus.documents("heldout")}
    after = {grown.names[n] for n in grown.documents("heldout")}
    assert before == after & set(corpus.names)
    other = CorpusRecipe(sources=(str(texts),), heldout_fraction=0.2, seed=1)
    assert before != {name for name in corpus.names if other.is_heldout(name)}


def test_the_tokenizer_never_sees_held_out_documents(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts", 40)
    recipe = CorpusRecipe(sources=(str(folder),), heldout_fraction=0.2)
    for path in folder.iterdir():
        word = "zebra" if recipe.is_heldout(f"texts/{path.name}") else "camel"
        path.write_text(f"{word} {word} {word}\n" * 50)
    vocabulary = make(str(folder), tmp_path / "c").tokenizer().get_vocab()
    assert "Ġcamel" in vocabulary and "Ġzebra" not in vocabulary


def test_the_same_corpus_is_reused_and_another_is_not_overwritten(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts", 20)
    out = tmp_path / "c"
    first = make(str(folder), out)
    written = (out / "tokens.bin").stat().st_mtime_ns
    assert make(str(folder), out).fingerprint == first.fingerprint
    assert (out / "tokens.bin").stat().st_mtime_ns == written
    (folder / "file03.py").write_text("changed = True\n")
    with pytest.raises(ValueError, match="out: .* holds a corpus made from other sources"):
        make(str(folder), out)
    assert TokenCorpus.open(out).fingerprint == first.fingerprint
    second = make(str(folder), out, overwrite=True)
    assert second.fingerprint != first.fingerprint
    assert second.tokenizer().decode(second.document(3)[1:-1]) == "changed = True\n"
    assert make(str(folder), tmp_path / "d").fingerprint == second.fingerprint
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds something that is not a corpus"):
        make(str(folder), tmp_path / "e", overwrite=True)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_what_is_skipped_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_texts(tmp_path / "texts", 20)
    (folder / "latin.txt").write_bytes("café".encode("latin-1"))
    (folder / "binary.bin").write_bytes(b"abc\0def")
    (folder / "empty.txt").write_text(" \n")
    (folder / ".hidden").write_text("secret")
    held = next(
        n
        for n in range(20)
        if CorpusRecipe(heldout_fraction=0.2).is_heldout(f"texts/file{n:02}.py")
    )
    copied = (folder / f"file{held:02}.py").read_text()
    for n in range(20):  # at least one of these names is in training
        (folder / f"copy{n}.py").write_text(copied)
    sources = (str(folder), str(folder / "file0*.py"))
    corpus = make(sources, tmp_path / "c", progress=True)
    assert corpus.info["skipped"] == {
        "named twice (taken once)": 10, "not UTF-8 text": 2, "empty": 1,
    }  # fmt: skip
    assert len(corpus.names) == 40 and "texts/.hidden" not in corpus.names
    assert corpus.info["heldout_documents_also_in_training"] >= 1
    said = capsys.readouterr().err
    assert "2 not UTF-8 text" in said and "of which training has a copy" in said


def test_include_chooses_the_files_of_a_folder(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts", 20)
    (folder / "notes.md").write_text("# notes")
    corpus = make(str(folder), tmp_path / "c", include=("*.md", "file1*"), heldout_fraction=0.0)
    assert corpus.names == [f"texts/file1{n}.py" for n in range(10)] + ["texts/notes.md"]
    limited = make(str(folder), tmp_path / "d", max_documents=5, heldout_fraction=0.0)
    assert limited.names == [f"texts/file0{n}.py" for n in range(5)]


def test_the_standard_library_is_found_in_a_fixed_order() -> None:
    files = Documents(("stdlib",)).files
    names = [file.name for file in files]
    assert "stdlib/argparse.py" in names and "stdlib/json/decoder.py" in names
    assert names == sorted(names) and len(names) > 300
    assert not any("site-packages" in name or "__pycache__" in name for name in names)


@pytest.mark.parametrize(
    ("sources", "options", "message"),
    [
        ((), {}, "sources: expected at least one"),
        (("no/such/file",), {}, "'no/such/file', which does not exist"),
        (("EMPTY",), {}, "sources: expected files matching"),
        (("BLANK",), {}, r"expected at least one document of text, .*\(1 empty\)"),
        (("TEXTS",), {"vocab_size": 100}, "vocab_size: expected at least 258"),
        (("TEXTS",), {"tokenizer": "x", "vocab_size": 300}, "vocab_size: expected None with"),
        (("TEXTS",), {"tokenizer": "/no/such", "vocab_size": None}, "tokenizer: '/no/such' can't"),
        (("TEXTS",), {"heldout_fraction": 1.0}, r"heldout_fraction: expected in \[0, 1\)"),
        (("TEXTS",), {"heldout_fraction": 1e-9}, "heldout_fraction: .* holds out 0 of 40"),
        (("TEXTS",), {"max_documents": 0}, "max_documents: expected at least 1"),
        (("TEXTS",), {"hub_config": "x"}, "hub_config: expected None"),
    ],
)
def test_bad_input_is_refused(tmp_path: Path, texts: Path, sources, options, message: str) -> None:
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "BLANK").mkdir()
    (tmp_path / "BLANK" / "a.txt").write_text("\n")
    places = {"EMPTY": tmp_path / "EMPTY", "BLANK": tmp_path / "BLANK", "TEXTS": texts}
    named = tuple(str(places.get(source, source)) for source in sources)
    with pytest.raises(ValueError, match=message):
        make(named, tmp_path / "c", **options)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["BLANK", "EMPTY"]


def test_a_damaged_corpus_is_refused(tmp_path: Path, corpus: TokenCorpus) -> None:
    with pytest.raises(ValueError, match="has no corpus.json"):
        TokenCorpus.open(tmp_path)
    copy = tmp_path / "c"
    shutil.copytree(corpus.path, copy)
    with open(copy / "tokens.bin", "r+b") as file:
        file.truncate(100)
    with pytest.raises(ValueError, match=r"is damaged: tokens.bin: expected \d+ bytes, got"):
        TokenCorpus.open(copy)
    for name in ("heldout.npy", "names.json"):
        shutil.rmtree(copy)
        shutil.copytree(corpus.path, copy)
        with open(copy / name, "r+b") as file:
            file.truncate((copy / name).stat().st_size - 1)
        with pytest.raises(ValueError, match=f"^corpus: {copy} is damaged: "):
            _ = TokenCorpus.open(copy).names
    (copy / "borders.npy").unlink()
    with pytest.raises(ValueError, match="has no borders.npy"):
        TokenCorpus.open(copy)
    (copy / "corpus.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        TokenCorpus.open(copy)
    with pytest.raises(ValueError, match='split: expected "train" or "heldout"'):
        corpus.documents("test")  # type: ignore[arg-type]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    """Writing fails at a file size limit; the corpus to be replaced is untouched."""
    before = make(str(write_texts(tmp_path / "texts", 10)), tmp_path / "c", heldout_fraction=0.0)
    tokens = before.tokens.copy()
    (tmp_path / "texts" / "big.txt").write_text("0123456789\n" * 20000)
    result = subprocess.run(
        [sys.executable, "-m", "path_attention.cli", "corpus", "build", "--sources",
         str(tmp_path / "texts"), "--out", str(tmp_path / "c"), "--vocab-size", "300",
         "--heldout-fraction", "0", "--overwrite"],
        capture_output=True, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)),
    )  # fmt: skip
    assert result.returncode == 2, result.stderr
    assert "error: [Errno 27] corpus: File too large" in result.stderr
    assert "Traceback" not in result.stderr
    after = TokenCorpus.open(tmp_path / "c")
    assert after.fingerprint == before.fingerprint and (after.tokens == tokens).all()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "texts"]


def test_a_tokenizer_by_folder_and_a_vocabulary_past_16_bits(
    tmp_path: Path, corpus: TokenCorpus, texts: Path
) -> None:
    same = make(
        str(texts), tmp_path / "a", tokenizer=str(corpus.path / "tokenizer"), vocab_size=None
    )
    assert (same.tokens == corpus.tokens).all()

    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<end>": 0, "<unk>": 1, **{f"w{n}": n for n in range(2, 70_000)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", unk_token="<unk>"
    ).save_pretrained(tmp_path / "words")
    (tmp_path / "text").write_text("w69999 w5 nothing")
    wide = make(
        str(tmp_path / "text"), tmp_path / "b",
        tokenizer=str(tmp_path / "words"), vocab_size=None, heldout_fraction=0.0,
    )  # fmt: skip
    assert wide.tokens.dtype == np.uint32 and wide.tokens.tolist() == [0, 69999, 5, 1, 0]


def test_a_vocabulary_with_a_hole_has_room_for_its_last_token(tmp_path: Path, corpus) -> None:
    shutil.copytree(corpus.path / "tokenizer", tmp_path / "tokenizer")
    path = tmp_path / "tokenizer" / "tokenizer.json"
    content = json.loads(path.read_text())
    words = content["model"]["vocab"]
    words["e"] = 70_000
    path.write_text(json.dumps(content))
    (tmp_path / "text").write_text("e")
    options = {"tokenizer": str(tmp_path / "tokenizer"), "vocab_size": None}
    made = make(str(tmp_path / "text"), tmp_path / "c", heldout_fraction=0.0, **options)
    assert (made.vocab_size, made.tokens.tolist()) == (70_001, [0, 70_000, 0])


def test_a_data_set_is_streamed(tmp_path: Path) -> None:
    rows = [{"text": f"row {n} of the set"} for n in range(30)]
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    name = f"hub:{tmp_path / 'set'}"
    corpus = make(name, tmp_path / "c", max_documents=25)
    assert len(corpus.names) == 25 and corpus.names[7].endswith("/7")
    assert corpus.tokenizer().decode(corpus.document(7)[1:-1]) == "row 7 of the set"
    with pytest.raises(ValueError, match=r"hub_column: .* one of \['text'\], got 'body'"):
        make(name, tmp_path / "d", hub_column="body")
    with pytest.raises(ValueError, match="the hub data set .* can't be read"):
        make(f"hub:{tmp_path}/no/set", tmp_path / "e")


def test_a_row_without_text_is_empty(tmp_path: Path) -> None:
    rows = [{"text": None if n == 3 else f"row {n} of the set"} for n in range(30)]
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    corpus = make(f"hub:{tmp_path / 'set'}", tmp_path / "c")
    assert len(corpus.names) == 29 and corpus.info["skipped"] == {"empty": 1}


@pytest.mark.parametrize("again", [35, 0])
def test_a_stream_that_breaks_goes_on_where_it_was(tmp_path: Path, monkeypatch, again: int) -> None:
    """Broken at row 35 while tokens are made, then at row `again`; each text is encoded once."""
    import datasets

    encoded, breaks = [], [None]

    def stream(*_, **__):
        for n in range(40):
            if n == breaks[0]:
                raise ConnectionError("gone")
            yield {"text": f"row {n} of the set " * 9}

    own, train = Encoder.encode, corpus_module._train_tokenizer

    def encode(self, texts):
        encoded.extend(texts)
        return own(self, texts)

    def then_break(*given):
        tokenizer = train(*given)
        breaks[0] = 35
        return tokenizer

    monkeypatch.setattr(datasets, "load_dataset", stream)
    monkeypatch.setattr(corpus_module, "_BATCH_CHARACTERS", 1000)
    whole = make("hub:set", tmp_path / "whole")
    monkeypatch.setattr(Encoder, "encode", encode)
    monkeypatch.setattr(corpus_module, "_train_tokenizer", then_break)
    for _ in range(2):
        with pytest.raises(ValueError, match="the hub data set 'set' can't be read: gone"):
            make("hub:set", tmp_path / "parts")
        breaks[0] = again
    breaks[0] = None
    parts = make("hub:set", tmp_path / "parts")
    assert parts.tokens.tolist() == whole.tokens.tolist() and len(encoded) == 40
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts", "whole"]


def test_without_a_folder_it_goes_to_the_cache(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH_ATTENTION_CACHE", str(tmp_path))
    recipe = CorpusRecipe(sources=(str(texts),), heldout_fraction=0.2)
    corpus = build(recipe, progress=False)
    assert corpus.path == tmp_path / "corpora" / corpus.fingerprint[:16]
    same = build(dataclasses.replace(recipe, vocab_size=4096), progress=False)
    assert same.path == corpus.path and len(list(corpus.path.parent.iterdir())) == 1


def test_a_corpus_stops_at_its_tokens(texts: Path, tmp_path: Path, monkeypatch) -> None:
    """With the batch of text at hand; without the limit the fingerprint is what it always was."""
    monkeypatch.setattr(corpus_module, "_BATCH_CHARACTERS", 200)
    options = {"vocab_size": 300, "heldout_fraction": 0.2, "progress": False}
    whole = build_corpus(str(texts), tmp_path / "whole", **options)
    cut = build_corpus(str(texts), tmp_path / "cut", max_tokens=2000, **options)
    count = len(cut.names)
    assert 2000 <= cut.borders[-1] < whole.borders[-1] and cut.names == whole.names[:count]
    assert (cut.tokens == whole.tokens[: cut.borders[-1]]).all()
    assert cut.borders[-2] < 2000 + 200, "at most one batch too many"
    assert cut.fingerprint != whole.fingerprint


def test_documents_are_held_out_by_pattern_and_copies_left_out(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts", 20)
    (folder / "project").mkdir()
    for n in range(3):
        (folder / "project" / f"part{n}.py").write_text(f"project = {n}\n")
        (folder / f"twin{n}.py").write_text((folder / "file05.py").read_text())
    options = {"heldout_fraction": 0.0, "heldout": ("texts/project/*",), "deduplicate": True}
    corpus = make(str(folder), tmp_path / "c", **options)
    held = [corpus.names[n] for n in corpus.documents("heldout")]
    assert held == [f"texts/project/part{n}.py" for n in range(3)]
    assert corpus.info["skipped"] == {"copies of a document before": 3}
    assert corpus.info["by_source"]["texts"]["documents"] == 23 == len(corpus.names)
    assert corpus.info["by_source"]["texts"]["heldout_tokens"] == corpus.info["heldout_tokens"]
    part = corpus.only(["texts/file1*", "texts/project/part0.py"])
    assert [part.names[n] for n in part.documents("heldout")] == held[:1]
    assert len(part.documents("train")) == 10 and len(corpus.documents("train")) == 20
    with pytest.raises(ValueError, match="documents: expected patterns of names such as 'texts/"):
        corpus.only(["prose/*"])


def test_the_tokenizer_is_trained_on_files_of_all_sources(tmp_path: Path) -> None:
    """More text than it may read: the share is drawn by name, not taken from the front."""
    for source, word in (("a", "camel"), ("b", "zebra")):
        for n in range(100):
            path = tmp_path / source / f"{n:03}.txt"
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"{word} " * 20)
    sources = (str(tmp_path / "a"), str(tmp_path / "b"))
    corpus = make(sources, tmp_path / "c", tokenizer_bytes=3000)
    vocabulary = corpus.tokenizer().get_vocab()
    assert "Ġcamel" in vocabulary and "Ġzebra" in vocabulary
    again = make(sources, tmp_path / "d", tokenizer_bytes=3000)
    assert again.tokenizer().get_vocab() == vocabulary


def test_processes_change_nothing(texts: Path, corpus: TokenCorpus, tmp_path: Path) -> None:
    many = make(str(texts), tmp_path / "many", processes=2)
    assert many.fingerprint == corpus.fingerprint and many.names == corpus.names
    assert (many.tokens == corpus.tokens).all() and (many.bytes == corpus.bytes).all()
    with pytest.raises(ValueError, match="processes: expected at least 1, got 0"):
        make(str(texts), tmp_path / "none", processes=0)


@pytest.mark.parametrize("torn", ["", "a line without its end", "tokens"])
def test_a_killed_build_goes_on_where_it_was(
    texts: Path, corpus: TokenCorpus, tmp_path: Path, monkeypatch, torn: str
) -> None:
    monkeypatch.setattr(corpus_module, "_BATCH_CHARACTERS", 2000)
    whole = make(str(texts), tmp_path / "whole")
    encode, batches = Encoder.encode, []

    def killed(self, texts):
        batches.append(texts)
        if len(batches) == 6:
            raise KeyboardInterrupt
        return encode(self, texts)

    monkeypatch.setattr(Encoder, "encode", killed)
    with pytest.raises(KeyboardInterrupt):
        make(str(texts), tmp_path / "c")
    (partial,) = tmp_path.glob(".c.partial-*")
    journal = partial / "written.jsonl"
    if torn == "tokens":
        with open(partial / "tokens.bin", "r+b") as file:
            file.truncate(file.seek(0, 2) - 1)
    elif torn:
        journal.write_text(journal.read_text()[:-1])
    again = make(str(texts), tmp_path / "c")
    total = len(list(corpus_module._batches(Documents((str(texts),)), False)))
    assert len(batches) == 6 + total - (4 if torn else 5)  # none of the whole ones again
    assert (again.tokens == whole.tokens).all() and again.names == whole.names
    assert again.tokenizer().get_vocab() == whole.tokenizer().get_vocab()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "whole"]
    assert not (again.path / "written.jsonl").exists()
