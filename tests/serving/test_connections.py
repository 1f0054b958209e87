"""Who may ask under which name, and clients that are slow, long-winded or never read."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace

import httpx
import pytest
from small_server import gauge, make_ids, serve, wait_for

from path_attention.serving.command import Serve
from path_attention.serving.server import Connection, is_loopback, make_server
from path_attention.serving.settings import Settings

NAME = "path-attention"
TEXT = {"model": NAME, "prompt": "a", "max_tokens": 1}
SECONDS = 1.2


def connect(address: str) -> closing[socket.socket]:
    host, _, port = address.removeprefix("http://").partition(":")
    return closing(socket.create_connection((host, int(port)), timeout=20))


def read(wire: socket.socket) -> bytes:
    """All that comes until the server ends."""
    parts = []
    while part := wire.recv(2**16):
        parts.append(part)
    return b"".join(parts)


def refused(told: bytes, status: int) -> dict:
    """The error of a response as it stands on the wire, in OpenAI's shape."""
    head, _, body = told.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), told
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["message"]
    return error


def head(size: int, path: str = "/v1/completions") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {size}\r\n\r\n"
    ).encode()


@pytest.fixture(scope="module")
def hasty(server) -> Iterator[str]:
    """A server beside the shared one, of the same engine, whose clients have little time."""
    with serve_beside(server[1], client_seconds=SECONDS) as address:
        yield address


def serve_beside(engine, **settings):
    """As `serve`, for an engine that another server has started; it is running at the end."""

    class Shared:
        """The engine, which this server neither starts nor stops."""

        def __getattr__(self, name):
            return getattr(engine, name)

        def start(self) -> None: ...

        def close(self, seconds: float) -> None: ...

        def stop(self) -> None: ...

    return serve(Shared(), **settings)  # pyright: ignore[reportArgumentType]


# --- Names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST:80", "127.0.0.1:9", "[::1]:8000"])
def test_loopbacks_own_names_are_answered(server, name: str) -> None:
    assert httpx.get(f"{server[0]}/health", headers={"host": name}).status_code == 200


