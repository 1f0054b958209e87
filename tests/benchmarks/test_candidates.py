"""Anchors and peers get what we compute, in their own terms."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from path_attention import Packing, path_attention
from path_attention.benchmarks import candidates as module
from path_attention.benchmarks.candidates import DEFINITION, causal_block_mask
from path_attention.benchmarks.inputs import Inputs, make_inputs
from path_attention.nn.configuration import AttentionConfig
from path_attention.nn.encoding import Alibi

CPU = torch.device("cpu")


def output(name: str, layout: str, inputs: Inputs, encoding: str) -> Tensor:
    (candidate,) = (
        c
        for c in module._CANDIDATES
        if c.name == name and layout in c.layouts and encoding in c.encodings
    )
    return candidate.make(inputs, encoding)()


@pytest.mark.parametrize("T", [1, 127, 128, 200, 384])
def test_the_causal_blocks_are_those_of_the_mask(T):
    from torch.nn.attention.flex_attention import create_block_mask

    ours, theirs = (
        causal_block_mask(T, CPU),
        create_block_mask(module._causal, None, None, T, T, device="cpu"),
    )
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert torch.equal(ours.kv_num_blocks, theirs.kv_num_blocks)
    assert ours.seq_lengths == theirs.seq_lengths == (T, T)
    assert ours.full_kv_num_blocks is not None and theirs.full_kv_num_blocks is not None
    assert torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks)
    assert ours.q_num_blocks is not None and theirs.q_num_blocks is not None
    assert torch.equal(ours.q_num_blocks, theirs.q_num_blocks)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_with_these_blocks_is_causal():
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (torch.randn(1, 2, 300, 16) for _ in range(3))
    out = flex_attention(q, k, v, block_mask=causal_block_mask(300, CPU))
    assert isinstance(out, Tensor)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_alibi_is_the_layers():
    x = make_inputs(2, 70, 4, 2, 16, torch.float32, CPU)
    layer = Alibi(AttentionConfig(hidden_size=64, num_attention_heads=4, decay="alibi"))
    gates = layer(x.q.flatten(2), SimpleNamespace())
    exact = path_attention(x.q, x.k, x.v, log_forget=gates, implementation="definition")
    torch.testing.assert_close(output("blockwise", "batch", x, "alibi"), exact)
    assert x.used_by("alibi") == [x.q, x.k, x.v]  # no gradient of the slopes


@pytest.mark.parametrize("encoding", ["path", "path_fox", "fox"])
@pytest.mark.parametrize("packed", [False, True])
def test_fla_in_its_own_terms(encoding, packed, monkeypatch):
    """Its operators as it documents them: head sizes, dtypes, PaTH's gate times the scale."""
    seen = []

    def path(q, k, v, w, beta, g=None, scale=None, cu_seqlens=None, use_cache=False):
        assert w.dtype == beta.dtype == torch.float32 and k.shape == w.shape
        assert g is None or g.dtype == torch.float32
        seen.append((q.shape[3], v.shape[3]))
        gate = None if g is None else scale * g
        return path_attention(q, k, v, w, beta, gate, scale=scale, cu_seqlens=cu_seqlens), None

    def fox(q, k, v, g, scale=None, window_size=None, cu_seqlens=None):
        seen.append((q.shape[3], v.shape[3]))
        return path_attention(q, k, v, None, None, g, scale=scale, cu_seqlens=cu_seqlens)

    peers = {
        "fla.ops.path_attn": SimpleNamespace(parallel_path_attn=path),
        "fla.ops.forgetting_attn": SimpleNamespace(parallel_forgetting_attn=fox),
    }
    for name, peer in peers.items():
        monkeypatch.setitem(sys.modules, name, peer)
    packing = Packing.from_lengths([30, 0, 20]) if packed else None
    inputs = make_inputs(1, 50, 2, 1, 32, torch.float32, CPU, packing)
    got = output("fla", "batch", inputs, encoding)
    torch.testing.assert_close(got, DEFINITION.make(inputs, encoding)())
    assert seen == [(64, 64)]


@pytest.mark.parametrize("spelling", ["window_size", "is_causal", None])
def test_variable_length_flash_in_every_torch(spelling, monkeypatch):
    packing = Packing.from_lengths([30, 20])
    inputs = make_inputs(1, 50, 2, 2, 8, torch.float32, CPU, packing)

    def attend(q, k, v, borders, longest):
        assert borders.dtype == torch.int32 and longest == 30
        return path_attention(q[None], k[None], v[None], cu_seqlens=borders)[0]

    def newer(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size=(-1, -1)):
        assert window_size == (-1, 0)
        return attend(q, k, v, cu_q, max_q)

    def older(q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False):
        assert is_causal
        return attend(q, k, v, cu_q, max_q)

    def operator(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug):
        assert causal and dropout == 0 and not debug
        return attend(q, k, v, cu_q, max_q), None

    if spelling is None:
        found = module.importlib.util.find_spec
        hidden = "torch.nn.attention.varlen"
        monkeypatch.setattr(
            module.importlib.util, "find_spec", lambda n: None if n == hidden else found(n)
        )
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", operator)
    else:
        chosen = newer if spelling == "window_size" else older
        peer = SimpleNamespace(varlen_attn=chosen, __spec__=object())
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", peer)
    got = output("flash_varlen", "packed", inputs, "nope")
    torch.testing.assert_close(got, DEFINITION.make(inputs, "nope")())
    torch.testing.assert_close(got, output("sdpa", "packed", inputs, "nope"))


def test_anchors_of_a_gpu_come_first():
    assert module.candidates("cuda")[0].name == "sdpa_cudnn"
    assert module.candidates("cuda", "packed")[0].name == "flash_varlen"
    for layout in ("batch", "packed"):
        available = module.candidates("cuda", layout)
        assert all(c.encodings for c in available)
        assert "definition" not in [c.name for c in available]
