"""Solved samples as a token corpus, and training on their answers alone.

A document is the beginning of text (where the tokenizer starts texts with it), what a sample reads
and the answer that is to be written, token for token as `evaluate` reads and writes them, and the
end of text. Its folder is a `TokenCorpus` with one file more:

    answers.npy     bool, as many as tokens: those that are to be written
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from path_attention.evaluation.generated.sample import Sample
from path_attention.training.corpus import FORMAT, TokenCorpus
from path_attention.training.objective import Objective
from path_attention.training.rows import IGNORED, Row
from path_attention.training.tokenizer import vocabulary_size
from path_attention.training.tokens import TOKENS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANSWERS = "answers.npy"
_HELD_OUT = 31  # every so manieth number; odd, since every second one may be a lesson


def solve(
    sample: Sample, tokenizer: PreTrainedTokenizerBase, *, starts: bool
) -> tuple[list[int], list[bool]]:
    """A sample's document, and which of its tokens are answers.

    Args:
        starts: begin with the beginning-of-text token.
    """
    ids: list[Any] = [tokenizer.bos_token_id] if starts else []  # pyright: ignore
    answers = [False] * len(ids)
    for asked, answer in sample.questions:
        for text, written in ((asked, False), (f" {answer}", True)):
            found: list[int] = tokenizer.encode(text, add_special_tokens=False)
            ids += found
            answers += [written] * len(found)
    end: Any = tokenizer.eos_token_id  # pyright: ignore[reportAttributeAccessIssue]
    return [*ids, end], [*answers, True]


def write_solved(
    folder: Path,
    names: Sequence[str],
    samples: Sequence[Sample],
    tokenizer: PreTrainedTokenizerBase,
    *,
    starts: bool,
) -> TokenCorpus:
    """Write solved samples as a corpus in a new folder, whole or not at all.

    Args:
        names: of the samples, what they are of, "/", and a number. Samples of one number are held
            out together: made from one seed, the shorter may begin the longer.
    """
    documents = [solve(sample, tokenizer, starts=starts) for sample in samples]
    lengths = [len(ids) for ids, _ in documents]
    vocab_size = vocabulary_size(tokenizer)
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    tokens = np.concatenate([np.asarray(ids, dtype) for ids, _ in documents])
    answers = np.concatenate([np.asarray(mask, bool) for _, mask in documents])
    numbers = np.asarray([int(name.rpartition("/")[2]) for name in names])
    heldout = numbers % _HELD_OUT == _HELD_OUT - 1
    pairs = [(tuple(ids), held) for (ids, _), held in zip(documents, heldout, strict=True)]
    trained = {ids for ids, held in pairs if not held}
    sizes = [sum(len(f"{q} {a}".encode()) for q, a in sample.questions) for sample in samples]
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tokens.tofile(partial / TOKENS)
    np.save(partial / _ANSWERS, answers)
    np.save(partial / "borders.npy", np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    np.save(partial / "heldout.npy", heldout)
    np.save(partial / "bytes.npy", np.asarray(sizes, np.int64))
    (partial / "names.json").write_text(json.dumps(list(names)))
    tokenizer.save_pretrained(partial / "tokenizer")
    info = {
        "format": FORMAT,
        "fingerprint": hashlib.sha256(tokens.tobytes() + answers.tobytes()).hexdigest(),
        "recipe": {"sources": sorted({name.split("/")[0] for name in names}), "seed": 0},
        "dtype": dtype.str,
        "vocab_size": vocab_size,
        "documents": len(samples),
        "heldout_documents": int(heldout.sum()),
        "heldout_documents_also_in_training": sum(ids in trained for ids, held in pairs if held),
        "tokens": len(tokens),
        "heldout_tokens": int(np.asarray(lengths)[heldout].sum()),
        "bytes": sum(sizes),
        "skipped": {},
    }
    (partial / "corpus.json").write_text(json.dumps(info, indent=1) + "\n")
    os.rename(partial, folder)
    return TokenCorpus.open(folder)


class AnswerTokens(Objective):
    """Next-token cross-entropy of the answers of solved samples, each row's mean over them.

    A sample that a row's edge cuts has lost its question or its answer: it counts nothing.

    Args:
        corpus: of `write_solved`.
    """

    def __init__(self, corpus: TokenCorpus) -> None:
        self.borders = corpus.borders
        self.answers = np.load(corpus.path / _ANSWERS)

    def course(self) -> dict[str, Any]:
        return {"objective": "answers"}

    def labels(self, row: Row) -> Tensor:
        """`Row.labels` with −100 at all that is no answer of a whole sample."""
        labels = torch.full_like(row.labels, IGNORED)
        start = 0
        for document, length in zip(row.documents, row.packing.lengths, strict=True):
            first, last = self.borders[document : document + 2]
            if length == last - first:
                place = slice(start, start + length)
                written = torch.from_numpy(self.answers[first:last])
                labels[0, place] = torch.where(written, row.labels[0, place], IGNORED)
            start += length
        return labels

    def loss(self, model: nn.Module, row: Row, divisor: float, device: torch.device) -> Tensor:
        labels = self.labels(row)
        count = max(int((labels != IGNORED).sum()), 1)
        row = dataclasses.replace(row, labels=labels)
        return super().loss(model, row, divisor * count / row.targets, device)
