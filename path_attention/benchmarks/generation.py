"""The command `path-attention benchmark generation`: tokens a second of whole models, and forks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from path_attention.benchmarks.comparison import (
    Report,
    at_least,
    numbers,
    pick_device,
    publish,
    say,
    words,
)
from path_attention.benchmarks.decode import KINDS, check, fill, inputs
from path_attention.benchmarks.kept import Keep, fresh, kept_for
from path_attention.benchmarks.measure import stopwatch
from path_attention.models import (
    PRESETS,
    PathAttentionConfig,
    PathAttentionForCausalLM,
    StaticPathCache,
    StepGraph,
)
from path_attention.models.cache import CACHE_NAME
from path_attention.nn import Chunk, LayerCache
from path_attention.nn.cache_units import memory, unit_length

_TOGETHER = 16  # steps of one measurement


@dataclass(frozen=True, kw_only=True)
class BenchmarkGeneration:
    """Tokens a second of a model in bfloat16 by CUDA graphs of a static cache, beside RoPE's.

    Random weights and a random past. The first preset is the anchor of ratios. Then the time and
    memory of forking a long prefix, with both sides sealing a unit. A cache that does not fit in
    memory is named and left out. Needs an NVIDIA GPU. Refused unless steps agree with the
    definition. Writes OUT.json and OUT.png and prints the table.
    """

    presets: str = "rope,path,path_fox"
    """With commas between."""
    batches: str = "1,8,64"
    """Rows, with commas between."""
    contexts: str = "8192,32768"
    """Tokens seen before, with commas between."""
    layers: int = 24
    """Of the model; with the sizes below 760M parameters."""
    width: int = 1536
    """Its hidden size."""
    heads: int = 24
    """Its heads."""
    prefix: int = 100_000
    """Tokens of the prefix that is forked; 0 for none."""
    repeats: int = 5
    """Turns that count, of 16 steps each."""
    device: str = "auto"
    """cuda, cuda:1 …"""
    out: Path = Path("results/generation")
    """Where the results go, without an ending."""

    def run(self) -> None:
        from path_attention.benchmarks.figure import print_rows

        device = pick_device(self.device)
        kept = kept_for(self, device, say)
        result = publish(
            self,
            "generation",
            what="Tokens a second of a model under CUDA graphs and as a ratio to the first "
            "preset's; for a fork, milliseconds of it and of sealing a unit on both sides, without "
            "and (steps_ms) with an ordinary step of each, and what both then hold beyond the "
            "prefix as a share of its memory",
            rows=self.measure(device, say, kept.rows),
            device=device,
            draw=_draw,
        )
        kept.delete()
        names = ("preset", "batch", "context", "ms", "tokens_per_second", "ratio", "memory_share")
        print_rows(result, names)

    def measure(
        self, device: torch.device, report: Report, keep: Keep = fresh
    ) -> list[dict[str, Any]]:
        """The rows of the result. ValueError on bad options or a wrong step."""
        at_least(self, layers=1, width=1, heads=1, prefix=0, repeats=1)
        if device.type != "cuda":
            raise ValueError(f"device: expected an NVIDIA GPU, got {device}")
        presets = words("presets", self.presets, list(PRESETS))
        for name in KINDS:
            check(name, device)
        report("steps agree with the definition")
        rows: list[dict[str, Any]] = []
        for preset in presets:
            model = cache(partial(self._model, preset, device))  # made where rows are missing
            for context in numbers("contexts", self.contexts):
                for batch in numbers("batches", self.batches):
                    rows += keep(
                        f"{preset}, {batch} rows of {context} tokens",
                        partial(self._tokens, model, preset, batch, context, report),
                    )
            del model
            torch.cuda.empty_cache()
        anchors = {(r["batch"], r["context"]): r["ms"] for r in rows if r["preset"] == presets[0]}
        for row in rows:
            anchor = anchors.get((row["batch"], row["context"]))
            row["ratio"] = None if anchor is None else float(f"{anchor / row['ms']:.4g}")
        if self.prefix:
            rows += keep(f"fork of {self.prefix} tokens", lambda: [fork_row(self.prefix, device)])
        return rows

    def _model(self, preset: str, device: torch.device) -> PathAttentionForCausalLM:
        config = PathAttentionConfig.from_preset(
            preset,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
        )
        with torch.device(device):
            model = PathAttentionForCausalLM(config)
        return model.to(dtype=torch.bfloat16).eval()  # pyright: ignore[reportCallIssue]

    def _tokens(
        self,
        model: Callable[[], PathAttentionForCausalLM],
        preset: str,
        batch: int,
        context: int,
        report: Report,
    ) -> list[dict[str, Any]]:
        """One row; none, and a line, where the cache does not fit."""
        made = model()
        try:
            times = time_steps(made, batch, context, self.repeats)
        except torch.OutOfMemoryError:
            times = None
        torch.cuda.empty_cache()
        if times is None:
            report(f"{preset}, {batch} rows of {context} tokens: does not fit in memory")
            return []
        taken = median(times)
        report(f"{preset}, {batch} rows of {context} tokens: {taken:.3g} ms a step")
        row = {"preset": preset, "batch": batch, "context": context, "dtype": "bfloat16"}
        row |= {"repeats": self.repeats, "ms": float(f"{taken:.4g}"), "ratio": None}
        row |= {
            "tokens_per_second": float(f"{1e3 * batch / taken:.4g}"),
            "memory_share": None,
            "steps_ms": None,
        }
        return [row]


def time_steps(
    model: PathAttentionForCausalLM, batch: int, context: int, repeats: int
) -> list[float]:
    """Milliseconds of a replayed step with a context of random keys and values, by turns."""
    size = model.config.hidden_size // model.config.num_attention_heads
    start = context + unit_length(size) // 2
    config: Any = model.config
    cache = StaticPathCache(config, start + (repeats + 2) * _TOGETHER, croppable=False)
    ids = torch.randint(100, (batch, 1), device=model.device)
    with torch.no_grad():
        model(ids, **{CACHE_NAME: cache})
        for layer in cache.layers:
            fill(layer.state, start)  # pyright: ignore[reportAttributeAccessIssue]
            layer.seen = start  # pyright: ignore[reportAttributeAccessIssue]
        graph = StepGraph(model, cache, ids)
        times = []
        for _ in range(repeats + 1):
            with stopwatch(model.device) as milliseconds:
                for _ in range(_TOGETHER):
                    graph.replay(ids)
            times.append(milliseconds() / _TOGETHER)
    return times[1:]


def fork_row(prefix: int, device: torch.device) -> dict[str, Any]:
    """Fork a prefix of PaTH in 32 heads of 64; the next token of each side seals a unit.

    What an ordinary step of each takes besides is measured by the tokens after that.
    """
    unit = unit_length(64)
    length = max(1, prefix // unit) * unit + unit + 63
    cache, shape = LayerCache(), (1, 32, 32, 64)
    for start in range(0, length, 4096):
        _extend(cache, min(4096, length - start), shape, device)
    held, times, steps, more = memory([cache]), [], [], 0
    for turn in range(6):
        with stopwatch(device) as milliseconds:
            one, other = cache.fork(), cache.fork()
            _extend(one, 1, shape, device)
            _extend(other, 1, shape, device)
        taken, more = milliseconds(), memory([cache, one, other]) - held
        _extend(one, 1, shape, device)  # moves the tail that is left
        _extend(other, 1, shape, device)
        with stopwatch(device) as milliseconds:
            _extend(one, 1, shape, device)
            _extend(other, 1, shape, device)
        if turn:
            times.append(taken)
            steps.append(milliseconds())
    row = {"preset": "path (fork, one layer)", "batch": 1, "context": length, "dtype": "bfloat16"}
    alone = median(a - b for a, b in zip(times, steps, strict=True))
    row |= {"repeats": 5, "ms": float(f"{alone:.4g}"), "ratio": None}
    row |= {"steps_ms": float(f"{median(times):.4g}")}
    return row | {"tokens_per_second": None, "memory_share": float(f"{more / held:.3g}")}


def _extend(
    cache: LayerCache, T: int, shape: tuple[int, int, int, int], device: torch.device
) -> None:
    q, k, v, w, beta, gate = inputs("path", T, shape, device)
    assert q is not None and k is not None and v is not None
    positions = torch.arange(T, device=device)[None]
    chunk = Chunk(positions, before=cache.before)
    with torch.no_grad():
        cache.attend(q, k, v, w, beta, gate, scale=shape[3] ** -0.5, chunk=chunk)


def _draw(result: Mapping[str, Any], path: Any) -> None:
    from path_attention.benchmarks.figure import Panel, draw_bars

    rows = [row for row in result["rows"] if row["tokens_per_second"] is not None]

    def place(row: Mapping[str, Any]) -> str:
        return f"{row['batch']} × {row['context']:,}"

    anchor = next((row["preset"] for row in rows if row["ratio"] == 1), "nothing that fits")
    bars = {(row["preset"], place(row)): row["ratio"] for row in rows}
    speeds = {(row["preset"], place(row)): row["tokens_per_second"] for row in rows}
    panels = [
        Panel("tokens a second", f"1: {anchor}", bars),
        Panel("tokens a second", "all rows together", speeds, logarithmic=True),
    ]
    draw_bars(panels, f"{result['device']}: generation, bfloat16, CUDA graphs", path)
