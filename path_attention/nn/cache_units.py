"""A layer's past as sealed units that never change, then a tail that is still as it came.

docs/algorithm.md §5. How it grows, is taken back, forked and reordered; `LayerCache` attends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, TypeVar

import torch
from torch import Tensor

from path_attention.nn.cache_storage import (
    Buffers,
    Group,
    Storage,
    Tail,
    last_records,
    lasting,
    records_at,
    sums_behind,
)
from path_attention.nn.encoding import Chunk
from path_attention.ops.linear import linear_attention
from path_attention.ops.transport import chunk_transport, identity, products_behind

KEPT = 64  # the last tokens that stay as they came, however full the tail is
GROUP = 16  # units of a group
_BORDER = 64  # tokens between the states that a linear layer passes
_Self = TypeVar("_Self", bound="SealedUnits")


def unit_length(head_dim: int) -> int:
    """Tokens of a sealed unit: 8 · head_dim, rounded up to a power of two, from 64 to 1024.

    A unit's matrix is read with its keys and values at each token: in 16 bits 1/8 of their bytes at
    this length, and half that at twice the length. The tail, on average half a unit long, is moved
    in float32 at each token and copied by a fork, which longer units make worse.
    """
    return min(1024, max(64, 1 << (8 * head_dim - 1).bit_length()))


class SealedUnits:
    """Units of a layer's tokens, their groups, the tail, and what borders need to start from.

    A unit is sealed once `KEPT` tokens follow it: its keys move to its own end and are rounded
    once, and its transition is kept in float32. Inside a group of `GROUP` units products of
    transitions behind each unit are kept, and one matrix behind each group. The tail's raw k, w, β
    stay, and its keys moved to "now" beside them in float32. Where nothing moves, keys and values
    are in one buffer that grows, as they came. A linear layer keeps one state, and its tail.

    Rows may differ in length: padding follows a row's real tokens in each chunk, and leaves a slot
    that no query sees.

    Attributes:
        kind: "moved" (transport or decay), "plain" (neither) or "linear"; None while empty.
        unit: tokens of a unit; 0 while empty.
        seen: the number of columns seen, padding included.
        lengths: int64 `[B]`, the number of real tokens of each row; None while empty.
        before: what the last real tokens recorded for the encoding, by name, `[B, count, …]`.
        groups: sealed units, oldest first; of kind "plain", everything.
        tail: the columns since the last border: raw inputs of the operator and records.
    """

    def __init__(self, unit: int | None = None) -> None:
        """unit: tokens of a sealed unit, a multiple of 64; None is `unit_length(head_dim)`."""
        if unit is not None and (unit < 64 or unit % 64):
            raise ValueError(f"unit: expected a multiple of 64, got {unit}")
        self._unit = unit
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.kind: Literal["plain", "moved", "linear"] | None = None
        self.unit = 0
        self.seen = 0
        self.lengths: Tensor | None = None
        self.before: Buffers = {}
        self.groups: list[Group] = []
        self.tail = Tail()
        self._counts: dict[str, int] = {}  # records that reach into the next chunk, by name
        # What the ends of units need to start from, [B, units, …]: records, and lengths.
        self._borders: Buffers = {}
        self._border_lengths: Tensor | None = None
        self._after: Tensor | None = None  # [B, groups, H, D, D], from a group's end to the tail
        self._fade: Tensor | None = None  # [B, groups, HQ], the same of Σ log_forget
        self._transition: Tensor | None = None  # [B, H, D, D], of the tail
        self._stale = False  # whether the tail's keys must be moved to "now" anew
        self._states: tuple[Tensor | None, Tensor] | None = None  # linear: at the tail's start, now

    # --- Appending ------------------------------------------------------------------------------

    def _begin(self, kind: Literal["plain", "moved", "linear"], k: Tensor) -> None:
        self.kind = kind
        self.unit = _BORDER if kind == "linear" else self._unit or unit_length(k.shape[3])

    def _complete_units(self, T: int, chunk: Chunk) -> int:
        """Units to be sealed once a chunk of T tokens is appended."""
        if self.kind == "plain" and not chunk.records:
            return 0  # nothing is kept for a border: any length is one
        return max(0, (self.tail.length + T - KEPT) // self.unit)

    def _advance(self, chunk: Chunk, raw: Buffers, k: Tensor, moved: list | None = None) -> None:
        """Append a chunk k `[B, T, …]`: raw inputs by name; its keys at its end, its transition."""
        T, valid = k.shape[1], chunk.valid
        units = self._complete_units(T, chunk)
        new: Buffers = {} if valid is None else {"valid": valid}
        if self.kind == "plain":
            self._append_plain({"keys": raw["k"], "values": raw["v"], **new})
        else:
            new.update(raw)
        for name, record in chunk.records.items():
            new[f"record.{name}"], self._counts[name] = record
            self.before[name] = last_records(*record, self.before.get(name), valid)
        if units:
            first = self.tail.take(units * self.unit, new, T)
            self._note_borders(first, units, k)
            if self.kind == "moved":
                self._seal(first, units)
            self._stale = True
        elif moved is None:
            self.tail.append(new, T)
            self._stale = True
        else:
            k_end, transition = moved
            if self.tail.length and self._transition is not None:
                kept = self.tail.writable("moved")
                kept.copy_(torch.einsum("bshd,bhde->bshe", kept, transition))
                transition = self._transition @ transition
            self._transition = transition
            self.tail.append({**new, "moved": k_end}, T)
        if self.lengths is None:
            self.lengths = torch.zeros(len(k), dtype=torch.int64, device=k.device)
        self.lengths = self.lengths + (T if valid is None else valid.sum(1))
        self.seen += T

    def _append_plain(self, tokens: Buffers) -> None:
        if not self.groups or not self.groups[-1].has_room(tokens["keys"].shape[1]):
            self.groups.append(Group(Storage()))
        self.groups[-1].append(tokens, {}, 1)

    def _freshen(self) -> None:
        """Move the tail's keys to "now" from where they came, after a border or tokens went."""
        if self._stale and self.tail.length and "w" in self.tail.buffers:
            k, w, beta = (self.tail[name] for name in ("k", "w", "beta"))
            _, moved, self._transition = chunk_transport(k[:, :, :0], k, w, beta)
            self.tail.set("moved", moved)
        elif not self.tail.length:
            self._transition = None
        self._stale = False

    def _note_borders(self, first: Buffers, units: int, k: Tensor) -> None:
        """Keep what the ends of the tail's first units need to start from."""
        valid, S = first.get("valid"), self.unit
        ends = torch.arange(S, units * S + 1, S, device=k.device)
        for name, count in self._counts.items():
            values, states = first[f"record.{name}"], self._borders.get(name)
            if valid is None and count <= S:  # each end's are in its own unit
                found = values.unflatten(1, (units, S))[:, :, S - count :].clone()
            else:
                last = None if states is None else states[:, -1]
                found = records_at(values, count, last, valid, ends)
            self._borders[name] = found if states is None else torch.cat([states, found], 1)
        real, before = ends.expand(len(k), -1), self._border_lengths
        if valid is not None:
            real = valid.unflatten(1, (units, S)).sum(2).cumsum(1)
        if before is not None:
            real = torch.cat([before, before[:, -1:] + real], 1)
        self._border_lengths = real

    def _seal(self, first: Buffers, units: int) -> None:
        """Move the tail's first units to their ends, for ever, and into groups."""
        S, gates = self.unit, first.get("log_forget")
        tokens: Buffers = {"keys": first["k"], "values": first["v"]}
        of_units: Buffers = {}
        if "valid" in first:
            tokens["valid"] = first["valid"]
        if "w" in first:
            blocks = (first[x].unflatten(1, (units, S)) for x in ("k", "w", "beta"))
            k, w, beta = (x.flatten(0, 1) for x in blocks)
            _, moved, transition = chunk_transport(k[:, :, :0], k, w, beta)
            tokens["keys"] = moved.to(k.dtype).unflatten(0, (-1, units)).flatten(1, 2)
            of_units["transition"] = transition.unflatten(0, (-1, units))
        if gates is not None:
            behind, total = sums_behind(gates.unflatten(1, (units, S)))
            tokens["decay"], of_units["forget"] = behind.flatten(1, 2), total
        start = 0
        while start < units:
            group = self.groups[-1] if self.groups else None
            if group is None or group.count >= GROUP * S or not group.has_room(S):
                group = self._open_group()
            take = min(units - start, GROUP - group.count // S)
            if not group.has_room(take * S):
                take = (group.storage.capacity - group.count) // S
            stop = start + take
            group.append(
                {name: x[:, start * S : stop * S] for name, x in tokens.items()},
                {name: x[:, start:stop] for name, x in of_units.items()},
                S,
            )
            self._extend_tables(group, {name: x[:, start:stop] for name, x in of_units.items()})
            start = stop

    def _open_group(self) -> Group:
        self.groups.append(Group(Storage()))
        return self.groups[-1]

    def _extend_tables(self, group: Group, units: Buffers) -> None:
        """Carry every earlier unit over these new ones, the last of the last group."""
        if "transition" in units:
            behind, total = products_behind(units["transition"])
            if group.suffix is not None:
                behind = torch.cat([group.suffix @ total[:, None], behind], 1)
            group.suffix = behind
            self._after = _carried(self._after, len(self.groups), identity(total), total)
        if "forget" in units:
            behind, total = sums_behind(units["forget"])
            if group.fade is not None:
                behind = torch.cat([group.fade + total[:, None], behind], 1)
            group.fade = behind
            self._fade = _carried(self._fade, len(self.groups), torch.zeros_like(total), total)

    # --- Taking back, sharing, reordering -------------------------------------------------------

    @property
    def sealed(self) -> int:
        """Columns before the tail: `crop` is exact behind it, and at borders before it."""
        return self.seen - self.tail.length

    def nearest_crops(self, length: int) -> tuple[int, int]:
        """The longest length up to this one that `crop` can do, and the shortest from it on."""
        if length >= self.sealed or length <= 0:
            return length, length
        if self.kind == "linear":
            return 0, self.sealed
        below = length // self.unit * self.unit
        return below, below if below == length else below + self.unit

    def check_crop(self, length: int) -> None:
        """Raise ValueError, naming the nearest lengths, where `crop` can't do this one."""
        if not 0 <= length <= self.seen:
            raise ValueError(f"length: expected 0 to {self.seen}, the columns seen, got {length}")
        below, above = self.nearest_crops(length)
        if length not in (below, above):
            what = "the state of a linear layer" if self.kind == "linear" else "a sealed unit"
            raise ValueError(
                f"length: expected {below} or {above}, the nearest that can be taken back to, or "
                f"{self.sealed} to {self.seen}: {what} can't be undone; got {length}"
            )

    @lasting()
    def crop(self, length: int) -> None:
        """Keep the first `length` columns, exactly as if the others had never come.

        Any length back to the last border, which lies `KEPT` columns back at least; before it, any
        unit's border (a linear layer, whose state can't be undone, only 0). All lengths where
        nothing moves and no encoding reaches from chunk to chunk. Raises ValueError elsewhere.
        """
        self.check_crop(length)
        self._take_back(length)

    def _take_back(self, length: int) -> None:
        if length == 0:
            self.reset()
        elif length < self.sealed:
            self._cut_units(length // self.unit)
            self._cut_tail(0)
        elif length < self.seen:
            self._cut_tail(length - self.sealed)

    def _cut_units(self, units: int) -> None:
        """Drop the tail and all units but the first ones."""
        self.tail, self.seen = Tail(), units * self.unit
        self._borders = {name: x[:, :units] for name, x in self._borders.items()}
        if self._border_lengths is not None:
            self._border_lengths = self._border_lengths[:, :units]
        self._cut_groups(self.seen)
        if self.kind == "moved":
            self._rebuild_tables()

    def _cut_groups(self, tokens: int) -> None:
        kept = []
        for group in self.groups:
            if tokens > 0:
                group.count = min(group.count, tokens)
                tokens -= group.count
                kept.append(group)
        self.groups = kept

    def _rebuild_tables(self) -> None:
        after, fade = [], []
        for group in reversed(self.groups):
            stored, held = group.storage.units, group.count // self.unit
            if "transition" in stored:
                group.suffix, total = products_behind(stored["transition"][:, :held])
                total = group.of_batch(total)
                after.append(after[-1] if after else identity(total))
                after.append(total @ after[-1])
            if "forget" in stored:
                group.fade, total = sums_behind(stored["forget"][:, :held])
                total = group.of_batch(total)
                fade.append(fade[-1] if fade else torch.zeros_like(total))
                fade.append(total + fade[-1])
        # Every second one is what lies behind a group, the others also count the group itself.
        self._after = torch.stack(after[-2::-2], 1) if after else None
        self._fade = torch.stack(fade[-2::-2], 1) if fade else None

    def _cut_tail(self, length: int) -> None:
        """Drop all but the first columns of the tail; where none are left, all that it held."""
        self.seen = self.sealed + length
        if not length:
            self.tail = Tail()
        self.tail.length = length
        if self.kind == "plain":
            self._cut_groups(self.seen)
        valid = self.tail.get("valid")
        for name, count in self._counts.items():
            values, states = self.tail.get(f"record.{name}"), self._borders.get(name)
            last = None if states is None else states[:, -1]
            if values is not None:
                last = last_records(values, count, last, valid)
            if last is not None:
                self.before[name] = last
        if self.lengths is not None:
            last = self._border_lengths
            start = None if last is None or not last.shape[1] else last[:, -1]
            if length or start is None:
                real = length if valid is None else valid.sum(1)
                start = (torch.zeros_like(self.lengths) if start is None else start) + real
            self.lengths = start
        if self._states is not None:
            start = self._states[0]
            now = self._state_after(length) if length or start is None else start
            self._states = (start, now)
        self._stale = True

    def _state_after(self, tokens: int) -> Tensor:
        """A linear layer's state after the first tokens of its tail."""
        if self._states is None:
            raise RuntimeError("a cache without a linear layer's state was asked for it")
        start, now = self._states
        names = [n for n in ("k", "v", "w", "beta", "log_forget") if n in self.tail.buffers]
        raw = {name: self.tail[name][:, :tokens] for name in names}
        q = raw["k"].new_zeros(*raw["k"].shape[:2], now.shape[1], now.shape[3])
        return linear_attention(q, **raw, state=start)[1]  # pyright: ignore[reportArgumentType]

    @lasting()
    def fork(self: _Self) -> _Self:
        """Another cache of the same past, which shares every sealed unit by reference.

        Neither sees what the other appends or crops. Costs two small tables of references, and of
        the tail what is written next; the one that is forked goes on filling the last group.
        """
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.groups = [group.fork() for group in self.groups]
        other.tail = self.tail.fork()
        for name in ("before", "_counts", "_borders"):
            setattr(other, name, dict(getattr(self, name)))
        return other

    @property
    def last_border(self) -> int:
        """The end of the last unit that was sealed; where any length is one, of the last whole."""
        anywhere = self.kind == "plain" and not self._counts
        return self.seen // self.unit * self.unit if anywhere else self.sealed

    def export(self) -> Buffers:
        """Everything, by name, in tensors that share nothing: what `from_export` takes.

        Raises ValueError unless it ends at a border and holds one row.
        """
        if self.last_border != self.seen or self.lengths is None or len(self.lengths) != 1:
            raise ValueError("cache: expected one row that ends at a border, got another")
        held: Buffers = {"unit": torch.tensor(self.unit), "seen": torch.tensor(self.seen)}
        for name in ("keys", "values", "decay"):
            parts = [x for g in self.groups if (x := g.read_rows(name)) is not None]
            if parts:
                held[f"tokens.{name}"] = torch.cat(parts, 1)
        for name in ("transition", "forget"):
            parts = [x for g in self.groups if (x := g.read_units(name, self.unit)) is not None]
            if parts:
                held[f"units.{name}"] = torch.cat(parts, 1)
        for name, count in self._counts.items():
            held[f"border.{count}.{name}"] = self._borders[name].clone()
        if self._states is not None:
            held["state"] = self._states[1].clone()
        return held

    @classmethod
    def from_export(cls: type[_Self], held: Buffers, device: torch.device) -> _Self:
        """The cache that an `export` was of, on a device."""
        cache = cls()
        cache.unit, cache.seen = int(held["unit"]), int(held["seen"])
        held = {name: x.to(device) for name, x in held.items()}
        tokens, units = (
            {n.partition(".")[2]: x for n, x in held.items() if n.startswith(kind)}
            for kind in ("tokens.", "units.")
        )
        cache.kind = "linear" if "state" in held else "moved" if units else "plain"
        size = GROUP * cache.unit if units else max(1, cache.seen)
        for start in range(0, cache.seen if tokens else 0, size):
            first = start // cache.unit
            cache.groups.append(Group(Storage()))
            cache.groups[-1].append(
                {name: x[:, start : start + size] for name, x in tokens.items()},
                {name: x[:, first : first + GROUP] for name, x in units.items()},
                cache.unit,
            )
        if units:
            cache._rebuild_tables()
        for name, x in held.items():
            if name.startswith("border."):
                _, count, record = name.split(".", 2)
                cache._counts[record], cache._borders[record] = int(count), x
                cache.before[record] = x[:, -1]
        whole = cache.seen // cache.unit
        cache.lengths = torch.tensor([cache.seen], device=device)
        if cache.kind != "plain" or cache._counts:
            ends = torch.arange(1, whole + 1, device=device)
            cache._border_lengths = (ends * cache.unit)[None]
        if "state" in held:
            cache._states = (held["state"], held["state"])
        return cache

    @lasting()
    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order: beam search, repetition, pruning.

        Sealed units stay where they are; a table of rows says who reads which.
        """
        if self.lengths is None:
            return
        rows = rows.to(self.lengths.device)
        same = len(rows) == len(self.lengths)
        if same and rows.tolist() == list(range(len(rows))):
            return
        last = len(self.groups) - 1
        self.groups = [
            group.select(rows, copy=self.kind == "plain" and n == last)
            for n, group in enumerate(self.groups)
        ]
        self.tail.select(rows)
        self._map(lambda x: x.index_select(0, rows))

    @lasting()
    def move(self, device: torch.device) -> None:
        """Take everything to a device, shared units too."""
        for group in self.groups:
            group.move(device)
        self.tail.move(device)
        self._map(lambda x: x.to(device))

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that it holds, with its free room."""
        for group in self.groups:
            yield from group.tensors()
        yield from self.tail.buffers.values()
        for held in (self.before, self._borders):
            yield from held.values()
        single = (self.lengths, self._border_lengths, self._after, self._fade, self._transition)
        yield from (x for x in (*single, *(self._states or ())) if x is not None)

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace what has a row for each of the batch, the tail and groups apart."""
        for held in (self.before, self._borders):
            held.update({name: function(x) for name, x in held.items()})
        for name in ("lengths", "_border_lengths", "_after", "_fade", "_transition"):
            if getattr(self, name) is not None:
                setattr(self, name, function(getattr(self, name)))
        if self._states is not None:
            start, now = self._states
            self._states = (None if start is None else function(start), function(now))


def memory(caches: Iterable[SealedUnits]) -> int:
    """Bytes that caches hold, what they share counted once."""
    return sum(storages(x for cache in caches for x in cache.tensors()).values())


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of the memory that tensors lie in, by its address."""
    held = (x.untyped_storage() for x in tensors)
    return {x.data_ptr(): x.nbytes() for x in held}


def _carried(table: Tensor | None, groups: int, start: Tensor, total: Tensor) -> Tensor:
    """The table of what lies behind each group, after units of this total joined the last one.

    Products for matrices `[B, groups, H, D, D]`, sums for gates `[B, groups, HQ]`; a new group
    comes in with `start`, and keeps it.
    """
    if table is None:
        return start[:, None]
    table = torch.cat([table, start[:, None]], 1) if table.shape[1] < groups else table
    ahead = table[:, :-1]
    ahead = ahead + total[:, None] if start.dim() == 2 else ahead @ total[:, None]
    return torch.cat([ahead, table[:, -1:]], 1)
