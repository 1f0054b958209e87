"""Swaps as a task to train on: its sequences, its tests by number of swaps, and the command."""

from __future__ import annotations

import pytest
import torch

from path_attention.analysis import construction as module
from path_attention.analysis.construction import ITEMS, NO, SWAPS, YES, swap_tracker
from path_attention.analysis.swaps_task import TrackedSwaps
from path_attention.analysis.swaps_trained import AnalyzeSwapsTrained
from path_attention.results import read_result
from path_attention.tasks.measure import measure
from path_attention.tasks.replicas import Replicas
from path_attention.tasks.task import IGNORED

SMALL = {"swaps": 2, "steps": 2, "batch": 2, "seeds": 2, "ends": "1,2,9", "answers": 20}


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_answers_are_those_of_swapping_by_hand():
    batch = TrackedSwaps(swaps=30).sample(rng(), 40)
    told = []
    for tokens, labels, level in zip(*(x.tolist() for x in batch), strict=True):
        assert tokens[:6] == [*range(ITEMS), NO] and labels[:6] == [IGNORED] * 6
        items = list(range(ITEMS))
        for n in range(6, len(tokens), 3):
            swap, ask, claim = tokens[n : n + 3]
            a, b = SWAPS[swap - module.SWAP]
            items[a], items[b] = items[b], items[a]
            position, item = module.CLAIMS[claim - module.CLAIM]
            told.append(items[position] == item)
            assert labels[n : n + 3] == [IGNORED, items[ask - module.ASK], YES if told[-1] else NO]
            assert level[n + 1 : n + 3] == [0, 1]
    assert len(told) == 1200
    # half are made right, and one in five of the others is: 0.6, five deviations either way
    assert abs(sum(told) / len(told) - 0.6) < 5 * (0.6 * 0.4 / len(told)) ** 0.5


def test_targets_begin_and_end_where_told():
    task = TrackedSwaps(swaps=5, first=3)
    u = torch.rand(4, task.uniforms, generator=rng())
    whole, part = TrackedSwaps(swaps=5).build(u), task.build(u, torch.tensor(4))
    assert torch.equal(whole.tokens, part.tokens)
    assert (part.labels[:, :12] == IGNORED).all() and (part.labels[:, 18:] == IGNORED).all()
    assert torch.equal(part.labels[:, 12:18], whole.labels[:, 12:18])


def test_parts_ask_after_their_swaps_and_the_construction_is_right():
    parts = TrackedSwaps().parts((1, 4, 40), 50)
    assert [(p.name, p.task.first, p.task.swaps) for p in parts] == [
        ("1", 1, 1),
        ("4", 2, 4),
        ("40", 5, 40),
    ]
    (found,) = measure(Replicas([swap_tracker()], "cpu"), parts, None)
    assert [c.counted for c in found] == [[50, 50], [51, 51], [144, 144]]
    assert all(c.errors == [0, 0] for c in found)
    (forgets,) = measure(Replicas([swap_tracker(1.0)], "cpu"), parts, None)
    assert forgets[-1].errors[0] > 72


def test_the_command_writes_its_result(tmp_path, capsys):
    AnalyzeSwapsTrained(**SMALL, device="cpu", out=tmp_path / "x").run()
    rows = read_result(tmp_path / "x.json")["rows"]
    trained = ["path", "rope"]
    rates = [row for row in rows if row["kind"] == "rate"]
    assert [(r["model"], r["learning_rate"], r["seed"]) for r in rates] == [
        (name, rate, seed) for name in trained for rate in (0.003, 0.01) for seed in (0, 1)
    ]
    swaps = [row for row in rows if row["kind"] == "seed"]
    assert {r["model"] for r in swaps} == {*trained, "hand_set"}
    for name in trained:
        own = [r for r in swaps if r["model"] == name]
        assert [(r["seed"], r["swaps"]) for r in own] == [(s, n) for s in (0, 1) for n in (1, 2, 9)]
        tried = [r for r in rates if r["model"] == name]
        mean = {r["learning_rate"]: 0.0 for r in tried}
        for r in tried:
            mean[r["learning_rate"]] += r["right"]
        assert {mean[r["learning_rate"]] for r in own} == {max(mean.values())}
    hand_set = [r for r in swaps if r["model"] == "hand_set"]
    assert [(r["questions"], r["claims"]) for r in hand_set] == [(1, 1)] * 3
    means = [r["claims"] for r in rows if (r["kind"], r["model"]) == ("mean", "rope")]
    assert means == [
        sum(r["claims"] for r in swaps if (r["model"], r["swaps"]) == ("rope", end)) / 2
        for end in (1, 2, 9)
    ]
    betas = [row for row in rows if row["kind"] == "beta"]
    assert [(r["model"], r["seed"], r["head"]) for r in betas] == [
        *(("path", seed, head) for seed in (0, 1) for head in (0, 1)),
        *(("hand_set", None, head) for head in (0, 1)),
    ]
    assert all(0.9 < r["beta_of_swaps"] < 1.1 for r in betas[:4])  # two steps from its start at 1
    assert all((r["beta_of_swaps"], r["beta_of_others"]) == (2, 0) for r in betas[4:])
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert "up to … swaps: 1: 1.000, 2: 1.000, 9: 1.000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ends": "4,2"}, r"ends: expected rising numbers from 1 on, got \[4, 2\]"),
        ({"ends": "0,2"}, r"ends: expected rising numbers from 1 on, got \[0, 2\]"),
        ({"ends": "a"}, "ends: expected numbers with commas between, got 'a'"),
        ({"learning_rates": ""}, "learning_rates: expected numbers with commas between, got ''"),
        ({"answers": 0}, "answers: expected at least 1, got 0"),
        ({"seeds": 0}, "seeds: expected at least 1, got 0"),
        ({"steps": 0}, "steps: expected at least 1, got 0"),
        ({"swaps": 0}, "swaps: expected at least 1, got 0"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AnalyzeSwapsTrained(**(SMALL | options)).measure(torch.device("cpu"), print)


def test_a_task_begins_within_its_swaps():
    with pytest.raises(ValueError, match="first: expected 1 to 5, got 6"):
        TrackedSwaps(swaps=5, first=6)
