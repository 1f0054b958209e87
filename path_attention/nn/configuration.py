"""What one attention layer is made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class AttentionConfig:
    """One attention layer: its sizes and its choice of encoding.

    Attributes:
        hidden_size: width of the residual stream.
        num_attention_heads: query heads HQ.
        num_key_value_heads: key/value heads H, a divisor of HQ; None for HQ.
        head_dim: size D of queries and keys; None for hidden_size / HQ.
        value_head_dim: size DV of values; None for D.
        qk_norm: RMSNorm of queries and keys per head, before the encoding.
        rms_norm_eps: eps of every RMSNorm.
        transport: name of what moves queries to keys: "householder", "rotary" or "none", or one
            registered with `register_transport`.
        decay: name of what is added to scores along the route: "forget" or "none", or one
            registered with `register_decay`.
        direction_rank: householder: rank of the projection that w comes from; None for a full one.
        direction_conv_size: householder: width of the causal convolution on it; 0 for none.
        beta_max: householder: β = beta_max · sigmoid(…), in (0, 2]. At β = 2 a factor is a
            reflection, and a product of reflections tracks a state exactly; below 2, n swaps keep
            (beta_max − 1)ⁿ of it: 2 − 2⁻⁷ keeps 0.018 after 512 swaps. At 1 or below no factor
            has a negative eigenvalue and no state can be tracked. docs/algorithm.md §1.
        beta_bias_init: householder: where β's bias starts; 0 starts at β ≈ beta_max / 2.
        forget_bias_init: forget: where the gate's bias starts; 0 starts at a gate of 0.5.
        rope_theta: rotary: the base of the angles.
    """

    hidden_size: int = 768
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    value_head_dim: int | None = None
    qk_norm: bool = False
    rms_norm_eps: float = 1e-6
    transport: str = "householder"
    decay: str = "none"
    direction_rank: int | None = 32
    direction_conv_size: int = 3
    beta_max: float = 2.0
    beta_bias_init: float = 0.0
    forget_bias_init: float = 0.0
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        self.complete()

    def complete(self) -> None:
        """Fill in the sizes left None and check every field. Raises ValueError naming the field."""
        from path_attention.nn.encoding import DECAYS, TRANSPORTS

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
        if self.direction_rank is not None:
            check_integer("direction_rank", self.direction_rank, 1)
        check_integer("direction_conv_size", self.direction_conv_size, 0)
        check_positive("rms_norm_eps", self.rms_norm_eps)
        check_positive("rope_theta", self.rope_theta)
        check_positive("beta_max", self.beta_max)
        if self.beta_max > 2:
            raise ValueError(f"beta_max: expected a value in (0, 2], got {self.beta_max}")
        for name in ("beta_bias_init", "forget_bias_init"):
            if not isinstance(getattr(self, name), (int, float)):
                raise ValueError(f"{name}: expected a number, got {getattr(self, name)!r}")
        for name, registry in (("transport", TRANSPORTS), ("decay", DECAYS)):
            if getattr(self, name) not in registry:
                raise ValueError(
                    f"{name}: expected one of {sorted(registry)}, got {getattr(self, name)!r}"
                )
        if self.transport == "rotary" and self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even size with rotary, got {self.head_dim}")


def check_positive(name: str, value: object) -> None:
    """Raise ValueError, naming the field, unless the value is a number above 0."""
    if not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"{name}: expected a number above 0, got {value!r}")


def check_integer(name: str, value: object, lowest: int) -> None:
    """Raise ValueError, naming the field, unless the value is an integer ≥ lowest."""
    if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
        raise ValueError(f"{name}: expected an integer of at least {lowest}, got {value!r}")
