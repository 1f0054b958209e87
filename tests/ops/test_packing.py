"""Packing: what it holds and what it refuses."""

from __future__ import annotations

import re

import pytest
import torch

from path_attention import Packing


def test_from_lengths():
    packing = Packing.from_lengths([3, 0, 2])
    assert packing.cu_seqlens.tolist() == [0, 3, 3, 5]
    assert packing.cu_seqlens.dtype == torch.int32
    assert packing.lengths == (3, 0, 2) and packing.total == 5
    assert packing.position_ids().tolist() == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_from_cu_seqlens(dtype):
    packing = Packing.from_cu_seqlens(torch.tensor([0, 0, 4, 9, 9], dtype=dtype), total=9)
    assert packing.lengths == (0, 4, 5, 0) and packing.total == 9
    assert packing.cu_seqlens.dtype == torch.int32
    assert packing.position_ids().tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4]


def test_nothing():
    packing = Packing.from_lengths([])
    assert packing.cu_seqlens.tolist() == [0] and packing.total == 0
    assert packing.position_ids().shape == (0,)


def test_to_another_device():
    packing = Packing.from_lengths([3, 4]).to("meta")
    assert packing.cu_seqlens.device.type == "meta"
    assert packing.lengths == (3, 4) and packing.total == 7


@pytest.mark.parametrize(
    ("borders", "message"),
    [
        (torch.zeros(2, 2, dtype=torch.int32), "expected shape [N + 1], got [2, 2]"),
        (torch.zeros(0, dtype=torch.int32), "expected shape [N + 1], got [0]"),
        (torch.tensor([0.0, 3.0]), "expected int32 or int64, got torch.float32"),
        (torch.tensor([1, 3]), "expected to start at 0, got 1"),
        (torch.tensor([0, 5, 3]), "never decrease, got 5 then 3 at index 2"),
        (torch.tensor([0, 5]), "expected to end at T = 7, the number of tokens, got 5"),
        ((0, 7), "expected a tensor or a Packing, got tuple"),
    ],
)
def test_refused_borders(borders, message):
    with pytest.raises(ValueError, match="cu_seqlens: .*" + re.escape(message)):
        Packing.from_cu_seqlens(borders, total=7)


def test_refused_lengths():
    with pytest.raises(ValueError, match="lengths: expected non-negative integers, got -2"):
        Packing.from_lengths([4, -2])
