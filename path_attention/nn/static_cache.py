"""A layer's past in tensors of one size for good, so that a CUDA graph can replay a step.

docs/algorithm.md §5. A prompt goes in as into any `LayerCache`; then its units move into the fixed
tensors, and from there on a chunk of up to `STEP` tokens is four launches and no word to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from path_attention.nn.cache import LayerCache, constant, lay, named_inputs
from path_attention.nn.cache_state import (
    INPUTS,
    past_of,
    places,
    read_tokens,
    rebuild_tables,
    set_tail,
    write_tokens,
)
from path_attention.nn.cache_storage import Buffers, Tail, last_records, lasting, records_at
from path_attention.nn.cache_units import unit_length
from path_attention.nn.encoding import Chunk
from path_attention.ops.decode import (
    STEP,
    DecodeState,
    Past,
    decode_step,
    record_step,
    triton_lacks,
)

_Self = TypeVar("_Self", bound="StaticLayerCache")


class StaticLayerCache(LayerCache):
    """`LayerCache` with room for a number of tokens, allocated once.

    Until it has settled it is a `LayerCache`. It settles at the first chunk of up to `STEP` tokens,
    or by `settle`. Then it is forked and reordered by copying, and taken back in place, so that a
    graph of its step goes on; longer chunks go in as into any `LayerCache`. For softmax on NVIDIA
    GPUs.

    What taking back needs is kept beside the rest (`DecodeState` says how much): tokens as they
    came, units' products, and what the last tokens and borders recorded. A cache that isn't
    `croppable` holds none of it, steps in the same numbers, and refuses `crop`.

    Attributes:
        room: tokens, a multiple of the unit once it has settled.
        croppable: whether tokens can be taken back.
        state: None until it has settled.
        placed: once settled, another object each time that a tensor takes another's place.
    """

    def __init__(self, room: int, unit: int | None = None, *, croppable: bool = True) -> None:
        """room: the most tokens. Raises ValueError unless it is at least 1."""
        if room < 1:
            raise ValueError(f"room: expected at least 1 token, got {room}")
        self.room, self.croppable = room, croppable
        super().__init__(unit)

    def reset(self) -> None:
        """Forget everything, its tensors too."""
        self.state: DecodeState | None = None
        self.placed = object()
        self._lengths: Tensor | None = None
        self._history: Buffers = {}  # what the last tokens recorded, [B, ring, …]
        self._factors = 1  # of a token's transport
        self._kept_from = 0  # from this column on tokens are there as they came, if the ring is
        super().reset()

    @property
    def lengths(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """int `[B]`, real tokens of each row, on the device; None while empty."""
        return (
            self.state.seen if self.state is not None and self._lengths is None else self._lengths
        )

    @lengths.setter
    def lengths(self, value: Tensor | None) -> None:
        self._lengths = value

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        w: Tensor | None,
        beta: Tensor | None,
        log_forget: Tensor | None,
        *,
        scale: float,
        chunk: Chunk,
    ) -> Tensor:
        """As `LayerCache.attend`. Raises ValueError where there is no room, or no kernel for it."""
        T = q.shape[1]
        if self.seen + T > self.room:
            raise ValueError(f"cache: expected room for {self.seen + T} tokens, got {self.room}")
        lacks = triton_lacks(q, v)
        if lacks is not None:
            raise ValueError(f"cache: expected {lacks} with a static cache")
        if T > STEP:
            return super().attend(q, k, v, w, beta, log_forget, scale=scale, chunk=chunk)
        with lasting(), torch.autocast(q.device.type, enabled=False):
            self._factors = 1 if w is None else _factors(w)
            self.settle()
            if self.state is None:
                self._begin("plain" if w is None and log_forget is None else "moved", k)
                self._allocate(self._make(k, v, q.shape[2], w is not None, log_forget is not None))
            named = named_inputs(k, v, w, beta, log_forget, chunk.valid)
            state = self._hide(chunk.valid)
            out = decode_step(state, q, *_in_order(named), valid=chunk.valid, scale=scale)
            for name, (values, count) in chunk.records.items():
                held = self._held(name, values, count)
                record_step(state, values, *held, valid=chunk.valid)
            self._count(k.shape[1], chunk.valid)
        return constant(q, out)

    def settle(self) -> None:
        """Move what was seen into the fixed tensors; nothing happens if it has, or is empty."""
        if self.state is not None or self.kind is None or not self.seen:
            return
        if self.kind == "linear":
            raise ValueError("cache: expected the softmax normalizer with a static cache")
        with lasting():
            state = self._make_for_past()
            lay([self], state)
            lengths, self._kept_from = self._lengths, self.sealed
            self._allocate(state)
            self._settle_records()
        self.groups, self.tail = [], Tail()
        self._after = self._fade = self._transition = self._border_lengths = None
        self._stale = False
        if state.valid is not None:
            self._lengths = None if lengths is None else lengths.clone()

    def _settle_records(self) -> None:
        """Records of the tail and at borders into tensors of one size."""
        before, borders, start = self.before, self._borders, self.sealed
        self.before, self._borders = {}, {}
        for name, count in self._counts.items():
            values = self.tail.get(f"record.{name}")
            like = before[name] if values is None else values
            kept, _, at_borders = self._held(name, like, count)
            kept.copy_(before[name])
            if at_borders is not None and name in borders:
                at_borders[:, : borders[name].shape[1]] = borders[name]
            if self.croppable and values is not None:
                self._write_history(name, values, start, start, self.tail.get("valid"))

    def _held(
        self, name: str, like: Tensor, count: int
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What is kept of a record of values like `[B, T, …]`: before, history, borders.

        The last two, None where it isn't croppable, are for taking back alone.
        """
        state = self._settled
        if name not in self.before:
            self.placed = object()
            B, rest = like.shape[0], like.shape[2:]
            self._counts[name] = count
            self.before[name] = like.new_zeros(B, count, *rest)
            if self.croppable:
                self._history[name] = like.new_zeros(B, state.ring_size, *rest)
                self._borders[name] = like.new_zeros(B, state.units, count, *rest)
        return self.before[name], self._history.get(name), self._borders.get(name)

    def _write_history(
        self, name: str, values: Tensor, start: int, new: int, valid: Tensor | None
    ) -> None:
        """Lay records into their places, and what they leave at borders.

        values `[B, n, …]` are of all columns from `start` on, a border; `new`: the first new one.
        """
        state, history, borders = self._settled, self._history[name], self._borders[name]
        first, n = start // self.unit, values.shape[1]
        last = borders[:, first - 1] if first else None
        ends = self.unit * torch.arange(1, n // self.unit + 1, device=values.device)
        at_ends = records_at(values, self._counts[name], last, valid, ends)
        borders[:, first : first + len(ends)] = at_ends
        new = max(new, start + n - state.ring_size)
        history[:, places(state, new, start + n)] = values[:, new - start :].to(history.dtype)

    @property
    def _settled(self) -> DecodeState:
        assert self.state is not None
        return self.state

    def _make(self, k: Tensor, v: Tensor, heads: int, moves: bool, fades: bool) -> DecodeState:
        unit = self.unit or unit_length(k.shape[3])
        kinds = {"moves": moves, "fades": fades, "croppable": self.croppable}
        return DecodeState.make(k, v, heads, self.room, unit, factors=self._factors, **kinds)

    def _allocate(self, state: DecodeState) -> None:
        self.state, self._lengths, self.placed = state, None, object()
        self.room = state.keys.shape[2]

    def _make_for_past(self) -> DecodeState:
        """An empty state for what was seen."""
        stored = [group.storage.tokens for group in self.groups] or [self.tail.buffers]
        named = {"k": "keys", "v": "values"} if self.groups else {"k": "k", "v": "v"}
        B = len(self._lengths) if self._lengths is not None else 1
        k, v = (stored[0][named[n]][:1].expand(B, -1, -1, -1) for n in ("k", "v"))
        gates = self.tail.get("log_forget")
        moves = self.kind == "moved" and "w" in self.tail.buffers
        if self.groups and self.kind == "moved":
            moves = "transition" in self.groups[0].storage.units
        decay = stored[0].get("decay", gates)
        heads = k.shape[2] if decay is None else decay.shape[2]
        if (w := self.tail.get("w")) is not None:
            self._factors = _factors(w)
        state = self._make(k, v, heads, moves, decay is not None)
        return state._replace(valid=_all_valid(state)) if self.has_padding else state

    def lie_in(self, state: DecodeState, before: Buffers) -> None:
        """Be empty, and from now on lie in these tensors, whose rows are those of the batch."""
        self._allocate(state)
        self.before, self.seen = before, 0

    def _hide(self, valid: Tensor | None) -> DecodeState:
        """The state, which minds padding from the first chunk with some on."""
        state = self.state
        assert state is not None
        if valid is not None and self._lengths is None:
            self._lengths = state.seen.long()
        if self._lengths is not None and state.valid is None:
            self.placed = object()
            self.state = state = state._replace(valid=_all_valid(state))
        return state

    def _count(self, tokens: int, valid: Tensor | None) -> None:
        if self._lengths is not None:
            self._lengths += tokens if valid is None else valid.sum(1)
        self.seen += tokens

    # --- Long chunks ----------------------------------------------------------------------------

    def _past(self) -> Past:
        return super()._past() if self.state is None else past_of(self.state, self.seen)

    def _advance(self, chunk: Chunk, raw: Buffers, k: Tensor, moved: list | None = None) -> None:
        if self.state is None:
            super()._advance(chunk, raw, k, moved)
            return
        state = self._hide(chunk.valid)
        new = {"k": k, **{name: x for name, x in raw.items() if name in INPUTS}}
        if chunk.valid is not None:
            new["valid"] = chunk.valid
        self._advance_records(chunk)
        write_tokens(state, new, self.seen)
        self._count(k.shape[1], chunk.valid)

    def _advance_records(self, chunk: Chunk) -> None:
        """Take a long chunk's records, before its tokens."""
        state, unit, seen = self._settled, self.unit, self.seen
        start = seen // unit * unit
        for name, (values, count) in chunk.records.items():
            kept, history, _ = self._held(name, values, count)
            if history is not None:
                joined = torch.cat([history[:, places(state, start, seen)], values], 1)
                valid = self._joined_valid(start, chunk.valid, values)
                self._write_history(name, joined, start, seen, valid)
            kept.copy_(last_records(values, count, kept, chunk.valid))

    def _joined_valid(self, start: int, valid: Tensor | None, like: Tensor) -> Tensor | None:
        """Which columns from `start` on are real, those of a chunk like `[B, T, …]` included."""
        held = self._settled.valid
        if held is None:
            return None
        if valid is None:
            valid = torch.ones(like.shape[:2], dtype=torch.bool, device=like.device)
        return torch.cat([held[:, start : self.seen].bool(), valid], 1)

    # --- Taking back, sharing, reordering -------------------------------------------------------

    @property
    def sealed(self) -> int:
        """As in `LayerCache`; once settled, the first border from which all is there as it came."""
        if self.state is None:
            return super().sealed
        if not self.state.has_tail and not self._counts:
            return 0
        return -(-self._first_kept // self.unit) * self.unit

    @property
    def _first_kept(self) -> int:
        return max(self._kept_from, self.seen - self._settled.ring_size)

    def nearest_crops(self, length: int) -> tuple[int, int]:
        """As in `LayerCache`. Raises ValueError where it isn't croppable."""
        if not self.croppable:
            raise ValueError(
                "cache: expected one made with croppable=True to take tokens back, "
                "got croppable=False"
            )
        return super().nearest_crops(length)

    def _take_back(self, length: int) -> None:
        if self.state is None:
            super()._take_back(length)
        elif length < self.seen:
            self._take_back_in_place(length)

    def _take_back_in_place(self, length: int) -> None:
        state, unit = self._settled, self.unit
        if self._lengths is not None and state.valid is not None:
            self._lengths -= state.valid[:, length : self.seen].sum(1)
        self._kept_from = min(self._first_kept, length)
        start = length // unit * unit
        for name, count in self._counts.items():
            kept, history, borders = self._held(name, self.before[name], count)
            assert history is not None and borders is not None
            last = borders[:, start // unit - 1] if start else torch.zeros_like(kept)
            values = history[:, places(state, start, length)]
            valid = None if state.valid is None else state.valid[:, start:length].bool()
            kept.copy_(last_records(values, count, last, valid))
        if state.has_tail:
            if length // unit < self.seen // unit:
                rebuild_tables(state, length // unit)
            set_tail(state, read_tokens(state, start, length), start)
        state.seen.fill_(length)
        self.seen = length

    @lasting()
    def fork(self: _Self) -> _Self:
        """Another cache of the same past; once settled, a copy of all of it."""
        other = super().fork()
        other._history, other.placed = dict(self._history), object()
        if self.state is not None:
            kept = {name: x.clone() for name, x in self.state.tensors().items()}
            other.state = self.state._replace(**kept)
            for held in ("before", "_history", "_borders"):
                setattr(other, held, {n: x.clone() for n, x in getattr(self, held).items()})
            other._lengths = None if self._lengths is None else self._lengths.clone()
        return other

    @lasting()
    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order; once settled, by copying."""
        if self.state is None:
            super().select(rows)
            return
        rows = rows.to(self.state.seen.device)
        records = (self.before, self._history, self._borders)
        if len(rows) == len(self.state.seen):  # in place: a graph may hold these tensors
            for held in (self.state.tensors(), *records):
                for x in held.values():
                    x.copy_(x.index_select(0, rows))
            if self._lengths is not None:
                self._lengths.copy_(self._lengths.index_select(0, rows))
            return
        self._replace(lambda x: x.index_select(0, rows))

    @lasting()
    def move(self, device: torch.device) -> None:
        """Take everything to a device."""
        if self.state is None:
            super().move(device)
        else:
            self._replace(lambda x: x.to(device))

    def _replace(self, function: Callable[[Tensor], Tensor]) -> None:
        """Put other tensors in the place of all that it holds once it has settled."""
        named, self.placed = self._settled.tensors().items(), object()
        self.state = self._settled._replace(**{name: function(x) for name, x in named})
        for held in (self.before, self._history, self._borders):
            held.update({name: function(x) for name, x in held.items()})
        if self._lengths is not None:
            self._lengths = function(self._lengths)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that it holds."""
        yield from super().tensors()
        yield from self._history.values()
        if self.state is not None:
            yield from self.state.tensors().values()

    def export(self) -> Buffers:
        """Refused once it has settled."""
        if self.state is not None:
            raise ValueError("cache: expected one that has not settled, got a static one")
        return super().export()

    def extend_stick_breaking(self, *args: object, **kwargs: object) -> NoReturn:
        """Refused."""
        raise ValueError("cache: expected the softmax normalizer with a static cache")

    extend_linear = extend_stick_breaking


def _in_order(named: Buffers) -> tuple[Any, ...]:
    return tuple(named.get(name) for name in ("k", "v", "w", "beta", "log_forget"))


def _factors(w: Tensor) -> int:
    return 1 if w.dim() == 4 else w.shape[3]


def _all_valid(state: DecodeState) -> Tensor:
    B, _, room, _ = state.keys.shape
    return torch.ones(B, room, dtype=torch.uint8, device=state.keys.device)
