"""Variable assignment traces: Python itself says what is right; solved samples are token for token
what the evaluation asks.
"""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
import torch

from path_attention.evaluation.generated.assignment import (
    TASKS,
    Tracer,
    assignment_lesson,
    assignment_sample,
)
from path_attention.evaluation.generated.sample import Sample
from path_attention.evaluation.generated.solved import AnswerTokens, solve, write_solved
from path_attention.training.objective import Objective
from path_attention.training.rows import IGNORED, PackedRows
from path_attention.training.tokenizer import train_tokenizer

CONSTANT, COPY, SWAP = r"[a-z] = \d", r"[a-z] = [a-z]", r"([a-z]), ([a-z]) = \2, \1"


def count(text: str) -> int:
    return len(re.findall(r"\w|[^\w\s]", text))


def run(statements) -> dict[str, int]:
    """What Python makes of them."""
    names: dict = {}
    exec("; ".join(statements), {"__builtins__": {}}, names)
    return names


def distance(statements, asked: str) -> int:
    """Statements behind the constant that a variable holds: constants run as their own places."""
    places = [re.sub(r"\d", str(n), line) for n, line in enumerate(statements)]
    return len(places) - 1 - run(places)[asked]


@pytest.mark.parametrize("task", TASKS)
def test_python_agrees(task) -> None:
    answers, distances = Counter(), []
    for seed in range(150):
        tracer = Tracer(task, np.random.default_rng(seed))
        for statements in (40, 5, 13):  # in any order
            trace = tracer.trace(statements)
            assert len(trace.statements) == statements
            assert run(trace.statements) == trace.values
            asked = trace.asked[0]
            assert trace.distance == distance(trace.statements, asked)
        kinds = Counter(
            next(kind for kind in (CONSTANT, COPY, SWAP) if re.fullmatch(kind, line))
            for line in tracer.trace(40).statements
        )
        if task == "swaps":
            assert kinds == {CONSTANT: 5, SWAP: 35}
            assert sorted(trace.values.values()) == sorted(set(trace.values.values()))
        elif task == "last_value":
            assert kinds == {CONSTANT: 40}
            distances.append(tracer.trace(40).distance)
        answers[tracer.trace(40).values[asked]] += 1
    assert len(answers) == 10 and max(answers.values()) < 35  # of 150: no digit stands out
    if task == "last_value":
        assert min(distances) < 4 and max(distances) > 30
        # uniform over 35 places: deviation of a mean of 150 is 10.1 / √150
        assert abs(np.mean(distances) - 17) < 4 * 10.1 / 150**0.5


def test_a_mixed_trace_is_given_up_once_in_25_statements() -> None:
    found = [Tracer("mixed", rng(seed)).trace(1000).distance for seed in range(200)]
    # geometric with a mean and a deviation of 24 to 25, ends cut far beyond
    assert abs(np.mean(found) - 24) < 4 * 25 / 200**0.5


def test_shares_of_mixed() -> None:
    lines = [line for s in range(30) for line in Tracer("mixed", rng(s)).trace(105).statements[5:]]
    shares = [sum(bool(re.fullmatch(k, line)) for line in lines) for k in (CONSTANT, COPY, SWAP)]
    sigma = (3000 * 0.25) ** 0.5
    assert all(abs(n - 3000 * p) < 4 * sigma for n, p in zip(shares, (0.2, 0.2, 0.6), strict=True))


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("task", TASKS)
def test_samples_fill_their_length(task) -> None:
    for seed in range(20):
        sample = assignment_sample(task, seed, 300, count)
        assert 285 < count(sample.text) + sample.new_tokens <= 300
        assert sample == assignment_sample(task, seed, 300, count)
        assert sample.prompt != assignment_sample(task, seed + 1, 300, count).prompt
        *statements, asked = sample.prompt.split("; ")
        values = run(statements)
        name = re.search(r"\((.)\)", asked)[1]
        assert sample.difficulty == distance(statements, name)
        told = [(asked, sample.references[0]), *sample.more]
        found = {re.search(r"print\((.)\) ->$", text)[1]: int(answer) for text, answer in told}
        assert found == values


@pytest.mark.parametrize("task", TASKS)
def test_lessons_ask_on_their_way(task) -> None:
    asked_on_the_way = 0
    for seed in range(20):
        lesson = assignment_lesson(task, seed, 300, count)
        if task == "last_value":
            assert lesson == assignment_sample(task, seed, 300, count)
            continue
        text = "".join(f"{asked} {answer}" for asked, answer in lesson.questions)
        short = text[: text.rindex(lesson.questions[-4][0])]  # to the first answer at the end
        assert 270 < count(short) <= 300
        names: dict = {}
        for part in text.split("; "):
            told = re.fullmatch(r"print\((.)\) -> (\d)", part)
            if told:
                assert names[told[1]] == int(told[2])
            else:
                exec(part, {"__builtins__": {}}, names)
        tail = [re.search(r"\((.)\)", asked)[1] for asked, _ in lesson.questions[-5:]]
        assert sorted(tail) == sorted(names)
        asked_on_the_way += len(lesson.questions) - 5
    assert task == "last_value" or 20 * 4 < asked_on_the_way < 20 * 12


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="^task: expected one of"):
        Tracer("loops", rng(0))
    with pytest.raises(ValueError, match="^variables: expected 2 to 26, got 1"):
        Tracer("swaps", rng(0), 1)
    with pytest.raises(ValueError, match="^statements: expected at least 5, got 4"):
        Tracer("swaps", rng(0)).trace(4)
    with pytest.raises(ValueError, match="^lengths: expected room for"):
        assignment_sample("swaps", 0, 20, count)


