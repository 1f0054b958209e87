"""Position encodings: what lies between two tokens decides how they see each other.

A `Transport` moves queries and keys along the route, a `Decay` adds to the score at each step. A
new encoding is one small module, here or outside the package, registered by name:
docs/how-to-add-an-encoding.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from path_attention.nn.angles import LearnedAngles
from path_attention.nn.configuration import LEARNED, AttentionConfig
from path_attention.nn.frequencies import Frequencies
from path_attention.nn.normalization import Float32Linear
from path_attention.ops.context_directions import directions_over_runs
from path_attention.ops.context_rotation import accumulate_over_runs
from path_attention.ops.context_split import ContextSplit
from path_attention.ops.directions import householder_directions
from path_attention.ops.packing import Packing
from path_attention.ops.rotation import Rotation, accumulate_angles, random_angles

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


class Record(NamedTuple):
    """One value a token, of which the last `count` reach into the next chunk."""

    values: Tensor  # [B, T, …]
    count: int


@dataclass(frozen=True)
class Chunk:
    """What an encoding may know of a chunk of tokens besides their content.

    Attributes:
        positions: int64 `[B, T]`, each token's position in its own document.
        token_ids: int64 `[B, T]`; None where the layer was not told.
        packing: borders of packed documents (B = 1), or None.
        valid: bool `[B, T]`, False for padding, which only follows a row's real tokens; None where
            every token is real.
        before: what the last real tokens before the chunk recorded, by name, `[B, count, …]`,
            oldest first. None where nothing is kept (no cache); read by `remember`.
        records: what each of the chunk's tokens records, by name: written by `remember`, for the
            cache to take.
        split: how the sequence lies on several processes, if it does: the chunk is then this
            process's two runs of it, which other tokens lie before. Packed documents are the
            split's own: `packing` is None.
    """

    positions: Tensor
    token_ids: Tensor | None = None
    packing: Packing | None = None
    valid: Tensor | None = None
    before: dict[str, Tensor] | None = None
    records: dict[str, Record] = field(default_factory=dict)
    split: ContextSplit | None = None

    @property
    def lengths(self) -> Tensor | None:
        """int64 `[B]`, the number of real tokens of each row; None where every token is real."""
        return None if self.valid is None else self.valid.sum(1)

    def recall(self, name: str) -> Tensor | None:
        """What the last real tokens before this chunk recorded, `[B, count, …]`, oldest first.

        None at a sequence's start and without a cache; zeros where a row is shorter than `count`.
        """
        return None if self.before is None else self.before.get(name)

    def remember(self, name: str, values: Tensor, count: int = 1) -> None:
        """Record `values` `[B, T, …]`, of which the next chunk recalls the last `count` real ones.

        What must reach from chunk to chunk is recorded for each token, so that a cache can also be
        taken back to any of them. Padding's values are skipped; gradients aren't kept.
        """
        if self.before is not None:
            self.records[name] = Record(values.detach(), count)

    def accumulate(self, angles: Tensor) -> Rotation:
        """The rotation by the running sum of angles `[B, T, H, D/2]` since each document's start.

        Packed documents start anew, padding turns nothing, and the sum goes on from chunk to chunk
        (the record "rotation") and from process to process. Float32 or float64 angles; see
        `accumulate_angles`.
        """
        if self.split is not None:
            return Rotation.by(accumulate_over_runs(angles, self.split))
        before = self.recall("rotation")
        total, units = accumulate_angles(
            angles,
            state=None if before is None else before[:, 0],
            packing=self.packing,
            valid=self.valid,
        )
        self.remember("rotation", units)
        return Rotation.by(total)


class Moved(NamedTuple):
    """Queries, keys and values, moved already or still to be moved by the operator's w and β."""

    q: Tensor  # [B, T, HQ, D]
    k: Tensor  # [B, T, H, D]
    v: Tensor  # [B, T, H, DV]
    w: Tensor | None = None  # [B, T, H, D] or [B, T, H, n, D], unit norm
    beta: Tensor | None = None  # [B, T, H] or [B, T, H, n]
    restore: Callable[[Tensor], Tensor] | None = None  # of the output [B, T, HQ, DV], if v moved


