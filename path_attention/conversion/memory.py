"""How much memory a conversion's stage takes on each device, told before it starts.

    weights          4 bytes a parameter
    what trains      12 bytes a parameter more: gradients, and AdamW's moments
    teacher          2 bytes a parameter in bfloat16, 4 in float32; its attention layers alone where
                     attention is matched
    activations      a token and layer: 20 · hidden + 4 · SwiGLU + 8 · (q, k, v, w) numbers of the
                     products' dtype; with checkpointing one float32 input of each layer, and one
                     layer's
    logits           copies of a chunk in float32, and the head's gradient

Spread by fsdp, weights, gradients, moments and the teacher are divided by the processes, but for
the teacher's attention layers where attention is matched; before that, weights and teacher are
whole on each device. Weights, gradients, moments and teacher are counts; activations are an
estimate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from path_attention.conversion.divergence import CHUNK
from path_attention.conversion.recipe import ConversionRecipe
from path_attention.conversion.teacher import is_attention, is_encoding
from path_attention.models import PathAttentionConfig, PathAttentionForCausalLM
from path_attention.training.processes import Processes, choose_precision


@dataclass(frozen=True)
class Estimate:
    """Bytes on one device.

    Attributes:
        states: weights, gradients, moments, teacher: at least these.
        activations: of one forward pass, and logits.
    """

    states: int
    activations: int

    @property
    def total(self) -> int:
        return self.states + self.activations

    def __str__(self) -> str:
        parts = f"{self.states / 2**30:.1f} GiB of states, {self.activations / 2**30:.1f} GiB of"
        return f"{self.total / 2**30:.1f} GiB ({parts} activations)"


def estimate_memory(
    config: PathAttentionConfig, recipe: ConversionRecipe, stage: str, processes: Processes
) -> Estimate:
    """Of one stage of a student by `config`."""
    chosen = getattr(recipe, stage)
    dtype = choose_precision(recipe.precision, processes.device)
    with torch.device("meta"):
        model = cast(nn.Module, PathAttentionForCausalLM(config))
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    whole = sum(sizes.values())
    attention = sum(n for name, n in sizes.items() if is_attention(name))
    encoding = sum(n for name, n in sizes.items() if is_encoding(name))
    trained = {"all": whole, "attention": attention, "encoding": encoding, "lora": encoding}
    trains = trained[chosen.trainable]
    if chosen.trainable == "lora":
        trains += _adapters(model, recipe)
    teacher = {"attention": attention - encoding, "logits": whole - encoding}.get(stage, 0)
    weights, kept, beside = 4 * whole, 4 * whole + 12 * trains, dtype.itemsize * teacher
    states = kept + beside
    if recipe.parallel == "fsdp":
        shared = states if stage != "attention" else kept
        states = max(weights + beside, shared // processes.count + states - shared)
    tokens = chosen.micro_batch_tokens or chosen.batch_tokens // processes.count
    activations = _activations(config, recipe, stage, tokens, dtype.itemsize)
    return Estimate(states, activations)


def check_memory(
    config: PathAttentionConfig, recipe: ConversionRecipe, processes: Processes
) -> dict[str, Estimate]:
    """The estimate of every stage that trains.

    Raises ValueError if the device has less than a stage takes. On a CPU nothing is refused: what
    is free there changes by the minute.
    """
    found = {name: estimate_memory(config, recipe, name, processes) for name, _ in recipe.stages()}
    if processes.device.type == "cuda" and recipe.check_memory:
        there = torch.cuda.get_device_properties(processes.device).total_memory
        for name, estimate in found.items():
            refuse_too_much(name, estimate, there)
    return found


def refuse_too_much(stage: str, estimate: Estimate, there: int) -> None:
    """Raise ValueError if a stage takes more than `there` bytes, with what would help."""
    if estimate.total > there:
        raise ValueError(
            f"{stage}: expected a device of at least {estimate}, got one of "
            f"{there / 2**30:.1f} GiB. Spread it (parallel fsdp), lower micro_batch_tokens, "
            "checkpoint activations, train less ('attention', 'lora'), or set check_memory to False"
        )


def _adapters(model: nn.Module, recipe: ConversionRecipe) -> int:
    return sum(
        recipe.lora.rank * sum(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in recipe.lora.matrices
    )


def _activations(
    config: PathAttentionConfig, recipe: ConversionRecipe, stage: str, tokens: int, size: int
) -> int:
    heads = config.num_attention_heads + 3 * cast(int, config.num_key_value_heads)
    mlp = 0 if stage == "attention" else 4 * cast(int, config.intermediate_size)
    layer = tokens * size * (20 * config.hidden_size + mlp + 8 * heads * cast(int, config.head_dim))
    layers = config.num_hidden_layers
    if recipe.activation_checkpointing:
        kept = layers * tokens * 4 * config.hidden_size + layer
    else:
        kept = layers * layer
    if stage == "attention":
        return kept
    made = tokens * config.vocab_size
    logits = 5 * 4 * min(CHUNK, made) if stage == "logits" else 3 * 4 * made
    return kept + logits + 4 * config.vocab_size * config.hidden_size
