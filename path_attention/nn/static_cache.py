"""A layer's past in tensors of one size for good, so that a CUDA graph can replay a step.

docs/algorithm.md §5. A prompt goes in as into any `LayerCache`; then its units move into the fixed
tensors, and from there on a chunk of up to `STEP` tokens is four launches and no word to the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from path_attention.nn.cache import LayerCache, constant, named_inputs
from path_attention.nn.cache_storage import Buffers, Tail, last_records, sums_behind
from path_attention.nn.cache_units import identity, unit_length
from path_attention.nn.encoding import Chunk
from path_attention.ops.decode import STEP, DecodeState, decode_step, triton_lacks
from path_attention.ops.transport import chunk_transport

_Self = TypeVar("_Self", bound="StaticLayerCache")


class StaticLayerCache(LayerCache):
    """`LayerCache` with room for a number of tokens, allocated once.

    Until it has settled it is a `LayerCache`. It settles at the first chunk of up to `STEP` tokens,
    or by `settle`; then it can be forked and reordered (by copying), and taken back only where
    nothing moves or fades. Longer chunks go in by pieces. For softmax on NVIDIA GPUs.

    Attributes:
        room: tokens, a multiple of the unit once it has settled.
        state: None until it has settled.
    """

    def __init__(self, room: int, unit: int | None = None) -> None:
        """room: the most tokens. Raises ValueError unless it is at least 1."""
        if room < 1:
            raise ValueError(f"room: expected at least 1 token, got {room}")
        self.room = room
        super().__init__(unit)

    def reset(self) -> None:
        """Forget everything, its tensors too."""
        self.state: DecodeState | None = None
        self._lengths: Tensor | None = None
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
        if self.state is None and T > STEP:
            return super().attend(q, k, v, w, beta, log_forget, scale=scale, chunk=chunk)
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            self.settle()
            if self.state is None:
                self._begin("plain" if w is None and log_forget is None else "moved", k)
                kinds = {"moves": w is not None, "fades": log_forget is not None}
                self._allocate(DecodeState.make(k, v, q.shape[2], self.room, self.unit, **kinds))
            named = named_inputs(k, v, w, beta, log_forget, chunk.valid)
            state = self._hide(chunk.valid)
            outs = []
            for at in range(0, T, STEP):
                part: Any = [_cut(x, at) for x in (q, *_in_order(named))]
                outs.append(decode_step(state, *part, valid=_cut(chunk.valid, at), scale=scale))
            self._remember(chunk)
            self.seen += T
        return constant(q, outs[0] if len(outs) == 1 else torch.cat(outs, 1))

    def settle(self) -> None:
        """Move what was seen into the fixed tensors; nothing happens if it has, or is empty."""
        if self.state is not None or self.kind is None or not self.seen:
            return
        if self.kind == "linear":
            raise ValueError("cache: expected the softmax normalizer with a static cache")
        with torch.no_grad():
            state, done = self._settle_groups()
            if self.kind == "moved":
                _settle_tail(state, self.tail, done)
            state.seen.fill_(self.seen)
        self.groups, self.tail = [], Tail()
        self._after = self._fade = self._transition = self._border_lengths = None
        self._borders, self._stale = {}, False
        self.before = {name: x.clone() for name, x in self.before.items()}
        lengths = self._lengths
        self._allocate(state)
        if state.valid is not None:
            self._lengths = None if lengths is None else lengths.clone()

    def _allocate(self, state: DecodeState) -> None:
        self.state, self._lengths = state, None
        self.room = state.keys.shape[2]

    def _settle_groups(self) -> tuple[DecodeState, int]:
        """A state with the sealed units, and how many tokens they are."""
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
        unit = self.unit or unit_length(k.shape[3])
        kinds = {"moves": moves, "fades": decay is not None}
        state = DecodeState.make(k, v, heads, self.room, unit, **kinds)
        if any("valid" in tokens for tokens in stored) or "valid" in self.tail.buffers:
            state = state._replace(valid=_all_valid(state))
        at = 0
        for n, group in enumerate(self.groups):
            stop = at + group.count
            tokens = {"keys": state.keys, "values": state.values, "decay": state.fade}
            for name, to in tokens.items():
                x = group.read_rows(name)
                if x is not None and to is not None:
                    to[:, :, at:stop] = x.transpose(1, 2)
            valid = group.read_rows("valid")
            if valid is not None and state.valid is not None:
                state.valid[:, at:stop] = valid
            if self.kind == "moved":
                self._settle_tables(state, n, slice(at // unit, stop // unit))
            at = stop
        return state, at

    def _settle_tables(self, state: DecodeState, n: int, units: slice) -> None:
        group, last = self.groups[n], n == len(self.groups) - 1
        suffix, fade = (
            x if x is None or group.rows is None else x.index_select(0, group.rows)
            for x in (group.suffix, group.fade)
        )
        if suffix is not None:
            if not last and self._after is not None:
                suffix = suffix @ self._after[:, n, None]
            _set_matrices(state, units, suffix)
        if fade is not None and state.unit_fade is not None:
            if not last and self._fade is not None:
                fade = fade + self._fade[:, n, None]
            state.unit_fade[:, units] = fade

    def _hide(self, valid: Tensor | None) -> DecodeState:
        """The state, which minds padding from the first chunk with some on."""
        state = self.state
        assert state is not None
        if valid is not None and self._lengths is None:
            self._lengths = state.seen.long()
        if self._lengths is not None and state.valid is None:
            self.state = state = state._replace(valid=_all_valid(state))
        return state

    def _remember(self, chunk: Chunk) -> None:
        """Move lengths and records on, in place."""
        T, valid = chunk.positions.shape[1], chunk.valid
        if self._lengths is not None:
            self._lengths += T if valid is None else valid.sum(1)
        for name, (values, count) in chunk.records.items():
            kept = self.before.get(name)
            if kept is None:
                self.before[name] = last_records(values, count, None, valid)
            elif valid is None and count <= T:
                kept.copy_(values[:, T - count :])
            else:
                kept.copy_(last_records(values, count, kept, valid))

    # --- Taking back, sharing, reordering -------------------------------------------------------

    @property
    def sealed(self) -> int:
        """As in `LayerCache`; once settled, what can't be taken back."""
        if self.state is None:
            return super().sealed
        return self.seen if self.state.has_tail or self.before else 0

    def nearest_crops(self, length: int) -> tuple[int, int]:
        """As in `LayerCache`: once settled 0 and what was seen, or any where nothing moves."""
        if self.state is None:
            return super().nearest_crops(length)
        return (0, self.seen) if 0 < length < self.sealed else (length, length)

    def crop(self, length: int) -> None:
        """Keep the first `length` columns. Raises ValueError where it can't: `nearest_crops`."""
        if self.state is None:
            super().crop(length)
            return
        self.check_crop(length)
        if length == 0:
            self.reset()
        elif length < self.seen:
            if self._lengths is not None and self.state.valid is not None:
                gone = self.state.valid[:, length : self.seen].sum(1)
                self._lengths -= gone
            self.state.seen.fill_(length)
            self.seen = length

    def fork(self: _Self) -> _Self:
        """Another cache of the same past; once settled, a copy of all of it."""
        other = super().fork()
        if self.state is not None:
            kept = {name: x.clone() for name, x in self.state.tensors().items()}
            other.state = self.state._replace(**kept)
            other.before = {name: x.clone() for name, x in self.before.items()}
            other._lengths = None if self._lengths is None else self._lengths.clone()
        return other

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order; once settled, by copying."""
        if self.state is None:
            super().select(rows)
            return
        rows = rows.to(self.state.seen.device)
        if len(rows) == len(self.state.seen):  # in place: a graph may hold these tensors
            for x in (*self.state.tensors().values(), *self.before.values()):
                x.copy_(x.index_select(0, rows))
            if self._lengths is not None:
                self._lengths.copy_(self._lengths.index_select(0, rows))
            return
        named = self.state.tensors().items()
        self.state = self.state._replace(**{n: x.index_select(0, rows) for n, x in named})
        self.before = {n: x.index_select(0, rows) for n, x in self.before.items()}
        if self._lengths is not None:
            self._lengths = self._lengths.index_select(0, rows)

    def move(self, device: torch.device) -> None:
        """Take everything to a device."""
        super().move(device)
        if self.state is not None:
            named = self.state.tensors().items()
            self.state = self.state._replace(**{name: x.to(device) for name, x in named})

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that it holds."""
        yield from super().tensors()
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


