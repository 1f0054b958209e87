"""RoPE's frequencies, as a configuration has them."""

from __future__ import annotations

import torch
from torch import Tensor

from path_attention.nn.configuration import AttentionConfig
from path_attention.ops.rotation import Rotation


class Frequencies:
    """RoPE's angle a step of each pair: rope_theta^(−2n/D), or `rope_frequencies`."""

    def __init__(self, config: AttentionConfig) -> None:
        self.theta, given = config.rope_theta, config.rope_frequencies
        # on the host whatever torch's default device is: a model made on meta keeps its numbers
        self.given = (
            None if given is None else torch.tensor(given, dtype=torch.float64, device="cpu")
        )

    def rotation(self, q: Tensor, positions: Tensor, share: float | Tensor = 1.0) -> Rotation:
        """By `share` · position · frequency, at positions `[B, T]`, for queries and keys like q
        `[B, T, HQ, D]`."""
        half = q.shape[-1] // 2
        dtype = torch.promote_types(q.dtype, torch.float32)
        frequencies = self.a_step(half, q.new_empty((), dtype=dtype))
        angles = positions[:, :, None].to(dtype) * (frequencies * share)
        return Rotation.by(angles[:, :, None])

    def a_step(self, half: int, like: Tensor) -> Tensor:
        """The angle a step of each pair `[half]`, in the dtype and on the device of `like`."""
        if self.given is None:
            exponents = torch.arange(half, dtype=like.dtype, device=like.device) / -half
            return torch.pow(self.theta, exponents)
        return self.given.to(like.device, like.dtype, non_blocking=True)
