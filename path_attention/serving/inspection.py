"""Look at one prediction: what each head attends, and what its scores are made of.

One row of the attention of one layer, computed again from what the layer itself projects. Queries,
keys, directions and gates are the layer's own; the row is theirs in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from path_attention.models import PathAttentionForCausalLM
from path_attention.nn.attention import Attention, count_positions
from path_attention.nn.encoding import (
    AccumulatedRotation,
    Chunk,
    DeltaRule,
    Householder,
    NoTransport,
    Rotary,
    RotaryHouseholder,
)
from path_attention.nn.normalizer import Linear, Softmax, StickBreaking
from path_attention.ops.arguments import LOWEST_LOG_FORGET, unit_directions
from path_attention.ops.rotation import Rotation

_BLOCK = 64  # tokens whose factors are applied at once
_BANDS = (0, 1, 8, 64, 512, 4096, 32768)  # distances where a band of `masses` starts
_ISOMETRIES = (NoTransport, Rotary, AccumulatedRotation, Householder, DeltaRule)


@dataclass(frozen=True)
class Inspection:
    """The row of the query that predicts a token, over the keys j up to the query's own place i.

        logit_j = match_j + decay_j
        match_j = scale · k_jᵀ H_{j+1} ⋯ H_i q_i,   decay_j = Σ_{t=j+1..i} log_forget_t

    Everything is float64 `[HQ, i + 1]`, on the CPU. With rotations, the route's product of H is the
    rotation between j and i. With the normalizer "linear" there is no logit: the weight itself is
    match · exp(decay).

    Attributes:
        position: the place of the token that is predicted; the query stands at i = position − 1.
        layer: the number of the layer, from 0.
        normalizer: "softmax", "stick_breaking" or "linear".
        weights: what the layer's (moved) values are summed with. Softmax: positive, their sum is 1;
            stick-breaking: at most 1, 0 at the query's own place; linear: of either sign.
        match: the match over the transported route.
        untransported: scale · q_i · k_j, as it would be with nothing moved.
        decay: at most 0; 0 without a decay.
        left: stick-breaking: the share of the stick that later keys left to j; None otherwise.
        norm: ‖H_{j+1} ⋯ H_i q_i‖ / ‖q_i‖, what is left of the query at j; None for a transport
            whose moves this module does not know.
        cosine: of the angle between H_{j+1} ⋯ H_i q_i and q_i, 0 where nothing is left; or None.
    """

    position: int
    layer: int
    normalizer: str
    weights: Tensor
    match: Tensor
    untransported: Tensor
    decay: Tensor
    left: Tensor | None
    norm: Tensor | None
    cosine: Tensor | None

    @property
    def logit(self) -> Tensor | None:
        """match + decay; None with the normalizer "linear"."""
        return None if self.normalizer == "linear" else self.match + self.decay

    def masses(self) -> list[dict[str, Any]]:
        """Each head's share of Σ |weight| by distance i − j, in bands from 0, 1, 8, 64, … on."""
        size = self.weights.abs().flip(-1)
        total = size.sum(-1, keepdim=True)
        share = torch.where(total > 0, size / total, 0.0)
        bands = []
        for start, stop in zip(_BANDS, (*_BANDS[1:], size.shape[-1]), strict=True):
            if start < size.shape[-1]:
                last = min(stop, size.shape[-1]) - 1
                mass = share[:, start : last + 1].sum(-1).tolist()
                bands.append({"from": start, "to": last, "shares": mass})
        return bands

    def largest(self, head: int, count: int) -> list[dict[str, float]]:
        """The `count` keys of the largest |weight| of a head, with each part of their score."""
        found = self.weights[head].abs().topk(min(count, self.position)).indices.tolist()
        columns = {
            "weight": self.weights,
            "match": self.match,
            "untransported": self.untransported,
            "decay": self.decay,
            "logit": self.logit,
            "left": self.left,
        }
        return [
            {"position": j}
            | {name: float(x[head, j]) for name, x in columns.items() if x is not None}
            for j in found
        ]

    def curves(self, points: int) -> dict[str, Any]:
        """norm, cosine and decay `[HQ][≤ points]` by distance, at distances spread by their log."""
        span = self.position
        spread = torch.logspace(0, 1, points, base=span, dtype=torch.float64) - 1
        distances = sorted({0, *spread.round().long().clamp(0, span - 1).tolist()})
        curves: dict[str, Any] = {"distances": distances}
        for name, x in (("norm", self.norm), ("cosine", self.cosine), ("decay", self.decay)):
            curves[name] = None if x is None else x.flip(-1)[:, distances].tolist()
        return curves


