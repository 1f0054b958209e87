"""Tasks against literal oracles; groups against their axioms; training and tests apart."""

from __future__ import annotations

import doctest
import importlib
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from path_attention.tasks import task as task_module
from path_attention.tasks.flip_flop import IGNORE, ONE, READ, WRITE, ZERO, FlipFlop
from path_attention.tasks.group_words import GroupWords
from path_attention.tasks.groups import GROUPS, Completions, find_group
from path_attention.tasks.mqrar import FILLER, Mqrar
from path_attention.tasks.task import IGNORED, Task, start_seed, train_generator

QUICK = settings(deadline=None, max_examples=40)
SEEDS = st.integers(0, task_module.SEEDS - 1)


def generator(seed: int) -> torch.Generator:
    return train_generator(seed, "cpu")


@pytest.mark.parametrize("name", ["flip_flop", "group_words", "mqrar", "intervals"])
def test_worked_examples(name: str) -> None:
    module = importlib.import_module(f"path_attention.tasks.{name}")
    result = doctest.testmod(module)
    assert result.attempted > 1 and not result.failed


@given(seed=SEEDS, pairs=st.integers(2, 12), p_ignore=st.sampled_from([0.0, 0.1, 0.8, 1.0]))
@QUICK
def test_flip_flop_is_what_a_one_bit_machine_does(seed: int, pairs: int, p_ignore: float) -> None:
    task = FlipFlop(pairs=pairs, p_ignore=p_ignore)
    batch = task.sample(generator(seed), 4)
    assert batch.tokens.shape == batch.labels.shape == batch.level.shape == (4, task.length)
    for tokens, labels, level in zip(*(x.tolist() for x in batch), strict=True):
        assert tokens[0] == WRITE and tokens[-2] == READ
        stored, written = None, 0
        for n in range(pairs):
            instruction, bit = tokens[2 * n : 2 * n + 2]
            assert instruction in (WRITE, READ, IGNORE) and bit in (ZERO, ONE)
            assert labels[2 * n + 1] == IGNORED
            if instruction == WRITE:
                stored, written = bit, n
            if instruction == READ:
                assert labels[2 * n] == bit == stored
                assert level[2 * n] == min((n - written).bit_length() - 1, len(task.levels) - 1)
            else:
                assert labels[2 * n] == IGNORED
        if p_ignore == 1:
            assert set(tokens[2:-2:2]) <= {IGNORE}


def test_flip_flop_has_the_shares_it_says() -> None:
    n, pairs = 2000, 50
    tokens = FlipFlop(pairs=pairs, p_ignore=0.8).sample(generator(1), n).tokens
    inner = tokens[:, 2:-2:2]
    for instruction, share in ((IGNORE, 0.8), (WRITE, 0.1), (READ, 0.1)):
        deviation = (share * (1 - share) / inner.numel()) ** 0.5
        assert abs((inner == instruction).double().mean() - share) < 5 * deviation
    bits = tokens[:, 1::2][tokens[:, ::2] != READ]
    assert abs((bits == ONE).double().mean() - 0.5) < 5 * 0.5 / len(bits) ** 0.5


@pytest.mark.parametrize("name", GROUPS)
def test_groups_are_groups(name: str) -> None:
    group = find_group(name)
    table = torch.tensor(group.table)
    n = torch.arange(group.order)
    assert (table[0] == n).all() and (table[:, 0] == n).all()  # the identity
    for rows in (table, table.T):
        assert (rows.sort(1).values == n).all()  # so each element has an inverse
    assert (table[table] == table[:, table]).all()  # (a·b)·c = a·(b·c)
    assert group.order == {"A5": 60, "S5": 120, "S3": 6, "Z60": 60}[name]
    commutes = bool((table == table.T).all())
    assert commutes == (name == "Z60")
    assert {k: len(v) for k, v in group.kinds.items()} == {
        "A5": {"all": 60, "three_cycles": 20},
        "S5": {"all": 120, "swaps": 10},
        "S3": {"all": 6, "swaps": 3},
        "Z60": {"all": 60, "steps": 2},
    }[name]


def test_a5_is_not_solvable_and_s3_is() -> None:
    """The commutators of A5 generate A5; those of S3 a smaller group that commutes."""
    for name, derived in (("A5", 60), ("S3", 3), ("S5", 60)):
        group = find_group(name)
        table, inverse = group.table, [row.index(0) for row in group.table]
        found = {
            table[table[a][b]][table[inverse[a]][inverse[b]]]
            for a, b in itertools.product(range(group.order), repeat=2)
        }
        while len(more := {table[a][b] for a in found for b in found} | found) > len(found):
            found = more
        assert len(found) == derived


