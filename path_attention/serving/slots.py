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

from path_attention.models.cache import CACHE_NAME, fork_cache
from path_attention.models.modeling import PathAttentionForCausalLM
from path_attention.models.static_cache import StaticPathCache, StaticPathCacheLayer, StepGraph
from path_attention.nn.cache_units import memory
from path_attention.serving.answer import Ticket
from path_attention.serving.batched import BatchedEngine, Prompt, Row
from path_attention.serving.request import Request
from path_attention.serving.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RESET_EVERY = 64  # steps: free rows count them as tokens of theirs


class Slots:
    """Rows of one static cache that sequences come to and leave.

    Every step computes all rows, of which those that are free mean nothing: a row's numbers don't
    depend on how many others there are. No row takes tokens back, so nothing is kept for that.

    Attributes:
        rows: how many; room: tokens of each.
        bytes: what they take, whoever sits there.
    """

    def __init__(self, model: PathAttentionForCausalLM, rows: int, room: int) -> None:
        """Allocates everything. Raises ValueError where the model has no kernels for it."""
        self.model, self.rows = model, rows
        config: Any = model.config
        self.cache = StaticPathCache(config, room, croppable=False)
        self.free = list(range(rows))
        self._steps = 0
        self._ids = torch.zeros(rows, 1, dtype=torch.int64, device=model.device)
        self._step_as_it_is()
        self.room = self._layers[0].room
        self.bytes = memory(self._layers)
        self._graph = None
        if model.device.type == "cuda":
            self._graph = StepGraph(model, self.cache, self._ids)
        self._forget(self.free)

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
        for layer, source in zip(self._layers, self._settled(cache), strict=True):
            for to, x in zip(_row_tensors(layer), _row_tensors(source), strict=True):
                # Ends of rows hold what nobody reads: the shorter source is enough.
                to[row].copy_(x[0])
        return self.free.pop(0)  # at the end: it stays free if something fails

    def _settled(self, cache: Cache) -> Sequence[StaticPathCacheLayer]:
        """Layers of fixed size with what a cache that grows has."""
        layers = []
        for own, source in zip(self._layers, fork_cache(cache).layers, strict=True):
            layer = StaticPathCacheLayer(own.room, croppable=own.croppable)
            kept = dict(vars(source))
            layer.lengths = kept.pop("lengths")
            vars(layer).update(kept)
            layer.settle()
            layers.append(layer if layer.state is not None else _empty_like(own))
        return layers

    def leave(self, row: int) -> None:
        """Give a row back."""
        self.free.append(row)
        self._forget([row])

    def _forget(self, rows: Sequence[int]) -> None:
        for layer in self._layers:
            layer.seen = 0  # rows have lengths of their own; the engine minds the room
            if layer.state is not None and rows:
                layer.state.seen[list(rows)] = 0

    def step(self, tokens: dict[int, int]) -> Tensor:
        """Append a token to some rows; logits `[rows, V]` of all, until the next step."""
        self._steps += 1
        self._forget(self.free if self._steps % _RESET_EVERY == 0 else [])
        at, ids = torch.tensor(list(tokens)), torch.tensor(list(tokens.values()))
        device = self._ids.device
        self._ids[at.to(device), 0] = ids.to(device)
        graph = self._graph
        logits = self._step_as_it_is() if graph is None else graph.replay(self._ids)
        return logits[:, 0]


def _row_tensors(layer: StaticPathCacheLayer) -> list[Tensor]:
    """All that a layer keeps of its rows, in one order."""
    assert layer.state is not None
    named = [*sorted(layer.state.tensors().items()), *sorted(layer.before.items())]
    return [x for _, x in named]


def _empty_like(layer: StaticPathCacheLayer) -> StaticPathCacheLayer:
    """A layer of one row that has seen nothing."""
    other = StaticPathCacheLayer(layer.room, croppable=layer.croppable)
    assert layer.state is not None
    empty: Any = {name: torch.zeros_like(x[:1]) for name, x in layer.state.tensors().items()}
    other.state = layer.state._replace(**empty)
    other.before = {name: torch.zeros_like(x[:1]) for name, x in layer.before.items()}
    return other


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
