"""Probabilities, draws and text as it becomes certain, each by its definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from path_attention.models.generation import decode_answer
from path_attention.serving.answer import Answer, Ticket, choose, verify
from path_attention.serving.page import spell
from path_attention.serving.request import Request, Sampling, TokenLogprob
from path_attention.serving.sampler import (
    draw,
    make_generator,
    penalised,
    probabilities,
    token_logprobs,
)
from path_attention.serving.text import Names, TextStream


def by_definition(logits: torch.Tensor, s: Sampling) -> torch.Tensor:
    if s.temperature == 0:
        return torch.eye(len(logits)).double()[int(logits.argmax())]
    p = (logits.double() / s.temperature).softmax(0)
    order = sorted(range(len(p)), key=lambda i: (-p[i].item(), i))
    order = order[: s.top_k or len(p)]
    whole, kept, total = sum(p[i].item() for i in order), [], 0.0
    for i in order:
        if total >= s.top_p:
            break
        kept.append(i)
        total += p[i].item() / whole
    out = torch.zeros_like(p)
    out[kept] = p[kept]
    return out / out.sum()


def test_rows_have_options_of_their_own() -> None:
    samplings = [
        Sampling(), Sampling(temperature=0), Sampling(temperature=0.5), Sampling(top_k=3),
        Sampling(top_p=0.6), Sampling(temperature=1.7, top_p=0.9, top_k=20), Sampling(top_p=1e-9),
        Sampling(top_k=10**30), Sampling(temperature=1e-9), Sampling(top_p=1e-320),
    ]  # fmt: skip
    logits = 2 * torch.randn(len(samplings), 50)
    logits[1, 7] = logits[1, 30] = 9.0  # the first of equals
    for size in (1, len(samplings)):
        for n in range(0, len(samplings), size):
            got = probabilities(logits[n : n + size], samplings[n : n + size])
            for row, z, s in zip(got, logits[n : n + size], samplings[n : n + size], strict=True):
                torch.testing.assert_close(row, by_definition(z, s), rtol=1e-12, atol=1e-15)


def test_a_row_does_not_depend_on_what_others_ask_for() -> None:
    """To the bit, as a draw by a seed must not."""
    logits = 3 * torch.randn(2, 5000, generator=torch.Generator().manual_seed(0))
    alone = probabilities(logits[:1], [Sampling()])[0]
    for other in (Sampling(top_p=0.5), Sampling(top_k=3), Sampling(temperature=0)):
        assert probabilities(logits, [Sampling(), other])[0].equal(alone)


@pytest.mark.parametrize("temperature", [1e-9, 1e-300, 5e-324])
def test_the_coldest_draw_is_the_likeliest_token(temperature: float) -> None:
    logits = torch.tensor([[-3.0, 40.0, 39.9, -90.0]])
    assert probabilities(logits, [Sampling(temperature=temperature)]).tolist() == [[0, 1, 0, 0]]


def test_draws_follow_the_cumulated_sum() -> None:
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]]).double()
    at = [0.0, 0.2499, 0.25, 0.9999999999999999]
    assert draw(probs.expand(4, -1), at) == [1, 1, 3, 3]
    assert make_generator(3, 0).random() == make_generator(3, 0).random()
    assert make_generator(3, 0).random() != make_generator(3, 1).random()
    assert make_generator(None, 0).random() != make_generator(None, 0).random()


def test_penalties_are_taken_off() -> None:
    logits = torch.zeros(5)
    assert penalised(logits, Sampling(), {1: 2}) is logits
    s = Sampling(presence_penalty=0.5, frequency_penalty=0.25, logit_bias={1: 3.0, 4: -100.0})
    assert penalised(logits, s, {1: 2, 2: 1}).tolist() == [0, 2, -0.75, 0, -100]


def test_small_penalties_count_in_bfloat16(tokenizer) -> None:
    """Beside 20 its numbers are 0.125 apart: less than half of that would change nothing."""
    sampling = Sampling(temperature=0, presence_penalty=0.05)
    request = Request(prompt=[5], max_tokens=9, deliver=lambda piece: None, sampling=sampling)
    answer = Answer(Ticket(request, math.inf), 0, tokenizer, frozenset())
    answer.accept(3, None)
    logits = torch.full((1, 9), 20.0, dtype=torch.bfloat16)
    assert choose(logits, [answer]) == [0]
    logits[0, :3] = 0
    assert choose(logits, [answer]) == [4]
    assert verify(logits, [], [], answer) == [4]


def test_log_probabilities() -> None:
    logits = torch.randn(2, 9)
    exact = logits.double().log_softmax(1)
    first, second = token_logprobs(logits, [3, 5], 2)
    assert first.logprob == pytest.approx(exact[0, 3].item())
    assert second.top[0][0] == int(exact[1].argmax()) and len(second.top) == 2
    assert token_logprobs(logits, [3, 5], 0)[1].top == ()


TEXT = "naïve – 猫🐈‍⬛ ende\n\nfin"


@pytest.mark.parametrize("stop", [(), ("never",), ("\n\nfi?",), ("🐈‍⬛ e",), ("nde", "ïve – 猫")])
def test_text_comes_whole_and_ends_before_a_stop(tokenizer, stop: tuple[str, ...]) -> None:
    """Each byte is a token: characters are never cut, and what begins a stop string waits."""
    stream, pieces = TextStream(tokenizer, stop), []
    for token in tokenizer(TEXT)["input_ids"]:
        pieces.append(stream.push(token))
        assert "�" not in pieces[-1]
        so_far = "".join(pieces)
        assert TEXT.startswith(so_far) and stream.given == len(so_far)
        assert stream.length >= stream.given
        if stream.stopped:
            break
    pieces.append(stream.finish())
    ends = [TEXT.find(text) for text in stop if text in TEXT]
    assert "".join(pieces) == TEXT[: min(ends, default=len(TEXT))]
    assert stream.stopped == bool(ends)


@pytest.mark.parametrize("stop", ["never", "🐈‍⬛ e"])
def test_log_probabilities_say_where_their_text_begins(tokenizer, stop: str) -> None:
    pieces: list[Any] = []
    request = Request(prompt=[1], max_tokens=99, deliver=pieces.append, stop=(stop,), logprobs=0)
    answer = Answer(Ticket(request, 0.0), 0, tokenizer, frozenset([0]))
    for token in [*tokenizer(TEXT)["input_ids"], 0]:
        if answer.finish is None:
            answer.accept(token, TokenLogprob(token, -1.0))
    text = TEXT.split(stop)[0]
    assert "".join(piece.text for piece in pieces) == text and answer.finish == "stop"
    told = [(x.token, x.at) for piece in pieces for x in piece.logprobs]
    assert told == [
        (token, at) for at, letter in enumerate(text) for token in tokenizer(letter)["input_ids"]
    ]


def test_broken_bytes_are_given_at_the_end(tokenizer) -> None:
    stream = TextStream(tokenizer)
    first, last = tokenizer("é")["input_ids"][-2:]
    assert stream.push(first) == "" and stream.finish() == "�"
    stream = TextStream(tokenizer)
    assert stream.push(last) + stream.push(tokenizer("x")["input_ids"][-1]) == "�x"


def test_spaces_between_words_stay() -> None:
    """Of a tokenizer that writes a word's space before it, and drops that of the first."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"▁the": 0, "▁cat": 1, "s": 2, "<e>": 3}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>")
    stream = TextStream(tokenizer)
    assert [stream.push(token) for token in (0, 1, 2, 3, 0)] == ["the", " cat", "s", "", " the"]
    names = Names(tokenizer)
    assert [names.bytes(n) for n in (0, 1, 2)] == [b" the", b" cat", b"s"]
    assert [names.name(n) for n in (0, 2, 3)] == [" the", "s", "<e>"]


