"""What a layer's cache is built of: append-only buffers shared by reference, and a raw tail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Buffers = dict[str, Tensor]


class Storage:
    """Buffers of one group of sealed tokens, filled from the front.

    Attributes:
        tokens: one entry a token, `[R, capacity, …]` each: "keys", "values", "decay", "valid".
        units: one entry a unit, `[R, capacity, …]` each: "transition", "forget".
        frozen: so many tokens may be read by others: they are never written again.
    """

    def __init__(self) -> None:
        self.tokens: Buffers = {}
        self.units: Buffers = {}
        self.frozen = 0

    @property
    def capacity(self) -> int:
        return self.tokens["keys"].shape[1] if self.tokens else 0

    def move(self, device: torch.device) -> None:
        """Take all buffers to a device; nothing happens if they are there."""
        for buffers in (self.tokens, self.units):
            for name, x in buffers.items():
                buffers[name] = x.to(device)


@dataclass
class Group:
    """One cache's view of a storage: its first `count` tokens.

    Attributes:
        storage: shared with the forks of the cache that filled it.
        count: tokens of it that this cache has.
        owner: whether this cache may append to it.
        rows: int64 `[B]`, the stored row that each row of the batch reads; None: its own.
        suffix: product of the transitions behind each unit, `[R, U, H, D, D]`; never written in
            place, nor is `fade`: forks share them.
        fade: Σ log_forget behind each unit, `[R, U, HQ]`.
    """

    storage: Storage
    count: int = 0
    owner: bool = True
    rows: Tensor | None = None
    suffix: Tensor | None = None
    fade: Tensor | None = None

    def fork(self) -> Group:
        """The same tokens for another cache, which may read but not append to them."""
        self.storage.frozen = max(self.storage.frozen, self.count)
        return replace(self, owner=False)

    def has_room(self, tokens: int) -> bool:
        """Whether this cache may append so many here: not over a fork's, nor by copying them."""
        own = self.owner and self.rows is None and self.count >= self.storage.frozen
        fits = self.count + tokens <= self.storage.capacity
        return own and (fits or self.storage.frozen == 0)

    def append(self, tokens: Buffers, units: Buffers, size: int) -> None:
        """Write tokens `[R, n, …]`, and units of `size` tokens each, behind those it has."""
        n = tokens["keys"].shape[1]
        kept = self.storage.tokens
        if "valid" in kept and "valid" not in tokens:
            tokens = {**tokens, "valid": _ones(tokens["keys"], n)}
        if "valid" in tokens and "valid" not in kept and self.count:
            kept["valid"] = _ones(tokens["keys"], self.storage.capacity)
        for name, x in tokens.items():
            write(kept, name, self.count, x)
        for name, x in units.items():
            write(self.storage.units, name, self.count // size, x)
        self.count += n

    def read(self, name: str) -> Tensor | None:
        """The tokens' buffer of this name, `[R, count, …]`, a view; None if there is none."""
        buffer = self.storage.tokens.get(name)
        return None if buffer is None else buffer[:, : self.count]

    def read_rows(self, name: str, tokens: slice = slice(None)) -> Tensor | None:
        """As `read`, of the rows of the batch; some of the tokens."""
        x = self.read(name)
        return None if x is None else self.of_batch(x[:, tokens])

    def read_units(self, name: str, size: int) -> Tensor | None:
        """The units' buffer of this name, `[B, count / size, …]`, of the rows of the batch."""
        if name not in self.storage.units:
            return None
        return self.of_batch(self.storage.units[name][:, : self.count // size])

    def of_batch(self, x: Tensor) -> Tensor:
        """What has a row for each stored one, `[R, …]`, of the rows of the batch."""
        return x if self.rows is None else x.index_select(0, self.rows)

    def select(self, rows: Tensor, copy: bool) -> Group:
        """Rows of it, by reference, or as a copy to append to if nobody else reads it."""
        if copy and self.has_room(0) and self.storage.frozen == 0:
            storage = Storage()
            for name, x in self.storage.tokens.items():
                write(storage.tokens, name, 0, x[:, : self.count].index_select(0, rows))
            return Group(storage, self.count)
        return replace(self, rows=rows if self.rows is None else self.rows.index_select(0, rows))

    def row(self, n: int) -> Group:
        """Row n of the batch: by reference where all rows read one, else a copy without padding."""
        if self.rows is not None and len(self.storage.tokens["keys"]) == 1:
            return replace(self.fork(), rows=None)
        rows = slice(n, n + 1) if self.rows is None else self.rows[n : n + 1]
        storage = Storage()
        for name, x in self.storage.tokens.items():
            if name != "valid":
                storage.tokens[name] = _copy(x[rows, : self.count])
        for name, x in self.storage.units.items():
            storage.units[name] = _copy(x[rows])
        suffix, fade = (None if x is None else _copy(x[rows]) for x in (self.suffix, self.fade))
        return Group(storage, self.count, suffix=suffix, fade=fade)

    def move(self, device: torch.device) -> None:
        """Take storage and tables to a device."""
        self.storage.move(device)
        for name in ("rows", "suffix", "fade"):
            if getattr(self, name) is not None:
                setattr(self, name, getattr(self, name).to(device))

    def tensors(self) -> Iterator[Tensor]:
        yield from self.storage.tokens.values()
        yield from self.storage.units.values()
        yield from (x for x in (self.rows, self.suffix, self.fade) if x is not None)


class Tail:
    """The last tokens as they came, `[B, length, …]` each by name, in buffers that grow.

    Attributes:
        lent: names of the buffers that a fork may read: they are never written again.
    """

    def __init__(self) -> None:
        self.buffers: Buffers = {}
        self.length = 0
        self.lent: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        return self.buffers[name][:, : self.length]

    def get(self, name: str) -> Tensor | None:
        return self[name] if name in self.buffers else None

    def names(self, prefix: str = "") -> list[str]:
        return [name for name in self.buffers if name.startswith(prefix)]

    def append(self, new: Buffers, count: int) -> None:
        """Add `count` tokens; "valid" may come late or be missing, which is True."""
        self._complete(new, count)
        for name, x in new.items():
            if name in self.lent:  # without room: `write` makes another
                self.buffers[name] = self[name]
                self.lent.discard(name)
            write(self.buffers, name, self.length, x)
        self.length += count

    def take(self, tokens: int, new: Buffers, count: int) -> Buffers:
        """As `append`, then let go of the first `tokens`, which are returned."""
        self._complete(new, count)
        first, rest = {}, {}
        for name, x in new.items():
            own = tokens - self.length  # of the new ones
            if not self.length:
                first[name], rest[name] = x[:, :tokens], _copy(x[:, tokens:])
            elif own > 0:
                x = x.to(self[name].dtype)
                first[name] = torch.cat([self[name], x[:, :own]], 1)
                rest[name] = _copy(x[:, own:])
            else:
                first[name] = self[name][:, :tokens]
                rest[name] = torch.cat([self[name][:, tokens:], x.to(self[name].dtype)], 1)
        self.buffers, self.length, self.lent = rest, self.length + count - tokens, set()
        return first

    def set(self, name: str, x: Tensor) -> None:
        """Give the tokens x `[B, length, …]` under a name, to be kept as it is."""
        self.buffers[name] = x
        self.lent.discard(name)

    def writable(self, name: str) -> Tensor:
        """The tokens' buffer of this name, to be written over."""
        if name in self.lent:
            self.set(name, _copy(self[name]))
        return self[name]

    def select(self, rows: Tensor) -> None:
        for name in self.buffers:
            self.set(name, self.buffers[name].index_select(0, rows))

    def keep_row(self, n: int) -> None:
        """Keep row n of the batch by reference, and let go of what says where its padding is."""
        rows = slice(n, n + 1)
        self.buffers = {name: x[rows] for name, x in self.buffers.items() if name != "valid"}
        self.lent = set(self.buffers)

    def fork(self) -> Tail:
        """The same tokens for another cache: who writes a buffer first makes its own."""
        other = Tail()
        other.buffers, other.length = dict(self.buffers), self.length
        self.lent, other.lent = set(self.buffers), set(self.buffers)
        return other

    def move(self, device: torch.device) -> None:
        self.buffers = {name: x.to(device) for name, x in self.buffers.items()}

    def _complete(self, new: Buffers, count: int) -> None:
        if "valid" in new and "valid" not in self.buffers and self.length:
            self.set("valid", _ones(new["valid"], self.length))
        elif "valid" in self.buffers and "valid" not in new:
            new["valid"] = _ones(self.buffers["valid"], count)


@contextmanager
def lasting() -> Iterator[None]:
    """Without gradients; and what is made here in inference mode can be written outside of it."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def write(buffers: Buffers, name: str, start: int, new: Tensor) -> None:
    """Write new `[B, n, …]` at `start` of a buffer, which is made or grown by half as needed."""
    old, stop = buffers.get(name), start + new.shape[1]
    if old is None or old.shape[1] < stop:
        least = 0 if old is None else old.shape[1] * 3 // 2
        grown = new.new_empty(new.shape[0], max(stop, least), *new.shape[2:])
        if old is not None:
            grown[:, :start] = old[:, :start]
        buffers[name] = grown
    buffers[name][:, start:stop] = new


def last_records(values: Tensor, count: int, before: Tensor | None, valid: Tensor | None) -> Tensor:
    """The last `count` real ones of values `[B, T, …]` after `before` `[B, count, …]`, or zeros."""
    T = values.shape[1]
    if valid is None and count <= T:
        return values[:, T - count :].clone()
    if valid is None and before is not None:
        return torch.cat([before.to(values.dtype), values], 1)[:, T:]
    end = torch.full((1,), T, device=values.device)
    return records_at(values, count, before, valid, end)[:, 0]


def records_at(
    values: Tensor, count: int, before: Tensor | None, valid: Tensor | None, ends: Tensor
) -> Tensor:
    """As `last_records` of the first `ends` `[n]` values of each row, `[B, n, count, …]`."""
    if before is None:
        before = values.new_zeros(len(values), count, *values.shape[2:])
    every = torch.cat([before.to(values.dtype), values], 1)
    reach = torch.arange(count, device=values.device)
    if valid is None:
        return every[:, ends[:, None] + reach]
    real = torch.cat([_ones(valid, count), valid], 1).to(torch.int32)
    at = real.argsort(dim=1, descending=True, stable=True)  # real ones, in their order
    last = (real.cumsum(1)[:, ends + count - 1] - count)[..., None] + reach  # [B, n, count]
    rows = torch.arange(len(every), device=every.device)
    return every[rows[:, None, None], at.gather(1, last.flatten(1)).view_as(last)]


def sums_behind(log_forget: Tensor) -> tuple[Tensor, Tensor]:
    """Σ log_forget from after each token to the end, `[.., n, HQ]`, and of all, `[.., HQ]`.

    Sums of terms of one sign: no difference of running sums, which cancels.
    """
    sums = log_forget.flip(-2).cumsum(-2)
    behind = torch.cat([torch.zeros_like(sums[..., :1, :]), sums[..., :-1, :]], -2)
    return behind.flip(-2), sums[..., -1, :]


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _ones(like: Tensor, count: int) -> Tensor:
    return torch.ones(len(like), count, dtype=torch.bool, device=like.device)
