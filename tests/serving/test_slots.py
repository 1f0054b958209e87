"""Rows of fixed size that sequences come to and leave; without a GPU, kernels run as Python."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from small_server import GREEDY, Asked, gauge, make_ids, make_model, wait_for
from torch.utils._python_dispatch import TorchDispatchMode

from path_attention.models.cache import CACHE_NAME, layer_caches
from path_attention.models.static_cache import StaticPathCache, steps_lack
from path_attention.nn.cache_units import memory, storages
from path_attention.nn.seats import Seats
from path_attention.serving.answer import Answer, Ticket
from path_attention.serving.batched import BatchedEngine
from path_attention.serving.command import make_engine
from path_attention.serving.request import Refused, Request
from path_attention.serving.settings import Settings
from path_attention.serving.slots import SlotEngine, Slots

pytest.importorskip("triton")
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled here"
)


def prefill(model, prompt: list[int]):
    with torch.no_grad():
        return model(torch.tensor([prompt], device=model.device))[CACHE_NAME]


def check(model, seated: dict[int, list[int]], logits: torch.Tensor) -> None:
    """A step's logits against a plain forward pass over all that each row has seen."""
    for row, ids in seated.items():
        with torch.no_grad():
            whole = torch.tensor([ids], device=model.device)
            exact = model(whole, use_cache=False).logits[0, -1]
        torch.testing.assert_close(logits[row], exact, rtol=1e-3, atol=1e-3)


def walk(model) -> None:
    """Rows come, write over a unit's border, leave, and others take their place."""
    slots = Slots(model, 2, 260)
    seated: dict[int, list[int]] = {}
    for length in (126, 1):
        prompt = make_ids(length, seed=length)
        seated[slots.seat(prefill(model, prompt))] = list(prompt)
    assert sorted(seated) == [0, 1] and not slots.free

    def steps(count: int) -> None:
        for n in range(count):
            tokens = {row: 2 + (17 * n + row) % 250 for row in seated}
            for row, token in tokens.items():
                seated[row].append(token)
            logits = slots.step(tokens)
        check(model, seated, logits)

    steps(3)
    del seated[1]
    slots.leave(1)
    prompt = make_ids(190, seed=9)
    seated[slots.seat(prefill(model, prompt))] = list(prompt)
    steps(1)


@interpreted
@pytest.mark.parametrize("preset", ["path_fox", "rope"])
def test_rows_are_as_if_alone(preset: str) -> None:
    walk(make_model(preset, num_hidden_layers=1, num_key_value_heads=1))


@interpreted
def test_rows_of_layers_that_are_not_alike() -> None:
    walk(make_model("path_fox", num_hidden_layers=3, num_attention_heads=1, nope_layers=[1]))


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["path", "path_fox", "fox", "rope", "rotation_learned"])
def test_rows_are_as_if_alone_under_graphs(preset: str) -> None:
    model = make_model(preset).to("cuda")
    assert steps_lack(model) is None
    walk(model)


def run(engine: SlotEngine, monkeypatch) -> None:
    """More requests than rows, one of which leaves, and one of several choices."""
    model, measure, held = engine.model, engine.measure, []
    monkeypatch.setattr("path_attention.serving.batched._MEASURE_EVERY", -1)  # each step
    engine.measure = lambda: (measure(), held.append(gauge(engine, "cache_bytes")))  # pyright: ignore
    with pytest.raises(Refused, match="n: at most 2, got 3"):
        Asked(engine, make_ids(3), choices=3)
    prompts = [make_ids(n, seed=n) for n in (1, 40)]
    asked = [Asked(engine, prompt, 3) for prompt in prompts]
    left = Asked(engine, make_ids(7), 60)
    left.came.get(timeout=60)
    engine.cancel(left.ticket)
    for prompt, one in zip(prompts, asked, strict=True):
        ids = one.ids()
        with torch.no_grad():
            whole = torch.tensor([prompt + ids], device=model.device)
            logits = model(whole, use_cache=False).logits[0, len(prompt) - 1 : -1]
        assert ids == logits.argmax(1).tolist()
    pieces = [p for p in Asked(engine, prompts[1], 2, choices=2).wait() if p.finish]
    assert pieces[0].token_ids == pieces[1].token_ids
    wait_for(lambda: not engine.running)
    assert sorted(engine.slots.free) == [0, 1] and gauge(engine, "cache_bytes") == 0
    assert engine.slots.bytes <= max(held) < 2 * engine.slots.bytes  # of two rows, and prompts


