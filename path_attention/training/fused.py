"""Kernels of the liger-kernel library in place of a model's own code, where they were asked for.

RMSNorm, SwiGLU, and the output head together with its loss, which then never writes logits down.
"""

from __future__ import annotations

import importlib
import types
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from path_attention.models.modeling import SwiGLU, count_targets
from path_attention.nn.normalization import RMSNorm


def use_fused_kernels(model: nn.Module, device: torch.device) -> None:
    """Make a language model's modules call the kernels; before it is compiled or spread.

    The model can still be trained, checkpointed and exported as before: its parameters stay as they
    are. With labels its forward returns the loss alone, without logits.

    Raises:
        ValueError: the device is not CUDA, or liger-kernel is not installed.
    """
    if device.type != "cuda":
        raise ValueError(f"fused: expected False on {device.type}, got True: its kernels need CUDA")
    try:
        kernels = importlib.import_module("liger_kernel.transformers.functional")
    except ImportError as error:
        raise ValueError(
            f"fused: expected liger-kernel to be installed (`pip install '.[fused]'`), got {error}"
        ) from error
    replace_modules(model, kernels)


def replace_modules(model: nn.Module, kernels: Any) -> None:
    """The same with these functions: liger_rms_norm, liger_swiglu,
    liger_fused_linear_cross_entropy."""
    for module in model.modules():
        if isinstance(module, RMSNorm):
            _replace(module, _rms_norm, kernels)
        elif isinstance(module, SwiGLU):
            _replace(module, _swiglu, kernels)
    _replace(model, _with_loss, kernels)


def _replace(module: nn.Module, forward: Any, kernels: Any) -> None:
    object.__setattr__(module, "_kernels", kernels)
    object.__setattr__(module, "_own_forward", module.forward)
    module.forward = types.MethodType(forward, module)


def _rms_norm(self: Any, x: Tensor) -> Tensor:
    # "gemma": everything in float32, as `RMSNorm`; the weight is no offset from 1 here
    return self._kernels.liger_rms_norm(x, self.weight, self.eps, 0.0, "gemma", False)


def _swiglu(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(self._kernels.liger_swiglu(self.gate_proj(x), self.up_proj(x)))


def _with_loss(
    self: Any,
    *,
    labels: Tensor | None = None,
    num_items_in_batch: float | Tensor | None = None,
    packing: Any = None,
    split: Any = None,
    **inputs: Any,
) -> Any:
    if labels is None or inputs.get("attention_mask") is not None:
        return self._own_forward(
            labels=labels,
            num_items_in_batch=num_items_in_batch,
            packing=packing,
            split=split,
            **inputs,
        )
    x = self.model(packing=packing, split=split, **inputs).last_hidden_state
    if packing is not None:
        starts = packing.position_ids()[None].to(labels.device) == 0
        labels = labels.masked_fill(starts, -100)
    if split is None:
        x, labels = x[:, :-1], labels[:, 1:]
    x, targets, weight = x.flatten(0, 1), labels.flatten(), self.lm_head.weight
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    loss = self._kernels.liger_fused_linear_cross_entropy(
        x, weight, targets, reduction="sum", accum_dtype=torch.float32
    )
    divisor = count_targets(targets, split) if num_items_in_batch is None else num_items_in_batch
    return CausalLMOutputWithPast(loss=loss.float() / divisor)
