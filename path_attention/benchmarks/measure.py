"""Time, peak memory and error of one call, forward and backward."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from path_attention.benchmarks.candidates import Call

PHASES = ("forward", "backward", "both")
_CALLS = 8  # on a GPU, one behind the other, as in training: the host's launches run ahead


class Job(NamedTuple):
    """A call with the tensors that its gradients are taken of."""

    call: Call
    leaves: Sequence[Tensor]
    grad_out: Tensor

    def run(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The output and the gradients."""
        out = self.call()
        return out, torch.autograd.grad(out, self.leaves, self.grad_out)


def time_interleaved(jobs: Sequence[Job], repeats: int) -> list[list[dict[str, float]]]:
    """Times in milliseconds by phase, for each job one for each repeat.

    Jobs take turns, so that whatever else the machine does falls on all of them; the first turn
    warms up and is not counted. The forward pass is timed as in training, with what it saves; on a
    GPU several calls in a row share one measurement, and the backward pass is both less forward.
    """
    times: list[list[dict[str, float]]] = [[] for _ in jobs]
    for repeat in range(repeats + 1):
        for job, taken in zip(jobs, times, strict=True):
            phases = _time(job)
            if repeat:
                taken.append(phases)
    return times


def summarise(
    times: Sequence[dict[str, float]] | None, anchor: Sequence[dict[str, float]] | None
) -> dict[str, float | None]:
    """Medians `forward_ms`, …, and medians of the ratios to the anchor in the same turn.

    Four digits of each; None where no times were taken.
    """
    row: dict[str, float | None] = {f"{p}_{unit}": None for unit in ("ms", "ratio") for p in PHASES}
    if times is not None and anchor is not None:
        for phase in PHASES:
            ratios = [t[phase] / a[phase] for t, a in zip(times, anchor, strict=True)]
            row[f"{phase}_ms"] = float(f"{median(t[phase] for t in times):.4g}")
            row[f"{phase}_ratio"] = float(f"{median(ratios):.4g}")
    return row


def show_time(row: Mapping[str, Any], phase: str) -> str:
    """A row's time of a phase and its ratio to the anchor's, in words."""
    if row[f"{phase}_ms"] is None:
        return "–"
    return f"{row[f'{phase}_ms']:,.4g} ms × {row[f'{phase}_ratio']:.2f}"


def peak_bytes(job: Job) -> int:
    """The most memory that forward and backward hold at once above their inputs.

    On CUDA, torch's own allocator statistic, of the second run: the first one compiles and tunes
    what is not compiled yet. On the CPU, the running sum of all allocations and
    releases that torch's profiler records: unlike the process's resident size it holds neither what
    the allocator keeps for later nor what other threads touch, so small sizes are measured too.
    Buffers that a matrix library allocates for itself are not in it.
    """
    device = job.grad_out.device
    if device.type == "cuda":
        job.run()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        job.run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it tells of each start and stop
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        job.run()
    recorded = profiler.profiler
    if recorded is None or recorded.kineto_results is None:
        raise RuntimeError("profiler: expected memory events, got none")
    events = [e for e in recorded.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]
        peak = max(peak, held)
    return peak


def relative_error(got: Job, exact: Job) -> float:
    """The largest of ‖x − exact‖/‖exact‖ over output and gradients; ∞ if not finite."""
    errors = []
    (out, grads), (exact_out, exact_grads) = got.run(), exact.run()
    for x, y in zip((out, *grads), (exact_out, *exact_grads), strict=True):
        y = y.double()
        errors.append(((x.double() - y).norm() / y.norm()).item())
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a large product of matrices: the median of 10."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    taken = []
    for _ in range(13):
        with stopwatch(device) as read:
            torch.mm(a, b)
        taken.append(read())
    return 2 * n**3 / (median(taken[3:]) / 1e3)


def _time(job: Job) -> dict[str, float]:
    device = job.grad_out.device
    if device.type != "cuda":
        with stopwatch(device) as forward:
            out = job.call()
        with stopwatch(device) as backward:
            torch.autograd.grad(out, job.leaves, job.grad_out)
        return {
            "forward": forward(),
            "backward": backward(),
            "both": forward() + backward(),
        }
    with stopwatch(device) as forward:
        for _ in range(_CALLS):
            job.call()
    with stopwatch(device) as both:
        for _ in range(_CALLS):
            job.run()
    return {
        "forward": forward() / _CALLS,
        "backward": (both() - forward()) / _CALLS,
        "both": both() / _CALLS,
    }


@contextmanager
def stopwatch(device: torch.device) -> Iterator[Callable[[], float]]:
    """Yields a function that tells the milliseconds that the block took, once it has ended."""
    taken: list[float] = []

    def read() -> float:
        return taken[0]

    if device.type == "cuda":
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield read
        stop.record()
        torch.cuda.synchronize(device)
        taken.append(start.elapsed_time(stop))
    else:
        began = time.perf_counter()
        yield read
        taken.append(1e3 * (time.perf_counter() - began))
