"""A corpus on disk: the tokens of all documents in one memory-mapped file, with their borders.

    tokens.bin      uint16 where the vocabulary fits, else uint32; documents one behind the other
    borders.npy     int64 [N + 1], in tokens      heldout.npy   bool [N]
    bytes.npy       int64 [N], UTF-8 bytes        names.json    N names
    tokenizer/      for `from_pretrained`         corpus.json   what it was made from, and counts

Each document is `<|endoftext|>` + its tokens + `<|endoftext|>` (or the named tokenizer's begin and
end): the first gives the first real token something to follow, the last teaches where texts end.
"""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import hashlib
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from path_attention.results import put_in_place
from path_attention.training import tokenizer as tokenizers
from path_attention.training.lock import locked
from path_attention.training.progress import progress_bar, say
from path_attention.training.sources import COPY, HUB, BrokenStream, Documents
from path_attention.training.tokens import JOURNAL, TOKENS, Encoder, Written, write_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT = 1
Split = Literal["train", "heldout"]
_VOCABULARY = 4096  # tokens of a trained tokenizer, if not said
_BATCH_CHARACTERS = 1 << 20  # of text given to the tokenizer at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusRecipe:
    """What a corpus is made from.

    Attributes:
        sources: each "stdlib" (the Python standard library's own source), a file, a folder, a glob,
            or "hub:NAME" (a hub data set, streamed).
        tokenizer: a name or folder; None trains a byte-level BPE on the training documents.
        vocab_size: of the trained BPE; 4096 if None. Contradicts `tokenizer`.
        tokenizer_bytes: train the BPE on at most about so much text: of files, training documents
            drawn by the hash of their names; of data sets, the first.
        heldout_fraction: chance of a document to be held out, by the hash of its name and `seed`.
        heldout: patterns of names; documents that match one are held out too, as
            "site-packages/pandas/*" (a whole project, of which training then has no relatives).
        deduplicate: leave out documents whose text is that of one before.
        seed: of the held-out split.
        include: patterns of which a file found in a folder must match one.
        hub_config: the hub data set's configuration.
        hub_split: the hub data set's split; held-out documents are taken from it too.
        hub_column: the hub data set's column of text.
        max_documents: stop after so many documents.
        max_tokens: stop once there are so many tokens, with the megabyte of text at hand.
    """

    sources: tuple[str, ...] = ("stdlib",)
    tokenizer: str | None = None
    vocab_size: int | None = None
    tokenizer_bytes: int = 200_000_000
    heldout_fraction: float = 0.05
    heldout: tuple[str, ...] = ()
    deduplicate: bool = False
    seed: int = 0
    include: tuple[str, ...] = ("*",)
    hub_config: str | None = None
    hub_split: str = "train"
    hub_column: str = "text"
    max_documents: int | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.tokenizer is not None and self.vocab_size is not None:
            raise ValueError(
                f"vocab_size: expected None with tokenizer={self.tokenizer!r}, whose vocabulary is "
                f"fixed, got {self.vocab_size}"
            )
        if self.vocab_size is not None and self.vocab_size < tokenizers.SMALLEST_VOCABULARY:
            raise ValueError(
                f"vocab_size: expected at least {tokenizers.SMALLEST_VOCABULARY} (every byte and "
                f"two special tokens), got {self.vocab_size}"
            )
        if not 0 <= self.heldout_fraction < 1:
            raise ValueError(f"heldout_fraction: expected in [0, 1), got {self.heldout_fraction}")
        for name in ("tokenizer_bytes", "max_documents", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        if self.hub_config is not None and not any(s.startswith(HUB) for s in self.sources):
            raise ValueError(
                f"hub_config: expected None without a {HUB} source, got {self.hub_config!r}"
            )

    def documents(self) -> Documents:
        """The documents, iterable as often as needed."""
        return Documents(
            self.sources,
            include=self.include,
            hub_config=self.hub_config,
            hub_split=self.hub_split,
            hub_column=self.hub_column,
            max_documents=self.max_documents,
        )

    def is_heldout(self, name: str) -> bool:
        """Whether the document of this name is held out: by its name alone, never by position."""
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.heldout):
            return True
        return _draw(self.seed, name) < self.heldout_fraction


