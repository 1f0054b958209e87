"""Rows of fixed size that sequences come to and leave; without a GPU, kernels run as Python."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from small_server import Asked, gauge, make_ids, make_model, wait_for

from path_attention.models.cache import CACHE_NAME
from path_attention.models.static_cache import StaticPathCache, steps_lack
from path_attention.nn.cache_units import memory
from path_attention.serving.batched import BatchedEngine
from path_attention.serving.command import make_engine
from path_attention.serving.request import Refused
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
    monkeypatch.setattr(slots, "_settled", lambda cache: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        slots.seat(prefill(slots.model, make_ids(3)))
    assert slots.free == [0, 1]


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
    assert slots.bytes == memory([layer]) - sum(x.numel() * x.itemsize for x in more)
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
