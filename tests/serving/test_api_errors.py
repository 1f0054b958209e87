"""What is refused: OpenAI's status and shape for each, and nothing is ignored in silence."""

from __future__ import annotations

import json
import time

import httpx
import openai
import pytest
from small_server import Asked, make_ids, serve, wait_for

from path_attention.serving.protocol import ChatBody, CompletionBody, parse
from path_attention.serving.request import Refused
from path_attention.serving.settings import Settings

NAME = "path-attention"
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "a"}]}
TEXT = {"model": NAME, "prompt": "a"}


def refused(answer: httpx.Response, status: int, param: str | None = None) -> dict:
    """The error, whose shape is checked."""
    assert answer.status_code == status, answer.text
    assert answer.json().keys() == {"error"}
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["message"]
    assert param is None or error["param"] == param
    return error


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", 2001),
        ("max_tokens", "9"), ("max_completion_tokens", 0), ("n", 0), ("n", -2), ("n", 99),
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", "hot"), ("top_p", 0),
        ("top_p", 1.1), ("top_k", -1), ("presence_penalty", 3), ("frequency_penalty", -2.1),
        ("seed", 1.5), ("stop", ["a"] * 5), ("stop", ""), ("stop", [""]), ("stop", 3),
        ("stop", "x" * 1001),
        ("logit_bias", {"5": 101}), ("logit_bias", {"x": 1}), ("logit_bias", {"9" * 5000: 1}),
        ("top_logprobs", 3),
        ("logprobs", 3), ("stream", "yes"), ("stream_options", {"include_usage": True}),
        ("messages", []), ("messages", "a"), ("messages", [{"role": "tool", "content": "a"}]),
        ("messages", [{"role": "user"}]), ("messages", [{"role": "user", "content": 3}]),
        ("messages", [{"role": "user", "content": "a", "name": "b"}]),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
        ("messages", [{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}]),
        ("messages", [{"role": "user", "content": [{"text": "a"}]}]),
        ("return_token_ids", 1), ("user", 3),
    ],
)  # fmt: skip
def test_bad_values_of_a_chat(server, param: str, value: object) -> None:
    answer = httpx.post(f"{server[0]}/v1/chat/completions", json={**CHAT, param: value})
    error = refused(answer, 400, None if param == "max_completion_tokens" else param)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("prompt", []), ("prompt", [[]]), ("prompt", 3), ("prompt", [["a"]]),
        ("max_tokens", 0), ("max_tokens", -1), ("logprobs", 21), ("logprobs", True), ("echo", 1),
    ],
)  # fmt: skip
def test_bad_values_of_a_completion(server, param: str, value: object) -> None:
    refused(httpx.post(f"{server[0]}/v1/completions", json={**TEXT, param: value}), 400, param)


@pytest.mark.parametrize(
    ("kind", "wrong", "told"),
    [
        (CompletionBody, {**TEXT, "stop": ["a"] * 5}, "stop: List should have at most 4 items"),
        (CompletionBody, {**TEXT, "stop": [""]}, "stop: String should have at least 1 character"),
        (CompletionBody, {**TEXT, "prompt": []}, "prompt: List should have at least 1 item"),
        (ChatBody, {**CHAT, "messages": [{"role": "user"}]}, "content is missing"),
        (ChatBody, {**CHAT, "messages": [{"role": "user", "content": [{}]}]}, "type is missing"),
        (ChatBody, {"messages": CHAT["messages"]}, "model: Field required"),
    ],
)
def test_what_is_wrong_is_told_of_what_may_be_of_several_types(kind, wrong, told: str) -> None:
    with pytest.raises(Refused, match=told):
        parse(kind, json.dumps(wrong).encode())


