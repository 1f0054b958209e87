"""What one attention layer keeps between chunks of a sequence: the state of decoding.

docs/algorithm.md §5. A chunk attends itself through the operator and the past through this cache,
of which the sealed part never changes, so it can be shared, forked, stored and taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from path_attention.nn.cache_state import (
    INPUTS,
    set_forget,
    set_matrices,
    set_products,
    write_tokens,
)
from path_attention.nn.cache_storage import Buffers, lasting, sums_behind
from path_attention.nn.cache_units import SealedUnits
from path_attention.nn.encoding import Chunk
from path_attention.ops.decode import (
    STEP,
    DecodeState,
    KeyGroup,
    Past,
    decode_attention,
    decode_stick_breaking,
)
from path_attention.ops.linear import linear_attention
from path_attention.ops.path import path_attention
from path_attention.ops.transport import chunk_transport

_MASK_AT_ONCE = 2**24  # elements of a mask that SDPA is given
_LAID_AT_ONCE = 8192  # tokens, which are joined first
_Self = TypeVar("_Self", bound="LayerCache")


class LayerCache(SealedUnits):
    """The past of one layer, and how a chunk attends it, whatever the encoding.

    Under transport or decay (`extend`) a query reaches a sealed unit through the tail, one matrix
    of its group and one inside it. Where nothing moves (`extend_plain`, `extend_stick_breaking`)
    keys and values stay as they came. The linear normalizer (`extend_linear`) keeps one matrix a
    head. The cache holds no gradients, and backward through it raises.
    """

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
        """Softmax attention of a chunk to the past and itself, which is then appended.

        Arguments as in `path_attention`, and what the encoding knows of the chunk.

        Returns:
            `[B, T, HQ, DV]` in q's dtype.
        """
        if w is None and log_forget is None:
            return self.extend_plain(q, k, v, scale=scale, chunk=chunk)
        if q.shape[1] == 1 and not torch.is_grad_enabled():  # a token alone takes its own value
            groups = q.shape[2] // k.shape[2]
            out, own = (x.repeat_interleave(groups, 2).to(q.dtype) for x in (v, k))
            dtype = torch.promote_types(q.dtype, torch.float32)
            lse = scale * (q.to(dtype) * own.to(dtype)).sum(-1)
        else:
            out, lse = path_attention(q, k, v, w, beta, log_forget, scale=scale, return_lse=True)
        return self.extend(out, lse, q, k, v, w, beta, log_forget, scale=scale, chunk=chunk)

    def extend(
        self,
        out: Tensor,
        lse: Tensor,
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
        """Let a chunk attend the past too, by softmax, then append it.

        Args:
            out: the chunk's attention to itself, `[B, T, HQ, DV]`; lse: its log-sum-exp
                `[B, T, HQ]`; both as `path_attention` returns them.
            q, k, v, w, beta, log_forget, scale: what `path_attention` was given.
            chunk: of its padding and its records.

        Returns:
            `[B, T, HQ, DV]` in out's dtype: the attention to past and chunk together.
        """
        result, moved = None, None
        with lasting(), torch.autocast(q.device.type, enabled=False):
            self._begin("moved", k)
            raw = named_inputs(k, v, w, beta, log_forget, chunk.valid)
            gates = raw.get("log_forget")
            if self.seen:
                past = self._past()
                if past.tail is not None and q.shape[1] > STEP:
                    # Products of float32 keys would take a long chunk several times the time.
                    past = past._replace(tail=past.tail._replace(keys=past.tail.keys.to(k.dtype)))
                if "w" in raw:
                    q, *moved = chunk_transport(q, k, raw["w"], raw["beta"])
                elapsed = None if gates is None else gates.cumsum(1)
                own = out, lse
                result = decode_attention(q, past, scale=scale, elapsed=elapsed, own=own)[0]
            self._advance(chunk, raw, k, moved)
        return out if result is None else constant(out, result)

    def extend_plain(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, chunk: Chunk
    ) -> Tensor:
        """Append a chunk that nothing moves and attend all that was seen; as in `extend`.

        One call of SDPA over all keys while they lie in one buffer, which a fork ends, unless it
        would want a large mask.
        """
        with lasting(), torch.autocast(q.device.type, enabled=False):
            self._begin("plain", k)
            if self.seen and self._takes_one_call(q, chunk.valid):
                self._advance(chunk, {"k": k, "v": v}, k)
                out = self._attend_all(q, scale)
            elif self.seen:
                own = path_attention(q, k, v, scale=scale, return_lse=True)
                out = decode_attention(q, self._past(), scale=scale, own=own)[0]
                self._advance(chunk, {"k": k, "v": v}, k)
            else:
                self._advance(chunk, {"k": k, "v": v}, k)
                out = None
        return path_attention(q, k, v, scale=scale) if out is None else constant(q, out)

    def extend_stick_breaking(
        self,
        out: Tensor,
        log_remaining: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        chunk: Chunk,
    ) -> Tensor:
        """Let a chunk break what it leaves of the stick on the past, then append it.

        Args:
            out, log_remaining: as `stick_breaking_attention` returns them for the chunk.
            Others: as in `extend`.

        Returns:
            `[B, T, HQ, DV]` in out's dtype.
        """
        past = None
        with lasting(), torch.autocast(q.device.type, enabled=False):
            self._begin("plain", k)
            if self.seen:
                groups = self._past().groups
                added = decode_stick_breaking(q, groups, log_remaining, scale=scale)
                past = (out.to(added.dtype) + added).to(out.dtype)
            self._advance(chunk, {"k": k, "v": v}, k)
        return out if past is None else constant(out, past)

    def extend_linear(
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
        """`linear_attention` of a chunk from the state of what was seen, which it moves on."""
        self._begin("linear", k)
        raw = named_inputs(k, v, w, beta, log_forget, chunk.valid, hide_keys=True)
        start, before = self._states or (None, None)
        units = self._complete_units(q.shape[1], chunk)
        # The state at the next border comes by the way if that lies inside the chunk.
        border = units * self.unit - self.tail.length
        if units and border <= 0:
            with lasting():
                start = self._state_after(units * self.unit)
        outs, after = [], before
        for part in (slice(0, max(0, border)), slice(max(0, border), None)):
            x = {name: y[:, part] for name, y in {"q": q, **raw}.items()}
            if x["q"].shape[1]:
                out, after = linear_attention(**x, scale=scale, state=after)  # pyright: ignore[reportArgumentType]
                outs.append(out)
            if part.stop:
                start = after
        with lasting():
            if after is None:
                raise ValueError("q: expected at least one token, got none")
            self._states = (None if start is None else _as_constant(start), _as_constant(after))
            first = not self.seen
            self._advance(chunk, {name: x.detach() for name, x in raw.items()}, k)
        out = torch.cat(outs, 1)
        return out if first else constant(out, out.detach())

    def _takes_one_call(self, q: Tensor, valid: Tensor | None) -> bool:
        """Whether a chunk joins one buffer, and SDPA needs no mask for it all, or a small one."""
        if len(self.groups) != 1 or not self.groups[0].has_room(q.shape[1]):
            return False
        padded = valid is not None or self.groups[0].read("valid") is not None
        if q.shape[1] == 1 or (q.device.type == "cuda" and q.itemsize == 2 and not padded):
            return True
        rows = q.shape[0] if padded else 1
        return rows * q.shape[1] * (self.seen + q.shape[1]) <= _MASK_AT_ONCE

    def _attend_all(self, q: Tensor, scale: float) -> Tensor:
        """Attend a single group, the chunk being its last tokens."""
        keys, values, valid = (self.groups[0].read(n) for n in ("keys", "values", "valid"))
        T, S = q.shape[1], self.seen
        mask: Tensor | None = None
        if valid is not None:
            slot = torch.arange(S, device=q.device)
            own = torch.arange(S - T, S, device=q.device)[:, None]
            # A query in padding sees itself at least: weights of nothing would be NaN.
            mask = ((slot <= own) & valid[:, None] | (slot == own))[:, None]
        elif T > 1:
            mask = causal_lower_right(T, S)
        k, v = (x.to(q.dtype).transpose(1, 2) for x in (keys, values) if x is not None)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=mask, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2)

    def _past(self) -> Past:
        """What the next chunk's queries attend."""
        self._freshen()
        groups = []
        for n, group in enumerate(self.groups):
            last = n == len(self.groups) - 1
            keys, values = group.read("keys"), group.read("values")
            if keys is None or values is None:
                continue
            groups.append(
                KeyGroup(
                    keys,
                    values,
                    rows=group.rows,
                    suffix=group.suffix,
                    after=None if self._after is None or last else self._after[:, n],
                    decay=group.read("decay"),
                    unit_decay=group.fade,
                    after_decay=None if self._fade is None or last else self._fade[:, n],
                    valid=group.read("valid"),
                )
            )
        tail = self.tail
        if self.kind == "plain" or not tail.length:
            return Past(tuple(groups))
        gates, decay, total = tail.get("log_forget"), None, None
        if gates is not None:
            decay, total = sums_behind(gates)
        keys = tail["moved"] if "w" in tail.buffers else tail["k"]
        now = KeyGroup(keys, tail["v"], decay=decay, valid=tail.get("valid"))
        return Past(tuple(groups), now, self._transition, total)

    # --- Rows -----------------------------------------------------------------------------------

    @property
    def has_padding(self) -> bool:
        """Whether any column may be padding."""
        stored = (group.storage.tokens for group in self.groups)
        return any("valid" in tokens for tokens in (*stored, self.tail.buffers))

    @lasting()
    def row(self: _Self, n: int, length: int) -> _Self:
        """A cache of row n alone, of its first `length` columns, none of which is padding.

        As if the row had come alone. What all rows share stays shared, the rest is the row's own.
        Raises ValueError as `crop`.
        """
        other = self.fork()
        other.check_crop(length)
        other.groups = [group.row(n) for group in other.groups]
        other.tail.keep_row(n)
        other._map(lambda x: x[n : n + 1])
        other._take_back(length)
        return other


