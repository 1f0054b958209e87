"""`path-attention benchmark conversion`: does a conversion fit, and how many tokens a second."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal, cast

import torch
from torch import nn

from path_attention.benchmarks.comparison import (
    Report,
    at_least,
    name_of,
    pick_device,
    pick_dtype,
    publish,
    say,
    set_threads,
    words,
)
from path_attention.benchmarks.kept import Keep, fresh, kept_for
from path_attention.benchmarks.measure import stopwatch
from path_attention.benchmarks.training import TrainingSteps, random_rows
from path_attention.conversion.memory import Estimate, estimate_memory
from path_attention.conversion.objectives import MatchAttention, MatchLogits, NextToken, Trainable
from path_attention.conversion.pipeline import stage_recipe
from path_attention.conversion.recipe import ConversionRecipe, StageRecipe
from path_attention.conversion.teacher import Teacher, is_encoding, student_config
from path_attention.models import PathAttentionConfig, PathAttentionForCausalLM
from path_attention.training.flops import peak_flops
from path_attention.training.model import build_model, initialise
from path_attention.training.processes import Processes

# RoPE models as published; weights are drawn, since time and memory do not hang on them
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {  # no model of anybody's: to try the command
        "vocab_size": 300,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "tie_word_embeddings": True,
    },
    "135m": {  # SmolLM2-135M
        "vocab_size": 49152,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "rope_theta": 100_000.0,
        "tie_word_embeddings": True,
    },
    "1.7b": {  # SmolLM2-1.7B
        "vocab_size": 49152,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 8192,
        "rope_theta": 130_000.0,
        "tie_word_embeddings": True,
    },
    "7b": {  # Qwen2.5-7B
        "vocab_size": 152064,
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
        "qkv_bias": True,
    },
}
_STAGES = ("attention", "logits", "pretraining")
_WAYS = ("eager", "checkpointed", "compiled")
_TRAINED = ("all", "attention", "encoding", "lora")


@dataclass(frozen=True, kw_only=True)
class BenchmarkConversion:
    """Tokens a second and peak memory of each stage of a conversion on random weights, beside the
    memory that `convert` tells before it starts.

    A step is the trainer's own, on one device. Writes OUT.json and OUT.png and prints the table. A
    stage that does not fit has a row without times.
    """

    shapes: str = "1.7b,7b"
    """Words of tiny, 135m (SmolLM2), 1.7b (SmolLM2), 7b (Qwen2.5), with commas between."""
    stages: str = "attention,logits,pretraining"
    """Of the conversion, with commas between."""
    trainable: str = "all"
    """Of the last two stages: words of all, attention, encoding, lora, with commas between. The
    first trains its attention layers."""
    to: Literal["path", "path_fox", "fox"] = "path"
    """The student's encoding."""
    ways: str = "checkpointed"
    """Words of eager, checkpointed, compiled, with commas between, or joined by +."""
    context: int = 0
    """Tokens of a document; 0 takes what was published: 512, 2048 and 4096 for the stages."""
    pass_tokens: int = 8192
    """Tokens of one forward pass."""
    passes: int = 2
    """Passes of a step."""
    steps: int = 3
    """That count, after two that warm up."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of matrix products and the teacher; auto is bfloat16 on a GPU, float32 on the CPU."""
    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto takes a GPU where there is one."""
    threads: int = 0
    """Threads on the CPU; 0 is torch's own choice."""
    out: Path = Path("results/conversion_speed")
    """Where the results go, without an ending."""

    def run(self) -> None:
        from path_attention.benchmarks.figure import print_rows

        device = pick_device(self.device)
        set_threads(self.threads)
        kept = kept_for(self, device, say)
        result = publish(
            self,
            "conversion",
            what="Steps of a conversion's stages on random weights: tokens a second, peak memory "
            "of the device and the estimate that is told before a conversion starts, in GiB; mfu "
            "is the FLOPs that are done over the device's stated peak",
            rows=self.measure(device, say, kept.rows),
            device=device,
            draw=draw,
        )
        kept.delete()
        columns = ("shape", "stage", "trainable", "way", "tokens_per_second", "mfu")
        print_rows(result, (*columns, "peak_gib", "estimate_gib"))

    def measure(
        self, device: torch.device, report: Report, keep: Keep = fresh
    ) -> list[dict[str, Any]]:
        """The rows of the result. Raises ValueError on bad options."""
        at_least(self, steps=1, passes=1, context=0, pass_tokens=2, threads=0)
        shapes = words("shapes", self.shapes, list(SHAPES))
        stages = words("stages", self.stages, _STAGES)
        trained = words("trainable", self.trainable, _TRAINED)
        ways = self.ways.split(",")
        for way in ways:
            words("ways", way.replace("+", ","), _WAYS)
        dtype = pick_dtype(self.dtype, device)
        wanted = [
            (shape, stage, way, self.recipe(stage, cast(Trainable, kind), way, dtype))
            for shape in shapes
            for way in ways
            for stage in stages
            for kind in (trained if stage != "attention" else ["attention"])
        ]
        rows = []
        for shape, stage, way, recipe in wanted:
            unit = f"{shape}, {stage} ({getattr(recipe, stage).trainable}, {way})"
            measure = partial(self._row, shape, stage, way, recipe, device, dtype, report)
            rows += keep(unit, measure)
        return rows

    def recipe(
        self, stage: str, trainable: Trainable, way: str, dtype: torch.dtype
    ) -> ConversionRecipe:
        """A conversion of this stage alone.

        Raises ValueError unless whole documents fill a pass.
        """
        base = ConversionRecipe(to=self.to)
        published: StageRecipe = getattr(base, stage)
        context = self.context or min(published.context_length, self.pass_tokens)
        if self.pass_tokens % context:
            raise ValueError(
                f"pass_tokens: expected a multiple of the context {context}, got {self.pass_tokens}"
            )
        tokens = self.pass_tokens * self.passes
        none = {name: dataclasses.replace(getattr(base, name), tokens=0) for name in _STAGES}
        none[stage] = dataclasses.replace(
            published,
            tokens=tokens,
            context_length=context,
            batch_tokens=tokens,
            micro_batch_tokens=self.pass_tokens,
            trainable=trainable,
        )
        parts = way.split("+")
        return dataclasses.replace(
            base,
            **none,
            data=("random",),
            precision="bfloat16" if dtype == torch.bfloat16 else "float32",
            activation_checkpointing="checkpointed" in parts,
            compile="inductor" if "compiled" in parts else None,
        )

    def _row(
        self,
        shape: str,
        stage: str,
        way: str,
        recipe: ConversionRecipe,
        device: torch.device,
        dtype: torch.dtype,
        report: Report,
    ) -> list[dict[str, Any]]:
        """One row."""
        processes = Processes(0, 1, device)
        teacher = PathAttentionConfig.from_preset("rope", **SHAPES[shape])
        rank: dict[str, Any] = {} if self.to == "fox" else {"direction_rank": recipe.direction_rank}
        config = student_config(teacher, self.to, **rank)
        estimate = estimate_memory(config, recipe, stage, processes)
        chosen: StageRecipe = getattr(recipe, stage)
        row = {
            "shape": shape,
            "parameters": None,
            "to": self.to,
            "stage": stage,
            "trainable": chosen.trainable,
            "context": chosen.context_length,
            "pass_tokens": self.pass_tokens,
            "passes": self.passes,
            "steps": self.steps,
            "dtype": name_of(dtype),
            "fits": False,
            **dict.fromkeys(("step_ms", "tokens_per_second", "mfu", "peak_gib")),
            **_gib(estimate),
        }
        torch.compiler.reset()
        with contextlib.suppress(torch.OutOfMemoryError):
            row |= self._measured(stage, recipe, teacher, config, processes, dtype)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        row["way"] = way
        report(_line(row))
        return [row]

    def _measured(
        self,
        stage: str,
        recipe: ConversionRecipe,
        teacher: PathAttentionConfig,
        config: PathAttentionConfig,
        processes: Processes,
        dtype: torch.dtype,
    ) -> dict[str, Any]:
        device = processes.device
        student = random_model(config, device)
        objective = _objective(stage, recipe, teacher, student, dtype)
        run = stage_recipe(recipe, stage, getattr(recipe, stage), Path("random"))
        model, flops, parameters = build_model(run, config, dtype, processes, objective, student)
        rows = random_rows(run, config.vocab_size, processes)
        steps = TrainingSteps(run, model, flops, objective, rows, processes)
        taken = []
        for n in range(2 + self.steps):
            objective.begin_step(n, 2 + self.steps)
            with stopwatch(device) as read:
                steps.step()
            taken.append(read())
        seconds = median(taken[2:]) / 1e3
        peak = peak_flops(device, dtype)
        return {
            "parameters": parameters,
            "fits": True,
            "step_ms": float(f"{1e3 * seconds:.5g}"),
            "tokens_per_second": round(self.pass_tokens * self.passes / seconds, 1),
            "mfu": None if peak is None else round(steps.flops / seconds / peak, 4),
            "peak_gib": None if steps.whole_mib is None else _short(steps.whole_mib / 2**10),
        }


