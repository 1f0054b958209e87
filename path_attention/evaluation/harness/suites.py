"""What each suite asks: its tasks, made here or taken from lm-eval, and its table's columns."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import datasets
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.tasks import TaskManager

from path_attention.evaluation.generated import assignment, babilong, ruler
from path_attention.evaluation.generated.background import Background
from path_attention.evaluation.generated.metrics import (
    contains_all,
    contains_any,
    equals_line,
    names_the_target,
)
from path_attention.evaluation.generated.phonebook import phonebook_sample
from path_attention.evaluation.generated.sample import CountTokens, Sample
from path_attention.evaluation.harness.code_tasks import CODE_TASKS
from path_attention.evaluation.harness.data import Load, rows_of, tasks_load_by

Score = Callable[[Mapping[str, Any], str], float]
_MATH = "hendrycks_math"
ZERO_SHOT = {  # lm-eval's task: the metrics of the paper's columns
    "wikitext": ("word_perplexity",),
    "lambada_openai": ("perplexity", "acc"),
    "piqa": ("acc",),
    "hellaswag": ("acc_norm",),
    "winogrande": ("acc",),
    "arc_easy": ("acc",),
    "arc_challenge": ("acc_norm",),
}
MATHS_AND_CODE = {
    "gsm8k": ("exact_match",),
    _MATH: ("exact_match",),
    **dict.fromkeys(CODE_TASKS, ("pass@1",)),
    "mmlu": ("acc",),
    "gpqa_diamond_zeroshot": ("acc",),
}
# asked for by name, and not to be had
NOWHERE = {
    "theoremqa": "lm-eval 0.4.13 has no TheoremQA",
    "qa0": "neither bAbI nor BABILong has a question before qa1 (their length 0 is --lengths 0)",
}
LONGBENCH_E = (
    *("qasper_e", "multifieldqa_en_e", "hotpotqa_e", "2wikimqa_e", "gov_report_e"),
    *("multi_news_e", "trec_e", "triviaqa_e", "samsum_e", "lcc_e", "repobench-p_e"),
)
LONGBENCH_BORDERS = (0, 4000, 8000)  # words: its buckets start there
_MOST_THREADS = 8
_ESSAYS = "baber/paul_graham_essays"
_BABILONG = "RMT-team/babilong"
_SQUAD, _HOTPOT = "rajpurkar/squad_v2", ("hotpotqa/hotpot_qa", "distractor")


@dataclass(frozen=True)
class Planned:
    """One task as it is asked, and what its rows are called.

    Attributes:
        task: lm-eval's.
        column: the column of the suite's table; several tasks may share one (subjects of MMLU).
        metrics: those that count; None for all.
        length: tokens of context asked for; None where the data set has its own lengths.
        buckets: borders of each document's own `length`, where scores are split by it.
        samples: that were made here.
    """

    task: Task
    column: str
    metrics: tuple[str, ...] | None = None
    length: int | None = None
    buckets: tuple[int, ...] = ()
    samples: Sequence[Sample] = ()

    @property
    def name(self) -> str:
        return str(self.task.config.task)


@dataclass(frozen=True)
class Sources:
    """What suites are made from.

    Attributes:
        load: loads a fetched data set by path and name.
        count_tokens: of the model's tokenizer.
        background: local text; None takes what the suite was published with.
        samples: of each generated task and length.
        lengths: tokens of context, for suites that have none of their own.
        tasks: of the suite; none for all.
        seed: of generated samples.
        lessons: samples are to be trained on: every second one may ask on its way too.
    """

    load: Load
    count_tokens: CountTokens
    background: Background | None = None
    samples: int = 100
    lengths: tuple[int, ...] = ()
    tasks: tuple[str, ...] = ()
    seed: int = 0
    lessons: bool = False

    def chosen(self, known: Iterable[str]) -> list[str]:
        """The tasks asked for, in the suite's order. Raises ValueError on one it has not."""
        known = list(known)
        unknown = sorted(set(self.tasks) - set(known))
        for task in unknown:
            if task in NOWHERE:
                raise ValueError(f"tasks: {NOWHERE[task]}, so that {task!r} can't be asked")
        if unknown:
            raise ValueError(f"tasks: expected of {known}, got {unknown}")
        return [task for task in known if not self.tasks or task in self.tasks]

    def make(self, sample: Callable[[int], Sample]) -> list[Sample]:
        """As many as asked for, each by its number; several at once, since tokenizers count text
        outside of Python's lock."""
        with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as threads:
            return list(threads.map(sample, range(self.samples)))


