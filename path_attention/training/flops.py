"""How much a model computes for a batch, and how much its device could: FLOPs utilisation.

The model's own work, forward and backward (twice the forward), as in arXiv 2204.02311 appendix B:

    6 · (weights of linear layers) · T  +  3 · layers · HQ · (D + DV) · Σ L²

T tokens in documents of L tokens each. Causal attention computes half of L² scores, each by D and
DV multiply-adds of 2 operations. What is computed on top counts for nothing: activations computed
again, what encodings add (transport, gates, rotations), kernels' second looks. So an encoding's
cost shows as a lower utilisation than RoPE's. A frozen weight has no gradient, which leaves 4 of
the 6; another objective says what it computes (`Objective.flops`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from path_attention.models import PathAttentionConfig

# dense matrix products a second without sparsity, as the vendors state them: 16 bits, float32
_PEAKS = {
    "H200": (989e12, 67e12),
    "H100 PCIe": (756e12, 51e12),
    "H100": (989e12, 67e12),
    "B200": (2250e12, 75e12),
    "A100": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "RTX 4090": (165e12, 82.6e12),
}


@dataclass(frozen=True)
class ModelFlops:
    """What a batch costs.

    Attributes:
        token: of linear layers, for each token.
        scores: of attention, for each document's squared length.
    """

    token: float
    scores: float

    def of(self, lengths: Iterable[int]) -> float:
        """FLOPs on documents of these lengths."""
        lengths = list(lengths)
        return self.token * sum(lengths) + self.scores * sum(length * length for length in lengths)

    def __add__(self, other: ModelFlops) -> ModelFlops:
        return ModelFlops(self.token + other.token, self.scores + other.scores)


def forward_flops(model: nn.Module, attention: int) -> ModelFlops:
    """Of a forward pass: its `nn.Linear` weights; the embedding's lookup computes nothing.

    Args:
        attention: layers · HQ · (D + DV), `attention_size` of its configuration.
    """
    weights = sum(weight.numel() for weight in linear_weights(model).values())
    return ModelFlops(2.0 * weights, 1.0 * attention)


def training_flops(model: nn.Module, attention: int) -> ModelFlops:
    """Forward and backward: gradients of every layer's input, and of the weights that train."""
    weights = linear_weights(model).values()
    back = sum(weight.numel() * (1 + weight.requires_grad) for weight in weights)
    return forward_flops(model, attention) + ModelFlops(2.0 * back, 2.0 * attention)


def linear_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weight of each `nn.Linear`, by the module's name."""
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    return {name: layer.weight for name, layer in layers}


def attention_size(config: PathAttentionConfig) -> int:
    """layers · HQ · (D + DV)."""
    sizes = cast(int, config.head_dim) + cast(int, config.value_head_dim)
    return config.num_hidden_layers * config.num_attention_heads * sizes


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """What the device can do a second in this dtype; None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for known, peaks in _PEAKS.items():
        if known in name:
            return peaks[dtype == torch.float32]
    return None