@interpreted
def test_a_row_stays_free_where_a_copy_fails(monkeypatch) -> None:
    slots = Slots(make_model("rope", num_hidden_layers=1), 2, 60)
    monkeypatch.setattr(Seats, "seat", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        slots.seat(prefill(slots.model, make_ids(3)))
    assert slots.free == [0, 1]


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that is made."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.known, self.bytes = storages(known), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = storages(x for x in (out,) if isinstance(x, torch.Tensor))
        self.bytes = max(self.bytes, 0, *(n for at, n in made.items() if at not in self.known))
        return out


@interpreted
def test_a_row_is_taken_without_another_of_its_size() -> None:
    """What is copied is what the prompt has, and no row is made for it first."""
    slots = Slots(make_model("path", num_hidden_layers=1), 2, 20_000)
    cache = prefill(slots.model, make_ids(200))
    state: Any = slots.cache.layers[0].state  # pyright: ignore[reportAttributeAccessIssue]
    for x in state.tensors().values():  # what a request that failed may leave
        x[0] = torch.nan if x.is_floating_point() else 0
    with Largest([*state.tensors().values(), *layer_caches(cache, 1)[0].tensors()]) as largest:
        assert slots.seat(cache) == 0
    assert 0 < largest.bytes < state.keys[0].nbytes / 4
    assert all(x[0].isfinite().all() for x in state.tensors().values())


class Launches(TorchDispatchMode):
    """How many operations ran that are no views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@interpreted
def test_a_row_is_taken_in_all_layers_at_once() -> None:
    """What is launched does not grow with their number, but for those of other sizes."""
    counts = []
    for layers, more in ((2, {}), (4, {}), (4, {"nope_layers": [1, 3]})):
        model = make_model("path_fox", num_hidden_layers=layers, num_key_value_heads=1, **more)
        slots, cache = Slots(model, 2, 200), prefill(model, make_ids(150))
        with Launches() as launches:
            slots.seat(cache)
        counts.append(launches.count)
    assert counts[0] == counts[1] < counts[2]


@interpreted
def test_seating_refuses_what_does_not_fit() -> None:
    """Several rows, padding, too many tokens, and caches that are to be cropped."""
    model = make_model("path", num_hidden_layers=1)
    croppable = StaticPathCache(model.config, 300)
    for cache in (croppable, StaticPathCache(model.config, 300, croppable=False)):
        layers: Any = cache.layers
        with pytest.raises(ValueError, match="settled" if cache is not croppable else "croppable"):
            Seats(layers, 2)
    (source,) = layer_caches(prefill(model, make_ids(200)), 1)
    seats = Slots(model, 1, 100)._seats
    with pytest.raises(ValueError, match=r"sources: .* at most 128 tokens .* got 1 of 200"):
        seats.seat(0, [source])
    mask = torch.ones(1, 9)
    mask[0, -2:] = 0
    with torch.no_grad():
        padded = model(torch.full((1, 9), 5), attention_mask=mask)[CACHE_NAME]
    source.select(torch.tensor([0, 0]))
    for given in (source, *layer_caches(padded, 1)):
        with pytest.raises(ValueError, match="sources: expected one row"):
            seats.seat(0, [given])


def admit(engine: SlotEngine, prompt: list[int], deliver=lambda piece: None) -> Ticket:
    """Let a request in on this thread, to be stepped by hand."""
    ticket = Ticket(
        Request(prompt=prompt, max_tokens=2, sampling=GREEDY, deliver=deliver), math.inf
    )
    ticket.answers = [Answer(ticket, 0, engine.tokenizer, engine.ends)]
    engine.running.append(ticket)
    engine.admit(ticket)
    return ticket


@interpreted
def test_short_prompts_are_read_together(tokenizer, monkeypatch) -> None:
    """As many as fit into a piece; kept once their first tokens are delivered."""
    model = make_model("path", num_hidden_layers=1, hidden_size=16, num_attention_heads=1)
    limits = {"max_prompt_tokens": 220, "max_output_tokens": 4, "max_rows": 5}
    engine = SlotEngine(model, tokenizer, Settings(**limits, prefill_tokens=200))
    read, order, store = [], [], engine.store
    assert store is not None
    model.register_forward_pre_hook(
        lambda module, args: read.append(tuple(args[0].shape)) if args[0].shape[1] > 1 else None
    )
    put = store.put
    monkeypatch.setattr(store, "put", lambda *args: (order.append("kept"), put(*args))[1])

    def finish() -> None:
        while any(answer.finish is None for t in engine.running for answer in t.answers):
            engine.step()
        engine._retire()

    prompts = [make_ids(n, seed=n) for n in (40, 50, 30, 60, 2)]
    answers = [admit(engine, prompt, order.append).answers[0] for prompt in prompts]
    engine.step()
    assert read == [(4, 49)] and order[0] != "kept" and order.count("kept") == 4
    finish()
    assert read == [(4, 49), (1, 59)]
    for answer, prompt in zip(answers, prompts, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([answer.ids]), use_cache=False).logits[0]
        assert answer.tokens == logits[len(prompt) - 1 : -1].argmax(1).tolist()
    monkeypatch.setattr(engine.slots, "step", lambda tokens: torch.zeros(5, 258))
    admit(engine, make_ids(200))
    finish()
    del read[:]
    begun = [admit(engine, make_ids(200)[:n]) for n in (140, 150)]
    engine.step()
    assert read == [(2, 21)]
    assert [ticket.cached_tokens for ticket in begun] == [128, 128]


@interpreted
def test_rows_hold_nothing_to_take_back_with() -> None:
    model = make_model("path", num_hidden_layers=1)
    slots, croppable = Slots(model, 1, 300), StaticPathCache(model.config, 300)
    with torch.no_grad():
        model(torch.tensor([[1]]), **{CACHE_NAME: croppable})
    layer: Any = croppable.layers[0]
    state = layer.state
    more = [state.raw_k, state.raw_w, state.raw_beta, state.products[:, 1:]]
    more += [*layer._history.values(), *layer._borders.values()]
    aligned = slots.bytes - memory([layer]) + sum(x.numel() * x.itemsize for x in more)
    assert 0 <= aligned < 512 * (len(state.tensors()) + len(layer.before))
    assert not slots.cache.is_croppable


def test_drafts_are_written_in_caches_that_can_be_cropped(tokenizer, monkeypatch) -> None:
    """Also where rows of fixed size could be had."""
    monkeypatch.setattr("path_attention.serving.command.steps_lack", lambda model: None)
    model = make_model("path", num_hidden_layers=1)
    for settings, draft in ((Settings(lookup_tokens=4), None), (Settings(), make_model("rope"))):
        engine = make_engine(model, tokenizer, settings, draft)
        assert type(engine) is BatchedEngine


@interpreted
def test_an_engine_of_rows(tokenizer, monkeypatch) -> None:
    model = make_model("path", num_hidden_layers=1)
    limits = {"max_prompt_tokens": 60, "max_output_tokens": 60, "max_rows": 2}
    engine = SlotEngine(model, tokenizer, Settings(**limits))
    engine.start()
    run(engine, monkeypatch)
    engine.stop(0)
    with pytest.raises(ValueError, match="cache_bytes: expected at least"):
        SlotEngine(model, tokenizer, Settings(**limits, cache_bytes=1000))
    assert steps_lack(model) == "an NVIDIA GPU, got cpu"


@pytest.mark.gpu
def test_an_engine_of_rows_under_graphs(make, monkeypatch) -> None:
    engine = make(make_model().to("cuda"), max_rows=2)
    assert isinstance(engine, SlotEngine)
    run(engine, monkeypatch)


@pytest.mark.gpu
def test_no_request_waits_for_a_kernel_to_be_compiled(make) -> None:
    from path_attention.ops.triton.decode_kernels import units_kernel

    engine = make(make_model("path_fox", dtype=torch.bfloat16).to("cuda"), max_rows=4)
    compiled = [len(held[0]) for held in units_kernel.device_caches.values()]
    shared = make_ids(700)
    for size in (1, 40, 3, 300):
        asked = [Asked(engine, [*shared, *make_ids(size, seed=n)], 2) for n in range(3)]
        for one in asked:
            one.wait()
    assert compiled == [len(held[0]) for held in units_kernel.device_caches.values()]
