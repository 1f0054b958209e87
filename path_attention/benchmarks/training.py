"""The command `path-attention benchmark training`: whole steps of the trainer, beside RoPE's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from path_attention.benchmarks.comparison import (
    Report,
    at_least,
    name_of,
    numbers,
    pick_device,
    pick_dtype,
    publish,
    say,
    set_threads,
    words,
)
from path_attention.benchmarks.kept import Keep, fresh, kept_for
from path_attention.benchmarks.measure import matrix_rate, stopwatch
from path_attention.models import PRESETS, PathAttentionConfig
from path_attention.ops.context_split import ContextSplit
from path_attention.ops.packing import Packing
from path_attention.training.flops import ModelFlops, peak_flops
from path_attention.training.loop import build_optimizer
from path_attention.training.model import build_model
from path_attention.training.objective import Objective
from path_attention.training.processes import Processes, synchronise_gradients
from path_attention.training.recipe import DataRecipe, ModelRecipe, Recipe
from path_attention.training.rows import IGNORED, Row

_ANCHOR = "rope"
_WAYS = ("eager", "compiled", "fused", "checkpointed")
SIZES = ("layers", "hidden_size", "heads", "intermediate_size", "vocab_size", "passes")
_WARM_UP = 2  # steps: the first compiles
_SDPA = {
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
}


@dataclass(frozen=True, kw_only=True)
class BenchmarkTraining:
    """Tokens a second of whole training steps under each encoding, beside RoPE's.

    A step is the trainer's own, on one device: forward and backward of each pass, clipping, AdamW.
    Passes hold whole documents of one length, of random tokens; RoPE attends by PyTorch's kernels.
    Models take turns, and ratios are to RoPE's step in the same turn. The ceiling is a large matrix
    product's rate on the same device. Writes OUT.json and OUT.png and prints the table.
    """

    encodings: str = "path,path_fox"
    """Presets with commas between. RoPE is measured always."""
    lengths: str = "4096,16384"
    """Tokens of a document, with commas between."""
    ways: str = "eager,compiled,checkpointed"
    """Words of eager, compiled, fused (liger-kernel), checkpointed, with commas between, or joined
    by +, as compiled+checkpointed."""
    pass_tokens: int = 16384
    """Tokens of one forward pass."""
    passes: int = 4
    """Passes of a step."""
    layers: int = 24
    hidden_size: int = 1536
    heads: int = 24
    intermediate_size: int = 4096
    vocab_size: int = 32000
    sdpa: Literal["cudnn", "flash", "auto"] = "cudnn"
    """RoPE's attention on a GPU: cuDNN's or FlashAttention, or PyTorch's own choice."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of matrix products; auto is bfloat16 on a GPU, float32 on the CPU."""
    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto takes a GPU where there is one."""
    repeats: int = 5
    """Turns that count."""
    threads: int = 0
    """Threads on the CPU; 0 is torch's own choice."""
    out: Path = Path("results/training")
    """Where the results go, without an ending."""

    def run(self) -> None:
        from path_attention.benchmarks.figure import print_rows

        device = pick_device(self.device)
        set_threads(self.threads)
        kept = kept_for(self, device, say)
        result = publish(
            self,
            "training",
            what="Tokens a second of the trainer's steps under each encoding; speed is over RoPE's "
            "in the same turn; mfu is model FLOPs over the device's stated peak, of_ceiling over "
            "a large matrix product's rate measured beside; peak MiB above weights and moments",
            rows=self.measure(device, say, kept.rows),
            device=device,
            draw=draw,
        )
        kept.delete()
        columns = ("encoding", "length", "way", "tokens_per_second", "speed", "mfu", "of_ceiling")
        print_rows(result, (*columns, "peak_mib"))

    def measure(
        self, device: torch.device, report: Report, keep: Keep = fresh
    ) -> list[dict[str, Any]]:
        """The rows of the result. Raises ValueError on bad options, or if RoPE does not fit."""
        at_least(self, repeats=1, threads=0, **dict.fromkeys(SIZES, 1))
        wanted = words("encodings", self.encodings, list(PRESETS))
        names = [_ANCHOR, *(name for name in dict.fromkeys(wanted) if name != _ANCHOR)]
        lengths = numbers("lengths", self.lengths)
        for length in lengths:
            if length < 2 or self.pass_tokens % length:
                raise ValueError(
                    f"lengths: expected divisors of pass_tokens = {self.pass_tokens} from 2 on, "
                    f"got {length}"
                )
        ways = self.ways.split(",")
        for way in ways:
            words("ways", way.replace("+", ","), _WAYS)
        dtype = pick_dtype(self.dtype, device)
        ceiling = matrix_rate(device, dtype)
        report(f"a large matrix product: {ceiling / 1e12:,.1f} TFLOP/s")
        rows = []
        for way in ways:
            for length in lengths:
                measure = partial(self._rows, way, length, names, dtype, device, ceiling, report)
                rows += keep(f"{way}, {length} tokens", measure)
        return rows

    def _rows(
        self,
        way: str,
        length: int,
        names: Sequence[str],
        dtype: torch.dtype,
        device: torch.device,
        ceiling: float,
        report: Report,
    ) -> list[dict[str, Any]]:
        torch.compiler.reset()
        with _attention(self.sdpa):
            trained = self._warm(way, length, names, dtype, device, report)
            times = _take_turns(list(trained.values()), self.repeats)
        rows = []
        for (name, model), taken in zip(trained.items(), times, strict=True):
            seconds = median(taken) / 1e3
            rate = model.flops / seconds
            peak = peak_flops(device, dtype)
            row = {
                "encoding": name,
                "length": length,
                "way": way,
                "pass_tokens": self.pass_tokens,
                "passes": self.passes,
                "parameters": model.parameters,
                "dtype": name_of(dtype),
                "repeats": self.repeats,
                "step_ms": float(f"{median(taken):.5g}"),
                "tokens_per_second": round(self.pass_tokens * self.passes / seconds, 1),
                "speed": round(median(a / b for a, b in zip(times[0], taken, strict=True)), 4),
                "mfu": None if peak is None else round(rate / peak, 4),
                "of_ceiling": round(rate / ceiling, 4),
                "ceiling_tflops": round(ceiling / 1e12, 3),
                "peak_mib": model.peak_mib,
            }
            rows.append(row)
            report(
                f"{way}, {length} tokens, {name}: {row['tokens_per_second']:,.0f} tokens/s, "
                f"{row['speed']:.3f} of RoPE's, {row['of_ceiling']:.1%} of the ceiling"
            )
        return rows

    def _warm(
        self,
        way: str,
        length: int,
        names: Sequence[str],
        dtype: torch.dtype,
        device: torch.device,
        report: Report,
    ) -> dict[str, NextTokenSteps]:
        """The models that fit, after their first steps."""
        trained = {}
        for name in names:
            try:
                recipe = self._recipe(name, way, length, dtype, device)
                model = NextTokenSteps(recipe, self.vocab_size, Processes(0, 1, device))
                for _ in range(_WARM_UP):
                    model.step()
            except torch.OutOfMemoryError as error:
                if name == _ANCHOR:
                    raise ValueError(
                        f"pass_tokens: expected fewer than {self.pass_tokens}, with which RoPE "
                        f"does not fit ({way}): {str(error).splitlines()[0]}"
                    ) from error
                report(f"{way}, {length} tokens, {name}: does not fit in memory")
                torch.cuda.empty_cache()
            else:
                trained[name] = model
        return trained

    def _recipe(
        self, name: str, way: str, length: int, dtype: torch.dtype, device: torch.device
    ) -> Recipe:
        parts = way.split("+")
        return Recipe(
            name="benchmark",
            model=model_recipe(self, name),
            data=DataRecipe(context_length=length),
            steps=1,
            batch_tokens=self.pass_tokens * self.passes,
            micro_batch_tokens=self.pass_tokens,
            precision="bfloat16" if dtype == torch.bfloat16 else "float32",
            initialisation="meta",
            activation_checkpointing="checkpointed" in parts,
            compile="inductor" if "compiled" in parts else None,
            fused="fused" in parts,
            device="cuda" if device.type == "cuda" else "cpu",
        )


