"""Continuous batching: every answer is that of the same request alone, and memory comes back."""

from __future__ import annotations

import math
import threading
import time

import pytest
import torch
from small_server import Asked, gauge, make_ids, make_model, wait_for

from path_attention.models import PRESETS
from path_attention.models.cache import CACHE_NAME
from path_attention.serving.request import Refused, Sampling
from path_attention.serving.rows import step_rows

PROMPTS = [make_ids(n, seed=n) for n in (1, 2, 3, 5, 64, 65, 130, 150, 33, 201, 7)]


def best(model, prompt: list[int], answer: list[int]) -> list[int]:
    """What a plain forward pass takes for likeliest in place of each token of an answer."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(1).tolist()


@pytest.mark.parametrize("preset", PRESETS)
def test_greedy_answers_are_the_models_own(make, preset: str) -> None:
    """Of every encoding, mixed lengths together, prompts in pieces; no prefix can be shared."""
    model = make_model(preset)
    engine = make(model, prefill_tokens=40, max_rows=6)
    asked = [Asked(engine, prompt) for prompt in PROMPTS[::2]]
    for prompt, one in zip(PROMPTS[::2], asked, strict=True):
        ids = one.ids()
        assert len(ids) == 12 and best(model, prompt, ids) == ids


@pytest.mark.parametrize("preset", ["path_fox", "rope", "rotation_learned", "path_linear"])
def test_a_rows_logits_do_not_depend_on_the_others(preset: str) -> None:
    """Bit for bit, at any place in the batch and beside any number of rows."""
    model = make_model(preset)

    def run(prompts: list[list[int]]) -> list[torch.Tensor]:
        caches = []
        for prompt in prompts:
            with torch.no_grad():
                caches.append(model(torch.tensor([prompt]))[CACHE_NAME])
        return [
            torch.cat(rows)
            for rows in zip(
                *(step_rows(model, caches, [[n]] * len(caches)) for n in (5, 6, 7)), strict=True
            )
        ]

    alone = [run([prompt])[0] for prompt in PROMPTS]
    for some in (PROMPTS[:3], PROMPTS[::-1], PROMPTS[4:]):
        for prompt, logits in zip(some, run(some), strict=True):
            assert torch.equal(logits, alone[PROMPTS.index(prompt)])


def test_sampled_answers_depend_on_their_seed_alone(make) -> None:
    engine = make(prefix_bytes=0)
    warm = Sampling(temperature=1.2, top_p=0.95, top_k=50, seed=7)

    def ask(seed: int | None, prompt: list[int] = PROMPTS[4]) -> Asked:
        sampling = Sampling(temperature=1.2, top_p=0.95, top_k=50, seed=seed)
        return Asked(engine, prompt, 20, sampling=sampling)

    alone = ask(7).ids()
    together = [ask(n, PROMPTS[n]) for n in range(7)] + [ask(7), ask(8)]
    ids = [one.ids() for one in together]
    assert ids[7] == alone != ids[8] and len(set(map(tuple, ids))) == 9
    assert ask(None).ids() != ask(None).ids()
    choices = Asked(engine, PROMPTS[4], 20, sampling=warm, choices=3).wait()
    several = {piece.index: list(piece.token_ids) for piece in choices if piece.finish}
    assert several[0] == alone and len(set(map(tuple, several.values()))) == 3


def test_prompts_start_from_what_they_share(make) -> None:
    engine = make(make_model(dtype=torch.float64))  # prefixes round otherwise: no ties
    shared = make_ids(300)
    first = Asked(engine, [*shared, 5, 6]).wait()[-1]
    assert first.cached_tokens == 0
    again = [Asked(engine, [*shared, 5, n]).wait()[-1] for n in (6, 7)]
    assert [piece.cached_tokens for piece in again] == [128, 128]  # units of 128, 64 behind them
    assert again[0].token_ids == first.token_ids
    assert gauge(engine, "prefix_hits_total") == 2
    assert gauge(engine, "prefix_hit_tokens_total") == 256
    turn = [*shared, 5, 6, *first.token_ids, *make_ids(100, seed=1)]
    answer = Asked(engine, turn, 80).ids()
    assert best(engine.model, turn, answer) == answer
    later = Asked(engine, [*turn, *answer, 9]).wait()[-1]
    assert later.cached_tokens == 384  # an answer is a prefix too


def test_kept_prefixes_are_bounded(make) -> None:
    engine = make(prefix_bytes=300_000)
    for n in range(6):
        Asked(engine, make_ids(400, seed=n), 2).wait()
    wait_for(lambda: gauge(engine, "cache_bytes") == 0)
    assert 0 < engine.store.bytes <= 300_000 and len(engine.store) < 6
    assert gauge(engine, "prefix_store_bytes") == engine.store.bytes


def test_long_prompts_go_in_between_steps(make, monkeypatch) -> None:
    """While one is read, others go on writing; two of them take turns."""
    engine, order = make(prefill_tokens=64, prefix_bytes=0), []
    read, write = engine._read, engine._write
    monkeypatch.setattr(
        engine, "_read", lambda p: (order.append(len(p.ticket.request.prompt)), read(p))[1]
    )
    monkeypatch.setattr(engine, "_write", lambda: (order.append(0), write())[1])
    short = Asked(engine, make_ids(4), 60)
    wait_for(lambda: len(order) > 4)
    first, second = Asked(engine, make_ids(500), 2), Asked(engine, make_ids(400), 2)
    for asked in (short, first, second):
        asked.wait()
    reads = [n for n in order if n > 4]
    assert reads.count(500) == 8 and reads.count(400) == 7
    at = [i for i, n in enumerate(order) if n > 4]
    assert all(order[i + 1] == 0 for i in at[:-1] if i + 1 < len(order))
    assert reads[2:8] in ([500, 400] * 3, [400, 500] * 3)


def test_what_does_not_fit_waits_or_is_refused(make) -> None:
    engine = make(max_rows=4, prefix_bytes=0)
    base, each = engine._costs[0]
    engine.cache_bytes = int(2.5 * (base + each * 340))
    most = 0.0
    asked = [Asked(engine, make_ids(300, seed=n), 40) for n in range(5)]
    while not all(one.ticket.done for one in asked):
        running = len(engine.running)
        assert running <= 2
        most = max(most, gauge(engine, "cache_bytes"))
        time.sleep(0.005)
    assert 0 < most <= engine.cache_bytes
    with pytest.raises(Refused, match="bytes of cache"):
        Asked(engine, make_ids(300), 4000)
    with pytest.raises(Refused, match="n: at most 4"):
        Asked(engine, make_ids(3), choices=5)


def test_caches_cost_what_they_were_said_to(make) -> None:
    engine = make(prefix_bytes=0)
    base, each = engine._costs[0]
    asked = Asked(engine, make_ids(700), 200)
    wait_for(lambda: len(asked.ticket.answers) > 0 and len(asked.ticket.answers[0].tokens) > 180)
    engine.measure()
    assert 0.3 * (base + each * 900) < gauge(engine, "cache_bytes") <= base + each * 900
    asked.wait()
    wait_for(lambda: gauge(engine, "cache_bytes") == 0)


def test_clients_take_turns(make) -> None:
    engine, began = make(max_rows=1, prefix_bytes=0), []
    admit = engine.admit
    engine.admit = lambda ticket: (began.append(ticket.request.client), admit(ticket))[1]
    first = Asked(engine, make_ids(3), 200, client="a")
    wait_for(lambda: bool(began))
    rest = [Asked(engine, make_ids(3), 2, client=name) for name in "aaabbc"]
    for asked in (first, *rest):
        asked.wait()
    assert began == ["a", "a", "b", "c", "a", "b", "a"]


def test_a_full_queue_refuses(make) -> None:
    engine = make(max_rows=1, max_queue=2, prefix_bytes=0)
    running = Asked(engine, make_ids(3), 400)
    wait_for(lambda: bool(engine.running))
    waiting = [Asked(engine, make_ids(3), 1) for _ in range(2)]
    with pytest.raises(Refused) as refused:
        Asked(engine, make_ids(3), 1)
    assert refused.value.status == 429 and refused.value.retry_after >= 1
    engine.cancel(running.ticket)
    assert all(len(asked.ids()) == 1 for asked in waiting)
    wait_for(lambda: gauge(engine, "requests_total", outcome="cancelled") == 1)
    assert gauge(engine, "requests_total", outcome="rejected") == 1
    assert gauge(engine, "queue_length") == gauge(engine, "cache_bytes") == 0


def test_time_runs_out_in_the_queue_and_while_running(make) -> None:
    engine = make(max_rows=1, request_seconds=1.0)
    asked = [Asked(engine, make_ids(3), 4000) for _ in range(2)]
    for one in asked:
        with pytest.raises(Refused, match="not done after") as refused:
            one.wait()
        assert refused.value.status == 408
    wait_for(lambda: gauge(engine, "requests_total", outcome="timeout") == 2)
    assert len(Asked(engine, make_ids(3), 3).ids()) == 3


def test_a_failed_step_fails_its_requests_alone(make, monkeypatch) -> None:
    engine = make()
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: 1 / 0)
    with pytest.raises(Refused, match="the engine failed: ZeroDivisionError") as refused:
        Asked(engine, make_ids(3)).wait()
    assert refused.value.status == 500
    monkeypatch.setattr(engine, "step", step)
    assert len(Asked(engine, make_ids(3), 3).ids()) == 3
    assert gauge(engine, "requests_total", outcome="error") == 1


def test_a_prompt_that_fails_leaves_what_is_written_alone(make, monkeypatch) -> None:
    engine = make(prefix_bytes=0)
    read = engine._read

    def fail(prompt) -> bool:
        return 1 / 0 if len(prompt.ticket.request.prompt) == 9 else read(prompt)

    monkeypatch.setattr(engine, "_read", fail)
    other = Asked(engine, make_ids(4), 60)
    other.came.get(timeout=60)
    with pytest.raises(Refused, match="the engine failed: ZeroDivisionError"):
        Asked(engine, make_ids(9), 5).wait()
    assert len(other.ids()) == 60
    wait_for(lambda: gauge(engine, "cache_bytes") == 0 and not engine.running)


@pytest.mark.parametrize(("lookup_tokens", "value"), [(0, math.nan), (0, math.inf), (4, math.nan)])
def test_logits_that_are_no_numbers_fail_their_request_alone(make, lookup_tokens, value) -> None:
    """Of a request of two choices, one of which is told nothing but the error either."""
    engine = make(prefix_bytes=0, lookup_tokens=lookup_tokens)
    compute = engine._compute

    def broken(rows, feeds):
        every = compute(rows, feeds)
        for row, logits in zip(rows, every, strict=True):
            if row.answer.request.choices == 2:
                logits[0] = value
        return every

    engine._compute = broken
    prompt = make_ids(6) * 3
    other = Asked(engine, prompt, 40, sampling=Sampling(seed=1))
    other.came.get(timeout=60)
    two = Asked(engine, prompt, 5, choices=2)
    with pytest.raises(Refused, match="the engine failed: FloatingPointError"):
        two.wait()
    assert len(other.ids()) == 40
    assert two.came.empty() and gauge(engine, "requests_total", outcome="error") == 1


def test_a_prompt_without_log_probabilities_fails(make) -> None:
    """NaN is no JSON: the request is told so, not a stream that breaks off."""
    import copy

    model = copy.deepcopy(make_model())
    with torch.no_grad():
        model.lm_head.weight[9] = math.nan
    engine = make(model, prefix_bytes=0)
    with pytest.raises(Refused, match="the engine failed: FloatingPointError"):
        Asked(engine, make_ids(6), 0, logprobs=1, prompt_logprobs=True).wait()


def test_an_engine_that_cannot_go_on_says_so_to_all(make, monkeypatch) -> None:
    """After an error that comes again when caches are released, as of a device that is lost."""
    engine = make(max_rows=1)
    running = Asked(engine, make_ids(3), 4000)
    running.came.get(timeout=60)
    waiting = Asked(engine, make_ids(3))
    for name in ("step", "release"):
        monkeypatch.setattr(engine, name, lambda *_: 1 / 0)
    for asked in (running, waiting):
        with pytest.raises(Refused, match="the engine failed") as refused:
            asked.wait()
        assert refused.value.status == 500
    wait_for(lambda: not engine.alive)
    with pytest.raises(Refused) as refused:
        Asked(engine, make_ids(3))
    assert refused.value.status == 503
    assert gauge(engine, "queue_length") == gauge(engine, "running_answers") == 0


def test_stopping_finishes_what_runs(make) -> None:
    engine = make(max_rows=1)
    running = Asked(engine, make_ids(3), 100)
    wait_for(lambda: bool(engine.running))
    waiting = Asked(engine, make_ids(3))
    engine.stop(20)
    assert len(running.ids()) == 100
    with pytest.raises(Refused, match="shutting down"):
        waiting.wait()
    with pytest.raises(Refused, match="shutting down"):
        Asked(engine, make_ids(3))


def test_nothing_starts_once_it_stops(make) -> None:
    """Also where it is told to while it starts others: those would have all of their time."""
    engine = make(max_rows=8, prefix_bytes=0)
    admit, stopper = engine.admit, threading.Thread(target=lambda: engine.stop(0.1))

    def slow(ticket) -> None:
        admit(ticket)
        if not stopper.ident:
            stopper.start()
            wait_for(lambda: not engine.alive)

    engine.admit = slow
    with engine._changed:
        asked = [Asked(engine, make_ids(3), 4000) for _ in range(3)]
    for one in asked:
        with pytest.raises(Refused, match="shutting down") as refused:
            one.wait()
        assert refused.value.status == 503
    stopper.join(20)
    assert not stopper.is_alive()


def test_many_clients_of_which_a_fifth_leaves(make) -> None:
    """Each finished answer is that of the same request alone; memory comes back to nothing."""
    engine = make(max_rows=8, prefill_tokens=48, prefix_bytes=0)
    prompts = [make_ids(1 + 37 * n % 260, seed=n) for n in range(20)]
    lengths = [5 + 11 * n % 30 for n in range(20)]
    asked = [
        Asked(engine, prompt, length, client=str(n % 7))
        for n, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    left = asked[::5]
    for one in left:
        one.came.get(timeout=60)
        engine.cancel(one.ticket)
    together = [None if one in left else one.ids() for one in asked]
    wait_for(lambda: not engine.running)
    assert gauge(engine, "cache_bytes") == 0 and gauge(engine, "running_answers") == 0
    for prompt, length, ids in zip(prompts, lengths, together, strict=True):
        if ids is not None:
            assert ids == Asked(engine, prompt, length).ids() and len(ids) == length
