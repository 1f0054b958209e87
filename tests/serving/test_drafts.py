"""Speculative decoding: the same greedy text, the same distribution, whatever is proposed."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from small_server import Asked, gauge, make_ids, make_model, wait_for

from path_attention.serving.answer import Answer, Ticket, remainder, verify
from path_attention.serving.drafts import Lookup
from path_attention.serving.request import Request, Sampling
from path_attention.serving.sampler import draw, probabilities

DRAWS = 5_000


@pytest.mark.parametrize("preset", ["path_fox", "rope", "rotation_learned_qkv", "path_linear"])
@pytest.mark.parametrize("how", ["lookup", "draft"])
def test_greedy_text_is_the_same(make, preset: str, how: str) -> None:
    """In float64, where checking several tokens at once rounds too little for a tie to turn."""
    model = make_model(preset, dtype=torch.float64)
    draft = make_model(preset, dtype=torch.float64)
    with torch.no_grad():  # near enough to be right now and then
        for x in draft.parameters():
            x += 0.02 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    options = {"lookup_tokens": 5} if how == "lookup" else {"draft": draft, "draft_tokens": 3}
    plain, quick = make(model), make(model, **options)
    prompts = [(make_ids(20, seed=n) * 9)[: 40 + 45 * n] for n in (0, 2, 3)]
    expected = [Asked(plain, prompt, 30) for prompt in prompts]
    got = [Asked(quick, prompt, 30) for prompt in prompts]
    assert [one.ids() for one in got] == [one.ids() for one in expected]
    proposed, accepted = (gauge(quick, f"{x}_tokens_total") for x in ("proposed", "accepted"))
    assert 0 <= accepted < proposed
    assert how == "lookup" or accepted > 0
    wait_for(lambda: gauge(quick, "cache_bytes") == 0)


def test_a_draft_that_is_the_model_is_always_right(make) -> None:
    model = make_model(dtype=torch.float64)
    engine = make(model, model, draft_tokens=4)
    shared = make_ids(300)
    for n in range(2):  # the second from a kept prefix, of which the draft's cache has nothing
        asked = Asked(engine, [*shared, n + 2], 41, sampling=Sampling(seed=n))
        assert asked.wait()[-1].cached_tokens == (0 if n == 0 else 256)
    accepted = gauge(engine, "accepted_tokens_total")
    assert accepted == gauge(engine, "proposed_tokens_total") > 0


def test_penalties_hold_within_a_proposal(make) -> None:
    model = make_model(dtype=torch.float64)
    sampling = Sampling(temperature=0, frequency_penalty=1.5, logit_bias={40: 4.0, 41: 4.0})
    texts = [
        Asked(make(model, **options), make_ids(9), 60, sampling=sampling).ids()
        for options in ({}, {"lookup_tokens": 6}, {"draft": model, "draft_tokens": 5})
    ]
    assert texts[0] == texts[1] == texts[2] and texts[0].count(40) > 2


def answer_of(sampling: Sampling, tokenizer) -> Answer:
    request = Request(prompt=[1], max_tokens=9, deliver=lambda x: None, sampling=sampling)
    return Answer(Ticket(request, 0.0), 0, tokenizer, frozenset())


def far(counts: Counter, probs: torch.Tensor, draws: int) -> bool:
    """Whether frequencies are beyond what chance allows once in 10⁹ such tests.

    Hoeffding: a frequency is t off its probability with probability at most 2 exp(−2 n t²); a union
    over the values.
    """
    t = math.sqrt(math.log(2e9 * len(probs)) / (2 * draws))
    return any(abs(counts[i] / draws - p) > t for i, p in enumerate(probs.tolist()))


@pytest.mark.parametrize("certain", [True, False], ids=["lookup", "draft"])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(seed=1), Sampling(seed=2, temperature=0.9, top_p=0.97, top_k=4)],
    ids=["plain", "truncated"],
)
def test_tokens_have_the_models_distribution(tokenizer, certain: bool, sampling) -> None:
    """Of two tokens that are proposed, and of what comes in place of them or behind."""
    torch.manual_seed(0)
    logits = 1.5 * torch.randn(3, 6)
    other = logits[:2].mean(0) + 0.5 * torch.randn(6)
    answer = answer_of(sampling, tokenizer)
    p = probabilities(logits, [sampling] * 3)
    q = probabilities(other[None], [sampling])[0]
    likeliest = p[:2].argmax(1).tolist()
    firsts, seconds, thirds = Counter(), Counter(), Counter()
    for n in range(DRAWS):
        proposed = likeliest
        if not certain:
            proposed = draw(torch.stack([q, q]), [answer.random.random() for _ in range(2)])
        sources = [None, None] if certain else [q, q]
        tokens = verify(logits, proposed, sources, answer)
        firsts[tokens[0]] += 1
        # What was accepted says nothing of what follows: logits are the same for all firsts.
        if len(tokens) > 1:
            seconds[tokens[1]] += 1
        if len(tokens) > 2:
            thirds[tokens[2]] += 1
        assert tokens[:-1] == proposed[: len(tokens) - 1], n
    assert not far(firsts, p[0], DRAWS)
    for counts, row in ((seconds, p[1]), (thirds, p[2])):
        assert sum(counts.values()) > 200 and not far(counts, row, sum(counts.values()))
    assert far(firsts, q, DRAWS)  # the test can fail


def test_a_whole_engine_draws_as_the_model(make, tokenizer) -> None:
    """Pairs of tokens of many answers with drafts, against the model's own probabilities."""
    tiny = {"num_hidden_layers": 1, "hidden_size": 16}
    model = make_model(dtype=torch.float64, **tiny)
    draft = make_model(seed=3, dtype=torch.float64, **tiny)
    engine = make(model, draft, draft_tokens=3, max_rows=128)
    prompt, draws = make_ids(3), 384
    sampling = Sampling(temperature=0.7, top_k=3)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(draws // 128):
        own = Sampling(temperature=0.7, top_k=3, seed=seed)
        pieces = Asked(engine, prompt, 2, sampling=own, choices=128).wait()
        counts.update(p.token_ids for p in pieces if p.finish)
    with torch.no_grad():
        exact: dict[tuple[int, ...], float] = {}
        first = probabilities(model(torch.tensor([prompt])).logits[0, -1:], [sampling])[0]
        for a in first.nonzero()[:, 0].tolist():
            row = model(torch.tensor([[*prompt, a]])).logits[0, -1:]
            second = probabilities(row, [sampling])[0]
            for b in second.nonzero()[:, 0].tolist():
                exact[a, b] = float(first[a] * second[b])
    assert set(counts) <= set(exact) and len(exact) == 9
    named = Counter({n: counts[pair] for n, pair in enumerate(exact)})
    assert not far(named, torch.tensor(list(exact.values())), draws)


def test_what_is_left_of_a_distribution() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
    assert remainder(p, 1, q).tolist() == pytest.approx([1, 0, 0])
    assert remainder(p, 0, None).tolist() == pytest.approx([0, 0.6, 0.4])
    assert torch.equal(remainder(p, 0, p), p)


def test_lookup_finds_what_followed() -> None:
    lookup = Lookup()
    assert lookup.propose([1, 2, 3], 4).tokens == []
    assert lookup.propose([1, 2, 3, 9, 1, 2], 4).tokens == [3, 9, 1, 2]
    assert lookup.propose([1, 2, 3, 9, 1, 2, 3], 2).tokens == [9, 1]
    ids = [1, 2, 3, 9, 1, 2, 3, 7, 2, 3]
    assert lookup.propose(ids, 2).tokens == [7, 2]  # the last time
    assert Lookup().propose(ids, 2).tokens == [7, 2]
    assert Lookup().propose([5], 2).tokens == [] == Lookup().propose([], 2).tokens


def test_drafts_that_cannot_be(make, model) -> None:
    small = make_model()
    small.config.vocab_size = 300
    with pytest.raises(ValueError, match="draft: expected the model's 258 tokens, got 300"):
        make(model, small)
    with pytest.raises(ValueError, match="lookup_tokens: expected 0 with a draft model"):
        make(model, model, lookup_tokens=3)
