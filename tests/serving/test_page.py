"""The page's files, and what it asks the server for."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from small_server import make_ids, make_model, make_tokenizer

from path_attention.serving import page
from path_attention.serving.guards import Guards
from path_attention.serving.inspection import inspect_token
from path_attention.serving.metrics import Metrics
from path_attention.serving.page import page_router, spell
from path_attention.serving.settings import Settings

FOLDER = Path(page.__file__).parent / "page"
NAMES = sorted(path.name for path in FOLDER.iterdir())


def make_app(**changes: Any) -> FastAPI:
    engine = SimpleNamespace(model=make_model("path_fox"), tokenizer=make_tokenizer())
    vars(engine).update(changes)
    app = FastAPI()
    app.include_router(page_router(engine, longest=200))
    return app


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return make_app()


@pytest.fixture
def http(app) -> TestClient:
    return TestClient(app)


# --- Files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", *(f"page/{name}" for name in NAMES)])
def test_each_file_is_served_with_its_type_and_a_strict_policy(http, name) -> None:
    answer = http.get(f"/{name}")
    assert answer.status_code == 200
    assert answer.content == (FOLDER / (name.split("/")[-1] or "index.html")).read_bytes()
    kinds = {"": "html", "html": "html", "css": "css", "js": "javascript", "svg": "svg+xml"}
    assert kinds[name.rpartition(".")[2]] in answer.headers["content-type"]
    assert answer.headers["content-security-policy"].startswith("default-src 'self';")
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    again = http.get(f"/{name}", headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = http.get(f"/{name}", headers={"If-None-Match": '"other"'})
    assert other.status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/page/", "/page/page.py", "/page/../page.py", "/page/%2e%2e/page.py", "/page/x.js", "/page"],
)
def test_nothing_else_is_served(http, path) -> None:
    assert http.get(path, follow_redirects=False).status_code == 404


def test_the_page_brings_all_that_it_uses() -> None:
    """No outside address, no markup from text, no script or style in the markup."""
    for name in NAMES:
        text = (FOLDER / name).read_text(encoding="utf-8")
        outside = set(re.findall(r"(?:https?:)?//[\w.]+\.\w+", text))
        assert outside <= {"http://www.w3.org"}, name  # SVG's namespace, which nothing fetches
        for risky in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert risky not in text, name
        assert not re.search(r"\bstyle=|\bon\w+=|<style|<script(?![^>]*\bsrc=)", text), name


def test_scripts_find_what_they_look_for() -> None:
    class Markup(HTMLParser):
        ids: list[str] = []  # noqa: RUF012
        named: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag, attrs):
            told = dict(attrs)
            self.ids += [told["id"]] if "id" in told else []
            self.named += [told[n] for n in ("for", "aria-labelledby") if n in told]

    markup = Markup()
    markup.feed((FOLDER / "index.html").read_text(encoding="utf-8"))
    assert len(markup.ids) == len(set(markup.ids)) and set(markup.named) <= set(markup.ids)
    main, inspector = ((FOLDER / f"{n}.js").read_text("utf-8") for n in ("main", "inspector"))
    wanted = set(re.findall(r'part\("([\w-]+)"\)', main))
    wanted |= set(re.findall(r"\bparts\.(\w+)", inspector))
    assert len(wanted) > 20 and wanted <= set(markup.ids)


# --- Looking inside ------------------------------------------------------------------------------


def test_an_inspection_is_told_whole(http, app) -> None:
    model, ids = make_model("path_fox"), make_ids(90)
    asked = {"token_ids": ids, "position": 80, "layer": 1, "top": 5}
    answer = http.post("/inspect", json=asked)
    assert answer.status_code == 200, answer.text
    told, found = answer.json(), inspect_token(model, ids, 80, 1)
    named = {"position": 80, "query": 79, "layer": 1, "layers": 2, "normalizer": "softmax"}
    assert told.items() >= {**named, "transport": "householder", "decay": "forget"}.items()
    assert len(told["heads"]) == 2 and told["masses"] == found.masses()
    for n, head in enumerate(told["heads"]):
        weights = torch.tensor(head["shades"], dtype=torch.float64) * head["scale"]
        # shades are rounded to 4 digits
        assert (weights - found.weights[n]).abs().max() <= 0.51e-4 * head["scale"]
        assert head["largest"] == found.largest(n, 5)
        for row in head["largest"]:
            assert row["logit"] == row["match"] + row["decay"]
    curves = told["curves"]
    assert curves["distances"][-1] == 79 and len(curves["distances"]) <= 81
    assert found.cosine is not None
    assert curves["cosine"][1] == [float(found.cosine[1, 79 - s]) for s in curves["distances"]]


def test_spelt_tokens_are_the_text(http) -> None:
    tokenizer = make_tokenizer()
    ids = [*tokenizer("def f():\n  ")["input_ids"], 0, *tokenizer("ä→x")["input_ids"]]
    told = http.post("/inspect/spell", json={"token_ids": ids, "start": 11}).json()
    assert told["token_ids"] == ids and told["start"] == 11
    texts = told["texts"]
    assert "".join(texts) == "def f():\n  ä→x" and len(texts) == len(ids)
    assert texts[-6:] == ["", "ä", "", "", "→", "x"]
    assert told["names"] == {"11": "<|end|>", "12": "c3", "14": "e2", "15": "86"}
    # a character that the prompt's end cuts off is shown on either side
    half = tokenizer("→")["input_ids"]
    assert spell(tokenizer, half, 1)["texts"][0] == "�"
    assert spell(tokenizer, [])["texts"] == []


def test_tokens_that_the_tokenizer_lacks_are_numbers() -> None:
    """A model's rows may be more than its tokens, and tokens may leave holes."""
    http = TestClient(make_app(model=make_model(vocab_size=270)))
    told = http.post("/inspect/spell", json={"token_ids": [66, 265, 67]}).json()
    assert told["texts"] == ["a", "", "b"] and told["names"] == {"1": "265"}
    assert http.post("/inspect/spell", json={"token_ids": [270]}).status_code == 400


