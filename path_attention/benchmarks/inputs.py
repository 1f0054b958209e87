"""Inputs of the benchmarks: random ones, hard ones, and swaps whose answer is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from path_attention.ops.packing import Packing

_COSINE = 0.7
_SWAP_SCALE = 100.0  # softmax is then an argmax


class Inputs(NamedTuple):
    """q, k, v of the benchmark's dtype; w, β, gate in float32, None where there is none."""

    q: Tensor  # [B, T, HQ, D]
    k: Tensor  # [B, T, H, D]
    v: Tensor  # [B, T, H, DV]
    w: Tensor | None  # [B, T, H, D]
    beta: Tensor | None  # [B, T, H]
    log_forget: Tensor | None  # [B, T, HQ]
    packing: Packing | None = None
    scale: float | None = None

    @property
    def borders(self) -> Packing:
        """The packing, where there must be one."""
        if self.packing is None:
            raise ValueError("packing: expected packed documents, got None")
        return self.packing

    @property
    def encoding(self) -> str:
        """Of "path", "path_fox", "fox", "nope": the one that uses all that is here."""
        with_gate = self.log_forget is not None
        if self.w is None:
            return "fox" if with_gate else "nope"
        return "path_fox" if with_gate else "path"

    def leaves(self, change: Callable[[Tensor], Tensor] = lambda x: x) -> Inputs:
        """The same with every tensor changed, as leaves that require gradients."""
        changed = (None if x is None else change(x.detach()).requires_grad_() for x in self[:6])
        return Inputs(*changed, packing=self.packing, scale=self.scale)  # type: ignore[arg-type]

    def rounded(self, dtype: torch.dtype) -> Inputs:
        """Leaves with q, k, v in a dtype and the others in float32, as the layer makes them."""
        qkv = (x.to(dtype) for x in self[:3])
        others = (None if x is None else x.float() for x in self[3:6])
        return Inputs(*qkv, *others, self.packing, self.scale).leaves()  # type: ignore[arg-type]

    def used_by(self, encoding: str) -> list[Tensor]:
        """The tensors that an encoding reads."""
        found = [getattr(self, name) for name in names_used_by(encoding)]
        if any(x is None for x in found):
            raise ValueError(f"encoding: expected {self.encoding} or a part of it, got {encoding}")
        return found


def names_used_by(encoding: str) -> list[str]:
    """The inputs that an encoding reads, as `path_attention` names them."""
    transport = ["w", "beta"] if encoding.startswith("path") else []
    return ["q", "k", "v", *transport, *(["log_forget"] if encoding.endswith("fox") else [])]


def make_inputs(
    B: int,
    T: int,
    heads: int,
    key_heads: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    packing: Packing | None = None,
) -> Inputs:
    """Random leaves with w of unit norm, β in [0, 2], gates around 0.88; the seed is fixed."""
    if heads % key_heads:
        raise ValueError(f"key_heads: expected a divisor of {heads} heads, got {key_heads}")
    rng = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, device=device)

    q = normal(B, T, heads, size).to(dtype)
    k, v = (normal(B, T, key_heads, size).to(dtype) for _ in range(2))
    w = F.normalize(normal(B, T, key_heads, size), dim=-1)
    beta = 2 * torch.rand(B, T, key_heads, generator=rng, device=device)
    log_forget = F.logsigmoid(normal(B, T, heads) + 2)
    return Inputs(q, k, v, w, beta, log_forget, packing).leaves()


class Case(NamedTuple):
    """Random inputs made hard in one way; `concerns` is an input that an encoding must read."""

    change: Callable[[Inputs], Inputs]
    concerns: str = "q"


def _correlated(x: Inputs) -> Inputs:
    """Directions whose mean cosine with one another is 0.7, β in [1.9, 2]."""
    assert x.w is not None and x.beta is not None
    rng = torch.Generator().manual_seed(1)
    common = F.normalize(torch.randn(x.w.shape[-1], generator=rng), dim=0).to(x.w)
    own = F.normalize(x.w - (x.w @ common)[..., None] * common, dim=-1)
    w = math.sqrt(_COSINE) * common + math.sqrt(1 - _COSINE) * own
    return x._replace(w=w, beta=1.9 + 0.05 * x.beta)


