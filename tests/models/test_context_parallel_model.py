"""Models whose sequence lies on 2 and 4 gloo processes give what one process gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from path_attention.models import PathAttentionConfig, PathAttentionForCausalLM
from path_attention.nn import Attention, AttentionConfig, Transport, register_transport
from path_attention.nn.attention import check_can_split
from path_attention.nn.encoding import TRANSPORTS
from path_attention.ops.context_linear import context_parallel_linear_attention
from path_attention.ops.context_rotation import accumulate_over_runs
from path_attention.ops.context_split import ContextSplit
from path_attention.ops.context_stick_breaking import context_parallel_stick_breaking
from path_attention.ops.packing import Packing
from path_attention.ops.rotation import accumulate_angles


@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes_equal_one(processes: int) -> None:
    script = Path(__file__).with_name("context_model.py")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
         str(processes), str(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parents[2])},
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("complete") == processes


@pytest.mark.parametrize("lengths", [None, [200, 0, 1, 149], [90, 85, 175]])
def test_angles_over_runs_are_those_of_one_device(lengths, poisoned_memory) -> None:
    """Bit for bit; gradients to a rounding."""
    packing = None if lengths is None else Packing.from_lengths(lengths)
    split = ContextSplit.of(350, None, packing)
    angles = torch.randn(1 if lengths else 2, 350, 3, 2, requires_grad=True)
    above = torch.randn(angles.shape)
    exact, _ = accumulate_angles(angles, packing=packing)
    found = accumulate_over_runs(angles, split)
    assert torch.equal(found, exact)
    one, other = (torch.autograd.grad(x, angles, above)[0] for x in (found, exact))
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def small_model(preset: str = "path") -> PathAttentionForCausalLM:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
    return PathAttentionForCausalLM(PathAttentionConfig.from_preset(preset, **sizes))


def test_what_does_not_go_with_a_split_is_refused() -> None:
    model, split, ids = small_model(), ContextSplit.of(8), torch.arange(8)[None]
    packing = Packing.from_lengths([5, 3])
    for options, message in (
        ({"packing": packing}, "packing: expected None with a split, got Packing"),
        ({"attention_mask": torch.ones(1, 8)}, "attention_mask: expected None with a split"),
        ({"use_cache": True}, "use_cache: expected None or False with a split, got True"),
        ({"split": ContextSplit.of(9)}, "input_ids: expected this process's 9 tokens of 9, got 8"),
    ):
        with pytest.raises(ValueError, match=message):
            model(ids, **{"split": split, **options})
    with pytest.raises(ValueError, match="split: expected a batch of 1 with packed documents"):
        model(ids.expand(2, -1), split=ContextSplit.of(8, None, packing))
    layer, x = (
        Attention(AttentionConfig(hidden_size=16, num_attention_heads=2)),
        torch.ones(1, 8, 16),
    )
    with pytest.raises(ValueError, match="valid: expected None with a split, got Tensor"):
        layer(x, split=split, valid=torch.ones(1, 8, dtype=torch.bool))
    with pytest.raises(ValueError, match="x: expected this process's 9 tokens of 9, got 8"):
        layer(x, split=ContextSplit.of(9))
    with pytest.raises(ValueError, match=r"angles: expected \[B, tokens, H, P\] in float32"):
        accumulate_over_runs(torch.ones(1, 8, 2), split)
    for operator in (context_parallel_linear_attention, context_parallel_stick_breaking):
        with pytest.raises(ValueError, match="q: expected this process's 9 tokens of 9, got 8"):
            q = torch.ones(1, 8, 2, 4)
            operator(q, q, q, split=ContextSplit.of(9))


def test_encodings_that_can_not_be_split_are_refused_by_name() -> None:
    """Any registered one that does not say that it can."""
    message = r"transport: expected one that can lie on several processes \(can_split\), got "
    try:
        register_transport("mine")(type("Mine", (Transport,), {}))
        config = AttentionConfig(hidden_size=16, num_attention_heads=2, transport="mine")
        with pytest.raises(ValueError, match=f"{message}'mine'"):
            check_can_split(config)
        with pytest.raises(ValueError, match=f"{message}Mine"):
            Attention(config)(torch.ones(1, 8, 16), split=ContextSplit.of(8))
    finally:
        del TRANSPORTS["mine"]
