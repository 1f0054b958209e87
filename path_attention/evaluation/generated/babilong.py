"""BABILong-style chains: facts of a small world hidden one by one in background text.

Ten kinds of question after bAbI (arXiv 1502.05698) in the prompt's form and with the metric of
BABILong (arXiv 2406.10149): qa1 to qa3 ask over one, two and three facts, qa4 and qa5 over
relations of two and three, qa6 and qa9 yes or no, qa7 for a count, qa8 for a list, qa10 under
uncertainty.
The worlds are simulated here, so the samples are not BABILong's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from path_attention.evaluation.generated.babilong_prompts import PROMPTS, Prompt
from path_attention.evaluation.generated.babilong_worlds import WORLDS
from path_attention.evaluation.generated.background import Background
from path_attention.evaluation.generated.sample import CountTokens, Sample, fill, insert

TASKS = tuple(WORLDS)
_NEW_TOKENS = 20
_ROOMS = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
_YES_NO = ("yes", "no")
LABELS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("qa1", "qa2", "qa3", "qa4"), _ROOMS),
    "qa5": ("Bill", "Fred", "Jeff", "Mary", "apple", "football", "milk"),
    "qa6": _YES_NO,
    "qa7": ("none", "one", "two", "three"),
    "qa8": ("apple", "football", "milk", "nothing"),
    "qa9": _YES_NO,
    "qa10": (*_YES_NO, "maybe"),
}
# What a background must not say, since it could be taken for a fact.
WORLD_WORDS = (
    *_ROOMS,
    "apple",
    "football",
    "milk",
    *("Mary", "John", "Daniel", "Sandra", "Bill", "Fred", "Jeff"),
)


def babilong_sample(
    task: str,
    seed: int,
    length: int,
    count_tokens: CountTokens,
    background: Background,
) -> Sample:
    """One sample: the chain's facts, in their order, between sentences of the background.

    Args:
        task: "qa1" to "qa10".
        seed: each gives another sample.
        length: tokens of context, answer included; 0 for the facts alone ("0k").
        count_tokens: of a text.
        background: without `WORLD_WORDS` (see `Background.without`).

    Raises:
        ValueError: naming `lengths` if the facts do not fit, `task` if there is no such.

    >>> sample = babilong_sample("qa1", 0, 0, len, Background(("It rained.",)))
    >>> print(sample.prompt[sample.prompt.index("<context>"):])  # doctest: +ELLIPSIS
    <context>
    ...
    </context>
    Question: Where is ...?
    """
    if task not in WORLDS:
        raise ValueError(f"task: expected one of {list(TASKS)}, got {task!r}")
    facts, question, answer = WORLDS[task](np.random.default_rng([seed, 0]))

    def build(sentences: int) -> Sample:
        rng = np.random.default_rng([seed, 1])
        places = np.sort(rng.random(len(facts))) * (sentences + 1)
        hay = background.draw(rng, sentences)
        context = " ".join(insert(hay, facts, places.astype(int).tolist()))
        return published_sample(task, length, context, question, answer)

    if length == 0:
        return build(0)
    return fill(build, count_tokens, least=0, most=100_000)


def babilong_prompt(prompt: Prompt, context: str, question: str) -> str:
    """Instruction, solved examples, the form of an answer, context, question."""
    examples = "\n".join(
        f"<example>\n{text}\nAnswer: {answer}\n</example>" for text, answer in prompt.examples
    )
    parts: Sequence[str] = (
        prompt.instruction,
        examples,
        prompt.form,
        f"<context>\n{context}\n</context>",
        f"Question: {question}",
    )
    return "\n".join(parts)


def published_sample(task: str, length: int, context: str, question: str, answer: str) -> Sample:
    """A sample of the published data set in the same form."""
    prompt = babilong_prompt(PROMPTS[task], context, question)
    return Sample(prompt, "Answer:", (answer,), _NEW_TOKENS, length, question, "\n")