def _repeated(x: Inputs) -> Inputs:
    """One direction a head at every token, β in [1.5, 2)."""
    assert x.w is not None and x.beta is not None
    return x._replace(w=x.w[:, :1].expand_as(x.w).contiguous(), beta=1.5 + 0.249 * x.beta)


def _shut(x: Inputs) -> Inputs:
    """Gates of −50 at every seventieth token."""
    assert x.log_forget is not None
    some = torch.arange(x.q.shape[1], device=x.q.device)[:, None] % 70 == 69
    return x._replace(log_forget=x.log_forget.masked_fill(some, -50.0))


def _magnitudes(q: float, k: float, v: float) -> Case:
    return Case(lambda x: x._replace(q=q * x.q, k=k * x.k, v=v * x.v))


CASES = {
    "random": Case(lambda x: x),
    "correlated_w": Case(_correlated, "w"),
    "repeated_w": Case(_repeated, "w"),
    "gates_-50": Case(_shut, "log_forget"),
    "q_1e6_k_1e-6_v_1": _magnitudes(1e6, 1e-6, 1.0),
    "q_1e-6_k_1e6_v_1e6": _magnitudes(1e-6, 1e6, 1e6),
    "q_1e-6_k_1e-6_v_1e-6": _magnitudes(1e-6, 1e-6, 1e-6),
    "q_1e3_k_1e-3_v_1e-6": _magnitudes(1e3, 1e-3, 1e-6),
}


def swapped_inputs(
    T: int, heads: int, key_heads: int, size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Inputs, Tensor]:
    """Queries that find one key each, if every swap on the way is exact; and that key.

    β = 2 and w = (e_a − e_b)/√2: each factor swaps two coordinates. Keys are random signs. Query i
    is its target's key with the swaps between them applied, so its score with the target is
    scale·D and with the others far less (about scale·√D). Values are random signs too, and the
    scale is large: the output's signs are those of the value that the argmax finds.

    Returns:
        Inputs `[1, T, heads, size]`, the gate apart, and the targets, int64 `[1, T, heads]`: any
        tokens up to the query.
    """
    rng = torch.Generator(device).manual_seed(0)
    G = heads // key_heads

    def signs() -> Tensor:
        x = torch.randint(2, (T, key_heads, size), generator=rng, device=device)
        return (2 * x - 1).to(dtype)

    k, v = signs(), signs()
    tokens = torch.arange(T, device=device)[:, None]
    uniform = torch.rand(T, heads, generator=rng, device=device, dtype=torch.float64)
    target = (uniform * (tokens + 1)).long()
    a = torch.randint(size, (T, key_heads, 1), generator=rng, device=device)
    b = (a + torch.randint(1, size, a.shape, generator=rng, device=device)) % size
    w = torch.zeros(T, key_heads, size, device=device)
    w = w.scatter(2, a, 0.5**0.5).scatter(2, b, -(0.5**0.5))
    # place[i, h, c]: where swaps 1 … i take coordinate c, so H_i ⋯ H_1 x has x[c] there; the
    # composition of all up to i, by doubling.
    place = torch.arange(size, device=device).repeat(T, key_heads, 1)
    place = place.scatter(2, a, b).scatter(2, b, a)
    step = 1
    while step < T:
        place = torch.cat([place[:step], place[step:].gather(2, place[:-step])])
        step *= 2
    place, key = place.repeat_interleave(G, 1), k.repeat_interleave(G, 1)  # of query heads
    there = target[..., None].expand(T, heads, size)
    moved = key.gather(0, there).gather(2, place.gather(0, there))
    q = torch.zeros_like(key).scatter(2, place, moved)
    beta = torch.full((T, key_heads), 2.0, device=device)
    tensors = (x[None] for x in (q, k, v, w, beta))
    return Inputs(*tensors, log_forget=None, scale=_SWAP_SCALE), target[None]