@pytest.mark.parametrize("prompt", [[258], [-1], [10**30], [[5, 300]]])
def test_tokens_that_the_model_lacks(server, prompt: list) -> None:
    for echo in (False, True):
        body = {**TEXT, "prompt": prompt, "echo": echo}
        refused(httpx.post(f"{server[0]}/v1/completions", json=body), 400)
    refused(httpx.post(f"{server[0]}/v1/completions", json={**TEXT, "logit_bias": {"258": 1}}), 400)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("tools", "unsupported_parameter"), ("response_format", "unsupported_parameter"),
        ("best_of", "unsupported_parameter"), ("suffix", "unsupported_parameter"),
        ("functions", "unsupported_parameter"), ("no_such", "unknown_parameter"),
    ],
)  # fmt: skip
def test_fields_that_are_not_served_are_named(server, name: str, code: str) -> None:
    for path, body in (("chat/completions", CHAT), ("completions", TEXT)):
        answer = httpx.post(f"{server[0]}/v1/{path}", json={**body, name: "x"})
        error = refused(answer, 400, name)
        assert error["code"] == code and name in error["message"]
        answer = httpx.post(f"{server[0]}/v1/{path}", json={**body, name: None, "max_tokens": 1})
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("path", "field", "value", "wrong"),
    [
        ("chat/completions", "response_format", {"type": "text"}, {"type": "json_object"}),
        ("chat/completions", "store", False, True),
        ("chat/completions", "modalities", ["text"], ["text", "audio"]),
        ("chat/completions", "tool_choice", "none", "auto"),
        ("chat/completions", "service_tier", "auto", "flex"),
        ("completions", "suffix", "", "}"),
        ("completions", "best_of", 1, 2),
        ("chat/completions", "safety_identifier", "someone", 3),
        ("completions", "prompt_cache_key", "mine", 3),
    ],
)  # fmt: skip
def test_fields_that_ask_for_what_is_done_anyway(server, path, field, value, wrong) -> None:
    body = CHAT if path.startswith("chat") else TEXT
    url = f"{server[0]}/v1/{path}"
    answer = httpx.post(url, json={**body, "max_tokens": 1, field: value})
    assert answer.status_code == 200, answer.text
    refused(httpx.post(url, json={**body, "max_tokens": 1, field: wrong}), 400, field)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "image_url"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "input_audio"),
        ({"role": "tool", "content": "a"}, "'tool'"),
        ({"role": "tool", "content": "a", "tool_call_id": "b"}, "tool_call_id"),
        ({"role": "assistant", "content": "a", "tool_calls": [{"id": "b"}]}, "tool_calls"),
        ({"role": "assistant", "content": "a", "function_call": {}}, "function_call"),
    ],
)  # fmt: skip
def test_what_messages_cannot_hold_is_named(server, message: dict, told: str) -> None:
    body = {**CHAT, "messages": [*CHAT["messages"], message]}
    error = refused(httpx.post(f"{server[0]}/v1/chat/completions", json=body), 400)
    assert told in error["message"] and error["param"].startswith("messages")


def test_the_best_of_as_many(server) -> None:
    url = f"{server[0]}/v1/completions"
    answer = httpx.post(url, json={**TEXT, "max_tokens": 1, "n": 2, "best_of": 2})
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 2


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (CompletionBody, {"prompt": [1.5] * 200_000}),
        (CompletionBody, {"prompt": [[1.5] * 2000] * 100}),
        (ChatBody, {"messages": [{}] * 250_000}),
        (ChatBody, {"messages": [{"role": "user", "content": [{}] * 200_000}]}),
    ],
)
def test_a_body_of_many_mistakes_is_refused_by_the_first(kind, wrong: dict) -> None:
    """Bodies are read on the event loop: all errors of one took seconds, 20 times its reading."""
    body = json.dumps({"model": NAME, **wrong}).encode()
    began = time.process_time()
    json.loads(body)
    reading = time.process_time() - began
    began = time.process_time()
    with pytest.raises(Refused):
        parse(kind, body)
    assert time.process_time() - began < 20 * reading + 0.1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"\xff",
        b"[" * 5000,
        b"[" * 900 + b"]" * 900,
        b'{"model": ' + b"[" * 3000 + b"]" * 3000 + b"}",
        b'{"model": "path-attention"}',
    ],
)
def test_bad_bodies(server, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    for path in ("chat/completions", "completions"):
        refused(httpx.post(f"{server[0]}/v1/{path}", content=body, headers=headers), 400)


@pytest.mark.parametrize(
    "change",
    ['"prompt": "\\ud800"', '"model": "\\ud800"', '"\\ud800": 1', '"stop": "\\ud800"',
     '"temperature": 1e999', '"prompt": [' + "9" * 5000 + "]"],
)  # fmt: skip
def test_json_that_no_text_can_hold(server, change: str) -> None:
    body = f'{{"model": "path-attention", "prompt": "a", {change}}}'
    headers = {"content-type": "application/json"}
    refused(httpx.post(f"{server[0]}/v1/completions", content=body, headers=headers), 400)


def test_other_kinds_of_bodies_and_paths(server) -> None:
    address = server[0]
    form = {"content-type": "text/plain"}
    refused(httpx.post(f"{address}/v1/completions", content=b"{}", headers=form), 415)
    answer = httpx.get(f"{address}/v1/completions")
    refused(answer, 405)
    assert answer.headers["allow"] == "POST"
    for path in ("/v1/nothing", "/v1/models/../../etc/passwd", "/docs", "/openapi.json"):
        refused(httpx.get(f"{address}{path}"), 404)


def test_the_clients_errors(client) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**{**CHAT, "model": "gpt-4"})
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.BadRequestError) as unsupported:
        client.chat.completions.create(**CHAT, tools=[])
    assert unsupported.value.code == "unsupported_parameter" and unsupported.value.param == "tools"