def model_recipe(options: Any, preset: str) -> ModelRecipe:
    """The model of a benchmark's options: four of its sizes."""
    return ModelRecipe(
        preset=preset,
        hidden_size=options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        intermediate_size=options.intermediate_size,
    )


class TrainingSteps:
    """The trainer's step on rows that stay the same.

    Args:
        recipe: of the run.
        model: ready to train, as `build_model` returns it.
        flops: what the objective computes.
        objective: prepared with the model.
        rows: of this process, as `random_rows` makes them.
        processes: that the step is taken over.

    Attributes:
        flops: of a step, of this process's rows.
        peak_mib: memory of the latest step above what was there before; None on a CPU.
        whole_mib: all memory at that peak.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        flops: ModelFlops,
        objective: Objective,
        rows: Sequence[Row],
        processes: Processes,
    ) -> None:
        self.recipe, self.model, self.objective, self.rows = recipe, model, objective, rows
        self.processes, self.device = processes, processes.device
        self.dtype = torch.bfloat16 if recipe.precision == "bfloat16" else torch.float32
        self.model.train()
        self.optimizer = build_optimizer(self.model, recipe.optimizer)
        self.flops = sum(flops.of(row.packing.lengths) for row in self.rows)
        self.peak_mib: float | None = None
        self.whole_mib: float | None = None

    def backward(self) -> float:
        """Forward and backward of every pass, as `training.loop` takes them; the mean loss."""
        processes = self.processes
        (targets,) = processes.sum(sum(row.targets for row in self.rows))
        divisor = targets / processes.context / processes.count
        losses = []
        for n, row in enumerate(self.rows):
            synchronise_gradients(self.model, n == len(self.rows) - 1)
            with torch.autocast(
                self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16
            ):
                loss = self.objective.loss(self.model, row, divisor, self.device)
            loss.backward()
            losses.append(loss.detach())
        (loss,) = processes.sum(torch.stack(losses).sum())  # the loop looks at it, too
        return loss / processes.count

    def step(self) -> float:
        """`backward`, clipping, AdamW; the mean loss before it."""
        before, cuda = 0, self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
        loss = self.backward()
        norm = nn.utils.clip_grad_norm_(
            self.model.parameters(), self.recipe.optimizer.clip or math.inf
        )
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if not math.isfinite(loss + float(norm)):
            raise FloatingPointError(f"{self.recipe.model.preset}: the loss is {loss}")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if cuda:
            peak = torch.cuda.max_memory_allocated(self.device)
            self.whole_mib = round(peak / 2**20, 1)
            self.peak_mib = round((peak - before) / 2**20, 1)
        return loss


class NextTokenSteps(TrainingSteps):
    """A model of a recipe with next-token cross-entropy on random tokens.

    Args:
        recipe: of the run.
        vocabulary: how many tokens there are.
        processes: that the model is spread over.
        lengths: documents of each row, if they are not all of the recipe's length.
    """

    def __init__(
        self,
        recipe: Recipe,
        vocabulary: int,
        processes: Processes,
        lengths: Sequence[int] | None = None,
    ) -> None:
        dtype = torch.bfloat16 if recipe.precision == "bfloat16" else torch.float32
        config = PathAttentionConfig.from_preset(
            recipe.model.preset,
            vocab_size=vocabulary,
            max_position_embeddings=recipe.data.context_length,
            **recipe.model.overrides(),
        )
        model, flops, self.parameters = build_model(recipe, config, dtype, processes)
        rows = random_rows(recipe, vocabulary, processes, lengths)
        super().__init__(recipe, model, flops, Objective(), rows, processes)


def random_rows(
    recipe: Recipe,
    vocabulary: int,
    processes: Processes,
    lengths: Sequence[int] | None = None,
) -> list[Row]:
    """This process's rows of a step: whole documents of random tokens, of the recipe's length or
    of these lengths."""
    length, tokens = recipe.data.context_length, recipe.row_tokens
    packing = Packing.from_lengths(lengths or [length] * (tokens // length))
    borders = packing if len(packing.lengths) > 1 else None
    group = processes.context_group
    split = None if group is None else ContextSplit.of(tokens, group, borders)
    rows, passes = [], recipe.passes(processes.count)
    for n in range(passes):
        rng = torch.Generator().manual_seed(processes.data_rank * passes + n)
        input_ids = torch.randint(vocabulary, (1, tokens), generator=rng)
        labels = input_ids.clone()
        labels[0, packing.cu_seqlens[:-1].long()] = IGNORED
        rows.append(Row(input_ids, labels, packing, tuple(range(len(packing.lengths))), split))
    return rows


def _take_turns(models: Sequence[NextTokenSteps], repeats: int) -> list[list[float]]:
    """Milliseconds of a step of each model in each turn."""
    times: list[list[float]] = [[] for _ in models]
    for _ in range(repeats):
        for model, taken in zip(models, times, strict=True):
            with stopwatch(model.device) as read:
                model.step()
            taken.append(read())
    return times


@contextmanager
def _attention(kind: str) -> Iterator[None]:
    """PyTorch's attention by these kernels, the first that can."""
    if kind == "auto":
        yield
    else:
        with sdpa_kernel(_SDPA[kind], set_priority=True):
            yield


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw a result of the benchmark as a PNG: bars of speed over RoPE's and of utilisation."""
    from path_attention.benchmarks.figure import Panel, draw_bars

    rows = result["rows"]
    speed = {(r["encoding"], f"{r['length']:,}, {r['way']}"): r["speed"] for r in rows}
    used = {(r["encoding"], f"{r['length']:,}, {r['way']}"): r["of_ceiling"] for r in rows}
    row = rows[0]
    title = (
        f"{result['device']}: training steps of {row['passes']} × {row['pass_tokens']:,} tokens, "
        f"{row['parameters'] / 1e6:,.0f}M parameters, {row['dtype']}"
    )
    panels = [
        Panel("tokens a second", "1: RoPE's in the same turn", speed),
        Panel("model FLOPs over a large product's rate", "share of the ceiling", used),
    ]
    draw_bars(panels, title, path)