@torch.inference_mode()
def inspect_token(
    model: nn.Module, token_ids: Sequence[int], position: int, layer: int
) -> Inspection:
    """What each head of a layer does for the prediction of token `position`.

    Runs the model's first layers on the tokens before it, then one row of the layer's attention:
    O(T · D²) a head beyond the layers themselves, memory linear in T.

    Args:
        model: a `PathAttentionForCausalLM` of any encoding, any dtype, on one device.
        token_ids: the sequence; what comes after `position` is not read.
        position: the place of the token in it, at least 1: the query that predicts it stands one
            place before.
        layer: the number of the layer, from 0.

    Raises:
        ValueError: naming the argument, what came, and what was expected; also for scores that are
            not finite, and for a normalizer that is not of this package.
    """
    attention, x, chunk = _layer_input(*_check(model, token_ids, position, layer))
    q, k, v = attention.project(x)
    moved = attention.transport(x, q, k, v, chunk)
    log_forget = attention.decay(x, chunk)
    transport, H = attention.transport, attention.kv_heads
    query, moved_query = (_row(y[:, -1]).unflatten(0, (H, -1)) for y in (q, moved.q))  # [H, G, D]
    keys = _row(moved.k)
    if moved.w is not None and moved.beta is not None:
        w = cast(Tensor, unit_directions(moved.w))
        shape = (*keys.shape[:2], -1)
        route = _walk(
            moved_query, _row(w).reshape(*shape, keys.shape[2]), _row(moved.beta).reshape(shape)
        )
    else:
        route = moved_query.expand(position, *moved_query.shape)
    plain_keys = keys if isinstance(transport, DeltaRule) else _row(k)
    match = attention.scale * torch.einsum("jhgd,jhd->hgj", route, keys).flatten(0, 1)
    plain = attention.scale * torch.einsum("hgd,jhd->hgj", query, plain_keys).flatten(0, 1)
    decay = torch.zeros_like(match)
    if log_forget is not None:
        decay = _sum_after(_row(log_forget).clamp(min=LOWEST_LOG_FORGET).T)
    normalizer, weights, left = _weigh(attention.normalizer, match, decay)
    if not weights.isfinite().all():
        raise ValueError(f"layer: expected finite scores, layer {layer} has some that are not")
    norm = cosine = None
    if isinstance(transport, _ISOMETRIES):
        seen = _as_keys(attention, x, q, v, chunk)
        norm, cosine = _coherence(route, seen)
    return Inspection(position, layer, normalizer, weights, match, plain, decay, left, norm, cosine)


def _check(
    model: nn.Module, token_ids: Sequence[int], position: int, layer: int
) -> tuple[PathAttentionForCausalLM, list[int], int]:
    """The model, the tokens before `position`, and the layer's number."""
    if not isinstance(model, PathAttentionForCausalLM):
        raise ValueError(
            f"model: expected a PathAttentionForCausalLM, whose layers can be looked into, "
            f"got {type(model).__name__}"
        )
    numbers = {
        "position": (position, 1, len(token_ids)),
        "layer": (layer, 0, len(model.model.layers)),
    }
    for name, (value, low, high) in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value < high:
            raise ValueError(
                f"{name}: expected an integer of at least {low} and below {high}, got {value!r}"
            )
    before, rows = list(token_ids[:position]), model.config.vocab_size
    for token in before:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < rows:
            raise ValueError(f"token_ids: expected integers from 0 to {rows - 1}, got {token!r}")
    return model, before, layer


def _layer_input(
    model: PathAttentionForCausalLM, token_ids: list[int], layer: int
) -> tuple[Attention, Tensor, Chunk]:
    """A layer's attention and what it is called with for this sequence."""
    ids = torch.tensor([token_ids], device=model.device)
    x = model.model.embed_tokens(ids)
    positions = count_positions(x, None, None)
    for number, block in enumerate(model.model.layers):
        if number == layer:
            break
        x = block(x, positions, token_ids=ids)
    block: Any = model.model.layers[layer]
    return block.attention, block.attention_norm(x), Chunk(positions, ids)


