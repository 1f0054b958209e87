"""What one attention layer keeps between chunks of a sequence: the state of decoding.

A chunk attends itself through the operator and the past through this cache. Under Householder
factors every past key is kept moved to the last token seen ("now"), and appending a chunk moves
the past on by the chunk's transition.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from path_attention.ops.blockwise import chunk_transport


class LayerCache:
    """Past keys, values, gate sums, and what encoding and normalizer keep, of one layer.

    Softmax under transport or decay (`extend`):

        score(i, s) = scale · (H_1 ⋯ H_i q_i) · k̂_s  +  Σ log_forget from the chunk's start to i
                                                      +  Σ log_forget from after s to now

    with k̂_sᵀ = k_sᵀ H_{s+1} ⋯ H_now in float32; both gate sums are at most 0 and neither is a
    difference. Appending: k̂ ← k̂ P for the chunk's transition P. docs/algorithm.md §5. Without
    either (`extend_plain`) keys stay as they are and SDPA reads them; stick-breaking
    (`extend_stick_breaking`) gives the past what a chunk leaves of the stick; the linear normalizer
    keeps one matrix a head in `state`, and no keys.

    Keys are rewritten by products that may be singular, so tokens can't be taken back (no crop).
    Rows may differ in length: padding follows a row's real tokens in each chunk, and leaves a slot
    that no query sees. The cache holds no gradients, and backward through it raises.

    Attributes:
        seen: the number of columns seen, padding included.
        lengths: int64 `[B]`, the number of real tokens of each row; None while empty.
        keys: `[B, seen, H, D]`; k̂, float32, under a Householder transport.
        values: `[B, seen, H, DV]`.
        decay: Σ log_forget from after each slot to now, `[B, seen, HQ]`, or None without a decay.
        valid: bool `[B, seen]`, False in a padded slot; None while no chunk had padding.
        state: what encoding and normalizer keep, by name, batch first.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.seen = 0
        self.lengths: Tensor | None = None
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.decay: Tensor | None = None
        self.valid: Tensor | None = None
        self.state: dict[str, Tensor] = {}

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order: beam search, repetition, pruning."""
        for name in ("lengths", "keys", "values", "decay", "valid"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.index_select(0, rows.to(tensor.device)))
        for name, tensor in self.state.items():
            self.state[name] = tensor.index_select(0, rows.to(tensor.device))

    def count(self, chunk: Tensor, valid: Tensor | None) -> None:
        """Note that a chunk `[B, T, …]` was seen, of which `valid` `[B, T]` (None: all) is real."""
        B, T = chunk.shape[:2]
        if valid is None:
            new = torch.full((B,), T, dtype=torch.int64, device=chunk.device)
        else:
            new = valid.sum(1)
        self.lengths = new if self.lengths is None else self.lengths + new
        self.seen += T

    def append(self, k: Tensor, v: Tensor, valid: Tensor | None) -> None:
        """Add a chunk's keys and values, which the past's are not moved by, and count it."""
        B, T = k.shape[:2]
        if valid is not None or self.valid is not None:
            none = k.new_ones(B, self.seen, dtype=torch.bool)
            past = none if self.valid is None else self.valid
            now = k.new_ones(B, T, dtype=torch.bool) if valid is None else valid
            self.valid = torch.cat([past, now], 1)
        self.keys = k.detach() if self.keys is None else torch.cat([self.keys, k.detach()], 1)
        self.values = v.detach() if self.values is None else torch.cat([self.values, v.detach()], 1)
        self.count(k, valid)

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
        valid: Tensor | None,
    ) -> Tensor:
        """Let a chunk attend the past too, by softmax, then append it.

        Args:
            out: the chunk's attention to itself, `[B, T, HQ, DV]`; lse: its log-sum-exp
                `[B, T, HQ]`; both as `path_attention` returns them.
            q, k, v, w, beta, log_forget, scale: what `path_attention` was given.
            valid: bool `[B, T]`, False for padding after a row's real tokens; None for none.

        Returns:
            `[B, T, HQ, DV]` in out's dtype: the attention to past and chunk together.
        """
        past = None
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            if valid is not None and beta is not None:
                beta = beta.masked_fill(~valid.view(*valid.shape, *[1] * (beta.dim() - 2)), 0)
            if valid is not None and log_forget is not None:
                log_forget = log_forget.masked_fill(~valid[..., None], 0)
            transition = None
            if w is not None and beta is not None:
                q, k, transition = chunk_transport(q, k, w, beta)
            if self.keys is not None and self.values is not None:
                scores = self._scores(q, self.keys, scale)
                past = self._softmax(out, lse, scores, self.values, log_forget)
                if transition is not None:
                    self.keys = torch.einsum("bshd,bhde->bshe", self.keys, transition)
            if log_forget is not None:
                self._append_decay(log_forget)
            self.append(k, v, valid)
        return out if past is None else constant(out, past)

    def extend_plain(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, valid: Tensor | None
    ) -> Tensor:
        """Append a chunk and attend all that was seen, by SDPA; arguments as in `extend`.

        There must be a past: a first chunk is `path_attention`'s alone.
        """
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            self.append(k, v, valid)
            if self.keys is None or self.values is None:
                raise RuntimeError("an empty cache has no past to attend")
            T, S = q.shape[1], self.seen
            mask: Tensor | None = None
            if self.valid is not None:
                slot = torch.arange(S, device=q.device)
                own = torch.arange(S - T, S, device=q.device)[:, None]
                # A query in padding sees itself at least: weights of nothing would be NaN.
                mask = ((slot <= own) & self.valid[:, None] | (slot == own))[:, None]
            elif T > 1:
                mask = causal_lower_right(T, S)
            keys, values = (x.to(q.dtype).transpose(1, 2) for x in (self.keys, self.values))
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2), keys, values, attn_mask=mask, scale=scale, enable_gqa=True
            )
        return constant(q, out.transpose(1, 2))

    def extend_stick_breaking(
        self,
        out: Tensor,
        log_remaining: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        valid: Tensor | None,
    ) -> Tensor:
        """Let a chunk break what it leaves of the stick on the past, then append it.

            o_i += Σ_s σ(z_is) · exp(log_remaining_i + Σ_{s<l≤past} log(1 − σ(z_il))) · v_s

        Args:
            out, log_remaining: as `stick_breaking_attention` returns them for the chunk.
            Others: as in `extend`.

        Returns:
            `[B, T, HQ, DV]` in out's dtype.
        """
        past = None
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            if self.keys is not None and self.values is not None:
                scores = self._scores(q, self.keys, scale)  # −∞ in padding: breaks nothing off
                kept = F.logsigmoid(-scores)
                later = kept.flip(-1).cumsum(-1)  # sums over the last 1 … S slots
                later = F.pad(later[..., :-1], (1, 0)).flip(-1)
                own = log_remaining.to(scores.dtype).unflatten(2, (scores.shape[1], -1))
                weights = F.logsigmoid(scores) + later + own.permute(0, 2, 3, 1)[..., None]
                added = torch.einsum(
                    "bhgis,bshe->bihge", weights.exp(), self.values.to(scores.dtype)
                )
                past = (out.to(scores.dtype) + added.flatten(2, 3)).to(out.dtype)
            self.append(k, v, valid)
        return out if past is None else constant(out, past)

    def _scores(self, q: Tensor, keys: Tensor, scale: float) -> Tensor:
        """`[B, H, G, T, S]` in float32 or float64, −∞ in padded slots."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        scores = scale * torch.einsum(
            "bihgd,bshd->bhgis", q.to(dtype).unflatten(2, (keys.shape[2], -1)), keys.to(dtype)
        )
        if self.valid is not None:
            scores = scores.masked_fill(~self.valid[:, None, None, None], -torch.inf)
        return scores

    def _softmax(
        self, out: Tensor, lse: Tensor, scores: Tensor, values: Tensor, log_forget: Tensor | None
    ) -> Tensor:
        heads, dtype = (scores.shape[1], -1), scores.dtype  # H, G
        if log_forget is not None and self.decay is not None:
            elapsed = log_forget.to(dtype).cumsum(1).unflatten(2, heads)  # start → query
            scores = scores + elapsed.permute(0, 2, 3, 1)[..., None]
            scores = scores + self.decay.unflatten(2, heads).permute(0, 2, 3, 1)[..., None, :]
        own = lse.to(dtype).unflatten(2, heads).permute(0, 2, 3, 1)  # [B, H, G, T]
        total = torch.logaddexp(own, scores.logsumexp(-1))
        past = torch.einsum(
            "bhgis,bshe->bihge", (scores - total[..., None]).exp(), values.to(dtype)
        )
        share = (own - total).exp().permute(0, 3, 1, 2).flatten(2)[..., None]  # [B, T, HQ, 1]
        return (out.to(dtype) * share + past.flatten(2, 3)).to(out.dtype)

    def _append_decay(self, log_forget: Tensor) -> None:
        dtype = torch.promote_types(log_forget.dtype, torch.float32)
        after = log_forget.to(dtype).flip(1).cumsum(1)  # sums over the last 1 … T tokens
        decay = torch.cat([torch.zeros_like(after[:, :1]), after[:, :-1]], 1).flip(1)
        if self.decay is not None:
            decay = torch.cat([self.decay + after[:, -1:], decay], 1)
        self.decay = decay


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
