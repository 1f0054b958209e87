"""What the benchmarks share: options, the choice of candidates, the check, rows, and writing."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from path_attention.benchmarks.candidates import (
    DEFINITION,
    ENCODINGS,
    Candidate,
    Layout,
    candidates,
)
from path_attention.benchmarks.inputs import Inputs
from path_attention.benchmarks.measure import (
    Job,
    peak_bytes,
    relative_error,
    show_time,
    summarise,
    time_interleaved,
)
from path_attention.results import command_line, make_result, versions, with_ending, write_result

Report = Callable[[str], None]
Choice = tuple[Candidate, str]  # with one of its encodings
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Relative error that one of ours may have: about six roundings of a 16-bit result.
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1.3e-3}
_PEERS = ("flash-linear-attention",)


def say(line: str) -> None:
    """Report progress on the terminal, at once."""
    print(line, flush=True)


def choose(
    device: torch.device, encodings: str, names: str, layout: Layout = "batch"
) -> list[Choice]:
    """Candidates with their encodings, by the words of the options; no names: all that run here."""
    wanted = words("encodings", encodings, ENCODINGS)
    available = candidates(device.type, layout)
    known = [c.name for c in available]
    named = words("candidates", names, known) if names else known
    return [(c, e) for c in available if c.name in named for e in wanted if e in c.encodings]


def beside_anchor(
    device: torch.device, encodings: str, names: str, layout: Layout = "batch"
) -> list[Choice]:
    """As `choose`, with the anchor first, and attention without an encoding asked for or not."""
    chosen = choose(device, encodings, names, layout)
    if "nope" not in encodings.split(","):
        plain = choose(device, "nope", names, layout)
        chosen = [c for c in plain if c[0].encodings == ("nope",)] + chosen
    anchor = (candidates(device.type, layout)[0], "nope")
    return [anchor, *(c for c in chosen if c != anchor)]


def job_of(candidate: Candidate, inputs: Inputs, encoding: str) -> Job:
    """The call on these leaves, with a gradient that is not the same everywhere."""
    DV = inputs.v.shape[3]
    grad_out = torch.ones_like(inputs.q[..., :1]) * torch.linspace(-1, 1, DV).to(inputs.q)
    return Job(candidate.make(inputs, encoding), inputs.used_by(encoding), grad_out)


def check(chosen: Sequence[Choice], inputs: Inputs, report: Report) -> dict[Choice, float]:
    """Relative error of each candidate against the definition in float64, on these leaves.

    A peer that fails, or whose results are not finite, is reported and left out; ValueError if one
    of ours is beyond what is allowed.
    """
    dtype = inputs.q.dtype
    wide = inputs.leaves(torch.Tensor.double)
    errors = {}
    for candidate, encoding in chosen:
        exact = job_of(DEFINITION, wide, encoding)

        def compared(candidate=candidate, encoding=encoding, exact=exact) -> float:
            return relative_error(job_of(candidate, inputs, encoding), exact)

        error = run_peer(candidate, encoding, compared, report)
        if candidate.ours:
            hold(candidate.name, error, ALLOWED[dtype], f"the definition ({encoding}, {dtype})")
        if error == math.inf:
            report(f"{candidate.name} {encoding}: results are not finite: not measured")
        elif error is not None:
            errors[candidate, encoding] = error
    if chosen[0] not in errors:
        raise ValueError(f"{chosen[0][0].name}: expected an anchor that runs here")
    report("the operator agrees with its definition")
    return errors


def compare(
    errors: Mapping[Choice, float],
    inputs: Inputs,
    *,
    repeats: int,
    timed: bool = True,
    columns: Mapping[str, Any],
    report: Report,
) -> Iterator[dict[str, Any]]:
    """A row for each checked candidate, the anchor first: times, ratios, peak memory.

    A peer that does not fit in memory is reported and has no row.
    """
    jobs = {}
    for choice in errors:
        job = job_of(choice[0], inputs, choice[1])
        if choice[0].ours or not jobs or _fits(job):  # the anchor must
            jobs[choice] = job
        else:
            report(f"{choice[0].name} {choice[1]}: does not fit in memory")
    times = time_interleaved(list(jobs.values()), repeats) if timed else [None] * len(jobs)
    for (choice, job), taken in zip(jobs.items(), times, strict=True):
        candidate, encoding = choice
        row = {
            "candidate": candidate.name,
            "encoding": encoding,
            **columns,
            **measured(job, taken, times[0], repeats, errors[choice]),
        }
        report(f"{candidate.name} {encoding}: {show_time(row, 'both')}")
        yield row


def hold(name: str, error: float, allowed: float, against: str) -> None:
    """Raise ValueError unless an error is within what is allowed: then nothing is measured."""
    if not error <= allowed:
        raise ValueError(
            f"{name}: expected a relative error of at most {allowed:g} against {against}, "
            f"got {error:.3g}: not measured"
        )


def measured(
    job: Job, taken: Any, anchor: Any, repeats: int, error: float | None
) -> dict[str, Any]:
    """The columns that every row of a comparison has: its tensors, times, ratios, memory, error."""
    leaf = job.leaves[0]
    return {
        "dtype": name_of(leaf.dtype),
        "threads": torch.get_num_threads() if leaf.device.type == "cpu" else None,
        "repeats": repeats,
        **summarise(taken, anchor),
        "peak_mib": round(peak_bytes(job) / 2**20, 2),
        "error": None if error is None else float(f"{error:.2g}"),
    }


def run_peer(candidate: Candidate, encoding: str, run: Callable[[], Any], report: Report) -> Any:
    """What `run` returns; None, and a line, where a peer fails. One of ours may not."""
    try:
        return run()
    except Exception as failure:
        if candidate.ours:
            raise
        reason = " ".join(f"{type(failure).__name__}: {failure}".split())
        report(f"{candidate.name} {encoding}: fails here: {reason[:200]}")
        return None


def publish(
    options: Any,
    name: str,
    *,
    what: str,
    rows: Sequence[Mapping[str, Any]],
    device: torch.device,
    draw: Callable[[Mapping[str, Any], Path], None],
    program: str = "path-attention",
) -> dict[str, Any]:
    """Write OUT.json and OUT.png of `PROGRAM benchmark NAME`, and return the result."""
    command = _command(options, name, program)
    result = make_result(what=what, rows=rows, device=str(device), command=command)
    result["versions"] = library_versions()
    write_result(with_ending(options.out, ".json"), result)
    draw(result, with_ending(options.out, ".png"))
    return result


def library_versions() -> dict[str, str | None]:
    """`results.versions`, and of the peers that are installed."""
    found = versions()
    for peer in _PEERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[peer] = importlib.metadata.version(peer)
    return found


def _command(options: Any, name: str, program: str) -> str:
    """The command that these options are, where `run()` was called from Python too."""
    said = [*program.split(), "benchmark", name]
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value == field.default:
            continue
        option = field.name.replace("_", "-")
        if isinstance(value, bool):
            said.append(f"--{option}" if value else f"--no-{option}")
        else:
            said += [f"--{option}", str(value)]
    return command_line(said)


def _fits(job: Job) -> bool:
    try:
        job.run()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return False
    return True


# --- Options -------------------------------------------------------------------------------------


def pick_device(name: str) -> torch.device:
    """cpu, cuda, cuda:1 …, or auto. ValueError on one that is not here.

    A GPU is made the current one: streams and events that name none are then its own.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device: expected cpu, cuda or auto, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu, cuda or auto, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: expected one that is here, got cuda and no GPU")
    if device.index is not None and device.type == "cuda":
        count = torch.cuda.device_count()
        if device.index >= count:
            raise ValueError(f"device: expected one of {count} that are here, got {name!r}")
        torch.cuda.set_device(device)
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """A dtype by its name; auto is bfloat16 on a GPU, float32 on the CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[words("dtype", name, list(DTYPES))[0]]


def name_of(dtype: torch.dtype) -> str:
    """As in the results: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def set_threads(threads: int) -> None:
    """Threads on the CPU; 0 leaves torch's own choice."""
    if threads > 0:
        torch.set_num_threads(threads)


