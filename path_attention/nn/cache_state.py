"""What a `DecodeState` takes in bulk and gives back: prompts, long chunks, its last tokens.

docs/algorithm.md §5. `decode_step` appends a few tokens by kernels; here many are laid into the
same tensors, units are dropped again, and the whole is read as a `Past`. All rows have seen as many
columns, and the host knows how many.
"""

from __future__ import annotations

import torch
from torch import Tensor

from path_attention.nn.cache_storage import Buffers, sums_behind
from path_attention.nn.cache_units import GROUP
from path_attention.ops.decode import DecodeState, KeyGroup, Past
from path_attention.ops.transport import chunk_transport, products_behind

INPUTS = ("k", "v", "w", "beta", "log_forget", "valid")  # of a token, as a tail names them


def tail_start(state: DecodeState, seen: int) -> int:
    """The first token of the tail; where nothing moves or fades there is none."""
    return seen // state.unit * state.unit if state.has_tail else seen


def write_tokens(state: DecodeState, tokens: Buffers, at: int) -> None:
    """Make tokens `[B, n, …]` the last ones, behind the `at` first.

    Complete units are sealed, the rest is the tail. What is in the tail already passes the tokens,
    as in a step: what it was made of is not read.
    """
    n = tokens["k"].shape[1]
    place = slice(at, at + n)
    state.values[:, :, place] = tokens["v"].transpose(1, 2)
    if state.valid is not None:
        state.valid[:, place] = tokens.get("valid", True)
    if state.products is None:
        state.keys[:, :, place] = tokens["k"].transpose(1, 2)
    if state.has_tail:
        head = min(n, -at % state.unit)  # of the tail's unit
        if head:
            _extend_tail(state, _part(tokens, 0, head), at)
        rest = head + (n - head) // state.unit * state.unit
        if rest > head:
            _seal(state, _part(tokens, head, rest), (at + head) // state.unit)
        if n > rest:
            set_tail(state, _part(tokens, rest, n), at + rest)
        if state.croppable:
            _keep_raw(state, tokens, at)
    state.seen.fill_(at + n)


def _part(tokens: Buffers, start: int, stop: int) -> Buffers:
    return {name: x[:, start:stop] for name, x in tokens.items()}


def set_tail(state: DecodeState, tokens: Buffers, at: int) -> None:
    """Fewer tokens than a unit, of which all else is written, become the tail from a border on."""
    k = tokens["k"]
    n, D = k.shape[1], k.shape[3]
    if state.turn is not None:
        state.turn.fill_(0)
    if not n:
        return
    slots = places(state, at, at + n)
    if "w" in tokens:
        assert state.ring is not None and state.tail is not None
        _, moved, product = chunk_transport(k[:, :, :0], k, tokens["w"], tokens["beta"])
        state.ring[:, :, slots, :D] = moved.transpose(1, 2).float()
        state.tail[:, 0, :, :D, :D] = product
    if "log_forget" in tokens:
        assert state.ring_fade is not None and state.tail_fade is not None
        behind, total = sums_behind(tokens["log_forget"])
        state.ring_fade[:, :, slots] = behind.transpose(1, 2).float()
        state.tail_fade[:, 0] = total


def _extend_tail(state: DecodeState, tokens: Buffers, at: int) -> None:
    """Tokens of the tail's unit behind the `at` first; if they complete it, it is sealed."""
    n, D, first = tokens["k"].shape[1], state.keys.shape[3], at // state.unit
    assert state.turn is not None
    rows = torch.arange(len(state.turn), device=state.turn.device)
    start, stop = first * state.unit, at + n
    old, new, unit = (places(state, *x) for x in ((start, at), (at, stop), (start, stop)))
    complete = stop == start + state.unit
    if "w" in tokens:
        assert state.ring is not None and state.tail is not None
        k = tokens["k"]
        _, moved, product = chunk_transport(k[:, :, :0], k, tokens["w"], tokens["beta"])
        state.ring[:, :, old, :D] = state.ring[:, :, old, :D] @ product
        state.ring[:, :, new, :D] = moved.transpose(1, 2).float()
        product = state.tail[rows, state.turn][..., :D, :D] @ product
        state.tail[:, 0, :, :D, :D] = product
        if complete:
            _lay_keys(state, state.ring[:, :, unit, :D], product[:, None], first)
    if "log_forget" in tokens:
        assert state.ring_fade is not None and state.tail_fade is not None
        behind, total = sums_behind(tokens["log_forget"])
        state.ring_fade[:, :, old] += total[..., None]
        state.ring_fade[:, :, new] = behind.transpose(1, 2).float()
        total = state.tail_fade[rows, state.turn] + total
        state.tail_fade[:, 0] = total
        if complete:
            _lay_fades(state, state.ring_fade[:, :, unit], total[:, None], first)
    state.turn.fill_(0)


def read_tokens(state: DecodeState, start: int, stop: int) -> Buffers:
    """Tokens as they came, of the last `ring_size` ones; keys that nothing moves, from anywhere.

    Of a croppable state.
    """
    at = places(state, start, stop)
    k = state.keys[:, :, start:stop] if state.raw_k is None else state.raw_k[:, :, at]
    tokens = {"k": k.transpose(1, 2), "v": state.values[:, :, start:stop].transpose(1, 2)}
    if state.raw_w is not None and state.raw_beta is not None:
        w, beta = (x[:, :, at].transpose(1, 2) for x in (state.raw_w, state.raw_beta))
        one = w.shape[3] == 1
        tokens |= {"w": w[:, :, :, 0], "beta": beta[..., 0]} if one else {"w": w, "beta": beta}
    if state.raw_gate is not None:
        tokens["log_forget"] = state.raw_gate[:, :, at].transpose(1, 2)
    if state.valid is not None:
        tokens["valid"] = state.valid[:, start:stop].bool()
    return tokens


def places(state: DecodeState, start: int, stop: int) -> Tensor:
    """Where the rings have tokens from `start` to `stop`."""
    return torch.arange(start, stop, device=state.seen.device) % state.ring_size


def rebuild_tables(state: DecodeState, units: int) -> None:
    """The tables of what lies behind each unit, for the first `units` alone."""
    product, fade = None, None
    for start in reversed(range(0, units, GROUP)):
        some = slice(start, min(units, start + GROUP))
        if state.products is not None:
            behind, total = products_behind(state.products[:, some].float().sum(3))
            if product is not None:
                behind, total = behind @ product[:, None], total @ product
            product = total
            set_matrices(state, some, behind)
        if state.forget is not None and state.unit_fade is not None:
            later, sums = sums_behind(state.forget[:, some])
            if fade is not None:
                later, sums = later + fade[:, None], sums + fade
            state.unit_fade[:, some], fade = later, sums


def set_matrices(state: DecodeState, units: slice, x: Tensor) -> None:
    """What lies behind units, `[B, n, H, D, D]`."""
    if state.high is not None:
        state.high[:, units] = x.to(state.high.dtype)
        if state.low is not None:
            state.low[:, units] = (x - state.high[:, units]).to(state.low.dtype)


def set_products(state: DecodeState, units: slice, x: Tensor) -> None:
    """Keep transitions of units, `[B, n, H, D, D]`, where tokens can be taken back."""
    if state.products is not None and state.croppable:
        high = state.products[:, units, :, 0]
        high.copy_(x)
        if state.products.shape[3] == 2:
            state.products[:, units, :, 1] = (x - high).to(high.dtype)


def set_forget(state: DecodeState, units: slice, x: Tensor) -> None:
    """Keep Σ log_forget of units, `[B, n, HQ]`, where tokens can be taken back."""
    if state.forget is not None and state.croppable:
        state.forget[:, units] = x


def past_of(state: DecodeState, seen: int) -> Past:
    """What a chunk's queries attend after `seen` tokens."""
    sealed = tail_start(state, seen)
    units = slice(0, sealed // state.unit)
    groups: tuple[KeyGroup, ...] = ()
    if sealed:
        groups = (
            KeyGroup(
                *_stored(state, 0, sealed),
                suffix=None if state.high is None else state.high[:, units],
                decay=None if state.fade is None else state.fade[:, :, :sealed].transpose(1, 2),
                unit_decay=None if state.unit_fade is None else state.unit_fade[:, units],
                valid=None if state.valid is None else state.valid[:, :sealed].bool(),
            ),
        )
    if seen == sealed or state.turn is None:
        return Past(groups)
    at, D = places(state, sealed, seen), state.keys.shape[3]
    keys, values = _stored(state, sealed, seen)
    rows = torch.arange(len(state.turn), device=state.turn.device)
    transition = total = decay = None
    if state.ring is not None and state.tail is not None:
        keys = state.ring[:, :, at, :D].transpose(1, 2)
        transition = state.tail[rows, state.turn][..., :D, :D]
    if state.ring_fade is not None and state.tail_fade is not None:
        decay = state.ring_fade[:, :, at].transpose(1, 2)
        total = state.tail_fade[rows, state.turn]
    valid = None if state.valid is None else state.valid[:, sealed:seen].bool()
    return Past(groups, KeyGroup(keys, values, decay=decay, valid=valid), transition, total)


def _stored(state: DecodeState, start: int, stop: int) -> tuple[Tensor, Tensor]:
    k, v = (x[:, :, start:stop].transpose(1, 2) for x in (state.keys, state.values))
    return k, v


def _seal(state: DecodeState, tokens: Buffers, first: int) -> None:
    """Units of tokens, of which the first is unit `first`, behind the others."""
    S, n = state.unit, tokens["k"].shape[1] // state.unit
    if "w" in tokens:
        blocks = (tokens[x].unflatten(1, (n, S)).flatten(0, 1) for x in ("k", "w", "beta"))
        k, w, beta = blocks
        _, moved, products = chunk_transport(k[:, :, :0], k, w, beta)
        keys = moved.unflatten(0, (-1, n)).flatten(1, 2).transpose(1, 2)
        _lay_keys(state, keys, products.unflatten(0, (-1, n)), first)
    if "log_forget" in tokens:
        behind, sums = sums_behind(tokens["log_forget"].unflatten(1, (n, S)))
        _lay_fades(state, behind.flatten(1, 2).transpose(1, 2), sums, first)


def _lay_keys(state: DecodeState, keys: Tensor, products: Tensor, first: int) -> None:
    """Keys `[B, H, n·S, D]` at their units' ends and transitions `[B, n, H, D, D]`, of the last n
    units, which the tables take in."""
    units = slice(first, first + products.shape[1])
    state.keys[:, :, first * state.unit : units.stop * state.unit] = keys
    set_products(state, units, products)
    behind, total = products_behind(products)
    for start in range(0, first, GROUP):
        some = slice(start, min(first, start + GROUP))
        set_matrices(state, some, _matrices(state, some) @ total[:, None])
    set_matrices(state, units, behind)


def _lay_fades(state: DecodeState, fade: Tensor, sums: Tensor, first: int) -> None:
    """Gates `[B, HQ, n·S]` to their units' ends and of units `[B, n, HQ]`, of the last n units."""
    assert state.fade is not None and state.unit_fade is not None
    units = slice(first, first + sums.shape[1])
    state.fade[:, :, first * state.unit : units.stop * state.unit] = fade
    set_forget(state, units, sums)
    later, total = sums_behind(sums)
    state.unit_fade[:, :first] += total[:, None]
    state.unit_fade[:, units] = later


def _matrices(state: DecodeState, units: slice) -> Tensor:
    assert state.high is not None
    high = state.high[:, units].float()
    return high if state.low is None else high + state.low[:, units]


def _keep_raw(state: DecodeState, tokens: Buffers, at: int) -> None:
    n = tokens["k"].shape[1]
    first = max(0, n - state.ring_size)
    slots = places(state, at + first, at + n)
    if state.raw_k is not None and state.raw_w is not None and state.raw_beta is not None:
        k, w, beta = (tokens[name][:, first:].transpose(1, 2) for name in ("k", "w", "beta"))
        state.raw_k[:, :, slots] = k
        state.raw_w[:, :, slots] = (w if w.dim() == 5 else w[:, :, :, None]).float()
        state.raw_beta[:, :, slots] = (beta if w.dim() == 5 else beta[..., None]).float()
    if state.raw_gate is not None:
        state.raw_gate[:, :, slots] = tokens["log_forget"][:, first:].transpose(1, 2).float()