def test_a_stopped_answer_is_cut_anew(http) -> None:
    tokenizer = make_tokenizer()
    told = http.post("/inspect/cut", json={"prompt": "ab", "answer": "cd"}).json()
    assert told["token_ids"] == [0, *tokenizer("abcd")["input_ids"]] and told["start"] == 3
    assert told["names"] == {"0": "<|end|>"}
    messages = [{"role": "user", "content": "hi"}]
    told = http.post("/inspect/cut", json={"prompt": messages, "answer": "!"}).json()
    assert "".join(told["texts"]) == "user: hi\nassistant:!"
    assert told["start"] == len(told["token_ids"]) - 1


IDS = [5, 6, 7, 8]
GOOD = {"token_ids": IDS, "position": 2, "layer": 0}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/inspect", "{", None),
        ("/inspect", [], None),
        ("/inspect", {"token_ids": IDS, "position": 2}, "layer"),
        ("/inspect", {**GOOD, "layer": "0"}, "layer"),
        ("/inspect", {**GOOD, "layer": 2}, "layer"),
        ("/inspect", {**GOOD, "layer": -1}, "layer"),
        ("/inspect", {**GOOD, "position": 0}, "position"),
        ("/inspect", {**GOOD, "position": 4}, "position"),
        ("/inspect", {**GOOD, "position": 1.5}, "position"),
        ("/inspect", {**GOOD, "top": 0}, "top"),
        ("/inspect", {**GOOD, "path": "/etc/passwd"}, "path"),
        ("/inspect", {**GOOD, "token_ids": [1, 258, 3]}, "token_ids"),
        ("/inspect", {**GOOD, "token_ids": [1, 10**30, 3]}, "token_ids"),
        ("/inspect", {**GOOD, "token_ids": [1, -1, 3]}, "token_ids"),
        ("/inspect", {**GOOD, "token_ids": [1] * 201}, "token_ids"),
        ("/inspect/spell", {"token_ids": [258]}, "token_ids"),
        ("/inspect/spell", {"token_ids": [1] * 201}, "token_ids"),
        ("/inspect/spell", {"token_ids": IDS, "start": -1}, "start"),
        ("/inspect/cut", {"prompt": [], "answer": ""}, None),
        ("/inspect/cut", {"prompt": [{"role": "cat", "content": ""}], "answer": ""}, "messages"),
        ("/inspect/cut", {"prompt": "x" * 300, "answer": ""}, "token_ids"),
    ],
)
def test_bad_requests_get_openais_error_shape(http, path, body, param) -> None:
    sent = {"content": body} if isinstance(body, str) else {"json": body}
    answer = http.post(path, headers={"Content-Type": "application/json"}, **sent)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and error["message"]
    if param is not None:
        assert error["param"].split(".")[0] == param