@pytest.fixture(scope="module")
def tokenizer():
    text = " ".join(assignment_sample("mixed", seed, 200, count).text for seed in range(20))
    return train_tokenizer([text], 300)


def test_a_solved_sample_is_what_is_asked(tokenizer) -> None:
    from path_attention.evaluation.harness.language_model import starts_texts

    assert starts_texts(tokenizer)
    sample = Sample("Who?", "It is", ("Ann", "Bo"), 8, 64, more=(("; and", "Cy"),))
    ids, answers = solve(sample, tokenizer, starts=True)
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert ids[0] == begin and ids[-1] == end and not answers[0] and answers[-1]
    asked = ids[: answers.index(True)]
    assert asked == tokenizer.encode("Who? It is")  # the prompt of an evaluation
    written = tokenizer.decode([i for i, a in zip(ids, answers, strict=True) if a][:-1])
    assert written == " Ann, Bo Cy"
    assert tokenizer.decode(ids[1:-1]) == "Who? It is Ann, Bo; and Cy"


def test_held_out_samples_are_of_every_form_and_begin_as_none_that_is_trained_on(
    tokenizer, tmp_path
) -> None:
    """A short trace begins the longer one of its seed; every second sample is a lesson."""
    made = (assignment_sample, assignment_lesson)
    found = [
        (f"swaps_{length}/{n}", made[n % 2]("swaps", n, length, count))
        for length in (60, 90)
        for n in range(72)
    ]
    names, samples = zip(*found, strict=True)
    corpus = write_solved(tmp_path / "c", names, samples, tokenizer, starts=False)
    held = [int(n) for n in corpus.documents("heldout")]
    assert {name.split("/")[0] for name in map(names.__getitem__, held)} == {"swaps_60", "swaps_90"}
    assert {int(names[n].split("/")[1]) % 2 for n in held} == {0, 1}
    opening = [sample.prompt.split("; ")[:5] for sample in samples]  # the constants
    others = [opening[n] for n in range(len(names)) if n not in held]
    assert not [n for n in held if opening[n] in others]


def test_answers_alone_are_trained_on(tokenizer, tmp_path) -> None:
    from path_attention.models import PathAttentionConfig, PathAttentionForCausalLM

    samples = [assignment_sample("swaps", seed, 60, count) for seed in range(64)]
    names = [f"swaps/{n}" for n in range(64)]
    corpus = write_solved(tmp_path / "c", names, samples, tokenizer, starts=True)
    assert corpus.info["heldout_documents"] == 2 and corpus.names == names
    assert corpus.info["heldout_documents_also_in_training"] == 0
    objective = AnswerTokens(corpus)
    rows = PackedRows(corpus, "train", context_length=500, row_tokens=700, seed=0)
    row = rows.row(3)
    labels = objective.labels(row)
    assert torch.equal(row.input_ids[labels != IGNORED], labels[labels != IGNORED])
    pieces = row.input_ids[0].split(row.packing.lengths)
    marked = labels[0].split(row.packing.lengths)
    whole = [len(p) == len(corpus.document(d)) for p, d in zip(pieces, row.documents, strict=True)]
    assert not all(whole) and sum(whole) > 3  # a row's edges cut one
    for piece, mark, document, all_there in zip(pieces, marked, row.documents, whole, strict=True):
        kept = piece[mark != IGNORED]
        if not all_there:
            assert not len(kept)
            continue
        answers = [samples[document].references[0], *(a for _, a in samples[document].more)]
        assert tokenizer.decode(kept[:-1]).split() == answers
        assert kept[-1] == tokenizer.eos_token_id
    config = PathAttentionConfig.from_preset(
        "path", vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=16,
    )  # fmt: skip
    model = PathAttentionForCausalLM(config)
    found = objective.loss(model, row, row.targets, torch.device("cpu"))
    logits = model(row.input_ids, packing=row.packing).logits[0, :-1]
    mean = torch.nn.functional.cross_entropy(logits, labels[0, 1:], ignore_index=IGNORED)
    torch.testing.assert_close(found, mean, rtol=1e-5, atol=0)
    assert not objective.can_split and Objective().can_split
