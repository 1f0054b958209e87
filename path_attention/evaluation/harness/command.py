"""`path-attention evaluate SUITE MODEL …`: models side by side on a suite of tasks."""

from __future__ import annotations

import gc
import importlib.metadata
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from path_attention.evaluation.perplexity_by_length import (
    name_models,
    parse_lengths,
)
from path_attention.models.loading import (
    choose_device,
    load_model,
    load_tokenizer,
    model_folder,
)
from path_attention.results import device_name, make_result, versions, write_figure, write_result
from path_attention.training.tokenizer import tokenizer_digest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from path_attention.evaluation.harness.language_model import CausalLM
    from path_attention.evaluation.harness.suites import Planned, Sources

_TEXTS = "perplexity_by_length"
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class EvaluateAnySuite:
    """Writes OUT/SUITE.json (rows with intervals), OUT/SUITE.png, and for each model
    OUT/MODEL/SUITE.samples.jsonl (every prompt, answer and score) and OUT/MODEL/answers.jsonl (by
    which an interrupted run goes on where it was, with the same numbers).
    """

    suite: ClassVar[str]
    models: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of finished runs, or of any transformers causal language model with its tokenizer."""
    out: Path = Path("runs/evaluation")
    """The folder of results; several suites may share it."""
    labels: tuple[str, ...] = ()
    """A name for each model; default: the folder's."""
    tasks: tuple[str, ...] = ()
    """Columns of the suite to do; default: all."""
    data_dir: Path | None = None
    """A folder of fetched data sets (`path-attention evaluate fetch`); default: the hub."""
    limit: int | None = None
    """Documents of each task, from the first on; default: all."""
    context: int | None = None
    """The most tokens that a request may have, answer included; default: what the model was trained
    at, and no limit for samples that are made to --lengths."""
    truncate: Literal["no", "left", "middle"] = "no"
    """What to do with longer ones: refuse, keep the end, or keep both ends (as LongBench does)."""
    chat: bool = False
    """Wrap prompts in the tokenizer's chat template."""
    add_bos: bool | None = None
    """Start each text with the beginning-of-text token; default: as the tokenizer does."""
    batch_size: int | None = None
    """Rows read at once; default: as many as fit, found by trying."""
    piece: int = 2048
    """Tokens of a row read at once; bounds memory, whatever the length."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights and activations."""
    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto takes a GPU where there is one."""
    seed: int = 0
    """Of generated samples and of the bootstrap."""

    def run(self) -> None:
        from transformers.utils.logging import disable_progress_bar

        from path_attention.evaluation.harness.table import print_scores
        from path_attention.evaluation.suite_figure import draw_suite
        from path_attention.evaluation.table import show_progress

        disable_progress_bar()
        models = name_models(self.models, self.labels)
        device = choose_device(self.device)
        plans = self._plan(models)
        rows = []
        with show_progress() as progress:
            for label, folder in models.items():
                rows += self._evaluate(label, folder, plans[label], device, progress)
        result = make_result(
            what=f"Scores of the suite {self.suite}: low and high are the ends of 95 % intervals "
            "(Wilson's for shares, else the bootstrap over documents); longest is the most tokens "
            "that a request was read with, answer included, and cut how many were shortened",
            rows=rows,
            device=device,
        )
        result["versions"]["lm-eval"] = importlib.metadata.version("lm-eval")
        write_result(self.out / f"{self.suite}.json", result)
        write_figure(draw_suite(self.suite, rows), self.out / f"{self.suite}.png")
        print_scores(self.suite, rows)
        print(f"wrote {self.out / self.suite}.json and .png")

    def check(self) -> None:
        """Plan every task without a model. Raises ValueError on bad options or missing data."""
        self._plan(name_models(self.models, self.labels))

    def _plan(self, models: dict[str, Path]) -> dict[str, list[Planned]]:
        """Each model's tasks, with all their data, before any model is loaded."""
        from path_attention.evaluation.harness.suites import SUITES

        for name in ("limit", "context", "batch_size", "piece"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        suite = SUITES[self.suite]
        plans: dict[str, list[Planned]] = {}
        made: dict[str, list[Planned]] = {}  # by tokenizer
        for label, folder in models.items():
            tokenizer = load_tokenizer(folder)
            if tokenizer.eos_token_id is None:  # pyright: ignore[reportAttributeAccessIssue]
                raise ValueError(
                    f"models: expected a tokenizer with an end of text, {label} has none"
                )
            if self.chat and not tokenizer.chat_template:
                raise ValueError(f"chat: expected a chat template, {label}'s tokenizer has none")
            place = _text_maker(label, tokenizer) if suite.generated else ""
            if place not in made:
                made[place] = suite.plan(self._sources(tokenizer))
            plans[label] = made[place]
        return plans

    def _sources(self, tokenizer: PreTrainedTokenizerBase) -> Sources:
        from path_attention.evaluation.harness.data import loader
        from path_attention.evaluation.harness.language_model import starts_texts
        from path_attention.evaluation.harness.suites import Sources

        starts = starts_texts(tokenizer) if self.add_bos is None else self.add_bos

        def count_tokens(text: str) -> int:
            return len(tokenizer.encode(text, add_special_tokens=False)) + starts

        return Sources(
            load=loader(self.data_dir),
            count_tokens=count_tokens,
            tasks=self.tasks,
            seed=self.seed,
            **self._generated(),
        )

    def _generated(self) -> dict[str, Any]:
        return {}

    def _evaluate(
        self, label: str, folder: Path, planned: list[Planned], device: str, progress: Progress
    ) -> list[dict[str, Any]]:
        import torch

        from path_attention.evaluation.harness.run import answer_tasks, make_rows, write_samples
        from path_attention.evaluation.harness.suites import SUITES

        model = load_model(folder, dtype=getattr(torch, self.dtype))
        model.to(torch.device(device))  # type: ignore[arg-type]
        lm = self._language_model(label, folder, model, device, progress)
        scored = answer_tasks(lm, planned, limit=self.limit, chat=self.chat)
        write_samples(self.out / label / f"{self.suite}.samples.jsonl", scored)
        rows = make_rows(label, lm, SUITES[self.suite], scored, self.seed)
        trained = _trained_at(folder)
        del model, lm
        gc.collect()
        return [{**row, "trained_at": trained, "dtype": self.dtype} for row in rows]

    def _language_model(
        self, label: str, folder: Path, model: PreTrainedModel, device: str, progress: Progress
    ) -> CausalLM:
        from path_attention.evaluation.harness.answers import Answers
        from path_attention.evaluation.harness.language_model import CausalLM
        from path_attention.evaluation.harness.suites import SUITES
        from path_attention.models.prefix_store import fingerprint

        identity = {
            "weights": fingerprint(model),
            "dtype": self.dtype,
            "device": device_name(device),
            "versions": {**versions(), "lm-eval": importlib.metadata.version("lm-eval")},
        }
        context = self.context
        if context is None and not SUITES[self.suite].generated:
            context = _trained_at(folder)
        return CausalLM(
            model,
            load_tokenizer(folder, model),
            context=context,
            truncate=self.truncate,
            batch_size=self.batch_size,
            answers=Answers(self.out / label / "answers.jsonl", identity),
            add_bos=self.add_bos,
            piece=self.piece,
            progress=lambda what, done, total: progress(f"{label}: {what}", done, total),
        )


def _text_maker(label: str, tokenizer: Any) -> str:
    """What made samples hang on: the tokenizer, or the model of one that has no such hash."""
    return tokenizer_digest(tokenizer) if tokenizer.is_fast else label


def _trained_at(folder: Path) -> int | None:
    config = json.loads((model_folder(folder) / "config.json").read_text(encoding="utf-8"))
    return config.get("max_position_embeddings") or config.get("n_positions")


@dataclass(frozen=True, kw_only=True)
class EvaluateZeroShot(EvaluateAnySuite):
    """WikiText, LAMBADA, PIQA, HellaSwag, WinoGrande, ARC: the columns of the paper's table."""

    suite = "zero_shot"


@dataclass(frozen=True, kw_only=True)
class EvaluateMathsAndCode(EvaluateAnySuite):
    """GSM8K, MATH, HumanEval, MBPP, MBPP+, MMLU, GPQA; generated code runs in a sandbox."""

    suite = "maths_and_code"


@dataclass(frozen=True, kw_only=True)
class EvaluateLongBench(EvaluateAnySuite):
    """LongBench-E without its passage tasks, by buckets of each document's own length."""

    suite = "longbench_e"


@dataclass(frozen=True, kw_only=True)
class _EvaluateGenerated(EvaluateAnySuite):
    lengths: str = ""
    """Tokens of context, answer included, with commas between; default: the paper's."""
    samples: int = 100
    """Samples of each task and length."""
    background: tuple[str, ...] = ()
    """Text that facts are hidden in: files, folders, globs, or "stdlib"; default: the published
    one, from --data-dir or the hub."""

    def _generated(self) -> dict[str, Any]:
        from path_attention.evaluation.generated.background import Background
        from path_attention.evaluation.harness.suites import SUITES
        from path_attention.training.sources import Documents

        background = None
        if self.background:
            background = Background.from_texts(text for _, text in Documents(self.background))
        if self.samples < 1:
            raise ValueError(f"samples: expected at least 1, got {self.samples}")
        lengths = parse_lengths(self.lengths) if self.lengths else SUITES[self.suite].lengths
        if len(set(lengths)) < len(lengths) or min(lengths) < 0:
            raise ValueError(f"lengths: expected different numbers from 0 on, got {self.lengths!r}")
        return {"background": background, "samples": self.samples, "lengths": lengths}


@dataclass(frozen=True, kw_only=True)
class EvaluateRuler(_EvaluateGenerated):
    """RULER: thirteen tasks at each length."""

    suite = "ruler"


@dataclass(frozen=True, kw_only=True)
class EvaluateBabilong(_EvaluateGenerated):
    """BABILong: ten kinds of question over facts in background text; length 0 is facts alone."""

    suite = "babilong"


@dataclass(frozen=True, kw_only=True)
class EvaluatePhoneBook(_EvaluateGenerated):
    """PhoneBook: one number of a telephone book at each length."""

    suite = "phonebook"


@dataclass(frozen=True, kw_only=True)
class EvaluateVariableAssignment(_EvaluateGenerated):
    """Variable assignment traces: what a variable holds after constants, copies and swaps."""

    suite = "variable_assignment"


GENERATED: dict[str, type[_EvaluateGenerated]] = {
    command.suite: command
    for command in (EvaluatePhoneBook, EvaluateRuler, EvaluateBabilong, EvaluateVariableAssignment)
}
COMMANDS: Mapping[str, type[EvaluateAnySuite]] = {
    command.suite: command
    for command in (EvaluateZeroShot, EvaluateMathsAndCode, EvaluateLongBench)
} | GENERATED


@dataclass(frozen=True, kw_only=True)
class FetchData:
    """Fetch the data sets of suites from the hub into a folder, with their sizes and hashes."""

    suites: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Names of suites, as ruler or zero_shot."""
    data_dir: Path
    """The folder, for --data-dir of the others."""
    documents: int = 100
    """The most documents of each set of long texts."""

    def run(self) -> None:
        from functools import partial

        from path_attention.evaluation.harness.data import fetch
        from path_attention.evaluation.harness.suites import SUITES, Sources
        from path_attention.evaluation.harness.texts import TEXTS, fetch_texts

        unknown = sorted(set(self.suites) - {*SUITES, _TEXTS})
        if unknown or not self.suites:
            raise ValueError(f"suites: expected of {[*SUITES, _TEXTS]}, got {list(self.suites)}")
        for name in self.suites:
            if name == _TEXTS:
                for texts in TEXTS:
                    print(
                        f"{texts}: {len(fetch_texts(self.data_dir, texts, self.documents))} texts"
                    )
                continue
            suite = SUITES[name]
            sources = Sources(
                load=partial(fetch, self.data_dir),
                count_tokens=lambda text: len(text) // 4,
                samples=1,
                lengths=suite.lengths,
            )
            planned = suite.plan(sources)
            print(f"{name}: {len(planned)} tasks in {self.data_dir}")
