"""Where a GPU cannot run an operator's kernels, that is said, once, and never in silence."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from path_attention.ops import arguments, decode, directions, path, stick_breaking, transport

LACKS = "head sizes of at most 128, got D = 256 and DV = 256"


def chosen(name: str, q: torch.Tensor) -> object:
    if name == "path_attention":
        return path._choose(None, q, q, q, None, torch.empty_like(q), None, False, False)
    if name == "stick_breaking_attention":
        return stick_breaking.choose(None, q, q)
    if name == "decode_attention":
        return decode._choose(None, q, q)
    if name == "householder_directions":
        return directions._choose(None, q.flatten(2), None, q.shape[2])
    return transport._has_kernel(q)


MODULES = {
    "path_attention": (path, "_triton_lacks", "blockwise"),
    "stick_breaking_attention": (stick_breaking, "_triton_lacks", "blockwise"),
    "decode_attention": (decode, "triton_lacks", "torch"),
    "householder_directions": (directions, "_triton_lacks", "torch"),
    "chunk_transport": (transport, "_triton_lacks", False),
}


@pytest.mark.parametrize("name", MODULES)
def test_what_a_gpu_lacks_is_said_once(name: str, monkeypatch) -> None:
    module, lacks, slower = MODULES[name]
    monkeypatch.setattr(arguments, "_SAID", set())
    monkeypatch.setattr(module, lacks, lambda *_: LACKS)
    with FakeTensorMode():
        q = torch.empty(1, 8, 2, 256, device="cuda")
        with pytest.warns(UserWarning, match=f"{name}: slower on cuda, .* {LACKS}"):
            assert chosen(name, q) == slower
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert chosen(name, q) == slower
            monkeypatch.setattr(module, lacks, lambda *_: None)
            assert chosen(name, q) in ("triton", True)
            monkeypatch.setattr(module, lacks, lambda *_: "another")
            assert chosen(name, torch.empty(1, 8, 2, 256)) == slower  # a CPU has none to miss
