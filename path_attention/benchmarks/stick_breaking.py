"""The command `path-attention benchmark stick_breaking`: its time beside flash attention's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from path_attention.benchmarks.comparison import (
    ALLOWED,
    Report,
    at_least,
    hold,
    measured,
    numbers,
    pick_device,
    pick_dtype,
    publish,
    say,
    set_threads,
)
from path_attention.benchmarks.kept import Keep, fresh, kept_for
from path_attention.benchmarks.measure import Job, relative_error, show_time, time_interleaved
from path_attention.ops.stick_breaking import stick_breaking_attention

_CHECKED_TOKENS = 300


@dataclass(frozen=True, kw_only=True)
class BenchmarkStickBreaking:
    """Time and peak memory of stick-breaking attention beside flash attention.

    Logits of mean 0 use a stick up within a few tiles, and what lies behind is skipped; at a mean
    of −8 it lasts for thousands of keys. Writes OUT.json and OUT.png and prints the table.
    Candidates take turns; ratios are to flash attention in the same turn. Refused unless the
    operator agrees with its definition on this machine first.
    """

    tokens: str = "4096,16384"
    """Sequence lengths, with commas between."""
    batch_tokens: int = 16384
    """Tokens a batch: as many sequences as fit, at least one."""
    mean_logits: str = "0,-8"
    """Means of the logits, with commas between."""
    heads: int = 32
    """Heads of queries, keys and values."""
    size: int = 64
    """Their size."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of q, k, v; auto is bfloat16 on a GPU, float32 on the CPU."""
    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto takes a GPU where there is one."""
    repeats: int = 5
    """Turns that count."""
    threads: int = 0
    """Threads on the CPU; 0 is torch's own choice."""
    out: Path = Path("results/stick_breaking")
    """Where the results go, without an ending."""

    def run(self) -> None:
        from path_attention.benchmarks.figure import print_rows

        device = pick_device(self.device)
        set_threads(self.threads)
        kept = kept_for(self, device, say)
        result = publish(
            self,
            "stick_breaking",
            what="Milliseconds and peak MiB above the inputs of stick-breaking attention's forward "
            "and backward, and time as a ratio to flash attention's in the same turn",
            rows=self.measure(device, say, kept.rows),
            device=device,
            draw=draw,
        )
        kept.delete()
        columns = ("candidate", "tokens", "mean_logit", "both_ms", "both_ratio", "peak_mib")
        print_rows(result, columns)

    def measure(
        self, device: torch.device, report: Report, keep: Keep = fresh
    ) -> list[dict[str, Any]]:
        """The rows of the result. Raises ValueError on bad options or a wrong operator."""
        at_least(self, batch_tokens=1, heads=1, size=2, repeats=1, threads=0)
        dtype = pick_dtype(self.dtype, device)
        means = _means(self.mean_logits)
        errors = {mean: self._check(mean, dtype, device) for mean in means}
        report("the operator agrees with its definition")
        rows = []
        for T in numbers("tokens", self.tokens):
            rows += keep(f"T {T}", partial(self._rows, T, errors, dtype, device, report))
        return rows

    def _rows(
        self,
        T: int,
        errors: Mapping[float, float],
        dtype: torch.dtype,
        device: torch.device,
        report: Report,
    ) -> Iterator[dict[str, Any]]:
        """Of one length: flash attention's row, and one for each mean with its error."""
        means, B = list(errors), max(1, self.batch_tokens // T)
        inputs = {mean: self._inputs(B, T, mean, dtype, device) for mean in means}
        jobs = [_plain(inputs[means[0]]), *(_ours(x) for x in inputs.values())]
        times = time_interleaved(jobs, self.repeats)
        names = [("flash", means[0], None)]
        names += [("stick_breaking", mean, errors[mean]) for mean in means]
        for (name, mean, error), job, taken in zip(names, jobs, times, strict=True):
            row = {
                "candidate": name,
                "tokens": T,
                "batch": B,
                "heads": self.heads,
                "size": self.size,
                "mean_logit": mean,
                **measured(job, taken, times[0], self.repeats, error),
            }
            report(f"{name} T {T}, mean logit {mean:g}: {show_time(row, 'both')}")
            yield row

    def _check(self, mean: float, dtype: torch.dtype, device: torch.device) -> float:
        x = self._inputs(1, _CHECKED_TOKENS, mean, dtype, device)
        wide = [y.detach().double().requires_grad_() for y in x]
        error = relative_error(_ours(x), _ours(wide, "definition"))
        against = f"the definition ({dtype}, mean logit {mean:g})"
        hold("stick_breaking", error, ALLOWED[dtype], against)
        return error

    def _inputs(
        self, B: int, T: int, mean: float, dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        """q, k, v `[B, T, heads, size]`, leaves; one coordinate of q and k makes the mean."""
        rng = torch.Generator(device).manual_seed(0)
        shape = (B, T, self.heads, self.size)
        q, k, v = (torch.randn(*shape, generator=rng, device=device).to(dtype) for _ in range(3))
        q[..., 0], k[..., 0] = 1, mean * self.size**0.5
        return [x.requires_grad_() for x in (q, k, v)]


def _means(text: str) -> list[float]:
    """Different numbers with commas between."""
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or len(set(found)) < len(found) or not all(map(math.isfinite, found)):
        raise ValueError(
            f"mean_logits: expected different numbers with commas between, got {text!r}"
        )
    return found


def _ours(x: list[Tensor], implementation: str | None = None) -> Job:
    grad_out = torch.ones_like(x[2]) * torch.linspace(-1, 1, x[2].shape[3]).to(x[2])
    return Job(
        lambda: stick_breaking_attention(*x, implementation=implementation)[0], x, grad_out.detach()
    )


def _plain(x: list[Tensor]) -> Job:
    """Flash attention, causal, on the same tensors."""

    def call() -> Tensor:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            q, k, v = (y.transpose(1, 2) for y in x)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2)

    return Job(call, x, _ours(x).grad_out)


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw a result of the benchmark as a PNG: bars of time and memory, 1 is flash attention's."""
    from path_attention.benchmarks.figure import Panel, draw_bars

    rows = result["rows"]
    flash = {row["tokens"]: row for row in rows if row["candidate"] == "flash"}
    time, memory = {}, {}
    for row in rows:
        if row["candidate"] != "flash":
            name, T = f"mean logit {row['mean_logit']:g}", row["tokens"]
            time[name, f"{T:,} tokens"] = row["both_ratio"]
            least = flash[T]["peak_mib"]  # 0 where it is rounded away
            memory[name, f"{T:,} tokens"] = row["peak_mib"] / least if least else None
    title = f"{result['device']}: stick-breaking attention, {rows[0]['heads']} heads of "
    title += f"{rows[0]['size']}, {rows[0]['dtype']}"
    panels = [
        Panel("forward and backward", "1: flash attention's in the same turn", time),
        Panel("peak memory above the inputs", "1: flash attention's", memory),
    ]
    draw_bars(panels, title, path)