def sample_task(name: str, samples: Sequence[Sample], score: Score, until: Sequence[str]) -> Task:
    """A task of lm-eval's from samples that are at hand, scored by score(row, answer)."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    rows = [sample.as_row() for sample in samples]
    first = samples[0]
    return ConfigurableTask(
        config={
            "task": name,
            "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(rows)},
            "test_split": "test",
            "output_type": "generate_until",
            "doc_to_text": lambda doc: doc["prompt"],
            "doc_to_target": lambda doc: " | ".join(doc["references"]),
            "gen_prefix": "prefix" if first.prefix else None,
            "target_delimiter": first.delimiter,
            "process_results": lambda doc, answers: {"score": score(doc, answers[0])},
            "metric_list": [{"metric": "score", "aggregation": "mean", "higher_is_better": True}],
            "generation_kwargs": {
                "until": list(until),
                "max_gen_toks": first.new_tokens,
                "do_sample": False,
            },
            "metadata": {"version": 1.0},
        }
    )


def zero_shot(sources: Sources) -> list[Planned]:
    """The columns of the paper's table, each as lm-eval has it."""
    return _from_lm_eval({name: ZERO_SHOT[name] for name in sources.chosen(ZERO_SHOT)}, sources)


def maths_and_code(sources: Sources) -> list[Planned]:
    """GSM8K, MATH, MMLU and GPQA as lm-eval has them, but for the reading of MATH's answers
    (`score_maths`); code that is run in the sandbox."""
    chosen = sources.chosen(MATHS_AND_CODE)
    theirs = {name: MATHS_AND_CODE[name] for name in chosen if name not in CODE_TASKS}
    with tasks_load_by(sources.load):
        ours = [Planned(CODE_TASKS[n](), n, MATHS_AND_CODE[n]) for n in chosen if n in CODE_TASKS]
    planned = _from_lm_eval(theirs, sources)
    for task in (p.task for p in planned if p.column == _MATH):
        task.set_config(key="process_results", value=score_maths)
    return planned + ours


def score_maths(doc: Mapping[str, Any], answers: Sequence[str]) -> dict[str, int]:
    """MATH's exact match, of what an answer boxes last, or if nothing, of what lm-eval reads.

    lm-eval 0.4.13 reads all from the first dollar to the last, and so calls the published solutions
    themselves wrong.

    >>> doc = {"solution": "So $x = \\\\boxed{\\\\frac{1}{2}}$."}
    >>> score_maths(doc, [doc["solution"]]), score_maths(doc, ["So $y=1$ and $\\\\boxed{2}$."])
    ({'exact_match': 1}, {'exact_match': 0})
    """
    from lm_eval.tasks.hendrycks_math import utils

    boxed = utils.last_boxed_only_string(answers[0])
    if boxed is None:
        return utils.process_results(dict(doc), list(answers))
    right = utils.remove_boxed(utils.last_boxed_only_string(doc["solution"]))
    return {"exact_match": int(utils.is_equiv(utils.remove_boxed(boxed), right))}


def longbench_e(sources: Sources) -> list[Planned]:
    """LongBench-E without its passage tasks, by buckets of each document's own length."""
    chosen = sources.chosen(LONGBENCH_E)
    planned = _from_lm_eval({f"longbench_{name}": ("score",) for name in chosen}, sources)
    return [Planned(p.task, p.column, p.metrics, buckets=LONGBENCH_BORDERS) for p in planned]


def _from_lm_eval(columns: Mapping[str, tuple[str, ...]], sources: Sources) -> list[Planned]:
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = task_manager()
    planned = []
    with tasks_load_by(sources.load):
        for column, metrics in columns.items():
            tasks: Any = manager.load([column])["tasks"]
            planned += [Planned(task, column, metrics) for task in tasks.values()]
    return planned


@cache
def task_manager() -> TaskManager:
    """lm-eval's tasks by name; made once, since that reads some ten thousand files."""
    return TaskManager()


def phonebook(sources: Sources) -> list[Planned]:
    """PhoneBook at each length."""
    planned = []
    for length in sources.lengths:
        samples = sources.make(
            lambda n, length=length: phonebook_sample(
                sources.seed + n, length, sources.count_tokens
            )
        )
        task = sample_task(
            f"phonebook_{length}",
            samples,
            lambda doc, answer: equals_line(answer, doc["references"][0]),
            ["\n"],
        )
        planned.append(Planned(task, "phonebook", ("score",), length, samples=samples))
    return planned


def variable_assignment(sources: Sources) -> list[Planned]:
    """Variable assignment traces at each length."""
    planned = []
    made = (assignment.assignment_sample, assignment.assignment_lesson)
    for length in sources.lengths:
        for name in sources.chosen(assignment.TASKS):
            samples = sources.make(
                lambda n, name=name, length=length: made[n % 2 if sources.lessons else 0](
                    name, sources.seed + n, length, sources.count_tokens
                )
            )
            task = sample_task(
                f"variable_assignment_{name}_{length}",
                samples,
                lambda doc, answer: equals_line(answer, doc["references"][0]),
                ["\n", ";"],
            )
            planned.append(Planned(task, name, ("score",), length, samples=samples))
    return planned


