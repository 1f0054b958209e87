"""Where a converted model's w, β and gate start.

- near_zero: β = D / (2 · context), so that over a context of random directions a query keeps e^−½
  of its length (a step takes β (2 − β) / D of its square); gates of 1 − 1 / context. The student is
  the teacher without RoPE, all but a little.
- one: as in training from nothing: β near 1, gates near a half, their projections random.
- rope_decay: β and gates that imitate how the teacher's scores fall with distance, each head by
  itself, measured on text (`measure_decay`).
- exchange: near_zero, with the teacher's RoPE kept beside it: the student starts as the teacher,
  and training takes RoPE away (`StageRecipe.exchange`).

But for "one", projections of β and gates start at 0: each head starts with one β for all tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from path_attention.models import PathAttentionForCausalLM
from path_attention.nn import Attention, Chunk
from path_attention.nn.attention import count_positions
from path_attention.nn.encoding import Forget, Householder

StartRule = Literal["near_zero", "one", "rope_decay", "exchange"]
Directions = Literal["random", "keys"]
START_RULES: tuple[str, ...] = get_args(StartRule)
_DISTANCES = 40  # at which the decay is measured, in equal ratios
_FITS = 400  # strengths tried


@dataclass(frozen=True)
class Decay:
    """How one layer's scores fall with distance under RoPE.

    Attributes:
        distances: int64 `[N]`, in tokens.
        kept: `[HQ, N]`, the share of a score without RoPE that is left with it: the regression of
            one on the other through zero, over all pairs of tokens at a distance.
        scores: `[HQ, N]`, their mean score with RoPE.
    """

    distances: Tensor
    kept: Tensor
    scores: Tensor


@torch.no_grad()
def start_encoding(
    student: PathAttentionForCausalLM,
    rule: StartRule,
    *,
    context: int,
    directions: Directions = "random",
    teacher: PathAttentionForCausalLM | None = None,
    tokens: Tensor | None = None,
) -> None:
    """Start w, β and gate of every layer in place.

    Args:
        student: with the teacher's other weights.
        rule: by which β and gates start.
        context: tokens of the training to come.
        directions: "random" as in training from nothing; "keys": w is the token's own key after
            SiLU (its projection's best approximation of w's rank, and no convolution at first).
        teacher, tokens: for "rope_decay": a RoPE model and int64 `[1, T]` of text.

    Raises:
        ValueError: an unknown rule, or no teacher or text for one that measures.
    """
    if rule not in START_RULES:
        raise ValueError(f"start: expected one of {list(START_RULES)}, got {rule!r}")
    decays: Iterator[Decay | None]
    layers = [layer.attention for layer in _layers(student)]
    if rule == "rope_decay":
        if teacher is None or tokens is None:
            raise ValueError("teacher, tokens: expected both with start 'rope_decay', got None")
        decays = iter(measure_decay(teacher, tokens))
    else:
        decays = iter([None] * len(layers))
    for attention, decay in zip(layers, decays, strict=True):
        if isinstance(attention.transport, Householder):
            _start_strengths(attention, rule, context, decay)
            if directions == "keys":
                _start_from_keys(attention)
        if isinstance(attention.decay, Forget):
            _start_gates(attention, rule, context, decay)


def _layers(model: nn.Module) -> list[Any]:
    return list(model.model.layers)  # pyright: ignore


def _start_strengths(attention: Attention, rule: str, context: int, decay: Decay | None) -> None:
    transport: Any = attention.transport
    linear, size = transport.beta_proj, attention.head_dim
    if rule == "one":
        beta = torch.ones(())
    elif decay is None:
        beta = torch.tensor(min(1.0, size / (2 * context)))
    else:
        linear.weight.zero_()
        groups = decay.kept.unflatten(0, (attention.kv_heads, -1)).mean(1)
        beta = torch.stack([fit_strength(decay.distances, kept, size) for kept in groups])
        beta = beta.repeat_interleave(transport.householders) / transport.householders
    if rule != "one":
        linear.weight.zero_()
    share = (beta.double() / transport.beta_max).clamp(1e-6, 1 - 1e-6)
    linear.bias.copy_(torch.logit(share).to(linear.bias))


def _start_gates(attention: Attention, rule: str, context: int, decay: Decay | None) -> None:
    gates: Any = attention.decay
    linear = gates.forget_proj
    if rule == "one":
        linear.bias.zero_()
        return
    linear.weight.zero_()
    if decay is None:
        fall = torch.tensor(-math.log1p(-1 / context), dtype=torch.float64)
    else:
        fall = torch.stack([fit_fall(decay.distances, scores) for scores in decay.scores])
        fall = fall.clamp(min=1 / (8 * context))
    # scale · logsigmoid(bias) = −fall
    linear.bias.copy_(-torch.log(torch.expm1(fall / gates.scale)).to(linear.bias))


def _start_from_keys(attention: Attention) -> None:
    transport: Any = attention.transport
    if transport.householders != 1:
        raise ValueError(
            "directions: expected 'random' with several Householder factors a token, got 'keys'"
        )
    keys = attention.k_proj.weight
    if isinstance(transport.w_proj, nn.Linear):
        transport.w_proj.weight.copy_(keys)
    else:
        down, up = transport.w_proj
        left, values, right = torch.linalg.svd(keys.double(), full_matrices=False)
        rank = min(len(down.weight), len(values))
        roots = values[:rank].sqrt()
        down.weight.zero_()
        up.weight.zero_()
        down.weight[:rank] = (roots[:, None] * right[:rank]).to(keys)
        up.weight[:, :rank] = (left[:, :rank] * roots).to(keys)
    if transport.w_conv is not None:
        transport.w_conv.zero_()
        transport.w_conv[:, -1] = 1


def fit_strength(distances: Tensor, kept: Tensor, size: int) -> Tensor:
    """The β in [10⁻⁵, 1] whose random directions keep what RoPE keeps, by least squares.

    A random direction w takes E[β w wᵀ] = β / D of a query a step, so exp(−β · distance / D) of a
    score is left. distances `[N]`, kept `[N]` → float64 `[]`.
    """
    tried = torch.logspace(-5, 0, _FITS, dtype=torch.float64)
    left = torch.exp(-tried[:, None] * distances.double().cpu() / size)
    return tried[(left - kept.double().cpu()).square().sum(1).argmin()]


def fit_fall(distances: Tensor, scores: Tensor) -> Tensor:
    """How much a mean score falls a step, by least squares: float64 `[]`, negative if it rises."""
    x, y = distances.double().cpu(), scores.double().cpu()
    x = x - x.mean()
    return -(x * (y - y.mean())).sum() / x.square().sum()


@torch.no_grad()
def measure_decay(teacher: PathAttentionForCausalLM, tokens: Tensor) -> list[Decay]:
    """Each layer's `Decay` on a text, in one forward pass.

    Args:
        teacher: a RoPE model.
        tokens: int64 `[1, T]`; distances up to T / 2.

    Raises:
        ValueError: fewer than 8 tokens.
    """
    if tokens.dim() != 2 or tokens.shape[0] != 1 or tokens.shape[1] < 8:
        raise ValueError(f"tokens: expected [1, T] with T of at least 8, got {list(tokens.shape)}")
    found: list[Decay] = []

    def measure(attention: Attention, inputs: tuple[Tensor, ...]) -> None:
        found.append(_decay(attention, inputs[0]))

    hooks = [layer.attention.register_forward_pre_hook(measure) for layer in _layers(teacher)]
    try:
        teacher.model(input_ids=tokens.to(teacher.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _decay(attention: Attention, x: Tensor) -> Decay:
    """x `[1, T, hidden_size]`, the layer's input."""
    T = x.shape[1]
    q = attention.q_norm(attention.q_proj(x).unflatten(2, (attention.heads, -1)))
    k = attention.k_norm(attention.k_proj(x).unflatten(2, (attention.kv_heads, -1)))
    chunk = Chunk(count_positions(x, None, None))
    moved = attention.transport(x, q, k, k, chunk)
    ratio = (T // 2) ** (1 / (_DISTANCES - 1))
    distances = sorted({round(ratio**n) for n in range(_DISTANCES)})
    kept, scores = [], []
    for head in range(attention.heads):  # one at a time: T² scores each
        key = head // (attention.heads // attention.kv_heads)
        plain = q[0, :, head].float() @ k[0, :, key].float().T
        turned = moved.q[0, :, head].float() @ moved.k[0, :, key].float().T
        pairs = [(plain.diagonal(-n), turned.diagonal(-n)) for n in distances]
        kept.append(torch.stack([(a * b).sum() / a.square().sum() for a, b in pairs]))
        scores.append(torch.stack([b.mean() * attention.scale for _, b in pairs]))
    return Decay(torch.tensor(distances), torch.stack(kept).cpu(), torch.stack(scores).cpu())
