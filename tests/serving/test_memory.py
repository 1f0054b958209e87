"""Memory that a server no longer needs goes back to the system, not only to its own heap."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path

import httpx
import pytest
import torch
from small_server import Asked, gauge, make_ids, serve, wait_for

from path_attention.serving import engine as engine_module
from path_attention.serving.memory import give_back, reserve

STATM = Path("/proc/self/statm")
pytestmark = pytest.mark.skipif(not STATM.exists(), reason="nobody tells resident memory")


def resident() -> int:
    return 4096 * int(STATM.read_text().split()[1])


def leave_holes(mebibytes: int) -> list[bytes]:
    """Take so much in small pieces and drop all but a few, which keep the heap from shrinking."""
    pieces = [bytes(60_000) for _ in range(mebibytes * 2**20 // 60_000)]
    kept = pieces[::200]
    del pieces
    return kept


def test_a_server_that_rests_gives_back_what_is_free(make, monkeypatch) -> None:
    if not give_back():
        pytest.skip("a C library that does so by itself")
    monkeypatch.setattr(engine_module, "_REST", 0.2)
    engine = make(prefix_bytes=0)
    assert engine.wait_for_rest(20)
    base = resident()
    for _ in range(5):  # unless another test's server rests just then
        kept = leave_holes(200)
        if resident() - base > 150 * 2**20:
            break
    assert resident() - base > 150 * 2**20  # what was freed is still there
    Asked(engine, make_ids(30), 5).wait()
    assert engine.wait_for_rest(20)
    wait_for(lambda: resident() - base < 60 * 2**20)
    assert kept


def test_it_rests_once_and_never_while_it_works(make, monkeypatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(engine_module, "_REST", 0.1)
    engine = make(prefix_bytes=0)

    def note() -> None:
        if threading.current_thread() is engine._thread:  # not of another test's server
            given.append(len(engine.running))

    monkeypatch.setattr(engine_module, "give_back", note)
    assert engine.wait_for_rest(20)
    given.clear()
    Asked(engine, make_ids(3), 150).wait()
    wait_for(lambda: bool(given))
    time.sleep(0.5)
    assert given == [0]


def test_nothing_of_an_answer_outlives_it(make) -> None:
    """Tickets, answers, caches and pieces: none is left behind, however requests end."""
    from path_attention.models.cache import PathAttentionCacheLayer
    from path_attention.serving.answer import Answer, Ticket

    engine = make(max_rows=2, prefix_bytes=0, lookup_tokens=2)
    kinds = (Ticket, Answer, PathAttentionCacheLayer)

    def alive() -> int:
        gc.collect()
        return sum(type(x) in kinds for x in gc.get_objects())

    before = alive()
    for seed in range(3):
        asked = [Asked(engine, make_ids(20, seed), 15, choices=1 + n % 2) for n in range(6)]
        for one in asked[::3]:
            engine.cancel(one.ticket)
        for one in [x for x in asked if x not in asked[::3]]:
            one.wait()
        wait_for(lambda: not engine.running and not gauge(engine, "queue_length"))
    del asked, one
    assert alive() <= before


def test_requests_are_gone_before_garbage_is_sought(make, monkeypatch) -> None:
    """Prompts take megabytes, and Python seeks rings seldom where most objects live long."""
    engine, seen = make(prefix_bytes=0), []
    submit = engine.submit

    def note(request):
        ticket = submit(request)
        seen.append(weakref.ref(ticket))
        return ticket

    monkeypatch.setattr(engine, "submit", note)
    body = {"model": "path-attention", "prompt": make_ids(9), "max_tokens": 5, "n": 2}
    with serve(engine) as address:
        gc.disable()
        try:
            for more in ({}, {"stream": True}, {"max_tokens": 2000, "stream": True}):
                url = f"{address}/v1/completions"
                with httpx.stream("POST", url, json={**body, **more}, timeout=60) as answer:
                    if more.get("max_tokens"):
                        next(answer.iter_lines())
                    else:
                        answer.read()
            wait_for(lambda: len(seen) == 3 and not any(ref() for ref in seen))
        finally:
            gc.enable()


@pytest.mark.gpu
def test_what_is_reserved_is_there_without_the_driver() -> None:
    """For large and small tensors; freed memory of before is out of the way."""
    torch.cuda.empty_cache()
    device = torch.device("cuda")
    reserve(2**30, device)
    before = torch.cuda.memory_stats()["num_device_alloc"]
    held = [torch.empty(2**n, dtype=torch.uint8, device=device) for n in [18] * 80 + [24] * 50]
    assert torch.cuda.memory_stats()["num_device_alloc"] == before and len(held) == 130


def test_more_than_there_is_cannot_be_reserved(monkeypatch) -> None:
    def empty(*args, **options):
        raise torch.OutOfMemoryError("of a GPU")

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(ValueError, match=r"prefix_bytes: expected .* no 1000 bytes"):
        reserve(1000, torch.device("cpu"))
