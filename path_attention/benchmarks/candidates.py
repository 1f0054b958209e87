"""What the benchmarks compare: our implementations, anchors, and peers if installed.

A candidate is a name, the encodings that it computes, and `make(inputs, encoding)`, which returns a
function without arguments whose result is the output `[B, T, HQ, D]`. Encodings: "path" (transport
by Householder factors), "path_fox" (and a forget gate), "fox" (the gate alone), "nope" (neither),
"alibi" (in place of the gate a constant of each head, which takes no gradient).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from path_attention.benchmarks.inputs import Inputs
from path_attention.nn.encoding import alibi_log_forget
from path_attention.ops.path import IMPLEMENTATIONS, path_attention

ENCODINGS = ("path", "path_fox", "fox", "nope", "alibi")
_MASK_BLOCK = 128  # FlexAttention's own choice
Call = Callable[[], Tensor]
Layout = Literal["batch", "packed"]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One row of the comparison.

    Attributes:
        name: as in the results.
        encodings: that it computes, of `ENCODINGS`.
        make: (inputs, encoding) → the call to time.
        devices: "cpu", "cuda", or both.
        layouts: "batch" (equal lengths), "packed" (documents behind one another), or both.
        module: that it needs besides torch, or None.
        ours: held to the definition; a benchmark of time refuses to run if it fails. A peer's error
            is written beside its time.
    """

    name: str
    encodings: tuple[str, ...]
    make: Callable[[Inputs, str], Call]
    devices: tuple[str, ...] = ("cuda",)
    layouts: tuple[Layout, ...] = ("batch",)
    module: str | None = None
    ours: bool = False

    def runs_on(self, device_type: str, layout: Layout) -> bool:
        """Whether it can run here: device and layout are its own, its module is installed."""
        installed = self.module is None or importlib.util.find_spec(self.module) is not None
        return device_type in self.devices and layout in self.layouts and installed


def candidates(device_type: str, layout: Layout = "batch") -> list[Candidate]:
    """All candidates for a device; the first one is the anchor that ratios refer to."""
    return [c for c in _CANDIDATES if c.runs_on(device_type, layout)]


def _ours(name: str) -> Callable[[Inputs, str], Call]:
    def make(x: Inputs, encoding: str) -> Call:
        w, beta = (x.w, x.beta) if encoding.startswith("path") else (None, None)
        log_forget = x.log_forget if encoding.endswith("fox") else None
        if encoding == "alibi":
            log_forget = alibi_log_forget(x.q, x.q.shape[2])
        options: dict[str, Any] = {"scale": x.scale, "cu_seqlens": x.packing}
        return lambda: path_attention(
            x.q, x.k, x.v, w, beta, log_forget, implementation=name, **options
        )

    return make


def _sdpa(*backends: SDPBackend) -> Callable[[Inputs, str], Call]:
    def make(x: Inputs, encoding: str) -> Call:
        def call() -> Tensor:
            with sdpa_kernel(list(backends)):
                return _plain(x.q, x.k, x.v, x.scale)

        return call

    return make


