"""Answers of a model to requests, kept as they come, so that an interrupted evaluation goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Answers:
    """A file of JSON lines: who answers, then one line for each request.

    The first line says what every answer depends on (weights, precision, context, versions); a file
    of another model or setting is refused. A last line that was cut off by a kill is dropped.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "answers.jsonl"
    >>> Answers(path, {"model": "a"}).put("2+2=", "4")
    >>> Answers(path, {"model": "a"}).get("2+2=")
    '4'
    """

    def __init__(self, path: Path | None, identity: Mapping[str, Any]) -> None:
        """path: None for memory alone. Raises ValueError on a file of another identity."""
        self.path = path
        self._found: dict[str, Any] = {}
        if path is None:
            return
        told = json.loads(json.dumps(identity))
        size = self._read(path, told) if path.exists() else 0
        path.parent.mkdir(parents=True, exist_ok=True)
        if size == 0:
            path.write_text(json.dumps(told) + "\n", encoding="utf-8")
        elif size < path.stat().st_size:
            os.truncate(path, size)

    def _read(self, path: Path, identity: Any) -> int:
        """Take in what is there; the number of bytes that are whole lines."""
        size = 0
        for n, line in enumerate(path.read_bytes().splitlines(keepends=True)):
            if not line.endswith(b"\n"):
                break
            told = json.loads(line)
            if n == 0 and told != identity:
                differ = sorted(k for k in {*told, *identity} if told.get(k) != identity.get(k))
                raise ValueError(
                    f"out: {path} was made with other {', '.join(differ)}; choose another "
                    "folder, or delete that file"
                )
            if n > 0:
                self._found[told["key"]] = told["answer"]
            size += len(line)
        return size

    def get(self, *request: Any) -> Any:
        """The answer to a request, or None."""
        return self._found.get(_key(request))

    def put(self, *request_and_answer: Any) -> None:
        """Keep an answer, the last argument, to the request that the others make."""
        *request, answer = request_and_answer
        key = _key(tuple(request))
        self._found[key] = answer
        if self.path is None:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "answer": answer}) + "\n")

    def __len__(self) -> int:
        return len(self._found)


def _key(request: tuple[Any, ...]) -> str:
    text = json.dumps(request, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
