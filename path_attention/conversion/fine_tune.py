"""`path-attention evaluate fine_tune`: teach models a suite at short length, test them long.

OUT/data/…               solved samples, for each tokenizer
OUT/starts/MODEL         a RoPE model of transformers as one of this library, and its source
OUT/trained/MODEL        the run of the trainer
OUT/SUITE.json …         what `path-attention evaluate SUITE` writes
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import tyro

from path_attention.conversion.teacher import check_length, load_teacher, load_teacher_config
from path_attention.conversion.teacher import load_teacher_tokenizer as load_any_tokenizer
from path_attention.evaluation.perplexity_by_length import name_models, parse_lengths
from path_attention.models import PRESETS, PathAttentionConfig, model_folder
from path_attention.training.corpus import TokenCorpus
from path_attention.training.loop import train
from path_attention.training.recipe import (
    CheckpointRecipe,
    DataRecipe,
    GuardRecipe,
    LogRecipe,
    ModelRecipe,
    OptimizerRecipe,
    Precision,
    Recipe,
    ScheduleRecipe,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from path_attention.evaluation.generated.sample import Sample

FIRST_SEED = 10**9  # of samples that are trained on: far from those that are tested on
_SOURCE = "source.json"  # of a start: what it was made from


@dataclass(frozen=True, kw_only=True)
class FineTuneRecipe:
    """What every model is given alike.

    Attributes:
        samples: of each task and length.
        steps: of the optimizer.
        batch_tokens: of a step.
        micro_batch_tokens: of one forward pass; None for a whole step.
        learning_rate: the peak, after a warm-up of a twentieth; cosine to a tenth.
        weight_decay: of matrices.
        precision, activation_checkpointing, compile: as in `Recipe`.
    """

    samples: int = 2000
    steps: int = 600
    batch_tokens: int = 32768
    micro_batch_tokens: int | None = None
    learning_rate: float = 3e-4
    weight_decay: float = 0.01
    precision: Precision = "auto"
    activation_checkpointing: bool = False
    compile: str | None = None
    checkpoint: CheckpointRecipe = field(default_factory=lambda: CheckpointRecipe(every=200))
    log: LogRecipe = field(default_factory=lambda: LogRecipe(heldout_every=100, tensorboard=False))


@dataclass(frozen=True, kw_only=True)
class FineTune:
    """A small model may fail a task by its form alone. This teaches every model the form by the
    same recipe, on the answers of the same samples at short lengths, and tests it at others: there
    is where encodings differ. The same command goes on where it stopped.
    """

    suite: Annotated[str, tyro.conf.Positional]
    """phonebook, ruler, babilong or variable_assignment."""
    models: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Runs and models of this library, and RoPE models that `convert` takes: a folder, a .gguf
    file, a name of the hub."""
    train_lengths: str
    """Tokens of context to train at, answer included, with commas between."""
    lengths: str = ""
    """Those to test at; default: once, 2, 4 and 8 times the longest trained."""
    training: FineTuneRecipe = field(default_factory=FineTuneRecipe)
    tasks: tuple[str, ...] = ()
    """Of the suite; default: all (RULER: all that need no data sets)."""
    samples: int = 200
    """Tested samples of each task and length."""
    background: tuple[str, ...] = ()
    """Text that facts are hidden in: files, folders, globs, or "stdlib"."""
    labels: tuple[str, ...] = ()
    """A name for each model; default: the folder's."""
    prepare: bool = False
    """Make starts and samples alone and stop, for a machine whose time is dear."""
    out: Path = Path("runs/fine_tuned")
    batch_size: int | None = None
    """Rows read at once in tests; default: as many as fit."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and activations in tests."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 0
    """Of samples, tested and trained on (those are others), and of the order in training."""

    def run(self) -> None:
        from transformers.utils.logging import disable_progress_bar

        from path_attention.evaluation.harness.command import GENERATED

        disable_progress_bar()
        check_one_process()
        if self.suite not in GENERATED:
            raise ValueError(f"suite: expected one of {list(GENERATED)}, got {self.suite!r}")
        if not 0 <= self.seed < FIRST_SEED:
            raise ValueError(f"seed: expected 0 to {FIRST_SEED - 1}, got {self.seed}")
        if not self.background and self.suite in ("ruler", "babilong"):
            raise ValueError(f"background: expected local text for {self.suite}, got none")
        trained = parse_lengths(self.train_lengths)
        tested = self.lengths or ",".join(str(n * max(trained)) for n in (1, 2, 4, 8))
        models = name_models([Path(name) for name in self.models], self.labels)
        sources = dict(zip(models, self.models, strict=True))
        longest = max(*trained, *parse_lengths(tested))
        starts = {label: self._start(label, source, longest) for label, source in sources.items()}
        if self.prepare:
            for start in starts.values():
                print(self.corpus(start, trained).path)
            return
        for label, start in starts.items():
            outcome = self._train(label, start, trained)
            if outcome is not None:
                raise SystemExit(128 + outcome)
        GENERATED[self.suite](
            models=tuple(self.out / "trained" / label for label in models),
            labels=tuple(models),
            out=self.out,
            tasks=self._tasks(),
            lengths=tested,
            samples=self.samples,
            background=self.background,
            batch_size=self.batch_size,
            dtype=self.dtype,
            device=self.device,
            seed=self.seed,
        ).run()

    def _tasks(self) -> tuple[str, ...]:
        from path_attention.evaluation.generated import ruler

        if self.tasks or self.suite != "ruler":
            return self.tasks
        return tuple(task for task in ruler.TASKS if task not in ruler.QUESTIONS)

    def _start(self, label: str, source: str, longest: int) -> Path:
        """The folder of a model of this library, made if it is none yet."""
        folder = self.out / "starts" / label
        named = str(Path(source).resolve()) if Path(source).exists() else source
        if (folder / "config.json").exists():
            note, before = folder / _SOURCE, "a model that it does not name"
            if note.exists():
                before = json.loads(note.read_text(encoding="utf-8"))
            if before != named:
                raise ValueError(
                    f"labels: {folder} was made from {before}, got {source}; choose another label "
                    "or another out"
                )
            return folder
        if Path(source).is_dir() and _is_ours(model_folder(source)):
            return model_folder(source)
        check_length(source, load_teacher_config(source)[1], longest)
        tokenizer = load_any_tokenizer(source)
        partial = folder.with_name(f".{label}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        load_teacher(source).model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / _SOURCE).write_text(json.dumps(named), encoding="utf-8")
        partial.rename(folder)
        return folder

    def _train(self, label: str, start: Path, lengths: Sequence[int]) -> int | None:
        """The number of the signal that stopped it, or None."""
        from path_attention.evaluation.generated.solved import AnswerTokens

        corpus = self.corpus(start, lengths)
        longest = int((corpus.borders[1:] - corpus.borders[:-1]).max())
        recipe = self._recipe(label, start, corpus.path, longest)
        outcome = train(recipe, self.out / "trained" / label, objective=AnswerTokens(corpus))
        return None if outcome.signal is None else int(outcome.signal)

    def _recipe(self, label: str, start: Path, corpus: Path, longest: int) -> Recipe:
        training = self.training
        config = PathAttentionConfig.from_pretrained(start)
        return Recipe(
            name=f"{self.suite}_{label}",
            model=ModelRecipe(preset=preset_of(config), start=start),
            data=DataRecipe(context_length=longest, corpus=corpus, workers=2),
            steps=training.steps,
            batch_tokens=training.batch_tokens,
            micro_batch_tokens=training.micro_batch_tokens,
            optimizer=OptimizerRecipe(
                learning_rate=training.learning_rate, weight_decay=training.weight_decay
            ),
            schedule=ScheduleRecipe(warmup_steps=training.steps // 20),
            precision=training.precision,
            activation_checkpointing=training.activation_checkpointing,
            compile=training.compile,
            device=self.device,
            seed=self.seed,
            guard=GuardRecipe(action="skip"),
            checkpoint=training.checkpoint,
            log=training.log,
        )

    def corpus(self, start: Path, lengths: Sequence[int]) -> TokenCorpus:
        """Solved samples in the tokens of a model, made if they are not there yet."""
        from path_attention.evaluation.generated.solved import write_solved
        from path_attention.evaluation.harness.language_model import starts_texts
        from path_attention.training.tokenizer import tokenizer_digest

        tokenizer = cast("PreTrainedTokenizerFast", load_any_tokenizer(start))
        settings = [self.suite, self._tasks(), list(lengths), self.training.samples, self.seed]
        settings += [self.background, tokenizer_digest(tokenizer)]
        name = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
        folder = self.out / "data" / name
        if (folder / "corpus.json").exists():
            return TokenCorpus.open(folder)
        starts = starts_texts(tokenizer)
        found = self._samples(tokenizer, starts, lengths)
        names, samples = zip(*found, strict=True)
        return write_solved(folder, names, samples, tokenizer, starts=starts)

    def _samples(
        self, tokenizer: Any, starts: bool, lengths: Sequence[int]
    ) -> list[tuple[str, Sample]]:
        from path_attention.evaluation.generated.background import Background
        from path_attention.evaluation.harness.data import loader
        from path_attention.evaluation.harness.suites import SUITES, Sources
        from path_attention.training.sources import Documents

        background = None
        if self.background:
            background = Background.from_texts(text for _, text in Documents(self.background))
        if self.training.samples < 32:
            raise ValueError(f"training.samples: expected at least 32, got {self.training.samples}")
        sources = Sources(
            load=loader(None),
            count_tokens=lambda text: (
                len(tokenizer.encode(text, add_special_tokens=False)) + starts
            ),
            background=background,
            samples=self.training.samples,
            lengths=tuple(lengths),
            tasks=self._tasks(),
            seed=FIRST_SEED * (1 + self.seed),
            lessons=True,
        )
        return [
            (f"{planned.name}/{n}", sample)
            for planned in SUITES[self.suite].plan(sources)
            for n, sample in enumerate(planned.samples)
        ]


def check_one_process() -> None:
    """Raise ValueError under a `torchrun` of several processes, which would do the same work."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count > 1:
        raise ValueError(f"WORLD_SIZE: expected one process, got {count}; give each its own models")


def _is_ours(folder: Path) -> bool:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config.get("model_type") == PathAttentionConfig.model_type


def preset_of(config: PathAttentionConfig) -> str:
    """The preset with a configuration's transport, decay and normalizer.

    Raises ValueError if none has them.
    """
    kind = (config.transport, config.decay, config.normalizer)
    for name, fields in PRESETS.items():
        if kind == (fields["transport"], fields["decay"], fields.get("normalizer", "softmax")):
            return name
    raise ValueError(f"MODEL: expected the encoding of one of {sorted(PRESETS)}, got {kind}")
