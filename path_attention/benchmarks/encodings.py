"""The benchmark of encodings: what an attention layer costs under each preset, beside RoPE's."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from path_attention.benchmarks.comparison import (
    Report,
    at_least,
    hold,
    measured,
    pick_device,
    pick_dtype,
    publish,
    say,
    set_threads,
    words,
)
from path_attention.benchmarks.measure import Job, relative_error, show_time, time_interleaved
from path_attention.models.presets import PRESETS
from path_attention.nn import Attention, AttentionConfig

_ANCHOR = "rope"
_CHECKED_TOKENS = 200
_VOCABULARY = 32000
# Relative error that output and input gradient may have: about ten roundings, as many results of
# 16 bits lie between them (projections, encoding, operator, norm).
_ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2.6e-3}


@dataclass(frozen=True, kw_only=True)
class BenchmarkEncodings:
    """Time and peak memory of an attention layer under each preset, beside RoPE's.

    Forward, and backward to the input and all parameters, of the whole layer: projections, encoding
    and operator. Writes OUT.json and OUT.png and prints the table. Layers take turns; ratios are to
    RoPE's in the same turn. Refused unless each layer agrees with itself in float64 first.
    """

    encodings: str = ""
    """Presets with commas between; empty for all. RoPE is measured always."""
    tokens: int = 4096
    """Length of the sequences."""
    batch: int = 4
    """Sequences a batch."""
    hidden_size: int = 1024
    """Width of the layer."""
    heads: int = 16
    """Heads of queries, keys and values, of size hidden_size / heads."""
    mode: Literal["eager", "compiled"] = "eager"
    """Layers as they are, or made by torch.compile."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of input and weights; auto is bfloat16 on a GPU, float32 on the CPU."""
    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto takes a GPU where there is one."""
    repeats: int = 10
    """Turns that count."""
    threads: int = 0
    """Threads on the CPU; 0 is torch's own choice."""
    out: Path = Path("results/encodings")
    """Where the results go, without an ending."""

    def run(self) -> None:
        from path_attention.benchmarks.figure import print_rows

        device = pick_device(self.device)
        set_threads(self.threads)
        result = publish(
            self,
            "encodings",
            what="Milliseconds and peak MiB above input and weights of an attention layer's "
            "forward and backward under each encoding, and time as a ratio to RoPE's (the first "
            "row) in the same turn",
            rows=self.measure(device, say),
            device=device,
            draw=draw,
        )
        print_rows(result, ("encoding", "both_ms", "both_ratio", "peak_mib", "error"))

    def measure(self, device: torch.device, report: Report) -> list[dict[str, Any]]:
        """The rows of the result. Raises ValueError on bad options or a wrong layer."""
        at_least(self, tokens=1, batch=1, hidden_size=1, heads=1, repeats=1, threads=0)
        wanted = words("encodings", self.encodings, list(PRESETS)) if self.encodings else PRESETS
        names = [_ANCHOR, *(name for name in wanted if name != _ANCHOR)]
        dtype = pick_dtype(self.dtype, device)
        layers = {name: self._layer(name).to(device=device, dtype=dtype) for name in names}
        errors = {name: self._check(name, layer) for name, layer in layers.items()}
        report("every layer agrees with itself in float64")
        if self.mode == "compiled":
            for layer in layers.values():
                layer.compile()
        x, ids = _inputs(layers[_ANCHOR], self.batch, self.tokens)
        jobs = [_job(layer, x, ids) for layer in layers.values()]
        times = time_interleaved(jobs, self.repeats)
        rows = []
        for name, job, taken in zip(names, jobs, times, strict=True):
            row = {
                "encoding": name,
                "tokens": self.tokens,
                "batch": self.batch,
                "hidden_size": self.hidden_size,
                "heads": self.heads,
                "mode": self.mode,
                "parameters": sum(leaf.numel() for leaf in job.leaves[1:]),
                **measured(job, taken, times[0], self.repeats, errors[name]),
            }
            rows.append(row)
            report(f"{name}: {show_time(row, 'both')}")
        return rows

    def _layer(self, name: str) -> Attention:
        torch.manual_seed(0)
        sizes = {"hidden_size": self.hidden_size, "num_attention_heads": self.heads}
        return Attention(AttentionConfig(**sizes, **PRESETS[name]))

    def _check(self, name: str, layer: Attention) -> float:
        """The error of output and input gradient against float64; ValueError if it is too large."""
        x, ids = _inputs(layer, 2, _CHECKED_TOKENS)
        got = _job(layer, x, ids)
        exact = _job(copy.deepcopy(layer).double(), x.detach().double().requires_grad_(), ids)
        error = relative_error(*(job._replace(leaves=job.leaves[:1]) for job in (got, exact)))
        hold(name, error, _ALLOWED[x.dtype], f"float64 ({x.dtype})")
        return error


def _inputs(layer: Attention, batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Input `[B, T, hidden_size]` that requires a gradient, and token ids; the seed is fixed."""
    weight = layer.q_proj.weight
    rng = torch.Generator(weight.device).manual_seed(0)
    shape, device = (batch, tokens), weight.device
    x = torch.randn(*shape, weight.shape[1], generator=rng, device=device).to(weight.dtype)
    return x.requires_grad_(), torch.randint(_VOCABULARY, shape, generator=rng, device=device)


def _job(layer: Attention, x: Tensor, ids: Tensor) -> Job:
    """Forward and backward of a layer, to its input and all its parameters."""
    grad_out = torch.ones_like(x) * torch.linspace(-1, 1, x.shape[2]).to(x)
    return Job(lambda: layer(x, token_ids=ids), [x, *layer.parameters()], grad_out)


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw a result of the benchmark as a PNG: bars of time and memory, 1 is RoPE's."""
    from path_attention.benchmarks.figure import Panel, draw_bars

    rows = result["rows"]
    phases = ("forward", "backward", "both")
    times = {(phase, r["encoding"]): r[f"{phase}_ratio"] for r in rows for phase in phases}
    least = rows[0]["peak_mib"]  # 0 where it is rounded away
    memory = {("memory", r["encoding"]): r["peak_mib"] / least if least else None for r in rows}
    row = rows[0]
    title = (
        f"{result['device']}: attention layer of width {row['hidden_size']}, {row['heads']} heads, "
        f"{row['batch']} × {row['tokens']:,} tokens, {row['dtype']}, {row['mode']}"
    )
    panels = [
        Panel("time", "1: RoPE's in the same turn", times),
        Panel("peak memory above input and weights", "1: RoPE's", memory),
    ]
    draw_bars(panels, title, path)