def _plain(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def _sdpa_by_document(x: Inputs, encoding: str) -> Call:
    lengths = x.borders.lengths

    def call() -> Tensor:
        documents = zip(*(y.split(lengths, 1) for y in (x.q, x.k, x.v)), strict=True)
        return torch.cat([_plain(q, k, v, x.scale) for q, k, v in documents], 1)

    return call


def _flash_varlen(x: Inputs, encoding: str) -> Call:
    """PyTorch's flash attention of packed documents."""
    borders, longest = x.borders.cu_seqlens, max(x.borders.lengths)
    common = (borders, borders, longest, longest)
    scale: dict[str, Any] = {} if x.scale is None else {"scale": x.scale}
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        flash = torch.ops.aten._flash_attention_forward

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flash(q, k, v, *common, 0.0, True, False, **scale)[0]
    else:
        varlen: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        named = "is_causal" in inspect.signature(varlen).parameters  # before torch 2.11
        causal: dict[str, Any] = {"is_causal": True} if named else {"window_size": (-1, 0)}

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return varlen(q, k, v, *common, **causal, **scale)

    return lambda: attend(*(y.flatten(0, 1) for y in (x.q, x.k, x.v))).unflatten(0, (1, -1))


def _flex_attention(x: Inputs, encoding: str) -> Call:
    from torch.nn.attention.flex_attention import flex_attention

    mask = causal_block_mask(x.q.shape[1], x.q.device)
    # Each length is compiled; the limit on recompilations of one function is for all of them.
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def call() -> Tensor:
        q, k, v = (y.transpose(1, 2) for y in (x.q, x.k, x.v))
        grouped = q.shape[1] != k.shape[1]
        out: Any = compiled(q, k, v, block_mask=mask, scale=x.scale, enable_gqa=grouped)
        return out.transpose(1, 2)

    return call


def causal_block_mask(T: int, device: torch.device):
    """FlexAttention's causal `BlockMask`, made from its blocks: the T² mask is never there."""
    from torch.nn.attention.flex_attention import BlockMask

    n = -(-T // _MASK_BLOCK)
    column = torch.arange(n, dtype=torch.int32, device=device)
    whole, indices = column.clone(), column.expand(n, n).clone()  # before the diagonal
    partial, of_partial = torch.ones_like(column), indices.roll(1, 1)
    of_partial[:, 0] = column
    if T % _MASK_BLOCK:  # in a row of blocks that is not full none is whole
        whole[-1], partial[-1], of_partial[-1] = 0, n, column
    return BlockMask.from_kv_blocks(
        *(x[None, None] for x in (partial, of_partial, whole, indices)),
        BLOCK_SIZE=_MASK_BLOCK,
        mask_mod=_causal,
        seq_lengths=(T, T),
    )


def _causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def _fla(x: Inputs, encoding: str) -> Call:
    """flash-linear-attention's operators.

    They take the gate and PaTH's w (‖w‖ = 1) and β in float32; PaTH-FoX's gate they multiply by the
    scale. At head sizes below 64 PaTH's backward pass reads outside its memory, so heads are filled
    up with zeros there.
    """
    D, DV = x.q.shape[3], x.v.shape[3]
    scale = D**-0.5 if x.scale is None else x.scale
    size = 64 if max(D, DV) <= 64 else 128
    borders = None if x.packing is None else x.packing.cu_seqlens.long()

    def filled(y: Tensor | None) -> Tensor | None:
        return y if y is None or y.shape[-1] >= size else F.pad(y, (0, size - y.shape[-1]))

    if encoding == "fox":
        fox = importlib.import_module("fla.ops.forgetting_attn").parallel_forgetting_attn

        def attend(q: Any, k: Any, v: Any, w: Any) -> Tensor:
            return fox(q, k, v, x.log_forget, scale=scale, cu_seqlens=borders)
    else:
        path = importlib.import_module("fla.ops.path_attn").parallel_path_attn

        def attend(q: Any, k: Any, v: Any, w: Any) -> Tensor:
            gate = None
            if encoding == "path_fox" and x.log_forget is not None:
                gate = x.log_forget / scale
            return path(q, k, v, w, x.beta, g=gate, scale=scale, cu_seqlens=borders)[0]

    return lambda: attend(*(filled(y) for y in (x.q, x.k, x.v, x.w)))[..., :DV]


DEFINITION = Candidate(name="definition", encodings=ENCODINGS, make=_ours("definition"))
_CANDIDATES = (
    Candidate(
        name="sdpa",
        encodings=("nope",),
        make=_sdpa(SDPBackend.FLASH_ATTENTION, SDPBackend.MATH),
        devices=("cpu",),
    ),
    Candidate(
        name="sdpa",
        encodings=("nope",),
        make=_sdpa_by_document,
        devices=("cpu",),
        layouts=("packed",),
    ),
    Candidate(name="flash_varlen", encodings=("nope",), make=_flash_varlen, layouts=("packed",)),
    Candidate(name="sdpa_cudnn", encodings=("nope",), make=_sdpa(SDPBackend.CUDNN_ATTENTION)),
    Candidate(name="sdpa_flash", encodings=("nope",), make=_sdpa(SDPBackend.FLASH_ATTENTION)),
    Candidate(name="flex_attention", encodings=("nope",), make=_flex_attention),
    Candidate(
        name="fla",
        encodings=("path", "path_fox", "fox"),
        make=_fla,
        layouts=("batch", "packed"),
        module="fla",
    ),
    *(
        Candidate(
            name=name,
            encodings=ENCODINGS,
            make=_ours(name),
            devices=("cuda",) if name == "triton" else ("cpu", "cuda"),
            layouts=("batch", "packed"),
            module="triton" if name == "triton" else None,
            ours=True,
        )
        for name in IMPLEMENTATIONS
        if name != "definition"
    ),
)
