"""Generated suites: samples fit their length, can be answered, and their metrics tell right from
wrong; worked examples in docstrings are run too.
"""

from __future__ import annotations

import doctest
import importlib
import re
from collections import Counter

import numpy as np
import pytest

from path_attention.evaluation.generated import babilong, ruler
from path_attention.evaluation.generated.babilong_worlds import WORLDS
from path_attention.evaluation.generated.background import Background
from path_attention.evaluation.generated.metrics import (
    contains_all,
    contains_any,
    equals_line,
    names_the_target,
)
from path_attention.evaluation.generated.phonebook import phonebook_sample
from path_attention.evaluation.generated.ruler import Question, ruler_sample
from path_attention.evaluation.generated.sample import Sample, fill

LETTERS = "bcdfghklmnprstvz"
WORDS = [a + v + b for a in LETTERS for v in "aeiou" for b in LETTERS]
BACKGROUND = Background.from_texts(
    [" ".join(f"X {' '.join(WORDS[(9 * n) % 1270 :][:9])}." for n in range(400))]
)
QUESTIONS = tuple(
    Question(f"What is {n}?", (f"answer{n}", "or another"), (f"It is answer{n}.", f"More {n}."))
    for n in range(40)
)
MODULES = (
    *("generated.background", "generated.sample", "generated.metrics", "generated.phonebook"),
    *("generated.babilong", "generated.assignment", "intervals", "harness.answers"),
    *("harness.run", "harness.sandbox", "harness.suites"),
)


