"""Tokens proposed before the model has computed them: from the text, or by a draft model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from path_attention.models.cache import CACHE_NAME, crop_cache
from path_attention.serving.answer import Answer
from path_attention.serving.rows import step_rows
from path_attention.serving.sampler import draw, penalised, probabilities

_GRAMS = (3, 2)  # tokens that must recur, longest first


@dataclass
class Proposal:
    """Tokens, and what each was drawn from, `[V]`; None where it was certain."""

    tokens: list[int] = field(default_factory=list)
    drawn_from: list[Tensor | None] = field(default_factory=list)


class Lookup:
    """Proposes what followed the last tokens where they came before, in prompt or answer."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}  # gram → where the last one ended
        self._indexed = 0

    def propose(self, ids: Sequence[int], most: int) -> Proposal:
        """Up to `most` tokens after ids, of which earlier calls saw a beginning."""
        # The gram at the very end is what is looked for: it isn't entered yet.
        for end in range(max(1, self._indexed), len(ids)):
            for size in _GRAMS:
                if end >= size:
                    self._ends[tuple(ids[end - size : end])] = end
        self._indexed = max(self._indexed, len(ids))
        for size in _GRAMS:
            end = self._ends.get(tuple(ids[-size:])) if len(ids) > size else None
            if end is not None:
                tokens = list(ids[end : end + most])
                return Proposal(tokens, [None] * len(tokens))
        return Proposal()


class DraftModel:
    """A smaller model of the same tokens; it keeps a cache of its own for each answer."""

    def __init__(self, model: PreTrainedModel, tokens: int) -> None:
        self.model, self.tokens = model, tokens

    def new_cache(self) -> Cache:
        """An empty one."""
        return DynamicCache(config=self.model.config)

    @torch.no_grad()
    def read(self, cache: Cache, ids: Tensor) -> None:
        """Append a part of a prompt, ids `[1, T]`."""
        self.model(ids, **{CACHE_NAME: cache}, logits_to_keep=1)

    def propose(
        self, answers: Sequence[Answer], caches: Sequence[Cache], most: Sequence[int]
    ) -> list[Proposal]:
        """Up to `most` tokens after each answer, drawn as it draws its own."""
        proposals = [Proposal() for _ in answers]
        active = [n for n, count in enumerate(most) if count > 0]
        feeds = {n: answers[n].ids[caches[n].get_seq_length() :] for n in active}
        while active:
            rows = step_rows(self.model, [caches[n] for n in active], [feeds[n] for n in active])
            for n, logits in zip(active, rows, strict=True):
                token, source = _sample(logits[-1], answers[n], proposals[n].tokens)
                proposals[n].tokens.append(token)
                proposals[n].drawn_from.append(source)
                feeds[n] = [token]
            active = [n for n in active if len(proposals[n].tokens) < most[n]]
        return proposals

    def keep(self, cache: Cache, length: int) -> None:
        """Forget what came after so many tokens: it was rejected."""
        if cache.get_seq_length() > length:
            crop_cache(cache, length)


def _sample(logits: Tensor, answer: Answer, proposed: Sequence[int]) -> tuple[int, Tensor | None]:
    counts = answer.counts.copy()
    counts.update(proposed)
    row = penalised(logits, answer.sampling, counts)
    if answer.sampling.temperature == 0:
        return int(row.argmax()), None
    probs = probabilities(row[None], [answer.sampling])
    return draw(probs, [answer.random.random()])[0], probs[0]