def _cut(x: Tensor | None, at: int) -> Tensor | None:
    return None if x is None else x[:, at : at + STEP]


def _all_valid(state: DecodeState) -> Tensor:
    B, _, room, _ = state.keys.shape
    return torch.ones(B, room, dtype=torch.uint8, device=state.keys.device)


def _set_matrices(state: DecodeState, units: slice, x: Tensor) -> None:
    if state.high is not None:
        state.high[:, units] = x.to(state.high.dtype)
        if state.low is not None:
            state.low[:, units] = (x - state.high[:, units]).to(state.low.dtype)


def _matrices(state: DecodeState, units: int) -> Tensor | None:
    if state.high is None:
        return None
    high = state.high[:, :units].float()
    return high if state.low is None else high + state.low[:, :units]


def _settle_tail(state: DecodeState, tail: Tail, done: int) -> None:
    """Seal a complete unit at the tail's front, and lay the rest into the ring."""
    unit, length, at = state.unit, tail.length, done
    for start in range(0, length, unit):
        count, units = min(unit, length - start), at // unit
        part = {name: tail[name][:, start : start + count] for name in tail.buffers}
        keys, product = part["k"], None
        if "w" in part:
            _, keys, product = chunk_transport(keys[:, :, :0], keys, part["w"], part["beta"])
        behind, total = None, None
        if "log_forget" in part:
            behind, total = sums_behind(part["log_forget"])
        state.values[:, :, at : at + count] = part["v"].transpose(1, 2)
        if "valid" in part and state.valid is not None:
            state.valid[:, at : at + count] = part["valid"]
        if count == unit or product is None:
            state.keys[:, :, at : at + count] = keys.transpose(1, 2)
        if count == unit:
            _seal(state, units, product, behind, total)
        else:
            slots = torch.arange(at, at + count, device=keys.device) % state.ring_size
            if product is not None and state.ring is not None and state.tail is not None:
                D = keys.shape[3]
                state.ring[:, :, slots, :D] = keys.transpose(1, 2).float()
                state.tail[:, 0, :, :D, :D] = product
            if behind is not None and total is not None and state.tail_fade is not None:
                assert state.ring_fade is not None
                state.ring_fade[:, :, slots] = behind.transpose(1, 2).float()
                state.tail_fade[:, 0] = total
        at += count


def _seal(
    state: DecodeState,
    units: int,
    product: Tensor | None,
    behind: Tensor | None,
    total: Tensor | None,
) -> None:
    """Carry the first `units` units over a further one."""
    matrices = _matrices(state, units)
    if product is not None and matrices is not None:
        every = torch.cat([matrices @ product[:, None], identity(product)[:, None]], 1)
        _set_matrices(state, slice(0, units + 1), every)
    if total is not None and behind is not None and state.unit_fade is not None:
        state.unit_fade[:, :units] += total[:, None]
        assert state.fade is not None
        place = slice(units * state.unit, (units + 1) * state.unit)
        state.fade[:, :, place] = behind.transpose(1, 2)