def _draw(seed: object, name: str) -> float:
    """A number in [0, 1) that hangs on a name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


class TokenCorpus:
    """A corpus opened for reading; its tokens are memory-mapped.

    Attributes:
        path: its folder.
        info: the content of corpus.json.
        tokens: uint16 or uint32 `[total]`.
        borders: int64 `[N + 1]`, where documents start and end in `tokens`.
        heldout: bool `[N]`.
        bytes: int64 `[N]`, UTF-8 bytes of each document's text.
    """

    def __init__(self, path: Path, info: dict[str, Any]) -> None:
        self.path = path
        self.info = info
        self.borders: np.ndarray = np.load(path / "borders.npy")
        self.heldout: np.ndarray = np.load(path / "heldout.npy")
        self.bytes: np.ndarray = np.load(path / "bytes.npy")
        dtype = np.dtype(info["dtype"])
        size = (path / TOKENS).stat().st_size
        if size != int(self.borders[-1]) * dtype.itemsize:
            raise ValueError(
                f"{TOKENS}: expected {int(self.borders[-1]) * dtype.itemsize} bytes, got {size}"
            )
        self.tokens: np.ndarray = np.memmap(path / TOKENS, dtype=dtype, mode="r")
        self._chosen = np.ones(len(self.heldout), dtype=bool)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> TokenCorpus:
        """Open the corpus in folder `path`. Raises ValueError if there is none or it is damaged."""
        path = Path(path)
        try:
            info = json.loads((path / "corpus.json").read_text())
            if info["format"] != FORMAT:
                raise ValueError(f"expected format {FORMAT}, got {info['format']}")
            return cls(path, info)
        except FileNotFoundError as error:
            raise ValueError(
                f"corpus: expected a folder made by `path-attention corpus build`, {path} has no "
                f"{Path(str(error.filename)).name}"
            ) from error
        except (ValueError, KeyError, EOFError) as error:
            raise ValueError(f"corpus: {path} is damaged: {error}") from error

    @property
    def fingerprint(self) -> str:
        """Hash of the sources' content and of every option that shapes the tokens."""
        return self.info["fingerprint"]

    @property
    def vocab_size(self) -> int:
        """Size of the tokenizer's vocabulary, special tokens included."""
        return self.info["vocab_size"]

    @cached_property
    def names(self) -> list[str]:
        """The documents' names."""
        try:
            return json.loads((self.path / "names.json").read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"corpus: {self.path} is damaged: names.json: {error}") from error

    def documents(self, split: Split) -> np.ndarray:
        """int64: the indices of the documents of "train" or "heldout"."""
        if split not in ("train", "heldout"):
            raise ValueError(f'split: expected "train" or "heldout", got {split!r}')
        return np.flatnonzero((self.heldout == (split == "heldout")) & self._chosen)

    def only(self, patterns: Sequence[str]) -> TokenCorpus:
        """The same corpus whose splits hold the documents alone whose names match a pattern.

        Raises ValueError if none does.
        """
        part = copy.copy(self)
        part._chosen = np.array(
            [any(fnmatch.fnmatchcase(name, p) for p in patterns) for name in self.names], dtype=bool
        )
        if not part._chosen.any():
            raise ValueError(
                f"documents: expected patterns of names such as {self.names[0]!r}, none of "
                f"{self.path} matches {list(patterns)}"
            )
        return part

    def document(self, n: int) -> np.ndarray:
        """The token ids of document n, its begin and end included."""
        return self.tokens[self.borders[n] : self.borders[n + 1]]

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer that made it."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.path / "tokenizer")


def build_corpus(
    sources: Sequence[str] | str,
    out: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: bool = True,
    processes: int = 1,
    **options: Any,
) -> TokenCorpus:
    """Turn texts into a corpus in folder `out`, or open it if the same one is there already.

    It is written beside `out` and renamed when complete, so an interruption or a full disk leaves
    `out` as it was; an interrupted build goes on where it was.

    Args:
        sources, options: as in `CorpusRecipe`.
        out: the folder to make.
        overwrite: replace another corpus there; without it that is an error.
        progress: draw a bar and say what was skipped.
        processes: so many make tokens; the corpus is the same. More than one starts Python anew:
            then the calling script needs `if __name__ == "__main__":`.

    Raises:
        ValueError: bad options; nothing readable in the sources; `out` holds something else.
        OSError: reading or writing failed.
    """
    if isinstance(sources, str):
        sources = (sources,)
    recipe = CorpusRecipe(sources=tuple(sources), **options)
    return build(recipe, out, overwrite, progress, processes)


