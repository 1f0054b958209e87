"""The command `path-attention benchmark stages`: where the Triton operator's time goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from path_attention.benchmarks.candidates import ENCODINGS, candidates
from path_attention.benchmarks.operator import make_inputs
from path_attention.results import make_result, write_result

_REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class BenchmarkStages:
    """Milliseconds of each kernel of the Triton operator, forward and backward, on one GPU.

    The main loops' matrix rate too: their products alone, 2·m·n·k operations each, over their time.
    Writes OUT.json and OUT.png and prints the table.
    """

    tokens: int = 16384
    """Length of the one sequence."""
    shapes: str = "32x64,16x128"
    """Heads x head size, with commas between."""
    encodings: str = "path,path_fox,fox,nope"
    """Of path, path_fox, fox, nope, with commas between."""
    out: Path = Path("results/operator_stages")
    """Where the results go, without an ending."""

    def run(self) -> None:
        if not torch.cuda.is_available():
            raise ValueError("device: expected an NVIDIA GPU, got none")
        rows = []
        for shape in self.shapes.split(","):
            heads, x, size = shape.partition("x")
            if not (heads.isdecimal() and x and size.isdecimal()):
                raise ValueError(f"shapes: expected heads x size, like 32x64, got {shape!r}")
            for encoding in self.encodings.split(","):
                if encoding not in ENCODINGS:
                    raise ValueError(f"encodings: expected of {ENCODINGS}, got {encoding!r}")
                rows += self._measure(encoding, int(heads), int(size))
        result = make_result(
            what="Milliseconds of the Triton operator's kernels, each pass by itself, and the main "
            "loops' TFLOP/s",
            rows=rows,
            device="cuda",
        )
        write_result(self.out.with_suffix(".json"), result)
        _draw(result, self.out.with_suffix(".png"))
        _print(result)

    def _measure(self, encoding: str, heads: int, size: int) -> list[dict[str, Any]]:
        device = torch.device("cuda")
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
                rate = products[kernel] / ms / 1e9 if kernel in products else None
                rows.append(
                    {
                        "encoding": encoding,
                        "tokens": self.tokens,
                        "heads": heads,
                        "size": size,
                        "pass": name,
                        "kernel": kernel,
                        "ms": float(f"{ms:.3g}"),
                        "tflop_per_s": None if rate is None else round(rate),
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


def _draw(result: Mapping[str, Any], path: Path) -> None:
    """Stacked bars: one for each shape, encoding and pass."""
    rows = result["rows"]
    bars = list(dict.fromkeys((r["size"], r["pass"], r["encoding"]) for r in rows))
    totals: dict[str, float] = {}
    for r in rows:
        totals[r["kernel"]] = totals.get(r["kernel"], 0.0) + r["ms"]
    figure = Figure(figsize=(10, 5), layout="constrained", dpi=150)
    axes = figure.subplots()
    base = [0.0] * len(bars)
    colours = colormaps["tab20"].colors  # pyright: ignore[reportAttributeAccessIssue]
    for n, kernel in enumerate(sorted(totals, key=lambda k: -totals[k])):
        heights = [
            sum(
                r["ms"]
                for r in rows
                if (r["size"], r["pass"], r["encoding"]) == bar and r["kernel"] == kernel
            )
            for bar in bars
        ]
        colour = colours[n % len(colours)]
        axes.bar(range(len(bars)), heights, bottom=base, label=kernel, color=colour)
        base = [b + h for b, h in zip(base, heights, strict=True)]
    labels = [f"{encoding}\n{phase}\nd = {size}" for size, phase, encoding in bars]
    axes.set_xticks(range(len(bars)), labels, fontsize=8)
    axes.set_ylabel("milliseconds")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)
    tokens = rows[0]["tokens"]
    figure.suptitle(f"Kernels of the Triton operator, {tokens:,} tokens, {result['device']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _print(result: Mapping[str, Any]) -> None:
    table = Table("size", "encoding", "pass", "kernel", "ms", "TFLOP/s")
    for r in result["rows"]:
        rate = "" if r["tflop_per_s"] is None else str(r["tflop_per_s"])
        values = (r["size"], r["encoding"], r["pass"], r["kernel"], r["ms"], rate)
        table.add_row(*(str(value) for value in values))
    Console().print(table)
