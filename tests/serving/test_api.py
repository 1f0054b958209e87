"""The API under the real `openai` client, against the model itself."""

from __future__ import annotations

import json
import re
import sys
import time

import httpx
import openai
import pytest
import torch
from small_server import Asked, gauge, make_ids, serve, wait_for

from path_attention.models.generation import encode_prompt
from path_attention.serving.prompts import PLAIN_TEMPLATE

NAME = "path-attention"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "größe?"}]


def forward(model, ids: list[int]) -> torch.Tensor:
    """Log-probabilities `[T, V]` after each of ids, by a plain forward pass."""
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0].double().log_softmax(1)


def greedy(model, prompt: list[int], tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(forward(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


def text_of(tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


def test_chat(client, server, model, tokenizer) -> None:
    told = client.chat.completions.create(
        model=NAME,
        messages=CHAT,
        max_tokens=15,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    prompt = encode_prompt(tokenizer, "system: Be brief.\nuser: größe?\nassistant:")[0].tolist()
    expected = greedy(model, prompt, 15)
    (choice,) = told.choices
    assert choice.message.role == "assistant" and choice.finish_reason == "length"
    assert choice.message.content == text_of(tokenizer, expected)
    ids = told.model_extra["path_attention"]
    assert ids == {"token_ids": expected, "prompt_token_ids": prompt}
    usage = told.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 15)
    assert usage.total_tokens == len(prompt) + 15
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert (told.object, told.model) == ("chat.completion", NAME)


def test_a_chat_template_is_the_tokenizers(model, tokenizer) -> None:
    import copy

    from path_attention.serving.prompts import Prompts

    own = copy.deepcopy(tokenizer)
    own.chat_template = "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}{% endfor %}"
    prompts = Prompts(own)
    assert prompts.has_template
    assert prompts.encode(CHAT) == encode_prompt(tokenizer, "<s>Be brief.<u>größe?")[0].tolist()
    assert tokenizer.chat_template is None and Prompts(tokenizer).tokenizer.chat_template
    assert "assistant:" in PLAIN_TEMPLATE


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_is_the_answer_in_pieces(client, n: int) -> None:
    options = {
        "model": NAME,
        "messages": CHAT,
        "max_tokens": 25,
        "seed": 5,
        "n": n,
        "logprobs": True,
    }
    whole = client.chat.completions.create(**options)
    stream = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    texts, finishes = [""] * n, [None] * n
    tokens: list[list[str]] = [[] for _ in range(n)]
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        assert finishes[choice.index] is None and chunk.usage is None
        texts[choice.index] += choice.delta.content or ""
        finishes[choice.index] = choice.finish_reason
        if choice.logprobs is not None:
            tokens[choice.index] += [entry.token for entry in choice.logprobs.content]
    assert texts == [choice.message.content for choice in whole.choices]
    assert finishes == [choice.finish_reason for choice in whole.choices]
    assert tokens == [[e.token for e in c.logprobs.content] for c in whole.choices]
    assert not chunks[-1].choices and chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert len({chunk.id for chunk in chunks}) == 1
    assert len(chunks) > 10


def test_characters_are_whole_in_a_stream(client, tokenizer) -> None:
    """Random bytes are hardly ever characters: no piece may end within one that is."""
    bias = {str(tokenizer.convert_tokens_to_ids(t)): 8 for t in ("Ã", "©", "¶")}  # bytes of é, ö
    stream = client.chat.completions.create(
        model=NAME, messages=CHAT, max_tokens=80, seed=1, stream=True, logit_bias=bias
    )
    pieces = [c.choices[0].delta.content or "" for c in stream]
    again = client.chat.completions.create(
        model=NAME, messages=CHAT, max_tokens=80, seed=1, logit_bias=bias,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    ids = again.model_extra["path_attention"]["token_ids"]
    assert "".join(pieces) == again.choices[0].message.content == text_of(tokenizer, ids)
    assert any("é" in piece or "ö" in piece for piece in pieces)


def test_chat_logprobs(client, model, tokenizer) -> None:
    told = client.chat.completions.create(
        model=NAME, messages=CHAT, max_tokens=12, temperature=1.4, top_p=0.9, seed=3, logprobs=True,
        top_logprobs=4, presence_penalty=1.0, extra_body={"return_token_ids": True},
    )  # fmt: skip
    ids = told.model_extra["path_attention"]
    prompt, answer = ids["prompt_token_ids"], ids["token_ids"]
    logprobs = forward(model, prompt + answer)[len(prompt) - 1 : -1]
    entries = told.choices[0].logprobs.content
    assert len(entries) == 12
    for token, entry, row in zip(answer, entries, logprobs, strict=True):
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
        best, at = row.topk(4)
        assert [e.logprob for e in entry.top_logprobs] == pytest.approx(best.tolist(), abs=1e-4)
        assert entry.top_logprobs[0].bytes == list(raw(tokenizer, int(at[0])))
        assert entry.bytes == list(raw(tokenizer, token))


def raw(tokenizer, token: int) -> bytes:
    """By the decoder alone: what a token adds behind one that leaves nothing open."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    back = {character: byte for byte, character in bytes_to_unicode().items()}
    return bytes(back[character] for character in tokenizer.convert_ids_to_tokens(token))


def test_an_answer_goes_back_as_it_came(client, tokenizer) -> None:
    """A chat's next turn with the client's own message object, whose other fields are null."""
    first = client.chat.completions.create(model=NAME, messages=CHAT, max_tokens=5, temperature=0)
    message = first.choices[0].message
    again = [*CHAT, message, {"role": "user", "content": [{"type": "text", "text": "why?"}]}]
    told = client.chat.completions.create(
        model=NAME, messages=again, max_tokens=1, extra_body={"return_token_ids": True}
    )
    text = f"system: Be brief.\nuser: größe?\nassistant: {message.content}\nuser: why?\nassistant:"
    ids = encode_prompt(tokenizer, text)[0].tolist()
    assert told.model_extra["path_attention"]["prompt_token_ids"] == ids


def test_any_number_of_likeliest_tokens(client) -> None:
    options = {"model": NAME, "prompt": "ab", "max_tokens": 20, "seed": 4}
    every = client.completions.create(**options, extra_body={"top_k": 10**30})
    assert every.choices[0].text == client.completions.create(**options).choices[0].text


def test_completions_of_texts_and_ids(client, model, tokenizer) -> None:
    texts = ["def f(x):", "import os"]
    told = client.completions.create(model=NAME, prompt=texts, max_tokens=6, temperature=0, n=2)
    ids = [encode_prompt(tokenizer, text)[0].tolist() for text in texts]
    expected = [text_of(tokenizer, greedy(model, x, 6)) for x in ids]
    assert [c.text for c in told.choices] == [expected[0]] * 2 + [expected[1]] * 2
    assert [c.index for c in told.choices] == [0, 1, 2, 3]
    assert told.usage.prompt_tokens == sum(map(len, ids)) and told.usage.completion_tokens == 24
    again = client.completions.create(model=NAME, prompt=ids, max_tokens=6, temperature=0)
    assert [c.text for c in again.choices] == expected
    assert client.completions.create(model=NAME, prompt="a").usage.completion_tokens <= 16


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_scores_its_prompt(client, model, tokenizer, stream: bool) -> None:
    ids = make_ids(30)
    told = client.completions.create(
        model=NAME, prompt=ids, max_tokens=3, temperature=0, echo=True, logprobs=2, stream=stream
    )
    text, values, tops = "", [], []
    for choice in [c for chunk in (told if stream else [told]) for c in chunk.choices]:
        text += choice.text
        if choice.logprobs is not None:
            values += choice.logprobs.token_logprobs
            tops += choice.logprobs.top_logprobs
    every = ids + greedy(model, ids, 3)
    assert text == text_of(tokenizer, ids) + text_of(tokenizer, every[30:])
    assert values[0] is None and tops[0] is None
    logprobs = forward(model, every)[:-1]
    expected = logprobs.gather(1, torch.tensor(every[1:])[:, None])[:, 0].tolist()
    assert values[1:] == pytest.approx(expected, abs=1e-4)
    best, at = logprobs.topk(2)
    for top, row, ids_, own, token in zip(tops[1:], best, at, expected, every[1:], strict=True):
        wanted = row.tolist() if token in ids_ else [*row.tolist(), own]  # the token itself too
        assert sorted(top.values()) == pytest.approx(sorted(wanted), abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_offsets_are_where_tokens_begin(client, tokenizer, echo: bool, stream: bool) -> None:
    """Of special tokens, which have no text, and of characters of several tokens too."""
    bias = {str(tokenizer.convert_tokens_to_ids(t)): 9 for t in ("Ã", "©", "x")}  # é has two
    told = client.completions.create(
        model=NAME, prompt=["a→b", "ä"], max_tokens=30, seed=3, logprobs=0, echo=echo, n=2,
        logit_bias=bias, stream=stream,
    )  # fmt: skip
    texts, names, offsets = (dict.fromkeys(range(4), x) for x in ("", [], []))
    for choice in [c for chunk in (told if stream else [told]) for c in chunk.choices]:
        texts[choice.index] += choice.text
        if choice.logprobs is not None:
            names[choice.index] = names[choice.index] + choice.logprobs.tokens
            offsets[choice.index] = offsets[choice.index] + choice.logprobs.text_offset
    if echo:
        assert offsets[1][:6] == [0, 0, 1, 1, 1, 2] and offsets[2][:4] == [0, 0, 0, 1]
    for n, text in texts.items():
        assert offsets[n] == sorted(offsets[n]) and len(text) > 10
        for name, at in zip(names[n], offsets[n], strict=True):
            # Behind bytes that are no character it may be where those are.
            assert name in ("<|end|>", text[at]) or name[:6] == "bytes:" or text[at] == "�"


def test_offsets_where_a_prompt_names_special_tokens(client) -> None:
    """They have no text of their own, but the prompt is told as it was typed."""
    options = {"model": NAME, "max_tokens": 1, "echo": True, "logprobs": 0, "seed": 1}
    told = client.completions.create(prompt="<|end|>a→<|pad|>b", **options).choices[0]
    assert told.text.startswith("<|end|>a→<|pad|>b")
    assert told.logprobs.tokens[:7:5] == ["<|end|>", "<|pad|>"]
    assert told.logprobs.text_offset == [0, 7, 8, 8, 8, 9, 16, 17]
    told = client.completions.create(prompt=[0, 66, 1, 67], **options).choices[0]  # by number
    assert told.text.startswith("ab") and told.logprobs.text_offset == [0, 0, 1, 1, 2]


def test_an_echo_alone(client) -> None:
    told = client.completions.create(model=NAME, prompt="abc", max_tokens=0, echo=True, logprobs=0)
    assert told.choices[0].text == "abc" and told.usage.completion_tokens == 0
    assert len(told.choices[0].logprobs.tokens) == 4  # with the one that begins a text


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_span_tokens_and_are_not_told(client, stream: bool) -> None:
    options = {"model": NAME, "prompt": "x", "max_tokens": 60, "seed": 2}
    full = client.completions.create(**options).choices[0].text
    at = next(n for n in range(20, len(full) - 3) if full.find(full[n : n + 3]) == n)
    stop = [full[at : at + 3], "never there"]
    told = client.completions.create(**options, stop=stop, stream=stream, logprobs=0)
    choices = [c for chunk in (told if stream else [told]) for c in chunk.choices]
    assert "".join(choice.text for choice in choices) == full[:at]
    assert choices[-1].finish_reason == "stop"
    names = [name for c in choices if c.logprobs is not None for name in c.logprobs.tokens]
    assert names
    one = client.completions.create(**options, stop=full[at : at + 3])
    assert one.choices[0].text == full[:at] and one.usage.completion_tokens < 60


def test_penalties_and_biases(client, model) -> None:
    options = {"model": NAME, "prompt": make_ids(5), "temperature": 0, "max_tokens": 30}

    def ids(**more) -> list[int]:
        more["extra_body"] = {"return_token_ids": True, **more.pop("extra_body", {})}
        told = client.completions.create(**options, **more)
        return told.model_extra["path_attention"]["token_ids"]

    assert ids(logit_bias={"77": 100}) == [77] * 30
    assert 77 not in ids(logit_bias={"77": -100})
    for presence, frequency in ((2.0, 0.0), (0.0, 1.5), (-0.5, 0.7)):
        written: list[int] = []
        for _ in range(30):
            scores = forward(model, options["prompt"] + written)[-1]
            scores[77] += 5
            for token in set(written):
                scores[token] -= presence + frequency * written.count(token)
            written.append(int(scores.argmax()))
        penalties = {"presence_penalty": presence, "frequency_penalty": frequency}
        assert ids(logit_bias={"77": 5}, **penalties) == written
    del options["temperature"]
    assert ids(extra_body={"top_k": 1}) == ids(top_p=1e-6) == ids(temperature=0)
    assert greedy(model, options["prompt"], 30) == ids(temperature=0)


def test_models_health_and_metrics(client, server) -> None:
    address, _ = server
    (told,) = client.models.list().data
    assert told.id == NAME == client.models.retrieve(NAME).id
    assert told.model_extra["path_attention"]["engine"] == "batched"
    assert told.model_extra["path_attention"]["chat_template"] == "plain"
    answer = httpx.get(f"{address}/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    text = httpx.get(f"{address}/metrics").text
    for name in ("requests_total", "queue_length", "prompt_tokens_total", "output_tokens_total",
                 "time_to_first_token_seconds_count", "time_per_output_token_seconds_sum",
                 "cache_bytes", "cache_limit_bytes", "prefix_lookups_total", "prefix_hits_total",
                 "output_tokens_per_second", "queue_seconds_bucket", "http_responses_total",
                 "request_seconds_bucket"):  # fmt: skip
        assert re.search(rf"^path_attention_{name}[ {{]", text, re.M), name
    assert sys.platform != "linux" or re.search("^process_resident_memory_bytes [0-9]", text, re.M)


def test_metrics_tell_what_happened(make) -> None:
    """Of one answer, one that had to wait for it, one that is refused, and a kept prefix."""
    engine = make(max_rows=1)
    with serve(engine) as address:
        url, body = f"{address}/v1/completions", {"model": NAME, "prompt": make_ids(300)}
        began = time.monotonic()
        first = Asked(engine, make_ids(3), 150)
        wait_for(lambda: bool(engine.running))
        assert httpx.post(url, json={**body, "max_tokens": 7, "temperature": 0}).status_code == 200
        wait = time.monotonic() - began
        assert len(first.ids()) == 150
        httpx.post(url, json={**body, "max_tokens": 2, "temperature": 0})
        assert httpx.post(url, json={**body, "n": 0}).status_code == 400
        wait_for(lambda: not engine.running)
    assert gauge(engine, "http_responses_total", status="200") == 2
    assert gauge(engine, "http_responses_total", status="400") == 1
    assert gauge(engine, "queue_seconds_count") == 3
    assert 0 < gauge(engine, "queue_seconds_sum") < wait
    assert gauge(engine, "time_to_first_token_seconds_count") == 3
    assert gauge(engine, "request_seconds_count", outcome="length") == 3
    assert gauge(engine, "request_seconds_sum", outcome="length") > gauge(
        engine, "time_to_first_token_seconds_sum"
    ) > gauge(engine, "queue_seconds_sum")  # fmt: skip
    assert gauge(engine, "output_tokens_total") == 159
    assert (gauge(engine, "prefix_lookups_total"), gauge(engine, "prefix_hits_total")) == (3, 1)
    assert gauge(engine, "cache_limit_bytes") == engine.cache_bytes > 0


def test_speed_is_that_of_the_last_seconds(monkeypatch) -> None:
    from path_attention.serving.metrics import Speed

    now, speed = 1000.2, Speed()
    monkeypatch.setattr("time.monotonic", lambda: now)
    for _ in range(25):  # 8 a second, in pieces
        speed.add(5)
        speed.add(3)
        now += 1
    assert speed.value() == 8
    now += 5
    assert speed.value() == pytest.approx(8 * 5 / 10)
    now += 6
    assert speed.value() == 0


def test_leaving_frees_the_cache(client, server) -> None:
    _, engine = server
    before = gauge(engine, "requests_total", outcome="cancelled")
    stream = client.chat.completions.create(
        model=NAME, messages=CHAT, max_tokens=2000, temperature=0, stream=True
    )
    for _, _ in zip(stream, range(3), strict=False):
        pass
    assert engine.running
    stream.close()
    wait_for(lambda: not engine.running)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).chat.completions.create(
            model=NAME, messages=CHAT, max_tokens=2000, temperature=0
        )
    wait_for(lambda: gauge(engine, "requests_total", outcome="cancelled") == before + 2)
    assert not engine.running and gauge(engine, "cache_bytes") == 0


def test_events_are_lines_of_json(server) -> None:
    body = {"model": NAME, "prompt": "a", "stream": True, "max_tokens": 2}
    answer = httpx.post(f"{server[0]}/v1/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-path-attention-engine"] == "batched"
    events = answer.text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    assert all(json.loads(e.removeprefix("data: "))["id"].startswith("cmpl-") for e in events[:-1])


def test_a_stream_that_waits_is_not_silent(make, monkeypatch) -> None:
    """Proxies end what is silent; a comment is no event to clients."""
    monkeypatch.setattr("path_attention.serving.app._QUIET", 0.05)
    engine = make(max_rows=1)
    with serve(engine) as address, openai.OpenAI(base_url=f"{address}/v1", api_key="x") as client:
        first = Asked(engine, make_ids(3), 4000)
        wait_for(lambda: bool(engine.running))
        options = {"model": NAME, "prompt": "a", "max_tokens": 2, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=options, timeout=60) as answer:
            lines = answer.iter_lines()
            assert [next(lines) for _ in range(4)] == [": waiting", ""] * 2
            stream = client.completions.create(**options)
            time.sleep(0.2)
            engine.cancel(first.ticket)
            assert list(lines)[-2] == "data: [DONE]"
        assert sum(chunk.choices[0].finish_reason == "length" for chunk in stream) == 1


def test_responses_are_numbered(client, server) -> None:
    first, second = (client.completions.create(model=NAME, prompt="a") for _ in range(2))
    assert first._request_id.startswith("req_") and first._request_id != second._request_id
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="none", prompt="a")
    assert missing.value.request_id.startswith("req_")


def test_what_fails_is_answered_and_the_connection_goes_on(server, monkeypatch) -> None:
    """With a number, counted, and so that the next request of the same connection is answered."""
    address, engine = server

    def fail(*args: object) -> None:
        raise RuntimeError("of the test")

    monkeypatch.setattr("path_attention.serving.page.inspect_token", fail)
    before = gauge(engine, "http_responses_total", status="500")
    with httpx.Client(base_url=address) as http:
        for n in (1, 2):
            failed = http.post("/inspect", json={"token_ids": [5, 6], "position": 1, "layer": 0})
            error = {"message": "the server failed", "type": "server_error"}
            assert failed.status_code == 500
            assert failed.json()["error"] == {**error, "param": None, "code": None}
            assert failed.headers["x-request-id"].startswith("req_")
            assert gauge(engine, "http_responses_total", status="500") == before + n


def test_texts_are_encoded_one_at_a_time(tokenizer, monkeypatch) -> None:
    """Threads of the server share a tokenizer, which need not be for several."""
    from concurrent.futures import ThreadPoolExecutor

    from path_attention.serving import prompts as module

    encode, inside, most = module.encode_prompt, [], []

    def slow(*args):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()
        return encode(*args)

    monkeypatch.setattr(module, "encode_prompt", slow)
    prompts = module.Prompts(tokenizer)
    with ThreadPoolExecutor(4) as pool:
        assert len(set(map(tuple, pool.map(prompts.encode, "abcdefgh")))) == 8
    assert most == [1] * 8


def test_any_other_model_is_served_through_generate(tokenizer) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from path_attention.serving.command import make_engine
    from path_attention.serving.settings import Settings

    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=258, intermediate_size=64, max_position_embeddings=200, initializer_range=0.2,
        eos_token_id=None, pad_token_id=1, **sizes,
    )  # fmt: skip
    llama = LlamaForCausalLM(config).eval()
    llama.generation_config.repetition_penalty = 5.0  # what requests didn't ask for
    engine = make_engine(llama, tokenizer, Settings())
    with (
        serve(engine) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client,
    ):
        told = client.completions.with_raw_response.create(
            model=NAME, prompt=make_ids(9), max_tokens=10, temperature=0, n=2, logprobs=1, echo=True
        )
        assert told.headers["x-path-attention-engine"] == "generate"
        expected = make_ids(9) + greedy(llama, make_ids(9), 10)
        answer = told.parse()
        assert [c.text for c in answer.choices] == [text_of(tokenizer, expected)] * 2
        values = answer.choices[1].logprobs.token_logprobs[1:]
        rows = forward(llama, expected)[:-1].gather(1, torch.tensor(expected[1:])[:, None])
        assert values == pytest.approx(rows[:, 0].tolist(), abs=1e-4)
        assert client.models.list().data[0].model_extra["path_attention"]["engine"] == "generate"
        options = {"model": NAME, "prompt": "ab", "max_tokens": 20, "seed": 4}
        first = client.completions.create(**options).choices[0].text
        stream = client.completions.create(**options, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == first
        with pytest.raises(openai.BadRequestError, match="context is 200 tokens"):
            client.completions.create(model=NAME, prompt=make_ids(150), max_tokens=51)
        stream = client.completions.create(model=NAME, prompt="a", max_tokens=190, stream=True)
        next(iter(stream))
        stream.close()
        wait_for(lambda: not engine.running)
    with pytest.raises(ValueError, match="draft: expected none"):
        make_engine(llama, tokenizer, Settings(lookup_tokens=3))
