"""The command `path-attention benchmark serving_load`: many clients, and what they were told."""

from __future__ import annotations

import http.client
import json
import random
import resource
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from path_attention.benchmarks.comparison import (
    Report,
    at_least,
    name_of,
    pick_device,
    pick_dtype,
    publish,
    say,
    words,
)
from path_attention.benchmarks.serving import (
    SHAPES,
    burst,
    free_memory,
    make_model,
    make_tokenizer,
    random_ids,
    running,
)
from path_attention.models import PRESETS, load_model, load_tokenizer
from path_attention.serving.command import make_engine
from path_attention.serving.engine import Engine
from path_attention.serving.settings import Settings

_NAME = "path-attention"
_TELL_EVERY = 30.0  # seconds
# Bodies that must be refused, and how.
_BAD: tuple[tuple[bytes | dict[str, Any], int], ...] = (
    (b"{", 400),
    ({"model": "another"}, 404),
    ({"max_tokens": 0}, 400),
    ({"max_tokens": -3}, 400),
    ({"no_such_field": 1}, 400),
    ({"prompt": [0] * 100_000}, 400),
)


@dataclass(frozen=True)
class Case:
    """A request, and its answer when nothing else runs."""

    prompt: list[int]
    tokens: int
    answer: list[int]


@dataclass
class Tally:
    """What one client saw."""

    counts: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    different: list[tuple[Case, list[int]]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class BenchmarkServingLoad:
    """Clients that ask a server over HTTP for a time, and whether each was answered as if alone.

    Prompts and answers are of mixed lengths, half of the prompts begin alike, half of the answers
    are streamed. A fifth of the clients' requests is left half-way, one in twenty must be refused.
    Every answer is greedy, and compared token for token with that of the same request alone; where
    one differs, the two tokens' log-probabilities by a forward pass in float32 say by how much.
    Writes OUT.json and OUT.png and prints the table.
    """

    model: Path | None = None
    """Folder of a model; None takes random weights."""
    shape: str = "small"
    """Without --model: 760m, or small."""
    preset: str = "path"
    """Without --model."""
    clients: int = 32
    """That ask at once, each one request after the other."""
    seconds: float = 600.0
    """After which no new request begins."""
    cases: int = 64
    """Different requests."""
    prompt: int = 1500
    """The longest prompt."""
    output: int = 100
    """The longest answer."""
    rows: int = 32
    """Answers that are written at once."""
    prefix_bytes: int = 2**28
    """Of kept prefixes."""
    dtype: str = "auto"
    """bfloat16 on a GPU, float32 on the CPU."""
    device: str = "auto"
    """cpu, cuda, cuda:1 …"""
    out: Path = Path("results/serving_load")
    """Where the results go, without an ending."""

    def run(self) -> None:
        from path_attention.benchmarks.figure import print_rows

        device = pick_device(self.device)
        result = publish(
            self,
            "serving_load",
            what="Answers over HTTP that equal those of the same requests alone, requests that "
            "were left, refused as they must be, or lost; bytes held after the last one; by how "
            "much the process grew since before the first, kept prefixes included, right after "
            "the last answer and once the engine has rested; of an answer that differs, the gap "
            "of log-probabilities at its first other token",
            rows=[self.measure(device, say)],
            device=device,
            draw=_draw,
        )
        names = ("clients", "seconds", "equal", "different", "largest_gap", "left", "refused",
                 "lost", "tokens_per_second", "cache_bytes_after", "prefix_store_bytes_after",
                 "memory_growth_rested_mib")  # fmt: skip
        print_rows(result, names)

    def measure(self, device: torch.device, report: Report) -> dict[str, Any]:
        """The row of the result. ValueError on bad options."""
        at_least(self, clients=1, seconds=0, cases=1, prompt=2, output=1, rows=1, prefix_bytes=0)
        words("shape", self.shape, list(SHAPES))
        words("preset", self.preset, list(PRESETS))
        dtype = pick_dtype(self.dtype, device)
        if self.model is None:
            model: Any = make_model(self.shape, self.preset, device, dtype)
            tokenizer = make_tokenizer(model.config.vocab_size)
        else:
            model = load_model(self.model, dtype=dtype).to(device)  # pyright: ignore
            tokenizer = load_tokenizer(self.model, model)
        cases = self._cases(model)
        free_memory(device)
        report(f"{len(cases)} requests were answered alone")
        engine = make_engine(model, tokenizer, self._settings(self.prefix_bytes))
        with _server(engine) as port:
            engine.wait_for_rest(60)
            held = _memory(device)
            tallies, seconds = self._ask(port, cases, report)
            busy = _memory(device)
            engine.wait_for_rest(60)
            after = _memory(device)
            row = self._row(tallies, seconds, dtype, engine)
        row["largest_gap"] = _largest_gap(model, [x for one in tallies for x in one.different])
        for name, value in (("busy", busy), ("rested", after)):
            row[f"memory_growth_{name}_mib"] = None
            if held is not None and value is not None:
                row[f"memory_growth_{name}_mib"] = round((value - held) / 2**20, 1)
        return row

    def _settings(self, prefix_bytes: int) -> Settings:
        return Settings(
            max_prompt_tokens=self.prompt,
            max_output_tokens=self.output,
            max_rows=self.rows,
            max_queue=4 * self.clients,
            prefix_bytes=prefix_bytes,
            max_body_bytes=2**21,
        )

    def _cases(self, model: Any) -> list[Case]:
        """Requests of mixed lengths, answered one after the other without kept prefixes."""
        lengths, size, cases = random.Random(0), model.config.vocab_size, []
        with running(model, self._settings(0)) as engine:
            for n in range(self.cases):
                prompt = random_ids(lengths.randint(1, self.prompt), 1 + n, size)
                if n % 2:
                    prompt = (random_ids(self.prompt // 2, 0, size) + prompt)[: self.prompt]
                tokens = lengths.randint(1, self.output)
                answer = burst(engine, [prompt], tokens).answers[0]
                cases.append(Case(prompt, tokens, list(answer)))
        return cases

    def _ask(self, port: int, cases: Sequence[Case], report: Report) -> tuple[list[Tally], float]:
        tallies, began = [Tally() for _ in range(self.clients)], time.monotonic()
        threads = [
            threading.Thread(
                target=_client, args=(port, cases, n, tally, began + self.seconds), daemon=True
            )
            for n, tally in enumerate(tallies)
        ]
        for thread in threads:
            thread.start()
        told = began
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.1)
            if time.monotonic() > told + _TELL_EVERY:
                told = time.monotonic()
                total = sum((tally.counts for tally in tallies), Counter())
                report(f"{told - began:.0f} s: {dict(total)}")
        return tallies, time.monotonic() - began

    def _row(
        self, tallies: Sequence[Tally], seconds: float, dtype: torch.dtype, engine: Engine
    ) -> dict[str, Any]:
        total = sum((tally.counts for tally in tallies), Counter())
        registry = engine.metrics.registry
        speed = sum(tally.tokens for tally in tallies) / seconds
        row: dict[str, Any] = {"clients": self.clients, "seconds": round(seconds, 1)}
        row |= {"shape": self.shape if self.model is None else "a folder's"}
        row |= {"preset": self.preset if self.model is None else None, "dtype": name_of(dtype)}
        for name in ("equal", "different", "left", "refused", "lost"):
            row[name] = total[name]
        row["tokens_per_second"] = float(f"{speed:.4g}")
        for name in ("cache_bytes", "prefix_store_bytes", "running_answers", "queue_length"):
            value = registry.get_sample_value(f"path_attention_{name}")
            row[f"{name}_after"] = None if value is None else int(value)
        row["prefix_bytes_allowed"] = self.prefix_bytes
        return row


def _client(port: int, cases: Sequence[Case], number: int, tally: Tally, until: float) -> None:
    """Ask until the time is over. Whatever goes wrong is counted as lost."""
    chance = random.Random(number)
    while time.monotonic() < until:
        case, draw = chance.choice(cases), chance.random()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        try:
            if draw < 0.05:
                _ask_badly(connection, chance, tally)
            elif draw < 0.25:
                _leave(connection, case, tally)
            else:
                _ask_well(connection, case, tally, stream=draw < 0.62)
        except Exception as error:
            tally.counts["lost"] += 1
            say(f"lost: {type(error).__name__}: {error}")
        finally:
            connection.close()


def _post(connection: http.client.HTTPConnection, body: bytes) -> http.client.HTTPResponse:
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", body, headers)
    return connection.getresponse()


def _body(case: Case, **more: Any) -> bytes:
    asked = {"model": _NAME, "prompt": case.prompt, "max_tokens": case.tokens, "temperature": 0}
    return json.dumps({**asked, "return_token_ids": True, **more}).encode()


def _ask_well(
    connection: http.client.HTTPConnection, case: Case, tally: Tally, *, stream: bool
) -> None:
    answer = _post(connection, _body(case, stream=stream))
    text = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"status {answer.status}: {text[:200]!r}")
    if stream:
        *events, last = [x.removeprefix(b"data: ") for x in text.strip().split(b"\n\n")]
        if last != b"[DONE]":
            raise RuntimeError(f"a stream ended in {last[:200]!r}")
        told = json.loads(events[-1])
    else:
        told = json.loads(text)
    ids = told["path_attention"]["token_ids"]
    if told["path_attention"]["prompt_token_ids"] != case.prompt:
        raise RuntimeError("the answer is another request's")
    if ids != case.answer and _first_other(case.answer, ids) is None:
        raise RuntimeError(f"{len(ids)} tokens where alone there are {len(case.answer)}")
    tally.tokens += len(ids)
    tally.counts["equal" if ids == case.answer else "different"] += 1
    if ids != case.answer:
        tally.different.append((case, ids))


def _leave(connection: http.client.HTTPConnection, case: Case, tally: Tally) -> None:
    answer = _post(connection, _body(case, stream=True))
    for _ in range(case.tokens // 2):
        if not answer.readline():
            break
        answer.readline()  # events end with an empty line
    tally.counts["left"] += 1


def _ask_badly(connection: http.client.HTTPConnection, chance: random.Random, tally: Tally) -> None:
    change, status = chance.choice(_BAD)
    if isinstance(change, bytes):
        body = change
    else:
        body = json.dumps({"model": _NAME, "prompt": "a", **change}).encode()
    answer = _post(connection, body)
    told = json.loads(answer.read())
    keys = {"message", "type", "param", "code"}
    if answer.status != status or told["error"].keys() != keys:
        raise RuntimeError(f"status {answer.status} for {status}: {told}")
    tally.counts["refused"] += 1


@contextmanager
def _server(engine: Engine) -> Iterator[int]:
    """A server of an engine on a free port, which is yielded."""
    from path_attention.serving.server import make_server

    server = make_server(engine, engine.settings, port=0, log_level="warning")
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RuntimeError("the server did not start")
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def _memory(device: torch.device) -> int | None:
    """Bytes that this process holds: on the GPU, or resident; None where nobody tells."""
    free_memory(device)
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        return resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None


def _first_other(answer: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two answers differ first; None where one is the other's beginning."""
    pairs = zip(answer, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), None)


@torch.no_grad()
def _largest_gap(model: Any, different: Sequence[tuple[Case, list[int]]]) -> float | None:
    """Of answers that differ: log p of the token alone less that of the other, the largest |·|."""
    gaps, wide = [], model.float()
    for case, ids in {(*x.prompt, -1, *ids): (x, ids) for x, ids in different}.values():
        at = _first_other(case.answer, ids)
        assert at is not None  # else it was lost
        seen = torch.tensor([case.prompt + ids[:at]], device=model.device)
        logprobs = wide(seen, use_cache=False).logits[0, -1].log_softmax(0)
        gaps.append(abs(float(logprobs[case.answer[at]] - logprobs[ids[at]])))
    return float(f"{max(gaps):.3g}") if gaps else None


def _draw(result: Mapping[str, Any], path: Any) -> None:
    from path_attention.benchmarks.figure import Panel, draw_bars

    (row,) = result["rows"]
    bars = {
        ("requests", name): float(row[name])
        for name in ("equal", "different", "left", "refused", "lost")
    }
    title = f"{result['device']}: {row['clients']} clients, {row['seconds']:.0f} s"
    draw_bars([Panel("what became of requests", "requests", bars)], title, path)