def lay(caches: Sequence[LayerCache], state: DecodeState) -> None:
    """Lay what caches have seen into an empty state, the rows of one behind those of another.

    The caches grew alike: as many columns each, in groups of the same sizes.
    """
    first, at = caches[0], 0
    for n, group in enumerate(first.groups):
        groups = [cache.groups[n] for cache in caches]
        tokens = {"keys": state.keys, "values": state.values, "decay": state.fade}
        for start in range(0, group.count, _LAID_AT_ONCE):
            some = slice(start, min(group.count, start + _LAID_AT_ONCE))
            place = slice(at + some.start, at + some.stop)
            for name, to in tokens.items():
                x = _joined([g.read_rows(name, some) for g in groups])
                if x is not None and to is not None:
                    to[:, :, place] = x.transpose(1, 2)
            valid = _joined([g.read_rows("valid", some) for g in groups])
            if valid is not None and state.valid is not None:
                state.valid[:, place] = valid
        stop = at + group.count
        if first.kind == "moved":
            _lay_tables(caches, state, n, slice(at // first.unit, stop // first.unit))
        at = stop
    if first.kind == "moved" and first.tail.length:
        names = [name for name in first.tail.names() if name in INPUTS]
        tails = {name: _joined([cache.tail[name] for cache in caches]) for name in names}
        write_tokens(state, {name: x for name, x in tails.items() if x is not None}, at)
    state.seen.fill_(first.seen)


def _lay_tables(caches: Sequence[LayerCache], state: DecodeState, n: int, units: slice) -> None:
    groups, last = [cache.groups[n] for cache in caches], n == len(caches[0].groups) - 1
    suffix, fade = (
        _joined([None if x is None else g.of_batch(x) for g, x in tables])
        for tables in ([(g, g.suffix) for g in groups], [(g, g.fade) for g in groups])
    )
    after, after_fade = (
        _joined([None if last or x is None else x[:, n] for x in tables])
        for tables in ([cache._after for cache in caches], [cache._fade for cache in caches])
    )
    if suffix is not None:
        set_matrices(state, units, suffix if after is None else suffix @ after[:, None])
        if state.croppable:
            transitions = _joined([g.read_units("transition", caches[0].unit) for g in groups])
            assert transitions is not None
            set_products(state, units, transitions)
    if fade is not None and state.unit_fade is not None:
        state.unit_fade[:, units] = fade if after_fade is None else fade + after_fade[:, None]
        if state.croppable:
            forget = _joined([g.read_units("forget", caches[0].unit) for g in groups])
            assert forget is not None
            set_forget(state, units, forget)


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """One behind the other; None where there is none."""
    known = [x for x in parts if x is not None]
    return None if not known else known[0] if len(known) == 1 else torch.cat(known)


def _as_constant(x: Tensor) -> Tensor:
    """x without its history; outside of inference mode one made inside can be no input."""
    return x.clone() if x.is_inference() else x.detach()


def constant(source: Tensor, value: Tensor) -> Tensor:
    """`value`, with a history from `source` through which backward raises."""
    return _Constant.apply(source, value)  # pyright: ignore[reportReturnType]


class _Constant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, value: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError("gradients don't flow through a cache: run the whole sequence without")


def named_inputs(
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_forget: Tensor | None,
    valid: Tensor | None,
    hide_keys: bool = False,
) -> Buffers:
    """A chunk's inputs by name; padding moves and fades nothing."""
    if log_forget is not None:
        log_forget = log_forget.to(torch.promote_types(log_forget.dtype, torch.float32))
    given = {"k": k, "v": v, "w": w, "beta": beta, "log_forget": log_forget}
    named = {name: x for name, x in given.items() if x is not None}
    for name in ("beta", "log_forget", *(["k"] if hide_keys else [])):
        if valid is not None and name in named:
            named[name] = hide(named[name], valid)
    return named


def hide(x: Tensor, valid: Tensor) -> Tensor:
    """x `[B, T, …]` with zeros where valid `[B, T]` is False."""
    return x.where(valid.view(*valid.shape, *[1] * (x.dim() - 2)), 0)