def test_limits(make) -> None:
    engine = make(max_prompt_tokens=40, max_rows=1, max_queue=0, max_body_bytes=500)
    with serve(engine) as address:
        url = f"{address}/v1/completions"
        error = refused(httpx.post(url, json={**TEXT, "prompt": make_ids(41)}), 400, "prompt")
        assert error["code"] == "context_length_exceeded"
        assert httpx.post(url, json={**TEXT, "prompt": make_ids(40)}).status_code == 200
        refused(httpx.post(url, json={**TEXT, "user": "x" * 500}), 413)
        headers = {"content-type": "Application/JSON; charset=utf-8"}
        assert httpx.post(url, content=json.dumps(TEXT), headers=headers).status_code == 200
        parts = (b"x" * 100 for _ in range(9))  # of no stated length
        refused(httpx.post(url, content=parts, headers=headers), 413)
        running = Asked(engine, make_ids(3), 4000)
        wait_for(lambda: bool(engine.running))
        answer = httpx.post(url, json=TEXT)
        error = refused(answer, 429)
        assert error["code"] == "queue_full" and int(answer.headers["retry-after"]) >= 1
        refused(httpx.post(url, json={**TEXT, "prompt": ["a", "b"]}), 429)
        engine.cancel(running.ticket)
        wait_for(lambda: not engine.running)
        assert httpx.post(url, json=TEXT).status_code == 200


def test_a_chat_that_says_no_limit_gets_what_fits(make) -> None:
    engine = make(prefix_bytes=0)
    base, each = engine._costs[0]
    engine.cache_bytes = int(2 * (base + 100 * each))
    with serve(engine) as address:
        url = f"{address}/v1/chat/completions"
        body = {**CHAT, "n": 2, "logit_bias": {"0": -100}}
        usage = httpx.post(url, json=body, timeout=60).json()["usage"]
        assert 98 <= usage["prompt_tokens"] + usage["completion_tokens"] / 2 <= 100
        refused(httpx.post(url, json={**body, "max_tokens": 100}), 400, "max_tokens")


def test_the_key(make) -> None:
    with serve(make(), api_key="sësame") as address:
        url = f"{address}/v1/models"
        for given in ("", "Bearer no", "Bearer", "Basic sësame", "sësame", "Bearer sësame x"):
            answer = httpx.get(url, headers={"authorization": given.encode()})
            error = refused(answer, 401)
            assert error["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        refused(httpx.post(f"{address}/v1/completions", json=TEXT), 401)
        refused(httpx.get(f"{address}/metrics"), 401)
        for scheme in ("Bearer", "bearer"):
            key = f"{scheme} sësame".encode()
            assert httpx.get(url, headers={"authorization": key}).status_code == 200
        assert httpx.get(f"{address}/health").status_code == 200


def test_a_stream_tells_an_error(make, monkeypatch) -> None:
    engine = make(request_seconds=1.0)
    with serve(engine) as address, openai.OpenAI(base_url=f"{address}/v1", api_key="x") as client:
        with pytest.raises(openai.APIError, match="not done after"):
            list(client.completions.create(**TEXT, max_tokens=4000, stream=True, temperature=0))
        engine.stop()
        assert httpx.get(f"{address}/health").status_code == 503
        refused(httpx.post(f"{address}/v1/completions", json=TEXT), 503)


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_rows", 0), ("max_queue", -1), ("lookup_tokens", 33), ("api_key", ""),
     ("request_seconds", float("nan"))],
)  # fmt: skip
def test_settings_that_make_no_sense(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field}: expected"):
        Settings(**{field: value})