class Transport(nn.Module):
    """Moves queries and keys. Training, prefill and decoding all call the one `forward`.

    Attributes:
        by_operator: whether it returns w and β, for the operator to apply.
        can_move_values: whether it knows `moves_values`.
        can_split: whether it is right on a sequence that lies on several processes (`Chunk.split`).
    """

    by_operator: ClassVar[bool] = False
    can_move_values: ClassVar[bool] = False
    can_split: ClassVar[bool] = False

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()

    @classmethod
    def check(cls, config: AttentionConfig) -> None:
        """Raise ValueError, naming the field, on a configuration that makes no sense with it."""
        if config.moves_values and not cls.can_move_values:
            raise ValueError(
                f"moves_values: expected False with transport {config.transport!r}, whose moves "
                "can't be undone on the output, got True"
            )
        if config.householders_per_token != 1 and not cls.by_operator:
            raise ValueError(
                f"householders_per_token: expected 1 with transport {config.transport!r}, "
                f"got {config.householders_per_token}"
            )

    def reset_parameters(self, std: float = 0.02) -> None:
        """Start the parameters that this module holds itself, not those of its layers."""

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, chunk: Chunk) -> Moved:
        """x: the layer's input `[B, T, hidden_size]`; q, k, v as in `Moved`."""
        raise NotImplementedError


class Decay(nn.Module):
    """Adds Σ log_forget over the route from a key to a query to their score.

    Attributes:
        can_split: whether it is right on a sequence that lies on several processes (`Chunk.split`).
    """

    can_split: ClassVar[bool] = False

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()

    @classmethod
    def check(cls, config: AttentionConfig) -> None:
        """Raise ValueError, naming the field, on a configuration that makes no sense with it."""

    def reset_parameters(self, std: float = 0.02) -> None:
        """Start the parameters that this module holds itself, not those of its layers."""

    def forward(self, x: Tensor, chunk: Chunk) -> Tensor | None:
        """x: the layer's input `[B, T, hidden_size]` → log_forget `[B, T, HQ]` ≤ 0, or None."""
        raise NotImplementedError


@register_transport("none")
class NoTransport(Transport):
    """Queries meet keys as they are (NoPE)."""

    can_split = True

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, chunk: Chunk) -> Moved:
        return Moved(q, k, v)


class _Rotating(Transport):
    """Turns pairs of a head (`Rotation`), and the values' and the output's too if they move."""

    can_move_values = True
    can_split = True

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.moves_values = config.moves_values

    @classmethod
    def check(cls, config: AttentionConfig) -> None:
        super().check(config)
        if cast(int, config.head_dim) % 2:
            raise ValueError(
                f"head_dim: expected an even size with {config.transport}, got {config.head_dim}"
            )
        if config.moves_values and config.value_head_dim != config.head_dim:
            raise ValueError(
                f"value_head_dim: expected head_dim = {config.head_dim} with moves_values, "
                f"got {config.value_head_dim}"
            )


@register_transport("rotary")
class Rotary(_Rotating):
    """RoPE: the pair (n, n + D/2) of a query or key turns by position · rope_theta^(−2n/D).

    With rope_frequencies, by position times these. Angles are float32 (float64 for float64
    queries). Source: arXiv 2104.09864; the pairing by halves is that of Llama checkpoints.
    """

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.frequencies = Frequencies(config)

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, chunk: Chunk) -> Moved:
        rotation = self.frequencies.rotation(q, chunk.positions)
        q, k = rotation.turn(q), rotation.turn(k)
        if not self.moves_values:
            return Moved(q, k, v)
        return Moved(q, k, rotation.turn(v), restore=rotation.turn_back)


