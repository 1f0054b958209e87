"""The command `path-attention benchmark directions`: their memory traffic beside a plain copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from path_attention.benchmarks.comparison import (
    at_least,
    name_of,
    pick_device,
    pick_dtype,
    publish,
    words,
)
from path_attention.benchmarks.measure import stopwatch
from path_attention.ops.directions import householder_directions

_CALLS = 10


@dataclass(frozen=True, kw_only=True)
class BenchmarkDirections:
    """Bandwidth of the Householder directions, forward and backward, as a part of a copy's.

    Writes OUT.json and OUT.png and prints the table, with the speed-up over PyTorch's operations.
    """

    tokens: int = 16384
    """Length of the one sequence; with the default sizes nothing stays in an L2 cache."""
    heads: int = 32
    """Key/value heads."""
    size: int = 64
    """Head size."""
    width: int = 3
    """Of the convolution."""
    implementations: str = ""
    """Of torch, triton, with commas between; empty for those that run here."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the projected inputs; auto is bfloat16 on a GPU, float32 on the CPU."""
    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto takes a GPU where there is one."""
    repeats: int = 20
    """Turns that count."""
    out: Path = Path("results/directions")
    """Where the results go, without an ending."""

    def run(self) -> None:
        from path_attention.benchmarks.figure import print_rows

        device = pick_device(self.device)
        result = publish(
            self,
            "directions",
            what="Milliseconds of the Householder directions' passes, the bytes that they must "
            "move over that time, this as a part of a copy's (of_copy), and PyTorch's time over "
            "theirs (speedup)",
            rows=self.measure(device),
            device=device,
            draw=_draw,
        )
        names = ("implementation", "pass", "ms", "gb_per_s", "of_copy", "speedup")
        print_rows(result, names)

    def measure(self, device: torch.device) -> list[dict[str, Any]]:
        """A row for the copy, and two for each implementation. ValueError on bad options.

        The forward reads x and writes w; the backward reads x and dw and writes dx; the taps are
        not counted. The copy reads and writes as many bytes as the forward. All take turns; the
        first turn warms up. The backward's time is that of both less the forward's. On a GPU ten
        calls are one CUDA graph, so that launches cost nothing.
        """
        at_least(self, tokens=1, heads=1, size=1, width=1, repeats=1)
        here = ("torch", "triton") if device.type == "cuda" else ("torch",)
        chosen = words("implementations", self.implementations or ",".join(here), here)
        chosen = list(dict.fromkeys(["torch", *chosen]))  # what the speed-up is over
        dtype = pick_dtype(self.dtype, device)
        rng = torch.Generator(device).manual_seed(0)
        channels = self.heads * self.size
        x = torch.randn(1, self.tokens, channels, generator=rng, device=device).to(dtype)
        weight = torch.randn(channels, self.width, generator=rng, device=device)
        grad_out = torch.randn(x.shape, generator=rng, device=device)
        grad_out = grad_out.unflatten(2, (self.heads, self.size))
        traffic = {
            "copy": x.nbytes + grad_out.nbytes,
            "forward": x.nbytes + grad_out.nbytes,
            "backward": 2 * x.nbytes + grad_out.nbytes,
        }
        source = torch.zeros(traffic["copy"] // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        leaves = [x.requires_grad_(), weight.requires_grad_()]

        calls = {("", "copy"): _repeated(lambda: target.copy_(source), device)}
        for name in chosen:

            def forward(name: str = name) -> torch.Tensor:
                return householder_directions(x, weight, self.heads, implementation=name)

            def both(forward: Callable[[], torch.Tensor] = forward) -> object:
                return torch.autograd.grad(forward(), leaves, grad_out)

            calls[name, "forward"] = _repeated(forward, device)
            calls[name, "both"] = _repeated(both, device)
        turns = _turns(calls, self.repeats, device)
        ms = {("", "copy"): median(turns["", "copy"])}
        for name in chosen:
            forward_ms, both_ms = turns[name, "forward"], turns[name, "both"]
            ms[name, "forward"] = median(forward_ms)
            ms[name, "backward"] = median(b - f for b, f in zip(both_ms, forward_ms, strict=True))
        copy = traffic["copy"] / ms["", "copy"]
        rows = []
        for (name, phase), taken in ms.items():
            slower = ms.get(("torch", phase))
            rows.append(
                {
                    "implementation": name or None,
                    "pass": phase,
                    "tokens": self.tokens,
                    "heads": self.heads,
                    "size": self.size,
                    "width": self.width,
                    "dtype": name_of(dtype),
                    "repeats": self.repeats,
                    "ms": float(f"{taken:.4g}"),
                    "gb_per_s": float(f"{traffic[phase] / taken / 1e6:.4g}"),
                    "of_copy": float(f"{traffic[phase] / taken / copy:.3g}"),
                    "speedup": None if slower is None else float(f"{slower / taken:.3g}"),
                }
            )
        return rows


def _turns(
    calls: Mapping[Any, Callable[[], None]], repeats: int, device: torch.device
) -> dict[Any, list[float]]:
    """Milliseconds of one call in each turn that counts."""
    turns: dict[Any, list[float]] = {key: [] for key in calls}
    for turn in range(repeats + 1):
        for key, call in calls.items():
            with stopwatch(device) as milliseconds:
                call()
            if turn:
                turns[key].append(milliseconds() / _CALLS)
    return turns


def _repeated(call: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """The call ten times over; on a GPU as one CUDA graph."""

    def repeated() -> None:
        for _ in range(_CALLS):
            call()

    if device.type != "cuda":
        return repeated
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        repeated()
    return graph.replay


def _draw(result: Mapping[str, Any], path: Path) -> None:
    """Each pass's part of the copy's bandwidth."""
    from path_attention.benchmarks.figure import Panel, draw_bars

    rows = [r for r in result["rows"] if r["implementation"]]
    bars = {(r["implementation"], r["pass"]): r["of_copy"] for r in rows}
    first = rows[0]
    title = f"{first['tokens']:,} tokens, {first['heads']} heads of {first['size']}"
    panel = Panel(title, "bandwidth (1: a copy's)", bars)
    draw_bars([panel], f"Householder directions, {result['device']}", path)
