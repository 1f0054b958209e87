"""Position encodings: what lies between two tokens decides how they see each other.

A `Transport` moves queries and keys along the route, a `Decay` adds to the score at each step. A
new encoding is one small module, here or outside the package, registered by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from path_attention.nn.configuration import AttentionConfig
from path_attention.nn.normalization import Float32Linear
from path_attention.ops.directions import convolution_state, householder_directions
from path_attention.ops.packing import Packing

TRANSPORTS: dict[str, type[Transport]] = {}
DECAYS: dict[str, type[Decay]] = {}
_T = TypeVar("_T", bound="type[Transport]")
_D = TypeVar("_D", bound="type[Decay]")


def register_transport(name: str) -> Callable[[_T], _T]:
    """Class decorator: make a `Transport` known as `transport=name` in a configuration."""

    def register(cls: _T) -> _T:
        TRANSPORTS[name] = cls
        return cls

    return register


def register_decay(name: str) -> Callable[[_D], _D]:
    """Class decorator: make a `Decay` known as `decay=name` in a configuration."""

    def register(cls: _D) -> _D:
        DECAYS[name] = cls
        return cls

    return register


@dataclass(frozen=True)
class Chunk:
    """What an encoding may know of a chunk of tokens besides their content.

    Attributes:
        positions: int64 `[B, T]`, each token's position in its own document.
        packing: borders of packed documents (B = 1), or None.
        valid: bool `[B, T]`, False for padding, which only follows a row's real tokens; None where
            every token is real.
        state: what the encoding keeps between chunks, by name, batch first; read and written in
            place. None where nothing is kept (no cache).
    """

    positions: Tensor
    packing: Packing | None = None
    valid: Tensor | None = None
    state: dict[str, Tensor] | None = None

    @property
    def lengths(self) -> Tensor | None:
        """int64 `[B]`, the number of real tokens of each row; None where every token is real."""
        return None if self.valid is None else self.valid.sum(1)


class Moved(NamedTuple):
    """Queries and keys, moved already or still to be moved by the operator's w and β."""

    q: Tensor  # [B, T, HQ, D]
    k: Tensor  # [B, T, H, D]
    w: Tensor | None = None  # [B, T, H, D], unit norm
    beta: Tensor | None = None  # [B, T, H]


class Transport(nn.Module):
    """Moves queries and keys. Training, prefill and decoding all call the one `forward`."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()

    def reset_parameters(self, std: float = 0.02) -> None:
        """Start the parameters that this module holds itself, not those of its layers."""

    def forward(self, x: Tensor, q: Tensor, k: Tensor, chunk: Chunk) -> Moved:
        """x: the layer's input `[B, T, hidden_size]`; q `[B, T, HQ, D]`; k `[B, T, H, D]`."""
        raise NotImplementedError


class Decay(nn.Module):
    """Adds Σ log_forget over the route from a key to a query to their score."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()

    def reset_parameters(self, std: float = 0.02) -> None:
        """Start the parameters that this module holds itself, not those of its layers."""

    def forward(self, x: Tensor, chunk: Chunk) -> Tensor | None:
        """x: the layer's input `[B, T, hidden_size]` → log_forget `[B, T, HQ]` ≤ 0, or None."""
        raise NotImplementedError


@register_transport("none")
class NoTransport(Transport):
    """Queries meet keys as they are (NoPE)."""

    def forward(self, x: Tensor, q: Tensor, k: Tensor, chunk: Chunk) -> Moved:
        return Moved(q, k)


@register_transport("rotary")
class Rotary(Transport):
    """RoPE: the pair (n, n + D/2) of a query or key turns by position · rope_theta^(−2n/D).

    Angles are float32 (float64 for float64 queries). Source: arXiv 2104.09864; the
    pairing by halves is that of Llama checkpoints.
    """

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.theta = config.rope_theta

    def forward(self, x: Tensor, q: Tensor, k: Tensor, chunk: Chunk) -> Moved:
        half = q.shape[-1] // 2
        dtype = torch.promote_types(q.dtype, torch.float32)
        exponents = torch.arange(half, dtype=dtype, device=x.device) / -half
        angles = chunk.positions[:, :, None].to(dtype) * torch.pow(self.theta, exponents)
        cos, sin = angles.cos()[:, :, None], angles.sin()[:, :, None]  # [B, T, 1, D / 2]

        def turn(y: Tensor) -> Tensor:
            a, b = y.to(dtype).chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(y.dtype)

        return Moved(turn(q), turn(k))


@register_transport("householder")
class Householder(Transport):
    """PaTH: H_t = I − β_t w_t w_tᵀ between tokens, from each token's content.

        w_t = householder_directions(low-rank projection of x_t),  β_t = beta_max · sigmoid(b(x_t))

    w and β are float32 and belong to the key/value head. State: "directions", the last inputs of
    the convolution. Source: arXiv 2505.16381 §3; docs/algorithm.md §1.
    """

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        size, rank = config.hidden_size, config.direction_rank
        self.heads = cast(int, config.num_key_value_heads)
        channels = self.heads * cast(int, config.head_dim)
        if rank is None:
            self.w_proj: nn.Module = nn.Linear(size, channels, bias=False)
        else:
            self.w_proj = nn.Sequential(
                nn.Linear(size, rank, bias=False), nn.Linear(rank, channels, bias=False)
            )
        self.width = config.direction_conv_size
        self.w_conv = nn.Parameter(torch.empty(channels, self.width)) if self.width else None
        self.beta_proj = Float32Linear(size, self.heads, bias_init=config.beta_bias_init)
        self.beta_max = config.beta_max
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        if self.w_conv is not None:
            nn.init.normal_(self.w_conv, mean=0.0, std=std)

    def forward(self, x: Tensor, q: Tensor, k: Tensor, chunk: Chunk) -> Moved:
        beta = self.beta_max * self.beta_proj(x).sigmoid()
        y = self.w_proj(x)
        state = None
        if chunk.state is not None and self.w_conv is not None:
            state = chunk.state.get("directions")
            chunk.state["directions"] = convolution_state(
                y.detach(), self.width, state=state, lengths=chunk.lengths
            )
        w = householder_directions(y, self.w_conv, self.heads, state=state, packing=chunk.packing)
        return Moved(q, k, w, beta)


@register_decay("none")
class NoDecay(Decay):
    """Distance alone costs nothing."""

    def forward(self, x: Tensor, chunk: Chunk) -> None:
        return None


@register_decay("forget")
class Forget(Decay):
    """FoX: log_forget = logsigmoid(g(x)), float32, of each query head. Source: arXiv 2503.02130."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.forget_proj = Float32Linear(
            config.hidden_size, config.num_attention_heads, bias_init=config.forget_bias_init
        )

    def forward(self, x: Tensor, chunk: Chunk) -> Tensor:
        return nn.functional.logsigmoid(self.forget_proj(x))