def count(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", text))


@pytest.mark.parametrize("module", MODULES)
def test_worked_examples(module):
    found = doctest.testmod(importlib.import_module(f"path_attention.evaluation.{module}"))
    assert found.attempted and not found.failed


@pytest.mark.parametrize("length", [1500, 6000])
@pytest.mark.parametrize("task", ruler.TASKS)
def test_ruler_fits_and_can_be_answered(task, length):
    samples = [ruler_sample(task, s, length, count, BACKGROUND, QUESTIONS) for s in (0, 1)]
    assert samples[0] != samples[1]
    assert samples[0] == ruler_sample(task, 0, length, count, BACKGROUND, QUESTIONS)
    for sample in samples:
        used = count(sample.text) + sample.new_tokens
        assert used <= length
        if task not in ruler.QUESTIONS:  # those end when their documents do
            assert used > 0.9 * length
        assert all(reference in sample.prompt for reference in sample.references[:1])
        metric = contains_any if task in ruler.QUESTIONS else contains_all
        assert metric(f"{' and '.join(sample.references)}.", sample.references) == 1
        assert metric("nothing of it", sample.references) == 0


def test_ruler_asks_for_what_its_paper_says():
    made = {t: ruler_sample(t, 3, 3000, count, BACKGROUND, QUESTIONS) for t in ruler.TASKS}
    counts = {task: len(sample.references) for task, sample in made.items()}
    expected = {"niah_multivalue": 4, "niah_multiquery": 4, "vt": 5, "cwe": 10, "fwe": 3}
    assert {t: n for t, n in counts.items() if n > 1 and t not in ruler.QUESTIONS} == expected
    assert made["niah_multikey_1"].prompt.count("One of the special magic") == 4
    assert made["niah_multivalue"].prompt.count("One of the special magic") == 4
    words = Counter(re.findall(r"\d+\. (\w+)", made["cwe"].prompt.rsplit("Below", 1)[1]))
    assert {w for w, _ in words.most_common(10)} == set(made["cwe"].references)
    coded = Counter(made["fwe"].prompt.split("coded words. ", 1)[1].split("\n")[0].split())
    assert [w for w, _ in coded.most_common(4)][1:] == list(made["fwe"].references)
    with pytest.raises(ValueError, match=r"lengths: expected room for \d+ tokens.*asked by cwe"):
        ruler_sample("cwe", 0, 200, count, BACKGROUND)


def test_no_other_needle_has_the_key_that_is_asked_for():
    few = Background(("One two ten.",))
    for seed in range(20):
        sample = ruler_sample("niah_multikey_2", seed, 600, count, few)
        asked = sample.prefix.split(" for ")[1].split(" mentioned")[0]
        assert sample.prompt.count(f"numbers for {asked} is") == 1


def test_the_three_most_frequent_words_stand_alone():
    """Of so few words, Zipf's law alone gives the third and the fourth the same count."""
    for length in range(190, 250, 6):
        sample = ruler_sample("fwe", 0, length, count, BACKGROUND)
        coded = Counter(sample.prompt.split("coded words. ", 1)[1].split("\n")[0].split())
        most = [n for w, n in coded.most_common(5) if w != "..."]
        assert most[2] > most[3] if len(most) > 3 else len(most) == 3


def test_other_documents_are_of_the_same_article_first():
    """As in RULER, which fills a context with a question's own article before any other."""
    articles = [tuple(f"Of {n}: part {m}." for m in range(9)) for n in range(9)]
    questions = [Question("What?", (doc,), (doc,), near) for near in articles for doc in near]
    for room in (4, 20):
        length = count(ruler_sample("qa_1", 30, 140, count, BACKGROUND, questions).text) + 10 * room
        sample = ruler_sample("qa_1", 30, length, count, BACKGROUND, questions)
        found = re.findall(r"Of (\d): part (\d)", sample.prompt)
        own = [m for n, m in found if n == "3"]
        assert len(set(found)) == len(found) and len(set(own)) == len(own) == min(len(found), 9)
        assert "3" in own and (len(found) < 9) == (room == 4)


def test_needles_stand_at_every_depth():
    depths = []
    for seed in range(60):
        sample = ruler_sample("niah_single_1", seed, 1200, count, BACKGROUND)
        depths.append(sample.prompt.index("One of the special") / len(sample.prompt))
    assert min(depths) < 0.15 and max(depths) > 0.8 and 0.35 < np.mean(depths) < 0.65


@pytest.mark.parametrize("task", babilong.TASKS)
def test_chains_hide_their_facts_in_order(task):
    hay = BACKGROUND.without(babilong.WORLD_WORDS)
    answers = Counter()
    for seed in range(40):
        facts, question, answer = WORLDS[task](np.random.default_rng([seed, 0]))
        sample = babilong.babilong_sample(task, seed, 1500, count, hay)
        assert count(sample.text) + sample.new_tokens <= 1500
        context = sample.prompt.split("<context>")[1].split("</context>")[0]
        places, start = [], 0
        for fact in facts:
            start = context.index(fact, start) + len(fact)
            places.append(start)
        assert places == sorted(places) and sample.question == question
        right, labels = sample.references[0], babilong.LABELS[task]
        assert right == answer
        assert names_the_target(f"It is {right}.", right, question, labels) == 1
        wrong = [x for x in labels if x not in right.split(",") and x.lower() not in question]
        wrong = [x for x in wrong if not any(x in y or y in x for y in right.split(","))]
        assert all(names_the_target(f"{x}.", right, question, labels) == 0 for x in wrong)
        answers[answer] += 1
    assert len(answers) > 1


def replay(facts: list[str]) -> tuple[dict[str, str], dict[str, list[str]], dict[str, str]]:
    """Where people are, where things have been, who holds them: read off the sentences alone."""
    where, trail, holder = {}, {}, {}
    for fact in facts:
        words = fact.removesuffix(".").split()
        person, last = words[0], words[-1]
        if last in babilong.LABELS["qa1"]:
            where[person] = last
            for thing in [t for t, who in holder.items() if who == person]:
                trail[thing].append(last)
        elif any(f" {verb} the " in fact for verb in ("got", "took", "grabbed", "picked up")):
            holder[last] = person
            trail.setdefault(last, [where[person]])
            assert trail[last][-1] == where[person]
        else:
            assert holder.pop(last) == person
    return where, trail, holder


def test_answers_follow_from_the_facts():
    for seed in range(200):
        for task in ("qa1", "qa2", "qa3", "qa7", "qa8"):
            facts, question, answer = WORLDS[task](np.random.default_rng(seed))
            where, trail, holder = replay(facts)
            words = question.removesuffix("?").split()
            if task == "qa1":
                assert where[words[-1]] == answer
            elif task == "qa2":
                assert trail[words[-1]][-1] == answer
            elif task == "qa3":
                rooms = trail[words[3]]
                assert rooms.count(words[-1]) == 1
                assert rooms[rooms.index(words[-1]) - 1] == answer
            else:
                held = sorted(thing for thing, who in holder.items() if who == words[-2])
                counts = ("none", "one", "two", "three")
                assert answer == (
                    counts[len(held)] if task == "qa7" else ",".join(held) or "nothing"
                )


def test_phonebook_is_a_copy_task():
    asked = set()
    for seed in range(30):
        sample = phonebook_sample(seed, 600, count)
        book, shots, name = sample.prompt.split("\n\n")
        lines = book.splitlines()
        assert len(set(lines)) == len(lines) and len(shots.splitlines()) == 2
        assert all(re.fullmatch(r"[A-Z]\w+ [A-Z]\w+: [1-9]\d{9}", line) for line in lines)
        assert f"{name} {sample.references[0]}" in lines
        assert f"{name} {sample.references[0]}" not in shots
        assert 550 < count(sample.text) + sample.new_tokens <= 600
        asked.add(lines.index(f"{name} {sample.references[0]}"))
    assert len(asked) > 15
    assert equals_line(f" {sample.references[0]}\nAnd", sample.references[0]) == 1
    assert equals_line(f" {sample.references[0]}1", sample.references[0]) == 0
    with pytest.raises(ValueError, match="lengths: expected room"):
        phonebook_sample(0, 20, count)


def test_a_background_must_have_sentences_and_words():
    with pytest.raises(ValueError, match="background: expected text with sentences"):
        Background.from_texts(["   "])
    with pytest.raises(ValueError, match="background: expected text with at least"):
        ruler_sample("niah_single_2", 0, 900, count, Background(("It is so.",)))
    few = Background(("One.", "Two.", "Three."))
    assert few.draw(np.random.default_rng(0), 7)[3:6] == few.draw(np.random.default_rng(0), 3)


@pytest.mark.parametrize("sizes", ["same", "mixed", "growing", "nothing at first"])
def test_fill_takes_the_most_that_fits(sizes):
    """Against trying every number, with as many texts counted as a straight line needs."""
    rng = np.random.default_rng(0)
    per_unit = {
        "same": np.full(5000, 7),
        "mixed": rng.integers(1, 60, 5000),
        "growing": np.arange(5000) // 50,
        "nothing at first": np.repeat([0, 9], [100, 4900]),
    }[sizes]
    ends = np.concatenate([[0], per_unit.cumsum()])
    counted = []

    def count_units(text: str) -> int:
        counted.append(text)
        return 20 + int(ends[len(text)])

    for length in (30, 1000, 4096, 8191):
        for most in (3, 400, 5000):
            counted.clear()
            found = fill(
                lambda units, length=length: Sample("x" * units, "", ("y",), 10, length),
                count_units,
                least=0,
                most=most,
            )
            fits = [units for units in range(most + 1) if 20 + ends[units] + 10 <= length]
            assert len(found.prompt) == max(fits)
            assert len(counted) <= (5 if sizes == "same" else 24)
