"""The command `path-attention benchmark stages`: where the Triton operator's time goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure

from path_attention.benchmarks.candidates import ENCODINGS, candidates
from path_attention.benchmarks.comparison import publish, say, shapes, words
from path_attention.benchmarks.inputs import make_inputs
from path_attention.benchmarks.kept import kept_for
from path_attention.benchmarks.measure import matrix_rate
from path_attention.results import write_figure

_REPEATS = 5
_DRAWN = 0.005  # of all time: what takes less is drawn with the others


@dataclass(frozen=True, kw_only=True)
class BenchmarkStages:
    """Milliseconds of each kernel of the Triton operator, forward and backward, on one GPU.

    The main loops' matrix rate too: their products alone, 2·m·n·k operations each, over their time;
    and what share that is of a large product's rate in the same run, the ceiling.
    Writes OUT.json and OUT.png and prints the table.
    """

    tokens: int = 16384
    """Length of the one sequence."""
    shapes: str = "32x64,16x128"
    """Heads x head size, with commas between."""
    encodings: str = "path,path_fox,fox,nope"
    """Of path, path_fox, fox, nope, alibi, with commas between."""
    out: Path = Path("results/operator_stages")
    """Where the results go, without an ending."""

    def run(self) -> None:
        from path_attention.benchmarks.figure import print_rows

        if not torch.cuda.is_available():
            raise ValueError("device: expected an NVIDIA GPU, got none")
        device = torch.device("cuda")
        encodings = words("encodings", self.encodings, ENCODINGS)
        wanted, rows = shapes(self.shapes), []
        kept = kept_for(self, device, say)
        # kept, too: `what` tells one for all rows
        first = kept.rows("ceiling", lambda: [{"rate": matrix_rate(device, torch.bfloat16)}])
        ceiling = first[0]["rate"]
        for heads, size in wanted:
            for encoding in encodings:
                rows += kept.rows(
                    f"{heads} heads of {size}, {encoding}",
                    partial(self._measure, encoding, heads, size, device, ceiling),
                )
        result = publish(
            self,
            "stages",
            what="Milliseconds of the Triton operator's kernels, each pass by itself, the main "
            f"loops' TFLOP/s, and their share of a large product's {ceiling / 1e12:.0f} TFLOP/s",
            rows=rows,
            device=device,
            draw=_draw,
        )
        kept.delete()
        columns = ("size", "encoding", "pass", "kernel", "ms", "tflop_per_s", "of_ceiling")
        print_rows(result, columns)

    def _measure(
        self, encoding: str, heads: int, size: int, device: torch.device, ceiling: float
    ) -> list[dict[str, Any]]:
        inputs = make_inputs(1, self.tokens, heads, heads, size, torch.bfloat16, device)
        triton = next(c for c in candidates("cuda") if c.name == "triton")
        call, leaves = triton.make(inputs, encoding), inputs.used_by(encoding)
        out = call()
        grad_out = torch.randn_like(out)

        def backward() -> None:
            torch.autograd.grad(out, leaves, grad_out, retain_graph=True)

        products = _products(self.tokens, heads, size)
        rows = []
        for name, run in (("forward", call), ("backward", backward)):
            for kernel, ms in sorted(_kernels(run).items(), key=lambda item: -item[1]):
                loop = products.get(_stage(kernel))
                rate = None if loop is None else loop / (ms / 1e3)
                rows.append(
                    {
                        "encoding": encoding,
                        "tokens": self.tokens,
                        "heads": heads,
                        "size": size,
                        "pass": name,
                        "kernel": kernel,
                        "ms": float(f"{ms:.3g}"),
                        "tflop_per_s": None if rate is None else round(rate / 1e12),
                        "of_ceiling": None if rate is None else round(rate / ceiling, 3),
                    }
                )
        return rows


def _products(tokens: int, heads: int, size: int) -> dict[str, float]:
    """Operations of the main loops: a product of a 64×64 tile of scores is 2·64²·size."""
    blocks = -(-tokens // 64)
    pairs = blocks * (blocks - 1) // 2
    tile = 2.0 * 64 * 64 * size * heads
    return {
        "meet_fwd": 2 * tile * (pairs - blocks // 2),  # the first pair is the local kernel's
        "queries_bwd": 3 * tile * pairs,
        "keys_bwd": 4 * tile * pairs,
    }


def _kernels(run: Callable[[], object]) -> dict[str, float]:
    """Milliseconds a call, by kernel; torch's own kernels together as "torch"."""
    run()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(_REPEATS):
            run()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in profiler.key_averages():
        name = event.key.removesuffix("_kernel") if event.key.endswith("_kernel") else "torch"
        ms = event.device_time_total / 1e3 / _REPEATS
        times[name] = times.get(name, 0.0) + ms
    return {name: ms for name, ms in times.items() if ms > 0}


def _stage(kernel: str) -> str:
    """A kernel's name without whose it is: Hopper's loops stand for the portable ones."""
    return kernel.removesuffix("_hopper")


def _draw(result: Mapping[str, Any], path: Path) -> None:
    """Stacked bars: one for each shape, encoding and pass."""
    rows = result["rows"]
    bars = list(dict.fromkeys((r["size"], r["pass"], r["encoding"]) for r in rows))
    stages: dict[str, list[float]] = {}
    for r in rows:
        heights = stages.setdefault(_stage(r["kernel"]), [0.0] * len(bars))
        heights[bars.index((r["size"], r["pass"], r["encoding"]))] += r["ms"]
    least = _DRAWN * sum(map(sum, stages.values()))
    small = [stages.pop(name) for name in list(stages) if sum(stages[name]) < least]
    drawn = sorted(stages.items(), key=lambda item: -sum(item[1]))
    if small:
        drawn.append(("others", [sum(each) for each in zip(*small, strict=True)]))
    figure = Figure(figsize=(10, 5), layout="constrained", dpi=150)
    axes = figure.subplots()
    base = [0.0] * len(bars)
    colours = colormaps["tab20"].colors  # pyright: ignore[reportAttributeAccessIssue]
    for n, (kernel, heights) in enumerate(drawn):
        colour = colours[n % len(colours)]
        axes.bar(range(len(bars)), heights, bottom=base, label=kernel, color=colour)
        base = [b + h for b, h in zip(base, heights, strict=True)]
    labels = [f"{encoding} {phase}, {size}" for size, phase, encoding in bars]
    axes.set_xticks(range(len(bars)), labels, fontsize=8, rotation=45, ha="right")
    axes.set_ylabel("milliseconds")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)
    tokens = rows[0]["tokens"]
    figure.suptitle(f"Kernels of the Triton operator, {tokens:,} tokens, {result['device']}")
    write_figure(figure, path)