@pytest.mark.parametrize("text", ["def\n    return x\n", "a →é é→🐈x🐈", "→→→→é x", "  x\u2028 "])
def test_an_answer_goes_on_with_its_prompt(text: str) -> None:
    """Whatever the tokenizer drops at a text's start, and wherever the answer starts."""
    from tokenizers import decoders

    words = {"def": 258, "return": 259, "x": 260, " ": 261}
    tokenizer = make_fallback(*(word.replace(" ", "▁") for word in words))
    backend = tokenizer.backend_tokenizer
    backend.decoder = decoders.Sequence([backend.decoder, decoders.Strip(" ", 1, 0)])
    ids: list[int] = []
    places, at = {}, 0  # where in the text a word's first token stands
    while at < len(text):
        places[len(ids)] = at
        word = next((word for word in words if text.startswith(word, at)), text[at])
        ids += [words[word]] if word in words else list(word.encode())
        at += len(word)
    for cut in range(len(ids)):
        prompt: list[int] = [257, *ids[:cut]]
        pieces: list[Any] = []
        request = Request(prompt=prompt, max_tokens=len(ids) - cut, deliver=pieces.append)
        answer = Answer(Ticket(request, 0.0), 0, tokenizer, frozenset())
        for token in ids[cut:]:
            answer.accept(token, None)
        written = "".join(piece.text for piece in pieces)
        assert written == decode_answer(tokenizer, prompt, ids[cut:])
        assert written == "".join(spell(tokenizer, [257, *ids], cut + 1)["texts"][cut + 1 :])
        if cut in places:
            dropped = cut == 0 and text.startswith(" ")
            assert written == text[places[cut] + dropped :]


