"""What one attention layer keeps between chunks of a sequence: the state of decoding.

Every past key is kept moved to the last token seen ("now"). A chunk attends itself through the
operator and the past through this cache; appending it moves the past on by the chunk's transition.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from path_attention.ops.blockwise import chunk_transport


class LayerCache:
    """Past keys moved to now, values, gate sums, and the encoding's own state, of one layer.

        score(i, s) = scale · (H_1 ⋯ H_i q_i) · k̂_s  +  Σ log_forget from the chunk's start to i
                                                      +  Σ log_forget from after s to now

    with k̂_sᵀ = k_sᵀ H_{s+1} ⋯ H_now in float32; both gate sums are at most 0 and neither is a
    difference. Appending: k̂ ← k̂ P for the chunk's transition P. docs/algorithm.md §5.
    Keys are rewritten by products that may be singular, so tokens can't be taken back (no crop).
    Rows may differ in length: padding follows a row's real tokens in each chunk, and leaves a slot
    that no query sees. The cache holds no gradients, and backward through it raises.

    Attributes:
        keys: k̂ `[B, S, H, D]`, S the number of columns seen (padding included); float32 under a
            Householder transport.
        values: `[B, S, H, DV]`.
        decay: Σ log_forget from after each slot to now, `[B, S, HQ]`, or None without a decay.
        valid: bool `[B, S]`, False in a padded slot.
        state: what the encoding keeps, by name, batch first.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.decay: Tensor | None = None
        self.valid: Tensor | None = None
        self.state: dict[str, Tensor] = {}

    @property
    def seen(self) -> int:
        """The number of columns seen, padding included."""
        return 0 if self.keys is None else self.keys.shape[1]

    @property
    def lengths(self) -> Tensor | None:
        """int64 `[B]`, the number of real tokens of each row; None while empty."""
        return None if self.valid is None else self.valid.sum(1)

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order: beam search, repetition, pruning."""
        for name in ("keys", "values", "decay", "valid"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.index_select(0, rows.to(tensor.device)))
        for name, tensor in self.state.items():
            self.state[name] = tensor.index_select(0, rows.to(tensor.device))

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
        """Let a chunk attend the past too, then append it.

        Args:
            out: the chunk's attention to itself, `[B, T, HQ, DV]`; lse: its log-sum-exp
                `[B, T, HQ]`; both as `path_attention` returns them.
            q, k, v, w, beta, log_forget, scale: what `path_attention` was given.
            valid: bool `[B, T]`, False for padding after a row's real tokens; None for none.

        Returns:
            `[B, T, HQ, DV]` in out's dtype: the attention to past and chunk together.
        """
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            if valid is not None and beta is not None:
                beta = beta.masked_fill(~valid[..., None], 0)
            if valid is not None and log_forget is not None:
                log_forget = log_forget.masked_fill(~valid[..., None], 0)
            transition = None
            if w is not None and beta is not None:
                q, k, transition = chunk_transport(q, k, w, beta)
            past = None if self.keys is None else self._attend(out, lse, q, log_forget, scale)
            self._append(k, v, transition, log_forget, valid)
        if past is None:
            return out
        return _Constant.apply(out, past)

    def _attend(
        self, out: Tensor, lse: Tensor, q: Tensor, log_forget: Tensor | None, scale: float
    ) -> Tensor:
        keys, values, valid = self.keys, self.values, self.valid
        if keys is None or values is None or valid is None:
            raise RuntimeError("an empty cache has no past to attend")
        dtype = torch.promote_types(q.dtype, torch.float32)
        heads = (keys.shape[2], q.shape[2] // keys.shape[2])  # (H, G)
        scores = scale * torch.einsum(
            "bihgd,bshd->bhgis", q.to(dtype).unflatten(2, heads), keys.to(dtype)
        )
        if log_forget is not None and self.decay is not None:
            elapsed = log_forget.to(dtype).cumsum(1).unflatten(2, heads)  # start → query
            scores = scores + elapsed.permute(0, 2, 3, 1)[..., None]
            scores = scores + self.decay.unflatten(2, heads).permute(0, 2, 3, 1)[..., None, :]
        scores = scores.masked_fill(~valid[:, None, None, None], -torch.inf)
        own = lse.to(dtype).unflatten(2, heads).permute(0, 2, 3, 1)  # [B, H, G, T]
        total = torch.logaddexp(own, scores.logsumexp(-1))
        past = torch.einsum(
            "bhgis,bshe->bihge", (scores - total[..., None]).exp(), values.to(dtype)
        )
        share = (own - total).exp().permute(0, 3, 1, 2).flatten(2)[..., None]  # [B, T, HQ, 1]
        return (out.to(dtype) * share + past.flatten(2, 3)).to(out.dtype)

    def _append(
        self,
        k: Tensor,
        v: Tensor,
        transition: Tensor | None,
        log_forget: Tensor | None,
        valid: Tensor | None,
    ) -> None:
        if valid is None:
            valid = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)
        decay = None
        if log_forget is not None:
            dtype = torch.promote_types(log_forget.dtype, torch.float32)
            after = log_forget.to(dtype).flip(1).cumsum(1)  # sums over the last 1 … T tokens
            decay = torch.cat([torch.zeros_like(after[:, :1]), after[:, :-1]], 1).flip(1)
            if self.decay is not None:
                decay = torch.cat([self.decay + after[:, -1:], decay], 1)
        if self.keys is not None and self.values is not None and self.valid is not None:
            past = self.keys
            if transition is not None:
                past = torch.einsum("bshd,bhde->bshe", past, transition)
            k = torch.cat([past, k], 1)
            v = torch.cat([self.values, v], 1)
            valid = torch.cat([self.valid, valid], 1)
        self.keys, self.values, self.decay, self.valid = k, v, decay, valid


class _Constant(torch.autograd.Function):
    """The value of `past` with the history of `out`; backward raises."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, past: Tensor) -> Tensor:
        return past

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError("gradients don't flow through a cache: run the whole sequence without")
