"""A settled static cache on random walks: steps, long chunks, crop, fork, reorder, recomputed."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from torch import Tensor

from path_attention.nn import Attention, AttentionConfig, StaticLayerCache

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled here"
)
SIZES = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
CASES = {
    "path + forget": {"decay": "forget", "value_head_dim": 6},
    "two householders + alibi": {"householders_per_token": 2, "decay": "alibi"},
    "forget": {"transport": "none", "decay": "forget"},
    "rope": {"transport": "rotary"},
    "token rotation of values": {
        "transport": "accumulated_rotation",
        "rotation_angles": "random_token",
        "moves_values": True,
    },
}
ROOM = 448  # seven units of 64
# Float32 beside float64: each of at most 2 · 448 factors rounds by 2⁻²⁴ or so, all by 5e-5.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@dataclass
class Kept:
    """A cache, and every column that it has seen: inputs, token ids, and whether they are real."""

    cache: StaticLayerCache
    x: Tensor
    ids: Tensor
    valid: Tensor

    def keep(self, function) -> None:
        self.x, self.ids, self.valid = (function(y) for y in (self.x, self.ids, self.valid))


class Walk:
    def __init__(self, case: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.random = Random(seed)
        config = AttentionConfig(**SIZES, **CASES[case])
        self.layer, self.exact = Attention(config), Attention(config).double()
        for parameter in self.layer.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        self.exact.load_state_dict(self.layer.state_dict())

    def start(self, rows: int) -> Kept:
        none = torch.zeros(rows, 0)
        cache = StaticLayerCache(ROOM, unit=64)
        return Kept(cache, none[..., None].expand(-1, -1, 8), none.long(), none.bool())

    @torch.no_grad()
    def append(self, kept: Kept, count: int, pad: bool = False) -> None:
        rows, count = len(kept.x), min(count, ROOM - kept.cache.seen)
        x, ids = torch.randn(rows, count, 8), torch.randint(0, 40, (rows, count))
        valid = torch.ones(rows, count, dtype=torch.bool)
        if pad:
            valid = torch.arange(count) < torch.randint(0, count + 1, (rows, 1))
        if not count:
            return
        got = self.layer(x, token_ids=ids, valid=valid if pad else None, cache=kept.cache)
        pairs = ((kept.x, x), (kept.ids, ids), (kept.valid, valid))
        kept.x, kept.ids, kept.valid = (torch.cat(pair, 1) for pair in pairs)
        for row, real in enumerate(kept.valid):
            wide = kept.x[row, real][None].double()
            whole = self.exact(wide, token_ids=kept.ids[row, real][None])[0]
            now = got[row, valid[row]].double()
            torch.testing.assert_close(now, whole[len(whole) - len(now) :], **CLOSE)
        assert kept.cache.seen == kept.x.shape[1] and kept.cache.lengths is not None
        assert kept.cache.lengths.tolist() == kept.valid.sum(1).tolist()

    def crop(self, kept: Kept, length: int) -> None:
        """To the length asked for, or to one of the nearest, as the error says."""
        cache = kept.cache
        below, above = cache.nearest_crops(length)
        if length not in (below, above):
            with pytest.raises(ValueError, match=f"length: expected {below} or {above}"):
                cache.crop(length)
            length = self.random.choice([below, above])
        placed, held = cache.placed, [x.data_ptr() for x in cache.tensors()]
        cache.crop(length)
        assert [x.data_ptr() for x in cache.tensors()] == held  # a captured step goes on
        assert cache.placed is placed
        kept.keep(lambda y: y[:, :length])

    def go(self, all_kept: list[Kept]) -> None:
        """One random action on one of the caches."""
        kept = self.random.choice(all_kept)
        placed, held = kept.cache.placed, [x.data_ptr() for x in kept.cache.tensors()]
        self.act(kept, all_kept)
        if [x.data_ptr() for x in kept.cache.tensors()] != held:
            assert kept.cache.placed is not placed  # or a captured step would go on

    def act(self, kept: Kept, all_kept: list[Kept]) -> None:
        seen, action = kept.cache.seen, self.random.random()
        if action < 0.3:
            self.append(kept, self.random.choice([1, 5, 16]), pad=self.random.random() < 0.3)
        elif action < 0.5:
            self.append(kept, self.random.choice([17, 64, 100]), pad=self.random.random() < 0.3)
        elif action < 0.7:
            length = max(0, seen - self.random.randint(0, 64))
            self.crop(kept, length)
            self.append(kept, 2)
        elif action < 0.85:
            self.crop(kept, self.random.randint(0, seen))
            self.append(kept, 18)
        elif action < 0.93 and len(all_kept) < 3:
            other = replace(kept, cache=kept.cache.fork())
            all_kept.append(other)
            self.append(other, 1)
        else:
            count = self.random.choice([1, 2, len(kept.x)])
            rows = torch.tensor([self.random.randrange(len(kept.x)) for _ in range(count)])
            kept.cache.select(rows)
            kept.keep(lambda y: y[rows])
            self.append(kept, 1)


@pytest.mark.parametrize(("seed", "case"), [*enumerate(sorted(CASES))])
def test_a_walk_agrees_with_recomputation(seed: int, case: str) -> None:
    walk = Walk(case, seed)
    kept = walk.start(rows=1 + seed % 2)
    walk.append(kept, 150, pad=seed % 2 == 1)
    walk.append(kept, 3)
    assert kept.cache.state is not None
    all_kept = [kept]
    for _ in range(10):
        walk.go(all_kept)
