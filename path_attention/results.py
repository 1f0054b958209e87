"""The form of a result: one JSON file that says what was measured, how, where, and the rows; and
how figures are written.

It lies below every other module, since the operator's benchmarks and the evaluation of whole models
write the same form; it imports nothing of the package.

A result is an object with exactly these keys:

    what      one sentence: what was measured, with units
    command   the command that makes it again
    commit    the source's commit, "-changed" behind it if tracked files differed, or None
    device    the processor's or the accelerator's name
    versions  of Python, of path-attention, and of the libraries that the numbers depend on
    rows      a list of flat objects: names to numbers, words, booleans or None

No machine's name or path belongs in it, and a number that is not finite is refused.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEYS = ("what", "command", "commit", "device", "versions", "rows")
LIBRARIES = ("path-attention", "torch", "transformers", "triton")
Row = Mapping[str, Any]
_PNG = {"Software": None}  # leaves out which matplotlib drew it
_ABSOLUTE_PATH = re.compile(r"(?<![\w.~-])(/[\w.~-]+){2,}|\b[A-Za-z]:\\|~/")


def make_result(
    *, what: str, rows: Sequence[Row], device: str = "cpu", command: str | None = None
) -> dict[str, Any]:
    """A result of this process, of the form that `check_result` asks for.

    Args:
        what: one sentence: what was measured, with units.
        rows: flat objects, each with the same meaning under the same name.
        device: "cpu", "cuda" or "cuda:1": where it was measured; its name is looked up.
        command: the command that makes it again; None is this process's own.
    """
    return {
        "what": what,
        "command": command_line(sys.argv) if command is None else command,
        "commit": source_commit(),
        "device": device_name(device),
        "versions": versions(),
        "rows": [dict(row) for row in rows],
    }


def write_result(path: str | os.PathLike[str], result: Mapping[str, Any]) -> None:
    """Write a result, whole or not at all, a line for each row; the folder is made.

    Raises:
        ValueError: if the result has not the form (see `check_result`).
    """
    check_result(result)
    head = ",\n".join(f' "{key}": {_dump(result[key])}' for key in KEYS[:-1])
    body = ",\n".join(f"  {_dump(row)}" for row in result["rows"])
    write_whole(path, f'{{\n{head},\n "rows": [\n{body}\n ]\n}}\n')


def read_result(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a result and check its form. Raises ValueError naming the file."""
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
        check_result(result)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return result


def check_result(result: Any) -> None:
    """Raise ValueError, saying what is wrong, unless `result` has the form."""
    if not isinstance(result, dict) or tuple(result) != KEYS:
        came = list(result) if isinstance(result, dict) else type(result).__name__
        raise ValueError(f"result: expected an object with the keys {list(KEYS)}, got {came}")
    for key in ("what", "command", "device"):
        if not isinstance(result[key], str) or not result[key].strip():
            raise ValueError(f"{key}: expected words, got {result[key]!r}")
    commit = result["commit"]
    if commit is not None and not re.fullmatch(r"[0-9a-f]{40}(-changed)?", str(commit)):
        raise ValueError(f"commit: expected 40 hexadecimal digits or null, got {commit!r}")
    if not isinstance(result["versions"], dict) or "python" not in result["versions"]:
        raise ValueError(f"versions: expected an object with python, got {result['versions']!r}")
    check_rows(result["rows"])
    found = _ABSOLUTE_PATH.search(_dump(result))
    if found:
        raise ValueError(f"result: expected no path of a machine in it, got {found[0]!r}")


def check_rows(rows: Any) -> None:
    """Raise ValueError, saying what is wrong, unless these are rows of a result."""
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"rows: expected at least one row, got {rows!r}")
    for n, row in enumerate(rows):
        if not isinstance(row, dict) or not row:
            raise ValueError(f"rows: expected objects, got {row!r} at index {n}")
        for name, value in row.items():
            if not isinstance(value, (str, int, float, bool, type(None))):
                raise ValueError(f"rows: expected flat values, got {name}: {value!r} at index {n}")
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"rows: expected finite numbers, got {name}: {value} at index {n}")


def command_line(argv: Sequence[str]) -> str:
    """The command as typed, with the program's name alone and absolute paths made relative."""

    def relative(word: str) -> str:
        option, equals, value = word.rpartition("=")
        path = Path(value)
        if not path.is_absolute():
            return word
        here = Path.cwd()
        short = path.relative_to(here) if path.is_relative_to(here) else Path(path.name)
        return f"{option}{equals}{short}"

    program = Path(argv[0])
    inside = program.suffix == ".py" and program.resolve().parent == Path(__file__).resolve().parent
    name = f"python -m path_attention.{program.stem}" if inside else program.name
    return " ".join([name, *(shlex.quote(relative(word)) for word in argv[1:])])


def source_commit() -> str | None:
    """The commit of the source that runs, or None where it is not a git checkout."""
    here = Path(__file__).resolve()

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=here.parent, capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    # An installed copy can lie in a folder of somebody else's checkout: then it is not tracked.
    if git("ls-files", "--error-unmatch", here.name) is None:
        return None
    commit = git("rev-parse", "HEAD")
    if commit is None:
        return None
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".")
    return f"{commit}-changed" if changed else commit


def device_name(device: str = "cpu") -> str:
    """The name of the accelerator, or of the processor with the number of its cores in use."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        name = found[1] if found else name
    except OSError:
        pass
    usable = getattr(os, "sched_getaffinity", None)
    cores = len(usable(0)) if usable else os.cpu_count()
    return f"{name}, {cores} cores"


def versions() -> dict[str, str | None]:
    """Versions of Python and of the libraries that numbers depend on; None where not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file so that a reader sees the old one or the new one, never a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def put_in_place(partial: Path, folder: Path) -> None:
    """Rename a finished folder; one that has the name waits beside it, then goes."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(partial, folder)
    shutil.rmtree(old, ignore_errors=True)


def read_kept(path: Path) -> dict[str, Any]:
    """The object in a JSON file that an interrupted command left; an empty one if there is none.

    Raises ValueError naming `out`, since such files lie there, if it is damaged.
    """
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(held, dict):
            raise ValueError(f"expected an object, got {type(held).__name__}")
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"out: {path} is damaged ({error}); delete it") from error
    return held


def with_ending(path: str | os.PathLike[str], ending: str) -> Path:
    """A file that a command's option means by where results go, without an ending.

    What stands behind a dot stays, as in "torch2.13", but for a ".json" or ".png" all the same.
    """
    path = Path(path)
    given = path.suffix in (".json", ".png")
    return path.with_name((path.stem if given else path.name) + ending)


def write_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Save a figure as a PNG, whole or not at all; the folder is made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part.png")
    figure.savefig(part, metadata=_PNG)
    os.replace(part, path)


def png(figure: Figure) -> bytes:
    """A figure as a PNG."""
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata=_PNG)
    return file.getvalue()


def plain_label(text: str) -> str:
    """A name as matplotlib shows it in legends, titles and at ticks, letter by letter.

    Else what stands between dollars is a formula, and what starts with "_" is left out of legends.
    """
    hidden = "\N{ZERO WIDTH SPACE}" if text.startswith("_") else ""
    return hidden + text.replace("$", r"\$")


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
