"""Layers that compute in float32 whatever dtype they are cast to."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """weight ⊙ x / sqrt(mean(x²) + eps) over the last dimension.

    Computes in float32 (float64 for a float64 x), autocast or not; returns x's dtype.
    """

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x `[…, size]` in any floating dtype → the same shape and dtype."""
        weight, shape = self.weight, self.weight.shape
        with torch.autocast(x.device.type, enabled=False):
            if weight.dtype == x.dtype:  # of 16 bits too PyTorch takes float32 inside
                return F.rms_norm(x, shape, weight, self.eps)
            dtype = torch.promote_types(x.dtype, torch.float32)
            return F.rms_norm(x.to(dtype), shape, weight.to(dtype), self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class Float32Linear(nn.Linear):
    """A linear layer that computes and returns float32 (float64 for a float64 x), autocast or not.

    For small projections whose rounding adds up along the sequence: strengths and gates.
    The bias starts at `bias_init`.
    """

    def __init__(self, in_features: int, out_features: int, *, bias_init: float = 0.0) -> None:
        self.bias_init = bias_init
        super().__init__(in_features, out_features)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.bias, self.bias_init)

    def forward(self, input: Tensor) -> Tensor:
        dtype = torch.promote_types(input.dtype, torch.float32)
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.to(dtype), self.weight.to(dtype), self.bias.to(dtype))
