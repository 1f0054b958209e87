"""Requests that wait behind an answer which `generate` writes to its end."""

from __future__ import annotations

import time

import pytest
import torch
from small_server import Asked, gauge, make_ids, wait_for

from path_attention.serving.request import Refused


@pytest.fixture(scope="module")
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=258, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=8000, initializer_range=0.2,
        eos_token_id=None, pad_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight[:2] = 0
    return model


def test_who_leaves_the_queue_leaves_it_at_once(make, llama) -> None:
    """The place is free for others, though what runs runs on."""
    engine = make(llama, max_queue=2)
    running = Asked(engine, make_ids(3), 4000)
    running.came.get(timeout=60)
    waiting = [Asked(engine, make_ids(3), 2) for _ in range(2)]
    with pytest.raises(Refused, match="are waiting"):
        Asked(engine, make_ids(3), 2)
    engine.cancel(waiting[0].ticket)
    assert waiting[0].ticket.done and gauge(engine, "queue_length") == 1
    assert gauge(engine, "requests_total", outcome="cancelled") == 1
    last = Asked(engine, make_ids(3), 2)
    assert engine.running == [running.ticket] and not running.ticket.done
    engine.cancel(running.ticket)
    assert len(waiting[1].ids()) == len(last.ids()) == 2
    wait_for(lambda: gauge(engine, "requests_total", outcome="cancelled") == 2)
    wait_for(lambda: gauge(engine, "requests_total", outcome="length") == 2)


def test_time_runs_out_in_the_queue_while_another_is_written(make, llama) -> None:
    engine = make(llama)
    running = Asked(engine, make_ids(3), 4000)
    running.came.get(timeout=60)
    waiting = Asked(engine, make_ids(3), 2)
    waiting.ticket.deadline = time.monotonic()
    with pytest.raises(Refused, match="not done after") as late:
        waiting.wait()
    assert late.value.status == 408 and not running.ticket.done
    engine.cancel(running.ticket)


def test_stopping_refuses_who_waits_before_what_runs_has_ended(make, llama) -> None:
    import threading

    engine = make(llama)
    running = Asked(engine, make_ids(3), 4000)
    running.came.get(timeout=60)
    waiting = Asked(engine, make_ids(3), 2)
    stopper = threading.Thread(target=engine.stop)
    stopper.start()
    with pytest.raises(Refused, match="shutting down"):
        waiting.wait()
    assert not running.ticket.done
    engine.cancel(running.ticket)
    stopper.join(20)
    assert not stopper.is_alive()
