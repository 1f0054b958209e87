"""What a conversion did to the whole model: teacher beside student, in every way they are used.

report/SUITE.json …      `path-attention evaluate SUITE` on both, with report.html over all
report/lengths_N.json    perplexity by length on the held-out documents of corpus N, and a figure
report/completions.jsonl prompts with both models' greedy answers
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from path_attention.conversion.recipe import ReportRecipe
from path_attention.evaluation.perplexity_by_length import Partial, perplexity_by_length
from path_attention.models.generation import Prompt, decode_answer, encode_prompt
from path_attention.models.loading import load_model, load_tokenizer
from path_attention.results import make_result, read_result, write_result, write_whole
from path_attention.training.corpus import TokenCorpus
from path_attention.training.progress import say

if TYPE_CHECKING:
    from path_attention.evaluation.harness.command import EvaluateAnySuite

_OFFLINE = ("phonebook", "variable_assignment")  # made here, from nothing
_FETCHED = ("zero_shot",)


@dataclass(frozen=True)
class Scorer:
    """Scores a teacher and its student.

    Attributes:
        report: what to score.
        models: folders by label: "teacher", "student".
        out: the folder of results.
        device, dtype: of the models.
        window: the longest context that the teacher's RoPE holds for, or None.
    """

    report: ReportRecipe
    models: Mapping[str, Path]
    out: Path
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    window: int | None = None

    def suites(self) -> list[str]:
        """The suites asked for, or those that can run here: without a network, and with data_dir
        those that it serves.

        Raises ValueError on an unknown one, or if lm-eval is not installed and one is named.
        """
        asked = self.report.suites
        there = importlib.util.find_spec("lm_eval") is not None
        if asked is None:
            if not there:
                say("report: no suites: lm-eval is not installed (`pip install '.[evaluate]'`)")
                return []
            return [*_OFFLINE, *(_FETCHED if self.report.data_dir else ())]
        if asked and not there:
            raise ValueError(
                "report.suites: expected lm-eval to be installed (`pip install '.[evaluate]'`)"
            )
        if asked:
            from path_attention.evaluation.harness.command import COMMANDS

            unknown = sorted(set(asked) - set(COMMANDS))
            if unknown:
                raise ValueError(f"report.suites: expected of {list(COMMANDS)}, got {unknown}")
        return list(asked)

    def check(self) -> None:
        """Plan every suite, so that missing data is told before anything is trained.

        Raises ValueError naming what is missing.
        """
        for name in self.suites():
            self._command(name, samples=1).check()

    def measure(self, corpora: Sequence[TokenCorpus]) -> list[dict[str, Any]]:
        """Rows by "suite", and by "context" for perplexity by length; the files above."""
        rows = self._suites()
        names = [corpus.path.name for corpus in corpora]
        for number, (name, corpus) in enumerate(zip(names, corpora, strict=True)):
            label = name if names.count(name) == 1 else f"{name} {number}"
            rows += self._lengths(number, label, corpus)
        if rows:
            from path_attention.evaluation.report import write_page

            write_whole(self.out / "report.html", write_page(self.out))
        if self.report.prompts:
            self._complete()
        return rows

    def _command(self, name: str, samples: int | None = None) -> EvaluateAnySuite:
        from path_attention.evaluation.harness.command import COMMANDS, GENERATED

        report = self.report
        fields: dict[str, Any] = {
            "models": tuple(self.models.values()),
            "labels": tuple(self.models),
            "out": self.out,
            "data_dir": report.data_dir,
            "limit": report.limit,
            "dtype": self.dtype,
            "device": self.device,
        }
        if name in GENERATED:
            lengths = [n for n in report.suite_lengths if self.window is None or n <= self.window]
            fields |= {
                "lengths": ",".join(map(str, lengths)),
                "samples": samples or report.samples,
                "background": report.background,
            }
        return COMMANDS[name](**fields)

    def _suites(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for name in self.suites():
            self._command(name).run()
            kept = ("model", "column", "length", "filter", "metric", "score", "low", "high")
            for row in read_result(self.out / f"{name}.json")["rows"]:
                rows.append({"by": "suite", "suite": name, **{key: row[key] for key in kept}})
        return rows

    def _lengths(self, number: int, label: str, corpus: TokenCorpus) -> list[dict[str, Any]]:
        """Perplexity by length on one corpus, as far as its documents go."""
        from path_attention.evaluation.figure import draw

        report = self.report
        lengths = readable_lengths(corpus, report.lengths, report.targets)
        lengths = [n for n in lengths if self.window is None or n <= self.window]
        if len(lengths) < len(report.lengths):
            left = [n for n in report.lengths if n not in lengths]
            why = f"below targets = {report.targets}, or more than its documents or models have"
            say(f"report: {label} is not read at {left} tokens: {why}")
        if not lengths:
            return []
        path = self.out / f"lengths_{number}.json"
        partial = Partial(path.with_suffix(".partial.json"))
        found = perplexity_by_length(
            self.models,
            corpus,
            lengths=lengths,
            targets=report.targets,
            windows=report.windows,
            dtype=self.dtype,
            device=self.device,
            partial=partial,
        )
        what = f"Perplexity by length, teacher beside student, on held-out {label}"
        result = make_result(what=what, rows=found, device=self.device)
        write_result(path, result)
        draw(result, path.with_suffix(".png"))
        partial.delete()
        kept = ("model", "length", "perplexity", "low", "high")
        return [
            {"by": "context", "corpus": label, **{key: row[key] for key in kept}}
            for row in found
            if row["by"] == "length"
        ]

    @torch.inference_mode()
    def _complete(self) -> None:
        lines = []
        for label, folder in self.models.items():
            model: Any = load_model(folder, dtype=getattr(torch, self.dtype))
            model = model.to(torch.device(self.device))
            tokenizer = load_tokenizer(folder, model)
            for prompt in self.report.prompts:
                chat = tokenizer.chat_template is not None
                asked = [{"role": "user", "content": prompt}] if chat else prompt
                ids = encode_prompt(tokenizer, cast(Prompt, asked)).to(model.device)
                written = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=self.report.new_tokens,
                    do_sample=False,
                )[0, ids.shape[1] :]
                text = decode_answer(tokenizer, ids[0].tolist(), written.tolist())
                lines.append({"model": label, "chat": chat, "prompt": prompt, "answer": text})
            del model
        path = self.out / "completions.jsonl"
        write_whole(path, "".join(json.dumps(x, ensure_ascii=False) + "\n" for x in lines))


def readable_lengths(corpus: TokenCorpus, lengths: Sequence[int], targets: int) -> list[int]:
    """Those of the lengths that hold the targets and that a held-out document has."""
    sizes = corpus.borders[1:] - corpus.borders[:-1]
    longest = max((int(sizes[n]) - 1 for n in corpus.documents("heldout")), default=0)
    return [n for n in lengths if targets <= n <= longest]


def read_completions(out: Path) -> list[dict[str, Any]]:
    """What `Scorer.measure` kept of answers: of each, model, prompt, answer, whether as a chat."""
    path = out / "completions.jsonl"
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:  # whose lines end at \n alone, a text's at U+2028 too
        return [json.loads(line) for line in file]