def random_model(config: PathAttentionConfig, device: torch.device) -> nn.Module:
    """A float32 model of drawn weights, made on the meta device and filled on this one."""
    with torch.device("meta"):
        model = cast(nn.Module, PathAttentionForCausalLM(config)).float()
    model = model.to_empty(device=device)
    initialise(model, config, seed=0)
    return model


def _objective(
    stage: str,
    recipe: ConversionRecipe,
    config: PathAttentionConfig,
    student: nn.Module,
    dtype: torch.dtype,
) -> NextToken:
    """The stage's, with a teacher of the student's weights that lies in the CPU's memory."""
    if stage == "pretraining":
        return NextToken(recipe.choices(stage))
    with torch.device("meta"):
        model = cast(Any, PathAttentionForCausalLM(config))
    state = {
        name: value.to("cpu", dtype)
        for name, value in student.state_dict().items()
        if not is_encoding(name)
    }
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    teacher = Teacher(model.eval(), None, "random weights")
    if stage == "attention":
        return MatchAttention(teacher, recipe.choices(stage))
    return MatchLogits(teacher, recipe.choices(stage))


def _gib(estimate: Estimate) -> dict[str, float]:
    return {
        "estimate_gib": _short(estimate.total / 2**30),
        "estimate_states_gib": _short(estimate.states / 2**30),
    }


