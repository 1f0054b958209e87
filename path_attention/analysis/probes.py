"""Sums of what probed queries meet on their walk: scores, weights, values, by distance."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from path_attention.analysis.routes import Routes, Tile
from path_attention.analysis.theory import far_mass_bound

if TYPE_CHECKING:
    from path_attention.analysis.measure import Probes, Totals

_LOWEST = -1e30
_TINY = 1e-300


class ProbeSums:
    """P probed queries of HQ heads; `meet` takes a walk's tiles from right to left.

    Weights are the normalizer's: e^logit of a softmax, a share of the stick, or |score| e^decay of
    a linear layer, whose values also carry its sign. They are kept relative to e^top, the greatest
    so far of each query.
    """

    def __init__(
        self,
        routes: Routes,
        probes: Probes,
        near: int,
        edges: Tensor,
        scores: Tensor,
        tails: Tensor,
    ) -> None:
        self.routes, self.near = routes, near
        device, dtype = routes.q.device, routes.q.dtype
        self.at = torch.tensor(probes.positions, device=device)
        self.of_length = torch.tensor(probes.of_length, device=device)
        self.lengths = len(probes.lengths)
        self.edges, self.score_edges, self.tail_edges = (
            edges.to(device), scores.to(device, dtype), tails.to(device, dtype)
        )  # fmt: skip
        HQ, P, E = routes.q.shape[1], len(self.at), routes.v.shape[2]
        zeros = torch.zeros(HQ, P, dtype=torch.float64, device=device)
        self.top, self.rest = zeros + _LOWEST, zeros.clone()
        self.mass = zeros.new_zeros(HQ, P, len(edges))
        self.far_vector = zeros.new_zeros(HQ, P, E)
        self.far_square, self.far_length = zeros.clone(), zeros.clone()
        self.far_weight = zeros.clone()
        self.near_log, self.far_log = zeros - torch.inf, zeros - torch.inf  # of sums of weights
        self.near_most, self.far_most = zeros - torch.inf, zeros - torch.inf
        self.far_least = zeros + torch.inf
        self.pairs = zeros.new_zeros(self.lengths, len(edges))
        self.products = zeros.new_zeros(3, HQ, self.lengths, len(edges))  # s·s, s₀·s₀, s·s₀
        self.histogram = zeros.new_zeros(HQ, 2, len(scores) + 1)
        self.tails = zeros.new_zeros(HQ, 2, len(tails) + 1)
        self.moments = zeros.new_zeros(3, HQ, 2)  # how many, Σ s, Σ s²
        self.score_most = zeros.new_zeros(HQ)

    def meet(self, tile: Tile) -> None:
        at = self.at[tile.first :]
        distance = at[:, None] - torch.arange(tile.start, tile.stop, device=at.device)
        place = torch.bucketize(distance, self.edges, right=True) - 1
        far = distance >= self.near
        self._scores(tile, place, far)
        self._weigh(tile, distance, place, far)
        if tile.start > 0:
            self._tail(tile, at)

    def _scores(self, tile: Tile, place: Tensor, far: Tensor) -> None:
        """Scores without decay, moved (s) and bare (s₀): by distance, and their distribution."""
        routes = self.routes
        q = routes.by_head(routes.bare_q[self.at[tile.first :]])
        k = routes.bare_k[tile.start : tile.stop]
        bare = routes.scale * (q.flatten(1, 2) @ k.permute(1, 2, 0)).unflatten(1, q.shape[1:3])
        s, s0 = tile.scores.double(), bare.flatten(0, 1).double()
        place = (place + self.of_length[tile.first :, None] * len(self.edges)).flatten()
        for n, x in enumerate((s * s, s0 * s0, s * s0)):
            self.products[n].flatten(1).index_add_(1, place, x.flatten(1))
        pairs = torch.bincount(place, minlength=self.pairs.numel())
        self.pairs += pairs.view(self.pairs.shape)
        bucket = torch.bucketize(tile.scores, self.score_edges, right=True)
        self._count(self.histogram, bucket, far)
        for n, x in enumerate((torch.ones_like(s), s, s * s)):
            self.moments[n] += torch.stack([(x * ~far).sum((1, 2)), (x * far).sum((1, 2))], -1)
        self.score_most = torch.maximum(self.score_most, s.abs().amax((1, 2)))

    def _tail(self, tile: Tile, at: Tensor) -> None:
        """Scores in units of a random one's scatter, of the key just before the segment.

        There the moved query is known itself: what a contraction took off it does not count.
        """
        routes, to = self.routes, tile.start - 1
        x, k = tile.moved, routes.k[to]
        score = (x * k[:, None, None]).sum(-1)  # [H, G, A]
        if routes.kind == "rotation":
            mine, its = (z.unflatten(-1, (2, -1)).square().sum(-2) for z in (x, k))
            scatter = (mine * its[:, None, None]).sum(-1).sqrt()
        else:
            scatter = x.norm(dim=-1) * k.norm(dim=-1)[:, None, None] * k.shape[-1] ** -0.5
        u = (score / scatter.clamp(min=torch.finfo(score.dtype).tiny)).abs().flatten(0, 1)
        bucket = torch.bucketize(u, self.tail_edges, right=True)
        self._count(self.tails, bucket, at - to >= self.near)

    def _count(self, into: Tensor, bucket: Tensor, far: Tensor) -> None:
        """Counts buckets `[HQ, …]` into `[HQ, 2, N]`: near, far."""
        HQ, two, N = into.shape
        head = torch.arange(HQ, device=bucket.device).view(-1, *[1] * (bucket.dim() - 1))
        index = (head * two + far.long()) * N + bucket
        into += torch.bincount(index.flatten(), minlength=into.numel()).view(into.shape)

    def _log_weights(self, tile: Tile, distance: Tensor) -> Tensor:
        """log of each key's weight `[HQ, A, S]`, and the stick's rest goes on."""
        s = tile.scores.double()
        if self.routes.normalizer == "stick_breaking":
            own = distance == 0
            keep = -F.softplus(s).masked_fill(own, 0)
            after = keep.flip(-1).cumsum(-1).flip(-1)
            rest = self.rest[:, tile.first :]
            log = F.logsigmoid(s).masked_fill(own, -torch.inf) + rest[..., None] + after - keep
            self.rest[:, tile.first :] = rest + after[..., 0]
            return log
        log = s.abs().log() if self.routes.normalizer == "linear" else s
        return log if tile.decay is None else log + tile.decay.double()

    def _weigh(self, tile: Tile, distance: Tensor, place: Tensor, far: Tensor) -> None:
        active, v = slice(tile.first, None), self.routes.v[tile.start : tile.stop].double()
        log = self._log_weights(tile, distance)
        for side, most, whole in (
            (log.masked_fill(far, -torch.inf), self.near_most, self.near_log),
            (log.masked_fill(~far, -torch.inf), self.far_most, self.far_log),
        ):
            most[:, active] = torch.maximum(most[:, active], side.amax(-1))
            whole[:, active] = torch.logaddexp(whole[:, active], side.logsumexp(-1))
        far_least = log.masked_fill(~far, torch.inf).amin(-1)
        self.far_least[:, active] = torch.minimum(self.far_least[:, active], far_least)

        before = self.top[:, active]
        top = torch.maximum(before, log.amax(-1))
        shrink = (before - top).exp()
        self.top[:, active] = top
        weight = (log - top[..., None]).exp()
        mass = self.mass[:, active] * shrink[..., None]
        self.mass[:, active] = mass.scatter_add(2, place.expand_as(weight), weight)
        weight = weight * far
        self.far_weight[:, active] = self.far_weight[:, active] * shrink + weight.sum(-1)
        length = v.norm(dim=-1).T.repeat_interleave(self.routes.group, 0)[:, None]  # [HQ, 1, S]
        part = weight * length
        self.far_length[:, active] = self.far_length[:, active] * shrink + part.sum(-1)
        self.far_square[:, active] = self.far_square[:, active] * shrink**2 + part.square().sum(-1)
        if self.routes.normalizer == "linear":
            weight = weight * tile.scores.sign()
        values = v.transpose(0, 1).repeat_interleave(self.routes.group, 0)  # [HQ, S, DV]
        vector = self.far_vector[:, active] * shrink[..., None] + weight @ values
        self.far_vector[:, active] = vector

    def into(self, totals: Totals) -> None:
        """Add everything to totals: of each length, sums over its probes and their number."""
        lengths, of_length = self.lengths, self.of_length
        far_keys = (self.at + 1 - self.near).clamp(min=0).double()
        has_far = far_keys > 0
        whole = self.mass.sum(-1).clamp(min=_TINY)
        found = self._of_values() | {"far_mass": self.far_weight / whole}
        found["far_keys"] = far_keys.expand_as(whole)
        if self.routes.normalizer == "softmax":
            found |= self._of_logits(far_keys)
        for name, x in found.items():
            x = torch.where(has_far, x, 0.0)
            totals.add(**{name: x.new_zeros(len(x), lengths).index_add(1, of_length, x)})
        share = self.mass / whole[..., None]
        mass = share.new_zeros(len(share), lengths, share.shape[2])
        totals.add(
            mass=mass.index_add(1, of_length, share),
            probes=torch.bincount(of_length, minlength=lengths),
            with_far=torch.bincount(of_length[has_far], minlength=lengths),
            pairs=self.pairs,
            products=self.products,
            histogram=self.histogram,
            tails=self.tails,
            moments=self.moments,
        )
        totals.raise_to(score_most=self.score_most)

    def _of_values(self) -> dict[str, Tensor]:
        """‖Σ a_j v_j‖ over far keys, beside what it is for values in step and out of step.

        In step: Σ a_j ‖v_j‖. In random directions: √(Σ a_j² ‖v_j‖²).
        """
        norm, square = self.far_vector.norm(dim=-1), self.far_square.sqrt()
        return {
            "in_step": norm / self.far_length.clamp(min=_TINY),
            "incoherent": square / self.far_length.clamp(min=_TINY),
            "coherence": norm / square.clamp(min=_TINY),
        }

    def _of_logits(self, far_keys: Tensor) -> dict[str, Tensor]:
        """2λ and the bound it gives, and how far near logits stand above far ones."""
        near_keys = self.at + 1 - far_keys
        spread = self.near_most - self.far_least
        return {
            "spread": spread,
            "bound": far_mass_bound(near_keys, far_keys, spread),
            "gap": self.near_log - near_keys.log() - (self.far_log - far_keys.log()),
            "gap_most": self.near_most - self.far_most,
        }
