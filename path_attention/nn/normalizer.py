"""What makes weights of scores: softmax, stick-breaking, or nothing (a linear state recurrence).

Each calls its operator on a chunk, and lets the cache, if there is one, add the past.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from path_attention.nn.cache import LayerCache, hide
from path_attention.nn.configuration import AttentionConfig
from path_attention.nn.encoding import TRANSPORTS, Chunk, Moved
from path_attention.ops.context_linear import context_parallel_linear_attention
from path_attention.ops.context_parallel import context_parallel_attention
from path_attention.ops.context_stick_breaking import context_parallel_stick_breaking
from path_attention.ops.linear import linear_attention
from path_attention.ops.path import path_attention
from path_attention.ops.stick_breaking import stick_breaking_attention


class Normalizer(nn.Module):
    """Attends with moved queries, keys and values under a decay.

    Attributes:
        can_split: whether it is right on a sequence that lies on several processes (`Chunk.split`).
    """

    can_split: ClassVar[bool] = False

    @classmethod
    def check(cls, config: AttentionConfig) -> None:
        """Raise ValueError, naming the field, on a configuration that makes no sense with it."""

    def forward(
        self,
        moved: Moved,
        log_forget: Tensor | None,
        *,
        scale: float,
        chunk: Chunk,
        cache: LayerCache | None,
    ) -> Tensor:
        """log_forget `[B, T, HQ]` or None → `[B, T, HQ, DV]`, the cache extended in place."""
        raise NotImplementedError


class Softmax(Normalizer):
    """o_i = Σ_{j≤i} softmax_j(A_ij) v_j: `path_attention`.

    SDPA where nothing moves or fades.
    """

    can_split = True

    def forward(
        self,
        moved: Moved,
        log_forget: Tensor | None,
        *,
        scale: float,
        chunk: Chunk,
        cache: LayerCache | None,
    ) -> Tensor:
        q, k, v, w, beta, _ = moved
        if chunk.split is not None:
            return context_parallel_attention(
                q, k, v, w, beta, log_forget, split=chunk.split, scale=scale
            )  # pyright: ignore[reportReturnType]
        if cache is None:
            return path_attention(
                q, k, v, w, beta, log_forget, scale=scale, cu_seqlens=chunk.packing
            )
        return cache.attend(q, k, v, w, beta, log_forget, scale=scale, chunk=chunk)


class StickBreaking(Normalizer):
    """a_ij = σ(z_ij) Π_{j<l<i} (1 − σ(z_il)): `stick_breaking_attention`, arXiv 2410.17980."""

    can_split = True

    @classmethod
    def check(cls, config: AttentionConfig) -> None:
        if config.decay != "none":
            raise ValueError(
                "decay: expected 'none' with normalizer 'stick_breaking', where each key already "
                f"takes its part of what is left, got {config.decay!r}"
            )
        if TRANSPORTS[config.transport].by_operator:
            raise ValueError(
                "transport: expected one that moves q and k itself with normalizer "
                f"'stick_breaking', got {config.transport!r}, which its operator would have to"
            )

    def forward(
        self,
        moved: Moved,
        log_forget: Tensor | None,
        *,
        scale: float,
        chunk: Chunk,
        cache: LayerCache | None,
    ) -> Tensor:
        q, k, v, w, _, _ = moved
        for name, x in (("w", w), ("log_forget", log_forget)):
            if x is not None:
                raise ValueError(f"{name}: expected None with stick_breaking, got a tensor")
        if chunk.split is not None:
            return context_parallel_stick_breaking(q, k, v, split=chunk.split, scale=scale)[0]
        out, rest = stick_breaking_attention(q, k, v, scale=scale, cu_seqlens=chunk.packing)
        if cache is None:
            return out
        return cache.extend_stick_breaking(out, rest, q, k, v, scale=scale, chunk=chunk)


class Linear(Normalizer):
    """o_t = scale · S_t q_t, S_t = S_{t−1} H_t f_t + v_t k_tᵀ: `linear_attention`.

    Decoding keeps S and the last tokens, and no other keys: constant memory.
    """

    can_split = True

    def forward(
        self,
        moved: Moved,
        log_forget: Tensor | None,
        *,
        scale: float,
        chunk: Chunk,
        cache: LayerCache | None,
    ) -> Tensor:
        q, k, v, w, beta, _ = moved
        if chunk.split is not None:
            return context_parallel_linear_attention(
                q, k, v, w, beta, log_forget, split=chunk.split, scale=scale
            )
        if cache is not None:
            return cache.extend_linear(q, k, v, w, beta, log_forget, scale=scale, chunk=chunk)
        if chunk.valid is not None:
            k = hide(k, chunk.valid)
            beta, log_forget = (
                None if x is None else hide(x, chunk.valid) for x in (beta, log_forget)
            )
        out, _ = linear_attention(
            q, k, v, w, beta, log_forget, scale=scale, cu_seqlens=chunk.packing
        )
        return out


NORMALIZERS: dict[str, type[Normalizer]] = {
    "softmax": Softmax,
    "stick_breaking": StickBreaking,
    "linear": Linear,
}
