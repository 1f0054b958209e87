"""A prompt in one chunk, in several, and token by token: each is the whole sequence at once.

In plain PyTorch, and by the kernels of a GPU, run as Python: the operator's own for a chunk's
tokens among themselves, those of decoding for the past, the transport's for both.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from path_attention.nn import Chunk, LayerCache
from path_attention.ops import decode, path, transport
from path_attention.ops.definition import definition

Inputs = list[Tensor | None]
ENCODINGS = ["path", "path_fox", "fox", "alibi", "nope"]
CHUNKS = [100, 66, 1]  # the first keeps a tail, the second seals a unit of tail and chunk
WIDTHS, LENGTHS = [135, 17, 1], torch.tensor([[135, 17, 1], [3, 9, 1]])  # of chunks; [row, chunk]
# Some 170 factors round by 2⁻²⁴ each, as do sums of as many weights; outputs are a few units.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


@pytest.fixture(params=["torch", "triton"])
def implementation(request, monkeypatch) -> str:
    """Either the kernels everywhere, or nowhere."""
    if request.param == "triton":
        pytest.importorskip("triton")
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("kernels are compiled here")
        monkeypatch.setattr(decode, "_choose", lambda *_: "triton")
        monkeypatch.setattr(path, "_choose", lambda *_: "triton")
        monkeypatch.setattr(transport, "_has_kernel", lambda *_: True)
    return request.param


def make(encoding: str, batch: int, length: int) -> Inputs:
    """Four query heads on two key heads of 12, values of 5."""
    q, k, v = (torch.randn(batch, length, *size) for size in ((4, 12), (2, 12), (2, 5)))
    w = F.normalize(torch.randn(batch, length, 2, 12), dim=-1)
    beta = 2 * torch.rand(batch, length, 2)
    gate = F.logsigmoid(torch.randn(batch, length, 4) + 2)
    if encoding == "alibi":
        gate = -(2.0 ** -torch.arange(4.0)).repeat(batch, length, 1)
    moved = [w, beta] if encoding.startswith("path") else [None, None]
    return [q, k, v, *moved, gate if encoding in ("path_fox", "fox", "alibi") else None]


def part(x: Inputs, start: int, stop: int) -> Inputs:
    return [None if y is None else y[:, start:stop] for y in x]


def attend(cache: LayerCache, x: Any, valid: Tensor | None = None) -> Tensor:
    positions = torch.zeros(x[0].shape[:2], dtype=torch.int64)
    chunk = Chunk(positions, valid=valid, before=cache.before)
    with torch.no_grad():
        return cache.attend(*x, scale=12**-0.5, chunk=chunk)


def exact(x: Inputs) -> Tensor:
    wide: Any = [None if y is None else y.double() for y in x]
    return definition(*wide, 12**-0.5, None)[0].float()


def in_chunks(x: Inputs, chunks: list[int]) -> Tensor:
    cache, start, outs = LayerCache(unit=64), 0, []
    for length in chunks:
        outs.append(attend(cache, part(x, start, start + length)))
        start += length
    assert cache.kind == "plain" or cache.sealed == (start - 64) // 64 * 64
    return torch.cat(outs, 1)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_chunks_equal_the_whole(poisoned_memory, implementation, encoding):
    x = make(encoding, 1, sum(CHUNKS))
    torch.testing.assert_close(in_chunks(x, CHUNKS), exact(x), **CLOSE)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("chunks", [[300, 1, 1], [200, 100, 2], [1] * 150 + [151, 1]], ids=len)
def test_any_chunks_equal_the_whole(encoding, chunks):
    x = make(encoding, 2, sum(chunks))
    torch.testing.assert_close(in_chunks(x, chunks), exact(x), **CLOSE)


@pytest.mark.parametrize("encoding", ["path_fox", "nope"])
def test_padding_leaves_no_trace(poisoned_memory, implementation, encoding):
    """Rows that are shorter than their chunk, whose rest is garbage."""
    rows = [make(encoding, 1, int(n)) for n in LENGTHS.sum(1)]
    cache, outs = LayerCache(unit=64), [[], []]
    starts = torch.zeros(2, dtype=torch.int64)
    for n, width in enumerate(WIDTHS):
        padded = make(encoding, 2, width)
        for row, x in enumerate(rows):
            some = part(x, int(starts[row]), int(starts[row] + LENGTHS[row, n]))
            for y, z in zip(padded, some, strict=True):
                if y is not None and z is not None:
                    y[row, : z.shape[1]] = z[0]
        valid = torch.arange(width) < LENGTHS[:, n, None]
        got = attend(cache, padded, valid)
        starts += LENGTHS[:, n]
        for row in range(2):
            outs[row].append(got[row, valid[row]])
    for row, x in enumerate(rows):
        torch.testing.assert_close(torch.cat(outs[row])[None], exact(x), **CLOSE)


@pytest.mark.parametrize("padded", [False, True])
def test_masks_are_never_large(monkeypatch, padded):
    """Where one call of SDPA would want a large mask, the past is attended in pieces."""
    x, cache = make("nope", 2, 40), LayerCache()
    valid = torch.arange(40) < torch.tensor([[40], [20]])
    monkeypatch.setattr("path_attention.nn.cache._MASK_AT_ONCE", 2 * 39)
    outs = []
    for start, stop in ((0, 10), (10, 20), (20, 37), (37, 40)):
        now = valid[:, start:stop] if padded else None
        outs.append(attend(cache, part(x, start, stop), now))
    got, whole = torch.cat(outs, 1), exact(x)
    torch.testing.assert_close(got[0], whole[0], **CLOSE)
    torch.testing.assert_close(got[1, :20], whole[1, :20], **CLOSE)


class Largest(TorchDispatchMode):
    """The most elements of a tensor that is made, views apart."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not out._is_view():
            self.size = max(self.size, out.numel())
        return out


def test_what_a_chunk_takes_does_not_grow_with_the_past():
    """By kernels, over one group of units and over five; each has its own matrix for the rows."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled here")
    q, sizes = torch.randn(1, 20, 2, 8), []
    units = {"suffix": torch.randn(1, 1, 2, 8, 8), "after": torch.randn(1, 2, 8, 8)}
    group = decode.KeyGroup(torch.randn(1, 64, 2, 8), torch.randn(1, 64, 2, 8), **units)
    for groups in (1, 5):
        past = decode.Past((group,) * groups)
        with pytest.MonkeyPatch.context() as patch, Largest() as largest:
            patch.setattr("path_attention.ops.triton.decode._MOVED_AT_ONCE", q.numel())
            out, _ = decode.decode_attention(q, past, scale=0.3, implementation="triton")
        right, _ = decode.decode_attention(q, past, scale=0.3, implementation="torch")
        torch.testing.assert_close(out, right, **CLOSE)
        sizes.append(largest.size)
    assert sizes[0] == sizes[1]
