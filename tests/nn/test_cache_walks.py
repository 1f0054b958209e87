"""Random walks: append, crop, fork, reorder, reset, of every encoding, against recomputation."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule
from torch import Tensor

from path_attention.nn import Attention, AttentionConfig, LayerCache

SIZES = {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
CASES = {
    "path": {},
    "path + forget": {"decay": "forget"},
    "two householders + alibi": {"householders_per_token": 2, "decay": "alibi"},
    "forget": {"transport": "none", "decay": "forget"},
    "rope": {"transport": "rotary"},
    "token rotation of values": {
        "transport": "accumulated_rotation",
        "rotation_angles": "random_token",
        "moves_values": True,
    },
    "stick-breaking": {"transport": "none", "normalizer": "stick_breaking"},
    "gated delta rule": {"transport": "delta_rule", "decay": "forget", "normalizer": "linear"},
    "linear path": {"normalizer": "linear"},
}
EXACT = {"rtol": 1e-8, "atol": 1e-9}


@dataclass
class Kept:
    """A cache, and every column that it has seen: inputs, token ids, and whether they are real."""

    cache: LayerCache
    x: Tensor
    ids: Tensor
    valid: Tensor
    longest: int = 0  # most columns ever: what lies 64 behind them at most was never sealed

    def columns(self, function) -> Kept:
        return replace(self, x=function(self.x), ids=function(self.ids), valid=function(self.valid))


class Walk(RuleBasedStateMachine):
    caches = Bundle("caches")

    @initialize(target=caches, case=st.sampled_from(sorted(CASES)), rows=st.integers(1, 3))
    def start(self, case: str, rows: int):
        torch.manual_seed(0)
        self.case = case
        self.layer = Attention(AttentionConfig(**SIZES, **CASES[case])).double()
        for parameter in self.layer.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        self.seed = 0
        kept = Kept(LayerCache(), *self.columns(rows, 0))
        self.extend(kept, 200, pad=rows == 3)
        return kept

    def columns(self, rows: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        self.seed += 1
        x = torch.randn(rows, count, 8, dtype=torch.float64, generator=generator)
        ids = torch.randint(0, 40, (rows, count), generator=generator)
        return x, ids, torch.ones(rows, count, dtype=torch.bool)

    @rule(kept=caches, count=st.sampled_from([1, 2, 63, 64, 65, 150, 200]), pad=st.booleans())
    def append(self, kept: Kept, count: int, pad: bool) -> None:
        self.extend(kept, count, pad)

    def extend(self, kept: Kept, count: int, pad: bool) -> None:
        rows = len(kept.x)
        x, ids, valid = self.columns(rows, count)
        if pad:
            valid = torch.arange(count) < (torch.arange(rows)[:, None] * 31 + 1) % (count + 1)
        given = valid if pad else None
        with torch.no_grad():
            got = self.layer(x, token_ids=ids, valid=given, cache=kept.cache)
            pairs = ((kept.x, x), (kept.ids, ids), (kept.valid, valid))
            kept.x, kept.ids, kept.valid = (torch.cat(pair, 1) for pair in pairs)
            for row in range(rows):
                real = kept.valid[row]
                whole = self.layer(kept.x[row, real][None], token_ids=kept.ids[row, real][None])
                now = got[row, valid[row]]
                torch.testing.assert_close(now, whole[0, len(whole[0]) - len(now) :], **EXACT)
        kept.longest = max(kept.longest, kept.cache.seen)
        assert kept.cache.seen == kept.x.shape[1]
        assert kept.cache.lengths.tolist() == kept.valid.sum(1).tolist()

    @rule(kept=caches, drop=st.integers(1, 64))
    def drop(self, kept: Kept, drop: int) -> None:
        """The last columns, of which none was ever sealed while they were the last."""
        length = max(0, kept.cache.seen - drop)
        if length >= kept.longest - 64:
            assert kept.cache.nearest_crops(length) == (length, length)
        self.crop(kept, length)

    @rule(kept=caches, share=st.floats(0, 1))
    def crop_anywhere(self, kept: Kept, share: float) -> None:
        self.crop(kept, int(share * kept.cache.seen))

    def crop(self, kept: Kept, length: int) -> None:
        """To the length asked for, or to the nearest that is possible, as the error says."""
        below, above = kept.cache.nearest_crops(length)
        if length not in (below, above):
            with pytest.raises(ValueError, match=f"length: expected {below} or {above}"):
                kept.cache.crop(length)
            length = above
        kept.cache.crop(length)
        cut = kept.columns(lambda y: y[:, :length])
        kept.x, kept.ids, kept.valid = cut.x, cut.ids, cut.valid
        self.extend(kept, 2, pad=False)

    @rule(target=caches, kept=caches, first=st.booleans())
    def fork(self, kept: Kept, first: bool):
        other = replace(kept, cache=kept.cache.fork())
        for one in (kept, other) if first else (other, kept):
            self.extend(one, 70, pad=False)
            self.crop(one, one.cache.seen - 40)
        return other

    @rule(kept=caches, order=st.lists(st.integers(0, 10), min_size=1, max_size=3))
    def reorder(self, kept: Kept, order: list[int]) -> None:
        rows = torch.tensor(order) % len(kept.x)
        kept.cache.select(rows)
        cut = kept.columns(lambda y: y[rows])
        kept.x, kept.ids, kept.valid = cut.x, cut.ids, cut.valid

    @rule(kept=caches, once_in_five=st.integers(0, 4))
    def reset(self, kept: Kept, once_in_five: int) -> None:
        if once_in_five:
            return
        kept.cache.reset()
        kept.longest = 0
        cut = kept.columns(lambda y: y[:, :0])
        kept.x, kept.ids, kept.valid = cut.x, cut.ids, cut.valid


Walk.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    phases=(Phase.generate,),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestWalks = Walk.TestCase