def at_least(options: Any, **lowest: float) -> None:
    """Raise ValueError if one of the options is below its least value, or not finite."""
    for name, least in lowest.items():
        value = getattr(options, name)
        if not math.isfinite(value):
            raise ValueError(f"{name}: expected a finite number, got {value}")
        if value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")


def numbers(name: str, text: str) -> list[int]:
    """Positive integers with commas between."""
    found = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in found):
        raise ValueError(f"{name}: expected positive integers with commas between, got {text!r}")
    return [int(word) for word in found]


def words(name: str, text: str, known: Sequence[str]) -> list[str]:
    """Words with commas between, each of them known; what comes twice counts once."""
    found = list(dict.fromkeys(word.strip() for word in text.split(",")))
    for word in found:
        if word not in known:
            raise ValueError(f"{name}: expected some of {', '.join(known)}, got {word!r}")
    return found


def shapes(text: str) -> list[tuple[int, int]]:
    """Heads and head sizes from "32x64,16x128"."""
    found = []
    for word in text.split(","):
        heads, x, size = word.strip().partition("x")
        if not (heads.isdecimal() and x and size.isdecimal() and int(heads) and int(size)):
            raise ValueError(f"shapes: expected heads x size, like 32x64, got {word!r}")
        found.append((int(heads), int(size)))
    return found