def build(
    recipe: CorpusRecipe,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    progress: bool = True,
    processes: int = 1,
) -> TokenCorpus:
    """As `build_corpus`, from a `CorpusRecipe`.

    With `out` None the folder is named by the fingerprint, under PATH_ATTENTION_CACHE/corpora or
    ~/.cache/path_attention/corpora.
    """
    if processes < 1:
        raise ValueError(f"processes: expected at least 1, got {processes}")
    documents = recipe.documents()
    tokenizer = None if recipe.tokenizer is None else tokenizers.load_tokenizer(recipe.tokenizer)
    fingerprint = _fingerprint(recipe, documents, tokenizer)
    out = _cache() / fingerprint[:16] if out is None else Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with _partial(out, fingerprint) as partial:
        present = _present(out, fingerprint, overwrite)
        if present is None:
            _write(partial, recipe, documents, tokenizer, fingerprint, progress, processes)
            put_in_place(partial, out)
        elif progress:
            say(f"corpus: {out} is up to date")
    return TokenCorpus.open(out)


def _present(out: Path, fingerprint: str, overwrite: bool) -> TokenCorpus | None:
    """The corpus, if it is there already. Raises ValueError on anything else that can't go."""
    if (out / "corpus.json").exists():
        present = TokenCorpus.open(out)
        if present.fingerprint == fingerprint:
            return present
        if not overwrite:
            raise ValueError(
                f"out: {out} holds a corpus made from other sources or options; choose another "
                "folder or overwrite it"
            )
    elif out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ValueError(f"out: expected a new folder, {out} holds something that is not a corpus")
    return None


@contextmanager
def _partial(out: Path, fingerprint: str) -> Iterator[Path]:
    """The folder where a corpus is made, for one process at a time; it outlives a kill, and a
    stream that broke after some tokens."""
    partial = out.parent / f".{out.name}.partial-{fingerprint[:16]}"
    with locked(out.parent / f".{out.name}.lock"):
        partial.mkdir(exist_ok=True)
        try:
            yield partial
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise OSError(error.errno, f"corpus: {error.strerror or error}", str(out)) from error
        except BrokenStream:
            if not (partial / JOURNAL).exists():
                shutil.rmtree(partial, ignore_errors=True)
            raise
        except Exception:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        else:
            shutil.rmtree(partial, ignore_errors=True)


def _cache() -> Path:
    folder = os.environ.get("PATH_ATTENTION_CACHE") or "~/.cache/path_attention"
    return Path(folder).expanduser() / "corpora"


