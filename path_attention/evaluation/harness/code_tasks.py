"""HumanEval, MBPP and MBPP+ as tasks of lm-eval whose programs run in the sandbox.

Prompts, stops and few-shot examples are lm-eval's. Its own tasks fetch a metric from the hub when
they are imported, run code without walls, and test MBPP+ by MBPP's three assertions only; here
MBPP+ is tested by its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import datasets
from lm_eval.api.task import ConfigurableTask, Task

from path_attention.evaluation.harness.sandbox import run_code

_MBPP = ("google-research-datasets/mbpp", "full")
_MBPP_PLUS = "evalplus/mbppplus"
_SHOTS = (2, 3, 4)  # of MBPP's split "prompt"


def human_eval_program(doc: Mapping[str, Any], answer: str) -> str:
    """The prompt's function, gone on with, and the check of it."""
    return f"{doc['prompt']}{answer}\n{doc['test']}\ncheck({doc['entry_point']})\n"


def mbpp_program(doc: Mapping[str, Any], answer: str) -> str:
    """The answer and the assertions; of MBPP+ its own test."""
    tests = doc.get("test") or "\n".join([doc.get("test_setup_code") or "", *doc["test_list"]])
    return f"{answer}\n{tests}\n"


def _passes(program: Callable[[Mapping[str, Any], str], str]) -> Callable[..., dict[str, float]]:
    def score(doc: Mapping[str, Any], answers: list[str]) -> dict[str, float]:
        return {"pass@1": float(run_code(program(doc, answers[0])).passed)}

    return score


def _mbpp_text(doc: Mapping[str, Any]) -> str:
    what = doc.get("text") or doc["prompt"]
    tests = "\n".join(doc["test_list"][:3])
    return (
        f"You are an expert Python programmer, and here is your task: {what} Your code should pass "
        f"these tests:\n\n{tests}\n[BEGIN]\n"
    )


def _metric() -> list[dict[str, Any]]:
    return [{"metric": "pass@1", "aggregation": "mean", "higher_is_better": True}]


def human_eval() -> Task:
    """HumanEval, without examples. Loads its data as `datasets.load_dataset` stands."""
    return ConfigurableTask(
        config={
            "task": "humaneval",
            "dataset_path": "openai/openai_humaneval",
            "test_split": "test",
            "output_type": "generate_until",
            "doc_to_text": lambda doc: doc["prompt"],
            "doc_to_target": lambda doc: doc["canonical_solution"],
            "process_results": _passes(human_eval_program),
            "metric_list": _metric(),
            "generation_kwargs": {
                "until": ["\nclass", "\ndef", "\n#", "\nif", "\nprint"],
                "max_gen_toks": 1024,
                "do_sample": False,
            },
            "num_fewshot": 0,
            "metadata": {"version": 1.0},
        }
    )


def _mbpp(name: str, load: Callable[..., Any]) -> Task:
    return ConfigurableTask(
        config={
            "task": name,
            "custom_dataset": load,
            "test_split": "test",
            "fewshot_split": "prompt",
            "fewshot_config": {
                "sampler": "first_n",
                "process_docs": lambda rows: rows.filter(lambda row: row["task_id"] in _SHOTS),
            },
            "output_type": "generate_until",
            "doc_to_text": _mbpp_text,
            "doc_to_target": lambda doc: f"{doc['code']}\n[DONE]",
            "target_delimiter": "",
            "process_results": _passes(mbpp_program),
            "metric_list": _metric(),
            "generation_kwargs": {"until": ["[DONE]"], "max_gen_toks": 512, "do_sample": False},
            "num_fewshot": 3,
            "metadata": {"version": 1.0},
        }
    )


def mbpp() -> Task:
    """MBPP's 500 test programs, after three examples."""
    return _mbpp("mbpp", lambda **_: datasets.load_dataset(*_MBPP))


def mbpp_plus() -> Task:
    """MBPP+: 378 of them with many more tests, after MBPP's examples."""

    def load(**_: Any) -> dict[str, Any]:
        plus: Any = datasets.load_dataset(_MBPP_PLUS)
        shots: Any = datasets.load_dataset(*_MBPP)
        return {"test": plus["test"], "prompt": shots["prompt"]}

    return _mbpp("mbpp_plus", load)


CODE_TASKS: dict[str, Callable[[], Task]] = {
    "humaneval": human_eval,
    "mbpp": mbpp,
    "mbpp_plus": mbpp_plus,
}
