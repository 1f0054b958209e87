"""The tokens of many documents, made by any number of processes, written in order.

    tokens.bin      the tokens of all documents so far      written.jsonl   a line for each batch

A line follows its batch's tokens, so an interrupted build goes on behind the last whole line and
ends with the same bytes.
"""

from __future__ import annotations

import copy
import hashlib
import json
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOKENS, JOURNAL = "tokens.bin", "written.jsonl"
Batch = tuple[list[str], list[str]]  # names and texts


@dataclass
class Written:
    """What was written: of each document its name, tokens, UTF-8 bytes, and hash of its text."""

    names: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)

    def extend(self, other: Written) -> None:
        """Add the documents of a batch."""
        self.names += other.names
        self.lengths += other.lengths
        self.sizes += other.sizes
        self.digests += other.digests


class Encoder:
    """Turns texts into begin + tokens + end, without the tokenizer's own special tokens.

    A special token spelled out in a text stays plain text. Can be sent to another process.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, dtype: np.dtype) -> None:
        self.backend: Any = copy.deepcopy(tokenizer.backend_tokenizer)
        self.end: Any = tokenizer.eos_token_id
        self.begin: Any = self.end if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        self.dtype = dtype

    def encode(self, texts: list[str]) -> tuple[bytes, Written]:
        """The tokens of all texts, one behind the other, and what they are (without names)."""
        self.backend.encode_special_tokens = True  # which doesn't travel between processes
        written, ids = Written(), []
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        for text, encoding in zip(texts, encodings, strict=True):
            encoded = text.encode()
            ids.append(np.asarray([self.begin, *encoding.ids, self.end], dtype=self.dtype))
            written.lengths.append(len(ids[-1]))
            written.sizes.append(len(encoded))
            written.digests.append(hashlib.sha256(encoded).hexdigest()[:32])
        return b"".join(part.tobytes() for part in ids), written


def write_tokens(
    folder: Path,
    batches: Iterable[Batch],
    encoder: Encoder,
    *,
    processes: int = 1,
    max_tokens: int | None = None,
    advance: Callable[[int], None] = lambda documents: None,
) -> Written:
    """Write the tokens of batches of documents into `folder`, behind what is there already.

    Args:
        folder: may hold what an interrupted call with the same batches and encoder wrote.
        batches: the same ones in the same order each time.
        encoder: of the texts.
        processes: so many encode, if more than 1, each by one thread; the bytes are the same.
        max_tokens: stop once there are so many tokens, with the batch at hand.
        advance: told how many documents were written, each time.
    """
    written, count = _restore(folder, encoder.dtype.itemsize)
    total = sum(written.lengths)
    advance(len(written.names))
    with open(folder / TOKENS, "ab") as file, open(folder / JOURNAL, "a") as journal:
        left = islice(iter(batches), count, None)
        if max_tokens is not None and total >= max_tokens:
            left = iter(())
        for names, tokens, batch in _encoded(left, encoder, processes):
            batch.names = names
            file.write(tokens)
            file.flush()
            journal.write(json.dumps(vars(batch)) + "\n")
            journal.flush()
            written.extend(batch)
            total += sum(batch.lengths)
            advance(len(names))
            if max_tokens is not None and total >= max_tokens:
                break
    return written


def _restore(folder: Path, itemsize: int) -> tuple[Written, int]:
    """What whole batches are there, and how many; the rest is cut off."""
    tokens, journal = folder / TOKENS, folder / JOURNAL
    present = tokens.stat().st_size if tokens.exists() else 0
    written, lines, size = Written(), [], 0
    for line in journal.read_text().splitlines(keepends=True) if journal.exists() else []:
        try:
            batch = Written(**json.loads(line))
        except (json.JSONDecodeError, TypeError):
            break
        if not line.endswith("\n") or size + itemsize * sum(batch.lengths) > present:
            break
        size += itemsize * sum(batch.lengths)
        lines.append(line)
        written.extend(batch)
    journal.write_text("".join(lines))
    with open(tokens, "ab") as file:
        file.truncate(size)
    return written, len(lines)


def _encoded(
    batches: Iterator[Batch], encoder: Encoder, processes: int
) -> Iterator[tuple[list[str], bytes, Written]]:
    """(names, tokens, what they are) of each batch, in order."""
    if processes == 1:
        for names, texts in batches:
            yield names, *encoder.encode(texts)
        return
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload([__name__])
    coming: deque[tuple[list[str], Future[tuple[bytes, Written]]]] = deque()
    pool = ProcessPoolExecutor(processes, context, initializer=_start, initargs=(encoder,))
    try:
        for names, texts in batches:
            coming.append((names, pool.submit(_encode, texts)))
            if len(coming) > 2 * processes:
                names, first = coming.popleft()
                yield names, *first.result()
        for names, first in coming:
            yield names, *first.result()
    finally:
        pool.shutdown(cancel_futures=True)


_encoder: Encoder | None = None  # of this process, if it is one of several


def _start(encoder: Encoder) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder = encoder


def _encode(texts: list[str]) -> tuple[bytes, Written]:
    assert _encoder is not None
    return _encoder.encode(texts)