def _fingerprint(
    recipe: CorpusRecipe, documents: Documents, tokenizer: PreTrainedTokenizerFast | None
) -> str:
    options = dataclasses.asdict(recipe)
    for name in ("sources", "include"):  # their effect is in the documents
        del options[name]
    for name in ("max_tokens", "heldout", "deduplicate"):  # younger than the format
        if not options[name]:
            del options[name]
    if tokenizer is None:
        options["vocab_size"] = recipe.vocab_size or _VOCABULARY
        if _tokenizer_share(recipe, documents) < 1:
            options["tokenizer_documents"] = "drawn"  # once the first
    options["tokenizer"] = None if tokenizer is None else tokenizers.tokenizer_digest(tokenizer)
    content = json.dumps([FORMAT, options, documents.digest()], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _train_tokenizer(recipe: CorpusRecipe, documents: Documents) -> PreTrainedTokenizerFast:
    share = _tokenizer_share(recipe, documents)

    def texts() -> Iterator[str]:
        left = recipe.tokenizer_bytes if documents.hub else math.inf
        for name, text in documents.drawn(lambda name: _draw("tokenizer", name) < share):
            if left <= 0:
                return
            if not recipe.is_heldout(name):
                left -= len(text.encode())
                yield text

    return tokenizers.train_tokenizer(texts(), recipe.vocab_size or _VOCABULARY)


def _tokenizer_share(recipe: CorpusRecipe, documents: Documents) -> float:
    """Of files, the share that the tokenizer is trained on."""
    return 1.0 if documents.hub else recipe.tokenizer_bytes / max(documents.size(), 1)


def _batches(documents: Documents, deduplicate: bool) -> Iterator[tuple[list[str], list[str]]]:
    names: list[str] = []
    texts: list[str] = []
    characters = 0
    seen: set[bytes] = set()
    for name, text in documents:
        if deduplicate:
            digest = hashlib.sha256(text.encode()).digest()[:16]
            if digest in seen:
                documents.skipped[COPY] += 1
                continue
            seen.add(digest)
        names.append(name)
        texts.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield names, texts
            names, texts, characters = [], [], 0
    if names:
        yield names, texts


def _write(
    folder: Path,
    recipe: CorpusRecipe,
    documents: Documents,
    tokenizer: PreTrainedTokenizerFast | None,
    fingerprint: str,
    progress: bool,
    processes: int,
) -> None:
    if (folder / "tokenizer").exists():  # by an interrupted build
        tokenizer = tokenizers.load_tokenizer(str(folder / "tokenizer"))
    else:
        tokenizer = tokenizer or _train_tokenizer(recipe, documents)
        tokenizer.save_pretrained(folder / "tokenizer.partial")
        os.rename(folder / "tokenizer.partial", folder / "tokenizer")
    vocab_size = tokenizers.vocabulary_size(tokenizer)
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    with progress_bar("documents", enabled=progress) as bar:
        task = bar.add_task("corpus", total=len(documents.files) or recipe.max_documents)
        written = write_tokens(
            folder,
            _batches(documents, recipe.deduplicate),
            Encoder(tokenizer, dtype),
            processes=processes,
            max_tokens=recipe.max_tokens,
            advance=lambda count: bar.update(task, advance=count),
        )
    heldout = np.array([recipe.is_heldout(name) for name in written.names], dtype=bool)
    _check_split(recipe, documents, heldout)
    borders = np.concatenate([[0], np.cumsum(written.lengths, dtype=np.int64)]).astype(np.int64)
    np.save(folder / "borders.npy", borders)
    np.save(folder / "heldout.npy", heldout)
    np.save(folder / "bytes.npy", np.asarray(written.sizes, dtype=np.int64))
    (folder / "names.json").write_text(json.dumps(written.names))
    (folder / JOURNAL).unlink()
    info = {
        "format": FORMAT,
        "fingerprint": fingerprint,
        "recipe": dataclasses.asdict(recipe),
        "dtype": dtype.str,
        "vocab_size": vocab_size,
        **_counts(written, heldout),
        "skipped": dict(documents.skipped),
    }
    (folder / "corpus.json").write_text(json.dumps(info, indent=1) + "\n")
    if progress:
        say(summary(info))


def _counts(written: Written, heldout: np.ndarray) -> dict[str, Any]:
    pairs = list(zip(written.digests, heldout.tolist(), strict=True))
    in_training = {digest for digest, out in pairs if not out}
    by_source: dict[str, Counter[str]] = {}
    for name, length, out in zip(written.names, written.lengths, heldout.tolist(), strict=True):
        counts = by_source.setdefault(name.split("/")[0], Counter())
        counts.update(documents=1, tokens=length)
        counts.update(heldout_documents=int(out), heldout_tokens=length if out else 0)
    whole: Counter[str] = Counter()
    for counts in by_source.values():
        whole.update(counts)
    return {
        "documents": whole["documents"],
        "heldout_documents": whole["heldout_documents"],
        "heldout_documents_also_in_training": sum(d in in_training for d, out in pairs if out),
        "tokens": whole["tokens"],
        "heldout_tokens": whole["heldout_tokens"],
        "bytes": sum(written.sizes),
        "by_source": {name: dict(counts) for name, counts in by_source.items()},
    }


def _check_split(recipe: CorpusRecipe, documents: Documents, heldout: np.ndarray) -> None:
    if not len(heldout):
        reasons = ", ".join(f"{n} {reason}" for reason, n in documents.skipped.items())
        raise ValueError(
            f"sources: expected at least one document of text, {list(recipe.sources)} has none"
            + (f" ({reasons})" if reasons else "")
        )
    if heldout.all() or (recipe.heldout_fraction and not heldout.any()):
        raise ValueError(
            f"heldout_fraction: {recipe.heldout_fraction} holds out {int(heldout.sum())} of "
            f"{len(heldout)} documents; expected some of both kinds (or 0 for none held out): "
            "change it or the seed"
        )


def summary(info: dict[str, Any]) -> str:
    """One line about a corpus: counts, and what was skipped or is there twice."""
    line = (
        f"corpus: {info['documents']:,} documents, {info['tokens']:,} tokens of "
        f"{info['vocab_size']:,} kinds, {info['bytes'] / info['tokens']:.2f} bytes a token; "
        f"held out: {info['heldout_documents']:,} documents, {info['heldout_tokens']:,} tokens"
    )
    if info["heldout_documents_also_in_training"]:
        line += f", {info['heldout_documents_also_in_training']} of which training has a copy of"
    if info["skipped"]:
        line += "; skipped: " + ", ".join(f"{n} {why}" for why, n in info["skipped"].items())
    return line