def elements(name: str) -> list[tuple[int, ...]]:
    def even(p: tuple[int, ...]) -> bool:
        return sum(a > b for a, b in itertools.combinations(p, 2)) % 2 == 0

    points = itertools.permutations(range(int(name[1:])))
    return [p for p in points if name[0] == "S" or even(p)]


def product(name: str, letters: list[int], kind: str) -> int:
    """By letting permutations act on points, from the last letter to the first."""
    if name == "Z60":
        return sum(find_group(name).kinds[kind][n] for n in letters) % 60
    known = elements(name)
    points = list(range(int(name[1:])))
    for letter in reversed(letters):
        moving = known[find_group(name).kinds[kind][letter]]
        points = [moving[x] for x in points]
    return known.index(tuple(points))


FORMS = [
    ("A5", "all"),
    ("A5", "three_cycles"),
    ("S5", "swaps"),
    ("S3", "swaps"),
    ("Z60", "all"),
    ("Z60", "steps"),
]


@given(seed=SEEDS, form=st.sampled_from(FORMS), letters=st.integers(2, 9))
@QUICK
def test_prefix_products_move_points_as_the_word_does(seed, form, letters: int) -> None:
    task = GroupWords(group=form[0], generators=form[1], letters=letters)
    batch = task.sample(generator(seed), 2)
    kinds = len(find_group(form[0]).kinds[form[1]])
    assert (batch.tokens[:, 0] == kinds).all() and kinds < task.vocab_size
    assert batch.tokens[:, 1:].max() < kinds and (batch.labels[:, 0] == IGNORED).all()
    for word, labels, level in zip(*(x[:, 1:].tolist() for x in batch), strict=True):
        assert labels == [product(form[0], word[: n + 1], form[1]) for n in range(letters)]
        assert level == list(range(letters))


@given(seed=SEEDS, letters=st.integers(3, 9))
@QUICK
def test_identity_words_are_marked_and_answered(seed: int, letters: int) -> None:
    task = GroupWords(group="A5", generators="three_cycles", form="identity", letters=letters)
    tokens, labels, level = (x.tolist() for x in task.sample(generator(seed), 4))
    for n in range(4):
        end = tokens[n].index(21)
        assert 3 <= end <= letters + 1 and set(tokens[n][end + 1 :]) <= {22}
        word = tokens[n][1:end]
        assert tokens[n][0] == 20 and max(word) < 20 and level[n][end] == len(word) - 1
        asked = [label for label in labels[n] if label != IGNORED]
        assert asked == [labels[n][end]] == [int(product("A5", word, "three_cycles") == 0)]


def test_half_of_the_identity_words_are_closed_and_every_length_comes() -> None:
    task = GroupWords(group="A5", generators="three_cycles", form="identity", letters=6)
    batch = task.sample(generator(0), 4000)
    answers = batch.labels[batch.labels != IGNORED]
    share = 0.5 + 0.5 / 60
    assert abs(answers.double().mean() - share) < 5 * 0.5 / len(answers) ** 0.5 + 0.01
    length = (batch.tokens == 21).long().argmax(1) - 1
    assert torch.bincount(length).tolist()[:2] == [0, 0]
    assert (torch.bincount(length)[2:] > 4000 / 5 * 0.8).all()


@pytest.mark.parametrize(("name", "kind", "letters"), [("A5", "three_cycles", 2), ("S3", "all", 1)])
def test_completions_are_all_the_words_that_undo(name: str, kind: str, letters: int) -> None:
    group, found = find_group(name), Completions(find_group(name), kind)
    assert found.letters == letters
    words = [
        {tuple(w) for w in found.words[g, : found.counts[g]].tolist()} for g in range(group.order)
    ]
    for g, undoing in enumerate(words):
        for word in undoing:
            p = g
            for letter in word:
                p = group.table[p][group.kinds[kind][letter]]
            assert p == 0
    assert sum(map(len, words)) == len(group.kinds[kind]) ** letters


def test_parity_leaves_swaps_no_completion_of_a_fixed_length() -> None:
    with pytest.raises(ValueError, match="generators: expected a set of S3 of which"):
        GroupWords(group="S3", generators="swaps", form="identity")


@pytest.mark.parametrize("form", ["prefix", "identity"])
def test_the_curriculum_leaves_out_longer_targets(form) -> None:
    task = GroupWords(group="A5", generators="three_cycles", form=form, letters=9)
    u = torch.rand(200, task.uniforms)
    whole, short = task.build(u), task.build(u, torch.tensor(4))
    places = short.level[short.labels != IGNORED] + 1
    assert places.max() == 4 and places.min() == (1 if form == "prefix" else 2)
    assert torch.equal(task.build(u, torch.tensor(9)).labels, whole.labels)


