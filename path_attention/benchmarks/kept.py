"""What an interrupted benchmark has measured, kept in a file until its result is written."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from path_attention.benchmarks.comparison import Report, library_versions
from path_attention.results import (
    check_rows,
    device_name,
    read_kept,
    source_commit,
    with_ending,
    write_whole,
)

Rows = list[dict[str, Any]]
Measure = Callable[[], Iterable[Mapping[str, Any]]]
Keep = Callable[[str, Measure], Rows]  # (unit, how it is measured) → its rows
_ENVIRONMENT = ("PATH_ATTENTION_HOPPER",)  # what changes what is measured


def fresh(unit: str, measure: Measure) -> Rows:
    """Measure, and keep nothing."""
    return [dict(row) for row in measure()]


class Kept:
    """The rows of units that are done, in a JSON file.

    A unit is what must be measured in one go, such as rows whose ratios are of the same turns.

    Args:
        path: of the file; it need not be there.
        of: all that the rows depend on, by name.
        report: told of each unit that is not measured again.

    Raises:
        ValueError: naming `out`, if the file is damaged, or keeps what depended on something else.
    """

    def __init__(self, path: Path, of: Mapping[str, Any], report: Report) -> None:
        self.path, self.of, self.report = path, dict(of), report
        self._asked = 0
        held = read_kept(path)
        if held:
            self._check(held)
        self._units: dict[str, Rows] = held.get("units", {})

    def _check(self, held: Mapping[str, Any]) -> None:
        try:
            there, units = dict(held["of"]), dict(held["units"])
            for rows in units.values():
                check_rows(rows)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"out: {self.path} is damaged ({type(error).__name__}: {error}); delete it"
            ) from error
        different = [
            f"{name} was {there.get(name)!r} and now is {self.of.get(name)!r}"
            for name in {**self.of, **there}
            if there.get(name) != self.of.get(name)
        ]
        if different:
            raise ValueError(
                f"out: expected another place, or {self.path} to be deleted: it keeps what another "
                f"run measured ({'; '.join(different)})"
            )

    def rows(self, unit: str, measure: Measure) -> Rows:
        """The rows of a unit: those kept, else `measure`'s, which are kept then.

        A unit without rows, as where a peer fails, is not kept.
        """
        self._asked += 1
        name = f"{self._asked}: {unit}"  # numbered, since what is asked for twice is two units
        if name in self._units:
            self.report(f"{unit}: measured before")
        elif rows := [dict(row) for row in measure()]:
            check_rows(rows)
            self._units[name] = rows
            held = {"of": self.of, "units": self._units}
            write_whole(self.path, json.dumps(held, ensure_ascii=False, allow_nan=False, indent=1))
        return [dict(row) for row in self._units.get(name, [])]

    def delete(self) -> None:
        """Delete the file, when the result is written."""
        self.path.unlink(missing_ok=True)


def kept_for(
    options: Any, device: torch.device, report: Report, files: Sequence[Path | None] = ()
) -> Kept:
    """What the same command kept in OUT.partial.json, if it was interrupted.

    Args:
        options: of the benchmark, with `out`.
        device: that is measured.
        report: told of what is not measured again.
        files: that the options name and rows depend on: files, or folders with all in them.

    Raises:
        ValueError: as `Kept` does.
    """
    given = {f"--{f.name}": getattr(options, f.name) for f in dataclasses.fields(options)}
    del given["--out"]
    of = {
        "benchmark": type(options).__name__,
        **{name: str(x) if isinstance(x, Path) else x for name, x in given.items()},
        "commit": source_commit(),
        # the commit says too little of a changed checkout, and nothing of an installed copy
        "source": _digest(Path(__file__).parents[1], "*.py"),
        "device": device_name(str(device)),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        **{name: os.environ.get(name) for name in _ENVIRONMENT},
        **library_versions(),
        **{f"contents of {file}": _digest(file) for file in files if file is not None},
    }
    return Kept(with_ending(options.out, ".partial.json"), of, report)


def _digest(path: str | os.PathLike[str], pattern: str = "*") -> str:
    """Of a file, or of a folder's files of this pattern, with their names."""
    path, whole = Path(path), hashlib.sha256()
    for file in sorted(path.rglob(pattern)) if path.is_dir() else [path]:
        if file.is_file():
            whole.update(file.relative_to(path).as_posix().encode() + b"\0")
            with file.open("rb") as opened:
                whole.update(hashlib.file_digest(opened, "sha256").digest())
    return whole.hexdigest()[:16]
