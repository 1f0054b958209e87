"""Stick-breaking of queries over keys that all lie before them: docs/algorithm.md §6 and §9."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from path_attention.ops.stick_breaking import walk, walk_backward


class StickRectangle(NamedTuple):
    """Each key is before each query. Results are float32, or float64 for float64 inputs."""

    q: Tensor  # [B, R, HQ, D]
    k: Tensor  # [B, C, H, D]
    v: Tensor  # [B, C, H, DV]
    scale: float
    triton: bool = False  # whether Triton's kernels do it; they take no empty tensors

    def attend(self) -> tuple[Tensor, Tensor]:
        """What the keys take of whole sticks `[B, R, HQ, DV]`, log of what they leave."""
        if self.triton:
            from path_attention.ops.triton.stick_rectangle import triton_stick_rectangle

            return triton_stick_rectangle(*self[:4])
        out, rest = walk(*self._operands(), G=self._group, before=self.k.shape[1])
        return self._by_token(out), self._by_token(rest)[..., 0]

    def backward(
        self, grad_out: Tensor, taken: Tensor, through: Tensor, grad_rest: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v through this part of a walk over more keys.

        Args:
            grad_out: do `[B, R, HQ, DV]`, of the whole walk's output.
            taken: −log of what nearer keys left `[B, R, HQ]`.
            through: Σ_j A_ij do_i · v_j over these keys and those before them `[B, R, HQ]`.
            grad_rest: gradient of the log of what the whole walk leaves `[B, R, HQ]`; None for 0.
        """
        if self.triton:
            from path_attention.ops.triton.stick_rectangle import triton_stick_rectangle_backward

            return triton_stick_rectangle_backward(*self[:4], grad_out, taken, through, grad_rest)
        grad_rest = torch.zeros_like(taken) if grad_rest is None else grad_rest
        rows = [self._by_head(x[..., None]) for x in (through, grad_rest, taken)]
        options = {"G": self._group, "before": self.k.shape[1], "taken": rows.pop()}
        dq, dk, dv = walk_backward(*self._operands(), self._by_head(grad_out), *rows, **options)
        dk, dv = (x.unflatten(0, (-1, self.k.shape[2])).transpose(1, 2) for x in (dk, dv))
        return self._by_token(dq) * self.scale, dk, dv

    @property
    def _group(self) -> int:
        return self.q.shape[2] // self.k.shape[2]

    def _operands(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self._by_head(x) for x in (self.q, self.k, self.v))
        return q * self.scale, k, v

    def _by_head(self, x: Tensor) -> Tensor:
        """[B, R, H·G, E] → [B·H, R·G, E] in the computing dtype."""
        x = x.to(torch.promote_types(self.q.dtype, torch.float32))
        return x.unflatten(2, (self.k.shape[2], -1)).transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def _by_token(self, x: Tensor) -> Tensor:
        """[B·H, R·G, E] → [B, R, H·G, E]."""
        x = x.unflatten(0, (-1, self.k.shape[2])).unflatten(2, (self.q.shape[1], -1))
        return x.transpose(1, 2).flatten(2, 3)
