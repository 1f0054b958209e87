"""Where documents come from: the standard library, files, folders, globs, hub data sets."""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HUB = "hub:"
STDLIB = "stdlib"
_THIRD_PARTY = frozenset({"site-packages", "dist-packages", "__pycache__"})
# reasons to skip, as they are told to the user
UNDECODABLE, EMPTY, UNREADABLE, TWICE, COPY = (
    "not UTF-8 text",
    "empty",
    "unreadable",
    "named twice (taken once)",
    "copies of a document before",
)


@dataclass(frozen=True)
class TextFile:
    """One document on disk. `name` is the same on every machine: the held-out split hangs on it."""

    name: str
    path: Path
    explicit: bool  # named by the user itself, so failing to read it is an error


class BrokenStream(ValueError):
    """A data set can't be read, or not to its end; what was read of it before still holds."""


class Documents:
    """The documents of a list of sources, in a fixed order; iterate as often as needed.

    Iterating yields `(name, text)`. Files that are empty or not UTF-8 text are skipped and counted
    by reason in `skipped` (of the latest pass).

    Args:
        sources: each "stdlib" (the Python standard library's own source), a file, a folder (read
            recursively, hidden entries left out), a glob, or "hub:NAME" (a hub data set, streamed).
        include: patterns of which a file found in a folder must match one ("stdlib" is its *.py).
        hub_config, hub_split, hub_column: which part of a hub data set, and its column of text.
        max_documents: stop after so many documents.

    Raises:
        ValueError: `sources` is empty, names nothing, or a data set can't be read (`BrokenStream`).
        OSError: a file that was named explicitly can't be read.
    """

    def __init__(
        self,
        sources: tuple[str, ...],
        *,
        include: tuple[str, ...] = ("*",),
        hub_config: str | None = None,
        hub_split: str = "train",
        hub_column: str = "text",
        max_documents: int | None = None,
    ) -> None:
        if not sources:
            raise ValueError(
                "sources: expected at least one file, folder, glob or data set, got ()"
            )
        self.hub = [s[len(HUB) :] for s in sources if s.startswith(HUB)]
        self.hub_options = (hub_config, hub_split, hub_column)
        self.max_documents = max_documents
        self.skipped: Counter[str] = Counter()
        self.files, self._twice = _list_files(
            [s for s in sources if not s.startswith(HUB)], include
        )

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return self.drawn(lambda name: True)

    def drawn(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
        """Those whose names are wanted; of files, the others aren't read."""
        self.skipped = Counter({TWICE: self._twice} if self._twice else {})
        left = self.max_documents
        for name, text in self._all(wanted):
            if not text.strip():
                self.skipped[EMPTY] += 1
                continue
            if left is not None:
                if left == 0:
                    return
                left -= 1
            yield name, text

    def digest(self) -> str:
        """Hash of every file's name and content, or of a hub data set's name and part."""
        total = hashlib.sha256()
        for file in self.files:
            try:
                content = hashlib.sha256(file.path.read_bytes()).hexdigest()
            except OSError:
                content = UNREADABLE
            total.update(f"{file.name}\0{content}\n".encode("utf-8", "surrogateescape"))
        for name in self.hub:
            total.update(f"{HUB}{name}\0{self.hub_options}\n".encode())
        return total.hexdigest()

    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.path.stat().st_size for file in self.files if file.path.exists())

    def _all(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
        for file in self.files:
            text = self._read(file) if wanted(file.name) else None
            if text is not None:
                yield file.name, text
        for name in self.hub:
            yield from (row for row in _stream_hub(name, *self.hub_options) if wanted(row[0]))

    def _read(self, file: TextFile) -> str | None:
        try:
            content = file.path.read_bytes()
        except OSError:
            if file.explicit:
                raise
            self.skipped[UNREADABLE] += 1
            return None
        try:
            if b"\0" in content:
                raise UnicodeError
            return content.decode("utf-8")
        except UnicodeError:
            self.skipped[UNDECODABLE] += 1
            return None


def _list_files(sources: list[str], include: tuple[str, ...]) -> tuple[list[TextFile], int]:
    """All files in a fixed order, and how many were named a second time."""
    seen: set[Path] = set()
    files: list[TextFile] = []
    twice = 0
    for source in sources:
        for file in _expand(source, include):
            real = file.path.resolve()
            if real in seen:
                twice += 1
                continue
            seen.add(real)
            files.append(file)
    return files, twice


def _expand(source: str, include: tuple[str, ...]) -> list[TextFile]:
    if source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        found = _walk(root, STDLIB, ("*.py",))
    elif Path(source).is_dir():
        found = _walk(Path(source), Path(source).resolve().name, include)
    elif Path(source).is_file():
        return [TextFile(Path(source).name, Path(source), explicit=True)]
    elif glob.has_magic(source):
        paths = sorted(Path(p) for p in glob.glob(source, recursive=True))
        found = [TextFile(p.as_posix(), p, explicit=False) for p in paths if p.is_file()]
    else:
        raise ValueError(
            f'sources: expected "{STDLIB}", a file, a folder, a glob or "{HUB}NAME" for a hub data '
            f"set, got {source!r}, which does not exist"
        )
    if not found:
        raise ValueError(f"sources: expected files matching {list(include)}, {source!r} has none")
    return found


def _walk(root: Path, name: str, include: tuple[str, ...]) -> list[TextFile]:
    files = []
    for path in root.rglob("*"):
        parts = path.relative_to(root).parts
        if any(part.startswith(".") or part in _THIRD_PARTY for part in parts):
            continue
        if any(fnmatch.fnmatch(path.name, pattern) for pattern in include) and path.is_file():
            files.append(TextFile("/".join((name, *parts)), path, explicit=False))
    return sorted(files, key=lambda file: file.name)


def _stream_hub(
    name: str, config: str | None, split: str, column: str
) -> Iterator[tuple[str, str]]:
    from datasets import load_dataset

    try:
        rows = iter(load_dataset(name, config, split=split, streaming=True))
    except Exception as error:  # the library raises a dozen unrelated types
        raise BrokenStream(_hub_failure(name, error)) from error
    number = 0
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:
            raise BrokenStream(_hub_failure(name, error)) from error
        text = row.get(column)
        if text is None and column in row:
            text = ""
        if not isinstance(text, str):
            raise ValueError(
                f"hub_column: expected a column of text of {name!r}, one of {sorted(row)}, "
                f"got {column!r}"
            )
        yield f"{name}/{number}", text
        number += 1


def _hub_failure(name: str, error: Exception) -> str:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return f"sources: the hub data set {name!r} can't be read: {reason}"
