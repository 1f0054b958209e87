"""A whole conversion in a folder: start, stages, report. The same call goes on where it stopped.

    start/                 the converted model before any training, with the teacher's tokenizer
    attention/ logits/ pretraining/    runs of the training loop, each from the model before it
    report.json report.png             errors, divergence and perplexity after each
    model/                 the last model, with a card
    teacher/ report/       the teacher as a model of this library, and both models' scores

Every process of a `torchrun` takes part; files are written by the first, which measures alone.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from path_attention.conversion.card import write_card
from path_attention.conversion.lora import check_peft
from path_attention.conversion.memory import check_memory
from path_attention.conversion.objectives import MatchAttention, MatchLogits, NextToken
from path_attention.conversion.recipe import ConversionRecipe, StageRecipe
from path_attention.conversion.report import Measurer, write_report
from path_attention.conversion.scores import Scorer
from path_attention.conversion.starts import start_encoding
from path_attention.conversion.teacher import (
    Teacher,
    check_length,
    copy_model,
    load_teacher,
    load_teacher_config,
    load_teacher_tokenizer,
    student_config,
)
from path_attention.models import PathAttentionConfig, model_folder
from path_attention.results import write_whole
from path_attention.training.corpus import TokenCorpus
from path_attention.training.loop import Outcome, Resume, train
from path_attention.training.mixture import CorpusMixture, pack_rows
from path_attention.training.processes import Processes, choose_precision, start_processes
from path_attention.training.progress import say
from path_attention.training.recipe import (
    DataRecipe,
    ModelRecipe,
    OptimizerRecipe,
    Recipe,
    ScheduleRecipe,
)
from path_attention.training.tokenizer import tokenizer_digest

_SETTINGS = "conversion.json"


@dataclass(frozen=True)
class _Conversion:
    """What stays the same from stage to stage."""

    source: str
    recipe: ConversionRecipe
    out: Path
    processes: Processes
    teacher_config: PathAttentionConfig
    window: int | None  # `Teacher.window`
    config: PathAttentionConfig  # of the start

    def teacher(self, dtype: torch.dtype = torch.float32) -> Teacher:
        """The teacher, loaded anew: who asks for it may move and cast it."""
        return load_teacher(self.source, dtype)


def convert(
    source: str | Path, recipe: ConversionRecipe, out: str | Path, *, resume: Resume = "auto"
) -> Outcome | None:
    """Convert a pretrained model.

    Args:
        source: a name of the hub, a folder, a .gguf file, or a run of this library.
        recipe: what to do.
        out: the conversion's folder.
        resume: as in `train`, of each stage.

    Returns:
        The outcome of the stage that a signal stopped; None if all are done.

    Raises:
        ValueError: a model, tokenizer or mixture that doesn't fit; too little memory; another
            conversion in `out`.
    """
    out = Path(out)
    with start_processes(recipe.device) as processes:
        _check_stages(recipe, processes)
        theirs, window = load_teacher_config(source)
        config = student_config(
            theirs,
            recipe.to,
            keep_rope=recipe.start == "exchange",
            **({} if recipe.to in ("rope", "fox") else {"direction_rank": recipe.direction_rank}),
        )
        estimates = check_memory(config, recipe, processes)
        if processes.first:
            for name, estimate in estimates.items():
                say(f"stage {name}: about {estimate} a device")
        run = _Conversion(str(source), recipe, out, processes, theirs, window, config)
        with processes.first_does():
            _check_data(run)
            _settle(run)
            if not (out / "start" / "config.json").exists():
                _write_start(run)
            if recipe.report.scores:
                _scorer(run, {"student": out / "start"}).check()
        folder = out / "start"
        for name, stage in recipe.stages():
            folder, before = out / name, folder
            outcome = train(
                stage_recipe(recipe, name, stage, before),
                folder,
                resume=resume,
                objective=_objective(run, name, stage),
            )
            if outcome.signal is not None:
                return outcome
    if processes.first:
        _finish(run, folder)
    return None


def stage_recipe(recipe: ConversionRecipe, name: str, stage: StageRecipe, start: Path) -> Recipe:
    """A stage as a recipe of the training loop."""
    return Recipe(
        name=f"convert_{recipe.to}_{name}",
        model=ModelRecipe(preset=recipe.to, start=start),
        data=DataRecipe(
            context_length=stage.context_length,
            mixture=recipe.corpora(name),
            workers=recipe.workers,
        ),
        steps=stage.steps,
        batch_tokens=stage.batch_tokens,
        micro_batch_tokens=stage.micro_batch_tokens,
        optimizer=OptimizerRecipe(
            learning_rate=stage.learning_rate, weight_decay=stage.weight_decay
        ),
        schedule=ScheduleRecipe(warmup_steps=int(stage.warmup * stage.steps), final=stage.final),
        precision=recipe.precision,
        parallel=recipe.parallel,
        activation_checkpointing=recipe.activation_checkpointing,
        compile=recipe.compile,
        device=recipe.device,
        seed=recipe.seed,
        guard=recipe.guard,
        checkpoint=recipe.checkpoint,
        log=recipe.log,
    )


def _objective(run: _Conversion, name: str, stage: StageRecipe) -> NextToken:
    choices = run.recipe.choices(name)
    if name == "pretraining":
        return NextToken(choices)
    teacher = run.teacher(choose_precision(run.recipe.precision, run.processes.device))
    if name == "attention":
        return MatchAttention(teacher, choices, relative=stage.relative)
    return MatchLogits(teacher, choices, temperature=stage.temperature, top_k=stage.top_k)


def _check_stages(recipe: ConversionRecipe, processes: Processes) -> None:
    """That no later stage ends at once, on what could have been told before the first."""
    for name, stage in recipe.stages():
        stage_recipe(recipe, name, stage, Path("start")).passes(processes.count)
        if stage.trainable == "lora":
            check_peft()


def _check_data(run: _Conversion) -> None:
    """That the corpora are there and made with the teacher's tokenizer."""
    recipe = run.recipe
    chosen = {recipe.corpora(name) for name, _ in recipe.stages()}
    chosen |= {recipe.data} if recipe.data else set()
    if recipe.start == "rope_decay" and not recipe.data:
        raise ValueError("data: expected corpora to measure the teacher's decay on, got none")
    for _, stage in recipe.stages():
        check_length(run.source, run.window, stage.context_length)
    for specifications in chosen:
        mixture = CorpusMixture.open(specifications)
        theirs: Any = load_teacher_tokenizer(run.source)
        if not theirs.is_fast or tokenizer_digest(theirs) != tokenizer_digest(mixture.tokenizer()):
            raise ValueError(
                f"data: expected corpora made with the tokenizer of {run.source}, that of "
                f"{mixture.path} is another (path-attention corpus build --tokenizer …)"
            )


