"""From logits to tokens: penalties, truncation, and draws that depend on a request alone."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from path_attention.serving.request import Sampling, TokenLogprob


def make_generator(seed: int | None, choice: int) -> random.Random:
    """Draws of one choice, the same for the same seed whatever else runs."""
    if seed is None:
        return random.Random()
    return random.Random(hashlib.sha256(f"{seed} {choice}".encode()).digest())


def penalised(logits: Tensor, sampling: Sampling, counts: Mapping[int, int]) -> Tensor:
    """Logits `[V]` with biases, and less penalties of the tokens that the answer has `counts` of.

    z_t + bias_t − presence · [count_t > 0] − frequency · count_t

    In float32 at least: in bfloat16 numbers around 20 lie 0.125 apart. No change: `logits` itself.
    """
    changes = dict(sampling.logit_bias)
    if sampling.presence_penalty or sampling.frequency_penalty:
        for token, count in counts.items():
            less = sampling.presence_penalty + sampling.frequency_penalty * count
            changes[token] = changes.get(token, 0.0) - less
    if not changes:
        return logits
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    index = torch.tensor(list(changes), device=wide.device)
    added = torch.tensor(list(changes.values()), device=wide.device, dtype=wide.dtype)
    return wide.index_add(0, index, added)


def probabilities(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """What tokens are drawn from, `[R, V]` in float64, of penalised logits `[R, V]`.

    softmax(z / temperature); then the `top_k` likeliest; of them, renormalised, the fewest whose
    probabilities add up to `top_p`. A temperature of 0 puts all on the likeliest, the first of
    equals.
    """
    wide = logits.double()
    greedy = [s.temperature == 0 for s in samplings]
    heat = [1.0 if cold else s.temperature for s, cold in zip(samplings, greedy, strict=True)]
    # Less the largest: however small the temperature, what is divided by it doesn't overflow.
    below = wide - wide.amax(1, keepdim=True)
    probs = (below / wide.new_tensor(heat)[:, None]).softmax(1)
    # Only rows that ask for it: it rounds, and a row must not depend on what others ask for.
    cut = [n for n, s in enumerate(samplings) if greedy[n] or s.top_k or s.top_p < 1]
    if cut:
        probs[cut] = _truncated(probs[cut], wide[cut], [samplings[n] for n in cut])
    return probs


def _truncated(probs: Tensor, logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """What `top_k`, `top_p` and a temperature of 0 leave of probs `[R, V]`, renormalised."""
    V, device = probs.shape[1], probs.device
    greedy = [s.temperature == 0 for s in samplings]
    ks = [1 if cold else min(s.top_k, V) or V for s, cold in zip(samplings, greedy, strict=True)]
    ranked, order = probs.sort(dim=1, descending=True, stable=True)
    if any(greedy):  # equal after rounding of a softmax is not equal
        first = logits.argmax(1, keepdim=True)
        order = torch.where(torch.tensor(greedy, device=device)[:, None], first, order)
    rank = torch.arange(V, device=device)
    ranked = ranked * (rank < torch.tensor(ks, device=device)[:, None])
    ranked = ranked / ranked.sum(1, keepdim=True)
    before = ranked.cumsum(1) - ranked
    ranked = ranked * (before < probs.new_tensor([s.top_p for s in samplings])[:, None])
    ranked = ranked / ranked.sum(1, keepdim=True)
    # Where all lies on the first, order names that token everywhere: add, don't write.
    return torch.zeros_like(probs).scatter_add(1, order, ranked)


def draw(probs: Tensor, at: Sequence[float]) -> list[int]:
    """A token of each row of probs `[R, V]`: where its cumulated sum passes `at` in [0, 1)."""
    sums = probs.cumsum(1)
    place = sums.new_tensor(at)[:, None] * sums[:, -1:]
    # The first whose sum is beyond: never one of probability 0.
    return torch.searchsorted(sums, place, right=True)[:, 0].clamp(max=probs.shape[1] - 1).tolist()


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log-probabilities of tokens by the model's own logits `[T, V]`, before any option.

    Raises FloatingPointError on logits that are no numbers.
    """
    logprobs = logits.double().log_softmax(1)
    index = torch.tensor(tokens, device=logits.device)[:, None]
    own = logprobs.gather(1, index)[:, 0].tolist()
    if any(map(math.isnan, own)):
        raise FloatingPointError("logits: expected numbers, got others")
    if not top:
        return [TokenLogprob(t, p) for t, p in zip(tokens, own, strict=True)]
    values, ids = logprobs.topk(min(top, logits.shape[1]), 1)
    each = zip(tokens, own, ids.tolist(), values.tolist(), strict=True)
    return [TokenLogprob(t, p, tuple(zip(i, v, strict=True))) for t, p, i, v in each]
