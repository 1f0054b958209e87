"""Configuration of the language models."""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any

from transformers import PreTrainedConfig

from path_attention.models.presets import PRESETS
from path_attention.nn.configuration import (
    AttentionConfig,
    check_bool,
    check_integer,
    check_positive,
)


class PathAttentionConfig(AttentionConfig, PreTrainedConfig):
    """A decoder-only language model: the attention layer's fields (`AttentionConfig`) and these.

    Attributes:
        vocab_size: rows of the embedding, and of a layer's table of angles.
        intermediate_size: width of the SwiGLU; None for 8/3 · hidden_size, rounded up to a multiple
            of 64 (the parameters of an ungated layer of ratio 4).
        num_hidden_layers: number of blocks.
        initializer_range: standard deviation of the weights at the start.
        tie_word_embeddings: the output projection is the embedding.
        max_position_embeddings: the context trained at, for tools that ask; nothing depends on it
            and no length is refused.
        nope_layers: numbers of the layers (from 0) without RoPE: their transport is "none" whatever
            the others', "householder" beside "rotary_householder".
        use_cache: whether a forward outside training returns a cache when not told.
        pad_token_id, bos_token_id, eos_token_id: as in transformers.
    """

    model_type = "path_attention"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012

    intermediate_size: int | None = None
    num_hidden_layers: int = 12
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 4096
    nope_layers: list[int] | None = None
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.rotation_angles == "learned" and self.transport != "accumulated_rotation":
            # The default once, in every file: where nothing reads it, it says nothing.
            self.rotation_angles = type(self).rotation_angles
        self.complete()
        if self.intermediate_size is None:
            self.intermediate_size = -(-8 * self.hidden_size // (3 * 64)) * 64
        for name in ("intermediate_size", "num_hidden_layers", "max_position_embeddings"):
            check_integer(name, getattr(self, name), 1)
        check_positive("initializer_range", self.initializer_range)
        for name in ("tie_word_embeddings", "use_cache"):
            check_bool(name, getattr(self, name))
        self._check_places()
        PreTrainedConfig.__post_init__(self, **kwargs)

    def _check_places(self) -> None:
        """Layers and tokens that are named by their numbers."""
        if not isinstance(self.nope_layers, (list, tuple, type(None))):
            raise ValueError(f"nope_layers: expected a list of numbers, got {self.nope_layers!r}")
        for number in self.nope_layers or ():
            if not _is_below(number, self.num_hidden_layers):
                raise ValueError(
                    f"nope_layers: expected numbers below num_hidden_layers = "
                    f"{self.num_hidden_layers}, got {number!r}"
                )
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            value = getattr(self, name)
            for token in value if isinstance(value, (list, tuple)) else [value]:
                if token is not None and not _is_below(token, self.vocab_size):
                    raise ValueError(
                        f"{name}: expected a token below vocab_size = {self.vocab_size}, "
                        f"got {token!r}"
                    )

    @property
    def layer_types(self) -> list[str]:
        """The kind of each layer's cache, by which transformers builds one."""
        return ["path_attention"] * self.num_hidden_layers

    def of_layer(self, number: int) -> PathAttentionConfig:
        """The configuration that layer `number` is made by."""
        if number not in (self.nope_layers or ()):
            return self
        config = copy.copy(self)
        kept = self.transport == "rotary_householder"
        config.transport = "householder" if kept else "none"
        return config

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> PathAttentionConfig:
        """The configuration of a named encoding (`presets.PRESETS`), with other fields as given.

        Raises ValueError on an unknown name or field.
        """
        if name not in PRESETS:
            raise ValueError(f"name: expected one of {sorted(PRESETS)}, got {name!r}")
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(overrides) - known)
        if unknown:
            raise ValueError(f"overrides: expected fields of {cls.__name__}, got {unknown}")
        return cls(**{**PRESETS[name], **overrides})


def _is_below(number: object, end: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < end