def _row(x: Tensor) -> Tensor:
    """The batch's only row, in float64 on the CPU: short work that no kernel's rounding touches."""
    return x[0].cpu().double()


def _walk(q: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    """The query at each token of its route: out[j] = H_{j+1} ⋯ H_i q, out[i] = q.

    q `[H, G, D]`, w `[i + 1, H, n, D]`, beta `[i + 1, H, n]` → `[i + 1, H, G, D]`. In a block, what
    factor f takes off is c_f w_f with c_f = β_f w_f · (q − Σ_{g>f} c_g w_g): a triangular system.
    """
    route = q.new_empty(len(w), *q.shape)
    for stop in range(len(w), 0, -_BLOCK):
        start = max(0, stop - _BLOCK)
        W = w[start:stop].transpose(0, 1).flatten(1, 2)  # [H, tokens · n, D]
        strength = beta[start:stop].transpose(0, 1).flatten(1, 2)[..., None]
        c = torch.linalg.solve_triangular(
            strength * (W @ W.mT), strength * (W @ q.mT), upper=True, unitriangular=True
        )
        taken = (c[..., None] * W[:, :, None]).unflatten(1, (stop - start, -1)).sum(2)
        taken = taken.flip(1).cumsum(1).flip(1)  # by this token's factors and the later ones'
        route[stop - 1] = q
        route[start : stop - 1] = (q[:, None] - taken[:, 1:]).transpose(0, 1)
        q = q - taken[:, 0]
    return route


def _sum_after(x: Tensor) -> Tensor:
    """out[…, j] = Σ_{t>j} x[…, t]."""
    return F.pad(x[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)


def _weigh(
    normalizer: nn.Module, match: Tensor, decay: Tensor
) -> tuple[str, Tensor, Tensor | None]:
    """The normalizer's name, its weights `[HQ, i + 1]`, and for stick-breaking what was left."""
    if isinstance(normalizer, Softmax):
        return "softmax", (match + decay).softmax(-1), None
    if isinstance(normalizer, Linear):
        return "linear", match * decay.exp(), None
    if not isinstance(normalizer, StickBreaking):
        raise ValueError(
            "layer: expected one with the normalizer softmax, stick_breaking or linear, "
            f"got {type(normalizer).__name__}"
        )
    others = match[:, :-1]  # the query's own key is left out
    left = _sum_after(F.pad(F.logsigmoid(-others), (0, 1))).exp()
    return "stick_breaking", F.pad(others.sigmoid(), (0, 1)) * left, left


def _as_keys(attention: Attention, x: Tensor, q: Tensor, v: Tensor, chunk: Chunk) -> Tensor:
    """The unmoved query in the frame of each key: q_i moved as a key at j is, `[i + 1, H, G, D]`.

    Where keys are turned, a key of ones and zeros shows by which angles.
    """
    T, H, D = x.shape[1], attention.kv_heads, attention.head_dim
    query = _row(q[:, -1])
    if not isinstance(attention.transport, (Rotary, AccumulatedRotation, RotaryHouseholder)):
        return query.unflatten(0, (H, -1)).expand(T, -1, -1, -1)
    dtype = torch.promote_types(q.dtype, torch.float32)
    probe = (torch.arange(D, device=x.device) < D // 2).to(dtype).expand(1, T, H, D)
    turned = attention.transport(x, q, probe, v, chunk).k
    cos, sin = turned.cpu().double().chunk(2, -1)
    return Rotation(cos, sin).turn(query.expand(1, T, -1, -1))[0].unflatten(1, (H, -1))


def _coherence(route: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """norm and cosine `[HQ, i + 1]` of the transported query beside the unmoved one."""
    size = route.norm(dim=-1)
    norm = torch.where(size[-1] > 0, size / size[-1], 0.0)
    both = size * seen.norm(dim=-1)
    cosine = torch.where(both > 0, (route * seen).sum(-1) / both, 0.0)
    return tuple(y.permute(1, 2, 0).flatten(0, 1) for y in (norm, cosine))  # pyright: ignore
