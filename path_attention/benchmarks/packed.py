"""The command `path-attention benchmark packed`: documents of unequal lengths in one batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from path_attention.benchmarks.comparison import (
    Choice,
    Report,
    at_least,
    beside_anchor,
    check,
    compare,
    pick_device,
    pick_dtype,
    publish,
    say,
    set_threads,
    shapes,
)
from path_attention.benchmarks.inputs import make_inputs
from path_attention.benchmarks.kept import Keep, fresh, kept_for
from path_attention.ops.packing import Packing

_CHECKED_LENGTHS = (139, 1, 60)


@dataclass(frozen=True, kw_only=True)
class BenchmarkPacked:
    """Time and peak memory of packed documents beside PyTorch's variable-length flash attention.

    Lengths are lognormal: their logarithm has the standard deviation SIGMA. Writes OUT.json and
    OUT.png and prints the table; ratios, turns, check and peers as in `benchmark operator`.
    """

    tokens: int = 16384
    """Tokens a batch; its last document is cut to fit."""
    mean: float = 1024.0
    """Mean length of the documents."""
    sigma: float = 1.0
    """Standard deviation of the logarithm of their lengths."""
    batches: int = 3
    """Batches to draw, with seeds 0, 1, …"""
    shapes: str = "32x64,16x128"
    """Heads x head size, with commas between."""
    encodings: str = "path,path_fox,fox,nope"
    """Of path, path_fox, fox, nope, alibi, with commas between; the anchor is always nope."""
    candidates: str = ""
    """Names with commas between; empty for all that run here."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of q, k, v; auto is bfloat16 on a GPU, float32 on the CPU."""
    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto takes a GPU where there is one."""
    repeats: int = 5
    """Turns that count."""
    threads: int = 0
    """Threads on the CPU; 0 is torch's own choice."""
    out: Path = Path("results/packed")
    """Where the results go, without an ending."""

    def run(self) -> None:
        from path_attention.benchmarks.figure import print_rows

        device = pick_device(self.device)
        set_threads(self.threads)
        kept = kept_for(self, device, say)
        result = publish(
            self,
            "packed",
            what="Milliseconds and peak MiB above the inputs of attention's forward and backward "
            "over packed documents, and time as a ratio to plain attention's over the same "
            "documents (the first candidate) in the same turn",
            rows=self.measure(device, say, kept.rows),
            device=device,
            draw=_draw,
        )
        kept.delete()
        names = ("heads", "size", "seed", "documents", "longest", "candidate", "encoding")
        times = ("both_ms", "forward_ratio", "backward_ratio", "both_ratio", "peak_mib", "error")
        print_rows(result, (*names, *times))

    def measure(
        self, device: torch.device, report: Report, keep: Keep = fresh
    ) -> list[dict[str, Any]]:
        """The rows of the result. Raises ValueError on bad options or a wrong operator."""
        chosen = beside_anchor(device, self.encodings, self.candidates, "packed")
        at_least(self, tokens=1, mean=1, sigma=0, batches=1, repeats=1, threads=0)
        dtype = pick_dtype(self.dtype, device)
        rows = []
        for heads, size in shapes(self.shapes):
            shape = (heads, heads, size, dtype, device)
            packing = Packing.from_lengths(_CHECKED_LENGTHS, device)
            errors = check(chosen, make_inputs(1, packing.total, *shape, packing), report)
            for seed in range(self.batches):
                batch = partial(self._batch, seed, shape, errors, report)
                rows += keep(f"{heads} heads of {size}, seed {seed}", batch)
        return rows

    def _batch(
        self,
        seed: int,
        shape: tuple[int, int, int, torch.dtype, torch.device],
        errors: Mapping[Choice, float],
        report: Report,
    ) -> Iterator[dict[str, Any]]:
        """The candidates' rows of the documents of one seed."""
        heads, _, size, _, device = shape
        lengths = lognormal_lengths(self.tokens, self.mean, self.sigma, seed)
        report(f"{heads} heads of {size}, {len(lengths)} documents, seed {seed}")
        return compare(
            errors,
            make_inputs(1, self.tokens, *shape, Packing.from_lengths(lengths, device)),
            repeats=self.repeats,
            columns={
                "tokens": self.tokens,
                "documents": len(lengths),
                "longest": max(lengths),
                "mean": self.mean,
                "sigma": self.sigma,
                "seed": seed,
                "heads": heads,
                "size": size,
            },
            report=report,
        )


def lognormal_lengths(tokens: int, mean: float, sigma: float, seed: int) -> list[int]:
    """Lengths of documents that fill a batch: ln length ~ N(ln mean − sigma²/2, sigma²).

    Each is rounded, to 1 at least; the last one is cut to fit.
    """
    rng = torch.Generator().manual_seed(seed)
    lengths, left = [], tokens
    while left:
        deviation = sigma * torch.randn((), dtype=torch.float64, generator=rng).item()
        length = round(mean * math.exp(deviation - sigma**2 / 2))
        lengths.append(min(max(length, 1), left))
        left -= lengths[-1]
    return lengths


def _draw(result: Mapping[str, Any], path: Path) -> None:
    """A panel a shape: each encoding's median ratio over the batches."""
    from path_attention.benchmarks.figure import Panel, draw_bars

    rows = result["rows"]
    panels = []
    for heads, size in dict.fromkeys((r["heads"], r["size"]) for r in rows):
        ratios: dict[tuple[str, str], list[float]] = {}
        for r in rows:
            if (r["heads"], r["size"]) == (heads, size):
                ratios.setdefault((r["candidate"], r["encoding"]), []).append(r["both_ratio"])
        bars = {key: median(values) for key, values in ratios.items()}
        panels.append(Panel(f"{heads} heads of {size}", "time, forward + backward", bars))
    first = rows[0]
    title = (
        f"{result['device']}: {first['tokens']:,} tokens of packed documents, lognormal with mean "
        f"{first['mean']:g} and sigma {first['sigma']:g} (1: {first['candidate']})"
    )
    draw_bars(panels, title, path)