@pytest.mark.parametrize(
    "name", ["evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "", "[::2]"]
)
def test_a_name_that_was_made_to_lead_here_is_refused(server, name: str) -> None:
    """A page of that name would be of one origin with the server, and read what it likes."""
    for path in ("/", "/health", "/metrics", "/v1/models"):
        answer = httpx.get(f"{server[0]}{path}", headers={"host": name})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")
    answer = httpx.post(f"{server[0]}/v1/completions", json=TEXT, headers={"host": name})
    assert answer.status_code == 403


def test_what_names_no_host_is_no_page(server) -> None:
    """As load balancers ask for a health by HTTP/1.0."""
    with connect(server[0]) as wire:
        wire.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert read(wire).startswith(b"HTTP/1.1 200 ")


def test_names_can_be_added(server) -> None:
    with serve_beside(server[1], allowed_hosts=("Chat.example",)) as address:
        for name, status in (("chat.example:443", 200), ("other.example", 403), ("localhost", 200)):
            answer = httpx.get(f"{address}/v1/models", headers={"host": name})
            assert answer.status_code == status


@pytest.mark.parametrize(
    ("host", "given", "asked", "status"),
    [
        ("127.0.0.1", (), "10.1.2.3", 403),
        ("127.0.0.2", (), "127.0.0.2", 200),
        ("::1", (), "evil.example", 403),
        ("0.0.0.0", (), "10.1.2.3", 200),
        ("0.0.0.0", ("chat.example",), "10.1.2.3", 403),
        ("0.0.0.0", ("chat.example",), "chat.example", 200),
    ],
)
def test_beyond_loopback_any_name_will_do(server, host, given, asked, status) -> None:
    import asyncio

    made = make_server(server[1], Settings(allowed_hosts=given), host=host, port=0)
    transport = httpx.ASGITransport(made.config.app)  # pyright: ignore[reportArgumentType]

    async def ask() -> int:
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{asked}") as client:
            return (await client.get("/health")).status_code

    assert asyncio.run(ask()) == status
    assert is_loopback(host) == (host != "0.0.0.0")


def test_a_server_for_all_without_a_key_warns(tmp_path, monkeypatch, caplog, model, tokenizer):
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr("uvicorn.Server.run", lambda self: None)
    for host, key, count in (("0.0.0.0", None, 1), ("0.0.0.0", "k", 0), ("localhost", None, 0)):
        caplog.clear()
        Serve(model=tmp_path, host=host, device="cpu", settings=Settings(api_key=key)).run()
        told = [r for r in caplog.records if r.levelno == logging.WARNING and "key" in r.message]
        assert len(told) == count


# --- Other origins -------------------------------------------------------------------------------

_ASKS = {"origin": "https://page.example", "access-control-request-method": "POST",
         "access-control-request-headers": "authorization,content-type"}  # fmt: skip


def test_pages_of_other_origins_are_let_in_by_name_alone(server) -> None:
    url = f"{server[0]}/v1/completions"
    for answer in (httpx.options(url, headers=_ASKS), httpx.post(url, json=TEXT, headers=_ASKS)):
        assert not [name for name in answer.headers if name.startswith("access-control")]
    assert httpx.options(url, headers=_ASKS).status_code == 405
    origins = {"cors_origins": (_ASKS["origin"],)}
    with serve_beside(server[1], api_key="k", **origins) as address:
        url = f"{address}/v1/completions"
        asked = httpx.options(url, headers=_ASKS)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == _ASKS["origin"]
        assert "authorization" in asked.headers["access-control-allow-headers"]
        for key, status in (("k", 200), ("no", 401)):  # a page may read why it was refused
            headers = {"origin": _ASKS["origin"], "authorization": f"Bearer {key}"}
            answer = httpx.post(url, json=TEXT, headers=headers)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == _ASKS["origin"]
        other = httpx.options(url, headers={**_ASKS, "origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("allowed_hosts", "a.example:80"), ("allowed_hosts", ""), ("allowed_hosts", "http://a"),
        ("cors_origins", "page.example"), ("cors_origins", "https://page.example/x"),
        ("cors_origins", "https://*.example"),
    ],
)  # fmt: skip
def test_names_that_make_no_sense(field: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: expected"):
        Settings(**{field: (value,)})


# --- Slow and long-winded ------------------------------------------------------------------------


def test_a_head_that_comes_in_drops_is_given_up(hasty) -> None:
    """However often another byte comes: the time is that of the whole."""
    with connect(hasty) as wire:
        began = time.monotonic()
        wire.sendall(b"GET /health HTTP/1.1\r\n")
        with pytest.raises(OSError):
            for _ in range(100):
                wire.sendall(b"a: b\r\n")
                time.sleep(0.05)
        assert time.monotonic() - began < 10 * SECONDS
    with connect(hasty) as wire:
        wire.sendall(b"GET /hea")
        assert refused(read(wire), 408)["code"] == "timeout"


def test_a_connection_that_says_nothing_is_closed(hasty) -> None:
    with connect(hasty) as wire:
        assert read(wire) == b""


def test_a_second_head_has_no_more_time_than_the_first(hasty) -> None:
    with connect(hasty) as wire:
        wire.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea")
        first, _, second = read(wire).partition(b'{"status":"ok"}')
        assert first.startswith(b"HTTP/1.1 200") and refused(second, 408)


def test_a_body_that_comes_in_drops_is_given_up(hasty) -> None:
    body = json.dumps(TEXT).encode()
    with connect(hasty) as wire:
        wire.sendall(head(len(body)) + body[:-1])
        assert refused(read(wire), 408)["code"] == "timeout"  # and the connection ends
    with connect(hasty) as wire:  # in time, in pieces
        for piece in (head(len(body)), body[:5], body[5:]):
            wire.sendall(piece)
            time.sleep(SECONDS / 10)
        assert wire.recv(2**16).startswith(b"HTTP/1.1 200")


def test_a_refused_body_is_not_read_for_ever(hasty) -> None:
    with connect(hasty) as wire:
        wire.sendall(head(10**9))
        assert b"HTTP/1.1 413" in wire.recv(2**16)
        with pytest.raises(OSError):
            for _ in range(500):
                wire.sendall(b"x" * 100)
                time.sleep(0.02)


def test_a_client_that_leaves_in_its_body_is_not_answered(server) -> None:
    """The part that came may be JSON too."""
    _, engine = server
    before = gauge(engine, "prompt_tokens_total")
    body = json.dumps({**TEXT, "max_tokens": 500}).encode()
    count = gauge(engine, "http_responses_total", status="499")
    with connect(server[0]) as wire:
        wire.sendall(head(len(body) + 5) + body)
    wait_for(lambda: gauge(engine, "http_responses_total", status="499") == count + 1)
    assert gauge(engine, "prompt_tokens_total") == before


def test_what_nobody_reads_is_not_kept(make) -> None:
    engine = make(max_prompt_tokens=3000, prefill_tokens=3000, prefix_bytes=0)
    body = {"model": NAME, "prompt": [make_ids(3000)] * 4, "max_tokens": 0, "echo": True}
    told = json.dumps({**body, "stream": True, "logprobs": 20}).encode()  # megabytes
    with serve(engine, client_seconds=SECONDS) as address, connect(address) as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        wire.sendall(head(len(told)) + told)
        wait_for(lambda: bool(engine.running))
        wait_for(lambda: not engine.running)
        time.sleep(4 * SECONDS)
        assert b"[DONE]" not in read(wire)


def test_who_reads_slowly_is_not_given_up() -> None:
    class Own(Connection):
        limits = Settings(client_seconds=7)

    one, waiting, sizes, aborted = object.__new__(Own), [], [900, 500, 499, 499], []
    one.loop = SimpleNamespace(call_later=lambda *told: waiting.append(told))  # pyright: ignore
    one.transport = SimpleNamespace(  # pyright: ignore
        get_write_buffer_size=lambda: sizes.pop(0), abort=lambda: aborted.append(len(sizes))
    )
    one._watch(None)
    while waiting:
        seconds, call, *args = waiting.pop()
        assert seconds == 7 and not aborted
        call(*args)
    assert aborted == [0]


def test_long_heads_are_refused(server) -> None:
    """In pieces, at once, and in the path."""
    address = server[0]
    for answer in (
        httpx.get(f"{address}/health", headers={"x": "y" * 17_000}),
        httpx.get(f"{address}/health", headers={f"x{n}": "y" * 200 for n in range(90)}),
        httpx.get(f"{address}/health?{'y' * 17_000}"),
    ):
        assert answer.status_code == 431 and answer.json()["error"]["message"]
    assert httpx.get(f"{address}/health", headers={"x": "y" * 15_000}).status_code == 200
    with connect(address) as wire:
        wire.sendall(b"GET /health HTTP/1.1\r\n")
        with pytest.raises(OSError):
            for n in range(2000):
                wire.sendall(b"x%d: %s\r\n" % (n, b"y" * 500))
                time.sleep(0.001)
            raise AssertionError("a megabyte was taken")


def test_what_is_no_http_is_told_so(server) -> None:
    for wrong in (b"hello\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", head(3)[:-4] + b"\r\n: x\r\n\r\n"):
        with connect(server[0]) as wire:
            wire.sendall(wrong)
            refused(read(wire), 400)
    with connect(server[0]) as wire:  # in a body too
        chunked = head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        wire.sendall(chunked + b"zz\r\n")
        refused(read(wire), 400)


def test_what_reaches_no_route_is_numbered_and_counted(server) -> None:
    address, engine = server
    before = gauge(engine, "http_responses_total", status="400")
    with connect(address) as wire:
        wire.sendall(b"hello\r\n\r\n")
        assert b"x-request-id: req_" in read(wire)
    assert gauge(engine, "http_responses_total", status="400") == before + 1


def test_a_server_that_ends_tells_who_waits_and_who_takes_too_long(make, monkeypatch) -> None:
    """By the engine's errors: no stream is cut off."""
    monkeypatch.setattr("path_attention.serving.server._LAST", 1)
    engine, told = make(max_rows=1), {}

    def ask(name: str, address: str, **options: object) -> None:
        body = {**TEXT, "logit_bias": {"0": -100}, "stream": True, **options}
        told[name] = httpx.post(f"{address}/v1/completions", json=body, timeout=60).text

    with serve(engine, max_output_tokens=10**6, max_prompt_tokens=64) as address:
        engine.cache_bytes = 2**50
        threads = [
            threading.Thread(target=ask, args=(name, address), kwargs={"max_tokens": tokens})
            for name, tokens in (("runs", 10**6), ("waits", 1))
        ]
        for thread, queue in zip(threads, (0, 1), strict=True):
            thread.start()
            wait_for(lambda q=queue: bool(engine.running) and gauge(engine, "queue_length") == q)
    for thread in threads:
        thread.join(30)
    assert told["runs"].count("data: ") > 1
    for text in told.values():
        assert "shutting down" in text.rstrip().rpartition("data: ")[2]
    ended = {x: gauge(engine, "requests_total", outcome=x) for x in ("rejected", "timeout")}
    assert ended == {"rejected": 1, "timeout": 1}


def test_connections_are_counted(make) -> None:
    with serve(make(), max_connections=2) as address:
        with connect(address) as first, connect(address) as second:
            for wire in (first, second):
                wire.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert wire.recv(2**16).startswith(b"HTTP/1.1 200")
            with pytest.raises(OSError), connect(address) as third:
                third.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert read(third) == b""
                raise ConnectionError
        wait_for(lambda: answers(address))


def answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health").status_code == 200
    except httpx.TransportError:
        return False
