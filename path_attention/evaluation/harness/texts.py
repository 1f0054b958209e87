"""Long documents for perplexity by length: PG-19, CodeParrot, NarrativeQA, as text files.

A folder has them in `texts/NAME/*.txt`, with size and hash of each in its manifest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from path_attention.evaluation.harness.data import (
    check_file,
    load_rows,
    read_manifest,
    write_manifest,
)
from path_attention.results import write_whole


@dataclass(frozen=True)
class TextSet:
    """Where a set of documents is on the hub: path, split, the columns down to the text.

    Attributes:
        least: characters of a document that is taken.
    """

    path: str
    split: str
    column: tuple[str, ...]
    least: int = 0


TEXTS = {
    "pg19": TextSet("emozilla/pg19", "test", ("text",)),
    "codeparrot": TextSet("codeparrot/codeparrot-clean-valid", "train", ("content",), 200_000),
    "narrativeqa": TextSet("deepmind/narrativeqa", "test", ("document", "text")),
}


def fetch_texts(folder: Path, name: str, documents: int) -> list[Path]:
    """Write the first different documents of a set into a folder.

    Raises ValueError in one line if the hub can't be reached.
    """
    told = TEXTS[name]
    manifest = read_manifest(folder)
    paths = []
    for n, text in enumerate(_different(told, documents)):
        key = f"texts/{name}/{n:05}.txt"
        write_whole(folder / key, text)
        content = text.encode("utf-8")
        digest = hashlib.sha256(content).hexdigest()
        manifest[key] = {"bytes": len(content), "sha256": digest, "source": told.path}
        paths.append(folder / key)
    write_manifest(folder, manifest)
    return paths


def _different(told: TextSet, documents: int) -> Iterator[str]:
    seen: set[str] = set()
    for row in load_rows(told.path, told.split):
        found: Any = row
        for column in told.column:
            found = found[column]
        digest = hashlib.sha256(found.encode("utf-8")).hexdigest()
        if len(found) >= told.least and digest not in seen:
            seen.add(digest)
            yield found.replace("\r\n", "\n")
        if len(seen) == documents:
            return


def find_texts(folder: Path, name: str) -> list[Path]:
    """The files of a set in a folder, checked.

    Raises ValueError naming `data_dir` if it has none, or one differs from the manifest.
    """
    prefix = f"texts/{name}/"
    manifest: Mapping[str, Any] = read_manifest(folder)
    keys = sorted(key for key in manifest if key.startswith(prefix))
    if not keys:
        raise ValueError(
            f"data_dir: expected {name} in {folder}, which has it not; `path-attention evaluate "
            "fetch perplexity_by_length --data-dir DIR` gets it where there is a network"
        )
    for key in keys:
        file = folder / key
        check_file(file, file.read_bytes() if file.is_file() else b"", manifest[key])
    return [folder / key for key in keys]
