"""The attention layer: project → encode → operate → output, one path for every use."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from path_attention.nn.cache import LayerCache
from path_attention.nn.configuration import AttentionConfig
from path_attention.nn.encoding import DECAYS, TRANSPORTS, Chunk
from path_attention.nn.normalization import RMSNorm
from path_attention.nn.normalizer import NORMALIZERS
from path_attention.ops.context_split import ContextSplit
from path_attention.ops.packing import Packing


class Attention(nn.Module):
    """Causal self-attention with any `Transport`, `Decay` and `Normalizer`.

        out = W_o · path_attention(q, k, v, w, beta, log_forget; scale = D^-½)

    or another normalizer's operator in its place. Projections have no bias unless told; queries and
    keys, and the output, may be RMS-normalised per head. Training, prefill and decoding differ only
    in what `cache` holds. Source: arXiv 2505.16381 §3; docs/algorithm.md §1 and §5.
    """

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        size, heads = config.hidden_size, config.num_attention_heads
        kv_heads = cast(int, config.num_key_value_heads)
        self.head_dim = cast(int, config.head_dim)
        value_dim = cast(int, config.value_head_dim)
        self.heads, self.kv_heads = heads, kv_heads
        scale = config.attention_scale
        self.scale = self.head_dim**-0.5 if scale is None else scale
        bias = config.qkv_bias
        self.q_proj = nn.Linear(size, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(size, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(size, kv_heads * value_dim, bias=bias)
        self.o_proj = nn.Linear(heads * value_dim, size, bias=config.output_bias)
        norm = config.qk_norm
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if norm else nn.Identity()
        self.transport = TRANSPORTS[config.transport](config)
        self.decay = DECAYS[config.decay](config)
        self.normalizer = NORMALIZERS[config.normalizer]()
        norm = config.output_norm
        self.o_norm = RMSNorm(value_dim, config.rms_norm_eps) if norm else nn.Identity()

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        token_ids: Tensor | None = None,
        packing: Packing | None = None,
        valid: Tensor | None = None,
        cache: LayerCache | None = None,
        split: ContextSplit | None = None,
    ) -> Tensor:
        """Attend a chunk of tokens to itself and to what `cache` holds, and append it there.

        Args:
            x: `[B, T, hidden_size]`.
            positions: int64 `[B, T]`, each token's position in its document; None counts on from
                the packing's borders or the cache's lengths.
            token_ids: int64 `[B, T]`, for encodings that ask for them.
            packing: borders of packed documents (B = 1); not together with a cache.
            valid: bool `[B, T]`, False for padding, which may only follow a row's real tokens;
                what comes out there means nothing. None where every token is real.
            cache: this layer's state, extended in place.
            split: x is this process's part of a sequence that lies on several ones, all of which
                call the layer, forward and backward. Packed documents are the split's; neither
                packing, valid nor a cache go with it.

        Returns:
            `[B, T, hidden_size]`.

        Raises:
            ValueError: naming the argument, what came, and what was expected.
        """
        _check(x, positions, token_ids, packing, valid, cache)
        if split is not None:
            self._check_split(x, split, packing, valid, cache)
        if positions is None:
            positions = count_positions(x, packing, cache, split)
        before = None if cache is None else cache.before
        chunk = Chunk(positions, token_ids, packing, valid, before, split=split)
        q, k, v = self.project(x)
        moved = self.transport(x, q, k, v, chunk)
        log_forget = self.decay(x, chunk)
        out = self.normalizer(moved, log_forget, scale=self.scale, chunk=chunk, cache=cache)
        if moved.restore is not None:
            out = moved.restore(out)
        return self.o_proj(self.o_norm(out).flatten(2))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q `[B, T, HQ, D]`, k `[B, T, H, D]`, v `[B, T, H, DV]` of x, before they are moved."""
        q = self.q_norm(self.q_proj(x).unflatten(2, (self.heads, -1)))
        k = self.k_norm(self.k_proj(x).unflatten(2, (self.kv_heads, -1)))
        return q, k, self.v_proj(x).unflatten(2, (self.kv_heads, -1))

    def _check_split(
        self,
        x: Tensor,
        split: ContextSplit,
        packing: Packing | None,
        valid: Tensor | None,
        cache: LayerCache | None,
    ) -> None:
        for name, given in (("packing", packing), ("valid", valid), ("cache", cache)):
            if given is not None:
                raise ValueError(f"{name}: expected None with a split, got {type(given).__name__}")
        split.check_tokens("x", x)
        for name in ("transport", "decay", "normalizer"):
            part = getattr(self, name)
            if not part.can_split:
                raise ValueError(_no_split(name, type(part).__name__))


def check_can_split(config: AttentionConfig) -> None:
    """Raise ValueError, naming the field, on an encoding that can't lie on several processes."""
    registries = {"transport": TRANSPORTS, "decay": DECAYS, "normalizer": NORMALIZERS}
    for name, registry in registries.items():
        chosen = getattr(config, name)
        if not registry[chosen].can_split:
            raise ValueError(_no_split(name, repr(chosen)))


def _no_split(name: str, chosen: str) -> str:
    return f"{name}: expected one that can lie on several processes (can_split), got {chosen}"


def count_positions(
    x: Tensor,
    packing: Packing | None,
    cache: LayerCache | None,
    split: ContextSplit | None = None,
) -> Tensor:
    """int64 `[B, T]`: positions of a chunk `[B, T, …]` whose padding follows its real tokens."""
    if split is not None:
        return split.positions().to(x.device).expand(x.shape[0], -1)
    if packing is not None:
        return packing.position_ids()[None].to(x.device)
    positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
    lengths = None if cache is None else cache.lengths
    return positions if lengths is None else positions + lengths[:, None]


def _check(
    x: Tensor,
    positions: Tensor | None,
    token_ids: Tensor | None,
    packing: Packing | None,
    valid: Tensor | None,
    cache: LayerCache | None,
) -> None:
    if x.dim() != 3:
        raise ValueError(f"x: expected [B, T, hidden_size], got {list(x.shape)}")
    if packing is not None and cache is not None:
        raise ValueError("cache: expected None with packed documents, got a cache")
    if packing is not None and valid is not None:
        raise ValueError("valid: expected None with packed documents, got a tensor")
    named = {"positions": positions, "token_ids": token_ids, "valid": valid}
    for name, tensor in named.items():
        if tensor is not None and tensor.shape != x.shape[:2]:
            raise ValueError(
                f"{name}: expected shape {list(x.shape[:2])}, got {list(tensor.shape)}"
            )
    if cache is not None and cache.lengths is not None and len(cache.lengths) != len(x):
        raise ValueError(f"cache: expected {len(x)} rows, the batch size, got {len(cache.lengths)}")