@given(
    seed=SEEDS,
    n_back=st.integers(1, 4),
    keys=st.integers(1, 4),
    pairs=st.integers(5, 30),
    p_query=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
)
@QUICK
def test_mqrar_is_what_a_list_of_assignments_says(seed, n_back, keys, pairs, p_query) -> None:
    task = Mqrar(n_back=n_back, keys=keys, values=5, pairs=pairs, p_query=p_query)
    batch = task.sample(generator(seed), 3)
    for tokens, labels, level in zip(*(x.tolist() for x in batch), strict=True):
        assigned: dict[int, list[tuple[int, int]]] = {}
        for n in range(pairs):
            key, second = tokens[2 * n : 2 * n + 2]
            assert 1 <= key <= keys and labels[2 * n + 1] == IGNORED
            past = assigned.setdefault(key, [])
            if second != FILLER:
                assert keys < second < task.vocab_size and labels[2 * n] == IGNORED
                past.append((second, n))
            elif len(past) < n_back:
                assert labels[2 * n] == IGNORED
            else:
                value, when = past[-n_back]
                assert labels[2 * n] == value
                gap = 2 * (n - when)
                assert level[2 * n] == min(gap.bit_length() - 1, len(task.levels) - 1)


TASKS: list[Task] = [
    FlipFlop(pairs=24),
    GroupWords(),
    GroupWords(group="A5", generators="three_cycles", form="identity"),
    Mqrar(pairs=24),
]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_training_and_tests_share_no_sequence(task: Task) -> None:
    """Long sequences alone: words of two letters are bound to be in both."""

    def long(tokens: torch.Tensor) -> set[tuple[int, ...]]:
        if getattr(task, "form", "prefix") == "identity":
            tokens = tokens[(tokens == 21).long().argmax(1) > 12]
        return {tuple(row) for row in tokens.tolist()}

    trained = set()
    for seed in range(3):
        trained |= long(task.sample(train_generator(seed, "cpu"), 500).tokens)
    seeds = [test.seed for test in (*task.tests(), *task.checks())]
    assert len(set(seeds)) == len(seeds)
    tested: list[set] = []
    for test in (*task.tests(), *task.checks()):
        drawn = test.task.sample(task_module.held_out_generator(test.seed, "cpu"), 500).tokens
        tested.append(long(drawn))
    assert all(trained.isdisjoint(found) for found in tested)
    assert all(a.isdisjoint(b) for a, b in itertools.combinations(tested, 2))


def test_seed_ranges_are_apart_where_the_generator_looks() -> None:
    """A CPU generator reads the low 32 bits alone."""
    low = [0, 1, task_module.SEEDS - 1]
    first = {
        "train": [train_generator(s, "cpu").initial_seed() for s in low],
        "start": [start_seed(s) for s in low],
        "test": [task_module.held_out_generator(s, "cpu").initial_seed() for s in low],
    }
    flat = [seed % 2**32 for seeds in first.values() for seed in seeds]
    assert len(set(flat)) == len(flat)
    spans = sorted((min(seeds), max(seeds)) for seeds in first.values())
    assert all(a[1] < b[0] for a, b in itertools.pairwise(spans))
    with pytest.raises(ValueError, match="seed: expected 0 to"):
        train_generator(task_module.SEEDS, "cpu")


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_sequences_are_a_pure_function_of_the_numbers(task: Task) -> None:
    one, two = (task.sample(generator(7), 5) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    u = torch.rand(6, task.uniforms)
    whole = task.build(u)
    for n in range(6):
        alone = task.build(u[n : n + 1])
        assert all(torch.equal(a[n : n + 1], b) for a, b in zip(whole, alone, strict=True))
    assert whole.tokens.max() < task.vocab_size and whole.level.max() < len(task.levels)
    assert max(task.build(torch.full((1, task.uniforms), 1 - 2**-24)).tokens[0]) < task.vocab_size


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: FlipFlop(pairs=1), "pairs: expected at least 2, got 1"),
        (lambda: FlipFlop(p_ignore=1.5), "p_ignore: expected 0 to 1, got 1.5"),
        (lambda: GroupWords(group="D4"), "group: expected one of"),
        (lambda: GroupWords(group="A5"), "generators: expected one of .* of A5, got 'swaps'"),
        (lambda: GroupWords(letters=1), "letters: expected at least 2, got 1"),
        (lambda: GroupWords(test_letters=9), "test_letters: expected at least 20, got 9"),
        (lambda: Mqrar(n_back=0), "n_back: expected at least 1, got 0"),
        (lambda: Mqrar(values=1), "values: expected at least 2, got 1"),
    ],
)
def test_bad_sizes_are_named(make, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        make()
