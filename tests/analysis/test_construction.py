"""The hand-set layer tracks five items under swaps, and only while a factor can be a swap."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from path_attention.analysis import construction as module
from path_attention.analysis.construction import (
    CLAIM,
    CLAIMS,
    ITEMS,
    NO,
    SWAPS,
    YES,
    exact_until,
    make_sequence,
    opposite_inputs,
    right_answers,
    swap_tracker,
)
from path_attention.analysis.swaps import AnalyzeSwaps
from path_attention.results import read_result


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_answers_follow_the_swaps():
    sequence = make_sequence(60, 3, rng())
    answers = dict(zip(sequence.places.tolist(), sequence.answers.tolist(), strict=True))
    items, kinds = list(range(ITEMS)), set()
    for place, token in enumerate(sequence.tokens.tolist()):
        if module.SWAP <= token < module.ASK:
            a, b = SWAPS[token - module.SWAP]
            items[a], items[b] = items[b], items[a]
        elif module.ASK <= token < CLAIM:
            assert answers.pop(place) == items[token - module.ASK]
        elif CLAIM <= token < YES:
            position, item = CLAIMS[token - CLAIM]
            answer = answers.pop(place)
            kinds.add(answer)
            assert answer == (YES if items[position] == item else NO)
    assert not answers and kinds == {YES, NO}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [0, 1])
def test_thousands_of_swaps_are_tracked(dtype, seed):
    sequence = make_sequence(6000, 40, rng(seed))
    right = right_answers(swap_tracker().to(dtype), sequence)
    assert right.all() and exact_until(sequence, right) == 6000


def test_every_claim_is_decided():
    """All 25 after the same swaps: five are right."""
    tokens = [*range(ITEMS), NO, *(module.SWAP + n for n in (0, 4, 7, 7, 2))]
    ids = torch.tensor([[*tokens, *range(CLAIM, YES)]])
    with torch.no_grad():
        answers = swap_tracker()(ids).logits[0, len(tokens) :].argmax(-1)
    items = list(range(ITEMS))
    for n in (0, 4, 7, 7, 2):
        a, b = SWAPS[n]
        items[a], items[b] = items[b], items[a]
    wanted = [YES if items[position] == item else NO for position, item in CLAIMS]
    assert answers.tolist() == wanted


def test_a_bound_below_two_forgets():
    """A swap keeps β − 1 of what it moves, so that scores fall to those of a wrong item."""
    sequence = make_sequence(3000, 20, rng())
    right = right_answers(swap_tracker(2 - 2**-7), sequence)
    assert 100 <= exact_until(sequence, right) < 1500
    later = right_answers(swap_tracker(2 - 2**-10), sequence)
    assert exact_until(sequence, later) > exact_until(sequence, right)


def test_strength_one_or_less_cannot_track():
    sequence = make_sequence(400, 4, rng())
    for bound in (0.5, 1.0):
        right = right_answers(swap_tracker(bound), sequence)
        assert exact_until(sequence, right) <= 8 and right.double().mean() < 0.6


def test_the_directions_are_swaps():
    plus, minus = opposite_inputs()
    up, down = F.silu(torch.tensor([plus, minus], dtype=torch.float64))
    assert abs(up + down) < 1e-6 * up
    assert torch.tensor([plus, minus]).bfloat16().double().tolist() == [plus, minus]


def test_where_answers_end_to_be_right():
    sequence = make_sequence(40, 10, rng())
    right = torch.ones(8, dtype=torch.bool)
    assert exact_until(sequence, right) == 40
    right[5] = False
    assert exact_until(sequence, right) == 20
    right[0] = False
    assert exact_until(sequence, right) == 0


@pytest.mark.parametrize(("swaps", "every", "name"), [(0, 1, "swaps"), (5, 0, "every")])
def test_bad_lengths_are_refused(swaps, every, name):
    with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
        make_sequence(swaps, every, rng())


def test_the_command_writes_its_result(tmp_path, capsys):
    options = {"swaps": 200, "every": 10, "beta_max": "2,1", "dtypes": "float32", "seeds": 2}
    AnalyzeSwaps(**options, device="cpu", out=tmp_path / "x").run()
    rows = read_result(tmp_path / "x.json")["rows"]
    last = [r for r in rows if r["swaps"] == 200]
    assert [(r["beta_max"], r["seed"]) for r in last] == [(2, 0), (2, 1), (1, 0), (1, 1)]
    assert [r["exact_until"] for r in last[:2]] == [200, 200] and last[2]["exact_until"] < 50
    assert all(r["right"] == 1 for r in rows if r["beta_max"] == 2)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert "all of them up to 200 swaps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtypes": "int8"}, "dtypes: expected some of float32, bfloat16, got 'int8'"),
        ({"seeds": 0}, "seeds: expected at least 1, got 0"),
        ({"beta_max": "2;1"}, "beta_max: expected numbers with commas between, got '2;1'"),
        ({"swaps": 10, "every": 20}, "every: expected at most 10 swaps, got 20"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AnalyzeSwaps(**options).measure(torch.device("cpu"), print)
