"""What one attention layer is made of."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, cast

LEARNED = ("learned_token", "learned_state")  # of `rotation_angles`, beside the random ones
ROTATION_ANGLES = (*LEARNED, "random_token", "random_position")


@dataclass(kw_only=True)
class AttentionConfig:
    """One attention layer: its sizes and its choice of encoding.

    Attributes:
        hidden_size: width of the residual stream.
        num_attention_heads: query heads HQ.
        num_key_value_heads: key/value heads H, a divisor of HQ; None for HQ.
        head_dim: size D of queries and keys; None for hidden_size / HQ.
        value_head_dim: size DV of values; None for D.
        qkv_bias: biases of the projections to queries, keys and values.
        output_bias: a bias of the output's projection.
        attention_scale: what scores q·k are multiplied by; None for D^-½.
        qk_norm: RMSNorm of queries and keys per head, before the encoding.
        output_norm: RMSNorm of the output per head, before its projection.
        rms_norm_eps: eps of every RMSNorm.
        transport: name of what moves queries to keys: "none", "rotary", "householder",
            "rotary_householder", "accumulated_rotation", "delta_rule", or one registered with
            `register_transport`.
        decay: name of what is added to scores along the route: "none", "alibi", "forget", or one
            registered with `register_decay`.
        normalizer: what makes weights of scores: "softmax", "stick_breaking" or "linear" (scores
            are the weights: a state recurrence).
        moves_values: values move along the route too, and outputs are turned back; for transports
            that are rotations.
        direction_rank: householder: rank of the projection that w comes from; None for a full one.
        direction_conv_size: householder: width of the causal convolution on it; 0 for none.
        householders_per_token: householder: the number n of factors of a token. One can only
            reflect or shrink; two can turn.
        beta_max: householder, delta_rule: β = beta_max · sigmoid(…), in (0, 2]. At β = 2 a factor
            is a reflection, and a product of reflections tracks a state exactly; below 2, n swaps
            keep (beta_max − 1)ⁿ of it: 2 − 2⁻⁷ keeps 0.018 after 512 swaps. At 1 or below no factor
            has a negative eigenvalue and no state can be tracked. docs/algorithm.md §1.
        beta_bias_init: the same: where β's bias starts; 0 starts at β ≈ beta_max / 2.
        forget_bias_init: forget: where the gate's bias starts; 0 starts at a gate of 0.5.
        forget_scale: forget: what log-gates are multiplied by: 1 as published; D^-½ is what
            flash-linear-attention's PaTH-FoX computes.
        rope_theta: rotary, and what angles of rotations are measured by: the base of the angles.
        rope_frequencies: the same: the angle a step of each of the D/2 pairs, in radians, in place
            of `rope_theta`'s: any scaled RoPE whose angles do not hang on the length.
        rotation_angles: accumulated_rotation: where a token's angles come from: "learned_token" (a
            row of a table for each token id), "learned_state" (its hidden state), "random_token" (a
            fixed draw for each token id) or "random_position" (a fixed draw for each position).
        rotation_bound: accumulated_rotation: random angles are uniform in ± this, in radians, at
            most π; None for ± RoPE's angle a step of each pair, at most 1. With a = rotation_bound,
            what two tokens n steps apart share falls as (sin a / a)ⁿ: by half in 66 steps at 0.25,
            at once at π; None has pairs for every distance.
        rotation_seed: accumulated_rotation: of the random angles.
        vocab_size: accumulated_rotation: rows of the table of "learned_token".
    """

    hidden_size: int = 768
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    value_head_dim: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    attention_scale: float | None = None
    qk_norm: bool = False
    output_norm: bool = False
    rms_norm_eps: float = 1e-6
    transport: str = "householder"
    decay: str = "none"
    normalizer: str = "softmax"
    moves_values: bool = False
    direction_rank: int | None = 32
    direction_conv_size: int = 3
    householders_per_token: int = 1
    beta_max: float = 2.0
    beta_bias_init: float = 0.0
    forget_bias_init: float = 0.0
    forget_scale: float = 1.0
    rope_theta: float = 10000.0
    rope_frequencies: list[float] | None = None
    rotation_angles: str = "learned_token"
    rotation_bound: float | None = 0.25
    rotation_seed: int = 0
    vocab_size: int = 32000

    def __post_init__(self) -> None:
        self.complete()

    def complete(self) -> None:
        """Fill in the sizes left None and check every field. Raises ValueError naming the field."""
        from path_attention.nn.encoding import DECAYS, TRANSPORTS
        from path_attention.nn.normalizer import NORMALIZERS

        self._complete_sizes()
        self._check_numbers()
        registries = {"transport": TRANSPORTS, "decay": DECAYS, "normalizer": NORMALIZERS}
        for name, registry in registries.items():
            hint = "" if name == "normalizer" else " (one of your own: import its module first)"
            check_choice(name, getattr(self, name), registry, hint)
        for name, registry in registries.items():
            registry[getattr(self, name)].check(self)

    def _complete_sizes(self) -> None:
        for name in ("hidden_size", "num_attention_heads"):
            check_integer(name, getattr(self, name), 1)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        check_integer("num_key_value_heads", self.num_key_value_heads, 1)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads: expected a divisor of num_attention_heads = "
                f"{self.num_attention_heads}, got {self.num_key_value_heads}"
            )
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"num_attention_heads: expected a divisor of hidden_size = {self.hidden_size} "
                    f"(or head_dim given), got {self.num_attention_heads}"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        check_integer("head_dim", self.head_dim, 1)
        if self.value_head_dim is None:
            self.value_head_dim = self.head_dim
        check_integer("value_head_dim", self.value_head_dim, 1)

    def _check_numbers(self) -> None:
        if self.direction_rank is not None:
            check_integer("direction_rank", self.direction_rank, 1)
        check_integer("direction_conv_size", self.direction_conv_size, 0)
        check_integer("householders_per_token", self.householders_per_token, 1)
        check_integer("rotation_seed", self.rotation_seed, 0)
        check_integer("vocab_size", self.vocab_size, 1)
        for name in ("rms_norm_eps", "rope_theta", "beta_max", "forget_scale"):
            check_positive(name, getattr(self, name))
        for name in ("attention_scale", "rotation_bound"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        self._check_frequencies()
        if self.rotation_bound is not None and self.rotation_bound > math.pi:
            raise ValueError(
                f"rotation_bound: expected at most π, half a turn, got {self.rotation_bound}"
            )
        if self.beta_max > 2:
            raise ValueError(f"beta_max: expected a value in (0, 2], got {self.beta_max}")
        for name in ("beta_bias_init", "forget_bias_init"):
            if not is_finite(getattr(self, name)):
                raise ValueError(f"{name}: expected a finite number, got {getattr(self, name)!r}")
        for name in ("qk_norm", "output_norm", "moves_values", "qkv_bias", "output_bias"):
            check_bool(name, getattr(self, name))
        check_choice("rotation_angles", self.rotation_angles, ROTATION_ANGLES)

    def _check_frequencies(self) -> None:
        pairs, given = cast(int, self.head_dim) // 2, self.rope_frequencies
        if given is None:
            return
        right = isinstance(given, (list, tuple)) and len(given) == pairs
        if not right or not all(is_finite(frequency) for frequency in given):
            raise ValueError(
                f"rope_frequencies: expected {pairs} finite numbers, one a pair of head_dim = "
                f"{self.head_dim}, got {given}"
            )


def check_choice(name: str, value: object, choices: Collection[str], hint: str = "") -> None:
    """Raise ValueError, naming the field, unless the value is one of these."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}: expected one of {sorted(choices)}, got {value!r}{hint}")


def is_finite(value: object) -> bool:
    """Whether it is a number (True is none), and neither infinite nor NaN."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_positive(name: str, value: Any) -> None:
    """Raise ValueError, naming the field, unless the value is a finite number above 0."""
    if not is_finite(value) or not value > 0:
        raise ValueError(f"{name}: expected a finite number above 0, got {value!r}")


def check_bool(name: str, value: object) -> None:
    """Raise ValueError, naming the field, unless the value is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected True or False, got {value!r}")


def check_integer(name: str, value: object, lowest: int) -> None:
    """Raise ValueError, naming the field, unless the value is an integer ≥ lowest."""
    if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
        raise ValueError(f"{name}: expected an integer of at least {lowest}, got {value!r}")
