"""Many models of one shape as one: a batched product in place of each product.

Models of a synthetic task are so small that a device waits for its launches, not for its work. Here
R models that differ in their parameters alone become one whose rows are R·B: replica r reads rows
r·B to (r+1)·B. The attention operators see nothing but a larger batch, so they need no batching
rule and run as they are; only what holds parameters is replaced.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from path_attention.models import PathAttentionForCausalLM
from path_attention.nn.angles import AngleTable
from path_attention.nn.encoding import Chunk, Householder, Moved
from path_attention.nn.normalization import Float32Linear, RMSNorm
from path_attention.ops.directions import householder_directions

_ALIGNMENT = 16  # floats; where each parameter starts in the flat storage


class ReplicatedLinear(nn.Module):
    """y_r = x_r W_rᵀ + b_r: x `[R·B, …, in]`, weight `[R, out, in]`, bias `[R, out]` or None.

    Of a `Float32Linear` it computes in float32, autocast or not.
    """

    def __init__(self, layer: nn.Linear, count: int) -> None:
        super().__init__()
        self.count = count
        self.in_float32 = isinstance(layer, Float32Linear)
        self.weight = nn.Parameter(_stack_of(layer.weight, count))
        self.bias = None if layer.bias is None else nn.Parameter(_stack_of(layer.bias, count))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(self.count, -1, x.shape[-1])
        if self.in_float32:
            with torch.autocast(x.device.type, enabled=False):
                y = self._product(rows.to(self.weight.dtype))
        else:
            y = self._product(rows)
        return y.view(*x.shape[:-1], -1)

    def _product(self, rows: Tensor) -> Tensor:
        if self.bias is None:
            return torch.bmm(rows, self.weight.mT)
        return torch.baddbmm(self.bias[:, None], rows, self.weight.mT)


class ReplicatedEmbedding(nn.Module):
    """Rows of weight `[R, V, C]` by tokens `[R·B, T]`.

    A product with one-hot rows: exact forward, and a backward without scattered atomics; tasks
    have few tokens.
    """

    def __init__(self, layer: nn.Embedding, count: int) -> None:
        super().__init__()
        self.count = count
        self.weight = nn.Parameter(_stack_of(layer.weight, count))

    def forward(self, tokens: Tensor) -> Tensor:
        V, C = self.weight.shape[1:]
        hot = tokens.reshape(self.count, -1, 1) == torch.arange(V, device=tokens.device)
        with torch.autocast(tokens.device.type, enabled=False):
            return torch.bmm(hot.to(self.weight.dtype), self.weight).view(*tokens.shape, C)


class ReplicatedRMSNorm(nn.Module):
    """`RMSNorm` of x `[R·B, …, C]` with weight `[R, C]`."""

    def __init__(self, layer: RMSNorm, count: int) -> None:
        super().__init__()
        self.count, self.eps = count, layer.eps
        self.weight = nn.Parameter(_stack_of(layer.weight, count))

    def forward(self, x: Tensor) -> Tensor:
        C = x.shape[-1]
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            y = F.rms_norm(x.to(dtype), (C,), None, self.eps)
            y = y.reshape(self.count, -1, C) * self.weight.to(dtype)[:, None]
        return y.view(x.shape).to(x.dtype)


class ReplicatedHouseholder(nn.Module):
    """`Householder` whose replicas lie side by side in the channels of its convolution.

    Its projections are replicated on their own. Training alone: it keeps nothing between chunks.
    """

    def __init__(self, layer: Householder, count: int) -> None:
        super().__init__()
        self.count = count
        self.heads, self.householders = layer.heads, layer.householders
        self.beta_max = layer.beta_max
        self.w_proj, self.beta_proj = layer.w_proj, layer.beta_proj
        taps = layer.w_conv
        self.w_conv = None if taps is None else nn.Parameter(_stack_of(taps, count))

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, chunk: Chunk) -> Moved:
        if chunk.packing is not None:
            raise ValueError("packing: expected None with replicas, got borders")
        beta = self.beta_max * self.beta_proj(x).sigmoid()
        y = self.w_proj(x)
        heads = self.heads * self.householders
        if self.w_conv is None:
            w = householder_directions(y, None, heads)
        else:
            R, (T, C) = self.count, y.shape[1:]
            y = y.view(R, -1, T, C).permute(1, 2, 0, 3).reshape(-1, T, R * C)
            w = householder_directions(y, self.w_conv.flatten(0, 1), R * heads)
            w = w.unflatten(2, (R, heads)).permute(2, 0, 1, 3, 4).flatten(0, 1)
        if self.householders > 1:
            w, beta = (z.unflatten(2, (self.heads, self.householders)) for z in (w, beta))
        return Moved(q, k, v, w, beta)


class Replicas:
    """R models as one, their parameters in one storage.

    Attributes:
        model: takes tokens `[R·B, T]`.
        flat: `[R, size]` float32: row r is every parameter of replica r, each aligned.
        parameters: of `model`, `[R, …]` each; views of `flat`.
        gradient: like `flat`; `gradients` are its views, in the order of `parameters`.
        decayed: `[size]`, 1 for parameters that weight decay is for: those of 2 dimensions or more.

    Args:
        models: of one configuration, apart from how their parameters started.
        device: where they go.

    Raises:
        ValueError: on tied embeddings or a module with parameters that has no replicated form.
    """

    def __init__(
        self, models: Sequence[PathAttentionForCausalLM], device: torch.device | str
    ) -> None:
        self.count = len(models)
        self.names = [name for name, _ in models[0].named_parameters()]
        states = [model.state_dict() for model in models]
        if len(self.names) != len(states[0]):
            raise ValueError("models: expected untied embeddings and no buffers in replicas")
        self.model = _replicate(copy.deepcopy(models[0]), self.count)
        cast(nn.Module, self.model).to(device)
        shapes = [states[0][name].shape for name in self.names]
        starts, size = [], 0
        for shape in shapes:
            starts.append(size)
            size += -(-shape.numel() // _ALIGNMENT) * _ALIGNMENT
        self.flat = torch.zeros(self.count, size, device=device)
        self.gradient = torch.zeros_like(self.flat)
        self.decayed = torch.zeros(size, device=device)
        self.parameters: list[nn.Parameter] = []
        self.gradients: list[Tensor] = []
        for name, shape, start in zip(self.names, shapes, starts, strict=True):
            piece = slice(start, start + shape.numel())
            view = self.flat[:, piece].view(self.count, *shape)
            view.copy_(torch.stack([state[name] for state in states]))
            owner, _, attribute = name.rpartition(".")
            parameter = nn.Parameter(view)
            setattr(self.model.get_submodule(owner), attribute, parameter)
            self.parameters.append(parameter)
            self.gradients.append(self.gradient[:, piece].view(self.count, *shape))
            self.decayed[piece] = float(len(shape) >= 2)

    def state_dict(self, replica: int) -> dict[str, Tensor]:
        """The parameters of one replica, for a model of its own."""
        pairs = zip(self.names, self.parameters, strict=True)
        return {name: p.detach()[replica].clone().cpu() for name, p in pairs}

    def logits(self, tokens: Tensor) -> Tensor:
        """tokens `[R·B, T]` → `[R·B, T, vocab_size]`."""
        return self.model(input_ids=tokens, use_cache=False).logits


def _replicate(model: PathAttentionForCausalLM, count: int) -> PathAttentionForCausalLM:
    """The model, every module that holds parameters replaced."""
    for name, module in list(model.named_modules()):
        if not list(module.parameters(recurse=False)) and not isinstance(module, Householder):
            continue
        for kind, replicated in _KINDS.items():
            if type(module) is kind:
                owner, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(owner), attribute, replicated(module, count))
                break
        else:
            raise ValueError(
                f"encoding: expected modules with a replicated form, {name} is a "
                f"{type(module).__name__}"
            )
    return model


_KINDS: dict[type, type] = {
    # The transport comes before the projections inside it, which it hands on.
    Householder: ReplicatedHouseholder,
    nn.Linear: ReplicatedLinear,
    Float32Linear: ReplicatedLinear,
    nn.Embedding: ReplicatedEmbedding,
    AngleTable: ReplicatedEmbedding,
    RMSNorm: ReplicatedRMSNorm,
}


def _stack_of(x: Tensor, count: int) -> Tensor:
    return torch.empty(count, *x.shape, dtype=x.dtype)
