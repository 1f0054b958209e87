"""How much a model computes for a batch, and how much its device could: FLOPs utilisation.

The model's own work, forward and backward (twice the forward), as in arXiv 2204.02311 appendix B:

    6 · (weights of linear layers) · T  +  3 · layers · HQ · (D + DV) · Σ L²

T tokens in documents of L tokens each. Causal attention computes half of L² scores, each by D and
DV multiply-adds of 2 operations. What is computed on top counts for nothing: activations computed
again, what encodings add (transport, gates, rotations), kernels' second looks. So an encoding's
cost shows as a lower utilisation than RoPE's.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

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


class ModelFlops:
    """Counts a model's work; make it before the model is spread over processes.

    Args:
        model: whose `nn.Linear` weights count; the embedding's lookup computes nothing.
        attention: layers · HQ · (D + DV) of its configuration.
    """

    def __init__(self, model: nn.Module, attention: int) -> None:
        layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
        self.weights = sum(layer.weight.numel() for layer in layers)
        self.attention = attention

    def of(self, lengths: Iterable[int]) -> float:
        """Forward and backward over documents of these lengths."""
        lengths = list(lengths)
        scores = 3.0 * self.attention * sum(length * length for length in lengths)
        return 6.0 * self.weights * sum(lengths) + scores


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """What the device can do a second in this dtype; None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for known, peaks in _PEAKS.items():
        if known in name:
            return peaks[dtype == torch.float32]
    return None
