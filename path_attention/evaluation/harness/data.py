"""Data sets that must be fetched: from a folder of files with known sizes and hashes, or the hub.

    DIR/manifest.json                  what each file is: bytes, sha256, rows, where it came from
    DIR/NAME/CONFIG/SPLIT.jsonl        one row a line; "/" in a name becomes "--"

`path-attention evaluate fetch` writes such a folder where there is a network; it can be carried to
where there is none.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import lm_eval.api.task

from path_attention.results import write_whole

Splits = dict[str, datasets.Dataset]
Load = Callable[..., Any]
_MANIFEST = "manifest.json"
_FROM_HUB = datasets.load_dataset  # itself, while `tasks_load_by` puts another in its place
# Rows that data sets have had since they were published: another number is another data set.
ROWS = {
    ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", "test"): 62,
    ("EleutherAI/lambada_openai", "default", "test"): 5153,
    ("baber/piqa", "default", "validation"): 1838,
    ("Rowan/hellaswag", "default", "validation"): 10042,
    ("allenai/winogrande", "winogrande_xl", "validation"): 1267,
    ("allenai/ai2_arc", "ARC-Easy", "test"): 2376,
    ("allenai/ai2_arc", "ARC-Challenge", "test"): 1172,
    ("openai/gsm8k", "main", "test"): 1319,
    ("openai/openai_humaneval", "default", "test"): 164,
    ("google-research-datasets/mbpp", "full", "test"): 500,
    ("evalplus/mbppplus", "default", "test"): 378,
    ("Idavidrein/gpqa", "gpqa_diamond", "train"): 198,
}


def load_from_folder(folder: Path, path: str, name: str | None = None) -> Splits:
    """All splits of a data set that a folder has.

    Raises ValueError naming `data_dir` if it has none, or a file differs from the manifest.
    """
    config = name or "default"
    manifest = read_manifest(folder)
    place = f"{path.replace('/', '--')}/{config}/"
    files = {key: told for key, told in manifest.items() if key.startswith(place)}
    if not files:
        raise ValueError(
            f"data_dir: expected {path} ({config}) in {folder}, which has it not; "
            "`path-attention evaluate fetch SUITE --data-dir DIR` gets it where there is a network"
        )
    found = {}
    for key, told in files.items():
        file = folder / key
        content = file.read_bytes() if file.is_file() else b""
        check_file(file, content, told)
        # Bytes, whose lines end at \n alone here: a text's end at U+2028 and U+0085 too.
        rows = [json.loads(line) for line in content.splitlines()]
        split = Path(key).stem
        _check_rows(path, config, split, len(rows))
        found[split] = datasets.Dataset.from_list(rows)
    return found


def check_file(file: Path, content: bytes, told: Mapping[str, Any]) -> None:
    """Raise ValueError naming `data_dir` unless a file's size and hash are the manifest's."""
    seen = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    for what, value in seen.items():
        if value != told[what]:
            raise ValueError(
                f"data_dir: expected {file} with {what} {told[what]}, got {value}; fetch it again"
            )


def _check_rows(path: str, config: str, split: str, rows: int) -> None:
    expected = ROWS.get((path, config, split), rows)
    if rows != expected:
        raise ValueError(
            f"data: expected {expected} rows of {path} ({config}, {split}), got {rows}"
        )


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a folder's files are, if it says so. Raises ValueError on a damaged manifest."""
    try:
        return json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"data_dir: {folder / _MANIFEST} is damaged ({error})") from error


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write what a folder's files are."""
    write_whole(folder / _MANIFEST, json.dumps(manifest, indent=1, sort_keys=True) + "\n")


def load_rows(path: str, split: str) -> Iterator[Mapping[str, Any]]:
    """Rows of one split on the hub, one after the other, as they come."""
    streamed: Any = load_from_hub(path, streaming=True)
    yield from rows_of(streamed, split)


def load_from_hub(path: str, name: str | None = None, **kwargs: Any) -> Any:
    """All splits of a data set on the hub. Raises ValueError in one line if it can't be had."""
    kwargs.pop("trust_remote_code", None)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # five lines for each retry
    try:
        found: Any = _FROM_HUB(path, name, **kwargs)
    except Exception as error:  # the library raises a dozen unrelated types
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"data: expected {path} ({name or 'default'}) from the hub, got {reason}; where there "
            "is a network, `path-attention evaluate fetch SUITE --data-dir DIR` keeps it for "
            "--data-dir DIR here"
        ) from error
    if not kwargs.get("streaming"):
        for split, rows in found.items():
            _check_rows(path, name or "default", split, len(rows))
    return found


def fetch(folder: Path, path: str, name: str | None = None, **kwargs: Any) -> Any:
    """Load a data set from the hub and write it into a folder, with its sizes and hashes."""
    config = name or "default"
    found = load_from_hub(path, name, **kwargs)
    manifest = read_manifest(folder)
    for split, rows in found.items():
        key = f"{path.replace('/', '--')}/{config}/{split}.jsonl"
        text = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        write_whole(folder / key, text)
        content = text.encode("utf-8")
        manifest[key] = {
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            "rows": len(rows),
            "source": f"{path} ({config}, {split})",
        }
    write_manifest(folder, manifest)
    return found


def loader(data_dir: Path | None) -> Load:
    """What loads a data set by its path and name: from a folder, or without one from the hub."""
    if data_dir is None:
        return load_from_hub
    return lambda path, name=None, **kwargs: load_from_folder(data_dir, path, name)


@contextmanager
def tasks_load_by(load: Load) -> Iterator[None]:
    """While it lasts, lm-eval's tasks get their data by `load(path, name)`."""

    def stand_in(path: str, name: str | None = None, **kwargs: Any) -> Any:
        return load(path, name, **kwargs)

    with mock.patch.object(lm_eval.api.task.datasets, "load_dataset", stand_in):
        yield


def rows_of(splits: Mapping[str, Any], split: str) -> Any:
    """The rows of one split. Raises ValueError naming those there are."""
    if split not in splits:
        raise ValueError(f"data: expected a split {split!r}, got {sorted(splits)}")
    return splits[split]