@register_transport("accumulated_rotation")
class AccumulatedRotation(_Rotating):
    """Each token turns the route by angles θ_t of its own, one for each pair of a key head.

        score_ij = q_iᵀ R(Θ_i − Θ_j) k_j,   Θ_i = Σ_{t≤i} θ_t
        o_i = Σ_j α_ij R(Θ_i − Θ_j) v_j     with moves_values

    rotation_angles "learned_token", "learned_state": see `LearnedAngles`. "random_token": a fixed
    draw for each token id; what turns depends on which tokens lie between, so this is no position
    encoding. "random_position": a fixed draw for each position, so this is one: only where the two
    tokens stand decides. Draws are a hash of seed, key, head and pair: the same in every layer,
    process and chunk. Record: "rotation". Source: arXiv 2606.24975; its author's notes draw random
    angles by frequency (rotation_bound None), anew in each pass.
    """

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.heads = cast(int, config.num_key_value_heads)
        self.pairs = cast(int, config.head_dim) // 2
        self.angles, self.seed = config.rotation_angles, config.rotation_seed
        self.bound, self.frequencies = config.rotation_bound, Frequencies(config)
        learned = self.angles in LEARNED
        self.learned = LearnedAngles(config, self.heads, self.pairs) if learned else None

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, chunk: Chunk) -> Moved:
        rotation = chunk.accumulate(self._angles(x, q, chunk))
        q, k = rotation.turn_back(q), rotation.turn_back(k)
        if not self.moves_values:
            return Moved(q, k, v)
        return Moved(q, k, rotation.turn_back(v), restore=rotation.turn)

    def _angles(self, x: Tensor, q: Tensor, chunk: Chunk) -> Tensor:
        if self.learned is not None:
            return self.learned(x, chunk.token_ids)
        keys = chunk.positions if self.angles == "random_position" else chunk.token_ids
        if keys is None:
            raise ValueError(
                "token_ids: expected int64 [B, T] (a model's input_ids) with rotation_angles "
                "'random_token', got None"
            )
        dtype = torch.promote_types(q.dtype, torch.float32)
        bound = self.bound or 1.0
        angles = random_angles(
            keys, self.heads, self.pairs, seed=self.seed, bound=bound, dtype=dtype
        )
        return angles if self.bound else angles * self.frequencies.a_step(self.pairs, angles)


class _Strengths(Transport):
    """What transports that the operator applies share: β_t = beta_max · sigmoid(b(x_t))."""

    by_operator = True
    can_split = True

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.heads = cast(int, config.num_key_value_heads)
        self.householders = config.householders_per_token
        self.beta_proj = Float32Linear(
            config.hidden_size, self.heads * self.householders, bias_init=config.beta_bias_init
        )
        self.beta_max = config.beta_max

    def _strengths(self, x: Tensor) -> Tensor:
        return self.beta_max * self.beta_proj(x).sigmoid()


@register_transport("householder")
class Householder(_Strengths):
    """PaTH: H_t = I − β_t w_t w_tᵀ between tokens, from each token's content.

        w_t = householder_directions(low-rank projection of x_t),  β_t = beta_max · sigmoid(b(x_t))

    With n = householders_per_token above 1, H_t = H_t1 ⋯ H_tn, each factor with a direction and
    strength of its own. w and β are float32 and belong to the key/value head. Record: "directions",
    the inputs of the convolution. Source: arXiv 2505.16381 §3; docs/algorithm.md §1.
    """

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        size, rank = config.hidden_size, config.direction_rank
        channels = self.heads * self.householders * cast(int, config.head_dim)
        if rank is None:
            self.w_proj: nn.Module = nn.Linear(size, channels, bias=False)
        else:
            self.w_proj = nn.Sequential(
                nn.Linear(size, rank, bias=False), nn.Linear(rank, channels, bias=False)
            )
        self.width = config.direction_conv_size
        self.w_conv = nn.Parameter(torch.empty(channels, self.width)) if self.width else None
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        if self.w_conv is not None:
            nn.init.normal_(self.w_conv, mean=0.0, std=std)

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, chunk: Chunk) -> Moved:
        beta = self._strengths(x)
        y = self.w_proj(x)
        w = self._directions(y, chunk)
        if self.householders > 1:
            w, beta = (z.unflatten(2, (self.heads, self.householders)) for z in (w, beta))
        return Moved(q, k, v, w, beta)

    def _directions(self, y: Tensor, chunk: Chunk) -> Tensor:
        heads, reach = self.heads * self.householders, max(self.width - 1, 0)
        if chunk.split is not None:
            return directions_over_runs(y, self.w_conv, heads, split=chunk.split)
        state = None
        if reach:
            state = chunk.recall("directions")
            chunk.remember("directions", y, reach)
        return householder_directions(y, self.w_conv, heads, state=state, packing=chunk.packing)