def test_a_model_of_another_library_says_that_it_cannot_be_looked_into() -> None:
    http = TestClient(make_app(model=torch.nn.Linear(2, 2)))
    answer = http.post("/inspect", json=GOOD)
    assert answer.status_code == 400
    assert "expected a PathAttentionForCausalLM" in answer.json()["error"]["message"]


def test_only_who_has_the_key_may_look_inside(app) -> None:
    guarded = FastAPI()
    guarded.mount("/", app)
    guards = Guards(guarded, Settings(api_key="secret"), Metrics())
    http = TestClient(guards, base_url="http://127.0.0.1")
    assert http.get("/").status_code == 200
    for path in ("/inspect", "/inspect/spell", "/inspect/cut"):
        assert http.post(path, json={}).status_code == 401
    key = {"Authorization": "Bearer secret"}
    assert http.post("/inspect", json=GOOD, headers=key).status_code == 200


def test_one_token_at_a_time_while_the_loop_goes_on(app, monkeypatch) -> None:
    running, most, lock = 0, 0, threading.Lock()
    go = threading.Event()
    ids = make_ids(20)
    found = inspect_token(make_model("path_fox"), ids, 9, 0)

    def slow(*_: Any) -> Any:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        assert go.wait(20)
        time.sleep(0.005)
        with lock:
            running -= 1
        return found

    monkeypatch.setattr(page, "inspect_token", slow)

    async def ask() -> list[int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://page") as client:
            body = {"token_ids": ids, "position": 9, "layer": 0}
            asked = [asyncio.create_task(client.post("/inspect", json=body)) for _ in range(11)]
            refused, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            assert (await client.get("/")).status_code == 200  # nothing is held up
            assert all(task.result().headers["retry-after"] == "1" for task in refused)
            go.set()
            return sorted([(await task).status_code for task in asked])

    assert asyncio.run(ask()) == [200] * 8 + [429] * 3
    assert most == 1


def test_answers_and_inspections_leave_each_other_alone(server) -> None:
    address, engine = server
    name = engine.settings.model_name
    body = {"model": name, "prompt": "abc" * 20, "max_tokens": 150, "temperature": 0}
    asked = {"token_ids": make_ids(90), "position": 80, "layer": 1}
    with httpx.Client(base_url=address, timeout=60) as client:
        alone = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        exact = client.post("/inspect", json=asked).json()
        text, told, events = "", [], 0
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    events += 1
                    if events % 10 == 1:
                        told.append(httpx.post(f"{address}/inspect", json=asked).json())
    assert text == alone and len(told) > 5
    for found in told:
        for a, b in zip(found["heads"], exact["heads"], strict=True):
            assert a["largest"][0] == pytest.approx(b["largest"][0], rel=1e-4, abs=1e-5)
