"""Decoding in rows of fixed size, on NVIDIA GPUs: a step of all answers is one CUDA graph.

A prompt is read into a cache that grows and shares prefixes; then it is copied into a row of a
`StaticPathCache`, whose rows have lengths of their own, and stays there until its answer ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from path_attention.models.cache import CACHE_NAME, layer_caches
from path_attention.models.modeling import PathAttentionForCausalLM
from path_attention.models.static_cache import StaticPathCache, StaticPathCacheLayer, StepGraph
from path_attention.nn.cache_units import memory
from path_attention.nn.seats import Seats
from path_attention.serving.answer import Ticket
from path_attention.serving.batched import BatchedEngine, Prompt, Row
from path_attention.serving.memory import reserve
from path_attention.serving.request import Request
from path_attention.serving.settings import Settings
from path_attention.serving.together import read_together, suit
from path_attention.serving.warm import read_every_kind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RESET_EVERY = 64  # steps: free rows count them as tokens of theirs


class Slots:
    """Rows of one static cache that sequences come to and leave.

    Every step computes all rows, of which those that are free mean nothing: a row's numbers don't
    depend on how many others there are. No row takes tokens back, so nothing is kept for that.

    Attributes:
        rows: how many; room: tokens of each; unit: the shortest that a layer seals.
        bytes: what they take, whoever sits there.
    """

    def __init__(self, model: PathAttentionForCausalLM, rows: int, room: int) -> None:
        """Allocates everything. Raises ValueError where the model has no kernels for it."""
        self.model, self.rows = model, rows
        config: Any = model.config
        self.cache = StaticPathCache(config, room, croppable=False)
        self.free = list(range(rows))
        self._steps = 0
        self._ids = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        self._step_as_it_is()
        self._seats = Seats(self._layers, rows)
        self._ids = self._ids.repeat(rows, 1)
        self._step_as_it_is()
        self.room = self._layers[0].room
        self.unit = min(layer.unit for layer in self._layers)
        self.bytes = memory(self._layers)
        self._graph = None
        if model.device.type == "cuda":
            self._graph = StepGraph(model, self.cache, self._ids)
        self._seats.forget(self.free)

    @property
    def _layers(self) -> list[StaticPathCacheLayer]:
        return [x for x in self.cache.layers if isinstance(x, StaticPathCacheLayer)]

    @torch.no_grad()
    def _step_as_it_is(self) -> Tensor:
        return self.model(self._ids, **{CACHE_NAME: self.cache}).logits

    @torch.no_grad()
    def seat(self, cache: Cache) -> int:
        """Copy a cache of one row to a free one, and say which."""
        row = self.free[0]
        self._seats.seat(row, layer_caches(cache, len(cache.layers)))
        return self.free.pop(0)  # at the end: it stays free if something fails

    def leave(self, row: int) -> None:
        """Give a row back."""
        self.free.append(row)
        self._seats.forget([row])

    def step(self, tokens: dict[int, int]) -> Tensor:
        """Append a token to some rows; logits `[rows, V]` of all, until the next step."""
        self._steps += 1
        self._seats.forget(self.free if self._steps % _RESET_EVERY == 0 else [])
        at, ids = torch.tensor(list(tokens)), torch.tensor(list(tokens.values()))
        device = self._ids.device
        self._ids[at.to(device), 0] = ids.to(device)
        graph = self._graph
        logits = self._step_as_it_is() if graph is None else graph.replay(self._ids)
        return logits[:, 0]


class SlotEngine(BatchedEngine):
    """`BatchedEngine` whose answers are written in `Slots`, without drafts.

    As many rows as `max_rows` and `cache_bytes` allow, each with room for the longest prompt and
    the most output; what is left of `cache_bytes` is for prompts that are being read. Answers are
    not kept as prefixes, prompts are.
    """

    def __init__(
        self,
        model: PathAttentionForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        settings: Settings,
    ) -> None:
        """Raises ValueError where not one row fits."""
        super().__init__(model, tokenizer, settings)
        room = settings.max_prompt_tokens + settings.max_output_tokens
        each = Slots(model, 1, room).bytes
        longest = self._reading(settings.max_prompt_tokens)
        rows = min(settings.max_rows, (self.cache_bytes - longest) // each)
        if rows < 1:
            raise ValueError(
                f"cache_bytes: expected at least {each + longest} for one row of {room} tokens and "
                f"a prompt that is read, got {self.cache_bytes}; or fewer max_prompt_tokens"
            )
        self.slots = Slots(model, rows, room)
        self._unkept: list[Prompt] = []  # read, but not yet among the prefixes
        if model.device.type == "cuda":
            read_every_kind(model)
            reserve(longest + settings.prefix_bytes, model.device)

    def _reading(self, tokens: int) -> int:
        """Bytes of a prompt's cache while it is read."""
        base, each = self._costs[0]
        return int(base + each * tokens)

    @property
    def rows(self) -> int:
        return self.slots.rows

    def cost(self, request: Request) -> int:
        return 0  # every request that is within the limits fits into its rows

    def most_output(self, prompt: int, choices: int) -> int:
        return self.settings.max_output_tokens

    def can_admit(self, ticket: Ticket) -> bool:
        requests = [*(t.request for t in self.running), ticket.request]
        read = [len(p.ticket.request.prompt) for p in self._prompts] + [len(ticket.request.prompt)]
        held = self.slots.bytes + sum(map(self._reading, read))
        rows = sum(request.choices for request in requests)
        return rows <= self.slots.rows and held <= self.cache_bytes

    def release(self, ticket: Ticket) -> None:
        for row in self._rows:
            if row.answer.ticket is ticket:
                self._leave(row)
        super().release(ticket)

    @torch.no_grad()
    def step(self) -> None:
        super().step()
        unkept, self._unkept = self._unkept, []
        for prompt in unkept:  # their first tokens are on their way
            with self.blame([prompt.ticket]):
                super()._keep(prompt)

    def _keep(self, prompt: Prompt) -> None:
        self._unkept.append(prompt)

    def _read_next(self) -> None:
        some = self._read_as_one()
        if len(some) == 1:
            super()._read_next()
            return
        self._prompts = [prompt for prompt in self._prompts if prompt not in some]
        with self.blame([prompt.ticket for prompt in some]):
            cache = self._open(some)
            start = cache.get_seq_length()
            rests = [prompt.ids[0, start:].tolist() for prompt in some]
            caches = read_together(self.model, cache, rests)
            for prompt, prompt.cache in zip(some, caches, strict=True):
                with self.blame([prompt.ticket]):
                    self._begin(prompt)

    def _read_as_one(self) -> list[Prompt]:
        """The next prompt, and those that can be read to their ends beside it, from the same start.

        Long prompts fill a GPU; of short ones launches are what takes time.
        """
        first, *others = self._prompts
        (key, start), some = self._find(first), [first]
        sizes = [first.length - start]
        if first.cache is not None or not sizes[0] or first.ticket.request.prompt_logprobs:
            return some
        for prompt in others:
            size = prompt.length - start
            if prompt.cache is not None or prompt.ticket.request.prompt_logprobs:
                continue
            if suit(sizes, size, self.slots.unit, self.prefill_tokens) and (
                self._find(prompt)[0] == key
            ):
                some.append(prompt)
                sizes.append(size)
        return some

    def _leave(self, row: Row) -> None:
        if row.slot is not None:
            self.slots.leave(row.slot)
            row.slot = None

    def _begin(self, prompt: Prompt) -> None:
        before = len(self._rows)
        super()._begin(prompt)
        for row in self._rows[before:]:
            row.slot = self.slots.seat(row.cache)
            row.cache = Cache(layers=[])

    def _compute(self, rows: Sequence[Row], feeds: Sequence[Sequence[int]]) -> list[Tensor]:
        pairs = zip(rows, feeds, strict=True)
        tokens = {row.slot: ids[0] for row, ids in pairs if row.slot is not None}
        return list(self.slots.step(tokens)[list(tokens)].split(1))

    def _end(self, row: Row, seen: int) -> None:
        self._leave(row)

    def _held(self) -> int:
        """Of the rows that are taken, and of prompts' caches; free rows are held in vain."""
        taken = self.slots.rows - len(self.slots.free)
        return super()._held() + self.slots.bytes // self.slots.rows * taken