def _short(x: float) -> float:
    return float(f"{x:.3g}")


def _line(row: Mapping[str, Any]) -> str:
    name = f"{row['shape']}, {row['stage']} ({row['trainable']}, {row['way']})"
    if not row["fits"]:
        return f"{name}: does not fit; estimated {row['estimate_gib']} GiB"
    peak = "" if row["peak_gib"] is None else f", {row['peak_gib']} GiB at the peak"
    return (
        f"{name}: {row['tokens_per_second']:,.0f} tokens/s{peak}, {row['estimate_gib']} estimated"
    )


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw a result of the benchmark as a PNG: tokens a second, and memory beside the estimate."""
    from path_attention.benchmarks.figure import Panel, draw_bars

    rows = result["rows"]
    speed: dict[tuple[str, str], float | None] = {}
    memory: dict[tuple[str, str], float | None] = {}
    for row in rows:
        trained = "" if row["stage"] == "attention" else f", {row['trainable']}"
        place = f"{row['stage']}{trained}, {row['way']}"
        speed[row["shape"], place] = row["tokens_per_second"]
        memory[f"{row['shape']}, measured", place] = row["peak_gib"]
        memory[f"{row['shape']}, estimated", place] = row["estimate_gib"]
    first = rows[0]
    title = (
        f"{result['device']}: conversion to {first['to']}, passes of {first['pass_tokens']:,} "
        f"tokens, {first['dtype']}"
    )
    panels = [
        Panel("tokens a second", "tokens/s", speed, logarithmic=True),
        Panel("peak memory", "GiB", memory),
    ]
    draw_bars(panels, title, path)
