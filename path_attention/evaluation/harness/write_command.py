"""`path-attention evaluate write`: generated samples with their answers, as texts to train on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from path_attention.evaluation.perplexity_by_length import parse_lengths
from path_attention.models.loading import load_tokenizer
from path_attention.results import write_whole

_FIRST_SEED = 10**9  # far from those that are tested on


@dataclass(frozen=True, kw_only=True)
class WriteSamples:
    """A model that was never taught a task's form may fail it by the form alone. Train it for some
    minutes on what this writes at short length, then evaluate it at long ones.
    """

    suite: Annotated[str, tyro.conf.Positional]
    """phonebook, ruler or babilong."""
    model: Path
    """Folder of the model that is to be trained: its tokenizer counts lengths."""
    out: Path
    """The folder of texts, one a sample; for `path-attention corpus build --sources`."""
    lengths: str
    """Tokens of context, answer included, with commas between."""
    samples: int = 1000
    """Samples of each task and length."""
    tasks: tuple[str, ...] = ()
    """Of the suite; default: all."""
    background: tuple[str, ...] = ()
    """Text that facts are hidden in: files, folders, globs, or "stdlib"."""
    seed: int = 0
    """Other seeds give other samples; none are those that `evaluate` asks."""

    def run(self) -> None:
        from path_attention.evaluation.generated.background import Background
        from path_attention.evaluation.harness.data import loader
        from path_attention.evaluation.harness.suites import SUITES, Sources
        from path_attention.training.sources import Documents

        known = [name for name, suite in SUITES.items() if suite.generated]
        if self.suite not in known:
            raise ValueError(f"suite: expected one of {known}, got {self.suite!r}")
        background = None
        if self.background:
            background = Background.from_texts(text for _, text in Documents(self.background))
        elif self.suite != "phonebook":
            raise ValueError(f"background: expected local text for {self.suite}, got none")
        tokenizer = load_tokenizer(self.model)
        sources = Sources(
            load=loader(None),
            count_tokens=lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
            background=background,
            samples=self.samples,
            lengths=parse_lengths(self.lengths),
            tasks=self.tasks,
            seed=_FIRST_SEED * (1 + self.seed),
        )
        count = 0
        for planned in SUITES[self.suite].plan(sources):
            task: Any = planned.task
            for n, row in enumerate(task.dataset["test"]):
                write_whole(self.out / f"{planned.name}-{n:06}.txt", solved(row))
                count += 1
        print(f"wrote {count} texts to {self.out}")


def solved(row: Mapping[str, Any]) -> str:
    """A sample's prompt, prefix and right answer.

    >>> row = {"prompt": "Who?", "delimiter": "\\n", "prefix": "Answer:", "references": ["Ann"]}
    >>> solved(row)
    'Who?\\nAnswer: Ann\\n'
    """
    prefix = f"{row['delimiter']}{row['prefix']}" if row["prefix"] else ""
    return f"{row['prompt']}{prefix} {', '.join(row['references'])}\n"