def ruler_suite(sources: Sources) -> list[Planned]:
    """RULER's tasks at each length."""
    chosen = sources.chosen(ruler.TASKS)
    background = sources.background
    if background is None:
        essays = rows_of(sources.load(_ESSAYS), "train")
        background = Background.from_texts(row["text"] for row in essays)
    questions = {task: _questions(task, sources.load) for task in chosen if task in ruler.QUESTIONS}
    planned = []
    for length in sources.lengths:
        for name in chosen:
            asked = questions.get(name, ())
            samples = sources.make(
                lambda n, name=name, length=length, asked=asked: ruler.ruler_sample(
                    name, sources.seed + n, length, sources.count_tokens, background, asked
                )
            )
            metric = contains_any if asked else contains_all
            task = sample_task(
                f"{name}_{length}",
                samples,
                lambda doc, answer, metric=metric: metric(answer, doc["references"]),
                [],
            )
            planned.append(Planned(task, name, ("score",), length, samples=samples))
    return planned


def _questions(task: str, load: Load) -> list[ruler.Question]:
    if task == "qa_1":
        rows = list(rows_of(load(_SQUAD), "validation"))
        articles: dict[str, dict[str, None]] = {}
        for row in rows:
            articles.setdefault(row["title"], {})[row["context"]] = None
        near = {title: tuple(paragraphs) for title, paragraphs in articles.items()}
        return [
            ruler.Question(
                row["question"],
                tuple(row["answers"]["text"]),
                (row["context"],),
                near[row["title"]],
            )
            for row in rows
            if row["answers"]["text"]
        ]
    return [
        ruler.Question(
            row["question"],
            (row["answer"],),
            tuple(
                f"{title}\n{''.join(sentences)}"
                for title, sentences in zip(
                    row["context"]["title"], row["context"]["sentences"], strict=True
                )
            ),
        )
        for row in rows_of(load(*_HOTPOT), "validation")
    ]


def babilong_suite(sources: Sources) -> list[Planned]:
    """BABILong at each length; length 0 is the facts alone.

    With a background, chains that are made here; else the published samples, whose lengths are 0 or
    multiples of 1024 ("4k"). Raises ValueError naming `lengths` on others.
    """
    chosen = sources.chosen(babilong.TASKS)
    planned = []
    background = sources.background and sources.background.without(babilong.WORLD_WORDS)
    odd = [] if background else [length for length in sources.lengths if length % 1024]
    if odd:
        raise ValueError(
            f"lengths: expected 0 or multiples of 1024 without --background, got {odd}"
        )
    for length in sources.lengths:
        published = None if background else sources.load(_BABILONG, f"{length // 1024}k")
        for name in chosen:
            if background:
                samples = sources.make(
                    lambda n, name=name, length=length: babilong.babilong_sample(
                        name, sources.seed + n, length, sources.count_tokens, background
                    )
                )
            else:
                rows = list(rows_of(published or {}, name))[: sources.samples]
                samples = [
                    babilong.published_sample(
                        name, length, row["input"], row["question"], row["target"]
                    )
                    for row in rows
                ]
            task = _babilong_task(name, length, samples)
            planned.append(Planned(task, name, ("score",), length, samples=samples))
    return planned


def _babilong_task(name: str, length: int, samples: Sequence[Sample]) -> Task:
    labels = babilong.LABELS[name]

    def score(doc: Mapping[str, Any], answer: str) -> float:
        return names_the_target(answer, doc["references"][0], doc["question"], labels)

    return sample_task(f"babilong_{name}_{length}", samples, score, ["\n"])


@dataclass(frozen=True)
class Suite:
    """How a suite is made, and over which of its columns the paper takes the mean.

    Attributes:
        plan: makes its tasks.
        mean_of: columns of the mean; None for all of them, () for no mean.
        generated: whether its samples are made to given lengths.
        lengths: those of the paper, or if it has none our choice, in tokens.
    """

    plan: Callable[[Sources], list[Planned]]
    mean_of: tuple[str, ...] | None = None
    generated: bool = False
    lengths: tuple[int, ...] = ()


SUITES = {
    "zero_shot": Suite(zero_shot),
    "maths_and_code": Suite(maths_and_code, mean_of=()),
    "longbench_e": Suite(longbench_e),
    "phonebook": Suite(phonebook, generated=True, lengths=(2048, 4096, 8192)),
    "variable_assignment": Suite(
        variable_assignment, generated=True, lengths=(512, 1024, 2048, 4096, 8192)
    ),
    "ruler": Suite(ruler_suite, generated=True, lengths=(4096, 8192, 16384)),
    "babilong": Suite(
        babilong_suite,
        mean_of=("qa1", "qa2", "qa3", "qa4", "qa5"),
        generated=True,
        lengths=(0, 4096, 8192, 16384),
    ),
}
