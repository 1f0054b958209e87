"""The command `benchmark distributed`: steps over several processes beside one process's."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, cast

import torch

from path_attention.benchmarks.comparison import (
    Report,
    at_least,
    name_of,
    pick_dtype,
    publish,
    say,
    words,
)
from path_attention.benchmarks.measure import stopwatch
from path_attention.benchmarks.training import SIZES, NextTokenSteps, model_recipe
from path_attention.models import PRESETS
from path_attention.training.processes import Processes, share_context, start_processes
from path_attention.training.recipe import DataRecipe, ModelRecipe, Precision, Recipe

_START = "torchrun --standalone --nproc-per-node {} -m path_attention.cli"
_PARTS = ("equality", "context_parallel", "fsdp2")
_ALLOWED = 1e-5  # how far a float32 loss may be from one process's
_SMALL = ModelRecipe(
    hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512
)
_SMALL_VOCABULARY = 512
_TOLD = ("loss", "loss_difference", "gradient_error", "tokens_per_second", "step_ms", "peak_gib")


@dataclass(frozen=True, kw_only=True)
class BenchmarkDistributed:
    """Context parallelism and FSDP2 over the processes that torchrun started, beside one process.

    Equality: loss and gradients in float32 of one sequence of packed documents, which lies on all
    processes, by a small model. Speed: whole steps of the trainer, the median of those that count;
    context parallelism spreads one long document (and the model, by FSDP2, its activations
    checkpointed), FSDP2 the model alone: as many tokens a process as one process has. One process's
    steps are taken by all at once, each for itself, and the first one's count. What does not fit in
    one process's memory is named and left out. The first process writes OUT.json and OUT.png and
    prints the tables.
    """

    parts: str = "equality,context_parallel,fsdp2"
    """What to measure, with commas between."""
    presets: str = "path,rope"
    """Of the speeds, with commas between; the first one's come first."""
    equality_presets: str = "rope,fox,path,path_fox,rotation_learned,path_linear,delta_net"
    """Of equality, with commas between."""
    equality_tokens: int = 4096
    """Of the packed sequence."""
    context_tokens: int = 65536
    """Of the document that context parallelism spreads."""
    length: int = 4096
    """Tokens of a document under FSDP2."""
    pass_tokens: int = 16384
    """Tokens of one forward pass of a process under FSDP2."""
    passes: int = 4
    """Passes of a step under FSDP2."""
    layers: int = 24
    hidden_size: int = 1536
    heads: int = 24
    intermediate_size: int = 4096
    vocab_size: int = 32000
    fused: bool = False
    """RMSNorm, SwiGLU, and the head with its loss by liger-kernel, where speed is measured."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of matrix products; auto is bfloat16 on GPUs, float32 on the CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes GPUs where there are some, one a process."""
    repeats: int = 3
    """Steps that count, after one that warms up."""
    seconds: float = 0
    """What would begin later than so many seconds after the start is named and left out; 0: nothing
    is."""
    out: Path = Path("results/distributed")
    """Where the results go, without an ending."""

    def run(self) -> None:
        from path_attention.benchmarks.figure import print_rows

        with start_processes(self.device) as processes:
            rows = self.measure(processes, say if processes.first else lambda _: None)
            # a last exchange without tensors: a thread of gloo's that lets one go while Python ends
            # takes the process with it, and PyTorch's caches keep FSDP2's group, so its threads
            processes.wait()
        if not processes.first:
            return
        result = publish(
            self,
            "distributed",
            what="The trainer's steps over several processes beside one: difference of the float32 "
            "loss in nats, and of gradients over their largest entry; tokens a second, speed over "
            "one process's, GiB at the peak of the first process's memory",
            rows=rows,
            device=processes.device,
            draw=draw,
            program=_START.format(processes.count),
        )
        equal = [row for row in rows if row["part"] == "equality"]
        columns = ("part", "preset", "processes", "tokens")
        print_rows(result, (*columns, "loss", "loss_difference", "gradient_error"), equal)
        columns = (*columns, "tokens_per_second", "speed", "loss", "peak_gib")
        print_rows(result, columns, [row for row in rows if row not in equal])

    def measure(self, processes: Processes, report: Report) -> list[dict[str, Any]]:
        """The rows of the result. Raises ValueError on bad options, or if the processes together
        have too little memory."""
        began = time.monotonic()
        at_least(self, **dict.fromkeys(SIZES, 1), repeats=1, seconds=0, length=2)
        at_least(self, equality_tokens=16, context_tokens=2)
        parts = words("parts", self.parts, _PARTS)
        presets = words("presets", self.presets, list(PRESETS))
        equal = words("equality_presets", self.equality_presets, list(PRESETS))
        if self.pass_tokens % self.length:
            raise ValueError(
                f"length: expected a divisor of pass_tokens = {self.pass_tokens}, got {self.length}"
            )
        if processes.count < 2:
            raise ValueError(
                f"processes: expected at least 2, got {processes.count}; start with "
                f"`{_START.format(2)} benchmark distributed`"
            )
        alone = Processes(0, 1, processes.device)
        shared = share_context(processes, processes.count)
        todo = [("equality", p, (shared,)) for p in equal]
        for preset in presets:
            todo += [("context_parallel", preset, (alone, shared))]
            todo += [("fsdp2", preset, (alone, processes))]
        rows = []
        for part, preset, ways in todo:
            if part in parts:
                for over in ways:
                    late = 0 < self.seconds < time.monotonic() - began
                    row = self._row(part, preset, over, processes, late, report)
                    rows += [] if row is None else [row]
        return _with_speed(rows)

    def _row(
        self,
        part: str,
        preset: str,
        over: Processes,
        processes: Processes,
        late: bool,
        report: Report,
    ) -> dict[str, Any] | None:
        """The row of a part, None if it is left out: all processes agree on it."""
        name = f"{part}, {preset}, {over.count} process{'es' if over.count > 1 else ''}"
        if processes.sum(late)[0]:
            report(f"{name}: left out, {self.seconds:g} seconds are over")
            return None
        row = None
        try:
            if part == "equality":
                row = self._equality(preset, over)
            else:
                row = self._speed(part, preset, over)
        except torch.OutOfMemoryError as error:
            if over.count > 1:  # the others wait for this one
                raise ValueError(
                    f"{name}: expected to fit in memory: {str(error).splitlines()[0]}"
                ) from error
        gc.collect()
        if over.device.type == "cuda":
            torch.cuda.empty_cache()
        if processes.sum(row is None)[0] or row is None:
            report(f"{name}: does not fit in memory")
            return None
        report(f"{name}: " + ", ".join(f"{key} {row[key]}" for key in _TOLD if key in row))
        return {"part": part, "preset": preset, "processes": over.count, **row}

    def _equality(self, preset: str, shared: Processes) -> dict[str, Any]:
        """One packed sequence by this process alone and over all of them."""
        tokens = self.equality_tokens
        ends = [0, tokens * 17 // 100, tokens * 17 // 100 + 1, tokens * 63 // 100]
        ends += [tokens * 71 // 100, tokens]
        documents = [stop - start for start, stop in itertools.pairwise(ends)]
        found = []
        for over in (Processes(0, 1, shared.device), shared):
            recipe = Recipe(
                name="benchmark",
                model=replace(_SMALL, preset=preset),
                data=DataRecipe(context_length=tokens),
                steps=1,
                batch_tokens=tokens,
                precision="float32",
                device="cuda" if over.device.type == "cuda" else "cpu",
                parallel="auto" if over.count == 1 else "ddp",
                context_parallel=over.count,
            )
            steps = NextTokenSteps(recipe, _SMALL_VOCABULARY, over, documents)
            loss = steps.backward()
            named = steps.model.named_parameters()
            grads = {n.removeprefix("module."): p.grad for n, p in named if p.grad is not None}
            found.append((loss, grads))
        (one, exact), (other, grads) = found
        error = max(
            float((grads[name] - g).abs().max() / g.abs().max().clamp(min=1e-30))
            for name, g in exact.items()
        )
        return {
            "tokens": tokens,
            "documents": len(documents),
            "dtype": "float32",
            "loss": other,
            "loss_difference": float(f"{abs(other - one):.3g}"),
            "gradient_error": float(f"{error:.3g}"),
        }

    def _speed(self, part: str, preset: str, over: Processes) -> dict[str, Any]:
        """Steps over these processes."""
        recipe = self._recipe(part, preset, over)
        steps = NextTokenSteps(recipe, self.vocab_size, over)
        taken, losses = [], []
        for _ in range(1 + self.repeats):
            over.wait()
            with stopwatch(over.device) as read:
                losses.append(steps.step())
            taken.append(read())
        seconds = median(taken[1:]) / 1e3
        peak = steps.whole_mib
        return {
            "tokens": recipe.data.context_length,
            "pass_tokens": recipe.row_tokens,
            "passes": len(steps.rows),
            "parameters": steps.parameters,
            "dtype": name_of(steps.dtype),
            "fused": self.fused,
            "repeats": self.repeats,
            "step_ms": float(f"{1e3 * seconds:.5g}"),
            "tokens_per_second": round(recipe.batch_tokens / seconds, 1),
            "loss": losses[0],
            "peak_gib": None if peak is None else round(peak / 2**10, 2),
        }

    def _recipe(self, part: str, preset: str, over: Processes) -> Recipe:
        split = part == "context_parallel"
        tokens = self.context_tokens if split else self.pass_tokens
        return Recipe(
            name="benchmark",
            model=model_recipe(self, preset),
            data=DataRecipe(context_length=tokens if split else self.length),
            steps=1,
            batch_tokens=tokens if split else tokens * self.passes * over.count,
            micro_batch_tokens=tokens,
            precision=cast(Precision, name_of(pick_dtype(self.dtype, over.device))),
            parallel="auto" if over.count == 1 else "fsdp",
            context_parallel=over.context,
            initialisation="meta",
            activation_checkpointing=split,
            fused=self.fused,
            device="cuda" if over.device.type == "cuda" else "cpu",
        )


def _with_speed(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows, with tokens a second over those of one process, where that was measured."""
    key = "tokens_per_second"
    alone = {(r["part"], r["preset"]): r[key] for r in rows if r["processes"] == 1}
    made = []
    for row in rows:
        if key in row:
            one = alone.get((row["part"], row["preset"]))
            row = {**row, "speed": None if one is None else round(row[key] / one, 4)}
        made.append(dict(row))
    return made


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw a result of the benchmark as a PNG: bars of speed and of differences in float32."""
    from path_attention.benchmarks.figure import Panel, draw_bars

    rows = result["rows"]
    speed = {
        (row["preset"], f"{row['part']}, {row['tokens']:,}"): row["speed"]
        for row in rows
        if row["processes"] > 1 and row["part"] != "equality"
    }
    apart = {
        (name, row["preset"]): row[column] / _ALLOWED
        for row in rows
        if row["part"] == "equality"
        for name, column in (("loss", "loss_difference"), ("gradients", "gradient_error"))
    }
    panels = [
        Panel("tokens a second", "1: one process", speed),
        Panel(f"float32, beside one process, over {_ALLOWED:g}", "difference", apart),
    ]
    count = max(row["processes"] for row in rows)
    title = f"{result['device']}: {count} processes beside one"
    draw_bars([panel for panel in panels if panel.bars], title, path)
