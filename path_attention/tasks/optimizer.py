"""AdamW over replicas, each with a rate of its own, that never asks the device for a number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from path_attention.tasks.replicas import Replicas


class ReplicatedAdamW:
    """AdamW (arXiv 1711.05101) with clipping, one norm a replica, on the flat storage.

        g ← g · min(1, clip / ‖g‖)
        m ← β₁m + (1−β₁)g,  v ← β₂v + (1−β₂)g²
        p ← p − η (m̂ / (√v̂ + eps) + λ p),  m̂ = m/(1−β₁ᵗ), v̂ = v/(1−β₂ᵗ)

    A replica that is not active keeps its parameters; one whose gradient is not finite stops being
    active, and `finite` says so.

    Args:
        replicas: whose `gradient` each step reads.
        rates: peak rate of each replica.
        decays: weight decay of each.
        shares: the rate's share of its peak at every step.
        betas, eps, clip: of all; clip None for none.
    """

    def __init__(
        self,
        replicas: Replicas,
        *,
        rates: Sequence[float],
        decays: Sequence[float],
        shares: Sequence[float],
        betas: tuple[float, float],
        eps: float,
        clip: float | None,
    ) -> None:
        self.replicas = replicas
        device = replicas.flat.device
        self.rates = torch.tensor(rates, device=device)[:, None]
        self.decays = torch.tensor(decays, device=device)[:, None] * replicas.decayed
        self.shares = torch.tensor(shares, device=device)
        self.betas, self.eps, self.clip = betas, eps, clip
        self.m, self.v = torch.zeros_like(replicas.flat), torch.zeros_like(replicas.flat)
        self.step_count = torch.zeros((), dtype=torch.int64, device=device)
        self.active = torch.ones(replicas.count, dtype=torch.bool, device=device)
        self.finite = torch.ones_like(self.active)

    @property
    def state(self) -> dict[str, Tensor]:
        """Everything that a resume needs."""
        return {
            "flat": self.replicas.flat,
            "m": self.m,
            "v": self.v,
            "step": self.step_count,
            "active": self.active,
            "finite": self.finite,
        }

    @torch.no_grad()
    def step(self) -> None:
        """Take one step by the gradient at hand."""
        g, p = self.replicas.gradient, self.replicas.flat
        norm = torch.linalg.vector_norm(g, dim=1, keepdim=True)
        finite = norm.isfinite()
        self.finite.logical_and_(finite[:, 0] | ~self.active)
        self.active.logical_and_(finite[:, 0])
        if self.clip is not None:
            g = g * (self.clip / norm.clamp(min=self.clip))
        first, second = self.betas
        rate = self.rates * self.shares.gather(0, self.step_count[None])
        self.step_count.add_(1)
        t = self.step_count.double()
        self.m.lerp_(g, 1 - first)
        self.v.mul_(second).addcmul_(g, g, value=1 - second)
        m_scale, v_scale = (1 / (1 - beta**t) for beta in self.betas)
        denominator = (self.v * v_scale.to(p.dtype)).sqrt_().add_(self.eps)
        update = (self.m * m_scale.to(p.dtype)).div_(denominator).addcmul_(self.decays, p)
        p.copy_(torch.where(self.active[:, None], p - rate * update, p))