def test_bytes_of_tokens(tokenizer) -> None:
    names = Names(tokenizer)
    for byte in range(256):
        token = tokenizer.convert_tokens_to_ids(_character(byte))
        assert names.bytes(token) == bytes([byte])
        expected = chr(byte) if byte < 128 else f"bytes:\\x{byte:02x}"
        assert names.name(token) == names.name(token) == expected
    assert names.bytes(0) == b"<|end|>"


def make_fallback(*more: str) -> Any:
    """Pieces with blanks before them, and a token of each byte for what has no piece."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁cat": 256, "<e>": 257}
    vocabulary |= {piece: 258 + n for n, piece in enumerate(more)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>")


def test_bytes_that_stand_for_what_has_no_piece() -> None:
    tokenizer = make_fallback()
    names, stream = Names(tokenizer), TextStream(tokenizer)
    assert (names.bytes(0xC3), names.name(0xC3)) == (b"\xc3", "bytes:\\xc3")
    assert (names.bytes(256), names.name(0x41)) == (b" cat", "A")
    ids = [256, *"→🐈".encode(), 256]
    assert [stream.push(x) for x in ids] == [" cat", "", "", "→", "", "", "", "🐈", " cat"]


def test_bytes_that_are_never_a_character_do_not_pile_up(tokenizer) -> None:
    """Each is decoded a few times, and its text is given soon."""
    half = tokenizer("é")["input_ids"][-1:]
    stream, decoded = TextStream(tokenizer), []
    decode = stream._text
    stream._text = lambda ids: (decoded.append(len(ids)), decode(ids))[1]
    text = "".join(stream.push(token) for token in half * 500)
    assert 480 <= len(text) < 500 and max(decoded) < 40
    assert text + stream.finish() == "�" * 500
    ids = half * 41 + tokenizer("→")["input_ids"][-3:] + half * 2
    stream = TextStream(tokenizer)
    pieces = [*map(stream.push, ids), stream.finish()]
    assert "".join(pieces) == tokenizer.decode(ids) == "�" * 41 + "→" + "�" * 2


def _character(byte: int) -> str:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return bytes_to_unicode()[byte]
