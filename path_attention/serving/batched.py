"""The engine for this library's models: continuous batching over caches that share prefixes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from path_attention.models.cache import (
    CACHE_NAME,
    PathAttentionCacheLayer,
    crop_cache,
    fork_cache,
    layer_caches,
)
from path_attention.models.modeling import PathAttentionForCausalLM
from path_attention.models.prefix_store import PrefixStore
from path_attention.nn.cache_units import memory
from path_attention.serving.answer import Answer, Ticket, choose, describe, verify
from path_attention.serving.drafts import DraftModel, Lookup, Proposal
from path_attention.serving.engine import Engine
from path_attention.serving.request import Refused, Request
from path_attention.serving.rows import step_rows
from path_attention.serving.sampler import token_logprobs
from path_attention.serving.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MEASURE_EVERY = 0.5  # seconds


@dataclass(eq=False)
class Prompt:
    """A prompt that is read, all but its last token, piece by piece.

    cache: None until its turn comes: what is kept of it may be found by then.
    keys: of its prefixes, once the store can tell.
    """

    ticket: Ticket
    ids: Tensor  # [1, T − 1], on the host
    cache: Cache | None = None
    draft: Cache | None = None
    keys: list[bytes] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.ids.shape[1]


@dataclass(eq=False)
class Row:
    """An answer that is written: its cache has seen all of its ids but the last.

    slot: where it is instead, in a `SlotEngine`.
    """

    answer: Answer
    cache: Cache
    draft: Cache | None = None
    slot: int | None = None
    lookup: Lookup = field(default_factory=Lookup)


class BatchedEngine(Engine):
    """Decodes all answers together, one step after the other, and a piece of a prompt in between.

    Every answer has a cache of its own (`step_rows`), so any may come and go at any step; choices
    of one prompt are forks of one cache, and prompts start from what the store has of them. A
    request starts when its caches, at their full length, fit into `cache_bytes` beside those that
    run. With a draft model or `lookup_tokens` a step checks several tokens at once and takes back
    those that it rejects.
    """

    kind: ClassVar[str] = "batched"

    def __init__(
        self,
        model: PathAttentionForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        settings: Settings,
        draft: PathAttentionForCausalLM | None = None,
    ) -> None:
        """Raises ValueError on a draft model of another vocabulary."""
        super().__init__(model, tokenizer, settings)
        if draft is not None and draft.config.vocab_size != model.config.vocab_size:
            raise ValueError(
                f"draft: expected the model's {model.config.vocab_size} tokens, "
                f"got {draft.config.vocab_size}"
            )
        if draft is not None and settings.lookup_tokens:
            raise ValueError("lookup_tokens: expected 0 with a draft model, got "
                             f"{settings.lookup_tokens}")  # fmt: skip
        self.draft = None if draft is None else DraftModel(draft.eval(), settings.draft_tokens)
        size = settings.prefix_bytes
        self.store = PrefixStore(model, max_bytes=size) if size else None
        models = [model] if draft is None else [model, draft]
        self.cache_bytes = settings.cache_bytes or default_cache_bytes(model.device)
        self.prefill_tokens = settings.prefill_tokens or default_prefill_tokens(model.device)
        self._costs = [cache_cost(x) for x in models]
        self._prompts: list[Prompt] = []
        self._rows: list[Row] = []
        self._measured = 0.0
        self.metrics.cache_limit.set_function(lambda: self.cache_bytes)

    # --- Coming and going -------------------------------------------------------------------------

    def cost(self, request: Request) -> int:
        """Bytes that a request's caches may come to."""
        length = len(request.prompt) + request.max_tokens
        return request.choices * sum(int(base + each * length) for base, each in self._costs)

    def check(self, request: Request) -> None:
        """As in `Engine`; also refuses what would never fit in memory."""
        super().check(request)
        cost, limit = self.cost(request), self.cache_bytes
        if cost > limit:
            raise Refused(
                f"the request may need {cost} bytes of cache, the server has {limit}",
                param="max_tokens", code="context_length_exceeded",
            )  # fmt: skip

    def most_output(self, prompt: int, choices: int) -> int:
        base, each = (sum(costs) for costs in zip(*self._costs, strict=True))
        fits = self.cache_bytes / choices - base - each * prompt
        most = super().most_output(prompt, choices)
        return min(most, int(fits // each)) if each else most

    def can_admit(self, ticket: Ticket) -> bool:
        requests = [*(t.request for t in self.running), ticket.request]
        rows = sum(request.choices for request in requests)
        bytes_ = sum(self.cost(request) for request in requests)
        return rows <= self.settings.max_rows and bytes_ <= self.cache_bytes

    def admit(self, ticket: Ticket) -> None:
        ids = torch.tensor([ticket.request.prompt[:-1]], dtype=torch.int64)
        draft = None if self.draft is None else self.draft.new_cache()
        self._prompts.append(Prompt(ticket, ids, draft=draft))

    def release(self, ticket: Ticket) -> None:
        self._prompts = [p for p in self._prompts if p.ticket is not ticket]
        self._rows = [row for row in self._rows if row.answer.ticket is not ticket]

    # --- A step -----------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> None:
        if self._prompts:
            self._read_next()
        if self._rows:
            with self.blame([row.answer.ticket for row in self._rows]):
                self._write()
        if time.monotonic() > self._measured + _MEASURE_EVERY:
            self.measure()

    def _read_next(self) -> None:
        """Go on with the prompts, by a piece; their answers begin once they are read."""
        prompt = self._prompts.pop(0)
        with self.blame([prompt.ticket]):
            if self._read(prompt):
                self._begin(prompt)
            else:
                self._prompts.append(prompt)  # prompts take turns

    def _find(self, prompt: Prompt) -> tuple[bytes | None, int]:
        """The key of the longest prefix that is kept of a prompt, and its length; None and 0."""
        if self.store is None or prompt.ticket.request.prompt_logprobs:
            return None, 0
        prompt.keys = prompt.keys or self.store.keys(prompt.ids)
        return self.store.find(prompt.keys)

    def _open(self, prompts: Sequence[Prompt]) -> Cache:
        """A cache of what is kept of prompts that share all of that."""
        key, _ = self._find(prompts[0])
        if self.store is not None and key is not None:
            cache = self.store.open(key)
        else:
            cache = DynamicCache(config=self.model.config)
        for prompt in prompts:
            request = prompt.ticket.request
            prompt.ticket.cached_tokens = cache.get_seq_length()
            self.metrics.prefix_lookups.inc(self.store is not None and not request.prompt_logprobs)
            self.metrics.prefix_hits.inc(key is not None)
            self.metrics.prefix_tokens.inc(prompt.ticket.cached_tokens)
        return cache

    def _read(self, prompt: Prompt) -> bool:
        """Compute a piece of a prompt; returns whether that was all."""
        size, done, device = self.prefill_tokens, True, self.model.device
        if prompt.cache is None:
            prompt.cache = self._open([prompt])
        seen = prompt.cache.get_seq_length()
        piece = prompt.ids[:, seen : seen + size].to(device)
        if piece.shape[1]:
            whole = prompt.ticket.request.prompt_logprobs
            logits = self.model(
                piece, **{CACHE_NAME: prompt.cache}, logits_to_keep=0 if whole else 1
            ).logits
            if whole:
                self._tell_prompt(prompt.ticket, logits[0], seen)
            done = seen + piece.shape[1] == prompt.length
        if self.draft is not None and prompt.draft is not None:
            behind = prompt.draft.get_seq_length()
            piece = prompt.ids[:, behind : behind + size].to(device)
            if piece.shape[1]:
                self.draft.read(prompt.draft, piece)
            done = done and behind + piece.shape[1] == prompt.length
        return done

    def _tell_prompt(self, ticket: Ticket, logits: Tensor, seen: int) -> None:
        """Log-probabilities of the tokens after `seen` and those behind it."""
        after = ticket.request.prompt[seen + 1 : seen + 1 + len(logits)]
        top = ticket.request.logprobs or 0
        ticket.prompt_logprobs += token_logprobs(logits, after, top)

    def _begin(self, prompt: Prompt) -> None:
        """A prompt is read: keep it, and write its answers."""
        ticket, read = prompt.ticket, prompt.cache
        assert read is not None
        self._keep(prompt)
        for answer in ticket.answers:
            answer.begin()
        if ticket.request.max_tokens == 0:
            for answer in ticket.answers:
                answer.end()
            return
        caches = [fork_cache(read) for _ in ticket.answers[1:]]
        drafts: list[Cache | None] = [None] * len(ticket.answers)
        if prompt.draft is not None:
            drafts = [*(fork_cache(prompt.draft) for _ in caches), prompt.draft]
        for answer, cache, draft in zip(ticket.answers, [*caches, read], drafts, strict=True):
            self._rows.append(Row(answer, cache, draft))

    def _keep(self, prompt: Prompt) -> None:
        """Keep what was read of a prompt as a prefix of others."""
        if self.store is not None and prompt.cache is not None and prompt.length:
            self.store.put(prompt.ids, prompt.cache)

    def _write(self) -> None:
        """A step of every answer: one token, or as many of a proposal as are accepted."""
        rows = self._rows
        answers, proposals = [row.answer for row in rows], self._propose(rows)
        feeds = [
            [answer.newest, *proposal.tokens]
            for answer, proposal in zip(answers, proposals, strict=True)
        ]
        every = self._compute(rows, feeds)
        plain = not any(proposal.tokens for proposal in proposals)
        chosen = choose(torch.cat(every), answers) if plain else None
        for n, row in enumerate(rows):
            if row.answer.ticket.done:  # another of its choices has failed
                continue
            with self.blame([row.answer.ticket]):
                if chosen is None:
                    proposal = proposals[n]
                    tokens = verify(every[n], proposal.tokens, proposal.drawn_from, row.answer)
                elif (token := chosen[n]) is not None:
                    tokens = [token]
                else:
                    raise FloatingPointError("logits: expected numbers, got others")
                self._take(row, tokens, every[n], len(proposals[n].tokens))
        self._rows = [row for row in self._rows if row.answer.finish is None]

    def _compute(self, rows: Sequence[Row], feeds: Sequence[Sequence[int]]) -> list[Tensor]:
        """Append tokens to each row; the logits after each of them, `[count, V]` a row."""
        return step_rows(self.model, [row.cache for row in rows], feeds)

    def _take(self, row: Row, tokens: Sequence[int], logits: Tensor, proposed: int) -> None:
        """Go on with what was chosen after a row's last token, and take back what was rejected."""
        seen = row.answer.length - 1 + len(tokens)
        self.metrics.proposed.inc(proposed)
        self.metrics.accepted.inc(len(tokens) - 1)
        if proposed >= len(tokens):
            crop_cache(row.cache, seen)
        if self.draft is not None and row.draft is not None:
            self.draft.keep(row.draft, seen)
        self.accept(row.answer, tokens, describe(logits[: len(tokens)], tokens, row.answer))
        if row.answer.finish is not None:
            self._end(row, seen)

    def _propose(self, rows: Sequence[Row]) -> list[Proposal]:
        left = [row.answer.request.max_tokens - len(row.answer.tokens) - 1 for row in rows]
        if self.draft is not None:
            most = [min(self.draft.tokens, count) for count in left]
            caches = [row.draft for row in rows if row.draft is not None]
            return self.draft.propose([row.answer for row in rows], caches, most)
        size = self.settings.lookup_tokens
        return [
            row.lookup.propose(row.answer.ids, min(size, count))
            if size and count > 0
            else Proposal()
            for row, count in zip(rows, left, strict=True)
        ]

    def _end(self, row: Row, seen: int) -> None:
        """An answer has ended: a chat's next turn may begin with it."""
        ids = row.answer.ids[:seen]
        if self.store is not None:
            if row.cache.get_seq_length() > len(ids):  # tokens after its end were accepted
                crop_cache(row.cache, len(ids))
            self.store.put(torch.tensor([ids]), row.cache)

    def _held(self) -> int:
        """Bytes of the caches of prompts and rows."""
        holders = [*self._prompts, *self._rows]
        caches = [c for x in holders for c in (x.cache, x.draft) if c is not None]
        layers = [layer for cache in caches for layer in layer_caches(cache, len(cache.layers))]
        return memory(layers)

    def measure(self) -> None:
        """Bytes of all caches, those shared with the store counted there too."""
        self._measured = time.monotonic()
        self.metrics.cache_bytes.set(self._held())
        self.metrics.prefix_bytes.set(0 if self.store is None else self.store.bytes)


def default_cache_bytes(device: torch.device) -> int:
    """Half of what is free on a GPU; 4 GiB on a CPU."""
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else 2**32


def default_prefill_tokens(device: torch.device) -> int:
    """As many as keep a GPU busy for as long as the host takes to launch their kernels; 512 on a
    CPU, whose time grows with their number."""
    return 8192 if device.type == "cuda" else 512


@torch.no_grad()
def cache_cost(model: PathAttentionForCausalLM) -> tuple[float, float]:
    """Bytes that one sequence's cache may come to: (whatever its length, and a token).

    Measured on two lengths. Buffers grow by half when they are full, so both count one and a half
    times.
    """

    def cache_of(length: int) -> list[PathAttentionCacheLayer]:
        cache = DynamicCache(config=model.config)
        ids = torch.arange(length, device=model.device)[None] % model.config.vocab_size
        model(ids, **{CACHE_NAME: cache}, logits_to_keep=1)
        return layer_caches(cache, len(cache.layers))

    unit = max(64, cache_of(1)[0].unit)
    shorter, longer = (memory(cache_of(n * unit + 63)) for n in (1, 3))  # tails as long as they get
    each = (longer - shorter) / (2 * unit)
    return 1.5 * max(0.0, shorter - each * (unit + 63)), 1.5 * each