@register_transport("rotary_householder")
class RotaryHouseholder(Householder):
    """RoPE by a share s of its angles, then PaTH: a way from one to the other.

        score_ij = (R(s j) k_j)ᵀ H_{j+1} ⋯ H_i R(s i) q_i,   R(φ) turns pair n by φ · frequency n

    s = 1 and β = 0 is RoPE, s = 0 is PaTH with the same parameters; between them positions are
    interpolated (arXiv 2306.15595). Who trains a model says how s falls (`set_share`); it is no
    part of a saved model.
    """

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.frequencies = Frequencies(config)
        # no buffer: what a compiled layer reads anew each step, whatever device it is on
        self.share = torch.ones((), device="cpu")

    @classmethod
    def check(cls, config: AttentionConfig) -> None:
        super().check(config)
        if cast(int, config.head_dim) % 2:
            raise ValueError(
                f"head_dim: expected an even size with {config.transport}, got {config.head_dim}"
            )

    def set_share(self, share: float) -> None:
        """What share of RoPE's angles is left, from 1 to 0."""
        self.share.fill_(share)

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, chunk: Chunk) -> Moved:
        rotation = self.frequencies.rotation(q, chunk.positions, self.share)
        return super().forward(x, rotation.turn(q), rotation.turn(k), v, chunk)


@register_transport("delta_rule")
class DeltaRule(_Strengths):
    """DeltaNet: a key's direction is erased from the state before its value is written there.

        k_t ← k_t / ‖k_t‖,   w_t = k_t,   v_t ← β_t v_t
        S_t = S_{t−1} (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ

    Source: arXiv 2406.06484; without its convolutions and its SiLU. β is kept at most 1 there:
    beta_max = 1.
    """

    @classmethod
    def check(cls, config: AttentionConfig) -> None:
        super().check(config)
        if config.normalizer != "linear":
            raise ValueError(
                "normalizer: expected 'linear' with transport 'delta_rule', which writes to a "
                f"state, got {config.normalizer!r}"
            )
        if config.householders_per_token != 1:
            raise ValueError(
                "householders_per_token: expected 1 with transport 'delta_rule', which has one key "
                f"a token, got {config.householders_per_token}"
            )

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, chunk: Chunk) -> Moved:
        dtype = torch.promote_types(k.dtype, torch.float32)
        w = nn.functional.normalize(k.to(dtype), dim=-1, eps=1e-6)
        beta = self._strengths(x)
        return Moved(q, w.to(k.dtype), (beta[..., None] * v).to(v.dtype), w, beta)


@register_decay("none")
class NoDecay(Decay):
    """Distance alone costs nothing."""

    can_split = True

    def forward(self, x: Tensor, chunk: Chunk) -> None:
        return None


@register_decay("alibi")
class Alibi(Decay):
    """ALiBi: each step costs query head n a fixed 2^(−8n/HQ), n = 1 … HQ.

    Where HQ is no power of two: the slopes of the next lower one m, then every other slope of 2m.
    Source: arXiv 2108.12409.
    """

    can_split = True

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.heads = config.num_attention_heads

    def forward(self, x: Tensor, chunk: Chunk) -> Tensor:
        return alibi_log_forget(x, self.heads)


def alibi_log_forget(x: Tensor, heads: int) -> Tensor:
    """Minus the slopes of `Alibi` as a gate of x `[B, T, …]`, `[B, T, heads]`, at least float32."""
    slopes = torch.exp2(-_alibi_exponents(heads, x.device))
    dtype = torch.promote_types(x.dtype, torch.float32)
    return -slopes.to(dtype).expand(*x.shape[:2], heads)


def _alibi_exponents(heads: int, device: torch.device) -> Tensor:
    """float64 `[heads]`: query head n's slope is 2 to the minus this (`Alibi`)."""
    lower = 2 ** int(math.log2(heads))
    n = torch.arange(heads, dtype=torch.float64, device=device)
    return torch.where(n < lower, 8 * (n + 1) / lower, 4 * (2 * (n - lower) + 1) / lower)


@register_decay("forget")
class Forget(Decay):
    """FoX: log_forget = forget_scale · logsigmoid(g(x)), float32, of each query head.

    Source: arXiv 2503.02130, where the scale is 1.
    """

    can_split = True

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.forget_proj = Float32Linear(
            config.hidden_size, config.num_attention_heads, bias_init=config.forget_bias_init
        )
        self.scale = config.forget_scale

    def forward(self, x: Tensor, chunk: Chunk) -> Tensor:
        gate = nn.functional.logsigmoid(self.forget_proj(x))
        return gate if self.scale == 1 else self.scale * gate
