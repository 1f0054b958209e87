"""What `measure` sums up, written out: dense matrices, every pair of tokens, float64."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Inputs = dict[str, Tensor]


def make_inputs(
    T: int, HQ: int, H: int, D: int, kind: str, *, seed: int = 0, gate: bool = False
) -> Inputs:
    """Tensors for `Routes.of`, float64, one kind of transport."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    x = {"q": draw(T, HQ, D) + 1, "k": draw(T, H, D) + 1, "v": draw(T, H, D) + 1}
    if kind in ("householder", "two householders"):
        shape = (T, H, D) if kind == "householder" else (T, H, 2, D)
        x["w"] = F.normalize(draw(*shape), dim=-1)
        x["beta"] = 2 * torch.rand(shape[:-1], generator=rng, dtype=torch.float64)
    elif kind == "rotation":
        x["angles"] = 0.4 * draw(T, H, D // 2)
    elif kind == "matrices":
        x["matrices"] = torch.linalg.qr(draw(T, H, D, D))[0]
    if gate:
        x["log_forget"] = -0.2 * torch.rand(T, HQ, generator=rng, dtype=torch.float64)
    return x


def matrices(x: Inputs) -> Tensor:
    """M `[T, H, D, D]`."""
    (T, H, D), eye = x["k"].shape, torch.eye(x["k"].shape[2], dtype=torch.float64)
    if "matrices" in x:
        return x["matrices"]
    found = eye.expand(T, H, D, D).clone()
    for t in range(T):
        for h in range(H):
            if "w" in x:
                w, beta = x["w"][t, h].reshape(-1, D), x["beta"][t, h].reshape(-1)
                for each, b in zip(w, beta, strict=True):
                    found[t, h] = found[t, h] @ (eye - b * torch.outer(each, each))
            if "angles" in x:
                for n in range(D // 2):
                    c, s = math.cos(x["angles"][t, h, n]), math.sin(x["angles"][t, h, n])
                    m = n + D // 2
                    found[t, h, n, n], found[t, h, m, m] = c, c
                    found[t, h, n, m], found[t, h, m, n] = -s, s
    return found


def pairs(x: Inputs, i: int, head: int, *, moves_values: bool = False) -> list[dict[str, Any]]:
    """Each key j ≤ i of one query: distance, moved query there, scores, decay, value as it adds."""
    kv = head // (x["q"].shape[1] // x["k"].shape[1])
    M, D = matrices(x)[:, kv], x["q"].shape[2]
    q, route, decay = x["q"][i, head], torch.eye(D, dtype=torch.float64), 0.0
    found = []
    for j in range(i, -1, -1):
        k, v = x["k"][j, kv], x["v"][j, kv]
        found.append(
            {
                "distance": i - j,
                "query": q,
                "moved": route @ q,
                "score": float(k @ route @ q) * D**-0.5,
                "bare": float(k @ q) * D**-0.5,
                "decay": decay,
                "key": k,
                "value": route.T @ v if moves_values else v,
            }
        )
        route = M[j] @ route
        decay += float(x["log_forget"][j, head]) if "log_forget" in x else 0.0
    return found


def weights(found: list[dict[str, Any]], normalizer: str) -> list[float]:
    """Each key's weight, nearest first; of a linear layer with its sign."""
    if normalizer == "softmax":
        raw = [math.exp(p["score"] + p["decay"]) for p in found]
        return [w / sum(raw) for w in raw]
    if normalizer == "linear":
        return [p["score"] * math.exp(p["decay"]) for p in found]
    left, broken = 1.0, [0.0]
    for p in found[1:]:
        part = 1 / (1 + math.exp(-p["score"]))
        broken.append(left * part)
        left *= 1 - part
    return broken


def of_query(found: list[dict[str, Any]], near: int, normalizer: str) -> dict[str, float]:
    """The columns of a context row, of one query."""
    share = weights(found, normalizer)
    sizes = [abs(a) for a in share]
    far = [p["distance"] >= near for p in found]
    mass = sum(a for a, f in zip(sizes, far, strict=True) if f)
    values = [(a, p["value"]) for a, p, f in zip(share, found, far, strict=True) if f]
    norm = float(sum(a * v for a, v in values).norm())  # pyright: ignore
    length = sum(abs(a) * float(v.norm()) for a, v in values)
    square = math.sqrt(sum((a * float(v.norm())) ** 2 for a, v in values))
    row = {
        "far_keys": sum(far),
        "far_mass": mass / sum(sizes),
        "in_step": norm / length,
        "incoherent": square / length,
        "coherence": norm / square,
    }
    if normalizer == "softmax":
        logits = [p["score"] + p["decay"] for p in found]
        high = [x for x, f in zip(logits, far, strict=True) if not f]
        low = [x for x, f in zip(logits, far, strict=True) if f]
        row["spread"] = max(high) - min(low)
        row["bound"] = len(low) / (len(low) + len(high) * math.exp(row["spread"]))
        row["gap"] = _log_mean(high) - _log_mean(low)
        row["gap_most"] = max(high) - max(low)
    return row


def _log_mean(logits: list[float]) -> float:
    return math.log(sum(math.exp(x) for x in logits) / len(logits))
