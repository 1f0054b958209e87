"""Attention of a few queries to a cache of moved keys: kernels on a GPU, or plain PyTorch.

docs/algorithm.md §5. Keys stand at the end of their own unit and never change. A query meets them
there: it moves back through the tail, through the groups behind the one it reads, and through the
units behind the one it reads, by three small matrices whatever the length of the past. A static
cache has one matrix for the last two, and its step is `decode_step`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from path_attention.ops.arguments import has_kernels

_SCORES_AT_ONCE = 2**22  # elements of the score tile that is held


class KeyGroup(NamedTuple):
    """Keys of consecutive units, stored for R rows; what none of its encoding needs is None.

    A key j of unit u is at the end of u. From there to the end of the group it is `suffix` and
    `unit_decay` that lie between, from the group's end to where the queries stand `after` and
    `after_decay`. U units of N / U tokens; one unit of any length without suffix and unit_decay.
    """

    keys: Tensor  # [R, N, H, D]
    values: Tensor  # [R, N, H, DV]
    rows: Tensor | None = None  # int64 [B], the stored row that each row of the batch reads
    suffix: Tensor | None = None  # [R, U, H, D, D]
    after: Tensor | None = None  # [B, H, D, D]
    decay: Tensor | None = None  # [R, N, HQ], Σ log_forget from after the key to its unit's end
    unit_decay: Tensor | None = None  # [R, U, HQ]
    after_decay: Tensor | None = None  # [B, HQ]
    valid: Tensor | None = None  # bool [R, N], False where no query may look


class Past(NamedTuple):
    """What a chunk's queries attend, oldest first; they stand at the chunk's start."""

    groups: tuple[KeyGroup, ...]  # as seen from the tail's start
    tail: KeyGroup | None = None  # keys at the chunk's start already
    transition: Tensor | None = None  # [B, H, D, D], from the tail's start to its end
    decay: Tensor | None = None  # [B, HQ], Σ log_forget of the tail


class DecodeState(NamedTuple):
    """A layer's past in tensors of one size for good: what `decode_step` reads and changes.

    N tokens of room in U units, a tail of the last incomplete unit in a ring of places, and, if
    tokens can be taken back (`croppable`), each unit's product and the last tokens as they came in
    another ring, from which a tail can be made anew; what none of its encoding needs is None. Where
    nothing moves or fades there is no tail.

    Bytes of a row, with keys and values of D in 16 bits, units of S tokens and n factors a token:

    - a token and key head: 4·D of keys and values; transport 4·D²/S more, D/2 at S = 8·D, and as
      much again where croppable;
    - a token and query head: gates 4 + 4/S, and 4/S more where croppable;
    - once a key head: transport (S + 64)·4·DP of ring and 8·DP² of tail; one product, 4·D², or
      where croppable instead (S + 64)·(2·D + 4·n·(D + 1)) of tokens as they came;
    - once a query head: gates (S + 64)·4 + 8; then 4, or where croppable (S + 64)·4 more;
    - once: 8 of counts, 12 with a tail; and 1 a token where some are padding.
    """

    unit: int  # tokens of a unit
    keys: Tensor  # [B, H, N, D]; of complete units at their ends
    values: Tensor  # [B, H, N, DV]
    seen: Tensor  # int32 [B], tokens so far
    next: Tensor  # int32 [B], those after a step, for its last kernel
    valid: Tensor | None = None  # uint8 [B, N], 0 where no query may look
    ring: Tensor | None = None  # float32 [B, H, ring, DP], the tail's keys where the queries stand
    ring_fade: Tensor | None = None  # float32 [B, HQ, ring], Σ log_forget from after each to there
    tail: Tensor | None = None  # float32 [B, 2, H, DP, DP], transition of the tail at `turn`
    turn: Tensor | None = None  # int32 [B], 0 or 1 by turns
    tail_fade: Tensor | None = None  # float32 [B, 2, HQ], Σ log_forget of the tail at `turn`
    # Of each complete unit; U is 1 where not croppable: of the one that a step is completing.
    products: Tensor | None = None  # [B, U, H, 2, D, D], as high + low
    forget: Tensor | None = None  # float32 [B, U, HQ], Σ log_forget
    high: Tensor | None = None  # [B, U, H, D, D], product of those behind each, as high + low
    low: Tensor | None = None  # in float16; float32 and no low, here and above, for float32 keys
    fade: Tensor | None = None  # float32 [B, HQ, N], Σ log_forget from each key to its unit's end
    unit_fade: Tensor | None = None  # float32 [B, U, HQ], from a unit's end to the tail
    raw_k: Tensor | None = None  # [B, H, ring, D], the last tokens' k, w, beta and log_forget
    raw_w: Tensor | None = None  # float32 [B, H, ring, n, D]
    raw_beta: Tensor | None = None  # float32 [B, H, ring, n]
    raw_gate: Tensor | None = None  # float32 [B, HQ, ring]
    croppable: bool = True  # whether what taking tokens back needs is kept

    @property
    def has_tail(self) -> bool:
        """Whether anything moves or fades."""
        return self.products is not None or self.forget is not None

    @property
    def ring_size(self) -> int:
        """Places of the tail: a unit's, and those of a chunk that completes it."""
        return self.unit + 64

    @property
    def units(self) -> int:
        return self.keys.shape[2] // self.unit

    @property
    def units_kept(self) -> int:
        """Places of `products` and `forget`, which units take by turns."""
        return self.units if self.croppable else 1

    @classmethod
    def make(
        cls,
        k: Tensor,
        v: Tensor,
        heads: int,
        room: int,
        unit: int,
        *,
        moves: bool,
        fades: bool,
        factors: int = 1,
        croppable: bool = True,
    ) -> DecodeState:
        """An empty one for keys and values like k `[B, T, H, D]`, v, and at least `room` tokens."""
        (B, _, H, D), DV = k.shape, v.shape[3]
        U, ring, DP = -(-room // unit), unit + 64, max(64, 1 << (D - 1).bit_length())
        wide = k.new_zeros(0, dtype=torch.float32)
        count = wide.new_zeros(B, dtype=torch.int32)
        kept = U if croppable else 1
        named: dict[str, Tensor] = {}
        if moves or fades:
            named["turn"] = count.clone()
        if moves:
            exact = k.dtype == torch.float32
            half = wide if exact else wide.half()
            named |= {
                "ring": wide.new_zeros(B, H, ring, DP),
                "tail": wide.new_zeros(B, 2, H, DP, DP),
                "products": half.new_zeros(B, kept, H, 1 if exact else 2, D, D),
                "high": half.new_zeros(B, U, H, D, D),
            }
            if not exact:
                named["low"] = torch.zeros_like(named["high"])
        if moves and croppable:
            named |= {
                "raw_k": k.new_zeros(B, H, ring, D),
                "raw_w": wide.new_zeros(B, H, ring, factors, D),
                "raw_beta": wide.new_zeros(B, H, ring, factors),
            }
        if fades:
            named |= {
                "ring_fade": wide.new_zeros(B, heads, ring),
                "tail_fade": wide.new_zeros(B, 2, heads),
                "forget": wide.new_zeros(B, kept, heads),
                "fade": wide.new_zeros(B, heads, U * unit),
                "unit_fade": wide.new_zeros(B, U, heads),
            }
            if croppable:
                named["raw_gate"] = wide.new_zeros(B, heads, ring)
        keys, values = k.new_zeros(B, H, U * unit, D), v.new_zeros(B, H, U * unit, DV)
        return cls(unit, keys, values, count, count.clone(), **named, croppable=croppable)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by its name."""
        named = self._asdict().items()
        return {name: x for name, x in named if isinstance(x, Tensor)}


STEP = 16  # tokens that `decode_step` takes at most


def decode_step(
    state: DecodeState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    beta: Tensor | None,
    log_forget: Tensor | None,
    *,
    valid: Tensor | None = None,
    scale: float,
) -> Tensor:
    """Append a chunk of up to `STEP` tokens to a state, in place, and attend past and chunk.

    Arguments as in `path_attention`; valid: bool `[B, T]`, False for padding, which must not move
    or fade anything (β = 0, log_forget = 0) and is hidden from every query. Nothing waits for the
    device, so that a CUDA graph can capture it. The caller minds the room. NVIDIA GPUs only.

    Returns:
        `[B, T, HQ, DV]` in q's dtype.
    """
    from path_attention.ops.triton.step import triton_decode_step

    return triton_decode_step(state, q, k, v, w, beta, log_forget, valid, scale)


def record_step(
    state: DecodeState,
    values: Tensor,
    before: Tensor,
    history: Tensor | None,
    borders: Tensor | None,
    *,
    valid: Tensor | None = None,
) -> None:
    """Take what the tokens of the last `decode_step` recorded for an encoding, in place.

    Args:
        values: `[B, T, …]`; valid: bool `[B, T]`, False for padding, whose values are skipped.
        before: `[B, count, …]`, those of the last real tokens, oldest first.
        history: `[B, ring, …]`, those of the last tokens, in the places of the state's rings.
        borders: `[B, U, count, …]`, `before` as it was at the end of each unit. None, as history
            is, where nothing is taken back.
    """
    from path_attention.ops.triton.step import triton_record_step

    triton_record_step(state, values, before, history, borders, valid)


def triton_lacks(q: Tensor, v: Tensor) -> str | None:
    """What the kernels would need for queries and values like these; None if they can run."""
    if q.dtype == torch.float64:
        return f"bfloat16, float16 or float32, got {q.dtype}"
    from path_attention.ops.triton.device import device_lacks, largest_head_size

    lacks = device_lacks(q.device.type, q.device.index)
    if lacks is None:
        largest = largest_head_size(q.device.type, q.device.index, q.dtype)
        if max(q.shape[3], v.shape[3]) > largest:
            return f"head sizes of at most {largest}, got D = {q.shape[3]} and DV = {v.shape[3]}"
    return lacks


def decode_attention(
    q: Tensor,
    past: Past,
    *,
    scale: float,
    elapsed: Tensor | None = None,
    own: tuple[Tensor, Tensor] | None = None,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of a chunk's queries to a past, and to the chunk itself if that is given.

        score(i, j) = scale · (suffix_u after_g P_tail q_i) · k̂_j
                    + elapsed_i + decay_tail + after_decay_g + unit_decay_u + decay_j

    In pieces of the past merged by log-sum-exp: no row of scores is ever held whole.

    Args:
        q: `[B, T, HQ, D]`, moved to the chunk's start; any T.
        past: keys of any dtype; HQ is a multiple of their H.
        scale: of the products, not of the gates.
        elapsed: Σ log_forget from the chunk's start to each query, `[B, T, HQ]`, or None.
        own: the chunk's attention to itself, `[B, T, HQ, DV]`, and its log-sum-exp `[B, T, HQ]`, as
            `path_attention` returns them: what comes out is of both.
        implementation: "torch" (any device) or "triton" (NVIDIA GPUs, not float64); None is
            "triton" on a GPU where it can run, else "torch".

    Returns:
        out `[B, T, HQ, DV]` in own's dtype, or else as its log-sum-exp `[B, T, HQ]`: in float32
        (float64 for a float64 q). Where a row has no key at all, zero and −∞.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    sources = [*past.groups, *([] if past.tail is None else [past.tail])]
    B, T, HQ = q.shape[:3]
    if not sources:
        raise ValueError("past: expected keys to attend, got none")
    if _choose(implementation, q, sources[0].values) == "triton":
        from path_attention.ops.triton.decode import triton_decode

        return triton_decode(q, past, scale, elapsed, own)
    out = q.new_zeros(B, T, HQ, sources[0].values.shape[3], dtype=dtype)
    lse = q.new_full((B, T, HQ), -torch.inf, dtype=dtype)
    q = q.to(dtype) * scale
    elapsed = None if elapsed is None else elapsed.to(dtype)
    if past.tail is not None:
        out, lse = _attend_group(out, lse, q, past.tail, elapsed)
    if past.transition is not None and past.groups:
        q = move_back(q, past.transition)
    if past.decay is not None and elapsed is not None:
        elapsed = elapsed + past.decay[:, None]
    for group in past.groups:
        out, lse = _attend_group(out, lse, q, group, elapsed)
    if own is None:
        return out, lse
    out, lse = merge(own[0].to(dtype), own[1].to(dtype), out, lse)
    return out.to(own[0].dtype), lse


def _choose(implementation: str | None, q: Tensor, v: Tensor) -> str:
    if implementation is None:
        usable = has_kernels("decode_attention", q, lambda: triton_lacks(q, v))
        return "triton" if usable else "torch"
    if implementation not in ("torch", "triton"):
        raise ValueError(
            f"implementation: expected 'torch', 'triton' or None, got {implementation!r}"
        )
    lacks = triton_lacks(q, v) if implementation == "triton" else None
    if lacks is not None:
        raise ValueError(f"implementation: expected {lacks} with 'triton'")
    return implementation


def decode_stick_breaking(
    q: Tensor, groups: tuple[KeyGroup, ...], log_remaining: Tensor, *, scale: float
) -> Tensor:
    """What a past takes of the stick that a chunk's own keys left, nearest key first.

        o_i = Σ_j σ(z_ij) · exp(log_remaining_i + Σ_{j<l} log(1 − σ(z_il))) · v_j

    Args:
        q: `[B, T, HQ, D]`.
        groups: keys and values, oldest first, without transitions and decays.
        log_remaining: `[B, T, HQ]`, as `stick_breaking_attention` returns it for the chunk.
        scale: of the products.

    Returns:
        `[B, T, HQ, DV]` in float32 (float64 for a float64 q), to be added to the chunk's output.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    H = groups[0].keys.shape[2]
    rest = by_key_head(log_remaining.to(dtype)[..., None], H)  # [B, H, T·G, 1]
    x = by_key_head(q.to(dtype) * scale, H)
    out = x.new_zeros(*x.shape[:3], groups[0].values.shape[3])
    for group in reversed(groups):
        for units, tokens in reversed(list(_pieces(group, x))):
            k, v, valid = _read(group, units, tokens, dtype)
            scores = (x[:, :, None] @ k.mT)[:, :, 0]  # [B, H, T·G, n]
            if valid is not None:
                scores = scores.masked_fill(~valid[:, :, 0], -torch.inf)
            kept = F.logsigmoid(-scores)
            later = kept.flip(-1).cumsum(-1)  # sums over the last 1 … n keys
            total = later[..., -1:]
            later = F.pad(later[..., :-1], (1, 0)).flip(-1)
            out = out + (F.logsigmoid(scores) + later + rest).exp() @ v[:, :, 0]
            rest = rest + total
    return _by_query_head(out, q.shape[1])


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two parts of one softmax `[…, DV]`, `[…]`, each with its log-sum-exp, as a whole."""
    total = torch.logaddexp(lse, part_lse)
    finite = total.clamp(min=torch.finfo(total.dtype).min)  # −∞ − −∞ has no value
    out = out * (lse - finite).exp()[..., None] + part * (part_lse - finite).exp()[..., None]
    return out, total


def move_back(q: Tensor, transition: Tensor) -> Tensor:
    """P q of queries `[B, T, HQ, D]`, with the transition `[B, H, D, D]` of their key head."""
    H = transition.shape[1]
    return _by_query_head(by_key_head(q, H) @ transition.to(q.dtype).mT, q.shape[1])


def _attend_group(
    out: Tensor, lse: Tensor, q: Tensor, group: KeyGroup, elapsed: Tensor | None
) -> tuple[Tensor, Tensor]:
    H, T = group.keys.shape[2], q.shape[1]
    if group.after is not None:
        q = move_back(q, group.after)
    if elapsed is not None and group.after_decay is not None:
        elapsed = elapsed + group.after_decay[:, None]
    x = by_key_head(q, H)
    started = None if elapsed is None else by_key_head(elapsed[..., None], H)[:, :, None]
    for units, tokens in _pieces(group, x):
        k, v, valid = _read(group, units, tokens, q.dtype)  # [B, H, U, n, ·]
        moved = x[:, :, None]
        if group.suffix is not None:
            suffix = _rows(group.suffix[:, units], group.rows).to(q.dtype)
            moved = moved @ suffix.transpose(1, 2).mT
        scores = moved @ k.mT  # [B, H, U, T·G, n]
        if started is not None:
            scores += started
        if group.decay is not None:
            scores = _add_decay(scores, group, units, tokens, T)
        if valid is not None:
            scores = scores.masked_fill(~valid, -torch.inf)
        lses = scores.logsumexp(-1)  # [B, H, U, T·G]
        total = lses.logsumexp(2)
        finite = total.clamp(min=torch.finfo(total.dtype).min)
        part = ((scores - finite[:, :, None, :, None]).exp_() @ v).sum(2)
        part_lse = _by_query_head(total[..., None], T)[..., 0]
        out, lse = merge(out, lse, _by_query_head(part, T), part_lse)
    return out, lse


def _add_decay(scores: Tensor, group: KeyGroup, units: slice, tokens: slice, T: int) -> Tensor:
    """Scores `[B, H, U, T·G, n]` with the gates from after each key to the group's end."""
    if group.decay is None:
        return scores
    H = scores.shape[1]
    decay = _split(group.decay, group)[:, units, tokens]  # [R, U, n, HQ]
    if group.unit_decay is not None:
        decay = decay + group.unit_decay[:, units, None]
    decay = _rows(decay, group.rows).to(scores.dtype).unflatten(3, (H, -1))
    decay = decay.permute(0, 3, 1, 4, 2)  # [B, H, U, G, n]
    return (scores.unflatten(3, (T, -1)) + decay[:, :, :, None]).flatten(3, 4)


def _pieces(group: KeyGroup, x: Tensor) -> Iterator[tuple[slice, slice]]:
    """Units, and tokens of each, whose scores with x `[B, H, T·G, D]` are held at once."""
    units = _units(group)
    size = group.keys.shape[1] // units
    each = x.shape[0] * x.shape[1] * x.shape[2]
    step = max(1, min(size, max(64, _SCORES_AT_ONCE // max(1, each))))
    together = max(1, _SCORES_AT_ONCE // max(1, each * size))
    for unit in range(0, units, together):
        for token in range(0, size, step):
            yield slice(unit, unit + together), slice(token, min(size, token + step))


def _read(
    group: KeyGroup, units: slice, tokens: slice, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values `[B, H, U, n, ·]` of a piece and valid `[B, 1, U, 1, n]`, row by row."""
    k, v = (
        _rows(_split(z, group)[:, units, tokens], group.rows).to(dtype).permute(0, 3, 1, 2, 4)
        for z in (group.keys, group.values)
    )
    if group.valid is None:
        return k, v, None
    valid = _rows(_split(group.valid, group)[:, units, tokens], group.rows)
    return k, v, valid[:, None, :, None]


def _units(group: KeyGroup) -> int:
    for table in (group.suffix, group.unit_decay):
        if table is not None:
            return table.shape[1]
    return 1


def _split(x: Tensor, group: KeyGroup) -> Tensor:
    """`[R, N, …]` → `[R, U, N / U, …]`."""
    return x.unflatten(1, (_units(group), -1))


def _rows(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def by_key_head(x: Tensor, H: int) -> Tensor:
    """`[B, T, H·G, E]` → `[B, H, T·G, E]`."""
    return x.unflatten(2, (H, -1)).transpose(1, 2).flatten(2, 3)


def _by_query_head(x: Tensor, T: int) -> Tensor:
    """The inverse of `by_key_head`."""
    return x.unflatten(2, (T, -1)).transpose(1, 2).flatten(2, 3)
