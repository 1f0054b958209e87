"""The command `path-attention benchmark operator`: time and peak memory beside plain attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from path_attention.benchmarks.comparison import (
    Report,
    at_least,
    beside_anchor,
    check,
    compare,
    numbers,
    pick_device,
    pick_dtype,
    publish,
    say,
    set_threads,
)
from path_attention.benchmarks.inputs import make_inputs
from path_attention.benchmarks.kept import Keep, fresh, kept_for

_CHECKED_TOKENS = 200


@dataclass(frozen=True, kw_only=True)
class BenchmarkOperator:
    """Time and peak memory of the attention operator beside plain attention and peers.

    Writes OUT.json and OUT.png and prints the table. Candidates take turns; ratios are to the
    anchor (plain attention without position encoding) in the same turn. Refused unless each of our
    implementations agrees with the definition on this machine first. A peer that fails there, or
    does not fit in memory, is left out and named.
    """

    tokens: str = "2048,8192"
    """Sequence lengths, with commas between."""
    memory_tokens: str = ""
    """Further lengths, at which peak memory alone is measured."""
    batch: int = 0
    """Sequences a batch, at every length; 0 is what `batch_tokens` makes of it."""
    batch_tokens: int = 0
    """Tokens a batch: as many sequences as fit, at least one. 0 is one sequence."""
    heads: int = 8
    """Query heads."""
    key_heads: int = 0
    """Key/value heads; 0 is as many as query heads."""
    size: int = 64
    """Head size of queries, keys and values."""
    encodings: str = "path,path_fox,fox"
    """Of path, path_fox, fox, nope, alibi, with commas between; the anchors are always nope."""
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
    out: Path = Path("results/operator")
    """Where the results go, without an ending."""

    def run(self) -> None:
        from path_attention.benchmarks.figure import draw, print_table

        device = pick_device(self.device)
        set_threads(self.threads)
        kept = kept_for(self, device, say)
        result = publish(
            self,
            "operator",
            what="Milliseconds and peak MiB above the inputs of attention's forward and backward, "
            "and time as a ratio to plain attention's (the first candidate) in the same turn",
            rows=self.measure(device, say, kept.rows),
            device=device,
            draw=draw,
        )
        kept.delete()
        print_table(result)

    def measure(
        self, device: torch.device, report: Report, keep: Keep = fresh
    ) -> list[dict[str, Any]]:
        """The rows of the result. Raises ValueError on bad options or a wrong operator."""
        tokens = numbers("tokens", self.tokens)
        memory_tokens = numbers("memory_tokens", self.memory_tokens) if self.memory_tokens else []
        chosen = beside_anchor(device, self.encodings, self.candidates)
        at_least(self, heads=1, size=1, repeats=1)
        at_least(self, key_heads=0, batch=0, batch_tokens=0, threads=0)
        dtype = pick_dtype(self.dtype, device)
        key_heads = self.key_heads or self.heads
        shape = (self.heads, key_heads, self.size, dtype, device)
        errors = check(chosen, make_inputs(2, _CHECKED_TOKENS, *shape), report)

        def at_length(T: int) -> Iterator[dict[str, Any]]:
            B = self.batch or max(1, self.batch_tokens // T)
            report(f"T {T}, batch {B}")
            return compare(
                errors,
                make_inputs(B, T, *shape),
                repeats=self.repeats,
                timed=T in tokens,
                columns={
                    "tokens": T,
                    "batch": B,
                    "heads": self.heads,
                    "key_heads": key_heads,
                    "size": self.size,
                },
                report=report,
            )

        rows = []
        for T in sorted({*tokens, *memory_tokens}):
            rows += keep(f"T {T}", partial(at_length, T))
        return rows