def _settle(run: _Conversion) -> None:
    """Note what the start was made from, or check that it is the same."""
    recipe = run.recipe
    settings = {
        "model": run.source,
        "to": recipe.to,
        "start": recipe.start,
        "directions": recipe.directions,
        "direction_rank": recipe.direction_rank,
        "seed": recipe.seed,
    }
    path = run.out / _SETTINGS
    if path.exists():
        before = json.loads(path.read_text())
        if before != settings:
            changed = [
                f"{n} was {before.get(n)!r}, is {v!r}"
                for n, v in settings.items()
                if before.get(n) != v
            ]
            raise ValueError(
                f"out: {run.out} holds another conversion: {'; '.join(changed)}. Go back to it, or "
                "choose another folder"
            )
        return
    write_whole(path, json.dumps(settings, indent=1) + "\n")


def _write_start(run: _Conversion) -> None:
    recipe = run.recipe
    teacher = run.teacher().model
    student = copy_model(teacher, run.config, recipe.seed)
    if recipe.to != "rope":
        stages = [stage.context_length for _, stage in recipe.stages()]
        start_encoding(
            student,
            recipe.start,
            context=max(stages, default=run.config.max_position_embeddings),
            directions=recipe.directions,
            teacher=teacher,
            tokens=_text(run) if recipe.start == "rope_decay" else None,
        )
    partial = run.out / ".start.partial"
    shutil.rmtree(partial, ignore_errors=True)
    student.save_pretrained(partial)
    try:
        load_teacher_tokenizer(run.source).save_pretrained(partial)
    except ValueError:
        if recipe.data:
            raise
    shutil.rmtree(run.out / "start", ignore_errors=True)
    os.rename(partial, run.out / "start")


def _text(run: _Conversion, tokens: int = 1024) -> Tensor:
    """The longest piece of text of the first rows: int64 `[1, T]`."""
    mixture = CorpusMixture.open(run.recipe.data)
    length = tokens if run.window is None else min(tokens, run.window)
    rows = pack_rows(mixture, "train", context_length=length, row_tokens=4 * length, seed=0)
    pieces: list[Tensor] = []
    for number in range(8):
        row = rows.row(number)
        pieces += row.input_ids[0].split(row.packing.lengths)
    return max(pieces, key=len)[None]


def _finish(run: _Conversion, last: Path) -> None:
    """Measure every model that there is, and leave the last with a card."""
    recipe = run.recipe
    model = run.out / "model"
    partial = run.out / ".model.partial"
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(model_folder(last), partial)
    shutil.rmtree(model, ignore_errors=True)
    os.rename(partial, model)
    rows: list[dict[str, Any]] = []
    corpora: list[TokenCorpus] = []
    if recipe.data and CorpusMixture.open(recipe.data).info["heldout_tokens"]:
        parts = CorpusMixture.open(recipe.data).parts
        corpora = [part for part in parts if part.info["heldout_tokens"]]
        measurer = Measurer(run.teacher(), recipe, run.processes.device)
        done = 0
        names = ["start", *(name for name, _ in recipe.stages())]
        for name in names:
            if name != "start":
                stage = getattr(recipe, name)
                done += stage.steps * stage.batch_tokens
            rows += measurer.measure(run.out / name, name, done)
        del measurer
    if recipe.report.scores:
        _write_teacher(run)
        models = {"teacher": run.out / "teacher", "student": run.out / "model"}
        rows += _scorer(run, models).measure(corpora)
    if rows:
        write_report(run.out, rows, str(run.processes.device))
    write_card(run.out, run.source, recipe, run.teacher_config, rows)


def _scorer(run: _Conversion, models: Mapping[str, Path]) -> Scorer:
    dtype = choose_precision(run.recipe.precision, run.processes.device)
    return Scorer(
        report=run.recipe.report,
        models=models,
        out=run.out / "report",
        device=str(run.processes.device),
        dtype="bfloat16" if dtype == torch.bfloat16 else "float32",
        window=run.window,
    )


def _write_teacher(run: _Conversion) -> None:
    """The teacher as a model of this library, in the precision in which it is scored."""
    folder = run.out / "teacher"
    if (folder / "config.json").exists():
        return
    partial = run.out / ".teacher.partial"
    shutil.rmtree(partial, ignore_errors=True)
    dtype = choose_precision(run.recipe.precision, run.processes.device)
    run.teacher(dtype).model.save_pretrained(partial)
    load_teacher_tokenizer(run.source).save_pretrained(partial)
    os.rename(partial, folder)
